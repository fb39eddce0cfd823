"""Weights that are read and packed by several threads."""

import math
import os
import threading

import pytest
import torch
from safetensors.torch import save_file

from nanoengine import LLM
from nanoengine.backends.threads import on_all_cores
from nanoengine.checkpoints.safetensors_files import Files, open_tensors


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_each_thread_runs_its_operators_alone_and_the_setting_comes_back(three_threads):
    together = threading.Barrier(3)

    def look(item):
        together.wait(timeout=60)
        return item, threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()

    found = on_all_cores("looking", look, range(3))
    assert [item for item, *_ in found] == [0, 1, 2]
    assert len({thread for _, thread, *_ in found} - {threading.get_ident()}) == 3
    assert {tuple(rest) for _, _, *rest in found} == {(1, False)}
    seen = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [3, 3]


@pytest.mark.parametrize(
    ("quota", "asked", "threads", "note"),
    [
        (math.inf, "", 3, ""),
        (8.0, "", 3, ""),  # as many as there are CPUs
        (5.0, "", 3, "3 threads for a CPU quota of 5"),  # PyTorch's own number is below
        (2.9, "", 2, "2 threads for a CPU quota of 2.9"),
        (0.5, "", 1, "1 thread for a CPU quota of 0.5"),
        (0.5, "3", 3, ""),
    ],
)
def test_threads_and_threads_of_masks_follow_the_cpu_quota_unless_the_user_sets_them(
    quota, asked, threads, note, three_threads, monkeypatch, caplog
):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    for module in ("threads", "cpu.pinned_threads"):
        monkeypatch.setattr(f"nanoengine.backends.{module}.cpu_quota", lambda: quota)
    for _ in range(2):  # a second engine says so too
        with LLM("demo", num_kv_blocks=20, pin_threads=False) as llm:
            grammars = llm.llm_engine._grammars
            assert torch.get_num_threads() == threads
            assert grammars.threads._max_workers == max(1, threads - 1)
            assert grammars.slow_threads._max_workers == max(1, threads // 2)
            assert (f", {note}" in caplog.messages[-1]) if note else "quota" not in caplog.messages[-1]


def test_an_error_in_one_thread_ends_the_work(three_threads):
    done = []

    def work(item):
        if item == 0:
            raise ValueError("damaged")
        done.append(threading.Event().wait(0.01))

    with pytest.raises(ValueError, match="damaged"):
        on_all_cores("working", work, range(1000))
    assert len(done) < 1000
    assert torch.get_num_threads() == 3


def test_a_tensor_is_read_while_other_threads_open_other_files(tmp_path):
    for i in range(2):
        save_file({f"t{i}": torch.tensor([float(i)])}, tmp_path / f"m{i}.safetensors")
    other = tmp_path / "m0.safetensors"

    class Busy(Files):
        """Files of which another thread has always just opened the first one."""

        _opened = property(lambda self: (other, open_tensors(other)), lambda self, value: None)

    assert Busy(tmp_path).read("t1") == 1.0


@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_weights_are_the_same_with_any_number_of_threads(settings, three_threads):
    def weights():
        with LLM("demo", num_kv_blocks=9, **settings) as llm:
            model = llm.llm_engine.runner.model
            return dict(model.named_buffers()) | dict(model.named_parameters())

    several = weights()
    torch.set_num_threads(1)
    one = weights()
    assert several.keys() == one.keys()
    assert all(torch.equal(several[name], one[name]) for name in one)
