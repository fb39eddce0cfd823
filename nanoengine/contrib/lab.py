"""The scheduler lab: the engine's own Scheduler and BlockManager, with a cost model in place of a device.

nanoengine lab                                # 1000 requests at random times, a table
nanoengine lab --max-num-batched-tokens 128,512,2048 --rate 5,10
nanoengine lab --scheduling-policy fcfs,shortest,ageing:0.05 --prompt 100~1.5
nanoengine lab --trace arrivals.jsonl --num-kv-blocks 500,1000,2000 --plot lab.png
nanoengine lab --fit path/to/model            # the costs of a model on this machine

Every combination of the settings that are given several values, separated by commas, serves the same
arrivals. All that takes time is the scheduler's own Python, so that hours pass in minutes.

A step takes `step + token * tokens + context * contexts` seconds: a fixed part, a part for each token it
computes, and one for each token that its sequences attend to, the lengths they have reached. `--fit` finds
the three by least squares from the steps of a real engine under many loads. Then it serves other arrivals
with both, the engine and the lab, and says how far the lab is off; that is far where the machine is busy
with other things too. What the model leaves out: sampling settings, text, and the overlap of async
scheduling, whose steps are decided a step ahead.

A policy is a function from an `Arrival` to its priority; the lower runs first, and of equals the one that
came first. That is all a policy needs, since both queues of the scheduler are sorted by priority, and it is
why the core knows nothing of policies: what it returns can be given to `LLMEngine.add_request` as `priority`.
Ageing fits too. A request that has waited for t seconds and has n tokens is worth `ageing * n - t`, the
least first; t grows alike for all, so the order never changes and can be computed once, from the time of
arrival. What does not fit is a rule whose order changes while requests wait, such as fair shares per user.

    simulate(scheduler, arrivals, cost, policy=lambda arrival: -arrival.num_output_tokens)

A file of arrivals has a JSON object per line, with the fields of `Arrival`:

    {"arrival_time": 0.25, "num_prompt_tokens": 300, "num_output_tokens": 40, "priority": 1}
    {"arrival_time": 1, "num_prompt_tokens": 9, "num_output_tokens": 9, "prefix": "a", "num_prefix_tokens": 5}
"""

import argparse
import importlib.util
import itertools
import json
import math
import random
import re
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager, ScheduledBatch, Scheduler, Sequence
from nanoengine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams

# ---- Arrivals: who asks for what, and when -------------------------------------------------------


class Arrival(NamedTuple):
    """A request: its time and its lengths. Of what it says only the shared beginning matters."""

    arrival_time: float  # seconds from the start
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: str | None = None  # prompts with the same one begin with the same tokens
    num_prefix_tokens: int = 0  # how many of its prompt tokens are of the prefix
    priority: int = 0  # for the policy of that name

    def check(self) -> None:
        """Raise ValueError or TypeError where no such request can be."""
        for name in ("num_prompt_tokens", "num_output_tokens", "num_prefix_tokens", "priority"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if not isinstance(self.arrival_time, (int, float)) or not 0 <= self.arrival_time < math.inf:
            raise ValueError(f"arrival_time must be seconds from the start, got {self.arrival_time!r}")
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError("num_prompt_tokens and num_output_tokens must be at least 1")
        if not 0 <= self.num_prefix_tokens <= self.num_prompt_tokens:
            raise ValueError(f"num_prefix_tokens must be part of the prompt, got {self.num_prefix_tokens}")
        if self.num_prefix_tokens and self.prefix is None:
            raise ValueError("num_prefix_tokens says nothing without a prefix")


Lengths = Callable[[random.Random], int]  # draws a number of tokens


def parse_lengths(text: str) -> Lengths:
    """A length, LOW-HIGH for each length alike, or MEDIAN~SIGMA for a long tail.

    The last is log-normal, cut at three sigmas: of "100~1" two thirds lie from 37 to 272, none above 2009.

    >>> parse_lengths("40")(random.Random(0)), parse_lengths("16-64")(random.Random(0))
    (40, 40)

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+)|~(\d*\.?\d+))?", text)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"lengths are N, LOW-HIGH or MEDIAN~SIGMA, from 1 on, got {text!r}")
    low, high = int(match[1]), int(match[2] or match[1])
    if match[3] is not None:
        sigma = float(match[3])
        return lambda rng: max(1, round(low * np.exp(sigma * min(3.0, rng.gauss()))))
    if high < low:
        raise ValueError(f"LOW-HIGH must be in that order, got {text!r}")
    return lambda rng: rng.randint(low, high)


def generate_arrivals(
    num_requests: int,
    rate: float,
    prompt: Lengths,
    output: Lengths,
    *,
    burstiness: float = 1.0,
    num_prefixes: int = 0,
    num_prefix_tokens: int = 0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Requests at random times, `rate` a second on average.

    Args:
        num_requests: how many.
        rate: requests a second.
        prompt: tokens of each prompt's own.
        output: tokens of each output.
        burstiness: the shape of the gamma distribution that gaps are drawn from: 1 is a Poisson process,
            less comes in bursts, more is steadier. The variance of a gap is 1 / burstiness of Poisson's.
        num_prefixes: how many shared beginnings there are; each prompt begins with one of them.
        num_prefix_tokens: how long they are.
        seed: the same for the same requests.

    Source: `--burstiness` of vLLM's `bench serve`.
    """
    rng, now = random.Random(seed), 0.0
    for _ in range(num_requests):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        prefix = str(rng.randrange(num_prefixes)) if num_prefixes else None
        shared = num_prefix_tokens if num_prefixes else 0
        yield Arrival(now, shared + prompt(rng), output(rng), prefix, shared)


def read_arrivals(path: str) -> list[Arrival]:
    """A JSONL file's requests, in order of time.

    Raises:
        ValueError: a line is not an `Arrival`; the message has its number.
        OSError: the file cannot be read.
    """
    arrivals = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                arrival = Arrival(**json.loads(line))
                arrival.check()
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.arrival_time)


