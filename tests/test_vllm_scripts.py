"""Scripts of the shape of vLLM's offline examples, with nanoengine in the import instead of vllm.

Each is what a user would write, on a tiny checkpoint: `alphabet` goes on with the alphabet from the last
letter of the prompt, `babbler` says anything.
"""

import argparse
import asyncio
import copy
import dataclasses
import pickle
import re

import pytest

from nanoengine import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from nanoengine.metrics import Counter, Gauge, Histogram, Vector
from tests.helpers import byte_tokenizer, chain_checkpoint

LETTERS = "abcdefghijklmnopqrstuvwxyz"
GREEDY = SamplingParams(temperature=0, max_tokens=3)
# Written for strings, and for lists of parts as well. The answer goes on from the "a".
TEMPLATE = (
    "{% if tools %}{{ tools[0]['function']['name'] }}|{% endif %}"
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
OF_PARTS = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}<{{ part['text'] }}>{% endfor %}"
    "{% endfor %}a"
)


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory) -> str:
    path = chain_checkpoint(tmp_path_factory.mktemp("alphabet"), LETTERS)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(alphabet):
    with LLM(model=alphabet, num_gpu_blocks_override=40, max_model_len=256, seed=None) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# ---- LLM.generate ----


def test_the_basic_example(alphabet):
    prompts = ["Hello, my name is", "The president of", "The capital of Franc", "The future of A"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=alphabet)
    outputs = llm.generate(prompts, sampling_params)
    shown = [(output.prompt, output.outputs[0].text) for output in outputs]
    assert [prompt for prompt, _ in shown] == prompts
    assert shown[0][1] == (LETTERS * 2)[19:35]  # 16 tokens by default
    assert shown[1][1].startswith("ghijkl")
    llm.shutdown()


def test_every_argument_of_the_old_llm_signature_at_its_default(alphabet):
    llm = LLM(
        model=alphabet,
        tokenizer=None,
        tokenizer_mode="auto",
        skip_tokenizer_init=False,
        trust_remote_code=False,
        allowed_local_media_path="",
        tensor_parallel_size=1,
        dtype="auto",
        quantization=None,
        revision=None,
        tokenizer_revision=None,
        seed=None,
        gpu_memory_utilization=0.9,
        swap_space=4,
        cpu_offload_gb=0,
        enforce_eager=None,
        max_seq_len_to_capture=8192,
        disable_custom_all_reduce=False,
        disable_async_output_proc=False,
        hf_token=None,
        hf_overrides=None,
        mm_processor_kwargs=None,
        task="auto",
        compilation_config=None,
    )
    assert texts(llm.generate("a", GREEDY)) == ["bcd"]
    llm.close()


def test_the_settings_an_offline_benchmark_passes(alphabet):
    llm = LLM(
        model=alphabet,
        enable_chunked_prefill=True,
        enable_prefix_caching=None,
        disable_log_stats=True,
        kv_cache_dtype="auto",
        pipeline_parallel_size=1,
        data_parallel_size=1,
        distributed_executor_backend=None,
        generation_config="auto",
        hf_overrides={},
        max_logprobs=20,
        limit_mm_per_prompt={"image": 0, "video": 0},
        enable_lora=False,
        speculative_config=None,
        download_dir=None,
        enable_expert_parallel=False,
        runner="generate",
        load_format="safetensors",
        max_num_seqs=None,
    )
    assert texts(llm.generate(["a", "x"], GREEDY)) == ["bcd", "yza"]
    llm.close()


def test_num_gpu_blocks_override_is_num_kv_blocks(alphabet):
    with LLM(alphabet, num_gpu_blocks_override=7) as llm:
        assert llm.metrics()["num_blocks"] == 7


def test_seed_none_is_the_default_seed(alphabet):
    assert EngineArgs(model=alphabet, seed=None) == EngineArgs(model=alphabet)


def test_default_params_changed_before_use(llm):
    params = llm.get_default_sampling_params()
    params.temperature = 0.0
    params.max_tokens = 5
    assert texts(llm.generate("a", params)) == ["bcdef"]


