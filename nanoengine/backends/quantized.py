"""Weights of 4 and 8 bits: integers, and for each output and group of inputs a scale and perhaps a zero.

A weight is (integer - zero) * scale. Shape letters: N outputs of a linear layer, I inputs, G groups of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUPS = (128, 64, 32, 16)  # inputs that share a scale, as the kernels take them


class Quantized(NamedTuple):
    """A weight (N, I) in few bits."""

    integers: Tensor  # (N, I) int8; of 4 bits from -8 to 7
    scales: Tensor  # (N, G) float32
    zeros: Tensor | None  # (N, G) float32: the integer that stands for 0; None: 0
    bits: int  # 4 or 8

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.integers.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight, (N, I): computed in float32, then rounded."""
        by_group = self.integers.view(*self.scales.shape, -1).float()
        if self.zeros is not None:
            by_group -= self.zeros.unsqueeze(2)
        return (by_group * self.scales.unsqueeze(2)).to(dtype).flatten(1)

    def regrouped(self, group: int) -> "Quantized":
        """The same in smaller groups."""
        times = self.group // group
        scales, zeros = (
            None if x is None else x.repeat_interleave(times, 1) for x in (self.scales, self.zeros)
        )
        return self._replace(scales=scales, zeros=zeros)

    @staticmethod
    def cat(parts: Sequence["Quantized"]) -> "Quantized":
        """Several layers' outputs as one's: with the most bits of them, and the smallest groups."""
        group = min(part.group for part in parts)
        parts = [part.regrouped(group) for part in parts]
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([torch.zeros_like(x.scales) if x.zeros is None else x.zeros for x in parts])
        integers, scales = torch.cat([x.integers for x in parts]), torch.cat([x.scales for x in parts])
        return Quantized(integers, scales, zeros, max(part.bits for part in parts))

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether kernels can compute with it as exactly as with weights of this dtype.

        They have scales and zeros in float16, which beside 16 bits loses nothing: its rounding is finer.
        """
        if self.group not in GROUPS:
            return False
        tolerance = 0.0 if dtype == torch.float32 else 2**-11
        kept = [x for x in (self.scales, self.zeros) if x is not None]
        return all(((x.half().float() - x).abs() <= tolerance * x.abs()).all().item() for x in kept)


def grouped(num_inputs: int, most: int = GROUPS[0]) -> int | None:
    """The largest group that divides so many inputs evenly; None: there is none."""
    return next((group for group in GROUPS if group <= most and num_inputs % group == 0), None)


def quantize(weight: Tensor, bits: int) -> Quantized:
    """A weight (N, I) in 8 bits, groups of 128, or in 4 bits, groups of 32; smaller ones where I asks for it.

    Of 4 bits, each group has of a few scales the one with the least squared error: both signs, since there is
    an integer more on one side, and some that cut off the largest weight.

    >>> weight = torch.tensor([[0.5, -1.27] + 14 * [0.0]])
    >>> quantize(weight, 8).integers[0, :3]
    tensor([  50, -127,    0], dtype=torch.int8)
    >>> quantize(weight, 4).integers[0, :3]
    tensor([ 3, -8,  0], dtype=torch.int8)

    Raises:
        ValueError: I is no multiple of 16.
    """
    group = grouped(weight.shape[1], 128 if bits == 8 else 32)
    if group is None:
        raise ValueError(f"a weight of {weight.shape[1]} inputs cannot be divided into groups of 16")
    # By parts that stay in the processor's caches.
    parts = weight.split(max(1, (1 << 16) // weight.shape[1]))
    made = [_nearest(part.float().unflatten(1, (-1, group)), bits) for part in parts]
    integers, scales = (torch.cat(tensors) for tensors in zip(*made, strict=True))
    return Quantized(integers.flatten(1), scales, None, bits)


def _nearest(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers and scales of float16 for a weight (N, G, inputs)."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    largest = weight.abs().amax(2)
    if bits == 8:  # symmetric: both ends count alike
        divisors = [float(high)]
    else:
        divisors = [sign * (8 - cut) for sign in (1, -1) for cut in (0.0, 0.5, 1.0, 1.5)]
    best, least = None, None
    for divisor in divisors:
        scales = (largest / abs(divisor)).half().float().clamp(min=2**-24) * (1 if divisor > 0 else -1)
        integers = (weight / scales.unsqueeze(2)).round_().clamp_(low, high)
        error = (integers * scales.unsqueeze(2)).sub_(weight).square_().sum(2)
        if best is None or least is None:
            best, least = (integers, scales), error
        else:
            is_better = error < least
            best = (
                torch.where(is_better.unsqueeze(2), integers, best[0]),
                torch.where(is_better, scales, best[1]),
            )
            least = torch.where(is_better, error, least)
    assert best is not None
    return best[0].to(torch.int8), best[1]
