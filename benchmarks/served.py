"""Compare servers under guidellm, an independent load generator. The last line printed is one JSON object.

python -m benchmarks.served --guidellm guidellm/bin/python                  # nanoengine serve, three rates
python -m benchmarks.served --guidellm ... --engine nanoengine,vllm --python vllm=vllm/bin/python
python -m benchmarks.served --guidellm ... --rate 0.5,1,2 --shared 512

Each server runs alone, on the same cores as its clients. Requests arrive evenly at each rate, and then all
at once ("saturated"). With --shared, their prompts begin with the same tokens. Otherwise no two runs of a
server share a prompt, and all servers get the same prompts. The model is a published shape with random
weights and a byte tokenizer, so that a prompt has as many tokens as its text has bytes. guidellm measures
when tokens arrive.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.models import SHAPES, write_shape, write_tokenizer
from benchmarks.report import hardware
from benchmarks.runs import CORES
from benchmarks.workers import environment
from nanoengine.cli.terminal import table

START_SECONDS = 300
INSTALL = "python -m venv guidellm && guidellm/bin/pip install guidellm, and --guidellm guidellm/bin/python"
FIGURES = {"TTFT": "time_to_first_token_ms", "between tokens": "inter_token_latency_ms"}


@contextmanager
def serving(command: list[str], env: Mapping[str, str] | None = None) -> Iterator[int]:
    """Start a server, and yield its port. If it does not start, exit and show its output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        command = [*command, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(f"{command[0]} did not start:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            process.wait(60)


def answers(url: str) -> bool:
    """Return whether a server answers at the URL."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def scenario(
    url: str, model: str, args: argparse.Namespace, rate: float | None, seed: int, out: Path
) -> dict[str, Any]:
    """Return guidellm's configuration of a run. A rate of None sends all requests at once.

    guidellm's poisson profile is not used. In 0.8.1, all requests of a run are sent at once if a worker asks
    for the first time before the start is recorded, and every worker process draws the same times.
    """
    data = {"kind": "synthetic_text", "prompt_tokens": args.prompt, "output_tokens": args.output}
    if args.shared:
        data["prefix_buckets"] = [{"bucket_weight": 100, "prefix_count": 1, "prefix_tokens": args.shared}]
    profile = {"kind": "throughput", "max_concurrency": args.requests}
    if rate is not None:
        profile = {"kind": "constant", "rate": [rate]}
    backend = {"kind": "openai_http", "target": url, "request_format": "/v1/completions"}
    return {
        "backend": backend | {"model": "model"},
        "profile": profile,
        "data": [data],
        "seed": {"kind": "static", "value": seed},
        "tokenizer": {"kind": "huggingface_auto", "model": model},
        "constraints": [{"kind": "max_requests", "count": args.requests}],
        "outputs": [{"kind": "json", "path": str(out)}],
    }


def load(url: str, model: str, args: argparse.Namespace, rate: float | None, seed: int) -> dict[str, Any]:
    """Run guidellm once, and return its figures. RuntimeError: guidellm or one of its requests failed."""
    with tempfile.TemporaryDirectory() as scratch:
        config, out = Path(scratch, "scenario.json"), Path(scratch, "report.json")
        config.write_text(json.dumps({"spec": scenario(url, model, args, rate, seed, out)}))
        command = [args.guidellm, "-m", "guidellm", "run", "--config", str(config), "--disable-console"]
        # The default, ten processes, would take more of the cores that guidellm shares with the server.
        settings = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
        if run.returncode or not out.is_file():
            raise RuntimeError(f"guidellm failed:\n{(run.stdout + run.stderr)[-2000:]}")
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
    return summarize(benchmark)


def summarize(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Reduce guidellm's report of a run to the figures that are compared."""
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"] or not totals["successful"]:
        raise RuntimeError(f"{totals['errored']} of guidellm's {totals['total']} requests failed")
    row: dict[str, Any] = {"requests": totals["successful"]}
    row["output_tokens_per_s"] = round(metrics["output_tokens_per_second"]["successful"]["mean"], 2)
    for label, name in FIGURES.items():
        percentiles = metrics[name]["successful"]["percentiles"]
        row[f"{label}, ms"] = [round(percentiles[p], 1) for p in ("p50", "p99")]
    return row


def main() -> None:
    """Measure each server at each rate, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="nanoengine", help="nanoengine, vllm, or both")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--guidellm", default=sys.executable, metavar="PYTHON", help="that has guidellm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rate", default="0.25,0.5,1", help="requests a second, one after the other")
    parser.add_argument("--requests", type=int, default=16, help="of each run; default %(default)s")
    parser.add_argument("--prompt", type=int, default=128, help="tokens; default %(default)s")
    parser.add_argument("--output", type=int, default=64, help="tokens; default %(default)s")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    args = parser.parse_args()
    engines, pythons = args.engine.split(","), dict(item.partition("=")[::2] for item in args.python)
    if unknown := {*engines, *pythons} - {"nanoengine", "vllm"}:
        parser.error(f"--engine takes nanoengine and vllm, got {', '.join(sorted(unknown))}")
    if "vllm" in engines and "vllm" not in pythons:
        parser.error("--engine vllm needs --python vllm=path/to/its/bin/python")
    known = subprocess.run([args.guidellm, "-c", "import guidellm"], capture_output=True)
    if known.returncode:
        parser.error(f"{args.guidellm} has no guidellm: {INSTALL}")
    rates = [*map(float, args.rate.split(",")), None]
    rows = []
    with tempfile.TemporaryDirectory() as model:
        write_shape(args.model, model, dtype=args.dtype)
        write_tokenizer(SHAPES[args.model]["vocab_size"], model)
        for engine in engines:
            python = pythons.get(engine, sys.executable)
            command = [python, "-m", "nanoengine", "serve", model]
            if engine == "vllm":
                command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
            command += ["--load-format", "dummy", "--served-model-name", "model", "--max-model-len", "2048"]
            with serving(command, os.environ | environment(engine, python, len(CORES))) as port:
                url = f"http://127.0.0.1:{port}"
                load(url, model, args, None, 0)  # a warm-up
                for seed, rate in enumerate(rates, 1):
                    row = {"engine": engine, "rate": rate, **load(url, model, args, rate, seed)}
                    rows.append(row)
                    print("; ".join(row_cells(row)), flush=True)
    head = "server", "requests a second", "output tokens/s", "TTFT p50, p99", "between tokens p50, p99"
    print(f"\n{table(head, map(row_cells, rows))}")
    place = machine(len(CORES), "cpu")
    print(f"\n{hardware(place)}; {args.model}, {args.dtype}\n")
    print(json.dumps({"machine": place, "settings": vars(args), "results": rows}))


def row_cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    rate = "saturated" if row["rate"] is None else f"{row['rate']:g}"
    latencies = [f"{low:.0f}, {high:.0f} ms" for low, high in (row[f"{label}, ms"] for label in FIGURES)]
    return [row["engine"], rate, f"{row['output_tokens_per_s']:.1f}", *latencies]


if __name__ == "__main__":
    main()
