"""Hostile requests, signals and threads: none of them may change another request's answer."""

import asyncio
import io
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine import LLM, AsyncLLM, SamplingParams
from nanoengine.backends.cpu.pinned_threads import PinnedThreads
from nanoengine.cli import chat
from nanoengine.detokenizer import MAX_PENDING, Detokenizer
from tests.helpers import BAD_FIELDS, Lines, byte_tokenizer, table_checkpoint
from tests.laws import check_laws
from tests.serving import TIMEOUT

ROOT = Path(__file__).parent.parent
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
BYSTANDERS = [
    ("the first", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
    ("a second", SEEDED),
    ("3", SamplingParams(temperature=0.7, seed=1, top_p=0.8, top_k=30, max_tokens=12, logprobs=2)),
    ("four", SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.2, min_tokens=12)),
    ("number five", SamplingParams(temperature=1.5, seed=2, max_tokens=12, stop="zzz", n=2)),
]


def answers(outputs):
    return [[(c.token_ids, c.text, c.finish_reason) for c in out.outputs] for out in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model with random answers, whose vocabulary lacks the tokenizer's last token."""
    logits = torch.randn(260, 260, generator=torch.Generator().manual_seed(0))
    path = table_checkpoint(tmp_path_factory.mktemp("model"), logits)
    byte_tokenizer(("é", "日本", " the", "beyond")).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "async scheduling"])
def engine(request, model):
    """Yield an engine, and its answer to each bystander alone."""
    settings = {"num_kv_blocks": 60, "block_size": 16, "max_logprobs": -1}
    with LLM(model, async_scheduling=request.param, **settings) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in BYSTANDERS]
        yield llm, answers(alone)


# For tests of what happens before a step
once = pytest.mark.parametrize("engine", [True], indirect=True)


@once
@pytest.mark.parametrize("word", ["beyond", "\u200b", "\ud800"])
def test_bad_words_without_tokens_are_rejected(word, engine, monkeypatch):
    llm, _ = engine
    assert llm.get_tokenizer().convert_tokens_to_ids("beyond") == llm.llm_engine.checkpoint.vocab_size == 260
    backend = llm.get_tokenizer().backend_tokenizer
    monkeypatch.setattr(backend, "normalizer", tokenizers.normalizers.Replace("\u200b", ""))
    with pytest.raises(ValueError, match="bad_words must"):
        llm.add_request("x", "a", SamplingParams(bad_words=["b", word]))
    assert not llm.has_unfinished_requests()


@once
@pytest.mark.parametrize("field", ["prompt", "bad_words"])
def test_text_that_makes_the_tokenizer_panic_is_rejected(field, engine, monkeypatch):
    """The pattern backtracks exponentially, and the library panics after some time."""
    llm, _ = engine
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    text = "a" * 30 + "!"
    params = SamplingParams(bad_words=[text] if field == "bad_words" else None)
    monkeypatch.setattr(llm.get_tokenizer().backend_tokenizer, "pre_tokenizer", split)
    with pytest.raises(ValueError, match=f"{field} cannot be read by the model's tokenizer: Onig"):
        llm.add_request("x", text if field == "prompt" else [1], params)
    assert not llm.has_unfinished_requests()


@once
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "TemplateError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].role }}{% for", "TemplateSyntaxError"),
        ("{{ 'x' * 10**4 }}", "messages must render to at most 5000 characters, got 10000"),
        ("{{ '\udcff' }}", "messages must be valid Unicode"),
    ],
)
def test_chat_template_that_fails_or_writes_too_much_is_a_value_error(template, message, engine, monkeypatch):
    monkeypatch.setattr("nanoengine.chat.templates.MAX_RENDERED", 5000)
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        with pytest.raises(ValueError, match=message):
            engine[0].chat([{"role": "user", "content": content}], chat_template=template)


