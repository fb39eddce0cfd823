"""CPU memory: how much there is, in large pages, pinned, and kept when it is freed. The limits of cgroups."""

import ctypes
import math
import mmap
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor


def keep_freed_memory() -> None:
    """Make the C library keep up to 1 GiB of freed memory, in the whole process: glibc's `mallopt(3)`.

    Every step allocates the same tens of MB again. If that memory came from the system, each page would cost
    a page fault, which takes longer than the work done in the page.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 32 << 20)  # the maximum; larger tensors are still mapped and unmapped
        mallopt(m_trim_threshold, 1 << 30)


class Available(NamedTuple):
    """Says how much memory this process may still take."""

    num_bytes: int
    limit: str  # what sets the limit, for the user; "": the machine

    def __str__(self) -> str:
        return f"{self.num_bytes / 2**30:.1f} GiB available{self.limit and f' ({self.limit})'}"


def cgroup_folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield version, 1 or 2, and folder of the process's cgroup and of its ancestors, whose limits apply."""
    memberships = root / "proc/self/cgroup"
    for line in memberships.read_text().splitlines() if memberships.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if number == "0" else controller)
        group = base / path.lstrip("/")  # in a container this folder may be missing: then `base` is the group
        for folder in (group, *group.parents):
            yield 2 if number == "0" else 1, folder
            if folder == base:
                break


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs' time the process's cgroups may take: infinity without a limit."""
    quotas = [math.inf]
    for version, folder in cgroup_folders("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no limit: no file, "max" or -1
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{x}_us").read_text()) for x in ("quota", "period"))
            quotas += [quota / period] if quota > 0 else []
    return min(quotas)


def available_memory(root: Path = Path("/")) -> Available:
    """Return the least of the machine's available memory and what the process's limits leave.

    A cgroup, such as a container's, has its limit minus its use left. Cached files do not count as used: the
    system drops them when memory is needed. Reads cgroups of version 1 and 2, under `root`. The limits of the
    process itself (`ulimit -v` and `-d`) count the addresses that it has reserved.
    """
    found = [Available(psutil.virtual_memory().available, "")]
    for version, folder in cgroup_folders("memory", root):
        is_v2 = version == 2
        usage, total = ("current", "") if is_v2 else ("usage_in_bytes", "total_")
        for name in ("max", "high") if is_v2 else ("limit_in_bytes",):
            with suppress(OSError, ValueError):  # no limit: the file is missing or says "max"
                limit, used = (int((folder / f"memory.{x}").read_text()) for x in (name, usage))
                counts = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(counts[f"{total}{kind}_file"]) for kind in ("active", "inactive"))
                words = "memory.high" if name == "high" else "limit"
                words = f"the cgroup's {words} is {limit / 2**30:.1f} GiB"
                found.append(Available(max(0, limit - used + cached), words))
    process: Any = psutil.Process()
    for kind, reserved in ("RLIMIT_AS", "vms"), ("RLIMIT_DATA", "data"):
        if hasattr(psutil, kind):  # on Linux
            limit = process.rlimit(getattr(psutil, kind))[0]
            if limit != psutil.RLIM_INFINITY:
                left = max(0, limit - getattr(process.memory_info(), reserved))
                found.append(Available(left, f"{kind} is {limit / 2**30:.1f} GiB"))
    return min(found)


CPU = torch.device("cpu")
LARGE_PAGE = 2 << 20  # bytes


def zeros_on_large_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Allocate zeros, or raise RuntimeError. On a CPU they are in large pages as far as Linux provides them.

    Memory that each step reads from end to end needs an address translation every 2 MiB, not every 4 KiB.
    A page of an anonymous mapping takes memory, and the time to clear it, when it is first written to. So
    allocating a KV cache of 4 GiB takes almost no time.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or size < LARGE_PAGE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # not enough memory: PyTorch's error says it better
        return torch.zeros(shape, dtype=dtype)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    with suppress(OSError):  # this kernel has no large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(*shape)


def pinned_memory(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, NDArray[Any]]:
    """Allocate pinned host memory, which a GPU reads and writes asynchronously, for PyTorch and numpy."""
    memory = torch.empty(*shape, dtype=dtype, pin_memory=True)
    return memory, memory.numpy()
