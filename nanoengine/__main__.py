"""Implements the command `nanoengine`, also run as `python -m nanoengine`.

A subcommand's module is imported when it runs, so that listing them needs neither PyTorch nor an extra.
"""

import os
import signal
import sys
from collections.abc import Callable

from nanoengine import __version__

COMMANDS = {
    "run": "ask a model a few questions; by default the bundled one",
    "chat": "hold a conversation in the terminal",
    "serve": "an OpenAI-compatible server, and a page to chat",
    "bench": "measure one workload on this machine",
    "trace": "make a page, or a timeline, of a recorded run",
    "lab": "the scheduler under a cost model, in place of a device",
}


def load(command: str) -> Callable[[list[str]], None]:
    """Import a subcommand, and return the function that runs it."""
    match command:
        case "run":
            from nanoengine.cli.run import main
        case "chat":
            from nanoengine.cli.chat import main
        case "serve":
            from nanoengine.server.lifecycle import main
        case "bench":
            from nanoengine.cli.bench import main
        case "trace":
            from nanoengine.viewer.trace_page import main
        case _:
            from nanoengine.cli.lab import main
    return main


def main(arguments: list[str] | None = None) -> None:
    """Run a subcommand with the arguments that follow its name. Without one, list all subcommands."""
    from nanoengine.flags import FlexibleArgumentParser

    arguments = sys.argv[1:] if arguments is None else arguments
    parser = FlexibleArgumentParser(
        "nanoengine",
        description="A minimal LLM inference engine.",
        epilog="`demo` as a model is the bundled one. `nanoengine COMMAND --help` has a command's options.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, what in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    command = parser.parse_args(arguments[:1]).command  # the subcommand parses the rest
    if command is None:
        parser.print_help()
        return
    handler = signal.getsignal(signal.SIGINT)  # a shell's background job ignores Ctrl-C
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # an import may lose a KeyboardInterrupt
    try:
        run = load(command)
    except ModuleNotFoundError as error:
        if command != "serve":  # the others need no extra
            raise
        parser.error(f"nanoengine serve needs {error.name}: pip install 'nanoengine[serve]'")
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        run(arguments[1:])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:] or ["run"])
