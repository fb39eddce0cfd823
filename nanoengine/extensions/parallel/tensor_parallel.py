"""Tensor parallelism: several processes ("ranks") run one model, each with a share of every layer's weights.

Rank 0 is the engine: it alone schedules, samples and serves users. Each other rank holds a `ModelRunner` like
rank 0's and repeats its forward passes (`follow`). Rank 0 sends the inputs of a step, and then the number of
rows whose logits it needs (`Ranks.begin`), over a connection to each rank. A broadcast takes twice as long.
Collectives use NCCL on GPUs and gloo on a CPU. docs/19-splitting-a-model.md explains what is divided.

A failure inside a forward pass, on any rank, ends the engine: the other ranks wait for a collective that will
not come. After that you can close the engine and start another one.

Sources: Megatron-LM, https://arxiv.org/abs/1909.08053; vLLM's model_executor/layers/linear.py.
"""

import ctypes
import multiprocessing.process
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
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.util import Finalize
from typing import Any, cast

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions

from nanoengine.assembly_types import Opened, Started
from nanoengine.backends.device import Compute, Decodes, Device, Forward
from nanoengine.backends.step_inputs import ModelInputs, send_inputs
from nanoengine.engine import ModelRunner
from nanoengine.extensions.parallel.rank_processes import Workers
from nanoengine.extensions.parallel.weight_shards import Shard
from nanoengine.models.decoder import Decoder
from nanoengine.outputs import EngineDeadError

dist: Any = torch.distributed  # the methods of its process groups are untyped

# ---- Ranks: communication between them -----------------------------------------------------------

LOADING = timedelta(hours=1)  # timeout while ranks load weights
COLLECTIVE = timedelta(minutes=5)  # rank 0's timeout in a step
FOREVER = timedelta(days=365)  # the other ranks' timeout: they wait for rank 0, and end when it does
CLOSING = 5.0  # timeout for the other ranks to end, in seconds

Order = ModelInputs[np.ndarray] | int | None  # compute a step, or the logits of this many rows; None: close


