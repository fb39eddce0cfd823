"""The Triton backend: its kernels as a GPU runs them where there is one, else by Triton's interpreter.

The interpreter has to be chosen before Triton is imported, so one test runs this file again in a process of
its own. `TRITON_INTERPRET=1 pytest tests/backends/test_triton.py` does the same by hand.
"""

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from nanoengine import LLM
from nanoengine.backends import triton_attention as backend
from nanoengine.backends.cuda import try_out
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.paged_attention import Settings
from nanoengine.backends.triton_attention import MAX_PROGRAMS, MAX_SPLITS, MIN_SPAN, TILES, TritonAttention
from tests import attention
from tests.attention import ALL_DECODES, BOTH, MIXED, WITH_ALIBI, WITH_SINKS, check_attention, metadata_of
from tests.helpers import check_answers, checkpoint, random_prompts, run_tests, slow
from tests.launches import TARGETS, Recorder, compile_launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

# At each call of a device function the interpreter patches Triton's language again: a third of the time.
if INTERPRETED:
    from triton.runtime.interpreter import InterpretedFunction

    call, patched = InterpretedFunction.__call__, set[str]()

    def call_patched(function, *args, **kwargs):
        if function.fn.__module__ in patched:
            return function.rewrite()(*args, **kwargs)
        patched.add(function.fn.__module__)
        return call(function, *args, **kwargs)

    InterpretedFunction.__call__ = call_patched


def runs_kernels(test):
    """Mark a test that also runs on a GPU, by `make gpu`."""
    reason = "run again under Triton's interpreter"
    return pytest.mark.gpu(pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason=reason)(test))


interpreted = pytest.mark.skipif(not INTERPRETED, reason="run again under Triton's interpreter")
compiles = pytest.mark.skipif(INTERPRETED, reason="what is interpreted is not compiled")


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("file", ["test_triton.py", "test_triton_linear.py"])
def test_all_of_a_file_passes_under_tritons_interpreter(file):
    run_tests(Path(__file__).with_name(file), TRITON_INTERPRET="1")


def test_every_test_that_runs_kernels_runs_on_a_gpu_too():
    for name, test in globals().items():
        if name.startswith("test_") and {"check_attention", "attend", "try_out"} & {*test.__code__.co_names}:
            assert "gpu" in {mark.name for mark in test.pytestmark}, name


SHORT = [(1, 1), (1, 40), (5, 33), (7, 7), (1, 17)]
FEW = [*SHORT, (20, 30), (1, 70)]
HALF, MAX_SPAN = torch.bfloat16, MAX_SPLITS * MIN_SPAN
SMALL_SPAN, FEW_SPLITS = 32, 4  # instead of MIN_SPAN and MAX_SPLITS: the interpreter is slow
SPLIT = {"window": 2 * SMALL_SPAN + 8, "sinks": attention.SINKS}


@pytest.fixture(autouse=True)
def small_spans(request, monkeypatch):
    if INTERPRETED and not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(backend, "MIN_SPAN", SMALL_SPAN)
        monkeypatch.setattr(backend, "MAX_SPLITS", FEW_SPLITS)


