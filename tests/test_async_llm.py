"""`AsyncLLM`: many consumers, cancellation, slow consumers, errors, shutdown."""

import asyncio
import itertools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from unittest.mock import Mock

import pytest

from nanoengine import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, async_llm
from tests.helpers import DEMO, VOCAB, Lines, random_prompts
from tests.serving import TIMEOUT, held_steps, threads_of_checks, until

SAMPLING: dict = {"temperature": 0, "max_tokens": 20}
GREEDY, ENDLESS = SamplingParams(**SAMPLING), SamplingParams(temperature=0, max_tokens=400)
DELTA = SamplingParams(**SAMPLING, output_kind=RequestOutputKind.DELTA)
SETTINGS = {"block_size": 16, "num_kv_blocks": 60}


@pytest.fixture(scope="module")
def expected(qwen3):
    prompts = random_prompts([5, 20, 33, 1, 60, 17])
    with LLM(qwen3, **SETTINGS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return prompts, [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def shared(qwen3):
    """Yield an engine for tests that leave it empty."""
    engine = AsyncLLM(qwen3, **SETTINGS)
    yield engine
    assert engine.llm_engine.metrics()["num_free_blocks"] == 60
    engine.close()


def with_engine(test=None, /, **settings):
    """Make a test of a coroutine. Settings give it an engine of its own instead of the shared one."""
    if test is None:
        return lambda test: with_engine(test, **settings)

    async def run_alone(qwen3, prompts, tokens):
        async with AsyncLLM(qwen3, **SETTINGS, **settings) as engine:
            await test(engine, prompts, tokens)

    if settings:

        def run(qwen3, expected):
            asyncio.run(run_alone(qwen3, *expected))
    else:

        def run(shared, expected):
            asyncio.run(test(shared, *expected))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def collect(engine, prompt, params, request_id):
    """Return the concatenated tokens (DELTA) or the tokens of the last output (otherwise)."""
    tokens = []
    async for output in engine.generate(prompt, params, request_id):
        new = output.outputs[0].token_ids
        tokens = tokens + new if params.output_kind is RequestOutputKind.DELTA else new
    assert output.finished
    return tokens


def collect_all(engine, prompts, params=GREEDY, name="r"):
    """Collect the tokens of all prompts, as one awaitable."""
    return asyncio.gather(*(collect(engine, p, params, f"{name}{i}") for i, p in enumerate(prompts)))


@with_engine
async def test_outputs_of_a_step_reach_an_event_loop_in_one_call(engine, prompts, tokens):
    loop, calls = asyncio.get_running_loop(), []
    send = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda call, *args: (calls.append(call.__name__), send(call, *args))
    before = engine.llm_engine.core.num_steps
    assert await collect_all(engine, prompts, DELTA) == tokens
    assert 20 <= calls.count("receive") <= engine.llm_engine.core.num_steps - before


@with_engine(max_num_seqs=4)
async def test_outputs_are_sent_when_the_next_forward_pass_begins_or_none_follows(engine, prompts, tokens):
    """Only then does the event loop have the interpreter lock for itself."""
    events, runner, scheduler = [], engine.llm_engine.runner, engine.llm_engine.scheduler

    def note(name, call):
        def noted(*args):
            if name != "send" or engine._outgoing:
                events.append(name)
            return call(*args)

        return noted

    scheduler.schedule = note("schedule", scheduler.schedule)
    runner.compute = note("forward", runner.compute)
    runner.before_forward = engine._deliver = note("send", engine._deliver)
    assert len(await collect(engine, prompts[0], DELTA, "a")) == 20
    assert events == ["schedule", "forward", *["schedule", "send", "forward"] * 19, "send"]


class Listener:
    """Records what it is given as a logits processor or a trace. Its lock forbids copies."""

    def __init__(self):
        self.given, self.lock = [], threading.Lock()

    def process(self, token_ids, logits):
        self.given.append(len(token_ids))
        return logits

    def take(self, event):
        self.given.append(event)


@with_engine
async def test_params_are_copied_when_a_request_begins_but_not_its_logits_processors(engine, prompts, tokens):
    listener, may_check, check = Listener(), threading.Event(), engine.llm_engine.check
    params = SamplingParams(**SAMPLING, stop_token_ids=[VOCAB - 1], logits_processors=[listener.process])
    engine.llm_engine.check = lambda *request: may_check.wait(TIMEOUT) and check(*request)
    answer = asyncio.create_task(collect(engine, prompts[0], params, "a"))
    await asyncio.sleep(0)  # the request has begun
    del engine.llm_engine.check
    params.max_tokens = 1  # too late for it
    params.stop_token_ids.append(tokens[0][5])
    params.logits_processors.clear()
    may_check.set()
    assert await answer == tokens[0]
    assert listener.given == [*range(20)]


def test_objects_in_engine_args_are_not_copied(qwen3, expected):
    listener = Listener()
    args = AsyncEngineArgs(model=qwen3, trace=listener.take, **SETTINGS)

    async def main():
        async with AsyncLLM.from_engine_args(args) as engine:
            assert await collect(engine, expected[0][4], GREEDY, "a") == expected[1][4]

    asyncio.run(main())
    assert listener.given


def test_prompt_is_checked_once_in_a_thread_of_its_own(monkeypatch):
    async def main():
        async with AsyncLLM(str(DEMO), num_kv_blocks=100) as engine:
            threads = threads_of_checks(monkeypatch, engine.llm_engine.checker)
            for asked, prompt in itertools.product(
                [{}, {"structured_outputs": {"regex": "a+"}}], ["Hello", {"prompt": "Hello"}, [5, 6]]
            ):
                threads |= {"checked": [], "tokenized": []}
                await collect(engine, prompt, SamplingParams(max_tokens=3, **asked), "x")
                assert [len(threads["checked"]), len(threads["tokenized"])] == [1, int(prompt != [5, 6])]
                others = {engine._thread, threading.current_thread()}
                assert not others.intersection(threads["checked"] + threads["tokenized"])

    asyncio.run(main())


@with_engine
async def test_requests_are_checked_one_at_a_time_in_their_order(engine, prompts, tokens):
    check, order, num_inside = engine.llm_engine.check, [], []

    def slow_check(prompt, *arguments):
        num_inside.append(prompt)
        time.sleep(0.01)  # time for another check to begin
        assert num_inside == [prompt]
        num_inside.clear()
        order.append(prompt)
        return check(prompt, *arguments)

    engine.llm_engine.check = slow_check
    try:
        assert await collect_all(engine, prompts) == tokens
    finally:
        del engine.llm_engine.check
    assert order == prompts


@with_engine
async def test_slow_consumer_loses_nothing_and_holds_one_output(engine, prompts, tokens):
    got, outputs = [], 0
    async for output in engine.generate(prompts[1], DELTA, "slow"):
        got += output.outputs[0].token_ids
        outputs += 1
        await until(lambda: not engine.llm_engine.has_unfinished_requests())
    assert got == tokens[1]
    assert outputs <= 3  # outputs that arrived meanwhile were merged; the last step's may come later


@with_engine
async def test_abort_gives_the_consumer_a_last_output(engine, prompts, tokens):
    reasons = []
    with held_steps(engine) as steps:
        steps.permit(1)
        async for output in engine.generate(prompts[0], ENDLESS, "x"):
            if not reasons:
                abort = asyncio.create_task(engine.abort(["x", "y"]))
                await asyncio.sleep(0)  # it is queued
                steps.permit()
            reasons.append(output.outputs[0].finish_reason)
        await abort
    await engine.abort("unknown")
    assert reasons[-1] == "abort"


@with_engine
async def test_bad_requests_and_duplicate_ids_raise_in_their_caller(engine, prompts, tokens):
    with pytest.raises(ValueError, match="prompt is empty"):
        await collect(engine, [], GREEDY, "a")
    for setting in ("lora_request", "lora_reqest"):
        with pytest.raises((ValueError, TypeError), match=setting):
            await anext(engine.generate(prompts[0], GREEDY, "a", **{setting: "an adapter"}))
    with held_steps(engine) as steps:
        running = asyncio.create_task(collect(engine, prompts[0], GREEDY, "a"))
        await until(lambda: steps.is_held)
        jobs = [asyncio.create_task(collect(engine, prompts[0], GREEDY, "a")) for _ in range(2)]
        await until(lambda: engine._commands.qsize() == 2)
        steps.permit()
        for job in jobs:
            with pytest.raises(ValueError, match="'a' is already in use"):
                await job
    assert await running == tokens[0]


@with_engine(max_concurrent_requests=1)
async def test_a_request_that_is_cancelled_while_it_waits_for_a_place_never_runs(engine, prompts, tokens):
    add, added = engine.llm_engine.add_request, []
    engine.llm_engine.add_request = lambda name, *rest, **more: added.append(name) or add(name, *rest, **more)
    with held_steps(engine) as steps:
        first = asyncio.create_task(collect(engine, prompts[0], GREEDY, "first"))
        await until(lambda: steps.is_held)
        second = asyncio.create_task(collect(engine, prompts[1], GREEDY, "second"))
        await until(lambda: not engine._commands.empty())  # its check is done, and it waits for a place
        second.cancel()
        await asyncio.wait([second])
    assert await first == tokens[0]
    assert await collect(engine, prompts[2], GREEDY, "third") == tokens[2]
    assert added == ["first", "third"]


@with_engine(max_concurrent_requests=1)
async def test_a_request_that_waits_for_a_place_is_aborted_with_a_last_output(engine, prompts, tokens):
    for ids in "second", ["second", "unknown"], iter(("unknown", "second")):
        with held_steps(engine) as steps:
            first = asyncio.create_task(collect(engine, prompts[0], GREEDY, "first"))
            await until(lambda steps=steps: steps.is_held)
            last = asyncio.create_task(anext(engine.generate(prompts[1], GREEDY, "second")))
            await until(lambda: engine._commands.qsize() == 1)
            third = asyncio.create_task(collect(engine, prompts[2], GREEDY, "third"))
            await until(lambda: engine._commands.qsize() == 2)
            aborted = asyncio.create_task(engine.abort(ids))
            await until(lambda: engine._commands.qsize() == 3)
        output = await asyncio.wait_for(last, TIMEOUT)
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
        await aborted
        assert await asyncio.wait_for(asyncio.gather(first, third), TIMEOUT) == [tokens[0], tokens[2]]


@with_engine
async def test_a_panic_is_raised_in_its_caller_and_ends_no_thread(engine, prompts, tokens):
    """tokenizers and llguidance raise Rust's panics as BaseException."""

    class PanicException(BaseException):
        pass

    for method in "check", "add_request":
        setattr(engine.llm_engine, method, Mock(side_effect=PanicException))
        with pytest.raises(PanicException):
            await asyncio.wait_for(collect(engine, prompts[0], GREEDY, "a"), TIMEOUT)
        delattr(engine.llm_engine, method)
        assert await asyncio.wait_for(collect(engine, prompts[0], GREEDY, "b"), TIMEOUT) == tokens[0]


def test_engine_serves_several_event_loops(qwen3, expected):
    """More requests than places, so that requests of different loops wait for each other."""
    engine = AsyncLLM(qwen3, max_concurrent_requests=2, **SETTINGS)

    async def main(name):
        return await asyncio.wait_for(collect_all(engine, expected[0], name=name), TIMEOUT)

    try:
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda name: asyncio.run(main(name)), "abc"))
        results.append(asyncio.run(main("d")))
        assert results == [expected[1]] * 4
        assert engine.llm_engine.metrics()["num_free_blocks"] == 60
    finally:
        engine.close()


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_invalid_max_concurrent_requests_is_rejected(value, qwen3):
    with pytest.raises((ValueError, TypeError), match="max_concurrent_requests"):
        AsyncLLM(qwen3, max_concurrent_requests=value, **SETTINGS)


