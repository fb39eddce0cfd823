"""OpenAI's Responses API in its simplest form: text in, text out, whole or streamed.

Each request is translated to a chat request, and the chat's answer to a response. The rule in compat.py
applies to unsupported fields. Reasoning is left out of the response.

Source: the OpenAI API reference.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from nanoengine.apps.gate import Ticket
from nanoengine.apps.openai_api import JSON, SAMPLED, APIError, ChatRequest, refusing, sampling_fields
from nanoengine.apps.service import EventStream, Service, event
from nanoengine.compat import without_unserved

SERVED = SAMPLED - {"logprobs", "max_tokens", "n", "prompt_logprobs"}
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class InputChat(ChatRequest):
    """Is a chat request that was made from `input`: errors name that field instead of `messages`."""

    source: ClassVar[str] = "input"


class ResponsesRequest(BaseModel):
    """Describes the body of a request to /v1/responses. Null is the same as a missing field.

    `model_extra` has the fields of SamplingParams.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    input: Any  # text, or a list of messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: Any = None
    top_p: Any = None
    stream: bool | None = None
    text: dict[str, Any] | None = None  # output format: {"format": {"type": "json_schema", "schema": ...}}

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request.

        Raises:
            APIError: a field is not supported, or the input is not text.
        """
        sampling = sampling_fields(self, SERVED)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens must be at least 1, got {self.max_output_tokens}"
            raise APIError(400, message, param="max_output_tokens")
        with refusing(self, "text"):
            form = without_unserved("text", self.text or {}, ("format",)).get("format")
            if not isinstance(form, dict | None):
                raise TypeError(f"text.format must be an object, got {form!r:.80}")
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        with refusing(self, "input"):
            messages = messages_of(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = self.model_dump(include={"model", "stream", "temperature", "top_p"})
        fields |= {"messages": messages, "response_format": form}
        return InputChat.model_validate(sampling | fields | {"max_completion_tokens": self.max_output_tokens})


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Convert an input to messages of the chat API.

    >>> messages_of("Hi")
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"input must be text or a list of messages, got {given!r:.80}")
    messages = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise ValueError(f"{where} must be a message, got {item!r:.80}")
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}")
        if not isinstance(content, str):
            parts = content if isinstance(content, list) else [content]
            content = [text_of(f"{where}.content", part) for part in parts]
        messages.append({"role": ROLES[role], "content": content})
    return messages


def text_of(where: str, part: Any) -> dict[str, str]:
    """Convert one part of a message's content to the chat API's format."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type") not in ("input_text", "output_text", "text"):
        raise ValueError(f"{where} must be text or hold parts of type input_text, got {part!r:.80}")
    return {"type": "text", "text": text}


class ResponseStream:
    """Builds a response, as one object or as the events of a stream, in order.

    `created` is in seconds since the epoch.
    """

    def __init__(self, body: ResponsesRequest, request_id: str, created: int, model: str) -> None:
        names = {"instructions", "max_output_tokens", "temperature", "top_p"}
        self.head: dict[str, Any] = {
            **{"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model},
            **body.model_dump(include=names),
            "text": body.text or {"format": {"type": "text"}},
            **{"error": None, "metadata": {}, "previous_response_id": None, "truncation": "disabled"},
            **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
            **{"status": "in_progress", "incomplete_details": None, "output": [], "usage": None},
        }
        self.item_id = f"msg_{request_id}"
        self.text = ""
        self.num_events = 0

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events that come before the first piece of text."""
        yield self._event("response.created", response=self.head)
        yield self._event("response.in_progress", response=self.head)
        item = {**self._item("in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=self._part)

    def piece(self, text: str) -> dict[str, Any]:
        """Append a piece of text, and return its event."""
        self.text += text
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, finish_reason: str, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events that come after the last piece of text."""
        response = self.whole(finish_reason, usage)
        yield self._event("response.output_text.done", **self._place, text=self.text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=self._part)
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: APIError) -> dict[str, Any]:
        """Return the event of a failure. It replaces the events of `end`."""
        return self._event("error", code=error.code, message=str(error)[:1000], param=error.param)

    def whole(self, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete response. `usage` is that of the chat API."""
        is_cut = finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return {
            **self.head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [{**self._item(status), "content": [self._part]}],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": []}

    def _item(self, status: str) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant"}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}


class ResponsesAPI:
    """Provides the route, on top of the server's `Service`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Return methods, paths and endpoints."""
        return [("POST", "/v1/responses", self.responses)]

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Handle POST /v1/responses."""
        ticket = request.state.ticket
        chat = body.chat()
        choices = await self.service.start(chat, request)
        response = ResponseStream(body, ticket.id, int(time.time()), self.service.name)
        if body.stream:
            return EventStream(self.events(response, choices, ticket))
        async with aclosing(choices):
            (choice,) = [choice async for choice in choices]
        response.piece(choice["message"].get("content") or "")
        return JSON(response.whole(choice["finish_reason"], ticket.usage()))

    async def events(
        self, response: ResponseStream, choices: AsyncGenerator[dict[str, Any]], ticket: Ticket
    ) -> AsyncGenerator[bytes]:
        """Yield the response as server-sent events."""
        try:
            async with aclosing(choices):
                for content in response.begin():
                    yield named_event(content)
                async for choice in choices:
                    if text := choice["delta"].get("content"):
                        yield named_event(response.piece(text))
            for content in response.end(choice["finish_reason"], ticket.usage()):
                yield named_event(content)
        except APIError as error:
            ticket.error = error.code
            yield named_event(response.failure(error))


def named_event(content: dict[str, Any]) -> bytes:
    """Encode a server-sent event. The content's type is its name."""
    return f"event: {content['type']}\n".encode() + event(content)
