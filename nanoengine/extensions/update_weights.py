"""Replace a running engine's weights: `LLMEngine.update_weights`, for reinforcement learning.

A new tensor is written to the memory of the one it replaces, packed the same way, because kernels hold
addresses. To find that memory, a reference model without weights is built from the same config: its
parameters have the checkpoint's names and shapes.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from nanoengine.backends.cpu.packed_layers import CompiledLayer, PackedLinear
from nanoengine.backends.quantization import PackedEmbedding
from nanoengine.checkpoints.checkpoint import Checkpoint
from nanoengine.config import EngineConfig
from nanoengine.models.decoder import Decoder
from nanoengine.models.load import destinations, saved_names


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
    """Knows where a model holds the checkpoint's tensors, and replaces them.

    Raises ValueError if other processes share the weights or the KV computed with them, or if the loaded
    weights are not the checkpoint's tensors (an adapter was merged, or the checkpoint is quantized).
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, model: Any) -> None:
        quantization = getattr(checkpoint.hf_config, "quantization_config", None) or checkpoint.quant_method
        for name, is_used in {
            "tensor_parallel_size above 1": config.tensor_parallel_size > 1,
            "a kv_store": config.kv_store is not None,
            "lora": config.lora is not None,
            "a quantized checkpoint": quantization is not None,
        }.items():
            if is_used:
                raise ValueError(f"update_weights does not work with {name}")
        self.places: dict[str, list[Place]] = {}  # by tensor name; tied tensors are under the first name
        self.first_names: dict[str, str] = {}  # tensor -> the first tensor it is tied to, or itself
        auto: Any = AutoModelForCausalLM
        names: dict[int, str] = {}  # parameter -> its first name, if several share it
        with torch.device("meta"):
            if isinstance(model, Decoder):
                reference: Any = Decoder(model.config)
            else:
                model, hf_config = model.causal_lm, deepcopy(checkpoint.hf_config)
                reference = auto.from_config(hf_config, trust_remote_code=config.trust_remote_code)
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
                if tied != saved and not _is_shared(self.places[tied][0], place):
                    tied = saved
                self.places.setdefault(tied, []).append(place)
                self.first_names[saved] = tied

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights, as `LLMEngine.update_weights` documents. All are checked before one is written."""
        runs = self._join(self._check(weights))
        for run in runs:
            layer, is_rounded = run.module, False
            if isinstance(layer, PackedLinear) and run.name == "weight" and layer.form.bits:
                is_rounded = not layer.are_blocks(run.first, run.first + sum(map(len, run.tensors)))
            if is_rounded:  # its other rows would be rounded again
                raise ValueError(
                    f"tensor {run.names[0]!r} shares a quantized layer with others: "
                    "pass q, k and v, or gate and up, in one call"
                )
        for run in runs:
            whole = run.tensors[0] if len(run.tensors) == 1 else torch.cat(run.tensors)
            _load(run.module, run.name, whole, run.first)

    def _check(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Check all tensors. Return them in the model's orientation, by the first of their tied names."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name not in self.first_names:
                raise ValueError(f"the model has no tensor {name!r}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor {name!r} must be a torch.Tensor, got {type(tensor).__name__}")
            first_name, shape = self.first_names[name], tuple(tensor.shape)
            place = self.places[first_name][0]
            if shape != place.shape:
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


def _held_module(model: nn.Module, path: str) -> Any:
    """Return the module at a path of the loaded model, below any `CompiledLayer` wrapper."""
    module: Any = model
    for name in filter(None, path.split(".")):
        module = getattr(module, name)
        module = module.layer if isinstance(module, CompiledLayer) else module
    return module.head[0] if isinstance(module, PackedEmbedding) else module


def _is_shared(one: Place, other: Place) -> bool:
    """Return whether tied tensors share memory. They do not if the checkpoint has a separate head."""
    weight, layer = getattr(one.module, one.name), other.module
    if one.module is layer:
        return True
    if hasattr(layer, "holds"):  # a packed layer
        return layer.holds(weight)  # type: ignore[no-any-return]
    return weight.data_ptr() == getattr(layer, other.name).data_ptr()  # type: ignore[no-any-return]


def _load(module: Any, name: str, tensor: Tensor, first: int = 0) -> None:
    """Write a tensor over the rows that a module holds, from row `first` on, packed as the module is."""
    held, is_weight = getattr(module, name), name == "weight"
    if isinstance(held, nn.ModuleList):  # MoE experts, each in a layer of its own
        is_transposed = getattr(module, "is_transposed", False)
        for layer, weight in zip(held, tensor.transpose(1, 2) if is_transposed else tensor, strict=True):
            _load(layer, "weight", weight)
    elif is_weight and hasattr(module, "load_rows"):  # a packed layer
        module.load_rows(first, tensor)
    else:
        rows = held[first : first + len(tensor)] if tensor.dim() else held
        rows.copy_(tensor)
        if is_weight and hasattr(module, "float32_linear"):  # a router's float32 copy
            _load(module.float32_linear, name, rows.float())
