"""Quantized weights: integers of 4 or 8 bits, with a scale and an optional zero point per output and group.

A group is a number of consecutive inputs. A weight is (integer - zero) * scale.

Shape letters: N outputs of a linear layer, I inputs, G groups of inputs.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoengine.backends.threads import on_all_cores

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


def pack_embedding(embedding: nn.Embedding, head: Any) -> nn.Embedding:
    """Return an embedding that reads its rows from a packed head, or itself if the results would differ."""
    result = PackedEmbedding.of(embedding, head)
    ids = torch.arange(min(64, head.out_features), device=head.packed.device)
    plain: Any = copy.copy(embedding)  # with the head's weights, which may be quantized
    plain._parameters = {"weight": nn.Parameter(head.rows(ids), requires_grad=False)}
    plain.padding_idx = None  # may be out of range here, and matters only in training
    with suppress(IndexError, RuntimeError):  # raised if its class reads the weight itself
        if torch.equal(result(ids), plain(ids)):
            return result
    return embedding


# Names of routers, which are not quantized, and of heads, which are quantized to 8 bits but not to 4. Other
# 4-bit formats also keep more bits for them.
ROUTERS = ("float32_linear", "gate", "router", "shared_expert_gate")
HEADS = ("lm_head", "embed_out", "output_projection")


def replace_linears(model: nn.Module, pack: Callable[[nn.Linear, int], nn.Module], bits: int = 0) -> None:
    """Replace a model's linear layers with what `pack` returns, and embeddings that are tied to one of them.

    `pack` gets a layer, and to how many bits its weight is to be rounded; 0: it is not, like a router's, or
    one that cannot be divided into groups. Each plain weight is freed before the next layer is packed.
    """
    # The parent modules of each layer, its name in each, and the parent's name; those of embeddings by the
    # id of their weight.
    linears: dict[nn.Linear, list[tuple[nn.Module, str, str]]] = {}
    embeddings: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                linears.setdefault(child, []).append((parent, name, path.rpartition(".")[2]))
            elif isinstance(child, nn.Embedding):
                embeddings.setdefault(id(child.weight), []).append((parent, name))
    parent = child = model  # the last ones would keep a plain weight in memory

    def replace(_: int) -> None:
        layer, places = linears.popitem()
        names = {name for place in places for name in place[1:]}
        is_kept = bool(names & {*ROUTERS}) or grouped(layer.in_features) is None
        packed = pack(layer, 0 if is_kept or not bits else 8 if names & {*HEADS} else bits)
        for parent, name, _outer in places:
            setattr(parent, name, packed)
        if hasattr(packed, "rows"):
            for parent, name in embeddings.get(id(layer.weight), ()):
                setattr(parent, name, pack_embedding(getattr(parent, name), packed))

    on_all_cores("packing weights", replace, range(len(linears)))


def describe_forms(model: nn.Module, written: str | None, asked: str | None) -> str:
    """Return a description, for the user, of the weights in a model; empty if none is quantized.

    `written` is the format of the checkpoint, and `asked` the one to which other weights were rounded.
    """
    forms = [form for module in model.modules() if (form := getattr(module, "form", None)) is not None]
    bits = " and ".join(map(str, sorted({form.bits for form in forms if form.bits})))
    if written is not None:
        text = f" with {written} weights" + (f" in {bits} bits" if bits else ", dequantized,")
    else:
        text = f" with {asked} weights" if bits else ""
    return text + (" and int8 activations" if any(form.activation_bits for form in forms) else "")
