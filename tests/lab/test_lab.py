"""The scheduler lab: hand-computed times, and the same decisions as a real engine's."""

import json
import random
import re
import statistics
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from nanoengine import lab
from nanoengine.cli import lab as lab_command
from nanoengine.config import EngineConfig
from nanoengine.lab.arrivals import Arrival, agent_sessions, generate_arrivals, parse_lengths, read_arrivals
from nanoengine.lab.policies.names import POLICIES
from nanoengine.lab.simulation import CostModel, RealEngine, Simulation, Step, fit_costs, serve, simulate
from nanoengine.llm_engine import LLMEngine
from tests.helpers import DEMO, make_scheduler

COST = CostModel(step=1.0, token=0.1, context=0.01)


def test_times_are_those_computed_by_hand():
    arrivals = [Arrival(0.0, 4, 3), Arrival(0.5, 2, 2), Arrival(10.0, 1, 1)]
    report = simulate(make_scheduler(), arrivals, COST)
    # step 1: 4 tokens of A attend to 4:                      1 + .4 + .04 = 1.44, at 1.44
    # step 2: 1 of A to 5, 2 of B (here since 0.5) to 2:      1 + .3 + .07 = 1.37, at 2.81
    # step 3: 1 of A to 6, 1 of B to 3; both are complete:    1 + .2 + .09 = 1.29, at 4.10
    # step 4: C, which does not wait: 1 token to 1:       1 + .1 + .01 = 1.11, at 11.11
    assert report.ttft.tolist() == pytest.approx([1.44, 2.31, 1.11])
    assert report.latency.tolist() == pytest.approx([4.10, 3.60, 1.11])
    assert report.itl.tolist() == pytest.approx([1.37, 1.29, 1.29])
    assert report.longest_gap.tolist() == pytest.approx([1.37, 1.29, 0])
    assert (len(report.ttft), report.num_steps) == (3, 4)
    assert (report.num_prompt_tokens, report.num_output_tokens) == (7, 6)
    assert report.seconds == pytest.approx(11.11)
    assert report.busy_seconds == pytest.approx(5.21)
    assert report.output_tokens_per_s == pytest.approx(6 / 11.11)
    limits = (2.4, 1.4), (1.5, 1.4), (2.4, 1.3), (2.4, 1.2)
    assert [report.goodput(*one) for one in limits] == pytest.approx([1, 2 / 3, 2 / 3, 1 / 3])
    alone = simulate(make_scheduler(), [Arrival(0.0, 3, 1)], COST)
    assert np.isnan(alone.quantiles("itl")).all(), "one token, and no time between two"


def test_a_token_that_a_preemption_delays_waits_from_the_token_before():
    """Two sequences outgrow four blocks of four: the second gives way and starts over."""
    scheduler = make_scheduler(num_blocks=4, caching=False)
    cost = CostModel(step=1.0, token=0.0, context=0.0)
    report = simulate(scheduler, [Arrival(0.0, 7, 4), Arrival(0.0, 7, 4)], cost)
    # Tokens of A at 1, 2, 3, 4. Tokens of B at 1 and 2; preempted at the third step, again from the fifth on.
    assert report.num_preemptions == 1
    assert report.latency.tolist() == [4.0, 6.0]
    assert sorted(report.itl) == [1.0] * 5 + [3.0]  # B's third token, from 2 to 5
    assert report.num_recomputed_tokens == 8  # its prompt and its first token; the second was pending


def test_arrivals_are_drawn_as_the_clock_reaches_them():
    """So a million of them take no memory before their time."""
    scheduler, ahead = make_scheduler(num_blocks=100), []

    def drawn():
        for number in range(200):
            num_admitted = scheduler.block_manager.num_query_tokens // 4
            ahead.append(number - num_admitted)
            yield Arrival(10.0 * number, 4, 3)

    assert len(simulate(scheduler, drawn(), COST).ttft) == 200
    assert max(ahead) <= 1  # one that is served, one that is the next


