"""Finds policies by name."""

from nanoengine.assembly import find_scheduler
from nanoengine.engine import Scheduler
from nanoengine.lab.policies.cached import CachedFirst
from nanoengine.lab.policies.deadline import EarliestDeadline
from nanoengine.lab.policies.fcfs import FCFS
from nanoengine.lab.policies.priority import PreemptivePriority
from nanoengine.lab.policies.shortest import ShortestFirst

POLICIES: dict[str, type[Scheduler]] = {"fcfs": FCFS, "shortest": ShortestFirst, "cached": CachedFirst}
POLICIES |= {"priority": PreemptivePriority, "deadline": EarliestDeadline}


def find_policy(name: str) -> type[Scheduler]:
    """Return the policy with this name, or the `Scheduler` that "module:Class" names."""
    if name not in POLICIES and {":", "."}.isdisjoint(name):
        raise ValueError(f"must be {', '.join(POLICIES)} or module:Class, got {name!r}")
    return POLICIES.get(name) or find_scheduler(name)
