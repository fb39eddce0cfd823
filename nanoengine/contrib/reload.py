"""Replace an engine's weights in place, and give its memory back while it sleeps.

Reinforcement learners need both: the learner's tensors replace those that were loaded, and the engine's
memory is free while the learner uses the machine. `LLMEngine`, `LLM` and `AsyncLLM` have `update_weights`,
`sleep`, `wake_up`, `is_sleeping` and `collective_rpc` as methods: `optional.ContribMethod`. Names are vLLM's.

A tensor goes where the one lies that it replaces, packed as the device packed that: kernels hold addresses.
Which place is whose, a model without weights says, made of the same config: its parameters have the
checkpoint's names and shapes.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from nanoengine.async_llm import AsyncLLM
from nanoengine.backends.cpu.packed import CompiledLayer, OneDNNLinear, PackedLinear
from nanoengine.backends.memory import drop_pages, return_freed_memory
from nanoengine.backends.quantized import PackedEmbedding
from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager, ModelRunner
from nanoengine.llm_engine import LLMEngine
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder
from nanoengine.models.names import destinations, saved_names
from nanoengine.steps import uninterrupted

TAGS = ("weights", "kv_cache")  # what sleeps

# ---- Methods of LLMEngine, LLM and AsyncLLM ------------------------------------------------------


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of an `LLMEngine` take an `LLM` too, or an `AsyncLLM`: then it returns a coroutine.

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
    """Replace all weights, or some, by tensors of the same names and shapes; forgets all prefixes.

    Names are the checkpoint's. For models on transformers' code, they are those of transformers' parameters.

    Raises:
        ValueError, TypeError: a tensor is unknown, has another shape or holds no floats, or the engine's
            weights cannot be replaced. Nothing is changed then.
        RuntimeError: there are unfinished requests, or the weights sleep.
    """
    reloader_between_requests(engine).update_weights(weights)


@method
@uninterrupted()
def sleep(engine: LLMEngine, level: int = 1) -> None:
    """Give back the KV cache's memory, and with level 2 the weights' memory too. CPU on Linux only.

    Until `wake_up`, requests raise RuntimeError. After level 2, every weight has to be given by
    `update_weights` before the next request.

    Raises:
        ValueError: another level, or the engine's settings do not allow it.
        RuntimeError: there are unfinished requests.
    """
    reloader_between_requests(engine).sleep(level)


@method
@uninterrupted()
def wake_up(engine: LLMEngine, tags: Iterable[str] | None = None) -> None:
    """Take the memory of the "weights" or the "kv_cache" again; None wakes both.

    Raises:
        ValueError: another tag.
    """
    reloader_between_requests(engine).wake_up(tags)


@method
def is_sleeping(engine: LLMEngine) -> bool:
    """Return whether the weights or the KV cache sleep. Requests are refused then."""
    return engine.reloader is not None and bool(engine.reloader.asleep)


@method
def collective_rpc(
    engine: LLMEngine,
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Call a method of the `Worker`, or a function with the worker as its first argument.

    Args:
        engine: whose worker.
        method: the name of one of `Worker.METHODS`, or a function.
        timeout: ignored, since the call is made in this process.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        A list with the one result.

    Raises:
        ValueError: there is no such method, or there are several ranks.
    """
    return [engine.model_executor.call(method, *args, **(kwargs or {}))]


def reloader_between_requests(engine: LLMEngine) -> "Reloader":
    """Return the engine's reloader; RuntimeError if there are unfinished requests."""
    if engine.has_unfinished_requests():
        raise RuntimeError("there are unfinished requests: run them to their end, or abort them, first")
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
    """Where a tensor of the checkpoint is held."""

    module: Any
    name: str  # what the module calls it
    shape: tuple[int, ...]  # in the checkpoint
    first: int = 0  # where its rows begin in what is held, which may be several tensors'
    is_transposed: bool = False  # as it is held


class Run(NamedTuple):
    """Tensors that lie one after the other: what is packed together is packed once."""

    module: Any
    name: str
    first: int
    names: list[str]
    tensors: list[Tensor]


