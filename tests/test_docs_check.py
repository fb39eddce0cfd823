"""The track to build: the solution is right, the stub is not, and the mistakes people make are caught."""

import faulthandler
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from docs import check, decode, matvec
from docs.check import LESSONS, SOLUTIONS, EndlessError, find_failures, functions_of, main, sheet_of, stub
from docs.checks import CHECKS
from tests.helpers import slow

RIGHT = {lesson: SOLUTIONS[sheet_of(lesson)].read_text() for lesson in LESSONS}
SLOW = pytest.mark.slow
BY_LETTERS = [lesson for lesson in LESSONS if lesson != "all"]


def mistakes(name):
    """Yield (lesson, what is wrong, the right code, the wrong code) of each mistake in a file."""
    text = Path(__file__).with_name(name).read_text()
    for section in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        title, *lines = section.splitlines()
        right, wrong = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        lessons, what = title.split(" ", 1)
        for lesson in lessons.split(","):
            yield lesson, what, right, wrong


MISTAKES = list(mistakes("mistakes.txt"))
FIRST = {lesson: what for lesson, what, *_ in reversed(MISTAKES) if lesson != "all"}  # the others are slow
assert all(right in RIGHT[lesson] for lesson, _, right, _ in MISTAKES)


@pytest.mark.parametrize("lesson", [*BY_LETTERS, *slow("all")])
def test_the_solution_is_right(lesson):
    assert [*find_failures(RIGHT[lesson], lesson)] == []


@pytest.mark.parametrize("lesson", BY_LETTERS)
def test_the_stub_passes_no_check_and_says_so(lesson):
    found = [*find_failures(stub(sheet_of(lesson)), lesson)]
    assert len(found) == len(CHECKS[lesson])
    assert all("is not written yet" in failure for failure in found)


@pytest.mark.slow
def test_the_check_of_the_whole_engine_lists_what_is_not_written_and_checks_the_rest():
    wrong = stub(last=4).replace("return -(-num_tokens // block_size)", "return num_tokens // block_size")
    for source, last, passes in (stub(), 0, True), (wrong, 4, False):
        first, *others = find_failures(source, "all")
        missing = [item.name for lesson, _, item in functions_of(RIGHT["all"], "nano") if int(lesson) > last]
        assert first.endswith(f"Not written yet: {', '.join(missing)}.")
        assert (others == []) == passes


def test_a_function_is_checked_while_others_of_its_lesson_are_not_written():
    lines = "# Lesson 4 asks for these lines.\n    raise NotImplementedError"
    found = [*find_failures(stub(last=2).replace(lines, "return -(-num_tokens // block_size)", 1), "4")]
    assert len(found) == len(CHECKS["4"]) - 1
    assert {failure.splitlines()[-1].strip() for failure in found} == {
        f"`{name}` is not written yet." for name in ("may_append", "map_slots", "gathered_attention")
    }


@pytest.mark.parametrize(
    ("lesson", "last", "line"),
    [
        ("16", 16, r"multiply +\d+\.\d\d ms +\d+\.\d\d ms"),
        *slow(("2", 2, r"your engine \(with nano.py's .*\) answers 8 questions at \d+ tokens/s")),
        *slow(("4", 99, r"your engine answers 8 questions at \d+ tokens/s, nanoengine")),
    ],
)
def test_a_file_that_passes_is_timed_beside_ours(lesson, last, line, tmp_path, capsys):
    student = tmp_path / "mine.py"
    student.write_text(stub(sheet_of(lesson), last))
    assert main([lesson, str(student)]) == 0
    assert re.search(line, capsys.readouterr().out)


@SLOW
def test_a_speed_that_an_unfinished_function_of_another_lesson_prevents_is_explained(tmp_path, capsys):
    student = tmp_path / "mine.py"
    student.write_text(RIGHT["2"].replace("    chunks: list[Chunk] = []", "    chunks = later", 1))
    assert main(["2", str(student)]) == 0
    assert "The engine's speed is unknown. Your code raised NameError" in capsys.readouterr().out


def test_a_file_filled_up_to_the_last_lesson_is_the_whole_engine_with_its_command():
    assert {sheet: stub(sheet, 99) for sheet in SOLUTIONS} == {s: p.read_text() for s, p in SOLUTIONS.items()}


