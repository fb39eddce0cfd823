"""Rules that keep the package small, and its parts independent of each other."""

import ast
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import nanoengine

PACKAGE = Path(nanoengine.__file__).parent
ROOT = PACKAGE.parent
MAX_LINES = {"engine": 900, "nano": 750}
# Modules that the files that a reader begins with do not import.
UNKNOWN_TO_THE_CORE = ("config", "models.", "checkpoints.", "extensions.", "llm", "requests", "assembly")
# Names that say who needs a file, or nothing.
EMPTY_NAMES = {"apps", "contrib", "common", "helpers", "misc", "steps", "tools", "utils"}


def name_of(path: Path) -> str:
    """Return a file's module name within the package, such as "models.load"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return [*ast.walk(ast.parse(path.read_text()))]


def imports_of(path: Path, package: str = "nanoengine") -> set[str]:
    """Return the package's modules that a file imports, anywhere, also for type checkers."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = {name for name in whole if (ROOT / f"{name.replace('.', '/')}.py").is_file()}
            names |= {name if name in modules else str(node.module) for name in whole}
    return {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}


def check_no_circle(edges: Iterable[tuple[str, str]]) -> None:
    """Fail and name the circle, if these arrows have one."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for start, end in edges:
        if start != end:
            sorter.add(start, end)
    sorter.prepare()


def test_there_are_no_circular_imports():
    """Neither files nor folders import each other in a circle."""
    edges = [(name, imported) for name, path in FILES.items() for imported in imports_of(path)]
    assert ("engine", "sampling.sampler") in edges
    check_no_circle(edges)
    check_no_circle((start.partition(".")[0], end.partition(".")[0]) for start, end in edges)


def test_the_core_names_no_setting_no_model_and_no_extension():
    for name in ("engine", "sampling.sampler", "sampling.logprobs", "sampling.penalties", "outputs"):
        imported = imports_of(FILES[name])
        assert not [module for module in imported if module.startswith(UNKNOWN_TO_THE_CORE)], name


def test_the_benchmarks_have_no_circular_imports():
    paths = (ROOT / "benchmarks").glob("*.py")
    check_no_circle((path.stem, imported) for path in paths for imported in imports_of(path, "benchmarks"))


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_no_file_is_longer_than_600_lines_but_the_two_engines():
    long = {name: lines_of([path]) for name, path in FILES.items()}
    assert {name for name, number in long.items() if number > MAX_LINES.get(name, 600)} == set()


def test_the_package_has_at_most_23050_lines():
    assert lines_of(FILES.values()) <= 23_050


def test_the_tests_have_at_most_1_2_times_the_lines_of_the_package():
    assert lines_of((ROOT / "tests").rglob("*.py")) <= 1.2 * lines_of(FILES.values())


def test_each_file_has_a_name_of_its_own_that_says_what_it_does():
    names = [path.stem for path in FILES.values() if path.name != "__init__.py"]
    folders = {path.parent.name for path in FILES.values()}
    assert sorted(set(names)) == sorted(names)
    assert not EMPTY_NAMES & {*names, *folders}


def test_a_public_method_has_a_docstring_or_overrides_one_that_has():
    classes = [node for path in FILES.values() for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    bases = {owner.name: [*map(ast.unparse, owner.bases)] for owner in classes}
    parts = [(owner.name, part) for owner in classes for part in owner.body]
    methods = [x for x in parts if isinstance(x[1], ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = {(owner, x.name) for owner, x in methods if ast.get_docstring(x)}

    def is_documented(owner: str, name: str) -> bool:
        return (owner, name) in documented or any(is_documented(base, name) for base in bases.get(owner, ()))

    public = [(owner, x.name) for owner, x in methods if "_" not in (owner[0], x.name[0])]
    assert [method for method in public if not is_documented(*method)] == []


def test_only_names_that_a_user_passes_are_imported_by_string():
    """Other imports are statements, so that type checkers see what they import."""
    called = {name for name, path in FILES.items() if "import_module" in path.read_text()}
    assert called == {"__init__", "config"}  # the package's public names; "module:Class" in a setting


def test_the_benchmarks_have_at_most_2600_lines():
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "benchmarks").glob("*.py")) <= 2600