# ---- Policies: who goes first --------------------------------------------------------------------

Policy = Callable[[Arrival], int]  # a request's priority: the lower runs first


def fcfs(arrival: Arrival) -> int:
    """First come, first served."""
    return 0


def priority(arrival: Arrival) -> int:
    """What the request says."""
    return arrival.priority


def shortest_first(arrival: Arrival) -> int:
    """The shortest prompt first. Under load the longest never run."""
    return arrival.num_prompt_tokens


def shortest_first_with_ageing(seconds_per_token: float) -> Policy:
    """The shortest first, but each token of a prompt is worth that many seconds of waiting, and no more."""
    # Priorities are whole numbers: microseconds.
    return lambda arrival: round(1e6 * (arrival.arrival_time + seconds_per_token * arrival.num_prompt_tokens))


def parse_policy(text: str) -> Policy:
    """A policy by name: fcfs, priority, shortest, or ageing:SECONDS_PER_TOKEN.

    Raises:
        ValueError: there is none of that name.
    """
    known = {"fcfs": fcfs, "priority": priority, "shortest": shortest_first}
    if match := re.fullmatch(r"ageing:(\d*\.?\d+)", text):
        return shortest_first_with_ageing(float(match[1]))
    if text not in known:
        raise ValueError(f"policies are fcfs, priority, shortest and ageing:SECONDS_PER_TOKEN, got {text!r}")
    return known[text]


# ---- Costs: how long a step takes ----------------------------------------------------------------


class Step(NamedTuple):
    """What one step was: a row to fit the cost model to."""

    num_tokens: int  # computed
    num_context_tokens: int  # attended to: the lengths that the step's sequences reached, together
    seconds: float


def context_of(batch: ScheduledBatch) -> int:
    """How many tokens' K and V a step reads, counted once for each of its sequences."""
    return sum([end for _, _, end, _, _ in batch.chunks])


