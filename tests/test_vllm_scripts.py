"""Scripts like vLLM's offline examples, with nanoengine in the import instead of vllm.

The tiny checkpoint `alphabet` continues the alphabet from the last letter of the prompt.
"""

import argparse
import copy
import io
import pickle
import re
from functools import partial

import pytest
from tqdm import tqdm

from nanoengine import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from nanoengine.config import NULLABLE
from nanoengine.flags import FlexibleArgumentParser
from nanoengine.metrics import Histogram
from nanoengine.unknown_arguments import IGNORED, INSTEAD
from tests.helpers import finish

PROMPTS = ["Hello, my name is", "The president of", "The capital of Franc", "The future of A"]
GREEDY = SamplingParams(temperature=0, max_tokens=3)
OF_PARTS = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}<{{ part['text'] }}>{% endfor %}"
    "{% endfor %}a"
)


@pytest.fixture(scope="module")
def llm(alphabet):
    with LLM(model=alphabet, num_gpu_blocks_override=40, max_model_len=256, seed=None) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_settings_of_vllm_that_change_nothing_are_accepted():
    settings = dict.fromkeys((*NULLABLE, "tokenizer", "quantization", "hf_overrides", "speculative_config"))
    settings |= dict.fromkeys(("dtype", "kv_cache_dtype", "task"), "auto")
    settings |= dict.fromkeys(IGNORED["engine"], 4)
    assert EngineArgs(model="m", runner="generate", **settings) == EngineArgs(model="m")
    assert EngineArgs(model="m", num_gpu_blocks_override=7).num_kv_blocks == 7
    off = dict.fromkeys(("best_of", "structured_outputs", "guided_decoding", "truncate_prompt_tokens"))
    off |= dict.fromkeys(("extra_args", "logits_processors", "thinking_token_budget"))
    params = SamplingParams(spaces_between_special_tokens=True, flat_logprobs=False, **off)
    assert params == SamplingParams()


def test_changed_fields_take_effect(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    params.stop = "f"
    assert texts(llm.generate("a", params)) == ["bcde"]
    params.stop = None
    params.bad_words.append("de")  # two tokens
    assert "de" not in texts(llm.generate("a", params))[0]
    params.bad_words = None
    params.temperature, params.seed = 5.0, 0
    loose = texts(llm.generate(["a"] * 5, params))
    params.top_k = 1
    assert texts(llm.generate(["a"] * 5, params)) == ["bcdefghi"] * 5 != loose
    params.logit_bias = {ord("q"): 1000.0}
    assert texts(llm.generate("a", params)) == ["q" * 8]


def test_request_keeps_the_params_it_was_given(llm):
    params = SamplingParams(temperature=0, max_tokens=6, stop=["y"], stop_token_ids=[ord("x")])
    llm.add_request("a", "a", params)
    stream = llm.stream("r", params)
    params.max_tokens = 1
    params.stop.append("b")
    params.stop_token_ids.append(ord("s"))
    params.temperature = "hot"
    streamed = "".join(output.outputs[0].text for output in stream)
    assert finish(llm)["a"].outputs[0].text == "bcdefg"
    assert streamed == "stuvw"


def test_changed_field_is_checked_when_a_request_is_made(llm):
    params = SamplingParams(temperature=0)
    params.top_p = 1.5
    for make in (lambda: llm.generate("a", params), lambda: llm.add_request("b", "a", params), params.clone):
        with pytest.raises(ValueError, match=r"top_p .* got 1\.5"):
            make()
    with pytest.raises(AttributeError, match="max_token"):
        params.max_token = 5
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, SamplingParams.clone, lambda params: pickle.loads(pickle.dumps(params))],
)
def test_params_can_be_copied(copied):
    params = SamplingParams(stop=["d"], stop_token_ids=[1], bad_words=["x"], logit_bias={1: 2.0})
    twin = copied(params)
    assert twin == params
    assert repr(twin) == repr(params)
    twin.max_tokens = 2
    assert params.max_tokens == 16
    for name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
        assert (getattr(twin, name) is getattr(params, name)) == (copied is copy.copy)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []
    assert llm.generate([], [], use_tqdm=False) == []
    assert list(llm.stream([])) == []
    with pytest.raises(ValueError, match="one per prompt"):
        llm.generate([], [GREEDY])


