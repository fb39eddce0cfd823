"""Logits to tokens: edits and bans, temperature, filters, one draw per row.

Shape letters: R rows (sequences that get a token this step), V vocabulary.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoengine.backends.device import upload
from nanoengine.backends.inputs import SamplingMetadata
from nanoengine.logprobs import LogprobTable, Transfer, report_samples
from nanoengine.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingRow:
    """One sequence, as the sampler sees it; from step to step only position and token_ids change."""

    params: SamplingParams
    seed: int  # 64 bits; with the position it fixes the row's random number
    position: int  # of the token to draw
    token_ids: Sequence[int]  # those before it and maybe more; all before it, where params edit logits
    num_prompt_tokens: int
    stop_ids: frozenset[int] = frozenset()  # banned until min_tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    processors: tuple["RowProcessor", ...] = ()  # what else edits its logits

    @property
    def output_ids(self) -> Sequence[int]:
        """The output before the token to draw."""
        return self.token_ids[self.num_prompt_tokens : self.position]


class RowProcessor(Protocol):
    """Edits a sequence's logits, after what `SamplingParams` says by numbers; each sequence has its own."""

    is_mask: ClassVar[bool]  # whether all it does is to forbid tokens; masks come last
    failure: str | None  # why it could not be applied; written by the sampler

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, Any, SamplingRow]]) -> None:
        """Edit logits, (R, V), in place; in float32, but that masks may get the model's dtype.

        Args:
            logits: of all rows of the step.
            items: of those that have a processor of this class: the row's number, the processor, the row. A
                sequence with guesses has several, one after the other, each with a token more.
        """


def why_undrawn(processors: Sequence[RowProcessor]) -> str:
    """Say why a sequence with these processors got no token."""
    reason = next((one.failure for one in processors if one.failure is not None), None)
    return f"no token could be drawn: {reason or 'logits are not numbers, or none is allowed'}"


class RowSettings:
    """What the parameters of a step's rows say, looked up once for as long as the sequences are the same."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        params = [row.params for row in rows]
        self.seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        self.temperature = np.array([p.temperature for p in params], dtype=np.float32)
        self.top_k = np.array([max(p.top_k, 0) for p in params], dtype=np.int64)
        # 1 keeps everything, even where rounding lets the sum before a token reach it.
        self.top_p = np.array([p.top_p if p.top_p < 1 else math.inf for p in params], dtype=np.float32)
        self.min_p = np.array([p.min_p for p in params], dtype=np.float32)
        self.num_logprobs = [p.logprobs for p in params]
        self.edit_logits = any(p.edits_logits for p in params)
        self.processors = {type(processor) for row in rows for processor in row.processors}

    def metadata(self, positions: Sequence[int]) -> SamplingMetadata:
        """The same as arrays, and the numbers that the rows' seeds and positions fix."""
        u = uniform(self.seeds, np.array(positions, dtype=np.uint64))
        return SamplingMetadata(self.temperature, self.top_k, self.top_p, self.min_p, u)


class CachedRows:
    """Caches the rows of a step and their settings as long as the same sequences are sampled."""

    def __init__(self) -> None:
        self._seqs: list[Any] = []
        self._rows: list[SamplingRow] = []
        self._settings = RowSettings([])

    def of(self, batch: Any) -> tuple[list[SamplingRow], RowSettings]:
        """Return the rows and settings of a batch. They are valid until the next call."""
        if self._seqs != batch.sampled_seqs:  # sequences are equal where they are the same
            self._seqs = batch.sampled_seqs
            self._rows = [
                SamplingRow(
                    s.params, s.seed, 0, [], s.num_prompt_tokens, s.stop_ids, s.bad_words, s.processors
                )
                for s in batch.sampled_seqs
            ]
            self._settings = RowSettings(self._rows)
        sampled = [chunk for chunk in batch.chunks if chunk.samples]
        for row, chunk in zip(self._rows, sampled, strict=True):
            row.position, row.token_ids = chunk.end, chunk.token_ids
        return self._rows, self._settings