class CostModel(NamedTuple):
    """Seconds that a step takes."""

    step: float  # fixed: weights read, kernels launched, Python run
    token: float  # for each one computed
    context: float  # for each one attended to

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Of one step."""
        return self.step + self.token * num_tokens + self.context * num_context_tokens

    def error(self, steps: Iterable[Step]) -> float:
        """Mean error over real steps, each relative to what it took."""
        return float(np.mean([abs(self.seconds(*row) / seconds - 1) for *row, seconds in steps]))


def fit_costs(steps: Iterable[Step]) -> CostModel:
    """The costs that come nearest to real steps: least squares of the relative errors, none below zero.

    Relative, since else the few longest steps, and those that other processes disturbed, decide.
    """
    num_tokens, num_context_tokens, seconds = np.array(list(steps), dtype=np.float64).T
    table = np.stack([np.ones_like(seconds), num_tokens, num_context_tokens], axis=1) / seconds[:, None]
    costs, kept = np.full(3, -1.0), [0, 1, 2]
    while (costs < 0).any():  # what would be negative is left out, and the others fitted anew
        costs = np.zeros(3)
        costs[kept] = np.linalg.lstsq(table[:, kept], np.ones_like(seconds), rcond=None)[0]
        kept = [i for i in kept if costs[i] > 0]
    return CostModel(*costs.tolist())


# ---- What serves: a simulation, or a real engine with the same face ------------------------------


class Served(NamedTuple):
    """What a step did."""

    seconds: float
    seq_ids: list[int]  # of the sequences that got a token
    finished: list[int]  # those of them that are complete


class Server(Protocol):
    """What `serve` asks of both."""

    scheduler: Scheduler

    def add(self, arrival: Arrival, prefix: int, priority: int) -> int:
        """Queue a request, whose prefix has that negative number; returns its seq_id."""

    def step(self) -> Served:
        """Compute a step."""


class Simulation:
    """The real scheduler and block manager; steps take as long as the cost model says."""

    def __init__(self, scheduler: Scheduler, cost: CostModel) -> None:
        self.scheduler, self.cost = scheduler, cost
        self.seq_ids = itertools.count()
        self.params: dict[int, SamplingParams] = {}  # by output tokens

    def add(self, arrival: Arrival, prefix: int, priority: int) -> int:
        """Queue a sequence. Its tokens are its prefix's number, again and again, then its own."""
        seq_id, num_shared = next(self.seq_ids), arrival.num_prefix_tokens
        token_ids = [prefix] * num_shared + [seq_id] * (arrival.num_prompt_tokens - num_shared)
        max_tokens = arrival.num_output_tokens
        if max_tokens not in self.params:
            self.params[max_tokens] = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(Sequence(seq_id, token_ids, self.params[max_tokens], priority=priority))
        return seq_id

    def step(self) -> Served:
        """Schedule a step, and draw each sequence's last token again.

        So an answer to a prompt that is all prefix continues the prefix: the next turn of a conversation
        finds both in the cache.
        """
        batch = self.scheduler.schedule()
        advanced = self.scheduler.update(batch, [seq.token_ids[-1] for seq in batch.sampled_seqs])
        return Served(
            self.cost.seconds(batch.num_tokens, context_of(batch)),
            [seq.seq_id for seq in advanced],
            [seq.seq_id for seq in advanced if seq.finish_reason is not None],
        )


