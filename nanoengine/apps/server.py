"""An OpenAI-compatible server over `AsyncLLM`: `nanoengine serve MODEL`, with the extra `serve`.

What a request passes, on its way in and back:

    Gate                        its key and size; a log line; cancels what is done for a client that went away
    CompletionRequest           what was asked for, in the engine's terms (for a chat: ChatRequest)
    Service.answer              checks all of it, takes places in the queue, asks `AsyncLLM`
    CompletionRequest.choice    what the engine made of it, in the API's own shape: whole, or piece by piece

The second and the last are in `openai_api.py`.
"""

import asyncio
import gc
import hmac
import logging
import os
import sys
import time
import uuid
from argparse import ArgumentTypeError
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoengine import __version__
from nanoengine.apps.openai_api import (
    JSON,
    APIError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    pieces_of,
    refusing,
    to_json,
    token_ids_of,
    unavailable,
)
from nanoengine.apps.pooling_api import PoolingAPI
from nanoengine.apps.tools import REASONING_FORMATS, TOOL_FORMATS, choose_formats
from nanoengine.async_llm import AsyncLLM
from nanoengine.compat import EVERY, SERVER, without_unserved
from nanoengine.config import EngineConfig
from nanoengine.flags import FlexibleArgumentParser, add_flags, value_of
from nanoengine.metrics import Counter, Gauge, Histogram, Metric
from nanoengine.optional import MissingFileError, load
from nanoengine.outputs import RequestOutput
from nanoengine.requests import CheckedRequest
from nanoengine.sampling_params import SamplingParams, check_integer, check_strings

CLIENT_SECONDS = 60  # for a client to send its request, and to read on where it has stopped reading
LONG_BODY_BYTES = 2**16  # of a request, beyond which reading its text takes more than some milliseconds
CLOSE_SECONDS = 5  # for clients to read their last answer when the server ends
T = TypeVar("T")
PAGE = Path(__file__).with_name("chat.html")
UNSERVED_FLAGS = {**EVERY, **SERVER}
UNSERVED = "unserved "  # what goes before their names where flags are read

# ---- The service ---------------------------------------------------------------------------------


