"""Scheduling policies, each a `Scheduler` that runs in the lab and on a model."""

import math
import time
from weakref import WeakKeyDictionary

from nanoengine.assembly import find_scheduler
from nanoengine.engine import ScheduledBatch, Scheduler, Sequence
from nanoengine.sampling_params import check_number


class FCFS(Scheduler):
    """Runs requests in order of arrival, and ignores their priorities."""

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all that arrived before it."""
        seq.priority = 0
        super().add(seq)


class ShortestFirst(Scheduler):
    """Runs the request with the fewest tokens left first. Each second of waiting counts as fewer tokens."""

    tokens_per_second = 100.0
    clock = staticmethod(time.monotonic)  # the lab replaces it with simulated time
    arrivals: WeakKeyDictionary[Sequence, float]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, and note when."""
        vars(self).setdefault("arrivals", WeakKeyDictionary())[seq] = self.clock()
        super().add(seq)

    def length(self, seq: Sequence) -> float:
        """Return how many tokens are left at most, and the arrival time in tokens: the later, the more."""
        return seq.max_num_tokens - seq.num_computed_tokens + self.tokens_per_second * self.arrivals[seq]

    def next_waiting(self, waiting: list[Sequence]) -> Sequence:  # noqa: D102
        return min(waiting, key=self.length)

    def victim(self, running: list[Sequence]) -> Sequence:  # noqa: D102
        return max(running, key=self.length)


class CachedFirst(Scheduler):
    """Admits the request whose prompt has the most cached tokens. Others may wait for long."""

    def next_waiting(self, waiting: list[Sequence]) -> Sequence:
        """Return the sequence with the longest cached prefix, the earliest one of several."""
        return max(waiting, key=lambda seq: len(self.block_manager.find_prefix(seq)))


class PreemptivePriority(Scheduler):
    """Runs the lowest priority number first. It takes the place of running requests with a higher one."""

    def schedule(self) -> ScheduledBatch:
        """Preempt running sequences until the most important waiting one can be admitted."""
        waiting = self.waiting if self.is_ready is None else [*filter(self.is_ready, self.waiting)]
        while waiting and self.running and waiting[0].priority < self.running[-1].priority:
            if self.fits(waiting[0]):
                break
            self._preempt(self.running[-1], waiting[0])
        return super().schedule()

    def fits(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence can be admitted without a preemption."""
        blocks = self.block_manager
        num_shared = sum(block.ref_count > 0 for block in blocks.find_prefix(seq))
        num_needed = blocks.num_blocks_for(seq.num_tokens) - num_shared
        return len(self.running) < self.max_num_seqs and num_needed <= blocks.num_free_blocks


class EarliestDeadline(Scheduler):
    """Admits the request whose first token is due first: `ttft_deadline` of extra_args, in seconds."""

    clock = staticmethod(time.monotonic)
    due: WeakKeyDictionary[Sequence, float]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, and note when its first token is due."""
        seconds = (seq.params.extra_args or {}).get("ttft_deadline", math.inf)
        due = self.clock() + check_number("ttft_deadline", seconds, -math.inf, math.inf)
        vars(self).setdefault("due", WeakKeyDictionary())[seq] = due
        super().add(seq)

    def next_waiting(self, waiting: list[Sequence]) -> Sequence:  # noqa: D102
        return min(waiting, key=lambda seq: self.due[seq])

    def victim(self, running: list[Sequence]) -> Sequence:
        """Return one that had its first token, if there is one: it has no deadline any more."""
        return max(running, key=lambda seq: (seq.num_output_tokens > 0, self.due[seq]))


POLICIES: dict[str, type[Scheduler]] = {"fcfs": FCFS, "shortest": ShortestFirst, "cached": CachedFirst}
POLICIES |= {"priority": PreemptivePriority, "deadline": EarliestDeadline}


def find_policy(name: str) -> type[Scheduler]:
    """Return the policy with this name, or the `Scheduler` that "module:Class" names."""
    if name not in POLICIES and {":", "."}.isdisjoint(name):
        raise ValueError(f"must be {', '.join(POLICIES)} or module:Class, got {name!r}")
    return POLICIES.get(name) or find_scheduler(name)
