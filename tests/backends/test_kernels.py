"""The compiled kernels against what PyTorch computes, for each type of number they take.

The other instruction sets that this processor has are tested by the same tests, compiled for them.
"""

import ctypes
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nanoengine.backends import int8_cache
from nanoengine.backends.cpu.compiled_attention import CompiledAttention
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.cpu.packed_layers import CompiledLayer, PackedLinear, pack_weights
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.paged_attention import GroupedAttention, Settings
from nanoengine.backends.quantization import Quantized, quantize
from nanoengine.checkpoints.decoder_config import DecoderConfig
from nanoengine.models.decoder import DecoderLayer, RMSNorm, rotate
from tests.attention import metadata_of
from tests.helpers import run_tests


def kernels_and_inputs(dtype, *shapes):
    torch.manual_seed(0)  # of what tests draw besides, too
    return Kernels(), *((torch.randn(shape) * 3).to(dtype) for shape in shapes)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def same(ours, theirs):
    """Assert that values are equal, but for a few last bits where an intermediate was rounded otherwise."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.2e-3}[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert (ours != theirs).float().mean() < (1 if ours.dtype == torch.float32 else 0.02)


@DTYPES
def test_rms_norm_equals_the_module_and_keeps_its_inputs(dtype):
    kernels, x, residual = kernels_and_inputs(dtype, (50, 96), (50, 96))
    norm = RMSNorm(96, 1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    before = x.clone(), residual.clone()
    out, total = kernels.rms_norm(x, norm.weight, 1e-5, residual)
    same(out, norm(x + residual)[0])
    assert torch.equal(total, x + residual)
    same(kernels.rms_norm(x, norm.weight, 1e-5)[0], norm(x)[0])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 22, 128])
def test_norm_rotate_normalizes_and_rotates_a_slice_of_a_projection(dtype, head_dim):
    kernels, qkv, cos, sin = kernels_and_inputs(dtype, (9, 7 * head_dim), (9, 1, head_dim), (9, 1, head_dim))
    norm = RMSNorm(head_dim, 1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    x = qkv[:, 2 * head_dim :].view(9, 5, head_dim)
    same(kernels.norm_rotate(x, norm.weight, 1e-5, cos, sin), rotate(norm(x)[0], cos, sin))
    same(kernels.norm_rotate(x, None, 0.0, cos, sin), rotate(x, cos, sin))


@DTYPES
def test_silu_and_mul_equals_silu_of_one_half_times_the_other(dtype):
    kernels, gate_up = kernels_and_inputs(dtype, (11, 2 * 70))
    gate_up[0, :6] = torch.tensor([0.0, 90.0, -90.0, 1e4, -1e4, 20.0]).to(dtype)
    gate_up[0, 6] = torch.finfo(dtype).min
    gate, up = gate_up.chunk(2, dim=-1)
    same(kernels.silu_and_mul(gate_up), nn.functional.silu(gate) * up)
    gate_up[3, 5] = float("nan")
    assert kernels.silu_and_mul(gate_up).isnan().sum() == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_subnormal_numbers_does_not_depend_on_the_other_rows(bits):
    """AMX takes them for 0, and so has to what computes a few rows."""
    kernels, x = kernels_and_inputs(torch.bfloat16, (20, 512))
    weight = quantized(70, 512, bits, 128, has_zeros=True)
    packed = PackedLinear(weight, None, kernels, torch.bfloat16)
    for size in (1e-36, 1e-38, 1e-40):
        small = (x.float() * size).bfloat16()
        together = packed(small)
        assert together.any() or size < 1e-39
        for rows in ([7], [0, 19], range(3)):
            assert torch.equal(packed(small[rows]), together[rows])


def quantized(num_outputs, num_inputs, bits, group, has_zeros):
    """Return random integers, scales and zeros. Two rows have the extreme integers, another the scale 0."""
    low, shape = -(1 << (bits - 1)), (num_outputs, num_inputs // group)
    integers = torch.randint(low, -low, (num_outputs, num_inputs), dtype=torch.int8)
    integers[-2:] = torch.tensor([[low], [-low - 1]])[-num_outputs:]
    scales = ((torch.rand(shape) - 0.5) * 0.1).half().float()
    scales[num_outputs // 3] = 0
    zeros = ((torch.rand(shape) - 0.5) * -2 * low).half().float() if has_zeros else None
    return Quantized(integers, scales, zeros, bits)


SHAPES = (130, 64, 16), (1, 512, 32), (64, 1024, 128), (200, 1040, 16)
# Bits of a weight (0: it is not quantized), whether it has zeros, outputs, inputs and the size of its groups.
WEIGHTS = [
    *((0, False, *shape, 0) for shape in itertools.product((1, 17, 64, 65, 200), (2, 6, 64, 1026))),
    *((bits, zeros, *shape) for bits, zeros, shape in itertools.product((4, 8), (False, True), SHAPES)),
    *((bits, False, 70, 8224, 32) for bits in (0, 4)),  # multiplied by more rows than the caches hold
]


@DTYPES
@pytest.mark.parametrize(("bits", "has_zeros", "num_outputs", "num_inputs", "group"), WEIGHTS)
def test_a_product_with_a_packed_weight_and_its_rows_equal_those_of_what_it_stands_for(
    dtype, bits, has_zeros, num_outputs, num_inputs, group
):
    num_rows = 299 if num_inputs > 8000 else 100
    shapes = (num_outputs,), (num_rows, num_inputs), (num_outputs, num_inputs)
    kernels, bias, x, weight = kernels_and_inputs(dtype, *shapes)
    stands_for = weight.double()
    if bits:
        weight = quantized(num_outputs, num_inputs, bits, group, has_zeros)
        by_group = weight.integers.double().unflatten(1, (-1, group))
        if has_zeros:
            by_group -= weight.zeros.double().unsqueeze(2)
        stands_for = (by_group * weight.scales.double().unsqueeze(2)).flatten(1)
        assert torch.equal(weight.dequantize(torch.float32).double(), stands_for.float().double())
    else:
        assert kernels.can_multiply(weight)
    for b in (bias,) if num_rows > 100 else (None, bias):  # the largest takes long
        packed = PackedLinear(weight, b, kernels, dtype)
        assert torch.equal(packed.weight, stands_for.float().to(dtype))
        ids = torch.tensor([[num_outputs - 1, 0], [num_outputs // 2] * 2])
        assert torch.equal(packed.rows(ids), packed.weight[ids])
        out, exact = packed(x), x.double() @ stands_for.T + (0 if b is None else b.double())
        # Sums are float32's; what is stored has the type's rounding.
        tolerance = torch.finfo(dtype).eps * exact.abs() + 5e-7 * (x.double().abs() @ stands_for.T.abs())
        assert ((out.double() - exact).abs() <= tolerance).all()
        later = range(60, 70), range(num_rows // 2, num_rows // 2 + 33), range(num_rows - 9, num_rows)
        for rows in ([7], [0, 39], *map(range, (0, 5, 6, 7, 12, 13, 16, 25, 50)), *later):
            assert torch.equal(packed(x[rows]), out[rows]), "a row depends on the others"
        assert torch.equal(packed(x.unsqueeze(1)), out.unsqueeze(1))  # rows of any shape
    if not bits:
        beyond = torch.arange(num_outputs, packed.packed.shape[0] * packed.packed.shape[2])
        assert not packed.rows(beyond).any()


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (6, 64), (4, 32)])
def test_quantization_is_as_exact_as_its_groups_allow(bits, group):
    torch.manual_seed(0)
    weight = torch.randn(70, 1024) * torch.rand(70, 1) * 10
    weight[3], weight[4, :group] = 0, 1e-7 * torch.randn(group)
    made = quantize(weight, bits)
    assert made.scales.shape == (70, 1024 // group)
    assert torch.equal(made.scales, made.scales.half().float())
    assert not made.integers[3].any()
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    assert low <= made.integers.min() <= made.integers.max() <= high
    steps = made.scales.abs().repeat_interleave(group, 1)
    error = (made.dequantize(torch.float32) - weight).abs()
    of_groups = weight.unflatten(1, (-1, group))
    scales = (of_groups.abs().amax(2, keepdim=True) / high).half().float().clamp(min=2**-24)
    plain = (of_groups / scales).round() * scales
    if bits == 8:
        assert (error <= steps * 0.51 + 1e-7).all()
    else:  # no group is worse than without a search, and the whole much better
        searched = made.dequantize(torch.float32).view_as(of_groups)
        ours, theirs = ((x - of_groups).square().sum(2) for x in (searched, plain))
        assert (ours <= theirs).all()
        assert ours.sum() < (0.85 if bits == 4 else 0.9) * theirs.sum()


def test_a_weight_that_cannot_be_divided_into_groups_or_that_kernels_do_not_support_is_refused():
    kernels = Kernels()
    assert not kernels.can_multiply(torch.empty(4, 3, dtype=torch.bfloat16))  # two inputs lie side by side
    assert kernels.can_multiply(torch.empty(4, 3))
    assert not kernels.can_multiply(torch.empty(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="1100 inputs cannot be divided"):
        quantize(torch.zeros(2, 1100), 4)
    for num_inputs, group in ((1024, 128), (1088, 64), (1056, 32), (1040, 16)):
        assert quantize(torch.zeros(2, num_inputs), 8).group == group


SOURCES, TARGETS = torch.tensor([2, 0, 5]), torch.tensor([2, 4, 1])  # in place, or to another


def close(ours, theirs):
    """Assert that values are equal up to the order of sums."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[ours.dtype]
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance)


