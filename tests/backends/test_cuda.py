"""The CUDA path on a CPU: a GPU's functions are doubles that check their arguments, the rest is real."""

import contextlib
import importlib.util
import re
import sys
import types
import weakref
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

import nanoengine.engine
import nanoengine.sampling.sampler
from nanoengine import LLM, EngineConfig
from nanoengine.assembly import open_device
from nanoengine.backends import cuda, flash_attention, triton_attention
from nanoengine.backends.cpu.cpu_device import CPU
from nanoengine.backends.cuda import CUDA, DecodeGraphs, GraphRecorder, PinnedDownload, Staging
from nanoengine.backends.device import Decodes, Trial
from nanoengine.backends.flash_attention import FlashAttention, VarlenAttention
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.torch_attention import TorchAttention
from nanoengine.engine import ModelRunner, build_inputs
from tests.attention import ALL_DECODES, ALL_FRESH, MIXED, WITH_ALIBI, case_id, check_attention, metadata_of
from tests.doubles import FakeGPU, TritonKernels
from tests.helpers import ask, batch_of, check_answers, checkpoint, make_sequence, random_prompts, slow

BATCHES, SHAPES = (MIXED, ALL_FRESH, ALL_DECODES), ((4, 4, 8), (6, 2, 80), (8, 1, 256), (3, 3, 24))
OF_BOTH = [
    *((lens, {"window": n}) for n in (None, 1, 9, 260) for lens in (*BATCHES, [(5, 300)])),
    *(([(300, 700), (2, 2)], {"window": window}) for window in (None, 9)),
    *((MIXED, {"heads": n, "kv_heads": k, "head_dim": dim}) for n, k, dim in SHAPES),
    (ALL_DECODES + MIXED, {"stale": torch.nan}),  # what other sequences left in a block
]
OTHERS = {"softcap": 2, "window": 20}, WITH_ALIBI, {**WITH_ALIBI, "window": 9}
CASES = [
    *((backend, *case) for backend in (FlashAttention, VarlenAttention) for case in OF_BOTH),
    *((FlashAttention, lens, settings) for lens in BATCHES for settings in OTHERS),
]


@pytest.mark.parametrize(("backend", "lens", "settings"), CASES, ids=case_id)
def test_any_mix_of_prompts_chunks_and_decodes_equals_dense_attention(backend, lens, settings, flash_doubles):
    check_attention(backend, lens, 256, dtype=torch.bfloat16, **settings)


def test_each_kind_of_batch_calls_the_functions_made_for_it(flash_doubles):
    for lens, path in (
        *((ALL_FRESH, ["varlen contiguous"]), (ALL_DECODES, ["with_kvcache"])),
        *(([(5, 300), (2, 2)], ["varlen paged"]), (MIXED, ["with_kvcache", "varlen paged"])),
    ):
        flash_doubles.clear()
        check_attention(FlashAttention, lens, 256, dtype=torch.bfloat16)
        assert flash_doubles == dict.fromkeys(path, 1)
    # The query heads of a KV head, if it has several, in one; of a mixed batch, those of the decodes.
    for lens, kv_heads, is_packed in ((ALL_DECODES, 1, True), (ALL_DECODES, 4, False), (MIXED, 2, True)):
        flash_doubles.clear()
        check_attention(VarlenAttention, lens, 256, kv_heads=kv_heads, dtype=torch.bfloat16)
        assert flash_doubles["varlen packed"] == is_packed


