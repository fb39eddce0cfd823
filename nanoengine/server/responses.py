"""OpenAI's Responses API in its simplest form: text and function calls, whole or streamed.

Each request is translated to a chat request, and the chat's answer to a response. unknown_arguments.py
decides about unsupported fields. Reasoning comes as items of its own. Tools of other types are left out.

Source: the OpenAI API reference.
"""

import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from nanoengine.chat.call_arguments import listed
from nanoengine.server.keys_and_limits import Ticket
from nanoengine.server.openai_api import JSON, SAMPLED, APIError, ChatRequest, refusing, sampling_fields
from nanoengine.server.service import Choices, EventStream, event, last_error
from nanoengine.unknown_arguments import without_unserved

SERVED = SAMPLED - {"logprobs", "max_tokens", "n", "prompt_logprobs"}
# A developer's messages are the system's where a template knows no developer (templates.py).
ROLES = {"user": "user", "assistant": "assistant", "system": "developer", "developer": "developer"}


class InputChat(ChatRequest):
    """Is a chat request that was made from `input`: errors name that field instead of `messages`."""

    source: ClassVar[str] = "input"


class ResponsesRequest(BaseModel, extra="allow", strict=True):
    """Describes the body of a request to /v1/responses. `model_extra` has the fields of SamplingParams."""

    model: str | None = None
    input: Any  # text, or a list of messages, function calls and their outputs
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Any = None
    top_p: Any = None
    stream: bool | None = None
    text: dict[str, Any] | None = None  # output format: {"format": {"type": "json_schema", "schema": ...}}
    tools: list[Any] | None = None  # {"type": "function", "name": ..., "parameters": a JSON schema}
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None  # {"effort": ...}, for templates that have such a switch
    client_metadata: Any = None  # Codex sends it; accepted without effect

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises APIError for what is not supported."""
        extra = self.model_extra or {}
        if extra.get("include") == ["reasoning.encrypted_content"]:  # agents ask for it, and go on without
            del extra["include"]
        sampling, summaries = sampling_fields(self, SERVED), ("summary", "generate_summary")
        with refusing(self, "text"):
            form = without_unserved("text", self.text or {}, ("format",)).get("format")
            if not isinstance(form, dict | None):
                raise TypeError(f"text.format must be an object, got {form!r:.80}")
        with refusing(self, "reasoning"):
            effort = without_unserved("reasoning", self.reasoning or {}, ("effort",), summaries).get("effort")
        with refusing(self, "input"):  # messages about tools begin with that name
            tools = [chat_tool(tool) for tool in of_type("function", self.tools)]
            messages = [] if self.input == [] and self.instructions else messages_of(self.input)
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        same = {"model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls"}
        fields = self.model_dump(include=same) | {"messages": messages, "response_format": form}
        fields |= {"tools": tools, "reasoning_effort": effort}
        return InputChat.model_validate(sampling | fields | {"max_completion_tokens": self.max_output_tokens})


def of_type(kind: str, tools: list[Any] | None, default: str | None = None) -> list[dict[str, Any]]:
    """Return the tools of this type, and log the types of the others, which are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for tool in tools or []:
        if not isinstance(tool, dict) or not isinstance(name := tool.get("type") or default, str):
            raise ValueError(f"tools must hold objects with a type, got {tool!r:.80}")
        found.setdefault(name, []).append(tool)
    if others := sorted(found.keys() - {kind}):
        logging.getLogger(__name__).warning("left out tools of types %s: only functions are known", others)
    return found.get(kind, [])


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a function tool to the chat API's format."""
    given = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": given}


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Convert an input to messages of the chat API."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"input must be text or a list of messages, got {given!r:.80}")
    messages: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}  # the reasoning before the next message or call
    for index, item in enumerate(given):
        where = f"input[{index}]"
        match item:
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                # Templates expect calls in the message of the text before them.
                if not messages or messages[-1]["role"] != "assistant" or thought:
                    messages.append({"role": "assistant", "content": "", **thought})
                    thought = {}
                function = {"name": name, "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                content = content_of(f"{where}.output", output)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case dict() if item.get("type", "message") == "message":
                if (role := item.get("role")) not in ROLES:
                    raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}")
                content = content_of(f"{where}.content", item.get("content"))
                messages.append({"role": ROLES[role], "content": content, **thought})
                thought = {}
            case {"type": "reasoning"}:
                text = "".join(texts_of(where, listed(item.get("content") or [])))
                # The name is a variable of templates such as Qwen 3's.
                thought = {"reasoning_content": text} if text else {}
            case _:
                raise ValueError(f"{where} must be a message or a function call, got {item!r:.80}")
    return messages


def content_of(where: str, given: Any) -> str | list[dict[str, str]]:
    """Convert a message's content, or a function's output, to the chat API's format."""
    if isinstance(given, str):
        return given
    return [{"type": "text", "text": text} for text in texts_of(where, listed(given))]


def texts_of(where: str, parts: list[Any]) -> Iterator[str]:
    """Yield the texts of a message's parts."""
    for part in parts:
        match part:
            case {"type": "input_text" | "output_text" | "text" | "reasoning_text", "text": str(text)}:
                yield text
            case {"type": "refusal", "refusal": str(text)}:
                yield text
            case _:
                raise ValueError(f"{where} must be text or hold parts of type input_text, got {part!r:.80}")


