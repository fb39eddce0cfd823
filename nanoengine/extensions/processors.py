"""Logits processors of a user's own: functions of a request, and vLLM V1's `LogitsProcessor`, of an engine.

A request's, `SamplingParams(logits_processors=[...])`, are called for its own rows, one by one. An engine's,
`LLM(logits_processors=[...])`, are such functions too, for every request, or classes (or "module:Class") with
the methods of `LogitsProcessor`, which see all rows of a step as one matrix.

Names and contracts are those of vllm/v1/sample/logits_processor.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from nanoengine.sampling import SamplingRow
from nanoengine.sampling_params import SamplingParams, num_parameters

T = TypeVar("T")
RequestLogitsProcessor = Callable[..., Tensor]  # of a request: tokens and logits to logits

# ---- Functions -----------------------------------------------------------------------------------


class FunctionProcessor:
    """A function of one request; a `RowProcessor`."""

    is_mask: ClassVar[bool] = False
    failure: str | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.with_prompt = function, num_parameters(function) == 3

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, "FunctionProcessor", SamplingRow]]) -> None:
        """As `RowProcessor.apply`.

        Raises:
            Exception: what a function raised, or ValueError where it gave no logits.
        """
        for i, processor, row in items:
            token_ids = [list(row.output_ids)]
            if processor.with_prompt:
                token_ids.insert(0, list(row.token_ids[: row.num_prompt_tokens]))
            made = processor.function(*token_ids, logits[i])
            logits[i] = as_logits(made, logits[i], processor.function)


def as_logits(made: Any, given: Tensor, processor: Any) -> Tensor:
    """Return what a processor made of the given logits, in their dtype and on their device.

    Raises:
        TypeError, ValueError: it is no tensor of numbers, or has another shape.
    """
    name = getattr(processor, "__name__", type(processor).__name__)
    if not isinstance(made, Tensor) or made.dtype == torch.bool or made.is_complex():
        found = made.dtype if isinstance(made, Tensor) else type(made).__name__
        raise TypeError(f"the logits processor {name} must return a tensor of real numbers, got {found}")
    if made.shape != given.shape:
        shapes = f"{tuple(given.shape)}, got {tuple(made.shape)}"
        raise ValueError(f"the logits processor {name} must return logits of shape {shapes}")
    return made.to(given)


# ---- vLLM V1's -----------------------------------------------------------------------------------


class MoveDirectionality(Enum):
    """Whether a request moves to another index, or two change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch differs from that of the step before; to be applied in this order."""

    batch_size: int
    removed: Sequence[int]  # indices that are free now
    # (index, parameters, prompt's token ids, output's token ids: a list that grows with the output)
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]  # (from, to, how)


class LogitsProcessor(ABC):
    """Edits the logits of a whole batch, in which requests have indices of their own."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError where a request asks for what cannot be; called when it is checked."""
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Made once, with the engine; vllm_config is its `EngineConfig`."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The logits to draw from; (batch size, V) float32, a row per index, which it may change."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the likeliest; then it sees logits after temperature."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before `apply`; None where the same requests have the same indices as before."""


