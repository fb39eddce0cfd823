"""The simulation of whole servers in simulate.py: its laws hold."""

import os
import subprocess
import sys

import pytest

from tests.simulate import Script, Visit, breaks, run, write


def test_a_request_that_is_checked_before_the_engine_closes_and_added_after_keeps_all_laws():
    settings = {"block_size": 1, "num_kv_blocks": 160, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    visits = (
        Visit(0.0, ((0, False),), cuts=3, pause=0.01),
        Visit(0.0, ((29, True),)),
        Visit(0.0793, ((0, False),)),
    )
    settings["max_concurrent_requests"] = 2
    run(Script(settings, visits, stop=0.1221, drain=0.05, chance=156352392))


@pytest.mark.parametrize("seeds", [range(26, 29), pytest.param(range(300), marks=pytest.mark.slow)], ids=str)
def test_simulated_servers_keep_all_laws(seeds):
    broken = {seed: law for seed in seeds if (law := breaks(write(seed)))}
    assert not broken


@pytest.mark.slow
def test_seed_replays_the_same_bytes_in_another_process():
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # sets have another order there
    command = [sys.executable, "-c", "from tests.simulate import run, write; print(run(write(12)))"]
    environment = {**os.environ, "PYTHONHASHSEED": other}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == run(write(12))
