"""The engine. What `EngineCore` does in each step is this.

    batch   = scheduler.schedule()              # choose which tokens to compute, in which cache blocks
    launch  = runner.launch(batch, before)      # one forward pass, and a token for each sequence due one
    sampled = runner.collect(launch)            # wait for the tokens
    took    = scheduler.update(batch, sampled)  # append them, end sequences, free blocks; who took one

With async scheduling a step is collected only after the next one was launched, so that the device does not
wait for the host. Then a launch needs tokens that only the device knows; `before` is the one that draws them.

Read top to bottom: Sequence, BlockManager, Scheduler, build_inputs, ModelRunner, EngineCore. Only the
scheduler and its block manager, or subclasses of these, change sequences, queues and blocks; neither ever
touches a tensor. The runner owns the model and the KV cache, and only reads sequences.

Requests, users and text are above: llm_engine.py makes sequences of requests, and outputs of their tokens.
What not every engine does is beside: each file of extensions/ adds an idea to these classes from outside.

Words used throughout:
    block           the cache memory for `block_size` consecutive tokens of a sequence
    block_table     a sequence's blocks: the i-th holds its tokens [i * block_size, (i + 1) * block_size)
    slot            one token's place in the cache. With block_size 4 and block_table [7, 2], the token at
                    position 5 is the second of the second block: slot 2 * 4 + 1 = 9
    computed        a token whose K and V are in the cache, or will be when the scheduled steps have run
    registered      a full block that the prefix cache can find
    hit             a registered block that holds part of a sequence's beginning when that is admitted:
                    computed for another sequence, or for itself before a preemption. Also each token in it
    token budget    how many tokens one step may compute, `max_num_batched_tokens`
    in flight       a step that was launched and not collected yet
    pending         a token that the step in flight draws: it has a position, but is not known yet
    preempt         take a running sequence's blocks away; it keeps its tokens and is computed anew later
    device          the processor that computes: backends/device.py

Shape letters: T tokens of a step, S sequences, R tokens drawn, P pending ones, E hidden size.
"""

import bisect
import itertools
import logging
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from nanoengine.backends.device import Attention, Device, Download, Forward
from nanoengine.backends.inputs import AttentionMetadata, ModelInputs, send_inputs
from nanoengine.backends.kv_cache import KVCache
from nanoengine.detokenizer import Detokenizer
from nanoengine.logprobs import Logprobs, Reports, report_prompts
from nanoengine.sampling import KeptRows, RowProcessor, Sample, read_tokens
from nanoengine.sampling_params import SamplingParams
from nanoengine.steps import Stopwatch

# ---- Sequence: one sample of one request ---------------------------------------------------------


