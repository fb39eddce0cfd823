"""Runs the other ranks in processes, watches them, and ends them with this process.

torch.multiprocessing starts fresh interpreters, and reports which process failed first, and how.
"""

import atexit
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException, start_processes
from tqdm import tqdm

from nanoengine.outputs import EngineDeadError

_start_processes: Any = start_processes  # untyped

STARTING = 300.0  # timeout for a condition that all processes bring about while they start, in seconds


class Workers:
    """Runs a module's function in several processes, with the rank from 1 on and the arguments.

    A thread watches them: when one is lost, the others are killed, so that none waits for it.
    """

    def __init__(self, function: Callable[..., None], num_processes: int, *arguments: Any) -> None:
        self.cause: str | None = None  # which rank was lost first, and why
        self.on_loss: Callable[[], None] = lambda: None
        self.is_closing = False  # processes may end without being reported as lost
        self._is_lost = threading.Event()
        is_of_main_thread = threading.current_thread() is threading.main_thread()
        # Hide the user's script: multiprocessing would import it in each process, so that it would need an
        # `if __name__ == "__main__"`.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            given: Any = (_run, (function, is_of_main_thread, arguments), num_processes)
            self._context: Any = _start_processes(*given, join=False, daemon=True)
        finally:
            sys.modules["__main__"] = main
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for the processes to meet a condition. Raises EngineDeadError if one is lost, or late."""
        end = time.monotonic() + STARTING
        while not is_ready():
            if self._is_lost.wait(0.05):
                raise EngineDeadError(self.cause)
            if time.monotonic() > end:
                raise EngineDeadError(f"not all ranks were ready after {STARTING:.0f} s")

    def why(self) -> str | None:
        """Return which rank was lost and why, after a failure between ranks, or None if none was lost."""
        self._is_lost.wait(10)  # the others notice a failure before the process has ended
        return self.cause

    def stop(self, seconds: float = 0.0) -> None:
        """End all processes. They are killed if they do not end by themselves within `seconds`."""
        self.is_closing = True
        self._thread.join(seconds)
        for process in self._context.processes:
            process.kill()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._context.join(grace_period=0):
                pass
        except ProcessException as error:
            if not self.is_closing:
                how = re.sub(r"^\W*process \d+ ", "", str(error), flags=re.IGNORECASE)
                self.cause = f"rank {error.error_index + 1} (process {error.error_pid}) {how}"
                self._is_lost.set()
                self.on_loss()


def _run(index: int, function: Callable[..., None], is_of_main_thread: bool, arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by rank 0 only
    os.dup2(2, 1)  # libraries may print: send it to stderr
    tqdm.set_lock(threading.RLock())  # its own is a semaphore too, of which Python warns after `os._exit`
    if is_of_main_thread:
        # On Linux, have the kernel kill this process when its parent dies, even if this process is stopped.
        # The kernel watches the thread that started it, so this is only safe for the main thread.
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function(index + 1, *arguments)
    except EngineDeadError:  # another rank was lost: `Workers` reports that one
        pass
    except Exception:  # torch.multiprocessing saves the traceback for `Workers`
        atexit.register(os._exit, 1)  # skip the interpreter's shutdown, for which the others would wait
        raise
    os._exit(0)


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(0)
