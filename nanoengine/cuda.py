"""What PyTorch leaves to its user on a GPU: KV written by one launch, integers in one copy, graphs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Windows, and PyTorch for the CPU
    triton = None

# ---- Writing keys and values ---------------------------------------------------------------------

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _write_kv_kernel(  # type: ignore[no-untyped-def]
        k_cache,
        v_cache,
        k,
        v,
        slots,
        k_stride,
        v_stride,
        K_WIDTH: tl.constexpr,
        V_WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program per token. BLOCK is the power of two Triton needs; widths may be any number."""
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        offsets = tl.arange(0, BLOCK)
        keys = tl.load(k + token * k_stride + offsets, mask=offsets < K_WIDTH)
        tl.store(k_cache + slot * K_WIDTH + offsets, keys, mask=offsets < K_WIDTH)
        values = tl.load(v + token * v_stride + offsets, mask=offsets < V_WIDTH)
        tl.store(v_cache + slot * V_WIDTH + offsets, values, mask=offsets < V_WIDTH)


def has_triton(device: torch.device) -> bool:
    """Whether `write_kv` runs there."""
    return triton is not None and (device.type == "cuda" or triton.knobs.runtime.interpret)


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k (T, K, D) and v (T, K, D') to their slots, (T,) int64, by one Triton kernel.

    The caches are (num_blocks, B, K, D) and (num_blocks, B, K, D'); each token's numbers are contiguous.
    """
    widths = k[0].numel(), v[0].numel()
    _write_kv_kernel[(len(k),)](
        k_cache, v_cache, k, v, slots, k.stride(0), v.stride(0), *widths, triton.next_power_of_2(max(widths))
    )


# ---- A step's integers ---------------------------------------------------------------------------


TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Staging:
    """Carries a step's arrays to the device in one copy that the host does not wait for.

    They are laid side by side in memory the GPU can read by itself, and arrive in memory of their own:
    arrays of the same shapes arrive at the same addresses, where a captured graph looks for them.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    @staticmethod
    def num_bytes(arrays: Iterable[np.ndarray]) -> int:
        """What the arrays take; each begins at a multiple of 8."""
        return sum(-(-array.nbytes // 8) * 8 for array in arrays)

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays on the device, until the next call."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one, long done
        spans, offset = [], 0
        host = self._host.numpy()
        for array in arrays:
            end = offset + array.nbytes
            host[offset:end].view(array.dtype)[:] = array.ravel()
            spans.append((offset, end))
            offset = -(-end // 8) * 8
        self._device[:offset].copy_(self._host[:offset], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [
            self._device[start:end].view(TORCH_DTYPES[array.dtype]).view(array.shape)
            for (start, end), array in zip(spans, arrays, strict=True)
        ]


# ---- Graphs --------------------------------------------------------------------------------------


class GraphRecorder:
    """Captures what a function launches on the GPU, to be launched again as a whole.

    Graphs of one recorder share their memory: only one runs at a time.
    Source: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once as it is, once captured; returns what replays the capture."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is compiled or set up at a first call must not be captured
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = graph.pool()
        return graph.replay
