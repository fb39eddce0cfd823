"""A server in one thread, on a virtual clock: an event loop, a network and a model that simulations control.

`Loop` has neither sockets nor threads. Its clock jumps to the next timer, so that a minute takes no time. The
engine's own thread function runs at the bottom of the stack, and `Loop.pump` runs the event loop wherever the
real thread could be interrupted: before each step, in the middle of a forward pass, and while it is idle.

`Chain` is the model. A token's K and V are a checksum of all tokens up to it, so a read of a wrong or stale
cache slot changes the logits. The logits are a function of the context, so each answer has a known truth.
"""

import asyncio
import itertools
import random
import signal
import sys
import threading
import time
import uuid
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from nanoengine.assembly_types import Loaded, Opened, Started
from nanoengine.backends.device import Attention, Device, Download
from nanoengine.backends.kv_cache import KVGroup, KVSpec
from nanoengine.backends.torch_attention import TorchAttention
from nanoengine.checkpoints.checkpoint import open_checkpoint
from nanoengine.config import EngineConfig
from nanoengine.engine import ModelRunner
from nanoengine.extensions.structured.token_masks import Grammars, mask_threads
from nanoengine.sampling.drawing import draw_rows
from nanoengine.sampling.sampler import CachedRows, sample_rows
from tests.helpers import DEMO

torch.set_num_threads(1)  # several would wait for each other longer than they compute
NUM_ROWS = 997
CLIENT_SECONDS = 6.0  # in place of the 60 of keys_and_limits.py, so that there are fewer idle ticks
SECONDS = 2000.0  # of the virtual clock; a run that takes longer waits for something that never comes


class Broken(AssertionError):
    """Names the law that a run broke."""


class Injected(Exception):
    """A failure of the forward pass that the script asked for."""


class Busy(Exception):
    """A function in the loop's executor has to wait for the engine's thread, and is called again later."""


# ---- Time --------------------------------------------------------------------------------------------


class Task(asyncio.Task):
    """Hashes by number. The order of a set of tasks then does not depend on their addresses."""

    numbers = itertools.count()

    def __new__(cls, *arguments, **named):
        self = super().__new__(cls)
        self.number = next(cls.numbers)
        return self

    def __hash__(self):
        return self.number


Base: Any = asyncio.BaseEventLoop  # its private attributes have no types


class Loop(Base):  # type: ignore[misc]
    """Runs callbacks in one thread on a virtual clock."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.now, self.rng, self._selector = 0.0, rng, self
        self.accept: Any = None  # makes the server's side of a connection
        self.broken: BaseException | None = None
        self.set_task_factory(lambda loop, coroutine, **named: Task(coroutine, loop=loop, **named))
        self.set_exception_handler(self.note)

    def note(self, loop, context):
        error = context.get("exception") or Broken(context["message"])
        if not isinstance(error, Injected):
            self.broken = self.broken or error

    def time(self):
        return self.now

    def select(self, timeout):
        if timeout is None or self.now > SECONDS:
            raise Broken("a request waits forever")
        self.now += timeout
        return []

    def _process_events(self, events):
        pass

    def _write_to_self(self):
        pass

    def run_in_executor(self, executor, function, *arguments):
        done = self.create_future()

        def run():
            if done.cancelled():
                return
            try:
                done.set_result(function(*arguments))
            except Busy:
                self.call_later(0.01, run)
            except Exception as error:
                done.set_exception(error)

        self.call_later(self.rng.choice([0.0, 0.001, 0.05]), run)
        return done

    async def create_server(self, accept, **settings):
        self.accept = accept
        address = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1))

        async def wait_closed():
            pass

        def close():
            self.accept = None

        return SimpleNamespace(sockets=[address], close=close, wait_closed=wait_closed)

    def pump(self, until) -> None:
        """Run callbacks until a condition holds. The caller is not a callback."""
        asyncio._set_running_loop(self)
        try:
            while not until() and self.broken is None:
                self._run_once()
        finally:
            asyncio._set_running_loop(None)
        if self.broken is not None:
            raise self.broken

    def pass_time(self, seconds: float) -> None:
        """Run callbacks for some virtual time, which a step takes."""
        end = self.now + seconds
        self.call_at(end, int)
        self.pump(lambda: self.now >= end - 1e-9)

    def end(self) -> None:
        """Cancel what a run that broke a law left behind."""
        self.broken = None
        for task in asyncio.all_tasks(self):
            task.cancel()
        with suppress(Exception):
            self.pump(lambda: not self._ready)
        self.close()


class Commands(deque):
    """Stands in for the engine's queue of commands. An idle engine lets the loop run."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.put = loop, self.append

    def get(self):
        self.loop.pump(lambda: len(self) > 0)
        return self.popleft()

    def qsize(self):
        self.loop.pass_time(self.loop.rng.choice([0.0, 0.002, 0.02]))
        return len(self)

    def empty(self):
        return not self


