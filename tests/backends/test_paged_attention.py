"""Paged attention against dense attention, sequence by sequence."""

import functools
import random

import pytest
import torch

from nanoengine.backends import int8_cache
from nanoengine.backends.cpu.compiled_attention import CompiledAttention
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.paged_attention import Settings
from nanoengine.backends.torch_attention import Int8Attention, TorchAttention
from tests import attention
from tests.attention import BOTH, CAPPED, MIXED, WITH_ALIBI, WITH_SINKS, case_id, dense
from tests.helpers import slow


@pytest.fixture(params=["torch", "compiled", "torch int8", "compiled int8"])
def check(request):
    """Return a function that checks one of the CPU's two backends, with K and V as they are or in int8."""
    name, int8 = request.param.split()[0], "int8" in request.param
    in_torch = Int8Attention if int8 else TorchAttention
    on_cpu = functools.partial(CompiledAttention, kernels=Kernels(int8_cache=int8))
    return functools.partial(attention.check_attention, on_cpu if name == "compiled" else in_torch, int8=int8)


LONG = [(1, 255), (1, 256), (1, 257), (1, 700), (9, 300), (1, 1), (1, 33)]  # of several spans of keys
MANY = [(1, 1 + 7 * i % 90) for i in range(40)]  # more than are decoded in one call
ODD_SHAPES = (2, 20), (3, 11), (1, 80), (2, 256)
CASES = [
    *((MIXED, {"block_size": size}) for size in (1, 3, 17, 256)),
    *((MIXED, {"window": window}) for window in (1, 5, 16, 1000)),
    *((MIXED, {"block_size": 8, "window": 9, **settings}) for settings in (CAPPED, WITH_SINKS, BOTH)),
    *((MIXED, {"block_size": 8, **settings}) for settings in (CAPPED, WITH_SINKS, BOTH)),
    *((MIXED, {"heads": n, "kv_heads": k}) for n, k in ((4, 4), (6, 2), (8, 1), (3, 3))),
    *((MIXED, {"heads": 2 * k, "kv_heads": k, "head_dim": d}) for k, d in ODD_SHAPES),
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


def in_dtype(dtype, *cases):
    return [(lens, {"dtype": dtype, **settings}) for lens, settings in cases]


IN_OTHERS = in_dtype(torch.bfloat16, *IN_BOTH_DTYPES, *IN_BFLOAT16)
IN_OTHERS += slow(*in_dtype(torch.float16, *IN_BOTH_DTYPES))


@pytest.mark.parametrize(("lens", "settings"), [*CASES, *IN_BOTH_DTYPES, *IN_OTHERS], ids=case_id)
def test_any_mix_of_prompts_chunks_and_decodes_equals_dense_attention(check, lens, settings):
    check(lens, **{"block_size": 16, **settings})


def test_a_long_prompt_s_scores_are_computed_in_slices(check, monkeypatch):
    monkeypatch.setattr("nanoengine.backends.torch_attention.SCORES_PER_SLICE", 4 * 90 * 7)
    check([(50, 90), (1, 40), (90, 90)], 8, softcap=2.0, sinks=attention.SINKS, alibi_slopes=attention.SLOPES)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [[3, 2, 20], [16, 4, 32], *slow([1, 1, 16], [96, 2, 64])], ids=str)
@pytest.mark.parametrize(
    "settings", [{"window": 70, **BOTH, **WITH_ALIBI}, *slow({}, {"window": 300})], ids=case_id
)
def test_a_decode_s_result_does_not_depend_on_who_shares_its_blocks(exact, int8, dtype, shape, settings):
    """To the last bit, so that no sampled token can. Sequences share nothing, a beginning, or everything."""
    block_size, kv_heads, head_dim = shape
    rng, generator = random.Random(block_size), torch.Generator().manual_seed(0)
    lens = [rng.choice([1, 16, 40, 256, 257, 300, 513, 700]) for _ in range(40)]
    num_blocks = 1 + sum(-(-n // block_size) for n in lens)
    unused = iter(range(1, num_blocks))
    tables = torch.zeros(len(lens), -(-700 // block_size), dtype=torch.int32)
    for i, n in enumerate(lens):
        shared = rng.choice([0, 64, 200, 256, 600, 700]) // block_size  # with any sequence before it
        if i:
            tables[i, :shared] = tables[rng.choice([0, 1, rng.randrange(i)]) % i, :shared]
        for column in range(-(-n // block_size)):
            tables[i, column] = tables[i, column] or next(unused)
    k, v = (torch.randn(num_blocks, block_size, kv_heads, head_dim, generator=generator) for _ in "kv")
    q = torch.randn(len(lens), 4, head_dim, generator=generator).to(dtype)
    window = settings.get("window") or 1000
    of_all = Settings(**{"scale": 0.2, "window": None, "softcap": None, "sinks": None, **settings})
    kernels = Kernels(dtype, int8, exact)

    def attend(rows):
        out = torch.zeros_like(q)
        of_rows = tables[rows].clone()
        for table, n in zip(of_rows, (lens[i] for i in rows), strict=True):
            table[: max(0, n - window) // block_size] = 0  # the null block, of NaN
        sequences = of_rows, torch.tensor([lens[i] for i in rows], dtype=torch.int32), torch.tensor(rows)
        kernels.decode_attention(out, q, cache, sequences, of_all)
        return out

    k[0] = v[0] = torch.nan  # the null block
    cache = KVCache(*((int8_cache.quantize(x) if int8 else x) for x in (k.to(dtype), v.to(dtype))))
    together = attend(range(len(lens)))
    shuffled = attend(rng.sample(range(len(lens)), len(lens)))
    assert torch.equal(shuffled, together)
    for i, n in enumerate(lens):
        assert torch.equal(attend([i])[i], together[i])
        if i % 2:
            continue
        slots = tables[i, torch.arange(n) // block_size].long() * block_size + torch.arange(n) % block_size
        held = (x.flatten(0, 1)[slots] for x in (cache.k, cache.v))
        held = (int8_cache.dequantize(x, torch.float32) if int8 else x for x in held)
        expected = dense(q[i : i + 1], *held, **{n: x for n, x in of_all._asdict().items() if n != "out"})[0]
        tolerance = attention.TOLERANCE[dtype]
        torch.testing.assert_close(together[i].double(), expected, atol=tolerance, rtol=tolerance)


def test_a_discarded_write_leaves_shared_blocks_untouched():
    cache = KVCache(torch.randn(3, 4, 1, 8), torch.randn(3, 4, 1, 8))
    before = cache.k[1:].clone()
    metadata = attention.metadata_of([(1, 8)], torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0]))
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    TorchAttention(metadata, 4)(q, k, k, cache, scale=1.0)
    assert torch.equal(cache.k[1:], before)
