"""Launches of Triton kernels without a GPU: recorded, compiled for a GPU, or executed as PTX."""

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from docs.ptx import Cta, GlobalMemory, Kernel

TYPES = {torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
TYPES |= {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}
# Architecture -> Triton's target, and the shared memory of the smallest GPU of the generation.
TARGETS: dict[str, tuple[tuple[Any, ...], int]] = {
    "sm75": (("cuda", 75, 32), 64 << 10),
    "sm80": (("cuda", 80, 32), 99 << 10),  # of sm86
    "sm89": (("cuda", 89, 32), 99 << 10),
    "sm90": (("cuda", 90, 32), 227 << 10),
    "gfx942": (("hip", "gfx942", 64), 64 << 10),
}
read = functools.lru_cache(2)(Kernel)  # launches of the same kernel follow each other
OPTIONS: list[str] = ["num_stages", "num_warps", "enable_fp_fusion"]
# Patterns of what orders memory in PTX, and what replaces them in a mutant.
MUTATIONS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "no barrier": (r"\tbar\.(warp\.)?sync[^;]*;", lambda match: ""),
    "no fence": (r"\t(fence\.proxy\.async\.shared::cta|wgmma\.fence\.sync\.aligned);", lambda match: ""),
    "a group too few": (r"(\.wait_group\S*\s+)(\d)", lambda match: f"{match[1]}{int(match[2]) + 1}"),
}


def obstacle() -> str | None:
    """Return why kernels cannot be executed as PTX. Triton 3.5 leaves out a fence before wgmma."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "what is interpreted is not compiled"
    release = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    return None if release >= (3, 7) else "Triton is older than 3.7"


class Recorder:
    """A kernel whose launches are kept: the arguments by name, the options, and the grid."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[dict[str, Any], dict[str, int], tuple[int, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            named = dict(zip(self.kernel.arg_names, args, strict=False), **kwargs)
            self.launch(named, options, grid)

        return launch

    def launch(self, named: dict[str, Any], options: dict[str, int], grid: tuple[int, ...]) -> None:
        self.launches.append((named, options, grid))


def compile_launch(kernel: Any, named: dict[str, Any], options: dict[str, int], generation: str) -> Any:
    """Compile a kernel for a launch as Triton does on a GPU of the generation."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constant = {param.name for param in kernel.params if param.is_constexpr}
    constants = {name: x for name, x in named.items() if name in constant or x is None}
    kinds = {float: "fp32", int: "i32"}
    signature = {
        name: TYPES[x.dtype] if isinstance(x, torch.Tensor) else kinds.get(type(x))
        for name, x in named.items()
    }
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (param.num,): [["tt.divisibility", 16]]
        for param in kernel.params
        if param.name not in constants
        and (
            not param.do_not_specialize_on_alignment
            if isinstance(x := named[param.name], torch.Tensor)
            else type(x) is int and x % 16 == 0 and not param.do_not_specialize
        )
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return compile(source, target=GPUTarget(*TARGETS[generation][0]), options=options)


class Emulated(Recorder):
    """A kernel that is compiled for a generation of GPUs and executed as PTX, after `edit` has changed it."""

    def __init__(self, kernel: Any, generation: str, edit: Callable[..., str] | None = None) -> None:
        super().__init__(kernel)
        self.generation, self.edit = generation, edit

    def launch(self, named: dict[str, Any], options: dict[str, int], grid: tuple[int, ...]) -> None:
        super().launch(named, options, grid)
        ctas, memory = self.ctas(named, options, grid)
        for cta in ctas:
            cta.run()
        memory.copy_back()

    def ctas(
        self, named: dict[str, Any], options: dict[str, int], grid: tuple[int, ...]
    ) -> tuple[Iterator[Cta], GlobalMemory]:
        """Return the programs of a launch, none of which has started, and the memory that they share."""
        compiled = compile_launch(self.kernel, named, options, self.generation)
        ptx = compiled.asm["ptx"]
        kernel = read(self.edit(ptx, named) if self.edit else ptx, compiled.metadata.shared)
        params = {param.name: param for param in self.kernel.params}
        memory = GlobalMemory(
            (x, not params[name].do_not_specialize_on_alignment)
            for name, x in named.items()
            if isinstance(x, torch.Tensor)
        )
        addresses = iter(memory.addresses)
        values = ((name, x) for name, x in named.items() if x is not None and not params[name].is_constexpr)
        kinds: dict[type, Any] = {float: np.float32, int: np.int32}
        arguments = [next(addresses) if isinstance(x, torch.Tensor) else kinds[type(x)](x) for _, x in values]
        x, y, z = shape = (*grid, 1, 1)[:3]
        indices = ((i, j, k) for k in range(z) for j in range(y) for i in range(x))
        return (Cta(kernel, memory, arguments, index, shape) for index in indices), memory
