"""/v1/responses, by OpenAI's own client: the chat's answers in another shape."""

import openai
import pydantic
import pytest

from tests.serving import http, paced_steps

QUESTION = "What is 27 + 58?"
ANSWER = "27 + 58 = 85"


def test_a_response_is_the_chat_s_answer(client):
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    response = client.responses.create(model="demo", input=QUESTION, temperature=0)
    assert response.output_text == chat.choices[0].message.content == ANSWER
    assert (response.status, response.object, response.model) == ("completed", "response", "demo")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.temperature == 0


@pytest.mark.parametrize(
    ("given", "instructions", "messages"),
    [
        ([{"role": "user", "content": QUESTION}], None, [("user", QUESTION)]),
        (QUESTION, "Be short.", [("system", "Be short."), ("user", QUESTION)]),
        (
            [
                {"role": "developer", "content": "Be short."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Ho", "annotations": []}],
                },
                {"role": "user", "content": QUESTION},
            ],
            None,
            [("system", "Be short."), ("user", "Hi"), ("assistant", "Ho"), ("user", QUESTION)],
        ),
    ],
)
def test_an_input_in_each_form_is_a_conversation(given, instructions, messages, client):
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": role, "content": text} for role, text in messages], temperature=0
    )
    response = client.responses.create(model="demo", input=given, instructions=instructions, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.instructions == instructions


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


def test_an_answer_can_be_part_of_the_next_input(client):
    first = client.responses.create(model="demo", input=QUESTION, temperature=0)
    given = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": QUESTION}]
    again = client.responses.create(model="demo", input=given, temperature=0)
    assert again.usage.input_tokens > 2 * first.usage.input_tokens


def test_a_truncated_answer_is_incomplete(client):
    response = client.responses.create(model="demo", input=QUESTION, temperature=0, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3
    assert ANSWER.startswith(response.output_text)


@pytest.mark.parametrize("max_output_tokens", [None, 3])
def test_a_stream_s_events_are_in_order_and_end_with_the_whole_response(max_output_tokens, serving, client):
    asked = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": max_output_tokens}
    whole = client.responses.create(**asked)
    with paced_steps(serving[1].engine):
        events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events[4:-4]]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert {event.response.id for event in (events[0], events[-1])} == {events[0].response.id}


def test_the_client_s_own_stream_helper_gathers_the_text(client):
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == ANSWER


def test_noop_values_are_accepted(client):
    response = client.responses.create(
        model="demo",
        input=QUESTION,
        temperature=0,
        top_p=1.0,
        background=False,
        include=[],
        metadata={"a": "b"},
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning={},
        store=False,
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tool_choice="auto",
        tools=[],
        truncation="disabled",
        user="somebody",
    )
    assert response.output_text == ANSWER


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the conversation as input"),
        ({"tools": [{"type": "function", "name": "add"}]}, "tools", "use /v1/chat/completions with tools"),
        ({"text": {"verbosity": "low"}}, "text", "say it in a message"),
        ({"text": {"format": {"type": "yaml"}}}, "response_format", "must be of type text, json_object"),
        ({"text": {"format": 5}}, "text", "text.format must be an object, got 5"),
        ({"store": True}, "store", "store=True is not served"),
        ({"n": 2}, "n", "has no argument 'n'"),
        ({"top_k": "5"}, "top_k", "top_k must be an integer"),
        ({"top_kk": 5}, "top_kk", "has no argument 'top_kk'; did you mean 'top_k'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", r"temperature must be a number in \[0"),
        ({"model": "gpt-9"}, "model", "does not exist"),
        ({"input": []}, "input", "input must be text or a list of messages"),
        ({"input": None}, "input", "input must be text"),
        ({"input": "a" * 10_000}, "input", "prompt has 10"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", r"input\[0\].role must be one of user"),
        ({"input": [{"type": "function_call_output"}]}, "input", r"input\[0\] must be a message"),
        ({"input": [{"role": "user", "content": 5}]}, "input", r"input\[0\].content must be text .*got 5"),
        ({"input": [{"role": "user"}]}, "input", r"input\[0\].content must be text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            r"input\[0\].content must be text or hold parts of type input_text, got",
        ),
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


def test_a_failed_request_ends_the_stream_with_an_error(serving, client, monkeypatch):
    _, service = serving
    runner = service.engine.llm_engine.runner

    def fail(*args):
        raise RuntimeError

    monkeypatch.setattr(runner, "launch", fail)
    events = list(client.responses.create(model="demo", input=QUESTION, stream=True))
    assert events[-1].type == "error"
    assert "could not compute this request" in events[-1].message
    with pytest.raises(openai.InternalServerError, match="could not compute this request"):
        client.responses.create(model="demo", input=QUESTION)
