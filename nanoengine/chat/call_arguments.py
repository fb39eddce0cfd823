"""The syntax inside a tool call: which end tag ends the call, and the values that its text holds."""

import ast
import json
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from transformers.utils.chat_parsing.content_parsers import process_field

from nanoengine.extensions.structured.json_schemas import target_of

# The arguments of qwen3_coder. Marks a field that `read_parameters` reads, whose rules no pattern expresses.
PARAMETER = r"<parameter=(?P<key>[^>\n]{1,99})>\n?(?P<value>.*?)\n?</parameter>"
BEGIN, END = r"<tool_call>\s{0,9}<function=", r"</function>\s{0,9}</tool_call>"
# An argument's end is followed by another argument or by the end of the call, else it is part of the value.
PIECES = re.compile(
    rf"(?P<begin>{BEGIN})|(?P<end>{END})|<parameter=(?P<key>[^>\n]{{1,99}})>"
    r"|\n?</parameter>(?=\s{0,99}(?:<parameter=|\Z))"
)
# A string in JSON, which is left alone, or a key without quotes
BARE_KEY = re.compile(
    r'"(?:[^"\\]|\\.)*+"|(?<=[{,])\s*([^\s"\[\]{},:][^"\[\]{},:]{0,99}?)\s{0,9}:', re.DOTALL
)
IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*+')


class CallEnd:
    """Decides which end tag ends a call. A tag inside a value is part of the value."""

    def __init__(self, field: Any) -> None:
        args = field.content_args
        self.has_parameters, self.is_json = args.get("tag_pattern") == PARAMETER, field.content == "json"
        self.quotes = {'"': '"', **dict(args.get("string_delims", []))}
        self.opening = re.compile("|".join(map(re.escape, (*self.quotes, "\\"))))
        self.quote = ""  # ends the string that is open
        self.num_open, self.has_arguments = 1, False  # the call, and examples of calls in its arguments
        self.is_broken = False  # the call cannot be read, so the first end tag ends it

    def is_reached(self, text: str) -> bool:
        """Return whether an end tag ends the call. `text` is what precedes it, from the last tag on."""
        if self.has_parameters:
            return self._after_parameters(text)
        return not self.is_json or self._after_strings(text)

    def _after_parameters(self, text: str) -> bool:
        num_begun = len(re.findall(BEGIN, text))
        # Another call begins after an end that was not taken for one: its last argument was never closed.
        self.is_broken = self.is_broken or (self.num_open <= 0 and num_begun > 0)
        self.num_open += num_begun - 1
        self.has_arguments = self.has_arguments or "<parameter=" in text
        is_closed = not self.has_arguments or text.rstrip().endswith("</parameter>")
        return self.is_broken or (self.num_open <= 0 and is_closed)

    def _after_strings(self, text: str) -> bool:
        position = 0
        while not self.is_broken:
            if not self.quote:
                found = self.opening.search(text, position)
                if found is None:
                    return True
                self.is_broken = found[0] == "\\"
                self.quote, position = self.quotes.get(found[0], ""), found.end()
                continue
            if self.quote == '"':
                inside: Any = IN_STRING.match(text, position)
                end = inside.end()
                self.is_broken = end < len(text) and text[end] != '"'
            else:
                end = text.find(self.quote, position)
            if end in (-1, len(text)):
                return False
            position, self.quote = end + len(self.quote), ""
        return True


def read_content(text: str, field: Any, captures: dict[str, str]) -> Any:
    """Parse a region's text by its field, like transformers' `process_field`, but in linear time."""
    args = field.content_args
    if args.get("tag_pattern") == PARAMETER:
        text = json.dumps(read_parameters(text))
        field = replace(field, content="json", content_args={})
    elif field.content == "json" and (args.get("string_delims") or args.get("unquoted_keys")):
        text = as_json(text, dict(args.get("string_delims", [])), args.get("unquoted_keys", False))
        field = replace(field, content_args={"allow_non_json": args.get("allow_non_json", False)})
    return process_field(text, field, captures)


