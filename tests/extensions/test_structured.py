"""Structured outputs conform, with any other requests in the batch. Oracles are `re` and `jsonschema`."""

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from copy import deepcopy
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine import LLM, SamplingParams, StructuredOutputsParams
from nanoengine.engine import Sequence
from nanoengine.extensions.structured import grammars, token_masks
from nanoengine.extensions.structured.json_schemas import closed
from nanoengine.extensions.structured.token_masks import Constraint, Grammars
from nanoengine.sampling.sampler import SamplingRow
from tests.helpers import ADDED_TOKENS, DEMO, byte_tokenizer, finish, slow, table_checkpoint

SLOW = pytest.mark.slow
PERSON: dict = {"type": "object", "required": ["name", "age"], "additionalProperties": False}
PERSON["properties"] = {
    "name": {"type": "string", "maxLength": 9},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 3},
}


def is_json_of(schema):
    def conforms(text):
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return conforms


# kind -> what is asked for, and whether a text conforms, by other means than llguidance's
LARK = '?start: "<" NUM ["," NUM] ">"\nNUM: /[0-9]{1,2}/'
CHOICES = ["yes", "yes, of course", "né", '"\\']
F = {"begin": "<f>", "schema": {"enum": [1, [2]]}, "end": "</f>"}
KINDS: dict[str, tuple[dict, Any]] = {
    "json": ({"json": PERSON, "disable_any_whitespace": True}, is_json_of(PERSON)),
    "json text": ({"json": json.dumps(PERSON), "whitespace_pattern": " ?"}, is_json_of(PERSON)),
    "json_object": ({"json_object": True, "disable_any_whitespace": True}, is_json_of({"type": "object"})),
    "regex": ({"regex": r"[a-c]{3}-[0-9]{1,3}"}, re.compile(r"[a-c]{3}-[0-9]{1,3}").fullmatch),
    "choice": ({"choice": CHOICES}, CHOICES.count),
    "lark": ({"grammar": LARK}, re.compile(r"<\d\d?(,\d\d?)?>").fullmatch),
    "gbnf": ({"grammar": 'root ::= item+ "!"\nitem ::= [xy] "."'}, re.compile(r"([xy]\.)+!").fullmatch),
    "tags": (
        {"structural_tag": {"structures": [F], "triggers": ["<f"]}},
        re.compile(r"(?s)(?:(?!<f).)*(<f>(1|\[\s*2\s*\])</f>(?:(?!<f).)*)*(<f?)?").fullmatch,
    ),
}
SAMPLING: dict[str, dict] = {
    "as it is": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 2.0},
    "top_k 1": {"temperature": 3.0, "top_k": 1},
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0},
    "min_tokens": {"min_tokens": 40},
    "biases": {"logit_bias": {5: 100.0, 433: -100.0, 70: 50.0}},
    "no special tokens skipped": {"skip_special_tokens": False, "min_p": 0.1},
    "logprobs": {"logprobs": 2, "top_p": 0.9},
}
OFTEN = "as it is", "penalties", "biases"


def asking(kind, seed=0, **others):
    fields = {"temperature": 1.0, "max_tokens": 80, "seed": seed, "structured_outputs": KINDS[kind][0]}
    return SamplingParams(**fields | others)


def compiled(llm, kind):
    return llm.llm_engine._grammars.compile(asking(kind).structured_outputs)().grammar


def answers(llm, params, prompts="Hello"):
    prompts = [prompts] * len(params) if isinstance(prompts, str) else prompts
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(one.text, one.token_ids, one.finish_reason) for out in outputs for one in out.outputs]


def asked_for(asked, number=1, **fields):
    """Return the parameters of so many requests for a structure, with a seed each."""
    return [SamplingParams(seed=i, structured_outputs=asked, **fields) for i in range(number)]


def check(kind, found):
    conforms, num_finished = KINDS[kind][1], 0
    for text, _, reason in found:
        assert reason in ("stop", "length"), text
        if reason == "stop":
            num_finished += 1
            assert conforms(text), f"{text!r} is no {kind}"
    return num_finished


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, num_kv_blocks=400, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def second():
    """Return about a second of processor time, measured with a loop: more on a slower machine."""

    def measure():
        start = time.process_time()
        sum(range(10**6))
        return time.process_time() - start

    return 80 * min(measure() for _ in range(5))


# ---- every answer conforms ----


@pytest.mark.parametrize("sampling", [*OFTEN, *slow(*(x for x in SAMPLING if x not in OFTEN))])
def test_a_finished_answer_matches_its_constraint(sampling, llm):
    pairs = [(kind, seed) for kind in KINDS for seed in range(3)]
    found = answers(llm, [asking(kind, seed, **SAMPLING[sampling]) for kind, seed in pairs])
    for kind in KINDS:
        own = [one for (name, _), one in zip(pairs, found, strict=True) if name == kind]
        assert check(kind, own) >= (0 if kind in ("json_object", "tags") else 1)


