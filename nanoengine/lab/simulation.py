"""The scheduler lab: the engine's own Scheduler and BlockManager, with a cost model in place of a device.

    simulate(scheduler, arrivals, cost, policy=lambda arrival: -arrival.num_output_tokens)

`nanoengine lab` runs the lab from the command line. lab/command.py explains the costs, the policies and the
format of an arrivals file.
"""

import itertools
import json
import math
import random
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanoengine.engine import BlockManager, ScheduledBatch, Scheduler, Sequence
from nanoengine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams

# ---- Arrivals: when requests arrive, and their lengths -------------------------------------------


class Arrival(NamedTuple):
    """Describes a request by its time and lengths. Of its content, only the shared prefix matters."""

    arrival_time: float  # seconds from the start
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: str | None = None  # prompts with the same name begin with the same tokens
    num_prefix_tokens: int = 0  # number of prompt tokens in the prefix
    priority: int = 0  # used by the policy `priority`

    def check(self) -> None:
        """Raise ValueError or TypeError if the request is invalid."""
        for name in ("num_prompt_tokens", "num_output_tokens", "num_prefix_tokens", "priority"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if not isinstance(self.arrival_time, (int, float)) or not 0 <= self.arrival_time < math.inf:
            raise ValueError(f"arrival_time must be seconds from the start, got {self.arrival_time!r}")
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError("num_prompt_tokens and num_output_tokens must be at least 1")
        if not 0 <= self.num_prefix_tokens <= self.num_prompt_tokens:
            raise ValueError(f"num_prefix_tokens must fit into the prompt, got {self.num_prefix_tokens}")
        if self.num_prefix_tokens and self.prefix is None:
            raise ValueError("num_prefix_tokens needs a prefix")


Lengths = Callable[[random.Random], int]  # draws a number of tokens


def parse_lengths(text: str) -> Lengths:
    """Parse a fixed length N, LOW-HIGH for a uniform distribution, or MEDIAN~SIGMA for a long tail.

    The last is log-normal, cut off at three sigmas: two thirds of "100~1" are from 37 to 272, none over 2009.

    >>> parse_lengths("40")(random.Random(0)), parse_lengths("16-64")(random.Random(0))
    (40, 40)
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+)|~(\d*\.?\d+))?", text)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"a length must be N, LOW-HIGH or MEDIAN~SIGMA, at least 1, got {text!r}")
    low, high = int(match[1]), int(match[2] or match[1])
    if match[3] is not None:
        sigma = float(match[3])
        return lambda rng: max(1, round(low * np.exp(sigma * min(3.0, rng.gauss()))))
    if high < low:
        raise ValueError(f"in LOW-HIGH, LOW must be at most HIGH, got {text!r}")
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
    """Yield requests at random times, `rate` per second on average. Equal seeds give equal requests.

    `burstiness` is the shape of the gamma distribution of the gaps between requests: 1 is a Poisson process,
    less gives bursts, more is steadier. The variance of a gap is Poisson's divided by burstiness. Each prompt
    begins with one of the shared prefixes, if there are any, and `prompt` draws the length after it.

    Source: `--burstiness` of vLLM's `bench serve`.
    """
    rng, now = random.Random(seed), 0.0
    for _ in range(num_requests):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        prefix = str(rng.randrange(num_prefixes)) if num_prefixes else None
        shared = num_prefix_tokens if num_prefixes else 0
        yield Arrival(now, shared + prompt(rng), output(rng), prefix, shared)


def read_arrivals(path: str) -> list[Arrival]:
    """Read requests from a JSONL file, and sort them by time. ValueError: a line is not an `Arrival`."""
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


# ---- Policies: which request runs first ----------------------------------------------------------

Policy = Callable[[Arrival], int]  # returns a request's priority: lower runs first


def fcfs(arrival: Arrival) -> int:
    """Return equal priorities: first come, first served."""
    return 0


def priority(arrival: Arrival) -> int:
    """Return the request's own priority."""
    return arrival.priority


def shortest_first(arrival: Arrival) -> int:
    """Order by prompt length, shortest first. Under load, the longest never run."""
    return arrival.num_prompt_tokens


def shortest_first_with_ageing(seconds_per_token: float) -> Policy:
    """Return a policy that is shortest first. Each prompt token counts as seconds_per_token of waiting."""
    # Priorities are integers: microseconds.
    return lambda arrival: round(1e6 * (arrival.arrival_time + seconds_per_token * arrival.num_prompt_tokens))


def parse_policy(text: str) -> Policy:
    """Return a policy by name: fcfs, priority, shortest, or ageing:SECONDS_PER_TOKEN."""
    known = {"fcfs": fcfs, "priority": priority, "shortest": shortest_first}
    if match := re.fullmatch(r"ageing:(\d*\.?\d+)", text):
        return shortest_first_with_ageing(float(match[1]))
    if text not in known:
        raise ValueError(f"policy must be fcfs, priority, shortest or ageing:SECONDS_PER_TOKEN, got {text!r}")
    return known[text]


# ---- Costs: how long a step takes ----------------------------------------------------------------


class Step(NamedTuple):
    """Describes one real step: a data point for the fit of the cost model."""

    num_tokens: int  # computed
    num_context_tokens: int  # attended to: the sum of the lengths that the step's sequences reached
    seconds: float


def context_of(batch: ScheduledBatch) -> int:
    """Return how many tokens' K and V a step reads, summed over its sequences."""
    return sum([end for _, _, end, _, _ in batch.chunks])


class CostModel(NamedTuple):
    """Predicts the seconds that a step takes."""

    step: float  # fixed cost: reading weights, launching kernels, running Python
    token: float  # per token computed
    context: float  # per token attended to

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return the predicted seconds of one step."""
        return self.step + self.token * num_tokens + self.context * num_context_tokens

    def error(self, steps: Iterable[Step]) -> float:
        """Return the mean relative error over real steps."""
        return float(np.mean([abs(self.seconds(*row) / seconds - 1) for *row, seconds in steps]))


def fit_costs(steps: Iterable[Step]) -> CostModel:
    """Fit the costs to real steps, by least squares of the relative errors. No cost is negative.

    With absolute errors, a few long steps, and those that other processes disturbed, would decide the fit.
    """
    num_tokens, num_context_tokens, seconds = np.array(list(steps), dtype=np.float64).T
    table = np.stack([np.ones_like(seconds), num_tokens, num_context_tokens], axis=1) / seconds[:, None]
    costs, kept = np.full(3, -1.0), [0, 1, 2]
    while (costs < 0).any():  # drop negative costs, and fit the others again
        costs = np.zeros(3)
        costs[kept] = np.linalg.lstsq(table[:, kept], np.ones_like(seconds), rcond=None)[0]
        kept = [i for i in kept if costs[i] > 0]
    return CostModel(*costs.tolist())


# ---- Servers: a simulation, or a real engine with the same methods -----------------------------


class Served(NamedTuple):
    """Reports what a step did."""

    seconds: float
    seq_ids: list[int]  # the sequences that got a token
    finished: list[int]  # the ones among them that are complete


class Simulation:
    """Runs the real scheduler and block manager. The cost model says how long a step takes."""

    def __init__(self, scheduler: Scheduler, cost: CostModel) -> None:
        self.scheduler, self.cost = scheduler, cost
        self.seq_ids = itertools.count()
        self.params: dict[int, SamplingParams] = {}  # by number of output tokens

    def add(self, arrival: Arrival, prefix: int, priority: int) -> int:
        """Queue a request and return its seq_id. `prefix` is a negative number that identifies its prefix.

        Its tokens repeat the number of its prefix, then its own seq_id.
        """
        seq_id, num_shared = next(self.seq_ids), arrival.num_prefix_tokens
        token_ids = [prefix] * num_shared + [seq_id] * (arrival.num_prompt_tokens - num_shared)
        max_tokens = arrival.num_output_tokens
        if max_tokens not in self.params:
            self.params[max_tokens] = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(Sequence(seq_id, token_ids, self.params[max_tokens], priority=priority))
        return seq_id

    def step(self) -> Served:
        """Schedule a step, and sample each sequence's last token again.

        So the answer to a prompt that is all prefix continues the prefix, and the next turn of a conversation
        hits both in the prefix cache.
        """
        batch = self.scheduler.schedule()
        advanced = self.scheduler.update(batch, [seq.token_ids[-1] for seq in batch.sampled_seqs])
        return Served(
            self.cost.seconds(batch.num_tokens, context_of(batch)),
            [seq.seq_id for seq in advanced],
            [seq.seq_id for seq in advanced if seq.finish_reason is not None],
        )


class RealEngine:
    """Runs a new engine, without async scheduling, and measures its steps."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.vocabulary = range(engine.checkpoint.vocab_size)
        self.seq_ids = itertools.count()  # the same as the engine's
        self.steps: list[Step] = []
        self.scheduler.observe(self._note)

    def _note(self, event: str, *details: Any) -> None:
        if event == "scheduled":
            self.batch: ScheduledBatch = details[0]
        elif event == "sampled":
            self.advanced.append(details[0])

    def add(self, arrival: Arrival, prefix: int, priority: int) -> int:
        """Queue a request of random tokens, seeded by the prefix and by the seq_id."""
        seq_id, num_shared = next(self.seq_ids), arrival.num_prefix_tokens
        token_ids = []
        for content, num_tokens in ((prefix, num_shared), (seq_id, arrival.num_prompt_tokens - num_shared)):
            rng = random.Random(str(content))  # as text, since Random ignores the sign of a number
            token_ids += rng.choices(self.vocabulary, k=num_tokens)
        params = SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True)
        self.engine.add_request(str(seq_id), {"prompt_token_ids": token_ids}, params, priority=priority)
        return seq_id

    def step(self) -> Served:
        """Run one step, and record its time."""
        self.advanced: list[Sequence] = []
        start = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - start
        self.steps.append(Step(self.batch.num_tokens, context_of(self.batch), seconds))
        finished = [seq.seq_id for seq in self.advanced if seq.is_finished]
        return Served(seconds, [seq.seq_id for seq in self.advanced], finished)


