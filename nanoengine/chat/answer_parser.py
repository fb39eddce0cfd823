"""Tool calls and reasoning: turns text between a model's own tags into fields of OpenAI's messages.

The tags come from the tokenizer (`response_template`, transformers 5.13 and later), or else from the tables
below, by a mark in the chat template. `AnswerParser` splits the text as it arrives, and text that does not
parse stays text. Grammars enforce required calls and strict tools (tool_choice.py).

Sources: the chat templates of the models that each row names; transformers/utils/chat_parsing.
"""

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from transformers.utils.chat_parsing.response_templates import load_response_template

from nanoengine.chat.call_arguments import PARAMETER, CallEnd, listed, read_calls, read_content, typed
from nanoengine.extensions.structured.json_schemas import literal
from nanoengine.outputs import CompletionOutput
from nanoengine.sampling_params import SamplingParams

# ---- How models write ----------------------------------------------------------------------------

# Repetitions in patterns are bounded, so that no text takes quadratic time to search.


class ToolFormat(NamedTuple):
    """Describes how a model writes a tool call."""

    mark: str  # text that identifies a chat template of this format
    tags: dict[str, Any]  # in terms of transformers' response templates
    # If a call is plain JSON: the text around the JSON, and the key that holds the arguments.
    begin: str | None = None
    end: str = ""
    arguments: str = "arguments"

    @property
    def field(self) -> dict[str, Any]:
        """The response template's field for calls."""
        field = {"content": "json", "repeats": True, **self.tags}
        if "?P<name>" in self.tags["open_pattern"]:
            field["transform"] = {"name": "{name}", "arguments": "{content}"}
        return field


# gpt-oss: the beginning of a message's header, and the kind of its content at the end
CHANNEL = r"(?:<\|start\|>assistant)?<\|channel\|>"
MESSAGE = r"\s{0,9}(?:(?:<\|constrain\|>\s{0,9})?(?:application/)?(?:json|text|code))?\s{0,9}<\|message\|>"
TOOL_FORMATS = {
    # The first format with its mark in the chat template is chosen, so the more specific ones come first.
    "qwen3_coder": ToolFormat(
        "<function=",
        {
            "open_pattern": r"\s{0,9}<tool_call>\s{0,9}<function=(?P<name>[^>\n]{1,99})>",
            "close_pattern": r"</function>\s{0,9}</tool_call>\s{0,9}",
            "content": "xml-inline",
            "content_args": {"tag_pattern": PARAMETER},
        },
    ),
    "hermes": ToolFormat(  # Qwen 2.5 and 3, Hermes
        "<tool_call>",
        {"open_pattern": r"\s{0,9}<tool_call>\s{0,9}", "close_pattern": r"\s{0,9}</tool_call>\s{0,9}"},
        "<tool_call>\n",
        "\n</tool_call>",
    ),
    "mistral": ToolFormat(  # name[ARGS]{...}, or a list of calls from earlier models
        "[TOOL_CALLS]",
        {
            "open_pattern": r"\s{0,9}\[TOOL_CALLS\]\s{0,9}(?P<name>[\w.-]{0,99})"
            r"(?:(?:\[CALL_ID\]\w{1,99})?\[ARGS\]|(?=\[\s{0,9}\{))",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
        },
    ),
    "harmony": ToolFormat(  # gpt-oss
        "<|channel|>",
        {
            "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?"
            r"\s{1,9}to=(?:functions\.)?(?P<name>[\w.-]{1,99})"
            rf"(?:<\|channel\|>(?:commentary|analysis))?{MESSAGE}",
            "close_pattern": r"<\|call\|>|<\|end\|>",
        },
    ),
    "gemma4": ToolFormat(
        "<|tool_call>",
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]{1,99})",
            "close": "<tool_call|>",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
    ),
    "functiongemma": ToolFormat(
        "<start_function_call>",
        {
            "open_pattern": r"<start_function_call>call:(?P<name>[\w.-]{1,99})",
            "close": "<end_function_call>",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        },
    ),
    "llama3_json": ToolFormat(  # a call is the whole answer
        "<|python_tag|>",
        {"open_pattern": r"\A\s{0,9}<\|python_tag\|>\s{0,9}|\A\s{0,9}(?=(?:\[\s{0,9})?\{)"},
        begin="",
        arguments="parameters",
    ),
}
NO_TAG = "llama3_json"  # the format of required calls if the model's own format is not plain JSON

