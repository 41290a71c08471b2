"""Segment file names, and segment headers in which every flipped bit is detected."""

import struct
from typing import Any

import pytest
from batches import CLUSTER, INCARNATION, LIFE, merged_header, session_header
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import rt
from rt.log.format.checksum import crc32c, sealed
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
    encode_segment_header,
    parse_segment_name,
)

u32 = st.integers(0, 2**32 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
ids = st.builds(SegmentId, u32, u32)
firsts = st.integers(0, NUMBER_MAX - 1)
headers = st.one_of(
    st.builds(
        SegmentHeader,
        st.just(LogKind.SESSION),
        ids,
        firsts,
        i64,
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=8, max_size=8),
    ),
    st.builds(
        SegmentHeader,
        st.sampled_from([LogKind.MERGED, LogKind.FILTERED]),
        ids,
        firsts,
        i64,
        st.binary(min_size=16, max_size=16),
    ),
)


def changed(data: bytes, at: int, kind: str, value: int) -> bytes:
    """Return `data` with one field changed and its checksum updated."""
    forged = bytearray(data)
    struct.pack_into(kind, forged, at, value)
    return sealed(bytes(forged))


# Names


@given(ids)
def test_segment_file_name_contains_run_and_roll_in_decimal(segment: SegmentId) -> None:
    assert segment.file_name == str(segment) == f"log.{segment.run}.{segment.roll}"
    assert parse_segment_name(segment.file_name) == segment


@pytest.mark.parametrize(
    "name",
    [
        "",
        "log",
        "log.1",
        "log.1.",
        "log..1",
        "log.1.2.3",
        "log.01.2",
        "log.1.02",
        "log.00.0",
        "log.-1.0",
        "log.+1.0",
        "log.1.2\n",
        " log.1.2",
        "log.1.2 ",
        "log.1_0.2",
        "log.0x1.2",
        "log.1e1.2",
        "log.\u0661.2",
        "LOG.1.2",
        "xlog.1.2",
        ".log.1.2.new",
        "log.4294967296.0",
        "log.0.4294967296",
        "log.99999999999.0",
        "index.1.2",
        "log.1.2/../x",
    ],
)
def test_invalid_segment_name_parses_to_none(name: str) -> None:
    assert parse_segment_name(name) is None


@given(st.from_regex(r"log\.[0-9+-]{1,11}\.[0-9_]{1,11}\n?", fullmatch=True))
def test_accepted_segment_name_is_canonical(name: str) -> None:
    segment = parse_segment_name(name)
    assert segment is None or segment.file_name == name


def test_segments_sort_by_number_instead_of_text() -> None:
    names = ["log.10.0", "log.2.10", "log.2.9", "log.2.0"]
    assert [str(segment) for segment in sorted(map(parse_segment_name, names))] == [  # type: ignore[type-var]
        "log.2.0",
        "log.2.9",
        "log.2.10",
        "log.10.0",
    ]


# Header


@given(headers, st.binary(max_size=20))
def test_header_survives_encode_and_decode(header: SegmentHeader, behind: bytes) -> None:
    data = encode_segment_header(header)
    assert len(data) == SEGMENT_HEADER_BYTES == 64
    assert decode_segment_header(data + behind, path="log.0.0") == header
    assert decode_segment_header(memoryview(bytearray(data + behind)), path="log.0.0") == header


def test_header_with_any_flipped_bit_raises_corrupt() -> None:
    data = encode_segment_header(session_header(first=77))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(rt.Corrupt) as caught:
            decode_segment_header(flipped, path="/log.3.1")
        assert (caught.value.path, caught.value.offset) == ("/log.3.1", 0)


def test_truncated_header_raises_corrupt() -> None:
    data = encode_segment_header(merged_header())
    for size in range(len(data)):
        with pytest.raises(rt.Corrupt, match="cut short"):
            decode_segment_header(data[:size], path="log.0.7")


@given(st.binary(min_size=64, max_size=64))
def test_header_of_random_bytes_is_rejected(data: bytes) -> None:
    with pytest.raises(rt.Corrupt):
        decode_segment_header(data, path="log.0.0")
    with pytest.raises(rt.Corrupt):
        decode_segment_header(b"RTSEGMNT" + data[8:], path="log.0.0")


