"""What an engine asks of the processor it runs on: here the answers in plain PyTorch, for a CPU.

`cpu.device.CPU` and `cuda.CUDA` answer what is faster there, so that nobody else has to ask which one it is.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nanoengine.backends.attention import BuildAttention, PagedAttention, TorchAttention
from nanoengine.backends.inputs import ModelInputs, SamplingMetadata
from nanoengine.backends.kv_cache import KVSpec
from nanoengine.backends.quantized import Quantized
from nanoengine.config import ROUNDED, EngineConfig

Function = TypeVar("Function", bound=Callable[..., Any])


class Attention(NamedTuple):
    """The backend to attend with."""

    backend: type[PagedAttention]
    build: BuildAttention
    notes: list[str]  # for the user: which faster ones were passed over, and why


Compute = Callable[[ModelInputs[Tensor]], Tensor]  # a batch's hidden states, (T, E)


class Forward:
    """Runs a batch through the model as it comes; `cuda.DecodeGraphs` replays some from a capture."""

    def __init__(self, remark: str = "") -> None:
        self._remark = remark

    def pad(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[np.ndarray]:
        """A batch, filled up to a shape that was captured, where there is one."""
        return inputs

    def __call__(self, compute: Compute, inputs: ModelInputs[Tensor]) -> Tensor:
        """Hidden states, (T, E), of what `pad` returned, on the device by now.

        `compute` is the runner's own method, and is not kept: a runner that refers to itself would hold its
        memory until the garbage collector comes.
        """
        return compute(inputs)

    def describe(self) -> str:
        """For the user, behind the attention's name."""
        return self._remark


class Decodes(NamedTuple):
    """What steps that only decode are captured from."""

    inputs: ModelInputs[np.ndarray]  # one sequence's decode, in the null block
    compute: Compute
    largest: int  # the most sequences of a step
    table_width: int  # blocks of the longest sequence
    block_size: int  # tokens
    obstacles: list[str]  # why no capture can hold them, for the user


class Trial(NamedTuple):
    """The work of the largest steps, to be tried out for the memory it takes."""

    what: str  # for the user
    caches: Callable[[], AbstractContextManager[int]]  # a cache just large enough, for a while; its bytes
    compute: Callable[[], object]
    capture: Callable[[], object]  # as it will be done at the end; gives what holds the memory


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, NDArray[Any]]:
    """Memory of the host that a GPU reads and writes by itself, without a wait; for PyTorch and for numpy."""
    memory = torch.empty(*shape, dtype=dtype, pin_memory=True)
    return memory, memory.numpy()


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device. Towards a GPU it is queued, where `torch.tensor` would wait for all before."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    host, array = host_memory(values.shape, tensor.dtype)
    array[:] = values
    return host.to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host; `read` waits for it, and for nothing queued after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self) -> Tensor:
        """The tensor on the host."""
        return self._tensor


