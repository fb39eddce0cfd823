"""The scheduler, with integers computed by hand: no model, no tensor."""

import tracemalloc

import pytest

from nanoengine.engine import BlockManager, Scheduler
from tests.helpers import failing_calls, is_busy, make_scheduler, make_sequence, run_step
from tests.laws import check_laws


def chunks_of(batch):
    return [(seq.seq_id, start, end) for seq, start, end, _, _ in batch.chunks]


def test_running_sequences_are_served_before_waiting_ones_are_admitted():
    scheduler = make_scheduler(num_blocks=100, max_num_batched_tokens=5)
    scheduler.add(make_sequence(0, [1, 2]))
    run_step(scheduler)
    for arrival in range(1, 20):  # a new prompt of 20 tokens arrives every step
        scheduler.add(make_sequence(arrival, list(range(20))))
        batch = run_step(scheduler)
        assert chunks_of(batch)[0] == (0, arrival + 1, arrival + 2)  # it gets its token anyway
        assert batch.num_tokens == 5
    scheduler.max_num_batched_tokens = 2  # fewer than run
    assert [(i, end - start) for i, start, end in chunks_of(run_step(scheduler))] == [(0, 1), (1, 1)]


def test_the_long_prefill_threshold_caps_each_sequence():
    scheduler = make_scheduler(num_blocks=20, long_prefill_token_threshold=3)
    scheduler.add(make_sequence(0, list(range(8))))
    scheduler.add(make_sequence(1, list(range(20, 22))))
    assert chunks_of(run_step(scheduler)) == [(0, 0, 3), (1, 0, 2)]
    assert chunks_of(run_step(scheduler)) == [(0, 3, 6), (1, 2, 3)]


def test_identical_prompts_share_blocks_within_the_step_that_computes_them():
    scheduler = make_scheduler()
    for i in range(3):
        scheduler.add(make_sequence(i, list(range(8))))
    batch = run_step(scheduler)
    assert chunks_of(batch) == [(0, 0, 8), (1, 7, 8), (2, 7, 8)]
    assert [seq.block_table for seq in scheduler.running] == [[1, 2]] * 3
    assert scheduler.block_manager.num_free_blocks == 6


@pytest.mark.parametrize("priority", [0, -1])
def test_no_sequence_is_admitted_in_a_step_that_preempted(priority):
    """Otherwise the freed blocks would go to a new sequence, which the next step would preempt again."""
    scheduler = make_scheduler(num_blocks=6)
    for i in range(2):
        scheduler.add(make_sequence(i, [i * 10 + j for j in range(11)], max_tokens=9))
    run_step(scheduler)
    # After the preempted one by its arrival, or before it by its priority.
    scheduler.add(make_sequence(2, [77], max_tokens=9, priority=priority))
    run_step(scheduler)
    assert chunks_of(run_step(scheduler)) == [(0, 12, 13)]  # 1 was preempted; 2 would fit, but waits
    assert scheduler.block_manager.num_free_blocks == 2
    assert (2 in [seq_id for seq_id, _, _ in chunks_of(run_step(scheduler))]) == (priority < 0)


def test_a_preempted_sequence_keeps_its_tokens_and_starts_over_from_its_cached_prefix():
    scheduler = make_scheduler(num_blocks=4)
    first, second = make_sequence(0, [1] * 7, max_tokens=6), make_sequence(1, [2] * 7, max_tokens=4)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(3):
        run_step(scheduler, token=9)
    assert scheduler.waiting == [second]
    assert second.token_ids == [2] * 7 + [9] * 2
    assert (second.num_computed_tokens, second.block_table) == (0, [])
    while first.finish_reason is None:
        run_step(scheduler, token=9)
    admitted = second.first_scheduled_time
    batch = run_step(scheduler, token=9)
    assert second.first_scheduled_time == admitted
    # Its second full block was evicted for the first sequence. Its first block is hit.
    assert chunks_of(batch) == [(1, 4, 9)]
    scheduler._preempt(scheduler.running[-1], scheduler.running[0])
    assert second.num_preemptions == scheduler.num_preemptions == 2


