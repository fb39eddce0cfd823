"""Translates OpenAI's completions and chat APIs: requests into engine terms, outputs into API responses.

`SamplingParams` alone names and checks sampling parameters, so the server accepts a new one at once. The rule
in unknown_arguments.py decides about other fields.

Source: the OpenAI API reference; vllm/entrypoints/openai for the names of fields beyond OpenAI's.
"""

import inspect
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import pydantic_core
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, PrivateAttr

from nanoengine.chat.answer_parser import MANY, AnswerParser, Formats
from nanoengine.chat.call_arguments import listed
from nanoengine.chat.templates import render_chats
from nanoengine.chat.tool_choice import ToolChoice, schema_of
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput
from nanoengine.requests import PromptTooLongError, check_unicode, split_prompts
from nanoengine.sampling_params import RequestOutputKind, SamplingParams
from nanoengine.server.token_logprobs import TokenNames, best_first, clamped
from nanoengine.unknown_arguments import IGNORED, MAX_UNSERVED, without_unserved

MAX_STRINGS = 64  # limit for `stop` and for `bad_words`: each string is searched for at every token
# The SamplingParams fields that a request may set. Fields of the API determine the others.
SAMPLED = {item.name for item in fields(SamplingParams) if item.init}
SAMPLED -= {"detokenize", "logits_processors", "output_kind"}


