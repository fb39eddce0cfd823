"""Switches off each of nanoengine's tricks, to measure its gain.

A setting of the engine does so if there is one. Otherwise a function here patches the engine in its process.
Some tricks depend on others: without compiled kernels, no weights are packed for them, and no layer is a
single call. Import only the standard library at the top: `engines.py` imports this file.
"""

import mmap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

WITHOUT = "nanoengine without "  # prefix of an engine's name, before the trick's name


def _plain_weights() -> None:
    from nanoengine.backends.cpu import packed_layers

    packed_layers.pack_linear = lambda layer, *_: layer


def _small_pages() -> None:
    del mmap.MADV_HUGEPAGE  # without this constant, the engine does not request large pages


def _unpopulated() -> None:
    from nanoengine.backends.cpu.cpu_device import CPU

    del CPU.capture  # the base class's captures nothing


def _calls_per_layer() -> None:
    from nanoengine.backends.cpu import packed_layers

    packed_layers.CompiledLayer.can_hold = staticmethod(lambda layer: False)  # type: ignore[method-assign]


def _no_graphs() -> None:
    from nanoengine.backends.cuda import CUDA

    del CUDA.capture  # the base class's captures nothing


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
    "populated memory": Trick(("cpu",), switch_off=_unpopulated),
    "pinned threads": Trick(("cpu",), {"pin_threads": False}),
    "inexact sums": Trick(("cpu",), {"batch_invariant": True}),  # docs/guide/bits.md
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
