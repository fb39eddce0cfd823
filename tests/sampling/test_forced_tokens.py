"""`SamplingParams.forced_token_ids`: given tokens in place of samples, with the model's log-probabilities."""

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.sampling.drawing import draw_rows
from nanoengine.sampling.sampler import RowSettings, SamplingRow, sample_rows
from tests.helpers import DEMO, VARIED_SETTINGS, open_checkpoint, random_prompts

FORCED = [72, 101, 108, 109, 111] * 3
END, *_ = open_checkpoint(DEMO).eos_token_ids
PROMPTS = random_prompts([5, 21, 30, 3, 28, 26], vocab=256)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def ask(llm, prompts=PROMPTS, **fields):
    params = SamplingParams(**{"forced_token_ids": FORCED, "logprobs": 2, "max_tokens": 20} | fields)
    return [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, num_kv_blocks=200, block_size=8) as llm:
        yield llm


def test_forced_tokens_have_the_log_probabilities_of_the_same_tokens_in_a_prompt(llm):
    scored = [prompt + FORCED for prompt in PROMPTS]
    reports = llm.generate(scored, SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    for answer, report in zip(ask(llm, temperature=0.9, seed=1), reports, strict=True):
        assert answer.token_ids[: len(FORCED)] == FORCED
        entries = zip(answer.logprobs, report.prompt_logprobs[-len(FORCED) :], FORCED, strict=False)
        for entry, expected, token_id in entries:
            assert entry[token_id].logprob == pytest.approx(expected[token_id].logprob, abs=1e-3)


def test_after_the_last_one_the_samples_are_those_of_a_prompt_that_ends_with_them(llm):
    for given in {"temperature": 0}, {"temperature": 0.9, "seed": 3}:
        free = ask(llm, [prompt + FORCED for prompt in PROMPTS], forced_token_ids=None, max_tokens=5, **given)
        assert [one.token_ids for one in ask(llm, **given)] == [FORCED + one.token_ids for one in free]


ASKED = {"temperature": 0}, {"presence_penalty": 1.0, "seed": 1, "bad_words": ["a"]}


@pytest.fixture(scope="module")
def expected(llm):
    return [ask(llm, max_tokens=19, **given) for given in ASKED]


BRIEFLY = "with preemption", "drafts", "async"
RARELY = [pytest.param(name, marks=pytest.mark.slow) for name in VARIED_SETTINGS if name not in BRIEFLY]


@pytest.mark.parametrize("name", [*BRIEFLY, *RARELY])
def test_the_answers_depend_on_no_setting(name, expected):
    """Chunks, hits, preemptions, drafts (there are none) and steps in flight change nothing."""
    extra = {"drafts": {"speculative_config": NGRAM}, "async": {"async_scheduling": True}}
    settings = VARIED_SETTINGS["roomy"] | extra[name] if name in extra else VARIED_SETTINGS[name]
    with LLM(DEMO, **settings) as other:
        for given, answers in [*zip(ASKED, expected, strict=True)] * 2:
            for one, same in zip(ask(other, max_tokens=19, **given), answers, strict=True):
                assert one.token_ids == same.token_ids
                assert one.cumulative_logprob == pytest.approx(same.cumulative_logprob, abs=1e-3)
        metrics = other.metrics()
        assert metrics["num_preemptions"] > 0 or name != "with preemption"
        assert not metrics.get("spec_decode_num_draft_tokens")


def test_max_tokens_cuts_and_a_forced_end_token_ends(llm):
    cut, ended = ask(llm, PROMPTS[:1], max_tokens=3), ask(llm, PROMPTS[:1], forced_token_ids=[72, END, 72])
    assert (cut[0].token_ids, cut[0].finish_reason) == (FORCED[:3], "length")
    assert (ended[0].token_ids, ended[0].finish_reason) == ([72, END], "stop")
    (past,) = ask(llm, PROMPTS[:1], forced_token_ids=[72, END, 72], ignore_eos=True, max_tokens=3)
    assert past.token_ids == [72, END, 72]


@pytest.mark.parametrize(
    "ban",
    [
        {"allowed_token_ids": [65]},
        {"logit_bias": {72: -1e30}},
        {"structured_outputs": {"regex": "9+"}},
        {"bad_words": ["H", "He"]},
        {"min_tokens": 2, "stop_token_ids": FORCED[1:2]},
        {"logits_processors": [lambda ids, logits: logits.fill_(-torch.inf)]},
    ],
)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_forced_token_wins_over_a_ban_with_the_model_s_log_probability(ban, mode):
    """An answer that a grammar cannot continue fails after the last forced token, and not before."""
    with LLM(DEMO, num_kv_blocks=50, block_size=8, logprobs_mode=mode, generation_config="vllm") as llm:
        (expected,) = ask(llm, PROMPTS[:1], forced_token_ids=FORCED[:2], max_tokens=2)
        (answer,) = ask(llm, PROMPTS[:1], forced_token_ids=FORCED[:2], **{"max_tokens": 2} | ban)
    assert answer.token_ids == FORCED[:2]
    assert answer.finish_reason == ("stop" if "min_tokens" in ban else "length")
    for entry, same in zip(answer.logprobs, expected.logprobs, strict=True):
        assert entry.keys() == same.keys()
        assert all(entry[i].logprob == pytest.approx(same[i].logprob) for i in same)


def test_no_token_is_forced_onto_a_row_of_nan():
    logits = torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    rows = [SamplingRow(SamplingParams(forced_token_ids=[0]), 0, 1, [5], 1) for _ in logits]
    tokens, _ = sample_rows(logits, rows, RowSettings(rows), lambda table: table, draw=draw_rows)
    assert tokens.tolist() == [0, -1]
