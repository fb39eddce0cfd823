"""Checks the scheduler, lessons 7 to 9 and 14, and the whole engine."""

from typing import Any

import torch

import nanoengine.nano as solution
from docs.checks import (
    STOP,
    add,
    expect,
    letters,
    make_scheduler,
    make_sequence,
    release,
    run,
    says,
    serve,
    state_of,
    text_of,
    use_ours,
)


@says("7")
def admits_at_once(nano: Any) -> None:
    """With three requests and two places, the third is admitted in the step after the first finishes."""
    scheduler = make_scheduler(nano, 9, max_num_seqs=2)
    add(nano, scheduler, ("a", 2), ("b", 4), ("c", 2))
    steps = [run(scheduler) for _ in range(4)]
    expect("Step 1", steps[0], [("a", 0, 1), ("b", 0, 1)])
    expect("Step 2", steps[1], [("a", 1, 2), ("b", 1, 2)])
    expect("Step 3", steps[2], [("b", 2, 3), ("c", 0, 1)])
    expect("Step 4", steps[3], [("b", 3, 4), ("c", 1, 2)])
    expect("Blocks in use at the end", 9 - scheduler.block_manager.num_free_blocks, 0)


@says("7")
def stops(nano: Any) -> None:
    """The stop token finishes a sequence, and its blocks are freed. It is the sequence's last token."""
    scheduler = make_scheduler(nano, 9)
    seq, other = add(nano, scheduler, ("abc", 9), ("xyz", 9))
    chunks = scheduler.schedule()
    finished = scheduler.update(chunks, [STOP, ord("u")])
    expect("Ended", (seq.is_finished, other.is_finished), (True, False))
    expect("Tokens", seq.token_ids, [*letters("abc"), STOP])
    expect("Running", [text_of(seq) for seq in scheduler.running], ["xyzu"])
    expect("Free blocks of 9", scheduler.block_manager.num_free_blocks, 8)
    expect("The sequences that update returns", [text_of(seq) for seq in finished], ["abc!"])
    (last,) = add(nano, scheduler, ("mn", 9))
    last.stop_ids = frozenset()
    run(scheduler, lambda seq: STOP)
    expect("Ended by a token that is no stop token of the sequence", last.is_finished, False)


@says("7")
def stops_at_max_tokens(nano: Any) -> None:
    """A sequence finishes at max_num_tokens, which counts the prompt too."""
    scheduler = make_scheduler(nano, 9)
    (seq,) = add(nano, scheduler, ("abc", 2))
    expect("max_num_tokens", seq.max_num_tokens, 5)
    run(scheduler)
    expect("Ended after one token of two", seq.is_finished, False)
    run(scheduler)
    expect("Ended after two", seq.is_finished, True)
    expect("Tokens", text_of(seq), "abcxx")
    scheduler = make_scheduler(nano, 2)
    (seq,) = add(nano, scheduler, ("abcdef", 10))
    expect("max_num_tokens, with room for 8 tokens and one that is never computed", seq.max_num_tokens, 9)
    for _ in range(3):
        run(scheduler)
    expect("Ended with 9 tokens", seq.is_finished, True)


@says("7")
def leaves_one_token_to_compute(nano: Any) -> None:
    """After a step that sampled, the last token has no K and V yet: all tokens but one are computed.

    A chunk that samples nothing gets no token.
    """
    scheduler = make_scheduler(nano, 9)
    (seq,) = add(nano, scheduler, ("abc", 9))
    (chunk,) = scheduler.schedule()
    expect("The sequences that update returns", scheduler.update([chunk._replace(samples=False)], []), [])
    expect("Tokens after a chunk without a sample", len(seq.token_ids), 3)
    scheduler.update([chunk], [120])
    expect("Tokens and computed tokens", (len(seq.token_ids), seq.num_computed_tokens), (4, 3))


@says("7")
def gives_each_its_own_token(nano: Any) -> None:
    """The tokens belong to the chunks that sample, in order. Chunks that do not sample are skipped."""
    for silent in range(3):
        scheduler = make_scheduler(nano, 9)
        seqs = add(nano, scheduler, ("a", 9), ("bb", 9), ("ccc", 9))
        chunks = scheduler.schedule()
        chunks[silent] = chunks[silent]._replace(samples=False)
        scheduler.update(chunks, letters("xy"))
        answers = ["x", "y"]
        answers.insert(silent, "")
        expected = [prompt + answer for prompt, answer in zip(("a", "bb", "ccc"), answers, strict=True)]
        expect(f"The sequences, if number {silent} samples nothing", [text_of(s) for s in seqs], expected)


