"""The scheduler lab: the engine's own Scheduler and BlockManager, with a cost model in place of a device.

nanoengine lab                                # 1000 requests at random times, a table
nanoengine lab --max-num-batched-tokens 128,512,2048 --rate 5,10
nanoengine lab --scheduling-policy fcfs,shortest,ageing:0.05 --prompt 100~1.5
nanoengine lab --trace arrivals.jsonl --num-kv-blocks 500,1000,2000 --plot lab.png
nanoengine lab --fit path/to/model            # the costs of a model on this machine

Settings may be given several values, separated by commas. Every combination of them serves the same
arrivals. Only the scheduler's own Python takes real time, so hours of load pass in minutes.

A step takes `step + token * tokens + context * contexts` seconds: a fixed cost, a cost for each token it
computes, and a cost for each token that its sequences attend to (the lengths they have reached). `--fit`
fits the three costs by least squares to the steps of a real engine under many loads. Then it serves other
arrivals with both the engine and the lab, and prints how far the lab is off. The error is large if other
processes use the machine too. The model leaves out sampling settings, text, and the overlap of async
scheduling, which decides each step one step ahead.

A policy is a function from an `Arrival` to its priority. The lower priority runs first, and among equals the
earlier arrival. Both queues of the scheduler are sorted by priority, so a policy needs nothing else, and the
core knows nothing of policies: pass the result to `LLMEngine.add_request` as `priority`. Ageing fits too. A
request with n tokens that has waited for t seconds has the value `ageing * n - t`, and the lowest value runs
first. t grows at the same rate for all requests, so their order never changes, and can be computed once from
the time of arrival. Rules whose order changes while requests wait, such as fair shares per user, do not fit.
In Python, pass a policy to `lab.simulate`.

An arrivals file has one JSON object per line, with the fields of `Arrival`:

    {"arrival_time": 0.25, "num_prompt_tokens": 300, "num_output_tokens": 40, "priority": 1}
    {"arrival_time": 1, "num_prompt_tokens": 9, "num_output_tokens": 9, "prefix": "a", "num_prefix_tokens": 5}
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

from nanoengine.assembly import find_scheduler
from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager
from nanoengine.flags import FlexibleArgumentParser, argparse_type
from nanoengine.lab.simulation import (
    DEMO_COSTS,
    CostModel,
    Report,
    calibrate,
    generate_arrivals,
    parse_lengths,
    parse_policy,
    read_arrivals,
    simulate,
)
from nanoengine.llm_engine import LLMEngine


def cells(report: Report) -> dict[str, str]:
    """Return the cells of a report's table row, by column label."""

    def text(name: str, scale: float, form: str) -> str:
        return " / ".join(format(value * scale, form) for value in report.quantiles(name))

    return {
        "TTFT p50 / p90 / p99, s": text("ttft", 1, ".2f"),
        "TPOT, ms": text("tpot", 1e3, ".1f"),
        "ITL, ms": text("itl", 1e3, ".1f"),
        "longest TTFT, s": f"{report.ttft.max():.1f}",
        "preemptions": str(report.num_preemptions),
        "hits": f"{report.hit_rate:.0%}",
        "tokens a step": f"{report.num_output_tokens / report.num_steps:.1f}",
        "output tokens/s": f"{report.output_tokens_per_s:.0f}",
        "busy": f"{report.busy_seconds / report.seconds:.0%}",
    }


