"""Turns logits into tokens and log-probabilities: edits, then one sample per row.

Shape letters: R rows (sequences that get a token this step), V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoengine.backends.step_inputs import ModelInputs, SamplingMetadata
from nanoengine.sampling.logprobs import LogprobTable, Transfer, report_samples
from nanoengine.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingRow:
    """Describes one sequence to the sampler. Only position and token_ids change from step to step."""

    params: SamplingParams
    seed: int  # 64 bits; seed and position together determine the row's random number
    position: int  # position of the token to sample
    # The sequence's tokens. They may extend past position. The token just before position may be pending, and
    # is then not in the list. This does not happen if there are bad words or processors.
    token_ids: Sequence[int]
    num_prompt_tokens: int
    stop_ids: frozenset[int] = frozenset()  # banned until min_tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    processors: tuple["RowProcessor", ...] = ()  # applied to the row's logits after the edits in params
    depth: int = 0  # number of the sequence's draft tokens before position
    seq: Any = None  # the Sequence; None outside an engine, where all tokens before position are known

    @property
    def output_ids(self) -> Sequence[int]:
        """The output tokens before the token to sample."""
        return self.token_ids[self.num_prompt_tokens : self.position]


class RowProcessor(Protocol):
    """Edits one sequence's logits, after the penalties, biases and bans of `SamplingParams`."""

    is_mask: ClassVar[bool]  # whether it only forbids tokens; masks are applied last
    failure: str | None  # why its row cannot be sampled

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, Any, SamplingRow]]) -> None:
        """Edit logits, (R, V), in place. They are float32; a mask may get the model's dtype instead.

        A processor that fails must not raise, because the other rows continue. It records its `failure`, and
        leaves logits from which no token can be sampled: NaN, or all -inf. `items` holds (row index,
        processor, row) for each row that has a processor of this class. A sequence with draft tokens has
        consecutive rows, each one token longer than the one before.
        """


UNDRAWN = "no token could be sampled: "


def why_no_token(processors: Sequence[RowProcessor]) -> str:
    """Return an error message for a sequence with these processors that received no token."""
    reason = next((one.failure for one in processors if one.failure is not None), None)
    return UNDRAWN + (reason or "the logits are NaN or infinite, or no token is allowed")


class RowSettings:
    """Holds the sampling parameters of rows as arrays. They are reused while the rows stay the same."""

    last: Tensor  # the last token of each row of the step, int64, for penalties
    edits: Any = None  # `BatchEdits`; these and the penalties are made when they are first applied
    penalties: Any = None
    counts: Any = None  # the sequences' `TokenCounts`, for penalties

    def __init__(self, rows: Sequence[SamplingRow], first: int = 0) -> None:
        self.first = first  # the index of the first of these rows in the step
        params = [row.params for row in rows]
        self.seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        self.temperature = np.array([p.temperature for p in params], dtype=np.float32)
        self.top_k = np.array([max(p.top_k, 0) for p in params], dtype=np.int64)
        # top_p = 1 keeps every token, even if rounding lets the cumulative sum reach 1 early.
        self.top_p = np.array([p.top_p if p.top_p < 1 else math.inf for p in params], dtype=np.float32)
        self.min_p = np.array([p.min_p for p in params], dtype=np.float32)
        self.num_logprobs = [p.logprobs for p in params]
        self.edit_logits = any(p.edits_logits for p in params)
        self.forced = [i for i, p in enumerate(params) if p.forced_token_ids]
        self.edited = [i for i, p in enumerate(params) if p.biases_or_bans]
        self.penalizes = any(p.penalizes for p in params)
        self.processors = {type(processor) for row in rows for processor in row.processors}

    def metadata(self, positions: Sequence[int]) -> SamplingMetadata:
        """Return the settings together with a random number for each row's seed and position."""
        u = uniform(self.seeds, np.array(positions, dtype=np.uint64))
        return SamplingMetadata(self.temperature, self.top_k, self.top_p, self.min_p, u)


Part = tuple[list[SamplingRow], RowSettings]  # rows that are sampled together
MAX_ROWS = 256  # rows to compute logits for and sample at a time: each is as wide as the vocabulary


