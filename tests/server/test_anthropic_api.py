"""Anthropic's Messages API. Its own client is tried in test_outside_tools.py."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanoengine.server.anthropic_api import SIGNATURE, CountRequest, MessageStream
from nanoengine.server.keys_and_limits import Ticket
from tests.helpers import DEMO, failing_calls
from tests.serving import TEMPLATE, http, post, scripted

# Also shows the reasoning of earlier messages
THOUGHTS = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
THOUGHTS = TEMPLATE.replace("{{ m.content }}", THOUGHTS)
HELLO: dict = {"max_tokens": 99, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
TOOL: dict = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
KEPT = {"type": "ephemeral", "ttl": "1h"}


def text(*texts, **more):
    return [{"type": "text", "text": one, **more} for one in texts]


def use(**more):
    return {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 2}, **more}


def result(*content):
    return {"type": "tool_result", "tool_use_id": "toolu_1", **({"content": content[0]} if content else {})}


USE, ID = use(), {"tool_call_id": "toolu_1"}
HM = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
REDACTED = {"type": "redacted_thinking", "data": "x"}
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 2}}}
FUNCTION = CALLED | {"function": {"name": "f", "arguments": '{"a": 2}'}}


@pytest.fixture(scope="module")
def serving(script, tmp_path_factory):
    with scripted(script, tmp_path_factory.mktemp("messages") / "model", THOUGHTS) as found:
        yield found


def events_of(url, asked, headers=None):
    """Return the events of a streamed message, after checking their names."""
    answer = http.post(f"{url}/v1/messages?beta=true", json=asked | {"stream": True}, headers=headers)
    named = [event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    return events


def gathered(events):
    """Return the message that a stream's events describe, as Anthropic's clients put it together."""
    events = json.loads(json.dumps(events))
    message = events[0]["message"]
    assert (events[0]["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    for event in events[1:-2]:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        match event:
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append(block)
                is_open, written = True, ""
            case {"delta": {"type": "input_json_delta", "partial_json": more}}:
                written += more
            case {"delta": {"type": "text_delta" | "thinking_delta" | "signature_delta", **delta}}:
                (name,) = delta.keys() - {"type"}
                block[name] += delta[name]
            case {"type": "content_block_stop"} if is_open:
                is_open = False
                block |= {"input": json.loads(written)} if block["type"] == "tool_use" else {}
    assert not message["content"] or not is_open
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message | events[-2]["delta"] | {"usage": message["usage"] | events[-2]["usage"]}


def said(url, **asked):
    """Return (content, stop reason, stop sequence) of a message, after checking its stream."""
    whole = post(url, "messages", **HELLO | asked)
    streamed = gathered(events_of(url, HELLO | asked))
    parts = "type", "role", "model", "content", "stop_reason", "stop_sequence"
    assert [streamed[part] for part in parts] == [whole[part] for part in parts]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert [whole[part] for part in parts[:3]] == ["message", "assistant", "demo"]
    return tuple(whole[part] for part in parts[3:])


def test_a_message_is_the_chat_s_answer(url, script):
    script.says = {"Hello": "<think>Hm</think>Hi."}
    message = post(url, "messages", **HELLO, system=text("Be brief."))
    messages = [{"role": "system", "content": "Be brief."}, *HELLO["messages"]]
    chat = post(url, "chat/completions", **HELLO | {"messages": messages})
    thought = {"type": "thinking", "thinking": "Hm", "signature": SIGNATURE}
    assert message["content"] == [thought, *text("Hi.")]
    usage, expected = message["usage"], chat["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected["prompt_tokens"]
    assert usage["output_tokens"] == expected["completion_tokens"]
    num_thought = expected["completion_tokens_details"]["reasoning_tokens"]
    assert usage["output_tokens_details"]["thinking_tokens"] == num_thought > 0
    count = post(url, "messages/count_tokens", **HELLO, system="Be brief.")
    assert count == {"input_tokens": expected["prompt_tokens"]}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (text("Hi, you"), "end_turn", None)),
        ({"stop_sequences": [" you", "x"]}, (text("Hi,"), "stop_sequence", " you")),
        ({"max_tokens": 1}, (text("H"), "max_tokens", None)),
    ],
)
def test_the_reason_for_the_end_is_named(asked, expected, url, script):
    script.says = {"Hello": "Hi, you"}
    assert said(url, **asked) == expected


SAID = [{"reasoning": "a"}, {"reasoning": "b", "content": "So"}, {"content": ":"}, {"content": None}]
RAN = [{"content": "", "tool_calls": [FUNCTION, FUNCTION]}, {"content": "!"}]
THOUGHT = {"type": "thinking", "thinking": "ab", "signature": SIGNATURE}


@pytest.mark.parametrize(
    ("pieces", "content"),
    [
        ([], []),
        ([{"content": ""}], []),
        (SAID, [THOUGHT, *text("So:")]),
        (RAN, [USE, USE, *text("!")]),
        (SAID + RAN, [THOUGHT, *text("So:"), USE, USE, *text("!")]),
    ],
)
def test_the_blocks_of_a_stream_are_those_of_the_answer_in_order(pieces, content):
    ticket = Ticket("1", "POST", "/v1/messages", prompt_tokens=9, cached_tokens=4)
    choice = {"finish_reason": "tool_calls", "stop_reason": None}
    stream = MessageStream(ticket, "demo", shows_thoughts=True)
    events = [event for piece in [{}, *pieces] for event in stream.piece(piece)] + [*stream.end(choice)]
    message = gathered(events)
    assert (message["content"], message["stop_reason"]) == (content, "tool_use")
    assert {"input_tokens": 5, "cache_read_input_tokens": 4}.items() <= message["usage"].items()
    choice = {"finish_reason": "stop", "stop_reason": 5}  # a stop token
    for piece in pieces:
        stream = MessageStream(ticket, "demo", shows_thoughts=True)
        whole = stream.whole({"message": piece, **choice})
        assert gathered([*stream.piece(piece), *stream.end(choice)]) == whole
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)


def test_a_thought_that_is_not_shown_comes_back_in_its_signature():
    stream = MessageStream(Ticket("1", "POST", "/v1/messages"), "demo", shows_thoughts=False)
    choice = {"finish_reason": "stop", "stop_reason": None}
    events = [event for piece in SAID + SAID for event in stream.piece(piece)] + [*stream.end(choice)]
    content = gathered(events)["content"]
    assert stream.whole({"message": {"reasoning": "ab"}, **choice})["content"] == content[:1]
    assert [block.get("thinking") for block in content] == ["", None] * 2
    (found,) = CountRequest(messages=[{"role": "assistant", "content": content}]).chat().messages
    assert found == {"role": "assistant", "content": "So:\nSo:", "reasoning_content": "abab"}
    assert CountRequest(messages=[{"role": "assistant", "content": [HM | {"thinking": ""}]}]).chat()


def test_sampling_settings_act(url, script):
    script.says = {}
    settings = {"top_k": 1, "temperature": 1.5, "seed": 3, "min_p": 0.1, "ignore_eos": True}
    message = post(url, "messages", **HELLO | settings | {"max_tokens": 3})
    assert (message["usage"]["output_tokens"], message["stop_reason"]) == (3, "max_tokens")
    assert post(url, "messages", **HELLO | settings | {"max_tokens": 3})["content"] == message["content"]


def test_the_format_and_effort_of_the_output_are_the_chat_s():
    form = {"type": "json_schema", "schema": {"enum": ["a, b"]}}
    config = {"effort": "low", "format": form, "task_budget": {"type": "tokens", "total": 9}}
    chat = CountRequest(messages=HELLO["messages"], output_config=config).chat()
    assert (chat.reasoning_effort, chat.format()) == ("low", {"json": form["schema"]})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, True)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_tool_choice_is_the_chat_s(choice, expected):
    chat = CountRequest(messages=HELLO["messages"], tools=[TOOL], tool_choice=choice).chat()
    assert (chat.tool_choice, chat.parallel_tool_calls) == expected


def test_an_answer_goes_on_from_the_assistant_s_text(url, script):
    script.says = {"Hello": " you."}
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Hi,"}]
    assert said(url, messages=messages)[0] == text(" you.")
    hi = text("Hi,")
    for content, goes_on in ((hi, True), ([HM, *hi], True), ([HM], False), ([*hi, USE], False)):
        last = {"role": "assistant", "content": content}
        assert CountRequest(messages=[last]).chat().continue_final_message == goes_on


# ---- what clients send ----


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, ""),
        ({"type": "enabled", "budget_tokens": 31999}, "True"),
        ({"type": "adaptive", "display": "summarized"}, "True"),
        ({"type": "disabled"}, "False"),
    ],
)
def test_thinking_is_turned_on_and_off(thinking, expected):
    template = "{{ messages[0].content }}{{ enable_thinking }}"
    tokenizer = AutoTokenizer.from_pretrained(DEMO, chat_template=template)
    found = CountRequest(messages=HELLO["messages"], thinking=thinking).chat().render(tokenizer)["prompt"]
    assert found == "Hello" + expected


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([("user", "a"), ("user", text("b", cache_control=KEPT))], [("user", "a\nb")]),
        (
            [("user", "a"), ("assistant", [HM, REDACTED, *text("b", "c"), use(cache_control=KEPT)])],
            [("user", "a"), ("assistant", "b\nc", {"reasoning_content": "Hm.", "tool_calls": [CALLED]})],
        ),
        (
            [("assistant", [use()]), ("user", [result(text("5", "6")), *text("go on")])],
            [("assistant", "", {"tool_calls": [CALLED]}), ("tool", "5\n6", ID), ("user", "go on")],
        ),
        ([("user", [result("5"), result()])], [("tool", "5", ID), ("tool", "", ID)]),
        ([("user", [result([{"type": "tool_reference", "tool_name": "f"}])])], [("tool", "f", ID)]),
        (
            [("system", "a"), ("user", "b"), ("system", text("c")), ("assistant", "d"), ("system", "e")],
            [("system", "a"), ("user", "b\nc"), ("assistant", "d"), ("user", "e")],
        ),
        ([("user", [result("5")]), ("system", "9 left")], [("tool", "5\n9 left", ID)]),
    ],
)
@pytest.mark.parametrize("system", [None, [], text("Be", "brief.", cache_control=KEPT)])
def test_each_block_of_the_history_is_understood(turns, expected, system):
    messages = [{"role": role, "content": content} for role, content in turns]
    if system:
        first = expected[0][1] if expected[0][0] == "system" else None
        expected = [("system", "Be\nbrief." + (f"\n{first}" if first else "")), *expected[bool(first) :]]
    found = CountRequest(messages=messages, system=system).chat().messages
    assert found == [{"role": role, "content": said, **dict(*more)} for role, said, *more in expected]


def test_tools_keep_what_the_chat_api_knows(caplog):
    schema = TOOL["input_schema"]
    tools = [
        {**TOOL, "type": "custom", "description": "Run.", "strict": True, "cache_control": KEPT},
        {**TOOL, "type": None, "description": None, "defer_loading": False},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ]
    with caplog.at_level("WARNING", "nanoengine.server.responses"):
        chat = CountRequest(messages=HELLO["messages"], tools=tools).chat()
    functions = {"description": "Run.", "strict": True}, {}
    assert chat.tools == [
        {"type": "function", "function": {"name": "f", "parameters": schema, **more}} for more in functions
    ]
    assert "['web_search_20250305']" in caplog.text


def claude_code(number, *turns):
    """Return what Claude Code 2.1.332 sends, with its texts cut short, and these turns at the end."""
    text = Path(__file__).with_name("claude_code.json").read_text().replace("NUMBER", str(number))
    body = json.loads(text)
    body["messages"] += [{"role": role, "content": content} for role, content in turns]
    return body


def test_claude_code_s_requests_are_served(url, script):
    script.says = {"9 left": "</think>It is 5.", "Hello": "Hm.</think>So:" + CALL}
    beta = "claude-code-20250219,interleaved-thinking-2025-05-14,advanced-tool-use-2025-11-20"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": beta, "x-app": "cli"}
    first = gathered(events_of(url, claude_code(1), headers))
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["content"][0]["thinking"] == ""
    results = [{"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": text("5")}]
    turns = ("assistant", first["content"]), ("user", results), ("system", text("9 left", cache_control=KEPT))
    second = gathered(events_of(url, claude_code(2, *turns), headers))
    assert (second["content"][-1]["text"], second["stop_reason"]) == ("It is 5.", "end_turn")
    usage = second["usage"]
    before = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] >= before // 32 * 32 > 0
    asked = {name: claude_code(3, *turns)[name] for name in ("messages", "system", "tools", "thinking")}
    count = http.post(f"{url}/v1/messages/count_tokens?beta=true", json=asked, headers=headers).json()
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


# ---- errors ----

IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"max_tokens": number}, "max_tokens: ") for number in (None, 0)),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be user, assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0] must hold text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images and documents are not supported"),
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "images and documents are not supported"),
        ({"messages": [{"role": "user", "content": [result([IMAGE])]}]}, "images and documents are not"),
        ({"messages": [{"role": "user", "content": [use()]}]}, "messages[0] must hold text"),
        ({"messages": [{"role": "assistant", "content": [result("5")]}]}, "messages[0] must hold text"),
        ({"messages": [{"role": "assistant", "content": [use(input="5")]}]}, "messages[0] must hold text"),
        ({"system": [IMAGE]}, "system must hold text"),
        ({"tools": [5]}, "tools must hold"),
        ({"tools": [{"name": "f"}]}, "tools must hold a name and an input_schema"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice must be"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: "),
        ({"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget: "),
        ({"output_config": {"format": {"type": "xml"}}}, "response_format must be of type"),
        ({"stop_sequences": [""]}, "stop_sequences.0: "),
        ({"stop": ["a"]}, "has no argument 'stop'"),
        ({"temperature": -1}, "temperature must be a number in [0"),
        ({"top_kk": 5}, "did you mean 'top_k'"),
        ({"messages": [{"role": "user", "content": "a b " * 20_000}]}, " tokens > 1023 maximum"),
        ({"model": "claude"}, "the model 'claude' does not exist"),
    ],
)
def test_what_is_not_supported_is_refused_in_anthropic_s_form(fields, message, url):
    answer = http.post(f"{url}/v1/messages", json={**HELLO, **fields})
    kind, status = ("not_found_error", 404) if "model" in fields else ("invalid_request_error", 400)
    assert answer.status_code == status
    error = answer.json()
    assert error == {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}
    assert message in error["error"]["message"]
    if "tokens >" not in message and not fields.keys() & {"max_tokens", "temperature", "output_config"}:
        assert http.post(f"{url}/v1/messages/count_tokens", json={**HELLO, **fields}).json() == error


def test_a_prompt_that_is_too_long_is_counted(url):
    asked = HELLO | {"messages": [{"role": "user", "content": "a b " * 1000}]}
    error, count = (post(url, path, **asked) for path in ("messages", "messages/count_tokens"))
    said = f"prompt is too long: {count['input_tokens']} tokens > 1023 maximum"
    assert error["error"]["message"] == said


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens", "messages/batches"])
def test_the_guard_refuses_in_anthropic_s_form_too(path, url, service, monkeypatch):
    def refused(**more):
        answer = http.post(f"{url}/v1/{path}", json=HELLO | more)
        return answer.status_code, answer.json()["error"]["type"], answer.json()["type"]

    monkeypatch.setattr(service, "max_body_bytes", 1000)
    assert refused(x=" " * 1000) == (413, "request_too_large", "error")
    assert http.post(f"{url}/v1/{path}", content="{").json()["type"] == "error"
    monkeypatch.setattr(type(service), "is_serving", False)
    assert refused() == (503, "overloaded_error", "error")
    monkeypatch.setattr(service, "api_key", "sesame")
    assert refused() == (401, "authentication_error", "error")


@pytest.mark.parametrize("path", ["messages/count_tokens", "chat/completions"])
def test_an_x_api_key_counts_as_the_key(path, url, service, monkeypatch, script):
    script.says = {"Hello": "Hi."}
    monkeypatch.setattr(service, "api_key", "sesame")
    right, bearer = ("x-api-key", "sesame"), ("Authorization", "Bearer sesame")
    wrong = [("x-api-key", "open"), ("Authorization", "Bearer open"), ("x-api-key", "Bearer sesame")]
    allowed = [[right], [bearer], [right, bearer]]
    refused = [[], [wrong[0], bearer], *([one] for one in wrong), *([right, one] for one in wrong)]
    for headers in allowed + refused:
        status = http.post(f"{url}/v1/{path}", json=HELLO, headers=headers).status_code
        assert status == (200 if headers in allowed else 401), headers


def test_too_many_requests_and_failed_ones_are_anthropic_s_errors(url, service, script, monkeypatch):
    script.says = {"Hello": "Hi."}
    with monkeypatch.context() as patch:
        patch.setattr(service, "num_samples", service.max_samples)
        assert post(url, "messages", **HELLO)["error"]["type"] == "overloaded_error"
    with failing_calls(service.engine.llm_engine.runner, "launch", range(99)):
        error = http.post(f"{url}/v1/messages", json=HELLO)
        assert (error.status_code, error.json()["error"]["type"]) == (500, "api_error")
        assert events_of(url, HELLO) == [error.json()]
