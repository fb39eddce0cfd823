"""Turns tokens into text, as they arrive."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from nanoengine.sampling_params import SamplingParams

if TYPE_CHECKING:  # at run time it is imported for log-probabilities
    from nanoengine.token_bytes import TokenBytes

MAX_PENDING = 32  # limit on consecutive tokens that complete no text
ContentOf = Callable[[str], str]


class TokenTexts(dict[int, str]):
    """Maps a token id to the token's text if that text is the same in any context, else to "".

    A byte-level tokenizer's text is the concatenation of its tokens' bytes, so a token of whole characters
    has a fixed text after whole characters. Other tokenizers have none: their decoders may drop a space.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.is_byte_level = isinstance(tokenizer.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str:
        """Decode a token at its first use."""
        text = ""
        if self.is_byte_level:
            text = self.tokenizer.decode([token_id], skip_special_tokens=self.skip_special_tokens)
        self[token_id] = text = "" if "\ufffd" in text else text
        return text


class Detokenizer:
    """Turns one sample's tokens into text as they arrive. The cost per token does not grow with the text.

    It never emits part of a UTF-8 character: bytes wait until the character is complete, for at most
    `MAX_PENDING` tokens. While the sample runs, text that may begin a stop string is held back, so that no
    emitted text has to be withdrawn. The decoder sees the prompt's end, to keep the output's leading space.

    `content_of` returns the part of new text in which stop strings count, such as an answer's content without
    its reasoning. If it is given, the text is not cut at a stop string: its reader cuts the content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        params: SamplingParams,
        texts: TokenTexts | None = None,  # shared between samples
        content_of: ContentOf | None = None,
    ) -> None:
        self.tokenizer, self.content_of, self.params = tokenizer, content_of, params
        self.texts = TokenTexts(tokenizer, params.skip_special_tokens) if texts is None else texts
        self.decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        # The text may end with all but the last character of a stop string.
        self.num_held_back = max(map(len, params.stop_strings), default=1) - 1
        self.num_tokens = 0
        self.pieces: list[str] = []  # text that can no longer change
        self.num_taken = 0  # number of pieces that new_text() has returned
        self.held_back = ""  # the end of the text, which may begin a stop string
        self.prompt_end = self._whole_characters(prompt_token_ids)
        self.stream = self._new_stream()
        # The last tokens, if they have produced no text yet because they end inside a character.
        self.pending: list[int] = []

    def append(self, token_id: int, is_stop_id: bool = False) -> str | None:
        """Add a token's text. Returns the stop string that it completes, if any, and cuts the text there.

        Stop strings are ignored in the first min_tokens tokens. The text of the stop token that ends a
        sequence (is_stop_id) is not part of the output, unless include_stop_str_in_output is set.
        """
        self.num_tokens += 1
        if is_stop_id and not self.params.include_stop_str_in_output:
            return None
        # Use the token's fixed text if there is one and no character is incomplete, else decode.
        new = (not self.pending and self.texts[token_id]) or self._decode(token_id)
        if not new:
            return None
        return self._add(new)

    def _add(self, new: str) -> str | None:
        """Add text, and hold back its end if there are stop strings. Returns the stop string it completes."""
        params = self.params
        if not params.stop_strings:
            self.pieces.append(new)
            return None
        stop: str | None = None
        old, content = len(self.held_back), new if self.content_of is None else self.content_of(new)
        text = self.held_back + content
        safe = max(0, len(text) - self.num_held_back)
        shown, self.held_back = text[:safe], text[safe:]
        if self.num_tokens > params.min_tokens or params.min_tokens == 0:
            # A match must end in the new text: an earlier one was already found, or was ignored.
            starts = [(text.find(one, max(0, old - len(one) + 1)), one) for one in params.stop_strings]
            if found := [pair for pair in starts if pair[0] >= 0]:
                at, stop = min(found, key=lambda pair: pair[0])
                shown, self.held_back = "", text[: at + len(stop) * params.include_stop_str_in_output]
        self.pieces.append(shown if self.content_of is None else new)
        return stop

    def finish(self) -> None:
        """End the output: emit the text held back, and the whole characters of the pending tokens."""
        if self.pending:
            self._add(self.decode(self.pending).rstrip("\ufffd"))
        if self.content_of is None:
            self.pieces.append(self.held_back)
        self.held_back, self.pending = "", []

    def new_text(self) -> str:
        """Return the text added since the last call."""
        first, self.num_taken = self.num_taken, len(self.pieces)
        return "".join(self.pieces[first:])

    @property
    def text(self) -> str:
        """The whole text so far. The pieces are joined, so that the next call has few of them to join."""
        parts = self.pieces[: self.num_taken], self.pieces[self.num_taken :]
        self.pieces, self.num_taken = ["".join(part) for part in parts], 1
        return "".join(self.pieces)

    def _decode(self, token_id: int) -> str | None:
        """Return the text that a token completes, or None if the token ends inside a character."""
        try:
            text: str | None = self.stream.step(self.tokenizer, token_id)
        except Exception as error:
            # A byte-fallback tokenizer may turn a whole character into an invalid one if invalid bytes
            # follow. The stream raises an error then. Start a new stream, as vLLM does.
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
        """Return the text of a long run of invalid bytes or of tokens without text, and start a new stream.

        The last few tokens stay pending if they may begin a character. The stream decodes the whole run again
        for each of its tokens, so a run without a limit would take quadratic time.
        """
        pending, self.pending, self.stream = self.pending, [], self._new_stream()
        whole = self.decode(pending)
        for num_kept in (4, 5, 6, 7):  # a character has up to 4 bytes; do not cut inside one
            done, kept = self.decode(pending[:-num_kept]), pending[-num_kept:]
            if done + self.decode(kept) == whole:
                break
        return done + "".join(self._decode(token_id) or "" for token_id in kept)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self.prompt_end, skip_special_tokens=self.params.skip_special_tokens)

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        """Return a short suffix of the prompt that does not begin or end inside a character."""
        for length in range(4, 24):
            suffix = token_ids[-length:]
            if "\ufffd" not in self.tokenizer.decode(suffix, skip_special_tokens=False):
                return suffix
        return []


class Vocabulary:
    """Caches the texts of an engine's tokens, so that each token is decoded only once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer  # transformers' tokenizer; None: tokens have no text
        self.texts: dict[bool, TokenTexts] = {}  # skip_special_tokens -> texts

    @cached_property
    def bytes(self) -> "TokenBytes":
        """The `TokenBytes`, created when the first log-probabilities are named."""
        from nanoengine.token_bytes import TokenBytes

        return TokenBytes(self.tokenizer)

    def detokenizer(
        self, prompt_token_ids: list[int], params: SamplingParams, content_of: ContentOf | None = None
    ) -> Detokenizer | None:
        """Return a detokenizer for a sample, or None without a tokenizer or with detokenize=False."""
        if self.tokenizer is None or not params.detokenize:
            return None
        backend, skips = self.tokenizer.backend_tokenizer, params.skip_special_tokens
        if skips not in self.texts:
            self.texts[skips] = TokenTexts(backend, skips)
        return Detokenizer(backend, prompt_token_ids, params, self.texts[skips], content_of)