CASES = [
    *((MIXED, {"block_size": size}) for size in (1, 16)),
    *((lens, {}) for lens in (ALL_DECODES, [(5, 300)], [(1, 1), (7, 7), (40, 40)], [(130, 200), (2, 2)])),
    *((lens, {"dtype": HALF}) for lens in (MIXED, ALL_DECODES)),
    *((SHORT, {"head_dim": dim, "stale": torch.nan}) for dim in (8, 20, 128, 300)),
    *((SHORT, {"head_dim": dim, "dtype": HALF, "stale": torch.nan}) for dim in (20, 128, 300)),
    *((FEW, {"head_dim": k, "v_head_dim": v}) for k, v in ((24, 16), (192, 128), (40, 300))),
    *((FEW, {"heads": n, "kv_heads": k}) for n, k in ((4, 4), (6, 2), (17, 1))),
    *((FEW, {"window": window}) for window in (1, 16, 40)),
    *((FEW, {"block_size": 8, **settings}) for settings in (attention.CAPPED, WITH_SINKS, BOTH)),
    *((FEW, {"window": 9, **settings}) for settings in (WITH_SINKS, WITH_ALIBI)),
    (FEW, {**WITH_ALIBI, **BOTH}),
    *((FEW, {"block_size": 32, "stale": torch.nan, **settings}) for settings in ({}, {"window": 9}, BOTH)),
    *((FEW, {"block_size": size, "window": 9, "stale": torch.nan}) for size in (3, 16)),
    *(([(1, n) for n in (31, 32, 33, 64, 65, 129, 300)], {"stale": torch.nan, **x}) for x in ({}, SPLIT)),
]
LONG, LONG_SPLIT = [*MIXED, (1, 700), (1, 301), (70, 400)], {"window": 520, "sinks": attention.SINKS}
SPANS = [(1, n * MIN_SPAN + more) for n, more in ((1, -1), (1, 0), (1, 1), (2, 0), (2, 1))]
SLOW_CASES = [
    (MIXED, {"block_size": 256, "dtype": torch.float16}),
    (attention.ALL_FRESH, {}),
    *((SHORT, {"head_dim": dim, "stale": torch.nan}) for dim in (80, 256)),
    *((FEW, {"heads": n, "kv_heads": k}) for n, k in ((3, 3), (71, 1))),
    *((LONG, {"window": window}) for window in (16, 1000)),
    (LONG, {"block_size": 8, "window": 9, **BOTH}),
    (LONG, {"block_size": 8, **WITH_ALIBI}),
    (LONG, {"block_size": 3, "stale": torch.nan}),
    *((SPANS, {"stale": torch.nan, **settings}) for settings in ({}, LONG_SPLIT)),
    ([(1, MAX_SPAN + 1)], {"stale": torch.nan}),
    ([(1, 3 * MAX_SPAN // 2 + 5), (3, 500)], {"stale": torch.nan, **LONG_SPLIT}),
]


@runs_kernels
@pytest.mark.parametrize(("lens", "settings"), [*CASES, *slow(*SLOW_CASES)], ids=attention.case_id)
def test_any_batch_and_layer_equals_dense_attention(lens, settings):
    check_attention(TritonAttention, lens, device=DEVICE, **{"block_size": 16, **settings})


def attend(seqs, dtype, **settings):
    """Return the outputs of sequences (seed, new tokens, all tokens), each random with its own seed."""
    seeds, *lens = zip(*seqs, strict=True)
    sizes = {"block_size": 16, "heads": 6, "seeds": seeds, "dtype": dtype, "device": DEVICE}
    return attention.attend(TritonAttention, [*zip(*lens, strict=True)], **sizes, **settings)[0]


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.float32, {}), *slow((torch.bfloat16, {}), (torch.float32, {"window": 300, "softcap": 3.0}))],
)
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(dtype, settings):
    seqs = [(0, 1, 300), (1, 1, 5), (2, 20, 45), (3, 1, 32), (4, 3, 3), (5, 1, 33)]
    alone = [attend([seq], dtype, **settings)[0] for seq in seqs]
    for order in (range(6), (5, 2, 0), (0, 1, 3)):
        together = attend([seqs[i] for i in order], dtype, **settings)
        for i, out in zip(order, together, strict=True):
            assert torch.equal(out, alone[i]), f"sequence {i} of {list(order)}"
            assert out.isfinite().all()


@runs_kernels
def test_padding_a_batch_of_decodes_for_a_graph_changes_no_bit_of_it():
    seqs = [(0, 1, 300), (1, 1, 5), (3, 1, 32)]
    plain = attend(seqs, torch.float32)
    padded = attend(seqs, torch.float32, num_padding=3, max_seq_len=40_000)
    assert all(torch.equal(a, b) for a, b in zip(plain, padded[:3], strict=True))


@runs_kernels
def test_a_tile_writes_its_own_rows_and_no_others(monkeypatch):
    """On a GPU tiles run at once: what one writes for another would overwrite it as it happens."""
    whole = attend([(0, 30, 30)], torch.float32)[0]
    kernel = backend._attend_kernel

    class FirstTile:
        def __getitem__(self, grid):
            return lambda out, *args, **kwargs: kernel[(1, *grid[1:])](out.fill_(torch.nan), *args, **kwargs)

    monkeypatch.setattr(backend, "_attend_kernel", FirstTile())
    out = attend([(0, 30, 30)], torch.float32)[0]
    written = backend.FLOAT32.rows // 3  # three heads to a token
    assert torch.equal(out[:written], whole[:written])
    assert out[written:].isnan().all()


