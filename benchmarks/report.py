"""Prints reports as Markdown tables, and draws plots."""

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.ablation import WITHOUT
from benchmarks.compare import LATENCIES
from nanoengine.apps.workloads import SWEEP


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table, padded so that it can be read in a terminal too.

    >>> print(table(["a", "b"], [[1, "two"]]))
    | a | b   |
    |---|-----|
    | 1 | two |
    """
    lines = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [" | ".join(map(str.ljust, line, widths)) for line in lines]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {padded[0]} |", f"|{rule}|", *(f"| {line} |" for line in padded[1:])])


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Return a result's figures as text, by label. "-" marks figures that the engine does not report."""

    def text(name: str, form: str, scale: float = 1.0) -> str:
        return "-" if row.get(name) is None else format(row[name] * scale, form)

    def spread(name: str) -> str:
        return "{median:.1f} ({min:.1f} to {max:.1f})".format(**row[name])

    labels = {
        "output tokens/s (min to max)": spread("output_tokens_per_s"),
        "total tokens/s (min to max)": spread("total_tokens_per_s"),
        "share of the roofline": text("roofline_share", ".0%"),
    }
    for name in LATENCIES:
        percentiles = " / ".join(f"{value:.1f}" for value in row[f"{name}_ms"] or ())
        labels[f"{name.upper()} p50 / p90 / p99, ms"] = percentiles or "-"
    labels |= {
        "steps": text("steps", ".0f"),
        "sequences a step, mean / max": f"{text('batch_mean', '.1f')} / {text('batch_max', '.0f')}",
        "prefix hits": text("prefix_hit_rate", ".0%"),
        "preemptions": text("preemptions", ".0f"),
        "peak KV use": text("peak_kv_usage", ".0%"),
        "peak memory, GiB": text("peak_rss_bytes", ".2f", 2**-30),
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
    """Print each model's tables, one per workload and rate, then the engines' versions and the limits."""
    for result in report["models"]:
        by_load = itertools.groupby(result["results"], lambda row: (row["workload"], row["rate"]))
        for (workload, rate), rows in by_load:
            load = "" if rate is None else f", {rate:g} requests a second"
            columns = {row["engine"]: {} if "error" in row else cells(row) for row in rows}
            labels = dict.fromkeys(itertools.chain(*columns.values()))
            lines = [[label, *(column.get(label, "-") for column in columns.values())] for label in labels]
            print(f"\n{result['model']}, {workload}{load}\n\n{table(('', *columns), lines)}\n")
        for row in result["results"]:
            if "error" in row:
                print(f"{row['engine']}, {row['workload']}: not measured, {row['error']}")
        for engine, about in result["engines"].items():
            print(f"{engine}: {about['error'] or versions_of(about)}; {about['environment']}")
        limits = result["limits"]
        rates = ", ".join(f"{rate} at {rows} rows" for rows, rate in limits["gemm_gflop_per_s"].items())
        print(f"memory: {limits['bandwidth_gb_per_s']} GB/s; matrix products, GFLOP/s: {rates}")
        for workload, tokens in limits["roofline_output_tokens_per_s"].items():
            if tokens is not None:
                print(f"roofline of {workload}: {tokens} output tokens/s")
    settings = f"{report['machine']['threads']} threads, {report['dtype']}, runs of each: {report['repeats']}"
    print(f"{hardware(report['machine'])}; {settings}")


def compare_tricks(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per trick and workload, which compares the engine's row with the next one, without it."""
    rows = []
    for result in report["models"]:
        with_it: dict[str, Any] = {}
        for row in result["results"]:
            if not row["engine"].startswith(WITHOUT):
                with_it[row["workload"]] = row
                continue
            before = with_it[row["workload"]]
            compared = {"model": result["model"], "workload": row["workload"]}
            compared["trick"] = row["engine"].removeprefix(WITHOUT)
            if error := row.get("error") or before.get("error"):
                rows.append(compared | {"error": error})
                continue
            speeds = [each["runs_tokens_per_s"] for each in (before, row)]
            compared["with"], compared["without"] = map(statistics.median, speeds)
            ratios = [fast / slow for fast, slow in zip(*speeds, strict=True)]
            gains = {"gain": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
            rows.append(compared | gains)
    return rows


def trick_cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table of tricks, whose gain is the ratio of each pair of runs."""
    start = [row["trick"], row["workload"]]
    if "error" in row:
        return [*start, row["error"], ""]
    gain = f"{row['gain']:.2f} ({row['min']:.2f} to {row['max']:.2f})"
    return [*start, f"{row['with']:.1f}, {row['without']:.1f}", gain]


def print_tricks(rows: list[dict[str, Any]]) -> None:
    """Print a table of the gain from each trick."""
    head = "without", "workload", "output tokens/s with, without", "gain (min to max of the pairs)"
    print(f"\n{table(head, map(trick_cells, rows))}\n")


def draw(report: dict[str, Any], path: str) -> None:
    """Draw throughput against batch size, and where nanoengine's time goes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    place = report["machine"]
    models = ", ".join(result["model"] for result in report["models"])
    runs = f"{place['threads']} threads, runs of each: {report['repeats']}"
    figure.suptitle(f"{models}, {report['dtype']}, {runs}\n{hardware(place)}", fontsize=10)
    for result in report["models"]:
        for engine, speeds in result["sweep"].items():
            label = f"{engine}, {result['model']}"
            if engine == "roofline":
                left.plot(SWEEP, [speed or math.nan for speed in speeds], "k--", label=label)
                continue
            median, low, high = (
                [speed[name] if speed else math.nan for speed in speeds] for name in ("median", "min", "max")
            )
            below = [m - at for m, at in zip(median, low, strict=True)]
            above = [at - m for m, at in zip(median, high, strict=True)]
            left.errorbar(SWEEP, median, [below, above], fmt="o-", capsize=3, label=label)
        for row in result["results"]:
            phases: dict[str, float] = (row["rate"] is None and row.get("phases_s")) or {}
            start = 0.0
            for number, (phase, seconds) in enumerate(phases.items()):
                share, name = seconds / sum(phases.values()), f"{row['workload']}\n{row['engine']}"
                right.barh(name, share, left=start, color=f"C{number}", label=phase)
                start += share
    left.set_title("output tokens/s: the median, and the spread of the runs", fontsize=11)
    left.set(xlabel="sequences, 32 tokens in and 32 out", xscale="log", yscale="log")
    left.set_xticks(SWEEP, [str(size) for size in SWEEP])
    left.set_xticks([], minor=True)
    # Plain numbers instead of powers of ten.
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    left.grid(alpha=0.3)
    left.legend()
    right.set(xlabel="share of the time", xlim=(0, 1))
    right.margins(y=0.5)  # so that a single bar does not fill the figure
    handles, labels = right.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    right.set_title("where the time goes", fontsize=11)
    right.legend(unique.values(), unique.keys(), loc="upper center", ncols=6, bbox_to_anchor=(0.4, -0.1))
    figure.savefig(path, dpi=150)
