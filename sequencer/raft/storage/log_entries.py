"""The entries of the Raft log in memory, and their bookkeeping.

The law: behind `base` indexes are dense and terms never fall. The log is short, since it is compacted behind
each snapshot; the contents are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from sequencer.raft.model.messages import LogIndex, RaftEntry


class Entries:
    """What a log keeps: the entries behind `base`.

    As a sequence it is what PySyncObj reads: an entry without content at `base`, then the entries. Its
    slices are lists of their own.
    """

    def __init__(self, base: LogIndex, kept: Iterable[RaftEntry] = ()) -> None:
        self.base = base
        """The place before the first entry kept."""
        self._kept = list(kept)
        self.last = self._find_last()
        """The place of the newest entry, `base` if there is none."""

    def term_at(self, index: int) -> int | None:
        """The term of `base` or of the entry with that index; None for any other index."""
        behind = index - self.base.index
        if 0 < behind <= len(self._kept):
            return self._kept[behind - 1].term
        return self.base.term if behind == 0 else None

    def entry(self, index: int) -> RaftEntry:
        """The entry with that index; `IndexError` if it is not kept."""
        behind = index - self.base.index
        if behind <= 0:
            raise IndexError(f"entry {index} was compacted: the log starts after {self.base.index}")
        return self._kept[behind - 1]

    def entries(self, start: int, end: int | None = None, bytes_max: int | None = None) -> list[RaftEntry]:
        """Entries from index `start` to below `end`, as many as there are.

        Their contents have no more than `bytes_max` bytes together, but the first entry always comes.
        `IndexError` if `start` is at or before `base`.
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
        if key == -1 and kept:  # What is asked most.
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
        """Add the entry that follows `last`."""
        last = self.last
        assert entry.index == last.index + 1, (entry.index, last)
        assert entry.term >= last.term, (entry.place, last)
        self._kept.append(entry)
        self.last = entry.place

    def extend(self, entries: Sequence[RaftEntry]) -> None:
        """Add entries, of which the first follows `last`."""
        wanted, at_least = self.last
        for _, index, term in entries:
            wanted += 1
            assert index == wanted, (index, wanted)
            assert term >= at_least, (index, term, at_least)
            at_least = term
        self._kept.extend(entries)
        self.last = self._find_last()

    def truncate(self, index: int) -> None:
        """Drop the entries from `index` on, which is behind `base`."""
        assert index > self.base.index, (index, self.base)
        del self._kept[index - self.base.index - 1 :]
        self.last = self._find_last()

    def reset(self, base: LogIndex) -> None:
        """Drop every entry and go on behind `base`."""
        self.base = self.last = base
        self._kept.clear()

    def forget(self, base: LogIndex) -> None:
        """Drop the entries up to `base`, which is the place of one of them."""
        assert self.term_at(base.index) == base.term, (base, self.base, self.last)
        del self._kept[: base.index - self.base.index]
        self.base = base

    def _find_last(self) -> LogIndex:
        return self._kept[-1].place if self._kept else self.base