@dataclass(slots=True, weakref_slot=True, eq=False)
class Sequence:
    """The tokens of one sample, and where their K and V are.

    A prompt of 10 tokens, in blocks of 4, whose first 8 another sequence has computed, step by step:

                       block_table   known tokens  num_hit_tokens  num_computed_tokens  num_registered_blocks
        waiting        []            10            0               0                    0
        admitted       [5, 6, 9]     10            8               8                    2
        scheduled      [5, 6, 9]     10            8               10                   2
        updated        [5, 6, 9]     11            8               10                   2
        2 steps later  [5, 6, 9]     13            8               12                   3
        one more       [5, 6, 9, 3]  14            8               13                   3

    Had the prompt 8 tokens, all of them hits, it would be admitted with num_computed_tokens 7: the last
    one is computed again, since its logits choose the next token.

    While a running sequence's token is being drawn, `num_tokens` counts it too. With async scheduling the
    next step is scheduled meanwhile, and computes that token without the host knowing what it is:

                          chunk     known tokens  num_computed_tokens  num_tokens  pending positions
        step 1 scheduled  [8, 10)   10            10                   11          10
        step 2 scheduled  [10, 11)  10            11                   12          10 (its input) and 11
        step 1 updated              11            11                   12          11
    """

    # What was asked for.
    seq_id: int  # also the order of arrival
    token_ids: list[int]  # prompt, then output; only the scheduler appends
    params: SamplingParams
    _: KW_ONLY
    priority: int = 0  # lower runs first
    seed: int = 0  # 64 bits; with a position it fixes the random number drawn there
    stop_ids: frozenset[int] = frozenset()  # sampling one of these ends the sequence
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    prompt_logprobs: int | None = None  # how many to report per prompt token; None: not asked for
    detokenizer: Detokenizer | None = None  # the output as text, and its stop strings; None: no text
    processors: tuple[RowProcessor, ...] = ()  # what edits its logits besides params
    num_prompt_tokens: int = field(init=False)

    # Written by the scheduler.
    max_num_tokens: int = field(init=False, default=0)  # prompt and output at most
    num_preemptions: int = field(init=False, default=0)
    first_scheduled_time: float | None = field(init=False, default=None)  # seconds of time.monotonic()
    finish_reason: str | None = field(init=False, default=None)  # None: it waits or runs
    stop_reason: int | str | None = field(init=False, default=None)

    # Written by the block manager; num_computed_tokens by the scheduler too, between admission and release.
    block_table: list[int] = field(init=False, default_factory=list)  # empty while it waits
    capacity: int = field(init=False, default=0)  # tokens that its blocks have room for
    num_computed_tokens: int = field(init=False, default=0)
    num_hit_tokens: int = field(init=False, default=0)  # others may read their slots: never written again
    num_registered_blocks: int = field(init=False, default=0)  # the first ones of its block table
    prefix_id: int = field(init=False, default=0)  # of its last registered block: see Block
    block_keys: list["BlockKey"] = field(init=False, default_factory=list)  # of full blocks, hashed once
    # What its user is told was cached: num_computed_tokens at its first admission.
    num_cached_tokens: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Keep a list of its own, and note how much of it is the prompt."""
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output, the pending token too.

        A token is pending while all known ones are computed, since the step that computes the last of
        them draws the next. After a preemption nothing is computed, and a token in flight is not counted.
        """
        num_known, num_computed = len(self.token_ids), self.num_computed_tokens
        return num_known if num_known > num_computed else num_computed + 1

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were sampled so far; a pending one is not among them."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it neither waits nor runs any more."""
        return self.finish_reason is not None

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the smaller. With equal priorities that is first come, first served (FCFS)."""
        return self.priority, self.seq_id


BY_ORDER = attrgetter("order")

# ---- BlockManager: who holds which block, and what is in it --------------------------------------


class BlockKey(NamedTuple):
    """What a full block holds, as the prefix cache looks it up."""

    hash: int  # of this block's tokens, chained: seeded with the hash of the block before
    content: bytes  # the tokens themselves, int32


@dataclass(slots=True, eq=False)
class Block:
    """One physical block. Its key stays when it is freed: the content can be hit until it is reused.

    A prefix_id stands for all tokens from the beginning of a sequence to the end of a block. Blocks of two
    sequences that computed the same tokens side by side are twins, with one prefix_id:

        block    tokens     after block    parent_id    prefix_id
        1        a b c d    -              0            1
        2        e f g h    1              1            2
        3        a b c d    -              0            1            twin of 1
        4        e f g h    3              1            2            twin of 2: either is found after 1 or 3
        5        e f g h    -              0            3            the same tokens after another prefix
    """

    block_id: int
    ref_count: int = 0  # sequences whose block tables name it
    key: BlockKey | None = None  # None: not registered
    prefix_id: int = 0
    parent_id: int = 0  # prefix_id of the block before, 0 at the start of a sequence


class BlockManager:
    """Hands out cache blocks, shares those with the same prefix, and evicts the least recently used.

    Block 0 is the null block. It is never handed out: padding points at it, and what must not be kept is
    written there. Every other block is in use, with a ref_count of as many block tables as name it, or free,
    in one of two queues. Of the free ones those without registered content are taken first, the last freed
    before the others, since its memory may still be in a processor's cache; then those with registered
    content, the least recently used first. A hit takes its block out of the middle of that queue, in O(1).

    A hit is verified by content and parent, so that a hash collision costs a comparison, never a wrong token.
    A block whose parent was evicted, with all of the parent's twins, cannot be found any more, and is evicted
    in its turn.

    It is vLLM's BlockPool and KVCacheManager in one.
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
        self.num_query_tokens = 0  # statistics of the prefix cache, over first admissions
        self.num_query_hits = 0
        self.clear()

    def clear(self) -> None:
        """Forget every block's use and content, as if new; statistics stay."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks + 1)]
        self.empty_blocks = deque(self.blocks[1:])  # free, and nothing can be found in them
        self.evictable_blocks: OrderedDict[int, Block] = OrderedDict()  # free, and registered
        # hash -> the blocks with that hash, by id: twins, and different contents that collide.
        self.registered_blocks: dict[int, dict[int, Block]] = {}
        self.next_prefix_id = 1

    # -- admission

    def allocate(self, seq: Sequence) -> bool:
        """Give a sequence blocks for all of its tokens: what the prefix cache holds of it, then new ones.

        All or nothing: False, and nothing changed, where the free blocks are too few.
        """
        hits = self.find_prefix(seq)
        if not self._hold(hits, self.num_blocks_for(seq.num_tokens) - len(hits)):
            return False
        seq.block_table = [block.block_id for block in hits]
        self._grow(seq, seq.num_tokens)
        self._note_hits(seq, hits)
        return True

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The registered blocks that hold the sequence's beginning, each looked up after the one before."""
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
            parent_id = block.prefix_id
        return hits

    # -- growth

    def may_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Try to grow the block table so that it has room for that many tokens.

        True if it has room now. False, and no block taken, where the free ones are too few.
        """
        if self.num_blocks_for(num_tokens) - len(seq.block_table) > self.num_free_blocks:
            return False
        self._grow(seq, num_tokens)
        return True

    def register_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Let the prefix cache find the blocks that are full with the first num_tokens tokens, known ones.

        Called as soon as the step that fills them is scheduled, so before they are filled. Whoever hits them
        reads them late enough all the same: in that step, since each layer writes the K and V of the whole
        batch before any sequence attends; in later ones, since the device runs steps in order. Should the
        step fail, `clear` forgets them.
        """
        if not self.enable_prefix_caching:
            return
        self._hash_full_blocks(seq)
        for i in range(seq.num_registered_blocks, num_tokens // self.block_size):
            parent_id, twin = seq.prefix_id, self._find(seq.block_keys[i], seq.prefix_id)
            if twin is None:
                seq.prefix_id, self.next_prefix_id = self.next_prefix_id, self.next_prefix_id + 1
            else:
                seq.prefix_id = twin.prefix_id
            self._register(seq, i, parent_id)
            seq.num_registered_blocks = i + 1

    # -- release

    def free(self, seq: Sequence) -> None:
        """Take all blocks back, the last first, so that tails are evicted before the prefixes others share.

        A prefix is of use without its tail, a tail without its prefix never: a lookup begins at the start.

        A step in flight may still read or write these blocks. Whoever gets them next computes in a later
        step, and the device runs steps in order.
        """
        for block_id in reversed(seq.block_table):
            self._release(block_id)
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        """Set a sequence's fields to those of one without blocks; nothing is released."""
        seq.block_table = []
        seq.capacity = seq.num_computed_tokens = 0
        seq.num_hit_tokens = seq.num_registered_blocks = seq.prefix_id = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all registered content; refused (False) while any block is in use."""
        if self.num_free_blocks != self.num_blocks:
            return False
        self.clear()
        return True

    # -- helpers

    @property
    def num_free_blocks(self) -> int:
        """How many blocks no sequence holds."""
        return len(self.empty_blocks) + len(self.evictable_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def max_computable_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return self.num_blocks * self.block_size

    def _hold(self, hits: list[Block], num_new: int) -> bool:
        """Count one more user of each hit, if that leaves num_new free blocks to take; whether it does."""
        num_revived = sum(block.ref_count == 0 for block in hits)  # free now, and taken if all goes well
        if num_new + num_revived > self.num_free_blocks:
            return False
        for block in hits:
            if block.ref_count == 0:
                del self.evictable_blocks[block.block_id]
            block.ref_count += 1
        return True

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        """Take free blocks, of which there are enough, until there is room for that many tokens."""
        num_new = self.num_blocks_for(num_tokens) - len(seq.block_table)
        seq.block_table += [self._take_free_block() for _ in range(num_new)]
        seq.capacity = len(seq.block_table) * self.block_size

    def _note_hits(self, seq: Sequence, hits: list[Block]) -> None:
        """Set a sequence's fields to what its hits have of it."""
        seq.num_registered_blocks = len(hits)
        seq.prefix_id = hits[-1].prefix_id if hits else 0
        seq.num_hit_tokens = len(hits) * self.block_size
        # At least one token is computed, even if all are hits: its logits choose the next.
        seq.num_computed_tokens = min(seq.num_hit_tokens, seq.num_tokens - 1)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.num_query_tokens += seq.num_tokens
            self.num_query_hits += seq.num_computed_tokens

    def _release(self, block_id: int) -> None:
        """A sequence holds the block no more."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.key is None:
                self.empty_blocks.appendleft(block)
            else:
                self.evictable_blocks[block_id] = block

    def _find(self, key: BlockKey, parent_id: int) -> Block | None:
        """A registered block with exactly this content after exactly this prefix."""
        for block in self.registered_blocks.get(key.hash, {}).values():
            if block.parent_id == parent_id and block.key == key:
                return block
        return None

    def _register(self, seq: Sequence, i: int, parent_id: int) -> None:
        """Make a sequence's i-th block findable; its tokens up to there have seq.prefix_id by now."""
        block, key = self.blocks[seq.block_table[i]], seq.block_keys[i]
        block.key, block.parent_id, block.prefix_id = key, parent_id, seq.prefix_id
        self.registered_blocks.setdefault(key.hash, {})[block.block_id] = block

    def _hash_full_blocks(self, seq: Sequence) -> None:
        """Extend seq.block_keys to its full blocks; each block is hashed once in its life."""
        first, last = len(seq.block_keys), len(seq.token_ids) // self.block_size
        if first == last:
            return
        data = array("i", seq.token_ids[first * self.block_size : last * self.block_size]).tobytes()
        block_bytes = 4 * self.block_size  # int32
        parent_hash = seq.block_keys[-1].hash if first else 0
        for start in range(0, len(data), block_bytes):
            content = data[start : start + block_bytes]
            parent_hash = self.hash_function(content, parent_hash)
            seq.block_keys.append(BlockKey(parent_hash, content))

    def _take_free_block(self) -> int:
        """The free block whose loss costs least, its old content forgotten."""
        if self.empty_blocks:
            block = self.empty_blocks.popleft()
        else:
            block_id, block = self.evictable_blocks.popitem(last=False)
            assert block.key is not None
            same_hash = self.registered_blocks[block.key.hash]
            del same_hash[block_id]
            if not same_hash:
                del self.registered_blocks[block.key.hash]
            block.key = None
        block.ref_count = 1
        return block.block_id


# ---- Scheduler: who computes what next -----------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, to compute this step."""

    seq: Sequence
    start: int
    end: int
    # Whether it reaches the sequence's end, so that a token is drawn: stored here, since a step later the
    # sequence may have grown or ended.
    samples: bool
    # Where [start, end) is read from: the sequence's own list, which is one short while the last is pending.
    # A chunk that computes a guess has a copy instead, with guesses appended (extensions/speculate.py).
    token_ids: list[int]


class ScheduledBatch(NamedTuple):
    """One step's work."""

    chunks: list[Chunk]
    sampled_seqs: list[Sequence]  # of each chunk that samples, in their order
    num_tokens: int


class Scheduler:
    """Decides each step which sequences catch up by how many tokens.

    There is no prefill phase and no decode phase. A sequence is behind by
    `num_tokens - num_computed_tokens`, and a step's token budget lets sequences catch up: those that
    run first, then waiting ones. Decode is catching up by one, a chunk of a long prompt by what the
    budget leaves; a prefix hit starts further along, a preempted sequence starts over. A prompt of 10
    tokens under a budget of 4 takes the chunks [0, 4), [4, 8) and [8, 10), and only the last one samples.

    Both queues are sorted by `Sequence.order`. The head of the waiting queue is admitted first, and those
    behind it wait until it is. When a running sequence needs a block and none is free, the tail of the
    running list is preempted; a waiting one never preempts, whatever its priority. So FCFS and priority
    scheduling are the same code.
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
        # A sequence that fills every block can still sample one token, which it will never compute.
        self.max_num_tokens = min(max_model_len, block_manager.max_computable_tokens + 1)
        self.waiting: list[Sequence] = []  # these hold no blocks
        self.running: list[Sequence] = []  # these hold one at least
        self.num_preemptions = 0
        # seq_id -> how many tokens it had, of those that ran when a step last failed: `recover` needs to know
        # which of them fail a second time without a token in between.
        self.length_at_failure: dict[int, int] = {}

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, whose prompt has to fit beside an output token: at most max_num_tokens - 1."""
        assert 0 < seq.num_prompt_tokens < self.max_num_tokens
        wanted, limit = seq.params.max_tokens, self.max_num_tokens
        seq.max_num_tokens = limit if wanted is None else min(limit, seq.num_prompt_tokens + wanted)
        bisect.insort(self.waiting, seq, key=BY_ORDER)

    # -- before the forward pass

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's chunks, and count their tokens as computed from here on.

        While sequences are unfinished, and no step is in flight, it is never empty.
        """
        num_preemptions, budget = self.num_preemptions, self.max_num_batched_tokens
        chunks: list[Chunk] = []

        # Indexed, since preemption shortens the list from its tail while it is walked from its head.
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            num_tokens = seq.num_tokens
            if num_tokens < seq.max_num_tokens:  # else the pending token is its last: nothing more to compute
                if num_tokens > seq.capacity and not self._make_room(seq):
                    break
                chunk = self._schedule_chunk(seq, num_tokens, budget)
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
            i += 1

        # After a preemption blocks are scarce: admitting now would only preempt again. And a sequence that
        # was preempted may have a token in flight: admitted at once, it would draw that one a second time. It
        # has taken it by the next call.
        may_admit = num_preemptions == self.num_preemptions
        while may_admit and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.block_manager.allocate(seq):
                break
            bisect.insort(self.running, seq, key=BY_ORDER)
            # In both queues for a moment, never in neither: should a signal strike here, `recover` finds it.
            del self.waiting[0]
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = time.monotonic()
            chunk = self._schedule_chunk(seq, seq.num_tokens, budget)
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        sampled_seqs = [chunk.seq for chunk in chunks if chunk.samples]
        return ScheduledBatch(chunks, sampled_seqs, self.max_num_batched_tokens - budget)

    def _make_room(self, seq: Sequence) -> bool:
        """Grow a running sequence's block table; while too few blocks are free, preempt the tail for it.

        The tail is behind the sequence, so nothing that is scheduled already is preempted. False if it was
        the sequence itself, which gave way to those before it.
        """
        while not self.block_manager.may_append(seq, seq.num_tokens):
            if self._preempt_last() is seq:
                return False
        return True

    def _preempt_last(self) -> Sequence:
        """Take the blocks of the running sequence that goes last; it keeps its tokens and waits."""
        seq = self.running[-1]
        self.block_manager.free(seq)
        bisect.insort(self.waiting, seq, key=BY_ORDER)
        del self.running[-1]
        seq.num_preemptions += 1
        self.num_preemptions += 1
        return seq

    def _schedule_chunk(self, seq: Sequence, num_tokens: int, budget: int) -> Chunk:
        """As much as the budget allows of what the sequence is behind; a decode's token it always allows."""
        start, most = seq.num_computed_tokens, self.max_chunk_tokens
        end = num_tokens if num_tokens - start == 1 else min(num_tokens, start + budget, start + most)
        seq.num_computed_tokens = end
        # A block whose last token is pending cannot be hashed yet: it is registered a step later.
        num_known_tokens = end if end < len(seq.token_ids) else len(seq.token_ids)
        if num_known_tokens // self.block_manager.block_size > seq.num_registered_blocks:
            self.block_manager.register_full_blocks(seq, num_known_tokens)
        return Chunk(seq, start, end, end == num_tokens, seq.token_ids)

    # -- after it

    def update(self, batch: ScheduledBatch, token_ids: list[int | None]) -> list[Sequence]:
        """Have sequences take the tokens that a step drew, one per `batch.sampled_seqs`.

        Returns those that did, or ended for want of a token; not those that ended while it was in flight.
        """
        took = []
        for seq, token_id in zip(batch.sampled_seqs, token_ids, strict=True):
            if seq.finish_reason is None:
                self.take(seq, token_id)
                took.append(seq)
        return took

    def take(self, seq: Sequence, token_id: int | None) -> None:
        """Append a token to a sequence, and end it where it is complete.

        None, where no token could be drawn, ends it with "error".
        """
        if token_id is None:
            self.finish(seq, "error", "no token could be drawn: logits are not numbers, or none is allowed")
            return
        seq.token_ids.append(token_id)
        is_stop_id = token_id in seq.stop_ids
        stop_string = None
        if seq.detokenizer is not None:
            try:
                stop_string = seq.detokenizer.append(token_id, is_stop_id)  # whose text is left out
            except Exception:  # its own fault: the others' tokens are taken all the same
                logging.getLogger(__name__).exception("a tokenizer failed on its own tokens")
                self.finish(seq, "error", "the tokenizer failed on its own tokens")
                return
        if stop_string is not None:
            self.finish(seq, "stop", stop_string)
        elif is_stop_id:  # one that the request named, or the model's end of sequence
            self.finish(seq, "stop", token_id if token_id in (seq.params.stop_token_ids or ()) else None)
        elif len(seq.token_ids) >= seq.max_num_tokens:
            self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence that waits or runs, and free its blocks."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        queue = self.running if seq.block_table else self.waiting
        del queue[bisect.bisect_left(queue, seq.order, key=BY_ORDER)]
        self.block_manager.free(seq)

    def recover(self) -> None:
        """After a step that failed: compute everything anew.

        What the step wrote and registered is not to be trusted, wherever it stopped: the prefix cache is
        forgotten, and all unfinished sequences wait again, with their tokens. Whose fault it was is unknown.
        A sequence that ran in two failing steps, without a new token in between, ends with "error", or it
        might fail for ever.
        """
        failed = self.running or self.waiting[:1]  # nothing ran: scheduling the head of the queue has failed
        again = [seq for seq in failed if self.length_at_failure.get(seq.seq_id) == len(seq.token_ids)]
        self.length_at_failure = {seq.seq_id: len(seq.token_ids) for seq in failed}
        unfinished = {seq.seq_id: seq for seq in self.running + self.waiting if not seq.is_finished}
        self.running, self.waiting = [], sorted(unfinished.values(), key=BY_ORDER)
        self.block_manager.clear()
        for seq in unfinished.values():
            self.block_manager.forget(seq)
        for seq in again:
            if not seq.is_finished:
                self.finish(seq, "error", "two steps that computed it failed")


# ---- build_inputs: a scheduled batch as arrays ---------------------------------------------------


def build_inputs(
    batch: ScheduledBatch, block_size: int, before: ScheduledBatch | None = None
) -> ModelInputs[np.ndarray]:
    """Lay a batch out as arrays. A pure function of integers, with no Python loop over tokens.

    backends/inputs.py says what each is for. With blocks of 4, a decode of the token 14 at position 4 of
    block table [7, 2], and the tokens 22 and 23 at positions 2 and 3 of [3]:

        input_ids     14 22 23        cu_seqlens_q  0 1 3    the rows of sequence i: [cu[i], cu[i + 1])
        positions     4  2  3         seq_lens      5 4      so many keys does each attend to
        slot_mapping  8  14 15        block_tables  [7, 2] [3, 0]

    Args:
        batch: the step to compute.
        block_size: tokens of a block.
        before: the step in flight, which draws the tokens that are pending in this one.
    """
    input_ids: list[int] = []
    pending_rows: list[int] = []
    pending_seqs: list[Sequence] = []
    for seq, start, end, _, token_ids in batch.chunks:
        input_ids += token_ids[start:end]
        if end > len(token_ids):  # the last one is pending: a 0 holds its place
            pending_rows.append(len(input_ids))
            pending_seqs.append(seq)
            input_ids.append(0)
    seqs, starts, ends, samples, _ = zip(*batch.chunks, strict=True)
    first_positions, seq_lens = np.fromiter(starts, np.int64), np.fromiter(ends, np.int64)
    query_lens = seq_lens - first_positions
    cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()))

    # Row r belongs to a sequence whose rows begin at cu_seqlens_q, and whose chunk begins at first_positions.
    seq_of_row = np.repeat(np.arange(len(seqs)), query_lens)
    positions = np.arange(batch.num_tokens) - cu_seqlens_q[seq_of_row] + first_positions[seq_of_row]
    block_tables = pad_block_tables([seq.block_table for seq in seqs])
    slot_mapping = map_slots(block_tables, seq_of_row, positions, block_size)
    # Where all of a prompt was hit, its last token is computed again, for its logits alone. Its K and V are
    # in a block that others read. The new ones go to the same place in the null block, which is their slot
    # modulo block_size, and nobody reads them.
    num_hit_tokens = np.fromiter([seq.num_hit_tokens for seq in seqs], np.int64)
    slot_mapping[positions < num_hit_tokens[seq_of_row]] %= block_size

    sample_rows = (cu_seqlens_q[1:] - 1)[np.fromiter(samples, bool)]
    # Whose hidden state anyone will look at: to draw from it, or for a prompt's log-probabilities. For all
    # other rows the last layer may stop after K and V.
    is_needed = np.fromiter([seq.prompt_logprobs is not None for seq in seqs], bool)[seq_of_row]
    is_needed[sample_rows] = True
    sample_of = dict(zip(before.sampled_seqs, itertools.count())) if before and pending_seqs else {}
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
            is_fresh=not first_positions.any(),  # every chunk begins at 0
            num_decodes=int(np.append(query_lens > 1, True).argmax()),
            needed_rows=is_needed.nonzero()[0],
        ),
        sample_rows=sample_rows,
        pending_rows=np.array(pending_rows, dtype=np.int64),
        pending_samples=np.array([sample_of[seq] for seq in pending_seqs], dtype=np.int64),
    )


