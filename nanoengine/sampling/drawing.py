"""Draws one token per row in PyTorch: temperature, then min_p, top_k and top_p, then one sample.

A device may have a kernel that draws instead. Shape letters: R rows, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoengine.backends.device import upload
from nanoengine.backends.step_inputs import SamplingMetadata

DrawChunks = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

MAX_SELECTED = 1024  # largest top_k for which a selection is cheaper than a sort
CACHED_LOGITS = 1 << 20  # number of float32 logits that fit in a CPU's caches
FILTERED_ROWS = 64  # rows filtered at a time on a GPU and for log-probabilities, to limit memory


def draw_rows(
    logits: Tensor, metadata: SamplingMetadata, unfiltered: DrawChunks | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row in PyTorch. Return tokens, (R,) int64, and each row's largest logit, (R,).

    The largest logit is NaN if any logit of the row is NaN. The order is temperature, then min_p, top_k and
    top_p, then one sample. The host does not wait for a GPU. `unfiltered` is a kernel that replaces
    `draw_chunks`.
    """
    temperature, top_k, top_p, min_p, u = metadata
    if not temperature.any():
        tokens = logits.argmax(-1)
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    num_rows, device, unfiltered = len(logits), logits.device, unfiltered or draw_chunks
    # On a CPU, process a few rows at a time, so that they stay in cache from one operation to the next.
    size = num_rows if logits.is_cuda else max(1, CACHED_LOGITS // logits.shape[1])
    # Rows with a top_k need only their largest logits, and rows without filters only sums of weights.
    kinds = [
        (temperature == 0, num_rows, lambda x, *_: x.argmax(-1)),
        ((top_k > 0) & (top_k <= MAX_SELECTED), size, _draw_selected),
        ((top_k > 0) | (top_p < 1) | (min_p > 0), min(size, FILTERED_ROWS), _draw_filtered),
        (np.ones(num_rows, bool), size, lambda x, *given: unfiltered(in_chunks(x)[0], *given[:3])),
    ]
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    largest = torch.empty(num_rows, device=device)
    kind = np.argmax([rows for rows, _, _ in kinds], axis=0)  # each row has the first kind that it fits
    for i, (_, size, draw) in enumerate(kinds):
        rows = np.flatnonzero(kind == i)
        for part in (rows[first : first + size] for first in range(0, len(rows), size)):
            first, last = part[[0, -1]]
            is_slice = last - first < len(part)  # then the logits are a view
            at: Any = slice(first, last + 1) if is_slice else upload(part, device)
            x, of_part = logits[at], SamplingMetadata._make(values[part] for values in metadata)
            top = x.amax(-1, keepdim=True).float()
            divisors, of_u = upload(np.stack((temperature[part], u[part])), device)
            tokens[at] = draw(x, top, divisors.float().unsqueeze(1), of_u, of_part)
            largest[at] = top.squeeze(1)
    return tokens, largest


def draw_chunks(chunks: Tensor, largest: Tensor, divisors: Tensor, u: Tensor) -> Tensor:
    """Sample by inverse CDF in two levels: first a chunk of the vocabulary, then a token within it.

    A cumulative sum over the whole vocabulary would cost five times as much, and `torch.multinomial`
    thirty times. A token of weight 0 is never sampled. Shapes: the logits in chunks, (R, C, size); each row's
    largest logit and temperature, (R, 1) float32; u (R,) float64. Returns (R,) int64.
    """
    size = chunks.shape[2]
    weights = (chunks.flatten(1).float() - largest).div_(divisors).exp_().view(chunks.shape)
    sums = weights.sum(-1).double().cumsum(-1)
    chunk, rest = _pick(sums, u * sums[:, -1])
    chosen = weights.gather(1, chunk.view(-1, 1, 1).expand(-1, 1, size)).squeeze(1)
    within, _ = _pick(chosen.double().cumsum(-1), rest)
    return chunk * size + within


def _draw_filtered(
    logits: Tensor, largest: Tensor, divisors: Tensor, u: Tensor, metadata: SamplingMetadata
) -> Tensor:
    """Sample from rows whose filters need the whole vocabulary."""
    scaled = (logits.float() - largest).div_(divisors)
    filter_logits(scaled, metadata)
    ones = torch.ones_like(divisors)
    return draw_chunks(in_chunks(scaled)[0], torch.zeros_like(ones), ones, u)


def _draw_selected(
    logits: Tensor, largest: Tensor, divisors: Tensor, u: Tensor, metadata: SamplingMetadata
) -> Tensor:
    """Sample from rows with a top_k, among as many columns as the largest of them."""
    order = select_top(logits, int(metadata.top_k.max()))
    values = (logits.gather(1, order).float() - largest).div_(divisors)
    drop_unlikely(values, metadata.min_p)
    keep_top(values, metadata.top_k, metadata.top_p)
    order, ranks = order.sort(-1)  # by index, as the other rows are sampled
    index, _ = _pick((sums := values.gather(1, ranks).exp_().double().cumsum(-1)), u * sums[:, -1])
    return order.gather(1, index.unsqueeze(1)).squeeze(1)


def _pick(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose running sum, (R, N), exceeds `target`, (R,), and the rest of `target`."""
    # Rounding may make the target equal to the total. Clamp it to stay within the last nonzero weight.
    below_total = torch.nextafter(sums[:, -1], torch.zeros_like(sums[:, -1]))
    target = torch.minimum(target, below_total)
    index = (sums <= target.unsqueeze(1)).sum(-1)
    before = sums.gather(1, (index - 1).clamp_(min=0).unsqueeze(1)).squeeze(1).masked_fill(index == 0, 0.0)
    return index, target - before


def in_chunks(logits: Tensor) -> tuple[Tensor, int]:
    """Return logits (R, V) as chunks, (R, C, size), and their size. The last chunk is padded with -inf."""
    # Most vocabulary sizes are divisible by 64. Others are padded, which takes a copy.
    vocab_size = logits.shape[1]
    divisor = math.gcd(vocab_size, 512)
    size = divisor if divisor >= 64 else max(1, math.isqrt(vocab_size))
    if missing := -vocab_size % size:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return logits.view(len(logits), -1, size), size


def process_logits(logits: Tensor, metadata: SamplingMetadata, tokens: Tensor) -> Tensor:
    """Return the logits that tokens are sampled from: divided by temperature, with excluded tokens at -inf.

    Greedy rows are divided by 1. The sampled `tokens`, (R,) int64, are never excluded: the kernel that
    sampled them may add probabilities in another order. Shapes: (R, V) -> (R, V) float32.
    """
    divisors = np.where(metadata.temperature == 0, np.float32(1), metadata.temperature)
    scaled = logits.float()
    # The largest logit is subtracted first, so that no division overflows.
    scaled = (scaled - scaled.amax(-1, keepdim=True)).div_(upload(divisors, logits.device).unsqueeze(1))
    at = tokens.clamp(min=0).unsqueeze(1)
    drawn = scaled.gather(1, at)
    for first in range(0, len(scaled), FILTERED_ROWS):
        rows = slice(first, first + FILTERED_ROWS)
        filter_logits(scaled[rows], SamplingMetadata._make(x[rows] for x in metadata))
    return scaled.scatter_(1, at, drawn)


def filter_logits(scaled: Tensor, metadata: SamplingMetadata) -> None:
    """Set the logits that min_p, top_k and top_p exclude to -inf, in place. The most probable token stays.

    Each row's largest logit must be 0. Equal logits rank by index, as in a stable sort, so that the other
    rows of the batch cannot change which of them stay.
    """
    temperature, top_k, top_p, min_p, _ = metadata
    is_sampled = temperature > 0
    drop_unlikely(scaled, min_p * is_sampled)
    for chosen in (top_k > 0, (top_k == 0) & (top_p < 1)):
        if not len(rows := np.flatnonzero(chosen & is_sampled)):
            continue
        at = upload(rows, scaled.device)
        logits = scaled[at]
        num = int(top_k[rows].max())
        if 0 < num <= MAX_SELECTED:  # no need to sort the whole vocabulary
            order = select_top(logits, num)
            values = logits.gather(1, order)
        else:
            values, order = logits.sort(dim=-1, descending=True, stable=True)
        del logits  # edited in place and freed early: memory use peaks here
        keep_top(values, top_k[rows], top_p[rows])
        scaled[at] = scaled.new_full((len(rows), scaled.shape[1]), -math.inf).scatter_(1, order, values)


def drop_unlikely(values: Tensor, min_p: NDArray[np.float32]) -> None:
    """Set the values that min_p excludes to -inf, in place. Each row's largest value must be 0."""
    if min_p.any():
        values.masked_fill_(values.exp() < upload(min_p, values.device).unsqueeze(1), -math.inf)


def keep_top(values: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> None:
    """Set the values, in descending order, that top_k and top_p exclude to -inf, in place."""
    if top_k.any():
        limits = upload(top_k, values.device).unsqueeze(1)
        ranks = torch.arange(values.shape[1], device=values.device)
        values.masked_fill_((ranks >= limits) & (limits > 0), -math.inf)
    if (top_p < 1).any():
        limits, probs = upload(top_p, values.device).unsqueeze(1), values.softmax(-1)
        beyond = probs.cumsum(-1).sub_(probs) >= limits  # infinite where there is no top_p
        del probs
        beyond[:, :1].fill_(False)  # the most probable stays, even if top_p is 0 in float32
        values.masked_fill_(beyond, -math.inf)


def select_top(logits: Tensor, num: int) -> Tensor:
    """Return the indices of each row's num largest logits, in stable descending order: (R, num) int64."""
    chunks, size = in_chunks(logits)
    num = min(num, logits.shape[1])
    chosen = None
    if chunks.shape[1] > num:
        chosen = _stable_top(chunks.amax(-1), num).sort(-1).values  # in order of index again
        chunks = chunks.gather(1, chosen.unsqueeze(2).expand(-1, -1, size))
    top = _stable_top(chunks.flatten(1), num)
    if chosen is None:
        return top
    return chosen.gather(1, top // size) * size + top % size


def _stable_top(logits: Tensor, num: int) -> Tensor:
    """Return the indices of each row's num largest logits, in stable descending order.

    `topk` may choose among equal values arbitrarily, so it gets distinct integer keys instead. The upper 32
    bits of a key are those of the float32, mapped so that they sort as integers. The lower 32 bits contain
    the index, inverted so that a lower index gives a larger key.
    """
    # The addition turns -0.0 into 0.0, because the bits of -0.0 sort lower.
    bits = (logits.float() + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys.bitwise_left_shift_(32)  # in place: it may be a large tensor
    keys.add_(0x7FFFFFFF - torch.arange(logits.shape[1], device=logits.device))
    return 0x7FFFFFFF - (keys.topk(num).values & 0xFFFFFFFF)