class EngineThread:
    """Stands in for the engine's thread. `run` is called at the bottom of the stack."""

    def __init__(self, target, **named):
        self.target, self.is_over = target, False

    def start(self):
        pass

    def run(self):
        try:
            self.target()
        finally:
            self.is_over = True

    def is_alive(self):
        return not self.is_over

    def join(self):
        if not self.is_over:
            raise Busy


@contextmanager
def virtual(loop: Loop):
    """Give the engine this loop's clock, queue and thread, and a model that is a `Chain`."""

    numbers = random.Random(loop.rng.random())
    fakes = SimpleNamespace(Lock=threading.Lock, Thread=EngineThread)
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(loop._asyncgen_firstiter_hook, loop._asyncgen_finalizer_hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(time, "time", loop.time)
        patch.setattr(time, "thread_time", loop.time)  # a mask must not be slow because the machine is
        patch.setattr("nanoengine.server.keys_and_limits.CLIENT_SECONDS", CLIENT_SECONDS)
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=numbers.getrandbits(128)))
        # Python delays signals in the main thread only, and the engine's thread is another one.
        patch.setattr(signal, "getsignal", lambda number: None)
        patch.setattr("nanoengine.async_llm.queue", SimpleNamespace(SimpleQueue=lambda: Commands(loop)))
        patch.setattr("nanoengine.async_llm.threading", fakes)
        patch.setattr("nanoengine.assembly.start_runner", partial(start_chain, loop))
        patch.setattr("nanoengine.assembly.open_checkpoint", lambda *_, **__: demo())
        patch.setattr("nanoengine.extensions.structured.token_masks.Grammars", lambda *_: grammars())
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*hooks)


# ---- The model ---------------------------------------------------------------------------------------


@cache
def demo() -> Any:
    """Return the bundled checkpoint: its tokenizer, template and settings. Its weights are not read."""
    return open_checkpoint(EngineConfig(model=DEMO))


class SharedGrammars(Grammars):
    """Serves one engine after the other. Each ends the threads that it started."""

    def close(self) -> None:
        """See the base class."""
        super().close()
        self.threads, self.slow_threads = mask_threads(1, 0), mask_threads(1, 10)


@cache
def grammars() -> Grammars:
    """Return the compiler of grammars for all runs: compiling takes longer than a run."""
    return SharedGrammars(demo().tokenizer, demo().vocab_size)


@cache
def table() -> torch.Tensor:
    """Return the logits after each kind of context, (NUM_ROWS, V). One in twelve ends the sequence."""
    logits = 4 * torch.randn(NUM_ROWS, demo().vocab_size, generator=torch.Generator().manual_seed(0))
    logits[::12, demo().hf_config.eos_token_id] = 30.0
    return logits


class Chain:
    """A model whose K and V of a token is a checksum of the tokens up to it."""

    code, capturable, replaceable = "simulated", False, False

    def __init__(self, num_slots: int) -> None:
        self.links = np.zeros(num_slots, dtype=np.int64)  # what the cache holds
        self.fails: Any = lambda stage: None  # is called before and after K and V are written

    def modules(self):
        return []

    def __call__(self, input_ids, positions, caches, attention):
        metadata, size = attention
        self.fails("before")
        ids, places = input_ids.tolist(), positions.tolist()
        slots, bounds = metadata.slot_mapping.tolist(), metadata.cu_seqlens_q.tolist()
        tables, lengths = metadata.block_tables.numpy().astype(np.int64), metadata.seq_lens.tolist()
        needed = set(range(len(ids)) if metadata.needed_rows is None else metadata.needed_rows.tolist())
        hidden = torch.zeros(len(ids), dtype=torch.int64)
        all_slots = (tables[:, :, None] * size + np.arange(size)).reshape(len(tables), -1)
        for i, (first, end) in enumerate(itertools.pairwise(bounds)):  # all writes precede all reads
            start = places[first]
            link = int(self.links[all_slots[i, start - 1]]) if start else 0
            for row in range(first, end):
                link = crc32(ids[row].to_bytes(4, "little"), link)
                self.links[slots[row]] = link
        if self.fails("after"):
            self.links[slots] = -1
            raise Injected("the forward pass failed")
        for i, (first, end) in enumerate(itertools.pairwise(bounds)):
            seen = self.links[all_slots[i, : lengths[i]]]
            for row in needed & set(range(first, end)):
                hidden[row] = crc32(seen[: places[row] + 1].tobytes()) % NUM_ROWS
        return hidden

    def compute_logits(self, hidden):
        logits = table()[hidden]
        return torch.full_like(logits, torch.nan) if self.fails("logits") else logits