@says("7")
def keeps_the_queue_s_order(nano: Any) -> None:
    """If the first sequence in the queue does not fit, a small one after it waits too."""
    scheduler = make_scheduler(nano, 4)
    add(nano, scheduler, ("aaaaaaaaaaaa", 2), ("bbbbbbbb", 2), ("c", 2))
    expect("Step 1", run(scheduler), [("a", 0, 12)])
    expect("Waiting", [text_of(seq)[0] for seq in scheduler.waiting], ["b", "c"])


@says("7")
def spends_the_budget(nano: Any) -> None:
    """Running sequences are scheduled first, and no sequence is admitted once the budget is used up."""
    scheduler = make_scheduler(nano, 9, budget=4)
    add(nano, scheduler, ("aaaa", 9), ("b", 9), ("cc", 9))
    expect("Step 1", run(scheduler), [("a", 0, 4)])
    expect("Step 2", run(scheduler)[:2], [("a", 4, 5), ("b", 0, 1)])
    scheduler = make_scheduler(nano, 9, budget=2)
    add(nano, scheduler, ("a", 9), ("b", 9))
    run(scheduler)
    scheduler.max_num_batched_tokens = 1
    expect("Two run, and the budget is 1", run(scheduler), [("a", 1, 2)])


@says("7")
def counts_what_chunks_compute(nano: Any) -> None:
    """Each chunk takes its length from the budget, and no more: hits cost nothing, the rest of a prompt does.

    A prompt that is longer than the budget is admitted too: its chunk is a part of it.
    """
    scheduler = make_scheduler(nano, 9, budget=7)
    use_ours(scheduler, "_schedule_chunk")
    add(nano, scheduler, ("aaaabbbbcc", 9), ("aaaabbb", 9), ("d", 9), ("e", 9))
    expect("Step 1, with a budget of 7", run(scheduler), [("a", 0, 7)])
    expect("Step 2", run(scheduler), [("a", 7, 10), ("a", 4, 7), ("d", 0, 1)])


@says("7")
def passes_over_the_preempted(nano: Any) -> None:
    """A sequence that `_make_room` preempts for another one gets no chunk in this step.

    It was running when the step began. Nothing is admitted in a step that preempts.
    """
    scheduler = make_scheduler(nano, 9)
    add(nano, scheduler, ("aaa", 9), ("bbb", 9))
    run(scheduler)

    def make_room(seq: Any) -> bool:
        if len(scheduler.running) == 2:
            last = scheduler.running.pop()
            release(scheduler.block_manager, last)
            scheduler.waiting.appendleft(last)
            scheduler.num_preemptions += 1
        return bool(scheduler.block_manager.may_append(seq, len(seq.token_ids)))

    scheduler._make_room = make_room
    expect("The step", run(scheduler), [("a", 3, 4)])

    def preempt_itself(seq: Any) -> bool:
        assert seq is scheduler.running[-1]
        release(scheduler.block_manager, scheduler.running.pop())
        scheduler.waiting.appendleft(seq)
        scheduler.num_preemptions += 1
        return False

    scheduler._make_room = preempt_itself
    expect("A step in which the only running sequence was preempted itself", run(scheduler), [])


@says("7")
def makes_room_before_it_schedules(nano: Any) -> None:
    """`_make_room` is called once for each running sequence, before its chunk is scheduled."""
    scheduler, asked = make_scheduler(nano, 9), list[str]()
    add(nano, scheduler, ("aaaa", 9), ("bbbb", 9))
    run(scheduler)
    room, schedule = scheduler._make_room, scheduler._schedule_chunk

    def make_room(seq: Any) -> Any:
        asked.append(f"room for {text_of(seq)[0]}")
        return room(seq)

    def schedule_chunk(seq: Any, budget: int) -> Any:
        asked.append(text_of(seq)[0])
        return schedule(seq, budget)

    scheduler._make_room, scheduler._schedule_chunk = make_room, schedule_chunk
    run(scheduler)
    expect("The calls", asked, ["room for a", "a", "room for b", "b"])


