"""Checks the scheduler, lessons 6 to 8 and 13, and the whole engine."""

from typing import Any

import torch

from docs.checks import expect, letters, release, run, says, serve, text_of


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
    """The stop token finishes a sequence, and its blocks are freed. STOP is its last token."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4))
    seq = mini.Sequence(letters("abc"), 9)
    scheduler.add(seq)
    run(scheduler, lambda seq: mini.STOP)
    expect("Ended", seq.is_finished, True)
    expect("Tokens", seq.token_ids, [*letters("abc"), mini.STOP])
    expect("Running", [text_of(seq) for seq in scheduler.running], [])
    expect("Free blocks of 9", scheduler.block_manager.num_free_blocks, 9)


@says("6")
def keeps_nothing_after_the_end(mini: Any) -> None:
    """If a step samples several tokens, those after STOP do not count, nor those beyond max_tokens."""
    for max_tokens, expected in (9, [120, mini.STOP]), (1, [120]):
        scheduler = mini.Scheduler(mini.BlockManager(9, 4))
        seq = mini.Sequence(letters("abc"), max_tokens)
        scheduler.add(seq)
        (chunk,) = scheduler.schedule()
        chunk = chunk._replace(drafts=[120, mini.STOP])
        scheduler.update([chunk], [[120, mini.STOP, 122]])
        expect(f"The answer, with max_tokens {max_tokens}", seq.token_ids[3:], expected)
        expect("Ended", seq.is_finished, True)


@says("6")
def asks_accept(mini: Any) -> None:
    """`accept` says how many of the sampled tokens count."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4))
    seq = mini.Sequence(letters("abc"), 9)
    scheduler.add(seq)
    (chunk,) = scheduler.schedule()
    mini.accept = lambda drafts, sampled: sampled[:1]
    scheduler.update([chunk._replace(drafts=[120, 121])], [[120, 122, 123]])
    expect("The answer if accept returns the first token", seq.token_ids[3:], [120])


@says("6")
def leaves_one_token_to_compute(mini: Any) -> None:
    """After a step that sampled, the last token has no K and V yet: all tokens but one are computed.

    A chunk that samples nothing changes nothing.
    """
    scheduler = mini.Scheduler(mini.BlockManager(9, 4))
    seq = mini.Sequence(letters("abc"), 9)
    scheduler.add(seq)
    (chunk,) = scheduler.schedule()
    scheduler.update([chunk._replace(samples=False)], [[]])
    expect("Tokens after a chunk without a sample", len(seq.token_ids), 3)
    scheduler.update([chunk._replace(drafts=[120])], [[120, 121]])
    expect("Tokens and computed tokens", (len(seq.token_ids), seq.num_computed_tokens), (5, 4))


@says("6")
def keeps_the_queue_s_order(mini: Any) -> None:
    """If the first sequence in the queue does not fit, a small one after it waits too."""
    scheduler = mini.Scheduler(mini.BlockManager(4, 4))
    for text in "aaaaaaaaaaaa", "bbbbbbbb", "c":
        scheduler.add(mini.Sequence(letters(text), 2))
    expect("Step 1", run(scheduler), [("a", 0, 12)])
    expect("Waiting", [text_of(seq)[0] for seq in scheduler.waiting], ["b", "c"])


