"""Every reachable state of small worlds keeps the laws: see worlds.py."""

import pytest

from tests.helpers import slow
from tests.worlds import ONE, SMALL, Search

# Smaller ones by default, in place of worlds that take seconds
SMALLER: dict = {"small, preemption": {"prompts": ONE}, "small, all tokens": {"max_len": 4}}
SMALLER |= {"small, async": {"max_len": 4}, "small, collisions": {"num_blocks": 5}}
SMALLER["small, drafts"] = {"budget": 3}


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, SMALLER.get(name, {})) for name in SMALL), *slow(*((name, {}) for name in SMALLER))],
)
def test_every_reachable_state_of_a_small_world_keeps_the_laws(name, changes):
    assert Search(SMALL[name]._replace(**changes)).run() > 30
