"""Starts worker processes with fresh interpreters, watches them, and ends them with this process.

    workers = Workers("package.module", "serve")    # the function that each process runs
    workers.start(job)                              # serve(job, connection) in a new process
    workers.connections[0].send_bytes(...)          # which `connection` receives

multiprocessing would import the user's script in each process, so that scripts would need an
`if __name__ == "__main__"`. Here each process is a fresh interpreter. It receives its job and further
messages through its connection, and sends back a heartbeat every second and, if it fails, its traceback.
"""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing

from nanoengine.steps import EngineDeadError

STARTING = 300.0  # timeout for a process's first heartbeat, in seconds
SILENCE = 10.0  # timeout for further heartbeats, in seconds
CLOSING = 5.0  # timeout for a process to end, in seconds
LOST = 3  # exit code of a process that ends because another one did
START = "import sys; fd, module, name, *sys.path[:] = sys.argv[1:]; "
START += "from nanoengine.extensions.processes import main; main(int(fd), module, name)"


class Workers:
    """Runs the other ranks, each in a process that ends with this one, with a thread that watches it.

    When one process is lost, the others are killed, so that none waits for it.

    Args:
        module: the module of the function that each process runs.
        name: the name of that function. It takes a job and the connection to this process.
    """

    def __init__(self, module: str, name: str) -> None:
        self._function = module, name
        self.cause: str | None = None  # why the first rank was lost
        self._effect: str | None = None  # the message of a rank that ended because of that loss
        self.on_loss: Callable[[], None] = lambda: None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection[Any, Any]] = []
        self._threads: list[threading.Thread] = []
        self._ready: set[int] = set()
        self.is_closing = False  # processes may end without being reported as lost
        self._changed = threading.Condition()

    def start(self, job: Any) -> None:
        """Start a process and give it its job."""
        mine, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno()), *self._function, *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=2,  # libraries may print: send it to stderr
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C goes to this process only
        )
        theirs.close()
        self.processes.append(process)
        self.connections.append(mine)
        thread = threading.Thread(target=self._watch, args=(len(self.processes), process, mine), daemon=True)
        self._threads.append(thread)
        thread.start()
        is_of_main_thread = threading.current_thread() is threading.main_thread()
        with suppress(OSError):  # it has ended already: its watcher reports that
            mine.send((os.getpid(), is_of_main_thread, job))

    def wait_until_ready(self) -> None:
        """Wait until every process has received its job.

        Raises:
            EngineDeadError: a process could not be started. The message includes its traceback.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.cause or len(self._ready) == len(self.processes))
        if self.cause:
            raise EngineDeadError(self.cause)

    def why(self) -> str | None:
        """Return which rank was lost and why, after a failure between ranks, or None if none was lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause or not self.processes, timeout=3)
        return self.cause or self._effect

    def stop(self, seconds: float = 0.0) -> None:
        """End all processes. Each is killed if it does not end by itself within `seconds`."""
        self.is_closing = True
        for process, thread in zip(self.processes, self._threads, strict=True):
            thread.join(seconds)
            process.kill()
            thread.join()
        for connection in self.connections:
            connection.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], connection: "Connection[Any, Any]") -> None:
        words, patience = b"", STARTING
        with suppress(EOFError, OSError):  # the process has ended
            while connection.poll(patience):
                words, patience = words + connection.recv_bytes(), SILENCE
                with self._changed:
                    self._ready.add(rank)
                    self._changed.notify_all()
            process.kill()
            words = f"it hung, without a sign of life for {patience:.0f} s".encode()
        code = process.wait()
        if self.is_closing:
            return
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        said = words.decode(errors="replace").strip()
        told = f"rank {rank} (process {process.pid}) {how}" + (f": {said}" if said else "")
        with self._changed:
            if code == LOST:
                self._effect = told
            else:
                self.cause = self.cause or told
                self._changed.notify_all()
        for other in self.processes:
            other.kill()
        self.on_loss()


def main(fd: int, module: str, name: str) -> None:
    """Run a function on the job received through the connection. `Workers.start` starts this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(fd)
    parent, is_of_main_thread, job = connection.recv()
    if is_of_main_thread:
        # On Linux, have the kernel kill this process when its parent dies, even if this process is stopped.
        # The kernel watches the thread that started it, so this is only safe for the main thread.
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    threading.Thread(target=_live_with, args=(parent, connection), daemon=True).start()
    try:
        getattr(importlib.import_module(module), name)(job, connection)
    except BaseException as error:
        with suppress(OSError):
            connection.send_bytes(traceback.format_exc().encode()[-10_000:])  # small enough for one message
        os._exit(LOST if isinstance(error, EngineDeadError) else 1)
    os._exit(0)  # at once: there is nothing to clean up


def _live_with(parent: int, connection: "Connection[Any, Any]") -> None:
    """Send heartbeats, and end the process when its parent is gone.

    The parent's end closes the connection, unless a fork of the parent also holds it. In that case the parent
    id changes.
    """
    with suppress(OSError):
        while os.getppid() == parent:
            connection.send_bytes(b"")
            time.sleep(1)
    os._exit(0)
