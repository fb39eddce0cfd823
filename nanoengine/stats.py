"""Collects statistics of finished requests. extensions/metrics.py reports them.

Source of names and buckets: vllm/v1/metrics/loggers.py.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any


class Observations:
    """Counts observations per bucket, for a histogram."""

    def __init__(self, limits: Sequence[float]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)  # per bucket; the last bucket is above all limits
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value


LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


class RequestStats:
    """Collects the lengths (in tokens) and durations of requests, each when the request finishes."""

    def __init__(self, max_model_len: int) -> None:
        lengths = [m * 10**e for e in range(8) for m in (1, 2, 5) if m * 10**e <= max_model_len]
        self.reasons: Counter[str] = Counter()  # finish reasons, counted per sample
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
        """Record a finished request. Aborted requests count in `reasons`, but not in the histograms."""
        samples, times, params = list(request.samples.values()), request.metrics, request.source.params
        self.reasons.update(sample.seq.finish_reason for sample in samples)
        arrived, first, end = times.arrival_time, times.first_token_time, times.finished_time
        scheduled = samples[0].seq.first_scheduled_time
        if None in (scheduled, first, end):
            return
        lengths = [sample.seq.num_output_tokens for sample in samples]
        longest = max(lengths)
        values = {
            "request_prompt_tokens": [len(request.source.token_ids)],
            "request_generation_tokens": lengths,
            "request_params_n": [params.n],
            "request_params_max_tokens": [] if params.max_tokens is None else [params.max_tokens],
            "time_to_first_token_seconds": [first - arrived],
            "inter_token_latency_seconds": chain(*(sample.latencies for sample in samples)),
            "request_time_per_output_token_seconds": [(end - first) / (longest - 1)] if longest > 1 else [],
            "e2e_request_latency_seconds": [end - arrived],
            "request_queue_time_seconds": [scheduled - arrived],
            "request_inference_time_seconds": [end - scheduled],
            "request_prefill_time_seconds": [first - scheduled],
            "request_decode_time_seconds": [end - first],
        }
        for name, observed in values.items():
            for value in observed:
                self.observed[name].add(value)
