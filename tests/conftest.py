"""Settings of the processes that run tests. The fixtures are in fixtures.py."""

import gc
import os

# Read when PyTorch loads OpenMP: threads that spin at a barrier starve the tests of other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # Trio's makes hypothesis search the whole heap, for a second
# Garbage collections take a third of the time in which pytest imports all tests.
gc.disable()


def pytest_configure(config):
    # Without `-m gpu`, tests are about the CPU, on any machine.
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The process that only hands tests to workers starts them seconds earlier without PyTorch.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")
