"""Keys and values beyond the process: full blocks in a store, for whoever needs the same prefix next.

    LLM(..., kv_store="/dev/shm/kv")               # a directory: local, or shared by several hosts
    LLM(..., kv_store=DirectoryStore("/mnt/kv", max_bytes=100 << 30))
    LLM(..., kv_store="redis://localhost:6379/0")  # pip install 'nanoengine[redis]'

So an engine that was restarted, or another one, starts where a prefix was left. An entry is one block: the K
and V of `block_size` tokens in every layer. Its key is a SHA-256, chained over the blocks before it and begun
with the fingerprint of all that K and V depend on. It is not trusted: the entry holds the fingerprint, the
tokens of its whole prefix and a checksum, and whatever does not fit is a miss.

    admission     after the prefix cache's own hits, what the store has of the blocks that follow is read into
                  the blocks that the sequence just got: `KVConnector.load`
    after launch  the blocks that the step fills are copied out, queued behind its kernels: `snapshot`
    after update  the step has succeeded: a thread writes what the store does not have yet: `save`

A store that fails costs time at most, never a request: what it has is not found, what it should get is lost.
Source of the idea: vLLM's KVConnector, https://docs.vllm.ai/en/latest/features/disagg_prefill
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from torch import Tensor
from xxhash import xxh3_128

from nanoengine.backends.cuda import upload
from nanoengine.backends.device import Download

if TYPE_CHECKING:
    from nanoengine import engine

FORMAT_VERSION = 1
MAX_QUEUED_BYTES = 1 << 30  # of blocks that wait to be written; beyond, saving waits for a later step
RETRY_SECONDS = 30.0  # a store that failed is left alone for so long

# ---- stores --------------------------------------------------------------------------------------


class Store(Protocol):
    """Where entries are kept. Any method may raise; it is then not asked for `RETRY_SECONDS`.

    Keys come in the order of a prefix: one of them is of use only with those before it. Two threads call: the
    engine's, which waits for the answer, and one that writes.
    """

    def get(self, keys: Sequence[str]) -> Iterable[bytes]:
        """The entries of the keys, in their order, up to the first that is missing."""

    def put(self, key: str, data: bytes) -> None:
        """Keep an entry; either all of it is found under its key, or nothing."""

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Whether there is an entry, for each of the keys; those that there are were used just now."""

    def delete(self, key: str) -> None:
        """Forget an entry: it is damaged."""


class DirectoryStore:
    """A file per entry, `ab/abcd....safetensors`, for any number of processes and hosts at once.

    A file appears whole, by a rename, and its time of modification is that of its last use. Whoever has
    written a twentieth of max_bytes looks whether the directory holds more than max_bytes, and if so removes
    the least recently used files, down to nine tenths; so it may grow a little larger meanwhile. Files can be
    removed at any time, by anybody.

    Args:
        path: made where it does not exist, for its owner only.
        max_bytes: of all files together; None: a tenth of the file system.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        self.path = Path(path).expanduser()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.max_bytes = shutil.disk_usage(self.path).total // 10 if max_bytes is None else max_bytes
        self._unseen_bytes = self.max_bytes  # written since the last look; at first, by others

    def __str__(self) -> str:
        return str(self.path)

    def get(self, keys: Sequence[str]) -> Iterable[bytes]:
        """As in `Store`."""
        for key in keys:
            try:
                yield self._file(key).read_bytes()
            except FileNotFoundError:
                return

    def put(self, key: str, data: bytes) -> None:
        """As in `Store`."""
        file = self._file(key)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        try:
            with open(handle, "wb") as stream:
                stream.write(data)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
        self._unseen_bytes += len(data)
        if self._unseen_bytes > self.max_bytes // 20:
            self._unseen_bytes = 0
            self._evict()

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """As in `Store`. The beginning of a prefix was used last, so that its end is evicted first."""
        now = time.time_ns()
        return [self._touch(self._file(key), now - 1000 * i) for i, key in enumerate(keys)]

    def delete(self, key: str) -> None:
        """As in `Store`."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.path / key[:2] / f"{key}.safetensors"

    @staticmethod
    def _touch(file: Path, time_ns: int) -> bool:
        try:
            os.utime(file, ns=(time_ns, time_ns))
        except FileNotFoundError:
            return False
        except OSError:  # another user's, or read-only
            return file.exists()
        return True

    def _evict(self) -> None:
        """Remove the least recently used files where there are too many, and what killed writers left."""
        files, total, now = [], 0, time.time()
        for entry in itertools.chain.from_iterable(map(_scan, _scan(self.path))):
            with contextlib.suppress(OSError):  # gone meanwhile
                status = os.stat(entry)
                if entry.endswith(".tmp") and now - status.st_mtime > 3600:
                    os.unlink(entry)
                elif entry.endswith(".safetensors"):
                    files.append((status.st_mtime_ns, status.st_size, entry))
                    total += status.st_size
        if total <= self.max_bytes:
            return
        for _, size, entry in sorted(files):
            if total <= self.max_bytes * 9 // 10:
                break
            total -= size
            with contextlib.suppress(OSError):
                os.unlink(entry)


