"""Paged attention: write a batch's keys and values into cache blocks, then attend over the blocks.

Four backends compute the same: `TorchAttention` (any device, and the one to read), `CompiledAttention` (a
CPU with a compiler), `FlashAttention` and `VarlenAttention` (CUDA: flash-attn's kernels, from the flash-attn
package or from PyTorch itself).

Shape letters: T tokens in the batch, S sequences, H query heads, K key/value heads, D head_dim (D' of
the values, where it differs), L cached tokens of a sequence (padded to whole blocks), B block_size.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.cpu import Kernels

# Sequences decoded in one padded call. Sorted by length, so that little of a group is padding.
DECODE_GROUP_SIZE = 16
# Prompt tokens whose scores are computed in one product by the CPU's kernels.
TILE_SIZE = 128
# Scores held at a time where SDPA cannot be used and they exist as a whole.
SCORES_PER_SLICE = 1 << 24


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where a flat batch's tokens belong: everything an attention backend needs besides q, k, v."""

    cu_seqlens_q: Tensor  # (S + 1,) int32  tokens of sequence i: [cu[i], cu[i + 1])
    cu_seqlens_k: Tensor  # (S + 1,) int32  the same over all they attend to: running sums of seq_lens
    seq_lens: Tensor  # (S,) int32  tokens of sequence i in the cache after this step's are written
    block_tables: Tensor  # (S, most blocks) int32  block ids, padded with the null block, 0
    slot_mapping: Tensor  # (T,) int64  cache slot that receives each token's K and V; < B: discard
    max_query_len: int  # known without asking the device, as is what follows
    max_seq_len: int
    is_fresh: bool  # no sequence has a past: all K and V they attend to are this batch's own


