"""A KV cache in 8 bits: what is stored, and that no schedule changes an answer."""

import pytest
import torch

from nanoengine import LLM
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.int8_cache import dequantize, in_int8, quantize
from nanoengine.backends.kv_cache import KVSpec
from tests.backends.test_kernels import DTYPES
from tests.helpers import DEMO


def test_a_head_is_rounded_to_127ths_of_its_largest_number_and_ties_to_even():
    x = torch.tensor([[[127.0, 2.5, -3.5, 0.4], [0.0, -0.254, 0.0032, 0.0]]])
    rows = quantize(x)
    assert (rows.shape, rows.dtype) == ((1, 2, 8), torch.int8)
    row = rows.flatten()
    assert row[:8].tolist() == [127, 2, -4, 0, 0, -127, 2, 0]  # all heads' integers, then their scales
    assert row[8:].clone().view(torch.float32).tolist() == [1.0, torch.tensor(0.254).div(127).item()]
    assert dequantize(rows, torch.float32)[0, 0].tolist() == [127.0, 2.0, -4.0, 0.0]


@DTYPES
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(8, 128, 128), (3, 11, 6), (1, 300, 64), (2, 32, 16)])
def test_the_kernel_writes_what_the_definition_says_bit_for_bit(dtype, heads, k_dim, v_dim):
    """Most of K is halfway between integers."""
    torch.manual_seed(0)
    k = torch.rand(60, heads, 1) * torch.cat((torch.ones(1), (torch.arange(1, k_dim) % 127 - 63.5) / 127))
    k = k.to(dtype)
    v = torch.randn(60, heads + 1, v_dim).to(dtype)[:, 1:]  # a part of a projection: its tokens are apart
    for token, number in enumerate((0.0, torch.nan, torch.inf, -torch.inf, 1e-38, 6e-8, 5e-31)):
        k[token, 0], v[token, -1, 0] = 0, number
        k[token, 0, -1] = number
    slots = torch.randperm(5 * 16)[:60]
    before = [torch.randint(-128, 128, (5, 16, heads, dim + 4), dtype=torch.int8) for dim in (k_dim, v_dim)]
    caches = [x.clone() for x in before]
    Kernels(dtype, int8_cache=True).write_kv(*caches, k, v, slots)
    for x, cache, old in zip((k, v), caches, before, strict=True):
        expected = old.clone()
        expected.flatten(0, 1)[slots] = quantize(x)
        assert torch.equal(cache, expected)
    is_nan = dequantize(caches[0].flatten(0, 1)[slots], torch.float32).isnan()
    assert is_nan[1:4, 0].all()
    assert is_nan.sum() == 3 * k_dim


def test_a_token_of_qwen3_takes_half_the_bytes():
    spec = KVSpec(8, 128, 128, torch.bfloat16, window=5)
    assert 28 * spec.bytes_per_token == 114_688
    assert in_int8([spec] * 28) == [KVSpec(8, 132, 132, torch.int8, window=5)] * 28
    assert 28 * in_int8([spec])[0].bytes_per_token == 59_136
    counts = []
    for settings in ({}, {"kv_cache_dtype": "int8"}):
        with LLM(str(DEMO), dtype="float32", kv_cache_bytes=1 << 24, **settings) as llm:
            counts.append(llm.llm_engine.started.num_blocks + 1)
    assert counts == [128, (1 << 24) // ((1 << 17) * 68 // 256)]  # of a head, 68 bytes instead of 256
