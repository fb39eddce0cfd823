"""What surrounds the engine's steps: Ctrl-C that waits for their end, and the seconds of their phases."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block (or the decorated call) ends, so that no state is left half changed."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python interrupts its main thread only
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: pending.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])


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
