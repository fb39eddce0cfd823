"""Schedulers that a user passes in: `scheduler_cls`."""

import json
import random
import re
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis.stateful import run_state_machine_as_test

from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.assembly import find_scheduler
from nanoengine.cli import bench
from nanoengine.cli import lab as lab_command
from nanoengine.engine import Scheduler
from nanoengine.extensions.speculative_decoding import DraftingScheduler
from nanoengine.lab.policies.names import POLICIES
from nanoengine.lab.policies.priority import PreemptivePriority
from tests.helpers import DEMO, tokens_of
from tests.model_table import small_config
from tests.test_scheduling_machine import IN_SECONDS, ExtendedMachine
from tests.worlds import World

GUIDE = Path(__file__).parent.parent / "docs" / "guide" / "scheduling.md"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
GREEDY = {"temperature": 0, "ignore_eos": True}
POLICY = "nanoengine.lab.policies.shortest:ShortestFirst"
LENGTHS = [20, 50, 20]
SMALL = {"num_kv_blocks": 7, "block_size": 8}  # each needs a third block in the same step, and one is free


def answers(llm, lengths):
    """Return the token ids of requests for these numbers of tokens."""
    params = [SamplingParams(max_tokens=length, **GREEDY) for length in lengths]
    return tokens_of(llm.generate([[5 + i] for i in range(len(lengths))], params, use_tqdm=False))


@pytest.fixture(scope="module")
def expected():
    """Return the tokens of requests of `LENGTHS` without a policy."""
    with LLM(DEMO, num_kv_blocks=40, block_size=8) as llm:
        return answers(llm, LENGTHS)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_longest_job_is_preempted(async_scheduling, expected):
    with LLM(DEMO, **SMALL, async_scheduling=async_scheduling, scheduler_cls=POLICY) as llm:
        llm.scheduler.tokens_per_second = 0
        preempted = []
        llm.scheduler.observe(lambda event, *about: preempted.append(about) if event == "freed" else None)
        assert answers(llm, LENGTHS) == expected
        victims = [seq.seq_id for seq, for_seq in preempted if for_seq is not None]
        assert victims == [1], "not the last one, as by default"