def test_a_batch_is_padded_to_the_next_graph_if_it_is_all_decodes():
    def batch(number, first=2, num_blocks=1):
        seq = make_sequence(0, [1] * 3, block_table=[1] * num_blocks)
        return build_inputs(batch_of((seq, first, 3), *[(seq, 2, 3)] * (number - 1)), 256)

    recorder = types.SimpleNamespace(record=lambda run: None)  # captures nothing
    steps = Decodes(batch(1), None, None, [], 40, 40, 160, 256, [])
    graphs = DecodeGraphs(steps, recorder, lambda arrays: [torch.from_numpy(array) for array in arrays])
    shapes = {(1, 1): (1, 8), (3, 8): (4, 8), (4, 9): (4, 32), (5, 33): (8, 128)}  # not the widest
    for (number, num_blocks), shape in {**shapes, (24, 129): (24, 160), (33, 9): (40, 160)}.items():
        padded = graphs.pad(batch(number, num_blocks=num_blocks))
        assert (len(padded.input_ids), padded.metadata.block_tables.shape) == (shape[0], shape)
        assert graphs.pad(mixed := batch(number, first=1)) is mixed
    assert graphs.pad(larger := batch(41)) is larger


SPEC = KVSpec(2, 64, 64, torch.bfloat16)
IN_FLOAT32, UNEQUAL = SPEC._replace(dtype=torch.float32), SPEC._replace(v_head_dim=32)
ODD, WIDE = (SPEC._replace(k_head_dim=dim, v_head_dim=dim) for dim in (20, 264))
NO_FLASH, NO_TRITON = "not flash: it failed when tried: .*flash_attn", "not triton: RuntimeError: no Triton"
NOTHING = "nothing fused: RuntimeError: no Triton"


class InOrder(FakeGPU):
    """Chooses as on a GPU. In other tests flash-attn comes first, since a CPU can run its double only."""

    backends, block_size = CUDA.backends, CUDA.block_size


NO_COMPILER = RuntimeError("no Triton\nPlease install it.")


@pytest.mark.parametrize(
    ("missing", "spec", "settings", "chosen", "reasons"),
    [
        ([], SPEC, {"window", "softcap", "sinks", "alibi_slopes"}, "triton", []),
        ([], IN_FLOAT32, {}, "triton", []),
        (["ampere"], SPEC, {}, "triton", []),
        (["triton"], SPEC, {"window", "softcap", "alibi_slopes"}, "flash", [NO_TRITON, NOTHING]),
        (["triton", "flash_attn"], SPEC, {}, "torch", [NO_TRITON, NO_FLASH, NOTHING]),
        (["triton", "flash_attn's functions"], SPEC, {}, "torch", [NO_TRITON, NO_FLASH, NOTHING]),
        (["triton"], SPEC, {"sinks"}, "torch", [NO_TRITON, "flash: it does not support sinks", NOTHING]),
        (["triton", "ampere"], SPEC, {}, "torch", [NO_TRITON, "flash: .* of the Ampere", NOTHING]),
        (["triton"], IN_FLOAT32, {}, "torch", [NO_TRITON, "or bfloat16, not in float32", NOTHING]),
        (["triton"], UNEQUAL, {}, "torch", [NO_TRITON, "head_dim must be .* 64 and 32", NOTHING]),
        (["triton"], ODD, {}, "torch", [NO_TRITON, "a multiple of 8 .* 20 and 20", NOTHING]),
        (["triton"], WIDE, {}, "torch", [NO_TRITON, "at most 256, not 264 and 264", NOTHING]),
    ],
)
def test_the_next_backend_says_what_faster_ones_lack(
    missing, spec, settings, chosen, reasons, flash_doubles, monkeypatch
):
    """This is the guide's table."""
    if "ampere" in missing:
        monkeypatch.setattr(FakeGPU, "capability", (7, 5))
    if "triton" in missing:
        monkeypatch.setattr(TritonKernels, "rms_norm", Mock(side_effect=NO_COMPILER))
    # flash-attn 4 has modules below `flash_attn` only.
    flash = {"flash_attn": None, "flash_attn's functions": types.ModuleType("flash_attn")}
    for name in flash.keys() & {*missing}:
        monkeypatch.setitem(sys.modules, "flash_attn", flash[name])
    try_out = cuda.try_out  # but there is no GPU to run Triton on
    tried = lambda backend, *args: None if backend.name == "triton" else try_out(backend, *args)  # noqa: E731
    monkeypatch.setattr(cuda, "try_out", tried)
    device = InOrder(torch.device("cpu"), EngineConfig(model="."))
    assert device.block_size == (256 if "triton" in missing else 32)  # flash-attn takes no other
    attention = device.choose_attention([SPEC, spec], frozenset(settings))
    assert attention.backend.name == chosen
    for note, reason in zip(attention.notes, reasons, strict=True):
        assert re.search(reason, note)
        assert "\n" not in note


