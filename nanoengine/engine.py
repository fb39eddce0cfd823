"""The engine. A request enters at `LLMEngine.add_request` and leaves as text; each step in between is this.

    batch   = scheduler.schedule()              # which tokens to compute, in which cache blocks
    launch  = runner.launch(batch, before)      # one forward pass; a token for each sequence that is due one
    sampled = runner.collect(launch)            # the tokens, once the device has them
    took    = scheduler.update(batch, sampled)  # append, stop, free blocks: the sequences that took a token

With async scheduling a step is collected only after the next one was launched: the device never waits
for the host. Then the launch needs tokens that only the device knows; `before` is the launch that draws them.

Read top to bottom: Sequence, BlockManager, Scheduler, build_inputs, ModelRunner, LLMEngine. State has one
writer: the scheduler (with its block manager) writes sequences, queues and blocks and never sees a tensor;
the runner owns the model and the KV cache and only reads sequences; the engine owns requests.

Words used throughout:
    block           the cache memory for `block_size` consecutive tokens of a sequence
    block_table     a sequence's blocks: the i-th holds its tokens [i * block_size, (i + 1) * block_size)
    group           layers that see the same of a sequence: all of it, or a sliding window. A sequence has a
                    block table for each. Most models have one group; what follows reads best with one in mind
    slot            one token's place in the cache. With block_size 4 and block_table [7, 2], the token at
                    position 5 is the second of the second block: slot 2 * 4 + 1 = 9
    computed        a token whose K and V are in the cache, or will be when the scheduled steps have run
    hit             a token whose K and V the prefix cache has when its sequence is admitted: from another
                    sequence with the same beginning, or from itself before a preemption
    registered      a full block that the prefix cache can find
    token budget    how many tokens one step may compute, `max_num_batched_tokens`
    pending         a token that the step in flight draws: it has a position, but is not known yet
    draft           a guess of a token to come, computed along with the known ones; it counts once it is drawn
    preempt         take a running sequence's blocks away; it keeps its tokens and is computed anew later
"""

import bisect
import itertools
import logging
import sys
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from nanoengine.backends.attention import Array, AttentionMetadata, GroupedAttention, group_layers, new_caches
from nanoengine.backends.cpu import CPU
from nanoengine.backends.cuda import CUDA
from nanoengine.backends.device import Device, Download, Forward
from nanoengine.compat import CALL, without_unserved
from nanoengine.config import EngineConfig
from nanoengine.metrics import Metric, RequestStats, count, read_metrics, what_runs
from nanoengine.models.decoder import Decoder
from nanoengine.models.hf import HFModel
from nanoengine.models.weights import Checkpoint, load_model, open_checkpoint, resolve_dtype
from nanoengine.outputs import Inbox, Logprob, RequestOutput
from nanoengine.requests import CheckedRequest, Detokenizer, Prompt, Request, RequestChecker, random_seed
from nanoengine.sampling import (
    LogprobTable,
    SamplingRow,
    draw_rows,
    read_reports,
    read_tokens,
    report_prompt,
    sample_rows,
    scale_logits,
)
from nanoengine.sampling_params import SamplingParams
from nanoengine.steps import Owner, Stopwatch, uninterrupted

if TYPE_CHECKING:
    from nanoengine.extensions.parallel import Ranks

# ---- Sequence: one sample of one request ---------------------------------------------------------


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one sample, and where their K and V are.

    A prompt of 10 tokens, in blocks of 4, whose first 8 another sequence has computed, step by step:

                            block_table  num_hit_tokens  num_computed_tokens  num_registered_blocks  tokens
        waiting             []           0               0                    0                      10
        admitted            [5, 6, 9]    8               8                    2                      10
        scheduled           [5, 6, 9]    8               10                   2                      10
        updated             [5, 6, 9]    8               10                   2                      11
        two steps later     [5, 6, 9]    8               12                   3                      13
        one more            [5, 6, 9, 3] 8               13                   3                      14

    Had the prompt 8 tokens, all of them hits, it would be admitted with num_computed_tokens 7: the last
    one is computed again, since its logits choose the next token.

    With async scheduling a step is scheduled before the one before is collected. Then a token is pending:

                            chunk     known tokens  num_computed_tokens  num_tokens
        step 1 scheduled    [8, 10)   10            10                   11: position 10 is pending
        step 2 scheduled    [10, 11)  10            11                   12: its input is step 1's sample
        step 1 updated                11            11                   12: position 11 is pending
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
    num_prompt_tokens: int = field(init=False)

    # Written by the block manager at admission and release, moved on by the scheduler.
    num_computed_tokens: int = field(init=False, default=0)

    # Written by the scheduler.
    max_num_tokens: int = field(init=False, default=0)  # prompt and output at most
    num_preemptions: int = field(init=False, default=0)
    first_scheduled_time: float | None = field(init=False, default=None)  # seconds of time.monotonic()
    finish_reason: str | None = field(init=False, default=None)  # None: it waits or runs
    stop_reason: int | str | None = field(init=False, default=None)
    drafter: Any = field(init=False, default=None)  # what `propose` keeps about the sequence
    num_saved_blocks: int = field(init=False, default=0)  # leading ones that a KV store need not be given

    # Written by the block manager.
    block_tables: list[list[int]] = field(init=False, default_factory=list)  # by group; none while it waits
    num_hit_tokens: int = field(init=False, default=0)  # in whole blocks, shared ones: not to be written
    num_registered_blocks: int = field(init=False, default=0)  # leading ones of each table
    prefix_id: int = field(init=False, default=0)  # of the last registered block
    block_keys: list["BlockKey"] = field(init=False, default_factory=list)  # of full blocks, hashed once
    num_cached_tokens: int | None = field(
        init=False, default=None
    )  # computed at first admission: the user's hit

    def __post_init__(self) -> None:
        """Keep a list of its own."""
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def block_table(self) -> list[int]:
        """The first group's, which in most models is the only one; empty while it waits."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def num_tokens(self) -> int:
        """Prompt and output, the pending token too.

        A token is pending while all known ones are computed, since the step that computes the last of
        them draws the next.
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
        """Who goes first: the smaller. Under FCFS all priorities are equal, so arrival decides."""
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
    group: int = 0  # whose K and V it holds
    key: BlockKey | None = None  # None: not registered
    prefix_id: int = 0
    parent_id: int = 0  # prefix_id of the block before, 0 at the start of a sequence


