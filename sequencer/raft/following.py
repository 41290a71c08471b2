"""What a follower does with the leader's entries. Pure. (Raft paper, section 5.3.)

The law (rule 2 of DESIGN.md, section 6.1): matching entries are never cut, committed ones never even compared
with the wish to cut them; what is acknowledged has been compared with the leader's log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rt.errors import Diverged
from sequencer.raft.log_entries import Entries
from sequencer.raft.messages import Append, Entry, Place


@dataclass(frozen=True, slots=True)
class Refused:
    """The log has not what stands before the message's entries; it may agree up to `hint`."""

    hint: int


@dataclass(frozen=True, slots=True)
class Matched:
    """The log agrees up to index `matched` once the entries from `cut` on, if any, gave way to `new`."""

    matched: int
    cut: int | None
    new: tuple[Entry, ...]


Verdict: TypeAlias = Refused | Matched


def compare(message: Append, log: Entries, committed: int) -> Verdict:
    """What to do with a message of the present term's leader.

    Raises `rt.Diverged` if a committed entry differs from the leader's: one of the two broke its word.
    """
    prev = message.prev
    known = log.term_at(prev.index)
    if prev.index > committed:
        if known != prev.term:
            return Refused(_hint(message, log, committed))
    else:
        _check_committed(prev, known)
    matched = max(prev.index + len(message.entries), committed)
    for at, entry in enumerate(message.entries):
        own = log.term_at(entry.index)
        if entry.index <= committed:
            _check_committed(entry.place, own)
        elif own != entry.term:
            return Matched(matched, entry.index if own is not None else None, message.entries[at:])
    return Matched(matched, None, ())


def _check_committed(place: Place, known: int | None) -> None:
    """What is committed here must be the leader's too; None: our log begins behind it."""
    if known not in {None, place.term}:
        raise Diverged("a committed entry differs from the leader's", where=place, got=f"term {known}")


def _hint(message: Append, log: Entries, committed: int) -> int:
    """Back to before the term that differs, but never below what is committed: there every leader agrees."""
    index, last = message.prev.index, log.last.index
    if index > last:
        return max(last, committed)
    term = log.term_at(index)
    while index > committed and log.term_at(index) == term:
        index -= 1
    return index
