"""Measures the gain from each of nanoengine's tricks: the same requests with and without it, in turns.

A setting of the engine switches a trick off if there is one. Otherwise a function here patches the engine in
its process. Some tricks depend on others: without compiled kernels, no weights are packed for them, and no
layer is a single call. Import only the standard library at the top: `engines.py` imports this file.
"""

import mmap
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

WITHOUT = "nanoengine without "  # prefix of an engine's name, before the trick's name


def _plain_weights() -> None:
    from nanoengine.backends.cpu import packed

    packed.pack_linear = lambda layer, *_: layer


def _small_pages() -> None:
    del mmap.MADV_HUGEPAGE  # without this constant, the engine does not request large pages


def _calls_per_layer() -> None:
    from nanoengine.backends.cpu import packed

    packed.CompiledLayer.can_hold = staticmethod(lambda layer: False)  # type: ignore[method-assign]


def _no_graphs() -> None:
    from nanoengine.backends import cuda, device

    cuda.CUDA.capture = device.Device.capture  # type: ignore[method-assign]


def _no_fusion() -> None:
    from nanoengine.backends import cuda

    cuda.fusion_obstacle = lambda device: "switched off"


class Trick(NamedTuple):
    """Says how to switch off one trick."""

    devices: tuple[str, ...]  # the devices that have the trick
    settings: Mapping[str, Any] = MappingProxyType({})  # engine settings that switch it off
    switch_off: Callable[[], None] = lambda: None  # called before the engine is made


TRICKS = {
    "prefix caching": Trick(("cpu", "cuda"), {"enable_prefix_caching": False}),
    "chunks": Trick(("cpu", "cuda"), {"max_num_batched_tokens": 1 << 14}),  # whole prompts in one step
    "compiled kernels": Trick(("cpu",), {"enforce_eager": True}),
    "packed weights": Trick(("cpu",), switch_off=_plain_weights),
    "one call per layer": Trick(("cpu",), switch_off=_calls_per_layer),
    "large pages": Trick(("cpu",), switch_off=_small_pages),
    "pinned threads": Trick(("cpu",), {"pin_threads": False}),
    "graphs": Trick(("cuda",), switch_off=_no_graphs),
    "fusion": Trick(("cuda",), switch_off=_no_fusion),
    "async scheduling": Trick(("cuda",), {"async_scheduling": False}),
}


def settings_of(engine: str) -> dict[str, Any]:
    """Switch off the trick that an engine's name says, in this process. Returns the engine's settings."""
    trick = TRICKS.get(engine.removeprefix(WITHOUT))
    if trick is None:
        return {}
    trick.switch_off()
    return dict(trick.settings)


def compare(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per trick and workload, which compares the engine's row with the next one, without it."""
    rows = []
    for result in report["models"]:
        of_engine: dict[str, Any] = {}
        for row in result["results"]:
            if not row["engine"].startswith(WITHOUT):
                of_engine[row["workload"]] = row
                continue
            before = of_engine[row["workload"]]
            compared = {"model": result["model"], "workload": row["workload"]}
            compared["trick"] = row["engine"].removeprefix(WITHOUT)
            if error := row.get("error") or before.get("error"):
                rows.append(compared | {"error": error})
                continue
            speeds = [each["runs_tokens_per_s"] for each in (before, row)]
            ratios = [with_it / without for with_it, without in zip(*speeds, strict=True)]
            rows.append(
                compared
                | {"with": statistics.median(speeds[0]), "without": statistics.median(speeds[1])}
                | {"gain": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table of the gain from each trick, by the ratio of each pair of runs."""
    print("\n| without | workload | output tokens/s with, without | gain (min to max of the pairs) |")
    print("|---|---|---|---|")
    for row in rows:
        start = f"| {row['trick']} | {row['workload']} |"
        if "error" in row:
            print(start, f"{row['error']} | |")
            continue
        speeds = f"{row['with']:.1f}, {row['without']:.1f}"
        print(start, f"{speeds} | {row['gain']:.2f} ({row['least']:.2f} to {row['most']:.2f}) |")


def draw(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Draw a bar per trick and workload: the speedup from the trick, and the spread of the pairs."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "error" not in row]
    tricks = list(dict.fromkeys(row["trick"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    height = 0.8 / max(1, len(workloads))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.7 * len(tricks)), layout="constrained")
    for row in rows:
        number = workloads.index(row["workload"])
        place = tricks.index(row["trick"]) + (number - (len(workloads) - 1) / 2) * height
        spread = [[row["gain"] - row["least"]], [row["most"] - row["gain"]]]
        is_first = row["trick"] == tricks[0]
        label = row["workload"] if is_first else None
        axes.barh(place, row["gain"], height * 0.9, color=f"C{number}", label=label, xerr=spread, capsize=3)
        axes.annotate(f" {row['gain']:.2f}", (row["most"], place), va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(tricks)), tricks)
    axes.invert_yaxis()
    axes.set(xlabel="times as fast with it; the line over a bar spans the pairs of runs", xlim=(0, None))
    axes.set_title(f"nanoengine with and without each trick\n{title}", fontsize=10, loc="left")
    axes.margins(x=0.12)
    axes.legend(title="workload")
    figure.savefig(path, dpi=150)
