"""Quantized weights: integers of 4 or 8 bits, with a scale and an optional zero point per output and group.

A group is a number of consecutive inputs. A weight is (integer - zero) * scale.

Shape letters: N outputs of a linear layer, I inputs, G groups of inputs.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

GROUPS = (128, 64, 32, 16)  # the group sizes that the kernels support


class Form(NamedTuple):
    """Describes how a packed weight is stored: in the dtype of the input x, or as quantized integers."""

    bits: int = 0  # 0: in the dtype of x
    group: int = 0
    has_zeros: int = 0
    activation_bits: int = 0  # 8: the kernel rounds the rows of x, and multiplies integers. 0: floats


class Quantized(NamedTuple):
    """Holds a quantized weight (N, I)."""

    integers: Tensor  # (N, I) int8; with 4 bits, from -8 to 7
    scales: Tensor  # (N, G) float32
    zeros: Tensor | None  # (N, G) float32: the integer that represents 0; None: 0
    bits: int  # 4 or 8

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.integers.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (N, I): computed in float32, then rounded to dtype."""
        by_group = self.integers.view(*self.scales.shape, -1).float()
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
        """Concatenate the outputs of several layers.

        The result has the largest number of bits among them, and a group size that divides all of theirs.
        """
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


# `Device.pack`: returns a layer that computes with quantized weights, or None if they must be dequantized.
Pack = Callable[[Quantized, Tensor | None, torch.dtype], nn.Module | None]


def grouped(num_inputs: int, limit: int = GROUPS[0]) -> int | None:
    """Return the largest group size, at most `limit`, that divides num_inputs; None: there is none."""
    return next((group for group in GROUPS if group <= limit and num_inputs % group == 0), None)


def floats(weight: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    """Return a weight, quantized or not, in that floating-point dtype."""
    return weight.dequantize(dtype) if isinstance(weight, Quantized) else weight.to(dtype)


class PackedEmbedding(nn.Embedding):
    """Reads an embedding's rows from the packed head that it is tied to, so that they are stored once."""

    head: tuple[Any]  # in a tuple, otherwise PyTorch would register it as a submodule

    @classmethod
    def of(cls, embedding: nn.Embedding, head: Any) -> nn.Embedding:
        """Return a copy of an embedding that reads from a head with a method `rows`, like a `PackedLinear`.

        Keeps what the embedding's class adds, such as Gemma's scale: its `super().forward` becomes that of
        this class.
        """
        result: Any = copy.copy(embedding)
        kind = type(embedding)
        result.__class__ = cls if kind is nn.Embedding else type(kind.__name__, (kind, cls), {})
        result._parameters, result.head = {}, (head,)
        result.weight = head.rows(torch.arange(0))  # some models read its dtype
        return result  # type: ignore[no-any-return]

    def forward(self, input: Tensor) -> Tensor:
        """Look up embeddings: (..) -> (.., E)."""
        rows: Tensor = self.head[0].rows(input)
        return rows