def test_progress_is_shown_by_the_callers_bar(llm):
    file = io.StringIO()
    llm.generate("a", GREEDY, use_tqdm=partial(tqdm, file=file))
    assert "Processed prompts: 100%" in file.getvalue()


def test_priorities(alphabet):
    with LLM(alphabet, scheduling_policy="priority", max_num_seqs=1, num_kv_blocks=20) as llm:
        late, early = llm.generate(["a", "b"], GREEDY, priority=[1, 0])
        assert texts([late, early]) == ["bcd", "cde"]
        assert early.metrics.finished_time < late.metrics.first_scheduled_time
        assert texts(llm.generate(["a", "b"], GREEDY, priority=-1)) == ["bcd", "cde"]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (OF_PARTS, "user:<one><two>a"),
        (None, "user:one\ntwo;a"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}a", "one\ntwoa"),
        ("{{ messages[0]['content'].strip() }}a", "one\ntwoa"),
        ("{{ messages[0].content | length }}a", "7a"),
    ],
    ids=["of parts", "default", "prints the content", "calls a string method", "does not print"],
)
def test_template_receives_the_kind_of_content_it_renders(template, prompt, llm):
    content = [{"type": "text", "text": "one"}, "two"]
    outputs = llm.chat([{"role": "user", "content": content}], GREEDY, chat_template=template)
    assert outputs[0].prompt == prompt
    assert content == [{"type": "text", "text": "one"}, "two"]


def test_content_other_than_text_is_rejected(llm):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    for part in (image, {"type": "text"}, {"text": "a"}, 5, {"type": "text", "text": 5}):
        message = re.escape(f"images and audio are not supported, got {part!r:.80}")
        with pytest.raises(ValueError, match=message) as error:
            llm.chat([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}], GREEDY)
        assert len(str(error.value)) < 300
    assert not llm.has_unfinished_requests()


def test_tools_reach_the_template(llm):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    chat = [{"role": "system", "content": "You are a helpful assistant"}]
    output = llm.chat(chat, GREEDY, tools=tools, chat_template_content_format="auto")[0]
    assert output.prompt.startswith("weather|system:")