THOUGHT, MESSAGE = {"type": "reasoning", "summary": []}, {"type": "message", "role": "assistant"}
# A text's name in a chat's message -> the prefix of its item's id; the item, its part, and its events without
# the text
TEXT_ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", THOUGHT, {"type": "reasoning_text"}, {}),
    "content": ("msg", MESSAGE, {"type": "output_text", "annotations": []}, {"logprobs": []}),
}


class ResponseStream:
    """Builds a response, as one object or as the events of a stream, in order."""

    def __init__(self, body: ResponsesRequest, ticket: Ticket, model: str) -> None:
        self.ticket, created = ticket, int(time.time())
        self.head: dict[str, Any] = {
            **{"id": f"resp_{ticket.id}", "object": "response", "created_at": created, "model": model},
            **body.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p"}),
            "text": body.text or {"format": {"type": "text"}},
            **{"error": None, "metadata": {}, "previous_response_id": None, "truncation": "disabled"},
            **{"tools": body.tools or [], "tool_choice": body.tool_choice or "auto"},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            **{"status": "in_progress", "incomplete_details": None, "output": [], "usage": None},
        }
        self.output: list[dict[str, Any]] = []  # complete items
        self.kind: str | None = None  # of the open item with text; None: none is open
        self.num_events = 0

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events that come before the answer."""
        yield self._event("response.created", response=self.head)
        yield self._event("response.in_progress", response=self.head)

    def piece(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Append a message of the chat API, or a piece of one, and yield its events."""
        for kind in TEXT_ITEMS:
            if text := message.get(kind):
                yield from self._open(kind)
                self.text += text
                yield self._event(f"response.{self.part['type']}.delta", **self.fields, delta=text)
        for call in message.get("tool_calls", ()):
            yield from self._close()
            function = call["function"]
            item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], **function}
            place = {"item_id": item["id"], "output_index": len(self.output)}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self.output), item=begun)
            arguments = "response.function_call_arguments"
            yield self._event(f"{arguments}.delta", **place, delta=function["arguments"])
            yield self._event(f"{arguments}.done", **place, **function)
            yield self._end_item({**item, "status": "completed"})

    def end(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events that come after the answer. The last one holds the complete response."""
        is_cut, usage = choice["finish_reason"] == "length", self.ticket.usage()
        status = "incomplete" if is_cut else "completed"
        if not self.output:
            yield from self._open("content")
        yield from self._close(status)
        renamed = {name: name.replace("prompt", "input").replace("completion", "output") for name in usage}
        response = {
            **self.head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.output,
            "usage": {renamed[name]: counts for name, counts in usage.items()},
        }
        yield self._event(f"response.{status}", response=response)

    def failure(self, error: APIError) -> dict[str, Any]:
        """Return the event of a failure. It replaces the events of `end`."""
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        """Begin an item with text of this kind, unless it is open already."""
        if self.kind == kind:
            return
        yield from self._close()
        self.kind, self.text, index = kind, "", len(self.output)
        prefix, item, self.part, more = TEXT_ITEMS[kind]
        self.item = {"id": f"{prefix}_{self.ticket.id}_{index}", **item}
        self.place = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self.fields = self.place | more
        begun = {**self.item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.content_part.added", **self.place, part={**self.part, "text": ""})

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the open item with text, if there is one."""
        if self.kind is not None:
            self.kind, part = None, {**self.part, "text": self.text}
            yield self._event(f"response.{part['type']}.done", **self.fields, text=self.text)
            yield self._event("response.content_part.done", **self.place, part=part)
            yield self._end_item({**self.item, "status": status, "content": [part]})

    def _end_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self.output.append(item)
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}


async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Handle POST /v1/responses."""
    ticket, service = request.state.ticket, request.app.state.service
    choices = await service.start(body.chat(), request)
    response = ResponseStream(body, ticket, service.name)
    if body.stream:
        return EventStream(events(response, choices, ticket))
    choice = await only_choice(choices)
    *_, last = [*response.piece(choice["message"]), *response.end(choice)]
    return JSON(last["response"])


async def only_choice(choices: Choices) -> dict[str, Any]:
    """Return the choice of a request for one whole answer."""
    async with aclosing(choices):
        (choice,) = [choice async for choice in choices]
    return choice


async def events(response: Any, choices: Choices, ticket: Ticket) -> AsyncGenerator[bytes]:
    """Yield a `ResponseStream`, or another that has its methods, as server-sent events."""
    try:
        async with aclosing(choices):
            for content in response.begin():
                yield named_event(content)
            async for choice in choices:
                for content in response.piece(choice["delta"]):
                    yield named_event(content)
        for content in response.end(choice):
            yield named_event(content)
    except Exception as error:
        yield named_event(response.failure(last_error(error, ticket)))


def named_event(content: dict[str, Any]) -> bytes:
    """Encode a server-sent event. The content's type is its name."""
    return f"event: {content['type']}\n".encode() + event(content)
