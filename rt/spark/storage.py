"""Files of a target that Spark writes to: a local directory, or whatever file system Hadoop knows by a URL.

Paths are relative to the target, with `/` between their parts. Law: what `write` or `move` makes is there
under its name as a whole, or not at all, for whoever reads the target. When they have returned it is on the
medium of a local directory; elsewhere it is as durable as that file system makes a file that was closed.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from rt.errors import StorageFailed
from rt.log.disk import storage_errors
from rt.spark.once import make_directories, make_once, sync

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""What a file system says that has no hard links: a mounted bucket, say."""
_FILE: Final = re.compile(r"^file:(//)?(?=/)")


class Storage(Protocol):
    """One target. Errors are storage errors."""

    def url(self, path: str) -> str:
        """What Spark calls it."""

    def names(self, path: str) -> list[str]:
        """What is in a directory, sorted; nothing where there is none."""

    def files(self, path: str) -> list[str]:
        """All files below a directory, sorted, relative to the target."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory."""

    def read(self, path: str) -> bytes | None:
        """A small file whole; None if there is none."""

    def write(self, path: str, content: bytes) -> None:
        """Make a small file at once. One that is replaced may be missing after a crash."""

    def create(self, path: str, content: bytes) -> bool:
        """Make a small file at once that nobody has made; False if somebody has.

        Of two that try it at one time one succeeds, on a local disk and on HDFS; object stores do not tell
        who is second when both look at the same moment.
        """

    def move(self, source: str, target: str) -> None:
        """Give a file another name, in a directory that need not be there yet.

        Object stores copy it, then remove it: after a crash it may have both names.
        """

    def sync(self, paths: list[str]) -> None:
        """Have files that Spark has written on the medium."""

    def remove(self, path: str) -> None:
        """A file or a directory with all below it; nothing where there is none."""


def is_local(target: str) -> bool:
    """Whether it is a directory of this machine."""
    return "://" not in _FILE.sub("", target)


def open_storage(target: str, spark: SparkSession | None) -> Storage:
    """`target` is a path, or a URL as Hadoop has it, for which `spark` is needed."""
    if is_local(target):
        return LocalStorage(os.path.abspath(_FILE.sub("", target)))
    if spark is None:
        raise ValueError("without Spark only local directories are known")
    return HadoopStorage(target, spark)


class LocalStorage:
    """A directory on this machine."""

    def __init__(self, root: str) -> None:
        self.root = root

    def url(self, path: str) -> str:
        """See `Storage`."""
        return f"file://{self._path(path)}"  # Hadoop takes names as they are, without escapes.

    def names(self, path: str) -> list[str]:
        """See `Storage`."""
        with storage_errors(self._path(path), "listing a directory"):
            try:
                return sorted(os.listdir(self._path(path)))
            except FileNotFoundError:
                return []

    def files(self, path: str) -> list[str]:
        """See `Storage`."""
        found: list[str] = []
        with storage_errors(self._path(path), "listing files"):
            for directory, _, names in os.walk(self._path(path)):
                found += [os.path.relpath(os.path.join(directory, name), self.root) for name in names]
        return sorted(found)

    def exists(self, path: str) -> bool:
        """See `Storage`."""
        return os.path.exists(self._path(path))

    def read(self, path: str) -> bytes | None:
        """See `Storage`."""
        with storage_errors(self._path(path), "reading a file"):
            try:
                return Path(self._path(path)).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, path: str, content: bytes) -> None:
        """See `Storage`."""
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
        """See `Storage`."""
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
        """See `Storage`."""
        with storage_errors(self._path(target), "moving a file"):
            directory = os.path.dirname(self._path(target))
            make_directories(directory)
            os.replace(self._path(source), self._path(target))
            sync(directory)

    def sync(self, paths: list[str]) -> None:
        """See `Storage`."""
        for path in paths:
            with storage_errors(self._path(path), "syncing a file"):
                sync(self._path(path))
        for directory in sorted({os.path.dirname(self._path(path)) for path in paths}):
            with storage_errors(directory, "syncing a directory"):
                while len(directory) >= len(self.root):
                    sync(directory)
                    directory = os.path.dirname(directory)

    def remove(self, path: str) -> None:
        """See `Storage`."""
        import shutil

        target = self._path(path)
        with storage_errors(target, "removing files"):
            if os.path.isdir(target):
                shutil.rmtree(target)
            elif os.path.exists(target):
                os.remove(target)

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path)


