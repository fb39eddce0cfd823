"""The KV cache in 8 bits (`kv_cache_dtype="int8"`): its layout and its rounding.

Each token's K and V are rounded per head. Code that copies, stores or counts blocks sees int8 tensors.
The compiled kernels read the same layout (cpu/cache.h). Shape letters are as in kv_cache.py.
"""

import torch
from torch import Tensor

from nanoengine.backends.kv_cache import KVSpec

SCALE_BYTES = 4  # of a head's float32 scale
TINY = 2.0**-100  # heads with only smaller numbers become 0: the scale's reciprocal could be infinite


def in_int8(specs: list[KVSpec]) -> list[KVSpec]:
    """Return what the layers store if K and V are rounded to 8 bits."""
    return [KVSpec(K, D + SCALE_BYTES, Dv + SCALE_BYTES, torch.int8, window) for K, D, Dv, _, window in specs]


def quantize(x: Tensor) -> Tensor:
    """Round K or V (.., K, D) to rows of a cache, (.., K, D + 4) int8.

    A head's numbers become integers from -127 to 127, times a float32 scale. If a number is not finite, the
    scale is NaN. A token's row has the integers of all heads first, and then their scales.
    """
    x = x.float()
    size = x.abs().amax(-1, keepdim=True)
    has_scale = size.isfinite() & (size >= TINY)
    integers = torch.where(has_scale, x * (torch.tensor(127.0) / size), 0).round().to(torch.int8)
    scales = torch.where(has_scale, size / 127, 0).masked_fill(~size.isfinite(), torch.nan)
    rows = torch.cat((integers.flatten(-2), scales.view(torch.int8).flatten(-2)), dim=-1)
    return rows.view(*x.shape[:-1], x.shape[-1] + SCALE_BYTES)


def dequantize(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that rows of a cache stand for: (.., K, D + 4) int8 -> (.., K, D)."""
    num_heads = rows.shape[-2]
    integers, scales = rows.flatten(-2).tensor_split([-SCALE_BYTES * num_heads], dim=-1)
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (integers.reshape(*rows.shape[:-1], -1) * scales.unsqueeze(-1)).to(dtype)