word = st.text(st.sampled_from("aé日\u200b \ud800\x00e"), min_size=1, max_size=4) | st.just("beyond")
token_ids = st.lists(st.integers(0, 259), min_size=1, max_size=4)
tiny = st.sampled_from([5e-324, 1e-300, 1e-46, 1e-38, 1 - 2**-53])
bias = st.one_of(st.floats(-1e30, 1e30), st.floats(-100, 100))
# Mostly valid values, up to the ends of their ranges: they reach a step.
FIELDS = {
    "n": st.integers(1, 4),
    "temperature": st.one_of(st.floats(0, 1e30), st.floats(0, 3), tiny),
    "top_p": st.one_of(st.floats(0, 1, exclude_min=True), tiny),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.one_of(st.floats(0, 1), tiny),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(1e-4, 1e4),
    "logit_bias": st.dictionaries(st.integers(0, 259), bias, max_size=3),
    "allowed_token_ids": token_ids,
    "forced_token_ids": token_ids,
    "bad_words": st.lists(word, max_size=3),
    "min_tokens": st.integers(0, 16),
    "ignore_eos": st.booleans(),
    "stop": st.lists(word, max_size=3),
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": st.booleans(),
    "logprobs": st.integers(-1, 260),
    "prompt_logprobs": st.integers(-1, 260),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
}
some_fields = st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
bad_field = st.sampled_from(BAD_FIELDS).map(lambda field: dict([field]))
prompt = st.one_of(
    st.text(max_size=20),
    word,
    st.lists(st.integers(0, 259), max_size=40),
    st.sampled_from([[7] * 2000, [260], [-1], {"prompt": None}, [1.5]]),
)
requested = st.tuples(prompt, st.one_of(some_fields, some_fields, bad_field))
UNCHECKED = {"suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("max_examples", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_no_request_changes_the_tokens_of_another(max_examples, engine):
    llm, alone = engine

    @settings(max_examples=max_examples, deadline=None, derandomize=True, database=None, **UNCHECKED)
    @given(st.lists(requested, min_size=1, max_size=4))
    def check(requests):
        for i, (text, params) in enumerate(BYSTANDERS):
            llm.add_request(str(i), text, params)
        try:
            llm.step()
            for i, (text, fields) in enumerate(requests):
                with suppress(ValueError, TypeError):  # rejected at submission
                    llm.add_request(f"intruder {i}", text, SamplingParams(**fields))
            finished = {}
            for _ in range(500):
                if not llm.has_unfinished_requests():
                    break
                finished |= {out.request_id: out for out in llm.step() if out.finished}
            assert not llm.has_unfinished_requests(), "requests never end"
        finally:
            llm.abort_request(list(llm.llm_engine.requests))
        check_laws(llm.scheduler)
        assert llm.metrics()["num_free_blocks"] == llm.metrics()["num_blocks"]
        assert answers(finished[str(i)] for i in range(len(BYSTANDERS))) == alone

    check()


@pytest.mark.parametrize("backwards", [False, True])
def test_aborting_waiting_requests_takes_linear_time(backwards, model):
    def seconds(number):
        ids = [str(i) for i in range(number)]
        for request_id in ids:
            llm.add_request(request_id, [1, 2], SEEDED)
        start = time.process_time()
        for request_id in reversed(ids) if backwards else ids:
            llm.abort_request(request_id)
        return time.process_time() - start

    with LLM(model, num_kv_blocks=20) as llm:
        # 8 times as many: 8 times as long, or 64 times.
        limit = 24 * min(seconds(100) for _ in range(5))
        assert any(seconds(800) < limit for _ in range(3))


def test_request_of_many_samples_knows_cheaply_whether_it_is_finished(model):
    with LLM(model, num_kv_blocks=20) as llm:
        llm.add_request("x", [1, 2], SamplingParams(n=1000))
        request = llm.llm_engine.requests["x"]
        with Lines() as every:
            for sample in request.samples.values():
                assert not request.finished
                llm.scheduler.finish(sample.seq, "abort")
        assert request.finished
        assert every.count < 100 * 1000
        llm.abort_request("x")


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [([*[0xFF] * 1000, 65], "\ufffd" * 1000 + "A"), ([66, *[256] * 500, 67], "BC")],
    ids=["invalid bytes", "skipped tokens"],
)
def test_tokens_without_text_are_decoded_in_linear_time(token_ids, text):
    """The cost of a token grows with the number of pending tokens, which is limited."""
    tokenizer = byte_tokenizer().backend_tokenizer
    detokenizer = Detokenizer(tokenizer, [65], SamplingParams(ignore_eos=True))
    for token_id in token_ids:
        detokenizer.append(token_id)
        assert len(detokenizer.pending) <= MAX_PENDING
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(token_ids) == text


