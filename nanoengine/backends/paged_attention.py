"""Paged attention: write a batch's keys and values into cache blocks, then attend over the blocks.

`TorchAttention` is the backend to read: plain PyTorch, on any device. The fast backends compute the same
attention with kernels of this repository (cpu/compiled_attention.py, triton_attention.py) or of flash-attn
(flash_attention.py).

Shape letters: T tokens in the batch, S sequences, H query heads, K key/value heads, D head_dim (D' for the
values, if different), L cached tokens of a sequence (padded to whole blocks), B block_size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.step_inputs import AttentionMetadata

# How many sequences one padded call decodes. They are sorted by length first, to keep the padding small.
DECODE_GROUP_SIZE = 16
# About how many attention scores to hold in memory at a time when SDPA cannot be used.
SCORES_PER_SLICE = 1 << 24


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


class _Mask(NamedTuple):
    """Relates query and key positions. Both tensors broadcast to the scores."""

    distance: Tensor  # query position - key position
    visible: Tensor  # bool: the query attends to the key

    @classmethod
    def of(cls, distance: Tensor, window: int | None) -> "_Mask":
        """Return the causal mask for these distances: keys in the past and inside the window are visible.

        >>> _Mask.of(torch.tensor([2, 1, 0, -1]), window=2).visible.tolist()
        [False, True, True, False]
        """
        visible = distance >= 0
        return cls(distance, visible if window is None else visible & (distance < window))


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Groups sequences with one new token each, which attend in a single padded call."""

    rows: Tensor  # (S',) int64  their rows in the flat batch
    block_tables: Tensor  # (S', blocks) int32
    seq_lens: Tensor  # (S',) int32
    padding: tuple[Tensor, ...]  # row and position of each slot past a sequence's end or in the null block


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


