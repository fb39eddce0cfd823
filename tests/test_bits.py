"""The same answer, to the last bit: what docs/guide/bits.md promises."""

import shutil

import pytest

from nanoengine import LLM, SamplingParams
from tests.backends.test_kernels import INSTRUCTION_SETS, flags
from tests.bits import FORMS, KINDS, find_difference
from tests.helpers import checkpoint, random_prompts

pytestmark = pytest.mark.usefixtures("exact_kernels")


CASES = [  # kind, form, schedules and number of requests; transformers' layers take longer
    *((kind, form, range(1), 10) for kind in KINDS[:2] for form in FORMS),
    *((kind, form, range(1), 5) for kind in KINDS[2:] for form in ("float32", "int8 cache")),
    *(
        pytest.param(kind, form, numbers, count, marks=pytest.mark.slow)
        for form in FORMS
        for kinds, numbers, count in ((KINDS[:2], range(100, 104), 40), (KINDS[2:], range(100, 102), 10))
        for kind in kinds
    ),
]


@pytest.mark.parametrize(("kind", "form", "schedules", "num_requests"), CASES)
def test_no_schedule_changes_a_bit_of_a_log_probability(kind, form, schedules, num_requests, tmp_path):
    assert find_difference(kind, form, schedules, tmp_path, num_requests) is None


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_no_schedule_changes_a_bit_with_another_instruction_set(name, form, tmp_path, monkeypatch):
    if INSTRUCTION_SETS[name] not in flags() or not shutil.which("g++"):
        pytest.skip(f"needs g++ and a processor with {INSTRUCTION_SETS[name]}")
    monkeypatch.setenv("CXX", f"g++ -DEXACT -march={name}")
    for kind in KINDS[:2]:
        assert find_difference(kind, form, range(1), tmp_path) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompt_logprobs_of_a_sampled_answer_are_those_of_its_generation(dtype, tmp_path_factory):
    path, _ = checkpoint("qwen3", tmp_path_factory)
    prompts = random_prompts([1, 40, 300])
    sampled = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)
    with LLM(path, dtype=dtype, pin_threads=False) as llm:
        answers = [x.outputs[0] for x in llm.generate(prompts, sampled, use_tqdm=False)]
        whole = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
        scored = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    for prompt, answer, output in zip(prompts, answers, scored, strict=True):
        assert output.prompt_logprobs[len(prompt) :] == answer.logprobs
