"""What PyTorch leaves to its user on a CPU: cores for the threads, memory kept, kernels it lacks."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import local
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

# ---- Threads -------------------------------------------------------------------------------------

# Settings of OpenMP by which a user has placed the threads already.
PLACED_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class PinnedThreads:
    """A `with` block in which each OpenMP thread of the calling thread's team stays on its own core.

    An operator is shared out among threads that wait for each other at its end. When the system puts two
    of them on one core, each such barrier lasts a scheduler tick: 8 ms for a product that takes 0.2.

    The calling thread is let go at the end, since what it starts later would inherit its one core; its
    workers stay where they are. Nothing is changed where a core per thread is not to be had: other
    systems than Linux, more or fewer threads than the cores this process may use, threads placed by
    environment variables (`PLACED_BY_USER`).
    """

    def __init__(self, enabled: bool = True) -> None:
        can = hasattr(os, "sched_setaffinity") and not any(name in os.environ for name in PLACED_BY_USER)
        self._openmp = _loaded_openmp() if enabled and can else None
        self._pinned = local()  # .cpus: where the calling thread's workers are; each thread has a team

    def __enter__(self) -> None:
        self._allowed: set[int] | None = None
        if self._openmp is None or torch.get_num_threads() == 1:
            return
        allowed = os.sched_getaffinity(0)
        if torch.get_num_threads() != len(allowed):
            return
        self._allowed = allowed
        if getattr(self._pinned, "cpus", None) != allowed:
            self._pin(sorted(allowed))
            self._pinned.cpus = allowed
        os.sched_setaffinity(0, {min(allowed)})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._allowed is not None:
            os.sched_setaffinity(0, self._allowed)

    def _pin(self, cpus: list[int]) -> None:
        """Have every thread of the team pin itself: a parallel region by GCC's OpenMP interface."""
        openmp = self._openmp
        assert openmp is not None

        def pin_myself(_: int | None) -> None:
            os.sched_setaffinity(0, {cpus[openmp.omp_get_thread_num()]})

        openmp.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(pin_myself), None, len(cpus), 0)


def _loaded_openmp() -> ctypes.CDLL | None:
    """The OpenMP library PyTorch has loaded, if it has GCC's entry point (LLVM's and Intel's do too)."""
    torch.get_num_threads()
    maps = Path("/proc/self/maps")
    paths = re.findall(r"\S*lib(?:gomp|iomp5|omp)\b\S*\.so\S*", maps.read_text()) if maps.exists() else []
    library = ctypes.CDLL(paths[0]) if paths else None
    return library if hasattr(library, "GOMP_parallel") else None


# ---- Memory --------------------------------------------------------------------------------------


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


# ---- Kernels -------------------------------------------------------------------------------------

SOURCE = Path(__file__).parent / "kernels.cpp"
# All of -ffast-math that keeps NaN and infinity, which also would switch denormals off process-wide.
FLAGS = (
    "-O3 -march=native -std=c++17 -fopenmp -shared -fPIC "
    "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math -freciprocal-math"
)


