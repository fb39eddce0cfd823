"""Implements the command `nanoengine`, also run as `python -m nanoengine`.

A subcommand's module is imported when it runs, so that listing them needs neither PyTorch nor an extra.
"""

import os
import signal
import sys

from nanoengine import __version__
from nanoengine.optional import MissingFileError, load

# name -> module, function, the extra that installs its dependencies, description
COMMANDS = {
    "run": ("apps.ask", "run", "", "ask a model a few questions; by default the bundled one"),
    "chat": ("apps.ask", "chat", "", "hold a conversation in the terminal"),
    "serve": ("apps.server", "main", "serve", "an OpenAI-compatible server, and a page to chat"),
    "bench": ("apps.bench", "main", "", "measure one workload on this machine"),
    "trace": ("contrib.viewer", "main", "", "make a page, or a timeline, of a recorded run"),
    "lab": ("contrib.lab_command", "main", "", "the scheduler under a cost model, in place of a device"),
}


def main(arguments: list[str] | None = None) -> None:
    """Run a subcommand with the arguments that follow its name. Without one, list all subcommands."""
    from nanoengine.apps.flags import FlexibleArgumentParser

    arguments = sys.argv[1:] if arguments is None else arguments
    parser = FlexibleArgumentParser(
        "nanoengine",
        description="A minimal LLM inference engine.",
        epilog="`demo` as a model is the bundled one. `nanoengine COMMAND --help` has a command's options.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, (*_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    command = parser.parse_args(arguments[:1]).command  # the subcommand parses the rest
    if command is None:
        parser.print_help()
        return
    module, function, extra, _ = COMMANDS[command]
    handler = signal.getsignal(signal.SIGINT)  # a shell's background job ignores Ctrl-C
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # an import may lose a KeyboardInterrupt
    try:
        app = load(module, f"nanoengine {command}")
    except MissingFileError as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        if not extra:
            raise
        parser.error(f"nanoengine {command} needs {error.name}: pip install 'nanoengine[{extra}]'")
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        getattr(app, function)(arguments[1:])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:] or ["run"])
