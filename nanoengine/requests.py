"""A request, from the prompt in any form a user may write it to the outputs as they are handed over."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nanoengine.outputs import CompletionOutput, Detokenizer, RequestMetrics, RequestOutput
from nanoengine.sampling import Logprob, RequestOutputKind, SamplingParams

Prompt = str | Sequence[int] | dict[str, Any]


class CheckedRequest(NamedTuple):
    """A request that passed every check and can be queued."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int


def split_prompts(prompts: Any) -> list[Any]:
    """One or several prompts as a list; a list of integers is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise TypeError(f"prompts must be a string, token ids, a dict or a list of these, got {prompts!r}")
    if not prompts:
        raise ValueError("prompt is empty; at least one token is needed, got []")
    return [prompts] if isinstance(prompts[0], int | np.integer) else list(prompts)


def read_prompt(prompt: Any, tokenizer: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """A prompt's text, where it is known, and its token ids, each in the vocabulary."""
    fields = prompt
    if isinstance(prompt, str):
        fields = {"prompt": prompt}
    elif not isinstance(prompt, dict):
        fields = {"prompt_token_ids": prompt}
    if not fields or not fields.keys() <= {"prompt", "prompt_token_ids"}:
        raise ValueError(
            f'a prompt dict must hold "prompt" or "prompt_token_ids" and nothing else, got {list(fields)}'
        )
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt must be a string, got {text!r}")
    if token_ids is None and text is not None:
        if tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; give the prompt as token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt must be valid Unicode, got {text!r}: {error}") from None
        token_ids = tokenizer(text).input_ids
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise TypeError(f"prompt must be a string, token ids or a dict, got {prompt!r}")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise TypeError(f"prompt must hold integer token ids only, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"prompt must hold token ids in [0, {vocab_size}), got {token_id}")
    return text, [int(token_id) for token_id in token_ids]


def bad_word_ids(bad_words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell the words, at the start of a text and after a space, as in vLLM."""
    results = []
    for word in bad_words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        results.append(bare)
        # Where the space is a token of its own, the bare spelling is found behind it anyway.
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            results.append(spaced)
    return tuple(results)


def render_chats(messages: Any, tokenizer: Any, **template_settings: Any) -> list[dict[str, Any]]:
    """One conversation or a list of them, each a list of messages, through the chat template.

    Raises:
        ValueError: the tokenizer has no template, or a conversation is not a list of messages.
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
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **template_settings)
        # The template writes the special tokens itself.
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts


class Sample:
    """One of a request's samples: a sequence of the engine, and what its user has seen of it."""

    __slots__ = ("cumulative_logprob", "detokenizer", "finish_shown", "index", "logprobs", "num_shown", "seq")

    def __init__(self, index: int, seq: Any, tokenizer: Any, params: SamplingParams) -> None:
        self.index = index
        self.seq = seq  # the engine's Sequence, only read here
        self.detokenizer = Detokenizer(tokenizer, seq.token_ids, params)
        self.logprobs: list[dict[int, Logprob]] = []  # one entry per output token, where asked for
        self.cumulative_logprob = 0.0
        self.num_shown = 0  # output tokens handed over
        self.finish_shown = False

    @property
    def has_news(self) -> bool:
        """Whether a token or the end came since its last output."""
        seq = self.seq
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        return num_output_tokens > self.num_shown or (seq.finish_reason is not None and not self.finish_shown)

    def output(self, delta: bool, with_logprobs: bool) -> CompletionOutput:
        """All so far, or what is new since the last call."""
        seq, first = self.seq, self.num_shown if delta else 0
        if seq.finish_reason is not None and not self.finish_shown:
            self.detokenizer.finish()
            self.finish_shown = True
        token_ids = seq.token_ids[seq.num_prompt_tokens + first :]
        self.num_shown = len(seq.token_ids) - seq.num_prompt_tokens
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.new_text() if delta else self.detokenizer.text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob if with_logprobs else None,
            logprobs=self.logprobs[first:] if with_logprobs else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )


class Request:
    """A user's request, its samples, and when things happened to it."""

    __slots__ = ("is_driven", "metrics", "params", "prompt", "prompt_logprobs", "request_id", "samples")

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        seqs: Sequence[Any],
        tokenizer: Any,
        is_driven: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.is_driven = is_driven  # a generate() or stream() hands its outputs over, step() does not
        backend = tokenizer.backend_tokenizer if tokenizer is not None and params.detokenize else None
        self.samples = [Sample(index, seq, backend, params) for index, seq in enumerate(seqs)]
        self.prompt_logprobs: list[dict[int, Logprob] | None] = [None]  # grows chunk by chunk
        self.metrics = RequestMetrics(arrival_time=time.monotonic())

    @property
    def finished(self) -> bool:
        """Whether all its samples are finished."""
        return all(sample.seq.finish_reason is not None for sample in self.samples)

    @property
    def has_news(self) -> bool:
        """Whether a sample got a token or ended since the last output."""
        return any(sample.has_news for sample in self.samples)

    @property
    def is_due(self) -> bool:
        """Whether `LLM.step` should return it now."""
        if self.is_driven or not self.has_news:
            return False
        return self.params.output_kind is not RequestOutputKind.FINAL_ONLY or self.finished

    def output(self, kind: RequestOutputKind | None = None) -> RequestOutput:
        """The request as it is now; for DELTA only the samples and tokens that are new."""
        delta = (kind or self.params.output_kind) is RequestOutputKind.DELTA
        first = self.samples[0].seq
        self.metrics.num_cached_tokens = first.num_cached_tokens or 0
        self.metrics.num_preemptions = sum(sample.seq.num_preemptions for sample in self.samples)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[
                sample.output(delta, self.params.logprobs is not None)
                for sample in self.samples
                if sample.has_news or not delta
            ],
            finished=self.finished,
            num_cached_tokens=self.metrics.num_cached_tokens,
            prompt_logprobs=list(self.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
            metrics=replace(self.metrics),
        )
