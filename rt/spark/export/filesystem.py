"""The files of a target that Spark writes to: a local directory, or any file system that Hadoop opens by URL.

Paths are relative to the target and use `/`. Invariants:
- For any reader, a file made by `write` or `move` exists under its name completely or not at all.
- When `write` or `move` returns, the file is synced in a local directory. On another file system it is as
  durable as a closed file of that file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from rt.errors import InvalidOption, StorageFailed
from rt.log.disk import storage_errors
from rt.spark.options import local_path
from rt.spark.sink.create_once import make_directories, make_once, sync

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""The errors of a file system without hard links, such as a mounted bucket."""


class Filesystem(Protocol):
    """One target. Must raise storage errors only."""

    def url(self, path: str) -> str:
        """The URL for Spark."""

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; empty if it does not exist."""

    def files(self, path: str) -> list[str]:
        """All files below a directory, sorted, relative to the target."""

    def exists(self, path: str) -> bool:
        """Whether the file or directory exists."""

    def size(self, path: str) -> int | None:
        """The bytes of a file; None if it does not exist."""

    def read(self, path: str) -> bytes | None:
        """A small file; None if it does not exist."""

    def write(self, path: str, content: bytes) -> None:
        """Write a small file atomically. If it replaces a file, a crash may leave no file."""

    def create(self, path: str, content: bytes) -> bool:
        """Create a small file atomically; False if it exists already.

        Of two concurrent calls one succeeds, on a local disk and on HDFS. On an object store both may.
        """

    def move(self, source: str, target: str) -> None:
        """Rename a file, into a directory that may not exist yet.

        An object store copies and then deletes it: after a crash both names may exist.
        """

    def sync(self, paths: list[str]) -> None:
        """Sync files that Spark has written."""

    def remove(self, path: str) -> None:
        """Delete a file, or a directory with its contents, if it exists."""


def is_local(target: str) -> bool:
    """Whether it is a directory on this machine."""
    return "://" not in local_path(target)


def open_storage(target: str, spark: SparkSession | None) -> Filesystem:
    """`target` is a path, or a Hadoop URL, which requires `spark`."""
    if is_local(target):
        return LocalFilesystem(os.path.abspath(local_path(target)))
    if spark is None:
        raise InvalidOption("a target on Hadoop needs a Spark session")
    return HadoopFilesystem(target, spark)


class LocalFilesystem:
    """A directory on this machine."""

    def __init__(self, root: str) -> None:
        self.root = root

    def url(self, path: str) -> str:
        return f"file://{self._path(path)}"  # Hadoop takes names literally, without escapes.

    def names(self, path: str) -> list[str]:
        with storage_errors(self._path(path), "listing a directory"):
            try:
                return sorted(os.listdir(self._path(path)))
            except FileNotFoundError:
                return []

    def files(self, path: str) -> list[str]:
        found: list[str] = []
        with storage_errors(self._path(path), "listing files"):
            for directory, _, names in os.walk(self._path(path)):
                found += [os.path.relpath(os.path.join(directory, name), self.root) for name in names]
        return sorted(found)

    def exists(self, path: str) -> bool:
        return os.path.exists(self._path(path))

    def size(self, path: str) -> int | None:
        with storage_errors(self._path(path), "looking for a file"):
            try:
                return os.path.getsize(self._path(path))
            except FileNotFoundError:
                return None

    def read(self, path: str) -> bytes | None:
        with storage_errors(self._path(path), "reading a file"):
            try:
                return Path(self._path(path)).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, path: str, content: bytes) -> None:
        target = self._path(path)
        aside = f"{target}.new"
        with storage_errors(target, "writing a file"):
            make_directories(os.path.dirname(target))
            with open(aside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
            sync(os.path.dirname(target))

    def create(self, path: str, content: bytes) -> bool:
        target = self._path(path)
        with storage_errors(target, "making a file"):
            try:
                return make_once(target, content)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        if self.exists(path):
            return False
        self.write(path, content)
        return True

    def move(self, source: str, target: str) -> None:
        with storage_errors(self._path(target), "moving a file"):
            directory = os.path.dirname(self._path(target))
            make_directories(directory)
            os.replace(self._path(source), self._path(target))
            sync(directory)

    def sync(self, paths: list[str]) -> None:
        for path in paths:
            with storage_errors(self._path(path), "syncing a file"):
                sync(self._path(path))
        for directory in sorted({os.path.dirname(self._path(path)) for path in paths}):
            with storage_errors(directory, "syncing a directory"):
                while len(directory) >= len(self.root):
                    sync(directory)
                    directory = os.path.dirname(directory)

    def remove(self, path: str) -> None:
        target = self._path(path)
        with storage_errors(target, "removing files"):
            if os.path.isdir(target):
                shutil.rmtree(target)
            elif os.path.exists(target):
                os.remove(target)

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path)


class HadoopFilesystem:
    """A Hadoop file system at a URL, used through the JVM of a local or client-mode driver."""

    def __init__(self, root: str, spark: SparkSession) -> None:
        self.root = root.rstrip("/")
        self._jvm: Any = spark._jvm
        context: Any = spark.sparkContext
        with _hadoop_errors(self.root, "opening a file system"):
            self._fs = self._path("").getFileSystem(context._jsc.hadoopConfiguration())
            self._prefix = str(self._fs.makeQualified(self._path("")).toString()).rstrip("/") + "/"

    def url(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def names(self, path: str) -> list[str]:
        with _hadoop_errors(self.url(path), "listing a directory"):
            if not self._fs.exists(self._path(path)):
                return []
            return sorted(str(each.getPath().getName()) for each in self._fs.listStatus(self._path(path)))

    def files(self, path: str) -> list[str]:
        found: list[str] = []
        with _hadoop_errors(self.url(path), "listing files"):
            if not self._fs.exists(self._path(path)):
                return []
            each = self._fs.listFiles(self._path(path), True)
            while each.hasNext():
                found.append(str(each.next().getPath().toString()).removeprefix(self._prefix))
        return sorted(found)

    def exists(self, path: str) -> bool:
        with _hadoop_errors(self.url(path), "looking for a file"):
            return bool(self._fs.exists(self._path(path)))

    def size(self, path: str) -> int | None:
        with _hadoop_errors(self.url(path), "looking for a file"):
            if not self._fs.exists(self._path(path)):
                return None
            return int(self._fs.getFileStatus(self._path(path)).getLen())

    def read(self, path: str) -> bytes | None:
        with _hadoop_errors(self.url(path), "reading a file"):
            if not self._fs.exists(self._path(path)):
                return None
            stream = self._fs.open(self._path(path))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def write(self, path: str, content: bytes) -> None:
        aside = self._write_aside(path, content)
        self.remove(path)  # Most of these file systems cannot rename over an existing file.
        self.move(aside, path)

    def create(self, path: str, content: bytes) -> bool:
        if self.exists(path):
            return False
        aside = self._write_aside(path, content)
        with _hadoop_errors(self.url(path), "making a file"):
            if self._fs.rename(self._path(aside), self._path(path)):
                return True
        self.remove(aside)
        if self.exists(path):
            return False
        raise StorageFailed("making a file: the file system refuses", where=self.url(path))

    def move(self, source: str, target: str) -> None:
        with _hadoop_errors(self.url(target), "moving a file"):
            self._fs.mkdirs(self._path(target).getParent())
            if not self._fs.rename(self._path(source), self._path(target)):
                raise StorageFailed(
                    "moving a file: the file system refuses", where=self.url(target), got=source
                )

    def sync(self, paths: list[str]) -> None:
        """Nothing to do: the files are closed."""

    def remove(self, path: str) -> None:
        with _hadoop_errors(self.url(path), "removing files"):
            self._fs.delete(self._path(path), True)

    def _write_aside(self, path: str, content: bytes) -> str:
        aside = f"{path}.{uuid.uuid4().hex}.new"
        with _hadoop_errors(self.url(path), "writing a file"):
            stream = self._fs.create(self._path(aside), True)
            try:
                stream.write(bytearray(content))
                if stream.hasCapability("hsync"):  # Object stores make a file durable when it is closed.
                    stream.hsync()
            finally:
                stream.close()
        return aside

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.url(path))


@contextlib.contextmanager
def _hadoop_errors(where: str, doing: str) -> Iterator[None]:
    """Convert Java exceptions to `rt.StorageFailed`."""
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        raise StorageFailed(doing, where=where, got=str(error.java_exception)) from error
