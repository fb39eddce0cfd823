"""A stand-in for nano-vllm, written from its sources at commit bb823b3; it refuses what they would misread.

It builds the model that they build, fills it from the files as they do, and samples meaningless tokens.
Source: https://github.com/GeeeekExplorer/nano-vllm
"""

import random
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@dataclass(slots=True)
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self):
        assert self.temperature > 1e-10, "greedy sampling is not permitted"


@dataclass(slots=True)
class Config:
    """Takes `LLM`'s arguments. The real class gets only those that it has; here the others are errors."""

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256

    def __post_init__(self):
        assert Path(self.model).is_dir()
        assert self.kvcache_block_size % 256 == 0


class LLM:
    def __init__(self, model, **kwargs):
        self.config = Config(model, **kwargs)
        self.hf_config = AutoConfig.from_pretrained(model)
        assert self.hf_config.model_type == "qwen3"
        assert self.config.max_model_len <= self.hf_config.max_position_embeddings  # else it takes the less
        assert self.hf_config.dtype in (torch.float16, torch.bfloat16)  # for flash-attn
        with torch.device("meta"):
            unfilled = dict(AutoModelForCausalLM.from_config(self.hf_config).named_parameters())
        for file in glob(f"{model}/*.safetensors"):
            for name, tensor in load_file(file).items():
                assert tensor.shape == unfilled.pop(name).shape
                assert tensor.dtype == self.hf_config.dtype
        assert not unfilled  # what the real one would leave as it was allocated
        self.tokenizer = AutoTokenizer.from_pretrained(model, use_fast=True)
        assert isinstance(self.tokenizer.eos_token_id, int)

    def generate(self, prompts, sampling_params, use_tqdm=True):
        if not isinstance(sampling_params, list):
            sampling_params = [sampling_params] * len(prompts)
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):  # strict here
            assert prompt
            assert all(0 <= token < self.hf_config.vocab_size for token in prompt)
            assert len(prompt) + params.max_tokens <= self.config.max_model_len
            assert params.ignore_eos  # it would stop at once, and say so nowhere
            outputs.append(random.choices(range(self.hf_config.vocab_size), k=params.max_tokens))
        return [{"text": self.tokenizer.decode(ids), "token_ids": ids} for ids in outputs]
