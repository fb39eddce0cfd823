"""Recurrent state: models whose layers pass a state from token to token, like Mamba and linear attention.

A state is overwritten by each token and belongs to one sequence at one position, so a running sequence holds
a state slot in addition to its blocks. A prefix can be reused only where a state was kept, at the end of a
block, in a slot of its own. A sequence updates the state in its slot in place. Nothing is copied: at the end
of a block, a sequence leaves its slot to the prefix cache, and writes its next state to a new slot.
docs/18-windows-and-states.md shows it step by step.

    slot 0      zeros: the state that every sequence starts from. Never written
    slot 1      discarded states, of trials or padding. Never read
    others      held by a running sequence; or kept for the prefix of a block, and evicted least recently used
                first; or free

Sources: vLLM's prefix caching for Mamba ("align" mode), and SGLang's MambaRadixCache for branch points.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nanoengine.backends.step_inputs import (
    BIN_SLOT,
    NUM_RESERVED_SLOTS,
    ZERO_SLOT,
    ModelInputs,
    StateLayout,
    StatePart,
)
from nanoengine.engine import Block, Chunk, Prefix, ScheduledBatch, Scheduler, Sequence
from nanoengine.extensions.sliding_windows import WindowedBlockManager, WindowedRunner


class Span(NamedTuple):
    """Names tokens [start, end) of a sequence, and the slots of its state before and after them."""

    start: int
    end: int
    source: int
    target: int


Spans = dict[Sequence, list[Span]]


@dataclass(slots=True)
class Held:
    """Holds the state slots of a running sequence."""

    slot: int  # the sequence's own slot
    source: int  # slot of the state after its last scheduled token: its own, a kept one, or ZERO_SLOT
    keep_at: list[int]  # future positions, at block ends, at which to keep the state
    kept: Prefix | None = None  # of the last state that was kept for the output


class StatefulBlockManager(WindowedBlockManager):
    """Manages state slots in addition to blocks, and keeps some states for the prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, *, num_state_slots: int, **settings: Any) -> None:
        self.num_state_slots = num_state_slots  # without the reserved ones
        super().__init__(num_blocks, block_size, **settings)

    def clear(self) -> None:
        """See the base class. This also frees all state slots."""
        super().clear()
        self.held: dict[Sequence, Held] = {}
        self.free_slots = deque(range(NUM_RESERVED_SLOTS, NUM_RESERVED_SLOTS + self.num_state_slots))
        self.kept_slots: OrderedDict[Prefix, int] = OrderedDict()  # least recently used first
        self.in_use: set[Prefix] = set()  # of the kept states that this step reads or writes
        self._num_known_blocks = 0  # registered blocks found by the last lookup

    # -- admission and release

    def allocate(self, seq: Sequence) -> bool:
        """See the base class. The sequence also gets a slot. After a hit it starts from the kept state."""
        if not self.free_slots and self.kept_slots.keys() <= self.in_use:
            return False
        if not super().allocate(seq):
            return False
        num_hits = seq.num_hit_tokens // self.block_size
        source = ZERO_SLOT
        if seq.prefix is not None:
            source = self.kept_slots[seq.prefix]
            self.kept_slots.move_to_end(seq.prefix)
            self.in_use.add(seq.prefix)
        slot = self._take_slot()
        if slot is None:  # the only slot left is the one that was hit
            slot = source
            assert seq.prefix is not None
            del self.kept_slots[seq.prefix]
        # Keep two states. One is at the end of the blocks shared with another sequence, if no state was kept
        # there yet: a third sequence may branch off there too. The other is at the end of the last full
        # block: a later request may continue this prompt.
        ends = {self._num_known_blocks, seq.num_tokens // self.block_size}
        keep_at = sorted(end * self.block_size for end in ends if end > num_hits)
        self.held[seq] = Held(slot, source, keep_at if self.enable_prefix_caching else [])
        return True

    def forget(self, seq: Sequence) -> None:
        """See the base class. This also frees the sequence's slot."""
        super().forget(seq)
        if (held := self.held.pop(seq, None)) is not None:
            self.free_slots.append(held.slot)

    def find_prefix(self, seq: Sequence) -> list[Block]:
        chain = super().find_prefix(seq)
        self._num_known_blocks = len(chain)
        return chain

    # -- a step

    def plan(self, chunk: Chunk) -> list[Span]:
        """Divide a scheduled chunk into spans. Called only after the whole step is scheduled."""
        seq, held, spans = chunk.seq, self.held[chunk.seq], []
        start = chunk.start
        if self.enable_prefix_caching and start % self.block_size == 0 and held.source == held.slot:
            self._leave(seq, held, start)
        for end in sorted({*held.keep_at, seq.num_prompt_tokens}):
            if not start < end < chunk.end:
                continue
            target = self._keep(self._prefix(seq, end)) if end in held.keep_at else None
            # Output tokens that are recomputed are a separate part from the prompt: see models/recurrent.py.
            if target is None and end == seq.num_prompt_tokens:
                target = held.slot
            if target is not None:
                spans.append(Span(start, end, held.source, target))
                start, held.source = end, target
        spans.append(Span(start, chunk.end, held.source, held.slot))
        held.source = held.slot
        return spans

    def _leave(self, seq: Sequence, held: Held, position: int) -> None:
        """Keep the state before a position, the end of a block. The sequence continues in another slot."""
        assert seq.num_registered_blocks >= position // self.block_size
        prefix = self._prefix(seq, position)
        slot = self._keep(prefix)
        if slot is None:
            return
        self.kept_slots[prefix] = held.slot
        held.slot = slot
        if position > seq.num_prompt_tokens:  # of the output, keep only the last state
            if held.kept is not None and held.kept not in self.in_use and held.kept in self.kept_slots:
                self.free_slots.append(self.kept_slots.pop(held.kept))
            held.kept = prefix

    # -- helpers

    def _prefix(self, seq: Sequence, position: int) -> Prefix:
        prefix = self.blocks[seq.block_table[position // self.block_size - 1]].prefix
        assert prefix is not None
        return prefix

    def _longest_beginning(self, seq: Sequence, chain: list[Block], limit: int) -> int:
        """Return the longest prefix that ends where a state was kept and leaves one token to compute."""
        num_blocks = min(limit, (seq.num_tokens - 1) // self.block_size)
        while num_blocks and chain[num_blocks - 1].prefix not in self.kept_slots:
            num_blocks -= 1
        return num_blocks

    def _keep(self, prefix: Prefix) -> int | None:
        """Return a slot to keep that prefix's state in; None: it is already kept, or no slot can be taken."""
        if prefix in self.kept_slots:
            self.kept_slots.move_to_end(prefix)
            return None
        slot = self._take_slot()
        if slot is not None:
            self.kept_slots[prefix] = slot
            self.in_use.add(prefix)
        return slot

    def _take_slot(self) -> int | None:
        """Return a free slot, or else the least recently used kept slot that this step does not use."""
        if self.free_slots:
            return self.free_slots.popleft()
        for prefix in self.kept_slots:
            if prefix not in self.in_use:
                return self.kept_slots.pop(prefix)
        return None


class StatefulScheduler(Scheduler):
    """Schedules models with recurrent state. It writes each step's spans to `spans`, for the runner."""

    def __init__(self, block_manager: StatefulBlockManager, *, spans: Spans, **settings: Any) -> None:
        super().__init__(block_manager, **settings)
        self.states, self.spans = block_manager, spans

    def schedule(self) -> ScheduledBatch:
        self.states.in_use.clear()
        batch = super().schedule()
        self.spans.clear()
        self.spans.update((chunk.seq, self.states.plan(chunk)) for chunk in batch.chunks)
        return batch


class StatefulRunner(WindowedRunner):
    """Runs models with recurrent state. The arguments are those of the base class."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.spans: Spans = {}  # of the batch to launch; written by the scheduler

    def build_inputs(
        self, batch: ScheduledBatch, before: ScheduledBatch | None = None
    ) -> ModelInputs[np.ndarray]:
        """See the base class. The inputs also contain the state slots that each part reads and writes."""
        inputs = super().build_inputs(batch, before)
        decodes: list[tuple[int, int, int]] = []
        parts: list[StatePart] = []
        for chunk, row in zip(batch.chunks, inputs.metadata.cu_seqlens_q.tolist(), strict=False):
            # The trial batches of kv_cache_size.py are not in spans: a chunk of one token is a decode.
            spans = self.spans.get(chunk.seq) or [Span(chunk.start, chunk.end, ZERO_SLOT, BIN_SLOT)]
            for start, end, source, target in spans:
                first = row + start - chunk.start
                is_prompt = start < chunk.seq.num_prompt_tokens and target != BIN_SLOT
                if is_prompt or chunk.end - chunk.start > 1:  # after a part, also a part: it reads that state
                    parts.append(StatePart(first, first + end - start, source, target, is_prompt))
                else:
                    decodes.append((first, source, target))
        # Kernels take addresses, so each array must be contiguous.
        rows, sources, targets = np.array(decodes, dtype=np.int64).reshape(-1, 3).T.copy()
        return inputs._replace(states=StateLayout(rows, sources, targets, parts))

    def compute(self, inputs: ModelInputs[Tensor], model: Any = None) -> Tensor:
        assert inputs.states is not None
        with self.model.states.step(inputs.states):
            return super().compute(inputs, model)

    def close(self) -> None:
        self.model.states.memory = []
        super().close()
