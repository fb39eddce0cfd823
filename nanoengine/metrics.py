"""What an engine says of itself: the line it prints, its counts, and these as vLLM's metrics reader has them.

Source of the latter's names, shapes and buckets: vllm/v1/metrics/reader.py and loggers.py.
"""

from bisect import bisect_left
from collections import Counter as Multiset
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoengine.engine import LLMEngine, ModelRunner


def what_runs(engine: "LLMEngine") -> str:
    """For the user: whose code, which attention and why not a faster one, where, and how much cache."""
    runner = engine.runner
    assert runner.model is not None
    notes = f" ({'; '.join(runner.attention.notes)})" if runner.attention.notes else ""
    part = " (its language model: images are left out)" if engine.checkpoint.is_part else ""
    num_guesses = engine.config.num_speculative_tokens
    ahead = f", up to {num_guesses} tokens guessed ahead (ngram), no async scheduling" if num_guesses else ""
    weights = f" with {engine.config.quantization} weights" if engine.config.quantization else ""
    windows = describe_windows(runner)
    kept = f", KV store {engine.connector.store}" if engine.connector else ""
    return (
        f"nanoengine: {engine.checkpoint.architecture}{part} on {runner.model.code} code, "
        f"{runner.attention.backend.name} attention{notes}{runner.forward.describe()}, "
        f"{str(runner.dtype).removeprefix('torch.')}{weights} on {runner.device.device}, "
        f"KV cache of {runner.num_blocks} blocks of {runner.block_size} tokens{windows}{ahead}{kept}"
    )


def describe_windows(runner: "ModelRunner") -> str:
    """For the user: what becomes of blocks that a sliding window has left behind."""
    windows = [group.window for group in runner.kv_groups]
    if windows == [None]:
        has_window = any(spec.window and spec.window < runner.max_model_len for spec in runner.kv_specs)
        return ", none given back behind a window (the layers' shapes differ)" if has_window else ""
    kinds = [f"{windows.count(w)} of {f'a window of {w}' if w else 'all'}" for w in dict.fromkeys(windows)]
    return f", layers in groups: {', '.join(kinds)}" if len(windows) > 1 else f", a window of {windows[0]}"


def count(engine: "LLMEngine") -> dict[str, int | float]:
    """`LLMEngine.metrics`."""
    scheduler, blocks = engine.scheduler, engine.scheduler.block_manager
    external = engine.connector
    num_drafts, num_accepted = scheduler.num_drafted[0], scheduler.num_accepted.total()
    return {
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "num_blocks": blocks.num_blocks,
        "num_free_blocks": blocks.num_free_blocks,
        "kv_cache_usage": 1 - blocks.num_free_blocks / blocks.num_blocks,
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache_queries": blocks.num_query_tokens,
        "prefix_cache_hits": blocks.num_query_hits,
        "external_prefix_cache_queries": external.num_query_tokens if external else 0,  # of the KV store
        "external_prefix_cache_hits": external.num_hit_tokens if external else 0,
        "prompt_tokens": engine.num_prompt_tokens,
        "generation_tokens": engine.num_generation_tokens,
        "num_steps": engine.num_steps,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_num_draft_tokens": scheduler.num_drafted.total(),
        "spec_decode_num_accepted_tokens": num_accepted,
        # Tokens of a decode that had a draft, as vLLM counts them: those accepted, and the one drawn anyway.
        "spec_decode_mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else 0.0,
        **{f"seconds_{phase}": seconds for phase, seconds in engine.runner.stopwatch.seconds.items()},
    }