class Ranks:
    """Connects this process with the other ranks of an engine: collectives, and messages from rank 0.

    It makes process groups of its own, so that a process can hold several engines.
    """

    def __init__(
        self, store: Any, opened: Opened, rank: int, is_local: bool, workers: Any = None, num_threads: int = 0
    ) -> None:
        assert opened.checkpoint.decoder_config is not None
        self.rank, self.size = rank, opened.config.tensor_parallel_size
        self.shard = Shard(opened.checkpoint.decoder_config, rank, self.size)
        self.leads = False  # whether to announce computations; true on rank 0 after startup
        self.lost: str | None = None  # why the engine cannot be used anymore
        self._workers: Workers | None = workers
        self._process_id = os.getpid()
        self._num_threads = 0  # PyTorch's number of threads before, to be restored
        if num_threads:  # the ranks on one host share its cores
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(num_threads)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = FOREVER if self.rank else COLLECTIVE
        gloo = dist.ProcessGroupGloo
        device = gloo.create_device(hostname="127.0.0.1") if is_local else gloo.create_default_device()
        options._devices = [device]
        self._control: Any = gloo(dist.PrefixStore("gloo", store), self.rank, self.size, options)
        self._group: Any = self._control
        if opened.config.resolve_device().type == "cuda":  # not tested on a GPU yet
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = COLLECTIVE
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), self.rank, self.size, nccl)
            if workers is not None:
                workers.on_loss = self._group.abort  # ends kernels that wait for a lost rank
        self._connections = _connect(store, self.rank, self.size, is_local, workers)
        _alive.add(self)

    # -- collectives: all ranks must call them, in the same order

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by the sum of all ranks' x, in place, and return it."""
        self._wait(lambda: self._group.allreduce([x], _queued(dist.AllreduceOptions())))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace x by rank 0's x, in place, and return it."""
        self._wait(lambda: self._group.broadcast([x], _queued(dist.BroadcastOptions())))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x, each (R, C), side by side: (R, size * C)."""
        out = x.new_empty(self.size * len(x), x.shape[1])
        options = _queued(AllgatherOptions())
        self._wait(lambda: self._group._allgather_base(out, x.contiguous(), options))
        return out.view(self.size, *x.shape).transpose(0, 1).reshape(len(x), -1)

    def minimum(self, number: int) -> int:
        """Return the smallest of all ranks' numbers. The timeout is long: ranks may be loading weights."""
        x = torch.tensor([number])
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MIN, LOADING
        self._wait(lambda: self._control.allreduce([x], options))
        return int(x)

    # -- messages

    def begin(self, order: ModelInputs[np.ndarray] | int) -> None:
        """Announce the next computation to the other ranks. Until `end` they depend on this rank."""
        self.check()
        if isinstance(order, ModelInputs):  # the other ranks compute all rows, and sample none
            nothing, metadata = np.zeros(0, dtype=np.int64), order.metadata._replace(needed_rows=None)
            order = order._replace(metadata=metadata, sample_rows=nothing, pending_samples=nothing)
        self._tell(order)
        self.lost = "rank 0 failed in a forward pass, in which the other ranks wait for it"

    def end(self) -> None:
        """Mark the computation that `begin` announced as done."""
        self.lost = None

    def receive(self) -> Order:
        """Wait for rank 0's next message, and return it."""
        with self._guard():
            return self._connections[0].recv()  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise EngineDeadError if a rank is lost."""
        if self._workers is not None:
            self.lost = self.lost or self._workers.cause
        if self.lost:
            raise EngineDeadError(f"the engine has failed, create another one: {self.lost}")

    def _tell(self, order: Order) -> None:
        message = pickle.dumps(order)
        with self._guard():
            for connection in self._connections:
                connection.send_bytes(message)

    def _wait(self, start: Callable[[], Any]) -> None:
        with self._guard():
            if (work := start()) is not None:  # some groups return None for queued work
                work.wait()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn communication failures into an EngineDeadError that says which rank was lost, and why."""
        try:
            yield
        except (EOFError, OSError, RuntimeError) as error:
            cause = self._workers.why() if self._workers is not None else None
            self.lost = cause or f"the ranks lost each other: {str(error) or 'a connection was closed'}"
            raise EngineDeadError(f"the engine has failed, create another one: {self.lost}") from error

    # -- startup and shutdown

    def wrap(self, device: Device) -> Device:
        """Return the rank's device with the communication between ranks added."""
        return cast(Device, ParallelDevice(self, device))

    def close(self) -> None:
        """Tell the other ranks to end, and wait until the processes started here have ended."""
        if os.getpid() != self._process_id:
            return  # a forked process does not own the ranks
        if self._workers is not None:
            self._workers.is_closing = True
        if is_told := self.leads and not self.lost:
            with suppress(EngineDeadError):
                self._tell(None)
        if not self.lost:
            # Gloo's thread takes the GIL to free the last message, which would kill the process during
            # interpreter shutdown. So end the thread here. NCCL's group stays, because CUDA graphs use it.
            if self._group is self._control:
                self._group = None
            self._control = None
        for connection in self._connections:
            connection.close()
        self.leads, self.lost = False, self.lost or "it is closed"
        if self._workers is not None:
            self._workers.stop(CLOSING if is_told else 0.0)
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
            self._num_threads = 0


def _connect(
    store: Any, rank: int, size: int, is_local: bool, workers: Workers | None
) -> list["Connection[Any, Any]"]:
    """Return this rank's connections: from rank 0 to each other rank, and from each of those to rank 0."""
    if rank:
        host = "127.0.0.1" if is_local else os.environ["MASTER_ADDR"]
        port, key = store.get("listener").decode().split()
        connections = [Client((host, int(port)), authkey=bytes.fromhex(key))]
    else:
        key, address = secrets.token_hex(), ("127.0.0.1" if is_local else "", 0)
        with Listener(address, backlog=size, authkey=bytes.fromhex(key)) as listener:
            store.set("listener", f"{listener.address[1]} {key}")
            connections, arriving = [], [listener._listener._socket]  # type: ignore[attr-defined]
            while len(connections) < size - 1:
                if workers is not None:  # raises if a rank is lost, which `accept` would wait for
                    workers.wait_until(lambda: bool(wait(arriving, 0)))
                connections.append(listener.accept())
    for connection in connections:  # disable Nagle's algorithm: messages follow each other without replies
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


_alive: "weakref.WeakSet[Ranks]" = weakref.WeakSet()


