"""Memory in large pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.memory import LARGE_PAGE, zeros_on_large_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
gives_large_pages = SETTING.exists() and "[never]" not in SETTING.read_text()


def large_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor's memory is in large pages, as the system tells of its mapping."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    num_bytes = 0
    for mapping in mappings[1:]:
        low, high = (int(number, 16) for number in mapping.split()[0].split("-"))
        if low < end and start < high:
            num_bytes += sum(int(n) * 1024 for n in re.findall(r"AnonHugePages: +(\d+) kB", mapping))
    return num_bytes


@pytest.mark.skipif(not gives_large_pages, reason="needs Linux with transparent huge pages")
def test_weights_and_caches_lie_in_large_pages():
    packed = Kernels().pack(torch.randn(3000, 1000))
    cache = KVCache.zeros(KVSpec(4, 64, 64, torch.float32), 200, 32, torch.device("cpu"))
    for tensor in (packed, cache.k, cache.v):
        # Not what is left of the last page: it would take more memory than it holds.
        assert large_bytes(tensor) == tensor.nbytes // LARGE_PAGE * LARGE_PAGE > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (1024, 1024, 3), (1 << 22, 1)])
def test_memory_in_large_pages_is_zeros_of_any_shape(shape, dtype):
    zeros = zeros_on_large_pages(shape, dtype)
    assert (zeros.shape, zeros.dtype) == (shape, dtype)
    assert not zeros.any()
    zeros.fill_(1)
    assert zeros.sum(dtype=torch.int64) == zeros.numel()


def test_without_large_pages_memory_is_still_zeroed(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros_on_large_pages((1024, 1024), torch.float32).any()


def test_more_memory_than_there_is_is_a_runtime_error():
    for size in (1 << 50, 1 << 62):
        with pytest.raises(RuntimeError):
            zeros_on_large_pages((size,), torch.int8)