@pytest.mark.parametrize("last", [pytest.param(x, marks=() if x == "16" else SLOW) for x in BY_LETTERS])
def test_a_file_filled_up_to_a_lesson_passes_the_checks_up_to_it_without_the_solution(last):
    for lesson in BY_LETTERS[: BY_LETTERS.index(last) + 1]:
        assert [*find_failures(stub(sheet_of(lesson), int(last)), lesson, alone=True)] == []


@pytest.mark.parametrize(
    ("lesson", "right", "wrong"),
    [
        pytest.param(lesson, *code, id=f"{lesson} {what}", marks=() if FIRST.get(lesson) == what else SLOW)
        for lesson, what, *code in MISTAKES
    ],
)
def test_a_mistake_is_caught(lesson, right, wrong):
    assert RIGHT[lesson].count(right) == 1
    assert any(find_failures(RIGHT[lesson].replace(right, wrong), lesson, most=0.5))


@SLOW
@pytest.mark.parametrize("lesson", BY_LETTERS)
def test_mistakes_in_a_lesson_fail_no_other_lesson(lesson):
    student = RIGHT[lesson]
    for where, _, function in reversed(functions_of(student, sheet_of(lesson))):
        if where == lesson:
            lines = student.splitlines()
            body = slice(function.body[1].lineno - 1, function.end_lineno)
            lines[body] = [" " * function.body[0].col_offset + "1 / 0"]
            student = "\n".join(lines)
    assert len([*find_failures(student, lesson)]) == len(CHECKS[lesson])
    others = [other for other in BY_LETTERS if other != lesson and sheet_of(other) == sheet_of(lesson)]
    assert not any(any(find_failures(student, other)) for other in others)


def test_a_loop_is_stopped_although_a_first_stop_was_ignored():
    def loop():
        while True:
            pass

    def ignore_one():
        with suppress(EndlessError):  # as Python does in a callback of the garbage collector
            loop()
        loop()

    with pytest.raises(EndlessError), check.limited(0.1):
        ignore_one()


def test_each_lesson_knows_five_mistakes_for_each_of_its_functions():
    for lesson in BY_LETTERS:
        functions = sum(where == lesson for where, _, _ in functions_of(RIGHT[lesson], sheet_of(lesson)))
        assert functions == len(LESSONS[lesson].partition(": ")[2].split(", "))
        assert sum(where == lesson for where, *_ in MISTAKES) >= 5 * functions


def test_the_command_explains_what_is_wrong(tmp_path, capsys):
    student = tmp_path / "my_nano.py"
    student.write_text(RIGHT["6"].replace("in reversed(seq.block_table)", "in seq.block_table"))
    assert main(["6", str(student)]) == 1
    assert capsys.readouterr().out == (
        "A freed sequence's last block is evicted first: 8 of its 12 letters can still be hit.\n"
        "    Blocks hit: got 0, expected 2.\n"
        f"{len(CHECKS['6']) - 1} of {len(CHECKS['6'])} checks pass.\n"
    )


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("return [][num_tokens]", "Your code raised IndexError: list index out of range"),
        ("while True: pass", "Your code was stopped after 0.3 seconds. Does a loop never end?"),
        ("raise NotImplementedError", "`num_blocks_for` is not written yet."),
    ],
)
def test_the_student_s_own_line_is_shown_and_an_endless_loop_is_stopped(wrong, line):
    student = RIGHT["4"].replace("return -(-num_tokens // block_size)", wrong)
    shown = next(find_failures(student, "4", most=0.3)).splitlines()
    number = student.splitlines().index("    " + wrong) + 1
    assert shown[1].strip() == line
    where = f"    my_nano.py, line {number}, in num_blocks_for: {wrong}"
    assert shown[2:] == ([] if "written" in line else [where])


def test_a_file_that_does_not_compile_is_reported_once(tmp_path, capsys):
    student = tmp_path / "my_nano.py"
    student.write_text("x = 1\ndef f(:\n")
    assert main(["6", str(student)]) == 1
    assert capsys.readouterr().out == f"{student}, line 2: invalid syntax\n"


