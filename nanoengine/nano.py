"""An LLM inference engine in one file. It runs alone: copy it anywhere, and pass --model.

    python -m nanoengine.nano "What is 27 + 58?" "Who are you?"        # the bundled model answers a batch
    python -m nanoengine.nano --model Qwen/Qwen3-0.6B "Who are you?"   # any Qwen3, Qwen2 or Llama checkpoint
    python -m nanoengine.nano --model Qwen/Qwen3-0.6B --bench          # nano-vllm's benchmark
    python -m benchmarks --engine nano.py,transformers --workload decode   # in the repository: 1.3 x as fast

Each step of the engine does the following:

    chunks = scheduler.schedule()          # choose which tokens to compute, in which cache blocks
    token_ids = model_runner.run(chunks)   # run the model; sample where no token is left to compute
    scheduler.update(chunks, token_ids)    # append the tokens, finish sequences, free their blocks

Read it top to bottom: the headings name the lessons in docs/ that explain each part. Glossary:

    block           the cache memory for `block_size` consecutive tokens of a sequence
    block_table     a sequence's blocks: the i-th holds its tokens [i * block_size, (i + 1) * block_size)
    slot            one token's place in the cache. With block_size 4 and block_table [7, 2], the token at
                    position 5 is at offset 1 of block_table[1], which is block 2: slot 2 * 4 + 1 = 9
    null block      block 0. No sequence owns it: K and V that nobody will read are written there
    computed        a token whose K and V are in the cache, or which the scheduled step computes
    chunk           the tokens of one sequence that one step computes: a prompt, a part of one, or the token
                    that was sampled last (a decode)
    registered      a full block that the prefix cache can find by its tokens and all tokens before them
    hit             a registered block that a sequence reuses when it is admitted; its tokens are hits too
    token budget    how many tokens one step may compute, `max_num_batched_tokens`
    preempt         free a running sequence's blocks; the sequence keeps its tokens and is recomputed later

Shape letters: T tokens in a step, S sequences, R sampled tokens, E hidden size, H query heads, K key/value
heads, D head_dim, L keys, V vocabulary.
"""

import argparse
import itertools
import math
import random
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from xxhash import xxh3_64_intdigest

try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
except ImportError:  # not installed: PyTorch computes attention
    flash_attn_varlen_func = None

Array = np.ndarray[Any, Any]
Cache = tuple[Tensor, Tensor]  # the keys and values of one layer, each (blocks, block_size, K, D)


