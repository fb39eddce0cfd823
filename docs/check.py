"""Checks the engine that you build along with the lessons, one lesson at a time.

    python -m docs.check --stub > my_mini.py    write the file that you fill in
    python -m docs.check 5 my_mini.py           check your functions of lesson 5
    python -m docs.check all my_mini.py         check that the engine answers like transformers

The check of a lesson runs your functions from that lesson, and the solution's from all others. So you can
do the lessons in any order, and a mistake in one does not fail another.
"""

import argparse
import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

SOLUTION = Path(__file__).with_name("solution.py")
LESSONS = {
    "3": "Paging: num_blocks_for, slot, may_append",
    "4": "Prefix caching: block_keys, find_prefix, register_full_blocks, allocate",
    "5": "Eviction: hold, take_free_block, free",
    "6": "Continuous batching: schedule, update",
    "7": "Chunked prefill: next_chunk",
    "8": "Preemption: make_room, preempt_last",
    "13": "Speculative decoding: draft, lookup, accept",
    "all": "The whole engine, on the bundled model",
}
Check = Callable[[Any], None]
CHECKS: dict[str, list[tuple[str, Check]]] = {lesson: [] for lesson in LESSONS}

# ---- the student's file --------------------------------------------------------------------------


@cache
def functions_of(source: str) -> list[tuple[str, str, ast.FunctionDef]]:
    """Return (lesson, class or "", function) for each function that a lesson leaves to the student."""
    found = []
    for node in ast.parse(source).body:
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        for item in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, ast.FunctionDef) and (ast.get_docstring(item) or "").startswith("Lesson "):
                lesson = (ast.get_docstring(item) or "").split(":")[0]
                found.append((lesson.removeprefix("Lesson "), owner, item))
    return found


@cache
def compiled(source: str, name: str) -> CodeType:
    """Compile source, once for each text."""
    return compile(source, name, "exec")


def stub() -> str:
    """Return the solution without the bodies of the functions that are left to the student."""
    lines = SOLUTION.read_text().splitlines()
    for _, _, function in reversed(functions_of(SOLUTION.read_text())):
        docstring, last = function.body[0], function.body[-1]
        indent = " " * docstring.col_offset
        lines[docstring.end_lineno : last.end_lineno] = [f"{indent}raise NotImplementedError"]
    return "\n".join(lines) + "\n"


def load(source: str, name: str) -> Any:
    """Return a new module that runs source."""
    module = ModuleType(name)
    exec(compiled(source, name), module.__dict__)
    return module


def combine(source: str, lesson: str) -> Any:
    """Return the solution with the student's functions for one lesson, and any additions to its classes.

    Raises:
        AttributeError: a function of the lesson is missing.
    """
    mine, solution = load(source, "my_mini"), load(SOLUTION.read_text(), "solution")
    if lesson == "all":
        return mine
    for where, owner, function in functions_of(SOLUTION.read_text()):
        if where == lesson:
            ours, theirs = (getattr(module, owner) if owner else module for module in (mine, solution))
            setattr(theirs, function.name, getattr(ours, function.name))
        elif not owner:  # the student's functions call the solution's module-level functions
            setattr(mine, function.name, getattr(solution, function.name))
    for name in "BlockManager", "Scheduler":
        for extra in vars(getattr(mine, name)).keys() - vars(getattr(solution, name)).keys():
            setattr(getattr(solution, name), extra, vars(getattr(mine, name))[extra])
    return solution


def failures(source: str, lesson: str) -> list[str]:
    """Return a message for each check of the lesson that the student's source fails."""
    found = []
    for sentence, check in CHECKS[lesson]:
        try:
            check(combine(source, lesson))
        except NotImplementedError:
            found.append(f"{sentence}\n    A function that this check needs is not written yet.")
        except AssertionError as error:
            found.append(f"{sentence}\n    {error}")
        except Exception as error:
            found.append(f"{sentence}\n    Your code raised {type(error).__name__}: {error}")
    return found


def says(lesson: str) -> Callable[[Check], Check]:
    """Return a decorator that makes a function a check of a lesson. Its docstring is the message."""

    def note(check: Check) -> Check:
        CHECKS[lesson].append((check.__doc__ or "", check))
        return check

    return note


