"""Reads the config of a checkpoint, and refuses what is malformed or not supported."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from nanoengine.signals import uninterrupted

ADAPTER_CONFIG = "adapter_config.json"  # beside a LoRA adapter


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or raise ValueError. If there is no file, any default is returned."""
    if default is not None and not path.is_file():
        return default
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content!r:.40}")
    return content


def read_config(path: Path, trust_remote_code: bool) -> Any:
    """Return the transformers config of a directory, with the quantization settings of other files."""
    file = path / "config.json"
    if not file.is_file():
        if (path / ADAPTER_CONFIG).is_file():
            base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise ValueError(
                f"{path} holds a LoRA adapter and no model; load {base!r} with lora={str(path)!r}"
            )
        raise ValueError(f"{path} holds no config.json; a model directory in Hugging Face format is needed")
    with as_value_error(file):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    check_fields(file, config)
    for name in ("quantize_config.json", "hf_quant_config.json"):  # written by GPTQ and ModelOpt
        if not getattr(config, "quantization_config", None) and (path / name).is_file():
            stated = read_json(path / name)
            modelopt = {"quant_method": "modelopt", **(stated.get("quantization") or {})}
            is_gptq = name.startswith("quantize")
            config.quantization_config = {"quant_method": "gptq", **stated} if is_gptq else modelopt
    return config


# Config fields that determine tensor sizes -> their limits, far above any real model's, so that
# PyTorch can count the elements of a tensor in 64 bits.
SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**24),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
}


def check_fields(path: Path, hf_config: Any) -> None:
    """Raise ValueError if an architecture or a size in a config, or in its text config, is invalid."""
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        if not hasattr(config, "attribute_map"):
            raise ValueError(f"{path}: the language model's config must be an object, got {config!r:.99}")
        names = getattr(config, "architectures", None)
        if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
            raise ValueError(f"{path}: architectures must be a list of names, got {names!r:.99}")
        for field, limit in SIZES.items():
            value = vars(config).get(config.attribute_map.get(field, field))
            sizes = value if isinstance(value, list) else [value]  # one per layer, or one for all
            if value is not None and not all(isinstance(size, int) and 0 <= size <= limit for size in sizes):
                raise ValueError(f"{path}: {field} must be an integer in [0, {limit}], got {value!r:.99}")


class MisfitError(ValueError):
    """Raised if the files do not hold exactly the tensors of the model."""


def refuse_misfit(path: Path, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
    """Raise MisfitError if a tensor is missing or unexpected."""
    if names := sorted(missing):
        raise MisfitError(f"{path} lacks {len(names)} tensors, the first is {names[0]!r}")
    if names := sorted(unexpected):
        raise MisfitError(f"{path} holds tensor {names[0]!r} which the architecture does not have")


class UnsupportedModelError(ValueError):
    """Raised if a model cannot be computed over a flat batch with paged attention. The message says why."""


@contextmanager
def as_value_error(source: Path | str) -> Iterator[None]:
    """Turn transformers' errors about a malformed file into a ValueError that names its cause.

    A signal's handler may also raise any exception, so signals wait until the block ends.
    """
    with uninterrupted():
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{source} cannot be loaded: {kind}{error}") from error
