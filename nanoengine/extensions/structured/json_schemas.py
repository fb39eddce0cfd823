r"""Checks and rewrites JSON schemas before llguidance compiles them.

llguidance does not enforce three things correctly:

    a recursion that never ends     {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}. Refused.
    a class without a quote         `[^"]` in a pattern. If a class has every control character, llguidance
                                    allows every escape in a JSON string, `\"` too. Rewritten without U+0000.
    a divisor with many digits      `multipleOf` is computed in 32-bit arithmetic, which overflows. Refused.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

# Keywords whose value maps arbitrary names to schemas.
SCHEMAS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
VALUES = {"const", "default", "enum", "examples"}  # keywords whose values are not schemas
MAX_DIGITS = 8  # of a multipleOf: a remainder and one more digit then fit in 32 bits


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of the schema with every schema in it changed, innermost first."""
    if isinstance(schema, list):
        return [mapped(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name in SCHEMAS and isinstance(value, dict):
            result[name] = {key: mapped(one, change) for key, one in value.items()}
        else:
            result[name] = value if name in VALUES else mapped(value, change)
    return change(result)


def closed(schema: Any) -> Any:
    """Return the schema with additional properties disabled, where an object does not set them itself."""

    def close(one: dict[str, Any]) -> dict[str, Any]:
        is_object = one.keys() & {"properties", "patternProperties"}
        return {"additionalProperties": False, **one} if is_object else one

    return mapped(schema, close)


def checked_schema(schema: Any) -> Any:
    """Return the schema with patterns rewritten. Raises ValueError for a part that would not be enforced."""
    with suppress(AttributeError, TypeError):  # the schema is malformed: llguidance reports where
        check_recursion(schema)
    return mapped(schema, _with_quotable_patterns)


def checked_grammar(grammar: str) -> str:
    """Return a grammar in Lark with its JSON schemas checked, as in `checked_schema`."""
    decoder, parts, start = json.JSONDecoder(), [], 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        if found.start() >= start:
            try:
                schema, end = decoder.raw_decode(grammar, found.end())
            except ValueError:  # llguidance reports it
                break
            parts += [grammar[start : found.end()], json.dumps(checked_schema(schema))]
            start = end
    return "".join([*parts, grammar[start:]])


def literal(text: str, special: dict[str, int]) -> str:
    """Write text in llguidance's Lark: special tokens by their ids, other text in quotes.

    >>> literal("<a>b", {"<a>": 7})
    '<[7]> "b"'
    """
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def check_recursion(schema: Any) -> None:
    """Raise ValueError if the target of a reference always contains itself again."""
    ending: set[str] = set()  # references whose targets have a finite text
    references: dict[str, None] = {}

    def note(part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("$ref"), str):
            references[part["$ref"]] = None
        return part

    def ends(part: Any) -> bool:
        """Return whether the part has a finite text that uses only references that end. In doubt it has."""
        if not isinstance(part, dict):
            return True
        if isinstance(part.get("$ref"), str) and part["$ref"] not in ending:
            return False
        if part.keys() & {"const", "enum"}:
            return True
        for name in ("anyOf", "oneOf"):
            if part.get(name) and not any(map(ends, part[name])):
                return False
        needed = [*part.get("allOf", ())]
        if part.get("type") == "object":
            members, others = part.get("properties", {}), part.get("additionalProperties")
            others = None if "patternProperties" in part else others
            needed += [members.get(name, others) for name in part.get("required", ())]
        elif part.get("type") == "array":
            first, num = part.get("prefixItems", []), part.get("minItems", 0)
            needed += first[:num] + ([part.get("items")] if num > len(first) else [])
        return all(map(ends, needed))

    mapped(schema, note)
    num_ending = -1
    while num_ending < len(ending):  # the least fixed point
        num_ending = len(ending)
        for reference in reversed(references):  # definitions often precede those that they use
            if reference not in ending and ends(target_of(reference, schema)):
                ending.add(reference)
    if endless := [reference for reference in references if reference not in ending]:
        raise ValueError(
            f"the schema at $ref {endless[0]!r} has no finite text: it always contains itself again; "
            "make the recursive part optional"
        )


def target_of(reference: str, schema: Any) -> Any:
    """Return the target of a reference such as "#/$defs/x", or None for other kinds of references."""
    pointer = reference.split("/")
    if pointer.pop(0) != "#":
        return None
    for step in pointer:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        try:
            schema = schema[int(step) if isinstance(schema, list) else step]
        except (LookupError, TypeError, ValueError):  # llguidance reports it
            return None
    return schema


def _with_quotable_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with patterns rewritten by `quotable`, after checking multipleOf."""
    result = dict(schema)
    if isinstance(pattern := schema.get("pattern"), str):
        result["pattern"] = quotable(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        result["patternProperties"] = {quotable(pattern): one for pattern, one in named.items()}
        changed = [pattern for pattern in named if WITHOUT_NUL in quotable(pattern)]
        if changed and schema.get("additionalProperties") is not False:
            raise ValueError(
                f"patternProperties {changed[0]!r} excludes a quote or a backslash: this is enforced only "
                'with "additionalProperties": false'
            )
    divisor: Any = schema.get("multipleOf")
    is_number = isinstance(divisor, int | float) and not isinstance(divisor, bool)
    if is_number and abs(divisor) < float("inf"):
        _, digits, exponent = Decimal(str(divisor)).normalize().as_tuple()
        if len(digits) > MAX_DIGITS or not -MAX_DIGITS <= int(exponent) <= MAX_DIGITS - len(digits):
            raise ValueError(
                f"multipleOf must have at most {MAX_DIGITS} digits, before and after the point, got {divisor}"
            )
    return result


CLASS = re.compile(r"\\.|(\[\^?\]?(?:\\.|[^\]\\])*\])", re.DOTALL)
OPERATOR = re.compile(r"\\.|\[|&&|--|~~", re.DOTALL)  # in a class: operators in Rust, literal in ECMAScript
WITHOUT_NUL = r"&&[^\x00]"  # follows a class, inside brackets around both
MAY_BE_NUL = re.compile(r"\\(?:x\{?0|u\{?0|0|c@|[pP])|\x00")


def quotable(pattern: str) -> str:
    r"""Rewrite a pattern so that llguidance reads its classes as ECMAScript and quotes them correctly.

    U+0000 is removed from a class that contains U+0000 and excludes a quote or a backslash.

    >>> quotable('^[^"]{3}[^a][a-z[]$')
    '^[[^"]&&[^\\x00]]{3}[^a][a-z\\[]$'

    Raises:
        ValueError: U+0000 may also occur outside such a class, where it could be merged with the class.
    """

    def escape(found: re.Match[str]) -> str:
        text = found[0]
        return text if text[0] == "\\" else text[:-1] + "\\" + text[-1]

    def rewrite(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        written = "[" + OPERATOR.sub(escape, found[1][1:])
        try:
            nul, *others = (re.fullmatch(written, character) for character in '\0"\\')
        except re.error:  # Python has no such class: it may be one to rewrite
            return f"[{written}{WITHOUT_NUL}]"
        return f"[{written}{WITHOUT_NUL}]" if nul and not all(others) else written

    result = CLASS.sub(rewrite, pattern)
    outside = CLASS.sub(lambda found: "" if found[1] else found[0], pattern)
    if WITHOUT_NUL in result and MAY_BE_NUL.search(outside):
        raise ValueError(
            f"pattern {pattern!r} has a class without a quote or a backslash beside U+0000 or \\p: the two "
            "cannot be enforced together"
        )
    return result
