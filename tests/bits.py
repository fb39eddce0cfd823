"""Gives the same requests to engines with random schedules, and compares log-probabilities bit for bit."""

import random
from pathlib import Path
from typing import Any

from benchmarks.bits import answer
from nanoengine import SamplingParams
from tests.helpers import hf_model, random_prompts
from tests.model_table import small_config, small_model

WITH_STATES = "granitemoehybrid"  # Mamba2 layers, attention and a mixture of experts
KINDS = "qwen3", "llama3 rope", "gemma2", WITH_STATES
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8 cache of bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int4 over bfloat16": {"dtype": "bfloat16", "quantization": "int4"},
}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def requests(number: int = 40) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests of 1 to 130 tokens. Some share a beginning, and some repeat themselves."""
    rng = random.Random(0)
    prompts = random_prompts([130, *(rng.randint(1, 130) for _ in range(number - 1))])
    for i in range(0, number, 3):
        prompts[i][:100] = prompts[0][: min(100, len(prompts[i]))]
        prompts[i - 1] = (prompts[i][-7:] * 9)[: len(prompts[i - 1])]
    settings = [(rng.choice([0, 1]), rng.choice([None, None, 1]), i) for i in range(number)]
    common: dict[str, Any] = {"logprobs": 2, "max_tokens": 6, "ignore_eos": True}
    params = [SamplingParams(temperature=t, prompt_logprobs=n, seed=i, **common) for t, n, i in settings]
    return prompts, params


def schedule(rng: random.Random, store: Path, kind: str) -> dict[str, Any]:
    """Return settings of an engine that must not change any log-probability.

    Models with states support neither drafts nor a KV store.
    """
    block_size = rng.choice([1, 3, 8, 16, 64])
    extra: dict[str, Any] = rng.choice([{"async_scheduling": True}, DRAFTS, {"kv_store": str(store)}])
    settings = {
        "block_size": block_size,
        "num_kv_blocks": -(-512 // block_size) + rng.choice([1, 500]),
        "max_num_seqs": rng.choice([1, 2, 7, 64]),
        "max_num_batched_tokens": rng.choice([3, 7, 33, 1024]),
        "enable_prefix_caching": "kv_store" in extra or rng.random() < 0.7,
        "num_threads": rng.choice([1, 2]),
    }
    if kind == WITH_STATES:
        extra = {"async_scheduling": "async_scheduling" in extra, "num_state_slots": rng.choice([3, 50])}
    return settings | extra


def find_difference(
    kind: str, form: str, numbers: range, directory: Path, num_requests: int = 40
) -> dict[str, Any] | None:
    """Return the first of these schedules under which a log-probability differs, or None if none does."""
    model = directory / kind
    if not model.exists():
        made = small_model(small_config(kind)) if kind == WITH_STATES else hf_model(kind)
        made.save_pretrained(model)
    prompts, params = requests(num_requests)
    common = {**FORMS[form], "pin_threads": False, "batch_invariant": True}
    expected = next(answer(str(model), prompts, params, **common))
    for number in numbers:
        settings = schedule(random.Random(number), directory / f"store of {kind} in {form}", kind)
        for cache, given in zip(
            ("cold", "warm"), answer(str(model), prompts, params, **common, **settings), strict=True
        ):
            differing = [i for i, (a, b) in enumerate(zip(expected, given, strict=True)) if a != b]
            if differing:
                return {"number": number, "cache": cache, "requests": differing, **settings}
    return None