Scale = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Rank = Callable[[Tensor], Tensor]  # `sort_keys`, or the same in fewer passes
Draw = Callable[[Tensor, SamplingMetadata], tuple[Tensor, Tensor]]

CACHED_LOGITS = 1 << 20  # how many float32 logits a CPU's caches hold
MOST_LIKELIEST = 1024  # top_k up to which a selection takes less than a sort
FILTERED_ROWS = 64  # at a time on a GPU, and for log-probabilities: filters take much memory


def scale_logits(logits: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract each row's largest logit, then divide by the row's divisor: both (R, V), in float32.

    The largest goes first, so that no temperature, however small, can overflow.

    Args:
        logits: (R, V), any floating dtype.
        divisors: (R, 1), the temperatures.

    Returns:
        The scaled logits, (R, V) float32, and each row's largest logit, (R, 1).
    """
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    return (logits - largest).div_(divisors), largest  # in place: fresh memory costs more than the arithmetic


def sort_keys(logits: Tensor) -> Tensor:
    """Integers that all differ and sort as a row's logits, the first of equal ones highest: (R, V) int64.

    The bits of the float32, turned so that they sort as it does, then those of the index, the lowest highest.
    """
    bits = (logits + 0.0).view(torch.int32)  # there is no -0.0, which would sort below 0.0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys.bitwise_left_shift_(32)  # in place: nothing that a step makes is larger
    return keys.add_(0x7FFFFFFF - torch.arange(logits.shape[1], device=logits.device))


def draw_rows(
    logits: Tensor, metadata: SamplingMetadata, scale: Scale = scale_logits, rank: Rank = sort_keys
) -> tuple[Tensor, Tensor]:
    """A token per row, (R,) int64, and each row's largest logit, which is NaN where one is; in PyTorch.

    By temperature; min_p, top_k, top_p; one draw. On a GPU nothing waits.
    """
    if not metadata.temperature.any():
        tokens = logits.argmax(-1)
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # On a CPU a few rows at a time, which stay in its caches from one operation to the next.
    size = max(1, CACHED_LOGITS // logits.shape[1])
    if logits.is_cuda:
        filters = (metadata.top_k > 0) | (metadata.top_p < 1) | (metadata.min_p > 0)
        size = FILTERED_ROWS if filters.any() else len(logits)
    parts = [_draw_part(part, of_part, scale, rank) for part, of_part in _split(logits, metadata, size)]
    tokens, largest = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return tokens, largest


def _split(
    logits: Tensor, metadata: SamplingMetadata, size: int
) -> Iterator[tuple[Tensor, SamplingMetadata]]:
    """So many rows at a time, the logits' a view."""
    for i, part in enumerate(torch.split(logits, size)):
        yield part, SamplingMetadata._make(x[i * size :][:size] for x in metadata)


def draw_tokens(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    draw: Draw = draw_rows,
    settings: RowSettings | None = None,
) -> Tensor:
    """Draw a token per row; on a GPU without waiting for it. No row's token depends on the other rows.

    The order is vLLM's: biases, penalties and bans, processors; temperature; min_p, top_k, top_p; one draw.

    Args:
        logits: (R, V), any floating dtype, not modified.
        rows: the R sequences.
        draw: `draw_rows`, or a kernel that does the same.
        settings: of the rows, where they are known already.

    Returns:
        (R,) int64; -1 where a logit is NaN.
    """
    settings = RowSettings(rows) if settings is None else settings
    processors = settings.processors
    in_float = settings.edit_logits or not all(one.is_mask for one in processors)
    if in_float or processors:
        logits = logits.to(torch.float32 if in_float else logits.dtype, copy=True)
        _edit_logits(logits, rows)
        for kind in sorted(processors, key=lambda kind: kind.is_mask):
            found = ((i, one, row) for i, row in enumerate(rows) for one in row.processors)
            kind.apply(logits, [item for item in found if type(item[1]) is kind])
    tokens, largest = draw(logits, settings.metadata([row.position for row in rows]))
    # The maximum of a row with a NaN is NaN, so one number a row tells whether it can be sampled.
    return tokens.masked_fill(~largest.isfinite(), -1)


def read_tokens(tokens: Tensor) -> list[int | None]:
    """What `draw_tokens` drew; None where it could not."""
    return [None if token_id < 0 else token_id for token_id in tokens.tolist()]


def _draw_part(logits: Tensor, metadata: SamplingMetadata, scale: Scale, rank: Rank) -> tuple[Tensor, Tensor]:
    device = logits.device
    is_greedy = metadata.temperature == 0
    divisors, u = upload(np.stack((np.where(is_greedy, 1.0, metadata.temperature), metadata.u)), device)
    scaled, largest = scale(logits, divisors.float().unsqueeze(1))
    _filter(scaled, metadata, rank)
    tokens = _pick(scaled.exp_(), u)
    if is_greedy.any():
        tokens = torch.where(upload(is_greedy, device), logits.argmax(-1), tokens)
    return tokens, largest.squeeze(1)


def process_logits(logits: Tensor, metadata: SamplingMetadata, tokens: Tensor) -> Tensor:
    """What tokens were drawn by: logits over the temperature (greedy: 1), minus infinity where filters cut.

    Args:
        logits: (R, V), edited.
        metadata: of the rows.
        tokens: (R,) int64, drawn from them. None is cut: a kernel may have summed in another order.

    Returns:
        (R, V) float32.
    """
    divisors = np.where(metadata.temperature == 0, np.float32(1), metadata.temperature)
    scaled, _ = scale_logits(logits, upload(divisors, logits.device).unsqueeze(1))
    at = tokens.clamp(min=0).unsqueeze(1)
    drawn = scaled.gather(1, at)
    for part, of_part in _split(scaled, metadata, FILTERED_ROWS):
        _filter(part, of_part)
    return scaled.scatter_(1, at, drawn)


def sample_rows(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    settings: RowSettings,
    transfer: Transfer,
    draw: Draw = draw_rows,
    *,
    reports_processed: bool = False,
) -> tuple[Tensor, list[LogprobTable]]:
    """As `draw_tokens`, and the log-probabilities that rows ask for, queued for the host.

    These are the model's own or, processed, those by which tokens are drawn. A row whose parameters make
    either raise gets -1, and the other rows what they would have got.
    """

    def sample(at: slice) -> tuple[Tensor, list[LogprobTable]]:
        try:
            return draw_at(at)
        except Exception as error:
            if at.stop - at.start == 1:  # the row is to blame: its request is told why
                for processor in rows[at.start].processors:
                    processor.failure = f"{type(error).__name__}: {error}"
            raise

    def draw_at(at: slice) -> tuple[Tensor, list[LogprobTable]]:
        asked, reported = settings.num_logprobs[at], [logits[at]]

        def draw_and_keep(edited: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
            tokens, largest = draw(edited, metadata)
            reported[0] = process_logits(edited, metadata, tokens)
            return tokens, largest

        keeps = reports_processed and any(number is not None for number in asked)
        of_rows = settings if at == everything else None
        tokens = draw_tokens(logits[at], rows[at], draw_and_keep if keeps else draw, of_rows)
        return tokens, report_samples(reported[0], asked, tokens, transfer, at.start)

    everything = slice(0, len(rows))
    failed = logits.new_full((1,), -1, dtype=torch.int64), list[LogprobTable]()
    try:
        parts = _isolate(sample, len(rows), failed)
    except Exception:
        if not all(row.processors for row in rows):
            raise
        parts = [failed] * len(rows)  # each by its own processors, as far as can be known
        logging.getLogger(__name__).exception("sampling failed for %d requests", len(rows))
    tokens, tables = zip(*parts, strict=True)
    return torch.cat(tokens), [table for part in tables for table in part]


Sample = Callable[[Tensor, Sequence[SamplingRow], RowSettings, Transfer], tuple[Tensor, list[LogprobTable]]]
T = TypeVar("T")


def _isolate(function: Callable[[slice], T], num_rows: int, failed: T) -> list[T]:
    """A function's result for all rows; where that raises, one for each row, `failed` where it raises again.

    Raises:
        Exception: what the function raised, where it does so for each of several rows: no row is at fault.
    """
    try:
        return [function(slice(0, num_rows))]
    except Exception as error:
        results = []
        for i in range(num_rows):
            try:
                results.append(function(slice(i, i + 1)))
            except Exception:
                results.append(failed)
        num_failed = sum(result is failed for result in results)
        if num_failed == num_rows > 1:
            raise
        logging.getLogger(__name__).error("sampling failed for %d requests", num_failed, exc_info=error)
        return results


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position): the splitmix64 generator, indexed.

    Keyed by position rather than drawn from a stream, so that it survives preemption and does not
    depend on the batch. Shapes: (R,) uint64 each -> (R,) float64.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    return np.asarray(z * 2.0**-53)


def _edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply biases, penalties and bans in place, touching only the entries they name.

    What the rows ask for is collected as (row, token id, value) entries, and each kind of edit is
    then one operation over the entries of all rows.
    """
    biases, repetitions, penalties, allowed, bans = (_Entries() for _ in range(5))
    for i, row in enumerate(rows):
        params, num_prompt_tokens = row.params, row.num_prompt_tokens
        if not params.edits_logits:
            continue
        token_ids = row.token_ids[: row.position]
        if params.logit_bias:
            biases.add(i, list(params.logit_bias), list(params.logit_bias.values()))
        if params.repetition_penalty != 1:
            repetitions.add(i, np.unique(np.fromiter(token_ids, np.int64)), params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            output = np.array(token_ids[num_prompt_tokens:], dtype=np.int64)
            made, counts = np.unique(output, return_counts=True)
            penalties.add(i, made, params.presence_penalty + params.frequency_penalty * counts)
        if params.allowed_token_ids is not None:
            allowed.add(i, params.allowed_token_ids)
        for *beginning, last in row.bad_words:
            start = len(token_ids) - len(beginning)
            if start >= num_prompt_tokens and list(token_ids[start:]) == beginning:
                bans.add(i, [last], -math.inf)
        if len(token_ids) - num_prompt_tokens < params.min_tokens:
            bans.add(i, list(row.stop_ids), -math.inf)
    if biases:
        at, value = biases.tensors(logits)
        logits[at] += value
    if repetitions:
        at, value = repetitions.tensors(logits)
        logits[at] = torch.where(logits[at] > 0, logits[at] / value, logits[at] * value)
    if penalties:
        at, value = penalties.tensors(logits)
        logits[at] -= value
    if allowed:
        at, _ = allowed.tensors(logits)
        kept = logits[at]
        logits.index_fill_(0, at[0], -math.inf)
        logits[at] = kept
    if bans:
        at, value = bans.tensors(logits)
        logits[at] = value  # a number would be copied to the device, and waited for


class _Entries:
    """Entries of a logits matrix, with a value each; values are used only where no entry comes twice."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.int64]] = []
        self.token_ids: list[NDArray[np.int64]] = []
        self.values: list[NDArray[np.float64]] = []

    def __bool__(self) -> bool:
        return bool(self.rows)

    def add(self, row: int, token_ids: Any, values: Any = 0.0) -> None:
        """Add token ids of a row, with one value for all or one each."""
        ids = np.asarray(token_ids, dtype=np.int64)
        self.rows.append(np.full(len(ids), row))
        self.token_ids.append(ids)
        self.values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), ids.shape))

    def tensors(self, like: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The entries as an index of a matrix, and their values in `like`'s dtype, on its device."""
        rows = upload(np.concatenate(self.rows), like.device)
        token_ids = upload(np.concatenate(self.token_ids), like.device)
        return (rows, token_ids), upload(np.concatenate(self.values), like.device).to(like.dtype)


def _filter(scaled: Tensor, metadata: SamplingMetadata, rank: Rank = sort_keys) -> None:
    """Set to -inf, in place, what min_p, top_k and top_p cut off; the likeliest token always stays.

    Each row's largest is 0. Of equal ones the first come first, as in a stable sort, so that the other
    rows of the batch cannot change which of them stay.
    """
    temperature, top_k, top_p, min_p, _ = metadata

    def of(numbers: NDArray[Any], rows: NDArray[np.intp]) -> Tensor:
        return upload(numbers[rows], scaled.device).unsqueeze(1)

    is_sampled = temperature > 0
    (unlikely,) = np.nonzero(is_sampled & (min_p > 0))
    if len(unlikely):
        at = upload(unlikely, scaled.device)
        kept = scaled[at]
        scaled[at] = kept.masked_fill(kept.exp() < of(min_p, unlikely), -math.inf)
    (with_k,) = np.nonzero(is_sampled & (top_k > 0))
    (without_k,) = np.nonzero(is_sampled & (top_k == 0) & (top_p < 1))
    for rows in (with_k, without_k):
        if not len(rows):
            continue
        at = upload(rows, scaled.device)
        logits = scaled[at]
        num = int(top_k[rows].max())
        if 0 < num <= MOST_LIKELIEST:  # these need no sort of the vocabulary
            order = _likeliest(logits, num, rank)
            values = logits.gather(1, order)
        else:
            values, order = logits.sort(dim=-1, descending=True, stable=True)
        if rows is with_k:
            ranks = torch.arange(values.shape[1], device=values.device)
            values.masked_fill_(ranks >= of(top_k, rows), -math.inf)
        del logits  # in place and not kept: what lives here is the most that a step takes
        probs = values.softmax(-1)
        beyond = probs.cumsum(-1).sub_(probs) >= of(top_p, rows)
        del probs
        beyond[:, :1].fill_(False)  # the likeliest stays, even where top_p is 0 in float32
        values.masked_fill_(beyond, -math.inf)
        scaled[at] = scaled.new_full((len(rows), scaled.shape[1]), -math.inf).scatter_(1, order, values)


def _likeliest(logits: Tensor, num: int, rank: Rank) -> Tensor:
    """Of each row of (R, V) float32, the first num (or V) of a stable descending sort, (R, num) int64.

    `topk` may choose and order equal values as it likes. So it chooses among integers that all differ.
    """
    top = rank(logits).topk(min(num, logits.shape[1])).values
    return 0x7FFFFFFF - (top & 0xFFFFFFFF)


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling in two levels: first a chunk of the vocabulary, then a token within it.

    A cumulative sum over the whole vocabulary would cost five times as much, `torch.multinomial`
    thirty times. A token of weight 0 is never drawn. `weights` (R, V) float32, `u` (R,) float64.
    """
    num_rows, vocab_size = weights.shape
    # Vocabularies are mostly multiples of 64 or more; others are padded, which takes a copy.
    divisor = math.gcd(vocab_size, 512)
    chunk_size = divisor if divisor >= 64 else max(1, math.isqrt(vocab_size))
    if missing := -vocab_size % chunk_size:
        weights = torch.nn.functional.pad(weights, (0, missing))
    chunks = weights.view(num_rows, -1, chunk_size)
    each_row = torch.arange(num_rows, device=weights.device)

    def pick(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The first index whose running sum exceeds `target`, and what is left of `target`."""
        # Rounding may bring the target up to the total; the clamp keeps it inside the last weight.
        below_total = torch.nextafter(sums[:, -1], torch.zeros_like(sums[:, -1]))
        target = torch.minimum(target, below_total)
        index = (sums <= target.unsqueeze(1)).sum(-1)
        before = sums[each_row, index - 1].masked_fill(index == 0, 0.0)
        return index, target - before

    chunk_sums = chunks.sum(-1).double().cumsum(-1)
    chunk, rest = pick(chunk_sums, u * chunk_sums[:, -1])
    within, _ = pick(chunks[each_row, chunk].double().cumsum(-1), rest)
    return chunk * chunk_size + within