def to_json(content: Any) -> bytes:
    """Encode as JSON in UTF-8. A lone surrogate becomes a JSON escape, and a NaN or infinity null."""
    try:
        return pydantic_core.to_json(content, inf_nan_mode="null")  # a fifth of json's time, for each token
    except ValueError:
        finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
        text = json.dumps(finite, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")


class JSON(JSONResponse):
    """A JSON response encoded by `to_json`."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return to_json(content)


class APIError(Exception):
    """An error to answer with, and its HTTP status. `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message[:1000])  # it may quote a long request
        self.status, self.param = status, param
        self.code = code or ("invalid_request" if status < 500 else "server_error")
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def content(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def messages_content(self) -> dict[str, Any]:
        """The error in Anthropic's shape."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = kinds.get(self.status, "overloaded_error" if self.status == 503 else other)
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response(self, path: str) -> Response:
        """Return the error as a response of the API that has this path, if no answer has begun."""
        content = self.messages_content if path.startswith("/v1/messages") else self.content
        return JSON(content, self.status, self.headers)


def unavailable(message: str) -> APIError:
    """Return a 503: the same request may succeed later, or on another server."""
    return APIError(503, message, code="unavailable", retry_after="1")


@contextmanager
def refusing(body: BaseModel, param: str | None = None) -> Iterator[None]:
    """Turn errors about a bad request into APIErrors. They begin with their field, or are about `param`."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        first = re.split(r"\W", str(error), maxsplit=1)[0]
        known = first in SAMPLED or first in type(body).model_fields
        if first == "structured_outputs" and isinstance(body, GenerationRequest):
            first = body._structured_field
        raise APIError(400, str(error), param=first if known else param) from None


def sampling_fields(body: BaseModel, sampled: Set[str], ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a request's fields in `sampled` that are not null. Raises APIError for another one."""
    extra, found = body.model_extra or {}, dict[str, Any]()
    served = sampled | type(body).model_fields.keys()
    ignored += IGNORED["sampling"] + IGNORED["request"]
    if len(extra) > MAX_UNSERVED:
        raise APIError(400, f"the request has more than {MAX_UNSERVED} fields")
    for name, value in extra.items():
        with refusing(body, name):
            found |= without_unserved("the request", {name: value}, served, ignored)
    return {name: value for name, value in found.items() if value is not None}


# ---- Requests, and answers in the same API's shape -----------------------------------------------


class Conversation(BaseModel):
    """Holds messages, and settings for the chat template that renders them."""

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    reasoning_effort: str | None = None  # a variable of some templates, such as gpt-oss's; "none": no thought
    enable_thinking: bool | None = None  # a variable of some templates, such as Qwen 3's
    think: bool | str | None = None  # the same under ollama's name, or an effort

    def render(
        self, tokenizer: Any, encode: Callable[[str, bool], list[int]] | None = None
    ) -> dict[str, Any]:
        """Return the messages as a prompt for the engine. `render_chats` documents `encode`."""
        settings = dict(self.chat_template_kwargs or {})
        # Only variables of the template may be set, not the method's own arguments. In particular, a client
        # must not replace the template.
        if reserved := settings.keys() & inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ValueError(f"chat_template_kwargs must not hold {sorted(reserved)}")
        effort, think = self.reasoning_effort, self.think
        if isinstance(think, str):
            effort, think = think, None
        off = False if effort == "none" else None
        asked: list[tuple[str, Any]] = [("reasoning_effort", None if effort == "none" else effort)]
        asked += [("enable_thinking", one) for one in (self.enable_thinking, think, off)]
        for name, value in asked:
            if value is not None:
                settings.setdefault(name, value)
        settings["continue_final_message"] = goes_on = bool(self.continue_final_message)
        adds = self.add_generation_prompt
        settings["add_generation_prompt"] = not goes_on if adds is None else adds
        if ToolChoice.read(self.tools, self.tool_choice).shown:
            settings["tools"] = self.tools
        takes_text = re.search(r"arguments\W{0,4}is string", str(tokenizer.chat_template)) is not None
        messages = [with_arguments_read(one, takes_text) for one in self.messages or []]
        return render_chats(messages, tokenizer, encode, **settings)[0]


def with_arguments_read(message: dict[str, Any], takes_text: bool) -> dict[str, Any]:
    """Return a message as chat templates expect it: tool arguments as objects, and content as text.

    Arguments that are no JSON object stay text, or become an object that holds it if the template needs one.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in listed(message["tool_calls"]):
        match call:
            case {"function": {"name": str(), **rest} as function}:
                arguments = rest.get("arguments") or {}
            case _:
                raise ValueError(f"messages: tool_calls must hold functions with a name, got {call!r}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        with suppress(ValueError, RecursionError):
            arguments = json.loads(text)
        if not isinstance(arguments, dict):
            arguments = text if takes_text else {"arguments": text}
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


NewParser = Callable[[], AnswerParser]


@dataclass(slots=True)
class Progress:
    """Records how much of a sample was sent."""

    index: int  # of the choice
    parser: AnswerParser | None = None  # None: the whole text is content
    has_begun: bool = False
    num_chars: int = 0  # of the text, where log-probabilities say where tokens begin

    def num_reasoning_tokens(self, tokens: TokenNames) -> int:
        """Return how many tokens of a finished sample are in its reasoning and the tag before it."""
        if self.parser is None or not self.parser.thought_end:
            return 0
        begins = tokens.offsets(self.parser.token_ids, 0, self.parser.params.skip_special_tokens)
        return bisect_left(begins, self.parser.thought_end)


class StreamOptions(BaseModel, extra="forbid", strict=True):
    """Chooses what a stream holds in addition to the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the usage so far, in every piece
    include_obfuscation: bool | None = None  # accepted without effect: nothing is obfuscated


class GenerationRequest(BaseModel, extra="allow", strict=True):
    """Holds the fields that both APIs have. Null counts as absent; sampling fields are in `model_extra`."""

    source: ClassVar[str]  # the field that holds the prompt
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Any = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = Field(None, ge=0)  # this field and the following ones are vLLM's
    priority: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # logprobs show "token_id:17" in place of a token's text
    add_special_tokens: bool | None = None
    request_id: str | None = Field(None, max_length=200)  # part of the answer's id, in each piece of a stream
    _structured_field: str = PrivateAttr("structured_outputs")  # the field that asks for these

    def sampling_params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """Return the request's SamplingParams. `own` holds those that each API spells in its own way."""
        given = sampling_fields(self, SAMPLED)
        with refusing(self):
            bias = self.logit_bias
            if isinstance(bias, dict):  # JSON's keys are strings
                for key in bias:  # one spelling for each token id, so that no token gets two biases
                    if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
                        raise ValueError(f"logit_bias must have token ids as keys, got {key!r:.99}")
                bias = {int(key): value for key, value in bias.items()}
            given |= {"logit_bias": bias, "prompt_logprobs": self.prompt_logprobs, **own}
            if asked := self.format():
                if "structured_outputs" in given:
                    raise ValueError("structured_outputs cannot be combined with response_format")
                self._structured_field, given["structured_outputs"] = "response_format", asked
            form = given.get("structured_outputs")
            if isinstance(form, dict) and form.keys() & {"json", "json_object"}:
                given.pop("stop", None)  # JSON ends by its grammar, and any text may be a part of it
            for name in ("stop", "bad_words"):
                if isinstance(given.get(name), list) and len(given[name]) > MAX_STRINGS:
                    raise ValueError(f"{name} must hold at most {MAX_STRINGS} strings")
            if self.stream and self.prompt_logprobs is not None:
                raise ValueError("prompt_logprobs needs stream=false")
            if self.stream_options is not None and not self.stream:
                raise ValueError("stream_options needs stream=true")
            kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
            return replace(defaults, output_kind=kind, **given)

    def format(self) -> dict[str, Any]:
        """Return `response_format` as fields of StructuredOutputsParams."""
        asked = self.response_format or {}
        kind = asked.get("type", "text")
        if kind == "text":
            return {}
        if kind == "json_object":  # with a schema, as llama.cpp and TGI spell json_schema
            return {"json": asked["schema"]} if asked.get("schema") else {"json_object": True}
        if kind == "structural_tag":
            return {"structural_tag": asked}
        named = asked.get("json_schema")
        schema = named.get("schema", named.get("json_schema")) if isinstance(named, dict) else None
        if kind != "json_schema" or not isinstance(schema, dict):
            kinds = "text, json_object, structural_tag, or json_schema with a schema"
            raise ValueError(f"response_format must be of type {kinds}, got {kind!r:.80}")
        return {"json": schema}

    def too_long(self, error: PromptTooLongError, max_model_len: int) -> APIError:
        """Return the error for a prompt that is too long."""
        # Clients recognize the first sentence (litellm), or the code in the message (langchain).
        code = "context_length_exceeded"
        limit = f"This model's maximum context length is {max_model_len} tokens"
        return APIError(400, f"{limit} ({code}): {error}", param=self.source, code=code)

    def failure(self, reason: Any) -> APIError:
        """Return the error to answer with when a sample finished with "error"."""
        if found := re.search(r": (\w+).* bans? every token that (structured_outputs)?", str(reason)):
            return APIError(400, str(reason), param=self._structured_field if found[2] else found[1])
        return APIError(500, f"the model could not compute this request: {reason}")

    def token_name(self, token_id: int, text: str) -> str:
        """Return the name of a token in reported log-probabilities."""
        return f"token_id:{token_id}" if self.return_tokens_as_token_ids else text

    def common(
        self, progress: Progress, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Return the fields of a choice that both APIs have. The prompt's ids are in the first piece only."""
        reason, stop_reason = completion.finish_reason, completion.stop_reason
        choice: dict[str, Any] = {"finish_reason": reason, "stop_reason": stop_reason}
        if self.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = None if progress.has_begun else output.prompt_token_ids
        if self.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                entry and {str(token_id): asdict(clamped(one)) for token_id, one in entry.items()}
                for entry in output.prompt_logprobs or []
            ]
        progress.has_begun = True
        return choice


class CompletionRequest(GenerationRequest):
    """A request to continue a text: /v1/completions."""

    is_chat: ClassVar[bool] = False
    prefix: ClassVar[str] = "cmpl"
    source: ClassVar[str] = "prompt"
    kinds: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")  # whole, piece of a stream
    prompt: Any  # a string, a list of strings, token ids, or a list of lists of token ids
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None

    def params(self, defaults: SamplingParams, recommended: int | None) -> SamplingParams:
        """Return the request's SamplingParams."""
        own: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is not None:
            own["max_tokens"] = 1 if self.is_echo_alone else self.max_tokens
        if self.echo and self.logprobs is not None:
            own["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.sampling_params(defaults, **own)

    @property
    def is_echo_alone(self) -> bool:
        """Whether the request wants only its prompt back. One token is sampled all the same, and left out."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def num_prompts(self) -> int:
        """The number of prompts, counted without reading any of them."""
        if not isinstance(self.prompt, str | list):
            raise TypeError(f"prompt must be text, token ids, or a list of these, got {self.prompt!r}")
        return len(split_prompts(self.prompt))

    def prompts(self, tokenizer: Any, encode: Callable[[str, bool], list[int]]) -> list[Any]:
        """Return the prompts in a form that the engine accepts."""
        prompts = split_prompts(self.prompt)
        if self.add_special_tokens is False and tokenizer is not None:
            for i, one in enumerate(prompts):
                if isinstance(one, str):
                    token_ids = encode(check_unicode("prompt", one), False)
                    prompts[i] = {"prompt": one, "prompt_token_ids": token_ids}
        return prompts

    def choice(
        self, progress: Progress, completion: CompletionOutput, output: RequestOutput, tokens: TokenNames
    ) -> dict[str, Any]:
        """Return a sample, or its next piece."""
        text, start, logprobs = completion.text, progress.num_chars, None
        reported: list[tuple[int, dict[int, Logprob] | None]] = []
        offsets: list[int] = []
        if self.echo and not progress.has_begun:
            ids = output.prompt_token_ids
            prompt = tokens.tokenizer.decode(ids) if output.prompt is None else output.prompt
            text, start = prompt + text, len(prompt)
            reported += zip(ids, output.prompt_logprobs or [], strict=False)
            offsets += tokens.offsets_in(prompt, ids[: len(reported)])
        if self.logprobs is not None:
            reported += zip(completion.token_ids, completion.logprobs or [], strict=False)
            skips = (self.model_extra or {}).get("skip_special_tokens") is not False
            by_id = bool(self.return_tokens_as_token_ids)
            offsets += tokens.offsets((one for one, _ in reported[len(offsets) :]), start, skips)
            progress.num_chars = offsets.pop()
            logprobs = {
                "tokens": [self.token_name(one, tokens.name(one)) for one, _ in reported],
                "token_logprobs": [entry and clamped(entry[token]).logprob for token, entry in reported],
                "top_logprobs": [entry and tokens.names(entry, by_id) for _, entry in reported],
                "text_offset": offsets,
            }
        choice = {"index": progress.index, "text": text, "logprobs": logprobs}
        return choice | self.common(progress, completion, output)


def pieces_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a choice: clients expect the finish reason in a piece of its own, after the last tool call."""
    if choice["finish_reason"] is None or "tool_calls" not in choice.get("delta", {}):
        return [choice]
    end = {"index": choice["index"], "delta": {}, "logprobs": None}
    over = {name: choice.pop(name) for name in ("finish_reason", "stop_reason")}
    return [{**choice, "finish_reason": None, "stop_reason": None}, {**end, **over}]


class ChatRequest(Conversation, GenerationRequest):
    """A request to continue a conversation: /v1/chat/completions."""

    is_chat: ClassVar[bool] = True
    prefix: ClassVar[str] = "chatcmpl"
    source: ClassVar[str] = "messages"
    kinds: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    is_echo_alone: ClassVar[bool] = False
    num_prompts: ClassVar[int] = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    parallel_tool_calls: bool | None = None

    def params(self, defaults: SamplingParams, recommended: int | None) -> SamplingParams:
        """Return the request's SamplingParams. `recommended` is the checkpoint's own `max_new_tokens`."""
        limits = (self.max_completion_tokens, self.max_tokens, recommended)
        max_tokens = next((limit for limit in limits if limit is not None), None)
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(defaults, max_tokens=max_tokens, logprobs=num_logprobs)

    def prompts(self, tokenizer: Any, encode: Callable[[str, bool], list[int]]) -> list[Any]:
        """Return the rendered conversation, as a list of one prompt for the engine."""
        prompt = self.render(tokenizer, encode)
        if self.add_special_tokens:
            prompt["prompt_token_ids"] = encode(prompt["prompt"], True)
        return [prompt]

    def fit(
        self, params: SamplingParams, prompt: str, formats: Formats
    ) -> tuple[SamplingParams, NewParser | None]:
        """Return the parameters for the model's formats and for required calls, and a sample's new parser."""
        choice = ToolChoice.read(self.tools, self.tool_choice)
        is_one, new_parser = self.parallel_tool_calls is False, None
        said = str(self.messages[-1].get("content") or "") if self.messages else ""
        if self.continue_final_message and said and formats.template is None:
            start = said.rfind("<think>")
            prompt = said[start:] if start > said.rfind("</think>") else "</think>"
        is_both = choice.shown and schema_of(params.structured_outputs) is not None
        knows_calls = bool(formats.tools or formats.template or choice.max_required or is_both)
        if (choice.shown and knows_calls) or formats.reasoning or formats.template:
            tools, forced = choice.tools if choice.shown else [], choice.max_required > 0 or is_both
            if formats.keeps_special_tokens:
                params = replace(params, skip_special_tokens=False)
            new_parser = partial(
                AnswerParser,
                *(formats, prompt, tools, forced),
                is_structured=params.structured_outputs is not None and not forced,
                max_calls=1 if is_one else MANY,
                params=params,
                begins_with_calls=is_both,
            )
        if choice.max_required or params.structured_outputs is None:
            self._structured_field = "tools"
        constrained = choice.constrain(params.structured_outputs, formats, prompt, not is_one)
        return replace(params, structured_outputs=constrained), new_parser

    def choice(
        self, progress: Progress, completion: CompletionOutput, output: RequestOutput, tokens: TokenNames
    ) -> dict[str, Any]:
        """Return a sample, or its next piece."""
        logprobs = None
        if self.logprobs:
            entries = zip(completion.token_ids, completion.logprobs or [], strict=False)
            num_top = self.top_logprobs or 0
            content = [
                self._token(token_id, clamped(entry[token_id]), tokens)
                | {"top_logprobs": [self._token(*one, tokens) for one in best_first(entry)[:num_top]]}
                for token_id, entry in entries
            ]
            logprobs = {"content": content}
        parser, is_stream = progress.parser, bool(self.stream)
        message: dict[str, Any] = {} if progress.has_begun else {"role": "assistant"}
        message |= parser.message(completion, is_stream) if parser else {"content": completion.text}
        common = self.common(progress, completion, output)
        if completion.finish_reason == "stop" and parser and parser.num_calls:
            common["finish_reason"] = "tool_calls"
        named = {"delta" if is_stream else "message": message}
        return {"index": progress.index, **named, "logprobs": logprobs, **common}

    def _token(self, token_id: int, logprob: Logprob, tokens: TokenNames) -> dict[str, Any]:
        text = logprob.decoded_token  # none of a character that the next token completes
        text = self.token_name(token_id, tokens[token_id].decode(errors="replace") if text is None else text)
        return {"token": text, "logprob": logprob.logprob, "bytes": list(tokens[token_id])}


class TokenizeRequest(Conversation, extra="forbid", strict=True):
    """A request to turn text or a conversation into token ids: vLLM's /tokenize."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel, extra="forbid", strict=True):
    """A request to turn token ids into text: vLLM's /detokenize."""

    model: str | None = None
    tokens: list[int]
