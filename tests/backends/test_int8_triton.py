"""An int8 KV cache on a GPU: the kernel that writes it, and which backends can read it.

tests/backends/test_triton.py and test_ptx.py hold the attention over it.
"""

from types import SimpleNamespace

import pytest
import torch

from nanoengine import EngineConfig
from nanoengine.backends import int8_triton
from nanoengine.backends.int8_cache import Int8Attention
from nanoengine.backends.int8_triton import Int8TritonAttention
from nanoengine.backends.kv_cache import KVCache, KVSpec
from tests.backends.test_int8_cache import DTYPES, check_written
from tests.doubles import FakeGPU
from tests.launches import TARGETS, Emulated, Recorder, compile_launch, obstacle

SPEC, ODD = KVSpec(2, 64, 64, torch.bfloat16), KVSpec(1, 64, 11, torch.float16)
needs_triton = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


def write_by(kernel, monkeypatch):
    monkeypatch.setattr(int8_triton, "_write_int8_kernel", kernel)

    def write(k_cache, v_cache, k, v, slots):
        Int8TritonAttention(SimpleNamespace(slot_mapping=slots), 16)._write(k, v, KVCache(k_cache, v_cache))

    return write


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("generation", "shape"), [("sm75", (4, 128, 128)), ("sm80", (4, 11, 6)), ("sm90", (2, 300, 16))]
)
def test_compiled_code_writes_what_the_definition_says_bit_for_bit(dtype, generation, shape, monkeypatch):
    kernel = Emulated(int8_triton._write_int8_kernel, generation)
    check_written(write_by(kernel, monkeypatch), dtype, *shape)


@needs_triton
@pytest.mark.parametrize("generation", TARGETS)
def test_the_kernel_compiles_for_every_gpu(generation, monkeypatch):
    recorder = Recorder(int8_triton._write_int8_kernel)
    with pytest.raises(AssertionError):  # nothing was written
        check_written(write_by(recorder, monkeypatch), torch.float16, 8, 128, 64)
    named, options, _ = recorder.launches[0]
    assert compile_launch(recorder.kernel, named, options, generation).metadata.shared == 0


@pytest.mark.parametrize(
    ("spec", "missing", "chosen", "notes"),
    [
        (SPEC, "", Int8TritonAttention, ""),
        (SPEC, "triton", Int8Attention, "not triton: no Triton"),
        (ODD, "", Int8Attention, "not triton: int8 rows of 1 heads of 64 and 11"),
    ],
)
def test_triton_serves_an_int8_cache_and_pytorch_does_where_it_cannot(
    spec, missing, chosen, notes, flash_doubles, monkeypatch
):
    monkeypatch.setattr(
        "nanoengine.backends.cuda.try_out", lambda x, *_: "no Triton" if x.name == missing else None
    )
    gpu = FakeGPU(torch.device("cpu"), EngineConfig(model="m", kv_cache_dtype="int8"))
    attention = gpu.choose_attention([spec], frozenset())
    assert attention.backend is chosen
    for note, name in zip(attention.notes, ("flash", "varlen", "triton"), strict=False):
        assert f"not {name}: " in note
    assert notes in attention.notes[-1]


def test_a_backend_that_reads_no_int8_cache_is_refused(flash_doubles):
    config = EngineConfig(model="m", kv_cache_dtype="int8", attn_backend="flash")
    with pytest.raises(ValueError, match="'flash' cannot be used: it does not support an int8 cache"):
        FakeGPU(torch.device("cpu"), config).choose_attention([SPEC], frozenset())
