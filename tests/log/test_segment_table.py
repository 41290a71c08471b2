"""The segments table: corrupt bytes are detected, and newer versions are reported as such."""

import struct
from typing import Any

import pytest
from batches import CLUSTER, INCARNATION, LIFE
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import rt
from rt.log.format.checksum import sealed
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import (
    TRIMMED_ENTRIES_MAX,
    LogIdentity,
    SealedSegment,
    SegmentTable,
    TrimReason,
    decode_table,
    encode_table,
)

u32 = st.integers(0, 2**32 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", fullmatch=True)
session_names = st.one_of(names, st.builds("{}~{}".format, names, names))
origins = st.binary(min_size=16, max_size=16)
identities = st.one_of(
    st.builds(LogIdentity, st.just(LogKind.SESSION), origins, session_names, st.none() | names),
    st.builds(LogIdentity, st.sampled_from([LogKind.MERGED, LogKind.FILTERED]), origins, names),
)


@st.composite
def sealed_segments(draw: st.DrawFn, segment: SegmentId) -> SealedSegment:
    first, end = sorted([draw(st.integers(0, NUMBER_MAX)), draw(st.integers(0, NUMBER_MAX))])
    kept = SealedSegment(
        segment,
        first,
        end,
        draw(st.integers(0, NUMBER_MAX - 1)),
        *(draw(i64) for _ in range(4)),
        run_id=draw(st.binary(min_size=8, max_size=8)),
    )
    reason = draw(st.sampled_from(TrimReason))
    return kept if reason is TrimReason.NONE else kept.trimmed(reason, draw(i64))


@st.composite
def tables(draw: st.DrawFn) -> SegmentTable:
    ids = sorted(draw(st.sets(st.builds(SegmentId, u32, u32), max_size=5)))
    return SegmentTable(draw(identities), tuple(draw(sealed_segments(segment)) for segment in ids))


IDENTITY = LogIdentity(LogKind.SESSION, INCARNATION, "feed~backup", "twins")
KEPT = SealedSegment(SegmentId(0, 1), 100, 200, 4096, 1, 2, 3, 4, LIFE)
TRIMMED = replace(KEPT, id=SegmentId(0, 0), first=0, end=100).trimmed(TrimReason.MERGED, 99)
TABLE = SegmentTable(IDENTITY, (TRIMMED, KEPT))
DATA = encode_table(TABLE)
ENTRIES_AT = 64 + 16


def changed(at: int, kind: str, value: int, data: bytes = DATA) -> bytes:
    """Return `data` with one field changed and its checksum updated."""
    forged = bytearray(data)
    struct.pack_into(kind, forged, at, value)
    return sealed(bytes(forged))


# Bytes


@given(tables())
def test_table_survives_encode_and_decode(table: SegmentTable) -> None:
    data = encode_table(table)
    assert len(data) % 8 == 0
    assert decode_table(data, path="segments") == table


def test_table_with_any_flipped_bit_raises_corrupt() -> None:
    for bit in range(8 * len(DATA)):
        flipped = bytearray(DATA)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(rt.Corrupt) as caught:
            decode_table(bytes(flipped), path="/segments")
        assert (caught.value.path, caught.value.offset) == ("/segments", 0)


def test_truncated_table_raises_corrupt() -> None:
    for size in range(len(DATA)):
        with pytest.raises(rt.Corrupt) as caught:
            decode_table(DATA[:size], path="segments")
        assert caught.value.got != caught.value.expected, size


@given(st.binary(max_size=300))
def test_table_of_random_bytes_raises_corrupt(data: bytes) -> None:
    for garbage in (data, DATA[:8] + data, DATA + data + b"\1"):
        with pytest.raises(rt.Corrupt):
            decode_table(garbage, path="segments")


@pytest.mark.parametrize("version", [0, 2, 65_535])
def test_unknown_version_raises_error_with_its_number(version: int) -> None:
    longer = changed(8, "<H", version) + b"what a newer version adds"
    for data in (changed(8, "<H", version), sealed(longer)):
        with pytest.raises(rt.UnknownVersion, match=f"at segments.*got {version}, expected 1.*newer rt"):
            decode_table(data, path="segments")


@pytest.mark.parametrize("kind", [0, 4, 65_535])
def test_unknown_kind_raises_error_with_its_number(kind: int) -> None:
    with pytest.raises(rt.UnknownVersion, match=f"unknown kind.*got {kind}"):
        decode_table(changed(10, "<H", kind), path="segments")


@pytest.mark.parametrize("reason", [9, 2**32 - 1])
def test_unknown_trim_reason_raises_error_with_its_number(reason: int) -> None:
    with pytest.raises(rt.UnknownVersion, match=f"unknown reason.*got {reason}"):
        decode_table(changed(ENTRIES_AT + 72, "<I", reason), path="segments")


@pytest.mark.parametrize(
    ("at", "kind", "value", "says"),
    [
        (32, "<I", 1, "wrong length"),
        (32, "<I", 3, "wrong length"),
        (32, "<I", 2**32 - 1, "wrong length"),
        (36, "<H", 65_535, "wrong length"),
        (36, "<H", 5, "not a valid name for a session"),
        (64 + 11, "<5s", b"a/../", "not a valid name for a dedup id"),
        (64, "<4s", b"../x", "not a valid name"),
        (64, "<1s", b"\xff", "utf-8"),
        (10, "<H", LogKind.MERGED, "not a valid name for a stream"),
        (ENTRIES_AT + 0, "<I", 1, "segments out of order: log.1.0 before log.0.1"),
        (ENTRIES_AT + 4, "<I", 1, "segments out of order"),
        (ENTRIES_AT + 8, "<Q", 101, "out of range"),
        (ENTRIES_AT + 8, "<Q", 2**64 - 1, "out of range"),
        (ENTRIES_AT + 16, "<Q", NUMBER_MAX + 1, "out of range"),
        (ENTRIES_AT + 16, "<Q", 2**64 - 1, "out of range"),
        (ENTRIES_AT + 24, "<Q", NUMBER_MAX, "out of range"),
        (ENTRIES_AT + 64, "<q", 0, "trimmed at 0 for reason MERGED"),
        (ENTRIES_AT + 72, "<I", 0, "trimmed at 99 for reason NONE"),
    ],
)
def test_malformed_table_with_valid_checksum_raises_corrupt(
    at: int, kind: str, value: Any, says: str
) -> None:
    with pytest.raises(rt.Corrupt, match=says):
        decode_table(changed(at, kind, value), path="segments")


@given(st.integers(16, len(DATA) - 1), st.integers(0, 255), st.integers(0, len(DATA)))
def test_forged_table_raises_only_corrupt_or_unknown_version(at: int, value: int, size: int) -> None:
    forged = bytearray(DATA[: max(size, 17)])
    forged[min(at, len(forged) - 1)] = value
    for data in (sealed(bytes(forged)), changed(at, "<B", value)):
        try:
            decode_table(data, path="segments")
        except (rt.Corrupt, rt.UnknownVersion):
            continue


# Values


@pytest.mark.parametrize(
    "fields",
    [
        {"origin": bytes(15)},
        {"name": "../x"},
        {"name": "a~b~c"},
        {"dedup_id": "a/b"},
        {"dedup_id": ""},
        {"kind": LogKind.MERGED},
    ],
)
def test_identity_with_invalid_fields_raises_value_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not a valid name|16 bytes"):
        replace(IDENTITY, **fields)


def test_suffixed_name_is_allowed_only_for_sessions() -> None:
    assert LogIdentity(LogKind.MERGED, CLUSTER, "stream").name == "stream"
    with pytest.raises(rt.InvalidName, match="stream"):
        LogIdentity(LogKind.MERGED, CLUSTER, "stream~1")


@pytest.mark.parametrize(
    "fields",
    [
        {"first": -1},
        {"first": 201},
        {"end": 99},
        {"end": NUMBER_MAX + 1},
        {"size_bytes": -1},
        {"size_bytes": NUMBER_MAX},
        {"trimmed_ns": 1},
        {"reason": TrimReason.TIME},
    ],
)
def test_entry_with_invalid_fields_raises_value_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"out of range|trimmed at"):
        replace(KEPT, **fields)


