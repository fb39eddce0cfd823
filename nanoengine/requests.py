"""A request's life: a prompt in any form, checked; its samples; outputs as they are handed over."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from torch import Tensor
from xxhash import xxh3_64_intdigest

from nanoengine.compat import without_unserved
from nanoengine.config import EngineConfig
from nanoengine.detokenizer import Vocabulary
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanoengine.sampling_params import RequestOutputKind, SamplingParams


class TextPrompt(TypedDict):
    """A prompt as text, under vLLM's name."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, and its text where that is to be shown, under vLLM's name."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


MAX_RENDERED = 2**26  # characters that a chat template may write
LONG_TEXT, PIECE = 2**16, 2**14  # characters of a text that is not tokenized at once, and of its pieces
USUAL_CHARS = 8  # a token seldom stands for more characters

Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | dict[str, Any]

# ---- From what a user writes to a checked request ------------------------------------------------


class CheckedRequest(NamedTuple):
    """A request that passed every check and can be queued."""

    text: str | None  # of the prompt; None where it was given as token ids
    token_ids: list[int]
    params: SamplingParams
    priority: int
    stop_ids: frozenset[int]  # end-of-sequence and stop tokens: sampling one ends a sequence
    bad_words: tuple[tuple[int, ...], ...]  # params.bad_words as token ids
    processors: tuple[Callable[[], Any], ...] = ()  # make what else edits a sample's logits: `RowProcessor`s


class RequestChecker:
    """Validates requests completely before anything of them is queued.

    Args:
        checkpoint: its tokenizer and vocabulary decide what a prompt may hold.
        config: says whether priorities are served.
        max_model_len: tokens of a prompt and its output.
        num_blocks, block_size: of the KV cache.
        max_computable_tokens: what the KV cache holds of a sequence that is alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        max_computable_tokens: int,
    ) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.max_model_len, self.num_blocks, self.block_size = max_model_len, num_blocks, block_size
        self.max_computable_tokens = max_computable_tokens
        # Tokens of a prompt: an output token has to fit too, but where none is wanted.
        self.max_prompt_len = max_model_len - (checkpoint.pooling is None)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, is_cut: bool = False, pair: str | None = None
    ) -> list[int]:
        """Return a prompt's text as token ids.

        A text with more characters than usually fit is tokenized in pieces first, and refused when these are
        far more tokens than fit. So megabytes are refused by their first part.

        Args:
            text: of the prompt.
            add_special_tokens: add those that the tokenizer adds.
            is_cut: the prompt is cut afterwards, so any length fits.
            pair: a second text, which the tokenizer joins to the first.

        Raises:
            ValueError: it is far too long, or the tokenizer fails on it.
        """
        tokenizer, texts = self.checkpoint.tokenizer, (text, pair or "")
        num_chars, num_tokens = sum(map(len, texts)), 0
        is_long = num_chars > max(LONG_TEXT, USUAL_CHARS * self.max_prompt_len)
        with panics_as_errors("prompt"):
            for one in texts if is_long and not is_cut else ():
                for i in range(0, len(one), PIECE):
                    num_tokens += len(tokenizer(one[i : i + PIECE], add_special_tokens=False).input_ids)
                    if num_tokens > 2 * self.max_prompt_len:  # cuts make a few tokens more, not twice as many
                        raise ValueError(
                            f"prompt has {num_chars} characters, which are more tokens than max_model_len="
                            f"{self.max_model_len} leaves for it; shorten it or raise max_model_len"
                        )
            token_ids: list[int] = tokenizer(
                text, text_pair=pair, add_special_tokens=add_special_tokens
            ).input_ids
        return token_ids

    def check(self, prompt: Any, params: Any, priority: Any) -> CheckedRequest:
        """The request in the engine's terms, with a copy of the parameters of its own.

        Raises:
            ValueError, TypeError: it cannot be served; the message names the field.
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
        most = vocab_size if self.config.max_logprobs == -1 else self.config.max_logprobs
        for name, whose in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            asked = getattr(params, name) or 0
            if (vocab_size if asked == -1 else asked) > most:
                raise ValueError(
                    f"{name}: requested {whose} logprobs of {asked}, which is greater than max allowed: "
                    f"{most}; raise max_logprobs, or set it to -1 to allow all"
                )
        for name in ("stop", "bad_words"):
            if getattr(params, name) and tokenizer is None:
                raise ValueError(f"{name} needs a tokenizer and the checkpoint has none")
        eos = () if params.ignore_eos else self.checkpoint.eos_token_ids
        stop_ids = frozenset((*eos, *(params.stop_token_ids or ())))
        if params.structured_outputs is not None and not stop_ids:
            raise ValueError(
                "structured_outputs need a token that ends the answer: drop ignore_eos, or set stop_token_ids"
            )
        most = params.truncate_prompt_tokens
        encode = partial(self.encode, is_cut=most is not None) if tokenizer is not None else None
        text, token_ids = read_prompt(prompt, encode, vocab_size)
        if most == -1:
            most = max(1, self.max_prompt_len - ((params.max_tokens or 1) - 1))
        if most is not None and len(token_ids) > most:
            text, token_ids = None, token_ids[-most:]
        self._check_length(len(token_ids))
        bad_words = bad_word_ids(params.bad_words or [], tokenizer, vocab_size)
        banned = {ids[0] for ids in bad_words if len(ids) == 1} | (stop_ids if params.min_tokens else set())
        if banned.issuperset(params.allowed_token_ids or range(vocab_size)):
            raise ValueError(
                f"min_tokens={params.min_tokens} bans end-of-sequence and stop tokens, and bad_words="
                f"{params.bad_words} ban others: none is left of allowed_token_ids={params.allowed_token_ids}"
            )
        return CheckedRequest(text, token_ids, params, priority, stop_ids, bad_words)

    def _check_length(self, num_prompt_tokens: int) -> None:
        """Raise ValueError where a prompt of that length could never get an answer."""
        if num_prompt_tokens == 0:
            raise ValueError("prompt is empty; at least one token is needed")
        if num_prompt_tokens > self.max_prompt_len:
            too = (
                "" if self.max_prompt_len == self.max_model_len else ", which has to hold an output token too"
            )
            raise ValueError(
                f"prompt has {num_prompt_tokens} tokens but max_model_len is {self.max_model_len}{too}; "
                "shorten it or raise max_model_len"
            )
        if num_prompt_tokens > self.max_computable_tokens:
            raise ValueError(
                f"prompt has {num_prompt_tokens} tokens but the KV cache holds {self.max_computable_tokens} "
                f"({self.num_blocks} blocks of {self.block_size}); shorten it or raise num_kv_blocks"
            )


