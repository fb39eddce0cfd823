"""Implements the command `nanoengine`, also run as `python -m nanoengine`.

A subcommand's module is imported when it runs, so that listing them needs neither PyTorch nor an extra.
"""

import os
import signal
import sys
from collections.abc import Callable

from nanoengine import __version__

Command = Callable[[list[str]], None]


def find_run() -> Command:
    """Answer a few questions with a model; by default the bundled one."""
    from nanoengine.cli.run import main

    return main


def find_chat() -> Command:
    """Hold a conversation in the terminal."""
    from nanoengine.cli.chat import main

    return main


def find_serve() -> Command:
    """Start an OpenAI-compatible server, with a chat page."""
    from nanoengine.server.process import main

    return main


def find_bench() -> Command:
    """Measure one workload on this machine."""
    from nanoengine.cli.bench import main

    return main


def find_trace() -> Command:
    """Make a page, or a timeline, of a recorded run."""
    from nanoengine.viewer.trace_page import main

    return main


def find_lab() -> Command:
    """Run the scheduler under a cost model, in place of a device."""
    from nanoengine.lab.command import main

    return main


# name -> a function that imports the command, and whose docstring describes it
COMMANDS = {
    "run": find_run,
    "chat": find_chat,
    "serve": find_serve,
    "bench": find_bench,
    "trace": find_trace,
    "lab": find_lab,
}
EXTRAS = {"serve": "serve"}  # command -> the extra that installs its dependencies


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
    for name, find in COMMANDS.items():
        commands.add_parser(name, help=find.__doc__, add_help=False)
    command = parser.parse_args(arguments[:1]).command  # the subcommand parses the rest
    if command is None:
        parser.print_help()
        return
    handler = signal.getsignal(signal.SIGINT)  # a shell's background job ignores Ctrl-C
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # an import may lose a KeyboardInterrupt
    try:
        run = COMMANDS[command]()
    except ModuleNotFoundError as error:
        if command not in EXTRAS:
            raise
        parser.error(f"nanoengine {command} needs {error.name}: pip install 'nanoengine[{EXTRAS[command]}]'")
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        run(arguments[1:])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:] or ["run"])
