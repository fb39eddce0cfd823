"""Draft models: drafts change the speed, never the tokens; and equal models agree about every draft."""

import json
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoengine import LLM, SamplingParams
from nanoengine.contrib import pace
from nanoengine.contrib.pace import FAR, Costs, Offer, Planner
from tests.extensions.test_speculate import mixed_requests
from tests.helpers import (
    TINY,
    VARIED_SETTINGS,
    byte_tokenizer,
    checkpoint,
    failing_calls,
    greedy,
    random_prompts,
)
from tests.laws import check_laws
from tests.model_table import small_config
from tests.test_async_scheduling import seen

pytestmark = pytest.mark.usefixtures("exact_kernels")  # rounding may not decide whether tokens are equal
WORDS = ("é", "日本", " the")
SLOW = pytest.mark.slow
# Settings and the number of requests
CASES = [("with preemption", 12), *(pytest.param(name, 30, marks=SLOW) for name in VARIED_SETTINGS)]


def talker(path: Path, noise: float = 0.0, vocab_size: int = 260, words: tuple[str, ...] = WORDS) -> Path:
    """A model of bytes that looks at its context; noise in its weights makes it another."""
    torch.manual_seed(5)
    config = transformers.Qwen3Config(**TINY | {"vocab_size": 260, "eos_token_id": 256}, head_dim=16)
    model = transformers.Qwen3ForCausalLM(config)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    model.save_pretrained(path)
    byte_tokenizer(words).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(talker(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Right about as often as wrong."""
    return str(talker(tmp_path_factory.mktemp("noisy"), noise=0.02))


@pytest.fixture(autouse=True)
def free(monkeypatch, request):
    """Real engines find that passes cost nothing, so drafts do not depend on this machine's speed."""
    monkeypatch.setattr(Costs, "measure", lambda *_: Costs([0, 1], [0.0, 0.0]))
    if "target" in request.fixturenames:
        monkeypatch.setattr(pace, "NUM_CHECKED", 0)


def with_drafts(path: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"model": path, "num_speculative_tokens": 4, **more}}


def counts(llm: LLM) -> tuple[int, int]:
    """Return how many drafts were computed, and how many of them were accepted."""
    scheduler: Any = llm.scheduler
    return scheduler.num_drafted.total(), scheduler.num_accepted.total()


def without_stops(params: list[SamplingParams]) -> list[SamplingParams]:
    """No stop strings: the drafts after one are dropped, right or not."""
    for one in params:
        one.stop, one.logprobs = None, None
    return [one.clone() for one in params]


# ---- Tokens, and agreement -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), CASES)
def test_answers_are_the_same_as_without_a_draft_model(name, count, target, noisy):
    prompts, params = (given[:count] for given in mixed_requests())
    settings = VARIED_SETTINGS[name]
    more = {"priority": [i % 3 for i in range(30)]} if name == "by priority" else {}
    with LLM(target, **settings) as llm:
        expected = [seen(llm, prompts, params, **more) for _ in range(2)]
    with LLM(target, **with_drafts(noisy), **settings) as llm:
        answers = [seen(llm, prompts, params, **more) for _ in range(2)]
        drafted, accepted = counts(llm)
        assert llm.metrics()["num_free_blocks"] == settings["num_kv_blocks"]
        check_laws(llm.scheduler)
    assert answers == expected
    assert 0.1 * drafted < accepted < 0.9 * drafted


@pytest.mark.parametrize(("name", "count"), CASES)
def test_every_draft_of_the_same_weights_is_accepted(name, count, target):
    """In chunks, after preemptions and prefix hits, too: the draft model then sees the same context."""
    prompts, params = (given[:count] for given in mixed_requests())
    shared = [prompts[0][:9] + prompt for prompt in prompts]
    more = {"priority": [i % 3 for i in range(30)]} if name == "by priority" else {}
    with LLM(target, **with_drafts(target), **VARIED_SETTINGS[name]) as llm:
        for _ in range(2):
            llm.generate(shared, without_stops(params), use_tqdm=False, **more)
        drafted, accepted = counts(llm)
        metrics = llm.metrics()
    assert accepted == drafted > 100
    assert (metrics["num_preemptions"] > 0) == (name in ("with preemption", "in chunks", "by priority"))
    assert (metrics["prefix_cache_hits"] > 0) == (name != "without cache")


def test_k_and_v_of_a_wrong_draft_are_not_used(target):
    """Each second draft is made wrong. The next first draft is right nevertheless, also some steps later."""
    settings: dict[str, Any] = {"num_kv_blocks": 200, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    with LLM(target, **settings, **with_drafts(target)) as llm:
        model = llm.llm_engine.draft_model
        collect = model.runner.collect

        def spoiled(launch):
            sampled, known = collect(launch), {s.view: s.num_known for s in model.shadows.values()}
            for i, chunk in enumerate(launch.batch.chunks):
                if chunk.end == known[chunk.seq] + 1:
                    sampled.token_ids[i] = (sampled.token_ids[i] + 1) % 256
            return sampled

        model.runner.collect = spoiled
        prompts, params = mixed_requests()
        llm.generate(prompts, without_stops(params), use_tqdm=False)
        drafted, accepted = llm.scheduler.num_drafted, llm.scheduler.num_accepted
    assert accepted[0] == drafted[0] > 100
    assert accepted[1] == 0 < drafted[2]


@SLOW
@pytest.mark.parametrize("name", ["gemma3", "mistral sliding"])
def test_windows_of_either_model_do_not_matter(name, tmp_path_factory):
    path, reference = checkpoint(name, tmp_path_factory)
    prompts = random_prompts([3, 40, 33])
    settings: dict[str, Any] = {"num_kv_blocks": 60, "block_size": 4, "max_num_batched_tokens": 9}
    with LLM(path, **with_drafts(str(path)), **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=60)
        answers = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        drafted, accepted = counts(llm)
    assert answers == [greedy(reference, prompt, 60) for prompt in prompts]
    assert accepted == drafted > 60


@pytest.mark.parametrize("vocab_size", [257, 300])
def test_a_vocabulary_may_be_padded_to_another_size(vocab_size, target, tmp_path):
    """A token that the draft model does not have spoils drafts, not answers."""
    padded = str(talker(tmp_path, vocab_size=vocab_size))
    prompts = [[1, 2, 3], [4, 259, 5]]
    params = SamplingParams(seed=1, max_tokens=40, logit_bias={259: 1.0}, ignore_eos=True)
    answers = []
    for more in ({}, with_drafts(padded)):
        with LLM(target, num_kv_blocks=30, **more) as llm:
            answers.append(seen(llm, prompts, params))
    assert counts(llm)[1] > 5
    assert answers[0] == answers[1]


def test_drafts_conform_to_the_grammar(target, noisy):
    grammar = {"json": {"type": "object", "properties": {"a": {"enum": ["xy", 17]}}, "required": ["a"]}}
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs=asked)
        for seed, asked in enumerate([grammar, {"regex": "[ab]{9,12}c+"}, {"choice": ["yes", "no"]}])
    ]
    prompts, answers = ["Say it"] * len(params), []
    for more in ({}, with_drafts(noisy), with_drafts(target)):
        with LLM(target, num_kv_blocks=60, **more) as llm:
            answers.append(seen(llm, prompts, params))
    assert answers[0] == answers[1] == answers[2]
    drafted, accepted = counts(llm)
    assert accepted == drafted > 10


