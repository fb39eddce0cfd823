"""Custom logits processors: functions of a request, and of an engine."""

import re

import pytest
import torch

from nanoengine import LLM, SamplingParams
from tests.helpers import DEMO, tokens_of

NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def token_ids(llm, params, prompts="Hello"):
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_function_gets_the_output_and_logits_in_float32_and_chooses_the_token(dtype):
    seen = []

    def count_up(output_ids, logits):
        seen.append((list(output_ids), logits.shape, logits.dtype))
        return torch.where(torch.arange(len(logits)) == 40 + len(output_ids), 0.0, -torch.inf)

    with LLM(DEMO, num_kv_blocks=20, dtype=dtype) as llm:
        asked = SamplingParams(logits_processors=[count_up], max_tokens=4)
        assert token_ids(llm, asked) == [[40, 41, 42, 43]]
        of_logits = (llm.llm_engine.checkpoint.vocab_size,), torch.float32
    assert seen == [([*range(40, 40 + i)], *of_logits) for i in range(4)]


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
)
def test_a_failing_function_ends_its_own_request_with_the_reason(wrong, reason, llm):
    free, broken = SamplingParams(**GREEDY), SamplingParams(**GREEDY, logits_processors=[wrong])
    outputs = llm.generate(["Hello"] * 3, [free, broken, free], use_tqdm=False)
    assert [out.outputs[0].finish_reason for out in outputs] == ["length", "error", "length"]
    assert re.match(f"no token could be sampled: .*{reason}", outputs[1].outputs[0].stop_reason)


@pytest.mark.parametrize("wrong", [5, [5], [lambda x: x], ["a.b:c"], [lambda a, b, c, d: d], [dict]])
def test_anything_but_functions_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="logits_processors must"):
        SamplingParams(logits_processors=wrong)


@pytest.mark.parametrize("more", [{"async_scheduling": True}, {"num_kv_blocks": 6, "block_size": 4}, NGRAM])
@pytest.mark.parametrize("is_of_request", [True, False])
def test_functions_work_with_async_scheduling_preemption_and_drafts(more, is_of_request):
    def alternate(output_ids, logits):
        return only(50 + len(output_ids) % 3)(output_ids, logits)

    processors = {"logits_processors": [alternate]}
    of_request, of_engine = (processors, {}) if is_of_request else ({}, processors)
    params = SamplingParams(**of_request, max_tokens=12)
    with LLM(DEMO, **{"num_kv_blocks": 100} | more, **of_engine) as llm:
        assert token_ids(llm, params, ["Hello", "a", "abc"]) == [[50, 51, 52] * 4] * 3
        metrics = llm.metrics()
    assert (metrics["num_preemptions"] > 0) == ("block_size" in more)
    assert (metrics["spec_decode_num_accepted_tokens"] > 0) == ("speculative_config" in more)


# ---- Processors of an engine ----


def prefer_60(output_ids, logits):
    logits[60] += 1000
    return logits


class Wish:
    """Looks like one of vLLM V1's classes."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass


@pytest.mark.parametrize("given", [[prefer_60], ["tests.extensions.test_logits_processors:prefer_60"]])
def test_an_engine_s_function_is_called_for_each_request_after_the_request_s_own(given):
    params = SamplingParams(**GREEDY, logits_processors=[lambda ids, logits: logits * 0])
    with LLM(DEMO, num_kv_blocks=100, logits_processors=given) as other:
        assert token_ids(other, params, ["Hello"] * 2) == [[60] * 12] * 2
        assert token_ids(other, SamplingParams(**GREEDY)) == [[60] * 12]


CLASS = "must be functions, got the class Wish; write a function (token_ids, logits) -> logits of one row"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (prefer_60, "must be a list"),
        ([5], "must take"),
        (["nowhere.at:all"], 'logits_processors must be "module:name"'),
        (["json"], 'logits_processors must be "module:name"'),
        ([Wish], CLASS),
        (["tests.extensions.test_logits_processors:Wish"], CLASS),
    ],
)
def test_an_invalid_processor_of_an_engine_is_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        LLM(DEMO, num_kv_blocks=9, logits_processors=given)