def run_states(kernel, arguments, states):
    """Run a kernel on whole sequences and token by token, with the same bits. Returns outputs and states."""
    whole, stepwise = states.clone(), states.clone()
    out = kernel(*arguments, whole, (SOURCES, TARGETS))
    rows, sources = [], SOURCES
    for t in range(out.shape[1]):
        parts = [x[:, t : t + 1].contiguous() if x.dim() > 2 else x for x in arguments]
        rows.append(kernel(*parts, stepwise, (sources, TARGETS)))
        sources = TARGETS
    assert torch.equal(torch.cat(rows, 1), out)
    assert torch.equal(stepwise, whole)
    others = [slot for slot in range(len(states)) if slot not in TARGETS]
    assert torch.equal(whole[others], states[others])
    return out, whole[TARGETS]


@DTYPES
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_conv_step_computes_the_convolution_s_next_output(dtype, silu, has_bias):
    kernels, x, weight, bias, states = kernels_and_inputs(dtype, (3, 40), (40, 4), (40,), (6, 40, 4))
    x[0, 0], bias[0] = torch.finfo(dtype).min, 0
    weight[0] = torch.tensor([0.0, 0, 0, 1]).to(dtype)
    before, last = states.clone(), bias if has_bias else None
    out = kernels.conv_step(x, weight, last, states, (SOURCES, TARGETS), silu)
    inputs = torch.cat((before[SOURCES], x.unsqueeze(-1)), -1)
    expected = nn.functional.conv1d(inputs.float(), weight.float().unsqueeze(1), groups=40)[..., -1]
    expected = (expected + (bias.float() if has_bias else 0)).to(dtype)
    close(out, nn.functional.silu(expected) if silu else expected)
    assert torch.equal(states[TARGETS], inputs[..., 1:])
    assert torch.equal(states[[0, 3, 5]], before[[0, 3, 5]])


