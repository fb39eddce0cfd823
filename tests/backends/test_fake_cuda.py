"""The whole CUDA path on fake tensors: they have a shape, a dtype and a device, `cuda:0`, but no numbers.

What a GPU would refuse or wait for fails here: tensors of two devices in one operation, a number that the
host asks the device for, a copy that the host waits for. Tokens are what was never written: all of them 0.
"""

import contextlib
import ctypes
import itertools
import shutil
import subprocess
import types
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import nanoengine.assembly
import nanoengine.sampling.sampler
from nanoengine import LLM, SamplingParams
from nanoengine.backends.cpu.cpu_device import CPU
from nanoengine.backends.cuda import CUDA
from nanoengine.backends.device import upload
from nanoengine.engine import ModelRunner
from tests import doubles
from tests.helpers import checkpoint, random_prompts, slow
from tests.model_table import small_config, small_model

REAL_VARLEN_ATTN = pytest.importorskip("torch.nn.attention.varlen", reason="PyTorch 2.9").varlen_attn
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@pytest.fixture(scope="session")
def cuda_guard(tmp_path_factory, pytestconfig):
    """Give PyTorch without CUDA a device guard, without which it cannot slice even fake CUDA tensors.

    It is compiled once, and kept in pytest's cache.
    """
    if torch.version.cuda or torch.version.hip:
        return
    torch_path = Path(torch.__file__).parent
    source = tmp_path_factory.mktemp("guard") / "guard.cpp"
    source.write_text(GUARD)
    library = kept = source.with_suffix(".so")
    if hasattr(pytestconfig, "cache"):
        kept = pytestconfig.cache.mkdir("cuda_guard") / f"{torch.__version__}.so"
    if kept.exists():
        ctypes.CDLL(str(kept))
        return
    flags = "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_path / 'include'}", f"-L{torch_path / 'lib'}"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    try:
        subprocess.run(["g++", *flags, abi, str(source), "-lc10", "-o", library], check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"the device guard cannot be compiled: {error}")
    if kept != library:
        shutil.move(library, kept)
    ctypes.CDLL(str(kept))


