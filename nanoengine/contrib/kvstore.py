"""Keys and values beyond the process: full blocks in a store, for whoever needs the same prefix next.

    LLM(..., kv_store="/dev/shm/kv")               # a directory: local, or shared by several hosts
    LLM(..., kv_store=DirectoryStore("/mnt/kv", max_bytes=100 << 30))  # of stores.py
    LLM(..., kv_store="redis://localhost:6379/0")  # pip install 'nanoengine[redis]'

So an engine that was restarted, or another one, starts where a prefix was left. An entry is one block: the K
and V of `block_size` tokens in every layer. Its key is a SHA-256, chained over the blocks before it and begun
with the fingerprint of all that K and V depend on. It is not trusted: the entry holds the fingerprint, the
tokens of its whole prefix and a checksum, and whatever does not fit is a miss.

    admission     after the prefix cache's own hits, what the store has of the blocks that follow is read into
                  the blocks that the sequence just got: `StoringBlockManager.allocate`
    launch        the blocks that the step fills are copied out, queued behind its kernels
    collect       the step has succeeded: a thread writes what the store does not have yet: `StoringCore`

A store that fails costs time at most, never a request: what it has is not found, what it should get is lost.
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
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from torch import Tensor
from xxhash import xxh3_128

from nanoengine.backends.device import Download, upload
from nanoengine.backends.kv_cache import KVGroup, KVSpec
from nanoengine.contrib.stores import DirectoryStore, Store, open_store
from nanoengine.engine import Collected, EngineCore, Launch, ModelRunner, ScheduledBatch, Scheduler, Sequence
from nanoengine.extensions.windows import WindowedBlockManager

FORMAT_VERSION = 1
MAX_QUEUED_BYTES = 1 << 30  # of blocks that wait to be written; beyond, saving waits for a later step
RETRY_SECONDS = 30.0  # a store that failed is left alone for so long

# ---- entries -------------------------------------------------------------------------------------


def fingerprint_of(weights: Any, hf_config: Any, layout: Any) -> bytes:
    """A hash of all that K and V depend on besides the tokens. Which kernels compute them does not count.

    Args:
        weights: stands for them, their dtype, and how they are quantised.
        hf_config: of the model.
        layout: how K and V lie in a block.
    """
    config = {
        k: v for k, v in hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    parts = [FORMAT_VERSION, weights, config, layout]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def chain_keys(fingerprint: bytes, contents: Iterable[bytes]) -> list[str]:
    """The key of each block, given their tokens: it stands for these and for all before them."""
    keys, key = [], fingerprint
    for content in contents:
        key = hashlib.sha256(key + content).digest()
        keys.append(key.hex())
    return keys


def encode(fingerprint: bytes, token_ids: np.ndarray, groups: abc.Sequence[np.ndarray]) -> bytes:
    """An entry, in safetensors' format.

    Args:
        fingerprint: 32 bytes.
        token_ids: (n,) int32, from the beginning of the sequence to the end of the block.
        groups: by KV cache group, (bytes,) uint8: K and V of its first layer, of its second...
    """
    tensors = {f"group.{i}": group for i, group in enumerate(groups)}
    tensors |= {"fingerprint": np.frombuffer(fingerprint, np.uint8), "token_ids": token_ids}
    return save_tensors({**tensors, "checksum": _checksum(tensors)})


def decode(
    data: bytes, fingerprint: bytes, token_ids: np.ndarray, sizes: abc.Sequence[int]
) -> list[np.ndarray] | None:
    """The groups of an entry, as `encode` got them; None where it is for other tokens or another model.

    Raises:
        ValueError: it is damaged.
    """
    try:
        tensors = load_tensors(data)
        checksum = tensors.pop("checksum")
    except Exception as error:
        raise ValueError(f"not an entry: {error}") from error
    if not np.array_equal(checksum, _checksum(tensors)):
        raise ValueError("its checksum is wrong")
    names = [f"group.{i}" for i in range(len(sizes))]
    if tensors.keys() != {"fingerprint", "token_ids", *names}:
        return None
    if tensors["fingerprint"].tobytes() != fingerprint or not np.array_equal(tensors["token_ids"], token_ids):
        return None
    groups = [tensors[name] for name in names]
    return groups if [group.nbytes for group in groups] == list(sizes) else None


def _checksum(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Of all, (16,) uint8: against bits that change by themselves, not against people."""
    digest = xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].data)
    return np.frombuffer(digest.digest(), np.uint8)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """A tensor of the host in one piece, as (bytes,) uint8 in the same memory."""
    return tensor.flatten().view(torch.uint8).numpy()


# ---- the connector: between a store and an engine ------------------------------------------------


