"""Speculative decoding: propose draft tokens, compute them along with known tokens, and keep the right ones.

A draft token has its own chunk. To attention it is one more decode, over the same blocks and one token
longer. The sampled tokens, up to and including the first that differs from its draft, are exactly the tokens
that plain decoding would have sampled: drafts affect the speed, never the output. The K and V of a rejected
draft stay in the cache, past the computed tokens, until the actual tokens overwrite them.

A proposer is any function of a sequence and a number n that returns at most n token ids of the model.
`NgramProposer` proposes what followed the same words before (prompt lookup).

Source: https://arxiv.org/abs/2211.17192. There drafts have probabilities; here a draft is right or wrong.
"""

import sys
from collections import Counter, abc
from collections.abc import Callable
from itertools import takewhile
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

from nanoengine.engine import BlockManager, Chunk, ScheduledBatch, Scheduler, Sequence
from nanoengine.speculative_config import SpeculativeConfig


class DraftingScheduler(Scheduler):
    """Schedules draft tokens after decodes, with the token budget and free blocks that are left.

    It does not support async scheduling: drafts depend on the tokens of the previous step. While more than
    max_drafting_seqs sequences run, there are no drafts.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        propose: Callable[[Sequence, int], list[int]],
        max_drafting_seqs: int = sys.maxsize,
        **settings: Any,
    ) -> None:
        super().__init__(block_manager, **settings)
        self.propose, self.max_drafting_seqs = propose, max_drafting_seqs
        # How many drafts were computed and accepted, by the draft's index in its sequence's step, from 0.
        self.num_drafted, self.num_accepted = Counter[int](), Counter[int]()

    def add_drafts(self, chunks: list[Chunk], budget: int) -> int:
        """See the base class. The chunk of a decode is followed by the chunks of its drafts."""
        if len(self.running) > self.max_drafting_seqs:
            return 0
        self.prepare(chunks, budget)
        with_drafts: list[Chunk] = []
        num_drafts = 0
        for chunk in chunks:
            with_drafts.append(chunk)
            limit = self.limit_of(chunk, budget - num_drafts)
            drafts = self.propose(chunk.seq, limit)[:limit] if limit > 0 else []
            if drafts := drafts[: self.room_for(chunk, len(drafts))]:
                token_ids = chunk.seq.token_ids + drafts
                for position in range(chunk.end, chunk.end + len(drafts)):
                    with_drafts.append(Chunk(chunk.seq, position, position + 1, True, token_ids))
                num_drafts += len(drafts)
        chunks[:] = with_drafts
        return num_drafts

    def prepare(self, chunks: list[Chunk], budget: int) -> None:
        """Get ready to propose up to `budget` drafts after these chunks."""

    def limit_of(self, chunk: Chunk, budget: int) -> int:
        """Return how many drafts may follow a chunk. Only decodes that sample freely have drafts."""
        if not chunk.samples or chunk.end - chunk.start > 1 or chunk.seq.params.forced_token_ids:
            return 0
        return min(budget, chunk.seq.max_num_tokens - 1 - chunk.end)  # a token is sampled after the last one

    def room_for(self, chunk: Chunk, num_drafts: int) -> int:
        """Make room in the block table for drafts after a chunk, and return how many fit."""
        # With windows, may_append frees the blocks that no uncomputed token sees. This chunk already counts
        # as computed, but its token still needs those blocks: set the count back for the call.
        chunk.seq.num_computed_tokens = chunk.start
        while num_drafts and not self.block_manager.may_append(chunk.seq, chunk.end + num_drafts):
            num_drafts -= 1
        chunk.seq.num_computed_tokens = chunk.end
        self.tell("grew", chunk.seq)
        return num_drafts

    def update(self, batch: ScheduledBatch, token_ids: list[int | None]) -> list[Sequence]:
        """See the base class. A token sampled after a draft counts if all drafts up to there are right."""
        advanced: dict[Sequence, None] = {}
        place = -1
        sampled_chunks = (chunk for chunk in batch.chunks if chunk.samples)
        for chunk, token_id in zip(sampled_chunks, token_ids, strict=True):
            seq = chunk.seq
            place = place + 1 if is_draft(chunk) else -1
            if place >= 0:
                self.num_drafted[place] += 1
                if not self._is_accepted(chunk):
                    continue
                self.num_accepted[place] += 1
                seq.num_computed_tokens = chunk.end
                self.block_manager.register_full_blocks(seq, chunk.end)
            if seq.finish_reason is None:
                self.append_token(seq, token_id)
                advanced[seq] = None
        self.tell("updated", batch)
        return list(advanced)

    @staticmethod
    def _is_accepted(draft: Chunk) -> bool:
        """Return whether the draft token is the last token of the sequence."""
        known = draft.seq.token_ids
        is_next = draft.seq.finish_reason is None and len(known) == draft.end
        return is_next and known[-1] == draft.token_ids[draft.start]


def is_draft(chunk: Chunk) -> bool:
    """Return whether a chunk computes a draft. Its token_ids are then not the sequence's own list."""
    return chunk.token_ids is not chunk.seq.token_ids


MAX_PAUSE = 64  # limit on the tokens without drafts after rejected drafts


class NgramProposer:
    """Proposes drafts by looking up the last tokens of a sequence in the sequence itself: vLLM's "ngram".

    Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.lookups: WeakKeyDictionary[Sequence, Lookup] = WeakKeyDictionary()

    def __call__(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Return at most num_tokens draft tokens for a sequence."""
        if seq not in self.lookups:
            self.lookups[seq] = Lookup(*self.config.lookup_lengths, self.config.num_speculative_tokens)
        return self.lookups[seq].propose(seq.token_ids, num_tokens)


class Lookup:
    """Indexes the n-grams of one growing text by where each was seen last, and adapts the number of drafts.

    Each token adds one entry per n-gram length, in constant time: about half a kilobyte for three lengths.
    The longest n-gram that was seen before decides the drafts.
    """

    def __init__(self, shortest: int, longest: int, max_draft_tokens: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.max_draft_tokens = max_draft_tokens
        self.follows: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self.num_indexed = shortest  # n-grams that end before this position are indexed
        self.drafts: list[int] = []  # the last drafts
        self.drafted_at = 0  # position of the first of them
        self.size = 1  # how many drafts to propose next
        self.pause = 1  # tokens to wait after a single draft was rejected; doubles each time
        self.resume_at = 0  # position from which to propose drafts again

    def propose(self, token_ids: abc.Sequence[int], num_tokens: int) -> list[int]:
        """Return at most num_tokens draft tokens. token_ids must extend those of the last call."""
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
                # The drafts may run past the end of the known tokens, as if the text repeated itself.
                period = len(token_ids) - start
                size = min(num_tokens, self.size)
                self.drafts = [token_ids[start + i % period] for i in range(size)]
                self.drafted_at = len(token_ids)
                return self.drafts
        return []

    def _adapt(self, token_ids: abc.Sequence[int]) -> None:
        """Propose 2 n + 1 drafts next if n were right the last time. Pause if a single draft was wrong."""
        if not self.drafts or len(token_ids) == self.drafted_at:  # the step failed: nothing was sampled
            return
        actual = token_ids[self.drafted_at : self.drafted_at + len(self.drafts)]
        num_right = sum(takewhile(bool, map(eq, actual, self.drafts)))
        if num_right:
            self.pause = 1
        elif len(self.drafts) == 1:
            self.pause = min(2 * self.pause, MAX_PAUSE)
            self.resume_at = len(token_ids) + self.pause
        self.size = min(2 * num_right + 1, self.max_draft_tokens)
        self.drafts = []