@pytest.mark.parametrize(("asked", "block_size"), [("flash", 256), ("varlen", 256), ("torch", 32)])
def test_a_backend_that_is_asked_for_is_used_with_blocks_that_it_takes(asked, block_size, flash_doubles):
    """`varlen` is never chosen: it has not run on a GPU yet."""
    device = InOrder(torch.device("cpu"), EngineConfig(model=".", attn_backend=asked))
    assert device.block_size == block_size
    assert device.choose_attention([SPEC], frozenset()).backend.name == asked


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        (FakeGPU, {"block_size": 16, "attn_backend": "flash"}, "block_size must .* of 256, got 16"),
        (CPU, {"attn_backend": "flash"}, "it does not run on cpu"),
        (CPU, {"attn_backend": "compiled", "enforce_eager": True}, "enforce_eager"),
    ],
)
def test_a_chosen_backend_that_cannot_run_is_an_error(kind, settings, reason, flash_doubles):
    device = kind(torch.device("cpu"), EngineConfig(model=".", **settings))
    device.choose_dtype(torch.float32)  # a CPU looks for its kernels
    name = settings["attn_backend"]
    with pytest.raises(ValueError, match=f"attn_backend='{name}' cannot be used: {reason}"):
        device.choose_attention([SPEC], frozenset())
    with pytest.raises(ValueError, match="attn_backend must be one of"):
        EngineConfig(model=".", attn_backend="xformers")


def test_the_compute_capability_and_the_steps_are_those_of_the_engine_s_own_gpu(monkeypatch, flash_doubles):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0) if device.index else (7, 5))
    monkeypatch.setattr("nanoengine.backends.cuda.try_out", lambda *_: None)  # there is no GPU to run on
    config = EngineConfig(model=".", enforce_eager=True)
    old, new = (CUDA(torch.device("cuda", i), config) for i in (0, 1))
    assert old.choose_attention([SPEC], frozenset()).backend is TorchAttention
    assert new.choose_attention([SPEC], frozenset()).backend is FlashAttention
    assert isinstance(new.running(), torch.cuda.device)
    assert new.running().idx == 1