@dataclass
class Ticket:
    """What is known of one HTTP request: the fields of its log line, and how far it got."""

    id: str
    method: str
    path: str
    status: int | None = None  # None: the client went away before there was one
    error: str | None = None  # the code of the error it was answered with
    disconnected: bool = False  # the client went away before the end
    samples: int = 0  # places taken in the queue
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_output_seconds: float | None = None
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)
    is_complete: bool = False  # all of the answer is sent

    def line(self) -> dict[str, Any]:
        """For the log."""
        known = asdict(self)
        known["seconds"] = time.monotonic() - known.pop("started")
        del known["is_complete"]
        numbers = {name: round(value, 6) for name, value in known.items() if isinstance(value, float)}
        return {"time": round(time.time(), 3), **known, **numbers}

    def usage(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class EventStream(StreamingResponse):
    """Server-sent events; the generator that makes them is closed however this ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them; `Gate` cancels this when the client goes away."""
        async with aclosing(self.events):
            await self.stream_response(send)


def event(content: Any) -> bytes:
    """One of them."""
    return b"data: " + to_json(content) + b"\n\n"


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Outputs of several requests as they come, with the request's number; closing it aborts the requests."""
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
    """The endpoints, over an engine.

    Args:
        engine: what answers; closed by whoever made it.
        name: the model's, as clients are to call it; None: the engine's own.
        api_key: what clients must send; None: nothing.
        max_waiting: samples that may wait beyond the `max_num_seqs` that run.
        max_body_bytes: of a request.
        tool_call_parser, reasoning_parser: how the model writes calls of tools and its thoughts: names of
            `tools.TOOL_FORMATS` and `REASONING_FORMATS`, "none", or "auto", by the chat template.
        chat_template: a file, or the template itself, in place of the tokenizer's.
        dev_mode: serve the routes of contrib/learner.py too.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        name: str | None = None,
        api_key: str | None = None,
        max_waiting: int = 1024,
        max_body_bytes: int = 4 * 2**20,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        chat_template: str | None = None,
        dev_mode: bool = False,
    ) -> None:
        if api_key == "":
            raise ValueError("api_key must not be empty")  # an unset variable must not open the server
        self.engine, self.api_key, self.max_body_bytes = engine, api_key, max_body_bytes
        self.learner = load("contrib.learner", "--dev-mode").Learner(engine) if dev_mode else None
        self.checkpoint, config = engine.llm_engine.checkpoint, engine.llm_engine.config
        self.name = str(config.model) if name is None else name
        self.defaults = self.checkpoint.default_sampling_params()
        if chat_template is not None:
            path = Path(chat_template)
            if "{" not in chat_template and not path.is_file():
                raise ValueError(f"chat_template must be a file or a template, got {chat_template!r}")
            self.need_tokenizer().chat_template = chat_template if "{" in chat_template else path.read_text()
        self.formats = choose_formats(self.checkpoint.tokenizer, tool_call_parser, reasoning_parser)
        check_integer("max_body_bytes", max_body_bytes, 1)
        self.max_samples = config.max_num_seqs + check_integer("max_waiting", max_waiting, 0)
        self.num_samples = 0  # of requests that are being served
        self.created = int(time.time())
        self.is_draining = False
        # A short request never waits for long ones, nor a plain one for forms that take long to compile.
        self.checks, self.long_checks, self.form_checks = map(ThreadPoolExecutor, (4, 1, 2))

    # -- answers of the model

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        return await self.answer(body, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self.answer(body, request)

    async def answer(self, body: CompletionRequest | ChatRequest, request: Request) -> Response:
        """Of either API, as the engine makes it."""
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
        if body.is_chat and body.return_token_ids:  # vLLM has it here, too
            head["prompt_token_ids"] = answer[0]["prompt_token_ids"]
        return JSON({**head, "choices": answer, "usage": ticket.usage()})

    async def start(
        self, body: CompletionRequest | ChatRequest, request: Request
    ) -> AsyncGenerator[dict[str, Any]]:
        """Check everything before the answer begins, so that a refusal has its status; gives the choices."""
        ticket = request.state.ticket
        self.check_model(body.model)
        params = body.params(self.defaults, self.checkpoint.generation_config.get("max_new_tokens"))
        self.take_places(body, params.n, ticket)
        has_form = params.structured_outputs is not None or (body.is_chat and bool(body.tools))
        pool = self.form_checks if has_form else self.checks
        checked = await self.in_thread(request, self.check, body, params, pool=pool)
        ticket.prompt_tokens = sum(len(one.token_ids) for one in checked)
        return self.choices(body, checked, ticket)

    async def in_thread(
        self,
        request: Request,
        function: Callable[..., T],
        *arguments: Any,
        pool: ThreadPoolExecutor | None = None,
    ) -> T:
        """The function's result, where the text of a request may take it seconds; long ones one at a time.

        What waits for its turn leaves with its client.
        """
        is_long = len(await request.body()) > LONG_BODY_BYTES
        pool = self.long_checks if is_long else pool or self.checks
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    def check_model(self, name: str | None) -> None:
        """Raise APIError where a request is for another model."""
        if name not in (None, self.name):
            message = f"the model {name!r} does not exist; this server has {self.name!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    def take_places(self, body: CompletionRequest | ChatRequest, n: int, ticket: Ticket) -> None:
        """Count the request's samples, until `Gate` has seen its end; APIError where they are too many."""
        with refusing(body):
            num_samples = body.num_prompts * n
            if not 0 < num_samples <= self.max_samples:
                raise ValueError(
                    f"prompt and n must ask for 1 to {self.max_samples} samples, got {num_samples}"
                )
        if self.num_samples + num_samples > self.max_samples:
            raise unavailable(f"{self.num_samples} samples run or wait, and at most {self.max_samples} may")
        self.num_samples += num_samples
        ticket.samples = num_samples

    def check(self, body: CompletionRequest | ChatRequest, params: SamplingParams) -> list[CheckedRequest]:
        """The prompts as the engine takes them; in a thread, since a long text takes its time.

        `LLMEngine.check` only reads what never changes, so the engine's thread need not be asked.
        """
        engine = self.engine.llm_engine
        with refusing(body, body.source):
            encode = partial(engine.checker.encode, is_cut=params.truncate_prompt_tokens is not None)
            prompts = body.prompts(self.checkpoint.tokenizer, encode)
            params = body.fit(params, prompts, self.formats)
            try:
                return [engine.check(one, params, body.priority or 0) for one in prompts]
            except RuntimeError as error:  # it sleeps, or is closed
                raise unavailable(str(error)) from None

    async def choices(
        self, body: CompletionRequest | ChatRequest, checked: list[CheckedRequest], ticket: Ticket
    ) -> AsyncGenerator[dict[str, Any]]:
        """What comes of the prompts, counted, as choices of the API; closing it aborts what runs.

        Raises:
            APIError: the engine failed or is closed.
        """
        sent: dict[int, int] = {}
        streams = [
            self.engine.generate(one, one.params, f"{ticket.id}-{index}") for index, one in enumerate(checked)
        ]
        num_cached = [0] * len(checked)
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
                        raise body.failure(checked[number].params, completion.stop_reason)
                    if body.is_echo_alone:
                        completion = replace(completion, text="", token_ids=[], finish_reason="length")
                    ticket.completion_tokens += len(completion.token_ids)
                    index = number * checked[0].params.n + completion.index
                    yield body.choice(index, completion, output, sent, self.checkpoint.tokenizer)

    async def events(
        self,
        body: CompletionRequest | ChatRequest,
        head: dict[str, Any],
        choices: AsyncGenerator[dict[str, Any]],
        ticket: Ticket,
    ) -> AsyncGenerator[bytes]:
        """The answer as a stream."""
        options = body.stream_options
        with_usage = options is not None and options.include_usage
        is_continuous = with_usage and options is not None and options.continuous_usage_stats
        try:
            async with aclosing(choices):
                async for choice in choices:
                    so_far = {"usage": ticket.usage() if is_continuous else None} if with_usage else {}
                    for piece in pieces_of(choice):
                        yield event({**head, "choices": [piece], **so_far})
            if with_usage:
                yield event({**head, "choices": [], "usage": ticket.usage()})
        except APIError as error:
            ticket.error = error.code
            yield event(error.content)
        yield b"data: [DONE]\n\n"

    # -- the rest

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSON({"object": "list", "data": [self.card()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        self.check_model(name)
        return JSON(self.card())

    def card(self) -> dict[str, Any]:
        """The model, in OpenAI's shape, with vLLM's max_model_len."""
        whose = {"id": self.name, "object": "model", "created": self.created, "owned_by": "nanoengine"}
        return {**whose, "max_model_len": self.engine.llm_engine.max_model_len}

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
                return token_ids_of(read_any, "prompt", body.prompt or "", body.add_special_tokens)

        tokens = await self.in_thread(request, encode)
        answer = {
            "count": len(tokens),
            "max_model_len": self.engine.llm_engine.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = tokenizer.convert_ids_to_tokens(tokens)
        return JSON(answer)

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """POST /detokenize."""
        self.check_model(body.model)
        tokenizer = self.need_tokenizer()
        with refusing(body):
            if not isinstance(body.tokens, list):
                raise ValueError("tokens must be a list of token ids")
            for token_id in body.tokens:
                if type(token_id) is not int or not 0 <= token_id < len(tokenizer):
                    raise ValueError(f"tokens must be ids in [0, {len(tokenizer)}), got {token_id!r}")
        return JSON({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    def need_tokenizer(self) -> Any:
        """The tokenizer, or APIError where there is none."""
        if self.checkpoint.tokenizer is None:
            raise APIError(400, "the checkpoint has no tokenizer")
        return self.checkpoint.tokenizer

    async def health(self) -> Response:
        """GET /health: 200, or 503 where no request is served any more."""
        return Response(status_code=200 if self.is_serving else 503)

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return self.engine.is_running and not self.is_draining

    async def version(self) -> Response:
        """GET /version."""
        return JSON({"version": __version__})

    async def server_info(self) -> Response:
        """GET /server_info: what the engine said of itself when it started."""
        info: dict[str, Any] = {
            "version": __version__,
            "model": self.name,
            "engine": self.engine.llm_engine.describe(),
        }
        if self.learner is not None:  # trl looks for it
            info["vllm_config"] = {"weight_transfer_config": {"backend": "gloo"}}
        return JSON(info)

    async def metrics(self) -> Response:
        """GET /metrics, for Prometheus: `LLMEngine.get_metrics`."""
        try:
            found = await self.engine.get_metrics()
        except RuntimeError as error:  # closed
            raise unavailable(str(error)) from None
        registry = CollectorRegistry()
        registry.register(Snapshot(found, self.name))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> Response:
        """GET /: a page to chat with the model, in one file that asks for nothing elsewhere."""
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        policy += (
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": policy})


class Snapshot(Collector):
    """The engine's metrics, as prometheus_client takes them, of the model under the name it is served by."""

    def __init__(self, metrics: list[Metric], name: str) -> None:
        self.metrics = [replace(one, labels={**one.labels, "model_name": name}) for one in metrics]

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """One family per name."""
        families: dict[str, Any] = {}
        kinds = {Counter: CounterMetricFamily, Gauge: GaugeMetricFamily, Histogram: HistogramMetricFamily}
        for metric in self.metrics:
            family = families.get(metric.name)
            if family is None:
                family = kinds[type(metric)](metric.name, metric.name, labels=list(metric.labels))
                families[metric.name] = family
            labels = list(metric.labels.values())
            if isinstance(metric, Histogram):
                family.add_metric(labels, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, Counter | Gauge):
                family.add_metric(labels, metric.value)
        yield from families.values()


# ---- The gate: what holds for every request ------------------------------------------------------


class Gate:
    """ASGI middleware: key, size, draining, a log line, and the end of work for a client that is gone."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.log = logging.getLogger("nanoengine.requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        ticket = Ticket(uuid.uuid4().hex, scope["method"], scope["path"][:200])
        scope.setdefault("state", {})["ticket"] = ticket

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                ticket.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", ticket.id.encode())]
            elif not message.get("more_body", False):
                ticket.is_complete = True
            async with asyncio.timeout(CLIENT_SECONDS):
                await send(message)

        try:
            refusal = self.refusal(scope)
            try:
                body = await self.read(receive, 0 if refusal else self.service.max_body_bytes)
                if refusal is not None:
                    raise refusal
            except APIError as error:
                ticket.error = error.code
                await error.response()(scope, receive, noting)
            else:
                await self.run(scope, body, receive, noting, ticket)
        except (ConnectionError, TimeoutError):  # it went away while it sent its request, or does not read
            ticket.disconnected = True
        except Exception:
            ticket.status = 500
            raise
        finally:
            self.service.num_samples -= ticket.samples
            self.log.info(to_json(ticket.line()).decode())

    def refusal(self, scope: Scope) -> APIError | None:
        """Why a request is not even read."""
        if scope["path"] in ("/", "/health", "/ping"):
            return None
        key = self.service.api_key
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # Of two, a proxy before us may have read the other one.
        if key is not None and not (
            len(given) == 1 and hmac.compare_digest(given[0], b"Bearer " + key.encode())
        ):
            message = "the API key is missing or wrong; send it as Authorization: Bearer ..."
            return APIError(401, message, code="invalid_api_key", www_authenticate="Bearer")
        if scope["method"] == "POST" and not self.service.is_serving:
            return unavailable("the server is shutting down")
        return None

    async def read(self, receive: Receive, limit: int) -> bytes:
        """The body.

        Raises:
            APIError: it has more bytes, or takes too long.
            ConnectionError: the client went away.
        """
        body, num_bytes = bytearray(), 0
        try:
            async with asyncio.timeout(CLIENT_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    # What is too much is read and dropped: who still writes does not read the answer.
                    num_bytes += len(message.get("body", b""))
                    if num_bytes <= limit:
                        body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            raise APIError(408, f"the request was not complete after {CLIENT_SECONDS} seconds") from None
        if num_bytes > limit > 0:
            raise APIError(413, f"the request has {num_bytes} bytes, and at most {limit} are taken")
        return bytes(body)

    async def run(self, scope: Scope, body: bytes, receive: Receive, send: Send, ticket: Ticket) -> None:
        """Let the app answer, until it has or the client is gone."""

        async def disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.ensure_future(disconnect())
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if messages:
                return messages.pop()
            await asyncio.wait([gone])
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self.app(scope, replay, send))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done() or ticket.is_complete:
                await work
            else:
                ticket.disconnected = True
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


# ---- The app, and the command --------------------------------------------------------------------


def make_app(service: Service, allowed_origins: Sequence[str] = ()) -> FastAPI:
    """The service as an ASGI app; pages of `allowed_origins` may call it from a browser, "*" is any."""
    app = FastAPI(title="nanoengine", openapi_url=None)  # its pages of documentation load from elsewhere
    app.state.service = service
    app.add_middleware(Gate, service=service)
    if allowed_origins:  # around the gate: a browser's preflight has no key
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    routes: list[tuple[str, str, Callable[..., Any]]] = []
    missing: dict[str, str] = {}  # paths of contrib/ whose file is not installed -> what to say
    if service.learner is not None:
        routes += service.learner.routes()
    try:
        routes += load("contrib.responses", "/v1/responses").ResponsesAPI(service).routes()
    except MissingFileError as error:
        missing["/v1/responses"] = str(error)
    for method, path, endpoint in (
        *routes,
        ("POST", "/v1/completions", service.completions),
        ("POST", "/v1/chat/completions", service.chat),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{name:path}", service.model),
        ("POST", "/tokenize", service.tokenize),
        ("POST", "/detokenize", service.detokenize),
        ("GET", "/health", service.health),
        ("GET", "/ping", service.health),
        ("POST", "/ping", service.health),
        ("GET", "/version", service.version),
        ("GET", "/server_info", service.server_info),
        ("GET", "/metrics", service.metrics),
        *PoolingAPI(service).routes(),
        ("GET", "/", service.page),
    ):
        app.add_api_route(path, endpoint, methods=[method])
    paths = sorted({route.path for route in app.routes if isinstance(route, APIRoute)})

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = misshapen(error)
        elif isinstance(error, HTTPException):
            headers = {"allow": error.headers["Allow"]} if error.headers and "Allow" in error.headers else {}
            is_unknown = error.status_code == 404
            path = request.url.path
            message = missing.get(path, f"{path} is not served; served are {', '.join(paths)}")
            error = APIError(error.status_code, message if is_unknown else str(error.detail), **headers)
        elif not isinstance(error, APIError):
            error = APIError(500, "the server failed")  # whoever runs it finds the reason in its log
        request.state.ticket.error = error.code
        return error.response()

    for kind in (APIError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    return app


def misshapen(error: RequestValidationError) -> APIError:
    """A body that is no JSON, or whose fields have wrong types."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {first['ctx']['error']} at character {where[0]}")
    if not where:
        return APIError(400, "the body must be a JSON object, sent as Content-Type: application/json")
    return APIError(400, f"{'.'.join(where)}: {first['msg']}", param=where[0])


class Connection(H11Protocol):
    """A client's connection, with limits on what comes before a request's body.

    h11 takes 64 KiB of headers, and of a chunked body's trailer, which it keeps apart. uvicorn bounds the
    time between requests; the time until headers are complete is bounded here.
    """

    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there, and may be silent."""
        super().connection_made(transport)
        self.watch()

    def data_received(self, data: bytes) -> None:
        """More of a request, or of several."""
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, by whomever."""
        super().connection_lost(exc)
        if self.late is not None:
            self.late.cancel()

    def watch(self) -> None:
        """Close the connection if it waits for headers, and still does in CLIENT_SECONDS."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self.late is None:
            self.late = self.loop.call_later(CLIENT_SECONDS, self.timeout_keep_alive_handler)
        elif not waits and self.late is not None:
            self.late.cancel()
            self.late = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too many headers."""
        error = sys.exception()
        if not isinstance(error, h11.RemoteProtocolError) or error.error_status_hint != 431:
            return super().send_400_response(msg)
        headers = [(b"connection", b"close"), (b"content-length", b"0")]
        for answer in (h11.Response(status_code=431, headers=headers), h11.EndOfMessage()):
            self.transport.write(self.conn.send(answer) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Ends in good order: on a signal it takes no more requests, and waits for those it has.

    What is left after `drain_seconds` is aborted. A second signal does not wait. `settings` are uvicorn's.
    """

    def __init__(
        self, service: Service, drain_seconds: float, allowed_origins: Sequence[str] = (), **settings: Any
    ) -> None:
        app = make_app(service, allowed_origins)
        super().__init__(uvicorn.Config(app, http=Connection, access_log=False, **settings))
        self.service, self.drain_seconds = service, drain_seconds
        self.deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGINT and SIGTERM."""
        self.should_exit = self.service.is_draining
        self.deadline = time.monotonic() + self.drain_seconds
        self.service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; True ends the server."""
        late = self.service.num_samples == 0 or time.monotonic() > self.deadline
        return await super().on_tick(counter) or (self.service.is_draining and late)

    async def shutdown(self, sockets: Any = None) -> None:
        """End what is left with an error that says so."""
        await asyncio.to_thread(self.service.engine.close)
        await super().shutdown(sockets)


def make_parser() -> FlexibleArgumentParser:
    """The command's flags: the server's own, and one for each of EngineConfig's fields."""
    parser = FlexibleArgumentParser(
        "nanoengine serve", "%(prog)s MODEL [--FLAG VALUE ...]", "Serve a model.", allow_abbrev=False
    )
    parser.add_argument(
        "model_tag", metavar="MODEL", nargs="?", help="directory, hub id, or demo, the bundled model"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default %(default)s: this machine alone")
    parser.add_argument(
        "--port", type=parse_port, default=8000, help="default %(default)s; 0 is any that is free"
    )
    parser.add_argument("--served-model-name", help="what clients call the model; default: as MODEL")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("NANOENGINE_API_KEY"),
        help="what clients must send; better set as NANOENGINE_API_KEY, which no list of processes shows",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=1024,
        help="samples that may wait beside the max-num-seqs that run; more are told to come back (503)",
    )
    parser.add_argument("--max-body-bytes", type=int, default=4 * 2**20, help="default %(default)s")
    for name, formats in (("tool-call", TOOL_FORMATS), ("reasoning", REASONING_FORMATS)):
        known = f"auto, by the chat template; none; or {', '.join(formats)}"
        parser.add_argument(f"--{name}-parser", default="auto", help=f"default %(default)s: {known}")
    parser.add_argument("--enable-auto-tool-choice", action="store_true", help="as it is without")
    parser.add_argument("--chat-template", help="a file, or the template itself, in place of the tokenizer's")
    parser.add_argument(
        "--allowed-origins",
        type=parse_origins,
        default=[],
        metavar="JSON",
        help='whose pages may call this server from a browser, a list, or ["*"] for any; default: none',
    )
    parser.add_argument(
        "--dev-mode",
        action="store_true",
        help="serve paths that put the engine to sleep and exchange its weights; for networks you trust",
    )
    parser.add_argument(
        "--drain-seconds", type=float, default=30, help="for running requests to end in; default %(default)s"
    )
    engine = parser.add_argument_group("engine", "EngineConfig's fields; config.py explains each")
    add_flags(engine, EngineConfig, UNSERVED_FLAGS, UNSERVED)
    return parser


def parse_port(text: str) -> int:
    """Return a port's number; a socket would take only the lowest 16 bits of a larger one."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise ArgumentTypeError(f"must be an integer in [0, 65535], got {text!r}")
    return int(text)


def parse_origins(text: str) -> list[str]:
    """A JSON list of strings, or one string.

    >>> parse_origins('["https://a.example", "https://b.example"]'), parse_origins("*")
    (['https://a.example', 'https://b.example'], ['*'])
    """
    origins = value_of(text)
    return check_strings("allowed_origins", [origins] if isinstance(origins, str) else origins)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal comes. The log of requests goes to stdout, everything else to stderr."""
    parser = make_parser()
    given = vars(parser.parse_args(argv))
    settings = {item.name: given[item.name] for item in fields(EngineConfig) if item.name in given}
    if ("model" in settings) == (given["model_tag"] is not None):
        parser.error("a model is needed, once: nanoengine serve MODEL")
    settings.setdefault("model", given["model_tag"])
    unserved = {name.removeprefix(UNSERVED): given[name] for name in given if name.startswith(UNSERVED)}
    try:
        without_unserved(parser.prog, unserved, (), UNSERVED_FLAGS)
        engine = AsyncLLM(max_concurrent_requests=2**31 - 1, **settings)  # the service bounds them
        service = Service(
            engine,
            name=given["served_model_name"],
            api_key=given["api_key"],
            max_waiting=given["max_waiting"],
            max_body_bytes=given["max_body_bytes"],
            tool_call_parser=given["tool_call_parser"],
            reasoning_parser=given["reasoning_parser"],
            chat_template=given["chat_template"],
            dev_mode=given["dev_mode"],
        )
        print(f"nanoengine: {service.formats.describe()}", file=sys.stderr)
    except (MissingFileError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    log = logging.getLogger("nanoengine.requests")
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)
    server = Server(
        service,
        given["drain_seconds"],
        given["allowed_origins"],
        host=given["host"],
        port=given["port"],
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    # What is there now stays. The garbage collector would walk over it every few thousand steps, for 0.1 s
    # in which no request gets a token.
    gc.collect()
    gc.freeze()
    try:
        server.run()
    finally:
        engine.close()
