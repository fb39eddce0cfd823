"""The KV cache's memory is populated ahead of its use, within limits. Tests count resident pages."""

import ctypes
import os
import re
import sys
import weakref
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nanoengine import LLM
from nanoengine.backends.cpu import populate_cache
from nanoengine.backends.host_memory import LARGE_PAGE, Available
from nanoengine.backends.kv_cache import KVGroup, KVSpec, new_caches
from tests.helpers import ask

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
SPEC, NUM_BLOCKS = KVSpec(2, 64, 64, torch.float32), 1024
BLOCK_BYTES = 32 * 2 * 64 * 4  # of K in a layer
AHEAD = 256  # blocks: two large pages


def resident_blocks(tensor):
    """Return how many blocks of K or V the system has provided memory for."""
    pages = np.zeros(-(-tensor.nbytes // os.sysconf("SC_PAGESIZE")), np.uint8)
    area = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert ctypes.CDLL(None).mincore(*area, pages.ctypes.data_as(ctypes.c_void_p)) == 0
    return (pages & 1).sum() * os.sysconf("SC_PAGESIZE") / (tensor.nbytes / len(tensor))


def memory_of(caches):
    """Return the tensors of K and V that are populated, each once."""
    tensors = [x for cache in caches for x in (cache.k, cache.v) if x.nbytes >= LARGE_PAGE]
    return list({x.data_ptr(): x for x in tensors}.values())


def use(forward, block):
    metadata = SimpleNamespace(slot_mapping=torch.tensor([3, block * 32 + 31, 5]))
    assert forward(lambda inputs: inputs.metadata, SimpleNamespace(metadata=metadata)) is metadata


def check_ahead(forward, is_idle, num_blocks):
    """Look ahead, and check how many blocks have memory then, in large or small pages."""
    forward.look_ahead(is_idle)
    if forward._thread.ident is not None:
        forward._thread.join()
    of_page = LARGE_PAGE // BLOCK_BYTES
    for memory in forward.memory:
        assert num_blocks <= resident_blocks(memory) <= -(-num_blocks // of_page) * of_page


@pytest.fixture
def forward():
    groups = [KVGroup([0, 1], None), KVGroup([2], 99)]  # they share memory
    caches = new_caches([SPEC] * 3, groups, NUM_BLOCKS - 1, 32, torch.device("cpu"))
    forward = populate_cache.PopulatingForward(caches, AHEAD, 1.0)
    forward.memory = memory_of(caches)
    return forward


@pytest.mark.parametrize("advice", [populate_cache.MADV_POPULATE_WRITE, -1], ids=["populated", "locked"])
def test_blocks_are_populated_ahead_of_the_highest_one_in_use_and_not_further(advice, forward, monkeypatch):
    monkeypatch.setattr(populate_cache, "MADV_POPULATE_WRITE", advice)
    forward.memory[0][3] = 1  # what is there stays
    for block, is_idle, num_populated in (
        (0, False, 1 + AHEAD),  # after loading
        (0, True, 1 + AHEAD),
        (1, True, 2 + AHEAD),
        (AHEAD // 2, False, 2 + AHEAD),  # less than half is in use
        (AHEAD // 2 + 1, False, 2 + AHEAD + AHEAD // 2),
        (NUM_BLOCKS - 128, True, 2 + AHEAD + AHEAD // 2 + 128),  # blocks before it are in use already
        (NUM_BLOCKS - 1, True, 2 + AHEAD + AHEAD // 2 + 128),
    ):
        for one in block, 0:  # a later step may use lower blocks only
            use(forward, one)
        check_ahead(forward, is_idle, num_populated)
    assert forward.memory[0][3].eq(1).all()
    assert forward.memory[0].sum() == forward.memory[0][3].numel()
    assert re.search(r"VmLck:\s+0 kB", Path("/proc/self/status").read_text())


def test_a_thread_of_lowest_priority_populates_a_part_of_the_available_memory(forward, monkeypatch):
    madvise, seen = ctypes.CDLL(None).madvise, set()

    def advise(*area):
        seen.add((os.sched_getscheduler(0), *os.sched_getaffinity(0)))
        return madvise(*area)

    available = Available(10 * 4 * 100 * BLOCK_BYTES, "a cgroup's limit")
    monkeypatch.setattr(populate_cache, "available_memory", lambda: available)
    monkeypatch.setattr(populate_cache.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=advise))
    forward._share = 0.1
    forward.look_ahead(False)
    forward._thread.join()
    assert seen == {(os.SCHED_IDLE, *os.sched_getaffinity(0))}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert forward._end == 101
    monkeypatch.undo()
    check_ahead(forward, False, 101)
    forward._thread = alive = Mock()
    use(forward, 1)
    forward.look_ahead(True)
    forward.close()
    assert forward._thread is alive, "a second thread has started"
    alive.join.assert_called_once_with()


def test_the_thread_ends_without_its_engine_and_holds_none_of_its_tensors(monkeypatch):
    """A thread that frees tensors while the interpreter shuts down aborts the process."""
    is_called, may_return, areas = Event(), Event(), []

    def advise(*area):
        areas.append(area)
        is_called.set()
        return not may_return.wait()

    monkeypatch.setattr(populate_cache.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=advise))
    caches = new_caches([SPEC], [KVGroup([0], None)], NUM_BLOCKS - 1, 32, torch.device("cpu"))
    forward = populate_cache.PopulatingForward(caches, AHEAD, 1.0)
    forward.look_ahead(True)
    is_called.wait()
    thread, held = forward._thread, [weakref.ref(x) for x in (caches[0].k, caches[0].v)]
    del forward, caches
    assert {one() for one in held} == {None}
    assert thread.is_alive()
    may_return.set()
    thread.join()
    assert len(areas) == 1


def test_no_thread_starts_at_interpreter_shutdown(forward):
    """It would never run, and `Thread.start` would wait for it."""
    (at_exit,) = (one for one in weakref.finalize._registry if (one.peek() or [None])[0] is forward.memory[0])
    assert at_exit.atexit
    at_exit()
    forward.look_ahead(True)
    assert forward._thread.ident is None


def test_an_engine_populates_while_it_is_idle_and_gives_the_memory_back():
    llm = LLM("demo", kv_cache_bytes=64 << 20, max_num_batched_tokens=AHEAD * 32)
    forward = llm.llm_engine.runner.forward
    forward.memory = memory_of(llm.llm_engine.runner.caches)
    for _ in range(3):
        forward._thread.join()
        check_ahead(forward, True, forward._highest + 1 + AHEAD)
        ask(llm, [[5 + i] * 300 for i in range(9)], max_tokens=1)
    assert forward._highest > 80
    memory, forward.memory = [weakref.ref(x) for x in forward.memory], []
    llm.close()
    assert not forward._thread.is_alive()
    assert {one() for one in memory} == {None}
