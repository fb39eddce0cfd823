r"""Checks and rewrites JSON schemas and grammars before llguidance compiles them.

llguidance accepts three kinds of forms that it does not enforce correctly:

    a part without a finite text    {"properties": {"next": {"$ref": "#"}}, "required": ["next"], ...}, or the
                                    rule `a: "x" a`. An output that begins such a part never ends. Refused.
    a class without a quote         `[^"]` in a pattern. If a class has every control character, llguidance
                                    allows every escape in a JSON string, `\"` too. Rewritten without U+0000.
    a divisor with many digits      `multipleOf` is computed in 32-bit arithmetic, which overflows. Refused.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

# Keywords whose value maps arbitrary names to schemas.
SCHEMAS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
VALUES = {"const", "default", "enum", "examples"}  # keywords whose values are not schemas
SCALARS = {"null", "boolean", "integer", "number", "string"}
MAX_DIVISOR, MAX_SCALE = 10**8, 8  # for multipleOf: a remainder and one more digit fit in 32 bits


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
    """Return the schema with patterns rewritten so that llguidance quotes them correctly.

    Raises:
        ValueError: a part of the schema has no finite text, or llguidance would not enforce it.
    """
    with suppress(AttributeError, TypeError):  # the schema is malformed: llguidance reports where
        Endings(schema).check()
    return mapped(schema, _with_quotable_patterns)


def checked_grammar(grammar: str) -> str:
    """Return a grammar in Lark with its JSON schemas checked.

    Raises:
        ValueError: `checked_schema` refuses one of its schemas, or a rule has no finite text.
    """
    decoder, parts, start = json.JSONDecoder(), [], 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        if found.start() >= start:
            try:
                schema, end = decoder.raw_decode(grammar, found.end())
            except ValueError:  # llguidance reports it
                break
            parts += [grammar[start : found.end()], json.dumps(checked_schema(schema))]
            start = end
    # Even indices of parts hold Lark, odd ones JSON. A JSON schema counts as one terminal.
    check_rules('""'.join([*parts[::2], grammar[start:]]))
    return "".join([*parts, grammar[start:]])


# ---- Finite texts --------------------------------------------------------------------------------


class Endings:
    """Finds the references of a schema whose targets have no finite text.

    A reference ends if a text of its target needs only references that end. The set of references that end is
    the least fixed point of this rule.
    """

    def __init__(self, schema: Any) -> None:
        self.root = schema
        self.targets: dict[str, Any] = {}  # reachable reference -> its target
        self.names: dict[str, Any] = {}  # $id or #anchor -> schema
        self.ending: set[str] = set()  # references known to end
        self.known: dict[int, bool] = {}  # id() of a schema -> whether it ends, given the current `ending`

        def note(one: dict[str, Any]) -> dict[str, Any]:
            self.names |= {one["$id"]: one} if isinstance(one.get("$id"), str) else {}
            self.names |= {f"#{one['$anchor']}": one} if isinstance(one.get("$anchor"), str) else {}
            return one

        mapped(schema, note)

    def check(self) -> None:
        """Raise ValueError if a reference does not end."""
        unseen = list(self._references(self.root))
        while unseen:
            reference = unseen.pop()
            if reference not in self.targets:
                self.targets[reference] = self._target(reference)
                unseen += self._references(self.targets[reference])
        num_ending = -1
        while num_ending < len(self.ending):
            num_ending = len(self.ending)
            self.known.clear()
            for name in reversed(self.targets):  # innermost first
                if name not in self.ending and self.ends(self.targets[name]):
                    self.ending.add(name)
        if endless := sorted(self.targets.keys() - self.ending):
            raise ValueError(
                f"the schema at $ref {endless[0]!r} has no finite text: it always contains itself again; "
                "make the recursive part optional"
            )

    def ends(self, schema: Any) -> bool:
        """Return whether the schema has a finite text, given the references known to end."""
        found = self.known.get(id(schema))
        if found is None:
            found = self.known[id(schema)] = self._ends(schema)
        return found

    def _ends(self, schema: Any) -> bool:
        parts = list(self._conjuncts(schema, set()))
        if any(part.get("$ref", None) not in self.ending for part in parts if "$ref" in part):
            return False
        if any(part.keys() & {"const", "enum"} for part in parts):
            return True
        for options in (part[name] for part in parts for name in ("anyOf", "oneOf") if name in part):
            if isinstance(options, list) and options and not any(map(self.ends, options)):
                return False
        types = {*SCALARS, "object", "array"}
        for part in parts:
            given = part.get("type", list(types))
            types &= set(given) if isinstance(given, list) else {given}
        if types & SCALARS or not types:  # llguidance refuses a schema without any type left
            return True
        return ("object" in types and self._object_ends(parts)) or (
            "array" in types and self._array_ends(parts)
        )

    def _object_ends(self, parts: list[dict[str, Any]]) -> bool:
        """Return whether an object with all required members, and at least minProperties of them, can end."""
        properties = [part["properties"] for part in parts if isinstance(part.get("properties"), dict)]
        patterns = [part["patternProperties"] for part in parts if "patternProperties" in part]
        others = [part.get("additionalProperties", True) for part in parts]

        def member_ends(name: str) -> bool:
            named = [members[name] for members in properties if name in members]
            named += [one for many in patterns for key, one in many.items() if _matches(key, name)]
            return all(map(self.ends, named or others))

        required = {name for part in parts for name in part.get("required", ())}
        if not all(map(member_ends, required)):
            return False
        if all(map(self.ends, others)) and False not in others:
            return True
        if any(self.ends(one) for many in patterns for one in many.values()):
            return True
        names = {name for members in properties for name in members}
        return sum(map(member_ends, names | required)) >= max(
            _number(part, "minProperties") for part in parts
        )

    def _array_ends(self, parts: list[dict[str, Any]]) -> bool:
        """Return whether an array with at least minItems items can end."""
        least = max(_number(part, "minItems") for part in parts)
        for part in parts:
            first = part.get("prefixItems", part["items"] if isinstance(part.get("items"), list) else [])
            rest = part.get("items", True)
            rest = part.get("additionalItems", True) if isinstance(rest, list) else rest
            needed = [*first[:least], *([rest] if least > len(first) else [])]
            if not all(map(self.ends, needed)):
                return False
        return True

    def _conjuncts(self, schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
        """Yield the schema, and all others that its texts must also conform to."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        yield schema
        for one in (*schema.get("allOf", ()), self.targets.get(schema.get("$ref", ""))):
            yield from self._conjuncts(one, seen)

    def _references(self, schema: Any) -> Iterator[str]:
        """Yield the references in a schema. Those in definitions are followed only when referenced."""
        if isinstance(schema, list):
            for one in schema:
                yield from self._references(one)
        elif isinstance(schema, dict):
            for name, value in schema.items():
                if name == "$ref" and isinstance(value, str):
                    yield value
                elif name in SCHEMAS and name not in ("$defs", "definitions") and isinstance(value, dict):
                    yield from self._references(list(value.values()))
                elif name not in VALUES and name not in ("$defs", "definitions"):
                    yield from self._references(value)

    def _target(self, reference: str) -> Any:
        """Return the target of a reference, or {} if there is none: llguidance reports that."""
        if reference in self.names:
            return self.names[reference]
        base, _, pointer = reference.partition("#")
        found = self.names.get(base, self.root if not base else {})
        for step in pointer.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and int(step) < len(found) else {}
            else:
                found = found.get(step, {}) if isinstance(found, dict) else {}
        return found


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _number(schema: dict[str, Any], name: str) -> int:
    value = schema.get(name, 0)
    return value if isinstance(value, int) else 0


