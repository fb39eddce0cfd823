"""nano.py against transformers, the full engine, and doubles of what a GPU has.

Its scheduler, block manager, graphs and sampler must also pass the checks of the lessons: test_docs_check.py.
"""

import json
import math
import random
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import nanoengine
from nanoengine import nano
from tests import doubles
from tests.backends.test_fake_cuda import cuda_guard  # noqa: F401  a fixture
from tests.helpers import DEMO, check_greedy, checkpoint, edit_config, failing_calls, random_prompts, slow

SOURCE = Path(nano.__file__)
PROMPTS = random_prompts([1, 3, 4, 5, 8, 9, 17, 30])
PROMPTS += [PROMPTS[-1], PROMPTS[-1][:16], [*PROMPTS[-1][:8], 5]]  # equal, a prefix, and another end
SETTINGS = {
    "roomy": {},
    "three tokens a step": {"max_num_batched_tokens": 3},
    "preemptions": {"num_kvcache_blocks": 12, "max_num_batched_tokens": 20},
    "two sequences at a time": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False, "num_kvcache_blocks": 15},
    "blocks of one token": {"kvcache_block_size": 1, "num_kvcache_blocks": 64},
}
MODELS = ["qwen3", "qwen3 tied, one kv head", "qwen3 with attention bias", "qwen2 tied", "llama without gqa"]
MODELS += ["llama with biases", "llama3 rope", "llama odd sizes"]


def load(path, **settings):
    defaults = {"dtype": "float32", "kvcache_block_size": 4, "num_kvcache_blocks": 100, "device": "cpu"}
    return nano.LLM(path, **{**defaults, **settings})


def answers(llm, prompts=PROMPTS, **params):
    params = nano.SamplingParams(**{"temperature": 0, "max_tokens": 12, **params})
    return [answer["token_ids"] for answer in llm.generate(prompts, params, use_tqdm=False)]


# ---- The tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path_factory):
    path, model = checkpoint(name, tmp_path_factory)
    llm = load(path)
    for _ in range(2):  # the second time from a warm cache
        check_greedy(model, PROMPTS, 12, answers(llm))


