"""Turns settings into command-line flags. unknown_arguments.py decides about unsupported flags."""

import argparse
import difflib
import inspect
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, NoReturn, get_args

from nanoengine.sampling_params import choices
from nanoengine.unknown_arguments import IGNORED, RENAMED, without_unserved


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Parses flags with dashes or underscores, and treats vLLM's others by unknown_arguments.py's rule."""

    given: Sequence[str] = ()  # the command line, for `error`

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(*arguments, **{"formatter_class": layout, **settings})

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse like argparse. Unknown flags whose value is a no-op are ignored."""
        self.given = given = [with_dashes(argument) for argument in (sys.argv[1:] if args is None else args)]
        if self._subparsers is None:  # otherwise the subparsers know the flags
            given, unserved = self._split(given)
            served = {flag[2:].replace("-", "_") for flag in self._option_string_actions}
            try:
                without_unserved(self.prog, unserved, served, IGNORED["engine"] + IGNORED["server"])
            except (TypeError, ValueError) as error:
                self.error(str(error))
        return super().parse_args(given, namespace)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse like argparse, with underscores accepted in flags."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(list(map(with_dashes, given)), namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with 2, after one line that also names the flag or choice nearest to an unknown one."""
        known = [*self._option_string_actions, *(str(x) for one in self._actions for x in one.choices or ())]
        flags = [argument.partition("=")[0] for argument in self.given if argument.startswith("--")]
        for word in (*flags, *re.findall(r"invalid choice: '(.*?)'", message)):
            near = difflib.get_close_matches(word, known, 1, 0.75)
            if near and word not in known and "did you mean" not in message:
                message += f"; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def _split(self, given: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Remove unknown flags from a command line. Returns the other arguments, and the flags as settings.

        A flag without a value is True, or False if its name starts with "no-". A flag that starts with
        enable_, disable_ or use_ takes no value from the next argument.
        """
        known, left, unserved = self._option_string_actions, list[str](), dict[str, Any]()
        rest = deque(given)
        while rest:
            flag, equals, text = (argument := rest.popleft()).partition("=")
            abbreviates = self.allow_abbrev and any(one.startswith(flag) for one in known)
            if argument == "--":
                return [*left, argument, *rest], unserved
            if not flag.startswith("--") or flag in known or abbreviates:
                left.append(argument)
                continue
            is_negated = flag.startswith("--no-")
            name = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
            is_switch = is_negated or name.startswith(("disable_", "enable_", "use_"))
            if not equals and not is_switch and rest and not rest[0].startswith("--"):
                text, equals = rest.popleft(), "="
            unserved[name] = value_of(text) if equals else not is_negated
        return left, unserved


def with_dashes(argument: str) -> str:
    """Return a flag with its underscores turned into dashes, and any other argument unchanged."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def value_of(text: str) -> Any:
    """Parse the value of a vLLM flag as JSON, or return it as text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser for argparse, which prints the message of a ValueError or TypeError."""

    @wraps(parse)
    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_or_explain


def parse_json(text: str) -> Any:
    """Parse the value of a flag that takes JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from None


def describe(config: type[Any]) -> dict[str, str]:
    """Return what each field of a dataclass does: the comment above it, or at the end of its line."""
    found, above = dict[str, str](), list[str]()
    with suppress(OSError):  # the sources are not installed
        for line in inspect.getsource(config).splitlines():
            if line.startswith("    # "):
                above.append(line[6:])
                continue
            if match := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                found[match[1]] = " ".join([*above, match[2] or ""]).strip()
            above = []
    return found


def add_flags(parser: argparse._ActionsContainer, config: type[Any]) -> None:
    """Add a flag for each field of a dataclass. Flags that are not given do not appear in the namespace."""
    texts = describe(config)
    for item in fields(config):
        kinds = get_args(item.type) or (item.type,)
        settings: dict[str, Any] = {"type": next((kind for kind in (int, float) if kind in kinds), str)}
        names = [getattr(kind, "__origin__", kind) for kind in kinds]
        if dict in names:
            settings = {"type": parse_json, "metavar": "JSON"}
        if list in names:
            settings = {"nargs": "+"}
        if bool in kinds:
            settings = {"action": argparse.BooleanOptionalAction}
        if allowed := choices(item.type):
            settings = {"choices": allowed}
        default = "" if item.default in (None, MISSING) else f" (default: {item.default})"
        settings["help"] = texts.get(item.name, "").replace("%", "%%") + default
        names = [item.name, *(old for old, new in RENAMED.items() if new == item.name)]
        flags = ["--" + name.replace("_", "-") for name in names]
        parser.add_argument(*flags, dest=item.name, default=argparse.SUPPRESS, **settings)


def engine_parser(command: str, about: str, config: type[Any], **settings: Any) -> FlexibleArgumentParser:
    """Return a parser for a model, and a flag for each field of an engine's config: see `settings_of`."""
    usage, what = "%(prog)s [MODEL] [--FLAG VALUE ...]", "directory, hub id or GGUF file"
    parser = FlexibleArgumentParser(command, usage, about, allow_abbrev=False, **settings)
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help=f"{what}; default: the bundled model")
    add_flags(parser.add_argument_group("engine", "settings of the engine: fields of EngineConfig"), config)
    return parser


def settings_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, config: type[Any]
) -> dict[str, Any]:
    """Return the values of the flags that `add_flags` added. The model is the bundled one by default."""
    settings = {item.name: getattr(args, item.name) for item in fields(config) if item.name in args}
    if "model" in settings and args.model_tag is not None:
        parser.error(f"give the model once: {parser.prog} MODEL")
    return {"model": args.model_tag or "demo"} | settings
