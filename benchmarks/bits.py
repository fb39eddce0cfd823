"""Counts the requests whose log-probabilities depend on their schedule: docs/guide/bits.md."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch

from nanoengine.llm import LLM
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams

COMMON: dict[str, Any] = {"max_model_len": 256, "block_size": 16, "num_kv_blocks": 600}
VARIATIONS: dict[str, dict[str, Any]] = {
    "all together": {},
    "one at a time": {"max_num_seqs": 1},
    "budget of 7": {"max_num_batched_tokens": 7},
    "few blocks": {"num_kv_blocks": 20},
    "blocks of 64": {"block_size": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "async": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "one thread": {"num_threads": 1},
}


def digests(outputs: list[RequestOutput]) -> list[str]:
    """Return a hash of each request's log-probabilities, of its prompt and of its answers, bit for bit."""
    kept = ([x.prompt_logprobs, *(y.logprobs for y in x.outputs)] for x in outputs)
    return [sha256(repr(of_one).encode()).hexdigest() for of_one in kept]


def answer(
    model: str,
    prompts: list[list[int]],
    params: list[SamplingParams],
    *,
    num_threads: int | None = None,
    **settings: Any,
) -> Iterator[list[str]]:
    """Yield the digests of the requests with an engine's cold cache, then with its warm cache."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        with LLM(model, **COMMON | settings) as llm:
            for _ in range(2):
                yield digests(llm.generate(prompts, params, use_tqdm=False))
    finally:
        torch.set_num_threads(before)


def main(model: str, dtype: str) -> None:
    """Print for each variation how many of 16 requests have other log-probabilities, cold and warm."""
    prompts = [[(7 * i + j * j) % 90 + 5 for j in range(8 * i + 1)] for i in range(16)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=16, logprobs=2) for i in range(16)]
    for is_exact in (False, True):
        print(f"with batch_invariant={is_exact}")
        expected: list[str] = []
        for name, settings in VARIATIONS.items():
            settings = settings | {"dtype": dtype, "batch_invariant": is_exact}
            try:
                answers = list(answer(model, prompts, params, **settings))
            except ValueError as error:  # a model with states supports no drafts
                print(f"{name}: {error}")
                continue
            expected = expected or answers[0]
            for cache, given in zip(("cold", "warm"), answers, strict=True):
                differing = sum(a != b for a, b in zip(given, expected, strict=True))
                print(f"{name}, {cache}: {differing} of 16 differ")
