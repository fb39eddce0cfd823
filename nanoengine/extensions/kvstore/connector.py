"""The KV store: keeps full blocks outside the process, for later requests with the same prefix.

    LLM(..., kv_store="/dev/shm/kv")               # a directory: local, or shared by several hosts
    LLM(..., kv_store=DirectoryStore("/mnt/kv", max_bytes=100 << 30))  # from stores.py
    LLM(..., kv_store="redis://localhost:6379/0")  # pip install 'nanoengine[redis]'

After a restart, or in another process, an engine reuses a prefix that was computed before. An entry is one
block: the K and V of `block_size` tokens in every layer. Its key is a SHA-256, chained over all blocks before
it and seeded with the fingerprint of everything that K and V depend on. An entry begins with a checksum of
its key and its content. A mismatch is a miss.

    admission     the sequence's blocks after its prefix cache hits are read from the store, as far as the
                  store has them: `StoringBlockManager.allocate`
    launch        the blocks that the step fills are copied out, queued after its kernels: `StoringCore`
    collect       the step has succeeded: a thread writes the blocks that the store does not have yet

A store that fails costs time at most, and no request fails: its entries are not found, and writes are lost.
Source of the idea: vLLM's KVConnector, https://docs.vllm.ai/en/latest/features/disagg_prefill
"""

import contextlib
import hashlib
import itertools
import json
import logging
import threading
import time
from collections import abc, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from nanoengine.assembly_types import Started
from nanoengine.backends.device import Download, upload
from nanoengine.backends.kv_cache import block_bytes
from nanoengine.engine import Collected, EngineCore, Launch, ModelRunner, ScheduledBatch, Scheduler, Sequence
from nanoengine.extensions.kvstore.stores import DirectoryStore, open_store
from nanoengine.extensions.sliding_windows import WindowedBlockManager

FORMAT_VERSION = 2  # rises when K and V change, too
CHECKSUM_BYTES = xxh3_128().digest_size
MAX_QUEUED_BYTES = 1 << 30  # of blocks that wait to be written; above this, saving waits for a later step
RETRY_SECONDS = 30.0  # how long a store is not called after a failure

# ---- entries -------------------------------------------------------------------------------------


def digest_weights(model: torch.nn.Module) -> bytes:
    """Return a hash of all weights with their names, dtypes and shapes."""
    digest = xxh3_128()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def fingerprint_of(weights: Any, hf_config: Any, layout: Any) -> bytes:
    """Return a hash of everything that K and V depend on, except the tokens and the kernels.

    `weights` identifies the weights, their dtype and their quantization, `layout` how a block stores K and V.
    """
    config = hf_config.to_dict()
    for name in "_name_or_path", "transformers_version":
        config.pop(name, None)
    parts = [FORMAT_VERSION, weights, config, layout]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def chain_keys(fingerprint: bytes, contents: Iterable[bytes]) -> list[str]:
    """Return a key for each block, given the blocks' tokens. A key identifies all tokens up to its block."""
    keys, key = [], fingerprint
    for content in contents:
        key = hashlib.sha256(key + content).digest()
        keys.append(key.hex())
    return keys


def encode(key: str, parts: Iterable[memoryview]) -> bytes:
    """Return an entry: a checksum, and the groups' K and V."""
    content = b"".join(parts)
    return _checksum(key, content) + content


def decode(entry: bytes, key: str, sizes: abc.Sequence[int]) -> list[np.ndarray] | None:
    """Return the groups given to `encode`, (bytes,) uint8, or None if it is damaged or another key's."""
    content = memoryview(entry)[CHECKSUM_BYTES:]
    if len(content) != sum(sizes) or entry[:CHECKSUM_BYTES] != _checksum(key, content):
        return None
    return np.split(np.frombuffer(bytearray(content), np.uint8), np.cumsum(sizes)[:-1])  # writable


def _checksum(key: str, content: bytes | memoryview) -> bytes:
    """Return a checksum that guards against corruption, not against tampering."""
    digest = xxh3_128(key.encode())
    digest.update(content)
    return digest.digest()


# ---- the connector: between a store and an engine ------------------------------------------------


class RetryGate:
    """Calls a store that may fail. After a failure it pauses the calls; it logs only the first failure."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._resume_at = 0.0  # seconds of time.monotonic(); 0: it has not failed yet

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function and return its result, or None if it raises or calls are paused."""
        if time.monotonic() < self._resume_at:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            if not self._resume_at:
                message = "the KV store cannot be %s; it is retried every %.0f s: %r"
                logging.getLogger(__name__).warning(message, self._what, RETRY_SECONDS, error)
            self._resume_at = time.monotonic() + RETRY_SECONDS
            return None


