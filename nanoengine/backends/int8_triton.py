"""The KV cache in 8 bits on a GPU: a Triton kernel rounds K and V as `int8_cache.quantize` does.

The attention kernels of backends/triton.py multiply what they load from an int8 cache by the scales.
"""

from __future__ import annotations  # Triton's types do not exist without Triton

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from nanoengine.backends.int8_cache import quantize
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.paged_attention import whole_rows
from nanoengine.backends.triton import TritonAttention, kernel

with suppress(ImportError):  # Windows, and PyTorch for the CPU
    import triton
    import triton.language as tl


@kernel
def _round_head(row, x, head, K, DIM, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a head's integers and its scale to a token's row."""
    dims = tl.arange(0, BLOCK)
    x = tl.load(x + head * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in order as integers too, and NaN is the largest
    size = tl.max(magnitudes).to(tl.float32, bitcast=True)
    has_scale = (size >= 2.0**-100) & (size < float("inf"))
    scaled = tl.where(has_scale, x * tl.div_rn(127.0, tl.where(has_scale, size, 1.0)), 0.0)
    # Adding 1.5 * 2^23 rounds to an integer, ties to even, if it is not fused with the product.
    integers = (scaled + 12582912.0) - 12582912.0
    tl.store(row + head * DIM + dims, integers.to(tl.int32).to(tl.int8), mask=dims < DIM)
    scale = tl.where(size < 2.0**-100, 0.0, tl.where(has_scale, tl.div_rn(size, 127.0), float("nan")))
    tl.store((row + K * DIM).to(tl.pointer_type(tl.float32), bitcast=True) + head, scale)


@kernel
def _write_int8_kernel(  # type: ignore[no-untyped-def]
    k_cache, v_cache, k, v, slots, k_stride, v_stride,
    K: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round one head of one token's K and V per program. BLOCK is a power of two."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    _round_head(k_cache + slot * (K * (K_DIM + 4)), k + token * k_stride, head, K, K_DIM, BLOCK)
    _round_head(v_cache + slot * (K * (V_DIM + 4)), v + token * v_stride, head, K, V_DIM, BLOCK)


class Int8TritonAttention(TritonAttention):
    """Attends with Triton's kernels over an int8 cache."""

    stored = staticmethod(quantize)

    @classmethod
    def obstacle(cls, specs: Sequence[KVSpec], settings: frozenset[str]) -> str | None:
        """See the base class."""
        for num_heads, k_dim, v_dim, *_ in specs:
            if num_heads * k_dim % 4 or num_heads * v_dim % 4:  # scales are loaded as they are aligned
                return f"int8 rows of {num_heads} heads of {k_dim} and {v_dim} are not multiples of 4 bytes"
        return super().obstacle(specs, settings)

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        k, v = whole_rows(k), whole_rows(v)
        (num_tokens, num_heads, k_dim), v_dim = k.shape, v.shape[2]
        shape = num_heads, k_dim, v_dim, triton.next_power_of_2(max(k_dim, v_dim))
        _write_int8_kernel[num_tokens, num_heads](
            *(cache.k, cache.v, k, v, self.metadata.slot_mapping, k.stride(0), v.stride(0)),
            *shape,
            num_warps=1,
            enable_fp_fusion=False,
        )