def test_in_bfloat16_a_mask_is_the_same_next_to_rows_computed_in_float32():
    params = [asking(kind, temperature=2.0, max_tokens=20) for kind in ("json", "regex", "lark")]
    edited = SamplingParams(temperature=1.0, presence_penalty=0.5, max_tokens=20)
    with LLM(DEMO, num_kv_blocks=100, max_model_len=128, dtype="bfloat16") as llm:
        alone = [answers(llm, [one])[0] for one in params]
        assert answers(llm, [*params, edited])[:-1] == alone


# ---- the same tokens, however they are computed ----


@pytest.fixture(scope="module")
def expected(llm):
    return answers(llm, [asking(kind, 3, temperature=2.0, max_tokens=40) for kind in KINDS])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_blocks": 12, "block_size": 8, "max_num_batched_tokens": 24},
        {"async_scheduling": True, "max_num_seqs": 256},
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 2}, marks=SLOW),
        pytest.param({"enforce_eager": True}, marks=SLOW),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 1}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_scheduling_drafts_and_masks_computed_ahead_change_no_token(changes, expected, monkeypatch):
    params = [asking(kind, 3, temperature=2.0, max_tokens=40) for kind in KINDS]
    with LLM(DEMO, **{"max_model_len": 96, "num_kv_blocks": 400} | changes) as llm:
        assert answers(llm, params) == expected
        metrics = llm.metrics()
        assert (metrics["num_preemptions"] > 0) == ("block_size" in changes)
        if "speculative_config" in changes:
            assert metrics["spec_decode_num_accepted_tokens"] > 20
        monkeypatch.setattr(token_masks, "SLOW_SECONDS", -1.0)  # all are slow from their second mask on
        assert answers(llm, params) == expected
        assert all(compiled(llm, kind).is_slow for kind in KINDS)
        assert llm.metrics()["num_free_blocks"] == llm.metrics()["num_blocks"]


@pytest.mark.parametrize("num_blocks", [400, 8])
def test_a_sequence_whose_mask_is_late_skips_steps_and_delays_no_other(num_blocks, llm, monkeypatch):
    params = asking("regex", 3, temperature=2.0)
    (expected_one,) = answers(llm, [params])
    mask_after, begun, may_end = Constraint._mask_after, threading.Event(), threading.Event()

    def slowly(self, output_ids):
        begun.set()
        assert may_end.wait(60)
        return mask_after(self, output_ids)

    monkeypatch.setattr(Constraint, "_mask_after", slowly)
    monkeypatch.setattr(token_masks, "SLOW_SECONDS", -1.0)
    with LLM(DEMO, num_kv_blocks=num_blocks, block_size=8, max_model_len=64) as llm:
        for name, one in (("late", params), ("free", SamplingParams(max_tokens=30, ignore_eos=True))):
            llm.add_request(name, "Hello", one)
        found = {}
        while "free" not in found:
            found |= {out.request_id: out for out in llm.step() if out.finished}
        assert begun.is_set()
        assert "late" not in found
        llm.add_request("later", "Hello", asking("regex", 4, max_tokens=1))
        while "later" not in found:  # its first mask is known
            found |= {out.request_id: out for out in llm.step() if out.finished}
        may_end.set()
        found |= finish(llm)
        late = found["late"].outputs[0]
        assert (late.text, late.token_ids, late.finish_reason) == expected_one
        assert llm.metrics()["num_steps"] < 40 + 2 * len(late.token_ids), "no empty steps while it waits"


def test_close_ends_the_threads_that_compute_masks_and_the_trial_process_ends_with_the_engine(monkeypatch):
    monkeypatch.setattr(token_masks, "SLOW_SECONDS", -1.0)
    monkeypatch.setattr(token_masks, "Trials", grammars.Trials)  # not a shared one
    before = {*threading.enumerate()}
    with LLM(DEMO, num_kv_blocks=40, max_model_len=64) as llm:
        answers(llm, [asking("regex", 3, temperature=2.0)])
        begun = [one for one in threading.enumerate() if one not in before and "Executor" in one.name]
        process = llm.llm_engine._grammars.trials._process
        assert begun
        assert process.poll() is None
    for thread in begun:
        thread.join(20)
    assert not [thread.name for thread in begun if thread.is_alive()]
    del llm  # a reference to a closed engine keeps no thread alive
    gc.collect()
    assert process.poll() == 0