def expect(what: str, got: object, expected: object) -> None:
    """Raise an AssertionError that says what is wrong, unless the two values are equal."""
    assert got == expected, f"{what}: got {got}, expected {expected}."


# ---- the checks, lesson by lesson --------------------------------------------------------------


def letters(text: str) -> list[int]:
    """Return the letters as tokens to test with."""
    return [ord(letter) for letter in text]


def admit(mini: Any, blocks: Any, text: str) -> Any:
    """Return a sequence that was admitted and computed."""
    seq = mini.Sequence(letters(text))
    assert blocks.allocate(seq), f"{text!r} was refused, and {blocks.num_free_blocks} blocks are free."
    seq.num_computed_tokens = len(text)
    blocks.register_full_blocks(seq)
    return seq


def run(scheduler: Any, draw: Callable[[Any], int] = lambda seq: ord("x")) -> list[tuple[str, int, int]]:
    """Run one step without a model, and return (first letter, start, end) of each chunk."""
    chunks = scheduler.schedule()
    scheduler.update(chunks, [[draw(chunk.seq)] if chunk.samples else [] for chunk in chunks])
    return [(chr(chunk.seq.token_ids[0]), chunk.start, chunk.end) for chunk in chunks]


@says("3")
def rounds_up(mini: Any) -> None:
    """Blocks of 4: 0, 1, 4, 5 and 8 tokens need 0, 1, 1, 2 and 2 blocks."""
    blocks = mini.BlockManager(8, 4)
    expect("Blocks needed", [blocks.num_blocks_for(n) for n in (0, 1, 4, 5, 8)], [0, 1, 1, 2, 2])


@says("3")
def finds_slots(mini: Any) -> None:
    """With block table [7, 2] and blocks of 4, position 5 is slot 9."""
    seq = mini.Sequence(letters("abcdef"))
    seq.block_table = [7, 2]
    blocks = mini.BlockManager(8, 4)
    expect("Slots of all positions", [blocks.slot(seq, i) for i in range(6)], [28, 29, 30, 31, 8, 9])


@says("3")
def grows_in_time(mini: Any) -> None:
    """Four tokens take one block of 4. The second block is added for the fifth token, and no earlier."""
    blocks, seq = mini.BlockManager(2, 4), mini.Sequence([])
    for num_tokens, num_blocks in (4, 1), (5, 2), (8, 2):
        expect("The answer of may_append", blocks.may_append(seq, num_tokens), True)
        expect(f"Blocks of {num_tokens} tokens", len(seq.block_table), num_blocks)


@says("3")
def grows_wholly_or_not(mini: Any) -> None:
    """If two blocks are needed and one is free, may_append returns False and takes none."""
    blocks, seq = mini.BlockManager(1, 4), mini.Sequence([])
    expect("The answer of may_append", blocks.may_append(seq, 8), False)
    expect("Free blocks afterwards", blocks.num_free_blocks, 1)


@says("4")
def shares_beginnings(mini: Any) -> None:
    """A prompt that begins with the same 8 letters shares their two blocks, and starts at position 8."""
    blocks = mini.BlockManager(8, 4)
    a, b = admit(mini, blocks, "abcdefghij"), mini.Sequence(letters("abcdefghxy"))
    blocks.allocate(b)
    expect("Shared blocks", b.block_table[:2], a.block_table[:2])
    expect("Blocks in all", len(b.block_table), 3)
    expect("Tokens computed at admission", b.num_computed_tokens, 8)


@says("4")
def chains_keys(mini: Any) -> None:
    """The same four letters after other letters are not a hit: a key depends on the key before it."""
    blocks = mini.BlockManager(8, 4)
    admit(mini, blocks, "abcdefgh")
    expect("Hits of 'efgh'", blocks.find_prefix(mini.Sequence(letters("efgh"))), [])
    expect("Hits of '0123efgh'", blocks.find_prefix(mini.Sequence(letters("0123efgh"))), [])


