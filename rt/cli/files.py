"""Messages as files: each value goes to the file that its topic names, below one directory.

Laws. Nothing is ever written outside that directory, whatever the topics are and whatever links somebody
plants below it: each step of a path is opened in the one before it, and no link is followed. A file appears
whole, by rename, and replaces an older one of its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator

from rt.cli.outputs import Rows
from rt.errors import FormatError
from rt.log.columns import Message
from rt.log.disk import storage_errors

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TOPIC_FAULTS = frozenset(
    {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY, errno.EEXIST}
)
"""What the system says where the topic, or what lies at its place, is to blame and not the disk."""


class FileOutput:
    """Writes below `root`, which is made if it is missing. With `is_durable` files are synced as written."""

    def __init__(self, root: str, *, is_durable: bool = False) -> None:
        self._root = os.path.abspath(root)
        self._is_durable = is_durable
        with storage_errors(self._root, "opening the output directory"):
            os.makedirs(self._root, exist_ok=True)
            self._descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, rows: Rows) -> None:
        """A file for each message, in order."""
        for message in rows.messages():
            *directories, name = _steps(message)
            try:
                with self._directory(directories) as descriptor:
                    self._write(descriptor, name, message.value)
            except OSError as error:
                if error.errno in _TOPIC_FAULTS:
                    raise _hostile(f"cannot be a file: {error.strerror}", message) from error
                with storage_errors(os.path.join(self._root, message.topic), "writing a file"):
                    raise

    def close(self) -> None:
        """Release the directory."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _directory(self, names: list[str]) -> Iterator[int]:
        """The directory `names` below the root, made where it is missing."""
        descriptor = os.dup(self._descriptor)
        try:
            for name in names:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
                    self._sync(descriptor)
                inner = os.open(name, _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _write(self, directory: int, name: str, value: bytes) -> None:
        aside = f".rt-{secrets.token_hex(8)}.new"
        file = os.open(aside, _NEW_FILE, 0o666, dir_fd=directory)
        try:
            with open(file, "wb", buffering=0) as stream:
                _write_all(stream.fileno(), value)
                self._sync(stream.fileno())
            os.rename(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=directory)
            raise
        self._sync(directory)

    def _sync(self, descriptor: int) -> None:
        if self._is_durable:
            os.fsync(descriptor)


def _write_all(descriptor: int, value: bytes) -> None:
    rest = memoryview(value)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _steps(message: Message) -> list[str]:
    """The names on the way to a message's file; `rt.FormatError` if its topic is no path below the root."""
    steps = message.topic.split("/")
    if "\0" in message.topic or any(step in {"", ".", ".."} for step in steps):
        raise _hostile("is no relative path", message)
    return steps


def _hostile(what: str, message: Message) -> FormatError:
    return FormatError(
        f"a topic {what}",
        where=f"position {message.position}",
        got=repr(message.topic)[:200],
        hint="Choose others with --topic, or write --json.",
    )
