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


def attend(
    backend, lens, block_size, heads=4, kv_heads=2, head_dim=16, v_head_dim=None, dtype=torch.float32,
    stale=1.0, device="cpu", int8=False, seeds=None, num_padding=0, max_seq_len=0, **settings,
):  # fmt: skip
    """Return the outputs of sequences, each random with its own seed, and those of dense attention.

    Blocks are scattered at random; `stale` fills the slots that hold no token of these sequences.
    Blocks of which a window sees nothing have fallen out of the tables, and the null block holds NaN.
    As in a CUDA graph, num_padding tokens in the null block follow, and max_seq_len may be longer.
    With an int8 cache, attention is that over what the rounded K and V stand for, of new tokens too.
    """
    num_blocks = [-(-total // block_size) for _, total in lens]
    ids = (torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(0)) + 1).split(num_blocks)
    dims = head_dim, v_head_dim or head_dim
    caches = [torch.full((sum(num_blocks) + 1, block_size, kv_heads, dim), stale).to(dtype) for dim in dims]
    sequences, inputs, tables, slots = [], [], [], []
    for seed, table, (num_new, total) in zip(seeds or range(len(lens)), ids, lens, strict=True):
        generator, positions = torch.Generator().manual_seed(seed), torch.arange(total)
        shapes = (num_new, heads, head_dim), *((total, kv_heads, dim) for dim in dims)
        q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        held = table[positions // block_size] * block_size + positions % block_size
        for cache, x in zip(caches, (k, v), strict=True):
            cache.flatten(0, 1)[held[:-num_new]] = x[:-num_new]
        first_seen = max(0, total - num_new + 1 - (settings.get("window") or total)) // block_size
        sequences.append((q, k, v))
        inputs.append((q, k[-num_new:], v[-num_new:]))
        tables.append(table * (torch.arange(len(table)) >= first_seen))
        slots.append(held[-num_new:])
    for _ in range(num_padding):
        inputs.append([torch.full_like(x[:1], torch.nan) for x in inputs[0]])
        tables.append(torch.tensor([0]))
        slots.append(torch.tensor([0]))
    for cache in caches:
        cache[0] = torch.nan
    cache = KVCache(*((int8_cache.quantize(x) if int8 else x).to(device) for x in caches))
    arrays = [torch.cat(x).to(device) for x in zip(*inputs, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int()
    metadata = metadata_of([*lens, *[(1, 1)] * num_padding], padded, torch.cat(slots), device)
    metadata = metadata._replace(max_seq_len=max(metadata.max_seq_len, max_seq_len))
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}
    out = backend(metadata, block_size)(*arrays, cache, scale=head_dim**-0.5, **there)
    assert out.shape == (len(arrays[0]), heads, dims[1])
    assert out.dtype == dtype
    expected = []
    for q, *kv in sequences:
        if int8:
            kv = [int8_cache.dequantize(int8_cache.quantize(x), torch.float32) for x in kv]
        expected.append(dense(q, *kv, head_dim**-0.5, **settings))
    return out.cpu().split([len(q) for q, _, _ in inputs])[: len(lens)], expected


def check_attention(*arguments, **settings):
    """Assert that a backend computes dense attention: see `attend`."""
    for out, expected in zip(*attend(*arguments, **settings), strict=True):
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
