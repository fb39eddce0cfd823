"""Simulates whole servers for test_simulate.py.

A seed makes a `Script`: an engine's settings, the visits of clients, the steps that fail and the moment of
the shutdown. `run` plays it in the bottle of bottle.py, from the bytes of the requests to the bytes of the
answers, and raises `Broken` if a law does not hold:

    answers     each is the one that the same request gets alone, or an error that has a cause in the script
    shutdown    a request that is sent after the signal to stop is refused
    progress    the first running sequence is computed in each step, and every client gets an answer
    leftovers   no block, queue entry, task, timer, place or sequence is left when all clients have gone
    the key     a request without the key neither gets an answer nor reaches the engine
    memory      no step is larger than planned or admits after a preemption, and not too many samples wait
"""

import asyncio
import contextlib
import gc
import hashlib
import io
import json
import logging
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPResponse, IncompleteRead
from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.async_llm import AsyncLLM
from nanoengine.chat.answer_parser import choose_formats
from nanoengine.config import EngineConfig
from nanoengine.engine import BY_ORDER
from nanoengine.llm_engine import LLMEngine
from nanoengine.server.app import make_app
from nanoengine.server.lifecycle import CLOSE_SECONDS, Server
from nanoengine.server.openai_api import ChatRequest, CompletionRequest, Progress
from nanoengine.server.service import Service
from nanoengine.server.token_logprobs import TokenNames
from tests.bottle import CLIENT_SECONDS, Broken, Injected, Loop, Pipe, demo, virtual
from tests.laws import check_laws

KEY = "open sesame"
FORBIDDEN = 7  # a token that only requests without the key have in their prompts
FAST = 1 << 30
LENGTH = 160  # max_model_len
ROOMY: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 40, "max_num_seqs": 8}
ROOMY["max_num_batched_tokens"] = 64


# ---- Requests and their true answers -----------------------------------------------------------------


@cache
def pool() -> list[tuple[str, dict[str, Any]]]:
    """Return the requests that clients may send: (path, body)."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(8, 430) for _ in range(32)] for _ in range(3)]

    def prompt() -> list[int]:
        shared = rng.choice(prefixes)[: rng.choice([0, 5, 16, 17, 31])]
        return shared + [rng.randrange(8, 430) for _ in range(rng.randint(1, 9))]

    requests: list[tuple[str, dict[str, Any]]] = []
    for _ in range(24):
        fields: dict[str, Any] = {"prompt": prompt(), "max_tokens": rng.randint(1, 20)}
        fields |= {"temperature": rng.choice([0, 0, 0.7]), "seed": rng.randrange(9)}
        fields |= rng.choice([{}, {"stop": ["e", "th"]}, {"logprobs": 2}, {"n": 2}, {"min_tokens": 5}])
        fields |= rng.choice([{}, {}, {"top_p": 0.8}, {"frequency_penalty": 0.5}, {"ignore_eos": True}])
        requests.append(("/v1/completions", fields | {"max_tokens": max(6, fields["max_tokens"])}))
    requests += [
        ("/v1/completions", {"prompt": [prompt(), prompt()], "max_tokens": 8, "temperature": 0}),
        ("/v1/completions", {"prompt": "What is 2 + 3?", "echo": True, "logprobs": 1, "max_tokens": 4}),
        ("/v1/completions", {"prompt": prompt(), "prompt_logprobs": 1, "max_tokens": 5}),
        *(
            ("/v1/completions", {"prompt": prompt(), "structured_outputs": asked, "max_tokens": 12})
            for asked in ({"regex": "[a-f]{3,9}"}, {"choice": ["yes", "no way"]})
        ),
    ]
    chat = [{"role": "user", "content": "Count from 3 to 12."}]
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema: dict[str, Any] = {"type": "object", "properties": {"a": number, "b": number}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    for more in (
        {},
        {"logprobs": True, "top_logprobs": 1},
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    ):
        requests.append(("/v1/chat/completions", {"messages": chat, "max_tokens": 40, **more}))
    return [(path, {"seed": 1, "return_token_ids": True, **fields}) for path, fields in requests]


@cache
def truth(index: int) -> tuple[list[dict[str, Any]], int, int]:
    """Return what a request gets alone, without a server: its choices, and how many tokens they have."""
    path, fields = pool()[index]
    with virtual(Loop(random.Random(0))):
        settings = {"max_model_len": LENGTH, "enable_prefix_caching": False, **ROOMY}
        engine = LLMEngine(EngineConfig(model="demo", **settings))
    tokenizer = demo().tokenizer
    body: Any = (ChatRequest if "chat" in path else CompletionRequest)(**fields)
    params = body.params(demo().default_sampling_params(), None)
    prompts = body.prompts(tokenizer, engine.checker.encode)
    new_parser = None
    if isinstance(body, ChatRequest):
        params, new_parser = body.fit(params, prompts[0]["prompt"], choose_formats(tokenizer, "auto", "auto"))
    choices, num_prompt, num_new = [], 0, 0
    for number, prompt in enumerate(prompts):
        engine.add_request("x", prompt, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        num_prompt += len(outputs[-1].prompt_token_ids)
        for one in outputs[-1].outputs:
            num_new += len(one.token_ids)
            place = number * params.n + one.index
            progress = Progress(place, new_parser and new_parser())
            choices.append(plain(body.choice(progress, one, outputs[-1], TokenNames(tokenizer))))
    engine.close()
    return choices, num_prompt, num_new


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice as JSON, in one form for whole and for streamed answers, without random ids."""
    choice = json.loads(json.dumps(choice))
    message = choice.pop("message", None)
    if message is not None:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        choice |= {"content": message.get("content") or "", "tool_calls": calls}
    return choice


