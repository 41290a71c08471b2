"""Encoding of commands: round trips, rejection of malformed bytes and fields, bytes of version 1."""

from __future__ import annotations

import string
from typing import Any

import pytest
from dump import Dump
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from rt.errors import FormatError, InvalidName, UnknownVersion
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment_table import TrimReason
from rt.names import LEASE_NAME_BYTES_MAX
from rt.units import SILENCE_MS_END
from rt.v1 import sequencer_pb2 as pb
from sequencer.state.command_codec import decode_command, encode_command, reset_of
from sequencer.state.commands import (
    COUNT_MAX,
    RANGES_MAX,
    TRIM_REASONS,
    Command,
    Configure,
    DecideRequest,
    HoldPosition,
    JoinDisk,
    MergeInstruction,
    MergeRange,
    RaiseFeatureLevel,
    ReleaseHold,
    ResetCluster,
    ResetGroup,
    RestoreDisk,
    Roll,
    SubmitRequest,
    TrimSegments,
)
from sequencer.state.configuration import CONFIGURABLE, Configuration
from sequencer.state.leases.leases import (
    AcquireLeases,
    ExpireLeases,
    HeldLease,
    IdleLease,
    ReleaseLeases,
    RenewLeases,
)
from sequencer.state.leases.requests import PostRequest
from sequencer.state.leases.table_rows import TableRow
from sequencer.state.leases.tables import DeleteTable, TablePartId, WriteTable
from sequencer.state.session_commands import (
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    LimitSilence,
    OpenRun,
    OpenSealedRuns,
    SealedRun,
)
from sequencer.state.state import End

RANGE = MergeRange(7, 3, 1, 64, 4096, 1000, 50, 0xAAAA0001, 0xBBBB0002)
EXAMPLES: list[Command] = [
    MergeInstruction(12, 1_700_000_000_000_000_000, (RANGE, MergeRange(9, 0, 0, 128, 256, 0, 1, 1, 2))),
    OpenRun("feed~backup", b"I" * 16, "twins", 4, b"L" * 8),
    OpenRun("feed", b"I" * 16, None, 0, b"L" * 8, 7),
    OpenSealedRuns(
        *("feed", b"I" * 16, "twins"),
        (SealedRun(4, b"L" * 8, End(0, 4096, 50)), SealedRun(5, b"M" * 8, End(2, 64, 50))),
        7,
    ),
    FenceRun(7, 3),
    FenceRun(7, 3, (4, 9)),
    CloseRun(7, 3, 1, 4096, 1050),
    CloseRun(7, 3, 0, 64, 0, (4, 2**32 - 1), End(1, 96, 7)),
    Roll(13, 0, 5, 1_700_000_000_000_000_000),
    Configure(roll_bytes=1 << 30, roll_minutes=60, session_bytes_max=16 << 20),
    Configure(),
    Configure(roll_minutes=0),
    Configure(
        retention_minutes=60, retention_bytes=90 << 30, retention_disk_percent=80, hold_bytes_max=1 << 30
    ),
    Configure(retention_minutes=0, retention_bytes=0, retention_disk_percent=0, hold_bytes_max=0),
    Configure(sessions_max=1000, sessions_per_name_max=10, session_idle_minutes=0),
    JoinDisk("n1", b"D" * 16),
    RestoreDisk("n1", b"D" * 16),
    TrimSegments(50, TrimReason.TIME, 1_700_000_000_000_000_000),
    HoldPosition("reader", 1234, 1_700_000_000_000_000_000),
    HoldPosition("reader", 0, 0),
    ReleaseHold("reader"),
    ResetGroup("workers", 1234, 1_700_000_000_000_000_000),
    ResetGroup("workers", 0, 1, True),
    CloseSession("feed~backup"),
    Forget((7, 3)),
    LimitSilence(7, 3, 60_000),
    LimitSilence(7, 0, 0),
    SubmitRequest(b"Q" * 16, 1, CloseSession("feed")),
    SubmitRequest(b"Q" * 16, 1_700_000_000_000_000_000, Configure(retention_bytes=0)),
    SubmitRequest(b"Q" * 16, 1, TrimSegments(0, TrimReason.REQUEST, 1)),
    SubmitRequest(b"Q" * 16, 2**63 - 1, ReleaseHold("reader")),
    DecideRequest(b"Q" * 16, 1_700_000_000_000_000_000),
    ResetCluster(False, 2, 1_700_000_000_000_000_000, b"R" * 16),
    ResetCluster(True, 1 << 16, 0, b"R" * 16, "n1"),
    AcquireLeases(b"Q" * 16, "h1~a", 60_000, ("g/queue/q1", "g/host/h1~a")),
    RenewLeases(b"Q" * 16, "h1", (HeldLease("g/queue/q1", 1), HeldLease("g/x", 2**63 - 1))),
    ReleaseLeases(b"Q" * 16, "h1", (HeldLease("g/queue/q1", 1),)),
    ExpireLeases((IdleLease("g/queue/q1", 1, 0), IdleLease("g/x", 2, 7))),
    WriteTable(
        TablePartId("g/queue/q1", "h1~a", 7, 3, b"Q" * 16, 0, False),
        *(("a", ""), ("b", "c\0d"), (TableRow("e", b"1"), TableRow("f\0g", b""))),
    ),
    WriteTable(TablePartId("g/queue/q1", "h1", 2**63 - 1, 1, b"Q" * 16, 1, True)),
    SubmitRequest(b"Q" * 16, 1, DeleteTable("g/queue/q1")),
    PostRequest("g/queue/q1", b"Q" * 16, 1_700_000_000_000_000_000, 1_700_000_030_000_000_000, b"{}"),
    DecideRequest(b"Q" * 16, 1_700_000_000_000_000_000, "a member does not know this feature level"),
    SubmitRequest(b"Q" * 16, 1, RaiseFeatureLevel(2)),
]