CHUNKS = {"num_kv_blocks": 5, "max_num_batched_tokens": 30}  # and preemption


@interpreted
@pytest.mark.parametrize(
    ("model", "settings"),
    [("qwen2 sliding from layer 1", CHUNKS), *slow(("qwen3", {}), ("qwen3", CHUNKS), ("gemma3", CHUNKS))],
)
def test_greedy_tokens_equal_transformers(model, settings, in_float32, tmp_path_factory):
    path, reference = checkpoint(model, tmp_path_factory)
    shared = random_prompts([20], seed=5)[0]
    prompts = [*random_prompts([3, 15, 16, 1]), shared + [7] * 5, [*shared, 8, 9]]
    settings = {"num_kv_blocks": 40, "max_num_seqs": 4, "block_size": 16, **settings}
    with LLM(path, attn_backend="triton", **settings) as llm:
        check_answers(llm, reference, prompts, 4)
        assert (llm.metrics()["num_preemptions"] > 0) == (settings["num_kv_blocks"] == 5)
        assert llm.llm_engine.runner.attention.backend is TritonAttention
    assert in_float32["replay"] > 0


SPEC = KVSpec(2, 20, 24, torch.bfloat16)
EVERYTHING = frozenset(("window", "softcap", "sinks", "alibi_slopes"))


@runs_kernels
def test_it_can_be_used_unless_its_kernels_fail_or_compute_wrong_numbers(monkeypatch):
    try_it = functools.partial(try_out, TritonAttention, [SPEC, SPEC], EVERYTHING, 16, torch.device(DEVICE))
    assert try_it() is None
    monkeypatch.setattr(backend, "_attend_kernel", kernel := MagicMock())
    kernel.__getitem__.side_effect = RuntimeError("Failed to find C compiler.\nPlease specify via CC")
    assert try_it() == "it failed when tried: RuntimeError: Failed to find C compiler."
    kernel.__getitem__.side_effect = lambda grid: lambda out, *args, **kwargs: out.fill_(0)
    assert try_it() == "it computed wrong results when tried"


