"""Creations and deletions since the last checkpoint, logged so that they survive a crash.

    query/log    <number, 12 digits>    {"kind": …, "key": …, "row": …}    row: null for a deletion

An entry is durable before the call that made it returns. The commit of a checkpoint deletes the entries that
the checkpoint covers. A recovery combines the entries of one key:

    earlier          then create      then delete
    (none)           create           delete
    create           invalid          nothing
    delete           delete-create    invalid
    delete-create    invalid          delete
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, Self

from msgspec import Struct

from rt.query.core.errors import LogConflict
from rt.query.core.row_json import decode, encode, plain

LOG: Final = "query/log"
DEFINITION: Final = "definition"
QUERY: Final = "query"


class Change(enum.Enum):
    """The net change of a key."""

    CREATE = "create"
    DELETE = "delete"
    DELETE_CREATE = "delete-create"


_COMBINED: Final[dict[tuple[Change | None, Change], Change | None]] = {
    (None, Change.CREATE): Change.CREATE,
    (None, Change.DELETE): Change.DELETE,
    (Change.CREATE, Change.DELETE): None,
    (Change.DELETE, Change.CREATE): Change.DELETE_CREATE,
    (Change.DELETE_CREATE, Change.DELETE): Change.DELETE,
}


class LogEntry(Struct, frozen=True):
    """A creation or a deletion. `row`: None for a deletion. `kind`: DEFINITION or QUERY."""

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
        found = decode(data, where, "kind", "key", "row")
        return cls(found["kind"], found["key"], found["row"])


def net_change(entries: Iterable[LogEntry]) -> Change | None:
    """Combine the entries of one key; None: nothing changed. `LogConflict` for an invalid sequence."""
    net: Change | None = None
    for entry in entries:
        if (net, entry.change) not in _COMBINED:
            raise LogConflict(
                "the transaction log contradicts itself",
                where=entry.key,
                got=f"{entry.change.value} after {net.value if net else 'nothing'}",
                hint="Restore the store from a backup.",
            )
        net = _COMBINED[net, entry.change]
    return net


def number_key(number: int) -> str:
    return f"{number:012d}"
