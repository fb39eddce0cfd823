"""Async scheduling: a step is launched before the previous one's tokens are known, and users see the same."""

import contextlib
import random

import pytest
import torch
import transformers

from nanoengine import LLM, SamplingParams
from tests.helpers import check_greedy, checkpoint, failing_calls, finish, random_prompts, slow, tokens_of


def seen(llm, prompts, params, **more):
    """Return everything that users see of the answers."""

    def of(c):
        return c.text, c.token_ids, c.finish_reason, c.stop_reason, c.cumulative_logprob, c.logprobs

    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    return [[of(one) for one in output.outputs] for output in outputs]


def recorded(llm):
    """Return a list that records the batches of launches and collects from here on."""
    runner, events = llm.llm_engine.runner, []
    launch, collect = runner.launch, runner.collect
    runner.launch = lambda batch, before=None: events.append(("launch", batch)) or launch(batch, before)
    runner.collect = lambda launched: events.append(("collect", launched.batch)) or collect(launched)
    return events


@pytest.mark.parametrize(
    ("fields", "overlaps"),
    [({}, True), ({"frequency_penalty": 0.5, "min_tokens": 2}, True), ({"bad_words": ["é"]}, False)],
)
def test_only_a_step_that_needs_tokens_on_the_host_waits_for_the_previous_step(fields, overlaps, babbler):
    params = SamplingParams(max_tokens=5, ignore_eos=True, **fields)
    with LLM(babbler, num_kv_blocks=20, async_scheduling=True) as llm:
        events = recorded(llm)
        llm.generate([[1], [2]], params, use_tqdm=False)
    pairs = ["launch", *["launch", "collect"] * 4, "collect"] if overlaps else ["launch", "collect"] * 5
    assert [kind for kind, _ in events] == pairs  # five tokens: not one step too many
    launched, collected = ([x for kind, x in events if kind == k] for k in ("launch", "collect"))
    assert launched == collected


class Penalize(transformers.LogitsProcessor):
    """Presence and frequency penalties for `generate`, which has none of its own."""

    def __init__(self, params, num_prompt_tokens):
        self.params, self.num_prompt_tokens = params, num_prompt_tokens

    def __call__(self, input_ids, scores):
        counts = input_ids[0, self.num_prompt_tokens :].bincount(minlength=scores.shape[1])
        return scores - self.params.presence_penalty * (counts > 0) - self.params.frequency_penalty * counts


ALL_PENALTIES = {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 1.1}
PENALTIES = [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"frequency_penalty": -0.4}]
PENALTIES += [ALL_PENALTIES, {}]


@pytest.fixture(scope="module")
def penalized(tmp_path_factory):
    """Return a checkpoint, prompts, parameters with penalties, and the tokens of transformers."""
    path, reference = checkpoint("qwen3", tmp_path_factory)
    prompts = random_prompts([1, 30, 7, 21, 2, 40, 13, 5, 9, 16], vocab=40)
    params = [SamplingParams(temperature=0, max_tokens=16, **PENALTIES[i % 5]) for i in range(10)]
    expected = []
    for prompt, one in zip(prompts, params, strict=True):
        ids, settings = torch.tensor([prompt]), {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        settings["attention_mask"], settings["logits_processor"] = ids >= 0, [Penalize(one, len(prompt))]
        out = reference.generate(ids, repetition_penalty=one.repetition_penalty, **settings)
        expected.append(out[0, len(prompt) :].tolist())
    return path, prompts, params, expected


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
ENGINES: dict[str, dict] = {
    "alone": {"max_num_seqs": 1},  # each sequence takes the place of the last one's counts
    "preempted": {"max_num_seqs": 3, "num_kv_blocks": 14},
    "in chunks": {"max_num_seqs": 9, "max_num_batched_tokens": 7},  # not all that run fit in a step
}
ENGINES |= {f"{name}, async": {**one, "async_scheduling": True} for name, one in ENGINES.items()}
ENGINES["drafts"] = {"speculative_config": NGRAM}
BY_DEFAULT = "alone, async", "preempted, async", "in chunks", "drafts"


@pytest.mark.parametrize("name", [*BY_DEFAULT, *slow(*(x for x in ENGINES if x not in BY_DEFAULT))])
def test_penalized_tokens_are_those_of_transformers(name, penalized, monkeypatch):
    settings, (path, prompts, params, expected) = ENGINES[name], penalized
    for module in ("sampling.sampler", "engine"):
        monkeypatch.setattr(f"nanoengine.{module}.MAX_ROWS", 4)  # a sequence's drafts fall into two parts
    monkeypatch.setattr("nanoengine.sampling.penalties.MAX_ENTRIES", 60)
    rng, answers = random.Random(1), {tuple(p): e for p, e in zip(prompts, expected, strict=True)}

    def guess(seq, num_tokens):
        following = answers[tuple(seq.token_ids[: seq.num_prompt_tokens])][seq.num_output_tokens :]
        return [token_id if rng.random() < 0.8 else 3 for token_id in following[:num_tokens]]

    with LLM(path, **{"num_kv_blocks": 99, "block_size": 8, **settings}) as llm:
        if "speculative_config" in settings:
            llm.scheduler.propose = guess
        for method in ("launch", "collect"):  # some steps fail, and are computed again
            with failing_calls(llm.llm_engine.runner, method, range(3, 4000, 41), at_end=method == "launch"):
                for i, prompt in enumerate(prompts):
                    llm.add_request(str(i), prompt, params[i])
                found = {}
                while llm.has_unfinished_requests():
                    with contextlib.suppress(RuntimeError):
                        found |= {out.request_id: out.outputs[0].token_ids for out in llm.step()}
            assert [found[str(i)] for i in range(len(prompts))] == expected
        assert (llm.metrics()["num_preemptions"] > 0) == (settings.get("num_kv_blocks") == 14)


def test_an_aborted_request_gets_nothing_from_the_step_in_flight(tmp_path_factory):
    path, reference = checkpoint("qwen3", tmp_path_factory)
    params = SamplingParams(temperature=0, max_tokens=9)
    with LLM(path, num_kv_blocks=30, block_size=8, async_scheduling=True) as llm:
        llm.add_request("a", [1, 2, 3], params)
        llm.add_request("b", [4, 5], params)
        assert llm.step() == []  # launched; its tokens come with the next
        llm.step()
        (aborted,) = llm.abort_request("a")
        assert len(aborted.outputs[0].token_ids) == 1
        llm.add_request("a", [6], params)  # the id is free at once
        outputs = finish(llm)
        check_greedy(reference, [[6], [4, 5]], 9, tokens_of([outputs["a"], outputs["b"]]))
        assert llm.metrics()["num_free_blocks"] == 30
