"""Sliding windows: layers that see only the last tokens of a sequence, and free the blocks before the window.

Layers with the same window, or with none, form a group (`group_layers`), and a sequence has a block table for
each group. The first is `Sequence.block_table`; the others are in `WindowedBlockManager.more_tables`. All
groups take blocks from one pool. On the device, block tables and slots have the group as an extra first
dimension, and each layer uses those of its group (`paged_attention.GroupedAttention`).

Source: vLLM's hybrid KV cache manager, https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager
"""

import bisect
import itertools
import math
import sys
from collections import abc
from functools import partial
from typing import Any

import numpy as np

from nanoengine.backends.device import Attention
from nanoengine.backends.kv_cache import KVGroup, KVSpec
from nanoengine.backends.paged_attention import GroupedAttention
from nanoengine.backends.step_inputs import ModelInputs, map_slots, pad_tables
from nanoengine.engine import Block, BlockManager, ModelRunner, Prefix, ScheduledBatch, Sequence

MoreTables = dict[Sequence, list[list[int]]]  # block tables of the groups after the first


def group_layers(specs: abc.Sequence[KVSpec], max_model_len: int) -> list[KVGroup]:
    """Divide layers by window into groups of equal size: full attention first, the smallest window last.

    The i-th layers of all groups store K and V in the same memory, so any group can use any block. This
    requires that all layers have the same shape. Otherwise there is one group, with the widest window.
    The group size is the one that wastes the least memory.

    >>> import torch
    >>> specs = [KVSpec(1, 8, 8, torch.float32, window) for window in (16, 16, None, 16, 16, None)]
    >>> group_layers(specs, max_model_len=100)  # doctest: +NORMALIZE_WHITESPACE
    [KVGroup(layers=[2, 5], window=None),
     KVGroup(layers=[0, 1], window=16), KVGroup(layers=[3, 4], window=16)]
    """
    if not specs:  # blocks are still counted but take no memory, like those of layers that see one token
        return [KVGroup([], 1)]
    kinds: dict[float, list[int]] = {}  # window -> layers
    for layer, spec in enumerate(specs):
        is_whole = spec.window is None or spec.window >= max_model_len
        kinds.setdefault(math.inf if is_whole or spec.window is None else spec.window, []).append(layer)
    size = len(specs)
    if len({spec._replace(window=None) for spec in specs}) == 1:
        counts = [len(layers) for layers in kinds.values()]
        num_layers = {n: n * sum(-(-count // n) for count in counts) for n in range(1, max(counts) + 1)}
        size = min(range(min(counts), max(counts) + 1), key=lambda n: (num_layers[n], -n))
    else:
        kinds = {max(kinds): list(range(len(specs)))}
    return [
        KVGroup(layers[i : i + size], None if window == math.inf else int(window))
        for window, layers in sorted(kinds.items(), reverse=True)
        for i in range(0, len(layers), size)
    ]


class WindowedBlockManager(BlockManager):
    """Manages blocks with a block table per group.

    When a sequence needs room (`may_append`), a group with a window first frees the blocks that no future
    token sees, and replaces them in the table with the null block. Such a group's table grows enough for the
    largest possible step, not for the whole prompt. Example: blocks of 2, a window of 3, steps of at most 4
    tokens, and a prompt of 11. Block 3 is allocated at admission, although the first step does not reach it:
    see `_table_lengths`.

        step        computes  sees from  block table
        admitted    [0, 4)    0          [1, 2, 3]
        second      [4, 8)    2          [0, 2, 3, 4]
        third       [8, 11)   6          [0, 0, 0, 4, 5, 6]

    `windows` says, by group, how many positions a token sees, including its own; None: all. A group without a
    window must come first. A step computes at most max_chunk_tokens of a sequence, draft tokens included. The
    other groups' tables are kept in `more_tables`, for a runner that reads it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: abc.Sequence[int | None],
        max_chunk_tokens: int,
        more_tables: MoreTables | None = None,
        **settings: Any,
    ) -> None:
        # With a window of 1, no hit would be held. But the last one must be: see `_note_hits`.
        self.windows = tuple(window and max(window, 2) for window in windows)
        self.max_chunk_tokens = max_chunk_tokens
        self.more_tables: MoreTables = {} if more_tables is None else more_tables
        super().__init__(num_blocks, block_size, **settings)

    def clear(self) -> None:
        super().clear()
        self.more_tables.clear()

    def tables_of(self, seq: Sequence) -> list[list[int]]:
        """Return a sequence's block tables, by group, or an empty list while the sequence waits."""
        more = self.more_tables.get(seq)
        return [] if more is None else [seq.block_table, *more]

    # -- admission

    def allocate(self, seq: Sequence) -> bool:
        """See the base class. This allocates blocks in all groups."""
        hits = self.find_groups(seq)
        num_hits = len(hits[0])
        num_computed = min(num_hits * self.block_size, seq.num_tokens - 1)
        # Null blocks are counted both in the table lengths and in the hits, so they cancel out.
        num_new = sum(self._table_lengths(num_computed, seq.num_tokens)) - num_hits * len(hits)
        if not self._hold(seq, [block for blocks in hits for block in blocks if block.block_id], num_new):
            return False
        seq.block_table, *more = ([block.block_id for block in blocks] for blocks in hits)
        self.more_tables[seq] = more
        self._note_hits(seq, hits[0])  # before _grow, which reads num_computed_tokens
        self._grow(seq, seq.num_tokens)
        return True

    def find_groups(self, seq: Sequence) -> list[list[Block]]:
        """Return by group the registered blocks of the longest prefix that all groups can use.

        The chain of the first group is looked up block by block from the start. A group with a window only
        needs the blocks that the next token sees. The null block stands for the others.
        """
        chain = self.find_prefix(seq)
        parents = [None, *(block.prefix for block in chain)]
        num_blocks = self._longest_beginning(seq, chain, len(chain))  # the prefix to try next
        while True:
            next_position = min(num_blocks * self.block_size, seq.num_tokens - 1)
            hits: list[list[Block]] = []
            for group, window in enumerate(self.windows):
                blocks = [self.blocks[0]] * self._first_seen(window, next_position)
                for i in range(len(blocks), num_blocks):
                    key = seq.block_keys[i]._replace(group=group)
                    prefix = self.prefixes.get((key, parents[i]))
                    if prefix is None:
                        break
                    blocks.append(next(iter(prefix.blocks.values())))
                hits.append(blocks)
            shortest = min(map(len, hits))
            if shortest == num_blocks:
                return hits
            # Block `shortest` of some group is missing. The next token of a shorter prefix sees further back,
            # so every prefix that contains this block needs it. Try the prefix that ends before it.
            num_blocks = self._longest_beginning(seq, chain, shortest)

    # -- growth

    def may_append(self, seq: Sequence, num_tokens: int) -> bool:
        """See the base class. First, this frees the blocks that no uncomputed token sees."""
        self._remove_skipped_blocks(seq)
        lengths = self._table_lengths(seq.num_computed_tokens, num_tokens)
        pairs = zip(lengths, self.tables_of(seq), strict=True)
        if sum(max(0, length - len(table)) for length, table in pairs) > self.num_free_blocks:
            return False
        self._grow(seq, num_tokens)
        return True

    # -- release

    def free(self, seq: Sequence) -> None:
        """See the base class. This releases the last block of every group, then the one before, and so on."""
        for block_ids in reversed([*itertools.zip_longest(*self.tables_of(seq), fillvalue=0)]):
            for block_id in filter(None, block_ids):
                self._release(block_id)
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self.more_tables.pop(seq, None)

    # -- helpers

    def _longest_beginning(self, seq: Sequence, chain: list[Block], limit: int) -> int:
        """Return the longest prefix of the chain that a sequence can continue, in blocks, up to `limit`."""
        return limit

    @property
    def max_computable_tokens(self) -> int:
        """See the base class. There is no limit if every group has a window and all windows fit."""
        # The largest number of blocks that each group holds at a time: for the tokens that are seen and those
        # that a step computes, if the first of them is the last token of a block.
        more = self.max_chunk_tokens + self.block_size - 2
        limits = [sys.maxsize if w is None else self.num_blocks_for(w + more) for w in self.windows]
        if sum(limits) <= self.num_blocks:
            return 1 << 40

        def num_held(length: int) -> int:
            """Return how many blocks all tables hold if each is this long, up to its limit."""
            return sum(min(length, limit) for limit in limits)

        lengths = range(self.num_blocks + 1)
        return (bisect.bisect_right(lengths, self.num_blocks, key=num_held) - 1) * self.block_size

    def _table_lengths(self, num_computed_tokens: int, num_tokens: int) -> list[int]:
        """Return how long each group's block table must be before the next step.

        With a window, the table covers max(num_computed_tokens, window - 1) positions plus one step. So
        a group starts with all blocks it ever holds at a time, or one fewer if a step begins inside a block.
        """
        limits = (
            num_tokens if window is None else max(num_computed_tokens, window - 1) + self.max_chunk_tokens
            for window in self.windows
        )
        return [self.num_blocks_for(min(num_tokens, limit)) for limit in limits]

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        tables, lengths = self.tables_of(seq), self._table_lengths(seq.num_computed_tokens, num_tokens)
        for table, length in zip(tables, lengths, strict=True):
            table += [self._take_free_block() for _ in range(length - len(table))]  # in place
        seq.capacity = min(map(len, tables)) * self.block_size

    def _first_seen(self, window: int | None, position: int) -> int:
        """Return the index of the first block in which the token at a position sees anything."""
        # A window of 4 is the token itself and the 3 tokens before it.
        return 0 if window is None else max(0, position - (window - 1)) // self.block_size

    def _remove_skipped_blocks(self, seq: Sequence) -> None:
        """Free the blocks that no future token sees, the last block first. The name is vLLM's."""
        num_released = 0
        for window, table in zip(self.windows, self.tables_of(seq), strict=True):
            first = self._first_seen(window, seq.num_computed_tokens)
            index = min(first, len(table))
            while index > 0 and table[index - 1]:
                index -= 1
                self._release(table[index])
                table[index] = 0
                num_released += 1
            # With a KV store, tokens loaded from a store may move the start of the window past the table.
            table += [0] * (first - len(table))
        if num_released:
            self.tell("skipped", seq)

    def _register(self, seq: Sequence, i: int) -> Prefix:
        """See the base class. This skips the groups that have already freed the block."""
        key, parent = seq.block_keys[i], seq.prefix
        for group, table in enumerate(self.tables_of(seq)):
            if table[i]:
                self._add_block(table[i], key._replace(group=group), parent)
        # If the first group has freed the block, no lookup finds it or the blocks after it.
        return self.prefixes.get((key, parent)) or Prefix(key, parent)


class WindowedRunner(ModelRunner):
    """Runs a model with a block table per group."""

    def __init__(
        self, num_groups: int, model: Any, device: Any, attention: Attention, *others: Any, **settings: Any
    ) -> None:
        by_group = attention._replace(build=partial(GroupedAttention, attention.build))
        super().__init__(model, device, by_group, *others, **settings)
        self.num_groups = num_groups
        self.more_tables: MoreTables = {}  # written by the block manager

    def build_inputs(
        self, batch: ScheduledBatch, before: ScheduledBatch | None = None
    ) -> ModelInputs[np.ndarray]:
        """See the base class. For G groups, block_tables is (G, S, longest table), slot_mapping (G, T)."""
        inputs = super().build_inputs(batch, before)
        meta, positions, size = inputs.metadata, inputs.positions, self.block_size
        seqs = [chunk.seq for chunk in batch.chunks]
        # The trial batches of kv_cache_size.py are not in more_tables: they use one table for all groups.
        more = [self.more_tables.get(seq, [seq.block_table] * (self.num_groups - 1)) for seq in seqs]
        tables = [seq.block_table for seq in seqs]  # the first group's tables, then the second's...
        for of_group in zip(*more, strict=True):
            tables += of_group
        block_tables = pad_tables(tables).reshape(self.num_groups, len(seqs), -1)
        seq_of_row = np.repeat(np.arange(len(seqs)), np.diff(meta.cu_seqlens_q))
        slots = np.stack([map_slots(table, seq_of_row, positions, size) for table in block_tables])
        slots[:, meta.slot_mapping < size] %= size  # discard in all groups what the base class discards
        return inputs._replace(metadata=meta._replace(block_tables=block_tables, slot_mapping=slots))


def describe_windows(windows: list[int | None]) -> str:
    """Return a description, for the user, of the groups' windows. At least one layer must have a window."""
    if windows == [None]:
        return "sliding windows free no blocks (the layers' shapes differ)"
    if len(windows) == 1:
        return f"a window of {windows[0]}"
    kinds = (f"{windows.count(w)} {f'with a window of {w}' if w else 'full'}" for w in dict.fromkeys(windows))
    return f"layers in groups: {', '.join(kinds)}"
