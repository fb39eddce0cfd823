"""Maps a decoder's tensors to Hugging Face's names, and checks that files hold exactly these tensors."""

from collections.abc import Container, Iterable
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.models.decoder import Decoder
from nanoengine.models.files import Reader, TensorHeader

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED_TO = {EMBEDDING: HEAD, HEAD: EMBEDDING}
# Fused layers -> Hugging Face's layers whose outputs they concatenate.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class MisfitError(ValueError):
    """Raised if the files do not hold exactly the tensors of the model."""


def check_fit(model: Decoder, headers: dict[str, TensorHeader], path: Path) -> dict[str, tuple[int, ...]]:
    """Check that files hold exactly the model's tensors, and return the shape of each.

    Raises:
        MisfitError: a tensor is missing or unexpected.
        ValueError: a tensor's shape differs from the config's, or its dtype is not a float.
    """
    shapes = {name: tuple(part.shape) for name, part in destinations(model).items()}
    if model.config.tie_word_embeddings and HEAD in headers:
        shapes[HEAD] = shapes[EMBEDDING]
        if EMBEDDING not in headers:
            del shapes[EMBEDDING]
    refuse_misfit(path, missing=shapes.keys() - headers.keys(), unexpected=headers.keys() - shapes.keys())
    check_dtypes(headers, shapes)
    for name, shape in shapes.items():
        if headers[name].shape not in (shape, None):
            raise ValueError(f"tensor {name!r} has shape {headers[name].shape}, the config requires {shape}")
    return shapes


def check_dtypes(headers: dict[str, TensorHeader], parameters: Container[str]) -> None:
    """Raise ValueError if a parameter would be filled with anything but floats of at least 16 bits."""
    for name, header in headers.items():
        if header.dtype not in FLOAT_DTYPES and (name in parameters or name.endswith(".weight")):
            raise ValueError(
                f"{header.file} holds tensor {name!r} as {header.dtype}; "
                f"a weight must be one of {', '.join(FLOAT_DTYPES)}"
            )


def refuse_misfit(path: Path, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
    """Raise MisfitError if a tensor is missing or unexpected."""
    if names := sorted(missing):
        raise MisfitError(f"{path} lacks {len(names)} tensors, the first is {names[0]!r}")
    if names := sorted(unexpected):
        raise MisfitError(f"{path} holds tensor {names[0]!r} which the architecture does not have")


def saved_names(name: str) -> list[str]:
    """Return Hugging Face's name for a parameter, or several if it stacks several tensors."""
    full_name = name if name.startswith("lm_head") else f"model.{name}"
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [full_name.replace(fused, part) for part in parts]
    return [full_name]


def destinations(model: Decoder) -> dict[str, Tensor]:
    """Return the parameter, or the rows of one, that each tensor fills. The keys are Hugging Face's names."""
    config = model.config
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    rows = {"qkv_proj": [n * config.head_dim for n in heads], "gate_up_proj": [config.intermediate_size] * 2}
    result: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        fused = name.split(".")[-2]
        parts = torch.split(parameter, rows[fused]) if fused in rows else [parameter]
        result |= zip(saved_names(name), parts, strict=True)
    return result


def source_of(name: str, files: Reader) -> str:
    """Return the name of the tensor that fills a weight. Files may hold only one of two tied weights."""
    return TIED_TO[name] if name in TIED_TO and name not in files.headers else name
