"""Batches with valid checksums and hostile contents: readers decode every batch a node accepts.

The fuzzer knows the structure of a batch. It lays columns and values out as a publisher does, and changes
some of their fields. It encodes them as some encoder might, and makes the header and both checksums match.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zstandard
from batches import CLUSTER, LIFE, Said, batch, columns, forge
from disks import MemoryDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from log_items import COPY, MERGED, items_of

import rt
from replicator.protocol.column_check import BadColumns, check_columns
from replicator.protocol.handshake import PullStart
from replicator.protocol.messages import Chunk, LogOffset, Run
from replicator.pull.range_stream import RangeStream
from replicator.receive.session_receiver import SessionReceiver
from replicator.send.topic_filter import FilteredScan
from rt.errors import BadContents, Corrupt
from rt.events import BadMessage
from rt.log.check.verify import verify
from rt.log.format.batch import (
    CODEC_ZSTD,
    COMPRESSION_RATIO_MAX,
    HEADER,
    HEADERS_FLAG,
    BadBatch,
    BatchHeader,
    check_header,
    expand,
)
from rt.log.format.checksum import batch_seed
from rt.log.format.constants import padding
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId, encode_segment_header
from rt.log.format.segment_table import LogIdentity
from rt.log.read.projection import EVERYTHING, Projection
from rt.log.read.range_reader import RangeReader
from rt.log.scan.batch_decoder import decode
from rt.log.scan.message_batch import MessageBatch
from rt.log.scan.placed_batches import PlacedBatch
from rt.testing.merged import MergedLogBuilder

HEADER_OF_COPY = SegmentHeader(LogKind.SESSION, SegmentId(0, 0), 0, 0, bytes(16), LIFE)
BEFORE = [Said("a", b"before"), Said("b", b"it")]
AFTER = [Said("a", b"after"), Said("c", b"it")]
NO_VALUES = Projection(values=False)

BLOCK_RAW, BLOCK_RLE = 0, 1


def zstd_frame(data: bytes, blocks: Sequence[int], *, checksum: bool, said: int | None = None) -> bytes:
    """A frame of raw blocks with these sizes. A block that repeats one byte is written as a run-length
    block.
    """
    out = [b"\x28\xb5\x2f\xfd", bytes([0xA0 | checksum << 2])]
    out.append((len(data) if said is None else said).to_bytes(4, "little"))
    at, sizes = 0, []
    for size in blocks:
        sizes.append(min(size, len(data) - at))
        at += sizes[-1]
    while at < len(data):
        sizes.append(min(2**17, len(data) - at))
        at += sizes[-1]
    sizes = sizes or [0]
    at = 0
    for index, size in enumerate(sizes):
        part = data[at : at + size]
        at += size
        is_same = size > 1 and part == part[:1] * size
        kind = BLOCK_RLE if is_same else BLOCK_RAW
        out.append((size << 3 | kind << 1 | (index == len(sizes) - 1)).to_bytes(3, "little"))
        out.append(part[:1] if is_same else part)
    if checksum:
        whole = zstandard.ZstdCompressor(write_checksum=True).compress(data)
        out.append(whole[-4:])
    return b"".join(out)


@dataclass
class Forged:
    """A forged batch: its field values, and how it is stored."""

    topics: list[bytes]
    values: list[bytes]
    stamps: list[int]
    index: list[int]
    changes: list[tuple[str, int, int]] = field(default_factory=list)
    codec: str = "none"
    blocks: list[int] = field(default_factory=list)
    cut: int = 0
    rest: bytes = b""
    is_columns: bool = False
    """Whether `cut` and `rest` belong to the frame of the columns; otherwise to the frame of the values."""
    headers: list[list[tuple[bytes, bytes]]] = field(default_factory=list)
    """Message i has the headers at index i modulo the length. If the list is empty, the batch has no header
    section.
    """

    def lay_out(self, first: int, seed: int) -> bytes:
        count = len(self.values)
        ends = np.cumsum([0, *map(len, self.values)]).tolist()
        text = b"".join(self.topics)
        topic_ends = np.cumsum([0, *map(len, self.topics)]).tolist()
        index = [one % len(self.topics) for one in self.index]
        stamps, values = list(self.stamps), b"".join(self.values)
        said: dict[str, int] = {
            "topic_count": len(self.topics),
            "message_count": count,
            "first": first,
            "timestamp_low_ns": min(stamps),
            "timestamp_high_ns": max(stamps),
        }
        sets = {tuple(own): None for own in self.headers}
        words, halves, tail = header_parts(
            [*sets], [[*sets].index(tuple(self.headers[i % len(self.headers)])) for i in range(count) if sets]
        )
        after: dict[str, int] = {}
        for what, place, by in self.changes:
            match what:
                case "offset":
                    ends[place % len(ends)] = clipped(ends[place % len(ends)] + by, 31)
                case "topic offset":
                    at = place % len(topic_ends)
                    topic_ends[at] = clipped(topic_ends[at] + by, 31)
                case "stamp":
                    stamps[place % count] = clipped(stamps[place % count] + by, 63)
                case "index":
                    index[place % count] = by & 0xFFFF
                case "text":
                    text = (
                        text[: place % (len(text) + 1)] + bytes([by & 0xFF]) + text[place % (len(text) + 1) :]
                    )
                case "low" | "high":
                    name = f"timestamp_{what}_ns"
                    said[name] = clipped(said[name] + by, 63)
                case "header word":
                    words[place % len(words)] = clipped(words[place % len(words)] + by, 31)
                case "header half" if halves:
                    halves[place % len(halves)] = by & 0xFFFF
                case "header byte":
                    cut = place % (len(tail) + 1)
                    tail = tail[:cut] + bytes([by & 0xFF]) + tail[cut + (by & 1) :]
                case "header half":
                    pass
                case "flags":
                    after["flags"] = by & 0xFFFF
                case _:
                    after[what] = by
        plain = columns(ends, stamps, index if len(self.topics) > 1 else [], topic_ends, text)
        if sets:
            values += (
                padding(len(values)) + struct.pack(f"<{len(words)}i{len(halves)}H", *words, *halves) + tail
            )
        sizes = {"columns_bytes": len(plain), "values_bytes": len(values)}
        for name, by in after.items():
            if name in sizes:
                sizes[name] = max(sizes[name] + by, 0)
            elif name in said:
                said[name] = clipped(said[name] + by, 31 if name != "first" else 63) & (2**62 - 1)
        if self.codec == "none":
            flags = {"flags": HEADERS_FLAG if sets else 0, **flags_of(after)}
            return forge(plain, values, seed=seed, **masked({**said, **sizes, **flags}))
        frames = [self.stored(plain, is_columns=True), self.stored(values, is_columns=False)]
        flags = {"flags": CODEC_ZSTD | (HEADERS_FLAG if sets else 0), **flags_of(after)}
        return forge(*frames, seed=seed, **masked({**said, **sizes, **flags}))

    def stored(self, data: bytes, *, is_columns: bool) -> bytes:
        match self.codec:
            case "level 1":
                frame = zstandard.ZstdCompressor(level=1).compress(data)
            case "level 19":
                frame = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(data)
            case "no size":
                frame = zstandard.ZstdCompressor(write_content_size=False).compress(data)
            case "blocks":
                frame = zstd_frame(data, self.blocks, checksum=False)
            case "blocks with checksum":
                frame = zstd_frame(data, self.blocks, checksum=True)
            case "another size":
                frame = zstd_frame(data, self.blocks, checksum=False, said=len(data) + 1)
            case "skippable":
                frame = struct.pack("<II", 0x184D2A50, len(data)) + data
            case _:
                frame = data
        if is_columns == self.is_columns:
            frame = frame[: len(frame) - self.cut] + self.rest
        return frame


def header_parts(
    sets: Sequence[Sequence[tuple[bytes, bytes]]], index: Sequence[int]
) -> tuple[list[int], list[int], bytes]:
    """A simple encoding of the header section: its 32-bit words, its 16-bit halves and its bytes."""
    pairs = [pair for own in sets for pair in own]
    keys = [*{key: None for key, _ in pairs}]
    words = [len(sets), len(pairs), len(keys)]
    for sizes in (map(len, sets), map(len, keys), (len(value) for _, value in pairs)):
        words += np.cumsum([0, *sizes]).tolist()
    halves = [*index] if len(sets) > 1 else []
    if len(keys) > 1:
        halves += [keys.index(key) for key, _ in pairs]
    return words, halves, b"".join([*keys, *(value for _, value in pairs)])


def clipped(value: int, bits: int) -> int:
    return min(max(value, -(2**bits)), 2**bits - 1)


def flags_of(after: dict[str, int]) -> dict[str, int]:
    return {"flags": after["flags"]} if "flags" in after else {}


def masked(fields: dict[str, int]) -> dict[str, int]:
    """Limit the fields to their widths."""
    widths = {"topic_count": 16, "flags": 16, "message_count": 32, "columns_bytes": 32, "values_bytes": 32}
    return {name: value % 2 ** widths[name] if name in widths else value for name, value in fields.items()}


steps = st.sampled_from([-(2**62), -8, -2, -1, 1, 2, 8, 255, 2**16 - 1, 2**31 - 1, 2**62]) | st.integers(
    -9, 300
)
changes = st.tuples(
    st.sampled_from(
        [
            *("offset", "topic offset", "stamp", "index", "text", "low", "high", "flags"),
            *("message_count", "topic_count", "columns_bytes", "values_bytes"),
            *("header word", "header word", "header half", "header byte"),
        ]
    ),
    st.integers(0, 40),
    steps,
)
codecs = st.sampled_from(
    [
        *("none", "none", "none", "level 1", "level 1", "level 19", "no size", "blocks", "blocks"),
        *("blocks with checksum", "another size", "skippable", "no frame"),
    ]
)
texts = st.sampled_from([b"", b"a", b"b", b"trade", "größe".encode(), b"x" * 1024, b"\0"])
contents = st.sampled_from([bytes(3000), b"ab" * 900, b"0123456789" * 400, bytes(400_000)]) | (
    st.binary(max_size=12) | st.sampled_from([b"x" * 40_000, bytes(2**21), b"a" * (2**20 + 7)])
)


pairs = st.tuples(
    st.sampled_from([b"k", b"k", b"traceparent", "größe".encode(), b"", b"\xff", b"k" * 65_536]),
    st.sampled_from([b"", b"v", b"\xff\0", bytes(65_535), bytes(65_536)]) | st.binary(max_size=9),
)


@st.composite
def forgeries(draw: st.DrawFn) -> Forged:
    count = draw(st.sampled_from([1, 1, 2, 3, 16, 17, 30]))
    value = draw(st.lists(contents, min_size=1, max_size=3))
    topics = draw(st.lists(texts, min_size=1, max_size=min(count, 4)))
    stamps = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=count, max_size=count))
    index = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    return Forged(
        topics,
        [value[number % len(value)] for number in range(count)],
        stamps,
        index,
        draw(st.lists(changes, max_size=2)),
        draw(codecs),
        draw(st.lists(st.sampled_from([0, 0, 1, 100, 5000, 2**17]), max_size=6)),
        draw(st.sampled_from([*[0] * 12, 1, 3, 4, 9])),
        draw(st.sampled_from([*[b""] * 8, b"more", bytes(8), struct.pack("<II", 0x184D2A50, 2) + b"ab"])),
        draw(st.booleans()),
        draw(st.just([]) | st.lists(st.lists(pairs, max_size=4), min_size=1, max_size=5)),
    )


def session_with(forged: Forged) -> tuple[bytes, int]:
    """Return a segment of three batches, of which the second is forged, and the offset of the forged
    batch.
    """
    seed = HEADER_OF_COPY.seed
    data = encode_segment_header(HEADER_OF_COPY)
    data += batch(BEFORE, seed=batch_seed(seed, len(data)))
    at = len(data)
    data += forged.lay_out(len(BEFORE), batch_seed(seed, at))
    first = len(BEFORE) + len(forged.values)
    return data + batch(AFTER, first=first, seed=batch_seed(seed, len(data))), at


def chunks_of(data: bytes) -> Iterator[Chunk]:
    for start in range(0, len(data), 2**20):
        yield Chunk(LogOffset(0, 0, start), data[start : start + 2**20])


def accepts(disk: MemoryDisk, data: bytes, *, quickly: bool = False) -> bool:
    """Whether a node accepts the whole segment. The accepted part is in `COPY`."""
    receiver = SessionReceiver.open(COPY, LogIdentity(LogKind.SESSION, bytes(16), "feed"), disk=disk)
    receiver.start_run(Run(0, LIFE))
    try:
        for chunk in chunks_of(data):
            if not quickly or not receiver.append_if_quick(chunk):
                receiver.append(chunk)
    except (BadContents, Corrupt):
        return False
    finally:
        receiver.writer.sync()
        receiver.close()
    return receiver.unfinished_bytes == 0


def refuse(event: object) -> None:
    raise AssertionError(event)


def check_everything_reads(disk: MemoryDisk, forged: Forged) -> None:
    wanted = [*(one.value for one in BEFORE), *forged.values, *(one.value for one in AFTER)]
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="s", disk=disk) as merged:
        merged.merge_all([COPY])
        end = merged.position
    for path in (COPY, MERGED):
        assert verify(path, disk=disk).all_problems == []
        with rt.LogReader(path, disk=disk) as reader:
            batches = list(reader.batches())
        read = [value for each in batches for value in each.values]
        assert read == wanted or forged.changes
        assert len(read) == len(wanted) == end
        for each in batches:
            each.to_arrow().validate(full=True)
            assert len(each.topics) == len(each.sessions) == len(list(each.messages()))
            assert each.to_arrow()["headers"].to_pylist() == [
                [{"key": key, "value": value} for key, value in own] for own in each.headers
            ]
        if forged.headers and not forged.changes:
            own = [found for each in batches for found in each.headers][len(BEFORE) : -len(AFTER)]
            given_headers = [forged.headers[i % len(forged.headers)] for i in range(len(own))]
            assert [[(key.encode(), value) for key, value in each] for each in own] == given_headers
    for interest in (EVERYTHING, NO_VALUES, Projection(topics=frozenset(["a", "trade"]))):
        ranges = RangeReader(MERGED, 0, end, interest=interest, on_loss=refuse, wait_seconds=0, disk=disk)
        found = list(ranges.batches())
        assert ranges.position == end
        if interest is EVERYTHING:
            assert [value for each in found for value in each.values] == read
        feed = RangeStream(PullStart(CLUSTER, 1, "node", LogOffset(0, 0, 0), 0, end=end), 0, end, interest)
        fed = [each for item in items_of(disk, MERGED) for each in feed.handle(item)]
        assert feed.is_done
        assert not any(isinstance(each, BadMessage) for each in fed)
        assert sum(map(len, fed)) == sum(map(len, found))  # type: ignore[arg-type]
    filtering = FilteredScan(["a"], scanner=None, header=None, offset=None, end=0)
    assert filtering.items(items_of(disk, MERGED))


@pytest.mark.slow
@settings(max_examples=300)
@given(forgeries())
def test_readers_decode_every_batch_accepted_by_node(forged: Forged) -> None:
    data, at = session_with(forged)
    disk = MemoryDisk()
    if accepts(disk, data):
        check_everything_reads(disk, forged)
        return
    with rt.LogReader(COPY, disk=disk) as reader:
        assert [message.value for message in reader] == [one.value for one in BEFORE]
    assert at == data.find(b"RTB1", at)


@given(forgeries())
def test_event_loop_and_thread_accept_same_batches(forged: Forged) -> None:
    data, _ = session_with(forged)
    disks = MemoryDisk(), MemoryDisk()
    assert accepts(disks[0], data) == accepts(disks[1], data, quickly=True)
    contents = [disk.open(f"{COPY}/log.0.0") for disk in disks]
    assert contents[0].pread(2**26, 0) == contents[1].pread(2**26, 0)


@pytest.mark.slow
@settings(max_examples=200)
@given(forgeries())
def test_single_batch_is_accepted_if_and_only_if_it_decodes(forged: Forged) -> None:
    """Frames with very small blocks are an exception: only nodes reject them."""
    data = forged.lay_out(0, 0)
    header = BatchHeader._make(HEADER.unpack_from(data))
    try:
        check_header(header)
    except BadBatch:
        return
    decoded: MessageBatch | None = None
    problem = None
    try:
        decoded = decode(np.frombuffer(data, np.uint8), [PlacedBatch(0, header, 0, 0, 0, 0, 64)], {0: "feed"})
    except BadBatch as error:
        problem = str(error)
    try:
        check_columns(header, memoryview(data))
    except BadColumns:
        assert problem is not None
    else:
        assert problem is None
        assert decoded is not None


# Single faults, each rejected with its current error


def forged_frame(values: bytes, **fields: Any) -> bytes:
    return forge(
        zstandard.ZstdCompressor().compress(PLAIN_COLUMNS),
        values,
        **{"flags": CODEC_ZSTD, "columns_bytes": len(PLAIN_COLUMNS), **fields},
    )


PLAIN_COLUMNS = columns([0, 5000], [7], [], [0, 1], b"t")


def header_of(data: bytes) -> BatchHeader:
    return BatchHeader._make(HEADER.unpack_from(data))


@pytest.mark.parametrize(("low", "high"), [(6, 7), (7, 8), (8, 6), (0, 0), (-(2**63), 2**63 - 1)])
@pytest.mark.parametrize("count", [1, 40])
def test_header_time_range_differing_from_messages_is_rejected(low: int, high: int, count: int) -> None:
    data = forge(
        columns([0] * (count + 1), [7] * count, [], [0, 1], b"t"),
        message_count=count,
        timestamp_low_ns=low,
        timestamp_high_ns=high,
    )
    with pytest.raises(BadColumns, match="time range"):
        check_columns(header_of(data), memoryview(data))


@pytest.mark.parametrize("flags", [2, 15, 18, 32, 0x8000])
def test_unknown_header_flags_are_rejected(flags: int) -> None:
    data = forge(columns([0, 1], [0], [], [0, 1], b"t"), b"v", flags=flags)
    with pytest.raises(BadColumns, match=f"flags {flags:#06x}"):
        check_columns(header_of(data), memoryview(data))


@pytest.mark.parametrize("size", [5000, 3_000_000])
def test_values_failing_to_decompress_are_rejected(size: int) -> None:
    good = zstandard.ZstdCompressor().compress(np.random.default_rng(1).bytes(size // 2) + bytes(size // 2))
    assert zstandard.get_frame_parameters(good).content_size == size
    plain = columns([0, size], [7], [], [0, 1], b"t")
    for values, is_good in (
        (good, True),
        (good[:20] + b"\xff" * (len(good) - 20), False),
        (good[:-1], False),
    ):
        data = forge(
            zstandard.ZstdCompressor().compress(plain),
            values,
            flags=CODEC_ZSTD,
            columns_bytes=len(plain),
            values_bytes=size,
            timestamp_low_ns=7,
            timestamp_high_ns=7,
        )
        if is_good:
            check_columns(header_of(data), memoryview(data))
            continue
        with pytest.raises(BadColumns):
            check_columns(header_of(data), memoryview(data))


BOMB_BYTES = 200 * 2**20


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A message of 200 MiB in 6 KB."""
    plain = columns([0, BOMB_BYTES], [7], [], [0, 1], b"t")
    return forge(
        zstandard.ZstdCompressor().compress(plain),
        zstandard.ZstdCompressor().compress(bytes(BOMB_BYTES)),
        flags=CODEC_ZSTD,
        columns_bytes=len(plain),
        values_bytes=BOMB_BYTES,
        timestamp_low_ns=7,
        timestamp_high_ns=7,
    )


