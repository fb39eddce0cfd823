"""Tests and benchmarks that need a GPU, in pieces of at most nine minutes, and a report of their results.

python -m benchmarks.gpu                             # all pieces, in at most forty minutes: `make gpu`
python -m benchmarks.gpu tests attention flash vllm  # these pieces again; the report keeps other results
python -m benchmarks.gpu --report                    # only write the report, from the existing results
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.gpu_report import write_report
from benchmarks.models import write_shape
from nanoengine.apps.workloads import SHAPES, WORKLOADS, Workload, parse_custom

PIECE_S, ALL_S = 540.0, 2400.0  # time limits in seconds, for one piece and for all pieces


class Setup(NamedTuple):
    """Says what the pieces run on. On a CPU, the pieces only show that they run."""

    device: str = "cuda"
    workload: Workload = WORKLOADS["nano"]
    shape: str = "qwen3-0.6b"
    pythons: dict[str, str] = {}  # noqa: RUF012  (an interpreter for each engine that has its own)


# ---- Serving: nano-vllm's own benchmark ----------------------------------------------------------

# name -> the engine, its settings, and the trick to switch off. The engines to compare come first.
SERVED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "flash": ("nanoengine", {"attn_backend": "flash"}, None),
    "varlen": ("nanoengine", {"attn_backend": "varlen"}, None),
    "triton": ("nanoengine", {"attn_backend": "triton"}, None),
    "nano-vllm": ("nano-vllm", {}, None),
    "vllm": ("vllm", {}, None),
    "without-graphs": ("nanoengine", {}, "graphs"),
    "without-fusion": ("nanoengine", {}, "fusion"),
    "without-async": ("nanoengine", {"async_scheduling": False}, None),
    "without-prefix-cache": ("nanoengine", {"enable_prefix_caching": False}, None),
    "varlen-without-graphs": ("nanoengine", {"attn_backend": "varlen"}, "graphs"),
    "triton-without-graphs": ("nanoengine", {"attn_backend": "triton"}, "graphs"),
    "nano-vllm-eager": ("nano-vllm", {"enforce_eager": True}, None),
    "vllm-eager": ("vllm", {"enforce_eager": True}, None),
    "transformers-cb": ("transformers-cb", {}, None),
    "transformers": ("transformers", {}, None),
}


def serve(name: str, setup: Setup) -> dict[str, Any]:
    """Serve the workload with one engine in a process of its own, and return its output tokens per second."""
    from benchmarks import nano_vllm
    from benchmarks.workers import start_worker
    from nanoengine.models.checkpoint import open_checkpoint

    engine, own, without = SERVED[name]
    workload, threads = setup.workload, os.cpu_count() or 1
    prompt_lens, output_lens = workload.lengths()
    longest = max(n + m for n, m in zip(prompt_lens, output_lens, strict=True))
    with tempfile.TemporaryDirectory() as directory:
        write_shape(setup.shape, directory, dtype="bfloat16")
        settings = {
            "model": directory,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "device": setup.device,
            "threads": threads,
            "max_model_len": max(1024, -(-longest // 256) * 256),
            "own": own,
        }
        if without is not None:
            settings["without"] = without
        if engine == "nano-vllm":
            settings = nano_vllm.prepare(open_checkpoint(directory), settings, directory)
        worker = start_worker(engine, setup.pythons.get(engine, sys.executable), threads)
        try:
            reply = worker.ask(settings)
            versions, worker.error = reply.get("versions", {}), reply.get("error")
            vocab_size = SHAPES[setup.shape]["vocab_size"]
            prompts = workload.prompts("warm-up", vocab_size)[:16]
            worker.error = worker.ask([prompts, [8] * len(prompts), [0.0] * len(prompts)]).get("error")
            reply = worker.ask([workload.prompts("run", vocab_size), output_lens, [0.0] * len(output_lens)])
        finally:
            worker.close()
    if "error" in reply:
        return {"error": reply["error"]}
    kept = {
        key: reply[key] for key in ("seconds", "output_tokens", "cuda_peak_bytes", "phases") if key in reply
    }
    return kept | {"output_tokens_per_s": reply["output_tokens"] / reply["seconds"], "versions": versions}


# ---- Tests ---------------------------------------------------------------------------------------


def run_tests(setup: Setup) -> dict[str, Any]:
    """Run the tests that are marked for a GPU, which include every compiled kernel's."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-rfEs",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    told = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {
        "summary": lines[-1] if lines else done.stderr[-500:],
        "told": told,
        "passed": not done.returncode,
    }


# ---- Attention -----------------------------------------------------------------------------------

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 256, 16, 8, 128  # Qwen3-0.6B's


