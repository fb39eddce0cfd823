"""Builders with tiny defaults, shared by the tests."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from nanoengine.engine import BlockManager, Scheduler, Sequence
from nanoengine.sampling import SamplingParams

VOCAB = 128
# Wide initial weights spread the logits, so that no test hangs on a tie between the top two.
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# name -> (architecture, changes to TINY)
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 tied, one kv head": (
        "Qwen3",
        {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3 with attention bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding from layer 1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "llama without gqa": ("Llama", {"num_key_value_heads": 4}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama yarn rope": ("Llama", {"rope_parameters": YARN}),
    "llama odd sizes": (
        "Llama",
        {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral sliding": ("Mistral", {"sliding_window": 24}),
}


def hf_model(name: str) -> transformers.PreTrainedModel:
    """A transformers model with random float32 weights, the same at every call."""
    family, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight") or key.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


_checkpoints: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}


def checkpoint(name: str, factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    """A saved tiny model and its transformers twin, built once per test run."""
    if name not in _checkpoints:
        model = hf_model(name)
        path = factory.mktemp("checkpoint")
        model.save_pretrained(path)
        _checkpoints[name] = path, model
    return _checkpoints[name]


def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def random_prompts(lengths: list[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def make_sequence(seq_id: int, token_ids: list[int], priority: int = 0, **params) -> Sequence:
    params.setdefault("max_tokens", 100)
    return Sequence(seq_id, token_ids, SamplingParams(**params), priority=priority)


def make_scheduler(num_blocks: int = 8, block_size: int = 4, caching: bool = True, **settings) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, block_size, enable_prefix_caching=caching), **settings)


def admit(manager: BlockManager, seq: Sequence) -> list[int]:
    """Allocate as the scheduler does; returns the block table."""
    hits = manager.find_prefix(seq)
    assert manager.can_allocate(seq, hits)
    manager.allocate(seq, hits)
    return seq.block_table


def run_step(scheduler: Scheduler, token: int = 1):
    """One step in which every sequence that is due a token gets `token`."""
    batch = scheduler.schedule()
    scheduler.update(batch, [token] * len(batch.sampled_seqs))
    scheduler.check_invariants()
    return batch
