"""The simulation of whole servers in simulate.py: its laws hold, and it finds planted bugs."""

import os
import subprocess
import sys

import pytest

from tests.bottle import expected_token
from tests.simulate import Script, Visit, breaks, pool, run, truth, write

# Scripts that once broke a law
FOUND = {
    "a request is checked before the engine closes, and added after": Script(
        {"block_size": 1, "num_kv_blocks": 160, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        | {"max_concurrent_requests": 2},
        (
            Visit(0.0, ((0, False),), cuts=3, pause=0.01),
            Visit(0.0, ((29, True),)),
            Visit(0.0793, ((0, False),)),
        ),
        stop=0.1221,
        drain=0.05,
        chance=156352392,
    ),
    "log-probabilities of a prompt are NaN": Script(
        {"block_size": 1, "num_kv_blocks": 100, "max_num_seqs": 1, "max_num_batched_tokens": 8},
        (Visit(0.0, ((24, False),)), Visit(0.4711, ((25, False),))),
        ((22, "logits"),),
        chance=411435068,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_script_that_once_broke_a_law_keeps_all_laws(name):
    run(FOUND[name])


@pytest.mark.parametrize("seeds", [range(26, 29), pytest.param(range(300), marks=pytest.mark.slow)], ids=str)
def test_simulated_servers_keep_all_laws(seeds):
    broken = {seed: law for seed in seeds if (law := breaks(write(seed)))}
    assert not broken


def test_the_expected_answers_follow_the_definition():
    greedy = {"prompt", "max_tokens", "temperature", "seed", "ignore_eos", "return_token_ids"}
    bodies = [(i, body) for i, (_, body) in enumerate(pool()) if body.keys() <= greedy]
    bodies = [(i, body) for i, body in bodies if body["temperature"] == 0]
    plain = [i for i, body in bodies if isinstance(body["prompt"][0], int)]
    assert plain
    for index in plain:
        tokens = list(pool()[index][1]["prompt"])
        for choice in truth(index)[0]:
            for token_id in choice["token_ids"]:
                assert token_id == expected_token(tokens)
                tokens.append(token_id)


@pytest.mark.slow
def test_seed_replays_the_same_bytes_in_another_process():
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # sets have another order there
    command = [sys.executable, "-c", "from tests.simulate import run, write; print(run(write(12)))"]
    environment = {**os.environ, "PYTHONHASHSEED": other}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == run(write(12))
