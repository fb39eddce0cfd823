"""The server, by real clients over real sockets. What it answers is what the offline engine answers."""

import itertools
import json
import logging
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import nanoengine
from nanoengine import LLM, AsyncLLM, EngineConfig, SamplingParams
from nanoengine.server import lifecycle as server
from nanoengine.server.lifecycle import make_parser
from nanoengine.server.openai_api import APIError, to_json
from nanoengine.server.service import Service, names_of
from tests.helpers import DEMO
from tests.serving import (
    COMMON,
    TIMEOUT,
    command,
    connected,
    held_steps,
    http,
    is_empty,
    num_running,
    post,
    post_in_bytes,
    served,
    threads_of_checks,
    wait_until,
)

ROOT = Path(__file__).parents[2]
SETTINGS = {"num_kv_blocks": 200, "max_num_seqs": 16}
QUESTION = [{"role": "user", "content": "What is 27 + 58?"}]
PROMPTS = ["The brave sailor found", "2 3 5 7 11", "Spell the word attention backwards.", "zzz"]


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, **SETTINGS) as llm:
        yield llm


def test_a_prompt_is_tokenized_and_checked_once_in_a_thread_of_the_service(client, service, monkeypatch):
    threads = threads_of_checks(monkeypatch, service.engine.llm_engine.checker)
    for prompt, num_tokenized in (("Hello", 1), ([5, 6], 0), (["Hello", "you"], 2)):
        client.completions.create(model="demo", prompt=prompt, max_tokens=2)
        assert len(threads["tokenized"]) == num_tokenized
        assert len(threads["checked"]) == max(1, num_tokenized)
        for thread in threads["tokenized"] + threads["checked"]:
            assert thread.name.startswith("ThreadPoolExecutor")
        threads |= {"tokenized": [], "checked": []}
    client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    assert list(map(len, threads.values())) == [1, 1]


WITH_IDS, JSON = {"return_token_ids": True}, {"content-type": "application/json"}


def stream_lines(response):
    return (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))


def streamed(url, path, **asked):
    """Return the pieces of a streamed answer."""
    with http.stream("POST", f"{url}/v1/{path}", json=asked) as answer:
        return list(stream_lines(answer))


# ---- answers are the offline engine's ----


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "several ids"])
def test_every_kind_of_prompt_gets_the_offline_answer(kind, client, llm):
    tokenizer = llm.get_tokenizer()
    prompts = PROMPTS if kind in ("texts", "several ids") else PROMPTS[:1]
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    prompt: object = prompts if kind == "texts" else prompts[0]
    if "ids" in kind:
        prompt = [tokenizer(text).input_ids for text in prompts]
        prompt = prompt if kind == "several ids" else prompt[0]
    asked = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    answer = client.completions.create(**asked, extra_body=WITH_IDS)
    for choice, output in zip(answer.choices, expected, strict=True):
        for name in ("text", "token_ids", "finish_reason"):
            assert getattr(choice, name) == getattr(output.outputs[0], name)
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
    assert answer.usage.completion_tokens == sum(len(output.outputs[0].token_ids) for output in expected)
    assert (answer.object, answer.model) == ("text_completion", "demo")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_continuous_usage_is_in_every_chunk(path, url):
    asked = {"prompt": "a b c"} if path == "completions" else {"messages": QUESTION}
    asked |= {"max_tokens": 9, "ignore_eos": True, "stream": True, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = streamed(url, path, **asked, stream_options=options)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == list(itertools.accumulate(len(piece["choices"][0]["token_ids"]) for piece in pieces))
    assert (last["choices"], last["usage"], counts[-1]) == ([], pieces[-1]["usage"], 9)
    options["include_usage"] = False
    assert not [piece for piece in streamed(url, path, **asked, stream_options=options) if "usage" in piece]


def test_request_ids_truncated_prompts_and_empty_messages_are_supported(url, service):
    def choice(path="completions", **asked):
        return post(url, path, max_tokens=3, temperature=0, **WITH_IDS, **asked)["choices"][0]

    ids = service.checkpoint.tokenizer("2 3 5 7 11").input_ids
    assert post(url, prompt="a", request_id="mine")["id"] == "cmpl-mine"
    cut = choice(prompt="2 3 5 7 11", truncate_prompt_tokens=4, echo=True)
    assert cut["prompt_token_ids"] == ids[-4:]
    assert cut["token_ids"] == choice(prompt=ids[-4:])["token_ids"]
    assert cut["text"].startswith(service.checkpoint.tokenizer.decode(ids[-4:]))
    truncated = choice(prompt=ids * 400, truncate_prompt_tokens=-1)
    assert truncated["prompt_token_ids"] == (ids * 400)[-1021:]  # of 1024, less max_tokens
    null, empty = ([QUESTION[0], {"role": "assistant", "content": content}] for content in (None, ""))
    assert choice("chat/completions", messages=null) == choice("chat/completions", messages=empty)


@pytest.mark.parametrize("adds", [None, False, True])
def test_add_special_tokens_decides_about_special_tokens(adds, url, service, monkeypatch):
    """The tokenizer is changed to add a special token, which the bundled model's does not."""
    tokenizer = service.checkpoint.tokenizer
    template = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 433)])
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", template)
    try:
        asked = {"max_tokens": 1, **WITH_IDS, "add_special_tokens": adds}
        text = post(url, **asked, prompt="a")["choices"][0]
        chat = post(url, "chat/completions", **asked, messages=QUESTION)["choices"][0]
    finally:
        monkeypatch.undo()
    assert (text["prompt_token_ids"][0] == 433) == (adds is not False)
    assert (chat["prompt_token_ids"][0] == 433) == (adds is True)


