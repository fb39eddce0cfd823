"""Tool calls and reasoning: a model's own tags as fields of OpenAI's messages, whole and in pieces."""

import itertools
import json
import re
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanoengine import LLM, SamplingParams, StructuredOutputsParams
from nanoengine.chat.answer_parser import TOOL_FORMATS, AnswerParser, Formats, choose_formats
from nanoengine.chat.tool_choice import ToolChoice
from nanoengine.server.openai_api import ChatRequest, CompletionRequest
from tests.helpers import DEMO, byte_tokenizer, slow, table_checkpoint
from tests.serving import scripted

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def function_of(name, properties, required, **more):
    """Return a function with these parameters, as a tool."""
    parameters = {"type": "object", "properties": properties, "required": required}
    parameters |= {"additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NUMBERS = {"a": NUMBER, "b": NUMBER, "note": {"type": "string", "maxLength": 9}}
ADD: dict = function_of("add", NUMBERS, ["a", "b"])
PARAMETERS_OF_ADD: dict = ADD["function"]["parameters"]
CALL = ("tool_calls", {"name": "add", "arguments": {"a": 5, "b": 6}})
CODER = "<tool_call>\n<function=add>\n"


def written():
    """Yield (formats and the end of the prompt, text, its parts) of each answer in answers.txt."""
    sections = Path(__file__).with_name("answers.txt").read_text().removesuffix("\n").split("\n== ")
    for head, _, lines in (section.partition("\n") for section in sections[1:]):
        names, _, prompt = head.partition(" after ")
        calls, reasoning = (*names.split(), None)[:2]
        text, *parts = lines.split("\n>> ")
        values = [(name, json.loads(value)) for name, value in (part.split(" ", 1) for part in parts)]
        expected = [
            (name, value) if isinstance(value, str) else ("tool_calls", {"name": name, "arguments": value})
            for name, value in values
        ]
        formats = calls, reasoning, json.loads(prompt or '""')
        yield formats, text, expected or [("content", text)]


WRITTEN = [*written()]


def taken_apart(parser, pieces):
    found: list[tuple] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        if part.kind == "tool_calls":
            found.append((part.kind, {**part.value, "arguments": json.loads(part.value["arguments"])}))
        elif found and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + part.value)
        else:
            found.append((part.kind, part.value))
    return found


def parser_of(calls, reasoning=None, prompt="", tools=(ADD,), **settings):
    return AnswerParser(Formats(calls, reasoning, None, {}), prompt, [*tools], **settings)


def split(text, cuts):
    """Return the parts of a text between these places."""
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("formats", "text", "expected"), WRITTEN, ids=range(len(WRITTEN)))
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_size_of_pieces_does_not_change_the_parsed_answer(formats, text, expected, data):
    assert taken_apart(parser_of(*formats), [text]) == expected
    assert taken_apart(parser_of(*formats), text) == expected, "a character at a time"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert taken_apart(parser_of(*formats), split(text, cuts)) == expected


EXAMPLE = f"{CODER}<parameter=a>\n1\n</parameter>\n<parameter=b>2</parameter>\n</function>\n</tool_call>"
CODER_END = "</function>\n</tool_call>"
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
# A call with a string argument, as each format writes it
CALLS = {
    "hermes": lambda note: f"<tool_call>\n{noted(note)}\n</tool_call>\n",
    "qwen3_coder": lambda note: f"{CODER}<parameter=note>\n{note}\n</parameter>\n{CODER_END}\n",
    "mistral": lambda note: "[TOOL_CALLS]add[ARGS]" + json.dumps({"note": note}, ensure_ascii=False),
    "mistral list": lambda note: f"[TOOL_CALLS][{noted(note)}]",
    "harmony": lambda note: f"{TO_ADD}{json.dumps({'note': note})}<|call|>",
    "gemma4": lambda note: f'<|tool_call>call:add{{note:<|"|>{note}<|"|>}}<tool_call|>',
    "functiongemma": lambda note: (
        f"<start_function_call>call:add{{note:<escape>{note}<escape>}}<end_function_call>"
    ),
    "llama3_json": lambda note: json.dumps({"name": "add", "parameters": {"note": note}}),
}
ALONE = ("llama3_json",)  # a call is the whole answer


