"""Defines the outputs that users get, under vLLM's names, and collects statistics of finished requests."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any


class EngineDeadError(RuntimeError):
    """Raised when no step can succeed anymore: the engine can only be closed. The name is vLLM's."""


@dataclass(slots=True)
class Logprob:
    """Holds the log-probability of one token, its rank (1: the most probable) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """Holds the output of one sample of a request.

    The token that ended the sample (end of sequence, or a stop token) is part of `token_ids`. Its text is not
    part of `text`, unless include_stop_str_in_output is set.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token of token_ids
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None: not finished
    # The stop string or stop token id; None for end of sequence. For "error", the cause
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Return whether the sample has a finish_reason."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Holds a request's timestamps, in seconds of `time.monotonic()`, and its cache hits and preemptions."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """Holds the state of a request at one moment. `outputs` has its `n` samples, or those that are new.

    The outputs of one request share the lists of prompt tokens and their log-probabilities, and the metrics
    until those change. Do not modify them.
    """

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    # The first token has none. If is_delta, only the first output has them.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    is_delta: bool = False  # text, tokens and logprobs are only those since the previous output

    def merged_with(self, later: "RequestOutput") -> "RequestOutput":
        """Return one output that holds everything in this output and in the next one."""
        if not later.is_delta:
            return later
        merged = {completion.index: completion for completion in self.outputs}
        for new in later.outputs:
            old = merged.get(new.index)
            if old is not None:
                logprobs = None if new.logprobs is None else (old.logprobs or []) + new.logprobs
                text, token_ids = old.text + new.text, old.token_ids + new.token_ids
                new = replace(new, text=text, token_ids=token_ids, logprobs=logprobs)
            merged[new.index] = new
        prompt_logprobs = self.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs
        outputs = [merged[index] for index in sorted(merged)]
        return replace(later, outputs=outputs, prompt_logprobs=prompt_logprobs)


class Inbox(dict[Any, RequestOutput]):
    """Maps a request_id to its output that has not been taken yet. Later outputs are merged into it."""

    def put(self, output: RequestOutput) -> None:
        """Add an output, or merge it into the one that is already there."""
        before = self.get(output.request_id)
        self[output.request_id] = output if before is None else before.merged_with(output)

    def take(self, request_ids: Iterable[Any]) -> list[RequestOutput]:
        """Remove and return the outputs of these requests, if there are any."""
        return [self.pop(request_id) for request_id in list(request_ids) if request_id in self]


# ---- Statistics of finished requests -------------------------------------------------------------


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


# Buckets of vllm/v1/metrics/loggers.py
LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


class RequestStats:
    """Collects the lengths (in tokens) and durations of requests. The engine adds times to first tokens."""

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
        """Record a finished request, or an aborted one as far as it got."""
        samples, times, params = list(request.samples.values()), request.metrics, request.source.params
        self.reasons.update(sample.seq.finish_reason for sample in samples)
        arrived, first = times.arrival_time, times.first_token_time
        end = time.monotonic() if times.finished_time is None else times.finished_time
        scheduled = samples[0].seq.first_scheduled_time
        lengths = [sample.seq.num_output_tokens for sample in samples]
        longest = max(lengths)
        values: dict[str, Iterable[float]] = {
            "request_prompt_tokens": [len(request.source.token_ids)],
            "request_generation_tokens": lengths,
            "request_params_n": [params.n],
            "request_params_max_tokens": [] if params.max_tokens is None else [params.max_tokens],
            "inter_token_latency_seconds": chain(*(sample.latencies for sample in samples)),
            "e2e_request_latency_seconds": [end - arrived],
        }
        if scheduled is not None:
            values["request_queue_time_seconds"] = [scheduled - arrived]
            values["request_inference_time_seconds"] = [end - scheduled]
        if first is not None:
            values["request_prefill_time_seconds"] = [first - scheduled]
            values["request_decode_time_seconds"] = [end - first]
            per_token = [(end - first) / (longest - 1)] if longest > 1 else []
            values["request_time_per_output_token_seconds"] = per_token
        for name, observed in values.items():
            for value in observed:
                self.observed[name].add(value)
