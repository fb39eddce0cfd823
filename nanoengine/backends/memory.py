"""CPU memory: keep freed memory instead of returning it to the system, and use large pages."""

import ctypes
import math
import mmap
import platform
from collections.abc import Sequence
from contextlib import suppress

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


def resident_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros that steps read and write. On a CPU the pages are large, and touched here.

    Raises:
        RuntimeError: there is not enough memory.
    """
    if device.type == "cpu":
        return zeros_on_large_pages(shape, dtype).zero_()
    return torch.zeros(*shape, dtype=dtype, device=device)


LARGE_PAGE = 2 << 20  # bytes


def zeros_on_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate zeros in large pages as far as Linux provides them, and in small pages otherwise.

    Memory that each step reads from end to end needs an address translation every 2 MiB, not every 4 KiB.

    Raises:
        RuntimeError: there is not enough memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE") or size < LARGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # not enough memory: PyTorch's error says it better
        return torch.zeros(shape, dtype=dtype)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    with suppress(OSError):  # this kernel has no large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(*shape)
