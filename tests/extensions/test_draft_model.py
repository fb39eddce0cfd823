"""Draft models: drafts change the speed, never the tokens; and equal models agree about every draft."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoengine import LLM, SamplingParams
from tests import helpers
from tests.extensions.test_speculative_decoding import mixed_requests
from tests.helpers import TINY, VARIED_SETTINGS, ask, check_answers, checkpoint, random_prompts, tokens_of
from tests.laws import check_laws
from tests.model_table import small_config
from tests.test_async_scheduling import seen

pytestmark = pytest.mark.usefixtures("exact_kernels")  # rounding may not decide whether tokens are equal
WORDS = ("é", "日本", " the")
SLOW = pytest.mark.slow
# Settings and the number of requests
CASES = [("with preemption", 8), *(pytest.param(name, 30, marks=SLOW) for name in VARIED_SETTINGS)]


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
    helpers.byte_tokenizer(words).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(talker(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Right about as often as wrong."""
    return str(talker(tmp_path_factory.mktemp("noisy"), noise=0.02))


def with_drafts(path: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"model": path, "num_speculative_tokens": 4, "max_num_seqs": 64, **more}}


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
def test_answers_are_the_same_and_every_draft_of_the_same_weights_is_accepted(name, count, target, noisy):
    """In chunks, after preemptions and prefix hits, too: the same weights then see the same context."""
    prompts, params = (given[:count] for given in mixed_requests())
    shared, settings = [prompts[0][:9] + prompt for prompt in prompts], VARIED_SETTINGS[name]
    more = {"priority": [i % 3 for i in range(30)]} if name == "by priority" else {}
    params = without_stops(params)
    with LLM(target, **settings) as llm:
        expected = [seen(llm, shared, params, **more) for _ in range(2)]
    for drafter in noisy, target:
        with LLM(target, **with_drafts(drafter), **settings) as llm:
            assert [seen(llm, shared, params, **more) for _ in range(2)] == expected
            drafted, accepted = counts(llm)
            metrics = llm.metrics()
            check_laws(llm.scheduler)
        assert accepted == drafted > 100 if drafter == target else 0.1 * drafted < accepted < 0.9 * drafted
        assert metrics["num_free_blocks"] == settings["num_kv_blocks"]
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
    settings: dict[str, Any] = {"num_kv_blocks": 60, "block_size": 4, "max_num_batched_tokens": 9}
    with LLM(path, **with_drafts(str(path)), **settings) as llm:
        check_answers(llm, reference, random_prompts([3, 40, 33]), 60)
        drafted, accepted = counts(llm)
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
        expected = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    with LLM(target, **with_drafts(target), **settings) as llm:
        engine = llm.llm_engine
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
            engine.add_request(f"aborted {i}", prompt[:5] + prompt, params)
        owner, name = engine.runner, where
        if where == "draft":
            owner, name = engine.draft_model.runner, "launch"
        answers, failures = {}, 0
        with helpers.failing_calls(owner, name, range(6, 1000, 9), at_end=True):
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
    runner, passes = llm.llm_engine.draft_model.runner, []  # type: ignore[union-attr]
    launch = runner.launch

    def noting(batch):
        passes.append([(chunk.start, chunk.end) for chunk in batch.chunks])
        return launch(batch)

    runner.launch = noting  # type: ignore[method-assign]
    return passes


def test_the_draft_model_computes_each_token_once_and_a_depth_of_all_sequences_in_one_pass(target):
    """Two tokens after a burst (the last draft and what followed it), and no block that is in the cache."""
    prompt = [*range(40, 50)]
    with LLM(target, num_kv_blocks=30, block_size=4, **with_drafts(target)) as llm:
        passes = computed(llm)
        (output,) = ask(llm, [prompt], max_tokens=12, ignore_eos=True)
        # The first token comes with the prompt, then five a step, and the twelfth needs no draft.
        assert passes[:5] == [[(0, 11)], [(11, 12)], [(12, 13)], [(13, 14)], [(14, 15), (15, 16)]]
        passes.clear()
        again = [*prompt, *output.outputs[0].token_ids]
        ask(llm, [again, again], max_tokens=12, ignore_eos=True)
        assert passes[0] == [(16, 23), (20, 23)]  # it lacked the next block; the second now hits it
        passes.clear()
        llm.reset_prefix_cache()
        ask(llm, [again, [*again[:-1], 7]], max_tokens=12, ignore_eos=True)
        assert sorted(passes[0]) == [(0, 23), (20, 23)]  # the second uses what the same pass computes
        passes.clear()
        ask(llm, random_prompts([5] * 8), max_tokens=6, ignore_eos=True)
        assert [len(chunks) for chunks in passes] == [8, 8, 8, 8]


def test_no_drafts_follow_the_end_of_a_sequence(target):
    with LLM(target, num_kv_blocks=60, **with_drafts(target)) as llm:
        (said,) = tokens_of(ask(llm, [[1, 2, 3]], max_tokens=40, ignore_eos=True))
        before = counts(llm)[0]
        ask(llm, [[1, 2, 3]], max_tokens=40, stop_token_ids=[said[3]])
        assert counts(llm)[0] - before == said.index(said[3]) - 1  # the first comes without a draft
        before = counts(llm)[0]
        ask(llm, [[1, 2, 3]], max_tokens=3)
        assert counts(llm)[0] - before == 1


# ---- How many sequences have drafts ----------------------------------------------------------------


def test_a_draft_model_drafts_while_one_sequence_runs_unless_the_config_says_more(target):
    for limit, expected in ((None, 1), (3, 3)):
        with LLM(target, num_kv_blocks=60, **with_drafts(target, max_num_seqs=limit)) as llm:
            assert llm.scheduler.max_drafting_seqs == expected


# ---- Settings --------------------------------------------------------------------------------------


def test_the_draft_model_has_a_dtype_and_a_quantization_of_its_own(target, caplog):
    config = with_drafts(target, dtype="bfloat16", quantization="int4")
    with LLM(target, num_kv_blocks=20, **config) as llm:
        model = llm.llm_engine.draft_model.started
        weights = [weakref.ref(one.model) for one in (model.runner, llm.llm_engine.runner)]
        ask(llm, [[1, 2, 3]], max_tokens=20)
        assert (model.loaded.dtype, llm.llm_engine.started.loaded.dtype) == (torch.bfloat16, torch.float32)
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
    ("config", "more", "message"),
    [
        ({"quantization": "int3"}, {"num_kv_blocks": 9}, "quantization must be one of"),
        ({"dtype": "int8"}, {"num_kv_blocks": 9}, "dtype must be"),
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size=1"),
    ],
)
def test_an_error_names_the_setting(config, more, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LLM("demo", **more, **with_drafts("demo", **config))