@pytest.mark.parametrize(("device", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0)])
def test_the_gpu_is_the_current_one_of_the_thread_that_makes_the_engine(device, index, monkeypatch):
    """Steps run in a thread of AsyncLLM's, whose current GPU is the first."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr(CUDA, "__init__", lambda self, device, config: setattr(self, "device", device))
    assert open_device(EngineConfig(model=".", device=device)).device == torch.device("cuda", index)


SMALL = {"num_kv_blocks": 20, "max_num_seqs": 2, "max_num_batched_tokens": 64}


@pytest.fixture
def first_line(qwen3, tmp_path_factory, caplog):
    """Return a function that answers two prompts as transformers does, and the line it logged."""

    def run(**settings):
        with LLM(qwen3, **SMALL, **settings) as llm:
            check_answers(llm, checkpoint("qwen3", tmp_path_factory)[1], [[1, 2, 3], [4]], 4)
        return caplog.messages[-1]

    return run


def test_without_a_compiler_plain_pytorch_runs_and_the_line_says_why(in_float32, first_line, monkeypatch):
    assert "nothing fused: enforce_eager" in first_line(enforce_eager=True)
    assert in_float32["write_kv"] == 0
    assert re.search("flash attention, .* graphs ", first_line())
    assert in_float32["write_kv"] > 0
    monkeypatch.setattr(TritonKernels, "rms_norm", Mock(side_effect=NO_COMPILER))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/no"})
    in_float32.clear()
    reason = "nothing fused: RuntimeError: no Triton; /no/Python.h is missing"
    assert f"flash attention ({reason}" in first_line()
    assert in_float32["write_kv"] == 0
    assert in_float32["replay"] > 0  # graphs need no compiler


CANNOT_CAPTURE = RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile ...")


@pytest.mark.parametrize("step", ["GraphRecorder.record", "Recorder.begin"])  # decodes, prompts
def test_a_failed_capture_leaves_eager_steps_and_the_line_says_why(step, in_float32, first_line, monkeypatch):
    monkeypatch.setattr(f"tests.doubles.{step}", Mock(side_effect=CANNOT_CAPTURE))
    monkeypatch.setattr("tests.doubles.Recorder.end", lambda self: None)
    reason = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert f"no graphs ({reason})," in first_line()
    assert in_float32["replay"] == in_float32["piece"] == 0


@pytest.mark.parametrize(
    ("error", "num_kv_blocks", "match"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), None, "too little memory on cpu for the largest"),
        (CANNOT_CAPTURE, 20, r"cannot be captured \(RuntimeError: .*; set enforce_eager=True"),
    ],
)
def test_other_failures_of_a_capture_are_errors(error, num_kv_blocks, match, in_float32, qwen3, monkeypatch):
    monkeypatch.setattr("tests.doubles.GraphRecorder.record", Mock(side_effect=error))
    if num_kv_blocks:  # a PyTorch that does not recover from a failed capture
        underway = RuntimeError("captures_underway.empty()")
        monkeypatch.setattr("torch.cuda.empty_cache", Mock(side_effect=underway))
    with pytest.raises(ValueError, match=match):
        LLM(qwen3, **{**SMALL, "num_kv_blocks": num_kv_blocks})


def test_a_step_that_also_fails_without_a_capture_is_an_error_at_startup(flash_doubles):
    seq = make_sequence(0, [1], block_table=[0])
    device = FakeGPU(torch.device("cpu"), EngineConfig(model="."))
    device.reserve(8, 8, 1, 1)
    compute = Mock(side_effect=RuntimeError("CUDA error: no kernel image"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        device.capture(Decodes(build_inputs(batch_of((seq, 0, 1)), 256), compute, None, [], 8, 8, 1, 256, []))


def test_a_backend_that_computes_wrong_numbers_is_skipped(in_float32, first_line, monkeypatch):
    attend = FlashAttention._attend_to
    monkeypatch.setattr(FlashAttention, "_attend_to", lambda *args: attend(*args) * 1.1)
    assert "torch attention (not flash: it computed wrong results when tried" in first_line()


def test_a_model_that_waits_for_the_gpu_is_eager_and_the_log_says_so(in_float32, tmp_path_factory, caplog):
    with LLM(checkpoint("llama, dynamic rope", tmp_path_factory)[0], **SMALL) as llm:
        ask(llm, [[1, 2, 3]], max_tokens=1)
    assert "flash attention, no graphs (the model waits for the GPU)," in caplog.messages[-1]
    assert in_float32["replay"] == 0


@pytest.fixture
def streams(monkeypatch):
    """Replace the streams and graphs that the recorder uses. Returns every event in order."""
    events: list = []
    current = [Mock()]
    monkeypatch.setattr("torch.cuda.Stream", lambda device: Mock(device=device))
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current[0])
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: "as before")
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", lambda mode: events.append(("waits", mode)))

    @contextlib.contextmanager
    def on_stream(stream, restores_always=True):
        before, current[0] = current[0], stream
        try:
            yield
        except RuntimeError:
            current[0] = before if restores_always else stream
            raise
        current[0] = before

    def graph(graph, pool=None, stream=None, capture_error_mode="global"):
        events.append(("capture", pool, capture_error_mode))
        return on_stream(stream, restores_always=False)  # as the real one does

    made = types.SimpleNamespace(pool=lambda: "the pool", replay=lambda: events.append("replay"))
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: made)
    monkeypatch.setattr("torch.cuda.graph", graph)
    monkeypatch.setattr("torch.cuda.stream", on_stream)
    return events


def test_captures_use_one_stream_of_the_engine_s_own_gpu(flash_doubles, streams):
    config = EngineConfig(model=".", enforce_eager=True)
    devices = [CUDA(torch.device("cuda", i), config) for i in (0, 1, 1)]
    assert [device.capture_stream.device.index for device in devices] == [0, 1, 1]
    # A graph that ends frees what cuBLAS holds for its stream, even if live graphs of the stream use it.
    assert devices[1].capture_stream is not devices[2].capture_stream
    stream, main = devices[1].capture_stream, torch.cuda.current_stream()
    assert devices[1].capture_stream is stream  # for the trial capture and the real one
    recorder = GraphRecorder(stream)
    replays = [recorder.record(lambda: streams.append(torch.cuda.current_stream())) for _ in range(2)]
    assert streams == [
        *(stream, ("waits", "error"), stream, ("waits", "as before")),  # nothing may wait: once is enough
        *(("capture", None, "thread_local"), stream),
        *(stream, ("capture", "the pool", "thread_local"), stream),
    ]
    assert stream.wait_stream.mock_calls == [call(main)] * 2
    assert main.wait_stream.mock_calls == [call(stream)] * 2
    replays[0]()
    assert streams[-1] == "replay"


@pytest.mark.parametrize("failing", ["what waits", "the capture"])
def test_a_failed_capture_restores_the_thread_s_stream(failing, streams):
    """A run that waits fails before its capture: not every PyTorch recovers from a failed capture."""
    main, expected = torch.cuda.current_stream(), ("waits", "error")
    if failing == "the capture":
        expected = ("capture", None, "thread_local")

    def run():
        if streams and streams[-1] == expected:
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        GraphRecorder(Mock()).record(run)
    assert torch.cuda.current_stream() is main
    assert streams[1] == ("waits", "as before")
    assert (len(streams) == 2) == (failing == "what waits")


IN_CHUNKS = {"max_num_batched_tokens": 100}


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        *(("flash", "qwen3"), ("flash", "qwen2 sliding from layer 1"), ("varlen", "qwen3")),
        *slow(("varlen", "qwen2 sliding from layer 1"), ("flash", "gemma3"), ("varlen", "gemma3")),
    ],
)
@pytest.mark.parametrize("enforce_eager", [False, *slow(True)])
@pytest.mark.parametrize(
    "settings",
    [*slow({}, IN_CHUNKS), IN_CHUNKS | {"num_kv_blocks": 5}],
    ids=["at once", "in chunks", "with preemption"],
)
def test_greedy_tokens_equal_transformers_in_any_batches(
    backend, enforce_eager, model, settings, in_float32, tmp_path_factory
):
    path, reference = checkpoint(model, tmp_path_factory)
    shared = random_prompts([260], seed=5)[0]
    prompts = [*random_prompts([3, 255, 256, 1]), shared + [7] * 20, [*shared, 8, 9]]
    settings = {"num_kv_blocks": 40, "max_num_seqs": 5, "block_size": 256, **settings}
    with LLM(path, attn_backend=backend, enforce_eager=enforce_eager, **settings) as llm:
        ask(llm, random_prompts([20, 30], seed=6), max_tokens=8)  # nothing cached at all
        check_answers(llm, reference, prompts, 8)
        again = check_answers(llm, reference, prompts[4:], 8)
        preempted, line = llm.metrics()["num_preemptions"], llm.llm_engine.describe()
    assert all(out.num_cached_tokens == 256 for out in again) or preempted
    assert (preempted > 0) == (settings["num_kv_blocks"] == 5)
    assert in_float32["varlen paged"] > 0
    assert in_float32["varlen contiguous"] > 0
    assert backend == "varlen" or in_float32["with_kvcache"] > 0
    assert (in_float32["replay"] > 0) == (not enforce_eager)
    assert (in_float32["piece"] > 0) == (not enforce_eager and model != "gemma3")  # which cannot be cut
    assert (", prompts without" in line) == (not enforce_eager and model == "gemma3")


@pytest.mark.parametrize("model", ["qwen3", "qwen2 sliding from layer 1"])
def test_no_graph_is_larger_than_a_step_may_be(model, in_float32, tmp_path_factory):
    """Memory for a step's integers is reserved for as many tokens as a step may have."""
    path, _ = checkpoint(model, tmp_path_factory)
    with LLM(path, num_kv_blocks=40, max_num_seqs=200, max_num_batched_tokens=20) as llm:
        assert llm.llm_engine.runner.forward.decodes.sizes == [1, 2, 4, 8, 16, 20]
        outputs = ask(llm, random_prompts([3] * 30), max_tokens=4)
    assert all(len(out.outputs[0].token_ids) == 4 for out in outputs)


