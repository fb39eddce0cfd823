"""Prints reports as tables, for a terminal or in Markdown, and draws plots."""

import itertools
import math
import sys
from typing import Any

from benchmarks.compare import LATENCIES
from nanoengine.apps.workloads import SWEEP


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
        values = row[f"{name}_ms"]
        labels[f"{name.upper()} p50 / p90 / p99, ms"] = (
            " / ".join(f"{v:.1f}" for v in values) if values else "-"
        )
    labels |= {
        "steps": text("steps", ".0f"),
        "sequences a step, mean / most": f"{text('batch_mean', '.1f')} / {text('batch_max', '.0f')}",
        "prefix hits": text("prefix_hit_rate", ".0%"),
        "preemptions": text("preemptions", ".0f"),
        "peak KV use": text("peak_kv_usage", ".0%"),
        "peak memory, GiB": text("peak_rss_bytes", ".2f", 2**-30),
        "peak CUDA memory, GiB": text("cuda_peak_bytes", ".2f", 2**-30),
    }
    phases: dict[str, float] = row["phases_s"] or {}
    for name in ("schedule", "inputs", "forward", "sample", "update", "rest"):
        labels[f"time in {name}"] = f"{phases[name] / sum(phases.values()):.1%}" if phases else "-"
    return labels


def print_tables(report: dict[str, Any]) -> None:
    """Print each model's tables, one per workload and rate, then the engines' versions and the limits."""
    for result in report["models"]:
        _print_tables(result)
    print(hardware(report["machine"]))


def hardware(place: dict[str, Any]) -> str:
    """Describe the machine in one line."""
    processor = place["gpu"] or f"{place['cpu']}, {place['instructions']}"
    return f"{processor}, {place['cores']} cores, {place['memory_gib']} GiB"


def _print_tables(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    for (workload, rate), group in itertools.groupby(
        result["results"], lambda row: (row["workload"], row["rate"])
    ):
        rows = list(group)
        load = "" if rate is None else f", {rate:g} requests a second"
        table = Table("", *(row["engine"] for row in rows), title=f"{workload}{load}, {result['model']}")
        columns = [{} if "error" in row else cells(row) for row in rows]
        errors = [row.get("error", "") for row in rows]
        for label in next((column for column in columns if column), {}):
            table.add_row(label, *(column.get(label, "") for column in columns))
        if any(errors):
            table.add_row("not measured", *errors)
        console.print(table)
    for engine, about in result["engines"].items():
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        console.print(f"{engine}: {about['error'] or versions}; {about['environment']}")
    limits = result["limits"]
    rates = ", ".join(f"{rate} at {rows} rows" for rows, rate in limits["gemm_gflop_per_s"].items())
    console.print(f"memory: {limits['bandwidth_gb_per_s']} GB/s; matrix products, GFLOP/s: {rates}")
    for workload, tokens in limits["roofline_output_tokens_per_s"].items():
        if tokens is not None:
            console.print(f"roofline of {workload}: {tokens} output tokens/s")


def print_markdown(report: dict[str, Any], command: str) -> None:
    """Print a Markdown table with a row per workload and engine."""
    print("\n| workload | model | engine | output tokens/s (min to max) | of roofline | TTFT p50 | ITL p50 |")
    print("|---|---|---|---|---|---|---|")
    for result in report["models"]:
        for row in result["results"]:
            if row["rate"] is not None:
                continue
            start = f"| {row['workload']} | {result['model']} | {row['engine']} |"
            if "error" in row:
                print(start, f"{row['error']} | | | |")
                continue
            figures = list(cells(row).values())
            medians = [f"{row[name][0]:.0f} ms" if row[name] else "-" for name in ("ttft_ms", "itl_ms")]
            print(start, " | ".join([figures[0], figures[2], *medians]), "|")
    place = report["machine"]
    engines = {engine: about for result in report["models"] for engine, about in result["engines"].items()}
    software = [
        f"{engine} ({', '.join(f'{name} {version}' for name, version in about['versions'].items())})"
        for engine, about in engines.items()
        if about["versions"]
    ]
    settings = f"{place['threads']} threads, {report['dtype']}, runs of each: {report['repeats']}"
    print(f"\n{hardware(place)}; {settings}; {'; '.join(software)}. `{command}`\n")


def describe(report: dict[str, Any]) -> str:
    """Describe the models, the dtype and the machine in two lines, for the title of a plot."""
    place = report["machine"]
    models = ", ".join(result["model"] for result in report["models"])
    runs = f"{place['threads']} threads, runs of each: {report['repeats']}"
    return f"{models}, {report['dtype']}, {runs}\n{hardware(place)}"


def draw(report: dict[str, Any], path: str) -> None:
    """Draw throughput against batch size, and where nanoengine's time goes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    figure.suptitle(describe(report), fontsize=10)
    for result in report["models"]:
        for engine, speeds in result["sweep"].items():
            label = f"{engine}, {result['model']}"
            if engine == "roofline":
                left.plot(SWEEP, [speed or math.nan for speed in speeds], "k--", label=label)
                continue
            median, least, most = (
                [speed[name] if speed else math.nan for speed in speeds] for name in ("median", "min", "max")
            )
            spread = [[m - low for m, low in zip(median, least, strict=True)]]
            spread += [[high - m for m, high in zip(median, most, strict=True)]]
            left.errorbar(SWEEP, median, spread, fmt="o-", capsize=3, label=label)
        for row in result["results"]:
            phases: dict[str, float] = (row["rate"] is None and row.get("phases_s")) or {}
            start = 0.0
            for number, (phase, seconds) in enumerate(phases.items()):
                share = seconds / sum(phases.values())
                place = f"{row['workload']}\n{row['engine']}"
                right.barh(place, share, left=start, color=f"C{number}", label=phase)
                start += share
    left.set_title("output tokens/s: the median, and the spread of the runs", fontsize=11)
    left.set(xlabel="sequences, 32 tokens in and 32 out", xscale="log", yscale="log")
    left.set_xticks(SWEEP, [str(size) for size in SWEEP])
    left.set_xticks([], minor=True)
    # Plain numbers instead of powers of ten.
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    left.tick_params(axis="y", which="both", labelsize=8)
    left.grid(alpha=0.3)
    left.legend()
    right.set(xlabel="share of the time", xlim=(0, 1))
    right.margins(y=0.5)  # so that a single bar does not fill the figure
    handles, labels = right.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    right.set_title("where the time goes", fontsize=11)
    right.legend(unique.values(), unique.keys(), loc="upper center", ncols=6, bbox_to_anchor=(0.4, -0.1))
    figure.savefig(path, dpi=150)
