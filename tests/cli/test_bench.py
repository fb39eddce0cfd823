"""The benchmark: its workloads, its arithmetic, and short runs of the engines beside each other."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import benchmarks.__main__ as command
import nanoengine
from benchmarks import features, gpu, gpu_report, host, served
from benchmarks.ablation import TRICKS, WITHOUT
from benchmarks.compare import bench_model
from benchmarks.engines import load_stepped
from benchmarks.machine import machine
from benchmarks.models import SHAPES, parse_custom
from benchmarks.report import hardware
from benchmarks.runs import measurements
from nanoengine import LLM
from nanoengine.cli.bench import percentiles
from nanoengine.cli.workloads import WORKLOADS, Workload
from nanoengine.extensions.roofline import measure_limits, roofline_seconds
from tests.helpers import DEMO, open_checkpoint

ROOT = Path(__file__).parents[2]


def squeezed(table: str) -> str:
    """Return the table without the spaces that pad its cells."""
    return re.sub(" +", " ", table)


def run_bench(*arguments: str, program: tuple[str, ...] = ("-m", "benchmarks")) -> tuple[str, dict]:
    """Run a benchmark. Return its output, and the JSON of its last line."""
    command = [sys.executable, *program, "--threads", "1", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return run.stdout, json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "first", "longest"),
    [
        ("nano", 256, 144831, 144160, (964, 304), (1023, 1024)),
        ("small", 32, 4710, 2710, (248, 125), (248, 125)),
        ("decode", 16, 410, 2048, (28, 128), (32, 128)),
        ("prefill", 16, 8192, 128, (512, 8), (512, 8)),
        ("prefix", 32, 1024, 1024, (32, 32), (32, 32)),
        ("tiny", 128, 18907, 18354, (248, 205), (256, 256)),
    ],
)
def test_workloads_are_the_published_ones(name, requests, prompt_tokens, output_tokens, first, longest):
    prompt_lens, output_lens = WORKLOADS[name].lengths()
    assert len(prompt_lens) == len(output_lens) == requests
    assert (sum(prompt_lens), sum(output_lens)) == (prompt_tokens, output_tokens)
    assert (prompt_lens[0], output_lens[0]) == first
    assert (max(prompt_lens), max(output_lens)) == longest
    assert WORKLOADS[name].shared == (512 if name == "prefix" else 0)


def test_prompts_have_their_lengths_share_their_prefix_and_differ_between_runs():
    workload = Workload("", 8, (3, 9), (1, 1), shared=20)
    one, two = workload.prompts("run 1", 5000), workload.prompts("run 2", 5000)
    assert [len(prompt) - 20 for prompt in one] == workload.lengths()[0]
    assert {tuple(prompt[:20]) for prompt in one} == {tuple(one[0][:20])}
    assert one[0][:20] != two[0][:20]
    assert all(a != b for a, b in itertools.combinations([prompt[20:] for prompt in one + two], 2))
    assert one == workload.prompts("run 1", 5000)
    ids = [token for prompt in Workload("", 8, (500, 500), (1, 1)).prompts("", 5000) for token in prompt]
    assert 3900 < max(ids) < 4000
    assert max(token for prompt in workload.prompts("", 7) for token in prompt) < 7


def test_a_custom_workload_is_read_or_refused():
    assert parse_custom("4:8-16:2:64") == Workload("4:8-16:2:64", 4, (8, 16), (2, 2), shared=64)
    for text in ("0:1:1", "1:0:1", "1:9-8:1", "1:1", "x:1:1", "1:1:1:1:1", "1:1:1:-1"):
        with pytest.raises(ValueError):  # noqa: PT011 (argparse words it)
            parse_custom(text)


def test_percentiles_are_interpolated_between_neighbours():
    assert percentiles([*range(101)]) == pytest.approx([50, 90, 99])
    assert percentiles([1, 2]) == pytest.approx([1.5, 1.9, 1.99])
    assert percentiles([3]) == [3, 3, 3]


def test_latencies_are_counted_from_the_start():
    expected = {"ttft": [1.0, 3.0], "tpot": [1.5], "itl": [1.0, 2.0]}
    found = measurements(9.0, [[1.0, 2.0, 4.0], [3.0]])
    assert found == {"seconds": 9.0, "output_tokens": 4, **expected}


SIZES = {"num_layers": 2, "hidden_size": 4, "intermediate_size": 5, "num_heads": 2, "num_kv_heads": 1}
SHAPE = SimpleNamespace(**SIZES, head_dim=3, vocab_size=10)
# A layer: 4 * (2 * 6 + 2 * 3) = 72 weights in attention, 3 * 4 * 5 = 60 in the MLP; the head: 40.
# So 304 weights, and K and V of a token are 2 * 2 * 3 = 12 numbers.


def test_the_roofline_is_memory_traffic_or_arithmetic_and_computes_a_shared_prefix_once():
    memory, arithmetic = {"bandwidth": 1.0, "flops": 1e30}, {"bandwidth": 1e30, "flops": 1.0}
    # Two requests, outputs 1 and 3: the prompts' pass, then two passes with the second alone, which
    # attends to 7 + 1 and 7 + 2 tokens. 16-bit numbers.
    seconds = roofline_seconds(SHAPE, [5, 7], [1, 3], **memory)
    assert seconds == 2 * 304 + 2 * (304 + 12 * 8) + 2 * (304 + 12 * 9)
    assert seconds * 2 == roofline_seconds(SHAPE, [5, 7], [1, 3], **memory, itemsize=4)
    # 12 prompt tokens attend to 1 + ... + 5 and 1 + ... + 7 tokens; 4 * 2 layers * 6 for each.
    prompts = 2 * (264 * 12 + 40 * 2) + 48 * (15 + 28)
    decode = 2 * 304 + 48 * 8 + 2 * 304 + 48 * 9
    assert roofline_seconds(SHAPE, [5, 7], [1, 3], **arithmetic) == prompts + decode
    # 3 shared tokens, then 2 and 1 of their own: attending to 1 + 2 + 3, to 4 + 5 and to 4.
    expected = 2 * (264 * 6 + 40 * 2) + 48 * (6 + 9 + 4)
    assert roofline_seconds(SHAPE, [2, 1], [1, 1], 3, **arithmetic) == expected


def layers_on_a_clock(monkeypatch, rates, launch_s=0.0):
    """Put the roofline on a fake clock. Return the layers that advance it, and a function that does."""
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    class Layer(nn.Linear):
        def forward(self, x):
            bytes_per_s, flops_per_s = rates[x.dtype]
            work = 2 * len(x) * self.weight.numel()
            wait(max(launch_s, self.weight.nbytes / bytes_per_s, work / flops_per_s))

    monkeypatch.setattr("nanoengine.extensions.roofline.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return Layer, wait


@pytest.mark.parametrize(
    ("dtype", "rates", "bandwidth", "flops"),
    [
        ("bfloat16", {torch.bfloat16: (10e9, 39e9), torch.float32: (19e9, 180e9)}, 19e9, 180e9),  # emulated
        ("bfloat16", {torch.bfloat16: (19e9, 900e9), torch.float32: (18e9, 180e9)}, 19e9, 900e9),
        ("bfloat16", {torch.bfloat16: (19e9, 39e9), torch.float32: (15e9, 180e9)}, 19e9, 180e9),
        ("float16", {torch.float16: (5e9, 20e9), torch.float32: (19e9, 180e9)}, 19e9, 180e9),
        ("float32", {torch.float32: (19e9, 180e9)}, 19e9, 180e9),  # bfloat16 would be less accurate
    ],
)
def test_the_limits_are_those_of_the_fastest_accurate_precision(dtype, rates, bandwidth, flops, monkeypatch):
    """A layer takes as long as its bytes or its products at these rates."""
    layer_class, _ = layers_on_a_clock(monkeypatch, rates)

    def pack(layer, kernels):
        layer.__class__ = layer_class
        return layer

    monkeypatch.setattr("nanoengine.backends.cpu.packed_layers.pack_linear", pack)
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: self)  # a gigabyte that is never read
    limits = measure_limits(dtype, "cpu")
    assert limits["bandwidth"] == pytest.approx(bandwidth)
    assert max(limits["flops"].values()) == pytest.approx(flops)
    assert list(limits["flops"]) == ["1", "8", "16", "32", "64", "256"]


def test_the_limits_of_a_gpu_are_not_those_of_its_launches(monkeypatch):
    """A layer's launch takes 6 microseconds, and the wait for the end 30."""
    rates = dict.fromkeys((torch.bfloat16, torch.float32), (4.8e12, 700e12))
    layer_class, wait = layers_on_a_clock(monkeypatch, rates, launch_s=6e-6)
    monkeypatch.setattr("nanoengine.extensions.roofline.nn.Linear", layer_class)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: wait(30e-6))
    limits = measure_limits("bfloat16", "meta")
    assert limits["bandwidth"] == pytest.approx(4.8e12, rel=0.07)
    assert max(limits["flops"].values()) == pytest.approx(700e12, rel=0.05)