def attention_ms(backend: Any, lens: list[tuple[int, int]], device: Any, repeats: int = 5) -> float:
    """Return the milliseconds of one layer's attention, the least of `repeats` runs.

    `lens` holds (new tokens, all tokens) for each sequence.
    """
    import torch

    from nanoengine import SamplingParams
    from nanoengine.backends.inputs import send_inputs
    from nanoengine.backends.kv_cache import KVCache, KVSpec
    from nanoengine.engine import Chunk, ScheduledBatch, Sequence, build_inputs

    chunks, num_blocks = [], 1
    for num_new, total in lens:
        seq = Sequence(0, [0] * total, SamplingParams())
        seq.block_table = [*range(num_blocks, num_blocks + -(-total // BLOCK_SIZE))]
        num_blocks += len(seq.block_table)
        chunks.append(Chunk(seq, total - num_new, total, False, seq.token_ids))
    num_tokens = sum(num_new for num_new, _ in lens)
    inputs = build_inputs(ScheduledBatch(chunks, [], num_tokens), BLOCK_SIZE)
    there = send_inputs(inputs, lambda arrays: [torch.tensor(array, device=device) for array in arrays])
    attention = backend(there.metadata, BLOCK_SIZE)
    spec = KVSpec(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, torch.bfloat16)
    cache = KVCache.zeros(spec, num_blocks, BLOCK_SIZE, device)
    q = torch.zeros(num_tokens, NUM_HEADS, HEAD_DIM, dtype=spec.dtype, device=device)
    kv = q[:, :NUM_KV_HEADS].contiguous()
    seconds = []
    for _ in range(1 + repeats):  # the first run is a warm-up
        start = time.perf_counter()
        attention(q, kv, kv, cache, scale=HEAD_DIM**-0.5)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds[1:])


BATCHES = {
    "64 decodes at 2k": [(1, 2000)] * 64,
    "256 decodes at 1k": [(1, 1000)] * 256,
    "8 decodes at 4k": [(1, 4000)] * 8,
    "a prompt of 4k": [(4096, 4096)],
    "255 decodes and a chunk of 4k": [(1, 1000)] * 255 + [(4096, 6000)],
}


def measure_attention(setup: Setup, batches: dict[str, list[tuple[int, int]]] = BATCHES) -> dict[str, Any]:
    """Measure one layer's attention with each backend, and with each of Triton's tile sizes."""
    import torch

    from nanoengine.backends import triton
    from nanoengine.backends.attention import TorchAttention
    from nanoengine.backends.flash import FlashAttention, VarlenAttention
    from nanoengine.backends.kv_cache import KVSpec

    device = torch.device(setup.device)
    spec = KVSpec(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, torch.bfloat16)

    def measure(backend: Any) -> dict[str, Any]:
        reason = backend.obstacle([spec], frozenset())
        if reason is None and setup.device == "cuda":
            reason = backend.try_out([spec], frozenset(), BLOCK_SIZE, device)
        if reason is not None:
            return {"error": reason}
        return {name: attention_ms(backend, lens, device) for name, lens in batches.items()}

    kinds = FlashAttention, VarlenAttention, triton.TritonAttention, TorchAttention
    backends = {backend.name: measure(backend) for backend in kinds}
    tiles = {}
    for name, row in list(triton.TILES.items()):
        try:
            with mock.patch.dict(triton.TILES, {triton.generation(device): row}):
                times = measure(triton.TritonAttention)
        except Exception as error:  # another GPU's tiles may not fit into this one's memory
            times = {"error": str(error).splitlines()[0]}
        tiles[f"{name}: {row.rows} rows, {row.keys} keys, {row.warps} warps"] = times
    return {"backends": backends, "tiles": tiles}


# ---- A profile of decode steps -------------------------------------------------------------------

NUM_SEQS, NUM_STEPS = 64, 50


def profile_steps(setup: Setup) -> dict[str, Any]:
    """Profile decode steps: how busy the GPU is, and which kernels take its time. Traces only the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from nanoengine import LLM, SamplingParams

    is_cuda = setup.device == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    wait: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
    found = {}
    samplings: dict[str, dict[str, Any]] = {
        "": {},
        ", top_p": {"top_p": 0.9},
        ", top_k": {"top_k": 20, "top_p": 0.95},
    }
    with tempfile.TemporaryDirectory() as directory:
        write_shape(setup.shape, directory)
        settings = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "device": setup.device,
            "max_model_len": 1024,
        }
        with LLM(directory, **settings) as llm:
            for name, sampling in samplings.items():
                params = SamplingParams(max_tokens=2 * NUM_STEPS, ignore_eos=True, **sampling)
                for i in range(NUM_SEQS):
                    llm.add_request(str(i), [1 + i] * 300, params)
                for _ in range(NUM_STEPS // 2):
                    llm.step()
                wait()
                with profile(activities=[activity]) as profiler:
                    start = time.perf_counter()
                    for _ in range(NUM_STEPS):
                        llm.step()
                    wait()
                    seconds = time.perf_counter() - start
                while llm.has_unfinished_requests():
                    llm.step()
                table = profiler.key_averages()
                kernels = [event for event in table if event.device_type.name == activity.name]
                spent = {
                    event.key[:60]: (event.self_device_time_total if is_cuda else event.self_cpu_time_total)
                    / 1e3
                    for event in kernels
                }
                most = sorted(spent.items(), key=lambda item: -item[1])[:12]
                found[f"{NUM_SEQS} decodes{name}"] = {
                    "ms_per_step": 1e3 * seconds / NUM_STEPS,
                    "busy": sum(spent.values()) / 1e3 / seconds,
                    "kernels_ms_per_step": {key: ms / NUM_STEPS for key, ms in most},
                }
    return found


# ---- Running the pieces --------------------------------------------------------------------------


def about(setup: Setup) -> dict[str, Any]:
    """Return the machine, and the versions of the installed packages."""
    import importlib.metadata

    from benchmarks.machine import machine

    wanted = ("torch", "triton", "flash-attn", "transformers", "numpy")
    versions = {}
    for name in wanted:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"machine": machine(os.cpu_count() or 1, setup.device), "versions": versions}


def compute(name: str, setup: Setup) -> dict[str, Any]:
    """Run one piece, and return its result."""
    others = {"about": about, "tests": run_tests, "attention": measure_attention, "profile": profile_steps}
    return others[name](setup) if name in others else serve(name, setup)


PIECES = ["about", "tests", "attention", "profile", *SERVED]


def run_pieces(
    names: Iterable[str],
    directory: Path,
    command: Callable[[str], list[str]],
    piece_s: float = PIECE_S,
    all_s: float = ALL_S,
) -> None:
    """Run each piece in a process of its own, and write its last line of output, as JSON, to NAME.json."""
    directory.mkdir(exist_ok=True)
    end = time.monotonic() + all_s
    for name in names:
        start = time.monotonic()
        limit = min(piece_s, end - start)
        if limit <= 0:
            print(f"{name}: left out, the time is up; python -m benchmarks.gpu {name}", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        with (directory / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command(name), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
            try:
                out, _ = process.communicate(timeout=limit)
                found = json.loads(out.strip().splitlines()[-1])
            except subprocess.TimeoutExpired:
                found = {"error": f"it did not end in {limit:.0f} s"}
            except (ValueError, IndexError):
                found = {"error": f"it ended with {process.returncode}, see {name}.log"}
            finally:
                with suppress(ProcessLookupError):  # also ends the processes that it started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found["took_s"] = round(time.monotonic() - start, 1)
        (directory / f"{name}.json").write_text(json.dumps(found))
        print(f"{name}: {found.get('error', 'done')}, {found['took_s']} s", file=sys.stderr, flush=True)


def main() -> None:
    """Run pieces, and write the report of all pieces that have run so far."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", help=f"of {', '.join(PIECES)}; none: all")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="a directory")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH", help="its interpreter"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that it runs")
    parser.add_argument("--custom", type=parse_custom, metavar="REQUESTS:PROMPT:OUTPUT", help="not nano's")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--report", action="store_true", help="write the report alone")
    parser.add_argument("--piece", choices=PIECES, help=argparse.SUPPRESS)  # run one here and print it
    args = parser.parse_args()
    if unknown := set(args.pieces).difference(PIECES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PIECES)}")
    pythons = dict(item.partition("=")[::2] for item in args.python)
    if args.piece:
        setup = Setup(args.device, args.custom or WORKLOADS["nano"], args.shape, pythons)
        replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what engines print goes to the log
        try:
            found = compute(args.piece, setup)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(found), file=replies, flush=True)
        return
    if not args.report:
        import torch

        if args.device == "cuda" and not torch.cuda.is_available():
            sys.exit("this PyTorch sees no GPU")
        options = [f"--python={item}" for item in args.python]
        options += [f"--device={args.device}", f"--shape={args.shape}"]
        options += [f"--custom={args.custom.name}"] if args.custom else []
        command = [sys.executable, "-m", "benchmarks.gpu", *options]
        run_pieces(args.pieces or PIECES, args.out, lambda name: [*command, "--piece", name])
    print(write_report(args.out))


if __name__ == "__main__":
    main()
