"""Measures the CPU's kernels beside the machine's peak: `python -m benchmarks --what kernels`.

The peaks are measured by peak.cpp, with the instructions that the kernels use. The sizes are those of a layer
of Qwen3-0.6B. Each kernel works through several layers' weights or caches, which together are larger than the
processor's caches.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.report import hardware
from nanoengine.backends.cpu import build
from nanoengine.backends.cpu.kernels import PLAIN, Kernels, dtype_name
from nanoengine.backends.cpu.pinned_threads import PinnedThreads
from nanoengine.backends.host_memory import zeros_on_large_pages
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.packing import Form
from nanoengine.backends.paged_attention import Settings
from nanoengine.backends.quantization import Quantized
from nanoengine.cli.terminal import table

# Inputs and outputs of a layer's linear layers: Q, K and V; attention's output; gate and up; down.
LINEARS = (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 32
ROWS = (1, 16, 512)
INTEGERS = (8, 0), (8, 8), (4, 0), (4, 8)  # bits of weights, and of activations if they are rounded ("+a8")
MANY_BYTES = 256 << 20  # larger than the processor's caches
# Sequences, their new tokens and all their tokens.
PROMPTS, DECODES = ((1, 512, 512), (1, 512, 4096)), ((1, 1, 8192), (16, 1, 2048))
SIZES = MANY_BYTES, LINEARS, ROWS, PROMPTS, DECODES


@dataclass
class Measured:
    """Holds a kernel's operations and bytes, the numbers it multiplies, and the seconds it took."""

    name: str
    numbers: str  # a key of the peaks
    operations: float
    num_bytes: float
    seconds: float


