"""Tables of leases: rows that only the owner of a lease changes, and that its next owner finds.

Pure. A commit of the owner is one command, or several parts that take effect with the last one. Invariants:
- A commit takes effect completely or not at all, and in the order of the commits' numbers.
- A commit takes effect only while its lease is held with the token that the owner named. So an owner that was
  replaced changes nothing, however late its command is applied.
- A repeated command changes nothing more.
- An attempt that was refused for lack of room, or replaced by a later one, changes nothing, however late its
  command is applied.
- A table outlives its lease. It is deleted when it has no rows and its lease is not held, or by an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from rt.names import check_lease_name, check_lease_owner, lease_group
from sequencer.state.apply_result import CommandRejected, Outcome, TableAnswer, TableDeleted, TableWritten
from sequencer.state.leases.table_rows import (
    MAILBOX,
    LeaseTable,
    LeaseTables,
    StagedPart,
    TableRow,
    row_bytes,
)
from sequencer.state.state import REQUEST_BYTES, SequencerState

PART_BYTES_MAX: Final = 64 << 10
"""Keys and values of one command. A larger command would keep merges waiting."""
KEY_BYTES_MAX: Final = 1024
PARTS_MAX: Final = 1024
"""Parts of one commit."""
CLEARS_MAX: Final = 16
"""Prefixes of one commit, all in its first part: every row of the table is compared with them."""
COMMIT_KEYS_MAX: Final = 1 << 16
"""Keys of one commit. They are applied at once, which takes a few tenths of a second."""
TABLES_MAX: Final = 4096
TABLES_PER_GROUP_MAX: Final = 1024
TABLES_BYTES_MAX: Final = 64 << 20
"""All tables are in every snapshot, and a snapshot may be written every few seconds. All tables are also
several times in the memory of both processes of a node.
"""
GROUPS_MAX: Final = 64
"""How many groups may have tables."""
GROUP_BYTES_RESERVED: Final = 256 << 10
"""Each group can use these bytes, however many bytes the other groups use. So a quarter of `TABLES_BYTES_MAX`
is reserved for small groups, and the groups compete for the rest.
"""
GROUP_BYTES_MAX: Final = 48 << 20
"""Limits each group to all bytes that are not reserved."""
SPARE_BYTES: Final = 4 << 20
"""Writes that make room may exceed the limits by this: staged parts that only delete, requests to owners, and
commits that answer requests and add nothing else.
"""
ATTEMPT_BYTES: Final = 8
_TOKEN_END: Final = 1 << 63


class TablePartId(NamedTuple):
    """Identifies a part of a commit, and its writer."""

    lease: str
    owner: str
    token: int
    commit: int
    """The number of the commit: one more than the number of commits that the table had."""
    request: bytes
    """Identifies the attempt. Its first 8 bytes count the attempts of the owner, big-endian; the others are
    random.
    """
    part: int
    is_last: bool

    @property
    def attempt(self) -> int:
        return int.from_bytes(self.request[:ATTEMPT_BYTES], "big")

    @property
    def id(self) -> tuple[bytes, int]:
        """The attempt and the part."""
        return self.request, self.part


class WriteTable(Struct, frozen=True):
    """A part of a commit: delete rows whose keys start with one of `clears`, then the rows `deletes`, then
    put `puts`.
    """

    by: TablePartId
    clears: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    puts: tuple[TableRow, ...] = ()

    def __post_init__(self) -> None:
        by = self.by
        check_lease_name(by.lease)
        check_lease_owner(by.owner)
        if not 1 <= by.token < _TOKEN_END or not 1 <= by.commit < _TOKEN_END:
            raise ValueError(f"commit {by.commit} with token {by.token}")
        if by.attempt >= _TOKEN_END:
            raise ValueError(f"attempt {by.attempt}")
        if len(by.request) != REQUEST_BYTES or not 0 <= by.part < PARTS_MAX:
            raise ValueError(f"part {by.part} of a commit, request id of {len(by.request)} bytes")
        if len(self.clears) > (0 if by.part else CLEARS_MAX):
            raise ValueError(f"{len(self.clears)} prefixes in part {by.part} of a commit")
        keys = [*self.clears, *self.deletes, *(row.key for row in self.puts)]
        if max((len(key.encode()) for key in keys), default=0) > KEY_BYTES_MAX:
            raise ValueError(f"a key longer than {KEY_BYTES_MAX} bytes")
        if any(not key for key in (*self.deletes, *(row.key for row in self.puts))):
            raise ValueError("an empty key")
        if self.size_bytes > PART_BYTES_MAX:
            raise ValueError(f"{self.size_bytes} bytes of rows, at most {PART_BYTES_MAX}")

    @property
    def size_bytes(self) -> int:
        """Size of its keys and values, as they count in a table."""
        return StagedPart(self.clears, self.deletes, self.puts).size_bytes

    @property
    def brief(self) -> str:
        """Text for a log line, without the rows."""
        return f"WriteTable(lease={self.by.lease}, commit={self.by.commit}, part={self.by.part})"


class DeleteTable(Struct, frozen=True):
    """Delete the table of a lease that is not held: its owners will not return."""

    lease: str

    def __post_init__(self) -> None:
        check_lease_name(self.lease)


def write_table(state: SequencerState, command: WriteTable) -> Outcome:
    by, lease = command.by, state.leases.get(command.by.lease)
    table = state.tables.get(by.lease)
    commits = 0 if table is None else table.commits
    if lease is None or (lease.owner, lease.token) != (by.owner, by.token):
        return TableWritten(by.id, TableAnswer.NOT_OWNER, commits)
    if table is not None and (by.commit, by.request) == (commits, table.request):
        return TableWritten(by.id, TableAnswer.WRITTEN, commits)
    if by.attempt < lease.attempt:
        return TableWritten(by.id, TableAnswer.NO_ROOM, commits)
    is_ours = table is not None and (table.staged_token, table.staged_request) == (by.token, by.request)
    staged = table.staged if table is not None and is_ours else ()
    if by.commit != commits + 1 or by.part > len(staged):
        return TableWritten(by.id, TableAnswer.OUT_OF_ORDER, commits)
    if by.part < len(staged):
        return TableWritten(by.id, TableAnswer.WRITTEN, commits)
    part = StagedPart(command.clears, command.deletes, command.puts)
    if no_room(state, by, part):
        state.leases[by.lease] = lease._replace(attempt=by.attempt + 1)
        return TableWritten(by.id, TableAnswer.NO_ROOM, commits)
    state.leases[by.lease] = lease._replace(attempt=by.attempt)
    table = table or state.tables.add(by.lease)
    before = table.size_bytes
    if by.is_last:
        table.commit((*staged, part), by.request)
    else:
        table.stage(part, by.token, by.request)
    state.tables.resized(by.lease, before)
    return TableWritten(by.id, TableAnswer.WRITTEN, table.commits)


def delete_table(state: SequencerState, command: DeleteTable) -> Outcome:
    if state.tables.get(command.lease) is None:
        return CommandRejected(f"lease {command.lease} has no table")
    if command.lease in state.leases:
        return CommandRejected(f"lease {command.lease} is held by {state.leases[command.lease].owner}")
    state.tables.delete(command.lease)
    return TableDeleted(command.lease)


def no_room(state: SequencerState, by: TablePartId, part: StagedPart) -> str | None:
    """Why the part might make the tables too large; None if it cannot.

    A commit of one part counts with the bytes that it adds, minus the bytes that it deletes by key. So a
    commit that only deletes always fits, and so does a commit that replaces rows by others of the same size.
    The parts of a larger commit count in full until the commit is complete.
    """
    tables, group, table = state.tables, lease_group(by.lease), state.tables.get(by.lease)
    if table is None:
        if len(tables.by_lease) >= TABLES_MAX:
            return f"there are {TABLES_MAX} tables at most"
        if not tables.count_of[group] and len(tables.count_of) >= GROUPS_MAX:
            return f"{GROUPS_MAX} groups have tables at most"
        if tables.count_of[group] >= TABLES_PER_GROUP_MAX:
            return f"group {group} has {TABLES_PER_GROUP_MAX} tables at most"
    elif by.part and len(table.staged) >= PARTS_MAX:
        return f"a commit has {PARTS_MAX} parts at most"
    if part.key_count + (table.staged_count if table is not None and by.part else 0) > COMMIT_KEYS_MAX:
        return f"a commit has {COMMIT_KEYS_MAX:,} keys at most"
    is_whole = by.is_last and not by.part
    more, makes_room = part.size_bytes, not part.puts
    if is_whole:
        more = _added_bytes(table, part.puts, part.deletes)
        rows = [row for row in part.puts if not row.key.startswith(MAILBOX)]
        deletes = [key for key in part.deletes if not key.startswith(MAILBOX)]
        makes_room = _added_bytes(table, rows, deletes) <= 0
    if table is not None and not by.part:
        more -= table.staged_bytes  # They are of an earlier attempt, which this one replaces.
    beyond = SPARE_BYTES if makes_room else 0
    if (more <= 0 and makes_room) or (by.is_last and not part.puts):
        return None
    if tables.bytes_of[group] + more > GROUP_BYTES_MAX + beyond:
        return f"the tables of group {group} have {GROUP_BYTES_MAX:,} bytes at most"
    if tables.bytes_of[group] + more <= GROUP_BYTES_RESERVED:
        return None
    shared = TABLES_BYTES_MAX - GROUPS_MAX * GROUP_BYTES_RESERVED
    if _shared(tables, group, more) > shared + beyond:
        reserved = f"{GROUP_BYTES_RESERVED:,} of each group"
        return f"the tables of all groups have {shared:,} bytes at most beyond {reserved}"
    return None


def _shared(tables: LeaseTables, group: str, more: int) -> int:
    """The bytes of all groups beyond the reserved bytes of each group, after `group` has `more` bytes."""
    sizes = {**tables.bytes_of, group: tables.bytes_of[group] + more}
    return sum(max(0, size - GROUP_BYTES_RESERVED) for size in sizes.values())


def _added_bytes(table: LeaseTable | None, puts: Sequence[TableRow], deletes: Sequence[str]) -> int:
    """The size of the rows, minus the size of the rows that they replace and of the deleted rows."""

    def old(key: str) -> int:
        value = None if table is None else table.rows.get(key)
        return 0 if value is None else row_bytes(key, value)

    written = dict(puts)
    more = sum(row_bytes(key, value) - old(key) for key, value in written.items())
    return more - sum(old(key) for key in {*deletes} - written.keys())
