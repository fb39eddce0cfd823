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
DRIVER = Path(__file__).parent / "neon.cpp"
called: set[str] = set()


class Emulated(NamedTuple):
    """Runs the kernels in a process of its own, until this process ends."""

    process: subprocess.Popen[bytes]
    exported: set[str]  # the names of its functions
    directory: tempfile.TemporaryDirectory[str]  # of its program, gone with it


@functools.cache
def start(int8_cache: bool = False, exact: bool = False) -> Emulated:
    """Compile and start it."""
    directory = tempfile.TemporaryDirectory()
    flags = [flag for flag in build.FLAGS.split() if flag not in ("-march=native", "-shared", "-fPIC")]
    flags += ["-DEXACT"] * exact
    includes = [f"-I{build.SOURCE.parent}", f"-I{directory.name}"]
    command = [COMPILER, *flags, f"-march={PROCESSOR}", "-static", *includes, f"-DTYPES={7 + 8 * int8_cache}"]
    source = subprocess.check_output([*command, "-E", "-P", str(build.SOURCE)], text=True)
    exported = set(re.findall(r'extern "C" decltype\([^;]*\) (\w+);', source))
    Path(directory.name, "kernels.inc").write_text("\n".join(f"ENTRY({name})" for name in exported))
    program = f"{directory.name}/neon"
    subprocess.check_call([*command, str(DRIVER), "-o", program])
    process = subprocess.Popen([EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return Emulated(process, exported, directory)


class EmulatedKernels(kernels.Kernels):
    """Forwards each call of a kernel to that process."""

    num_outputs = 16  # four registers of four
    has_one_thread = False
    are_integers_fast = True

    def __init__(
        self, dtype: torch.dtype = torch.float32, int8_cache: bool = False, exact: bool = False
    ) -> None:
        self.process = start(int8_cache, exact).process
        self.was_compiled, self.seconds = False, 0.0
        self.library: Any = SimpleNamespace(_name="in the emulator")

    def serves(self, dtype: torch.dtype) -> bool:
        return f"linear_{str(dtype).removeprefix('torch.')}" in start().exported

    def call(self, name: str, first: Tensor, *arguments: Any) -> None:
        full_name = f"{name}_{str(first.dtype).removeprefix('torch.')}"
        called.add(full_name)
        parts = [struct.pack("=q", len(full_name)), full_name.encode()]
        for argument in (first, *arguments):
            if isinstance(argument, Tensor):
                data = ctypes.string_at(argument.data_ptr(), extent(argument))
                parts += [struct.pack("=q", len(data)), data]
            elif argument is None:
                parts.append(struct.pack("=q", -1))
            else:
                parts.append(struct.pack("=q" if isinstance(argument, int) else "=f", argument))
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(parts))
        self.process.stdin.flush()
        for argument in (first, *arguments):
            if argument is None or isinstance(argument, Tensor):
                (size,) = struct.unpack("=q", self._receive(8))
                if size:
                    assert isinstance(argument, Tensor)
                    ctypes.memmove(argument.data_ptr(), self._receive(size), size)

    def _receive(self, size: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(size)
        assert len(data) == size, f"the emulated process ended with {self.process.wait()}"
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
    # A call of a whole layer hands addresses over. It calls these same functions.
    packed_layers.CompiledLayer.can_hold = staticmethod(lambda layer: False)  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep half of the cases of attention, chosen at random: the emulator is slow."""
    kept = random.Random(0)
    items[:] = [item for item in items if "paged_attention" not in item.nodeid or kept.random() < 0.5]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which kernels the tests called."""
    missed = {name for name in start().exported - called if not name.startswith("decoder_layer")}
    terminalreporter.write_line(f"NEON: {len(called)} kernels called; not called: {sorted(missed)}")