def gathered(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pieces of one streamed choice as one."""
    whole = dict(pieces[0])
    if "delta" in whole:
        del whole["delta"]
        deltas = [piece["delta"] for piece in pieces]
        if not deltas[0].get("role") or any("role" in delta for delta in deltas[1:]):
            raise Broken("the role is not in the first piece alone")
        calls: dict[int, dict[str, str]] = {}
        for call in (call for delta in deltas for call in delta.get("tool_calls") or []):
            parts = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            for name in parts:
                parts[name] += call["function"].get(name) or ""
        whole["content"] = "".join(delta.get("content") or "" for delta in deltas)
        whole["tool_calls"] = [calls[index] for index in sorted(calls)]
    for piece in pieces[1:]:
        for name in ("text", "token_ids"):
            if name in piece:
                whole[name] = whole[name] + piece[name]
        if piece["logprobs"]:
            old = whole["logprobs"] or {}
            whole["logprobs"] = {name: old.get(name, []) + new for name, new in piece["logprobs"].items()}
        if whole["finish_reason"] is not None:
            raise Broken("a piece follows the finish reason")
        whole |= {name: piece[name] for name in ("finish_reason", "stop_reason") if name in piece}
    return whole


# ---- Scripts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """One client's connection: what it sends and how."""

    start: float  # seconds
    asks: tuple[tuple[int, bool], ...]  # (number of the request in the pool, whether as a stream)
    kind: str = "good"  # or one of the misbehaving KINDS
    rate: int = FAST  # bytes read every 0.05 s
    leaves: float | None = None  # seconds after the start
    cuts: int = 0  # into how many parts the request is cut on its way
    pause: float = 0.0  # seconds between the parts
    priority: int = 0


KINDS = "no key", "wrong key", "two keys", "not json", "no model", "too large", "not http", "silent", "stalls"


@dataclass(frozen=True)
class Script:
    """Everything that happens in a run."""

    settings: dict[str, Any] = field(default_factory=lambda: dict(ROOMY))
    visits: tuple[Visit, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()  # (number of the forward pass, where it fails)
    max_waiting: int = 1024
    stop: float | None = None  # when a signal arrives; None: when all clients have gone
    drain: float = 30.0
    chance: int = 0  # seed of the delays


def write(seed: int) -> Script:
    """Return the script of a seed."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    settings: dict[str, Any] = {
        "block_size": size,
        "num_kv_blocks": -(-100 // size) + rng.choice([0, 0, 5, 60]),
        "max_num_seqs": rng.choice([1, 2, 4, 8]),
        "max_num_batched_tokens": rng.choice([8, 9, 16, 64]),
        "long_prefill_token_threshold": rng.choice([0, 0, 3]),
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.5,
        "max_concurrent_requests": rng.choice([2, 2**31 - 1]),
    }
    if rng.random() < 0.25:
        settings |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
        settings["async_scheduling"] = False
    visits = []
    busy = rng.choice([0.05, 0.3, 2.0])
    favourites = [rng.randrange(len(pool())) for _ in range(4)]
    for _ in range(rng.randint(2, 10)):
        asks = [
            (rng.choice([rng.randrange(len(pool())), rng.choice(favourites)]), rng.random() < 0.6)
            for _ in range(rng.choice([1, 1, 1, 2, 3]))
        ]
        misbehaves = rng.random() < 0.2
        when, what = round(rng.expovariate(1 / busy), 4), tuple(asks[:1] if misbehaves else asks)
        kind, rate = rng.choice(KINDS) if misbehaves else "good", rng.choice([FAST, FAST, FAST, 500, 150, 0])
        leaves = rng.choice([None, None, None, round(rng.expovariate(5), 4)])
        cuts, pause = rng.choice([0, 0, 3]), rng.choice([0.0, 0.01, 1.0])
        priority = rng.choice([0, 0, 1, -1]) if settings["scheduling_policy"] == "priority" else 0
        visits.append(Visit(when, what, kind, rate, leaves, cuts, pause, priority))
    failures: list[tuple[int, str]] = []
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 4)):
            first, where = rng.randint(0, 60), rng.choice(["before", "after", "read", "logits"])
            failures += [(first + i, where) for i in range(rng.choice([1, 1, 2]))]
    max_waiting = rng.choice([1024, 1024, 0, 3])
    stop = rng.choice([None, None, None, round(rng.expovariate(2), 4)])
    drain, chance = rng.choice([30.0, 0.05]), rng.randrange(1 << 30)
    return Script(settings, tuple(visits), tuple(sorted(failures)), max_waiting, stop, drain, chance)


# ---- Clients -----------------------------------------------------------------------------------------


def responses(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the responses in what a connection received: status, body, and whether it is complete."""
    file: Any = io.BytesIO(data)
    file.close = int  # the end of a response does not close it
    while b"\r\n\r\n" in data[file.tell() :]:
        found: Any = HTTPResponse(SimpleNamespace(makefile=lambda mode: file))  # type: ignore[arg-type]
        found.begin()
        try:
            yield found.status, found.read(), True
        except IncompleteRead as error:
            yield found.status, error.partial, False
    if file.tell() < len(data):
        yield 0, b"", False


class Client:
    """Plays a visit, and judges the answers at its end."""

    def __init__(self, world: "World", visit: Visit) -> None:
        self.world, self.visit = world, visit
        self.done = world.loop.create_future()
        self.pipe: Any = None
        self.num_sent = 0
        self.late: set[int] = set()  # requests that were begun after the signal to stop

    def begin(self) -> None:
        loop, visit = self.world.loop, self.visit
        if loop.accept is None:
            self.done.set_result(None)
            return
        self.pipe = Pipe(loop, visit.rate)
        self.pipe.on_data = self.look
        if visit.leaves is not None:
            loop.call_later(visit.leaves, self.pipe.lose, ConnectionResetError())
        self.send_next()

    def send_next(self) -> None:
        visit, data = self.visit, self.request(self.num_sent)
        self.late |= {self.num_sent} if self.world.drained else set()
        self.num_sent += 1
        cuts = sorted(self.world.loop.rng.randrange(len(data) + 1) for _ in range(visit.cuts))
        for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True)):
            self.world.loop.call_later(i * (visit.pause + 0.001), self.send_part, data[start:end])

    def send_part(self, data: bytes) -> None:
        if data and not self.pipe.is_lost:
            self.pipe.send(data)

    def request(self, number: int) -> bytes:
        visit = self.visit
        index, streams = visit.asks[number]
        path, fields = pool()[index]
        fields = fields | ({"priority": visit.priority} if visit.priority else {})
        if streams and "prompt_logprobs" not in fields:
            fields = fields | {"stream": True, "stream_options": {"include_usage": True}}
        authorization = f"Authorization: Bearer {KEY}\r\n"
        match visit.kind:
            case "no key" | "wrong key" | "two keys":
                wrong = ["Bearer open", f"bearer {KEY}", f"Bearer {KEY}x", "Bearer é", KEY]
                said = f"Authorization: {self.world.rng.choice(wrong)}\r\n"
                first = "" if visit.kind == "no key" else said
                authorization = first + (authorization if visit.kind == "two keys" else "")
                path, fields = "/v1/completions", {"prompt": [FORBIDDEN], "max_tokens": 3}
            case "no model":
                fields = fields | {"model": "another"}
            case "not http":
                return b"\x16\x03\x01 hello\r\n\r\n"
            case "silent":
                return b"POST /v1/completions HTTP/1.1\r\n"
        body = json.dumps(fields).encode()
        if visit.kind in ("not json", "too large"):
            body = body[:-1] if visit.kind == "not json" else body + b" " * (1 << 16)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        return data[: -len(body) // 2] if visit.kind == "stalls" else data

    def look(self) -> None:
        """Send the next request after a complete answer, and judge all when the visit is over."""
        if self.done.done():
            return
        pipe, found = self.pipe, list(responses(bytes(self.pipe.received)))
        num_complete = sum(is_complete for *_, is_complete in found)
        if pipe.is_lost or num_complete == len(self.visit.asks):
            try:
                self.judge(found)
            except Broken as error:
                self.world.loop.broken = self.world.loop.broken or error
            self.done.set_result(None)
            if not pipe.is_lost:
                self.world.loop.call_soon(pipe.lose, None)
        elif num_complete == self.num_sent and not pipe.is_closed:
            self.send_next()

    def judge(self, found: list[tuple[int, bytes, bool]]) -> None:
        world, visit = self.world, self.visit
        world.hash.update(f"{world.loop.now:.6f} {visit}".encode() + bytes(self.pipe.received))
        must_be = {"no model": 404, "not json": 400, "too large": 413, "not http": 400, "stalls": 408}
        must_be |= dict.fromkeys(("no key", "wrong key", "two keys"), 401)
        stays = visit.leaves is None and visit.rate > 0
        if stays and visit.kind not in ("silent", "good", "stalls") and not world.drained and not found:
            raise Broken(f"a client got no answer: {visit.kind}")
        sends_slowly = visit.cuts > 0 or visit.kind in ("silent", "stalls")
        for number, (status, body, is_complete) in enumerate(found[: len(visit.asks)]):
            index = visit.asks[number][0]
            if number in self.late and status == 200:
                raise Broken("a request was served that was sent after the signal to stop")
            if not is_complete:
                if stays and not world.drained:
                    raise Broken(f"an answer with status {status} was cut off: {body[-200:]!r}")
            elif world.drained and body == b"Internal Server Error":
                if not sends_slowly:  # uvicorn cancels what runs CLOSE_SECONDS after the engine is closed
                    raise Broken("a request did not end with the engine")
            elif visit.kind != "good":
                is_refused = status == 503 and world.is_refusing(visit.kind)
                if status != must_be.get(visit.kind) and not is_refused:
                    raise Broken(f"the status was {status} for a client with {visit.kind}: {body[:200]!r}")
            elif status != 200:
                self.judge_error(index, status, json.loads(body))
            elif body.startswith(b"data: "):
                self.judge_stream(index, body)
            else:
                answer = json.loads(body)
                self.compare(index, [plain(choice) for choice in answer["choices"]], answer["usage"])
        is_slow = visit.rate < FAST  # and the server closes connections that are idle for 5 seconds
        if stays and visit.kind == "good" and not (is_slow or world.drained or len(found) == len(visit.asks)):
            raise Broken(f"a client got {len(found)} of {len(visit.asks)} answers")

    def judge_error(self, index: int, status: int, content: Any) -> None:
        """Check that an error has a cause in the script."""
        message, world = content["error"]["message"], self.world
        failed = "the model could not compute this request"
        if status == 500 and message.startswith(failed) and world.may_fail:
            return
        if status == 503 and world.is_refusing("good"):
            return
        is_large = len(truth(index)[0]) > world.service.max_samples
        if status == 400 and message.startswith("prompt and n must ask for") and is_large:
            return
        raise Broken(f"an error without a cause: {status} {message}")

    def judge_stream(self, index: int, body: bytes) -> None:
        *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
        if last != b"data: [DONE]":
            raise Broken("a stream does not end with [DONE]")
        contents = [json.loads(one.removeprefix(b"data: ")) for one in events]
        if "error" in contents[-1]:
            return self.judge_error(index, 500 if "could not" in str(contents[-1]) else 503, contents[-1])
        pieces: dict[int, list[dict[str, Any]]] = {}
        for choice in (choice for content in contents for choice in content["choices"]):
            pieces.setdefault(choice["index"], []).append(choice)
        self.compare(index, [gathered(pieces[i]) for i in sorted(pieces)], contents[-1]["usage"])

    def compare(self, index: int, choices: list[dict[str, Any]], usage: dict[str, Any]) -> None:
        expected, num_prompt, num_new = truth(index)
        if choices != expected:
            raise Broken(f"request {index} got\n{choices}\nand alone it gets\n{expected}")
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (num_prompt, num_new):
            raise Broken(f"request {index} has {num_prompt} + {num_new} tokens, and its usage says {usage}")


# ---- A run -------------------------------------------------------------------------------------------


@cache
def served() -> tuple[Any, Any]:
    """Return a service without an engine and its app, for all runs: making an app takes longer than a run."""
    service = Service.__new__(Service)
    return service, make_app(service)


class World:
    """A server, its clients, and the laws that are checked while it runs."""

    def __init__(self, script: Script, loop: Loop) -> None:
        self.script, self.loop, self.rng = script, loop, random.Random(script.chance)
        self.hash = hashlib.sha256()
        settings = {"max_model_len": LENGTH, **script.settings}
        self.engine: Any = AsyncLLM("demo", **settings)
        limits = {"max_waiting": script.max_waiting, "max_body_bytes": 1 << 14}
        self.service, app = served()
        self.service.__init__(self.engine, name="demo", api_key=KEY, **limits)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nanoengine.server.lifecycle.make_app", lambda *_: app)
            quick: Any = {"log_config": None, "ws": "none", "timeout_graceful_shutdown": CLOSE_SECONDS}
            self.server = Server(self.service, script.drain, host="x", port=1, **quick)
        self.failures, self.num_forwards, self.num_stuck = dict(script.failures), -1, 0
        self.drained = False  # whether a shutdown may have cut answers off
        self.head: Any = None
        self.seqs: weakref.WeakSet[Any] = weakref.WeakSet()
        wheres = [where for number, where in script.failures]
        self.may_fail = "logits" in wheres or len(wheres) > 1
        self.samples = sum(len(truth(i)[0]) for v in script.visits if v.kind == "good" for i, _ in v.asks)
        self.watch()

    def is_refusing(self, kind: str) -> bool:
        """Whether the server may answer 503: it drains, or has too many samples."""
        is_full = self.samples > self.service.max_samples and kind == "good"
        return self.service.is_draining or is_full

    def watch(self) -> None:
        """Check the laws of a step before each forward pass, and let some passes fail."""
        llm: Any = self.engine.llm_engine
        runner, scheduler, core = llm.runner, llm.scheduler, llm.core
        launch, recover, add = runner.launch, core.recover, scheduler.add
        schedule = scheduler.schedule

        def watched_schedule() -> Any:
            before = {seq: seq.num_preemptions for seq in scheduler.running}
            total, batch = scheduler.num_preemptions, schedule()
            is_new = any(before.get(chunk.seq) != chunk.seq.num_preemptions for chunk in batch.chunks)
            self.law(not is_new or scheduler.num_preemptions == total, "a step preempts and admits")
            return batch

        def watched_launch(batch: Any, before: Any = None) -> Any:
            self.num_forwards += 1
            self.check_step(batch)
            return launch(batch, before)

        def watched_recover() -> None:
            error = sys.exception()
            if not isinstance(error, Injected):
                self.loop.broken = self.loop.broken or Broken(f"a step failed: {error!r}")
            recover()

        def watched_add(seq: Any) -> None:
            self.seqs.add(seq)
            add(seq)
            self.law(FORBIDDEN not in seq.token_ids, "a request without the key reached the engine")
            self.law(self.service.num_samples <= self.service.max_samples, "too many samples wait")

        def fails(stage: str) -> bool:
            if stage == "before":
                self.loop.pass_time(self.rng.choice([0.0, 0.01]))
            asked = self.failures.get(self.num_forwards) == stage
            if asked:
                del self.failures[self.num_forwards]
            if asked and stage == "before":
                raise Injected("the forward pass failed")
            return asked

        runner.launch, core.recover, scheduler.add = watched_launch, watched_recover, watched_add
        scheduler.schedule = watched_schedule
        runner.model.fails = runner.device.fails = fails

    def law(self, holds: bool, what: str) -> None:
        if not holds:
            self.loop.broken = self.loop.broken or Broken(what)
            raise self.loop.broken

    def check_step(self, batch: Any) -> None:
        llm, settings = self.engine.llm_engine, self.script.settings
        scheduler, started = llm.scheduler, llm.started
        try:
            check_laws(scheduler)
        except AssertionError as error:
            self.law(False, f"the scheduler's books are wrong: {error}")
        num_rows, budget = sum(x.end - x.start for x in batch.chunks), started.loaded.max_num_batched_tokens
        self.law(num_rows == batch.num_tokens <= budget, "a step is over its budget")
        num_drafts = settings.get("speculative_config", {}).get("num_speculative_tokens", 0)
        max_rows = settings["max_num_seqs"] * (1 + num_drafts)
        self.law(len(batch.sampled_seqs) <= max_rows, "a step has too many rows")
        head = min(map(BY_ORDER, scheduler.running or scheduler.waiting), default=None)
        is_served = head != self.head or any(chunk.seq.order == head for chunk in batch.chunks)
        self.head, self.num_stuck = head, 0 if is_served else self.num_stuck + 1
        self.law(self.num_stuck < 4, "the first in line waits while others run")
        self.law(self.num_forwards < 5000, "the run does not end")

    async def play(self) -> None:
        """Serve all visits, then stop the server."""
        loop, script = self.loop, self.script
        serving = loop.create_task(self.server._serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        clients = [Client(self, visit) for visit in script.visits]
        start = loop.time()
        for client in clients:
            loop.call_at(start + client.visit.start, client.begin)
        if script.stop is not None:
            loop.call_at(start + script.stop, self.stop)
        for client in clients:
            await client.done
        if script.stop is None:
            await asyncio.sleep(0.5)  # for what clients that left still had to be told
            self.check_empty()
            self.stop()
        await serving

    def stop(self) -> None:
        self.drained = True
        self.server.handle_exit(signal.SIGTERM, None)

    def check_empty(self) -> None:
        llm, service = self.engine.llm_engine, self.service
        scheduler, blocks = llm.scheduler, llm.scheduler.block_manager
        self.law(not (scheduler.running or scheduler.waiting), "a sequence is left in a queue")
        self.law(blocks.num_free_blocks == blocks.num_blocks, "blocks are left")
        self.law(not (llm.requests or llm._request_of or llm._outputs), "a request is left")
        is_left = self.engine.is_running and (self.engine._waiting or self.engine._commands)
        self.law(not is_left, "a command is left")
        self.law(service.num_samples == 0, f"{service.num_samples} places are left")
        known = set(llm.runner.sampling_rows._seqs)  # a cache of the last step's
        # A step that was in flight when the last request finished stays there until the next one.
        known |= {chunk.seq for launch in llm.core.in_flight for chunk in launch.batch.chunks}
        if set(self.seqs) - known:
            gc.collect()  # an exception of a callback refers to the frames below it, the engine's
        self.law(not set(self.seqs) - known, "a finished sequence is still referred to")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Write no logs: failures are part of the script."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


def run(script: Script) -> str:
    """Play a script. Returns a digest of all that the clients saw and when, or raises Broken."""
    with quiet():
        for index in {index for visit in script.visits for index, _ in visit.asks}:
            truth(index)
    loop, before = Loop(random.Random(script.chance)), {*threading.enumerate()}
    with quiet(), virtual(loop):
        world = World(script, loop)
        playing = loop.create_task(world.play())
        try:
            world.engine._thread.run()  # until the server closes the engine
            loop.pump(playing.done)
            playing.result()
            world.check_empty()
            loop.pass_time(2.0)
            world.law(not world.server.server_state.tasks, "the server's task of a request is left")
            world.law(not asyncio.all_tasks(loop), f"tasks are left: {asyncio.all_tasks(loop)}")
            timers = [timer for timer in loop._scheduled if not timer.cancelled()]
            late = [timer for timer in timers if timer.when() < loop.now + 10 * CLIENT_SECONDS]
            world.law(not late or world.drained, f"timers are left: {late}")
        except Exception as error:
            raise (loop.broken or error) from None
        finally:
            world.engine._thread.is_over = True
            world.engine.close()
            loop.end()
    left = {*threading.enumerate()} - before
    for thread in left:
        thread.join(5.0)  # it was told to end, and ends when a core is free
    if alive := [thread.name for thread in left if thread.is_alive()]:
        raise Broken(f"threads are left: {alive}")
    return world.hash.hexdigest()


def breaks(script: Script) -> str | None:
    """Return which law a script breaks, or what failed; None: nothing did."""
    try:
        run(script)
    except Exception as error:
        return str(error) if isinstance(error, Broken) else repr(error)
    return None