SEEDED = [
    nano.SamplingParams(temperature=1.5, seed=i // 2, top_k=i % 3 * 20, top_p=1 - i / 30, max_tokens=9)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def alone(qwen3):
    """Return seeded samples of requests that run alone."""
    llm = load(qwen3)
    pairs = zip(PROMPTS, SEEDED, strict=True)
    return [llm.generate([prompt], params, use_tqdm=False)[0] for prompt, params in pairs]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_setting_changes_greedy_tokens_or_seeded_samples(settings, alone, tmp_path_factory):
    path, model = checkpoint("qwen3", tmp_path_factory)
    llm = load(path, **settings)
    check_greedy(model, PROMPTS, 12, answers(llm))
    assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
    assert llm.generate(PROMPTS, SEEDED, use_tqdm=False) == alone


def test_the_bundled_model_answers_like_transformers_and_the_full_engine():
    questions = ["What is 62 + 19?", "Spell the word paging backwards."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    chats = [[{"role": "user", "content": question}] for question in questions]
    how = {"add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(chat, **how) for chat in chats]
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO)
    params = nano.SamplingParams(temperature=0, max_tokens=60)
    found = nano.LLM(DEMO, device="cpu", num_kvcache_blocks=64).generate(texts, params, use_tqdm=False)
    told = [answer["token_ids"] for answer in found]
    check_greedy(model, [tokenizer.encode(text) for text in texts], 60, told)
    params = nanoengine.SamplingParams(temperature=0, max_tokens=60)
    with nanoengine.LLM(DEMO, num_kv_blocks=64) as llm:
        outputs = [output.outputs[0] for output in llm.generate(texts, params, use_tqdm=False)]
    assert found == [{"text": output.text, "token_ids": output.token_ids} for output in outputs]


@pytest.mark.parametrize("hashed", [lambda content, seed: 7, lambda content, seed: content[0] + seed % 2])
def test_a_collision_of_hashes_changes_no_token(hashed, qwen3, monkeypatch):
    expected = answers(load(qwen3))
    monkeypatch.setattr(nano, "xxh3_64_intdigest", hashed)
    assert answers(load(qwen3, num_kvcache_blocks=12)) == expected


# ---- Stopping, refusals and loading --------------------------------------------------------------


def test_an_answer_ends_at_max_tokens_at_a_stop_token_at_max_model_len_or_when_it_fills_the_cache(qwen3):
    llm = load(qwen3, num_kvcache_blocks=5, max_model_len=30)
    prompt, params = PROMPTS[4], {"max_tokens": 100}
    whole = answers(llm, [prompt], **params)[0]
    assert len(whole) == 5 * 4 + 1 - len(prompt)
    assert answers(load(qwen3, max_model_len=19), [prompt], **params)[0] == whole[: 19 - len(prompt)]
    llm.stop_ids = frozenset([whole[5], 127])
    end = whole.index(whole[5]) + 1
    assert answers(llm, [prompt], **params)[0] == whole[:end]
    assert answers(llm, [prompt], ignore_eos=True, **params)[0] == whole


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([7, 9], 5, {7, 9}),
        (7, 5, {7}),
        (None, 5, {5}),
        ("no file", [5, 6], {5, 6}),
        ("no file", None, {None}),
    ],
)
def test_stop_tokens_come_from_the_generation_config_or_the_config(
    generation, config, expected, qwen3, tmp_path
):
    path = shutil.copytree(qwen3, tmp_path / "model")
    edit_config(path, eos_token_id=config)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    if generation == "no file":
        (path / "generation_config.json").unlink()
    assert load(path).stop_ids == expected


def test_a_prompt_that_cannot_be_answered_is_refused_before_any_runs(qwen3):
    llm = load(qwen3, num_kvcache_blocks=5)
    kinds = [1, 1.5], [1, "3"], [None], [[1]], [True], [2**70], 1, b"text"
    for wrong in [], [1] * 21, [1, 128], [-1, 5], *kinds:
        message = f"needs 1 to 20 token ids in [0, 128), not {np.size(wrong)}: {str(wrong)[:60]}"
        with pytest.raises(ValueError, match=re.escape(message)):
            answers(llm, [[1], wrong])
        assert not llm.scheduler.waiting
    with pytest.raises(ValueError, match="no tokenizer"):
        answers(llm, [[1], "text"])
    with pytest.raises(ValueError, match="2 prompts need as many SamplingParams"):
        llm.generate([[1], [2]], [nano.SamplingParams()], use_tqdm=False)


def test_prompts_are_texts_lists_and_arrays_and_a_bare_text_is_one_prompt():
    llm = nano.LLM(DEMO, device="cpu", num_kvcache_blocks=50)
    ids = llm.tokenizer.encode("Hi")
    forms = [["Hi"], "Hi", ("Hi",), [ids], iter([np.array(ids)]), np.array([ids])]
    assert all(answers(llm, form) == answers(llm, [ids]) for form in forms)
    assert answers(llm, []) == []


def test_parameters_out_of_range_are_refused():
    wrong: dict = {"temperature": [-1, math.nan], "top_k": [-1, 1.5], "top_p": [0, 1.5, math.nan]}
    wrong |= {"max_tokens": [0, -1, 2.5], "seed": [0.5]}
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(ValueError, match=f"needs temperature,.*{name}={value}"):
            nano.SamplingParams(**{name: value})


def test_what_the_file_does_not_compute_is_refused_by_name(tmp_path_factory):
    for name in "mistral", "llama yarn rope", "qwen2 sliding from layer 1":
        with pytest.raises(ValueError, match="is not supported"):
            load(checkpoint(name, tmp_path_factory)[0])
    for other in "gpt2", "gemma3_text", "mamba":  # their configs lack fields that the file reads
        transformers.AutoConfig.for_model(other).save_pretrained(path := tmp_path_factory.mktemp(other))
        with pytest.raises(ValueError, match=f"model_type '{other}' is not supported"):
            load(path)
    for settings in {"tensor_parallel_size": 2}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 0}:
        with pytest.raises(ValueError, match="tensor_parallel_size must be 1, max_num_seqs and"):
            load("no matter", **settings)
    with pytest.raises(ValueError, match="no memory is left"):
        load(checkpoint("qwen3", tmp_path_factory)[0], num_kvcache_blocks=0)


def test_a_checkpoint_in_several_files_is_loaded_and_a_missing_tensor_is_named(tmp_path_factory, tmp_path):
    path, model = checkpoint("qwen3", tmp_path_factory)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert answers(load(tmp_path), PROMPTS[:3]) == answers(load(path), PROMPTS[:3])
    for file in files:
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(ValueError, match=r"lacks '(model|lm_head)"):
            load(tmp_path)
        file.write_bytes(data)


