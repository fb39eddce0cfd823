"""Guesses of what comes next, for speculative decoding: what followed the same words before (prompt lookup).

A proposer is any function of a sequence and a number that returns that many token ids of the model, at most;
`Scheduler(propose=...)` takes it. It may keep what it likes in `seq.drafter`. Its guesses decide how
fast the engine is, never what it says.
"""

from collections.abc import Sequence
from typing import Any

from nanoengine.config import SpeculativeConfig

MAX_PAUSE = 64  # tokens without a guess, after guesses that failed


class NgramProposer:
    """vLLM's "ngram" method: looks the last tokens of a sequence up in the sequence itself.

    Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config

    def __call__(self, seq: Any, num_tokens: int) -> list[int]:
        """At most num_tokens guesses of what follows the engine's sequence `seq`."""
        if seq.drafter is None:
            seq.drafter = Lookup(*self.config.lookup_lengths, self.config.num_speculative_tokens)
        lookup: Lookup = seq.drafter
        return lookup.guess(seq.token_ids, num_tokens)


class Lookup:
    """Where each run of tokens of one growing text was seen last, and how well guesses from it do.

    A token takes one entry per length of run, about half a kilobyte for three lengths, and constant time.

    Args:
        shortest, longest: tokens of a run; the longest that was seen before is what a guess goes by.
        max_guesses: tokens at most.
    """

    def __init__(self, shortest: int, longest: int, max_guesses: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.max_guesses = max_guesses
        self.follows: dict[tuple[int, ...], int] = {}  # run -> position behind where it was seen last
        self.num_indexed = shortest  # tokens whose runs before them are in the table
        self.guesses: list[int] = []  # the last ones
        self.guessed_at = 0  # the position of their first
        self.size = 1  # how many to make
        self.pause = 1  # tokens to wait after the next single guess that fails, halved
        self.resume_at = 0  # the position from which on to guess again

    def guess(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """At most num_tokens of what may come next; token_ids are those of the last call, and more."""
        self._adapt(token_ids)
        if len(token_ids) < self.resume_at:
            return []
        for end in range(self.num_indexed, len(token_ids)):
            for length in self.lengths:
                if length <= end:
                    self.follows[tuple(token_ids[end - length : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids))
        for length in self.lengths:
            start = self.follows.get(tuple(token_ids[-length:]))
            if start is not None:
                # A guess may run past the end of what is known: the text then repeats itself.
                period = len(token_ids) - start
                size = min(num_tokens, self.size)
                self.guesses = [token_ids[start + i % period] for i in range(size)]
                self.guessed_at = len(token_ids)
                return self.guesses
        return []

    def _adapt(self, token_ids: Sequence[int]) -> None:
        """Guess twice as many as came true the last time, and one; fewer and fewer where single ones fail."""
        if not self.guesses or len(token_ids) == self.guessed_at:  # a step that failed told nothing
            return
        came = token_ids[self.guessed_at : self.guessed_at + len(self.guesses)]
        num_right = 0
        while num_right < len(came) and came[num_right] == self.guesses[num_right]:
            num_right += 1
        if num_right:
            self.pause = 1
        elif len(self.guesses) == 1:
            self.pause = min(2 * self.pause, MAX_PAUSE)
            self.resume_at = len(token_ids) + self.pause
        self.size = min(2 * num_right + 1, self.max_guesses)
        self.guesses = []
