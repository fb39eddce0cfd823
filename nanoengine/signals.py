"""Delays signals, such as Ctrl-C, to the end of a block, so that no state is left half changed."""

import signal
import threading

# `signal.getsignal` converts results to enums. Looking at every signal takes twenty times as long with it.
from _signal import getsignal  # type: ignore[import-not-found]
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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
    """Turn a SIGTERM that would end the process into an exception that leaves the block, which cleans up."""
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
