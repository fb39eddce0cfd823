"""`Device`: everything the engine needs from the processor it runs on, here in plain PyTorch for a CPU.

The subclasses `cpu_device.CPU` and `cuda.CUDA` override what can be faster there, so that no other module
has to distinguish processors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoengine.backends.host_memory import Available, available_memory, pinned_memory
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.packing import Pack
from nanoengine.backends.paged_attention import BuildAttention, PagedAttention
from nanoengine.backends.step_inputs import ModelInputs, SamplingMetadata
from nanoengine.config import EngineConfig


class Attention(NamedTuple):
    """Names the attention backend that the device chose."""

    backend: type[PagedAttention]
    build: BuildAttention
    notes: list[str]  # for the user: which faster backends cannot be used, and why


Compute = Callable[..., Tensor]  # the hidden states, (T, E), of a batch, computed by the model or another one


class Forward:
    """Runs each batch through the model eagerly. Subclasses replay CUDA graphs."""

    def __init__(self, remark: str = "") -> None:
        self.remark = remark  # for the user, to be shown after the name of the attention backend

    def captures(self, inputs: ModelInputs[Any]) -> bool:
        """Return whether a whole step with this batch, or with the padded one, has been captured."""
        return False

    def pad(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[np.ndarray]:
        """Return the batch, padded to a captured shape if there is one for it."""
        return inputs

    def __call__(self, compute: Compute, inputs: ModelInputs[Tensor]) -> Tensor:
        """Return the hidden states, (T, E), of a batch that `pad` returned and that is now on the device.

        `compute` is a method of the runner, and must not be stored: the reference cycle would keep the
        runner's memory allocated until the garbage collector runs.
        """
        return compute(inputs)


class Decodes(NamedTuple):
    """Holds what is needed to capture steps."""

    inputs: ModelInputs[np.ndarray]  # one sequence's decode, in the null block
    compute: Compute
    model: Any
    caches: list[KVCache]  # one per layer
    max_num_tokens: int  # the largest number of tokens in a step
    largest: int  # the largest number of sequences in a step
    table_width: int  # number of blocks of the longest sequence
    block_size: int  # tokens
    obstacles: list[str]  # for the user: why decode steps cannot be captured


class Trial(NamedTuple):
    """Holds the largest steps as functions, which are run once to measure the memory they need."""

    what: str  # describes the largest batch to the user
    caches: Callable[[], AbstractContextManager[int]]  # a temporary, just large enough KV cache; its bytes
    compute: Callable[[], object]
    capture: Callable[[], object]  # the same capture as at the end of startup; returns the memory's owner


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device. A copy to a GPU is queued; `torch.tensor` would wait for earlier work."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    host, array = pinned_memory(values.shape, tensor.dtype)
    array[:] = values
    return host.to(device, non_blocking=True)


class Download:
    """Carries a tensor to the host. `read` waits for this tensor, but not for work queued after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self) -> Tensor:
        """Return the tensor on the host."""
        return self._tensor