@pytest.mark.parametrize(("part", "name", "call"), [("model_runner", "run", 0), ("scheduler", "add", 2)])
def test_after_an_interruption_no_request_is_left_and_no_block_of_its_step_is_hit(part, name, call, qwen3):
    llm = load(qwen3)
    interrupted = failing_calls(getattr(llm, part), name, {call}, KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        answers(llm)
    assert not llm.scheduler.waiting
    assert answers(llm) == answers(load(qwen3))


def test_without_a_seed_answers_differ_and_any_integer_is_a_seed(qwen3):
    llm = load(qwen3)
    assert len(set(map(tuple, answers(llm, [[1, 2, 3]] * 8, temperature=1.0)))) == 8
    for seed in -1, 2**64, 10**30, np.int64(-5):
        once, again = (answers(llm, [[1]], temperature=1.0, seed=seed) for _ in range(2))
        assert once == again


# ---- The GPU's path ------------------------------------------------------------------------------


@pytest.fixture
def flash(monkeypatch):
    """Install strict doubles of flash-attn and of CUDA graphs. Returns the count of calls by path."""
    monkeypatch.setattr(doubles.FlashKernels, "dtypes", (torch.float32,))
    for name in "flash_attn_varlen_func", "flash_attn_with_kvcache":
        monkeypatch.setattr(nano, name, getattr(doubles, name), raising=False)
    monkeypatch.setattr(nano.Model, "use_flash", property(lambda _: True, lambda *_: None), raising=False)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)

    def capture(compute, pool):
        compute()
        out = compute()

        def replay():
            doubles.calls["replay"] += 1
            out.copy_(compute())

        return out, replay

    monkeypatch.setattr(nano, "capture", capture)
    doubles.calls.clear()
    return doubles.calls


FLASH = [({}, False), ({"max_num_batched_tokens": 3}, True), ({"num_kvcache_blocks": 3}, False)]
FLASH += slow(*((settings, not enforce_eager) for settings, enforce_eager in FLASH))


@pytest.mark.parametrize(("settings", "enforce_eager"), FLASH, ids=str)
def test_flash_attn_and_graphs_compute_the_same_tokens(settings, enforce_eager, flash, qwen3, monkeypatch):
    long = [] if "max_num_batched_tokens" in settings else random_prompts([250, 256, 300])
    prompts = [*PROMPTS, *long]
    prompts.append(prompts[-1])
    llm = load(qwen3, enforce_eager=enforce_eager, max_num_seqs=20, kvcache_block_size=None, **settings)
    assert llm.scheduler.block_manager.block_size == 256
    sizes = [3, 2, 1] if "max_num_batched_tokens" in settings else [20, 16, 8, 4, 2, 1]
    assert list(llm.model_runner.graphs) == ([] if enforce_eager else sizes)
    flash.clear()
    found = answers(llm, prompts)
    assert flash["varlen paged"] > 0
    assert flash["with_kvcache"] > 0
    assert (flash["replay"] > 0) == (not enforce_eager)
    assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
    monkeypatch.undo()
    assert found == answers(load(qwen3), prompts)


def test_nothing_in_a_step_waits_for_the_gpu_but_the_reading_of_tokens(flash, qwen3, monkeypatch, request):
    fake = pytest.importorskip("tests.backends.test_fake_cuda", reason="PyTorch 2.9")
    request.getfixturevalue("cuda_guard")
    runner = load(qwen3, dtype="float32", enforce_eager=True, kvcache_block_size=256).model_runner
    monkeypatch.setattr(
        nano, "flash_attn_with_kvcache", lambda q, *_, cache_seqlens, **__: fake.attend(q, cache_seqlens)
    )
    monkeypatch.setattr(nano, "flash_attn_varlen_func", lambda q, k, v, *lens, **_: fake.attend(q, *lens[:2]))
    model, device = runner.model, torch.device("cuda", 0)
    params = [nano.SamplingParams(**one) for one in ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.5})]
    seqs = [nano.Sequence([1] * 9, one, 9, block_table=[i]) for i, one in enumerate(params)]
    read = []
    with fake.FakeTensorMode(allow_non_fake_inputs=True):
        model.dtype = torch.bfloat16
        model.weights = {
            name: torch.empty_like(x, dtype=model.dtype, device=device) for name, x in model.weights.items()
        }
        model.embedding = model.lm_head = model.weights["model.embed_tokens.weight"]
        model.frequencies = torch.empty_like(model.frequencies, device=device)
        model.device = runner.device = device
        runner.allocate_kv_cache(4)
        monkeypatch.setattr(
            "torch._subclasses.FakeTensor.tolist", lambda tokens: read.append(tokens) or [0] * len(tokens)
        )
        for lens in ([9, 9, 9], [1, 9, 2], [1, 1, 1]):  # prompts, a mixed batch, decodes
            with fake.Watch():
                chunks = [nano.Chunk(seq, 9 - n, 9, True) for seq, n in zip(seqs, lens, strict=True)]
                assert runner.run(chunks) == [0, 0, 0]
    assert len(read) == 3
    assert {tokens.device for tokens in read} == {device}