@pytest.mark.slow
def test_engines_run_side_by_side_on_the_same_requests():
    printed, report = run_bench(
        *("--model", "tiny", "--custom", "3:4-8:2-5", "--repeats", "1"),
        *("--engine", "nanoengine,transformers,vllm,llama.cpp,openvino-int8"),
    )
    workload = Workload("", 3, (4, 8), (2, 5))
    prompt_tokens, output_tokens = map(sum, workload.lengths())
    (result,) = report["models"]
    rows = {row["engine"]: row for row in result["results"]}
    for engine in ("nanoengine", "transformers"):
        row = rows[engine]
        assert (row["prompt_tokens"], row["output_tokens"]) == (prompt_tokens, output_tokens)
        speed = row["output_tokens_per_s"]
        assert 0 < speed["min"] == speed["median"] == speed["max"]
        of_all = speed["median"] * (prompt_tokens + output_tokens) / output_tokens
        assert row["total_tokens_per_s"]["median"] == pytest.approx(of_all, rel=1e-3)
        assert row["steps"] == max(workload.lengths()[1])
        assert row["roofline_share"] > 0
        assert {"python", "torch", engine} <= result["engines"][engine]["versions"].keys()
    ours = rows["nanoengine"]
    assert ours["ttft_ms"] == sorted(ours["ttft_ms"])
    seconds = output_tokens / ours["output_tokens_per_s"]["median"]
    assert min(ours["phases_s"].values()) > 0
    rounding = 0.5e-4 * len(ours["phases_s"])  # each is rounded to 0.1 ms, of runs that take about 6 ms
    assert sum(ours["phases_s"].values()) < seconds * 1.01 + rounding
    assert rows["transformers"]["ttft_ms"] is None
    assert report["machine"] == machine(1, "cpu")
    assert hardware(report["machine"]) in printed
    assert result["limits"]["bandwidth_gb_per_s"] > 0
    assert "| times nanoengine's | 1.00 (1.00 to 1.00) | 0." in squeezed(printed)
    for engine in ("vllm", "llama.cpp", "openvino-int8"):
        if result["engines"][engine]["error"] is not None:  # where it is not, and it belongs elsewhere
            assert rows[engine]["error"] == "not installed"
        else:
            assert rows[engine]["output_tokens"] == output_tokens


