"""Sliding windows: blocks before the window are freed, and groups of layers share one pool."""

import itertools
from functools import partial

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.backends.kv_cache import KVSpec, new_caches
from nanoengine.engine import Scheduler
from nanoengine.extensions.sliding_windows import WindowedBlockManager, describe_windows, group_layers
from tests.helpers import check_answers, checkpoint, make_sequence, random_prompts, run_alone, slow
from tests.laws import check_blocks, check_laws

BLOCK_SIZE = 8
BUDGET = 16
WINDOW = 24  # of the checkpoints
SPAN = -(-(WINDOW - 1 + BUDGET) // BLOCK_SIZE) + 1  # blocks that a window's group holds at most
LENGTHS = [110, 9, 60, 140]
WINDOW_ONLY = ["mistral sliding", "mixtral"]
HYBRID = ["qwen2 sliding from layer 1", "gemma3", "gpt-oss", "cohere2"]
OTHERS = [x for x in itertools.product(WINDOW_ONLY + HYBRID, (False, True)) if x != ("gemma3", False)]
GREEDY = SamplingParams(temperature=0, max_tokens=26)  # beyond the window of 24


def manager_of(num_blocks=20, windows=(3,), block_size=2, budget=4, **settings):
    settings |= {"windows": windows, "max_chunk_tokens": budget}
    return WindowedBlockManager(num_blocks, block_size, **settings)


def run(manager, seq, budget=4):
    """Admit a sequence alone; a step each time the generator is advanced."""
    return run_alone(Scheduler(manager, max_num_batched_tokens=budget), seq)


sequence = partial(make_sequence, max_tokens=1)


# ---- Blocks, by hand -----------------------------------------------------------------------------


def test_a_block_that_no_future_token_sees_is_replaced_by_the_null_block():
    seq = sequence(0, range(11), max_tokens=4)
    tables = [[*seq.block_table] for _ in run(manager_of(), seq)]
    assert tables == [
        [1, 2, 3],
        [0, 2, 3, 4],
        [0, 0, 0, 4, 5, 6],
        [0, 0, 0, 4, 5, 6],  # the token at position 11 sees from 9 on; no new block was needed
        [0, 0, 0, 0, 0, 6, 7],  # 12 sees from 10 on
        [0, 0, 0, 0, 0, 6, 7],
    ]
    seq = sequence(0, range(4), max_tokens=2)
    tables = [[*seq.block_table] for _ in run(manager_of(block_size=1, budget=2), seq, budget=2)]
    assert tables == [[1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 3, 4, 5]]


def test_a_block_before_the_window_can_be_hit_until_it_is_evicted_first():
    manager = manager_of(num_blocks=6)
    first = sequence(0, range(11))
    steps = run(manager, first)
    for _ in range(3):
        next(steps)
    assert first.block_table == [0, 0, 0, 4, 5, 6]
    assert [*manager.free_blocks] == [1, 3, 2]
    again = sequence(1, range(6))
    assert [block.block_id for block in manager.find_groups(again)[0]] == [0, 2, 3]  # 6 tokens, all hits
    assert manager.allocate(again)
    assert again.num_computed_tokens == 5
    # Without its beginning, which is evicted first, nothing of a prefix is found by a window alone.
    other = sequence(2, [50, 51])
    assert manager.allocate(other)
    assert other.block_table == [1]
    assert manager.find_groups(sequence(3, range(6))) == [[]]


def test_a_group_that_has_lost_a_block_of_a_prefix_uses_a_shorter_one():
    manager = manager_of(windows=(None, 3))
    for seq_id, length in enumerate((11, 5)):  # the second uses the first's beginning again
        list(run(manager, sequence(seq_id, range(length))))
    while manager.blocks[9].prefix is not None:
        manager._take_free_block()
    hits = manager.find_groups(sequence(2, range(8)))
    assert [[block.block_id for block in blocks] for blocks in hits] == [[1, 2], [0, 8]]


def test_a_window_of_one_token_finds_the_blocks_after_a_hit():
    manager = manager_of(num_blocks=20, windows=(1,))
    for seq_id, length in enumerate((6, 12)):
        list(run(manager, sequence(seq_id, range(length))))
    last = sequence(2, range(14))
    assert manager.allocate(last)
    assert last.num_computed_tokens == 12
    hits = manager.find_groups(sequence(3, range(12)))[0]  # the last token is computed again, and sees itself
    assert [block.block_id > 0 for block in hits] == [False] * 5 + [True]


def test_a_group_that_needs_no_block_does_not_stop_another_from_growing():
    manager, seq = manager_of(num_blocks=9, windows=(None, 3)), sequence(0, range(11))
    assert manager.allocate(seq)
    seq.num_computed_tokens = 4  # frees one block of the second group, which needs one
    assert manager.may_append(seq, 11)
    assert manager.tables_of(seq) == [[1, 2, 3, 4, 5, 6], [0, 8, 9, 7]]
    manager.free(seq)
    check_blocks(manager, [])


# A window's tokens and a step's, with the first as the last of its block
@pytest.mark.parametrize(("window", "budget", "size", "number"), [(3, 4, 2, 4), (3, 3, 2, 3), (2, 1, 1, 2)])
def test_a_prompt_longer_than_the_pool_is_admitted_if_all_windows_fit(window, budget, size, number):
    settings = {"windows": (window,), "block_size": size, "budget": budget}
    assert manager_of(number - 1, **settings).max_computable_tokens == (number - 1) * size
    manager, seq = manager_of(number, **settings), sequence(0, range(101), max_tokens=50)
    assert manager.max_computable_tokens > 10**6
    scheduler = Scheduler(manager, max_num_batched_tokens=budget)
    list(run_alone(scheduler, seq))
    assert scheduler.num_preemptions == 0
    assert len(seq.token_ids) == 151


def test_a_hybrid_s_longest_sequence_leaves_room_for_its_windows():
    manager = manager_of(num_blocks=20, windows=(None, 3, 3))  # 4 for either window at most, 12 for the rest
    assert manager.max_computable_tokens == 24
    assert manager_of(num_blocks=21, windows=(None, None, 3)).max_computable_tokens == 16
    with pytest.raises(AssertionError):
        Scheduler(manager).add(sequence(0, range(25)))
    seq = sequence(1, range(20), max_tokens=100)
    list(run(manager, seq))
    assert len(seq.token_ids) == 25


# ---- Groups of layers ----------------------------------------------------------------------------

SPEC = KVSpec(2, 16, 16, torch.float32)


def groups_of(windows, max_model_len=1000, **shapes):
    specs = [SPEC._replace(window=w, **shapes if i == 0 else {}) for i, w in enumerate(windows)]
    groups = group_layers(specs, max_model_len)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert all((windows[i] or 1000) <= (group.window or 1000) for i in group.layers)
    caches = new_caches(specs, groups, 3, 4, torch.device("cpu"))
    return [(len(group.layers), group.window) for group in groups], caches


def test_groups_have_equal_sizes_and_waste_little_of_a_block():
    assert groups_of([None] * 4)[0] == [(4, None)]
    assert groups_of([8] * 4)[0] == [(4, 8)]
    assert groups_of([8, None] * 6)[0] == [(6, None), (6, 8)]
    assert groups_of(([8] * 5 + [None]) * 2)[0] == [(2, None)] + [(2, 8)] * 5
    assert groups_of([None] * 21 + [8] * 22)[0] == [(21, None), (22, 8)]
    assert groups_of([8, 16, None])[0] == [(1, None), (1, 16), (1, 8)]


def test_a_window_as_long_as_the_longest_sequence_is_ignored():
    assert groups_of([None, 1000, 1000])[0] == [(3, None)]
    assert groups_of([None, 999, 999])[0] == [(1, None), (1, 999), (1, 999)]


def test_layers_of_unequal_shape_stay_in_one_group_with_the_widest_window():
    assert groups_of([8, None, 8], num_kv_heads=1)[0] == [(3, None)]
    assert groups_of([8, 16, 8], k_head_dim=24)[0] == [(3, 16)]


def test_layers_of_a_group_have_separate_memory_and_groups_share_it():
    _, caches = groups_of([8, 8, None, 8, 8, None])
    assert [cache.group for cache in caches] == [1, 1, 0, 2, 2, 0]
    pointers = [cache.k.data_ptr() for cache in caches]
    assert pointers[2] == pointers[0] == pointers[3]
    assert pointers[5] == pointers[1] == pointers[4] != pointers[2]


# ---- Models --------------------------------------------------------------------------------------


def max_held(llm):
    """Run the engine to its end. Returns the most blocks of a window's group that a sequence held."""
    engine, num_held = llm.llm_engine, [0]
    while engine.has_unfinished_requests():
        engine.step()
        tables = map(engine.scheduler.block_manager.tables_of, engine.scheduler.running)
        num_held += [sum(block_id > 0 for block_id in groups[-1]) for groups in tables]
        check_laws(engine.scheduler)
    return max(num_held)


@pytest.mark.parametrize(("name", "enforce_eager"), [("gemma3", False), *slow(*OTHERS)])
def test_tokens_beyond_the_window_equal_those_of_transformers(name, enforce_eager, tmp_path_factory):
    path, reference = checkpoint(name, tmp_path_factory)
    prompts = random_prompts(LENGTHS)
    prompts += [prompts[3][:125], prompts[0] + prompts[1]]  # hits that end within others
    longest = -(-(max(LENGTHS) + 26) // BLOCK_SIZE)
    tight = SPAN + 4 if name in WINDOW_ONLY else longest + SPAN + 2
    counts = {"num_preemptions": 0, "prefix_cache_hits": 0, "spec_decode_num_draft_tokens": 0}
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    ahead = {"async_scheduling": enforce_eager}, {"speculative_config": drafts}
    for num_kv_blocks, more in zip((tight, 12 * longest), ahead, strict=True):
        settings = {"num_kv_blocks": num_kv_blocks, "block_size": BLOCK_SIZE, **more}
        with LLM(str(path), **settings, max_num_batched_tokens=BUDGET, enforce_eager=enforce_eager) as llm:
            for _ in range(2):
                check_answers(llm, reference, prompts, 26)
            for i, prompt in enumerate(prompts):
                llm.llm_engine.add_request(f"again {i}", {"prompt_token_ids": prompt}, GREEDY)
            assert max_held(llm) <= SPAN
            counts = {name: count + llm.metrics()[name] for name, count in counts.items()}
    assert all(counts.values()), counts


def test_the_first_line_names_the_windows(tmp_path_factory, caplog):
    for name, ending in (
        ("mistral sliding", "blocks of 8 tokens, a window of 24"),
        ("gemma3", "blocks of 8 tokens, layers in groups: 1 full, 1 with a window of 24"),
        ("qwen3", "blocks of 8 tokens"),
    ):
        LLM(str(checkpoint(name, tmp_path_factory)[0]), num_kv_blocks=20, block_size=8).close()
        assert caplog.messages[-1].endswith(ending)
    assert describe_windows([None]) == "sliding windows free no blocks (the layers' shapes differ)"
    groups = describe_windows([None, 24, 24, 8])
    assert groups == "layers in groups: 1 full, 2 with a window of 24, 1 with a window of 8"
