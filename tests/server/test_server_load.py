"""The server under load: hundreds of clients of every kind at once, every answer the offline one."""

import asyncio
import json
import random
import time
from collections import Counter
from subprocess import DEVNULL

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanoengine import LLM, SamplingParams
from tests.helpers import DEMO
from tests.serving import TIMEOUT, command, http, wait_until

SECONDS = 15
CLIENTS = 500
MAX_TOKENS = 40
KINDS = {"whole": 2, "stream": 10, "slow": 2, "leave": 3}  # and how often each is chosen


def offline_answers() -> list[tuple[list[int], list[int]]]:
    """Return the prompts and the answers of questions, as token ids."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    asked = [f"Count from {a} to {a + 9}." for a in range(1, 40, 4)] + [f"What is {a} + 9?" for a in range(9)]
    with LLM(DEMO, num_kv_blocks=200) as llm:
        chats = [[{"role": "user", "content": question}] for question in asked]
        outputs = llm.chat(chats, params, use_tqdm=False)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


async def visit(client: httpx.AsyncClient, kind: str, expected: list, rng: random.Random) -> None:
    """Ask once, and behave in one of several ways, good or bad."""
    (prompt, answer_ids), max_tokens = rng.choice(expected), rng.randint(1, MAX_TOKENS)
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    tokens, leaves_after = [], rng.randint(1, MAX_TOKENS) if kind == "leave" else MAX_TOKENS
    async with client.stream("POST", "/v1/completions", json=asked | {"stream": kind != "whole"}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if kind == "whole" or line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
            if len(tokens) > leaves_after:
                return
            await asyncio.sleep(rng.random() / 2 if kind == "slow" else 0)
    assert tokens == answer_ids[:max_tokens]


@pytest.mark.slow
def test_hundreds_of_clients_get_complete_and_correct_answers():
    expected = offline_answers()
    seen: Counter[str] = Counter()
    memory = []
    # So few blocks that sequences are preempted, and so few at a time that clients wait.
    flags = "--max-num-seqs 64 --max-waiting 1000 --max-body-bytes 100000 --block-size 8 --num-kv-blocks 100"
    with command(*flags.split(), stdout=DEVNULL) as (process, url):
        server = psutil.Process(process.pid)

        async def stay(client, deadline, seed):
            rng = random.Random(seed)
            while time.monotonic() < deadline or min(seen[kind] for kind in KINDS) <= 5:
                (kind,) = rng.choices([*KINDS], KINDS.values())
                await visit(client, kind, expected, rng)
                seen[kind] += 1

        async def watch():
            while True:
                memory.append((time.monotonic(), server.memory_info().rss / 2**20))
                await asyncio.sleep(1)

        async def main():
            limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
            headers = {"content-type": "application/json"}
            settings = {"base_url": url, "headers": headers, "limits": limits, "timeout": TIMEOUT}
            watcher, deadline = asyncio.create_task(watch()), time.monotonic() + SECONDS
            async with httpx.AsyncClient(**settings) as client:
                await asyncio.gather(*(stay(client, deadline, seed) for seed in range(CLIENTS)))
            watcher.cancel()

        asyncio.run(main())

        def gauges():
            families = text_string_to_metric_families(http.get(f"{url}/metrics").text)
            return {sample.name: sample.value for family in families for sample in family.samples}

        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        wait_until(lambda: [gauges()[name] for name in names] == [0, 0, 0])
        print(f"\n{dict(seen)}, {gauges()['vllm:num_preemptions_total']:.0f} preemptions")
        assert gauges()["vllm:num_preemptions_total"] > 0
    settled = [mib for at, mib in memory if at > memory[0][0] + SECONDS / 3]
    print(f"memory after a third: {settled[0]:.0f} MiB, at the end {settled[-1]:.0f} MiB")
    assert settled[-1] - settled[0] < 20
    assert min(seen[kind] for kind in KINDS) > 5
