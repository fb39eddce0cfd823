"""A random walk over the scheduler and the block manager, against a ledger of the cache's contents.

The ledger plays the runner: it records, for every physical slot, the exact token prefix whose K and V
a model would have written there, and checks before each step that what attention would read is right.
A step may be left in flight, its tokens unknown, while the next is scheduled.

The same walk serves the core alone and what extends it. With windows there is a block table per group, and
there may be draft tokens, right and wrong; the ledger holds what was written for rejected ones too.
"""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoengine.backends.device import Attention
from nanoengine.engine import BlockManager, ScheduledBatch, Scheduler, Sequence, build_inputs
from nanoengine.extensions.speculate import DraftingScheduler
from nanoengine.extensions.windows import WindowedBlockManager, WindowedRunner
from nanoengine.sampling_params import SamplingParams
from tests.helpers import is_busy
from tests.laws import chain, check_laws, tables_of

EOS = 3


SIZES: dict[str, Any] = {
    "block_size": st.sampled_from([1, 2, 4]),
    "num_blocks": st.integers(2, 12),
    "max_num_seqs": st.integers(1, 5),
    "budget": st.sampled_from([1, 2, 5, 64]),
    "threshold": st.sampled_from([0, 0, 1, 3]),
    "caching": st.sampled_from([True, True, True, False]),
}