def test_an_extra_block_is_explained_and_a_long_answer_is_shortened():
    greedy = find_failures(RIGHT["4"].replace("if num_new > self.num_free_blocks", "if num_new > 99"), "4")
    assert any("if no block is free" in failure for failure in greedy)
    endless = find_failures(RIGHT["7"].replace("self.running = [seq for", "[seq for"), "7")
    assert all(len(failure) < 600 for failure in endless)
    lost = find_failures(RIGHT["6"].replace("self.empty_blocks.appendleft(block)", "pass"), "6")
    assert any("is lost: no block table and no list of free blocks has it." in failure for failure in lost)


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("", "", "times as fast as NumPy"),
        ("bytes[i + j] >> 4", "(bytes[i + j] & 240)", "differs from `multiply`"),
        *slow(
            ("float(bytes[i + j] & 15)", "float(bytes[i + j])", "differs from `multiply`"),
            (" + zeros[n * num_groups + g] * sum", "", "differs from `multiply`"),
            ("scales[n * num_groups + g]", "scales[n]", "differs from `multiply`"),
            ("x + g * group_size", "x", "differs from `multiply`"),
            ("out[n] = total", "out[0] = total", "differs from `multiply`"),
        ),
        ("out[n] = total", "out[n << 40] = total", "crashed"),
        ("n < num_outputs; n++", "n < num_outputs;", "Does a loop never end?"),
        ("float total = 0;", "float total = 0", "expected"),
        (matvec.SOLUTION.read_text(), matvec.stub(), "differs from `multiply`"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_student_s_kernel_is_checked_in_another_process(right, wrong, what, tmp_path, capfd, pytestconfig):
    student, source = tmp_path / "my_matvec.cpp", matvec.SOLUTION.read_text()
    assert right in source
    student.write_text(source.replace(right, wrong) if right else source)
    most = 1 if "loop" in what else 8
    with (tmp_path / "trace").open("w+") as trace:
        faulthandler.enable(trace)
        try:
            assert matvec.main(student, most) == (1 if right else 0)
        finally:
            faulthandler.enable(pytestconfig.stash[fault_handler_stderr_fd_key])
        trace.seek(0)
        assert trace.read() == "", "a student's crash is reported in one line"
    printed = capfd.readouterr()
    assert what in printed.out + printed.err


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def wrong_kernel(path, right, wrong):
    """Write the solution with a mistake."""
    source = decode.SOLUTION.read_text()
    assert right in source
    path.write_text(source.replace(right, wrong) if right else source)
    return path


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("", "", "3.9 times as many"),
        ("k_cache + where", "k_cache + (where << 40)", "crashed"),
        ("        largest = new_largest", "        while True: pass", "Does a loop never end?"),
    ],
)
@needs_triton
@pytest.mark.slow
def test_a_student_s_triton_kernel_is_checked_in_another_process(right, wrong, what, tmp_path, capfd):
    student = wrong_kernel(tmp_path / "my_kernel.py", right, wrong)
    assert decode.main(student, most=6 if "while" in wrong else 60) == (1 if right else 0)
    printed = capfd.readouterr()
    assert what in printed.out
    assert not printed.err


# Forks of a process that has imported Triton.
FORKS = """
import os, sys, docs.kernel
from docs.decode import guarded
for source in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.exit(guarded(source, 60))
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
WRONG = [(right, wrong, what) for _, what, right, wrong in mistakes("kernel_mistakes.txt")]
WRONG.append((decode.SOLUTION.read_text(), decode.stub(), "not written"))


@needs_triton
@pytest.mark.slow
def test_a_student_is_told_what_is_wrong_with_a_triton_kernel(tmp_path):
    students = [wrong_kernel(tmp_path / f"{i}.py", *change) for i, (*change, _) in enumerate(WRONG)]
    command = [sys.executable, "-W", "ignore", "-c", FORKS, *map(str, students)]
    settings = {"cwd": decode.SOLUTION.parents[1], "env": os.environ | {"TRITON_INTERPRET": "1"}}
    done = subprocess.run(command, capture_output=True, text=True, **settings)
    *said, last = done.stdout.split("ended with 1\n")
    assert (last, done.stderr) == ("", "")
    for (_, _, what), text in zip(WRONG, said, strict=True):
        assert what in text


@pytest.mark.parametrize("lesson", BY_LETTERS)
def test_a_check_that_a_lesson_quotes_exists(lesson):
    (page,) = SOLUTIONS["exercises"].parent.glob(f"{int(lesson):02}-*.md")
    for quote in re.findall(r'The check should fail at "([^"]+)"', " ".join(page.read_text().split())):
        assert any(quote in sentence for sentence, _ in CHECKS[lesson])