def noted(note):
    return json.dumps({"name": "add", "arguments": {"note": note}}, ensure_ascii=False)


TAGS_OF_VALUES = "<tool_call> </tool_call> <function=add> </function> <parameter=b> </parameter> [ARGS] "
TAGS_OF_VALUES += '[TOOL_CALLS] <|call|> <|end|> <|channel|> <|message|> <|"|> <|tool_call> <tool_call|> '
TAGS_OF_VALUES += "<think> </think> <escape> <|python_tag|> <start_function_call> <end_function_call>"
WORDS_OF_VALUES = ["a", " ", "\n", '"', "\\", "'", "{", "}", "[1]", "\u00e9", EXAMPLE, CODER_END]
WORDS_OF_VALUES += [*TAGS_OF_VALUES.split(), *(write("x") for write in list(CALLS.values())[2:])]


def can_be_written(calls, value):
    """Return whether a format's own rules tell where the value ends."""
    if calls in ("gemma4", "functiongemma"):  # they have no escapes
        return ('<|"|>' if calls == "gemma4" else "<escape>") not in value
    if calls != "qwen3_coder":
        return True
    rest = value.replace(EXAMPLE, "")
    is_clear = not re.search(r"</parameter>\s*(<parameter=|</function>\s*</tool_call>|\Z)", rest)
    begins_another = re.search(r"<tool_call>\s*<function=", rest) or (rest != value and CODER_END in rest)
    return is_clear and not begins_another


