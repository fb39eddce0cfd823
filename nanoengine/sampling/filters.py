"""Filters logits before sampling: min_p, top_k and top_p. Shape letters: R rows, V vocabulary."""

import math

import numpy as np
import torch
from torch import Tensor

from nanoengine.backends.device import upload
from nanoengine.backends.step_inputs import SamplingMetadata

MAX_SELECTED = 1024  # largest top_k for which a selection is cheaper than a sort


def in_chunks(logits: Tensor) -> tuple[Tensor, int]:
    """Return logits (R, V) as chunks, (R, C, size), and their size. The last chunk is padded with -inf."""
    # Most vocabulary sizes are divisible by 64. Others are padded, which takes a copy.
    vocab_size = logits.shape[1]
    divisor = math.gcd(vocab_size, 512)
    size = divisor if divisor >= 64 else max(1, math.isqrt(vocab_size))
    if missing := -vocab_size % size:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return logits.view(len(logits), -1, size), size


def filter_logits(scaled: Tensor, metadata: SamplingMetadata) -> None:
    """Set the logits that min_p, top_k and top_p exclude to -inf, in place. The most probable token stays.

    Each row's largest logit must be 0. Equal logits rank by index, as in a stable sort, so that the other
    rows of the batch cannot change which of them stay.
    """
    temperature, top_k, top_p, min_p, _ = metadata
    is_sampled = temperature > 0
    (unlikely,) = np.nonzero(is_sampled & (min_p > 0))
    if len(unlikely):
        at = upload(unlikely, scaled.device)
        kept = scaled[at]
        smallest = upload(min_p[unlikely], scaled.device).unsqueeze(1)
        scaled[at] = kept.masked_fill(kept.exp() < smallest, -math.inf)
    (with_k,) = np.nonzero(is_sampled & (top_k > 0))
    (without_k,) = np.nonzero(is_sampled & (top_k == 0) & (top_p < 1))
    for rows in (with_k, without_k):
        if not len(rows):
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
        values = keep_top(values, SamplingMetadata._make(x[rows] for x in metadata))
        scaled[at] = scaled.new_full((len(rows), scaled.shape[1]), -math.inf).scatter_(1, order, values)


def keep_top(values: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Set the values, in descending order, that min_p, top_k and top_p exclude to -inf, in place."""
    top_k, top_p, min_p = (
        None if not limits.any() else upload(x, values.device).unsqueeze(1)
        for x, limits in (
            (metadata.top_k, metadata.top_k > 0),
            (metadata.top_p, metadata.top_p < 1),
            (metadata.min_p, metadata.min_p > 0),
        )
    )
    if min_p is not None:
        values.masked_fill_(values.exp() < min_p, -math.inf)
    if top_k is not None:
        ranks = torch.arange(values.shape[1], device=values.device)
        values.masked_fill_((ranks >= top_k) & (top_k > 0), -math.inf)
    if top_p is not None:
        probs = values.softmax(-1)
        beyond = probs.cumsum(-1).sub_(probs) >= top_p
        del probs
        beyond[:, :1].fill_(False)  # the most probable stays, even if top_p is 0 in float32
        values.masked_fill_(beyond, -math.inf)
    return values


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
