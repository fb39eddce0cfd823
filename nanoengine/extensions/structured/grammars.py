"""Turns structured outputs into llguidance's grammars. Each one is first tried in a separate process.

llguidance's limits do not bound all of its work: a schema of a few characters may compile for minutes and
take gigabytes. It is therefore first compiled in a process that may be killed:

    engine                               trial process, started with the first structured output
    Trials.run(asked)   a socket  ---->  fork    a worker, with limits on its processor time and memory,
                                                 checks and compiles it, and follows 64 tokens
    the grammar, or     <--------------          answers, or is killed by a limit
    an error

The trial process has a tokenizer but no model, and does not import PyTorch. Workers inherit the tokenizer.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.extensions.structured.json_schemas import checked_grammar, checked_schema, closed, literal
from nanoengine.sampling_params import StructuredOutputsParams

MAX_CHARACTERS = 1 << 16  # length of a grammar: a longer one may take more than a second to compile
LABEL_CHARACTERS = 16  # characters of a choice or an enum that count as one: llguidance makes a trie of them
ENUM = re.compile(r'"enum": ?\[[^\]]*\]')
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,  # symbols in a grammar's productions
    "max_items_in_row": 20_000,  # parser items per token: one for each way to continue
    "initial_lexer_fuel": 300_000,  # cost of building the lexer's expressions
    "step_lexer_fuel": 100_000,  # the same, for one mask
    "step_max_items": 12_000,  # parser items for one mask
    "max_lexer_states": 100_000,  # a string of bounded length takes 1.5 states per character
    "verbose_errors": False,
}
MAX_SECONDS = 3  # processor time of a trial
MAX_BYTES = 256 << 20  # memory of a trial, in addition to the tokenizer
SLOW_SECONDS = 0.01  # processor time of one mask: token_masks.py computes slower ones ahead
NUM_TRIED = 64  # output tokens that a trial follows the grammar for
# The default between JSON tokens: a space, or a newline and an indentation. Without a limit on whitespace, as
# in vLLM, many models never stop indenting.
WHITESPACE = r"( |\n[ \t]{0,40})"
# In Lark: a token's name, or a string, regular expression or comment, which may contain one that is text.
LARK_NAME = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?:#|//).*|(<[^<>\s]+>)')


@dataclass(frozen=True)
class Tried:
    """Holds the result of a trial."""

    grammar: str  # in llguidance's format
    takes_back: bool  # whether the matcher can be rolled back, which draft tokens need
    is_slow: bool  # whether a mask took more than SLOW_SECONDS


class Compiler:
    """Turns structured outputs into grammars, for one tokenizer, in the JSON of the `tokenizers` library.

    A mask covers num_tokens. The token end_id stands for every token that ends a sequence.
    """

    def __init__(self, tokenizer: str, num_tokens: int, end_id: int) -> None:
        import llguidance

        added = json.loads(tokenizer)["added_tokens"]
        self.special, self.ordinary = (
            {token["content"]: token["id"] for token in added if token["special"] is is_special}
            for is_special in (True, False)
        )
        self.llguidance, self.end_id = llguidance, end_id
        self.tokenizer = llguidance.LLTokenizer(self._vocabulary(tokenizer, num_tokens), eos_token=end_id)
        self.limits = llguidance.LLParserLimits(**LIMITS)

    def _vocabulary(self, tokenizer: str, num_tokens: int) -> Any:
        """Return the tokenizer in a form in which llguidance follows the flags of added tokens.

        Read from JSON, every added token written <...> is special, so that text cannot contain it, although
        most are ordinary: Qwen's <think> and <tool_call>, Gemma's <b>. Forced text that names an added token
        is tokenized to it nevertheless, and then refused. Here, a token is part of text unless its flag says
        that it is special, and text that names a special token is spelled with other tokens.
        """
        settings = json.loads(tokenizer)
        vocab = dict(settings["model"]["vocab"])  # from pairs, in some models
        settings["added_tokens"] = [
            {**token, "content": f"\ufdd0{token['id']}"} if token["special"] else token  # not found in text
            for token in settings["added_tokens"]
            if not (token["special"] and token["content"] in vocab)  # no merges lead to it
        ]
        plain = self.llguidance.LLTokenizer(json.dumps(settings), n_vocab=num_tokens, slices=[])
        texts = {token_id: plain.decode_bytes([token_id]) for token_id in range(num_tokens)}
        texts |= {token_id: name.encode() for name, token_id in self.special.items()}
        special = set(filter(plain.is_special_token, texts)) - {*self.ordinary.values()}
        # A token without bytes, which no text contains, is shown as <[id]>.
        texts |= {i: b"" for i, text in texts.items() if i not in special and text == b"<[%d]>" % i}
        fields = {
            "is_tokenizer_wrapper": True,
            "eos_token_id": self.end_id,
            "bos_token_id": None,
            "tokens": [*texts.values()],
            "special_token_ids": [*(special | {*self.special.values()})],
            # A built-in function: Python code could be interrupted by a signal in the middle of a mask.
            "__call__": plain.tokenize_str,
        }
        return type("Vocabulary", (), fields)()

    def matcher(self, grammar: str) -> Any:
        """Return a matcher for a grammar, in its initial state."""
        return self.llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)

    def compile(self, asked: StructuredOutputsParams) -> Tried:
        """Check a structured output, compile it, and follow it for some tokens, or raise ValueError."""
        grammar = self._grammar_of(asked)
        if asked.preamble is not None:
            # Try the grammar alone first: a trial that starts in the preamble may never reach it.
            self.compile(replace(asked, preamble=None))
            grammar = with_preamble(self._checked(asked.preamble), grammar)
        check_length(grammar, is_choice=asked.choice is not None)
        matcher = self.matcher(grammar)
        # With "x-guidance": {"lenient": true}, llguidance enforces only part of a schema, with a warning.
        ignored = matcher.get_grammar_warnings()
        error, takes_back, is_slow = (ignored[0], False, False) if ignored else self._try_out(matcher)
        if error:
            words = error.removesuffix("\n<non-verbose/>")
            raise ValueError(words.replace("NoExtensionBias", "no text matches it"))
        return Tried(grammar, takes_back, is_slow)

    def _try_out(self, matcher: Any) -> tuple[str, bool, bool]:
        """Return an error or "", whether the matcher can be rolled back, and whether masks are slow."""
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
        """Return the grammar in llguidance's format."""
        matcher = self.llguidance.LLMatcher
        if asked.json is not None or asked.json_object:
            return str(matcher.grammar_from_json_schema(*self._schema_of(asked)))
        if asked.regex is not None:
            return str(matcher.grammar_from_regex(asked.regex))
        if asked.choice is not None:  # one terminal, of which llguidance makes a trie
            return str(matcher.grammar_from_lark(f"start: C\nC: {' | '.join(map(json.dumps, asked.choice))}"))
        if asked.structural_tag is not None:
            return checked_grammar(self._tags_of(asked.structural_tag))
        return self._checked(asked.grammar or "")

    def _checked(self, grammar: str) -> str:
        """Return a user's grammar in Lark. Raises ValueError if it is too long or may name the end token."""
        check_length(grammar)
        for named in re.findall(r"<\[([^\]]*)\]>", grammar):
            bounds = [part.split("-") for part in named.split(",")]
            are_ids = all(one.strip().isdecimal() for part in bounds for one in part)
            if not are_ids or any(int(part[0]) <= self.end_id <= int(part[-1]) for part in bounds):
                raise ValueError(f"grammar must name tokens by ids below {self.end_id}, got <[{named}]>")
        lark = str(self.llguidance.grammar_from("grammar" if "::=" in grammar else "lark", grammar))
        # llguidance finds only special tokens by their names.
        lark = LARK_NAME.sub(
            lambda found: f"<[{self.ordinary[found[1]]}]>" if found[1] in self.ordinary else found[0], lark
        )
        return checked_grammar(lark)

    def _schema_of(self, asked: StructuredOutputsParams) -> tuple[str, Any]:
        """Return the JSON schema as text, and llguidance's settings for whitespace."""
        schema: Any = asked.json if asked.json is not None else {"type": "object"}
        if isinstance(schema, str):
            schema = json.loads(schema)
        if isinstance(schema, bool):  # booleans are schemas too
            schema = {} if schema else {"enum": []}
        schema = checked_schema(closed(schema) if asked.disable_additional_properties else schema)
        space = WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern
        if asked.disable_any_whitespace or not space:
            return json.dumps(schema), {"whitespace_flexible": False}
        return json.dumps(schema), {"whitespace_pattern": space}

    def _tags_of(self, given: str | dict[str, Any]) -> str:
        """Return a grammar of text in which each `begin`, found by its trigger, precedes JSON and `end`."""
        tag = json.loads(given) if isinstance(given, str) else given
        if not (isinstance(tag, dict) and isinstance(tag.get("structures"), list) and tag["structures"]):
            raise ValueError('structural_tag must hold "structures" and "triggers"')
        named: Any = tag.get("triggers")
        triggers = [x for x in named if isinstance(x, str) and x] if isinstance(named, list) else []
        rules = []
        for i, one in enumerate(tag["structures"]):
            match one:
                case {"begin": str(begin), "schema": dict(schema), "end": str(ending)}:
                    trigger = next(filter(begin.startswith, triggers), None)
                case _:
                    raise ValueError(f"structures must hold begin, schema and end, got {one!r}")
            if trigger is None:
                raise ValueError(f"structural_tag has no trigger that {begin!r} begins with")
            # A special token ends text by itself. An ordinary trigger ends it only if matched lazily.
            place = min((begin.find(name) for name in self.special if name in begin), default=len(begin))
            name = f"HEAD_{i}" if place < len(trigger) else f"head_{i}"
            head = begin[: min(place, len(trigger))]
            rules.append(f"{name}{'[lazy]' if name.islower() else ''}: TEXT {json.dumps(head)}")
            rest, end = (literal(text, self.special) for text in (begin[len(head) :], ending))
            rules.append(f"tag_{i}: {name} {rest} %json {json.dumps(schema)} {end}")
        any_tag = " | ".join(f"tag_{i}" for i in range(len(tag["structures"])))
        return "\n".join((f"start: ({any_tag})* last", "last: TEXT", r"TEXT: /(.|\n)*/", *rules))