@DTYPES
@pytest.mark.parametrize("of_rows", [False, True])
def test_the_delta_rule_equals_its_definition(dtype, of_rows):
    """With a decay of each head, or of each of its rows."""
    of_q, of_v, of_states = (3, 5, 2, 16), (3, 5, 4, 9), (6, 4, 16, 9)
    kernels, q, k, v, states = kernels_and_inputs(dtype, of_q, of_q, of_v, of_states)
    states = states.float()
    decay, beta = -torch.rand(3, 5, 4, 16 if of_rows else 1), torch.rand(3, 5, 4)
    # the kernel takes (N, T, H) for a decay of each head
    arguments = q, k, v, decay if of_rows else decay[..., 0].contiguous(), beta
    out, last = run_states(kernels.delta_rule, arguments, states)
    q, k = (nn.functional.normalize(x.float(), dim=-1).repeat_interleave(2, 2) for x in (q, k))
    state, rows = states[SOURCES], []
    for t in range(5):
        state = state * decay[:, t].exp().unsqueeze(-1)
        change = (v[:, t].float() - torch.einsum("nhdv,nhd->nhv", state, k[:, t])) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        rows.append(torch.einsum("nhdv,nhd->nhv", state, q[:, t]) / 4)
    close(out, torch.stack(rows, 1))
    close(last, state)


