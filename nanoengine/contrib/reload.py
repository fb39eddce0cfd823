"""Replace an engine's weights in place, and free its memory while it sleeps.

Reinforcement learning needs both: the learner's tensors replace the loaded ones, and the engine's memory is
free while the learner uses the machine. `LLMEngine`, `LLM` and `AsyncLLM` have `update_weights`, `sleep`,
`wake_up`, `is_sleeping` and `collective_rpc` as methods: `optional.Reloadable`. Names are vLLM's.

A new tensor is written to the memory of the one it replaces, packed the same way, because kernels hold
addresses. To find that memory, a reference model without weights is built from the same config: its
parameters have the checkpoint's names and shapes.
"""

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from nanoengine.async_llm import AsyncLLM
from nanoengine.backends.cpu.onednn import OneDNNLinear
from nanoengine.backends.cpu.packed import CompiledLayer, PackedLinear
from nanoengine.backends.quantize import quantize
from nanoengine.backends.quantized import PackedEmbedding
from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager, ModelRunner
from nanoengine.llm_engine import LLMEngine
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder
from nanoengine.models.names import destinations, saved_names
from nanoengine.steps import uninterrupted

TAGS = ("weights", "kv_cache")  # the parts that can sleep

# ---- Methods of LLMEngine, LLM and AsyncLLM ------------------------------------------------------


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of an `LLMEngine` also take an `LLM`, or an `AsyncLLM`: then it returns a coroutine.

    An `AsyncLLM` calls the function in its engine's thread, between two steps.
    """

    @wraps(function)
    def call(llm: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(llm, AsyncLLM):
            return llm._call(partial(function, llm.llm_engine, *args, **kwargs))
        return function(getattr(llm, "llm_engine", llm), *args, **kwargs)

    return call


@method
@uninterrupted()
def update_weights(engine: LLMEngine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all or some weights with tensors of the same names and shapes, and clear the prefix cache.

    Names are the checkpoint's. For models on transformers' code, they are those of transformers' parameters.

    Raises ValueError or TypeError, and changes nothing, if a tensor is unknown, has another shape or is not
    floating point, or if the engine's weights cannot be replaced. Raises RuntimeError if there are unfinished
    requests, or if the weights sleep.
    """
    reloader_between_requests(engine).update_weights(weights)


@method
@uninterrupted()
def sleep(engine: LLMEngine, level: int = 1) -> None:
    """Free the KV cache's memory, and with level 2 the weights' memory too. CPU on Linux only.

    Until `wake_up`, requests raise RuntimeError. After level 2, `update_weights` must supply every weight
    before the next request. Raises RuntimeError if there are unfinished requests.
    """
    reloader_between_requests(engine).sleep(level)


@method
@uninterrupted()
def wake_up(engine: LLMEngine, tags: Iterable[str] | None = None) -> None:
    """Allocate the memory of the "weights" or the "kv_cache" again. None wakes both."""
    reloader_between_requests(engine).wake_up(tags)


@method
def is_sleeping(engine: LLMEngine) -> bool:
    """Return whether the weights or the KV cache sleep. While they do, requests are refused."""
    return engine.reloader is not None and bool(engine.reloader.asleep)


