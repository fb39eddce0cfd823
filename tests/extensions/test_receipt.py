"""The receipt of a run: it is complete, its counts are the run's, and an ablation moves the right line."""

import json
import time
from types import SimpleNamespace

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.cli import bench
from nanoengine.engine import ModelRunner, Scheduler
from nanoengine.extensions.receipt import NAMES, recorder_of, show
from nanoengine.models.decoder import Decoder, PlainKernels
from nanoengine.sampling import sampler
from tests.helpers import DEMO, random_prompts

LIMITS = {"bandwidth": 1e10, "flops": {"1": 1e11}}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
PROMPTS = random_prompts([64] * 6, vocab=256)


def make(**settings):
    """Return an engine that records, with known peaks."""
    llm = LLM(DEMO, **{"num_kv_blocks": 200, "block_size": 8, "max_num_seqs": 4} | settings)
    assert llm.receipt() == {"seconds": 0, "items": []}
    recorder_of(llm.llm_engine.core, llm.llm_engine.started).limits = LIMITS
    return llm


@pytest.fixture(scope="module")
def llm():
    with make() as llm:
        yield llm


def run(llm, prompts=PROMPTS, pause=lambda: None, is_cached=False):
    """Return the receipt of a run, by name and phase, its wall time, and the receipt as it is."""
    if not is_cached:
        llm.reset_prefix_cache()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        llm.add_request(str(i), {"prompt_token_ids": prompt}, PARAMS)
    while llm.has_unfinished_requests():
        llm.step()
        if llm.has_unfinished_requests():
            pause()
    wall, receipt = time.perf_counter() - start, llm.receipt()
    return {(item["name"], item["phase"]): item for item in receipt["items"]}, wall, receipt


def seconds_of(items, *names):
    return sum(item["seconds"] for (name, _), item in items.items() if name in names)


def operations_of(items, *names, phase=None):
    chosen = [item for (name, of), item in items.items() if name in names and phase in (of, None)]
    return sum(item["operations"] for item in chosen)


def test_the_items_sum_to_the_wall_time_of_the_last_run(llm):
    run(llm)
    best = 1.0
    for _ in range(4):  # another process may interrupt a run after its last step
        items, wall, receipt = run(llm)
        assert receipt["seconds"] == pytest.approx(seconds_of(items, *NAMES))
        best = min(best, abs(1 - receipt["seconds"] / wall))
    assert best < 0.03
    assert {name for name, _ in items} == {*NAMES}
    assert {phase for _, phase in items} == {"prompts", "decodes"}
    assert len(show(receipt).splitlines()) <= 24, "one screen"
    assert llm.metrics()["seconds_forward"] > 0


def test_bytes_and_operations_are_those_of_the_run_s_batches(llm):
    items, _, _ = run(llm)
    config = llm.llm_engine.checkpoint.decoder_config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layers = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head, num = config.hidden_size * config.vocab_size, len(PROMPTS)
    products = operations_of(items, "weights", "products")
    assert products == 2 * (num * (64 + 11) * layers + num * 12 * head)
    pairs = num * sum(range(1, 64 + 12))
    assert operations_of(items, "kv") == 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    for item in items.values():
        least = max(item["bytes"] / 1e10, item["operations"] / 1e11)
        assert item["floor_seconds"] >= least * 0.999
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    read = sum(64 + i for i in range(1, 12)) * num
    assert items["kv", "decodes"]["bytes"] <= per_token * (read + 11 * num)


def test_without_the_prefix_cache_the_products_of_prompts_grow_and_no_other_count(llm):
    run(llm)
    (found, *_), (missed, *_) = run(llm, is_cached=True), run(llm)
    computed = [operations_of(items, "products", phase="prompts") for items in (found, missed)]
    assert computed[0] == 0 < computed[1]
    for name in NAMES:
        assert operations_of(missed, name, phase="decodes") == operations_of(found, name, phase="decodes")
    assert operations_of(missed, "sampling") == operations_of(found, "sampling")


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still, except where a test adds seconds to its one entry."""
    now = [0.0]
    for module in "timing", "extensions.receipt":
        monkeypatch.setattr(f"nanoengine.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_a_slow_reader_moves_waiting_and_nothing_else(llm, clock):
    items, _, receipt = run(llm, pause=lambda: clock.__setitem__(0, clock[0] + 0.5))
    assert receipt["seconds"] == seconds_of(items, "waiting") == 0.5 * 23
    assert seconds_of(items, *NAMES) == seconds_of(items, "waiting")


@pytest.mark.parametrize(
    ("slow", "names"),
    [
        ((PlainKernels, "silu_and_mul"), ("weights", "products", "kv")),
        ((Scheduler, "schedule"), ("schedule",)),
        ((ModelRunner, "build_inputs"), ("inputs",)),
        ((Decoder, "forward"), ("launch",)),
        ((sampler, "draw_tokens"), ("sampling",)),
        ((Scheduler, "update"), ("update",)),
    ],
)
def test_a_slow_part_moves_its_line_and_no_other(slow, names, clock, monkeypatch):
    """Each call of one part takes a second. Layers of PyTorch stand for those without compiled kernels."""
    function, calls = getattr(*slow), []

    def slower(*arguments, **settings):
        calls.append(clock.__setitem__(0, clock[0] + 1))
        return function(*arguments, **settings)

    monkeypatch.setattr(*slow, staticmethod(slower) if slow[0] is PlainKernels else slower)
    with make(enforce_eager=True) as llm:
        calls.clear()
        items, _, receipt = run(llm)
    assert receipt["seconds"] == pytest.approx(len(calls)) == pytest.approx(seconds_of(items, *names))
    assert len(calls) >= 24
    for phase in ("prompts", "decodes"):
        assert sum(items[name, phase]["seconds"] for name in names if (name, phase) in items) > 0


def test_the_logits_of_many_rows_belong_to_one_step():
    with make(num_kv_blocks=700, max_num_seqs=300) as llm:
        items, _, receipt = run(llm, [[5, 6]] * 270)
    assert receipt["seconds"] > 0
    assert items["sampling", "decodes"]["operations"] > 0


@pytest.mark.slow
def test_bench_prints_a_receipt_and_its_json_last(monkeypatch, capsys):
    monkeypatch.setattr("nanoengine.extensions.receipt.measure_limits", lambda *_: LIMITS)
    bench.main(["--model", str(DEMO), "--workload", "decode", "--repeats", "1", "--json"])
    printed = capsys.readouterr().out.splitlines()
    receipt = json.loads(printed[-1])
    assert {"name", "phase", "seconds", "floor_seconds", "bytes", "operations"} == {*receipt["items"][0]}
    assert receipt["seconds"] == pytest.approx(sum(item["seconds"] for item in receipt["items"]))
    assert any("kv" in line and "decodes" in line for line in printed)
