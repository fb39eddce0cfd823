"""Signals whose handlers raise, such as a user's timeout: nothing stays half done, and none is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch
import transformers

from nanoengine import LLM, SamplingParams, async_llm, signals
from nanoengine.backends.cpu import build
from nanoengine.backends.cpu.cpu_device import CPU
from nanoengine.chat.templates import apply_template
from nanoengine.checkpoints import checkpoint, tokenizer
from nanoengine.checkpoints.checks import as_value_error
from nanoengine.config import EngineConfig
from nanoengine.signals import _Delay, uninterrupted
from tests.helpers import DEMO, Lines, open_checkpoint
from tests.laws import check_laws
from tests.serving import TIMEOUT

USERS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM


class Timeout(Exception):
    pass


@pytest.fixture
def handled():
    """Note signals. Yields the numbers noted, and a set of the numbers of those that raise."""
    noted, raising = [], set()

    def handler(number, frame):
        noted.append(number)
        if number in raising:
            raise Timeout(number)

    before = {number: signal.signal(number, handler) for number in USERS}
    yield noted, raising
    found = [signal.getsignal(number) for number in USERS]
    for number, old in before.items():
        signal.signal(number, old)
    assert found == [handler] * len(USERS)


def test_a_block_delays_every_signal_and_handles_each_in_order_of_arrival(handled):
    noted, _ = handled
    order = [USERS[2], USERS[0], USERS[2], USERS[1]]
    with uninterrupted() as handle:
        for number in order[:3]:
            signal.raise_signal(number)
        assert noted == []
        handle()
        assert noted == order[:3]
        signal.raise_signal(order[3])
        assert noted == order[:3]
    assert noted == order


def test_if_several_handlers_raise_each_is_called_and_each_exception_is_kept(handled):
    noted, raising = handled
    raising.update(USERS)

    def block():
        with uninterrupted() as handle:
            for number in USERS:
                signal.raise_signal(number)
            try:
                handle()
            finally:
                assert noted == [USERS[0]]

    with pytest.raises(Timeout) as error:
        block()
    assert noted == list(USERS)
    chain = [error.value, error.value.__context__, error.value.__context__.__context__]
    assert [one.args for one in chain] == [(number,) for number in reversed(USERS)]


def test_a_nested_block_delays_to_the_end_of_the_outer_one_also_handlers_installed_in_between(handled):
    noted, _ = handled
    with uninterrupted():
        mine = signal.signal(USERS[1], lambda *_: noted.append("new"))
        with uninterrupted():
            for number in USERS:
                signal.raise_signal(number)
            assert noted == []
        assert noted == ["new"]  # the outer block began before this handler was installed
        signal.signal(USERS[1], mine)
    assert noted == ["new", USERS[0], USERS[2]]
    signal.raise_signal(USERS[1])
    assert noted[3:] == [USERS[1]]


def test_a_handler_that_the_block_installs_or_its_code_keeps_is_not_replaced(handled):
    noted, _ = handled
    with uninterrupted():
        kept = signal.signal(USERS[0], signal.SIG_IGN)
        signal.signal(USERS[1], default := signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):  # such as a processor's own time limit
            signal.raise_signal(USERS[1])
    assert signal.getsignal(USERS[1]) is default
    assert signal.getsignal(USERS[0]) is signal.SIG_IGN
    mine = signal.getsignal(USERS[2])
    signal.signal(USERS[0], kept)  # stands for the handler after the block too
    signal.raise_signal(USERS[0])
    assert noted == [USERS[0]]
    for number in USERS:
        signal.signal(number, mine)


def test_a_block_in_another_thread_delays_nothing(handled):
    noted, _ = handled
    inside, done = threading.Event(), threading.Event()

    def hold():
        with uninterrupted() as handle:
            handle()
            inside.set()
            done.wait(TIMEOUT)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(TIMEOUT)
    signal.raise_signal(USERS[0])
    assert noted == [USERS[0]]
    done.set()
    thread.join()


@pytest.mark.parametrize("daemon", [True, False])
def test_shutdown_waits_for_the_block_of_a_daemon_thread_and_ends_the_thread(daemon, monkeypatch):
    """PyTorch aborts the process if Python ends a thread in its code."""
    monkeypatch.setattr(signals, "_is_ending", threading.Event())
    monkeypatch.setattr(signals.time, "sleep", lambda _: None)
    inside, may_go_on, reached = threading.Event(), threading.Event(), []

    def generate():
        with suppress(SystemExit):
            with uninterrupted() as handle:
                with uninterrupted():
                    inside.set()
                    may_go_on.wait(TIMEOUT)
                reached.append(1)
                handle()
                reached.append(2)
            with uninterrupted():
                reached.append(3)

    threads = threading.Thread(target=generate, daemon=daemon), threading.Thread(target=signals._end)
    threads[0].start()
    inside.wait(TIMEOUT)
    threads[1].start()
    threads[1].join(0.02)
    assert threads[1].is_alive() == daemon
    may_go_on.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not threads[1].is_alive()
    assert reached == ([1] if daemon else [1, 2, 3])


@pytest.mark.parametrize("number", USERS)
def test_a_signal_at_any_line_of_a_block_raises_once_and_every_handler_comes_back(number, handled):
    noted, raising = handled
    raising.update(USERS)

    def block():
        with uninterrupted():
            len(noted)

    with Lines() as every:
        block()
    for at in range(1, every.count + 1):
        noted.clear()
        with pytest.raises(Timeout), Lines(at=at, strike=lambda: signal.raise_signal(number)):
            block()
        assert noted == [number], at
        assert not any(isinstance(signal.getsignal(one), _Delay) for one in USERS), at


def alarm_in(owner, name, monkeypatch, error=None):
    """Let a method raise SIGALRM, and then an exception of its own if one is given."""
    method = getattr(owner, name)

    def call(*arguments, **settings):
        signal.raise_signal(signal.SIGALRM)
        if error is not None:
            raise error
        return method(*arguments, **settings)

    monkeypatch.setattr(owner, name, call)


@pytest.fixture(params=[Exception, TimeoutError, ValueError, RuntimeError], ids=lambda kind: kind.__name__)
def limit(request):
    """Handle SIGALRM by raising an exception of a class that code may expect. Yields the class."""
    kind = type("Limit", (request.param,), {})

    def handler(number, frame):
        raise kind("out of time")

    before = signal.signal(signal.SIGALRM, handler)
    yield kind
    signal.signal(signal.SIGALRM, before)


once = pytest.mark.parametrize("limit", [Exception], indirect=True)


def out_of_time():
    signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("fails", [False, True])
def test_a_timeout_while_a_checkpoint_is_read_is_no_error_of_the_checkpoint(fails, limit, monkeypatch):
    error = KeyError("no") if fails else None
    places = (transformers.AutoConfig, "from_pretrained"), (tokenizer.AutoTokenizer, "from_pretrained")
    for owner, name in (*places, (checkpoint.DecoderConfig, "from_hf")):
        with monkeypatch.context() as patch:
            alarm_in(owner, name, patch, error)
            with pytest.raises(limit):
                open_checkpoint(str(DEMO))
    with pytest.raises(limit), as_value_error("a file"):
        signal.raise_signal(signal.SIGALRM)


def test_a_timeout_while_kernels_are_compiled_does_not_mean_that_there_are_none(limit, monkeypatch):
    alarm_in(subprocess.Popen, "communicate", monkeypatch)
    build._version.cache_clear()
    device = CPU(torch.device("cpu"), EngineConfig(model=DEMO))
    with pytest.raises(limit):
        device._find_kernels(torch.float32)
    assert device._no_kernels is None


def test_a_timeout_in_a_chat_template_a_tokenizer_or_a_processor_is_no_failure(limit, alphabet, monkeypatch):
    def slow(token_ids, logits):
        signal.raise_signal(signal.SIGALRM)
        return logits

    greedy = SamplingParams(temperature=0, max_tokens=3)
    with LLM(alphabet, num_kv_blocks=20) as llm:
        tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
        with monkeypatch.context() as patch:
            alarm_in(type(tokenizer), "apply_chat_template", patch, KeyError("no"))
            with pytest.raises(limit):
                apply_template(tokenizer, [{"role": "user", "content": "b"}])
        expected = llm.generate("a", greedy, use_tqdm=False)[0].outputs[0].token_ids
        llm.add_request("0", "a", SamplingParams(temperature=0, max_tokens=3, logits_processors=[slow]))
        outputs, raised = [], 0
        while llm.has_unfinished_requests():
            try:
                outputs += llm.step()
            except limit:
                raised += 1
        last = outputs[-1].outputs[0]
        assert (last.token_ids, last.finish_reason) == (expected, "length")
        assert raised == 3
        llm.add_request("1", "a", greedy)
        detokenizer = next(iter(engine.requests["1"].samples.values())).seq.detokenizer
        alarm_in(type(detokenizer), "append", monkeypatch)
        for _ in range(3):
            with pytest.raises(limit):
                llm.step()
        [output] = llm.step()
        assert output.outputs[0].token_ids == expected


@once
def test_a_timeout_in_submit_queues_all_of_a_request_or_nothing(limit, babbler):
    with LLM(babbler, num_kv_blocks=20) as llm:
        for _ in range(2):  # the first time fills caches
            with Lines() as every:
                llm.add_request("0", "ab", SamplingParams(n=3, max_tokens=2))
            llm.abort_request("0")
        for at in range(1, every.count + 1, 3):
            with pytest.raises(limit), Lines(at=at, strike=out_of_time):
                llm.add_request("0", "ab", SamplingParams(n=3, max_tokens=2))
            check_laws(llm.scheduler)
            assert len(llm.scheduler.waiting) == 3 * len(llm.llm_engine.requests)
            llm.abort_request("0")
            assert not llm.has_unfinished_requests()


@once
def test_outputs_of_a_step_or_an_abort_that_a_timeout_ends_are_returned_by_the_next_one(limit, babbler):
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM(babbler, num_kv_blocks=20) as llm:
        for end in llm.step, lambda: llm.abort_request("0"):
            llm.add_request("0", "ab", params)
            with Lines() as every:
                end()
            for at in range(max(1, every.count - 40), every.count + 1):
                llm.add_request("0", "ab", params)
                outputs = []
                with suppress(limit), Lines(at=at, strike=out_of_time):
                    outputs = end()
                assert [out.request_id for out in outputs or end()] == ["0"], at
                assert not llm.has_unfinished_requests()


@once
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_that_is_closed_at_the_moment_of_a_timeout_leaves_no_request(stride, limit, babbler):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with LLM(babbler, num_kv_blocks=20) as llm:

        def close(**lines):
            outputs = llm.stream(["a", "b"], params)
            next(outputs)
            with Lines(**lines) as seen:
                outputs.close()
            return seen.count

        num_lines = close()
        assert not llm.has_unfinished_requests()
        for at in range(2, num_lines + 1, stride):  # none can come at the first line, which is a `try:`
            with pytest.raises(limit):
                close(at=at, strike=out_of_time)
            assert not llm.has_unfinished_requests(), at


@pytest.mark.slow  # above, signals come at chosen lines
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_alarms_at_random_moments_change_neither_threads_nor_state_nor_results():
    environment = {key: x for key, x in os.environ.items() if not key.startswith(("OMP", "GOMP", "KMP"))}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # see conftest.py
    command = [sys.executable, "-m", "tests.alarms", "300", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10 * TIMEOUT)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["raised"] > 90
    assert (result["lost"], result["differences"]) == ([], [])
    # asyncio loses a callback if the alarm comes before `uninterrupted` has begun in it, but not afterwards
    assert all(async_llm.__file__ not in stack.splitlines()[-2] for stack in result["stuck"])
