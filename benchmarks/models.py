"""Models and workloads to compare engines on: published shapes, their files, and custom workloads."""

import json
import re
from pathlib import Path
from typing import Any

from nanoengine.cli import workloads
from nanoengine.cli.workloads import Workload, shape

_LLAMA3 = {"max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ROPE["original_max_position_embeddings"] = 8192
_GEMMA3 = {
    **{"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
    "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)],
    **{"sliding_window": 512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "rope_local_base_freq": 1e4},
}
_PHI3 = {
    **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": 2047},
    **{"rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
_MIXTRAL = {
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768},
    **{"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False},
}
_QWEN3_5 = {
    **{"model_type": "qwen3_5_text", "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"max_position_embeddings": 262144, "rms_norm_eps": 1e-6},
}
_GRANITE4 = {
    "layer_types": [f"{'full' if i in (10, 13, 17, 27) else 'linear'}_attention" for i in range(32)],
    **{"shared_intermediate_size": 2048, "num_local_experts": 0, "num_experts_per_tok": 0},
    **{"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1},
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
}
SHAPES = workloads.SHAPES | {
    "qwen3-1.7b": workloads.SHAPES["qwen3-0.6b"] | {"hidden_size": 2048, "intermediate_size": 6144},
    "llama-3.2-1b": shape("Llama", 128256, 2048, 8192, 16, 32, 8, 64, rope_scaling=_LLAMA3_ROPE, **_LLAMA3),
    "gemma-3-1b": shape("Gemma3", 262144, 1152, 6912, 26, 4, 1, 256, **_GEMMA3),
    "phi-3-0.9b": shape("Phi3", 32064, 3072, 8192, 6, 32, 32, 96, **_PHI3),  # mini, 6 of its 32 layers
    "mixtral-0.8b": shape("Mixtral", 32000, 1024, 3584, 8, 8, 2, 128, **_MIXTRAL),  # 8x7B, width and depth/4
    "qwen3.5-0.8b": shape("Qwen3_5", 248320, 1024, 3584, 24, 8, 2, 256, **_QWEN3_5),
    "granite-4-h-350m": shape("GraniteMoeHybrid", 100352, 768, 2048, 32, 12, 4, 64, **_GRANITE4),
}


def parse_custom(text: str) -> Workload:
    """Parse REQUESTS:PROMPT:OUTPUT[:SHARED], where PROMPT and OUTPUT are LENGTH or LOW-HIGH.

    >>> parse_custom("8:32-256:16").output
    (16, 16)
    """
    match = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?:(\d+)(?:-(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(text)
    requests, low, high, shortest, longest, shared = (int(part or 0) for part in match.groups())
    workload = Workload(text, requests, (low, high or low), (shortest, longest or shortest), shared)
    if requests < 1 or not all(1 <= a <= b for a, b in (workload.prompt, workload.output)):
        raise ValueError(text)
    return workload


def write_shape(shape: str, directory: str | Path, **changes: Any) -> None:
    """Write the config.json of a shape, with these values changed."""
    Path(directory, "config.json").write_text(json.dumps(SHAPES[shape] | changes))


def write_tokenizer(vocab_size: int, directory: str | Path) -> None:
    """Write a tokenizer of bytes and made-up words, which encodes a text as its bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġw{number}" for number in range(vocab_size - len(alphabet)))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=backend).save_pretrained(directory)
