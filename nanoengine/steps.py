"""Helpers around startup and steps: delaying signals, ownership by one thread, timing, and progress."""

import logging
import os
import signal
import sys
import threading
import time

# `signal.getsignal` converts results to enums. Looking at every signal takes twenty times as long with it.
from _signal import getsignal  # type: ignore[import-not-found]
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
log = logging.getLogger("nanoengine")
SIGNALS = tuple(map(int, signal.valid_signals()))


class _Delay:
    """Stands for the handlers of signals while an `uninterrupted` block runs."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self.arrived: deque[tuple[int, FrameType | None]] = deque()
        self.is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note that a signal has arrived."""
        self.arrived.append((number, frame))
        if self.is_over:  # code in the block has kept this handler and installs it again
            self.handle()

    def begin(self) -> None:
        """Take the place of every handler that is a Python function. Others do not raise."""
        for number in SIGNALS:
            if callable(handler := getsignal(number)):
                self.handlers[number] = handler
                signal.signal(number, self)

    def handle(self) -> None:
        """Call the handlers of the signals that have arrived, in order, until one raises."""
        while self.arrived:
            number, frame = self.arrived.popleft()
            self.handlers[number](number, frame)

    def end(self) -> None:
        """Put the handlers back and call those that are due, even if one of them raises."""
        try:
            for number, handler in self.handlers.items():
                if getsignal(number) is self:  # otherwise the block has installed another handler
                    signal.signal(number, handler)
            self.is_over = True
            self.handle()
        finally:
            if self.arrived or not self.is_over:
                self.end()


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Delay signals that have a Python handler, such as Ctrl-C, until the block (or the decorated call) ends.

    The exception of a handler, such as a timeout, can thus neither leave state half changed nor be caught by
    an `except` for the errors of other code. Yields a function that calls the handlers of delayed signals.
    The block may call it wherever it can clean up. A handler that the block itself installs is not delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # Python calls handlers only in its main thread
        return
    delay = _Delay()
    try:
        delay.begin()
        yield delay.handle
    finally:
        try:
            delay.end()
        finally:  # a handler may have raised as the first call began
            if not delay.is_over:
                delay.end()


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Make SIGTERM leave the block as an exception, if the signal would end the process at once.

    The block can thus clean up. Afterwards the process ends by the signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            signal.raise_signal(signal.SIGTERM)


class EngineDeadError(RuntimeError):
    """Raised when no step can succeed anymore: the engine can only be closed. The name is vLLM's."""


class Owner:
    """Reserves an engine for one thread, from its first request until all of its requests are finished.

    Two threads that step one engine would take each other's outputs. Different threads may use the engine one
    after the other. A forked process cannot use it, because the threads that compute do not exist there.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler may call `claim` too
        self._thread: threading.Thread | None = None

    def claim(self) -> None:
        """Reserve the engine for the calling thread.

        Raises:
            RuntimeError: another thread has unfinished requests, or this is a forked process.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine belongs to process {self._process}, and this is a fork of it. Create an engine "
                'here, or start processes with the "spawn" method'
            )
        caller = threading.current_thread()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = caller
            owner = self._thread
        if owner is not caller:
            raise RuntimeError(f"thread {owner.name!r} is using the engine. Use AsyncLLM for several threads")

    def release(self) -> None:
        """Let any thread claim the engine. Called when no request is unfinished."""
        self._thread = None


class Stopwatch:
    """Adds up the seconds that each phase of the steps takes."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all phases so far."""
        self.seconds = dict.fromkeys(("schedule", "inputs", "forward", "sample", "update"), 0.0)
        self.start()

    def start(self) -> None:
        """Begin a phase."""
        self._started = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End the current phase, add its time to `phase`, and begin the next one."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._started
        self._started = now


@contextmanager
def phase(name: str, note: str = "") -> Iterator[None]:
    """Log how long the block takes, at level DEBUG. On a terminal, a note announces a long block."""
    if note and sys.stderr.isatty():
        log.info(note)
    start = time.perf_counter()
    yield
    log.debug("%s: %.2f s", name, time.perf_counter() - start)


def bar(what: str, items: Iterable[Item], total: int | None = None) -> "tqdm[Item]":
    """Return an iterator over the items. On a terminal it shows a bar if it takes longer than a second."""
    settings: dict[str, Any] = {"delay": 1, "leave": False, "disable": None, "total": total}
    return tqdm(items, what, file=sys.stderr, **settings)