@says("6")
def spends_the_budget(mini: Any) -> None:
    """Running sequences are scheduled first, and no sequence is admitted once the budget is used up."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4), max_num_batched_tokens=4)
    for text in "aaaa", "b", "cc":
        scheduler.add(mini.Sequence(letters(text), 9))
    expect("Step 1", run(scheduler), [("a", 0, 4)])
    expect("Step 2", run(scheduler)[:2], [("a", 4, 5), ("b", 0, 1)])
    scheduler = mini.Scheduler(mini.BlockManager(9, 4), max_num_batched_tokens=2)
    for text in "a", "b":
        scheduler.add(mini.Sequence(letters(text), 9))
    run(scheduler)
    scheduler.max_num_batched_tokens = 1
    expect("Two run, and the budget is 1", run(scheduler), [("a", 1, 2)])


@says("6")
def passes_over_the_preempted(mini: Any) -> None:
    """A sequence that `make_room` preempts for another one gets no chunk in this step.

    It was running when the step began, so test whether it still runs. Nothing is
    admitted in a step that preempts.
    """
    scheduler = mini.Scheduler(mini.BlockManager(9, 4))
    for text in "aaa", "bbb":
        scheduler.add(mini.Sequence(letters(text), 9))
    run(scheduler)

    def make_room(seq: Any) -> bool:
        if len(scheduler.running) == 2:
            last = scheduler.running.pop()
            release(scheduler.block_manager, last)
            scheduler.waiting.insert(0, last)
            scheduler.num_preemptions += 1
        return bool(scheduler.block_manager.may_append(seq, len(seq.token_ids)))

    scheduler.make_room = make_room
    expect("The step", run(scheduler), [("a", 3, 4)])
    scheduler.make_room = lambda seq: False
    expect("A step in which nothing running has room", run(scheduler)[:1], [("b", 0, 4)])


@says("6")
def serves_random_requests(mini: Any) -> None:
    """Twelve random requests get the same answers as without a cache, and all of their blocks come back."""
    for block_size in 3, 4:
        scheduler = serve(mini, block_size, 200, block_size, 1000)
        expect("Free blocks at the end", scheduler.block_manager.num_free_blocks, 200)


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
    seq.token_ids.append(ord("x"))
    seq.num_computed_tokens = 8
    expect("A decode samples", scheduler.next_chunk(seq, 6).samples, True)


@says("7")
def starts_behind_hits(mini: Any) -> None:
    """A chunk begins at the first uncomputed token, and the budget limits its length.

    With 5 of 8 tokens computed it is [5, 8) with a budget of 6, and [5, 7) with a budget of 2.
    """
    scheduler, seq = mini.Scheduler(mini.BlockManager(9, 4)), mini.Sequence(letters("abcdefgh"))
    seq.num_computed_tokens = 5
    for budget, expected in (6, (5, 8)), (2, (5, 7)), (3, (5, 8)):
        chunk = scheduler.next_chunk(seq, budget)
        expect(f"Chunk with a budget of {budget}", (chunk.start, chunk.end), expected)
        expect("Drafts", list(chunk.drafts), [])


@says("7")
def changes_nothing(mini: Any) -> None:
    """next_chunk only returns a chunk. `schedule` counts it as computed."""
    scheduler, seq = mini.Scheduler(mini.BlockManager(9, 4)), mini.Sequence(letters("abcdefgh"))
    before = dict(vars(seq))
    scheduler.next_chunk(seq, 6)
    expect("The sequence", vars(seq), before)


@says("7")
def keeps_the_budget(mini: Any) -> None:
    """A step computes no more tokens than its budget, and schedules running sequences first."""
    scheduler = mini.Scheduler(mini.BlockManager(9, 4), max_num_batched_tokens=4)
    for text in "aaa", "bbbbb":
        scheduler.add(mini.Sequence(letters(text), 9))
    expect("Step 1", run(scheduler), [("a", 0, 3), ("b", 0, 1)])
    expect("Step 2", run(scheduler), [("a", 3, 4), ("b", 1, 4)])
    for budget in 1, 5:
        serve(mini, budget, 200, 4, budget)


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
    expect("Waiting sequences", len(scheduler.waiting), 1)
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


def crowded(mini: Any, first: str = "aaaa") -> Any:
    """Return a scheduler in which three sequences hold all three blocks, one each."""
    scheduler = mini.Scheduler(mini.BlockManager(3, 4))
    for text in first, "bbbb", "cccc":
        scheduler.add(mini.Sequence(letters(text), 5))
    scheduler.schedule()
    return scheduler


@says("8")
def preempts_as_often_as_needed(mini: Any) -> None:
    """If one preemption frees too little, the next-to-last sequence is preempted too, and so on."""
    scheduler = crowded(mini)
    first = scheduler.running[0]
    first.token_ids += letters("aaaaa")
    expect("The result of make_room, two more blocks needed", scheduler.make_room(first), True)
    expect("Preemptions", scheduler.num_preemptions, 2)
    expect("Running", [text_of(seq) for seq in scheduler.running], [text_of(first)])
    expect("Waiting, in order of arrival", [text_of(seq) for seq in scheduler.waiting], ["bbbb", "cccc"])
    expect("Blocks of the first", len(first.block_table), 3)


@says("8")
def preempts_itself(mini: Any) -> None:
    """If the last sequence needs a block, it is preempted itself, and no other sequence.

    make_room returns False.
    """
    scheduler = crowded(mini)
    *others, last = scheduler.running
    last.token_ids += letters("c")
    expect("The result of make_room", scheduler.make_room(last), False)
    expect("Running", [text_of(seq) for seq in scheduler.running], [text_of(seq) for seq in others])
    expect("Preemptions", scheduler.num_preemptions, 1)


@says("8")
def preempts_only_if_needed(mini: Any) -> None:
    """If there is a free block, or room in the last one, no sequence is preempted.

    preempt_last returns the sequence that it preempted.
    """
    scheduler = mini.Scheduler(mini.BlockManager(4, 4))
    for text in "aaaa", "bbb":
        scheduler.add(mini.Sequence(letters(text), 5))
    scheduler.schedule()
    first, second = scheduler.running
    for seq in first, second:
        seq.token_ids.append(ord("x"))
        expect("The result of make_room", scheduler.make_room(seq), True)
    expect("Preemptions", scheduler.num_preemptions, 0)
    expect("The result of preempt_last", scheduler.preempt_last() is second, True)


@says("8")
def all_end(mini: Any) -> None:
    """Preempted sequences run again and finish, with as many tokens as without a preemption."""
    scheduler = scarce(mini, "abcdefg", "hijklmn", "opqrstu")
    seqs = scheduler.running + scheduler.waiting
    for _ in range(40):
        run(scheduler)
    expect("Ended", [seq.is_finished for seq in seqs], [True] * 3)
    expect("Tokens", [len(seq.token_ids) for seq in seqs], [12] * 3)
    for num_blocks in 6, 8:
        serve(mini, num_blocks, num_blocks, 4, 7)


@says("13")
def accepts_up_to_the_first_miss(mini: Any) -> None:
    """With drafts e f x and samples e f g z, e f g count: none after the first wrong draft."""
    expect("Accepted", mini.accept(letters("efx"), letters("efgz")), letters("efg"))
    expect("Accepted, all drafts right", mini.accept(letters("ef"), letters("efg")), letters("efg"))
    expect("Accepted, only the second right", mini.accept(letters("xf"), letters("efg")), letters("e"))
    expect("Accepted, no drafts", mini.accept([], letters("e")), letters("e"))
    expect("Accepted, no drafts and no samples", mini.accept([], []), [])


@says("13")
def looks_up_the_latest(mini: Any) -> None:
    """After "abcabdab" the draft is what followed the latest earlier "ab": "da". Two tokens must be equal."""
    expect("Drafts", mini.lookup(letters("abcabdab"), 2), letters("da"))
    expect("Drafts, one wanted", mini.lookup(letters("abcabdab"), 1), letters("d"))
    expect("Drafts where nothing repeats", mini.lookup(letters("abcd"), 2), [])
    expect("Drafts where one token repeats", mini.lookup(letters("axcdbx"), 2), [])
    expect("Drafts after 'aaa'", mini.lookup(letters("aaa"), 2), letters("a"))
    expect("Drafts after one token", mini.lookup(letters("a"), 2), [])
    expect("Drafts at the beginning", mini.lookup(letters("abxyab"), 3), letters("xya"))


@says("13")
def drafts_after_known_tokens_only(mini: Any) -> None:
    """There are no drafts in the middle of a prompt, nor beyond budget, max_tokens or free blocks."""
    for num_blocks, max_tokens, budget, samples, expected in [
        (4, 9, 8, True, 3),
        (4, 9, 8, False, 0),
        (4, 9, 2, True, 2),
        (4, 9, 0, True, 0),
        (4, 2, 8, True, 1),
        (4, 1, 8, True, 0),
        (2, 9, 8, True, 0),
    ]:
        scheduler = mini.Scheduler(mini.BlockManager(num_blocks, 4), num_draft_tokens=3)
        seq = mini.Sequence(letters("abcdefab"), max_tokens)
        scheduler.block_manager.may_append(seq, 8)
        what = f"Drafts with {num_blocks} blocks, max_tokens {max_tokens}, budget {budget}, samples {samples}"
        drafts = scheduler.draft(mini.Chunk(seq, 0, 8, samples, []), budget)
        expect(what, len(drafts), expected)
        expect("Blocks", len(seq.block_table), 3 if drafts else 2)
    expect("Drafts with num_draft_tokens 0", scheduler_without_drafts(mini), [])


def scheduler_without_drafts(mini: Any) -> Any:
    """Return what a scheduler that should not draft drafts."""
    scheduler = mini.Scheduler(mini.BlockManager(4, 4))
    return scheduler.draft(mini.Chunk(mini.Sequence(letters("abcdefab")), 0, 8, True, []), 8)


@says("13")
def preempts_nobody_for_drafts(mini: Any) -> None:
    """Drafts use free blocks only. They never preempt a sequence, because they may be wrong."""
    scheduler = crowded(mini, "abab")
    scheduler.num_draft_tokens = 3
    first = scheduler.running[0]
    drafts = scheduler.draft(mini.Chunk(first, 0, 4, True, []), 8)
    expect("Drafts where no block is free", drafts, [])
    expect("Running, waiting", (len(scheduler.running), len(scheduler.waiting)), (3, 0))


@says("13")
def drafts_change_no_answer(mini: Any) -> None:
    """Random requests get the same answers with drafts as without, in a scarce cache and a small budget."""
    for seed in range(4):
        serve(mini, seed, 6 + seed, 4, 5 + seed, num_drafts=3)


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