# ---- Aborts and failures ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["draft", pytest.param("collect", marks=SLOW)])
def test_aborts_and_failed_steps_lose_nothing(where, target):
    """A pass of the draft model fails, or one of the target model; and others leave in between."""
    prompts = [prompt[:12] for prompt in random_prompts([12] * 6)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=50, ignore_eos=True)
    settings: dict[str, Any] = {"num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 3}
    with LLM(target, **settings) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(target, **with_drafts(target), **settings) as llm:
        engine = llm.llm_engine
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
            engine.add_request(f"aborted {i}", prompt[:5] + prompt, params)
        owner, name = engine.runner, where
        if where == "draft":
            owner, name = engine.draft_model.runner, "launch"
        answers, failures = {}, 0
        with failing_calls(owner, name, range(6, 1000, 9), at_end=True):
            for step in range(1000):
                if not engine.has_unfinished_requests():
                    break
                engine.abort_request([f"aborted {step // 4}"])
                try:
                    answers |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
                except RuntimeError:
                    failures += 1
                check_laws(engine.scheduler)
        drafted, accepted = counts(llm)
        assert engine.metrics()["num_free_blocks"] == 40
    assert [answers[str(i)] for i in range(6)] == expected
    assert failures >= 2
    assert accepted > 100
    if where == "draft":  # else drafts of a failed step were computed, and never compared
        assert accepted == drafted


# ---- What the draft model computes -----------------------------------------------------------------


def computed(llm: LLM) -> list[list[tuple[int, int]]]:
    """The chunks of each pass of the draft model, from now on."""
    runner, passes = llm.llm_engine.draft_model.runner, []
    launch = runner.launch

    def noting(batch):
        passes.append([(chunk.start, chunk.end) for chunk in batch.chunks])
        return launch(batch)

    runner.launch = noting
    return passes


def test_the_draft_model_computes_each_token_once(target):
    """Two tokens after a burst (the last draft and what followed it), and no block that is in the cache."""
    prompt = [*range(40, 50)]
    with LLM(target, num_kv_blocks=30, block_size=4, **with_drafts(target)) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        passes = computed(llm)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        # The first token comes with the prompt, then five a step, and the twelfth needs no draft.
        assert passes[:5] == [[(0, 11)], [(11, 12)], [(12, 13)], [(13, 14)], [(14, 15), (15, 16)]]
        passes.clear()
        again = [*prompt, *output.outputs[0].token_ids]
        llm.generate([again, again], params, use_tqdm=False)
        assert passes[0] == [(16, 23), (20, 23)]  # it lacked the next block; the second now hits it
        passes.clear()
        llm.reset_prefix_cache()
        llm.generate([again, [*again[:-1], 7]], params, use_tqdm=False)
        assert sorted(passes[0]) == [(0, 23), (20, 23)]  # the second uses what the same pass computes


def test_a_step_drafts_a_depth_for_all_sequences_in_one_pass(target):
    with LLM(target, num_kv_blocks=60, **with_drafts(target)) as llm:
        passes = computed(llm)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        llm.generate(random_prompts([5] * 8), params, use_tqdm=False)
    assert [len(chunks) for chunks in passes] == [8, 8, 8, 8]


def test_no_drafts_follow_the_end_of_a_sequence(target):
    with LLM(target, num_kv_blocks=60, **with_drafts(target)) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        said = output.outputs[0].token_ids
        before = counts(llm)[0]
        params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[said[3]])
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert counts(llm)[0] - before == said.index(said[3]) - 1  # the first comes without a draft
        before = counts(llm)[0]
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert counts(llm)[0] - before == 1


