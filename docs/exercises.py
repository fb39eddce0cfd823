"""The answers to the exercises of lessons 10, 14, 16 and 18, for which nano.py has no function.

`python -m docs.check --stub exercises` prints this file without the bodies that you write.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.nano import BlockManager, Chunk, Scheduler, Sequence

Part = tuple[Tensor, Tensor, Tensor]  # the largest score, the sum of the weights, the weighted sum

# ---- Lesson 10: paged attention ------------------------------------------------------------------


def merge(one: Part, other: Part) -> Part:
    """Merge the attention of one token to two groups of keys.

    A part is (largest score, sum of the weights, weighted sum of the values), of shapes (heads,), (heads,)
    and (heads, head_dim). A weight is exp(score - largest score of the part).
    """
    largest = torch.maximum(one[0], other[0])
    a, b = (one[0] - largest).exp(), (other[0] - largest).exp()
    return largest, a * one[1] + b * other[1], a.unsqueeze(1) * one[2] + b.unsqueeze(1) * other[2]


def attend_blocks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: list[int], seq_len: int
) -> Tensor:
    """Return one token's attention to the first seq_len tokens, block by block, with `merge`.

    Shapes: q and the result (query heads, head_dim), each cache (blocks, block_size, KV heads, head_dim).
    Consecutive query heads share a KV head. Scores are divided by the square root of head_dim.
    """
    (num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    part = torch.full((num_heads,), -torch.inf), torch.zeros(num_heads), torch.zeros_like(q)
    for i, start in enumerate(range(0, seq_len, block_size)):
        filled = min(block_size, seq_len - start)
        k, v = (cache[block_table[i], :filled] for cache in (k_cache, v_cache))
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", q, k) / head_dim**0.5
        largest = scores.amax(1)
        weights = (scores - largest.unsqueeze(1)).exp()
        part = merge(part, (largest, weights.sum(1), torch.einsum("ht,thd->hd", weights, v)))
    return part[2] / part[1].unsqueeze(1)


# ---- Lesson 14: draft tokens ---------------------------------------------------------------------


class Drafted(NamedTuple):
    """Holds a chunk of nano.py's scheduler, and the draft tokens that the same step verifies."""

    seq: Sequence
    start: int
    end: int
    samples: bool  # whether the step samples a token after `end`, and one after each draft
    drafts: list[int]


