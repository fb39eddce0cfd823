"""The kernels on a processor with NEON, emulated: what holds for this machine's kernels holds for them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "aarch64-linux-gnu-g++", "qemu-aarch64"  # Debian's g++-aarch64-linux-gnu and qemu-user
FILES = (
    *("backends/test_paged_attention", "backends/test_int8_cache", "backends/test_integers"),
    *("backends/test_kernels", "models/test_decoder", "sampling/test_sampler"),
)
SELECTION = """
    test_paged_attention and (compiled or shares_its_blocks)
    or test_integers or test_int8_cache and kernel_writes
    or test_kernels and not instruction_set and not layer_in_one_call and not last_layer
    or test_sampler and kernel_samples
    or test_decoder and greedy_tokens and (qwen3-False or biases-False)
    or test_decoder and as_exact and False
"""


def run(files, selection, processor):
    """Run tests with kernels compiled for a processor, in the emulator. Return what they print."""
    options = ["-q", "-x", "-p", "tests.neon", "-k", " ".join(selection.split())]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{name}.py" for name in files)]
    env = os.environ | {"OMP_NUM_THREADS": "2", "NEON_PROCESSOR": processor}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


needs_tools = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}")


@pytest.mark.slow
@needs_tools
def test_every_kernel_computes_the_same_compiled_for_neon():
    """Attention, products and element-wise work by themselves, then whole models' tokens."""
    assert "not called: []" in run(FILES, SELECTION, "armv8.2-a+dotprod")


@pytest.mark.slow
@needs_tools
def test_products_of_integers_are_the_same_without_the_dot_product_instructions():
    selection = "equals_its_definition and dtype1"  # the instructions do not depend on the dtype
    assert " passed" in run(["backends/test_integers"], selection, "armv8.2-a")
