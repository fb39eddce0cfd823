"""A random walk over the scheduler and the block manager, against a ledger of the cache's contents.

The ledger plays the runner: it records, for every physical slot, the exact token prefix whose K and V
a model would have written there, and checks before each step that what attention would read is right.
"""

from array import array

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoengine.engine import BlockManager, Scheduler, Sequence, Status, build_inputs
from nanoengine.sampling import SamplingParams

EOS = 3


class SchedulingMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 2, 5, 64]),
        threshold=st.sampled_from([0, 0, 3]),
        caching=st.sampled_from([True, True, True, False]),
        constant_hash=st.booleans(),
    )
    def start(self, block_size, num_blocks, max_num_seqs, budget, threshold, caching, constant_hash):
        extra = {"hash_function": lambda content, parent: 7} if constant_hash else {}
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching=caching, **extra)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=24,
            long_prefill_token_threshold=threshold,
        )
        self.slots: dict[int, tuple[int, ...]] = {}  # slot -> the tokens up to and including its own
        self.seqs: list[Sequence] = []

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.sampled_from([1, 3, 9, None]),
        priority=st.integers(-1, 1),
        copies=st.sampled_from([1, 1, 2]),
    )
    def add(self, prompt, max_tokens, priority, copies):
        if len(prompt) > self.block_manager.num_blocks * self.block_manager.block_size:
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

    def write(self, batch):
        """Do to the ledger what the model does to the cache, then read all that may be read."""
        size = self.block_manager.block_size
        inputs = build_inputs(batch, size)
        owners = [seq for seq, start, end in batch.chunks for _ in range(start, end)]
        written = set()
        for seq, position, slot in zip(owners, inputs.positions, inputs.slot_mapping, strict=True):
            if slot < size:
                continue  # the null block: discarded
            assert slot not in written, "two tokens of a step write the same slot"
            written.add(slot)
            self.slots[slot] = tuple(seq.token_ids[: position + 1])
        computed = {seq.seq_id: seq.num_computed_tokens for seq in self.scheduler.running}
        computed |= {seq.seq_id: end for seq, _, end in batch.chunks}
        for seq in self.scheduler.running:
            for position in range(computed[seq.seq_id]):
                slot = seq.block_table[position // size] * size + position % size
                assert self.slots[slot] == tuple(seq.token_ids[: position + 1]), "wrong K and V"
        for block in self.block_manager.blocks:
            if block.key is not None:
                tokens = self.slots[block.block_id * size + size - 1][-size:]
                assert array("i", tokens).tobytes() == block.key.content, "a hit would be wrong"

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(data=st.data(), repeat=st.integers(1, 4))
    def step(self, data, repeat):
        for _ in range(repeat):
            if not self.scheduler.has_unfinished():
                return
            batch = self.scheduler.schedule()
            assert batch.chunks, "work is left but nothing was scheduled"
            assert batch.num_tokens == sum(end - start for _, start, end in batch.chunks)
            assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
            self.write(batch)
            tokens = data.draw(
                st.lists(
                    st.sampled_from([0, 1, 0, 1, EOS]),
                    min_size=len(batch.sampled_seqs),
                    max_size=len(batch.sampled_seqs),
                )
            )
            for seq in self.scheduler.update(batch, tokens):
                assert seq.block_table == []
            self.scheduler.check_invariants()

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(data=st.data())
    def fail_a_step(self, data):
        """The forward pass dies: part of it was written, nothing of it may be read later."""
        batch = self.scheduler.schedule()
        for slot in build_inputs(batch, self.block_manager.block_size).slot_mapping:
            self.slots[int(slot)] = (-1,)
        self.scheduler.recover()

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(data=st.data())
    def abort(self, data):
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.scheduler.sequences)), min_size=1, max_size=3))
        self.scheduler.finish([self.scheduler.sequences[i] for i in set(seqs)], "abort")

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
        for _ in range(5000):
            if not self.scheduler.has_unfinished():
                break
            batch = self.scheduler.schedule()
            self.write(batch)
            self.scheduler.update(batch, [0] * len(batch.sampled_seqs))
        self.scheduler.check_invariants()
        assert not self.scheduler.has_unfinished(), "a sequence never finished"
        assert all(seq.status is Status.FINISHED and seq.finish_reason for seq in self.seqs)
        assert self.block_manager.num_free_blocks == self.block_manager.num_blocks


TestScheduling = SchedulingMachine.TestCase
TestScheduling.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
