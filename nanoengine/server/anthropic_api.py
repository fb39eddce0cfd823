"""Anthropic's Messages API: /v1/messages, whole or streamed, and /v1/messages/count_tokens.

Each request is translated to a chat request, and the chat's answer to content blocks. unknown_arguments.py
decides about unsupported fields.

Source: the types of the PyPI package `anthropic`; what Claude Code sends, as vLLM's issues report it.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from nanoengine.chat.call_arguments import listed
from nanoengine.chat.tool_choice import is_object_schema
from nanoengine.requests import PromptTooLongError
from nanoengine.server.keys_and_limits import Ticket
from nanoengine.server.openai_api import JSON, SAMPLED, APIError, ChatRequest, refusing, sampling_fields
from nanoengine.server.responses import events, named_event, of_type, only_choice
from nanoengine.server.service import EventStream

SERVED = SAMPLED - {"logprobs", "max_tokens", "n", "prompt_logprobs", "stop"}
# Steer Anthropic's own servers, and have no effect here
IGNORED = "cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EMPTY: dict[str, Any] = {"text": "", "thinking": "", "signature": "", "input": {}}  # as a block begins
# Begins an instruction of Claude Code that differs in each request, so that no prefix would be cached.
BILLING = "x-anthropic-billing-header"
# Begins a thought's signature. A thought that is not shown follows, because clients send signatures back.
SIGNATURE = "nanoengine:"


class MessagesChat(ChatRequest):
    """Is a chat request that was made from a body of the Messages API."""

    def too_long(self, error: PromptTooLongError, max_model_len: int) -> APIError:
        """Return the error for a prompt that is too long, in the words that Anthropic's clients look for."""
        return APIError(400, f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum")


class ToolUse(BaseModel, extra="forbid", strict=True):
    """Says whether the model has to call a tool."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel, extra="forbid", strict=True):
    """Says whether the model thinks, for chat templates that have such a switch."""

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None  # omitted: not shown
    budget_tokens: int | None = None  # accepted without effect


class OutputConfig(BaseModel, extra="forbid", strict=True):
    """Describes the answer."""

    effort: str | None = None  # a variable of some chat templates
    format: dict[str, Any] | None = None  # {"type": "json_schema", "schema": ...}
    task_budget: Any = None  # accepted without effect


class CountRequest(BaseModel, extra="allow", strict=True):
    """Describes the body of a request to /v1/messages/count_tokens. `model_extra` is for SamplingParams."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[Any] | None = None
    tools: list[Any] | None = None  # {"name": ..., "input_schema": a JSON schema}
    tool_choice: ToolUse | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    max_tokens: int | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None

    def chat(self) -> MessagesChat:
        """Return the equivalent chat request. Raises APIError for what is not supported."""
        choice, config = self.tool_choice or ToolUse(), self.output_config or OutputConfig()
        with refusing(self):
            tools = [chat_tool(tool) for tool in of_type("custom", self.tools, default="custom")]
            messages = chat_messages(self.system, self.messages)
        last = messages[-1] if messages else {}
        form = config.format and {"type": "json_schema", "json_schema": config.format}
        named = {"type": "function", "function": {"name": choice.name}}
        fields = {
            **sampling_fields(self, SERVED, IGNORED),
            **self.model_dump(include={"model", "stream", "max_tokens"}),
            **{"messages": messages, "tools": tools, "stop": self.stop_sequences},
            **{"response_format": form, "reasoning_effort": config.effort},
            "enable_thinking": self.thinking and self.thinking.type != "disabled",
            "tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }
        # The answer goes on from the text of the assistant at the end.
        goes_on = last.get("role") == "assistant" and last["content"] and "tool_calls" not in last
        return MessagesChat.model_validate(fields | {"continue_final_message": bool(goes_on)})


class MessagesRequest(CountRequest):
    """Describes the body of a request to /v1/messages."""

    max_tokens: int = Field(ge=1)


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool to the chat API's format."""
    match tool:
        case {"name": str(name), "input_schema": dict(schema)} if name and is_object_schema(schema):
            more = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
            return {"type": "function", "function": {"name": name, **more, "parameters": schema}}
    raise ValueError(f"tools must hold a name and an input_schema of an object, got {tool!r:.200}")


def chat_messages(system: Any, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert instructions and a conversation to messages of the chat API."""
    messages: list[dict[str, Any]] = []
    turns: list[tuple[str, Any, Any]] = [("system", "system", system or [])]
    turns += [(f"messages[{i}]", one.get("role"), one.get("content")) for i, one in enumerate(given)]
    for where, role, content in turns:
        if role not in ("user", "assistant", "system"):
            raise ValueError(f"{where}.role must be user, assistant or system, got {role!r:.80}")
        for block in listed(content):
            add_block(messages, where, role, block)
    return messages


def add_block(messages: list[dict[str, Any]], where: str, role: str, block: Any) -> None:
    """Add a content block to messages of the chat API."""
    match role, block:
        case "user", {"type": "tool_result", "tool_use_id": str(call_id)}:
            texts = [text_of(where, part) for part in listed(block.get("content") or [])]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
        case "assistant", {"type": "tool_use", "id": str(call_id), "name": name, "input": dict(arguments)}:
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            message_for(role, messages).setdefault("tool_calls", []).append(call)
        case "assistant", {"type": "thinking" | "redacted_thinking"}:  # what is redacted has no text
            thought = text_of(where, block.get("thinking", ""))
            thought = thought or str(block.get("signature")).partition(SIGNATURE)[2]
            message = message_for(role, messages)  # the name is a variable of templates such as Qwen 3's
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        case _:
            text = text_of(where, block)
            if role != "system" or not text.startswith(BILLING):
                message = message_for(role, messages)
                message["content"] += "\n" + text if message["content"] else text


def message_for(role: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message to which the next block of a role belongs: the last one, or a new one.

    An instruction in the middle of a conversation is added to the message before it: many templates allow
    only one system message, and if that one grew, the rest of the prompt would miss the prefix cache.
    """
    last = messages[-1]["role"] if messages else "system"
    if role == "system":
        role = "user" if last == "assistant" else last
    if role != last or not messages:
        messages.append({"role": role, "content": ""})
    return messages[-1]


def text_of(where: str, part: Any) -> str:
    """Return the text of a content block."""
    match {"type": "text", "text": part} if isinstance(part, str) else part:
        case {"type": "text", "text": str(text)} | {"type": "tool_reference", "tool_name": str(text)}:
            return text
    kinds = "text, tool_result (from the user), thinking or tool_use (from the assistant)"
    raise ValueError(f"{where} must hold {kinds}; images and documents are not supported; got {part!r:.80}")


class MessageStream:
    """Builds a message, as one object or as the events of a stream, in order."""

    def __init__(self, ticket: Ticket, model: str, shows_thoughts: bool) -> None:
        self.ticket, self.shows_thoughts, self.has_begun = ticket, shows_thoughts, False
        self.message: dict[str, Any] = {"id": f"msg_{ticket.id}", "type": "message", "role": "assistant"}
        self.message |= {"model": model, "content": [], "stop_reason": None, "stop_sequence": None}
        self.index, self.kind, self.hidden = -1, "", ""  # of the open block; no kind: none is open

    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a choice of the chat API as a message."""
        content = {"content": self._blocks_of(choice["message"])}
        return {**self.message, **content, **stop_of(choice), "usage": usage_of(self.ticket)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield nothing: the usage in the first event is known when the first output arrives."""
        return iter(())

    def piece(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a message of the chat API, or of a piece of one."""
        if not self.has_begun:
            self.has_begun = True
            yield {"type": "message_start", "message": {**self.message, "usage": usage_of(self.ticket)}}
        for block in self._blocks_of(message):
            kind = block["type"]
            if kind != self.kind or kind == "tool_use":
                yield from self._close()
                self.index, self.kind = self.index + 1, kind
                begun = {name: EMPTY.get(name, value) for name, value in block.items()}
                yield self._event("content_block_start", content_block=begun)
            self.hidden += block.get("signature", "").removeprefix(SIGNATURE)
            if kind == "tool_use":
                text = json.dumps(block["input"], ensure_ascii=False)
                yield self._delta(type="input_json_delta", partial_json=text)
            elif block[kind]:
                yield self._delta(type=f"{kind}_delta", **{kind: block[kind]})

    def end(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events that come after the answer."""
        yield from self._close()
        yield {"type": "message_delta", "delta": stop_of(choice), "usage": usage_of(self.ticket)}
        yield {"type": "message_stop"}

    def failure(self, error: APIError) -> dict[str, Any]:
        """Return the event of a failure. It replaces the events of `end`."""
        return error.messages_content

    def _blocks_of(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a message of the chat API, or a piece of one, as content blocks."""
        blocks: list[dict[str, Any]] = []
        if thought := message.get("reasoning"):
            shown, hidden = (thought, "") if self.shows_thoughts else ("", thought)
            blocks.append({"type": "thinking", "thinking": shown, "signature": SIGNATURE + hidden})
        if text := message.get("content"):
            blocks.append({"type": "text", "text": text})
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        return blocks

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": self.index, **fields}

    def _delta(self, **delta: str) -> dict[str, Any]:
        return self._event("content_block_delta", delta=delta)

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the open block, if there is one."""
        if self.kind == "thinking":
            yield self._delta(type="signature_delta", signature=SIGNATURE + self.hidden)
        if self.kind:
            yield self._event("content_block_stop")
        self.kind = self.hidden = ""


def stop_of(choice: dict[str, Any]) -> dict[str, str | None]:
    """Return why a choice ended, as fields of a message."""
    reason, text = choice["finish_reason"], choice["stop_reason"]
    if reason == "stop" and isinstance(text, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": text}
    return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}


def usage_of(ticket: Ticket) -> dict[str, Any]:
    """Return the token counts in Anthropic's shape: the whole prompt is the sum of all input tokens."""
    return {
        "input_tokens": ticket.prompt_tokens - ticket.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": ticket.cached_tokens,
        "output_tokens": ticket.completion_tokens,
        "output_tokens_details": {"thinking_tokens": ticket.reasoning_tokens},
    }


async def messages(body: MessagesRequest, request: Request) -> Response:
    """Handle POST /v1/messages."""
    ticket, service = request.state.ticket, request.app.state.service
    choices = await service.start(body.chat(), request)
    is_omitted = body.thinking is not None and body.thinking.display == "omitted"
    message = MessageStream(ticket, service.name, shows_thoughts=not is_omitted)
    if body.stream:
        return EventStream(events(message, choices, ticket), waiting=named_event({"type": "ping"}))
    return JSON(message.whole(await only_choice(choices)))


async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens."""
    chat, service = body.chat(), request.app.state.service
    service.check_model(chat.model)
    with refusing(chat):
        prompt = await service.in_thread(request, partial(chat.render, service.need_tokenizer()))
    return JSON({"input_tokens": len(prompt["prompt_token_ids"])})
