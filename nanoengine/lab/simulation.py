"""The scheduler lab: the engine's own Scheduler and BlockManager, with a cost model in place of a device.

`simulate` serves arrivals with a scheduler. `nanoengine lab` runs it from the command line: see cli/lab.py.
"""

import heapq
import itertools
import math
import random
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanoengine.engine import BlockManager, ScheduledBatch, Scheduler, Sequence
from nanoengine.lab.arrivals import Arrival, generate_arrivals, parse_lengths
from nanoengine.lab.belady import Accesses, optimal_hits
from nanoengine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams

# ---- Costs: how long a step takes ----------------------------------------------------------------


class Step(NamedTuple):
    """Describes one real step: a data point for the fit of the cost model."""

    num_tokens: int  # computed
    num_context_tokens: int  # attended to: the sum of the lengths that the step's sequences reached
    seconds: float


def sizes_of(batch: ScheduledBatch) -> tuple[int, int]:
    """Return how many tokens a step computes, and how many tokens' K and V it reads, over its sequences."""
    return batch.num_tokens, sum([end for _, _, end, _, _ in batch.chunks])


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


Served = tuple[float, ScheduledBatch, list[Sequence]]  # seconds, the step, which sequences got a token


class Simulation:
    """Runs the real scheduler and block manager. The cost model says how long a step takes."""

    def __init__(self, scheduler: Scheduler, cost: CostModel) -> None:
        self.scheduler, self.cost = scheduler, cost
        self.seq_ids = itertools.count()
        self.names: dict[Any, int] = {}  # the parts that prompts may share: name -> a negative number

    def add(self, arrival: Arrival) -> int:
        """Queue a request and return its seq_id. The tokens of a part are all the same: its number."""
        seq_id, token_ids = next(self.seq_ids), list[int]()
        for name, size in arrival.parts(None):
            number = seq_id if name is None else self.names.setdefault(name, -1 - len(self.names))
            token_ids += [number] * size
        self.scheduler.add(Sequence(seq_id, token_ids, params_of(arrival), priority=arrival.priority))
        return seq_id

    def step(self) -> Served:
        """Schedule a step, and sample each last token again, so that the next turn hits the cache."""
        batch = self.scheduler.schedule()
        advanced = self.scheduler.update(batch, [seq.token_ids[-1] for seq in batch.sampled_seqs])
        return self.cost.seconds(*sizes_of(batch)), batch, advanced


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

    def add(self, arrival: Arrival) -> int:
        """Queue a request of random tokens, seeded by the parts' names. The answer continues a shared one."""
        seq_id, token_ids = next(self.seq_ids), list[int]()
        for name, size in arrival.parts(("own", seq_id)):
            drawn = random.Random(str(name)).choices(self.vocabulary, k=size + arrival.num_output_tokens)
            token_ids += drawn[:size]
        forced = None if name == ("own", seq_id) else drawn[size:]
        params = params_of(arrival, forced_token_ids=forced, ignore_eos=True)
        self.engine.add_request(str(seq_id), token_ids, params, priority=arrival.priority)
        return seq_id

    def step(self) -> Served:
        """Run one step, and record its time."""
        self.advanced: list[Sequence] = []
        start = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - start
        self.steps.append(Step(*sizes_of(self.batch), seconds))
        return seconds, self.batch, self.advanced


def params_of(arrival: Arrival, **settings: Any) -> SamplingParams:
    """Return a request's sampling parameters."""
    extra = {} if arrival.ttft_deadline is None else {"ttft_deadline": arrival.ttft_deadline}
    return SamplingParams(max_tokens=arrival.num_output_tokens, extra_args=extra, **settings)


# ---- The run -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    """Records how a request was served."""

    arrival: Arrival
    first_time: float = math.nan  # when it got its first, and its latest, token
    last_time: float = math.nan
    longest_gap: float = 0.0  # between two tokens
    num_computed: int = 0  # the most tokens that were computed for it