@method
def collective_rpc(
    engine: LLMEngine,
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Call one of `Worker.METHODS` by name, or a function with the worker as its first argument.

    Returns a list with one result. The call runs in this process, so `timeout` is ignored.
    """
    return [engine.model_executor.call(method, *args, **(kwargs or {}))]


def reloader_between_requests(engine: LLMEngine) -> "Reloader":
    """Return the engine's reloader; RuntimeError if there are unfinished requests."""
    if engine.has_unfinished_requests():
        raise RuntimeError("there are unfinished requests: finish or abort them first")
    return reloader_of(engine)


def reloader_of(engine: LLMEngine) -> "Reloader":
    """Return the engine's reloader, and create it on the first call."""
    if engine._is_closed:
        raise RuntimeError("the engine is closed")
    if engine.reloader is None:
        blocks = engine.scheduler.block_manager
        engine.reloader = Reloader(engine.config, engine.checkpoint, engine.runner, blocks)
    reloader: Reloader = engine.reloader
    return reloader


# ---- The reloader --------------------------------------------------------------------------------


class Place(NamedTuple):
    """Says where the model holds a tensor of the checkpoint."""

    module: Any
    name: str  # the module's attribute
    shape: tuple[int, ...]  # in the checkpoint
    first: int = 0  # its first row in the attribute, which may hold several tensors
    is_transposed: bool = False  # whether the model holds it transposed


class Run(NamedTuple):
    """Groups adjacent tensors, so that tensors that are packed together are packed once."""

    module: Any
    name: str
    first: int
    names: list[str]
    tensors: list[Tensor]


class Reloader:
    """Replaces a runner's weights and puts the runner to sleep, between requests.

    Raises ValueError if other processes share the weights or the KV computed with them, or if the loaded
    weights are not the checkpoint's tensors (an adapter was merged, or the checkpoint is quantized).
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, runner: ModelRunner, blocks: BlockManager
    ) -> None:
        quantization = getattr(checkpoint.hf_config, "quantization_config", None) or checkpoint.quant_method
        for name, is_used in {
            "tensor_parallel_size above 1": config.tensor_parallel_size > 1,
            "a kv_store": config.kv_store is not None,
            "lora": config.lora is not None,
            "a quantized checkpoint": quantization is not None,
        }.items():
            if is_used:
                raise ValueError(f"update_weights and sleep do not work with {name}")
        self.runner, self.blocks = runner, blocks
        self.asleep: set[str] = set()  # a subset of TAGS
        self.missing: set[str] = set()  # tensors that were dropped and not replaced yet
        self.places: dict[str, list[Place]] = {}  # by tensor name; tied tensors are under the first name
        self.first_names: dict[str, str] = {}  # tensor -> the first tensor it is tied to, or itself
        self._find_places(config, checkpoint)

    def check_ready(self) -> None:
        """Raise RuntimeError if no request can be computed."""
        if self.asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self.asleep))}): call wake_up first")
        if self.missing:
            count, first = len(self.missing), min(self.missing)
            raise RuntimeError(f"{count} weights were dropped, such as {first!r}: call update_weights first")

    # -- weights

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights: see the function `update_weights`."""
        if "weights" in self.asleep:
            raise RuntimeError("the engine sleeps (weights): call wake_up first")
        tensors = self._check(weights)
        runs = self._join(tensors)
        for run in runs:
            is_packed = isinstance(run.module, PackedLinear) and run.name == "weight"
            if is_packed and not can_load(run.module, run.first, sum(map(len, run.tensors))):
                raise ValueError(
                    f"tensor {run.names[0]!r} shares a quantized layer with others: "
                    "pass q, k and v, or gate and up, in one call"
                )
        for run in runs:
            whole = run.tensors[0] if len(run.tensors) == 1 else torch.cat(run.tensors)
            _load(run.module, run.name, whole, run.first)
        self.missing -= tensors.keys()
        self.blocks.reset_prefix_cache()

    def _check(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Check all tensors. Return them in the model's orientation, by the first of their tied names."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name not in self.first_names:
                raise ValueError(f"the model has no tensor {name!r}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor {name!r} must be a torch.Tensor, got {type(tensor).__name__}")
            first_name = self.first_names[name]
            place = self.places[first_name][0]
            if tuple(tensor.shape) != place.shape:
                shape = tuple(tensor.shape)
                raise ValueError(f"tensor {name!r} has shape {shape}, but the model needs {place.shape}")
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise TypeError(f"tensor {name!r} must have floats of 16 bits or more, got {tensor.dtype}")
            if tensor.is_meta or tensor.layout != torch.strided:
                raise TypeError(f"tensor {name!r} must be dense and hold numbers")
            tensor = tensor.detach().T if place.is_transposed else tensor.detach()
            if first_name in tensors and not torch.equal(tensors[first_name], tensor):
                raise ValueError(f"tensor {name!r} differs from {first_name!r}, to which it is tied")
            tensors[first_name] = tensor
        return tensors

    def _join(self, tensors: dict[str, Tensor]) -> list[Run]:
        """Return the places of the tensors. Tensors whose rows are adjacent become one run."""
        runs: dict[tuple[int, str, int], Run] = {}  # by module, attribute, and the row after their last
        placed = [(place, name) for name in tensors for place in self.places[name]]
        for place, name in sorted(placed, key=lambda one: one[0].first):
            tensor = tensors[name]
            key = id(place.module), place.name, place.first
            run = runs.pop(key, None) if place.first else None
            run = run or Run(place.module, place.name, place.first, [], [])
            run.names.append(name)
            run.tensors.append(tensor)
            runs[*key[:2], place.first + (len(tensor) if tensor.dim() else 0)] = run
        return list(runs.values())

    def _find_places(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Find the checkpoint's tensor names, and their places, with a reference model without weights."""
        model: Any = self.runner.model
        auto: Any = AutoModelForCausalLM
        names: dict[int, str] = {}  # parameter -> its first name, if several share it
        with torch.device("meta"):
            if isinstance(model, Decoder):
                reference: Any = Decoder(model.config)
            else:
                model = model.causal_lm
                reference = auto.from_config(
                    deepcopy(checkpoint.hf_config), trust_remote_code=config.trust_remote_code
                )
        parts = destinations(reference) if isinstance(reference, Decoder) else {}
        for path, whole in reference.state_dict(keep_vars=True).items():
            if not whole.is_floating_point():
                continue
            parent, _, name = path.rpartition(".")
            module, first = _held_module(model, parent), 0
            is_conv = isinstance(reference.get_submodule(parent), Conv1D) and not isinstance(module, Conv1D)
            for saved in saved_names(path) if parts else [path]:
                part = parts.get(saved, whole)
                shape = tuple(part.shape)
                place = Place(module, name, shape, first, is_conv and name == "weight")
                first += shape[0] if shape else 0
                tied = names.setdefault(id(whole), saved) if part.shape == whole.shape else saved
                if tied != saved and _is_shared(self.places[tied][0], place):
                    self.places[tied].append(place)
                    self.first_names[saved] = tied
                else:
                    self.places[saved] = [place]
                    self.first_names[saved] = saved

    # -- sleep

    def sleep(self, level: int) -> None:
        """Free memory: see the function `sleep`."""
        if type(level) is not int or level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if self.runner.device.device.type != "cpu":
            raise ValueError("sleep works only on a CPU")
        self.blocks.reset_prefix_cache()
        for tensor in self._cache_memory():
            drop_pages(tensor)
        self.asleep = set(TAGS)
        if level == 2:
            self.missing = set(self.places)
            for places in self.places.values():
                for place in places:
                    _drop(place.module, place.name)
        if platform.libc_ver()[0] == "glibc":  # which keeps freed memory (`memory.keep_freed_memory`)
            ctypes.CDLL(None).malloc_trim(0)

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Allocate memory again: see the function `wake_up`."""
        tags = TAGS if tags is None else list(tags)
        for tag in tags:
            if tag not in TAGS:
                raise ValueError(f"a tag must be one of {', '.join(TAGS)}, got {tag!r}")
        if "kv_cache" in self.asleep & {*tags}:
            for tensor in self._cache_memory():
                tensor.zero_()  # touches each page, so that no step takes the page faults
        self.asleep -= {*tags}

    def _cache_memory(self) -> Iterator[Tensor]:
        yield from {id(x): x for cache in self.runner.caches for x in (cache.k, cache.v)}.values()


class Worker:
    """Stands for the process that computes, under the names that RL learners use inside vLLM.

    Learners reach it with `collective_rpc`, and at
    `llm_engine.model_executor.driver_worker.model_runner.model`: this object is each part of that path.
    """

    METHODS = "update_weights", "sleep", "wake_up", "reset_prefix_cache", "tensor_shapes"
    rank = local_rank = 0

    def __init__(self, engine: Any) -> None:
        if engine.config.tensor_parallel_size > 1:
            raise ValueError("collective_rpc does not work with tensor_parallel_size above 1")
        self.engine, self.device = engine, engine.runner.device.device
        self.update_weights, self.load_weights = engine.update_weights, engine.update_weights
        self.sleep, self.wake_up = engine.sleep, engine.wake_up
        self.reset_prefix_cache = engine.reset_prefix_cache

    @property
    def driver_worker(self) -> "Worker":
        """Return itself."""
        return self

    worker = model_runner = model = driver_worker

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors that `update_weights` takes."""
        reloader = reloader_of(self.engine)
        return {name: reloader.places[first][0].shape for name, first in reloader.first_names.items()}

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of METHODS by name, or a function with the worker as its first argument."""
        if callable(method):
            return method(self, *args, **kwargs)
        if method not in self.METHODS:
            raise ValueError(f"method must be a function or one of {', '.join(self.METHODS)}, got {method!r}")
        return getattr(self, method)(*args, **kwargs)


# ---- Reading and writing packed layers -----------------------------------------------------------


def is_on_gpu(layer: nn.Module) -> bool:
    """Return whether a layer is a `TritonLinear`. Its file can be deleted, so it is not imported here."""
    return type(layer).__name__ == "TritonLinear"


def load(layer: Any, weight: Tensor, first: int = 0) -> None:
    """Replace rows of a layer's weight from `first` on. Rows of a quantized weight are quantized."""
    end = first + len(weight)
    if is_on_gpu(layer):
        new = _rounded(layer, weight)
        layer.packed[first:end], layer.scales[:, first:end] = new.packed, new.scales
        return
    if isinstance(layer, OneDNNLinear):
        whole = layer.weight.new_zeros(layer.shape) if layer.packed is None else layer.packed.to_dense()
        whole[first:end] = weight
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(whole)
        return
    if not _are_blocks(layer, first, end):
        whole = layer.weight
        whole[first:end] = weight
        weight, first, end = whole, 0, layer.out_features
    outputs = layer.kernels.num_outputs
    layer.packed[first // outputs : -(-end // outputs)] = _pack(layer, weight)


def can_load(layer: PackedLinear, first: int, num_rows: int) -> bool:
    """Return whether `load` would keep the other rows exactly.

    If a quantized weight's rows are not whole blocks, all rows would be quantized again.
    """
    return not layer.form.bits or _are_blocks(layer, first, first + num_rows)


def holds(layer: Any, weight: Tensor) -> bool:
    """Return whether a layer was made from that weight, (out, in)."""
    if is_on_gpu(layer):
        return all(map(torch.equal, layer.buffers(), _rounded(layer, weight).buffers()))
    if isinstance(layer, OneDNNLinear):
        return torch.equal(layer.packed.to_dense(), weight)
    return torch.equal(layer.packed, _pack(layer, weight))


def _are_blocks(layer: PackedLinear, first: int, end: int) -> bool:
    outputs = layer.kernels.num_outputs
    return first % outputs == 0 and (end % outputs == 0 or end == layer.out_features)


def _pack(layer: PackedLinear, weight: Tensor) -> Tensor:
    weight, form = weight.to(layer.packed.device, layer.dtype), layer.form
    if not form.bits:
        return layer.kernels.pack(weight)
    return layer.kernels.pack_integers(quantize(weight, form.bits), form.activation_bits)


def _rounded(layer: Any, weight: Tensor) -> Any:
    """Return a `TritonLinear` like this one, with another weight (out, in)."""
    rounded = quantize(weight.to("cpu", layer.dtype), layer.form.bits)
    return type(layer)(rounded, None, layer.dtype, layer.packed.device)


def drop_pages(tensor: Tensor) -> None:
    """Return the memory of a CPU tensor to the system, except for partial pages at both ends.

    The tensor keeps its address. The dropped pages read as zeros, and the next write allocates them again.

    Raises:
        ValueError: the system is not Linux.
        OSError: the system refuses.
    """
    if sys.platform != "linux":
        raise ValueError("sleep can release memory only on Linux")
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise failed")


def _held_module(model: nn.Module, path: str) -> Any:
    """Return the module at a path of the loaded model, below any `CompiledLayer` wrapper."""
    module: Any = model
    for name in filter(None, path.split(".")):
        module = getattr(module, name)
        module = module.layer if isinstance(module, CompiledLayer) else module
    return module.head[0] if isinstance(module, PackedEmbedding) else module


def _is_shared(one: Place, other: Place) -> bool:
    """Return whether tied tensors share memory. They do not if the checkpoint has a separate head."""
    if one.module is other.module:
        return True
    held, packed = getattr(one.module, one.name), other.module
    if isinstance(packed, PackedLinear | OneDNNLinear) or is_on_gpu(packed):
        return holds(packed, held)
    return held.data_ptr() == getattr(packed, other.name).data_ptr()  # type: ignore[no-any-return]


def _load(module: Any, name: str, tensor: Tensor, first: int = 0) -> None:
    """Write a tensor over the rows that a module holds, starting at row `first`."""
    held = getattr(module, name)
    if isinstance(held, nn.ModuleList):  # MoE experts, each in a layer of its own
        is_transposed = getattr(module, "is_transposed", False)
        for layer, weight in zip(held, tensor.transpose(1, 2) if is_transposed else tensor, strict=True):
            _load(layer, "weight", weight)
    elif name == "weight" and (isinstance(module, PackedLinear | OneDNNLinear) or is_on_gpu(module)):
        load(module, tensor, first)
    else:
        rows = held[first : first + len(tensor)] if tensor.dim() else held
        rows.copy_(tensor)
        if name == "weight" and hasattr(module, "float32_linear"):  # a router's float32 copy
            _load(module.float32_linear, name, rows.float())


def _drop(module: Any, name: str) -> None:
    """Free the memory of a module's tensor. Its values are lost."""
    held = getattr(module, name)
    if isinstance(held, nn.ModuleList):
        for layer in held:
            _drop(layer, "weight")
    elif isinstance(module, OneDNNLinear) and name == "weight":
        module.packed = None
    else:
        drop_pages(module.packed if isinstance(module, PackedLinear) and name == "weight" else held)
