"""Prints reports as Markdown tables."""

import itertools
import statistics
from typing import Any

from benchmarks.ablation import WITHOUT
from benchmarks.compare import LATENCIES
from nanoengine.cli.terminal import table


def pair_ratios(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the median ratio of the pairs of runs that two engines had in turns, the least and the most."""
    pairs = zip(row["runs_tokens_per_s"], other["runs_tokens_per_s"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def cells(row: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    """Return a result's figures as text, by label, some beside those of the `first` engine."""

    def text(name: str, form: str, scale: float = 1.0) -> str:
        return "-" if row.get(name) is None else format(row[name] * scale, form)

    def spread(name: str) -> str:
        return "{median:.1f} ({min:.1f} to {max:.1f})".format(**row[name])

    labels = {
        "output tokens/s (min to max)": spread("output_tokens_per_s"),
        "total tokens/s (min to max)": spread("total_tokens_per_s"),
        f"times {first['engine']}'s": pair_ratios(row, first),
        "share of the roofline": text("roofline_share", ".0%"),
        "GB/s of weights, one sequence": text("gb_per_s", ".1f"),
    }
    for name in LATENCIES:
        percentiles = " / ".join(f"{value:.1f}" for value in row[f"{name}_ms"] or ())
        labels[f"{name.upper()} p50 / p90 / p99, ms"] = percentiles or "-"
    labels |= {
        "steps": text("steps", ".0f"),
        "prefix hits": text("prefix_hit_rate", ".0%"),
        "preemptions": text("preemptions", ".0f"),
        "peak CUDA memory, GiB": text("cuda_peak_bytes", ".2f", 2**-30),
    }
    phases: dict[str, float] = row["phases_s"] or {}
    return labels | {f"time in {name}": f"{phases[name] / sum(phases.values()):.1%}" for name in phases}


def hardware(place: dict[str, Any]) -> str:
    """Describe the machine in one line."""
    processor = place["gpu"] or f"{place['cpu']}, {place['instructions']}"
    return f"{processor}, {place['cores']} cores, {place['memory_gib']} GiB"


def versions_of(about: dict[str, Any]) -> str:
    """List an engine's versions."""
    return ", ".join(f"{name} {version}" for name, version in about["versions"].items())


def print_tables(report: dict[str, Any]) -> None:
    """Print each model's tables, one per workload, then the engines' versions and the limits."""
    for result in report["models"]:
        for workload, group in itertools.groupby(result["results"], lambda row: row["workload"]):
            rows = list(group)
            done = [row for row in rows if "error" not in row]
            columns = {row["engine"]: cells(row, done[0]) if row in done else {} for row in rows}
            labels = dict.fromkeys(itertools.chain(*columns.values()))
            lines = [[label, *(column.get(label, "-") for column in columns.values())] for label in labels]
            print(f"\n{result['model']}, {workload}\n\n{table(('', *columns), lines)}\n")
        for row in result["results"]:
            if "error" in row:
                print(f"{row['engine']}, {row['workload']}: not measured, {row['error']}")
        for engine, about in result["engines"].items():
            print(f"{engine}: {about['error'] or versions_of(about)}; {about['environment']}")
        limits = result["limits"]
        rates = ", ".join(f"{rate} at {rows} rows" for rows, rate in limits["gemm_gflop_per_s"].items())
        print(f"memory: {limits['bandwidth_gb_per_s']} GB/s; matrix products, GFLOP/s: {rates}")
        ideals = limits["roofline_output_tokens_per_s"].items()
        print("roofline, output tokens/s:", ", ".join(f"{name} {ideal or '-'}" for name, ideal in ideals))
    settings = f"{report['machine']['threads']} threads, {report['dtype']}, runs of each: {report['repeats']}"
    print(f"{hardware(report['machine'])}; {settings}")


def print_tricks(report: dict[str, Any]) -> None:
    """Print a table of the gain from each trick."""
    print(f"\n{table(TRICKS_HEAD, compare_tricks(report))}\n")


TRICKS_HEAD = "without", "workload", "output tokens/s with, without", "gain (min to max of the pairs)"


def compare_tricks(report: dict[str, Any]) -> list[list[str]]:
    """Return a row per trick and workload: an engine, compared with the next one, without the trick."""
    lines = []
    for result in report["models"]:
        with_it: dict[str, Any] = {}
        for row in result["results"]:
            if not row["engine"].startswith(WITHOUT):
                with_it[row["workload"]] = row
                continue
            before = with_it[row["workload"]]
            figures = [row.get("error") or before.get("error"), ""]
            if figures[0] is None:
                medians = [statistics.median(each["runs_tokens_per_s"]) for each in (before, row)]
                figures = [", ".join(f"{median:.1f}" for median in medians), pair_ratios(before, row)]
            lines.append([row["engine"].removeprefix(WITHOUT), row["workload"], *figures])
    return lines
