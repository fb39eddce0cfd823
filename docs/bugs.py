"""Plants a bug of docs/bugs.md in the engine, in memory, and shows what it does.

    python -m docs.bugs                                     list the bugs
    python -m docs.bugs 3                                   run the lines of bug 3 with the bug
    python -m docs.bugs 3 tests/test_scheduler.py -x        run pytest with bug 3, on any tests

The files stay as they are: the changed module is compiled from its changed text, for this process alone.
"""

import doctest
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).with_suffix(".md")


class Bug(NamedTuple):
    """Holds one section of the page."""

    number: int
    title: str
    diff: str  # the wrong lines, as a unified diff
    run: str  # the shortest run that shows the bug, as a Python session with the output of the right lines
    symptom: str  # what the first line of the run prints that differs with the bug, or the error it raises
    tests: list[str]  # tests that fail with the bug
    ledgers: list[str]  # random walks of tests/test_scheduling_machine.py that fail with the bug


def read_page() -> list[Bug]:
    """Return the bugs of the page, in order."""
    setup, *sections = re.split(r"^## (?=\d+\. )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)

    def blocks(text: str, language: str) -> str:
        found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        return "".join(found)

    bugs = []
    for section in sections:
        number, title = section.partition("\n")[0].split(". ", 1)
        run = blocks(setup, "python") + blocks(section, "python")
        tests = ["tests/" + name for name in re.findall(r"`([\w/]+\.py::\w+)`", section)]
        ledgers = re.findall(r"`(\w+Machine)`", section)
        bugs.append(
            Bug(int(number), title, blocks(section, "diff"), run, blocks(section, "text"), tests, ledgers)
        )
    return bugs


# ---- Planting ------------------------------------------------------------------------------------


def apply(diff: str) -> tuple[str, str]:
    """Return the name of the module that a diff changes, and the module's changed text.

    Hunks are found by their lines: the page has no line numbers, which any change to the file would move.
    """
    name = re.findall(r"^\+\+\+ b/(\S+)$", diff, re.MULTILINE)[0]
    text = (ROOT / name).read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} places in {name} match this hunk; it must be one:\n{old}")
        text = text.replace(old, new)
    return name.removesuffix(".py").replace("/", "."), text


class _Loader(SourceFileLoader):
    """Loads a module from changed text, and never from or into the bytecode cache."""

    text = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == self.name else None
        if spec is not None and spec.origin is not None:
            spec.loader = loader = _Loader(fullname, spec.origin)
            loader.text = self.text
        return spec


@contextmanager
def planted(diff: str) -> Iterator[None]:
    """Import the package again within this block, with the bug. Afterwards all modules are as before."""

    def take() -> dict[str, ModuleType]:
        ours = [name for name in sys.modules if name.split(".")[0] in ("nanoengine", "docs", "tests")]
        return {name: sys.modules.pop(name) for name in ours}

    finder, before = _Finder(*apply(diff)), take()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        take()
        sys.modules.update(before)


# ---- Running -------------------------------------------------------------------------------------


class _Runner(doctest.DocTestRunner):
    """Records what the first differing example printed, or the error that it raised."""

    def __init__(self) -> None:
        super().__init__(verbose=False, optionflags=doctest.FAIL_FAST)
        self.line = self.symptom = ""

    def report_failure(self, out: Any, test: Any, example: doctest.Example, got: str) -> None:
        self.line, self.symptom = example.source, got

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        kind, error, _ = exc_info
        self.line, self.symptom = example.source, f"{kind.__name__}: {error}".rstrip(": ") + "\n"


def run(session: str) -> tuple[str, str]:
    """Run a Python session. Returns its first line that differs, and what that line did; else "", ""."""
    runner = _Runner()
    runner.run(doctest.DocTestParser().get_doctest(session, {}, "run", None, None), out=lambda text: None)
    return runner.line, runner.symptom


def main(arguments: list[str]) -> int:
    """Run the command line. Returns the exit status."""
    bugs = {str(bug.number): bug for bug in read_page()}
    if not arguments:
        print(*(f"{bug.number:2}  {bug.title}" for bug in bugs.values()), sep="\n")
        return 0
    if arguments[0] not in bugs:
        print(f"no bug {arguments[0]!r}: the bugs are 1 to {len(bugs)}", file=sys.stderr)
        return 2
    bug = bugs[arguments[0]]
    if arguments[1:]:
        import pytest

        with planted(bug.diff):
            return int(pytest.main(arguments[1:]))
    with planted(bug.diff):
        line, symptom = run(bug.run)
    shown = line.replace("\n", "\n... ", line.count("\n") - 1)
    print(f"{bug.number}. {bug.title}\n\n{bug.diff}\n>>> {shown}{symptom}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
