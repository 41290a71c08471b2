"""A file of `MemoryDisk` without its name, and what a power cut leaves of unsynced changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Coin: TypeAlias = Callable[[], bool]
"""True: the change survives."""

SECTOR_BYTES: Final = 512
"""The smallest unit that drives write atomically."""


def coin_of(keep: Literal["none", "some"], seed: int) -> Coin:
    """Return a coin with a random probability, so that in some cases nearly all or nearly no changes
    survive.
    """
    if keep == "none":
        return lambda: False
    source = random.Random(seed)
    odds = source.choice((0.2, 0.5, 0.8, 0.95))
    return lambda: source.random() < odds


def _lengthen(content: bytearray, size: int) -> None:
    content.extend(bytes(max(0, size - len(content))))


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        _lengthen(content, self.offset)
        content[self.offset : self.offset + len(self.data)] = self.data

    def apply_some(self, content: bytearray, coin: Coin) -> None:
        """Apply all, some sectors, or nothing. The size may change without the bytes."""
        if coin():
            self.apply(content)
            return
        if coin():
            for piece in self._sectors():
                if coin():
                    piece.apply(content)
        if coin():
            _lengthen(content, self.offset + len(self.data))

    def _sectors(self) -> Iterator[Write]:
        start, end = self.offset, self.offset + len(self.data)
        while start < end:
            stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
            yield Write(start, self.data[start - self.offset : stop - self.offset])
            start = stop


@dataclass(frozen=True, slots=True)
class Truncate:
    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]
        _lengthen(content, self.size)

    def apply_some(self, content: bytearray, coin: Coin) -> None:
        """Apply all or nothing."""
        if coin():
            self.apply(content)


class Inode:
    """A file without its name: its visible content, its durable content, and the changes since the last sync.

    `content` is `durable` with `pending` applied, except after a failed sync, which empties `pending`.
    """

    __slots__ = ("content", "durable", "is_linked", "is_locked", "opened", "pending")

    def __init__(
        self, content: bytearray, durable: bytearray, pending: Sequence[Write | Truncate] = ()
    ) -> None:
        self.content = content
        self.durable = durable
        self.pending = list(pending)
        self.is_linked = True
        self.is_locked = False
        self.opened = 0

    def change(self, change: Write | Truncate) -> None:
        """Apply a change that is not synced."""
        change.apply(self.content)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()

    def after_kill(self) -> Inode:
        """The file for the next process. Unsynced changes are still unsynced."""
        return Inode(self.content.copy(), self.durable.copy(), self.pending)

    def after_power_cut(self, coin: Coin) -> Inode:
        content = self.durable.copy()
        for change in self.pending:
            change.apply_some(content, coin)
        return Inode(content, content.copy())
