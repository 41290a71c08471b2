"""Batches, blocks and segments for tests: encoded by the library, forged, or read by naive readers.

Forged data has valid checksums and arbitrary field values. The naive readers (`read_*_dumbly`) share only the
checksum with the library. They take one field and one message at a time, and trust every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from rt.log.format.batch import CODEC_NONE, BatchDraft, encode_batch
from rt.log.format.block import BlockHeader, BlockKind, Declaration, encode_block_header, encode_declaration
from rt.log.format.checksum import batch_seed, segment_seed
from rt.log.format.constants import VERSION, padded, padding
from rt.log.format.running_checksum import chain_after
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader, SegmentId

INCARNATION = bytes(range(16))
CLUSTER = bytes(range(0xC0, 0xD0))
LIFE = bytes.fromhex("11fe11fe11fe11fe")
CREATED_NS = 1_700_000_000_123_456_789


class Said(NamedTuple):
    """A message as it is published."""

    topic: str
    value: bytes
    timestamp_ns: int = CREATED_NS


class Heard(NamedTuple):
    """A message as it is read."""

    position: int
    number: int
    session: str
    said: Said


# Encoded by the library


def session_header(*, run: int = 3, roll: int = 1, first: int = 0) -> SegmentHeader:
    return SegmentHeader(LogKind.SESSION, SegmentId(run, roll), first, CREATED_NS, INCARNATION, LIFE)


def merged_header(*, kind: LogKind = LogKind.MERGED, first: int = 0) -> SegmentHeader:
    return SegmentHeader(kind, SegmentId(0, 7), first, CREATED_NS, CLUSTER)


def draft(messages: Sequence[Said]) -> BatchDraft:
    """Return the messages in the layout that a publisher uses."""
    topics: dict[str, int] = {}
    index = [topics.setdefault(message.topic, len(topics)) for message in messages]
    offsets = np.cumsum([0, *(len(message.value) for message in messages)]).astype(np.int32)
    stamps = np.array([message.timestamp_ns for message in messages], np.int64)
    return BatchDraft(
        b"".join(message.value for message in messages),
        offsets,
        stamps,
        int(stamps.min()),
        int(stamps.max()),
        [topic.encode() for topic in topics],
        np.array(index, np.uint16) if len(topics) > 1 else None,
    )


def batch(messages: Sequence[Said], *, first: int = 0, seed: int = 0, codec: int = CODEC_NONE) -> bytes:
    return b"".join(encode_batch(draft(messages), first=first, seed=seed, codec=codec))


def session_bytes(
    header: SegmentHeader, runs: Sequence[Sequence[Said]], *, codecs: Sequence[int] = ()
) -> bytes:
    """Return the content of a session segment after its header: one batch for each of `runs`."""
    data, first = b"", header.first
    for index, run in enumerate(runs):
        seed = batch_seed(header.seed, SEGMENT_HEADER_BYTES + len(data))
        data += batch(run, first=first, seed=seed, codec=codecs[index] if codecs else CODEC_NONE)
        first += len(run)
    return data


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive batches of a session that a merge instruction takes as one block."""

    session_id: int
    runs: tuple[tuple[Said, ...], ...]
    number: int = 0
    skip: int = 0
    run: int = 0
    roll: int = 0
    offset: int = SEGMENT_HEADER_BYTES
    codec: int = CODEC_NONE
    chain: int = 0xC0FFEE

    @property
    def count(self) -> int:
        """Number of messages after the skipped ones."""
        return sum(map(len, self.runs)) - self.skip


def declaration_of(session_id: int) -> Declaration:
    incarnation = bytes([session_id]) * 16
    return Declaration(f"session-{session_id}", incarnation, "twins" if session_id % 2 else None)


def block_of(part: Range, *, position: int, instruction: int = 1, **fields: Any) -> bytes:
    """Return the block of `part`, before `in_place` gives it an offset. `fields` replace fields of its
    header.
    """
    declared = declaration_of(part.session_id)
    seed = segment_seed(declared.incarnation, part.run, part.roll)
    content, number, chain = b"", part.number, part.chain
    for run in part.runs:
        place = batch_seed(seed, part.offset + len(content))
        one = batch(run, first=number, seed=place, codec=part.codec)
        content += one
        number += len(run)
        chain = chain_after(chain, one[:64])
    header = BlockHeader(
        version=VERSION,
        kind=BlockKind.BATCHES,
        instruction_index=0,
        instruction=instruction,
        session_id=part.session_id,
        source_run=part.run,
        source_roll=part.roll,
        skip=part.skip,
        source_offset=part.offset,
        length_bytes=len(content),
        first_position=position,
        message_count=part.count,
        sequenced_ns=CREATED_NS + instruction,
        chain_start=part.chain,
        chain_end=chain,
    )
    return encode_block_header(header._replace(**fields), 0) + content


def in_place(
    *blocks: bytes, header: SegmentHeader | None = None, offset: int = SEGMENT_HEADER_BYTES
) -> bytes:
    """Return the blocks one after the other from `offset`, each with the checksum for its offset."""
    place = segment_seed_of(header or merged_header())
    data = b""
    for block in blocks:
        seed = batch_seed(place, offset + len(data))
        data += block[:4] + crc32c(block[8:96], seed).to_bytes(4, "little") + block[8:]
    return data