def test_the_guide_s_policy_runs_in_the_lab_and_on_a_model(expected, tmp_path, monkeypatch, capsys):
    code, run = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "my_policy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    name = "my_policy:SmallestFootprint"
    flags = "--agent-sessions 9 --length-factor 0.1 --num-kv-blocks 60 --max-num-seqs 4 --cost 0.1,0.001,0"
    lab_command.main([*flags.split(), "--scheduler-cls", f"fcfs,{name}"])
    fcfs, mine = [line.split("|")[2:] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert fcfs != mine
    exec(run, {})
    assert re.findall(r"(\d+) prompt tokens were cached", capsys.readouterr().out) == ["288", "8640"]
    with LLM(DEMO, **SMALL, scheduler_cls=name) as llm:
        assert answers(llm, LENGTHS) == expected
        assert llm.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_of_the_lab_changes_a_token(name, expected):
    with LLM(DEMO, **SMALL, scheduler_cls=POLICIES[name]) as llm:
        assert answers(llm, LENGTHS) == expected


class Refusing(Scheduler):
    """Fails to queue a sequence where `limit` ones wait already."""

    limit = 9

    def add(self, seq):
        if len(self.waiting) == self.limit:
            raise KeyError("not this one")
        super().add(seq)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_request_that_a_policy_fails_to_queue_leaves_nothing_behind(limit):
    with LLM(DEMO, num_kv_blocks=20, scheduler_cls=Refusing) as llm:
        expected = answers(llm, [5, 3])
        llm.scheduler.limit = limit
        with pytest.raises(KeyError, match="not this one"):
            llm.generate("Hi", SamplingParams(n=3), use_tqdm=False)
        assert not llm.has_unfinished_requests()
        assert not llm.scheduler.waiting
        assert not llm.llm_engine._request_of
        llm.scheduler.limit = 9
        assert answers(llm, [5, 3]) == expected


@pytest.mark.parametrize("deadline", ["soon", None, float("nan"), True, [1]])
def test_a_deadline_that_is_no_number_is_refused(deadline):
    with LLM(DEMO, num_kv_blocks=20, scheduler_cls=POLICIES["deadline"]) as llm:
        with pytest.raises((TypeError, ValueError), match="ttft_deadline must be a number"):
            llm.generate("Hi", SamplingParams(extra_args={"ttft_deadline": deadline}), use_tqdm=False)
        assert not llm.has_unfinished_requests()


class AnyChoice(Scheduler):
    """Makes every choice at random."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.rng = random.Random(0)

    def next_waiting(self, waiting):
        assert waiting
        return self.rng.choice(waiting)

    def victim(self, running):
        assert running
        return self.rng.choice(running)


class AnyDraftedChoice(AnyChoice, DraftingScheduler):
    pass


@pytest.mark.parametrize("how", IN_SECONDS)
@pytest.mark.parametrize(
    ("plain", "drafting"), [(AnyChoice, AnyDraftedChoice), (PreemptivePriority, DraftingScheduler)]
)
def test_any_choices_and_preemptions_for_a_priority_keep_the_laws(plain, drafting, how):
    class PolicyWorld(World):
        schedulers: ClassVar = {Scheduler: plain, DraftingScheduler: drafting}

    class PolicyMachine(ExtendedMachine):
        make_world = PolicyWorld

    run_state_machine_as_test(PolicyMachine, settings=how)


def test_a_choice_that_a_step_has_scheduled_already_is_an_error():
    class First(Scheduler):
        def victim(self, running):
            return self.running[0]

    params, settings = SamplingParams(max_tokens=50, **GREEDY), {"num_kv_blocks": 9, "block_size": 8}
    with LLM(DEMO, **settings, scheduler_cls=First) as llm, pytest.raises(AssertionError):
        llm.generate([[5], [6]], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, 'scheduler_cls must be a class or "module:Class", got 5'),
        (dict, "scheduler_cls must be a subclass of nanoengine.engine.Scheduler, got <class 'dict'>"),
        ("json:loads", "scheduler_cls must be a subclass of nanoengine.engine.Scheduler, got <function"),
        ("nowhere.at:All", "scheduler_cls must be \"module:name\", got 'nowhere.at:All': No module named"),
        ("Scheduler", "scheduler_cls must be a class or \"module:Class\", got 'Scheduler'"),
        ("json:Nothing", "scheduler_cls must be \"module:name\", got 'json:Nothing'"),
    ],
)
def test_what_is_no_scheduler_is_refused_before_the_model_is_loaded(given, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        LLM("no such model", scheduler_cls=given)


def test_with_drafts_or_states_the_class_must_extend_their_scheduler(tmp_path):
    needs = "scheduler_cls must extend"
    with pytest.raises(ValueError, match=f"with speculative_config, {needs} DraftingScheduler"):
        LLM(DEMO, num_kv_blocks=9, speculative_config=NGRAM, scheduler_cls=AnyChoice)
    config = small_config("mamba2").to_dict() | {"architectures": ["Mamba2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"with models with recurrent states, {needs} Stateful"):
        LLM(tmp_path, load_format="dummy", num_state_slots=4, scheduler_cls=POLICY)
    with LLM(DEMO, num_kv_blocks=9, speculative_config=NGRAM, scheduler_cls=AnyDraftedChoice) as llm:
        assert type(llm.scheduler) is AnyDraftedChoice


def test_bench_has_a_flag_for_it(monkeypatch):
    found = {}
    monkeypatch.setattr(bench, "LLM", lambda *args, **settings: found.update(settings) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main(["--scheduler-cls", POLICY])
    for name in found["scheduler_cls"], POLICY.replace(":", "."):
        assert find_scheduler(name).__name__ == "ShortestFirst"
    assert EngineConfig(DEMO, scheduler_cls=POLICY).scheduler_cls == POLICY
