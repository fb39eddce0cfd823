"""Measure engines side by side. No download; the last line printed is one JSON object.

python -m benchmarks                               # nanoengine on this machine's default workload
python -m benchmarks --workload decode,prefix --engine nanoengine,transformers
python -m benchmarks --engine nanoengine,vllm --python vllm=/path/to/its/venv/bin/python
python -m benchmarks --engine nanoengine-int4,llama.cpp-q4_0 --custom 1:32:128  # 4-bit weights
python -m benchmarks --custom 64:32-256:16-64:512  # 64 requests, prompts of 32 to 256 tokens after 512 shared
python -m benchmarks --ablate                      # nanoengine without each of its tricks
python -m benchmarks --what kernels                # each CPU kernel's share of the machine's peak
python -m benchmarks --what load --model MODEL     # where the time goes before the first token
python -m benchmarks --what bits --dtype float32   # whether schedules change a log-probability

Each engine has a process of its own, and the engines take turns: the first run of each, the second run of
each, and so on. The others are stopped meanwhile. On a GPU each engine takes nearly all memory, so the second
engine starts after all runs of the first. All engines get the same prompts, output lengths, dtype and number
of threads, after a warm-up with other tokens. The models are published shapes with random weights, unless
--model names a checkpoint. Compare figures of the same run only.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks.ablation import TRICKS
from benchmarks.bits import main as print_bits
from benchmarks.engines import ENGINES
from benchmarks.load import bench_load
from benchmarks.models import SHAPES, parse_custom
from benchmarks.runs import CORES
from nanoengine.cli.workloads import WORKLOADS


def command_line() -> str:
    """Return the command line, without this machine's own paths."""
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    return re.sub(r"=/\S*/(?=\S+/bin/)", "=", command)


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: known names, separated by commas."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if unknown := set(names).difference(known):
            message = f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}"
            raise argparse.ArgumentTypeError(message)
        return names

    return parse


def interpreter(text: str) -> tuple[str, str]:
    """Parse ENGINE=PATH, where PATH is an engine's interpreter."""
    engine, _, path = text.partition("=")
    names_of(ENGINES)(engine)
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"needs ENGINE=PATH of an interpreter, got {path!r}")
    return engine, path


def parse_arguments() -> argparse.Namespace:
    """Parse the options, and check them before anything starts."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)

    def add_names(option: str, known: Collection[str], text: str, **settings: Any) -> None:
        parser.add_argument(option, type=names_of(known), help=f"{text} {', '.join(known)}", **settings)

    parser.add_argument("--what", choices=["engines", "kernels", "load", "bits"], default="engines")
    add_names("--workload", WORKLOADS, "default: small, on a GPU nano; of", default=[])
    parser.add_argument(
        "--custom", type=parse_custom, action="append", default=[], metavar="REQUESTS:PROMPT:OUTPUT[:SHARED]"
    )
    parser.add_argument("--model", help=f"{', '.join(SHAPES)} (random weights), a directory or a hub id")
    add_names("--engine", ENGINES, "one or more of", default=["nanoengine"])
    parser.add_argument("--python", type=interpreter, action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(CORES))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    default = "default: all of this device; of"
    add_names("--ablate", TRICKS, default, nargs="?", const=list(TRICKS), metavar="TRICKS")
    args = parser.parse_args()
    if args.repeats < 1 or args.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if any(name.startswith("llama.cpp") for name in args.engine) and importlib.util.find_spec("gguf") is None:
        parser.error("gguf, which writes llama.cpp's model, is not installed: pip install -e '.[bench]'")
    args.pythons = dict(args.python)
    if args.model is None or args.model in SHAPES or Path(args.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    import torch

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.ablate == list(TRICKS):
        args.ablate = [name for name, trick in TRICKS.items() if args.device in trick.devices]
    if not args.workload and not args.custom:
        default_names = ["decode", "prefill", "prefix"] if args.ablate else ["small"]
        args.workload = ["nano"] if args.device == "cuda" else default_names
    args.workload = [WORKLOADS[name] for name in args.workload] + args.custom
    return args


def main() -> None:
    """Run the benchmark, and print the results."""
    args = parse_arguments()
    if args.what == "load":
        return print(json.dumps(bench_load(args.model or "demo", args.repeats)))
    if args.what == "bits":
        return print_bits(args.model or "demo", args.dtype)
    if args.what == "kernels":
        from benchmarks.kernels import bench_kernels

        return print(json.dumps(bench_kernels(args.threads, args.dtype, args.repeats)))
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    # Imported late, so that a wrong option is refused at once, and huggingface_hub reads HF_HUB_OFFLINE.
    from benchmarks.compare import bench_engines
    from benchmarks.report import print_tables, print_tricks

    try:
        report = bench_engines(args)
    except (ValueError, OSError) as error:  # a bad model; errors of an engine are in its row instead
        sys.exit(f"python -m benchmarks: {' '.join(str(error).split())}")
    print_tables(report)
    if args.ablate:
        print_tricks(report)
    about = {"command": command_line(), "started": started, "python": platform.python_version()}
    print(json.dumps(about | report))


if __name__ == "__main__":
    main()
