"""With logprobs_mode="processed_logprobs", log-probabilities are those that tokens are sampled from."""

import math

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.sampling.drawing import process_logits
from tests.helpers import table_checkpoint
from tests.sampling.test_sampler import filtered_by_sorting, metadata_of, row


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Return a model whose next-token logits are those of a table, and the table."""
    logits = torch.randn(260, 260, generator=torch.Generator().manual_seed(0))
    return str(table_checkpoint(tmp_path_factory.mktemp("table"), logits, ("a", "b", "c"))), logits


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_processed_logprobs_are_those_that_tokens_are_sampled_from(enforce_eager, table):
    path, logits = table
    params = [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.7, "top_p": 0.6, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0, "allowed_token_ids": [5, 6, 7], "logit_bias": {6: 2.0}, "bad_words": ["\x07"]},
    ]
    settings = {"num_kv_blocks": 20, "max_logprobs": -1, "enforce_eager": enforce_eager}
    asked = [SamplingParams(**one, max_tokens=1, logprobs=-1, prompt_logprobs=1, seed=3) for one in params]
    with LLM(path, logprobs_mode="processed_logprobs", **settings) as llm:
        outputs = llm.generate([[1, 65]] * len(asked), asked, use_tqdm=False)
    with LLM(path, **settings) as llm:
        raw = llm.generate([[1, 65]] * len(asked), asked, use_tqdm=False)
    for one, of_model, output in zip(params, raw, outputs, strict=True):
        drawn, entry = output.outputs[0].token_ids[0], output.outputs[0].logprobs[0]
        assert [drawn] == of_model.outputs[0].token_ids  # the same token, reported otherwise
        assert output.prompt_logprobs == of_model.prompt_logprobs
        expected = processed(logits[65].clone(), [1, 65], SamplingParams(**one))
        found = torch.tensor([entry[token_id].logprob for token_id in range(260)])
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        assert output.outputs[0].cumulative_logprob == entry[drawn].logprob > -math.inf
        assert entry[drawn].rank == 1 + int((expected > expected[drawn]).sum())


def test_a_sampled_token_is_not_excluded_and_a_row_may_have_none():
    logits, tokens = torch.tensor([[1.0, 3.0, 2.0]] * 2), torch.tensor([2, -1])
    found = process_logits(logits, metadata_of([row(top_k=1)] * 2), tokens)
    assert found[:, 1:].tolist() == [[0.0, -1.0], [0.0, -math.inf]]


def processed(logits, prompt, params):
    """Return processed log-probabilities, in vLLM's documented order and without nanoengine's code.

    There is no output yet whose tokens a presence penalty could count.
    """
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    for token_id in prompt:
        logits[token_id] *= params.repetition_penalty ** (1 if logits[token_id] < 0 else -1)
    if params.allowed_token_ids:
        logits[[i for i in range(len(logits)) if i not in params.allowed_token_ids]] = -math.inf
    for word in params.bad_words or ():
        logits[ord(word)] = -math.inf
    scaled = logits / (params.temperature or 1.0)
    return filtered_by_sorting((scaled - scaled.max()).unsqueeze(0), [params])[0].log_softmax(-1)
