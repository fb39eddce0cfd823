"""The engine on a CPU: threads pinned to cores, and kernels compiled and cached."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from nanoengine import LLM
from nanoengine.backends.cpu.build import FLAGS, LEVELS, SOURCE, V4, NoKernelsError, digest, load_library
from nanoengine.backends.cpu.cpu_device import CPU
from nanoengine.backends.cpu.kernels import TYPES, Kernels
from nanoengine.backends.cpu.packed_layers import pack_weights
from nanoengine.backends.cpu.pinned_threads import place
from nanoengine.backends.cuda import CUDA
from nanoengine.backends.device import Device
from nanoengine.config import EngineConfig
from tests.backends.test_kernels import quantized
from tests.helpers import DEMO, ask, slow
from tests.serving import TIMEOUT, wait_until

# Seen from outside, in a process with as many threads as cores: the tests themselves run on one thread.
CODE = """
import json, os, signal, threading, torch
from nanoengine.backends.cpu import pinned_threads as threads
from nanoengine.backends.cpu.pinned_threads import PinnedThreads

x = torch.randn(600, 600)
cores = os.sched_getaffinity(0)

def places():
    return [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]

def enter(pinned, num_threads=len(cores)):
    torch.set_num_threads(num_threads)
    with pinned:
        x @ x
        seen = {"own": sorted(os.sched_getaffinity(0)), "inside": places()}
    return seen | {"is_restored": os.sched_getaffinity(0) == cores}

x @ x
seen = {"disabled": enter(PinnedThreads(enabled=False))}
seen["too many"] = enter(PinnedThreads(), len(cores) + 1)
seen["single"] = enter(PinnedThreads(), 1)
os.environ["GOMP_CPU_AFFINITY"] = "0"
seen["placed by the user"] = enter(PinnedThreads())
del os.environ["GOMP_CPU_AFFINITY"]
unlimited, threads.cpu_quota = threads.cpu_quota, lambda: len(cores) - 0.5
seen["quota"] = enter(PinnedThreads())
threads.cpu_quota = unlimited
pinned = PinnedThreads()
seen["pinned"] = enter(pinned)
pinned.__enter__()  # as if a signal's handler had raised at its end: the block does not run
seen["after an exception"] = enter(pinned)
pinned.__enter__()
os.sched_setaffinity(0, {max(cores)})
with pinned:
    pass
seen["the user's later change"] = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores)
with pinned:
    os.sched_setaffinity(0, {max(cores)})
seen["the user's change inside"] = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores)
thread = threading.Thread(target=lambda: seen.update(other=enter(pinned)))
thread.start()
thread.join()

def strike(number, cpus, pin=os.sched_setaffinity, main=threading.get_native_id()):
    pin(number, cpus)
    if threading.get_native_id() == main:
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
os.sched_setaffinity = strike
try:
    PinnedThreads()._pin(tuple(cores))
except KeyboardInterrupt:
    seen["raised in the callback"] = True
