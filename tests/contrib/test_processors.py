"""Custom logits processors: functions of a request, and vLLM V1's batch-level classes."""

import random
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoengine import LLM, SamplingParams
from nanoengine.contrib.processors import (
    AdapterLogitsProcessor,
    Batch,
    BatchUpdate,
    LogitsProcessor,
    Member,
    MoveDirectionality,
    process_dict_updates,
)
from nanoengine.sampling.sampler import SamplingRow
from tests.helpers import DEMO

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def token_ids(llm, params, prompts="Hello"):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [one.token_ids for output in outputs for one in output.outputs]


def only(token_id):
    def processor(output_ids, logits):
        logits[:token_id] = -torch.inf
        logits[token_id + 1 :] = -torch.inf
        return logits

    return processor


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, num_kv_blocks=100) as llm:
        yield llm


# ---- Functions of a request ----


def test_a_function_gets_the_output_and_chooses_the_token(llm):
    seen = []

    def count_up(output_ids, logits):
        seen.append(list(output_ids))
        assert logits.shape == (llm.llm_engine.checkpoint.vocab_size,)
        assert logits.dtype == torch.float32
        return torch.where(torch.arange(len(logits)) == 40 + len(output_ids), 0.0, -torch.inf)

    assert token_ids(llm, SamplingParams(logits_processors=[count_up], max_tokens=4)) == [[40, 41, 42, 43]]
    assert seen == [[], [40], [40, 41], [40, 41, 42]]


def test_a_function_gets_float32_from_a_model_in_bfloat16():
    seen = []

    def look(output_ids, logits):
        seen.append((logits.dtype, logits.clone()))
        return logits

    fields = {"temperature": 0, "max_tokens": 2, "structured_outputs": {"regex": "a*"}}
    with LLM(DEMO, num_kv_blocks=20, dtype="bfloat16") as llm:
        token_ids(llm, SamplingParams(**fields, logits_processors=[look]))
    assert [dtype for dtype, _ in seen] == [torch.float32] * 2
    assert all(logits.isfinite().all() for _, logits in seen), "the grammar is applied after it"


def test_a_function_with_three_parameters_gets_the_prompt_first(llm):
    def echo(prompt_ids, output_ids, logits):
        return only(prompt_ids[len(output_ids) % len(prompt_ids)])(output_ids, logits)

    (said,) = token_ids(llm, SamplingParams(logits_processors=[echo], max_tokens=7), [[50, 60, 70]])
    assert said == [50, 60, 70, 50, 60, 70, 50]


def test_functions_are_called_in_order_and_before_the_grammar(llm):
    eos = llm.llm_engine.checkpoint.eos_token_ids[0]
    b = llm.get_tokenizer().convert_tokens_to_ids("b")
    wishes = [only(eos), lambda ids, logits: logits.clamp(min=-5.0) + 9 * (torch.arange(len(logits)) == b)]
    grammar = {"regex": "(aa|bb){2}"}
    params = SamplingParams(temperature=0, logits_processors=wishes, structured_outputs=grammar)
    (ids,) = token_ids(llm, params)
    assert ids[:-1] == [b, b, b, b]
    assert ids[-1] in llm.llm_engine.checkpoint.eos_token_ids


def test_other_requests_of_the_batch_are_not_affected(llm):
    plain, greedy = token_ids(llm, SamplingParams(**GREEDY))[0], SamplingParams(**GREEDY)
    edited = SamplingParams(**GREEDY, logits_processors=[only(60)])
    assert token_ids(llm, [greedy, edited, greedy], ["Hello"] * 3) == [plain, [60] * 12, plain]


def fails(output_ids, logits):
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (fails, "RuntimeError: planted"),
        (lambda ids, x: None, "must return a tensor of real numbers, got NoneType"),
        (lambda ids, x: x > 0, "must return a tensor of real numbers, got torch.bool"),
        (lambda ids, x: x[:1], r"must return logits of shape \(\d+,\), got \(1,\)"),
        (lambda ids, x: x * torch.nan, "the logits are NaN"),
    ],
    ids=["raises", "None", "bool", "shape", "NaN"],
)
def test_a_failing_function_ends_its_own_request_with_the_reason(wrong, reason, llm):
    free, broken = SamplingParams(**GREEDY), SamplingParams(**GREEDY, logits_processors=[wrong])
    outputs = llm.generate(["Hello"] * 3, [free, broken, free], use_tqdm=False)
    assert [out.outputs[0].finish_reason for out in outputs] == ["length", "error", "length"]
    assert re.match(f"no token could be sampled: .*{reason}", outputs[1].outputs[0].stop_reason)