@dataclass(frozen=True, slots=True)
class Report:
    """Reports how requests were served. Arrays hold float64 seconds, per request in order of arrival."""

    ttft: np.ndarray  # time to first token, from arrival
    latency: np.ndarray  # from arrival to the last token
    longest_gap: np.ndarray  # the longest time between two tokens; 0 if there is only one
    itl: np.ndarray  # all times between two tokens, in order of time
    seconds: float  # from the first arrival to the last token
    busy_seconds: float  # total time of the steps
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int  # computed again, because a preemption freed their blocks
    hit_rate: float  # share of the prompt tokens that hit the prefix cache
    optimal_hit_rate: float  # the same with Belady's eviction: see belady.py

    def quantiles(self, name: str) -> list[float]:
        """Return the 50th, 90th and 99th percentile of a field. NaN: no data."""
        values = getattr(self, name)
        if not len(values):
            return [math.nan] * 3
        return [float(value) for value in np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf")]

    def goodput(self, ttft_limit: float, itl_limit: float) -> float:
        """Return the share of requests whose first token, and each token after it, were within the limits."""
        return float(np.mean((self.ttft <= ttft_limit) & (self.longest_gap <= itl_limit)))

    @property
    def output_tokens_per_s(self) -> float:
        """The throughput, from the first arrival to the last token."""
        return self.num_output_tokens / self.seconds


class Upcoming:
    """Holds the requests that have not arrived. Those of a session wait for the end of the one before."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self.arrivals, self.numbers = iter(arrivals), itertools.count()
        self.turns: dict[str, deque[Arrival]] = {}  # a session in progress -> its requests that wait
        self.due: list[tuple[float, int, bool, Arrival]] = []  # a heap; at most one comes from `_draw`
        self._draw()

    def _draw(self) -> None:
        for arrival in self.arrivals:
            if arrival.session not in self.turns:
                self.turns |= {arrival.session: deque()} if arrival.session is not None else {}
                heapq.heappush(self.due, (arrival.arrival_time, next(self.numbers), True, arrival))
                return
            self.turns[arrival.session].append(arrival)

    def pop(self) -> Arrival:
        """Return the next request, with the time of its arrival."""
        now, _, is_drawn, arrival = heapq.heappop(self.due)
        if is_drawn:
            self._draw()
        return arrival._replace(arrival_time=now)

    def end(self, arrival: Arrival, now: float) -> None:
        """Note that a request has finished. The next one of its session arrives after a pause."""
        session = arrival.session or ""
        if self.turns.get(session):
            turn = self.turns[session].popleft()
            at = max(turn.arrival_time, now + turn.pause)
            heapq.heappush(self.due, (at, next(self.numbers), False, turn))
        else:
            self.turns.pop(session, None)


def serve(server: Simulation | RealEngine, arrivals: Iterable[Arrival]) -> Report:
    """Serve all arrivals, which must be sorted by time, until the last one finishes.

    The clock advances by whole steps. If no request is unfinished, it jumps to the next arrival. A request
    that arrives during a step is queued at the end of the step, as in an engine that one thread runs. A
    scheduler that has a `clock` gets this one. Raises ValueError if a request could never be served.
    """
    scheduler: Any = server.scheduler
    manager, upcoming, accesses = scheduler.block_manager, Upcoming(arrivals), Accesses(scheduler)
    before = manager.num_query_hits, manager.num_query_tokens, scheduler.num_preemptions
    records, unfinished, itl = list[Record](), dict[int, Record](), array("d")  # unfinished ones by seq_id
    num_steps = num_output_tokens = num_recomputed_tokens = 0
    start = now = upcoming.due[0][0] if upcoming.due else 0.0
    busy_seconds = 0.0
    if hasattr(scheduler, "clock"):
        scheduler.clock = lambda: now
    while unfinished or upcoming.due:
        if not unfinished:
            now = max(now, upcoming.due[0][0])
        while upcoming.due and upcoming.due[0][0] <= now:
            arrival = upcoming.pop()
            num_tokens = arrival.num_prompt_tokens, arrival.num_output_tokens
            if sum(num_tokens) > (most := scheduler.max_num_tokens):
                request = "a request of {} and {} tokens would be cut short".format(*num_tokens)
                raise ValueError(f"{request}: the KV cache and max_model_len leave room for {most}")
            records.append(Record(arrival))
            unfinished[server.add(arrival)] = records[-1]

        seconds, batch, advanced = server.step()
        now += seconds
        busy_seconds += seconds
        num_steps += 1
        num_output_tokens += len(advanced)
        for seq, first, end, _, _ in batch.chunks:
            record = unfinished[seq.seq_id]
            num_recomputed_tokens += max(0, min(end, record.num_computed) - first)
            record.num_computed = max(end, record.num_computed)
        for seq in advanced:
            record = unfinished[seq.seq_id]
            if seq.num_output_tokens == 1:
                record.first_time = now
            else:
                itl.append(now - record.last_time)
                record.longest_gap = max(record.longest_gap, itl[-1])
            record.last_time = now
            if seq.finish_reason is not None:
                upcoming.end(unfinished.pop(seq.seq_id).arrival, now)

    scheduler.observe(accesses.tell_before)
    num_queries = max(1, manager.num_query_tokens - before[1])
    times = [(one.first_time, one.last_time, one.arrival.arrival_time, one.longest_gap) for one in records]
    first_times, last_times, arrival_times, longest_gap = np.array(times).reshape(-1, 4).T
    return Report(
        ttft=first_times - arrival_times,
        latency=last_times - arrival_times,
        longest_gap=longest_gap,
        itl=np.array(itl),
        seconds=now - start,
        busy_seconds=busy_seconds,
        num_steps=num_steps,
        num_prompt_tokens=sum(one.arrival.num_prompt_tokens for one in records),
        num_output_tokens=num_output_tokens,
        num_preemptions=scheduler.num_preemptions - before[2],
        num_recomputed_tokens=num_recomputed_tokens,
        hit_rate=(manager.num_query_hits - before[0]) / num_queries,
        optimal_hit_rate=optimal_hits(accesses.events, manager.block_size) / num_queries,
    )


def simulate(scheduler: Scheduler, arrivals: Iterable[Arrival], cost: CostModel) -> Report:
    """Serve arrivals with a new scheduler and without a device."""
    return serve(Simulation(scheduler, cost), arrivals)


# ---- The fit -------------------------------------------------------------------------------------

# Fitted to 1566 steps of the bundled model in float32, on two cores of an AMD EPYC. On 547 other steps they
# are off by 16 % per step, and by 3 % in total time.
DEMO_COSTS = CostModel(2.3e-3, 3.6e-5, 5e-7)
WAVES = (8, 64, 1, 4, 32, 2, 128, 16)  # requests at once; the batch shrinks as they finish
Calibration = tuple[CostModel, list[Step], list[Step], Report, Report]


def calibrate(engine: LLMEngine, seconds: float = 20.0) -> Calibration:
    """Fit the costs to an engine's steps, and check them on other arrivals.

    The fit uses requests that arrive in waves. The check uses a Poisson process at 70 % of the rate that the
    lab predicts the engine can serve. Each takes about `seconds`. Both skip idle time. Returns the costs, the
    steps of the fit, other steps, and reports of the engine and of the lab on these.
    """
    scheduler, longest, real = engine.scheduler, engine.max_model_len // 3, RealEngine(engine)

    def load(num_requests: int, rate: float, prompt: str, output: str, seed: int) -> list[Arrival]:
        lengths = parse_lengths(prompt), parse_lengths(output)
        drawn = generate_arrivals(num_requests, rate, *lengths, seed=seed)
        return [Arrival(when, min(size, longest), min(answer, longest)) for when, size, answer, *_ in drawn]

    def rehearse(arrivals: list[Arrival]) -> Report:
        caching = engine.config.enable_prefix_caching
        sizes = engine.started.num_blocks, engine.runner.block_size
        blocks = BlockManager(*sizes, enable_prefix_caching=caching)
        twin = Scheduler(blocks, max_num_seqs=scheduler.max_num_seqs)
        for name in ("max_num_batched_tokens", "max_chunk_tokens", "max_num_tokens"):
            setattr(twin, name, getattr(scheduler, name))
        return simulate(twin, arrivals, cost)

    serve(real, load(8, 1e6, "64", "8", seed=0))  # a warm-up
    steps: list[Step] = []
    waves = itertools.cycle(WAVES)
    while sum(step.seconds for step in steps) < seconds:
        real.steps = []
        serve(real, load(next(waves), 1e6, "100~1", "40~0.8", seed=len(steps)))
        steps += real.steps
    cost = fit_costs(steps)

    rate = 0.7 * 200 / rehearse(load(200, 1e6, "60-180", "20-100", seed=-1)).seconds
    arrivals = load(max(10, int(rate * seconds)), rate, "60-180", "20-100", seed=-2)
    real.steps = []
    return cost, steps, real.steps, serve(real, arrivals), rehearse(arrivals)
