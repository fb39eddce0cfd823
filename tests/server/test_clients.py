"""The chat API as clients use it: limits, stop strings, roles, histories and streams that stay open."""

import json
import re
import threading
from pathlib import Path

import jsonschema
import openai
import pytest
from transformers import AutoTokenizer

from nanoengine.chat.templates import render_chats
from nanoengine.server.openai_api import ChatRequest
from nanoengine.server.responses import messages_of
from tests.helpers import DEMO, slow
from tests.serving import TEMPLATE, held_steps, http, post, scripted

HELLO: dict = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 200}
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def serving(script, tmp_path_factory):
    with scripted(script, tmp_path_factory.mktemp("clients") / "model") as found:
        yield found


def whole_and_streamed(client, **asked):
    """Return (content, reasoning, finish reason, stop reason) of an answer, after checking its stream."""
    asked = {"model": "demo", **HELLO, **asked}
    choice = client.chat.completions.create(**asked).choices[0]
    message = choice.message
    found = message.content, getattr(message, "reasoning", ""), choice.finish_reason, choice.stop_reason
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**asked, stream=True)]
    deltas, end = [piece.delta.model_dump() for piece in pieces], pieces[-1]
    texts = ("".join(one.get(name) or "" for one in deltas) for name in ("content", "reasoning"))
    assert (*texts, end.finish_reason, end.stop_reason) == found
    return found


QUESTION = "<think>\nQuestion: why?\n</think>\n\nYes. Question: no"
ENDS = "<think>an end</think>end, 2nd end, 3rd"


@pytest.mark.parametrize(
    ("text", "stop", "more", "expected"),
    [
        (QUESTION, ["Question:"], {}, ("Yes. ", "Question: why?", "stop", "Question:")),
        ("<think>a</think>a</thin", ["a</thin"], {}, ("", "a", "stop", "a</thin")),
        ("<think>a</think>b", ["a</thin", "think"], {}, ("b", "a", "stop", None)),
        ("<think>ends", ["ends"], {}, ("", "ends", "stop", None)),
        ("no thought, one end", ["end", "one"], {}, ("no thought, ", "", "stop", "one")),
        ("no th\n\n\nx", "\n\n", {}, ("no th", "", "stop", "\n\n")),
        ("no thought, sto", ["stop"], {}, ("no thought, sto", "", "stop", None)),
        (ENDS, "end", {"include_stop_str_in_output": True}, ("end", "an end", "stop", "end")),
        (ENDS, "end", {"min_tokens": 26}, ("end, 2nd ", "an end", "stop", "end")),
    ],
)
def test_stop_strings_and_their_settings_apply_to_content(text, stop, more, expected, client, script):
    script.says = {"Hello": text}
    assert whole_and_streamed(client, stop=stop, extra_body=more) == expected


