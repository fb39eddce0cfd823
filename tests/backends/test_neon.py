"""The kernels on a processor with NEON, emulated: what holds for this machine's kernels holds for them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "aarch64-linux-gnu-g++", "qemu-aarch64"  # Debian's g++-aarch64-linux-gnu and qemu-user
FILES = "backends/test_attention", "backends/test_kernels", "models/test_decoder", "test_sampling"
SELECTION = """
    test_attention
    or test_kernels and not instruction_set and not layer_in_one_call and not last_layer
    or test_sampling and kernel_draws
    or test_decoder and greedy_tokens and (qwen3-False or biases-False)
    or test_decoder and as_exact and False
"""


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}")
def test_every_kernel_computes_the_same_compiled_for_neon():
    """Attention, products and element-wise work by themselves, then whole models' tokens."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.neon", "-k", " ".join(SELECTION.split())]
        + [f"tests/{name}.py" for name in FILES],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "not called: []" in run.stdout
