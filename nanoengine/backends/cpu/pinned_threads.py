"""Pinned threads: each of PyTorch's OpenMP threads stays on its own core while a step runs."""

import ctypes
import functools
import os
import re
from collections.abc import Set
from pathlib import Path
from threading import local

import torch

from nanoengine.backends.host_memory import cpu_quota
from nanoengine.signals import uninterrupted

# OpenMP's environment variables for thread placement. If one is set, the user has placed the threads.
PLACED_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

SYSTEM = Path("/sys/devices/system/cpu")
PAUSE_SOFT = 1  # OpenMP's omp_pause_soft: its settings stay as they are


class PinnedThreads:
    """A context manager that pins each OpenMP thread of the calling thread's team to its own core.

    The threads that share an operator wait for each other at its end. If the system puts two of them on one
    core, each such barrier lasts a scheduler tick: 8 ms for a product that takes 0.2 ms.

    The calling thread is unpinned at the end, because threads that it starts later would inherit its single
    core. Its workers stay pinned. Nothing is pinned on systems other than Linux, if `place` finds no CPUs, if
    the user has placed the threads, or if a CPU quota is below the number of CPUs.
    """

    def __init__(self, enabled: bool = True) -> None:
        can = hasattr(os, "sched_setaffinity") and not any(name in os.environ for name in PLACED_BY_USER)
        # With a quota below the CPUs, other processes run on them, which may choose the same ones
        can = can and cpu_quota() >= len(os.sched_getaffinity(0))
        self._openmp, self._pins = _loaded_openmp(), enabled and can
        # Of the calling thread: .cpus that its workers are pinned to; .change: its CPUs before and in a block
        self._pinned = local()
        self.cpus: tuple[int, ...] = ()  # of the threads of the team, inside the block; (): not pinned

    def __enter__(self) -> None:
        self.cpus = ()
        if self._openmp is None or not self._pins or torch.get_num_threads() == 1:
            return
        allowed = os.sched_getaffinity(0)
        self.cpus = place(torch.get_num_threads(), frozenset(allowed))
        if not self.cpus:
            return
        self._pinned.change = allowed, {self.cpus[0]}
        if getattr(self._pinned, "cpus", None) != self.cpus:
            self._pin(self.cpus)
            self._pinned.cpus = self.cpus
        os.sched_setaffinity(0, {self.cpus[0]})

    def __exit__(self, *error: object) -> None:
        self._unpin()

    def _unpin(self) -> None:
        """Give the calling thread the CPUs that it had. If the user has changed them since, they stay."""
        change = getattr(self._pinned, "change", None)
        if change is not None and os.sched_getaffinity(0) == change[1]:
            os.sched_setaffinity(0, change[0])
        self._pinned.change = None

    def end(self) -> None:
        """End the calling thread's workers. Call it outside the block. The next operator starts new workers.

        If another thread's team is also alive, there are more threads than cores. OpenMP then makes waiting
        threads sleep immediately: a decode step took 92 ms instead of 57.
        """
        self._pinned.cpus = None
        if self._openmp is not None and hasattr(self._openmp, "omp_pause_resource_all"):
            self._openmp.omp_pause_resource_all(PAUSE_SOFT)

    def _pin(self, cpus: tuple[int, ...]) -> None:
        """Make each thread of the team pin itself, in a parallel region of GCC's OpenMP interface."""
        openmp = self._openmp
        assert openmp is not None

        def pin_myself(_: int | None) -> None:
            os.sched_setaffinity(0, {cpus[openmp.omp_get_thread_num()]})

        with uninterrupted():  # ctypes only prints what a callback raises, such as a handler's exception
            openmp.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(pin_myself), None, len(cpus), 0)


@functools.cache
def place(num_threads: int, allowed: Set[int], system: Path = SYSTEM) -> tuple[int, ...]:
    """Return one of the allowed CPUs for each thread, or () if threads should not be pinned.

    Threads are pinned if there is one for each CPU, for each core, or for each of the largest cores. With
    fewer threads, another process may use the other cores, and the two must not choose the same ones. The
    CPUs of a core share its arithmetic units, so with one thread for each core, no two threads share a core.
    Threads with consecutive numbers are on the same socket. `system` is where Linux describes the CPUs. One
    that is not described counts as a core of its own.
    """
    cores: dict[str, tuple[int, int, int]] = {}  # of each: capacity (negative), socket, first CPU
    for cpu in sorted(allowed):
        capacity = -int(_read(system / f"cpu{cpu}/cpu_capacity", "0"))  # Arm's large cores, before small ones
        socket = int(_read(system / f"cpu{cpu}/topology/physical_package_id", "0"))
        siblings = _read(system / f"cpu{cpu}/topology/thread_siblings_list", str(cpu))
        cores.setdefault(siblings, (capacity, socket, cpu))
    ordered = sorted(cores.values())
    num_large = sum(capacity == ordered[0][0] for capacity, _, _ in ordered)
    if num_threads == len(allowed):
        return tuple(sorted(allowed))
    if num_threads in (len(ordered), num_large):
        return tuple(cpu for _, _, cpu in ordered[:num_threads])
    return ()


def _read(file: Path, default: str) -> str:
    """Return what a file says, or the default if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return default


@functools.cache  # an engine in a large process would wait 2 ms for the list of what is mapped
def _loaded_openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that PyTorch loaded, if it has GCC's entry point. LLVM's has it too."""
    torch.get_num_threads()
    paths = re.findall(r"/.*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*", _read(Path("/proc/self/maps"), ""))
    library = ctypes.CDLL(paths[0]) if paths else None
    return library if hasattr(library, "GOMP_parallel") else None
