"""From tokens to text, as they arrive."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from nanoengine.outputs import Logprob
from nanoengine.sampling_params import SamplingParams

MAX_PENDING = 32  # tokens without text that a detokenizer waits for


class TokenTexts(dict[int, str]):
    """By token id, the text of a token that has the same one wherever it stands; empty for all others.

    A byte-level tokenizer's text is its tokens' bytes one after the other. So a token of whole characters is
    such a one, if those before it end no less whole. Other tokenizers have none: they may drop a space.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.is_byte_level = isinstance(tokenizer.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str:
        """Decode a token the first time."""
        text = ""
        if self.is_byte_level:
            text = self.tokenizer.decode([token_id], skip_special_tokens=self.skip_special_tokens)
        self[token_id] = text = "" if "\ufffd" in text else text
        return text


class Detokenizer:
    """Turns one sample's tokens into text as they arrive; a token's cost does not grow with the text.

    Never emits half a UTF-8 character: its bytes wait until it is complete, but not in more than
    `MAX_PENDING` tokens. While the sample runs, what may be the beginning of a stop string is held back,
    so that nothing shown is ever taken back.

    Args:
        tokenizer: what decodes.
        prompt_token_ids: its end is shown to the decoder, so that the output's leading space is kept.
        params: stop strings, when they count, and what to do with special tokens.
        texts: the tokenizer's, shared with other samples.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        params: SamplingParams,
        texts: TokenTexts | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.texts = TokenTexts(tokenizer, params.skip_special_tokens) if texts is None else texts
        self.params = params
        # All but the last character of a stop string may stand at the end without ending the text.
        self.num_held_back = max(map(len, params.stop_strings), default=1) - 1
        self.num_tokens = 0
        self.pieces: list[str] = []  # text that can no longer change
        self.num_taken = 0  # pieces handed out by new_text()
        self.held_back = ""  # the text's end while the sample runs
        self.prompt_end = self._whole_characters(prompt_token_ids)
        self.stream = self._new_stream()
        # The last tokens, which brought no text yet: they end inside a character.
        self.pending: list[int] = []

    def append(self, token_id: int, is_stop_id: bool = False) -> str | None:
        """Add a token's text; returns the stop string it completed, the text being cut there.

        A stop string counts from the first token after min_tokens. The text of the token that ends a
        sequence (is_stop_id) is no part of its output, unless include_stop_str_in_output asks for it.
        """
        self.num_tokens += 1
        if is_stop_id and not self.params.include_stop_str_in_output:
            return None
        # Text of its own, where no character is incomplete; else what the stream makes of it.
        new = (not self.pending and self.texts[token_id]) or self._decode(token_id)
        if not new:
            return None
        if not self.params.stop_strings:
            self.pieces.append(new)
            return None
        return self._take(new)

    def _take(self, new: str) -> str | None:
        """Add text, what may begin a stop string held back; returns the stop string it completed."""
        old = len(self.held_back)
        text = self.held_back + new
        # A match ends in the new text: one that lay before it was found, or not allowed, then.
        found = [
            (at, stop)
            for stop in self.params.stop_strings
            if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        min_tokens = self.params.min_tokens
        if found and (self.num_tokens > min_tokens or min_tokens == 0):
            at, stop = min(found, key=lambda pair: pair[0])
            self.held_back = text[: at + len(stop) if self.params.include_stop_str_in_output else at]
            return stop
        safe = max(0, len(text) - self.num_held_back)
        self.pieces.append(text[:safe])
        self.held_back = text[safe:]
        return None

    def finish(self) -> None:
        """No more tokens will come: what was held back is text, and the last token's whole characters."""
        if self.pending:
            end = self.tokenizer.decode(self.pending, skip_special_tokens=self.params.skip_special_tokens)
            self._take(end.rstrip("\ufffd"))
        self.pieces.append(self.held_back)
        self.held_back, self.pending = "", []

    def new_text(self) -> str:
        """The text that came since the last call."""
        first, self.num_taken = self.num_taken, len(self.pieces)
        return "".join(self.pieces[first:])

    @property
    def text(self) -> str:
        """All the text so far."""
        return "".join(self.pieces)

    def _decode(self, token_id: int) -> str | None:
        """The text that the token completes; None while a character is incomplete."""
        try:
            text: str | None = self.stream.step(self.tokenizer, token_id)
        except Exception as error:
            # Byte-fallback tokenizers may turn a whole character back into an invalid one when the
            # bytes behind it are invalid, which the stream refuses. Begin afresh, as vLLM does.
            if "Invalid prefix" not in str(error):
                raise
            self.stream, self.pending = self._new_stream(), []
            text = self.stream.step(self.tokenizer, token_id)
        if text is not None:
            self.pending.clear()
            return text
        self.pending.append(token_id)
        return self._decode_pending() if len(self.pending) > MAX_PENDING else None

    def _decode_pending(self) -> str:
        """The text of a run of invalid bytes (or of tokens without text), less what may be a beginning.

        The stream decodes the whole run for each token of it, so that a long one would take quadratic time.
        """

        def decode(token_ids: list[int]) -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=self.params.skip_special_tokens)

        pending, self.pending, self.stream = self.pending, [], self._new_stream()
        whole = decode(pending)
        for num_kept in (4, 5, 6, 7):  # a character has at most 4 bytes; the cut must not be inside one
            done, kept = decode(pending[:-num_kept]), pending[-num_kept:]
            if done + decode(kept) == whole:
                break
        return done + "".join(self._decode(token_id) or "" for token_id in kept)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self.prompt_end, skip_special_tokens=self.params.skip_special_tokens)

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        """A short end of the prompt that does not begin or end inside a character."""
        for length in range(4, 24):
            suffix = token_ids[-length:]
            if "\ufffd" not in self.tokenizer.decode(suffix, skip_special_tokens=False):
                return suffix
        return []


class Vocabulary:
    """The texts of an engine's tokens; it decodes each token once.

    Args:
        tokenizer: of transformers; None: tokens have no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.names: dict[int, str] = {}  # by token id, what log-probabilities call the token
        self.texts: dict[bool, TokenTexts] = {}  # by whether special tokens are skipped

    def name(self, entries: Iterable[dict[int, Logprob]]) -> None:
        """Write the text of each token into its log-probability."""
        if self.tokenizer is None:
            return
        for entry in entries:
            for token_id, logprob in entry.items():
                if token_id not in self.names:
                    self.names[token_id] = self.tokenizer.decode([token_id])
                logprob.decoded_token = self.names[token_id]

    def detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        """Return what makes text of a sample's tokens; None if there is or shall be no text."""
        if self.tokenizer is None or not params.detokenize:
            return None
        backend, skips = self.tokenizer.backend_tokenizer, params.skip_special_tokens
        if skips not in self.texts:
            self.texts[skips] = TokenTexts(backend, skips)
        return Detokenizer(backend, prompt_token_ids, params, self.texts[skips])