@DTYPES
def test_mamba2_equals_its_definition(dtype):
    of_b = 3, 5, 2, 19
    kernels, x, b, c, states = kernels_and_inputs(dtype, (3, 5, 4, 7), of_b, of_b, (6, 4, 7, 19))
    states, dt, a, d = states.float(), torch.rand(3, 5, 4), -torch.rand(4), torch.randn(4)
    inputs = x, dt, b, c
    out, last = run_states(lambda x, dt, b, c, *at: kernels.mamba2(x, dt, a, b, c, d, *at), inputs, states)
    x, b, c = x.float(), b.float().repeat_interleave(2, 2), c.float().repeat_interleave(2, 2)
    state, rows = states[SOURCES], []
    for t in range(5):
        step = dt[:, t, :, None, None]
        state = state * (step * a[:, None, None]).exp() + step * x[:, t, ..., None] * b[:, t, :, None]
        rows.append((state * c[:, t, :, None]).sum(-1) + x[:, t] * d[:, None])
    close(out, torch.stack(rows, 1))
    close(last, state)


@DTYPES
def test_mamba_equals_its_definition(dtype):
    kernels, x, b, c, states = kernels_and_inputs(dtype, (3, 5, 33), (3, 5, 16), (3, 5, 16), (6, 33, 16))
    states, dt, a = states.float(), torch.rand(3, 5, 33), -torch.rand(33, 16)

    out, last = run_states(lambda x, dt, b, c, *at: kernels.mamba(x, dt, a, b, c, *at), (x, dt, b, c), states)
    state, rows = states[SOURCES], []
    for t in range(5):
        step = dt[:, t, :, None]
        state = state * (step * a).exp() + step * x[:, t, :, None].float() * b[:, t, None].float()
        rows.append((state * c[:, t, None].float()).sum(-1))
    close(out, torch.stack(rows, 1))
    close(last, state)


PLAINLY = Settings(0.3, None, None, None)


@DTYPES
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("settings", [{}, {"window": 70}, {"window": 300}])
def test_a_prompt_s_attention_does_not_depend_on_how_it_is_divided(dtype, settings, int8):
    """To the last bit: chunks come from how busy the engine is."""
    _, q, *kv = kernels_and_inputs(dtype, (600, 4, 22), (45, 16, 2, 22), (45, 16, 2, 30))
    kernels, cache = Kernels(dtype, int8), KVCache(*map(int8_cache.quantize, kv) if int8 else kv)
    table = torch.randperm(45, generator=torch.Generator().manual_seed(1))[:38].int()

    def attend(*ends):
        out = torch.full((600, 4, 30), torch.nan, dtype=dtype)
        for start, end in itertools.pairwise((0, *ends)):
            rows = slice(start, end)
            kernels.prefill_attention(out[rows], q[rows], cache, table, end, PLAINLY._replace(**settings))
        return out

    whole = attend(600)
    assert not whole.isnan().any()
    for ends in ([1, 600], [128, 600], [250, 257, 513, 600], range(37, 601, 563)):
        assert torch.equal(attend(*ends), whole)


def test_a_weight_of_attention_is_the_softmax_of_its_score_to_the_last_bits():
    """Down to e^-87. Each value is a unit vector, so that the result is the weights."""
    scores = torch.cat([torch.linspace(0, -1, 32), torch.linspace(-1, -86, 32)])
    k, v = torch.zeros(2, 32, 1, 64), torch.eye(64).view(2, 32, 1, 64)
    k.view(64, 64)[:, 0] = scores
    q, lengths = torch.eye(1, 64).view(1, 1, 64), torch.tensor([64], dtype=torch.int32)
    kernels, cache, out, table = Kernels(), KVCache(k, v), torch.empty(2, 1, 64), torch.tensor([[0, 1]]).int()
    settings = PLAINLY._replace(scale=1)
    kernels.decode_attention(out[:1], q, cache, (table, lengths, torch.tensor([0])), settings)
    kernels.prefill_attention(out[1:], q, cache, table[0], 64, settings)
    expected = scores.double().softmax(0)
    error = (out.view(2, 64) / expected - 1).abs()
    assert error[:, :32].max() < 4e-7
    assert (error < 4e-7 + scores.abs() * 2**-24).all()


@DTYPES
def test_nan_in_a_sequence_s_own_cache_is_visible(dtype):
    kernels, q, k, v = kernels_and_inputs(dtype, (2, 4, 8), (4, 2, 2, 8), (4, 2, 2, 8))
    k[1, 0, 0, 0] = float("nan")
    out, tables = torch.zeros_like(q), torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    lengths, rows = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([0, 1])
    kernels.decode_attention(out, q, KVCache(k, v), (tables, lengths, rows), PLAINLY)
    assert out[0, :2].isnan().all()
    assert not out[1].isnan().any()