UINT32 = st.integers(0, 2**32 - 1)
LATER = st.sets(st.integers(6, 2**32 - 1), max_size=4).map(lambda runs: tuple(sorted(runs)))
NUMBERS = st.integers(0, NUMBER_MAX - 1) | st.integers(0, 300)
NAMES = st.text(string.ascii_letters + string.digits, min_size=1, max_size=12)


@st.composite
def ranges(draw: st.DrawFn, session_id: int) -> MergeRange:
    start = 8 * draw(st.integers(8, 2**40))
    first = draw(st.integers(0, NUMBER_MAX - COUNT_MAX - 1))
    return MergeRange(
        session_id,
        draw(UINT32),
        draw(UINT32),
        start,
        start + 8 * draw(st.integers(1, 2**40)),
        first,
        draw(st.integers(1, COUNT_MAX)),
        draw(UINT32),
        draw(UINT32),
    )


@st.composite
def merges(draw: st.DrawFn) -> MergeInstruction:
    ids = sorted(draw(st.sets(UINT32, min_size=1, max_size=5)))
    number, time_ns = draw(st.integers(1, NUMBER_MAX - 1)), draw(st.integers(0, 2**63 - 1))
    return MergeInstruction(number, time_ns, tuple(draw(ranges(one)) for one in ids))


