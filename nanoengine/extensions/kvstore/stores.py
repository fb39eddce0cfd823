"""Defines the stores of connector.py: a directory, local or shared by several hosts, or a Redis server."""

import contextlib
import glob
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
    """Stores entries by key. If a method raises, it is not called for `connector.RETRY_SECONDS`.

    Keys are passed in prefix order: an entry is useful only together with those before it. Two threads call
    these methods: the engine's, which waits for the answer, and one that writes.
    """

    def get(self, keys: abc.Sequence[str]) -> Iterable[bytes]:
        """Return the entries of the keys, in order, up to the first one that is missing."""

    def put(self, key: str, data: bytes) -> None:
        """Store an entry atomically: readers find all of it under its key, or nothing."""

    def touch(self, keys: abc.Sequence[str]) -> list[bool]:
        """Mark entries as just used. Return for each key whether its entry exists."""

    def delete(self, key: str) -> None:
        """Remove an entry that is damaged."""


class DirectoryStore(Store):
    """Stores each entry in a file, `ab/abcd....kv`. Any number of processes and hosts may share it.

    A file is created atomically, by a rename. Its modification time is the time of its last use. A process
    that has written a twentieth of max_bytes removes the least recently used files, down to nine tenths, if
    the directory holds more than max_bytes. Files can be removed at any time, by any process.

    The directory is created if it does not exist, with access for its owner only. `max_bytes` is the limit
    for all files together, by default a tenth of the file system.
    """

    max_entry_bytes = 1 << 30  # larger files are ignored; an engine with larger entries raises it

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        if max_bytes is not None:
            check_integer("max_bytes", max_bytes, 1, 2**62)
        self.path = Path(path).expanduser()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.max_bytes = shutil.disk_usage(self.path).total // 10 if max_bytes is None else max_bytes
        self._unseen_bytes = self.max_bytes  # written since the last check; so the first write checks

    def __str__(self) -> str:
        return str(self.path)

    def get(self, keys: abc.Sequence[str]) -> Iterable[bytes]:
        for key in keys:
            data = self._read(self._file(key))
            if data is None:
                return
            yield data

    def put(self, key: str, data: bytes) -> None:
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
        """See `Store`. The start of a prefix is marked as used last, so that its end is evicted first."""
        now = time.time_ns()
        return [self._touch(self._file(key), now - 1000 * i) for i, key in enumerate(keys)]

    def delete(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.path / key[:2] / f"{key}.kv"

    def _read(self, file: Path) -> bytes | None:
        """Return a file's content, or None if there is none, or none of an engine: a pipe, or a huge one."""
        try:
            with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
                status = os.fstat(stream.fileno())
                is_entry = stat.S_ISREG(status.st_mode) and status.st_size <= self.max_entry_bytes
                return stream.read(self.max_entry_bytes) if is_entry else None
        except (FileNotFoundError, IsADirectoryError):
            return None

    @staticmethod
    def _touch(file: Path, time_ns: int) -> bool:
        try:
            os.utime(file, ns=(time_ns, time_ns))
        except FileNotFoundError:
            return False
        except OSError:  # the file belongs to another user, or is read-only
            return file.exists()
        return True

    def _evict(self) -> None:
        """Remove the least recently used files above the limit, and temporary files of killed writers."""
        files, total, now = [], 0, time.time()
        for name in glob.iglob("??/*", root_dir=self.path):
            entry = self.path / name
            with contextlib.suppress(OSError):  # removed in the meantime
                status = entry.stat()
                if entry.suffix == ".tmp" and now - status.st_mtime > 3600:
                    entry.unlink()
                elif entry.suffix == ".kv":
                    files.append((status.st_mtime_ns, status.st_size, entry))
                    total += status.st_size
        excess = total - self.max_bytes * 9 // 10 if total > self.max_bytes else 0
        for _, size, entry in sorted(files):
            if excess <= 0:
                break
            excess -= size
            with contextlib.suppress(OSError):
                entry.unlink()


class RedisStore(Store):
    """Stores entries in a Redis server, which evicts: set maxmemory, and maxmemory-policy allkeys-lru.

    The URL is redis://host:port/db. Settings of redis-py may follow, such as ?socket_timeout=5.
    """

    KEYS_PER_CALL = 8  # entries fetched per call: limits how many are fetched in vain

    def __init__(self, url: str) -> None:
        try:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ValueError("a KV store in Redis needs redis-py: pip install 'nanoengine[redis]'") from None
        self.url = url
        # An engine's step may wait for the answer, so a late answer counts as a failure.
        self._redis: Any = Redis.from_url(
            url, socket_connect_timeout=0.5, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)
        )

    def __str__(self) -> str:
        found = self._redis.connection_pool.connection_kwargs  # not the URL, which may contain a password
        where = found.get("path") or f"{found.get('host', 'localhost')}:{found.get('port', 6379)}"
        return f"{where}/{found.get('db', 0)}"

    def get(self, keys: abc.Sequence[str]) -> Iterable[bytes]:
        for i in range(0, len(keys), self.KEYS_PER_CALL):
            for data in self._redis.mget([self._name(key) for key in keys[i : i + self.KEYS_PER_CALL]]):
                if data is None:
                    return
                yield data

    def put(self, key: str, data: bytes) -> None:
        self._redis.set(self._name(key), data)

    def touch(self, keys: abc.Sequence[str]) -> list[bool]:
        calls = self._redis.pipeline(transaction=False)
        for key in reversed(keys):
            calls.touch(self._name(key))
        return [bool(count) for count in reversed(calls.execute())]

    def delete(self, key: str) -> None:
        self._redis.delete(self._name(key))

    @staticmethod
    def _name(key: str) -> str:
        return f"nanoengine:{key}"


def open_store(kv_store: Any) -> Store:
    """Open the store that `EngineConfig.kv_store` specifies. Raises ValueError if it cannot."""
    if isinstance(kv_store, str) and "://" in kv_store:
        return RedisStore(kv_store)
    if not isinstance(kv_store, (str, Path)):
        return kv_store  # type: ignore[no-any-return]
    try:
        return DirectoryStore(kv_store)
    except OSError as error:
        raise ValueError(f"kv_store={str(kv_store)!r} cannot be used as a directory: {error}") from error
