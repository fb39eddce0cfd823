"""What surrounds the engine's steps: Ctrl-C that waits for their end, the thread they are for, their time."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C until the block (or the decorated call) ends, so that no state is left half changed.

    Gives a function to call wherever in the block it may strike: what the block cleans up, it then does.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None  # Python interrupts its main thread only
        return
    pending: list[tuple[int, FrameType | None]] = []

    def let_strike() -> None:
        if pending:
            arguments = pending[0]
            pending.clear()
            handler(*arguments)

    signal.signal(signal.SIGINT, lambda *arguments: pending.append(arguments))
    try:
        yield let_strike
    finally:
        signal.signal(signal.SIGINT, handler)
        let_strike()


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Have SIGTERM, where it would end the process at once, leave the block as an exception first.

    So what the block began is cleaned up; then the process ends by the signal after all.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    struck: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        struck.append(number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if struck:
            signal.raise_signal(signal.SIGTERM)


class EngineDeadError(RuntimeError):
    """No step will succeed any more: the engine can only be closed. The name is vLLM's."""


class Owner:
    """The thread that an engine works for: from its first request until nothing of its is unfinished.

    Two threads that step one engine would take each other's outputs. One after the other may use it. A fork
    has none of the threads that compute.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal's handler may come here too
        self._thread: threading.Thread | None = None

    def claim(self) -> None:
        """Make the engine the calling thread's.

        Raises:
            RuntimeError: another thread's requests are unfinished, or this is a fork.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine is process {self._process}'s, and this is a fork of it: make one here, or start "
                'processes by the "spawn" method'
            )
        caller = threading.current_thread()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = caller
            owner = self._thread
        if owner is not caller:
            raise RuntimeError(
                f"thread {owner.name!r} is using the engine: one thread at a time, or AsyncLLM for several"
            )

    def release(self) -> None:
        """Nothing is unfinished: any thread may claim the engine."""
        self._thread = None


class Stopwatch:
    """Adds up the seconds each phase of the steps took."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("schedule", "inputs", "forward", "sample", "update"), 0.0)
        self.start()

    def start(self) -> None:
        """A phase begins here."""
        self._started = time.perf_counter()

    def lap(self, phase: str) -> None:
        """It ends here, and the next one begins."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._started
        self._started = now
