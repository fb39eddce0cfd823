"""A random walk over the scheduler and the block manager, against a ledger of the cache's contents.

The ledger plays the runner: it records, for every physical slot, the exact token prefix whose K and V
a model would have written there, and checks before each step that what attention would read is right.
A step may be left in flight, its tokens unknown, while the next is scheduled. Or tokens are guessed ahead,
rightly or wrongly, and the ledger holds what was written for wrong guesses too.
"""

import itertools
from array import array

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoengine.engine import BlockManager, ScheduledBatch, Scheduler, Sequence, build_inputs
from nanoengine.sampling_params import SamplingParams
from tests.helpers import is_busy

EOS = 3


class SchedulingMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 12),
        windows=st.sampled_from(
            [(None,)] * 3 + [(3,), (1,), (None, 4), (None, None, 2), (5, 2), (None, 3, 3)]
        ),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 2, 5, 64]),
        threshold=st.sampled_from([0, 0, 1, 3]),
        caching=st.sampled_from([True, True, True, False]),
        constant_hash=st.booleans(),
        guesses=st.booleans(),
    )
    def start(
        self,
        block_size,
        num_blocks,
        windows,
        max_num_seqs,
        budget,
        threshold,
        caching,
        constant_hash,
        guesses,
    ):
        extra = {"hash_function": lambda content, parent: 7} if constant_hash else {}
        self.block_manager = BlockManager(
            num_blocks * len(windows),
            block_size,
            windows=windows,
            max_chunk_tokens=budget,
            enable_prefix_caching=caching,
            **extra,
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=24,
            long_prefill_token_threshold=threshold,
            propose=self.guess if guesses else None,
        )
        self.data = None  # where guesses come from; None: they are all right
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
        if len(prompt) > self.scheduler.max_computable_tokens:
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

    def guess(self, seq, num_tokens):
        assert num_tokens > 0
        assert seq.num_computed_tokens == len(seq.token_ids)
        if self.data is None:
            return [0] * num_tokens
        return self.data.draw(st.lists(st.sampled_from([0, 1, 0, 1, EOS, 9]), max_size=6))

    def write(self, batch, before):
        """Do to the ledger what the model does to the cache, then read all that may be read."""
        size = self.block_manager.block_size
        inputs = build_inputs(batch, size, before)
        owners = [chunk for chunk in batch.chunks for _ in range(chunk.start, chunk.end)]
        written, pending = set(), []
        for group, slots in enumerate(inputs.metadata.slot_mapping):
            rows = zip(owners, inputs.input_ids, inputs.positions, slots, strict=True)
            for (seq, _, _, _, drafts), token_id, position, slot in rows:
                known = (*seq.token_ids, *drafts)
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
        for i, (seq, start, end, _, drafts) in enumerate(batch.chunks):
            known = (*seq.token_ids, *drafts)
            for group, window in enumerate(self.block_manager.windows):
                first = 0 if window is None else max(0, start - window + 1)
                table = inputs.metadata.block_tables[group, i]
                for position in range(first, min(end, len(known))):
                    held = self.slots[table[position // size] * size + position % size]
                    assert held == (group, known[: position + 1]), "wrong K and V"
        for seq in self.scheduler.running:
            for window, table in zip(self.block_manager.windows, seq.block_tables, strict=True):
                num_held = sum(block_id != 0 for block_id in table)
                if window is None:
                    assert num_held == len(table)
                else:
                    assert num_held <= -(-(window - 1 + self.scheduler.max_num_batched_tokens) // size) + 1
        for block in self.block_manager.blocks:
            if block.key is not None:
                group, tokens = self.slots[block.block_id * size + size - 1]
                assert array("i", tokens[-size:]).tobytes() == block.key.content, "a hit would be wrong"
                assert group == block.group

    def launch(self):
        """Schedule and compute a step; returns it with the one whose tokens are due now, if any."""
        before, self.in_flight = self.in_flight, None
        batch = self.scheduler.schedule()
        assert batch.chunks or before is not None, "work is left but nothing was scheduled"
        assert batch.num_tokens == sum(end - start for _, start, end, _, _ in batch.chunks)
        assert batch.sampled_seqs == [seq for seq, _, _, is_last, _ in batch.chunks if is_last]
        assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
        assert all(chunk.end < chunk.seq.max_num_tokens for chunk in batch.chunks), "computed for nothing"
        if batch.chunks:
            self.write(batch, before)
        return batch, before

    def collect(self, batch, tokens):
        due = [seq for seq in dict.fromkeys(batch.sampled_seqs) if not seq.is_finished]
        expected = {seq: [*seq.token_ids, *self.accepted(batch, seq, tokens)] for seq in due}
        assert self.scheduler.update(batch, tokens) == due
        assert {seq: seq.token_ids for seq in due} == expected
        assert not any(seq.block_tables for seq in due if seq.is_finished)
        for slot, seq, position in self.unknown:  # what was written then is known now
            group, tokens = self.slots[slot]
            if tokens == tuple(seq.token_ids[:position]):
                self.slots[slot] = group, tuple(seq.token_ids[: position + 1])
        self.unknown = [entry for entry in self.unknown if entry[2] >= len(entry[1].token_ids)]
        self.scheduler.check_invariants()

    @staticmethod
    def accepted(batch, seq, tokens):
        """What a sequence is due of a step's draws: up to the first that is not the next guess, or an end."""
        draws = [token for owner, token in zip(batch.sampled_seqs, tokens, strict=True) if owner is seq]
        guesses = max((chunk.drafts for chunk in batch.chunks if chunk.seq is seq), key=len)
        taken = []
        for draw, guess in itertools.zip_longest(draws, guesses):
            taken += [] if draw is None else [draw]
            if draw in (None, EOS) or draw != guess:
                return taken
        return taken

    @precondition(lambda self: is_busy(self.scheduler))
    @rule(data=st.data(), repeat=st.integers(1, 4), overlap=st.booleans())
    def step(self, data, repeat, overlap):
        self.data, overlap = data, overlap and self.scheduler.propose is None
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
        """The forward pass dies: part of it was written, nothing of it may be read later."""
        self.data = data
        batch = self.scheduler.schedule()
        size, before = self.block_manager.block_size, self.in_flight
        for slot in build_inputs(batch, size, before).metadata.slot_mapping.flat if batch.chunks else ():
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
            self.scheduler.check_invariants()

    def teardown(self):
        """Run everything to its end: every request finishes and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        self.data = None
        for _ in range(5000):
            if not is_busy(self.scheduler):
                break
            batch, before = self.launch()
            if before is not None:
                self.collect(before, [0] * len(before.sampled_seqs))
            if batch.chunks:
                self.collect(batch, [0] * len(batch.sampled_seqs))
        self.scheduler.check_invariants()
        assert not is_busy(self.scheduler), "a sequence never finished"
        assert all(seq.is_finished for seq in self.seqs)
        assert self.block_manager.num_free_blocks == self.block_manager.num_blocks


TestScheduling = SchedulingMachine.TestCase
TestScheduling.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
