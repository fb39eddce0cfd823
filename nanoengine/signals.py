"""Delays signals, such as Ctrl-C, and shutdown to the end of a block, which neither must interrupt."""

import atexit
import signal
import threading
import time

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
        with before_shutdown() as stop:  # Python calls handlers only in its main thread
            yield stop
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


_in_blocks: set[threading.Thread] = set()  # daemon threads
_is_ending = threading.Event()


@atexit.register
def _end() -> None:
    _is_ending.set()
    while any(thread.is_alive() for thread in _in_blocks.copy()):  # none is alive in a fork
        time.sleep(0.001)


@contextmanager
def before_shutdown() -> Iterator[Callable[[], None]]:
    """Delay the interpreter's shutdown to the end of the block, if a daemon thread runs it.

    Shutdown ends a daemon thread when it next takes the interpreter lock. If PyTorch's code takes it, the
    process aborts. Yields a function that ends the thread if shutdown has begun.
    """
    thread = threading.current_thread()
    is_outermost = thread.daemon and thread not in _in_blocks

    def stop() -> None:
        if thread.daemon and _is_ending.is_set():
            _in_blocks.discard(thread)
            time.sleep(1)  # shutdown ends the thread here, unless an exit handler waits for the thread
            raise SystemExit

    try:
        if is_outermost:
            _in_blocks.add(thread)
        stop()
        yield stop
    finally:
        if is_outermost:
            _in_blocks.discard(thread)
            stop()


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
