"""The engine of the page, in Node and in a browser: tokens and steps are those of the engine in Python."""

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nanoengine import LLM, SamplingParams
from nanoengine.cli.run import QUESTIONS
from nanoengine.viewer import trace_page as viewer
from tests.browser import seen_at
from tests.helpers import DEMO, change_tensors, slow
from tests.serving import wait_until
from tests.viewer.test_viewer import probe, text_of

SCENES = json.loads(viewer.PAGE.joinpath("words.json").read_text())["scenes"]
FIELDS = "changes", "block_tables", "num_free_blocks", "num_running", "num_waiting", "texts"


@pytest.fixture(scope="module")
def model():
    return viewer.pack_model()


def node(expression: str, data: Any, model: Any = None) -> Any:
    """Evaluate an expression of the page's code."""
    if shutil.which("node") is None:
        pytest.skip("needs Node")
    files = *(viewer.PAGE / name for name in ("engine.js", "model.js")), Path(__file__).with_name("node.js")
    code = "".join(file.read_text() for file in files)
    command = ["node", "-e", code, expression]
    given = json.dumps({"model": model, "data": data})
    result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """The bundled model with the page's weights, which are rounded to float16."""
    path = tmp_path_factory.mktemp("rounded") / "demo"
    shutil.copytree(DEMO, path, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    change_tensors(path, lambda tensors: tensors.update({k: v.half().float() for k, v in tensors.items()}))
    return str(path)


def random_workload(seed: int) -> dict:
    """Prompts that begin alike, some sampled, in a small pool, a few of them aborted."""
    rng = random.Random(seed)
    starts = [question[: rng.randrange(8, 40)] for question in rng.sample(QUESTIONS, 2)]
    arrivals: list = []
    for _ in range(rng.randrange(3, 8)):
        text = rng.choice(starts)
        text += "".join(rng.choice("abc 12?é\n") for _ in range(rng.choice([0, 0, 4, 11])))
        choices = {"temperature": (0, 0.7, 1.3), "top_p": (1, 0.8), "top_k": (0, 5), "min_p": (0, 0.05)}
        params = {name: rng.choice(choice) for name, choice in choices.items()}
        params |= {"max_tokens": rng.randrange(1, 32), "seed": rng.choice([3, 12345])}
        params["priority"] = rng.choice([0, 0, 1])
        arrivals.append((1 + rng.randrange(8), f"<|im_start|>user\n{text}<|im_end|>\n", params))
    block_size, budget = rng.choice([1, 2, 4, 8]), rng.choice([3, 9, 40])
    settings: dict[str, Any] = {"max_num_batched_tokens": budget, "max_chunk_tokens": rng.choice([budget, 2])}
    settings |= {"block_size": block_size, "num_blocks": rng.randrange(80, 110) // block_size}
    settings |= {"max_num_seqs": rng.choice([3, 6]), "enable_prefix_caching": rng.random() < 0.9}
    aborts = [(rng.randrange(8, 20), rng.randrange(len(arrivals))) for _ in range(rng.randrange(2))]
    settings |= {"max_model_len": 80, "scheduling_policy": "priority"}
    return {"arrivals": sorted(arrivals, key=lambda one: one[0]), "aborts": aborts, "settings": settings}


def run_in_python(workload: dict, model: str) -> list:
    """The events of a workload's trace, each with the arrays that `build_inputs` made."""
    events: list = []
    settings = dict(workload["settings"])
    chunk, budget = settings.pop("max_chunk_tokens"), settings["max_num_batched_tokens"]
    settings |= {"num_kv_blocks": settings.pop("num_blocks"), "long_prefill_token_threshold": chunk % budget}
    with LLM(model, trace=events.append, device="cpu", **settings) as llm:
        runner: Any = llm.llm_engine.runner
        build, made, step = runner.build_inputs, list[Any](), 0

        def build_inputs(*args: Any) -> Any:
            made.append(build(*args))
            return made[-1]

        runner.build_inputs = build_inputs
        while llm.has_unfinished_requests() or step < workload["arrivals"][-1][0]:
            step += 1
            for i, (arrival, prompt, params) in enumerate(workload["arrivals"]):
                if arrival == step:
                    sampling = SamplingParams(**{name: params[name] for name in params if name != "priority"})
                    llm.add_request(str(i), prompt, sampling, priority=params.get("priority", 0))
            for when, i in workload["aborts"]:
                if when == step:
                    llm.abort_request(str(i))
            llm.step()
    computed = [event for event in events[1:] if any(one["change"] == "schedule" for one in event["changes"])]
    for event, arrays in zip(computed, made, strict=True):
        event["inputs"] = {name: getattr(arrays, name).tolist() for name in ("input_ids", "positions")}
        for name in "slot_mapping", "cu_seqlens_q", "seq_lens", "block_tables":
            event["inputs"][name] = getattr(arrays.metadata, name).tolist()
    return events[1:]


def compare(ours: list, theirs: list, where: str) -> set:
    """Compare each step. Return what happened."""
    happened = set()
    for number, (step, expected) in enumerate(zip(ours, theirs, strict=True), 1):
        for field in FIELDS:
            assert step[field] == json.loads(json.dumps(expected[field])), f"{where}, step {number}: {field}"
        assert step["inside"].get("inputs") == expected.get("inputs"), f"{where}, step {number}"
        for change in expected["changes"]:
            happened |= {change["change"], change.get("why")}
            happened |= {name for name in ("hits", "evicted") if any(change.get(name, []))}
    return happened


@pytest.mark.parametrize("seeds", [(103,), *slow(range(30))], ids=["one", "thirty"])
def test_tokens_and_steps_of_random_workloads_are_those_of_the_engine(seeds, model, rounded):
    workloads, happened = [random_workload(seed) for seed in seeds], set()
    played = node("data.map(one => runAll(one, model))", workloads, model)
    for seed, workload, steps in zip(seeds, workloads, played, strict=True):
        happened |= compare(steps, run_in_python(workload, rounded), f"seed {seed}")
        slots = [slot for step in steps for slot in step["inside"].get("inputs", {}).get("slot_mapping", [])]
        happened |= {"null block"} if min(slots) < workload["settings"]["block_size"] else set()
    assert happened >= {"hits", "null block", "evicted", "preempted", "refuse", "abort", "stop", "length"}


def test_logits_differ_from_pytorchs_by_rounding(model, rounded):
    """Both compute from the same weights, so a draw can differ only within this distance of a boundary."""
    prompt, settings = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n", {"block_size": 4}
    settings |= {"num_blocks": 40, "max_num_seqs": 1, "max_num_batched_tokens": 9, "max_chunk_tokens": 9}
    ours = np.array(node("logitsOf(data, model)", {"settings": settings, "prompt": prompt}, model))
    ours -= np.log(np.exp(ours).sum(1, keepdims=True))
    with LLM(rounded, device="cpu", num_kv_blocks=40, block_size=4, max_logprobs=512) as llm:
        (out,) = llm.generate(prompt, SamplingParams(max_tokens=20, logprobs=512), use_tqdm=False)
    theirs = [[row[i].logprob for i in range(512)] for row in out.outputs[0].logprobs]
    distance = np.abs(ours - np.array(theirs)).max()
    print(f"the largest difference of a log-probability is {distance:.1e}")
    assert distance < 1e-4


def test_the_javascript_has_at_most_1460_lines():
    files = [path for path in viewer.PAGE.iterdir() if path.name.endswith(".js")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 1460


@pytest.fixture(scope="module")
def page(tmp_path_factory, model, chromium):
    """Yield what opens a scene of the live page in a browser. At the end its console has to be empty."""
    path = tmp_path_factory.mktemp("live") / "live.html"
    viewer.main(["-o", str(path)])
    assert path.stat().st_size < 5_000_000
    chromium.get_log("browser")  # of other tests
    chromium.set_script_timeout(120)

    def open_scene(name):
        chromium.get("about:blank")
        chromium.get(f"{path.as_uri()}#scene={name}")
        wait_until(lambda: chromium.execute_script("return last > 0"))
        return chromium

    yield open_scene
    assert chromium.get_log("browser") == []


STEP_TO_THE_END = """
    const done = arguments[0];
    (async () => {
        while (await forward());
        done(steps.map(({inside, ...step}) => ({...step, inside: {inputs: inside.inputs}})));
    })();
"""


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_in_a_browser_takes_the_steps_of_the_engine(name, page, rounded):
    browser = page(name)
    played = browser.execute_async_script(STEP_TO_THE_END)
    arrivals: list = []
    for step in played:
        for change in step["changes"]:
            if change["change"] == "add":
                change["request"] = str(change["seq"])
                params = {"max_tokens": 60, "temperature": 0, "seed": 1}
                params |= dict(*SCENES[name]["prompts"][change["seq"]][2:])
                params.pop("after", None)
                arrivals.append((step["step"], {"prompt_token_ids": change["token_ids"]}, params))
    settings = browser.execute_script("const {event, model, windows, ...settings} = start; return settings")
    settings["max_model_len"] = settings["num_blocks"] * settings["block_size"]
    compare(played, run_in_python({"arrivals": arrivals, "aborts": [], "settings": settings}, rounded), name)
    named: set = set()
    watched = "const stop = findStops().find(stop => stop.title === scene.watch); go(stop.index);"
    for width, scheme in (1280, "light"), (390, "dark"):
        with seen_at(browser, width, scheme):
            browser.execute_script(f"{watched} cells[1].cell.focus()")
            assert probe(browser, "clippedTexts") == [], width
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            unnamed = {*probe(browser, "visibleControls")} - named
            assert unnamed or named
            assert all(control.accessible_name for control in unnamed)
            named |= unnamed


def test_prompts_can_be_added_and_aborted_and_settings_run_them_again(page):
    browser = page("paging")
    browser.execute_script("document.getElementById('speed').value = '60'")
    browser.find_element(By.CSS_SELECTOR, "#asked button").click()
    wait_until(lambda: "aborted" in text_of(browser, "asked"))
    browser.find_element(By.ID, "prompt").clear()
    browser.find_element(By.ID, "prompt").send_keys("What is 12 + 34?", Keys.ENTER)
    wait_until(lambda: "finished" in text_of(browser, "asked"))
    assert "12 + 34 = 46" in text_of(browser, "asked")
    run_again = """
        const [size, done] = arguments;
        const changes = () => JSON.stringify(steps.map(step => step.changes)), before = changes();
        $("size").value = size;
        restart(50).then(() => done([before, changes()]));
    """
    first, other = browser.execute_async_script(run_again, "8")
    assert first != other
    assert browser.execute_async_script(run_again, "4") == [other, first]


def test_a_pool_in_which_no_prompt_fits_is_reported_and_a_pause_gives_its_reason(page):
    browser = page("paging")
    browser.execute_async_script("$('blocks').value = '4'; restart(1).then(arguments[0]);")
    assert text_of(browser, "headline") == "No prompt fits into the pool, so no step ran."
    assert "enlarge the pool" in text_of(browser, "asked")
    assert text_of(browser, "running") == "none"
    browser = page("preemption")
    browser.execute_script("document.getElementById('speed').value = '60'; setPlaying(true)")
    wait_until(lambda: "Paused here" in text_of(browser, "why"))
    assert "preempted" in text_of(browser, "headline")
