"""Reads LoRA adapters saved by PEFT, and merges them into the weights while a model is loaded.

A weight W (N, I) becomes W + scaling * B A, with A (r, I) and B (N, r). DoRA then rescales each row to a
length that the adapter stores. If head and embedding are tied, an adapter of either one unties them, as in
PEFT's forward pass.

Sources: https://arxiv.org/abs/2106.09685; rsLoRA's scaling, https://arxiv.org/abs/2312.03732;
DoRA, https://arxiv.org/abs/2402.09353; peft/tuners/lora for the files.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.checkpoints.checks import ADAPTER_CONFIG, as_value_error, read_json
from nanoengine.checkpoints.safetensors_files import open_tensors

PREFIX = "base_model.model."
# Field of adapter_config.json -> its supported values. Other values would change the merged weights.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    # The others change the base weights too.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}


class Adapter:
    """Holds an adapter's changes, by the names of the model's weights.

    If `is_part`, the model is the language model of the multimodal model that the adapter is for. ValueError:
    a file is missing or damaged, or the adapter is neither plain LoRA nor DoRA.
    """

    def __init__(self, path: Path, is_part: bool = False) -> None:
        self.path = path
        config_path, file = path / ADAPTER_CONFIG, path / "adapter_model.safetensors"
        for one in (config_path, file):
            if not one.is_file():
                raise ValueError(f"lora must be the directory of a PEFT adapter: {path} has no {one.name}")
        self.config = read_json(config_path)
        for field, supported in PLAIN.items():
            if (value := self.config.get(field)) not in supported:
                raise ValueError(f"{config_path}: {field} must be one of {supported}, got {value!r}")
        tensors = open_tensors(file)
        self._bases: dict[str, Tensor] = {}  # name -> the base weight or bias of an adapted layer
        self._parts: dict[str, dict[str, Tensor]] = {}  # name -> its A, B and magnitude_vector
        self._whole: dict[str, Tensor] = {}  # name -> a tensor that replaces the weight
        self._trained: dict[str, str] = {}  # layer -> its name in the model that the adapter was trained on
        if is_part:
            from nanoengine.checkpoints.hf_config import name_in_part  # slow to import
        for saved_name in tensors.keys():  # noqa: SIM118 (not a dict)
            tensor = tensors.get_tensor(saved_name)
            trained = saved_name.removeprefix(PREFIX)
            name = name_in_part(trained) if is_part else trained
            if name is None:  # of another part, which is not loaded
                continue
            self._trained[name.partition(".lora_")[0]] = trained.partition(".lora_")[0]
            if found := re.fullmatch(r"(.+)\.lora_((?:embedding_)?[AB]|magnitude_vector)(\.weight)?", name):
                self._parts.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor
            elif ".lora_" in name or not saved_name.startswith(PREFIX):
                raise ValueError(f"{file}: tensor {saved_name!r} is not plain LoRA or DoRA")
            elif ".base_layer." in name:
                self._bases[name.replace(".base_layer.", ".")] = tensor
            else:
                self._whole[name] = tensor
        if not self.names():
            raise ValueError(f"{file} changes no weight of the language model")

    def names(self, tied: Collection[str] = ()) -> set[str]:
        """Return the names of the weights that the adapter changes. `tied` are names of one tied weight."""
        also = tied if any(name in tied for name in self._bases) else ()
        return {*self._bases, *self._parts, *self._whole, *also}

    def unties(self, tied: Collection[str]) -> bool:
        """Return whether the adapter unties a weight with these names, because it changes one or both."""
        changed = [name for name in tied if name in self.names()]
        if changed and len(changed) < len(tied) and self.config.get("ensure_weight_tying"):
            held = f"has ensure_weight_tying, and holds {changed[0]!r} of {' and '.join(tied)}"
            raise ValueError(f"{self.path} {held}; save it again with both")
        return bool(changed)

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of a module's product B A."""
        trained = self._trained.get(module, module)

        def own(pattern: str, default: str) -> Any:
            for key, value in (self.config.get(pattern) or {}).items():
                if re.match(rf"(.*\.)?({key})$", trained):
                    return value
            return self.config.get(default)

        alpha, stated = own("alpha_pattern", "lora_alpha"), own("rank_pattern", "r")
        if not isinstance(alpha, int | float) or not math.isfinite(alpha) or stated != rank:
            found = f"the config has {stated} and alpha {alpha!r}"
            raise ValueError(f"{self.path}: {module} has rank {rank}, but {found}")
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    @torch.no_grad()
    def merge(self, weights: Mapping[str, Tensor], tied: Collection[str]) -> None:
        """Change a model's weights, by name, in place. Changes are computed in float32.

        `tied` are names that shared one weight before it was untied. Raises ValueError if weights do not fit.
        """
        if missing := sorted(self.names() - weights.keys()):
            raise ValueError(f"{self.path} changes {missing[0]!r}, which is not a weight of the model")
        for name, tensor in (*self._bases.items(), *self._whole.items()):
            if tensor.shape != weights[name].shape:
                found, expected = tuple(tensor.shape), tuple(weights[name].shape)
                is_end = re.search("embed|head", name)
                hint = "; resize the base's vocabulary and merge the adapter with PEFT" if is_end else ""
                raise ValueError(f"{self.path}: {name!r} has shape {found}, not {expected}{hint}")
        for name, tensor in self._bases.items():
            for same in tied if name in tied else [name]:
                weights[same].copy_(tensor)
        for name, parts in self._parts.items():
            weights[name].copy_(self._added(name, parts, weights[name].float()))
        for name, tensor in self._whole.items():
            weights[name].copy_(tensor)

    def _added(self, name: str, parts: dict[str, Tensor], weight: Tensor) -> Tensor:
        """Return a weight with the adapter's change."""
        is_embedding, shape = "embedding_A" in parts or "embedding_B" in parts, tuple(weight.shape)
        ends = ["embedding_B", "embedding_A"] if is_embedding else ["A", "B"]
        if parts.keys() - {"magnitude_vector"} != {*ends}:
            raise ValueError(f"{self.path} lacks lora_{min(ends)} or lora_{max(ends)} for {name!r}")
        magnitude, is_dora = parts.get("magnitude_vector"), bool(self.config.get("use_dora"))
        if (magnitude is not None) != is_dora:
            found = "no" if magnitude is None else "a"
            raise ValueError(f"{self.path} has use_dora={is_dora}, but {found} magnitude vector for {name!r}")
        a, b = (parts[end].float() for end in ends)
        if is_embedding and a.dim() == b.dim() == 2:  # PEFT stores them transposed
            a, b = a.T, b.T
        if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or (len(b), a.shape[1]) != shape:
            found = f"{tuple(b.shape)} and {tuple(a.shape)}"
            raise ValueError(f"{self.path}: {found} do not make {name!r} of shape {shape}")
        with as_value_error(self.path):  # the patterns may not be expressions
            scaling = self.scaling(name.removesuffix(".weight"), len(a))
        weight = weight + scaling * (b @ a).to(weight.device)
        if magnitude is None:
            return weight
        dim = 0 if is_embedding else 1  # DoRA rescales an embedding's columns, else rows
        if tuple(magnitude.shape) != (shape[1 - dim],):
            found = f"lora_magnitude_vector of shape {tuple(magnitude.shape)}"
            raise ValueError(f"{self.path}: {found} does not fit {name!r} of shape {shape}")
        lengths: Tensor = magnitude.to(weight.device).float() / torch.linalg.norm(weight, dim=dim)
        return weight * lengths.unsqueeze(dim)
