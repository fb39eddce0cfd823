"""Changed files, as strangers.py makes them: each loads and is right, or is a ValueError within a second."""

import sys

import pytest

from tests import strangers
from tests.helpers import slow


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory by Linux's means")
@pytest.mark.parametrize(("start", "files"), [(0, 20), *slow((20, 680))])
def test_changed_files_load_correctly_or_raise_value_error(start, files):
    results = strangers.try_files(start, files)
    assert results["right"] > 0 == results["found"]
