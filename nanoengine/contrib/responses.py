"""OpenAI's Responses API in its simplest form: text in, text out, whole or in pieces.

A request becomes one of the chat API, and what that answers becomes a response. Unserved fields go by the
rule in compat.py. Thoughts are left out.

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
    """The same, asked by way of `input`."""

    source: ClassVar[str] = "input"


class ResponsesRequest(BaseModel):
    """What /v1/responses takes; null is as good as left out. Fields of SamplingParams are `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    input: Any  # text, or a list of messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: Any = None
    top_p: Any = None
    stream: bool | None = None
    text: dict[str, Any] | None = None  # the form it has: {"format": {"type": "json_schema", "schema": ...}}

    def chat(self) -> ChatRequest:
        """The same as a request of the chat API.

        Raises:
            APIError: a field is not served, or the input is no text.
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
        return InputChat.model_validate(
            {
                **sampling,
                "model": self.model,
                "stream": self.stream,
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "response_format": form,
            }
        )


def messages_of(given: Any) -> list[dict[str, Any]]:
    """An input as messages of the chat API.

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
    """A part of a message's content as the chat API has it."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type") not in ("input_text", "output_text", "text"):
        raise ValueError(f"{where} must be text or hold parts of type input_text, got {part!r:.80}")
    return {"type": "text", "text": text}


class ResponseStream:
    """Builds a response: as one object, and as the events of a stream, in order.

    Args:
        body: what was asked for.
        request_id, created, model: of the answer; seconds since the epoch.
    """

    def __init__(self, body: ResponsesRequest, request_id: str, created: int, model: str) -> None:
        self.head: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": created,
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "error": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }
        self.item_id = f"msg_{request_id}"
        self.text = ""
        self.num_events = 0

    def begin(self) -> Iterator[dict[str, Any]]:
        """Before the first piece."""
        response = {
            **self.head,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        item = {**self._item("in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=self._part)

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of the text."""
        self.text += text
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, finish_reason: str, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Behind the last piece."""
        response = self.whole(finish_reason, usage)
        yield self._event("response.output_text.done", **self._place, text=self.text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=self._part)
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: APIError) -> dict[str, Any]:
        """Instead of the end."""
        return self._event("error", code=error.code, message=str(error)[:1000], param=error.param)

    def whole(self, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """All of it, once all is written; `usage` as in the chat API."""
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
    """The route, over the server's service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Return methods, paths and endpoints."""
        return [("POST", "/v1/responses", self.responses)]

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """POST /v1/responses."""
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
        """Yield the response as a stream."""
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
    """Encode a server-sent event that is named by its type."""
    return f"event: {content['type']}\n".encode() + event(content)
