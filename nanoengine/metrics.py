"""Reads an engine's counters, and turns them and what outputs.py collects into the metrics of vLLM's reader.

Source of names and types: vllm/v1/metrics/reader.py.
"""

from collections import Counter as Multiset
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from nanoengine.outputs import Observations, RequestStats


@dataclass
class Metric:
    """Holds a metric's name and labels: "model_name" and "engine", and for some metrics one more."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Holds an integer that only increases."""

    value: int


@dataclass
class Vector(Metric):
    """Holds one counter per position of a draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """Holds a number that can go up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """Holds the number of observations, their sum, and how many are at most each limit ("0.5", "+Inf")."""

    count: int
    sum: float
    buckets: dict[str, int]


REASONS = ("stop", "length", "abort", "error")


def histogram(name: str, observed: Observations, labels: dict[str, str]) -> Histogram:
    """Return a histogram of the observations so far."""
    limits = [*(str(float(limit)) for limit in observed.limits), "+Inf"]
    up_to = list(accumulate(observed.counts))
    return Histogram(name, dict(labels), up_to[-1], observed.sum, dict(zip(limits, up_to, strict=True)))


def metrics(engine: Any) -> dict[str, int | float]:
    """Return an `LLMEngine`'s counters since it started, and the current state of the queues and the cache.

    `seconds_*` are the total times of the phases of a step: schedule, inputs (building arrays and copying
    them to the device), forward (up to the logits), sample, and update (the scheduler's update, and
    detokenization). On CUDA, forward only queues kernels: sample waits for them.
    """
    scheduler, blocks = engine.scheduler, engine.scheduler.block_manager
    drafted, accepted = drafts(engine)
    num_drafts, num_accepted = drafted[0], accepted.total()
    return {
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "num_blocks": blocks.num_blocks,
        "num_free_blocks": blocks.num_free_blocks,
        "kv_cache_usage": 1 - blocks.num_free_blocks / blocks.num_blocks,
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache_queries": blocks.num_query_tokens,
        "prefix_cache_hits": blocks.num_query_hits,
        "external_prefix_cache_queries": getattr(blocks, "num_external_query_tokens", 0),  # KV store
        "external_prefix_cache_hits": getattr(blocks, "num_external_hit_tokens", 0),
        "prompt_tokens": engine.num_prompt_tokens,
        "generation_tokens": engine.num_generation_tokens,
        "num_steps": engine.core.num_steps,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_num_draft_tokens": drafted.total(),
        "spec_decode_num_accepted_tokens": num_accepted,
        # As in vLLM: tokens per decode with drafts, the accepted ones plus the one sampled after them.
        "spec_decode_mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else 0.0,
        **{f"seconds_{phase}": seconds for phase, seconds in engine.runner.stopwatch.seconds.items()},
    }


def drafts(engine: Any) -> tuple[Multiset[int], Multiset[int]]:
    """Return how many draft tokens were computed and how many were accepted, by position in the draft."""
    scheduler, none = engine.scheduler, cast(Any, Multiset())  # only a `DraftingScheduler` counts
    return getattr(scheduler, "num_drafted", none), getattr(scheduler, "num_accepted", none)


def get_metrics(engine: Any) -> list[Metric]:
    """Return an engine's `metrics`, and histograms of finished requests, in the form of vLLM's reader."""
    stats: RequestStats = engine._stats
    labels, counts = {"model_name": str(engine.config.model), "engine": "0"}, metrics(engine)
    gauges = ("requests_running", "running"), ("requests_waiting", "waiting")
    counters = [f"{kind}prefix_cache_{what}" for kind in ("", "external_") for what in ("queries", "hits")]
    counters += ["num_preemptions", "prompt_tokens", "generation_tokens"]
    if (num_places := engine.config.num_speculative_tokens) > 0:
        counters += [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    found: list[Metric] = [
        *(Gauge(f"vllm:num_{name}", dict(labels), float(counts[f"num_{ours}"])) for name, ours in gauges),
        Gauge("vllm:kv_cache_usage_perc", dict(labels), counts["kv_cache_usage"]),
        *(Counter(f"vllm:{name}", dict(labels), int(counts[name])) for name in counters),
    ]
    if num_places > 0:
        name, (_, accepted) = "vllm:spec_decode_num_accepted_tokens_per_pos", drafts(engine)
        found.append(Vector(name, dict(labels), [accepted[place] for place in range(num_places)]))
    for reason in REASONS:
        given = labels | {"finished_reason": reason}
        found.append(Counter("vllm:request_success", given, stats.reasons[reason]))
    return found + [histogram(f"vllm:{name}", one, labels) for name, one in stats.observed.items()]