REASONING_FORMATS = {
    "harmony": (
        {"open_pattern": rf"{CHANNEL}analysis{MESSAGE}", "close_pattern": r"<\|end\|>"},
        "<|channel|>",
    ),
    "gemma4": ({"open": "<|channel>thought\n", "close": "<channel|>"}, "<|channel>"),
    "deepseek_r1": (
        {"open_pattern": r"\A\s{0,9}<think>\s{0,9}", "close_pattern": r"\s{0,9}</think>\s{0,9}"},
        "<think>",
    ),
}
# vLLM's other names for formats with the same tags.
SAME = {"qwen3": "deepseek_r1", "openai": "harmony", "openai_gptoss": "harmony", "qwen3_xml": "qwen3_coder"}
CONTENT = {"content": "text", "content_args": {"strip": False}}
FINAL = {  # the tags that harmony writes around content
    "open_pattern": rf"{CHANNEL}(?:final|commentary){MESSAGE}",
    "close_pattern": r"<\|end\|>|<\|return\|>",
    "repeats": True,
    "join": "",
}


class Formats(NamedTuple):
    """Describes how one model writes tool calls and reasoning. Chosen at startup."""

    tools: str | None  # a name of TOOL_FORMATS; None: unknown
    reasoning: str | None  # a name of REASONING_FORMATS
    template: dict[str, Any] | None  # the tokenizer's own response template, which overrides both
    special_tokens: dict[str, int]

    def describe(self) -> str:
        """Return the line that tells the user which formats are used."""
        if self.template is not None:
            return "tool calls and reasoning as the tokenizer's response_template says"
        return f"tool calls: {self.tools or 'left as text'}, reasoning: {self.reasoning or 'left as text'}"

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the tags are special tokens, so that the output text must keep special tokens."""
        if self.template is not None:
            return True
        fields = (TOOL_FORMATS[self.tools].field if self.tools else {}, self.reasoning_field)
        tags = json.dumps(fields).replace("\\", "")
        return any(token in tags for token in self.special_tokens)

    @property
    def reasoning_field(self) -> dict[str, Any]:
        """The response template's field for reasoning, empty if the format is unknown."""
        return CONTENT | REASONING_FORMATS[self.reasoning][0] if self.reasoning else {}

    def fields(self, has_tools: bool, forced: bool, is_structured: bool) -> dict[str, Any]:
        """Return the response template's fields for an answer. `AnswerParser` documents the arguments."""
        fields = {"reasoning": self.reasoning_field} if self.reasoning else {}
        if is_structured:
            return {**(fields if self.reasoning == "deepseek_r1" else {}), "content": CONTENT}
        if forced:
            fields["tool_calls"] = TOOL_FORMATS[self.forced_tools].field
            if self.forced_tools == NO_TAG:  # the grammar allows only calls, so one may be anywhere
                fields["tool_calls"]["open_pattern"] = r"\s{0,9}(?=\{)"
        elif has_tools and self.tools:
            fields["tool_calls"] = TOOL_FORMATS[self.tools].field
        is_harmony = "harmony" in (self.tools, self.reasoning) and not forced
        return {**fields, "content": CONTENT | (FINAL if is_harmony else {})}

    def preamble(self, prompt: str) -> str | None:
        """Return the grammar of the text allowed before structured output; None: no text is allowed."""
        if self.reasoning != "deepseek_r1" or thinking_is_over(prompt):
            return None
        begin, end = (literal(tag, self.special_tokens) for tag in ("<think>", "</think>"))
        # Text always ends before a special token. Before an ordinary tag it ends only if matched lazily.
        is_special = "</think>" in self.special_tokens
        start = "thought SPACE" if is_thinking(prompt) else f"({begin} thought SPACE)?"
        thought = f"thought{'' if is_special else '[lazy]'}: TEXT {end}"
        return f"start: {start}\n{thought}\nTEXT: /(.|\\n)*/\nSPACE: /\\s{{0,9}}/"

    @property
    def forced_tools(self) -> str:
        """The name of the format in which required calls are written."""
        name = NO_TAG if self.tools is None or self.template is not None else self.tools
        return name if TOOL_FORMATS[name].begin is not None else NO_TAG


