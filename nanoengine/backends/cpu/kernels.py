"""`Kernels`: the functions of kernels.cpp as methods that take and return tensors."""

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoengine.backends.cpu.build import NoKernelsError, load_library
from nanoengine.backends.host_memory import zeros_on_large_pages
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.packing import Form
from nanoengine.backends.paged_attention import Settings
from nanoengine.backends.step_inputs import SamplingMetadata
from nanoengine.signals import unwound_by_sigterm

PLAIN = Form()
Slots = tuple[Tensor, Tensor]  # the slots that N sequences' states are read from and written to: (N,) int64
TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 4}  # the values of TYPES in kernels.cpp


class Kernels:
    """Calls the functions of kernels.cpp, compiled for this machine's processor and cached between runs.

    The constructor compiles them for one dtype, and `serves` for any other when it is first requested.
    The KV cache has the same dtype, or is an int8 cache (backends/int8_cache.py). With `exact`, results have
    the same bits under any schedule (docs/guide/bits.md). NoKernelsError says why there are no kernels.
    Source of the idea: vLLM's `csrc/cpu`.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, int8_cache: bool = False, exact: bool = False
    ) -> None:
        self.was_compiled, self.seconds, self.int8_cache, self.exact = False, 0.0, int8_cache, exact
        self._functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
        self.library = self._load(dtype)
        self.has_one_thread = ctypes.c_bool.in_dll(self.library, "one_thread").value  # no OpenMP
        self.num_outputs = ctypes.c_int64.in_dll(self.library, "outputs").value  # in a packed weight's block
        self._libraries: dict[torch.dtype, ctypes.CDLL | None] = {dtype: self.library}  # None: not available

    def _load(self, dtype: torch.dtype) -> ctypes.CDLL:
        if dtype not in TYPES:
            raise NoKernelsError(f"there are no kernels for {dtype_name(dtype)}")
        start = time.perf_counter()
        with unwound_by_sigterm():  # SIGTERM would otherwise leave the compiler running, and its files
            library, was_compiled = load_library(TYPES[dtype] | 8 * self.int8_cache, self.exact)
        self.seconds += time.perf_counter() - start
        self.was_compiled |= was_compiled
        if not hasattr(library, f"linear_{dtype_name(dtype)}"):
            raise NoKernelsError(f"the compiler does not support {dtype_name(dtype)}")
        return library

    def serves(self, dtype: torch.dtype) -> bool:
        """Return whether there are kernels for that dtype. Old compilers do not support float16."""
        if dtype not in self._libraries:
            try:
                self._libraries[dtype] = self._load(dtype)
            except NoKernelsError:
                self._libraries[dtype] = None
        return self._libraries[dtype] is not None

    def decode_attention(
        self, out: Tensor, q: Tensor, cache: KVCache, sequences: tuple[Tensor, ...], settings: Settings
    ) -> None:
        """Attend for sequences with one new token: block tables, lengths, and rows of q (T, H, D) and out."""
        sizes = *sequences[0].shape, *_layer(out, q, cache, settings)
        self.call("decode_attention", out, q, cache.k, cache.v, *sequences, *sizes)

    def prefill_attention(
        self, out: Tensor, q: Tensor, cache: KVCache, block_table: Tensor, seq_len: int, settings: Settings
    ) -> None:
        """Attend for a sequence's last tokens, q (T, H, D), into out (T, H, D'). block_table is int32."""
        sequence = block_table, len(q), seq_len
        self.call("prefill_attention", out, q, cache.k, cache.v, *sequence, *_layer(out, q, cache, settings))

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k (T, K, D) and v (T, K, D') to their slots, (T,) int64."""
        sizes = *k.shape, v.shape[2], k.stride(0), v.stride(0)
        self.call("write_kv", k, v, k_cache, v_cache, slots, *sizes)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, (T, E), and the sum. Without a residual the sum is x."""
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        self.call("rms_norm", out, total, x, residual, weight, float(eps), *x.shape)
        return out, total

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """Normalize the heads of x (T, heads, D) if there is a weight, and rotate by cos, sin (T, 1, D)."""
        out = x.new_empty(x.shape)
        self.call("norm_rotate", out, x, x.stride(0), weight, float(eps), cos, sin, *x.shape)
        return out

    def norm_rotate_both(
        self, q: Tensor, k: Tensor, v: Tensor, weights: Any, eps: float, rope: Any, **where: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply `norm_rotate` to queries and keys. Returns q, k and v."""
        q, k = (self.norm_rotate(x, weight, eps, *rope) for x, weight in zip((q, k), weights, strict=True))
        return q, k, v

    def can_multiply(self, weight: Tensor) -> bool:
        """Return whether `linear` supports that weight, (N, I)."""
        return self.serves(weight.dtype) and weight.shape[1] % _inputs_side_by_side(weight.dtype) == 0

    def pack(self, weight: Tensor) -> Tensor:
        """Pack a weight (N, I) as `linear` reads it: in blocks of outputs, padded with zeros beyond N.

        The result is (blocks, I, outputs), or (blocks, I / 2, outputs, 2) for bfloat16.
        """
        step, outputs = _inputs_side_by_side(weight.dtype), self.num_outputs
        num_outputs, num_inputs = weight.shape
        shape = -(-num_outputs // outputs), num_inputs // step, outputs, step
        packed = zeros_on_large_pages(shape, weight.dtype)
        rows, num_whole = packed.transpose(1, 2), num_outputs // outputs
        whole, rest = weight.view(num_outputs, num_inputs // step, step).tensor_split([num_whole * outputs])
        rows[:num_whole] = whole.view(num_whole, *rows.shape[1:])
        rows[-1, : len(rest)] = rest
        return packed if step > 1 else packed.squeeze(-1)

    @functools.cached_property
    def are_integers_fast(self) -> bool:
        """Whether products with quantized weights are faster if the kernel rounds the rows of x to 8 bits."""
        return ctypes.c_bool.in_dll(self.library, "integers_are_fast").value

    def pack_integers(self, parts: tuple[Tensor, Tensor, Tensor | None, int], activation_bits: int) -> Tensor:
        """Pack a `Quantized` weight (N, I) as (blocks, bytes): groups of integers, scales and zeros."""
        integers, scales, zeros, bits = parts
        (num_outputs, num_inputs), num_groups = integers.shape, scales.shape[1]
        num_blocks = -(-num_outputs // self.num_outputs)
        of_output = num_inputs * bits // 8 + 2 * num_groups * (1 if zeros is None else 2)
        packed = zeros_on_large_pages((num_blocks, self.num_outputs * of_output), torch.int8)
        halves = [None if x is None else x.half().contiguous() for x in (scales, zeros)]
        sizes = num_outputs, num_inputs, bits, num_inputs // num_groups, activation_bits
        self.call("pack_integers", packed, integers.contiguous(), *halves, *sizes)
        return packed

    def unpack_rows(
        self, packed: Tensor, rows: Tensor, num_inputs: int, dtype: torch.dtype, form: Form
    ) -> Tensor:
        """Return rows (..) of a packed weight (N, I), as (.., I) in that dtype."""
        if not form.bits:
            outputs = self.num_outputs
            return packed[rows // outputs, :, rows % outputs].flatten(rows.dim())
        out = torch.empty(*rows.shape, num_inputs, dtype=dtype)
        self.call("unpack_rows", out, packed, rows.contiguous(), rows.numel(), num_inputs, *form)
        return out

    def linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int, form: Form = PLAIN
    ) -> Tensor:
        """Multiply x (.., I) by a packed weight of that form, and add bias (N,): (.., N)."""
        out, num_inputs = x.new_empty(*x.shape[:-1], num_outputs), x.shape[-1]
        sizes = x.numel() // num_inputs, num_inputs, num_outputs
        self.call("linear", out, x.contiguous(), packed, bias, *sizes, *form)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, (T, I), for gate_up (T, 2 I)."""
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        self.call("silu_and_mul", out, gate_up, num_rows, size)
        return out

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """Sample tokens with the contract of `drawing.draw_rows`."""
        tokens, largest = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        arrays = (torch.from_numpy(array) for array in metadata)
        self.call("sample", logits.contiguous(), tokens, largest, *arrays, *logits.shape)
        return tokens, largest

    # -- layers with recurrent states: each kernel reads a sequence's state from a slot, and writes it to one

    def conv_step(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Slots, silu: bool
    ) -> Tensor:
        """Return a convolution's next output (N, C) for x (N, C), weight (C, W) and states (slots, C, W)."""
        out = torch.empty_like(x)
        self.call("conv_step", out, x, weight, bias, states, *slots, *x.shape, weight.shape[1], int(silu))
        return out

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Return the gated delta rule's outputs (N, T, H, V) for q and k (N, T, K, D) and v (N, T, H, V).

        decay (N, T, H) or (N, T, H, D), beta (N, T, H) and states (slots, H, D, V) are float32.
        """
        out = torch.empty_like(v)
        sizes = *v.shape[:3], *k.shape[2:], v.shape[3], decay.numel() // beta.numel()
        self.call("delta_rule", out, q, k, v, decay, beta, states, *slots, *sizes)
        return out

    def mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Return Mamba2's outputs (N, T, H, P) for x (N, T, H, P), b and c (N, T, G, S).

        dt (N, T, H), a and d (H,), and states (slots, H, P, S) are computed with in float32.
        """
        x, b, c = (y.to(x.dtype).contiguous() for y in (x, b, c))
        dt, a, d = (y.float().contiguous() for y in (dt, a, d))
        out = torch.empty_like(x)
        self.call("mamba2", out, x, dt, a, b, c, d, states, *slots, *x.shape, *b.shape[2:])
        return out

    def mamba(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, slots: Slots
    ) -> Tensor:
        """Return Mamba's outputs (N, T, I) for x (N, T, I), b and c (N, T, S).

        dt (N, T, I), a (I, S) and states (slots, I, S) are computed with in float32.
        """
        x, b, c = (y.to(x.dtype).contiguous() for y in (x, b, c))
        dt, a = (y.float().contiguous() for y in (dt, a))
        out = torch.empty_like(x)
        self.call("mamba", out, x, dt, a, b, c, states, *slots, *x.shape, b.shape[2])
        return out

    def call(self, name: str, first: Tensor, *arguments: Any) -> None:
        """Call a kernel for the first tensor's dtype. Tensors become addresses, and None a null pointer."""
        function = self._functions.get((name, first.dtype))
        if function is None:
            self.serves(first.dtype)
            library = self._libraries[first.dtype] or self.library  # integers: any library
            address = ctypes.c_void_p.in_dll(library, f"{name}_{dtype_name(first.dtype)}").value
            types = {int: ctypes.c_int64, float: ctypes.c_float}
            signature = [types.get(type(a), ctypes.c_void_p) for a in (first, *arguments)]
            function = ctypes.CFUNCTYPE(None, *signature)(address)  # type: ignore[arg-type]
            self._functions[name, first.dtype] = function
        function(first.data_ptr(), *(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


def _layer(out: Tensor, q: Tensor, cache: KVCache, settings: Settings) -> tuple[Any, ...]:
    """Return the arguments that describe a layer to a kernel for attention."""
    scale, window, softcap, sinks, alibi_slopes, _ = settings
    sizes = q.shape[1], cache.k.shape[2], q.shape[2], out.shape[2], cache.k.shape[1]
    return *sizes, float(scale), window or 0, float(softcap or 0), sinks, alibi_slopes


def as_int64(values: Sequence[Tensor | int | None]) -> Tensor:
    """Return numbers and addresses of tensors as (n,) int64 for a kernel. The caller keeps the tensors."""
    numbers = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in values]
    return torch.tensor(numbers, dtype=torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name, as in "float32"."""
    return str(dtype).removeprefix("torch.")


def _inputs_side_by_side(dtype: torch.dtype) -> int:
    """Return how many inputs' weights are adjacent for each output of a packed weight."""
    return 2 if dtype == torch.bfloat16 else 1
