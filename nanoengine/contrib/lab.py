"""The scheduler lab: the engine's own Scheduler and BlockManager, with a cost model in place of a device.

    simulate(scheduler, arrivals, cost, policy=lambda arrival: -arrival.num_output_tokens)

`nanoengine lab` runs it from the command line. lab_command.py explains the costs, the policies and the file
of arrivals.
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
from typing import NamedTuple, Protocol

import numpy as np

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
