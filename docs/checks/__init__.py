"""The checks that docs/check.py runs: functions of a student's module. A docstring says what must hold."""

import random
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import nanoengine.nano as solution
from nanoengine.nano import SamplingParams

Check = Callable[[Any], None]
CHECKS: dict[str, list[tuple[str, Check]]] = {}
STOP = ord("!")  # the token that ends a sequence
SHORT = reprlib.Repr()  # a wrong answer may have hundreds of tokens
SHORT.maxlist = SHORT.maxtuple = SHORT.maxset = SHORT.maxdict = 20
SHORT.maxstring = SHORT.maxother = 200


def says(lesson: str) -> Callable[[Check], Check]:
    """Return a decorator that makes a function a check of a lesson. Its docstring is the message."""

    def note(check: Check) -> Check:
        CHECKS.setdefault(lesson, []).append((" ".join((check.__doc__ or "").split()), check))
        return check

    return note


def expect(what: str, got: object, expected: object) -> None:
    """Raise an AssertionError that says what is wrong, unless the two values are equal."""
    assert got == expected, f"{what}: got {SHORT.repr(got)}, expected {SHORT.repr(expected)}."


@says("all")
def is_written(nano: Any) -> None:
    """Every function is written. Until then, nano.py's take the place of those that are missing."""
    assert not nano.unwritten, f"Not written yet: {', '.join(nano.unwritten)}."


# ---- what the checks share -----------------------------------------------------------------------


def letters(text: str) -> list[int]:
    """Return the letters as tokens to test with."""
    return [ord(letter) for letter in text]


def text_of(seq: Any) -> str:
    """Return a sequence's tokens as letters."""
    return "".join(map(chr, seq.token_ids))


def make_sequence(nano: Any, text: str, max_tokens: int = 60) -> Any:
    """Return a sequence that has the letters of its prompt as tokens, and ends at STOP."""
    params = SamplingParams(max_tokens=max_tokens)
    return nano.Sequence(letters(text), params, len(text), stop_ids=frozenset([STOP]))


def make_scheduler(
    nano: Any, num_blocks: int, max_num_seqs: int = 8, budget: int = 64, block_size: int = 4
) -> Any:
    """Return a scheduler with a pool of that many blocks."""
    return nano.Scheduler(nano.BlockManager(num_blocks, block_size), max_num_seqs, budget, 1 << 30)


def use_ours(scheduler: Any, names: str) -> None:
    """Give a scheduler nano.py's methods of these names, for lessons that come before them."""
    for name in names.split():
        setattr(scheduler, name, MethodType(getattr(solution.Scheduler, name), scheduler))


def add(nano: Any, scheduler: Any, *requests: tuple[str, int]) -> list[Any]:
    """Queue a sequence for each (prompt, max_tokens), and return the sequences."""
    seqs = [make_sequence(nano, text, max_tokens) for text, max_tokens in requests]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def compute(blocks: Any, seq: Any) -> None:
    """Count all of a sequence's tokens as computed, and register its full blocks."""
    seq.num_computed_tokens = len(seq.token_ids)
    blocks.register_full_blocks(seq)


def admit(nano: Any, blocks: Any, text: str) -> Any:
    """Return a sequence that was admitted and computed."""
    seq = make_sequence(nano, text)
    assert blocks.allocate(seq), f"{text!r} was refused, and {blocks.num_free_blocks} blocks are free."
    compute(blocks, seq)
    return seq


def state_of(seq: Any) -> dict[str, Any]:
    """Return what a block manager may write of a sequence."""
    names = "token_ids block_table num_computed_tokens num_hit_tokens num_registered_blocks prefix_id"
    return {name: list(x) if isinstance(x := getattr(seq, name), list) else x for name in names.split()}


def release(blocks: Any, seq: Any) -> None:
    """Do what `free` does, for the lessons before it."""
    for block_id in reversed(seq.block_table):
        block = blocks.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0 and block.key is None:
            blocks.empty_blocks.appendleft(block)
        elif block.ref_count == 0:
            blocks.evictable_blocks[block_id] = block
    seq.block_table = []
    seq.num_computed_tokens = seq.num_hit_tokens = seq.num_registered_blocks = seq.prefix_id = 0


def hits_of(nano: Any, blocks: Any, text: str) -> list[int]:
    """Return the ids of the blocks that a prompt hits."""
    return [block.block_id for block in blocks.find_prefix(make_sequence(nano, text))]