# ---- The run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """Reports how requests were served. Arrays hold float64 seconds, per request in order of arrival."""

    ttft: np.ndarray  # time to first token, from arrival
    tpot: np.ndarray  # time per output token after the first; NaN if there is only one
    latency: np.ndarray  # from arrival to the last token
    gaps: np.ndarray  # times between consecutive tokens: the distinct values, to four digits
    gap_counts: np.ndarray  # number of tokens with each gap
    seconds: float  # from the first arrival to the last token
    busy_seconds: float  # total time of the steps
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    hit_rate: float  # share of the prompt tokens that hit the prefix cache

    @property
    def num_requests(self) -> int:
        """The number of requests. All of them were served."""
        return len(self.ttft)

    def quantiles(self, name: str) -> list[float]:
        """Return the 50th, 90th and 99th percentile of a field, or of the gaps for "itl". NaN: no data."""
        values, weights = (self.gaps, self.gap_counts) if name == "itl" else (getattr(self, name), None)
        if weights is None:
            values = values[~np.isnan(values)]
        if not len(values):
            return [math.nan] * 3
        quantiles = np.quantile(values, (0.5, 0.9, 0.99), weights=weights, method="inverted_cdf")
        return [float(value) for value in quantiles]

    @property
    def output_tokens_per_s(self) -> float:
        """The throughput, from the first arrival to the last token."""
        return self.num_output_tokens / self.seconds


