"""`CPU`: the device with compiled kernels, packed weights and pinned threads."""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from nanoengine.backends.cpu.build import FOLDER, NoKernelsError
from nanoengine.backends.cpu.compiled_attention import CompiledAttention
from nanoengine.backends.cpu.kernels import Kernels, dtype_name
from nanoengine.backends.cpu.packed_layers import CompiledLayer, PackedLinear, pack_weights
from nanoengine.backends.cpu.pinned_threads import PinnedThreads
from nanoengine.backends.cpu.populate_cache import PopulatingForward
from nanoengine.backends.device import Attention, Decodes, Device, Forward
from nanoengine.backends.host_memory import keep_freed_memory
from nanoengine.backends.kv_cache import KVSpec
from nanoengine.backends.paged_attention import PagedAttention
from nanoengine.config import EngineConfig

if TYPE_CHECKING:  # at run time it is imported for quantized weights
    from nanoengine.backends.quantization import Quantized


class CPU(Device):
    """Describes a CPU. Its kernels come from a C++ compiler or a wheel, and enforce_eager disables them."""

    rounds_weights = rounds_activations = has_exact_kernels = True

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        super().__init__(device, config)
        self.threads = PinnedThreads(config.pin_threads)
        self.kernels: Kernels | None = None
        self._no_kernels: str | None = None  # why there are no kernels
        self._forwards: WeakSet[PopulatingForward] = WeakSet()
        keep_freed_memory()

    def choose_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See the base class. A dtype that has kernels is kept."""
        if self._find_kernels(dtype):
            return dtype
        chosen = super().choose_dtype(dtype)
        if chosen != dtype:
            self._find_kernels(chosen)
        return chosen

    def _find_kernels(self, dtype: torch.dtype) -> bool:
        """Use the kernels for that dtype, compiling them if necessary. Return whether there are any."""
        try:
            if self.config.enforce_eager:
                raise NoKernelsError("enforce_eager")
            int8_cache = self.config.kv_cache_dtype == "int8"
            self.kernels = Kernels(dtype, int8_cache, self.config.batch_invariant)
            self._no_kernels = None
        except NoKernelsError as error:
            self._no_kernels = str(error)
        return self.kernels is not None

    def pack(self, weight: "Quantized", bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
        """Return a layer that computes with a quantized weight, or None if it must be dequantized."""
        kernels = self.kernels
        if kernels is None or not kernels.serves(dtype) or (fitted := weight.fitted(dtype)) is None:
            return None
        activation_bits, integers = self._activation_bits(dtype), fitted.integers
        if activation_bits and fitted.bits == 8 and integers.clamp(-32, 31).equal(integers):
            fitted = fitted._replace(bits=6)  # GGUF's types of 5 and 6 bits
        return PackedLinear(fitted, bias, kernels, dtype, activation_bits)

    def _activation_bits(self, dtype: torch.dtype) -> int:
        """Return 8 if products with quantized weights round activations to 8 bits, else 0."""
        is_faster = self.kernels is not None and self.kernels.are_integers_fast and dtype != torch.float32
        return {"auto": 8 * is_faster, "int8": 8, "float": 0}[self.config.activations]

    def prepare(self, model: Any) -> None:
        has_states = bool(getattr(model, "states", None))
        dtypes = {spec.dtype for spec in model.kv_specs}
        for dtype in dtypes | ({next(model.parameters()).dtype} if has_states else set()):
            if self.kernels is not None and not self.kernels.serves(dtype):
                self.kernels, self._no_kernels = None, f"there are no kernels for {dtype_name(dtype)}"
        self.draw = None if self.kernels is None else self.kernels.sample
        if has_states:
            model.states.kernels = self.kernels
        asked = {
            f"quantization={self.config.quantization!r}": self.bits,
            "activations='int8'": self.config.activations == "int8",
            "batch_invariant=True": self.config.batch_invariant,
        }
        for setting, is_set in asked.items():
            if is_set and self.kernels is None:
                raise ValueError(f"{setting} needs compiled kernels: {self._no_kernels}")
        if not model.replaceable:
            model.use_linear_layers()
        pack_weights(model, self.kernels, self.bits, self._activation_bits(next(model.parameters()).dtype))
        if model.replaceable and self.kernels is not None:
            model.use_kernels(self.kernels)
            for i, layer in enumerate(model.layers):
                if CompiledLayer.can_hold(layer):
                    model.layers[i] = CompiledLayer(layer, self.kernels, i == len(model.layers) - 1)

    def running(self) -> AbstractContextManager[object]:
        for forward in self._forwards:  # here this thread is not pinned yet
            forward.look_ahead(is_idle=False)
        return self.threads

    def rest(self) -> None:
        self.threads.end()
        for forward in self._forwards:
            forward.look_ahead(is_idle=True)

    def capture(self, decodes: Decodes) -> Forward:
        if sys.platform != "linux":
            return super().capture(decodes)
        share = 0.1 / self.config.tensor_parallel_size
        forward = PopulatingForward(decodes.caches, -(-decodes.max_num_tokens // decodes.block_size), share)
        self._forwards.add(forward)
        return forward

    def release(self) -> None:
        for forward in self._forwards:
            forward.close()

    def choose_attention(self, specs: Sequence[KVSpec], settings: frozenset[str]) -> Attention:
        attention = super().choose_attention(specs, settings)
        if attention.backend is not CompiledAttention:
            if self.config.batch_invariant:
                why = "; ".join(attention.notes) or f"attn_backend={self.config.attn_backend!r}"
                raise ValueError(f"batch_invariant=True needs compiled attention: {why}")
            return attention
        assert self.kernels is not None
        if (num_threads := torch.get_num_threads()) > 1:
            cpus = ", ".join(map(str, self.threads.cpus))
            pinned = f"pinned to CPUs {cpus}" if cpus else "not pinned"
            attention.notes.append(f"{num_threads} threads {pinned}")
        if self.kernels.has_one_thread:
            attention.notes.append("kernels use one thread: the compiler does not support OpenMP")
        library = Path(self.kernels.library._name)
        if library.parent == FOLDER:
            attention.notes.append(f"built for {library.name[:9]}, without a C++ compiler for this processor")
        if self.kernels.was_compiled:
            attention.notes.append(f"compiled now, {self.kernels.seconds:.1f} s")
        return attention._replace(build=functools.partial(CompiledAttention, kernels=self.kernels))

    def backends(self) -> Iterator[type[PagedAttention]]:
        yield CompiledAttention
        yield from super().backends()

    def obstacle(
        self, backend: type[PagedAttention], specs: Sequence[KVSpec], settings: frozenset[str]
    ) -> str | None:
        if backend is CompiledAttention:
            return self._no_kernels
        return super().obstacle(backend, specs, settings)