def test_characters_among_invalid_bytes_are_kept():
    tokenizer = byte_tokenizer().backend_tokenizer
    rng = random.Random(0)
    parts = [b"\xff", b"\xe6\x97", b"\xf0\x9f\x99", "日".encode(), "🙂".encode(), b"\x80", b"\xc3"]
    for _ in range(100):
        ids = list(b"".join(rng.choices(parts, [8, 2, 2, 1, 1, 3, 1], k=120)))
        detokenizer = Detokenizer(tokenizer, [65], SamplingParams())
        for token_id in [*ids, 65]:
            detokenizer.append(token_id)
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode([*ids, 65])


def answer_of(engine):
    """Return the engine's answer to "a"."""
    if isinstance(engine, LLM):
        return answers(engine.generate("a", SEEDED, use_tqdm=False))

    async def generate():
        return answers([[output async for output in engine.generate("a", SEEDED, "1")][-1]])

    return asyncio.run(asyncio.wait_for(generate(), TIMEOUT))


@pytest.mark.parametrize("form", [LLM, AsyncLLM])
def test_fork_cannot_use_the_engine(form, babbler):
    """A fork has none of the threads that compute, and would wait for them forever."""
    with closing(form(babbler, num_kv_blocks=60)) as engine:
        expected = answer_of(engine)
        heard, said = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, of a fork beside threads
            child = os.fork()
        if not child:
            try:
                answer_of(engine)
            except RuntimeError as error:
                os.write(said, str(error).encode())
            finally:
                os._exit(0)
        os.close(said)
        with open(heard) as stream:
            assert f"process {os.getpid()}, and this is a fork of it" in stream.read()
        os.waitpid(child, 0)
        assert answer_of(engine) == expected