@says("4")
def registers_full_blocks_only(mini: Any) -> None:
    """Only blocks full of computed tokens can be found: if 6 of 8 tokens are computed, the first block."""
    blocks, seq = mini.BlockManager(8, 4), mini.Sequence(letters("abcdefgh"))
    blocks.allocate(seq)
    seq.num_computed_tokens = 6
    blocks.register_full_blocks(seq)
    expect("Hits", blocks.find_prefix(mini.Sequence(letters("abcdefgh"))), seq.block_table[:1])


@says("4")
def computes_one_token(mini: Any) -> None:
    """If a whole prompt is a hit, its last token is computed again: its logits choose the next token."""
    blocks = mini.BlockManager(8, 4)
    admit(mini, blocks, "abcdefgh")
    seq = mini.Sequence(letters("abcdefgh"))
    blocks.allocate(seq)
    expect("Tokens computed at admission", seq.num_computed_tokens, 7)


@says("4")
def refuses_wholly(mini: Any) -> None:
    """A hit on a free block uses up that block. If a sequence does not fit, it is refused without changes."""
    blocks = mini.BlockManager(3, 4)
    blocks.free(admit(mini, blocks, "abcdefgh"))
    seq = mini.Sequence(letters("abcdefghijklm"))
    expect("The answer of allocate, with 2 hits, 2 more needed and 1 empty", blocks.allocate(seq), False)
    expect("Free blocks afterwards", blocks.num_free_blocks, 3)


@says("5")
def counts_users(mini: Any) -> None:
    """A block that two sequences use is not free while either of them runs."""
    blocks = mini.BlockManager(8, 4)
    a, b = admit(mini, blocks, "abcdefgh"), admit(mini, blocks, "abcdefgh")
    blocks.free(a)
    expect("Free blocks of 8", blocks.num_free_blocks, 6)
    blocks.free(b)
    expect("Free blocks when both have finished", blocks.num_free_blocks, 8)


@says("5")
def evicts_tails(mini: Any) -> None:
    """A freed sequence's last block is evicted first: 8 of its 12 letters can still be hit."""
    blocks = mini.BlockManager(3, 4)
    blocks.free(admit(mini, blocks, "abcdefghijkl"))
    admit(mini, blocks, "0123")
    expect("Blocks hit", len(blocks.find_prefix(mini.Sequence(letters("abcdefghijkl")))), 2)


@says("5")
def forgets_what_it_evicts(mini: Any) -> None:
    """The old content of a block is no longer found once the block is taken for another sequence."""
    blocks = mini.BlockManager(1, 4)
    blocks.free(admit(mini, blocks, "abcd"))
    admit(mini, blocks, "0123")
    expect("Hits of the old content", blocks.find_prefix(mini.Sequence(letters("abcd"))), [])


@says("5")
def takes_empty_ones_first(mini: Any) -> None:
    """While a free block without registered content is left, nothing is evicted."""
    blocks = mini.BlockManager(3, 4)
    blocks.free(admit(mini, blocks, "abcdefghi"))
    admit(mini, blocks, "0123")
    expect("Blocks hit", len(blocks.find_prefix(mini.Sequence(letters("abcdefgh")))), 2)


@says("5")
def revives(mini: Any) -> None:
    """A hit on a free block removes it from the free blocks, so that no other sequence gets it."""
    blocks = mini.BlockManager(2, 4)
    blocks.free(admit(mini, blocks, "abcd"))
    admit(mini, blocks, "abcd")
    expect("Free blocks of 2", blocks.num_free_blocks, 1)


@says("6")
def admits_at_once(mini: Any) -> None:
    """With three requests and two places, the third is admitted in the step after the first finishes."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4), max_num_seqs=2)
    for text, max_tokens in ("a", 2), ("b", 4), ("c", 2):
        scheduler.add(mini.Sequence(letters(text), max_tokens))
    steps = [run(scheduler) for _ in range(4)]
    expect("Step 1", steps[0], [("a", 0, 1), ("b", 0, 1)])
    expect("Step 2", steps[1], [("a", 1, 2), ("b", 1, 2)])
    expect("Step 3", steps[2], [("b", 2, 3), ("c", 0, 1)])
    expect("Step 4", steps[3], [("b", 3, 4), ("c", 1, 2)])
    expect("Blocks in use at the end", 9 - scheduler.block_manager.num_free_blocks, 0)


@says("6")
def stops(mini: Any) -> None:
    """The stop token finishes a sequence, and its blocks are freed."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4))
    seq = mini.Sequence(letters("abc"), 9)
    scheduler.add(seq)
    run(scheduler, lambda seq: mini.STOP)
    expect("Ended", seq.is_finished, True)
    expect("Running", scheduler.running, [])
    expect("Free blocks of 9", scheduler.block_manager.num_free_blocks, 9)


