"""Turns the forms that requests ask for into llguidance's grammars, each tried out in a process of its own.

llguidance's limits do not bound all of its work: a schema of a few characters may compile for minutes and
take gigabytes. So a form is first compiled where that can be ended:

    engine                               trial process, started with the first form
    Trials.run(form)    a socket  ---->  fork    a worker, with limits on its processor time and memory,
                                                 checks and compiles the form, and follows 64 tokens
    the grammar, or     <--------------          answers, or is ended by a limit
    what is wrong

The trial process has a tokenizer and no model; PyTorch is not imported. Every worker inherits the tokenizer.
"""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.extensions.schemas import checked_grammar, checked_schema, closed
from nanoengine.sampling_params import StructuredOutputsParams

MAX_CHARACTERS = 1 << 16  # of a grammar: what is longer may take more than a second to compile
MAX_SYMBOLS = 100_000  # of its productions
MAX_ITEMS = 20_000  # of the parser's, at a token: as many as there are ways to go on
MAX_FUEL = 300_000  # of the lexer's expressions, to begin with
MAX_STEP_FUEL = 100_000  # and for one mask
MAX_STEP_ITEMS = 12_000  # of the parser's, for one mask
MAX_LEXER_STATES = 100_000  # a string of bounded length takes 1.5 for each character
MAX_SECONDS = 3  # of a processor, to try a form out
MAX_BYTES = 256 << 20  # that this may take, beside the tokenizer
SLOW_SECONDS = 0.01  # of a processor, for one mask: what takes longer is computed ahead, see structured.py
NUM_TRIED = 64  # tokens of an answer, to see whether a grammar can be followed
# Between JSON's tokens, unless a request says otherwise: a space, or a line end and an indentation. With any
# amount, as vLLM has it, many a model never stops indenting.
WHITESPACE = r"( |\n[ \t]{0,40})"


@dataclass(frozen=True)
class Tried:
    """A form that was compiled and followed for some tokens."""

    grammar: str  # in llguidance's form
    takes_back: bool  # whether tokens can be taken back, so that there can be drafts
    is_slow: bool  # whether a mask took more than SLOW_SECONDS