def _scan(path: str | Path) -> list[str]:
    """What is in a directory; nothing, where it is none."""
    try:
        return [entry.path for entry in os.scandir(path)]
    except (NotADirectoryError, FileNotFoundError):
        return []


class RedisStore:
    """Entries in a Redis server, which evicts by itself: set its maxmemory, and maxmemory-policy allkeys-lru.

    Args:
        url: redis://host:port/db; further settings of redis-py may follow, as in ?socket_timeout=5.

    Raises:
        ImportError: there is no redis-py.
        ValueError: the address is none.
    """

    KEYS_PER_CALL = 8  # entries fetched at a time: not too many beyond the last that is of use

    def __init__(self, url: str) -> None:
        try:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError(
                "a KV store in Redis needs redis-py: pip install 'nanoengine[redis]'"
            ) from error
        self.url = url
        # An engine's step may wait for it: an answer that does not come soon is none.
        self._redis: Any = Redis.from_url(
            url, socket_connect_timeout=0.5, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)
        )

    def __str__(self) -> str:
        return self.url.rpartition("@")[2]  # without a password

    def get(self, keys: Sequence[str]) -> Iterable[bytes]:
        """As in `Store`."""
        for i in range(0, len(keys), self.KEYS_PER_CALL):
            for data in self._redis.mget([self._name(key) for key in keys[i : i + self.KEYS_PER_CALL]]):
                if data is None:
                    return
                yield data

    def put(self, key: str, data: bytes) -> None:
        """As in `Store`."""
        self._redis.set(self._name(key), data)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """As in `Store`."""
        calls = self._redis.pipeline(transaction=False)
        for key in reversed(keys):
            calls.touch(self._name(key))
        return [bool(count) for count in reversed(calls.execute())]

    def delete(self, key: str) -> None:
        """As in `Store`."""
        self._redis.delete(self._name(key))

    @staticmethod
    def _name(key: str) -> str:
        return f"nanoengine:{key}"


def open_store(kv_store: Any) -> Store:
    """The store that `EngineConfig.kv_store` means.

    Raises:
        ValueError: the directory cannot be made, or the address is none.
    """
    if isinstance(kv_store, str) and "://" in kv_store:
        return RedisStore(kv_store)
    if not isinstance(kv_store, (str, Path)):
        store: Store = kv_store
        return store
    try:
        return DirectoryStore(kv_store)
    except OSError as error:
        raise ValueError(f"kv_store={str(kv_store)!r} cannot be a directory: {error}") from error


# ---- entries -------------------------------------------------------------------------------------


def digest_weights(model: torch.nn.Module) -> bytes:
    """A hash of all weights, by name, as they are computed with: of their dtype too."""
    digest = xxh3_128()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes_of(tensor.detach().cpu().contiguous()).data)
    return digest.digest()


