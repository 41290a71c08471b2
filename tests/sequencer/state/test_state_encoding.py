"""Encoding of the state: equal states give equal bytes; bytes decode to a state or raise a format error."""

from __future__ import annotations

import dataclasses
import random
import string
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from batches import CLUSTER
from dump import Dump
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sequencer_core import do_close, do_fence, do_join, do_merge, do_open, do_roll, must, new_state, piece

from rt.errors import FormatError, UnknownVersion
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.v1 import sequencer_pb2 as pb
from sequencer.state import state as held
from sequencer.state.apply import apply
from sequencer.state.apply_result import Forgotten, RunFenced, RunOpened, TableWritten
from sequencer.state.commands import (
    Configure,
    DecideRequest,
    HoldPosition,
    ReleaseHold,
    ResetCluster,
    SubmitRequest,
    TrimSegments,
)
from sequencer.state.configuration import CONFIGURABLE, Configuration
from sequencer.state.feature_level import LATEST
from sequencer.state.forgotten_sessions import ForgottenSessions
from sequencer.state.leases.leases import (
    AcquireLeases,
    ExpireLeases,
    HeldLease,
    IdleLease,
    ReleaseLeases,
    RenewLeases,
)
from sequencer.state.leases.table_rows import LeaseTable, LeaseTables, PagedRows, StagedPart, TableRow
from sequencer.state.leases.tables import TablePartId, WriteTable
from sequencer.state.session_commands import CloseSession, Forget, OpenSealedRuns, SealedRun
from sequencer.state.state import (
    ActiveRun,
    ClearedRange,
    ConsumedEnd,
    End,
    ForcedQuorum,
    LastReset,
    MemberRequest,
    MergedEnd,
    MergedSegment,
    NodeDisk,
    SequencerState,
    Session,
    SettledMembers,
)
from sequencer.state.state_codec import decode_state, encode_state
from sequencer.state.write_plan import BlockWrite, SessionEnd, WritePlan, decode_write_plan, encode_write_plan

