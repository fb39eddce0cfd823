"""The engine, whole. A request enters at `LLM.generate` and leaves as text; each step in between is this.

    batch   = scheduler.schedule()             # which tokens to compute, in which cache blocks
    launch  = runner.launch(batch)             # one forward pass; a token for each row that is due one
    sampled = runner.collect(launch)           # the tokens, once the device has them
    stopped = scheduler.update(batch, sampled) # append, finish, free blocks

Read top to bottom: EngineConfig, Sequence, BlockManager, Scheduler, ModelRunner, LLM. State has one
writer: the scheduler owns the sequences, the queues and the block manager and never sees a tensor;
the runner owns the model and the KV cache and never changes a sequence; LLM owns the tokenizer and
what users see.

Words used throughout:
    block           the cache memory for `block_size` consecutive tokens of a sequence
    block_table     a sequence's blocks: logical index -> physical block id
    slot            one token's place in the cache: block id * block_size + offset
    computed        a token whose K and V are in the cache
    token budget    how many tokens one step may compute, `max_num_batched_tokens`
    pending         a token that the step in flight draws: counted, not known yet (async scheduling)
    preempt         take a running sequence's blocks away; it is recomputed from zero later
"""

import bisect
import gc
import heapq
import itertools
import signal
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as AnySequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from nanoengine.attention import BACKENDS, AttentionMetadata, CompiledAttention, KVCache, PagedAttention
from nanoengine.cpu import Kernels, PinnedThreads, keep_freed_memory
from nanoengine.hf_model import HFModel
from nanoengine.model import Decoder, FusedKernels
from nanoengine.outputs import RequestOutput
from nanoengine.requests import (
    CheckedRequest,
    Prompt,
    Request,
    Sample,
    bad_word_ids,
    read_prompt,
    render_chats,
    split_prompts,
)
from nanoengine.sampling import (
    Download,
    Logprob,
    RequestOutputKind,
    SamplerOutput,
    SamplingParams,
    SamplingRow,
    check_bool,
    check_integer,
    check_number,
    draw_tokens,
    read_tokens,
    report_logprobs,
    report_samples,
    scale_logits,
)
from nanoengine.weights import Checkpoint, load_model, open_checkpoint, resolve_dtype

if TYPE_CHECKING:
    from nanoengine.cuda import Staging

# ---- EngineConfig: every setting, validated once -------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. Nothing changes after construction; derived numbers live elsewhere.

    Raises:
        ValueError, TypeError: a setting is out of its range; the message names it.
    """

    model: str | Path  # hub id or directory
    tokenizer: str | Path | None = None  # hub id or directory, where it is not the model's own
    revision: str | None = None  # of a hub model
    dtype: str | torch.dtype = "auto"  # "auto" is the checkpoint's own
    device: str = "auto"  # "auto" is CUDA where there is one, else the CPU
    seed: int = 0  # for requests without a seed of their own
    max_model_len: int | None = None  # prompt and output together; None: what the model was made for
    block_size: int | None = None  # tokens; None: 32 on a CPU, 256 on a GPU
    num_kv_blocks: int | None = None  # usable blocks (the null block comes on top)
    kv_cache_bytes: int | None = None  # instead of num_kv_blocks; neither: from the memory that is free
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, activations and cache
    max_num_seqs: int = 256  # sequences that hold blocks at a time
    max_num_batched_tokens: int | None = None  # token budget of a step; None: 1024 on a CPU, 8192 on a GPU
    long_prefill_token_threshold: int = 0  # most tokens of one sequence in a step; 0 is no limit
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # or "priority": a lower number runs first
    pin_threads: bool = True  # on a CPU: a core for each of PyTorch's threads, while a step runs
    attn_backend: str = "auto"  # a name of `attention.BACKENDS`; auto: the first that can
    enforce_eager: bool = False  # plain PyTorch: no compiled kernels, no CUDA graphs
    async_scheduling: bool | None = None  # prepare a step while the one before runs; None: on a GPU
    tensor_parallel_size: int = 1  # more is not supported
    load_format: str = "auto"  # or "dummy": random weights from config.json alone
    model_impl: str = "auto"  # "nanoengine": model.py; "transformers": its own code; auto: the first that can
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        check_integer("max_num_seqs", self.max_num_seqs, 1)
        check_integer("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        for name in (
            "max_model_len",
            "block_size",
            "num_kv_blocks",
            "kv_cache_bytes",
            "max_num_batched_tokens",
        ):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 2 if name == "max_model_len" else 1, 2**62)
        check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("pin_threads", self.pin_threads)
        check_bool("enforce_eager", self.enforce_eager)
        if self.async_scheduling is not None:
            check_bool("async_scheduling", self.async_scheduling)
        check_bool("trust_remote_code", self.trust_remote_code)
        if self.tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size must be 1, got {self.tensor_parallel_size!r}")
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("give num_kv_blocks or kv_cache_bytes, not both")
        choices = {
            "scheduling_policy": ("fcfs", "priority"),
            "load_format": ("auto", "dummy"),
            "model_impl": ("auto", "nanoengine", "transformers"),
            "attn_backend": ("auto", *(backend.name for backend in BACKENDS)),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def resolve_device(self) -> torch.device:
        """The device to run on."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(
                f'device must be "auto", "cpu" or "cuda", with an index or not, got {self.device!r}'
            )
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device must be one this PyTorch can use, got {self.device!r} without CUDA")
        return device


