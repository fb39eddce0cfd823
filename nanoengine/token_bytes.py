"""Finds the bytes of each token, and names the tokens of log-probabilities with them."""

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from nanoengine.outputs import Logprob


class TokenBytes(dict[int, bytes]):
    """Maps a token id to the bytes that the token adds to a text, which may be part of a character.

    Byte-level and byte-fallback tokens have their bytes in the vocabulary. Others are decoded after a word,
    because decoders treat the start of a text differently: they may drop a space, or keep WordPiece's prefix.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer  # transformers' tokenizer; None: tokens have no text
        self.added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self.backend: Any = None if tokenizer is None else tokenizer.backend_tokenizer
        self._whole: dict[int, str] = {}  # token id -> the text of a token of whole characters
        self.byte_of: dict[str, int] = {}  # symbol of a byte-level vocabulary -> byte
        if self.backend is not None and "ByteLevel" in repr(self.backend.decoder):
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            table = bytes_to_unicode()  # type: ignore[no-untyped-call]
            self.byte_of = {symbol: byte for byte, symbol in table.items()}

    def __missing__(self, token_id: int) -> bytes:
        """Look up a token at its first use."""
        text = (self.tokenizer and self.tokenizer.convert_ids_to_tokens(token_id)) or ""
        found: bytes = text.encode()
        if text and token_id not in self.added:
            if self.byte_of and all(symbol in self.byte_of for symbol in text):
                found = bytes(self.byte_of[symbol] for symbol in text)
            elif byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
                found = bytes.fromhex(byte[1])
            else:
                ids, before = self.word
                text = self.backend.decode([*ids, token_id], skip_special_tokens=False)
                found = text.removeprefix(before).encode()
        self[token_id] = found
        return found

    @cached_property
    def word(self) -> tuple[list[int], str]:
        """The first token that is a word, and its text."""
        for token_id in range(len(self.tokenizer)):
            if token_id not in self.added and (text := self.backend.decode([token_id])).isalnum():
                return [token_id], text
        return [], ""

    def name_entries(self, entries: Iterable[dict[int, Logprob]], begun: bytes = b"") -> bytes:
        """Fill in the text of each token in consecutive log-probability entries.

        The token that completes a character has all of it, and the tokens before have none. `begun` is the
        part of a character before the first entry. Returns the part after the last one.
        """
        if self.tokenizer is None:
            return b""
        for entry in entries:
            before, begun = begun, b""
            for i, (token_id, logprob) in enumerate(entry.items()):
                # The first is the token itself. Others may begin a character of their own instead.
                goes_on = before and (i == 0 or b"\x80" <= self[token_id][:1] < b"\xc0")
                rest = self._name_one(token_id, logprob, before if goes_on else b"")
                begun = rest if i == 0 else begun
        return begun

    def _name_one(self, token_id: int, logprob: Logprob, begun: bytes) -> bytes:
        """Fill in a token's text after part of a character. Returns the part of one that it begins."""
        if begun or token_id not in self._whole:
            decoder = getincrementaldecoder("utf-8")("replace")
            logprob.decoded_token = decoder.decode(begun + self[token_id])
            rest: bytes = decoder.getstate()[0]
            if begun or rest:
                return rest
            self._whole[token_id] = logprob.decoded_token
        logprob.decoded_token = self._whole[token_id]
        return b""