@says("6")
def keeps_the_queue_s_order(mini: Any) -> None:
    """If the first sequence in the queue does not fit, a small one after it waits too."""
    scheduler = mini.Scheduler(mini.BlockManager(4, 4))
    for text in "aaaaaaaaaaaa", "bbbbbbbb", "c":
        scheduler.add(mini.Sequence(letters(text), 2))
    expect("Step 1", run(scheduler), [("a", 0, 12)])


@says("6")
def keeps_the_budget(mini: Any) -> None:
    """A step computes no more tokens than its budget, and schedules running sequences first."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4), max_num_batched_tokens=4)
    for text in "aaa", "bbbbb":
        scheduler.add(mini.Sequence(letters(text), 9))
    expect("Step 1", run(scheduler), [("a", 0, 3), ("b", 0, 1)])
    expect("Step 2", run(scheduler), [("a", 3, 4), ("b", 1, 4)])


@says("7")
def cuts_prompts(mini: Any) -> None:
    """With a budget of 6, a prompt of 11 tokens is computed as [0, 6) and [6, 11)."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4), max_num_batched_tokens=6)
    scheduler.add(mini.Sequence(letters("abcdefghijk"), 9))
    expect("Chunks", [run(scheduler), run(scheduler)], [[("a", 0, 6)], [("a", 6, 11)]])


@says("7")
def draws_at_the_end_only(mini: Any) -> None:
    """A chunk in the middle of a prompt samples nothing. The last chunk samples a token."""
    scheduler, seq = mini.Scheduler(mini.BlockManager(9, 4)), mini.Sequence(letters("abcdefgh"))
    expect("The chunk samples, 6 of 8 tokens", scheduler.next_chunk(seq, 6).samples, False)
    expect("The chunk samples, 8 of 8 tokens", scheduler.next_chunk(seq, 8).samples, True)


@says("7")
def starts_behind_hits(mini: Any) -> None:
    """A chunk begins at the first uncomputed token: with 5 of 8 tokens computed it is [5, 8)."""
    scheduler, seq = mini.Scheduler(mini.BlockManager(9, 4)), mini.Sequence(letters("abcdefgh"))
    seq.num_computed_tokens = 5
    chunk = scheduler.next_chunk(seq, 6)
    expect("Chunk", (chunk.start, chunk.end), (5, 8))


def scarce(mini: Any, *texts: str) -> Any:
    """Return a scheduler with too few blocks for two answers, one step before a sequence is preempted."""
    scheduler = mini.Scheduler(mini.BlockManager(5, 4))
    for text in texts:
        scheduler.add(mini.Sequence(letters(text), 5))
    for _ in range(2):
        run(scheduler)
    return scheduler


@says("8")
def preempts_the_last(mini: Any) -> None:
    """If one block is free and two are needed, the sequence that arrived last is preempted."""
    scheduler = scarce(mini, "abcdefg", "hijklmn")
    expect("Step 3", run(scheduler), [("a", 8, 9)])
    expect("Preemptions", scheduler.num_preemptions, 1)


@says("8")
def keeps_tokens(mini: Any) -> None:
    """A preempted sequence keeps its tokens, holds no blocks, and has no computed tokens."""
    scheduler = scarce(mini, "abcdefg", "hijklmn")
    run(scheduler)
    seq = scheduler.waiting[0]
    expect("Tokens", len(seq.token_ids), 9)
    expect("Blocks", seq.block_table, [])
    expect("Computed tokens", seq.num_computed_tokens, 0)


@says("8")
def waits_in_front(mini: Any) -> None:
    """A preempted sequence waits in front of sequences that never ran."""
    scheduler = scarce(mini, "abcdefg", "hijklmn")
    scheduler.add(mini.Sequence(letters("z"), 2))
    run(scheduler)
    expect("Waiting", [chr(seq.token_ids[0]) for seq in scheduler.waiting], ["h", "z"])


