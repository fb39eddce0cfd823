"""`example.py` and `bench.py`, run as users run them."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoengine import LLM

ROOT = Path(__file__).parent.parent


def run_script(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a script; its stderr lists every import."""
    python = [sys.executable, "-X", "importtime"]
    return subprocess.run([*python, *command], capture_output=True, text=True, cwd=ROOT, check=True)


def imported(stderr: str) -> set[str]:
    return set(re.findall(r"^import time:.*\| +(nanoengine[\w.]*)$", stderr, re.MULTILINE))


@pytest.fixture(scope="module")
def example() -> subprocess.CompletedProcess[str]:
    return run_script("example.py")


def test_example_prints_the_right_answers(example):
    questions_and_answers = example.stdout.strip().split("\n\n")
    assert [re.search("^A: (.*)", one, re.MULTILINE)[1] for one in questions_and_answers[1:]] == [
        "27 + 58 = 85",
        "noitnetta",
        "The hungry fox stole the red apple behind a market.",
        " ".join(map(str, range(8, 22))),
    ]
    assert "Q (19 tokens): What is 27 + 58?" in example.stdout
    modules = imported(example.stderr)
    assert "nanoengine.engine" in modules
    assert not [name for name in modules if name.startswith("nanoengine.apps")]
    assert "nanoengine.models.download" not in modules, "not needed for a local model"


BENCH = ["--num-requests", "9", "--prompt-len", "3", "20", "--output-len", "30", "60"]


def test_bench_measures_requests_of_seeded_lengths_after_a_warm_up(monkeypatch, capsys):
    run = run_script("bench.py", *BENCH)
    result = json.loads(run.stdout.splitlines()[-1])
    assert not [name for name in imported(run.stderr) if name.startswith("nanoengine.apps")]
    for kind in "output", "prompt":
        rate = result[f"{kind}_tokens"] / result["seconds"]
        assert result[f"{kind}_tokens_per_s"] == pytest.approx(rate)
        assert f"{result[f'{kind}_tokens']} {kind} tokens, {rate:.0f} a second" in run.stdout

    happened: list = []
    generate = LLM.generate

    def recorded(llm, prompts, params, **settings):
        happened.append((prompts, params))
        return generate(llm, prompts, params, **settings)

    def read_clock():
        happened.append("clock")
        return float(happened.count("clock"))

    monkeypatch.setattr(LLM, "generate", recorded)
    monkeypatch.setattr(sys, "argv", ["bench.py", *BENCH])
    main = runpy.run_path(str(ROOT / "bench.py"))["main"]
    main.__globals__["time"] = SimpleNamespace(perf_counter=read_clock)
    main()
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    (warm_up, _), start, (prompts, params), end = happened
    assert (len(warm_up), start, end) == (8, "clock", "clock")
    assert not [prompt for prompt in prompts if prompt in warm_up]
    assert len(set(map(len, prompts))) > 1
    assert all(3 <= len(prompt) <= 20 for prompt in prompts)
    assert all(30 <= one.max_tokens <= 60 for one in params)
    expected = {
        "model": "demo",
        "num_requests": 9,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(one.max_tokens for one in params),  # none ends before
    }
    for measured in result, again:
        assert {name: measured[name] for name in expected} == expected
    assert again["seconds"] == 1
