"""Guards the service: limits every request's headers, size and time, checks the key, writes a log line."""

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

from nanoengine.server.openai_api import APIError, to_json, unavailable

CLIENT_SECONDS = 60  # how long a client may take to send its request, or to read one message


@dataclass
class Ticket:
    """Records one HTTP request: the fields of its log line, and how far the request got."""

    id: str
    method: str
    path: str
    status: int | None = None  # None: the client disconnected before a status was sent
    error: str | None = None  # the code of the error in the answer
    disconnected: bool = False  # the client disconnected before the end of the answer
    samples: int = 0  # counted in `Service.num_samples` until the request ends
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    first_output_seconds: float | None = None
    started: float = field(default_factory=time.monotonic)
    is_complete: bool = False  # the whole answer is sent

    def line(self) -> dict[str, Any]:
        """Return the fields of the log line."""
        known = {"time": round(time.time(), 3), **asdict(self)}
        known["seconds"] = time.monotonic() - known.pop("started")
        del known["is_complete"]
        return {name: round(one, 6) if isinstance(one, float) else one for name, one in known.items()}

    def usage(self) -> dict[str, Any]:
        """Return the token counts in OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Gate:
    """ASGI middleware that checks and logs requests, and stops the work for clients that disconnect."""

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
                await error.response(scope["path"])(scope, receive, noting)
            else:
                await self.run(scope, body, receive, noting, ticket)
        except (ConnectionError, TimeoutError):  # the client left during its request, or stopped reading
            ticket.disconnected = True
        except Exception:
            ticket.status = 500
            raise
        finally:
            self.service.num_samples -= ticket.samples
            self.log.info(to_json(ticket.line()).decode())

    def refusal(self, scope: Scope) -> APIError | None:
        """Return the error for a request that is refused before its body is read, else None."""
        if scope["path"] in ("/", "/health", "/ping"):
            return None
        if (key := self.service.api_key) is not None:
            begins = {b"authorization": b"", b"x-api-key": b"Bearer "}
            given = [begins[name] + value for name, value in scope["headers"] if name in begins]
            # Each of several keys must be right: a proxy in front of the server may have checked any of them.
            if not given or not all(hmac.compare_digest(one, b"Bearer " + key.encode()) for one in given):
                text = "the API key is missing or wrong; send it as Authorization: Bearer ... or as x-api-key"
                return APIError(401, text, code="invalid_api_key", www_authenticate="Bearer")
        if scope["method"] == "POST" and not self.service.is_serving:
            return unavailable("the server is shutting down")
        return None

    async def read(self, receive: Receive, limit: int) -> bytes:
        """Return the request's body. Raises ConnectionError if the client disconnects."""
        body, num_bytes = bytearray(), 0
        message: Message = {"more_body": True}
        try:
            async with asyncio.timeout(CLIENT_SECONDS):
                while message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    # Bytes beyond the limit are read and dropped: a client that is still writing would not
                    # read the refusal.
                    num_bytes += len(message.get("body", b""))
                    if num_bytes <= limit:
                        body += message.get("body", b"")
        except TimeoutError:
            # The connection is closed, since the rest of the body could take forever.
            raise APIError(408, f"no complete request in {CLIENT_SECONDS} s", connection="close") from None
        if num_bytes > limit > 0:
            raise APIError(413, f"the request has {num_bytes} bytes; at most {limit} are allowed")
        return bytes(body)

    async def run(self, scope: Scope, body: bytes, receive: Receive, send: Send, ticket: Ticket) -> None:
        """Run the app until it has answered or the client disconnects."""

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
    """A client's connection, which ends if the client does not go on with sending headers or with reading.

    h11 limits the headers to 64 KiB, and separately the trailer of a chunked body. Uvicorn limits the time
    between requests. This class limits the time until the headers are complete, and until bytes are read.
    """

    awaited: object = None  # what the client had to do at the last check

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the checks: a client may connect and stay silent."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "send_chunk": self.send_chunk}  # copied to each request's state
        self.check()

    def data_received(self, data: bytes) -> None:
        """Parse more bytes, and drop those that follow the connection's last request."""
        if self.conn.their_state is not h11.MUST_CLOSE:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the checks, whichever side closed the connection."""
        super().connection_lost(exc)
        self.timer.cancel()

    def resume_writing(self) -> None:
        """Let more be written: the client has read most of a full buffer."""
        super().resume_writing()
        self.awaited = None

    def check(self) -> None:
        """Drop the client if it has the same left to send, or as much to read, as CLIENT_SECONDS ago."""
        before, self.awaited = self.awaited, None
        if self.flow.write_paused or self.transport.is_closing():  # else the buffer may also have grown
            self.awaited = self.transport.get_write_buffer_size()
        elif self.conn.their_state is h11.IDLE:
            self.awaited = self.cycle or self  # the request after this one, or the first one
        if self.awaited is not None and self.awaited == before:
            self.transport.abort()
        else:
            self.timer = self.loop.call_later(CLIENT_SECONDS, self.check)

    async def send_chunk(self, content: bytes) -> None:
        """Send a chunk of a chunked body, without the layers of ASGI and h11: a stream has one per token."""
        if self.flow.write_paused:
            await self.flow.drain()
        if content and not self.transport.is_closing():  # an empty chunk would be the last one
            self.transport.write(b"%x\r\n%b\r\n" % (len(content), content))

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP with 400, and one whose headers are too large with 431."""
        if getattr(sys.exception(), "error_status_hint", 400) != 431:
            return super().send_400_response(msg)
        self.transport.write(b"HTTP/1.1 431 \r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.transport.close()
