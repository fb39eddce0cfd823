"""The server's endpoints over `AsyncLLM`, as an ASGI app."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from nanoengine import __version__
from nanoengine.async_llm import AsyncLLM
from nanoengine.chat.answer_parser import choose_formats
from nanoengine.metrics import Counter, Gauge, Histogram, Metric, Vector
from nanoengine.outputs import RequestOutput
from nanoengine.requests import CheckedRequest, PromptTooLongError, check_unicode
from nanoengine.sampling_params import SamplingParams, check_integer
from nanoengine.server.keys_and_limits import Ticket
from nanoengine.server.openai_api import (
    JSON,
    APIError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Progress,
    StreamOptions,
    TokenizeRequest,
    pieces_of,
    refusing,
    to_json,
    unavailable,
)
from nanoengine.server.token_logprobs import TokenNames

LONG_BODY_BYTES = 2**16  # checking and tokenizing a longer body takes more than a few milliseconds
T = TypeVar("T")
Body = CompletionRequest | ChatRequest
Choices = AsyncGenerator[dict[str, Any]]
PAGE = Path(__file__).with_name("chat.html")
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

# Characters that end a line for clients such as httpx's iter_lines, but not in server-sent events
LINE_ENDS = {one.encode(): b"\\u%04x" % ord(one) for one in "\x85\u2028\u2029"}
KEEP_ALIVE_SECONDS = 10.0  # proxies and clients give up on a connection that is silent for longer


class EventStream(StreamingResponse):
    """Sends server-sent events, and `waiting` after a silence. Closes their generator however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], waiting: bytes = b": waiting\n\n") -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.events, self.waiting, self.last_sent = events, waiting, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. `Gate` cancels this call when the client disconnects."""

        async def send_body(content: bytes) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": True})

        has_chunks = scope.get("http_version") == "1.1"
        send_chunk = scope.get("state", {}).get("send_chunk", send_body) if has_chunks else send_body

        async def send_part(content: bytes) -> None:
            self.last_sent = time.monotonic()
            if not content.isascii():
                for raw, escaped in LINE_ENDS.items():
                    content = content.replace(raw, escaped)
            await send_chunk(content)

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(self.last_sent + KEEP_ALIVE_SECONDS - time.monotonic())
                if time.monotonic() >= self.last_sent + KEEP_ALIVE_SECONDS:
                    await send_part(self.waiting)

        async with aclosing(self.events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            waiting = asyncio.ensure_future(keep_alive())
            try:
                async for content in self.events:
                    await send_part(content)
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await send({"type": "http.response.body", "body": b""})


def last_error(error: Exception, ticket: Ticket) -> APIError:
    """Return the error that ends a stream, also if it is a bug: its reason is in the server's log only."""
    if not isinstance(error, APIError):
        logging.getLogger("uvicorn.error").error("a stream failed", exc_info=error)
        error = APIError(500, "the server failed")
    ticket.error = error.code
    return error


def event(content: Any) -> bytes:
    """Return one server-sent event with JSON content."""
    return b"data: " + to_json(content) + b"\n\n"


