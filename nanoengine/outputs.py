"""What a user gets back, and how token ids become text as they arrive. Names are vLLM's."""

from dataclasses import dataclass, replace

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
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id; None for end of sequence


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
    """Everything known of a request at one moment; `outputs` holds its `n` samples."""

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when first admitted
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    metrics: RequestMetrics | None = None

    def merged_with(self, later: "RequestOutput") -> "RequestOutput":
        """Two consecutive outputs of kind DELTA as one."""
        merged = {completion.index: completion for completion in self.outputs}
        for new in later.outputs:
            old = merged.get(new.index)
            if old is not None:
                logprobs = None if new.logprobs is None else (old.logprobs or []) + new.logprobs
                text, token_ids = old.text + new.text, old.token_ids + new.token_ids
                new = replace(new, text=text, token_ids=token_ids, logprobs=logprobs)
            merged[new.index] = new
        return replace(later, outputs=[merged[index] for index in sorted(merged)])


class Detokenizer:
    """Turns one sample's tokens into text as they arrive; a token's cost does not grow with the text.

    Never emits half a UTF-8 character: its bytes wait until it is complete. While the sample runs,
    what may be the beginning of a stop string is held back, so that nothing shown is ever taken back.

    Args:
        tokenizer: None leaves the text empty.
        prompt_token_ids: its end is shown to the decoder, so that the output's leading space is kept.
        params: stop strings and what to do with special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = params.stop_strings
        self.include_stop = params.include_stop_str_in_output
        # All but the last character of a stop string may stand at the end without ending the text.
        self.num_held_back = max(map(len, self.stop_strings), default=1) - 1
        self.pieces: list[str] = []  # text that can no longer change
        self.num_taken = 0  # pieces handed out by new_text()
        self.held_back = ""  # the text's end while the sample runs
        if tokenizer is not None:
            self.skip_special_tokens = params.skip_special_tokens
            self.prompt_end = self._whole_characters(prompt_token_ids)
            self.stream = self._new_stream()

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add a token's text; returns the stop string it completed, the text being cut there."""
        if self.tokenizer is None:
            return None
        try:
            new = self.stream.step(self.tokenizer, token_id)
        except Exception as error:
            # Byte-fallback tokenizers may turn a whole character back into an invalid one when the
            # bytes behind it are invalid, which the stream refuses. Begin afresh, as vLLM does.
            if "Invalid prefix" not in str(error):
                raise
            self.stream = self._new_stream()
            new = self.stream.step(self.tokenizer, token_id)
        if not new:
            return None
        old = len(self.held_back)
        text = self.held_back + new
        # A match ends in the new text: one that lay before it was found, or not allowed, then.
        found = [
            (at, stop)
            for stop in self.stop_strings
            if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if found and may_stop:
            at, stop = min(found, key=lambda pair: pair[0])
            self.held_back = text[: at + len(stop) if self.include_stop else at]
            return stop
        safe = max(0, len(text) - self.num_held_back)
        self.pieces.append(text[:safe])
        self.held_back = text[safe:]
        return None

    def finish(self) -> None:
        """No more tokens will come: what was held back is text."""
        self.pieces.append(self.held_back)
        self.held_back = ""

    def new_text(self) -> str:
        """The text that came since the last call."""
        new, self.num_taken = "".join(self.pieces[self.num_taken :]), len(self.pieces)
        return new

    @property
    def text(self) -> str:
        """All the text so far."""
        return "".join(self.pieces)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self.prompt_end, skip_special_tokens=self.skip_special_tokens)

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        """A short end of the prompt that does not begin or end inside a character."""
        assert self.tokenizer is not None
        for length in range(4, 24):
            suffix = token_ids[-length:]
            if "\ufffd" not in self.tokenizer.decode(suffix, skip_special_tokens=False):
                return suffix
        return []
