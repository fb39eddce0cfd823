"""Paged attention with Triton kernels: any block size, head_dim and setting, on any GPU with Triton.

A program holds a tile of queries and walks over the keys they see, one tile at a time, with a running softmax
(FlashAttention). The rows of a tile include all query heads that share a KV head, so that each key is read
once for all of them. A sequence with one new token has too little work to fill a GPU, so its keys are split
among programs, and a second kernel combines their results (flash-decoding). Tiles and splits depend only on
the GPU, the layer's shapes and the sequence, so a result is the same bit for bit in any batch. Grids are
computed from values that the host knows, so that CUDA graphs can capture them.
Source: FlashAttention-2, https://arxiv.org/abs/2307.08691; vLLM's `triton_unified_attention.py`.
"""

from __future__ import annotations  # Triton's types do not exist without Triton

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.paged_attention import PagedAttention, Settings, whole_rows
from nanoengine.backends.step_inputs import AttentionMetadata

try:
    import triton
    import triton.language as tl
except ImportError:  # Windows, and PyTorch for the CPU
    triton = None

MIN_SPAN, MAX_SPLITS = 256, 16  # smallest number of keys in a split, largest number of splits
MAX_PROGRAMS = 512  # limit on programs that share a step's splits: several per processor of a large GPU
# A tile of keys that lies in one block needs one block id, which is known one tile ahead. So several tiles
# can be loaded at once, and on an H200 small ones were as fast as large ones: 3.9 TB/s at 256 sequences.
IN_BLOCK, IN_BLOCK_STAGES = 32, 3  # keys of such a tile; how many are loaded at once
LOG2E = math.log2(math.e)  # the softmax is computed with powers of two: GPUs have an instruction for them

# ---- Kernels -------------------------------------------------------------------------------------


def kernel(function: Callable[..., Any]) -> Any:
    """Return a function in Triton's language as a kernel, compiled at its first call.

    By default, Triton compiles again for special values of an integer and for other alignments of a pointer.
    This is disabled for arguments that change from step to step.
    """
    if triton is None:
        return function
    return triton.jit(
        do_not_specialize=("num_seqs", "num_tokens", "table_stride", "num_splits", "num_steps"),
        do_not_specialize_on_alignment=("block_tables", "cu_seqlens_q", "seq_lens", "slots"),
    )(function)


@kernel
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    k_cache, v_cache, k, v, slots, k_stride, v_stride,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token's K and V per program. BLOCK is the next power of two of the larger width."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    offsets = tl.arange(0, BLOCK)
    keys = tl.load(k + token * k_stride + offsets, mask=offsets < K_WIDTH)
    tl.store(k_cache + slot * K_WIDTH + offsets, keys, mask=offsets < K_WIDTH)
    values = tl.load(v + token * v_stride + offsets, mask=offsets < V_WIDTH)
    tl.store(v_cache + slot * V_WIDTH + offsets, values, mask=offsets < V_WIDTH)


