"""Speculative decoding: draft tokens change the speed, never what users see."""

import functools
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from benchmarks.features import compare_drafts
from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.extensions.speculative_decoding import DraftingScheduler, Lookup, NgramProposer, is_draft
from nanoengine.metrics import Counter as MetricCounter
from nanoengine.metrics import Vector
from nanoengine.speculative_config import SpeculativeConfig
from tests import helpers
from tests.helpers import DEMO, ask, chain_checkpoint, make_sequence, run_step
from tests.laws import check_laws
from tests.test_async_scheduling import seen

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

drafting_scheduler = functools.partial(helpers.make_scheduler, scheduler=DraftingScheduler)


class Oracle:
    """Proposes some of each sequence's future tokens, by its seq_id, with mistakes."""

    def __init__(self, answers: dict[int, list[int]], vocab_size: int, error_rate: float) -> None:
        self.answers, self.vocab_size, self.error_rate = answers, vocab_size, error_rate
        self.rng = random.Random(0)

    def __call__(self, seq, num_tokens):
        said = self.answers[seq.seq_id][seq.num_output_tokens :]
        said += [0] * 9  # it does not know where the end is
        return [
            self.rng.randrange(self.vocab_size) if self.rng.random() < self.error_rate else token
            for token in said[: self.rng.randint(0, min(num_tokens, 6))]
        ]


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return sampled and greedy requests, with stops, n > 1 and logprobs. Every third edits its logits."""
    rng = random.Random(2)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(30)]
    params = [helpers.random_params(rng) for _ in prompts]
    pasts: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "min_tokens": 4, "max_tokens": 12},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logprobs": 1, "max_tokens": 20},
        {"bad_words": ["é", "a", "e"], "min_tokens": 20, "max_tokens": 30, "stop_token_ids": [*range(60)]},
        {"allowed_token_ids": [65, 66, 67], "logit_bias": {65: 1.0}, "top_k": 2, "max_tokens": 20},
    ]
    for i in range(0, 30, 3):
        params[i] = SamplingParams(temperature=0.8, seed=i, **pasts[i // 3 % 4])
    return prompts, params


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("name", ["with preemption", *helpers.slow("roomy", "in chunks")])
def test_answers_are_the_same_as_without_draft_tokens(name, babbler):
    (prompts, params), settings = mixed_requests(), helpers.VARIED_SETTINGS[name]
    with LLM(babbler, **settings) as llm:
        expected = [seen(llm, prompts, params) for _ in range(2)]
        num_steps, num_tokens = llm.metrics()["num_steps"], llm.metrics()["generation_tokens"]
    # The token ids of each sample, by the seq_id it has in a new engine.
    answers_of = dict(enumerate(sample[1] for output in expected[0] + expected[1] for sample in output))
    for error_rate in (0.0, 0.3) if name == "roomy" else (0.1,):
        with LLM(babbler, speculative_config=NGRAM, **settings) as llm:
            llm.scheduler.propose = Oracle(answers_of, 260, error_rate)
            answers = [seen(llm, prompts, params) for _ in range(2)]
            assert answers == expected
            metrics = llm.metrics()
            assert metrics["num_free_blocks"] == settings["num_kv_blocks"]
            assert metrics["generation_tokens"] == num_tokens
            assert 0 < metrics["spec_decode_num_accepted_tokens"] <= metrics["spec_decode_num_draft_tokens"]
            if name == "roomy":
                assert metrics["num_steps"] < num_steps * (0.5 if error_rate == 0 else 0.9)
            else:
                assert metrics["num_preemptions"] > 0
            check_laws(llm.scheduler)


def test_draft_tokens_run_in_the_graphs_of_decodes(in_float32, tmp_path_factory):
    path, reference = helpers.checkpoint("qwen3", tmp_path_factory)
    prompts = [*helpers.random_prompts([3, 255, 30]), [5, 6, 7, 8] * 6]
    settings = {"num_kv_blocks": 8, "block_size": 256, "max_num_seqs": 4, "max_num_batched_tokens": 100}
    with LLM(path, attn_backend="flash", speculative_config=NGRAM, **settings) as llm:
        replays = in_float32["replay"]
        helpers.check_answers(llm, reference, prompts, 40)
        metrics = llm.metrics()
        assert llm.llm_engine.runner.forward.decodes.sizes[-1] == 4 * 5  # its token and drafts for each
    assert metrics["spec_decode_num_accepted_tokens"] > 20
    assert in_float32["replay"] - replays > metrics["num_steps"] / 2


# ---- Bursts: several tokens in a step ------------------------------------------------------------


def test_a_sequence_ends_within_a_burst(tmp_path):
    path = chain_checkpoint(tmp_path, "abcdefgh")
    ends = [
        ({"stop": "de"}, "bc", "stop", "de"),
        ({"stop": "de", "include_stop_str_in_output": True}, "bcde", "stop", "de"),
        ({"stop_token_ids": [ord("f")]}, "bcde", "stop", ord("f")),
        ({"max_tokens": 5}, "bcdef", "length", None),
        ({"max_tokens": 1}, "b", "length", None),
        ({"stop": "de", "min_tokens": 6}, "bcdefghabcd"[:10], "stop", "de"),
    ]
    knowing = Oracle({seq_id: [*map(ord, "bcdefgha" * 3)] for seq_id in range(9)}, 257, 0.0)
    with LLM(path, num_kv_blocks=50, speculative_config=NGRAM) as llm:
        knowing.rng.randint = lambda low, high: high  # as many as there may be
        llm.scheduler.propose = knowing
        params = [SamplingParams(temperature=0, **{"max_tokens": 40, **more}) for more, *_ in ends]
        outputs = llm.generate(["a"] * len(ends), params, use_tqdm=False)
        found = [(o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]
        assert found == [tuple(end[1:]) for end in ends]
        metrics = llm.metrics()
        assert metrics["generation_tokens"] == sum(len(out.outputs[0].token_ids) for out in outputs)
        assert metrics["num_steps"] == 2  # in bursts of 7
        for output in outputs:
            assert output.metrics.first_token_time <= output.metrics.finished_time


def test_a_stream_contains_every_token_of_a_burst_once(tmp_path):
    path = chain_checkpoint(tmp_path, "abcdefgh")
    with LLM(path, num_kv_blocks=50, speculative_config=NGRAM) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, logprobs=0)
        parts = [out.outputs[0] for out in llm.stream("abcdefghab", params)]
    assert "".join(part.text for part in parts) == ("cdefghab" * 4)[:30]
    tokens = [token for part in parts for token in part.token_ids]
    assert tokens == [*map(ord, ("cdefghab" * 4)[:30])]
    assert [list(entry) for part in parts for entry in part.logprobs] == [[token] for token in tokens]
    assert max(len(part.token_ids) for part in parts) == 5


# ---- Budget and blocks ------------------------------------------------------------------------------


def nines(seq, num_tokens):
    """Propose as many drafts as allowed."""
    return [9] * num_tokens


def counts(batch) -> Counter:
    """Return the number of chunks per sequence."""
    return Counter(chunk.seq.seq_id for chunk in batch.chunks)


def test_drafts_use_only_the_budget_that_other_sequences_leave():
    scheduler = drafting_scheduler(num_blocks=50, max_num_batched_tokens=8, propose=nines)
    for i in range(3):
        scheduler.add(make_sequence(i, [i]))
    prepared = []
    scheduler.prepare = lambda chunks, budget: prepared.append((len(chunks), budget)) or True
    assert counts(run_step(scheduler)) == {0: 6, 1: 1, 2: 1}
    assert prepared == [(3, 5)]
    scheduler.add(make_sequence(3, [3] * 4))
    batch = run_step(scheduler)
    assert [(c.seq.seq_id, c.start, c.end) for c in batch.chunks if not is_draft(c)][-1] == (3, 0, 4)
    assert counts(batch) == {0: 2, 1: 1, 2: 1, 3: 1}
    assert batch.num_tokens == 8


def test_no_sequence_is_preempted_for_a_draft():
    scheduler = drafting_scheduler(num_blocks=4, block_size=4, propose=nines)
    scheduler.add(make_sequence(0, [1] * 3, max_tokens=8))
    scheduler.add(make_sequence(1, [2] * 8, max_tokens=8))
    run_step(scheduler)  # the prompts: one block and two, so one is free
    batch = run_step(scheduler)
    assert counts(batch) == {0: 1, 1: 4}  # the second's token takes the last block, which has room for three
    assert scheduler.num_preemptions == 0
    assert [len(seq.block_table) for seq in scheduler.running] == [1, 3]


@pytest.mark.parametrize(
    ("limit", "expected"), [({}, 8), ({"max_drafting_seqs": 2}, 8), ({"max_drafting_seqs": 1}, 1)]
)
def test_there_are_no_drafts_while_too_many_sequences_run(limit, expected):
    scheduler = drafting_scheduler(num_blocks=9, block_size=4, propose=nines, **limit)
    for i in range(2):
        scheduler.add(make_sequence(i, [i] * 3, max_tokens=9))
    run_step(scheduler)
    assert counts(run_step(scheduler)) == {0: expected, 1: expected}


def test_tokens_from_bursts_are_found_by_the_prefix_cache(tmp_path):
    path = chain_checkpoint(tmp_path, "abcdefgh")
    hits = []
    for config in (None, NGRAM):
        with LLM(path, num_kv_blocks=50, block_size=4, speculative_config=config) as llm:
            cached = []
            for length in range(17, 25):
                llm.reset_prefix_cache()
                (output,) = ask(llm, "abcdefghab", max_tokens=length)
                again = [*output.prompt_token_ids, *output.outputs[0].token_ids, 1]
                (output,) = ask(llm, [again], max_tokens=1)
                cached.append(output.num_cached_tokens)
            hits.append(cached)
    assert hits[0] == hits[1] == [24, 24, 28, 28, 28, 28, 32, 32]


# ---- Settings and metrics ------------------------------------------------------------------------

TWO = {"num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 4}, "method"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"method": "eagle", "num_speculative_tokens": 4}, "must be \"ngram\", .* got 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({**NGRAM, "prompt_lookup_min": 4}, "at most prompt_lookup_max, got 4 and 3"),
        ({**NGRAM, "prompt_lookup": 4}, "did you mean 'prompt_lookup_"),
        ({**NGRAM, "max_num_seqs": 0}, "max_num_seqs"),
        (4, "speculative_config must be a dict"),
        ({**TWO, "method": "draft_model"}, "\"draft_model\" with a model, got 'draft_model'"),
        ({**TWO, "method": "ngram", "model": "demo"}, "must be \"draft_model\", got 'ngram'"),
        ({**TWO, "model": "demo", "max_num_seqs": 0}, "max_num_seqs must be"),
    ],
)
def test_an_error_about_speculative_config_names_the_field(config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        EngineConfig(model="x", speculative_config=config)


def test_the_lengths_looked_up_are_vllm_s_defaults():
    lengths = [
        SpeculativeConfig(method="ngram", num_speculative_tokens=1, **given).lookup_lengths
        for given in ({}, {"prompt_lookup_min": 2}, {"prompt_lookup_max": 3})
    ]
    assert lengths == [(5, 5), (2, 2), (3, 3)]


def test_async_scheduling_is_off_with_drafts_and_refused_if_asked(flash_doubles, qwen3, caplog):
    with pytest.raises(ValueError, match="speculative_config needs async_scheduling=False"):
        LLM(qwen3, async_scheduling=True, speculative_config=NGRAM)
    settings = {"num_kv_blocks": 8, "attn_backend": "flash", "dtype": "bfloat16", "max_num_seqs": 1}
    for config, num_in_flight in ((None, 1), (NGRAM, 0)):
        with LLM(qwen3, speculative_config=config, **settings) as llm:
            assert llm.llm_engine.core.max_in_flight == num_in_flight
        noted = "up to 4 draft tokens (ngram), no async scheduling" in caplog.messages[-1]
        assert noted == (config is not None)


def test_metrics_count_drafts_under_vllm_s_names(tmp_path):
    path = chain_checkpoint(tmp_path, "abcd")
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    with LLM(path, num_kv_blocks=9, speculative_config=config) as llm:
        # After the prompt one draft, then three, then the one that max_tokens leaves room for; all are right.
        ask(llm, "abcdab", max_tokens=9)
        metrics, named = llm.metrics(), {metric.name: metric for metric in llm.get_metrics()}
    expected = {"num_drafts": 3, "num_draft_tokens": 5, "num_accepted_tokens": 5}
    for name, number in expected.items():
        metric = named[f"vllm:spec_decode_{name}"]
        assert isinstance(metric, MetricCounter)
        assert metric.value == metrics[f"spec_decode_{name}"] == number
    assert metrics["spec_decode_mean_acceptance_length"] == 1 + 5 / 3
    assert metrics["num_steps"] == 4
    per_position = named["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(per_position, Vector)
    assert per_position.values == [3, 1, 1, 0]
    with LLM(path, num_kv_blocks=9) as llm:
        assert not any("spec_decode" in metric.name for metric in llm.get_metrics())


# ---- Prompt lookup -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xabcdefab", "cde"),
        ("ab1 ab2 ab3 ab", "3 a"),  # what came last
        ("1ab2 3ab4 1ab", "2 3"),  # the longest run, though it was earlier
        ("abab", "aba"),  # on and on
        ("aaa", "aaa"),
        ("abcdef", ""),
        ("xabcda", ""),  # one token is too few
        ("a", ""),
        ("", ""),
    ],
)
def test_drafts_follow_the_longest_ngram_where_it_was_seen_last(text, expected):
    lookup = Lookup(2, 3, 9)
    lookup.size = 9
    assert "".join(map(chr, lookup.propose([*map(ord, text)], 3))) == expected


class Watched(list):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_lookup_costs_the_same_for_any_length_of_text():
    rng = random.Random(0)
    lookup, reads = Lookup(2, 4, 4), []
    text = Watched(rng.randrange(3) for _ in range(20))
    for _ in range(1500):
        before = text.num_read
        lookup.propose(text, 4)
        lookup.resume_at = 0  # no pause
        reads.append(text.num_read - before)
        text.append(rng.randrange(3))
    assert max(reads[1:]) <= 30
    assert sum(reads[-500:]) <= 1.1 * sum(reads[500:1000])


def num_proposed(lookup: Lookup, text: list[int]) -> int:
    return len(lookup.propose(text, 100))


def test_drafts_grow_while_accepted_and_pause_while_rejected_but_not_after_a_failed_step():
    lookup, text = Lookup(1, 1, 8), [1, 2, 1]
    assert [num_proposed(lookup, text) for _ in range(3)] == [1, 1, 1]  # nothing followed
    assert (lookup.pause, lookup.size) == (1, 1)
    sizes = []
    for _ in range(4):
        sizes.append(num_proposed(lookup, text))
        text += [2, 1] * (sizes[-1] // 2 + 1)  # all right, and more
    assert sizes == [1, 3, 7, 8]
    assert num_proposed(lookup, text) == 8
    text += [2, 3, 1]  # one is right
    assert num_proposed(lookup, text) == 3
    text += [4, 1]  # none is
    assert num_proposed(lookup, text) == 1
    drafted_at = []
    for other in range(5, 1000):  # something else follows each time
        text += [other, 1]
        drafted_at += [other] if num_proposed(lookup, text) else []
    gaps = [after - before for before, after in itertools.pairwise(drafted_at)]
    assert gaps[:5] == [3, 5, 9, 17, 33]  # of two tokens each: that of the draft, and the pause
    assert set(gaps[5:]) == {33}  # no pause is longer than 64 tokens
    text += [text[-2], 1]
    lookup.resume_at = 0
    assert num_proposed(lookup, text) == 1
    text += [text[-2], 1]  # right again
    assert (num_proposed(lookup, text), lookup.pause) == (3, 1)


def test_each_sequence_has_its_own_lookup():
    config = SpeculativeConfig(**NGRAM)
    propose = NgramProposer(config)
    one, two = make_sequence(0, [1, 2, 1]), make_sequence(1, [1, 3, 1])
    assert [propose(one, 4), propose(two, 4), propose(one, 4)] == [[2], [3], [2]]
    assert propose(make_sequence(2, [1, 3]), 4) == []


# ---- The benchmark -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_gets_the_same_answers_with_and_without_drafts(capsys):
    settings = {"num_kv_blocks": 60, "enforce_eager": True}
    with LLM(DEMO, **settings) as off, LLM(DEMO, speculative_config=NGRAM, **settings) as on:
        result = compare_drafts(off, on, "passages", 1, 2)
        assert on.metrics()["num_steps"] < 0.8 * off.metrics()["num_steps"]
    assert result["answers_that_differ"] == 0
    assert result["drafted"] > result["accepted"] > 10
    assert len(result["output_tokens_per_s"]) == 2
    assert f"{result['gain']:6.2f}x" in capsys.readouterr().out
