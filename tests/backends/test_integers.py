"""Products of quantized weights with activations rounded to 8 bits equal their definition to the last bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.cpu.packed_layers import PackedLinear
from tests.backends.test_kernels import DTYPES, quantized
from tests.helpers import run_tests


def rounded(x):
    """Round groups of activations, (T, G, inputs) float32, to (T, G, inputs) integers with scales (T, G)."""
    size = np.abs(x).max(2)
    is_used = np.isfinite(size) & (size >= np.float32(2**-100))
    inverse = np.divide(np.float32(127), size, where=is_used, out=np.zeros_like(size))
    integers = np.rint(np.where(is_used[..., None], x, 0) * inverse[..., None]).astype(np.int64)
    scales = np.where(is_used, size / np.float32(127), np.float32(0))
    return integers, np.where(np.isfinite(size), scales, np.float32("nan"))


def product(x, weight, bias):
    """Return x (T, I) times a quantized weight, plus bias: (T, N) float32, added group by group."""
    integers, scales = rounded(x.float().numpy().reshape(len(x), -1, weight.group))
    by_group = weight.integers.numpy().astype(np.int64).reshape(len(weight.integers), -1, weight.group)
    total = np.broadcast_to(bias.float().numpy(), (len(x), len(bias)))
    for g in range(by_group.shape[1]):
        exact = (integers[:, g] @ by_group[:, g].T).astype(np.float32)
        if weight.zeros is not None:
            exact = exact - integers[:, g].sum(1).astype(np.float32)[:, None] * weight.zeros[:, g].numpy()
        total = total + exact * (weight.scales[:, g].numpy() * scales[:, g, None])
    return torch.from_numpy(total)


@DTYPES
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "group"), [(130, 64, 16), (2, 512, 32), (64, 1024, 128), (200, 1040, 16)]
)
def test_a_product_equals_its_definition_and_a_row_does_not_depend_on_the_others(
    dtype, has_zeros, bits, num_outputs, num_inputs, group
):
    torch.manual_seed(0)
    weight = quantized(num_outputs, num_inputs, bits, group, has_zeros)
    weight.scales[0] = 2**-24
    bias, x = torch.randn(num_outputs).to(dtype), (torch.randn(100, num_inputs) * 3).to(dtype)
    bias[0] = 0
    x[1], x[2], x[3] = 1e-37, 0, x[3].abs().max() * x[3].sign()  # too small; zeros; the largest sums
    x[4] *= 2**-99  # products with the smallest scale are subnormal
    packed = PackedLinear(weight, bias, Kernels(dtype), dtype, activation_bits=8)
    out = packed(x)
    assert torch.equal(out, product(x, weight, bias).to(dtype))
    assert torch.equal(out[1:3], bias.expand(2, -1))
    for rows in ([7], [3, 39], range(6), range(13), range(50)):
        assert torch.equal(packed(x[rows]), out[rows])
    assert torch.equal(packed.weight, weight.dequantize(dtype))


@DTYPES
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_visible_in_its_own_row(dtype, bits, value):
    torch.manual_seed(0)
    x = torch.randn(40, 64).to(dtype)
    x[4, 40] = value
    layer = PackedLinear(quantized(70, 64, bits, 32, False), None, Kernels(dtype), dtype, activation_bits=8)
    for rows in (9, 40):
        assert layer(x[:rows]).isnan().any(1).tolist() == [t == 4 for t in range(rows)]


# vpdpbusd as Intel's manual defines it, for processors with AVX2 but without AVX-VNNI.
AVX_VNNI = """
#include <immintrin.h>
static inline __m256i emulated(__m256i sum, __m256i a, __m256i b) {
  typedef int numbers __attribute__((vector_size(32)));
  numbers total = (numbers)sum;
  for (int i = 0; i < 32; i++) total[i / 4] += ((unsigned char*)&a)[i] * ((signed char*)&b)[i];
  return (__m256i)total;
}
#define _mm256_dpbusd_avx_epi32 emulated
#define __AVXVNNI__ 1
"""


@pytest.mark.slow
def test_products_are_the_same_with_avx_vnni(tmp_path):
    if not shutil.which("g++") or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and a processor with AVX2")
    (tmp_path / "vnni.h").write_text(AVX_VNNI)
    selection = "definition and dtype1"  # the instructions do not depend on the dtype
    run_tests(__file__, selection=selection, CXX=f"g++ -march=x86-64-v3 -include {tmp_path / 'vnni.h'}")