class Compiler:
    """Makes grammars of forms, for one tokenizer.

    Args:
        tokenizer: as `tokenizers` writes it, in JSON.
        num_tokens: how many the masks have bits for.
        end_id: the token that stands for every token that ends a sequence.
        special_tokens: as text.
    """

    def __init__(self, tokenizer: str, num_tokens: int, end_id: int, special_tokens: list[str]) -> None:
        import llguidance

        self.llguidance, self.end_id, self.special_tokens = llguidance, end_id, special_tokens
        self.tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=num_tokens, eos_token=end_id)
        self.limits = llguidance.LLParserLimits(
            max_grammar_size=MAX_SYMBOLS,
            max_items_in_row=MAX_ITEMS,
            initial_lexer_fuel=MAX_FUEL,
            step_lexer_fuel=MAX_STEP_FUEL,
            step_max_items=MAX_STEP_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def matcher(self, grammar: str) -> Any:
        """Return a matcher at its beginning."""
        return self.llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)

    def compile(self, asked: StructuredOutputsParams) -> Tried:
        """Check a form, compile it, and follow it for some tokens.

        Raises:
            ValueError: the grammar is none, too large, conformed to by no finite text, or has parts that
                would not be enforced.
        """
        grammar = self._grammar_of(asked)
        if asked.preamble is not None:
            # Alone first: what is tried out behind a preamble may never come to the grammar.
            self.compile(replace(asked, preamble=None))
            grammar = behind(self._checked(asked.preamble), grammar)
        check_length(grammar)
        matcher = self.matcher(grammar)
        # A schema that says "x-guidance": {"lenient": true} would be followed in part, with a warning.
        ignored = matcher.get_grammar_warnings()
        error, takes_back, is_slow = (ignored[0], False, False) if ignored else self._try_out(matcher)
        if error:
            words = error.removesuffix("\n<non-verbose/>")
            raise ValueError(words.replace("NoExtensionBias", "no text has it"))
        return Tried(grammar, takes_back, is_slow)

    def _try_out(self, matcher: Any) -> tuple[str, bool, bool]:
        """Follow an answer's beginning.

        Returns:
            Why that cannot be done, or ""; whether tokens can be taken back; whether masks are slow.
        """
        trial, slowest = matcher.deep_copy(), 0.0
        for _ in range(NUM_TRIED if not matcher.is_error() else 0):
            start = time.thread_time()
            allowed = np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little")
            slowest = max(slowest, time.thread_time() - start)
            allowed[self.end_id] = 0
            if trial.is_error() or not allowed.any():
                break
            trial.consume_token(int(allowed.argmax()))
        error = matcher.get_error() or trial.get_error()
        takes_back = not error and bool(trial.rollback(1)) and not trial.is_error()
        return error, takes_back, slowest > SLOW_SECONDS

    def _grammar_of(self, asked: StructuredOutputsParams) -> str:
        """Return a form as llguidance's grammar."""
        matcher = self.llguidance.LLMatcher
        if asked.json is not None or asked.json_object:
            schema, style = self._schema_of(asked)
            return str(matcher.grammar_from_json_schema(schema, style))
        if asked.regex is not None:
            return str(matcher.grammar_from_regex(asked.regex))
        if asked.choice is not None:  # a terminal, which costs no more for being one of many
            return str(matcher.grammar_from_lark(f"start: C\nC: {' | '.join(map(json.dumps, asked.choice))}"))
        if asked.structural_tag is not None:
            return checked_grammar(self._tags_of(asked.structural_tag))
        return self._checked(asked.grammar or "")

    def _checked(self, grammar: str) -> str:
        """Return a user's grammar in Lark.

        Raises:
            ValueError: it is too large, a rule has no finite text, or it names the token for the end.
        """
        check_length(grammar)
        for named in re.findall(r"<\[([^\]]*)\]>", grammar):
            bounds = [part.split("-") for part in named.split(",")]
            are_ids = all(one.strip().isdecimal() for part in bounds for one in part)
            if not are_ids or any(int(part[0]) <= self.end_id <= int(part[-1]) for part in bounds):
                raise ValueError(f"grammar must name tokens by ids below {self.end_id}, got <[{named}]>")
        return checked_grammar(str(self.llguidance.grammar_from("grammar", grammar)))

    def _schema_of(self, asked: StructuredOutputsParams) -> tuple[str, Any]:
        """Return the schema, and how JSON is to be written."""
        schema: Any = asked.json if asked.json is not None else {"type": "object"}
        if isinstance(schema, str):
            schema = json.loads(schema)
        if isinstance(schema, bool):  # which are schemas too
            schema = {} if schema else {"enum": []}
        schema = checked_schema(closed(schema) if asked.disable_additional_properties else schema)
        space = WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern
        if asked.disable_any_whitespace or not space:
            return json.dumps(schema), {"whitespace_flexible": False}
        return json.dumps(schema), {"whitespace_pattern": space}

    def _tags_of(self, given: str | dict[str, Any]) -> str:
        """Return a grammar of text in which each `begin`, which starts with a trigger, has JSON and `end`."""
        tag = json.loads(given) if isinstance(given, str) else given
        if not isinstance(tag, dict) or not isinstance(tag.get("structures"), list) or not tag["structures"]:
            raise ValueError('structural_tag must hold "structures" and "triggers": the one form served')
        triggers, tags = tag.get("triggers"), []
        for one in tag["structures"]:
            is_tag = isinstance(one, dict) and isinstance(one.get("schema"), dict)
            if not is_tag or not all(isinstance(one.get(name), str) for name in ("begin", "end")):
                raise ValueError(f"structures must hold begin, schema and end, got {one!r}")
            begin = one["begin"]
            for trigger in triggers if isinstance(triggers, list) else []:
                if isinstance(trigger, str) and trigger and begin.startswith(trigger):
                    break
            else:
                raise ValueError(f"structural_tag has no trigger that {begin!r} begins with")
            tags.append(
                self.llguidance.StructTag(trigger=trigger, begin=begin, grammar=one["schema"], end=one["end"])
            )
        is_special = any(one.trigger in self.special_tokens for one in tags)
        return str(self.llguidance.StructTag.to_grammar(tags, assume_special=is_special))