class RetryGate:
    """Asks a store, which may fail: says so the first time, and leaves it alone for a while each time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._resume_at = 0.0  # seconds of time.monotonic()
        self._has_failed = False

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; None where it raises, or is not asked."""
        if time.monotonic() < self._resume_at:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            self._resume_at = time.monotonic() + RETRY_SECONDS
            if not self._has_failed:
                message = "the KV store cannot be %s, and is left alone for %.0f s at a time: %s: %s"
                logging.getLogger(__name__).warning(
                    message, self._what, RETRY_SECONDS, type(error).__name__, error
                )
            self._has_failed = True
            return None


class Filled(NamedTuple):
    """Blocks [first, len(contents)) of a sequence, which a step fills; they are `Snapshot`'s next rows."""

    seq: Sequence
    contents: list[bytes]  # the tokens of each of its blocks, int32
    first: int
    tables: list[list[int]]  # by group, the blocks


class Snapshot(NamedTuple):
    """What a step writes to the blocks it fills, on its way to the host."""

    filled: list[Filled]
    groups: list[list[Download]]  # by group: K and V of its first layer, of its second..., (rows, B, K, D)
    is_finite: Download  # (rows,) bool: NaN would spread to whoever loads it
    num_bytes: int


class KVConnector:
    """Carries blocks from a store to the caches, and from the caches to the store.

    Args:
        store: one connector's or many's.
        runner: has the caches.
        specs: what each layer stores.
        groups: the layers that share block tables.
        fingerprint: of all that K and V depend on, 32 bytes.
    """

    def __init__(
        self,
        store: Store,
        runner: ModelRunner,
        specs: abc.Sequence[KVSpec],
        groups: abc.Sequence[KVGroup],
        fingerprint: bytes,
    ) -> None:
        self.store, self.runner = store, runner
        self.fingerprint = fingerprint
        self.layers = [group.layers for group in groups]
        self.sizes = [  # bytes of a block, by group
            sum(specs[layer].bytes_per_token for layer in layers) * runner.block_size
            for layers in self.layers
        ]
        if isinstance(store, DirectoryStore):  # K and V, the tokens, and what safetensors writes around them
            store.max_entry_bytes = sum(self.sizes) + (1 << 24)
        self._reading, self._writing = RetryGate("read"), RetryGate("written")
        self._copying = RetryGate("copied to")  # where memory for that is short
        self._lock = threading.Lock()
        self._num_queued_bytes = 0
        # Finishes what is queued before the process ends.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    # -- from the store, at admission

    def find(self, keys: list[str]) -> list[bool]:
        """Which of these blocks the store has; [] where it does not answer."""
        return self._reading.ask(self.store.touch, keys) or []

    def touch(self, contents: abc.Sequence[bytes]) -> None:
        """Tell the store, some time soon, that these blocks were used."""
        self._submit(self._touch, contents)

    @torch.inference_mode()
    def read(
        self, keys: list[str], token_ids: np.ndarray, tables: abc.Sequence[list[int]], start: int, end: int
    ) -> int | None:
        """Read blocks [start, end) of a sequence into those of its block tables, by group.

        Args:
            keys: of all its blocks.
            token_ids: (n,) int32, those of its blocks up to `end`.
            tables: its block tables.
            start: the first block to read.
            end: the one behind the last.

        Returns:
            The first that cannot be had, if any.
        """
        size = self.runner.block_size
        entries = iter(self._reading.ask(self.store.get, keys[start:end]) or ())
        with self.runner.device.running():
            for i in range(start, end):
                data = self._reading.ask(next, entries, None)
                if data is None:
                    return i
                try:
                    groups = decode(data, self.fingerprint, token_ids[: (i + 1) * size], self.sizes)
                except ValueError as error:
                    logging.getLogger(__name__).warning("a damaged entry of the KV store: %s", error)
                    self._reading.ask(self.store.delete, keys[i])
                    return i
                if groups is None:
                    return i
                device = self.runner.device.device
                for layers, table, group in zip(self.layers, tables, groups, strict=True):
                    if table[i]:
                        self._write_block(layers, table[i], upload(group, device))
        return None

    def _write_block(self, layers: abc.Sequence[int], block_id: int, data: Tensor) -> None:
        """Copy (bytes,) uint8 into a block of the layers' caches."""
        offset = 0
        for layer in layers:
            cache = self.runner.caches[layer]
            for block in (cache.k[block_id], cache.v[block_id]):
                part = data[offset : offset + block.nbytes]
                block.copy_(part.view(block.dtype).view(block.shape))
                offset += block.nbytes

    # -- to the store: copied after a launch, saved after its update

    @property
    def room(self) -> int:
        """How many blocks the queue has room for."""
        return (MAX_QUEUED_BYTES - self._num_queued_bytes) // sum(self.sizes)

    @torch.inference_mode()
    def snapshot(self, filled: list[Filled]) -> Snapshot | None:
        """Copy these blocks out, queued behind what computes them; None: there are none, or no memory."""
        if not filled:
            return None
        snapshot: Snapshot | None = self._copying.ask(self._copy_out, filled)
        return snapshot

    def _copy_out(self, filled: list[Filled]) -> Snapshot:
        device, groups = self.runner.device, []
        by_group = [np.concatenate(tables) for tables in zip(*(f.tables for f in filled), strict=True)]
        with device.running():
            is_finite = torch.ones(len(by_group[0]), dtype=torch.bool, device=device.device)
            for layers, block_ids in zip(self.layers, by_group, strict=True):
                rows = upload(block_ids, device.device)
                caches = [self.runner.caches[layer] for layer in layers]
                downloads = []
                for memory in itertools.chain.from_iterable((cache.k, cache.v) for cache in caches):
                    copied = memory[rows]
                    is_finite &= copied.flatten(1).isfinite().all(1)
                    downloads.append(device.download(copied))
                groups.append(downloads)
            return Snapshot(filled, groups, device.download(is_finite), sum(self.sizes) * len(is_finite))

    def save(self, snapshot: Snapshot | None) -> None:
        """Queue what was copied out of a step that succeeded, but for requests that ended in an error."""
        if snapshot is None:
            return
        with self._lock:
            self._num_queued_bytes += snapshot.num_bytes
        is_sound = [filled.seq.finish_reason != "error" for filled in snapshot.filled]
        self._submit(self._write, snapshot, is_sound)

    def close(self) -> None:
        """Finish what is queued."""
        self._writer.shutdown()

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the process ends: nothing new is written any more
            self._writer.submit(function, *arguments)

    # -- on the writer's thread

    def _touch(self, contents: abc.Sequence[bytes]) -> None:
        self._writing.ask(self.store.touch, chain_keys(self.fingerprint, contents))

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
        """Give the store what it does not have of a sequence's blocks, the first of which is in that row."""
        keys = chain_keys(self.fingerprint, filled.contents)
        is_there = self._writing.ask(self.store.touch, keys)
        if is_there is None or all(is_there):
            return
        is_finite = snapshot.is_finite.read()
        token_ids = np.frombuffer(b"".join(filled.contents), np.int32)
        for i in range(filled.first, len(keys)):
            if not is_there[i]:
                r = row + i - filled.first
                if not is_finite[r]:
                    break
                parts = [np.concatenate([_bytes_of(x.read()[r]) for x in group]) for group in snapshot.groups]
                prefix = token_ids[: (i + 1) * self.runner.block_size]
                if not self._writing.ask(self._put, keys[i], encode(self.fingerprint, prefix, parts)):
                    break
        self._writing.ask(self.store.touch, keys)  # the beginning last

    def _put(self, key: str, data: bytes) -> bool:
        self.store.put(key, data)
        return True