class KVSpec(NamedTuple):
    """What one layer stores per token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of K and V together."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype.itemsize


@dataclass(slots=True)
class KVCache:
    """One layer's cache, `(num_blocks, B, K, D)` and `(num_blocks, B, K, D')`; block 0 is the null block."""

    k: Tensor
    v: Tensor

    @classmethod
    def zeros(cls, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device) -> "KVCache":
        """A cache without content. Zeroed, so that no page of it is fetched from the system in a step."""
        shape = (num_blocks, block_size, spec.num_kv_heads)
        return cls(
            torch.zeros(*shape, spec.k_head_dim, dtype=spec.dtype, device=device),
            torch.zeros(*shape, spec.v_head_dim, dtype=spec.dtype, device=device),
        )


class _Settings(NamedTuple):
    """How a layer attends."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Sequences with one new token each, attended in a single padded call."""

    rows: Tensor  # (S',) int64  their rows in the flat batch
    block_tables: Tensor  # (S', blocks) int32
    seq_lens: Tensor  # (S',) int32
    padding: tuple[Tensor, ...]  # row and position of every slot behind a sequence's end


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A sequence with several new tokens: rows [start, end), the last at position seq_len - 1."""

    start: int
    end: int
    seq_len: int
    block_table: Tensor  # (blocks,) int32


class PagedAttention(ABC):
    """One step's causal attention over the paged cache.

    Built once per step from the metadata and called once per layer, so that what does not depend on
    the layer (grouping, block gathers' indices, masks) is prepared once.
    Source: PagedAttention, https://arxiv.org/abs/2309.06180
    """

    name: ClassVar[str]  # as attn_backend has it
    settings: ClassVar[frozenset[str]] = frozenset(("window", "softcap", "sinks"))  # that it can compute
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    block_multiple: ClassVar[int] = 1  # block_size has to be a multiple of this
    capturable: ClassVar[bool] = False  # whether a CUDA graph can hold it: it asks the device for nothing

    def __init__(self, metadata: AttentionMetadata, block_size: int) -> None:
        self.metadata = metadata

    @classmethod
    def obstacle(cls, specs: Sequence[KVSpec], settings: frozenset[str]) -> str | None:
        """Why it cannot compute layers that store `specs` and ask for `settings`; None: it can."""
        return None

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
    ) -> Tensor:
        """Write k and v into their slots, then attend from each token to its sequence's past.

        The whole batch is written before anything is read, so a sequence may attend to blocks that
        another sequence fills in this very step.

        Shapes:
            q (T, H, D); k (T, K, D); v (T, K, D'), H a multiple of K.
            window: how many positions back, itself included, a token sees; None is all.
            softcap: scores are bounded to (-softcap, softcap) by a tanh; None is no bound (Gemma 2).
            sinks: (H,), a score per head that takes its share of the softmax and has no value (gpt-oss).

        Returns:
            (T, H, D'), dtype of q.
        """
        self._write(k, v, cache)
        settings = _Settings(scale, window, softcap, None if sinks is None else sinks.float())
        return self._attend(q.contiguous(), k, v, cache, settings)

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        # Copies land in the null block where slot_mapping says to discard; nothing ever reads it.
        cache.k.view(-1, *k.shape[1:]).index_copy_(0, self.metadata.slot_mapping, k)
        cache.v.view(-1, *v.shape[1:]).index_copy_(0, self.metadata.slot_mapping, v)

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: _Settings) -> Tensor:
        """Attention over the cache, which holds k and v already."""


class TorchAttention(PagedAttention):
    """In plain PyTorch, on any device."""

    name = "torch"

    def __init__(self, metadata: AttentionMetadata, block_size: int) -> None:
        super().__init__(metadata, block_size)
        self._masks: dict[object, Tensor] = {}
        starts = metadata.cu_seqlens_q[:-1].long()
        query_lens = metadata.cu_seqlens_q.diff()
        decodes = (query_lens == 1).nonzero().squeeze(1)
        tables, seq_lens = metadata.block_tables, metadata.seq_lens
        self._prepare_decodes(starts[decodes], tables[decodes], seq_lens[decodes], block_size)
        self._chunks: list[_Chunk] = []
        for i in (query_lens > 1).nonzero().squeeze(1).tolist():
            start, length, seq_len = int(starts[i]), int(query_lens[i]), int(seq_lens[i])
            table = tables[i, : -(-seq_len // block_size)]
            self._chunks.append(_Chunk(start, start + length, seq_len, table))

    def _prepare_decodes(self, rows: Tensor, tables: Tensor, seq_lens: Tensor, block_size: int) -> None:
        """Group the sequences that have one new token: their rows, block tables and lengths."""
        self._groups: list[_DecodeGroup] = []
        order = seq_lens.argsort()
        for group in torch.split(order, DECODE_GROUP_SIZE) if len(order) else ():
            num_blocks = -(-int(seq_lens[group[-1]]) // block_size)
            positions = torch.arange(num_blocks * block_size, device=group.device)
            padding = (positions >= seq_lens[group].unsqueeze(1)).nonzero(as_tuple=True)
            group_tables = tables[group, :num_blocks]
            self._groups.append(_DecodeGroup(rows[group], group_tables, seq_lens[group], padding))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: _Settings) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        self._decodes(out, q, cache, settings)
        for chunk in self._chunks:
            out[chunk.start : chunk.end] = self._chunk(chunk, q[chunk.start : chunk.end], cache, settings)
        return out

    def _decodes(self, out: Tensor, q: Tensor, cache: KVCache, settings: _Settings) -> None:
        for group in self._groups:
            out[group.rows] = self._decode(group, q[group.rows], cache, settings)

    def _decode(self, group: _DecodeGroup, q: Tensor, cache: KVCache, settings: _Settings) -> Tensor:
        num_seqs, num_heads, head_dim = q.shape
        k, v = (x[group.block_tables].flatten(1, 2) for x in (cache.k, cache.v))  # (S', L, K, D)
        # A mask alone would not do: behind a sequence's end there may be NaN that another one left.
        k[group.padding], v[group.padding] = 0, 0
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        num_kv_heads = k.shape[1]
        key = (group, settings.window)
        if key not in self._masks:
            distance = group.seq_lens.unsqueeze(1) - 1 - torch.arange(k.shape[2], device=q.device)
            self._masks[key] = _visible(distance, settings.window)[:, None, None]  # (S', 1, 1, L)
        # The query heads that share a KV head take the place of query positions.
        folded = q.reshape(num_seqs, num_kv_heads, -1, head_dim)
        sinks = None if settings.sinks is None else settings.sinks.view(1, num_kv_heads, -1, 1)
        out = _scaled_dot_product(folded, k, v, self._masks[key], settings, sinks)
        return out.reshape(num_seqs, num_heads, -1)

    def _chunk(self, chunk: _Chunk, q: Tensor, cache: KVCache, settings: _Settings) -> Tensor:
        length, num_heads, head_dim = q.shape
        k = cache.k[chunk.block_table].flatten(0, 1)[: chunk.seq_len].transpose(0, 1)  # (K, L, D)
        v = cache.v[chunk.block_table].flatten(0, 1)[: chunk.seq_len].transpose(0, 1)
        num_kv_heads, group_size = k.shape[0], num_heads // k.shape[0]
        mask = None
        plain = settings.window is None and settings.softcap is None and settings.sinks is None
        if length < chunk.seq_len or not plain:
            key = (chunk.start, settings.window)
            if key not in self._masks:
                positions = torch.arange(chunk.seq_len, device=q.device)
                distance = positions[-length:].unsqueeze(1) - positions
                self._masks[key] = _visible(distance, settings.window)  # (length, L)
            mask = self._masks[key]
        # KV heads are the batch; the query heads that share one are SDPA's heads, K and V expanded.
        out = _scaled_dot_product(
            q.reshape(length, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3),
            k.unsqueeze(1).expand(-1, group_size, -1, -1),
            v.unsqueeze(1).expand(-1, group_size, -1, -1),
            mask,
            settings,
            None if settings.sinks is None else settings.sinks.view(num_kv_heads, group_size, 1, 1),
        )
        return out.permute(2, 0, 1, 3).reshape(length, num_heads, -1)


class CompiledAttention(TorchAttention):
    """On a CPU with compiled kernels: decodes read the cache in place, chunks go tile by tile."""

    name = "compiled"
    devices = ("cpu",)

    def __init__(self, metadata: AttentionMetadata, block_size: int, kernels: Kernels) -> None:
        super().__init__(metadata, block_size)
        self._kernels = kernels

    def _prepare_decodes(self, rows: Tensor, tables: Tensor, seq_lens: Tensor, block_size: int) -> None:
        self._decode_sequences = tables, seq_lens, rows

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        self._kernels.write_kv(cache.k, cache.v, _whole_rows(k), _whole_rows(v), self.metadata.slot_mapping)

    def _decodes(self, out: Tensor, q: Tensor, cache: KVCache, settings: _Settings) -> None:
        sequences = self._decode_sequences
        self._kernels.decode_attention(out, q, cache.k, cache.v, *sequences, **settings._asdict())

    def _chunk(self, chunk: _Chunk, q: Tensor, cache: KVCache, settings: _Settings) -> Tensor:
        length, num_heads, head_dim = q.shape
        first = chunk.seq_len - length  # the first query's position
        low = 0 if settings.window is None else max(0, first + 1 - settings.window)  # the first key's
        k, v = (self._kernels.gather(x, chunk.block_table, low, chunk.seq_len) for x in (cache.k, cache.v))
        num_kv_heads = k.shape[0]
        heads = q.view(length, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # (K, H / K, length, D)
        outs = []
        for start in range(0, length, TILE_SIZE):
            tile = heads[:, :, start : start + TILE_SIZE].flatten(1, 2)
            num_keys = first + min(start + TILE_SIZE, length) - low  # the last query of the tile sees these
            scores = torch.bmm(tile, k[:, :num_keys].transpose(1, 2))
            shaped = scores.view(num_heads, -1, num_keys)
            self._kernels.causal_softmax(shaped, first + start, low, **settings._asdict())
            outs.append(torch.bmm(scores, v[:, :num_keys]).view(num_heads, -1, v.shape[2]))
        return torch.cat(outs, dim=1).transpose(0, 1)


class FlashAttention(PagedAttention):
    """On CUDA by the flash-attn package (FlashAttention-2), which reads the cache through block tables.

    Source: FlashAttention-2, https://arxiv.org/abs/2307.08691
    """

    name = "flash"
    settings = frozenset(("window", "softcap"))
    devices = ("cuda",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    block_multiple = 256
    capturable = True

    def __init__(self, metadata: AttentionMetadata, block_size: int) -> None:
        super().__init__(metadata, block_size)
        import flash_attn  # an extra: not everyone has it

        self._flash = flash_attn

    @classmethod
    def obstacle(cls, specs: Sequence[KVSpec], settings: frozenset[str]) -> str | None:
        """As in the base class."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            return "it needs a GPU of the Ampere generation or later"
        for _, k_head_dim, v_head_dim, dtype in specs:
            if dtype not in cls.dtypes:
                return f"it computes in float16 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
            if k_head_dim != v_head_dim or k_head_dim % 8 or k_head_dim > 256:
                return (
                    "head_dim must be the same for K and V, a multiple of 8 and at most 256, "
                    f"not {k_head_dim} and {v_head_dim}"
                )
        if missing := settings - cls.settings:
            return f"it does not compute {', '.join(sorted(missing))}"
        return cls._cannot_import()

    @classmethod
    def _cannot_import(cls) -> str | None:
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:  # missing, or built for another PyTorch
            return f"flash-attn cannot be imported: {error}"
        return None

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        from nanoengine import cuda  # loads Triton, where there is one

        if cuda.has_triton(k.device):
            cuda.write_kv(cache.k, cache.v, _whole_rows(k), _whole_rows(v), self.metadata.slot_mapping)
        else:
            super()._write(k, v, cache)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: _Settings) -> Tensor:
        meta = self.metadata
        how: dict[str, Any] = {
            "softmax_scale": settings.scale,
            "causal": True,
            "window_size": (-1, -1) if settings.window is None else (settings.window - 1, 0),
            "softcap": float(settings.softcap or 0),
        }
        if meta.max_query_len == 1:
            out: Tensor = self._flash.flash_attn_with_kvcache(
                q.unsqueeze(1),
                cache.k,
                cache.v,
                cache_seqlens=meta.seq_lens,
                block_table=meta.block_tables,
                **how,
            )
            return out.squeeze(1)
        # Prompts from their beginning need no detour through their blocks.
        k, v, table = (k, v, None) if meta.is_fresh else (cache.k, cache.v, meta.block_tables)
        out = self._flash.flash_attn_varlen_func(
            q,
            k,
            v,
            meta.cu_seqlens_q,
            meta.cu_seqlens_k,
            meta.max_query_len,
            meta.max_seq_len,
            block_table=table,
            **how,
        )
        return out


class VarlenAttention(FlashAttention):
    """On CUDA by the same kernels as PyTorch carries them (`torch.nn.attention.varlen`)."""

    name = "varlen"
    settings = frozenset(("window",))

    def __init__(self, metadata: AttentionMetadata, block_size: int) -> None:
        PagedAttention.__init__(self, metadata, block_size)
        from torch.nn.attention import varlen

        self._varlen = varlen

    @classmethod
    def _cannot_import(cls) -> str | None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return f"PyTorch {torch.__version__} has no varlen_attn"
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            return f"varlen_attn of PyTorch {torch.__version__} takes no block table"
        return None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: _Settings) -> Tensor:
        meta = self.metadata
        paged: dict[str, Any] = {}
        if not meta.is_fresh:
            k, v, paged = cache.k, cache.v, {"seqused_k": meta.seq_lens, "block_table": meta.block_tables}
        out: Any = self._varlen.varlen_attn(
            q,
            k,
            v,
            meta.cu_seqlens_q,
            meta.cu_seqlens_k,
            meta.max_query_len,
            meta.max_seq_len,
            scale=settings.scale,
            window_size=(-1 if settings.window is None else settings.window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[-2],
            **paged,
        )
        return out  # type: ignore[no-any-return]


# The fastest first.
BACKENDS: tuple[type[PagedAttention], ...] = (
    FlashAttention,
    VarlenAttention,
    CompiledAttention,
    TorchAttention,
)


def _whole_rows(x: Tensor) -> Tensor:
    """Keys or values (T, K, D) with each token's numbers in one piece; tokens themselves may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: _Settings, sinks: Tensor | None
) -> Tensor:
    """Attention of (.., .., queries, D) over (.., .., L, D); no mask is causal; sinks broadcast to scores."""
    if settings.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=settings.scale
        )
    assert mask is not None
    # What SDPA cannot do is done a slice of the queries at a time, so that the scores stay small.
    slice_length = max(1, SCORES_PER_SLICE // (q.shape[0] * q.shape[1] * k.shape[2]))
    outs = []
    for start in range(0, q.shape[2], slice_length):
        scores = (q[:, :, start : start + slice_length] @ k.transpose(2, 3)).float() * settings.scale
        if settings.softcap is not None:
            scores = torch.tanh(scores / settings.softcap) * settings.softcap
        rows = mask if mask.shape[-2] == 1 else mask[..., start : start + slice_length, :]
        scores = scores.masked_fill(~rows, -torch.inf)
        if sinks is not None:
            shape = (*scores.shape[:3], 1)
            part = sinks if sinks.shape[2] == 1 else sinks[:, :, start : start + slice_length]
            scores = torch.cat((scores, part.float().expand(shape)), dim=-1)
        outs.append(scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v)
    return torch.cat(outs, dim=2)


def _visible(distance: Tensor, window: int | None) -> Tensor:
    """Whether a key `distance` positions back is visible: not in the future, and inside the window.

    >>> _visible(torch.tensor([2, 1, 0, -1]), window=2).tolist()
    [False, True, True, False]
    """
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
