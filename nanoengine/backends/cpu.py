"""What PyTorch leaves to its user on a CPU: cores for the threads, and kernels it lacks.

Top to bottom: threads, kernels, weights packed for them, attention and layers by them; `CPU` uses all.
"""

import copy
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
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from nanoengine.backends.attention import (
    GroupedAttention,
    PagedAttention,
    QueryChunk,
    Settings,
    TorchAttention,
    whole_rows,
)
from nanoengine.backends.device import Attention, Device, Trial
from nanoengine.backends.inputs import AttentionMetadata, SamplingMetadata
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.memory import keep_freed_memory, zeros_on_large_pages
from nanoengine.backends.quantized import PackedEmbedding, Quantized, grouped, quantize
from nanoengine.config import ROUNDED, EngineConfig
from nanoengine.steps import unwound_by_sigterm

# ---- Threads -------------------------------------------------------------------------------------

# Settings of OpenMP by which a user has placed the threads already.
PLACED_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

PAUSE_SOFT = 1  # OpenMP's omp_pause_soft: its settings stay as they are


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
        self._openmp, self._pins = _loaded_openmp(), enabled and can
        self._pinned = local()  # .cpus: where the calling thread's workers are; each thread has a team

    def __enter__(self) -> None:
        self._allowed: set[int] | None = None
        if self._openmp is None or not self._pins or torch.get_num_threads() == 1:
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

    def end(self) -> None:
        """End the calling thread's workers, outside the block; what computes next starts new ones.

        Beside another thread's team there are more threads than cores, and OpenMP has those that wait for
        the next operator sleep at once: a decoding step took 92 ms instead of 57.
        """
        self._pinned.cpus = None
        if self._openmp is not None and hasattr(self._openmp, "omp_pause_resource_all"):
            self._openmp.omp_pause_resource_all(PAUSE_SOFT)

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


# ---- Kernels -------------------------------------------------------------------------------------

SOURCE = Path(__file__).parent / "kernels.cpp"
HEADERS = [SOURCE.with_name(name) for name in ("attention.h", "products.h", "states.h")]
# What of -ffast-math keeps NaN, infinity, and the order of sums, on which results depend to the last bit.
FLAGS = (
    "-O3 -march=native -std=c++17 -fopenmp -shared -fPIC -fno-math-errno -fno-trapping-math -fno-signed-zeros"
)


class Form(NamedTuple):
    """How a packed weight's numbers are written: in x's dtype, or as a `Quantized`'s integers."""

    bits: int = 0  # 0: in x's dtype
    group: int = 0
    has_zeros: int = 0


PLAIN = Form()
TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 4}  # as kernels.cpp has them
Slots = tuple[Tensor, Tensor]  # where N sequences' states are read, and written: (N,) int64 each