def segment_seed_of(header: SegmentHeader) -> int:
    """Return the seed of a segment's blocks, computed without the library's code."""
    return crc32c(header.origin + struct.pack("<II", *header.id))


def declaration_block(session_id: int, *, position: int, declared: Declaration | None = None) -> bytes:
    header = BlockHeader(
        VERSION, BlockKind.DECLARATION, 0, 1, session_id, 0, 0, 0, 0, 0, position, 0, CREATED_NS
    )
    return encode_declaration(header, declared or declaration_of(session_id), 0)


def merged_bytes(ranges: Sequence[Range], *, first: int = 0) -> bytes:
    """Return the content of a merged segment after its header: a block for each range, and one declaration
    for each session.
    """
    blocks, position, declared = [], first, set()
    for index, part in enumerate(ranges):
        if part.session_id not in declared:
            declared.add(part.session_id)
            blocks.append(declaration_block(part.session_id, position=position))
        blocks.append(block_of(part, position=position, instruction=index + 1))
        position += part.count
    return in_place(*blocks)


# Forged


def columns(
    offsets: Sequence[int],
    timestamps_ns: Sequence[int],
    topic_index: Sequence[int],
    topic_offsets: Sequence[int],
    text: bytes,
) -> bytes:
    """Return the columns of a batch, without any check of their values."""

    def part(kind: str, values: Sequence[int]) -> bytes:
        data = struct.pack(f"<{len(values)}{kind}", *values)
        return data + padding(len(data))

    topics = struct.pack(f"<{len(topic_offsets)}i", *topic_offsets) + text
    return part("i", offsets) + part("q", timestamps_ns) + part("H", topic_index) + topics


def forge(columns: bytes, values: bytes = b"", *, seed: int = 0, **fields: int) -> bytes:
    """Return a stored batch of these columns and values, with valid checksums. `fields` replace header
    fields.

    The defaults describe one message of one topic, without compression.
    """
    said = {
        "magic": int.from_bytes(b"RTB1", "little"),
        "total_bytes": 64 + padded(len(columns)) + padded(len(values)),
        "flags": 0,
        "topic_count": 1,
        "message_count": 1,
        "first": 0,
        "timestamp_low_ns": 0,
        "timestamp_high_ns": 0,
        "columns_stored": len(columns),
        "values_stored": len(values),
        "columns_bytes": len(columns),
        "values_bytes": len(values),
    } | fields
    values += padding(len(values))
    magic, total, *rest = said.values()
    body = struct.pack("<IIHHIqqqIIII", total, crc32c(values, seed), *rest) + columns + padding(len(columns))
    return struct.pack("<II", magic, crc32c(body, seed)) + body + values


# Naive readers


def read_batch_dumbly(data: bytes, at: int) -> tuple[int, int, list[Said]]:
    """Total bytes, first number and messages of the uncompressed batch at `at`."""
    total, flags, topic_count, count, first = struct.unpack_from("<I4xHHIq", data, at + 8)
    columns_bytes, values_bytes = struct.unpack_from("<II", data, at + 56)
    assert flags == 0
    offsets_at = at + 64
    stamps_at = offsets_at + 4 * (count + 1) + (-4 * (count + 1)) % 8
    index_at = stamps_at + 8 * count
    topics_at = index_at if topic_count == 1 else index_at + 2 * count + (-2 * count) % 8
    text_at = topics_at + 4 * (topic_count + 1)
    values_at = at + 64 + columns_bytes + -columns_bytes % 8
    messages = []
    for i in range(count):
        start, end = struct.unpack_from("<ii", data, offsets_at + 4 * i)
        (stamp,) = struct.unpack_from("<q", data, stamps_at + 8 * i)
        topic = 0 if topic_count == 1 else struct.unpack_from("<H", data, index_at + 2 * i)[0]
        topic_start, topic_end = struct.unpack_from("<ii", data, topics_at + 4 * topic)
        text = data[text_at + topic_start : text_at + topic_end].decode()
        messages.append(Said(text, data[values_at + start : values_at + end], stamp))
    assert values_at + values_bytes + -values_bytes % 8 == at + total
    return total, first, messages


def read_session_dumbly(data: bytes, session: str = "s") -> Iterator[Heard]:
    """Yield the messages of a session segment. `data` starts after the segment's header."""
    at = 0
    while at < len(data):
        total, first, messages = read_batch_dumbly(data, at)
        for number, said in enumerate(messages, first):
            yield Heard(number, number, session, said)
        at += total


def read_merged_dumbly(data: bytes) -> Iterator[Heard]:
    """Yield the messages of a merged segment. `data` starts after the segment's header."""
    names: dict[int, str] = {}
    at = 0
    while at < len(data):
        kind, session_id, skip = struct.unpack_from("<2xH12xI8xI", data, at + 8)
        length, position = struct.unpack_from("<QQ", data, at + 48)
        content_at, at = at + 96, at + 96 + length
        if kind == 2:
            (size,) = struct.unpack_from("<H", data, content_at + 16)
            names[session_id] = data[content_at + 20 : content_at + 20 + size].decode()
            continue
        while content_at < at:
            total, first, messages = read_batch_dumbly(data, content_at)
            for number, said in enumerate(messages, first):
                if skip:
                    skip -= 1
                    continue
                yield Heard(position, number, names[session_id], said)
                position += 1
            content_at += total
