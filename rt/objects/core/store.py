"""The store protocol: readers, writers, and the order in which they are used.

A store holds rows, `(category, key) -> bytes`. Only commits change them, completely or not at all: a reader,
also after a power cut, sees exactly one commit.

Several owners can share a store and its commits. Each has a tree of categories: the category `root` and those
that begin with `root/`. It never writes or clears rows outside its tree.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from rt.errors import InvalidOption
from rt.log.format.checksum import crc32c

DATA: Final = "data"
METADATA: Final = "metadata"
ITEMS: Final = "items"


class CheckpointKind(enum.Enum):
    """How a save relates to the stored rows of its owner. Rows of other owners always stay."""

    FULL = "full"
    """The save clears its tree and writes everything."""

    DIFFERENTIAL = "differential"
    """The save writes what changed since the save before it."""


def checked_kind(kind: object) -> CheckpointKind:
    """Return `kind`; `InvalidOption` if it is of another type: "full" would be treated as differential."""
    if isinstance(kind, CheckpointKind):
        return kind
    raise InvalidOption(
        "invalid kind of a checkpoint", got=repr(kind)[:100], expected="a member of CheckpointKind"
    )


class Owners(Protocol):
    """The saves of a store's trees since it was opened. So an owner notices that another one has saved."""

    def last_save(self, root: str) -> object | None:
        """The last save of the tree; None if there was none."""

    def note_save(self, root: str) -> object:
        """Record that the tree was saved, or may have been. Return what `last_save` returns from now on."""


class StateReader(Protocol):
    """Reads the last commit. Must not see an open writer's changes."""

    @property
    def store_id(self) -> str:
        """Identifies the store: the same for all its readers and writers, also after a restart."""

    @property
    def owners(self) -> Owners:
        """Same for all readers and writers of a store."""

    def categories(self, prefix: str = "") -> Iterator[str]:
        """Categories that have rows and begin with `prefix`, sorted."""

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """Keys and bytes, in any order. Must raise `StateDamaged` for a damaged row, never skip it."""

    def get(self, category: str, key: str) -> bytes | None:
        """One row; None if there is none."""


class StateWriter(Protocol):
    """One commit. Changes apply in the order of the calls; no reader sees them before `commit`.

    Used by one thread at a time. Unusable after `commit`, `rollback`, or an error of one of its methods.
    """

    @property
    def kind(self) -> CheckpointKind:
        """The kind of the owner's save. Every commit starts with the rows of the last one, for any kind."""

    @property
    def store_id(self) -> str:
        """Same as `StateReader.store_id`."""

    def reader(self) -> StateReader:
        """A reader of the same store."""

    def put(self, category: str, key: str, data: bytes) -> None:
        """Write a row, replacing an existing one."""

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        """Write rows. An error of the iterable is raised from here."""

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        """Delete rows. Missing keys are ignored."""

    def clear(self, category: str) -> None:
        """Delete every row of the category, in time independent of other categories."""

    def clear_tree(self, root: str) -> None:
        """Delete every row of the category `root` and of the categories that begin with `root/`."""

    def commit(self) -> None:
        """Apply the changes to the store. Return when they are durable.

        Raises `CommitUnknown` if the commit may have happened. After any other error it did not happen.
        """

    def rollback(self) -> None:
        """Discard the changes. Does nothing on an unusable writer; must never raise."""


class Claim(Protocol):
    """A tree of categories that is reserved for one owner."""

    def release(self) -> None:
        """End the reservation. Idempotent."""


class Store(Protocol):
    """Keeps rows."""

    def reader(self) -> StateReader:
        """A reader that is valid until the store is closed."""

    def begin(self, kind: CheckpointKind) -> StateWriter:
        """Open a writer; `OutOfTurn` if another is open, `InvalidOption` for another kind."""

    def claim(self, root: str) -> Claim:
        """Reserve a tree of categories for one owner, until its release or the end of the process.

        `OutOfTurn` if another owner has claimed `root`, a tree inside it, or one around it.
        """

    def close(self) -> None:
        """Release the store and roll back an open writer. Idempotent."""


class ObjectRows:
    """One object's rows in a writer: categories `<base><part>`."""

    __slots__ = ("_base", "_writer")

    def __init__(self, writer: StateWriter, base: str) -> None:
        self._writer = writer
        self._base = base

    def put(self, part: str, key: str, data: bytes) -> None:
        self._writer.put(self._base + part, key, data)

    def put_many(self, part: str, rows: Iterable[tuple[str, bytes]]) -> None:
        self._writer.put_many(self._base + part, rows)

    def delete_many(self, part: str, keys: Iterable[str]) -> None:
        self._writer.delete_many(self._base + part, keys)

    def clear(self, part: str) -> None:
        self._writer.clear(self._base + part)


def category_checksum(category: str) -> int:
    """The checksum of a category. The checksums of its rows continue from it.

    The checksum of a row is the CRC-32C of category, NUL, key, NUL, value. So the check of a row in the wrong
    position fails too.
    """
    return crc32c(f"{category}\0".encode())


def row_checksum(seed: int, key: str, value: bytes) -> int:
    """The checksum of key and value, continued from the category's."""
    return crc32c(value, crc32c(f"{key}\0".encode(), seed))