# ---- How many drafts are computed ------------------------------------------------------------------

FLAT, STEEP = Costs([0, 1, 64], [0.0, 1.0, 1.0]), Costs([0, 64], [0.0, 64.0])
CHEAP = Costs([0, 1, 64], [0.0, 0.05, 0.05])


@pytest.mark.parametrize(
    ("odds", "limits", "budget", "costs", "expected"),
    [
        ([0.9] * 8, [4] * 8, 99, (FLAT, CHEAP), [4] * 8),
        ([0.9] * 8, [4] * 8, 10, (FLAT, CHEAP), [2, 2, 1, 1, 1, 1, 1, 1]),
        ([0.9] * 8, [4] * 8, 99, (STEEP, CHEAP), [0] * 8),  # each row costs what a token saves
        ([0.9] * 8, [4] * 8, 99, (FLAT, FLAT), [0] * 8),  # a draft costs what it saves
        ([0.9], [4], 99, (STEEP, FLAT), [0]),  # one sequence is no exception
        ([0.9, 0.7, 0.3], [4] * 3, 99, (FLAT, CHEAP), [4, 2, 0]),  # each by its own odds
        ([0.9, 0.9, 0.9], [0, 1, 4], 99, (FLAT, CHEAP), [0, 1, 4]),
        ([], [], 99, (FLAT, CHEAP), []),
    ],
)
def test_as_many_drafts_are_computed_as_save_time(odds, limits, budget, costs, expected):
    planner = Planner(*costs)
    while planner.rests(len(odds), len(odds)):
        pass
    offers = [Offer(*pair) for pair in zip(odds, limits, strict=True)]
    assert planner.choose(offers, len(odds), budget) == expected


@pytest.mark.parametrize(("num_seqs", "expected"), [(1, 1), (2, 1), (3, 0), (16, 0)])
def test_drafts_that_save_little_are_left_out_in_batches(num_seqs, expected):
    """A draft costs 0.6 of a step and is right with 0.8: tokens take 0.89 of their time."""
    planner = Planner(FLAT, Costs([0, 1, 64], [0.0, 0.4, 0.4]))
    while planner.rests(num_seqs, num_seqs):
        pass
    assert planner.choose([Offer(0.8, 1)] * num_seqs, num_seqs, 99) == [expected] * num_seqs