class TorchAttention(PagedAttention):
    """Attends in plain PyTorch, on any device."""

    name = "torch"

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int) -> None:
        super().__init__(metadata, block_size)
        self._masks: dict[object, _Mask] = {}
        starts = metadata.cu_seqlens_q[:-1].long()
        query_lens = metadata.cu_seqlens_q.diff()
        decodes = (query_lens == 1).nonzero().squeeze(1)
        tables, seq_lens = metadata.block_tables, metadata.seq_lens
        self._prepare_decodes(starts[decodes], tables[decodes], seq_lens[decodes])
        self._chunks: list[QueryChunk] = []
        for i in (query_lens > 1).nonzero().squeeze(1).tolist():
            start, length, seq_len = int(starts[i]), int(query_lens[i]), int(seq_lens[i])
            table = tables[i, : -(-seq_len // block_size)]
            first = int(table.bool().int().argmax()) * block_size
            self._chunks.append(QueryChunk(start, start + length, seq_len, first, table))

    def _prepare_decodes(self, rows: Tensor, tables: Tensor, seq_lens: Tensor) -> None:
        """Group the sequences that have one new token, given their rows, block tables and lengths."""
        self._groups: list[_DecodeGroup] = []
        order = seq_lens.argsort()
        for group in torch.split(order, DECODE_GROUP_SIZE) if len(order) else ():
            num_blocks = -(-int(seq_lens[group[-1]]) // self.block_size)
            positions = torch.arange(num_blocks * self.block_size, device=group.device)
            group_tables = tables[group, :num_blocks]
            is_null = (group_tables == 0).repeat_interleave(self.block_size, dim=1)
            padding = ((positions >= seq_lens[group].unsqueeze(1)) | is_null).nonzero(as_tuple=True)
            self._groups.append(_DecodeGroup(rows[group], group_tables, seq_lens[group], padding))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        self._decodes(out, q, cache, settings)
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.end)
            self._chunk(out[rows], chunk, q[rows], cache, settings)
        return out

    def _decodes(self, out: Tensor, q: Tensor, cache: KVCache, settings: Settings) -> None:
        for group in self._groups:
            out[group.rows] = self._decode(group, q[group.rows], cache, settings)

    def _read(self, cache: KVCache, block_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cache.k[block_ids], cache.v[block_ids]

    def _decode(self, group: _DecodeGroup, q: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        num_seqs, num_heads, head_dim = q.shape
        k, v = (x.flatten(1, 2) for x in self._read(cache, group.block_tables, q.dtype))  # (S', L, K, D)
        # A mask is not enough: the padding may contain NaN from another sequence, and 0 * NaN is NaN.
        k[group.padding], v[group.padding] = 0, 0
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        num_kv_heads = k.shape[1]
        key = (group, settings.window)
        if key not in self._masks:
            distance = group.seq_lens.unsqueeze(1) - 1 - torch.arange(k.shape[2], device=q.device)
            self._masks[key] = _Mask.of(distance[:, None, None], settings.window)  # (S', 1, 1, L)
        # The query heads that share a KV head are folded into the dimension of query positions.
        folded = q.reshape(num_seqs, num_kv_heads, -1, head_dim)
        settings = settings.for_heads(1, num_kv_heads, -1, 1)
        out = _scaled_dot_product(folded, k, v, self._masks[key], settings)
        return out.reshape(num_seqs, num_heads, -1)

    def _chunk(self, out: Tensor, chunk: QueryChunk, q: Tensor, cache: KVCache, settings: Settings) -> None:
        length, num_heads, head_dim = q.shape
        table = chunk.block_table[chunk.first // self.block_size :]
        num_keys = chunk.seq_len - chunk.first
        k, v = (x.flatten(0, 1)[:num_keys].transpose(0, 1) for x in self._read(cache, table, q.dtype))
        num_kv_heads, group_size = k.shape[0], num_heads // k.shape[0]
        mask = None
        is_plain = all(x is None for x in settings[1:5])
        if length < num_keys or not is_plain:
            key = (chunk.start, settings.window)
            if key not in self._masks:
                positions = torch.arange(num_keys, dtype=torch.int32, device=q.device)
                distance = positions[-length:].unsqueeze(1) - positions
                self._masks[key] = _Mask.of(distance, settings.window)  # (length, L)
            mask = self._masks[key]
        # SDPA's batch dimension is the KV heads. Its head dimension is the query heads that share a KV head.
        attended = _scaled_dot_product(
            q.reshape(length, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3),
            k.unsqueeze(1).expand(-1, group_size, -1, -1),
            v.unsqueeze(1).expand(-1, group_size, -1, -1),
            mask,
            settings.for_heads(num_kv_heads, group_size, 1, 1),
        )
        out.view(length, num_kv_heads, group_size, -1).copy_(attended.permute(2, 0, 1, 3))


def whole_rows(x: Tensor) -> Tensor:
    """Return keys or values (T, K, D) with each token's elements contiguous; tokens may be strided."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: _Mask | None, settings: Settings) -> Tensor:
    """Attend from (.., .., queries, D) to (.., .., L, D). Without a mask the attention is causal."""
    sinks, slopes = settings.sinks, settings.alibi_slopes
    if settings.softcap is None and sinks is None and slopes is None:
        visible = None if mask is None else mask.visible
        return F.scaled_dot_product_attention(q, k, v, visible, 0.0, mask is None, scale=settings.scale)
    assert mask is not None
    # SDPA supports none of these settings. Process a slice of the queries at a time to keep the scores small.
    slice_length = max(1, SCORES_PER_SLICE // (q.shape[0] * q.shape[1] * k.shape[2]))
    outs = []
    for start in range(0, q.shape[2], slice_length):
        rows = slice(start, start + slice_length)
        scores = (q[:, :, rows] @ k.transpose(2, 3)).float() * settings.scale
        if settings.softcap is not None:
            scores = torch.tanh(scores / settings.softcap) * settings.softcap
        if slopes is not None:
            scores -= _of_rows(slopes, rows) * _of_rows(mask.distance, rows)
        scores = scores.masked_fill(~_of_rows(mask.visible, rows), -torch.inf)
        if sinks is not None:
            shape = (*scores.shape[:3], 1)
            scores = torch.cat((scores, _of_rows(sinks, rows).expand(shape)), dim=-1)
        outs.append(scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v)
    return torch.cat(outs, dim=2)


def _of_rows(x: Tensor, rows: slice) -> Tensor:
    """Slice the queries dimension of (.., queries, ..), unless its size is 1: then it broadcasts."""
    return x if x.shape[-2] == 1 else x[..., rows, :]