def test_a_trial_detects_a_slow_grammar(llm, monkeypatch):
    compiler, asked = llm.llm_engine._grammars.compiler, StructuredOutputsParams(regex="a+")
    assert not compiler.compile(asked).is_slow
    monkeypatch.setattr(grammars, "SLOW_SECONDS", -1.0)
    assert compiler.compile(asked).is_slow


def test_tokens_that_a_grammar_forces_become_draft_tokens():
    text = "the only answer there is, word for word"
    drafting = {"method": "ngram", "num_speculative_tokens": 8}
    with LLM(DEMO, num_kv_blocks=40, speculative_config=drafting) as llm:
        ((found, token_ids, _),) = answers(llm, asked_for({"choice": [text]}, max_tokens=60))
        assert found == text
        assert llm.metrics()["num_steps"] < len(token_ids) / 2


def test_drafts_that_a_grammar_forbids_are_not_computed(llm):
    grammars, tokenizer = llm.llm_engine._grammars, llm.get_tokenizer()
    a, b, c = tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    make = grammars.compile(StructuredOutputsParams(regex="a[ab]{3,9}"))
    propose = token_masks.GrammarProposer(lambda seq, num_tokens: [b, a, c, b][:num_tokens], 4)
    seq = Sequence(0, [1, 2], SamplingParams(), processors=(make(),))
    assert propose(seq, 4) == [a], "there is no choice"
    seq.token_ids.append(a)
    assert [propose(seq, n) for n in (1, 2, 3, 4)] == [[b], [b, a], [b, a], [b, a]]
    assert propose(Sequence(1, [1, 2], SamplingParams()), 4) == [b, a, c, b], "without a grammar"
    seq.token_ids.append(c)
    assert propose(seq, 4) == [], "what does not conform is for the sampler to refuse"


# ---- where an answer ends ----


def test_stop_tokens_occur_only_where_the_answer_may_end(llm):
    (one,) = llm.get_tokenizer().encode("1", add_special_tokens=False)
    fields = {"temperature": 2.0, "max_tokens": 40, "ignore_eos": True, "stop_token_ids": [one]}
    found = answers(llm, asked_for({"regex": "[01]{3,20}"}, 20, **fields))
    ended = [text for text, _, reason in found if reason == "stop"]
    assert len(ended) > 10
    assert all(re.fullmatch("0{3,20}", text) for text in ended), "a 1 ends the answer, and is no part of it"
    assert llm.llm_engine.checkpoint.eos_token_ids[0] not in {i for _, ids, _ in found for i in ids}


def test_a_complete_answer_ends_even_if_the_request_bans_its_end(llm):
    eos = llm.llm_engine.checkpoint.eos_token_ids[0]
    for others in {"min_tokens": 30}, {"logit_bias": {eos: -100.0}}, {"allowed_token_ids": list(range(eos))}:
        params = asked_for({"choice": ["ab"]}, max_tokens=40, **others)
        assert answers(llm, params)[0][::2] == ("ab", "stop")


def test_a_ban_on_the_end_holds_where_the_answer_may_go_on(llm):
    bias = dict.fromkeys(llm.llm_engine.checkpoint.eos_token_ids, -1e6)
    banned, least = (
        asked_for({"regex": "a+"}, 6, temperature=100.0, max_tokens=30, **ban)
        for ban in ({"logit_bias": bias}, {"min_tokens": 20})
    )
    assert [len(token_ids) for _, token_ids, _ in answers(llm, banned)] == [30] * 6
    assert all(len(token_ids) > 20 for _, token_ids, _ in answers(llm, least))


def test_bans_that_leave_no_token_end_only_their_request(llm):
    (one,) = llm.get_tokenizer().encode("1", add_special_tokens=False)
    free, only = SamplingParams(temperature=0, max_tokens=9), {"allowed_token_ids": [one]}
    ends = {"stop_token_ids": [one]}
    for asked, bans, names in (
        ({"regex": "[ab]{5}"}, {"bad_words": ["a", "b"]}, "bad_words bans"),
        ({"regex": "c[ab]{5}"}, {"bad_words": ["a", "b"]}, "bad_words bans"),
        ({"json_object": True}, only, "allowed_token_ids bans"),
        ({"regex": "1{3}"}, ends, "stop_token_ids bans"),
        ({"regex": "[12]"}, {**ends, "bad_words": ["2"]}, "bad_words and stop_token_ids ban"),
        ({"regex": "2?"}, {"bad_words": ["2"], "min_tokens": 1}, "bad_words and min_tokens ban"),
        ({"regex": "1?"}, {**only, "min_tokens": 1}, None),
        (None, {**only, "bad_words": ["1 1", "11"]}, "allowed_token_ids and bad_words ban"),
    ):
        banned = SamplingParams(max_tokens=9, structured_outputs=asked, **bans)
        outputs = llm.generate(["Hello"] * 3, [free, banned, free], use_tqdm=False)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["length", "error" if names else "stop", "length"]
        where = "structured_outputs allow next" if asked else "may come next"
        said = f"no token could be sampled: {names} every token that {where}" if names else None
        assert outputs[1].outputs[0].stop_reason == said


