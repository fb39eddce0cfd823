"""Writes the report of `benchmarks.gpu`: expected and measured figures side by side."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Output tokens per second on an H200, estimated before this ran on a GPU. Reading the cache takes 4.1 s,
# weights, kernels and sampling take 1.2 ms in each of 1,024 steps, and the prompts take 0.4 s.
EXPECTED = {"flash": 23_000, "varlen": 21_900, "triton": 17_300, "vllm": 26_000, "nano-vllm": 19_000}
COMPARED = (
    "flash",
    "varlen",
    "triton",
    "vllm",
    "nano-vllm",
    "transformers-cb",
    "transformers",
    "varlen-without-graphs",
    "triton-without-graphs",
    "vllm-eager",
    "nano-vllm-eager",
)
ABLATED = ("flash", "without-graphs", "without-fusion", "without-async", "without-prefix-cache")


def load(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the result of each piece that has run."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [list(map(str, row)) for row in rows]
    columns = list(head)
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *lines)]


def write_report(directory: Path) -> Path:
    """Write `report.md`, and its plots if there is something to draw. Returns its path."""
    found = load(directory)
    lines = ["# On a GPU: what was measured", "", *_about(found.get("about", {}))]
    lines += ["", "## Tests", "", *_tests(found.get("tests"))]
    lines += ["", "## Served: nano-vllm's benchmark", "", *_served(found)]
    lines += ["", "## What each part is good for", "", *_ablation(found)]
    for piece, part, title in (
        ("attention", "backends", "Attention of a layer, ms"),
        ("attention", "tiles", "Triton with each row of its table of tiles, ms"),
    ):
        lines += ["", f"## {title}", "", *_times(found.get(piece), part)]
    lines += ["", "## Decode steps under a profiler", "", *_profile(found.get("profile"))]
    if plots := _draw(found, directory):
        lines += ["", *(f"![{name}]({name})" for name in plots)]
    path = directory / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _missing(piece: dict[str, Any] | None) -> list[str]:
    return ["Not run."] if piece is None else [f"Not measured: {piece['error']}"]


def _about(piece: dict[str, Any]) -> list[str]:
    if "machine" not in piece:
        return ["The machine is not recorded: `python -m benchmarks.gpu about`."]
    place = piece["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in piece["versions"].items())
    return [f"{place['gpu'] or place['cpu']}, {place['cores']} cores; {versions}."]


def _tests(piece: dict[str, Any] | None) -> list[str]:
    if piece is None or "error" in piece:
        return _missing(piece)
    return [piece["summary"], *(["", "```", *piece["told"], "```"] if piece["told"] else [])]


def _rate(piece: dict[str, Any]) -> str:
    return piece["error"] if "error" in piece else f"{piece['output_tokens_per_s']:,.0f}"


def _served(found: dict[str, dict[str, Any]]) -> list[str]:
    def row(name: str) -> list[str]:
        piece, expected = found.get(name, {"error": "not run"}), EXPECTED.get(name)
        share = f"{piece['output_tokens_per_s'] / expected:.2f}" if expected and "error" not in piece else "-"
        peak = piece.get("cuda_peak_bytes")
        memory = f"{peak / 2**30:.1f}" if peak else "-"
        return [name, f"{expected:,}" if expected else "-", _rate(piece), share, memory]

    head = "engine", "expected tokens/s (H200)", "measured", "of expected", "peak GiB"
    return table(head, map(row, COMPARED))


def _ablation(found: dict[str, dict[str, Any]]) -> list[str]:
    whole = found.get("flash", {}).get("output_tokens_per_s")

    def row(name: str) -> list[str]:
        piece = found.get(name, {"error": "not run"})
        share = f"{piece['output_tokens_per_s'] / whole:.2f}" if whole and "error" not in piece else "-"
        return ["all of it" if name == "flash" else name.replace("-", " "), _rate(piece), share]

    return table(("nanoengine", "output tokens/s", "of all of it"), map(row, ABLATED))


def _times(piece: dict[str, Any] | None, part: str) -> list[str]:
    if piece is None or "error" in piece:
        return _missing(piece)
    names = list(dict.fromkeys(name for times in piece[part].values() for name in times if name != "error"))

    def row(kind: str, times: dict[str, Any]) -> list[str]:
        if "error" in times:
            return [kind, times["error"], *[""] * (len(names) - 1)]
        return [kind, *(f"{times[name]:.3f}" for name in names)]

    return table(("", *(names or ["-"])), (row(kind, times) for kind, times in piece[part].items()))


def _profile(piece: dict[str, Any] | None) -> list[str]:
    if piece is None or "error" in piece:
        return _missing(piece)
    steps = {name: step for name, step in piece.items() if isinstance(step, dict)}
    rows = ((name, f"{step['ms_per_step']:.2f}", f"{step['busy']:.0%}") for name, step in steps.items())
    lines = table(("steps", "ms", "of it the GPU is busy (expected: more than 95 %)"), rows)
    for name, step in steps.items():
        spent = ((f"`{kernel}`", f"{ms:.3f}") for kernel, ms in step["kernels_ms_per_step"].items())
        lines += ["", *table((f"kernel, {name}", "ms a step"), spent)]
    return lines


def _draw(found: dict[str, dict[str, Any]], directory: Path) -> list[str]:
    """Draw the engines' expected and measured rates as bars. Without matplotlib or results, draw nothing."""
    served = [name for name in (*COMPARED, *ABLATED[1:]) if "output_tokens_per_s" in found.get(name, {})]
    rates: dict[str, float] = {name: found[name]["output_tokens_per_s"] for name in served}
    try:
        import matplotlib
    except ImportError:
        return []
    if not rates:
        return []
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(rates) + 1.2), layout="constrained")
    names = list(rates)[::-1]
    axes.barh(names, [rates[name] for name in names], label="measured")
    known = [name for name in names if name in EXPECTED]
    axes.plot([EXPECTED[name] for name in known], known, "k|", markersize=14, label="expected on an H200")
    axes.set(xlabel="output tokens/s")
    axes.legend()
    figure.savefig(directory / "served.png", dpi=120)
    pyplot.close(figure)
    return ["served.png"]
