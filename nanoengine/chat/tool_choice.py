"""The tools of a chat: which of them a model sees, and the grammars of required calls and of strict tools.

The grammars are in llguidance's Lark. That of strict tools allows any text, but after the tag of a call only
a call that fits, as the model writes it: as JSON, or for qwen3_coder with arguments that are text where the
schema allows a string.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from nanoengine.chat.answer_parser import MANY, TOOL_FORMATS, Formats
from nanoengine.chat.call_arguments import kinds_of
from nanoengine.extensions.structured.json_schemas import closed, literal, mapped, target_of
from nanoengine.sampling_params import StructuredOutputsParams

Tools = list[dict[str, Any]]
# JSON as chat templates write it, with Python's json.dumps; and as a model may write it unasked
AS_TRAINED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SPACED = {"whitespace_pattern": r" ?|\n {0,40}"}


def is_object_schema(schema: Any) -> bool:
    """Return whether this is None, or a JSON schema of an object. Checks the top level only."""
    if not isinstance(schema, dict):
        return schema is None
    return schema.get("type", "object") == "object" and isinstance(schema.get("properties", {}), dict)


class ToolChoice(NamedTuple):
    """Records which tools a chat shows the model, and whether the model has to call one."""

    tools: list[dict[str, Any]]
    shown: bool
    max_required: int  # limit on required calls: 0 (none is required), 1, or MANY

    @classmethod
    def read(cls, tools: Any, choice: Any) -> "ToolChoice":
        """Read OpenAI's `tools` and `tool_choice`. Raises ValueError or TypeError if one is malformed."""
        tools, names = [] if tools is None else tools, []
        if not isinstance(tools, list):
            raise TypeError(f"tools must be a list, got a {type(tools).__name__}")
        for tool in tools:
            match tool:
                case {"function": {"name": str(name), **function}} if (
                    name
                    and tool.get("type", "function") == "function"
                    and is_object_schema(function.get("parameters"))
                ):
                    names.append(name)
                case _:
                    raise ValueError(
                        'tools must hold {"type": "function", "function": {"name": ..., "parameters": the '
                        f"JSON schema of an object}}}}, got {tool!r:.200}"
                    )
        if choice in (None, "auto", "none"):
            return cls(tools, bool(tools) and choice != "none", 0)
        if not tools:
            raise ValueError("tool_choice needs tools")
        if choice == "required":
            return cls(tools, True, MANY)
        match choice:
            case {"function": {"name": name}} | {"name": name} if (
                name in names and choice.get("type", "function") == "function"
            ):
                return cls([tools[names.index(name)]], True, 1)
        raise ValueError(f"tool_choice must be none, auto, required or one of {names}, got {choice!r}")

    def constrain(
        self, asked: StructuredOutputsParams | None, formats: Formats, prompt: str, parallel: bool
    ) -> StructuredOutputsParams | None:
        """Return the structured outputs for an answer to this prompt, with a preamble for reasoning."""
        answer = schema_of(asked)
        if self.max_required or (self.shown and answer is not None):
            if asked is not None and answer is None:
                raise ValueError("tool_choice requires a tool call, which excludes other structured outputs")
            many = parallel and self.max_required != 1
            calls = required_calls(formats, self.tools, many, None if self.max_required else answer)
            asked = StructuredOutputsParams(grammar=calls)
        elif self.shown and asked is None and (strict := strict_calls(formats, self.tools)):
            asked = StructuredOutputsParams(grammar=strict)
        if asked is None or asked.preamble is not None:
            return asked
        return replace(asked, preamble=formats.preamble(prompt))


def schema_of(asked: StructuredOutputsParams | None) -> Any:
    """Return the JSON schema of structured outputs, or None if they are described in another way."""
    if asked is None or not (asked.json_object or asked.json is not None):
        return None
    if asked.json_object:
        return {"type": "object"}
    return json.loads(asked.json) if isinstance(asked.json, str) else asked.json


# ---- Required calls ------------------------------------------------------------------------------


def required_calls(formats: Formats, tools: Tools, many: bool, answer: Any = None) -> str:
    """Return the grammar of one call of these tools, of several if `many`, or of JSON that fits `answer`."""
    kind = TOOL_FORMATS[formats.forced_tools]
    if not kind.begin:
        return f"start: {as_json(call_schema(tools, kind.arguments, answer), AS_TRAINED)}"
    call = as_json(call_schema(tools, kind.arguments), AS_TRAINED)
    begin, end = (literal(text, formats.special_tokens) for text in (kind.begin, kind.end))
    more = ' ("\\n" one)*' if many else ""
    start = f"start: one{more}{'' if answer is None else ' | answer'}"
    rules = [] if answer is None else [f"answer: %json {json.dumps(answer)}"]
    return "\n".join((start, f"one: {begin} {call} {end}", *rules))