# ---- Sequence: one sample of one request ---------------------------------------------------------


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one sample, and where their K and V are. Changed by the scheduler only."""

    seq_id: int  # also the order of arrival
    token_ids: list[int]  # prompt, then output
    params: SamplingParams
    _: KW_ONLY
    priority: int = 0  # lower runs first
    seed: int = 0  # 64 bits; with a position it fixes the random number drawn there
    stop_ids: frozenset[int] = frozenset()  # sampling one of these ends the sequence
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    prompt_logprobs: int | None = None  # how many to report per prompt token; None: not asked for
    num_prompt_tokens: int = field(init=False)
    # With async scheduling: 1 while the step in flight draws the next token, which is its sample_index-th.
    num_pending_tokens: int = field(init=False, default=0)
    sample_index: int = field(init=False, default=0)
    max_num_tokens: int = field(init=False, default=0)  # prompt and output at most; set by the scheduler

    status: Status = field(init=False, default=Status.WAITING)
    finish_reason: str | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)

    block_table: list[int] = field(init=False, default_factory=list)
    num_computed_tokens: int = field(init=False, default=0)  # tokens whose K and V are in the cache
    # Leading tokens whose K and V were there at admission, whole blocks of them: never written again.
    num_hit_tokens: int = field(init=False, default=0)
    num_cached_blocks: int = field(init=False, default=0)  # leading blocks the prefix cache can find
    block_keys: list["BlockKey"] = field(init=False, default_factory=list)  # of full blocks, hashed once

    # Computed tokens when first admitted, which is the prefix hit a user sees.
    num_cached_tokens: int | None = field(init=False, default=None)
    num_preemptions: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Keep a list of its own."""
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, the pending one too."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were sampled so far; a pending one is not among them."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the smaller. Under FCFS all priorities are equal, so arrival decides."""
        return self.priority, self.seq_id


# ---- BlockManager: who holds which block, and what is in it --------------------------------------


class BlockKey(NamedTuple):
    """What a full block holds, as the prefix cache looks it up."""

    hash: int  # of this block's tokens, chained: seeded with the hash of the block before
    content: bytes  # the tokens themselves, int32


@dataclass(slots=True, eq=False)
class Block:
    """One physical block. Its key stays when it is freed: the content can be hit until it is reused."""

    block_id: int
    ref_count: int = 0  # sequences whose block_table names it
    key: BlockKey | None = None  # None: the prefix cache does not know it
    content_id: int = 0  # equal in two blocks only if they hold the same tokens after the same prefix
    parent_id: int = 0  # content_id of the block before, 0 at the start of a sequence
    stamp: int = 0  # its entry in the free list is current if it carries this stamp


class BlockManager:
    """Hands out cache blocks, shares those with the same prefix, and evicts the least recently used.

    It is vLLM's BlockPool and KVCacheManager in one, for one kind of attention. Block 0 is the null
    block: never handed out, padding and discarded writes go there.

    The free list is a deque in eviction order. A cached block that is hit while free has to leave it
    from the middle: its entry is left behind as stale (the block's stamp has moved on), skipped when
    it comes up, and swept out when stale entries outnumber the current ones. So every operation is
    O(1) amortised, without vLLM's linked list.

    A hit is verified by content and parent, so that a hash collision costs a miss, never a wrong
    token. `content_id` makes the parent's check O(1): it stands for the whole prefix up to a block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[bytes, int], int] = xxh3_64_intdigest,
    ) -> None:
        self.num_blocks = num_blocks  # usable ones: the null block is not counted
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        self.num_cache_queries = 0  # prefix cache statistics in tokens, over first admissions
        self.num_cache_hits = 0
        self.clear()

    def clear(self) -> None:
        """Forget every block's use and content, as if new; statistics stay."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks + 1)]
        self.free_list = deque((block_id, 0) for block_id in range(1, self.num_blocks + 1))
        self.num_free_blocks = self.num_blocks
        # hash -> the blocks with that hash, by id. Several may hold the same tokens, and two different
        # contents may collide; evicting one block leaves the others findable.
        self.cached_blocks: dict[int, dict[int, Block]] = {}
        self.next_content_id = 1

    # -- admission: prefix hits, then a block table for everything the sequence has so far

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The longest run of cached blocks that hold the beginning of the sequence."""
        # A prompt token's log-probabilities need its logits, which the cache does not hold.
        if not self.enable_prefix_caching or seq.prompt_logprobs is not None:
            return []
        self._hash_full_blocks(seq)
        hits: list[Block] = []
        parent_id = 0
        for key in seq.block_keys:
            block = self._find(key, parent_id)
            if block is None:
                break
            hits.append(block)
            parent_id = block.content_id
        return hits

    def can_allocate(self, seq: Sequence, hits: list[Block]) -> bool:
        """Whether the free blocks are enough for all of the sequence's tokens, given its hits."""
        num_new = self.num_blocks_for(seq.num_tokens) - len(hits)
        num_revived = sum(block.ref_count == 0 for block in hits)
        return num_new + num_revived <= self.num_free_blocks

    def allocate(self, seq: Sequence, hits: list[Block]) -> None:
        """Give the sequence its block table: the hits, then new blocks. Call after can_allocate."""
        for block in hits:
            if block.ref_count == 0:
                block.stamp += 1  # its free-list entry is stale from here on
                self.num_free_blocks -= 1
            block.ref_count += 1
        self._sweep_free_list()
        seq.block_table = [block.block_id for block in hits]
        for _ in range(self.num_blocks_for(seq.num_tokens) - len(hits)):
            seq.block_table.append(self._take_free_block())
        seq.num_cached_blocks = len(hits)
        seq.num_hit_tokens = len(hits) * self.block_size
        # The last token is computed even if it is cached: its logits choose the next token.
        seq.num_computed_tokens = min(seq.num_hit_tokens, seq.num_tokens - 1)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.num_cache_queries += seq.num_tokens
            self.num_cache_hits += seq.num_computed_tokens

    # -- growth

    def can_append(self, seq: Sequence) -> bool:
        """Whether may_append will find the blocks it needs."""
        return self.num_blocks_for(seq.num_tokens) - len(seq.block_table) <= self.num_free_blocks

    def may_append(self, seq: Sequence) -> None:
        """Grow the block table to hold all of the sequence's tokens, if it does not yet."""
        for _ in range(self.num_blocks_for(seq.num_tokens) - len(seq.block_table)):
            seq.block_table.append(self._take_free_block())

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the blocks that are full after the first num_tokens tokens findable."""
        if not self.enable_prefix_caching:
            return
        self._hash_full_blocks(seq)
        first, last = seq.num_cached_blocks, num_tokens // self.block_size
        parent_id = self.blocks[seq.block_table[first - 1]].content_id if first else 0
        for key, block_id in zip(seq.block_keys[first:last], seq.block_table[first:last], strict=True):
            block, twin = self.blocks[block_id], self._find(key, parent_id)
            if twin is None:
                block.content_id, self.next_content_id = (self.next_content_id, self.next_content_id + 1)
            else:
                block.content_id = twin.content_id
            block.key, block.parent_id = key, parent_id
            self.cached_blocks.setdefault(key.hash, {})[block_id] = block
            parent_id = block.content_id
        seq.num_cached_blocks = last

    # -- release

    def free(self, seq: Sequence) -> None:
        """Take all blocks back, the last first: tails are evicted before the prefixes others share."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.num_free_blocks += 1
                if block.key is None:  # nothing to find in it, and its memory is warm: reuse it first
                    self.free_list.appendleft((block_id, block.stamp))
                else:
                    self.free_list.append((block_id, block.stamp))
        seq.block_table = []
        seq.num_computed_tokens = seq.num_hit_tokens = seq.num_cached_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        if self.num_free_blocks != self.num_blocks:
            return False
        self.clear()
        return True

    # -- helpers

    @property
    def usage(self) -> float:
        """The share of the blocks that is in use, from 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def _find(self, key: BlockKey, parent_id: int) -> Block | None:
        """A cached block with exactly this content after exactly this prefix."""
        for block in self.cached_blocks.get(key.hash, {}).values():
            if block.parent_id == parent_id and block.key is not None and block.key.content == key.content:
                return block
        return None

    def _hash_full_blocks(self, seq: Sequence) -> None:
        """Extend seq.block_keys to its full blocks; each block is hashed once in its life."""
        first, last = len(seq.block_keys), len(seq.token_ids) // self.block_size
        if first == last:
            return
        data = array("i", seq.token_ids[first * self.block_size : last * self.block_size]).tobytes()
        block_bytes = len(data) // (last - first)
        parent_hash = seq.block_keys[-1].hash if first else 0
        for start in range(0, len(data), block_bytes):
            content = data[start : start + block_bytes]
            parent_hash = self.hash_function(content, parent_hash)
            seq.block_keys.append(BlockKey(parent_hash, content))

    def _take_free_block(self) -> int:
        """The least recently used free block, its old content forgotten."""
        while True:
            block_id, stamp = self.free_list.popleft()
            block = self.blocks[block_id]
            if block.stamp == stamp:
                break
        block.stamp += 1
        block.ref_count = 1
        self.num_free_blocks -= 1
        if block.key is not None:
            same_hash = self.cached_blocks[block.key.hash]
            del same_hash[block_id]
            if not same_hash:
                del self.cached_blocks[block.key.hash]
            block.key = None
        return block_id

    def _sweep_free_list(self) -> None:
        if len(self.free_list) > 2 * self.num_free_blocks:
            self.free_list = deque(e for e in self.free_list if self.blocks[e[0]].stamp == e[1])

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert the conservation laws; `sequences` are all that hold blocks."""
        uses = Counter(block_id for seq in sequences for block_id in seq.block_table)
        assert 0 not in uses, "the null block was handed out"
        assert all(block.ref_count == uses[block.block_id] for block in self.blocks)
        current = [block_id for block_id, stamp in self.free_list if self.blocks[block_id].stamp == stamp]
        unused = [block.block_id for block in self.blocks[1:] if block.ref_count == 0]
        assert sorted(current) == unused, "a block is lost, or free twice"
        assert len(current) == self.num_free_blocks
        findable = {b.block_id: b for same_hash in self.cached_blocks.values() for b in same_hash.values()}
        assert findable == {b.block_id: b for b in self.blocks if b.key is not None}
        assert all(b.block_id in self.cached_blocks[b.key.hash] for b in findable.values() if b.key)
        assert all(self.cached_blocks.values()), "a hash without blocks was left behind"


