"""Async scheduling: a step is launched before the previous one's tokens are known, and users see the same."""

import random

import pytest

from nanoengine import LLM, SamplingParams
from tests.helpers import VARIED_SETTINGS, chain_checkpoint, checkpoint, greedy, random_params, random_prompts
from tests.laws import check_laws


def seen(llm, prompts, params, **more):
    """Everything that a user sees of the answers."""
    return [
        [
            (c.text, c.token_ids, c.finish_reason, c.stop_reason, c.cumulative_logprob, c.logprobs)
            for c in output.outputs
        ]
        for output in llm.generate(prompts, params, use_tqdm=False, **more)
    ]


@pytest.mark.parametrize("settings", VARIED_SETTINGS.values(), ids=VARIED_SETTINGS)
def test_answers_are_the_same_as_step_by_step(settings, babbler):
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(30)]
    params = [random_params(rng) for _ in prompts]
    for i in range(0, 30, 7):  # some whose next token depends on those before
        params[i] = SamplingParams(
            temperature=0.8, seed=i, repetition_penalty=1.3, min_tokens=4, max_tokens=12
        )
    more = {"priority": [i % 3 for i in range(30)]} if "scheduling_policy" in settings else {}
    answers, preemptions = [], []
    for async_scheduling in (False, True):
        with LLM(babbler, async_scheduling=async_scheduling, **settings) as llm:
            answers.append([seen(llm, prompts, params, **more) for _ in range(2)])
            preemptions.append(llm.metrics()["num_preemptions"])
            assert llm.metrics()["num_free_blocks"] == settings["num_kv_blocks"]
            check_laws(llm.scheduler)
    assert answers[0] == answers[1]
    assert (min(preemptions) > 0) == (settings["num_kv_blocks"] in (24, 30, 90))


def recorded(llm):
    """The order in which steps are launched and collected from here on."""
    runner, events = llm.llm_engine.runner, []
    launch, collect = runner.launch, runner.collect

    def launch_and_note(batch, before=None):
        launched = launch(batch, before)
        events.append(("launch", id(launched.tokens)))
        kept.append(launched)  # so that no id is used twice
        return launched

    def collect_and_note(launched):
        events.append(("collect", id(launched.tokens)))
        return collect(launched)

    kept: list = []
    runner.launch, runner.collect = launch_and_note, collect_and_note
    return events


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_read(babbler):
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    with LLM(babbler, num_kv_blocks=20, async_scheduling=True) as llm:
        events = recorded(llm)
        llm.generate([[1], [2]], params, use_tqdm=False)
    kinds = [kind for kind, _ in events]
    assert kinds == ["launch", *["launch", "collect"] * 4, "collect"]  # five tokens: not one step too many
    launched, collected = ([i for kind, i in events if kind == k] for k in ("launch", "collect"))
    assert launched == collected


def test_a_step_with_penalties_waits_for_the_tokens_of_the_previous_step(babbler):
    penalized = SamplingParams(max_tokens=4, ignore_eos=True, frequency_penalty=0.5)
    with LLM(babbler, num_kv_blocks=20, async_scheduling=True) as llm:
        events = recorded(llm)
        llm.generate([[1]], penalized, use_tqdm=False)
    assert [kind for kind, _ in events] == ["launch", "collect"] * 4


def test_a_sequence_that_stops_is_computed_once_more_without_effect(tmp_path):
    with LLM(chain_checkpoint(tmp_path, "abcdef"), num_kv_blocks=9, async_scheduling=True) as llm:
        events = recorded(llm)
        params = SamplingParams(temperature=0, max_tokens=50, stop="cd")
        (output,) = llm.generate("a", params, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("b", "stop")
        assert [kind for kind, _ in events].count("launch") == 4  # b, c, d, and one that is discarded
        assert llm.metrics()["generation_tokens"] == 3
        again = llm.generate(["a", "b"], params, use_tqdm=False)
        assert [out.outputs[0].text for out in again] == ["b", ""]
        assert llm.metrics()["num_free_blocks"] == 9


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
        outputs = {}
        while llm.has_unfinished_requests():
            outputs |= {o.request_id: o.outputs[0].token_ids for o in llm.step()}
        assert outputs == {"a": greedy(reference, [6], 9), "b": greedy(reference, [4, 5], 9)}
        assert llm.metrics()["num_free_blocks"] == 30


def test_async_scheduling_with_graphs_and_flash_attention_equals_transformers(in_float32, tmp_path_factory):
    path, reference = checkpoint("qwen3", tmp_path_factory)
    prompts = random_prompts([3, 255, 256, 1, 300, 20])
    settings = {"num_kv_blocks": 8, "block_size": 256, "max_num_seqs": 5, "max_num_batched_tokens": 100}
    params = [SamplingParams(temperature=0, max_tokens=5 + i) for i in range(6)]
    with LLM(path, attn_backend="flash", async_scheduling=True, **settings) as llm:
        answers = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    assert answers == [greedy(reference, p, 5 + i) for i, p in enumerate(prompts)]
    assert in_float32["replay"] > 0