def fingerprint_of(runner: "engine.ModelRunner", hf_config: Any) -> bytes:
    """A hash of all that K and V depend on besides the tokens. Which kernels compute them does not count."""
    config = {
        k: v for k, v in hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    weights = runner.weights_digest.hex(), runner.device.config.quantization
    parts = [FORMAT_VERSION, weights, config, runner.block_size]
    parts += [runner.kv_specs, runner.kv_groups]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def chain_keys(fingerprint: bytes, contents: Iterable[bytes]) -> list[str]:
    """The key of each block, given their tokens: it stands for these and for all before them."""
    keys, key = [], fingerprint
    for content in contents:
        key = hashlib.sha256(key + content).digest()
        keys.append(key.hex())
    return keys


def encode(fingerprint: bytes, token_ids: np.ndarray, groups: Sequence[np.ndarray]) -> bytes:
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
    data: bytes, fingerprint: bytes, token_ids: np.ndarray, sizes: Sequence[int]
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


class Patience:
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

    seq: "engine.Sequence"
    contents: list[bytes]  # the tokens of each of its blocks, int32
    first: int


class Snapshot(NamedTuple):
    """What a step writes to the blocks it fills, on its way to the host."""

    filled: list[Filled]
    groups: list[list[Download]]  # by group: K and V of its first layer, of its second..., (rows, B, K, D)
    is_finite: Download  # (rows,) bool: NaN would spread to whoever loads it
    num_bytes: int


class KVConnector:
    """Loads what a store has for a sequence that is admitted, and saves what steps compute.

    What the prefix cache finds by itself is not offered to the store again: what it missed when it failed, or
    has evicted since, it gets when that is computed anew.

    Args:
        store: one connector's or many's.
        runner: has the caches.
        block_manager: hands out their blocks.
        fingerprint: of all that K and V depend on, 32 bytes.
    """

    def __init__(
        self,
        store: Store,
        runner: "engine.ModelRunner",
        block_manager: "engine.BlockManager",
        fingerprint: bytes,
    ) -> None:
        self.store, self.runner, self.blocks = store, runner, block_manager
        self.fingerprint = fingerprint
        self.layers = [group.layers for group in runner.kv_groups]
        self.sizes = [  # bytes of a block, by group
            sum(runner.kv_specs[layer].bytes_per_token for layer in layers) * runner.block_size
            for layers in self.layers
        ]
        self.num_query_tokens = 0  # over first admissions: what the prefix cache does not have
        self.num_hit_tokens = 0  # and what of it the store had
        self._reading, self._writing = Patience("read"), Patience("written")
        self._copying = Patience("copied to")  # where memory for that is short
        self._lock = threading.Lock()
        self._num_queued_bytes = 0
        # Finishes what is queued before the process ends.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    # -- at admission

    @torch.inference_mode()
    def load(self, seq: "engine.Sequence") -> None:
        """Fill blocks of a sequence that was just admitted, behind its hits, and count them as computed."""
        blocks, size = self.blocks, self.blocks.block_size
        num_hits = seq.num_saved_blocks = seq.num_registered_blocks
        if seq.prompt_logprobs is not None:
            return
        is_first, num_computed = seq.first_scheduled_time is None, seq.num_computed_tokens
        self.num_query_tokens += seq.num_tokens - num_computed if is_first else 0
        contents = [key.content for key in seq.block_keys]
        if len(contents) == num_hits:  # nothing to look for: tell the store what is in use
            if contents:
                self._submit(self._touch, contents)
            return
        keys = chain_keys(self.fingerprint, contents)
        is_there = self._reading.ask(self.store.touch, keys) or []
        while (span := self._find(seq, num_hits, is_there)) is not None:
            start, end = span
            seq.num_computed_tokens = min(end * size, seq.num_tokens - 1)
            # A group with a window gives up what is out of sight from there, and takes what it sees.
            has_room = blocks.may_append(seq)
            missing = self._read(seq, keys, start, end) if has_room else None
            if has_room and missing is None:
                seq.num_hit_tokens = end * size
                blocks.register_full_blocks(seq, end * size)
                seq.num_saved_blocks = end
                if is_first:
                    seq.num_cached_tokens = seq.num_computed_tokens
                    self.num_hit_tokens += seq.num_computed_tokens - num_computed
                return
            blocks.free(seq)
            allocated = blocks.allocate(seq)  # as it was
            assert allocated
            if missing is None:
                return
            is_there[missing] = False

    def _find(
        self, seq: "engine.Sequence", num_hits: int, is_there: Sequence[bool]
    ) -> tuple[int, int] | None:
        """Which blocks to load, [start, end): the longest prefix of which all that groups see is there.

        As in `BlockManager.find_prefix`; what comes before num_hits the sequence holds.
        """
        blocks, end = self.blocks, len(is_there)
        while end > num_hits:
            position = min(end * blocks.block_size, seq.num_tokens - 1)
            start = max(num_hits, min(blocks._first_seen(window, position) for window in blocks.windows))
            missing = next((i for i in range(start, end) if not is_there[i]), None)
            if missing is None:
                return start, end
            end = missing  # whatever ends behind it sees it
        return None

    def _read(self, seq: "engine.Sequence", keys: list[str], start: int, end: int) -> int | None:
        """Read blocks [start, end) into the sequence's; returns the first that cannot be had, if any."""
        size = self.blocks.block_size
        token_ids = np.array(seq.token_ids[: end * size], np.int32)
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
                for layers, table, group in zip(self.layers, seq.block_tables, groups, strict=True):
                    if table[i]:
                        self._write_block(layers, table[i], upload(group, device))
        return None

    def _write_block(self, layers: Sequence[int], block_id: int, data: Tensor) -> None:
        """Copy (bytes,) uint8 into a block of the layers' caches."""
        offset = 0
        for layer in layers:
            cache = self.runner.caches[layer]
            for block in (cache.k[block_id], cache.v[block_id]):
                part = data[offset : offset + block.nbytes]
                block.copy_(part.view(block.dtype).view(block.shape))
                offset += block.nbytes

    # -- after a launch, and after its update

    @torch.inference_mode()
    def snapshot(self, batch: "engine.ScheduledBatch") -> Snapshot | None:
        """Copy out what a step that was just launched fills, as far as the queue has room; None: nothing."""
        room = (MAX_QUEUED_BYTES - self._num_queued_bytes) // sum(self.sizes)
        filled: list[Filled] = []
        block_ids: list[list[int]] = [[] for _ in self.layers]
        for seq in dict.fromkeys(chunk.seq for chunk in batch.chunks):
            first = seq.num_saved_blocks
            last = min(seq.num_registered_blocks, first + room)
            if first >= last:
                continue
            tables = [table[first:last] for table in seq.block_tables]
            if not all(map(all, tables)):  # while the queue was full, a window left one behind
                continue
            room -= last - first
            seq.num_saved_blocks = last
            filled.append(Filled(seq, [key.content for key in seq.block_keys[:last]], first))
            for ids, table in zip(block_ids, tables, strict=True):
                ids += table
        if not filled:
            return None
        snapshot: Snapshot | None = self._copying.ask(self._copy_out, filled, block_ids)
        return snapshot

    def _copy_out(self, filled: list[Filled], block_ids: list[list[int]]) -> Snapshot:
        """A snapshot of these blocks, by group."""
        device, groups = self.runner.device, []
        with device.running():
            is_finite = torch.ones(len(block_ids[0]), dtype=torch.bool, device=device.device)
            for layers, ids in zip(self.layers, block_ids, strict=True):
                rows = upload(np.array(ids), device.device)
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

    def _touch(self, contents: Sequence[bytes]) -> None:
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
                prefix = token_ids[: (i + 1) * self.blocks.block_size]
                if not self._writing.ask(self._put, keys[i], encode(self.fingerprint, prefix, parts)):
                    break
        self._writing.ask(self.store.touch, keys)  # the beginning last

    def _put(self, key: str, data: bytes) -> bool:
        self.store.put(key, data)
        return True


def connect(engine: "engine.LLMEngine", kv_store: Any) -> KVConnector:
    """Have an engine load from a store and save to it.

    Raises:
        ValueError, ImportError: it cannot be opened.
    """
    fingerprint = fingerprint_of(engine.runner, engine.checkpoint.hf_config)
    connector = KVConnector(open_store(kv_store), engine.runner, engine.scheduler.block_manager, fingerprint)
    engine.scheduler.load = connector.load
    return connector
