"""Priorities that preempt running requests."""

from nanoengine.engine import ScheduledBatch, Scheduler, Sequence


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
