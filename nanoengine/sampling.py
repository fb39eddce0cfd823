"""What a request asks for (`SamplingParams`) and how logits become tokens (`sample`).

Shape letters: R rows (sequences that get a token this step), V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# ---- SamplingParams: what a request asks for ----------------------------------------------------


def check_integer(name: str, value: Any, low: int, high: int = 2**31 - 1) -> int:
    """The value as an int; TypeError or ValueError unless it is an integer in [low, high]."""
    limits = f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {limits}, got {value!r}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """The value as a float; TypeError or ValueError unless it is in [low, high], or (low, high]."""
    limits = f"a number in {'(' if open_low else '['}{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {limits}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not low <= number <= high or (open_low and number == low):  # false for NaN
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_strings(name: str, value: Any) -> list[str]:
    """The value as a list; TypeError or ValueError unless it is a list of strings, none empty."""
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"{name} must be a list of strings, got {value!r}")
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"{name} must hold strings only, got {item!r}")
        if not item:
            raise ValueError(f"{name} must not hold an empty string, got {value!r}")
    return list(value)


def check_token_ids(name: str, value: Any) -> list[int]:
    """The value as a list; TypeError or ValueError unless it is a list of token ids."""
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return [check_integer(name, item, 0) for item in value]


LARGEST = 1e30  # far from where float32 overflows


class RequestOutputKind(Enum):
    """What each output of a running request holds: all so far, what is new, or only the end result."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample, when to stop and what to report; names and defaults are vLLM's.

    Raises:
        TypeError, ValueError: a field is of the wrong type or out of its range.
    """

    n: int = 1  # samples per prompt; they share the prompt's full blocks
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the likeliest tokens up to and including the one that crosses top_p
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 is all
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the likeliest
    seed: int | None = None  # None or -1: derived from the engine's seed
    presence_penalty: float = 0.0  # subtracted once from every token in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # divides (or multiplies) logits of tokens in prompt and output
    logit_bias: dict[int, float] | None = None  # added to the logits of these token ids
    allowed_token_ids: list[int] | None = None  # nothing else may be sampled
    bad_words: list[str] | None = None  # token sequences that are never completed, spelled as words
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0  # no end-of-sequence or stop token or string before this many
    ignore_eos: bool = False
    stop: str | list[str] | None = None  # ends the output before the first of these strings
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # report this many likeliest tokens and the sampled one; -1: all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; no prefix hit is used then
    detokenize: bool = True  # False: token ids only, text stays empty
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of what `LLM.step` returns

    # Derived once, since they are asked for at every step.
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)  # `stop` in one form
    edits_logits: bool = field(init=False, repr=False, compare=False)  # before temperature and filters
    filters: bool = field(init=False, repr=False, compare=False)  # top_k, top_p or min_p cut something

    def __post_init__(self) -> None:
        """Validate every field; nothing is clipped or ignored."""
        checked: dict[str, Any] = {
            "n": check_integer("n", self.n, 1),
            "temperature": check_number("temperature", self.temperature, 0.0, LARGEST),
            "top_p": check_number("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "top_k": check_integer("top_k", self.top_k, -1),
            "min_p": check_number("min_p", self.min_p, 0.0, 1.0),
            "presence_penalty": check_number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": check_number("repetition_penalty", self.repetition_penalty, 1e-4, 1e4),
            "min_tokens": check_integer("min_tokens", self.min_tokens, 0),
        }
        for name, low in (("max_tokens", 1), ("logprobs", -1), ("prompt_logprobs", -1)):
            if getattr(self, name) is not None:
                checked[name] = check_integer(name, getattr(self, name), low)
        if self.seed is not None:
            checked["seed"] = check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise TypeError(f"logit_bias must be a dict of token id to bias, got {self.logit_bias!r}")
            checked["logit_bias"] = {
                check_integer("logit_bias", token_id, 0): check_number("logit_bias", bias, -LARGEST, LARGEST)
                for token_id, bias in self.logit_bias.items()
            }
        for name in ("allowed_token_ids", "stop_token_ids"):
            if getattr(self, name) is not None:
                checked[name] = check_token_ids(name, getattr(self, name))
        if self.allowed_token_ids is not None and not checked["allowed_token_ids"]:
            raise ValueError("allowed_token_ids must not be empty, got []")
        if self.bad_words is not None:
            checked["bad_words"] = check_strings("bad_words", self.bad_words)
            if any(not word.strip() for word in self.bad_words):
                raise ValueError(f"bad_words must not hold a blank string, got {self.bad_words!r}")
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        checked["stop_strings"] = tuple(check_strings("stop", stop))
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, got detokenize=False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        edits = (
            self.min_tokens > 0
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias or self.allowed_token_ids or self.bad_words)
        )
        checked["edits_logits"] = edits
        checked["filters"] = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        for name, value in checked.items():  # the same values in plain types, and the derived ones
            object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError where a token id or a count does not fit the vocabulary."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} must hold token ids in [0, {vocab_size}), got {token_id}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(
                    f"{name} must be at most the vocabulary's {vocab_size}, got {getattr(self, name)}"
                )


# ---- sample: logits -> tokens -------------------------------------------------------------------


class SamplingRow(NamedTuple):
    """One sequence, as the sampler sees it."""

    params: SamplingParams
    seed: int  # 64 bits; with the position it fixes the row's random number
    token_ids: Sequence[int]  # prompt and output so far
    num_prompt_tokens: int
    stop_ids: frozenset[int] = frozenset()  # banned until min_tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    num_pending_tokens: int = 0  # tokens after these that a step in flight draws; 0 if edits_logits


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class SamplerOutput(NamedTuple):
    """A token per row, and what was asked to be reported."""

    token_ids: list[int | None]  # None: the row's logits were not numbers
    logprobs: list[dict[int, Logprob] | None]
    prompt_logprobs: dict[int, list[dict[int, Logprob]]]  # seq_id -> entries of this step's prompt tokens


CACHED_LOGITS = 1 << 20  # how many float32 logits a CPU's caches hold


def sample(
    logits: Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[int | None], list[dict[int, Logprob] | None]]:
    """Draw one token per row and report on it; no row's result depends on the other rows.

    Args:
        logits: (R, V), any floating dtype, not modified.
        rows: the R sequences.

    Returns:
        Per row the token id, None where a logit is NaN, and what `SamplingParams.logprobs` asks for.
    """
    token_ids = read_tokens(draw_tokens(logits, rows))
    return token_ids, report_samples(logits, rows, token_ids)


def scale_logits(logits: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """(R, V) logits less their row's largest, over the divisors (R, 1), in float32; and the largest, (R, 1).

    The largest is taken off first: then no temperature, however small, can overflow.
    """
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    return (logits - largest).div_(divisors), largest  # in place: fresh memory costs more than the arithmetic


def draw_tokens(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    scale: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = scale_logits,
) -> Tensor:
    """A token per row, (R,) int64, -1 where a logit is NaN; on a GPU without waiting for it.

    The order is vLLM's: biases, penalties and bans; temperature; min_p, top_k, top_p; one draw. `scale` is
    `scale_logits`, or that compiled.
    """
    params = [row.params for row in rows]
    if any(p.edits_logits for p in params):
        logits = _edit_logits(logits.to(torch.float32, copy=True), rows)
    if all(p.temperature == 0 for p in params):
        tokens = logits.argmax(-1)
        largest = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    else:
        # On a CPU a few rows at a time, which stay in its caches from one operation to the next.
        size = len(rows) if logits.is_cuda else max(1, CACHED_LOGITS // logits.shape[1])
        parts = [
            _sample(part, rows[i * size :][:size], scale) for i, part in enumerate(torch.split(logits, size))
        ]
        tokens, largest = (torch.cat(columns) for columns in zip(*parts, strict=True))
    # The maximum of a row with a NaN is NaN, so one number a row tells whether it can be sampled.
    return tokens.masked_fill(~largest.isfinite(), -1)


class Download:
    """A tensor on its way to the host: from a GPU it is queued here, and waited for alone in `read`."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._arrived: Any = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> Tensor:
        """The tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


def read_tokens(tokens: Tensor) -> list[int | None]:
    """What `draw_tokens` drew; None where it could not."""
    return [None if token_id < 0 else token_id for token_id in tokens.tolist()]


def report_samples(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int | None]
) -> list[dict[int, Logprob] | None]:
    """The log-probabilities each row asks for, from the logits as the model gave them."""
    asked: dict[int, dict[int, int]] = {}  # number of logprobs -> row -> its token
    for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        if row.params.logprobs is not None and token_id is not None:
            asked.setdefault(row.params.logprobs, {})[i] = token_id
    reports: list[dict[int, Logprob] | None] = [None] * len(rows)
    for num_logprobs, chosen in asked.items():
        entries = report_logprobs(logits[list(chosen)], list(chosen.values()), num_logprobs)
        for i, entry in zip(chosen, entries, strict=True):
            reports[i] = entry
    return reports


def _sample(
    logits: Tensor, rows: Sequence[SamplingRow], scale: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Token ids, (R,) int64, by temperature, filters and one draw; and each row's largest logit."""
    device = logits.device
    params = [row.params for row in rows]
    temperatures = np.array([p.temperature for p in params], dtype=np.float32)
    is_greedy = temperatures == 0
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    positions = np.array([len(row.token_ids) + row.num_pending_tokens for row in rows], dtype=np.uint64)
    divisors, u = upload(
        np.stack((np.where(is_greedy, 1.0, temperatures), uniform(seeds, positions))), device
    )
    scaled, largest = scale(logits, divisors.float().unsqueeze(1))
    filtered = [i for i, p in enumerate(params) if p.filters]
    if filtered:
        index = upload(np.array(filtered), device)
        scaled[index] = _filter(scaled[index], [params[i] for i in filtered])
    tokens = _draw(scaled.exp_(), u)
    if is_greedy.any():
        tokens = torch.where(upload(is_greedy, device), logits.argmax(-1), tokens)
    return tokens, largest.squeeze(1)


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device. Towards a GPU it is queued, where `torch.tensor` would wait for all before."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def report_logprobs(logits: Tensor, token_ids: list[int], num_logprobs: int) -> list[dict[int, Logprob]]:
    """Per row of logits (R, V): the given token and the likeliest num_logprobs (-1: all) of the row."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, upload(np.array(token_ids), logits.device).unsqueeze(1))
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    top = logprobs.topk(num_logprobs if num_logprobs >= 0 else logprobs.shape[1])
    results = []
    for row, token_id in enumerate(token_ids):
        entry = {token_id: Logprob(float(chosen[row]), ranks[row])}
        likeliest = zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True)
        for rank, (other_id, value) in enumerate(likeliest, 1):
            entry.setdefault(other_id, Logprob(value, rank))
        results.append(entry)
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


def _edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply biases, penalties and bans in place, touching only the entries they name.

    What the rows ask for is collected as (row, token id, value) entries, and each kind of edit is
    then one operation over the entries of all rows.
    """
    biases, repetitions, penalties, allowed, bans = (_Entries() for _ in range(5))
    for i, (params, _, token_ids, num_prompt_tokens, stop_ids, bad_words, _) in enumerate(rows):
        if not params.edits_logits:
            continue
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
        for *beginning, last in bad_words:
            start = len(token_ids) - len(beginning)
            if start >= num_prompt_tokens and list(token_ids[start:]) == beginning:
                bans.add(i, [last])
        if len(token_ids) - num_prompt_tokens < params.min_tokens:
            bans.add(i, list(stop_ids))
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
        logits[at[0]] = -math.inf
        logits[at] = kept
    if bans:
        at, _ = bans.tensors(logits)
        logits[at] = -math.inf
    return logits


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


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set to -inf what min_p, top_k and top_p cut off; the likeliest token always stays."""

    def column(numbers: list[float]) -> Tensor:
        return upload(np.array(numbers, dtype=np.float32), scaled.device).unsqueeze(1)

    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    top_k = column([p.top_k if p.top_k > 0 else values.shape[1] for p in params])
    too_unlikely = (values - values[:, :1]).exp() < column([p.min_p for p in params])
    values = values.masked_fill((rank >= top_k) | too_unlikely, -math.inf)
    probs = values.softmax(-1)
    # top_p = 1 keeps everything, even where rounding lets the sum before a token reach 1.
    top_p = column([p.top_p if p.top_p < 1 else math.inf for p in params])
    values = values.masked_fill(probs.cumsum(-1) - probs >= top_p, -math.inf)
    return torch.empty_like(scaled).scatter_(1, order, values)


def _draw(weights: Tensor, u: Tensor) -> Tensor:
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
        before = torch.where(index > 0, sums[each_row, index - 1], 0.0)
        return index, target - before

    chunk_sums = chunks.sum(-1).double().cumsum(-1)
    chunk, rest = pick(chunk_sums, u * chunk_sums[:, -1])
    within, _ = pick(chunks[each_row, chunk].double().cumsum(-1), rest)
    return chunk * chunk_size + within
