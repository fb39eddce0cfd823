"""Checks a paged decode attention kernel for grouped query heads, written in Triton.

    python -m docs.decode --stub > my_kernel.py    write the file that you fill in
    python -m docs.decode my_kernel.py             check your kernel, and count what it loads

Without an argument, the command checks docs/decode_kernel.py, the solution. Triton's interpreter runs the
kernel on the CPU, so you do not need a GPU.
"""

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOLUTION = Path(__file__).with_name("decode_kernel.py")
AT_LEAST = 3.5  # for groups of 4: what lesson 11's kernel loads, divided by what yours loads
UNWRITTEN = 12345.0
BLOCK_SIZE = 8
CASES = [  # seq_lens, KV heads, query heads per KV head, head dimension, what to look at if it is wrong
    ([8], 1, 1, 16, "Look at the scale, the scores and the weighted sum of V."),
    ([16, 24, 8], 1, 1, 16, "Read every block of the table. Both sums shrink when `largest` grows."),
    ([15, 9], 1, 1, 16, "The last block counts up to seq_len. The scores after it are minus infinity."),
    ([8, 5], 3, 1, 32, "A slot has a vector for each KV head, one after the other."),
    ([17, 8], 1, 2, 16, "Each query head has its own largest score and its own sum of weights."),
    ([15, 24, 1], 2, 4, 16, "KV head h belongs to query heads [h * GROUP, (h + 1) * GROUP)."),
]  # fmt: skip


def stub() -> str:
    """Return docs/decode_kernel.py without the body of its kernel."""
    source = SOLUTION.read_text()
    body = source.index("    seq, kv_head, num_kv_heads =")
    return source[:body].replace("The solution of lesson", "My solution of lesson") + "    pass\n"


def make_inputs(seq_lens: list[int], num_kv_heads: int, group: int, head_dim: int) -> list[Tensor]:
    """Return q, both caches with NaN in each slot that no sequence uses, the block tables and seq_lens."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens]
    shuffled = 1 + torch.randperm(sum(counts) + 2, generator=generator)
    block_tables = torch.zeros(len(seq_lens), max(counts) + 1, dtype=torch.int32)  # no sequence uses block 0
    caches = torch.full((2, sum(counts) + 3, BLOCK_SIZE, num_kv_heads, head_dim), float("nan"))
    for i, seq_len in enumerate(seq_lens):
        block_tables[i, : counts[i]] = shuffled[sum(counts[:i]) :][: counts[i]]
        for position in range(seq_len):
            block = int(block_tables[i, position // BLOCK_SIZE])
            new = torch.randn(2, num_kv_heads, head_dim, generator=generator)
            caches[:, block, position % BLOCK_SIZE] = new
    q = 3 * torch.randn(len(seq_lens), num_kv_heads * group, head_dim, generator=generator)
    q[:, 1::2] *= 30  # a largest score that is shared by all heads leaves the other heads no weights
    return [q, *caches, block_tables, torch.tensor(seq_lens, dtype=torch.int32)]


def call(kernel: Any, inputs: list[Tensor]) -> Tensor:
    """Launch the kernel with one program per sequence and KV head. Return its output."""
    q, k_cache, _, block_tables, _ = inputs
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    out = torch.full_like(q, UNWRITTEN)
    kernel[num_seqs, num_kv_heads](
        out, *inputs, block_tables.shape[1], head_dim**-0.5, num_heads // num_kv_heads, BLOCK_SIZE, head_dim
    )
    return out


def watch_loads() -> list[int]:
    """Let the interpreter append to the returned list how many elements each load reads.

    An element that is masked out and has no `other` is undefined on a GPU, where the interpreter returns 0.
    It becomes NaN here.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    loads, load = [], InterpreterBuilder.create_masked_load

    def watched(self: Any, ptrs: Any, mask: Any, other: Any, *others: Any) -> Any:
        loads.append(int(np.sum(mask.data)))
        element = ptrs.get_element_ty()
        if other is None and element.is_fp32():
            other = TensorHandle(np.full(ptrs.data.shape, np.nan, np.float32), element)
        return load(self, ptrs, mask, other, *others)

    InterpreterBuilder.create_masked_load = watched
    return loads


def check(source: Path) -> None:
    """Compare the kernel with dense attention, and what it loads with what lesson 11's kernel loads.

    Raises:
        AssertionError: a result is wrong, or the kernel loads too much.
    """
    lesson: Any = importlib.import_module("docs.kernel")  # imports Triton, and has no types
    spec = importlib.util.spec_from_file_location("student", source)
    assert spec is not None, f"{source} is not a Python file."
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module, "grouped_kernel"), "The file has no function `grouped_kernel`."
    loads = watch_loads()
    for seq_lens, num_kv_heads, group, head_dim, idea in CASES:
        inputs = make_inputs(seq_lens, num_kv_heads, group, head_dim)
        out = call(module.grouped_kernel, inputs)
        what = f"Sequences of {seq_lens} tokens, {num_kv_heads} KV head(s), groups of {group}"
        assert not (out == UNWRITTEN).any(), f"{what}: some outputs are not written."
        assert not out.isnan().any(), (
            f"{what}: the output contains NaN. Does the kernel read a slot that its sequence does not use, "
            f"or does a masked load have no `other`? {idea}"
        )
        apart = float((out - lesson.dense_attention(*inputs)).abs().max())
        assert apart < 1e-4, f"{what}: differs from dense attention by up to {apart:.2g}. {idea}"
    inputs = make_inputs([61, 40, 33], 2, 4, 32)
    works: list[Callable[[], Tensor]] = [
        lambda: lesson.paged_attention(*inputs),
        lambda: call(module.grouped_kernel, inputs),
    ]
    counts, seconds = [], []
    for work in works:
        loads.clear()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
        counts.append(sum(loads))
    fewer = counts[0] / counts[1]
    print(
        f"Your kernel loads {counts[1]} elements. Lesson 11's loads {counts[0]}, {fewer:.1f} times as many."
    )
    faster = seconds[0] / seconds[1]
    print(f"The interpreter runs yours {faster:.1f} times as fast. That says nothing about a GPU.")
    assert fewer >= AT_LEAST, (
        f"Lesson 11's kernel should load at least {AT_LEAST:g} times as many. Load each block "
        "of K and V once, for all query heads of the group."
    )


def main(source: Path = SOLUTION, most: int = 60) -> int:
    """Run `check` in another process, because it may never end. Limit its seconds of processor time.

    Returns 0 if the kernel passes.
    """
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed. It is available on Linux: pip install triton")
        return 1
    code = f"import sys; from docs.decode import guarded; guarded(sys.argv[1], {most})"
    command = [sys.executable, "-W", "ignore", "-c", code, str(source.resolve())]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=SOLUTION.parent.parent, env=environment, check=False)
    if done.returncode == -signal.SIGXCPU:
        print(f"The kernel was stopped after {most} seconds. Does a loop never end?")
    elif done.returncode < 0:
        print("The kernel crashed. Is an address outside of its tensor?")
    return int(done.returncode != 0)


def guarded(source: str, most: int) -> None:
    """Run `check`, and print what is wrong, with the student's own line if the code raised an error."""
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    try:
        check(Path(source))
    except AssertionError as error:
        print(error)
        sys.exit(1)
    except Exception as error:
        cause = error.__cause__ or error  # the interpreter wraps errors of a kernel
        print(f"Your code raised {type(cause).__name__}: {cause}")
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.filename == source:
                print(f"    {Path(source).name}, line {frame.lineno}, in {frame.name}: {frame.line}")
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--stub"]:
        print(stub(), end="")
        sys.exit()
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else SOLUTION))
