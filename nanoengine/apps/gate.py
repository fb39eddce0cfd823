"""What every request passes before the service sees it: limits on headers, key, size and time; a log line."""

import asyncio
import hmac
import logging
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoengine.apps.openai_api import APIError, to_json, unavailable

CLIENT_SECONDS = 60  # for a client to send its request, and to read on where it has stopped reading


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


class Gate:
    """ASGI middleware: key, size, draining, a log line, and the end of work for a client that is gone."""

    def __init__(self, app: ASGIApp, service: Any) -> None:
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
