"""Checks the block manager: lessons 3 to 5."""

import random
from collections.abc import Callable
from typing import Any

from docs.checks import admit, compute, expect, expect_books_to_agree, letters, release, says


@says("3")
def rounds_up(mini: Any) -> None:
    """Blocks of 4: 0, 1, 4, 5 and 8 tokens need 0, 1, 1, 2 and 2 blocks.

    Blocks of 3 and 1 are possible too.
    """
    blocks = mini.BlockManager(8, 4)
    expect("Blocks needed", [blocks.num_blocks_for(n) for n in (0, 1, 4, 5, 8)], [0, 1, 1, 2, 2])
    for block_size, expected in (3, [1, 1, 2, 3]), (1, [1, 3, 4, 7]):
        blocks = mini.BlockManager(8, block_size)
        expect(f"Blocks of {block_size}", [blocks.num_blocks_for(n) for n in (1, 3, 4, 7)], expected)


@says("3")
def finds_slots(mini: Any) -> None:
    """With block table [7, 2] and blocks of 4, position 5 is slot 9: block number times size, plus offset."""
    for block_size, expected in (4, [28, 29, 30, 31, 8, 9]), (3, [21, 22, 23, 6, 7, 8]):
        seq = mini.Sequence(letters("abcdef"))
        seq.block_table = [7, 2]
        blocks = mini.BlockManager(8, block_size)
        slots = [blocks.slot(seq, i) for i in range(6)]
        expect(f"Slots of all positions, blocks of {block_size}", slots, expected)


@says("3")
def grows_in_time(mini: Any) -> None:
    """Four tokens take one block of 4.

    The second block is added for the fifth token, and no earlier. A table never shrinks.
    """
    blocks, seq = mini.BlockManager(5, 4), mini.Sequence([])
    for num_tokens, num_blocks in (4, 1), (5, 2), (8, 2), (3, 2), (16, 4):
        expect("The result of may_append", blocks.may_append(seq, num_tokens), True)
        expect(f"Blocks of {num_tokens} tokens", len(seq.block_table), num_blocks)
    expect("Different blocks in the table", len(set(seq.block_table)), 4)
    expect("Free blocks of 5", blocks.num_free_blocks, 1)


@says("3")
def grows_wholly_or_not(mini: Any) -> None:
    """If two blocks are needed and one is free, may_append returns False and takes none.

    The last free block may be taken, and no block is needed where the table has room.
    """
    blocks, seq = mini.BlockManager(2, 4), mini.Sequence([])
    expect("The result of may_append, 3 blocks of 2", blocks.may_append(seq, 9), False)
    expect("Free blocks afterwards", blocks.num_free_blocks, 2)
    expect("The result of may_append, 2 blocks of 2", blocks.may_append(seq, 8), True)
    expect("The result of may_append, with room in the table", blocks.may_append(seq, 8), True)
    expect("The result of may_append, none left", blocks.may_append(seq, 9), False)
    expect("Blocks in the table", len(seq.block_table), 2)


@says("4")
def shares_beginnings(mini: Any) -> None:
    """A prompt that begins with the same 8 letters shares their two blocks, and starts at position 8."""
    blocks = mini.BlockManager(8, 4)
    a, b = admit(mini, blocks, "abcdefghij"), mini.Sequence(letters("abcdefghxy"))
    blocks.allocate(b)
    expect("Shared blocks", b.block_table[:2], a.block_table[:2])
    expect("Blocks in all", len(b.block_table), 3)
    expect("Tokens computed at admission", b.num_computed_tokens, 8)
    expect("Hit tokens", b.num_hit_tokens, 8)
    expect("Free blocks of 8 (shared blocks are counted once)", blocks.num_free_blocks, 4)