print(json.dumps(seen))
"""
WITHOUT_PLACES = {key: x for key, x in os.environ.items() if not key.startswith(("OMP", "GOMP", "KMP"))}


@pytest.fixture(scope="module")
def seen():
    command = [sys.executable, "-c", CODE]
    return json.loads(subprocess.run(command, env=WITHOUT_PLACES, capture_output=True, check=True).stdout)


cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_cores = pytest.mark.skipif(len(cores) < 2, reason="needs Linux and two cores")


@needs_cores
def test_every_core_gets_one_thread_of_a_team_and_the_caller_is_unpinned_even_after_an_exception(seen):
    assert seen["pinned"]["own"] == [cores[0]]
    assert {place[0] for place in seen["pinned"]["inside"] if len(place) == 1} == set(cores)
    assert seen["pinned"]["is_restored"]
    assert seen["after an exception"] == seen["pinned"]
    assert seen["raised in the callback"]
    assert seen["the user's later change"] == seen["the user's change inside"] == [cores[-1]]
    counts = [seen["other"]["inside"].count([core]) for core in cores]
    assert counts[0] == 1  # another thread alone: the main thread is unpinned
    assert all(count >= 2 for count in counts[1:])  # a worker of each team


@needs_cores
@pytest.mark.parametrize("why", ["disabled", "too many", "single", "placed by the user", "quota"])
def test_nothing_is_pinned_if_disabled_or_threads_are_not_one_per_core(why, seen):
    assert seen[why]["own"] == cores
    assert all(place == cores for place in seen[why]["inside"])


def describe(system, **files):
    """Write the files of each CPU, as Linux does."""
    for path, values in files.items():
        for cpu, value in enumerate(values):
            name = "cpu_capacity" if path == "capacity" else f"topology/{path}"
            file = system / f"cpu{cpu}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")


SIBLINGS = ["0,4", "1,5", "2,6", "3,7"] * 2
LAYOUTS = {
    "two threads a core": {"thread_siblings_list": SIBLINGS},
    "two sockets": {"thread_siblings_list": SIBLINGS, "physical_package_id": [0, 1, 0, 1, 0, 1, 0, 1]},
    "neighbours": {"thread_siblings_list": ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"]},
    "large and small": {"capacity": [446, 446, 1024, 1024, 446, 446, 1024, 1024]},
    "not described": {},
}


@pytest.mark.parametrize(
    ("layout", "num_threads", "allowed", "expected"),
    [
        ("two threads a core", 4, range(8), (0, 1, 2, 3)),
        ("two threads a core", 8, range(8), tuple(range(8))),
        ("two threads a core", 3, range(8), ()),  # another process may have three as well
        ("two threads a core", 2, [5, 7], (5, 7)),  # a container's
        ("two threads a core", 2, [1, 5, 7], (1, 7)),
        ("two sockets", 4, range(8), (0, 2, 1, 3)),
        ("neighbours", 4, range(8), (0, 2, 4, 6)),
        ("large and small", 4, range(8), (2, 3, 6, 7)),
        ("large and small", 8, range(8), tuple(range(8))),
        ("large and small", 2, range(8), ()),
        ("not described", 8, range(8), tuple(range(8))),
        ("not described", 4, range(8), ()),
    ],
)
def test_each_core_gets_a_thread_before_any_gets_two(layout, num_threads, allowed, expected, tmp_path):
    describe(tmp_path, **LAYOUTS[layout])
    assert place(num_threads, frozenset(allowed), tmp_path) == expected


# An operator in a thread without workers starts one for each further core.
RESTING = """
import json, os, sys, torch
from nanoengine import LLM, SamplingParams

torch.set_num_threads(len(os.sched_getaffinity(0)))
llm = LLM(sys.argv[1], max_num_seqs=2, num_kv_blocks=16)
device = llm.llm_engine.runner.device

def num_started():
    before = len(os.listdir("/proc/self/task"))
    x @ x
    return len(os.listdir("/proc/self/task")) - before

x = torch.randn(600, 600)
seen = [num_started(), num_started()]
llm.generate("Hi", SamplingParams(max_tokens=2), use_tqdm=False)
seen += [num_started()]
llm.llm_engine.add_request("one", "Hi", SamplingParams(max_tokens=2))
llm.llm_engine.step()
seen += [num_started()]
llm.llm_engine.abort_request("one")
seen += [num_started()]
with device.running():
    pinned = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
llm.llm_engine.close()
print(json.dumps([*seen, num_started(), sum(len(cores) == 1 for cores in pinned)]))
"""


@needs_cores
@pytest.mark.slow
def test_an_idle_engine_keeps_no_threads():
    """Two teams on the same cores take turns: a decoding step of a server took 92 ms instead of 57."""
    command = [sys.executable, "-c", RESTING, DEMO]
    result = subprocess.run(command, env=WITHOUT_PLACES, capture_output=True, check=True)
    others = len(cores) - 1
    # Made; not again; generated; in the middle of a request; aborted; closed. New ones are pinned as well.
    assert json.loads(result.stdout) == [others, 0, others, 0, others, others, len(cores)]


def write_compiler(path, script):
    """Write a shell script as a compiler, and return its path."""
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


# It copies what was compiled for the engine. What it makes for float16, which it does not support, has none.
COPYING = """
[ "$1" = --version ] && exit
for last; do :; done
case "$*" in
  *-DTYPES=1*) cp {float32} "$last" ;;
  *-DTYPES=2*) cp {bfloat16} "$last" ;;
  *) {otherwise} ;;
