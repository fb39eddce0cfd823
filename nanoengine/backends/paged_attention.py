"""Paged attention: write a batch's keys and values into cache blocks, then attend over the blocks.

torch_attention.py is the backend to read: plain PyTorch, on any device. The fast backends compute the same
attention with kernels of this repository (cpu/compiled_attention.py, triton_attention.py) or of flash-attn
(flash_attention.py).

Shape letters: T tokens in the batch, S sequences, H query heads, K key/value heads, D head_dim (D' for the
values, if different), L cached tokens of a sequence (padded to whole blocks).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.step_inputs import AttentionMetadata


class Settings(NamedTuple):
    """Holds a layer's attention settings: the keyword arguments of `PagedAttention.__call__`."""

    scale: float
    window: int | None = None  # how many positions a token sees, including its own; None: all
    softcap: float | None = None  # a tanh bounds the scores to (-softcap, softcap); None: no bound (Gemma 2)
    sinks: Tensor | None = None  # (H,), a score per head that joins the softmax but has no value (gpt-oss)
    alibi_slopes: Tensor | None = None  # (H,) float32; slope * distance is subtracted from each score (Bloom)
    out: Tensor | None = None  # memory that the result may be written to

    def for_heads(self, *shape: int) -> "Settings":
        """Return a copy with the per-head tensors viewed in the given shape."""
        sinks, slopes = (None if x is None else x.view(shape) for x in (self.sinks, self.alibi_slopes))
        return self._replace(sinks=sinks, alibi_slopes=slopes)


@dataclass(frozen=True, slots=True, eq=False)
class QueryChunk:
    """Describes a sequence with several new tokens: rows [start, end), the last at position seq_len - 1."""

    start: int
    end: int
    seq_len: int
    first: int  # the first position that is not in the null block
    block_table: Tensor  # (blocks,) int32


class PagedAttention(ABC):
    """Computes causal attention over the paged cache for one step.

    It is built once per step, which prepares what does not depend on the layer, and called once per layer.
    Source: PagedAttention, https://arxiv.org/abs/2309.06180
    """

    name: ClassVar[str]  # the value of attn_backend that selects it
    # The optional settings that it can compute.
    settings: ClassVar[frozenset[str]] = frozenset(("window", "softcap", "sinks", "alibi_slopes"))
    block_multiple: ClassVar[int] = 1  # block_size has to be a multiple of this
    capturable: ClassVar[bool] = False  # whether CUDA graphs can capture it: true if it never waits
    is_placed = False  # whether one kernel may prepare q, k and v, and write k and v to the cache

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int) -> None:
        self.metadata = metadata
        self.block_size = block_size

    @classmethod
    def obstacle(cls, specs: Sequence[KVSpec], settings: frozenset[str]) -> str | None:
        """Return why the backend cannot compute layers with these specs and settings, or None if it can."""
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, **settings: Any) -> Tensor:
        """Write k and v into their slots, then attend from each token to its sequence's tokens so far.

        The whole batch is written before anything is read, so a sequence may attend to blocks that another
        sequence fills in the same step. q is (T, H, D), k (T, K, D), and v (T, K, D'), H a multiple of K. If
        k and v are the cache's own tensors, they are already written (`place_for`). The settings are those of
        `Settings`. The result is (T, H, D'), with q's dtype.
        """
        if k is not cache.k:
            self._write(k, v, cache)
        layer = Settings(**settings)
        if layer.sinks is not None:
            layer = layer._replace(sinks=layer.sinks.float())
        return self._attend(q.contiguous(), k, v, cache, layer)

    def place_for(self, q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        """Return memory for the queries and the slots of K and V, if a kernel may write all three."""
        return (q.new_empty(q.shape), self.metadata.slot_mapping) if self.is_placed else None

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        # Unwanted K and V have slots in the null block, which nothing reads.
        for held, x in ((cache.k, k), (cache.v, v)):
            held.view(-1, *held.shape[2:]).index_copy_(0, self.metadata.slot_mapping, self.stored(x))

    @staticmethod
    def stored(x: Tensor) -> Tensor:
        """Return K or V as the cache holds it."""
        return x

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        """Attend over the cache, which already contains k and v."""


# Makes the attention of one step from its metadata and block_size.
BuildAttention = Callable[[AttentionMetadata[Tensor], int], "PagedAttention | GroupedAttention"]


class GroupedAttention:
    """Holds a `PagedAttention` per KV cache group. The model calls it like a single one."""

    def __init__(self, build: BuildAttention, metadata: AttentionMetadata[Tensor], block_size: int) -> None:
        """Build each group's attention from block_tables[group] and slot_mapping[group]."""
        self.groups = [
            build(metadata._replace(block_tables=tables, slot_mapping=slots), block_size)
            for tables, slots in zip(metadata.block_tables, metadata.slot_mapping, strict=True)
        ]

    def place_for(self, q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        """See `PagedAttention`."""
        return self.groups[cache.group].place_for(q, cache)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, **settings: Any) -> Tensor:
        """Attend with the attention of the cache's group, which knows that group's block tables."""
        return self.groups[cache.group](q, k, v, cache, **settings)


def split_batch(
    metadata: AttentionMetadata[Tensor], block_size: int
) -> tuple[tuple[Tensor, Tensor, Tensor], list[QueryChunk]]:
    """Return the sequences with one new token (their block tables, lengths and rows), and the others."""
    starts = metadata.cu_seqlens_q[:-1].long()
    query_lens = metadata.cu_seqlens_q.diff()
    decodes = (query_lens == 1).nonzero().squeeze(1)
    tables, seq_lens = metadata.block_tables, metadata.seq_lens
    chunks: list[QueryChunk] = []
    for i in (query_lens > 1).nonzero().squeeze(1).tolist():
        start, length, seq_len = int(starts[i]), int(query_lens[i]), int(seq_lens[i])
        table = tables[i, : -(-seq_len // block_size)]
        first = int(table.bool().int().argmax()) * block_size
        chunks.append(QueryChunk(start, start + length, seq_len, first, table))
    return (tables[decodes], seq_lens[decodes], starts[decodes]), chunks


def whole_rows(x: Tensor) -> Tensor:
    """Return keys or values (T, K, D) with each token's elements contiguous; tokens may be strided."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