def test_one_params_object_changed_between_calls(llm):
    params = SamplingParams(temperature=0)
    answers = []
    for params.max_tokens in (1, 4):
        answers += texts(llm.generate("a", params))
    assert answers == ["b", "bcde"]


def test_changes_that_concern_derived_fields_hold(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    params.stop = "f"
    assert texts(llm.generate("a", params)) == ["bcde"]
    params.stop = None
    params.bad_words = ["d"]
    assert "d" not in texts(llm.generate("a", params))[0]
    params.bad_words = None
    params.temperature, params.seed = 5.0, 0
    loose = texts(llm.generate(["a"] * 5, params))
    params.top_k = 1
    assert texts(llm.generate(["a"] * 5, params)) == ["bcdefghi"] * 5 != loose
    params.logit_bias = {ord("q"): 1000.0}
    assert texts(llm.generate("a", params)) == ["q" * 8]


def test_params_per_prompt_in_a_list_shared_and_changed(llm):
    base = SamplingParams(temperature=0, max_tokens=2)
    longer = base.clone()
    longer.max_tokens = 4
    assert texts(llm.generate(["a", "a"], [base, longer])) == ["bc", "bcde"]


def test_a_request_keeps_the_params_it_was_given(llm):
    params = SamplingParams(temperature=0, max_tokens=6, stop=["y"], stop_token_ids=[ord("x")])
    llm.add_request("a", "a", params)
    stream = llm.stream("r", params)
    params.max_tokens = 1
    params.stop.append("b")
    params.stop_token_ids.append(ord("s"))
    params.temperature = "hot"
    streamed = "".join(output.outputs[0].text for output in stream)
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert outputs["a"].outputs[0].text == "bcdefg"
    assert streamed == "stuvw"


def test_a_changed_field_is_checked_when_a_request_is_made(llm):
    params = SamplingParams(temperature=0)
    params.top_p = 1.5
    for make in (
        lambda: llm.generate("a", params),
        lambda: llm.add_request("bad", "a", params),
        params.clone,
    ):
        with pytest.raises(ValueError, match=r"top_p .* got 1\.5"):
            make()
    with pytest.raises(AttributeError, match="max_token"):
        params.max_token = 5
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, SamplingParams.clone, lambda params: pickle.loads(pickle.dumps(params))],
)
def test_params_are_copied_in_every_way(copied, llm):
    params = SamplingParams(temperature=0, max_tokens=4, stop=["d"], logit_bias={1: 2.0})
    twin = copied(params)
    assert twin == params
    assert repr(twin) == repr(params)
    twin.max_tokens = 2
    assert params.max_tokens == 4
    assert texts(llm.generate(["a", "a"], [params, twin])) == ["bc", "bc"]


def test_a_clone_shares_no_list_with_its_original():
    params = SamplingParams(stop=["d"], stop_token_ids=[1], bad_words=["x"], logit_bias={1: 2.0})
    twin = params.clone()
    for name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
        assert getattr(twin, name) == getattr(params, name)
        assert getattr(twin, name) is not getattr(params, name)


def test_params_with_everything_that_is_off(llm):
    params = SamplingParams(
        temperature=0,
        max_tokens=3,
        best_of=None,
        structured_outputs=None,
        guided_decoding=None,
        truncate_prompt_tokens=None,
        extra_args=None,
        logits_processors=None,
        spaces_between_special_tokens=True,
        skip_special_tokens=True,
        flat_logprobs=False,
        thinking_token_budget=None,
    )
    assert params == GREEDY
    assert texts(llm.generate("a", params)) == ["bcd"]


def test_one_prompt_as_a_string_a_text_prompt_and_a_tokens_prompt(llm):
    for prompt in ("a", TextPrompt(prompt="a"), TokensPrompt(prompt_token_ids=[97])):
        assert texts(llm.generate(prompt, sampling_params=GREEDY, use_tqdm=False)) == ["bcd"]


def test_a_list_of_tokens_prompts_from_the_tokenizer(llm):
    tokenizer = llm.get_tokenizer()
    prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(text)) for text in ("xa", "b")]
    outputs = llm.generate(prompts, GREEDY)
    assert texts(outputs) == ["bcd", "cde"]
    assert [output.prompt for output in outputs] == [None, None]