def test_the_server_describes_itself_and_allowed_origins_may_call_it(llm):
    engine = AsyncLLM("demo", num_kv_blocks=20)
    template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    with served(engine, origins=["https://a.example"], chat_template=template, api_key="k") as (url, _):
        assert http.get(f"{url}/ping").status_code == http.post(f"{url}/ping").status_code == 200
        assert http.get(f"{url}/version").status_code == 401
        key = {"Authorization": "Bearer k"}
        assert http.get(f"{url}/version", headers=key).json() == {"version": nanoengine.__version__}
        info = http.get(f"{url}/server_info", headers=key).json()
        assert (info["model"], "Qwen3ForCausalLM" in info["engine"]) == ("demo", True)
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            asked["Access-Control-Request-Headers"] = "authorization,content-type"
            first = http.options(f"{url}/v1/completions", headers=asked)
            second = http.get(f"{url}/v1/models", headers=key | {"Origin": origin})
            for answer in (first, second):
                assert answer.headers.get("access-control-allow-origin") == allowed
        written = http.post(f"{url}/tokenize", json={"messages": QUESTION}, headers=key).json()["tokens"]
        assert llm.get_tokenizer().decode(written) == "What is 27 + 58?|"
    with pytest.raises(ValueError, match=r"chat_template must be a file or a template, got '/no/where'"):
        Service(engine, chat_template="/no/where")
    with pytest.raises(ValueError, match="api_key must not be empty"):
        Service(None, api_key="")


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
        {"seed": 2, "n": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 0, "stop": ["a", "e"], "include_stop_str_in_output": True, "min_tokens": 5},
        {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 40},
        {"temperature": 0, "stop_token_ids": [3, 4, 5], "bad_words": ["the"], "logit_bias": {5: 50.0}},
        {"temperature": 0, "allowed_token_ids": [5, 6, 7]},
        {"temperature": 0, "forced_token_ids": [72, 105, 33]},
    ],
)
def test_sampling_parameters_mean_the_same_as_offline(params, url, llm):
    params = {"max_tokens": 20} | params
    (expected,) = llm.generate(PROMPTS[0], SamplingParams(**params), use_tqdm=False)
    choices = post(url, prompt=PROMPTS[0], **WITH_IDS, **params)["choices"]
    for choice, output in zip(choices, expected.outputs, strict=True):
        for name in ("token_ids", "text", "stop_reason"):
            assert choice[name] == getattr(output, name)


def test_a_second_question_with_the_same_beginning_reports_cached_tokens(client):
    text = "a b c d e f g h i j k l m n o p q r s t " * 4
    for cached in (False, True):
        answer = client.completions.create(model="demo", prompt=text, max_tokens=1)
        assert (answer.usage.prompt_tokens_details.cached_tokens > 0) == cached


def test_the_guide_s_examples_print_what_it_shows(url):
    section = (ROOT / "docs" / "guide" / "serving.md").read_text()
    _, curl, answer, script, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)

    def run(*command):
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)

    got = json.loads(run("bash", "-c", curl.replace("http://127.0.0.1:8000", url)).stdout)
    shown = json.loads(answer)
    for one in (got, shown):
        del one["id"], one["created"], one["usage"]["prompt_tokens_details"]  # of those before
    assert got == shown
    done = run(sys.executable, "-c", script.replace("http://127.0.0.1:8000", url))
    text, error = printed.splitlines()
    # Tokens that come faster than a piece is sent go into one piece.
    assert done.stdout.replace("|", "") == text.replace("|", "")
    assert done.stderr.splitlines()[-1] == error


