"""Requests from others to the owner of a lease: rows of the lease's table. The owner reads and answers them.

    requests<NUL><id>   posted by anybody of the group; the owner's next commit deletes it
    answers<NUL><id>    written by that commit, together with what the request changes

Pure. A value contains the time of the post and the time until which the request may be carried out, in ns,
8 bytes each; then the content.
Invariants:
- A request is in the table once, however often it is posted, until long after its time is over.
- The owner carries out a request and answers it in one commit: no kill loses it or repeats it.
- Requests and answers of a table are bounded. When their time is over, they make room for others.
- A few are kept even if their time is over: so a node whose clock jumped deletes no requests of others.

No clock is read here. The command carries the time of the node that received it. This time only decides which
requests are forgotten.
"""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple

from msgspec import Struct

from rt.names import check_lease_name
from sequencer.state.apply_result import Outcome, PostAnswer, RequestPosted
from sequencer.state.leases.table_rows import MAILBOX, LeaseTable, StagedPart, TableRow, row_bytes
from sequencer.state.leases.tables import TablePartId, no_room
from sequencer.state.state import REQUEST_BYTES, SequencerState

CONTENT_BYTES_MAX: Final = 8 << 10
POSTED_MAX: Final = 512
"""Maximum number of requests and answers of one table that are not forgotten."""
POSTED_BYTES_MAX: Final = 1 << 20
TIME_NS_MAX: Final = 3_600 * 10**9
"""How long a request may wait for the owner of the lease."""
POSTED_KEPT: Final = 32
"""Up to this number, requests and answers are never forgotten."""
KEPT_NS: Final = 120 * 10**9
"""How long a request and its answer are kept after its time is over: so a repeated request finds them, even
if clocks differ.
"""
LATE_NS: Final = KEPT_NS // 4
"""How much later than its sender's clock says a request may be carried out, because that clock may be behind.
The limit is needed because a node that stood still may get a request when its answer is forgotten.
"""
_REQUESTS, _ANSWERS = MAILBOX
_HEAD_BYTES: Final = 16


class PostRequest(Struct, frozen=True):
    """Keep a request for any owner of `lease`."""

    lease: str
    id: bytes
    at_ns: int
    """When it was posted, by the clock of the node that received it."""
    until_ns: int
    """It is not carried out after this time."""
    content: bytes

    def __post_init__(self) -> None:
        check_lease_name(self.lease)
        if len(self.id) != REQUEST_BYTES:
            raise ValueError(f"request id of {len(self.id)} bytes")
        if not 1 <= self.at_ns < self.until_ns < 2**63 or self.until_ns - self.at_ns > TIME_NS_MAX:
            raise ValueError(f"a request from {self.at_ns} to {self.until_ns} ns")
        if not 1 <= len(self.content) <= CONTENT_BYTES_MAX:
            raise ValueError(f"a request of {len(self.content)} bytes, at most {CONTENT_BYTES_MAX}")

    @property
    def brief(self) -> str:
        """Text for a log line, without the content."""
        return f"PostRequest(lease={self.lease}, id={self.id.hex()})"


class Posted(NamedTuple):
    """A request or an answer."""

    id: bytes
    at_ns: int
    until_ns: int
    content: bytes


def post_request(state: SequencerState, command: PostRequest) -> Outcome:
    table = state.tables.get(command.lease)
    if table is None:
        return RequestPosted(command.id, PostAnswer.NO_TABLE)
    answer, _ = look_up(table, command.id)
    if answer is not PostAnswer.UNKNOWN:
        return RequestPosted(command.id, answer)
    before = table.size_bytes
    if len(table.rows.mailbox) >= min(POSTED_KEPT, POSTED_MAX):
        for key, value in sorted(table.rows.mailbox.items()):
            if _is_over(_times(value)[1], command.at_ns):
                table.rows.delete(key)
    state.tables.resized(command.lease, before)
    row = TableRow(_REQUESTS + command.id.hex(), _value(command))
    if _is_full(table, row) or no_room(state, _part(command), StagedPart((), (), (row,))) is not None:
        return RequestPosted(command.id, PostAnswer.NO_ROOM)
    before = table.size_bytes
    table.rows.put(*row)
    state.tables.resized(command.lease, before)
    return RequestPosted(command.id, PostAnswer.WAITING)


def look_up(table: LeaseTable, request: bytes) -> tuple[PostAnswer, bytes]:
    """The status of a request, and the content of its answer."""
    answer = table.rows.get(_ANSWERS + request.hex())
    if answer is not None:
        return PostAnswer.ANSWERED, answer[_HEAD_BYTES:]
    is_waiting = table.rows.get(_REQUESTS + request.hex()) is not None
    return (PostAnswer.WAITING if is_waiting else PostAnswer.UNKNOWN), b""


def waiting(table: LeaseTable) -> list[Posted]:
    """The requests that are not answered, the oldest first."""
    found = list[Posted]()
    for key, value in table.rows.mailbox.items():
        if key.startswith(_REQUESTS):
            with contextlib.suppress(ValueError):  # An owner may have written anything.
                request = bytes.fromhex(key.removeprefix(_REQUESTS))
                found.append(Posted(request, *_times(value), value[_HEAD_BYTES:]))
    return sorted(found, key=lambda one: (one.at_ns, one.id))


def _is_full(table: LeaseTable, row: TableRow) -> bool:
    rows = table.rows.mailbox
    size_bytes = sum(row_bytes(key, value) for key, value in rows.items()) + row_bytes(*row)
    return len(rows) >= POSTED_MAX or size_bytes > POSTED_BYTES_MAX


def _is_over(until_ns: int, at_ns: int) -> bool:
    """Whether the time is over. Also true if the clock of the post was far ahead: otherwise the row would
    stay for that long.
    """
    return not at_ns - KEPT_NS <= until_ns <= at_ns + 2 * TIME_NS_MAX


def _part(command: PostRequest) -> TablePartId:
    """The part id with which a request counts like a whole commit."""
    return TablePartId(command.lease, "", 0, 0, command.id, 0, is_last=True)


def _value(command: PostRequest) -> bytes:
    return command.at_ns.to_bytes(8, "big") + command.until_ns.to_bytes(8, "big") + command.content


def _times(value: bytes) -> tuple[int, int]:
    """When it was posted, and until when it may be carried out. 0 if the owner wrote something else."""
    return int.from_bytes(value[:8], "big"), int.from_bytes(value[8:_HEAD_BYTES], "big")
