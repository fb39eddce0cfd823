"""Paged attention in plain PyTorch, through block tables. Shape letters are as in paged_attention.py."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.backends.int8_cache import dequantize, quantize
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.paged_attention import PagedAttention, QueryChunk, Settings, split_batch
from nanoengine.backends.step_inputs import AttentionMetadata

# How many sequences one padded call decodes. They are sorted by length first, to keep the padding small.
DECODE_GROUP_SIZE = 16
# About how many attention scores to hold in memory at a time when SDPA cannot be used.
SCORES_PER_SLICE = 1 << 24


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


class TorchAttention(PagedAttention):
    """Attends in plain PyTorch, on any device."""

    name = "torch"

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int) -> None:
        super().__init__(metadata, block_size)
        self._masks: dict[object, _Mask] = {}
        (tables, seq_lens, rows), self._chunks = split_batch(metadata, block_size)
        self._groups: list[_DecodeGroup] = []
        order = seq_lens.argsort()
        for group in torch.split(order, DECODE_GROUP_SIZE) if len(order) else ():
            num_blocks = -(-int(seq_lens[group[-1]]) // block_size)
            positions = torch.arange(num_blocks * block_size, device=group.device)
            group_tables = tables[group, :num_blocks]
            is_null = (group_tables == 0).repeat_interleave(block_size, dim=1)
            padding = ((positions >= seq_lens[group].unsqueeze(1)) | is_null).nonzero(as_tuple=True)
            self._groups.append(_DecodeGroup(rows[group], group_tables, seq_lens[group], padding))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for group in self._groups:
            out[group.rows] = self._decode(group, q[group.rows], cache, settings)
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.end)
            self._chunk(out[rows], chunk, q[rows], cache, settings)
        return out

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


class Int8Attention(TorchAttention):
    """Attends in plain PyTorch, over K and V that are dequantized first."""

    stored = staticmethod(quantize)

    def _read(self, cache: KVCache, block_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return dequantize(cache.k[block_ids], dtype), dequantize(cache.v[block_ids], dtype)


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
