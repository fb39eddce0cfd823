"""Sliding windows: layers that see the end of a sequence only, and give back the blocks behind it.

Layers with the same window, or with none, are a group (`kv_cache.group_layers`), and a sequence has a block
table for each group: the first is `Sequence.block_table`, `WindowedBlockManager.more_tables` has the others.
All groups take blocks from the one pool. The device's block tables and slots get a first dimension of groups,
and each layer attends over its group's (`attention.GroupedAttention`).

Source: vLLM's hybrid KV cache manager, https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager
"""

import itertools
import sys
from collections import abc
from functools import partial
from typing import Any

import numpy as np

from nanoengine.backends.attention import GroupedAttention
from nanoengine.backends.device import Attention
from nanoengine.backends.inputs import ModelInputs
from nanoengine.engine import (
    Block,
    BlockKey,
    BlockManager,
    ModelRunner,
    ScheduledBatch,
    Sequence,
    map_slots,
    pad_block_tables,
)

MoreTables = dict[Sequence, list[list[int]]]  # block tables of the groups after the first


class WindowedBlockManager(BlockManager):
    """A block manager with a block table per group.

    When a sequence needs room (`may_append`), a group with a window first gives back the blocks that no token
    to come sees; the null block takes their places in the table. And it grows by what a step may compute at
    most, not by a whole prompt. With blocks of 2, a window of 3 and steps of at most 4 tokens, a prompt of 11
    has (block 3 is there from the start, since a step that begins at 2 reaches it: see `_table_lengths`)

        step        computes  sees from  block table
        admitted    [0, 4)    0          [1, 2, 3]
        second      [4, 8)    2          [0, 2, 3, 4]
        third       [8, 11)   6          [0, 0, 0, 4, 5, 6]

    Args:
        num_blocks, block_size, settings: as in the base class.
        windows: by group, how many positions back a token sees, itself included; None: it sees all. A group
            that sees all has to be the first.
        max_chunk_tokens: what a step may compute of a sequence, drafts included.
        more_tables: where to keep the further groups' tables, for a runner that reads them.
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
        # With a window of 1 no token of a hit would be seen, and no block of it held. But its last block must
        # be: its prefix_id says after which tokens the sequence goes on (`_note_hits`).
        self.windows = tuple(window and max(window, 2) for window in windows)
        self.max_chunk_tokens = max_chunk_tokens
        self.more_tables: MoreTables = {} if more_tables is None else more_tables
        super().__init__(num_blocks, block_size, **settings)

    def tables_of(self, seq: Sequence) -> list[list[int]]:
        """A sequence's block tables, by group; none while it waits."""
        more = self.more_tables.get(seq)
        return [] if more is None else [seq.block_table, *more]

    # -- admission

    def allocate(self, seq: Sequence) -> bool:
        """As in the base class, for all groups."""
        hits = self.find_groups(seq)
        num_hits = len(hits[0])
        num_computed = min(num_hits * self.block_size, seq.num_tokens - 1)
        # Null blocks stand in the tables too, and in the hits: they cancel out.
        num_new = sum(self._table_lengths(num_computed, seq.num_tokens)) - num_hits * len(hits)
        if not self._hold([block for blocks in hits for block in blocks if block.block_id], num_new):
            return False
        seq.block_table, *more = ([block.block_id for block in blocks] for blocks in hits)
        self.more_tables[seq] = more
        self._note_hits(seq, hits[0])  # first, since how far it grows depends on num_computed_tokens
        self._grow(seq, seq.num_tokens)
        return True

    def find_groups(self, seq: Sequence) -> list[list[Block]]:
        """By group, the registered blocks of the longest beginning that all groups have.

        The first group's are looked up from the start, each after the one before. Of the others, and of any
        group with a window, there need only be what the next token sees; the null block stands for the rest.
        """
        chain = self.find_prefix(seq)
        parent_ids = [0, *(block.prefix_id for block in chain)]
        num_blocks = self._longest_beginning(seq, chain, len(chain))  # that is tried
        while True:
            next_position = min(num_blocks * self.block_size, seq.num_tokens - 1)
            hits: list[list[Block]] = []
            for group, window in enumerate(self.windows):
                blocks = [self.blocks[0]] * self._first_seen(window, next_position)
                for i in range(len(blocks), num_blocks):
                    block = self._find(self._key(seq.block_keys[i], group), parent_ids[i])
                    if block is None:
                        break
                    blocks.append(block)
                hits.append(blocks)
            shortest = min(map(len, hits))
            if shortest == num_blocks:
                return hits
            # Block `shortest` of some group is missing. A shorter beginning sees further back, so every one
            # that includes this block needs it: next try the one that ends before it.
            num_blocks = self._longest_beginning(seq, chain, shortest)

    # -- growth

    def may_append(self, seq: Sequence, num_tokens: int) -> bool:
        """As in the base class; but first, and in any case, what no token to come sees is given back.

        Those to come begin at `seq.num_computed_tokens`.
        """
        self._remove_skipped_blocks(seq)
        lengths = self._table_lengths(seq.num_computed_tokens, num_tokens)
        pairs = zip(lengths, self.tables_of(seq), strict=True)
        if sum(max(0, length - len(table)) for length, table in pairs) > self.num_free_blocks:
            return False
        self._grow(seq, num_tokens)
        return True

    # -- release

    def free(self, seq: Sequence) -> None:
        """As in the base class: the last blocks of all groups, those before them, and so on."""
        for block_ids in reversed([*itertools.zip_longest(*self.tables_of(seq), fillvalue=0)]):
            for block_id in filter(None, block_ids):
                self._release(block_id)
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        """As in the base class."""
        super().forget(seq)
        self.more_tables.pop(seq, None)

    # -- helpers

    def _longest_beginning(self, seq: Sequence, chain: list[Block], most: int) -> int:
        """How many of the chain's first blocks a sequence can go on from, at most that many; a seam."""
        return most

    @property
    def max_computable_tokens(self) -> int:
        """As in the base class; without a limit where every group has a window and there is room for it."""
        # The most blocks that each group holds at a time: what is seen and what a step computes, and one more
        # since that may begin anywhere in a block.
        limits = sorted(
            sys.maxsize if window is None else self.num_blocks_for(window - 1 + self.max_chunk_tokens) + 1
            for window in self.windows
        )
        # All block tables grow alike; each group takes blocks from the pool until it has reached its limit.
        # With 10 blocks, a group that holds 3 at most and one that sees all: 3 + 3, then the 4 that are left
        # for the second, so 7 blocks long.
        num_free, length = self.num_blocks, 0
        while limits:
            growth = min(limits[0] - length, num_free // len(limits))
            length, num_free = length + growth, num_free - growth * len(limits)
            if length < limits[0]:
                return length * self.block_size
            del limits[0]
        return 1 << 40

    def _table_lengths(self, num_computed_tokens: int, num_tokens: int) -> list[int]:
        """How long each group's block table has to be before the next step.

        With a window: as long as what is computed, a window at least, and one step. So a group has from its
        first blocks on as many as it will ever hold, but for the one that a beginning inside a block costs.
        """
        whole = self.num_blocks_for(num_tokens)
        lengths = []
        for window in self.windows:
            if window is not None:
                reach = max(num_computed_tokens, window - 1) + self.max_chunk_tokens
                lengths.append(min(whole, self.num_blocks_for(reach)))
            else:
                lengths.append(whole)
        return lengths

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        """As in the base class."""
        tables, lengths = self.tables_of(seq), self._table_lengths(seq.num_computed_tokens, num_tokens)
        for table, length in zip(tables, lengths, strict=True):
            table += [self._take_free_block() for _ in range(length - len(table))]  # in place
        seq.capacity = min(map(len, tables)) * self.block_size

    def _first_seen(self, window: int | None, position: int) -> int:
        """Index of the first block of which the token at a position sees anything."""
        # Of a window of 4 it sees itself and 3 more: the position itself is one of the window's.
        return 0 if window is None else max(0, position - (window - 1)) // self.block_size

    def _remove_skipped_blocks(self, seq: Sequence) -> None:
        """Take back the blocks that no token to be computed sees, the last first; the name is vLLM's."""
        for window, table in zip(self.windows, self.tables_of(seq), strict=True):
            first = self._first_seen(window, seq.num_computed_tokens)
            index = min(first, len(table))
            while index > 0 and table[index - 1]:
                index -= 1
                self._release(table[index])
                table[index] = 0
            # Only with kvstore.py: tokens loaded from a store may put the start of the window past the table.
            table += [0] * (first - len(table))

    def _key(self, key: BlockKey, group: int) -> BlockKey:
        """A group's own key for the same tokens, of which each group holds other K and V."""
        return key._replace(hash=key.hash + group)

    def _register(self, seq: Sequence, i: int, parent_id: int) -> None:
        """As in the base class, of every group that did not give the block back already."""
        for group, table in enumerate(self.tables_of(seq)):
            if table[i]:
                block, key = self.blocks[table[i]], self._key(seq.block_keys[i], group)
                block.key, block.parent_id, block.prefix_id = key, parent_id, seq.prefix_id
                self.registered_blocks.setdefault(key.hash, {})[block.block_id] = block


class WindowedRunner(ModelRunner):
    """A runner for a block table per group.

    Args:
        num_groups: how many.
        model, device, attention, sample, block_size: as in the base class.
    """

    def __init__(self, num_groups: int, model: Any, device: Any, attention: Attention, *others: Any) -> None:
        by_group = attention._replace(build=partial(GroupedAttention.of, attention.build))
        super().__init__(model, device, by_group, *others)
        self.num_groups = num_groups
        self.more_tables: MoreTables = {}  # written by the block manager

    def build_inputs(
        self, batch: ScheduledBatch, before: ScheduledBatch | None = None
    ) -> ModelInputs[np.ndarray]:
        """As in the base class; block_tables (G, S, most blocks) and slot_mapping (G, T)."""
        inputs = super().build_inputs(batch, before)
        meta, positions, size = inputs.metadata, inputs.positions, self.block_size
        seqs = [chunk.seq for chunk in batch.chunks]
        # Not in more_tables: the trial batches of startup.py, with one table for all groups.
        more = [self.more_tables.get(seq, [seq.block_table] * (self.num_groups - 1)) for seq in seqs]
        tables = [seq.block_table for seq in seqs]  # of the first group, then of the second...
        for of_group in zip(*more, strict=True):
            tables += of_group
        block_tables = pad_block_tables(tables).reshape(self.num_groups, len(seqs), -1)
        seq_of_row = np.repeat(np.arange(len(seqs)), np.diff(meta.cu_seqlens_q))
        slots = np.stack([map_slots(table, seq_of_row, positions, size) for table in block_tables])
        slots[:, meta.slot_mapping < size] %= size  # what the base class discards, in all groups
        return inputs._replace(metadata=meta._replace(block_tables=block_tables, slot_mapping=slots))