def in_a_thread(function):
    """Return the function's result or exception, from a thread of its own that has ended."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
    return future.exception() or future.result()


def test_threads_may_use_an_engine_one_after_another(babbler):
    with LLM(babbler, num_kv_blocks=60) as llm:
        expected = answers(llm.generate("a", SEEDED, use_tqdm=False))
        assert answers(in_a_thread(lambda: llm.generate("a", SEEDED, use_tqdm=False))) == expected
        llm.add_request("mine", "a", SEEDED)
        add, abort = partial(llm.add_request, "theirs", "b", SEEDED), partial(llm.abort_request, "mine")
        for call in (add, llm.step, llm.close, abort):
            assert "AsyncLLM" in str(in_a_thread(call))
        llm.abort_request("mine")
        assert in_a_thread(lambda: llm.add_request("unfinished", "b", SEEDED)) is None
        assert llm.abort_request("unfinished")[0].outputs[0].finish_reason == "abort"


def test_ctrl_c_while_loading_unpins_the_thread(model, default_sigint, monkeypatch):
    leave, left = PinnedThreads.__exit__, []

    def interrupted(self, *error):
        signal.raise_signal(signal.SIGINT)
        leave(self, *error)
        left.append(error)

    monkeypatch.setattr(PinnedThreads, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(model, num_kv_blocks=20)
    assert left == [(None, None, None)]


@pytest.mark.parametrize("num_places", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_line_of_generate_leaves_no_request(num_places, engine, default_sigint):
    """It comes at every n-th line of the package's Python."""
    llm, _ = engine
    params, num_blocks = SamplingParams(temperature=0, max_tokens=3), llm.metrics()["num_blocks"]

    def run():
        return answers(llm.generate(["ab", "c"], params, use_tqdm=False))

    expected = run()  # the first run fills caches
    llm.reset_prefix_cache()
    with Lines() as every:
        assert run() == expected
    interrupts = 0
    # The first and last lines one by one: there the requests are queued and cleaned up.
    spread = {1 + place * every.count // num_places for place in range(num_places)}
    for at in sorted(spread | set(range(every.count - 60, every.count + 1))):
        llm.reset_prefix_cache()
        with suppress(KeyboardInterrupt), Lines(at=at, strike=lambda: signal.raise_signal(signal.SIGINT)):
            run()
            interrupts -= 1
        interrupts += 1
        assert not llm.has_unfinished_requests(), f"at line {at} of {every.count}"
        assert llm.metrics()["num_free_blocks"] == num_blocks
    assert run() == expected
    assert interrupts > num_places


IN_TRAFFIC = """
import asyncio, sys, threading, time
from nanoengine import AsyncLLM, SamplingParams

engine = AsyncLLM(sys.argv[1], num_kv_blocks=60)
params = SamplingParams(max_tokens=900, ignore_eos=True)

async def consume(i):
    async for _ in engine.generate("abc", params, str(i)):
        pass

async def main():
    await asyncio.gather(*(consume(i) for i in range(8)))

threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
while engine.llm_engine.metrics()["num_running"] < 8:
    time.sleep(0.01)
"""

IN_A_DAEMON_THREAD = """
import threading
from nanoengine import LLM, SamplingParams

def run():
    is_loading.set()
    llm = LLM("demo")
    is_loaded.set()
    llm.generate("a", SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)

is_loading, is_loaded = threading.Event(), threading.Event()
threading.Thread(target=run, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code"),
    [
        (IN_TRAFFIC, 0),
        (IN_TRAFFIC + "sys.exit(3)", 3),
        ("from nanoengine import LLM; outputs = LLM('demo').stream('a'); next(outputs)", 0),
        (IN_A_DAEMON_THREAD + "is_loading.wait()", 0),
        (IN_A_DAEMON_THREAD + "is_loaded.wait()", 0),
    ],
)
def test_process_that_ends_with_running_requests_exits_cleanly(script, code, babbler):
    command = [sys.executable, "-c", script, babbler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == code, done.stderr
    assert not re.search("Fatal|Traceback", done.stderr)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("example.py --model /nope", "is neither a directory nor a hub id"),
        ("bench.py --model /nope", "is neither a directory nor a hub id"),
        ("bench.py --prompt-len 2000 2000", "shorten it or raise max_model_len"),
        ("benchmarks --model /nope", "is neither a directory nor a hub id"),
    ],
)
def test_scripts_report_errors_in_one_line(command, message, monkeypatch, capsys):
    program, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run, name = (runpy.run_path, str(ROOT / program)) if ".py" in program else (runpy.run_module, program)
    with pytest.raises(SystemExit) as ended:
        run(name, run_name="__main__")
    said = str(ended.value) if isinstance(ended.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in said
    assert "\n" not in said


def test_chat_rejects_bytes_that_are_not_text(monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\nWho are you?\n"), "utf-8"))
    chat.main(["--max-tokens", "3"])
    shown = capsys.readouterr().out
    assert "messages must be valid Unicode" in shown
    assert shown.count("> ") == 3


@pytest.mark.slow  # a process that imports PyTorch
def test_output_of_run_may_be_cut():
    cut = f"{sys.executable} -m nanoengine run --prompt Hello --max-tokens 3 | true"
    done = subprocess.run(cut, shell=True, capture_output=True, timeout=TIMEOUT, cwd=ROOT)
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr
