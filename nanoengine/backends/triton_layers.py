"""Triton kernels between a decoder's products: norms, SiLU, writing K and V, and sampling.

Each computes in float32, and rounds once. Nothing has to be traced or guarded, so the host launches them
quickly, and CUDA graphs can hold them.
"""

from __future__ import annotations  # Triton's types do not exist without Triton

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.triton_attention import kernel

with suppress(ImportError):  # Windows, and PyTorch for the CPU
    import triton
    import triton.language as tl

HEADS = 8  # heads of one token in a program of `_place_kernel`
WIDTH = 1024  # numbers in a program of `_silu_kernel` and `_chunk_sums_kernel`


@kernel
def _norm_kernel(  # type: ignore[no-untyped-def]
    out, total, x, residual, weight, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Normalize a row of x + residual per program, and store the sum if there is a residual."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    wide = tl.load(x + row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + row + at, mask=at < SIZE, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=at < SIZE)
        wide = rounded.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    wide *= tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row + at, wide.to(out.dtype.element_ty), mask=at < SIZE)


@kernel
def _silu_kernel(out, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute silu(gate) * up for a part of a row per program."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * SIZE) + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    result = gate / (1 + tl.exp2(gate * -1.4426950408889634)) * up
    tl.store(out + row * SIZE + at, result.to(out.dtype.element_ty), mask=at < SIZE)


@kernel
def _rotated(x, heads, is_head, weight, cos, sin, eps, DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load heads, (HEADS, PAD), normalize them if there is a weight, and rotate them if there are angles."""
    dims = tl.arange(0, PAD)
    mask = is_head[:, None] & (dims < DIM)[None, :]
    own = tl.load(x + heads[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    if cos is not None:
        wide, partners = own.to(tl.float32), (dims + DIM // 2) % DIM
        other = tl.load(x + heads[:, None] * DIM + partners[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            size = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
            wide *= size * tl.load(weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)[None, :]
            other *= size * tl.load(weight + partners, mask=dims < DIM, other=0.0).to(tl.float32)[None, :]
        other = tl.where((dims < DIM // 2)[None, :], -other, other)
        wide *= tl.load(cos + dims, mask=dims < DIM, other=0.0).to(tl.float32)[None, :]
        wide += other * tl.load(sin + dims, mask=dims < DIM, other=0.0).to(tl.float32)[None, :]
        own = wide.to(own.dtype)
    return own


@kernel
def _store(cache, slot, x, heads, is_head, K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store heads, (HEADS, PAD), in a slot."""
    dims = tl.arange(0, PAD)
    mask = is_head[:, None] & (dims < DIM)[None, :]
    tl.store(cache + (slot * K + heads[:, None]) * DIM + dims[None, :], x, mask=mask)


@kernel
def _place_kernel(  # type: ignore[no-untyped-def]
    out,  # (T, H, D)
    k_cache, v_cache,
    q, k, v,  # (T, heads, D), the heads of a token contiguous
    slots,  # (T,) int64
    q_weight, k_weight,  # (D,), or None: not normalized
    cos, sin,  # (T, 1, D)
    eps, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_PAD: tl.constexpr, V_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write some heads of one token per program: of q to `out`, or of k or v to the token's slot."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.arange(0, HEADS)
    cos += token * K_DIM
    sin += token * K_DIM
    num_parts = tl.cdiv(K, HEADS)
    if part < num_parts:
        heads += part * HEADS
        keys = _rotated(k + token * k_stride, heads, heads < K, k_weight, cos, sin, eps, K_DIM, K_PAD)
        _store(k_cache, tl.load(slots + token), keys, heads, heads < K, K, K_DIM, K_PAD)
    elif part < 2 * num_parts:
        heads += (part - num_parts) * HEADS
        values = _rotated(v + token * v_stride, heads, heads < K, None, None, None, eps, V_DIM, V_PAD)
        _store(v_cache, tl.load(slots + token), values, heads, heads < K, K, V_DIM, V_PAD)
    else:
        heads += (part - 2 * num_parts) * HEADS
        queries = _rotated(q + token * q_stride, heads, heads < H, q_weight, cos, sin, eps, K_DIM, K_PAD)
        _store(out, token, queries, heads, heads < H, H, K_DIM, K_PAD)


@kernel
def _chunk_sums_kernel(  # type: ignore[no-untyped-def]
    sums, logits, largest, divisors, num_chunks,
    SIZE: tl.constexpr, PAD: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sum the weights of some chunks of a row per program. PAD is SIZE, rounded up to a power of two."""
    row, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    dims = tl.arange(0, PAD)
    mask = (chunks < num_chunks)[:, None] & (dims < SIZE)[None, :]
    at = (row * num_chunks + chunks)[:, None] * SIZE + dims[None, :]
    x = tl.load(logits + at, mask=mask, other=-float("inf"))
    weights = _weight(x, tl.load(largest + row), tl.load(divisors + row))
    tl.store(sums + row * num_chunks + chunks, tl.sum(weights, 1), mask=chunks < num_chunks)


@kernel
def _weight(x, largest, divisor):  # type: ignore[no-untyped-def]
    return tl.exp2((x.to(tl.float32) - largest.to(tl.float32)) / divisor.to(tl.float32) * 1.4426950408889634)


@kernel
def _pick(weights, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first index whose running sum exceeds `target`, or the last with a weight, and the rest."""
    at = tl.arange(0, SIZE)
    sums = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    index = tl.minimum(tl.sum((sums <= target).to(tl.int32), 0), last)
    before = tl.sum(tl.where(at == index, sums - weights, 0.0), 0)
    return index, target - before


@kernel
def _pick_kernel(  # type: ignore[no-untyped-def]
    tokens, sums, logits, largest, divisors, u, num_chunks,
    SIZE: tl.constexpr, PAD: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Pick the chunk and the token of a row per program."""
    row, chunks, at = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS), tl.arange(0, PAD)
    of_chunks = tl.load(sums + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0).to(tl.float64)
    top = tl.load(largest + row)
    chunk, rest = _pick(of_chunks, tl.load(u + row) * tl.sum(of_chunks, 0), CHUNKS)
    x = tl.load(logits + (row * num_chunks + chunk) * SIZE + at, mask=at < SIZE, other=-float("inf"))
    within, _ = _pick(_weight(x, top, tl.load(divisors + row)).to(tl.float64), rest, PAD)
    tl.store(tokens + row, (chunk * SIZE + within).to(tl.int64))


def draw_chunks(chunks: Tensor, largest: Tensor, divisors: Tensor, u: Tensor) -> Tensor:
    """Do what `drawing.draw_chunks` does, in one pass over the logits."""
    num_rows, num_chunks, size = chunks.shape
    pad = triton.next_power_of_2(size)
    sums = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=chunks.device)
    tokens, side = torch.empty_like(u, dtype=torch.int64), max(1, WIDTH // pad)
    given = sums, chunks.contiguous(), largest, divisors
    _chunk_sums_kernel[num_rows, -(-num_chunks // side)](*given, num_chunks, size, pad, side)
    _pick_kernel[(num_rows,)](tokens, *given, u, num_chunks, size, pad, triton.next_power_of_2(num_chunks))
    return tokens


class TritonKernels:
    """Computes the operations of `decoder.PlainKernels`, which it gets, with one launch each."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def norm_rotate_both(
        self, q: Tensor, k: Tensor, v: Tensor, *of_heads: Any, attention: Any, cache: KVCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and rotate q and k, and write K and V to the cache if the backend allows it."""
        where = attention.place_for(q, cache)
        if where is None:
            return self.plain.norm_rotate_both(q, k, v, *of_heads)  # type: ignore[no-any-return]
        (out, slots), (weights, eps, rope) = where, of_heads
        num_heads, (num_tokens, num_kv_heads, k_dim), v_dim = q.shape[1], k.shape, v.shape[2]
        heads = min(HEADS, triton.next_power_of_2(num_kv_heads))
        grid = num_tokens, 2 * -(-num_kv_heads // heads) + -(-num_heads // heads)
        pads = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
        strides = q.stride(0), k.stride(0), v.stride(0)
        _place_kernel[grid](
            *(out, cache.k, cache.v, q, k, v, slots, *weights, *rope, eps, *strides),
            *(num_heads, num_kv_heads, k_dim, v_dim, *pads, heads),
        )
        return out, cache.k, cache.v

    @staticmethod
    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, (T, E), and the sum itself. Without a residual the sum is x."""
        x, size = x.contiguous(), x.shape[1]
        out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        block = triton.next_power_of_2(size)
        num_warps = min(max(block // 256, 1), 16)
        _norm_kernel[(len(x),)](out, total, x, residual, weight, eps, size, block, num_warps=num_warps)
        return out, total

    @staticmethod
    def silu_and_mul(gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, (T, I), for gate_up (T, 2 I)."""
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_tokens, size)
        _silu_kernel[num_tokens, -(-size // WIDTH)](out, gate_up.contiguous(), size, WIDTH)
        return out