def launches_of(
    monkeypatch, lens, dtype, dim, settings, generation="sm80", heads=8, kv_heads=2, max_tokens=0, block=16
):
    """Return kernels for a batch, with arguments, options and grid. max_seq_len is at least max_tokens."""
    recorders = [Recorder(getattr(backend, name)) for name in ("_attend_kernel", "_combine_kernel")]
    with monkeypatch.context() as patch:
        for recorder in recorders:
            patch.setattr(backend, recorder.kernel.fn.__name__, recorder)
        table = torch.zeros(len(lens), -(-max(total for _, total in lens) // block), dtype=torch.int32)
        num_tokens = sum(new for new, _ in lens)
        patch.setattr(backend, "generation", lambda device: generation)
        metadata = metadata_of(lens, table, torch.zeros(num_tokens, dtype=torch.int64))
        metadata = metadata._replace(max_seq_len=max(metadata.max_seq_len, max_tokens))
        q = torch.zeros(num_tokens, heads, dim, dtype=dtype)
        kv = torch.zeros(num_tokens, kv_heads, dim, dtype=dtype)
        cache = KVCache.zeros(KVSpec(kv_heads, dim, dim, dtype), 2, block, torch.device("cpu"))
        TritonAttention(metadata, block)._attend(q, kv, kv, cache, settings)
    return [(recorder.kernel, *launch) for recorder in recorders for launch in recorder.launches]


ALL_SETTINGS = Settings(0.1, 600, 2.0, torch.zeros(8), torch.zeros(8))
PLAIN = Settings(0.1, None, None, None)


def stack_bytes(compiled, path):
    """Return the bytes of a thread that did not fit into its registers."""
    if "amdgcn" in compiled.asm:
        return int(re.search(r"private_segment_fixed_size: (\d+)", compiled.asm["amdgcn"])[1])
    import triton

    path.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", used)[1])


DENSE, WIDE = (torch.bfloat16, 128, 8, 2, ALL_SETTINGS), (torch.bfloat16, 256, 8, 2, PLAIN)
NARROW, FULL = (torch.float16, 64, 8, 2, PLAIN), (torch.float32, 128, 8, 2, ALL_SETTINGS)
ONE_KV_HEAD, TURING = (torch.float16, 64, 71, 1, PLAIN), (torch.float16, 128, 8, 2, ALL_SETTINGS)
SHAPES = DENSE, WIDE, NARROW, FULL, ONE_KV_HEAD, TURING


@compiles
@pytest.mark.parametrize(
    ("generation", "case"),
    [
        ("sm90", DENSE),
        *slow(*((name, x) for name in TILES for x in SHAPES if (name, x[0]) != ("sm75", HALF))),
    ],
)
def test_the_kernels_compile_without_spilling_and_use_tensor_cores(generation, case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled, not found
    dtype, dim, heads, kv_heads, settings = case
    sizes = dict(heads=heads, kv_heads=kv_heads, generation=generation)
    launches = launches_of(monkeypatch, [(1, 1000), (3, 3)], dtype, dim, settings, **sizes)
    assert len(launches) == 3
    for kernel, named, options, _ in launches:
        compiled = compile_launch(kernel, named, options, generation)
        assert compiled.metadata.shared <= TARGETS[generation][1]
        assert stack_bytes(compiled, tmp_path / "kernel.cubin") == 0
        if "ROWS" in named and dtype != torch.float32 and generation != "sm75":
            code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
            assert "mfma" in code if generation == "gfx942" else "mma.sync" in code or "wgmma" in code


@compiles
@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize(
    ("generation", "settings"), [("sm80", ALL_SETTINGS), ("sm90", ALL_SETTINGS), ("sm90", PLAIN)]
)
def test_a_decode_loads_a_tile_while_it_computes_another(block, generation, settings, monkeypatch, tmp_path):
    sizes = {"kv_heads": 8, "heads": 16, "generation": generation, "block": block}
    if settings is ALL_SETTINGS:
        settings = settings._replace(sinks=torch.zeros(16), alibi_slopes=torch.zeros(16))
    launches = launches_of(monkeypatch, [(1, 1000)] * 256, torch.bfloat16, 128, settings, **sizes)
    kernel, named, options, _ = launches[0]
    compiled = compile_launch(kernel, named, options, generation)
    assert stack_bytes(compiled, tmp_path / "kernel.cubin") == 0
    code = compiled.asm["ttgir"]
    assert "memdesc<2x128x32xbf16" in code, "keys have two buffers"
    assert "memdesc<2x32x128xbf16" in code, "values have two buffers"


@compiles
@pytest.mark.parametrize("num_seqs", [1, 7, 64, 256])
def test_few_programs_of_a_captured_decode_are_idle(num_seqs, monkeypatch):
    """A grid is for the longest sequences that may come; those at hand have a thousand tokens."""
    sizes = {"heads": 16, "kv_heads": 8, "max_tokens": 40_960}
    lens = [(1, 1000)] * num_seqs
    launches = launches_of(monkeypatch, lens, torch.bfloat16, 16, PLAIN, **sizes)
    turns = launches[0][3][2]
    working = min(turns, -(-1000 // MIN_SPAN))
    assert num_seqs * 8 * (turns - working) < MAX_PROGRAMS  # at large batches, none
    assert num_seqs * 8 * turns <= max(MAX_PROGRAMS, num_seqs * 8)
    assert working > 1 or num_seqs > 32  # on an H200, undivided keys were faster from 40 sequences on


@compiles
def test_kernels_are_not_compiled_again_for_another_step(monkeypatch):
    """Triton compiles for none of the arguments that differ from step to step."""
    (slots,) = (param for param in backend._write_kv_kernel.params if param.name == "slots")
    assert slots.do_not_specialize_on_alignment
    steps = [
        launches_of(monkeypatch, lens, torch.bfloat16, 64, ALL_SETTINGS)
        for lens in ([(1, 1000), (16, 16)], [(1, 257), *[(1, 3)] * 15, (40, 400)])
    ]
    for (kernel, first, _, _), (_, second, _, _) in zip(*steps, strict=True):
        for param in kernel.params:
            a, b = first[param.name], second[param.name]
            if isinstance(a, torch.Tensor):
                staged = param.name in ("block_tables", "cu_seqlens_q", "seq_lens")
                assert param.do_not_specialize_on_alignment == staged
            else:
                assert a == b or param.do_not_specialize, param.name