class BlockManager:
    """Hands out cache blocks, shares those with the same prefix, and evicts the least recently used.

    It is vLLM's BlockPool and KVCacheManager in one. Block 0 is the null block: never handed out, padding
    and discarded writes go there.

    Free blocks wait in two places, which together are the order of eviction: first those in which nothing
    can be found, the last freed first, since its memory is warm; then those that hold registered content,
    the least recently used first. A hit takes its block out of the middle of the second, in O(1).

    A hit is verified by content and parent, so that a hash collision costs a comparison, never a wrong token.

    All groups take blocks from the one pool. A group with a window gives a block back once no token to come
    sees it; the null block takes its place in the table. And it grows by what a step may compute at most,
    not by a whole prompt. With blocks of 2, a window of 3 and steps of 4 tokens, a prompt of 11 tokens has

        step        computes  sees from  block table
        admitted    [0, 4)    0          [1, 2, 3]
        second      [4, 8)    2          [0, 2, 3, 4]
        third       [8, 11)   6          [0, 0, 0, 4, 5, 6]
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Iterable[int | None] = (None,),
        max_chunk_tokens: int = 8192,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[bytes, int], int] = xxh3_64_intdigest,
    ) -> None:
        self.num_blocks = num_blocks  # usable ones: the null block is not counted
        self.block_size = block_size
        # By group; None, which sees everything, before any window. Of a window of one token a hit would
        # keep no block, to tell after which prefix the next is.
        self.windows = tuple(window and max(window, 2) for window in windows)
        self.sliding_groups = [(group, window) for group, window in enumerate(self.windows) if window]
        self.max_chunk_tokens = max_chunk_tokens  # what a step may compute of a sequence
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
        num_hits = len(hits[0])
        # At least one token is computed, even if all are hits: its logits choose the next.
        num_computed = min(num_hits * self.block_size, seq.num_tokens - 1)
        lengths = self._table_lengths(num_computed, seq.num_tokens)
        num_new = sum(lengths) - num_hits * len(hits)
        held = [block for blocks in hits for block in blocks if block.block_id]
        num_revived = sum(block.ref_count == 0 for block in held)  # free ones, that will not be free any more
        if num_new + num_revived > self.num_free_blocks:
            return False
        for block in held:
            if block.ref_count == 0:
                del self.evictable_blocks[block.block_id]
            block.ref_count += 1
        seq.block_tables = [[block.block_id for block in blocks] for blocks in hits]
        self._grow(seq, lengths)
        seq.num_registered_blocks = num_hits
        seq.prefix_id = hits[0][-1].prefix_id if num_hits else 0
        seq.num_hit_tokens = num_hits * self.block_size
        seq.num_computed_tokens = num_computed
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_computed
            self.num_query_tokens += seq.num_tokens
            self.num_query_hits += num_computed
        return True

    def find_prefix(self, seq: Sequence) -> list[list[Block]]:
        """By group, the registered blocks with the longest beginning of the sequence that all groups have.

        The first group's are looked up from the start, each after the one before. Of the others, and of any
        group with a window, there need only be what the next token sees; the null block stands for the rest.
        """
        # A prompt token's log-probabilities need its logits, which the cache does not hold.
        if not self.enable_prefix_caching or seq.prompt_logprobs is not None:
            return [[] for _ in self.windows]
        self._hash_full_blocks(seq)
        chain: list[Block] = []
        parent_id = 0
        for key in seq.block_keys:
            block = self._find(key, parent_id)
            if block is None:
                break
            chain.append(block)
            parent_id = block.prefix_id
        if self.windows == (None,):
            return [chain]
        parent_ids = [0, *(block.prefix_id for block in chain)]
        num_hits = len(chain)
        while True:
            next_position = min(num_hits * self.block_size, seq.num_tokens - 1)
            hits: list[list[Block]] = []
            for group, window in enumerate(self.windows):
                first = self._first_seen(window, next_position)
                found = [self._find(seq.block_keys[i], parent_ids[i], group) for i in range(first, num_hits)]
                if None in found:  # whatever ends behind the first that is missing sees it
                    num_hits = first + found.index(None)
                    break
                hits.append([self.blocks[0]] * first + [block for block in found if block])
            else:
                return hits

    # -- growth

    def may_append(self, seq: Sequence, num_tokens: int | None = None) -> bool:
        """Grow the block tables to hold all of the sequence's tokens, where they do not; all or nothing.

        A group with a window first gives back what is out of sight, then grows as far as a step may reach.
        num_tokens is given for drafts: to hold so many, behind a decode that is scheduled already.
        """
        next_position = seq.num_computed_tokens - (num_tokens is not None)
        self._remove_skipped_blocks(seq, next_position)
        lengths = self._table_lengths(seq.num_computed_tokens, num_tokens or seq.num_tokens)
        pairs = zip(lengths, seq.block_tables, strict=True)
        if sum(max(0, length - len(table)) for length, table in pairs) > self.num_free_blocks:
            return False
        self._grow(seq, lengths)
        return True

    def register_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the blocks that the first num_tokens tokens fill findable.

        Called when the step that fills them is scheduled, so before they are filled. Whoever hits them
        reads them in time all the same: in that step, since each layer writes the K and V of the whole
        batch before any of it attends; in later ones, since the device runs steps in order. Should the
        step fail, `clear` forgets them.
        """
        if not self.enable_prefix_caching:
            return
        self._hash_full_blocks(seq)
        for i in range(seq.num_registered_blocks, num_tokens // self.block_size):
            key, parent_id = seq.block_keys[i], seq.prefix_id
            twin = self._find(key, parent_id)
            if twin is None:
                seq.prefix_id, self.next_prefix_id = self.next_prefix_id, self.next_prefix_id + 1
            else:
                seq.prefix_id = twin.prefix_id
            for group, table in enumerate(seq.block_tables):
                if table[i]:
                    block = self.blocks[table[i]]
                    block.group, block.key = group, key
                    block.parent_id, block.prefix_id = parent_id, seq.prefix_id
                    self.registered_blocks.setdefault(key.hash, {})[block.block_id] = block
            seq.num_registered_blocks = i + 1

    # -- release

    def free(self, seq: Sequence) -> None:
        """Take all blocks back, the last first, so that tails are evicted before the prefixes others share.

        A prefix is of use without its tail, a tail without its prefix never: a lookup begins at the start.
        """
        for block_ids in reversed([*itertools.zip_longest(*seq.block_tables, fillvalue=0)]):
            for block_id in filter(None, block_ids):
                self._release(block_id)
        self.forget(seq)

    @staticmethod
    def forget(seq: Sequence) -> None:
        """The sequence has no blocks any more."""
        seq.block_tables = []
        seq.num_computed_tokens = seq.num_hit_tokens = seq.num_registered_blocks = seq.prefix_id = 0

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
        spans = [w and self.num_blocks_for(w - 1 + self.max_chunk_tokens) + 1 for w in self.windows]

        def num_held(length: int) -> int:  # at most, where a block table has that length
            return sum(length if span is None else min(length, span) for span in spans)

        return (bisect.bisect_right(range(1 << 40), self.num_blocks, key=num_held) - 1) * self.block_size

    def _table_lengths(self, num_computed_tokens: int, num_tokens: int) -> list[int]:
        """How long each group's block table has to be before the next step."""
        lengths = [self.num_blocks_for(num_tokens)] * len(self.windows)
        for group, window in self.sliding_groups:
            reach = max(num_computed_tokens, window - 1) + self.max_chunk_tokens
            lengths[group] = min(lengths[group], self.num_blocks_for(reach))
        return lengths

    def _grow(self, seq: Sequence, lengths: list[int]) -> None:
        for table, length in zip(seq.block_tables, lengths, strict=True):
            table += [self._take_free_block() for _ in range(length - len(table))]

    def _first_seen(self, window: int | None, position: int) -> int:
        """Index of the first block of which the token at a position sees anything."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _remove_skipped_blocks(self, seq: Sequence, position: int) -> None:
        """Take back the blocks that no token from a position on sees, the last first; the name is vLLM's."""
        for group, window in self.sliding_groups:
            table, first = seq.block_tables[group], self._first_seen(window, position)
            index = min(first, len(table))
            while index > 0 and table[index - 1]:
                index -= 1
                self._release(table[index])
                table[index] = 0
            table += [0] * (first - len(table))  # a KV store has what comes before: never held here

    def _release(self, block_id: int) -> None:
        """A sequence holds the block no more."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.key is None:
                self.empty_blocks.appendleft(block)
            else:
                self.evictable_blocks[block_id] = block

    def _find(self, key: BlockKey, parent_id: int, group: int = 0) -> Block | None:
        """A registered block of the group with exactly this content after exactly this prefix."""
        for block in self.registered_blocks.get(key.hash, {}).values():
            if block.parent_id == parent_id and block.group == group and block.key == key:
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

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert the conservation laws; `sequences` are all that hold blocks."""
        tables = [table for seq in sequences for table in seq.block_tables]
        uses = Counter(block_id for table in tables for block_id in table if block_id)
        assert all(block.ref_count == uses[block.block_id] for block in self.blocks)
        free = [*self.empty_blocks, *self.evictable_blocks.values()]
        unused = [block.block_id for block in self.blocks[1:] if block.ref_count == 0]
        assert sorted(block.block_id for block in free) == unused, "a block is lost, or free twice"
        assert all(block.key is None for block in self.empty_blocks)
        assert all(block.key is not None for block in self.evictable_blocks.values())
        findable = {b.block_id: b for blocks in self.registered_blocks.values() for b in blocks.values()}
        assert findable == {b.block_id: b for b in self.blocks if b.key is not None}
        assert all(b.block_id in self.registered_blocks[b.key.hash] for b in findable.values() if b.key)
        assert all(self.registered_blocks.values()), "a hash without blocks was left behind"


# ---- Scheduler: who computes what next -----------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, to compute this step.

    A draft has a chunk of its own, behind that of its sequence's last token and of the drafts before it: to
    attention it is one more decode, over the same blocks and a token longer.
    """

    seq: Sequence
    start: int
    end: int
    is_last: bool  # it reaches the sequence's end, so that a token is sampled
    drafts: tuple[int, ...] = ()  # those behind the known tokens, up to the one to compute here


class ScheduledBatch(NamedTuple):
    """One step's work: a chunk per sequence, one more per draft, and the sequences that are sampled.

    What is last is stored, not asked of the sequences, which may have grown or ended a step later.
    """

    chunks: list[Chunk]
    sampled_seqs: list[Sequence]  # those of the chunks that are the last, so with drafts more than once
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

    With `propose`, a function of a sequence and a number, at most so many guesses of what comes next are
    computed behind a decode, and a token is drawn behind each: speculative decoding. The draws up to the
    first that differs from its guess are those without guesses. Drafts take what others leave of the budget
    and of the free blocks. Source: https://arxiv.org/abs/2211.17192, for a guesser that is always certain.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int = 1 << 30,
        long_prefill_token_threshold: int = 0,
        propose: Callable[[Sequence, int], list[int]] | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk_tokens = long_prefill_token_threshold or max_num_batched_tokens
        # A sequence that fills every block can still sample one token, which it will never compute.
        self.max_computable_tokens = block_manager.max_computable_tokens
        self.max_num_tokens = min(max_model_len, self.max_computable_tokens + 1)
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []  # these hold no blocks
        self.running: list[Sequence] = []  # these hold one at least
        self.num_preemptions = 0
        self.propose = propose
        # Called with a sequence that was just admitted: fills blocks behind its hits from a KV store.
        self.load: Callable[[Sequence], None] | None = None
        # Drafts by their place in a guess, from 0: those computed, and those that were drawn too.
        self.num_drafted, self.num_accepted = Counter[int](), Counter[int]()
        self.failed: dict[int, int] = {}  # seq_id -> number of tokens, of those in the last step that failed

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
        bisect.insort(self.waiting, seq, key=BY_ORDER)

    # -- before the forward pass

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's chunks, and count their tokens as computed from here on.

        Without a step in flight it is empty only if no sequence is unfinished.
        """
        num_preemptions, budget = self.num_preemptions, self.max_num_batched_tokens
        block_size = self.block_manager.block_size
        chunks: list[Chunk] = []

        # Indexed, since preemption shortens the list from its tail while it is walked from its head.
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            num_tokens = seq.num_tokens
            if num_tokens < seq.max_num_tokens:  # else the step in flight draws its last token
                # The last group's window is the smallest, and its table the first that ends.
                if num_tokens > len(seq.block_tables[-1]) * block_size and not self._make_room(seq):
                    break
                chunk = self._schedule_chunk(seq, budget)
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
            i += 1

        # After a preemption blocks are scarce: admitting now would only preempt again. And the sequence that
        # was preempted may have a token in flight, which it must take before it can start over.
        may_admit = num_preemptions == self.num_preemptions
        while may_admit and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.block_manager.allocate(seq):
                break
            if self.load is not None:
                self.load(seq)
            bisect.insort(self.running, seq, key=BY_ORDER)
            del self.waiting[0]  # never in neither queue: an exception may come between two lines
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = time.monotonic()
            chunk = self._schedule_chunk(seq, budget)
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        if self.propose is not None:
            chunks, budget = self._add_drafts(chunks, budget)
        sampled_seqs = [seq for seq, _, _, is_last, _ in chunks if is_last]
        return ScheduledBatch(chunks, sampled_seqs, self.max_num_batched_tokens - budget)

    def _make_room(self, seq: Sequence) -> bool:
        """Grow a running sequence's block tables, preempting others from the tail where blocks run out.

        False if the sequence was the tail itself, and gave way: those before it hold the blocks.
        """
        while not self.block_manager.may_append(seq):
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

    def _schedule_chunk(self, seq: Sequence, budget: int) -> Chunk:
        """As much as the budget allows of what the sequence is behind."""
        start, num_tokens = seq.num_computed_tokens, seq.num_tokens
        end = min(num_tokens, start + budget, start + self.max_chunk_tokens)
        seq.num_computed_tokens = end
        num_known_tokens = min(end, len(seq.token_ids))  # a pending token cannot be hashed: a step later
        if num_known_tokens // self.block_manager.block_size > seq.num_registered_blocks:
            self.block_manager.register_full_blocks(seq, num_known_tokens)
        return Chunk(seq, start, end, end == num_tokens)

    def _add_drafts(self, chunks: list[Chunk], budget: int) -> tuple[list[Chunk], int]:
        """The chunks, those of drafts behind each decode, and what is left of the budget."""
        assert self.propose is not None
        with_drafts: list[Chunk] = []
        for chunk in chunks:
            with_drafts.append(chunk)
            seq, start, end, is_last, drafts = chunk
            limit = min(budget, seq.max_num_tokens - 1 - end)  # a token is drawn behind the last one
            if is_last and end - start == 1 and limit > 0:
                drafts = tuple(self.propose(seq, limit)[:limit])
            while drafts and not self.block_manager.may_append(seq, end + len(drafts)):
                drafts = drafts[:-1]
            for i in range(len(drafts)):
                with_drafts.append(Chunk(seq, end + i, end + i + 1, True, drafts[: i + 1]))
            budget -= len(drafts)
        return with_drafts, budget

    # -- after it

    def update(self, batch: ScheduledBatch, token_ids: list[int | None]) -> list[Sequence]:
        """Append a step's tokens, one per `batch.sampled_seqs`, and end the sequences that are complete.

        None, where no token could be drawn, ends its sequence with "error". Sequences that ended while
        the step was in flight take nothing from it; all others are returned.
        """
        took = []
        draws = zip(batch.sampled_seqs, token_ids, strict=True)
        for seq, token_id in draws if self.propose is None else self._accepted(batch, token_ids):
            if seq.finish_reason is not None:
                continue
            took.append(seq)
            if token_id is None:
                self.finish(seq, "error")
                continue
            seq.token_ids.append(token_id)
            is_stop_id, stop_string = token_id in seq.stop_ids, None
            if seq.detokenizer is not None:
                try:
                    stop_string = seq.detokenizer.append(token_id, is_stop_id)
                except Exception:  # its own fault: the others' tokens are taken all the same
                    logging.getLogger(__name__).exception("a tokenizer failed on its own tokens")
                    self.finish(seq, "error")
                    continue
            if stop_string is not None:
                self.finish(seq, "stop", stop_string)
            elif is_stop_id:
                self.finish(seq, "stop", token_id if token_id in (seq.params.stop_token_ids or ()) else None)
            elif len(seq.token_ids) >= seq.max_num_tokens:
                self.finish(seq, "length")
        return took if self.propose is None else list(dict.fromkeys(took))

    def _accepted(
        self, batch: ScheduledBatch, token_ids: list[int | None]
    ) -> Iterator[tuple[Sequence, int | None]]:
        """The draws that count: those behind a draft only if the tokens before came out as guessed.

        One at a time, since that is told by what the sequence has taken of those before. From here on, not
        before, an accepted draft counts as computed; the slots of others are written again.
        """
        sampled = (chunk for chunk in batch.chunks if chunk.is_last)
        for (seq, _, end, _, drafts), token_id in zip(sampled, token_ids, strict=True):
            if drafts:
                self.num_drafted[len(drafts) - 1] += 1
                if seq.is_finished or len(seq.token_ids) != end or seq.token_ids[-1] != drafts[-1]:
                    continue
                self.num_accepted[len(drafts) - 1] += 1
                seq.num_computed_tokens = end
                if end // self.block_manager.block_size > seq.num_registered_blocks:
                    self.block_manager.register_full_blocks(seq, end)
            yield seq, token_id

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence that waits or runs, and free its blocks."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        queue = self.running if seq.block_tables else self.waiting
        del queue[bisect.bisect_left(queue, seq.order, key=BY_ORDER)]
        self.block_manager.free(seq)

    def recover(self) -> None:
        """After a step that failed: compute everything anew.

        What the step wrote and registered is not to be trusted, wherever it stopped: the prefix cache is
        forgotten, and all unfinished sequences wait again, with their tokens. Those that were in the failure
        before, and got no token since, end with "error": else they might fail for ever.
        """
        failed = self.running or self.waiting[:1]  # the head, where nothing could even be scheduled
        again = [seq for seq in failed if self.failed.get(seq.seq_id) == len(seq.token_ids)]
        self.failed = {seq.seq_id: len(seq.token_ids) for seq in failed}
        unfinished = {seq.seq_id: seq for seq in self.running + self.waiting if not seq.is_finished}
        self.running, self.waiting = [], sorted(unfinished.values(), key=BY_ORDER)
        self.block_manager.clear()
        for seq in unfinished.values():
            self.block_manager.forget(seq)
        for seq in again:
            if not seq.is_finished:
                self.finish(seq, "error")

    def check_invariants(self) -> None:
        """Assert that the queues and the blocks agree with each other."""
        for queue in (self.waiting, self.running):
            assert not any(seq.is_finished for seq in queue)
            orders = [seq.order for seq in queue]
            assert all(before < after for before, after in itertools.pairwise(orders))
        assert not any(seq.block_tables for seq in self.waiting)
        assert all(seq.block_tables for seq in self.running)
        assert len(self.running) <= self.max_num_seqs
        self.block_manager.check_invariants(self.running)


# ---- build_inputs: a scheduled batch as arrays ---------------------------------------------------


class ModelInputs(NamedTuple, Generic[Array]):
    """A batch as integers, flat: no padding, no batch dimension. T tokens, S sequences, R samples."""

    input_ids: Array  # (T,) int64; 0 where the token is pending
    positions: Array  # (T,) int64  index of each token in its sequence
    metadata: AttentionMetadata[Array]  # block_tables (G, S, most blocks), slot_mapping (G, T), ...
    sample_rows: Array  # (R,) int64  rows whose logits are needed
    pending_rows: Array  # (P,) int64  rows whose token is pending
    pending_samples: Array  # (P,) int64  which sample of the step in flight it will be


def build_inputs(
    batch: ScheduledBatch, block_size: int, before: ScheduledBatch | None = None
) -> ModelInputs[np.ndarray]:
    """Lay a batch out as arrays. A pure function of integers, with no Python loop over tokens.

    With blocks of 4, a decode of the token 14 at position 4 of block table [7, 2], and the tokens 22 and 23
    at positions 2 and 3 of [3]:

        input_ids     14 22 23        cu_seqlens_q  0 1 3
        positions     4  2  3         seq_lens      5 4
        slot_mapping  8  14 15        block_tables  [7, 2] [3, 0]

    The last two have a first dimension more: one group after the other.

    Args:
        batch: the step to compute.
        block_size: tokens of a block.
        before: the step in flight, which draws the tokens that are pending in this one.
    """
    token_ids: list[int] = []
    pending_rows: list[int] = []
    pending_seqs: list[Sequence] = []
    for seq, start, end, _, drafts in batch.chunks:
        token_ids += seq.token_ids[start:end] or drafts[-1:]
        if end > len(seq.token_ids) and not drafts:  # its last token is pending: a 0 holds its place
            pending_rows.append(len(token_ids))
            pending_seqs.append(seq)
            token_ids.append(0)
    seqs, *columns, is_last, _ = zip(*batch.chunks, strict=True)
    starts, ends = np.array(columns, dtype=np.int64)
    query_lens = ends - starts
    cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()))

    # Of the first group, then of the second...; a row per sequence.
    tables = [*itertools.chain.from_iterable(zip(*[seq.block_tables for seq in seqs], strict=True))]
    num_blocks = np.fromiter(map(len, tables), np.int64).reshape(-1, len(seqs), 1)
    block_tables = np.zeros((*num_blocks.shape[:2], num_blocks.max()), dtype=np.int32)
    is_block = np.arange(block_tables.shape[2]) < num_blocks
    block_tables[is_block] = np.fromiter(itertools.chain.from_iterable(tables), np.int32)

    row_seq = np.repeat(np.arange(len(seqs)), query_lens)  # which sequence a row belongs to
    positions = np.arange(batch.num_tokens) - (cu_seqlens_q[:-1] - starts)[row_seq]
    blocks = block_tables[:, row_seq, positions // block_size].astype(np.int64, order="C")
    # The token that a full prefix hit computes again has its K and V in a shared block: discard them.
    num_hit_tokens = np.array([seq.num_hit_tokens for seq in seqs])
    blocks[:, positions < num_hit_tokens[row_seq]] = 0

    sample_of = {seq: i for i, seq in enumerate(before.sampled_seqs)} if before and pending_seqs else {}
    sample_rows = (cu_seqlens_q[1:] - 1)[np.array(is_last)]
    is_needed = np.array([seq.prompt_logprobs is not None for seq in seqs])[row_seq]
    is_needed[sample_rows] = True
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        cu_seqlens_k=np.concatenate(([0], ends.cumsum())).astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=block_tables,
        slot_mapping=blocks * block_size + positions % block_size,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(ends.max()),
        is_fresh=not starts.any(),  # every chunk begins at 0
        needed_rows=is_needed.nonzero()[0],
    )
    return ModelInputs(
        input_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        metadata=metadata,
        sample_rows=sample_rows,
        pending_rows=np.array(pending_rows, dtype=np.int64),
        pending_samples=np.array([sample_of[seq] for seq in pending_seqs], dtype=np.int64),
    )


