"""The inputs of a step, as arrays on the host or tensors on the device. This module imports no engine code.

Shape letters: T tokens in the batch, S sequences, R rows to sample, B block_size.
"""

import itertools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)


class AttentionMetadata(NamedTuple, Generic[Array]):
    """Describes a flat batch: everything an attention backend needs besides q, k and v.

    With several groups of layers (extensions/sliding_windows.py), block_tables and slot_mapping have the
    group as an extra first dimension. A backend then gets the metadata of one group.
    """

    slot_mapping: Array  # (T,) int64  cache slot that receives each token's K and V; < B: discard
    cu_seqlens_q: Array  # (S + 1,) int32  tokens of sequence i: [cu[i], cu[i + 1])
    cu_seqlens_k: Array  # (S + 1,) int32  the same for the keys they attend to: running sums of seq_lens
    seq_lens: Array  # (S,) int32  tokens of sequence i in the cache after this step's are written
    block_tables: Array  # (S, longest table) int32  block ids; null block: padding, or before the window
    max_query_len: int  # this and the fields below are known on the host
    max_seq_len: int
    has_cached_tokens: bool  # False: all K and V that the sequences attend to are in this batch
    num_leading_decodes: int = 0  # how many sequences at the start of the batch have one new token
    has_decodes: bool = True  # False: all sequences have several new tokens
    # (N,) int64, on the host: the rows whose hidden states are used, ascending; None: all.
    needed_rows: np.ndarray | None = None


# Reserved slots for recurrent states: the zero state that each sequence starts from, never written, and a
# slot for discarded states, never read.
ZERO_SLOT, BIN_SLOT = 0, 1
NUM_RESERVED_SLOTS = 2


class StatePart(NamedTuple):
    """Names rows [first, end) of a batch, which belong to one sequence, for layers with recurrent state."""

    first: int
    end: int
    source: int  # slot of the state before these rows
    target: int  # slot for the state after these rows
    is_prompt: bool  # False: output tokens


class StateLayout(NamedTuple, Generic[Array]):
    """Tells which slot each part of a flat batch reads its recurrent state from, and which it writes.

    N sequences compute one output token each. Everything else is in `parts`, in order: models/recurrent.py.
    """

    decode_rows: Array  # (N,) int64
    decode_sources: Array  # (N,) int64
    decode_targets: Array  # (N,) int64
    parts: list[StatePart]  # on the host


class ModelInputs(NamedTuple, Generic[Array]):
    """Holds a batch as flat integers: no padding, no batch dimension."""

    input_ids: Array  # (T,) int64; 0 where the token is pending
    positions: Array  # (T,) int64  index of each token in its sequence
    metadata: AttentionMetadata[Array]
    sample_rows: Array  # (R,) int64  rows whose logits are needed
    pending_rows: Array  # (P,) int64  rows whose token is pending
    pending_samples: Array  # (P,) int64  index of that token among the samples of the step in flight
    states: StateLayout[Array] | None = None  # None: no layer has recurrent state


Send = Callable[[list[np.ndarray]], list[Tensor]]  # `Device.send`


def send_inputs(inputs: ModelInputs[np.ndarray], send: Send) -> ModelInputs[Tensor]:
    """Copy a batch to a device with its `send`. The next call overwrites the memory."""
    meta, states = inputs.metadata, inputs.states
    slots = [] if states is None else [states.decode_rows, states.decode_sources, states.decode_targets]
    # CUDA graphs read all but the last three, whose lengths differ: the addresses before them must not. The
    # addresses of the first three depend on the number of tokens only.
    input_ids, positions, slot_mapping, cu_seqlens_q, cu_seqlens_k, seq_lens, block_tables, *others = send(
        [
            *(inputs.input_ids, inputs.positions, meta.slot_mapping),
            *(meta.cu_seqlens_q, meta.cu_seqlens_k, meta.seq_lens, meta.block_tables),
            *slots,
            *(inputs.sample_rows, inputs.pending_rows, inputs.pending_samples),
        ]
    )
    *sent_slots, sample_rows, pending_rows, pending_samples = others
    # What follows the arrays is known on the host.
    metadata = AttentionMetadata(slot_mapping, cu_seqlens_q, cu_seqlens_k, seq_lens, block_tables, *meta[5:])
    layout = None
    if states is not None:
        decode_rows, decode_sources, decode_targets = sent_slots
        layout = StateLayout(decode_rows, decode_sources, decode_targets, states.parts)
    return ModelInputs(input_ids, positions, metadata, sample_rows, pending_rows, pending_samples, layout)


def pad(values: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """Return the array with `value` appended until its last dimension has the given size."""
    missing = size - values.shape[-1]
    return np.concatenate((values, np.full((*values.shape[:-1], missing), value, values.dtype)), -1)


def pad_tables(block_tables: list[list[int]]) -> np.ndarray:
    """Return block tables as one (S, longest table) int32 array, padded with the null block.

    >>> pad_tables([[7, 2], [3]]).tolist()
    [[7, 2], [3, 0]]
    """
    num_blocks = np.fromiter(map(len, block_tables), np.int64)
    padded = np.zeros((len(block_tables), num_blocks.max()), dtype=np.int32)
    is_block = np.arange(padded.shape[1]) < num_blocks[:, None]
    padded[is_block] = np.fromiter(itertools.chain.from_iterable(block_tables), np.int32)
    return padded


def map_slots(
    block_tables: np.ndarray, seq_of_row: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Return each row's cache slot, (T,) int64. Row i's block table is block_tables[seq_of_row[i]].

    >>> map_slots(np.array([[7, 2], [3, 0]]), np.array([0, 1, 1]), np.array([4, 2, 3]), block_size=4).tolist()
    [8, 14, 15]
    """
    blocks = block_tables[seq_of_row, positions // block_size]
    return blocks.astype(np.int64) * block_size + positions % block_size  # type: ignore[no-any-return]


class SamplingMetadata(NamedTuple):
    """Holds how each row's token is sampled."""

    temperature: NDArray[np.float32]  # (R,)  0: greedy
    top_k: NDArray[np.int64]  # (R,)  0: all
    top_p: NDArray[np.float32]  # (R,)  infinity: all
    min_p: NDArray[np.float32]  # (R,)  0: all
    u: NDArray[np.float64]  # (R,)  a random number in [0, 1)
