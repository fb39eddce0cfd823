"""Tensor parallelism: one model over several processes ("ranks"), each with a share of every layer's weights.

Rank 0 is the engine: it alone schedules, samples and talks to users. The others hold a `ModelRunner` like
its own and repeat its forward passes (`follow`). A step, with two ranks:

    rank 0                                      rank 1
    begin(inputs)                       ->      receive the step's inputs
    embed, layers...         <- all-reduce ->   the same, with its own shares
    begin(number of rows)               ->      receive the number
    its part of the head     <- gather ->       its part of the head
    sample                                      wait for the next message

Heads, the MLPs' neurons and the vocabulary are divided. What follows from a share of the heads or neurons is
a summand of the layer's output; so there are two all-reduces in a layer, and one behind the embedding.
The collectives are NCCL's on GPUs and gloo's on a CPU. Rank 0 sends its messages by multiprocessing's
connections, one to each of the others.

Any failure inside a forward pass, on whichever rank, is the end of the engine: the others wait for a
collective that will not come. `close` and the start of another engine work after that.

Top to bottom: what ranks tell each other, layers, devices, the start. processes.py starts and watches the
other ranks' processes; models/shard.py says which part of the weights a rank has.
Sources: Megatron-LM, https://arxiv.org/abs/1909.08053; vLLM's model_executor/layers/linear.py.
"""

import ctypes
import os
import pickle
import secrets
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions

from nanoengine.backends.device import Compute, Decodes, Device, Download, Forward
from nanoengine.backends.inputs import ModelInputs, send_inputs
from nanoengine.config import EngineConfig
from nanoengine.engine import ModelRunner
from nanoengine.extensions.processes import CLOSING, Workers
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder
from nanoengine.models.shard import Shard
from nanoengine.startup import Started
from nanoengine.steps import EngineDeadError

dist: Any = torch.distributed  # whose groups' own methods have no types

# ---- Ranks: what they tell each other ------------------------------------------------------------

LOADING = timedelta(hours=1)  # how long ranks wait for each other while weights are loaded
COLLECTIVE = timedelta(minutes=5)  # how long rank 0 waits in a step
FOREVER = timedelta(days=365)  # the others wait for rank 0, with which they end

Order = ModelInputs[np.ndarray] | int | None  # what to compute: a step, logits of so many rows; None: the end