# ---- ModelRunner: from a scheduled batch to sampled tokens ---------------------------------------


class Launch(NamedTuple):
    """A step on its way: what was asked of the device, and where its tokens will be."""

    batch: ScheduledBatch
    tokens: Tensor | None  # (R,) int64, on the device; None: no sequence is due a token
    download: Download | None  # of the tokens
    logprobs: list[LogprobTable]  # of the tokens, where asked for
    # seq_id -> a prompt position, the tokens from there on and their tables, where asked for
    prompt_logprobs: dict[int, tuple[int, list[int], list[LogprobTable]]]
    snapshot: Any = None  # of the blocks it fills, for a KV store


class Sampled(NamedTuple):
    """What a step drew."""

    token_ids: list[int | None]  # one per `batch.sampled_seqs`; None: it could not be drawn
    logprobs: dict[int, list[dict[int, Logprob]]]  # seq_id -> the entry of each draw, where asked for
    # seq_id -> a prompt position and the entries of the tokens from there on, where asked for
    prompt_logprobs: dict[int, tuple[int, list[dict[int, Logprob]]]]


class ModelRunner:
    """Owns the model, the KV cache and the device; turns a batch into sampled tokens."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int, ranks: "Ranks | None" = None
    ) -> None:
        torch_device = config.resolve_device()
        self.device: Device = (CUDA if torch_device.type == "cuda" else CPU)(torch_device, config)
        if ranks is not None:  # of tensor parallelism, of which everything else is behind the device
            self.device = ranks.around(self.device)
        self.dtype = self.device.choose_dtype(resolve_dtype(config.dtype, checkpoint.hf_config))
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens or self.device.max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_num_chunks = self.max_num_seqs * (1 + config.num_speculative_tokens)  # of a step
        self.stopwatch = Stopwatch()

        self.model: Decoder | HFModel | None = load_model(
            checkpoint,
            config,
            dtype=self.dtype,
            device=torch_device,
            max_model_len=max_model_len,
            shard=ranks.shard if ranks is not None else None,
        )
        if config.kv_store is not None:
            from nanoengine.extensions.kvstore import digest_weights

            self.weights_digest = digest_weights(self.model)  # before the device packs them
        self.kv_specs = self.model.kv_specs
        self.kv_groups = group_layers(self.kv_specs, max_model_len)
        self.device.prepare(self.model)
        self.draw = self.device.draw or partial(draw_rows, scale=self.device.fuse(scale_logits))
        with uninterrupted(), self.device.running():  # a backend may try itself out, on its own GPU
            self.attention = self.device.choose_attention(self.kv_specs, self.model.attention_settings)
        self.block_size = config.block_size or self.device.block_size
        self.table_width = -(-max_model_len // self.block_size)  # blocks of the longest sequence
        self.device.reserve(
            self.max_num_batched_tokens, self.max_num_chunks, len(self.kv_groups), self.table_width
        )
        self.forward = Forward()  # for what the device may try out first
        with uninterrupted(), self.device.running():
            self.num_blocks = self.device.count_blocks(self)
            self.caches = new_caches(
                self.kv_specs, self.kv_groups, self.num_blocks, self.block_size, torch_device
            )
            self.forward = self.capture()
        self.stopwatch = Stopwatch()  # what the device tried out was no step

    # -- a step

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, before: Launch | None = None) -> Launch:
        """Queue a batch on the device; where tokens are pending, `before` is the step that draws them."""
        if self.model is None:
            raise RuntimeError("the engine is closed")
        with self.device.running():
            self.stopwatch.start()
            host = build_inputs(batch, self.block_size, before.batch if before is not None else None)
            inputs = self.send(self.forward.pad(host))
            if len(host.pending_rows):
                assert before is not None
                assert before.tokens is not None
                # A token that could not be drawn is -1; what follows from it is thrown away.
                drawn = before.tokens[inputs.pending_samples].clamp(min=0)
                inputs.input_ids[inputs.pending_rows] = drawn
            self.stopwatch.lap("inputs")
            hidden = self.forward(self.compute, inputs)
            prompt_logprobs = self._prompt_logprobs(batch, hidden)
            if not batch.sampled_seqs:
                self.stopwatch.lap("forward")
                return Launch(batch, None, None, [], prompt_logprobs)
            logits = self.model.compute_logits(hidden[inputs.sample_rows])
            self.stopwatch.lap("forward")
            rows = []
            for s, _, end, is_last, drafts in batch.chunks:
                if is_last:
                    known = [*s.token_ids, *drafts] if drafts else s.token_ids
                    length, stops, bans = s.num_prompt_tokens, s.stop_ids, s.bad_words
                    rows.append(SamplingRow(s.params, s.seed, end, known, length, stops, bans))
            tokens, logprobs = sample_rows(logits, rows, self.draw, self.device.download)
            download = self.device.download(tokens)
            self.stopwatch.lap("sample")
            return Launch(batch, tokens, download, logprobs, prompt_logprobs)

    @torch.inference_mode()
    def collect(self, launch: Launch) -> Sampled:
        """Wait for a step's tokens, and for no step after it."""
        with self.device.running():
            self.stopwatch.start()
            token_ids = [] if launch.download is None else read_tokens(launch.download.read())
            seqs, entries = launch.batch.sampled_seqs, read_reports(launch.logprobs, token_ids)
            logprobs: dict[int, list[dict[int, Logprob]]] = {}
            for row, entry in entries.items():
                logprobs.setdefault(seqs[row].seq_id, []).append(entry)
            prompt_logprobs = {
                seq_id: (first, list(read_reports(tables, predicted).values()))
                for seq_id, (first, predicted, tables) in launch.prompt_logprobs.items()
            }
            self.stopwatch.lap("sample")
            return Sampled(token_ids, logprobs, prompt_logprobs)

    def send(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[Tensor]:
        """The batch on the device, in memory that the next call overwrites."""
        of_attention, numbers = inputs.metadata[:5], inputs.metadata[5:]
        of_sampling = inputs.sample_rows, inputs.pending_rows, inputs.pending_samples
        # What a graph reads goes first: its place must not depend on how many rows are sampled.
        tensors = self.device.send([inputs.input_ids, inputs.positions, *of_attention, *of_sampling])
        cu_seqlens_q, cu_seqlens_k, seq_lens, block_tables, slot_mapping = tensors[2:7]
        metadata = AttentionMetadata(
            cu_seqlens_q, cu_seqlens_k, seq_lens, block_tables, slot_mapping, *numbers
        )
        return ModelInputs(tensors[0], tensors[1], metadata, *tensors[7:])

    def compute(self, inputs: ModelInputs[Tensor]) -> Tensor:
        """Hidden states, (T, E); of rows that are not needed, a device may leave zeros."""
        assert self.model is not None
        meta = inputs.metadata
        groups = [
            self.attention.build(meta._replace(block_tables=tables, slot_mapping=slots), self.block_size)
            for tables, slots in zip(meta.block_tables, meta.slot_mapping, strict=True)
        ]
        attention = groups[0] if len(groups) == 1 else GroupedAttention(groups)
        return self.model(inputs.input_ids, inputs.positions, self.caches, attention)  # type: ignore[no-any-return]

    def _prompt_logprobs(
        self, batch: ScheduledBatch, hidden: Tensor
    ) -> dict[int, tuple[int, list[int], list[LogprobTable]]]:
        """Queue what the chunks' prompt tokens predict of the prompt tokens after them, where asked for."""
        assert self.model is not None
        results, row = {}, 0
        for seq, start, end, _, _ in batch.chunks:
            last = min(end, seq.num_prompt_tokens - 1)  # the last prompt token predicts the output
            if seq.prompt_logprobs is not None and start < last:
                rows, predicted = hidden[row : row + last - start], seq.token_ids[start + 1 : last + 1]
                tables = report_prompt(
                    self.model.compute_logits, rows, predicted, seq.prompt_logprobs, self.device.download
                )
                results[seq.seq_id] = start + 1, predicted, tables
            row += end - start
        return results

    # -- what the device asks for, to size the KV cache and to capture graphs

    def largest_batches(self) -> list[ScheduledBatch]:
        """What takes most memory: the longest prompts that fill a step, and the most rows to sample."""
        budget = self.max_num_batched_tokens
        length = min(self.max_model_len - 1, budget)  # an output token has to fit too
        prompts = ([length] * (budget // length) + [budget % length])[: self.max_num_seqs]
        most_work = SamplingParams(top_p=0.5, min_p=0.1, repetition_penalty=1.1, logprobs=1)
        decodes = [1] * min(self.max_num_chunks, budget)
        batches = []
        for lengths, params in (prompts, SamplingParams()), (decodes, most_work):
            seq = Sequence(0, [0] * length, params)  # all in the same blocks
            seq.block_tables = [[*range(1, -(-length // self.block_size) + 1)]] * len(self.kv_groups)
            chunks = [Chunk(seq, 0, num_tokens, True) for num_tokens in lengths if num_tokens]
            batches.append(ScheduledBatch(chunks, [seq] * len(chunks), sum(lengths)))
        return batches

    @torch.inference_mode()
    def capture(self) -> Forward:
        """What runs the steps: with CUDA graphs of decodes, where there can be any."""
        seq = Sequence(0, [0], SamplingParams())
        seq.block_tables = [[0]] * len(self.kv_groups)
        decode = build_inputs(ScheduledBatch([Chunk(seq, 0, 1, False)], [], 1), self.block_size)
        return self.device.capture(self, decode)

    def close(self) -> None:
        """Release the model, the cache and the graphs."""
        self.model, self.caches, self.forward = None, [], Forward()
        self.device.release()


# ---- LLMEngine: requests in, outputs out, one step at a time -------------------------------------


class LLMEngine:
    """Requests in, outputs out, one step at a time. Names are vLLM's.

    For one thread at a time: `AsyncLLM` is for several. `LLM` generates, chats and streams with it.

    Raises:
        ValueError: a setting or checkpoint that cannot be served; nothing is kept.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.checkpoint = open_checkpoint(
            str(config.model),
            tokenizer=None if config.tokenizer is None else str(config.tokenizer),
            revision=config.revision,
            model_impl=config.model_impl,
            trust_remote_code=config.trust_remote_code,
        )
        self.max_model_len = self.checkpoint.choose_length(config.max_model_len)
        propose = None
        if config.speculation is not None:
            from nanoengine.extensions.speculate import NgramProposer

            propose = NgramProposer(config.speculation)
        make_runner: Callable[..., ModelRunner] = ModelRunner
        if config.tensor_parallel_size > 1:
            from nanoengine.extensions.parallel import make_runner

        self.runner = make_runner(config, self.checkpoint, self.max_model_len)
        self.scheduler = Scheduler(
            BlockManager(
                self.runner.num_blocks,
                self.runner.block_size,
                windows=[group.window for group in self.runner.kv_groups],
                max_chunk_tokens=self.runner.max_num_batched_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.runner.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            propose=propose,
        )
        self.checker = RequestChecker(self.checkpoint, config, self.scheduler.check_fits)
        is_async = self.runner.device.async_scheduling and propose is None
        is_async = is_async if config.async_scheduling is None else config.async_scheduling
        self._max_in_flight = 1 if is_async else 0  # steps that may stay in flight while the host goes on
        self._in_flight: deque[Launch] = deque()  # launched, not collected
        self._requests: dict[Any, Request] = {}  # the unfinished ones, by request_id
        self._request_of: dict[int, Request] = {}  # the same, by the seq_id of each of their sequences
        self._outputs = Inbox()  # not handed over yet
        self._seq_ids = itertools.count()
        self.num_steps = self.num_prompt_tokens = self.num_generation_tokens = 0
        self._stats = RequestStats(self.max_model_len)  # of those that ended
        self._is_closed, self._owner = False, Owner()
        self.connector = None
        if config.kv_store is not None:
            from nanoengine.extensions.kvstore import connect

            self.connector = connect(self, config.kv_store)
        self._tracer = None
        if config.trace is not None:
            from nanoengine.extensions.trace import trace_engine

            self._tracer = trace_engine(self, config.trace)
        print(what_runs(self), file=sys.stderr)

    # -- what users call

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """The same under vLLM's name."""
        return cls(engine_args)

    def check(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> CheckedRequest:
        """Validate a request completely, without changing anything.

        Raises:
            ValueError, TypeError: it cannot be served.
        """
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        return self.checker.check(prompt, params, priority)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **unserved: Any,
    ) -> None:
        """Queue a request; `step` computes it. It keeps a copy of its parameters.

        Raises:
            ValueError, TypeError: the id is in use, or the request cannot be served.
            RuntimeError: the engine is closed, or another thread's requests are unfinished.
        """
        without_unserved("add_request", unserved, (), CALL)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._requests or request_id in self._outputs:
            raise ValueError(f"request_id {request_id!r} is in use")
        params = self.checkpoint.default_sampling_params() if params is None else params
        self.submit(request_id, self.check(prompt, params, priority))

    @uninterrupted()
    def submit(self, request_id: Any, checked: CheckedRequest) -> None:
        """Make a checked request's sequences and queue them."""
        self._owner.claim()
        params, tokenizer = checked.params, self.checkpoint.tokenizer
        backend = tokenizer.backend_tokenizer if tokenizer is not None and params.detokenize else None
        seqs = [
            Sequence(
                seq_id,
                checked.token_ids,
                params,
                priority=checked.priority,
                seed=random_seed(params, index, self.config.seed, seq_id),
                stop_ids=checked.stop_ids,
                bad_words=checked.bad_words,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                detokenizer=Detokenizer(backend, checked.token_ids, params) if backend else None,
            )
            for index, seq_id in enumerate(itertools.islice(self._seq_ids, params.n))
        ]
        self._requests[request_id] = request = Request(request_id, checked, seqs, tokenizer)
        self.num_prompt_tokens += len(checked.token_ids)
        for seq in seqs:
            self._request_of[seq.seq_id] = request
            self.scheduler.add(seq)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output of each request that got a token or finished.

        With async scheduling the tokens are those of the step before, so that the first call returns none.

        Raises:
            Exception: whatever the forward pass raised. Every request keeps the tokens it had, is still
                queued, and will be computed anew; call again, or abort some. What fails twice without a
                token in between ends with "error".
        """
        self._owner.claim()
        with uninterrupted():  # a Ctrl-C strikes at the end of this block, and the outputs are kept
            try:
                self._step()
            except BaseException:
                self._in_flight.clear()
                self.scheduler.recover()
                self._hand_over([request for request in self._requests.values() if request.has_news])
                raise
            finally:
                if self._tracer is not None:
                    self._tracer.end_step()
        if not self._requests:
            self._owner.release()
        return self._outputs.take(self._outputs)

    @uninterrupted()
    def abort_request(self, request_ids: Any) -> list[RequestOutput]:
        """Drop requests (an id or several) and free their blocks; unknown ids are ignored.

        Returns:
            What the requests had so far, and was not handed over; finish_reason is "abort" for the
            samples that still ran.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        requests = [self._requests[i] for i in dict.fromkeys(ids) if i in self._requests]
        if requests:
            self._owner.claim()
        for request in requests:
            for sample in request.samples.values():
                if not sample.seq.is_finished:
                    self.scheduler.finish(sample.seq, "abort")
            self._forget(request)
            self._outputs.put(request.output())
        outputs = self._outputs.take(ids)
        if requests and not self.has_unfinished_requests():
            self._owner.release()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute or to hand over."""
        return bool(self._requests or self._outputs)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused (False) while requests run."""
        return self.scheduler.block_manager.reset_prefix_cache()

    def metrics(self) -> dict[str, int | float]:
        """Counters since the start, and the state of the queues and the cache now.

        `seconds_*` add up the phases of the steps: schedule, inputs (arrays, and their copies to the
        device), forward (up to the logits), sample, update (the scheduler's, and tokens to text). On
        CUDA, forward only queues its kernels; sampling waits for them, and its seconds hold theirs.
        """
        return count(self)

    def get_metrics(self) -> list[Metric]:
        """The same, and histograms of the requests that ended, as vLLM's metrics reader gives them."""
        return read_metrics(self, self._stats)

    def close(self) -> None:
        """Abort what runs and release the memory; the object is of no use afterwards."""
        self._owner.claim()
        self._is_closed = True
        self.abort_request(list(self._requests))
        if self._tracer is not None:
            self._tracer.close()
        if self.connector is not None:
            self.connector.close()
        self._in_flight.clear()
        self._outputs.clear()
        self.runner.close()
        self._owner.release()

    shutdown = close  # vLLM's name

    # -- the step

    def _step(self) -> None:
        """Launch a step, and collect those that may not stay in flight."""
        before = self._in_flight[-1] if self._in_flight else None
        # What edits logits has to know the tokens before, of which the step in flight draws the last.
        if before is not None and any(seq.params.edits_logits for seq in before.batch.sampled_seqs):
            self._collect()
            before = None
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        batch = self.scheduler.schedule()
        stopwatch.lap("schedule")
        if batch.chunks:
            launch = self.runner.launch(batch, before)
            if self.connector is not None:  # now: later steps may write to these blocks
                launch = launch._replace(snapshot=self.connector.snapshot(batch))
            self._in_flight.append(launch)
        # With nothing launched there is nothing to overlap with.
        while len(self._in_flight) > (self._max_in_flight if batch.chunks else 0):
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest step in flight, take in its tokens, and make the outputs that are due."""
        launch = self._in_flight.popleft()
        sampled = self.runner.collect(launch)
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        took = self.scheduler.update(launch.batch, sampled.token_ids)
        if self.connector is not None:
            self.connector.save(launch.snapshot)
        self.num_steps += 1
        now = time.monotonic()
        for seq_id, (first, entries) in sampled.prompt_logprobs.items():
            if seq_id in self._request_of:  # not aborted meanwhile
                self._request_of[seq_id].take_prompt_logprobs(first, entries)
        requests: dict[Any, Request] = {}
        for seq in took:
            request = self._request_of[seq.seq_id]
            requests[request.request_id] = request
            self.num_generation_tokens += request.take_tokens(seq, sampled.logprobs.get(seq.seq_id, ()), now)
        self._hand_over(requests.values())
        stopwatch.lap("update")

    def _hand_over(self, requests: Iterable[Request]) -> None:
        """Make the outputs that are due of requests with news, and forget those that are finished."""
        for request in requests:
            if request.is_due:
                self._outputs.put(request.output())
            if request.finished:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        self._stats.add(request)
        del self._requests[request.request_id]
        for seq_id in request.samples:
            del self._request_of[seq_id]
