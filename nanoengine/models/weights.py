"""Tells weights apart, and says how much memory they take."""

import itertools
from typing import Any

import torch
from xxhash import xxh3_128

from nanoengine.config import EngineConfig
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder


def describe_weights(checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, shard: Any) -> str:
    """Say how much memory the weights take on a device that computes with them in this dtype."""
    shape: Any = checkpoint.decoder_config if shard is None else shard.config
    with torch.device("meta"):
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
