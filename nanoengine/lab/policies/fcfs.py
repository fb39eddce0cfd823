"""First come, first served."""

from nanoengine.engine import Scheduler, Sequence


class FCFS(Scheduler):
    """Runs requests in order of arrival, and ignores their priorities."""

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all that arrived before it."""
        seq.priority = 0
        super().add(seq)
