"""Paged attention with the compiled kernels."""

import functools

import torch
from torch import Tensor

from nanoengine.backends.cpu.kernels import Kernels, as_int64
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.paged_attention import PagedAttention, QueryChunk, Settings, split_batch, whole_rows
from nanoengine.backends.step_inputs import AttentionMetadata


class CompiledAttention(PagedAttention):
    """Attends on a CPU with the compiled kernels, which read K and V through the block tables."""

    name = "compiled"

    def __init__(self, metadata: AttentionMetadata[Tensor], block_size: int, kernels: Kernels) -> None:
        super().__init__(metadata, block_size)
        self._kernels = kernels
        self._decodes, self._chunks = split_batch(metadata, block_size)
        self._described: list[object] = []  # keeps the tensors alive that the descriptions point to

    @functools.cached_property
    def description(self) -> Tensor:
        """The step as the kernel for a whole layer reads it: a `Batch` of kernels.cpp."""
        return self._describe(self._decodes, self._chunks, None)

    @functools.cached_property
    def needed_rows(self) -> Tensor | None:
        """The rows whose hidden states are used, from the metadata; None: all."""
        rows = self.metadata.needed_rows
        is_all = rows is None or len(rows) == len(self.metadata.slot_mapping)
        return None if is_all else torch.from_numpy(rows)

    @functools.cached_property
    def last_description(self) -> Tensor:
        """The step for the last layer, which computes only K and V for rows that are not needed."""
        assert self.needed_rows is not None
        ends = self.metadata.cu_seqlens_q.long()
        counts = torch.searchsorted(self.needed_rows, ends).diff()
        tables, seq_lens, rows = self.metadata.block_tables, self.metadata.seq_lens, ends[1:] - 1
        decodes = tuple(of_sequences[counts == 1] for of_sequences in (tables, seq_lens, rows))
        chunks = [x for x, n in zip(self._chunks, counts[ends.diff() > 1].tolist(), strict=True) if n > 1]
        return self._describe(decodes, chunks, self.needed_rows)

    def _describe(
        self, decodes: tuple[Tensor, ...], chunks: list[QueryChunk], needed_rows: Tensor | None
    ) -> Tensor:
        of_chunks = as_int64([x for c in chunks for x in (c.start, c.end, c.seq_len, c.block_table)])
        self._described += of_chunks, decodes
        sizes = *decodes[0].shape, self.block_size, len(chunks)
        slots = self.metadata.slot_mapping
        num_needed = len(slots if needed_rows is None else needed_rows)
        return as_int64((slots, *decodes, *sizes, of_chunks, needed_rows, num_needed))

    def _write(self, k: Tensor, v: Tensor, cache: KVCache) -> None:
        self._kernels.write_kv(cache.k, cache.v, whole_rows(k), whole_rows(v), self.metadata.slot_mapping)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, settings: Settings) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        self._kernels.decode_attention(out, q, cache, self._decodes, settings)
        for chunk in self._chunks:
            sequence = chunk.block_table, chunk.seq_len
            rows = slice(chunk.start, chunk.end)
            self._kernels.prefill_attention(out[rows], q[rows], cache, *sequence, settings)
        return out