def check_length(grammar: str) -> None:
    """Raise ValueError where a grammar is too long to compile in a moment."""
    if len(grammar) > MAX_CHARACTERS:
        raise ValueError(f"{len(grammar)} characters, and at most {MAX_CHARACTERS} are taken")


def behind(preamble: str, grammar: str) -> str:
    """Return a grammar that has another one, in Lark, before it."""
    if grammar.lstrip().startswith("{"):
        first, *others = json.loads(grammar)["grammars"]
    else:
        first, others = {"lark_grammar": grammar}, []
    both = {"lark_grammar": "start: @preamble @answer"}, {"name": "preamble", "lark_grammar": preamble}
    return json.dumps({"grammars": [*both, {**first, "name": "answer"}, *others]})


# ---- Trials, in the engine's process -------------------------------------------------------------


class Trials:
    """Has forms tried out in another process, several at a time. For several threads.

    Args:
        settings: of the other process's `Compiler`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket

    def run(self, asked: StructuredOutputsParams) -> Tried:
        """Try a form out.

        Raises:
            ValueError: as `Compiler.compile`, or it takes too much processor time or memory.
            RuntimeError: the trial failed for a reason that is not the form's.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
        limits = {"max_seconds": MAX_SECONDS, "max_bytes": MAX_BYTES}
        said = self._ask(
            limits | {"form": {field.name: getattr(asked, field.name) for field in fields(asked)}}
        )
        answer = json.loads(said) if said else {"failure": "the process for it has ended"}
        if "failure" in answer:
            raise RuntimeError(f"structured_outputs could not be tried out: {answer['failure']}")
        if "error" in answer:
            raise ValueError(answer["error"])
        return Tried(**answer)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nanoengine.extensions.forms"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # a Ctrl-C is for the engine
            )
        weakref.finalize(self, end, self._process, self._control)
        self._ask(self.settings)

    def _ask(self, question: Any) -> bytes:
        """Return the answer; nothing where the process, or what it has begun for this, has died."""
        asked = json.dumps(question).encode()
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                ours.sendall(asked)
                ours.shutdown(socket.SHUT_WR)
                return received(ours)
            except OSError:  # it has ended
                return b""


def end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End the other process, which waits for what the socket brings."""
    control.close()
    process.wait()


def received(peer: socket.socket) -> bytes:
    """Return all that comes before the other side has said everything."""
    with peer.makefile("rb") as stream:
        return stream.read()


# ---- Trials, in the other process ----------------------------------------------------------------


def main() -> None:
    """Try forms out until the engine closes its socket, each in a process of its own."""
    os.nice(10)  # the engine's threads go first
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    control = socket.socket(fileno=0)
    compiler: Compiler | None = None
    while handles := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=handles[0]) as peer:
            if compiler is None:
                compiler = Compiler(**json.loads(received(peer)))
            elif os.fork() == 0:
                control.close()
                supervise(peer, compiler)
                os._exit(0)


def supervise(peer: socket.socket, compiler: Compiler) -> None:
    """Answer one question: fork a worker, and say which limit has ended it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    question = json.loads(received(peer))
    worker = os.fork()
    if worker == 0:
        peer.sendall(json.dumps(attempt(compiler, **question)).encode())
        os._exit(0)
    status = os.waitpid(worker, 0)[1]
    if status:
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        limit = (
            f"{question['max_seconds']} seconds of a processor" if is_late else in_mib(question["max_bytes"])
        )
        peer.sendall(json.dumps({"error": f"to compile it takes more than {limit}; simplify it"}).encode())


def attempt(compiler: Compiler, form: dict[str, Any], max_seconds: int, max_bytes: int) -> dict[str, Any]:
    """Compile a form under limits, which this process then has for good."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds + 1))
    if sys.platform == "linux":  # elsewhere addresses are not counted
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        num_bytes = num_pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Rust says that it has no memory
    try:
        tried = compiler.compile(StructuredOutputsParams(**form))
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"to compile it takes more than {in_mib(max_bytes)}; simplify it"}
    except BaseException:  # a bug here, or a panic in Rust
        return {"failure": traceback.format_exc()}
    return {field.name: getattr(tried, field.name) for field in fields(tried)}


def in_mib(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes >> 20} MiB"


if __name__ == "__main__":
    main()