class FakeWorker:
    """Records which engines run at the same time."""

    def __init__(self, engine, running, peaks):
        self.engine, self.running, self.peaks = engine, running, peaks
        self.error, self.versions, self.notes = None, {}, ""
        running.append(engine)

    def ask(self, command):
        if isinstance(command, dict):
            return {"versions": {"python": "3"}}
        if self.engine == "limits":
            return {"bandwidth": 1e9, "flops": {"1": 1e9}}
        self.peaks.append(len(self.running))
        return {"seconds": 1.0, "output_tokens": sum(command[1])}

    def close(self):
        self.running.remove(self.engine)


@pytest.fixture
def bench(monkeypatch):
    """Return a function that benchmarks fake engines, how many ran at once, and those that still run."""
    running, peaks = [], []
    monkeypatch.setattr("benchmarks.compare.start_worker", lambda name, *_: FakeWorker(name, running, peaks))

    def run(engines, workloads, repeats, device="cpu", ablate=None):
        args = {"engine": engines, "repeats": repeats, "device": device, "ablate": ablate}
        args |= {"pythons": {}, "threads": 1, "dtype": "bfloat16"}
        return bench_model("tiny", workloads, SimpleNamespace(**args))

    return run, peaks, running


@pytest.mark.parametrize(
    ("device", "ablate", "max_running"),
    [("cuda", False, 2), ("cuda", True, 2), ("cpu", False, 4), ("cpu", True, 3)],
)
def test_engines_run_one_by_one_on_a_gpu_and_side_by_side_on_a_cpu(device, ablate, max_running, bench):
    """Each takes nearly all of a GPU's memory; one process more measures the machine's limits."""
    run, peaks, running = bench
    engines = ["nanoengine", "transformers", "vllm"]
    workloads = [Workload("b", 2, (4, 4), (2, 2)), Workload("a", 2, (4, 4), (3, 3))]
    result = run(engines, workloads, 2, device, ["chunks", "graphs"] if ablate else None)
    assert (max(peaks), running) == (max_running, [])
    if ablate:
        engines = ["nanoengine", WITHOUT + "chunks", "nanoengine", WITHOUT + "graphs"]
    measured = [(row["workload"], row["engine"]) for row in result["results"]]
    assert measured == list(itertools.product(["b", "a"], engines))
    assert list(result["engines"]) == list(dict.fromkeys(engines))


