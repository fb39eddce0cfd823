"""The GPU device: transfers that the host does not wait for, fused kernels, and CUDA graphs.

Top to bottom: trying out backends, transfers, fusion, decode graphs, and `CUDA`, which uses all of them.
"""

import bisect
import functools
import gc
import math
import sysconfig
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from nanoengine.backends.device import Attention, Compute, Decodes, Device, Download, Forward, Trial
from nanoengine.backends.host_memory import pinned_memory
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.packing import replace_linears
from nanoengine.backends.paged_attention import PagedAttention
from nanoengine.backends.prompt_graphs import PromptGraphs, Recorder
from nanoengine.backends.quantization import Quantized, quantize
from nanoengine.backends.step_inputs import AttentionMetadata, ModelInputs, Send, pad, send_inputs
from nanoengine.backends.torch_attention import TorchAttention
from nanoengine.config import EngineConfig

# ---- Trying out attention backends ---------------------------------------------------------------


def gib(num_bytes: int) -> str:
    """Return a size for the user."""
    return f"{num_bytes / 2**30:.1f} GiB"


def first_line(error: Exception) -> str:
    """Return the first line of an error, for the user. PyTorch's errors continue with advice and traces."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def try_out(
    backend: type[PagedAttention],
    specs: Sequence[KVSpec],
    settings: frozenset[str],
    block_size: int,
    device: torch.device,
) -> str | None:
    """Run a backend on that device. Return why it cannot compute such layers there, or None if it can.

    All values are one, so all results must be one. Prompts, chunks mixed with decodes, and decodes alone may
    use different kernels. The block tables are wide enough for split keys.
    """
    int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    width = -(-4096 // block_size)

    def attend_to_ones(spec: KVSpec, query_lens: tuple[int, int], seq_lens: tuple[int, int]) -> Tensor:
        """Attend for two sequences of one block each, given the numbers of their new and of all tokens."""
        ends = [(1 + i) * block_size + seq_len for i, seq_len in enumerate(seq_lens)]
        slots = [slot for n, end in zip(query_lens, ends, strict=True) for slot in range(end - n, end)]
        metadata = AttentionMetadata(
            cu_seqlens_q=int32([0, query_lens[0], sum(query_lens)]),
            cu_seqlens_k=int32([0, seq_lens[0], sum(seq_lens)]),
            seq_lens=int32(seq_lens),
            block_tables=int32([[block_id] + [0] * (width - 1) for block_id in (1, 2)]),
            slot_mapping=torch.tensor(slots, device=device),
            max_query_len=max(query_lens),
            max_seq_len=width * block_size,
            has_cached_tokens=query_lens != seq_lens,
            num_leading_decodes=0 if query_lens[0] > 1 else query_lens.count(1),
        )
        cache, num_heads = KVCache.zeros(spec, 3, block_size, device), spec.num_kv_heads
        cache.v.fill_(1)
        k, v = (x.flatten(0, 1)[: len(slots)].clone() for x in (cache.k, cache.v))
        cache = KVCache(backend.stored(cache.k), backend.stored(cache.v))
        return backend(metadata, block_size)(
            *(k, k, v, cache),
            scale=1.0,
            window=2 if "window" in settings else None,
            softcap=1.0 if "softcap" in settings else None,
            sinks=torch.full((num_heads,), -torch.inf, device=device) if "sinks" in settings else None,
            alibi_slopes=torch.ones(num_heads, device=device) if "alibi_slopes" in settings else None,
        )

    for spec in dict.fromkeys(specs):
        for lens in (((2, 1), (2, 1)), ((1, 2), (3, 3)), ((1, 1), (2, 1))):
            try:
                out = attend_to_ones(spec, *lens)
            except Exception as error:  # not installed, no C compiler, too little shared memory, ...
                return f"it failed when tried: {first_line(error)}"
            if not bool((out - 1).abs().max() < 0.01):
                return "it computed wrong results when tried"
    return None


class PinnedDownload(Download):
    """Copies a tensor to pinned host memory asynchronously. An event marks the end of the copy."""

    def __init__(self, tensor: Tensor) -> None:
        memory, self._array = pinned_memory(tensor.shape, tensor.dtype)
        super().__init__(memory)
        memory.copy_(tensor, non_blocking=True)
        self._arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def read(self) -> Tensor:
        self._arrived.synchronize()
        return torch.from_numpy(self._array)


class Staging:
    """Carries a step's arrays to the device, side by side, in one copy that the host does not wait for.

    Arrays of the same shapes arrive at the same addresses, where a captured graph reads them.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._host, self._array = pinned_memory([num_bytes], torch.uint8)
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # The shapes of the previous arrays, and their layout. It is reused: decode steps follow decode steps.
        self._shapes: list[tuple[np.dtype, tuple[int, ...]]] = []
        self._layout: tuple[list[np.ndarray], list[Tensor], int] = [], [], 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copy the arrays to the device. The tensors are valid until the next call."""
        self._copied.synchronize()  # the previous copy, finished long ago
        if (shapes := [(array.dtype, array.shape) for array in arrays]) != self._shapes:
            self._layout, self._shapes = self._lay_out(arrays), shapes
        places, tensors, end = self._layout
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        self._copied.record()
        return tensors

    def _lay_out(self, arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[Tensor], int]:
        """Return views of such arrays on host and device, and the byte where the last one ends."""
        places, tensors, start = [], [], 0
        for array in arrays:
            end = start + array.nbytes
            places.append(self._array[start:end].view(array.dtype).reshape(array.shape))
            dtype = getattr(torch, array.dtype.name)
            tensors.append(self._device[start:end].view(dtype).view(array.shape))
            start = -(-end // 8) * 8
        return places, tensors, start


def fusion_obstacle(device: torch.device) -> str | None:
    """Return why Triton cannot compile for this GPU, such as a missing C compiler, or None if it can."""
    try:
        from nanoengine.backends.triton_layers import TritonKernels

        x = torch.ones(1, 16, device=device)
        out, _ = TritonKernels.rms_norm(x, x[0], 0.0)
        if not torch.equal(out, x):
            return "Triton's kernels computed wrong results when tried"
    except Exception as error:  # any failure will do: plain PyTorch computes the same
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        return first_line(error) + ("" if header.is_file() else f"; {header} is missing: install python3-dev")
    return None


# ---- Graphs --------------------------------------------------------------------------------------


@contextmanager
def waits_raise() -> Iterator[None]:
    """Make every operation that waits for a GPU raise RuntimeError, in all threads, inside the block."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class GraphRecorder:
    """Captures what a function launches on the GPU, so that one launch can replay all of it.

    The graphs of one recorder share memory, so only one of them may run at a time.
    Source: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run a function eagerly, then capture it, or raise RuntimeError. Return what replays the capture."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # one-time setup must not be captured
            run()
            if self._pool is None:
                with waits_raise():  # find waits now: PyTorch may not recover from a failed capture
                    run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as another engine's, may use the GPU during the capture.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.stream(current), capture:  # a failed capture leaves its own stream current
            run()
        self._pool = graph.pool()
        return graph.replay


# A step of up to MAX_DIVIDED sequences has too few heads to fill a GPU, so kernels split the keys of each
# sequence among the GPU's processors. The width of the block tables at capture fixes the number of splits.
MAX_DIVIDED = 32
MIN_WIDTH, WIDTH_RATIO = 2048, 4  # the smallest width in tokens, and the ratio of consecutive widths


def graph_widths(size: int, widest: int, block_size: int) -> list[int]:
    """Return the block table widths, in blocks, with which decode steps of `size` sequences are captured.

    >>> graph_widths(8, 160, 256), graph_widths(256, 160, 256)
    ([8, 32, 128, 160], [160])
    """
    widths, width = [], max(1, MIN_WIDTH // block_size)
    while size <= MAX_DIVIDED and width < widest:
        widths.append(width)
        width *= WIDTH_RATIO
    return [*widths, widest]


def graph_sizes(largest: int) -> list[int]:
    """Return the batch sizes whose decode steps are captured. They are closer together for short steps.

    >>> graph_sizes(50)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    """
    ladder = (1, 2, 4, *range(8, 128, 8), *range(128, 512, 16), 512)
    return [size for size in ladder if size < largest] + ([largest] if largest <= ladder[-1] else [])


def pad_decodes(
    inputs: ModelInputs[np.ndarray], num_seqs: int, table_width: int, block_size: int
) -> ModelInputs[np.ndarray]:
    """Pad a batch of decodes to the shapes of a graph: num_seqs sequences, block tables of table_width.

    Each padding sequence is a token at position 0 of the null block, and none of its rows is sampled. The
    maximum lengths are those of the capture, because the kernels were chosen then.
    """
    metadata = inputs.metadata
    *groups, seqs, width = metadata.block_tables.shape
    block_tables = np.zeros((*groups, num_seqs, table_width), dtype=np.int32)
    block_tables[..., :seqs, :width] = metadata.block_tables
    seq_lens = pad(metadata.seq_lens, num_seqs, 1)
    metadata = metadata._replace(
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        cu_seqlens_k=np.concatenate(([0], seq_lens.cumsum())).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=block_tables,
        slot_mapping=pad(metadata.slot_mapping, num_seqs),
        max_seq_len=table_width * block_size,
        has_cached_tokens=True,
        num_leading_decodes=num_seqs,
    )
    ids, positions = pad(inputs.input_ids, num_seqs), pad(inputs.positions, num_seqs)
    return inputs._replace(input_ids=ids, positions=positions, metadata=metadata)


class DecodeGraphs(Forward):
    """Captures decode steps for a ladder of batch sizes, and replays each with a single launch.

    `pad` pads a batch to the next size of the ladder and to the next captured width of the block tables.
    `send` puts arrays of the same shapes at the same addresses, where the graph reads its inputs. All graphs
    write their hidden states to the same memory. Prompts, mixed batches and larger batches run eagerly.
    """

    def __init__(self, decodes: Decodes, recorder: GraphRecorder, send: Send) -> None:
        super().__init__()
        start = time.perf_counter()
        self.sizes, self.block_size = graph_sizes(decodes.largest), decodes.block_size
        self.widths = {size: graph_widths(size, decodes.table_width, self.block_size) for size in self.sizes}
        self.hidden: Tensor | None = None  # (largest size, E)
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}  # by size and width
        # Capture the largest first: the smaller ones then fit into its memory.
        for size, width in [(n, width) for n in reversed(self.sizes) for width in reversed(self.widths[n])]:
            padded = pad_decodes(decodes.inputs, size, width, self.block_size)
            inputs = send_inputs(padded, send)

            def run(size: int = size, inputs: ModelInputs[Tensor] = inputs) -> None:
                hidden = decodes.compute(inputs)
                if self.hidden is None:
                    self.hidden = torch.empty_like(hidden)
                self.hidden[:size].copy_(hidden)

            self.replays[size, width] = recorder.record(run)
        self.remark = f", {len(self.replays)} graphs ({time.perf_counter() - start:.1f} s)"

    def shape_for(self, inputs: ModelInputs[Any]) -> tuple[int, int] | None:
        """Return size and width of the smallest graph for the batch; None: too large, or not only decodes."""
        *_, num_seqs, width = inputs.metadata.block_tables.shape
        if len(inputs.input_ids) != num_seqs or num_seqs > self.sizes[-1]:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, num_seqs)]
        return size, self.widths[size][bisect.bisect_left(self.widths[size], width)]

    def captures(self, inputs: ModelInputs[Any]) -> bool:
        return self.shape_for(inputs) is not None

    def pad(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[np.ndarray]:
        shape = self.shape_for(inputs)
        return inputs if shape is None else pad_decodes(inputs, *shape, self.block_size)

    def __call__(self, compute: Compute, inputs: ModelInputs[Tensor]) -> Tensor:
        """See the base class. The hidden states of a graph are valid until the next call."""
        if (shape := self.shape_for(inputs)) is None:
            return super().__call__(compute, inputs)
        self.replays[shape]()
        assert self.hidden is not None
        return self.hidden[: shape[0]]


class CUDA(Device):
    """Describes a GPU: pinned transfers, fused kernels, decode graphs, and the fastest attention kernels."""

    max_num_batched_tokens = 8192
    async_scheduling = rounds_weights = True
    rounds_cache = False  # on an H200, attention over 8 bits took as long as over 16
    living: ClassVar["weakref.WeakSet[CUDA]"] = weakref.WeakSet()  # devices whose engine is not closed

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        super().__init__(device, config)
        self.staging: Staging | None = None
        self.living.add(self)
        self.before = self._memory()  # without this engine
        self.no_fusion: str | None = "enforce_eager"  # why no Triton kernel runs
        if not config.enforce_eager:
            with self.running():
                self.no_fusion = fusion_obstacle(device)
        if self.no_fusion is None:
            from nanoengine.backends.triton_layers import draw_chunks

            self.draw_chunks = draw_chunks
        self.no_linear = self.no_fusion  # why no weight can stay quantized

    @functools.cached_property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability: (8, 0) is Ampere, (9, 0) Hopper."""
        return torch.cuda.get_device_capability(self.device)

    @functools.cached_property
    def capture_stream(self) -> Any:
        """The stream for all captures of this engine, and of no other engine.

        cuBLAS keeps memory for every stream it has run on: 32 MiB on a Hopper. A graph that is deleted frees
        its stream's memory, even if other graphs use it: https://github.com/pytorch/pytorch/issues/193402
        """
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def block_size(self) -> int:  # type: ignore[override]
        """Small blocks, so that short prefixes are cached. Those of flash-attn's kernels have 256 tokens."""
        return 256 if self.config.attn_backend in ("flash", "varlen") or self.no_fusion else 32

    def backends(self) -> Iterator[type[PagedAttention]]:
        from nanoengine.backends.flash_attention import FlashAttention, VarlenAttention  # loads Triton
        from nanoengine.backends.triton_attention import TritonAttention

        is_asked = self.config.attn_backend == "varlen"  # not chosen otherwise: it has not run on a GPU yet
        yield from (VarlenAttention,) if is_asked else (TritonAttention, FlashAttention)
        yield from super().backends()

    def choose_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float16 instead of bfloat16 on GPUs before Ampere, unless the user chose the dtype."""
        if dtype != torch.bfloat16 or self.config.dtype != "auto" or self.capability >= (8, 0):
            return dtype
        self.notes.append("float16 instead of bfloat16, which this GPU does not support")
        return torch.float16

    def prepare(self, model: Any) -> None:
        if self.bits:
            self._round_weights(model)
        if model.replaceable and self.no_fusion is None:
            from nanoengine.backends.triton_layers import TritonKernels

            model.use_kernels(TritonKernels(model.kernels))

    def _round_weights(self, model: Any) -> None:
        """Quantize a model's linear layers on the GPU, as a CPU does, and move everything else there."""

        def replace(layer: nn.Linear, bits: int) -> nn.Module:
            if not bits:
                return layer
            rounded = quantize(layer.weight.to(self.device), bits)
            return self.pack(rounded, layer.bias, layer.weight.dtype) or layer

        if not model.replaceable:
            model.use_linear_layers()
        try:
            replace_linears(model, replace, self.bits)
            model.to(self.device)
        except torch.OutOfMemoryError as error:
            needed = f"the weights, rounded to {self.bits} bits: {error}"
            raise ValueError(f"no room on {self.device} for {needed}") from error

    def pack(self, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
        """See the base class. The first weight of each form is tried out."""
        reason = self.no_linear or f"groups of {weight.group} inputs, or scales that float16 cannot hold"
        if not self.no_linear and (fitted := weight.fitted(dtype)) is not None:
            try:
                from nanoengine.backends.triton_linear import TritonLinear, try_out

                layer = TritonLinear(fitted, bias, dtype, self.device)
                with self.running():
                    try_out(layer.form, dtype, self.device)
                return layer
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # as for attention backends
                reason = self.no_linear = f"triton_linear failed when tried: {first_line(error)}"
        if self.bits and self.no_linear:
            raise ValueError(f"quantization={self.config.quantization!r} cannot be used: {reason}")
        self.notes += {f"weights dequantized: {reason}"}.difference(self.notes)
        return None

    def choose_attention(self, specs: Sequence[KVSpec], settings: frozenset[str]) -> Attention:
        from nanoengine.backends.flash_attention import FlashKernels  # loads Triton

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
        from nanoengine.backends.flash_attention import FlashKernels

        if issubclass(backend, FlashKernels) and self.capability < (8, 0):
            return "it needs a GPU of the Ampere generation or later"
        if backend.name == "triton" and self.no_fusion:  # Triton and its compiler, or enforce_eager
            return self.no_fusion
        reason = super().obstacle(backend, specs, settings)
        if reason is None and not issubclass(backend, TorchAttention):
            reason = try_out(backend, specs, settings, self.config.block_size or self.block_size, self.device)
        return reason

    def running(self) -> AbstractContextManager[object]:
        """Make this the thread's current GPU: Triton and graph capture ignore where the tensors are."""
        return torch.cuda.device(self.device)

    def reserve(self, max_num_tokens: int, max_num_seqs: int, num_groups: int, table_width: int) -> None:
        num_int64 = (2 + num_groups) * max_num_tokens + 6 * max_num_seqs
        num_int32 = 3 * (max_num_seqs + 1) + num_groups * max_num_seqs * table_width + 4  # with alignment
        self.staging = Staging(8 * num_int64 + 4 * num_int32, self.device)

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        assert self.staging is not None
        return self.staging.send(arrays)

    def download(self, tensor: Tensor) -> Download:
        return PinnedDownload(tensor)

    def capture(self, decodes: Decodes) -> Forward:
        if self.config.enforce_eager:
            return Forward()
        if decodes.obstacles:
            return Forward(f", no graphs ({decodes.obstacles[0]})")
        try:
            forward = DecodeGraphs(decodes, GraphRecorder(self.capture_stream), self.send)
            # Other ranks are told of padded batches only, not of how many tokens count.
            if not decodes.model.replaceable or self.config.tensor_parallel_size > 1:
                forward.remark += ", prompts without"
                return forward
            return PromptGraphs(forward, decodes, Recorder(self.capture_stream), self.send)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # some operation waits for the GPU, which cannot be captured
            reason = first_line(error)
            try:
                torch.cuda.empty_cache()
            except RuntimeError:
                # Before 2.13, PyTorch treats a failed capture as still running forever.
                # https://github.com/pytorch/pytorch/pull/180395
                message = f"decode steps cannot be captured ({reason}); set enforce_eager=True"
                raise ValueError(message) from error
            # An error that also occurs without a graph is raised.
            decodes.compute(send_inputs(decodes.inputs, self.send))
            return Forward(f", no graphs ({reason})")

    def find_memory(self) -> None:
        """See the base class."""

    def _memory(self) -> tuple[int, int, int]:
        """Return the GPU's free bytes, and those that this process has allocated and holds."""
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        return free_bytes, torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def free_bytes(self, trial: Trial) -> int:
        """Return what gpu_memory_utilization leaves after what this engine takes, and no other process."""
        free_before, allocated_before, held_before = self.before
        _, total_bytes = torch.cuda.mem_get_info(self.device)
        share = self.config.gpu_memory_utilization
        figures = f"{self.device} has {gib(total_bytes)}, of which {gib(free_before)} were free at the start"
        usable_bytes = int(total_bytes * share)
        if usable_bytes > free_before:
            raise ValueError(
                f"gpu_memory_utilization={share} is {gib(usable_bytes)}: {figures}; "
                f"set it to at most {math.floor(100 * free_before / total_bytes) / 100}"
            )
        with self._trying(trial), trial.caches() as cache_bytes:
            torch.cuda.reset_peak_memory_stats(self.device)
            trial.compute()
            peak_bytes = torch.cuda.max_memory_allocated(self.device) - cache_bytes - allocated_before
            torch.cuda.empty_cache()
            *_, held_without = self._memory()
            graphs = trial.capture()
            free_bytes, _, held_bytes = self._memory()
            del graphs
        torch.cuda.empty_cache()
        graph_bytes = max(0, held_bytes - held_without)
        beside = free_before - free_bytes - (held_bytes - held_before)  # libraries, and the graphs' nodes
        # They take less than 2 GiB per rank. If more is missing, another process took it in the meantime.
        beside = min(max(0, beside), self.config.tensor_parallel_size * (2 << 30))
        self.more_memory = (
            f"{figures}, gpu_memory_utilization={share} is {gib(usable_bytes)}, weights and the largest step "
            f"take {gib(peak_bytes)}, graphs {gib(graph_bytes)}, libraries {gib(beside)}; raise "
            "gpu_memory_utilization or lower max_num_batched_tokens"
        )
        return usable_bytes - peak_bytes - graph_bytes - beside

    def warm_up(self, trial: Trial) -> None:
        if not self.no_fusion:
            with self._trying(trial), trial.caches():
                trial.compute()

    @contextmanager
    def _trying(self, trial: Trial) -> Iterator[None]:
        """Turn a lack of memory into an error that says what to lower."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"too little memory on {self.device} for the largest batch, {trial.what}; "
                "lower max_num_batched_tokens, max_num_seqs or max_model_len, or set enforce_eager=True"
            ) from error

    def release(self) -> None:
        self.staging = None
        gc.collect()
        self.living.discard(self)
        if not self.living:  # otherwise the graphs of other engines may use cuBLAS's memory
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
