"""The asyncio front: many consumers, cancellation, slow consumers, errors, shutdown."""

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanoengine import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, requests
from tests.helpers import DEMO, checkpoint, random_prompts
from tests.serving import PATIENCE, held_steps, until

GREEDY = SamplingParams(temperature=0, max_tokens=20)
DELTA = SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.DELTA)
SETTINGS = {"block_size": 16, "num_kv_blocks": 60}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(checkpoint("qwen3", tmp_path_factory)[0])


@pytest.fixture(scope="module")
def expected(path):
    prompts = random_prompts([5, 20, 33, 1, 60, 17])
    with LLM(path, **SETTINGS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return prompts, [output.outputs[0].token_ids for output in outputs]


async def collect(engine, prompt, params, request_id):
    """The concatenated tokens (DELTA) or the last output's (otherwise)."""
    tokens = []
    async for output in engine.generate(prompt, params, request_id):
        new = output.outputs[0].token_ids
        tokens = tokens + new if params.output_kind is RequestOutputKind.DELTA else new
    assert output.finished
    return tokens


def once_all_are_there(engine, num_requests):
    """Have the engine take its first step when so many requests have arrived."""
    step, has_begun = engine._step, False

    def wait_or_step():
        nonlocal has_begun
        has_begun = has_begun or len(engine._mailboxes) == num_requests
        if has_begun:
            step()

    engine._step = wait_or_step


@pytest.mark.parametrize("params", [GREEDY, DELTA])
def test_many_coroutines_get_what_generate_gives(params, path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            jobs = [collect(engine, p, params, f"r{i}") for i, p in enumerate(expected[0])]
            assert await asyncio.gather(*jobs) == expected[1]

    asyncio.run(main())


class Listener:
    """Notes what it is given: as a logits processor, a trace or a store. Its lock forbids copies."""

    def __init__(self):
        self.given, self.lock = [], threading.Lock()

    def process(self, token_ids, logits):
        self.given.append(len(token_ids))
        return logits

    def take(self, event):
        self.given.append(event)

    def get(self, keys):
        return iter(())

    def put(self, key, data):
        self.given.append(key)

    def touch(self, keys):
        return [False for _ in keys]

    def delete(self, key):
        raise AssertionError("nothing was stored")


def test_a_request_s_logits_processors_are_the_caller_s_own_objects(path, expected):
    listener = Listener()

    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            params = SamplingParams(temperature=0, max_tokens=20, logits_processors=[listener.process])
            answer = asyncio.create_task(collect(engine, expected[0][0], params, "a"))
            await asyncio.sleep(0)  # it has begun
            params.logits_processors.clear()  # which is too late
            assert await answer == expected[1][0]

    asyncio.run(main())
    assert listener.given == [*range(20)]


@pytest.mark.parametrize("name", ["trace", "kv_store"])
def test_an_engine_made_of_engine_args_uses_the_objects_in_them(name, path, expected):
    listener = Listener()
    given = {"trace": listener.take, "kv_store": listener}[name]
    args = AsyncEngineArgs(model=path, **{name: given}, **SETTINGS)

    async def main():
        async with AsyncLLM.from_engine_args(args) as engine:
            assert await collect(engine, expected[0][4], GREEDY, "a") == expected[1][4]

    asyncio.run(main())
    assert listener.given


@pytest.mark.parametrize("asked", [{}, {"structured_outputs": {"regex": "a+"}}])
@pytest.mark.parametrize("prompt", ["Hello", {"prompt": "Hello"}, [5, 6]])
def test_a_prompt_is_tokenized_and_checked_once_and_neither_loop_nor_steps_wait(prompt, asked, monkeypatch):
    threads: dict = {"tokenized": [], "checked": []}

    def noting(what, function):
        def wrapper(*arguments, **settings):
            threads[what].append(threading.current_thread())
            return function(*arguments, **settings)

        return wrapper

    async def main():
        async with AsyncLLM(str(DEMO), num_kv_blocks=100) as engine:
            checker = engine.llm_engine.checker
            monkeypatch.setattr(checker, "encode", noting("tokenized", checker.encode))
            monkeypatch.setattr(requests, "read_prompt", noting("checked", requests.read_prompt))
            await collect(engine, prompt, SamplingParams(max_tokens=3, **asked), "x")
            assert [len(threads["checked"]), len(threads["tokenized"])] == [1, int(prompt != [5, 6])]
            others = {engine._thread, threading.current_thread()}
            assert not others.intersection(threads["checked"] + threads["tokenized"])

    asyncio.run(main())


def test_requests_are_checked_one_after_the_other_in_their_order(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            check, order, num_inside = engine.llm_engine.check, [], 0

            def slow_check(prompt, *arguments):
                nonlocal num_inside
                num_inside += 1
                time.sleep(0.01)  # for another one to come in, if it may
                assert num_inside == 1
                num_inside -= 1
                order.append(prompt)
                return check(prompt, *arguments)

            engine.llm_engine.check = slow_check
            jobs = [collect(engine, p, GREEDY, f"r{i}") for i, p in enumerate(expected[0])]
            assert await asyncio.gather(*jobs) == expected[1]
            assert order == expected[0]

    asyncio.run(main())


def test_a_slow_consumer_loses_nothing_and_holds_one_output(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            tokens, outputs = [], 0
            async for output in engine.generate(expected[0][1], DELTA, "slow"):
                tokens += output.outputs[0].token_ids
                outputs += 1
                await until(lambda: not engine.llm_engine.has_unfinished_requests())
            assert tokens == expected[1][1]
            assert outputs <= 3  # what came meanwhile was merged; the last step's may come after that

    asyncio.run(main())


def test_cancelling_or_leaving_a_consumer_aborts_its_request_only(path, expected):
    endless = SamplingParams(temperature=0, max_tokens=400)

    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            with held_steps(engine) as steps:
                task = asyncio.create_task(collect(engine, expected[0][0], endless, "cancelled"))
                other = asyncio.create_task(collect(engine, expected[0][1], GREEDY, "other"))
                steps.permit(5)
                await until(lambda: steps.is_held)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            async for _ in (left := engine.generate(expected[0][2], endless, "left")):
                break
            await left.aclose()
            assert await other == expected[1][1]
            # The same ids can be used again, and every block is back.
            assert await collect(engine, expected[0][3], GREEDY, "cancelled") == expected[1][3]
            assert engine.llm_engine.metrics()["num_free_blocks"] == 60
            assert not engine.llm_engine.has_unfinished_requests()

    asyncio.run(main())


def test_abort_gives_the_consumer_a_last_output(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            params = SamplingParams(temperature=0, max_tokens=400)
            reasons = []
            with held_steps(engine) as steps:
                steps.permit(1)
                async for output in engine.generate(expected[0][0], params, "x"):
                    if not reasons:
                        abort = asyncio.create_task(engine.abort("x"))
                        await asyncio.sleep(0)  # it is asked for
                        steps.permit()
                    reasons.append(output.outputs[0].finish_reason)
                await abort
            await engine.abort("unknown")
            assert reasons[-1] == "abort"

    asyncio.run(main())


def test_bad_requests_and_duplicate_ids_raise_where_they_were_made(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            with pytest.raises(ValueError, match="prompt is empty"):
                await collect(engine, [], GREEDY, "a")
            with held_steps(engine) as steps:
                running = asyncio.create_task(collect(engine, expected[0][0], GREEDY, "a"))
                await until(lambda: steps.is_held)
                jobs = [asyncio.create_task(collect(engine, expected[0][0], GREEDY, "a")) for _ in range(2)]
                await until(lambda: engine._commands.qsize() == 2)
                steps.permit()
                for job in jobs:
                    with pytest.raises(ValueError, match="'a' is in use"):
                        await job
            assert await running == expected[1][0]

    asyncio.run(main())


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("failing", [{3}, {0, 2, 5}])
def test_a_step_that_fails_once_is_computed_anew_and_nobody_notices(
    failing, async_scheduling, path, expected, caplog
):
    # A penalty has the step before collected first: its outputs were made when the launch fails.
    penalised = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.1)

    async def main():
        async with AsyncLLM(path, async_scheduling=async_scheduling, **SETTINGS) as engine:
            launch, calls = engine.llm_engine.runner.launch, itertools.count()

            def fails_sometimes(*arguments):
                if next(calls) in failing:
                    raise RuntimeError("out of memory")
                return launch(*arguments)

            engine.llm_engine.runner.launch = fails_sometimes
            once_all_are_there(engine, 7)
            jobs = [collect(engine, p, GREEDY, f"r{i}") for i, p in enumerate(expected[0])]
            *answers, other = await asyncio.gather(*jobs, collect(engine, [1, 2], penalised, "penalised"))
            assert answers == expected[1]
            assert len(other) == 20
            assert caplog.text.count("RuntimeError: out of memory") == len(failing)

    asyncio.run(main())


def test_a_step_that_fails_twice_ends_those_it_computed_and_none_that_wait(path, expected):
    async def main():
        async with AsyncLLM(path, max_num_seqs=2, **SETTINGS) as engine:
            launch, poison = engine.llm_engine.runner.launch, expected[0][1]

            def fails_on_poison(batch, before):
                if any(chunk.seq.token_ids[: len(poison)] == poison for chunk in batch.chunks):
                    raise RuntimeError("poison")
                return launch(batch, before)

            engine.llm_engine.runner.launch = fails_on_poison
            prompts = [expected[0][i] for i in (0, 1, 2, 3, 4)]  # two run: the first and the poison

            async def last_output(i):
                async for output in engine.generate(prompts[i], GREEDY, f"r{i}"):
                    last = output
                return last.outputs[0]

            with held_steps(engine) as steps:  # until all are there
                jobs = [asyncio.create_task(last_output(i)) for i in range(5)]
                await until(lambda: steps.is_held and engine._commands.qsize() == 4)
            outputs = await asyncio.gather(*jobs)
            assert [o.finish_reason for o in outputs] == ["error", "error", "length", "length", "length"]
            assert [o.token_ids for o in outputs[2:]] == expected[1][2:5]
            assert engine.llm_engine.metrics()["num_free_blocks"] == 60

    asyncio.run(main())


def test_a_late_chunk_that_always_fails_ends_its_request_though_the_chunks_before_it_succeed(path, expected):
    """In between others get tokens: they are computed again, and go on."""

    async def main():
        async with AsyncLLM(path, max_num_batched_tokens=20, **SETTINGS) as engine:
            launch, poison = engine.llm_engine.runner.launch, expected[0][4]  # 60 tokens: several chunks

            def fails_on_poison(batch, before):
                if any(chunk.seq.token_ids == poison and chunk.is_last for chunk in batch.chunks):
                    raise RuntimeError("poison")
                return launch(batch, before)

            engine.llm_engine.runner.launch = fails_on_poison
            poisoned = asyncio.create_task(collect(engine, poison, GREEDY, "poison"))
            jobs = [collect(engine, expected[0][i], GREEDY, f"r{i}") for i in (0, 3, 5)]
            assert await asyncio.gather(*jobs) == [expected[1][i] for i in (0, 3, 5)]
            assert await asyncio.wait_for(poisoned, PATIENCE) == []

    asyncio.run(main())


def test_one_engine_serves_several_event_loops_at_once_and_one_after_another(path, expected):
    """More requests than places, so that they wait for each other across the loops."""
    engine = AsyncLLM(path, max_concurrent_requests=2, **SETTINGS)

    async def main(name):
        jobs = [collect(engine, p, GREEDY, f"{name} {i}") for i, p in enumerate(expected[0])]
        return await asyncio.wait_for(asyncio.gather(*jobs), PATIENCE)

    try:
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda name: asyncio.run(main(name)), "abc"))
        results += [asyncio.run(main(name)) for name in "de"]
        assert results == [expected[1]] * 5
        assert engine.llm_engine.metrics()["num_free_blocks"] == 60
    finally:
        engine.close()


def test_a_request_cancelled_while_it_waits_for_its_place_never_runs(path, expected):
    async def main():
        async with AsyncLLM(path, max_concurrent_requests=1, **SETTINGS) as engine:
            with held_steps(engine) as steps:
                first = asyncio.create_task(collect(engine, expected[0][0], GREEDY, "first"))
                await until(lambda: steps.is_held)
                waiting = asyncio.create_task(collect(engine, expected[0][1], GREEDY, "waiting"))
                await until(lambda: engine._commands.qsize() == 1)
                steps.permit(1)
                await until(lambda: steps.is_held and len(engine._waiting) == 1)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            assert await first == expected[1][0]
            assert await collect(engine, expected[0][2], GREEDY, "third") == expected[1][2]
            assert engine.llm_engine.metrics()["generation_tokens"] == 40

    asyncio.run(main())


def test_closing_refuses_those_that_wait_for_a_place(path, expected):
    async def main():
        engine = AsyncLLM(path, max_concurrent_requests=1, **SETTINGS)
        endless = SamplingParams(temperature=0, max_tokens=400)
        with held_steps(engine) as steps:
            jobs = [asyncio.create_task(collect(engine, expected[0][0], endless, str(i))) for i in range(3)]
            await until(lambda: steps.is_held and engine._commands.qsize() == 2)
            steps.permit(1)
            await until(lambda: steps.is_held and len(engine._waiting) == 2)
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            await until(lambda: engine._closed)
        await closing
        assert len(await jobs[0]) < 400
        for job in jobs[1:]:
            with pytest.raises(RuntimeError, match="closed"):
                await job

    asyncio.run(main())


def test_a_flood_of_bad_requests_does_not_keep_others_from_their_tokens(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            going_on = True

            async def flood():
                while going_on:
                    with pytest.raises(ValueError, match="prompt is empty"):
                        await collect(engine, [], GREEDY, "bad")

            floods = [asyncio.create_task(flood()) for _ in range(50)]
            job = collect(engine, expected[0][0], GREEDY, "good")
            assert await asyncio.wait_for(job, PATIENCE) == expected[1][0]
            going_on = False
            await asyncio.gather(*floods)

    asyncio.run(main())


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_number_of_places_that_makes_no_sense_is_refused(value, path):
    with pytest.raises((ValueError, TypeError), match="max_concurrent_requests"):
        AsyncLLM(path, max_concurrent_requests=value, **SETTINGS)


def test_no_more_requests_are_served_at_a_time_than_allowed(path, expected):
    async def main():
        async with AsyncLLM(path, max_concurrent_requests=2, **SETTINGS) as engine:
            most, add = 0, engine.llm_engine.add_request

            def counting_add(*arguments, **keywords):
                nonlocal most
                add(*arguments, **keywords)
                most = max(most, len(engine.llm_engine._requests))

            engine.llm_engine.add_request = counting_add
            with held_steps(engine) as steps:  # until all are there
                tasks = [collect(engine, p, GREEDY, f"r{i}") for i, p in enumerate(expected[0])]
                answers = asyncio.gather(*tasks)
                await until(lambda: steps.is_held and engine._commands.qsize() == 5)
            assert await answers == expected[1]
            assert most == 2

    asyncio.run(main())


def test_closing_ends_running_requests_and_refuses_new_ones(path, expected):
    async def main():
        engine = AsyncLLM(path, **SETTINGS)
        params = SamplingParams(temperature=0, max_tokens=400)
        reasons = []
        with held_steps(engine) as steps:
            steps.permit(1)
            async for output in engine.generate(expected[0][0], params, "x"):
                reasons.append(output.outputs[0].finish_reason)
                if len(reasons) == 1:
                    closing = asyncio.create_task(asyncio.to_thread(engine.close))
                    await until(lambda: engine._closed)
                    steps.permit()
        await closing
        assert reasons[-1] == "abort"
        with pytest.raises(RuntimeError, match="closed"):
            await collect(engine, expected[0][0], GREEDY, "y")
        engine.close()

    asyncio.run(main())


def test_metrics_are_read_between_steps_and_say_what_ran(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            jobs = [collect(engine, p, GREEDY, f"r{i}") for i, p in enumerate(expected[0])]
            with held_steps(engine) as steps:
                answers = asyncio.gather(*jobs)
                await until(lambda: steps.is_held)
                running = asyncio.create_task(read(engine, "vllm:num_requests_running"))
                await asyncio.sleep(0)  # it is asked for
                steps.permit()
                assert 0 < await running <= 6
            assert await answers == expected[1]
            assert await read(engine, "vllm:num_requests_running") == 0
            assert await read(engine, "vllm:generation_tokens") == 120
        with pytest.raises(RuntimeError, match="closed"):
            await engine.get_metrics()

    async def read(engine, name):
        return next(metric.value for metric in await engine.get_metrics() if metric.name == name)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:Exception in thread")
def test_a_thread_that_dies_leaves_nobody_waiting(path, expected):
    async def main():
        engine = AsyncLLM(path, max_concurrent_requests=2, **SETTINGS)
        assert engine.is_running
        endless = SamplingParams(temperature=0, max_tokens=400)
        jobs = [collect(engine, p, endless, f"r{i}") for i, p in enumerate(expected[0])]
        ends = asyncio.gather(*jobs, return_exceptions=True)
        with held_steps(engine) as steps:
            await until(lambda: steps.is_held and engine._commands.qsize() == 5)
            engine._step = None
        ends = await asyncio.wait_for(ends, PATIENCE)
        assert [type(end) for end in ends] == [list] * 2 + [RuntimeError] * 4  # four had no place yet
        assert not engine.is_running
        with pytest.raises(RuntimeError, match="closed"):
            await collect(engine, expected[0][0], GREEDY, "y")
        engine.close()

    asyncio.run(main())