def decisions(server, arrivals):
    """Return each step's chunks, their blocks, and the number of preemptions so far."""
    steps, schedule = [], server.scheduler.schedule

    def recorded():
        batch = schedule()
        chunks = [(seq.seq_id, start, end, tuple(seq.block_table)) for seq, start, end, _, _ in batch.chunks]
        steps.append((chunks, server.scheduler.num_preemptions))
        return batch

    server.scheduler.schedule = recorded
    return serve(server, arrivals), steps


class FakeClock(RealEngine):
    """A real engine whose clock advances by what the cost model predicts."""

    def step(self):
        _, batch, advanced = super().step()
        return COST.seconds(*self.steps[-1][:2]), batch, advanced


def small_trace(seed: int) -> list[Arrival]:
    """Return requests with shared prefixes or blocks, or in sessions, with priorities and deadlines."""
    rng = random.Random(seed)
    arrivals, lengths = [], dict.fromkeys("ab", 5)
    for number in range(9):
        size, num_output = rng.randint(1, 24), rng.randint(1, 9)
        kind, name = rng.choice(["own", "prefix", "hashes", "session", "session"]), rng.choice("ab")
        one = Arrival(number / rng.uniform(0.2, 2), size, num_output, priority=rng.randrange(3))
        if kind == "prefix":  # the second block of four holds two tokens of the prefix
            one = one._replace(prefix=name, num_prefix_tokens=min(size, 6))
        elif kind == "hashes":
            ids = [rng.randrange(2) * 10 + place for place in range(1 + size // 4)]
            one = one._replace(hash_ids=tuple(ids[: size // 4 + rng.randint(0, 1)]), hash_block_size=4)
        elif kind == "session" and lengths[name] + num_output < 44:
            size = lengths[name] + rng.randint(0, 9)
            lengths[name] = size + num_output
            session: dict = {"prefix": f"{name} talks", "num_prefix_tokens": size, "session": name}
            one = one._replace(num_prompt_tokens=size, **session, pause=rng.uniform(0, 4))
        arrivals.append(one._replace(ttft_deadline=rng.choice([None, rng.uniform(1, 20)])))
    return sorted(arrivals)


SIZES = {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 16, "max_num_seqs": 4}


@pytest.mark.parametrize("name", POLICIES)
def test_the_lab_makes_the_same_decisions_as_a_real_engine(name, qwen3):
    """Twenty small traces, four under each policy: each step, hits, preemptions, and times."""
    sizes = {"num_kv_blocks": 14, "block_size": 4, **SIZES}
    settings = {"scheduling_policy": "priority", "async_scheduling": False, "scheduler_cls": POLICIES[name]}
    totals = np.zeros(2)
    for number in range(4):
        trace = small_trace(4 * [*POLICIES].index(name) + number)
        engine = LLMEngine(EngineConfig(qwen3, **settings, **sizes))
        real_report, real_steps = decisions(FakeClock(engine), trace)
        engine.close()
        simulation = Simulation(make_scheduler(14, scheduler=POLICIES[name], **SIZES), COST)
        lab_report, lab_steps = decisions(simulation, trace)
        assert lab_steps == real_steps
        assert lab_report.ttft.tolist() == real_report.ttft.tolist()
        for name_of_count in ("hit_rate", "optimal_hit_rate", "num_preemptions"):
            assert getattr(lab_report, name_of_count) == getattr(real_report, name_of_count)
        totals += lab_report.hit_rate, lab_report.num_preemptions
    assert totals.all(), "these traces have hits and preemptions"


def synthetic_steps(cost: CostModel, noise: float = 0.0) -> list[Step]:
    rng = random.Random(0)
    sizes = [(rng.randint(1, 1000), rng.randint(1, 50_000)) for _ in range(400)]
    return [Step(*size, cost.seconds(*size) * rng.uniform(1 - noise, 1 + noise)) for size in sizes]


def test_the_fit_recovers_known_costs():
    known = CostModel(step=3e-3, token=4e-5, context=5e-7)
    exact = synthetic_steps(known)
    assert fit_costs(exact) == pytest.approx(known, rel=1e-9)
    assert fit_costs(exact).error(exact) < 1e-9
    noisy = synthetic_steps(known, noise=0.1)
    assert fit_costs(noisy) == pytest.approx(known, rel=0.1)
    assert known.error(noisy) == pytest.approx(0.05, abs=0.01)  # |u| of a uniform u in [-0.1, 0.1]


def test_no_cost_is_below_zero():
    """If longer contexts happened to be faster, their cost is 0, and the other costs are fitted alone."""
    falling = synthetic_steps(CostModel(step=3e-2, token=4e-5, context=-4e-7))
    step, token, context = fit_costs(falling)
    assert context == 0 < min(step, token)
    shown = [Step(num_tokens, 0, seconds) for num_tokens, _, seconds in falling]
    assert (step, token) == pytest.approx(fit_costs(shown)[:2])


# A little more than can be served: each second 19 short prompts and a long one.
MIX = [
    Arrival(second + number / 100, 400 if number == 0 else 10, 4, priority=number % 2, ttft_deadline=deadline)
    for second in range(25)
    for number, deadline in zip(range(20), [1.0] * 10 + [30.0] * 10, strict=True)
]
IS_LONG = np.array([arrival.num_prompt_tokens == 400 for arrival in MIX])


def ttft_under(scheduler, **changes):
    made = make_scheduler(1000, max_num_batched_tokens=400, max_num_seqs=10, scheduler=scheduler)
    for name, value in changes.items():
        setattr(made, name, value)
    return simulate(made, MIX, CostModel(0.1, 0.001, 0.0)).ttft


def test_policies_decide_which_requests_wait():
    times = {name: ttft_under(policy) for name, policy in POLICIES.items()}
    times["without aging"] = ttft_under(POLICIES["shortest"], tokens_per_second=0)
    mean = {name: ttft.mean() for name, ttft in times.items()}
    longest = {name: ttft.max() for name, ttft in times.items()}
    assert mean["without aging"] < mean["shortest"] < mean["fcfs"]
    assert longest["fcfs"] < longest["shortest"] < longest["without aging"]
    assert times["without aging"][~IS_LONG].max() < times["fcfs"][~IS_LONG].max()
    is_urgent = np.array([arrival.priority == 0 for arrival in MIX])
    assert times["priority"][is_urgent].mean() < mean["fcfs"] < times["priority"][~is_urgent].mean()
    within = np.array([one.ttft_deadline for one in MIX])
    met = {name: (ttft <= within).mean() for name, ttft in times.items()}
    assert met["deadline"] > met["fcfs"]


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 4}])
def test_a_better_priority_takes_the_place_of_a_running_request(limits):
    """There is room for one at a time. The urgent request begins at once, and then the first one goes on."""
    trace = [Arrival(0, 8, 8, priority=1), Arrival(2, 8, 2), Arrival(2, 8, 2, priority=1)]
    limits = {"num_blocks": 20} | limits
    fcfs, priority = (
        simulate(make_scheduler(**limits, scheduler=POLICIES[name]), trace, CostModel(1, 0, 0))
        for name in ("fcfs", "priority")
    )
    assert fcfs.ttft[1] > 4
    assert priority.ttft.tolist()[:2] == [1, 1]
    assert priority.num_preemptions >= 1
    assert priority.num_recomputed_tokens > 0


def test_the_request_with_the_most_cached_tokens_is_admitted_first():
    trace = [Arrival(0, 8, 20, "a", 8), Arrival(1, 8, 1), Arrival(1.5, 9, 1, "a", 8)]
    ttft = simulate(make_scheduler(30, max_num_seqs=1, scheduler=POLICIES["cached"]), trace, COST).ttft
    assert ttft[2] < ttft[1]


def test_policies_and_the_lab_are_short():
    folder = Path(lab.__file__).parent
    for name in POLICIES:
        assert len((folder / "policies" / f"{name}.py").read_text().splitlines()) <= 30
    paths = [*folder.glob("*.py"), Path(lab_command.__file__)]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= 764


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(burstiness):
    one = parse_lengths("1")
    arrivals = generate_arrivals(20_000, 4.0, one, one, burstiness=burstiness)
    gaps = np.diff([0.0, *(arrival.arrival_time for arrival in arrivals)]).tolist()
    assert statistics.fmean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert statistics.pvariance(gaps) == pytest.approx(1 / 4**2 / burstiness, rel=0.1)


def test_lengths_follow_the_requested_distribution():
    rng = random.Random(0)
    assert {parse_lengths("7")(rng) for _ in range(9)} == {7}
    assert {parse_lengths("2-5")(rng) for _ in range(200)} == {2, 3, 4, 5}
    long_tailed = [parse_lengths("100~1")(rng) for _ in range(5000)]
    assert statistics.median(long_tailed) == pytest.approx(100, rel=0.05)
    assert statistics.fmean(long_tailed) == pytest.approx(100 * np.exp(0.5), rel=0.1)
    assert 1 <= min(long_tailed) < 10 < max(long_tailed) <= 2009
    assert {parse_lengths("1~3")(rng) for _ in range(100)} > {1}


@pytest.mark.parametrize("text", ["0", "5-2", "-3", "a", "100~", "0-4", "3~1~1", ""])
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match=r"LOW-HIGH"):
        parse_lengths(text)


def test_a_file_of_arrivals_is_read_in_order_of_time(tmp_path):
    lengths = parse_lengths("1-40"), parse_lengths("1-12")
    drawn = generate_arrivals(20, 1.0, *lengths, num_prefixes=2, num_prefix_tokens=3)
    arrivals = [arrival._replace(priority=number % 3) for number, arrival in enumerate(drawn)]
    path = tmp_path / "arrivals.jsonl"
    path.write_text("".join(json.dumps(arrival._asdict()) + "\n" for arrival in reversed(arrivals)))
    assert read_arrivals(str(path)) == arrivals


def test_a_mooncake_trace_is_read_as_it_is(tmp_path):
    """Milliseconds, and a prompt as ids of blocks of 512 tokens, of which the last may be shorter."""
    lines = (0, 1100, 3, [0, 1, 2]), (5999, 1053, 2, [0, 1, 9])
    names = "timestamp", "input_length", "output_length", "hash_ids"
    path = tmp_path / "conversation_trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines))
    first, second = read_arrivals(str(path))
    assert (second.arrival_time, *second[1:3]) == (5.999, 1053, 2)
    assert first.parts("own") == [(0, 512), (1, 512), (2, 76)]
    report = simulate(make_scheduler(100, block_size=32), [first, second], COST)
    assert report.hit_rate == report.optimal_hit_rate == 1024 / 2153


def test_the_turns_of_an_agent_have_the_published_shape_and_wait_for_each_other():
    turns = agent_sessions(400, 1.0, seed=1)
    sessions = [list(group) for _, group in groupby(turns, key=lambda turn: turn.session)]
    num_in, num_out = np.array([[sum(turn[i] for turn in one) for i in (1, 2)] for one in sessions]).T
    repeated = num_in - [one[-1].num_prompt_tokens for one in sessions]
    assert np.median([len(one) for one in sessions]) == pytest.approx(43, rel=0.1)
    assert np.median(num_in) == pytest.approx(142_000, rel=0.1)
    assert np.median(num_out) == pytest.approx(444, rel=0.1)
    assert np.median(repeated / num_in) == pytest.approx(0.96, abs=0.01)
    small = [*agent_sessions(3, 1.0, length_factor=0.02, seed=2)]
    report = simulate(make_scheduler(10_000), small, CostModel(1.0, 0.0, 0.0))
    assert report.hit_rate > 0.8
    # No two turns of a session overlap: the steps' seconds and the pauses add up.
    talk = sessions[0]
    alone = [turn._replace(num_output_tokens=2) for turn in talk]
    report = simulate(make_scheduler(10_000), alone, CostModel(1.0, 0.0, 0.0))
    assert report.seconds == pytest.approx(2 * len(talk) + sum(turn.pause for turn in talk))
    assert report.latency.tolist() == pytest.approx([2.0] * len(talk))


GOOD = {"arrival_time": 0.0, "num_prompt_tokens": 3, "num_output_tokens": 2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        (b'{"arrival_time": "\xff"}', "utf-8"),
        ("[1]", "mapping"),
        (json.dumps({"arrival_time": 0.0}), "num_prompt_tokens"),
        (json.dumps(GOOD | {"colour": 1}), "colour"),
        (json.dumps(GOOD | {"num_prompt_tokens": 0}), "num_prompt_tokens must be .* got 0"),
        (json.dumps(GOOD | {"num_output_tokens": 1.5}), "num_output_tokens must be an integer .* got 1.5"),
        (json.dumps(GOOD | {"hash_ids": ["a"]}), "hash_ids"),
        (json.dumps(GOOD | {"hash_ids": 3}), "not iterable"),
        (json.dumps(GOOD | {"pause": -1}), "pause"),
        (json.dumps({"timestamp": 5}), "num_prompt_tokens"),
        *((json.dumps(GOOD | {"arrival_time": one}), "arrival_time") for one in (-1, "1", float("nan"))),
        (json.dumps(GOOD | {"prefix": "a", "num_prefix_tokens": 4}), "num_prefix_tokens must be .*, got 4"),
        (json.dumps(GOOD | {"num_prefix_tokens": 2}), "num_prefix_tokens must be .*, got 2"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, line, message):
    path = tmp_path / "arrivals.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        read_arrivals(str(path))


@pytest.fixture
def run_lab(capsys):
    def run(*arguments: str):
        lab_command.main(list(arguments))
        return capsys.readouterr()

    return run


def test_the_command_compares_settings_row_by_row_and_draws(tmp_path, run_lab):
    plot, flags = tmp_path / "lab.png", "--num-requests 30 --rate 40,80 --max-num-batched-tokens 128,512"
    flags += f" --num-prefixes 2 --num-kv-blocks 200 --plot {plot}"
    printed = run_lab(*flags.split()).out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    names = ["40/s, budget 128", "40/s, budget 512", "80/s, budget 128", "80/s, budget 512"]
    assert [row[0] for row in rows[1:]] == [f"| {name}" for name in names]
    assert rows[0][1].startswith("latency")
    assert len({tuple(row[1:]) for row in rows[1:]}) == 4  # each setup was served on its own
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_command_serves_a_file_with_the_costs_it_is_given(tmp_path, run_lab):
    path = tmp_path / "arrivals.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    printed = run_lab("--trace", str(path), "--cost", "1,0.5,0.25")
    assert "3.25 / 3.25 / 3.25" in printed.out  # 1 + 3 * 0.5 + 3 * 0.25
    assert "2500.0 / 2500.0 / 2500.0" in printed.out  # 1 + 0.5 + 4 * 0.25
    assert "1 requests, 2 steps" in printed.err


def test_the_command_fits_a_model_and_says_how_far_off_it_is(run_lab, monkeypatch):
    calibrations = []
    calibrate = lab_command.calibrate
    noted = lambda *given: calibrations.append(calibrate(*given)) or calibrations[0]  # noqa: E731
    monkeypatch.setattr(lab_command, "calibrate", noted)
    printed = run_lab("--fit", str(DEMO), "--fit-seconds", "0.05", "--num-requests", "5").out
    step, _, _ = re.search(r"--cost (\S+)", printed)[1].split(",")
    assert float(step) > 0
    cost, _, others, measured, simulated = calibrations[0]
    assert cost.error(others) > 0
    assert len(measured.ttft) == len(simulated.ttft) >= 10
    assert measured.num_output_tokens == simulated.num_output_tokens > 0
    assert measured.busy_seconds > 0


def test_the_command_compares_policies_in_one_table(run_lab):
    flags = "--agent-sessions 9 --length-factor 0.1 --cost 0.1,0.001,0 --num-kv-blocks 60 --max-num-seqs 2"
    printed = run_lab(*flags.split(), "--scheduler-cls", ",".join(POLICIES)).out
    head, *rows = [line.split("|") for line in printed.splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in rows] == [*POLICIES]
    assert len({tuple(row[2:]) for row in rows}) >= 3
    columns = {name.strip(): place for place, name in enumerate(head)}
    hits, best = ([float(row[columns[name]].strip(" %")) for row in rows] for name in ("hits", "Belady"))
    assert all(0 < one <= most for one, most in zip(hits, best, strict=True))
    assert {"goodput", "recomputed"} <= columns.keys()