# ---- random schemas ----

NAMES = st.sampled_from(["a", "b", "name", "é", "x y", 'q"'])


def objects(schemas):
    def build(properties, required, others):
        required = sorted(required & properties.keys())
        schema = {"type": "object", "properties": properties, "required": required}
        return schema | {"additionalProperties": others}

    others = st.sampled_from([False, {"type": "null"}])
    return st.builds(build, st.dictionaries(NAMES, schemas, max_size=3), st.sets(NAMES), others)


def ranges(kind, lowest, highest, more, names):
    """Return schemas with a lower and an upper limit, under these two names."""
    limits = st.integers(lowest, highest), st.integers(1, more)
    return st.builds(lambda low, more: {"type": kind, names[0]: low, names[1]: low + more}, *limits)


TEXTS = [{"format": name} for name in ("date", "time", "ipv4", "uuid", "date-time")]
TEXTS += [{"pattern": text} for text in ("^[a-f]{2,4}$", "^(ab|cd)*e$", r"^\\d{3}-\\d$")]
PLAIN = [{"type": "boolean"}, {"type": "null"}, {"const": -0.5}, {"enum": [1, "one", [1], {"a": None}]}]
MULTIPLE = {"type": "integer", "minimum": 0, "maximum": 1000}
ARRAYS = ranges("array", 0, 2, 2, ("minItems", "maxItems"))
SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from(PLAIN),
        st.sampled_from([{"type": "string"} | one for one in TEXTS]),
        ranges("string", 0, 3, 5, ("minLength", "maxLength")),
        ranges("integer", -200, 200, 500, ("minimum", "maximum")),
        ranges("number", -5, 5, 9, ("exclusiveMinimum", "maximum")),
        st.integers(1, 50).map(lambda by: MULTIPLE | {"multipleOf": by}),
    ),
    lambda schemas: st.one_of(
        objects(schemas),
        st.builds(lambda array, items: {**array, "items": items}, ARRAYS, schemas),
        st.lists(schemas, min_size=1, max_size=3).map(lambda many: {"anyOf": many}),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("num_examples", [4, pytest.param(100, marks=SLOW)])
def test_answers_to_random_schemas_conform(num_examples, llm):
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4), seed=st.integers(0, 2**31))
    def check(schemas, seed):
        asked = [{"json": schema, "disable_any_whitespace": True} for schema in schemas]
        fields = {"temperature": 2.0, "max_tokens": 120}
        params = [SamplingParams(**fields, seed=seed + i, structured_outputs=x) for i, x in enumerate(asked)]
        for schema, (text, _, reason) in zip(schemas, answers(llm, params), strict=True):
            assert reason == "length" or is_json_of(schema)(text)

    check()


# ---- what is refused, in words and in time ----

LENIENT = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
BOTTOMLESS: dict = {}
for _ in range(3000):
    BOTTOMLESS = {"type": "object", "properties": {"a": BOTTOMLESS}}
