"""The KV store at length: thousands of scheduling steps, and hundreds of damaged entries."""

import random

import pytest

from nanoengine.contrib.stores import DirectoryStore
from tests.contrib.test_kvstore import StoreMachine, serve
from tests.helpers import checkpoint, random_prompts
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