# ---- log-probabilities, in each API's shape ----


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_shows_the_prompt_and_its_logprobs_before_the_answer(stream, client, llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=3)
    expected = llm.generate(PROMPTS[1], params, use_tqdm=False)[0]
    asked = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": 4, "logprobs": 3, "echo": True}
    answer = client.completions.create(model="demo", **asked, stream=stream)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    names = "tokens", "token_logprobs", "text_offset", "top_logprobs"
    lists = ([one for choice in choices for one in getattr(choice.logprobs, name)] for name in names)
    tokens, values, offsets, tops = lists
    assert "".join(choice.text for choice in choices) == PROMPTS[1] + expected.outputs[0].text
    ids = expected.prompt_token_ids
    theirs = [entry[i].logprob for entry, i in zip(expected.prompt_logprobs[1:], ids[1:], strict=True)]
    sampled = zip(expected.outputs[0].logprobs, expected.outputs[0].token_ids, strict=True)
    assert values[0] is None
    assert values[1:] == pytest.approx([*theirs, *(entry[i].logprob for entry, i in sampled)], abs=1e-4)
    for top, entry in zip(tops[len(ids) :], expected.outputs[0].logprobs, strict=True):
        assert top == pytest.approx({one.decoded_token: one.logprob for one in entry.values()}, abs=1e-4)
    assert "".join(tokens[: len(ids)]) == PROMPTS[1]
    assert offsets == [sum(map(len, tokens[:count])) for count in range(len(tokens))]


def test_a_prompt_alone_can_be_scored(url, llm):
    ids = llm.get_tokenizer()(PROMPTS[1]).input_ids
    answer = post(url, prompt=ids, max_tokens=0, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    assert (choice["text"], len(choice["logprobs"]["tokens"])) == (PROMPTS[1], len(ids))
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("alternatives", [0, 2])
def test_a_chat_s_logprobs_have_tokens_bytes_and_alternatives(alternatives, stream, client, llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    expected = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    asked = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 5}
    asked |= {"logprobs": True, "top_logprobs": alternatives or None}
    answer = client.chat.completions.create(**asked, stream=stream)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    assert choices[-1].finish_reason == "length"
    content = [token for choice in choices for token in choice.logprobs.content]
    for token, entry, token_id in zip(content, expected.logprobs, expected.token_ids, strict=True):
        assert token.token == entry[token_id].decoded_token
        assert token.logprob == pytest.approx(entry[token_id].logprob, abs=1e-4)
        assert bytes(token.bytes).decode() == token.token
        best = sorted(entry.values(), key=lambda one: one.rank)[:alternatives]
        assert [one.token for one in token.top_logprobs] == [one.decoded_token for one in best]


def test_prompt_logprobs_have_vllm_s_shape(url, llm):
    asked = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 2}
    expected = llm.generate(PROMPTS[1], SamplingParams(**asked), use_tqdm=False)[0].prompt_logprobs
    found = post(url, prompt=PROMPTS[1], **asked)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert [set(entry) for entry in found[1:]] == [set(map(str, entry)) for entry in expected[1:]]
    assert set(next(iter(found[1].values()))) == {"logprob", "rank", "decoded_token"}


# ---- what is refused, and what means off ----

IMAGE = [{"type": "image_url", "image_url": {}}]


def said(content):
    return [{"role": "user", "content": content}]


BAD_VALUES: dict[str, list] = {
    "temperature": ["hot", float("nan")],
    "n": [10**400],
    "max_tokens": [0, 2.5],
    "logprobs": [21, -1, True],
    "prompt_logprobs": [1000],
    "stop": [["a"] * 65],
    "logit_bias": [3, *({x: 1} for x in ("x", "٣", "-1", "9" * 5000, "99999")), {"5": 1, "05": 2}],
    "truncate_prompt_tokens": [0, -2, 1.5],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "priority": [1],
    "prompt": ["", [], None, [10**9], [1, "a"], [[1], []], "\ud800", "word " * 3000, ["a"] * 2000],
    **{name: [1] for name in ("temprature", "output_kind", "suffix")},
    "structured_outputs": [5],
    "messages": [[], "hello", ["hello"], [{"content": "hello"}], *map(said, (5, IMAGE, "word " * 3000))],
}
TOOL = {"function": {"name": "f"}}
NO_END: dict = {"properties": {"c": {"$ref": "#"}}, "required": ["c"]}
ENDLESS_TOOL = {"function": {"name": "f", "parameters": NO_END}}
NOT_ARGUMENTS: tuple = 5, 0, {"type": "string"}, {"properties": [1]}
REGEX = {"structured_outputs": {"regex": "a"}}
BAD_IN_CHATS: dict = {"top_logprobs": 2, "logprobs": 1, "echo": True, "reasoning_effort": 5}
BAD_IN_CHATS |= {"chat_template": "{{ 1 }}", "request_id": "x" * 201}
BAD_IN_CHATS["chat_template_kwargs"] = {"chat_template": "{{ 1 }}"}
# fields of a chat, the name of the wrong one, and what the message says
REFUSED_CHATS: list[tuple[dict, str, str]] = [
    *(({name: value}, name, "") for name, value in BAD_IN_CHATS.items()),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs", ""),
    ({"tools": 5}, "tools", "tools must be a list"),
    ({"tools": [{}]}, "tools", "tools must hold"),
    *(
        ({"tools": [{"function": {"name": "f", "parameters": one}}]}, "tools", "JSON schema of an object")
        for one in NOT_ARGUMENTS
    ),
    ({"tools": [{"type": "web", **TOOL}]}, "tools", '"type": "function"'),
    ({"tools": [ENDLESS_TOOL], "tool_choice": "required"}, "tools", "no finite text"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "x", "name": "f"}}, "tool_choice", "must be none, auto"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "required or one of"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "sub"}}}, "tool_choice", "one of ['f']"),
    ({"tools": [TOOL], "tool_choice": "required", **REGEX}, "tool_choice", "excludes other"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema with a schema"),
    ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format", "Unimplemented"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"response_format": {"type": "json_object"}, **REGEX}, "structured_outputs", "cannot be combined"),
    ({"structured_outputs": {"foo": 1}}, "structured_outputs", "no field 'foo'"),
    ({"logits_processors": ["os:system"]}, "logits_processors", "has no argument 'logits_processors'"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages", "tool_calls must hold"),
]
REFUSED: list[tuple[dict, str, str]] = [
    *(({name: value}, name, "") for name, values in BAD_VALUES.items() for value in values),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ""),
    ({"allowed_token_ids": [64], "bad_words": ["a"]}, "min_tokens", ""),
    ({"stream": True, "stream_options": {"x": True}}, "stream_options", ""),
    *(({"messages": QUESTION, **fields}, param, said) for fields, param, said in REFUSED_CHATS),
]