DEEP = '{"type":"array","items":' * 1000 + "{}" + "}" * 1000
TAG = {"structures": [{"begin": "<f>", "schema": LENIENT, "end": ""}], "triggers": ["<f"]}
CYCLE = {
    "anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}],  # an answer may begin the second
    "$defs": {
        "x": {"type": "object", "properties": {"y": {"$ref": "#/$defs/y"}}, "required": ["y"]},
        "y": {"allOf": [{"$ref": "#/$defs/x"}], "type": "object"},
    },
}
REFUSED = [
    ("must have one of json, .*got 0", {}),
    ("got 2 of them", {"regex": "a", "json_object": True}),
    ("got 0 of them", {"json_object": False}),
    ("choice must not be empty", {"choice": []}),
    ("Unknown format: telephone", {"json": {"type": "string", "format": "telephone"}}),
    ("Unimplemented keys.*uniqueItems", {"json": {"type": "array", "uniqueItems": True}}),
    ("Unknown format", {"json": {"type": "string", "format": "no", "x-guidance": {"lenient": True}}}),
    ("structured_outputs: ", {"json": "{"}),
    ("Unsatisfiable", {"json": "false"}),
    ("example.com", {"json": {"$ref": "https://example.com/schema"}}),
    ("recursion", {"json": DEEP}),
    ("recursion", {"json": BOTTOMLESS}),
    ("at most 65536 are allowed", {"json": {"enum": ["x" * 50] * 24_000}}),
    ("at most 65536 are allowed", {"choice": ["x" * 50] * 24_000}),
    ("at most 65536", {"json": {"properties": {f"p{i}": {"minLength": i} for i in range(4000)}}}),
    ("at most 65536", {"grammar": 'start: "x"\n' + "#" * 10_000_000}),
    ("unclosed group", {"regex": "("}),
    ("look-around", {"regex": "(?=a)b"}),
    ("no text", {"regex": "[a&&b]"}),
    ("fuel", {"regex": ".*" * 500 + "a{1000}"}),
    ("too many expressions", {"regex": "(a{1000}){1000}"}),
    ("too many expressions", {"regex": "(a|aa|aaa){1,1000}{1,1000}"}),
    ("structured_outputs: ", {"regex": "(" * 5000 + ")" * 5000}),
    ("structured_outputs: ", {"choice": ["\ud800"]}),
    ("structured_outputs: ", {"grammar": 'start: "a" start'}),
    ("unknown name", {"grammar": "start: missing"}),
    ("GBNF", {"grammar": 'root ::= "a" ('}),
    ("structured_outputs: ", {"grammar": "root ::= " + "(" * 5000}),
    *(("below 434", {"grammar": f'start: "a" <[{ids}]> "b"'}) for ids in ("434", "1-500", "^5")),
    ("uniqueItems", {"grammar": f"start: %json {json.dumps(LENIENT)}"}),
    ("uniqueItems", {"structural_tag": TAG}),
    ('"structures" and "triggers"', {"structural_tag": {"format": {"type": "any_text"}}}),
    ("must hold begin, schema and end", {"structural_tag": {"structures": [{"begin": "<f>"}]}}),
    *(("no trigger", {"structural_tag": {**TAG, "triggers": one}}) for one in (["<g"], "<g", 5)),
    # what llguidance would not enforce, or an output could never finish
    *(("multipleOf must have", {"json": {"multipleOf": one}}) for one in (4294967291, 10**9, 1e-9)),
    ("beside U.0000", {"json": {"type": "string", "pattern": r'^([^"]|\x00)$'}}),
    ("additionalProperties", {"json": {"type": "object", "patternProperties": {'^[^"]$': {}}}}),
    ("'#' has no finite", {"json": '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}'}),
    ("'#' has no finite", {"json": '{"type":"array","items":{"$ref":"#"},"minItems":1}'}),
    ("'#' has no finite", {"json": '{"type":"object","required":["a"],"additionalProperties":{"$ref":"#"}}'}),
    ("'#' has no finite", {"grammar": 'start: %json {"type":"array","items":{"$ref":"#"},"minItems":1}'}),
    (r"'#/\$defs/x' has no finite", {"json": CYCLE}),
]


@pytest.mark.parametrize(("message", "asked"), REFUSED, ids=range(len(REFUSED)))
def test_unenforceable_constraints_are_refused_within_a_second(message, asked, llm, second):
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        answers(llm, asked_for(asked))
    assert time.process_time() - start < 5 * second  # one, with a margin for a busy machine
    assert not llm.has_unfinished_requests()


RUNAWAY: dict = {"json": {"type": "integer", "multipleOf": 99999989}}  # an automaton of 10^8 states


def test_a_grammar_that_compiles_without_end_is_refused(llm, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_BYTES", 16 << 20)
    with pytest.raises(ValueError, match="more than 3 s of processor time or 16 MiB of memory"):
        answers(llm, asked_for(RUNAWAY))
    assert check("json", answers(llm, [asking("json")] * 2)) == 2


@pytest.mark.parametrize(
    ("work", "exitcode"),
    [(lambda asked: sum(range(3 * 10**8)), -signal.SIGXCPU), (lambda asked: bytearray(1 << 30), 1)],
    ids=["time", "memory"],
)
def test_a_trial_is_limited_in_time_and_memory(work, exitcode):
    def attempt():
        answer = grammars.attempt(SimpleNamespace(compile=work), {"regex": "a"}, 1, 16 << 20)
        os._exit("16 MiB" in answer.get("error", ""))

    process = multiprocessing.get_context("fork").Process(target=attempt)
    process.start()
    process.join()
    assert process.exitcode == exitcode


def test_a_new_trial_process_replaces_one_that_died(llm):
    trials = llm.llm_engine._grammars.trials
    trials.run({"regex": "a"})
    trials._process.kill()
    trials._process.wait()
    assert trials.run({"regex": "b"}).takes_back


def definitions(num, targets_of):
    """Return definitions d0, d1, ..., each an object around one of its targets. The first may be null too."""

    def around(targets):
        properties = {"a": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in targets]}}
        return {"type": "object", "required": ["a"], "properties": properties}

    objects = {f"d{i}": around(targets_of(i)) for i in range(num)}
    first = {"anyOf": [objects["d0"], {"type": "null"}]}
    return {"$ref": "#/$defs/d0", "$defs": objects | {"d0": first}}