def split_prompts(prompts: Any) -> list[Any]:
    """One or several prompts as a list; a list of integers is one prompt, an empty one is none."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise TypeError(f"prompts must be a string, token ids, a dict or a list of these, got {prompts!r}")
    return [prompts] if prompts and isinstance(prompts[0], int | np.integer) else list(prompts)


def read_prompt(
    prompt: Any, encode: Callable[[str], list[int]] | None, vocab_size: int
) -> tuple[str | None, list[int]]:
    """A prompt's text, where it is known, and its token ids, each in the vocabulary."""
    fields = prompt
    if isinstance(prompt, str):
        fields = {"prompt": prompt}
    elif not isinstance(prompt, dict):
        fields = {"prompt_token_ids": prompt}
    else:
        fields = without_unserved("a prompt dict", prompt, ("prompt", "prompt_token_ids"))
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
    return text, check_token_ids(token_ids, vocab_size)


def check_token_ids(token_ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Return a copy of a prompt's token ids as integers of Python; without a Python loop over them.

    Raises:
        TypeError, ValueError: one of them is no integer, or not in the vocabulary.
    """
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
    """The text; ValueError where it holds half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {text!r}: {error}") from None
    return text


@contextmanager
def panics_as_errors(name: str) -> Iterator[None]:
    """Have a tokenizer that panics raise ValueError; Rust's panic is no Exception, nor can it be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(f"{name} cannot be read by the model's tokenizer: {error}") from error


def bad_word_ids(bad_words: Sequence[str], tokenizer: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell the words, at the start of a text and after a space, as in vLLM.

    Raises:
        ValueError: the tokenizer makes nothing of a word, or a token that the model does not have.
    """
    results = []
    for word in bad_words:
        bare_word = check_unicode("bad_words", word).lstrip()
        with panics_as_errors("bad_words"):
            bare = tuple(tokenizer.encode(bare_word, add_special_tokens=False))
            spaced = tuple(tokenizer.encode(" " + bare_word, add_special_tokens=False))
        if not bare or max(*bare, *spaced) >= vocab_size:
            raise ValueError(
                f"bad_words must hold words that are token ids in [0, {vocab_size}), "
                f"got {word!r}, which is {list(bare)}, after a space {list(spaced)}"
            )
        results.append(bare)
        # Where the space is a token of its own, the bare spelling is found behind it anyway.
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            results.append(spaced)
    return tuple(results)


def render_chats(
    messages: Any,
    tokenizer: Any,
    encode: Callable[[str, bool], list[int]] | None = None,
    /,
    **template_settings: Any,
) -> list[dict[str, Any]]:
    """One conversation or a list of them, each a list of messages, through the chat template.

    A message's content is a string or a list of text parts. Where the template wants strings, parts are
    joined by line ends, as in vLLM. `encode` is `RequestChecker.encode`; without it any length is taken.

    Raises:
        ValueError: the tokenizer has no template, a conversation is not a list of messages, or a content
            holds more than text.
    """
    if tokenizer is None or not (tokenizer.chat_template or template_settings.get("chat_template")):
        raise ValueError(
            "the checkpoint's tokenizer has no chat template; give chat_template or use generate"
        )
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of messages or of conversations, got {messages!r}")
    conversations = [messages] if isinstance(messages[0], dict) else messages
    prompts = []
    for conversation in conversations:
        for message in conversation:
            if not isinstance(message, dict) or "role" not in message:
                raise ValueError(
                    f'each of messages must be a dict with "role" and "content", got {message!r}'
                )
        # None is no text, as in vLLM; beside calls of tools it is for the template to look at.
        conversation = [
            message | {"content": ""} if is_empty(message) else message for message in conversation
        ]
        if any(isinstance(message.get("content"), list) for message in conversation):
            join = not reads_parts(tokenizer, template_settings.get("chat_template"))
            conversation = [with_text_only(message, join) for message in conversation]
        text = apply_template(tokenizer, conversation, **template_settings)
        # The template writes the special tokens itself.
        check_unicode("messages", text)
        token_ids = encode(text, False) if encode else tokenizer(text, add_special_tokens=False).input_ids
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts


def is_empty(message: dict[str, Any]) -> bool:
    """Whether a message says and asks for nothing: its content is None."""
    return message.get("content", "") is None and not message.get("tool_calls")


def apply_template(tokenizer: Any, conversation: Sequence[Any], **settings: Any) -> str:
    """The conversation as the chat template writes it.

    Raises:
        ValueError: the template, which is a program, raises, or writes too much.
    """
    try:
        text: str = tokenizer.apply_chat_template(conversation, tokenize=False, **settings)
    except Exception as error:
        raise ValueError(f"messages do not fit the model's chat template: {error!r}") from error
    if len(text) > MAX_RENDERED:
        raise ValueError(f"messages must be at most {MAX_RENDERED} characters by the chat template")
    return text


def with_text_only(message: dict[str, Any], join: bool) -> dict[str, Any]:
    """The message with a content of text parts, or of one string that joins them; ValueError for others."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in message["content"]]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'content must hold parts {{"type": "text", "text": ...}} only: images and audio are not '
                f"served, got {part!r:.80}"
            )
    return message | {"content": "\n".join(part["text"] for part in parts) if join else parts}


def reads_parts(tokenizer: Any, chat_template: str | None) -> bool:
    """Whether a template writes the text of a content's parts; one for strings fails, or writes a list."""
    probe = [{"role": "user", "content": [{"type": "text", "text": "probe-of-parts"}]}]
    try:
        text = apply_template(tokenizer, probe, chat_template=chat_template)
    except ValueError:  # whatever Jinja and the template make of a list where a string belongs
        return False
    return "probe-of-parts" in text and "'type'" not in text


def random_seed(params: SamplingParams, index: int, engine_seed: int, seq_id: int) -> int:
    """The 64 bits that seed a request's sample: from its own seed, or the engine's where it has none."""
    unseeded = params.seed is None or params.seed == -1
    source = f"{engine_seed} {seq_id}" if unseeded else f"{params.seed} sample {index}"
    return xxh3_64_intdigest(source.encode())


# ---- From sequences to outputs -------------------------------------------------------------------


class Sample:
    """One of a request's samples: a sequence of the engine, and what its user has seen of it."""

    __slots__ = (
        "cumulative_logprob",
        "finish_shown",
        "index",
        "last_token_time",
        "latencies",
        "logprobs",
        "num_shown",
        "num_taken",
        "seq",
    )

    def __init__(self, index: int, seq: Any) -> None:
        self.index = index
        self.seq = seq  # the engine's Sequence, only read here
        self.logprobs: list[dict[int, Logprob]] = []  # one entry per output token, where asked for
        self.cumulative_logprob = 0.0
        self.num_taken = 0  # output tokens that `Request.take_tokens` has seen
        self.last_token_time: float | None = None  # seconds of time.monotonic()
        self.latencies: list[float] = []  # seconds between a step that brought tokens and the one before
        self.num_shown = 0  # output tokens handed over
        self.finish_shown = False

    @property
    def has_news(self) -> bool:
        """Whether a token or the end came since its last output."""
        seq = self.seq
        return seq.num_output_tokens > self.num_shown or (seq.is_finished and not self.finish_shown)

    def output(self, delta: bool, with_logprobs: bool) -> CompletionOutput:
        """All so far, or what is new since the last call."""
        seq, text = self.seq, ""
        is_finished = seq.finish_reason is not None
        if (detokenizer := seq.detokenizer) is not None:
            if is_finished and not self.finish_shown:
                detokenizer.finish()
            text = detokenizer.new_text() if delta else detokenizer.text
        first, self.num_shown = self.num_shown if delta else 0, seq.num_output_tokens
        self.finish_shown = is_finished
        # By position, as in `Request.output`: names take twice the time, of every streamed token.
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
    """A user's request, its samples, and when things happened to it."""

    __slots__ = (
        "_unfinished",
        "is_streamed",
        "metrics",
        "pooled",
        "prompt_logprobs",
        "request_id",
        "samples",
        "source",
        "vocabulary",
    )

    def __init__(
        self, request_id: Any, source: CheckedRequest, seqs: Sequence[Any], vocabulary: Vocabulary
    ) -> None:
        self.request_id = request_id  # a user's are strings; `LLM` gives its own calls integers
        self.source = source
        self.vocabulary = vocabulary
        self.samples = {seq.seq_id: Sample(index, seq) for index, seq in enumerate(seqs)}
        self._unfinished = list(seqs)  # and some that are finished, but never the last of the list
        # One entry per prompt token, chunk by chunk; nothing predicts the first.
        self.prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self.pooled: Tensor | None = None
        # Outputs share it: where something happens there is a new one.
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.is_streamed = source.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def finished(self) -> bool:
        """Whether all its samples are finished."""
        unfinished = self._unfinished
        while unfinished and unfinished[-1].finish_reason is not None:
            unfinished.pop()
        return not unfinished

    @property
    def has_news(self) -> bool:
        """Whether a sample got a token or ended since the last output."""
        return any(sample.has_news for sample in self.samples.values())

    def take_tokens(self, seq: Any, logprobs: Sequence[dict[int, Logprob]], now: float) -> int:
        """Note what a step brought to one of the request's sequences: tokens, or the end by an error.

        Args:
            seq: the sequence, which has appended them.
            logprobs: their entries, and maybe more that are of no use; empty where not asked for.
            now: seconds of time.monotonic().

        Returns:
            How many tokens there were.
        """
        if self.metrics.first_token_time is None:
            self.metrics = replace(self.metrics, first_token_time=now)
        sample = self.samples[seq.seq_id]
        if sample.last_token_time is not None:
            sample.latencies.append(now - sample.last_token_time)
        sample.last_token_time = now
        first, sample.num_taken = sample.num_taken, seq.num_output_tokens
        if logprobs:
            new = seq.token_ids[seq.num_prompt_tokens + first :]
            for token_id, entry in zip(new, logprobs, strict=False):
                self.vocabulary.name([entry])
                sample.logprobs.append(entry)
                sample.cumulative_logprob += entry[token_id].logprob
        if seq.finish_reason is not None and self.finished:
            self.metrics = replace(self.metrics, finished_time=now)
        return sample.num_taken - first

    def take_prompt_report(self, report: Any) -> None:
        """Add log-probabilities of prompt tokens, from a position on; or what a prompt was pooled to.

        After a preemption the prompt is computed again: the entries that are known already are skipped.
        """
        if isinstance(report, Tensor):
            self.pooled = report
            return
        first, entries = report
        num_known = len(self.prompt_logprobs) - first
        self.vocabulary.name(entries[num_known:])
        self.prompt_logprobs += entries[num_known:]

    def output(self) -> RequestOutput:
        """The request as it is now; for DELTA only the samples and tokens that are new."""
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
            self.metrics = metrics = replace(
                metrics,
                first_scheduled_time=first.first_scheduled_time,
                num_cached_tokens=num_cached_tokens,
                num_preemptions=num_preemptions,
            )
        return RequestOutput(
            self.request_id,
            source.text,
            source.token_ids,
            outputs,
            self.finished,
            num_cached_tokens,
            list(self.prompt_logprobs) if params.prompt_logprobs is not None else None,
            metrics,
            delta,
            self.pooled,
        )