class Watch(TorchDispatchMode):
    """Fails on what the host would wait for, or a GPU refuse, beyond what fake tensors notice themselves."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "aten":
            found = torch.utils._pytree.tree_leaves((args, kwargs, out))
            devices = {x.device.type for x in found if isinstance(x, torch.Tensor)}
            is_copy = func is torch.ops.aten.copy_.default and len(args) > 2
            is_queued = kwargs.get("non_blocking") or (is_copy and args[2])
            assert len(devices) < 2 or is_queued, f"{func} has tensors on {sorted(devices)}: the host waits"
        return out


def on_the_gpu(model, device):
    """Move its parameters and buffers to the device, without their numbers. Tied ones stay tied."""
    moved = {}

    def move(x):
        if id(x) not in moved:
            like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            moved[id(x)] = x, torch.nn.Parameter(like, False) if isinstance(x, torch.nn.Parameter) else like
        return moved[id(x)][1]

    for module in {*model.modules(), *(getattr(model, "head", model).modules())}:
        for held in (module._parameters, module._buffers, vars(module)):
            held.update({name: move(x) for name, x in held.items() if isinstance(x, torch.Tensor)})
    if getattr(model, "rope_table", None):
        model.rope_table = tuple(map(move, model.rope_table))
    return model


def attend(q, *others, **named):
    """Do what a kernel does to shapes and devices."""
    tensors = filter(torch.is_tensor, (*others, *named.values()))
    assert {x.device for x in tensors} == {q.device} == {torch.device("cuda", 0)}
    return torch.empty_like(q)


@pytest.fixture
def fake_gpu(cuda_guard, monkeypatch):
    """Return a context in which `LLM(device="cuda")` runs on fake tensors."""
    doubles.install(monkeypatch)  # streams, captures, memory figures
    monkeypatch.setattr("nanoengine.backends.cpu.cpu_device.CPU", CPU)
    monkeypatch.setattr("nanoengine.config.EngineConfig.resolve_device", lambda _: torch.device("cuda", 0))
    for name in ("capability", "capture_stream", "backends", "block_size"):
        monkeypatch.setattr(CUDA, name, getattr(doubles.FakeGPU, name))
    monkeypatch.setattr(CUDA, "running", lambda _: contextlib.nullcontext())
    # A trial looks at numbers, of which there are none.
    monkeypatch.setattr("nanoengine.backends.cuda.try_out", lambda *_: None)
    monkeypatch.setattr("nanoengine.backends.cuda.fusion_obstacle", lambda _: None)

    def pinned_memory(shape, dtype):
        with unset_fake_temporarily():
            array = torch.zeros(*shape, dtype=dtype).numpy()
        return torch.empty(*shape, dtype=dtype), array

    for module in ("cuda", "device"):
        monkeypatch.setattr(f"nanoengine.backends.{module}.pinned_memory", pinned_memory)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", REAL_VARLEN_ATTN)  # knows fake tensors
    for name in ("with_kvcache", "varlen_func"):
        monkeypatch.setattr(f"flash_attn.flash_attn_{name}", attend)
    load, launch, collect = nanoengine.assembly.load_model, ModelRunner.launch, ModelRunner.collect

    def load_model(checkpoint, config, target, *args):
        with unset_fake_temporarily():  # with numbers, since a model is probed when it is loaded
            model = load(checkpoint, config, target._replace(device=torch.device("cpu")), *args)
        return on_the_gpu(model, target.device)

    def watched(*args):
        with Watch():
            return launch(*args)

    def collected(*args):
        with unset_fake_temporarily():  # it reads what has arrived, and computes nothing
            return collect(*args)

    monkeypatch.setattr("nanoengine.assembly.load_model", load_model)
    monkeypatch.setattr(ModelRunner, "launch", watched)
    monkeypatch.setattr(ModelRunner, "collect", collected)
    return FakeTensorMode(allow_non_fake_inputs=True)


SETTINGS = [
    *({"temperature": 0}, {}, {"temperature": 0.5, "seed": 3, "n": 2}),
    *({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.5, "min_p": 0.01}),
    *({"presence_penalty": 0.5, "frequency_penalty": 0.1}, {"repetition_penalty": 1.2}),
    *({"logit_bias": {3: 2.0}}, {"allowed_token_ids": [0, 5]}, {"bad_words": ["b"]}),
    {"min_tokens": 2, "stop_token_ids": [9]},
    {"structured_outputs": {"regex": "(?s:.*)"}, "stop_token_ids": [9]},
    {"logits_processors": [lambda output_ids, logits: logits + 1]},
    *({"logprobs": 3}, {"logprobs": -1, "top_k": 3}),
    *({"prompt_logprobs": 2}, {"prompt_logprobs": -1, "logprobs": 0}),
]


def walk(path, fields, prompt_lengths=None, **settings):
    """Run prompts at once, in chunks and beside decodes, decodes in graphs and not, pending tokens."""
    prompts = random_prompts(prompt_lengths or [1 + 37 * i % 50 for i in range(len(fields))])
    sizes = {"num_kv_blocks": 40, "max_num_batched_tokens": 128, "max_logprobs": -1, **settings}
    with LLM(path, dtype="bfloat16", device="cuda", max_num_seqs=min(10, 2 * len(fields)), **sizes) as llm:
        params = [SamplingParams(max_tokens=3, ignore_eos=True, **f) for f in fields]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(sample.token_ids) == 3 for out in outputs for sample in out.outputs)
        return llm.llm_engine.describe()


# All side by side, and each alone where it takes a path of its own
ALONE = [SETTINGS[0], SETTINGS[1], {"top_k": 5}, {"top_p": 0.9}, {"logprobs": 3}, {"prompt_logprobs": 2}]


@pytest.mark.parametrize(
    ("backend", "fields", "settings"),
    [
        ("varlen", SETTINGS[:1], {}),
        *slow(("flash", SETTINGS, {"num_kv_blocks": None})),  # the trial pass sizes the cache
        *slow(("varlen", SETTINGS, {}), *(("flash", [x, {}, x], {}) for x in ALONE)),
        *slow(("flash", SETTINGS, {"enforce_eager": True, "async_scheduling": False})),
    ],
)
def test_batches_with_any_parameters_do_not_wait_for_the_gpu(backend, fields, settings, fake_gpu, babbler):
    with fake_gpu:
        line = walk(babbler, fields, attn_backend=backend, **settings)
    assert f"{backend} attention" in line
    assert ("graphs" in line) == ("enforce_eager" not in settings)


# Falcon with one KV head, or few, picks them by a list: transformers' own code waits for that in each layer.
TRANSFORMERS = ["gemma2", "opt", "gemma", "falcon, many kv heads", "phi3", "granite", "cohere2"]
STATES = ["qwen3_5_text", "mamba2", "lfm2", "mamba", "olmo_hybrid"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", "transformers' code"),
        *((name, " graphs (") for name in ("qwen2 sliding from layer 1", "qwen3", "llama yarn rope")),
        *((name, "transformers' code") for name in TRANSFORMERS),
        *((name, "no graphs (its layers") for name in STATES),
    ],
)
def test_models_of_any_kind_do_not_wait_for_the_gpu(name, expected, fake_gpu, tmp_path_factory):
    if name in STATES:
        path = tmp_path_factory.mktemp("states")
        small_model(small_config(name)).save_pretrained(path)
    else:
        path, _ = checkpoint(name, tmp_path_factory)
    with fake_gpu:
        assert expected in walk(path, SETTINGS[:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3 tied, one kv head", "gpt2"])
def test_layers_rounded_at_load_do_not_wait_for_the_gpu(name, fake_gpu, monkeypatch, tmp_path_factory):
    linear = pytest.importorskip("nanoengine.backends.triton_linear")
    path, _ = checkpoint(name, tmp_path_factory)
    models, prepare, to_the_gpu = [], CUDA.prepare, on_the_gpu

    def on_the_host(model, device):
        """Leave the weights of decoder.py on the host, as it loads them to be rounded."""
        if not model.replaceable:
            return to_the_gpu(model, device)
        table = tuple(torch.empty_like(x, device=device) for x in model.rope_table)
        model = to_the_gpu(model, torch.device("cpu"))
        model.rope_table = table
        return model

    def prepared(gpu, model):
        with monkeypatch.context() as patch:  # PyTorch's own method cannot move fake parameters
            patch.setattr(torch.nn.Module, "to", to_the_gpu)
            prepare(gpu, model)
        models.append(model)

    monkeypatch.setitem(globals(), "on_the_gpu", on_the_host)
    monkeypatch.setattr(CUDA, "prepare", prepared)
    monkeypatch.setattr(linear, "_linear_kernel", kernel := MagicMock())
    kernel.__getitem__.return_value = lambda out, *given, **_: attend(given[0], out, *given[1:])
    monkeypatch.setattr(linear, "generation", lambda device: "sm90")
    # These look at numbers, of which there are none.
    monkeypatch.setattr(linear, "try_out", lambda *_: None)
    monkeypatch.setattr("nanoengine.backends.quantization.Quantized.fitted", lambda self, dtype: self)
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    with fake_gpu:
        line = walk(path, SETTINGS[:2], quantization="int4")
    assert "bfloat16 with int4 weights on cuda:0" in line
    (model,) = models
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert {x.device for _, x in tensors} == {torch.device("cuda", 0)}
    assert not [name for name, x in tensors if x.dim() == 2 and "proj" in name and x.dtype == torch.bfloat16]
    kinds = Counter(type(module).__name__ for module in model.modules())
    assert kinds["TritonLinear"] == 9
    assert kinds["Linear"] == 0
    assert kinds["PackedEmbedding"] == ("tied" in name)


@pytest.mark.slow
def test_saving_to_a_kv_store_and_loading_do_not_wait_for_the_gpu(
    fake_gpu, tmp_path_factory, monkeypatch, caplog
):
    kvstore = pytest.importorskip("nanoengine.extensions.kvstore.connector")
    path, _ = checkpoint("qwen2 sliding from layer 1", tmp_path_factory)
    calls = []

    def watched(method):
        def call(*args):
            with Watch():
                calls.append(method.__name__)
                return method(*args)

        return call

    monkeypatch.setattr(kvstore, "digest_weights", lambda model: b"")
    for name in ("_copy_out", "_write_block"):
        monkeypatch.setattr(kvstore.KVConnector, name, watched(getattr(kvstore.KVConnector, name)))
    groups = [np.zeros(size, np.uint8) for size in [2 * 256 * 2 * 16 * 2] * 2]  # K and V of a layer each
    monkeypatch.setattr(kvstore, "decode", lambda entry, key, sizes: groups)
    answers = itertools.chain([False], itertools.repeat(True))  # the second prompt is there, not the first
    touch, get = (lambda keys: [next(answers) for _ in keys], lambda keys: [b""] * len(keys))
    store = types.SimpleNamespace(touch=touch, get=get, put=lambda key, data: None, delete=lambda key: None)
    with fake_gpu:
        assert " graphs (" in walk(path, SETTINGS[:2], kv_store=store, prompt_lengths=[300, 280])
    assert set(calls) == {"_copy_out", "_write_block"}
    assert "cannot be" not in caplog.text  # a bfloat16 cache is copied too


@pytest.mark.parametrize(
    "wait",
    [
        *(lambda x: x.argmax().item(), lambda x: bool(x.isnan().any()), lambda x: x[0].tolist()),
        *(lambda x: x.cpu(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x + torch.ones(x.shape[1])),
        lambda x: x + torch.ones(1).to(x.device),
        lambda x: x.__setitem__((0, upload(np.array([1]), x.device)), -1.0),
    ],
)
def test_a_wait_or_a_tensor_on_the_cpu_is_noticed(wait, fake_gpu, babbler, monkeypatch):
    draw = nanoengine.sampling.sampler.draw_tokens

    def waiting(logits, *args):
        wait(logits)
        return draw(logits, *args)

    monkeypatch.setattr("nanoengine.sampling.sampler.draw_tokens", waiting)
    with fake_gpu, pytest.raises(Exception, match=r"waits|aten\.|device"):
        walk(babbler, [{}])
