"""The bugs of other engines in docs/bugs.md: each is planted, and its run and the named tests fail."""

import json
import subprocess
import sys
from importlib import import_module

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from docs.bugs import ROOT, main, planted, read_page, run
from tests.test_scheduling_machine import AT_LENGTH

BUGS = read_page()
pytestmark = pytest.mark.usefixtures("at_the_root")
# A walk that fails is not made shorter here: it only has to fail.
FIRST_FAILURE = settings(AT_LENGTH, phases=[Phase.generate], report_multiple_bugs=False)
WALKS = [(bug, ledger) for bug in BUGS for ledger in bug.ledgers]


def test_the_page_numbers_its_bugs_and_names_what_catches_each():
    assert [bug.number for bug in BUGS] == [*range(1, len(BUGS) + 1)]
    assert all(bug.diff and bug.run and bug.symptom and bug.tests + bug.ledgers for bug in BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.number}")
def test_a_run_shows_its_bug_and_prints_what_the_page_says_without_it(bug):
    with planted(bug.diff):
        assert run(bug.run)[1] == bug.symptom
    assert run(bug.run) == ("", ""), "the bug is still planted"


def test_a_hunk_that_does_not_fit_the_engine_is_an_error():
    diff = "+++ b/nanoengine/engine.py\n@@ nowhere @@\n-    no such line\n"
    with pytest.raises(ValueError, match="0 places in nanoengine/engine"), planted(diff):
        pass


def test_the_command_lists_the_bugs_and_shows_one(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{bug.number:2}  {bug.title}" for bug in BUGS]
    assert main(["3"]) == 0
    shown = capsys.readouterr().out
    assert BUGS[2].diff in shown
    assert shown.endswith(BUGS[2].symptom)
    assert main(["0"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "ledger"), WALKS, ids=lambda value: getattr(value, "number", value))
def test_the_ledger_catches_a_bug(bug, ledger):
    with planted(bug.diff):
        machine = getattr(import_module("tests.test_scheduling_machine"), ledger)
        with pytest.raises((AssertionError, LookupError)):
            run_state_machine_as_test(machine, settings=FIRST_FAILURE)


# A process for each bug, forked from one that has imported PyTorch.
FORKS = """
import json, os, sys, tests.fixtures
from docs.bugs import main
for arguments in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        sys.exit(main([*arguments, "-m", "", "-q", "-p", "no:cacheprovider"]))
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended != 1:  # 1: tests failed; 2 to 5: none ran
        sys.exit(f"{arguments}: {ended}")
"""


@pytest.mark.slow
def test_each_named_test_fails_with_its_bug():
    tests = [(str(bug.number), test) for bug in BUGS for test in bug.tests]
    command = [sys.executable, "-c", FORKS, json.dumps(tests)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" failed") == len(tests)