class HadoopStorage:
    """Whatever a Hadoop file system keeps at a URL, through the JVM of a local or client-mode driver."""

    def __init__(self, root: str, spark: SparkSession) -> None:
        self.root = root.rstrip("/")
        self._jvm: Any = spark._jvm
        context: Any = spark.sparkContext
        with _hadoop_errors(self.root, "opening a file system"):
            self._fs = self._path("").getFileSystem(context._jsc.hadoopConfiguration())
            self._prefix = str(self._fs.makeQualified(self._path("")).toString()).rstrip("/") + "/"

    def url(self, path: str) -> str:
        """See `Storage`."""
        return f"{self.root}/{path}" if path else self.root

    def names(self, path: str) -> list[str]:
        """See `Storage`."""
        with _hadoop_errors(self.url(path), "listing a directory"):
            if not self._fs.exists(self._path(path)):
                return []
            return sorted(str(each.getPath().getName()) for each in self._fs.listStatus(self._path(path)))

    def files(self, path: str) -> list[str]:
        """See `Storage`."""
        found: list[str] = []
        with _hadoop_errors(self.url(path), "listing files"):
            if not self._fs.exists(self._path(path)):
                return found
            each = self._fs.listFiles(self._path(path), True)
            while each.hasNext():
                found.append(str(each.next().getPath().toString()).removeprefix(self._prefix))
        return sorted(found)

    def exists(self, path: str) -> bool:
        """See `Storage`."""
        with _hadoop_errors(self.url(path), "looking for a file"):
            return bool(self._fs.exists(self._path(path)))

    def read(self, path: str) -> bytes | None:
        """See `Storage`."""
        with _hadoop_errors(self.url(path), "reading a file"):
            if not self._fs.exists(self._path(path)):
                return None
            stream = self._fs.open(self._path(path))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def write(self, path: str, content: bytes) -> None:
        """See `Storage`."""
        aside = self._write_aside(path, content)
        self.remove(path)  # Most of these file systems rename over no file.
        self.move(aside, path)

    def create(self, path: str, content: bytes) -> bool:
        """See `Storage`."""
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
        """See `Storage`."""
        with _hadoop_errors(self.url(target), "moving a file"):
            self._fs.mkdirs(self._path(target).getParent())
            if not self._fs.rename(self._path(source), self._path(target)):
                raise StorageFailed(
                    "moving a file: the file system refuses", where=self.url(target), got=source
                )

    def sync(self, paths: list[str]) -> None:
        """See `Storage`: they were closed."""

    def remove(self, path: str) -> None:
        """See `Storage`."""
        with _hadoop_errors(self.url(path), "removing files"):
            self._fs.delete(self._path(path), True)

    def _write_aside(self, path: str, content: bytes) -> str:
        aside = f"{path}.{uuid.uuid4().hex}.new"
        with _hadoop_errors(self.url(path), "writing a file"):
            stream = self._fs.create(self._path(aside), True)
            try:
                stream.write(bytearray(content))
                if stream.hasCapability("hsync"):  # Object stores have it when it is closed.
                    stream.hsync()
            finally:
                stream.close()
        return aside

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.url(path))


class _hadoop_errors:  # noqa: N801 - it is used like a function
    """Raise what Java throws as `rt.StorageFailed`."""

    def __init__(self, where: str, doing: str) -> None:
        self._where, self._doing = where, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        from py4j.protocol import Py4JJavaError

        if isinstance(error, Py4JJavaError):
            raise StorageFailed(self._doing, where=self._where, got=str(error.java_exception)) from error