REQUESTS = st.binary(min_size=16, max_size=16)
SIZES = st.integers(1, NUMBER_MAX - 1)
LEASES = st.builds("{}/{}".format, NAMES, NAMES)
TOKENS = st.integers(1, 2**63 - 1)
HELD = st.dictionaries(LEASES, TOKENS, min_size=1, max_size=3).map(
    lambda found: tuple(HeldLease(name, token) for name, token in found.items())
)
SESSIONS = st.builds("{}~{}".format, NAMES, NAMES) | NAMES
COMMANDS: st.SearchStrategy[Command] = st.one_of(
    merges(),
    st.builds(
        OpenRun,
        SESSIONS,
        st.binary(min_size=16, max_size=16),
        st.none() | NAMES,
        UINT32,
        st.binary(min_size=8, max_size=8),
        UINT32,
    ),
    st.builds(
        OpenSealedRuns,
        SESSIONS,
        st.binary(min_size=16, max_size=16),
        st.none() | NAMES,
        st.dictionaries(
            UINT32, st.tuples(UINT32, st.integers(8, 2**40), NUMBERS), min_size=1, max_size=3
        ).map(
            lambda found: tuple(
                SealedRun(x, b"L" * 8, End(y, 8 * eighths, number))
                for x, (y, eighths, number) in sorted(found.items())
            )
        ),
        UINT32,
    ),
    st.builds(FenceRun, UINT32, st.integers(0, 5), LATER),
    st.builds(CloseSession, SESSIONS),
    st.builds(Forget, st.lists(UINT32, min_size=1, max_size=5).map(tuple)),
    st.builds(LimitSilence, UINT32, UINT32, st.integers(0, SILENCE_MS_END - 1)),
    st.builds(
        CloseRun,
        UINT32,
        st.integers(0, 5),
        UINT32,
        st.integers(8, NUMBER_MAX // 8 - 1).map(lambda n: 8 * n),
        NUMBERS,
        LATER,
        st.none() | st.builds(End, UINT32, st.integers(8, 2**40).map(lambda n: 8 * n), NUMBERS),
    ),
    st.builds(Roll, st.integers(1, NUMBER_MAX - 1), UINT32, UINT32, st.integers(0, 2**63 - 1)),
    st.builds(
        Configure,
        **{name: st.none() | st.integers(least, end - 1) for name, (least, end) in CONFIGURABLE.items()},
    ),
    st.builds(JoinDisk, NAMES, st.binary(min_size=16, max_size=16)),
    st.builds(RestoreDisk, NAMES, st.binary(min_size=16, max_size=16)),
    st.builds(TrimSegments, NUMBERS, st.sampled_from(sorted(TRIM_REASONS)), st.integers(1, 2**63 - 1)),
    st.builds(HoldPosition, NAMES, NUMBERS, st.integers(0, 2**63 - 1)),
    st.builds(ReleaseHold, NAMES),
    st.builds(SubmitRequest, REQUESTS, st.integers(1, 2**63 - 1), st.builds(ReleaseHold, NAMES)),
    st.builds(DecideRequest, REQUESTS, st.integers(1, 2**63 - 1), st.text(max_size=5)),
    st.builds(RaiseFeatureLevel, st.integers(2, 2**32 - 1)),
    st.builds(
        ResetCluster,
        st.booleans(),
        st.integers(1, 2**32 - 1),
        st.integers(0, 2**63 - 1),
        st.binary(min_size=16, max_size=16),
        st.just("") | NAMES,
    ),
    st.builds(
        AcquireLeases,
        REQUESTS,
        SESSIONS,
        st.integers(1_000, 3_600_000),
        st.sets(LEASES, min_size=1, max_size=3).map(tuple),
    ),
    st.builds(RenewLeases, REQUESTS, SESSIONS, HELD),
    st.builds(ReleaseLeases, REQUESTS, SESSIONS, HELD),
    HELD.map(lambda held: ExpireLeases(tuple(IdleLease(*one, 5) for one in held))),
)


@given(COMMANDS)
@settings(max_examples=200)
def test_command_decodes_to_encoded_value(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


@given(COMMANDS, st.data())
@settings(max_examples=200)
def test_modified_command_bytes_decode_consistently_or_raise_decode_error(
    command: Command, data: st.DataObject
) -> None:
    body = bytearray(encode_command(command))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    check_total(bytes(body))


@given(st.binary(max_size=80))
@settings(max_examples=200)
def test_random_bytes_decode_consistently_or_raise_decode_error(body: bytes) -> None:
    check_total(body)


def check_total(body: bytes) -> None:
    try:
        command = decode_command(body)
    except (FormatError, UnknownVersion):
        return
    assert decode_command(encode_command(command)) == command


@given(st.lists(COMMANDS, max_size=4))
def test_truncated_command_bytes_decode_consistently_or_raise_decode_error(commands: list[Command]) -> None:
    for command in commands:
        body = encode_command(command)
        for size in range(len(body)):
            check_total(body[:size])


GOOD_RANGE: dict[str, Any] = {
    "session_id": 1,
    "run": 0,
    "roll": 0,
    "start": 64,
    "end": 128,
    "first": 0,
    "count": 1,
    "chain_start": 0,
    "chain_end": 0,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"start": 56},
        {"start": 0},
        {"start": 68},
        {"end": 64},
        {"start": 128, "end": 64},
        {"end": 130},
        {"end": NUMBER_MAX},
        {"count": 0},
        {"count": COUNT_MAX + 1},
        {"first": NUMBER_MAX - 1},
        {"first": 2**64 - 1},
    ],
    ids=str,
)
def test_merge_range_with_invalid_field_is_rejected(fields: dict[str, int]) -> None:
    MergeRange(**GOOD_RANGE)
    with pytest.raises(ValueError):
        MergeRange(**(GOOD_RANGE | fields))
    message = pb.Command(version=1)
    message.merge.number = 1
    message.merge.ranges.append(pb.Range(**(GOOD_RANGE | fields)))
    with pytest.raises(FormatError, match="says what it cannot"):
        decode_command(message.SerializeToString())


def many(count: int) -> tuple[MergeRange, ...]:
    return tuple(MergeRange(**(GOOD_RANGE | {"session_id": n})) for n in range(count))