@pytest.mark.parametrize(("num_behind", "num_left", "expected"), [(50, 400, 4), (50, 20, 0), (900, 9000, 0)])
def test_a_sequence_has_no_drafts_if_catching_up_takes_longer_than_they_save(num_behind, num_left, expected):
    planner = Planner(FLAT, Costs([0, FAR], [0.0, FAR * 0.1]))
    while planner.rests(2, 2):
        pass
    offers = [Offer(0.9, 4, num_behind, num_left), Offer(0.9, 4)]
    assert planner.choose(offers, 2, 99) == [expected, 4]


class Machine:
    """Serves sequences on a virtual clock. The host's work for a draft pass is in no estimate.

    A step without drafts that follows one with drafts takes `surcharge` seconds longer.
    """

    surcharge = 0.0

    def __init__(self, num_seqs: int, draft_seconds: float, odds: float) -> None:
        self.target = Costs([0, 1, FAR], [0.0, 2.0, 2.0 + 0.05 * FAR])
        self.draft = Costs([0, 1, FAR], [0.0, draft_seconds, 0.01 * FAR])
        self.num_seqs, self.odds, self.now, self.rng = num_seqs, odds, 0.0, random.Random(0)
        self.planner = Planner(self.target, self.draft, clock=lambda: self.now)
        self.drafted, self.num_drafted = False, 0  # whether the last step had drafts, and how many had
        self.num_behind, self.step_seconds = [200] * num_seqs, 0.5  # of the host, with and without drafts

    def speed(self, num_steps: int, host_seconds: float) -> float:
        """Run steps, and return how many times as fast they are as without drafts."""
        started, num, num_tokens = self.now, self.num_seqs, 0
        for step in range(num_steps):
            if step % 100 < num:  # a new one
                self.num_behind[step % num] = 100
            self.planner.begin()
            sizes, offers = [0] * num, [Offer(self.odds, 4, behind) for behind in self.num_behind]
            if not self.planner.rests(num, num):
                sizes = self.planner.choose(offers, num, 1000)
            drafting = [sum(size > depth for size in sizes) for depth in range(max(sizes))]
            self.now += self.step_seconds + self.target.of(num + sum(sizes))
            self.now += self.surcharge * (self.drafted and not any(sizes))
            self.drafted = any(sizes)
            self.num_drafted += self.drafted
            self.now += sum(host_seconds + self.draft.of(n) for n in drafting)
            pairs = [*zip(self.num_behind, sizes, strict=True)]
            self.now += sum(0.01 * behind for behind, n in pairs if n)
            self.num_behind = [0 if n else behind + 1 for behind, n in pairs]
            num_tokens += num
            for n in sizes:  # those that are right
                num_tokens += next(i for i in range(n + 1) if i == n or self.rng.random() > self.odds)
            self.planner.end()
        return num_tokens / num * (self.step_seconds + self.target.of(num)) / (self.now - started)


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize("host_seconds", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("odds", [0.1, 0.5, 0.8])
def test_drafts_never_cost_more_than_three_percent(num_seqs, host_seconds, odds):
    """Also where the host's work decides, which no measurement at startup contains."""
    assert Machine(num_seqs, 0.4, odds).speed(3000, host_seconds) > 0.97


@pytest.mark.parametrize("num_seqs", [4, 16])
def test_steps_right_after_drafts_do_not_make_drafts_look_cheap(num_seqs):
    machine = Machine(num_seqs, 0.4, 0.8)
    machine.surcharge = 1.0
    assert min(machine.speed(1000, 1.0) for _ in range(3)) > 0.97


def test_only_steps_in_a_row_without_drafts_are_measured():
    machine = Machine(1, 0.4, 0.8)
    machine.surcharge = 1.0
    machine.speed(1000, 0.1)
    (pace_of_one,) = machine.planner.paces.values()
    seconds = machine.target.of(1)
    assert pace_of_one.plain.value == pytest.approx((machine.step_seconds + seconds) / seconds, abs=0.01)


@pytest.mark.parametrize(("num_seqs", "gain"), [(1, 1.5), (4, 1.35)])
def test_drafts_save_what_they_can(num_seqs, gain):
    """The drafts of one sequence take a fifth of the target model's time, and four of five are right."""
    assert Machine(num_seqs, 0.4, 0.8).speed(1000, 0.1) > gain


def test_drafts_end_when_steps_without_them_become_cheap():
    """Such steps have to be measured while drafts pay, too."""
    machine = Machine(1, 0.4, 0.8)
    machine.step_seconds = 8.0
    assert machine.speed(300, 2.0) > 1.35
    machine.step_seconds = 0.0
    machine.speed(1000, 2.0)
    assert machine.speed(500, 2.0) > 0.97


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_drafts_are_tried_again_after_they_did_not_pay(num_seqs):
    """The machine was busy for a while, for example."""
    machine = Machine(num_seqs, 0.4, 0.8)
    machine.speed(500, 3.0)
    before = machine.num_drafted
    assert machine.speed(400, 3.0) > 0.97
    assert machine.num_drafted - before < 20  # trials
    machine.speed(1500, 0.1)
    assert machine.speed(500, 0.1) > 1.25


def test_a_model_that_is_never_right_drafts_less_and_less(target, tmp_path):
    wrong = str(talker(tmp_path, noise=1.0))
    with LLM(target, num_kv_blocks=60, **with_drafts(wrong)) as llm:
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert counts(llm)[0] < 25


# ---- Settings --------------------------------------------------------------------------------------


def test_the_draft_model_has_a_dtype_and_a_quantization_of_its_own(target, caplog):
    config = with_drafts(target, dtype="bfloat16", quantization="int4")
    with LLM(target, num_kv_blocks=20, **config) as llm:
        model = llm.llm_engine.draft_model.started
        weights = [weakref.ref(one.model) for one in (model.runner, llm.llm_engine.runner)]
        params = SamplingParams(temperature=0, max_tokens=20)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert (model.dtype, llm.llm_engine.started.dtype) == (torch.bfloat16, torch.float32)
        assert "PackedLinear" in {type(one).__name__ for one in model.runner.model.modules()}
        assert len(model.runner.caches[0].k) == len(llm.llm_engine.runner.caches[0].k) == 21
        assert f"4 draft tokens ({target})" in caplog.messages[-1]
    assert [one() for one in weights] == [None, None]  # although the engine still exists


def test_blocks_are_counted_with_the_k_and_v_of_both_models(target):
    sizes = {"kv_cache_bytes": 1 << 20, "block_size": 8}
    with LLM(target, **sizes) as alone, LLM(target, **with_drafts(target), **sizes) as llm:
        assert llm.metrics()["num_blocks"] == (alone.metrics()["num_blocks"] + 1) // 2 - 1


def test_another_vocabulary_is_refused_and_the_error_says_where_it_differs(target, tmp_path):
    other = str(talker(tmp_path, words=("é", "日本", " a")))
    message = "the id of 'Ġa' is 259 in the draft model, and None in the target model"
    with pytest.raises(ValueError, match=message):
        LLM(target, **with_drafts(other))


def test_models_with_recurrent_states_are_refused_on_either_side(tmp_path_factory):
    states, (other, _) = tmp_path_factory.mktemp("states"), checkpoint("qwen3", tmp_path_factory)
    config = small_config("lfm2").to_dict() | {"architectures": ["Lfm2ForCausalLM"]}
    (states / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"num_kv_blocks": 9, "load_format": "dummy"}
    with pytest.raises(ValueError, match="speculative_config does not support models with recurrent states"):
        LLM(states, **with_drafts(str(other)), **settings)
    with pytest.raises(ValueError, match=r"draft model .* has recurrent states"):
        LLM(other, **with_drafts(str(states)), **settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "draft_model"}, 'must be "ngram", or "draft_model" with a model, got \'draft_model\''),
        ({"method": "ngram", "model": "demo"}, "must be \"draft_model\", got 'ngram'"),
        ({"model": "demo", "quantization": "int3"}, "quantization must be one of"),
        ({"model": "demo", "dtype": "int8"}, "dtype must be"),
    ],
)
def test_an_error_names_the_setting(config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LLM("demo", num_kv_blocks=9, speculative_config={"num_speculative_tokens": 2, **config})
    with pytest.raises(ValueError, match="tensor_parallel_size=1"):
        LLM("demo", tensor_parallel_size=2, **with_drafts("demo"))
