"""What was created and deleted since the last checkpoint, so that it survives a crash.

    query/log    <number, 12 digits>    {"kind": …, "key": …, "row": …}    row: null for a deletion

An entry is durable before the call that made it returns. The commit of a checkpoint deletes the entries that
the checkpoint covers. A recovery combines the entries of one key:

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
from rt.query.core.errors import LogConflict
from rt.query.core.row_json import decode, encode, plain

LOG: Final = "query/log"


class Change(enum.Enum):
    """The net change of a key."""

    CREATE = "create"
    DELETE = "delete"
    DELETE_CREATE = "delete-create"


_COMBINED: Final[dict[tuple[Change | None, Change], Change | None]] = {
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
class LogEntry:
    """A creation, with its row, or a deletion (None)."""

    kind: str
    key: str
    row: bytes | None

    @property
    def change(self) -> Change:
        return Change.DELETE if self.row is None else Change.CREATE

    def encode(self) -> bytes:
        return encode({"kind": self.kind, "key": self.key, "row": plain(self.row)})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        found: dict[str, Any] = decode(data, where)
        try:
            return cls(found["kind"], found["key"], found["row"])
        except KeyError as error:
            raise StateDamaged("damaged log entry: a key is missing", where=where, got=str(error)) from error


@dataclass(frozen=True, slots=True)
class NetChange:
    """The combined entries of a key. `row`: the new row, None if it is deleted."""

    kind: str
    key: str
    change: Change
    row: bytes | None


def coalesce(entries: Iterable[LogEntry]) -> list[NetChange]:
    """Combine the entries of each key, in the order of the last entries.

    `LogConflict` for an invalid sequence.
    """
    known: dict[tuple[str, str], NetChange] = {}
    for entry in entries:
        place = (entry.kind, entry.key)
        before = known.pop(place, None)
        net = combine(before.change if before else None, entry.change, entry.key)
        if net is not None:
            known[place] = NetChange(entry.kind, entry.key, net, entry.row)
    return list(known.values())


def combine(earlier: Change | None, later: Change, key: str) -> Change | None:
    """Combine two changes; None: no change. `LogConflict` if `later` cannot follow."""
    if (earlier, later) not in _COMBINED:
        raise LogConflict(
            "the transaction log contradicts itself",
            where=key,
            got=f"{later.value} after {earlier.value if earlier else 'nothing'}",
            hint="Restore the store from a backup.",
        )
    return _COMBINED[earlier, later]


def number_key(number: int) -> str:
    return f"{number:012d}"
