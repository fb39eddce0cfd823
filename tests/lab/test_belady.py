"""Belady's optimum: worked examples, and every possible eviction of small runs."""

import random
from functools import cache
from itertools import combinations

import pytest

from nanoengine.lab.arrivals import Arrival
from nanoengine.lab.belady import Accesses, optimal_hits
from nanoengine.lab.policies.names import POLICIES
from nanoengine.lab.simulation import CostModel, simulate
from tests.helpers import make_scheduler

COST = CostModel(1.0, 0.0, 0.0)


def one_at_a_time(names, num_tokens=9) -> list[Arrival]:
    """Return requests of two blocks of 4 and a token, one after another. Equal letters are equal prompts."""
    return [Arrival(10.0 * i, num_tokens, 1, name, num_tokens) for i, name in enumerate(names)]


def test_the_optimum_keeps_what_is_used_next_where_the_engine_keeps_what_was_used_last():
    """A request takes three of five blocks. In a cycle of three, the least recently used is the next one."""
    report = simulate(make_scheduler(5), one_at_a_time("abcabcabc"), COST)
    assert report.hit_rate == 0
    # Two blocks are free while the third runs: of a, which is found. Then c is kept, then b.
    assert report.optimal_hit_rate == 3 * 8 / 81
    assert simulate(make_scheduler(9), one_at_a_time("abcabcabc"), COST).hit_rate == 6 * 8 / 81


def test_the_last_token_of_a_prompt_that_is_cached_whole_is_no_hit():
    report = simulate(make_scheduler(9), one_at_a_time("aaa", num_tokens=8), COST)
    assert report.hit_rate == report.optimal_hit_rate == 2 * 7 / 24


def best_by_trying(events, block_size):
    """Return the most hits of any eviction in which no block outlives its parents."""

    @cache
    def best(i, held, kept):
        if i == len(events):
            return 0
        kind, num_free, seq_id, num_counted, _, blocks = events[i]
        mine, hits = dict(held), 0
        blocks_of = list(mine.get(seq_id, ()))
        present = set(kept).union(*mine.values())
        if kind == "admitted":
            num = next((n for n, block in enumerate(blocks) if block not in present), len(blocks))
            blocks_of = list(blocks[:num])
            hits = min(num * block_size, num_counted - 1) if num_counted else 0
        elif kind == "registered":
            blocks_of += [block for block in blocks if block not in blocks_of]
        mine[seq_id] = tuple(blocks_of)
        if kind == "freed":
            del mine[seq_id]
            kept |= set(blocks_of)
        kept -= set().union(*mine.values())
        held = tuple(sorted(mine.items()))
        most = min(len(kept), num_free)
        choices = [frozenset(one) for size in range(most + 1) for one in combinations(sorted(kept), size)]
        if len(kept) <= num_free:  # keeping all is never worse
            choices = [kept]
        return hits + max(best(i + 1, held, choice) for choice in choices)

    return best(0, (), frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_no_eviction_finds_more_than_the_optimum(seed):
    rng = random.Random(seed)
    trace = one_at_a_time([rng.choice("abc") for _ in range(7)])
    trace = [one._replace(arrival_time=one.arrival_time * rng.choice([0.05, 1])) for one in trace]
    trace = [
        one._replace(num_prompt_tokens=(n := rng.choice([5, 9, 13])), num_prefix_tokens=n) for one in trace
    ]
    scheduler = make_scheduler(8, max_num_seqs=2)
    recorded = Accesses(scheduler)
    report = simulate(scheduler, sorted(trace), COST)
    assert scheduler.num_preemptions == 0
    found = optimal_hits(recorded.events, 4)
    assert found == best_by_trying(recorded.events, 4)
    assert round(report.hit_rate * report.num_prompt_tokens) <= found


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_finds_more_than_the_optimum_for_its_order(name):
    rng, gained = random.Random(1), 0
    for _ in range(20):
        trace = [
            Arrival(0.4 * i, 13, rng.randint(1, 9), name, 13, priority=rng.randint(0, 2))
            for i, name in enumerate([rng.choice("abcdef") for _ in range(30)])
        ]
        report = simulate(make_scheduler(14, scheduler=POLICIES[name]), trace, COST)
        assert report.hit_rate <= report.optimal_hit_rate
        gained += report.optimal_hit_rate - report.hit_rate
    assert gained > 0
