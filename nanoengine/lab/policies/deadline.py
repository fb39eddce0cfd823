"""Earliest deadline first."""

import math
import time
from weakref import WeakKeyDictionary

from nanoengine.engine import Scheduler, Sequence
from nanoengine.sampling_params import check_number


class EarliestDeadline(Scheduler):
    """Admits the request whose first token is due first: `ttft_deadline` of extra_args, in seconds."""

    clock = staticmethod(time.monotonic)  # the lab replaces it with simulated time
    due: WeakKeyDictionary[Sequence, float]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, and note when its first token is due."""
        seconds = (seq.params.extra_args or {}).get("ttft_deadline", math.inf)
        due = self.clock() + check_number("ttft_deadline", seconds, -math.inf, math.inf)
        vars(self).setdefault("due", WeakKeyDictionary())[seq] = due
        super().add(seq)

    def next_waiting(self, waiting: list[Sequence]) -> Sequence:
        return min(waiting, key=lambda seq: self.due[seq])

    def victim(self, running: list[Sequence]) -> Sequence:
        """Return one that had its first token, if there is one: it has no deadline any more."""
        return max(running, key=lambda seq: (seq.num_output_tokens > 0, self.due[seq]))
