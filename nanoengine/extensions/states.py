"""States: models whose layers hand a state from token to token, as Mamba and linear attention do.

K and V of a token stay as they are, so blocks of them can be shared and hit anywhere. A state is overwritten
with each token, and is that of one sequence at one position. So beside its blocks a sequence that runs holds
a slot, and a prefix can be taken up only where a state was kept: at the end of a block, in a slot of its own.

    slot 0      zeros: what every sequence begins with. Never written
    slot 1      what nobody reads: for a trial, or padding
    others      of a sequence that runs; or kept, by the prefix_id of a block, and the least recently used is
                the first to go; or free

Nothing is copied: layers read the state before a chunk from one slot, and write the one after it to another
(`StatePart`). At the end of a block a sequence leaves its slot to the prefix cache and goes on in a new one.
With blocks of 4, a prompt of 10, and a question after the same 8 tokens:

    chunk          parts                               then
    [0, 10)        [0, 8) 0 -> 2, [8, 10) 2 -> 3       2 is kept for those 8, the sequence holds 3
    [10, 11)       3 -> 3
    [11, 12)       3 -> 3
    [12, 13)       3 -> 4                              3 is kept for the first 12, the sequence holds 4
    other [8, 9)   2 -> 5                              a hit

Sources: vLLM's prefix caching of Mamba, "align" mode; of branch points, SGLang's MambaRadixCache.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nanoengine.backends.inputs import (
    BIN_SLOT,
    NUM_RESERVED_SLOTS,
    ZERO_SLOT,
    ModelInputs,
    StateLayout,
    StatePart,
)
from nanoengine.engine import Block, Chunk, ScheduledBatch, Scheduler, Sequence
from nanoengine.extensions.windows import WindowedBlockManager, WindowedRunner


class Span(NamedTuple):
    """Tokens [start, end) of a sequence, and the slots of its state before and after them."""

    start: int
    end: int
    source: int
    target: int


Spans = dict[Sequence, list[Span]]


@dataclass(slots=True)
class Held:
    """What a sequence that runs has of states."""

    slot: int  # its own
    source: int  # the state after its last scheduled token: in its own, a kept one's, or zero
    keep_at: list[int]  # positions ahead, at the ends of blocks, where it is to be kept
    kept: int | None = None  # prefix_id at which its answer's state was kept last


class StatefulBlockManager(WindowedBlockManager):
    """A block manager that hands out slots for states too, and keeps some with the prefix cache.

    Args:
        num_blocks, block_size, settings: as in the base class.
        num_state_slots: beside the reserved ones.
    """

    def __init__(self, num_blocks: int, block_size: int, *, num_state_slots: int, **settings: Any) -> None:
        self.num_state_slots = num_state_slots
        super().__init__(num_blocks, block_size, **settings)

    def clear(self) -> None:
        """As in the base class; and all states."""
        super().clear()
        self.held: dict[Sequence, Held] = {}
        self.free_slots = deque(range(NUM_RESERVED_SLOTS, NUM_RESERVED_SLOTS + self.num_state_slots))
        self.kept_slots: OrderedDict[int, int] = OrderedDict()  # prefix_id -> slot; least recently used first
        self.in_use: set[int] = set()  # prefix_ids of kept states that this step reads or writes
        self._num_known_blocks = 0  # of the sequence that was looked up last

    # -- admission and release

    def allocate(self, seq: Sequence) -> bool:
        """As in the base class; with a slot. A hit goes on from the state that was kept there."""
        if not self.free_slots and self.kept_slots.keys() <= self.in_use:
            return False
        if not super().allocate(seq):
            return False
        num_hits = seq.num_hit_tokens // self.block_size
        source = ZERO_SLOT
        if num_hits:
            source = self.kept_slots[seq.prefix_id]
            self.kept_slots.move_to_end(seq.prefix_id)
            self.in_use.add(seq.prefix_id)
        slot = self._take_slot()
        if slot is None:  # there is no other than the one that was hit
            slot = source
            del self.kept_slots[seq.prefix_id]
        # Kept are the state at the end of what it shares with another sequence, where none was kept yet: a
        # third may branch off there too. And the one at the end of its last full block: it may be continued.
        ends = {self._num_known_blocks, seq.num_tokens // self.block_size}
        keep_at = sorted(end * self.block_size for end in ends if end > num_hits)
        self.held[seq] = Held(slot, source, keep_at if self.enable_prefix_caching else [])
        return True

    def forget(self, seq: Sequence) -> None:
        """As in the base class; and its slot is free."""
        super().forget(seq)
        if (held := self.held.pop(seq, None)) is not None:
            self.free_slots.append(held.slot)

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """As in the base class."""
        chain = super().find_prefix(seq)
        self._num_known_blocks = len(chain)
        return chain

    # -- a step

    def plan(self, chunk: Chunk) -> list[Span]:
        """The spans of a chunk that was scheduled; a step's are planned when all of it is scheduled."""
        seq, held, spans = chunk.seq, self.held[chunk.seq], []
        start = chunk.start
        if self.enable_prefix_caching and start % self.block_size == 0 and held.source == held.slot:
            self._leave(seq, held, start)
        for end in sorted({*held.keep_at, seq.num_prompt_tokens}):
            if not start < end < chunk.end:
                continue
            target = None
            if end in held.keep_at:
                target = self._keep(self.blocks[seq.block_table[end // self.block_size - 1]].prefix_id)
            # An answer computed anew is not a prompt's: see models/states.py.
            if target is not None or end == seq.num_prompt_tokens:
                target = held.slot if target is None else target
                spans.append(Span(start, end, held.source, target))
                start, held.source = end, target
        spans.append(Span(start, chunk.end, held.source, held.slot))
        held.source = held.slot
        return spans

    def _leave(self, seq: Sequence, held: Held, position: int) -> None:
        """Keep the state before that position, a block's end: the sequence goes on in another slot."""
        assert seq.num_registered_blocks >= position // self.block_size
        prefix_id = self.blocks[seq.block_table[position // self.block_size - 1]].prefix_id
        slot = self._keep(prefix_id)
        if slot is None:
            return
        self.kept_slots[prefix_id] = held.slot
        self.in_use.add(prefix_id)
        held.slot = slot
        if position > seq.num_prompt_tokens:  # of an answer only the last
            if held.kept is not None and held.kept not in self.in_use and held.kept in self.kept_slots:
                self.free_slots.append(self.kept_slots.pop(held.kept))
            held.kept = prefix_id

    # -- helpers

    def _longest_beginning(self, seq: Sequence, chain: list[Block], most: int) -> int:
        """As in the base class: as many as end where a state was kept, and leave a token to compute."""
        most = min(most, (seq.num_tokens - 1) // self.block_size)
        while most and chain[most - 1].prefix_id not in self.kept_slots:
            most -= 1
        return most

    def _keep(self, prefix_id: int) -> int | None:
        """A slot to keep that prefix's state in; None: it is kept already, or there is none to take."""
        if prefix_id in self.kept_slots:
            self.kept_slots.move_to_end(prefix_id)
            return None
        slot = self._take_slot()
        if slot is not None:
            self.kept_slots[prefix_id] = slot
            self.in_use.add(prefix_id)
        return slot

    def _take_slot(self) -> int | None:
        """A free slot, or that of the kept state whose loss costs least; none that this step reads."""
        if self.free_slots:
            return self.free_slots.popleft()
        for prefix_id in self.kept_slots:
            if prefix_id not in self.in_use:
                return self.kept_slots.pop(prefix_id)
        return None


class StatefulScheduler(Scheduler):
    """A scheduler for models with states.

    Args:
        block_manager: hands out their slots.
        spans: where to write a step's, for the runner.
        settings: as in the base class.
    """

    def __init__(self, block_manager: StatefulBlockManager, *, spans: Spans, **settings: Any) -> None:
        super().__init__(block_manager, **settings)
        self.states, self.spans = block_manager, spans

    def schedule(self) -> ScheduledBatch:
        """As in the base class."""
        self.states.in_use.clear()
        batch = super().schedule()
        self.spans.clear()
        self.spans.update((chunk.seq, self.states.plan(chunk)) for chunk in batch.chunks)
        return batch


class StatefulRunner(WindowedRunner):
    """A runner for models with states; arguments as in the base class."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spans: Spans = {}  # of the batch to launch; written by the scheduler

    def build_inputs(
        self, batch: ScheduledBatch, before: ScheduledBatch | None = None
    ) -> ModelInputs[np.ndarray]:
        """As in the base class; and which states the batch's parts begin and end with."""
        inputs = super().build_inputs(batch, before)
        decodes: list[tuple[int, int, int]] = []
        parts: list[StatePart] = []
        for chunk, row in zip(batch.chunks, inputs.metadata.cu_seqlens_q.tolist(), strict=False):
            # Not in spans: the trial batches of startup.py, in which one token is a decode.
            spans = self.spans.get(chunk.seq) or [Span(chunk.start, chunk.end, ZERO_SLOT, BIN_SLOT)]
            for start, end, source, target in spans:
                first = row + start - chunk.start
                is_prompt = start < chunk.seq.num_prompt_tokens and target != BIN_SLOT
                if is_prompt or chunk.end - chunk.start > 1:  # what follows a part is one: it reads its state
                    parts.append(StatePart(first, first + end - start, source, target, is_prompt))
                else:
                    decodes.append((first, source, target))
        # Kernels take addresses: each array in one piece.
        rows, sources, targets = np.array(decodes, dtype=np.int64).reshape(-1, 3).T.copy()
        return inputs._replace(states=StateLayout(rows, sources, targets, parts))

    def compute(self, inputs: ModelInputs[Tensor]) -> Tensor:
        """As in the base class."""
        assert inputs.states is not None
        with self.model.states.step(inputs.states):
            return super().compute(inputs)

    def close(self) -> None:
        """As in the base class."""
        self.model.states.memory = []
        super().close()