def check_length(grammar: str, is_choice: bool = False) -> None:
    """Raise ValueError if a grammar is too long to compile quickly."""
    num_labels = len(grammar) if is_choice else sum(len(found[0]) for found in ENUM.finditer(grammar))
    num = len(grammar) - num_labels + num_labels // LABEL_CHARACTERS
    if num > MAX_CHARACTERS:
        raise ValueError(f"the grammar has {num} characters; at most {MAX_CHARACTERS} are allowed")


def with_preamble(preamble: str, grammar: str) -> str:
    """Return a grammar that accepts the preamble, a grammar in Lark, followed by the given grammar."""
    if grammar.lstrip().startswith("{"):
        first, *others = json.loads(grammar)["grammars"]
    else:
        first, others = {"lark_grammar": grammar}, []
    both = {"lark_grammar": "start: @preamble @answer"}, {"name": "preamble", "lark_grammar": preamble}
    return json.dumps({"grammars": [*both, {**first, "name": "answer"}, *others]})


# ---- Trials, in the engine's process -------------------------------------------------------------


class Trials:
    """Runs trials in another process that has a `Compiler` of these arguments. Thread-safe."""

    def __init__(self, *settings: Any) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket

    def run(self, asked: dict[str, Any]) -> Tried:
        """Try a structured output, given as the fields of StructuredOutputsParams, in a new worker process.

        Raises:
            ValueError: `Compiler.compile` raised it, or a limit ended the worker.
            RuntimeError: the trial failed for another reason.
        """
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = self._start()
        said = self._ask({"asked": asked, "max_seconds": MAX_SECONDS, "max_bytes": MAX_BYTES})
        if not said and process.poll() is None:  # a limit ended the worker
            said = json.dumps({"error": too_costly(MAX_SECONDS, MAX_BYTES)}).encode()
        answer = json.loads(said or '{"failure": "its process has ended"}')
        if "failure" in answer:
            raise RuntimeError(f"structured_outputs could not be compiled: {answer['failure']}")
        if "error" in answer:
            raise ValueError(answer["error"])
        return Tried(**answer)

    def _start(self) -> subprocess.Popen[bytes]:
        self._control, theirs = socket.socketpair()
        paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "nanoengine.extensions.structured.grammars"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C goes to the engine only
            )
        weakref.finalize(self, _end, process, self._control)
        self._ask(self.settings)
        return process

    def _ask(self, question: Any) -> bytes:
        """Send a question and return the answer. Returns b"" if the process or its worker has died."""
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                ours.sendall(json.dumps(question).encode())
                ours.shutdown(socket.SHUT_WR)
                return received(ours)
            except OSError:  # the process has ended
                return b""


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()  # which ends the process
    process.wait()


