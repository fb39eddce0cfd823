"""What the engine does about a CPU: threads on cores of their own, kernels compiled and kept."""

import grp
import json
import os
import pwd
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch import nn

from nanoengine import LLM, SamplingParams
from nanoengine.backends.cpu import FLAGS, Kernels, _digest
from nanoengine.models.decoder import RMSNorm, rotate
from tests.helpers import DEMO

# Seen from outside, in a process with as many threads as cores: the tests themselves run on one thread.
CODE = """
import json, os, sys, threading, torch
from nanoengine.backends.cpu import PinnedThreads

x = torch.randn(600, 600)
pinned = PinnedThreads(**json.loads(sys.argv[1]))
if len(sys.argv) > 2:
    torch.set_num_threads(int(sys.argv[2]))
x @ x
before = os.sched_getaffinity(0)


def places():
    return [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]


with pinned:
    x @ x
    inside = places()
    own = sorted(os.sched_getaffinity(0))
restored = os.sched_getaffinity(0) == before
other = []


def in_another_thread():
    with pinned:
        x @ x
        other.extend(places())


thread = threading.Thread(target=in_another_thread)
thread.start()
thread.join()
print(json.dumps({"own": own, "inside": inside, "other": other, "restored": restored}))
"""


def run(*arguments, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMP", "GOMP", "KMP"))}
    command = [sys.executable, "-c", CODE, *arguments]
    result = subprocess.run(command, env={**env, **environment}, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_cores = pytest.mark.skipif(len(cores) < 2, reason="needs Linux and two cores")


@needs_cores
def test_every_core_gets_one_thread_and_the_caller_is_let_go():
    seen = run("{}", str(len(cores)))
    assert seen["own"] == [cores[0]]
    assert {place[0] for place in seen["inside"] if len(place) == 1} == set(cores)
    assert seen["restored"]


@needs_cores
def test_another_thread_s_team_is_pinned_too():
    seen = run("{}", str(len(cores)))
    counts = [seen["other"].count([core]) for core in cores]
    assert counts[0] == 1  # the calling thread alone: the main thread was let go
    assert all(count == 2 for count in counts[1:])  # a worker of each team


@needs_cores
@pytest.mark.parametrize("arguments", [['{"enabled": false}'], ["{}", "1"], ["{}", str(len(cores) + 1)]])
def test_nothing_is_changed_where_it_is_not_wanted_or_not_one_thread_per_core(arguments):
    seen = run(*arguments)
    assert seen["own"] == cores
    assert cores in seen["inside"]


@needs_cores
def test_threads_that_the_user_has_placed_stay_there():
    seen = run("{}", GOMP_CPU_AFFINITY=str(cores[1]))
    assert {tuple(place) for place in seen["inside"]} <= {(cores[1],), tuple(cores)}
    assert seen["own"] == [cores[1]]


def test_kernels_are_compiled_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Kernels().was_compiled
    again = Kernels()
    assert not again.was_compiled
    assert [path.suffix for path in (tmp_path / "nanoengine").iterdir()] == [".so"]
    monkeypatch.setattr("nanoengine.backends.cpu.FLAGS", FLAGS + " -DOTHER")
    assert Kernels().was_compiled


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels, compiled for these tests."""
    cache = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        Kernels()
    return cached_library(cache)


@pytest.fixture
def quick_compiler(compiled, tmp_path, monkeypatch):
    """One that has compiled them already."""
    script = f'#!/bin/sh\n[ "$1" = --version ] && exit\nfor last; do :; done\ncp {compiled} "$last"\n'
    (tmp_path / "g++").write_text(script)
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def cached_library(cache):
    (path,) = (cache / "nanoengine").glob("*.so")
    return path


@pytest.mark.parametrize("content", [b"", b"garbage", "half"])
def test_a_cached_library_that_was_spoiled_is_compiled_anew_and_replaced(content, quick_compiler):
    """Cut short, its pages are missing: loading it was a SIGBUS."""
    Kernels()
    path = cached_library(quick_compiler)
    good = path.read_bytes()
    path.unlink()  # what is loaded stays as it is
    path.write_bytes(good[: len(good) // 2] if content == "half" else content)
    assert Kernels().was_compiled
    assert not Kernels().was_compiled
    assert cached_library(quick_compiler).read_bytes() == good


HANGING = '#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 987 & echo $! > "$0.pid"\nwait\n'
PLANTED = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void planted() { fclose(fopen(getenv("PLANTED"), "w")); }
"""


def plant(tmp_path, path):
    """Put a library there that leaves a mark when it is loaded."""
    (tmp_path / "planted.c").write_text(PLANTED)
    compiler = ["g++", "-x", "c", str(tmp_path / "planted.c"), "-shared", "-fPIC", "-o", str(path)]
    subprocess.run(compiler, check=True)


@pytest.mark.parametrize("where", ["same name", "name of its digest", "name of its digest, world-writable"])
def test_a_planted_library_is_loaded_only_if_it_can_be_ours(where, quick_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", str(tmp_path / "mark"))
    Kernels()
    path = cached_library(quick_compiler)
    path.unlink()
    plant(tmp_path, path)
    if where.startswith("name of its digest"):
        prefix = path.name.rpartition("-")[0]
        path = path.rename(path.with_name(f"{prefix}-{_digest(path.read_bytes())}.so"))
        path.chmod(0o777 if "world" in where else 0o755)
    was_compiled = Kernels().was_compiled
    # The last word is the file's owner and mode: a digest keeps out what is broken, not one of our own.
    trusted = where == "name of its digest"
    assert (tmp_path / "mark").exists() == trusted
    assert was_compiled == (not trusted)


def others_may_write(cache):
    (cache / "nanoengine").mkdir()
    (cache / "nanoengine").chmod(0o777)


def others_may_exchange_it(cache):
    (cache / "nanoengine").mkdir()
    cache.chmod(0o777)


def is_a_file(cache):
    (cache / "nanoengine").write_text("")


def is_not_ours(cache):
    (cache / "nanoengine").mkdir()
    os.chown(cache / "nanoengine", 65534, -1)


def cannot_be_written(cache):
    (cache / "nanoengine").mkdir(mode=0o700)
    (cache / "nanoengine").chmod(0o500)


@pytest.mark.parametrize(
    "spoil",
    [
        others_may_write,
        others_may_exchange_it,
        is_a_file,
        pytest.param(is_not_ours, marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")),
        pytest.param(cannot_be_written, marks=pytest.mark.skipif(os.getuid() == 0, reason="root can")),
    ],
)
def test_a_cache_that_is_not_ours_alone_is_neither_read_nor_written(
    spoil, quick_compiler, tmp_path, monkeypatch
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    spoil(quick_compiler)
    before = sorted(tmp_path.rglob("*"))
    kernels = Kernels()
    assert kernels.was_compiled
    assert kernels.silu_and_mul(torch.zeros(1, 4)).tolist() == [[0, 0]]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("members", "is_ours"), [([], True), (["somebody"], False)])
def test_a_cache_that_the_user_s_own_group_may_write_is_used_if_nobody_else_is_in_it(
    members, is_ours, quick_compiler, monkeypatch
):
    """Many systems give each user such a group, and make files writable by it."""
    user = pwd.getpwuid(os.getuid()).pw_name
    group = grp.struct_group((user, "x", os.getgid(), members))
    monkeypatch.setattr("grp.getgrgid", lambda group_id: group)
    Kernels()
    quick_compiler.chmod(0o775)
    assert Kernels().was_compiled == (not is_ours)


@pytest.fixture
def hanging_compiler(tmp_path):
    (tmp_path / "g++").write_text(HANGING)
    (tmp_path / "g++").chmod(0o755)
    return tmp_path / "g++"


def started_process(compiler):
    """What the hanging compiler started: its id, once there is one."""
    file = compiler.with_name("g++.pid")
    return int(file.read_text() or 0) if file.exists() else 0


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_compiler_that_hangs_is_given_up_with_all_it_started(hanging_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(hanging_compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("nanoengine.backends.cpu.COMPILER_SECONDS", 1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not end in 1 s"):
        Kernels()
    assert time.monotonic() - start < 20
    assert not is_running(started_process(hanging_compiler))
    assert not list((tmp_path / "cache" / "nanoengine").iterdir())


def test_sigterm_while_compiling_leaves_no_file_and_no_process(hanging_compiler, tmp_path):
    code = "from nanoengine.backends.cpu import Kernels; Kernels()"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(hanging_compiler)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL) as process:
        while not started_process(hanging_compiler):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    assert not is_running(started_process(hanging_compiler))
    assert not list((tmp_path / "cache" / "nanoengine").iterdir())


@pytest.mark.parametrize(
    ("compiler", "reason"), [("false", "failed"), ("", "no C++ compiler"), ("/no/such/g++", "No such file")]
)
def test_without_a_compiler_the_engine_runs_on_pytorch_and_says_so(
    compiler, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setattr("shutil.which", lambda _: None)
    with LLM(str(DEMO), num_kv_blocks=20) as llm:
        assert llm.llm_engine.runner.device.kernels is None
        assert "torch attention (not compiled: " in (line := capsys.readouterr().err)
        assert reason in line
        assert (
            len(llm.generate([5, 6], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids)
            == 3
        )


def kernels_and_inputs(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return Kernels(), *((torch.randn(shape, generator=generator) * 3).to(dtype) for shape in shapes)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def same(ours, theirs):
    """Equal but for the last bit here and there, where an intermediate lay between two roundings."""
    tolerance = 2e-6 if ours.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert (ours != theirs).float().mean() < (1 if ours.dtype == torch.float32 else 0.02)


@DTYPES
def test_the_compiled_norm_is_the_norm_and_leaves_its_inputs_alone(dtype):
    kernels, x, residual = kernels_and_inputs(dtype, (50, 96), (50, 96))
    norm = RMSNorm(96, 1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    before = x.clone(), residual.clone()
    out, total = kernels.rms_norm(x, norm.weight, 1e-5, residual)
    same(out, norm(x + residual))
    assert torch.equal(total, x + residual)
    same(kernels.rms_norm(x, norm.weight, 1e-5)[0], norm(x))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 22, 128])
def test_the_compiled_rotation_normalises_and_rotates_a_slice_of_a_projection(dtype, head_dim):
    kernels, qkv, cos, sin = kernels_and_inputs(dtype, (9, 7 * head_dim), (9, 1, head_dim), (9, 1, head_dim))
    norm = RMSNorm(head_dim, 1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    x = qkv[:, 2 * head_dim :].view(9, 5, head_dim)
    same(kernels.norm_rotate(x, norm.weight, 1e-5, cos, sin), rotate(norm(x), cos, sin))
    same(kernels.norm_rotate(x, None, 0.0, cos, sin), rotate(x, cos, sin))


@DTYPES
def test_the_compiled_activation_is_silu_of_one_half_times_the_other(dtype):
    kernels, gate_up = kernels_and_inputs(dtype, (11, 2 * 70))
    gate_up[0, :6] = torch.tensor([0.0, 90.0, -90.0, 1e4, -1e4, 20.0]).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    same(kernels.silu_and_mul(gate_up), nn.functional.silu(gate) * up)
    gate_up[3, 5] = float("nan")
    assert kernels.silu_and_mul(gate_up).isnan().sum() == 1


def can_multiply():
    try:
        return Kernels().can_multiply(torch.empty(1, 2, dtype=torch.bfloat16))
    except RuntimeError:  # no compiler
        return False


needs_products = pytest.mark.skipif(not can_multiply(), reason="needs AVX-512 with bfloat16, and no AMX")


@needs_products
@pytest.mark.parametrize("num_inputs", [2, 6, 64, 1024])
@pytest.mark.parametrize("num_outputs", [1, 17, 64, 65, 200])
def test_a_product_with_a_packed_weight_is_that_with_the_weight(num_inputs, num_outputs):
    kernels, weight, bias = kernels_and_inputs(torch.bfloat16, (num_outputs, num_inputs), (num_outputs,))
    packed = kernels.pack(weight)
    for num_rows in (0, 1, 5, 6, 7, 12, 13, 16, 25, 100):
        x = torch.randn(num_rows, num_inputs).bfloat16()
        for b in (None, bias):
            exact = nn.functional.linear(x.float(), weight.float(), None if b is None else b.float())
            out = kernels.linear(x, packed, b, num_outputs)
            torch.testing.assert_close(out.float(), exact, rtol=8e-3, atol=1e-3 * num_inputs**0.5)


@needs_products
def test_a_row_of_a_product_does_not_depend_on_the_other_rows():
    """To the last bit, so that no sampled token can."""
    kernels, weight, x = kernels_and_inputs(torch.bfloat16, (130, 512), (40, 512))
    packed = kernels.pack(weight)
    together = kernels.linear(x, packed, None, 130)
    for rows in ([7], [0, 39], range(13)):
        assert torch.equal(kernels.linear(x[rows], packed, None, 130), together[rows])


def test_the_rows_of_a_packed_weight_are_found_again():
    weight = torch.randn(130, 10).bfloat16()
    packed = Kernels.pack(weight)
    assert packed.shape == (3, 5, 64, 2)
    rows = torch.tensor([129, 0, 63, 64, 64])
    assert torch.equal(Kernels.unpack_rows(packed, rows), weight[rows])
    assert not packed[2, :, 2:].any()


@needs_products
def test_what_the_products_do_not_take_is_left_to_others():
    kernels = Kernels()
    assert not kernels.can_multiply(torch.empty(4, 3, dtype=torch.bfloat16))
    assert not kernels.can_multiply(torch.empty(4, 4))


@DTYPES
def test_nan_in_a_sequence_s_own_cache_is_not_hidden(dtype):
    kernels, q, k, v = kernels_and_inputs(dtype, (2, 4, 8), (4, 2, 2, 8), (4, 2, 2, 8))
    k[1, 0, 0, 0] = float("nan")
    out, tables = torch.zeros_like(q), torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    lengths, rows = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([0, 1])
    settings = {"scale": 1.0, "window": None, "softcap": None, "sinks": None}
    kernels.decode_attention(out, q, k, v, tables, lengths, rows, **settings)
    assert out[0, :2].isnan().all()
    assert not out[1].isnan().any()
