"""Defines what a benchmark serves: published models' shapes with random weights, and request lengths."""

import random
from dataclasses import dataclass
from typing import Any

SIZES: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim")


def shape(family: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Return the content of a config.json. `sizes` are the values of SIZES."""
    common = {"hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": None}
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    return names | dict(zip(SIZES, sizes, strict=True)) | common | more


_QWEN3 = {"max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
SHAPES = {
    "qwen3-0.6b": shape("Qwen3", 151936, 1024, 3072, 28, 16, 8, 128, **_QWEN3),
    "tiny": shape("Qwen3", 4096, 256, 768, 4, 8, 4, 64, **_QWEN3),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes the requests to serve. Lengths are drawn from closed ranges, the same in every run."""

    name: str
    num_requests: int
    prompt: tuple[int, int]  # tokens after the shared ones
    output: tuple[int, int]
    shared: int = 0  # length of the prefix that all prompts share
    shape: str = "qwen3-0.6b"  # the model, unless --model names another

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return the length of each request's prompt after the shared prefix, and of each output."""
        rng = random.Random(0)
        prompt_lens = [rng.randint(*self.prompt) for _ in range(self.num_requests)]
        return prompt_lens, [rng.randint(*self.output) for _ in range(self.num_requests)]

    def prompts(self, run: str, vocab_size: int) -> list[list[int]]:
        """Return prompts of random token ids, different in each run so that no run hits another's cache."""
        rng = random.Random(run)

        def draw(num_tokens: int) -> list[int]:
            return [rng.randrange(min(4000, vocab_size)) for _ in range(num_tokens)]

        prefix = draw(self.shared)
        return [prefix + draw(num_tokens) for num_tokens in self.lengths()[0]]


_WORKLOADS = (
    Workload("nano", 256, (100, 1024), (100, 1024)),  # nano-vllm's benchmark, for a GPU
    Workload("small", 32, (32, 256), (32, 128)),
    Workload("decode", 16, (16, 32), (128, 128)),
    Workload("prefill", 16, (512, 512), (8, 8)),
    Workload("prefix", 32, (32, 32), (32, 32), shared=512),
    Workload("tiny", 128, (32, 256), (32, 256), shape="tiny"),
)
WORKLOADS = {workload.name: workload for workload in _WORKLOADS}
