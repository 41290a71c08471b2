"""The sequencer's state as bytes: equal states give equal bytes. Its version is its feature level.

Pure. A large state consists mostly of records of sessions, which rarely change. Each record is encoded once,
and the records follow the other fields.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from google.protobuf.message import DecodeError
from msgspec.structs import asdict

from rt.errors import FormatError
from rt.log.format.segment import SegmentId
from rt.message_codec import FieldCodec, MessageCodec, inlined, keyed
from rt.v1 import leases_pb2
from rt.v1 import sequencer_pb2 as pb
from sequencer.state.configuration import Configuration
from sequencer.state.feature_level import check_known
from sequencer.state.forgotten_sessions import ForgottenSessions
from sequencer.state.leases.table_rows import EncodedPage, LeaseTable, LeaseTables, PagedRows
from sequencer.state.state import (
    RELEASED_MAX,
    ActiveRun,
    ConsumedEnd,
    End,
    LeaseState,
    MergedEnd,
    MergedSegment,
    NodeDisk,
    PendingRequest,
    SequencerState,
    Session,
    SubscriberHold,
)

_LEVEL_TAG: Final = b"\x08"
"""Field 1, a number follows."""


def encode_state(state: SequencerState) -> bytes:
    return frozen_state(state)()


def frozen_state(state: SequencerState) -> Callable[[], bytes]:
    """A function that encodes the state as it is now. It may be called in any thread. It does most of the
    work for tables, because every page of them may have changed.
    """
    message = pb.SequencerState(**_STATE.encode(state))
    sessions = (_encoded_session(state, state.sessions[key]) for key in sorted(state.sessions))
    head = b"".join([message.SerializeToString(deterministic=True), *sessions])
    pages = [*_encoded_pages(state.tables)]
    return lambda: b"".join([head, *(page.content for page in pages)])


def decode_state(data: bytes, *, keeps_pages: bool = False) -> SequencerState:
    """Decode a state; `rt.FormatError`, `rt.UnknownVersion`.

    `keeps_pages`: remember the encoded pages of tables. Otherwise a process that makes snapshots would need
    seconds for its first snapshot.
    """
    try:
        message = pb.SequencerState.FromString(data)
    except DecodeError as error:
        raise FormatError("not a state of the sequencer", got=f"{len(data)} bytes") from error
    check_known(message.version)
    try:
        state = _STATE.decode(message)
        _fill_tables(state.tables, message, keeps_pages=keeps_pages)
        if {*state.closed} != {session.id for session in state.sessions.values() if not session.active_runs}:
            raise ValueError(f"{len(state.closed)} sessions are said to be closed")
        state.index()
    except ValueError as error:
        raise FormatError(f"a state of the sequencer says what it cannot: {error}") from error
    return state


def check_version(data: bytes) -> None:
    """`rt.UnknownVersion` if the program does not know the feature level of an encoded state.

    Only the first bytes are read: the level is the first field, and one byte if it is below 128.
    """
    check_known(data[1] if data[:1] == _LEVEL_TAG and len(data) > 1 else 0)


def _encoded_session(state: SequencerState, session: Session) -> bytes:
    """The session as a field of the state."""
    known = state.encoded.get(session.id)
    if known is None or known[0] is not session:
        field = pb.SequencerState(sessions=[pb.Session(**_SESSION.encode(session))])
        known = state.encoded[session.id] = session, field.SerializeToString(deterministic=True)
    return known[1]


def _encoded_pages(tables: LeaseTables) -> Iterator[EncodedPage]:
    """The rows of all tables as fields of the state, one page in each field."""
    for lease in sorted(tables.by_lease):

        def encode(rows: list[tuple[str, bytes]], lease: str = lease) -> bytes:
            page = pb.TablePage(
                lease=lease, rows=[leases_pb2.TableRow(key=key, value=value) for key, value in rows]
            )
            return pb.SequencerState(pages=[page]).SerializeToString(deterministic=True)

        yield from tables.by_lease[lease].rows.encoded(encode)


def _fill_tables(tables: LeaseTables, message: pb.SequencerState, *, keeps_pages: bool) -> None:
    for page in message.pages:
        table = tables.get(page.lease)
        if table is None:
            raise ValueError(f"rows of a table that does not exist: {page.lease!r}")
        before = table.size_bytes
        found = [(row.key, row.value) for row in page.rows]
        if keeps_pages:
            page.DiscardUnknownFields()
            table.rows.adopt(found, pb.SequencerState(pages=[page]).SerializeToString(deterministic=True))
        else:
            for key, value in found:
                table.rows.put(key, value)
        tables.resized(page.lease, before)


_CONSUMED: Final = MessageCodec(ConsumedEnd, pb.Session, end=inlined(MessageCodec(End, pb.Session)))
_DONE: Final = MessageCodec(End, pb.Session, roll="done_roll", offset="done_offset", number="done_number")
_SESSION: Final = MessageCodec(
    Session,
    pb.Session,
    last_run=FieldCodec(
        lambda run: {"last_run": max(run, 0), "was_opened": run >= 0},
        lambda message: message.last_run if message.was_opened else -1,
    ),
    active_runs=MessageCodec(
        ActiveRun, pb.SessionRun, end=inlined(MessageCodec(End, pb.SessionRun), "is_closed")
    ),
    consumed=inlined(_CONSUMED, "has_consumed"),
    done=FieldCodec(
        lambda done: {} if done is None else {"has_done": True, "done_run": done[0]} | _DONE.encode(done[1]),
        lambda message: (message.done_run, _DONE.decode(message)) if message.has_done else None,
    ),
)
_MERGED_SEGMENT: Final = MessageCodec(
    MergedSegment, pb.MergedSegment, id=inlined(MessageCodec(SegmentId, pb.MergedSegment))
)
_TABLE: Final = MessageCodec(
    LeaseTable,
    pb.LeaseTable,
    # Rows follow the other fields: see `_encoded_pages`.
    rows=FieldCodec(lambda _: {}, lambda _: PagedRows()),
)
_STATE: Final = MessageCodec(
    SequencerState,
    pb.SequencerState,
    feature_level="version",
    configuration=FieldCodec(
        lambda configuration: {"configuration": asdict(configuration)},
        lambda message: Configuration(
            **{one.name: value for one, value in message.configuration.ListFields()}
        ),
    ),
    merged=MessageCodec(
        MergedEnd,
        pb.MergedEnd,
        segment=inlined(MessageCodec(SegmentId, pb.MergedEnd), "has_segment"),
        declared=FieldCodec(
            lambda declared: {"declared": sorted(declared)}, lambda message: set(message.declared)
        ),
    ),
    sessions=FieldCodec(
        lambda _: {},  # Sessions follow the other fields: see `_encoded_session`.
        lambda message: {one.id: _SESSION.decode(one) for one in message.sessions},
    ),
    wanted=FieldCodec(
        lambda wanted: {"watermarks": [{"dedup_id": one, "wanted": wanted[one]} for one in sorted(wanted)]},
        lambda message: {one.dedup_id: one.wanted for one in message.watermarks},
    ),
    segments=FieldCodec(
        lambda segments: {"segments": [*map(_MERGED_SEGMENT.encode, segments)]},
        lambda message: deque(map(_MERGED_SEGMENT.decode, message.segments)),
    ),
    disks=keyed("disks", "node", MessageCodec(NodeDisk, pb.NodeDisk)),
    holds=keyed("holds", "name", MessageCodec(SubscriberHold, pb.Hold)),
    asked=keyed("asked", "id", MessageCodec(PendingRequest, pb.Ask)),
    leases=keyed("leases", "name", MessageCodec(LeaseState, pb.Lease)),
    released=FieldCodec(
        lambda released: {"released": released}, lambda message: deque(message.released, RELEASED_MAX)
    ),
    tables=FieldCodec(
        lambda tables: {
            "tables": [
                {"lease": one, **_TABLE.encode(table)} for one, table in sorted(tables.by_lease.items())
            ]
        },
        lambda message: LeaseTables({one.lease: _TABLE.decode(one) for one in message.tables}),
    ),
    closed=FieldCodec(lambda closed: {"closed": closed}, lambda message: dict.fromkeys(message.closed)),
    forgotten=FieldCodec(
        lambda forgotten: {"forgotten": forgotten.encode()},
        lambda message: ForgottenSessions.decode(message.forgotten),
    ),
)
