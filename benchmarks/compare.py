"""Measures engines that serve the same model, in turns, and compares them with the roofline."""

import argparse
import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from benchmarks import llama_cpp, nano_vllm, openvino
from benchmarks.ablation import WITHOUT
from benchmarks.machine import machine
from benchmarks.models import SHAPES, write_shape
from benchmarks.workers import Worker, start_worker
from nanoengine.cli.bench import percentiles
from nanoengine.cli.workloads import Workload
from nanoengine.extensions.roofline import roofline_seconds

LATENCIES = ("ttft", "tpot", "itl")
# Engine -> the function that converts the checkpoint and the settings for it.
PREPARE = {"llama.cpp": llama_cpp.prepare, "openvino": openvino.prepare}
PREPARE |= dict.fromkeys(("nano-vllm", "nano.py"), nano_vllm.prepare)
# Bits per weight in the layers and in the head, including scales. Other engines' weights have the dtype.
BITS = {"int8": (8.125, 8.125), "int4": (4.5, 8.125), "q8_0": (8.5, 8.5), "q4_0": (4.5, 8.5)}
BITS |= {f"{kind}{of_inputs}": BITS[kind] for kind in ("int8", "int4") for of_inputs in ("+a8", "+a16")}
BITS |= dict.fromkeys(("int4+a8", "nanoengine-int4"), (4.5, 6.25))  # with rounded activations
COUNTERS = ("steps", "prefix_hit_rate", "preemptions")


def summarize(replies: list[dict[str, Any]], prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Summarize one engine's runs of one workload. Figures that the engine does not report are None."""
    for reply in replies:
        if "error" not in reply and reply["output_tokens"] != output_tokens:
            reply["error"] = f"{reply['output_tokens']} output tokens of {output_tokens} asked for"
        if "error" in reply:
            return {"error": reply["error"]}

    def spread(values: list[float]) -> dict[str, float]:
        numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        return {name: round(value, 4) for name, value in numbers.items()}

    row: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": spread([output_tokens / r["seconds"] for r in replies]),
        "runs_tokens_per_s": [round(output_tokens / r["seconds"], 4) for r in replies],
        "total_tokens_per_s": spread([(prompt_tokens + output_tokens) / r["seconds"] for r in replies]),
    }
    for name in LATENCIES:
        values = [value for reply in replies for value in reply.get(name, [])]
        row[f"{name}_ms"] = [round(1000 * value, 3) for value in percentiles(values)] if values else None
    for name in COUNTERS:
        known = [reply[name] for reply in replies if name in reply]
        row[name] = round(statistics.median(known), 4) if known else None
    phases = [reply["phases"] for reply in replies if "phases" in reply]
    names = phases[0] if phases else ()
    row["phases_s"] = {p: round(statistics.median(each[p] for each in phases), 4) for p in names} or None
    peaks = [reply["cuda_peak_bytes"] for reply in replies if "cuda_peak_bytes" in reply]
    return row | {"cuda_peak_bytes": max(peaks, default=None)}


class Limits:
    """Measures the machine's limits, and keeps the best: other load on the machine only lowers them."""

    def __init__(self, worker: Worker, checkpoint: Any, itemsize: int) -> None:
        self.worker, self.config, self.itemsize = worker, checkpoint.decoder_config, itemsize
        self.bandwidth = 0.0  # bytes per second
        self.flops: dict[str, float] = {}  # rows -> FLOPs per second

    def measure(self) -> None:
        """Measure again."""
        reply = self.worker.ask([[], []])
        if "error" in reply:
            raise RuntimeError(f"the machine's limits cannot be measured: {reply['error']}")
        self.bandwidth = max(self.bandwidth, reply["bandwidth"])
        self.flops = {rows: max(rate, self.flops.get(rows, 0.0)) for rows, rate in reply["flops"].items()}

    def ideal_seconds(self, engine: str, lens: tuple[list[int], list[int]], **limits: Any) -> float:
        """Return the seconds of an ideal engine with as many weight bits as `engine`."""
        bits = BITS.get(engine, BITS.get(engine.rpartition("-")[2]))
        return roofline_seconds(self.config, *lens, itemsize=self.itemsize, weight_bits=bits, **limits)

    def roofline(self, workload: Workload, engine: str = "") -> float | None:
        """Return an ideal engine's output tokens per second here."""
        if self.config is None:  # it runs on transformers' code, which the roofline does not cover
            return None
        lens, flops = workload.lengths(), max(self.flops.values())
        limits = {"shared": workload.shared, "bandwidth": self.bandwidth, "flops": flops}
        return round(sum(lens[1]) / self.ideal_seconds(engine, lens, **limits), 2)

    def weight_bytes(self, engine: str) -> float:
        """Return the bytes of the weights that each step reads."""
        return self.ideal_seconds(engine, ([0], [1]), bandwidth=1.0, flops=math.inf)


