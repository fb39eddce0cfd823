"""Quantized weights: integers of 4, 6 or 8 bits, with a scale and perhaps a zero point per output and group.

A group is a number of consecutive inputs. A weight is (integer - zero) * scale. `quantize` rounds a weight
while a model is loaded, or when it is replaced: quantization="int8" or "int4".

Shape letters: N outputs of a linear layer, I inputs, G groups of inputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoengine.backends.packing import PackedEmbedding, Target, grouped
from nanoengine.backends.threads import on_all_cores


class Quantized(NamedTuple):
    """Holds a quantized weight (N, I)."""

    integers: Tensor  # (N, I) int8; with 4 bits from -8 to 7, with 6 from -32 to 31
    scales: Tensor  # (N, G) float32
    zeros: Tensor | None  # (N, G) float32: the integer that represents 0; None: 0
    bits: int  # 4, 6 or 8

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.integers.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (N, I): computed in float32, then rounded to dtype."""
        by_group = self.integers.view(*self.scales.shape, self.group).float()
        if self.zeros is not None:
            by_group -= self.zeros.unsqueeze(2)
        return (by_group * self.scales.unsqueeze(2)).to(dtype).flatten(1)

    def regrouped(self, group: int) -> "Quantized":
        """Return the same weight in smaller groups."""
        times = self.group // group
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return self._replace(scales=self.scales.repeat_interleave(times, 1), zeros=zeros)

    @staticmethod
    def cat(parts: Sequence["Quantized"]) -> "Quantized":
        """Concatenate the outputs of several layers, with the most bits of any, in groups that fit all."""
        group = math.gcd(*(part.group for part in parts))
        parts = [part.regrouped(group) for part in parts]
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([torch.zeros_like(x.scales) if x.zeros is None else x.zeros for x in parts])
        integers, scales = torch.cat([x.integers for x in parts]), torch.cat([x.scales for x in parts])
        return Quantized(integers, scales, zeros, max(part.bits for part in parts))

    def fitted(self, dtype: torch.dtype) -> "Quantized | None":
        """Return the same weight as kernels take it. None: a weight of this dtype would be more exact.

        Kernels support certain group sizes, and keep scales and zeros in float16. Its rounding error is
        negligible compared with that of a 16-bit dtype, except for scales below 6e-5, which are subnormal and
        have fewer bits. Those scales must be small compared with the layer's largest scale.
        """
        group = grouped(self.group)
        if group is None:
            return None
        for kept in (self.scales, self.zeros):
            if kept is not None:
                size = kept.abs()
                tolerance = 0.0 if dtype == torch.float32 else 2**-9 * size + 2**-16 * size.max()
                if not ((kept.half().float() - kept).abs() <= tolerance).all():
                    return None
        return self.regrouped(group)


def quantize(weight: Tensor, bits: int) -> Quantized:
    """Quantize a weight (N, I) to 8 bits in groups of 128, to 6 in groups of 64, or to 4 in groups of 32.

    Groups are smaller if I, a multiple of 16, is not a multiple of that size. With fewer than 8 bits, several
    scales are tried for each group, and the one with the least squared error is used: both signs, because
    there is one more negative integer than positive ones, and some scales that clip the largest weight.

    >>> weight = torch.tensor([[0.5, -1.27] + 14 * [0.0]])
    >>> quantize(weight, 8).integers[0, :3]
    tensor([  50, -127,    0], dtype=torch.int8)
    >>> quantize(weight, 4).integers[0, :3]
    tensor([ 3, -8,  0], dtype=torch.int8)
    """
    group = grouped(weight.shape[1], {8: 128, 6: 64, 4: 32}[bits])
    if group is None:
        raise ValueError(f"a weight of {weight.shape[1]} inputs cannot be divided into groups of 16")
    # With 8 bits: symmetric, so -128 is not used
    ends = [(1 << (bits - 1)) - cut for cut in (0, 0.5, 1, 1.5)]
    divisors = torch.tensor([127.0] if bits == 8 else [*ends, *(-end for end in ends)])
    # Work on parts that fit in a CPU's caches. On a GPU they only limit memory.
    divisors, size = divisors.to(weight.device), 1 << (23 if weight.is_cuda else 18)
    parts = torch.split(weight, max(1, size // (weight.shape[1] * len(divisors))))
    made = [_nearest(part.float().view(len(part), -1, group), bits, divisors) for part in parts]
    integers, scales = (torch.cat(tensors) for tensors in zip(*made, strict=True))
    return Quantized(integers.flatten(1), scales, None, bits)


def _nearest(weight: Tensor, bits: int, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best integers for a weight (N, G, inputs), and its scales, rounded to float16.

    The largest weight of a group, divided by one of the divisors (C,), is the group's scale.
    """
    divisors = divisors.view(-1, 1, 1)
    scales = (weight.abs().amax(2) / divisors.abs()).half().float().clamp(min=2**-24) * divisors.sign()
    integers = (weight / scales.unsqueeze(3)).round_().clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    if len(divisors) == 1:
        return integers[0].to(torch.int8), scales[0]
    # Summed in float64, in which the order does not matter: the integers must not depend on the processor.
    error = (integers * scales.unsqueeze(3)).sub_(weight).square_().sum(3, dtype=torch.float64)
    best = error.argmin(0, keepdim=True)  # (1, N, G)
    integers = integers.gather(0, best.unsqueeze(3).expand(-1, *weight.shape))
    return integers[0].to(torch.int8), scales.gather(0, best)[0]


def floats(weight: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    """Return a weight, quantized or not, in that floating-point dtype."""
    return weight.dequantize(dtype) if isinstance(weight, Quantized) else weight.to(dtype)


def fill_quantized(
    model: nn.Module, quantized: dict[str, list[str]], read: Callable[[str], Any], target: Target
) -> None:
    """Replace layers with what `pack` returns for their weights in the checkpoint, or dequantize these."""
    (dtype, _, pack), device = target, next(model.parameters()).device

    def make(path: str) -> nn.Module | nn.Parameter:
        parts = [read(name) for name in quantized[path]]
        if pack is not None and all(isinstance(part, Quantized) for part in parts):
            bias: Any = getattr(model.get_submodule(path), "bias", None)
            if (packed := pack(Quantized.cat(parts), bias, dtype)) is not None:
                return packed
        weight = torch.cat([floats(part, dtype) for part in parts]).to(device)
        return nn.Parameter(weight, requires_grad=False)

    paths = {tuple(names): path for path, names in reversed(quantized.items())}  # the first layer of each
    made = dict(zip(paths, on_all_cores("packing weights", make, paths.values()), strict=True))
    for path, names in quantized.items():
        layer, new = model.get_submodule(path), made[tuple(names)]
        if isinstance(new, nn.Parameter):
            layer.weight = new
        else:
            new = PackedEmbedding.of(layer, new) if isinstance(layer, nn.Embedding) else new
            model.set_submodule(path, new)
