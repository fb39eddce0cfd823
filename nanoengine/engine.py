"""The engine: scheduling, the paged KV cache, and the model runner.

Each `EngineCore.step` does the following:

    batch    = scheduler.schedule()              # choose which tokens to compute, in which cache blocks
    launch   = runner.launch(batch, before)      # run a forward pass and sample (before: the previous launch)
    sampled  = runner.collect(launch)            # wait for the tokens
    advanced = scheduler.update(batch, sampled)  # append tokens, finish sequences, free their blocks

With async scheduling, a step is collected only after the next step is launched, so that the device does not
wait for the host. If an input token has not reached the host yet, the next step reads it on the device.

Read top to bottom: Sequence, BlockManager, Scheduler, build_inputs, ModelRunner, EngineCore. Only the
scheduler and its block manager (or their subclasses) change sequences, queues and blocks, and neither
touches a tensor. The runner owns the model and the KV cache, and only reads sequences.

llm_engine.py sits above this file: it turns requests into sequences, and their tokens into outputs. Optional
features live in extensions/. This file imports neither.

What lives where: PagedAttention and automatic prefix caching (BlockManager), continuous batching, chunked
prefill and recomputation preemption (Scheduler), CUDA graphs (ModelRunner), async scheduling (EngineCore).

Glossary:
    block           the cache memory for `block_size` consecutive tokens of a sequence
    block_table     a sequence's blocks: the i-th holds its tokens [i * block_size, (i + 1) * block_size)
    slot            one token's place in the cache. With block_size 4 and block_table [7, 2], the token at
                    position 5 is at offset 1 of block_table[1], which is block 2: slot 2 * 4 + 1 = 9
    computed        a token whose K and V are in the cache, or will be once all scheduled steps have run
    registered      a full block that the prefix cache can find
    hit             a registered block that a sequence reuses when it is admitted. It was computed for another
                    sequence, or for this one before a preemption. Its tokens are called hits too
    token budget    how many tokens one step may compute, `max_num_batched_tokens`
    in flight       a step that was launched and not yet collected
    pending         a token that a scheduled step samples: its position is known, its value is not yet
    draft token     a guess for one of the next tokens, which the step itself verifies
    preempt         free a running sequence's blocks; the sequence keeps its tokens and is recomputed later

Shape letters: T tokens in a step, S sequences, R sampled tokens, P pending tokens, E hidden size.
"""

import bisect
import itertools
import logging
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from nanoengine.backends.device import Attention, Device, Download, Forward
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.step_inputs import AttentionMetadata, ModelInputs, map_slots, pad_tables, send_inputs
from nanoengine.detokenizer import Detokenizer
from nanoengine.sampling.logprobs import Logprobs, Reports, report_prompts
from nanoengine.sampling.sampler import MAX_ROWS, CachedRows, RowProcessor, Sample, read_tokens, why_no_token
from nanoengine.sampling_params import SamplingParams
from nanoengine.timing import Stopwatch

# ---- Sequence: one sample of one request ---------------------------------------------------------


