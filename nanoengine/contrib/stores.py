"""Stores of keys and values for kvstore.py: a directory, local or shared by hosts, or a Redis server."""

import contextlib
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections import abc
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from nanoengine.sampling_params import check_integer


class Store(Protocol):
    """Where entries are kept. Any method may raise; it is then not asked for `kvstore.RETRY_SECONDS`.

    Keys come in the order of a prefix: one of them is of use only with those before it. Two threads call: the
    engine's, which waits for the answer, and one that writes.
    """

    def get(self, keys: abc.Sequence[str]) -> Iterable[bytes]:
        """The entries of the keys, in their order, up to the first that is missing."""

    def put(self, key: str, data: bytes) -> None:
        """Keep an entry; either all of it is found under its key, or nothing."""

    def touch(self, keys: abc.Sequence[str]) -> list[bool]:
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
        TypeError, ValueError: max_bytes is no number of bytes.
    """

    max_entry_bytes = 1 << 30  # what is larger is no entry; an engine says how large its own are

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        if max_bytes is not None:
            check_integer("max_bytes", max_bytes, 1, 2**62)
        self.path = Path(path).expanduser()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.max_bytes = shutil.disk_usage(self.path).total // 10 if max_bytes is None else max_bytes
        self._unseen_bytes = self.max_bytes  # written since the last look; at first, by others

    def __str__(self) -> str:
        return str(self.path)

    def get(self, keys: abc.Sequence[str]) -> Iterable[bytes]:
        """As in `Store`."""
        for key in keys:
            data = self._read(self._file(key))
            if data is None:
                return
            yield data

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

    def touch(self, keys: abc.Sequence[str]) -> list[bool]:
        """As in `Store`. The beginning of a prefix was used last, so that its end is evicted first."""
        now = time.time_ns()
        return [self._touch(self._file(key), now - 1000 * i) for i, key in enumerate(keys)]

    def delete(self, key: str) -> None:
        """As in `Store`."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.path / key[:2] / f"{key}.safetensors"

    def _read(self, file: Path) -> bytes | None:
        """A file's content; None where there is none, or something that no engine put there.

        A pipe would be waited for without end, and a file with holes may claim to be of any size.
        """
        try:
            handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.max_entry_bytes:
                return None
            with open(handle, "rb", closefd=False) as stream:
                return stream.read(self.max_entry_bytes)
        finally:
            os.close(handle)

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
        found = self._redis.connection_pool.connection_kwargs  # not the address, which may hold a password
        where = found.get("path") or f"{found.get('host', 'localhost')}:{found.get('port', 6379)}"
        return f"{where}/{found.get('db', 0)}"

    def get(self, keys: abc.Sequence[str]) -> Iterable[bytes]:
        """As in `Store`."""
        for i in range(0, len(keys), self.KEYS_PER_CALL):
            for data in self._redis.mget([self._name(key) for key in keys[i : i + self.KEYS_PER_CALL]]):
                if data is None:
                    return
                yield data

    def put(self, key: str, data: bytes) -> None:
        """As in `Store`."""
        self._redis.set(self._name(key), data)

    def touch(self, keys: abc.Sequence[str]) -> list[bool]:
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
