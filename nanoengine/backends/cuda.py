"""What PyTorch leaves to its user on a GPU: transfers that the host does not wait for, fused kernels, graphs.

Top to bottom: transfers, fusion, decode graphs, and `CUDA`, which uses all.
"""

import bisect
import functools
import gc
import inspect
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nanoengine.backends.attention import PagedAttention, TorchAttention
from nanoengine.backends.device import (
    Attention,
    Compute,
    Decodes,
    Device,
    Download,
    Forward,
    Function,
    Trial,
    host_memory,
)
from nanoengine.backends.inputs import ModelInputs, send_inputs
from nanoengine.backends.kv_cache import KVSpec
from nanoengine.config import EngineConfig

# ---- Transfers -----------------------------------------------------------------------------------


def new_event() -> Any:
    """What tells whether the GPU has come so far."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class PinnedDownload(Download):
    """Copied to memory that the GPU writes by itself; an event tells when."""

    def __init__(self, tensor: Tensor) -> None:
        memory, self._array = host_memory(tensor.shape, tensor.dtype)
        super().__init__(memory)
        memory.copy_(tensor, non_blocking=True)
        self._arrived = new_event()
        self._arrived.record()

    def read(self) -> Tensor:
        """As in the base class."""
        self._arrived.synchronize()
        return torch.from_numpy(self._array)


TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Staging:
    """Carries a step's arrays to the device in one copy that the host does not wait for.

    They are laid side by side in memory the GPU can read by itself, and arrive in memory of their own:
    arrays of the same shapes arrive at the same addresses, where a captured graph looks for them.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._host, self._array = host_memory([num_bytes], torch.uint8)
        else:
            self._host = torch.empty_like(self._device)
            self._array = self._host.numpy()
        self._copied = new_event() if device.type == "cuda" else None
        # Of the arrays before, and places for such: decodes follow decodes.
        self._shapes: list[tuple[np.dtype, tuple[int, ...]]] = []
        self._places: list[np.ndarray] = []
        self._tensors: list[Tensor] = []
        self._end = 0

    @staticmethod
    def num_bytes(arrays: Iterable[np.ndarray]) -> int:
        """What the arrays take; each begins at a multiple of 8."""
        return sum(-(-array.nbytes // 8) * 8 for array in arrays)

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays on the device, until the next call."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one, long done
        shapes = [(array.dtype, array.shape) for array in arrays]
        if shapes != self._shapes:
            self._places, self._tensors, self._end = self._lay_out(arrays)
            self._shapes = shapes
        for place, array in zip(self._places, arrays, strict=True):
            place[...] = array
        self._device[: self._end].copy_(self._host[: self._end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self._tensors

    def _lay_out(self, arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[Tensor], int]:
        """Where such arrays lie on the host and on the device, and the end of the last."""
        places, tensors, start = [], [], 0
        for array in arrays:
            end = start + array.nbytes
            places.append(self._array[start:end].view(array.dtype).reshape(array.shape))
            tensor = self._device[start:end].view(TORCH_DTYPES[array.dtype]).view(array.shape)
            tensors.append(tensor)
            start = -(-end // 8) * 8
        return places, tensors, start


# ---- Fusion --------------------------------------------------------------------------------------

IS_ISOLATED = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # PyTorch 2.13


def fuse(function: Function) -> Function:
    """A function compiled at its first call, which on a GPU is in the trial pass or before a capture.

    PyTorch gives up on a function silently once it was compiled eight times: other engines' do not count.
    """
    isolated: Any = {"isolate_recompiles": True} if IS_ISOLATED else {}
    if not IS_ISOLATED:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=True, **isolated)  # type: ignore[return-value]


def fusion_obstacle(device: torch.device) -> str | None:
    """Why nothing can be compiled for a GPU: no Triton, no C compiler, too old a GPU. None: it can."""
    try:
        fuse(torch.square)(torch.zeros(1, device=device))
    except Exception as error:  # whatever went wrong, plain PyTorch does the same
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """An error in a line, for the user; PyTorch's go on with advice and traces."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


class FusedKernels:
    """The element-wise parts of a decoder, each one kernel instead of several."""

    def __init__(self, plain: Any) -> None:
        self.rms_norm = fuse(plain.rms_norm)
        self.norm_rotate_both = fuse(plain.norm_rotate_both)
        self.silu_and_mul = fuse(plain.silu_and_mul)


# ---- Graphs --------------------------------------------------------------------------------------


@contextmanager
def waits_raise() -> Iterator[None]:
    """Until its end, what waits for a GPU raises RuntimeError, in whatever thread."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class GraphRecorder:
    """Captures what a function launches on the GPU, to be launched again as a whole.

    Graphs of one recorder share their memory: only one runs at a time.
    Source: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run as it is, then captured; returns what replays the capture.

        Raises:
            RuntimeError: it cannot be captured.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # what is set up at a first call must not be captured
            run()
            if self._pool is None:
                with waits_raise():  # now, since PyTorch may not get over a capture that fails
                    run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, another engine's for one, is none of this capture's business.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.stream(current), capture:  # should it fail, it leaves its own stream in place
            run()
        self._pool = graph.pool()
        return graph.replay


# Up to so many sequences a step has too few heads to fill a GPU, and kernels divide the keys of each among
# its processors. How many they divide into is fixed at a capture, by the width of the block tables.
MOST_DIVIDED = 32
LEAST_WIDTH, WIDER = 2048, 4  # tokens; and how many times as wide the next tables are


def graph_widths(size: int, widest: int, block_size: int) -> list[int]:
    """The widths of block tables, in blocks, that decodes of so many sequences are captured with.

    >>> graph_widths(8, 160, 256), graph_widths(256, 160, 256)
    ([8, 32, 128, 160], [160])
    """
    widths, width = [], max(1, LEAST_WIDTH // block_size)
    while size <= MOST_DIVIDED and width < widest:
        widths.append(width)
        width *= WIDER
    return [*widths, widest]


def graph_sizes(largest: int) -> list[int]:
    """The numbers of sequences whose decode steps are captured: close together where steps are short.

    >>> graph_sizes(50)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    """
    ladder = (1, 2, 4, *range(8, 128, 8), *range(128, 512, 16), 512)
    return [size for size in ladder if size < largest] + ([largest] if largest <= ladder[-1] else [])


def pad_decodes(
    inputs: ModelInputs[np.ndarray], num_seqs: int, table_width: int, block_size: int
) -> ModelInputs[np.ndarray]:
    """A batch of decodes in the shapes of a graph: num_seqs sequences, block tables of table_width.

    Each missing sequence is a token at position 0 of the null block, and no row of it is sampled. The
    lengths are those the graph was captured for, since its kernels were chosen at capture: as many tokens
    as a block table holds, read out of their blocks.
    """
    metadata = inputs.metadata
    missing = num_seqs - len(metadata.seq_lens)

    def pad(values: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate((values, np.full((*values.shape[:-1], missing), value, values.dtype)), -1)

    *groups, seqs, width = metadata.block_tables.shape
    block_tables = np.zeros((*groups, num_seqs, table_width), dtype=np.int32)
    block_tables[..., :seqs, :width] = metadata.block_tables
    seq_lens = pad(metadata.seq_lens, 1)
    metadata = metadata._replace(
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        cu_seqlens_k=np.concatenate(([0], seq_lens.cumsum())).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=block_tables,
        slot_mapping=pad(metadata.slot_mapping, 0),
        max_seq_len=table_width * block_size,
        has_cached_tokens=True,
        num_leading_decodes=num_seqs,
    )
    return inputs._replace(
        input_ids=pad(inputs.input_ids, 0), positions=pad(inputs.positions, 0), metadata=metadata
    )


class DecodeGraphs(Forward):
    """Decode steps captured for a ladder of batch sizes, each replayed by a single launch.

    A batch of decodes has one shape per number of sequences once its block tables have a fixed width. So
    `pad` fills a batch up to the next size of the ladder, and to the next width that was captured, and `send`
    lays arrays of the same shapes at the same addresses: that is where each graph finds its inputs, without
    being told. All graphs leave their hidden states in the same memory. Prompts, mixed and larger batches run
    as they come.
    """

    def __init__(
        self, decodes: Decodes, recorder: GraphRecorder, send: Callable[[list[np.ndarray]], list[Tensor]]
    ) -> None:
        super().__init__()
        start = time.perf_counter()
        self.sizes = graph_sizes(decodes.largest)
        self.block_size = decodes.block_size
        self.widths = {size: graph_widths(size, decodes.table_width, self.block_size) for size in self.sizes}
        self.hidden: Tensor | None = None  # (largest size, E)
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}  # by size and width
        # The smaller ones then fit into the memory of the largest.
        for size, width in [(n, width) for n in reversed(self.sizes) for width in reversed(self.widths[n])]:
            padded = pad_decodes(decodes.inputs, size, width, self.block_size)
            inputs = send_inputs(padded, send)

            def run(size: int = size, inputs: ModelInputs[Tensor] = inputs) -> None:
                hidden = decodes.compute(inputs)
                if self.hidden is None:
                    self.hidden = torch.empty_like(hidden)
                self.hidden[:size].copy_(hidden)

            self.replays[size, width] = recorder.record(run)
        self.seconds = time.perf_counter() - start

    def shape_for(self, inputs: ModelInputs[Any]) -> tuple[int, int] | None:
        """Size and width of the smallest graph that holds the batch; None: not all decodes, or too large."""
        *_, num_seqs, width = inputs.metadata.block_tables.shape
        if len(inputs.input_ids) != num_seqs or num_seqs > self.sizes[-1]:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, num_seqs)]
        return size, self.widths[size][bisect.bisect_left(self.widths[size], width)]

    def pad(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[np.ndarray]:
        """As in the base class."""
        shape = self.shape_for(inputs)
        return inputs if shape is None else pad_decodes(inputs, *shape, self.block_size)

    def __call__(self, compute: Compute, inputs: ModelInputs[Tensor]) -> Tensor:
        """As in the base class; of a graph, valid until the next call."""
        shape = self.shape_for(inputs)
        if shape is None:
            return super().__call__(compute, inputs)
        self.replays[shape]()
        assert self.hidden is not None
        return self.hidden[: shape[0]]

    def describe(self) -> str:
        """As in the base class."""
        return f", {len(self.replays)} graphs ({self.seconds:.1f} s)"


# ---- All of it together --------------------------------------------------------------------------


class CUDA(Device):
    """A GPU."""

    block_size = 256
    max_num_batched_tokens = 8192
    async_scheduling = True
    more_memory = "raise gpu_memory_utilization or lower max_num_batched_tokens"
    living: ClassVar["weakref.WeakSet[CUDA]"] = weakref.WeakSet()  # those of engines that are not closed

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        super().__init__(device, config)
        self.staging: Staging | None = None
        self.living.add(self)
        self.no_fusion = "enforce_eager" if config.enforce_eager else fusion_obstacle(device)

    @functools.cached_property
    def capability(self) -> tuple[int, int]:
        """The GPU's generation: (8, 0) is Ampere, (9, 0) Hopper."""
        return torch.cuda.get_device_capability(self.device)

    @functools.cached_property
    def capture_stream(self) -> Any:
        """One for all captures of an engine, and for no other's.

        cuBLAS keeps memory for every stream it has run on, 32 MiB on a Hopper. A graph that ends frees its
        stream's, other graphs' too: https://github.com/pytorch/pytorch/issues/193402
        """
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def backends(self) -> tuple[type[PagedAttention], ...]:  # type: ignore[override]
        """As in the base class."""
        from nanoengine.backends.flash import FlashAttention, VarlenAttention  # loads Triton
        from nanoengine.backends.triton import TritonAttention

        return FlashAttention, VarlenAttention, TritonAttention, TorchAttention

    def choose_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Before Ampere, bfloat16 has no attention kernel: all scores would exist at once."""
        if dtype != torch.bfloat16 or self.config.dtype != "auto" or self.capability >= (8, 0):
            return dtype
        self.notes.append("float16 instead of bfloat16, which this GPU does not compute in")
        return torch.float16

    def prepare(self, model: Any) -> None:
        """As in the base class."""
        if model.replaceable and self.no_fusion is None:
            model.use_kernels(FusedKernels(model.kernels))

    def fuse(self, function: Function) -> Function:
        """As in the base class."""
        return function if self.no_fusion else fuse(function)

    def choose_attention(self, specs: Sequence[KVSpec], settings: frozenset[str]) -> Attention:
        """As in the base class."""
        from nanoengine.backends.flash import FlashKernels  # loads Triton

        attention = super().choose_attention(specs, settings)
        if self.no_fusion:
            attention.notes.append(f"nothing fused: {self.no_fusion}")
        if issubclass(attention.backend, FlashKernels):
            build = functools.partial(attention.backend, use_triton=not self.no_fusion)
            attention = attention._replace(build=build)
        return attention

    def obstacle(
        self, backend: type[PagedAttention], specs: Sequence[KVSpec], settings: frozenset[str]
    ) -> str | None:
        """As in the base class."""
        from nanoengine.backends.flash import FlashKernels

        if issubclass(backend, FlashKernels) and self.capability < (8, 0):
            return "it needs a GPU of the Ampere generation or later"
        if backend.name == "triton" and self.no_fusion:  # Triton and its compiler, or enforce_eager
            return self.no_fusion
        reason = super().obstacle(backend, specs, settings)
        if reason is None and backend is not TorchAttention:
            block_size = self.config.block_size or self.block_size
            reason = backend.try_out(specs, settings, block_size, self.device)
        return reason

    def running(self) -> AbstractContextManager[object]:
        """Triton and graph capture use the thread's current GPU, whichever the tensors are on."""
        return torch.cuda.device(self.device)

    def reserve(self, max_num_tokens: int, max_num_seqs: int, num_groups: int, table_width: int) -> None:
        """As in the base class."""
        per_token = [np.empty(max_num_tokens, np.int64)] * (2 + num_groups)
        per_seq = [np.empty(max_num_seqs, np.int64)] * 6 + [np.empty(max_num_seqs + 1, np.int32)] * 3
        tables = np.empty((num_groups, max_num_seqs, table_width), np.int32)
        self.staging = Staging(Staging.num_bytes([*per_token, *per_seq, tables]), self.device)

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """As in the base class."""
        assert self.staging is not None
        return self.staging.send(arrays)

    def download(self, tensor: Tensor) -> Download:
        """As in the base class."""
        return PinnedDownload(tensor)

    def capture(self, decodes: Decodes) -> Forward:
        """As in the base class."""
        if self.config.enforce_eager:
            return Forward()
        if decodes.obstacles:
            return Forward(f", no graphs ({decodes.obstacles[0]})")
        try:
            return DecodeGraphs(decodes, GraphRecorder(self.capture_stream), self.send)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # something in it waits for the GPU, which a graph cannot hold
            reason = first_line(error)
            try:
                torch.cuda.empty_cache()
            except RuntimeError:
                # Before 2.13 PyTorch believes for ever that a capture that failed is underway.
                # https://github.com/pytorch/pytorch/pull/180395
                raise ValueError(f"decodes cannot be captured ({reason}); set enforce_eager=True") from error
            decodes.compute(
                send_inputs(decodes.inputs, self.send)
            )  # what raises here too is no graph's fault
            return Forward(f", no graphs ({reason})")

    def free_bytes(self, trial: Trial) -> int:
        """What gpu_memory_utilization leaves after the weights, the largest steps' work and the graphs."""
        try:
            with trial.caches() as cache_bytes:
                torch.cuda.reset_peak_memory_stats(self.device)
                trial.compute()
                peak_bytes = torch.cuda.max_memory_allocated(self.device) - cache_bytes
                torch.cuda.empty_cache()
                before, _ = torch.cuda.mem_get_info(self.device)
                graphs = trial.capture()
                after, _ = torch.cuda.mem_get_info(self.device)
                del graphs
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory on {self.device} for the largest batch, {trial.what}; "
                "lower max_num_batched_tokens, max_num_seqs or max_model_len, or set enforce_eager=True"
            ) from error
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        others_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(self.device)
        usable_bytes = int(total_bytes * self.config.gpu_memory_utilization)
        return usable_bytes - peak_bytes - (before - after) - others_bytes

    def release(self) -> None:
        """As in the base class."""
        self.staging = None
        gc.collect()
        self.living.discard(self)
        if not self.living:  # before that PyTorch, cuBLAS keeps what it has; others' graphs may be using it
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