def is_thinking(prompt: str) -> bool:
    """Return whether a prompt, or a thought that the answer continues, has an open <think> tag."""
    goes_on = prompt.startswith("<think>") and "</think>" not in prompt
    return goes_on or prompt.rstrip().endswith("<think>")


def thinking_is_over(prompt: str) -> bool:
    """Return whether the prompt ends with a closed thought, as where thinking is turned off."""
    return prompt.rstrip().endswith("</think>")


def chosen(setting: str, name: str, marks: dict[str, str], template: str) -> str | None:
    """Return the name of a format, chosen by its name or by its mark in the chat template; None for none."""
    name = SAME.get(name, name)
    if name == "auto":
        # GLM's calls are in hermes' tags, but not its JSON.
        found = (known for known, mark in marks.items() if mark in template)
        return next((known for known in found if known != "hermes" or "<arg_key>" not in template), None)
    if name not in (*marks, "none"):
        raise ValueError(f"{setting} must be auto, none or one of {[*marks]}, got {name!r}")
    return None if name == "none" else name


def choose_formats(tokenizer: Any, tools: str = "auto", reasoning: str = "auto") -> Formats:
    """Choose a model's formats by name, or by its tokenizer. Raises ValueError if one is unknown."""
    template = json.dumps(getattr(tokenizer, "chat_template", None), ensure_ascii=False)
    own = getattr(tokenizer, "response_template", None) if (tools, reasoning) == ("auto", "auto") else None
    if own is not None:
        try:
            load_response_template(own)
        except ValueError as error:
            raise ValueError(f"the tokenizer's response_template cannot be read: {error}") from None
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return Formats(
        chosen("tool_call_parser", tools, {name: one.mark for name, one in TOOL_FORMATS.items()}, template),
        chosen("reasoning_parser", reasoning, {n: m for n, (_, m) in REASONING_FORMATS.items()}, template),
        own,
        {token.content: token_id for token_id, token in added.items() if token.special},
    )


# ---- Parsing an answer ---------------------------------------------------------------------------


class Part(NamedTuple):
    """Holds a parsed piece of an answer."""

    kind: str  # "content", "reasoning" or "tool_calls"
    value: Any  # the text; for a call, its name and arguments
    text: str = ""  # how the model wrote the call; "" for further calls of the same text


def joined(parts: list[Part], kind: str) -> str:
    """Return the text of the parts of one kind."""
    return "".join(part.value for part in parts if part.kind == kind)


MANY = 1 << 30  # no limit on the calls in an answer
LOOK_BACK = 64  # how many characters before the position a pattern may look at

FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*(.*)")  # the first or the last line of a code block


def fence_after(fence: str, line: str) -> str:
    """Return the fence of the code block that is open after a line, given the one before it. "": none is."""
    found = FENCE.match(line)
    if found is None or (fence and not (found[1].startswith(fence) and not found[2])):
        return fence
    return "" if fence else found[1]


class Tag(NamedTuple):
    """Describes a tag that begins or ends a region of an answer."""

    pattern: Any
    may_grow: bool  # whether more text could make a match longer
    region: str | None  # the region after the tag


