"""What a step is to a device: plain arrays, or the tensors they have become. Nothing above is named here.

Shape letters: T tokens in the batch, S sequences, R rows to sample, B block_size.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)


class AttentionMetadata(NamedTuple, Generic[Array]):
    """Where a flat batch's tokens belong: everything an attention backend needs besides q, k, v.

    Where layers differ in what they see (`kv_cache.group_layers`), block_tables and slot_mapping have a first
    dimension more, one group of layers after the other; a backend gets one group's.
    """

    cu_seqlens_q: Array  # (S + 1,) int32  tokens of sequence i: [cu[i], cu[i + 1])
    cu_seqlens_k: Array  # (S + 1,) int32  the same over all they attend to: running sums of seq_lens
    seq_lens: Array  # (S,) int32  tokens of sequence i in the cache after this step's are written
    block_tables: Array  # (S, most blocks) int32  block ids; 0, the null block, is padding or out of sight
    slot_mapping: Array  # (T,) int64  cache slot that receives each token's K and V; < B: discard
    max_query_len: int  # known without asking the device, as is what follows
    max_seq_len: int
    has_cached_tokens: bool  # False: all K and V that the sequences attend to are in this batch
    num_leading_decodes: int = 0  # the first sequences of the batch that have one new token each
    # (N,) int64, on the host: rows whose hidden states anyone looks at, ascending; None: all.
    needed_rows: np.ndarray | None = None


# Of states: what a sequence begins with, which is never written, and what nobody reads.
ZERO_SLOT, BIN_SLOT = 0, 1
NUM_RESERVED_SLOTS = 2


class StatePart(NamedTuple):
    """Rows [first, end) of a batch, of one sequence, through layers that hand a state from token to token."""

    first: int
    end: int
    source: int  # slot of the state before them
    target: int  # slot for the state after them
    is_prompt: bool  # or an answer's


class StateLayout(NamedTuple, Generic[Array]):
    """Which state each part of a flat batch begins with, and where it leaves its own: models/states.py.

    N sequences compute one token of their answer each; all else is `parts`, in order.
    """

    decode_rows: Array  # (N,) int64
    decode_sources: Array  # (N,) int64
    decode_targets: Array  # (N,) int64
    parts: list[StatePart]  # known without asking the device


class ModelInputs(NamedTuple, Generic[Array]):
    """A batch as integers, flat: no padding, no batch dimension."""

    input_ids: Array  # (T,) int64; 0 where the token is pending
    positions: Array  # (T,) int64  index of each token in its sequence
    metadata: AttentionMetadata[Array]
    sample_rows: Array  # (R,) int64  rows whose logits are needed
    pending_rows: Array  # (P,) int64  rows whose token is pending
    pending_samples: Array  # (P,) int64  which sample of the step in flight it will be
    states: StateLayout[Array] | None = None  # None: no layer has any


def send_inputs(
    inputs: ModelInputs[np.ndarray], send: Callable[[list[np.ndarray]], list[Tensor]]
) -> ModelInputs[Tensor]:
    """The batch on a device, by its `send`, in memory that the next call overwrites."""
    meta = inputs.metadata
    # What a graph reads goes first: its place must not depend on how many rows are sampled.
    of_tokens = [inputs.input_ids, inputs.positions]
    of_attention = [meta.cu_seqlens_q, meta.cu_seqlens_k, meta.seq_lens, meta.block_tables, meta.slot_mapping]
    of_sampling = [inputs.sample_rows, inputs.pending_rows, inputs.pending_samples]
    of_states = [] if inputs.states is None else list(inputs.states[:3])
    tensors = send(of_tokens + of_attention + of_states + of_sampling)
    input_ids, positions, cu_seqlens_q, cu_seqlens_k, seq_lens, block_tables, slot_mapping = tensors[:7]
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seq_lens=seq_lens,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        max_query_len=meta.max_query_len,
        max_seq_len=meta.max_seq_len,
        has_cached_tokens=meta.has_cached_tokens,
        num_leading_decodes=meta.num_leading_decodes,
        needed_rows=meta.needed_rows,
    )
    sample_rows, pending_rows, pending_samples = tensors[-3:]
    states = None
    if inputs.states is not None:
        decode_rows, sources, targets = tensors[7:10]
        states = StateLayout(decode_rows, sources, targets, inputs.states.parts)
    return ModelInputs(input_ids, positions, metadata, sample_rows, pending_rows, pending_samples, states)


class SamplingMetadata(NamedTuple):
    """How each row's token is drawn."""

    temperature: NDArray[np.float32]  # (R,)  0: the likeliest
    top_k: NDArray[np.int64]  # (R,)  0: all
    top_p: NDArray[np.float32]  # (R,)  infinity: all
    min_p: NDArray[np.float32]  # (R,)  0: all
    u: NDArray[np.float64]  # (R,)  a random number in [0, 1)
