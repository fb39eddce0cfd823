"""Tensor parallelism: one model over several processes ("ranks"), each with a share of every layer's weights.

Rank 0 is the engine: it alone schedules, samples and talks to users. The others hold a `ModelRunner` like
its own and repeat its forward passes (`follow`). A step, with two ranks:

    rank 0                                      rank 1
    begin(STEP, arrays)                 ->      receive the arrays
    embed, layers...         <- all-reduce ->   the same, with its own shares
    begin(LOGITS, number of rows)       ->      receive the number
    its part of the head     <- gather ->       its part of the head
    sample                                      wait for the next message

Heads, the MLPs' neurons and the vocabulary are divided. What follows from a share of the heads or neurons is
a summand of the layer's output; so there are two all-reduces in a layer, and one behind the embedding.
The collectives are NCCL's on GPUs and gloo's on a CPU; messages of integers are gloo's.

Any failure inside a forward pass, on whichever rank, is the end of the engine: the others wait for a
collective that will not come. `close` and the start of another engine work after that.

Top to bottom: what ranks tell each other, layers, devices, processes. What a rank has of the weights is in
models/shard.py.
Sources: Megatron-LM, https://arxiv.org/abs/1909.08053; vLLM's model_executor/layers/linear.py.
"""

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions

from nanoengine.backends.device import Compute, Decodes, Device, Download, Forward
from nanoengine.backends.inputs import AttentionMetadata, ModelInputs, send_inputs
from nanoengine.config import EngineConfig
from nanoengine.engine import ModelRunner
from nanoengine.models.decoder import Decoder, DecoderConfig
from nanoengine.models.shard import Shard
from nanoengine.models.weights import Checkpoint
from nanoengine.startup import Started
from nanoengine.steps import EngineDeadError

dist: Any = torch.distributed  # whose groups' own methods have no types

# ---- Messages: what rank 0 tells the others ------------------------------------------------------

CLOSE, STEP, LOGITS = range(3)  # the first number of a header: what to do
HEADER = 10  # numbers of a header; those it does not need are zeros
MESSAGE = 1 << 14  # int32 of a message: the header, and as much of a step as fits, mostly all