def _disown() -> None:
    """Leave the ranks to the parent process. Called in a fork, whose exit would otherwise end them."""
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    for ranks in _alive:  # leak the groups: their destructors would wait for threads that only the parent has
        for group in (ranks._control, ranks._group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def _queued(options: Any) -> Any:
    """Make NCCL use the current stream instead of its own, which saves two waits. Return the options."""
    options.asyncOp = False
    return options


# ---- Layers --------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """Wraps a layer whose weight the ranks share."""

    def __init__(self, layer: Any, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.ranks = layer, ranks


class RowParallel(Parallel):
    """Splits a linear layer by columns: each rank multiplies its own inputs, and the outputs are summed."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, the rank's inputs) to (T, outputs)."""
        return self.ranks.all_reduce(self.layer(x))


class ParallelEmbedding(Parallel):
    """Splits an embedding by rows: each rank returns zeros for the others' tokens, and all are summed."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map (T,) to (T, E)."""
        num_rows = self.layer.num_embeddings
        rows = input_ids - self.ranks.rank * num_rows
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        x = self.layer(rows.masked_fill(is_elsewhere, 0))
        return self.ranks.all_reduce(x.masked_fill(is_elsewhere.unsqueeze(-1), 0))


class ParallelHead(Parallel):
    """Splits a head by rows, and maps rank 0's hidden states to logits, which all ranks get."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (R, E) to (R, vocabulary)."""
        if self.ranks.leads:
            self.ranks.begin(len(x))
        # Broadcast rank 0's rows, so that the others need not know which ones to use. That costs E numbers
        # per row, a small part of the logits that are gathered.
        logits = self.ranks.gather(self.layer(self.ranks.broadcast(x)))
        self.ranks.end()
        return logits[:, : self.ranks.shard.whole.vocab_size]


def connect(model: Any, ranks: Ranks) -> None:
    """Insert the collectives between the layers of a rank's `Decoder`."""
    model.embed_tokens = ParallelEmbedding(model.embed_tokens, ranks)
    for layer in model.layers:
        layer.self_attn.o_proj = RowParallel(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = RowParallel(layer.mlp.down_proj, ranks)
        if ranks.rank:  # rank 0 adds the biases
            layer.self_attn.o_proj.layer.bias = layer.mlp.down_proj.layer.bias = None
    model.lm_head = ParallelHead(model.lm_head, ranks)


# ---- Devices: where a runner communicates with the other ranks -----------------------------------


class ParallelForward(Forward):
    """Announces each padded batch to the other ranks. Then all ranks compute it, or replay its graph."""

    def __init__(self, forward: Forward, ranks: Ranks) -> None:
        super().__init__(f"{forward.remark}, {ranks.size} ranks")
        self._forward, self._ranks = forward, ranks

    def pad(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[np.ndarray]:
        """Pad a batch and, on rank 0, announce it."""
        inputs = self._forward.pad(inputs)
        if self._ranks.leads:
            self._ranks.begin(inputs)
        return inputs

    def __call__(self, compute: Compute, inputs: ModelInputs[Tensor]) -> Tensor:
        """Return the batch's hidden states, (T, E)."""
        if len(inputs.pending_rows):  # only rank 0 has the tokens that the step in flight samples
            self._ranks.broadcast(inputs.input_ids)
        hidden = self._forward(compute, inputs)
        self._ranks.end()
        return hidden


class ParallelDevice:
    """Wraps a rank's device, and adds the communication between ranks where it is needed."""

    def __init__(self, ranks: Ranks, device: Device) -> None:
        self._device, self._ranks = device, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def prepare(self, model: Decoder) -> None:
        """Connect a loaded model with the other ranks, wait until all have loaded theirs, then prepare it."""
        connect(model, self._ranks)
        self._ranks.minimum(0)
        self._device.prepare(model)

    def count_blocks(self, block_bytes: int, max_blocks: int, cache_bytes: int) -> int:
        """Return the number of blocks that every rank has room for."""
        return self._ranks.minimum(self._device.count_blocks(block_bytes, max_blocks, cache_bytes))

    def capture(self, decodes: Decodes) -> Forward:
        """Return the device's `Forward`, wrapped so that all ranks run each batch."""
        return ParallelForward(self._device.capture(decodes), self._ranks)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a block as the device does, and raise if a rank was lost: it may have corrupted the results."""
        with self._device.running():
            yield
            self._ranks.check()

    def release(self) -> None:
        """Disconnect from the other ranks, and release the device."""
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


# ---- Startup -------------------------------------------------------------------------------------

# `assembly.start_runner`. The runner calls the function before each forward pass.
Start = Callable[[Opened, Callable[[], object], Ranks], Started]


def serve(rank: int, start: Start, opened: Opened, port: int, num_threads: int) -> None:
    """Serve as a rank of an engine until rank 0 closes. Each process of `Workers` runs this."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.add("ready", 1)
    ranks = Ranks(store, opened, rank, True, num_threads=num_threads)
    follow(start(_on_gpu(opened, rank), lambda: None, ranks).runner, ranks)


def _on_gpu(opened: Opened, gpu: int) -> Opened:
    """Return a rank's model. If the ranks run on GPUs, its device is the GPU with this number."""
    is_gpu = opened.config.resolve_device().type == "cuda"
    return opened._replace(config=replace(opened.config, device=f"cuda:{gpu}")) if is_gpu else opened


def start_ranks(start: Start, opened: Opened, before_forward: Callable[[], object]) -> Started:
    """Start all ranks, and return rank 0's runner. Only rank 0's calls `before_forward`.

    The other ranks are processes started here on this host or, under torchrun, the processes that it started.
    Under torchrun only rank 0 returns. The others serve until rank 0 closes, and then raise SystemExit. The
    message of an EngineDeadError includes the traceback of the rank that ended.
    """
    config, checkpoint, _ = opened
    size = config.tensor_parallel_size
    if checkpoint.decoder_config is None:
        raise ValueError(
            f"tensor_parallel_size={size} needs a model that runs on nanoengine's own code; "
            f"{checkpoint.architecture} runs on transformers' code"
        )
    Shard(checkpoint.decoder_config, 0, size)  # raises if the model cannot be divided
    device = config.resolve_device()
    if device.index is not None:
        raise ValueError(
            f"device must have no index if tensor_parallel_size is above 1, got {device}; use {device.type!r}"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ:
        gpu, ranks = int(os.environ.get("LOCAL_RANK", 0)), _join_torchrun(opened)
    else:
        gpu, ranks = 0, _start_processes(start, opened)
    try:
        started = start(_on_gpu(opened, gpu), before_forward, ranks)
    except BaseException:
        ranks.close()
        raise
    if ranks.rank:
        follow(started.runner, ranks)
        ranks.close()
        raise SystemExit(0)
    ranks.leads = True
    # If the engine is never closed, or fails to start. At exit this runs before multiprocessing ends them.
    Finalize(started.runner, ranks.close, exitpriority=0)
    return started


def _start_processes(start: Start, opened: Opened) -> Ranks:
    config = opened.config
    size, device = config.tensor_parallel_size, config.resolve_device()
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(f"tensor_parallel_size={size} needs {size} GPUs, found {torch.cuda.device_count()}")
    num_threads = max(1, torch.get_num_threads() // size) if device.type == "cpu" else 0
    listener = socket.create_server(("127.0.0.1", 0))  # TCPStore's own would be open to the network
    port, options = listener.getsockname()[1], {"is_master": True, "wait_for_workers": False}
    store = dist.TCPStore("127.0.0.1", port, **options, master_listen_fd=listener.detach())
    # Leave out what a rank does not need and pickle may not support.
    config = replace(config, trace=None, scheduler_cls=None)
    sent = opened._replace(config=config, checkpoint=replace(opened.checkpoint, tokenizer=None))
    workers = Workers(serve, size - 1, start, sent, port, num_threads)
    try:
        workers.wait_until(lambda: store.add("ready", 0) == size - 1)
        return Ranks(store, opened, 0, True, workers, num_threads)
    except BaseException:
        workers.stop()
        raise


def _join_torchrun(opened: Opened) -> Ranks:
    config = opened.config
    size = int(os.environ["WORLD_SIZE"])
    if size != config.tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size must be the number of torchrun's processes, {size}, "
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by rank 0 only
    return Ranks(store, opened, rank, os.environ.get("LOCAL_WORLD_SIZE") == str(size))