def test_one_sequence_s_tokens_are_also_counted_in_bytes_of_weights(bench):
    workloads = [Workload("one", 1, (4, 4), (500, 500)), Workload("two", 2, (4, 4), (2, 2))]
    plain, int4, *others = bench[0](["nanoengine", "nanoengine-int4+a8"], workloads, 1)["results"]
    layers, head = 4 * (256 * (2 * 8 * 64 + 2 * 4 * 64) + 3 * 256 * 768), 256 * 4096
    assert plain["gb_per_s"] == round(500 * 2 * (layers + head) / 1e9, 4)  # a run takes a second
    assert int4["gb_per_s"] == round(500 * (4.5 * layers + 6.25 * head) / 8 / 1e9, 4)
    assert not any("gb_per_s" in row for row in others)


@pytest.mark.slow
def test_the_command_bench_serves_its_workload_and_reports_rates_latencies_and_roofline(tmp_path):
    printed, result = run_bench("--workload", "tiny", "--repeats", "1", program=("-m", "nanoengine", "bench"))
    assert "run 1 of 1" in printed
    num_tokens = sum(WORKLOADS["tiny"].lengths()[1])
    assert result["output_tokens_per_s"] == pytest.approx(num_tokens / result["seconds"][0])
    for name in ("first_token_s", "between_tokens_s"):
        assert 0 < result[name][0] <= result[name][1] <= result[name][2] < result["seconds"][0]
    assert result["share_of_roofline"] > 0
    assert 0 < result["bandwidth_gb_per_s"] < 10000


PLACE = {"cpu": "A CPU", "instructions": "AVX2", "gpu": None, "cores": 2, "threads": 2, "memory_gib": 8.0}
CPU_TRICKS = [name for name, trick in TRICKS.items() if "cpu" in trick.devices]