def expect_our_steps(nano: Any, ours: str = "") -> None:
    """Serve requests with few blocks and a small budget, and compare each step with nano.py's."""
    for seed in range(12):
        limits = seed, 4 + seed % 3, 4, 3 + seed % 4
        scheduler, steps = serve(nano, *limits, ours=ours)
        expected, right = serve(solution, *limits)
        for i, (got, chunks) in enumerate(zip(steps, right, strict=True)):
            what = (
                f"Step {i}, with {limits[1]} blocks of 4 and a budget of {limits[3]}: (request, start, end)"
            )
            expect(what, got, chunks)
        expect("Preemptions", scheduler.num_preemptions, expected.num_preemptions)
        expect("Free blocks at the end", scheduler.block_manager.num_free_blocks, limits[1])


@says("7")
def serves_random_requests(nano: Any) -> None:
    """Twelve random requests get the same answers as without a cache, and all of their blocks come back."""
    for block_size in 3, 4:
        scheduler, _ = serve(nano, block_size, 200, block_size, 1000)
        expect("Free blocks at the end", scheduler.block_manager.num_free_blocks, 200)
    expect_our_steps(nano, "_schedule_chunk _make_room")


@says("8")
def cuts_prompts(nano: Any) -> None:
    """With a budget of 6, a prompt of 11 tokens is computed as [0, 6) and [6, 11)."""
    scheduler = make_scheduler(nano, 9, budget=6)
    add(nano, scheduler, ("abcdefghijk", 9))
    expect("Chunks", [run(scheduler), run(scheduler)], [[("a", 0, 6)], [("a", 6, 11)]])


@says("8")
def draws_at_the_end_only(nano: Any) -> None:
    """A chunk in the middle of a prompt samples nothing. The last chunk samples a token."""
    for budget, expected in (6, False), (8, True), (9, True):
        scheduler, seq = make_scheduler(nano, 9), make_sequence(nano, "abcdefgh")
        assert scheduler.block_manager.may_append(seq, 8)
        chunk = scheduler._schedule_chunk(seq, budget)
        expect(f"The chunk samples, 8 tokens with a budget of {budget}", chunk.samples, expected)
    seq.token_ids.append(ord("x"))
    assert scheduler.block_manager.may_append(seq, 9)
    expect("A decode samples", scheduler._schedule_chunk(seq, 6).samples, True)


@says("all")
@says("8")
def recomputes_answers_like_prompts(nano: Any) -> None:
    """A preempted sequence of 4 + 5 tokens is recomputed as [0, 6) and [6, 9), and only the end samples."""
    scheduler, seq = make_scheduler(nano, 9), make_sequence(nano, "abcd")
    seq.token_ids += letters("efghi")
    assert scheduler.block_manager.may_append(seq, 9)
    chunks = [scheduler._schedule_chunk(seq, 6) for _ in range(2)]
    expect("The chunks, with a budget of 6", [(c.start, c.end) for c in chunks], [(0, 6), (6, 9)])
    expect("Which of them sample", [chunk.samples for chunk in chunks], [False, True])


@says("8")
def starts_behind_hits(nano: Any) -> None:
    """A chunk begins at the first uncomputed token, and the budget limits its length.

    With 5 of 8 tokens computed it is [5, 8) with a budget of 6, and [5, 7) with a budget of 2.
    """
    for budget, expected in (6, (5, 8)), (2, (5, 7)), (3, (5, 8)):
        scheduler, seq = make_scheduler(nano, 9), make_sequence(nano, "abcdefgh")
        assert scheduler.block_manager.may_append(seq, 8)
        seq.num_computed_tokens = 5
        chunk = scheduler._schedule_chunk(seq, budget)
        expect(f"Chunk with a budget of {budget}", (chunk.start, chunk.end), expected)
    scheduler = make_scheduler(nano, 9)
    for seq in add(nano, scheduler, ("abcdefgh", 9), ("abcdefgh", 9)):
        assert scheduler.block_manager.allocate(seq)
        chunk = scheduler._schedule_chunk(seq, 9)
    expect("Chunk of a prompt that is all hits", (chunk.start, chunk.end, chunk.samples), (7, 8, True))


@says("8")
def counts_as_computed(nano: Any) -> None:
    """The chunk's tokens count as computed, and the blocks that it fills are registered."""
    scheduler, seq = make_scheduler(nano, 9), make_sequence(nano, "abcdefghij")
    assert scheduler.block_manager.may_append(seq, 10)
    chunk = scheduler._schedule_chunk(seq, 6)
    expect("The chunk's sequence", chunk.seq is seq, True)
    expect("Computed tokens", seq.num_computed_tokens, 6)
    expect("Registered blocks", len(scheduler.block_manager.registered_blocks), 1)
    scheduler._schedule_chunk(seq, 6)
    expect("Computed tokens after the second chunk", seq.num_computed_tokens, 10)
    expect("Registered blocks after the second chunk", len(scheduler.block_manager.registered_blocks), 2)
    expect("Tokens", text_of(seq), "abcdefghij")


@says("8")
def keeps_the_budget(nano: Any) -> None:
    """A step computes no more tokens than its budget, and schedules running sequences first."""
    scheduler = make_scheduler(nano, 9, budget=4)
    add(nano, scheduler, ("aaa", 9), ("bbbbb", 9))
    expect("Step 1", run(scheduler), [("a", 0, 3), ("b", 0, 1)])
    expect("Step 2", run(scheduler), [("a", 3, 4), ("b", 1, 4)])
    for budget in 1, 5:
        serve(nano, budget, 200, 4, budget)
    expect_our_steps(nano, "_make_room")


def scarce(nano: Any, *texts: str) -> Any:
    """Return a scheduler with too few blocks for two answers, one step before a sequence is preempted."""
    scheduler = make_scheduler(nano, 5)
    add(nano, scheduler, *((text, 5) for text in texts))
    for _ in range(2):
        run(scheduler)
    return scheduler


@says("9")
def preempts_the_last(nano: Any) -> None:
    """If one block is free and two are needed, the sequence that arrived last is preempted."""
    scheduler = scarce(nano, "abcdefg", "hijklmn")
    expect("Step 3", run(scheduler), [("a", 8, 9)])
    expect("Preemptions", scheduler.num_preemptions, 1)


@says("9")
def keeps_tokens(nano: Any) -> None:
    """A preempted sequence keeps its tokens, holds no blocks, and has no computed tokens."""
    scheduler = scarce(nano, "abcdefg", "hijklmn")
    run(scheduler)
    expect("Waiting sequences", len(scheduler.waiting), 1)
    seq = scheduler.waiting[0]
    expect("Tokens, and tokens of the prompt", (len(seq.token_ids), seq.num_prompt_tokens), (9, 7))
    expect("What the sequence holds", state_of(seq), state_of(make_sequence(nano, text_of(seq))))


@says("9")
def waits_in_front(nano: Any) -> None:
    """A preempted sequence waits in front of sequences that never ran."""
    scheduler = scarce(nano, "abcdefg", "hijklmn")
    add(nano, scheduler, ("z", 2))
    run(scheduler)
    expect("Waiting", [chr(seq.token_ids[0]) for seq in scheduler.waiting], ["h", "z"])


def crowded(nano: Any, first: str = "aaaa") -> Any:
    """Return a scheduler in which three sequences hold all three blocks, one each."""
    scheduler = make_scheduler(nano, 3)
    add(nano, scheduler, (first, 5), ("bbbb", 5), ("cccc", 5))
    scheduler.schedule()
    return scheduler


@says("9")
def preempts_as_often_as_needed(nano: Any) -> None:
    """If one preemption frees too little, the next-to-last sequence is preempted too, and so on."""
    scheduler = crowded(nano)
    first = scheduler.running[0]
    first.token_ids += letters("aaaaa")
    expect("The result of _make_room, two more blocks needed", scheduler._make_room(first), True)
    expect("Preemptions", scheduler.num_preemptions, 2)
    expect("Running", [text_of(seq) for seq in scheduler.running], [text_of(first)])
    expect("Waiting, in order of arrival", [text_of(seq) for seq in scheduler.waiting], ["bbbb", "cccc"])
    expect("Blocks of the first", len(first.block_table), 3)


@says("9")
def preempts_itself(nano: Any) -> None:
    """If the last sequence needs a block, it is preempted itself, and no other sequence.

    _make_room returns False.
    """
    scheduler = crowded(nano)
    *others, last = scheduler.running
    last.token_ids += letters("c")
    expect("The result of _make_room", scheduler._make_room(last), False)
    expect("Running", [text_of(seq) for seq in scheduler.running], [text_of(seq) for seq in others])
    expect("Preemptions", scheduler.num_preemptions, 1)


@says("9")
def preempts_a_prompt_in_progress(nano: Any) -> None:
    """If the last sequence is in the middle of its prompt, it is preempted all the same."""
    scheduler = make_scheduler(nano, 4, budget=6)
    first, second = add(nano, scheduler, ("aaaa", 5), ("bbbbbbbbb", 5))
    run(scheduler)
    expect("Computed tokens of the last", second.num_computed_tokens, 2)
    expect("The result of _make_room, no block is free", scheduler._make_room(first), True)
    expect("Running, waiting", (scheduler.running, [*scheduler.waiting]), ([first], [second]))


@says("9")
def preempts_only_if_needed(nano: Any) -> None:
    """If there is a free block, or room in the last one, no sequence is preempted."""
    scheduler = make_scheduler(nano, 4)
    add(nano, scheduler, ("aaaa", 5), ("bbb", 5))
    scheduler.schedule()
    first, second = scheduler.running
    for seq in first, second:
        seq.token_ids.append(ord("x"))
        expect("The result of _make_room", scheduler._make_room(seq), True)
    expect("Preemptions", scheduler.num_preemptions, 0)
    expect("Blocks of both", (len(first.block_table), len(second.block_table)), (2, 1))


@says("9")
def all_end(nano: Any) -> None:
    """Preempted sequences run again and finish, with as many tokens as without a preemption."""
    scheduler = scarce(nano, "abcdefg", "hijklmn", "opqrstu")
    seqs = [*scheduler.running, *scheduler.waiting]
    for _ in range(40):
        run(scheduler)
    expect("Ended", [seq.is_finished for seq in seqs], [True] * 3)
    expect("Tokens", [len(seq.token_ids) for seq in seqs], [12] * 3)


@says("all")
@says("9")
def answers_survive(nano: Any) -> None:
    """With few blocks and a small budget, twelve random requests get the same answers as without limits.

    Each step computes the same chunks as nano.py's.
    """
    expect_our_steps(nano)


@says("14")
def accepts_up_to_the_first_miss(mine: Any) -> None:
    """With drafts e f x and samples e f g z, e f g count: none after the first wrong draft."""
    expect("Accepted", mine.accept(letters("efx"), letters("efgz")), letters("efg"))
    expect("Accepted, all drafts right", mine.accept(letters("ef"), letters("efg")), letters("efg"))
    expect("Accepted, only the second right", mine.accept(letters("xf"), letters("efg")), letters("e"))
    expect("Accepted, no drafts", mine.accept([], letters("e")), letters("e"))
    expect("Accepted, no drafts and no samples", mine.accept([], []), [])


@says("14")
def looks_up_the_latest(mine: Any) -> None:
    """After "abcabdab" the draft is what followed the latest earlier "ab": "da". Two tokens must be equal."""
    expect("Drafts", mine.lookup(letters("abcabdab"), 2), letters("da"))
    expect("Drafts, one wanted", mine.lookup(letters("abcabdab"), 1), letters("d"))
    expect("Drafts where nothing repeats", mine.lookup(letters("abcd"), 2), [])
    expect("Drafts where one token repeats", mine.lookup(letters("axcdbx"), 2), [])
    expect("Drafts after 'aaa'", mine.lookup(letters("aaa"), 2), letters("a"))
    expect("Drafts after one token", mine.lookup(letters("a"), 2), [])
    expect("Drafts at the beginning", mine.lookup(letters("abxyab"), 3), letters("xya"))


def drafting(mine: Any, num_blocks: int, num_draft_tokens: int = 3) -> Any:
    """Return a scheduler that drafts."""
    return mine.DraftingScheduler(mine.BlockManager(num_blocks, 4), 8, 64, num_draft_tokens)


@says("14")
def drafts_after_known_tokens_only(mine: Any) -> None:
    """There are no drafts in the middle of a prompt, nor beyond budget, max_tokens or free blocks."""
    for num_blocks, max_tokens, budget, samples, num_draft_tokens, expected in [
        (4, 9, 8, True, 3, 3),
        (4, 9, 8, False, 3, 0),
        (4, 9, 2, True, 3, 2),
        (4, 9, 0, True, 3, 0),
        (4, 2, 8, True, 3, 1),
        (4, 1, 8, True, 3, 0),
        (2, 9, 8, True, 3, 0),
        (4, 9, 8, True, 0, 0),
    ]:
        scheduler = drafting(mine, num_blocks, num_draft_tokens)
        (seq,) = add(mine, scheduler, ("abcdefab", max_tokens))
        scheduler.block_manager.may_append(seq, 8)
        what = f"Drafts with {num_blocks} blocks, max_tokens {max_tokens}, budget {budget}, samples {samples}"
        drafts = scheduler.draft(mine.Chunk(seq, 0, 8, samples), budget)
        expect(what, len(drafts), expected)
        expect("Blocks", len(seq.block_table), 3 if drafts else 2)


@says("14")
def preempts_nobody_for_drafts(mine: Any) -> None:
    """Drafts use free blocks only. They never preempt a sequence, because they may be wrong."""
    scheduler = drafting(mine, 3)
    add(mine, scheduler, ("abab", 5), ("bbbb", 5), ("cccc", 5))
    scheduler.schedule()
    drafts = scheduler.draft(mine.Chunk(scheduler.running[0], 0, 4, True), 8)
    expect("Drafts where no block is free", drafts, [])
    expect("Running, waiting", (len(scheduler.running), len(scheduler.waiting)), (3, 0))


def drafted(mine: Any, max_tokens: int, drafts: list[int]) -> tuple[Any, Any, Any]:
    """Return a scheduler with one sequence, the sequence, and its first chunk with these drafts."""
    scheduler = drafting(mine, 9)
    (seq,) = add(mine, scheduler, ("abc", max_tokens))
    (chunk,) = scheduler.schedule()
    return scheduler, seq, chunk._replace(drafts=drafts)


@says("14")
def keeps_nothing_after_the_end(mine: Any) -> None:
    """If a step samples several tokens, those after the stop token do not count, nor those beyond max_tokens.

    A sequence that finishes gives back its blocks.
    """
    for max_tokens, expected in (9, [120, STOP]), (1, [120]):
        scheduler, seq, chunk = drafted(mine, max_tokens, [120, STOP])
        scheduler.update([chunk], [[120, STOP, 122]])
        expect(f"The answer, with max_tokens {max_tokens}", seq.token_ids[3:], expected)
        expect("Ended", seq.is_finished, True)
        expect("Running, free blocks", (scheduler.running, scheduler.block_manager.num_free_blocks), ([], 9))


@says("14")
def asks_accept(mine: Any) -> None:
    """`accept` says how many of the sampled tokens count."""
    scheduler, seq, chunk = drafted(mine, 9, [120, 121])
    mine.accept = lambda drafts, sampled: sampled[:1]
    scheduler.update([chunk], [[120, 122, 123]])
    expect("The answer if accept returns the first token", seq.token_ids[3:], [120])


@says("14")
def leaves_one_token_after_drafts(mine: Any) -> None:
    """After a step that samples, all of a sequence's tokens but the last count as computed.

    A chunk that samples nothing changes nothing.
    """
    scheduler, seq, chunk = drafted(mine, 9, [])
    scheduler.update([chunk._replace(samples=False)], [[]])
    expect("Tokens after a chunk without a sample", len(seq.token_ids), 3)
    scheduler.update([chunk._replace(drafts=[120])], [[120, 121]])
    expect("Tokens and computed tokens", (len(seq.token_ids), seq.num_computed_tokens), (5, 4))


@says("14")
def drafts_change_no_answer(mine: Any) -> None:
    """Random requests get the same answers with drafts as without, in a scarce cache and a small budget."""
    for seed in range(4):
        serve(mine, seed, 6 + seed, 4, 5 + seed, num_drafts=3)


@says("all")
def says_what_transformers_says(nano: Any) -> None:
    """Four questions at once, with scarce blocks and chunks, get the answers of transformers."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained("nanoengine/demo")
    texts = ["Who are you?", "What is 62 + 19?", "Count from 3 to 11.", "Spell the word paging backwards."]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    llm = nano.LLM("nanoengine/demo", device="cpu", kvcache_block_size=4, num_kvcache_blocks=24, **limits)
    how = {"add_generation_prompt": True, "return_dict": False}
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [llm.tokenizer.apply_chat_template(chat, **how) for chat in chats]
    expected = [
        reference.generate(torch.tensor([ids]), max_new_tokens=60, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    answers = llm.generate(prompts, nano.SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    for text, answer, right in zip(texts, answers, expected, strict=True):
        expect(text, answer["text"], llm.tokenizer.decode(right, skip_special_tokens=True))
    expect("All blocks are free at the end", llm.scheduler.block_manager.num_free_blocks, 24)
