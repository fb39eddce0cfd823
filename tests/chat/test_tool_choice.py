"""Grammars of tool calls: calls of strict tools fit, as each format writes them, and text stays free."""

import json
import re
from functools import partial

import pytest

from nanoengine.chat.answer_parser import TOOL_FORMATS, AnswerParser, Formats, choose_formats
from nanoengine.chat.tool_choice import ToolChoice, required_calls, strict_calls
from nanoengine.extensions.structured.token_masks import Grammars
from nanoengine.sampling_params import StructuredOutputsParams
from tests.chat.test_answer_parser import ADD, function_of
from tests.helpers import byte_tokenizer

KIND = {"anyOf": [{"enum": ["x", "né"]}, {"type": "null"}]}
CODE = {"type": "string", "pattern": "^[a/]+$", "maxLength": 4}
POINT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PLACE = function_of(
    "place.more",
    {"kind": KIND, "at": {"$ref": "#/$defs/point"}, "code": CODE, "note": {"type": "string"}},
    ["kind"],
    **{"$defs": {"point": POINT}},
)
TOTAL = function_of("place", {"n": {"type": "integer"}}, ["n"])
FREE = function_of("free", {"z": {"type": "integer"}}, ["z"])
for strict_tool in (PLACE, TOTAL):
    strict_tool["function"]["strict"] = True
TOOLS = [PLACE, TOTAL, FREE]


