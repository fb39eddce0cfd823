"""Turns an engine's counts, and what stats.py collects, into the metrics of vLLM's reader.

Source of names and types: vllm/v1/metrics/reader.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nanoengine.stats import Observations, RequestStats


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


def list_metrics(
    model: str, counts: Mapping[str, int | float], stats: RequestStats, accepted_drafts: Sequence[int]
) -> list[Metric]:
    """Return all metrics, from the result of `LLMEngine.metrics` and the statistics of finished requests.

    `accepted_drafts` are accepted draft tokens by position in the draft. Empty: no speculative decoding.
    """
    labels = {"model_name": model, "engine": "0"}
    gauges = ("requests_running", "running"), ("requests_waiting", "waiting")
    counters = [f"{kind}prefix_cache_{what}" for kind in ("", "external_") for what in ("queries", "hits")]
    counters += ["num_preemptions", "prompt_tokens", "generation_tokens"]
    vectors: list[Metric] = []
    if accepted_drafts:
        counters += [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        vectors.append(Vector(name, dict(labels), list(accepted_drafts)))
    return [
        *(Gauge(f"vllm:num_{name}", dict(labels), float(counts[f"num_{ours}"])) for name, ours in gauges),
        Gauge("vllm:kv_cache_usage_perc", dict(labels), counts["kv_cache_usage"]),
        *(Counter(f"vllm:{name}", dict(labels), int(counts[name])) for name in counters),
        *vectors,
        *(
            Counter("vllm:request_success", labels | {"finished_reason": reason}, stats.reasons[reason])
            for reason in REASONS
        ),
        *(histogram(f"vllm:{name}", observed, labels) for name, observed in stats.observed.items()),
    ]
