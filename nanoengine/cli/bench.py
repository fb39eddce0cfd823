"""Measure this engine on one workload: throughput, latency, and the share of the machine's roofline.

nanoengine bench                                # Qwen3-0.6B's shape with random weights: no download
nanoengine bench --workload decode --repeats 5
nanoengine bench --model Qwen/Qwen3-0.6B        # a checkpoint

It also prints a receipt: where the seconds of one more run went, beside the least that each item could take.
The last line is one JSON object: the results or, with --json, the receipt. To compare engines, in a clone:
python -m benchmarks --help
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoengine import LLM, RequestOutputKind, SamplingParams
from nanoengine.cli.workloads import SHAPES, WORKLOADS
from nanoengine.extensions.receipt import recorder_of, show
from nanoengine.extensions.roofline import roofline_seconds
from nanoengine.flags import FlexibleArgumentParser

CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def percentiles(values: list[float]) -> list[float]:
    """Return the 50th, 90th and 99th percentile, interpolated between neighbours."""
    return np.quantile(values, (0.5, 0.9, 0.99)).tolist()  # type: ignore[no-any-return]


def serve(llm: LLM, prompts: list[list[int]], output_lens: list[int]) -> tuple[float, list[list[float]]]:
    """Serve all prompts at once. Returns the total seconds, and the time of each token of each request."""
    start = time.perf_counter()
    for i, (prompt, num_tokens) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(
            temperature=0.6,
            max_tokens=num_tokens,
            ignore_eos=True,  # so that every run makes the same number of tokens
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,  # an output holds only the tokens that its step added
        )
        llm.add_request(str(i), prompt, params)
    stamps: list[list[float]] = [[] for _ in prompts]
    while llm.has_unfinished_requests():
        outputs = llm.step()
        now = time.perf_counter() - start
        for output in outputs:
            stamps[int(output.request_id)] += [now] * len(output.outputs[0].token_ids)
    return time.perf_counter() - start, stamps


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Serve the workload several times, all requests at once, and compare the times with the roofline."""
    workload, dtype = WORKLOADS[args.workload], llm.llm_engine.started.loaded.dtype
    vocab_size = llm.llm_engine.checkpoint.vocab_size
    prompt_lens, output_lens = workload.lengths()
    serve(llm, workload.prompts("warm-up", vocab_size)[:8], [8] * min(8, workload.num_requests))

    seconds, first_tokens, gaps = [], [], []
    for run in range(args.repeats):
        elapsed, stamps = serve(llm, workload.prompts(f"run {run}", vocab_size), output_lens)
        print(f"run {run + 1} of {args.repeats}: {sum(output_lens) / elapsed:.1f} output tokens/s")
        seconds.append(elapsed)
        first_tokens += [times[0] for times in stamps]
        gaps += [after - before for times in stamps for before, after in pairwise(times)]

    recorder = recorder_of(llm.llm_engine.core, llm.llm_engine.started)
    serve(llm, workload.prompts("receipt", vocab_size), output_lens)
    receipt, limits = recorder.receipt(), recorder.limits
    bandwidth, flops = limits["bandwidth"], max(limits["flops"].values())
    rates = {"bandwidth": bandwidth, "flops": flops, "itemsize": dtype.itemsize}
    config, lengths = llm.llm_engine.checkpoint.decoder_config, (prompt_lens, output_lens, workload.shared)
    # The roofline does not cover models that run on transformers' code.
    ideal = None if config is None else roofline_seconds(config, *lengths, **rates)
    num_prompt_tokens = sum(prompt_lens) + workload.shared * workload.num_requests
    median = statistics.median(seconds)
    result = {
        "workload": args.workload,
        "model": args.model or workload.shape,
        "output_tokens_per_s": sum(output_lens) / median,
        "total_tokens_per_s": (num_prompt_tokens + sum(output_lens)) / median,
        "share_of_roofline": ideal and ideal / median,
        "seconds": seconds,
        "first_token_s": percentiles(first_tokens),
        "between_tokens_s": percentiles(gaps),
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "gflop_per_s": flops / 1e9,
    }
    for name, value in result.items():
        values = value if isinstance(value, list) else [value]
        print(f"{name:20}", *(f"{v:.4g}" if isinstance(v, float) else v for v in values))
    print(f"\nwhere the seconds of one more run went\n{show(receipt)}\n")
    return receipt if args.json else result


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments, load the model and measure it."""
    parser = FlexibleArgumentParser("nanoengine bench", description=__doc__)
    default = "nano" if torch.cuda.is_available() else "small"
    parser.add_argument("--workload", choices=WORKLOADS, default=default)
    parser.add_argument("--model", help="directory or hub id; default: the workload's, with random weights")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--scheduler-cls", metavar="MODULE:CLASS", help="a subclass of `Scheduler`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the receipt as the last line")
    parser.add_argument("--threads", type=int, help="default: one per CPU, or what a CPU quota allows")
    args = parser.parse_args(arguments)
    if args.repeats < 1 or (args.threads is not None and args.threads < 1):
        parser.error("--repeats and --threads must be at least 1")

    if args.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # a CPU quota does not lower it
    torch.set_num_threads(args.threads or CORES)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(SHAPES[WORKLOADS[args.workload].shape]))
        settings: dict[str, Any] = {} if args.model else {"load_format": "dummy", "max_model_len": 2048}
        try:
            llm = LLM(args.model or scratch, dtype=args.dtype, scheduler_cls=args.scheduler_cls, **settings)
        except (OSError, TypeError, ValueError) as error:
            parser.error(str(error))
        with llm:
            print(json.dumps(measure(llm, args)))
