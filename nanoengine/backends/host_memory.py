"""CPU memory: how much there is, in large pages, and kept when it is freed."""

import ctypes
import math
import mmap
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor


def keep_freed_memory() -> None:
    """Make the C library keep up to 1 GiB of freed memory instead of returning it to the system.

    Every step allocates the same tens of MB again. If that memory came from the system, each page would cost
    a page fault, which takes longer than the work done in the page. The setting applies to the whole process,
    and exists in glibc only (`mallopt(3)`).
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


def available_memory(root: Path = Path("/")) -> Available:
    """Return the smallest of the machine's available memory and what the process's cgroups have left.

    A cgroup, such as a container's, has its limit minus its use left. Cached files do not count as used: the
    system drops them when memory is needed. Reads cgroups of version 1 and 2, under `root`.
    """
    found = [Available(psutil.virtual_memory().available, "")]
    memberships = root / "proc/self/cgroup"
    for line in memberships.read_text().splitlines() if memberships.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names, total = root / "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            base, total = root / "sys/fs/cgroup/memory", "total_"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")  # in a container this folder may be missing: then `base` is the group
        for folder in (group, *group.parents):  # the limits of its ancestors apply too
            with suppress(OSError, ValueError):  # no limit: the file is missing or says "max"
                limit, used = (int((folder / name).read_text()) for name in names)
                counts = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(counts[f"{total}{kind}_file"]) for kind in ("active", "inactive"))
                words = f"the cgroup's limit is {limit / 2**30:.1f} GiB"
                found.append(Available(max(0, limit - used + cached), words))
            if folder == base:
                break
    return min(found)


CPU = torch.device("cpu")
LARGE_PAGE = 2 << 20  # bytes


def zeros_on_large_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Allocate zeros. On a CPU they are in large pages as far as Linux provides them, else in small pages.

    Memory that each step reads from end to end needs an address translation every 2 MiB, not every 4 KiB.
    The pages of an anonymous mapping are zeros without being written. A page takes memory, and the time to
    clear it, when it is first written to. So allocating a KV cache of 4 GiB takes almost no time.

    Raises:
        RuntimeError: there is not enough memory.
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