@pytest.mark.parametrize(
    ("changes", "param", "message"), REFUSED, ids=[f"{i}-{row[1]}" for i, row in enumerate(REFUSED)]
)
def test_a_bad_request_is_refused_by_its_field(changes, param, message, url):
    is_chat = "messages" in changes
    body = json.dumps({"max_tokens": 1, **({} if is_chat else {"prompt": "a"}), **changes})
    path = "chat/completions" if is_chat else "completions"
    answer = http.post(f"{url}/v1/{path}", content=body, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert (message if is_chat else param) in error["message"]
    assert len(error["message"]) <= 1000


def test_a_message_that_quotes_a_long_request_is_cut_in_each_api_s_form():
    error = APIError(400, "x" * 5000)
    for found in error.content, error.messages_content:
        assert found["error"]["message"] == "x" * 1000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"structured_outputs": {"regex": "c[ab]{5}"}, "bad_words": ["a", "b"]}, "structured_outputs"),
        ({"allowed_token_ids": [9], "bad_words": ["**"]}, "allowed_token_ids"),
    ],
)
def test_bans_that_leave_no_token_are_refused(asked, param, stream, url):
    answer = http.post(f"{url}/v1/completions", json={"prompt": "a", **asked, "stream": stream})
    assert answer.status_code == (200 if stream else 400)  # a stream has begun
    error = json.loads(answer.text.split("data: ")[-2])["error"] if stream else answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "bad_words" in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nul", b"\xff\xfe", b"[" * 10**5, b'{"prompt": 1e999}', b"9" * 10_000]
)
def test_a_malformed_body_is_a_bad_request(body, url):
    answer = http.post(f"{url}/v1/completions", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_lone_surrogate_becomes_a_json_escape_and_a_number_that_is_not_finite_null():
    found = to_json({"text": "é\ud800", "numbers": [math.inf, -math.inf, math.nan, 1e300]})
    assert found == '{"text":"é\\ud800","numbers":[null,null,null,1e+300]}'.encode()
    assert to_json([math.nan, "é"]) == '[null,"é"]'.encode()
    assert json.loads(to_json("\ud800")) == "\ud800"


def test_the_openai_package_raises_its_own_errors(client, url):
    with pytest.raises(openai.BadRequestError, match="temperature must be a number"):
        client.completions.create(model="demo", prompt="a", temperature=-3)
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    overflow = (
        r"^Error code: 400 .*This model's maximum context length is 1024 tokens \(context_length_exceeded\)"
    )
    with pytest.raises(openai.BadRequestError, match=f"{overflow}.*max_model_len is 1024") as caught:
        client.completions.create(model="demo", prompt=[5] * 1024, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    for text in ("a b " * 2000, "a b " * 20_000):
        apis = (client.chat.completions, {"messages": said(text)}), (client.responses, {"input": text})
        for api, asked in apis:
            with pytest.raises(openai.BadRequestError, match=overflow) as caught:
                api.create(model="demo", **asked)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", *asked)
    refused = http.post(f"{url}/v1/nothing", json={}).json()["error"]["message"]
    assert refused.startswith("/v1/nothing does not exist; the paths are /")
    assert "/v1/chat/completions" in refused
    wrong = http.get(f"{url}/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    answer = http.post(f"{url}/v1/completions", content=b"a=b")
    assert "application/json" in answer.json()["error"]["message"]


# ---- the other endpoints ----


def test_the_models_route_lists_the_served_model(client):
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("demo", 1024)
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_file_or_directory_is_served_under_its_name_and_its_path(tmp_path, url, monkeypatch, service):
    file = tmp_path / "Tiny.Q4_1.gguf"
    file.touch()
    assert names_of(str(file)) == ["Tiny.Q4_1", str(file)]
    monkeypatch.setattr(service, "names", names_of(str(tmp_path)))
    assert service.names == [tmp_path.name, str(tmp_path)]
    for name, status in ((str(tmp_path), 200), (tmp_path.name, 200), ("demo", 404)):
        assert http.get(f"{url}/v1/models/{name}").status_code == status


def test_max_tokens_beyond_max_model_len_are_clamped(url):
    answer = post(url, prompt=[64] * 1000, max_tokens=10**6, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 1024


def test_the_load_is_logged_while_something_runs(url, service, monkeypatch):
    lines = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "info", lambda text, *x: lines.append(text % x))
    service.server.report()
    lines.clear()
    service.server.report()
    assert lines == []
    with held_steps(service.engine) as steps, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, url, prompt="a b c", max_tokens=9)
        wait_until(lambda: steps.is_held)
        monkeypatch.setattr(server, "REPORT_SECONDS", 0)
        wait_until(lambda: lines)
        monkeypatch.undo()
        steps.permit()
        answer.result()
    assert "tokens/s, 1 running, 0 waiting, KV cache 0.5% in use" in lines[0]


def test_tokenize_and_detokenize_are_the_tokenizer_s(url, llm):
    tokenizer = llm.get_tokenizer()
    answer = http.post(f"{url}/tokenize", json={"prompt": "Hello there", "return_token_strs": True}).json()
    ids = tokenizer("Hello there").input_ids
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 1024)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert http.post(f"{url}/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello there"}
    chat = http.post(f"{url}/tokenize", json={"messages": QUESTION}).json()
    assert chat["tokens"] == llm.render_chat(QUESTION)[0]["prompt_token_ids"]
    half = http.post(f"{url}/tokenize", content=b'{"prompt": "a\\ud800"}', headers=JSON)
    assert half.json()["error"]["message"].startswith("prompt must be valid Unicode")
    for path, body in ("tokenize", {}), ("detokenize", {"tokens": [-1]}), ("detokenize", {"tokens": [10**9]}):
        assert http.post(f"{url}/{path}", json=body).status_code == 400


def test_metrics_are_in_the_format_of_prometheus(client, url, service):
    before = {family.name: family for family in families(url)}
    client.completions.create(model="demo", prompt="abc", max_tokens=7, extra_body={"ignore_eos": True})
    after = {family.name: family for family in families(url)}

    def grew(name, sample, **labels):
        old, new = (
            next(x.value for x in found[f"vllm:{name}"].samples
                 if x.name == f"vllm:{name}{sample}" and labels.items() <= x.labels.items())
            for found in (before, after)
        )  # fmt: skip
        return new - old

    assert (grew("generation_tokens", "_total"), grew("prompt_tokens", "_total")) == (7, 3)
    assert grew("request_success", "_total", finished_reason="length") == 1
    assert grew("inter_token_latency_seconds", "_bucket", le="+Inf") == 6
    names = "inter_token_latency", "time_to_first_token", "e2e_request_latency"
    assert [grew(f"{name}_seconds", "_count") for name in names] == [6, 1, 1]
    assert 0 < grew("inter_token_latency_seconds", "_sum") < grew("e2e_request_latency_seconds", "_sum")
    assert grew("num_requests_running", "") == 0
    assert {metric.name for metric in service.engine.llm_engine.get_metrics()} == set(after)
    assert {one.labels["model_name"] for family in after.values() for one in family.samples} == {"demo"}


def test_metrics_count_accepted_draft_tokens_by_position():
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1}
    with served(AsyncLLM("demo", num_kv_blocks=20, speculative_config=drafting)) as (url, _):
        post(url, prompt="1 2 1 2 1 2", max_tokens=20, temperature=0)
        found = {family.name: family.samples for family in families(url)}
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert [one.labels["position"] for one in by_position] == ["0", "1"]
    (total,) = found["vllm:spec_decode_num_accepted_tokens"]
    assert sum(one.value for one in by_position) == total.value


