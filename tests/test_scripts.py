"""`bench.py`, run as users run it."""

import inspect
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoengine import LLM, EngineConfig
from tests.test_structure import imports_of

ROOT = Path(__file__).parent.parent
BENCH = ["--num-requests", "9", "--prompt-len", "3", "20", "--output-len", "3", "6"]


def test_bench_measures_requests_of_seeded_lengths_after_a_warm_up(monkeypatch, capsys):
    happened: list = []
    generate = LLM.generate

    def recorded(llm, prompts, params, **settings):
        happened.append((prompts, params))
        return generate(llm, prompts, params, **settings)

    def read_clock():
        happened.append("clock")
        return float(happened.count("clock"))

    monkeypatch.setattr(LLM, "generate", recorded)
    monkeypatch.setitem(inspect.unwrap(EngineConfig.__init__).__kwdefaults__, "num_kv_blocks", 50)  # no trial
    monkeypatch.setattr(sys, "argv", ["bench.py", *BENCH])
    main = runpy.run_path(str(ROOT / "bench.py"))["main"]
    main.__globals__["time"] = SimpleNamespace(perf_counter=read_clock)
    main()
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    (warm_up, _), start, (prompts, params), end = happened
    assert (len(warm_up), start, end, result["seconds"]) == (8, "clock", "clock", 1)
    assert not [prompt for prompt in prompts if prompt in warm_up]
    assert len(set(map(len, prompts))) > 1
    assert all(3 <= len(prompt) <= 20 for prompt in prompts)
    assert all(3 <= one.max_tokens <= 6 for one in params)
    expected = {"model": "demo", "num_requests": 9, "prompt_tokens": sum(map(len, prompts))}
    expected["output_tokens"] = sum(one.max_tokens for one in params)  # none ends before
    assert {name: result[name] for name in expected} == expected
    for kind in "output", "prompt":
        number = expected[f"{kind}_tokens"]
        assert result[f"{kind}_tokens_per_s"] == pytest.approx(number)
        assert f"{number} {kind} tokens, {number:.0f} a second" in printed
    main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert not [name for name in imports_of(ROOT / "bench.py") if name.startswith("cli")]
