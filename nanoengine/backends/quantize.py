"""Quantizes weights while a model is loaded, or replaced: quantization="int8" or "int4"."""

from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.backends.quantized import Pack, Quantized, grouped, replace_linears


def quantize(weight: Tensor, bits: int) -> Quantized:
    """Quantize a weight (N, I) to 8 bits in groups of 128, or to 4 bits in groups of 32.

    Groups are smaller if I is not a multiple of that size. With 4 bits, several scales are tried for each
    group, and the one with the least squared error is used: both signs, because there is one more negative
    integer than positive ones, and some scales that clip the largest weight.

    >>> weight = torch.tensor([[0.5, -1.27] + 14 * [0.0]])
    >>> quantize(weight, 8).integers[0, :3]
    tensor([  50, -127,    0], dtype=torch.int8)
    >>> quantize(weight, 4).integers[0, :3]
    tensor([ 3, -8,  0], dtype=torch.int8)

    Raises:
        ValueError: I is not a multiple of 16.
    """
    group = grouped(weight.shape[1], 128 if bits == 8 else 32)
    if group is None:
        raise ValueError(f"a weight of {weight.shape[1]} inputs cannot be divided into groups of 16")
    if bits == 8:  # symmetric: -128 is not used
        divisors = torch.tensor([127.0])
    else:
        divisors = torch.tensor([sign * (8 - cut) for sign in (1, -1) for cut in (0.0, 0.5, 1.0, 1.5)])
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


def round_weights(model: Any, bits: int, pack: Pack, device: torch.device) -> None:
    """Quantize a model's linear layers on the device, one at a time, and move everything else there.

    The integers are those of a CPU. A layer that `pack` refuses keeps its weight.
    """

    def replace(layer: nn.Linear, bits: int) -> nn.Module:
        if not bits:
            return layer
        rounded = quantize(layer.weight.to(device), bits)
        return pack(rounded, layer.bias, layer.weight.dtype) or layer

    if not model.replaceable:
        model.use_linear_layers()
    try:
        replace_linears(model, replace, bits)
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"no room on {device} for the weights, rounded to {bits} bits: {error}") from error
