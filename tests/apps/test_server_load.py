"""The server under load: hundreds of clients of every kind at once, every answer the offline one."""

import asyncio
import itertools
import json
import random
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import DEVNULL
from threading import Event

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanoengine import LLM, SamplingParams
from tests.helpers import DEMO
from tests.serving import TIMEOUT, command, http, wait_until

SECONDS = 60
CLIENTS = 500
MAX_TOKENS = 40
KEY = "load"


def questions() -> list[str]:
    sums = [f"What is {a} + {b}?" for a, b in ((27, 58), (3, 4), (11, 80), (45, 45), (9, 90), (33, 21))]
    counts = [f"Count from {a} to {a + 9}." for a in range(1, 40, 6)]
    words = ("attention", "token", "lantern", "sailor", "cache", "queue")
    return sums + counts + [f"Spell the word {word} backwards." for word in words]


def offline_answers() -> list[tuple[list[int], list[int]]]:
    """Return the prompt and the answer of each question, as token ids."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(DEMO, num_kv_blocks=200) as llm:
        chats = [[{"role": "user", "content": question}] for question in questions()]
        outputs = llm.chat(chats, params, use_tqdm=False)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


KINDS = "whole", "stream", "slow", "leave", "malformed", "huge", "wrong_key"


class Client:
    """Behaves in one of several ways, good or bad, and adds what it sees to shared lists."""

    def __init__(self, port, expected, seed, seen, latencies):
        self.port, self.expected, self.seen, self.latencies = port, expected, seen, latencies
        self.rng = random.Random(seed)

    async def run(self, deadline):
        while time.monotonic() < deadline or min(self.seen[kind] for kind in KINDS) <= 5:
            await self.visit()

    async def visit(self):
        kinds = [self.whole] * 2 + [self.stream] * 10 + [self.slow] * 2 + [self.leave] * 3
        kind = self.rng.choice([*kinds, self.malformed, self.huge, self.wrong_key])
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**16)
        try:
            await kind(reader, writer)
        finally:
            writer.close()
        self.seen[kind.__name__] += 1

    async def send(self, writer, body, key=KEY):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def ask(self, writer, **fields):
        self.question = self.rng.randrange(len(self.expected))
        self.wanted = self.rng.randint(1, MAX_TOKENS)
        ids, answer = self.expected[self.question]
        body = {
            "prompt": ids,
            "max_tokens": self.wanted,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        self.started = time.monotonic()
        await self.send(writer, json.dumps(body).encode())
        return answer[: self.wanted]

    async def status(self, reader):
        line = await reader.readline()
        while (await reader.readline()) not in (b"\r\n", b""):
            pass
        return int(line.split()[1])

    async def pieces(self, reader):
        """Yield token ids as they arrive. The body is chunked, with an event per chunk."""
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                yield choice["token_ids"]
            elif line == b"data: [DONE]\n":
                return
        raise AssertionError("a stream ended in the middle")

    async def whole(self, reader, writer):
        answer = await self.ask(writer)
        assert await self.status(reader) == 200
        (choice,) = json.loads(await reader.read())["choices"]
        assert choice["token_ids"] == answer
        self.latencies["whole answer"].append(time.monotonic() - self.started)

    async def stream(self, reader, writer, pause=0.0):
        answer, tokens = await self.ask(writer, stream=True), []
        assert await self.status(reader) == 200
        last = None
        async for new in self.pieces(reader):
            now = time.monotonic()
            if not pause:
                name = "between outputs" if last else "first output"
                self.latencies[name].append(now - (last or self.started))
            last, tokens = now, tokens + new
            await asyncio.sleep(self.rng.random() * pause)
        assert tokens == answer

    async def slow(self, reader, writer):
        await self.stream(reader, writer, pause=0.5)

    async def leave(self, reader, writer):
        stream = self.rng.random() < 0.7
        await self.ask(writer, stream=stream)
        if stream and self.rng.random() < 0.7:
            assert await self.status(reader) == 200
            left = self.rng.randint(1, 5)
            async for _ in self.pieces(reader):
                left -= 1
                if not left:
                    break
        else:
            await asyncio.sleep(self.rng.random())

    async def malformed(self, reader, writer):
        bodies = [
            b"{",
            b"[" * 5000,
            b"\xff",
            b'{"prompt": 7}',
            b'{"prompt": "a", "n": -1}',
            b'{"prompt": "\\ud800"}',
        ]
        await self.send(writer, self.rng.choice(bodies))
        assert await self.status(reader) == 400

    async def huge(self, reader, writer):
        await self.send(writer, b" " * self.rng.randint(200_000, 2_000_000))
        assert await self.status(reader) == 413

    async def wrong_key(self, reader, writer):
        await self.send(writer, b'{"prompt": "a"}', key=self.rng.choice(["", "loa", "loadx", "é"]))
        assert await self.status(reader) == 401


LONG = "a b " * 200_000
HOSTILE = [
    ("/v1/completions", {"prompt": LONG}),
    ("/tokenize", {"prompt": LONG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
]
NUM_HOSTILE = 6  # clients that send long texts; two more send wrong keys in long headers


@pytest.mark.slow
def test_short_requests_overtake_hostile_ones():
    """If they waited in one queue, each would see a long request of every hostile client answered first."""
    key = {"Authorization": f"Bearer {KEY}"}
    asked = {"prompt": "What is 27 + 58?", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    ended, answered, texts, overtaken = Event(), [], set(), []

    def hostile(url, number):
        headers = key if number < NUM_HOSTILE else {"Authorization": "x" * 60_000}
        for path, body in itertools.islice(itertools.cycle(HOSTILE), number % 3, None):
            with suppress(httpx.HTTPError):
                httpx.post(url + path, json=body, headers=headers, timeout=TIMEOUT)
            if ended.is_set():
                return
            if number < NUM_HOSTILE:
                answered.append(path)

    def ask(url):
        for _ in range(40):
            before = len(answered)
            answer = httpx.post(f"{url}/v1/completions", json=asked, headers=key, timeout=TIMEOUT)
            overtaken.append(len(answered) - before)
            texts.add(answer.json()["choices"][0]["text"])

    with command(stdout=DEVNULL, NANOENGINE_API_KEY=KEY) as (_, url), ThreadPoolExecutor(9) as clients:
        for number in range(NUM_HOSTILE + 2):
            clients.submit(hostile, url, number)
        try:
            wait_until(lambda: len(answered) > NUM_HOSTILE)
            ask(url)
        finally:
            ended.set()
    print(f"long requests answered during a short one: {Counter(overtaken)}")
    assert len(texts) == 1
    assert statistics.median(overtaken) <= 1
    assert max(overtaken) < NUM_HOSTILE


@pytest.mark.slow
def test_hundreds_of_clients_get_complete_and_correct_answers():
    expected = offline_answers()
    seen: Counter[str] = Counter()
    latencies: dict[str, list[float]] = {"first output": [], "between outputs": [], "whole answer": []}
    memory = []
    # So few blocks that sequences are preempted, and so few at a time that clients wait.
    flags = "--max-num-seqs 64 --max-waiting 1000 --max-body-bytes 100000 --block-size 8 --num-kv-blocks 100"
    with command(*flags.split(), stdout=DEVNULL, NANOENGINE_API_KEY=KEY) as (process, url):
        server = psutil.Process(process.pid)

        async def main():
            start = time.monotonic()
            clients = [
                Client(int(url.split(":")[2]), expected, seed, seen, latencies) for seed in range(CLIENTS)
            ]

            async def watch():
                while True:
                    memory.append((time.monotonic() - start, server.memory_info().rss / 2**20))
                    await asyncio.sleep(1)

            watcher = asyncio.create_task(watch())
            try:
                await asyncio.gather(*(client.run(start + SECONDS) for client in clients))
            finally:
                watcher.cancel()

        asyncio.run(main())

        def gauges():
            text = http.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
            return {
                sample.name: sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }

        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        wait_until(lambda: [gauges()[name] for name in names] == [0, 0, 0])
        print(f"\n{dict(seen)}, {gauges()['vllm:num_preemptions_total']:.0f} preemptions")
        assert gauges()["vllm:num_preemptions_total"] > 0
    for name, seconds in latencies.items():
        percentiles = statistics.quantiles(seconds, n=100)
        print(f"{name}: p50 {percentiles[49]:.3f} s, p99 {percentiles[98]:.3f} s of {len(seconds)}")
    settled = [mib for second, mib in memory if second > SECONDS / 3]
    print(f"memory after a third: {settled[0]:.0f} MiB, at the end {settled[-1]:.0f} MiB")
    assert settled[-1] - settled[0] < 32
    assert min(seen[kind] for kind in KINDS) > 5
