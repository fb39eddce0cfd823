"""Builds a model and fills its parameters from a checkpoint.

This file loads the models of decoder.py. hf.py loads all other models with transformers' code.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanoengine.backends.cores import on_all_cores
from nanoengine.backends.quantized import Pack, Quantized, floats
from nanoengine.config import ONLINE_FORMATS, EngineConfig
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder
from nanoengine.models.files import Reader
from nanoengine.models.names import TIED_TO, MisfitError, check_fit, destinations, source_of
from nanoengine.optional import load

if TYPE_CHECKING:  # at run time each is imported only for a model that needs it
    from nanoengine.models.hf import HFModel


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
            if config.model_impl not in ("auto", "vllm") or shard is not None:
                raise
            misfit = error
    load_hf = load("models.hf", f"a model of type {checkpoint.architecture}").load_hf
    try:  # transformers accepts more names for the same tensors
        return load_hf(checkpoint, config, dtype, device, max_model_len, pack)  # type: ignore[no-any-return]
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
    with torch.device("meta"):
        model = whole = Decoder(decoder_config).to(dtype)
        if shard is not None:
            model = Decoder(shard.config).to(dtype)
    files = None if config.load_format == "dummy" else checkpoint.open_files()
    adapter: Any = None
    if config.lora is not None:
        adapter = load("contrib.lora", "lora").Adapter(Path(config.lora))
    shapes = {} if files is None else check_fit(whole, files.headers, checkpoint.path)
    is_tied = model.config.tie_word_embeddings
    # If the files hold both a head and an embedding, the two may differ, so each is read by its own name.
    tied = TIED_TO if is_tied and (files is None or not TIED_TO.keys() <= files.headers.keys()) else {}
    changed: set[str] = set() if adapter is None else adapter.names(tied)
    quantized: dict[str, list[str]] = {}  # layer -> names of its quantized weights
    if files is not None and shard is None and any(map(files.is_quantized, files.headers)):
        formats = load("models.formats", "a quantized checkpoint")
        quantized = formats.find_quantized(model, files, changed)
    home = torch.device("cpu") if config.quantization in ONLINE_FORMATS else device  # to be rounded there
    model = model.to_empty(device=home).eval().requires_grad_(False)  # this unties the weights
    if tied and (adapter is None or not adapter.unties(tied)):
        model.lm_head.weight = model.embed_tokens.weight
    if files is None:
        _fill_at_random(model, config.seed + (shard.rank if shard is not None else 0))
    else:
        _fill(model, files, shard, shapes)
        if quantized:
            formats.fill_quantized(model, quantized, partial(_read, files, shapes), pack, dtype)
    if adapter is not None:
        adapter.merge(destinations(model), tied)
    # As transformers' `tie_weights` does: a head in the files is used, even if the config says tied.
    is_plain = not {"lm_head", "embed_tokens"} & quantized.keys()
    if is_tied and is_plain and torch.equal(model.lm_head.weight, model.embed_tokens.weight):
        model.lm_head.weight = model.embed_tokens.weight
    model.build_rope_table(max_model_len, device)
    return model


def _fill_at_random(model: Decoder, seed: int) -> None:
    generator = torch.Generator(model.norm.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


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
