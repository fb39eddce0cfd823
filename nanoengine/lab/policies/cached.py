"""Cached prefixes first."""

from nanoengine.engine import Scheduler, Sequence


class CachedFirst(Scheduler):
    """Admits the request whose prompt has the most cached tokens. Others may wait for long."""

    def next_waiting(self, waiting: list[Sequence]) -> Sequence:
        """Return the sequence with the longest cached prefix, the earliest one of several."""
        return max(waiting, key=lambda seq: len(self.block_manager.find_prefix(seq)))
