"""Paged attention on CUDA with flash-attn's kernels, from the flash-attn package or from PyTorch itself."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.paged_attention import PagedAttention, Settings, whole_rows
from nanoengine.backends.step_inputs import AttentionMetadata
from nanoengine.backends.triton_attention import write_kv

Metadata = AttentionMetadata[Tensor]


def split_decodes(meta: Metadata) -> tuple[Metadata, Metadata] | None:
    """Split a batch into its leading decodes and the chunks that follow.

    Returns None if the batch has only one of the two, or if no sequence has cached tokens. A single call
    would give each decode a grid as deep as the longest chunk needs, nearly all of it idle, and would not
    group a decode's query heads.
    """
    num = meta.num_leading_decodes
    if not meta.has_cached_tokens or not 0 < num < len(meta.seq_lens):
        return None
    decodes = meta._replace(
        cu_seqlens_q=meta.cu_seqlens_q[: num + 1],
        cu_seqlens_k=meta.cu_seqlens_k[: num + 1],
        seq_lens=meta.seq_lens[:num],
        block_tables=meta.block_tables[:num],
        max_query_len=1,
    )
    chunks = meta._replace(
        cu_seqlens_q=meta.cu_seqlens_q[num:] - num,
        cu_seqlens_k=meta.cu_seqlens_k[num:] - meta.cu_seqlens_k[num],
        seq_lens=meta.seq_lens[num:],
        block_tables=meta.block_tables[num:],
    )
    return decodes, chunks


class FlashKernels(PagedAttention):
    """Shares code between both sources of flash-attn's kernels: their limits, and writing K and V."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    block_multiple = 256
    capturable = True

    def __init__(self, metadata: Metadata, block_size: int, *, use_triton: bool = False) -> None:
        super().__init__(metadata, block_size)
        self._use_triton = self.is_placed = use_triton
        self._parts = split_decodes(metadata)

    @classmethod
    def obstacle(cls, specs: Sequence[KVSpec], settings: frozenset[str]) -> str | None:
        for _, k_head_dim, v_head_dim, dtype, _ in specs:
            if dtype not in cls.dtypes:
                return f"it computes in float16 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
            if k_head_dim != v_head_dim or k_head_dim % 8 or k_head_dim > 256:
                limits = "the same for K and V, a multiple of 8 and at most 256"
                return f"head_dim must be {limits}, not {k_head_dim} and {v_head_dim}"
        if missing := settings - cls.settings:
            return f"it does not support {', '.join(sorted(missing))}"
        return None  # whether the kernels exist is found out by trying them

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        if self._use_triton:
            write_kv(cache.k, cache.v, whole_rows(k), whole_rows(v), self.metadata.slot_mapping)
        else:
            super()._write(k, v, cache)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        if self._parts is None:
            return self._attend_to(self.metadata, q, k, v, cache, settings)
        queries = q.tensor_split([self.metadata.num_leading_decodes])
        parts = zip(self._parts, queries, strict=True)  # both read K and V from the cache
        return torch.cat([self._attend_to(meta, rows, k, v, cache, settings) for meta, rows in parts])

    @abstractmethod
    def _attend_to(
        self, meta: Metadata, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings
    ) -> Tensor:
        """Attend for the sequences in `meta`. If none of them has cached tokens, k and v hold all keys."""


class FlashAttention(FlashKernels):
    """Attends with the flash-attn package (FlashAttention-2), which reads the cache through block tables.

    Source: FlashAttention-2, https://arxiv.org/abs/2307.08691
    """

    name = "flash"
    settings = frozenset(("window", "softcap", "alibi_slopes"))

    def _attend_to(
        self, meta: Metadata, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings
    ) -> Tensor:
        import flash_attn  # an optional dependency

        how: dict[str, Any] = {
            "softmax_scale": settings.scale,
            "causal": True,
            "window_size": (-1, -1) if settings.window is None else (settings.window - 1, 0),
            "softcap": float(settings.softcap or 0),
            "alibi_slopes": settings.alibi_slopes,
            "block_table": meta.block_tables,
        }
        out: Tensor
        if meta.max_query_len == 1:
            how["cache_seqlens"] = meta.seq_lens
            out = flash_attn.flash_attn_with_kvcache(q.unsqueeze(1), cache.k, cache.v, **how)
            return out.squeeze(1)
        if meta.has_cached_tokens or k is cache.k:
            k, v = cache.k, cache.v
        else:  # k and v can be read without block tables
            how["block_table"] = None
        lens = meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_query_len, meta.max_seq_len
        out = flash_attn.flash_attn_varlen_func(q, k, v, *lens, **how)
        return out


class VarlenAttention(FlashKernels):
    """Attends with the same kernels as included in PyTorch (`torch.nn.attention.varlen`)."""

    name = "varlen"
    settings = frozenset(("window",))

    def _attend_to(
        self, meta: Metadata, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # new in PyTorch

        how: dict[str, Any] = {
            "scale": settings.scale,
            "window_size": (-1 if settings.window is None else settings.window - 1, 0),
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        if meta.has_cached_tokens or k is cache.k:
            k, v = cache.k, cache.v
            how |= {"seqused_k": meta.seq_lens, "block_table": meta.block_tables}
            if meta.max_query_len == 1 and how["enable_gqa"] and settings.window is None:
                # A decode sees all its keys, so it needs no mask. Without a mask, the kernel groups the query
                # heads of a KV head, and may split the keys.
                how["window_size"] = (-1, -1)
            else:
                # Otherwise the kernel would combine the splits of the first sequence only, and leave the
                # other rows unwritten: https://github.com/pytorch/pytorch/issues/194167
                how["num_splits"] = 1
        lens = meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_query_len, meta.max_seq_len
        out: Any = varlen_attn(q, k, v, *lens, **how)
        return out  # type: ignore[no-any-return]
