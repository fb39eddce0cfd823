"""What PyTorch leaves to its user on a CPU: cores for the threads, memory kept, kernels it lacks.

Top to bottom: threads, memory, kernels, weights packed for them, attention by them; `CPU` uses all.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import local
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

from nanoengine.backends.attention import (
    AttentionMetadata,
    KVCache,
    KVSpec,
    PagedAttention,
    QueryChunk,
    Settings,
    TorchAttention,
    whole_rows,
)
from nanoengine.backends.device import Attention, Device
from nanoengine.config import EngineConfig
from nanoengine.steps import unwound_by_sigterm

if TYPE_CHECKING:
    from nanoengine.engine import ModelRunner

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
        with unwound_by_sigterm():  # which else would leave the compiler and its files behind
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
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Attention of the rows of q (T, H, D) that are a sequence's one new token, into out (T, H, D').

        block_tables (S, blocks) and seq_lens (S,) are int32, rows (S,) int64; sinks and slopes (H,) float32.
        """
        self._call(
            "decode_attention", out, q, k_cache, v_cache, block_tables, seq_lens, rows,
            len(rows), block_tables.shape[1], q.shape[1], k_cache.shape[2], q.shape[2], out.shape[2],
            k_cache.shape[1], float(scale), window or 0, float(softcap or 0), sinks, alibi_slopes,
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
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Scores (H, queries, keys) to probabilities in place; positions count on from the first ones."""
        self._call(
            "causal_softmax", scores, *scores.shape, first_query, first_key,
            float(scale), window or 0, float(softcap or 0), sinks, alibi_slopes,
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
    """Compile `kernels.cpp`, unless this source was compiled for this processor before.

    A library's name holds its own digest, so that one that was cut short or exchanged is not loaded.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++, clang++ or $CXX)")
    command = [*compiler.split(), *FLAGS.split()]
    try:
        version = _run([*compiler.split(), "--version"], tempfile.gettempdir())
        told = "\n".join((SOURCE.read_text(), *command, version, _processor()))
        name = f"kernels-{_digest(told.encode())}"
        cache = _private_cache()
        for path in cache.glob(f"{name}-*.so") if cache else ():
            if _is_private(path) and path.name == f"{name}-{_digest(path.read_bytes())}.so":
                return ctypes.CDLL(str(path)), False
            with suppress(OSError):
                path.unlink()
        writable = cache if cache is not None and os.access(cache, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=writable) as directory:
            path = Path(directory) / "kernels.so"
            _run([*command, str(SOURCE), "-o", str(path)], directory)
            if writable is not None:  # in one go: another process may be doing the same
                path = path.replace(writable / f"{name}-{_digest(path.read_bytes())}.so")
            return ctypes.CDLL(str(path)), True
    except OSError as error:
        raise RuntimeError(str(error)) from error


COMPILER_SECONDS = 60  # after which a compiler is given up


def _run(command: list[str], directory: str) -> str:
    """What a compiler prints; its own temporary files go to `directory`, and no part of it outlives the call.

    Raises:
        RuntimeError: it fails or does not end.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": directory},
        start_new_session=True,  # a group of its own: the compiler starts others
    )
    try:
        out, err = process.communicate(timeout=COMPILER_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)} did not end in {COMPILER_SECONDS} s") from None
    finally:
        with suppress(OSError):  # the group is gone, as it should be
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {err[-500:]}")
    return out


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _private_cache() -> Path | None:
    """The user's cache directory for kernels; None where others could put a library there."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "nanoengine"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cache if all(map(_is_private, (cache, *cache.parents))) else None
    except (OSError, RuntimeError):  # it cannot be made; there is no home
        return None


def _is_private(path: Path) -> bool:
    """Whether a file or directory is ours or root's, and nobody else can change or exchange what is in it."""
    if not hasattr(os, "getuid"):  # Windows, where a profile is its user's
        return True
    status = path.lstat()
    writers = status.st_mode & (stat.S_IWOTH if _is_own_group(status.st_gid) else stat.S_IWGRP | stat.S_IWOTH)
    is_open = writers and not status.st_mode & stat.S_ISVTX
    return status.st_uid in (os.getuid(), 0) and not stat.S_ISLNK(status.st_mode) and not is_open


def _is_own_group(group_id: int) -> bool:
    """Whether a group is this user's alone, as many systems give each user one, named alike."""
    import grp  # not on Windows
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _processor() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    flags = re.search(r"(?m)^(flags|Features).*$", info.read_text()) if info.exists() else None
    return f"{platform.machine()} {flags[0] if flags else platform.processor()}"


# ---- Weights -------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A linear layer whose bfloat16 weight lies as `Kernels.linear` reads it."""

    def __init__(self, layer: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.out_features, self.bias = kernels, layer.out_features, layer.bias
        self.packed = kernels.pack(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        return self.kernels.linear(x, self.packed, self.bias, self.out_features)


class OneDNNLinear(nn.Module):
    """A linear layer whose bfloat16 weight lies as oneDNN's products want it.

    `nn.Linear` reorders it at every call, which costs more than a small batch's product.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = layer.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class PackedEmbedding(nn.Module):
    """An embedding tied to a packed head: its rows are read out of there, and the weights held once."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.packed = head.packed

    def forward(self, input_ids: Tensor) -> Tensor:
        """(T,) -> (T, E)."""
        return Kernels.unpack_rows(self.packed, input_ids)


def pack_linear(layer: nn.Linear, kernels: Kernels | None) -> nn.Module:
    """The layer in the layout that is fastest here, which may be its own; equal results up to rounding."""
    if layer.weight.dtype != torch.bfloat16:
        return layer
    if kernels is not None and kernels.can_multiply(layer.weight):
        return PackedLinear(layer, kernels)
    return OneDNNLinear(layer) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else layer


def pack_weights(model: nn.Module, kernels: Kernels | None) -> None:
    """Replace a model's linear layers by packed ones, and an embedding that is tied to one of them.

    One at a time: each plain weight is let go before the next is packed.
    """
    parents = [module for module in model.modules() if next(module.children(), None) is not None]
    for parent in parents:
        for name in [name for name, child in parent.named_children() if type(child) is nn.Linear]:
            layer: Any = getattr(parent, name)
            packed = pack_linear(layer, kernels)
            setattr(parent, name, packed)
            if isinstance(packed, PackedLinear):
                for owner in parents:
                    for tied, child in list(owner.named_children()):
                        if isinstance(child, nn.Embedding) and child.weight is layer.weight:
                            setattr(owner, tied, PackedEmbedding(packed))


# ---- Attention -----------------------------------------------------------------------------------

TILE_SIZE = 128  # prompt tokens whose scores are computed in one product


class CompiledAttention(TorchAttention):
    """On a CPU with compiled kernels: decodes read the cache in place, chunks go tile by tile."""

    name = "compiled"

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int, kernels: Kernels) -> None:
        super().__init__(metadata, block_size)
        self._kernels = kernels

    def _prepare_decodes(self, rows: Tensor, tables: Tensor, seq_lens: Tensor, block_size: int) -> None:
        self._decode_sequences = tables, seq_lens, rows

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        self._kernels.write_kv(cache.k, cache.v, whole_rows(k), whole_rows(v), self.metadata.slot_mapping)

    def _decodes(self, out: Tensor, q: Tensor, cache: KVCache, settings: Settings) -> None:
        sequences = self._decode_sequences
        self._kernels.decode_attention(out, q, cache.k, cache.v, *sequences, **settings._asdict())

    def _chunk(self, chunk: QueryChunk, q: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        length, num_heads, head_dim = q.shape
        first = chunk.seq_len - length  # the first query's position
        low = 0 if settings.window is None else max(0, first + 1 - settings.window)  # the first key's
        k, v = (self._kernels.gather(x, chunk.block_table, low, chunk.seq_len) for x in (cache.k, cache.v))
        num_kv_heads = k.shape[0]
        heads = q.view(length, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # (K, H / K, length, D)
        outs = []
        for start in range(0, length, TILE_SIZE):
            tile = heads[:, :, start : start + TILE_SIZE].flatten(1, 2)
            num_keys = first + min(start + TILE_SIZE, length) - low  # the last query of the tile sees these
            scores = torch.bmm(tile, k[:, :num_keys].transpose(1, 2))
            shaped = scores.view(num_heads, -1, num_keys)
            self._kernels.causal_softmax(shaped, first + start, low, **settings._asdict())
            outs.append(torch.bmm(scores, v[:, :num_keys]).view(num_heads, -1, v.shape[2]))
        return torch.cat(outs, dim=1).transpose(0, 1)


# ---- All of it together --------------------------------------------------------------------------


class CPU(Device):
    """A CPU: compiled kernels (with a compiler, without enforce_eager), packed weights, pinned threads."""

    backends = (CompiledAttention, TorchAttention)

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        super().__init__(device, config)
        self.threads = PinnedThreads(config.pin_threads)
        self.kernels: Kernels | None = None
        self._no_kernels: str | None = None  # why there are none
        keep_freed_memory()

    def prepare(self, model: Any) -> None:
        """As in the base class."""
        self._no_kernels = self._load_kernels({spec.dtype for spec in model.kv_specs})
        if model.replaceable:
            pack_weights(model, self.kernels)
            if self.kernels is not None:
                model.use_kernels(self.kernels)

    def _load_kernels(self, dtypes: set[torch.dtype]) -> str | None:
        """Load them; returns why that cannot be."""
        if self.config.enforce_eager:
            return "enforce_eager"
        if unserved := {dtype for dtype in dtypes if not Kernels.serves(dtype)}:
            return f"there are no kernels for {str(unserved.pop()).removeprefix('torch.')}"
        try:
            self.kernels = Kernels()
        except RuntimeError as error:
            return str(error)
        return None

    def running(self) -> AbstractContextManager[object]:
        """As in the base class."""
        return self.threads

    def choose_attention(self, specs: Sequence[KVSpec], settings: frozenset[str]) -> Attention:
        """As in the base class."""
        attention = super().choose_attention(specs, settings)
        if attention.backend is not CompiledAttention:
            return attention
        assert self.kernels is not None
        if self.kernels.was_compiled:
            attention.notes.append(f"compiled now, {self.kernels.seconds:.1f} s")
        return attention._replace(build=functools.partial(CompiledAttention, kernels=self.kernels))

    def obstacle(
        self, backend: type[PagedAttention], specs: Sequence[KVSpec], settings: frozenset[str]
    ) -> str | None:
        """As in the base class."""
        if backend is CompiledAttention:
            return self._no_kernels
        return super().obstacle(backend, specs, settings)

    def free_bytes(self, runner: "ModelRunner") -> int:
        """As vLLM on a CPU, 4 GiB at most; ranks of one model share it."""
        return min(psutil.virtual_memory().available // 2, 4 << 30) // self.config.tensor_parallel_size