@pytest.mark.parametrize(
    "ids", [[(0, 0), (0, 0)], [(0, 1), (0, 0)], [(1, 0), (0, 9)], [(0, 0), (0, 2), (0, 1)]]
)
def test_table_with_entries_out_of_order_raises_value_error(ids: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="out of order"):
        SegmentTable(IDENTITY, tuple(replace(KEPT, id=SegmentId(*segment)) for segment in ids))


@pytest.mark.parametrize("now_ns", [-5, 0, 1, 10**18])
def test_trimmed_entry_keeps_all_other_metadata(now_ns: int) -> None:
    trimmed = KEPT.trimmed(TrimReason.DISK, now_ns)
    assert (KEPT.is_trimmed, trimmed.is_trimmed) == (False, True)
    assert replace(trimmed, trimmed_ns=0, reason=TrimReason.NONE) == KEPT
    assert trimmed.trimmed_ns == max(now_ns, 1)


def test_sealed_segment_is_added_or_replaced_once() -> None:
    newer = replace(KEPT, id=SegmentId(0, 2))
    assert TABLE.with_sealed(newer).segments == (TRIMMED, KEPT, newer)
    assert TABLE.with_sealed(newer).with_sealed(newer) == TABLE.with_sealed(newer)
    again = replace(KEPT, end=300)
    assert TABLE.with_sealed(again).segments == (TRIMMED, again)
    with pytest.raises(ValueError, match="out of order"):
        TABLE.with_sealed(TRIMMED)
    assert SegmentTable(IDENTITY).with_sealed(KEPT).segments == (KEPT,)


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12))
def test_only_oldest_trimmed_entries_are_forgotten(trims: list[bool], most: int) -> None:
    segments = tuple(
        replace(TRIMMED if trimmed else KEPT, id=SegmentId(0, roll)) for roll, trimmed in enumerate(trims)
    )
    table, gone = SegmentTable(IDENTITY, segments).forgotten(most=most)
    trimmed = [segment for segment in segments if segment.is_trimmed]
    expected = trimmed[: len(trimmed) - most] if len(trimmed) > most else []
    assert list(gone) == [segment.id for segment in expected]
    assert list(table.segments) == [segment for segment in segments if segment not in expected]


def test_table_keeps_at_most_ten_thousand_trimmed_entries() -> None:
    def table_of(count: int) -> SegmentTable:
        return SegmentTable(IDENTITY, tuple(replace(TRIMMED, id=SegmentId(0, roll)) for roll in range(count)))

    assert TRIMMED_ENTRIES_MAX == 10_000
    assert table_of(10_000).forgotten() == (table_of(10_000), [])
    table, gone = table_of(10_001).forgotten()
    assert (len(table.segments), list(gone)) == (10_000, [SegmentId(0, 0)])
    assert decode_table(encode_table(table), path="segments") == table