class Filled(NamedTuple):
    """Lists blocks [first, len(contents)) of a sequence that a step fills: the next rows of `Snapshot`."""

    seq: Sequence
    contents: list[bytes]  # the tokens of each of its blocks, int32
    first: int
    tables: list[list[int]]  # by group: the block ids


class Snapshot(NamedTuple):
    """Holds the K and V of the blocks that a step fills, while they are copied to the host."""

    filled: list[Filled]
    parts: list[Download]  # K and V of the first group's first layer, its second..., each (rows, bytes) uint8
    is_finite: Download  # (rows,) bool: a NaN would spread to every engine that loads it
    num_bytes: int


class KVConnector:
    """Copies blocks from a store, which connectors may share, to a runner's KV cache and back."""

    def __init__(self, started: Started) -> None:
        """Open the store of `EngineConfig.kv_store`, or raise ValueError."""
        (config, checkpoint, _), runner, loaded = started[:3]
        specs, groups = loaded.kv_specs, loaded.kv_groups
        forms = (getattr(module, "form", None) for module in runner.model.modules())
        # What counts is what the device chose: "auto" rounds activations on some processors only.
        rounds = any(form is not None and form.activation_bits for form in forms)
        weights = loaded.weights_digest.hex(), config.quantization, rounds
        self.fingerprint = fingerprint_of(weights, checkpoint.hf_config, [runner.block_size, specs, groups])
        self.store, self.runner = open_store(config.kv_store), runner
        self.layers = [group.layers for group in groups]
        self.sizes = [block_bytes(specs, [group], runner.block_size) for group in groups]
        if isinstance(self.store, DirectoryStore):
            num_bytes = CHECKSUM_BYTES + sum(self.sizes)
            self.store.max_entry_bytes = max(self.store.max_entry_bytes, num_bytes)
        self._reading, self._writing = RetryGate("read"), RetryGate("written")
        self._copying = RetryGate("copied to")  # fails when memory is short
        self._lock = threading.Lock()
        self._num_queued_bytes = 0
        # Python waits for its queue before the process ends.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    # -- from the store, at admission

    def find(self, keys: list[str]) -> list[bool]:
        """Return whether the store has each of these blocks, or [] if it does not answer."""
        return self._reading.ask(self.store.touch, keys) or []

    def touch(self, contents: abc.Sequence[bytes]) -> None:
        """Mark these blocks as used in the store, on the writer's thread."""
        self._submit(lambda: self._writing.ask(self.store.touch, chain_keys(self.fingerprint, contents)))

    @torch.inference_mode()
    def read(self, keys: list[str], tables: abc.Sequence[list[int]], start: int, end: int) -> int | None:
        """Read blocks [start, end) of a sequence into the blocks of its block tables, by group.

        `keys` are of all its blocks. Returns the index of the first block that could not be read, or None.
        """
        entries = iter(self._reading.ask(self.store.get, keys[start:end]) or ())
        with self.runner.device.running():
            for i in range(start, end):
                entry = self._reading.ask(next, entries, None)
                if entry is None:
                    return i
                groups = decode(entry, keys[i], self.sizes)
                if groups is None:
                    logging.getLogger(__name__).warning("ignoring a damaged entry of the KV store")
                    self._reading.ask(self.store.delete, keys[i])
                    return i
                device = self.runner.device.device
                for layers, table, group in zip(self.layers, tables, groups, strict=True):
                    if table[i]:
                        self._write_block(layers, table[i], upload(group, device))
        return None

    def _write_block(self, layers: abc.Sequence[int], block_id: int, data: Tensor) -> None:
        """Copy data, (bytes,) uint8, into one block of the layers' caches."""
        offset = 0
        for layer in layers:
            cache = self.runner.caches[layer]
            for block in (cache.k[block_id], cache.v[block_id]):
                part = data[offset : offset + block.nbytes]
                block.copy_(part.view(block.dtype).view(block.shape))
                offset += block.nbytes

    # -- to the store: copied out after a launch, saved after the step has succeeded

    @property
    def room(self) -> int:
        """The number of blocks that the queue has room for."""
        return (MAX_QUEUED_BYTES - self._num_queued_bytes) // sum(self.sizes)

    @torch.inference_mode()
    def snapshot(self, filled: list[Filled]) -> Snapshot | None:
        """Copy these blocks out, queued after the kernels that fill them. None: no blocks, or no memory."""
        if not filled:
            return None
        return self._copying.ask(self._copy_out, filled)  # type: ignore[no-any-return]

    def _copy_out(self, filled: list[Filled]) -> Snapshot:
        device, parts = self.runner.device, []
        by_group = [np.concatenate(tables) for tables in zip(*(f.tables for f in filled), strict=True)]
        with device.running():
            is_finite = torch.ones(len(by_group[0]), dtype=torch.bool, device=device.device)
            for layers, block_ids in zip(self.layers, by_group, strict=True):
                rows = upload(block_ids, device.device)
                caches = [self.runner.caches[layer] for layer in layers]
                for memory in itertools.chain.from_iterable((cache.k, cache.v) for cache in caches):
                    copied = memory[rows].flatten(1)
                    is_finite &= copied.isfinite().all(1)
                    parts.append(device.download(copied.view(torch.uint8)))  # numpy has no bfloat16
            return Snapshot(filled, parts, device.download(is_finite), sum(self.sizes) * len(is_finite))

    def save(self, snapshot: Snapshot | None) -> None:
        """Queue the blocks of a successful step for writing, except those of requests that failed."""
        if snapshot is None:
            return
        with self._lock:
            self._num_queued_bytes += snapshot.num_bytes
        is_sound = [filled.seq.finish_reason != "error" for filled in snapshot.filled]
        self._submit(self._write, snapshot, is_sound)

    def close(self) -> None:
        """Wait until all queued blocks are written."""
        self._writer.shutdown()

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the process is ending: nothing more is written
            self._writer.submit(function, *arguments)

    # -- on the writer's thread

    def _write(self, snapshot: Snapshot, is_sound: list[bool]) -> None:
        try:
            row = 0
            for filled, sound in zip(snapshot.filled, is_sound, strict=True):
                if sound:
                    self._write_blocks(snapshot, filled, row)
                row += len(filled.contents) - filled.first
        except Exception:
            logging.getLogger(__name__).exception("blocks were not saved to the KV store")
        finally:
            with self._lock:
                self._num_queued_bytes -= snapshot.num_bytes

    def _write_blocks(self, snapshot: Snapshot, filled: Filled, row: int) -> None:
        """Write the blocks of a sequence that the store does not have. `row` is the first one's row."""
        keys = chain_keys(self.fingerprint, filled.contents)
        is_there = self._writing.ask(self.store.touch, keys)
        if is_there is None or all(is_there):
            return
        is_finite = snapshot.is_finite.read()
        for i in range(filled.first, len(keys)):
            if not is_there[i]:
                r = row + i - filled.first
                if not is_finite[r]:
                    break
                parts = (part.read()[r].numpy().data for part in snapshot.parts)
                if not self._writing.ask(self._put, keys[i], encode(keys[i], parts)):
                    break
        self._writing.ask(self.store.touch, keys)  # mark the start of the prefix as used last

    def _put(self, key: str, data: bytes) -> bool:
        self.store.put(key, data)
        return True