@pytest.mark.parametrize("calls", CALLS)
@settings(max_examples=40, deadline=None)
@example(values=["A parameter ends with </parameter> here."], cuts=[])
@example(values=["echo '</tool_call>'", "[TOOL_CALLS]", "<tool_call|>"], cuts=[9])
@example(values=[f"Calls look like {EXAMPLE} or {EXAMPLE}.", f"They end with {CODER_END}, always."], cuts=[])
@example(values=["".join(WORDS_OF_VALUES[12:])], cuts=[30, 60])
@given(
    values=st.lists(
        st.lists(st.sampled_from(WORDS_OF_VALUES), max_size=8).map("".join), min_size=1, max_size=3
    ),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_an_argument_may_contain_any_tag(calls, values, cuts):
    assume(all(can_be_written(calls, value) for value in values))
    values = values[:1] if calls in ALONE else values
    text = "".join(map(CALLS[calls], values))
    expected = [("tool_calls", {"name": "add", "arguments": {"note": value}}) for value in values]
    for parts in ([text], text, split(text, cuts)):
        assert taken_apart(parser_of(calls.split()[0]), parts) == expected


@pytest.mark.parametrize(
    ("calls", "unread"),
    [
        ("hermes", '<tool_call>{"name": "add</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"note": "</tool_call>'),
        ("hermes", '<tool_call>{"name": "add\\</tool_call>'),
        ("qwen3_coder", f"{CODER}<parameter=note>\n5\n{CODER_END}"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"note": "5'),
        ("gemma4", '<|tool_call>call:add{note:<|"|>5<tool_call|>'),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"note": "5<|call|>'),
    ],
)
@pytest.mark.parametrize("between", ["", " and\n"])
def test_a_call_after_one_that_is_not_closed_is_still_read(calls, unread, between):
    """The first has a value without an end. It stays text up to its first end tag."""
    between = "" if calls == "harmony" else between  # between its messages there is no text
    text = unread + between + CALLS[calls]("x")
    call = ("tool_calls", {"name": "add", "arguments": {"note": "x"}})
    expected = [("content", unread + between.rstrip()), call]
    for parts in ([text], text, [text[:30], text[30:]]):
        found = taken_apart(parser_of(calls), parts)
        assert [(kind, value.rstrip() if kind == "content" else value) for kind, value in found] == expected


@pytest.mark.parametrize("calls", [one for one in CALLS if one not in ALONE])
@pytest.mark.parametrize(
    ("around", "are_calls"),
    [
        ("So:\n```xml\n#\n```\nDone.", [False]),
        ("```\n#\n#\n```", [False, False]),
        ("~~~~\n#\n~~~\n```\n#\n~~~~~ \n#", [False, False, True]),
        ("```\n#\n```\n```\n#\n", [False, True]),  # the second block has no end
        ("```\n#\n```json\n#\n````", [False, False]),
        ("```\nx\n```\n#", [True]),
        ("a ```x``` b\n#", [True]),
        ("```x``` b\n#", [True]),
    ],
)
def test_a_call_in_a_closed_code_block_is_text(calls, around, are_calls):
    numbers = itertools.count()
    text = re.sub("#", lambda _: CALLS[calls](f"w{next(numbers)}"), around)
    expected = taken_apart(parser_of(calls.split()[0]), [text])
    found = [value["arguments"]["note"] for kind, value in expected if kind == "tool_calls"]
    assert found == [f"w{i}" for i, is_call in enumerate(are_calls) if is_call]
    said = "".join(value for kind, value in expected if kind == "content")
    assert re.findall(r"w\d", said) == [f"w{i}" for i, is_call in enumerate(are_calls) if not is_call]
    for size in (1, 7, 30):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert taken_apart(parser_of(calls.split()[0]), pieces) == expected


def test_without_tools_text_like_a_call_stays_text():
    for calls in TOOL_FORMATS:
        text = CALLS[calls]("x")
        assert taken_apart(parser_of(calls, tools=()), [text]) == [("content", text)]


TAGS_OF_ANSWERS = '{ } " ] "}} ; ``` ~~~~ json <|channel> <channel|> analysis final commentary '
TAGS_OF_ANSWERS += '<|start|>assistant <|return|> <|constrain|> note:<|"|> [CALL_ID] call:add{ note:<escape> '
WORDS_OF_ANSWERS = ["\n", "\n```\n", " ", "thought\n", '{"name": "add", "arguments": {"note": "', " to=add"]
WORDS_OF_ANSWERS += [" to=functions.add", CODER, CODER_END, "<parameter=note>\n", '{"note": "', "<escape>}"]
WORDS_OF_ANSWERS += TAGS_OF_ANSWERS.split()
WORDS_OF_ANSWERS += [word for word in WORDS_OF_VALUES if word[0] in "<["]

MARKERS = {
    "deepseek_r1": r"\s*</?think>\s*",
    "harmony": r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary|final)[^#]{0,40}?<\|message\|>"
    r"|<\|end\|>|<\|return\|>",
    "gemma4": r"<\|channel>thought\n|<channel\|>",
}


@pytest.mark.parametrize("calls", TOOL_FORMATS)
@settings(max_examples=90, deadline=None)
@example(words=["<|channel|>final <|constrain|>json<|message|>#"], cuts=[], prompt="")
@example(words=["#\n</think>\n# <think> #"], cuts=[], prompt="<think>\n")
@example(words=[f"{CODER}#<parameter=note>#</parameter>#\n{CODER_END}"], cuts=[], prompt="")
@given(
    words=st.lists(
        st.one_of(*map(st.sampled_from, (["#"], ["a call", "half a call", "\n```\n"], WORDS_OF_ANSWERS))),
        max_size=20,
    ),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    prompt=st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
)
def test_nothing_that_the_model_said_is_lost(calls, words, cuts, prompt):
    """Each character belongs to a call, to the content, to a thought or to a tag around these, in order.

    The numbered words of calls are in their arguments.
    """
    reasoning = calls if calls in MARKERS else "deepseek_r1"
    numbers, call = itertools.count(), CALLS[calls]("#")
    words = [{"a call": call, "half a call": call[:-9]}.get(word, word) for word in words]
    text = re.sub("#", lambda _: f"w{next(numbers)}.", "".join(words))
    found = taken_apart(parser_of(calls, reasoning, prompt), split(text, cuts))
    assert found == taken_apart(parser_of(calls, reasoning, prompt), [text])
    said = "".join(json.dumps(value) if isinstance(value, dict) else value for _, value in found)
    assert re.findall(r"w\d+\.", said) == [f"w{i}." for i in range(next(numbers))]
    parser = parser_of(calls, reasoning, prompt)
    parts = [*parser.feed(text), *parser.finish()]
    spans = (re.escape(part.text if part.kind == "tool_calls" else part.value) for part in parts)
    tags = f"(?:{MARKERS[reasoning]})*"
    assert re.fullmatch(tags.join([r"\s*", *spans, ""]), text)  # the prompt may end with a tag


def test_a_tokenizer_s_own_template_takes_precedence():
    function = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    calls = {"open_pattern": r"\[call (?P<name>\w+)\]", "close": "[/call]", "repeats": True}
    fields = {"thinking": {"open": "[think]", "close": "[/think]"}, "content": {"close": "[end]"}}
    fields["tool_calls"] = calls | {"content": "json", "transform": function}
    own = {"defaults": {"role": "assistant"}, "start_anchor": "<bot>", "fields": fields}
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.response_template = own
    formats = choose_formats(tokenizer)
    assert "response_template" in formats.describe()
    assert formats.keeps_special_tokens
    text = 'Hm[/think]Yes[call add]{"a": 5, "b": 6}[/call][call add]{no[/call]'
    parser = AnswerParser(formats, "a [think] from long ago <bot>[think]", [ADD])
    said = [("reasoning", "Hm"), ("content", "Yes"), CALL, ("content", "[call add]{no[/call]")]
    assert taken_apart(parser, text) == said
    text = '[call add]{"a": 5}[/call]'
    assert taken_apart(AnswerParser(formats, "<bot>", []), text) == [("content", text)], "no tools were shown"
    assert choose_formats(tokenizer, "hermes").template is None
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ValueError, match="response_template cannot be read"):
        choose_formats(tokenizer)


def test_a_required_call_is_json_where_a_format_has_no_grammar():
    text = 'Hm.</think>\n\n{"name": "add", "parameters": {"a": 5, "b": 6}}'
    for calls in (None, "mistral", "harmony"):
        parser = parser_of(calls, "deepseek_r1", "<think>\n", forced=True)
        assert taken_apart(parser, text) == [("reasoning", "Hm."), CALL]


def test_structured_output_is_unchanged_content():
    text = '{"t": "<think>x</think><tool_call>{}</tool_call>", "name": "Bob"}'
    for calls in TOOL_FORMATS:
        for written, thought in ((text, []), (f"<think>Hm.</think>{text}", [("reasoning", "Hm.")])):
            parser = parser_of(calls, "deepseek_r1", is_structured=True)
            assert taken_apart(parser, written) == [*thought, ("content", text)]


@pytest.mark.parametrize(
    ("calls", "beginning", "unit"),
    [
        ("harmony", " to=functions.", "a"),
        ("harmony", "", "<|channel|>"),
        ("harmony", "", "<|channel|>final<|message|>a<|end|>"),
        *(("hermes", "", one) for one in ("\n", "<tool_call>", '<tool_call>\\"</tool_call>')),
        *(("hermes", "", f"<tool_call>{one}</tool_call>") for one in ("{}", '"')),
        ("hermes", "```\n", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        ("hermes", "```", "`"),
        ("hermes", "", '<tool_call>{"a</tool_call>\\n'),
        *(("hermes", '<tool_call>{"a": "', f"</tool_call>{one}") for one in ("", '<tool_call>"')),
        ("gemma4", "", '<|tool_call>call:add{a:<|"|><tool_call|>'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "', "[TOOL_CALLS]"),
        ("qwen3_coder", CODER + "<parameter=a>", CODER + "<parameter=a>" + CODER_END),
        *(("qwen3_coder", CODER + "<parameter=a>", one) for one in (CODER_END, "</parameter>")),
        *(("mistral", *one) for one in (("[TOOL_CALLS]", "a"), ("", "[TOOL_CALLS]a[ARGS]{}"))),
        *(("qwen3_coder", CODER, f"<parameter={one}") for one in ("a>\n", "", "a>5</parameter>")),
        ("qwen3_coder", "", "<tool_call><function=add></function></tool_call>"),
        ("gemma4", "<|tool_call>call:add{", 'a:<|"|>x<|"|>,'),
        ("functiongemma", "<start_function_call>call:add{", "a:<escape>x<escape>,"),
        ("llama3_json", "", "{"),
        ("llama3_json", "{", '"a":1,'),
    ],
)
@pytest.mark.parametrize("piece", [16, 1 << 30])
def test_no_text_takes_quadratic_time(calls, beginning, unit, piece):
    """Eight times as much takes about eight times as long; 64 times, if it were quadratic."""

    def seconds(size):
        parser, start = parser_of(calls, "deepseek_r1"), time.thread_time()
        text = beginning + unit * (size // len(unit)) + "x"
        for i in range(0, len(text), piece):
            parser.feed(text[i : i + piece])
        parser.finish()
        return time.thread_time() - start

    size = 5_000
    limit = 24 * min(seconds(size) for _ in range(3)) + 0.002
    assert any(seconds(8 * size) < limit for _ in range(2))


OPTIONAL = [{"type": "integer"}, {"type": "null"}]
NOT_JSON = "{1,2}", "b'x'", "...", "1e999", "{[1]}", "{(1, 2): 3}", "[1, b'x']"  # as Python, such as a set


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"anyOf": OPTIONAL}, {"7": 7, "null": None, "None": None, "x": "x"}),
        ({"oneOf": OPTIONAL}, {"7": 7, "null": None}),
        ({"allOf": [{"type": "integer"}, {"minimum": 0}]}, {"7": 7}),
        ({"$ref": "#/$defs/count"}, {"7": 7}),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, {"7": 7, "null": None}),
        ({"enum": [1, 2.5, None]}, {"1": 1, "2.5": 2.5, "null": None}),
        ({"enum": ["1", "2"]}, {"1": "1"}),
        ({"const": True}, {"true": True, "True": True}),
        ({"const": "7"}, {"7": "7"}),
        ({"properties": {"x": {}}}, {'{"x": 1}': {"x": 1}}),
        ({"items": {"type": "string"}}, {'["a"]': ["a"]}),
        ({"additionalProperties": {"type": "integer"}}, {'{"x": 1}': {"x": 1}}),
        ({"required": ["x"]}, {'{"x": 1}': {"x": 1}}),
        ({"minItems": 1}, {"[1]": [1]}),
        ({"minimum": 0}, {"7": 7, "x": "x"}),
        ({"type": ["string", "null"]}, {"null": None, "7": "7", '"a"': '"a"', "[1]": "[1]"}),
        ({"type": ["string", "integer"]}, {"7": 7, "7.5": "7.5", "true": "true"}),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, {"[1]": [1], '["a': '["a', "(1,)": [1]}),
        ({"type": "number"}, {"7": 7, "7.5": 7.5}),
        ({"type": "array"}, {one: one for one in NOT_JSON}),
        *((one, {"7": "7", "null": "null"}) for one in ({}, {"description": "d"}, True, {"type": "string"})),
        ({"$ref": "#/properties/x"}, {"7": "7"}),
        ({"allOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}, *OPTIONAL]}, {"7": 7}),
    ],
    ids=str,
)
def test_arguments_written_as_text_get_the_types_of_their_schema(schema, written):
    """In calls that are JSON, a string is a string."""
    definitions = {"count": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 30}}
    parameters = {"type": "object", "$defs": definitions, "properties": {"x": schema}}
    for more in ({}, {"properties": {}, "additionalProperties": schema}):
        if more and "#/properties" in str(schema):
            continue
        tool = {"type": "function", "function": {"name": "add", "parameters": parameters | more}}
        for text, value in written.items():
            call = f"{CODER}<parameter=x>\n{text}\n</parameter>\n{CODER_END}"
            found = taken_apart(parser_of("qwen3_coder", tools=[tool]), [call])
            assert found == [("tool_calls", {"name": "add", "arguments": {"x": value}})]
            call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'x': text}})}</tool_call>"
            ((_, read),) = taken_apart(parser_of("hermes", tools=[tool]), [call])
            if "string" in str(schema.get("type")) if isinstance(schema, dict) else True:
                assert read["arguments"] == {"x": text}


