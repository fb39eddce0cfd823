"""Lessons 3 to 13 and 20 as one small engine in plain PyTorch: the solution to what docs/check.py checks.

You write the functions with a docstring that begins with "Lesson". `python -m docs.check --stub` prints this
file without their bodies. From the repository's root: python -m docs.solution "What is 27 + 58?".
"""

import hashlib
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from docs.mini import STOP, TOKENIZER, ask, attention, model

Part = tuple[Tensor, Tensor, Tensor]  # lesson 9: the largest score, the sum of the weights, the weighted sum


class Sequence:
    """Holds the tokens of one request, and the blocks that store their K and V."""

    def __init__(self, prompt: list[int], max_tokens: int = 60) -> None:
        self.token_ids, self.num_prompt_tokens, self.max_tokens = list(prompt), len(prompt), max_tokens
        self.block_table: list[int] = []
        self.num_computed_tokens = 0  # their K and V are in the cache once the scheduled step has run
        self.num_hit_tokens = 0  # other sequences may read their slots: never write to them again
        self.is_finished = False


class BlockManager:
    """Allocates blocks, shares blocks with the same prefix, and evicts the least recently used."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_counts = [0] * num_blocks  # how many block tables contain each block
        self.empty_blocks = list(
            reversed(range(num_blocks))
        )  # free, without registered content; the last is allocated first
        self.evictable_blocks: dict[int, None] = {}  # free and registered; a dict keeps the order of freeing
        self.block_of: dict[int, int] = {}  # key -> the block registered under it
        self.key_of: dict[int, int] = {}  # registered block -> its key

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence holds."""
        return len(self.empty_blocks) + len(self.evictable_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Lesson 3: return the number of blocks that num_tokens tokens need."""
        return -(-num_tokens // self.block_size)

    def slot(self, seq: Sequence, position: int) -> int:
        """Lesson 3: return the cache slot of the token at that position."""
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def may_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Lesson 3: grow the block table with `take_free_block` until it has room for num_tokens tokens.

        Returns False and takes no block if there are too few free blocks.
        """
        num_new = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if num_new > self.num_free_blocks:
            return False
        seq.block_table += [self.take_free_block() for _ in range(num_new)]
        return True

    def block_keys(self, token_ids: list[int]) -> list[int]:
        """Lesson 4: return a key for each full block. It identifies all tokens up to the block's end."""
        keys: list[int] = []
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            keys.append(hash((keys[-1] if keys else None, *token_ids[end - self.block_size : end])))
        return keys

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Lesson 4: return the registered blocks that hold the sequence's start, up to the first miss."""
        hits = []
        for key in self.block_keys(seq.token_ids):
            if key not in self.block_of:
                break
            hits.append(self.block_of[key])
        return hits

    def register_full_blocks(self, seq: Sequence) -> None:
        """Lesson 4: record blocks full of computed tokens in block_of and key_of, one block per key."""
        keys = self.block_keys(seq.token_ids[: seq.num_computed_tokens])
        for block, key in zip(seq.block_table, keys, strict=False):
            if key not in self.block_of:
                self.block_of[key], self.key_of[block] = block, key

    def allocate(self, seq: Sequence) -> bool:
        """Lesson 4: admit a sequence: `hold` its hits, and take blocks for the rest of its tokens.

        Returns False and changes nothing if there are too few free blocks. A hit on a free block uses up that
        block. Sets num_hit_tokens and num_computed_tokens, and leaves at least one token to compute.
        """
        hits = self.find_prefix(seq)
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(hits)
        num_revived = sum(self.ref_counts[block] == 0 for block in hits)
        if num_new + num_revived > self.num_free_blocks:
            return False
        for block in hits:
            self.hold(block)
        seq.block_table = list(hits)
        self.may_append(seq, len(seq.token_ids))
        seq.num_hit_tokens = len(hits) * self.block_size
        seq.num_computed_tokens = min(seq.num_hit_tokens, len(seq.token_ids) - 1)
        return True

    def hold(self, block: int) -> None:
        """Lesson 4: count one more block table that contains this block. If it was free, it no longer is."""
        self.evictable_blocks.pop(block, None)
        self.ref_counts[block] += 1

    def take_free_block(self) -> int:
        """Lesson 5: take a free block for one block table: an empty one, else the least recently used.

        The block's registered content is forgotten.
        """
        if self.empty_blocks:
            block = self.empty_blocks.pop()
        else:
            block = next(iter(self.evictable_blocks))
            del self.evictable_blocks[block]
            del self.block_of[self.key_of.pop(block)]
        self.ref_counts[block] = 1
        return block

    def free(self, seq: Sequence) -> None:
        """Lesson 5: release a sequence's blocks, the last one first. None of its tokens stays computed."""
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0 and block in self.key_of:
                self.evictable_blocks[block] = None
            elif self.ref_counts[block] == 0:
                self.empty_blocks.append(block)
        seq.block_table, seq.num_computed_tokens, seq.num_hit_tokens = [], 0, 0


class Chunk(NamedTuple):
    """Says what a step computes for a sequence: its tokens [start, end), then draft tokens."""

    seq: Sequence
    start: int
    end: int
    samples: bool  # whether the step samples a token after `end`, and one after each draft
    drafts: list[int]


class Scheduler:
    """Chooses what each step computes. `running` and `waiting` are in order of arrival."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        num_draft_tokens: int = 0,
    ) -> None:
        self.block_manager, self.max_num_seqs = block_manager, max_num_seqs
        self.max_num_batched_tokens, self.num_draft_tokens = max_num_batched_tokens, num_draft_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Append a sequence to the queue. Raises ValueError if it would not fit even when it runs alone."""
        # The last token is sampled and never computed.
        num_tokens = seq.num_prompt_tokens + seq.max_tokens - 1
        if self.block_manager.num_blocks_for(num_tokens) > self.block_manager.num_blocks:
            raise ValueError(f"{num_tokens} tokens do not fit into {self.block_manager.num_blocks} blocks")
        self.waiting.append(seq)

    def schedule(self) -> list[Chunk]:
        """Lesson 6: schedule a chunk of each running sequence, then of sequences admitted from the queue.

        Call `make_room` before the chunk of a running sequence, which may itself be preempted. `allocate`
        admits in order of arrival, up to max_num_seqs, and not in a step that preempts. Stop when the budget
        is used up. `_schedule_chunk` makes a chunk, counts it as computed, and registers its full blocks.
        """
        chunks: list[Chunk] = []
        budget, num_preemptions = self.max_num_batched_tokens, self.num_preemptions
        for seq in list(self.running):
            if budget > 0 and seq in self.running and self.make_room(seq):
                budget -= self._schedule_chunk(seq, budget, chunks)
        while (
            self.waiting
            and budget > 0
            and len(self.running) < self.max_num_seqs
            and self.num_preemptions == num_preemptions
            and self.block_manager.allocate(self.waiting[0])
        ):
            seq = self.waiting.pop(0)
            self.running.append(seq)
            budget -= self._schedule_chunk(seq, budget, chunks)
        return chunks

    def _schedule_chunk(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        chunk = self.next_chunk(seq, budget)
        chunk = chunk._replace(drafts=self.draft(chunk, budget - (chunk.end - chunk.start)))
        chunks.append(chunk)
        seq.num_computed_tokens = chunk.end
        self.block_manager.register_full_blocks(seq)
        return chunk.end - chunk.start + len(chunk.drafts)

    def next_chunk(self, seq: Sequence, budget: int) -> Chunk:
        """Lesson 7: return a chunk of as many uncomputed tokens as the budget allows, without drafts."""
        end = min(len(seq.token_ids), seq.num_computed_tokens + budget)
        return Chunk(seq, seq.num_computed_tokens, end, end == len(seq.token_ids), [])

    def make_room(self, seq: Sequence) -> bool:
        """Lesson 8: give the sequence room for all its tokens: `preempt_last` until `may_append` succeeds.

        Returns False if the sequence was the last one and was preempted itself.
        """
        while not self.block_manager.may_append(seq, len(seq.token_ids)):
            if self.preempt_last() is seq:
                return False
        return True

    def preempt_last(self) -> Sequence:
        """Lesson 8: free the blocks of the latest running sequence, and put it at the head of the queue."""
        seq = self.running.pop()
        self.block_manager.free(seq)
        self.waiting.insert(0, seq)
        self.num_preemptions += 1
        return seq

    def update(self, chunks: list[Chunk], sampled: list[list[int]]) -> None:
        """Lesson 6: append the sampled tokens, one list per chunk; finish sequences and free their blocks.

        `accept` says how many tokens of each list count. A sequence finishes at STOP or at its max_tokens.
        After a step that samples, all of a sequence's tokens but the last count as computed.
        """
        for chunk, tokens in zip(chunks, sampled, strict=True):
            seq = chunk.seq
            for token in accept(chunk.drafts, tokens):
                seq.token_ids.append(token)
                seq.num_computed_tokens = len(seq.token_ids) - 1
                if token == STOP or len(seq.token_ids) == seq.num_prompt_tokens + seq.max_tokens:
                    seq.is_finished = True
                    self.running.remove(seq)
                    self.block_manager.free(seq)
                    break

    def draft(self, chunk: Chunk, budget: int) -> list[int]:
        """Lesson 13: return up to num_draft_tokens drafts from `lookup`, if the chunk samples and they fit.

        Return no more than the budget allows, and no more than max_tokens leaves after the token that is
        sampled anyway. Drafts use free blocks only: `may_append` says whether there are enough.
        """
        seq = chunk.seq
        num_left = seq.num_prompt_tokens + seq.max_tokens - len(seq.token_ids) - 1
        num_draft_tokens = min(self.num_draft_tokens, budget, num_left)
        if not chunk.samples or num_draft_tokens <= 0:
            return []
        drafts = lookup(seq.token_ids, num_draft_tokens)
        return drafts if self.block_manager.may_append(seq, chunk.end + len(drafts)) else []


def lookup(token_ids: list[int], num_draft_tokens: int) -> list[int]:
    """Lesson 13: return the tokens that followed the latest earlier occurrence of the last two tokens."""
    for end in range(len(token_ids) - 1, 1, -1):
        if token_ids[end - 2 : end] == token_ids[-2:]:
            return token_ids[end : end + num_draft_tokens]
    return []


def accept(drafts: list[int], sampled: list[int]) -> list[int]:
    """Lesson 13: return the sampled tokens that count: up to and including the first that is not its draft.

    If all drafts are right, all sampled tokens count.
    """
    num_true = 0
    while num_true < len(drafts) and drafts[num_true] == sampled[num_true]:
        num_true += 1
    return sampled[: num_true + 1]


def verify(draft: int, p: Tensor, q: Tensor, u: float, v: float) -> int:
    """Lesson 13: return the draft token or another one, so that the result is distributed as p.

    The draft was sampled from q (V,), and p (V,) are the model's probabilities. u and v are random numbers in
    [0, 1). Accept the draft with probability p / q, by u. Otherwise sample, by v, from the part of p that
    q does not cover.
    """
    if u * q[draft] < p[draft]:
        return draft
    rest = (p - q).clamp(min=0)
    return int((rest.cumsum(0) <= v * rest.sum()).sum())


class Engine:
    """Runs the scheduler and the model step by step, and holds the KV cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.num_steps = scheduler, 0
        blocks = scheduler.block_manager
        self.k, self.v = torch.zeros(2, 4, blocks.num_blocks * blocks.block_size, 2, 64)

    def step(self) -> None:
        """Schedule and run one forward pass, and update the sequences."""
        chunks = self.scheduler.schedule()
        tokens = [chunk.seq.token_ids[chunk.start : chunk.end] + chunk.drafts for chunk in chunks]
        positions = [range(c.start, c.start + len(t)) for c, t in zip(chunks, tokens, strict=True)]
        slots = [
            torch.tensor([self.scheduler.block_manager.slot(chunk.seq, i) for i in range(where.stop)])
            for chunk, where in zip(chunks, positions, strict=True)
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Write all K and V before any sequence attends: one may hit blocks that this step fills.
            rows = [torch.split(x, [len(where) for where in positions]) for x in (q, k, v)]
            for chunk, where, at, new_k, new_v in zip(chunks, positions, slots, *rows[1:], strict=True):
                first = max(where.start, chunk.seq.num_hit_tokens)  # hits are not written again
                self.k[layer, at[first:]] = new_k[first - where.start :]
                self.v[layer, at[first:]] = new_v[first - where.start :]
            outs = [
                attention(q, self.k[layer, at], self.v[layer, at])  # type: ignore[no-untyped-call]
                for q, at in zip(rows[0], slots, strict=True)
            ]
            return torch.cat(outs)

        token_ids = [token for chunk_tokens in tokens for token in chunk_tokens]
        flat = [position for where in positions for position in where]
        best = model(token_ids, flat, attend).argmax(-1).tolist()  # type: ignore[no-untyped-call]
        sampled = []
        for chunk, where in zip(chunks, positions, strict=True):
            after, best = best[: len(where)], best[len(where) :]
            sampled.append(after[chunk.end - chunk.start - 1 :] if chunk.samples else [])
        self.scheduler.update(chunks, sampled)
        self.num_steps += 1

    def generate(self, prompts: list[list[int]], max_tokens: int = 60) -> list[list[int]]:
        """Return the greedy answer to each prompt, as token ids."""
        seqs = [Sequence(prompt, max_tokens) for prompt in prompts]
        for seq in seqs:
            self.scheduler.add(seq)
        while not all(seq.is_finished for seq in seqs):
            self.step()
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]


# ---- parts of other lessons, which the engine above does not use ---------------------------------


def merge(one: Part, other: Part) -> Part:
    """Lesson 9: merge the attention of one token to two groups of keys.

    A part is (largest score, sum of the weights, weighted sum of the values), of shapes (heads,), (heads,)
    and (heads, head_dim). A weight is exp(score - largest score of the part).
    """
    largest = torch.maximum(one[0], other[0])
    a, b = (one[0] - largest).exp(), (other[0] - largest).exp()
    return largest, a * one[1] + b * other[1], a.unsqueeze(1) * one[2] + b.unsqueeze(1) * other[2]


def attend_blocks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: list[int], seq_len: int
) -> Tensor:
    """Lesson 9: return one token's attention to the first seq_len tokens, block by block, with `merge`.

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


def random_number(seed: int, position: int) -> float:
    """Lesson 11: return a number in [0, 1) that depends on seed and position, and on nothing else.

    The numbers of neighbouring seeds and positions look unrelated. The first 53 bits of a hash of both
    numbers, divided by 2 ** 53, are such a number.
    """
    digest = hashlib.sha256(f"{seed},{position}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def keep_probable(probabilities: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Lesson 11: return probabilities (V,) with improbable tokens at 0, rescaled to a sum of 1.

    First drop tokens less probable than min_p times the most probable one. Then keep the top_k most probable
    ones (0: all) and rescale. Then keep the most probable ones until their sum reaches top_p.
    """
    shares, order = probabilities.sort(descending=True)
    shares = shares * (shares >= min_p * shares[0])
    if top_k:
        shares[top_k:] = 0
    shares = shares / shares.sum()
    shares = shares * (shares.cumsum(0) - shares < top_p - 1e-6)
    return torch.zeros_like(shares).scatter(0, order, shares / shares.sum())


def sample(
    logits: Tensor, temperature: float, u: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """Lesson 11: return a token for logits (V,): the best one at temperature 0, else by the random number u.

    Divide the logits by the temperature, and call `keep_probable` with the probabilities.
    """
    if temperature == 0:
        return int(logits.argmax())
    shares = keep_probable((logits / temperature).softmax(0), top_k, top_p, min_p)
    tokens = shares.nonzero().flatten()
    place = int((shares[tokens].cumsum(0) <= u).sum())
    return int(tokens[min(place, len(tokens) - 1)])  # the sum of all may round to less than 1


def num_skipped_blocks(position: int, window: int, block_size: int) -> int:
    """Lesson 12: return how many of a table's first blocks no token from this position on attends to.

    A token attends to itself and to the window - 1 tokens before it.
    """
    return max(0, position - window + 1) // block_size


def window_hit(found: list[bool], window: int, block_size: int) -> int:
    """Lesson 12: return the number of blocks in the longest prefix that a window's layer can continue from.

    found[i] says whether block i of the prompt is cached. A prefix is a hit if all of its blocks to which the
    token after it attends are cached.
    """
    for length in range(len(found), 0, -1):
        if all(found[num_skipped_blocks(length * block_size, window, block_size) : length]):
            return length
    return 0


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lesson 20: round a weight (N, I) to integers from 0 to 15, and return (integers, scales, zeros).

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
    """Lesson 20: return integers (N, I) from 0 to 15 as bytes (N, I // 2).

    A byte holds two columns: the first one in its low 4 bits, the second one in its high 4 bits.
    """
    return integers[:, ::2] | integers[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Lesson 20: undo `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def multiply(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Lesson 20: return rows x (R, I) times the quantized weight: (R, N)."""
    groups = unpack(packed).float().view(len(packed), scales.shape[1], -1)
    weight = groups * scales.unsqueeze(2) + zeros.unsqueeze(2)
    return x @ weight.flatten(1).T


if __name__ == "__main__":
    questions = [ask(question) for question in sys.argv[1:]]  # type: ignore[no-untyped-call]
    engine = Engine(Scheduler(BlockManager(num_blocks=64, block_size=16), num_draft_tokens=3))
    for answer in engine.generate(questions):
        print(TOKENIZER.decode(answer))
