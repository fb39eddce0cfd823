"""Random walks through worlds of worlds.py that are too large to explore.

The same walk serves the core alone and what extends it. By default test_trace.py, test_policies.py and
test_kvstore.py run it, each with checks of its own.
"""

import random
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from nanoengine.sampling_params import SamplingParams
from tests.worlds import EOS, UNDRAWN, Size, World, collide

SIZES: dict[str, Any] = {
    "block_size": st.sampled_from([1, 2, 4]),
    "num_blocks": st.integers(2, 12),
    "max_num_seqs": st.integers(1, 5),
    "budget": st.sampled_from([1, 2, 5, 64]),
    "threshold": st.sampled_from([0, 0, 1, 3]),
    "caching": st.sampled_from([True, True, True, False]),
    "hash_function": st.sampled_from([xxh3_64_intdigest, collide]),
}
is_busy = precondition(lambda self: not self.world.is_idle)


class CoreMachine(RuleBasedStateMachine):
    """Tests the core alone: one block table per sequence, and no drafts."""

    make_world = World

    @initialize(**SIZES)
    def start(self, **sizes):
        self.begin(Size(max_len=24, draws=(0, 1, 0, 1, EOS, UNDRAWN), **sizes))

    def begin(self, size):
        self.world, self.seqs = self.make_world(size), []

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.sampled_from([1, 3, 9, None]),
        priority=st.integers(-1, 1),
        copies=st.sampled_from([1, 1, 2]),
    )
    def add(self, prompt, max_tokens, priority, copies):
        if len(prompt) < self.world.scheduler.max_num_tokens:
            params = SamplingParams(max_tokens=max_tokens)
            self.seqs += [self.world.add(prompt, priority, params) for _ in range(copies)]

    @is_busy
    @rule(data=st.data(), repeat=st.integers(1, 4), overlap=st.booleans())
    def step(self, data, repeat, overlap):
        """Run steps. The last may stay in flight, its tokens unknown, unless there are drafts."""
        self.world.choose = lambda options: data.draw(st.sampled_from(options))
        self.world.core.max_in_flight = int(overlap and not self.world.size.num_drafts)
        self.world.collect_surplus()
        for _ in range(repeat):
            if not self.world.is_idle:
                self.step_once()

    def step_once(self):
        self.world.step()

    @is_busy
    @rule(data=st.data(), where=st.sampled_from(["write", "collect"]))
    def fail_a_step(self, data, where):
        self.world.choose = lambda options: data.draw(st.sampled_from(options))
        with patch.object(self.world, where, side_effect=TimeoutError), suppress(TimeoutError):
            self.step_once()
        self.world.recover()

    @precondition(lambda self: self.world.seqs)
    @rule(data=st.data())
    def abort(self, data):
        self.world.abort(data.draw(st.integers(0, len(self.world.seqs) - 1)))

    @rule()
    def reset_prefix_cache(self):
        self.world.reset()

    @invariant()
    def laws_hold(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """Check that every request finishes and every block is freed."""
        if hasattr(self, "world"):
            self.run_to_the_end()
            assert all(seq.is_finished for seq in self.seqs)
            assert self.world.blocks.num_free_blocks == self.world.blocks.num_blocks

    def run_to_the_end(self):
        rng = random.Random(len(self.seqs))

        def choose(options):
            """Mostly sample 0, after as many right drafts as there may be."""
            if rng.random() < 0.2:
                return rng.choice(options)
            return (0,) * len(options[-1]) if isinstance(options[0], tuple) else options[0]

        self.world.choose = choose
        for _ in range(5000):
            if not self.world.is_idle:
                self.step_once()
        assert self.world.is_idle, "a sequence never finished"


class ExtendedMachine(CoreMachine):
    """Adds windows and draft tokens."""

    @initialize(
        **SIZES,
        windows=st.sampled_from([(None,), (3,), (1,), (None, 4), (None, None, 2), (5, 2), (None, 3, 3)]),
        num_drafts=st.sampled_from([0, 3]),
    )
    def start(self, num_blocks, windows, **sizes):
        super().start(num_blocks=num_blocks * len(windows), windows=windows, **sizes)


BRIEFLY = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
IN_SECONDS = [settings(BRIEFLY, max_examples=10), pytest.param(BRIEFLY, marks=pytest.mark.slow)]
AT_LENGTH = settings(BRIEFLY, max_examples=150, derandomize=True, database=None)  # over 2,500 steps


@pytest.mark.slow
@pytest.mark.parametrize("machine", [CoreMachine, ExtendedMachine])
def test_thousands_of_scheduling_steps_keep_the_laws(machine):
    stateful.run_state_machine_as_test(machine, settings=AT_LENGTH)