@pytest.mark.parametrize(
    "asked",
    [
        {"json": definitions(350, lambda i: [(i + 1) % 350])},  # as long as Python's stack
        {"json": definitions(12, lambda i: [j for j in range(12) if j != i])},  # with 12! paths
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
        {"json": {"type": "array", "items": {"$ref": "#"}}},
        {"json": {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"json": {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"enum": [1]}]}},
        *({"regex": regex} for regex in ("(a+)+$", "(x+x+)+y", "(.*a.{20}){1,20}", "[a-z]{1,100000}")),
    ],
    ids=range(10),
)
def test_recursion_with_a_base_case_and_what_backtracks_elsewhere_are_fast(asked, llm, second):
    start = time.process_time()
    ((_, _, reason),) = answers(llm, asked_for(asked, max_tokens=20))
    assert reason in ("length", "stop")
    assert time.process_time() - start < 10 * second


PATTERNS = ['^[^"]{3}$', r'^[^<>:"/\\|?*]{1,8}$', r"^[^\\]{2}$", r'^([^"\\]|\\.){2}$']
PATTERNS += [r'^[^"\n]{2}[^"&&][^"[]$', r"^[\x00-!#-~]{3}$", r'^.[^\s"].$']


@pytest.mark.parametrize("pattern", [*PATTERNS[:2], *(pytest.param(one, marks=SLOW) for one in PATTERNS[2:])])
def test_a_class_without_a_quote_or_a_backslash_holds_for_the_decoded_string(pattern, llm):
    """At a high temperature most tokens that a mask allows by mistake are sampled."""
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {}}, "minProperties": 1}
        | {"additionalProperties": False, "maxProperties": 1},
    ):
        asked = {"json": schema, "disable_any_whitespace": True}
        found = answers(llm, asked_for(asked, 40, temperature=100.0, max_tokens=30))
        finished = [text for text, _, reason in found if reason == "stop"]
        assert len(finished) > 5
        assert [text for text in finished if not is_json_of(schema)(text)] == []


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"json": 5}, "json must be a str or dict"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": [1]}, "hold strings only"),
        ({"regex": "a", "disable_any_whitespace": 1}, "must be True or False"),
        ("json", "must be StructuredOutputsParams"),
    ],
)
def test_an_argument_of_the_wrong_type_is_a_type_error(asked, error):
    with pytest.raises(TypeError, match=error):
        SamplingParams(structured_outputs=asked)
    with pytest.raises(TypeError, match="unexpected keyword"):
        StructuredOutputsParams(jsn={})


def test_an_answer_that_cannot_end_is_refused(llm):
    with pytest.raises(ValueError, match="needs a token that ends the output"):
        answers(llm, [asking("json", ignore_eos=True)])


def test_a_grammar_that_becomes_too_costly_ends_only_its_request(llm, monkeypatch):
    grammars = llm.llm_engine._grammars
    limits = grammars.compiler.llguidance.LLParserLimits(step_max_items=20)
    monkeypatch.setattr(grammars.compiler, "limits", limits)  # not those of the process that tries it out
    costly = {"grammar": 'start: "x" a\na: "x" | "y" a | a a a'}
    free = SamplingParams(temperature=0, max_tokens=30)
    found = answers(llm, [free, *asked_for(costly, max_tokens=60)])
    assert [reason for *_, reason in found] == ["length", "error"]
    assert check("json", answers(llm, [asking("json")] * 2)) == 2


def test_large_schemas_are_supported(llm):
    members = {f"p{i}": {"type": "boolean"} for i in range(900)}
    schema = {"properties": members, "additionalProperties": False, "type": "object"}
    ((text, _, reason),) = answers(llm, asked_for({"json": schema}, temperature=2.0, max_tokens=200))
    assert reason == "length" or json.loads(text).keys() <= members.keys()