# ---- the engine's classes with a store -----------------------------------------------------------


class StoringBlockManager(WindowedBlockManager):
    """Manages blocks as its base class does, and at admission loads the blocks after a hit from a store.

    Prefix cache hits are not written to the store again. If the store failed to save them, or has evicted
    them since, it gets them when they are next recomputed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, connector: KVConnector, **settings: Any) -> None:
        super().__init__(num_blocks, block_size, **settings)
        self.connector = connector
        self.num_saved_blocks: dict[Sequence, int] = {}  # from the start: these need not be written
        self.num_external_query_tokens = 0  # over first admissions: not in the prefix cache
        self.num_external_hit_tokens = 0  # and of those, how many the store had

    def allocate(self, seq: Sequence) -> bool:
        """Allocate as in the base class, then load from the store. Loaded tokens count as computed."""
        counts = self.num_query_tokens, self.num_query_hits, seq.num_cached_tokens
        stored: dict[str, bool] | None = None  # not looked up yet
        while super().allocate(seq):
            self.num_saved_blocks[seq] = seq.num_registered_blocks
            if seq.prompt_logprobs is not None:
                return True
            stored = self._find(seq) if stored is None else stored
            if self._load(seq, stored):
                return True
            # Start again: taking blocks may have evicted the start of the hits' chain, which no window sees.
            self.free(seq)
            self.num_query_tokens, self.num_query_hits, seq.num_cached_tokens = counts
        return False

    def forget(self, seq: Sequence) -> None:
        """Also reset the number of saved blocks."""
        super().forget(seq)
        self.num_saved_blocks.pop(seq, None)

    def take_filled(self, batch: ScheduledBatch, room: int) -> list[Filled]:
        """Return at most `room` blocks that a step fills and that are not yet saved."""
        filled = []
        for seq in dict.fromkeys(chunk.seq for chunk in batch.chunks):
            first = self.num_saved_blocks[seq]
            last = min(seq.num_registered_blocks, first + room)
            tables = [table[first:last] for table in self.tables_of(seq)]
            if first < last and all(map(all, tables)):  # false if, with a full queue, a window has freed one
                room -= last - first
                self.num_saved_blocks[seq] = last
                filled.append(Filled(seq, [key.content for key in seq.block_keys[:last]], first, tables))
        return filled

    def _find(self, seq: Sequence) -> dict[str, bool]:
        """Return each full block's key -> whether the store has it. {}: all are hits, or no answer came."""
        contents = [key.content for key in seq.block_keys]
        if len(contents) > seq.num_registered_blocks:
            keys = chain_keys(self.connector.fingerprint, contents)
            return dict(zip(keys, self.connector.find(keys), strict=False))
        if contents:
            self.connector.touch(contents)
        return {}

    def _load(self, seq: Sequence, stored: dict[str, bool]) -> bool:
        """Load the blocks after a sequence's hits, as far as the store has them.

        If there is no room or a block cannot be read, returns False and marks a block in `stored` as missing:
        the next attempt loads less.
        """
        num_computed, is_first = seq.num_computed_tokens, seq.first_scheduled_time is None
        if (span := self._find_span(seq, [*stored.values()])) is not None:
            (start, end), keys = span, [*stored]
            seq.num_computed_tokens = min(end * self.block_size, seq.num_tokens - 1)
            # A group with a window frees the blocks that are out of sight from there, and takes new ones.
            has_room = self.may_append(seq, seq.num_tokens)
            missing = self.connector.read(keys, self.tables_of(seq), start, end) if has_room else start
            if missing is not None:
                stored[keys[missing]] = False
                return False
            seq.num_hit_tokens = end * self.block_size
            self.register_full_blocks(seq, seq.num_hit_tokens)
            self.num_saved_blocks[seq] = end
        if is_first:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.num_external_query_tokens += seq.num_tokens - num_computed
            self.num_external_hit_tokens += seq.num_computed_tokens - num_computed
        return True

    def _find_span(self, seq: Sequence, stored: abc.Sequence[bool]) -> tuple[int, int] | None:
        """Return the blocks to load, [start, end), for the longest prefix that can be used.

        Every block that its groups still see must be in the store, or held already, as a hit.
        """
        end, num_hits = len(stored), seq.num_registered_blocks
        while end > num_hits:
            position = min(end * self.block_size, seq.num_tokens - 1)
            start = max(num_hits, min(self._first_seen(window, position) for window in self.windows))
            missing = next((i for i in range(start, end) if not stored[i]), None)
            if missing is None:
                return start, end
            end = missing  # every longer prefix sees the missing block
        return None


class StoringCore(EngineCore):
    """Copies out the blocks that a step fills at launch, and saves them once the step has succeeded."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, max_in_flight: int) -> None:
        super().__init__(scheduler, runner, max_in_flight)
        assert isinstance(scheduler.block_manager, StoringBlockManager)
        self.blocks, self.connector = scheduler.block_manager, scheduler.block_manager.connector
        self.snapshots: deque[Snapshot | None] = deque()  # of the steps in flight

    def launch(self, batch: ScheduledBatch, before: Launch | None) -> None:
        """Launch the step, then copy out the blocks that it fills."""
        super().launch(batch, before)  # and now, since later steps may write to these blocks:
        filled = self.blocks.take_filled(batch, self.connector.room)
        self.snapshots.append(self.connector.snapshot(filled))

    def collect(self) -> Collected:
        """Collect the step, then save its blocks."""
        collected = super().collect()
        self.connector.save(self.snapshots.popleft())
        return collected

    def recover(self) -> None:
        """Drop the copies of the failed steps, then recover as in the base class."""
        self.snapshots.clear()
        super().recover()

    def close(self) -> None:
        """Write what is queued, then close as in the base class."""
        self.connector.close()
        super().close()
