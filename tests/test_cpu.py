"""What the engine does about a CPU: threads on cores of their own, kernels compiled and kept."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from nanoengine import LLM, SamplingParams
from nanoengine.backends.cpu import FLAGS, Kernels
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