@DTYPES
@pytest.mark.parametrize(
    ("length", "token", "window", "sees", "is_blind"),
    [
        (384, 330, 20, slice(330, 350), slice(320)),  # tiles before that of the token
        # Not by what a buffer still holds of it, either: the second span of 44 tokens ends before its place.
        (300, 50, 225, slice(50, 275), slice(294, None)),  # tiles that see nothing of the first 64 tokens
    ],
)
def test_a_nan_value_reaches_only_tiles_that_see_its_token(dtype, length, token, window, sees, is_blind):
    num_blocks = length // 32 + 2
    shapes = (length, 2, 32), (num_blocks, 32, 1, 32), (num_blocks, 32, 1, 32)
    kernels, q, k, v = kernels_and_inputs(dtype, *shapes)
    v.view(-1, 32)[32 + token] = float("nan")
    out, table = torch.zeros_like(q), torch.arange(1, num_blocks, dtype=torch.int32)
    kernels.prefill_attention(out, q, KVCache(k, v), table, length, PLAINLY._replace(window=window))
    are_nan = out.isnan().flatten(1).any(1)
    assert are_nan[sees].all()
    assert not are_nan[is_blind].any()


LENGTHS = [(1, 1), (1, 40), (7, 7), (5, 33), (1, 300), (16, 16), (1, 17), (50, 90)]  # new tokens, all tokens


def layer_and_inputs(
    dtype, lengths, head_dim, has_bias=False, has_norms=True, bits=(0, 0), window=None, int8=False
):
    """Return a packed layer, its inputs, the cache, and a batch's metadata."""
    config = DecoderConfig(
        **{"vocab_size": 1, "hidden_size": 48, "intermediate_size": 80, "num_layers": 1},
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "qk_norm": has_norms, "rope": {}},
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), has_bias),
        **{"windows": (window,), "tie_word_embeddings": False, "rms_norm_eps": 1e-3},
    )
    layer, num_tokens = DecoderLayer(config, window), sum(new for new, _ in lengths)
    shapes = [(num_tokens, 48)] * 2, [(num_tokens, 1, head_dim)] * 2, [(90, 8, 2, head_dim)] * 2
    _, *inputs, k, v = kernels_and_inputs(dtype, *itertools.chain(*shapes))
    kernels, kv = Kernels(dtype, int8), (int8_cache.quantize(k), int8_cache.quantize(v)) if int8 else (k, v)
    for weight in layer.to(dtype).requires_grad_(False).parameters():
        weight.normal_(std=0.2)
    pack_weights(layer, kernels, *bits)
    assert CompiledLayer.can_hold(layer)
    for module in (layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
        module.kernels = kernels
    tables = (torch.arange(len(lengths) * 38) % 89 + 1).view(len(lengths), 38).int()
    metadata = metadata_of(lengths, tables, torch.randperm(90 * 8)[:num_tokens])
    return kernels, layer, inputs, kv, metadata


@DTYPES
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:2], LENGTHS[2:4]])
@pytest.mark.parametrize(
    ("has_bias", "has_norms", "bits"),  # of weights and of activations
    [(False, True, (0, 0)), (True, False, (8, 0)), (True, True, (4, 0)), (True, True, (4, 8))],
)
def test_a_layer_in_one_call_has_the_bits_of_separate_calls(dtype, lengths, has_bias, has_norms, bits, int8):
    kernels, layer, (x, residual, *rope), kv, metadata = layer_and_inputs(
        dtype, lengths, 12 if any(bits) else 10, has_bias, has_norms, bits, window=20, int8=int8
    )
    attention = CompiledAttention(metadata, 8, kernels)
    by_group = metadata._replace(block_tables=[None] * 2, slot_mapping=[None, metadata.slot_mapping])
    groups = GroupedAttention(lambda group, _: None if group.slot_mapping is None else attention, by_group, 8)
    caches = [KVCache(*(x.clone() for x in kv), group=1) for _ in range(2)]
    for before in (residual, None):
        separate = layer(x, before, rope, caches[0], attention)
        at_once = CompiledLayer(layer, kernels)(x, before, rope, caches[1], groups)
        assert all(map(torch.equal, at_once, separate))
        assert at_once[0].isfinite().all()
    for ours, theirs, old in zip((caches[1].k, caches[1].v), (caches[0].k, caches[0].v), kv, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, old)


