"""Paged attention against dense attention, sequence by sequence."""

import functools

import pytest
import torch

from nanoengine.backends.attention import Settings, TorchAttention
from nanoengine.backends.cpu.attention import CompiledAttention
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.kv_cache import KVCache
from tests.attention import (
    BOTH,
    CAPPED,
    MIXED,
    SINKS,
    SLOPES,
    TOLERANCE,
    WITH_ALIBI,
    WITH_SINKS,
    case_id,
    check_attention,
    metadata_of,
)


@pytest.fixture(params=["torch", "compiled"])
def check(request):
    """Return a function that checks one of the CPU's two backends."""
    return functools.partial(check_attention, on_cpu if request.param == "compiled" else TorchAttention)


def on_cpu(metadata, block_size):
    return CompiledAttention(metadata, block_size, Kernels())


LONG = [(1, 255), (1, 256), (1, 257), (1, 700), (9, 300), (1, 1), (1, 33)]  # of several spans of keys
MANY = [(1, 1 + 7 * i % 90) for i in range(40)]  # more than are decoded in one call
CASES = [
    *((MIXED, {"block_size": size}) for size in (1, 3, 17, 256)),
    *((MIXED, {"window": window}) for window in (1, 5, 16, 1000)),
    *((MIXED, {"block_size": 8, "window": 9, **settings}) for settings in (CAPPED, WITH_SINKS, BOTH)),
    *((MIXED, {"block_size": 8, **settings}) for settings in (CAPPED, WITH_SINKS, BOTH)),
    *((MIXED, {"heads": n, "kv_heads": k}) for n, k in ((4, 4), (6, 2), (8, 1), (3, 3))),
    *(
        (MIXED, {"heads": 2 * k, "kv_heads": k, "head_dim": d})
        for k, d in ((2, 20), (3, 11), (1, 80), (2, 256))
    ),
    (MIXED, {"head_dim": 24, "v_head_dim": 16}),
    (MIXED, {"head_dim": 16, "v_head_dim": 24, "softcap": 3.0}),
    (MANY, {}),
    *((MANY + MIXED, {"stale": stale}) for stale in (torch.nan, torch.inf)),  # other sequences' blocks
]
IN_BOTH_DTYPES = [
    (MIXED, {}),
    *((MIXED, {"block_size": 8, **WITH_ALIBI, **settings}) for settings in ({}, {"window": 9}, BOTH)),
    *((LONG, settings) for settings in ({}, {"window": 300}, BOTH, {"window": 300, **WITH_ALIBI})),
]
SHAPES = [(2, 32, 16), (1, 128, 3), (3, 64, 1), (2, 96, 17)]  # of the processor's own instructions
IN_BFLOAT16 = [
    (lens, {"heads": 2 * k, "kv_heads": k, "head_dim": d, "block_size": size, **settings})
    for k, d, size in SHAPES
    for lens, settings in ((MIXED + LONG, {"stale": torch.nan}), (MIXED, {"v_head_dim": 64, "window": 5}))
]


@pytest.mark.parametrize(
    ("lens", "settings"),
    [
        *CASES,
        *((lens, {"dtype": dtype, **settings}) for lens, settings in IN_BOTH_DTYPES for dtype in TOLERANCE),
        *((lens, {"dtype": torch.bfloat16, **settings}) for lens, settings in IN_BFLOAT16),
    ],
    ids=case_id,
)
def test_any_mix_of_prompts_chunks_and_decodes_equals_dense_attention(check, lens, settings):
    check(lens, **{"block_size": 16, **settings})


def test_a_long_prompt_s_scores_are_computed_in_slices(check, monkeypatch):
    monkeypatch.setattr("nanoengine.backends.attention.SCORES_PER_SLICE", 4 * 90 * 7)
    check([(50, 90), (1, 40), (90, 90)], 8, softcap=2.0, sinks=SINKS, alibi_slopes=SLOPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_s_result_does_not_depend_on_the_batch(dtype):
    """To the last bit, so that no sampled token can."""
    generator = torch.Generator().manual_seed(0)
    lens = [1, 40, 256, 700, 300]
    q = torch.randn(len(lens), 4, 32, generator=generator).to(dtype)
    cache = KVCache(*(torch.randn(50, 32, 2, 32, generator=generator).to(dtype) for _ in "kv"))
    tables = torch.stack([torch.randperm(50, generator=generator)[:22] for _ in lens]).int()
    kernels = Kernels()

    def attend(rows):
        out = torch.zeros_like(q)
        lengths = torch.tensor([lens[i] for i in rows], dtype=torch.int32)
        settings = Settings(0.2, None, None, None)
        kernels.decode_attention(out, q, cache, (tables[rows], lengths, torch.tensor(rows)), settings)
        return out

    together = attend([0, 1, 2, 3, 4])
    for i in range(len(lens)):
        assert torch.equal(attend([i])[i], together[i])


def test_a_discarded_write_leaves_shared_blocks_untouched():
    cache = KVCache(torch.randn(3, 4, 1, 8), torch.randn(3, 4, 1, 8))
    before = cache.k[1:].clone()
    metadata = metadata_of([(1, 8)], torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0]))
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    TorchAttention(metadata, 4)(q, k, k, cache, scale=1.0)
    assert torch.equal(cache.k[1:], before)
