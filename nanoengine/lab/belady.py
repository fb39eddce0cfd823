"""Belady's optimum: how many prompt tokens of a run the best possible eviction would have found in the cache.

The order of the run's accesses is given, and how many blocks are free at each time: those of running requests
cannot be evicted. Of free blocks with content, the optimum evicts those whose next use is farthest in the
future. A use of a block is a use of all blocks before it, so leaves go before their parents. This finds the
most blocks. If a preempted request computes blocks again that others hit, it is an upper bound.

Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from itertools import takewhile
from typing import Any

from nanoengine.engine import Scheduler, Sequence

# What happened, how many blocks are free then, to which sequence, how many of its tokens count if they are
# hits, how many of the blocks it holds now, and chained hashes: of all its full blocks, or of new ones
Event = tuple[str, int, int, int, int, tuple[int, ...]]


class Accesses:
    """Records how a run uses the cache. It observes the scheduler, together with its observer so far."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.manager, self.tell_before = scheduler.block_manager, scheduler.tell
        self.events = list[Event]()
        scheduler.observe(self._note)

    def _note(self, kind: str, *details: Any) -> None:
        self.tell_before(kind, *details)
        if kind in ("admitted", "registered", "grew", "freed"):
            seq: Sequence = details[0]
            num_held, is_new = seq.num_registered_blocks, kind == "admitted"
            first: Any = {"admitted": 0, "registered": details[-1]}.get(kind, num_held)
            keys = seq.block_keys[first : None if is_new else num_held]
            # Hits count at the first admission only, as in the engine's statistics.
            num_counted = seq.num_tokens if is_new and not seq.num_preemptions else 0
            num_free, hashes = self.manager.num_free_blocks, tuple([key.hash for key in keys])
            self.events.append((kind, num_free, seq.seq_id, num_counted, num_held, hashes))


def optimal_hits(events: list[Event], block_size: int) -> int:
    """Return how many tokens of these admissions Belady's eviction finds in the cache."""
    uses: defaultdict[int, deque[float]] = defaultdict(deque)  # block -> when it is admitted, in order
    for now, (kind, _, _, num_counted, _, blocks) in enumerate(events):
        for block in blocks if kind == "admitted" else ():
            uses[block].append(now if num_counted else math.inf)
    held: dict[int, dict[int, None]] = {}  # the blocks of each running sequence, in order
    num_holders: Counter[int] = Counter()
    kept: dict[int, float] = {}  # free block with content -> its next use
    farthest: list[tuple[float, int, int]] = []  # a heap of these, leaves first; some are not kept any more
    num_hits = 0
    for kind, num_free, seq_id, num_counted, num_held, blocks in events:
        mine = held.setdefault(seq_id, {})
        if kind == "admitted":
            for block in blocks:
                uses[block].popleft()
            found = len([*takewhile(lambda block: num_holders[block] or block in kept, blocks)])
            num_hits += min(found * block_size, num_counted - 1) if num_counted else 0
            blocks = blocks[: max(found, num_held)]
        for block in blocks:
            if block not in mine:
                mine[block] = None
                num_holders[block] += 1
                kept.pop(block, None)
        if kind == "freed":
            for depth, block in enumerate(held.pop(seq_id)):
                num_holders[block] -= 1
                if not num_holders[block] and uses[block] and uses[block][0] < math.inf:
                    kept[block] = uses[block][0]
                    heapq.heappush(farthest, (-kept[block], -depth, block))
        while len(kept) > num_free:
            next_use, _, block = heapq.heappop(farthest)
            if kept.get(block) == -next_use:
                del kept[block]
    return num_hits
