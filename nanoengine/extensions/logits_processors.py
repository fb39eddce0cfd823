"""Logits processors: functions that edit the logits of each row, `(token_ids, logits) -> logits`.

`token_ids` are those of the output so far. A function with three parameters gets the prompt's token ids
first, as in vLLM. `SamplingParams(logits_processors=[...])` is for one request, and
`LLM(logits_processors=[...])` for all requests.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanoengine.config import find_named
from nanoengine.sampling.sampler import SamplingRow
from nanoengine.sampling_params import check_processors, num_arguments


def find_functions(given: Sequence[Any]) -> list[Callable[..., Any]]:
    """Return an engine's logits_processors: functions, or what "module:function" names, which is imported."""
    found = [find_named("logits_processors", one) if isinstance(one, str) else one for one in given]
    return check_processors(found)


class FunctionProcessor:
    """Calls a function for the rows of one request. Implements `RowProcessor`."""

    is_mask: ClassVar[bool] = False
    failure: str | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.with_prompt = function, num_arguments(function) == 3

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, "FunctionProcessor", SamplingRow]]) -> None:
        """See `RowProcessor.apply`. A function that raises fails its own row."""
        for i, processor, row in items:
            token_ids = [list(row.output_ids)]
            if processor.with_prompt:
                token_ids.insert(0, list(row.token_ids[: row.num_prompt_tokens]))
            try:
                made = processor.function(*token_ids, logits[i])
                logits[i] = as_logits(made, logits[i], processor.function)
            except Exception as error:
                logging.getLogger(__name__).exception("a logits processor failed")
                processor.failure = f"{type(error).__name__}: {error}"
                logits[i] = torch.nan


def as_logits(made: Any, given: Tensor, processor: Any) -> Tensor:
    """Return a result like the logits that a processor was given, or raise TypeError or ValueError."""
    name = getattr(processor, "__name__", type(processor).__name__)
    if not isinstance(made, Tensor) or made.dtype == torch.bool or made.is_complex():
        found = made.dtype if isinstance(made, Tensor) else type(made).__name__
        raise TypeError(f"the logits processor {name} must return a tensor of real numbers, got {found}")
    if made.shape != given.shape:
        shapes = f"{tuple(given.shape)}, got {tuple(made.shape)}"
        raise ValueError(f"the logits processor {name} must return logits of shape {shapes}")
    return made.to(given)