async def merged(streams: list[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yield outputs of several requests, with the requests' indices. Closing the generator aborts them."""
    if len(streams) == 1:  # needs no task per output
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                output, index = task.result(), waiting.pop(task)
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


class Service:
    """Serves the endpoints with one engine, which the caller closes."""

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        name: str | None = None,  # the model name that clients use; None: the names that `names_of` returns
        api_key: str | None = None,  # None: no key is needed
        max_waiting: int = 1024,  # samples that may wait in addition to the `max_num_seqs` that run
        max_body_bytes: int = 4 * 2**20,
        tool_call_parser: str = "auto",  # a name from `TOOL_FORMATS`, "none", or "auto"
        reasoning_parser: str = "auto",  # a name from `REASONING_FORMATS`, "none", or "auto"
        chat_template: str | None = None,  # a file, or the template itself, that replaces the tokenizer's
    ) -> None:
        if api_key == "":
            raise ValueError("api_key must not be empty")  # an unset variable must not open the server
        self.engine, self.api_key, self.max_body_bytes = engine, api_key, max_body_bytes
        self.checkpoint, config = engine.llm_engine.checkpoint, engine.llm_engine.config
        self.names = names_of(str(config.model)) if name is None else [name]
        self.name = self.names[0]
        self.tokens = TokenNames(self.checkpoint.tokenizer)
        self.defaults = self.checkpoint.default_sampling_params()
        if chat_template is not None:
            path = Path(chat_template)
            if "{" not in chat_template and not path.is_file():
                raise ValueError(f"chat_template must be a file or a template, got {chat_template!r}")
            self.need_tokenizer().chat_template = chat_template if "{" in chat_template else path.read_text()
        self.formats = choose_formats(self.checkpoint.tokenizer, tool_call_parser, reasoning_parser)
        check_integer("max_body_bytes", max_body_bytes, 1)
        self.max_samples = config.max_num_seqs + check_integer("max_waiting", max_waiting, 0)
        self.num_samples = 0  # running or waiting, over all requests
        self.created = int(time.time())
        self.is_draining = False
        # Short requests do not wait for long ones, and requests without structured outputs do not wait for
        # grammars to compile.
        self.checks, self.long_checks, self.grammar_checks = map(ThreadPoolExecutor, (4, 1, 2))

    # -- generation

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        return await self.answer(body, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self.answer(body, request)

    async def answer(self, body: Body, request: Request) -> Response:
        """Answer a request of either API, whole or as a stream."""
        ticket = request.state.ticket
        choices = await self.start(body, request)
        head: dict[str, Any] = {
            "id": f"{body.prefix}-{body.request_id or ticket.id}",
            "object": body.kinds[bool(body.stream)],
            "created": int(time.time()),
            "model": self.name,
        }
        if body.stream:
            return EventStream(self.events(body, head, choices, ticket))
        async with aclosing(choices):
            answer = [choice async for choice in choices]
        answer.sort(key=lambda choice: int(choice["index"]))
        if body.is_chat and body.return_token_ids:  # vLLM puts the prompt's ids here too
            head["prompt_token_ids"] = answer[0]["prompt_token_ids"]
        return JSON({**head, "choices": answer, "usage": ticket.usage()})

    async def start(self, body: Body, request: Request) -> Choices:
        """Check the whole request, before an answer has a status, and return the generator of its choices."""
        ticket = request.state.ticket
        self.check_model(body.model)
        params = body.params(self.defaults, self.checkpoint.generation_config.get("max_new_tokens"))
        self.take_places(body, params.n, ticket)
        needs_grammar = params.structured_outputs is not None or bool(getattr(body, "tools", None))
        pool = self.grammar_checks if needs_grammar else self.checks
        checked = await self.in_thread(request, partial(self.check, body, params), pool)
        ticket.prompt_tokens = sum(len(one.token_ids) for one in checked)
        return self.choices(body, checked, ticket)

    async def in_thread(
        self, request: Request, call: Callable[[], T], pool: ThreadPoolExecutor | None = None
    ) -> T:
        """Run a call in a thread, long requests one at a time. It is cancelled if the client leaves."""
        is_long = len(await request.body()) > LONG_BODY_BYTES
        pool = self.long_checks if is_long else pool or self.checks
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    def check_model(self, name: str | None) -> None:
        """Raise APIError if a request names a model that is not served."""
        if name not in (None, *self.names):
            message = f"the model {name!r} does not exist; this server has {self.name!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    def take_places(self, body: Body, n: int, ticket: Ticket) -> None:
        """Count the request's samples as running or waiting. `Gate` subtracts them when the request ends."""
        limit = self.max_samples
        with refusing(body):
            num_samples = body.num_prompts * n
            if not 0 < num_samples <= limit:
                raise ValueError(f"prompt and n must ask for 1 to {limit} samples, got {num_samples}")
        if self.num_samples + num_samples > limit:
            raise unavailable(f"{self.num_samples} samples are running or waiting; at most {limit} may")
        self.num_samples += num_samples
        ticket.samples = num_samples

    def check(self, body: Body, params: SamplingParams) -> list[CheckedRequest]:
        """Return the prompts as checked requests. Thread-safe: `LLMEngine.check` reads immutable state."""
        engine = self.engine.llm_engine
        with refusing(body, body.source):
            try:
                prompts = body.prompts(self.checkpoint.tokenizer, engine.checker.encoder_for(params))
                new_parser = None
                if isinstance(body, ChatRequest):
                    params, new_parser = body.fit(params, prompts[0]["prompt"], self.formats)
                checked = [engine.check(one, params, body.priority or 0) for one in prompts]
                return [one._replace(new_parser=new_parser) for one in checked]
            except RuntimeError as error:  # the engine is closed
                raise unavailable(str(error)) from None
            except PromptTooLongError as error:
                raise body.too_long(error, engine.max_model_len) from None

    async def choices(self, body: Body, checked: list[CheckedRequest], ticket: Ticket) -> Choices:
        """Yield the outputs as choices, and count their tokens. Closing the generator aborts the requests."""
        generate, prompts, n = self.engine.generate, enumerate(checked), checked[0].params.n
        streams = [generate(one, one.params, f"{ticket.id}-{index}") for index, one in prompts]
        num_cached = [0] * len(checked)
        new_parser = checked[0].new_parser
        samples = [Progress(i, new_parser and new_parser()) for i in range(len(checked) * n)]
        try:
            async with aclosing(merged(streams)) as outputs:
                async for number, output in outputs:
                    if ticket.first_output_seconds is None:
                        ticket.first_output_seconds = time.monotonic() - ticket.started
                    num_cached[number] = output.num_cached_tokens
                    ticket.cached_tokens = sum(num_cached)
                    for completion in output.outputs:
                        if completion.finish_reason == "abort":
                            raise unavailable("the server is shutting down")
                        if completion.finish_reason == "error":
                            raise body.failure(completion.stop_reason)
                        if body.is_echo_alone:
                            completion = replace(completion, text="", token_ids=[], finish_reason="length")
                        ticket.completion_tokens += len(completion.token_ids)
                        sample = samples[number * n + completion.index]
                        choice = body.choice(sample, completion, output, self.tokens)
                        if completion.finish_reason is not None:
                            ticket.reasoning_tokens += sample.num_reasoning_tokens(self.tokens)
                        yield choice
        except RuntimeError as error:
            if self.engine.is_running:
                raise
            raise unavailable(str(error)) from None  # closed after the request's check

    async def events(
        self, body: Body, head: dict[str, Any], choices: Choices, ticket: Ticket
    ) -> AsyncGenerator[bytes]:
        """Yield the answer as server-sent events."""
        opening = b"data: " + to_json(head)[:-1] + b',"choices":['  # encoded once per stream
        options = body.stream_options or StreamOptions()
        with_usage, is_continuous = options.include_usage, options.continuous_usage_stats
        try:
            async with aclosing(choices):
                async for choice in choices:
                    end = b"]}\n\n"
                    if with_usage:
                        end = b'],"usage":' + to_json(ticket.usage() if is_continuous else None) + b"}\n\n"
                    for piece in pieces_of(choice):
                        yield opening + to_json(piece) + end
            if with_usage:
                yield event({**head, "choices": [], "usage": ticket.usage()})
        except Exception as error:
            yield event(last_error(error, ticket).content)
        yield b"data: [DONE]\n\n"

    # -- other endpoints

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSON({"object": "list", "data": [self.card()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        self.check_model(name)
        return JSON(self.card())

    def card(self) -> dict[str, Any]:
        """Describe the model in OpenAI's shape, plus vLLM's max_model_len."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "nanoengine",
            "max_model_len": self.engine.llm_engine.max_model_len,
        }

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """POST /tokenize."""
        self.check_model(body.model)
        tokenizer = self.need_tokenizer()
        read_any = partial(self.engine.llm_engine.checker.encode, is_cut=True)

        def encode() -> list[int]:
            with refusing(body):
                if (body.prompt is None) == (body.messages is None):
                    raise ValueError("prompt or messages must be given, and not both")
                if body.messages is not None:
                    return list(body.render(tokenizer)["prompt_token_ids"])
                return list(read_any(check_unicode("prompt", body.prompt or ""), body.add_special_tokens))

        tokens = await self.in_thread(request, encode)
        max_model_len = self.engine.llm_engine.max_model_len
        answer = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = tokenizer.convert_ids_to_tokens(tokens)
        return JSON(answer)

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """POST /detokenize."""
        self.check_model(body.model)
        tokenizer = self.need_tokenizer()
        with refusing(body):
            for token_id in body.tokens:
                if not 0 <= token_id < len(tokenizer):
                    raise ValueError(f"tokens must be ids in [0, {len(tokenizer)}), got {token_id}")
        return JSON({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    def need_tokenizer(self) -> Any:
        """Return the tokenizer. Raises APIError if the checkpoint has none."""
        if self.checkpoint.tokenizer is None:
            raise APIError(400, "the checkpoint has no tokenizer")
        return self.checkpoint.tokenizer

    async def health(self) -> Response:
        """GET /health: 200, or 503 once the server accepts no more requests."""
        return Response(status_code=200 if self.is_serving else 503)

    @property
    def is_serving(self) -> bool:
        """Whether new requests are accepted."""
        return self.engine.is_running and not self.is_draining

    async def version(self) -> Response:
        """GET /version."""
        return JSON({"version": __version__})

    async def server_info(self) -> Response:
        """GET /server_info: the engine's description of itself, which it also logs at startup."""
        engine = self.engine.llm_engine.describe()
        return JSON({"version": __version__, "model": self.name, "engine": engine})

    async def metrics(self) -> Response:
        """GET /metrics, for Prometheus: `LLMEngine.get_metrics`."""
        try:
            found = await self.engine.get_metrics()
        except RuntimeError as error:  # the engine is closed
            raise unavailable(str(error)) from None
        registry: Any = SimpleNamespace(collect=partial(families, found, self.name))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> Response:
        """GET /: a page to chat with the model, in one file that loads nothing from elsewhere."""
        text = PAGE.read_text()
        if self.checkpoint.generation_config.get("temperature") is not None:  # else the page's own default
            text = text.replace('placeholder="0.7"', f'placeholder="{self.defaults.temperature}"')
        return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY})


def names_of(model: str) -> list[str]:
    """Return the names under which clients find a model. The server reports the first one.

    That is the name of the file or directory, so that no client gets a path. Of a hub id it is the whole id,
    because clients look for the tokenizer under it.
    """
    path = Path(model)
    if path.exists():
        return [path.stem if path.is_file() else path.absolute().name, model]
    return [model, path.name]


FAMILIES: dict[type[Metric], Any] = {Counter: CounterMetricFamily, Vector: CounterMetricFamily}
FAMILIES |= {Gauge: GaugeMetricFamily, Histogram: HistogramMetricFamily}


def families(metrics: list[Metric], model_name: str) -> Iterator[Any]:
    """Yield one of prometheus_client's families per name, labelled with the served model name."""
    for (name, kind, *labels), group in groupby(metrics, lambda one: (one.name, type(one), *one.labels)):
        family = FAMILIES[kind](name, name, labels=[*labels, "position"] if kind is Vector else labels)
        for metric in group:
            values = [*{**metric.labels, "model_name": model_name}.values()]
            if isinstance(metric, Histogram):
                family.add_metric(values, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, Vector):
                for position, value in enumerate(metric.values):
                    family.add_metric([*values, str(position)], value)
            elif isinstance(metric, Counter | Gauge):
                family.add_metric(values, metric.value)
        yield family
