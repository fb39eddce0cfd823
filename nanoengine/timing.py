"""Times the phases of startup and of the steps."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("nanoengine")


class Stopwatch:
    """Adds up the seconds that each phase of the steps takes."""

    def __init__(self) -> None:
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