@DTYPES
# Rows 0 | 1 | 2-8 | 9-13 | 14 | 15-30 | 31-80 are sequences': of each none, the last or all are needed.
@pytest.mark.parametrize("needed", [[], [30], [0, 8, 14, *range(15, 31)], [*range(31, 81)], [*range(81)]])
def test_the_last_layer_computes_the_needed_rows_as_it_would_beside_all_others(dtype, needed):
    lengths = [(1, 1), (1, 40), (7, 7), (5, 33), (1, 300), (16, 16), (50, 90)]
    kernels, layer, (x, residual, *rope), kv, metadata = layer_and_inputs(dtype, lengths, 16)
    rows = np.array(needed, dtype=np.int64)
    others = np.setdiff1d(np.arange(81), rows)
    # A prompt's last row alone attends as a decode does, which rounds otherwise.
    is_exact = ~np.isin(rows, [8, 30]) | (len(rows) > 20)
    for before in (None, residual):
        caches, results = [], []
        for is_last in (True, False):
            attention = CompiledAttention(metadata._replace(needed_rows=rows), 8, kernels)
            caches.append(KVCache(*(x.clone() for x in kv)))
            call = CompiledLayer(layer, kernels, is_last)
            results.append(call(x, before, rope, caches[-1], attention))
        for mine, theirs in zip(*results, strict=True):
            assert not mine[others].any()
            assert torch.equal(mine[rows][is_exact], theirs[rows][is_exact])
            tolerance = 1e-5 if dtype == torch.float32 else 0.03
            torch.testing.assert_close(mine[rows], theirs[rows], atol=tolerance, rtol=tolerance)
        assert torch.equal(caches[0].k, caches[1].k)
        assert torch.equal(caches[0].v, caches[1].v)
        assert not torch.equal(caches[0].v, kv[1])


def flags():
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


# GCC's name of an instruction set -> its flag in /proc/cpuinfo.
INSTRUCTION_SETS = {"x86-64-v3": "avx2", "x86-64-v4": "avx512vl", "cooperlake": "avx512_bf16"}


def skip_without(name):
    """Skip a test that compiles for an instruction set, also if that is what the processor has anyway."""
    if INSTRUCTION_SETS[name] not in flags() or not shutil.which("g++"):
        pytest.skip(f"needs g++ and a processor with {INSTRUCTION_SETS[name]}")
    if name == "x86-64-v3" and not {"avx512f", "avx_vnni"} & {*flags().split()}:
        pytest.skip("this processor has no more than AVX2")


OTHER_FILES = "test_paged_attention.py", "test_int8_cache.py", "test_integers.py"
# What calls the kernels. Of the exact libraries, which take long to compile, those of tests/test_bits.py.
SELECTION = """
    (test_kernels or test_integers or compiled or shares_its_blocks or kernel_writes)
    and not (shares_its_blocks and (dtype0-True-True or dtype1-False-True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x86-64-v3", "cooperlake"])
def test_the_kernels_are_right_when_compiled_for_another_instruction_set(name):
    skip_without(name)
    files = (Path(__file__).with_name(other) for other in OTHER_FILES)
    run_tests(__file__, *files, selection=SELECTION, CXX=f"g++ -march={name}")


# A process that is forbidden to ask for AMX's registers: a filter of system calls, as containers have them.
WITHOUT_AMX = """
import ctypes, struct, sys
program = [  # as linux/filter.h: EPERM for arch_prctl (158) with ARCH_REQ_XCOMP_PERM (0x1023)
    (0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023),
    (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
filter = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
for call in ((38, 1, 0, 0, 0), (22, 2, filter, 0, 0)):  # no new privileges; the filter
    assert libc.prctl(*call) == 0, ctypes.get_errno()
import pytest
from nanoengine.backends.cpu.kernels import Kernels
assert not ctypes.c_bool.in_dll(Kernels().library, "amx")
sys.exit(pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", "product", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_kernels_are_right_where_the_system_does_not_grant_amx():
    if not ctypes.c_bool.in_dll(Kernels().library, "amx"):
        pytest.skip("needs a processor with AMX, and Linux")
    command = [sys.executable, "-c", WITHOUT_AMX, __file__, str(Path(__file__).with_name("test_integers.py"))]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert " passed" in result.stdout


def test_concatenated_layers_with_other_bits_groups_and_zeros_keep_their_weights():
    torch.manual_seed(0)
    shapes = (6, 64, 4, 32, False), (3, 64, 8, 16, True), (5, 64, 4, 64, True)
    parts = [quantized(*shape) for shape in shapes]
    whole = Quantized.cat(parts)
    assert (whole.bits, whole.group) == (8, 16)
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(whole.dequantize(torch.float32), expected)