@says("4")
def keys_are_of_full_blocks(mini: Any) -> None:
    """There is one key for each full block, and none for a block that is partly filled."""
    for block_size in 4, 3:
        blocks = mini.BlockManager(8, block_size)
        for n in range(10):
            keys = blocks.block_keys(letters("abcdefghij"[:n]))
            expect(f"Keys of {n} tokens in blocks of {block_size}", len(keys), n // block_size)
        expect("The keys of the same tokens, twice", keys, blocks.block_keys(letters("abcdefghi")))


@says("4")
def keys_depend_on_every_token(mini: Any) -> None:
    """A key depends on each token of its block, the first and the last too, and on their order."""
    blocks = mini.BlockManager(8, 4)
    key = blocks.block_keys(letters("abcd"))
    for other in "xbcd", "axcd", "abxd", "abcx", "abdc", "dcba":
        assert blocks.block_keys(letters(other)) != key, f"'abcd' and {other!r} have the same key."


@says("4")
def chains_keys(mini: Any) -> None:
    """The same four letters after other letters are not a hit: a key depends on the key before it."""
    blocks = mini.BlockManager(8, 4)
    admit(mini, blocks, "abcdefgh")
    expect("Hits of 'efgh'", blocks.find_prefix(mini.Sequence(letters("efgh"))), [])
    expect("Hits of '0123efgh'", blocks.find_prefix(mini.Sequence(letters("0123efgh"))), [])
    expect("Hits of 'efghabcd'", blocks.find_prefix(mini.Sequence(letters("efghabcd"))), [])


@says("4")
def chains_reach_the_beginning(mini: Any) -> None:
    """A key identifies all tokens before it, in their order, not only those of one block before it."""
    blocks = mini.BlockManager(8, 4)
    key = blocks.block_keys(letters("abcdefghijkl"))[2]
    for other in "0123efghijkl", "efghabcdijkl", "abcdijklefgh"[:8] + "ijkl", "bacdefghijkl":
        assert blocks.block_keys(letters(other))[2] != key, (
            f"The third block of 'abcdefghijkl' and of {other!r} have the same key."
        )


@says("4")
def stops_at_the_first_miss(mini: Any) -> None:
    """A lookup stops at the first miss: a block after it cannot be used without the block before it."""
    blocks = mini.BlockManager(8, 4)
    a = admit(mini, blocks, "abcdefghijkl")
    del blocks.block_of[blocks.key_of.pop(a.block_table[0])]
    expect("Hits without the first block", blocks.find_prefix(mini.Sequence(letters("abcdefghijkl"))), [])
    blocks = mini.BlockManager(8, 4)
    a = admit(mini, blocks, "abcdefghijkl")
    del blocks.block_of[blocks.key_of.pop(a.block_table[1])]
    hits = blocks.find_prefix(mini.Sequence(letters("abcdefghijkl")))
    expect("Hits without the second block", hits, a.block_table[:1])


@says("4")
def registers_full_blocks_only(mini: Any) -> None:
    """Only blocks full of computed tokens can be found: if 6 of 8 tokens are computed, the first block."""
    blocks, seq = mini.BlockManager(8, 4), mini.Sequence(letters("abcdefgh"))
    blocks.allocate(seq)
    seq.num_computed_tokens = 6
    blocks.register_full_blocks(seq)
    expect("Hits", blocks.find_prefix(mini.Sequence(letters("abcdefgh"))), seq.block_table[:1])
    compute(blocks, seq)
    expect("Hits later", blocks.find_prefix(mini.Sequence(letters("abcdefgh"))), seq.block_table)


@says("4")
def registers_once_per_key(mini: Any) -> None:
    """A key has one block: of two blocks with the same tokens, only the first one is registered.

    Two sequences that compute the same tokens at the same time have such blocks. If both were registered,
    an eviction would look for a key that is gone.
    """
    blocks = mini.BlockManager(8, 4)
    a, b = mini.Sequence(letters("abcdefgh")), mini.Sequence(letters("abcdefgh"))
    for seq in a, b:
        assert blocks.allocate(seq)
    for seq in a, b, a:
        compute(blocks, seq)
    expect("Blocks registered", sorted(blocks.key_of), sorted(a.block_table))
    expect_books_to_agree(blocks, [a, b])


@says("4")
def computes_one_token(mini: Any) -> None:
    """If a whole prompt is a hit, its last token is computed again: its logits choose the next token.

    Its K and V are in a hit block all the same, where the sequence must not write.
    """
    blocks = mini.BlockManager(8, 4)
    admit(mini, blocks, "abcdefgh")
    seq = mini.Sequence(letters("abcdefgh"))
    blocks.allocate(seq)
    expect("Tokens computed at admission", seq.num_computed_tokens, 7)
    expect("Hit tokens", seq.num_hit_tokens, 8)
    expect("Blocks", len(seq.block_table), 2)


@says("4")
def holds_hits(mini: Any) -> None:
    """`hold` adds one to the block's count.

    A free block that is held is no longer free, and stays registered.
    """
    blocks = mini.BlockManager(8, 4)
    a = admit(mini, blocks, "abcd")
    block = a.block_table[0]
    blocks.hold(block)
    expect("Users", blocks.ref_counts[block], 2)
    blocks.ref_counts[block] -= 1
    release(blocks, a)
    blocks.hold(block)
    expect("Users of a block that was free", blocks.ref_counts[block], 1)
    assert block not in blocks.evictable_blocks, "The held block can still be evicted."
    assert block in blocks.key_of, "The held block is no longer registered."


@says("4")
def holds_before_it_takes(mini: Any) -> None:
    """Hits are held before new blocks are taken: a free hit could otherwise be taken as a new block."""
    blocks = mini.BlockManager(6, 4)
    release(blocks, admit(mini, blocks, "abcdefgh"))
    take = blocks.take_free_block

    def watched() -> Any:
        expect("Hits that are held when a new block is taken", sum(blocks.ref_counts[i] > 0 for i in hits), 2)
        return take()

    seq = mini.Sequence(letters("abcdefghij"))
    hits = blocks.find_prefix(seq)
    blocks.take_free_block = watched
    expect("The result of allocate", blocks.allocate(seq), True)


@says("4")
def refuses_wholly(mini: Any) -> None:
    """A hit on a free block uses up that block, a hit on a used one does not.

    If a sequence does not fit, it is refused without changes.
    """
    blocks = mini.BlockManager(3, 4)
    a = admit(mini, blocks, "abcdefgh")
    seq = mini.Sequence(letters("abcdefghijkl"))
    expect("The result of allocate, 2 hits in use, 1 needed and 1 empty", blocks.allocate(seq), True)
    release(blocks, seq)
    release(blocks, a)
    seq = mini.Sequence(letters("abcdefghijklm"))
    expect("The result of allocate, with 2 hits, 2 more needed and 1 empty", blocks.allocate(seq), False)
    expect("Free blocks afterwards", blocks.num_free_blocks, 3)
    expect(
        "Its block table, hits and computed tokens", vars(seq), vars(mini.Sequence(letters("abcdefghijklm")))
    )
    expect_books_to_agree(blocks, [])
    expect(
        "The result of allocate, where all just fits",
        blocks.allocate(mini.Sequence(letters("abcdefghijkl"))),
        True,
    )


def churn(mini: Any, seed: int, num_blocks: int, block_size: int, free: Callable[[Any, Any], None]) -> None:
    """Admit and free random sequences, and check the counts, the lists and every hit."""
    rng, content = random.Random(seed), dict[int, str]()
    blocks, seqs = mini.BlockManager(num_blocks, block_size), list[Any]()
    for _ in range(60):
        text = "".join(rng.choices("ab", k=rng.randint(1, 4 * block_size)))
        seq = mini.Sequence(letters(text))
        admitted = blocks.allocate(seq)
        for i, block in enumerate(seq.block_table):
            if i * block_size < seq.num_hit_tokens:
                expect(
                    "The tokens up to the end of a hit block",
                    content.get(block),
                    text[: (i + 1) * block_size],
                )
            content[block] = text[: (i + 1) * block_size]
        if admitted:
            assert seq.num_computed_tokens < len(text), "All tokens of a sequence count as computed."
            seqs.append(seq)
            compute(blocks, seq)
        while seqs and (not admitted or len(seqs) > 3):
            free(blocks, seqs.pop(rng.randrange(len(seqs))))
            admitted = True
        expect_books_to_agree(blocks, seqs)


@says("4")
def keeps_the_books(mini: Any) -> None:
    """After any admissions, counts and block tables agree, and each hit holds the right tokens."""
    for block_size in 3, 4:
        churn(mini, block_size, 300, block_size, release)


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
def counts_a_block_that_is_taken(mini: Any) -> None:
    """A block that is taken has one user, whether it was empty or evicted."""
    blocks = mini.BlockManager(2, 4)
    release(blocks, admit(mini, blocks, "abcd"))
    taken = [blocks.take_free_block(), blocks.take_free_block()]
    expect("Users of each block", [blocks.ref_counts[block] for block in taken], [1, 1])
    expect("Free blocks", blocks.num_free_blocks, 0)


@says("5")
def leaves_nothing_computed(mini: Any) -> None:
    """After `free` a sequence has no blocks, no hits and no computed tokens: it may be admitted again."""
    blocks = mini.BlockManager(8, 4)
    admit(mini, blocks, "abcdefgh")
    seq = admit(mini, blocks, "abcdefghij")
    blocks.free(seq)
    expect("Block table", seq.block_table, [])
    expect("Computed tokens", seq.num_computed_tokens, 0)
    expect("Hit tokens", seq.num_hit_tokens, 0)


@says("5")
def evicts_tails(mini: Any) -> None:
    """A freed sequence's last block is evicted first: 8 of its 12 letters can still be hit."""
    blocks = mini.BlockManager(3, 4)
    blocks.free(admit(mini, blocks, "abcdefghijkl"))
    admit(mini, blocks, "0123")
    expect("Blocks hit", len(blocks.find_prefix(mini.Sequence(letters("abcdefghijkl")))), 2)


@says("5")
def evicts_the_least_recently_used(mini: Any) -> None:
    """The sequence that was freed first is evicted first, unless it was hit and freed again since."""
    blocks = mini.BlockManager(3, 4)
    for text in "aaaa", "bbbb", "cccc", "aaaa":
        blocks.free(admit(mini, blocks, text))
    admit(mini, blocks, "dddd")
    found = [text for text in ("aaaa", "bbbb", "cccc") if blocks.find_prefix(mini.Sequence(letters(text)))]
    expect("Found after one eviction", found, ["aaaa", "cccc"])


@says("5")
def forgets_what_it_evicts(mini: Any) -> None:
    """The old content of a block is no longer found once the block is taken for another sequence."""
    blocks = mini.BlockManager(1, 4)
    blocks.free(admit(mini, blocks, "abcd"))
    seq = admit(mini, blocks, "0123")
    expect("Hits of the old content", blocks.find_prefix(mini.Sequence(letters("abcd"))), [])
    expect("Keys of the block", len(blocks.key_of), 1)
    expect_books_to_agree(blocks, [seq])


@says("5")
def takes_empty_ones_first(mini: Any) -> None:
    """While a free block without registered content is left, nothing is evicted."""
    blocks = mini.BlockManager(3, 4)
    blocks.free(admit(mini, blocks, "abcdefghi"))
    admit(mini, blocks, "0123")
    expect("Blocks hit", len(blocks.find_prefix(mini.Sequence(letters("abcdefgh")))), 2)


@says("5")
def keeps_content_of_free_blocks(mini: Any) -> None:
    """A free block stays registered until it is taken, and a block that was never registered is empty."""
    blocks = mini.BlockManager(4, 4)
    blocks.free(admit(mini, blocks, "abcdef"))
    expect("Evictable blocks", len(blocks.evictable_blocks), 1)
    expect("Empty blocks", len(blocks.empty_blocks), 3)
    expect("Blocks hit", len(blocks.find_prefix(mini.Sequence(letters("abcdef")))), 1)


@says("5")
def keeps_the_books_with_evictions(mini: Any) -> None:
    """After any calls, counts, lists and block tables agree, and each hit holds the right tokens."""
    for block_size in 3, 4:
        churn(mini, block_size, 9, block_size, lambda blocks, seq: blocks.free(seq))
