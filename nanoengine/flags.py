"""Settings as flags of a command: a class's own, and those of vLLM's that stand in compat.py."""

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from nanoengine.compat import ANY, FURTHER, RENAMED, Unserved


class FlexibleArgumentParser(argparse.ArgumentParser):
    """One whose flags may be spelt with underscores, as vLLM's."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(list(map(with_dashes, given)), namespace)


def with_dashes(argument: str) -> str:
    """A flag that is spelt with underscores in its usual spelling; anything else as it is.

    >>> with_dashes("--max_model_len=a_b"), with_dashes("a_b")
    ('--max-model-len=a_b', 'a_b')
    """
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def value_of(text: str) -> Any:
    """What a flag of vLLM's is given: JSON, or text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_flags(
    parser: argparse._ActionsContainer, config: type[Any], unserved: Unserved, prefix: str = ""
) -> None:
    """A flag for each field of a dataclass, and a hidden one for each unserved name that no flag has yet.

    What is not given is not in the namespace; unserved ones are there with a prefix.
    """
    hints = get_type_hints(config)
    for item in fields(config):
        kinds = get_args(hints[item.name]) or (hints[item.name],)
        settings: dict[str, Any] = {"type": next((kind for kind in (int, float) if kind in kinds), str)}
        names = [getattr(kind, "__origin__", kind) for kind in kinds]
        if dict in names:
            settings = {"type": json.loads, "metavar": "JSON"}
        if list in names:
            settings = {"nargs": "+"}
        if bool in kinds:
            settings = {"action": argparse.BooleanOptionalAction}
        settings["help"] = "as MODEL" if item.default is MISSING else f"default {item.default}"
        names = [item.name, *(old for old, new in RENAMED.items() if new == item.name)]
        flags = ["--" + name.replace("_", "-") for name in names]
        parser.add_argument(*flags, dest=item.name, default=argparse.SUPPRESS, **settings)
    for name, (accepted, _) in unserved.items():
        is_switch = name.startswith(("disable_", "enable_", "use_"))
        if accepted is not ANY and name not in FURTHER:
            is_switch = any(isinstance(value, bool) for value in accepted)
        settings = {"action": argparse.BooleanOptionalAction}
        if not is_switch:
            settings = {"type": value_of, "nargs": "?", "const": True}
        flag, dest = "--" + name.replace("_", "-"), prefix + name
        with suppress(argparse.ArgumentError):  # a flag that is there
            parser.add_argument(
                flag, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **settings
            )