@pytest.mark.parametrize("form", [None, {"regex": "[ab]+"}])
def test_a_signal_as_a_lock_is_taken_reaches_the_caller_and_stops_no_thread(form, monkeypatch, caplog):
    """A lock of concurrent.futures stays locked if the exception comes just after it is taken."""
    count, at, enter, main_thread = 0, -1, threading.Condition.__enter__, threading.get_ident()

    def interrupted_enter(self):
        nonlocal count
        result = enter(self)
        if threading.get_ident() == main_thread:
            count += 1
            if count == at:
                signal.raise_signal(signal.SIGALRM)
        return result

    def on_alarm(number, frame):
        raise InterruptedError

    async def ask(engine):
        asked = SamplingParams(temperature=0, max_tokens=2, structured_outputs=form)
        async for out in engine.generate("Hi", asked, "0"):
            token_ids = out.outputs[0].token_ids
        return token_ids

    handler = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with closing(AsyncLLM(DEMO, num_kv_blocks=40)) as engine:
            expected = asyncio.run(ask(engine))
            monkeypatch.setattr(threading.Condition, "__enter__", interrupted_enter)
            for at in range(1, 100):
                count = 0
                with suppress(InterruptedError):
                    asyncio.run(asyncio.wait_for(ask(engine), TIMEOUT))
                num_locks, count = count, 100
                assert asyncio.run(asyncio.wait_for(ask(engine), TIMEOUT)) == expected
                if num_locks < at:
                    break
            assert num_locks < at < 99
            assert "Exception in callback" not in caplog.text  # asyncio would lose the exception
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_a_signal_at_any_line_that_asyncio_calls_back_leaves_no_coroutine_waiting(shared, expected, caplog):
    """asyncio logs what a callback raises and goes on: the result that a coroutine awaits must be set."""

    def on_alarm(number, frame):
        raised.append(number)
        raise InterruptedError

    async def ask():
        return await asyncio.wait_for(collect(shared, expected[0][3], params, "0"), TIMEOUT)

    raised, params = [], SamplingParams(temperature=0, max_tokens=3)
    handler = signal.signal(signal.SIGALRM, on_alarm)
    try:
        for at in range(1, 500):
            lines = Lines(at=at, strike=lambda: signal.raise_signal(signal.SIGALRM))
            lines.where = async_llm.__file__  # a signal before a block begins comes too early to be delayed
            with lines, suppress(InterruptedError):
                assert asyncio.run(ask()) == expected[1][3][:3]
            if lines.count < at:
                break
        assert len(raised) == at - 1 < 499
        assert "InterruptedError" in caplog.text  # some came in a callback
    finally:
        signal.signal(signal.SIGALRM, handler)