def print_table(title: str, reports: dict[str, Report]) -> None:
    """Print a Markdown table with one row per setup."""
    head = {"": "", **cells(next(iter(reports.values())))}
    rows = [list(head), *([name, *cells(report).values()] for name, report in reports.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n", *(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows), sep="\n")


def draw(reports: dict[str, Report], path: str) -> None:
    """Plot the distributions of the time to first token and of the time per token after it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    shares = np.linspace(0, 1, 1001)
    labels = "time to first token, ms", "time per token after the first, ms"
    for axis, name, label in zip(axes, ("ttft", "tpot"), labels, strict=True):
        for setup, report in reports.items():
            if not np.isnan(seconds := getattr(report, name)).all():
                axis.plot(np.nanquantile(seconds, shares) * 1e3, shares, label=setup)
        axis.set(xlabel=label, ylabel="share of the requests", xscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def at_least(low: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least `low`."""

    def parse(text: str) -> int:
        if int(text) < low:
            raise ValueError(f"must be at least {low}, got {text}")
        return int(text)

    return argparse_type(parse)


@argparse_type
def positive(text: str) -> float:
    """Parse a finite number above zero."""
    if not 0 < float(text) < math.inf:
        raise ValueError(f"must be above 0, got {text}")
    return float(text)


@argparse_type
def parse_costs(text: str) -> CostModel:
    """Parse STEP,TOKEN,CONTEXT, in seconds."""
    costs = [float(part) for part in text.split(",")]
    if len(costs) != 3 or not all(0 <= cost < math.inf for cost in costs) or costs[0] == 0:
        raise ValueError(f"must be three numbers of seconds, the first above 0, got {text}")
    return CostModel(*costs)


def name_of(find: Callable[[str], Any]) -> Callable[[str], str]:
    """Return a parser of names that `find` knows."""
    return argparse_type(lambda text: (find(text), text)[1])


POLICY, SCHEDULER = name_of(parse_policy), name_of(find_scheduler)
# name -> its parser, its default, its help text, and its format in a table's row label
SETTINGS: dict[str, tuple[Callable[[str], Any], Any, str, str]] = {
    "rate": (positive, 30.0, "requests a second", "{:g}/s"),
    "scheduling_policy": (
        name_of(parse_policy),
        "fcfs",
        "fcfs, priority, shortest, ageing:SECONDS_PER_TOKEN",
        "{}",
    ),
    "scheduler_cls": (
        name_of(find_scheduler),
        "nanoengine.engine:Scheduler",
        "module:Class, a `Scheduler`",
        "{}",
    ),
    "max_num_batched_tokens": (at_least(1), 1024, "token budget of a step", "budget {}"),
    "long_prefill_token_threshold": (at_least(0), 0, "of a sequence in a step; 0: no limit", "chunks of {}"),
    "num_kv_blocks": (at_least(1), 2048, "blocks of the KV cache", "{} blocks"),
    "block_size": (at_least(1), 32, "tokens of a block", "blocks of {}"),
    "max_num_seqs": (at_least(1), 256, "sequences that hold blocks at a time", "{} sequences"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the options before anything runs."""
    parser = FlexibleArgumentParser(
        "nanoengine lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    one = parser.add_argument_group("the scheduler: one value each, or several with commas between")
    for name, (parse, default, meaning, _) in SETTINGS.items():
        # Equal values are simulated once.
        values = lambda text, parse=parse: list(dict.fromkeys(map(parse, text.split(","))))  # noqa: E731
        option, about = f"--{name.replace('_', '-')}", f"{meaning}; default: {default}"
        one.add_argument(option, type=argparse_type(values), default=[default], help=about)
    one.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    load, lengths = parser.add_argument_group("the requests"), argparse_type(parse_lengths)
    load.add_argument("--trace", metavar="FILE.jsonl", help="your own arrivals, instead of random ones")
    load.add_argument("--num-requests", type=at_least(1), default=1000)
    load.add_argument("--burstiness", type=positive, default=1.0, help="1: Poisson; less: in bursts")
    load.add_argument("--prompt", type=lengths, default="100~1", help="N, LOW-HIGH or MEDIAN~SIGMA")
    load.add_argument("--output", type=lengths, default="60~0.7", help="N, LOW-HIGH or MEDIAN~SIGMA")
    load.add_argument("--num-prefixes", type=at_least(0), default=0, help="prompts begin with one of them")
    load.add_argument("--num-prefix-tokens", type=at_least(1), default=64, help="length of each prefix")
    load.add_argument("--seed", type=int, default=0)
    costs, demo = parser.add_mutually_exclusive_group(), "seconds; default: the bundled model's on two cores"
    costs.add_argument(
        "--cost", type=parse_costs, default=DEMO_COSTS, metavar="STEP,TOKEN,CONTEXT", help=demo
    )
    costs.add_argument("--fit", metavar="MODEL", help="the costs of this model on this machine")
    parser.add_argument("--fit-seconds", type=positive, default=20.0, help="how long to measure steps")
    parser.add_argument("--plot", metavar="FILE.png", help="write a figure; needs matplotlib")
    args: argparse.Namespace = parser.parse_args(arguments)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'nanoengine[lab]'")
    args.error = parser.error
    try:
        args.arrivals = read_arrivals(args.trace) if args.trace else None
        if args.plot:
            open(args.plot, "ab").close()  # now, in case the file cannot be written
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.trace:
        args.rate = ["as in the file"]
    return args


def fit(model: str, seconds: float) -> CostModel:
    """Return a model's costs on this machine. Print them, and how far the lab is off with them."""
    engine = LLMEngine(EngineConfig(model=model, async_scheduling=False))
    found = calibrate(engine, seconds)
    engine.close()
    print(f"fitted to {found.num_steps} steps: --cost {','.join(f'{cost:.3g}' for cost in found.cost)}")
    print(f"off by {found.step_error:.1%} a step on average, over {found.measured.num_steps} other steps")
    print_table("requests that the fit did not see", {"measured": found.measured, "the lab": found.simulated})
    return found.cost


def main(arguments: list[str] | None = None) -> None:
    """Run the command `nanoengine lab`."""
    args = parse_arguments(arguments)
    try:
        compare(args)
    except (OSError, TypeError, ValueError) as error:  # a bad model, request or file
        args.error(str(error))


def compare(args: argparse.Namespace) -> None:
    """Simulate every combination of the settings, and print a table with one row for each."""
    cost = fit(args.fit, args.fit_seconds) if args.fit else args.cost
    varied = [name for name in SETTINGS if len(getattr(args, name)) > 1]
    reports: dict[str, Report] = {}
    for values in itertools.product(*(getattr(args, name) for name in SETTINGS)):
        setup = dict(zip(SETTINGS, values, strict=True))
        shared = {name: getattr(args, name) for name in ("num_prefixes", "num_prefix_tokens", "seed")}
        arrivals = args.arrivals or generate_arrivals(
            *(args.num_requests, setup["rate"], args.prompt, args.output),
            burstiness=args.burstiness,
            **shared,
        )
        blocks = BlockManager(
            setup["num_kv_blocks"], setup["block_size"], enable_prefix_caching=args.enable_prefix_caching
        )
        limits = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
        scheduler = find_scheduler(setup["scheduler_cls"])(blocks, **{name: setup[name] for name in limits})
        name = ", ".join(SETTINGS[name][3].format(setup[name]) for name in varied) or "the lab"
        total = len(args.arrivals) if args.arrivals else args.num_requests
        progress = tqdm(arrivals, name, total, leave=False, disable=None)
        start = time.perf_counter()
        try:
            reports[name] = simulate(scheduler, progress, cost, parse_policy(setup["scheduling_policy"]))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        took, report = time.perf_counter() - start, reports[name]
        print(
            f"{name}: {report.num_requests} requests, {report.num_steps} steps, "
            f"{report.seconds:.0f} s simulated in {took:.1f} s",
            file=sys.stderr,
        )
    costs = f"{cost.step:g} s + {cost.token:g} s a token + {cost.context:g} s a token attended to"
    print_table(f"steps of {costs}", reports)
    if args.plot:
        draw(reports, args.plot)