def encode_step(inputs: ModelInputs[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """A header, and the arrays a forward pass needs in one buffer, (bytes / 4,) int32."""
    meta, num_pending = inputs.metadata, len(inputs.pending_rows)
    *groups, num_seqs, width = meta.block_tables.shape
    num_groups = groups[0] if groups else 0  # 0: the arrays have no dimension for it
    sizes = [len(inputs.input_ids), num_seqs, num_groups, width, num_pending]
    numbers = [meta.max_query_len, meta.max_seq_len, int(meta.has_cached_tokens), meta.num_leading_decodes]
    arrays = [inputs.input_ids, inputs.positions, meta.slot_mapping, inputs.pending_rows]
    arrays += [meta.cu_seqlens_q, meta.cu_seqlens_k, meta.seq_lens, meta.block_tables]
    assert [(array.dtype, array.shape) for array in arrays] == _layout(sizes)
    return [STEP, *sizes, *numbers], np.concatenate([array.ravel().view(np.int32) for array in arrays])


def decode_step(header: list[int], buffer: np.ndarray) -> ModelInputs[np.ndarray]:
    """What `encode_step` was given, less what only rank 0 needs: which rows are sampled, and looked at."""
    arrays, offset = [], 0
    for dtype, shape in _layout(header[1:6]):
        end = offset + int(np.prod(shape)) * dtype.itemsize // 4
        arrays.append(buffer[offset:end].view(dtype).reshape(shape))
        offset = end
    input_ids, positions, slots, pending_rows, cu_seqlens_q, cu_seqlens_k, seq_lens, tables = arrays
    max_query_len, max_seq_len, has_cached_tokens, num_leading_decodes = header[6:]
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seq_lens=seq_lens,
        block_tables=tables,
        slot_mapping=slots,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        has_cached_tokens=bool(has_cached_tokens),
        num_leading_decodes=num_leading_decodes,
    )
    nothing = np.zeros(0, dtype=np.int64)
    return ModelInputs(input_ids, positions, metadata, nothing, pending_rows, nothing)


def buffer_size(header: list[int]) -> int:
    """Of a step's buffer, in int32."""
    return sum(int(np.prod(shape)) * dtype.itemsize // 4 for dtype, shape in _layout(header[1:6]))


def _layout(sizes: list[int]) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    """Types and shapes of a step's arrays; the wide ones first, so that all are aligned."""
    num_tokens, num_seqs, num_groups, width, num_pending = sizes
    wide, narrow, groups = np.dtype(np.int64), np.dtype(np.int32), (num_groups,) if num_groups else ()
    return [
        *((wide, shape) for shape in ((num_tokens,), (num_tokens,), (*groups, num_tokens), (num_pending,))),
        *((narrow, (length,)) for length in (num_seqs + 1, num_seqs + 1, num_seqs)),
        (narrow, (*groups, num_seqs, width)),
    ]


# ---- Ranks: what they tell each other ------------------------------------------------------------

LOADING = timedelta(hours=1)  # how long ranks wait for each other while weights are loaded
COLLECTIVE = timedelta(minutes=5)  # how long rank 0 waits in a step
CLOSING = timedelta(seconds=5)
FOREVER = timedelta(days=365)  # the others wait for rank 0, with which they end


class Ranks:
    """This process among the ranks of an engine: the collectives, and rank 0's messages.

    Groups of its own, not PyTorch's global one, so that several engines may be in a process.
    """

    def __init__(
        self,
        store: Any,
        shard: Shard,
        device: torch.device,
        *,
        is_one_host: bool,
        workers: "Workers | None" = None,
    ) -> None:
        self.shard, self.rank, self.size = shard, shard.rank, shard.size
        self.leads = False  # whether to announce what is computed; on rank 0, once all are set up
        self.lost: str | None = None  # why the engine is of no use any more
        self._workers = workers
        self._process_id = os.getpid()
        self._num_threads: int | None = None  # PyTorch's before, where they are shared out
        options = dist.ProcessGroupGloo._Options()
        options._timeout = FOREVER if self.rank else COLLECTIVE
        gloo = dist.ProcessGroupGloo
        options._devices = [
            gloo.create_device(hostname="127.0.0.1") if is_one_host else gloo.create_default_device()
        ]
        self._control: Any = gloo(dist.PrefixStore("gloo", store), self.rank, self.size, options)
        self._group: Any = self._control
        if device.type == "cuda":  # not run on a GPU yet
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = COLLECTIVE
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), self.rank, self.size, nccl)
            if workers is not None:
                workers.on_loss = self._group.abort  # kernels that wait for a lost rank end
        _alive.add(self)

    # -- collectives: each is to be called by all ranks, in one order

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        self._wait(lambda: self._group.allreduce([x], _queued(dist.AllreduceOptions())))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place."""
        self._wait(lambda: self._group.broadcast([x], _queued(_from_rank_0())))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x (R, C) side by side, (R, size * C)."""
        out = x.new_empty(self.size * len(x), x.shape[1])
        options = _queued(AllgatherOptions())
        self._wait(lambda: self._group._allgather_base(out, x.contiguous(), options))
        return out.view(self.size, *x.shape).transpose(0, 1).reshape(len(x), -1)

    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers. Waits long, since some may still load their weights."""
        x = torch.tensor([number])
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MIN, LOADING
        self._wait(lambda: self._control.allreduce([x], options))
        return int(x)

    # -- messages

    def begin(self, kind: int, inputs: ModelInputs[np.ndarray] | None = None, num_rows: int = 0) -> None:
        """Tell the others what is computed next; from here to `end` they depend on this rank."""
        self.check()
        header, buffer = [kind, num_rows], np.zeros(0, dtype=np.int32)
        if inputs is not None:
            header, buffer = encode_step(inputs)
        message = np.zeros(MESSAGE, dtype=np.int32)
        message[: len(header)] = header
        message[HEADER : HEADER + len(buffer)] = buffer[: MESSAGE - HEADER]
        self._send(torch.from_numpy(message))
        if HEADER + len(buffer) > MESSAGE:
            self._send(torch.from_numpy(buffer[MESSAGE - HEADER :]))
        self.lost = "rank 0 failed in a forward pass, in which the other ranks wait for it"

    def end(self) -> None:
        """All of what was begun is done."""
        self.lost = None

    def receive(self) -> tuple[int, int, ModelInputs[np.ndarray] | None]:
        """What rank 0 began: the kind, and a number of rows or a step's arrays."""
        message = self._send(torch.empty(MESSAGE, dtype=torch.int32)).numpy()
        header = message[:HEADER].tolist()
        if header[0] != STEP:
            return header[0], header[1], None
        size, buffer = buffer_size(header), message[HEADER:]
        if size > len(buffer):
            rest = self._send(torch.empty(size - len(buffer), dtype=torch.int32)).numpy()
            buffer = np.concatenate((buffer, rest))
        return STEP, 0, decode_step(header, buffer)

    def check(self) -> None:
        """Raise EngineDeadError once a rank is lost."""
        if self._workers is not None:
            self.lost = self.lost or self._workers.cause
        if self.lost:
            raise EngineDeadError(f"the engine is of no use any more: {self.lost}")

    def _send(self, x: Tensor, timeout: timedelta | None = None) -> Tensor:
        """A tensor on the host from rank 0 to all."""
        self._wait(lambda: self._control.broadcast([x], _from_rank_0(timeout)))
        return x

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            if (work := start()) is not None:  # of what is queued behind all else, some groups return nothing
                work.wait()
        except RuntimeError as error:
            cause = self._workers.why() if self._workers is not None else None
            self.lost = cause or f"the ranks lost each other: {error}"
            raise EngineDeadError(f"the engine is of no use any more: {self.lost}") from error

    # -- beginning and end

    def around(self, device: Device) -> Any:
        """The device, and where it meets those of the other ranks."""
        return ParallelDevice(device, self)

    def share_threads(self, num_threads: int) -> None:
        """Compute with that many threads: the ranks of a host share its cores."""
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)

    def close(self) -> None:
        """Let the other ranks go, and wait until the processes started here are gone."""
        if os.getpid() != self._process_id:
            return  # a fork: the ranks are not its own
        if self._workers is not None:
            self._workers.is_closing = True
        if self.leads and not self.lost:
            with suppress(EngineDeadError):
                self._send(torch.zeros(MESSAGE, dtype=torch.int32), CLOSING)
        if not self.lost:
            # Gloo's thread takes the interpreter's lock to let go of the last message, which would kill the
            # process while the interpreter ends. So the thread ends here. NCCL's stays, as graphs use it.
            if self._group is self._control:
                self._group = None
            self._control = None
        self.leads, self.lost = False, self.lost or "it is closed"
        if self._workers is not None:
            self._workers.stop()
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
            self._num_threads = None


