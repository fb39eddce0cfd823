"""Turns matrix products in the code of transformers models into `nn.Linear` layers.

A device packs the weights of linear layers, and its products with them are batch-invariant: a row does not
depend on the other rows. Three kinds of modules get such layers: the experts of a mixture, which transformers
keeps in one parameter, (experts, out, in) or (experts, in, out), the routers, and a model's own kinds of
linear layers. The layers share the memory of the weights, except for a router's, which is a float32 copy.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D


def use_linear_layers(model: nn.Module) -> None:
    """Turn a model's products with weights into `nn.Linear` layers. Unknown modules are left unchanged."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D):  # GPT-2's
                setattr(module, name, _linear(child.weight.T, child.bias))
            elif type(child).__name__ == "FalconLinear":
                setattr(module, name, _linear(child.weight, child.bias))
            elif type(child).__name__ == "JetMoeParallelExperts":
                _split(child, "weight")
                _set_forward(child, lambda self, x, counts: _by_expert(self.weight, x, counts))
            elif all(hasattr(child, needed) for needed in ("_apply_gate", "is_transposed", "gate_up_proj")):
                if not getattr(child, "has_post_expert_norm", False):
                    _split(child, "gate_up_proj", bool(child.is_transposed))
                    _split(child, "down_proj", bool(child.is_transposed))
                    _set_forward(child, _mix)
            elif _is_router(child):
                child.float32_linear = _linear(child.weight.float(), None)
                _set_forward(child, _route)


def _linear(weight: Any, bias: Any) -> nn.Linear:
    """Return a layer with views of a weight (out, in) and a bias (out,) or None. Copies nothing."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _set_forward(module: nn.Module, forward: Any) -> None:
    """Replace the forward pass of one module, and of no other module of its class."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def _split(experts: nn.Module, name: str, is_transposed: bool = False) -> None:
    """Replace a parameter of all experts with one layer per expert."""
    weights, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    if is_transposed:
        weights = weights.transpose(1, 2)
    delattr(experts, name)
    layers = (_linear(weight, None if biases is None else biases[i]) for i, weight in enumerate(weights))
    setattr(experts, name, nn.ModuleList(layers))


def _mix(experts: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, (T, E), in float32: other tokens do not change it."""
    num_tokens, k = top_k_index.shape
    order = top_k_index.flatten().argsort(stable=True)  # (token, expert) pairs, sorted by expert
    counts = top_k_index.flatten().bincount(minlength=len(experts.down_proj)).tolist()
    gate_up = _by_expert(experts.gate_up_proj, x[order // k], counts)
    out = _by_expert(experts.down_proj, experts._apply_gate(gate_up), counts)
    by_token = torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, k, -1)
    return (by_token.float() * top_k_weights.float().unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _by_expert(layers: Iterable[nn.Module], x: Any, counts: list[int]) -> Tensor:
    """Apply each expert's layer to its rows of x: counts[i] consecutive rows for expert i."""
    parts = zip(layers, x.split(counts), strict=True)
    return torch.cat([layer(rows) for layer, rows in parts if len(rows)])


def _is_router(module: Any) -> bool:
    """Return whether a module has a weight (experts, in) of its own, and no layers inside."""
    weight = module._parameters.get("weight")
    has_layers = any(isinstance(part, nn.Linear | nn.Embedding) for part in module.modules())
    return weight is not None and weight.dim() == 2 and not has_layers


class _LinearBy(TorchFunctionMode):
    """Replaces calls of `F.linear` by a float32 layer, which holds the weight that the caller passes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = self._linear if func is nn.functional.linear else func
        return function(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(input.float())
        return (out if bias is None else out + bias).to(input.dtype)


def _route(router: Any, *args: Any, **kwargs: Any) -> Any:
    with _LinearBy(router.float32_linear):
        return super(type(router), router).forward(*args, **kwargs)
