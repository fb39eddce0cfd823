"""An OpenAI-compatible server over `AsyncLLM`: `nanoengine serve [MODEL]`, with the extra `serve`.

A request passes through these, on its way in and back:

    keys_and_limits.Gate        limit headers, time and size, check the key, log a line, notice lost clients
    openai_api.ChatRequest      holds the request in the engine's terms (or CompletionRequest)
    service.Service.answer      checks the whole request, takes places in the queue, calls `AsyncLLM`
    ChatRequest.choice          writes the engine's output in the API's own shape, whole or piece by piece

This file is the process around them: the command's flags and the graceful shutdown.
"""

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from inspect import signature
from types import FrameType
from typing import Any

import uvicorn

from nanoengine.async_llm import AsyncLLM
from nanoengine.chat.answer_parser import REASONING_FORMATS, SAME, TOOL_FORMATS
from nanoengine.config import EngineConfig
from nanoengine.flags import FlexibleArgumentParser, argparse_type, engine_parser, settings_of, value_of
from nanoengine.sampling_params import check_number, check_strings
from nanoengine.server.app import make_app
from nanoengine.server.keys_and_limits import Connection
from nanoengine.server.service import Service

REPORT_SECONDS = 10  # between two lines about the engine's load
CLOSE_SECONDS = 5  # how long clients have to read their last answer when the server shuts down


class Server(uvicorn.Server):
    """Drains on a signal: finishes what runs, and aborts it after `drain_seconds` or on a second signal."""

    def __init__(
        self, service: Service, drain_seconds: float, allowed_origins: Sequence[str] = (), **settings: Any
    ) -> None:
        app = make_app(service, allowed_origins)
        super().__init__(uvicorn.Config(app, http=Connection, access_log=False, **settings))
        self.service, self.drain_seconds = service, drain_seconds
        self.deadline, self.is_interrupted = 0.0, False
        self.reported, self.counts = time.monotonic(), (0, 0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining on the first SIGINT or SIGTERM, and exit on the second."""
        self.should_exit, self.is_interrupted = self.service.is_draining, sig == signal.SIGINT
        self.deadline = time.monotonic() + self.drain_seconds
        self.service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Decide whether to stop. Uvicorn calls this ten times a second, and stops if it returns True."""
        if time.monotonic() - self.reported >= REPORT_SECONDS:
            self.report()
        late = self.service.num_samples == 0 or time.monotonic() > self.deadline
        return await super().on_tick(counter) or (self.service.is_draining and late)

    def report(self) -> None:
        """Log the rates since the last report, the queues and the cache, unless nothing ran."""
        engine, now, before = self.service.engine.llm_engine, time.monotonic(), self.counts
        scheduler, blocks = engine.scheduler, engine.scheduler.block_manager
        self.counts = engine.num_prompt_tokens, engine.num_generation_tokens
        if self.counts != before or scheduler.running:
            seconds = now - self.reported
            rates = [(new - old) / seconds for new, old in zip(self.counts, before, strict=True)]
            logging.getLogger("uvicorn.error").info(
                "%.1f prompt tokens/s, %.1f output tokens/s, %d running, %d waiting, KV cache %.1f%% in use",
                *(*rates, len(scheduler.running), len(scheduler.waiting)),
                100 * (1 - blocks.num_free_blocks / blocks.num_blocks),
            )
        self.reported = now

    async def shutdown(self, sockets: Any = None) -> None:
        """Close the engine, which ends the remaining requests with an error, and then the server."""
        await asyncio.to_thread(self.service.engine.close)
        await super().shutdown(sockets)


def make_parser() -> FlexibleArgumentParser:
    """Return a parser for the command's flags: the server's own, and one for each EngineConfig field."""
    parser = engine_parser("nanoengine serve", "Serve a model.", EngineConfig)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="default %(default)s: only this machine can connect")
    add("--port", type=parse_port, default=8000, help="default %(default)s; 0 picks a free port")
    add("--served-model-name", dest="name", help="the model name that clients use; default: MODEL")
    key = os.environ.get("NANOENGINE_API_KEY")
    add("--api-key", default=key, help="the key that clients must send; safer as NANOENGINE_API_KEY")
    waiting = "samples that may wait in addition to the max-num-seqs that run; more get a 503"
    add("--max-waiting", type=int, default=1024, help=waiting)
    add("--max-body-bytes", type=int, default=4 * 2**20, help="default %(default)s")
    calls, thoughts = ("tool-call", "tool calls", TOOL_FORMATS), ("reasoning", "reasoning", REASONING_FORMATS)
    for name, what, formats in (calls, thoughts):
        choose: dict[str, Any] = {"choices": ["auto", "none", *formats], "default": "auto"}
        text = f"how the model writes {what}; default %(default)s: by the chat template"
        add(f"--{name}-parser", type=lambda given: SAME.get(given, given), help=text, **choose)
    add("--enable-auto-tool-choice", action="store_true", help="no effect: tool calls are always parsed")
    add("--chat-template", help="a file, or the template itself, in place of the tokenizer's")
    origins = 'web pages that may call this server from a browser, a list, or ["*"] for any; default: none'
    add("--allowed-origins", type=parse_origins, default=[], metavar="JSON", help=origins)
    drain = "time for running requests to finish on shutdown; default %(default)s"
    seconds = argparse_type(lambda text: check_number("drain_seconds", float(text), 0, math.inf))
    add("--drain-seconds", type=seconds, default=30, help=drain)
    return parser


@argparse_type
def parse_port(text: str) -> int:
    """Return a port number, checked because a socket silently keeps only the lowest 16 bits."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise ValueError(f"must be an integer in [0, 65535], got {text!r}")
    return int(text)


def try_address(host: str, port: int) -> None:
    """Raise OSError if the server cannot listen there, so that nobody waits for the model first."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # what follows names the address again
        raise OSError(f"cannot listen on {host}:{port}: {reason}") from None


@argparse_type
def parse_origins(text: str) -> list[str]:
    """Return the origins in a JSON list of strings, or in a single string.

    >>> parse_origins('["https://a.example", "https://b.example"]'), parse_origins("*")
    (['https://a.example', 'https://b.example'], ['*'])
    """
    origins = value_of(text)
    return check_strings("allowed_origins", [origins] if isinstance(origins, str) else origins)


def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal arrives. The request log goes to stdout, everything else to stderr."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    settings, given = settings_of(parser, args, EngineConfig), vars(args)
    try:
        try_address(given["host"], given["port"])
        engine = AsyncLLM(max_concurrent_requests=2**31 - 1, **settings)  # the service limits them instead
        names = given.keys() & signature(Service).parameters.keys()
        service = Service(engine, **{name: given[name] for name in names})
        logging.getLogger("nanoengine").info(service.formats.describe())
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    log = logging.getLogger("nanoengine.requests")
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.propagate = False
    chosen = {name: given[name] for name in ("drain_seconds", "allowed_origins", "host", "port")}
    server = Server(service, timeout_graceful_shutdown=CLOSE_SECONDS, **chosen)
    # All objects that exist now stay until the end. Without freeze, the garbage collector would visit them
    # every few thousand steps, and no request would get a token for 0.1 s.
    gc.collect()
    gc.freeze()
    # The event loop would keep the interpreter lock for 5 ms, while a step waits for it after each kernel.
    sys.setswitchinterval(0.001)
    try:
        server.run()
    finally:
        engine.close()
    if server.is_interrupted:
        sys.exit(130)