class Device:
    """Describes a processor. Here plain PyTorch computes everything; the subclasses are faster."""

    rounds_weights: ClassVar[bool] = False  # for quantization="int8" and "int4"
    rounds_activations: ClassVar[bool] = False
    has_exact_kernels: ClassVar[bool] = False  # for batch_invariant=True
    rounds_cache: ClassVar[bool] = True  # for kv_cache_dtype="int8"
    # Defaults for settings of the user. A larger step is not faster on a CPU: it overflows the CPU's caches.
    block_size: ClassVar[int] = 32
    max_num_batched_tokens: ClassVar[int] = 1024
    async_scheduling: ClassVar[bool] = False
    more_memory: str = "free some memory"  # advice to the user
    # Returns a layer that computes with a quantized weight, or None to dequantize it. If None, all are.
    pack: Pack | None = None
    # A kernel that replaces `drawing.draw_rows`; None: there is none.
    draw: Callable[[Tensor, SamplingMetadata], tuple[Tensor, Tensor]] | None = None
    # A kernel that replaces `drawing.draw_chunks`; None: there is none.
    draw_chunks: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        self.bits = {"int4": 4, "int8": 8}.get(config.quantization or "", 0)  # to which it rounds weights
        if self.bits and not self.rounds_weights:
            raise ValueError(f"quantization={config.quantization!r} needs kernels, which {device.type} lacks")
        for setting, is_possible in {
            "activations='int8'": config.activations != "int8" or self.rounds_activations,
            "batch_invariant=True": not config.batch_invariant or self.has_exact_kernels,
            "kv_cache_dtype='int8'": config.kv_cache_dtype != "int8" or self.rounds_cache,
        }.items():
            if not is_possible:
                raise ValueError(f"{setting} is supported on a CPU only, not on {device.type}")
        self.device = device
        self.config = config
        self.notes: list[str] = []  # for the user: what was chosen for this processor, and why

    def choose_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to compute in, for that one: float32 if PyTorch would emulate it on this CPU."""
        if self.config.dtype != "auto" or dtype == torch.float32:
            return dtype
        if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
            return dtype
        name = str(dtype).removeprefix("torch.")
        self.notes.append(f"float32 instead of {name}, which PyTorch emulates on this CPU")
        return torch.float32

    def prepare(self, model: Any) -> None:
        """Give a loaded model the kernels and the weight layout that are fastest on this device."""

    def running(self) -> AbstractContextManager[object]:
        """Return a context manager for the parts of a step that compute."""
        return nullcontext()

    def rest(self) -> None:
        """Pause: there is nothing to compute until the next step, which may run in another thread."""

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copy a step's arrays to the device. The tensors are valid until the next call."""
        return [torch.from_numpy(array) for array in arrays]

    def reserve(self, max_num_tokens: int, max_num_seqs: int, num_groups: int, table_width: int) -> None:
        """Make room for the arrays of the largest step that `send` will get."""

    def download(self, tensor: Tensor) -> Download:
        """Start copying a tensor to the host."""
        return Download(tensor)

    def capture(self, decodes: Decodes) -> Forward:
        """Return what runs the steps. Decode steps are replayed from CUDA graphs if they can be captured."""
        return Forward()

    def choose_attention(self, specs: Sequence[KVSpec], settings: frozenset[str]) -> Attention:
        """Return the fastest backend for such layers. Raises ValueError if the one asked for cannot."""
        asked, notes = self.config.attn_backend, list[str]()
        if self.config.kv_cache_dtype == "int8":
            settings |= {"an int8 cache"}
        for backend in self.backends():
            if asked not in ("auto", backend.name):
                continue
            obstacle = self.obstacle(backend, specs, settings)
            if obstacle is None:
                return Attention(backend, backend, notes + self.notes)
            if asked != "auto":
                raise ValueError(f"attn_backend={asked!r} cannot be used: {obstacle}")
            notes.append(f"not {backend.name}: {obstacle}")
        raise ValueError(f"attn_backend={asked!r} cannot be used: it does not run on {self.device.type}")

    def backends(self) -> Iterator[type[PagedAttention]]:
        """Yield the attention backends, the fastest first. A slower one is imported only if it is needed."""
        from nanoengine.backends.torch_attention import Int8Attention, TorchAttention

        yield Int8Attention if self.config.kv_cache_dtype == "int8" else TorchAttention

    def obstacle(
        self, backend: type[PagedAttention], specs: Sequence[KVSpec], settings: frozenset[str]
    ) -> str | None:
        """Return why a backend cannot be used, or None if it can."""
        if (self.config.block_size or self.block_size) % backend.block_multiple:
            return f"block_size must be a multiple of {backend.block_multiple}, got {self.config.block_size}"
        return backend.obstacle(specs, settings)

    def count_blocks(self, block_bytes: int, max_blocks: int, cache_bytes: int) -> int:
        """Return the number of KV cache blocks: num_kv_blocks if set, else as many as fit.

        Raises ValueError if not even one fits. max_blocks are enough for every sequence at its longest. More
        would only enlarge the prefix cache.
        """
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        num_blocks, remedy = cache_bytes // block_bytes - 1, "raise kv_cache_bytes"  # one is the null block
        if self.config.kv_cache_bytes is None:
            num_blocks, remedy = min(num_blocks, max_blocks), self.more_memory
        if num_blocks < 1:
            raise ValueError(f"no room for the KV cache: one block takes {block_bytes} bytes; {remedy}")
        return num_blocks

    def find_memory(self) -> Available | None:
        """Return the memory that may still be taken; None: it becomes known only when it is taken."""
        return available_memory()

    def free_bytes(self, trial: Trial) -> int:
        """Return how much memory the KV cache may use, in addition to the weights and the largest steps.

        On a CPU it is half of the available memory, but at most 4 GiB as in vLLM. A model's ranks share it.
        """
        return min(available_memory().num_bytes // 2, 4 << 30) // self.config.tensor_parallel_size

    def warm_up(self, trial: Trial) -> None:
        """Run the trial if that compiles anything. Called where the cache has a given size."""

    def release(self) -> None:
        """Return memory to the system. Called after the tensors are deleted."""
