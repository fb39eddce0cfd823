"""Checks and times a matrix in 4 bits times a row, written in C++.

    python -m docs.matvec --stub > my_matvec.cpp    write the file that you fill in
    python -m docs.matvec my_matvec.cpp             check and time your kernel

Without an argument, the command checks docs/matvec.cpp, the solution.
"""

import ctypes
import faulthandler
import multiprocessing
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from docs.exercises import multiply, pack, quantize, unpack
from nanoengine.backends.cpu.build import FLAGS
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.packing import Form
from nanoengine.backends.quantization import Quantized

SOLUTION = Path(__file__).with_name("matvec.cpp")
AT_LEAST = 2.5  # times as fast as NumPy with the same packed weights. Two plain loops reach 1.3.


def stub() -> str:
    """Return docs/matvec.cpp without the body of its function."""
    source = SOLUTION.read_text()
    signature = source[: source.index(") {\n") + len(") {\n")]
    return signature + "    // Write out[n] for each n in [0, num_outputs).\n}\n"


def compile_kernel(source: Path, folder: str) -> ctypes.CDLL:
    """Compile the file as nanoengine's kernels are compiled.

    Raises:
        RuntimeError: there is no compiler, or the file does not compile.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: install g++ or clang++")
    library = Path(folder) / "matvec.so"
    command = [compiler, *FLAGS.split(), str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return ctypes.CDLL(str(library))


def call(library: ctypes.CDLL, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return x (I,) times the packed weight: (N,)."""
    out = torch.full((len(packed),), float("nan"))
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, x, packed, scales, zeros))
    sizes = len(packed), len(x), len(x) // scales.shape[1]
    library.matvec(*pointers, *map(ctypes.c_int64, sizes))
    return out


def check(source: Path) -> None:
    """Compare the kernel with `multiply` of docs/exercises.py, and print its speed beside two others.

    Raises:
        AssertionError: a result is wrong, or the kernel is slow.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        library = compile_kernel(source, folder)
        for num_outputs, num_inputs, group_size in (1, 32, 32), (5, 64, 32), (3, 256, 64), (2048, 2048, 32):
            integers, scales, zeros = quantize(
                torch.randn(num_outputs, num_inputs, generator=generator) + 0.3, group_size
            )
            packed, x = pack(integers), torch.randn(num_inputs, generator=generator)
            right = multiply(x[None], packed, scales, zeros)[0]
            apart = float((call(library, x, packed, scales, zeros) - right).abs().max())
            what = f"{num_outputs} outputs of {num_inputs} inputs in groups of {group_size}"
            assert apart < 0.01, f"{what}: differs from `multiply` by up to {apart:.2g}."

    def numpy() -> object:  # the same packed weights
        groups = unpack(packed).numpy().astype("float32").reshape(*scales.shape, -1)
        weight = groups * scales.numpy()[:, :, None] + zeros.numpy()[:, :, None]
        return weight.reshape(num_outputs, -1) @ x.numpy()

    kernels = Kernels()
    symmetric = Quantized(integers.to(torch.int8) - 8, scales, None, 4)
    ours = kernels.pack_integers(symmetric, 0)
    form = Form(4, symmetric.group, 0, 0)
    works: dict[str, Callable[[], Any]] = {
        "yours": lambda: call(library, x, packed, scales, zeros),
        "NumPy": numpy,
        "ours": lambda: kernels.linear(x[None], ours, None, num_outputs, form),
    }
    without_zeros = multiply(x[None], packed, scales, -8 * scales)
    assert torch.allclose(works["ours"](), without_zeros, atol=0.5), "our kernel multiplies another matrix"
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(15):  # in turn, so that other programs disturb all alike
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    yours, other, own = (median(seconds[name]) for name in works)
    print(f"Your kernel takes {1e6 * yours:.0f} µs for a matrix of 2048 x 2048.")
    print(
        f"It is {other / yours:.1f} times as fast as NumPy, "
        f"and {own / yours:.2f} times as fast as nanoengine's kernel."
    )
    assert other / yours >= AT_LEAST, (
        f"It should be at least {AT_LEAST:g} times as fast as NumPy. Keep several sums side by side, "
        "and apply the scale and the zero once per group."
    )


def main(source: Path = SOLUTION, most: int = 30) -> int:
    """Run `check` in another process, because it may never end. Limit its seconds of processor time.

    Returns 0 if the kernel passes.
    """
    process = multiprocessing.get_context("fork").Process(target=guarded, args=(source, most))
    process.start()
    process.join()
    if process.exitcode == -signal.SIGXCPU:
        print(f"The kernel was stopped after {most} seconds. Does a loop never end?")
    elif (process.exitcode or 0) < 0:
        print("The kernel crashed. Is an index outside of its array?")
    return int(process.exitcode != 0)


def guarded(source: Path, most: int) -> None:
    """Run `check`, and print what is wrong."""
    faulthandler.disable()  # pytest enables it: `main` reports a crash in one line
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    try:
        check(source)
    except (AssertionError, RuntimeError) as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--stub"]:
        print(stub(), end="")
        sys.exit()
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else SOLUTION))
