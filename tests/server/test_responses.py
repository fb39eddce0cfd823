"""/v1/responses, by OpenAI's own client: the chat's answers in another shape."""

import json

import openai
import pydantic
import pytest

from nanoengine.server.keys_and_limits import Ticket
from nanoengine.server.responses import ResponsesRequest, ResponseStream
from tests.helpers import failing_calls
from tests.serving import http, paced_steps

QUESTION = "What is 27 + 58?"
ANSWER = "27 + 58 = 85"
ASKED = {"role": "user", "content": QUESTION}
SAID: dict = {"role": "assistant", "id": "msg_1", "status": "completed", "type": "message"}
SAID["content"] = [{"type": "output_text", "text": "Ho", "annotations": []}]
GIVEN = [
    {"role": "developer", "content": "Be short."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    *(SAID, ASKED),
]


@pytest.mark.parametrize(
    ("given", "instructions", "texts"),
    [
        ([ASKED], None, {}),
        (QUESTION, "Be short.", {"system": "Be short."}),
        (GIVEN, None, {"system": "Be short.", "user": "Hi", "assistant": "Ho"}),
    ],
)
def test_an_input_in_each_form_is_a_conversation(given, instructions, texts, client):
    messages = [*({"role": role, "content": text} for role, text in texts.items()), ASKED]
    chat = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    response = client.responses.create(model="demo", input=given, instructions=instructions, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object, response.model) == ("completed", "response", "demo")
    usage, expected = response.usage, chat.usage
    assert (usage.input_tokens, usage.output_tokens) == (expected.prompt_tokens, expected.completion_tokens)
    assert usage.total_tokens == expected.total_tokens
    assert (response.instructions, response.temperature) == (instructions, 0)


def test_vllm_s_sampling_parameters_are_taken_too(client):
    extra = {"ignore_eos": True, "stop": None, "top_k": 1}
    response = client.responses.create(model="demo", input=QUESTION, max_output_tokens=20, extra_body=extra)
    assert response.usage.output_tokens == 20
    assert response.output_text.startswith(ANSWER)


def test_text_format_selects_structured_outputs(client):
    class Sum(pydantic.BaseModel):
        model_config = {"extra": "forbid"}
        a: int = pydantic.Field(ge=0, le=99)

    parsed = client.responses.parse(model="demo", input=QUESTION, text_format=Sum).output_parsed
    assert isinstance(parsed, Sum)


@pytest.mark.parametrize("max_output_tokens", [None, 3])
def test_a_stream_s_events_are_in_order_and_end_with_the_whole_response(max_output_tokens, serving, client):
    asked = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": max_output_tokens}
    whole = client.responses.create(**asked)
    assert (whole.usage.output_tokens == 3) == (max_output_tokens == 3)
    reason = whole.incomplete_details and whole.incomplete_details.reason
    ends = ("incomplete", "max_output_tokens") if max_output_tokens else ("completed", None)
    assert (whole.status, reason) == ends
    assert whole.output[-1].status == whole.status
    with paced_steps(serving[1].engine):
        events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events[4:-4]]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert {event.response.id for event in (events[0], events[-1])} == {events[0].response.id}


NUMBERS = {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "ab"}
ADD: dict = {"type": "function", "name": "add", "description": None, "strict": True}
ADD["parameters"] = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}


