"""The solution of lesson 11's task. `python -m docs.decode` checks it."""

import triton
import triton.language as tl


@triton.jit
def grouped_kernel(
    out, q, k_cache, v_cache, block_tables, seq_lens, table_width, scale,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Attention of one new token per sequence, with one program per sequence and KV head.

    A program reads each K and V of its KV head once, and uses it for all GROUP query heads that share the
    head: KV head h belongs to query heads [h * GROUP, (h + 1) * GROUP).

    out, q            (sequences, KV heads * GROUP, HEAD_DIM)
    k_cache, v_cache  (blocks, BLOCK_SIZE, KV heads, HEAD_DIM)
    block_tables      (sequences, table_width); entries after a sequence's last block are not its blocks
    seq_lens          (sequences,); slots at positions seq_len and above may contain NaN
    """
    seq, kv_head, num_kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    heads, places, dims = tl.arange(0, GROUP), tl.arange(0, BLOCK_SIZE), tl.arange(0, HEAD_DIM)
    rows = ((seq * num_kv_heads + kv_head) * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :]
    queries = tl.load(q + rows).to(tl.float32) * scale
    seq_len = tl.load(seq_lens + seq)
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    weighted = tl.zeros((GROUP, HEAD_DIM), tl.float32)
    for i in range(tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * table_width + i).to(tl.int64)
        slots = block * BLOCK_SIZE + places
        seen = i * BLOCK_SIZE + places < seq_len
        where = (slots[:, None] * num_kv_heads + kv_head) * HEAD_DIM + dims[None, :]
        k = tl.load(k_cache + where, mask=seen[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(queries[:, None, :] * k[None, :, :], axis=2)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink, weights = tl.exp(largest - new_largest), tl.exp(scores - new_largest[:, None])
        v = tl.load(v_cache + where, mask=seen[:, None], other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = weighted * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], axis=1)
        largest = new_largest
    tl.store(out + rows, weighted / total[:, None])
