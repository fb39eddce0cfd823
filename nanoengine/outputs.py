"""What a user gets back, and how token ids become text as they arrive. Names are vLLM's."""

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nanoengine.sampling import Logprob, SamplingParams


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
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id; None for end of sequence


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`, and what it went through."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """Everything known of a request at one moment; `outputs` holds its `n` samples."""

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when first admitted
    prompt_logprobs: None = None
    metrics: RequestMetrics | None = None


class Detokenizer:
    """Turns one sample's tokens into text as they arrive; a token's cost does not grow with the text.

    Never emits half a UTF-8 character: its bytes wait until it is complete. Text that may be the
    beginning of a stop string is part of `text` all the same, as in vLLM.

    Args:
        tokenizer: None leaves the text empty.
        prompt_token_ids: its end is shown to the decoder, so that the output's leading space is kept.
        params: stop strings and what to do with special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self.longest_stop = max(map(len, params.stop_strings), default=0)
        self.tail = ""  # the end of the text, as much as a stop string may have begun in
        self.pieces: list[str] = []
        if tokenizer is not None:
            suffix = self._whole_characters(prompt_token_ids)
            self.stream = DecodeStream(ids=suffix, skip_special_tokens=params.skip_special_tokens)

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add a token's text; returns the stop string it completed, the text being cut there."""
        if self.tokenizer is None:
            return None
        new = self.stream.step(self.tokenizer, token_id)
        if not new:
            return None
        self.pieces.append(new)
        if self.longest_stop == 0:
            return None
        window = self.tail + new
        self.tail = window[max(0, len(window) - self.longest_stop + 1) :]
        found = [(at, s) for s in self.params.stop_strings if (at := window.find(s)) >= 0]
        if not found or not may_stop:
            return None
        at, stop = min(found, key=lambda pair: pair[0])
        if self.params.include_stop_str_in_output:
            at += len(stop)
        text = self.text
        self.pieces = [text[: len(text) - (len(window) - at)]]
        return stop

    @property
    def text(self) -> str:
        """All the text so far."""
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        """A short end of the prompt that does not begin or end inside a character."""
        assert self.tokenizer is not None
        for length in range(4, 24):
            suffix = token_ids[-length:]
            if "\ufffd" not in self.tokenizer.decode(suffix, skip_special_tokens=False):
                return suffix
        return []