def test_a_template_whose_regions_open_and_close_without_text_ends():
    thinking = {"open_pattern": "(?=x)", "close_pattern": "(?=x)"}
    own = {"start_anchor": "<bot>", "fields": {"thinking": thinking, "content": {}}}
    parser = AnswerParser(Formats(None, None, own, {}), "<bot>", [])
    assert "".join(value for _, value in taken_apart(parser, "axb")) == "axb"


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{# no tools #}", None, None),
        ("<tool_call> <think>", "hermes", "deepseek_r1"),
        ("<tool_call> <function=", "qwen3_coder", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("<|python_tag|>", "llama3_json", None),
        ("<|channel|>analysis", "harmony", "harmony"),
        ("<|tool_call> <|channel>", "gemma4", "gemma4"),
        ("<start_function_call>", "functiongemma", None),
        ("<think> <tool_call>{{ name }}<arg_key>k</arg_key>", None, "deepseek_r1"),  # not in hermes' JSON
    ],
)
def test_the_chat_template_selects_the_formats(template, calls, reasoning):
    tokenizer = AutoTokenizer.from_pretrained(DEMO, chat_template=template)
    formats = choose_formats(tokenizer)
    assert formats[:2] == (calls, reasoning)
    assert str(calls or "left as text") in formats.describe()
    assert choose_formats(tokenizer, "none", "none")[:2] == (None, None)
    assert choose_formats(tokenizer, "openai", "qwen3")[:2] == ("harmony", "deepseek_r1")
    for names in (("unheard-of", "auto"), ("auto", "unheard-of")):
        with pytest.raises(ValueError, match=r"must be auto, none or one of .*got 'unheard-of'"):
            choose_formats(tokenizer, *names)


