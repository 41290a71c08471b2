"""The entries of the Raft log in memory.

Invariant: after `base` the indices are dense and the terms never fall. The log is compacted after each
snapshot, so it is short.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

from sequencer.raft.model.messages import LogIndex, RaftEntry


class Entries:
    """The entries after `base`.

    As a sequence, for PySyncObj: an entry without content at `base`, then the entries.
    """

    def __init__(self, base: LogIndex, kept: Iterable[RaftEntry] = ()) -> None:
        self.base = base
        """The position before the first entry."""
        self._kept = list(kept)
        self.last = self._find_last()
        """The position of the newest entry, or `base`."""

    def term_at(self, index: int) -> int | None:
        """The term at `base` or of an entry; None for any other index."""
        behind = index - self.base.index
        if 0 < behind <= len(self._kept):
            return self._kept[behind - 1].term
        return self.base.term if behind == 0 else None

    def entry(self, index: int) -> RaftEntry:
        """Raises `IndexError` if the entry was compacted."""
        behind = index - self.base.index
        if behind <= 0:
            raise IndexError(f"entry {index} was compacted: the log starts after {self.base.index}")
        return self._kept[behind - 1]

    def entries(self, start: int, end: int | None = None, bytes_max: int | None = None) -> list[RaftEntry]:
        """Entries from index `start` to below `end`, as many as exist.

        At most `bytes_max` bytes of content, but at least one entry. `IndexError` if `start` is not after
        `base`.
        """
        first = start - self.base.index - 1
        if first < 0:
            raise IndexError(f"entry {start} was compacted: the log starts after {self.base.index}")
        behind = len(self._kept) if end is None else min(max(end - self.base.index - 1, 0), len(self._kept))
        if bytes_max is not None:
            at = first
            while at < behind:
                bytes_max -= len(self._kept[at].content)
                if bytes_max < 0 and at > first:
                    break
                at += 1
            behind = at
        return self._kept[first:behind]

    def __len__(self) -> int:
        return len(self._kept) + 1

    @overload
    def __getitem__(self, key: int) -> RaftEntry: ...
    @overload
    def __getitem__(self, key: slice) -> list[RaftEntry]: ...
    def __getitem__(self, key: int | slice) -> RaftEntry | list[RaftEntry]:
        kept = self._kept
        if key == -1 and kept:  # The most frequent access.
            return kept[-1]
        if isinstance(key, int):
            if key > 0:
                return kept[key - 1]
            if key < 0 and -key <= len(kept):
                return kept[key]
            if key in (0, -1 - len(kept)):
                return RaftEntry(b"", *self.base)
            raise IndexError(key)
        start, stop, step = key.indices(len(kept) + 1)
        if step == 1 and start > 0:
            return kept[start - 1 : max(stop - 1, 0)]
        if step == 1 and stop > 0:
            return [RaftEntry(b"", *self.base), *kept[: stop - 1]]
        return [self[at] for at in range(start, stop, step)]

    # Changes. `sequencer.raft.storage.log` makes them durable too.

    def append(self, entry: RaftEntry) -> None:
        last = self.last
        assert entry.index == last.index + 1, (entry.index, last)
        assert entry.term >= last.term, (entry.place, last)
        self._kept.append(entry)
        self.last = entry.place

    def truncate(self, index: int) -> None:
        """Drop the entries from `index` on. `index` is after `base`."""
        assert index > self.base.index, (index, self.base)
        del self._kept[index - self.base.index - 1 :]
        self.last = self._find_last()

    def reset(self, base: LogIndex) -> None:
        """Drop all entries and continue after `base`."""
        self.base = self.last = base
        self._kept.clear()

    def drop_through(self, base: LogIndex) -> None:
        """Drop the entries up to `base`, which is the position of one of them."""
        assert self.term_at(base.index) == base.term, (base, self.base, self.last)
        del self._kept[: base.index - self.base.index]
        self.base = base

    def _find_last(self) -> LogIndex:
        return self._kept[-1].place if self._kept else self.base
