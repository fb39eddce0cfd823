"""Writes the report of `benchmarks.gpu`: expected and measured figures side by side."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import TRICKS_HEAD, compare_tricks, hardware, versions_of
from nanoengine.cli.terminal import table

# Measured output tokens per second on an H200; None: nobody has measured it.
EXPECTED = {"triton": 24_500, "flash": 22_300, "varlen": None, "vllm": None, "nano-vllm": 19_000}


def load(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the result of each piece that has run."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def write_report(directory: Path) -> Path:
    """Write `report.md`, and return its path."""
    found = load(directory)
    sections = {
        "Tests": _tests(found.get("tests", {})),
        "Served: nano-vllm's benchmark": _served(found),
        "The gain from each part": _gains(found),
        "Attention of a layer, ms": _attention(found.get("attention", {})),
    }
    lines = ["# On a GPU: what was measured", *_about(found.values())]
    for title, text in sections.items():
        lines += [f"## {title}", text]
    path = directory / "report.md"
    path.write_text("\n\n".join(lines) + "\n")
    return path


def _about(pieces: Iterable[dict[str, Any]]) -> list[str]:
    """Name the machines, and the versions of the engines."""
    reports = [piece for piece in pieces if "models" in piece]
    engines: dict[str, str] = {}
    for report in reports:
        for result in report["models"]:
            engines |= {engine: versions_of(about) for engine, about in result["engines"].items()}
    places = dict.fromkeys(hardware(report["machine"]) for report in reports)
    return [*places, "\n".join(f"- {name}: {text}" for name, text in engines.items())]


def _missing(piece: dict[str, Any]) -> str:
    return f"Not measured: {piece['error']}" if "error" in piece else "" if piece else "Not run."


def _tests(piece: dict[str, Any]) -> str:
    return _missing(piece) or "\n".join([piece["summary"], "", *(f"    {note}" for note in piece["notes"])])


def _served(found: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name in (*EXPECTED, "transformers"):
        piece, expected = found.get(name, {"error": "not run"}), EXPECTED.get(name)
        row = piece if "error" in piece else piece["models"][0]["results"][0]
        figures = [row.get("error"), "-", "-", "-"]
        if "error" not in row:
            rate = row["output_tokens_per_s"]["median"]
            peak, share = row["cuda_peak_bytes"] or 0, row["roofline_share"]
            figures = [f"{rate:,.0f}", f"{rate / expected:.2f}" if expected else "-"]
            figures += [f"{share:.0%}" if share else "-", f"{peak / 2**30:.1f}"]
        lines.append([name, f"{expected:,}" if expected else "-", *figures])
    head = "engine", "expected tokens/s (H200)", "measured", "of expected", "of roofline", "peak GiB"
    return table(head, lines)


def _gains(found: dict[str, dict[str, Any]]) -> str:
    pieces = {name: piece for name, piece in found.items() if name.startswith("without-")}
    lines = [[name, "", piece["error"], ""] for name, piece in pieces.items() if "error" in piece]
    for piece in pieces.values():
        if "error" not in piece:
            lines += compare_tricks(piece)
    return table(TRICKS_HEAD, lines)


def _attention(piece: dict[str, Any]) -> str:
    if missing := _missing(piece):
        return missing
    names = list(dict.fromkeys(name for times in piece.values() for name in times if name != "error"))
    rows = []
    for backend, times in piece.items():
        figures = [f"{times[name]:.3f}" if name in times else "" for name in names]
        rows.append([backend, *figures, times.get("error", "")])
    return table(("", *names, "why not"), rows)
