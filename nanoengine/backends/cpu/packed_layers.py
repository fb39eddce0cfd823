"""Linear layers and embeddings with weights packed for the kernels, and decoder layers made of them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanoengine.backends.cpu.compiled_attention import CompiledAttention
from nanoengine.backends.cpu.kernels import PLAIN, Kernels, as_int64
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.packing import Form, replace_linears
from nanoengine.backends.paged_attention import GroupedAttention

if TYPE_CHECKING:  # at run time it is imported for quantized weights
    from nanoengine.backends.quantization import Quantized


class PackedLinear(nn.Module):
    """A linear layer with its weight in the layout that `Kernels.linear` reads.

    The weight, (out, in), is quantized, or `kernels.can_multiply(weight)` is true. `dtype` is that of inputs
    and outputs. With activation_bits of 8, the kernel rounds inputs for products with quantized weights.
    """

    packed: Tensor

    def __init__(
        self,
        weight: "Tensor | Quantized",
        bias: Tensor | None,
        kernels: Kernels,
        dtype: torch.dtype,
        activation_bits: int = 0,
    ) -> None:
        super().__init__()
        self.kernels, self.bias, self.dtype, self.form = kernels, bias, dtype, PLAIN
        if isinstance(weight, Tensor):
            packed, shape = kernels.pack(weight), weight.shape
        else:
            self.form = Form(weight.bits, weight.group, int(weight.zeros is not None), activation_bits)
            packed, shape = kernels.pack_integers(weight, activation_bits), weight.integers.shape
        self.out_features, self.in_features = shape
        self.register_buffer("packed", packed, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The weight, (out, in), unpacked again at each access: some models read it."""
        return self.rows(torch.arange(self.out_features))

    def rows(self, rows: Tensor) -> Tensor:
        """Return rows (..) of the weight: (.., in)."""
        return self.kernels.unpack_rows(self.packed, rows, self.in_features, self.dtype, self.form)

    def pack(self, weight: Tensor) -> Tensor:
        """Return rows of a new weight, (rows, in), in the layer's layout, and quantized if the layer is."""
        weight = weight.to(self.packed.device, self.dtype)
        if not self.form.bits:
            return self.kernels.pack(weight)
        from nanoengine.backends.quantization import quantize

        return self.kernels.pack_integers(quantize(weight, self.form.bits), self.form.activation_bits)

    def holds(self, weight: Tensor) -> bool:
        """Return whether the layer was made from this weight, (out, in)."""
        return torch.equal(self.packed, self.pack(weight))

    def are_blocks(self, first: int, end: int) -> bool:
        """Return whether rows [first, end) can be packed without the rows beside them."""
        outputs = self.kernels.num_outputs
        return first % outputs == 0 and (end % outputs == 0 or end == self.out_features)

    def load_rows(self, first: int, weight: Tensor) -> None:
        """Replace rows from `first` on, in place, because kernels hold addresses."""
        end = first + len(weight)
        if not self.are_blocks(first, end):
            whole = self.weight
            whole[first:end] = weight
            weight, first, end = whole, 0, self.out_features
        outputs = self.kernels.num_outputs
        self.packed[first // outputs : -(-end // outputs)] = self.pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (.., in) -> (.., out)."""
        if x.dtype != self.dtype:  # nn.Linear raises too
            raise RuntimeError(f"expected an input of {self.dtype}, got {x.dtype}")
        return self.kernels.linear(x, self.packed, self.bias, self.out_features, self.form)


class OneDNNLinear(nn.Module):
    """A linear layer with its bfloat16 weight in oneDNN's layout, for machines without a compiler.

    `nn.Linear` reorders the weight at every call, which takes longer than the product of a small batch.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = layer.bias
        self.weight = layer.weight.new_empty(0, layer.in_features)  # some models read its dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight)

    def holds(self, weight: Tensor) -> bool:
        """Return whether the layer was made from this weight, (out, in)."""
        return torch.equal(self.packed.to_dense(), weight)

    def load_rows(self, first: int, weight: Tensor) -> None:
        """Replace rows of the weight from `first` on."""
        whole = self.packed.to_dense()
        whole[first : first + len(weight)] = weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(whole)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (T, in) -> (T, out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack_linear(
    layer: nn.Linear, kernels: Kernels | None, bits: int = 0, activation_bits: int = 0
) -> nn.Module:
    """Return the layer, or one with its weight in a faster layout, quantized unless `bits` is 0."""
    weight: Tensor = layer.weight
    if kernels is not None and bits:
        from nanoengine.backends.quantization import quantize

        return PackedLinear(quantize(weight, bits), layer.bias, kernels, weight.dtype, activation_bits)
    if kernels is not None and kernels.can_multiply(weight):
        return PackedLinear(weight, layer.bias, kernels, weight.dtype)
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OneDNNLinear(layer)
    return layer


def pack_weights(model: nn.Module, kernels: Kernels | None, bits: int = 0, activation_bits: int = 0) -> None:
    """Replace a model's linear layers with those that `pack_linear` returns: see `replace_linears`."""
    heads = {8: 6} if bits == 4 and activation_bits else {}  # products of floats have no kernel for 6 bits
    replace_linears(model, lambda x, own: pack_linear(x, kernels, heads.get(own, own), activation_bits), bits)


class CompiledLayer(nn.Module):
    """Computes a layer of models/decoder.py with packed weights in a single kernel call.

    The last layer computes only K and V for rows whose hidden states are not used: most of a prompt.
    """

    def __init__(self, layer: Any, kernels: Kernels, is_last: bool = False) -> None:
        super().__init__()
        self.layer, self.kernels, self.is_last = layer, kernels, is_last
        attn, projections = layer.self_attn, self._projections(layer)
        linears = [x for layer in projections for x in (layer.packed, layer.bias, *layer.form)]
        norms = layer.input_layernorm, attn.q_norm, attn.k_norm, layer.post_attention_layernorm
        weights = [None if norm is None else norm.weight for norm in norms]
        heads = (size // attn.head_dim for size in attn.sizes[:2])
        sizes = (projections[0].in_features, *heads, attn.head_dim, projections[3].in_features)
        # The kernel's `Layer`. self.layer keeps the tensors alive that it points to.
        self.description = as_int64((*linears, *weights, *sizes, attn.window or 0))
        self.eps, self.scale = float(layer.input_layernorm.eps), float(attn.head_dim**-0.5)

    @staticmethod
    def can_hold(layer: Any) -> bool:
        """Return whether the layer is supported. With tensor parallelism it is not: it has collectives."""
        return all(type(projection) is PackedLinear for projection in CompiledLayer._projections(layer))

    @staticmethod
    def _projections(layer: Any) -> list[Any]:
        attn, mlp = layer.self_attn, layer.mlp
        return [attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj]

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: tuple[Tensor, Tensor], cache: KVCache, attention: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute the same as `DecoderLayer`. In the last layer, rows that are not needed are zeros."""
        if isinstance(attention, GroupedAttention):
            attention = attention.groups[cache.group]
        if not isinstance(attention, CompiledAttention):
            return self.layer(x, residual, rope, cache, attention)  # type: ignore[no-any-return]
        needed = attention.needed_rows if self.is_last else None
        batch = attention.description if needed is None else attention.last_description
        out, total = x.new_empty(2, len(x) if needed is None else len(needed), x.shape[1])
        self.kernels.call(
            "decoder_layer", out, total, x, residual, *rope, cache.k, cache.v,
            self.description, batch, len(x), self.eps, self.scale,
        )  # fmt: skip
        if needed is not None:
            out, total = (torch.zeros_like(x).index_copy_(0, needed, rows) for rows in (out, total))
        return out, total
