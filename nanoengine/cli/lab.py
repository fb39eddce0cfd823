"""Run the engine's own scheduler and block manager on a trace, with a cost model in place of a device.

nanoengine lab --scheduler-cls fcfs,shortest,priority,cached,deadline --agent-sessions 40
nanoengine lab --scheduler-cls my_module:MyScheduler --trace arrivals.jsonl --plot lab.png
nanoengine lab --fit path/to/model            # the costs of a model on this machine

Settings may be given several values, separated by commas. Every combination of them serves the same requests.
A step takes `step + token * tokens + context * contexts` seconds: a fixed cost, one for each token that it
computes, and one for each token that its sequences attend to. docs/guide/lab.md explains more.
"""

import argparse
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoengine.cli.terminal import table
from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager
from nanoengine.flags import FlexibleArgumentParser, argparse_type
from nanoengine.lab.arrivals import agent_sessions, generate_arrivals, parse_lengths, read_arrivals
from nanoengine.lab.policies.names import POLICIES, find_policy
from nanoengine.lab.simulation import DEMO_COSTS, CostModel, Report, calibrate, simulate
from nanoengine.llm_engine import LLMEngine
from nanoengine.sampling_params import check_integer, check_number


def print_table(title: str, reports: dict[str, Report], ttft_limit: float, itl_limit: float) -> None:
    """Print a Markdown table with one row per setup."""
    rows: list[dict[str, str]] = []
    for setup, report in reports.items():
        latency, ttft = ([f"{one:.2f}" for one in report.quantiles(name)] for name in ("latency", "ttft"))
        row = {
            "": setup,
            "latency p50 / p90 / p99, s": " / ".join(latency),
            "TTFT, s": " / ".join(ttft),
            "ITL, ms": " / ".join(f"{1e3 * one:.1f}" for one in report.quantiles("itl")),
            "longest TTFT, s": f"{report.ttft.max():.1f}",
            "goodput": f"{report.goodput(ttft_limit, itl_limit):.0%}",
            "hits": f"{report.hit_rate:.1%}",
            "Belady": f"{report.optimal_hit_rate:.1%}",
            "preemptions": str(report.num_preemptions),
            "recomputed": str(report.num_recomputed_tokens),
            "output tokens/s": f"{report.output_tokens_per_s:.0f}",
            "busy": f"{report.busy_seconds / report.seconds:.0%}",
        }
        rows.append(row)
    print(f"\n{title}\n\n{table(rows[0], (row.values() for row in rows))}")


def draw(reports: dict[str, Report], path: str) -> None:
    """Plot the distributions of the time to first token and of the latency."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    shares = np.linspace(0, 1, 1001)
    for axis, name, label in zip(axes, ("ttft", "latency"), ("time to first token", "latency"), strict=True):
        for setup, report in reports.items():
            axis.plot(np.quantile(getattr(report, name), shares), shares, label=setup)
        axis.set(xlabel=f"{label}, s", ylabel="share of the requests", xscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def at_least(low: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least `low`."""
    return argparse_type(lambda text: check_integer("the value", int(text), low))


@argparse_type
def positive(text: str) -> float:
    """Parse a finite number above zero."""
    return check_number("the value", float(text), 0, 1e12, open_low=True)


@argparse_type
def parse_costs(text: str) -> CostModel:
    """Parse STEP,TOKEN,CONTEXT, in seconds."""
    costs = [float(part) for part in text.split(",")]
    if len(costs) != 3 or not all(0 <= cost < math.inf for cost in costs) or costs[0] == 0:
        raise ValueError(f"must be three numbers of seconds, the first above 0, got {text}")
    return CostModel(*costs)


