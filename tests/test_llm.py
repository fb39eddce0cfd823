"""The whole engine: no schedule changes a token, and no request affects another one."""

import io
import logging
import sys
import time
import weakref
from types import SimpleNamespace

import pytest

from nanoengine import LLM, EngineConfig, RequestOutputKind, SamplingParams, TextPrompt, TokensPrompt
from nanoengine.backends.threads import on_all_cores
from tests import helpers
from tests.helpers import chain_checkpoint, checkpoint, failing_calls, finish, random_prompts, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=12, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return prompts of lengths around block boundaries, and some that share prefixes."""
    shared = random_prompts([40], seed=1)[0]
    tails = random_prompts([1, 8, 9, 30], seed=2)
    return [*random_prompts([1, 2, 15, 16, 17, 32, 33, 70]), shared, shared, *[shared + t for t in tails]]


@pytest.fixture(scope="module")
def expected(prompts, tmp_path_factory):
    """Return greedy tokens of transformers, and seeded ones of requests that ran alone without a cache."""
    path, reference = checkpoint("qwen3", tmp_path_factory)
    with LLM(str(path), num_kv_blocks=40, enable_prefix_caching=False) as llm:
        alone = [[tokens(llm, prompt, params)[0] for prompt in prompts] for params in (GREEDY, SEEDED)]
    helpers.check_greedy(reference, prompts, 12, alone[0])
    return alone


@pytest.fixture(scope="module")
def llm(qwen3):
    """Yield an engine with blocks of 16 for tests that leave it empty."""
    with LLM(qwen3, block_size=16, num_kv_blocks=60) as llm:
        yield llm
        assert llm.metrics()["num_free_blocks"] == 60


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory):
    """Yield a model that continues the alphabet, at most 64 tokens long."""
    path = chain_checkpoint(tmp_path_factory.mktemp("alphabet"), "abcdefgh")
    with LLM(str(path), num_kv_blocks=20, max_model_len=64) as llm:
        yield llm


def tokens(llm, prompts, params):
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


SCHEDULES = {
    "no cache": {"enable_prefix_caching": False},
    "cache": {},
    "budget of 50, no cache": {"max_num_batched_tokens": 50, "enable_prefix_caching": False},
    "threshold of 5": {"long_prefill_token_threshold": 5},
    "three at a time": {"max_num_seqs": 3},
    "one at a time": {"max_num_seqs": 1},
}
SCHEDULES |= {f"budget of {n}": {"max_num_batched_tokens": n} for n in (1, 7)}
SCHEDULES |= {f"blocks of {n}": {"block_size": n, "num_kv_blocks": 1500 // n + 20} for n in (1, 2, 7, 256)}
SCHEDULES |= {f"preempted, blocks of {n}": {"block_size": n, "num_kv_blocks": 128 // n} for n in (1, 4, 16)}
AT_LENGTH = "cache", "budget of 1", "blocks of 2", "blocks of 7", "one at a time", "preempted, blocks of 4"


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in AT_LENGTH else []) for x in SCHEDULES]
)
def test_no_schedule_changes_a_token(name, qwen3, prompts, expected):
    settings = {"block_size": 16, "num_kv_blocks": 200, **SCHEDULES[name]}
    with LLM(qwen3, **settings) as llm:
        for params in (GREEDY, SEEDED, GREEDY):  # the second and third time with a warm cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert tokens_of(outputs) == expected[params is SEEDED]
            num_preemptions = sum(out.metrics.num_preemptions for out in outputs)
            assert num_preemptions > 2 if "preempted" in name else num_preemptions == 0
        assert llm.metrics()["num_free_blocks"] == settings["num_kv_blocks"]


def test_unseeded_requests_follow_the_seed_of_the_engine(qwen3):
    runs = []
    for seed in (0, 0, 1):
        with LLM(qwen3, num_kv_blocks=20, seed=seed) as llm:
            params = SamplingParams(temperature=1.0, max_tokens=10, seed=-1 if runs else None)  # the same
            runs.append(tokens(llm, [[1, 2, 3]] * 3, params))
    assert runs[0] == runs[1] != runs[2]
    assert len(set(map(tuple, runs[0]))) == 3  # each request has its own seed


def test_every_form_of_prompt_and_params_is_accepted(alphabet):
    params = SamplingParams(temperature=0, max_tokens=3)
    for one in ("a", [97], {"prompt": "a"}, {"prompt_token_ids": [97]}):
        outputs = alphabet.generate(one, params, use_tqdm=False)
        assert [out.outputs[0].text for out in outputs] == ["bcd"]
        assert outputs[0].prompt_token_ids == [97]
    shown = TokensPrompt(prompt_token_ids=[98], prompt="shown")
    mixed = alphabet.generate(["a", TextPrompt(prompt="c"), [100], shown], [params] * 4, use_tqdm=False)
    assert [out.outputs[0].text for out in mixed] == ["bcd", "def", "efg", "cde"]
    assert [out.prompt for out in mixed] == ["a", "c", None, "shown"]
    assert alphabet.generate(["a", "b"], use_tqdm=False)[1].outputs[0].finish_reason == "length"


def test_end_of_sequence_stop_tokens_and_min_tokens(tmp_path):
    with LLM(str(chain_checkpoint(tmp_path, "abc<eos>")), num_kv_blocks=20) as llm:

        def run(**fields):
            params = SamplingParams(temperature=0, **{"max_tokens": 8, **fields})
            out = llm.generate("a", params, use_tqdm=False)[0].outputs[0]
            return out.text, out.token_ids, out.finish_reason, out.stop_reason

        assert run() == ("bc", [98, 99, 256], "stop", None)
        assert run(max_tokens=3) == ("bc", [98, 99, 256], "stop", None)
        assert run(max_tokens=2) == ("bc", [98, 99], "length", None)
        assert run(ignore_eos=True, max_tokens=5) == ("bcab", [98, 99, 256, 97, 98], "length", None)
        assert run(stop_token_ids=[99]) == ("b", [98, 99], "stop", 99)
        assert run(stop_token_ids=[99], include_stop_str_in_output=True)[0] == "bc"
        assert 256 not in run(min_tokens=6)[1][:6]
        assert run(stop="b", min_tokens=2, max_tokens=3)[2:] == ("stop", None)  # by the end of sequence
        # A stop string counts from the first token after min_tokens, not from the last before.
        assert run(stop="c", min_tokens=2, ignore_eos=True, max_tokens=4)[2] == "length"
        assert run(stop="c", min_tokens=1, ignore_eos=True)[2:] == ("stop", "c")
        # Seen too early, it is not found later either, not even beside a longer one.
        assert run(stop=["b", "z" * 30], min_tokens=3, max_tokens=4, ignore_eos=True)[2] == "length"


BAD_PROMPTS: dict[str, list] = {
    "prompt is empty": ["", [[]], [[1, 2], []], ["ok", ""]],
    r"token ids in \[0, 257\), got 257": [[257]],
    "integer token ids": [[1, 2.5]],
    "prompt must be": [{"prompt": None}, [None], {"prompt_token_ids": None}, [b"abc"]],
    "prompt must be a string": [[[1], 5], {"prompt": 5}],
    "prompt must be a string, token ids": [{"prompt_token_ids": "ab"}],
    "prompt dict": [{1: 2, "a": 3}, {}, {"text": "a"}],
    "prompts must be": [b"abc", (i for i in [1]), 5, None],
    "valid Unicode": ["\ud800"],
    "64 tokens but max_model_len is 64": [[1] * 64],
    "100 tokens but max_model_len is 64": ["x" * 100],
}
BAD_REQUESTS = [(prompt, message) for message, prompts in BAD_PROMPTS.items() for prompt in prompts]


@pytest.mark.parametrize(("prompt", "message"), BAD_REQUESTS, ids=range(len(BAD_REQUESTS)))
def test_bad_request_is_rejected_and_does_not_affect_others(prompt, message, alphabet):
    alphabet.add_request("neighbor", "a", SamplingParams(temperature=0, max_tokens=5))
    alphabet.step()
    before = alphabet.metrics()
    with pytest.raises((ValueError, TypeError), match=message):
        alphabet.generate(prompt, use_tqdm=False)
    assert alphabet.metrics() == before
    assert finish(alphabet)["neighbor"].outputs[0].text == "bcdef"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": [SamplingParams()] * 2}, "sampling_params must be one per prompt: got 2 for 3"),
        ({"sampling_params": [None] * 3}, "sampling_params must be SamplingParams"),
        ({"sampling_params": {"temperature": 1}}, "sampling_params"),
        ({"priority": [1, 2, 3]}, "scheduling_policy"),
        ({"priority": [0]}, "priority must be one per prompt"),
        ({"priority": "3"}, "priority must be one for all prompts or a list"),
        ({"sampling_params": 5}, "sampling_params must be one for all prompts or a list"),
        ({"stop_token_ids": list(range(257)), "min_tokens": 3}, "min_tokens=3 bans"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"allowed_token_ids": [256], "min_tokens": 2}, "min_tokens=2 bans .* allowed_token_ids"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, r"\['a', 'b'\] bans .*=\[97, 98\]"),
    ],
)
def test_bad_arguments_queue_no_request(arguments, message, alphabet):
    if "sampling_params" not in arguments and "priority" not in arguments:
        arguments = {"sampling_params": SamplingParams(**arguments)}
    with pytest.raises((ValueError, TypeError), match=message):
        alphabet.generate(["a", "b", "c"], **arguments)
    assert not alphabet.has_unfinished_requests()


def test_prompt_larger_than_the_cache_is_rejected(qwen3):
    with LLM(qwen3, block_size=4, num_kv_blocks=3) as llm:
        with pytest.raises(ValueError, match=r"13 tokens but the KV cache holds 12"):
            llm.generate([[1] * 5, [1] * 13], GREEDY, use_tqdm=False)
        assert tokens(llm, [[1] * 5], SamplingParams(temperature=0, max_tokens=2))[0]


BAD_VALUES: dict = {"max_num_seqs": [0, 2**31], "max_model_len": [1, 513], "device": ["gpu", "meta", None]}
BAD_VALUES |= {"logprobs_mode": ["raw_logits", None], "dtype": ["int8", "bf16"], "load_format": ["pickle"]}
BAD_VALUES |= {"kv_cache_bytes": [100], "gpu_memory_utilization": [1.5], "scheduling_policy": ["lifo"]}
BAD_VALUES |= {"max_num_batched_tokens": [0], "block_size": [0], "num_kv_blocks": [0]}
BAD_VALUES |= {"tensor_parallel_size": [0], "long_prefill_token_threshold": [-1]}
BAD_TYPES: dict = {"max_num_seq": 3, "block_size": 16.0, "seed": "x", "enforce_eager": "yes"}
BAD_TYPES |= {"enable_prefix_caching": 1}


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        *(({name: value}, ValueError, name) for name, values in BAD_VALUES.items() for value in values),
        *(({name: value}, TypeError, name) for name, value in BAD_TYPES.items()),
        ({"num_kv_blocks": 5, "kv_cache_bytes": 5}, ValueError, "kv_cache_bytes"),
        ({"num_kv_blocks": 10**12, "block_size": 256}, ValueError, "lower num_kv_blocks"),
        ({"tokenizer": "/absent"}, ValueError, "/absent"),
    ],
)
def test_bad_setting_is_rejected_by_name(settings, error, name, qwen3):
    with pytest.raises(error, match=name):
        LLM(qwen3, **settings)


def test_an_llm_is_made_from_a_config_and_is_its_own_engine(qwen3):
    with LLM.from_engine_args(EngineConfig(qwen3, num_kv_blocks=20)) as llm:
        assert llm.llm_engine is llm
        assert llm.metrics()["num_blocks"] == 20


def test_failed_launch_loses_no_output_of_the_previous_step(babbler):
    """With bad words, async scheduling collects the previous step in a call of its own, before the launch."""
    params = [SamplingParams(temperature=0, max_tokens=n, bad_words=["a"]) for n in (2, 5)]
    with LLM(babbler, num_kv_blocks=20, async_scheduling=True) as llm:
        expected = tokens(llm, [[1], [2]], params)
        for i in range(2):
            llm.add_request(str(i), [i + 1], params[i])
        with failing_calls(llm.llm_engine.runner, "launch", {2}):
            outputs = [output for _ in range(4) for output in llm.step()]
            with pytest.raises(RuntimeError, match="flaky"):
                llm.step()
        finished = {output.request_id: output for output in outputs if output.finished}
        assert [*finished] == ["0"]
        finished |= finish(llm)
        assert [finished[i].outputs[0].token_ids for i in "01"] == expected


def test_tokenizer_that_panics_ends_only_its_request(alphabet, caplog):
    panic = BaseException("flaky")  # a panic of Rust's is no Exception
    params = [SamplingParams(temperature=0, max_tokens=n, logprobs=0) for n in (2, 4, 4)]
    for i in range(3):
        alphabet.add_request(str(i), "abc"[i], params[i])
    alphabet.step()
    with failing_calls(alphabet.scheduler.running[1].detokenizer, "append", {0}, panic):
        finished = {request_id: output.outputs[0] for request_id, output in finish(alphabet).items()}
    assert (finished["0"].text, finished["0"].finish_reason) == ("bc", "length")
    assert (finished["1"].token_ids, finished["1"].finish_reason) == (list(b"cd"), "error")
    assert finished["1"].stop_reason == "the tokenizer failed on a sampled token"
    assert finished["2"].text == "defg"
    assert [len(completion.logprobs) for completion in finished.values()] == [2, 2, 4]
    assert caplog.record_tuples[0][::2] == ("nanoengine.engine", "the tokenizer failed on a sampled token")
    assert "flaky" in caplog.text


def test_generate_keeps_outputs_of_added_requests(llm, prompts, expected):
    params = SamplingParams(temperature=0, max_tokens=2)
    llm.add_request("0", prompts[2], params)
    assert tokens(llm, [prompts[3]], GREEDY) == [expected[0][3]]  # "0" finishes meanwhile
    assert llm.has_unfinished_requests()
    with pytest.raises(ValueError, match="'0' is already in use"):  # until its last output is returned
        llm.add_request("0", [3], params)
    (output,) = llm.step()
    assert (output.request_id, output.outputs[0].token_ids) == ("0", expected[0][2][:2])
    assert not llm.has_unfinished_requests()
    llm.add_request("0", [3], params)
    assert finish(llm).keys() == {"0"}


def test_abort_returns_everything_not_returned_yet_of_ids_named_twice_or_finished(llm, prompts, expected):
    delta = SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.DELTA)
    llm.add_request("x", prompts[3], delta)
    llm.add_request("y", [2], SamplingParams(max_tokens=1))
    llm.generate([2], SamplingParams(max_tokens=5), use_tqdm=False)  # "y" finishes meanwhile
    outputs = llm.abort_request(["x", "x", "y"])
    assert [(o.outputs[0].finish_reason, o.finished) for o in outputs] == [("abort", True), ("length", True)]
    assert outputs[0].outputs[0].token_ids == expected[0][3][:5]
    assert llm.abort_request("x") == llm.step() == []


def test_seconds_of_the_phases_add_up(qwen3, monkeypatch):
    """In CPU seconds of this thread, which do not pass while others run."""
    monkeypatch.setattr("nanoengine.timing.time", SimpleNamespace(perf_counter=time.thread_time))
    names = {f"seconds_{phase}" for phase in ("schedule", "inputs", "forward", "sample", "update")}
    # A budget of 8 makes steps that sample nothing.
    with LLM(qwen3, block_size=16, num_kv_blocks=30, max_num_batched_tokens=8) as llm:
        assert all(llm.metrics()[name] == 0 for name in names)
        start = time.thread_time()
        llm.generate([[1] * 20, [2] * 10], SamplingParams(max_tokens=30), use_tqdm=False)
        elapsed = time.thread_time() - start
        seconds = {name: value for name, value in llm.metrics().items() if name.startswith("seconds_")}
        assert seconds.keys() == names
        assert all(value > 0 for value in seconds.values())
        assert 0.3 * elapsed < sum(seconds.values()) < elapsed


@pytest.mark.parametrize("how", ["del", "close", "with"])
def test_memory_of_an_engine_is_released_at_once(how, qwen3, no_gc):
    llm = LLM(qwen3, num_kv_blocks=50)
    llm.generate([1, 2], use_tqdm=False)
    cache = weakref.ref(llm.llm_engine.runner.caches[0].k)
    weight = weakref.ref(llm.llm_engine.runner.model.embed_tokens.weight)
    if how == "del":
        del llm
    elif how == "close":
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([1, 2], use_tqdm=False)
        with pytest.raises(RuntimeError, match="closed"):
            llm.add_request("x", [1, 2])
        assert not llm.has_unfinished_requests()
        llm.close()  # a second time changes nothing
    else:
        with llm:
            pass
    assert cache() is None
    assert weight() is None


def test_cache_is_sized_by_bytes_or_by_memory(qwen3):
    block_bytes = 2 * 2 * 16 * 2 * 32 * 4  # k and v, layers, tokens, kv heads, head_dim, float32
    with LLM(qwen3, block_size=16, kv_cache_bytes=10 * block_bytes) as llm:
        assert llm.metrics()["num_blocks"] == 9  # and the null block
        assert sum(c.k.nbytes + c.v.nbytes for c in llm.llm_engine.runner.caches) == 10 * block_bytes
    with LLM(qwen3, block_size=16, kv_cache_bytes=10 * block_bytes, max_num_seqs=1, max_model_len=20) as llm:
        assert llm.metrics()["num_blocks"] == 9  # given bytes are used, if only for the prefix cache
    with LLM(qwen3, block_size=16, max_num_seqs=4, max_model_len=65) as llm:
        assert llm.metrics()["num_blocks"] == 20  # all that four sequences of 65 tokens can hold


def test_chat_renders_the_template_once(alphabet):
    params = SamplingParams(temperature=0, max_tokens=2)
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="no chat template"):
        alphabet.chat(chat, params, use_tqdm=False)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ suffix }}"
    kwargs = {"chat_template": template, "use_tqdm": False}
    one = alphabet.chat(chat, params, **kwargs, chat_template_kwargs={"suffix": "c"})
    assert (one[0].prompt, one[0].outputs[0].text) == ("ac", "de")
    two = alphabet.chat([chat, [{"role": "user", "content": "b"}]], params, **kwargs)
    assert [out.outputs[0].text for out in two] == ["bc", "cd"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_only_on_a_terminal_and_only_if_it_takes_long(is_terminal, monkeypatch):
    screen, now = io.StringIO(), [0.0]
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert on_all_cores("packing", int, range(9)) == [*range(9)]
    assert screen.getvalue() == ""
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    on_all_cores("packing", lambda i: now.__setitem__(0, 0.6 * i), range(9))
    assert ("packing:" in screen.getvalue()) == is_terminal


def test_startup_logs_one_line_and_the_seconds_of_its_phases_at_level_debug(caplog):
    LLM("demo", num_kv_blocks=9).close()
    (line,) = caplog.messages
    assert line.startswith("Qwen3ForCausalLM")
    with caplog.at_level(logging.DEBUG, "nanoengine"):
        LLM("demo", num_kv_blocks=9).close()
    names = [record.args[0] for record in caplog.records if record.levelno == logging.DEBUG]
    assert names == ["header", "config", "tokenizer", "kernels", "weights", "packing", "KV cache"]