def test_a_tokens_prompt_with_its_text(llm):
    output = llm.generate(TokensPrompt(prompt_token_ids=[97], prompt="shown"), GREEDY)[0]
    assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == ("shown", [97], "bcd")


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []
    assert llm.generate([], [], use_tqdm=False) == []
    assert list(llm.stream([])) == []
    with pytest.raises(ValueError, match="one per prompt"):
        llm.generate([], [GREEDY])


def test_a_call_with_lora_request_none(llm):
    assert texts(llm.generate("a", GREEDY, use_tqdm=False, lora_request=None, priority=None)) == ["bcd"]


def test_several_samples_per_prompt(babbler):
    with LLM(babbler, num_kv_blocks=30) as llm:
        params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=6)
        output = llm.generate("x", params)[0]
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4


def test_the_same_seed_gives_the_same_answer_twice(babbler):
    with LLM(babbler, num_kv_blocks=30) as llm:
        params = SamplingParams(temperature=1.0, seed=42, max_tokens=12)
        first, second = llm.generate(["x", "x"], params)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_log_probabilities_of_output_and_prompt(llm):
    output = llm.generate("ab", SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=0))[0]
    for token_id, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert entry[token_id].rank == 1
        assert entry[token_id].decoded_token == chr(token_id)
        assert entry[token_id].logprob == pytest.approx(0, abs=1e-3)
    assert output.prompt_logprobs[0] is None
    assert list(output.prompt_logprobs[1]) == [98]


def test_stop_strings_and_finish_reasons(llm):
    params = SamplingParams(temperature=0, max_tokens=20, stop=["\n", "fg"])
    completion = llm.generate("a", params)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("bcde", "stop", "fg")


def test_classification_with_allowed_token_ids(llm):
    choices = [ord(letter) for letter in "Yn"]
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=choices)
    assert texts(llm.generate("is it? m", params)) == ["n"]


def test_the_prefix_caching_example(alphabet):
    prefix = "You are an expert school principal, skilled in effectively managing faculty. "
    prompts = [prefix + prompt for prompt in ("Hello", "The capital", "Fact")]
    regular = LLM(model=alphabet, gpu_memory_utilization=0.4, num_gpu_blocks_override=40)
    expected = texts(regular.generate(prompts, GREEDY))
    regular.shutdown()
    cached = LLM(model=alphabet, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(prompts[0], GREEDY)
    outputs = cached.generate(prompts, GREEDY)
    assert texts(outputs) == expected
    assert all(output.num_cached_tokens > 0 for output in outputs)
    assert cached.reset_prefix_cache()
    cached.shutdown()


def test_batch_inference_over_chunks_of_a_file(llm):
    lines = [f"line {letter}" for letter in LETTERS]
    answers = []
    for start in range(0, len(lines), 10):
        answers += texts(llm.generate(lines[start : start + 10], GREEDY, use_tqdm=False))
    assert answers == [(LETTERS * 2)[i + 1 : i + 4] for i in range(26)]


def test_priorities(alphabet):
    with LLM(alphabet, scheduling_policy="priority", max_num_seqs=1, num_kv_blocks=20) as llm:
        assert texts(llm.generate(["a", "b"], GREEDY, priority=[1, 0])) == ["bcd", "cde"]


def test_an_engine_in_a_with_block_and_a_second_after_it(alphabet):
    for _ in range(2):
        with LLM(alphabet, num_kv_blocks=5) as llm:
            assert texts(llm.generate("a", GREEDY)) == ["bcd"]


def test_progress_by_a_tqdm_of_one_s_own_is_not_needed(llm, capsys):
    llm.generate("a", GREEDY, use_tqdm=False)
    assert "Processed prompts" not in capsys.readouterr().err


# ---- LLM.chat ----

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay."},
]


def test_the_chat_example(llm):
    outputs = llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    assert outputs[0].prompt.startswith("system:You are a helpful assistant;user:Hello;")
    assert texts(outputs) == ["bcd"]


def test_many_conversations_at_once(llm):
    outputs = llm.chat([CONVERSATION for _ in range(10)], GREEDY, use_tqdm=True)
    assert texts(outputs) == ["bcd"] * 10