# ---- what an engine does with it -----------------------------------------------------------------


class StoringBlockManager(WindowedBlockManager):
    """A block manager that fills blocks behind a sequence's hits from a store, as it admits it.

    What the prefix cache finds by itself is not offered to the store again: what it missed when it failed, or
    has evicted since, it gets when that is computed anew.

    Args:
        num_blocks, block_size, settings: as in the base class.
        connector: to the store.
    """

    def __init__(self, num_blocks: int, block_size: int, *, connector: KVConnector, **settings: Any) -> None:
        super().__init__(num_blocks, block_size, **settings)
        self.connector = connector
        self.num_saved_blocks: dict[Sequence, int] = {}  # the first ones: the store need not be given these
        self.num_external_query_tokens = 0  # over first admissions: what the prefix cache does not have
        self.num_external_hit_tokens = 0  # and what of it the store had

    def allocate(self, seq: Sequence) -> bool:
        """As in the base class; what is loaded counts as computed."""
        if not super().allocate(seq):
            return False
        self.num_saved_blocks[seq] = seq.num_registered_blocks
        if seq.prompt_logprobs is None:
            self._load(seq)
        return True

    def forget(self, seq: Sequence) -> None:
        """As in the base class."""
        super().forget(seq)
        self.num_saved_blocks.pop(seq, None)

    def take_filled(self, batch: ScheduledBatch, room: int) -> list[Filled]:
        """The blocks that a step fills, and the store should get: at most so many."""
        filled = []
        for seq in dict.fromkeys(chunk.seq for chunk in batch.chunks):
            first = self.num_saved_blocks[seq]
            last = min(seq.num_registered_blocks, first + room)
            tables = [table[first:last] for table in self.tables_of(seq)]
            if first < last and all(map(all, tables)):  # else, the queue being full, a window left one behind
                room -= last - first
                self.num_saved_blocks[seq] = last
                filled.append(Filled(seq, [key.content for key in seq.block_keys[:last]], first, tables))
        return filled

    def _load(self, seq: Sequence) -> None:
        """Fill the blocks behind a sequence's hits, as far as the store has them."""
        num_hits, is_first = seq.num_registered_blocks, seq.first_scheduled_time is None
        num_computed = seq.num_computed_tokens
        self.num_external_query_tokens += seq.num_tokens - num_computed if is_first else 0
        contents = [key.content for key in seq.block_keys]
        if len(contents) == num_hits:  # nothing to look for: tell the store what is in use
            if contents:
                self.connector.touch(contents)
            return
        keys = chain_keys(self.connector.fingerprint, contents)
        is_there = self.connector.find(keys)
        while (span := self._find_span(seq, num_hits, is_there)) is not None:
            start, end = span
            seq.num_computed_tokens = min(end * self.block_size, seq.num_tokens - 1)
            # A group with a window gives up what is out of sight from there, and takes what it sees.
            has_room = self.may_append(seq, seq.num_tokens)
            token_ids = np.array(seq.token_ids[: end * self.block_size], np.int32)
            tables = self.tables_of(seq)
            missing = self.connector.read(keys, token_ids, tables, start, end) if has_room else None
            if has_room and missing is None:
                seq.num_hit_tokens = end * self.block_size
                self.register_full_blocks(seq, seq.num_hit_tokens)
                self.num_saved_blocks[seq] = end
                if is_first:
                    seq.num_cached_tokens = seq.num_computed_tokens
                    self.num_external_hit_tokens += seq.num_computed_tokens - num_computed
                return
            self.free(seq)
            allocated = super().allocate(seq)  # as it was
            assert allocated
            self.num_saved_blocks[seq] = num_hits
            if missing is None:
                return
            is_there[missing] = False

    def _find_span(
        self, seq: Sequence, num_hits: int, is_there: abc.Sequence[bool]
    ) -> tuple[int, int] | None:
        """Which blocks to load, [start, end): the longest prefix of which all that groups see is there.

        As in `find_groups`; what comes before num_hits the sequence holds.
        """
        end = len(is_there)
        while end > num_hits:
            position = min(end * self.block_size, seq.num_tokens - 1)
            start = max(num_hits, min(self._first_seen(window, position) for window in self.windows))
            missing = next((i for i in range(start, end) if not is_there[i]), None)
            if missing is None:
                return start, end
            end = missing  # whatever ends behind it sees it
        return None