def test_the_cache_takes_the_share_of_a_gpu_that_weights_and_the_largest_step_leave(qwen3, monkeypatch):
    runner, steps = load(qwen3).model_runner, []
    assert runner.count_blocks(0.9, 8, 64) == (1 << 30) // (2 * 2 * 4 * 2 * 32 * 4) - 1
    figures = {"max_memory_allocated": 130 << 20, "memory_allocated": 30 << 20}
    figures |= {"mem_get_info": (960 << 20, 1 << 30), "reset_peak_memory_stats": None, "empty_cache": None}
    for name, value in figures.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr(runner, "run", steps.append)
    monkeypatch.setattr(runner, "device", torch.device("cuda", 0))
    usable = int((1 << 30) * 0.5) - (64 << 20) - (100 << 20)
    assert runner.count_blocks(0.5, 8, 66) == usable // (2 * 2 * 4 * 2 * 32 * 4) - 1
    assert [(chunk.start, chunk.end, chunk.samples) for chunk in steps[0]] == [(0, 8, True)] * 8
    assert {block for chunk in steps[0] for block in chunk.seq.block_table} == {0}


# ---- nano-vllm's scripts, and the command --------------------------------------------------------

SCRIPT = """
import os
from nanoengine.nano import LLM, SamplingParams
from transformers import AutoTokenizer

path = os.path.expanduser("~/huggingface/Qwen3-0.6B/")
tokenizer = AutoTokenizer.from_pretrained(path)
llm = LLM(path, enforce_eager=True, tensor_parallel_size=1, max_model_len=4096)
questions = ["introduce yourself", "list all prime numbers within 100"]
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    for question in questions
]
for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=60))):
    print("Prompt:", repr(prompt))
    print("Completion:", repr(output["text"]))
"""


@pytest.fixture
def sparse(monkeypatch):
    """Let zeros take memory only where they are written: a script's cache has 1 GiB."""
    monkeypatch.setattr(torch, "zeros", lambda shape, **_: torch.from_numpy(np.zeros(shape, np.float32)))


def test_a_script_for_nano_vllm_runs_with_another_import(tmp_path, monkeypatch, capsys, sparse):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "Qwen3-0.6B").symlink_to(DEMO)
    exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.count("Prompt: '<|im_start|>user") == printed.count("Completion: ") == 2


def run(monkeypatch, *arguments, source=SOURCE):
    monkeypatch.setattr(sys, "argv", [source.name, *map(str, arguments)])
    runpy.run_path(str(source), run_name="__main__")


def test_the_command_answers_questions_as_one_batch(monkeypatch, capsys, sparse):
    run(monkeypatch, "What is 27 + 58?", "Count from 3 to 6.")
    said = "Q: What is 27 + 58?\nA: 27 + 58 = 85\n\nQ: Count from 3 to 6.\nA: 3 4 5 6\n\n"
    assert capsys.readouterr().out == said


def test_the_command_says_that_a_checkpoint_has_no_tokenizer(monkeypatch, qwen3, sparse):
    with pytest.raises(ValueError, match="no tokenizer"):
        run(monkeypatch, "Hi", "--model", qwen3)


def test_the_benchmark_is_nano_vllm_s_and_says_where_it_is_clipped(
    qwen3, monkeypatch, capsys, tmp_path, sparse
):
    path = shutil.copytree(qwen3, tmp_path / "model")
    edit_config(path, max_position_embeddings=4)
    run(monkeypatch, "--bench", "--model", path)
    clipped, result = capsys.readouterr().out.splitlines()
    assert clipped == "clipped to the model: prompts and answers have at most 2 tokens, ids up to 127"
    assert re.fullmatch(r"512 output tokens in [\d.]+ s: \d+ tokens/s", result)
    asked = []
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=4096, vocab_size=151936))
    llm = SimpleNamespace(
        model_runner=SimpleNamespace(model=model),
        generate=lambda prompts, params, use_tqdm: asked.append((prompts, params)) or [{"token_ids": []}],
    )
    nano.bench(llm)
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    assert asked[1][0] == prompts
    lens = [random.randint(100, 1024) for _ in range(256)]
    assert asked[1][1] == [nano.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lens]
    assert sum(lens) == 133_966  # the number that nano-vllm's README shows
    assert "clipped" not in capsys.readouterr().out


# ---- The file ------------------------------------------------------------------------------------


def test_the_file_imports_nothing_of_ours():
    imported = re.findall(r"^ *(?:import|from) (\w+)", SOURCE.read_text(), re.MULTILINE)
    others = "torch numpy xxhash safetensors transformers tqdm huggingface_hub flash_attn"
    assert set(imported) <= {*others.split()} | set(sys.stdlib_module_names)


def test_a_copy_of_the_file_without_the_bundled_model_asks_for_one(tmp_path, monkeypatch, capsys, sparse):
    copy = tmp_path / "copied.py"
    copy.write_text(SOURCE.read_text())
    with pytest.raises(SystemExit):
        run(monkeypatch, "Hi", source=copy)
    assert "--model" in capsys.readouterr().err
