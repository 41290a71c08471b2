"""What the object space asks of a store: readers, writers, and the order in which they are used.

A store holds rows, `(category, key) -> bytes`. They change by commits only, whole or not at all: a reader,
and a process that comes after a power cut at any moment, sees what one commit left. Others may keep rows of
their own in the same store and the same commits, in categories with another prefix.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

DATA: Final = "data"
METADATA: Final = "metadata"
ITEMS: Final = "items"


class CheckpointKind(enum.Enum):
    """What a commit is to what the store holds."""

    FULL = "full"
    """A complete image: whatever the store held before is gone."""

    DIFFERENTIAL = "differential"
    """Changes to it."""


class StateReader(Protocol):
    """What the last commit left. Sees nothing of a writer that is open before its commit."""

    @property
    def store_id(self) -> str:
        """Names the store: the same for all its readers and writers, for as long as it lives."""

    def categories(self, prefix: str = "") -> Iterator[str]:
        """Categories that hold rows and begin with `prefix`, sorted."""

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """Keys and bytes, in any order. `StateDamaged` for a row that fails its check; none is skipped."""

    def get(self, category: str, key: str) -> bytes | None:
        """One row, None if there is none."""


class StateWriter(Protocol):
    """One commit in the making. Changes take effect in the order of the calls; none is seen before `commit`.

    Used by one thread at a time; after `commit` or `rollback`, or when one of its methods has raised, it is
    spent.
    """

    @property
    def kind(self) -> CheckpointKind:
        """FULL: it begins with nothing. DIFFERENTIAL: with what the last commit left."""

    @property
    def store_id(self) -> str:
        """As the store's readers say."""

    def put(self, category: str, key: str, data: bytes) -> None:
        """Write a row, over the one that is there."""

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        """Write rows. What the iterable raises comes out of here."""

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        """Take rows away; nothing where there is none."""

    def clear(self, category: str) -> None:
        """Take every row of the category away, in time that does not depend on other categories."""

    def commit(self) -> None:
        """Make all of it the content of the store; returns when it is durable.

        Raises `CommitUnknown` where it may have happened or not. Any other error: it did not.
        """

    def rollback(self) -> None:
        """Forget all of it. Nothing on one that is spent; never raises."""


class Store(Protocol):
    """Somewhere to keep rows."""

    def reader(self) -> StateReader:
        """Valid until the store is closed."""

    def begin(self, kind: CheckpointKind) -> StateWriter:
        """Start a commit; `OutOfTurn` while another is open."""

    def close(self) -> None:
        """Release it; an open writer is rolled back. Closing twice is allowed."""


class Rows:
    """One object's rows in a writer: categories `<base><part>`."""

    __slots__ = ("_base", "_writer")

    def __init__(self, writer: StateWriter, base: str) -> None:
        self._writer = writer
        self._base = base

    def put(self, part: str, key: str, data: bytes) -> None:
        """Write one."""
        self._writer.put(self._base + part, key, data)

    def put_many(self, part: str, rows: Iterable[tuple[str, bytes]]) -> None:
        """Write some."""
        self._writer.put_many(self._base + part, rows)

    def delete_many(self, part: str, keys: Iterable[str]) -> None:
        """Take some away."""
        self._writer.delete_many(self._base + part, keys)

    def clear(self, part: str) -> None:
        """Take all away."""
        self._writer.clear(self._base + part)
