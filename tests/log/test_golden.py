"""Golden files: version 1 of each format structure, byte for byte, and its dump.

`pytest --rewrite` creates them again. A changed file is a changed format. Before the first release the format
may change without a new version.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from batches import (
    CLUSTER,
    CREATED_NS,
    INCARNATION,
    LIFE,
    Heard,
    Range,
    Said,
    batch,
    declaration_of,
    draft,
    merged_bytes,
    merged_header,
    session_bytes,
    session_header,
)
from dump import Dump, diagram
from msgspec.structs import replace

import rt.log.format.batch
import rt.log.format.block
import rt.log.format.durable_end
import rt.log.format.index
import rt.log.format.segment
import rt.log.format.segment_table
from rt.log.format.batch import CODEC_NONE, CODEC_ZSTD, HEADERS_FLAG, encode_batch
from rt.log.format.checksum import batch_seed
from rt.log.format.durable_end import DurableEnd, encode_durable_end, newest_durable_end
from rt.log.format.headers import Headers, encode_headers
from rt.log.format.index import EntryKind, IndexEntry, decode_entries, encode_entry
from rt.log.format.segment import (
    LogKind,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
    encode_segment_header,
)
from rt.log.format.segment_table import (
    LogIdentity,
    SealedSegment,
    SegmentTable,
    TrimReason,
    decode_table,
    encode_table,
)
from rt.log.scan.batch_decoder import decode
from rt.log.scan.placed_batches import groups
from rt.log.scan.scanner import MergedScanner, scanner_for

GOLDEN = Path(__file__).parents[1] / "testdata" / "format"
FOLDER = "format/v1"

SEGMENT, BATCH, BLOCK, DECLARATION, DURABLE, ENTRY, TABLE_HEADER, TABLE_ENTRY = (
    diagram(module, which)
    for module, which in (
        (rt.log.format.segment, 0),
        (rt.log.format.batch, 0),
        (rt.log.format.block, 0),
        (rt.log.format.block, 1),
        (rt.log.format.durable_end, 0),
        (rt.log.format.index, 0),
        (rt.log.format.segment_table, 0),
        (rt.log.format.segment_table, 1),
    )
)


# Dumps


def dump_batch(dump: Dump) -> None:
    start = dump.at
    header = dump.fields(BATCH)
    count, topics = header["message count"], header["topic count"]
    if header["flags"] & 0xF == CODEC_NONE:
        dump.numbers(count + 1, 4, "value offset {}")
        dump.numbers(count, 8, "timestamp {}, ns since the Unix epoch")
        if topics > 1:
            dump.numbers(count, 2, "topic index {}")
        for index in range(topics + 1):
            dump.part(4, f"topic offset {index}")
        dump.part(start + 64 + header["columns"] - dump.at, "topics")
    else:
        dump.part(header["columns"], "columns, a zstd frame")
    dump.padding()
    kinds = {CODEC_NONE: "values", HEADERS_FLAG: "values, then headers"}
    dump.part(header["values"], kinds.get(header["flags"], "values, a zstd frame"))
    dump.padding()
    assert dump.at == start + header["total bytes"]


def dump_blocks(dump: Dump) -> None:
    while dump.at < len(dump.data):
        dump.title("a block")
        header = dump.fields(BLOCK)
        end = dump.at + header["bytes that follow the header"]
        if header["kind"] == 2:
            sizes = dump.fields(DECLARATION)
            dump.part(sizes["bytes of the session's name"], "the session's name")
            dump.part(sizes["bytes of the dedup id"], "the dedup id")
            dump.padding()
        while dump.at < end:
            dump.title("a batch in it")
            dump_batch(dump)
        assert dump.at == end


def dump_segment(data: bytes) -> str:
    dump = Dump(data)
    dump.title("the segment's header")
    kind = dump.fields(SEGMENT)["kind"]
    while kind == LogKind.SESSION and dump.at < len(data):
        dump.title("a batch")
        dump_batch(dump)
    if kind != LogKind.SESSION:
        dump_blocks(dump)
    return dump.text()


def dump_one_batch(data: bytes) -> str:
    dump = Dump(data)
    dump_batch(dump)
    return dump.text()


def dump_records(data: bytes) -> str:
    dump = Dump(data)
    for record in range(2):
        dump.title(f"record {record}")
        dump.fields(DURABLE)
    return dump.text()


def dump_index(data: bytes) -> str:
    dump = Dump(data)
    for index in range(len(data) // 32):
        dump.title(f"entry {index}")
        dump.fields(ENTRY)
    return dump.text()


def dump_table(data: bytes) -> str:
    dump = Dump(data)
    header = dump.fields(TABLE_HEADER)
    dump.part(header["bytes of the name"], "the name")
    dump.part(header["bytes of the dedup id"], "the dedup id")
    dump.padding()
    for index in range(header["entries"]):
        dump.title(f"entry {index}")
        dump.fields(TABLE_ENTRY)
    return dump.text()


# Values

PLACE = batch_seed(session_header().seed, 64)
BATCHES: dict[str, list[Said]] = {
    "batch_one_message": [Said("trade", b"value")],
    "batch_many_messages": [Said("trade", b"x" * n, CREATED_NS + 1000 - n) for n in range(5)],
    "batch_many_topics": [
        Said(topic, f"{topic} {n}".encode(), CREATED_NS + n)
        for n, topic in enumerate(["trade", "", "größe", "trade", ""])
    ],
    "batch_empty_value": [Said("", b"", -1)],
    "batch_of_8_bytes": [Said("topic", b"8 bytes.")],
}
RUNS = [[Said("trade", b"first"), Said("quote", b"second")], [Said("trade", b"third", CREATED_NS + 5)]]
SESSION = session_header(first=1000)
MERGED = merged_header(first=2**40)
RANGES = [
    Range(1, (tuple(RUNS[0]), tuple(RUNS[1])), number=1000, skip=1, run=3, roll=1, offset=4096),
    Range(2, (tuple(RUNS[1]),), number=7),
]
DURABLES = [
    DurableEnd(6, SegmentId(3, 1), 4096, 1000, INCARNATION),
    DurableEnd(7, SegmentId(3, 1), 8192, 1003, INCARNATION),
]
INDEX = [
    IndexEntry(0, 64, 0, EntryKind.DECLARATION),
    IndexEntry(0, 200, 0),
    IndexEntry(5000, 2**20 + 8, CREATED_NS),
]
KEPT = SealedSegment(
    SegmentId(3, 1), 1000, 1500, 2**27, CREATED_NS, CREATED_NS - 5, CREATED_NS + 9, CREATED_NS + 60, LIFE
)
TRIMMED = replace(KEPT, id=SegmentId(3, 0), first=0, end=1000).trimmed(TrimReason.MERGED, CREATED_NS + 99)
TABLE = SegmentTable(LogIdentity(LogKind.SESSION, INCARNATION, "feed~backup", "twins"), (TRIMMED, KEPT))
MERGED_TABLE = SegmentTable(LogIdentity(LogKind.MERGED, CLUSTER, "stream"))


def whole(header: SegmentHeader, content: bytes) -> bytes:
    return encode_segment_header(header) + content


FILES: dict[str, tuple[bytes, Callable[[bytes], str]]] = {
    **{name: (batch(said, first=1000, seed=PLACE), dump_one_batch) for name, said in BATCHES.items()},
    "segment_session": (whole(SESSION, session_bytes(SESSION, RUNS)), dump_segment),
    "segment_merged": (whole(MERGED, merged_bytes(RANGES, first=2**40)), dump_segment),
    "segment_filtered": (whole(merged_header(kind=LogKind.FILTERED), b""), dump_segment),
    "durable": (b"".join(map(encode_durable_end, DURABLES)), dump_records),
    "index": (b"".join(encode_entry(entry, SESSION.seed) for entry in INDEX), dump_index),
    "segments_session": (encode_table(TABLE), dump_table),
    "segments_merged": (encode_table(MERGED_TABLE), dump_table),
}
COMPRESSED = [Said("trade", b"again and again, " * 8, CREATED_NS + n) for n in range(3)]


def read(name: str) -> bytes:
    return (GOLDEN / "v1" / f"{name}.bin").read_bytes()


def messages_of(header: SegmentHeader, data: bytes) -> list[Heard]:
    scanner = scanner_for(header)
    scan = scanner.scan(memoryview(data))
    assert (scan.problem, scan.consumed) == (None, len(data))
    names = {0: "feed"}
    if isinstance(scanner, MergedScanner):
        names = {number: found.session for number, found in scanner.sessions.items()}
    heard: list[Heard] = []
    for group in groups(scan.batches):
        found = decode(np.frombuffer(data, np.uint8), group, names)
        assert found is not None
        heard += [
            Heard(m.position, m.number, m.session, Said(m.topic, m.value, m.timestamp_ns))
            for m in found.messages()
        ]
    return heard


def numbered(said: Sequence[Said], first: int) -> list[Heard]:
    return [Heard(number, number, "feed", one) for number, one in enumerate(said, first)]


# Encoding: the same values give the same bytes


@pytest.mark.parametrize("name", FILES)
def test_encoded_structure_matches_golden_file(golden: Callable[..., bytes], name: str) -> None:
    content, dump = FILES[name]
    golden(f"{FOLDER}/{name}", content, dump(content))


def test_golden_batch_with_headers_encodes_and_decodes_unchanged(golden: Callable[..., bytes]) -> None:
    said = [Said("t", b"one"), Said("t", b"two"), Said("t", b"three")]
    sets: list[Headers] = [(("trace", b"0af7"), ("kind", b"\0\xff")), ()]
    headers = encode_headers(sets, np.array([0, 1, 0], np.uint16))
    pieces = encode_batch(draft(said)._replace(headers=headers), first=1000, seed=PLACE)
    content = b"".join(pieces)
    data = golden(f"{FOLDER}/batch_headers", content, dump_one_batch(content))
    assert messages_of(session_header(first=1000), data) == numbered(said, 1000)
    scan = scanner_for(session_header(first=1000)).scan(memoryview(data))
    found = decode(np.frombuffer(data, np.uint8), scan.batches, {0: "feed"})
    assert found is not None
    assert found.headers == [sets[0], (), sets[0]]


def test_golden_zstd_batch_decodes_to_published_messages(golden: Callable[..., bytes]) -> None:
    """Each version of zstd may produce different bytes for the same content."""
    content = batch(COMPRESSED, first=1000, seed=PLACE, codec=CODEC_ZSTD)
    data = golden(f"{FOLDER}/batch_zstd", content, dump_one_batch(content), exact=False)
    assert messages_of(session_header(first=1000), data) == numbered(COMPRESSED, 1000)
    assert "columns, a zstd frame" in (GOLDEN / "v1" / "batch_zstd.txt").read_text()


def test_golden_directory_has_exactly_known_files_and_dumps() -> None:
    names = {*FILES, "batch_zstd", "batch_headers"}
    files = {path.name for path in (GOLDEN / "v1").iterdir()}
    assert files == {f"{name}.{kind}" for name, kind in itertools.product(names, ("bin", "txt"))}
    assert [path.name for path in GOLDEN.iterdir()] == ["v1"]


# Decoding: the stored bytes give the original values


@pytest.mark.parametrize("name", BATCHES)
def test_golden_batch_decodes_to_published_messages(name: str) -> None:
    assert messages_of(session_header(first=1000), read(name)) == numbered(BATCHES[name], 1000)


def test_golden_session_segment_decodes_to_original_header_and_messages() -> None:
    data = read("segment_session")
    header = decode_segment_header(data, path="log.3.1")
    assert header == SegmentHeader(LogKind.SESSION, SegmentId(3, 1), 1000, CREATED_NS, INCARNATION, LIFE)
    assert messages_of(header, data[64:]) == numbered(RUNS[0] + RUNS[1], 1000)


def test_golden_merged_segment_decodes_to_original_header_and_messages() -> None:
    data = read("segment_merged")
    header = decode_segment_header(data, path="log.0.7")
    assert header == SegmentHeader(LogKind.MERGED, SegmentId(0, 7), 2**40, CREATED_NS, CLUSTER)
    assert messages_of(header, data[64:]) == [
        Heard(2**40, 1001, "session-1", RUNS[0][1]),
        Heard(2**40 + 1, 1002, "session-1", RUNS[1][0]),
        Heard(2**40 + 2, 7, "session-2", RUNS[1][0]),
    ]
    scanner = MergedScanner(header)
    scanner.scan(memoryview(data[64:]))
    assert scanner.sessions == {1: declaration_of(1), 2: declaration_of(2)}
    assert (declaration_of(1).dedup_id, declaration_of(2).dedup_id) == ("twins", None)
    assert scanner.last_block is not None
    assert (scanner.last_block.instruction, scanner.last_block.sequenced_ns) == (2, CREATED_NS + 2)


def test_other_golden_files_decode_to_original_values() -> None:
    assert decode_segment_header(read("segment_filtered"), path="log.0.7") == merged_header(
        kind=LogKind.FILTERED
    )
    assert newest_durable_end(read("durable")) == DURABLES[1]
    assert newest_durable_end(read("durable")[:64]) == DURABLES[0]
    assert list(decode_entries(read("index"), SESSION.seed)) == INDEX
    assert decode_table(read("segments_session"), path="segments") == TABLE
    assert decode_table(read("segments_merged"), path="segments") == MERGED_TABLE


def test_golden_batch_of_one_message_has_at_most_128_bytes_overhead() -> None:
    for name in ("batch_one_message", "batch_empty_value", "batch_of_8_bytes"):
        (said,) = BATCHES[name]
        assert len(read(name)) - len(said.value) <= 128
    assert len(read("batch_empty_value")) == 88


# Diagrams: the modules describe all of their bytes


@pytest.mark.parametrize(
    ("module", "which", "size"),
    [
        (rt.log.format.segment, 0, 64),
        (rt.log.format.batch, 0, 64),
        (rt.log.format.block, 0, 96),
        (rt.log.format.block, 1, 20),
        (rt.log.format.durable_end, 0, 64),
        (rt.log.format.index, 0, 32),
        (rt.log.format.segment_table, 0, 64),
        (rt.log.format.segment_table, 1, 88),
    ],
)
def test_format_diagram_covers_every_byte_of_structure(module: ModuleType, which: int, size: int) -> None:
    assert sum(field.size for field in diagram(module, which)) == size


@pytest.mark.parametrize(
    ("name", "offset", "words"),
    [
        ("segment_session", 0, b"RTSEGMNT"),
        ("durable", 0, b"RTDURBLE"),
        ("segments_session", 0, b"RTSEGTAB"),
        ("batch_one_message", 0, b"RTB1"),
        ("segment_merged", 64, b"RTK1"),
    ],
)
def test_structure_has_its_magic_bytes_at_known_offset(name: str, offset: int, words: bytes) -> None:
    assert read(name)[offset : offset + len(words)] == words