def test_all_requests_of_a_step_may_fail(llm):
    def fails_late(output_ids, logits):
        if len(output_ids) == 5:
            raise RuntimeError("planted")
        return logits

    plain = SamplingParams(temperature=0, max_tokens=2)
    failing = SamplingParams(n=2, logits_processors=[fails_late])
    outputs = llm.generate(["Hello"] * 3, [plain, failing, failing], use_tqdm=False)
    reasons = [[one.finish_reason for one in output.outputs] for output in outputs]
    assert reasons == [["length"], ["error"] * 2, ["error"] * 2]
    (reason,) = {one.stop_reason for output in outputs[1:] for one in output.outputs}
    assert reason == "no token could be sampled: RuntimeError: planted"


@pytest.mark.parametrize("wrong", [5, [5], [lambda x: x], ["a.b:c"], [lambda a, b, c, d: d]], ids=range(5))
def test_anything_but_functions_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="logits_processors must"):
        SamplingParams(logits_processors=wrong)


@pytest.mark.parametrize(
    "settings",
    [{"async_scheduling": True}, {"num_kv_blocks": 6, "block_size": 4}, {"speculative_config": NGRAM}],
)
def test_functions_work_with_async_scheduling_preemption_and_drafts(settings):
    def alternate(output_ids, logits):
        return only(50 + len(output_ids) % 3)(output_ids, logits)

    params = SamplingParams(logits_processors=[alternate], max_tokens=12)
    with LLM(DEMO, **{"num_kv_blocks": 100} | settings) as llm:
        assert token_ids(llm, params, ["Hello", "a", "abc"]) == [[50, 51, 52] * 4] * 3
        metrics = llm.metrics()
    assert (metrics["num_preemptions"] > 0) == ("block_size" in settings)
    assert (metrics["spec_decode_num_accepted_tokens"] > 0) == ("speculative_config" in settings)


# ---- Processors of an engine ----


class Wish(LogitsProcessor):
    """Forces the token that a request's extra_args name, as in vLLM's example."""

    @classmethod
    def validate_params(cls, sampling_params):
        wish = (sampling_params.extra_args or {}).get("wish")
        if wish is not None and not isinstance(wish, int):
            raise ValueError(f"extra_args: wish must be a token id, got {wish!r}")

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config.max_num_seqs > 0
        assert (device.type, is_pin_memory) == ("cpu", False)
        self.wishes = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        wish_of = lambda params, *_: (params.extra_args or {}).get("wish")  # noqa: E731
        process_dict_updates(self.wishes, batch_update, wish_of)

    def apply(self, logits):
        for index, wish in self.wishes.items():
            logits[index] = only(wish)([], logits[index])
        return logits


def banish(output_ids, logits):
    logits[30:40] = -torch.inf
    return logits


@pytest.mark.parametrize(
    ("given", "is_async"),
    [([Wish], True), (["tests.contrib.test_processors:Wish"], False), ([banish, Wish], False)],
)
def test_an_engine_s_processor_has_each_request_at_its_index(given, is_async):
    settings = {"logits_processors": given, "async_scheduling": is_async}
    with LLM(DEMO, num_kv_blocks=100, max_num_seqs=3, **settings) as llm:
        wishes = [None, 50, 60, None, 70, 80, 90]
        params = [
            SamplingParams(**{**GREEDY, "max_tokens": 3 + 2 * i}, extra_args={"wish": wish} if wish else None)
            for i, wish in enumerate(wishes)
        ]
        found = token_ids(llm, params, ["Hello"] * 7)
        for ids, wish, i in zip(found, wishes, range(7), strict=True):
            assert len(ids) == 3 + 2 * i
            assert wish is None or ids == [wish] * len(ids)
        with pytest.raises(ValueError, match="wish must be a token id"):
            token_ids(llm, SamplingParams(extra_args={"wish": "x"}))