def test_last_message_can_be_continued(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am m"}]
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = {"add_generation_prompt": False, "continue_final_message": True, "chat_template": template}
    assert texts(llm.chat(messages, GREEDY, **settings)) == ["nop"]


def test_every_parser_argument_is_accepted_by_an_engine_at_its_default():
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", "m"])
    assert vars(args).keys() >= INSTEAD.keys()
    assert (args.pipeline_parallel_size, args.enable_lora, args.tensor_parallel_size) == (1, False, 1)
    assert EngineArgs(**vars(args)) == EngineArgs.from_cli_args(args) == EngineArgs(model="m")


def test_command_line_settings_take_effect_or_are_refused_by_name(capsys):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    parser.set_defaults(model="m", enforce_eager=True)
    line = "--max_model_len 32 --no-enable-prefix-caching --max_tokens=5 --num-gpu-blocks-override 9"
    args = parser.parse_args(line.split())
    asked = {"max_model_len": 32, "enable_prefix_caching": False, "num_kv_blocks": 9, "enforce_eager": True}
    assert EngineArgs.from_cli_args(args) == EngineArgs(model="m", **asked)
    assert args.max_tokens == 5
    with pytest.raises(SystemExit):
        parser.parse_args(["--pipeline-parallel-size", "2"])
    assert "pipeline_parallel_size=2 is not supported" in capsys.readouterr().err
    with pytest.raises(TypeError, match="model"):
        EngineArgs.from_cli_args(argparse.Namespace(seed=1))


def test_the_generate_example(alphabet):
    """Flags in a group, and parameters that flags change."""
    parser = FlexibleArgumentParser()
    engine_group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(engine_group)
    engine_group.set_defaults(model="another/model")
    parser.add_argument_group("Sampling parameters").add_argument("--max-tokens", type=int)
    args = vars(parser.parse_args(["--model", alphabet, "--max-tokens", "3"]))
    max_tokens = args.pop("max_tokens")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = max_tokens, 0
    outputs = llm.generate(PROMPTS, params)
    llm.shutdown()
    assert [output.prompt for output in outputs if output.outputs[0].finished()] == PROMPTS
    assert [output.outputs[0].text for output in outputs] == ["tuv", "ghi", "def", "\x00" * 3]


def test_metrics_count_by_reason_label_and_bucket(alphabet):
    with LLM(alphabet, max_model_len=64, num_kv_blocks=20) as llm:
        llm.generate("a", SamplingParams(temperature=0, max_tokens=30, stop="f"))
        llm.generate("a", SamplingParams(temperature=0, max_tokens=10, n=2))
        llm.add_request("aborted", "a", SamplingParams(temperature=0, max_tokens=10))
        llm.step()
        llm.abort_request("aborted")
        metrics = llm.llm_engine.get_metrics()
    labels = {"model_name": alphabet, "engine": "0"}
    reasons = {m.labels["finished_reason"]: m.value for m in metrics if m.name == "vllm:request_success"}
    assert reasons == {"stop": 1, "length": 2, "abort": 1, "error": 0}
    by_name = {m.name: m for m in metrics if isinstance(m, Histogram)}
    generated = by_name["vllm:request_generation_tokens"]
    assert generated.labels == labels
    assert generated.buckets == {"1.0": 1, "2.0": 1, "5.0": 2, "10.0": 4, "20.0": 4, "50.0": 4, "+Inf": 4}
    assert by_name["vllm:request_params_n"].buckets["1.0"] == 2
    assert by_name["vllm:request_params_max_tokens"].sum == 50
    between = by_name["vllm:inter_token_latency_seconds"]
    assert between.count == generated.sum - 4  # each sample's first token has none before it
    assert between.sum <= by_name["vllm:request_decode_time_seconds"].sum * 2  # of a request with two samples
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    total = by_name["vllm:e2e_request_latency_seconds"]
    assert sum(by_name[f"vllm:{part}"].sum for part in parts) == pytest.approx(total.sum)
    assert total.count == 3
    first = by_name["vllm:time_to_first_token_seconds"].sum
    assert 0 < by_name["vllm:request_queue_time_seconds"].sum < first < total.sum


def counts_of(engine):
    found = {metric.name.removeprefix("vllm:"): metric for metric in engine.get_metrics()}
    return {name: metric.count for name, metric in found.items() if isinstance(metric, Histogram)}


def test_the_time_to_the_first_token_is_recorded_when_it_arrives_and_an_abort_as_far_as_it_got():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="the engine, by hand"))
    line = "--model demo --num-kv-blocks 20 --max-num-seqs 1 --no-async-scheduling --max-model-len 100"
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(line.split())))
    assert engine.model_config.max_model_len == 100
    assert engine.get_tokenizer().decode(engine.get_tokenizer().encode("Hi")) == "Hi"
    assert engine.model_config.hf_config.vocab_size == engine.checkpoint.vocab_size
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in ("runs", "waits"):
        engine.add_request(name, "Hello", params)
    while not counts_of(engine)["time_to_first_token_seconds"]:
        engine.step()
    assert counts_of(engine)["request_prompt_tokens"] == 0, "it still runs"
    engine.step()
    engine.abort_request(["waits"])
    assert {name for name, count in counts_of(engine).items() if count} == {
        *("time_to_first_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("request_params_n", "request_params_max_tokens", "e2e_request_latency_seconds"),
    }
    engine.abort_request("runs")
    counts = counts_of(engine)
    assert counts.pop("time_to_first_token_seconds") == 1
    times = "request_queue_time", "request_inference_time", "request_prefill_time", "request_decode_time"
    for name in (*times, "inter_token_latency", "request_time_per_output_token"):
        assert counts.pop(f"{name}_seconds") >= 1
    assert set(counts.values()) == {2}
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "awq"}, "'awq' does not match the checkpoint, whose weights are unquantized"),
        ({"quantization": "hqq"}, r"quantization must be one of \('int8', 'int4', .*\), got 'hqq'"),
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype must be one of \('auto', 'int8'\), got 'fp8'"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens"),
        ({"hf_overrides": {"rope_thetta": 1e6}}, "hf_overrides has 'rope_thetta', which is not a field of"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "set it in hf_overrides"),
        ({"generation_config": "/else/where"}, "generation_config must be one of"),
        ({"compilation_config": 0}, "enforce_eager=True"),
    ],
)
def test_unserved_setting_is_rejected_with_an_alternative(settings, message, alphabet):
    with pytest.raises(ValueError, match=message):
        LLM(alphabet, **settings)


def test_setting_under_two_names_is_rejected():
    with pytest.raises(TypeError, match="num_kv_blocks under two names"):
        EngineArgs(model="m", num_gpu_blocks_override=5, num_kv_blocks=5)
