"""Every reachable state of small worlds keeps the laws: see worlds.py."""

import pytest

from tests.worlds import SMALL, Search


@pytest.mark.parametrize("name", SMALL)
def test_every_reachable_state_of_a_small_world_keeps_the_laws(name):
    assert Search(SMALL[name]).run() > 40