@pytest.mark.parametrize("kind", ["choice", "enum"])
def test_ten_thousand_labels_are_supported(kind, llm):
    """Some are equal, some begin another one, and one is empty."""
    labels = [f"label number {i}" for i in range(5000)] + [f"{chr(0x4E00 + i)} é" for i in range(4990)]
    labels += ["", "label", "label", '"quoted\\"', "\n", "😀", "😀 2", *("ab" * i for i in range(1, 4))]
    written = str if kind == "choice" else partial(json.dumps, ensure_ascii=False)
    asked = {"choice": labels} if kind == "choice" else {"json": {"enum": labels}}
    make = llm.llm_engine._grammars.compile(StructuredOutputsParams(**asked))
    encode = llm.get_tokenizer().encode
    some = *labels[-12:], labels[0], labels[4999], labels[5000]
    for text in (*some, "label number", "labels", "ba", "é", " "):
        constraint = make()
        is_whole = constraint.catch_up(encode(written(text), add_special_tokens=False))
        assert (is_whole and constraint.matcher.is_accepting()) == (text in labels), text
    params = asked_for(asked, 4, max_tokens=40)
    assert {text for text, _, reason in answers(llm, params) if reason == "stop"} <= {*map(written, labels)}


def test_grammars_that_cannot_be_rolled_back_get_no_drafts():
    """The grammar has a limit (max_tokens) that llguidance enforces itself. With drafts it would fail."""
    asked = {"grammar": 'start: a "!"\na[max_tokens=3]: /.*/'}
    found = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        with LLM(DEMO, num_kv_blocks=100, speculative_config=config) as llm:
            found.append(answers(llm, asked_for(asked, 4, max_tokens=40)))
    assert found[0] == found[1]
    assert {reason for *_, reason in found[0]} == {"stop"}


def test_objects_are_closed_by_default():
    inner = {"type": "object", "properties": {"x": {}}}
    opened = {"patternProperties": {}, "additionalProperties": True}
    schema: dict = {"properties": {"properties": inner, "open": opened}, "items": [{"properties": {}}]}
    schema["const"] = {"properties": 1}
    expected: dict = deepcopy(schema)
    for one in (expected, expected["properties"]["properties"], expected["items"][0]):
        one["additionalProperties"] = False
    assert closed(schema) == expected


# ---- added tokens: text if their flag does not say that they are special ----

ADDED = [  # of each model a special one and another
    pytest.param(model, name, is_special, marks=SLOW if i else ())
    for model, both in ADDED_TOKENS.items()
    for is_special, names in zip((True, False), both, strict=True)
    for i, name in enumerate(names.split()[:-5:-1])
]


@lru_cache
def compiler_of(model):
    tokenizer = byte_tokenizer((), model)
    if model in ("Gemma 3", "Mistral"):  # the vocabulary holds their added tokens too
        names = tokenizer.get_added_vocab()
        vocab = {f"<0x{i:02X}>": i for i in range(256)} | names | {"\u2581": len(tokenizer)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        fallback = tokenizers.decoders.ByteFallback()
        backend.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.Replace("\u2581", " "), fallback, tokenizers.decoders.Fuse()]
        )
        backend.add_tokens([*tokenizer.added_tokens_decoder.values()])
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    return tokenizer, Grammars(tokenizer, len(tokenizer) + 9).compiler


def matcher_of(compiler, **asked):
    return compiler.matcher(compiler.compile(StructuredOutputsParams(**asked)).grammar)


def mask_of(matcher):
    """Return for each token whether it may come next."""
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert not matcher.is_error(), matcher.get_error()
    return mask


def accepts(model, asked, token_ids):
    """Return whether each of these tokens is allowed in turn, and then the end."""
    compiler = compiler_of(model)[1]
    matcher = matcher_of(compiler, **asked)
    for token_id in [*token_ids, compiler.end_id]:
        if not mask_of(matcher)[token_id]:
            return False
        if token_id != compiler.end_id:
            assert matcher.consume_token(token_id), matcher.get_error()
    return True


def spelled(*parts):
    """Return token ids: a text byte by byte, a token id as it is."""
    return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]


@pytest.mark.parametrize(("model", "name", "is_special"), ADDED)
def test_text_that_names_an_added_token_can_be_written(model, name, is_special):
    """With the token itself, as the tokenizer encodes the text, if the token is no special one."""
    token_id = compiler_of(model)[0].convert_tokens_to_ids(name)
    one, quoted = f"a{name}b", json.dumps(f"a{name}b")
    for asked in (
        {"choice": [one]},
        {"choice": ["a", one, name]},
        {"regex": re.escape(one)},
        {"grammar": f"start: {quoted}"},
        {"grammar": f'start: A B\nA: /a/\nB: {json.dumps(name + "b")} | /x["\\/]y/'},
        {"grammar": f"root ::= {quoted}"},
        {"json": {"const": one}},
        {"json": {"enum": [one, "a"]}},
    ):
        quote = '"' if "json" in asked else ""
        assert accepts(model, asked, spelled(quote + "a", token_id, "b" + quote)) is not is_special, asked
        if is_special:
            assert accepts(model, asked, spelled(quote + one + quote)), asked


