"""Builds a model and fills its parameters from a checkpoint.

This file loads the models of decoder.py. hf.py loads all other models with transformers' code.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanoengine.backends.packing import Target
from nanoengine.backends.threads import on_all_cores
from nanoengine.checkpoints.checkpoint import Checkpoint
from nanoengine.checkpoints.checks import ADAPTER_CONFIG, MisfitError, refuse_misfit
from nanoengine.checkpoints.safetensors_files import Files, TensorHeader, check_dtypes, read_as
from nanoengine.config import ONLINE_FORMATS, EngineConfig
from nanoengine.models.decoder import Decoder
from nanoengine.signals import uninterrupted
from nanoengine.timing import log

if TYPE_CHECKING:  # at run time each is imported only for a model that needs it
    from nanoengine.checkpoints.lora import Adapter
    from nanoengine.models.hf import HFModel

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED_TO = {EMBEDDING: HEAD, HEAD: EMBEDDING}
# Fused layers -> Hugging Face's layers whose outputs they concatenate.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@torch.no_grad()
def load_model(
    checkpoint: Checkpoint, config: EngineConfig, target: Target, max_model_len: int, shard: Any = None
) -> "Decoder | HFModel":
    """Build the model and fill every parameter from the checkpoint, or at random (load_format "dummy").

    A shard is the part of a decoder that one rank holds. Raises ValueError if a tensor is missing, unexpected
    or of the wrong shape, a file is damaged, or the model is not supported.
    """
    misfit = adapter = None
    if config.lora is not None:
        from nanoengine.checkpoints.lora import Adapter

        adapter = Adapter(Path(config.lora), checkpoint.is_part)
    elif (checkpoint.path / ADAPTER_CONFIG).is_file():
        log.warning("%s also holds an adapter, which is not merged: set lora to merge it", checkpoint.path)
    if checkpoint.decoder_config is not None:
        try:
            model = _load_decoder(checkpoint, config, target, shard, adapter)
            model.build_rope_table(max_model_len, target.device)
            return model
        except MisfitError as error:
            if config.model_impl not in ("auto", "vllm") or shard is not None or checkpoint.gguf is not None:
                raise
            misfit = error
    from nanoengine.models.hf import load_hf

    try:  # transformers accepts more names for the same tensors
        return load_hf(checkpoint, config, target, max_model_len, adapter)
    except ValueError:
        if misfit is None:
            raise
        raise misfit from None


def _load_decoder(
    checkpoint: Checkpoint, config: EngineConfig, target: Target, shard: Any, adapter: "Adapter | None"
) -> Decoder:
    (dtype, device, _), decoder_config = target, checkpoint.decoder_config
    assert decoder_config is not None
    with uninterrupted(), torch.device("meta"):
        model = whole = Decoder(decoder_config).to(dtype)
        if shard is not None:
            model = Decoder(shard.config).to(dtype)
    files = None if config.load_format == "dummy" else checkpoint.open_files()
    shapes = {} if files is None else check_fit(whole, files.headers, checkpoint.path)
    is_tied = model.config.tie_word_embeddings
    # If the files hold both a head and an embedding, the two may differ, so each is read by its own name.
    tied = TIED_TO if is_tied and (files is None or not TIED_TO.keys() <= files.headers.keys()) else {}
    changed: set[str] = set() if adapter is None else adapter.names(tied)
    quantized: dict[str, list[str]] = {}  # layer -> names of its quantized weights
    if files is not None and shard is None and any(map(files.is_quantized, files.headers)):
        quantized = find_quantized(model, files, changed)
    home = torch.device("cpu") if config.quantization in ONLINE_FORMATS else device  # to be rounded there
    model = model.to_empty(device=home).eval().requires_grad_(False)  # this unties the weights
    if tied and (adapter is None or not adapter.unties(tied)):
        model.lm_head.weight = model.embed_tokens.weight
    if files is None:
        _fill_at_random(model, config.seed + (shard.rank if shard is not None else 0), device)
    else:
        _fill(model, files, shard, shapes)
        if quantized:
            from nanoengine.backends.quantization import fill_quantized

            fill_quantized(model, quantized, partial(read_as, files, shapes), target)
    if adapter is not None:
        adapter.merge(destinations(model), tied)
    # As transformers' `tie_weights` does: a head in the files is used, even if the config says tied.
    is_plain = not {"lm_head", "embed_tokens"} & quantized.keys()
    if is_tied and is_plain and torch.equal(model.lm_head.weight, model.embed_tokens.weight):
        model.lm_head.weight = model.embed_tokens.weight
    return model


def _fill_at_random(model: Decoder, seed: int, device: torch.device) -> None:
    """Draw weights on the device, also those of a model that is rounded before it gets there."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            drawn = parameter if parameter.device == device else torch.empty_like(parameter, device=device)
            parameter.copy_(drawn.normal_(0.0, 0.02, generator=generator))


def _fill(model: Decoder, files: Files, shard: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Copy each tensor, or the shard's part of it, from the mapped files, one tensor at a time."""
    wanted: dict[str, list[Tensor]] = {}
    for name, parameter in destinations(model).items():
        wanted.setdefault(source_of(name, files), []).append(parameter)

    def fill(name: str) -> None:
        for filled in wanted.get(name, ()):  # empty for a quantized weight
            weight = read_as(files, shapes, name)
            weight = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
            if shard is not None:
                weight = weight[shard.slices(name, filled.dim())]
                filled = filled.zero_()[tuple(slice(length) for length in weight.shape)]
            filled.copy_(weight.to(filled.dtype))  # a share that was rounded up ends in zeros

    on_all_cores("reading weights", fill, files.headers)


def check_fit(model: Decoder, headers: dict[str, TensorHeader], path: Path) -> dict[str, tuple[int, ...]]:
    """Check that files hold exactly the model's tensors, and return the shape of each.

    Raises MisfitError if a tensor is missing or unexpected, ValueError if its shape or dtype is wrong.
    """
    shapes = {name: tuple(part.shape) for name, part in destinations(model).items()}
    if model.config.tie_word_embeddings and HEAD in headers:
        shapes[HEAD] = shapes[EMBEDDING]
        if EMBEDDING not in headers:
            del shapes[EMBEDDING]
    refuse_misfit(path, missing=shapes.keys() - headers.keys(), unexpected=headers.keys() - shapes.keys())
    check_dtypes(headers, shapes)
    for name, shape in shapes.items():
        if (found := headers[name].shape) is not None and found != shape:
            resized = name in TIED_TO and found[1:] == shape[1:]
            hint = f'; give hf_overrides={{"vocab_size": {found[0]}}}' if resized else ""
            raise ValueError(f"tensor {name!r} has shape {found}, the config requires {shape}{hint}")
    return shapes


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


def source_of(name: str, files: Files) -> str:
    """Return the name of the tensor that fills a weight. Files may hold only one of two tied weights."""
    return TIED_TO[name] if name in TIED_TO and name not in files.headers else name


def find_quantized(model: Decoder, files: Files, changed: set[str]) -> dict[str, list[str]]:
    """Return the layers with quantized weights in the files, and the names of these weights there.

    These layers lose their weight parameters, so no memory is allocated for them. Layers that an adapter
    changes are left out: their weights are dequantized.
    """
    quantized = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            own_names = saved_names(f"{path}.weight")
            names = [source_of(name, files) for name in own_names]
            if all(map(files.is_quantized, names)) and not changed & {*own_names}:
                quantized[path] = names
    for path in quantized:
        model.get_submodule(path).register_parameter("weight", None)
    return quantized