@pytest.mark.parametrize(
    ("number", "sequenced_ns", "parts"),
    [
        (0, 1, many(1)),
        (NUMBER_MAX, 1, many(1)),
        (1, -1, many(1)),
        (1, 2**63, many(1)),
        (1, 1, ()),
        (1, 1, many(RANGES_MAX + 1)),
        (1, 1, many(1) * 2),
        (1, 1, many(2)[::-1]),
    ],
    ids=["number 0", "a huge number", "before 1970", "too late", "none", "too many", "twice", "disordered"],
)
def test_merge_instruction_with_invalid_field_raises_value_error(
    number: int, sequenced_ns: int, parts: tuple[MergeRange, ...]
) -> None:
    assert MergeInstruction(1, 0, many(RANGES_MAX))
    with pytest.raises(ValueError):
        MergeInstruction(number, sequenced_ns, parts)


@pytest.mark.parametrize(
    "fields",
    [
        {"session": "../a"},
        {"session": ""},
        {"session": "a~b~c"},
        {"dedup_id": "a/b"},
        {"incarnation": b"I" * 15},
        {"incarnation": b""},
        {"run_id": b"L" * 9},
    ],
    ids=str,
)
def test_open_run_with_invalid_field_is_rejected(fields: dict[str, Any]) -> None:
    good = {"session": "a", "incarnation": b"I" * 16, "dedup_id": "d", "run": 0, "run_id": b"L" * 8}
    assert OpenRun(**good)
    with pytest.raises((ValueError, InvalidName)):
        OpenRun(**(good | fields))
    message = pb.Command(version=1)
    message.open.CopyFrom(pb.Open(**(good | fields)))
    with pytest.raises(FormatError, match="says what it cannot"):
        decode_command(message.SerializeToString())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: CloseRun(1, 0, 0, 56, 0),
        lambda: CloseRun(1, 0, 0, 68, 0),
        lambda: CloseRun(1, 0, 0, NUMBER_MAX, 0),
        lambda: CloseRun(1, 0, 0, 64, NUMBER_MAX),
        lambda: CloseRun(1, 0, 0, 64, -1),
        lambda: CloseRun(1, 3, 0, 64, 0, (3,)),
        lambda: FenceRun(1, 3, (5, 4)),
        lambda: FenceRun(1, 0, tuple(range(1, 258))),
        lambda: Configure(roll_bytes=-1),
        lambda: Configure(session_bytes_max=-1),
        lambda: Configure(session_bytes_max=0),
        lambda: Configure(roll_bytes=0),
        lambda: Configure(roll_minutes=-1),
        lambda: Configure(roll_minutes=2**32),
        lambda: Configure(retention_minutes=-1),
        lambda: Configure(retention_minutes=2**32),
        lambda: Configure(retention_bytes=NUMBER_MAX),
        lambda: Configure(retention_disk_percent=101),
        lambda: Configure(retention_disk_percent=-1),
        lambda: Configure(hold_bytes_max=-1),
        lambda: JoinDisk("", b"D" * 16),
        lambda: JoinDisk("n1", b"D" * 15),
        lambda: RestoreDisk("n1", b""),
        lambda: OpenRun("a", b"I" * 16, None, -1, b"L" * 8),
        lambda: OpenRun("a", b"I" * 16, None, 2**32, b"L" * 8),
        lambda: TrimSegments(NUMBER_MAX, TrimReason.TIME, 1),
        lambda: TrimSegments(-1, TrimReason.TIME, 1),
        lambda: TrimSegments(1, TrimReason.NONE, 1),
        lambda: TrimSegments(1, TrimReason.FOLLOWED, 1),
        lambda: TrimSegments(1, TrimReason.LOST, 1),
        lambda: TrimSegments(1, TrimReason.TIME, 0),
        lambda: TrimSegments(1, TrimReason.TIME, 2**63),
        lambda: Roll(0, 0, 0, 1),
        lambda: Roll(1, 0, 0, 2**63),
        lambda: SubmitRequest(b"Q" * 15, 1, ReleaseHold("a")),
        lambda: SubmitRequest(b"Q" * 16, 0, ReleaseHold("a")),
        lambda: DecideRequest(b"Q" * 16, 2**63),
        lambda: DecideRequest(b"Q" * 16, 1, "x" * 1001),
        lambda: RaiseFeatureLevel(1),
        lambda: RaiseFeatureLevel(2**32),
        lambda: decode_command(asking(encode_command(FenceRun(1, 1)))),
        lambda: decode_command(asking(encode_command(SubmitRequest(b"Q" * 16, 1, ReleaseHold("a"))))),
        lambda: decode_command(asking(b"")),
        lambda: HoldPosition("a/b", 0, 0),
        lambda: HoldPosition("a", -1, 0),
        lambda: HoldPosition("a", NUMBER_MAX, 0),
        lambda: HoldPosition("a", 0, -1),
        lambda: ReleaseHold(""),
        lambda: ResetGroup("a/b", 0, 0),
        lambda: ResetGroup("a", NUMBER_MAX, 0),
        lambda: ResetGroup("a", 0, -1),
        lambda: CloseSession("a/b"),
        lambda: Forget(()),
        lambda: Forget((1,) * 1025),
        lambda: LimitSilence(1, 2**32, 1),
        lambda: LimitSilence(1, 0, -1),
        lambda: LimitSilence(1, 0, SILENCE_MS_END),
        lambda: Configure(sessions_max=0),
        lambda: Configure(sessions_per_name_max=0),
        lambda: ResetCluster(False, 0, 0, b"R" * 16),
        lambda: ResetCluster(False, 2**32, 0, b"R" * 16),
        lambda: ResetCluster(False, 1, -1, b"R" * 16),
        lambda: ResetCluster(False, 1, 0, b"R" * 15),
        lambda: ResetCluster(False, 1, 0, b"R" * 16, "../n1"),
        lambda: AcquireLeases(b"Q" * 15, "h", 1000, ("g/q",)),
        lambda: AcquireLeases(b"Q" * 16, "h/x", 1000, ("g/q",)),
        lambda: AcquireLeases(b"Q" * 16, "h", 999, ("g/q",)),
        lambda: AcquireLeases(b"Q" * 16, "h", 3_600_001, ("g/q",)),
        lambda: AcquireLeases(b"Q" * 16, "h", 1000, ()),
        lambda: AcquireLeases(b"Q" * 16, "h", 1000, ("g/q", "g/q")),
        lambda: AcquireLeases(b"Q" * 16, "h", 1000, tuple(f"g/q{n}" for n in range(257))),
        lambda: AcquireLeases(b"Q" * 16, "h", 1000, ("q",)),
        lambda: AcquireLeases(b"Q" * 16, "h", 1000, ("g/../q",)),
        lambda: AcquireLeases(b"Q" * 16, "h", 1000, ("g//q",)),
        lambda: AcquireLeases(b"Q" * 16, "h", 1000, ("g/" + "q" * LEASE_NAME_BYTES_MAX,)),
        lambda: RenewLeases(b"Q" * 16, "h", (HeldLease("g/q", 0),)),
        lambda: ReleaseLeases(b"Q" * 16, "h", (HeldLease("g/q", 2**63),)),
        lambda: ReleaseLeases(b"", "h", (HeldLease("g/q", 1),)),
        lambda: ExpireLeases(()),
        lambda: ExpireLeases((IdleLease("g/q", 1, -1),)),
    ],
    ids=range(80),
)
def test_other_commands_with_invalid_fields_are_rejected(wrong: Any) -> None:
    with pytest.raises((ValueError, InvalidName, FormatError)):
        wrong()