def expect_books_to_agree(blocks: Any, seqs: list[Any]) -> None:
    """Check what must hold for a block manager after every call."""
    users = Counter(block_id for seq in seqs for block_id in seq.block_table)
    free = Counter([*(block.block_id for block in blocks.empty_blocks), *blocks.evictable_blocks])
    named = {block.block_id for block in blocks.registered_blocks.values()}
    assert not users[0], "A block table contains the null block."
    for block in blocks.blocks[1:]:
        i, is_registered = block.block_id, block.key is not None
        expect(f"ref_count of block {i}, and how many block tables contain it", block.ref_count, users[i])
        assert not (users[i] and free[i]), f"Block {i} is in a block table and in a list of free blocks."
        assert users[i] or free[i], f"Block {i} is lost: no block table and no list of free blocks has it."
        assert free[i] < 2, f"Block {i} is {free[i]} times in the lists of free blocks."
        what = "a key: evictable_blocks" if is_registered else "no key: empty_blocks"
        assert not free[i] or (i in blocks.evictable_blocks) == is_registered, (
            f"Block {i} is free and has {what} should contain it."
        )
        what = "has a key and is not" if is_registered else "has no key and is"
        assert (i in named) == is_registered, f"Block {i} {what} in registered_blocks."
    for key, block in blocks.registered_blocks.items():
        expect("The hash under which a block is registered, and the hash in its key", key, block.key[0])


def run(scheduler: Any, sample: Callable[[Any], int] = lambda seq: ord("x")) -> list[tuple[str, int, int]]:
    """Run one step without a model, and return (first letter, start, end) of each chunk."""
    chunks = scheduler.schedule()
    scheduler.update(chunks, [sample(chunk.seq) for chunk in chunks if chunk.samples])
    return [(chr(chunk.seq.token_ids[0]), chunk.start, chunk.end) for chunk in chunks]


def next_token(tokens: list[int]) -> int:
    """Play the model: return a letter or STOP, always the same one after the same tokens."""
    number = zlib.crc32(bytes(tokens)) % 9
    return STOP if number == 0 else ord("ab"[number % 2])


def serve(
    nano: Any, seed: int, num_blocks: int, block_size: int, budget: int, num_drafts: int = 0, ours: str = ""
) -> tuple[Any, list[list[tuple[int, int, int]]]]:
    """Serve random requests with a model of letters, and check every slot that a step reads.

    Returns the scheduler, and for each step (number of the request, start, end) of its chunks. With drafts,
    the scheduler is the exercises' DraftingScheduler. `ours` names methods that it takes from nano.py.
    """
    rng, memory = random.Random(seed), dict[int, list[int]]()
    blocks = nano.BlockManager(num_blocks, block_size)
    if num_drafts:
        scheduler = nano.DraftingScheduler(blocks, 3, budget, num_drafts)
    else:
        scheduler = nano.Scheduler(blocks, 3, budget, 1 << 30)
    use_ours(scheduler, ours)
    prompts = [
        "abab" * rng.randint(0, 2) + "".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(12)
    ]
    limits, steps = [rng.randint(1, 8) for _ in prompts], list[list[tuple[int, int, int]]]()
    seqs = add(nano, scheduler, *zip(prompts, limits, strict=True))
    while not all(seq.is_finished for seq in seqs):
        assert len(steps) < 400, "A sequence is not finished after 400 steps."
        chunks = scheduler.schedule()
        steps.append([(seqs.index(chunk.seq), chunk.start, chunk.end) for chunk in chunks])
        tokens = [chunk.seq.token_ids[: chunk.end] + (chunk.drafts if num_drafts else []) for chunk in chunks]
        computed = sum(len(known) - chunk.start for known, chunk in zip(tokens, chunks, strict=True))
        assert computed <= budget, f"A step computes {computed} tokens with a budget of {budget}."
        assert len(scheduler.running) <= 3, f"{len(scheduler.running)} sequences run with max_num_seqs 3."

        def slot(chunk: Any, position: int) -> int:
            table: list[int] = chunk.seq.block_table
            return table[position // block_size] * block_size + position % block_size

        for chunk, known in zip(chunks, tokens, strict=True):
            for i in range(max(chunk.start, chunk.seq.num_hit_tokens), len(known)):
                memory[slot(chunk, i)] = known[: i + 1]
        for chunk, known in zip(chunks, tokens, strict=True):
            for i in range(len(known)):
                assert memory.get(slot(chunk, i)) == known[: i + 1], (
                    f"The slot of position {i} holds K and V of other tokens, or of none."
                )
        expect_books_to_agree(blocks, scheduler.running)
        sampled = [
            [next_token(known[:i]) for i in range(chunk.end, len(known) + 1)] if chunk.samples else []
            for chunk, known in zip(chunks, tokens, strict=True)
        ]
        scheduler.update(chunks, sampled if num_drafts else [token for each in sampled for token in each])
        expect_books_to_agree(blocks, scheduler.running)
    for prompt, seq in zip(prompts, seqs, strict=True):
        expected = letters(prompt)
        while len(expected) < seq.max_num_tokens and expected[-1] != STOP:
            expected.append(next_token(expected))
        expect(f"The tokens after {prompt!r}", seq.token_ids, expected)
    return scheduler, steps