@given(st.binary(min_size=48, max_size=48), st.integers(0, 5), st.integers(0, 5))
def test_accepted_header_encodes_to_same_bytes(rest: bytes, version: int, kind: int) -> None:
    data = sealed(struct.pack("<8sHHI", b"RTSEGMNT", version, kind, 0) + rest)
    try:
        header = decode_segment_header(data, path="log.0.0")
    except (rt.Corrupt, rt.UnknownVersion):
        return
    assert encode_segment_header(header) == data


@pytest.mark.parametrize("version", [0, 2, 65_535])
def test_unknown_version_raises_error_with_its_number(version: int) -> None:
    data = changed(encode_segment_header(session_header()), 8, "<H", version)
    with pytest.raises(rt.UnknownVersion, match=f"log.3.1.*got {version}, expected 1.*newer rt"):
        decode_segment_header(data, path="log.3.1")


@pytest.mark.parametrize("kind", [0, 4, 65_535])
def test_unknown_kind_raises_error_with_its_number(kind: int) -> None:
    data = changed(encode_segment_header(session_header()), 10, "<H", kind)
    with pytest.raises(rt.UnknownVersion, match=f"unknown kind.*got {kind}"):
        decode_segment_header(data, path="log.3.1")


@pytest.mark.parametrize("first", [-1, NUMBER_MAX, 2**63 - 1, -(2**63)])
def test_first_number_out_of_range_raises_corrupt(first: int) -> None:
    data = changed(encode_segment_header(session_header()), 24, "<q", first)
    with pytest.raises(rt.Corrupt, match="out of range"):
        decode_segment_header(data, path="log.3.1")


def test_merged_header_with_run_id_raises_corrupt() -> None:
    data = changed(encode_segment_header(merged_header()), 56, "<Q", 1)
    with pytest.raises(rt.Corrupt, match="run id in a merged log"):
        decode_segment_header(data, path="log.0.7")


@pytest.mark.parametrize(
    "fields",
    [
        {"origin": bytes(15)},
        {"origin": bytes(17)},
        {"run_id": bytes(7)},
        {"run_id": b""},
        {"first": -1},
        {"first": NUMBER_MAX},
        {"id": SegmentId(-1, 0)},
        {"id": SegmentId(0, -1)},
        {"id": SegmentId(2**32, 0)},
        {"id": SegmentId(0, 2**32)},
        {"created_ns": 2**63},
        {"created_ns": -(2**63) - 1},
        {"kind": LogKind.MERGED},
        {"kind": LogKind.FILTERED},
    ],
)
def test_header_with_invalid_fields_raises_value_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bytes|range|int64|merged"):
        replace(session_header(), **fields)


@pytest.mark.parametrize("first", [0, NUMBER_MAX - 1])
@pytest.mark.parametrize("coordinate", [0, 2**32 - 1])
@pytest.mark.parametrize("created_ns", [-(2**63), 2**63 - 1])
def test_header_with_limit_values_is_valid(first: int, coordinate: int, created_ns: int) -> None:
    segment = SegmentId(coordinate, coordinate)
    header = SegmentHeader(LogKind.SESSION, segment, first, created_ns, INCARNATION, LIFE)
    assert decode_segment_header(encode_segment_header(header), path=str(segment)) == header


# Seed


@given(headers)
def test_segment_seed_is_checksum_of_origin_and_segment_id(header: SegmentHeader) -> None:
    assert header.seed == crc32c(header.origin + struct.pack("<II", *header.id))


def test_segment_seed_depends_only_on_origin_run_and_roll() -> None:
    run, roll = session_header().id
    seeds = [
        session_header().seed,
        session_header(run=run + 1).seed,
        session_header(roll=roll + 1).seed,
        replace(session_header(), id=SegmentId(roll, run)).seed,
        replace(session_header(), origin=CLUSTER).seed,
    ]
    assert len(set(seeds)) == len(seeds)
    assert replace(session_header(), run_id=bytes(8), first=9, created_ns=0).seed == seeds[0]
