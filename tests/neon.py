"""A pytest plugin: `kernels.cpp` as a processor with NEON runs it, compiled for it and emulated by qemu.

    python -m pytest -p tests.neon tests/backends/test_paged_attention.py

runs half of its cases with these kernels in place of this machine's, and tells which it did not call.
It needs Debian's g++-aarch64-linux-gnu and qemu-user.
"""

import ctypes
import functools
import os
import random
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nanoengine.backends.cpu import build, cpu_device, kernels, packed_layers

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROCESSOR = os.environ.get("NEON_PROCESSOR", "armv8.2-a+dotprod")  # what the compiler calls it
TYPES = int(os.environ.get("NEON_TYPES", "7"))  # of numbers, as in kernels.cpp
DRIVER = Path(__file__).parent / "neon.cpp"
called: set[str] = set()

# The compiler takes minutes for all kernels, so a program has some, and only attention depends on the cache.
# Of the exact ones tests call only decode_attention.
ATTENTION = "decode_attention", "prefill_attention", "write_kv"
PRODUCTS = "linear", "unpack_rows"  # and pack_integers
LAYER = "decoder_layer"  # calls these same functions, and takes addresses
EXPORTED = re.findall(r"(?m)^EXPORT\((\w+)\)$", build.SOURCE.read_text())
OTHERS = tuple(name for name in EXPORTED if name not in (*ATTENTION, *PRODUCTS, LAYER))


class Emulated(NamedTuple):
    """Runs kernels in a process of its own, until this process ends."""

    process: subprocess.Popen[bytes]
    directory: tempfile.TemporaryDirectory[str]  # of its program, gone with it


def names_of(kernels: tuple[str, ...]) -> set[str]:
    """Return the names that a program with these kernels exports."""
    types = [kind for bit, kind in ((1, "float32"), (2, "bfloat16"), (4, "float16")) if TYPES & bit]
    return {"pack_integers_int8"} | {f"{name}_{kind}" for name in kernels for kind in types}


@functools.cache
def start(kernels: tuple[str, ...], int8_cache: bool, exact: bool) -> Emulated:
    """Compile a program with these kernels, and start it."""
    directory = tempfile.TemporaryDirectory()
    flags = [flag for flag in build.FLAGS.split() if flag not in ("-march=native", "-shared", "-fPIC")]
    flags += [f"-DTYPES={TYPES + 8 * int8_cache}", *["-DEXACT"] * exact]
    includes = [f"-I{directory.name}", f"-I{build.SOURCE.parent}"]
    command = [COMPILER, *flags, f"-march={PROCESSOR}", "-static", *includes]
    others = rf"(?m)^EXPORT\((?!({'|'.join(kernels)})\)).*$"
    Path(directory.name, "kernels.cpp").write_text(re.sub(others, "", build.SOURCE.read_text()))
    entries = "\n".join(f"ENTRY({name})" for name in names_of(kernels))
    Path(directory.name, "kernels.inc").write_text(entries)
    program = f"{directory.name}/neon"
    subprocess.check_call([*command, str(DRIVER), "-o", program])
    process = subprocess.Popen([EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return Emulated(process, directory)


class EmulatedKernels(kernels.Kernels):
    """Forwards each call of a kernel to that process."""

    num_outputs = 16  # four registers of four
    has_one_thread = False
    are_integers_fast = True

    def __init__(
        self, dtype: torch.dtype = torch.float32, int8_cache: bool = False, exact: bool = False
    ) -> None:
        self.of_attention = int8_cache, exact
        self.was_compiled, self.seconds = False, 0.0
        self.library: Any = SimpleNamespace(_name="in the emulator")

    def serves(self, dtype: torch.dtype) -> bool:
        return dtype in kernels.TYPES

    def call(self, name: str, first: Tensor, *arguments: Any) -> None:
        full_name = f"{name}_{str(first.dtype).removeprefix('torch.')}"
        called.add(full_name)
        part = next((part for part in (ATTENTION, OTHERS) if name in part), PRODUCTS)
        int8_cache, exact = self.of_attention if part == ATTENTION else (False, False)
        process = start((name,) if exact else part, int8_cache, exact).process
        parts = [struct.pack("=q", len(full_name)), full_name.encode()]
        for argument in (first, *arguments):
            if isinstance(argument, Tensor):
                data = ctypes.string_at(argument.data_ptr(), extent(argument))
                parts += [struct.pack("=q", len(data)), data]
            elif argument is None:
                parts.append(struct.pack("=q", -1))
            else:
                parts.append(struct.pack("=q" if isinstance(argument, int) else "=f", argument))
        assert process.stdin is not None
        process.stdin.write(b"".join(parts))
        process.stdin.flush()
        for argument in (first, *arguments):
            if argument is None or isinstance(argument, Tensor):
                (size,) = struct.unpack("=q", receive(process, 8))
                if size:
                    assert isinstance(argument, Tensor)
                    ctypes.memmove(argument.data_ptr(), receive(process, size), size)


def receive(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    data = process.stdout.read(size)
    assert len(data) == size, f"the emulated process ended with {process.wait()}"
    return data


def extent(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    steps = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (sum(steps) + 1) * tensor.itemsize


def pytest_configure() -> None:
    """Install the emulated kernels before any test is imported."""
    kernels.Kernels = cpu_device.Kernels = EmulatedKernels  # type: ignore[misc, attr-defined]
    # A call of a whole layer hands addresses over.
    packed_layers.CompiledLayer.can_hold = staticmethod(lambda layer: False)  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep half of the cases of attention, chosen at random: the emulator is slow."""
    kept = random.Random(0)
    items[:] = [item for item in items if "paged_attention" not in item.nodeid or kept.random() < 0.5]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which kernels the tests called."""
    missed = names_of((*ATTENTION, *PRODUCTS, *OTHERS)) - called
    terminalreporter.write_line(f"NEON: {len(called)} kernels called; not called: {sorted(missed)}")