def families(url):
    return list(text_string_to_metric_families(http.get(f"{url}/metrics").text))


# ---- clients that go away, wait, or are too many ----

ENDLESS = {"prompt": ["a b c", "d e f"], "max_tokens": 900, "ignore_eos": True, "n": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_blocks_within_a_step(stream, url, service, caplog):
    caplog.set_level(logging.INFO, "nanoengine.requests")
    with held_steps(service.engine) as steps:
        asked = json.dumps({**ENDLESS, "stream": stream}).encode()
        with connected(url) as client:
            client.sendall(post_in_bytes("/v1/completions", asked))
            steps.permit_until(lambda: num_running(service) == 4)
        wait_until(lambda: service.num_samples == 0)
        begun = steps.num_begun
        steps.permit()
        wait_until(lambda: is_empty(service))
        assert steps.num_begun == begun  # none after the one that ran when the socket closed
    line = json.loads(caplog.records[-1].message)
    assert (line["disconnected"], line["status"]) == (True, 200 if stream else None)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_stops_reading_is_disconnected(stream, caplog):
    caplog.set_level(logging.INFO, "nanoengine.requests")
    asked = json.dumps({**ENDLESS, "max_tokens": 50, "logprobs": 20, "stream": stream}).encode()
    with served(AsyncLLM(str(DEMO), num_kv_blocks=50)) as (url, service), socket.socket() as client:
        # The response fills these buffers and the server's own buffer of 64 KiB.
        service.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(post_in_bytes("/v1/completions", asked).replace(b"Host", b"Connection: close\r\nHost"))
        connections = service.server.server_state.connections
        wait_until(lambda: any(one.flow.write_paused for one in connections))
        (connection,) = connections
        wait_until(lambda: is_empty(service))
        assert not stream or connection.transport.get_write_buffer_size() < 2**17  # the rest waits
        for _ in range(2):  # the checks at the beginning and at the end of CLIENT_SECONDS
            connection.loop.call_soon_threadsafe(connection.check)
        wait_until(lambda: not connections and service.num_samples == 0 and caplog.records)
        assert json.loads(caplog.records[-1].message)["disconnected"] == stream  # a whole answer was sent


@pytest.mark.parametrize("last", [(b"HTTP/1.1", b"HTTP/1.0"), (b"Host", b"Connection: close\r\nHost")])
def test_a_connection_s_last_stream_has_chunks_in_http_1_1_and_bytes_after_it_are_ignored(last, url, service):
    request = post_in_bytes("/v1/completions", b'{"prompt": "a", "max_tokens": 3, "stream": true}')
    with held_steps(service.engine) as steps, connected(url) as client:
        client.sendall(request.replace(*last))
        wait_until(lambda: steps.is_held)
        client.sendall(b"\r\n")
        steps.permit()
        body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")[2]
    lines = re.findall(rb"[^\n]*\n", body)
    chunks = [line for line in lines if re.fullmatch(rb"[0-9a-f]+\r\n", line)]
    assert bool(chunks) == (b"1.0" not in last[1])
    events = [line for line in lines if line.strip() and line not in chunks]
    assert all(event.startswith(b"data: {") for event in events[:-1])
    assert events[-1] == b"data: [DONE]\n"


def test_a_request_that_is_not_complete_in_time_is_refused_and_is_the_connection_s_last(url, monkeypatch):
    monkeypatch.setattr("nanoengine.server.keys_and_limits.CLIENT_SECONDS", 0.05)
    with connected(url) as client:
        client.sendall(post_in_bytes("/v1/completions", b"{}").replace(b"Length: ", b"Length: 9"))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close\r\n" in answer.lower()  # else a byte more would keep it open forever


@pytest.fixture(scope="module")
def guarded():
    """Yield a server with a key, little room in its queue, and small bodies."""
    engine = AsyncLLM(str(DEMO), num_kv_blocks=100, max_num_seqs=2)
    with served(engine, api_key="gehéim", max_waiting=1, max_body_bytes=1000) as (url, service):
        yield url, service


KEY = {"Authorization": "Bearer gehéim".encode()}


@pytest.mark.parametrize("key", [b"", b"Bearer", b"Bearer x", b"Bearer gehim", b"Basic gehim", b"\xff\xfe"])
def test_only_the_page_and_health_need_no_key(key, guarded):
    url, _ = guarded
    headers = {"Authorization": key}
    for path in ("/v1/models", "/metrics", "/nothing"):
        answer = http.get(url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert http.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 401
    for path, sent in (("/health", headers), ("", headers), ("/v1/models", KEY)):
        assert http.get(url + path, headers=sent).status_code == 200


KEY_LINE, OTHER_LINE = b"Authorization: Bearer geh\xc3\xa9im\r\n", b"Authorization: Bearer x\r\n"
HALVES = b"Authorization: Bearer \r\nAuthorization: geh\xc3\xa9im\r\n"


@pytest.mark.parametrize(
    ("headers", "trailer"),
    [(KEY_LINE + OTHER_LINE, b""), (OTHER_LINE + KEY_LINE, b""), (HALVES, b""), (b"", KEY_LINE)],
    ids=["first of two", "last of two", "halves", "trailer"],
)
def test_a_key_in_one_of_two_headers_or_in_a_trailer_is_refused(headers, trailer, guarded):
    body = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailer)
    assert answered(guarded[0], head + headers + b"\r\n" + chunks).startswith(b"HTTP/1.1 401 ")


def answered(url, content):
    """Send bytes, and return everything that the server answers."""
    with connected(url) as client:
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("header", [b"a: " + b"b" * 2**17, b"a: b\r\n" * 2**15], ids=["long", "many"])
@pytest.mark.parametrize("where", ["before the body", "after it"])
def test_endless_headers_are_refused_before_the_key_is_checked(header, where, guarded):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    if where == "after it":
        head += b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    with connected(guarded[0]) as client:
        client.sendall(head)
        try:
            for _ in range(100):  # 13 MB and more, were they all read
                client.sendall(header)
            answer = client.recv(65536)
        except ConnectionError:  # closed with some of it unread
            return
    assert answer.startswith(b"HTTP/1.1 431 ")
    usual = {**KEY, "a": "b" * 32_000}
    assert http.get(f"{guarded[0]}/v1/models", headers=usual).status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(is_chunked, guarded):
    url, _ = guarded

    def chunks():
        for _ in range(100):
            yield b" " * 10_000

    content = chunks() if is_chunked else b" " * 1_000_000
    headers = JSON | KEY
    answer = http.post(f"{url}/v1/completions", content=content, headers=headers)
    assert (answer.status_code, "at most 1000" in answer.json()["error"]["message"]) == (413, True)
    exact = json.dumps({"prompt": "a", "max_tokens": 1}).ljust(1000)
    assert http.post(f"{url}/v1/completions", content=exact, headers=headers).status_code == 200
    assert http.post(f"{url}/v1/completions", content=exact + " ", headers=headers).status_code == 413


@pytest.mark.parametrize("what", ["texts", "grammars"])
def test_slow_checks_delay_no_other_request_and_end_with_their_clients(what, url, service, monkeypatch):
    begun, may_end = [], threading.Event()
    if what == "texts":
        owner, name, pool, num_threads = PreTrainedTokenizerFast, "__call__", service.long_checks, 1
        path, body = "/tokenize", {"prompt": "a" * 200_000}
    else:
        owner, name = service.engine.llm_engine._grammars, "compile"
        pool, num_threads = service.grammar_checks, 2
        path, body = "/v1/completions", {"prompt": "a"}
    check = getattr(owner, name)

    def slowly(*asked, **settings):
        if what == "grammars" or len(asked[1]) > 10**5:
            begun.append(asked)
            assert may_end.wait(TIMEOUT)
        return check(*asked, **settings)

    monkeypatch.setattr(owner, name, slowly)
    with ExitStack() as clients:
        for i in range(num_threads + 4):
            if what == "grammars":
                body["structured_outputs"] = {"regex": f"{i}"}
            sent = post_in_bytes(path, json.dumps(body).encode())
            clients.enter_context(connected(url)).sendall(sent)
        wait_until(lambda: len(begun) == num_threads and pool._work_queue.qsize() == 4)
        assert http.post(f"{url}/tokenize", json={"prompt": "a"}).json()["count"] == 1
        assert http.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
    wait_until(lambda: not service.server.server_state.tasks)
    may_end.set()
    pool.submit(int).result(TIMEOUT)
    assert len(begun) == num_threads


def test_a_log_line_describes_the_request_without_its_contents(client, url, caplog):
    caplog.set_level(logging.INFO, "nanoengine.requests")
    start = time.monotonic()
    answer = client.completions.with_raw_response.create(model="demo", prompt="SECRET", max_tokens=3, n=2)
    for body in ({"prompt": "SECRET", "n": 0}, {"prompt": "SECRET", "SECRET": 1}):
        assert http.post(f"{url}/v1/completions", json=body).status_code == 400
    wait_until(lambda: len(caplog.records) == 3)
    elapsed = time.monotonic() - start
    lines = [json.loads(record.message) for record in caplog.records]
    # The line of an answer may come after the next request.
    first, second, third = sorted(lines, key=lambda line: line["status"])
    assert first["id"] == answer.headers["x-request-id"]
    assert answer.parse().id == f"cmpl-{first['id']}"
    assert (first["path"], first["status"], first["samples"]) == ("/v1/completions", 200, 2)
    assert first["completion_tokens"] == answer.parse().usage.completion_tokens
    assert 0 < first["first_output_seconds"] <= first["seconds"] <= elapsed
    assert {(one["status"], one["error"]) for one in (second, third)} == {(400, "invalid_request")}
    assert "SECRET" not in caplog.text


# ---- faults ----


def test_a_bug_in_the_server_shows_no_stack_trace(url, service, monkeypatch, caplog):
    monkeypatch.setattr(service, "check", lambda *_: 1 / 0)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    answer = http.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the server failed")
    wait_until(lambda: "ZeroDivisionError" in caplog.text)


@pytest.mark.parametrize(("path", "field"), [("completions", "prompt"), ("responses", "input")])
def test_a_bug_in_the_middle_of_a_stream_is_its_last_event(path, field, url, service, monkeypatch, caplog):
    choices = service.choices

    async def broken(*arguments):
        async for choice in choices(*arguments):
            yield choice
            yield {}  # is no choice

    monkeypatch.setattr(service, "choices", broken)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    answer = http.post(f"{url}/v1/{path}", json={field: "a", "stream": True}).text
    last = answer.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
    assert "the server failed" in str(json.loads(last))
    assert "KeyError" in caplog.text


@pytest.mark.filterwarnings("ignore:Exception in thread")
def test_a_dead_engine_answers_waiting_requests_and_is_not_healthy(monkeypatch):
    engine = AsyncLLM(str(DEMO), num_kv_blocks=20)
    with served(engine) as (url, service), ThreadPoolExecutor(1) as pool, held_steps(service.engine) as steps:
        assert http.get(f"{url}/health").status_code == 200
        answer = pool.submit(http.post, f"{url}/v1/completions", json={**ENDLESS, "max_tokens": 300})
        wait_until(lambda: steps.is_held)
        monkeypatch.setattr(engine, "_step", None)
        steps.permit()
        found = [answer.result(), http.post(f"{url}/v1/completions", json={"prompt": "a"})]
        found += [http.get(f"{url}/{path}") for path in ("health", "metrics")]
        assert [one.status_code for one in found] == [503] * 4


# ---- the command ----


def test_each_setting_of_the_engine_is_a_flag_and_is_not_set_without_it():
    parser = make_parser()
    given = vars(parser.parse_args(["m"]))
    for item in fields(EngineConfig):
        assert f"--{item.name.replace('_', '-')}" in parser.format_help()
        assert item.name not in given or item.name == "model"
    assert given["host"] == "127.0.0.1"


LONG = {"prompt": "a b c", "max_tokens": 120, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.mark.slow  # a process that imports PyTorch
def test_on_sigterm_the_command_finishes_running_requests_and_refuses_new_ones(llm, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    expected = llm.generate("a b c", params, use_tqdm=False)[0].outputs[0].token_ids
    flags = ["--served-model-name", "demo", "--drain-seconds", str(TIMEOUT)]
    flags += ["--logits-processors", "tests.serving:hold"]
    asked = {"model": "demo", **LONG, **WITH_IDS}
    (held := tmp_path / "held").touch()
    with command(*flags, NANOENGINE_API_KEY="k", HELD=str(held), PYTHONPATH=str(ROOT)) as (process, url):
        with (
            httpx.Client(headers={"Authorization": "Bearer k"}, timeout=TIMEOUT) as client,
            client.stream("POST", f"{url}/v1/completions", json=asked) as answer,
        ):
            pieces = stream_lines(answer)
            tokens = next(pieces)["choices"][0]["token_ids"]
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get(f"{url}/health").status_code == 503)
            refused = client.post(f"{url}/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            held.unlink()
            for piece in pieces:
                tokens += piece["choices"][0]["token_ids"]
        assert tokens == expected
        assert process.wait(TIMEOUT) == 0
        lines = [json.loads(line) for line in process.stdout]
        assert [line["status"] for line in lines if line["path"].startswith("/v1")] == [503, 200]


def test_the_command_prepares_its_process_and_ends_with_130_after_ctrl_c(monkeypatch):
    """The garbage collector skips what is loaded, and threads switch sooner."""
    log, calls = logging.getLogger("nanoengine.requests"), []
    for name, value in (("handlers", []), ("propagate", True)):
        monkeypatch.setattr(log, name, value)
    monkeypatch.setattr("gc.freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr("sys.setswitchinterval", calls.append)
    monkeypatch.setattr(server.Server, "run", lambda self: self.handle_exit(signal.SIGINT, None))
    with pytest.raises(SystemExit) as ended:
        server.main([*COMMON])
    assert (ended.value.code, calls) == (130, ["freeze", 0.001])


@pytest.mark.parametrize("drain_seconds", [0, TIMEOUT])
def test_after_sigterm_requests_finish_or_outlast_drain_seconds_and_end_with_an_error(drain_seconds):
    engine = AsyncLLM(str(DEMO), num_kv_blocks=100)
    with (
        served(engine) as (url, service),
        held_steps(service.engine) as steps,
        http.stream("POST", f"{url}/v1/completions", json=LONG) as answer,
    ):
        steps.permit(3)
        pieces = stream_lines(answer)
        next(pieces)
        wait_until(lambda: steps.is_held)
        service.server.drain_seconds = drain_seconds
        service.server.handle_exit(signal.SIGTERM, None)
        if drain_seconds:
            refused = http.post(f"{url}/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert http.get(f"{url}/health").status_code == 503
        else:
            wait_until(lambda: engine._closed)
        steps.permit()
        *_, last = pieces
        reason = last["choices"][0]["finish_reason"] if drain_seconds else last["error"]["message"]
        assert reason == ("length" if drain_seconds else "the server is shutting down")