@says("8")
def all_end(mini: Any) -> None:
    """Preempted sequences run again and finish, with as many tokens as without a preemption."""
    scheduler = scarce(mini, "abcdefg", "hijklmn", "opqrstu")
    seqs = scheduler.running + scheduler.waiting
    for _ in range(40):
        run(scheduler)
    expect("Ended", [seq.is_finished for seq in seqs], [True] * 3)
    expect("Tokens", [len(seq.token_ids) for seq in seqs], [12] * 3)


@says("13")
def accepts_up_to_the_first_miss(mini: Any) -> None:
    """With drafts e f x and samples e f g z, e f g count: none after the first wrong draft."""
    expect("Taken", mini.accept(letters("efx"), letters("efgz")), letters("efg"))
    expect("Taken, all drafts right", mini.accept(letters("ef"), letters("efg")), letters("efg"))
    expect("Taken, first draft wrong, second right", mini.accept(letters("xf"), letters("efg")), letters("e"))


@says("13")
def looks_up_the_latest(mini: Any) -> None:
    """After "abcabdab" the draft is what followed the latest earlier "ab": "da"."""
    expect("Drafts", mini.lookup(letters("abcabdab"), 2), letters("da"))
    expect("Drafts where nothing repeats", mini.lookup(letters("abcd"), 2), [])


@says("13")
def drafts_after_known_tokens_only(mini: Any) -> None:
    """There are no drafts in the middle of a prompt, nor beyond budget, max_tokens or free blocks."""
    for num_blocks, max_tokens, budget, samples, expected in [
        (4, 9, 8, True, 3),
        (4, 9, 8, False, 0),
        (4, 9, 2, True, 2),
        (4, 2, 8, True, 1),
        (2, 9, 8, True, 0),
    ]:
        scheduler = mini.Scheduler(mini.BlockManager(num_blocks, 4), num_draft_tokens=3)
        seq = mini.Sequence(letters("abcdefab"), max_tokens)
        scheduler.block_manager.may_append(seq, 8)
        what = f"Drafts with {num_blocks} blocks, max_tokens {max_tokens}, budget {budget}, samples {samples}"
        expect(what, len(scheduler.draft(mini.Chunk(seq, 0, 8, samples, []), budget)), expected)


@says("all")
def says_what_transformers_says(mini: Any) -> None:
    """Four questions at once, with scarce blocks, chunks and drafts, get the answers of transformers."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained("nanoengine/demo")
    texts = ["Who are you?", "What is 62 + 19?", "Count from 3 to 11.", "Spell the word paging backwards."]
    prompts = [mini.ask(text) for text in texts]
    expected = [
        reference.generate(torch.tensor([ids]), max_new_tokens=60, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    scheduler = mini.Scheduler(mini.BlockManager(24, 4), 4, max_num_batched_tokens=16, num_draft_tokens=3)
    answers = mini.Engine(scheduler).generate(prompts)
    for text, answer, right in zip(texts, answers, expected, strict=True):
        expect(text, mini.TOKENIZER.decode(answer), mini.TOKENIZER.decode(right))
    expect("All blocks are free at the end", scheduler.block_manager.num_free_blocks, 24)


# ---- the command ---------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run the command, and return how many checks failed."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.check",
        description=__doc__,
        epilog="lessons:\n" + "\n".join(f"  {lesson:4} {what}" for lesson, what in LESSONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lesson", nargs="?", choices=LESSONS, metavar="lesson")
    parser.add_argument("file", nargs="?", type=Path, help="your file; default: the solution")
    parser.add_argument("--stub", action="store_true", help="print the file that you fill in")
    options = parser.parse_args(arguments)
    if options.stub:
        print(stub(), end="")
        return 0
    if options.lesson is None:
        parser.error("name a lesson to check, or use --stub")
    found = failures((options.file or SOLUTION).read_text(), options.lesson)
    for failure in found:
        print(failure)
    print(f"{len(CHECKS[options.lesson]) - len(found)} of {len(CHECKS[options.lesson])} checks pass.")
    return len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