def measure(
    workload: Workload, workers: list[Worker], limits: Limits, vocab_size: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Serve a workload with engines in turns, and yield a row per engine."""
    prompt_lens, output_lens = workload.lengths()
    # A warm-up: up to 4096 tokens of other prompts, with 8 output tokens each.
    prompts = workload.prompts(f"{workload.name}, warm-up", vocab_size)
    totals = itertools.accumulate(map(len, prompts))
    prompts = prompts[: max(1, sum(total <= 4096 for total in totals))]
    for worker in workers:
        worker.error = worker.ask([prompts, [min(8, n) for n in output_lens[: len(prompts)]]]).get("error")
    replies: dict[str, list[dict[str, Any]]] = {worker.engine: [] for worker in workers}
    for run in range(repeats):
        prompts = workload.prompts(f"{workload.name}, run {run}", vocab_size)
        for worker in workers:
            reply = worker.ask([prompts, output_lens])
            replies[worker.engine].append(reply)
            done = reply.get("error") or f"{reply['output_tokens'] / reply['seconds']:.1f} tokens/s"
            print(f"{workload.name}, run {run + 1} of {repeats}, {worker.engine}: {done}", file=sys.stderr)
        limits.measure()
    prompt_tokens = sum(prompt_lens) + workload.shared * len(prompt_lens)
    for worker in workers:
        row: dict[str, Any] = {"workload": workload.name, "engine": worker.engine}
        row |= summarize(replies[worker.engine], prompt_tokens, sum(output_lens))
        if "error" not in row:
            ideal = limits.roofline(workload, worker.engine)
            rate = row["output_tokens_per_s"]["median"]
            row["roofline_share"] = ideal and round(rate / ideal, 4)
            if ideal and len(prompt_lens) == 1:
                row["gb_per_s"] = round(rate * limits.weight_bytes(worker.engine) / 1e9, 4)
        yield row


def bench_model(model: str, workloads: list[Workload], args: argparse.Namespace) -> dict[str, Any]:
    """Start the engines on one model, and let them serve the workloads."""
    import torch

    from nanoengine.checkpoints.checkpoint import open_checkpoint
    from nanoengine.config import EngineConfig

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if model in SHAPES:
            write_shape(model, scratch, dtype=args.dtype)
        checkpoint = open_checkpoint(EngineConfig(model=scratch if model in SHAPES else model))
        lengths = [(n + w.shared + m) for w in workloads for n, m in zip(*w.lengths(), strict=True)]
        settings = {
            "model": str(checkpoint.path),
            "load_format": "auto" if any(checkpoint.path.glob("*.safetensors")) else "dummy",
            "dtype": args.dtype,
            "device": args.device,
            "threads": args.threads,
            "max_model_len": max(1024, -(-max(lengths) // 256) * 256),
        }

        def start(engine: str, until: ExitStack) -> Worker:
            print(f"{model}: starting {engine}", file=sys.stderr)
            name, _, kind = engine.rpartition("-") if engine.rpartition("-")[2] in BITS else (engine, "", "")
            python = args.pythons.get(engine) or args.pythons.get(name) or sys.executable
            worker = start_worker(engine, python, args.threads)
            until.callback(worker.close)
            given = settings | {"weight_type": kind or None}
            reply = worker.ask(PREPARE[name](checkpoint, given, scratch) if name in PREPARE else given)
            worker.error, worker.versions = reply.get("error"), reply.get("versions", {})
            return worker

        limits = Limits(start("limits", stack), checkpoint, getattr(torch, args.dtype).itemsize)
        engines: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        turns = [args.engine]
        if args.ablate:  # pairs of engines with and without a trick, since the machine's speed changes
            turns = [["nanoengine", WITHOUT + trick] for trick in args.ablate]
        if args.device == "cuda":  # each engine takes nearly all memory, so only one can run at a time
            turns = [[engine] for turn in turns for engine in turn]
        for turn in turns:
            with ExitStack() as until:
                workers = [start(engine, until) for engine in turn]
                for workload in workloads:
                    rows += measure(workload, workers, limits, checkpoint.vocab_size, args.repeats)
                for each in workers:
                    about = {"error": each.error, "versions": each.versions, "environment": each.notes}
                    engines[each.engine] = about
        names = [workload.name for workload in workloads]
        rows.sort(key=lambda row: names.index(row["workload"]))
        return {
            "model": model,
            "engines": engines,
            "limits": {
                "bandwidth_gb_per_s": round(limits.bandwidth / 1e9, 1),
                "gemm_gflop_per_s": {rows: round(rate / 1e9) for rows, rate in limits.flops.items()},
                "roofline_output_tokens_per_s": {w.name: limits.roofline(w) for w in workloads},
            },
            "results": rows,
        }


def bench_engines(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every requested workload, and return the report."""
    groups: dict[str, list[Workload]] = {}
    for workload in args.workload:
        groups.setdefault(args.model or workload.shape, []).append(workload)
    return {
        "machine": machine(args.threads, args.device),
        "dtype": args.dtype,
        "repeats": args.repeats,
        "workloads": [asdict(workload) for workload in args.workload],
        "models": [bench_model(model, workloads, args) for model, workloads in groups.items()],
    }
