"""From messages to bytes: the formats that `rt sub` writes, each batch in one piece.

Invariants:
- Input that `rt pub` read in a format is written back unchanged.
- A message that a format cannot hold is an error that names its position. Messages before it were written.
- No file is written outside the output directory, for any topics and for any links below it: each directory
  of a path is opened relative to its parent, and no link is followed.
- A file appears as a whole, by rename, and replaces an older file of its name.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, Protocol, TypeAlias

from rt.cli.formats.envelope import envelopes
from rt.cli.formats.parsers import parse_json
from rt.errors import FormatError
from rt.log.disk import storage_errors
from rt.log.scan.message_batch import Message


class MessageRows(Protocol):
    """Messages: a `rt.MessageBatch`, or `Polled`."""

    @property
    def values(self) -> list[bytes]: ...

    def messages(self) -> Iterator[Message]:
        """The messages one by one."""

    def __len__(self) -> int: ...


class Polled:
    """Messages that a subscriber polled."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    @property
    def values(self) -> list[bytes]:
        return [message.value for message in self._messages]

    def messages(self) -> Iterator[Message]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)


Encoder: TypeAlias = Callable[[MessageRows], Iterable[bytes]]
"""A format: the bytes to write, in order; raises at the first message that the format cannot hold."""


class StreamOutput:
    """Writes messages to a stream in a format."""

    def __init__(self, stream: BinaryIO, encoder: Encoder) -> None:
        self._stream = stream
        self._encoder = encoder

    def write(self, rows: MessageRows) -> None:
        """Write all messages. On return the operating system has them."""
        pieces: list[bytes] = []
        try:
            pieces.extend(self._encoder(rows))
        finally:
            self._stream.write(b"".join(pieces))
            self._stream.flush()


def as_lines(rows: MessageRows) -> Iterator[bytes]:
    """Each value and a newline."""
    yield b"\n".join((*rows.values, b""))


def as_envelopes(rows: MessageRows) -> Iterator[bytes]:
    return envelopes(rows.messages())


def as_json_lines(rows: MessageRows) -> Iterator[bytes]:
    """Each value unchanged; it must be JSON on one line."""
    for message in rows.messages():
        _parsed(message)
        if b"\n" in message.value:
            raise _bad("JSON on more than one line", message)
        yield message.value + b"\n"


class CsvEncoder:
    """Encodes each value as a CSV record. Each value must be an object.

    The columns are `columns`. If it is None, they are the keys of the first object, and all other objects
    must have these keys.
    """

    def __init__(self, columns: Sequence[str] | None = None, *, has_header: bool = True) -> None:
        self._columns = None if columns is None else list(columns)
        self._is_chosen = columns is not None
        self._needs_header = has_header

    def __call__(self, rows: MessageRows) -> Iterator[bytes]:
        """The header, once, and a record for each message."""
        for message in rows.messages():
            found = _object(message)
            if self._columns is None:
                self._columns = list(found)
            if self._needs_header:
                self._needs_header = False
                yield _record(self._columns)
            if not self._is_chosen and found.keys() != set(self._columns):
                raise _bad(
                    "the keys differ from those of the first message",
                    message,
                    got=", ".join(found),
                    expected=", ".join(self._columns),
                    hint="Choose columns with --columns.",
                )
            yield _record([_cell(found.get(column)) for column in self._columns])


def _parsed(message: Message) -> object:
    try:
        return parse_json(message.value)
    except ValueError as error:
        raise _bad(f"invalid JSON: {error}", message) from error


def _object(message: Message) -> dict[str, object]:
    found = _parsed(message)
    if not isinstance(found, dict):
        raise _bad("not a JSON object", message)
    return found


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _record(cells: Sequence[str]) -> bytes:
    """A CSV record. The csv module quotes a carriage return only if it quotes all cells."""
    text = io.StringIO()
    has_return = any("\r" in cell for cell in cells)
    csv.writer(
        text, lineterminator="\n", quoting=csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL
    ).writerow(cells)
    return text.getvalue().encode()


def _bad(what: str, message: Message, **parts: str) -> FormatError:
    return FormatError(what, where=f"position {message.position}", **parts)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TOPIC_FAULTS = frozenset(
    {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY, errno.EEXIST}
)
"""Errors that are caused by the topic, or by a file of its name, and not by the disk."""


class FileOutput:
    """Writes files below `root`, which is created if missing. With `is_durable` each file is synced."""

    def __init__(self, root: str, *, is_durable: bool = False) -> None:
        self._root = os.path.abspath(root)
        self._is_durable = is_durable
        with storage_errors(self._root, "opening the output directory"):
            os.makedirs(self._root, exist_ok=True)
            self._descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, rows: MessageRows) -> None:
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
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _directory(self, names: list[str]) -> Iterator[int]:
        """Open the directory `names` below the root; missing directories are created."""
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
    """Directories and name of a message's file; `rt.FormatError` if the topic is not a relative path."""
    steps = message.topic.split("/")
    if "\0" in message.topic or any(step in {"", ".", ".."} for step in steps):
        raise _hostile("is not a relative path", message)
    return steps


def _hostile(what: str, message: Message) -> FormatError:
    hint = "Choose other topics with --topic, or use --json."
    return _bad(f"the topic {what}", message, got=repr(message.topic)[:200], hint=hint)
