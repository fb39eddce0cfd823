"""Paged attention: write a batch's keys and values into cache blocks, then attend over the blocks.

Here is the backend to read, in plain PyTorch, which runs on any device. Those that are fast compute the same:
`cpu.attention.CompiledAttention` with kernels of our own, `flash.FlashAttention` and `flash.VarlenAttention`
with flash-attn's kernels on CUDA, from the flash-attn package or from PyTorch itself, and
`triton.TritonAttention` with Triton kernels of our own.

Shape letters: T tokens in the batch, S sequences, H query heads, K key/value heads, D head_dim (D' of
the values, where it differs), L cached tokens of a sequence (padded to whole blocks), B block_size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.backends.inputs import AttentionMetadata
from nanoengine.backends.kv_cache import KVCache, KVSpec

# Sequences decoded in one padded call. Sorted by length, so that little of a group is padding.
DECODE_GROUP_SIZE = 16
# Scores held at a time where SDPA cannot be used and they exist as a whole.
SCORES_PER_SLICE = 1 << 24


class Settings(NamedTuple):
    """How a layer attends."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None = None

    def for_heads(self, *shape: int) -> "Settings":
        """With what there is of each head in that shape."""
        sinks, slopes = (None if x is None else x.view(shape) for x in (self.sinks, self.alibi_slopes))
        return self._replace(sinks=sinks, alibi_slopes=slopes)


