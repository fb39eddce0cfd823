"""Paged attention held against dense attention, on any backend and device."""

from collections.abc import Sequence

import torch

from nanoengine.backends import int8_cache
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.step_inputs import AttentionMetadata

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Batches: (new tokens, tokens in all) per sequence.
MIXED = [(1, 1), (1, 40), (7, 7), (5, 33), (1, 16), (16, 16), (2, 17), (1, 100), (50, 90)]
ALL_FRESH = [(1, 1), (7, 7), (300, 300), (16, 16)]
ALL_DECODES = [(1, 1), (1, 40), (1, 256), (1, 257), (1, 700)]
SINKS, SLOPES = torch.tensor([-1.0, 0.5, 2.0, 30.0]), torch.tensor([0.5, 0.25, 0.0, 0.01])
CAPPED, WITH_SINKS, BOTH = {"softcap": 2}, {"sinks": SINKS}, {"softcap": 1.0, "sinks": SINKS}
WITH_ALIBI = {"alibi_slopes": SLOPES}


def case_id(value):
    """Return the settings of a case, for the test's name."""
    if isinstance(value, dict):
        return ",".join(name if isinstance(x, torch.Tensor) else f"{name}={x}" for name, x in value.items())
    return None


def dense(q, k, v, scale, window=None, softcap=None, sinks=None, alibi_slopes=None):
    """Compute causal attention of the last len(q) positions over k and v, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    distance = torch.arange(len(k))[-len(q) :, None] - torch.arange(len(k))
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v)


def metadata_of(
    lens: Sequence[tuple[int, int]], tables: torch.Tensor, slots: torch.Tensor, device: str = "cpu"
) -> AttentionMetadata[torch.Tensor]:
    new, total = (torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lens, strict=True))
    return AttentionMetadata(
        cu_seqlens_q=new.to(device),
        cu_seqlens_k=total.to(device),
        seq_lens=total.diff().to(device),
        block_tables=tables.to(device),
        slot_mapping=slots.to(device),
        max_query_len=max(n for n, _ in lens),
        max_seq_len=max(n for _, n in lens),
        has_cached_tokens=any(n < total for n, total in lens),
        num_leading_decodes=next((i for i, (n, _) in enumerate(lens) if n > 1), len(lens)),
    )


def check_attention(
    backend, lens, block_size, heads=4, kv_heads=2, head_dim=16, v_head_dim=None, dtype=torch.float32,
    stale=None, device="cpu", int8=False, **settings,
):  # fmt: skip
    """Blocks are scattered at random; `stale` fills the slots that hold no token of these sequences.

    Blocks of which a window sees nothing have fallen out of the tables, and the null block holds NaN.
    With an int8 cache, attention is that over what the rounded K and V stand for, of new tokens too.
    """
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = [-(-total // block_size) for _, total in lens]
    ids = (torch.randperm(sum(num_blocks), generator=generator) + 1).split(num_blocks)
    tables = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).int()
    dims = head_dim, v_head_dim or head_dim
    caches = [rand(sum(num_blocks) + 1, block_size, kv_heads, dim) for dim in dims]
    slots, past = [], []
    for table, (_, total) in zip(tables.long(), lens, strict=True):
        positions = torch.arange(total)
        slots.append(table[positions // block_size] * block_size + positions % block_size)
        past.append([cache.flatten(0, 1)[slots[-1]] for cache in caches])
    if stale is not None:
        for x, cache in enumerate(caches):
            cache.fill_(stale)
            for held, values in zip(slots, past, strict=True):
                cache.flatten(0, 1)[held] = values[x]
    if settings.get("window"):
        for table, (new, total) in zip(tables, lens, strict=True):
            table[: max(0, total - new + 1 - settings["window"]) // block_size] = 0
    for cache in caches:
        cache[0] = torch.nan
    num_tokens = sum(new for new, _ in lens)
    q = rand(num_tokens, heads, head_dim)
    k, v = (rand(num_tokens, kv_heads, dim) for dim in dims)
    new_slots = torch.cat([held[total - new :] for held, (new, total) in zip(slots, lens, strict=True)])
    metadata = metadata_of(lens, tables, new_slots, device)
    if int8:
        caches = [int8_cache.quantize(cache) for cache in caches]
    cache = KVCache(*(cache.to(device) for cache in caches))
    attention = backend(metadata, block_size)
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}
    out = attention(q.to(device), k.to(device), v.to(device), cache, scale=head_dim**-0.5, **there)
    assert out.shape == (num_tokens, heads, dims[1])
    assert out.dtype == dtype
    starts = metadata.cu_seqlens_q.tolist()
    for i, (new, _) in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        full_k, full_v = past[i]
        full_k[-new:], full_v[-new:] = k[rows], v[rows]
        if int8:
            held = map(int8_cache.quantize, (full_k, full_v))
            full_k, full_v = (int8_cache.dequantize(x, torch.float32) for x in held)
        expected = dense(q[rows], full_k, full_v, head_dim**-0.5, **settings)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[rows].cpu().double(), expected, atol=tolerance, rtol=tolerance)