def test_a_chat_template_of_one_s_own_read_from_a_file(llm, tmp_path):
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    template = (tmp_path / "template.jinja").read_text()
    outputs = llm.chat([{"role": "user", "content": "m"}], GREEDY, chat_template=template)
    assert (outputs[0].prompt, texts(outputs)) == ("m", ["nop"])


def test_a_content_of_text_parts_is_joined_for_a_template_of_strings(llm):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    outputs = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert outputs[0].prompt == "user:one\ntwo;a"
    assert texts(outputs) == ["bcd"]
    assert parts[0] == {"type": "text", "text": "one"}


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (OF_PARTS, "user:<one><two>a"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}a", "one\ntwoa"),
        ("{{ messages[0]['content'].strip() }}a", "one\ntwoa"),
        ("{{ messages[0].content | length }}a", "7a"),
    ],
    ids=["of parts", "writes what it is given", "calls a string's method", "never writes it"],
)
def test_each_template_gets_the_content_it_reads(template, prompt, llm):
    content = [{"type": "text", "text": "one"}, "two"]
    outputs = llm.chat([{"role": "user", "content": content}], GREEDY, chat_template=template)
    assert outputs[0].prompt == prompt


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text"},
        {"text": "a"},
        5,
        {"type": "text", "text": 5},
    ],
    ids=str,
)
def test_a_content_with_more_than_text_is_refused(part, llm):
    with pytest.raises(ValueError, match=re.escape(repr(part))):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}], GREEDY)
    assert not llm.has_unfinished_requests()


def test_an_image_is_refused_without_all_of_its_data_in_the_message(llm):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    with pytest.raises(ValueError, match="images and audio are not served") as raised:
        llm.chat([{"role": "user", "content": [part]}], GREEDY)
    assert len(str(raised.value)) < 300


def test_tools_reach_the_template(llm):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    output = llm.chat(CONVERSATION[:1], GREEDY, tools=tools, chat_template_content_format="auto")[0]
    assert output.prompt.startswith("weather|system:")


def test_a_conversation_that_goes_on_with_the_answer(llm):
    messages = [{"role": "user", "content": "a"}]
    for _ in range(3):
        answer = llm.chat(messages, GREEDY, lora_request=None)[0].outputs[0].text
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    assert [message["content"] for message in messages[1::2]] == ["bcd"] * 3


def test_the_last_message_continued(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am m"}]
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = {"add_generation_prompt": False, "continue_final_message": True, "chat_template": template}
    assert texts(llm.chat(messages, GREEDY, **settings)) == ["nop"]


# ---- LLMEngine, by hand ----


def test_the_llm_engine_example(babbler):
    prompts = [
        (
            "A robot may not injure a human being",
            SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
        ),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (
            "What is the meaning of life?",
            SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        ),
    ]
    engine = LLMEngine.from_engine_args(EngineArgs(model=babbler, num_gpu_blocks_override=40))
    finished, request_id = [], 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, params = prompts.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    engine.shutdown()
    assert {output.request_id: len(output.outputs) for output in finished} == {"0": 1, "1": 1, "2": 2}


def test_the_lora_example_without_adapters(alphabet):
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=alphabet, enable_lora=False, max_loras=1, max_num_seqs=256)
    )
    engine.add_request("0", "a", GREEDY, lora_request=None)
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert texts(outputs) == ["bcd"]
    engine.shutdown()


def test_an_engine_s_request_is_aborted(llm):
    engine = llm.llm_engine
    engine.add_request("gone", "a", SamplingParams(temperature=0, max_tokens=None))
    engine.step()
    engine.abort_request(["gone"])
    assert not engine.has_unfinished_requests()


def test_the_engine_inside_an_llm_is_driven_by_hand(llm):
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    engine.add_request("by hand", TextPrompt(prompt="a"), SamplingParams(temperature=0, max_tokens=2))
    seen = []
    while engine.has_unfinished_requests():
        seen += texts(engine.step())
    assert seen == ["b", "bc"]