class Kernels:
    """`kernels.cpp`, compiled for this machine's processor and kept between runs.

    Source of the idea: vLLM's `csrc/cpu`.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails; the message says what to do.
    """

    def __init__(self) -> None:
        start = time.perf_counter()
        self.library, self.was_compiled = _compile()
        self.seconds = time.perf_counter() - start
        self._functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}

    @staticmethod
    def serves(dtype: torch.dtype) -> bool:
        """Whether there are kernels for tensors of that type."""
        return dtype in (torch.float32, torch.bfloat16)

    def decode_attention(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        rows: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Attention of the rows of q (T, H, D) that are a sequence's one new token, into out (T, H, D').

        block_tables (S, blocks) and seq_lens (S,) are int32, rows (S,) int64; sinks (H,) float32.
        """
        self._call(
            "decode_attention", out, q, k_cache, v_cache, block_tables, seq_lens, rows,
            len(rows), block_tables.shape[1], q.shape[1], k_cache.shape[2], q.shape[2], out.shape[2],
            k_cache.shape[1], float(scale), window or 0, float(softcap or 0), sinks,
        )  # fmt: skip

    def causal_softmax(
        self,
        scores: Tensor,
        first_query: int,
        first_key: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Scores (H, queries, keys) to probabilities in place; positions count on from the first ones."""
        self._call(
            "causal_softmax", scores, *scores.shape, first_query, first_key,
            float(scale), window or 0, float(softcap or 0), sinks,
        )  # fmt: skip

    def gather(self, cache: Tensor, block_table: Tensor, first: int, last: int) -> Tensor:
        """A sequence's positions [first, last) out of the cache, as (K, last - first, D)."""
        _, block_size, num_heads, head_dim = cache.shape
        out = cache.new_empty(num_heads, last - first, head_dim)
        self._call("gather", out, cache, block_table, first, last, num_heads, head_dim, block_size)
        return out

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k (T, K, D) and v (T, K, D') to their slots, (T,) int64."""
        widths = k[0].numel(), v[0].numel()
        self._call("write_kv", k_cache, v_cache, k, v, slots, len(k), *widths, k.stride(0), v.stride(0))

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, (T, E), and that sum; without a residual the sum is x."""
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        self._call("rms_norm", out, total, x, residual, weight, float(eps), *x.shape)
        return out, total

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads of x (T, heads, D) normalised, where there is a weight, and rotated by cos, sin (T, 1, D)."""
        out = x.new_empty(x.shape)
        self._call("norm_rotate", out, x, x.stride(0), weight, float(eps), cos, sin, *x.shape)
        return out

    def can_multiply(self, weight: Tensor) -> bool:
        """Whether `linear` takes that weight, (N, I), and there is nothing faster on this processor."""
        is_bfloat16 = weight.dtype == torch.bfloat16
        return is_bfloat16 and weight.shape[1] % 2 == 0 and hasattr(self.library, "linear_bfloat16")

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        """A weight (N, I) as `linear` reads it: (blocks, I / 2, 64, 2), blocks of 64 outputs, 0 beyond N."""
        num_outputs, num_inputs = weight.shape
        packed = weight.new_zeros(-(-num_outputs // 64), num_inputs // 2, 64, 2)
        for block, rows in zip(packed, torch.split(weight, 64), strict=True):
            block[:, : len(rows)] = rows.view(len(rows), -1, 2).transpose(0, 1)
        return packed

    @staticmethod
    def unpack_rows(packed: Tensor, rows: Tensor) -> Tensor:
        """Rows (T,) of the weight that was packed: (T, I)."""
        pairs = packed.view(torch.int32).squeeze(-1)
        return pairs[rows // 64, :, rows % 64].view(packed.dtype)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
        """The product of x (T, I) with a packed weight, plus bias (N,): (T, N)."""
        out = x.new_empty(len(x), num_outputs)
        self._call("linear", out, x.contiguous(), packed, bias, *x.shape, num_outputs)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up (T, 2 I)."""
        num_rows, width = gate_up.shape
        out = gate_up.new_empty(num_rows, width // 2)
        self._call("silu_and_mul", out, gate_up, num_rows, width // 2)
        return out

    def _call(self, name: str, first: Tensor, *arguments: Any) -> None:
        """Call a kernel for the first tensor's type; tensors become addresses, None a null pointer."""
        function = self._functions.get((name, first.dtype))
        if function is None:
            suffix = str(first.dtype).removeprefix("torch.")
            address = ctypes.c_void_p.in_dll(self.library, f"{name}_{suffix}").value
            types = {int: ctypes.c_int64, float: ctypes.c_float}
            signature = [types.get(type(a), ctypes.c_void_p) for a in (first, *arguments)]
            function = ctypes.CFUNCTYPE(None, *signature)(address)  # type: ignore[arg-type]
            self._functions[name, first.dtype] = function
        function(first.data_ptr(), *(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


def _compile() -> tuple[ctypes.CDLL, bool]:
    """Compile `kernels.cpp`, unless this source was compiled for this processor before."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++, clang++ or $CXX)")
    command = [*compiler.split(), *FLAGS.split()]
    try:
        version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True).stdout
        told = "\n".join((SOURCE.read_text(), *command, version, _processor()))
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoengine"
        path = cache / f"kernels-{hashlib.sha256(told.encode()).hexdigest()[:24]}.so"
        if path.is_file():
            return ctypes.CDLL(str(path)), False
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            new = Path(directory) / "kernels.so"
            done = subprocess.run([*command, str(SOURCE), "-o", str(new)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-500:]}")
            new.replace(path)  # in one go: another process may be doing the same
        return ctypes.CDLL(str(path)), True
    except OSError as error:
        raise RuntimeError(str(error)) from error


def _processor() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    flags = re.search(r"(?m)^(flags|Features).*$", info.read_text()) if info.exists() else None
    return f"{platform.machine()} {flags[0] if flags else platform.processor()}"