esac
"""


def compiled(dtype):
    """Return the path of the kernels that engines of this machine use."""
    return Kernels(dtype).library._name


@pytest.fixture
def quick_compiler(request, tmp_path, monkeypatch):
    """Install a compiler that copies compiled libraries. Returns its cache, which is empty."""
    paths = {"float32": compiled(torch.float32), "bfloat16": compiled(torch.bfloat16)}
    otherwise = getattr(request, "param", 'cp {bfloat16} "$last"')
    script = COPYING.replace("{otherwise}", otherwise).format(**paths, compiler=os.environ.get("CXX", "g++"))
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "g++", script)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def cached_library(cache):
    (path,) = (cache / "nanoengine").glob("*.so")
    return path


def test_kernels_are_compiled_for_a_dtype_when_it_is_first_used(quick_compiler, monkeypatch, default_sigint):
    kernels = Kernels(torch.bfloat16)
    before = kernels.seconds
    assert kernels.serves(torch.bfloat16)
    assert not kernels.serves(torch.int8)
    assert len(list((quick_compiler / "nanoengine").iterdir())) == 1
    with monkeypatch.context() as patch:  # Ctrl-C while the compiler runs does not mean that it failed
        patch.setattr(kernels, "_load", lambda dtype: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            kernels.serves(torch.float32)
    assert kernels.silu_and_mul(torch.ones(1, 2)).item() == pytest.approx(0.731059)
    assert len(list((quick_compiler / "nanoengine").iterdir())) == 2
    assert kernels.seconds > before
    with pytest.raises(RuntimeError, match="no kernels for float64"):
        Kernels(torch.float64)


OTHERWISE = ['cp {bfloat16} "$last"', *slow('exec {compiler} "$@" -O0 -U__FLT16_MAX__')]


@pytest.mark.parametrize("quick_compiler", OTHERWISE, indirect=True, ids=["copied", "compiled"])
def test_auto_is_float32_with_kernels_if_the_compiler_does_not_support_the_dtype(quick_compiler):
    device = CPU(torch.device("cpu"), EngineConfig(model=DEMO))
    assert device.choose_dtype(torch.float16) == torch.float32
    assert device.kernels.serves(torch.float32)
    assert device._no_kernels is None
    assert not device.kernels.serves(torch.float16)
    asked = CPU(torch.device("cpu"), EngineConfig(model=DEMO, dtype="float16"))
    assert asked.choose_dtype(torch.float16) == torch.float16  # by PyTorch
    assert asked.kernels is None
    assert asked._no_kernels == "the compiler does not support float16"


@pytest.mark.parametrize("content", [b"", b"garbage", "half"])
def test_kernels_are_compiled_once_and_again_if_they_are_corrupt_or_flags_change(
    content, quick_compiler, monkeypatch
):
    """A library that is cut short has lost pages, and loading it raised SIGBUS."""
    assert Kernels().was_compiled
    path = cached_library(quick_compiler)
    good = path.read_bytes()
    path.unlink()  # what is loaded stays as it is
    path.write_bytes(good[: len(good) // 2] if content == "half" else content)
    assert Kernels().was_compiled
    assert not Kernels().was_compiled
    assert cached_library(quick_compiler).read_bytes() == good
    assert [path.suffix for path in (quick_compiler / "nanoengine").iterdir()] == [".so"]
    monkeypatch.setattr("nanoengine.backends.cpu.build.FLAGS", FLAGS + " -DOTHER")
    assert Kernels().was_compiled


WITHOUT_BFLOAT16 = V4.replace("avx512_bf16", "")


@pytest.mark.parametrize(
    ("features", "end", "level"),
    [(V4, None, "x86-64-v4"), (WITHOUT_BFLOAT16, None, "x86-64-v3"), ("avx2", None, ""), (V4, -1, "")],
)
def test_without_a_compiler_a_library_of_the_wheel_is_loaded_if_it_fits_the_processor_and_its_digest(
    features, end, level, tmp_path, monkeypatch
):
    content = Path(compiled(torch.bfloat16)).read_bytes()
    for each in LEVELS:
        (tmp_path / f"{each}-0-0-{digest(content)}.so").write_bytes(content[:end])
    monkeypatch.setattr("nanoengine.backends.cpu.build.FOLDER", tmp_path)
    monkeypatch.setattr("nanoengine.backends.cpu.build._processor", lambda: f"x86_64 flags : fpu {features}")
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    if level:
        library, was_compiled = load_library(TYPES[torch.bfloat16])
        assert library._name.startswith(f"{tmp_path}/{level}-")
        assert not was_compiled
    else:
        with pytest.raises(NoKernelsError, match=r"no C\+\+ compiler"):
            load_library(TYPES[torch.bfloat16])


def test_the_features_of_a_level_are_those_that_its_libraries_use():
    """A processor without one of them would end the process with SIGILL."""
    compiler = os.environ.get("CXX", "g++").split()
    names = {"lzcnt": "abm", "bmi": "bmi1"}  # as in /proc/cpuinfo
    for needed, options in LEVELS.values():
        command = [*compiler, *options.split(), "-dM", "-E", "-x", "c++", os.devnull]
        defined = re.findall(r"#define __(\w+)__ 1", subprocess.check_output(command, text=True))
        used = {re.sub("(?<=512)(?=bf|vnni)", "_", names.get(x.lower(), x.lower())) for x in defined}
        assert {x for x in used if re.match("avx|fma|f16c|bmi|abm|movbe", x)} - {"avx"} == {*needed.split()}


WITHOUT_OPENMP = """
for option; do
  [ "$option" = -fopenmp ] && echo "clang: error: unsupported option '-fopenmp'" >&2 && exit 1