class _Mask(NamedTuple):
    """Of queries and keys, broadcast to scores: how many positions apart they are, and who sees whom."""

    distance: Tensor
    visible: Tensor

    @classmethod
    def of(cls, distance: Tensor, window: int | None) -> "_Mask":
        """What is not in the future, and inside the window, is visible.

        >>> _Mask.of(torch.tensor([2, 1, 0, -1]), window=2).visible.tolist()
        [False, True, True, False]
        """
        visible = distance >= 0
        return cls(distance, visible if window is None else visible & (distance < window))


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Sequences with one new token each, attended in a single padded call."""

    rows: Tensor  # (S',) int64  their rows in the flat batch
    block_tables: Tensor  # (S', blocks) int32
    seq_lens: Tensor  # (S',) int32
    padding: tuple[Tensor, ...]  # row and position of every slot behind its end or in the null block


@dataclass(frozen=True, slots=True, eq=False)
class QueryChunk:
    """A sequence with several new tokens: rows [start, end), the last at position seq_len - 1."""

    start: int
    end: int
    seq_len: int
    first: int  # the first position that is not in the null block
    block_table: Tensor  # (blocks,) int32


class PagedAttention(ABC):
    """One step's causal attention over the paged cache.

    Built once per step from the metadata and called once per layer, so that what does not depend on
    the layer (grouping, block gathers' indices, masks) is prepared once.
    Source: PagedAttention, https://arxiv.org/abs/2309.06180
    """

    name: ClassVar[str]  # as attn_backend has it
    # Those that it can compute.
    settings: ClassVar[frozenset[str]] = frozenset(("window", "softcap", "sinks", "alibi_slopes"))
    block_multiple: ClassVar[int] = 1  # block_size has to be a multiple of this
    capturable: ClassVar[bool] = False  # whether a CUDA graph can hold it: it asks the device for nothing

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int) -> None:
        self.metadata = metadata
        self.block_size = block_size

    @classmethod
    def obstacle(cls, specs: Sequence[KVSpec], settings: frozenset[str]) -> str | None:
        """Why it cannot compute layers that store `specs` and ask for `settings`; None: it can."""
        return None

    @classmethod
    def try_out(
        cls, specs: Sequence[KVSpec], settings: frozenset[str], block_size: int, device: torch.device
    ) -> str | None:
        """Why it cannot compute such layers on that device after all, found by attending; None: it can.

        To values that are all one, so that the results are. Prompts, chunks beside decodes, and decodes by
        themselves: a backend may have kernels of its own for each.
        """
        for spec in dict.fromkeys(specs):
            for query_lens, seq_lens in (((2, 1), (2, 1)), ((1, 2), (3, 3)), ((1, 1), (2, 1))):
                try:
                    out = cls._attend_to_ones(spec, settings, block_size, device, query_lens, seq_lens)
                except Exception as error:  # no such kernel, no C compiler, too little shared memory, ...
                    reason = str(error).strip().partition("\n")[0]
                    return f"it fails here: {type(error).__name__}: {reason}"
                if not bool((out - 1).abs().max() < 0.01):
                    return "it computes wrong numbers here"
        return None

    @classmethod
    def _attend_to_ones(
        cls,
        spec: KVSpec,
        settings: frozenset[str],
        block_size: int,
        device: torch.device,
        query_lens: tuple[int, int],
        seq_lens: tuple[int, int],
    ) -> Tensor:
        """Of two sequences, each in a block, with room for more keys than a kernel leaves undivided."""
        width, num_heads = -(-4096 // block_size), spec.num_kv_heads
        tables = torch.zeros(2, width, dtype=torch.int32)
        tables[:, 0] = torch.tensor([1, 2])
        new = [range(total - length, total) for length, total in zip(query_lens, seq_lens, strict=True)]
        slots = [(1 + i) * block_size + position for i in (0, 1) for position in new[i]]
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in (query_lens, seq_lens)
        )
        metadata = AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q.to(device),
            cu_seqlens_k=cu_seqlens_k.to(device),
            seq_lens=cu_seqlens_k.diff().to(device),
            block_tables=tables.to(device),
            slot_mapping=torch.tensor(slots, device=device),
            max_query_len=max(query_lens),
            max_seq_len=width * block_size,
            has_cached_tokens=query_lens != seq_lens,
            num_leading_decodes=sum(length == 1 for length in query_lens) if query_lens[0] == 1 else 0,
        )
        cache = KVCache.zeros(spec, 3, block_size, device)
        cache.v.fill_(1)
        k = torch.zeros(len(slots), num_heads, spec.k_head_dim, dtype=spec.dtype, device=device)
        v = torch.ones(len(slots), num_heads, spec.v_head_dim, dtype=spec.dtype, device=device)
        return cls(metadata, block_size)(
            *(k, k, v, cache),
            scale=1.0,
            window=2 if "window" in settings else None,
            softcap=1.0 if "softcap" in settings else None,
            sinks=torch.full((num_heads,), -torch.inf, device=device) if "sinks" in settings else None,
            alibi_slopes=torch.ones(num_heads, device=device) if "alibi_slopes" in settings else None,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Write k and v into their slots, then attend from each token to its sequence's past.

        The whole batch is written before anything is read, so a sequence may attend to blocks that
        another sequence fills in this very step.

        Shapes:
            q (T, H, D); k (T, K, D); v (T, K, D'), H a multiple of K.
            window: how many positions back, itself included, a token sees; None is all.
            softcap: scores are bounded to (-softcap, softcap) by a tanh; None is no bound (Gemma 2).
            sinks: (H,), a score per head that takes its share of the softmax and has no value (gpt-oss).
            alibi_slopes: (H,) float32, what a score loses per position between query and key (Bloom).

        Returns:
            (T, H, D'), dtype of q.
        """
        self._write(k, v, cache)
        settings = Settings(scale, window, softcap, None if sinks is None else sinks.float(), alibi_slopes)
        return self._attend(q.contiguous(), k, v, cache, settings)

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        # Copies land in the null block where slot_mapping says to discard; nothing ever reads it.
        cache.k.view(-1, *k.shape[1:]).index_copy_(0, self.metadata.slot_mapping, k)
        cache.v.view(-1, *v.shape[1:]).index_copy_(0, self.metadata.slot_mapping, v)

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        """Attention over the cache, which holds k and v already."""


class GroupedAttention:
    """A `PagedAttention` per KV cache group, for a model that calls it as if there were one."""

    def __init__(self, groups: Sequence[PagedAttention]) -> None:
        self.groups = groups

    @classmethod
    def of(
        cls,
        build: Callable[[AttentionMetadata[Tensor], int], Any],
        metadata: AttentionMetadata[Tensor],
        block_size: int,
    ) -> "GroupedAttention":
        """One step's, of which each group has block_tables[group] and slot_mapping[group]."""
        pairs = zip(metadata.block_tables, metadata.slot_mapping, strict=True)
        return cls(
            [
                build(metadata._replace(block_tables=tables, slot_mapping=slots), block_size)
                for tables, slots in pairs
            ]
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, **settings: Any) -> Tensor:
        """By the attention that knows the block tables of the cache's group."""
        return self.groups[cache.group](q, k, v, cache, **settings)


# Makes one step's attention from its metadata and block_size.
BuildAttention = Callable[[AttentionMetadata[Tensor], int], PagedAttention | GroupedAttention]


class TorchAttention(PagedAttention):
    """In plain PyTorch, on any device."""

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
        """Group the sequences that have one new token: their rows, block tables and lengths."""
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

    def _decode(self, group: _DecodeGroup, q: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        num_seqs, num_heads, head_dim = q.shape
        k, v = (x[group.block_tables].flatten(1, 2) for x in (cache.k, cache.v))  # (S', L, K, D)
        # A mask alone would not do: there may be NaN that another sequence left.
        k[group.padding], v[group.padding] = 0, 0
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        num_kv_heads = k.shape[1]
        key = (group, settings.window)
        if key not in self._masks:
            distance = group.seq_lens.unsqueeze(1) - 1 - torch.arange(k.shape[2], device=q.device)
            self._masks[key] = _Mask.of(distance[:, None, None], settings.window)  # (S', 1, 1, L)
        # The query heads that share a KV head take the place of query positions.
        folded = q.reshape(num_seqs, num_kv_heads, -1, head_dim)
        settings = settings.for_heads(1, num_kv_heads, -1, 1)
        out = _scaled_dot_product(folded, k, v, self._masks[key], settings)
        return out.reshape(num_seqs, num_heads, -1)

    def _chunk(self, out: Tensor, chunk: QueryChunk, q: Tensor, cache: KVCache, settings: Settings) -> None:
        length, num_heads, head_dim = q.shape
        table = chunk.block_table[chunk.first // self.block_size :]
        num_keys = chunk.seq_len - chunk.first
        k, v = (x[table].flatten(0, 1)[:num_keys].transpose(0, 1) for x in (cache.k, cache.v))  # (K, L, D)
        num_kv_heads, group_size = k.shape[0], num_heads // k.shape[0]
        mask = None
        is_plain = all(x is None for x in settings[1:])
        if length < num_keys or not is_plain:
            key = (chunk.start, settings.window)
            if key not in self._masks:
                positions = torch.arange(num_keys, dtype=torch.int32, device=q.device)
                distance = positions[-length:].unsqueeze(1) - positions
                self._masks[key] = _Mask.of(distance, settings.window)  # (length, L)
            mask = self._masks[key]
        # KV heads are the batch; the query heads that share one are SDPA's heads, K and V expanded.
        attended = _scaled_dot_product(
            q.reshape(length, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3),
            k.unsqueeze(1).expand(-1, group_size, -1, -1),
            v.unsqueeze(1).expand(-1, group_size, -1, -1),
            mask,
            settings.for_heads(num_kv_heads, group_size, 1, 1),
        )
        out.view(length, num_kv_heads, group_size, -1).copy_(attended.permute(2, 0, 1, 3))


def whole_rows(x: Tensor) -> Tensor:
    """Keys or values (T, K, D) with each token's numbers in one piece; tokens themselves may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: _Mask | None, settings: Settings) -> Tensor:
    """Attention of (.., .., queries, D) over (.., .., L, D); no mask is causal; settings fit the scores."""
    sinks, slopes = settings.sinks, settings.alibi_slopes
    if settings.softcap is None and sinks is None and slopes is None:
        visible = None if mask is None else mask.visible
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=mask is None, scale=settings.scale
        )
    assert mask is not None
    # What SDPA cannot do is done a slice of the queries at a time, so that the scores stay small.
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
    """Some rows of (.., queries, ..), which may be one for all queries."""
    return x if x.shape[-2] == 1 else x[..., rows, :]
