"""Custom logits processors: functions of one request, and vLLM V1's `LogitsProcessor` classes of an engine.

A request's processors, `SamplingParams(logits_processors=[...])`, are functions that are called for each of
the request's rows. An engine's processors, `LLM(logits_processors=[...])`, are such functions for every
request, or classes (or "module:Class") with the methods of `LogitsProcessor`. The classes get all rows of a
step as one matrix.

Names and contracts follow vllm/v1/sample/logits_processor.
"""

import importlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanoengine.backends.device import upload
from nanoengine.sampling.sampler import SamplingRow
from nanoengine.sampling_params import SamplingParams

T = TypeVar("T")
RequestLogitsProcessor = Callable[..., Tensor]  # tokens and logits of one row -> logits

# ---- Functions -----------------------------------------------------------------------------------


def num_parameters(processor: Any) -> int:
    """Return how many arguments a logits processor takes. Raises TypeError unless it takes 2 or 3."""
    for num in (2, 3):
        with suppress(TypeError, ValueError):  # ValueError: a built-in without a signature
            inspect.signature(processor).bind(*[None] * num)
            return num
    raise TypeError(
        "logits_processors must take the output's token ids and the logits, or the prompt's token ids before "
        f"these, got {processor!r}"
    )


def check_functions(given: Any) -> list[Callable[..., Any]]:
    """Return a request's logits_processors as a list. Raises TypeError if they are not functions."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"logits_processors must be a list, got {given!r}")
    for one in given:
        num_parameters(one)
    return list(given)


class FunctionProcessor:
    """Calls a function for the rows of one request. Implements `RowProcessor`."""

    is_mask: ClassVar[bool] = False
    failure: str | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.with_prompt = function, num_parameters(function) == 3

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, "FunctionProcessor", SamplingRow]]) -> None:
        """See `RowProcessor.apply`. A function that raises fails its own row."""
        for i, processor, row in items:
            token_ids = [list(row.output_ids)]
            if processor.with_prompt:
                token_ids.insert(0, list(row.token_ids[: row.num_prompt_tokens]))
            with failing(logits, [i], [processor]):
                made = processor.function(*token_ids, logits[i])
                logits[i] = as_logits(made, logits[i], processor.function)


@contextmanager
def failing(logits: Tensor, rows: Sequence[int] | Tensor, processors: Iterable[Any]) -> Iterator[None]:
    """Turn an exception in the block into a failure of these rows and processors. They get no token."""
    try:
        yield
    except Exception as error:
        logging.getLogger(__name__).exception("a logits processor failed")
        for processor in processors:
            processor.failure = f"{type(error).__name__}: {error}"
        logits[rows] = torch.nan


def as_logits(made: Any, given: Tensor, processor: Any) -> Tensor:
    """Return a processor's result `made`, converted to the dtype and device of the logits it was given.

    Raises:
        TypeError, ValueError: it is not a tensor of real numbers, or has another shape.
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
    """Tells whether a request moves to another index, or two requests swap theirs."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Describes how the batch differs from the previous step's. Apply removed, added, then moved."""

    batch_size: int
    removed: Sequence[int]  # indices that are now free
    # (index, parameters, prompt's token ids, output's token ids: a list that grows with the output)
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]  # (from, to, how)


class LogitsProcessor(ABC):
    """Edits the logits of a whole batch, in which each request has an index."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if a request's parameters are not supported. Called before it is queued."""
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Create the processor, once per engine. vllm_config is the engine's `EngineConfig`."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits to sample from. `logits` (batch size, V) float32 has one row per index.

        The processor may change `logits` in place.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether it never changes the most probable token. If so, it is applied after temperature."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the state before `apply`. None: the same requests have the same indices as before."""


def process_dict_updates(
    states: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Update a dict of per-request states, by index, and return whether anything changed.

    `new_state` gets a new request's parameters, prompt tokens and output tokens. It returns None if the
    request needs no state.
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
    # By identity: states of two samples can be equal for now, and hold output tokens that grow apart.
    return any(states.get(index) is not before.get(index) for index in states.keys() | before.keys())


class AdapterLogitsProcessor(LogitsProcessor):
    """Applies a function per request, like those in `SamplingParams`, as an engine's processor."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a request, or None if it has none."""

    def _bound(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        return partial(function, *([prompt_ids] if num_parameters(function) == 3 else []), output_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor.update_state`."""
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: Tensor) -> Tensor:
        """See `LogitsProcessor.apply`. A function that raises fails its own row; the log says why."""
        for index, function in self.req_info.items():
            with failing(logits, [index], []):
                logits[index] = as_logits(function(logits[index]), logits[index], self)
        return logits


class Batch:
    """Assigns the samples of a step to indices for the engine's processors.

    Args:
        processors: the engine's processors.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self.processors = processors
        self.members: list[Member] = []  # by index

    def update(self, present: dict["Member", SamplingRow]) -> BatchUpdate | None:
        """Add the samples that are new in a step, remove those that are not in it, and close the gaps.

        Returns None if nothing changed.
        """
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
    """Represents one sample to the engine's processors. Implements `RowProcessor`."""

    is_mask: ClassVar[bool] = False
    failure: str | None = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.output_ids: list[int] = []

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, "Member", SamplingRow]]) -> None:
        """See `RowProcessor.apply`. If one of the engine's processors raises, all rows of the step fail."""
        batch = items[0][1].batch
        places = {member: i for i, member, _ in items}
        rows = {member: row for _, member, row in items}
        update = batch.update(rows)
        # A list as an index or a tensor's values would make the host wait for a GPU.
        order = upload(np.array([places[member] for member in batch.members]), logits.device)
        temperatures = np.array([rows[member].params.temperature for member in batch.members])
        divisors = np.where(temperatures == 0, 1.0, temperatures)
        scale = upload(divisors, logits.device).to(logits.dtype).unsqueeze(1)
        mine = logits[order]
        with failing(logits, order, rows):
            for processor in batch.processors:
                processor.update_state(update)
            for processor in batch.processors:
                if not processor.is_argmax_invariant():
                    mine = as_logits(processor.apply(mine), mine, processor)
                elif temperatures.any():
                    mine = as_logits(processor.apply(mine / scale), mine, processor) * scale
            logits[order] = mine


class EngineProcessors:
    """Holds `LLM(logits_processors=...)` and makes the row processors of each sample.

    Args:
        given: functions, classes, or "module:Class".
        config, device: passed to the classes.

    Raises:
        TypeError, ValueError: an entry is none of these, or cannot be found.
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
        """Return functions that make the row processors of a sample.

        Raises:
            ValueError: a class rejects the request's parameters.
        """
        for one in self.classes:
            if validate := getattr(one, "validate_params", None):
                validate(params)
        makers: list[Callable[[], Any]] = [partial(FunctionProcessor, one) for one in self.functions]
        return makers + ([partial(Member, self.batch)] if self.batch else [])


def found(name: str) -> Any:
    """Import and return what "module:name" names. Raises ValueError if it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'logits_processors must hold "module:Class", got {name!r}: {error}') from None
