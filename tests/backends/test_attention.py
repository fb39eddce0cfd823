"""Paged attention against dense attention, sequence by sequence."""

import functools

import pytest
import torch

from nanoengine.backends.attention import Settings, TorchAttention
from nanoengine.backends.cpu.attention import CompiledAttention
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.kv_cache import KVCache
from tests.attention import MIXED, check_attention, metadata_of


@pytest.fixture(params=["torch", "compiled"])
def check(request):
    """A check of either backend of a CPU."""
    return functools.partial(check_attention, on_cpu if request.param == "compiled" else TorchAttention)


def on_cpu(metadata, block_size):
    return CompiledAttention(metadata, block_size, Kernels())


@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 256])
def test_any_mix_of_prompts_chunks_and_decodes_equals_dense_attention(check, block_size):
    check(MIXED, block_size)


SINKS = torch.tensor([-1.0, 0.5, 2.0, 30.0])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("settings", [{"softcap": 2.0}, {"sinks": SINKS}, {"softcap": 1.0, "sinks": SINKS}])
def test_scores_are_soft_capped_and_sinks_take_their_share(check, settings, window):
    check(MIXED, 8, window=window, **settings)


SLOPES = torch.tensor([0.5, 0.25, 0.0, 0.01])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"window": 9}, {"softcap": 1.0, "sinks": SINKS}])
def test_alibi_takes_its_slope_per_position_off_a_score(check, settings, dtype):
    check(MIXED, 8, dtype=dtype, alibi_slopes=SLOPES, **settings)


def test_a_soft_cap_of_a_config_may_be_an_integer(check):
    check(MIXED, 8, softcap=2)


def test_soft_capping_a_long_prompt_slice_by_slice_changes_nothing(check, monkeypatch):
    monkeypatch.setattr("nanoengine.backends.attention.SCORES_PER_SLICE", 4 * 90 * 7)
    check([(50, 90), (1, 40), (90, 90)], 8, softcap=2.0, sinks=SINKS, alibi_slopes=SLOPES)


def test_values_may_be_narrower_than_keys(check):
    check(MIXED, 8, head_dim=24, v_head_dim=16)
    check(MIXED, 8, head_dim=16, v_head_dim=24, softcap=3.0)


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
def test_a_sliding_window_hides_what_is_further_back(check, window):
    check(MIXED, 8, window=window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (3, 3)])
def test_grouped_and_multi_query_heads_read_their_own_kv_head(check, heads, kv_heads):
    check(MIXED, 16, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 20), (3, 11), (1, 80), (2, 96), (2, 256)])
def test_any_head_dim_works_power_of_two_or_not(check, kv_heads, head_dim):
    check(MIXED, 16, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dtype_is_within_its_tolerance(check, dtype):
    check(MIXED, 16, dtype=dtype)


LONG = [(1, 255), (1, 256), (1, 257), (1, 700), (9, 300), (1, 1), (1, 33)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 300}, {"softcap": 2.0, "sinks": SINKS}, {"window": 300, "alibi_slopes": SLOPES}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_attended_to_in_several_spans_equals_dense_attention(check, dtype, settings):
    check(LONG, 16, dtype=dtype, **settings)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_size"), [(2, 32, 16), (1, 128, 3), (3, 64, 1), (2, 96, 17)]
)
def test_bfloat16_by_the_processor_s_own_instructions_equals_dense_attention(
    check, kv_heads, head_dim, block_size
):
    settings = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": torch.bfloat16}
    check(MIXED + LONG, block_size, stale=float("nan"), **settings)
    check(MIXED, block_size, v_head_dim=64, window=5, **settings)


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
        kernels.decode_attention(out, q, cache, tables[rows], lengths, torch.tensor(rows), settings)
        return out

    together = attend([0, 1, 2, 3, 4])
    for i in range(len(lens)):
        assert torch.equal(attend([i])[i], together[i])


def test_float16_is_within_its_tolerance_in_plain_pytorch():
    check_attention(TorchAttention, MIXED, 16, dtype=torch.float16)


@pytest.mark.parametrize("stale", [float("nan"), float("inf")])
def test_what_other_sequences_left_in_a_block_is_never_read(check, stale):
    check([(1, 1 + 7 * i % 90) for i in range(20)] + MIXED, 16, stale=stale)


def test_forty_decodes_of_mixed_lengths_are_grouped_without_mixing_them_up(check):
    check([(1, 1 + 7 * i % 90) for i in range(40)], 16)


def test_a_discarded_write_leaves_shared_blocks_untouched():
    cache = KVCache(torch.randn(3, 4, 1, 8), torch.randn(3, 4, 1, 8))
    before = cache.k[1:].clone()
    metadata = metadata_of([(1, 8)], torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0]))
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    TorchAttention(metadata, 4)(q, k, k, cache, scale=1.0)
    assert torch.equal(cache.k[1:], before)
