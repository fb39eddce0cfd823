"""Datasets over engines: the predictor by itself, then a real Ray cluster of two workers (slow)."""

import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import openai
import pyarrow as pa
import pytest
import torch

from examples import train_demo as train
from nanoengine import LLM, SamplingParams
from nanoengine.ray import ANSWER, Predictor
from tests.helpers import DEMO, failing_calls
from tests.serving import free_port, http, wait_until

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["a b c d", "What is 27 + 58?", "2 3 5", "What is 27 + 58?!"]
SMALL = {"num_kv_blocks": 200}


def test_without_ray_the_pip_line_is_named():
    code = "import sys; sys.modules['pyarrow'] = None; import nanoengine.ray"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stderr.endswith("nanoengine.ray needs Ray Data: pip install 'nanoengine[ray]'\n")


@pytest.fixture(scope="module")
def predictor():
    made = Predictor(str(DEMO), GREEDY, **SMALL)
    yield made
    made.llm.close()


def tokens_of(llm, prompts, params=GREEDY):
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def table(prompts, **columns):
    return pa.table({"prompt": prompts, "key": list(range(len(prompts))), **columns})


def test_rows_keep_columns_and_order_and_get_the_engine_s_answers(predictor):
    rows = predictor(table(PROMPTS)).to_pylist()
    outputs = [out.outputs[0] for out in predictor.llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    names = "prompt", "key", "generated_text", "generated_tokens", "finish_reason", "error"
    assert [tuple(row[name] for name in names) for row in rows] == [
        (PROMPTS[i], i, output.text, output.token_ids, output.finish_reason, None)
        for i, output in enumerate(outputs)
    ]


def test_every_batch_has_the_same_columns_and_types(predictor):
    """Even one whose rows all failed, and one without rows: Ray joins them."""
    for prompts in (PROMPTS, [""], []):
        given = pa.table({"prompt": pa.array(prompts, pa.string())})
        assert predictor(given).schema == pa.schema([*given.schema, *ANSWER])


def test_a_row_that_cannot_be_served_says_why_and_the_others_are_answered(predictor, monkeypatch):
    def params_of(row):
        if row["key"] == 4:
            raise KeyError("no such thing")
        others = {3: {"n": 2}, 7: {"logprobs": 0}, 8: {"prompt_logprobs": 1}}.get(row["key"], {})
        return SamplingParams(temperature=0, max_tokens=12, **others)

    monkeypatch.setattr(predictor, "sampling_params", params_of)
    prompts = ["2 3 5", "", None, "n of 2", "a b", "a " * 5000, "a b c d", "a", "a"]
    rows = predictor(table(prompts)).to_pylist()
    reasons = [None, "prompt is empty", "prompt", "n must be 1", "no such thing", "max_model_len", None]
    reasons += ["logprobs None"] * 2
    for row, reason in zip(rows, reasons, strict=True):
        assert (row["error"] is None) == (reason is None)
        assert reason is None or reason in row["error"]
        assert (row["generated_tokens"] is None) == (row["finish_reason"] is None) == (reason is not None)
    served = [row["generated_tokens"] for row in rows if row["error"] is None]
    assert served == tokens_of(predictor.llm, ["2 3 5", "a b c d"])


def test_prompts_may_be_token_ids_or_conversations_and_parameters_a_row_s_own(predictor, monkeypatch):
    drawn = [SamplingParams(max_tokens=8, seed=seed) for seed in (0, 1)]
    monkeypatch.setattr(predictor, "sampling_params", lambda row: drawn[row["key"]])
    for prompts, plain in (
        ([[17, 18, 19], [20]], [{"prompt_token_ids": [17, 18, 19]}, {"prompt_token_ids": [20]}]),
        (chats := [[{"role": "user", "content": text}] for text in PROMPTS[:2]], None),
    ):
        plain = predictor.llm.render_chat(chats) if plain is None else plain
        rows = predictor(table(prompts)).to_pylist()
        assert [row["generated_tokens"] for row in rows] == tokens_of(predictor.llm, plain, drawn)
    assert drawn[0] == SamplingParams(max_tokens=8, seed=0)  # the user's own is not touched


def failing(predictor, times):
    """Make the next `times` steps raise."""
    return failing_calls(predictor.llm.llm_engine.runner, "launch", range(times))


def test_a_step_that_fails_once_changes_no_answer(predictor):
    expected = tokens_of(predictor.llm, PROMPTS)
    with failing(predictor, 1):
        assert predictor(table(PROMPTS))["generated_tokens"].to_pylist() == expected


def test_rows_whose_step_keeps_failing_are_marked_and_the_rest_answered():
    predictor = Predictor(str(DEMO), GREEDY, max_num_seqs=1, **SMALL)
    with failing(predictor, 2):
        rows = predictor(table(PROMPTS)).to_pylist()
    assert [row["prompt"] for row in rows if row["error"]] == [min(PROMPTS)]
    assert "flaky" in next(row["error"] for row in rows if row["error"])
    served = [row for row in rows if row["error"] is None]
    expected = tokens_of(predictor.llm, [row["prompt"] for row in served])
    assert [row["generated_tokens"] for row in served] == expected
    predictor.llm.close()


def test_a_dead_engine_raises_instead_of_marking_every_row(predictor):
    with failing(predictor, 10**6), pytest.raises(RuntimeError, match="flaky"):
        predictor(table(PROMPTS))


def test_prompts_with_a_common_prefix_hit_the_cache_in_any_order():
    rng = random.Random(0)
    heads = [" ".join(str(rng.randrange(10)) for _ in range(200)) for _ in range(4)]
    prompts = [f"{heads[index % 4]} {index}" for index in range(16)]
    pool = {"num_kv_blocks": 16, "block_size": 32, "max_num_seqs": 1}  # room for one of the beginnings
    predictor = Predictor(str(DEMO), SamplingParams(temperature=0, max_tokens=2), **pool)
    rows = predictor(table(prompts)).to_pylist()
    assert sum(row["num_cached_tokens"] > 200 for row in rows) == 12  # all but the first of each
    predictor.llm.close()


def test_other_batch_formats_and_taken_columns_are_refused(predictor):
    with pytest.raises(TypeError, match='batch_format="pyarrow"'):
        predictor({"prompt": ["a"]})
    with pytest.raises(ValueError, match=r"columns \['error'\] already"):
        predictor(table(["a"], error=[None]))


class Watched(Predictor):
    """Writes each engine's number of threads to a file of a directory. May kill itself once."""

    def __init__(self, directory, *args, fatal_step, **settings):
        super().__init__(*args, **settings)
        self.directory, self.fatal_step = Path(directory), fatal_step
        (self.directory / str(os.getpid())).write_text(str(torch.get_num_threads()))
        self.launch, self.num_steps = self.llm.llm_engine.runner.launch, 0
        self.llm.llm_engine.runner.launch = self.counted

    def counted(self, *args):
        self.num_steps += 1
        if self.num_steps == self.fatal_step:
            with suppress(FileExistsError):
                (self.directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return self.launch(*args)

    def __call__(self, batch):
        done = super().__call__(batch)
        return done.append_column("engine", pa.array([os.getpid()] * len(batch)))


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("OMP_NUM_THREADS", raising=False)  # Ray sets it to the cores of each worker
        import ray as module

        module.init(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
        context = module.data.DataContext.get_current()
        context.wait_for_min_actors_s = 120  # both engines take part
        context.enable_progress_bars = False
        yield module
        module.shutdown()


def questions(number):
    rng = random.Random(7)
    asks = (train.ask_sum, train.ask_backwards, train.ask_count)
    asked = [rng.choice(asks)(rng)[0] for _ in range(number)]
    return [[{"role": "user", "content": text}] for text in asked]


@pytest.mark.slow
def test_two_workers_give_the_tokens_of_one_engine_even_if_one_is_killed(ray, tmp_path):
    chats, params = questions(120), SamplingParams(temperature=0, max_tokens=40)
    with LLM(str(DEMO), **SMALL) as llm:
        expected = tokens_of(llm, llm.render_chat(chats), params)
    items = [{"key": key, "prompt": chat} for key, chat in enumerate(chats)]
    items.insert(60, {"key": -1, "prompt": []})
    constructor: dict = {"fn_constructor_args": [str(tmp_path), str(DEMO), params]}
    constructor |= {"fn_constructor_kwargs": {**SMALL, "fatal_step": 30}}
    sizes = {"batch_size": 10, "num_cpus": 1, "compute": ray.data.ActorPoolStrategy(size=2)}
    blocks = ray.data.from_items(items, override_num_blocks=4)
    made = blocks.map_batches(Watched, batch_format="pyarrow", **sizes, **constructor)
    failed, *rows = sorted(made.take_all(), key=lambda row: row["key"])
    assert "empty" in failed["error"]
    assert [row["key"] for row in rows] == list(range(120))
    assert [row["generated_tokens"] for row in rows] == expected
    engines = {path.name: path.read_text() for path in tmp_path.glob("[0-9]*")}
    assert len(engines) == 3  # the killed one was replaced
    assert (tmp_path / "killed").exists()
    assert set(engines.values()) == {"1"}  # threads
    assert {str(row["engine"]) for row in rows} <= engines.keys()
    assert len({row["engine"] for row in rows}) >= 2


def guide_blocks():
    section = (ROOT / "docs/guide/machines.md").read_text().split("## On many machines\n")[1]
    return re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)


@pytest.mark.slow
def test_the_guide_s_lines_print_what_it_shows(ray, at_the_root, capsys):
    script, printed, _ = guide_blocks()
    exec(script, {})
    assert printed == capsys.readouterr().out


@pytest.mark.slow
def test_ray_serve_answers_like_one_engine_and_aborts_when_clients_disconnect(ray, monkeypatch):
    from ray import serve

    port = free_port()
    monkeypatch.chdir(ROOT)
    serve.start(http_options={"port": port})
    script = guide_blocks()[2].replace("num_replicas=2", "num_replicas=1").replace('"nano', f'"{ROOT}/nano')
    chats = questions(8)
    try:
        exec(script, {"__name__": "__main__"})
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        with LLM(str(DEMO), **SMALL) as llm:
            outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        asked = {"model": "demo", "temperature": 0, "max_tokens": 40}
        for chat, output in zip(chats, outputs, strict=True):
            answer = client.chat.completions.create(messages=chat, **asked)
            assert answer.choices[0].message.content == output.outputs[0].text
            pieces = client.chat.completions.create(messages=chat, stream=True, **asked)
            assert "".join(one.choices[0].delta.content for one in pieces) == output.outputs[0].text

        def metric(name):
            lines = http.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

        before = metric("vllm:generation_tokens_total")
        asked = {"model": "demo", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(prompt="a", stream=True, **asked)
        next(iter(stream))
        stream.close()
        wait_until(lambda: not metric("vllm:num_requests_running"))
        assert 0 < metric("vllm:generation_tokens_total") - before < 900
    finally:
        serve.shutdown()
