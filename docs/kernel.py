"""Lesson 11's kernel. From the repository's root: TRITON_INTERPRET=1 python -m docs.kernel."""

import torch
import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    out, q, k_cache, v_cache, block_tables, seq_lens, table_width, scale,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    seq, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    kv_head = head // (num_heads // NUM_KV_HEADS)
    places, dims = tl.arange(0, BLOCK_SIZE), tl.arange(0, HEAD_DIM)
    row = (seq * num_heads + head) * HEAD_DIM + dims
    query = tl.load(q + row).to(tl.float32) * scale
    seq_len = tl.load(seq_lens + seq)
    largest, total = float("-inf"), 0.0
    weighted = tl.zeros((HEAD_DIM,), tl.float32)
    for i in range(tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * table_width + i).to(tl.int64)
        slots = block * BLOCK_SIZE + places
        seen = i * BLOCK_SIZE + places < seq_len
        where = (slots[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        k = tl.load(k_cache + where, mask=seen[:, None], other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(k * query[None, :], axis=1), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        shrink, weights = tl.exp(largest - new_largest), tl.exp(scores - new_largest)
        v = tl.load(v_cache + where, mask=seen[:, None], other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(weights, axis=0)
        weighted = weighted * shrink + tl.sum(weights[:, None] * v, axis=0)
        largest = new_largest
    tl.store(out + row, weighted / total)


def paged_attention(q, k_cache, v_cache, block_tables, seq_lens):
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    out = torch.empty_like(q)
    decode_kernel[num_seqs, num_heads](
        out, q, k_cache, v_cache, block_tables, seq_lens, block_tables.shape[1], head_dim**-0.5,
        num_kv_heads, block_size, head_dim,
    )  # fmt: skip
    return out


def dense_attention(q, k_cache, v_cache, block_tables, seq_lens):
    rows = []
    for i, seq_len in enumerate(seq_lens):
        k, v = (cache[block_tables[i]].flatten(0, 1)[:seq_len] for cache in (k_cache, v_cache))
        k, v = (
            x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)
        )  # a KV head per query head
        scores = torch.einsum("hd,khd->hk", q[i], k) * q.shape[2] ** -0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
    return torch.stack(rows)


def example(device="cpu"):
    torch.manual_seed(0)
    q = torch.randn(3, 4, 32)  # 3 sequences, 4 query heads of 32
    k_cache, v_cache = torch.randn(2, 12, 8, 2, 32)  # 12 blocks of 8 tokens, 2 KV heads
    block_tables = torch.tensor([[5, 2, 7], [1, 0, 0], [9, 3, 0]], dtype=torch.int32)
    seq_lens = torch.tensor([21, 1, 16], dtype=torch.int32)
    return [x.to(device) for x in (q, k_cache, v_cache, block_tables, seq_lens)]


if __name__ == "__main__":
    inputs = example("cuda" if torch.cuda.is_available() else "cpu")
    apart = (paged_attention(*inputs) - dense_attention(*inputs)).abs().max()
    print(f"paged and dense attention differ by {apart:.1g} at most")