def test_args_go_around_as_a_dict(alphabet):
    args = EngineArgs(model=alphabet, max_model_len=64, max_num_seqs=2, limit_mm_per_prompt={"image": 0})
    settings = dataclasses.asdict(args) | {"seed": 3}
    with LLM(**settings) as llm:
        assert texts(llm.generate("a", GREEDY)) == ["bcd"]
        assert llm.llm_engine.max_model_len == 64


def test_args_from_a_command_line(alphabet):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--quantization")
    args = parser.parse_args(["--model", alphabet, "--max-model-len", "32"])
    with LLM(**vars(args)) as llm:
        assert texts(llm.generate("a", GREEDY)) == ["bcd"]


# ---- AsyncLLM ----


def test_the_async_streaming_example(alphabet):
    async def main():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=alphabet, enforce_eager=True))
        pieces = []
        try:
            params = SamplingParams(max_tokens=6, temperature=0, seed=42, output_kind=RequestOutputKind.DELTA)
            async for output in engine.generate(request_id="1", prompt="a", sampling_params=params):
                pieces += [completion.text for completion in output.outputs]
                if output.finished:
                    break
        finally:
            engine.shutdown()
        return pieces

    assert "".join(asyncio.run(main())) == "bcdefg"


def test_many_async_requests_with_one_params_object_changed_in_between(alphabet):
    async def main():
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=alphabet, disable_log_requests=True))
        params = SamplingParams(temperature=0, output_kind=RequestOutputKind.FINAL_ONLY)

        async def ask(length):
            params.max_tokens = length
            generator = engine.generate("a", params, f"request-{length}", lora_request=None)
            return [output.outputs[0].text async for output in generator][-1]

        try:
            return await asyncio.gather(*(ask(length) for length in range(1, 9)))
        finally:
            engine.shutdown()

    assert asyncio.run(main()) == [LETTERS[1 : length + 1] for length in range(1, 9)]


def test_an_async_request_keeps_its_params_while_it_waits_for_its_turn(alphabet):
    async def main():
        async with AsyncLLM(alphabet, max_concurrent_requests=1) as engine:
            first = engine.generate("a", SamplingParams(temperature=0, max_tokens=20), "first")
            await anext(first)
            params = SamplingParams(temperature=0, max_tokens=4, stop=["q"])
            second = asyncio.create_task(last_text(engine.generate("a", params, "second")))
            await asyncio.sleep(0)  # it waits for the first to end
            params.max_tokens = 1
            params.stop.append("b")
            await first.aclose()
            return await second

    async def last_text(generator):
        return [output.outputs[0].text async for output in generator][-1]

    assert asyncio.run(main()) == "bcde"


def test_an_async_request_for_what_is_not_served_is_refused_and_harms_nobody(alphabet):
    async def main():
        async with AsyncLLM(alphabet) as engine:
            for setting in ("lora_request", "lora_reqest"):
                with pytest.raises((ValueError, TypeError), match=setting):
                    await anext(engine.generate("a", GREEDY, "bad", **{setting: "an adapter"}))
            return [output async for output in engine.generate("a", GREEDY, "good", lora_request=None)][-1]

    assert asyncio.run(main()).outputs[0].text == "bcd"


# ---- metrics ----


def test_the_metrics_example(alphabet):
    llm = LLM(model=alphabet, disable_log_stats=False)
    llm.generate(["a", "b", "c"], SamplingParams(temperature=0, max_tokens=4))
    shown = {}
    for metric in llm.get_metrics():
        if isinstance(metric, (Gauge, Counter)):
            shown[metric.name] = shown.get(metric.name, 0) + metric.value
        elif isinstance(metric, Vector):
            shown[metric.name] = metric.values
        elif isinstance(metric, Histogram):
            assert metric.count == metric.buckets["+Inf"]
            shown[metric.name] = metric.count, metric.sum
    assert shown["vllm:num_requests_running"] == shown["vllm:num_requests_waiting"] == 0
    assert shown["vllm:kv_cache_usage_perc"] == 0
    assert shown["vllm:prompt_tokens"] == 3
    assert shown["vllm:generation_tokens"] == 12
    assert shown["vllm:request_success"] == 3
    assert shown["vllm:request_prompt_tokens"] == (3, 3)
    assert shown["vllm:request_generation_tokens"] == (3, 12)
    llm.shutdown()


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
    assert generated.buckets == {"1.0": 0, "2.0": 0, "5.0": 1, "10.0": 3, "20.0": 3, "50.0": 3, "+Inf": 3}
    assert by_name["vllm:request_params_n"].buckets["1.0"] == 1
    assert by_name["vllm:request_params_max_tokens"].sum == 40
    between = by_name["vllm:inter_token_latency_seconds"]
    assert between.count == generated.sum - 3  # each sample's first token has none before it
    assert between.sum <= by_name["vllm:request_decode_time_seconds"].sum * 2  # of a request with two samples
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    total = by_name["vllm:e2e_request_latency_seconds"]
    assert sum(by_name[f"vllm:{part}"].sum for part in parts) == pytest.approx(total.sum)
    assert total.count == 2
    first = by_name["vllm:time_to_first_token_seconds"].sum
    assert 0 < by_name["vllm:request_queue_time_seconds"].sum < first < total.sum


