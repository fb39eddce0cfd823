"""Linear layers in oneDNN's layout, for bfloat16 without a compiler."""

import torch
from torch import Tensor, nn


class OneDNNLinear(nn.Module):
    """A linear layer with its bfloat16 weight in oneDNN's layout.

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