class RealEngine:
    """A new engine, without async scheduling, whose steps take as long as they take."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.vocabulary = range(engine.checkpoint.vocab_size)
        self.seq_ids = itertools.count()  # the engine counts alike
        self.steps: list[Step] = []
        schedule, update = self.scheduler.schedule, self.scheduler.update

        def watched_schedule() -> ScheduledBatch:
            self.batch = schedule()
            return self.batch

        def watched_update(batch: ScheduledBatch, token_ids: list[int | None]) -> list[Sequence]:
            self.advanced = update(batch, token_ids)
            return self.advanced

        self.scheduler.schedule = watched_schedule  # type: ignore[method-assign]
        self.scheduler.update = watched_update  # type: ignore[method-assign]

    def add(self, arrival: Arrival, prefix: int, priority: int) -> int:
        """Queue a request of random tokens, seeded by what they stand for."""
        seq_id, num_shared = next(self.seq_ids), arrival.num_prefix_tokens
        token_ids = []
        for content, num_tokens in ((prefix, num_shared), (seq_id, arrival.num_prompt_tokens - num_shared)):
            rng = random.Random(str(content))  # as text: of a number the sign would not count
            token_ids += rng.choices(self.vocabulary, k=num_tokens)
        params = SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True)
        self.engine.add_request(str(seq_id), {"prompt_token_ids": token_ids}, params, priority=priority)
        return seq_id

    def step(self) -> Served:
        """Run one."""
        start = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - start
        self.steps.append(Step(self.batch.num_tokens, context_of(self.batch), seconds))
        finished = [seq.seq_id for seq in self.advanced if seq.is_finished]
        return Served(seconds, [seq.seq_id for seq in self.advanced], finished)


# ---- The run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """How requests were served: float64 seconds, one per request, in the order of arrival."""

    ttft: np.ndarray  # time to first token, from arrival
    tpot: np.ndarray  # time per output token after the first; NaN where there is no other
    latency: np.ndarray  # from arrival to the last token
    gaps: np.ndarray  # between a token and the next: all lengths that occurred, to four digits
    gap_counts: np.ndarray  # how many tokens waited that long
    seconds: float  # from the first arrival to the last token
    busy_seconds: float  # in steps
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    hit_rate: float  # share of the prompts' tokens that the prefix cache had

    @property
    def num_requests(self) -> int:
        """How many were served: all of them."""
        return len(self.ttft)

    def quantiles(self, name: str) -> list[float]:
        """The 50th, 90th and 99th percentile of a field, or of the gaps; NaN where there is nothing."""
        values, weights = (self.gaps, self.gap_counts) if name == "itl" else (getattr(self, name), None)
        if weights is None:
            values = values[~np.isnan(values)]
        if not len(values):
            return [math.nan] * 3
        quantiles = np.quantile(values, (0.5, 0.9, 0.99), weights=weights, method="inverted_cdf")
        return [float(value) for value in quantiles]

    @property
    def output_tokens_per_s(self) -> float:
        """Throughput."""
        return self.num_output_tokens / self.seconds


def serve(server: Server, arrivals: Iterable[Arrival], policy: Policy = fcfs) -> Report:
    """Serve arrivals, which come in order of time, to the end of the last.

    The clock only stands at the ends of steps, and where nobody is served it leaps to the next arrival.
    What arrives during a step is queued at its end, as where one thread runs the engine.

    Raises:
        ValueError: a request could never be served.
    """
    scheduler = server.scheduler
    hits_before, preemptions_before = scheduler.block_manager.num_query_hits, scheduler.num_preemptions
    queries_before = scheduler.block_manager.num_query_tokens
    prefixes: dict[str | None, int] = {}
    unfinished: dict[int, tuple[int, Arrival]] = {}  # by seq_id, with the place in the order of arrival
    # When each got its first and its latest token.
    first_times: dict[int, float] = {}
    token_times: dict[int, float] = {}
    ttft, tpot, latency = array("d"), array("d"), array("d")
    gaps: Counter[float] = Counter()
    num_steps = num_prompt_tokens = num_output_tokens = 0
    busy_seconds = 0.0
    upcoming = iter(arrivals)
    arrival = next(upcoming, None)
    start = now = arrival.arrival_time if arrival else 0.0
    while unfinished or arrival is not None:
        if arrival is not None and not unfinished:
            now = max(now, arrival.arrival_time)
        while arrival is not None and arrival.arrival_time <= now:
            num_tokens = arrival.num_prompt_tokens, arrival.num_output_tokens
            if sum(num_tokens) > scheduler.max_num_tokens:
                raise ValueError(
                    f"a request of {num_tokens[0]} and {num_tokens[1]} tokens would be cut short: "
                    f"the KV cache and max_model_len leave room for {scheduler.max_num_tokens}"
                )
            prefix = prefixes.setdefault(arrival.prefix, -1 - len(prefixes))
            unfinished[server.add(arrival, prefix, policy(arrival))] = len(ttft), arrival
            for seconds_of in (ttft, tpot, latency):
                seconds_of.append(math.nan)
            num_prompt_tokens += arrival.num_prompt_tokens
            arrival = next(upcoming, None)

        seconds, took, finished = server.step()
        now += seconds
        busy_seconds += seconds
        num_steps += 1
        num_output_tokens += len(took)
        waits: dict[float, int] = {}  # nearly all alike: who got a token a step ago waited a step
        for took_id in took:
            before = token_times.get(took_id)
            if before is None:
                first_times[took_id] = now
            else:
                waits[now - before] = waits.get(now - before, 0) + 1
            token_times[took_id] = now
        for wait, count in waits.items():
            gaps[float(f"{wait:.4g}")] += count  # else a long run would keep a length for each step
        for ended in finished:
            (place, request), first = unfinished.pop(ended), first_times.pop(ended)
            del token_times[ended]
            ttft[place] = first - request.arrival_time
            latency[place] = now - request.arrival_time
            if request.num_output_tokens > 1:
                tpot[place] = (now - first) / (request.num_output_tokens - 1)

    manager = scheduler.block_manager
    num_queries = manager.num_query_tokens - queries_before
    return Report(
        ttft=np.array(ttft),
        tpot=np.array(tpot),
        latency=np.array(latency),
        gaps=np.array(list(gaps)),
        gap_counts=np.array(list(gaps.values())),
        seconds=now - start,
        busy_seconds=busy_seconds,
        num_steps=num_steps,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_preemptions=scheduler.num_preemptions - preemptions_before,
        hit_rate=(manager.num_query_hits - hits_before) / max(1, num_queries),
    )


def simulate(
    scheduler: Scheduler, arrivals: Iterable[Arrival], cost: CostModel, policy: Policy = fcfs
) -> Report:
    """Serve arrivals with a scheduler that nobody else uses, and no device."""
    return serve(Simulation(scheduler, cost), arrivals, policy)


# ---- The fit -------------------------------------------------------------------------------------

# The bundled model's on two cores of an AMD EPYC, in float32, fitted to 1566 steps. On 547 others they are
# off by 16 % a step, and by 3 % of the time of all together.
DEMO_COSTS = CostModel(2.3e-3, 3.6e-5, 5e-7)
WAVES = (8, 64, 1, 4, 32, 2, 128, 16)  # requests at a time: the batch shrinks from there as they end


class Calibration(NamedTuple):
    """Costs fitted to an engine's steps, and both at work on other arrivals."""

    cost: CostModel
    num_steps: int  # fitted to
    step_error: float  # mean relative error over the other steps
    measured: Report
    simulated: Report