@pytest.fixture
def tried_out(monkeypatch):
    """Return the batches that an engine launches. Before the first step, these measure its memory."""
    batches, launch = [], ModelRunner.launch

    def launch_and_note(runner, batch, before=None):
        batches.append(batch)
        return launch(runner, batch, before)

    monkeypatch.setattr(ModelRunner, "launch", launch_and_note)
    return batches


def test_the_cache_gets_the_memory_that_weights_and_batches_leave(in_float32, tried_out, qwen3, monkeypatch):
    """The card of `doubles.install`: 1 GiB, 100 MiB at the trial's peak, 30 MiB of them from before."""
    drawn, draw = [], nanoengine.sampling.sampler.draw_tokens

    def noted(logits, rows, *args):
        drawn.append((len(rows), rows[0].params))
        return draw(logits, rows, *args)

    monkeypatch.setattr("nanoengine.sampling.sampler.draw_tokens", noted)
    settings = {"max_num_seqs": 20, "max_num_batched_tokens": 1100}
    with LLM(qwen3, attn_backend="flash", gpu_memory_utilization=0.0773, **settings) as llm:
        block_bytes = 2 * 2 * 256 * 2 * 32 * 4  # k and v, layers, tokens, kv heads, head_dim, float32
        trial_cache = 3 * block_bytes  # two blocks for a prompt of 511 tokens, and the null block
        usable = int((1 << 30) * 0.0773) - ((70 << 20) - trial_cache)
        metrics = llm.metrics()
    assert metrics["num_blocks"] == usable // block_bytes - 1
    prompts, samples = tried_out
    assert [chunk.end for chunk in prompts.chunks] == [511, 511, 78]  # a budget of 1100, used up
    assert len(samples.sampled_seqs) == samples.num_tokens == 20
    assert all(seconds == 0 for name, seconds in metrics.items() if "seconds" in name)  # was no step
    num_rows, params = drawn[1]  # with the settings that need most memory
    assert num_rows == 20
    assert params.min_p > 0
    assert params.top_k <= 0 < params.top_p < 1  # the whole vocabulary is sorted
    assert params.edits_logits
    assert params.logprobs is not None
    # What the backend was tried out with, and the longest prompts, whose K and V are written first.
    assert in_float32["varlen contiguous"] == 1
    assert in_float32["varlen paged"] >= 2
    assert in_float32["with_kvcache"] >= 2  # the most rows, once, beside the captures