class Quiet(LogitsProcessor):
    """Does nothing, until a test lets it."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits


def test_an_argmax_invariant_processor_gets_logits_after_temperature(llm, monkeypatch):
    """It keeps tokens with at least half of the highest probability, as min_p does."""

    def apply(self, logits):
        probs = logits.softmax(-1)
        return logits.masked_fill(probs < 0.5 * probs.amax(-1, keepdim=True), -torch.inf)

    monkeypatch.setattr(Quiet, "apply", apply)
    params = [SamplingParams(temperature=3.0, seed=i, max_tokens=9, min_p=0.5) for i in range(8)]
    plain = [SamplingParams(temperature=3.0, seed=i, max_tokens=9) for i in range(8)]
    with LLM(DEMO, num_kv_blocks=100, logits_processors=[Quiet]) as other:
        assert token_ids(other, plain, ["Hello"] * 8) == token_ids(llm, params, ["Hello"] * 8)
        assert token_ids(other, SamplingParams(**GREEDY)) == token_ids(llm, SamplingParams(**GREEDY))


def test_an_engine_s_processor_must_return_real_numbers_of_the_right_shape(monkeypatch):
    monkeypatch.setattr(Quiet, "is_argmax_invariant", lambda self: False)
    with LLM(DEMO, num_kv_blocks=100, logits_processors=[Quiet]) as llm:

        def outcome(make):
            monkeypatch.setattr(Quiet, "apply", lambda self, logits: make(logits))
            (out,) = llm.generate("Hello", SamplingParams(**GREEDY), use_tqdm=False)[0].outputs
            return out.stop_reason if out.finish_reason == "error" else out.token_ids

        whole = outcome(lambda logits: (logits * 8).long())
        assert whole == outcome(lambda logits: (logits * 8).long().double())
        assert len(whole) == 12
        for make, found in (
            (lambda logits: logits > 0, "torch.bool"),
            (lambda logits: None, "NoneType"),
            (lambda logits: logits[0], r"\(\d+,\)"),
        ):
            assert re.search(f"the logits processor Quiet must return .* got {found}", outcome(make))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logits_processors": Wish}, "must be a list"),
        ({"logits_processors": [5]}, "must take"),
        ({"logits_processors": ["nowhere.at:all"]}, 'must hold "module:Class"'),
        ({"logits_processors": ["json"]}, 'must hold "module:Class"'),
        ({"logits_processors": [Wish], "speculative_config": NGRAM}, "cannot be combined with"),
    ],
)
def test_an_invalid_processor_of_an_engine_is_refused(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LLM(DEMO, num_kv_blocks=9, **settings)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31))
@example(seed=175817)  # a sample is replaced by another whose tokens are equal so far
def test_batch_updates_keep_every_request_at_an_index(seed):
    """A processor that applies each update in vLLM's order knows the request at each index."""
    rng, batch, held = random.Random(seed), Batch([]), {}
    members = [Member(batch) for _ in range(8)]
    outputs = {member: [0] for member in members}
    for _ in range(20):
        present = rng.sample(members, rng.randrange(1, 9))
        for member in present:
            outputs[member].append(rng.randrange(99))
        rows = {
            member: SamplingRow(SamplingParams(), 0, 1 + len(outputs[member]), [7, *outputs[member], 5], 1)
            for member in present
        }
        before = list(batch.members)
        update = batch.update(rows)
        is_changed = process_dict_updates(held, update, lambda params, *token_ids: token_ids)
        assert is_changed == (update is not None) == (before != batch.members)
        assert set(batch.members) == set(present)
        assert held.keys() == set(range(len(present)))
        for index, member in enumerate(batch.members):
            assert held[index][0] == [7]
            assert held[index][1] is member.output_ids
            assert member.output_ids == outputs[member], "the list that a processor holds grows"


def test_states_are_kept_by_index_where_a_request_needs_one():
    def odd(params, prompt_ids, output_ids):
        return prompt_ids[0] if prompt_ids[0] % 2 else None

    states: dict = {}
    swap, move = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL
    added = [(index, SamplingParams(), [index + 1], []) for index in range(4)]
    for update, expected in (
        (BatchUpdate(4, [], added, []), {0: 1, 2: 3}),
        (BatchUpdate(4, [], [], [(0, 2, swap), (3, 2, swap)]), {0: 3, 3: 1}),
        (BatchUpdate(3, [1], [], [(3, 1, move)]), {0: 3, 1: 1}),
        (BatchUpdate(3, [0], [(0, SamplingParams(), [6], [])], [(2, 1, move)]), {}),
    ):
        assert process_dict_updates(states, update, odd)
        assert states == expected
    assert not process_dict_updates(states, None, odd)
    assert not process_dict_updates(states, BatchUpdate(2, [1], [], []), odd)


class ByRequest(AdapterLogitsProcessor):
    """Does to each request what its extra_args say."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        made = {None: None, "raise": lambda output_ids, logits: 1 / 0}
        made["60"] = lambda output_ids, logits: torch.where(torch.arange(len(logits)) == 60, 0.0, -torch.inf)
        return made[params.extra_args and params.extra_args["do"]]


def test_a_function_of_an_adapter_concerns_only_its_own_request():
    asked = {"do": "raise"}, None, {"do": "60"}
    params = [SamplingParams(max_tokens=3, ignore_eos=True, extra_args=one) for one in asked]
    with LLM(DEMO, num_kv_blocks=20, logits_processors=[ByRequest]) as llm:
        outputs = [output.outputs[0] for output in llm.generate(["a", "b", "c"], params, use_tqdm=False)]
    assert [output.finish_reason for output in outputs] == ["error", "length", "length"]
    assert outputs[1].token_ids != outputs[2].token_ids == [60] * 3