def calibrate(engine: LLMEngine, seconds: float = 20.0) -> Calibration:
    """Fit the costs of an engine's steps, and check them where it serves other arrivals.

    The fit sees requests that come in waves; the check is a Poisson process at 70 % of the rate that the lab
    thinks the engine can serve. Each takes about so many seconds. Idle time is leapt over in both.
    """
    scheduler = engine.scheduler
    longest = engine.max_model_len // 3
    real = RealEngine(engine)

    def load(num_requests: int, rate: float, prompt: str, output: str, seed: int) -> list[Arrival]:
        lengths = parse_lengths(prompt), parse_lengths(output)
        drawn = generate_arrivals(num_requests, rate, *lengths, seed=seed)
        return [
            Arrival(when, min(prompt_len, longest), min(output_len, longest))
            for when, prompt_len, output_len, *_ in drawn
        ]

    def run(arrivals: list[Arrival]) -> Report:
        real.steps.clear()
        return serve(real, arrivals)

    def rehearse(arrivals: list[Arrival]) -> Report:
        blocks = BlockManager(
            engine.started.num_blocks,
            engine.runner.block_size,
            enable_prefix_caching=engine.config.enable_prefix_caching,
        )
        twin = Scheduler(
            blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            long_prefill_token_threshold=engine.config.long_prefill_token_threshold,
        )
        return simulate(twin, arrivals, cost)

    run(load(8, 1e6, "64", "8", seed=0))  # a warm-up
    steps: list[Step] = []
    waves = itertools.cycle(WAVES)
    while sum(step.seconds for step in steps) < seconds:
        run(load(next(waves), 1e6, "100~1", "40~0.8", seed=len(steps)))
        steps += real.steps
    cost = fit_costs(steps)

    all_at_once = rehearse(load(200, 1e6, "60-180", "20-100", seed=-1))
    rate = 0.7 * 200 / all_at_once.seconds
    arrivals = load(max(10, int(rate * seconds)), rate, "60-180", "20-100", seed=-2)
    measured = run(arrivals)
    return Calibration(cost, len(steps), cost.error(real.steps), measured, rehearse(arrivals))


# ---- The command line ----------------------------------------------------------------------------


def cells(report: Report) -> dict[str, str]:
    """A report as text, by label."""

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


def print_table(title: str, reports: dict[str, Report], markdown: bool = False) -> None:
    """A row per setup."""
    rows = [[name, *cells(report).values()] for name, report in reports.items()]
    labels = ["", *cells(next(iter(reports.values())))]
    if markdown:
        print("", *(f"| {' | '.join(row)} |" for row in (labels, ["---"] * len(labels), *rows)), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*labels, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False).print(table)


