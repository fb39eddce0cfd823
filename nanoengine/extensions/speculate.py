"""Speculative decoding: tokens guessed ahead, computed along with known ones, and kept where they come true.

A draft is a guess of a token to come, with a chunk of its own: to attention it is one more decode, over the
same blocks and a token longer. With the known tokens a b c, of which c is not computed yet, and drafts d e:

    chunk     computes  attends to  draws
    [2, 3)    c         a b c       the token at position 3. If it is d, the first draft has come true, and
    [3, 4)    d         a b c d     the token at position 4 counts. If it is e, so has the second, and
    [4, 5)    e         a b c d e   the token at position 5 counts

The draws up to and including the first that differs from its draft are exactly the tokens that plain decoding
would have drawn. K and V of a draft that was wrong stay where they are, beyond what counts as computed, until
the tokens that really come are computed there.

Source: https://arxiv.org/abs/2211.17192, where guesses have probabilities; here one is simply right or wrong.

A proposer, which guesses, is any function of a sequence and a number n that returns n token ids of the model
at most. Its guesses decide how fast the engine is, never what it says. `NgramProposer` looks for what
followed the same words before (prompt lookup).
"""

from collections import Counter, abc
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from nanoengine.config import SpeculativeConfig
from nanoengine.engine import BlockManager, Chunk, ScheduledBatch, Scheduler, Sequence

# ---- The scheduler -------------------------------------------------------------------------------


class DraftingScheduler(Scheduler):
    """A scheduler that has drafts computed behind decodes, with what others leave of budget and free blocks.

    Not with steps in flight: what to guess depends on the tokens of the step before.

    Args:
        block_manager, settings: as in the base class.
        propose: guesses what comes next.
    """

    def __init__(
        self, block_manager: BlockManager, propose: Callable[[Sequence, int], list[int]], **settings: Any
    ) -> None:
        super().__init__(block_manager, **settings)
        self.propose = propose
        # By their place among the drafts of a step, from 0: how many were computed, and how many came true.
        self.num_drafted, self.num_accepted = Counter[int](), Counter[int]()

    def schedule(self) -> ScheduledBatch:
        """As in the base class; the chunks of its drafts follow that of a decode."""
        chunks, _, num_tokens = super().schedule()
        with_drafts: list[Chunk] = []
        for chunk in chunks:
            with_drafts.append(chunk)
            drafts = self._guess(chunk, self.max_num_batched_tokens - num_tokens)
            if drafts:
                token_ids = chunk.seq.token_ids + drafts
                for position in range(chunk.end, chunk.end + len(drafts)):
                    with_drafts.append(Chunk(chunk.seq, position, position + 1, True, token_ids))
                num_tokens += len(drafts)
        sampled_seqs = [chunk.seq for chunk in with_drafts if chunk.samples]
        return ScheduledBatch(with_drafts, sampled_seqs, num_tokens)

    def _guess(self, chunk: Chunk, budget: int) -> list[int]:
        """The drafts to compute behind a chunk; the block table has room for them."""
        seq, start, end, samples, _ = chunk
        most = min(budget, seq.max_num_tokens - 1 - end)  # a token is drawn behind the last one
        if not samples or end - start > 1 or most <= 0:
            return []
        drafts = self.propose(seq, most)[:most]
        # With windows, may_append gives back what no token from num_computed_tokens on sees. This chunk
        # counts as computed already, but its token has still to see that: so set it back for the call.
        seq.num_computed_tokens = start
        while drafts and not self.block_manager.may_append(seq, end + len(drafts)):
            drafts = drafts[:-1]
        seq.num_computed_tokens = end
        return drafts

    def update(self, batch: ScheduledBatch, token_ids: list[int | None]) -> list[Sequence]:
        """As in the base class; a draw behind a draft counts if this and those before it came true.

        From here on, not before, such a draft counts as computed.
        """
        advanced: dict[Sequence, None] = {}
        place = -1
        sampled_chunks = (chunk for chunk in batch.chunks if chunk.samples)
        for chunk, token_id in zip(sampled_chunks, token_ids, strict=True):
            seq = chunk.seq
            place = place + 1 if is_draft(chunk) else -1
            if place >= 0:
                self.num_drafted[place] += 1
                if not self._came_true(chunk):
                    continue
                self.num_accepted[place] += 1
                seq.num_computed_tokens = chunk.end
                if chunk.end // self.block_manager.block_size > seq.num_registered_blocks:
                    self.block_manager.register_full_blocks(seq, chunk.end)
            if seq.finish_reason is None:
                self.append_token(seq, token_id)
                advanced[seq] = None
        return list(advanced)

    @staticmethod
    def _came_true(draft: Chunk) -> bool:
        """Whether the sequence has taken the drafted token, as its last one."""
        known = draft.seq.token_ids
        is_next = draft.seq.finish_reason is None and len(known) == draft.end
        return is_next and known[-1] == draft.token_ids[draft.start]


def is_draft(chunk: Chunk) -> bool:
    """Whether it computes a guess: then its token_ids are not its sequence's own list."""
    return chunk.token_ids is not chunk.seq.token_ids


# ---- A proposer ----------------------------------------------------------------------------------

MAX_PAUSE = 64  # tokens without a guess, after guesses that failed


class NgramProposer:
    """vLLM's "ngram" method: looks the last tokens of a sequence up in the sequence itself.

    Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.lookups: WeakKeyDictionary[Sequence, Lookup] = WeakKeyDictionary()

    def __call__(self, seq: Sequence, num_tokens: int) -> list[int]:
        """At most num_tokens guesses of what follows a sequence."""
        lookup = self.lookups.get(seq)
        if lookup is None:
            lookup = Lookup(*self.config.lookup_lengths, self.config.num_speculative_tokens)
            self.lookups[seq] = lookup
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
        self.follows: dict[tuple[int, ...], int] = {}  # run -> the position behind it, where it was seen last
        self.num_indexed = shortest  # runs that end before this position are in the table
        self.guesses: list[int] = []  # the last ones
        self.guessed_at = 0  # the position of their first
        self.size = 1  # how many to make
        self.pause = 1  # tokens to wait for after a lone guess failed; doubles each time
        self.resume_at = 0  # the position from which on to guess again

    def guess(self, token_ids: abc.Sequence[int], num_tokens: int) -> list[int]:
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

    def _adapt(self, token_ids: abc.Sequence[int]) -> None:
        """Guess 2 n + 1 tokens next, where n came true the last time; after a lone one that failed, pause."""
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
