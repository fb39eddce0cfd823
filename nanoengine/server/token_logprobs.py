"""Shows log-probabilities in the shapes of OpenAI's APIs: names and bytes of tokens, and where they begin."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoengine.outputs import Logprob

TABLE: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
BYTES = {symbol: byte for byte, symbol in TABLE.items()}  # of byte-level tokenizers


class TokenBytes(dict[int, bytes]):
    """Maps a token id to the bytes of its text, which may be part of a character.

    They follow from the token's spelling in the vocabulary: a decoder drops a space at the start of a text.

    Args:
        tokenizer: transformers' tokenizer. None: tokens have no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self.is_byte_level = tokenizer is not None and "ByteLevel" in repr(
            tokenizer.backend_tokenizer.decoder
        )

    def __missing__(self, token_id: int) -> bytes:
        """Look up a token at its first use."""
        token = None if self.tokenizer is None else self.tokenizer.convert_ids_to_tokens(token_id)
        text = token or ""
        if self.is_byte_level and token_id not in self.added and all(symbol in BYTES for symbol in text):
            found = bytes(BYTES[symbol] for symbol in text)
        elif byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
            found = bytes.fromhex(byte[1])
        else:
            found = (text if token_id in self.added else text.replace("\u2581", " ")).encode()
        self[token_id] = found
        return found

    def name(self, token_id: int) -> str:
        """Return the token's text, or its bytes in the form of OpenAI's older API if they are no text."""
        try:
            return self[token_id].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self[token_id])

    def names(self, entry: dict[int, Logprob]) -> dict[str, float]:
        """Return the tokens reported for one position. Of those with the same name, one keeps it."""
        named: dict[str, float] = {}
        for token_id, one in best_first(entry):
            name = self.name(token_id)
            named[f"token_id:{token_id}" if name in named else name] = one.logprob
        return named

    def is_shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return whether the token is part of an output's text."""
        return not (skip_special_tokens and token_id in self.added and self.added[token_id].special)

    def offsets(self, token_ids: Iterable[int], start: int, skip_special_tokens: bool) -> list[int]:
        """Return where output tokens begin in the text, whose next character has the index `start`.

        The last item is where the text goes on. A token that begins inside a character is at that character.
        """
        found = []
        for token_id in token_ids:
            piece = self[token_id] if self.is_shown(token_id, skip_special_tokens) else b""
            found.append(start - (num_begun(piece[:1]) < len(piece[:1])))
            start += num_begun(piece)
        return [*found, start]

    def offsets_in(self, text: str, token_ids: Iterable[int]) -> list[int]:
        """Return where a prompt's tokens begin in its text. Tokens that the tokenizer added take no room."""
        whole, place, start, found = text.encode(), 0, 0, []
        for token_id in token_ids:
            piece = self[token_id]
            found.append(start - (num_begun(piece[:1]) < len(piece[:1])))
            piece = next((one for one in (piece, piece[1:]) if whole.startswith(one, place)), b"")
            place, start = place + len(piece), start + num_begun(piece)
        return found


def num_begun(piece: bytes) -> int:
    """Return how many characters begin in these bytes.

    >>> [num_begun(piece) for piece in ("a\u00b5".encode(), "\u00b5".encode()[1:])]
    [2, 0]
    """
    return sum(byte & 0xC0 != 0x80 for byte in piece)


def clamped(logprob: Logprob) -> Logprob:
    """Return the log-probability as a number that JSON has: minus infinity becomes -9999, as in vLLM."""
    return replace(logprob, logprob=max(logprob.logprob, -9999.0))


def best_first(entry: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Return the tokens reported for one position, the most probable first."""
    ranked = sorted(entry.items(), key=lambda pair: pair[1].rank or 0)
    return [(token_id, clamped(one)) for token_id, one in ranked]
