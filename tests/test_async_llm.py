"""The asyncio front: many consumers, cancellation, slow consumers, errors, shutdown."""

import asyncio

import pytest

from nanoengine import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from tests.helpers import checkpoint, random_prompts

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


@pytest.mark.parametrize("params", [GREEDY, DELTA])
def test_many_coroutines_get_what_generate_gives(params, path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            jobs = [collect(engine, p, params, f"r{i}") for i, p in enumerate(expected[0])]
            assert await asyncio.gather(*jobs) == expected[1]

    asyncio.run(main())


def test_a_slow_consumer_loses_nothing_and_holds_one_output(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            tokens, outputs = [], 0
            async for output in engine.generate(expected[0][1], DELTA, "slow"):
                tokens += output.outputs[0].token_ids
                outputs += 1
                await asyncio.sleep(0.2)
            assert tokens == expected[1][1]
            assert outputs < 20  # what came meanwhile was merged

    asyncio.run(main())


def test_cancelling_or_leaving_a_consumer_aborts_its_request_only(path, expected):
    endless = SamplingParams(temperature=0, max_tokens=400)

    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            task = asyncio.create_task(collect(engine, expected[0][0], endless, "cancelled"))
            other = asyncio.create_task(collect(engine, expected[0][1], GREEDY, "other"))
            await asyncio.sleep(0.05)
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
            async for output in engine.generate(expected[0][0], params, "x"):
                if not reasons:
                    await engine.abort("x")
                reasons.append(output.outputs[0].finish_reason)
            await engine.abort("unknown")
            assert reasons[-1] == "abort"

    asyncio.run(main())


def test_bad_requests_and_duplicate_ids_raise_where_they_were_made(path, expected):
    async def main():
        async with AsyncLLM(path, **SETTINGS) as engine:
            with pytest.raises(ValueError, match="prompt is empty"):
                await collect(engine, [], GREEDY, "a")
            running = asyncio.create_task(collect(engine, expected[0][0], GREEDY, "a"))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="'a' is in use"):
                await asyncio.gather(*(collect(engine, expected[0][0], GREEDY, "a") for _ in range(2)))
            assert await running == expected[1][0]

    asyncio.run(main())


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("failing_launch", [0, 3])
def test_a_failed_step_is_raised_to_those_it_concerned_and_the_engine_goes_on(
    failing_launch, async_scheduling, path, expected
):
    # A penalty has the step before collected first: its output was made when the launch fails.
    params = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.1)

    async def main():
        async with AsyncLLM(path, async_scheduling=async_scheduling, **SETTINGS) as engine:
            launch, calls = engine.llm_engine.runner.launch, iter(range(1000))

            def fail_once(*arguments):
                if next(calls) == failing_launch:
                    raise RuntimeError("out of memory")
                return launch(*arguments)

            engine.llm_engine.runner.launch = fail_once
            with pytest.raises(RuntimeError, match="out of memory"):
                await collect(engine, expected[0][0], params, "a")
            again = collect(engine, expected[0][0], GREEDY, "b")
            assert await asyncio.wait_for(again, 30) == expected[1][0]

    asyncio.run(main())


def test_no_more_requests_are_served_at_a_time_than_allowed(path, expected):
    async def main():
        async with AsyncLLM(path, max_concurrent_requests=2, **SETTINGS) as engine:
            most, add = 0, engine.llm_engine.add_request

            def counting_add(*arguments, **keywords):
                nonlocal most
                add(*arguments, **keywords)
                most = max(most, len(engine.llm_engine._requests))

            engine.llm_engine.add_request = counting_add
            jobs = [collect(engine, p, GREEDY, f"r{i}") for i, p in enumerate(expected[0])]
            assert await asyncio.gather(*jobs) == expected[1]
            assert most == 2

    asyncio.run(main())


def test_closing_ends_running_requests_and_refuses_new_ones(path, expected):
    async def main():
        engine = AsyncLLM(path, **SETTINGS)
        params = SamplingParams(temperature=0, max_tokens=400)
        reasons = []
        async for output in engine.generate(expected[0][0], params, "x"):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 1:
                await asyncio.to_thread(engine.close)
        assert reasons[-1] == "abort"
        with pytest.raises(RuntimeError, match="closed"):
            await collect(engine, expected[0][0], GREEDY, "y")
        engine.close()

    asyncio.run(main())