NO_ROOM = "one block takes .* step take 17.0 GiB, graphs 1.0 GiB, libraries 1.0 GiB; raise gpu_"


@pytest.mark.parametrize(
    ("others", "here", "meanwhile", "ranks", "share", "expected"),
    [
        (0, 0, 0, 1, 0.9, 90 - 19),
        (0, 0, 9, 1, 0.9, 90 - 20),  # another process takes 9 GiB: at most 2 are charged, for libraries
        (0, 0, 9, 4, 0.9, 90 - 26),  # at most 8 for those of four ranks
        (9, 0, -9, 1, 0.9, 90 - 18),  # another process gives back 9 GiB: libraries are not charged
        (0, 45, 0, 1, 0.45, 45 - 19),  # beside an engine of the same size in this process
        (45, 0, 0, 1, 0.45, 45 - 19),  # and in another process
        (30, 5, 0, 1, 0.7, r"GiB: cuda:0 has 100.0 GiB, of which 65.0 GiB were free .* at most 0.65"),
        (0, 0, 0, 1, 0.2, NO_ROOM),
    ],
)
def test_an_engine_is_charged_for_what_it_takes_itself(
    others, here, meanwhile, ranks, share, expected, flash_doubles, monkeypatch
):
    """A card of 100 GiB, weights of 15, 2 for the largest step, 1 for graphs and 1 for cuBLAS and others."""
    taken = {"others": others, "allocated": here, "libraries": 0, "graphs": 0, "peak": 0}

    def gibs(*names):
        return sum(taken[name] for name in names) << 30

    def take(**more):
        taken.update({name: taken[name] + number for name, number in more.items()})

    everything = "others", "allocated", "libraries", "graphs"
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: ((100 << 30) - gibs(*everything), 100 << 30))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: gibs("allocated", "peak"))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: gibs("allocated"))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: gibs("allocated", "graphs"))
    settings = {"gpu_memory_utilization": share, "tensor_parallel_size": ranks, "enforce_eager": True}
    device = CUDA(torch.device("cuda", 0), EngineConfig(model=".", **settings))
    take(allocated=15)

    @contextlib.contextmanager
    def caches():
        take(allocated=4)
        yield 4 << 30
        take(allocated=-4)

    capture = lambda: take(graphs=1, others=meanwhile) or Graphs()  # noqa: E731
    trial = Trial("prompts", caches, lambda: take(peak=2, libraries=1), capture)
    Graphs = type("Graphs", (), {"__del__": lambda _: take(graphs=-1)})
    if isinstance(expected, int):
        assert device.free_bytes(trial) == expected << 30
    else:
        with pytest.raises(ValueError, match=expected):
            device.count_blocks(1 << 30, 99, device.free_bytes(trial))