@dataclass(slots=True, weakref_slot=True, eq=False)
class Sequence:
    """Holds the tokens of one sample of a request, and the blocks that store their K and V.

    Example: a prompt of 10 tokens in blocks of 4, the first 8 already computed for another sequence.

                       block_table   known tokens  num_hit_tokens  num_computed_tokens  num_registered_blocks
        waiting        []            10            0               0                    0
        admitted       [5, 6, 9]     10            8               8                    2
        scheduled      [5, 6, 9]     10            8               10                   2
        updated        [5, 6, 9]     11            8               10                   2
        2 steps later  [5, 6, 9]     13            8               12                   3
        one more       [5, 6, 9, 3]  14            8               13                   3

    If the prompt had only 8 tokens, all of them hits, it would be admitted with num_computed_tokens 7: the
    last token is computed again, because its logits are needed to sample the next token.

    With async scheduling, the next step is scheduled before its input token is known, and takes that token
    from the device, not from the host. `num_tokens` includes such pending tokens:

                          chunk     known tokens  num_computed_tokens  num_tokens  pending positions
        step 1 scheduled  [8, 10)   10            10                   11          10
        step 2 scheduled  [10, 11)  10            11                   12          10 (its input) and 11
        step 1 updated              11            11                   12          11
    """

    # Set when the sequence is created.
    seq_id: int  # increases in order of arrival
    token_ids: list[int]  # prompt, then output; only the scheduler appends
    params: SamplingParams
    _: KW_ONLY
    priority: int = 0  # lower runs first
    seed: int = 0  # 64 bits; the random number for a token depends only on seed and position
    stop_ids: frozenset[int] = frozenset()  # sampling one of these ends the sequence
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    prompt_logprobs: int | None = None  # how many to report per prompt token; None: not requested
    detokenizer: Detokenizer | None = None  # makes the output text and finds stop strings; None: no text
    processors: tuple[RowProcessor, ...] = ()  # applied to the logits after penalties, bias and the like
    num_prompt_tokens: int = field(init=False)

    # Written by the scheduler.
    max_num_tokens: int = field(init=False, default=0)  # limit on prompt plus output
    num_preemptions: int = field(init=False, default=0)
    first_scheduled_time: float | None = field(init=False, default=None)  # seconds of time.monotonic()
    num_tokens_at_failure: int = field(init=False, default=0)  # known tokens when `recover` last blamed it
    finish_reason: str | None = field(init=False, default=None)  # None: waiting or running
    stop_reason: int | str | None = field(init=False, default=None)

    # Written by the block manager. The scheduler also writes num_computed_tokens while the sequence runs.
    block_table: list[int] = field(init=False, default_factory=list)  # empty while waiting
    capacity: int = field(init=False, default=0)  # number of tokens its blocks have room for
    num_computed_tokens: int = field(init=False, default=0)
    num_hit_tokens: int = field(init=False, default=0)  # in hit blocks, whose K and V are not written again
    num_registered_blocks: int = field(init=False, default=0)  # counted from the start of block_table
    prefix: "Prefix | None" = field(init=False, default=None)  # of the last registered block; None: no block
    block_keys: list["BlockKey"] = field(init=False, default_factory=list)  # one per full block hashed so far
    # num_computed_tokens at the first admission: reported to the user as cached tokens.
    num_cached_tokens: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Copy token_ids and record the prompt's length."""
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of known tokens or, if all of them are computed and the next is pending, one more."""
        num_known, num_computed = len(self.token_ids), self.num_computed_tokens
        return num_known if num_known > num_computed else num_computed + 1

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens sampled so far, not counting pending ones."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has left both queues for good."""
        return self.finish_reason is not None

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of both queues: by priority, lowest first, then in order of arrival."""
        return self.priority, self.seq_id


BY_ORDER = attrgetter("order")
Tell = Callable[..., None]  # an observer: `tell(event, *details)`. extensions/trace.py lists the events


def tell_nobody(event: str, *details: object) -> None:
    """Ignore an event."""


# ---- BlockManager: which sequence holds which block, and what each block contains ----------------


class BlockKey(NamedTuple):
    """Identifies a full block's tokens and, up to collisions of the hash, the tokens before them."""

    hash: int  # chained: the hash of this block's tokens, seeded with the previous block's hash
    content: bytes  # the tokens themselves, int32
    group: int = 0  # which layers' K and V the block holds: extensions/sliding_windows.py

    def __hash__(self) -> int:
        """Return the chained hash, so that dicts look blocks up by it."""
        return self.hash


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Prefix:
    """Stands for all tokens from the start of a sequence to the end of a registered block.

    Blocks that were computed separately for the same prefix share one Prefix object. They are twins:

        block    tokens     after block    prefix    its parent
        1        a b c d    -              p         None
        2        e f g h    1              q         p
        3        a b c d    -              p         None          a twin of 1
        4        e f g h    3              q         p             a twin of 2: their parents are twins
        5        e f g h    -              r         None          not a twin of 2: nothing comes before it
    """

    key: BlockKey
    parent: "Prefix | None"  # the prefix that ends one block earlier
    blocks: "dict[int, Block]" = field(default_factory=dict)  # the twins, by block_id


@dataclass(slots=True, eq=False)
class Block:
    """Describes one physical block. A freed block keeps its prefix, so it can be hit until it is evicted."""

    block_id: int
    ref_count: int = 0  # number of block tables that contain it
    prefix: Prefix | None = None  # None: not registered


