"""The server of a model that pools: its answers are the offline engine's."""

import re

import openai
import pytest
import torch

from nanoengine import LLM, AsyncLLM
from tests.contrib.test_pooling import QUIET, classifier
from tests.helpers import DEMO
from tests.serving import http, served

SETTINGS = {"num_kv_blocks": 100, "max_num_seqs": 4}
TEXTS = ["What is 27 + 58?", "Who are you?", "What is 27 + 59?"]


@pytest.fixture(scope="module")
def url():
    with served(AsyncLLM(str(DEMO), runner="pooling", **SETTINGS)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, runner="pooling", **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_openai_s_client_gets_the_offline_embeddings(encoding_format, url, llm):
    given = {} if encoding_format is None else {"encoding_format": encoding_format}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="demo", input=TEXTS, **given)
    expected = llm.embed(TEXTS, **QUIET)
    got = [one.embedding for one in answer.data]
    if encoding_format == "base64":  # which the client decodes only where it asked for it by itself
        assert all(isinstance(one, str) and len(one) > 100 for one in got)
    else:
        torch.testing.assert_close(
            torch.tensor(got), torch.tensor([one.outputs.embedding for one in expected]), rtol=1e-3, atol=1e-4
        )
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == sum(len(one.prompt_token_ids) for one in expected)


def test_scores_and_ranks_equal_the_offline_engine(url, llm):
    expected = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, **QUIET)]
    for names in ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"):
        body = dict(zip(names, (TEXTS[0], TEXTS), strict=True))
        answer = http.post(f"{url}/v1/score", json=body).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-3)
    answer = http.post(f"{url}/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()
    results = [(one["index"], one["document"]["text"]) for one in answer["results"]]
    order = sorted(range(3), key=lambda i: -expected[i])[:2]
    assert results == [(i, TEXTS[i]) for i in order]


def test_a_classifier_names_the_most_probable_label(tmp_path):
    labels = {"id2label": {0: "dull", 1: "fine"}, "label2id": {"dull": 0, "fine": 1}}
    classifier("Qwen3", 2, tmp_path, head_dim=16, **labels)
    prompts = [[1, 2, 3], [4, 5]]
    with LLM(tmp_path, **SETTINGS) as llm:
        expected = [one.outputs.probs for one in llm.classify(prompts, **QUIET)]
    with served(AsyncLLM(str(tmp_path), **SETTINGS)) as (url, _):
        answer = http.post(f"{url}/classify", json={"model": "demo", "input": prompts}).json()
    assert [one["probs"] for one in answer["data"]] == [pytest.approx(one, abs=1e-4) for one in expected]
    assert [one["label"] for one in answer["data"]] == [("dull", "fine")[one[1] > one[0]] for one in expected]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {"input": 5}, "input", "input must be text, token ids"),
        ("/v1/embeddings", {"input": []}, "input", "input must hold at least one token"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions", "dimensions must be among"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "x"}, "encoding_format", "'float' or 'base64'"),
        ("/v1/embeddings", {"input": "a", "messages": [1]}, None, "messages=.* is not supported"),
        ("/v1/embeddings", {"input": "a", "inputs": "b"}, None, "did you mean"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "does not exist"),
        ("/classify", {"input": "a"}, None, "task must be 'embed'"),
        ("/v1/score", {"text_1": "a"}, "data_2", "data_2 must be given, once"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "data_1", "as many as data_2: got 2 for 1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("/v1/completions", {"prompt": "a"}, None, "this model embeds its prompts"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_by_its_field(path, body, param, message, url):
    answer = http.post(f"{url}{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert param in (None, error["param"]), error
    assert re.search(message, error["message"]), error


def test_pooling_routes_of_a_generating_server_say_how_to_start_a_pooling_one(serving):
    error = http.post(f"{serving[0]}/v1/embeddings", json={"input": "a"}).json()["error"]
    assert error["message"] == "/v1/embeddings needs a server of a model that pools: --runner pooling"