def test_an_event_is_one_line_for_clients_that_split_text_at_more_line_ends(url, script):
    script.says = {"Hello": "a\x85b\u2028c\u2029d"}
    with http.stream("POST", f"{url}/v1/chat/completions", json={**HELLO, "stream": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"]["content"] for one in events) == script.says["Hello"]


def form_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    "form", [form_of({"enum": ["a, b"]}), {"structured_outputs": {"json": {"enum": ["a, b"]}}}]
)
def test_a_stop_string_does_not_cut_json(form, url, script):
    script.says = {}
    found = post(url, "chat/completions", **HELLO, **form, stop=[","])["choices"][0]
    assert json.loads(found["message"]["content"]) == "a, b"
    found = post(url, **{"prompt": "Hi", "max_tokens": 50}, **form, stop=[","])["choices"][0]
    assert json.loads(found["text"]) == "a, b"


# ---- roles and histories ----

# Like Qwen 3's, with the roles that it knows and one system message
ROLES = """
{%- if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('one system message') }}{% endif %}
{%- if m.role in ('user', 'assistant', 'tool') %}<|{{ m.role }}|>{{ m.content }}
{% endif %}{% endfor %}"""
DEVELOPERS = ROLES.replace("== 'system' ", "in ('system', 'developer') ")


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def rendered(template, messages):
    (found,) = render_chats(messages, AutoTokenizer.from_pretrained(DEMO), chat_template=template)
    return found["prompt"]


def test_a_developer_is_the_system_where_the_template_knows_no_developer():
    for text in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        both = rendered(ROLES, said(("developer", text), ("user", "Hi")))
        assert both == rendered(ROLES, said(("system", "Be brief."), ("user", "Hi")))
        both = rendered(ROLES, said(("system", "You help."), ("developer", text), ("user", "Hi")))
        assert both == rendered(ROLES, said(("system", "You help.\nBe brief."), ("user", "Hi")))
    known = rendered(DEVELOPERS, said(("developer", "Be brief."), ("user", "Hi")))
    assert known.startswith("<|system|>Be brief.")
    any_role = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    assert rendered(any_role, said(("developer", "a"), ("critic", "b"))) == "<|system|>a<|critic|>b"


@pytest.mark.parametrize("role", ["critic", "function", "Developer", 5, ["user"]])
def test_a_role_that_the_template_leaves_out_is_refused_by_its_name(role):
    with pytest.raises(ValueError, match=f"^messages: .* has no role {re.escape(repr(str(role)))}"):
        rendered(ROLES, said(("user", "Hi"), (role, "Words that must not vanish")))
    assert "<|tool|>5" in rendered(ROLES, said(("user", "Hi"), ("tool", "5")))


AS_TEXT = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}
{{ c.function.name }}: {% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}
{{- c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"""
ITEMS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}
{{ c.function.name }}:{% for name, value in c.function.arguments | items %} {{ name }}={{ value }}
{%- endfor %}{% endfor %}{% endfor %}"""
MAPPINGS = ITEMS.replace("{% for name", "{% if c.function.arguments is mapping %}{% for name").replace(
    "endfor %}{%", "endfor %}{% endif %}{%", 1
)
BROKEN = '{"value": "', "[1, 2]", "5", "not JSON", '{"a": NaN', "[" * 100_000


@pytest.mark.parametrize("arguments", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("template", [AS_TEXT, ITEMS, MAPPINGS], ids=["text", "items", "mapping"])
def test_a_malformed_call_in_the_history_is_shown_as_it_is(template, arguments):
    """A model wrote it once, so a 400 would end the conversation."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO, chat_template=template)
    functions = {"name": "add", "arguments": '{"x": 1}'}, {"name": "add", "arguments": arguments}
    calls = [{"id": str(i), "type": "function", "function": one} for i, one in enumerate(functions)]
    messages = [*said(("user", "Hi")), {"role": "assistant", "content": None, "tool_calls": calls}]
    text = ChatRequest(messages=messages).render(tokenizer)["prompt"]
    name, one = ("", '{"x": 1}') if template is AS_TEXT else ("arguments=", "x=1")
    assert re.sub(r":\s+", ": ", text).endswith(f"add: {one}add: {name}{arguments}")


def test_content_that_is_no_text_is_shown_as_json():
    content = {"x": 1, "y": [True, None, "é"]}
    assert rendered(ROLES, said(("tool", content))) == '<|tool|>{"x": 1, "y": [true, null, "é"]}\n'
    assert rendered(ROLES, said(("tool", None))) == "<|tool|>\n"


def test_a_refusal_in_the_history_is_text():
    refusal = [{"type": "refusal", "refusal": "I cannot."}]
    assert rendered(ROLES, said(("assistant", refusal))) == "<|assistant|>I cannot.\n"
    assert messages_of(said(("assistant", refusal)))[0]["content"] == [{"type": "text", "text": "I cannot."}]
    with pytest.raises(ValueError, match="images and audio"):
        rendered(ROLES, said(("assistant", [{"type": "refusal"}])))


# ---- settings ----


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({}, ""),
        *(({name: False}, False) for name in ("enable_thinking", "think")),
        ({"enable_thinking": True}, True),
        ({"reasoning_effort": "none"}, False),
        *(({"reasoning_effort": effort}, "") for effort in ("high", "low")),
        ({"think": "high"}, ""),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_is_turned_off_by_each_name_that_clients_use(asked, thinks):
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    tokenizer = AutoTokenizer.from_pretrained(DEMO, chat_template=template)
    found = ChatRequest(messages=said(("user", "Hi:")), **asked).render(tokenizer)["prompt"]
    effort = next((value for value in asked.values() if value in ("low", "high")), "")
    assert found == f"Hi: {thinks} {effort}"


# ---- what is counted ----


@pytest.mark.parametrize(
    ("thought", "rest"),
    [
        ("<think>\nI add: é \U0001f600.", "\n</think>\n\nIt is 5."),
        ("<think>ends", ""),
        ("", "No thought."),
        ("", "<b>No</b> thought."),
    ],
)
def test_the_tokens_of_reasoning_are_counted(thought, rest, client, script):
    script.says = {"Hello": thought + rest}
    expected = len(script.tokenizer(thought).input_ids)
    asked = {"model": "demo", **HELLO}
    usage = client.chat.completions.create(**asked).usage
    pieces = [*client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    response = client.responses.create(model="demo", input="Hello", temperature=0)
    num_tokens = usage.completion_tokens_details.reasoning_tokens
    # A token at the end of the thought may hold the beginning of its tag.
    assert expected <= num_tokens <= expected + (rest != "" != thought)
    assert pieces[-1].usage == usage
    assert response.usage.output_tokens_details.reasoning_tokens == num_tokens


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("<think>\nI add", " them.\n</think>\n\nIt is 5.", ("It is 5.", " them.")),
        ("<think>\nI add.\n</think>\n\nIt", " is <think>5</think>.", (" is <think>5</think>.", "")),
        ("It", " is 5.", (" is 5.", "")),
        ([{"type": "text", "text": "<think>"}], "I add.</think>5", ("5", "I add.")),
        ("", "<think>I add.</think>5", ("5", "I add.")),
    ],
)
def test_a_thought_that_the_request_began_goes_on_as_reasoning(begun, text, expected, client, script):
    script.says = {"Hello": text}
    messages = [*HELLO["messages"], {"role": "assistant", "content": begun}]
    assert whole_and_streamed(client, messages=messages, extra_body=CONTINUES)[:2] == expected


def test_structured_output_follows_a_thought_that_the_request_began(client, script):
    for begun, thought in (("<think>\nI add", " them."), ("<think>I</think>", "")):
        script.says = {"Hello": f"{thought}</think>"} if thought else {}
        messages = [*HELLO["messages"], {"role": "assistant", "content": begun}]
        answer = whole_and_streamed(client, messages=messages, extra_body=CONTINUES, **form_of({"enum": [5]}))
        assert answer[:2] == ("5", thought)


# ---- streams that stay open ----


@pytest.mark.parametrize("path", ["chat/completions", "messages", *slow("completions", "responses")])
def test_a_stream_stays_alive_while_there_is_nothing_to_send(path, url, service, client, script, monkeypatch):
    monkeypatch.setattr("nanoengine.server.service.KEEP_ALIVE_SECONDS", 0.05)
    script.says = {"Hello": "Hi."}
    prompt = {"completions": {"prompt": "<|user|>Hello"}, "responses": {"input": "Hello"}}
    body = {"temperature": 0, "stream": True, **prompt.get(path, {"messages": HELLO["messages"]})}
    body |= {"max_tokens": 99} if path == "messages" else {}
    with held_steps(service.engine) as steps, http.stream("POST", f"{url}/v1/{path}", json=body) as answer:
        lines = answer.iter_lines()
        sign = 'data: {"type":"ping"}' if path == "messages" else ": waiting"
        assert sum(next(lines) == sign for _ in range(12)) >= 2
        steps.permit()
        rest = [line for line in lines if line]
    assert all(line.startswith((": waiting", "data: {", "data: [DONE]", "event: ")) for line in rest)
    last = [line for line in rest if line.startswith("data: ")][-1]
    assert last == "data: [DONE]" or json.loads(last[6:])["type"] in ("response.completed", "message_stop")
    with held_steps(service.engine) as steps:
        threading.Timer(0.3, steps.permit).start()
        assert whole_and_streamed(client)[0] == "Hi."


# ---- a call, or an answer that fits ----

ADD: dict = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}}
ADD |= {"required": ["a", "b"], "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
SUM: dict = {"type": "object", "properties": {"name": {"$ref": "#/$defs/text"}}, "required": ["name"]}
SUM |= {"$defs": {"text": {"type": "string", "maxLength": 50}}, "additionalProperties": False}
ADD_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
BARE = '{"name": "add", "parameters": {"a": 2, "b": 3}}'


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def formatted(request, script, tmp_path_factory):
    path = tmp_path_factory.mktemp("formats") / "model"
    with scripted(script, path, tool_call_parser=request.param) as (url, _):
        yield request.param, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>"])
def test_with_response_format_a_tool_can_still_be_called(choice, thought, formatted, script):
    calls, client = formatted
    script.says = {"Hello": thought + (ADD_TEXT if calls == "hermes" else BARE)}
    asked = {"model": "demo", **HELLO, **form_of(SUM), "tools": TOOLS, "tool_choice": choice}
    message = client.chat.completions.create(**asked).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
    assert (message.content, getattr(message, "reasoning", "")) == (None, "Hm." if thought else "")


@pytest.mark.parametrize("name", ["<tool_call>", *slow("additional", ADD_TEXT[:12], "x")])
def test_with_tools_an_answer_still_fits_its_format(name, formatted, script):
    _, client = formatted
    for text in (json.dumps({"name": name}), "I would rather talk."):
        script.says = {"Hello": text}
        content, _, reason, _ = whole_and_streamed(client, **HELLO, **form_of(SUM), tools=TOOLS)
        assert reason in ("stop", "tool_calls", "length")
        if text[0] == "{":
            assert (json.loads(content), reason) == ({"name": name}, "stop")
    script.says = {"Hello": json.dumps({"any": name})}
    content, *_ = whole_and_streamed(client, **HELLO, tools=TOOLS, response_format={"type": "json_object"})
    assert json.loads(content) == {"any": name}


def test_a_call_of_a_strict_tool_fits_its_schema(formatted, script):
    """The model is steered to one that does not."""
    calls, client = formatted
    thought, body = "<think>Not <tool_call>.</think>", '{"name": "add", "arguments": {"a": "five", "b": 6}}'
    if calls == "qwen3_coder":
        thought, body = "", "<function=add>\n<parameter=a>\nfive"
    script.says = {"Hello": f"{thought}So: <tool_call>\n{body}", "Hi": f"{thought}Plain = text."}
    function = TOOLS[0]["function"] | {"strict": True}
    asked: dict = {"model": "demo", **HELLO, "tools": [{"type": "function", "function": function}]}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.content, getattr(message, "reasoning", "")) == ("So:", thought[7:-8])
    tools = [{"type": "function", **function}]
    response = client.responses.create(model="demo", input="Hello", tools=tools, temperature=0)
    for call in (message.tool_calls[0].function, response.output[-1]):
        jsonschema.validate(json.loads(call.arguments), ADD)
    asked["messages"] = [{"role": "user", "content": "Hi"}]
    assert client.chat.completions.create(**asked).choices[0].message.content == "Plain = text."
    function |= {"parameters": {"properties": {"x": {"type": "integer", "not": {}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    assert refused.value.param == "tools"


# ---- the Responses API as agents use it ----

# What Codex sends, with its tools cut short, as the arguments of OpenAI's client
CODEX = json.loads(Path(__file__).with_name("codex.json").read_text())
STRICT = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('one system message') }}{% endif %}
<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}"""
STRICT += TEMPLATE[TEMPLATE.index("{%- for c in") :] + "{# <think> #}"


@pytest.fixture(scope="module")
def agent(script, tmp_path_factory):
    with scripted(script, tmp_path_factory.mktemp("agent") / "model", STRICT) as (url, found):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), found


def test_codex_s_requests_are_served(agent, script, caplog):
    client, _ = agent
    script.says = {"Hello": f"<think>Hm.</think>So:{ADD_TEXT}", "add: 5": "It is 5."}
    with caplog.at_level("WARNING", "nanoengine.server.responses"):
        events = [*client.responses.create(**CODEX)]
    assert "['custom', 'local_shell', 'web_search']" in caplog.text
    response = events[-1].response
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "Hm."
    assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == "Hm."
    for event in events:
        if event.type == "response.output_item.done":
            assert event.item == response.output[event.output_index]
    output = {"type": "function_call_output", "call_id": response.output[2].call_id, "output": "add: 5"}
    given = [*CODEX["input"], *(item.model_dump(exclude_none=True) for item in response.output), output]
    script.says = {"Hello": "It is 5."}
    whole = client.responses.create(**CODEX | {"input": given, "stream": False})
    assert whole.output_text == "It is 5."


@pytest.mark.parametrize(
    "fields",
    [
        *({"tools": [{"type": "web_search"}], **more} for more in ({}, {"tool_choice": "auto"})),
        *({"input": []}, {"input": ""}, {"instructions": None}),
        {"input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
    ],
    ids=str,
)
def test_other_bodies_of_agents_are_served(fields, agent, script):
    client, _ = agent
    script.says = {"": "Hi."}
    assert client.responses.create(**CODEX | {"stream": False} | fields).output_text == "Hi."


def test_reasoning_in_the_input_is_that_of_the_next_message():
    thought: dict = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": "Hm."}]
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    empty = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"}
    steps = thought, call, call, thought, call, empty
    found = messages_of([*said(("user", "Hi")), *steps, *said(("assistant", "5"))])
    assert [message.get("reasoning_content") for message in found] == [None, "Hm.", "Hm.", None]
    calls = [[one["id"] for one in message.get("tool_calls", ())] for message in found]
    assert calls == [[], ["c", "c"], ["c"], []]
