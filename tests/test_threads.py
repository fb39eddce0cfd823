"""Threads on cores of their own, seen from outside: in a process with as many threads as cores."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, os, sys, threading, torch
from nanoengine.threads import PinnedThreads

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
