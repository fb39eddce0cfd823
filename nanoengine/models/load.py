"""Builds a model and fills its parameters from a checkpoint.

This file loads the models of decoder.py. hf.py loads all other models with transformers' code.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from nanoengine.backends.quantization import Pack, PackedEmbedding, Quantized, floats
from nanoengine.backends.threads import on_all_cores
from nanoengine.checkpoints.checkpoint import Checkpoint
from nanoengine.checkpoints.safetensors_files import (
    MisfitError,
    Reader,
    TensorHeader,
    check_dtypes,
    refuse_misfit,
)
from nanoengine.config import ONLINE_FORMATS, EngineConfig
from nanoengine.models.decoder import Decoder
from nanoengine.signals import uninterrupted

if TYPE_CHECKING:  # at run time each is imported only for a model that needs it
    from nanoengine.models.hf import HFModel

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED_TO = {EMBEDDING: HEAD, HEAD: EMBEDDING}
# Fused layers -> Hugging Face's layers whose outputs they concatenate.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# ---- A model on a device -------------------------------------------------------------------------


@torch.no_grad()
def load_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    shard: Any = None,
    pack: Pack | None = None,
) -> "Decoder | HFModel":
    """Build the model and fill every parameter from the checkpoint, or at random (load_format "dummy").

    A shard is the part of a decoder that one rank holds. `pack` turns quantized weights into layers, or
    returns None for those to dequantize. Without it, all are dequantized.

    Raises:
        ValueError: a tensor is missing, unexpected or of the wrong shape, a file is damaged, or the
            model is not supported.
    """
    misfit = None
    if checkpoint.decoder_config is not None:
        try:
            return _load_decoder(checkpoint, config, dtype, device, max_model_len, shard, pack)
        except MisfitError as error:
            if config.model_impl not in ("auto", "vllm") or shard is not None or checkpoint.gguf is not None:
                raise
            misfit = error
    from nanoengine.models.hf import load_hf

    try:  # transformers accepts more names for the same tensors
        return load_hf(checkpoint, config, dtype, device, max_model_len, pack)
    except ValueError:
        if misfit is None:
            raise
        raise misfit from None


def _load_decoder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    shard: Any,
    pack: Pack | None,
) -> Decoder:
    decoder_config = checkpoint.decoder_config
    assert decoder_config is not None
    with uninterrupted(), torch.device("meta"):
        model = whole = Decoder(decoder_config).to(dtype)
        if shard is not None:
            model = Decoder(shard.config).to(dtype)
    files = None if config.load_format == "dummy" else checkpoint.open_files()
    adapter = None
    if config.lora is not None:
        from nanoengine.checkpoints.lora import Adapter

        adapter = Adapter(Path(config.lora), checkpoint.is_part)
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
            fill_quantized(model, quantized, partial(_read, files, shapes), pack, dtype)
    if adapter is not None:
        adapter.merge(destinations(model), tied)
    # As transformers' `tie_weights` does: a head in the files is used, even if the config says tied.
    is_plain = not {"lm_head", "embed_tokens"} & quantized.keys()
    if is_tied and is_plain and torch.equal(model.lm_head.weight, model.embed_tokens.weight):
        model.lm_head.weight = model.embed_tokens.weight
    model.build_rope_table(max_model_len, device)
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


def _fill(model: Decoder, files: Reader, shard: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Copy each tensor, or the shard's part of it, from the mapped files, one tensor at a time."""
    wanted: dict[str, list[Tensor]] = {}
    for name, parameter in destinations(model).items():
        wanted.setdefault(source_of(name, files), []).append(parameter)

    def fill(name: str) -> None:
        for filled in wanted.get(name, ()):  # empty for a quantized weight
            weight = _read(files, shapes, name)
            if shard is not None:
                whole = floats(weight, torch.float32) if isinstance(weight, Quantized) else weight
                weight = whole[shard.slices(name, filled.dim())]
                filled = filled.zero_()[tuple(slice(length) for length in weight.shape)]
            filled.copy_(floats(weight, filled.dtype))  # a share that was rounded up ends in zeros

    on_all_cores("reading weights", fill, files.headers)


def _read(files: Reader, shapes: dict[str, tuple[int, ...]], name: str) -> Tensor | Quantized:
    """Return a tensor, and check its shape: the header of a quantized weight does not state it."""
    weight = files.read(name)
    found = tuple((weight.integers if isinstance(weight, Quantized) else weight).shape)
    if found != shapes[name]:
        raise ValueError(f"tensor {name!r} has shape {found}, the config requires {shapes[name]}")
    return weight


# ---- Hugging Face's names of a decoder's tensors --------------------------------------------------


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


def source_of(name: str, files: Reader) -> str:
    """Return the name of the tensor that fills a weight. Files may hold only one of two tied weights."""
    return TIED_TO[name] if name in TIED_TO and name not in files.headers else name


# ---- Layers with quantized weights ---------------------------------------------------------------


def find_quantized(model: Decoder, files: Reader, changed: set[str]) -> dict[str, list[str]]:
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


def fill_quantized(
    model: Decoder,
    quantized: dict[str, list[str]],
    read: Callable[[str], Any],
    pack: Pack | None,
    dtype: torch.dtype,
) -> None:
    """Replace these layers with what `pack` returns, or dequantize their weights. Tied layers share one."""

    def make(path: str) -> nn.Module | nn.Parameter:
        parts = [read(name) for name in quantized[path]]
        if pack is not None and all(isinstance(part, Quantized) for part in parts):
            layer: Any = model.get_submodule(path)
            if (packed := pack(Quantized.cat(parts), getattr(layer, "bias", None), dtype)) is not None:
                return packed
        weight = torch.cat([floats(part, dtype) for part in parts]).to(model.norm.weight.device)
        return nn.Parameter(weight, requires_grad=False)

    paths = {tuple(names): path for path, names in reversed(quantized.items())}  # the first layer of each
    made = dict(zip(paths, on_all_cores("packing weights", make, paths.values()), strict=True))
    for path, names in quantized.items():
        layer, new = model.get_submodule(path), made[tuple(names)]
        if isinstance(new, nn.Parameter):
            layer.weight = new
        else:
            model.set_submodule(
                path, PackedEmbedding.of(layer, new) if isinstance(layer, nn.Embedding) else new
            )


# ---- Size and identity of the weights ------------------------------------------------------------


def describe_weights(checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, shard: Any) -> str:
    """Say how much memory the weights take on a device that computes with them in this dtype."""
    shape: Any = checkpoint.decoder_config if shard is None else shard.config
    with uninterrupted(), torch.device("meta"):
        if shape is not None:
            model: Any = Decoder(shape)
        else:
            import transformers

            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_config(checkpoint.hf_config, trust_remote_code=config.trust_remote_code)
    num_bytes = sum(x.numel() for x in model.parameters()) * dtype.itemsize
    form = " if dequantized to " if checkpoint.quant_method is not None else " in "
    return f"they take {num_bytes / 2**30:.1f} GiB{form}{str(dtype).removeprefix('torch.')}"


def digest_weights(model: torch.nn.Module) -> bytes:
    """Return a hash of all weights with their names, dtypes and shapes."""
    digest = xxh3_128()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