class Device:
    """A processor. Plain PyTorch computes everything; subclasses know faster ways."""

    # Of attention, the fastest first.
    backends: ClassVar[tuple[type[PagedAttention], ...]] = (TorchAttention,)
    quantizations: ClassVar[tuple[str, ...]] = ()  # what it rounds weights to, of `ROUNDED`
    # Defaults of what a user may set. A larger step is no faster on a CPU, whose caches it overflows.
    block_size: ClassVar[int] = 32
    max_num_batched_tokens: ClassVar[int] = 1024
    async_scheduling: ClassVar[bool] = False
    more_memory: ClassVar[str] = "free some memory"  # advice
    # A kernel for `sampling.draw_rows`, where there is one.
    draw: Callable[[Tensor, SamplingMetadata], tuple[Tensor, Tensor]] | None = None

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        if config.quantization in ROUNDED and config.quantization not in self.quantizations:
            raise ValueError(f"quantization={config.quantization!r} does not run on {device.type}")
        self.device = device
        self.config = config
        self.notes: list[str] = []  # for the user: what was chosen for this processor, and why

    def choose_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to compute in if the config or the checkpoint asks for this one.

        It is float32 if "auto" stands for a dtype that PyTorch would emulate on this CPU.
        """
        if self.config.dtype != "auto" or dtype == torch.float32:
            return dtype
        if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
            return dtype
        name = str(dtype).removeprefix("torch.")
        self.notes.append(f"float32 instead of {name}, which is emulated here without kernels")
        return torch.float32

    def pack(self, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
        """A linear layer that computes with integers as they are; None: they have to be of the dtype."""
        return None

    def prepare(self, model: Any) -> None:
        """Give a loaded model the kernels and the layout of weights that are fastest here."""

    def fuse(self, function: Function) -> Function:
        """A function of tensors, element-wise for the most part, in as few passes over memory as can be."""
        return function

    def running(self) -> AbstractContextManager[object]:
        """A `with` block around each part of a step that computes."""
        return nullcontext()

    def rest(self) -> None:
        """There is nothing to compute until a next step, which may run in another thread."""

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """A step's arrays on the device, until the next call."""
        return [torch.from_numpy(array) for array in arrays]

    def reserve(self, max_num_tokens: int, max_num_seqs: int, num_groups: int, table_width: int) -> None:
        """Make room for what `send` will get of the largest step; a block table has table_width entries."""

    def download(self, tensor: Tensor) -> Download:
        """Begin to copy a tensor to the host."""
        return Download(tensor)

    def capture(self, decodes: Decodes) -> Forward:
        """What runs the steps: decodes by graphs, where there can be any."""
        return Forward()

    def choose_attention(self, specs: Sequence[KVSpec], settings: frozenset[str]) -> Attention:
        """The fastest backend that can compute layers that store `specs` and ask for `settings`.

        Raises:
            ValueError: the one that attn_backend asks for cannot.
        """
        asked, notes = self.config.attn_backend, list[str]()
        for backend in self.backends:
            if asked not in ("auto", backend.name):
                continue
            obstacle = self.obstacle(backend, specs, settings)
            if obstacle is None:
                return Attention(backend, backend, notes + self.notes)
            if asked != "auto":
                raise ValueError(f"attn_backend={asked!r} cannot be used: {obstacle}")
            notes.append(f"not {backend.name}: {obstacle}")
        raise ValueError(f"attn_backend={asked!r} cannot be used: it does not run on {self.device.type}")

    def obstacle(
        self, backend: type[PagedAttention], specs: Sequence[KVSpec], settings: frozenset[str]
    ) -> str | None:
        """Why a backend cannot be used; None: it can."""
        if (self.config.block_size or self.block_size) % backend.block_multiple:
            return f"block_size must be a multiple of {backend.block_multiple}, got {self.config.block_size}"
        return backend.obstacle(specs, settings)

    def cache_bytes(self, trial: Trial) -> int:
        """What the cache may take: as much as the config says, or as memory has room for."""
        given = self.config.kv_cache_bytes
        return self.free_bytes(trial) if given is None else given

    def count_blocks(self, block_bytes: int, most: int, cache_bytes: int) -> int:
        """How many blocks the KV cache gets: as many as the config says, or as that many bytes hold.

        Args:
            block_bytes: of a block.
            most: what every sequence at its longest can hold; more would only be a larger prefix cache.
            cache_bytes: of all.

        Raises:
            ValueError: there is no room for two, one of which is the null block.
        """
        config = self.config
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        num_blocks, remedy = cache_bytes // block_bytes - 1, "raise kv_cache_bytes"
        if config.kv_cache_bytes is None:
            num_blocks, remedy = min(num_blocks, most), self.more_memory
        if num_blocks < 1:
            raise ValueError(f"no memory for the KV cache: one block takes {block_bytes} bytes; {remedy}")
        return num_blocks

    def free_bytes(self, trial: Trial) -> int:
        """Return how much memory the KV cache may take beside the weights and the largest steps' work.

        On a CPU, as in vLLM, at most 4 GiB; the ranks of one model share them.
        """
        return min(psutil.virtual_memory().available // 2, 4 << 30) // self.config.tensor_parallel_size

    def release(self) -> None:
        """Give memory back to the system, once the tensors are gone."""