def asking(content: bytes) -> bytes:
    """Return an encoded request with this content as its command."""
    ask = pb.Ask(id=b"Q" * 16, until_ns=1, command=content)
    return pb.Command(version=1, ask=ask).SerializeToString()


def test_reset_of_returns_reset_command_and_none_for_other_bytes() -> None:
    for command in EXAMPLES:
        assert reset_of(encode_command(command)) == (command if isinstance(command, ResetCluster) else None)
    assert reset_of(b"\xff") is None
    assert reset_of(pb.Command(version=2, reset=pb.Reset()).SerializeToString()) is None


def test_configurable_settings_match_configuration_fields_and_contain_defaults() -> None:
    names = [field.name for field in fields(Configuration)]
    assert names == [field.name for field in fields(Configure)] == [*CONFIGURABLE]
    for name, (least, end) in CONFIGURABLE.items():
        assert least <= getattr(Configuration(), name) < end


def test_newer_command_raises_unknown_version_and_invalid_bytes_raise_format_error() -> None:
    newer = pb.Command(version=2)
    newer.fence.run = 1
    for message in (newer, pb.Command(version=1), pb.Command()):
        with pytest.raises(UnknownVersion):
            decode_command(message.SerializeToString())
    with pytest.raises(FormatError):
        decode_command(b"\xff")


def test_command_bytes_of_version_1_match_golden_file(golden: Any) -> None:
    parts = [encode_command(command) for command in EXAMPLES]
    dump = Dump(b"".join(parts))
    for part, command in zip(parts, EXAMPLES, strict=True):
        dump.title(str(command))
        dump.part(len(part), "command")
    kept = golden("sequencer/commands", dump.data, dump.text())
    for part, command in zip(parts, EXAMPLES, strict=True):
        assert decode_command(kept[: len(part)]) == command
        kept = kept[len(part) :]
