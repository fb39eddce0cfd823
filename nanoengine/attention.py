"""Paged attention: write a batch's keys and values into cache blocks, then attend over the blocks.

Shape letters: T tokens in the batch, S sequences, H query heads, K key/value heads, D head_dim,
L cached tokens of a sequence (padded to a whole number of blocks), B block_size.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

# Sequences decoded in one padded call. Sorted by length, so that little of a group is padding.
DECODE_GROUP_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where a flat batch's tokens belong: everything an attention backend needs besides q, k, v."""

    cu_seqlens_q: Tensor  # (S + 1,) int32  tokens of sequence i: [cu[i], cu[i + 1])
    seq_lens: Tensor  # (S,) int32  tokens of sequence i in the cache after this step's are written
    block_tables: Tensor  # (S, most blocks) int32  block ids, padded with the null block, 0
    slot_mapping: Tensor  # (T,) int64  cache slot that receives each token's K and V; < B: discard


@dataclass(slots=True)
class KVCache:
    """One layer's cache, `(num_blocks, block_size, K, D)` each; block 0 is the null block."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Sequences with one new token each, attended in a single padded call."""

    rows: Tensor  # (S',) int64  their rows in the flat batch
    block_tables: Tensor  # (S', blocks) int64
    seq_lens: Tensor  # (S',) int64
    padding: tuple[Tensor, ...]  # row and position of every slot behind a sequence's end


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A sequence with several new tokens: rows [start, end), the last at position seq_len - 1."""

    start: int
    end: int
    seq_len: int
    block_table: Tensor  # (blocks,) int64


@dataclass(slots=True)
class PagedAttention:
    """One step's causal attention over the paged cache, in plain PyTorch, on any device.

    Built once per step from the metadata and called once per layer, so that what does not depend on
    the layer (grouping, block gathers' indices, masks) is prepared once.
    Source: PagedAttention, https://arxiv.org/abs/2309.06180
    """

    metadata: AttentionMetadata
    block_size: int
    _groups: list[_DecodeGroup] = field(init=False)
    _chunks: list[_Chunk] = field(init=False)
    _masks: dict[object, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Split the batch into decode groups and chunks."""
        meta = self.metadata
        starts = meta.cu_seqlens_q[:-1].long()
        query_lens = meta.cu_seqlens_q.diff()
        seq_lens, tables = meta.seq_lens.long(), meta.block_tables.long()
        decodes = (query_lens == 1).nonzero().squeeze(1)
        decodes = decodes[seq_lens[decodes].argsort()]
        self._groups = []
        for group in torch.split(decodes, DECODE_GROUP_SIZE) if len(decodes) else ():
            num_blocks = -(-int(seq_lens[group[-1]]) // self.block_size)
            positions = torch.arange(num_blocks * self.block_size, device=group.device)
            padding = (positions >= seq_lens[group].unsqueeze(1)).nonzero(as_tuple=True)
            group_tables = tables[group, :num_blocks]
            self._groups.append(_DecodeGroup(starts[group], group_tables, seq_lens[group], padding))
        self._chunks = []
        for i in (query_lens > 1).nonzero().squeeze(1).tolist():
            start, length, seq_len = int(starts[i]), int(query_lens[i]), int(seq_lens[i])
            table = tables[i, : -(-seq_len // self.block_size)]
            self._chunks.append(_Chunk(start, start + length, seq_len, table))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, scale: float, window: int | None = None
    ) -> Tensor:
        """Write k and v into their slots, then attend from each token to its sequence's past.

        The whole batch is written before anything is read, so a sequence may attend to blocks that
        another sequence fills in this very step.

        Shapes:
            q (T, H, D); k, v (T, K, D), H a multiple of K.
            window: how many positions back, itself included, a token sees; None is all.

        Returns:
            (T, H, D), dtype of q.
        """
        # Copies land in the null block where slot_mapping says to discard; nothing ever reads it.
        cache.k.view(-1, *k.shape[1:]).index_copy_(0, self.metadata.slot_mapping, k)
        cache.v.view(-1, *v.shape[1:]).index_copy_(0, self.metadata.slot_mapping, v)
        out = torch.empty_like(q)
        for group in self._groups:
            out[group.rows] = self._decode(group, q[group.rows], cache, scale, window)
        for chunk in self._chunks:
            out[chunk.start : chunk.end] = self._chunk(chunk, q, cache, scale, window)
        return out

    def _decode(
        self, group: _DecodeGroup, q: Tensor, cache: KVCache, scale: float, window: int | None
    ) -> Tensor:
        num_seqs, num_heads, head_dim = q.shape
        k, v = (x[group.block_tables].flatten(1, 2) for x in (cache.k, cache.v))  # (S', L, K, D)
        # A mask alone would not do: behind a sequence's end there may be NaN that another one left.
        k[group.padding], v[group.padding] = 0, 0
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        key = (group, window)
        if key not in self._masks:
            distance = group.seq_lens.unsqueeze(1) - 1 - torch.arange(k.shape[2], device=q.device)
            self._masks[key] = _visible(distance, window)[:, None, None]  # (S', 1, 1, L)
        # The query heads that share a KV head take the place of query positions.
        folded = q.view(num_seqs, k.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=self._masks[key], scale=scale)
        return out.reshape(num_seqs, num_heads, head_dim)

    def _chunk(self, chunk: _Chunk, q: Tensor, cache: KVCache, scale: float, window: int | None) -> Tensor:
        q = q[chunk.start : chunk.end]
        length, num_heads, head_dim = q.shape
        k = cache.k[chunk.block_table].flatten(0, 1)[: chunk.seq_len].transpose(0, 1)  # (K, L, D)
        v = cache.v[chunk.block_table].flatten(0, 1)[: chunk.seq_len].transpose(0, 1)
        group_size = num_heads // k.shape[0]
        mask = None
        if length < chunk.seq_len or window is not None:
            key = (chunk.start, window)
            if key not in self._masks:
                positions = torch.arange(chunk.seq_len, device=q.device)
                distance = positions[-length:].unsqueeze(1) - positions
                self._masks[key] = _visible(distance, window)  # (length, L)
            mask = self._masks[key]
        # KV heads are the batch; the query heads that share one are SDPA's heads, K and V expanded.
        out = F.scaled_dot_product_attention(
            q.view(length, k.shape[0], group_size, head_dim).permute(1, 2, 0, 3),
            k.unsqueeze(1).expand(-1, group_size, -1, -1),
            v.unsqueeze(1).expand(-1, group_size, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        return out.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)


def _visible(distance: Tensor, window: int | None) -> Tensor:
    """Whether a key `distance` positions back is visible: not in the future, and inside the window.

    >>> _visible(torch.tensor([2, 1, 0, -1]), window=2).tolist()
    [False, True, True, False]
    """
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