# Terminals of Lark: they always have a finite text.
TERMINALS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/|<[^>\n]*>')
COMMENTS = re.compile(r"(\"(?:\\.|[^\"\\\n])*\"|/(?![/*])(?:\\.|[^/\\\n])+/)|//[^\n]*|#[^\n]*")
RULE = re.compile(r"^[ \t]*[!?]?([A-Za-z_][\w-]*)(?:\[[^\]]*\])?[^:|\"\n]*:(?!:)", re.MULTILINE)
SYMBOL = re.compile(r"[A-Za-z_][\w-]*|[()\[\]|?*+]|\{[^}]*\}|~\s*[\d.]+|\"\"")


def check_rules(grammar: str) -> None:
    """Raise ValueError if a rule of a grammar in Lark has no finite text: its recursion never ends."""
    grammar = COMMENTS.sub(lambda found: found[1] or "", grammar)
    _, *pieces = RULE.split(TERMINALS.sub('""', grammar))
    rules = {name: SYMBOL.findall(body) for name, body in zip(pieces[::2], pieces[1::2], strict=True)}
    endless = set(rules)
    while ending := {name for name in endless if _alternatives_end(iter([*rules[name], ")"]), endless)}:
        endless -= ending
    if endless:
        raise ValueError(
            f"the rule {sorted(endless)[0]!r} has no finite text: it always contains itself again; "
            "give it an alternative without recursion"
        )


def _alternatives_end(symbols: Iterator[str], endless: set[str]) -> bool:
    """Return whether any alternative up to the closing bracket ends without using an endless rule."""
    any_ends, items = False, [True]
    for symbol in symbols:
        if symbol in (")", "]", "|"):
            any_ends, items = any_ends or all(items), [True]
            if symbol != "|":
                break
        elif symbol in ("(", "["):
            inner = _alternatives_end(symbols, endless)
            items.append(inner or symbol == "[")
        elif symbol in ("?", "*") or re.match(r"[{~]\s*(0|,)", symbol):
            items[-1] = True
        elif symbol[0] not in "+{~":
            items.append(symbol not in endless)
    return any_ends


# ---- What llguidance does not enforce ------------------------------------------------------------


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
    divisor = schema.get("multipleOf")
    if isinstance(divisor, int | float) and not isinstance(divisor, bool):
        digits, exponent = Decimal(str(divisor)).as_tuple()[1:]
        if isinstance(exponent, int):  # neither infinite nor NaN
            scale = max(0, -exponent)
            number = int("".join(map(str, digits))) * 10 ** max(0, min(exponent, MAX_SCALE + 2))
            if number > MAX_DIVISOR or scale > MAX_SCALE:
                raise ValueError(
                    f"multipleOf must be at most {MAX_DIVISOR} without its point, and {MAX_SCALE} digits "
                    f"behind it at most, got {divisor}"
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
            allowed = [re.fullmatch(written, character) is not None for character in '\0"\\']
        except re.error:
            allowed = [True, False, False]
        if not allowed[0] or all(allowed):
            return written
        return f"[{written}{WITHOUT_NUL}]"

    result = CLASS.sub(rewrite, pattern)
    if WITHOUT_NUL in result and MAY_BE_NUL.search(
        CLASS.sub(lambda found: "" if found[1] else found[0], pattern)
    ):
        raise ValueError(
            f"pattern {pattern!r} has a class without a quote or a backslash beside U+0000 or \\p: the two "
            "cannot be enforced together"
        )
    return result
