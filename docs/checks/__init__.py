"""The checks that docs/check.py runs: functions of a student's module. A docstring says what must hold."""

import random
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], None]
CHECKS: dict[str, list[tuple[str, Check]]] = {}
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


# ---- what the checks share -----------------------------------------------------------------------


def letters(text: str) -> list[int]:
    """Return the letters as tokens to test with."""
    return [ord(letter) for letter in text]


def text_of(seq: Any) -> str:
    """Return a sequence's tokens as letters."""
    return "".join(map(chr, seq.token_ids))


def compute(blocks: Any, seq: Any) -> None:
    """Count all of a sequence's tokens as computed, and register its full blocks."""
    seq.num_computed_tokens = len(seq.token_ids)
    blocks.register_full_blocks(seq)


def admit(mini: Any, blocks: Any, text: str) -> Any:
    """Return a sequence that was admitted and computed."""
    seq = mini.Sequence(letters(text))
    assert blocks.allocate(seq), f"{text!r} was refused, and {blocks.num_free_blocks} blocks are free."
    compute(blocks, seq)
    return seq


def release(blocks: Any, seq: Any) -> None:
    """Do what `free` does, for the lessons before it."""
    for block in reversed(seq.block_table):
        blocks.ref_counts[block] -= 1
        if blocks.ref_counts[block] == 0 and block in blocks.key_of:
            blocks.evictable_blocks[block] = None
        elif blocks.ref_counts[block] == 0:
            blocks.empty_blocks.append(block)
    seq.block_table, seq.num_computed_tokens, seq.num_hit_tokens = [], 0, 0


def expect_books_to_agree(blocks: Any, seqs: list[Any]) -> None:
    """Check what must hold for a block manager after every call."""
    users = Counter(block for seq in seqs for block in seq.block_table)
    for block in range(blocks.num_blocks):
        expect(
            f"ref_counts[{block}], and how many block tables contain it",
            blocks.ref_counts[block],
            users[block],
        )
    free = sorted([*blocks.empty_blocks, *blocks.evictable_blocks])
    expect("The free blocks, each once", free, [i for i in range(blocks.num_blocks) if not users[i]])
    evictable = sorted(block for block in free if block in blocks.key_of)
    expect("The evictable blocks (free and registered)", sorted(blocks.evictable_blocks), evictable)
    names = {key: block for block, key in blocks.key_of.items()}
    assert names == blocks.block_of, (
        "block_of and key_of disagree: each key has one block, and each block one key."
    )


def run(scheduler: Any, sample: Callable[[Any], int] = lambda seq: ord("x")) -> list[tuple[str, int, int]]:
    """Run one step without a model, and return (first letter, start, end) of each chunk."""
    chunks = scheduler.schedule()
    scheduler.update(chunks, [[sample(chunk.seq)] if chunk.samples else [] for chunk in chunks])
    return [(chr(chunk.seq.token_ids[0]), chunk.start, chunk.end) for chunk in chunks]


def next_token(mini: Any, tokens: list[int]) -> int:
    """Play the model: return a letter or STOP, always the same one after the same tokens."""
    number = zlib.crc32(bytes(token % 256 for token in tokens)) % 9
    return int(mini.STOP) if number == 0 else ord("ab"[number % 2])


def serve(mini: Any, seed: int, num_blocks: int, block_size: int, budget: int, num_drafts: int = 0) -> Any:
    """Serve random requests with a model of letters, and check every slot that a step reads.

    Returns the scheduler.
    """
    rng, memory = random.Random(seed), dict[int, list[int]]()
    blocks = mini.BlockManager(num_blocks, block_size)
    scheduler = mini.Scheduler(blocks, 3, budget, num_drafts)
    prompts = [
        "abab" * rng.randint(0, 2) + "".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(12)
    ]
    seqs = [mini.Sequence(letters(prompt), rng.randint(1, 8)) for prompt in prompts]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(400):
        if all(seq.is_finished for seq in seqs):
            break
        chunks = scheduler.schedule()
        tokens = [chunk.seq.token_ids[: chunk.end] + chunk.drafts for chunk in chunks]
        computed = sum(len(known) - chunk.start for known, chunk in zip(tokens, chunks, strict=True))
        assert computed <= budget, f"A step computes {computed} tokens with a budget of {budget}."
        assert len(scheduler.running) <= 3, f"{len(scheduler.running)} sequences run with max_num_seqs 3."
        for chunk, known in zip(chunks, tokens, strict=True):
            for i in range(max(chunk.start, chunk.seq.num_hit_tokens), len(known)):
                memory[blocks.slot(chunk.seq, i)] = known[: i + 1]
        for chunk, known in zip(chunks, tokens, strict=True):
            for i in range(len(known)):
                assert memory.get(blocks.slot(chunk.seq, i)) == known[: i + 1], (
                    f"The slot of position {i} holds K and V of other tokens, or of none."
                )
        expect_books_to_agree(blocks, scheduler.running)
        sampled = [
            [next_token(mini, known[:i]) for i in range(chunk.end, len(known) + 1)] if chunk.samples else []
            for chunk, known in zip(chunks, tokens, strict=True)
        ]
        scheduler.update(chunks, sampled)
        expect_books_to_agree(blocks, scheduler.running)
    for prompt, seq in zip(prompts, seqs, strict=True):
        assert seq.is_finished, "A sequence is not finished after 400 steps."
        expected = letters(prompt)
        while len(expected) < len(prompt) + seq.max_tokens and expected[-1] != mini.STOP:
            expected.append(next_token(mini, expected))
        expect(f"The tokens after {prompt!r}", seq.token_ids, expected)
    return scheduler