# A mark of the chat template of each model whose added tokens the tests know
MARKS = {"Qwen 3": "<tool_call> <think>", "Llama 3.1": "<|python_tag|>", "Mistral": "[TOOL_CALLS]"}
MARKS |= {"Gemma 3": "", "gpt-oss": "<|channel|>", "DeepSeek R1": "<think>"}


@pytest.mark.parametrize(
    "model", ["Qwen 3", "Mistral", "gpt-oss", *slow("Llama 3.1", "Gemma 3", "DeepSeek R1")]
)
def test_calls_and_json_are_enforced_with_the_added_tokens_of_real_models(model, tmp_path):
    """After thinking, too: the end of a thought is a token of its own, and no special one."""
    tokenizer = byte_tokenizer((), model)
    tokenizer.chat_template = MARKS[model]
    formats, size = choose_formats(tokenizer), len(tokenizer)
    logits = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    if formats.reasoning == "deepseek_r1":
        logits[:, tokenizer.convert_tokens_to_ids("</think>")] += 4
    path = table_checkpoint(tmp_path, logits, (), model)
    wanted = StructuredOutputsParams(json=PARAMETERS_OF_ADD)
    with LLM(path, num_kv_blocks=100, max_model_len=512) as llm:
        for prompt in ("Hi", *(formats.reasoning == "deepseek_r1") * ("Hi<think>\n", "Hi<think></think>\n")):
            for choice, asked in (("required", None), ("none", wanted)):
                constrained = ToolChoice.read([ADD], choice).constrain(asked, formats, prompt, False)
                params = SamplingParams(
                    **{"n": 4, "seed": 1, "max_tokens": 300, "structured_outputs": constrained},
                    skip_special_tokens=not formats.keeps_special_tokens,
                )
                (output,) = llm.generate(prompt, params, use_tqdm=False)
                ended = [one.text for one in output.outputs if one.finish_reason == "stop"]
                assert ended, [one.text for one in output.outputs]
                for text in ended:
                    parser = AnswerParser(formats, prompt, [ADD], asked is None, asked is not None)
                    *thoughts, (kind, value) = taken_apart(parser, [text])
                    assert [kind for kind, _ in thoughts] in ([], ["reasoning"]), text
                    assert not (thoughts and "</think>" in prompt)
                    assert kind == ("tool_calls" if asked is None else "content"), text
                    given = value["arguments"] if asked is None else json.loads(value)
                    jsonschema.validate(given, PARAMETERS_OF_ADD)


