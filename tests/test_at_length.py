"""Hundreds of cases of what other files test one at a time: none may be wrong, leak or hang."""

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from nanoengine import LLM, AsyncLLM
from tests.apps.test_server_load import KEY, Client, offline_answers
from tests.extensions.test_speculate import NGRAM, Oracle, by_sequence, plain, without_rounding
from tests.helpers import DEMO, VARIED_SETTINGS, random_params
from tests.laws import check_laws
from tests.serving import http, is_empty, served, wait_until
from tests.test_async_scheduling import seen
from tests.test_scheduling_machine import BRIEFLY, CoreMachine, ExtendedMachine, StatefulMachine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("machine", [CoreMachine, ExtendedMachine, StatefulMachine])
def test_thousands_of_scheduling_steps_agree_with_the_ledger(machine):
    run_at_length(machine)


def run_at_length(machine):
    steps = Counter()

    class Counted(machine):
        def launch(self):
            steps[machine] += 1
            return super().launch()

    seeded = settings(BRIEFLY, max_examples=600, derandomize=True, database=None)
    run_state_machine_as_test(Counted, settings=seeded)
    assert steps.total() > 10_000


def test_draft_tokens_do_not_change_hundreds_of_requests(babbler):
    """With preemptions and chunks; a third of the drafts are wrong."""
    rng, num_requests = random.Random(0), 0
    for name in ("roomy", "with preemption", "in chunks"):
        prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(300)]
        params = [random_params(rng) for _ in prompts]
        with LLM(babbler, **VARIED_SETTINGS[name]) as llm:
            expected = seen(llm, prompts, params)
        with LLM(babbler, speculative_config=NGRAM, **VARIED_SETTINGS[name]) as llm:
            llm.scheduler.propose = Oracle(by_sequence(expected), 260, 0.3)
            assert plain(seen(llm, prompts, params)) == without_rounding(expected)
            assert llm.metrics()["spec_decode_num_accepted_tokens"] > 200
            assert llm.metrics()["num_free_blocks"] == llm.metrics()["num_blocks"]
            check_laws(llm.scheduler)
        num_requests += len(prompts)
    assert num_requests == 900


def test_thousand_mixed_requests_are_answered_and_leave_no_state():
    """Complete, in pieces, slow, abandoned, malformed, too large, and with wrong keys."""
    expected, requests = offline_answers(), Counter()
    latencies = {"first output": [], "between outputs": [], "whole answer": []}
    engine = AsyncLLM(str(DEMO), num_kv_blocks=100, block_size=8, max_num_seqs=64)
    with served(engine, api_key=KEY, max_body_bytes=100_000) as (url, service):

        async def main():
            port = int(url.rsplit(":", 1)[1])
            clients = [Client(port, expected, seed, requests, latencies) for seed in range(100)]

            async def visits(client):
                for _ in range(10):
                    await client.visit()

            await asyncio.gather(*map(visits, clients))

        asyncio.run(main())
        wait_until(lambda: is_empty(service) and service.num_samples == 0)
        assert not service.engine.llm_engine.requests
        assert http.get(f"{url}/health").status_code == 200
    assert requests.total() == 1000
    assert min(requests[kind] for kind in ("whole", "slow", "leave", "malformed", "huge", "wrong_key")) > 20