def least(run: Callable[[], object], repeats: int) -> float:
    """Return the least seconds of `repeats` calls, after one that is not measured."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_peaks(repeats: int, rounds: int = 200_000, num_bytes: int = MANY_BYTES) -> dict[str, float]:
    """Return the operations per second by type of number, and the bytes per second read from "memory"."""
    program, *options = (os.environ.get("CXX") or "g++").split()
    source = Path(__file__).with_name("peak.cpp")
    with tempfile.TemporaryDirectory() as directory:
        library = f"{directory}/peak.so"
        flags = [*build.FLAGS.split(), *options, "-I", str(build.SOURCE.parent)]
        subprocess.run([program, *flags, str(source), "-o", library], check=True)
        functions = ctypes.CDLL(library)
        memory = zeros_on_large_pages((num_bytes,), torch.int8)
        memory.fill_(1)  # the system gives no memory to what was never written
        found = {}
        for name in ("float32", "bfloat16", "integers", "read_memory"):
            function = getattr(functions, name if name == "read_memory" else f"peak_{name}")
            function.restype = ctypes.c_int64
            given = (memory.data_ptr(), num_bytes) if name == "read_memory" else (rounds,)
            run = partial(function, *map(ctypes.c_int64, given))
            found[name] = run() / least(run, repeats)
    found["memory"] = found.pop("read_memory")
    # A type without instructions of its own has the peak of float32.
    return {name: rate or found["float32"] for name, rate in found.items()}


def measure_linears(
    kernels: Kernels, dtype: torch.dtype, bits: int, activation_bits: int, sizes: Any, repeats: int
) -> Iterator[Measured]:
    """Measure a layer's four products: plain weights of that dtype, or integers of that many bits."""
    many_bytes, linears, all_rows, *_ = sizes
    group = 128 if bits == 8 else 32  # as in quantization="int8" and "int4"
    layers: list[list[Any]] = []
    form = Form(bits, group, 0, activation_bits) if bits else PLAIN
    layer_bytes = 0
    while len(layers) * layer_bytes < many_bytes:
        layers.append([])
        for num_inputs, num_outputs in linears:
            if bits:
                integers = torch.ones(num_outputs, num_inputs, dtype=torch.int8)
                scales = torch.full((num_outputs, num_inputs // group), 0.01)
                packed = kernels.pack_integers(Quantized(integers, scales, None, bits), activation_bits)
            else:
                packed = kernels.pack(torch.full((num_outputs, num_inputs), 0.01, dtype=dtype))
            layers[-1].append((num_inputs, num_outputs, packed))
        layer_bytes = sum(packed.nbytes for *_, packed in layers[-1])
    label = (f"int{bits}" if bits else dtype_name(dtype)) + ("+a8" if activation_bits else "")
    numbers = "integers" if activation_bits else dtype_name(dtype)
    for rows in all_rows:
        inputs = {n: torch.randn(rows, n).to(dtype) for n, _ in linears}
        some = layers if rows == 1 else layers[: max(2, len(layers) // (1 + rows // 64))]

        def run(inputs: Any = inputs, some: Any = some) -> None:
            for layer in some:
                for num_inputs, num_outputs, packed in layer:
                    kernels.linear(inputs[num_inputs], packed, None, num_outputs, form)

        seconds = least(run, repeats) / len(some)
        operations = 2 * rows * sum(n * m for n, m in linears)
        moved = layer_bytes + rows * dtype.itemsize * sum(n + m for n, m in linears)
        yield Measured(f"products, {label}, {rows} rows", numbers, operations, moved, seconds)


def measure_attention(kernels: Kernels, dtype: torch.dtype, sizes: Any, repeats: int) -> Iterator[Measured]:
    """Measure a layer's attention for prompts and for decodes, with the kernels' cache."""
    many_bytes, *_, prompts, decodes = sizes
    spec = KVSpec(KV_HEADS, HEAD_DIM, HEAD_DIM, dtype)
    label = dtype_name(dtype)
    if kernels.int8_cache:
        spec, label = KVSpec(KV_HEADS, HEAD_DIM + 4, HEAD_DIM + 4, torch.int8), "int8"
    settings = Settings(HEAD_DIM**-0.5, None, None, None)
    for num_seqs, num_new, total in (*prompts, *decodes):
        blocks = total // BLOCK_SIZE
        num_bytes = num_seqs * total * spec.bytes_per_token
        caches = [
            KVCache.zeros(spec, num_seqs * blocks, BLOCK_SIZE, torch.device("cpu"))
            for _ in range(-(-many_bytes // num_bytes) if num_new == 1 else 2)
        ]
        for cache in caches:
            for x in (cache.k, cache.v):
                x.view(torch.int8).fill_(0x3F)  # numbers near 1, in each dtype
        tables = torch.arange(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
        lengths = torch.full((num_seqs,), total, dtype=torch.int32)
        q = torch.randn(num_seqs * num_new, HEADS, HEAD_DIM).to(dtype)
        out = torch.empty_like(q)

        def run(q: Any = q, out: Any = out, caches: Any = caches, given: Any = (tables, lengths)) -> None:
            for cache in caches:
                if len(q) == len(given[0]):
                    kernels.decode_attention(out, q, cache, (*given, torch.arange(len(q))), settings)
                else:
                    kernels.prefill_attention(out, q, cache, given[0][0], int(given[1][0]), settings)

        seconds = least(run, repeats) / len(caches)
        pairs = num_seqs * (num_new * total - num_new * (num_new - 1) // 2)
        what = f"{num_seqs} x {total} tokens" if num_new == 1 else f"{num_new} of {total} tokens"
        name = f"{'decode' if num_new == 1 else 'prompt'} attention, {label} cache, {what}"
        moved = num_bytes + 2 * q.nbytes
        yield Measured(name, dtype_name(dtype), 4 * HEADS * HEAD_DIM * pairs, moved, seconds)


def bench_kernels(
    threads: int, dtype_text: str, repeats: int = 5, sizes: Any = SIZES, rounds: int = 200_000
) -> dict[str, Any]:
    """Measure all kernels, print a table, and return the figures."""
    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_text)
    measured: list[Measured] = []
    with PinnedThreads(), torch.inference_mode():
        plain, int8_cache = Kernels(dtype), Kernels(dtype, int8_cache=True)
        peaks = measure_peaks(repeats, rounds, sizes[0])
        for weights in ((dtype, 0, 0), (torch.float32, 0, 0), *((dtype, *bits) for bits in INTEGERS)):
            measured += measure_linears(plain, *weights, sizes, repeats)
        for kernels in (plain, int8_cache):
            measured += measure_attention(kernels, dtype, sizes, repeats)
        again = measure_peaks(repeats, rounds, sizes[0])
    peaks = {name: max(rate, again[name]) for name, rate in peaks.items()}  # other load only lowers them
    peaks.setdefault("float16", peaks["float32"])  # the kernels multiply float16 as float32
    rows = []
    for one in measured:
        rates = one.operations / one.seconds, one.num_bytes / one.seconds
        shares = rates[0] / peaks[one.numbers], rates[1] / peaks["memory"]
        rows.append({"kernel": one.name, "us": one.seconds * 1e6, "numbers": one.numbers})
        rows[-1] |= dict(zip(("gop_per_s", "gb_per_s"), (rate / 1e9 for rate in rates), strict=True))
        rows[-1] |= {"of_peak": shares[0], "of_memory": shares[1]}
    head = "kernel", "µs", "Gop/s", "of the peak", "GB/s", "of memory's"
    form = "{kernel}|{us:.0f}|{gop_per_s:.0f}|{of_peak:.0%}|{gb_per_s:.1f}|{of_memory:.0%}"
    print(f"\n{table(head, (form.format(**row).split('|') for row in rows))}\n")
    gigas = {name: round(rate / 1e9, 1) for name, rate in peaks.items()}
    print(f"peaks: {', '.join(f'{name} {rate}' for name, rate in gigas.items())} (Gop/s, and GB/s read)")
    place = machine(threads, "cpu")
    print(f"{hardware(place)}; {threads} threads, {dtype_text}, the least of {repeats} runs of each")
    return {"machine": place, "dtype": dtype_text, "peaks": gigas, "results": rows}