class CoreMachine(RuleBasedStateMachine):
    """Tests the core alone: one block table per sequence, and no drafts."""

    @initialize(**SIZES, constant_hash=st.booleans())
    def start(self, num_blocks, block_size, caching, constant_hash, **limits):
        extra = {"hash_function": lambda content, parent: 7} if constant_hash else {}
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=caching, **extra)
        self.begin(blocks, Scheduler, **limits)

    def begin(self, blocks, make_scheduler, max_num_seqs, budget, threshold, windows=(None,)):
        self.block_manager, self.windows = blocks, windows
        self.scheduler = make_scheduler(
            blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=24,
            long_prefill_token_threshold=threshold,
        )
        self.has_drafts = make_scheduler is not Scheduler
        self.data = None  # where drafts come from; None: they are all right
        # slot -> the group that wrote it, and the tokens up to and including its own
        self.slots: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.seqs: list[Sequence] = []
        self.in_flight: ScheduledBatch | None = None
        self.unknown: list[tuple[int, Sequence, int]] = []  # slots written from a pending token

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.sampled_from([1, 3, 9, None]),
        priority=st.integers(-1, 1),
        copies=st.sampled_from([1, 1, 2]),
    )
    def add(self, prompt, max_tokens, priority, copies):
        if len(prompt) >= self.scheduler.max_num_tokens:
            return
        for _ in range(copies):
            seq = Sequence(
                len(self.seqs),
                prompt,
                SamplingParams(max_tokens=max_tokens),
                priority=priority,
                stop_ids=frozenset({EOS}),
            )
            self.seqs.append(seq)
            self.scheduler.add(seq)

    def build_inputs(self, batch, before):
        """Return block tables (G, S, most blocks), slots (G, T), and the other arrays."""
        inputs = build_inputs(batch, self.block_manager.block_size, before)
        return inputs.metadata.block_tables[None], inputs.metadata.slot_mapping[None], inputs

    def write(self, batch, before):
        """Change the ledger as the model changes the cache, then read every slot that may be read."""
        size = self.block_manager.block_size
        block_tables, slot_mapping, inputs = self.build_inputs(batch, before)
        owners = [chunk for chunk in batch.chunks for _ in range(chunk.start, chunk.end)]
        written, pending = set(), []
        for group, slots in enumerate(slot_mapping):
            rows = zip(owners, inputs.input_ids, inputs.positions, slots, strict=True)
            for (seq, _, _, _, token_ids), token_id, position, slot in rows:
                known = tuple(token_ids)
                assert position >= len(known) or token_id == known[position], "not the token of that position"
                if slot < size:
                    assert position < seq.num_hit_tokens, "the K and V of a token are lost"
                    continue  # the null block: discarded
                assert slot not in written, "two tokens of a step write the same slot"
                written.add(slot)
                self.slots[slot] = group, known[: position + 1]
                if position == len(known):
                    self.unknown.append((slot, seq, position))
                    if group == 0:
                        pending.append(seq)
        assert [before.sampled_seqs[i] for i in inputs.pending_samples] == pending
        for i, (_, start, end, _, token_ids) in enumerate(batch.chunks):
            known = tuple(token_ids)
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(0, start - window + 1)
                table = block_tables[group, i]
                for position in range(first, min(end, len(known))):
                    held = self.slots[table[position // size] * size + position % size]
                    assert held == (group, known[: position + 1]), "wrong K and V"
        for seq in self.scheduler.running:
            for window, table in zip(self.windows, tables_of(self.block_manager, seq), strict=True):
                num_held = sum(block_id != 0 for block_id in table)
                if window is None:
                    assert num_held == len(table)
                else:
                    assert num_held <= -(-(window - 1 + self.scheduler.max_num_batched_tokens) // size) + 1
        for block in self.block_manager.blocks:
            if block.key is not None:
                group, tokens = self.slots[block.block_id * size + size - 1]
                key = chain(tokens, size, self.block_manager.hash_function)
                assert key.content == block.key.content, "a hit would be wrong"
                assert block.key.hash == key.hash + group, "a hit would be another group's"

    def launch(self):
        """Schedule and compute a step. Returns it, and the step to collect now, if any."""
        before, self.in_flight = self.in_flight, None
        batch = self.scheduler.schedule()
        assert batch.chunks or before is not None, "work is left but nothing was scheduled"
        assert batch.num_tokens == sum(end - start for _, start, end, _, _ in batch.chunks)
        assert batch.sampled_seqs == [chunk.seq for chunk in batch.chunks if chunk.samples]
        assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
        assert all(chunk.end < chunk.seq.max_num_tokens for chunk in batch.chunks), "computed for nothing"
        if batch.chunks:
            self.write(batch, before)
        return batch, before

    def collect(self, batch, tokens):
        for seq, _, end, samples, token_ids in batch.chunks:
            if samples and token_ids is seq.token_ids and not seq.is_finished:
                assert end == len(token_ids), "a token is sampled twice, or for another position"
        due = [seq for seq in dict.fromkeys(batch.sampled_seqs) if not seq.is_finished]
        expected = {seq: [*seq.token_ids, *self.accepted(batch, seq, tokens)] for seq in due}
        assert self.scheduler.update(batch, tokens) == due
        assert {seq: seq.token_ids for seq in due} == expected
        assert not any(seq.block_table for seq in due if seq.is_finished)
        for slot, seq, position in self.unknown:  # what was written then is known now
            group, tokens = self.slots[slot]
            if tokens == tuple(seq.token_ids[:position]):
                self.slots[slot] = group, tuple(seq.token_ids[: position + 1])
        self.unknown = [entry for entry in self.unknown if entry[2] >= len(entry[1].token_ids)]
        check_laws(self.scheduler)

    @staticmethod
    def accepted(batch, seq, tokens):
        """Return the samples to accept: up to the first that differs from its draft, or an end."""
        draws = [token for owner, token in zip(batch.sampled_seqs, tokens, strict=True) if owner is seq]
        drafts = max((chunk.token_ids for chunk in batch.chunks if chunk.seq is seq), key=len)
        drafts = drafts[len(seq.token_ids) :]
        taken = []
        for draw, draft in itertools.zip_longest(draws, drafts):
            taken += [] if draw is None else [draw]
            if draw in (None, EOS) or draw != draft:
                return taken
        return taken

    @precondition(lambda self: is_busy(self.scheduler))
    @rule(data=st.data(), repeat=st.integers(1, 4), overlap=st.booleans())
    def step(self, data, repeat, overlap):
        self.data, overlap = data, overlap and not self.has_drafts
        for _ in range(repeat):
            if not is_busy(self.scheduler):
                return
            batch, before = self.launch()

            def tokens(batch):
                count = len(batch.sampled_seqs)
                choices = st.sampled_from([0, 1, 0, 1, EOS, None])
                return data.draw(st.lists(choices, min_size=count, max_size=count))

            if before is not None:
                self.collect(before, tokens(before))
            if overlap and batch.chunks:
                self.in_flight = batch
            elif batch.chunks:
                self.collect(batch, tokens(batch))

    @precondition(lambda self: is_busy(self.scheduler))
    @rule(data=st.data())
    def fail_a_step(self, data):
        """Fail the forward pass after part of it was written. None of it may be read later."""
        self.data = data
        batch = self.scheduler.schedule()
        slots = self.build_inputs(batch, self.in_flight)[1] if batch.chunks else np.empty(0)
        for slot in slots.flat:
            self.slots[int(slot)] = -1, (-1,)
        self.scheduler.recover()
        self.in_flight, self.unknown = None, []

    @precondition(lambda self: is_busy(self.scheduler))
    @rule(data=st.data())
    def abort(self, data):
        unfinished = {seq.seq_id: seq for seq in self.scheduler.running + self.scheduler.waiting}
        for i in data.draw(st.sets(st.sampled_from(sorted(unfinished)), min_size=1, max_size=3)):
            self.scheduler.finish(unfinished[i], "abort")

    @rule()
    def reset_prefix_cache(self):
        unused = self.block_manager.num_free_blocks == self.block_manager.num_blocks
        assert self.block_manager.reset_prefix_cache() == unused

    @invariant()
    def laws_hold(self):
        if hasattr(self, "scheduler"):
            check_laws(self.scheduler)

    def teardown(self):
        """Check that every request finishes and every block is freed."""
        if not hasattr(self, "scheduler"):
            return
        self.run_to_the_end()
        check_laws(self.scheduler)
        assert not is_busy(self.scheduler), "a sequence never finished"
        assert all(seq.is_finished for seq in self.seqs)
        assert self.block_manager.num_free_blocks == self.block_manager.num_blocks

    def run_to_the_end(self):
        self.data = None
        for _ in range(5000):
            if not is_busy(self.scheduler):
                break
            batch, before = self.launch()
            if before is not None:
                self.collect(before, [0] * len(before.sampled_seqs))
            if batch.chunks:
                self.collect(batch, [0] * len(batch.sampled_seqs))


class ExtendedMachine(CoreMachine):
    """Adds windows and draft tokens."""

    @initialize(
        **SIZES,
        constant_hash=st.booleans(),
        windows=st.sampled_from([(None,), (3,), (1,), (None, 4), (None, None, 2), (5, 2), (None, 3, 3)]),
        drafts=st.booleans(),
    )
    def start(self, num_blocks, block_size, windows, caching, constant_hash, drafts, **limits):
        extra = {"hash_function": lambda content, parent: 7} if constant_hash else {}
        nothing = Attention(None, lambda metadata, block_size: None, [])
        self.runner = WindowedRunner(len(windows), None, None, nothing, None, block_size)
        blocks = self.make_blocks(
            num_blocks * len(windows),
            block_size,
            windows=windows,
            max_chunk_tokens=limits["budget"],
            more_tables=self.runner.more_tables,
            enable_prefix_caching=caching,
            **extra,
        )
        drafting = functools.partial(DraftingScheduler, propose=self.propose)
        self.begin(blocks, drafting if drafts else Scheduler, windows=blocks.windows, **limits)

    def make_blocks(self, *arguments, **settings):
        return WindowedBlockManager(*arguments, **settings)

    def propose(self, seq, num_tokens):
        assert num_tokens > 0
        assert seq.num_computed_tokens == len(seq.token_ids)
        if self.data is None:
            return [0] * num_tokens
        return self.data.draw(st.lists(st.sampled_from([0, 1, 0, 1, EOS, 9]), max_size=6))

    def build_inputs(self, batch, before):
        inputs = self.runner.build_inputs(batch, before)
        return inputs.metadata.block_tables, inputs.metadata.slot_mapping, inputs


BRIEFLY = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCore = CoreMachine.TestCase
TestExtended = ExtendedMachine.TestCase
TestCore.settings = TestExtended.settings = BRIEFLY
AT_LENGTH = settings(BRIEFLY, max_examples=600, derandomize=True, database=None)  # over 10,000 steps


@pytest.mark.slow
@pytest.mark.parametrize("machine", [CoreMachine, ExtendedMachine])
def test_thousands_of_scheduling_steps_agree_with_the_ledger(machine):
    run_state_machine_as_test(machine, settings=AT_LENGTH)