class BlockManager:
    """Allocates cache blocks, lets sequences share prefixes, and evicts the least recently used blocks.

    Block 0 is the null block. It is never allocated: padding refers to it, and it receives unwanted K and V.
    Every other block is either in use (ref_count is the number of block tables that contain it) or free.

    Free blocks wait in one queue, in the order of their reuse. Blocks that are not registered come first, the
    last freed one in front, as a processor may still cache its memory. Registered blocks follow, the least
    recently used first. The queue is an ordered dict, from whose middle a hit removes its block in O(1).

    A lookup goes from block to block. `prefixes` finds the next prefix in O(1), by the chained hash, and also
    compares the tokens, and the parent by identity, so a collision cannot cause a wrong hit. Once a block and
    its twins are evicted, their prefix is deleted, and no lookup gets to the blocks after it.
    This class combines vLLM's BlockPool and KVCacheManager. Source: PagedAttention, https://arxiv.org/abs/2309.06180
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[bytes, int], int] = xxh3_64_intdigest,
    ) -> None:
        self.num_blocks = num_blocks  # without the null block. assembly.py finds how many the memory holds
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        self.tell: Tell = tell_nobody  # `Scheduler.observe` replaces it
        self.num_query_tokens = 0  # prefix cache statistics: only first admissions count
        self.num_query_hits = 0
        self.clear()

    def clear(self) -> None:
        """Mark every block as free and empty, and keep the statistics."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks + 1)]
        self.free_blocks = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        self.prefixes: dict[tuple[BlockKey, Prefix | None], Prefix] = {}  # by key and parent
        self.tell("cleared")

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence holds."""
        return len(self.free_blocks)

    @property
    def max_computable_tokens(self) -> int:
        """The number of tokens of one sequence that fit in the cache if no other sequence is running."""
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks needed for num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    # -- admission

    def allocate(self, seq: Sequence) -> bool:
        """Allocate blocks for all tokens, hits first. Returns False and takes none if too few are free."""
        hits = self.find_prefix(seq)
        if not self._hold(seq, hits, self.num_blocks_for(seq.num_tokens) - len(hits)):
            return False
        seq.block_table = [block.block_id for block in hits]
        self._grow(seq, seq.num_tokens)
        self._note_hits(seq, hits)
        return True

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """Return the registered blocks that match the sequence's first blocks, up to the first miss."""
        # Log-probabilities of prompt tokens need logits, which the cache does not hold.
        if not self.enable_prefix_caching or seq.prompt_logprobs is not None:
            return []
        self._hash_full_blocks(seq)
        hits: list[Block] = []
        prefix: Prefix | None = None
        for key in seq.block_keys:
            prefix = self.prefixes.get((key, prefix))
            if prefix is None:
                break
            hits.append(next(iter(prefix.blocks.values())))  # any of the twins
        return hits

    def _hold(self, seq: Sequence, hits: list[Block], num_new: int) -> bool:
        """Add a reference to each hit. Adds none and returns False if that leaves fewer than num_new free."""
        num_revived = sum(block.ref_count == 0 for block in hits)  # free now, in use afterwards
        if num_new + num_revived > self.num_free_blocks:
            self.tell("refused", seq, num_new + num_revived)
            return False
        for block in hits:
            if block.ref_count == 0:
                del self.free_blocks[block.block_id]
            block.ref_count += 1
        return True

    def _note_hits(self, seq: Sequence, hits: list[Block]) -> None:
        """Record in the sequence which of its tokens the hits cover."""
        seq.num_registered_blocks = len(hits)
        seq.prefix = hits[-1].prefix if hits else None
        seq.num_hit_tokens = len(hits) * self.block_size
        # Compute at least one token, even if all are hits: sampling needs its logits.
        seq.num_computed_tokens = min(seq.num_hit_tokens, seq.num_tokens - 1)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.num_query_tokens += seq.num_tokens
            self.num_query_hits += seq.num_computed_tokens

    # -- growth and registration

    def may_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the block table for num_tokens tokens. Returns False and takes none if too few are free."""
        if self.num_blocks_for(num_tokens) - len(seq.block_table) > self.num_free_blocks:
            return False
        self._grow(seq, num_tokens)
        return True

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        """Add blocks until there is room for num_tokens tokens. The caller checks that enough are free."""
        num_new = self.num_blocks_for(num_tokens) - len(seq.block_table)
        seq.block_table += [self._take_free_block() for _ in range(num_new)]
        seq.capacity = len(seq.block_table) * self.block_size

    def _take_free_block(self) -> int:
        """Take the first free block. If it is registered, evict its content. Returns its id."""
        block_id, block = self.free_blocks.popitem(last=False)
        if block.prefix is not None:
            del block.prefix.blocks[block_id]
            if not block.prefix.blocks:
                del self.prefixes[block.prefix.key, block.prefix.parent]
            block.prefix = None
        block.ref_count = 1
        return block_id

    def register_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Register each block that the first num_tokens tokens fill. Those tokens must be known.

        Blocks may be registered when the step that fills them is scheduled, before it runs. Another sequence
        may hit them, even in that step: each layer writes the K and V of the whole batch before any sequence
        attends, and the device runs steps in order. If the step fails, `clear` removes the registration.
        """
        if not self.enable_prefix_caching:
            return
        self._hash_full_blocks(seq)
        first = seq.num_registered_blocks
        for i in range(first, num_tokens // self.block_size):
            seq.prefix = self._register(seq, i)
            seq.num_registered_blocks = i + 1
        self.tell("registered", seq, first)

    def _register(self, seq: Sequence, i: int) -> Prefix:
        """Register a sequence's i-th block after seq.prefix. Returns the prefix that ends with the block."""
        return self._add_block(seq.block_table[i], seq.block_keys[i], seq.prefix)

    def _add_block(self, block_id: int, key: BlockKey, parent: Prefix | None) -> Prefix:
        """Register a block for the prefix with this key and parent. Returns the prefix."""
        block, prefix = self.blocks[block_id], self.prefixes.setdefault((key, parent), Prefix(key, parent))
        block.prefix = prefix
        prefix.blocks[block_id] = block
        return prefix

    def _hash_full_blocks(self, seq: Sequence) -> None:
        """Extend seq.block_keys to cover all full blocks. Each block of a sequence is hashed only once."""
        keys, size = seq.block_keys, 4 * self.block_size  # bytes of int32
        data = array("i", seq.token_ids[len(keys) * self.block_size :]).tobytes()
        for end in range(size, len(data) + 1, size):
            content, parent_hash = data[end - size : end], keys[-1].hash if keys else 0
            keys.append(BlockKey(self.hash_function(content, parent_hash), content))

    # -- release

    def free(self, seq: Sequence) -> None:
        """Release all blocks of a sequence, the last block first, so that tails are evicted before prefixes.

        A lookup starts at the first block, so a tail whose prefix was evicted could never be hit.
        A step in flight may still use these blocks. That is safe: a step of their next owner runs after it.
        """
        for block_id in reversed(seq.block_table):
            self._release(block_id)
        self.forget(seq)

    def _release(self, block_id: int) -> None:
        """Drop one reference to a block. If none is left, queue the block as free."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_blocks[block_id] = block
            if block.prefix is None:
                self.free_blocks.move_to_end(block_id, last=False)

    def forget(self, seq: Sequence) -> None:
        """Reset a sequence's block fields without releasing any block."""
        seq.block_table, seq.prefix = [], None
        seq.capacity = seq.num_computed_tokens = seq.num_hit_tokens = seq.num_registered_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all registered content. Returns False and does nothing while any block is in use."""
        if self.num_free_blocks != self.num_blocks:
            return False
        self.clear()
        return True


# ---- Scheduler: which tokens to compute next -----------------------------------------------------


class Chunk(NamedTuple):
    """The tokens [start, end) of a sequence, to compute in a step.

    A draft token is a chunk of its own. `DraftingScheduler.update` drops samples that follow a wrong draft.
    """

    seq: Sequence
    start: int
    end: int
    samples: bool  # whether a token is sampled after the last one; False: known tokens are left to compute
    # token_ids[start:end] are the chunk's tokens; a pending last one is missing. The list is the sequence's
    # own or, with draft tokens, a longer copy (extensions/speculative_decoding.py).
    token_ids: list[int]


class ScheduledBatch(NamedTuple):
    """Lists a step's chunks. Launch it before the scheduler's next call, which may change block tables."""

    chunks: list[Chunk]
    sampled_seqs: list[Sequence]  # the sequences of the chunks that sample, in order
    num_tokens: int


class Scheduler:
    """Decides, for each step, which sequences to compute and how many tokens of each.

    There is no prefill phase and no decode phase. A sequence has `num_tokens - num_computed_tokens` tokens
    left to compute, and each step spends its token budget on running sequences first, then on waiting ones.
    A decode has one token left. A long prompt gets what the budget allows (chunked prefill): with a budget of
    4, a prompt of 10 tokens runs as the chunks [0, 4), [4, 8) and [8, 10), and only the last one samples.
    Prefix hits leave fewer tokens to compute. A preempted sequence is computed again. Sequences may join and
    leave at any step (continuous batching).

    Both queues are sorted by `Sequence.order`. Only the head of the waiting queue may be admitted; the others
    wait behind it. When a running sequence needs a block and none is free, the last running sequence is
    preempted (recomputation preemption). A waiting sequence never preempts a running one. With equal
    priorities, this is first come, first served. Another policy overrides `next_waiting` and `victim`:
    docs/guide/scheduling.md.
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
        self.max_chunk_tokens = long_prefill_token_threshold or max_num_batched_tokens  # 0: no limit
        # A sequence that fills every block can still sample one last token, which is never computed.
        self.max_num_tokens = min(max_model_len, block_manager.max_computable_tokens + 1)
        self.waiting: list[Sequence] = []  # these sequences hold no blocks
        self.running: list[Sequence] = []  # these hold at least one block each
        self.num_preemptions = 0
        self.admitting: Sequence | None = None  # the one that `schedule` is admitting: see `recover`
        self.is_ready: Callable[[Sequence], bool] | None = None  # None: all sequences are
        self.observe(tell_nobody)

    def observe(self, tell: Tell) -> None:
        """Call `tell(event, ...)` after each change from now on. extensions/trace.py lists the events."""
        self.tell = self.block_manager.tell = tell

    def schedule_only_if(self, is_ready: Callable[[Sequence], bool]) -> None:
        """From now on, schedule a sequence only if is_ready(seq): structured outputs wait for their masks."""
        self.is_ready = is_ready

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its prompt must be shorter than max_num_tokens: one output token has to fit."""
        assert 0 < seq.num_prompt_tokens < self.max_num_tokens
        wanted, limit = seq.params.max_tokens, self.max_num_tokens
        seq.max_num_tokens = limit if wanted is None else min(limit, seq.num_prompt_tokens + wanted)
        bisect.insort(self.waiting, seq, key=BY_ORDER)
        self.tell("added", seq)

    # -- before the forward pass

    def schedule(self) -> ScheduledBatch:
        """Choose the chunks of the next step, and count their tokens as computed.

        If all sequences are ready, an empty batch means that none is left, or that a step is in flight.
        """
        num_preemptions, budget = self.num_preemptions, self.max_num_batched_tokens
        chunks: list[Chunk] = []

        # Loop by index: a preemption in the loop removes an element at or after i.
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            num_tokens = seq.num_tokens
            # At its limit, a sequence waits for its last token, which is pending and is never computed.
            if num_tokens < seq.max_num_tokens and (self.is_ready is None or self.is_ready(seq)):
                if num_tokens > seq.capacity and not self._make_room(i):
                    continue  # the next sequence is at this index now
                budget -= self._schedule_chunk(seq, num_tokens, budget, chunks)
            i += 1

        # Admit nothing after a preemption: blocks are scarce, and the preempted sequence's last token may be
        # in flight. It would be sampled again. By the next step, `update` has appended it.
        may_admit = num_preemptions == self.num_preemptions
        waiting = self.waiting if self.is_ready is None else [*filter(self.is_ready, self.waiting)]
        while may_admit and waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            self.admitting = seq = self.next_waiting(waiting)
            if not self.block_manager.allocate(seq):
                break
            remove(self.waiting, seq)
            if waiting is not self.waiting:  # a filtered copy
                remove(waiting, seq)
            bisect.insort(self.running, seq, key=BY_ORDER)
            self.tell("admitted", seq)
            seq.first_scheduled_time = seq.first_scheduled_time or time.monotonic()
            budget -= self._schedule_chunk(seq, seq.num_tokens, budget, chunks)
        self.admitting = None
        budget -= self.add_drafts(chunks, budget)
        sampled_seqs = [chunk.seq for chunk in chunks if chunk.samples]
        batch = ScheduledBatch(chunks, sampled_seqs, self.max_num_batched_tokens - budget)
        self.tell("scheduled", batch)
        return batch

    def add_drafts(self, chunks: list[Chunk], budget: int) -> int:
        """Add draft tokens, and return how many. extensions/speculative_decoding.py overrides this."""
        return 0

    def next_waiting(self, waiting: list[Sequence]) -> Sequence:
        """Return the sequence to admit next. If its blocks are not free, no other one is admitted."""
        return waiting[0]

    def victim(self, running: list[Sequence]) -> Sequence:
        """Return the sequence to preempt, among those that this step has not scheduled yet."""
        return running[-1]

    def _make_room(self, i: int) -> bool:
        """Grow the i-th running sequence's block table, by preemption if needed. False: it was preempted."""
        seq = self.running[i]
        while not self.block_manager.may_append(seq, seq.num_tokens):
            candidates = self.running[i:]
            victim = self.victim(candidates)
            assert victim in candidates
            self._preempt(victim, seq)
            if victim is seq:
                return False
        self.tell("grew", seq)
        return True

    def _preempt(self, seq: Sequence, for_seq: Sequence) -> None:
        """Move a running sequence back to the waiting queue. It keeps its tokens, not its blocks."""
        self.block_manager.free(seq)
        remove(self.running, seq)
        bisect.insort(self.waiting, seq, key=BY_ORDER)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.tell("freed", seq, for_seq)

    def _schedule_chunk(self, seq: Sequence, num_tokens: int, budget: int, chunks: list[Chunk]) -> int:
        """Add a chunk of uncomputed tokens, as many as the budget and the limit allow. Returns how many."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens = end = min(num_tokens, start + budget, start + self.max_chunk_tokens)
        # A block whose last token is pending cannot be hashed yet: the sequence's next chunk registers it.
        num_known_tokens = min(end, len(seq.token_ids))
        if num_known_tokens // self.block_manager.block_size > seq.num_registered_blocks:
            self.block_manager.register_full_blocks(seq, num_known_tokens)
        chunks.append(Chunk(seq, start, end, end == num_tokens, seq.token_ids))
        return end - start

    # -- after the forward pass

    def update(self, batch: ScheduledBatch, token_ids: list[int | None]) -> list[Sequence]:
        """Append the tokens that a step sampled. Returns the sequences that got a token or failed."""
        advanced = []
        for seq, token_id in zip(batch.sampled_seqs, token_ids, strict=True):
            if seq.finish_reason is None:
                self.append_token(seq, token_id)
                advanced.append(seq)
        self.tell("updated", batch)
        return advanced

    def append_token(self, seq: Sequence, token_id: int | None) -> None:
        """Append a token, or None if none could be sampled. Finish the sequence if it is complete."""
        if self.tell is not tell_nobody:  # saves a call per sequence and step
            self.tell("sampled", seq, token_id)
        if token_id is None:
            self.finish(seq, "error", why_no_token(seq.processors))
            return
        seq.token_ids.append(token_id)
        is_stop_id = token_id in seq.stop_ids  # then the token has no text
        try:
            stop_string = seq.detokenizer.append(token_id, is_stop_id) if seq.detokenizer else None
        except BaseException:  # a panic in Rust, too. Only this sequence fails: the others get their tokens
            logging.getLogger(__name__).exception("the tokenizer failed on a sampled token")
            self.finish(seq, "error", "the tokenizer failed on a sampled token")
            return
        if stop_string is not None:
            self.finish(seq, "stop", stop_string)
        elif is_stop_id:  # a stop token id of the request, or the model's end of sequence
            self.finish(seq, "stop", token_id if token_id in (seq.params.stop_token_ids or ()) else None)
        elif len(seq.token_ids) >= seq.max_num_tokens:
            self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish a waiting or running sequence, and free its blocks."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        remove(self.running if seq.block_table else self.waiting, seq)
        self.block_manager.free(seq)
        self.tell("freed", seq, None)

    def recover(self) -> None:
        """After a failed step, clear the cache and put every running sequence back into the waiting queue.

        The failure is blamed on the sequence being admitted, or else on all running ones, or else on all
        waiting ones. One that is blamed twice without a new token in between finishes with "error".
        """
        self.tell("failed")
        failed = [self.admitting] if self.admitting else (self.running or self.waiting)
        self.running, self.waiting = [], sorted(self.running + self.waiting, key=BY_ORDER)
        self.admitting = None
        self.block_manager.clear()
        for seq in self.waiting:
            self.block_manager.forget(seq)
        for seq in failed:
            if seq.num_tokens_at_failure == len(seq.token_ids):
                self.finish(seq, "error", "two steps failed while computing it")
            seq.num_tokens_at_failure = len(seq.token_ids)


def remove(queue: list[Sequence], seq: Sequence) -> None:
    """Remove a sequence from a sorted queue."""
    index = bisect.bisect_left(queue, seq.order, key=BY_ORDER)
    assert queue[index] is seq
    del queue[index]


# ---- build_inputs: a scheduled batch as arrays ---------------------------------------------------


def build_inputs(
    batch: ScheduledBatch, block_size: int, before: ScheduledBatch | None = None
) -> ModelInputs[np.ndarray]:
    """Lay out a batch as arrays, without side effects, tensors or a Python loop over tokens.

    `before` is the step in flight, which samples the tokens that are pending in this batch.
    backends/step_inputs.py documents each array. Example with blocks of 4: a sequence with block table [7, 2]
    decodes token 31 at position 4, and one with block table [3] computes tokens 22, 23 at positions 2, 3.

        input_ids     31 22 23        cu_seqlens_q  0 1 3    sequence i has rows [cu[i], cu[i + 1])
        positions     4  2  3         seq_lens      5 4      the number of keys each sequence attends to
        slot_mapping  8  14 15        block_tables  [7, 2] [3, 0]
    """
    input_ids: list[int] = []
    pending_rows: list[int] = []
    pending_seqs: list[Sequence] = []
    for seq, start, end, _, token_ids in batch.chunks:
        input_ids += token_ids[start:end]
        if end > len(token_ids):  # the last token is pending: 0 is a placeholder
            pending_rows.append(len(input_ids))
            pending_seqs.append(seq)
            input_ids.append(0)
    seqs, starts, ends, samples, _ = zip(*batch.chunks, strict=True)
    first_positions, seq_lens = np.fromiter(starts, np.int64), np.fromiter(ends, np.int64)
    query_lens = seq_lens - first_positions
    cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()))

    # Position of a row: its offset within its sequence's rows, plus the position where the chunk starts.
    seq_of_row = np.repeat(np.arange(len(seqs)), query_lens)
    positions = np.arange(batch.num_tokens) - cu_seqlens_q[seq_of_row] + first_positions[seq_of_row]
    block_tables = pad_tables([seq.block_table for seq in seqs])
    slot_mapping = map_slots(block_tables, seq_of_row, positions, block_size)
    # If all of a sequence's tokens are hits, the last one is computed again only for its logits. Its K and V
    # are already in a block that other sequences read, so the new ones go to the null block, where nothing
    # reads them. A slot is block_id * block_size + offset, so `slot % block_size` is in block 0.
    num_hit_tokens = np.fromiter([seq.num_hit_tokens for seq in seqs], np.int64)
    slot_mapping[positions < num_hit_tokens[seq_of_row]] %= block_size

    sample_rows = (cu_seqlens_q[1:] - 1)[np.fromiter(samples, bool)]
    # Rows whose final hidden state is used. For all others, the last layer may stop after writing K and V.
    is_needed = np.fromiter([seq.prompt_logprobs is not None for seq in seqs], bool)[seq_of_row]
    is_needed[sample_rows] = True
    sample_index_of = dict(zip(before.sampled_seqs, itertools.count())) if before and pending_seqs else {}
    return ModelInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=positions,
        metadata=AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q.astype(np.int32),
            cu_seqlens_k=np.concatenate(([0], seq_lens.cumsum())).astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            has_cached_tokens=bool(first_positions.any()),
            # The index of the first chunk of several tokens; the appended True is for a batch without one.
            num_leading_decodes=int(np.append(query_lens > 1, True).argmax()),
            has_decodes=bool((query_lens == 1).any()),
            needed_rows=is_needed.nonzero()[0],
        ),
        sample_rows=sample_rows,
        pending_rows=np.array(pending_rows, dtype=np.int64),
        pending_samples=np.array([sample_index_of[seq] for seq in pending_seqs], dtype=np.int64),
    )


# ---- ModelRunner: from a scheduled batch to sampled tokens ---------------------------------------


class Launch(NamedTuple):
    """Holds a launched step: its batch, and where its tokens will be."""

    batch: ScheduledBatch
    tokens: Tensor | None  # (R,) int64, on the device; None: the step samples nothing
    download: Download | None  # copies the tokens to the host
    reports: Reports  # log-probabilities, if requested


class Sampled(NamedTuple):
    """Holds the tokens that a step sampled."""

    token_ids: list[int | None]  # one for each of `batch.sampled_seqs`; None: no token could be sampled
    logprobs: Logprobs


class ModelRunner:
    """Owns the model, the KV cache and the device, and turns a batch into sampled tokens.

    The device supplies these calls. `forward` is made with the caches, and holds the CUDA graphs, if any:

        device.running()          a `with` block around all computation: it may pin threads to cores
        device.send(arrays)       returns a step's arrays as device tensors, without waiting for the copy
        device.download(tensor)   starts a copy to the host; `read()` on the result waits for that copy only
        forward.pad(inputs)       pads a batch of decodes to a size that has a CUDA graph: 13 become 16.
                                  Padding rows write to the null block. Other steps are not padded
        forward(compute, inputs)  replays the graph of that size, or calls `compute(inputs)` if there is none

    Args:
        model: maps (input ids, positions, caches, a step's attention) to hidden states, (T, E). Its method
            compute_logits turns hidden states into logits. See models/decoder.py and models/hf.py.
        attention: builds a step's attention from its metadata. See backends/paged_attention.py.
        sample: samples one token from each row of logits, as sampler.py's `sample_rows` does.
        sampling_rows: caches the sampling parameters of each row, and what all rows have in common.
        before_forward: called just before each forward pass. `AsyncLLM` sends the outputs then.
    """

    def __init__(
        self,
        model: Any,
        device: Device,
        attention: Attention,
        sample: Sample,
        block_size: int,
        *,
        sampling_rows: CachedRows | None = None,
        before_forward: Callable[[], object] = lambda: None,
    ) -> None:
        self.model, self.device, self.attention = model, device, attention
        self.sample, self.block_size = sample, block_size
        self.sampling_rows, self.before_forward = sampling_rows or CachedRows(), before_forward
        self.stopwatch = Stopwatch()
        self.set_caches([])

    def set_caches(self, caches: list[KVCache], capture: Callable[[], Forward] = Forward) -> None:
        """Set the caches, one per layer, and the `forward` that `capture` makes for them."""
        self.caches = caches
        self.forward = capture()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, before: Launch | None = None) -> Launch:
        """Queue a batch on the device. If tokens are pending, `before` is the launch that samples them."""
        with self.device.running():
            self.stopwatch.start()
            on_host = self.build_inputs(batch, before.batch if before is not None else None)
            inputs = send_inputs(self.forward.pad(on_host), self.device.send)
            if before is not None and len(on_host.pending_rows):
                assert before.tokens is not None
                # `sample` returns -1 if no token can be sampled. Such a sequence will fail once the token is
                # collected. Until then, its input is token id 0, and the result is dropped.
                sampled = before.tokens[inputs.pending_samples].clamp(min=0)
                inputs.input_ids[inputs.pending_rows] = sampled
            self.stopwatch.lap("inputs")
            self.before_forward()
            hidden = self.forward(self.compute, inputs)
            compute_logits, download = self.model.compute_logits, self.device.download
            reports = Reports([], report_prompts(batch.chunks, hidden, compute_logits, download))
            if not batch.sampled_seqs:
                self.stopwatch.lap("forward")
                return Launch(batch, None, None, reports)
            # At most MAX_ROWS rows at a time, as `parts` too: a row of logits is as wide as the vocabulary.
            results: list[Tensor] = []
            parts = torch.split(hidden[inputs.sample_rows], MAX_ROWS)
            for part, (rows, settings) in zip(parts, self.sampling_rows.parts(batch, inputs), strict=True):
                logits = compute_logits(part)
                self.stopwatch.lap("forward")
                tokens, logprob_tables = self.sample(logits, rows, settings, download)
                results.append(tokens)
                reports.of_samples.extend(logprob_tables)
                self.stopwatch.lap("sample")
            tokens = torch.cat(results)
            return Launch(batch, tokens, download(tokens), reports)

    @torch.inference_mode()
    def collect(self, launch: Launch) -> Sampled:
        """Wait for a step's tokens, without waiting for any later step."""
        with self.device.running():
            self.stopwatch.start()
            token_ids = [] if launch.download is None else read_tokens(launch.download.read())
            logprobs = launch.reports.read(launch.batch.sampled_seqs, token_ids)
            self.stopwatch.lap("sample")
            return Sampled(token_ids, logprobs)

    def build_inputs(
        self, batch: ScheduledBatch, before: ScheduledBatch | None = None
    ) -> ModelInputs[np.ndarray]:
        """Call the function `build_inputs`. It is a method so that an extension can override it."""
        return build_inputs(batch, self.block_size, before)

    def compute(self, inputs: ModelInputs[Tensor], model: Any = None) -> Tensor:
        """Return hidden states, (T, E), of `model` or self.model. Rows not in needed_rows may be zeros."""
        attention = self.attention.build(inputs.metadata, self.block_size)
        hidden: Tensor = (model or self.model)(inputs.input_ids, inputs.positions, self.caches, attention)
        return hidden

    def close(self) -> None:
        """Release the model, the cache and the graphs."""
        self.model, self.sampling_rows = None, CachedRows()
        self.set_caches([])
        self.device.release()


# ---- EngineCore: one step at a time --------------------------------------------------------------


class Collected(NamedTuple):
    """Holds the results of one collected step."""

    advanced: list[Sequence]  # returned by `Scheduler.update`: these received a token or failed
    logprobs: Logprobs  # for these, and for sequences that finished while the step was in flight


class EngineCore:
    """Runs the scheduler and the runner step by step. It is named after vLLM V1's EngineCore.

    After each `step`, at most `max_in_flight` steps are in flight: 0, or 1 with async scheduling.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, max_in_flight: int) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.max_in_flight = max_in_flight
        self.in_flight: deque[Launch] = deque()  # launched and not yet collected
        self.num_steps = 0  # number of collected steps

    def step(self) -> Collected | None:
        """Launch a step, and collect the oldest one if it is due. After an exception, call `recover`."""
        before = self.in_flight[-1] if self.in_flight else None  # at most one step is in flight here
        # Bad words and processors need all earlier tokens on the host. So only collect: a launch in the same
        # call might raise, and the collected results would be lost.
        if before is not None and any(seq.bad_words or seq.processors for seq in before.batch.sampled_seqs):
            return self.collect()
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        batch = self.scheduler.schedule()
        stopwatch.lap("schedule")
        if batch.chunks:
            self.launch(batch, before)
        # If nothing was launched, there is nothing to overlap with.
        is_due = len(self.in_flight) > (self.max_in_flight if batch.chunks else 0)
        return self.collect() if is_due else None

    def launch(self, batch: ScheduledBatch, before: Launch | None) -> None:
        """Launch a step after `before`. It is a method so that an extension can override it."""
        self.in_flight.append(self.runner.launch(batch, before))

    def collect(self) -> Collected:
        """Wait for the oldest step in flight, and append its tokens to their sequences."""
        launch = self.in_flight.popleft()
        sampled = self.runner.collect(launch)
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        advanced = self.scheduler.update(launch.batch, sampled.token_ids)
        stopwatch.lap("update")
        self.num_steps += 1
        return Collected(advanced, sampled.logprobs)

    def recover(self) -> None:
        """After a failed step, drop the steps in flight and queue every unfinished sequence again."""
        self.in_flight.clear()
        self.scheduler.recover()

    def close(self) -> None:
        """Release the model, the cache and the steps in flight."""
        self.in_flight.clear()
        self.runner.close()