# name -> its parser, its default, its help text, and its format in a table's row label
SETTINGS: dict[str, tuple[Callable[[str], Any], Any, str, str]] = {
    "scheduler_cls": (lambda x: find_policy(x) and x, "fcfs", f"{', '.join(POLICIES)} or module:Class", "{}"),
    "rate": (positive, 30.0, "requests, or new sessions, a second", "{:g}/s"),
    "max_num_batched_tokens": (at_least(1), 1024, "token budget of a step", "budget {}"),
    "long_prefill_token_threshold": (at_least(0), 0, "of a sequence in a step; 0: all", "chunks of {}"),
    "num_kv_blocks": (at_least(1), 2048, "blocks of the KV cache", "{} blocks"),
    "block_size": (at_least(1), 32, "tokens of a block", "blocks of {}"),
    "max_num_seqs": (at_least(1), 256, "sequences that hold blocks at a time", "{} sequences"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the options before anything runs."""
    parser = FlexibleArgumentParser("nanoengine lab", description=__doc__)
    one = parser.add_argument_group("the scheduler: one value each, or several with commas between")
    for name, (parse, default, meaning, _) in SETTINGS.items():
        # Equal values are simulated once.
        values = lambda text, parse=parse: list(dict.fromkeys(map(parse, text.split(","))))  # noqa: E731
        option, about = f"--{name.replace('_', '-')}", f"{meaning}; default: {default}"
        one.add_argument(option, type=argparse_type(values), default=[default], help=about)
    one.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    load, lengths = parser.add_argument_group("the requests"), argparse_type(parse_lengths)
    load.add_argument("--trace", metavar="FILE.jsonl", help="your own arrivals, or one of Mooncake's traces")
    load.add_argument("--agent-sessions", type=at_least(1), metavar="N", help="agents' conversations")
    load.add_argument("--length-factor", type=positive, default=1.0, help="of the lengths in these")
    load.add_argument("--num-requests", type=at_least(1), default=1000)
    load.add_argument("--burstiness", type=positive, default=1.0, help="1: Poisson; less: in bursts")
    load.add_argument("--prompt", type=lengths, default="100~1", help="N, LOW-HIGH or MEDIAN~SIGMA")
    load.add_argument("--output", type=lengths, default="60~0.7", help="N, LOW-HIGH or MEDIAN~SIGMA")
    load.add_argument("--num-prefixes", type=at_least(0), default=0, help="prompts begin with one of them")
    load.add_argument("--num-prefix-tokens", type=at_least(1), default=64, help="length of each prefix")
    load.add_argument("--seed", type=int, default=0)
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--cost", type=parse_costs, default=DEMO_COSTS, metavar="STEP,TOKEN,CONTEXT")
    costs.add_argument("--fit", metavar="MODEL", help="the costs of this model on this machine")
    parser.add_argument("--fit-seconds", type=positive, default=20.0, help="how long to measure steps")
    parser.add_argument("--ttft-limit", type=positive, default=1.0, help="seconds, for goodput")
    parser.add_argument("--itl-limit", type=positive, default=0.1, help="seconds, for goodput")
    parser.add_argument("--plot", metavar="FILE.png", help="write a figure; needs matplotlib")
    args: argparse.Namespace = parser.parse_args(arguments)
    args.error = parser.error
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'nanoengine[lab]'")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Run the command `nanoengine lab`."""
    args = parse_arguments(arguments)
    try:
        compare(args)
    except (OSError, TypeError, ValueError) as error:  # a bad model, request or file
        args.error(str(error))


def compare(args: argparse.Namespace) -> None:
    """Simulate every combination of the settings, and print a table with one row for each."""
    cost, limits, trace = args.cost, (args.ttft_limit, args.itl_limit), None
    if args.trace:
        trace, args.rate = read_arrivals(args.trace), ["as in the file"]
    if args.plot:
        open(args.plot, "ab").close()  # now, in case the file cannot be written
    if args.fit:
        engine = LLMEngine(EngineConfig(model=args.fit, async_scheduling=False))
        cost, steps, others, measured, simulated = calibrate(engine, args.fit_seconds)
        engine.close()
        print(f"fitted to {len(steps)} steps: --cost {','.join(f'{one:.3g}' for one in cost)}")
        print(f"off by {cost.error(others):.1%} a step on average, over {len(others)} other steps")
        both = {"measured": measured, "the lab": simulated}
        print_table("requests that the fit did not see", both, *limits)
    varied = [name for name in SETTINGS if len(getattr(args, name)) > 1]
    reports: dict[str, Report] = {}
    for values in itertools.product(*(getattr(args, name) for name in SETTINGS)):
        setup = dict(zip(SETTINGS, values, strict=True))
        arrivals: Any = trace
        if args.agent_sessions:
            arrivals = agent_sessions(args.agent_sessions, setup["rate"], args.length_factor, args.seed)
        elif trace is None:
            names = "burstiness", "num_prefixes", "num_prefix_tokens", "seed"
            given = args.num_requests, setup["rate"], args.prompt, args.output
            arrivals = generate_arrivals(*given, **{name: getattr(args, name) for name in names})
        caching = args.enable_prefix_caching
        blocks = BlockManager(setup["num_kv_blocks"], setup["block_size"], enable_prefix_caching=caching)
        sizes = "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"
        scheduler = find_policy(setup["scheduler_cls"])(blocks, **{name: setup[name] for name in sizes})
        name = ", ".join(SETTINGS[name][3].format(setup[name]) for name in varied) or "the lab"
        start, progress = time.perf_counter(), tqdm(arrivals, name, leave=False, disable=None)
        reports[name] = report = simulate(scheduler, progress, cost)
        took = f"{report.seconds:.0f} s simulated in {time.perf_counter() - start:.1f} s"
        print(f"{name}: {len(report.ttft)} requests, {report.num_steps} steps, {took}", file=sys.stderr)
    costs = f"{cost.step:g} s + {cost.token:g} s a token + {cost.context:g} s a token attended to"
    print_table(f"steps of {costs}", reports, *limits)
    if args.plot:
        draw(reports, args.plot)
