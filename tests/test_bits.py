"""The same answer, to the last bit: what docs/guide/bits.md promises."""

import shutil

import pytest
import torch

from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.device import Device
from tests.backends.test_kernels import INSTRUCTION_SETS, flags
from tests.bits import FORMS, KINDS, find_difference
from tests.helpers import checkpoint, random_prompts
from tests.model_table import small_config, small_model

CASES = [  # kind, form, schedules and number of requests; transformers' layers take longer
    *((kind, form, range(1), 6) for kind in KINDS[:2] for form in FORMS),
    *((kind, "float32", range(1), 3) for kind in KINDS[2:]),
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
    if INSTRUCTION_SETS[name] not in flags() or not shutil.which("g++"):
        pytest.skip(f"needs g++ and a processor with {INSTRUCTION_SETS[name]}")
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