# With two blocks of four: eight tokens in the cache, and one sampled from the eighth.
@pytest.mark.parametrize(
    ("settings", "prompt_len", "length"),
    [({"num_blocks": 2}, 3, 9), ({"num_blocks": 2}, 8, 9), ({"max_model_len": 6}, 3, 6)],
)
def test_a_sequence_ends_with_length_at_the_end_of_the_pool_or_max_model_len(settings, prompt_len, length):
    scheduler = make_scheduler(**settings)
    for refused in range(length), ():  # no room for an output token, and no prompt
        with pytest.raises(AssertionError):
            scheduler.add(make_sequence(1, [*refused]))
    seq = make_sequence(0, [*range(prompt_len)], max_tokens=None)
    scheduler.add(seq)
    while is_busy(scheduler):
        run_step(scheduler)
    assert (seq.finish_reason, seq.num_tokens) == ("length", length)
    assert scheduler.num_preemptions == 0


def test_the_memory_of_a_step_does_not_depend_on_the_pool():
    scheduler = make_scheduler(num_blocks=20_000, block_size=4)
    for i in range(4):
        scheduler.add(make_sequence(i, [i] * 6, max_tokens=40))
    run_step(scheduler)
    tracemalloc.start()
    try:
        while is_busy(scheduler):
            batch = scheduler.schedule()
            scheduler.update(batch, [1] * len(batch.sampled_seqs))
        assert tracemalloc.get_traced_memory()[1] < 100_000  # bytes; the pool's own lists take megabytes
    finally:
        tracemalloc.stop()


class LastFirst(Scheduler):
    """Admits the last waiting sequence first."""

    def next_waiting(self, waiting):
        return waiting[-1]


@pytest.mark.parametrize(("call", "ended"), [("allocate", [1]), ("next_waiting", [0, 1, 2])])
def test_two_failures_end_the_sequence_that_was_being_admitted(call, ended):
    scheduler = LastFirst(BlockManager(num_blocks=8, block_size=4))
    seqs = [make_sequence(i, [i] * 3) for i in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    owner, number = (scheduler.block_manager, 1) if call == "allocate" else (scheduler, 0)
    for _ in range(2):  # 2 is admitted, then 1 fails; or none can be chosen
        assert not any(seq.is_finished for seq in seqs)
        with failing_calls(owner, call, {number}), pytest.raises(RuntimeError):
            scheduler.schedule()
        scheduler.recover()
        check_laws(scheduler)
    assert [seq.seq_id for seq in seqs if seq.finish_reason == "error"] == ended


def test_a_sequence_that_is_not_ready_is_left_out_and_delays_no_other():
    scheduler, late = make_scheduler(num_blocks=8, max_num_seqs=2), {1, 2}
    for seq_id in range(4):
        scheduler.add(make_sequence(seq_id, [1] * 4, max_tokens=9))
    run_step(scheduler)
    scheduler.schedule_only_if(lambda seq: seq.seq_id not in late)  # 1 runs, 2 waits at the head of the queue
    assert chunks_of(run_step(scheduler)) == [(0, 4, 5)]
    assert [seq.seq_id for seq in scheduler.running] == [0, 1], "it keeps its blocks"
    scheduler.finish(scheduler.running[0], "abort")
    assert chunks_of(run_step(scheduler)) == [(3, 3, 4)], "3 overtakes 2"
    late.update(range(4))
    assert not scheduler.schedule().chunks
    late.clear()
    assert chunks_of(run_step(scheduler)) == [(1, 4, 5), (3, 4, 5)]
    scheduler.max_num_seqs = 4
    scheduler.add(make_sequence(4, [1] * 4, max_tokens=9))
    assert [seq_id for seq_id, _, _ in chunks_of(run_step(scheduler))] == [1, 3, 2, 4], "two are admitted"