def test_too_little_memory_for_the_weights_is_an_error(flash_doubles, tmp_path_factory, monkeypatch):
    for name, loads in (("qwen3", "load._load_decoder"), ("gemma2", "hf._load_transformers")):
        path, _ = checkpoint(name, tmp_path_factory)
        error = torch.OutOfMemoryError("Tried to allocate 9 B.")
        monkeypatch.setattr(f"nanoengine.models.{loads}", Mock(side_effect=error))
        with pytest.raises(ValueError, match=r"weights: they take 8.0 GiB in float32; Tried to allocate"):
            LLM(path, load_format="dummy", dtype="float32", hf_overrides={"vocab_size": 1 << 24})


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 100), (3, 2000), (50, 20), (7, 511)])
def test_a_scheduler_could_make_the_trial_batches(max_num_seqs, budget, in_float32, tried_out, qwen3):
    with LLM(qwen3, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget):
        prompts, samples, *_ = tried_out
    for batch in tried_out:
        assert 1 <= len(batch.chunks) <= max_num_seqs
        assert batch.num_tokens == sum(chunk.end for chunk in batch.chunks) <= budget
        assert all(1 <= chunk.end <= 511 for chunk in batch.chunks)
    assert prompts.num_tokens == min(budget, 511 * max_num_seqs)
    assert len(samples.chunks) == min(max_num_seqs, budget)


@pytest.mark.parametrize(
    ("capability", "dtype", "is_half"),
    [((7, 5), "auto", True), ((7, 5), "bfloat16", False), ((8, 0), "auto", False)],
)
def test_default_bfloat16_is_float16_before_ampere(capability, dtype, is_half, flash_doubles, monkeypatch):
    monkeypatch.setattr(FakeGPU, "capability", capability)
    device = FakeGPU(torch.device("cpu"), EngineConfig(model=".", dtype=dtype))
    assert device.choose_dtype(torch.bfloat16) == (torch.float16 if is_half else torch.bfloat16)
    assert ("float16 instead of bfloat16" in "".join(device.notes)) == is_half


