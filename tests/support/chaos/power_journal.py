"""The journal of real files for power cuts: the changes that are not durable yet.

    <journal directory>/   on the file system of the files, outside their directory
        journal            records: u32 length, JSON header, a zero byte, the bytes that the change destroyed
        <inode>.<number>   a second name of a removed or replaced file, so that it can be restored

Invariant: a change is recorded before it is made. It is marked as durable after the sync that covers it has
returned. The kernel may write unsynced data at any time, so only the last changes of each file are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

JOURNAL: Final = "journal"
PENDING_PER_FILE_MAX: Final = 64
_REWRITE_BYTES: Final = 16 * 2**20
_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Change:
    """A change that is not durable yet. `number` orders the changes of one journal."""

    number: int
    kind: str
    """"write" or "truncate", of `inode`; "create", "rename" or "remove", of `path`."""
    inode: int = 0
    offset: int = 0
    length: int = 0
    """Bytes written, or the new size after a truncate."""
    size: int = 0
    """Size of the file before the change."""
    path: str = ""
    target: str = ""
    kept: str = ""
    """The second name of the file that was removed or replaced."""
    old: bytes = b""
    """The bytes that were overwritten or cut off."""

    @property
    def names(self) -> set[str]:
        """The names that this changes; empty if it changes the content of a file."""
        return {self.path, self.target} - {""}

    def encode(self) -> bytes:
        """One record of the journal."""
        fields = {name: value for name in _FIELDS if (value := getattr(self, name))}
        return _record(fields, self.old)


_FIELDS = ("number", "kind", "inode", "offset", "length", "size", "path", "target", "kept")


def _record(fields: dict[str, Any], old: bytes = b"") -> bytes:
    body = json.dumps(fields).encode() + b"\0" + old
    return _LENGTH.pack(len(body)) + body


def pending(directory: str) -> list[Change]:
    """Return the changes that are not durable, oldest first. A torn record is ignored: its change was not
    made.
    """
    try:
        with open(os.path.join(directory, JOURNAL), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return []
    changes: dict[int, Change] = {}
    at = 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        body = content[at + _LENGTH.size : at + _LENGTH.size + length]
        at += _LENGTH.size + length
        if len(body) < length:
            break
        head, _, old = body.partition(b"\0")
        fields = json.loads(head)
        if "durable" in fields:
            for number in fields["durable"]:
                changes.pop(number, None)
        else:
            changes[fields["number"]] = Change(old=old, **fields)
    return list(changes.values())


class Journal:
    """The journal of one directory of files; thread-safe."""

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self._directory = directory
        self._path = os.path.join(directory, JOURNAL)
        self.lock = threading.RLock()
        self._changes = {change.number: change for change in pending(directory)}
        self._next = max(self._changes, default=0) + 1
        self._rewrite()

    def note(self, kind: str, **fields: Any) -> None:
        """Record a change before it is made. The caller holds the lock.

        The caller has already checked which names exist.
        """
        change = Change(self._next, kind, **fields)
        self._next += 1
        self._changes[change.number] = change
        self._write(change.encode())
        if change.inode:
            self._bound(change.inode)

    def keep(self, path: str) -> str:
        """Give the file at `path` a second name."""
        kept = f"{os.lstat(path).st_ino}.{self._next}"
        with contextlib.suppress(FileExistsError):  # An earlier process was killed right here.
            os.link(path, os.path.join(self._directory, kept))
        return kept

    def data_of(self, inode: int) -> list[int]:
        """Return the numbers of a file's changes that a sync from now on makes durable."""
        with self.lock:
            return [change.number for change in self._changes.values() if change.inode == inode]

    def names_of(self, directory: str) -> list[int]:
        """Return the numbers of the name changes in a directory. A rename counts in the directory of its
        source.
        """
        with self.lock:
            return [
                c.number for c in self._changes.values() if c.path and os.path.dirname(c.path) == directory
            ]

    def settle(self, numbers: Sequence[int]) -> None:
        """Record these changes as durable, and delete the second names that they kept."""
        if not numbers:
            return
        with self.lock:
            self._write(_record({"durable": list(numbers)}))
            for number in numbers:
                change = self._changes.pop(number, None)
                if change is not None and change.kept:
                    self._let_go(change.kept)

    def _let_go(self, kept: str) -> None:
        inode = int(kept.partition(".")[0])
        if gone := self.data_of(inode):
            self.settle(gone)  # Its number may be given to another file.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, kept))

    def _bound(self, inode: int) -> None:
        numbers = self.data_of(inode) if len(self._changes) > PENDING_PER_FILE_MAX else []
        if len(numbers) > 2 * PENDING_PER_FILE_MAX:
            self.settle(numbers[:-PENDING_PER_FILE_MAX])

    def _write(self, record: bytes) -> None:
        os.write(self._fd, record)
        self._size += len(record)
        if self._size > _REWRITE_BYTES:
            os.close(self._fd)
            self._rewrite()

    def _rewrite(self) -> None:
        """Rewrite the journal without the durable changes."""
        content = b"".join(change.encode() for change in self._changes.values())
        aside = f"{self._path}.new"
        with open(aside, "wb") as file:
            file.write(content)
        os.replace(aside, self._path)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = 0