# ---- what is refused ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization": "awq"},
            "quantization='awq' does not fit the checkpoint, whose weights are unquantized",
        ),
        ({"quantization": "hqq"}, r"quantization must be one of \('int8', 'int4', .*\), got 'hqq'"),
        ({"kv_cache_dtype": "fp8"}, "set dtype"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens"),
        ({"limit_mm_per_prompt": {"image": 1}}, "only text"),
        ({"enable_lora": True}, "give lora=..., which is merged"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be"),
        ({"hf_overrides": {"rope_thetta": 1e6}}, "hf_overrides names 'rope_thetta', which is no field of a"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "set it in hf_overrides"),
        ({"generation_config": "/else/where"}, "generation_config must be one of"),
        ({"compilation_config": 0}, "enforce_eager=True"),
        ({"load_format": "gguf"}, "load_format must be one of"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_with_what_to_do_instead(settings, message, alphabet):
    with pytest.raises(ValueError, match=message):
        LLM(alphabet, **settings)


@pytest.mark.parametrize(
    ("make", "near"),
    [
        (lambda llm: LLM("m", max_model_length=5), "max_model_len"),
        (lambda llm: LLM("m", gpu_memory_utilisation=0.5), "gpu_memory_utilization"),
        (lambda llm: EngineArgs(model="m", num_gpu_block_override=5), "num_gpu_blocks_override"),  # type: ignore[call-arg]
        (lambda llm: SamplingParams(temprature=1), "temperature"),  # type: ignore[call-arg]
        (lambda llm: SamplingParams(max_new_tokens=1), "max_tokens"),  # type: ignore[call-arg]
        (lambda llm: llm.generate("a", use_tqmd=False), "use_tqdm"),
        (lambda llm: llm.chat(CONVERSATION, chat_templat=None), "chat_template"),
    ],
)
def test_a_misspelt_name_is_a_type_error_that_suggests_the_nearest(make, near, llm):
    with pytest.raises(TypeError, match=f"has no argument .*; did you mean '{near}'"):
        make(llm)
    with pytest.raises(TypeError, match=r"has no argument 'zzz': zzz=1 is not served"):
        SamplingParams(zzz=1)


@pytest.mark.parametrize(
    "setting",
    [{"enable_lorra": True}, {"kv_cache_dtyp": "fp8"}, {"kv_connector": "x"}, {"worker_use_ray": True}],
)
def test_no_name_is_suggested_that_would_be_refused_or_is_far_off(setting):
    with pytest.raises(TypeError, match=r"EngineConfig has no argument '(\w+)': \1=\S+ is not served$"):
        EngineArgs(model="m", **setting)


def test_a_setting_under_two_names_is_refused():
    with pytest.raises(TypeError, match="num_kv_blocks under two names"):
        EngineArgs(model="m", num_gpu_blocks_override=5, num_kv_blocks=5)


@pytest.mark.parametrize("setting", ["early_stopping", "best_of"])
def test_params_that_are_not_served_are_refused_before_anything_is_queued(setting):
    with pytest.raises((TypeError, ValueError), match=f"{setting}=3 is not served"):
        SamplingParams(**{setting: 3})