done
exec g++ "$@" -O0
"""


@pytest.mark.slow  # the kernels are compiled again
def test_kernels_use_one_thread_if_the_compiler_does_not_support_openmp(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "clang", WITHOUT_OPENMP)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with LLM(str(DEMO), num_kv_blocks=20) as llm:
        assert "kernels use one thread: the compiler does not support OpenMP" in caplog.messages[-1]
        device = llm.llm_engine.runner.device
        assert device.kernels.silu_and_mul(torch.ones(1, 2)).item() == pytest.approx(0.731059)
        assert not Kernels().was_compiled


@pytest.mark.slow
def test_clang_understands_the_kernels():
    """Clang does not allow all that GCC does, such as structured bindings in lambdas of a parallel region."""
    clang = shutil.which("clang++") or pytest.skip("needs clang++")
    options = "-fsyntax-only", "-std=c++17", "-fopenmp-simd", "-DTYPES=7"
    subprocess.run([clang, *options, str(SOURCE)], check=True)


HANGING = '[ "$1" = --version ] && exit\nsleep 987 & echo $! > "$0.pid"\nwait\n'


def test_kernels_compile_without_a_cache_and_leave_no_file(quick_compiler, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    (quick_compiler / "nanoengine").write_text("")  # a file, where the folder should be
    before = sorted(tmp_path.rglob("*"))
    kernels = Kernels()
    assert kernels.was_compiled
    assert kernels.silu_and_mul(torch.zeros(1, 4)).tolist() == [[0, 0]]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def hanging_compiler(tmp_path):
    return write_compiler(tmp_path / "g++", HANGING)


def started_process(compiler):
    """Return the id of the process that the hanging compiler started, or 0 before it has."""
    file = compiler.with_name("g++.pid")
    return int(file.read_text() or 0) if file.exists() else 0


def wait_until_ended(pid):
    """Wait until a process has ended: a killed one may take a moment."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)


def test_a_compiler_that_hangs_is_killed_with_all_its_processes(hanging_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(hanging_compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("nanoengine.backends.cpu.build.COMPILER_SECONDS", 0.1)
    communicate = subprocess.Popen.communicate

    def communicate_later(self, timeout):
        if "--version" in self.args:
            return communicate(self, timeout=TIMEOUT)
        wait_until(lambda: started_process(hanging_compiler))
        return communicate(self, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_later)
    with pytest.raises(RuntimeError, match=r"did not end in 0\.1 s"):
        Kernels()
    wait_until_ended(started_process(hanging_compiler))
    assert not list((tmp_path / "cache" / "nanoengine").iterdir())


# SIGTERM arrives in the constructor of Popen, when the compiler has already started.
WHILE_IT_STARTS = """
import os, signal, subprocess, time
start = subprocess.Popen.__init__
def strike(self, command, **settings):
    start(self, command, **settings)
    while "--version" not in command and not os.path.exists(command[0] + ".pid"):
        time.sleep(0.01)
    if "--version" not in command:
        signal.raise_signal(signal.SIGTERM)
subprocess.Popen.__init__ = strike
"""


@pytest.mark.slow  # processes that import PyTorch
@pytest.mark.parametrize("before", ["", WHILE_IT_STARTS], ids=["while it runs", "while it starts"])
def test_sigterm_while_compiling_leaves_no_file_and_no_process(hanging_compiler, tmp_path, before):
    code = f"{before}\nfrom nanoengine.backends.cpu.kernels import Kernels; Kernels()"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(hanging_compiler)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: started_process(hanging_compiler) or process.poll() is not None)
        process.terminate()
        assert process.wait(TIMEOUT) == -signal.SIGTERM
    wait_until_ended(started_process(hanging_compiler))
    assert not list((tmp_path / "cache" / "nanoengine").iterdir())


@pytest.mark.parametrize(
    ("compiler", "reason"), [("false", "failed"), ("", "no C++ compiler"), ("/no/such/g++", "No such file")]
)
def test_without_a_compiler_pytorch_runs(compiler, reason, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setattr("shutil.which", lambda _: None)
    with LLM(str(DEMO), num_kv_blocks=20) as llm:
        assert llm.llm_engine.runner.device.kernels is None
        assert "torch attention (not compiled: " in (line := caplog.messages[-1])
        assert reason in line
        assert len(ask(llm, [5], max_tokens=3)[0].outputs[0].token_ids) == 3


def test_a_layer_in_two_places_is_packed_once():
    layer, kernels = nn.Linear(4, 4, bias=False).requires_grad_(False), Kernels()
    model = nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)])
    pack_weights(model, kernels)
    assert model[0][0] is model[1][0] is not layer