@pytest.mark.slow
def test_the_engine_without_a_trick_gives_the_same_tokens():
    """Each runs in a process of its own. The first has all tricks."""
    program = f"""
import os
from benchmarks.ablation import settings_of
from nanoengine import LLM, SamplingParams
for trick in ["", *{CPU_TRICKS}]:
    if os.fork():
        assert os.wait()[1] == 0, trick
        continue
    with LLM("demo", dtype="float32", num_kv_blocks=50, **settings_of({WITHOUT!r} + trick)) as llm:
        kinds = {{type(module).__name__ for module in llm.llm_engine.runner.model.modules()}}
        (one,) = llm.generate("What is 1", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        is_exact, token_ids = llm.llm_engine.config.batch_invariant, one.outputs[0].token_ids
        print([token_ids, is_exact, "CompiledLayer" in kinds, "PackedLinear" in kinds])
    break
"""
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    (token_ids, *_, is_compiled), *rows = map(json.loads, printed.lower().splitlines())
    for trick, row in zip(CPU_TRICKS, rows, strict=True):
        is_packed = is_compiled and trick not in ("compiled kernels", "packed weights")
        has_layers = is_packed and trick != "one call per layer"
        assert row == [token_ids, trick == "inexact sums", has_layers, is_packed], trick


def test_a_run_of_guidellm_becomes_a_row_unless_a_request_failed():
    measured = {"output_tokens_per_second": (12.34, 0), "time_to_first_token_ms": (100.0, 200.0)}
    measured["inter_token_latency_ms"] = 10.0, 30.0
    metrics: dict = {"request_totals": {"successful": 4, "errored": 0, "total": 4}}
    for name, (p50, p99) in measured.items():
        metrics[name] = {"successful": {"mean": p50, "percentiles": {"p50": p50, "p99": p99}}}
    row = {"engine": "nanoengine", "rate": None, **served.summarize({"metrics": metrics})}
    assert served.row_cells(row) == ["nanoengine", "saturated", "12.3", "100, 200 ms", "10, 30 ms"]
    metrics["request_totals"]["errored"] = 1
    with pytest.raises(RuntimeError, match="1 of guidellm's 4 requests failed"):
        served.summarize({"metrics": metrics})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "sglang"], "unknown: sglang"),
        (["--workload", "large"], "unknown: large"),
        (["--python", "vllm=/nowhere/python"], "/nowhere/python"),
        (["--ablate", "luck"], "unknown: luck; known: prefix caching"),
        (["--repeats", "0"], "at least 1"),
        (["--engine", "llama.cpp-q4_0"], "is not installed: pip install -e '.[bench]'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.parse_arguments()
    assert message in capsys.readouterr().err


def test_the_engine_serves_every_built_in_shape(tmp_path):
    for name, config in SHAPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        checkpoint = open_checkpoint(str(tmp_path / name))
        assert checkpoint.eos_token_ids == ()
        if checkpoint.decoder_config is None:  # it runs on transformers' code
            sizes = {"gemma-3-1b": 1.0, "phi-3-0.9b": 0.9, "mixtral-0.8b": 0.79, "qwen3.5-0.8b": 0.75}
            sizes["granite-4-h-350m"] = 0.34
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(checkpoint.hf_config)
            num_parameters = sum(x.numel() for x in model.parameters())
            assert num_parameters / 1e9 == pytest.approx(sizes[name], rel=0.05)
            continue
        assert checkpoint.decoder_config.tie_word_embeddings
        assert checkpoint.decoder_config.rope["rope_theta"] == config["rope_theta"]
        assert (checkpoint.decoder_config.rope["rope_type"] == "llama3") == name.startswith("llama")


@pytest.mark.slow
def test_every_attention_backend_is_timed(flash_doubles, monkeypatch):
    batches = {"decodes": [(1, 300), (1, 20)], "mixed": [(1, 300), (5, 400)]}
    monkeypatch.setattr(gpu, "SMALL", batches)
    found = gpu.measure_attention("cpu")
    assert list(found) == ["flash", "varlen", "triton", "torch"]
    assert flash_doubles["with_kvcache"] == 2 + 2 * 15  # two decodes of the trial, then both batches
    assert flash_doubles["varlen packed"] == 2 * 15
    for name in ("flash", "varlen", "torch"):
        assert found[name].keys() == batches.keys()
        assert min(found[name].values()) > 0
    assert "failed when tried" in found["triton"]["error"]


def benched(*rows):
    """Return a report such as the one that ends the output of `python -m benchmarks`."""
    common = {"workload": "nano", "rate": None, "cuda_peak_bytes": 2 << 30, "roofline_share": 0.5}
    results = [
        common | {"engine": engine, "output_tokens_per_s": {"median": rate}, "runs_tokens_per_s": [rate]}
        for engine, rate in rows
    ]
    engines = {engine: {"versions": {"torch": "2.13"}} for engine, _ in rows}
    return {"models": [{"model": "m", "results": results, "engines": engines}], "machine": PLACE}


@pytest.mark.slow
def test_the_gpu_s_report_says_which_piece_failed_or_did_not_end(tmp_path):
    without = benched(("nanoengine", 20_000.0), ("nanoengine without graphs", 5_000.0))
    programs = {
        "flash": f"print('noise'); print({json.dumps(benched(('nanoengine-flash', 20_000.0)))!r})",
        "varlen": "import sys; sys.exit('no such thing')",
        "triton": "import time; time.sleep(600)",
        "without-graphs": f"print({json.dumps(without)!r})",
        "tests": 'print(\'{"summary": "1 failed, 99 passed", "notes": []}\')',
        "attention": 'print(\'{"flash": {"decodes": 0.5}, "triton": {"error": "Triton needs a GPU"}}\')',
    }

    def command(name):
        return [sys.executable, "-c", programs[name]]

    gpu.run_pieces(programs.keys() - {"triton"}, tmp_path, command)
    gpu.run_pieces(["triton"], tmp_path, command, piece_s=1)
    gpu.run_pieces(["vllm"], tmp_path, command, all_s=0)
    page = squeezed(gpu_report.write_report(tmp_path).read_text())
    assert f"{hardware(PLACE)}\n" in page
    assert "- nanoengine-flash: torch 2.13" in page
    assert "| flash | 22,300 | 20,000 | 0.90 | 50% | 2.0 |" in page
    assert "| varlen | - | it ended with 1, see varlen.log | - | - | - |" in page
    assert "no such thing" in (tmp_path / "varlen.log").read_text()
    assert "| triton | 24,500 | it did not end in 1 s | - | - | - |" in page
    assert "| vllm | - | not run | - | - | - |" in page
    assert "| graphs | nano | 20000.0, 5000.0 | 4.00 (4.00 to 4.00) |" in page
    others = {"1 failed, 99 passed", "| flash | 0.500 | |", "| triton | | Triton needs a GPU |"}
    assert others <= {*page.splitlines()}
    gpu.run_pieces(["varlen"], tmp_path, lambda name: command("flash"))  # one again, and the rest is kept
    page = squeezed(gpu_report.write_report(tmp_path).read_text())
    assert "| varlen | - | 20,000 |" in page
    assert "| flash | 22,300 | 20,000 |" in page


@pytest.mark.slow
def test_the_phases_of_loading_add_up_to_the_time_to_the_first_token():
    printed, report = run_bench("--what", "load", "--model", "demo", "--repeats", "1")
    (seconds,) = report["runs"]
    phases = {"start of Python", "import", "header", "config", "tokenizer", "kernels", "weights", "packing"}
    phases |= {"KV cache", "rest of LLM()", "first token"}
    assert phases <= {*seconds} <= phases | {"compiling", "all", "CPU, all"}
    assert all(f"{name:16}" in printed for name in phases)
    assert sum(seconds[name] for name in phases) == pytest.approx(seconds["all"], rel=0.1)


@pytest.mark.slow
def test_the_gpu_s_pieces_run_on_a_cpu_with_small_sizes(tmp_path):
    flags = f"-m benchmarks.gpu --device cpu --out {tmp_path} attention without-prefix-caching"
    subprocess.run([sys.executable, *flags.split()], cwd=ROOT, check=True)
    found = gpu_report.load(tmp_path)
    assert not [piece["error"] for piece in found.values() if "error" in piece]
    assert found["without-prefix-caching"]["models"][0]["results"][0]["output_tokens"] == 8
    assert "| prefix caching | 2:8:4 |" in squeezed((tmp_path / "report.md").read_text())


@pytest.mark.parametrize("piece", [*gpu.ENGINES, *(name for name in gpu.PIECES if "without" in name)])
def test_a_piece_of_the_gpu_s_benchmark_is_a_command_that_benchmarks_accepts(piece, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # it sets this, too
    monkeypatch.setattr(sys, "argv", gpu.command_of(piece, "cuda", [])[2:])
    arguments = command.parse_arguments()
    assert (arguments.device, arguments.ablate is None) == ("cuda", piece in gpu.ENGINES)
    assert arguments.engine == [gpu.ENGINES.get(piece, "nanoengine")]


@pytest.mark.parametrize(
    ("kind", "max_calls"), [("FINAL_ONLY", 8), ("FINAL_ONLY, repetition_penalty", 8), ("DELTA, text", 20)]
)
def test_each_sequence_adds_few_python_calls_to_a_step(kind, max_calls):
    """Calls are counted because times depend on the machine. A step's fixed cost is subtracted."""

    def calls_of_a_step(first, num_seqs):
        host.start_decodes(engine, num_seqs, 8, first, **host.KINDS[kind])
        num_calls = [0]

        def count(frame, event, argument):
            num_calls[0] += event == "call"

        sys.setprofile(count)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        return num_calls[0]

    with host.engine_without_device(32, max_model_len=256) as engine:
        few, many = calls_of_a_step(0, 8), calls_of_a_step(8, 24)  # of 8 sequences, then of 32
    assert (many - few) / 24 <= max_calls


@pytest.mark.slow
def test_fewer_bits_change_log_probabilities_more_and_need_less_memory(capsys):
    features.main(["quality", "--tokens", "600", "--questions", "8"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    for text in ("english", "answers"):
        of = {row["precision"]: row for row in rows if row["text"] == text}
        assert of["float32"]["change"] == 0
        assert 0 < of["int8"]["change"] < of["int4"]["change"]
        taken = [of[name]["weight_bytes"] for name in ("float32", "bfloat16", "int8", "int4")]
        assert taken == sorted(taken, reverse=True)
    assert of["float32"]["right"] == 8


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_tokens_looked_at():
    ids, first = [432, 5, 6, 7, 300, 8, 9], 3
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(DEMO)
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logprobs[i - 1, ids[i]].item() for i in range(first, len(ids))]
    with LLM(str(DEMO)) as llm:
        found = features.log_probabilities(llm, [(ids, first)])
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("nanoengine", {}),
        ("nanoengine-int8", {"quantization": "int8"}),
        ("nanoengine-int4+a8", {"quantization": "int4", "activations": "int8"}),
        ("nanoengine-int4+a16", {"quantization": "int4", "activations": "float"}),
        ("nanoengine-triton", {"attn_backend": "triton"}),
        (f"{WITHOUT}prefix caching", {"enable_prefix_caching": False}),
    ],
)
def test_an_engine_s_name_sets_its_weights_attention_and_tricks(engine, expected, monkeypatch):
    monkeypatch.setattr(nanoengine, "LLM", lambda **settings: given.update(settings))
    common = {"model": "demo", "dtype": "float32", "load_format": "auto", "max_model_len": 64}
    common |= {"device": "cpu"}
    given: dict = {}
    load_stepped(common | {"engine": engine, "threads": 1})
    assert given == common | expected