class Ranks:
    """This process among the ranks of an engine: the collectives, and rank 0's messages.

    Groups of its own, not PyTorch's global one, so that several engines may be in a process.
    """

    def __init__(
        self,
        store: Any,
        shard: Shard,
        device: torch.device,
        connections: list["Connection[Any, Any]"],
        *,
        is_one_host: bool,
        workers: Workers | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.shard, self.rank, self.size = shard, shard.rank, shard.size
        self.leads = False  # whether to announce what is computed; on rank 0, once all are set up
        self.lost: str | None = None  # why the engine is of no use any more
        self._connections = connections  # to all other ranks; from one of those to rank 0
        self._workers = workers
        self._process_id = os.getpid()
        self._num_threads: int | None = None  # PyTorch's before
        if num_threads is not None:  # the ranks of a host share its cores
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(num_threads)
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
        self._wait(lambda: self._group.broadcast([x], _queued(dist.BroadcastOptions())))
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

    def begin(self, order: ModelInputs[np.ndarray] | int) -> None:
        """Tell the others what is computed next. From here to `end` they depend on this rank."""
        self.check()
        if isinstance(order, ModelInputs):  # the others compute all rows, and sample none
            nothing, metadata = np.zeros(0, dtype=np.int64), order.metadata._replace(needed_rows=None)
            order = order._replace(metadata=metadata, sample_rows=nothing, pending_samples=nothing)
        self._tell(order)
        self.lost = "rank 0 failed in a forward pass, in which the other ranks wait for it"

    def end(self) -> None:
        """All of what was begun is done."""
        self.lost = None

    def receive(self) -> Order:
        """Return what rank 0 began. Wait for it as long as rank 0 lives."""
        with self._guard():
            return self._connections[0].recv()  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise EngineDeadError once a rank is lost."""
        if self._workers is not None:
            self.lost = self.lost or self._workers.cause
        if self.lost:
            raise EngineDeadError(f"the engine is of no use any more: {self.lost}")

    def _tell(self, order: Order) -> None:
        message = pickle.dumps(order)
        with self._guard():
            for connection in self._connections:
                connection.send_bytes(message)

    def _wait(self, start: Callable[[], Any]) -> None:
        with self._guard():
            if (work := start()) is not None:  # of what is queued behind all else, some groups return nothing
                work.wait()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn what fails between ranks into an EngineDeadError that says which rank was lost, and why."""
        try:
            yield
        except (EOFError, OSError, RuntimeError) as error:
            cause = self._workers.why() if self._workers is not None else None
            self.lost = cause or f"the ranks lost each other: {str(error) or 'a connection was closed'}"
            raise EngineDeadError(f"the engine is of no use any more: {self.lost}") from error

    # -- beginning and end

    def around(self, device: Device) -> Any:
        """The device, and where it meets those of the other ranks."""
        return ParallelDevice(device, self)

    def close(self) -> None:
        """Let the other ranks go, and wait until the processes started here are gone."""
        if os.getpid() != self._process_id:
            return  # a fork: the ranks are not its own
        if self._workers is not None:
            self._workers.is_closing = True
        if is_told := self.leads and not self.lost:
            with suppress(EngineDeadError):
                self._tell(None)
        if not self.lost:
            # Gloo's thread takes the interpreter's lock to let go of the last message, which would kill the
            # process while the interpreter ends. So the thread ends here. NCCL's stays, as graphs use it.
            if self._group is self._control:
                self._group = None
            self._control = None
        self.leads, self.lost = False, self.lost or "it is closed"
        if self._workers is not None:
            self._workers.stop(CLOSING if is_told else 0.0)
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
            self.ranks.begin(len(x))
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
            self._ranks.begin(inputs)
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
    while (order := ranks.receive()) is not None:
        with runner.device.running():
            if isinstance(order, ModelInputs):
                runner.forward(runner.compute, send_inputs(order, runner.device.send))
            else:
                like = model.norm.weight
                model.compute_logits(torch.empty(order, len(like), dtype=like.dtype, device=like.device))


# ---- The start -----------------------------------------------------------------------------------

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


def serve(job: Job, connection: "Connection[Any, Any]") -> None:
    """Be a rank of an engine until rank 0 closes; a process of `Workers` runs this."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    shard, device = _shard_of(job.config, job.checkpoint, job.rank), job.config.resolve_device()
    ranks = Ranks(store, shard, device, [connection], is_one_host=True, num_threads=job.num_threads)
    started = job.start(job.config, job.checkpoint, job.max_model_len, shard=shard, wrap=ranks.around)
    follow(started.runner, ranks)


def start_ranks(start: Start, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> Started:
    """Return rank 0's runner, with all other ranks at work.

    These are processes of this host that are started here or, under torchrun, the processes it started. All
    but rank 0 of these do not return: they serve until rank 0 closes, and then end (SystemExit).

    Raises:
        ValueError: the model cannot be divided among so many ranks, or there are not so many.
        EngineDeadError: a rank could not be started or ended meanwhile; with its last words.
    """
    size = config.tensor_parallel_size
    if checkpoint.decoder_config is None:
        raise ValueError(
            f"tensor_parallel_size={size} divides models that run on nanoengine's own code; "
            f"{checkpoint.architecture} runs on transformers', whose layers are not divided here"
        )
    _shard_of(config, checkpoint, 0)  # for its errors
    device = config.resolve_device()
    if device.index is not None:
        raise ValueError(
            f"device must be without an index where tensor_parallel_size is {size}, got {device}"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ:
        number, ranks = int(os.environ.get("LOCAL_RANK", 0)), _join_torchrun(config, checkpoint)
    else:
        number, ranks = 0, _start_processes(start, config, checkpoint, max_model_len)
    config = _on_gpu(config, number)
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


def _shard_of(config: EngineConfig, checkpoint: Checkpoint, rank: int) -> Shard:
    assert checkpoint.decoder_config is not None
    return Shard(checkpoint.decoder_config, rank, config.tensor_parallel_size)


def _on_gpu(config: EngineConfig, number: int) -> EngineConfig:
    """Return the config of a rank, which has the GPU of that number if the ranks compute on GPUs."""
    return replace(config, device=f"cuda:{number}") if config.resolve_device().type == "cuda" else config


def _start_processes(start: Start, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> Ranks:
    size, device = config.tensor_parallel_size, config.resolve_device()
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size={size} needs as many GPUs, there is {torch.cuda.device_count()}"
        )
    num_threads = max(1, torch.get_num_threads() // size) if device.type == "cpu" else None
    workers = Workers("nanoengine.extensions.parallel", "serve")
    try:
        listener = socket.create_server(("127.0.0.1", 0))  # the store's own would be open to the network
        port, settings = listener.getsockname()[1], {"is_master": True, "wait_for_workers": False}
        store = dist.TCPStore("127.0.0.1", port, **settings, master_listen_fd=listener.detach())
        for rank in range(1, size):
            # Without what a rank does not need, and a process might not be told.
            told = replace(_on_gpu(config, rank), trace=None), replace(checkpoint, tokenizer=None)
            workers.start(Job(start, *told, max_model_len, rank, port, num_threads))
        workers.wait_until_ready()
        return Ranks(
            *(store, _shard_of(config, checkpoint, 0), device, workers.connections),
            is_one_host=True,
            workers=workers,
            num_threads=num_threads,
        )
    except BaseException:
        workers.stop()
        raise


def _join_torchrun(config: EngineConfig, checkpoint: Checkpoint) -> Ranks:
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
    if rank and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which decides
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    connections = _connect(store, rank, size, is_one_host)
    shard, device = _shard_of(config, checkpoint, rank), config.resolve_device()
    return Ranks(store, shard, device, connections, is_one_host=is_one_host)


def _connect(store: Any, rank: int, size: int, is_one_host: bool) -> list["Connection[Any, Any]"]:
    """Connect rank 0 with each of the others."""
    if rank:
        host = "127.0.0.1" if is_one_host else os.environ["MASTER_ADDR"]
        port, key = store.get("listener").decode().split()
        connections = [Client((host, int(port)), authkey=bytes.fromhex(key))]
    else:
        key, address = secrets.token_hex(), ("127.0.0.1" if is_one_host else "", 0)
        with Listener(address, backlog=size, authkey=bytes.fromhex(key)) as listener:
            store.set("listener", f"{listener.address[1]} {key}")
            connections = [listener.accept() for _ in range(1, size)]
    for connection in connections:  # at once: a message may follow another that nobody answers
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections
