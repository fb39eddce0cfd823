"""Checks the block manager: lessons 4 to 6."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import nanoengine.nano as solution
from docs.checks import (
    admit,
    compute,
    expect,
    expect_books_to_agree,
    hits_of,
    letters,
    make_sequence,
    release,
    says,
    state_of,
    text_of,
)


@says("4")
def rounds_up(nano: Any) -> None:
    """Blocks of 4: 0, 1, 4, 5 and 8 tokens need 0, 1, 1, 2 and 2 blocks.

    Blocks of 3 and 1 are possible too.
    """
    for block_size, counts, expected in [
        (4, (0, 1, 4, 5, 8), [0, 1, 1, 2, 2]),
        (3, (1, 3, 4, 7), [1, 1, 2, 3]),
        (1, (1, 3, 4, 7), [1, 3, 4, 7]),
    ]:
        got = [nano.num_blocks_for(n, block_size) for n in counts]
        expect(f"Blocks of {block_size} needed for {counts} tokens", got, expected)
        expect("The type", {type(n) for n in got}, {int})


@says("4")
def finds_slots(nano: Any) -> None:
    """With block table [7, 2] and blocks of 4, position 5 is slot 9: block number times size, plus offset.

    Each row has the block table of its own sequence.
    """
    tables = np.array([[7, 2, 0], [3, 9, 5]])
    rows, positions = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([0, 3, 4, 5, 2, 4, 8])
    for block_size, expected in (4, [28, 31, 8, 9, 14, 36, 20]), (3, [21, 6, 7, 8, 11, 28, 17]):
        slots = nano.map_slots(tables, rows, positions, block_size)
        expect(f"Slots with blocks of {block_size}", [int(slot) for slot in slots], expected)


@says("4")
def grows_in_time(nano: Any) -> None:
    """Four tokens take one block of 4.

    The second block is added for the fifth token, and no earlier. A table never shrinks.
    """
    blocks, seq = nano.BlockManager(5, 4), make_sequence(nano, "")
    for num_tokens, num_blocks in (4, 1), (5, 2), (8, 2), (3, 2), (16, 4):
        expect("The result of may_append", blocks.may_append(seq, num_tokens), True)
        expect(f"Blocks of {num_tokens} tokens", len(seq.block_table), num_blocks)
    expect("Different blocks in the table", len(set(seq.block_table)), 4)
    expect("Free blocks of 5", blocks.num_free_blocks, 1)


@says("4")
def grows_wholly_or_not(nano: Any) -> None:
    """If two blocks are needed and one is free, may_append returns False and takes none.

    The last free block may be taken, and no block is needed where the table has room.
    """
    blocks, seq = nano.BlockManager(2, 4), make_sequence(nano, "")
    expect("The result of may_append, 3 blocks of 2", blocks.may_append(seq, 9), False)
    expect("Free blocks afterwards", blocks.num_free_blocks, 2)
    expect("The result of may_append, 2 blocks of 2", blocks.may_append(seq, 8), True)
    expect("The result of may_append, with room in the table", blocks.may_append(seq, 8), True)
    expect("The result of may_append, none left", blocks.may_append(seq, 9), False)
    expect("Blocks in the table", len(seq.block_table), 2)


@says("4")
def grows_into_blocks_with_old_content(nano: Any) -> None:
    """A free block with registered content is free too: a sequence may grow into it."""
    blocks, seq = nano.BlockManager(2, 4), make_sequence(nano, "")
    blocks.evictable_blocks[2] = blocks.empty_blocks.pop()
    taken = iter((1, 2))
    blocks._take_free_block = lambda: next(taken)
    expect("The result of may_append, 1 empty block and 1 with old content", blocks.may_append(seq, 8), True)
    expect("The block table", seq.block_table, [1, 2])


@says("5")
def shares_beginnings(nano: Any) -> None:
    """A prompt that begins with the same 8 letters shares their two blocks, and starts at position 8."""
    blocks = nano.BlockManager(8, 4)
    a, b = admit(nano, blocks, "abcdefghij"), make_sequence(nano, "abcdefghxy")
    blocks.allocate(b)
    expect("Shared blocks", b.block_table[:2], a.block_table[:2])
    expect("Blocks in all", len(b.block_table), 3)
    expect("Tokens computed at admission", b.num_computed_tokens, 8)
    expect("Hit tokens", b.num_hit_tokens, 8)
    expect("Registered blocks", b.num_registered_blocks, 2)
    expect("Free blocks of 8 (shared blocks are counted once)", blocks.num_free_blocks, 4)
    b.token_ids += letters("zw")
    compute(blocks, b)
    expect(
        "Hits of the twelve letters of the second prompt", hits_of(nano, blocks, text_of(b)), b.block_table
    )


def keys_of(nano: Any, text: str, block_size: int = 4) -> list[tuple[int, bytes]]:
    """Return the keys of a text's full blocks."""
    keys: list[tuple[int, bytes]] = nano.BlockManager(8, block_size).hash_full_blocks(
        make_sequence(nano, text)
    )
    return keys


@says("5")
def keys_are_of_full_blocks(nano: Any) -> None:
    """There is one key for each full block, and none for a block that is partly filled."""
    for block_size in 4, 3:
        for n in range(10):
            keys = keys_of(nano, "abcdefghij"[:n], block_size)
            expect(f"Keys of {n} tokens in blocks of {block_size}", len(keys), n // block_size)
        expect("The keys of the same tokens, twice", keys, keys_of(nano, "abcdefghi", block_size))


@says("5")
def keys_hold_the_content(nano: Any) -> None:
    """A key is a hash, and the tokens themselves: other content never has an equal key."""
    contents = {content for text in ("abcd", "abdc", "bbcd") for _, content in keys_of(nano, text)}
    expect("Different contents", len(contents), 3)


@says("5")
def hashes_each_block_once(nano: Any) -> None:
    """When a sequence has grown, only its new full blocks are hashed: the earlier keys are kept."""
    blocks, seq = nano.BlockManager(8, 4), make_sequence(nano, "abcdefgh")
    first = list(blocks.hash_full_blocks(seq))
    hashed, digest = list[Any](), nano.xxh3_64_intdigest

    def counted(*given: Any) -> Any:
        hashed.append(given)
        return digest(*given)

    nano.xxh3_64_intdigest = counted
    seq.token_ids += letters("ijklm")
    keys = blocks.hash_full_blocks(seq)
    expect("Blocks hashed after four more tokens", len(hashed), 1)
    expect("The first two keys", keys[:2], first)
    expect("The keys", keys, keys_of(nano, "abcdefghijklm"))


@says("5")
def hashes_depend_on_every_token(nano: Any) -> None:
    """A hash depends on each token of its block, the first and the last too, and on their order."""
    key = keys_of(nano, "abcd")[0][0]
    for other in "xbcd", "axcd", "abxd", "abcx", "abdc", "dcba":
        assert keys_of(nano, other)[0][0] != key, f"'abcd' and {other!r} have the same hash."


@says("5")
def chains_hashes(nano: Any) -> None:
    """The same four letters after other letters are not a hit: a hash depends on the hash before it."""
    blocks = nano.BlockManager(8, 4)
    admit(nano, blocks, "abcdefgh")
    expect("Hits of 'efgh'", hits_of(nano, blocks, "efgh"), [])
    expect("Hits of '0123efgh'", hits_of(nano, blocks, "0123efgh"), [])
    expect("Hits of 'efghabcd'", hits_of(nano, blocks, "efghabcd"), [])
    assert keys_of(nano, "abcdefgh")[1][0] != keys_of(nano, "0123efgh")[1][0], (
        "The second blocks of 'abcdefgh' and of '0123efgh' have the same hash."
    )


@says("5")
def chains_reach_the_beginning(nano: Any) -> None:
    """A hash identifies all tokens before it, in their order, not only those of one block before it."""
    key = keys_of(nano, "abcdefghijkl")[2][0]
    for other in "0123efghijkl", "efghabcdijkl", "abcdijklijkl", "bacdefghijkl":
        assert keys_of(nano, other)[2][0] != key, (
            f"The third blocks of 'abcdefghijkl' and of {other!r} have the same hash."
        )


@says("5")
def verifies_the_content(nano: Any) -> None:
    """If two blocks have the same hash, a lookup compares their tokens: a collision is a miss."""
    nano.xxh3_64_intdigest = lambda content, parent: 7
    blocks = nano.BlockManager(8, 4)
    a = admit(nano, blocks, "abcdefgh")
    expect("Hits of other tokens", hits_of(nano, blocks, "wxyzefgh"), [])
    expect("Hits of the same tokens", hits_of(nano, blocks, "abcdefgh"), a.block_table[:1])
    expect_books_to_agree(blocks, [a])


@says("5")
def verifies_the_prefix(nano: Any) -> None:
    """A block is a hit only after the prefix that it was computed after, even with equal hash and tokens."""
    nano.xxh3_64_intdigest = lambda content, parent: content[0]
    blocks = nano.BlockManager(9, 4)
    a = admit(nano, blocks, "abcdefgh")
    expect("Hits of 'efgh' at the beginning", hits_of(nano, blocks, "efgh"), [])
    b = admit(nano, blocks, "wxyz")
    expect("Hits of 'efgh' after other tokens", hits_of(nano, blocks, "wxyzefgh"), b.block_table)
    expect("Hits of 'abcdefgh'", hits_of(nano, blocks, "abcdefgh"), a.block_table)


@says("5")
def finds_one_block(nano: Any) -> None:
    """`_find` returns the registered block with this key after this prefix, or None."""
    blocks = nano.BlockManager(8, 4)
    seq = admit(nano, blocks, "abcdefgh")
    first, second = (blocks.blocks[block_id] for block_id in seq.block_table)
    keys = keys_of(nano, "abcdefgh")
    expect("The first block", blocks._find(keys[0], 0) is first, True)
    expect("The second block", blocks._find(keys[1], first.prefix_id) is second, True)
    expect("The second block after another prefix", blocks._find(keys[1], 99), None)
    expect("A block that nobody computed", blocks._find(keys_of(nano, "wxyz")[0], 0), None)
    expect(
        "The hash of one block with the content of another", blocks._find((keys[0][0], keys[1][1]), 0), None
    )


@says("5")
def stops_at_the_first_miss(nano: Any) -> None:
    """A lookup stops at the first miss: a block after it cannot be used without the block before it."""
    for missing in 0, 1:
        blocks = nano.BlockManager(8, 4)
        a = admit(nano, blocks, "abcdefghijkl")
        find = blocks._find
        key = a.block_keys[missing]
        blocks._find = lambda wanted, parent, find=find, key=key: (
            None if wanted == key else find(wanted, parent)
        )
        hits = hits_of(nano, blocks, "abcdefghijkl")
        expect(f"Hits without block {missing} of the prompt", hits, a.block_table[:missing])


@says("5")
def finds_nothing_without_caching(nano: Any) -> None:
    """Without prefix caching there are no hits, and no block is registered."""
    blocks = nano.BlockManager(8, 4, enable_prefix_caching=False)
    seq = admit(nano, blocks, "abcdefgh")
    expect("Hits", hits_of(nano, blocks, "abcdefgh"), [])
    expect("Registered blocks", len(blocks.registered_blocks), 0)
    expect("Hashed blocks", len(seq.block_keys), 0)


@says("5")
def registers_full_blocks_only(nano: Any) -> None:
    """Only blocks full of computed tokens can be found: if 6 of 8 tokens are computed, the first block."""
    blocks, seq = nano.BlockManager(8, 4), make_sequence(nano, "abcdefgh")
    blocks.allocate(seq)
    seq.num_computed_tokens = 6
    blocks.register_full_blocks(seq)
    expect("Hits", hits_of(nano, blocks, "abcdefgh"), seq.block_table[:1])
    expect("Registered blocks of the sequence", seq.num_registered_blocks, 1)
    compute(blocks, seq)
    expect("Hits later", hits_of(nano, blocks, "abcdefgh"), seq.block_table)


@says("5")
def registers_once_per_content(nano: Any) -> None:
    """`register_full_blocks` keeps the first of two blocks with the same tokens after the same prefix.

    Two sequences that compute the same tokens at the same time have such blocks. Both sequences continue from
    the same prefix, so the blocks that follow can be shared again.
    """
    blocks = nano.BlockManager(8, 4)
    a, b = make_sequence(nano, "abcdefgh"), make_sequence(nano, "abcdefgh")
    for seq in a, b:
        assert blocks.allocate(seq)
    for seq in a, b, a:
        compute(blocks, seq)
    registered = sorted(block.block_id for block in blocks.registered_blocks.values())
    expect("Blocks registered", registered, sorted(a.block_table))
    expect("prefix_id of both sequences", b.prefix_id, a.prefix_id)
    expect_books_to_agree(blocks, [a, b])
    b.token_ids += letters("ijkl")
    assert blocks.may_append(b, 12)
    compute(blocks, b)
    expect(
        "Hits of all twelve letters",
        hits_of(nano, blocks, "abcdefghijkl"),
        [*a.block_table, b.block_table[2]],
    )


@says("5")
def gives_each_prefix_its_own_id(nano: Any) -> None:
    """Each prefix has an id of its own, also if its block is not registered because of a collision."""
    nano.xxh3_64_intdigest = lambda content, parent: 7
    blocks = nano.BlockManager(9, 4)
    seqs = [admit(nano, blocks, text) for text in ("abcdefgh", "wxyzefgh")]
    ids = [seq.prefix_id for seq in seqs] + [blocks.blocks[seqs[0].block_table[0]].prefix_id]
    assert len({0, *ids}) == 4, f"The ids of three different prefixes are {ids}."


@says("5")
def computes_one_token(nano: Any) -> None:
    """If a whole prompt is a hit, its last token is computed again: its logits choose the next token.

    Its K and V are in a hit block all the same, where the sequence must not write.
    """
    blocks = nano.BlockManager(8, 4)
    admit(nano, blocks, "abcdefgh")
    seq = make_sequence(nano, "abcdefgh")
    blocks.allocate(seq)
    expect("Tokens computed at admission", seq.num_computed_tokens, 7)
    expect("Hit tokens", seq.num_hit_tokens, 8)
    expect("Blocks", len(seq.block_table), 2)


@says("5")
def holds_hits(nano: Any) -> None:
    """A hit has one more user.

    A free block that is hit is no longer free, and stays registered.
    """
    blocks = nano.BlockManager(8, 4)
    a = admit(nano, blocks, "abcdefghi")
    block = blocks.blocks[a.block_table[0]]
    b = make_sequence(nano, "abcdefghj")
    blocks.allocate(b)
    expect("Users", block.ref_count, 2)
    expect_books_to_agree(blocks, [a, b])
    release(blocks, a)
    release(blocks, b)
    blocks.allocate(b)
    expect("Users of a block that was free", block.ref_count, 1)
    assert block.block_id not in blocks.evictable_blocks, "The held block can still be evicted."
    assert block.key is not None, "The held block is no longer registered."
    expect_books_to_agree(blocks, [b])


@says("5")
def holds_before_it_takes(nano: Any) -> None:
    """Hits are held before new blocks are taken: a free hit could otherwise be taken as a new block."""
    blocks = nano.BlockManager(6, 4)
    release(blocks, admit(nano, blocks, "abcdefgh"))
    take = blocks._take_free_block

    def watched() -> Any:
        users = sum(blocks.blocks[i].ref_count > 0 for i in hits)
        expect("Hits that are held when a new block is taken", users, 2)
        return take()

    hits = hits_of(nano, blocks, "abcdefghij")
    blocks._take_free_block = watched
    expect("The result of allocate", blocks.allocate(make_sequence(nano, "abcdefghij")), True)


@says("5")
def refuses_wholly(nano: Any) -> None:
    """A hit on a free block uses up that block, a hit on a used one does not.

    If a sequence does not fit, it is refused without changes.
    """
    blocks = nano.BlockManager(3, 4)
    a = admit(nano, blocks, "abcdefgh")
    seq = make_sequence(nano, "abcdefghijkl")
    expect("The result of allocate, 2 hits in use, 1 needed and 1 empty", blocks.allocate(seq), True)
    release(blocks, seq)
    release(blocks, a)
    seq = make_sequence(nano, "abcdefghijklm")
    before = state_of(seq)
    expect("The result of allocate, with 2 hits, 2 more needed and 1 empty", blocks.allocate(seq), False)
    expect("Free blocks afterwards", blocks.num_free_blocks, 3)
    expect("Its block table, hits and computed tokens", state_of(seq), before)
    expect_books_to_agree(blocks, [])
    fits = blocks.allocate(make_sequence(nano, "abcdefghijkl"))
    expect("The result of allocate, where all just fits", fits, True)
    blocks = nano.BlockManager(1, 4)
    release(blocks, admit(nano, blocks, "abcd"))
    blocks._take_free_block = lambda: 1
    fits = blocks.allocate(make_sequence(nano, "wxyz"))
    expect("The result of allocate, where the only free block has old content", fits, True)


@says("all")
@says("5")
def finds_its_own_blocks_again(nano: Any) -> None:
    """A preempted sequence of 4 + 5 tokens hits the two blocks of its first 8: one token is left to compute.

    Blocks that an answer filled are hashed, registered and looked up like those of a prompt.
    """
    blocks, seq = nano.BlockManager(8, 4), make_sequence(nano, "abcd")
    assert blocks.allocate(seq)
    for letter in "efghi":
        compute(blocks, seq)
        seq.token_ids += letters(letter)
        assert blocks.may_append(seq, len(seq.token_ids))
    table = seq.block_table
    release(blocks, seq)
    expect("The result of allocate", blocks.allocate(seq), True)
    expect("Its first two blocks, as before", seq.block_table[:2], table[:2])
    expect("Blocks of 9 tokens", len(seq.block_table), 3)
    expect("Hit tokens, registered blocks", (seq.num_hit_tokens, seq.num_registered_blocks), (8, 2))
    expect("Computed tokens", seq.num_computed_tokens, 8)


@says("all")
@says("5")
def registers_hits_once(nano: Any) -> None:
    """If a whole prompt of 8 tokens is a hit, 7 are computed, and still both of its blocks are registered."""
    blocks = nano.BlockManager(8, 4)
    admit(nano, blocks, "abcdefgh")
    seq = make_sequence(nano, "abcdefgh")
    assert blocks.allocate(seq)
    blocks.register_full_blocks(seq)
    expect("Registered blocks", seq.num_registered_blocks, 2)
    compute(blocks, seq)
    expect("Hits of the prompt", hits_of(nano, blocks, "abcdefgh"), seq.block_table)


def churn(
    nano: Any, seed: int, num_blocks: int, block_size: int, free: Callable[[Any, Any], None]
) -> Iterator[tuple[str, dict[str, int]]]:
    """Admit, grow, preempt and finish random sequences, and check the counts, the lists and every hit.

    Yields what happened to a sequence, and how it is afterwards.
    """
    rng, content = random.Random(seed), dict[int, str]()
    blocks, running, preempted = nano.BlockManager(num_blocks, block_size), list[Any](), list[Any]()
    for _ in range(120):
        new = rng.choices(letters("ab"), k=rng.randint(1, block_size))
        if running and rng.random() < 0.6:
            what, seq = "grows", rng.choice(running)
            fits = blocks.may_append(seq, len(seq.token_ids) + len(new))
            seq.token_ids += new if fits else []
        else:
            what = "is admitted again" if preempted else "is admitted"
            text = "".join(rng.choices("ab", k=rng.randint(1, 4 * block_size)))
            seq = preempted.pop() if preempted else make_sequence(nano, text)
            fits = blocks.allocate(seq)
            running += [seq] if fits else []
            assert seq.num_computed_tokens < len(seq.token_ids), "All tokens of a sequence count as computed."
        prefixes = [text_of(seq)[: end * block_size] for end in range(1, len(seq.block_table) + 1)]
        num_hits = seq.num_hit_tokens // block_size
        for block, prefix in zip(seq.block_table[:num_hits], prefixes, strict=False):
            expect("The tokens up to the end of a hit block", content.get(block), prefix)
        if fits:  # compute a part of what is left
            seq.num_computed_tokens = rng.randint(seq.num_computed_tokens, len(seq.token_ids))
            full = slice(num_hits, seq.num_computed_tokens // block_size)
            content.update(zip(seq.block_table[full], prefixes[full], strict=True))
            blocks.register_full_blocks(seq)
        state = {"blocks": len(seq.block_table), "hit tokens": seq.num_hit_tokens}
        state |= {"computed": seq.num_computed_tokens, "registered blocks": seq.num_registered_blocks}
        if running and (not fits or len(running) > 3):
            last = running.pop(rng.randrange(len(running)))
            free(blocks, last)
            preempted += rng.choices(([], [last]))[0]
        expect_books_to_agree(blocks, running)
        yield (
            f"A sequence of {len(seq.token_ids)} tokens, {seq.num_prompt_tokens} of them prompt, {what}",
            state,
        )


def expect_our_states(nano: Any, num_blocks: int, free: Callable[[Any, Any], None]) -> None:
    """Do the same with nano.py's block manager, and compare each sequence after each call."""
    for block_size in 3, 4:
        ours = churn(solution, block_size, num_blocks, block_size, lambda blocks, seq: blocks.free(seq))
        for (what, got), (_, right) in zip(
            churn(nano, block_size, num_blocks, block_size, free), ours, strict=True
        ):
            expect(what, got, right)


@says("5")
def keeps_the_books(nano: Any) -> None:
    """Random sequences are admitted, grow, are preempted and admitted again: each hit holds the right tokens.

    Counts, lists and block tables agree after each call.
    """
    expect_our_states(nano, 300, release)


@says("6")
def counts_users(nano: Any) -> None:
    """A block that two sequences use is not free while either of them runs."""
    blocks = nano.BlockManager(8, 4)
    a, b = admit(nano, blocks, "abcdefgh"), admit(nano, blocks, "abcdefgh")
    blocks.free(a)
    expect("Free blocks of 8", blocks.num_free_blocks, 6)
    blocks.free(b)
    expect("Free blocks when both have finished", blocks.num_free_blocks, 8)


@says("6")
def frees_all_blocks(nano: Any) -> None:
    """All blocks are freed: in the middle of a prompt too, and if the last token has no block yet."""
    blocks, seq = nano.BlockManager(8, 4), make_sequence(nano, "abcdefgh")
    assert blocks.allocate(seq)
    seq.num_computed_tokens = 2
    blocks.free(seq)
    expect("Free blocks of 8, after a preemption with 2 of 8 tokens computed", blocks.num_free_blocks, 8)
    seq = admit(nano, blocks, "abcd")
    seq.token_ids += letters("efgh")
    assert blocks.may_append(seq, 8)
    compute(blocks, seq)
    seq.token_ids += letters("i")
    blocks.free(seq)
    expect("Free blocks of 8, after an answer whose last token has no block", blocks.num_free_blocks, 8)


@says("6")
def counts_a_block_that_is_taken(nano: Any) -> None:
    """A block that is taken has one user, whether it was empty or evicted."""
    blocks = nano.BlockManager(2, 4)
    release(blocks, admit(nano, blocks, "abcd"))
    taken = [blocks._take_free_block(), blocks._take_free_block()]
    expect("The blocks that were taken", sorted(taken), [1, 2])
    expect("Users of each block", [blocks.blocks[block].ref_count for block in taken], [1, 1])
    expect("Free blocks", blocks.num_free_blocks, 0)


@says("6")
def leaves_nothing_computed(nano: Any) -> None:
    """After `free` a sequence has no blocks, no hits and no computed tokens: it may be admitted again."""
    blocks = nano.BlockManager(8, 4)
    admit(nano, blocks, "abcdefgh")
    seq = admit(nano, blocks, "abcdefghij")
    blocks.free(seq)
    expect("What the sequence holds", state_of(seq), state_of(make_sequence(nano, "abcdefghij")))


@says("6")
def evicts_tails(nano: Any) -> None:
    """A freed sequence's last block is evicted first: 8 of its 12 letters can still be hit."""
    blocks = nano.BlockManager(3, 4)
    blocks.free(admit(nano, blocks, "abcdefghijkl"))
    admit(nano, blocks, "0123")
    expect("Blocks hit", len(hits_of(nano, blocks, "abcdefghijkl")), 2)


@says("6")
def evicts_the_least_recently_used(nano: Any) -> None:
    """The sequence that was freed first is evicted first, unless it was hit and freed again since."""
    blocks = nano.BlockManager(3, 4)
    for text in "aaaa", "bbbb", "cccc", "aaaa":
        blocks.free(admit(nano, blocks, text))
    admit(nano, blocks, "dddd")
    found = [text for text in ("aaaa", "bbbb", "cccc") if hits_of(nano, blocks, text)]
    expect("Found after one eviction", found, ["aaaa", "cccc"])


@says("6")
def forgets_what_it_evicts(nano: Any) -> None:
    """The old content of a block is no longer found once the block is taken for another sequence."""
    blocks = nano.BlockManager(1, 4)
    blocks.free(admit(nano, blocks, "abcd"))
    seq = admit(nano, blocks, "0123")
    expect("Hits of the old content", hits_of(nano, blocks, "abcd"), [])
    expect("Registered blocks", len(blocks.registered_blocks), 1)
    expect_books_to_agree(blocks, [seq])
    blocks.free(seq)
    expect("The block that is taken", blocks._take_free_block(), 1)
    expect("Its key", blocks.blocks[1].key, None)


@says("6")
def takes_empty_ones_first(nano: Any) -> None:
    """While a free block without registered content is left, nothing is evicted."""
    blocks = nano.BlockManager(3, 4)
    blocks.free(admit(nano, blocks, "abcdefghi"))
    admit(nano, blocks, "0123")
    expect("Blocks hit", len(hits_of(nano, blocks, "abcdefgh")), 2)


@says("6")
def keeps_content_of_free_blocks(nano: Any) -> None:
    """A free block stays registered until it is taken, and a block that was never registered is empty."""
    blocks = nano.BlockManager(4, 4)
    blocks.free(admit(nano, blocks, "abcdef"))
    expect("Evictable blocks", len(blocks.evictable_blocks), 1)
    expect("Empty blocks", len(blocks.empty_blocks), 3)
    expect("Blocks hit", len(hits_of(nano, blocks, "abcdef")), 1)


@says("all")
@says("6")
def keeps_the_books_with_evictions(nano: Any) -> None:
    """After any calls, counts, lists and block tables agree, and each hit holds the right tokens."""
    expect_our_states(nano, 9, lambda blocks, seq: blocks.free(seq))
