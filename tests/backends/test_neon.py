"""The kernels on a processor with NEON, emulated: what holds for this machine's kernels holds for them."""

import shutil

import pytest

from tests.helpers import run_tests

TOOLS = "aarch64-linux-gnu-g++", "qemu-aarch64"  # Debian's g++-aarch64-linux-gnu and qemu-user
NEEDS_TOOLS = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}")
pytestmark = [pytest.mark.slow, NEEDS_TOOLS]
FILES = (
    *("backends/test_paged_attention", "backends/test_int8_cache", "backends/test_integers"),
    *("backends/test_kernels", "models/test_decoder", "sampling/test_sampler"),
)
# Not the largest products: only for AMX are they divided by rows.
SELECTION = """
    test_paged_attention and (compiled or shares_its_blocks)
    or test_integers or test_int8_cache and kernel_writes
    or test_kernels and not instruction_set and not layer_in_one_call and not last_layer and not 8224
    or test_sampler and kernel_samples
    or test_decoder and greedy_tokens and (qwen3-False or biases-False)
    or test_decoder and as_exact and False
"""


def run(files, selection, processor, types="7"):
    """Run tests with kernels compiled for a processor, in the emulator. Return what they print."""
    arguments = "-x", "-p", "tests.neon", *(f"tests/{name}.py" for name in files)
    environment = {"NEON_PROCESSOR": processor, "NEON_TYPES": types, "OMP_NUM_THREADS": "2"}
    return run_tests(*arguments, selection=selection, **environment)


def test_every_kernel_computes_the_same_compiled_for_neon():
    """Attention, products and element-wise work by themselves, then whole models' tokens."""
    assert "not called: []" in run(FILES, SELECTION, "armv8.2-a+dotprod")


def test_products_of_integers_are_the_same_without_the_dot_product_instructions():
    selection = "equals_its_definition and dtype1"  # the instructions do not depend on the dtype
    run(["backends/test_integers"], selection, "armv8.2-a", types="2")