# ---- Model (lesson 1) ----------------------------------------------------------------------------
class Model:
    """Computes Llama, Qwen2 or Qwen3 for a flat batch: the rows of all sequences end to end, not padded."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.config = config = AutoConfig.from_pretrained(path)
        rope, self.weights = getattr(config, "rope_parameters", None) or {}, dict[str, Tensor]()
        for name, value, supported in [
            ("model_type", config.model_type, ("llama", "qwen2", "qwen3")),
            ("hidden_act", getattr(config, "hidden_act", None), ("silu",)),
            ("rope_type", rope.get("rope_type"), ("default", "llama3")),
            ("partial_rotary_factor", rope.get("partial_rotary_factor", 1), (1,)),
            ("use_sliding_window", getattr(config, "use_sliding_window", False), (False,)),
            ("quantization_config", getattr(config, "quantization_config", None), (None,)),
        ]:
            if value not in supported:
                raise ValueError(f"{name} {value!r} is not supported, only one of {supported}")
        for file in path.glob("*.safetensors"):  # read straight to the device
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118  it is not a dict
                    self.weights[name] = tensors.get_tensor(name).to(dtype or config.dtype)
        self.embedding = self.weights["model.embed_tokens.weight"]  # (V, E)
        self.lm_head = self.embedding if config.tie_word_embeddings else self.weights["lm_head.weight"]
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.has_qk_norm, self.eps = config.model_type == "qwen3", config.rms_norm_eps
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.frequencies = rope_frequencies(rope, self.head_dim).to(self.device)
        has_kernels = self.device.type == "cuda" and self.dtype.itemsize == 2 and self.head_dim % 8 == 0
        self.use_flash = has_kernels and flash_attn_varlen_func is not None

    def __call__(self, inputs: "ModelInputs", caches: list[Cache]) -> Tensor:
        """Write the K and V of a step's tokens to the caches, and return their hidden states, (T, E)."""
        inputs = inputs._replace(slot_mapping=inputs.slot_mapping.long())  # int32 is for flash-attn
        angles = (inputs.positions.unsqueeze(1) * self.frequencies).repeat(1, 2).unsqueeze(1)  # (T, 1, D)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        x = F.embedding(inputs.input_ids, self.embedding)
        for i, cache in enumerate(caches):
            at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            h = self.norm(x, f"model.layers.{i}.input_layernorm")
            q, k, v = (self.linear(h, f"{at}.{name}_proj").view(len(h), -1, self.head_dim) for name in "qkv")
            if self.has_qk_norm:
                q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            attended = attention(q, k, v, cache, inputs, self.use_flash)
            x = x + self.linear(attended.flatten(1), f"{at}.o_proj")
            h = self.norm(x, f"model.layers.{i}.post_attention_layernorm")
            gate, up = self.linear(h, f"{mlp}.gate_proj"), self.linear(h, f"{mlp}.up_proj")
            x = x + self.linear(F.silu(gate) * up, f"{mlp}.down_proj")
        return self.norm(x, "model.norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Divide each row of x by its root mean square, and multiply by the weight."""
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return x @ weight.T, plus the bias if there is one."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of x (T, heads, D) by their token's angles. Source: https://arxiv.org/abs/2104.09864."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return the radians per position by which dimensions i and i + D / 2 turn, (D / 2,)."""
    frequencies: Tensor = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope["rope_type"] == "llama3":  # rotates slow pairs even more slowly, for longer contexts
        num_turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((num_turns - low) / (high - low)).clamp(0, 1)  # 1: turns fast enough to stay as it is
        frequencies = keep * frequencies + (1 - keep) * frequencies / rope["factor"]
    return frequencies


# ---- Attention over the paged KV cache (lessons 2, 4 and 10) -------------------------------------
class ModelInputs(NamedTuple):
    """Describes a step. The first 7 fields are int32 arrays, which `send` (below) turns into tensors."""

    input_ids: Any  # (T,)
    positions: Any  # (T,)
    slot_mapping: Any  # (T,)  the slots that the tokens' K and V are written to
    cu_seqlens_q: Any  # (S + 1,)  sequence i has the rows [cu_seqlens_q[i], cu_seqlens_q[i + 1])
    cu_seqlens_k: Any  # (S + 1,)  the running totals of seq_lens, from 0
    seq_lens: Any  # (S,)  the number of keys that each sequence attends to
    block_tables: Any  # (S, longest table), padded with the null block
    query_lens: list[int]  # (S,)  the number of rows of each sequence; stays on the host
    key_lens: list[int]  # (S,)  seq_lens again, on the host: reading a GPU's tensor would wait


def attention(q: Tensor, k: Tensor, v: Tensor, cache: Cache, inputs: ModelInputs, use_flash: bool) -> Tensor:
    """Write K and V to their slots, then let each token attend to its sequence's tokens up to its own.

    All K and V are written first: a sequence may hit blocks that another fills in this step. q and
    the result are (T, H, D), k and v (T, K, D). Source: PagedAttention, https://arxiv.org/abs/2309.06180
    """
    for new, stored in zip((k, v), cache, strict=True):
        stored.flatten(0, 1).index_copy_(0, inputs.slot_mapping, new)
    if not use_flash:
        return gathered_attention(q, cache, inputs)
    how = {"causal": True, "block_table": inputs.block_tables}  # causal: the last query sees the last key
    if max(inputs.query_lens) == 1:  # only decodes: no length comes from the host, so a graph can replay it
        out = flash_attn_with_kvcache(q.unsqueeze(1), *cache, cache_seqlens=inputs.seq_lens, **how).squeeze(1)
    else:
        lens = inputs.cu_seqlens_q, inputs.cu_seqlens_k, max(inputs.query_lens), max(inputs.key_lens)
        out = flash_attn_varlen_func(q, *cache, *lens, **how)
    return out  # type: ignore[no-any-return]


def gathered_attention(q: Tensor, cache: Cache, inputs: ModelInputs) -> Tensor:
    """Attend in PyTorch, which cannot read through block tables: gather the blocks of each sequence first."""
    out, by_length = torch.empty_like(q), dict[int, list[int]]()
    for i, length in enumerate(inputs.query_lens):
        by_length.setdefault(length, []).append(i)
    for length, seqs in by_length.items():  # one call for all decodes, and for chunks of the same length
        key_len = max(inputs.key_lens[i] for i in seqs)  # shorter sequences are padded
        tables = inputs.block_tables[seqs, : num_blocks_for(key_len, cache[0].shape[1])]
        gathered = (x.index_select(0, tables.flatten()).view(len(seqs), -1, *x.shape[2:]) for x in cache)
        k, v = (x[:, :key_len].transpose(1, 2) for x in gathered)  # (sequences, K, L, D)
        rows = inputs.cu_seqlens_q[seqs].unsqueeze(1) + torch.arange(length, device=q.device)
        last_seen = inputs.positions[rows].view(len(seqs), 1, -1, 1)  # a token sees the keys up to its own
        is_seen = torch.arange(key_len, device=q.device) <= last_seen
        attended = F.scaled_dot_product_attention(q[rows].transpose(1, 2), k, v, is_seen, enable_gqa=True)
        out[rows] = attended.transpose(1, 2)
    return out


# ---- Sequence and BlockManager: which sequence holds which block, and what is in it (lessons 4 to 6) ----
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Says how to choose the tokens of an answer, and when to stop."""

    temperature: float = 1.0  # 0: always take the most probable token
    top_k: int = 0  # sample from the k most probable tokens; 0: from all
    top_p: float = 1.0  # sample from the most probable tokens that together have this probability
    max_tokens: int = 64
    ignore_eos: bool = False  # continue after an end-of-sequence token
    seed: int | None = None  # None: a random one

    def __post_init__(self) -> None:
        in_range = self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and self.max_tokens >= 1
        if not in_range or any(number % 1 for number in (self.top_k, self.max_tokens, self.seed or 0)):
            raise ValueError(f"needs temperature, integer top_k >= 0, max_tokens > 0, 0 < top_p <= 1: {self}")


@dataclass(slots=True, eq=False)
class Sequence:
    """Holds the tokens of a prompt and its answer, and the blocks that store their K and V.

    Example: a prompt of 10 tokens in blocks of 4, the first 8 already computed for another sequence.

                       block_table   known tokens  num_hit_tokens  num_computed_tokens  num_registered_blocks
        waiting        []            10            0               0                    0
        admitted       [5, 6, 9]     10            8               8                    2
        scheduled      [5, 6, 9]     10            8               10                   2
        updated        [5, 6, 9]     11            8               10                   2
        2 steps later  [5, 6, 9]     13            8               12                   3
        one more       [5, 6, 9, 3]  14            8               13                   3
    """

    token_ids: list[int]  # prompt, then answer; only the scheduler appends
    params: SamplingParams
    num_prompt_tokens: int
    seed: int = 0  # 64 bits
    stop_ids: frozenset[int] = frozenset()  # sampling one of these ends the sequence
    max_num_tokens: int = 0  # limit on prompt plus answer
    is_finished: bool = False
    # Written by the block manager. The scheduler also writes num_computed_tokens while the sequence runs.
    block_table: list[int] = field(default_factory=list)  # empty while waiting
    num_computed_tokens: int = 0
    num_hit_tokens: int = 0  # tokens in hit blocks, which others may read: they are not written again
    num_registered_blocks: int = 0  # leading blocks that are registered, or equal to one that is
    prefix_id: int = 0  # stands for all tokens of those blocks (see Block); 0: there are none
    block_keys: list[tuple[int, bytes]] = field(default_factory=list)  # hash and content of each full block


@dataclass(slots=True, eq=False)
class Block:
    """Describes one physical block. A freed registered block can be hit until it is evicted."""

    block_id: int
    ref_count: int = 0  # the number of block tables that contain it
    key: tuple[int, bytes] | None = None  # hash and content; None: not registered
    parent_id: int = 0  # prefix_id of the block before it; 0: it is the first one
    prefix_id: int = 0  # serial number of the prefix that ends with this block: unlike a hash, unique


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks needed for num_tokens tokens."""
    return -(-num_tokens // block_size)


class BlockManager:
    """Allocates blocks, lets sequences share prefixes, and evicts the least recently used blocks.

    Every block but the null block is either in use or free. Free blocks without registered content are reused
    first, then registered ones, least recently used first. A hit is verified by its content and by the prefix
    before it, so a hash collision costs a miss, and never gives a sequence the K and V of other tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size  # the null block is not counted
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self.empty_blocks = deque(self.blocks[1:])  # free, without registered content
        self.evictable_blocks: OrderedDict[int, Block] = OrderedDict()  # free and registered, by block_id
        self.registered_blocks: dict[int, Block] = {}  # by hash
        self.prefix_ids = itertools.count(1)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence holds."""
        return len(self.empty_blocks) + len(self.evictable_blocks)

    def allocate(self, seq: Sequence) -> bool:
        """Give a sequence its hits, and blocks for its other tokens. False: too few are free."""
        hits = self.find_prefix(seq)
        num_new = num_blocks_for(len(seq.token_ids), self.block_size) - len(hits)
        num_revived = sum(block.ref_count == 0 for block in hits)  # free until now, so they count too
        if num_new + num_revived > self.num_free_blocks:
            return False
        for block in hits:  # first, or `_take_free_block` might evict one of them
            self.evictable_blocks.pop(block.block_id, None)
            block.ref_count += 1
        seq.block_table = [b.block_id for b in hits] + [self._take_free_block() for _ in range(num_new)]
        seq.num_registered_blocks = len(hits)
        seq.prefix_id = hits[-1].prefix_id if hits else 0
        seq.num_hit_tokens = len(hits) * self.block_size
        # Even if all tokens are hits, the last one is computed again: its logits choose the next token.
        seq.num_computed_tokens = min(seq.num_hit_tokens, len(seq.token_ids) - 1)
        return True

    def may_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the block table to hold num_tokens tokens. False: too few blocks are free; nothing changed."""
        num_new = num_blocks_for(num_tokens, self.block_size) - len(seq.block_table)
        if num_new > self.num_free_blocks:
            return False
        seq.block_table += [self._take_free_block() for _ in range(num_new)]
        return True

    def free(self, seq: Sequence) -> None:
        """Release a sequence's blocks, the last one first, so that tails are evicted before prefixes."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0 and block.key is None:
                self.empty_blocks.appendleft(block)  # reused first: the processor may still cache it
            elif block.ref_count == 0:
                self.evictable_blocks[block_id] = block
        seq.block_table = []
        seq.num_computed_tokens = seq.num_hit_tokens = seq.num_registered_blocks = seq.prefix_id = 0

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """Return the registered blocks that hold the sequence's first tokens, up to the first miss."""
        hits: list[Block] = []
        for key in self.hash_full_blocks(seq) if self.enable_prefix_caching else ():
            if (block := self._find(key, hits[-1].prefix_id if hits else 0)) is None:
                break
            hits.append(block)
        return hits

    def register_full_blocks(self, seq: Sequence) -> None:
        """Register the blocks that are now full of computed tokens, unless their hash is registered."""
        num_full_blocks = seq.num_computed_tokens // self.block_size if self.enable_prefix_caching else 0
        for i in range(seq.num_registered_blocks, num_full_blocks):
            key, block = self.hash_full_blocks(seq)[i], self.blocks[seq.block_table[i]]
            if (twin := self._find(key, seq.prefix_id)) is None:  # no equal block is registered
                block.parent_id, block.prefix_id = seq.prefix_id, next(self.prefix_ids)
                if key[0] not in self.registered_blocks:  # else another prefix has this hash
                    block.key, self.registered_blocks[key[0]] = key, block
            seq.prefix_id = (twin or block).prefix_id  # equal prefixes share an id
            seq.num_registered_blocks = i + 1

    def hash_full_blocks(self, seq: Sequence) -> list[tuple[int, bytes]]:
        """Return the key of each full block. Hashes are chained: each is seeded with the hash before it."""
        for i in range(len(seq.block_keys), len(seq.token_ids) // self.block_size):
            content = array("i", seq.token_ids[i * self.block_size : (i + 1) * self.block_size]).tobytes()
            parent_hash = seq.block_keys[-1][0] if i else 0
            seq.block_keys.append((xxh3_64_intdigest(content, parent_hash), content))
        return seq.block_keys

    def _find(self, key: tuple[int, bytes], parent_id: int) -> Block | None:
        """Return the registered block with exactly this content after exactly this prefix."""
        block = self.registered_blocks.get(key[0])
        return block if block is not None and block.key == key and block.parent_id == parent_id else None

    def _take_free_block(self) -> int:
        """Take an empty block, or else evict the least recently used registered block. Return its id."""
        if self.empty_blocks:
            block = self.empty_blocks.popleft()
        else:
            _, block = self.evictable_blocks.popitem(last=False)
            assert block.key is not None
            del self.registered_blocks[block.key[0]]
            block.key = None
        block.ref_count = 1
        return block.block_id


# ---- Scheduler: which tokens to compute next (lessons 7 to 9) ------------------------------------
class Chunk(NamedTuple):
    """Holds the tokens [start, end) of a sequence, which one step computes."""

    seq: Sequence
    start: int
    end: int
    samples: bool  # whether a token is sampled: true if the chunk computes all tokens that were left


class Scheduler:
    """Decides, for each step, which sequences to compute and how many tokens of each.

    There is no prefill phase and no decode phase. A sequence has `len(token_ids) - num_computed_tokens`
    tokens left to compute, and each step spends its token budget on running sequences first, then on waiting
    ones (continuous batching). A decode has one token left. A long prompt gets what the budget allows
    (chunked prefill): with a budget of 4, a prompt of 10 tokens runs as the chunks [0, 4), [4, 8) and
    [8, 10), and only the last one samples. A preempted sequence is computed again. Both queues are in order
    of arrival, and only the head of the waiting queue is admitted.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        # The last token of an answer is not computed and needs no slot: hence + 1.
        self.max_num_tokens = min(max_model_len, block_manager.num_blocks * block_manager.block_size + 1)
        self.waiting: deque[Sequence] = deque()  # these sequences hold no blocks
        self.running: list[Sequence] = []  # these hold at least one block each
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its prompt must be shorter than max_num_tokens: one output token has to fit."""
        seq.max_num_tokens = min(self.max_num_tokens, seq.num_prompt_tokens + seq.params.max_tokens)
        self.waiting.append(seq)

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next step, and count their tokens as computed."""
        chunks: list[Chunk] = []
        budget, num_preemptions = self.max_num_batched_tokens, self.num_preemptions
        while len(chunks) < len(self.running) and budget > 0:  # preemptions remove from the end of running
            seq = self.running[len(chunks)]  # those before it have a chunk each
            if not self._make_room(seq):
                break
            chunks.append(self._schedule_chunk(seq, budget))
            budget -= chunks[-1].end - chunks[-1].start
        may_admit = num_preemptions == self.num_preemptions  # blocks are scarce in a step that preempts
        while may_admit and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            if not self.block_manager.allocate(self.waiting[0]):
                break  # sequences behind it wait too, even if they would fit
            self.running.append(self.waiting.popleft())
            chunks.append(self._schedule_chunk(self.running[-1], budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _make_room(self, seq: Sequence) -> bool:
        """Grow the block table, preempting the last sequences if needed. False: this one was preempted."""
        while not self.block_manager.may_append(seq, len(seq.token_ids)):
            last = self.running.pop()
            self.block_manager.free(last)
            self.waiting.appendleft(last)
            self.num_preemptions += 1
            if last is seq:
                return False
        return True

    def _schedule_chunk(self, seq: Sequence, budget: int) -> Chunk:
        """Schedule as many of the sequence's uncomputed tokens as the budget allows."""
        start, num_tokens = seq.num_computed_tokens, len(seq.token_ids)
        seq.num_computed_tokens = end = min(num_tokens, start + budget)
        self.block_manager.register_full_blocks(seq)
        return Chunk(seq, start, end, samples=end == num_tokens)

    def update(self, chunks: list[Chunk], token_ids: list[int]) -> list[Sequence]:
        """Append the sampled tokens, one for each chunk that samples. Return the sequences that finished."""
        seqs = [chunk.seq for chunk in chunks if chunk.samples]
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.token_ids.append(token_id)
            if token_id in seq.stop_ids or len(seq.token_ids) >= seq.max_num_tokens:
                seq.is_finished = True
                self.block_manager.free(seq)
        self.running = [seq for seq in self.running if not seq.is_finished]
        return [seq for seq in seqs if seq.is_finished]


# ---- build_inputs: chunks as arrays (lessons 4 and 12) -------------------------------------------
def build_inputs(chunks: list[Chunk], block_size: int) -> ModelInputs:
    """Lay out chunks as arrays, without a Python loop over tokens.

    Example with blocks of 4: a sequence with block table [7, 2] decodes token 31 at position 4, and one with
    block table [3] computes tokens 22, 23 at positions 2, 3.

        input_ids     31 22 23        cu_seqlens_q  0 1 3    seq_lens      5 4
        positions     4  2  3         cu_seqlens_k  0 5 9    block_tables  [7, 2] [3, 0]
        slot_mapping  8  14 15
    """
    seqs, starts, ends, _ = zip(*chunks, strict=True)
    first_positions, seq_lens = np.array(starts), np.array(ends)
    query_lens = seq_lens - first_positions
    input_ids = np.array(list(itertools.chain.from_iterable(seq.token_ids[a:b] for seq, a, b, _ in chunks)))
    cu_seqlens_q, cu_seqlens_k = (np.concatenate(([0], lens.cumsum())) for lens in (query_lens, seq_lens))
    tables = [seq.block_table for seq in seqs]
    block_tables = np.array(list(itertools.zip_longest(*tables, fillvalue=0))).T  # padded: (S, longest)
    seq_of_row = np.repeat(np.arange(len(seqs)), query_lens)
    # Position of a row: its offset within its sequence's rows, plus the position where the chunk starts.
    positions = np.arange(len(input_ids)) - cu_seqlens_q[seq_of_row] + first_positions[seq_of_row]
    slot_mapping = map_slots(block_tables, seq_of_row, positions, block_size)
    # The last token of a prompt that is all hits is computed again, only for its logits. Its K and V are
    # already in a shared block, so the new ones go to the null block, whose slots are 0 to block_size - 1.
    num_hit_tokens = np.array([seq.num_hit_tokens for seq in seqs])
    slot_mapping[positions < num_hit_tokens[seq_of_row]] %= block_size
    arrays = input_ids, positions, slot_mapping, cu_seqlens_q, cu_seqlens_k, seq_lens, block_tables
    int32 = [np.ascontiguousarray(x, np.int32) for x in arrays]
    return ModelInputs._make([*int32, query_lens.tolist(), list(ends)])


def map_slots(block_tables: Array, seq_of_row: Array, positions: Array, block_size: int) -> Array:
    """Return each row's slot, (T,). Row i's block table is block_tables[seq_of_row[i]]."""
    blocks: Array = block_tables[seq_of_row, positions // block_size]
    return blocks * block_size + positions % block_size  # type: ignore[no-any-return]


def pad_decodes(inputs: ModelInputs, padding: ModelInputs) -> ModelInputs:
    """Return a copy of `padding` (decodes in the null block) whose first rows are those of `inputs`."""
    padded = ModelInputs._make([*(x.copy() for x in padding[:7]), *padding[7:]])
    for whole, part in zip(padded[:7], inputs[:7], strict=True):
        whole[tuple(map(slice, part.shape))] = part  # the top left corner
    return padded


def send(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    """Copy the arrays to tensors on the device."""
    tensors = [torch.from_numpy(x).to(device, non_blocking=True) for x in inputs[:7]]
    return ModelInputs._make([*tensors, *inputs[7:]])


# ---- Sampling (lesson 13) ------------------------------------------------------------------------
def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on a seed and a position, and not on the rest of the batch."""
    return (xxh3_64_intdigest(position.to_bytes(8, "little"), seed) >> 11) / 2**53  # 53 random bits


def keep_probable(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k most probable tokens (0: all), then the fewest of them whose sum is at least top_p."""
    shares, order = probabilities.sort(dim=-1, descending=True, stable=True)
    shares = shares * ((torch.arange(shares.shape[1], device=shares.device) < top_k) | (top_k == 0))
    shares = shares / shares.sum(-1, keepdim=True)
    shares = shares * ((shares.cumsum(-1) - shares < top_p) | (top_p == 1))  # a rounded sum reaches 1 early
    return torch.zeros_like(shares).scatter(-1, order, shares / shares.sum(-1, keepdim=True))


def sample(logits: Tensor, temperature: Array, top_k: Array, top_p: Array, u: Array) -> Tensor:
    """Return a token for each row of logits (R, V): the most probable at temperature 0, else a random one.

    The probabilities are laid end to end from 0 to 1, and the token whose interval contains u is taken.
    """
    if not temperature.any():
        return logits.argmax(-1)
    settings = torch.from_numpy(np.stack((temperature, top_k, top_p, u)))
    t, k, p, numbers = settings.to(logits.device, non_blocking=True).unsqueeze(2)  # (R, 1) each
    is_sampled = t > 1e-5  # lower ones are taken for 0: the quotient might overflow
    probabilities = (logits / t.where(is_sampled, 1).float()).softmax(-1)  # in float32
    if top_k.any() or (top_p < 1).any():
        probabilities = keep_probable(probabilities, k, p)
    ends = probabilities.double().cumsum_(-1)  # where each token's interval ends
    total = ends[:, -1:]  # u * total may be rounded up to total, for which searchsorted would return V
    numbers = torch.minimum(numbers * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(ends, numbers, right=True)
    if temperature.min() <= 1e-5:
        tokens = tokens.where(is_sampled, logits.argmax(-1, keepdim=True))
    return tokens.squeeze(1)


# ---- ModelRunner: from chunks to sampled tokens (lesson 12) --------------------------------------
def capture(compute: Callable[[], Tensor], pool: Any) -> tuple[Tensor, Callable[[], None]]:
    """Record a function's kernels as a CUDA graph. Return its result, and a function that replays them."""
    compute()  # kernels allocate and tune what they need when they run for the first time
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        out = compute()
    return out, graph.replay


class ModelRunner:
    """Owns the model, the KV cache and the CUDA graphs, and turns chunks into sampled tokens."""

    def __init__(self, model: Model, block_size: int) -> None:
        self.model, self.block_size, self.device = model, block_size, model.device
        # By batch size: padding, the tensors that the graph reads, its hidden states, and how to replay it.
        self.graphs: dict[int, tuple[ModelInputs, ModelInputs, Tensor, Callable[[], None]]] = {}
        self.allocate_kv_cache(0)  # for now, only the null block: `count_blocks` reads its size
        self.warm_up(1, 1)  # a missing tensor raises KeyError now

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make a cache with num_blocks blocks and the null block for each layer."""
        config, dtype = self.model.config, self.model.dtype
        shape = num_blocks + 1, self.block_size, config.num_key_value_heads, self.model.head_dim
        # Zeros, because a kernel may mask a value by multiplying it by 0, and 0 * NaN is NaN.
        zeros = partial(torch.zeros, shape, dtype=dtype, device=self.device)
        self.caches = [(zeros(), zeros()) for _ in range(config.num_hidden_layers)]

    def warm_up(self, num_seqs: int, num_tokens: int) -> None:
        """Compute num_tokens tokens of each of num_seqs sequences, in the null block. top_k makes it sort."""
        table = [0] * num_blocks_for(num_tokens, self.block_size)
        seq = Sequence([0] * num_tokens, SamplingParams(top_k=1), num_tokens, block_table=table)
        self.run([Chunk(seq, 0, num_tokens, samples=True)] * num_seqs)

    def count_blocks(self, utilization: float, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return how many blocks fit in 1 GiB or in `utilization` of a GPU, less what a step needs."""
        usable_bytes, block_bytes = 1 << 30, sum(x[0].nbytes for cache in self.caches for x in cache)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.warm_up(max_num_seqs, max_num_batched_tokens // max_num_seqs)
            step_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            usable_bytes = int(total_bytes * utilization) - (total_bytes - free_bytes) - step_bytes
        return usable_bytes // block_bytes - 1  # the null block

    @torch.inference_mode()
    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> None:
        """Capture decodes of a ladder of batch sizes, the largest first: the others reuse its memory."""
        pool, table_width = torch.cuda.graph_pool_handle(), num_blocks_for(max_model_len, self.block_size)
        decode = Chunk(Sequence([0], SamplingParams(), 1, block_table=[0] * table_width), 0, 1, samples=True)
        for size in sorted({min(n, max_num_seqs, 512) for n in (1, 2, 4, 8, *range(16, 513, 16))})[::-1]:
            padding = build_inputs([decode] * size, self.block_size)
            inputs = send(padding, self.device)
            self.graphs[size] = padding, inputs, *capture(partial(self.model, inputs, self.caches), pool)

    def compute(self, inputs: ModelInputs) -> Tensor:
        """Return hidden states: a row for each of the step's tokens, followed by those of any padding."""
        num_seqs = len(inputs.seq_lens)
        if max(inputs.query_lens) > 1 or num_seqs > max(self.graphs, default=0):
            return self.model(send(inputs, self.device), self.caches)
        padding, tensors, hidden, replay = self.graphs[min(n for n in self.graphs if n >= num_seqs)]
        for tensor, x in zip(tensors[:7], pad_decodes(inputs, padding)[:7], strict=True):
            tensor.copy_(torch.from_numpy(x), non_blocking=True)
        replay()
        return hidden

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> list[int]:
        """Compute the chunks' tokens, and return a new token for each chunk that samples."""
        inputs = build_inputs(chunks, self.block_size)
        hidden = self.compute(inputs)
        samples = [chunk.samples for chunk in chunks]
        if not any(samples):
            return []
        rows = torch.from_numpy(inputs.cu_seqlens_q[1:][samples] - 1)  # the last row of each
        sampling = [(chunk.seq.params, chunk.seq.seed, chunk.end) for chunk in chunks if chunk.samples]
        logits = F.linear(hidden[rows.to(self.device, non_blocking=True)], self.model.lm_head)
        settings = [(p.temperature, p.top_k, p.top_p, uniform(seed, end)) for p, seed, end in sampling]
        return sample(logits, *np.array(settings).T).tolist()  # only here, the host waits for the device


# ---- LLM: from prompts to answers ----------------------------------------------------------------
class LLM:
    """Loads a model and answers prompts. It takes nano-vllm's arguments and more, and returns its results."""

    def __init__(
        self,
        model: str | Path,  # a directory with a checkpoint, or a name on the Hugging Face hub
        *,
        device: str | None = None,  # "cpu" or "cuda", which is the current GPU; None: a GPU if there is one
        dtype: str | torch.dtype | None = None,  # of weights and cache; None: the checkpoint's
        kvcache_block_size: int | None = None,  # None: 16, or with flash-attn 256, which it needs
        num_kvcache_blocks: int = -1,  # -1: as many as fit in 1 GiB, or in a GPU
        gpu_memory_utilization: float = 0.9,  # the share of a GPU's memory to use
        max_num_seqs: int = 256,  # limit on running sequences: each needs a token of a step's budget
        max_num_batched_tokens: int = 8192,  # limit on the tokens of a step
        max_model_len: int | None = None,  # limit on prompt plus answer; at most the model's limit
        tensor_parallel_size: int = 1,  # must be 1; nano-vllm's scripts pass it
        enforce_eager: bool = False,  # do not capture CUDA graphs
        enable_prefix_caching: bool = True,
    ) -> None:
        if tensor_parallel_size != 1 or min(max_num_seqs, max_num_batched_tokens) < 1:
            raise ValueError("tensor_parallel_size must be 1, max_num_seqs and max_num_batched_tokens >= 1")
        path = Path(model).expanduser()
        if not path.is_dir():
            files = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
            path = Path(huggingface_hub.snapshot_download(str(model), allow_patterns=files))
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            loaded = Model(path, place, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
            block_size = kvcache_block_size or (256 if loaded.use_flash else 16)
            self.model_runner = runner = ModelRunner(loaded, block_size)
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}") from error
        model_len = min(max_model_len or 1 << 30, loaded.config.max_position_embeddings)
        limits = min(max_num_seqs, max_num_batched_tokens), max_num_batched_tokens, model_len
        if num_kvcache_blocks == -1:
            num_kvcache_blocks = runner.count_blocks(gpu_memory_utilization, *limits[:2])
        if num_kvcache_blocks < 1:
            raise ValueError("no memory is left for the KV cache")
        runner.allocate_kv_cache(num_kvcache_blocks)
        if loaded.use_flash and not enforce_eager:
            runner.capture_graphs(limits[0], model_len)
        names = {file.stem for file in path.glob("*.json")}
        eos = GenerationConfig.from_pretrained(path).eos_token_id if "generation_config" in names else None
        eos = loaded.config.eos_token_id if eos is None else eos
        self.stop_ids = frozenset(eos if isinstance(eos, list) else [eos])
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path) if "tokenizer_config" in names else None
        blocks = num_kvcache_blocks, block_size, enable_prefix_caching
        self.make_scheduler: Callable[[], Scheduler] = lambda: Scheduler(BlockManager(*blocks), *limits)
        self.scheduler = self.make_scheduler()

    def make_sequence(self, prompt: str | list[int], params: SamplingParams) -> Sequence:
        """Return a prompt as a sequence. Raises ValueError if it cannot be answered."""
        if isinstance(prompt, str) and self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: pass lists of token ids")
        ids = np.array(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        vocab_size, limit = self.model_runner.model.config.vocab_size, self.scheduler.max_num_tokens
        is_list = ids.ndim == 1 and ids.dtype.kind in "iu"  # a flat list of integers
        if not (is_list and 0 < len(ids) < limit and 0 <= ids.min() <= ids.max() < vocab_size):
            needs = f"1 to {limit - 1} token ids in [0, {vocab_size})"
            raise ValueError(f"a prompt needs {needs}, not {ids.size}: {str(prompt)[:60]}")
        seed = random.SystemRandom().getrandbits(64) if params.seed is None else int(params.seed) % 2**64
        stop_ids = frozenset() if params.ignore_eos else self.stop_ids
        return Sequence(ids.tolist(), params, len(ids), seed, stop_ids)

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool = True) -> list[dict[str, Any]]:
        """Answer texts or lists of token ids, with one SamplingParams for all or a list of one for each."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many SamplingParams, or a single one: {params}")
        seqs = [self.make_sequence(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        try:
            for seq in seqs:
                self.scheduler.add(seq)
            with tqdm(total=len(seqs), desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
                while self.scheduler.waiting or self.scheduler.running:
                    chunks = self.scheduler.schedule()
                    token_ids = self.model_runner.run(chunks)
                    bar.update(len(self.scheduler.update(chunks, token_ids)))
        except BaseException:  # such as Ctrl-C: registered blocks may lack K and V
            self.scheduler = self.make_scheduler()
            raise
        answers = [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]
        texts = [""] * len(answers)
        if self.tokenizer is not None:
            texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [{"text": text, "token_ids": ids} for text, ids in zip(texts, answers, strict=True)]


# ---- The command ---------------------------------------------------------------------------------
def bench(llm: LLM) -> None:
    """Run nano-vllm's benchmark, and print how many output tokens it computes per second."""
    config = llm.model_runner.model.config
    longest, last_id = min(1024, config.max_position_embeddings // 2), min(10000, config.vocab_size - 1)
    if (longest, last_id) != (1024, 10000):
        print(f"clipped to the model: prompts and answers have at most {longest} tokens, ids up to {last_id}")
    random.seed(0)
    random_len = partial(random.randint, min(100, longest), longest)
    prompts = [[random.randint(0, last_id) for _ in range(random_len())] for _ in range(256)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random_len()) for _ in range(256)]
    llm.generate([[0]], SamplingParams(), use_tqdm=False)  # warm up
    start = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds, num_tokens = time.perf_counter() - start, sum(len(answer["token_ids"]) for answer in answers)
    print(f"{num_tokens} output tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s")


def main() -> None:
    """Run the command line."""
    demo = Path(__file__).parent / "demo"
    parser = argparse.ArgumentParser(prog="python -m nanoengine.nano")
    parser.add_argument("questions", nargs="*", help="answered as one batch")
    parser.add_argument("--model", default=demo if demo.exists() else None, required=not demo.exists())
    parser.add_argument("--bench", action="store_true", help="run nano-vllm's benchmark")
    options = parser.parse_args()
    llm = LLM(options.model, max_model_len=4096)
    if options.bench:
        return bench(llm)
    prompts, how = options.questions, {"add_generation_prompt": True, "return_dict": False}
    if getattr(llm.tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": question}] for question in prompts]
        prompts = [llm.tokenizer.apply_chat_template(chat, **how) for chat in chats]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=512), use_tqdm=False)
    for question, answer in zip(options.questions, answers, strict=True):
        print(f"Q: {question}\nA: {answer['text'].strip()}\n")


if __name__ == "__main__":
    main()
