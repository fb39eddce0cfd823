"""What a user gets back. Names are vLLM's."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    The token that ended it (end of sequence, or a stop token) is part of `token_ids`, its text is
    not part of `text`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token of token_ids
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None while it runs
    # The stop string or stop token id; None for end of sequence. For "error", what failed
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`, and what it went through."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when first admitted
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until it was first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """Everything known of a request at one moment; `outputs` holds its `n` samples.

    Outputs of one request share the prompt's list, and metrics until something happens: not to be changed.
    """

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when first admitted
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    metrics: RequestMetrics | None = None
    is_delta: bool = False  # text, tokens and logprobs are only what came since the output before
    pooled: Any = None  # of a model that pools, a tensor: extensions/pooling.py makes a user's output of it

    def merged_with(self, later: "RequestOutput") -> "RequestOutput":
        """This output and the one after it as one: nothing is lost if only the result is looked at."""
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
    """By request_id, what came and was not taken yet: one output each, later ones merged in."""

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        before = self.get(output.request_id)
        self[output.request_id] = output if before is None else before.merged_with(output)

    def take(self, request_ids: Iterable[Any]) -> list[RequestOutput]:
        """Take out what there is of these requests."""
        return [self.pop(request_id) for request_id in list(request_ids) if request_id in self]
