"""The same answer, to the last bit, under random schedules: what docs/guide/bits.md promises."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bits
from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.device import Device
from tests.backends.test_kernels import INSTRUCTION_SETS, skip_without
from tests.helpers import checkpoint, hf_model, random_prompts
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
    expected = next(bits.answer(str(model), prompts, params, **common))
    for number in numbers:
        settings = schedule(random.Random(number), directory / f"store of {kind} in {form}", kind)
        for cache, given in zip(
            ("cold", "warm"), bits.answer(str(model), prompts, params, **common, **settings), strict=True
        ):
            differing = [i for i, (a, b) in enumerate(zip(expected, given, strict=True)) if a != b]
            if differing:
                return {"number": number, "cache": cache, "requests": differing, **settings}
    return None


CASES = [  # kind, form, schedules and number of requests; transformers' layers take longer
    *(("qwen3", form, range(1), 6) for form in FORMS),
    *((kind, "float32", range(1), 3) for kind in KINDS[1:]),
    *(pytest.param(kind, "int8 cache", range(1), 5, marks=pytest.mark.slow) for kind in KINDS[2:]),
    *(
        pytest.param(kind, form, range(number, number + 1), count, marks=pytest.mark.slow)
        for number, form in enumerate(FORMS, start=100)
        for kinds, count in ((KINDS[:2], 40), (KINDS[2:], 10))
        for kind in kinds
    ),
]


@pytest.mark.parametrize(("kind", "form", "schedules", "num_requests"), CASES)
def test_no_schedule_changes_a_bit_of_a_log_probability(kind, form, schedules, num_requests, tmp_path):
    assert find_difference(kind, form, schedules, tmp_path, num_requests) is None


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "int8", "int4", "int8 cache of bfloat16"])  # each type and cache
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_no_schedule_changes_a_bit_with_another_instruction_set(name, form, tmp_path, monkeypatch):
    skip_without(name)
    monkeypatch.setenv("CXX", f"g++ -march={name}")
    for kind in KINDS[:2]:
        assert find_difference(kind, form, range(1), tmp_path) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompt_logprobs_of_a_sampled_answer_are_those_of_its_generation(dtype, tmp_path_factory):
    path, _ = checkpoint("qwen3", tmp_path_factory)
    prompts = random_prompts([1, 40, 300])
    sampled = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)
    with LLM(path, dtype=dtype, pin_threads=False, batch_invariant=True) as llm:
        answers = [x.outputs[0] for x in llm.generate(prompts, sampled, use_tqdm=False)]
        whole = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
        scored = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    for prompt, answer, output in zip(prompts, answers, scored, strict=True):
        assert output.prompt_logprobs[len(prompt) :] == answer.logprobs


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enforce_eager": True}, "batch_invariant=True needs compiled kernels: enforce_eager"),
        ({"attn_backend": "torch"}, "batch_invariant=True needs compiled attention: attn_backend='torch'"),
        ({"tensor_parallel_size": 2}, "batch_invariant needs tensor_parallel_size=1"),
    ],
)
def test_what_would_break_the_promise_is_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        LLM("demo", batch_invariant=True, **settings)


def test_the_promise_is_refused_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ValueError, match=r"batch_invariant=True needs compiled kernels: \S*false .* failed"):
        LLM("demo", batch_invariant=True)


def test_the_promise_is_refused_on_a_gpu():
    with pytest.raises(ValueError, match="batch_invariant=True is supported on a CPU only, not on cuda"):
        Device(torch.device("cuda"), EngineConfig("demo", batch_invariant=True))


def test_the_promise_is_refused_for_products_outside_of_linear_layers(tmp_path):
    small_model(small_config("mamba")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="batch_invariant=True is not supported with MambaMixer layers"):
        LLM(str(tmp_path), batch_invariant=True, num_state_slots=4)


def test_exact_kernels_are_a_library_of_their_own():
    """Engines with and without the setting run in one process."""
    assert Kernels(exact=True).library._name != Kernels().library._name