def test_a_function_is_called_and_its_output_is_part_of_the_next_input(client):
    asked = {"model": "demo", "temperature": 0, "tools": [ADD]}
    once = {"tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(**asked, input=QUESTION, **once)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "add")
    assert call.status == first.status == "completed"
    assert json.loads(call.arguments).keys() == {"a", "b"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "85"}
    said = {"role": "assistant", "content": "So:"}
    given = [{"role": "user", "content": QUESTION}, said, call, result]
    second = client.responses.create(**asked, input=given, reasoning={"effort": "low", "summary": "auto"})
    function = {"name": "add", "arguments": call.arguments}
    calls = {"tool_calls": [{"id": call.call_id, "type": "function", "function": function}]}
    messages = [given[0], said | calls, {"role": "tool", "tool_call_id": call.call_id, "content": "85"}]
    chat = client.chat.completions.create(model="demo", temperature=0, messages=messages)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.tools[0].name == "add"


def test_the_items_of_a_stream_are_text_and_calls_in_order():
    stream = ResponseStream(ResponsesRequest(input=QUESTION), Ticket("1", "POST", "/v1/responses"), "demo")
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    pieces = [{"content": "So"}, {"content": ":"}, {"content": None, "tool_calls": [call]}, {"content": "!"}]
    events = [event for piece in pieces for event in stream.piece(piece)]
    events += stream.end({"finish_reason": "stop"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    message = ["output_item.added", "content_part.added", "output_text.delta"]
    end = ["output_text.done", "content_part.done", "output_item.done"]
    called = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", end[-1]]
    assert kinds == [*message, "output_text.delta", *end, *called, *message, *end, "completed"]
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == output
    begun = [event["item"] for event in events if event["type"].endswith("item.added")]
    assert [item["id"] for item in begun] == [item["id"] for item in output]
    assert len({item["id"] for item in output}) == 3
    assert [event["output_index"] for event in events[:-1]] == [0] * 7 + [1] * 4 + [2] * 6
    assert [item["content"][0]["text"] for item in (output[0], output[2])] == ["So:", "!"]
    expected = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
    assert output[1] == {**expected, "id": "fc_call_1", "status": "completed"}
    assert begun[1] == output[1] | {"arguments": "", "status": "in_progress"}


def test_noop_values_are_accepted(client):
    off = {"top_p": 1.0, "background": False, "include": [], "metadata": {"a": "b"}, "store": False}
    off |= {"parallel_tool_calls": True, "previous_response_id": None, "reasoning": {}, "tool_choice": "auto"}
    off |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled"}
    off |= {"tools": [], "user": "me"}
    response = client.responses.create(model="demo", input=QUESTION, temperature=0, **off)
    assert response.output_text == ANSWER


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the conversation as input"),
        ({"tools": [{"name": "add"}]}, "tools", "tools must hold objects with a type, got"),
        ({"include": ["message.output_text.logprobs"]}, "include", "include=.* is not supported"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools", "tools must hold .*name"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"reasoning": {"budget": 9}}, "reasoning", "has no argument 'budget'"),
        ({"text": {"verbosity": "low"}}, "text", "ask for it in a message"),
        ({"text": {"format": {"type": "yaml"}}}, "response_format", "must be of type text, json_object"),
        ({"text": {"format": 5}}, "text", "text.format must be an object, got 5"),
        ({"store": True}, "store", "store=True is not supported"),
        ({"top_kk": 5}, "top_kk", "has no argument 'top_kk'; did you mean 'top_k'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", r"temperature must be a number in \[0"),
        ({"model": "gpt-9"}, "model", "does not exist"),
        ({"input": []}, "input", "input must be text or a list of messages"),
        ({"input": None}, "input", "input must be text"),
        ({"input": "a" * 10_000}, "input", "prompt has 10"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", r"input\[0\].role must be one of user"),
        ({"input": [{"type": "function_call_output"}]}, "input", r"input\[0\] must be a message or a"),
        ({"input": [{"role": "user", "content": 5}]}, "input", r"input\[0\].content must be text .*got 5"),
        ({"input": [{"role": "user"}]}, "input", r"input\[0\].content must be text"),
        ({"input": [ASKED | {"content": [{"type": "input_image"}]}]}, "input", "of type input_text, got"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_fields_are_refused_by_name(fields, param, message, stream, url):
    answer = http.post(f"{url}/v1/responses", json={"input": QUESTION, "stream": stream, **fields})
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["param"] == param
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])


def test_a_failed_request_ends_the_stream_with_an_error(service, client):
    with failing_calls(service.engine.llm_engine.runner, "launch", range(99)):
        events = list(client.responses.create(model="demo", input=QUESTION, stream=True))
        assert events[-1].type == "error"
        assert "could not compute this request" in events[-1].message
        with pytest.raises(openai.InternalServerError, match="could not compute this request"):
            client.responses.create(model="demo", input=QUESTION)
