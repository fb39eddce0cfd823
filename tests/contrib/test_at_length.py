"""The KV store and ranks at length: thousands of scheduling steps, damaged entries, and requests."""

import random

import pytest

from nanoengine import SamplingParams
from nanoengine.contrib.stores import DirectoryStore
from tests.apps.test_server_load import MAX_TOKENS, offline_answers
from tests.contrib.test_kvstore import StoreMachine, serve
from tests.contrib.test_parallel import ranks_in_processes, ranks_of
from tests.helpers import checkpoint, random_prompts
from tests.laws import check_laws
from tests.test_at_length import run_at_length

pytestmark = pytest.mark.slow


def test_thousands_of_scheduling_steps_agree_with_the_ledger():
    run_at_length(StoreMachine)


def test_hundreds_of_damaged_entries_of_a_store_change_no_answer(tmp_path_factory, tmp_path):
    path, _ = checkpoint("qwen3", tmp_path_factory)
    rng, prompts, num_damaged = random.Random(0), random_prompts([100, 90, 80, 70]), 0
    plain_answers, _, _ = serve(path, tmp_path, prompts)
    store = DirectoryStore(tmp_path)
    for _ in range(20):
        files = sorted(tmp_path.rglob("*.safetensors"))
        contents = [file.read_bytes() for file in files]
        for file, data in zip(files, contents, strict=True):
            damaged, at = bytearray(data), rng.randrange(max(1, len(data)))
            kind = rng.choice(["byte", "cut", "longer", "another's", "zeros", "empty", "gone"])
            if kind == "byte":
                damaged[at : at + 1] = rng.randbytes(1)
            elif kind == "cut":
                del damaged[at:]
            elif kind == "longer":
                damaged += rng.randbytes(at)
            elif kind == "another's":
                damaged = bytearray(rng.choice(contents))
            else:
                damaged[at:] = bytes(len(data) - at) if kind == "zeros" else b""
            file.write_bytes(damaged)
            if kind == "gone":
                file.unlink()
            num_damaged += 1
        answers, _, _ = serve(path, store, prompts)
        assert answers == plain_answers
    assert num_damaged > 600


def test_hundreds_of_requests_to_ranks_equal_those_of_one_rank():
    rng, expected = random.Random(0), offline_answers()
    with ranks_in_processes() as llm:
        aborted, finished = set(), {}
        for number in range(200):
            prompt, _ = expected[number % len(expected)]
            wanted = SamplingParams(temperature=0, max_tokens=rng.randint(1, MAX_TOKENS))
            llm.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
        while llm.has_unfinished_requests():
            finished |= {output.request_id: output for output in llm.step() if output.finished}
            if rng.random() < 0.4:
                one = str(rng.randrange(200))
                if one not in finished:
                    llm.abort_request(one)
                    aborted.add(one)
        assert llm.metrics()["num_free_blocks"] == llm.metrics()["num_blocks"]
        check_laws(llm.scheduler)
    assert not ranks_of()
    assert len(aborted) > 5
    assert len(finished.keys() - aborted) > 150
    for request_id in finished.keys() - aborted:
        said = finished[request_id].outputs[0].token_ids
        _, answer = expected[int(request_id) % len(expected)]
        assert said == answer[: len(said)]
        assert finished[request_id].outputs[0].finish_reason in ("stop", "length")
