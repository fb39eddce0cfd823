"""Rules that keep the package small, and its parts independent of each other."""

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import nanoengine

PACKAGE = Path(nanoengine.__file__).parent
ROOT = PACKAGE.parent
# The optional ring: these folders and files. contrib/ is the outermost ring, all else is the core.
OPTIONAL = {"apps", "extensions"}
OPTIONAL |= {f"models.{name}" for name in ("eager", "formats", "gguf", "gguf_tokenizer", "hf")}
OPTIONAL |= {f"models.{name}" for name in ("linear", "states")}
OPTIONAL |= {f"backends.{name}" for name in ("cpu", "cuda", "flash", "triton", "triton_linear")}
MAX_LINES = 600
# Files that are longer. Shorten one, and take it out of this list; engine.py stays, at 900 lines.
LONGER = {"engine"}
# Modules that the files that a reader begins with do not import.
UNKNOWN_TO_THE_CORE = ("config", "models.", "extensions.", "apps.", "llm", "requests", "startup")


def name_of(path: Path) -> str:
    """Return a file's module name within the package, such as "models.load"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(path: Path, package: str = "nanoengine", at_once: bool = False) -> set[str]:
    """Return the package's modules that a file imports, anywhere (also for type checkers) or only at once."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in walk_at_once(tree) if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if is_module(name) else str(node.module) for name in whole}
    return {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}


def walk_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the file is imported."""
    for child in ast.iter_child_nodes(node):
        is_later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if not is_later and not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from walk_at_once(child)


def is_module(name: str) -> bool:
    return (ROOT / f"{name.replace('.', '/')}.py").is_file()


def folder_of(name: str) -> str:
    return name.partition(".")[0]


def ring_of(name: str) -> int:
    if folder_of(name) == "contrib":
        return 2
    return int(any(f"{name}.".startswith(f"{optional}.") for optional in OPTIONAL))


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
    check_no_circle((folder_of(start), folder_of(end)) for start, end in edges)


def test_an_inner_ring_imports_an_outer_one_only_inside_functions():
    for name, path in FILES.items():
        for imported in imports_of(path, at_once=True):
            assert ring_of(imported) <= ring_of(name), f"{name} imports {imported}"


def test_nothing_imports_contrib_but_its_own_files_and_tests():
    folders = [PACKAGE, *(ROOT / name for name in ("benchmarks", "docs", "examples", "tests"))]
    paths = [path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "contrib"]
    for path in [*paths, *ROOT.glob("*.py")]:
        imported = imports_of(path) | imports_of(path, "tests")
        assert not [name for name in imported if folder_of(name) == "contrib"], path


def test_the_core_names_no_setting_no_model_and_no_extension():
    for name in ("engine", "sampling.sampler", "sampling.logprobs", "sampling.edits", "outputs"):
        imported = imports_of(FILES[name])
        assert not [module for module in imported if module.startswith(UNKNOWN_TO_THE_CORE)], name


def test_the_benchmarks_have_no_circular_imports():
    paths = (ROOT / "benchmarks").glob("*.py")
    check_no_circle((path.stem, imported) for path in paths for imported in imports_of(path, "benchmarks"))


def test_no_file_is_longer_than_600_lines():
    assert {name for name, path in FILES.items() if len(path.read_text().splitlines()) > MAX_LINES} == LONGER


def test_package_without_contrib_has_fewer_than_16500_lines():
    assert (
        sum(len(path.read_text().splitlines()) for name, path in FILES.items() if ring_of(name) < 2) < 16_500
    )


def test_the_benchmarks_have_at_most_2600_lines():
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "benchmarks").glob("*.py")) <= 2600
