"""Kernels of layers with recurrent states: they read a sequence's state from a slot, and write it to one."""

import torch
from torch import Tensor

from nanoengine.backends.cpu.kernels import Kernels

Slots = tuple[Tensor, Tensor]  # the slots that N sequences' states are read from and written to: (N,) int64


class StateKernels:
    """Calls the functions of states.h."""

    def __init__(self, kernels: Kernels) -> None:
        self.call = kernels.call

    def conv_step(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Slots, silu: bool
    ) -> Tensor:
        """Return a convolution's next output (N, C) for x (N, C), weight (C, W) and states (slots, C, W)."""
        out = torch.empty_like(x)
        self.call("conv_step", out, x, weight, bias, states, *slots, *x.shape, weight.shape[1], int(silu))
        return out

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Return the gated delta rule's outputs (N, T, H, V) for q and k (N, T, K, D) and v (N, T, H, V).

        decay (N, T, H) or (N, T, H, D), beta (N, T, H) and states (slots, H, D, V) are float32.
        """
        out = torch.empty_like(v)
        sizes = *v.shape[:3], *k.shape[2:], v.shape[3], decay.numel() // beta.numel()
        self.call("delta_rule", out, q, k, v, decay, beta, states, *slots, *sizes)
        return out

    def mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Return Mamba2's outputs (N, T, H, P) for x (N, T, H, P), b and c (N, T, G, S).

        dt (N, T, H), a and d (H,), and states (slots, H, P, S) are computed with in float32.
        """
        x, b, c = (y.to(x.dtype).contiguous() for y in (x, b, c))
        dt, a, d = (y.float().contiguous() for y in (dt, a, d))
        out = torch.empty_like(x)
        self.call("mamba2", out, x, dt, a, b, c, d, states, *slots, *x.shape, *b.shape[2:])
        return out

    def mamba(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Return Mamba's outputs (N, T, I) for x (N, T, I), b and c (N, T, S).

        dt (N, T, I), a (I, S) and states (slots, I, S) are computed with in float32.
        """
        x, b, c = (y.to(x.dtype).contiguous() for y in (x, b, c))
        dt, a = (y.float().contiguous() for y in (dt, a))
        out = torch.empty_like(x)
        self.call("mamba", out, x, dt, a, b, c, states, *slots, *x.shape, b.shape[2])
        return out
