"""Tests and benchmarks that need a GPU, in pieces of at most nine minutes, and a report of their results.

python -m benchmarks.gpu                             # all pieces, in at most forty minutes: `make gpu`
python -m benchmarks.gpu tests attention flash vllm  # these pieces again; the report keeps other results
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import write_report

PIECE_S, ALL_S = 540.0, 2400.0  # time limits in seconds, for one piece and for all pieces
# Pieces that are a run of `python -m benchmarks`: the engines to compare, and nanoengine's tricks.
ENGINES = {name: f"nanoengine-{name}" for name in ("flash", "varlen", "triton")}
ENGINES |= {name: name for name in ("nano-vllm", "vllm", "transformers")}
TRICKS = ("graphs", "fusion", "async scheduling", "prefix caching")


def run_tests(device: str) -> dict[str, Any]:
    """Run the tests that are marked for a GPU, which include every compiled kernel's."""
    options = ["-m", "gpu", "-q", "-rfEs", "--no-header", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/backends/test_gpu.py", "tests"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)  # to the log, for when the time is up
            lines.append(line.rstrip())
    notes = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {"summary": lines[-1] if lines else "pytest printed nothing", "notes": notes}


# ---- Attention -----------------------------------------------------------------------------------

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CALLS = 256, 16, 8, 128, 20  # Qwen3-0.6B's
BATCHES = {  # (new tokens, all tokens) of each sequence
    "64 decodes at 2k": [(1, 2000)] * 64,
    "256 decodes at 1k": [(1, 1000)] * 256,
    "8 decodes at 4k": [(1, 4000)] * 8,
    "a prompt of 4k": [(4096, 4096)],
    "255 decodes and a chunk of 4k": [(1, 1000)] * 255 + [(4096, 6000)],
}
SMALL = {"a decode and a chunk": [(1, 300), (20, 400)]}  # for a CPU, to see that it runs


def attention_ms(backend: Any, lens: list[tuple[int, int]], device: Any) -> float:
    """Return the milliseconds of one layer's attention, the least of five runs."""
    import torch
    from torch.utils.benchmark import Timer

    from nanoengine import SamplingParams
    from nanoengine.backends.kv_cache import KVCache, KVSpec
    from nanoengine.backends.step_inputs import send_inputs
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
    for x in (cache.k, cache.v):
        x.normal_()  # products of zeros are faster
    q = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, dtype=spec.dtype, device=device)
    kv = q[:, :NUM_KV_HEADS].contiguous()
    run: Any = partial(attention, q, kv, kv, cache, scale=HEAD_DIM**-0.5)
    num_calls = CALLS if device.type == "cuda" and backend.capturable else 1
    if num_calls > 1:
        run()  # what is done once must not be captured, and Python takes longer than some kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _ = [run() for _ in range(CALLS)]
        run = graph.replay
    timer = Timer("run()", globals={"run": run})  # it warms up, and waits for the GPU
    return 1e3 * min(timer.timeit(1).mean for _ in range(5)) / num_calls


def measure_attention(device: str) -> dict[str, Any]:
    """Measure one layer's attention with each backend."""
    import torch

    from nanoengine.backends import cuda, flash_attention, kv_cache, torch_attention, triton_attention

    where, none = torch.device(device), frozenset[str]()
    batches = SMALL if where.type == "cpu" else BATCHES
    specs = [kv_cache.KVSpec(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, torch.bfloat16)]
    found: dict[str, Any] = {}
    kinds: list[Any] = [
        flash_attention.FlashAttention,
        flash_attention.VarlenAttention,
        triton_attention.TritonAttention,
    ]
    for backend in (*kinds, torch_attention.TorchAttention):
        reason = backend.obstacle(specs, none) or cuda.try_out(backend, specs, none, BLOCK_SIZE, where)
        times = {} if reason else {name: attention_ms(backend, lens, where) for name, lens in batches.items()}
        found[backend.name] = times or {"error": reason}
    return found


# ---- Running the pieces --------------------------------------------------------------------------

HERE = {"tests": run_tests, "attention": measure_attention}
PIECES = [*HERE, *ENGINES, *(f"without {trick}".replace(" ", "-") for trick in TRICKS)]


def command_of(piece: str, device: str, pythons: list[str]) -> list[str]:
    """Return the command of a piece, which ends with a line of JSON."""
    if piece in HERE:
        return [sys.executable, "-m", "benchmarks.gpu", "--device", device, "--piece", piece]
    trick = piece.removeprefix("without-").replace("-", " ")
    chosen = ["--ablate", trick] if trick in TRICKS else ["--engine", ENGINES[piece]]
    workload = ["--model", "tiny", "--custom", "2:8:4"] if device == "cpu" else ["--workload", "nano"]
    options = ["--device", device, "--repeats", "1", *(f"--python={python}" for python in pythons)]
    return [sys.executable, "-m", "benchmarks", *chosen, *options, *workload]


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
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
            process = subprocess.Popen(command(name), start_new_session=True, **pipes)
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
        (directory / f"{name}.json").write_text(json.dumps(found))
        seconds = time.monotonic() - start
        print(f"{name}: {found.get('error', 'done')}, {seconds:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Run pieces, and write the report of all pieces that have run so far."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", help=f"of {', '.join(PIECES)}; none: all")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="a directory")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that it runs")
    parser.add_argument("--piece", choices=HERE, help=argparse.SUPPRESS)  # run one here and print it
    args = parser.parse_args()
    if unknown := set(args.pieces).difference(PIECES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PIECES)}")
    if args.piece:
        return print(json.dumps(HERE[args.piece](args.device)))
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this PyTorch sees no GPU")
    run_pieces(args.pieces or PIECES, args.out, lambda name: command_of(name, args.device, args.python))
    print(write_report(args.out))


if __name__ == "__main__":
    main()
