"""The track to build: the solution is right, the stub is not, and the mistakes people make are caught."""

import re

import pytest

from docs.check import CHECKS, LESSONS, SOLUTION, failures, main, stub

RIGHT = SOLUTION.read_text()
BY_LETTERS = [lesson for lesson in LESSONS if lesson != "all"]

MISTAKES = {  # lesson, what goes wrong: the right code, the wrong code
    ("3", "a block late"): ("-(-num_tokens // self.block_size)", "num_tokens // self.block_size"),
    ("3", "a block early"): ("-(-num_tokens // self.block_size)", "num_tokens // self.block_size + 1"),
    ("3", "the block's number for the slot"): ("* self.block_size + position %", "+ position %"),
    ("4", "hash without the parent"): ("hash((keys[-1] if keys else None, *", "hash((None, *"),
    ("4", "no token left to compute"): (
        "min(seq.num_hit_tokens, len(seq.token_ids) - 1)",
        "seq.num_hit_tokens",
    ),
    ("4", "a hit on a free block counted as room"): ("num_new + num_revived >", "num_new >"),
    ("4", "register what is not computed"): ("seq.token_ids[: seq.num_computed_tokens]", "seq.token_ids"),
    ("5", "the head first"): ("in reversed(seq.block_table)", "in seq.block_table"),
    ("5", "the count of users forgotten"): ("self.ref_counts[block] += 1", "pass"),
    ("5", "a revived block left among the free"): ("self.evictable_blocks.pop(block, None)", "pass"),
    ("5", "evicted content found still"): (
        "del self.block_of[self.key_of.pop(block)]",
        "self.key_of.pop(block)",
    ),
    ("6", "a batch that no request joins"): (
        "            self.waiting\n",
        "            self.waiting and not chunks\n",
    ),
    ("6", "one more than may run"): ("len(self.running) < self.max", "len(self.running) <= self.max"),
    ("6", "blocks never freed"): (
        "self.running.remove(seq)\n                    self.block_manager.free(seq)",
        "self.running.remove(seq)",
    ),
    ("6", "the stop token ignored"): ("token == STOP or ", ""),
    ("7", "a draw in a prompt's middle"): ("end == len(seq.token_ids), [])", "True, [])"),
    ("7", "each prompt whole"): (
        "end = min(len(seq.token_ids), seq.num",
        "end = max(len(seq.token_ids), seq.num",
    ),
    ("7", "hits computed again"): ("return Chunk(seq, seq.num_computed_tokens,", "return Chunk(seq, 0,"),
    ("8", "the oldest gives way"): ("seq = self.running.pop()", "seq = self.running.pop(0)"),
    ("8", "to the end of the queue"): ("self.waiting.insert(0, seq)", "self.waiting.append(seq)"),
    ("8", "blocks kept"): (
        "seq = self.running.pop()\n        self.block_manager.free(seq)",
        "seq = self.running.pop()\n        seq.num_computed_tokens = 0",
    ),
    ("13", "every draft believed"): ("drawn[: num_true + 1]", "drawn"),
    ("13", "the draw at the miss thrown away"): ("drawn[: num_true + 1]", "drawn[:num_true]"),
    ("13", "the first place instead of the latest"): (
        "range(len(token_ids) - 1, 1, -1)",
        "range(2, len(token_ids))",
    ),
    ("13", "drafts in a prompt's middle"): ("if not chunk.samples or num", "if num"),
}


@pytest.mark.parametrize("lesson", [*BY_LETTERS, pytest.param("all", marks=pytest.mark.slow)])
def test_the_solution_is_right(lesson):
    assert failures(RIGHT, lesson) == []


@pytest.mark.parametrize("lesson", [*BY_LETTERS, pytest.param("all", marks=pytest.mark.slow)])
def test_nothing_of_the_stub_is_right_and_it_says_so(lesson):
    found = failures(stub(), lesson)
    assert len(found) == len(CHECKS[lesson])
    assert all("not written yet" in failure for failure in found)


@pytest.mark.parametrize(("lesson", "mistake"), MISTAKES)
def test_a_mistake_is_caught_in_its_lesson_and_in_no_other(lesson, mistake):
    right, wrong = MISTAKES[lesson, mistake]
    assert RIGHT.count(right) == 1
    student = RIGHT.replace(right, wrong)
    assert failures(student, lesson)
    assert not any(failures(student, other) for other in BY_LETTERS if other != lesson)


def test_each_lesson_knows_two_mistakes():
    for lesson in BY_LETTERS:
        assert sum(where == lesson for where, _ in MISTAKES) >= 2


def test_the_command_explains_what_is_wrong(tmp_path, capsys):
    student = tmp_path / "my_mini.py"
    student.write_text(RIGHT.replace("in reversed(seq.block_table)", "in seq.block_table"))
    assert main(["5", str(student)]) == 1
    assert capsys.readouterr().out == (
        "A freed sequence's last block is evicted first: 8 of its 12 letters can still be hit.\n"
        "    Blocks hit: got 0, expected 2.\n"
        "4 of 5 checks pass.\n"
    )


@pytest.mark.parametrize("lesson", BY_LETTERS)
def test_a_check_that_a_lesson_quotes_exists(lesson):
    (page,) = SOLUTION.parent.glob(f"{int(lesson):02}-*.md")
    for quote in re.findall(r'The check should fail at "([^"]+)"', " ".join(page.read_text().split())):
        assert any(quote in sentence for sentence, _ in CHECKS[lesson])


def test_the_help_lists_the_lessons(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(what in printed for what in LESSONS.values())
