"""build_inputs is a pure function of integers: every array is checked by hand."""

from itertools import pairwise

import numpy as np
import pytest

from nanoengine.backends.cuda import graph_sizes, pad_decodes
from nanoengine.engine import build_inputs
from tests.helpers import batch_of, make_sequence


def arrays_of(inputs):
    return [value for value in inputs if isinstance(value, np.ndarray)]


def test_a_mixed_batch_is_laid_out_flat():
    decode = make_sequence(0, [10, 11, 12, 13, 14], block_table=[7, 2])
    chunk = make_sequence(1, [20, 21, 22, 23, 24, 25, 26], block_table=[3, 5])
    prompt = make_sequence(2, [30, 31], block_table=[9])
    inputs = build_inputs(batch_of((decode, 4, 5), (chunk, 2, 6), (prompt, 0, 2)), 4)
    assert inputs.input_ids.tolist() == [14, 22, 23, 24, 25, 30, 31]
    assert inputs.positions.tolist() == [4, 2, 3, 4, 5, 0, 1]
    assert inputs.metadata.slot_mapping.tolist() == [8, 14, 15, 20, 21, 36, 37]
    assert inputs.metadata.cu_seqlens_q.tolist() == [0, 1, 5, 7]
    assert inputs.metadata.seq_lens.tolist() == [5, 6, 2]
    assert inputs.metadata.block_tables.tolist() == [[7, 2], [3, 5], [9, 0]]
    assert inputs.sample_rows.tolist() == [0, 6]  # the chunk's prompt is unfinished
    assert inputs.metadata.cu_seqlens_k.tolist() == [0, 5, 11, 13]
    assert [a.dtype for a in arrays_of(inputs)] == [np.int64] * 5
    assert [a.dtype for a in inputs.metadata[:5]] == [np.int64] + [np.int32] * 4
    assert (inputs.metadata.max_query_len, inputs.metadata.max_seq_len) == (4, 6)
    assert inputs.metadata.has_cached_tokens


def test_a_batch_says_which_rows_are_needed_whether_tokens_are_cached_and_how_many_decodes_begin_it():
    one, two, asked = (make_sequence(i, [1] * 5, block_table=[1, 2]) for i in range(3))
    asked.prompt_logprobs = 0
    decode, chunk, last = (one, 4, 5), (two, 1, 3), (two, 2, 5)
    for chunks, needed, num_decodes, is_cached in (
        ([decode, (two, 2, 3)], [0], 2, True),  # the row of a chunk of one token is not sampled
        ([decode, (two, 4, 5), chunk], [0, 1], 2, True),
        ([decode, last, (asked, 0, 3), (one, 4, 5)], [0, 3, 4, 5, 6, 7], 1, True),
        ([chunk, decode], [2], 0, True),
        ([(one, 0, 5), (two, 0, 2)], [4], 0, False),
        ([(one, 0, 5), chunk], [4], 0, True),
    ):
        metadata = build_inputs(batch_of(*chunks), 4).metadata
        assert metadata.needed_rows.tolist() == needed
        assert (metadata.num_leading_decodes, metadata.has_cached_tokens) == (num_decodes, is_cached)
        assert metadata.has_decodes == any(end - start == 1 for _, start, end in chunks)


def test_decodes_are_padded_with_sequences_in_the_null_block():
    first = make_sequence(0, [10, 11, 12, 13, 14], block_table=[7, 2])
    second = make_sequence(1, [20], block_table=[3])
    inputs = build_inputs(batch_of((first, 4, 5), (second, 0, 1)), 4)
    padded = pad_decodes(inputs, 4, 3, 4)
    assert padded.input_ids.tolist() == [14, 20, 0, 0]
    assert padded.positions.tolist() == [4, 0, 0, 0]
    assert padded.metadata.slot_mapping.tolist() == [8, 12, 0, 0]
    assert padded.metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert padded.metadata.cu_seqlens_k.tolist() == [0, 5, 6, 7, 8]
    assert padded.metadata.seq_lens.tolist() == [5, 1, 1, 1]
    assert padded.metadata.block_tables.tolist() == [[7, 2, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert padded.sample_rows.tolist() == [0, 1]  # the padding is not sampled
    assert [a.dtype for a in arrays_of(padded)] == [a.dtype for a in arrays_of(inputs)]
    assert [a.dtype for a in padded.metadata[:5]] == [a.dtype for a in inputs.metadata[:5]]
    # Kernels are chosen at capture, so for any batch: for full block tables, read out of their blocks.
    assert (padded.metadata.max_query_len, padded.metadata.max_seq_len) == (1, 12)
    assert padded.metadata.has_cached_tokens


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 9, 17, 97, 100, 128, 130, 256, 500, 512, 1000])
def test_graph_sizes_end_at_the_largest_batch_or_at_512_and_grow_in_small_steps(largest):
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, min(largest, 512))
    assert all(above - below <= max(8, below // 8) for below, above in pairwise(sizes))
