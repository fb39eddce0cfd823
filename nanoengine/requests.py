"""Checks requests, and turns the tokens of sequences into outputs."""

import logging
import math
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from xxhash import xxh3_64_intdigest

from nanoengine.checkpoints.checkpoint import Checkpoint
from nanoengine.config import EngineConfig
from nanoengine.detokenizer import Vocabulary
from nanoengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanoengine.sampling_params import RequestOutputKind, SamplingParams


class TextPrompt(TypedDict):
    """Gives a prompt as text. The name is vLLM's."""

    prompt: str


class TokensPrompt(TypedDict):
    """Gives a prompt as token ids, with an optional text to show in outputs. The name is vLLM's."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


LONG_TEXT, PIECE = 2**16, 2**14  # a longer text is first tokenized in pieces; both in characters
USUAL_CHARS = 8  # few tokens have more characters than this
AFTER = " \n\t" + string.punctuation  # a word's tokens can depend on the character before it

Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | dict[str, Any]

# ---- From a user's input to a checked request ----------------------------------------------------


class PromptTooLongError(ValueError):
    """Raised when a prompt has more tokens than fit. `num_tokens` is a lower bound if it has far more."""

    def __init__(self, message: str, num_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.num_tokens, self.limit = num_tokens, limit


class CheckedRequest(NamedTuple):
    """Holds a request that passed every check and can be queued."""

    text: str | None  # the prompt's text; None if it was given as token ids
    token_ids: list[int]
    params: SamplingParams
    priority: int
    stop_ids: frozenset[int]  # end-of-sequence and stop tokens: sampling one ends a sequence
    bad_words: tuple[tuple[int, ...], ...]  # params.bad_words as token ids
    processors: tuple[Callable[[], Any], ...] = ()  # make a sample's `RowProcessor`s
    new_parser: Callable[[], Any] | None = None  # makes what has a sample's `Detokenizer.content_of`


class RequestChecker:
    """Validates requests completely, before any part of them is queued."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, max_model_len: int, blocks: Any) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.max_model_len = max_model_len
        self.blocks = blocks  # the engine's BlockManager, for the size of the KV cache
        self.max_prompt_len = max_model_len - 1  # a prompt must leave room for one output token
        self._has_warned = False  # of a prompt with two BOS
        self._bad_word_ids = lru_cache(64)(bad_word_ids)  # requests often share a list

    def encode(
        self, text: str, add_special_tokens: bool = True, *, is_cut: bool = False, num_kept: int | None = None
    ) -> list[int]:
        """Tokenize a prompt's text. Raises ValueError if it is far too long, or the tokenizer fails on it.

        A text that is probably too long is first tokenized in pieces, and rejected as soon as they have far
        more tokens than fit, so a text of many megabytes is rejected early. With is_cut, any length is
        accepted, because the prompt is truncated later. If only the last `num_kept` tokens are kept then, a
        long text's end is tokenized from two places on, until both agree on one token more than these.
        """
        tokenizer, num_chars, num_tokens = self.checkpoint.tokenizer, len(text), 0
        is_long = num_chars > max(LONG_TEXT, USUAL_CHARS * self.max_prompt_len)
        encode = partial(tokenizer, add_special_tokens=add_special_tokens)
        with panics_as_errors("prompt"):
            size, last = max(LONG_TEXT, USUAL_CHARS * (num_kept or 0)), list[int]()
            while is_cut and num_kept is not None and size < num_chars:
                before, last = last, encode(text[-size:]).input_ids[-num_kept - 1 :]
                if len(last) > num_kept and last == before:
                    return [*last]
                size *= 2
            for i in range(0, num_chars, PIECE) if is_long and not is_cut else ():
                num_tokens += len(tokenizer(text[i : i + PIECE], add_special_tokens=False).input_ids)
                if num_tokens > 2 * self.max_prompt_len:  # cutting adds only a few tokens
                    text = f"prompt has {num_chars} characters, which is too many tokens for max_model_len="
                    text += f"{self.max_model_len}; shorten it or raise max_model_len"
                    raise PromptTooLongError(text, num_tokens, self.max_prompt_len)
            token_ids: list[int] = encode(text).input_ids
        is_twice = len(token_ids) > 1 and token_ids[0] == token_ids[1]
        if is_twice and not self._has_warned and token_ids[0] == getattr(tokenizer, "bos_token_id", None):
            self._has_warned = True
            message = "a prompt begins with %s, and the tokenizer adds one more: leave it out of the text"
            logging.getLogger(__name__).warning(message, tokenizer.bos_token)
        return token_ids

    def encoder_for(self, params: SamplingParams) -> Callable[..., list[int]]:
        """Return `encode` for a prompt that the parameters may truncate."""
        limit = params.truncate_prompt_tokens
        num_kept = self.max_prompt_len if limit == -1 else limit
        return partial(self.encode, is_cut=limit is not None, num_kept=num_kept)

    def check(self, prompt: Any, params: Any, priority: Any) -> CheckedRequest:
        """Validate a request, and return it with token ids and its own copy of the parameters.

        Raises:
            ValueError, TypeError: the request cannot be served. The message names the field.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {params!r}")
        params = params.clone()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an integer, got {priority!r}")
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise ValueError(f'priority must be 0 without scheduling_policy="priority", got {priority}')
        tokenizer, vocab_size = self.checkpoint.tokenizer, self.checkpoint.vocab_size
        params.check_vocabulary(vocab_size)
        allowed = vocab_size if self.config.max_logprobs == -1 else min(self.config.max_logprobs, vocab_size)
        hint = "raise max_logprobs, -1 allows all" if allowed < vocab_size else "the size of the vocabulary"
        for name, part in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            num = getattr(params, name) or 0
            if (vocab_size if num == -1 else num) > allowed:
                reason = f"requested {part} logprobs of {num}, which is greater than max allowed: {allowed}"
                raise ValueError(f"{name}: {reason}; {hint}")
        for name in ("stop", "bad_words"):
            if getattr(params, name) and tokenizer is None:
                raise ValueError(f"{name} needs a tokenizer, and the checkpoint has none")
        eos = () if params.ignore_eos else self.checkpoint.eos_token_ids
        stop_ids = frozenset((*eos, *(params.stop_token_ids or ())))
        if params.structured_outputs is not None and not stop_ids:
            hint = "drop ignore_eos or set stop_token_ids"
            raise ValueError(f"structured_outputs needs a token that ends the output: {hint}")
        encode = None if tokenizer is None else self.encoder_for(params)
        text, token_ids = read_prompt(prompt, encode, vocab_size)
        if (limit := params.truncate_prompt_tokens) == -1:
            limit = max(1, self.max_prompt_len - ((params.max_tokens or 1) - 1))
        if limit is not None and len(token_ids) > limit:
            text, token_ids = None, token_ids[-limit:]
        self._check_length(len(token_ids))
        words = tuple(params.bad_words or ())
        bad_words = self._bad_word_ids(words, tokenizer, vocab_size) if words else ()
        banned = {ids[0] for ids in bad_words if len(ids) == 1} | (stop_ids if params.min_tokens else set())
        if banned.issuperset(params.allowed_token_ids or range(vocab_size)):
            raise ValueError(
                f"min_tokens={params.min_tokens} bans end-of-sequence and stop tokens, and "
                f"bad_words={params.bad_words} bans others: no token is left of "
                f"allowed_token_ids={params.allowed_token_ids}"
            )
        return CheckedRequest(text, token_ids, params, priority, stop_ids, bad_words)

    def _check_length(self, num_prompt_tokens: int) -> None:
        """Raise ValueError if a prompt of this length can never be computed."""
        if num_prompt_tokens == 0:
            raise ValueError("prompt is empty; at least one token is needed")
        tokens = f"prompt has {num_prompt_tokens} tokens but"
        if num_prompt_tokens > self.max_prompt_len:
            reserved = " with an output token" if self.max_prompt_len < self.max_model_len else ""
            what = f"max_model_len is {self.max_model_len}{reserved}; shorten it or raise max_model_len"
            raise PromptTooLongError(f"{tokens} {what}", num_prompt_tokens, self.max_prompt_len)
        if num_prompt_tokens > (limit := self.blocks.max_computable_tokens):
            blocks = f"{self.blocks.num_blocks} blocks of {self.blocks.block_size}"
            what = f"the KV cache holds {limit} ({blocks}); shorten it or raise num_kv_blocks"
            raise PromptTooLongError(f"{tokens} {what}", num_prompt_tokens, limit)


def split_prompts(prompts: Any) -> list[Any]:
    """Return one or several prompts as a list. A list of integers is one prompt, an empty list is none."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise TypeError(f"prompts must be a string, token ids, a dict or a list of these, got {prompts!r}")
    return [prompts] if prompts and isinstance(prompts[0], int | np.integer) else list(prompts)


