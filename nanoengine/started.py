"""Defines what startup hands to the parts that extend an engine: a runner that is ready to step."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanoengine.backends.kv_cache import KVGroup, KVSpec
from nanoengine.engine import ModelRunner


class Started(NamedTuple):
    """Holds a runner that is ready to step, and the sizes that were chosen for it."""

    runner: ModelRunner
    num_blocks: int  # usable blocks: the null block is not counted
    max_num_batched_tokens: int  # token budget of a step
    dtype: torch.dtype
    kv_specs: list[KVSpec]  # what each layer stores
    kv_groups: list[KVGroup]  # layers that share block tables
    weights_digest: bytes  # identifies the weights to a KV store
    num_state_slots: int  # slots for recurrent states, without the reserved ones; 0: the model has none
    state_bytes: int  # bytes of one sequence's recurrent state
    memory: str  # for the user: "4.0 GiB of the 15.1 GiB available"; "" if the user chose the size
    allocate: Callable[[int], None]  # replaces the KV cache with one of the given number of blocks