def as_json(schema: dict[str, Any], style: dict[str, Any]) -> str:
    """Return the grammar of JSON that fits a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': style})}"


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which allows only those that it names."""
    return {"type": "object", "properties": {}, **closed(tool["function"].get("parameters") or {})}


def call_schema(tools: Tools, key: str, answer: Any = None) -> dict[str, Any]:
    """Return the JSON schema of a call of one of the tools, with its arguments under `key`, or of an answer.

    It is one schema, because a grammar's lexer does not go back from the text of a call to that of an answer.
    """
    parts = [*map(parameters_of, tools), *([] if answer is None else [answer])]
    definitions = {str(i): moved(part, f"#/$defs/{i}") for i, part in enumerate(parts)}
    kinds: list[dict[str, Any]] = [{"$ref": f"#/$defs/{i}"} for i in definitions]
    for i, tool in enumerate(tools):
        call = {"name": {"const": tool["function"]["name"]}, key: kinds[i]}
        kinds[i] = {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
    return {"anyOf": kinds, "$defs": definitions}


def moved(schema: Any, where: str) -> Any:
    """Return a schema whose own references still resolve where it is a part of another schema."""

    def move(one: dict[str, Any]) -> dict[str, Any]:
        is_local = str(one.get("$ref", "")).startswith("#")
        return {**one, "$ref": where + one["$ref"][1:]} if is_local else one

    return mapped(schema, move)


# ---- Strict tools --------------------------------------------------------------------------------

TERMINALS = 'TEXT: /(.|\\n)*/\nSPACE: /\\s{0,9}/\nLINE: "\\n"?'
NO_THOUGHT = r" & ~/\s{0,9}<think>(.|\n)*/"  # a thought at the start is part of the preamble


def strict_calls(formats: Formats, tools: Tools) -> str | None:
    """Return the grammar of text with calls of these tools, or None if none is strict or has a grammar."""
    rules_of = None if formats.template else STRICT.get(formats.tools or "")
    if rules_of is None or not any(tool["function"].get("strict") for tool in tools):
        return None
    free: dict[str, Any] = {"parameters": {"type": "object"}}
    tools = [one if one["function"].get("strict") else {"function": one["function"] | free} for one in tools]
    first = f"FIRST: TEXT{NO_THOUGHT if formats.reasoning == 'deepseek_r1' else ''}"
    return "\n".join((*rules_of(tools, formats.special_tokens), first, TERMINALS))


def text_with(tag: str, special: dict[str, int]) -> list[str]:
    """Return the rules of text in which a call follows each tag."""
    # A special token ends text by itself. An ordinary tag ends it only if matched lazily.
    lazy, end = "" if tag in special else "[lazy]", literal(tag, special)
    start = "start: first call (head call)* TEXT | FIRST"
    return [start, f"first{lazy}: FIRST {end}", f"head{lazy}: TEXT {end}"]


def hermes(tools: Tools, special: dict[str, int]) -> list[str]:
    """Return the rules of text with calls of hermes."""
    calls, end = as_json(call_schema(tools, "arguments"), SPACED), literal("</tool_call>", special)
    return [*text_with("<tool_call>", special), f"call: SPACE {calls} SPACE {end}"]


def mistral(tools: Tools, special: dict[str, int]) -> list[str]:
    """Return the rules of text with calls of mistral at its end."""
    tag, call_id, arguments = (literal(name, special) for name in ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
    schema, (_, first, _) = call_schema(tools, "arguments"), text_with("[TOOL_CALLS]", special)
    listed = {"type": "array", "minItems": 1, "items": {"anyOf": schema.pop("anyOf")}}
    calls = [as_json(listed | schema, SPACED)]
    for tool in tools:
        head = f"{json.dumps(tool['function']['name'])} ({call_id} /\\w{{1,99}}/)? {arguments}"
        calls.append(f"{head} {as_json(parameters_of(tool), SPACED)}")
    return [f"start: first call ({tag} call)* | FIRST", first, f"call: SPACE ({' | '.join(calls)})"]


def llama3_json(tools: Tools, special: dict[str, int]) -> list[str]:
    """Return the rules of an answer that is either text or calls, which need no tag."""
    schema, tag = call_schema(tools, "parameters"), literal("<|python_tag|>", special)
    schema["$defs"]["call"] = {"anyOf": schema["anyOf"]}
    call = {"$ref": "#/$defs/call"}
    schema["anyOf"] = [call, {"type": "array", "minItems": 1, "items": call}]
    return [
        f"start: SPACE (PROSE | ({tag} SPACE)? one (SEPARATOR one)*)?",
        f"one: {as_json(schema, SPACED)}",
        r"PROSE: /([^\s{\[]|\[\s{0,9}[^\s{])(.|\n)*|\[\s{0,9}/ & ~/<\|python_tag\|>(.|\n)*/",
        r"SEPARATOR: /\s{0,9}[;,]?\s{0,9}/",
    ]


def harmony(tools: Tools, special: dict[str, int]) -> list[str]:
    """Return the rules of messages of harmony, of which only calls have a recipient in their headers."""
    names = "start", "channel", "constrain", "message", "end", "call", "return"
    *heads, message, end, call, over = (literal(f"<|{name}|>", special) for name in names)
    head, calls, rules = f"({' | '.join(heads)})", "", []
    for i, tool in enumerate(tools):
        arguments = as_json(parameters_of(tool), SPACED)
        calls += f" | (WORDS {head})* TO_{i} AFTER ({head} WORDS)* {message} {arguments}"
        rules.append(rf"TO_{i}: WORDS /to=(functions\.)?{re.escape(tool['function']['name'])}/")
    return [
        f"start: message (({end} | {call} | {over}) message)*",
        f"message: WORDS ({head} WORDS)* ({message} TEXT)?{calls}",
        r"WORDS: TEXT & ~/(.|\n)*to=(.|\n)*/",
        r"AFTER: (/\s/ WORDS)?",
        *rules,
    ]


def qwen3_coder(tools: Tools, special: dict[str, int]) -> list[str]:
    """Return the rules of text with calls of qwen3_coder."""
    calls, end = " | ".join(f"call_{i}" for i in range(len(tools))), literal("</tool_call>", special)
    rules = [*text_with("<tool_call>", special), f"call: SPACE ({calls}) SPACE {end}"]
    rules += ['text[lazy]: TEXT "</parameter>"', 'free[lazy]: TEXT "</function>"']
    for i, tool in enumerate(tools):
        arguments, schema = "", parameters_of(tool)
        for j, (name, part) in enumerate(schema["properties"].items()):
            where = f"#/properties/{name.replace('~', '~0').replace('/', '~1')}"
            rules += value_rules(f"value_{i}_{j}", part, where, schema)
            may_miss = "" if name in schema.get("required", ()) else "?"
            arguments += f" ({json.dumps(f'<parameter={name}>')} value_{i}_{j} SPACE){may_miss}"
        inside = f'SPACE{arguments} "</function>"' if tool["function"].get("strict") else "free"
        begin = json.dumps(f"<function={tool['function']['name']}>")
        rules.append(f"call_{i}: {begin} {inside}")
    return rules


def value_rules(name: str, schema: Any, where: str, root: dict[str, Any]) -> list[str]:
    """Return the rules of an argument of qwen3_coder, up to its end tag. `where` is its reference in root.

    Where it may be a string, only the values that the schema lists and the limits of a plain string hold.
    """
    if (texts := texts_of(schema, root)) is not None:
        listed = " | ".join(map(json.dumps, texts))
        return [f'{name}: LINE ({listed}) LINE "</parameter>"']
    if "string" not in (kinds_of(schema, root) or {"string"}):
        whole = {"$ref": f"#/$defs/tool{where[1:]}", "$defs": {"tool": moved(root, "#/$defs/tool")}}
        return [f'{name}: LINE {as_json(whole, SPACED)} LINE "</parameter>"']
    if not (isinstance(schema, dict) and schema.keys() & {"minLength", "maxLength", "pattern"}):
        return [f"{name}: text"]
    size = f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"
    pattern = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", schema.get("pattern", ""))
    left, right = ("" if begins else r"(.|\n)*" for begins in (pattern[:1] == "^", pattern[-1:] == "$"))
    inside = f"/{left}({pattern.removeprefix('^').removesuffix('$')}){right}/"
    return [f'{name}[lazy]: "\\n" {name.upper()} "\\n</parameter>"', f"{name.upper()}: {size} & {inside}"]


def texts_of(schema: Any, root: dict[str, Any], depth: int = 9) -> list[str] | None:
    """Return the texts of a schema's values, or None if it does not list them."""
    if not isinstance(schema, dict) or not depth:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return texts_of(target_of(reference, root), root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return [one if isinstance(one, str) else json.dumps(one) for one in values]
    if schema.get("type") == "null":
        return ["null"]
    parts = [texts_of(one, root, depth - 1) for one in schema.get("anyOf") or schema.get("oneOf") or ()]
    return [*chain(*filter(None, parts))] if parts and None not in parts else None


STRICT: dict[str, Callable[[Tools, dict[str, int]], list[str]]] = {
    one.__name__: one for one in (hermes, mistral, llama3_json, harmony, qwen3_coder)
}