def read_prompt(
    prompt: Any, encode: Callable[[str], list[int]] | None, vocab_size: int
) -> tuple[str | None, list[int]]:
    """Return a prompt's text, or None if unknown, and its token ids, all checked to be in the vocabulary."""
    if isinstance(prompt, dict):
        from nanoengine.unknown_arguments import without_unserved

        fields = without_unserved("a prompt dict", prompt, ("prompt", "prompt_token_ids"))
    else:
        fields = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    if not fields:
        raise ValueError(f'a prompt dict must hold "prompt" or "prompt_token_ids", got {list(prompt)}')
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt must be a string, got {text!r}")
    if token_ids is None and text is not None:
        if encode is None:
            raise ValueError("the checkpoint has no tokenizer; give the prompt as token ids")
        token_ids = encode(check_unicode("prompt", text))
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise TypeError(f"prompt must be a string, token ids or a dict, got {prompt!r}")
    return text, check_prompt_ids(token_ids, vocab_size)


def check_prompt_ids(token_ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Return a copy of a prompt's token ids as Python integers, without a Python loop over valid ones."""
    token_ids = list(token_ids)
    kinds = set(map(type, token_ids))
    if wrong := {kind for kind in kinds if kind is bool or not issubclass(kind, int | np.integer)}:
        first = next(one for one in token_ids if type(one) in wrong)
        raise TypeError(f"prompt must hold integer token ids only, got {first!r}")
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        first = next(one for one in token_ids if not 0 <= one < vocab_size)
        raise ValueError(f"prompt must hold token ids in [0, {vocab_size}), got {first}")
    return token_ids if kinds <= {int} else list(map(int, token_ids))


def check_unicode(name: str, text: str) -> str:
    """Return the text. Raises ValueError if it contains a lone surrogate, which tokenizers do not accept."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {text!r}: {error}") from None
    return text


@contextmanager
def panics_as_errors(name: str) -> Iterator[None]:
    """Turn a tokenizer's panic into ValueError. Rust's panic is a BaseException that cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(f"{name} cannot be read by the model's tokenizer: {error}") from error


def bad_word_ids(bad_words: Sequence[str], tokenizer: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return every token sequence that spells a word at the start of a text or after one of AFTER."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    texts = [f"0{character}" for character in AFTER]
    befores = {"": [[]], **{text: [encode(text), encode("0"), []] for text in texts}}
    results: dict[tuple[int, ...], None] = {}  # in order
    for word in bad_words:
        bare_word, spellings = check_unicode("bad_words", word).lstrip(), dict[tuple[int, ...], None]()
        with panics_as_errors("bad_words"):
            for text, starts in befores.items():
                ids = encode(text + bare_word)
                # The character before the word is left out if it has tokens of its own.
                start = next(start for start in starts if ids[: len(start)] == start)
                spellings[tuple(ids[len(start) :])] = None
        spellings.pop((), None)
        if not spellings or max(map(max, spellings)) >= vocab_size:
            raise ValueError(
                f"bad_words must hold words that are token ids in [0, {vocab_size}), "
                f"got {word!r}, which is {' or '.join(str([*ids]) for ids in spellings) or []}"
            )
        results |= spellings
    return tuple(results)


def random_seed(params: SamplingParams, index: int, engine_seed: int, seq_id: int) -> int:
    """Return the 64-bit seed of a sample, derived from the request's seed or, without one, the engine's."""
    unseeded = params.seed is None or params.seed == -1
    source = f"{engine_seed} {seq_id}" if unseeded else f"{params.seed} sample {index}"
    return xxh3_64_intdigest(source.encode())


# ---- From sequences to outputs -------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Sample:
    """Tracks one sample of a request: its sequence, and how much of it was already returned."""

    index: int
    seq: Any  # the engine's Sequence, read-only here
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one per output token, if requested
    begun: bytes = b""  # part of a character, which the last of these tokens begin
    cumulative_logprob: float = 0.0
    num_taken: int = 0  # output tokens that `Request.take_tokens` has seen
    last_token_time: float | None = None  # seconds of time.monotonic()
    latencies: list[float] = field(default_factory=list)  # seconds between steps that brought tokens
    num_shown: int = 0  # output tokens already returned
    finish_shown: bool = False

    @property
    def has_news(self) -> bool:
        """Whether the sample received a token or finished since its last output."""
        seq = self.seq
        return seq.num_output_tokens > self.num_shown or (seq.is_finished and not self.finish_shown)

    def output(self, delta: bool, with_logprobs: bool) -> CompletionOutput:
        """Return the output so far or, with delta, what is new since the last call."""
        seq, text = self.seq, ""
        is_finished = seq.finish_reason is not None
        if (detokenizer := seq.detokenizer) is not None:
            if is_finished and not self.finish_shown:
                detokenizer.finish()
            text = detokenizer.new_text() if delta else detokenizer.text
        first, self.num_shown = self.num_shown if delta else 0, seq.num_output_tokens
        self.finish_shown = is_finished
        # Positional, as in `Request.output`: keywords take twice as long, for every streamed token.
        return CompletionOutput(
            self.index,
            text,
            seq.token_ids[seq.num_prompt_tokens + first :],
            self.cumulative_logprob if with_logprobs else None,
            self.logprobs[first:] if with_logprobs else None,
            seq.finish_reason,
            seq.stop_reason,
        )


class Request:
    """Tracks a request: its samples, its log-probabilities and its timestamps."""

    def __init__(
        self, request_id: Any, source: CheckedRequest, seqs: Sequence[Any], vocabulary: Vocabulary, inbox: Any
    ) -> None:
        self.request_id = request_id  # a string from a user, an integer from a call of `LLM`
        self.source = source
        self.vocabulary = vocabulary
        self.inbox = inbox  # receives the outputs, by `put`
        self.samples = {seq.seq_id: Sample(index, seq) for index, seq in enumerate(seqs)}
        # Finished sequences are popped from the end only, so some may remain: see `finished`.
        self._unfinished = list(seqs)
        # One entry per prompt token, added chunk by chunk. The first token has no prediction.
        self.prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._begun = b""  # part of a character, before the next entry
        if source.params.prompt_logprobs is not None:
            self._begun = vocabulary.bytes.name_entries([{source.token_ids[0]: Logprob(0.0)}])
        # Outputs share this object and the list above, so they are replaced and never changed.
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.has_shown_prompt = False  # whether an output had the prompt's log-probabilities
        self.is_streamed = source.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def finished(self) -> bool:
        """Whether all samples are finished."""
        unfinished = self._unfinished
        while unfinished and unfinished[-1].finish_reason is not None:
            unfinished.pop()
        return not unfinished

    @property
    def has_news(self) -> bool:
        """Whether a sample received a token or finished since the last output."""
        return any(sample.has_news for sample in self.samples.values())

    def take_tokens(self, seq: Any, logprobs: Sequence[dict[int, Logprob]], now: float) -> int:
        """Record a sequence's new tokens, which it has already, or its failure. Return how many are new."""
        if self.metrics.first_token_time is None:
            self.metrics = replace(self.metrics, first_token_time=now)
        sample = self.samples[seq.seq_id]
        if sample.last_token_time is not None:
            sample.latencies.append(now - sample.last_token_time)
        sample.last_token_time = now
        first, sample.num_taken = sample.num_taken, seq.num_output_tokens
        if logprobs:
            new = seq.token_ids[seq.num_prompt_tokens + first :]
            for token_id, entry in zip(new, logprobs, strict=False):  # some entries may be unused
                sample.begun = self.vocabulary.bytes.name_entries([entry], sample.begun)
                sample.logprobs.append(entry)
                sample.cumulative_logprob += entry[token_id].logprob
        if seq.finish_reason is not None and self.finished:
            self.metrics = replace(self.metrics, finished_time=now)
        return sample.num_taken - first

    def take_prompt_report(self, report: Any) -> bool:
        """Add log-probabilities of prompt tokens, unless they are known from before a preemption.

        Returns whether a new one is NaN. A NaN among a row's logits makes all of the row NaN.
        """
        first, entries = report
        new = entries[len(self.prompt_logprobs) - first :]
        self._begun = self.vocabulary.bytes.name_entries(new, self._begun)
        self.prompt_logprobs = [*self.prompt_logprobs, *new] if new else self.prompt_logprobs
        return any(math.isnan(next(iter(entry.values())).logprob) for entry in new)

    def output(self) -> RequestOutput:
        """Return the request's current output. For DELTA, it holds only samples and tokens that are new."""
        source = self.source
        params = source.params
        delta, with_logprobs = params.output_kind is RequestOutputKind.DELTA, params.logprobs is not None
        outputs, num_preemptions, metrics = [], 0, self.metrics
        for sample in self.samples.values():
            num_preemptions += sample.seq.num_preemptions
            if not delta or sample.has_news:
                outputs.append(sample.output(delta, with_logprobs))
        first = next(iter(self.samples.values())).seq
        num_cached_tokens = first.num_cached_tokens or 0
        if metrics.num_preemptions != num_preemptions or metrics.first_scheduled_time is None:
            counts = {"num_cached_tokens": num_cached_tokens, "num_preemptions": num_preemptions}
            metrics = replace(metrics, first_scheduled_time=first.first_scheduled_time, **counts)
            self.metrics = metrics
        shows_prompt = params.prompt_logprobs is not None and not (delta and self.has_shown_prompt)
        self.has_shown_prompt = True
        return RequestOutput(
            self.request_id,
            source.text,
            source.token_ids,
            outputs,
            self.finished,
            num_cached_tokens,
            self.prompt_logprobs if shows_prompt else None,
            metrics,
            delta,
        )