class Scaled(nn.Embedding):
    """An embedding like Gemma's, whose rows are also not those of its weight."""

    def forward(self, ids):
        return super().forward((ids + 1) % 4) * torch.tensor(3.0).to(self.weight.dtype)


class Curious(nn.Embedding):
    """An embedding that reads its weight itself."""

    def forward(self, ids):
        return self.weight[ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Curious])
def test_a_tied_embedding_is_held_once_unless_its_class_reads_the_weight_and_gives_the_same_bits(kind, dtype):
    kernels, ids = Kernels(), torch.tensor([[3, 0], [1, 1]])
    model = nn.ModuleList([kind(4, 6), nn.Linear(6, 4, bias=False)]).to(dtype).requires_grad_(False)
    model[0].weight = model[1].weight
    weight, expected = weakref.ref(model[0].weight), model[0](ids)
    pack_weights(model, kernels)
    assert isinstance(model[0], kind)
    assert torch.equal(model[0](ids), expected)
    if kind is not Curious:
        assert model[0].head[0] is model[1]
        assert not list(model[0].parameters()) + list(model[0].buffers())
        assert weight() is None


@pytest.mark.parametrize(
    ("dtype", "activations", "bits"),
    [("bfloat16", "auto", 8), ("bfloat16", "float", 0), ("float32", "auto", 0), ("float32", "int8", 8)],
)
def test_activations_are_rounded_if_it_is_faster(dtype, activations, bits, monkeypatch, caplog):
    monkeypatch.setattr(Kernels, "are_integers_fast", True)
    settings = {"quantization": "int4", "dtype": dtype, "activations": activations}
    with LLM(str(DEMO), num_kv_blocks=20, **settings) as llm:
        forms = [getattr(module, "form", None) for module in llm.llm_engine.runner.model.modules()]
        assert {form.activation_bits for form in forms if form and form.bits} == {bits}
        assert {form.bits for form in forms if form and form.bits} == {4, 6 if bits else 8}  # 6: the head
        for largest, fewer in ((31, 6), (32, 8), (-33, 8)):  # a checkpoint's weight of 8 bits
            weight = quantized(32, 64, 6, 16, True)._replace(bits=8)
            weight.integers[3, 5] = largest
            packed = llm.runner.device.pack(weight, None, llm.model_config.dtype)
            assert packed.form.bits == (fewer if bits else 8)
            assert torch.equal(packed.weight, weight.dequantize(llm.model_config.dtype))
    assert (" with int4 weights and int8 activations on cpu" in caplog.messages[-1]) == bool(bits)


def test_int8_is_refused_without_kernels():
    for name in "quantization", "activations":
        with pytest.raises(ValueError, match=f"{name}='int8' needs compiled kernels: enforce_eager"):
            LLM(str(DEMO), enforce_eager=True, **{name: "int8"})
    with pytest.raises(ValueError, match="quantization='int8' needs kernels, which cpu lacks"):
        Device(torch.device("cpu"), EngineConfig(model="m", quantization="int8"))
    with pytest.raises(ValueError, match="activations='int8' is supported on a CPU only, not on cuda"):
        CUDA(torch.device("cuda"), EngineConfig(model="m", activations="int8"))


def test_routers_are_not_quantized():
    model = nn.ModuleDict({"gate": nn.Linear(16, 4), "up_proj": nn.Linear(16, 4)}).requires_grad_(False)
    pack_weights(model, Kernels(), bits=8)
    assert [layer.form.bits for layer in model.values()] == [0, 8]