def read_parameters(text: str) -> dict[str, str]:
    r"""Return the arguments of a call of qwen3_coder. Raises ValueError if one is not closed.

    >>> read_parameters("<parameter=a>\n1 </parameter> 2\n</parameter>\n<parameter=b>3</parameter>")
    {'a': '1 </parameter> 2', 'b': '3'}
    """
    arguments: dict[str, str] = {}
    name, start, num_open = None, 0, 0  # the open argument or its end, and calls in it, which are examples
    for found in PIECES.finditer(text):
        if found["begin"] or found["end"]:
            num_open = max(0, num_open + (1 if found["begin"] else -1))
        elif num_open:
            continue
        elif name is None:
            if not found["key"] or text[start : found.start()].strip():
                break
            name, start = found["key"], found.end() + text.startswith("\n", found.end())
        elif not found["key"]:
            arguments[name], name, start = text[start : found.start()], None, found.end()
    if name is not None or text[start:].strip():
        raise ValueError(f"text outside of arguments, or an argument that is not closed, at {start}")
    return arguments


def read_calls(text: str) -> tuple[list[Any], str]:
    r"""Return the JSON values at the beginning of a text, one after the other, and the text after them.

    >>> read_calls('{"a": 1}; [2, 3]\n\nThese are calls.')
    ([{'a': 1}, 2, 3], 'These are calls.')
    """
    decoder, position = json.JSONDecoder(), 0
    values: list[Any] = []
    while found := re.compile(r"[\s;,]*(?=[\[{])").match(text, position):
        try:
            value, position = decoder.raw_decode(text, found.end())
        except ValueError:
            if not values:
                raise
            break
        values += listed(value)
    rest = text[position:].lstrip()
    return values, "" if rest == ";" else rest


def as_json(text: str, quotes: dict[str, str], bare_keys: bool) -> str:
    """Rewrite JSON with other quotes, and possibly unquoted keys, as standard JSON."""

    def with_keys(text: str) -> str:
        if not bare_keys:
            return text
        return BARE_KEY.sub(lambda found: f'"{found[1]}":' if found[1] else found[0], text)

    pieces, position = [], 0
    opening = re.compile("|".join(map(re.escape, quotes)) or r"(?!)")
    while quote := opening.search(text, position):
        end = text.find(quotes[quote[0]], quote.end())
        if end < 0:
            break
        string = json.dumps(text[quote.end() : end])
        pieces += [with_keys(text[position : quote.start()]), string]
        position = end + len(quotes[quote[0]])
    return "".join([*pieces, with_keys(text[position:])])


def typed(arguments: dict[str, Any], schema: dict[str, Any], is_json: bool) -> dict[str, Any]:
    """Return a call's arguments with the types of their schema. In JSON, what may be a string is one."""
    members, others = schema.get("properties") or {}, schema.get("additionalProperties")
    found = {}
    for name, value in arguments.items():
        kinds = kinds_of(members.get(name, others), schema) or {"string"}
        found[name] = value if is_json and "string" in kinds else cast_to(kinds, value)
    return found


def cast_to(kinds: set[str], value: Any) -> Any:
    """Convert a value written as text to one of these types of JSON. Returns it unchanged if that fails."""
    if not isinstance(value, str) or kinds == {"string"}:
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            found = read(value.strip())
            json.dumps(found, allow_nan=False)  # rejects Python values that JSON cannot hold, such as sets
            # What is none of the types is more likely text, if text is one of them.
            return found if "string" not in kinds or (kinds - {"string"}) & NAMES[type(found)] else value
    return value


NAMES = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"}, dict: {"object"}}
NAMES |= {list: {"array"}, tuple: {"array"}, type(None): {"null"}}

# Types of JSON, and keywords of schemas that say something about only this type
IMPLIED = {
    "object": {"properties", "additionalProperties", "patternProperties", "required"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}


def kinds_of(schema: Any, root: Any, seen: set[str] | None = None) -> set[str]:
    """Return the types that a JSON schema names anywhere but in its members. Empty: it names none.

    >>> sorted(kinds_of({"anyOf": [{"$ref": "#/$defs/n"}, {"const": None}]}, {"$defs": {"n": {"enum": [7]}}}))
    ['integer', 'null', 'number']
    """
    if not isinstance(schema, dict):
        return set()
    seen, kinds = set() if seen is None else seen, {*map(str, listed(schema.get("type", [])))}
    for value in [*listed(schema.get("enum", [])), *([schema["const"]] if "const" in schema else [])]:
        kinds |= NAMES[type(value)]
    kinds |= {kind for kind, names in IMPLIED.items() if schema.keys() & names}
    parts = [part for name in ("anyOf", "oneOf", "allOf") for part in listed(schema.get(name, []))]
    if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        parts.append(target_of(reference, root))
    return kinds.union(*(kinds_of(part, root, seen) for part in parts))


def listed(value: Any) -> list[Any]:
    """Return the value itself if it is a list, else a list of the value."""
    return value if isinstance(value, list) else [value]
