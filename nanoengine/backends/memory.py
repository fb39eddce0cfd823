"""What a CPU's memory is asked of the system: kept once it is there, and in large pages."""

import ctypes
import math
import mmap
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


def keep_freed_memory() -> None:
    """Have the C library keep what tensors give back, up to 1 GiB, instead of returning it to the system.

    Every step allocates the same tens of MB anew. Fetched from the system, each page of them costs a
    fault: more than the work done in it. Of the whole process; only glibc has this switch (`mallopt(3)`).
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 32 << 20)  # the most there is; larger tensors are still mapped and unmapped
        mallopt(m_trim_threshold, 1 << 30)


def return_freed_memory() -> None:
    """Have the C library give the system what it keeps by `keep_freed_memory`; steps will fetch it anew."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for what steps read and write: on a CPU in large pages, none of which a step has to fetch.

    Raises:
        RuntimeError: there is no memory.
    """
    if device.type == "cpu":
        return zeros_on_large_pages(shape, dtype).zero_()
    return torch.zeros(*shape, dtype=dtype, device=device)


LARGE_PAGE = 2 << 20  # bytes


def zeros_on_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory that is divided into large pages, as far as Linux gives any; the rest has small ones.

    What is read once a step, from end to end, has a page to be looked up every 2 MiB instead of every 4 KiB.

    Raises:
        RuntimeError: there is no memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE") or size < LARGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # there is not so much, which PyTorch says better
        return torch.zeros(shape, dtype=dtype)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    with suppress(OSError):  # this kernel has none
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(*shape)


def drop_pages(tensor: Tensor) -> None:
    """Give the memory of a CPU's tensor back to the system, but for its ends; it reads as zeros from then on.

    Its address stays, and with the next write its memory comes back.

    Raises:
        ValueError: the system is not Linux.
        OSError: it refuses.
    """
    if sys.platform != "linux":
        raise ValueError("memory can be given back on Linux alone")
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise failed")