class AnswerParser:
    """Splits one sample's text into content, reasoning and tool calls as the text arrives."""

    def __init__(
        self,
        formats: Formats,
        prompt: str,  # its end may already open a region of the answer
        tools: list[dict[str, Any]],  # if there are none, text that looks like a call stays text
        forced: bool = False,  # a grammar forces the model to call the tools
        is_structured: bool = False,  # all text after the reasoning is content
        max_calls: int = MANY,  # further calls are left out
        params: SamplingParams | None = None,  # the request's, for its stop strings, which apply to content
        begins_with_calls: bool = False,  # there are no calls after content, which is structured output
    ) -> None:
        self.begins_with_calls = begins_with_calls
        self.params, self.held_back = params or SamplingParams(), ""
        self.max_calls, self.num_calls = max_calls, 0
        self.schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        own, prefix = formats.template, prompt
        if own is None or forced or is_structured:
            fields = formats.fields(bool(tools), forced, is_structured)
            if formats.reasoning == "deepseek_r1" and thinking_is_over(prompt):
                del fields["reasoning"]
            own = {"start_anchor": "\0", "fields": fields}
            is_open = formats.reasoning == "deepseek_r1" and is_thinking(prompt)
            prefix = prompt[prompt.rfind("<think>") :] if is_open else ""
        # In the formats above, text outside of any region is text. In a tokenizer's template it is dropped.
        self.loose = None if own is formats.template else "content"
        # A call without tags is one only if it names a tool, and so is one of harmony without "functions.".
        calls = formats.forced_tools if forced else formats.tools
        self.is_bare = own is not formats.template and calls == NO_TAG
        self.only_known = own is not formats.template and calls in (NO_TAG, "harmony")
        spec = load_response_template(own)
        if not tools:
            spec.fields.pop("tool_calls", None)
        # Calls are read here and not by transformers, so that a call that cannot be read stays text.
        self.call_field: Any = spec.fields.get("tool_calls")
        self.region = spec.implicit  # the open field's name; None: text is dropped

        def tags(name: str, kind: str, region: str | None) -> list[Tag]:
            names = "re", "literals", "literal_can_extend"
            pattern, literals, can_extend = (getattr(spec.fields[name], f"{kind}_{one}") for one in names)
            return [Tag(pattern, literals is None or can_extend, region)] if pattern is not None else []

        names = sorted(spec.fields)
        self.tags: dict[str | None, list[Tag]] = {None: []}
        self.tags |= {name: tags(name, "close", spec.implicit) for name in names}
        self.tags[spec.implicit][:0] = [tag for name in names for tag in tags(name, "open", name)]
        self.call: list[str] = []  # the tag and then the text of the open call, as far as they have arrived
        self.captures: dict[str, str] = {}  # the named groups of that tag
        self.first_end = 0  # the number of pieces in `call` up to the first end tag that is part of a value
        self.num_scanned = 0  # the number of pieces in `call` that `call_end` has seen
        self.matches: dict[Any, Any] = {}  # pattern -> its next match, searched from an earlier position
        self.buffer, self.position = spec.truncate_past_last_anchor(prefix) if prefix else "", 0
        self.num_dropped = -len(self.buffer)  # characters of the answer before the buffer
        self.thought_end = 0  # the number of characters of the answer up to the end of its last thought
        self.token_ids: list[int] = []  # the whole answer's
        self.fence = ""  # of the content's open code block
        self.line = ""  # the content's last line
        self.held: list[Part] = []  # a call in a code block that may be closed, and what follows
        list(self._parts_of(is_end=False))  # opens the prompt's last region; drops parts: they are no answer
        self.texts: list[str] = []  # the whole answer
        self.has_parts = False

    def feed(self, text: str) -> list[Part]:
        """Add text to the answer, and return the parts that this completes."""
        self.texts.append(text)
        done = max(0, self.position - LOOK_BACK)
        self.num_dropped += done
        self.buffer, self.position = self.buffer[done:] + text, self.position - done
        return list(self._outside_blocks(self._parts_of(is_end=False), is_end=False))

    def finish(self) -> list[Part]:
        """Return the text that was held back because it could have been part of a tag."""
        found = list(self._outside_blocks(self._parts_of(is_end=True), is_end=True))
        if not found and not self.has_parts and any(self.texts):  # a required tag never came: keep the text
            return [Part("content", "".join(self.texts))]
        return found

    def message(self, completion: CompletionOutput, is_stream: bool) -> dict[str, Any]:
        """Return OpenAI's message, or the piece of it that this output adds."""
        self.token_ids += completion.token_ids
        parts = self.feed(completion.text)
        if completion.finish_reason is not None:
            parts += self.finish()
        content = self._before_stop(joined(parts, "content"), completion)
        reasoning, calls = joined(parts, "reasoning"), []
        for part in parts:
            if part.kind == "tool_calls" and self.num_calls < self.max_calls:
                place = {"index": self.num_calls} if is_stream else {}
                name = f"call_{uuid.uuid4().hex[:24]}"
                calls.append({**place, "id": name, "type": "function", "function": part.value})
                self.num_calls += 1
        message: dict[str, Any] = {"content": content or (None if calls else "")}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return message | ({"tool_calls": calls} if calls else {})

    def content_of(self, text: str) -> str:
        """Add text to the answer, and return the content that this completes."""
        return joined(self.feed(text), "content")

    def _before_stop(self, content: str, completion: CompletionOutput) -> str:
        """Return content without what follows a stop string. Holds back what may begin one."""
        stop, content = completion.stop_reason, self.held_back + content
        if completion.finish_reason is None:
            end = max(0, len(content) - max(map(len, self.params.stop_strings), default=1) + 1)
        elif completion.finish_reason == "stop" and isinstance(stop, str):
            # Earlier ones were among the first min_tokens.
            end = content.rfind(stop) if self.params.min_tokens else content.find(stop)
            end += len(stop) if self.params.include_stop_str_in_output else 0
        else:
            end = len(content)
        self.held_back = content[end:]
        return content[:end]

    def _outside_blocks(self, parts: Iterable[Part], is_end: bool) -> Iterator[Part]:
        """Yield the parts. A call in a code block is held back until the block ends: it is text then."""
        for part in parts:
            is_call, text = part.kind == "tool_calls", part.value if part.kind == "content" else part.text
            if is_call:  # of its lines, those before and after it count
                if self._ends_block(text[: len(text) - len(text.lstrip())]):
                    yield from self._held_as_text()
                text = f"x{text[len(text.rstrip()) :]}"
            is_held = self.held or (is_call and fence_after(self.fence, self.line + "x"))
            if is_held:
                self.held.append(part)
            else:
                yield part
            if self._ends_block(text):
                yield from self._held_as_text()
        if is_end:
            yield from self._held_as_text() if self._ends_block("\n") else self.held

    def _held_as_text(self) -> Iterator[Part]:
        held, self.held = self.held, []
        return (Part("content", part.text) if part.kind == "tool_calls" else part for part in held)

    def _ends_block(self, text: str) -> bool:
        """Add text to the content's lines, and return whether a code block ends in it."""
        *lines, self.line = (self.line + text).split("\n")
        self.line, is_closed = self.line[:99], False
        for line in lines:
            was_open, self.fence = bool(self.fence), fence_after(self.fence, line)
            is_closed = is_closed or (was_open and not self.fence)
        return is_closed

    def _parts_of(self, is_end: bool) -> Iterator[Part]:
        """Go from tag to tag like transformers' `ResponseParser`, but look at each character only once.

        `ResponseParser` copies the whole text for each piece, and searches the rest of it for each tag.
        """
        self.matches = {}
        num_empty = 0
        while True:
            match, tag, end = self._next_tag(is_end)
            if num_empty > 2:  # the template's regions open and close without any text: stop
                match, end = None, len(self.buffer)
            start, self.position = self.position, end
            yield from self._take(self.buffer[start:end])
            if match is None:
                if is_end and self.call:
                    yield from self._end_call("")
                if self.position == len(self.buffer) or not is_end:
                    break
                continue
            if tag not in self.tags[self.region]:
                continue
            if self.call and not self._is_end_of_call():
                self.first_end = self.first_end or len(self.call) + bool(match[0])
                self.position = max(match.end(), end + 1)
                self.call.append(self.buffer[end : self.position])
                continue
            num_empty = num_empty + 1 if match.end() == start else 0
            self.position = match.end()
            yield from self._end_call(match[0])
            self.region = tag.region
            if self.region == "tool_calls":
                self.call, self.first_end, self.num_scanned = [match[0]], 0, 1
                self.call_end = CallEnd(self.call_field)
                self.captures = {name: text for name, text in match.groupdict().items() if text is not None}

    def _is_end_of_call(self) -> bool:
        """Return whether the tag at the position ends the open call, and is no part of a value in it."""
        text, self.num_scanned = "".join(self.call[self.num_scanned :]), len(self.call)
        return self.call_end.is_reached(text)

    def _next_tag(self, is_end: bool) -> tuple[Any, Any, int]:
        """Return the next certain tag as (match, tag), and where the text before any possible tag ends."""
        size = end = len(self.buffer)
        certain = []
        for tag in self.tags[self.region]:
            match = self.matches.get(tag.pattern)
            if tag.pattern not in self.matches or (match is not None and match.start() < self.position):
                match = tag.pattern.search(self.buffer, self.position, partial=not is_end)
                self.matches[tag.pattern] = match
            if match is None:
                continue
            may_grow = match.end() == size and (tag.may_grow or match.start() == size)
            if not is_end and (match.partial or may_grow):
                end = min(end, match.start())
            else:
                certain.append((match, tag))
        first: Any = min(certain, key=lambda one: (one[0].start(), -one[0].end()), default=None)
        is_certain = first is not None and first[0].start() < end
        return (*first, first[0].start()) if is_certain else (None, None, end)

    def _take(self, text: str) -> Iterator[Part]:
        """Add text to the open region."""
        if self.region == "tool_calls":
            self.call.append(text)
        elif text and (region := self.region or self.loose) is not None:
            self.has_parts = True
            if self.begins_with_calls and self.region == "content" and text.strip():
                self.tags[self.region] = []
            is_thought = region in ("reasoning", "reasoning_content", "thinking")
            if is_thought:
                self.thought_end = max(0, self.num_dropped + self.position)
            yield Part("reasoning" if is_thought else "content", text)

    def _end_call(self, end: str) -> list[Part]:
        """Return the calls in a region that ends, or its text with its tags if they cannot be read."""
        call, self.call = self.call, []
        if not call:
            return []
        self.has_parts = True
        try:
            text, rest = "".join(call[1:]), ""
            if self.is_bare:
                read, rest = read_calls(text)
            else:
                read = read_content(text, self.call_field, self.captures)
            if isinstance(read, dict) and read.get("name") == "":  # a list of calls, each with its own name
                read = read["arguments"]
            calls = [Part("tool_calls", self._call_of(one)) for one in listed(read)]
            calls[0] = calls[0]._replace(text="".join([*call, end]).removesuffix(rest))
            return [*calls, *([Part("content", rest)] if rest else [])]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pieces = [*call, end]
            num_kept = self.first_end or len(pieces)
            kept, rest = "".join(pieces[:num_kept]), "".join(pieces[num_kept:])
            self._take_back(rest, kept)
            return [Part("content", kept)]

    def _take_back(self, text: str, before: str) -> None:
        """Go back to before this text, which precedes the position, and leave the open call."""
        if not text:
            return
        self.region = self.tags["tool_calls"][0].region
        if len(text) <= self.position:
            self.position -= len(text)
            self.matches.pop(self.tags["tool_calls"][0].pattern, None)
        else:
            self.num_dropped += self.position - len(before[-LOOK_BACK:]) - len(text)
            self.buffer = before[-LOOK_BACK:] + text + self.buffer[self.position :]
            self.position, self.matches = len(before[-LOOK_BACK:]), {}

    def _call_of(self, read: Any) -> dict[str, str]:
        """Return a call's name, and its arguments as JSON. Raises ValueError if it is not a call."""
        call = read.get("function", read) if isinstance(read, dict) else None
        if isinstance(call, str):  # {"type": "function", "function": "name", "parameters": ...}
            call = read | {"name": call}
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("no call")
        if self.only_known and call["name"] not in self.schemas:
            raise ValueError("no tool has this name")
        if self.is_bare and not call.keys() & {"arguments", "parameters"}:
            raise ValueError("no arguments")
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("no arguments")
        arguments = typed(arguments, self.schemas.get(call["name"], {}), self.call_field.content == "json")
        return {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