@pytest.fixture(scope="module")
def serving(script, tmp_path_factory):
    with scripted(script, tmp_path_factory.mktemp("tools") / "model", layers=4) as found:
        yield found


CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
ASKED: dict = {"model": "demo", "messages": [{"role": "user", "content": "What are 2 and 40?"}]}


def test_openai_s_stream_helper_reads_calls_and_reasoning(client, script):
    script.says = {"2 and 40": f"<think>\nI add.\n</think>\n\nSo:\n{CALL_TEXT}\n{CALL_TEXT}"}
    settings = ASKED | {"tools": [ADD], "max_tokens": 200}
    whole = client.chat.completions.create(**settings).choices[0]
    with client.chat.completions.stream(**settings) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    for message in (final.message, whole.message):
        assert (message.content, message.role) == ("So:", "assistant")
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 2, "b": 40}] * 2
        assert len({call.id for call in message.tool_calls}) == 2
    assert whole.message.reasoning == whole.message.reasoning_content == "I add."
    done = [event.name for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done == ["add", "add"]
    deltas = [one.chunk.choices[0].delta for one in events if one.type == "chunk" and one.chunk.choices]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I add."
    one = client.chat.completions.create(**settings, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1


def test_with_tool_choice_none_tools_are_not_shown_and_calls_not_parsed(client, script):
    script.says = {"2 and 40": CALL_TEXT}
    settings = ASKED | {"max_tokens": 99}
    plain = client.chat.completions.create(**settings)
    none = client.chat.completions.create(**settings, tools=[ADD], tool_choice="none")
    assert none.choices[0].message.content == plain.choices[0].message.content == CALL_TEXT
    assert none.choices[0].finish_reason == "stop"
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    shown = client.chat.completions.create(**settings, tools=[ADD])
    assert shown.usage.prompt_tokens > plain.usage.prompt_tokens


WORD = {"word": {"enum": ["yes", "no"]}}
OTHER: dict = function_of("tell", {"what": {"$ref": "#/$defs/word"}}, ["what"], **{"$defs": WORD})
SCHEMAS: dict = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (ADD, OTHER)}


@pytest.mark.parametrize("thinking", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell"}}])
def test_a_required_call_is_made(choice, thinking, client, script):
    """The model is steered to something else, and may think before the call."""
    script.says = {"Hello": "I think</think>\n\n{" if thinking else "I would rather talk."}
    answer = client.chat.completions.create(
        **{"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "tools": [ADD, OTHER]},
        **{"tool_choice": choice, "parallel_tool_calls": False},
        **{"temperature": 2.0, "seed": 0, "n": 3, "max_tokens": 150},
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
    )
    names = set()
    for one in answer.choices:
        if one.finish_reason != "length":
            assert one.finish_reason == "tool_calls"
            (call,) = one.message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            names.add(call.function.name)
            assert getattr(one.message, "reasoning", None) == ("I think" if thinking else None)
    assert names
    assert choice == "required" or names == {"tell"}


TAG: dict = {"type": "structural_tag", "structures": [], "triggers": []}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, {"json": {"const": 1}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, {"json": {}}),
        ({"response_format": TAG}, {"structural_tag": TAG}),
        ({"structured_outputs": {"regex": "[ab]{4}"}}, {"regex": "[ab]{4}"}),
        ({"structured_outputs": {"choice": ["red"]}}, {"choice": ["red"]}),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, {"grammar": 'root ::= "x"'}),
    ],
    ids=range(8),
)
def test_every_spelling_of_structured_outputs_is_read(fields, expected):
    for body in ChatRequest(messages=[], **fields), CompletionRequest(prompt="Hi", **fields):
        asked = body.params(SamplingParams(), None).structured_outputs
        assert asked == (expected and StructuredOutputsParams(**expected))


@pytest.mark.parametrize(
    ("calls", "reasoning", "special", "tools", "keeps"),
    [
        ("hermes", None, {"<tool_call>": 5}, [ADD], True),
        ("hermes", None, {"<eos>": 5}, [ADD], False),
        ("hermes", None, {"<tool_call>": 5}, [], False),
        (None, "deepseek_r1", {"</think>": 5}, [], True),
        ("llama3_json", None, {"<|python_tag|>": 5}, [ADD], True),
    ],
)
def test_special_tokens_stay_in_the_text_if_they_are_tags(calls, reasoning, special, tools, keeps):
    request = ChatRequest(messages=[], tools=tools)
    params, _ = request.fit(SamplingParams(), "", Formats(calls, reasoning, None, special))
    assert params.skip_special_tokens is not keeps
