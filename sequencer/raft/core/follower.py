"""How a follower handles AppendEntries. Pure. (Raft paper, section 5.3.)

Invariants:
- Matching entries are never truncated. A committed entry is never truncated.
- Every acknowledged entry was compared with the leader's log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rt.errors import Diverged
from sequencer.raft.model.messages import AppendEntries, LogIndex, RaftEntry
from sequencer.raft.storage.log_entries import Entries


@dataclass(frozen=True, slots=True)
class AppendRejected:
    """The log does not contain the entry before the message's entries. It may agree up to `hint`."""

    hint: int


@dataclass(frozen=True, slots=True)
class AppendMatched:
    """The log agrees up to `matched` after entries from `cut` on (if any) are replaced with `new`."""

    matched: int
    cut: int | None
    new: tuple[RaftEntry, ...]


Verdict: TypeAlias = AppendRejected | AppendMatched


def compare(message: AppendEntries, log: Entries, committed: int) -> Verdict:
    """Compare an AppendEntries of the current leader with the log.

    Raises `rt.Diverged` if a committed entry differs from the leader's.
    """
    prev = message.prev
    known = log.term_at(prev.index)
    if prev.index > committed:
        if known != prev.term:
            return AppendRejected(_hint(message, log, committed))
    else:
        _check_committed(prev, known)
    matched = max(prev.index + len(message.entries), committed)
    for at, entry in enumerate(message.entries):
        own = log.term_at(entry.index)
        if entry.index <= committed:
            _check_committed(entry.place, own)
        elif own != entry.term:
            return AppendMatched(matched, entry.index if own is not None else None, message.entries[at:])
    return AppendMatched(matched, None, ())


def _check_committed(place: LogIndex, known: int | None) -> None:
    """A committed entry must equal the leader's. `known` is None if it was compacted."""
    if known not in {None, place.term}:
        raise Diverged("a committed entry differs from the leader's", where=place, got=f"term {known}")


def _hint(message: AppendEntries, log: Entries, committed: int) -> int:
    """The index before the differing term, but not below the commit index, where all leaders agree."""
    index, last = message.prev.index, log.last.index
    if index > last:
        return max(last, committed)
    term = log.term_at(index)
    while index > committed and log.term_at(index) == term:
        index -= 1
    return index
