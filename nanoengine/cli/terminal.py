"""Gives commands what they share in a terminal: flags, how they end, and tables."""

import argparse
import io
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nanoengine import CompletionOutput
from nanoengine.config import EngineConfig
from nanoengine.flags import FlexibleArgumentParser, engine_parser


def make_parser(command: str, about: str, max_tokens: int) -> FlexibleArgumentParser:
    """Return a parser for the flags that both commands have: sampling, and one per EngineConfig field."""
    # `run` has a --trace of its own, which replaces the engine's.
    parser = engine_parser(command, about, EngineConfig, conflict_handler="resolve")
    limit = "limit per answer; default %(default)s"
    parser.add_argument("--temperature", type=float, default=0.0, help="default %(default)s: greedy")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help=limit)
    return parser


@contextmanager
def in_a_terminal(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit as a command should: with a one-line error, on Ctrl-C, or when the output's reader stops."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may stop reading early
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the engine then refuses bytes that are not text
    try:
        yield
    except (TypeError, ValueError, OSError) as error:  # a bad option, model or file
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table, padded so that it can be read in a terminal too.

    >>> print(table(["a", "b"], [[1, "two"]]))
    | a | b   |
    |---|-----|
    | 1 | two |
    """
    lines = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines]
    padded.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(padded)


def cut_mark(completion: CompletionOutput, num_tokens: int) -> str:
    """Return what to print after an answer of `num_tokens` tokens: a remark if a limit cut it off."""
    return f" [cut at {num_tokens} tokens]" if completion.finish_reason == "length" else ""
