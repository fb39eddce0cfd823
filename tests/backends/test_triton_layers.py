"""The kernels between a decoder's products against PyTorch, executed as PTX, or on a GPU if there is one."""

import types

import pytest
import torch

from nanoengine.backends import triton_layers as layers
from nanoengine.backends.kv_cache import KVCache
from nanoengine.models.decoder import PlainKernels
from nanoengine.sampling.drawing import draw_chunks, in_chunks
from tests import launches
from tests.helpers import slow

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KERNELS = [name for name in vars(layers) if name.endswith("_kernel")]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {HALF: 4e-3, BRAIN: 1.6e-2, FULL: 1e-5}
DRAWS = [(HALF, 320), (BRAIN, 2560), (FULL, 2401), *slow((FULL, 320), (HALF, 2560), (BRAIN, 2401))]

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # the interpreter needs none


@pytest.fixture(params=["sm90", *slow("sm75", "sm80", "sm89")])
def generation(request, monkeypatch):
    """Execute the kernels as compiled for each generation of GPUs, or on the GPU that is there."""
    torch.manual_seed(0)  # the tolerance holds for most random numbers
    if ON_GPU:
        return "this GPU" if request.param == "sm90" else pytest.skip("the GPU itself runs them")
    if reason := launches.obstacle():
        pytest.skip(reason)
    for name in KERNELS:
        monkeypatch.setattr(layers, name, launches.Emulated(getattr(layers, name), request.param))
    return request.param


def skip_without_bfloat16(generation, dtype):
    if (generation, dtype) == ("sm75", BRAIN):
        pytest.skip("float16 there")


def check(out, expected, dtype):
    assert out.dtype == expected.dtype
    assert torch.allclose(out.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL])
@pytest.mark.parametrize("size", [48, 1000])
def test_norms_equal_pytorch_s(generation, dtype, size):
    skip_without_bfloat16(generation, dtype)
    x, residual, weight = torch.randn(3, 3, size, device=DEVICE).to(dtype)
    kernels, given = layers.TritonKernels(PlainKernels), (weight[0], 1e-6)
    out, total = kernels.rms_norm(x, *given)
    check(out, PlainKernels.rms_norm(x, *given)[0], dtype)
    assert total is x
    both = kernels.rms_norm(x, *given, residual), PlainKernels.rms_norm(x, *given, residual)
    for got, expected in zip(*both, strict=True):
        check(got, expected, dtype)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL])
def test_silu_equals_pytorch_s(generation, dtype):
    skip_without_bfloat16(generation, dtype)
    gate_up = torch.randn(3, 2 * 1100, device=DEVICE).to(dtype)
    check(layers.TritonKernels(PlainKernels).silu_and_mul(gate_up), PlainKernels.silu_and_mul(gate_up), dtype)


SHAPES = [(4, 2, 16), (16, 8, 128), (9, 3, 24), (12, 12, 64)]


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("is_normed", [True, False])
def test_one_launch_prepares_queries_and_writes_keys_and_values(
    generation, dtype, heads, kv_heads, dim, is_normed
):
    skip_without_bfloat16(generation, dtype)
    qkv = torch.randn(3, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    q, k, v = (x.view(3, -1, dim) for x in qkv.split([heads * dim, *[kv_heads * dim] * 2], dim=1))
    weights = [torch.randn(dim, device=DEVICE).to(dtype) if is_normed else None for _ in "qk"]
    angles = torch.rand(3, 1, dim // 2, device=DEVICE).repeat(1, 1, 2)
    of_heads = weights, 1e-6, (angles.cos().to(dtype), angles.sin().to(dtype))
    wanted = PlainKernels.norm_rotate_both(q, k, v, *of_heads)
    slots = torch.tensor([9, 0, 6], device=DEVICE)
    cache = KVCache(*(torch.randn(4, 4, kv_heads, dim, device=DEVICE).to(dtype) for _ in "kv"))
    before = KVCache(cache.k.clone(), cache.v.clone())
    attention = types.SimpleNamespace(place_for=lambda q, cache: (torch.full_like(q, torch.nan), slots))
    kernels, where = layers.TritonKernels(PlainKernels), {"attention": attention, "cache": cache}
    got = kernels.norm_rotate_both(q, k, v, *of_heads, **where)
    assert got[1] is cache.k
    assert got[2] is cache.v
    check(got[0], wanted[0], dtype)
    for held, old, x in ((cache.k, before.k, wanted[1]), (cache.v, before.v, wanted[2])):
        rows = held.flatten(0, 1)
        others = torch.ones(len(rows), dtype=torch.bool, device=DEVICE).index_fill_(0, slots, False)
        assert torch.equal(rows[others], old.flatten(0, 1)[others])
        check(rows[slots], x, dtype)


def test_without_a_place_for_them_pytorch_rotates_keys():
    q, k, v = (torch.randn(2, 1, 16) for _ in "qkv")
    rope = torch.ones(2, 1, 16), torch.zeros(2, 1, 16)
    where = {"attention": types.SimpleNamespace(place_for=lambda q, cache: None), "cache": KVCache(k, v)}
    got = layers.TritonKernels(PlainKernels).norm_rotate_both(q, k, v, (None, None), 0.0, rope, **where)
    assert all(map(torch.equal, got, (q, k, v)))


@pytest.mark.parametrize(("dtype", "vocab_size"), DRAWS)
def test_tokens_are_those_that_pytorch_draws(generation, dtype, vocab_size):
    skip_without_bfloat16(generation, dtype)
    logits = (5 * torch.randn(8, vocab_size, device=DEVICE)).to(dtype)
    logits[1:, 7], logits[2:, 100:] = -torch.inf, -torch.inf
    logits[3] = -torch.inf
    logits[3, vocab_size - 1] = 0.0  # the only token left
    largest = logits.amax(-1, keepdim=True).float()
    divisors = torch.linspace(0.3, 1.3, 8, device=DEVICE).unsqueeze(1)
    u = torch.tensor([1e-9, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1 - 1e-9], device=DEVICE, dtype=torch.float64)
    given = in_chunks(logits)[0], largest, divisors, u
    assert torch.equal(layers.draw_chunks(*given), draw_chunks(*given))
