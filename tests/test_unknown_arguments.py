"""The rule for unserved names: only no-op values are accepted, and a typo never is."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

from nanoengine import EngineArgs, SamplingParams
from nanoengine.llm import LLM
from nanoengine.requests import read_prompt
from nanoengine.sampling_params import refuse_unserved
from nanoengine.server import responses
from nanoengine.server.lifecycle import make_parser
from nanoengine.server.openai_api import SAMPLED, APIError, ChatRequest, sampling_fields
from nanoengine.unknown_arguments import IGNORED, INSTEAD, MAX_UNSERVED

VLLM_NAMES = dict(re.findall(r"\[(\w+)\]([^[]*)", Path(__file__).with_name("vllm_names.txt").read_text()))
NOOP: tuple[object, ...] = None, False, 0, "", [], {}
MEANINGFUL = True, 7, "unheard-of", ["x"], {"x": 1}
ALWAYS_IGNORED = {name for names in IGNORED.values() for name in names}
# Names of vLLM that the rule takes for typos of served ones
TYPOS = "long_prefill_token_threshold_adaptive", "max_num_scheduled_tokens", "reasoning_parser_plugin"
PARSER = make_parser()  # making one takes longer than its use


def serve(**flags):
    ((name, value),) = flags.items()
    flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
    PARSER.parse_args(["demo", flag if isinstance(value, bool) else f"{flag}={text_of(value)}"])


def text_of(value):
    return value if isinstance(value, str) else "null" if value is None else str(value).replace("'", '"')


def body(cls, sampled=SAMPLED, **own):
    return lambda **given: sampling_fields(cls(**own, **given), sampled)


USES = {
    "ENGINE": lambda **given: EngineArgs(model="m", **given),
    "SAMPLING": SamplingParams,
    "CALL": lambda **given: refuse_unserved(LLM.chat, given),
    "PROMPT": lambda **given: read_prompt({"prompt_token_ids": [1], **given}, None, 9),
    "SERVER": serve,
    "CHAT": body(ChatRequest, messages=[]),
    "RESPONSES": body(responses.ResponsesRequest, responses.SERVED, input="a"),
}
REFUSALS = TypeError, ValueError, APIError, SystemExit


@pytest.mark.parametrize("of", USES)
def test_vllm_name_with_a_meaningful_value_is_never_accepted_silently(of):
    for name in VLLM_NAMES[of].split():
        accepted = []
        for value in MEANINGFUL:
            with suppress(*REFUSALS):
                USES[of](**{name: value})
                accepted.append(value)
        others = [value for value in accepted if value not in INSTEAD.get(name, ())[1:]]
        assert not others or name in ALWAYS_IGNORED, f"{name} accepts {others}"


@pytest.mark.parametrize("of", USES)
def test_vllm_name_with_noop_value_is_accepted(of):
    for name in VLLM_NAMES[of].split():
        if name in TYPOS:
            continue
        for value in INSTEAD.get(name, ())[1:] or NOOP:
            USES[of](**{name: value})


@pytest.mark.parametrize(
    ("of", "setting"),
    [
        ("ENGINE", {"optimization_level": 0}),
        ("ENGINE", {"limit_mm_per_prompt": {"image": 0, "video": 1}}),
        ("ENGINE", {"pipeline_parallel_size": True}),
        ("ENGINE", {"runner": "pooling"}),
        ("SAMPLING", {"thinking_token_budget": 0}),
        ("SAMPLING", {"best_of": 3}),
        ("CHAT", {"include_reasoning": False}),
        ("CHAT", {"modalities": ["text", "audio"]}),
        ("CHAT", {"length_penalty": 2.0}),
        ("RESPONSES", {"truncation": "auto"}),
    ],
)
def test_value_that_only_resembles_a_noop_is_rejected(of, setting):
    with pytest.raises(REFUSALS, match="is not supported; "):
        USES[of](**setting)


@pytest.mark.parametrize(
    ("of", "typo", "served"),
    [
        ("ENGINE", "enable_prefx_caching", "enable_prefix_caching"),
        ("ENGINE", "num_gpu_block_override", "num_gpu_blocks_override"),
        ("ENGINE", "max_model_length", "max_model_len"),
        ("ENGINE", "gpu_memory_utilisation", "gpu_memory_utilization"),
        ("SAMPLING", "temprature", "temperature"),
        ("SAMPLING", "max_new_tokens", "max_tokens"),
        ("CALL", "add_generation_promt", "add_generation_prompt"),
        ("PROMPT", "promt", "prompt"),
        ("CHAT", "mesages", "messages"),
    ],
)
def test_typo_is_an_error_at_any_value(of, typo, served):
    for value in NOOP + MEANINGFUL:
        with pytest.raises((TypeError, APIError), match=f"did you mean '{served}'"):
            USES[of](**{typo: value})


@pytest.mark.parametrize(
    "flags", ["--disable-log-requests", "--kv-cache-dtype auto", "--no-enable-lora", "--uds= --swap_space 4"]
)
def test_unserved_flags_may_precede_and_follow_the_model(flags):
    for line in (f"demo {flags} --seed 5", f"{flags} --seed 5 demo"):
        args = make_parser().parse_args(line.split())
        assert (args.model_tag, args.seed) == ("demo", 5)


def test_number_of_unserved_names_is_limited():
    for given in ({f"x{i}": 0 for i in range(MAX_UNSERVED + 1)}, {"x" * 10**6: 0} | {"y": 1}):
        with pytest.raises(APIError):
            body(ChatRequest, messages=[])(**given)
    with pytest.raises(TypeError, match="more than 300"):
        SamplingParams(**{f"x{i}": None for i in range(MAX_UNSERVED + 1)})


def test_rule_has_at_most_forty_rows_and_the_guide_lists_them():
    assert len(INSTEAD) + len(ALWAYS_IGNORED) <= 40
    text = (Path(__file__).parent.parent / "docs" / "guide" / "vllm.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows == {name: row[0] for name, row in INSTEAD.items()}
    sentence = re.search(r"accepted at any value: (.*?)\.\n", text, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", sentence)) == ALWAYS_IGNORED