class CachedRows:
    """Caches a step's rows and settings for as long as consecutive steps sample the same sequences."""

    def __init__(self, max_num_seqs: int = 0, max_model_len: int = 0) -> None:
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len  # the sizes of `counts`
        self._seqs: list[Any] = []
        self._parts: list[Part] = []

    @cached_property
    def counts(self) -> Any:
        """The token counts of all sequences, created when the first penalty needs them."""
        from nanoengine.sampling.penalties import TokenCounts  # most requests edit nothing

        return TokenCounts(self.max_num_seqs, self.max_model_len)

    def parts(self, batch: Any, inputs: ModelInputs[Tensor]) -> Iterator[Part]:
        """Yield at most MAX_ROWS rows at a time, and their settings. They are valid until the next call."""
        if self._seqs != batch.sampled_seqs:  # sequences compare by identity
            rows: list[SamplingRow] = []
            for s in batch.sampled_seqs:
                depth = 1 + rows[-1].depth if rows and rows[-1].seq is s else 0
                fixed = s.num_prompt_tokens, s.stop_ids, s.bad_words, s.processors
                rows.append(SamplingRow(s.params, s.seed, 0, [], *fixed, depth, s))
            parts = [(rows[i : i + MAX_ROWS], i) for i in range(0, len(rows), MAX_ROWS)]
            self._parts = [(part, RowSettings(part, first)) for part, first in parts]
            self._seqs = batch.sampled_seqs
        sampled = [chunk for chunk in batch.chunks if chunk.samples]
        for row, chunk in zip(chain(*(rows for rows, _ in self._parts)), sampled, strict=True):
            row.position, row.token_ids = chunk.end, chunk.token_ids
        for part, settings in self._parts:
            if settings.penalizes:
                settings.counts, settings.last = self.counts, inputs.input_ids[inputs.sample_rows]
            yield part, settings


# `drawing.draw_rows`, or a kernel that replaces it
Draw = Callable[[Tensor, SamplingMetadata], tuple[Tensor, Tensor]]


def draw_tokens(
    logits: Tensor, rows: Sequence[SamplingRow], draw: Draw, settings: RowSettings | None = None
) -> Tensor:
    """Sample one token per row, without waiting for a GPU. A row's token does not depend on the other rows.

    The order is vLLM's: biases, penalties, bans and processors, then temperature, then min_p, top_k and
    top_p, then one sample. The logits, (R, V), are not modified. Returns (R,) int64. -1 marks a row whose
    largest logit is not finite: one is NaN, or no token is allowed.
    """
    settings = RowSettings(rows) if settings is None else settings
    processors = settings.processors
    needs_float32 = settings.edit_logits or not all(one.is_mask for one in processors)
    if needs_float32 or processors:
        logits = logits.to(torch.float32 if needs_float32 else logits.dtype, copy=True)
        if settings.edit_logits:
            from nanoengine.sampling.penalties import edit_logits

            edit_logits(logits, rows, settings)
        for kind in sorted(processors, key=lambda kind: kind.is_mask):
            found = ((i, one, row) for i, row in enumerate(rows) for one in row.processors)
            kind.apply(logits, [item for item in found if type(item[1]) is kind])
    tokens, largest = draw(logits, settings.metadata([row.position for row in rows]))
    # The maximum of a row that contains a NaN is NaN, so one number per row shows if it can be sampled.
    return tokens.masked_fill(~largest.isfinite(), -1)


def read_tokens(tokens: Tensor) -> list[int | None]:
    """Return the tokens of `draw_tokens` as integers, and None for rows that could not be sampled."""
    return [None if token_id < 0 else token_id for token_id in tokens.tolist()]


def sample_rows(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    settings: RowSettings,
    transfer: Transfer,
    *,
    draw: Draw,
    reports_processed: bool = False,
) -> tuple[Tensor, list[LogprobTable]]:
    """Sample tokens like `draw_tokens`, and queue the requested log-probabilities for the host.

    The log-probabilities come from the model's own logits or, if reports_processed, from the edited and
    filtered logits. Those of forced tokens always come from the model's own.
    """
    reported = [logits]

    def draw_and_report(edited: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        from nanoengine.sampling.drawing import process_logits

        tokens, largest = draw(edited, metadata)
        reported[0] = process_logits(edited, metadata, tokens)
        return tokens, largest

    reports_drawn = reports_processed and any(number is not None for number in settings.num_logprobs)
    tokens = draw_tokens(logits, rows, draw_and_report if reports_drawn else draw, settings)
    if settings.forced:
        from nanoengine.sampling.penalties import force_tokens

        force_tokens(logits, rows, settings.forced, tokens, reported)
    return tokens, report_samples(reported[0], settings.num_logprobs, tokens, transfer, settings.first)


Sample = Callable[[Tensor, Sequence[SamplingRow], RowSettings, Transfer], tuple[Tensor, list[LogprobTable]]]


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per seed and position: splitmix64, indexed by position.

    The numbers are keyed by position and not taken from a stream, so that they survive preemption and do
    not depend on the batch. Shapes: (R,) uint64 each -> (R,) float64.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    return np.asarray(z * 2.0**-53)
