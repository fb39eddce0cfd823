"""The tools of a chat: which of them a model sees, and whether a grammar makes it call one."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

from nanoengine.chat.answer_parser import MANY, Formats
from nanoengine.chat.call_grammars import required_calls, strict_calls
from nanoengine.sampling_params import StructuredOutputsParams


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
