"""Shows log-probabilities in the shapes of OpenAI's APIs: names and bytes of tokens, and where they begin."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nanoengine.outputs import Logprob
from nanoengine.token_bytes import TokenBytes


class TokenNames(TokenBytes):
    """Names tokens, and finds where they begin in a text, from the bytes of each."""

    def name(self, token_id: int) -> str:
        """Return the token's text, or its bytes in the form of OpenAI's older API if they are no text."""
        try:
            return self[token_id].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self[token_id])

    def names(self, entry: dict[int, Logprob], by_id: bool = False) -> dict[str, float]:
        """Return the tokens reported for one position. Of those with the same name, one keeps it."""
        named: dict[str, float] = {}
        for token_id, one in best_first(entry):
            name = self.name(token_id)
            named[f"token_id:{token_id}" if by_id or name in named else name] = one.logprob
        return named

    def offsets(self, token_ids: Iterable[int], start: int, skip_special_tokens: bool) -> list[int]:
        """Return where output tokens begin in the text, whose next character has the index `start`.

        The last item is where the text goes on. A token that begins inside a character is at that character.
        """
        found = []
        for token_id in token_ids:
            is_hidden = skip_special_tokens and token_id in self.added and self.added[token_id].special
            piece = b"" if is_hidden else self[token_id]
            found.append(start - (num_begun(piece[:1]) < len(piece[:1])))
            start += num_begun(piece)
        return [*found, start]

    def offsets_in(self, text: str, token_ids: list[int]) -> list[int]:
        """Return where a prompt's tokens begin in its text. Tokens that the tokenizer added take no room."""
        for adds in (True, False) if token_ids else ():
            encoding = self.backend.encode(text, add_special_tokens=adds)
            if encoding.ids == token_ids:
                return self._offsets_of(encoding)
        whole, place, start, found = text.encode(), 0, 0, []
        for token_id in token_ids:  # ids that are not how the tokenizer spells the text
            piece = self[token_id]
            found.append(start - (num_begun(piece[:1]) < len(piece[:1])))
            piece = next((one for one in (piece, piece[1:]) if whole.startswith(one, place)), b"")
            place, start = place + len(piece), start + num_begun(piece)
        return found

    def _offsets_of(self, encoding: Any) -> list[int]:
        found, end = [], 0
        parts = zip(encoding.ids, encoding.sequence_ids, encoding.offsets, strict=True)
        for token_id, owner, (start, stop) in parts:
            if owner is None:  # added by the tokenizer
                start = stop = end
            piece = self[token_id]
            # Some tokenizers leave the spaces at the start of a token out of its place.
            start -= max(0, min(start - end, len(piece) - len(piece.lstrip())))
            found.append(start)
            end = max(end, stop)
        return found


def num_begun(piece: bytes) -> int:
    """Return how many characters begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)


def clamped(logprob: Logprob) -> Logprob:
    """Return the log-probability as a number that JSON has: minus infinity becomes -9999, as in vLLM."""
    return replace(logprob, logprob=max(logprob.logprob, -9999.0))


def best_first(entry: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Return the tokens reported for one position, the most probable first."""
    ranked = sorted(entry.items(), key=lambda pair: pair[1].rank or 0)
    return [(token_id, clamped(one)) for token_id, one in ranked]