# ---- Scheduler: who computes what next -----------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, to compute this step. The runner only reads the sequence."""

    seq: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether it reaches the sequence's end, so that the next token can be sampled."""
        return self.end == self.seq.num_tokens


class ScheduledBatch(NamedTuple):
    """One step's work, complete: a chunk per sequence, and the sequences that get a token from it."""

    chunks: list[Chunk]
    sampled_seqs: list[Sequence]
    num_tokens: int


class Scheduler:
    """Decides each step which sequences catch up by how many tokens.

    There is no prefill phase and no decode phase. A sequence is behind by
    `num_tokens - num_computed_tokens`, and a step's token budget lets sequences catch up: those that
    run first, then waiting ones. Decode is catching up by one, a chunk of a long prompt by what the
    budget leaves; a prefix hit starts further along, a preempted sequence starts over.

    Both queues are in `Sequence.order`. The head of the waiting queue is admitted first and blocks
    those behind it; when blocks run out, the tail of the running list is preempted. So FCFS and
    priority scheduling are the same code. A waiting sequence never preempts a running one, whatever
    their priorities: only a lack of blocks does.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int = 1 << 30,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk_tokens = long_prefill_token_threshold or max_num_batched_tokens
        # A sequence that fills every block can still sample one token, which it will never compute.
        self.max_computable_tokens = block_manager.num_blocks * block_manager.block_size
        self.max_num_tokens = min(max_model_len, self.max_computable_tokens + 1)
        self.max_model_len = max_model_len
        self.sequences: dict[int, Sequence] = {}  # all unfinished ones, by seq_id
        self.waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap on Sequence.order
        self.running: list[Sequence] = []  # sorted by Sequence.order
        self.num_preemptions = 0

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise ValueError where a prompt of that length could never get an answer."""
        if num_prompt_tokens == 0:
            raise ValueError("prompt is empty; at least one token is needed")
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"prompt has {num_prompt_tokens} tokens but max_model_len is {self.max_model_len}, which "
                "has to hold at least one output token too; shorten it or raise max_model_len"
            )
        if num_prompt_tokens > self.max_computable_tokens:
            raise ValueError(
                f"prompt has {num_prompt_tokens} tokens but the KV cache holds {self.max_computable_tokens} "
                f"({self.block_manager.num_blocks} blocks of {self.block_manager.block_size}); "
                "shorten it or raise num_kv_blocks"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ValueError: it could never run to an answer.
        """
        self.check_fits(seq.num_prompt_tokens)
        wanted = seq.params.max_tokens
        limit = self.max_num_tokens
        seq.max_num_tokens = limit if wanted is None else min(limit, seq.num_prompt_tokens + wanted)
        self.sequences[seq.seq_id] = seq
        heapq.heappush(self.waiting, (seq.order, seq))

    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.sequences)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's chunks. Empty only if no sequence is unfinished."""
        block_manager, block_size = self.block_manager, self.block_manager.block_size
        num_preemptions = self.num_preemptions
        budget, max_chunk_tokens = self.max_num_batched_tokens, self.max_chunk_tokens
        chunks: list[Chunk] = []
        sampled_seqs: list[Sequence] = []

        def add_chunk(seq: Sequence) -> int:
            """Schedule what the budget allows of what the sequence is behind; returns the tokens."""
            start, num_tokens = seq.num_computed_tokens, seq.num_tokens
            end = min(num_tokens, start + budget, start + max_chunk_tokens)
            chunks.append(Chunk(seq, start, end))
            if end == num_tokens:
                sampled_seqs.append(seq)
            # Findable from this step on: within a layer, all K and V are written before any is read.
            end_known = end - seq.num_pending_tokens  # a pending token ends its chunk
            if end_known // block_size > seq.num_cached_blocks:
                block_manager.cache_full_blocks(seq, end_known)
            return end - start

        # Indexed, since preemption shortens the list from its tail while it is walked from its head.
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            if seq.num_tokens >= seq.max_num_tokens:  # its last token is pending: nothing is left to do
                i += 1
                continue
            if seq.num_tokens > len(seq.block_table) * block_size:
                while not block_manager.can_append(seq) and self.running[-1] is not seq:
                    self._preempt_last()
                if not block_manager.can_append(seq):
                    self._preempt_last()  # the sequence itself; those before it hold the blocks
                    break
                block_manager.may_append(seq)
            budget -= add_chunk(seq)
            i += 1

        # After a preemption blocks are scarce: admitting now would only preempt again.
        may_admit = num_preemptions == self.num_preemptions
        while may_admit and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0][1]
            hits = block_manager.find_prefix(seq)
            if not block_manager.can_allocate(seq, hits):
                break
            heapq.heappop(self.waiting)
            block_manager.allocate(seq, hits)
            seq.status = Status.RUNNING
            bisect.insort(self.running, seq, key=lambda s: s.order)
            budget -= add_chunk(seq)
        return ScheduledBatch(chunks, sampled_seqs, self.max_num_batched_tokens - budget)

    def advance(self, batch: ScheduledBatch) -> None:
        """Count a batch as computed whose tokens are still pending, so that the next can be scheduled."""
        for seq, _, end in batch.chunks:
            seq.num_computed_tokens = end
        for index, seq in enumerate(batch.sampled_seqs):
            seq.num_pending_tokens, seq.sample_index = 1, index

    def update(
        self, batch: ScheduledBatch, token_ids: AnySequence[int | None], *, is_advanced: bool = False
    ) -> list[Sequence]:
        """Take in a step's results: one token per `batch.sampled_seqs`, None where sampling failed.

        Sequences that ended while the step was in flight are passed over. Returns those that finished.
        """
        if not is_advanced:
            self.advance(batch)
        finished = []
        for seq, token_id in zip(batch.sampled_seqs, token_ids, strict=True):
            if seq.status is Status.FINISHED:
                continue
            seq.num_pending_tokens = 0
            if token_id is None:
                seq.finish_reason = "error"
                finished.append(seq)
                continue
            seq.token_ids.append(token_id)
            if token_id in seq.stop_ids:
                seq.finish_reason = "stop"
                seq.stop_reason = token_id if token_id in (seq.params.stop_token_ids or ()) else None
                finished.append(seq)
            elif len(seq.token_ids) >= seq.max_num_tokens:
                seq.finish_reason = "length"
                finished.append(seq)
        if finished:
            self._remove(finished)
        return finished

    def finish(self, seqs: Iterable[Sequence], reason: str, stop_reason: str | None = None) -> None:
        """End sequences from outside: a stop string was found, or the user aborts.

        A sequence that finished in the same step for another reason only gets the new reason.
        """
        seqs = list(seqs)
        for seq in seqs:
            seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._remove([seq for seq in seqs if seq.seq_id in self.sequences])

    def recover(self) -> None:
        """After a step that failed anywhere, even half-way through schedule() or update(): start over.

        What the step wrote and registered is not to be trusted, so every block is taken back and the
        cache forgotten; unfinished sequences keep their tokens and are recomputed.
        """
        self.block_manager.clear()
        unfinished = [seq for seq in self.sequences.values() if seq.finish_reason is None]
        for seq in self.sequences.values():
            seq.block_table = []
            seq.num_computed_tokens = seq.num_hit_tokens = seq.num_cached_blocks = 0
            seq.num_pending_tokens = 0
            seq.status = Status.WAITING if seq.finish_reason is None else Status.FINISHED
        self.sequences = {seq.seq_id: seq for seq in unfinished}
        self.waiting = [(seq.order, seq) for seq in unfinished]
        heapq.heapify(self.waiting)
        self.running = []

    def check_invariants(self) -> None:
        """Assert that the queues and the blocks agree with each other."""
        waiting = [seq for _, seq in self.waiting]
        assert sorted(seq.seq_id for seq in waiting + self.running) == sorted(self.sequences)
        assert all(seq.status is Status.WAITING and not seq.block_table for seq in waiting)
        assert all(seq.status is Status.RUNNING for seq in self.running)
        assert len(self.running) <= self.max_num_seqs
        assert [seq.order for seq in self.running] == sorted(seq.order for seq in self.running)
        self.block_manager.check_invariants(self.running)

    def _preempt_last(self) -> None:
        seq = self.running.pop()
        self.block_manager.free(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        heapq.heappush(self.waiting, (seq.order, seq))

    def _remove(self, seqs: list[Sequence]) -> None:
        """Drop sequences from wherever they are, and free their blocks."""
        was_waiting = False
        for seq in seqs:
            was_waiting |= seq.status is Status.WAITING
            seq.status = Status.FINISHED
            self.block_manager.free(seq)
            del self.sequences[seq.seq_id]
        self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        if was_waiting:
            self.waiting = [entry for entry in self.waiting if entry[1].status is Status.WAITING]
            heapq.heapify(self.waiting)


# ---- ModelRunner: from a scheduled batch to sampled tokens ---------------------------------------


Array = TypeVar("Array", np.ndarray, Tensor)


class ModelInputs(NamedTuple, Generic[Array]):
    """A batch as integers, flat: no padding, no batch dimension. T tokens, S sequences, R samples."""

    input_ids: Array  # (T,) int64
    positions: Array  # (T,) int64  index of each token in its sequence
    slot_mapping: Array  # (T,) int64  cache slot to write; in the null block: discard
    cu_seqlens_q: Array  # (S + 1,) int32  tokens of sequence i: [cu[i], cu[i + 1])
    cu_seqlens_k: Array  # (S + 1,) int32  running sums of seq_lens
    seq_lens: Array  # (S,) int32  cached tokens of each sequence after this step
    block_tables: Array  # (S, most blocks) int32, padded with the null block
    sample_rows: Array  # (R,) int64  rows whose logits are needed
    pending_rows: Array  # (P,) int64  rows whose token is pending, and 0 in input_ids
    pending_samples: Array  # (P,) int64  which sample of the step in flight it is


def build_inputs(batch: ScheduledBatch, block_size: int) -> ModelInputs[np.ndarray]:
    """Lay a batch out as arrays. A pure function of integers, with no Python loop over tokens."""
    chunks = batch.chunks
    token_ids: list[int] = []
    block_ids: list[int] = []
    pending: list[tuple[int, int]] = []
    for seq, start, end in chunks:
        token_ids += seq.token_ids[start:end]
        block_ids += seq.block_table
        if seq.num_pending_tokens:
            pending.append((len(token_ids), seq.sample_index))
            token_ids.append(0)
    columns = [(start, end, len(seq.block_table), seq.num_hit_tokens) for seq, start, end in chunks]
    starts, ends, num_blocks, num_hit_tokens = np.array(columns, dtype=np.int64).T
    query_lens = ends - starts
    cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()))

    block_tables = np.zeros((len(chunks), num_blocks.max()), dtype=np.int32)
    block_tables[np.arange(block_tables.shape[1]) < num_blocks[:, None]] = block_ids

    row_seq = np.repeat(np.arange(len(chunks)), query_lens)  # which sequence a row belongs to
    positions = np.arange(batch.num_tokens) - (cu_seqlens_q[:-1] - starts)[row_seq]
    blocks = block_tables[row_seq, positions // block_size].astype(np.int64)
    # The token that a full prefix hit recomputes has its K and V in a shared block already.
    blocks[positions < num_hit_tokens[row_seq]] = 0
    last_rows = cu_seqlens_q[1:] - 1
    pending_rows, pending_samples = np.array(pending, dtype=np.int64).reshape(-1, 2).T
    return ModelInputs(
        input_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        cu_seqlens_k=np.concatenate(([0], ends.cumsum())).astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=block_tables,
        sample_rows=last_rows[[chunk.is_last for chunk in chunks]],
        pending_rows=pending_rows,
        pending_samples=pending_samples,
    )


def graph_sizes(most: int) -> list[int]:
    """The numbers of sequences whose decode steps are captured: close together where steps are short.

    >>> graph_sizes(50)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    """
    ladder = (1, 2, 4, *range(8, 128, 8), *range(128, 512, 16), 512)
    return [size for size in ladder if size < most] + ([most] if most <= ladder[-1] else [])


def pad_decodes(inputs: ModelInputs[np.ndarray], num_seqs: int, table_width: int) -> ModelInputs[np.ndarray]:
    """A batch of decodes filled up with sequences that compute a token of the null block for nobody."""
    missing = num_seqs - len(inputs.seq_lens)

    def pad(values: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate((values, np.full(missing, value, dtype=values.dtype)))

    block_tables = np.zeros((num_seqs, table_width), dtype=np.int32)
    block_tables[: len(inputs.block_tables), : inputs.block_tables.shape[1]] = inputs.block_tables
    seq_lens = pad(inputs.seq_lens, 1)
    return inputs._replace(
        input_ids=pad(inputs.input_ids, 0),
        positions=pad(inputs.positions, 0),
        slot_mapping=pad(inputs.slot_mapping, 0),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        cu_seqlens_k=np.concatenate(([0], seq_lens.cumsum())).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=block_tables,
    )


def attention_metadata(host: ModelInputs[np.ndarray], device: ModelInputs[Tensor]) -> AttentionMetadata:
    """The part of a batch that attention needs, from the same batch on both sides."""
    return AttentionMetadata(
        device.cu_seqlens_q,
        device.cu_seqlens_k,
        device.seq_lens,
        device.block_tables,
        device.slot_mapping,
        max_query_len=int(np.diff(host.cu_seqlens_q).max()),
        max_seq_len=int(host.seq_lens.max()),
        is_fresh=int(host.cu_seqlens_k[-1]) == len(host.input_ids),
    )


class Stopwatch:
    """Adds up the seconds each phase of the steps took."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("schedule", "inputs", "forward", "sample", "update"), 0.0)
        self.start()

    def start(self) -> None:
        """A phase begins here."""
        self._started = time.perf_counter()

    def lap(self, phase: str) -> None:
        """It ends here, and the next one begins."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._started
        self._started = now


class DecodeGraphs:
    """Decode steps captured for a ladder of batch sizes, each replayed by a single launch.

    A batch of decodes has one shape per number of sequences once its block tables have a fixed width. A
    graph reads its inputs where `send` puts arrays of these shapes, and leaves the hidden states in
    `self.hidden`. Batches in between take the next larger graph, padded by `pad_decodes`.
    """

    def __init__(
        self,
        sizes: list[int],
        table_width: int,
        block_size: int,
        send: Callable[[ModelInputs[np.ndarray]], ModelInputs[Tensor]],
        forward: Callable[[ModelInputs[Tensor], AttentionMetadata], Tensor],
    ) -> None:
        from nanoengine.cuda import GraphRecorder

        start = time.perf_counter()
        self.sizes, self.table_width = sizes, table_width
        self.hidden: Tensor | None = None
        self.replays: dict[int, Callable[[], None]] = {}
        recorder = GraphRecorder()
        seq = Sequence(0, [0], SamplingParams())
        seq.block_table = [0]
        decode = build_inputs(ScheduledBatch([Chunk(seq, 0, 1)], [], 1), block_size)
        for size in reversed(sizes):  # the smaller ones then fit into the memory of the largest
            host = pad_decodes(decode, size, table_width)
            device = send(host)
            # Kernels are chosen at capture: for the longest a sequence may be, and reading from blocks.
            metadata = replace(
                attention_metadata(host, device), max_seq_len=table_width * block_size, is_fresh=False
            )

            def run(
                size: int = size,
                device: ModelInputs[Tensor] = device,
                metadata: AttentionMetadata = metadata,
            ) -> None:
                hidden = forward(device, metadata)
                if self.hidden is None:
                    self.hidden = torch.empty_like(hidden)
                self.hidden[:size].copy_(hidden)

            self.replays[size] = recorder.record(run)
        self.seconds = time.perf_counter() - start

    def size_for(self, inputs: ModelInputs[np.ndarray]) -> int | None:
        """The graph that can compute the batch; None: it is not all decodes, or too large."""
        num_seqs = len(inputs.seq_lens)
        if len(inputs.input_ids) != num_seqs or num_seqs > self.sizes[-1]:
            return None
        return self.sizes[bisect.bisect_left(self.sizes, num_seqs)]

    def replay(self, size: int) -> Tensor:
        """Hidden states of the inputs that were sent last, (size, E), until the next replay."""
        self.replays[size]()
        assert self.hidden is not None
        return self.hidden[:size]


class Launch(NamedTuple):
    """A step on its way: what was asked of the device, and where its tokens will be."""

    batch: ScheduledBatch
    rows: list[SamplingRow]
    tokens: Tensor | None  # (R,) int64, on the device; None: no row is due a token
    download: Download | None
    logits: Tensor | None  # kept where log-probabilities are to be reported
    prompt_logprobs: dict[int, list[dict[int, Logprob]]]


LOGPROB_ROWS = 256  # prompt rows turned into logits at a time: a row is as wide as the vocabulary


class ModelRunner:
    """Owns the model, the KV cache and the device; turns a batch into sampled tokens."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> None:
        self.device = config.resolve_device()
        self.dtype = resolve_dtype(config.dtype, checkpoint.hf_config)
        on_cuda = self.device.type == "cuda"
        # On a CPU more tokens at a time fill no unit better, and what they pass on leaves its caches.
        self.max_num_batched_tokens = config.max_num_batched_tokens or (8192 if on_cuda else 1024)
        self.model: Decoder | HFModel | None = load_model(
            checkpoint,
            dtype=self.dtype,
            device=self.device,
            load_format=config.load_format,
            seed=config.seed,
            trust_remote_code=config.trust_remote_code,
        )
        self.kv_specs = self.model.kv_specs
        if isinstance(self.model, Decoder):
            self.model.build_rope_table(max_model_len)
        self.stopwatch = Stopwatch()
        self.threads = PinnedThreads(config.pin_threads and not on_cuda)
        # Triton and graph capture use the thread's current GPU, whichever the tensors are on.
        self.gpu = torch.cuda.device(self.device) if on_cuda else nullcontext()
        self.kernels: Kernels | None = None
        self.scale_logits = scale_logits
        if not on_cuda:
            keep_freed_memory()
        elif not config.enforce_eager:
            self.scale_logits = torch.compile(scale_logits, dynamic=True)
            if isinstance(self.model, Decoder):
                self.model.use_kernels(FusedKernels())
        self.attention_name = ""  # for the user: what runs, and what would be faster and why it does not
        self.backend = self._choose_attention(config)
        if isinstance(self.model, Decoder) and not on_cuda:
            self.model.pack_weights(self.kernels)
        self.block_size = config.block_size or (256 if on_cuda else 32)
        if self.block_size % self.backend.block_multiple:
            raise ValueError(
                f"block_size must be a multiple of {self.backend.block_multiple} for {self.backend.name} "
                f'attention, got {self.block_size}; attn_backend="torch" takes any'
            )
        self.max_num_seqs = config.max_num_seqs
        self.table_width = -(-max_model_len // self.block_size)  # blocks of the longest sequence
        uses_graphs = self.backend.capturable and isinstance(self.model, Decoder) and not config.enforce_eager
        self.staging = self._new_staging() if on_cuda or uses_graphs else None
        self.graphs: DecodeGraphs | None = None
        with self.gpu:
            self.num_blocks = self._count_blocks(config, max_model_len, uses_graphs)
            self.caches = self._new_caches(self.num_blocks)
            if uses_graphs:
                self.graphs = self._capture_decodes()
        if self.graphs is not None:
            self.attention_name += f", {len(self.graphs.sizes)} graphs ({self.graphs.seconds:.1f} s)"

    def _new_staging(self) -> "Staging":
        """Room for the largest batch there may be."""
        from nanoengine.cuda import Staging

        most_tokens, most_seqs = self.max_num_batched_tokens, self.max_num_seqs
        largest = [np.empty(most_tokens, np.int64)] * 3 + [np.empty(most_seqs + 1, np.int32)] * 3
        largest += [np.empty((most_seqs, self.table_width), np.int32)]
        largest += [np.empty(most_seqs, np.int64)] * 3
        return Staging(Staging.num_bytes(largest), self.device)

    def _choose_attention(self, config: EngineConfig) -> type[PagedAttention]:
        """The backend to attend with; the compiled kernels are loaded on the way, if they can be."""
        assert self.model is not None
        notes = []
        no_kernels = self._load_kernels(config) if self.device.type == "cpu" else None
        for backend in BACKENDS:
            if config.attn_backend not in ("auto", backend.name):
                continue
            if self.device.type not in backend.devices:
                obstacle: str | None = f"it does not run on {self.device.type}"
            elif backend is CompiledAttention:
                obstacle = no_kernels
            else:
                obstacle = backend.obstacle(self.kv_specs, self.model.attention_settings)
            if obstacle is None:
                break
            if config.attn_backend != "auto":
                raise ValueError(f"attn_backend={backend.name!r} cannot be used: {obstacle}")
            if self.device.type in backend.devices:
                notes.append(f"not {backend.name}: {obstacle}")
        if backend is CompiledAttention and self.kernels is not None and self.kernels.was_compiled:
            notes.append(f"compiled now, {self.kernels.seconds:.1f} s")
        self.attention_name = f"{backend.name} attention" + (f" ({'; '.join(notes)})" if notes else "")
        return backend

    def _load_kernels(self, config: EngineConfig) -> str | None:
        """Load the CPU's kernels and have the model use them; returns why that cannot be."""
        if config.enforce_eager:
            return "enforce_eager"
        if unserved := {spec.dtype for spec in self.kv_specs if not Kernels.serves(spec.dtype)}:
            return f"there are no kernels for {str(unserved.pop()).removeprefix('torch.')}"
        try:
            self.kernels = Kernels()
        except RuntimeError as error:
            return str(error)
        if isinstance(self.model, Decoder):
            self.model.use_kernels(self.kernels)
        return None

    def _new_caches(self, num_blocks: int) -> list[KVCache]:
        """A cache per layer, with the null block on top."""
        try:
            return [
                KVCache.zeros(spec, num_blocks + 1, self.block_size, self.device) for spec in self.kv_specs
            ]
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one
            raise ValueError(
                f"no memory for a KV cache of {num_blocks} blocks of {self.block_size} tokens; "
                "lower num_kv_blocks or kv_cache_bytes"
            ) from error

    def _count_blocks(self, config: EngineConfig, max_model_len: int, uses_graphs: bool) -> int:
        """How many blocks to allocate: as told, or from the memory that is free."""
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        block_bytes = self.block_size * sum(spec.bytes_per_token for spec in self.kv_specs)
        # More than every sequence at its longest can hold would only be a larger prefix cache.
        most = config.max_num_seqs * -(-max_model_len // self.block_size)
        if config.kv_cache_bytes is not None:
            usable_bytes, remedy = config.kv_cache_bytes, "raise kv_cache_bytes"
            most = usable_bytes
        elif self.device.type == "cuda":
            usable_bytes = self._free_cuda_bytes(config, max_model_len, uses_graphs)
            remedy = "raise gpu_memory_utilization or lower max_num_batched_tokens"
        else:
            # As vLLM on a CPU, 4 GiB at most.
            usable_bytes = min(psutil.virtual_memory().available // 2, 4 << 30)
            remedy = "free some memory"
        usable_bytes -= block_bytes  # the null block
        if usable_bytes < block_bytes:
            raise ValueError(f"no memory for the KV cache: one block takes {block_bytes} bytes; {remedy}")
        return min(usable_bytes // block_bytes, most)

    def _free_cuda_bytes(self, config: EngineConfig, max_model_len: int, uses_graphs: bool) -> int:
        """What gpu_memory_utilization leaves after the weights, a pass over the largest batch, the graphs."""
        length = min(max_model_len - 1, self.max_num_batched_tokens)
        blocks = -(-length // self.block_size)
        seq = Sequence(0, [0] * length, SamplingParams())
        seq.block_table = list(range(1, blocks + 1))
        count = min(config.max_num_seqs, self.max_num_batched_tokens // length)
        batch = ScheduledBatch([Chunk(seq, 0, length)] * count, [seq] * count, length * count)
        try:
            self.caches = self._new_caches(blocks)
            cache_bytes = sum(cache.k.nbytes + cache.v.nbytes for cache in self.caches)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.collect(self.launch(batch))
            peak_bytes = torch.cuda.max_memory_allocated(self.device) - cache_bytes
            graph_bytes = self._graph_bytes() if uses_graphs else 0
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory on {self.device} for the largest batch, {count} prompts of {length} tokens; "
                "lower max_num_batched_tokens, max_num_seqs or max_model_len, or set enforce_eager=True"
            ) from error
        self.caches = []
        self.stopwatch = Stopwatch()  # that pass was not a step
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        others_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(self.device)
        usable_bytes = int(total_bytes * config.gpu_memory_utilization)
        return usable_bytes - peak_bytes - graph_bytes - others_bytes

    def _graph_bytes(self) -> int:
        """What the graphs take, by capturing them once around the small cache of the trial pass."""
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(self.device)
        graphs = self._capture_decodes()
        after, _ = torch.cuda.mem_get_info(self.device)
        del graphs
        return before - after

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, before: Launch | None = None) -> Launch:
        """Queue a batch on the device; where tokens are pending, `before` is the step that draws them."""
        if self.model is None:
            raise RuntimeError("the engine is closed")
        self.stopwatch.start()
        inputs = build_inputs(batch, self.block_size)
        graph_size = None if self.graphs is None else self.graphs.size_for(inputs)
        if self.graphs is not None and graph_size is not None:
            inputs = pad_decodes(inputs, graph_size, self.graphs.table_width)
        tensors = self._send(inputs)
        if len(inputs.pending_rows):
            assert before is not None
            assert before.tokens is not None
            # A token that could not be drawn is -1; what follows from it is thrown away.
            drawn = before.tokens[tensors.pending_samples].clamp(min=0)
            tensors.input_ids[tensors.pending_rows] = drawn
        if self.graphs is not None and graph_size is not None:
            self.stopwatch.lap("inputs")
            hidden = self.graphs.replay(graph_size)
        else:
            metadata = attention_metadata(inputs, tensors)
            self.stopwatch.lap("inputs")
            hidden = self._forward(tensors, metadata)
        prompt_logprobs = self._prompt_logprobs(batch, inputs, hidden)
        if not batch.sampled_seqs:
            self.stopwatch.lap("forward")
            return Launch(batch, [], None, None, None, prompt_logprobs)
        logits = self.model.compute_logits(hidden[tensors.sample_rows])
        self.stopwatch.lap("forward")
        rows = [
            SamplingRow(
                s.params,
                s.seed,
                s.token_ids,
                s.num_prompt_tokens,
                s.stop_ids,
                s.bad_words,
                s.num_pending_tokens,
            )
            for s in batch.sampled_seqs
        ]
        tokens = draw_tokens(logits, rows, self.scale_logits)
        reports = any(row.params.logprobs is not None for row in rows)
        launch = Launch(batch, rows, tokens, Download(tokens), logits if reports else None, prompt_logprobs)
        self.stopwatch.lap("sample")
        return launch

    @torch.inference_mode()
    def collect(self, launch: Launch) -> SamplerOutput:
        """Wait for a step's tokens, and for no step after it."""
        if launch.download is None:
            return SamplerOutput([], [], launch.prompt_logprobs)
        self.stopwatch.start()
        token_ids = read_tokens(launch.download.read())
        logprobs: list[dict[int, Logprob] | None] = [None] * len(token_ids)
        if launch.logits is not None:
            logprobs = report_samples(launch.logits, launch.rows, token_ids)
        self.stopwatch.lap("sample")
        return SamplerOutput(token_ids, logprobs, launch.prompt_logprobs)

    def _send(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[Tensor]:
        if self.staging is None:
            return ModelInputs(*map(torch.from_numpy, inputs))
        return ModelInputs(*self.staging.send(inputs))

    def _forward(self, tensors: ModelInputs[Tensor], metadata: AttentionMetadata) -> Tensor:
        """Hidden states, (T, E)."""
        assert self.model is not None
        if self.backend is CompiledAttention:
            assert self.kernels is not None
            attention: PagedAttention = CompiledAttention(metadata, self.block_size, self.kernels)
        else:
            attention = self.backend(metadata, self.block_size)
        return self.model(tensors.input_ids, tensors.positions, self.caches, attention)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _capture_decodes(self) -> DecodeGraphs:
        return DecodeGraphs(
            graph_sizes(self.max_num_seqs), self.table_width, self.block_size, self._send, self._forward
        )

    def _prompt_logprobs(
        self, batch: ScheduledBatch, inputs: ModelInputs[np.ndarray], hidden: Tensor
    ) -> dict[int, list[dict[int, Logprob]]]:
        """What the chunks' prompt tokens predict of the prompt tokens after them, where asked for."""
        assert self.model is not None
        results: dict[int, list[dict[int, Logprob]]] = {}
        for (seq, start, end), row in zip(batch.chunks, inputs.cu_seqlens_q.tolist(), strict=False):
            if seq.prompt_logprobs is None:
                continue
            results[seq.seq_id] = entries = []
            last = min(end, seq.num_prompt_tokens - 1)
            for low in range(start, last, LOGPROB_ROWS):
                high = min(low + LOGPROB_ROWS, last)
                logits = self.model.compute_logits(hidden[row + low - start : row + high - start])
                entries += report_logprobs(logits, seq.token_ids[low + 1 : high + 1], seq.prompt_logprobs)
        return results

    def close(self) -> None:
        """Release the model, the cache and the graphs."""
        self.model, self.caches, self.graphs, self.staging = None, [], None, None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


# ---- LLM: what a user holds ----------------------------------------------------------------------


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block ends, so that the engine's bookkeeping is never left half done."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python interrupts its main thread only
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: pending.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        handler(*pending[0])


class LLM:
    """A model, ready to answer. Arguments are `EngineConfig`'s; names are vLLM's where it has them.

    Not for several threads at once: `AsyncLLM` is.

    >>> with LLM("Qwen/Qwen3-0.6B") as llm:  # doctest: +SKIP
    ...     print(llm.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text)

    Raises:
        TypeError: an argument that does not exist.
        ValueError: a setting or checkpoint that cannot be served; nothing is kept.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self.config = config = EngineConfig(model=model, **settings)
        self.checkpoint = open_checkpoint(
            str(config.model),
            tokenizer=None if config.tokenizer is None else str(config.tokenizer),
            revision=config.revision,
            model_impl=config.model_impl,
            trust_remote_code=config.trust_remote_code,
        )
        most = self.checkpoint.max_model_len or config.max_model_len
        if most is None:
            raise ValueError(
                "max_model_len must be given: the checkpoint's config does not say how long it may be"
            )
        self.max_model_len = config.max_model_len or most
        if self.max_model_len > most:
            raise ValueError(
                f"max_model_len must be at most the {most} positions the model was made for, "
                f"got {self.max_model_len}"
            )
        self.runner = ModelRunner(config, self.checkpoint, self.max_model_len)
        self.scheduler = Scheduler(
            BlockManager(
                self.runner.num_blocks,
                self.runner.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.runner.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self._print_what_runs()
        self._is_closed = False
        self._requests: dict[str, Request] = {}  # all whose last output was not handed over yet
        self._samples: dict[int, tuple[Request, Sample]] = {}  # seq_id -> whose it is
        self._seq_ids = itertools.count()
        self._request_numbers = itertools.count()
        self._num_steps = self._num_prompt_tokens = self._num_generation_tokens = 0
        self._in_flight: Launch | None = None  # the step whose tokens were not taken in yet
        on_gpu = self.runner.device.type == "cuda"
        self._is_async = on_gpu if config.async_scheduling is None else config.async_scheduling

    def _print_what_runs(self) -> None:
        runner = self.runner
        code = "nanoengine's" if isinstance(runner.model, Decoder) else "transformers'"
        print(
            f"nanoengine: {self.checkpoint.architecture} on {code} code, {runner.attention_name}, "
            f"{str(runner.dtype).removeprefix('torch.')} on {runner.device}, "
            f"KV cache of {runner.num_blocks} blocks of {runner.block_size} tokens",
            file=sys.stderr,
        )

    # -- for most users

    def generate(
        self,
        prompts: Prompt | AnySequence[Prompt],
        sampling_params: SamplingParams | AnySequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: AnySequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in their order.

        Args:
            prompts: a string, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`,
                or a list of these.
            sampling_params: one for all or one per prompt; None is `get_default_sampling_params()`.
            use_tqdm: show progress.
            priority: one per prompt, with `scheduling_policy="priority"`; lower runs first.

        Raises:
            ValueError, TypeError: a prompt or parameter cannot be served; then none was queued. After
                any other exception this call's requests are aborted and the engine stays usable.
        """
        checked = self._check_all(prompts, sampling_params, priority)
        with self._queued(checked) as requests:
            self._run_until_finished(requests, use_tqdm)
            return [self._claim(request, RequestOutputKind.FINAL_ONLY) for request in requests]

    def stream(
        self,
        prompts: Prompt | AnySequence[Prompt],
        sampling_params: SamplingParams | AnySequence[SamplingParams] | None = None,
        *,
        priority: AnySequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts and yield each one's new text and tokens as they come, finished ones marked.

        Takes what `generate` takes and raises what it raises, at the call. `request_id` is the
        prompt's index. Leaving the loop early, or closing the iterator, aborts what is left.
        """
        return self._stream(self._check_all(prompts, sampling_params, priority))

    def chat(
        self,
        messages: AnySequence[Any],
        sampling_params: SamplingParams | AnySequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of `{"role": ..., "content": ...}`), or several at once.

        Raises:
            ValueError: the tokenizer has no chat template; and as `generate`.
        """
        prompts = self.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(self, messages: AnySequence[Any], **template_settings: Any) -> list[dict[str, Any]]:
        """Conversations as prompts for `generate`, `stream` or `add_request`, by the chat template."""
        settings = {"add_generation_prompt": True, **template_settings}
        return render_chats(messages, self.get_tokenizer(), **settings)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config recommends; vLLM's defaults where it says nothing."""
        names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        names["max_new_tokens"] = "max_tokens"
        given = self.checkpoint.generation_config
        chosen = {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
        return SamplingParams(**chosen)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; None where the checkpoint has none."""
        return self.checkpoint.tokenizer

    # -- for those who drive the engine step by step

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Queue a request; `step` computes it.

        Raises:
            ValueError, TypeError: the id is in use, or the request cannot be served.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        params = self.get_default_sampling_params() if params is None else params
        self._submit(request_id, self._check(prompt, params, priority), is_driven=False)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns each request that got a token or finished, with all it has so far.

        With async scheduling the tokens are those of the step before, so that the first call returns none.

        Raises:
            Exception: whatever the forward pass raised. Every request keeps the tokens it had, is still
                queued, and will be recomputed; call again, or abort some.
        """
        self._step()
        ready = [request for request in self._requests.values() if request.is_due]
        return [self._claim(request) if request.finished else request.output() for request in ready]

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Drop requests and free their blocks; ids that are unknown, or were handed over, are ignored.

        Returns:
            What the requests had so far; finish_reason is "abort" for the samples that still ran.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with uninterrupted():
            requests = [self._requests[i] for i in dict.fromkeys(ids) if i in self._requests]
            seqs = [sample_.seq for request in requests for sample_ in request.samples]
            self.scheduler.finish([seq for seq in seqs if seq.finish_reason is None], "abort")
            return [self._claim(request) for request in requests]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute or to hand over."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused (False) while requests run."""
        return self.scheduler.block_manager.reset_prefix_cache()

    def metrics(self) -> dict[str, int | float]:
        """Counters since the start, and the state of the queues and the cache now.

        `seconds_*` add up the phases of the steps: schedule, inputs (arrays, and their copies to the
        device), forward (up to the logits), sample, update (the scheduler's, and tokens to text). On
        CUDA, forward only queues its kernels; sampling waits for them, and its seconds hold theirs.
        """
        blocks = self.scheduler.block_manager
        return {
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_blocks": blocks.num_blocks,
            "num_free_blocks": blocks.num_free_blocks,
            "kv_cache_usage": blocks.usage,
            "num_preemptions": self.scheduler.num_preemptions,
            "prefix_cache_queries": blocks.num_cache_queries,
            "prefix_cache_hits": blocks.num_cache_hits,
            "prompt_tokens": self._num_prompt_tokens,
            "generation_tokens": self._num_generation_tokens,
            "num_steps": self._num_steps,
            **{f"seconds_{phase}": seconds for phase, seconds in self.runner.stopwatch.seconds.items()},
        }

    def close(self) -> None:
        """Abort what runs and release the memory; the object is of no use afterwards."""
        self._is_closed = True
        self.abort_request(list(self._requests))
        self._in_flight = None
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- from prompts to requests

    def _check_all(self, prompts: Any, sampling_params: Any, priority: Any) -> list[CheckedRequest]:
        """Validate a whole call before anything of it is queued."""
        prompt_list = split_prompts(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params_list = [params] * len(prompt_list) if isinstance(params, SamplingParams) else params
        priorities = [0] * len(prompt_list) if priority is None else priority
        for name, values in (("sampling_params", params_list), ("priority", priorities)):
            if not isinstance(values, list | tuple):
                raise TypeError(f"{name} must be one for all prompts or a list, got {values!r}")
            if len(values) != len(prompt_list):
                raise ValueError(f"{name} must be one per prompt: got {len(values)} for {len(prompt_list)}")
        return [self._check(*one) for one in zip(prompt_list, params_list, priorities, strict=True)]

    def _check(self, prompt: Any, params: Any, priority: Any) -> CheckedRequest:
        """Validate one request completely, without changing anything; the prompt as text and token ids."""
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {params!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an integer, got {priority!r}")
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise ValueError(f'priority must be 0 without scheduling_policy="priority", got {priority}')
        vocab_size = self.checkpoint.vocab_size
        params.check_vocabulary(vocab_size)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.get_tokenizer() is None:
                raise ValueError(f"{name} needs a tokenizer and the checkpoint has none")
        candidates = params.allowed_token_ids or range(vocab_size)
        if params.min_tokens and self._stop_ids(params).issuperset(candidates):
            raise ValueError(
                f"min_tokens={params.min_tokens} bans end-of-sequence and stop tokens, which leaves nothing "
                f"to sample with allowed_token_ids={params.allowed_token_ids}"
            )
        text, token_ids = read_prompt(prompt, self.get_tokenizer(), vocab_size)
        self.scheduler.check_fits(len(token_ids))
        return CheckedRequest(text, token_ids, params, priority)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if params.ignore_eos else self.checkpoint.eos_token_ids
        return frozenset((*eos, *(params.stop_token_ids or ())))

    def _submit(self, request_id: str, checked: CheckedRequest, *, is_driven: bool) -> Request:
        """Make the request's sequences and queue them."""
        text, token_ids, params, priority = checked
        tokenizer = self.get_tokenizer()
        bad_words = bad_word_ids(params.bad_words or [], tokenizer)
        stop_ids = self._stop_ids(params)
        seqs = []
        for index in range(params.n):
            seq_id = next(self._seq_ids)
            unseeded = params.seed is None or params.seed == -1
            source = f"{self.config.seed} {seq_id}" if unseeded else f"{params.seed} sample {index}"
            seq = Sequence(
                seq_id,
                token_ids,
                params,
                priority=priority,
                seed=xxh3_64_intdigest(source.encode()),
                stop_ids=stop_ids,
                bad_words=bad_words,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            )
            seqs.append(seq)
        request = Request(request_id, text, params, seqs, tokenizer, is_driven)
        with uninterrupted():
            self._requests[request_id] = request
            self._num_prompt_tokens += len(token_ids)
            for sample_ in request.samples:
                self._samples[sample_.seq.seq_id] = request, sample_
                self.scheduler.add(sample_.seq)
        return request

    @contextmanager
    def _queued(self, checked: list[CheckedRequest]) -> Iterator[list[Request]]:
        """Queue requests; those whose last output was not handed over when the block ends are aborted."""
        unused = (i for i in map(str, self._request_numbers) if i not in self._requests)
        request_ids = list(itertools.islice(unused, len(checked)))
        try:
            yield [
                self._submit(request_id, one, is_driven=True)
                for request_id, one in zip(request_ids, checked, strict=True)
            ]
        finally:
            self.abort_request(request_ids)

    def _claim(self, request: Request, kind: RequestOutputKind | None = None) -> RequestOutput:
        """Hand over a request's last output and forget it."""
        del self._requests[request.request_id]
        for sample_ in request.samples:
            del self._samples[sample_.seq.seq_id]
        return request.output(kind)

    # -- the loop

    def _step(self) -> list[Request]:
        """One step of the engine; returns the requests that got a token.

        With async scheduling the tokens are those of the step before: this one is launched first, from
        tokens that only the device knows, so that the device always has work. Sequences that turn out
        to have ended are computed once more for nothing.
        """
        requests: list[Request] = []
        try:
            if (before := self._in_flight) is not None:
                # Penalties and bans need to know the tokens before the one they apply to.
                if any(seq.params.edits_logits for seq in before.batch.sampled_seqs):
                    requests = self._collect()
                else:
                    self.scheduler.advance(before.batch)
            launch = self._launch()
            if self._in_flight is not None:
                requests = self._collect(is_advanced=True)
            self._in_flight = launch
            if launch is not None and not self._is_async:
                requests = self._collect()
            return requests
        except BaseException:
            with uninterrupted():
                self._in_flight = None
                self.scheduler.recover()
            raise

    def _launch(self) -> Launch | None:
        """Schedule a step and queue it on the device; None if there is nothing to compute."""
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        with uninterrupted():
            batch = self.scheduler.schedule()
        stopwatch.lap("schedule")
        if not batch.chunks:
            return None
        with self.runner.threads, self.runner.gpu:
            return self.runner.launch(batch, self._in_flight)

    def _collect(self, *, is_advanced: bool = False) -> list[Request]:
        """Wait for the step in flight and take in its tokens; returns the requests that got one."""
        assert self._in_flight is not None
        batch = self._in_flight.batch
        with self.runner.threads, self.runner.gpu:
            sampled = self.runner.collect(self._in_flight)
        self.runner.stopwatch.start()
        with uninterrupted():
            self._in_flight = None
            # What ended while the step was in flight takes nothing from it.
            is_due = [seq.status is not Status.FINISHED for seq in batch.sampled_seqs]
            self.scheduler.update(batch, sampled.token_ids, is_advanced=is_advanced)
            self._num_steps += 1
            requests = self._take_in(batch, sampled, is_due)
        self.runner.stopwatch.lap("update")
        return requests

    def _take_in(self, batch: ScheduledBatch, sampled: SamplerOutput, is_due: list[bool]) -> list[Request]:
        """Turn a step's tokens into text, look for stop strings, note the times."""
        now = time.monotonic()
        for seq, start, _ in batch.chunks:
            if seq.seq_id not in self._samples:  # aborted while the step was in flight
                continue
            request, _ = self._samples[seq.seq_id]
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
            if entries := sampled.prompt_logprobs.get(seq.seq_id):
                # After a preemption the prompt is computed again; what is known already is skipped.
                request.prompt_logprobs += entries[len(request.prompt_logprobs) - start - 1 :]
                self._name_tokens(entries)
        requests: dict[str, Request] = {}
        for seq, logprobs, due in zip(batch.sampled_seqs, sampled.logprobs, is_due, strict=True):
            if not due:
                continue
            request, sample_ = self._samples[seq.seq_id]
            requests[request.request_id] = request
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if seq.finish_reason != "error":
                self._num_generation_tokens += 1
                self._take_in_token(request.params, seq, sample_, logprobs)
            if seq.finish_reason is not None and request.finished:
                request.metrics.finished_time = now
        return list(requests.values())

    def _take_in_token(
        self, params: SamplingParams, seq: Sequence, sample_: Sample, logprobs: dict[int, Logprob] | None
    ) -> None:
        token_id = seq.token_ids[-1]
        if logprobs is not None:
            self._name_tokens([logprobs])
            sample_.logprobs.append(logprobs)
            sample_.cumulative_logprob += logprobs[token_id].logprob
        # The text of the token that ends a sequence is not part of its output.
        if seq.finish_reason != "stop" or params.include_stop_str_in_output:
            may_stop = seq.num_output_tokens > params.min_tokens or params.min_tokens == 0
            stop = sample_.detokenizer.append(token_id, may_stop)
            if stop is not None:
                self.scheduler.finish([seq], "stop", stop)

    def _name_tokens(self, entries: list[dict[int, Logprob]]) -> None:
        tokenizer = self.get_tokenizer()
        if tokenizer is not None:
            for entry in entries:
                for token_id, logprob in entry.items():
                    logprob.decoded_token = tokenizer.decode([token_id])

    def _run_until_finished(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until all of the requests are finished; others in the engine advance with them."""
        left = {request.request_id for request in requests}
        start, num_prompt_tokens, num_output_tokens = time.monotonic(), 0, 0
        with tqdm(total=len(left), desc="Processed prompts", disable=not use_tqdm) as bar:
            while left:
                if not self.scheduler.has_unfinished():
                    raise RuntimeError(
                        "requests were aborted, or stepped by another thread: use AsyncLLM there"
                    )
                for request in self._step():
                    if request.request_id not in left or not request.finished:
                        continue
                    left.remove(request.request_id)
                    seqs = [sample_.seq for sample_ in request.samples]
                    num_prompt_tokens += seqs[0].num_prompt_tokens
                    num_output_tokens += sum(seq.num_output_tokens for seq in seqs)
                    elapsed = time.monotonic() - start
                    rates = f"{num_prompt_tokens / elapsed:.0f} prompt tokens/s, "
                    rates += f"{num_output_tokens / elapsed:.0f} output tokens/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()

    def _stream(self, checked: list[CheckedRequest]) -> Iterator[RequestOutput]:
        with self._queued(checked) as requests:
            left = list(enumerate(requests))
            while left:
                self._step()
                for index, request in left:
                    if request.has_news and request.request_id in self._requests:
                        kind = RequestOutputKind.DELTA
                        output = self._claim(request, kind) if request.finished else request.output(kind)
                        output.request_id = str(index)
                        yield output
                left = [(i, request) for i, request in left if request.request_id in self._requests]
