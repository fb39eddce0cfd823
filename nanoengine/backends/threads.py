"""Decides how many threads compute, and loads weights in all of them, one weight per thread."""

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from nanoengine.backends.host_memory import cpu_quota

Item = TypeVar("Item")
Result = TypeVar("Result")


def limit_threads() -> str:
    """Let PyTorch use no more threads than the CPU quota allows, unless OMP_NUM_THREADS is set.

    A container with a quota of one CPU sees all CPUs. Two threads use up its time in half of each period, and
    wait for the other half: a step took twice as long as with one thread. Returns a note for the user, or "".
    """
    quota = cpu_quota()
    if os.environ.get("OMP_NUM_THREADS") or quota >= (os.cpu_count() or 1):
        return ""
    torch.set_num_threads(min(torch.get_num_threads(), max(1, int(quota))))
    num_threads = torch.get_num_threads()
    return f"{num_threads} thread{'s' * (num_threads > 1)} for a CPU quota of {quota:.3g}"


def on_all_cores(what: str, function: Callable[[Item], Result], items: Collection[Item]) -> list[Result]:
    """Return the function of each item, computed in as many threads as PyTorch has, with a progress bar.

    Each thread runs its operators alone. Loading is a sequence of short operators. If each were divided
    among all cores, each would end with a barrier, which lasts a scheduler tick when a core is busy.
    """
    num_threads = torch.get_num_threads()
    # The bar is shown on a terminal, after a second.
    bar: Any = partial(tqdm, desc=what, total=len(items), delay=1, leave=False, disable=None)
    if num_threads == 1:
        return [function(item) for item in bar(items)]
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = pool.map(torch.no_grad()(function), items)  # the mode is a thread's own
            return list(bar(results))
    finally:
        torch.set_num_threads(num_threads)  # it is also the default of new threads
