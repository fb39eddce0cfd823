"""An OpenAI-compatible server over `AsyncLLM`: `nanoengine serve MODEL`, with the extra `serve`.

A request passes through these, on its way in and back:

    gate.Connection, Gate       limit headers, time and size, check the key, log a line, notice lost clients
    openai_api.ChatRequest      holds the request in the engine's terms (or CompletionRequest)
    service.Service.answer      checks the whole request, takes places in the queue, calls `AsyncLLM`
    ChatRequest.choice          writes the engine's output in the API's own shape, whole or piece by piece

This file is the process around them: the command's flags and the graceful shutdown.
"""

import asyncio
import gc
import logging
import os
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from types import FrameType
from typing import Any

import uvicorn

from nanoengine.apps.gate import Connection
from nanoengine.apps.service import Service, make_app
from nanoengine.apps.tools import REASONING_FORMATS, TOOL_FORMATS
from nanoengine.async_llm import AsyncLLM
from nanoengine.config import EngineConfig
from nanoengine.flags import FlexibleArgumentParser, add_flags, value_of
from nanoengine.optional import MissingFileError
from nanoengine.sampling_params import check_strings

CLOSE_SECONDS = 5  # how long clients have to read their last answer when the server shuts down


class Server(uvicorn.Server):
    """Shuts down gracefully: on a signal, accepts no more requests and waits for the running ones.

    Requests that still run after `drain_seconds` are aborted. A second signal ends the wait at once.
    `settings` are uvicorn's.
    """

    def __init__(
        self, service: Service, drain_seconds: float, allowed_origins: Sequence[str] = (), **settings: Any
    ) -> None:
        app = make_app(service, allowed_origins)
        super().__init__(uvicorn.Config(app, http=Connection, access_log=False, **settings))
        self.service, self.drain_seconds = service, drain_seconds
        self.deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining on the first SIGINT or SIGTERM, and exit on the second."""
        self.should_exit = self.service.is_draining
        self.deadline = time.monotonic() + self.drain_seconds
        self.service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Decide whether to stop. Uvicorn calls this ten times a second, and stops if it returns True."""
        late = self.service.num_samples == 0 or time.monotonic() > self.deadline
        return await super().on_tick(counter) or (self.service.is_draining and late)

    async def shutdown(self, sockets: Any = None) -> None:
        """Close the engine, which ends the remaining requests with an error, and then the server."""
        await asyncio.to_thread(self.service.engine.close)
        await super().shutdown(sockets)


def make_parser() -> FlexibleArgumentParser:
    """Return a parser for the command's flags: the server's own, and one for each EngineConfig field."""
    parser = FlexibleArgumentParser(
        "nanoengine serve", "%(prog)s MODEL [--FLAG VALUE ...]", "Serve a model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("model_tag", metavar="MODEL", nargs="?", help="directory, hub id, or demo, the bundled model")
    add("--host", default="127.0.0.1", help="default %(default)s: only this machine can connect")
    add("--port", type=parse_port, default=8000, help="default %(default)s; 0 picks a free port")
    add("--served-model-name", dest="name", help="the model name that clients use; default: MODEL")
    key = os.environ.get("NANOENGINE_API_KEY")
    add("--api-key", default=key, help="the key that clients must send; safer as NANOENGINE_API_KEY")
    waiting = "samples that may wait in addition to the max-num-seqs that run; more get a 503"
    add("--max-waiting", type=int, default=1024, help=waiting)
    add("--max-body-bytes", type=int, default=4 * 2**20, help="default %(default)s")
    for name, formats in (("tool-call", TOOL_FORMATS), ("reasoning", REASONING_FORMATS)):
        known = f"auto, by the chat template; none; or {', '.join(formats)}"
        add(f"--{name}-parser", default="auto", help=f"default %(default)s: {known}")
    add("--enable-auto-tool-choice", action="store_true", help="no effect: tool calls are always parsed")
    add("--chat-template", help="a file, or the template itself, in place of the tokenizer's")
    origins = 'web pages that may call this server from a browser, a list, or ["*"] for any; default: none'
    add("--allowed-origins", type=parse_origins, default=[], metavar="JSON", help=origins)
    dev_mode = "serve routes that put the engine to sleep and replace its weights; for trusted networks only"
    add("--dev-mode", action="store_true", help=dev_mode)
    drain = "time for running requests to finish on shutdown; default %(default)s"
    add("--drain-seconds", type=float, default=30, help=drain)
    engine = parser.add_argument_group("engine", "EngineConfig's fields; config.py explains each")
    add_flags(engine, EngineConfig)
    return parser


def parse_port(text: str) -> int:
    """Return a port number, checked because a socket silently keeps only the lowest 16 bits."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise ArgumentTypeError(f"must be an integer in [0, 65535], got {text!r}")
    return int(text)


def parse_origins(text: str) -> list[str]:
    """Return the origins in a JSON list of strings, or in a single string.

    >>> parse_origins('["https://a.example", "https://b.example"]'), parse_origins("*")
    (['https://a.example', 'https://b.example'], ['*'])
    """
    origins = value_of(text)
    return check_strings("allowed_origins", [origins] if isinstance(origins, str) else origins)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal arrives. The request log goes to stdout, everything else to stderr."""
    parser = make_parser()
    given = vars(parser.parse_args(argv))
    settings = {item.name: given[item.name] for item in fields(EngineConfig) if item.name in given}
    if ("model" in settings) == (given["model_tag"] is not None):
        parser.error("give the model once: nanoengine serve MODEL")
    settings.setdefault("model", given["model_tag"])
    try:
        engine = AsyncLLM(max_concurrent_requests=2**31 - 1, **settings)  # the service limits them instead
        names = given.keys() & signature(Service).parameters.keys()
        service = Service(engine, **{name: given[name] for name in names})
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
    # All objects that exist now stay until the end. Without freeze, the garbage collector would visit them
    # every few thousand steps, and no request would get a token for 0.1 s.
    gc.collect()
    gc.freeze()
    try:
        server.run()
    finally:
        engine.close()