def test_decompression_bomb_is_rejected_by_nodes_and_readers_using_under_1_mib(bomb: bytes) -> None:
    header = header_of(bomb)
    check_header(header)
    tracemalloc.start()
    try:
        with pytest.raises(BadColumns, match="more than 512 to 1"):
            check_columns(header, memoryview(bomb))
        with pytest.raises(BadBatch, match="more than 512 to 1"):
            expand(memoryview(bomb), [(0, header)])
        with pytest.raises(BadBatch, match="more than 512 to 1"):
            expand(memoryview(bomb), [(0, header)], values=False)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_batch_with_best_compression_ratio_is_accepted_using_under_1_mib() -> None:
    data = batch([Said("t", bytes(100 * 2**20))], codec=CODEC_ZSTD)
    header = header_of(data)
    assert header.flags == CODEC_ZSTD
    plain_bytes = header.columns_bytes + header.values_bytes
    assert plain_bytes / COMPRESSION_RATIO_MAX <= len(data) < 1.01 * plain_bytes / COMPRESSION_RATIO_MAX
    tracemalloc.start()
    try:
        check_columns(header, memoryview(data))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    plain, _ = expand(memoryview(data), [(0, header)])
    assert len(plain) > 100 * 2**20


def test_append_if_quick_rejects_large_compressed_batch_without_state_change() -> None:
    data = encode_segment_header(HEADER_OF_COPY)
    data += batch(BEFORE, seed=batch_seed(HEADER_OF_COPY.seed, len(data)))
    seed = batch_seed(HEADER_OF_COPY.seed, len(data))
    large = batch([Said("t", bytes(3 * 2**20))], first=2, seed=seed, codec=CODEC_ZSTD)
    assert len(large) < 2**16
    disk = MemoryDisk()
    receiver = SessionReceiver.open(COPY, LogIdentity(LogKind.SESSION, bytes(16), "feed"), disk=disk)
    receiver.start_run(Run(0, LIFE))
    receiver.append(Chunk(LogOffset(0, 0, 0), data))
    first, rest = (
        Chunk(LogOffset(0, 0, len(data)), large[:100]),
        Chunk(LogOffset(0, 0, len(data) + 100), large[100:]),
    )
    assert receiver.append_if_quick(first)
    held = receiver.unfinished_bytes
    assert not receiver.append_if_quick(rest)
    assert (receiver.unfinished_bytes, receiver.end) == (held, 2)
    receiver.append(rest)
    assert receiver.end == 3
    receiver.close()


def test_batch_documentation_table_lists_every_header_field() -> None:
    import rt.log.format.batch

    text = rt.log.format.batch.__doc__ or ""
    table = text[text.index("Who checks what") :]
    for name in BatchHeader._fields:
        assert name in table, name