@kernel
def _span(num_keys, KEYS: tl.constexpr, MIN_SPAN: tl.constexpr, MAX_SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of keys per split for a sequence that sees num_keys, a multiple of KEYS."""
    return tl.cdiv(tl.maximum(tl.cdiv(num_keys, MAX_SPLITS), MIN_SPAN), KEYS) * KEYS


@kernel
def _merge(top, total, acc, new_top, new_total, new_acc, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a split's sums to those of the splits before it, with the same rounding in every kernel."""
    both = tl.maximum(top, new_top)
    fade, weight = tl.exp2(top - both), tl.exp2(new_top - both)
    total = tl.fma(total, fade, new_total * weight)
    if ROWS:
        fade, weight = fade[:, None], weight[:, None]
    return both, total, tl.fma(acc, tl.broadcast_to(fade, acc.shape), new_acc * weight)


@kernel
def _dot(a, b, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply to (M, N) float32. Float32 inputs are not rounded to TF32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@kernel
def _with_sink(total, top, sinks, head):  # type: ignore[no-untyped-def]
    """Add the weight of the head's sink, if any, to the sum of weights. Weights are relative to 2^top."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - top)
    return total


@kernel
def _attend_kernel(  # type: ignore[no-untyped-def]
    out,  # (T, H, D')
    parts,  # (S, num_splits, H, D') float32: weighted sums of values, for the splits of decodes
    sums,  # (S, num_splits, H, 2) float32: the largest score, and the sum of weights relative to it
    q,  # (T, H, D)
    k_cache,  # (num_blocks, B, K, D)
    v_cache,  # (num_blocks, B, K, D')
    block_tables,  # (S, longest table) int32
    cu_seqlens_q,  # (S + 1,) int32
    seq_lens,  # (S,) int32
    sinks,  # (H,) float32, or None
    alibi_slopes,  # (H,) float32, or None
    scale,  # turns dot products into exponents of two; with a soft-cap, into the argument of the soft-cap
    softcap,  # bound of the exponents, or None
    window,  # number of positions, or None
    num_seqs, num_splits, table_stride,
    H: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,  # how many of the query heads that share a KV head are in a tile
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,  # True: this launch handles sequences with one new token; False: the others
    ROWS: tl.constexpr,  # rows of a query tile; each row is one head of one token
    TOKENS: tl.constexpr,  # tokens of a query tile
    KEYS: tl.constexpr,  # keys of a key tile
    CARRY: tl.constexpr,  # whether each key tile lies in one block
    K_PAD: tl.constexpr, V_PAD: tl.constexpr,  # K_DIM and V_DIM, rounded up to powers of two for Triton
    MIN_SPAN: tl.constexpr, MAX_SPLITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend with one program per query tile and KV head. Several programs share the splits of a decode."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_head = 0  # first of the tile's query heads among those that share the KV head
    if GROUP < H // K:
        first_head = kv_head // K * GROUP
        kv_head = kv_head % K
    if DECODE:
        seq, token = tile, 0
    else:
        # Sequence i owns the tiles from cu_seqlens_q[i] // TOKENS + i: as many as it needs, or one more.
        seq, end = 0, num_seqs
        while end - seq > 1:
            middle = (seq + end) // 2
            if tl.load(cu_seqlens_q + middle) // TOKENS + middle <= tile:
                seq = middle
            else:
                end = middle
        token = (tile - tl.load(cu_seqlens_q + seq) // TOKENS - seq) * TOKENS
    start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - start
    is_other = query_len != 1 if DECODE else (query_len == 1) | (token >= query_len)
    if is_other:
        return

    # The tile's queries: rows, their tokens, heads and positions.
    past = tl.load(seq_lens + seq) - query_len
    rows = tl.arange(0, ROWS)
    tokens = token + rows // GROUP
    heads = first_head + rows % GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < query_len) & (heads < H // K)
    heads += kv_head * (H // K)
    out_rows = (start + tokens).to(tl.int64) * H + heads
    k_dims, v_dims = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    queries = tl.load(
        q + out_rows[:, None] * K_DIM + k_dims[None, :],
        mask=is_row[:, None] & (k_dims < K_DIM)[None, :],
        other=0.0,
    )

    dtype: tl.constexpr = q.dtype.element_ty
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=is_row, other=0.0) * 1.4426950408889634

    # The keys that any query of the tile sees are at positions [low, high). A decode splits this range.
    low = 0
    if window is not None:
        low = tl.maximum(past + token + 1 - window, 0)
    high = past + tl.minimum(token + TOKENS, query_len)
    origin = low
    if CARRY and window is not None:
        origin = low // KEYS * KEYS
    span, splits = high - origin, 1
    if DECODE:
        span = _span(high - origin, KEYS, MIN_SPAN, MAX_SPLITS)
        splits = tl.cdiv(high - origin, span)
        whole_top = tl.full((ROWS,), -float("inf"), tl.float32)
        whole_total = tl.zeros((ROWS,), tl.float32)
        whole_acc = tl.zeros((ROWS, V_PAD), tl.float32)
    table = block_tables + seq * table_stride
    offsets = tl.arange(0, KEYS)

    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        begin = origin + split * span
        end = tl.minimum(begin + span, high)
        block = 0
        if CARRY:
            block = tl.load(table + begin // BLOCK_SIZE)
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, V_PAD), tl.float32)
        for first in range(begin, end, KEYS):
            positions = first + offsets
            is_key = positions < end  # past the end there may be NaN, and 0 * NaN is NaN
            if CARRY and window is not None:
                is_key &= positions >= low  # where blocks may be freed
            if CARRY:
                start_slot, slots = tl.cast(block, tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE, offsets
            else:
                blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0)
                start_slot, slots = 0, blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            row = start_slot * K + kv_head
            keys = tl.load(
                k_cache + row * K_DIM + (slots[None, :] * (K * K_DIM) + k_dims[:, None]),
                mask=is_key[None, :] & (k_dims < K_DIM)[:, None],
                other=0.0,
            )
            values = tl.load(
                v_cache + row * V_DIM + (slots[:, None] * (K * V_DIM) + v_dims[None, :]),
                mask=is_key[:, None] & (v_dims < V_DIM)[None, :],
                other=0.0,
            )
            if CARRY:  # one tile ahead: its addresses are known before it begins, so it can be prefetched
                block = tl.load(table + (first + KEYS) // BLOCK_SIZE, mask=first + KEYS < end, other=0)
            scores = _dot(queries, keys, UPCAST) * scale
            if softcap is not None:
                scores = softcap * (1 - 2 / (tl.exp2(scores) + 1))  # tanh
            distance = (past + tokens)[:, None] - positions[None, :]
            if alibi_slopes is not None:
                scores -= slopes[:, None] * distance
            is_visible = is_key[None, :]  # a decode sees all keys from low to high
            if not DECODE:
                is_visible = (distance >= 0) & is_visible
                if window is not None:
                    is_visible &= distance < window
            scores = tl.where(is_visible, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = new_top
            if not DECODE:
                base = tl.where(new_top == -float("inf"), 0.0, new_top)  # 0: the row has not seen a key yet
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weights, 1)
            acc = acc * fade[:, None] + _dot(weights.to(dtype), values, UPCAST)
            top = new_top

        is_value = is_row[:, None] & (v_dims < V_DIM)[None, :]
        if not DECODE:
            at_value = out + out_rows[:, None] * V_DIM + v_dims[None, :]
            acc /= _with_sink(total, top, sinks, heads)[:, None]
            tl.store(at_value, acc.to(out.dtype.element_ty), mask=is_value)
        elif tl.num_programs(2) == 1:
            whole_top, whole_total, whole_acc = _merge(
                whole_top, whole_total, whole_acc, top, total, acc, ROWS
            )
        else:
            part_rows = (seq * num_splits + split).to(tl.int64) * H + heads
            tl.store(sums + part_rows * 2, top, mask=is_row)
            tl.store(sums + part_rows * 2 + 1, total, mask=is_row)
            tl.store(parts + part_rows[:, None] * V_DIM + v_dims[None, :], acc, mask=is_value)
    if DECODE:  # noqa: SIM102 (known when it is compiled; the next condition is not)
        if tl.num_programs(2) == 1:
            whole_acc /= _with_sink(whole_total, whole_top, sinks, heads)[:, None]
            at_value = out + out_rows[:, None] * V_DIM + v_dims[None, :]
            is_value = is_row[:, None] & (v_dims < V_DIM)[None, :]
            tl.store(at_value, whole_acc.to(out.dtype.element_ty), mask=is_value)


@kernel
def _combine_kernel(  # type: ignore[no-untyped-def]
    out, parts, sums, cu_seqlens_q, seq_lens, sinks, window, num_splits,
    H: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    KEYS: tl.constexpr, CARRY: tl.constexpr, MIN_SPAN: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a decode in their order, with one program per sequence and head."""
    seq, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens_q + seq)
    if tl.load(cu_seqlens_q + seq + 1) - start != 1:
        return
    high, low = tl.load(seq_lens + seq), 0
    if window is not None:
        low = tl.maximum(high - window, 0)
    if CARRY:
        low = low // KEYS * KEYS
    span = _span(high - low, KEYS, MIN_SPAN, MAX_SPLITS)
    dims = tl.arange(0, V_PAD)
    top, total = -float("inf"), 0.0
    acc = tl.zeros((V_PAD,), tl.float32)
    for split in range(tl.cdiv(high - low, span)):
        row = (seq * num_splits + split).to(tl.int64) * H + head
        part = tl.load(parts + row * V_DIM + dims, mask=dims < V_DIM, other=0.0)
        top, total, acc = _merge(
            top, total, acc, tl.load(sums + row * 2), tl.load(sums + row * 2 + 1), part, 0
        )
    result = acc / _with_sink(total, top, sinks, head)
    at = out + (start.to(tl.int64) * H + head) * V_DIM + dims
    tl.store(at, result.to(out.dtype.element_ty), mask=dims < V_DIM)


# ---- Launching them ------------------------------------------------------------------------------


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k (T, K, D) and v (T, K, D'), each token contiguous, to their slots, (T,) int64."""
    widths = k[0].numel(), v[0].numel()
    _write_kv_kernel[(len(k),)](
        k_cache, v_cache, k, v, slots, k.stride(0), v.stride(0), *widths, triton.next_power_of_2(max(widths))
    )


class Tiles(NamedTuple):
    """Sets how much a program holds at a time, for head_dim 128."""

    rows: int  # rows of a query tile; each row is one head of one token
    keys: int  # keys of a key tile
    warps: int  # warps of a chunk's program; a decode's program has 4 with tensor cores
    stages: int  # how many key tiles are loaded at once

    def fit(self, dim: int) -> Tiles:
        """Return tiles with the same memory for head_dim `dim`. A product needs at least 16 rows and keys."""
        rows, keys = (min(max(16, num * 128 // dim), num) for num in self[:2])
        return self._replace(rows=rows, keys=keys)


# Registers (255 per thread) and shared memory limit the tiles. Larger tiles would spill or fail to launch.
TILES = {
    "sm75": Tiles(16, 16, 4, 2),  # Turing, 64 KiB: Triton does not use its tensor cores
    "sm80": Tiles(64, 32, 8, 3),  # Ampere, 163 KiB; smaller Ampere GPUs 99 KiB
    "sm89": Tiles(64, 32, 8, 3),  # Ada, and Blackwell without HBM, 99 KiB
    "sm90": Tiles(64, 64, 4, 2),  # Hopper, and Blackwell with HBM, 227 KiB
    "gfx942": Tiles(64, 32, 4, 2),  # AMD's CDNA 3, 64 KiB
}
FLOAT32 = Tiles(16, 16, 16, 1)  # on any GPU: no tensor core multiplies float32; whole rows are in registers


@functools.cache
def generation(device: torch.device) -> str:
    """Return the key in `TILES` for a device."""
    if device.type != "cuda":
        return "sm80"  # Triton's interpreter
    if torch.version.hip:
        return "gfx942"
    major, _ = capability = torch.cuda.get_device_capability(device)
    if major < 8:
        return "sm75"
    if capability < (8, 9):
        return "sm80"
    return "sm90" if major in (9, 10) else "sm89"


Launch = tuple[tuple[int, ...], dict[str, Any]]  # grid and constants


class Plan(NamedTuple):
    """Holds what the layers of one shape have in common in a step, so that the host computes it once."""

    launches: list[Launch]  # of decodes, and of chunks
    combining: list[Launch]  # if the splits of decodes are combined
    parts: tuple[Tensor, Tensor]  # memory for splits, which one layer after the other uses
    numbers: tuple[Any, ...]


class TritonAttention(PagedAttention):
    """Attends on any GPU that Triton supports, and on a CPU with its interpreter (TRITON_INTERPRET=1)."""

    name = "triton"
    capturable = is_placed = True

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int) -> None:
        super().__init__(metadata, block_size)
        self.plans: dict[Any, Plan] = {}  # by the shape and the settings of a layer

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        write_kv(cache.k, cache.v, whole_rows(k), whole_rows(v), self.metadata.slot_mapping)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        key = q.shape, v.shape[-2:], settings[:3]
        if key not in self.plans:
            self.plans[key] = self._plan(q, v.shape[-2], v.shape[-1], settings)
        plan, meta = self.plans[key], self.metadata
        out = q.new_empty(*q.shape[:2], v.shape[-1]) if settings.out is None else settings.out
        parts, lens = plan.parts, (meta.cu_seqlens_q, meta.seq_lens)
        tensors = out, *parts, q, cache.k, cache.v, meta.block_tables, *lens, settings.sinks
        for grid, constants in plan.launches:
            _attend_kernel[grid](*tensors, settings.alibi_slopes, *plan.numbers, **constants)
        for grid, constants in plan.combining:
            _combine_kernel[grid](out, *parts, *lens, settings.sinks, settings.window, **constants)
        return out

    def _plan(self, q: Tensor, num_kv_heads: int, v_dim: int, settings: Settings) -> Plan:
        """Return how layers of one shape attend in this step."""
        meta, window, (num_tokens, num_heads, k_dim) = self.metadata, settings.window, q.shape
        num_seqs, group = len(meta.seq_lens), num_heads // num_kv_heads
        if settings.softcap is None:
            scale, softcap = settings.scale * LOG2E, None
        else:
            scale, softcap = settings.scale / settings.softcap * 2 * LOG2E, settings.softcap * LOG2E
        k_pad, v_pad = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
        is_float32 = q.dtype == torch.float32
        tiles = (FLOAT32 if is_float32 else TILES[generation(q.device)]).fit(max(k_pad, v_pad))
        decode_tiles = tiles if is_float32 else tiles._replace(warps=4)
        if tiles.keys >= IN_BLOCK and self.block_size % IN_BLOCK == 0:
            warps = 2 if max(k_pad, v_pad) <= 128 else 4
            decode_tiles = Tiles(tiles.rows, IN_BLOCK, warps, IN_BLOCK_STAGES)
        max_keys = meta.max_seq_len if window is None else min(meta.max_seq_len, window + decode_tiles.keys)
        num_splits = min(-(-max_keys // MIN_SPAN), MAX_SPLITS)
        # With many sequences, a program computes all splits of a sequence. Otherwise they are combined later.
        turns = max(1, min(num_splits, MAX_PROGRAMS // (num_seqs * num_kv_heads)))
        held = num_seqs if turns > 1 else 0, num_splits, num_heads
        parts, sums = (torch.empty(*held, n, device=q.device, dtype=torch.float32) for n in (v_dim, 2))
        splits = {"MIN_SPAN": MIN_SPAN, "MAX_SPLITS": MAX_SPLITS}
        dims = {"K_DIM": k_dim, "V_DIM": v_dim, "K_PAD": k_pad, "V_PAD": v_pad}
        # Triton's interpreter would multiply the bits of bfloat16 as integers.
        upcast = q.dtype == torch.bfloat16 and triton.knobs.runtime.interpret
        shape = {"H": num_heads, "K": num_kv_heads, "BLOCK_SIZE": self.block_size, "UPCAST": upcast, **dims}

        def in_keys(tiles: Tiles) -> dict[str, Any]:
            return {"KEYS": tiles.keys, "CARRY": self.block_size % tiles.keys == 0}

        def launch(tiles: Tiles, rows: int, is_decode: bool) -> Launch:
            # If the query heads of a KV head do not fit into one tile, they are divided among several.
            num_parts = -(-group // rows)
            heads = -(-group // num_parts)
            tokens = 1 if is_decode else rows // heads
            num_tiles = num_seqs if is_decode else num_tokens // tokens + num_seqs
            tile = {"GROUP": heads, "DECODE": is_decode, "ROWS": rows, "TOKENS": tokens, **in_keys(tiles)}
            options = {"num_stages": tiles.stages, "num_warps": tiles.warps}
            grid = num_tiles, num_parts * num_kv_heads, turns if is_decode else 1
            return grid, {**shape, **tile, **splits, **options}

        launches, combining = list[Launch](), list[Launch]()
        if meta.has_decodes:
            rows = min(max(16, triton.next_power_of_2(group)), tiles.rows)
            launches.append(launch(decode_tiles, rows, True))
        if meta.has_decodes and turns > 1:
            sizes = {"num_splits": num_splits, "H": num_heads, "V_DIM": v_dim, "V_PAD": v_pad}
            combining.append(((num_seqs, num_heads), {**sizes, **in_keys(decode_tiles), **splits}))
        if meta.max_query_len > 1:
            launches.append(launch(tiles, tiles.rows, False))
        numbers = scale, softcap, window, num_seqs, num_splits, meta.block_tables.stride(0)
        return Plan(launches, combining, (parts, sums), numbers)
