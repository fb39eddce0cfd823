"""Makes transformers' layers give the same bits under any schedule: docs/guide/bits.md.

PyTorch computes most of a tensor with vector instructions and its last elements without, and the two round
differently. Where a thread's share ends depends on the number of tokens. A convolution may add in another
order for another number of tokens. `Exact` computes these operations in one way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanoengine.models.hf import HFModel

_aten = torch.ops.aten
# Functions of each element that round differently with and without vector instructions.
ELEMENTWISE = {_aten.sigmoid, _aten.silu, _aten.gelu, _aten.softplus, _aten.elu, _aten.mish, _aten.rsqrt}


class Exact(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes each element independently of the others while a model runs in this context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in ELEMENTWISE:
            args = _spread(args[0]), *args[1:]
        elif packet in (_aten.conv1d, _aten.convolution):
            x, weight, *_ = args
            if x.dim() == 3 and weight.shape[1] == 1 and len(weight) == x.shape[1]:  # of each channel
                return _convolve(*args)
        return func(*args, **(kwargs or {}))


def _spread(x: Tensor) -> Tensor:
    """Copy a tensor with gaps between its elements: PyTorch then uses no vector instructions on it."""
    return x.new_empty(*x.shape, 2)[..., 0].copy_(x)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, *settings: Any) -> Tensor:
    """Convolve each channel of x (N, C, T) by itself, with weight (C, 1, W): add inputs in order."""
    stride, padding, dilation = (*settings, *([1], [0], [1])[len(settings) :])[:3]
    assert [*stride] == [*dilation] == [1]
    padded = nn.functional.pad(x.float(), (padding[0], padding[0]))
    length = padded.shape[2] - weight.shape[2] + 1
    taps = weight.float().unbind(2)
    out = sum(padded[..., i : i + length] * tap for i, tap in enumerate(taps))
    return (out if bias is None else out + bias[:, None].float()).to(x.dtype)  # type: ignore[union-attr]


class ExactModel(HFModel):
    """Runs a model on transformers' code with `Exact`."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with Exact():  # type: ignore[no-untyped-call]
            return super().forward(*args, **kwargs)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        with Exact():  # type: ignore[no-untyped-call]
            return super().compute_logits(hidden)


def make_exact(model: HFModel) -> None:
    """Make a loaded model an `ExactModel`. Convolutions of single tokens then use no kernel either."""
    for module in model.modules():
        if "mamba_selective_scan" in getattr(module, "stand_ins", ()):
            raise ValueError(
                f"batch_invariant=True is not supported with {type(module).__name__} layers: the products of "
                "their weights depend on the number of rows"
            )
    model.__class__ = ExactModel
    for specs in model.states.specs if model.states else ():
        specs.update({key: x._replace(has_kernel=False) for key, x in specs.items() if key[0] == "conv"})