class FlakyDevice(Device):
    """A device whose copy to the host can fail."""

    fails: Any = staticmethod(lambda stage: None)

    def download(self, tensor):
        fails, download = self.fails, Download(tensor)

        def read():
            if fails("read"):
                raise Injected("the copy to the host failed")
            return tensor

        return download if tensor.dim() != 1 else SimpleNamespace(read=read)


def laid_out(metadata: Any, size: int) -> Any:
    """Return all that a `Chain` needs to find K and V."""
    return metadata, size


def start_chain(loop: Any, opened: Opened, before_forward: Any) -> Started:
    """Return a runner of a `Chain` in place of a model's."""
    config: Any = opened.config
    specs = [KVSpec(1, 1, 1, torch.int64)]
    size, budget = config.block_size, config.max_num_batched_tokens
    model: Any = Chain((config.num_kv_blocks + 1) * size)
    kind: Any = TorchAttention
    attention = Attention(kind, laid_out, [])
    device = FlakyDevice(torch.device("cpu"), config)
    rows, sample = CachedRows(config.max_num_seqs, config.max_model_len), partial(sample_rows, draw=draw_rows)
    runner = ModelRunner(
        model, device, attention, sample, size, sampling_rows=rows, before_forward=before_forward
    )
    loaded = Loaded(
        *(torch.float32, b"", specs, [KVGroup([0], None)], 0, size, opened.max_model_len, 1, budget),
        max_num_chunks=config.max_num_seqs * (1 + config.num_speculative_tokens),
    )
    return Started(opened, runner, loaded, config.num_kv_blocks, num_state_slots=0, memory="")


# ---- The network -------------------------------------------------------------------------------------

HIGH_WATER = 2048  # bytes that a slow client leaves unread until the server has to wait


class Pipe(asyncio.Transport):
    """The server's end of a connection to a client that reads `rate` bytes every 0.05 seconds."""

    def __init__(self, loop: Loop, rate: int) -> None:
        super().__init__()
        self.loop, self.rate = loop, rate
        self.unread, self.received, self.inbound = bytearray(), bytearray(), deque[bytes]()
        self.is_closed = self.is_lost = self.is_paused = self.is_full = self.drains = False
        self.on_data: Any = lambda: None
        self.protocol = loop.accept()
        self.protocol.connection_made(self)

    # -- the server's side

    def get_extra_info(self, name, default=None):
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self):
        return self.is_closed

    def write(self, data):
        assert isinstance(data, bytes | bytearray)
        if self.is_lost or not data:
            return
        self.unread += data
        if len(self.unread) > HIGH_WATER and not self.is_full:
            self.is_full = True
            self.protocol.pause_writing()
        self.drain_later()

    def close(self):
        self.is_closed = True
        self.drain_later()

    def abort(self):
        self.loop.call_soon(self.lose, None)

    def get_write_buffer_size(self):
        return len(self.unread)

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False
        self.loop.call_soon(self.deliver)

    # -- the client's side

    def drain_later(self):
        if not self.drains and self.rate:
            self.drains = True
            self.loop.call_later(0.05 if self.rate < 1 << 16 else 0.0001, self.drain)

    def drain(self):
        """Read some bytes, as the client does."""
        self.drains = False
        if self.is_lost:
            return
        self.received += self.unread[: self.rate]
        del self.unread[: self.rate]
        if self.is_full and len(self.unread) < HIGH_WATER // 2:
            self.is_full = False
            self.protocol.resume_writing()
        self.on_data()
        if self.unread:
            self.drain_later()
        elif self.is_closed:
            self.lose(None)

    def send(self, data: bytes) -> None:
        """Send bytes to the server."""
        self.inbound.append(data)
        self.deliver()

    def deliver(self):
        while self.inbound and not (self.is_paused or self.is_closed):
            self.protocol.data_received(self.inbound.popleft())

    def lose(self, error):
        """End the connection: the client left, or has read all after the server closed it."""
        if not self.is_lost:
            self.is_lost = self.is_closed = True
            self.protocol.connection_lost(error)
            self.on_data()