def test_arrays_of_the_same_shapes_are_staged_at_the_same_addresses(flash_doubles):
    arrays = [np.arange(5), np.arange(3, dtype=np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)]
    staging = Staging(40 + 16 + 24 + 8, torch.device("cpu"))
    first = staging.send([*arrays, np.arange(1)])
    assert [t.tolist() for t in first] == [a.tolist() for a in arrays] + [[0]]
    assert [t.dtype for t in first] == [torch.int64, torch.int32, torch.int32, torch.int64]
    second = staging.send([a[::-1] for a in arrays])
    assert [t.tolist() for t in second] == [a[::-1].tolist() for a in arrays]
    assert [t.data_ptr() for t in second] == [t.data_ptr() for t in first[:3]]
    with pytest.raises(ValueError, match="cannot reshape"):  # never beyond its memory
        staging.send([np.arange(50)])
    halves = [(a / 2).astype(np.float32) for a in arrays]  # the same shapes
    assert [t.tolist() for t in staging.send(halves)] == [a.tolist() for a in halves]


@pytest.fixture
def late_gpu(monkeypatch):
    """A GPU that copies nothing until the host waits for an event that was recorded after the copy."""
    gpu, empty = types.SimpleNamespace(queue=[], num_copied=0, num_pinned=0), torch.empty

    def allocate(*shape, pin_memory=False, **settings):
        gpu.num_pinned += pin_memory
        return empty(*shape, **settings)

    def copy(target, source, non_blocking=False):
        assert non_blocking
        gpu.queue.append((target.numpy(), source.numpy()))  # memory, which nothing else may touch meanwhile

    def run(position):
        for target, source in gpu.queue[gpu.num_copied : position]:
            target[:] = source
        gpu.num_copied = max(gpu.num_copied, position)

    def make_event():
        event = types.SimpleNamespace(position=0, synchronize=lambda: run(event.position))
        event.record = lambda: setattr(event, "position", len(gpu.queue))
        return event

    gpu.run = run
    monkeypatch.setattr("torch.empty", allocate)
    monkeypatch.setattr("torch.Tensor.copy_", copy)
    monkeypatch.setattr("torch.cuda.Event", make_event)
    return gpu


def test_a_download_is_read_when_it_has_arrived(late_gpu):
    download = PinnedDownload(torch.tensor([3, 1, 4]))
    assert late_gpu.num_pinned == 1
    assert late_gpu.queue[0] is not None
    assert download.read().tolist() == [3, 1, 4]


def test_arrays_are_not_overwritten_before_they_are_copied(late_gpu):
    staging = Staging(24, torch.device("cpu"))
    first, second = (staging.send([np.array(numbers)])[0] for numbers in ([1, 2, 3], [4, 5, 6]))
    assert first.tolist() == [1, 2, 3]
    late_gpu.run(2)
    assert second.tolist() == [4, 5, 6]


def test_without_triton_the_flash_backends_write_with_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    modules = []
    for original in (triton_attention, flash_attention):
        spec = importlib.util.spec_from_file_location(original.__name__, original.__file__)
        modules.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, original.__name__, modules[-1])
        spec.loader.exec_module(modules[-1])
    assert modules[0].triton is None
    k, v, slots = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.tensor([5, 11, 4])
    cache = KVCache(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8))
    metadata = metadata_of([(3, 3)], torch.tensor([[1]]), slots)
    modules[1].VarlenAttention(metadata, 4)._write(k, v, cache)
    assert torch.equal(cache.k.view(12, 2, 8)[slots], k)
    assert torch.equal(cache.v.view(12, 2, 8)[slots], v)


def test_what_cublas_holds_is_freed_with_the_last_engine(flash_doubles, monkeypatch):
    freed: list = []
    monkeypatch.setattr("torch._C._cuda_clearCublasWorkspaces", lambda: freed.append(1), raising=False)
    monkeypatch.setattr(CUDA, "living", weakref.WeakSet())
    config = EngineConfig(model=".", enforce_eager=True)
    first, second = (CUDA(torch.device("cuda", 0), config) for _ in range(2))
    second.release()
    assert not freed
    first.release()
    assert freed
