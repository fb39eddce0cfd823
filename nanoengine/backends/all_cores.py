"""Loads weights on all cores: each core has a thread that reads and packs whole weights."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from nanoengine.steps import bar

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_all_cores(what: str, function: Callable[[Item], Result], items: Collection[Item]) -> list[Result]:
    """Return the function of each item, computed in as many threads as PyTorch has, with a progress bar.

    Each thread runs its operators alone. Loading is a sequence of short operators. If each were divided
    among all cores, each would end with a barrier, which lasts a scheduler tick when a core is busy.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return [function(item) for item in bar(what, items)]
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = pool.map(torch.no_grad()(function), items)  # the mode is a thread's own
            return list(bar(what, results, len(items)))
    finally:
        torch.set_num_threads(num_threads)  # it is also the default of new threads