class Kernels:
    """`kernels.cpp`, compiled for this machine's processor and kept between runs.

    For one type; for others they are compiled when they are asked for. Source of the idea: vLLM's `csrc/cpu`.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails; the message says what to do.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.was_compiled, self.seconds = False, 0.0
        self._functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
        self.library = self._load(dtype)
        self._libraries: dict[torch.dtype, ctypes.CDLL | None] = {dtype: self.library}  # None: it failed

    def _load(self, dtype: torch.dtype) -> ctypes.CDLL:
        if dtype not in TYPES:
            raise RuntimeError(f"there are no kernels for {_name(dtype)}")
        start = time.perf_counter()
        with unwound_by_sigterm():  # which else would leave the compiler and its files behind
            library, was_compiled = _compile(TYPES[dtype])
        self.seconds += time.perf_counter() - start
        self.was_compiled |= was_compiled
        if not hasattr(library, f"linear_{_name(dtype)}"):
            raise RuntimeError(f"the compiler does not know {_name(dtype)}")
        return library

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether there are kernels for tensors of that type: an old compiler knows no float16."""
        if dtype not in self._libraries:
            try:
                self._libraries[dtype] = self._load(dtype)
            except RuntimeError:
                self._libraries[dtype] = None
        return self._libraries[dtype] is not None

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
        self.call(
            "decode_attention", out, q, k_cache, v_cache, block_tables, seq_lens, rows,
            len(rows), block_tables.shape[1], q.shape[1], k_cache.shape[2], q.shape[2], out.shape[2],
            k_cache.shape[1], float(scale), window or 0, float(softcap or 0), sinks, alibi_slopes,
        )  # fmt: skip

    def prefill_attention(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_len: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Attention of a sequence's last tokens, q (T, H, D), into out (T, H, D'); block_table is int32."""
        self.call(
            "prefill_attention", out, q, k_cache, v_cache, block_table, len(q), seq_len,
            q.shape[1], k_cache.shape[2], q.shape[2], out.shape[2], k_cache.shape[1],
            float(scale), window or 0, float(softcap or 0), sinks, alibi_slopes,
        )  # fmt: skip

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k (T, K, D) and v (T, K, D') to their slots, (T,) int64."""
        widths = k[0].numel(), v[0].numel()
        self.call("write_kv", k_cache, v_cache, k, v, slots, len(k), *widths, k.stride(0), v.stride(0))

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, (T, E), and that sum; without a residual the sum is x."""
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        self.call("rms_norm", out, total, x, residual, weight, float(eps), *x.shape)
        return out, total

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads of x (T, heads, D) normalised, where there is a weight, and rotated by cos, sin (T, 1, D)."""
        out = x.new_empty(x.shape)
        self.call("norm_rotate", out, x, x.stride(0), weight, float(eps), cos, sin, *x.shape)
        return out

    def norm_rotate_both(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As `norm_rotate`, of queries and keys."""
        of_k = self.norm_rotate(k, k_weight, eps, cos, sin)
        return self.norm_rotate(q, q_weight, eps, cos, sin), of_k

    @functools.cached_property
    def num_outputs(self) -> int:
        """How many outputs a block of a packed weight has."""
        return ctypes.c_int64.in_dll(self.library, "outputs").value

    def can_multiply(self, weight: Tensor) -> bool:
        """Whether `linear` takes that weight, (N, I)."""
        return self.serves(weight.dtype) and weight.shape[1] % _inputs_side_by_side(weight.dtype) == 0

    def pack(self, weight: Tensor) -> Tensor:
        """A weight (N, I) as `linear` reads it: blocks of its outputs, with 0 beyond N.

        (blocks, I, outputs), and of bfloat16 (blocks, I / 2, outputs, 2).
        """
        step, outputs = _inputs_side_by_side(weight.dtype), self.num_outputs
        num_outputs, num_inputs = weight.shape
        shape = -(-num_outputs // outputs), num_inputs // step, outputs, step
        packed = zeros_on_large_pages(shape, weight.dtype)
        whole = num_outputs // outputs * outputs
        packed[: whole // outputs] = (
            weight[:whole].view(-1, outputs, num_inputs // step, step).transpose(1, 2)
        )
        if whole < num_outputs:
            packed[-1, :, : num_outputs - whole] = (
                weight[whole:].view(-1, num_inputs // step, step).transpose(0, 1)
            )
        return packed if step > 1 else packed.squeeze(-1)

    def pack_integers(self, quantized: Quantized) -> Tensor:
        """The same of a weight (N, I) in few bits, (blocks, bytes): groups of integers, scales and zeros."""
        integers, scales, zeros, bits = quantized
        (num_outputs, num_inputs), num_groups = integers.shape, scales.shape[1]
        num_blocks = -(-num_outputs // self.num_outputs)
        of_output = num_inputs * bits // 8 + 2 * num_groups * (1 if zeros is None else 2)
        packed = zeros_on_large_pages((num_blocks, self.num_outputs * of_output), torch.int8)
        halves = [None if x is None else x.half().contiguous() for x in (scales, zeros)]
        sizes = num_outputs, num_inputs, bits, quantized.group
        self.call("pack_integers", packed, integers.contiguous(), *halves, *sizes)
        return packed

    def unpack_rows(
        self, packed: Tensor, rows: Tensor, num_inputs: int, dtype: torch.dtype, form: Form
    ) -> Tensor:
        """Rows (..) of the weight (N, I) that was packed: (.., I) in that dtype."""
        if not form.bits:
            outputs = self.num_outputs
            return packed[rows // outputs, :, rows % outputs].flatten(rows.dim())
        out = torch.empty(*rows.shape, num_inputs, dtype=dtype)
        self.call("unpack_rows", out, packed, rows.contiguous(), rows.numel(), num_inputs, *form)
        return out

    def linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int, form: Form = PLAIN
    ) -> Tensor:
        """The product of x (.., I) with a packed weight of that form, plus bias (N,): (.., N)."""
        out = x.new_empty(*x.shape[:-1], num_outputs)
        num_inputs = x.shape[-1]
        sizes = x.numel() // num_inputs, num_inputs, num_outputs
        self.call("linear", out, x.contiguous(), packed, bias, *sizes, *form)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up (T, 2 I)."""
        num_rows, width = gate_up.shape
        out = gate_up.new_empty(num_rows, width // 2)
        self.call("silu_and_mul", out, gate_up, num_rows, width // 2)
        return out

    def conv_step(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Slots, silu: bool
    ) -> Tensor:
        """A causal convolution's next output (N, C) for x (N, C); weight (C, W), states (slots, C, W)."""
        out = torch.empty_like(x)
        self.call("conv_step", out, x, weight, bias, states, *slots, *x.shape, weight.shape[1], int(silu))
        return out

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """The gated delta rule's outputs (N, T, H, V) for q and k (N, T, K, D) and v (N, T, H, V).

        decay (N, T, H) or (N, T, H, D) and beta (N, T, H) are float32, states (slots, H, D, V) too.
        """
        out = torch.empty_like(v)
        sizes = *v.shape[:3], *k.shape[2:], v.shape[3], decay.numel() // beta.numel()
        self.call("delta_rule", out, q, k, v, decay, beta, states, *slots, *sizes)
        return out

    def mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Mamba2's outputs (N, T, H, P) for x (N, T, H, P), b and c (N, T, G, S).

        dt (N, T, H), a and d (H,) are float32, states (slots, H, P, S) too.
        """
        out = torch.empty_like(x)
        self.call("mamba2", out, x, dt, a, b, c, d, states, *slots, *x.shape, *b.shape[2:])
        return out

    def mamba(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Mamba's outputs (N, T, I) for x (N, T, I), b and c (N, T, S).

        dt (N, T, I) and a (I, S) are float32, states (slots, I, S) too.
        """
        out = torch.empty_like(x)
        self.call("mamba", out, x, dt, a, b, c, states, *slots, *x.shape, b.shape[2])
        return out

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """As `sampling.draw_rows`."""
        tokens, largest = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        arrays = (torch.from_numpy(array) for array in metadata)
        self.call("sample", logits.contiguous(), tokens, largest, *arrays, *logits.shape)
        return tokens, largest

    def call(self, name: str, first: Tensor, *arguments: Any) -> None:
        """Call a kernel for the first tensor's type; tensors become addresses, None a null pointer."""
        function = self._functions.get((name, first.dtype))
        if function is None:
            self.serves(first.dtype)
            library = self._libraries[first.dtype] or self.library  # integers are packed by any
            address = ctypes.c_void_p.in_dll(library, f"{name}_{_name(first.dtype)}").value
            types = {int: ctypes.c_int64, float: ctypes.c_float}
            signature = [types.get(type(a), ctypes.c_void_p) for a in (first, *arguments)]
            function = ctypes.CFUNCTYPE(None, *signature)(address)  # type: ignore[arg-type]
            self._functions[name, first.dtype] = function
        function(first.data_ptr(), *(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


def _integers(values: Sequence[Tensor | int | None]) -> Tensor:
    """Numbers and addresses, (n,) int64, as a kernel reads them; the tensors have to be kept."""
    return torch.tensor(
        [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in values], dtype=torch.int64
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _inputs_side_by_side(dtype: torch.dtype) -> int:
    """How many inputs' weights a packed weight holds together for each output."""
    return 2 if dtype == torch.bfloat16 else 1


def _compile(types: int) -> tuple[ctypes.CDLL, bool]:
    """Compile `kernels.cpp` for some of `TYPES`, unless this source was compiled for this processor before.

    A library's name holds its own digest, so that one that was cut short or exchanged is not loaded.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++, clang++ or $CXX)")
    program, *options = compiler.split()
    command = [program, *FLAGS.split(), f"-DTYPES={types}", *options]  # $CXX may say -march=x86-64-v3
    try:
        version = _run([program, *options, "--version"], tempfile.gettempdir())
        sources = [path.read_text() for path in (SOURCE, *HEADERS)]
        told = "\n".join((*sources, *command, version, _processor()))
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
    """A linear layer whose weight lies as `Kernels.linear` reads it.

    Args:
        weight: (out, in); or in few bits, to compute with in `dtype`.
        bias: (out,) or None.
        kernels: which `can_multiply` it.
        dtype: of inputs and outputs.
    """

    packed: Tensor

    def __init__(
        self, weight: Tensor | Quantized, bias: Tensor | None, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.kernels, self.bias, self.dtype, self.form = kernels, bias, dtype, PLAIN
        if isinstance(weight, Quantized):
            self.form = Form(weight.bits, weight.group, int(weight.zeros is not None))
            self.out_features, self.in_features = weight.integers.shape
            packed = kernels.pack_integers(weight)
        else:
            self.out_features, self.in_features = weight.shape
            packed = kernels.pack(weight)
        self.register_buffer("packed", packed, persistent=False)

    def load(self, weight: Tensor, first: int = 0) -> None:
        """Replace rows of the weight from the first on, in its memory; in few bits they are rounded here."""
        end = first + len(weight)
        if not self._are_blocks(first, end):
            whole = self.weight
            whole[first:end] = weight
            weight, first, end = whole, 0, self.out_features
        outputs = self.kernels.num_outputs
        self.packed[first // outputs : -(-end // outputs)] = self._pack(weight)

    def can_load(self, first: int, num_rows: int) -> bool:
        """Whether `load` would leave the other rows as they are: in few bits they cannot be packed anew."""
        return not self.form.bits or self._are_blocks(first, first + num_rows)

    def holds(self, weight: Tensor) -> bool:
        """Whether it was made of that weight, (out, in)."""
        return torch.equal(self.packed, self._pack(weight))

    def _are_blocks(self, first: int, end: int) -> bool:
        outputs = self.kernels.num_outputs
        return first % outputs == 0 and (end % outputs == 0 or end == self.out_features)

    def _pack(self, weight: Tensor) -> Tensor:
        weight, bits = weight.to(self.packed.device, self.dtype), self.form.bits
        return self.kernels.pack_integers(quantize(weight, bits)) if bits else self.kernels.pack(weight)

    @property
    def weight(self) -> Tensor:
        """The weight that is computed with, (out, in), made anew at each call: some models look at it."""
        return self.rows(torch.arange(self.out_features))

    def rows(self, rows: Tensor) -> Tensor:
        """Rows (..) of the weight: (.., in)."""
        return self.kernels.unpack_rows(self.packed, rows, self.in_features, self.dtype, self.form)

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out)."""
        if x.dtype != self.dtype:  # as nn.Linear
            raise RuntimeError(f"expected an input of {self.dtype}, got {x.dtype}")
        return self.kernels.linear(x, self.packed, self.bias, self.out_features, self.form)


class OneDNNLinear(nn.Module):
    """A linear layer whose bfloat16 weight lies as oneDNN's products want it.

    `nn.Linear` reorders it at every call, which costs more than a small batch's product.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = layer.bias
        self.weight = layer.weight.new_empty(0, layer.in_features)  # some ask for its dtype
        self.shape = layer.weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight)

    def load(self, weight: Tensor, first: int = 0) -> None:
        """Replace rows of the weight from the first on."""
        whole = self.weight.new_zeros(self.shape) if self.packed is None else self.packed.to_dense()
        whole[first : first + len(weight)] = weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(whole)

    def drop(self) -> None:
        """Give the weight's memory back, until `load`."""
        self.packed = None

    def holds(self, weight: Tensor) -> bool:
        """Whether it was made of that weight, (out, in)."""
        return torch.equal(self.packed.to_dense(), weight)

    def forward(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack_embedding(embedding: nn.Embedding, head: PackedLinear) -> nn.Embedding:
    """An embedding with its rows read out of a packed head; as it is, where that would change what it does.

    What its class adds stays, as Gemma's scale does: its `super().forward` is `PackedEmbedding`'s.
    """
    result: Any = copy.copy(embedding)
    kind, ids = type(embedding), torch.arange(min(64, head.out_features))
    is_plain = kind is nn.Embedding
    result.__class__ = PackedEmbedding if is_plain else type(kind.__name__, (kind, PackedEmbedding), {})
    result._parameters = {}
    result.weight = head.rows(ids[:0])  # some ask for its dtype
    result.head = (head,)
    plain = copy.copy(embedding)  # of the numbers in the head, which may be rounded
    plain._parameters = {"weight": nn.Parameter(head.rows(ids), requires_grad=False)}
    plain.padding_idx = None  # which may lie beyond these, and matters in training alone
    with suppress(IndexError, RuntimeError):  # its class looks at the weight itself
        if torch.equal(result(ids), plain(ids)):
            return result  # type: ignore[no-any-return]
    return embedding


def pack_linear(layer: nn.Linear, kernels: Kernels | None, bits: int = 0) -> nn.Module:
    """The layer in the layout that is fastest here, which may be its own; equal results up to rounding.

    In `bits` where these are 4 or 8 and its inputs can be divided into groups.
    """
    weight: Tensor = layer.weight
    if kernels is not None and bits and grouped(layer.in_features) is not None:
        return PackedLinear(quantize(weight, bits), layer.bias, kernels, weight.dtype)
    if kernels is not None and kernels.can_multiply(weight):
        return PackedLinear(weight, layer.bias, kernels, weight.dtype)
    is_bfloat16 = weight.dtype == torch.bfloat16
    return OneDNNLinear(layer) if is_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported() else layer


# Names of layers that choose experts, which few bits are too few for, and of heads, for which 4 are: other
# formats of 4 bits keep these in more, too.
ROUTERS = ("float32_linear", "gate", "router", "shared_expert_gate")
HEADS = ("lm_head", "embed_out", "output_projection")


Places = list[tuple[nn.Module, str]]  # parents of a layer, and its names there


def _places(model: nn.Module) -> tuple[dict[nn.Linear, Places], dict[int, Places]]:
    """Where linear layers are, and where embeddings are, by the id of their weight."""
    linears: dict[nn.Linear, Places] = {}
    embeddings: dict[int, Places] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                linears.setdefault(child, []).append((parent, name))
            elif isinstance(child, nn.Embedding):
                embeddings.setdefault(id(child.weight), []).append((parent, name))
    return linears, embeddings


def pack_weights(model: nn.Module, kernels: Kernels | None, bits: int = 0) -> None:
    """Replace a model's linear layers by packed ones, and an embedding that is tied to one of them.

    One at a time: each plain weight is let go before the next is packed.
    """
    linears, embeddings = _places(model)
    while linears:
        layer, places = linears.popitem()
        names = {name for _, name in places}
        most = 0 if names & {*ROUTERS} else 8 if names & {*HEADS} else bits
        packed = pack_linear(layer, kernels, bits and most)
        for parent, name in places:
            setattr(parent, name, packed)
        if isinstance(packed, PackedLinear):
            for parent, name in embeddings.get(id(layer.weight), ()):
                setattr(parent, name, pack_embedding(getattr(parent, name), packed))


# ---- Attention -----------------------------------------------------------------------------------


class CompiledAttention(TorchAttention):
    """On a CPU by compiled kernels, which read K and V through the block tables."""

    name = "compiled"

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int, kernels: Kernels) -> None:
        super().__init__(metadata, block_size)
        self._kernels = kernels
        self._described: list[object] = []  # what the addresses lead to

    @functools.cached_property
    def description(self) -> Tensor:
        """The step, as the kernel of a whole layer reads it: its `Batch`."""
        return self._describe(self._decode_sequences, self._chunks, None)

    @functools.cached_property
    def needed_rows(self) -> Tensor | None:
        """The metadata's; None: all."""
        rows = self.metadata.needed_rows
        is_all = rows is None or len(rows) == len(self.metadata.slot_mapping)
        return None if is_all else torch.from_numpy(rows)

    @functools.cached_property
    def last_description(self) -> Tensor:
        """The same for the last layer, which is computed to its end for the needed rows alone."""
        assert self.needed_rows is not None
        ends = self.metadata.cu_seqlens_q.long()
        counts = torch.searchsorted(self.needed_rows, ends).diff()
        tables, seq_lens, rows = self.metadata.block_tables, self.metadata.seq_lens, ends[1:] - 1
        decodes = tuple(of_sequences[counts == 1] for of_sequences in (tables, seq_lens, rows))
        chunks = [x for x, n in zip(self._chunks, counts[ends.diff() > 1].tolist(), strict=True) if n > 1]
        return self._describe(decodes, chunks, self.needed_rows)

    def _describe(
        self, decodes: tuple[Tensor, ...], chunks: list[QueryChunk], needed_rows: Tensor | None
    ) -> Tensor:
        of_chunks = _integers([x for c in chunks for x in (c.start, c.end, c.seq_len, c.block_table)])
        self._described += of_chunks, decodes
        sizes = *decodes[0].shape, self.block_size, len(chunks)
        slots = self.metadata.slot_mapping
        num_needed = len(slots if needed_rows is None else needed_rows)
        return _integers((slots, *decodes, *sizes, of_chunks, needed_rows, num_needed))

    def _prepare_decodes(self, rows: Tensor, tables: Tensor, seq_lens: Tensor) -> None:
        self._decode_sequences = tables, seq_lens, rows

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        self._kernels.write_kv(cache.k, cache.v, whole_rows(k), whole_rows(v), self.metadata.slot_mapping)

    def _decodes(self, out: Tensor, q: Tensor, cache: KVCache, settings: Settings) -> None:
        sequences = self._decode_sequences
        self._kernels.decode_attention(out, q, cache.k, cache.v, *sequences, **settings._asdict())

    def _chunk(self, out: Tensor, chunk: QueryChunk, q: Tensor, cache: KVCache, settings: Settings) -> None:
        sequence = chunk.block_table, chunk.seq_len
        self._kernels.prefill_attention(out, q, cache.k, cache.v, *sequence, **settings._asdict())


class CompiledLayer(nn.Module):
    """A layer of `models/decoder.py` whose weights are packed, in one call of a kernel.

    The last one computes most of a prompt only as far as K and V: nobody looks at what follows.
    """

    def __init__(self, layer: Any, kernels: Kernels, is_last: bool = False) -> None:
        super().__init__()
        self.layer, self.kernels, self.is_last = layer, kernels, is_last
        attn, projections = layer.self_attn, self._projections(layer)
        linears = [x for layer in projections for x in (layer.packed, layer.bias, *layer.form)]
        norms = layer.input_layernorm, attn.q_norm, attn.k_norm, layer.post_attention_layernorm
        weights = [None if norm is None else norm.weight for norm in norms]
        heads = (size // attn.head_dim for size in attn.sizes[:2])
        sizes = (projections[0].in_features, *heads, attn.head_dim, projections[3].in_features)
        # As the kernel's `Layer`; what the addresses lead to is kept by the layer.
        self.description = _integers((*linears, *weights, *sizes, attn.window or 0))
        self.eps, self.scale = float(layer.input_layernorm.eps), float(attn.head_dim**-0.5)

    @staticmethod
    def can_hold(layer: Any) -> bool:
        """Whether it computes this layer: a rank's has collectives in it."""
        return all(type(projection) is PackedLinear for projection in CompiledLayer._projections(layer))

    @staticmethod
    def _projections(layer: Any) -> list[Any]:
        attn, mlp = layer.self_attn, layer.mlp
        return [attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj]

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        attention: PagedAttention | GroupedAttention,
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer`; of the last one, rows that are not needed are zeros."""
        if isinstance(attention, GroupedAttention):
            attention = attention.groups[cache.group]
        if not isinstance(attention, CompiledAttention):
            return self.layer(x, residual, cos, sin, cache, attention)  # type: ignore[no-any-return]
        needed = attention.needed_rows if self.is_last else None
        batch = attention.description if needed is None else attention.last_description
        out, total = x.new_empty(2, len(x) if needed is None else len(needed), x.shape[1])
        self.kernels.call(
            "decoder_layer", out, total, x, residual, cos, sin, cache.k, cache.v,
            self.description, batch, len(x), self.eps, self.scale,
        )  # fmt: skip
        if needed is not None:
            out, total = (torch.zeros_like(x).index_copy_(0, needed, rows) for rows in (out, total))
        return out, total


# ---- All of it together --------------------------------------------------------------------------


class CPU(Device):
    """A CPU: compiled kernels (with a compiler, without enforce_eager), packed weights, pinned threads."""

    backends = (CompiledAttention, TorchAttention)
    quantizations = ROUNDED

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        super().__init__(device, config)
        self.threads = PinnedThreads(config.pin_threads)
        self.kernels: Kernels | None = None
        self._no_kernels: str | None = None  # why there are none
        self._notes: list[str] = []
        keep_freed_memory()

    def choose_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As it is, with kernels that read it; float32 where PyTorch would emulate what "auto" stands for."""
        if self._find_kernels(dtype) or self.config.dtype != "auto" or dtype == torch.float32:
            return dtype
        if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
            return dtype
        self._notes.append(f"float32 instead of {_name(dtype)}, which is emulated here without kernels")
        self._find_kernels(torch.float32)
        return torch.float32

    def _find_kernels(self, dtype: torch.dtype) -> bool:
        """Whether there are kernels for that type, which then are those of this device."""
        try:
            if self.config.enforce_eager:
                raise RuntimeError("enforce_eager")
            self.kernels, self._no_kernels = Kernels(dtype), None
        except RuntimeError as error:
            self._no_kernels = str(error)
        return self.kernels is not None

    def pack(self, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
        """As in the base class."""
        group = grouped(weight.group)
        if self.kernels is None or not self.kernels.serves(dtype) or group is None:
            return None
        weight = weight.regrouped(group)
        return PackedLinear(weight, bias, self.kernels, dtype) if weight.fits(dtype) else None

    def prepare(self, model: Any) -> None:
        """As in the base class."""
        has_states = bool(getattr(model, "states", None))
        dtypes = {spec.dtype for spec in model.kv_specs}
        for dtype in dtypes | ({next(model.parameters()).dtype} if has_states else set()):
            if self.kernels is not None and not self.kernels.serves(dtype):
                self.kernels, self._no_kernels = None, f"there are no kernels for {_name(dtype)}"
        self.draw = None if self.kernels is None else self.kernels.sample
        if has_states:
            model.states.kernels = self.kernels
        quantization = self.config.quantization if self.config.quantization in ROUNDED else None
        if quantization is not None and self.kernels is None:
            raise ValueError(f"quantization={quantization!r} needs compiled kernels: {self._no_kernels}")
        if not model.replaceable:
            model.use_linear_layers()
        pack_weights(model, self.kernels, int((quantization or "int0").removeprefix("int")))
        if model.replaceable and self.kernels is not None:
            model.use_kernels(self.kernels)
            for i, layer in enumerate(model.layers):
                if CompiledLayer.can_hold(layer):
                    model.layers[i] = CompiledLayer(layer, self.kernels, i == len(model.layers) - 1)

    def running(self) -> AbstractContextManager[object]:
        """As in the base class."""
        return self.threads

    def rest(self) -> None:
        """As in the base class."""
        self.threads.end()

    def choose_attention(self, specs: Sequence[KVSpec], settings: frozenset[str]) -> Attention:
        """As in the base class."""
        attention = super().choose_attention(specs, settings)
        attention.notes.extend(self._notes)
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

    def free_bytes(self, trial: Trial) -> int:
        """As vLLM on a CPU, 4 GiB at most; ranks of one model share it."""
        return min(psutil.virtual_memory().available // 2, 4 << 30) // self.config.tensor_parallel_size