def write(text, name, given):
    """Return a call as a model writes it: words of the text stand for the call and its parts."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    pieces = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    call, dumps = {"name": name, "arguments": given}, partial(json.dumps, ensure_ascii=False)
    words = {"@name": name, "@args": dumps(given), "@call": dumps(call), "@pieces": pieces}
    words |= {"@dense": dumps(call, separators=(",", ":")), "@indented": dumps(call, indent=1)}
    words["@params"] = dumps({"name": name, "parameters": given})
    return re.sub("|".join(words), lambda found: words[found[0]], text)


CODER = "<tool_call>\n<function=@name>\n@pieces</function>\n</tool_call>"
HEADER = "<|channel|>commentary to=functions.@name <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>a = b<|end|><|start|>assistant"
# format -> the model of the tokens, how it writes a call, what may come before a call, and after it
WRITERS = {
    "hermes": ("Qwen 3", "<tool_call>\n@call\n</tool_call>", "So: ", "\nDone."),
    "hermes dense": ("Qwen 3", "<tool_call>@dense</tool_call>", "", ""),
    "hermes text": ("", "<tool_call>\n@indented\n</tool_call>", "1 < 2 ", "."),
    "qwen3_coder": ("Qwen 3", CODER, "So:\n", "\nDone."),
    "qwen3_coder text": ("", CODER, "<tool> ", ""),
    "mistral": ("Mistral", "[TOOL_CALLS]@name[ARGS]@args", "So: ", ""),
    "mistral id": ("Mistral", "[TOOL_CALLS]@name[CALL_ID]a1[ARGS]@args", "", ""),
    "mistral list": ("Mistral", "[TOOL_CALLS] [@call]", "", ""),
    "mistral text": ("", "[TOOL_CALLS]@name[ARGS]@args", "[TOOL] ", ""),
    "llama3_json": ("Llama 3.1", "@params", "", ""),
    "llama3_json list": ("Llama 3.1", "[@params]", " ", ""),
    "llama3_json tag": ("Llama 3.1", "<|python_tag|>@params", "", ""),
    "harmony": ("gpt-oss", f"{HEADER}@args<|call|>", THOUGHT, ""),
    "harmony first": ("gpt-oss", " to=@name<|channel|>commentary json<|message|>@args<|call|>", "", ""),
}
FITTING: list[tuple[str, dict]] = [
    ("place.more", {"kind": "né"}),
    ("place.more", {"kind": None, "at": {"n": 5}, "code": "a/a", "note": 'A "b"'}),
    ("place", {"n": -7}),
    ("free", {"any": ["thing"]}),
]
OTHERS: list[tuple[str, dict]] = [
    *(("place.more", given) for given in ({"kind": "y"}, {})),
    *(("place.more", {"kind": "x", "at": at}) for at in ({"n": "5"}, {})),
    *(("place.more", {"kind": "x", "code": code}) for code in ("ab", "aaaaa")),
    *(("place.more", {"kind": "x", "other": 1}), ("placed", {"n": 7})),
    *(("place", {"n": "five"}), ("place", {"n": 7, "m": 7})),
]
PROSE = ["", "No call.", "[1] says {x} = 2", "Ends with <", "1 < 2", "to be"]


@pytest.fixture(scope="module")
def opened():
    """Return a function that returns a model's tokenizer, its grammars, and a writer's format."""
    made: dict = {}

    def opened(name):
        model, calls = WRITERS[name][0], name.split()[0]
        if model not in made:
            tokenizer = byte_tokenizer((), model)
            made[model] = tokenizer, Grammars(tokenizer, len(tokenizer))
        reasoning = "none" if model == "gpt-oss" else "deepseek_r1"
        return *made[model], choose_formats(made[model][0], calls, reasoning)

    yield opened
    for _, grammars in made.values():
        grammars.close()


def accepts(constraint, token_ids):
    return constraint.catch_up(token_ids) and constraint.matcher.is_accepting()


@pytest.mark.parametrize("name", WRITERS)
def test_calls_of_strict_tools_fit_their_schemas(name, opened):
    _, text_of_call, before, after = WRITERS[name]
    tokenizer, grammars, formats = opened(name)
    make = grammars.compile(StructuredOutputsParams(grammar=strict_calls(formats, TOOLS)))

    def is_allowed(text):
        return accepts(make(), tokenizer(text).input_ids)

    for text in PROSE:
        assert is_allowed(text), text
    for call in FITTING:
        assert is_allowed(before + write(text_of_call, *call) + after), call
    for call in OTHERS:
        assert not is_allowed(before + write(text_of_call, *call) + after), call
    if name.split()[0] in ("hermes", "llama3_json") or name == "mistral list":  # calls are objects
        call, brace, end = write(text_of_call, *FITTING[0]).rpartition("}")
        assert not is_allowed(f'{before}{call}, "x": 1{brace}{end}{after}')
    text = before + write(text_of_call, *FITTING[0])
    assert not is_allowed(text[: text.index("né")]), "a call that is not over"
    if "llama" not in name and name != "harmony first":
        assert is_allowed(before + "".join(write(text_of_call, *call) for call in FITTING))
    parser = AnswerParser(formats, "", TOOLS)
    found = [part.value for part in (*parser.feed(text), *parser.finish()) if part.kind == "tool_calls"]
    assert [(one["name"], json.loads(one["arguments"])) for one in found] == [FITTING[0]]


def test_only_strict_tools_have_a_grammar_in_formats_that_have_one():
    for calls in (*TOOL_FORMATS, None):
        formats = Formats(calls, None, None, {})
        assert strict_calls(formats, [FREE]) is None
        assert (strict_calls(formats, TOOLS) is None) == (calls in ("gemma4", "functiongemma", None))
        for choice, num in (("auto", 1), ("none", 0)):
            asked = ToolChoice.read([TOTAL], choice).constrain(None, formats, "", True)
            assert (asked is not None) == (num == 1 and strict_calls(formats, TOOLS) is not None)
    assert strict_calls(Formats("hermes", None, {"fields": {}}, {}), TOOLS) is None


def test_a_thought_may_name_the_tag_of_a_call(opened):
    tokenizer, grammars, formats = opened("hermes")
    thought = "I could write <tool_call> here.</think>\n\n"
    for prompt, text in (("", f"<think>\n{thought}"), ("<think>\n", thought)):
        make = grammars.compile(ToolChoice.read(TOOLS, "auto").constrain(None, formats, prompt, True))
        call = write(WRITERS["hermes"][1], *FITTING[2])
        for rest, fits in (("Hi.", True), (call, True), ("<tool_call>Hi", False)):
            assert make().catch_up(tokenizer(text + rest).input_ids) == fits


def test_a_required_call_has_only_named_arguments():
    parameters = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    for calls in TOOL_FORMATS:
        formats = Formats(calls, None, None, {"<tool_call>": 77})
        grammar = required_calls(formats, [{"function": {"name": "f", "parameters": parameters}}, ADD], True)
        assert grammar.count('"additionalProperties": false') == 5  # of both calls, and what they hold
        assert ("<[77]>" in grammar) == (calls == "hermes"), "a special token by its id"


def test_references_in_a_tool_s_schema_stay_within_it(opened):
    tokenizer, grammars, formats = opened("hermes")
    properties = {"name": {"enum": [1, 2]}, "b": {"$ref": "#/properties/name"}, "c": {"$ref": "#"}}
    parameters = {"properties": properties, "required": ["name", "b"]}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    make = grammars.compile(StructuredOutputsParams(grammar=required_calls(formats, tools, True)))
    inner = {"name": 2, "b": 1}
    for b, c, fits in ((2, inner, True), (3, inner, False), (2, {"name": 2}, False)):
        text = write(WRITERS["hermes"][1], "f", {"name": 1, "b": b, "c": c})
        assert accepts(make(), tokenizer(text).input_ids) == fits