def serve(server: Simulation | RealEngine, arrivals: Iterable[Arrival], policy: Policy = fcfs) -> Report:
    """Serve all arrivals, which must be sorted by time, until the last one finishes.

    The clock advances by whole steps. If no request is unfinished, it jumps to the next arrival. A request
    that arrives during a step is queued at the end of the step, as in an engine that one thread runs.

    Raises:
        ValueError: a request could never be served.
    """
    scheduler = server.scheduler
    hits_before, preemptions_before = scheduler.block_manager.num_query_hits, scheduler.num_preemptions
    queries_before = scheduler.block_manager.num_query_tokens
    prefixes: dict[str | None, int] = {}
    unfinished: dict[int, tuple[int, Arrival]] = {}  # seq_id -> place in the order of arrival, request
    # seq_id -> when the sequence got its first, and its latest, token
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
        waits: dict[float, int] = {}  # nearly all equal: most sequences get a token in every step
        for took_id in took:
            before = token_times.get(took_id)
            if before is None:
                first_times[took_id] = now
            else:
                waits[now - before] = waits.get(now - before, 0) + 1
            token_times[took_id] = now
        for wait, count in waits.items():
            gaps[float(f"{wait:.4g}")] += count  # rounded, else a long run would store one value per step
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
    """Serve arrivals with a new scheduler and without a device."""
    return serve(Simulation(scheduler, cost), arrivals, policy)


# ---- The fit -------------------------------------------------------------------------------------

# Fitted to 1566 steps of the bundled model in float32, on two cores of an AMD EPYC. On 547 other steps they
# are off by 16 % per step, and by 3 % in total time.
DEMO_COSTS = CostModel(2.3e-3, 3.6e-5, 5e-7)
WAVES = (8, 64, 1, 4, 32, 2, 128, 16)  # requests at once; the batch shrinks as they finish


class Calibration(NamedTuple):
    """Holds the fitted costs, and reports of the engine and of the lab on other arrivals."""

    cost: CostModel
    num_steps: int  # number of steps in the fit
    step_error: float  # mean relative error over the other steps
    measured: Report
    simulated: Report


def calibrate(engine: LLMEngine, seconds: float = 20.0) -> Calibration:
    """Fit the costs to an engine's steps, and check them on other arrivals.

    The fit uses requests that arrive in waves. The check uses a Poisson process at 70 % of the rate that the
    lab predicts the engine can serve. Each takes about `seconds`. Both skip idle time.
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
