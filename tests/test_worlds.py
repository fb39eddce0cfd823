"""Every reachable state of small worlds keeps the laws: see worlds.py."""

import pytest

from tests.worlds import SMALL, Search


@pytest.mark.parametrize("stride", [None, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SMALL)
def test_every_reachable_state_of_a_small_world_keeps_the_laws(name, stride):
    size = SMALL[name]
    assert Search(size._replace(stride=stride or size.stride)).run() > 40
