"""BlockManager, with integers computed by hand: 8 blocks of 4 tokens unless a test says otherwise."""

import random

import pytest

from nanoengine.engine import BlockManager
from tests.helpers import Lines, admit, make_sequence
from tests.laws import check_blocks


def manager_of(num_blocks: int = 8, block_size: int = 4, **settings) -> BlockManager:
    return BlockManager(num_blocks, block_size, **settings)


def compute(manager: BlockManager, seq) -> None:
    """Admit a sequence, and register its full blocks."""
    admit(manager, seq)
    manager.register_full_blocks(seq, len(seq.token_ids))


def leave_registered_and_free(manager: BlockManager, *prompts: list[int]) -> list:
    """Register sequences with these prompts, then free them in order."""
    seqs = [make_sequence(i, prompt) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        compute(manager, seq)
    for seq in seqs:
        manager.free(seq)
    return seqs


def test_a_repeated_prompt_of_whole_blocks_recomputes_one_token_and_stores_nothing():
    manager = manager_of()
    first, second = (make_sequence(i, list(range(8))) for i in range(2))
    compute(manager, first)
    assert admit(manager, second) == first.block_table == [1, 2]
    assert second.num_computed_tokens == 7
    assert second.num_hit_tokens == 8  # the eighth token's K and V are not written again
    assert manager.num_free_blocks == 6
    check_blocks(manager, [first, second])


def test_evicting_one_of_two_equal_blocks_leaves_the_other_findable():
    manager = manager_of(num_blocks=4)
    # Both are admitted before either is computed, so each holds its own copy of the same block.
    first, second = (make_sequence(i, [1, 2, 3, 4]) for i in range(2))
    admit(manager, first)
    admit(manager, second)
    manager.register_full_blocks(first, 4)
    manager.register_full_blocks(second, 4)
    manager.free(first)
    filler = make_sequence(2, [9] * 12)
    assert first.block_table == []
    assert 1 in admit(manager, filler)  # evicts the first copy
    late = make_sequence(3, [1, 2, 3, 4])
    assert [block.block_id for block in manager.find_prefix(late)] == [2]
    check_blocks(manager, [second, filler])


def test_a_hash_collision_costs_a_miss_and_never_a_wrong_block():
    manager = manager_of(hash_function=lambda content, parent: 42)
    first, second = make_sequence(0, [1, 1, 1, 1, 7, 7, 7, 7]), make_sequence(1, [2, 2, 2, 2, 7, 7, 7, 7])
    for seq in (first, second):
        compute(manager, seq)
    assert second.block_table == [3, 4]
    for original in (first, second):
        again = make_sequence(5, original.token_ids)
        assert [b.block_id for b in manager.find_prefix(again)] == original.block_table
    assert manager.find_prefix(make_sequence(6, [7, 7, 7, 7])) == []


@pytest.mark.parametrize(("second", "hits_the_first"), [([2] * 4, True), ([2] * 3, False)])
def test_a_block_that_is_not_full_or_was_hit_longer_ago_is_reused_first(second, hits_the_first):
    manager = manager_of(num_blocks=2)
    seqs = leave_registered_and_free(manager, [1] * 4, second)
    if hits_the_first:
        admit(manager, seqs[0])
        manager.free(seqs[0])
    assert admit(manager, make_sequence(2, [9])) == [2]


def test_each_full_block_of_a_sequence_is_hashed_once_and_none_without_the_prefix_cache():
    hashed = []

    def counting_hash(content: bytes, parent: int) -> int:
        hashed.append(content)
        return hash((content, parent)) & (2**64 - 1)

    manager = manager_of(num_blocks=4, hash_function=counting_hash)
    blocker, waiting = make_sequence(0, [5] * 13), make_sequence(1, list(range(10)))
    admit(manager, blocker)
    hashed.clear()
    for _ in range(10):  # waits at the head of the queue for ten steps
        assert not manager.allocate(waiting)
    assert len(hashed) == 2
    manager.free(blocker)
    admit(manager, waiting)
    for token in (10, 11, 12):
        waiting.token_ids.append(token)
        manager.may_append(waiting, waiting.num_tokens)
        manager.register_full_blocks(waiting, waiting.num_tokens)
    manager.free(waiting)
    admit(manager, waiting)
    compute(manager_of(enable_prefix_caching=False, hash_function=counting_hash), make_sequence(2, [1] * 4))
    assert len(hashed) == 3


def test_a_hit_among_the_free_blocks_costs_the_same_in_any_pool():
    """Counts lines of Python instead of timing: nothing is searched, and no entry accumulates."""
    lines = []
    for num_blocks in (10, 1000):
        manager = manager_of(num_blocks=num_blocks)
        leave_registered_and_free(manager, *([i] * 4 for i in range(num_blocks)))
        rng = random.Random(0)
        for _ in range(1000):
            seq = make_sequence(0, [rng.randrange(num_blocks)] * 4)
            admit(manager, seq)
            assert seq.num_hit_tokens == 4
            manager.free(seq)
            assert len(manager.free_blocks) == num_blocks
        check_blocks(manager, [])
        with Lines() as admission:
            manager.allocate(seq)
            manager.free(seq)
        lines.append(admission.count)
    assert lines[0] == lines[1] < 100


def state(manager):
    """Return everything that an operation may change."""
    return (
        list(manager.free_blocks),
        {key: list(prefix.blocks) for key, prefix in manager.prefixes.items()},
        [(block.ref_count, block.prefix) for block in manager.blocks],
    )


def test_refused_allocation_changes_nothing():
    manager = manager_of(num_blocks=2)
    leave_registered_and_free(manager, [1] * 4)
    before = state(manager)
    big = make_sequence(1, [1] * 12)
    assert len(manager.find_prefix(big)) == 1
    assert not manager.allocate(big)
    assert before == state(manager)
    assert (big.block_table, big.num_computed_tokens, big.num_cached_tokens) == ([], 0, None)
    assert (manager.num_query_tokens, manager.num_query_hits) == (4, 0)


def test_hit_statistics_count_the_tokens_of_first_admissions():
    manager = manager_of()
    for seq_id in range(3):
        seq = make_sequence(seq_id, list(range(10)))
        compute(manager, seq)
        manager.free(seq)
        admit(manager, seq)  # as after a preemption
        manager.free(seq)
    assert not manager.allocate(make_sequence(3, list(range(40))))  # refused: it does not count
    assert (manager.num_query_tokens, manager.num_query_hits) == (30, 16)
