"""The KV cache's memory: what each layer stores, and how it is allocated.

Shape letters: B block_size, K key/value heads, D head_dim (D' for the values, if different).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.backends.host_memory import zeros_on_large_pages


class KVSpec(NamedTuple):
    """Describes what one layer stores per token, and how far back a token attends."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    window: int | None = None  # how many positions a token sees, including its own; None: all

    @property
    def bytes_per_token(self) -> int:
        """The size of one token's K and V together."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype.itemsize


class KVGroup(NamedTuple):
    """Names layers that share one block table per sequence, because a token sees equally far in each."""

    layers: list[int]
    window: int | None  # the widest window of its layers: blocks before it can be freed. None: no window


@dataclass(slots=True)
class KVCache:
    """Holds one layer's cache. Block 0 is the null block."""

    k: Tensor  # (num_blocks, B, K, D)
    v: Tensor  # (num_blocks, B, K, D')
    group: int = 0  # index of the block tables to use for this layer

    @classmethod
    def zeros(cls, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device) -> "KVCache":
        """Allocate a cache filled with zeros."""
        sizes = num_blocks, block_size, spec.num_kv_heads
        shapes = [(*sizes, head_dim) for head_dim in (spec.k_head_dim, spec.v_head_dim)]
        k, v = (zeros_on_large_pages(shape, spec.dtype, device) for shape in shapes)
        return cls(k, v)


def block_bytes(specs: Sequence[KVSpec], groups: Sequence[KVGroup], block_size: int) -> int:
    """Return the bytes of one block: K and V in all layers of the largest group."""
    return block_size * max(sum(specs[layer].bytes_per_token for layer in group.layers) for group in groups)


def new_caches(
    specs: Sequence[KVSpec], groups: Sequence[KVGroup], num_blocks: int, block_size: int, device: torch.device
) -> list[KVCache]:
    """Allocate one cache per layer, of num_blocks blocks and the null block, or raise ValueError."""
    try:
        largest = max(groups, key=lambda group: len(group.layers))
        memory = [KVCache.zeros(specs[layer], num_blocks + 1, block_size, device) for layer in largest.layers]
    except RuntimeError as error:  # including torch.OutOfMemoryError, on a GPU
        raise ValueError(
            f"too little memory for a KV cache of {num_blocks} blocks of {block_size} tokens; "
            "lower num_kv_blocks or kv_cache_bytes"
        ) from error
    caches = {  # the i-th layers of all groups share the same memory
        layer: KVCache(cache.k, cache.v, index)
        for index, group in enumerate(groups)
        for layer, cache in zip(group.layers, memory, strict=False)
    }
    return [caches[layer] for layer in range(len(specs))]
