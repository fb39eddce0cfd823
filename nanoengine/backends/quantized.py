"""Weights of 4 and 8 bits: integers, and for each output and group of inputs a scale and perhaps a zero.

A weight is (integer - zero) * scale. Shape letters: N outputs of a linear layer, I inputs, G groups of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return self._replace(scales=self.scales.repeat_interleave(times, 1), zeros=zeros)

    @staticmethod
    def cat(parts: Sequence["Quantized"]) -> "Quantized":
        """Several layers' outputs as one's: the most bits of them, and groups that divide those of each."""
        group = math.gcd(*(part.group for part in parts))
        parts = [part.regrouped(group) for part in parts]
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([torch.zeros_like(x.scales) if x.zeros is None else x.zeros for x in parts])
        integers, scales = torch.cat([x.integers for x in parts]), torch.cat([x.scales for x in parts])
        return Quantized(integers, scales, zeros, max(part.bits for part in parts))

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether kernels can compute with it as exactly as with weights of this dtype.

        They have scales and zeros in float16, whose rounding is nothing beside that of a 16-bit dtype; scales
        for which it has few bits, below 6e-5, have to be small beside the layer's others.
        """
        if self.group not in GROUPS:
            return False
        for kept in (self.scales, self.zeros):
            if kept is not None:
                size = kept.abs()
                tolerance = 0.0 if dtype == torch.float32 else 2**-9 * size + 2**-16 * size.max()
                if not ((kept.half().float() - kept).abs() <= tolerance).all():
                    return False
        return True


# `Device.pack`: returns a layer that computes with quantized weights, or None if they must be dequantized.
Pack = Callable[[Quantized, Tensor | None, torch.dtype], nn.Module | None]


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
    parts = torch.split(weight, max(1, (1 << 16) // weight.shape[1]))
    made = [_nearest(part.float().view(len(part), -1, group), bits) for part in parts]
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


def floats(weight: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    """A weight as floats of that dtype."""
    return weight.dequantize(dtype) if isinstance(weight, Quantized) else weight.to(dtype)


class PackedEmbedding(nn.Embedding):
    """An embedding whose rows are read out of a packed layer: of the head it is tied to, held once."""

    head: tuple[Any]  # in a tuple, or it would be a part of this module

    @classmethod
    def of(cls, head: Any) -> "PackedEmbedding":
        """Of a layer with a method `rows`, like `cpu.packed.PackedLinear`."""
        embedding = cls(0, head.in_features, device="meta")
        embedding._parameters, embedding.head = {}, (head,)
        embedding.num_embeddings = head.out_features
        embedding.weight = head.rows(torch.arange(0))  # some ask for its dtype
        return embedding

    def forward(self, input: Tensor) -> Tensor:
        """(..) -> (.., E)."""
        rows: Tensor = self.head[0].rows(input)
        return rows