class Reloader:
    """Exchanges a runner's weights, and puts it to sleep; between requests.

    Raises:
        ValueError: other processes share the weights or what was computed with them, or they are no longer
            those of the checkpoint.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, runner: ModelRunner, blocks: BlockManager
    ) -> None:
        few_bits = getattr(checkpoint.hf_config, "quantization_config", None) or checkpoint.written_as
        for name, is_there in (
            ("tensor_parallel_size above 1", config.tensor_parallel_size > 1),
            ("a kv_store", config.kv_store is not None),
            ("lora", config.lora is not None),
            ("a checkpoint in few bits", few_bits is not None),
        ):
            if is_there:
                raise ValueError(f"update_weights and sleep are not served with {name}")
        self.runner, self.blocks = runner, blocks
        self.asleep: set[str] = set()  # of TAGS
        self.missing: set[str] = set()  # tensors that were dropped, and not given since
        self.places: dict[str, list[Place]] = {}  # of each tensor; of tied ones, under the first's name
        self.first_names: dict[str, str] = {}  # tensor -> the first of those that it is tied to, or itself
        self._find_places(config, checkpoint)

    def check_ready(self) -> None:
        """Raise RuntimeError where no request can be computed."""
        if self.asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self.asleep))}): call wake_up first")
        if self.missing:
            count, first = len(self.missing), min(self.missing)
            raise RuntimeError(f"{count} weights were dropped, such as {first!r}: call update_weights first")

    # -- weights

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights."""
        if "weights" in self.asleep:
            raise RuntimeError("the engine sleeps (weights): call wake_up first")
        tensors = self._check(weights)
        runs = self._join(tensors)
        for run in runs:
            is_packed = isinstance(run.module, PackedLinear) and run.name == "weight"
            if is_packed and not run.module.can_load(run.first, sum(map(len, run.tensors))):
                raise ValueError(
                    f"tensor {run.names[0]!r} lies between others of its layer in few bits: "
                    "give q, k and v, or gate and up, in one call"
                )
        for run in runs:
            whole = run.tensors[0] if len(run.tensors) == 1 else torch.cat(run.tensors)
            _load(run.module, run.name, whole, run.first)
        self.missing -= tensors.keys()
        self.blocks.reset_prefix_cache()

    def _check(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """All tensors, by the first of their names, as they are held."""
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
                raise ValueError(f"tensor {name!r} has shape {shape}, the model asks for {place.shape}")
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise TypeError(
                    f"tensor {name!r} is {tensor.dtype}; a weight must be float16 or wider floats"
                )
            if tensor.is_meta or tensor.layout != torch.strided:
                raise TypeError(f"tensor {name!r} must be dense and hold numbers")
            tensor = tensor.detach().T if place.is_transposed else tensor.detach()
            if first_name in tensors and not torch.equal(tensors[first_name], tensor):
                raise ValueError(
                    f"tensor {name!r} was given twice, or is tied to {first_name!r}, and differs"
                )
            tensors[first_name] = tensor
        return tensors

    def _join(self, tensors: dict[str, Tensor]) -> list[Run]:
        """Where they go; several as one where each begins at the end of the one before."""
        runs: dict[tuple[int, str, int], Run] = {}  # by where they end
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
        """Learn from a model without weights what the checkpoint's tensors are called."""
        model: Any = self.runner.model
        auto: Any = AutoModelForCausalLM
        names: dict[int, str] = {}  # of the first tensor in a parameter that several names share
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
        """Give memory back."""
        if type(level) is not int or level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if self.runner.device.device.type != "cpu":
            raise ValueError("sleep is served on a CPU alone")
        self.blocks.reset_prefix_cache()
        for tensor in self._cache_memory():
            drop_pages(tensor)
        self.asleep = set(TAGS)
        if level == 2:
            self.missing = set(self.places)
            for places in self.places.values():
                for place in places:
                    _drop(place.module, place.name)
        return_freed_memory()

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Take memory again."""
        tags = TAGS if tags is None else list(tags)
        for tag in tags:
            if tag not in TAGS:
                raise ValueError(f"tags must be of {', '.join(TAGS)}, got {tag!r}")
        if "kv_cache" in self.asleep & {*tags}:
            for tensor in self._cache_memory():
                tensor.zero_()  # so that no step has to fetch it
        self.asleep -= {*tags}

    def _cache_memory(self) -> Iterator[Tensor]:
        yield from {id(x): x for cache in self.runner.caches for x in (cache.k, cache.v)}.values()


class Worker:
    """The process that computes, under the names by which learners reach into vLLM.

    That is by `collective_rpc`, and at `llm_engine.model_executor.driver_worker.model_runner.model`, all of
    which it is.

    Raises:
        ValueError: there are several ranks.
    """

    METHODS = "update_weights", "sleep", "wake_up", "reset_prefix_cache", "tensor_shapes"
    rank = local_rank = 0

    def __init__(self, engine: Any) -> None:
        if engine.config.tensor_parallel_size > 1:
            raise ValueError("collective_rpc is not served with tensor_parallel_size above 1")
        self.engine, self.device = engine, engine.runner.device.device
        self.update_weights, self.load_weights = engine.update_weights, engine.update_weights
        self.sleep, self.wake_up = engine.sleep, engine.wake_up
        self.reset_prefix_cache = engine.reset_prefix_cache

    @property
    def driver_worker(self) -> "Worker":
        """Itself."""
        return self

    worker = model_runner = model = driver_worker

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """What `update_weights` takes: names, and shapes."""
        reloader = reloader_of(self.engine)
        return {name: reloader.places[first][0].shape for name, first in reloader.first_names.items()}

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One of METHODS by its name, or a function that is given the worker first."""
        if callable(method):
            return method(self, *args, **kwargs)
        if method not in self.METHODS:
            raise ValueError(f"method must be a function or one of {', '.join(self.METHODS)}, got {method!r}")
        return getattr(self, method)(*args, **kwargs)


# ---- The layers a device makes -------------------------------------------------------------------


def _held_module(model: nn.Module, path: str) -> Any:
    """What a loaded model has at that path, beneath what computes a layer as a whole."""
    module: Any = model
    for name in filter(None, path.split(".")):
        module = getattr(module, name)
        module = module.layer if isinstance(module, CompiledLayer) else module
    return module.head[0] if isinstance(module, PackedEmbedding) else module


def _is_shared(one: Place, other: Place) -> bool:
    """Whether what the config ties was tied when it was loaded: files may hold a head of its own."""
    if one.module is other.module:
        return True
    held, packed = getattr(one.module, one.name), other.module
    if isinstance(packed, PackedLinear | OneDNNLinear):
        return packed.holds(held)
    return held.data_ptr() == getattr(packed, other.name).data_ptr()  # type: ignore[no-any-return]


def _load(module: Any, name: str, tensor: Tensor, first: int = 0) -> None:
    """Put rows in the place of those that a module holds from the first on."""
    held = getattr(module, name)
    if isinstance(held, nn.ModuleList):  # experts, each in a layer
        is_transposed = getattr(module, "is_transposed", False)
        for layer, weight in zip(held, tensor.transpose(1, 2) if is_transposed else tensor, strict=True):
            _load(layer, "weight", weight)
    elif isinstance(module, PackedLinear | OneDNNLinear) and name == "weight":
        module.load(tensor, first)
    else:
        rows = held[first : first + len(tensor)] if tensor.dim() else held
        rows.copy_(tensor)
        if name == "weight" and hasattr(module, "float32_linear"):  # a router's copy
            _load(module.float32_linear, name, rows.float())


def _drop(module: Any, name: str) -> None:
    """Give its memory back; what it holds is lost."""
    held = getattr(module, name)
    if isinstance(held, nn.ModuleList):
        for layer in held:
            _drop(layer, "weight")
    elif isinstance(module, OneDNNLinear) and name == "weight":
        module.drop()
    else:
        drop_pages(module.packed if isinstance(module, PackedLinear) and name == "weight" else held)
