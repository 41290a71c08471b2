"""What was made and taken away between checkpoints, so that a crash does not undo it.

    query/log    <number, 12 digits>    {"kind": …, "key": …, "row": …}    row: null for what was deleted

An entry is durable before the call that made it returns. A checkpoint deletes, in its own commit, the entries
that it holds. On recovery the entries of one key are coalesced to what they are together:

    earlier          then create      then delete     then delete-create
    (none)           create           delete          delete-create
    create           invalid          nothing         create
    delete           delete-create    invalid         invalid
    delete-create    invalid          delete          delete-create
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from rt.objects import StateDamaged
from rt.query.definitions import decode
from rt.query.errors import LogConflict
from rt.query.rows import encode, plain

LOG: Final = "query/log"


class Change(enum.Enum):
    """What happened to a key, all in all."""

    CREATE = "create"
    DELETE = "delete"
    DELETE_CREATE = "delete-create"


_TOGETHER: Final[dict[tuple[Change | None, Change], Change | None]] = {
    (None, Change.CREATE): Change.CREATE,
    (None, Change.DELETE): Change.DELETE,
    (None, Change.DELETE_CREATE): Change.DELETE_CREATE,
    (Change.CREATE, Change.DELETE): None,
    (Change.CREATE, Change.DELETE_CREATE): Change.CREATE,
    (Change.DELETE, Change.CREATE): Change.DELETE_CREATE,
    (Change.DELETE_CREATE, Change.DELETE): Change.DELETE,
    (Change.DELETE_CREATE, Change.DELETE_CREATE): Change.DELETE_CREATE,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Something was made, with that row, or deleted (None)."""

    kind: str
    key: str
    row: bytes | None

    @property
    def change(self) -> Change:
        """Which of the two."""
        return Change.DELETE if self.row is None else Change.CREATE

    def encode(self) -> bytes:
        """As it is stored."""
        return encode({"kind": self.kind, "key": self.key, "row": plain(self.row)})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """What was stored."""
        found: dict[str, Any] = decode(data, where)
        try:
            return cls(found["kind"], found["key"], found["row"])
        except KeyError as error:
            raise StateDamaged("an entry of the log is damaged", where=where, got=str(error)) from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a key's entries are together; `row` of what is there now, if anything."""

    kind: str
    key: str
    change: Change
    row: bytes | None


def coalesce(entries: Iterable[Entry]) -> list[Outcome]:
    """What the entries of each key are together, in the order of the keys' last entries.

    `LogConflict` where they contradict each other.
    """
    known: dict[tuple[str, str], Outcome] = {}
    for entry in entries:
        place = (entry.kind, entry.key)
        before = known.pop(place, None)
        outcome = together(before.change if before else None, entry.change, entry.key)
        if outcome is not None:
            known[place] = Outcome(entry.kind, entry.key, outcome, entry.row)
    return list(known.values())


def together(earlier: Change | None, later: Change, key: str) -> Change | None:
    """What two changes are as one; None: nothing. `LogConflict` for what cannot follow."""
    if (earlier, later) not in _TOGETHER:
        raise LogConflict(
            "the transaction log contradicts itself",
            where=key,
            got=f"{later.value} behind {earlier.value if earlier else 'nothing'}",
            hint="Restore the store from a copy.",
        )
    return _TOGETHER[earlier, later]


def number_key(number: int) -> str:
    """The key of an entry."""
    return f"{number:012d}"
