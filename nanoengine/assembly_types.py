"""Defines what assembly.py hands from step to step, and to the parts that extend an engine."""

from typing import NamedTuple

import torch

from nanoengine.backends.kv_cache import KVGroup, KVSpec
from nanoengine.checkpoints.checkpoint import Checkpoint
from nanoengine.config import EngineConfig
from nanoengine.engine import ModelRunner


class Opened(NamedTuple):
    """Holds a model that is not loaded yet."""

    config: EngineConfig
    checkpoint: Checkpoint
    max_model_len: int  # limit on prompt plus output


class Loaded(NamedTuple):
    """Describes a loaded model, and the limits that decide how much memory its steps and caches need."""

    dtype: torch.dtype
    weights_digest: bytes  # identifies the weights to a KV store
    kv_specs: list[KVSpec]  # what each layer stores
    kv_groups: list[KVGroup]  # layers that share block tables
    state_bytes: int  # bytes of one sequence's recurrent state; 0: the model has none
    block_size: int  # tokens
    max_model_len: int
    table_width: int  # number of blocks of the longest sequence
    max_num_batched_tokens: int  # token budget of a step
    max_num_chunks: int  # of a step: one per sequence that can run, and one per draft token


class Started(NamedTuple):
    """Holds a runner that is ready to step, and the sizes that were chosen for it."""

    opened: Opened
    runner: ModelRunner
    loaded: Loaded
    num_blocks: int  # usable blocks: the null block is not counted
    num_state_slots: int  # slots for recurrent states, without the reserved ones; 0: the model has none
    memory: str  # for the user: "4.0 GiB of the 15.1 GiB available"; "" if the user chose the size
