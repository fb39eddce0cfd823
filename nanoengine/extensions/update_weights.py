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
from nanoengine.backends.packing import PackedEmbedding
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
        self.places: dict[str, list[Place]] = {}  # by tensor name; tied tensors share a list
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
                self.places[saved] = self.places.setdefault(tied, [])
                self.places[saved].append(place)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights, as `LLMEngine.update_weights` documents. All are checked before one is written."""
        checked = [(place, name, x) for places, name, x in self._check(weights) for place in places]
        checked.sort(key=lambda one: (id(one[0].module), one[0].name, one[0].first))
        runs: list[tuple[Place, str, list[Tensor]]] = []  # tensors of adjacent rows, which are packed once
        for place, name, tensor in checked:
            if place.first and runs:
                before, _, tensors = runs[-1]
                if before[:2] == place[:2] and before.first + sum(map(len, tensors)) == place.first:
                    tensors.append(tensor)
                    continue
            runs.append((place, name, [tensor]))
        for place, name, tensors in runs:
            layer = place.module
            is_rounded = isinstance(layer, PackedLinear) and place.name == "weight" and layer.form.bits
            if is_rounded and not layer.are_blocks(place.first, place.first + sum(map(len, tensors))):
                raise ValueError(  # its other rows would be rounded again
                    f"tensor {name!r} shares a quantized layer with others: "
                    "pass q, k and v, or gate and up, in one call"
                )
        for place, _, tensors in runs:
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            _load(place.module, place.name, whole, place.first)

    def _check(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[list[Place], str, Tensor]]:
        """Check all tensors. Return their places, their names, and each in the model's orientation."""
        checked: dict[int, tuple[list[Place], str, Tensor]] = {}  # by list of places
        for name, tensor in weights:
            if name not in self.places:
                raise ValueError(f"the model has no tensor {name!r}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor {name!r} must be a torch.Tensor, got {type(tensor).__name__}")
            places, shape = self.places[name], tuple(tensor.shape)
            if shape != places[0].shape:
                raise ValueError(f"tensor {name!r} has shape {shape}, but the model needs {places[0].shape}")
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise TypeError(f"tensor {name!r} must have floats of 16 bits or more, got {tensor.dtype}")
            if tensor.is_meta or tensor.layout != torch.strided:
                raise TypeError(f"tensor {name!r} must be dense and hold numbers")
            tensor = tensor.detach().T if places[0].is_transposed else tensor.detach()
            _, tied, same = checked.get(id(places), (places, name, tensor))
            if same is not tensor and not torch.equal(same, tensor):
                raise ValueError(f"tensor {name!r} differs from {tied!r}, to which it is tied")
            checked[id(places)] = places, name, tensor
        return checked.values()


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
