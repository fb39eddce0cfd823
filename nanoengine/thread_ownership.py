"""Reserves an engine for one thread at a time."""

import os
import threading


class Owner:
    """Reserves an engine for one thread, from its first request until all of its requests are finished.

    Two threads that step one engine would take each other's outputs. Different threads may use the engine one
    after the other. A forked process cannot use it, because the threads that compute do not exist there.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler may call `claim` too
        self._thread: threading.Thread | None = None

    def check_process(self) -> None:
        """Raise RuntimeError in a fork of the engine's process."""
        if os.getpid() != self._process:
            reason = f"the engine belongs to process {self._process}, and this is a fork of it."
            raise RuntimeError(f'{reason} Create an engine here, or start processes with "spawn"')

    def claim(self) -> None:
        """Reserve the engine for the calling thread. Raises RuntimeError if it belongs to another one."""
        self.check_process()
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
