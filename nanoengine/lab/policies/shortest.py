"""Shortest job first, with aging."""

import time
from weakref import WeakKeyDictionary

from nanoengine.engine import Scheduler, Sequence


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

    def next_waiting(self, waiting: list[Sequence]) -> Sequence:
        return min(waiting, key=self.length)

    def victim(self, running: list[Sequence]) -> Sequence:
        return max(running, key=self.length)