class DraftingScheduler(Scheduler):
    """Adds draft tokens to the chunks of nano.py's scheduler."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_draft_tokens: int,
    ) -> None:
        super().__init__(block_manager, max_num_seqs, max_num_batched_tokens, 1 << 30)
        self.num_draft_tokens = num_draft_tokens

    def schedule(self) -> list[Drafted]:  # type: ignore[override]
        """Choose the chunks of the next step, and spend what is left of the budget on drafts."""
        chunks, drafted = super().schedule(), []
        budget = self.max_num_batched_tokens - sum(chunk.end - chunk.start for chunk in chunks)
        for chunk in chunks:
            drafted.append(Drafted(*chunk, self.draft(chunk, budget)))
            budget -= len(drafted[-1].drafts)
        return drafted

    def draft(self, chunk: Chunk, budget: int) -> list[int]:
        """Return up to num_draft_tokens drafts from `lookup`, if the chunk samples and they fit.

        Return no more than the budget allows, and no more than max_num_tokens leaves after the token that is
        sampled anyway. Drafts use free blocks only: `may_append` says whether there are enough.
        """
        seq = chunk.seq
        num_left = seq.max_num_tokens - len(seq.token_ids) - 1
        num_draft_tokens = min(self.num_draft_tokens, budget, num_left)
        if not chunk.samples or num_draft_tokens <= 0:
            return []
        drafts = lookup(seq.token_ids, num_draft_tokens)
        return drafts if self.block_manager.may_append(seq, chunk.end + len(drafts)) else []

    def update(self, chunks: list[Drafted], sampled: list[list[int]]) -> None:  # type: ignore[override]
        """Append the sampled tokens, one list per chunk; finish sequences and free their blocks.

        `accept` says how many tokens of each list count. None counts after one that finishes the sequence.
        After a step that samples, all of a sequence's tokens but the last count as computed.
        """
        for chunk, tokens in zip(chunks, sampled, strict=True):
            seq = chunk.seq
            for token in accept(chunk.drafts, tokens):
                seq.token_ids.append(token)
                seq.num_computed_tokens = len(seq.token_ids) - 1
                if token in seq.stop_ids or len(seq.token_ids) == seq.max_num_tokens:
                    seq.is_finished = True
                    self.running.remove(seq)
                    self.block_manager.free(seq)
                    break


def lookup(token_ids: list[int], num_draft_tokens: int) -> list[int]:
    """Return the tokens that followed the latest earlier occurrence of the last two tokens."""
    for end in range(len(token_ids) - 1, 1, -1):
        if token_ids[end - 2 : end] == token_ids[-2:]:
            return token_ids[end : end + num_draft_tokens]
    return []


def accept(drafts: list[int], sampled: list[int]) -> list[int]:
    """Return the sampled tokens that count: up to and including the first that is not its draft.

    If all drafts are right, all sampled tokens count.
    """
    num_true = 0
    while num_true < len(drafts) and drafts[num_true] == sampled[num_true]:
        num_true += 1
    return sampled[: num_true + 1]


def verify(draft: int, p: Tensor, q: Tensor, u: float, v: float) -> int:
    """Return the draft token or another one, so that the result is distributed as p.

    The draft was sampled from q (V,), and p (V,) are the model's probabilities. u and v are random numbers in
    [0, 1). Accept the draft with probability p / q, by u. Otherwise sample, by v, from the part of p that
    q does not cover.
    """
    if u * q[draft] < p[draft]:
        return draft
    rest = (p - q).clamp(min=0)
    return int((rest.cumsum(0) <= v * rest.sum()).sum())


# ---- Lesson 16: quantization ---------------------------------------------------------------------


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight (N, I) to integers from 0 to 15, and return (integers, scales, zeros).

    The weight is about integer * scale + zero. Each group of group_size inputs of a row has a scale and a
    zero: its smallest number becomes 0 and its largest 15. If all are equal, the scale is 1. Shapes:
    integers (N, I) in uint8, scales and zeros (N, I // group_size).
    """
    groups = weight.view(len(weight), -1, group_size)
    zeros = groups.amin(2)
    scales = (groups.amax(2) - zeros) / 15
    scales[scales == 0] = 1
    integers = (groups - zeros.unsqueeze(2)) / scales.unsqueeze(2)
    return integers.round().to(torch.uint8).flatten(1), scales, zeros


def pack(integers: Tensor) -> Tensor:
    """Return integers (N, I) from 0 to 15 as bytes (N, I // 2).

    A byte holds two columns: the first one in its low 4 bits, the second one in its high 4 bits.
    """
    return integers[:, ::2] | integers[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def multiply(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return rows x (R, I) times the quantized weight: (R, N)."""
    groups = unpack(packed).float().view(len(packed), scales.shape[1], -1)
    weight = groups * scales.unsqueeze(2) + zeros.unsqueeze(2)
    return x @ weight.flatten(1).T


# ---- Lesson 18: sliding windows ------------------------------------------------------------------


def num_skipped_blocks(position: int, window: int, block_size: int) -> int:
    """Return how many of a table's first blocks no token from this position on attends to.

    A token attends to itself and to the window - 1 tokens before it.
    """
    return max(0, position - window + 1) // block_size


def window_hit(found: list[bool], window: int, block_size: int) -> int:
    """Return the number of blocks in the longest prefix that a window's layer can continue from.

    found[i] says whether block i of the prompt is cached. A prefix is a hit if all of its blocks to which the
    token after it attends are cached.
    """
    for length in range(len(found), 0, -1):
        if all(found[num_skipped_blocks(length * block_size, window, block_size) : length]):
            return length
    return 0