_alive: "weakref.WeakSet[Ranks]" = weakref.WeakSet()


def _keep_groups() -> None:
    """Let a fork end: what takes a group down waits for its threads, which a fork does not have."""
    for ranks in _alive:
        for group in (ranks._control, ranks._group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_groups)


def _queued(options: Any) -> Any:
    """Options of a collective that NCCL runs on the current stream, and not on its own: two waits less."""
    options.asyncOp = False
    return options


def _from_rank_0(timeout: timedelta | None = None) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    if timeout is not None:
        options.timeout = timeout
    return options


# ---- Layers --------------------------------------------------------------------------------------


class RowParallel(nn.Module):
    """A linear layer of which each rank has the columns for its own inputs; their outputs are summed."""

    def __init__(self, layer: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.ranks = layer, ranks
        if ranks.rank:
            layer.bias = None  # type: ignore[assignment]  # rank 0 adds it

    def forward(self, x: Tensor) -> Tensor:
        """(T, the rank's inputs) -> (T, outputs)."""
        return self.ranks.all_reduce(self.layer(x))


class ParallelEmbedding(nn.Module):
    """An embedding of which each rank has some rows; the others' tokens are zeros, and all are summed."""

    def __init__(self, embedding: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.embedding, self.ranks = embedding, ranks
        self.num_rows = embedding.num_embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        """(T,) -> (T, E)."""
        rows = input_ids - self.ranks.rank * self.num_rows
        is_elsewhere = (rows < 0) | (rows >= self.num_rows)
        x = self.embedding(rows.masked_fill(is_elsewhere, 0))
        return self.ranks.all_reduce(x.masked_fill(is_elsewhere.unsqueeze(-1), 0))


class ParallelHead(nn.Module):
    """A head of which each rank has some rows: rank 0's hidden states to logits, which all ranks get."""

    def __init__(self, layer: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.ranks = layer, ranks

    def forward(self, x: Tensor) -> Tensor:
        """(R, E) -> (R, vocabulary)."""
        if self.ranks.leads:
            self.ranks.begin(LOGITS, num_rows=len(x))
        # E numbers a row, so that the others need not know which rows; the logits are many times that.
        logits = self.ranks.gather(self.layer(self.ranks.broadcast(x)))
        self.ranks.end()
        return logits[:, : self.ranks.shard.whole.vocab_size]


def connect(model: Any, ranks: Ranks) -> None:
    """Put the collectives between the layers of a rank's `Decoder`."""
    model.embed_tokens = ParallelEmbedding(model.embed_tokens, ranks)
    for layer in model.layers:
        layer.self_attn.o_proj = RowParallel(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = RowParallel(layer.mlp.down_proj, ranks)
    model.lm_head = ParallelHead(model.lm_head, ranks)


# ---- Where a runner meets the other ranks: its device --------------------------------------------


class ParallelForward(Forward):
    """Rank 0 tells the others of a batch once it is padded; then all compute it, or replay its graph."""

    def __init__(self, forward: Forward, ranks: Ranks) -> None:
        super().__init__()
        self._forward, self._ranks = forward, ranks

    def pad(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[np.ndarray]:
        """As in the base class."""
        inputs = self._forward.pad(inputs)
        if self._ranks.leads:
            self._ranks.begin(STEP, inputs)
        return inputs

    def __call__(self, compute: Compute, inputs: ModelInputs[Tensor]) -> Tensor:
        """As in the base class."""
        if len(inputs.pending_rows):  # only rank 0 has the tokens that the step in flight draws
            self._ranks.broadcast(inputs.input_ids)
        hidden = self._forward(compute, inputs)
        self._ranks.end()
        return hidden

    def describe(self) -> str:
        """As in the base class."""
        return f"{self._forward.describe()}, {self._ranks.size} ranks"


class CheckedDownload(Download):
    """What a lost rank has spoilt is not read."""

    def __init__(self, download: Download, ranks: Ranks) -> None:
        self._download, self._ranks = download, ranks

    def read(self) -> Tensor:
        """As in the base class."""
        tensor = self._download.read()
        self._ranks.check()
        return tensor


class ParallelDevice:
    """A rank's device: as it is by itself, but for where the ranks have to meet."""

    def __init__(self, device: Device, ranks: Ranks) -> None:
        self._device, self._ranks = device, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def prepare(self, model: Decoder) -> None:
        """As a `Device`; the weights are loaded, and all wait until everybody's are."""
        connect(model, self._ranks)
        self._ranks.minimum(0)
        self._device.prepare(model)

    def count_blocks(self, block_bytes: int, most: int, cache_bytes: int) -> int:
        """As a `Device`; what every rank has room for."""
        return self._ranks.minimum(self._device.count_blocks(block_bytes, most, cache_bytes))

    def capture(self, decodes: Decodes) -> Forward:
        """As a `Device`."""
        return ParallelForward(self._device.capture(decodes), self._ranks)

    def download(self, tensor: Tensor) -> Download:
        """As a `Device`."""
        return CheckedDownload(self._device.download(tensor), self._ranks)

    def release(self) -> None:
        """As a `Device`."""
        self._ranks.close()
        self._device.release()


@torch.inference_mode()
def follow(runner: ModelRunner, ranks: Ranks) -> None:
    """Repeat rank 0's forward passes until it closes."""
    model: Any = runner.model
    while True:
        kind, num_rows, inputs = ranks.receive()
        with runner.device.running():
            if inputs is not None:
                runner.forward(runner.compute, send_inputs(inputs, runner.device.send))
            elif kind == LOGITS:
                like = model.norm.weight
                model.compute_logits(torch.empty(num_rows, len(like), dtype=like.dtype, device=like.device))
            else:
                return


# ---- Processes -----------------------------------------------------------------------------------

ALIVE = b"\0"  # what a rank writes every second
STARTING = 300.0  # seconds a process may take to its first sign of life
SILENCE = 10.0  # seconds without one after which a rank is given up
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
LOST = 3  # exit code of a rank that ends since another one did
START = "import sys; sys.path[:] = sys.argv[1:]; from nanoengine.extensions.parallel import main; main()"


Start = Callable[..., Started]  # as `startup.start_runner`, with the class of runners chosen


class Job(NamedTuple):
    """What a process is told that serves a rank."""

    start: Start
    config: EngineConfig
    checkpoint: Checkpoint
    max_model_len: int
    rank: int
    port: int  # of rank 0's store, on the loopback interface
    num_threads: int | None  # None: PyTorch's default
    parent: int  # process id of rank 0
    is_of_main_thread: bool  # whether it is started by that of rank 0, which lives as long as the process


class Workers:
    """The other ranks, each in a process that ends with this one, and a thread that watches it.

    A rank's standard input tells it that rank 0 is gone; its standard output has its signs of life, and its
    last words. When one is lost, the rest are ended, so that nobody waits for it.
    """

    def __init__(self) -> None:
        self.cause: str | None = None  # why the first rank was lost
        self._effect: str | None = None  # what another one, that lost it, said
        self.on_loss: Callable[[], None] = lambda: None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._ready: set[int] = set()
        self.is_closing = False  # whether a process may end
        self._changed = threading.Condition()

    def start(self, job: Job) -> None:
        """Start a rank. By a fresh interpreter, so that a script needs no `if __name__ == "__main__"`."""
        process = subprocess.Popen(
            [sys.executable, "-c", START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for rank 0, which decides
        )
        self.processes.append(process)
        thread = threading.Thread(target=self._watch, args=(job.rank, process), daemon=True)
        self._threads.append(thread)
        thread.start()
        assert process.stdin is not None
        with suppress(OSError):  # it has ended already, as its watcher will say
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Until every rank has its job.

        Raises:
            EngineDeadError: one cannot be started; with its last words.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.cause or len(self._ready) == len(self.processes))
        if self.cause:
            raise EngineDeadError(self.cause)

    def why(self) -> str | None:
        """Which rank was lost and why, after a collective failed; None: none that was started here."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause or not self.processes, timeout=3)
        return self.cause or self._effect

    def stop(self) -> None:
        """End all processes, and wait for them."""
        self.is_closing = True
        for process in self.processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for process, thread in zip(self.processes, self._threads, strict=True):
            thread.join(CLOSING.total_seconds())
            process.kill()
            thread.join()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        pipe, words, patience = process.stdout.fileno(), b"", STARTING
        while wait([pipe], patience):
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            words, patience = words + data.replace(ALIVE, b""), SILENCE
            with self._changed:
                self._ready.add(rank)
                self._changed.notify_all()
        else:
            process.kill()
            words = f"it hung, without a sign of life for {patience:.0f} s".encode()
        code = process.wait()
        process.stdout.close()
        if self.is_closing:
            return
        how = (
            f"was killed by signal {-code} ({signal.strsignal(-code)})"
            if code < 0
            else f"ended with exit code {code}"
        )
        said = words.decode(errors="replace").strip()
        told = f"rank {rank} (process {process.pid}) {how}" + (f": {said}" if said else "")
        with self._changed:
            if code == LOST:
                self._effect = told
            else:
                self.cause = self.cause or told
                self._changed.notify_all()
        for other in self.processes:
            other.kill()
        self.on_loss()


def main() -> None:
    """Serve a rank; what `Workers.start` runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no report
    job: Job = pickle.load(sys.stdin.buffer)
    if job.is_of_main_thread:
        # On Linux the kernel ends it too, if it is stopped and cannot see that rank 0 is gone. What the
        # kernel waits for is the end of the thread that started it.
        with suppress(AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_live_with, args=(job.parent, report), daemon=True).start()
    try:
        serve(dist.TCPStore("127.0.0.1", job.port, is_master=False), job)
    except BaseException as error:
        with suppress(OSError):
            os.write(report, traceback.format_exc().encode())
        os._exit(LOST if isinstance(error, EngineDeadError) else 1)
    os._exit(0)  # at once: nothing it holds is worth taking down


def _live_with(parent: int, report: int) -> None:
    """Give signs of life, and end the process when rank 0 closed its side or is gone.

    The latter closes the pipe too, unless a fork of rank 0 has it; then the parent is another one.
    """
    with suppress(OSError):
        while os.getppid() == parent:
            os.write(report, ALIVE)
            if wait([0], 1.0):
                break
    os._exit(0)


def serve(store: Any, job: Job) -> None:
    """Be a rank of an engine until rank 0 closes."""
    assert job.checkpoint.decoder_config is not None
    shard = Shard(job.checkpoint.decoder_config, job.rank, job.config.tensor_parallel_size)
    ranks = Ranks(store, shard, job.config.resolve_device(), is_one_host=True)
    if job.num_threads is not None:
        ranks.share_threads(job.num_threads)
    started = job.start(job.config, job.checkpoint, job.max_model_len, shard=shard, wrap=ranks.around)
    follow(started.runner, ranks)


# ---- The runner of rank 0 ------------------------------------------------------------------------


def start_ranks(start: Start, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> Started:
    """Rank 0's runner, with all other ranks at work.

    They are processes of this host that are started here or, under torchrun, the processes it started. All
    but rank 0 of these do not return: they serve until rank 0 closes, and then end (SystemExit).

    Raises:
        ValueError: the model cannot be divided among so many ranks, or there are not so many.
        EngineDeadError: a rank could not be started or ended meanwhile; with its last words.
    """
    size, decoder_config = config.tensor_parallel_size, checkpoint.decoder_config
    if decoder_config is None:
        raise ValueError(
            f"tensor_parallel_size={size} divides models that run on nanoengine's own code; "
            f"{checkpoint.architecture} runs on transformers', whose layers are not divided here"
        )
    Shard(decoder_config, 0, size)  # for its errors
    device = config.resolve_device()
    if device.index is not None:
        raise ValueError(
            f"device must be without an index where tensor_parallel_size is {size}, got {device}"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ:
        return _join_torchrun(start, config, checkpoint, max_model_len, decoder_config)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size={size} needs as many GPUs, there is {torch.cuda.device_count()}"
        )
    num_threads = max(1, torch.get_num_threads() // size) if device.type == "cpu" else None

    def config_of(rank: int) -> EngineConfig:
        return replace(config, device=f"cuda:{rank}") if device.type == "cuda" else config

    workers = Workers()
    try:
        listener = socket.create_server(("127.0.0.1", 0))  # the store's own would be open to the network
        port, settings = listener.getsockname()[1], {"is_master": True, "wait_for_workers": False}
        store = dist.TCPStore("127.0.0.1", port, **settings, master_listen_fd=listener.detach())
        for rank in range(1, size):
            # Without what a rank does not need, and a process might not be told.
            told = replace(config_of(rank), trace=None), replace(checkpoint, tokenizer=None), max_model_len
            is_main = threading.current_thread() is threading.main_thread()
            workers.start(Job(start, *told, rank, port, num_threads, os.getpid(), is_main))
        workers.wait_until_ready()
        shard = Shard(decoder_config, 0, size)
        ranks = Ranks(store, shard, device, is_one_host=True, workers=workers)
        if num_threads is not None:
            ranks.share_threads(num_threads)
    except BaseException:
        workers.stop()
        raise
    return _lead(start, config_of(0), checkpoint, max_model_len, ranks)


def _join_torchrun(
    start: Start,
    config: EngineConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    decoder_config: DecoderConfig,
) -> Started:
    size = int(os.environ["WORLD_SIZE"])
    if size != config.tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size must be torchrun's number of processes, {size}, "
            f"got {config.tensor_parallel_size}"
        )
    store, rank, _ = next(dist.rendezvous("env://", timeout=LOADING))
    store = dist.PrefixStore("nanoengine", store)
    if store.add(f"engines of rank {rank}", 1) > 1:
        raise ValueError(
            "under torchrun a script may have one engine with tensor_parallel_size above 1: the other "
            "processes serve the first one, and end with it"
        )
    device = config.resolve_device()
    if device.type == "cuda":
        config = replace(config, device=f"cuda:{os.environ['LOCAL_RANK']}")
    if rank and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which decides
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    ranks = Ranks(store, Shard(decoder_config, rank, size), device, is_one_host=is_one_host)
    return _lead(start, config, checkpoint, max_model_len, ranks)


def _lead(
    start: Start, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int, ranks: Ranks
) -> Started:
    """The runner, if this is rank 0; else serve."""
    try:
        started = start(config, checkpoint, max_model_len, shard=ranks.shard, wrap=ranks.around)
    except BaseException:
        ranks.close()
        raise
    if ranks.rank:
        follow(started.runner, ranks)
        ranks.close()
        raise SystemExit(0)
    ranks.leads = True
    weakref.finalize(started.runner, ranks.close)  # where nobody closes it: forgotten, or the engine failed
    return started
