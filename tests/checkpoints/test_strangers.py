"""Changed files, as strangers.py makes them: each loads and is right, or is a ValueError within a second."""

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory by Linux's means")
@pytest.mark.parametrize(("start", "files"), [(0, 40), pytest.param(40, 1460, marks=pytest.mark.slow)])
def test_changed_files_load_correctly_or_raise_value_error(start, files):
    command = [sys.executable, "-m", "tests.strangers", str(start), str(files)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "'right': " in run.stdout.splitlines()[-1]
