"""LoRA adapters as PEFT saves them, merged into the weights while a model is loaded.

A weight W (N, I) becomes W + scaling * B A, with A (r, I) and B (N, r). Sources: https://arxiv.org/abs/2106.09685;
rsLoRA's scaling, https://arxiv.org/abs/2312.03732; peft/tuners/lora for the files.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.models.files import read_json

PREFIX = "base_model.model."
# Of adapter_config.json, what would make the merged weights others than those here, unless it is one of these
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "init_lora_weights": (
        None,
        True,
        False,
        "gaussian",
        "orthogonal",
        "eva",
    ),  # the others change the base too
}


class Adapter:
    """What an adapter changes, by the names of a model's weights.

    Args:
        path: a directory with adapter_config.json and adapter_model.safetensors.

    Raises:
        ValueError: a file is missing or damaged, or it is not plain LoRA; with the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config_path, file = path / "adapter_config.json", path / "adapter_model.safetensors"
        for one in (config_path, file):
            if not one.is_file():
                raise ValueError(f"lora must be a directory of a PEFT adapter: {path} holds no {one.name}")
        self.config = read_json(config_path)
        for field, served in PLAIN.items():
            if (value := self.config.get(field)) not in served:
                raise ValueError(f"{config_path}: {field}={value!r} is not served")
        try:
            with safe_open(file, framework="pt") as tensors:
                self._tensors = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
        self._pairs: dict[str, dict[str, Tensor]] = {}  # name -> its A and B
        self._whole: dict[str, Tensor] = {}  # name -> a tensor in its place
        for saved_name, tensor in self._tensors.items():
            name = saved_name.removeprefix(PREFIX).replace(".base_layer.", ".")
            if found := re.fullmatch(r"(.+)\.lora_([AB])\.weight", name):
                self._pairs.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor
            elif ".lora_" in name or not saved_name.startswith(PREFIX):
                raise ValueError(f"{file}: tensor {saved_name!r} is not of plain LoRA")
            else:
                self._whole[name] = tensor

    @property
    def names(self) -> set[str]:
        """The weights that it changes."""
        return {*self._pairs, *self._whole}

    def scaling(self, module: str, rank: int) -> float:
        """What a module's product B A is times."""

        def own(pattern: str, default: str) -> Any:
            for key, value in (self.config.get(pattern) or {}).items():
                if re.match(rf"(.*\.)?({key})$", module):
                    return value
            return self.config.get(default)

        alpha, stated = own("alpha_pattern", "lora_alpha"), own("rank_pattern", "r")
        if not isinstance(alpha, int | float) or stated != rank:
            raise ValueError(
                f"{self.path}: {module} has rank {rank}, the config says {stated}, alpha {alpha!r}"
            )
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def changes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor, bool]]:
        """Names of weights, and what is to be added to each in float32 (True) or put in its place (False).

        Args:
            shapes: of the model's weights.

        Raises:
            ValueError: one is not the model's, or does not fit.
        """
        if missing := sorted(self.names - shapes.keys()):
            raise ValueError(f"{self.path} changes {missing[0]!r}, which the model does not have by itself")
        for name, pair in self._pairs.items():
            if pair.keys() != {"A", "B"}:
                raise ValueError(f"{self.path} lacks one of lora_A and lora_B of {name!r}")
            a, b = pair["A"].float(), pair["B"].float()
            if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or (len(b), a.shape[1]) != shapes[name]:
                found = f"{tuple(b.shape)} and {tuple(a.shape)}"
                raise ValueError(f"{self.path}: {found} do not make {name!r} of shape {shapes[name]}")
            yield name, self.scaling(name.removesuffix(".weight"), len(a)) * (b @ a), True
        for name, tensor in self._whole.items():
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{self.path}: {name!r} has shape {tuple(tensor.shape)}, not {shapes[name]}")
            yield name, tensor, False


@torch.no_grad()
def merge(adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
    """Change a model's weights, or views of them, in place; sums are made in float32.

    Raises:
        ValueError: the adapter does not fit.
    """
    for name, change, is_added in adapter.changes({name: tuple(x.shape) for name, x in weights.items()}):
        weight = weights[name]
        weight.copy_(weight.float() + change.to(weight.device) if is_added else change)