def pad_block_tables(block_tables: list[list[int]]) -> np.ndarray:
    """Block tables as (S, most blocks) int32; the null block fills the rest.

    >>> pad_block_tables([[7, 2], [3]]).tolist()
    [[7, 2], [3, 0]]
    """
    num_blocks = np.fromiter(map(len, block_tables), np.int64)
    padded = np.zeros((len(block_tables), num_blocks.max()), dtype=np.int32)
    is_block = np.arange(padded.shape[1]) < num_blocks[:, None]
    padded[is_block] = np.fromiter(itertools.chain.from_iterable(block_tables), np.int32)
    return padded


def map_slots(
    block_tables: np.ndarray, seq_of_row: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Each row's cache slot, (T,) int64, given its sequence's place in block_tables and its position.

    >>> map_slots(np.array([[7, 2], [3, 0]]), np.array([0, 1, 1]), np.array([4, 2, 3]), block_size=4).tolist()
    [8, 14, 15]
    """
    blocks = block_tables[seq_of_row, positions // block_size]
    return blocks.astype(np.int64) * block_size + positions % block_size  # type: ignore[no-any-return]


# ---- ModelRunner: from a scheduled batch to sampled tokens ---------------------------------------


class Launch(NamedTuple):
    """A step on its way: what was asked of the device, and where its tokens will be."""

    batch: ScheduledBatch
    tokens: Tensor | None  # (R,) int64, on the device; None: no sequence is due a token
    download: Download | None  # of the tokens
    reports: Reports  # log-probabilities, where asked for


class Sampled(NamedTuple):
    """What a step drew."""

    token_ids: list[int | None]  # one per `batch.sampled_seqs`; None: it could not be drawn
    logprobs: Logprobs


class ModelRunner:
    """Owns the model, the KV cache and the device; turns a batch into sampled tokens.

    What depends on the processor is asked of the device, and of the `forward` that it makes at the start:

        device.running()          a `with` block around all that computes: pins threads to cores, say
        device.send(arrays)       a step's arrays as tensors there, without a wait for the copy
        device.download(tensor)   begins a copy back; its `read()` waits for that, and for nothing later
        forward.pad(inputs)       CUDA graphs are captured at the start, of steps of one token per sequence,
                                  with 1, 2, 4, 8, 16... sequences. A step of 13 such sequences gets 3 more,
                                  which write to the null block and nobody looks at. Others stay as they are
        forward(compute, inputs)  replays the graph of 16; for any other step calls `compute(inputs)`

    Args:
        model: called with input ids, positions, caches and a step's attention, it gives hidden states,
            (T, E); its compute_logits makes logits of some of their rows. In models/: decoder.py, hf.py.
        device: what computes.
        attention: builds a step's attention from its metadata. In backends/: attention.py.
        sample: `sample_rows`, or what does the same: draws a token from each row of logits.
        block_size: tokens of a block.
    """

    def __init__(
        self, model: Any, device: Device, attention: Attention, sample: Sample, block_size: int
    ) -> None:
        self.model, self.device, self.attention = model, device, attention
        self.sample, self.block_size = sample, block_size
        self.report = report_prompts  # what is told of prompts; extensions/pooling.py has another
        # Set by startup.py, which tries the largest steps out first, to see how much memory they leave.
        self.caches: list[KVCache] = []  # one per layer
        self.forward = Forward()
        self.stopwatch = Stopwatch()
        self.rows = KeptRows()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, before: Launch | None = None) -> Launch:
        """Queue a batch on the device; where tokens are pending, `before` is the step that draws them."""
        with self.device.running():
            self.stopwatch.start()
            arrays = self.build_inputs(batch, before.batch if before is not None else None)
            inputs = send_inputs(self.forward.pad(arrays), self.device.send)
            if len(arrays.pending_rows):
                assert before is not None
                assert before.tokens is not None
                # A token that could not be drawn is -1; what follows from it is thrown away.
                drawn = before.tokens[inputs.pending_samples].clamp(min=0)
                inputs.input_ids[inputs.pending_rows] = drawn
            self.stopwatch.lap("inputs")
            hidden = self.forward(self.compute, inputs)
            compute_logits, download = self.model.compute_logits, self.device.download
            of_prompts = self.report(batch.chunks, hidden, compute_logits, download)
            if not batch.sampled_seqs:
                self.stopwatch.lap("forward")
                return Launch(batch, None, None, Reports([], of_prompts))
            logits = compute_logits(hidden[inputs.sample_rows])
            self.stopwatch.lap("forward")
            tokens, of_samples = self.sample(logits, *self.rows.of(batch), download)
            launch = Launch(batch, tokens, download(tokens), Reports(of_samples, of_prompts))
            self.stopwatch.lap("sample")
            return launch

    @torch.inference_mode()
    def collect(self, launch: Launch) -> Sampled:
        """Wait for a step's tokens, and for no step after it."""
        with self.device.running():
            self.stopwatch.start()
            token_ids = [] if launch.download is None else read_tokens(launch.download.read())
            logprobs = launch.reports.read(launch.batch.sampled_seqs, token_ids)
            self.stopwatch.lap("sample")
            return Sampled(token_ids, logprobs)

    def build_inputs(
        self, batch: ScheduledBatch, before: ScheduledBatch | None = None
    ) -> ModelInputs[np.ndarray]:
        """As the function above; a method, so that an extension can add to it."""
        return build_inputs(batch, self.block_size, before)

    def compute(self, inputs: ModelInputs[Tensor]) -> Tensor:
        """Hidden states, (T, E); of rows that are not needed, a device may leave zeros."""
        attention = self.attention.build(inputs.metadata, self.block_size)
        hidden: Tensor = self.model(inputs.input_ids, inputs.positions, self.caches, attention)
        return hidden

    def close(self) -> None:
        """Release the model, the cache and the graphs."""
        self.model, self.caches, self.forward = None, [], Forward()
        self.device.release()


# ---- EngineCore: step after step -----------------------------------------------------------------


class Collected(NamedTuple):
    """What a step brought."""

    took: list[Sequence]  # as `Scheduler.update` returns them
    logprobs: Logprobs  # of these and maybe of more, whose draws were not taken


class EngineCore:
    """Scheduler and runner, step after step; the name is vLLM V1's.

    At most `max_in_flight` steps are in flight when `step` has ended: 0, or 1 with async scheduling. To
    scheduler and runner it is the same.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, max_in_flight: int = 0) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.max_in_flight = max_in_flight
        self.in_flight: deque[Launch] = deque()  # launched, not collected
        self.num_steps = 0  # collected ones

    def step(self) -> Iterator[Collected]:
        """Launch a step, and collect those that may not stay in flight.

        A generator, since one call may collect two steps, and what the first brought must reach the caller
        even if what follows raises. To be run to its end; after an exception, call `recover`.
        """
        before = self.in_flight[-1] if self.in_flight else None
        # Penalties, bans and the like need all earlier tokens on the host. Where a sequence in flight has
        # any, its token is waited for, and this step does not overlap.
        if before is not None and any(
            seq.params.edits_logits or seq.processors for seq in before.batch.sampled_seqs
        ):
            yield self.collect()
            before = None
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        batch = self.scheduler.schedule()
        stopwatch.lap("schedule")
        if batch.chunks:
            self.launch(batch, before)
        # With nothing launched there is nothing to overlap with, and all are collected.
        while len(self.in_flight) > (self.max_in_flight if batch.chunks else 0):
            yield self.collect()

    def launch(self, batch: ScheduledBatch, before: Launch | None) -> None:
        """Put a step in flight, behind `before`; a method, so that an extension can add to it."""
        self.in_flight.append(self.runner.launch(batch, before))

    def collect(self) -> Collected:
        """Wait for the oldest step in flight, and have sequences take its tokens."""
        launch = self.in_flight.popleft()
        sampled = self.runner.collect(launch)
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        took = self.scheduler.update(launch.batch, sampled.token_ids)
        stopwatch.lap("update")
        self.num_steps += 1
        return Collected(took, sampled.logprobs)

    def recover(self) -> None:
        """After a step that raised: every sequence keeps the tokens it has, and is computed anew."""
        self.in_flight.clear()
        self.scheduler.recover()

    def close(self) -> None:
        """Release the memory."""
        self.in_flight.clear()
        self.runner.close()