def received(peer: socket.socket) -> bytes:
    """Read everything until the other side closes its end."""
    with peer.makefile("rb") as stream:
        return stream.read()


def too_costly(max_seconds: int, max_bytes: int) -> str:
    """Return the error for a structured output that reached a limit while it was compiled."""
    return (
        f"compiling it takes more than {max_seconds} s of processor time or {max_bytes >> 20} MiB of memory; "
        "simplify it"
    )


# ---- Trials, in the other process ----------------------------------------------------------------


def main() -> None:
    """Run trials until the engine closes its socket, each in a forked process."""
    os.nice(10)  # the engine's threads run first
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these children
    control = socket.socket(fileno=0)
    compiler: Compiler | None = None
    while handles := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=handles[0]) as peer:
            if compiler is None:
                compiler = Compiler(*json.loads(received(peer)))
            elif os.fork() == 0:
                control.close()
                peer.sendall(json.dumps(attempt(compiler, **json.loads(received(peer)))).encode())
                os._exit(0)


def attempt(compiler: Compiler, asked: dict[str, Any], max_seconds: int, max_bytes: int) -> dict[str, Any]:
    """Compile under limits, and return the answer. The limits stay in force for this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds + 1))
    if sys.platform == "linux":  # other systems do not limit the address space
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        num_bytes = num_pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discard Rust's message about running out of memory
    try:
        return asdict(compiler.compile(StructuredOutputsParams(**asked)))
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": too_costly(max_seconds, max_bytes)}
    except BaseException:  # a bug here, or a panic in Rust
        return {"failure": traceback.format_exc()}


if __name__ == "__main__":
    main()