def draw(reports: dict[str, Report], path: str) -> None:
    """Who waited how long for the first token and per token, and a bar per setup of what else there is."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplot_mosaic(
        "AAABBB;CCDDEE",
        figsize=(13, 5 + 0.3 * len(reports)),
        height_ratios=[4, 0.6 + 0.3 * len(reports)],
        layout="constrained",
    )
    shares = np.linspace(0, 1, 1001)
    for number, (name, report) in enumerate(reports.items()):
        color = f"C{number}"
        for axis, seconds in (("A", report.ttft), ("B", report.tpot)):
            if not np.isnan(seconds).all():
                axes[axis].plot(np.nanquantile(seconds, shares) * 1e3, shares, label=name, color=color)
        bars = (report.num_preemptions, 100 * report.hit_rate, report.output_tokens_per_s)
        for axis, value in zip("CDE", bars, strict=True):
            axes[axis].bar_label(axes[axis].barh(name, value, color=color), fmt="%.0f", padding=3)
    for axis, label in (("A", "time to first token, ms"), ("B", "time per token after the first, ms")):
        axes[axis].set(xlabel=label, ylabel="share of the requests", xscale="log")
        axes[axis].xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes[axis].xaxis.set_major_formatter("{x:g}")
        axes[axis].xaxis.set_minor_formatter(ticker.NullFormatter())
        axes[axis].tick_params(axis="x", labelrotation=45)
        axes[axis].grid(alpha=0.3)
    for axis, label in zip("CDE", ("preemptions", "prefix hits, %", "output tokens/s"), strict=True):
        axes[axis].set_xlabel(label)
        axes[axis].invert_yaxis()  # the first on top
        axes[axis].margins(x=0.2)
        axes[axis].set_xlim(left=0, right=None if axes[axis].dataLim.x1 > 0 else 1)
    for axis in "DE":
        axes[axis].set_yticks([])
    axes["A"].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def told(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same for argparse, which then prints the message of a ValueError."""

    def parse_or_tell(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_or_tell


def several(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """What parses values separated by commas, each once."""
    return told(lambda text: list(dict.fromkeys(map(parse, text.split(",")))))


def at_least(low: int) -> Callable[[str], int]:
    """What parses an integer from there on."""

    def parse(text: str) -> int:
        if int(text) < low:
            raise ValueError(f"at least {low} is needed, got {text}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """A finite number above zero."""
    if not 0 < float(text) < math.inf:
        raise ValueError(f"a number above 0 is needed, got {text}")
    return float(text)


def parse_costs(text: str) -> CostModel:
    """STEP,TOKEN,CONTEXT, in seconds."""
    costs = [float(part) for part in text.split(",")]
    if len(costs) != 3 or not all(0 <= cost < math.inf for cost in costs) or costs[0] == 0:
        raise ValueError(f"three numbers of seconds are needed, the first of them above 0, got {text}")
    return CostModel(*costs)


def named_policy(text: str) -> str:
    """The name of a policy there is."""
    parse_policy(text)
    return text


# name -> how to read it, its default, what it is, and how a table says it
SETTINGS: dict[str, tuple[Callable[[str], Any], Any, str, str]] = {
    "rate": (positive, 30.0, "requests a second", "{:g}/s"),
    "scheduling_policy": (named_policy, "fcfs", "fcfs, priority, shortest, ageing:SECONDS_PER_TOKEN", "{}"),
    "max_num_batched_tokens": (at_least(1), 1024, "token budget of a step", "budget {}"),
    "long_prefill_token_threshold": (
        at_least(0),
        0,
        "most tokens of one sequence in a step; 0: no limit",
        "chunks of {}",
    ),
    "num_kv_blocks": (at_least(1), 2048, "blocks of the KV cache", "{} blocks"),
    "block_size": (at_least(1), 32, "tokens of a block", "blocks of {}"),
    "max_num_seqs": (at_least(1), 256, "sequences that hold blocks at a time", "{} sequences"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, checked before anything runs."""
    parser = argparse.ArgumentParser(
        prog="nanoengine lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one = parser.add_argument_group("what serves: one value each, or several with commas between")
    for name, (parse, default, meaning, _) in SETTINGS.items():
        option = f"--{name.replace('_', '-')}"
        one.add_argument(
            option, type=several(parse), default=[default], help=f"{meaning}; default: {default}"
        )
    one.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    load = parser.add_argument_group("what arrives")
    load.add_argument("--trace", metavar="FILE.jsonl", help="arrivals of your own, instead of random ones")
    load.add_argument("--num-requests", type=told(at_least(1)), default=1000)
    load.add_argument("--burstiness", type=told(positive), default=1.0, help="1: Poisson; less: in bursts")
    load.add_argument(
        "--prompt", type=told(parse_lengths), default="100~1", help="N, LOW-HIGH or MEDIAN~SIGMA"
    )
    load.add_argument(
        "--output", type=told(parse_lengths), default="60~0.7", help="N, LOW-HIGH or MEDIAN~SIGMA"
    )
    load.add_argument(
        "--num-prefixes", type=told(at_least(0)), default=0, help="prompts begin with one of them"
    )
    load.add_argument("--num-prefix-tokens", type=told(at_least(1)), default=64, help="how long they are")
    load.add_argument("--seed", type=int, default=0)
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--cost",
        type=told(parse_costs),
        default=DEMO_COSTS,
        metavar="STEP,TOKEN,CONTEXT",
        help="seconds; default: the bundled model's on two cores",
    )
    costs.add_argument("--fit", metavar="MODEL", help="the costs of this model on this machine")
    parser.add_argument("--fit-seconds", type=told(positive), default=20.0, help="of steps to fit to")
    parser.add_argument("--plot", metavar="FILE.png", help="draw; needs matplotlib")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(arguments)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'nanoengine[bench]'")
    try:
        args.arrivals = read_arrivals(args.trace) if args.trace else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.trace:
        args.rate = ["as in the file"]
    return args


def fit(model: str, seconds: float) -> CostModel:
    """Costs of a model on this machine; prints them, and how far the lab is off with them."""
    try:
        engine = LLMEngine(EngineConfig(model=model, async_scheduling=False))
    except (ValueError, OSError) as error:  # no such model, or none that is served
        raise SystemExit(f"--fit: {error}") from None
    found = calibrate(engine, seconds)
    engine.close()
    print(f"fitted to {found.num_steps} steps: --cost {','.join(f'{cost:.3g}' for cost in found.cost)}")
    print(f"off by {found.step_error:.1%} a step on average, over {found.measured.num_steps} other steps")
    print_table("requests that the fit did not see", {"measured": found.measured, "the lab": found.simulated})
    return found.cost


def main(arguments: list[str] | None = None) -> None:
    """Run every combination of the settings, and print a row for each."""
    from tqdm import tqdm

    args = parse_arguments(arguments)
    cost = fit(args.fit, args.fit_seconds) if args.fit else args.cost
    varied = [name for name in SETTINGS if len(getattr(args, name)) > 1]
    reports: dict[str, Report] = {}
    for values in itertools.product(*(getattr(args, name) for name in SETTINGS)):
        setup = dict(zip(SETTINGS, values, strict=True))
        arrivals = args.arrivals or generate_arrivals(
            args.num_requests,
            setup["rate"],
            args.prompt,
            args.output,
            burstiness=args.burstiness,
            num_prefixes=args.num_prefixes,
            num_prefix_tokens=args.num_prefix_tokens,
            seed=args.seed,
        )
        scheduler = Scheduler(
            BlockManager(
                setup["num_kv_blocks"],
                setup["block_size"],
                enable_prefix_caching=args.enable_prefix_caching,
            ),
            max_num_seqs=setup["max_num_seqs"],
            max_num_batched_tokens=setup["max_num_batched_tokens"],
            long_prefill_token_threshold=setup["long_prefill_token_threshold"],
        )
        name = ", ".join(SETTINGS[name][3].format(setup[name]) for name in varied) or "the lab"
        total = len(args.arrivals) if args.arrivals else args.num_requests
        progress = tqdm(arrivals, name, total, leave=False, disable=None)
        start = time.perf_counter()
        try:
            reports[name] = simulate(scheduler, progress, cost, parse_policy(setup["scheduling_policy"]))
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from None
        took, report = time.perf_counter() - start, reports[name]
        print(
            f"{name}: {report.num_requests} requests, {report.num_steps} steps, "
            f"{report.seconds:.0f} s simulated in {took:.1f} s",
            file=sys.stderr,
        )
    print_table(
        f"steps of {cost.step:g} s + {cost.token:g} s a token + {cost.context:g} s a token attended to",
        reports,
        args.markdown,
    )
    if args.plot:
        draw(reports, args.plot)