def process_dict_updates(
    states: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Bring what is known of some requests, by their index, up to date; returns whether anything changed.

    `new_state` is given a new request's parameters, prompt's and output's tokens; None: it needs no state.
    """
    if batch_update is None:
        return False
    before = dict(states)
    for index in batch_update.removed:
        states.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        states.pop(index, None)
        if state is not None:
            states[index] = state
    for source, target, how in batch_update.moved:
        here, there = states.pop(source, None), states.pop(target, None)
        if here is not None:
            states[target] = here
        if there is not None and how is MoveDirectionality.SWAP:
            states[source] = there
    return states != before


class AdapterLogitsProcessor(LogitsProcessor):
    """Functions of requests, as in `SamplingParams`, as a processor of an engine."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """A request's function; None: it has none."""

    def _bound(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        return partial(function, *([prompt_ids] if num_parameters(function) == 3 else []), output_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """As `LogitsProcessor.update_state`."""
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: Tensor) -> Tensor:
        """As `LogitsProcessor.apply`."""
        for index, function in self.req_info.items():
            logits[index] = as_logits(function(logits[index]), logits[index], self)
        return logits


class Batch:
    """The rows of a step in the order that an engine's processors know them by.

    Args:
        processors: of the engine.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self.processors = processors
        self.members: list[Member] = []  # by their index

    def update(self, present: dict["Member", SamplingRow]) -> BatchUpdate | None:
        """Take up who is new in a step, and close the gaps of those who are not in it."""
        for member, row in present.items():
            member.output_ids[:] = row.output_ids
        known = set(self.members)
        removed = [i for i, member in enumerate(self.members) if member not in present]
        new = [member for member in present if member not in known]
        if not removed and not new:
            return None
        free, added, moved = list(removed), [], []
        for member in new:
            index = free.pop(0) if free else len(self.members)
            self.members[index : index + 1] = [member]
            row = present[member]
            prompt = list(row.token_ids[: row.num_prompt_tokens])
            added.append((index, row.params, prompt, member.output_ids))
        while free:
            last = len(self.members) - 1
            if free[-1] == last:
                free.pop()
            else:
                self.members[free[0]] = self.members[last]
                moved.append((last, free.pop(0), MoveDirectionality.UNIDIRECTIONAL))
            del self.members[last]
        taken = {index for index, *_ in added}
        return BatchUpdate(len(self.members), [i for i in removed if i not in taken], added, moved)


class Member:
    """A sample, as an engine's processors know it; a `RowProcessor`."""

    is_mask: ClassVar[bool] = False
    failure: str | None = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.output_ids: list[int] = []

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, "Member", SamplingRow]]) -> None:
        """As `RowProcessor.apply`."""
        batch = items[0][1].batch
        places = {member: i for i, member, _ in items}
        rows = {member: row for _, member, row in items}
        update = batch.update(rows)
        order = [places[member] for member in batch.members]
        for processor in batch.processors:
            processor.update_state(update)
        temperatures = [rows[member].params.temperature for member in batch.members]
        scale = logits.new_tensor([temperature or 1.0 for temperature in temperatures]).unsqueeze(1)
        mine = logits[order]
        for processor in batch.processors:
            if not processor.is_argmax_invariant():
                mine = as_logits(processor.apply(mine), mine, processor)
            elif any(temperatures):
                mine = as_logits(processor.apply(mine / scale), mine, processor) * scale
        logits[order] = mine


class EngineProcessors:
    """`LLM(logits_processors=...)`: what each of its samples is given.

    Args:
        given: functions, classes, or "module:Class".
        config, device: for the classes.

    Raises:
        TypeError, ValueError: one that is neither, or cannot be found.
    """

    def __init__(self, given: Sequence[Any], config: Any, device: torch.device) -> None:
        self.functions, self.classes = [], []
        for one in given:
            one = found(one) if isinstance(one, str) else one
            if isinstance(one, type) and callable(getattr(one, "update_state", None)):
                self.classes.append(one)
            else:
                num_parameters(one)
                self.functions.append(one)
        made = [one(config, device, device.type == "cuda") for one in self.classes]
        self.batch = Batch(made) if made else None

    def of_request(self, params: SamplingParams) -> list[Callable[[], Any]]:
        """What makes a sample's row processors.

        Raises:
            ValueError: a class refuses the request's parameters.
        """
        for one in self.classes:
            if validate := getattr(one, "validate_params", None):
                validate(params)
        makers: list[Callable[[], Any]] = [partial(FunctionProcessor, one) for one in self.functions]
        return makers + ([partial(Member, self.batch)] if self.batch else [])


def found(name: str) -> Any:
    """What "module:name" names; ValueError where there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'logits_processors must hold "module:Class", got {name!r}: {error}') from None
