"""Packing: replaces a model's layers with ones whose weights are in the layout of a device's kernels."""

import copy
from collections.abc import Callable
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


# `Device.pack(weight, bias, dtype)`: a layer that computes with a `Quantized` weight; None: dequantize it
Pack = Callable[..., nn.Module | None]


class Target(NamedTuple):
    """Says where a model's weights go, and in which form."""

    dtype: torch.dtype
    device: torch.device
    pack: Pack | None  # turns quantized weights into layers; None: all are dequantized


def grouped(num_inputs: int, limit: int = GROUPS[0]) -> int | None:
    """Return the largest group size, at most `limit`, that divides num_inputs; None: there is none."""
    return next((group for group in GROUPS if group <= limit and num_inputs % group == 0), None)


class PackedEmbedding(nn.Embedding):
    """Reads an embedding's rows from the packed head that it is tied to, so that they are stored once."""

    head: tuple[Any]  # in a tuple, otherwise PyTorch would register it as a submodule

    @classmethod
    def of(cls, embedding: nn.Embedding, head: Any) -> nn.Embedding:
        """Return an embedding, and what its class adds, that reads from a head with a method `rows`."""
        result: Any = copy.copy(embedding)
        kind = type(embedding)
        result.__class__ = cls if kind is nn.Embedding else type(kind.__name__, (kind, cls), {})
        result._parameters, result.head = {}, (head,)
        result.weight = head.rows(torch.arange(0))  # some models read its dtype
        return result  # type: ignore[no-any-return]

    def forward(self, input: Tensor) -> Tensor:
        """Look up embeddings: (..) -> (.., E)."""
        return self.head[0].rows(input)  # type: ignore[no-any-return]


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


# Names of routers, which are not quantized, and of heads, which are quantized to 8 bits but not to 4
# (packed_layers.py makes 6 of 8). Other 4-bit formats also keep more bits for them.
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
    """Return a description, for the user, of quantized weights: as they were written, or else asked for."""
    forms = [form for module in model.modules() if (form := getattr(module, "form", None)) is not None]
    bits = " and ".join(map(str, sorted({form.bits for form in forms if form.bits})))
    if written is not None:
        text = f" with {written} weights" + (f" in {bits} bits" if bits else ", dequantized,")
    else:
        text = f" with {asked} weights" if bits else ""
    return text + (" and int8 activations" if any(form.activation_bits for form in forms) else "")