class StoringCore(EngineCore):
    """Steps whose full blocks are copied out when they are launched, and saved once they have succeeded."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, max_in_flight: int = 0) -> None:
        super().__init__(scheduler, runner, max_in_flight)
        assert isinstance(scheduler.block_manager, StoringBlockManager)
        self.blocks, self.connector = scheduler.block_manager, scheduler.block_manager.connector
        self.snapshots: deque[Snapshot | None] = deque()  # of the steps in flight

    def launch(self, batch: ScheduledBatch, before: Launch | None) -> None:
        """As in the base class."""
        super().launch(batch, before)  # and now, since later steps may write to these blocks:
        filled = self.blocks.take_filled(batch, self.connector.room)
        self.snapshots.append(self.connector.snapshot(filled))

    def collect(self) -> Collected:
        """As in the base class."""
        collected = super().collect()
        self.connector.save(self.snapshots.popleft())
        return collected

    def recover(self) -> None:
        """As in the base class."""
        self.snapshots.clear()
        super().recover()

    def close(self) -> None:
        """As in the base class."""
        self.connector.close()
        super().close()


def connect(
    kv_store: Any,
    runner: ModelRunner,
    specs: abc.Sequence[KVSpec],
    groups: abc.Sequence[KVGroup],
    *,
    weights: Any,
    hf_config: Any,
) -> KVConnector:
    """A connector between a runner's caches and the store that `EngineConfig.kv_store` means.

    Args:
        kv_store: the setting.
        runner: has the caches.
        specs: what each layer stores.
        groups: the layers that share block tables.
        weights: as `fingerprint_of` takes them.
        hf_config: likewise.

    Raises:
        ValueError, ImportError: the store cannot be opened.
    """
    fingerprint = fingerprint_of(weights, hf_config, [runner.block_size, specs, groups])
    return KVConnector(open_store(kv_store), runner, specs, groups, fingerprint)