@pytest.mark.parametrize("model", ADDED_TOKENS)
def test_free_text_has_every_token_but_special_ones(model):
    tokenizer, compiler = compiler_of(model)
    allowed, added = mask_of(matcher_of(compiler, regex="(?s).*")), tokenizer.added_tokens_decoder
    assert {i for i in added if allowed[i]} == {i for i, token in added.items() if not token.special}
    assert allowed[: 1 << 7].all()


def test_a_token_without_bytes_is_not_text():
    """A byte-level vocabulary may have tokens that stand for no bytes."""
    settings = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    settings["model"]["vocab"]["\u4e2d"] = 257
    tokenizer = SimpleNamespace(backend_tokenizer=tokenizers.Tokenizer.from_str(json.dumps(settings)))
    matcher = matcher_of(Grammars(tokenizer, 258).compiler, regex="(?s).*")
    assert not mask_of(matcher)[256:258].any()


@pytest.mark.parametrize(("model", "name", "is_special"), ADDED)
def test_grammars_and_structural_tags_may_name_added_tokens(model, name, is_special):
    """A special token stands for itself, wherever it is in a tag. Another token is text there."""
    token_id = compiler_of(model)[0].convert_tokens_to_ids(name)
    for names in [f"<[{token_id}]>", *[name] * name.startswith("<")]:
        grammar = f'start: "a" {names} "b"  // {names}'
        assert accepts(model, {"grammar": grammar}, spelled("a", token_id, "b")), grammar
        assert not accepts(model, {"grammar": grammar}, spelled(f"a{name}b")), grammar
    for before in ("", "f"):
        begin = f"{before}{name}x"
        for trigger in {begin[:1], before + name[:2], before + name, begin}:
            structure = {"begin": begin, "schema": {"enum": [1, 2]}, "end": f"!{name}"}
            asked = {"structural_tag": {"structures": [structure], "triggers": [trigger]}}
            tag = spelled(before, token_id, "x1!", token_id)
            assert accepts(model, asked, spelled("hm ", *tag, *tag)), trigger
            assert accepts(model, asked, spelled("hm"))
            assert not accepts(model, asked, spelled(before, token_id, "x3!", token_id)), trigger


# ---- the extra, and the cache ----


def test_without_the_package_an_error_names_the_extra(llm, monkeypatch):
    monkeypatch.delitem(llm.llm_engine.__dict__, "_grammars", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'nanoengine\[structured\]'"):
        answers(llm, [asking("json")])


def test_a_grammar_is_compiled_once(llm):
    assert compiled(llm, "regex") is compiled(llm, "regex") is not compiled(llm, "json")
    assert llm.llm_engine._grammars._cached.cache_parameters()["maxsize"] == token_masks.MAX_GRAMMARS


def test_every_bit_of_a_mask_is_right(llm):
    """Holds for a constraint alone, for one with drafts, and for one whose draft is forbidden."""
    grammars, tokenizer = llm.llm_engine._grammars, llm.get_tokenizer()
    a, b, c = tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    eos = llm.llm_engine.checkpoint.eos_token_ids[0]
    make = grammars.compile(StructuredOutputsParams(regex="ab|abc"))
    one, other, third = make(), make(), make()

    def row(token_ids, position):
        return SamplingRow(SamplingParams(), 0, position, [7, *token_ids], 1, frozenset([eos]))

    items = [(0, one, row([a], 2)), *((1 + i, other, row([a, b, c], 2 + i)) for i in range(3))]
    items += [(4 + i, third, row([b, a], 1 + i)) for i in range(3)]
    for _ in range(2):  # what was a draft is taken back
        logits = torch.zeros(8, llm.llm_engine.checkpoint.vocab_size)
        Constraint.apply(logits, items)
        allowed = [row.isfinite().nonzero().flatten().tolist() for row in logits]
        assert allowed[:7] == [[b], [b], sorted([c, eos]), [eos], [a], [], []]
        assert len(allowed[7]) == logits.shape[1], "a row without a grammar is left alone"


@pytest.mark.parametrize("num_padding", [0, 1, 43])
def test_logits_may_outnumber_the_tokenizer_s_tokens(num_padding, tmp_path):
    size = 257 + num_padding
    path = table_checkpoint(tmp_path, torch.randn(size, size))
    with LLM(path, num_kv_blocks=20) as llm:
        params = asked_for({"regex": "[ab]{3}|é+"}, 9, temperature=2.0, max_tokens=30)
        for text, _, reason in answers(llm, params, "ab"):
            assert reason == "length" or re.fullmatch("[ab]{3}|é+", text)
