"""Defines the outputs that users get. Names are vLLM's."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


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


@dataclass(slots=True)
class RequestMetrics:
    """Holds a request's timestamps, in seconds of `time.monotonic()`, and its cache hits and preemptions."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from the request's arrival until it was first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """Holds the state of a request at one moment. `outputs` has its `n` samples, or those that are new.

    The outputs of one request share the list of prompt tokens, and the metrics until those change. Do not
    modify either.
    """

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    metrics: RequestMetrics | None = None
    is_delta: bool = False  # text, tokens and logprobs are only those since the previous output
    pooled: Any = None  # a pooling model's result, a tensor: contrib/pooling.py turns it into an output

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
        return replace(later, outputs=[merged[index] for index in sorted(merged)])


class Inbox(dict[Any, RequestOutput]):
    """Maps a request_id to its output that has not been taken yet. Later outputs are merged into it."""

    def put(self, output: RequestOutput) -> None:
        """Add an output, or merge it into the one that is already there."""
        before = self.get(output.request_id)
        self[output.request_id] = output if before is None else before.merged_with(output)

    def take(self, request_ids: Iterable[Any]) -> list[RequestOutput]:
        """Remove and return the outputs of these requests, if there are any."""
        return [self.pop(request_id) for request_id in list(request_ids) if request_id in self]