UINT32 = st.integers(0, 2**32 - 1) | st.integers(0, 3)
UINT64 = st.integers(0, 2**62) | st.integers(0, 3)
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=3)
ENDS = st.builds(End, UINT32, UINT64, UINT64)
IDS = st.builds(SegmentId, UINT32, UINT32)
LIVES = st.builds(
    *(ActiveRun, UINT32, st.binary(min_size=8, max_size=8), st.booleans()),
    *(st.none() | ENDS, st.none() | ENDS),
)
SESSIONS = st.builds(
    Session,
    st.just(0),
    NAMES,
    st.binary(min_size=16, max_size=16),
    st.none() | NAMES,
    UINT32,
    st.booleans(),
    st.just(-1) | UINT32,
    st.lists(LIVES, max_size=3).map(tuple),
    st.none() | st.builds(ConsumedEnd, ENDS, UINT32),
    st.none() | st.tuples(UINT32, ENDS),
    UINT64,
    UINT32,
)
SEGMENTS = st.builds(
    MergedSegment, IDS, UINT64, UINT64, UINT64, UINT64, UINT64, UINT64, st.sampled_from(TrimReason)
)
CONFIGURATIONS = st.builds(
    Configuration, **{name: st.integers(0, end - 1) for name, (_, end) in CONFIGURABLE.items()}
)
HOLDS = st.builds(held.SubscriberHold, UINT64, UINT64)
DISKS = st.builds(NodeDisk, st.binary(min_size=16, max_size=16), UINT64, st.booleans())
RESETS = st.builds(
    LastReset, st.booleans(), UINT32, UINT64, st.binary(min_size=16, max_size=16), st.sampled_from(["", "n1"])
)
MERGED = st.builds(
    MergedEnd,
    st.none() | IDS,
    UINT64,
    UINT64,
    UINT64,
    st.sets(UINT32, max_size=4),
    UINT32,
    UINT64,
    UINT32,
)
LEASES = st.builds(
    held.LeaseState, NAMES, UINT64, UINT32, st.binary(min_size=16, max_size=16), UINT64, UINT64
)
ROWS = st.lists(st.builds(TableRow, NAMES, st.binary(max_size=3)), max_size=3)
TABLES = st.builds(
    LeaseTable,
    UINT64,
    st.binary(max_size=16),
    UINT64,
    st.binary(max_size=16),
    st.lists(
        st.builds(
            StagedPart,
            st.lists(NAMES, max_size=2).map(tuple),
            st.lists(NAMES, max_size=2).map(tuple),
            ROWS.map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    ROWS.map(PagedRows),
)
ASKED = st.builds(held.PendingRequest, UINT64, st.binary(max_size=5))


@st.composite
def states(draw: st.DrawFn) -> SequencerState:
    sessions = draw(st.dictionaries(st.integers(1, 40), SESSIONS, max_size=4))
    state = SequencerState(
        draw(st.binary(min_size=16, max_size=16)),
        draw(CONFIGURATIONS),
        draw(UINT64),
        draw(UINT64),
        draw(UINT64),
        draw(MERGED),
        {key: replace(session, id=key) for key, session in sessions.items()},
        draw(st.dictionaries(NAMES, UINT64, max_size=3)),
        deque(draw(st.lists(SEGMENTS, max_size=3))),
        draw(UINT32),
        draw(st.dictionaries(NAMES, DISKS, max_size=3)),
        draw(UINT64),
        draw(st.dictionaries(NAMES, HOLDS, max_size=3)),
        draw(st.none() | RESETS),
        draw(st.none() | st.builds(ClearedRange, UINT32, UINT64, UINT32, UINT32)),
        draw(st.dictionaries(st.binary(min_size=16, max_size=16), ASKED, max_size=2)),
        draw(UINT64),
        draw(st.none() | st.builds(ForcedQuorum, st.binary(min_size=16, max_size=16), NAMES)),
        draw(st.dictionaries(NAMES, LEASES, max_size=3)),
        draw(UINT64),
        deque(draw(st.lists(st.binary(min_size=16, max_size=16), max_size=3))),
    )
    closed = [key for key, session in state.sessions.items() if not session.active_runs]
    state.closed = dict.fromkeys(draw(st.permutations(closed)))
    keys = st.tuples(st.sampled_from([b"own1", b"own2"]), st.binary(min_size=8, max_size=8))
    state.forgotten = ForgottenSessions.decode(b"".join(map(b"".join, draw(st.lists(keys, max_size=4)))))
    state.runs_cut_short = draw(UINT64)
    state.tables = LeaseTables(draw(st.dictionaries(NAMES, TABLES, max_size=2)))
    state.index()
    return state


def shuffled(state: SequencerState, rng: random.Random) -> SequencerState:
    """Return the same state, with dictionaries and sets that were built in another order."""

    def mixed(items: Any) -> list[Any]:
        found = list(items)
        rng.shuffle(found)
        return found

    other = deepcopy(state)
    other.encoded.clear()
    other.merged.declared = set(mixed(other.merged.declared))
    for name in ("sessions", "wanted", "disks", "holds", "asked", "leases", "by_name", "by_incarnation"):
        setattr(other, name, dict(mixed(getattr(other, name).items())))
    tables = {
        lease: dataclasses.replace(table, rows=PagedRows(mixed(table.rows)))
        for lease, table in state.tables.by_lease.items()
    }
    other.tables = LeaseTables(dict(mixed(tables.items())))
    return other


@given(states(), st.integers(0, 2**32 - 1))
def test_state_survives_encoding_and_equal_states_have_equal_bytes(state: SequencerState, seed: int) -> None:
    data = encode_state(state)
    assert decode_state(data) == state
    assert encode_state(decode_state(data)) == data
    other = shuffled(state, random.Random(seed))
    assert other == state
    assert encode_state(other) == data


CHANGES: list[Callable[[SequencerState], object]] = [
    lambda state: do_join(state, "n1", disk=7),
    *(
        lambda state, name=name: apply(state, Configure(**{name: 61}))  # type: ignore[misc]
        for name in CONFIGURABLE
    ),
    lambda state: apply(state, TrimSegments(20, TrimReason.REQUEST, 7)),
    lambda state: apply(state, HoldPosition("reader", 6, 7)),
    lambda state: apply(state, HoldPosition("reader", 5, 8)),
    lambda state: apply(state, HoldPosition("another", 5, 7)),
    lambda state: apply(state, ReleaseHold("reader")),
    do_roll,
    lambda state: apply(state, AcquireLeases(b"M" * 16, "h2", 1000, ("g/queue/q2",))),
    lambda state: apply(state, RenewLeases(b"M" * 16, "h1~a", (HeldLease("g/host/h1~a", 2),))),
    lambda state: apply(state, ReleaseLeases(b"M" * 16, "h1~a", (HeldLease("g/host/h1~a", 2),))),
    lambda state: apply(state, ExpireLeases((IdleLease("g/queue/q1", 1, 1),))),
    lambda state: apply(state, WriteTable(table_part(2, 1, is_last=False))),
    lambda state: apply(state, WriteTable(table_part(2, 1))),
    lambda state: state.tables.by_lease["g/queue/q1"].rows.put("low", b"1"),
    lambda state: state.tables.by_lease["g/queue/q1"].rows.put("places\0one", b"[2,4]"),
    lambda state: state.tables.delete("g/queue/q1"),
    lambda state: apply(state, SubmitRequest(b"r" * 16, 9, ReleaseHold("writer"))),
    lambda state: apply(state, DecideRequest(b"q" * 16, 6)),
    lambda state: do_open(state, "new", incarnation=5),
    lambda state: do_open(state, "a", run=5),
    lambda state: do_fence(state, 1, 4),
    lambda state: apply(state, CloseSession("b~c")),
    lambda state: apply(state, Forget((4,))),
    lambda state: state.closed.clear(),
    lambda state: state.forgotten.add([("a", b"F" * 16)]),
    lambda state: do_merge(state, piece(1, run=4)),
    lambda state: state.wanted.update(twins=7),
    lambda state: state.merged.declared.add(77),
    lambda state: state.segments.popleft(),
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_state_change_changes_encoded_bytes(change: Callable[[SequencerState], object]) -> None:
    state = grown()
    before = encode_state(state)
    change(state)
    assert encode_state(state) != before


@given(states(), st.data())
def test_modified_bytes_decode_to_state_or_raise_format_error(
    state: SequencerState, data: st.DataObject
) -> None:
    body = bytearray(encode_state(state))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    check_total(bytes(body))


@given(st.binary(max_size=100))
@settings(max_examples=200)
def test_random_bytes_decode_to_state_or_raise_format_error(body: bytes) -> None:
    check_total(body)


def check_total(body: bytes) -> None:
    try:
        state = decode_state(body)
    except (FormatError, UnknownVersion):
        return
    assert decode_state(encode_state(state)) == state


def test_unknown_trim_reason_raises_format_error() -> None:
    message = pb.SequencerState(version=1)
    message.segments.add(reason=99)
    with pytest.raises(FormatError, match="says what it cannot"):
        decode_state(message.SerializeToString())


def test_newer_version_raises_unknown_version_and_invalid_bytes_raise_format_error() -> None:
    with pytest.raises(UnknownVersion):
        decode_state(pb.SequencerState(version=LATEST + 1).SerializeToString())
    with pytest.raises(FormatError):
        decode_state(b"\xff")


ORDERS = st.builds(
    WritePlan,
    UINT64,
    UINT64,
    IDS,
    UINT64,
    UINT64,
    UINT64,
    st.lists(
        st.builds(
            BlockWrite,
            st.binary(max_size=20),
            st.booleans(),
            UINT32,
            UINT32,
            UINT32,
            UINT64,
            UINT64,
            UINT32,
            UINT64,
        ),
        max_size=3,
    ).map(tuple),
    UINT32,
    UINT64,
    UINT64,
    st.lists(st.builds(SessionEnd, UINT32, UINT32, UINT32, UINT64, UINT64), max_size=3).map(tuple),
)


@given(ORDERS)
def test_write_plan_survives_encoding(order: WritePlan) -> None:
    assert decode_write_plan(encode_write_plan(order)) == order


# Golden bytes: states that commands made


def young() -> SequencerState:
    return new_state()


def grown() -> SequencerState:
    """Return a state with sessions of every kind: partly merged, wholly merged, closed, waiting, superseded,
    dedup.
    """
    state = new_state()
    apply(state, Configure(roll_bytes=4096, roll_minutes=60, session_bytes_max=1 << 20))
    do_join(state, "n1", "n2")
    do_open(state, "a")
    do_open(state, "a", run=4)
    do_join(state, "n1", disk=1)
    do_open(state, "b~c", dedup="twins", incarnation=1)
    do_merge(state, piece(1), piece(2, first=100))
    do_roll(state)
    do_fence(state, 1)
    do_close(state, 1, 0, (0, 256, 20))
    do_merge(state, piece(1, start=128, end=256, first=10))
    do_open(state, "gone", incarnation=3)
    do_open(state, "idle", incarnation=4)
    cut = OpenSealedRuns("cut", b"C" * 16, None, (SealedRun(0, b"L" * 8, End(0, 128, 7)),))
    must(RunOpened, apply(state, cut))
    do_fence(state, 5)
    do_close(state, 5, 0, (0, 64, 0))
    must(RunOpened, apply(state, replace(cut, runs=(SealedRun(1, b"L" * 8, End(0, 128, 9)),))))
    do_fence(state, 5, 1)
    for gone in (3, 4):
        must(RunFenced, apply(state, CloseSession(state.sessions[gone].name)))
        do_close(state, gone, 0, (0, 64, 0))
    must(Forgotten, apply(state, Forget((3,))))
    do_open(state, "b~c", dedup="twins", incarnation=2)
    do_fence(state, 2)
    do_close(state, 2, 0, (2, 64, 500))
    trimmed = MergedSegment(SegmentId(0, 9), 1, 2, 3, 4, 5, trimmed_ns=6, reason=TrimReason.TIME)
    state.segments.appendleft(trimmed)
    apply(state, HoldPosition("writer", 3, 4))
    apply(state, SubmitRequest(b"p" * 16, 9, Configure(roll_minutes=60)))
    apply(state, DecideRequest(b"p" * 16, 5))
    apply(state, SubmitRequest(b"q" * 16, 9, ReleaseHold("reader")))
    apply(state, HoldPosition("reader", 5, 7))
    apply(state, AcquireLeases(b"L" * 16, "h1~a", 60_000, ("g/queue/q1", "g/host/h1~a", "g/queue/q2")))
    apply(state, RenewLeases(b"N" * 16, "h1~a", (HeldLease("g/queue/q1", 1),)))
    apply(state, ReleaseLeases(b"O" * 16, "h1~a", (HeldLease("g/queue/q2", 3),)))
    rows = (TableRow("subscriptions\0one", b"[1]"), TableRow("places\0one", b"[2,3]"))
    must(TableWritten, apply(state, WriteTable(table_part(1), puts=rows)))
    must(TableWritten, apply(state, WriteTable(table_part(2, is_last=False), ("places",), ("low",), rows)))
    return state


def table_part(commit: int, part: int = 0, *, is_last: bool = True) -> TablePartId:
    return TablePartId("g/queue/q1", "h1~a", 1, commit, b"T" * 16, part, is_last)


def was_reset() -> SequencerState:
    state = grown()
    apply(state, ResetCluster(True, 2, 1_700_000_000_000_000_000, b"R" * 16))
    do_open(state, "a", run=5)
    do_merge(state, piece(1, run=5, first=900))
    apply(state, ResetCluster(False, 1 << 16, 7, b"S" * 16, "n1"))
    return state


def test_version_1_encoding_matches_golden_bytes(golden: Any) -> None:
    made = {"a young state": young(), "a grown state": grown(), "a state that was reset": was_reset()}
    parts = {name: encode_state(state) for name, state in made.items()}
    dump = Dump(b"".join(parts.values()))
    for name, part in parts.items():
        dump.title(f"{name}: {made[name]}")
        dump.part(len(part), "state")
    kept = golden("sequencer/states", dump.data, dump.text())
    for name, part in parts.items():
        assert decode_state(kept[: len(part)]) == made[name]
        kept = kept[len(part) :]
    assert made["a young state"].cluster == CLUSTER


def test_unchanged_session_is_not_encoded_again() -> None:
    state = grown()
    encode_state(state)
    before = dict(state.encoded)
    assert {*before} == {*state.sessions}
    do_fence(state, 1, 4)
    data = encode_state(state)
    assert [one for one in state.encoded if state.encoded[one] is not before[one]] == [1]
    assert data == encode_state(decode_state(data))


def test_member_change_survives_snapshot() -> None:
    state = young()
    plain = encode_state(state)
    state.member_requests, state.settled_members = 3, SettledMembers(2, "why")
    state.member_request = MemberRequest(3, "n4", "n4:7001", "n1")
    assert decode_state(encode_state(state)) == state
    state.member_requests, state.settled_members, state.member_request = 0, None, None
    assert encode_state(state) == plain, "without one the bytes are those of before"