@dataclass
class Metric:
    """A measurement, its labels beside it: "model_name" and "engine", and for some one more."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A whole number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """How many observations, their sum, and how many lay at or below each limit ("0.5", ..., "+Inf")."""

    count: int
    sum: float
    buckets: dict[str, int]


class Observations:
    """What a histogram is made of."""

    def __init__(self, limits: Sequence[float]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)  # per bucket; the last is for what lies above all limits
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """As it is now."""
        limits = [*(str(float(limit)) for limit in self.limits), "+Inf"]
        up_to = list(accumulate(self.counts))
        return Histogram(name, dict(labels), up_to[-1], self.sum, dict(zip(limits, up_to, strict=True)))


LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REASONS = ("stop", "length", "abort", "error")


class RequestStats:
    """What requests were like and how long they took, taken when each ends. Lengths are in tokens."""

    def __init__(self, max_model_len: int) -> None:
        lengths = [m * 10**e for e in range(8) for m in (1, 2, 5) if m * 10**e <= max_model_len]
        self.reasons: Multiset[str] = Multiset()  # of samples, as all that counts output tokens
        self.observed = {
            "request_prompt_tokens": Observations(lengths),
            "request_generation_tokens": Observations(lengths),
            "request_params_n": Observations((1, 2, 5, 10, 20)),
            "request_params_max_tokens": Observations(lengths),
            "time_to_first_token_seconds": Observations(FIRST_TOKEN),
            "inter_token_latency_seconds": Observations(PER_TOKEN),
            "request_time_per_output_token_seconds": Observations(PER_TOKEN),
            "e2e_request_latency_seconds": Observations(LATENCIES),
            "request_queue_time_seconds": Observations(LATENCIES),
            "request_inference_time_seconds": Observations(LATENCIES),
            "request_prefill_time_seconds": Observations(LATENCIES),
            "request_decode_time_seconds": Observations(LATENCIES),
        }

    def add(self, request: Any) -> None:
        """Take in a request that ended. Times are of those that ran to their end, not of aborted ones."""
        seqs = [sample.seq for sample in request.samples.values()]
        self.reasons.update(seq.finish_reason for seq in seqs)
        arrived, first, end = (
            getattr(request.metrics, f"{event}_time") for event in ("arrival", "first_token", "finished")
        )
        params, scheduled = request.source.params, seqs[0].first_scheduled_time
        if None in (scheduled, first, end):
            return
        add = {name: observations.add for name, observations in self.observed.items()}
        add["request_prompt_tokens"](len(request.source.token_ids))
        add["request_params_n"](params.n)
        if params.max_tokens is not None:
            add["request_params_max_tokens"](params.max_tokens)
        for sample in request.samples.values():
            add["request_generation_tokens"](sample.seq.num_output_tokens)
            for latency in sample.latencies:
                add["inter_token_latency_seconds"](latency)
        longest = max(seq.num_output_tokens for seq in seqs)
        if longest > 1:
            add["request_time_per_output_token_seconds"]((end - first) / (longest - 1))
        add["time_to_first_token_seconds"](first - arrived)
        add["e2e_request_latency_seconds"](end - arrived)
        add["request_queue_time_seconds"](scheduled - arrived)
        add["request_inference_time_seconds"](end - scheduled)
        add["request_prefill_time_seconds"](first - scheduled)
        add["request_decode_time_seconds"](end - first)


def read_metrics(engine: "LLMEngine", stats: RequestStats) -> list[Metric]:
    """All metrics: `LLMEngine.metrics`, the requests that ended, and with drafts what became of them."""
    now, model, num_guesses = engine.metrics(), str(engine.config.model), engine.config.num_speculative_tokens
    labels = {"model_name": model, "engine": "0"}
    gauges = {
        "num_requests_running": "num_running",
        "num_requests_waiting": "num_waiting",
        "kv_cache_usage_perc": "kv_cache_usage",
    }
    counters = [
        "prefix_cache_queries",
        "prefix_cache_hits",
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
    ]
    vectors: list[Metric] = []
    if num_guesses:
        counters += [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
        accepted = [engine.scheduler.num_accepted[place] for place in range(num_guesses)]
        vectors.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(labels), accepted))
    return [
        *(Gauge(f"vllm:{name}", dict(labels), float(now[ours])) for name, ours in gauges.items()),
        *(Counter(f"vllm:{name}", dict(labels), int(now[name])) for name in counters),
        *vectors,
        *(
            Counter("vllm:request_success", labels | {"finished_reason": reason}, stats.reasons[reason])
            for reason in REASONS
        ),
        *(observed.histogram(f"vllm:{name}", labels) for name, observed in stats.observed.items()),
    ]
