"""Batches: messages written together, laid out in columns.

    offset  bytes  field
         0      4  magic "RTB1"
         4      4  checksum of bytes 8 to the end of the columns
         8      4  total bytes: 64 + padded columns + padded values
        12      4  checksum of the value bytes as stored, padding included
        16      2  flags: bits 0-3 codec (0 none, 1 zstd), bit 4 messages have headers, the others 0
        18      2  topic count, at least 1, at most one for each message
        20      4  message count, at least 1
        24      8  first number
        32      8  lowest timestamp, ns since the Unix epoch
        40      8  highest timestamp, ns since the Unix epoch
        48      4  columns, bytes as stored (without padding)
        52      4  values, bytes as stored (without padding)
        56      4  columns, bytes uncompressed
        60      4  values, bytes uncompressed
        64         columns, padded to 8; then values, padded to 8

    columns, uncompressed, each padded to 8:
        value offsets  int32[count + 1]        from 0; message i is values[offsets[i]:offsets[i + 1]]
        timestamps     int64[count]            ns since the Unix epoch
        topic index    uint16[count]           left out when the batch has one topic
        topic offsets  int32[topics + 1], then the topics' UTF-8

    values, uncompressed: the messages' values; with flag 4 padded to 8, then `rt.log.format.headers`

Both checksums start from the seed of the batch's place (`rt.log.format.checksum`). The values have their own,
so that a scan of positions and times need not read them. With a codec, columns and values are one frame each,
together smaller than their content. A batch has at least 1/512 of its uncompressed bytes: a skippable frame
after the values fills it up.

Who checks what. *Scan*: a receiver before it stores, a reader, `rt log verify`. *Node*: a node before it
stores what a publisher sends (`replicator.protocol.column_check`). *Decode*: a reader when it decodes a
batch, and `rt log verify` (`rt.log.scan.batch_decoder`). A batch that fails the scan is corrupt. One that
passes the scan and fails the decoding is a bad message: no disk is at fault. No node stores such a batch.

    field                            scan                             node and decode
    -----                            ----                             ---------------
    magic                            is "RTB1"
    checksum                         holds, from the seed of place
    total_bytes                      is the sum of the stored sizes
    values_checksum                  holds, if values are read
    flags                            codec 0: sizes are equal         codec 0 or 1, flag 4 or not
    topic_count                      1 to message_count, <= 65,535    the number of topics
    message_count                    at least 1, fits columns_bytes   the number of offsets
    first                            follows, below the last number
    timestamp_low_ns                                                  lowest of the timestamps
    timestamp_high_ns                                                 highest of the timestamps
    columns_stored, values_stored    codec: less than uncompressed    total_bytes >= a 512th of uncompressed
    columns_bytes                    fits the counts                  the frame's stated and actual size
    values_bytes                     within the limits of a batch     the frame's stated and actual size
    value offsets                                                     rise from 0 to values_bytes, or to
                                                                      the padding before the headers
    timestamps                                                        have the header's range
    topic index                                                       below topic_count
    topic offsets                                                     rise from 0 to the end of the columns
    topics                                                            UTF-8 of at most 1,024 bytes
    zstd frames                                                       complete, window <= 8 MiB, no dictionary
    after the frame of values        any bytes: covered by a checksum, never read
    values                           any bytes
    headers                                                           all: `rt.log.scan.header_table`
    padding                          any bytes: covered by a checksum, never read
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import zstandard

from rt.log.format.checksum import crc32c
from rt.log.format.constants import (
    BATCH_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    NUMBER_MAX,
    TOPIC_BYTES_MAX,
    TOPICS_MAX,
    Buffer,
    Int64s,
    padded,
    padding,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BATCH_HEADER_BYTES: Final = 64
BATCH_MAGIC: Final = int.from_bytes(b"RTB1", "little")

CODEC_NONE: Final = 0
CODEC_ZSTD: Final = 1
_CODEC_MASK: Final = 0xF
HEADERS_FLAG: Final = 0x10
"""Messages have headers. A version of rt without message headers refuses the batch by its flags."""
CODECS: Final = {None: CODEC_NONE, "zstd": CODEC_ZSTD}

HEADER: Final = struct.Struct("<IIIIHHIqqqIIII")
_ZSTD_LEVEL: Final = 1
"""The fastest regular level: a publisher's thread compresses, and level 3 is half as fast."""
_ZSTD_WINDOW_BYTES_MAX: Final = 2**23
"""RFC 8878 requires every decoder to support this size. The writer's windows are 512 KiB."""
COMPRESSION_RATIO_MAX: Final = 512
"""Uncompressed columns and values to the bytes of the batch. It bounds a reader's cost for each byte."""
_SKIPPABLE: Final = struct.Struct("<II")
_SKIPPABLE_MAGIC: Final = 0x184D2A50
_WHOLE_BYTES_MAX: Final = 2**20
"""Larger frames are checked piece by piece, so that their content is never in memory completely."""
_PIECE_BYTES: Final = 2**18
_BLOCK_BYTES_MEAN_MIN: Final = 2**10
"""Nodes reject frames with smaller blocks: no compressor makes them, and each costs a loop iteration."""


class BatchHeader(NamedTuple):
    """The fields of a batch's 64-byte header, in their order."""

    magic: int
    checksum: int
    total_bytes: int
    values_checksum: int
    flags: int
    topic_count: int
    message_count: int
    first: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    columns_stored: int
    values_stored: int
    columns_bytes: int
    values_bytes: int

    @property
    def end(self) -> int:
        """One past the last number."""
        return self.first + self.message_count

    @property
    def codec(self) -> int:
        return self.flags & _CODEC_MASK


class BadBatch(ValueError):
    """The problem of a batch as text. The caller adds the file and decides what it means."""


class UnknownCodec(BadBatch):
    """The checksums are right, but this rt does not know the flags of the batch."""


class BatchDraft(NamedTuple):
    """Messages to encode; `offsets` as in the diagram. Without `topic_index` all have the same topic.

    A column is a numpy array or an `array.array`, with items of the width in the diagram.
    """

    values: bytes
    offsets: npt.NDArray[np.int32] | array[int]
    timestamps_ns: Int64s | array[int]
    timestamp_low_ns: int
    timestamp_high_ns: int
    topics: Sequence[bytes]
    topic_index: npt.NDArray[np.uint16] | array[int] | None = None
    headers: bytes = b""
    """The result of `rt.log.format.headers.encode_headers`; empty if no message has headers."""

    @property
    def message_count(self) -> int:
        return len(self.timestamps_ns)


def encode_batch(draft: BatchDraft, *, first: int, seed: int, codec: int = CODEC_NONE) -> list[Buffer]:
    """The bytes of a batch, as pieces to be written one after the other; the values are not copied.

    Does not use a codec that saves nothing. Raises `BadBatch` for messages that no reader would accept.
    """
    columns: Buffer = _columns(draft)
    values: Buffer = draft.values
    if draft.headers:
        values = b"".join((values, padding(len(values)), draft.headers))
    sizes = (len(columns), len(values))
    if codec == CODEC_ZSTD:
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False)
        small_columns, small_values = compressor.compress(columns), compressor.compress(values)
        if len(small_columns) + len(small_values) < sum(sizes):
            columns, values = small_columns, small_values + _filler(small_columns, small_values, sum(sizes))
        else:
            codec = CODEC_NONE
    tail, gap = padding(len(values)), padding(len(columns))
    header = BatchHeader(
        BATCH_MAGIC,
        0,
        BATCH_HEADER_BYTES + len(columns) + len(gap) + len(values) + len(tail),
        crc32c(tail, crc32c(values, seed)) if tail else crc32c(values, seed),
        codec | (HEADERS_FLAG if draft.headers else 0),
        len(draft.topics),
        draft.message_count,
        first,
        draft.timestamp_low_ns,
        draft.timestamp_high_ns,
        len(columns),
        len(values),
        *sizes,
    )
    check_header(header)
    body = b"".join((HEADER.pack(*header)[8:], columns, gap))
    head = BATCH_MAGIC.to_bytes(4, "little") + crc32c(body, seed).to_bytes(4, "little") + body
    return [head, values, tail] if tail else [head, values]


def check_header(header: tuple[int, ...]) -> None:
    """Raise `BadBatch` unless the sizes and counts of a `BatchHeader` agree and are within the limits.

    Checks no checksum. Afterwards `total_bytes` safely bounds a read, and the other sizes bound a
    decompression. It runs for each batch, and is fastest on a plain tuple of the header's fields.
    """
    magic, _, total, _, flags, topics, count, first, _, _, columns_in, values_in, columns, values = header
    if magic != BATCH_MAGIC:
        raise BadBatch(f"no batch starts here: magic {magic:#010x}")
    if total != BATCH_HEADER_BYTES + (columns_in + 7 & -8) + (values_in + 7 & -8):
        raise BadBatch(f"total of {total} bytes for stored columns of {columns_in} and values of {values_in}")
    if not 1 <= topics <= count or topics > TOPICS_MAX:
        raise BadBatch(f"{count} messages with {topics} topics")
    if not 0 <= first <= NUMBER_MAX - count:
        raise BadBatch(f"first number {first} out of range")
    fixed = (4 * count + 11 & -8) + 8 * count + 4 * topics + 4
    if topics > 1:
        fixed += 2 * count + 7 & -8
    if not fixed <= columns <= fixed + TOPIC_BYTES_MAX * topics:
        raise BadBatch(f"columns of {columns} bytes for {count} messages with {topics} topics")
    if columns + values > BATCH_BYTES_MAX and (count > 1 or values > MESSAGE_BYTES_MAX):
        raise BadBatch(f"{columns} + {values} bytes are above the limit of a batch")
    if not flags & _CODEC_MASK:
        if columns_in != columns or values_in != values:
            raise BadBatch("sizes differ although nothing is compressed")
    elif columns_in + values_in >= columns + values:
        raise BadBatch(f"compressing {columns} + {values} bytes saved nothing")


def check_codec(header: BatchHeader) -> None:
    """Raise `UnknownCodec` or `BadBatch` if the batch cannot be expanded, as far as its header tells.

    The caller checked the header. Afterwards the batch's size and the limits bound the cost of expanding it.
    """
    if header.flags & ~HEADERS_FLAG not in {CODEC_NONE, CODEC_ZSTD}:
        raise UnknownCodec(f"unknown to this rt: flags {header.flags:#06x}")
    plain_bytes = header.columns_bytes + header.values_bytes
    if header.codec == CODEC_ZSTD and plain_bytes > COMPRESSION_RATIO_MAX * header.total_bytes:
        limit = f"more than {COMPRESSION_RATIO_MAX} to 1"
        raise BadBatch(f"{plain_bytes} bytes are compressed to a batch of {header.total_bytes}, {limit}")


def expand(
    data: memoryview, batches: Sequence[tuple[int, BatchHeader]], *, values: bool = True
) -> tuple[bytes, list[BatchHeader]]:
    """Uncompress batches, each at its place in `data`, into joined bytes. Also returns their new headers.

    An expanded batch keeps the checksums of the stored one, which are then wrong. Without `values`, which
    need not be in `data` then, the expanded batches and their headers have none. Raises `UnknownCodec` or
    `BadBatch`. The sizes in the headers, which the caller checked, bound the memory.
    """
    for _, header in batches:
        check_codec(header)
    if not values:
        none = {"values_stored": 0, "values_bytes": 0}
        batches = [(at, one._replace(flags=one.flags & ~HEADERS_FLAG, **none)) for at, one in batches]
    decompressor = _decompressor()
    parts: list[Buffer] = []
    headers: list[BatchHeader] = []
    for at, header in batches:
        columns_at = at + BATCH_HEADER_BYTES
        values_at = columns_at + padded(header.columns_stored)
        columns: Buffer = data[columns_at : columns_at + header.columns_stored]
        stored: Buffer = data[values_at : values_at + header.values_stored]
        if header.codec == CODEC_ZSTD:
            columns = _decompress(decompressor, columns, header.columns_bytes)
            if values:
                stored = _decompress(decompressor, stored, header.values_bytes, is_alone=False)
        plain = header._replace(
            flags=header.flags & HEADERS_FLAG,
            columns_stored=header.columns_bytes,
            values_stored=header.values_bytes,
            total_bytes=BATCH_HEADER_BYTES + padded(header.columns_bytes) + padded(header.values_bytes),
        )
        parts += (HEADER.pack(*plain), columns, padding(len(columns)), stored, padding(len(stored)))
        headers.append(plain)
    return b"".join(parts), headers


def expand_columns(header: BatchHeader, batch: memoryview) -> Buffer:
    """The uncompressed columns of a batch, whose values may be missing. Raises `UnknownCodec`, `BadBatch`."""
    check_codec(header)
    stored = batch[BATCH_HEADER_BYTES : BATCH_HEADER_BYTES + header.columns_stored]
    if header.codec == CODEC_NONE:
        return stored
    return _decompress(_decompressor(), stored, header.columns_bytes)


def check_values(header: BatchHeader, batch: memoryview, keep_from: int = NUMBER_MAX) -> Buffer:
    """Raise `UnknownCodec` or `BadBatch` if a reader cannot expand the values of a complete batch.

    Returns the uncompressed values from byte `keep_from` on (default: nothing). Needs less than 10 MiB of
    additional memory, for values of any size.
    """
    check_codec(header)
    values_at = BATCH_HEADER_BYTES + padded(header.columns_stored)
    stored = batch[values_at : values_at + header.values_stored]
    if header.codec == CODEC_NONE:
        return stored[keep_from:]
    if header.values_bytes <= _WHOLE_BYTES_MAX:
        return _decompress(_decompressor(), stored, header.values_bytes, is_alone=False)[keep_from:]
    return _check_pieces(stored, header.values_bytes, keep_from)


def _decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)


def _filler(columns: bytes, values: bytes, plain_bytes: int) -> bytes:
    """A skippable frame (RFC 8878, section 3.1.2) that brings a batch to its minimum size; empty if large."""
    stored_bytes = BATCH_HEADER_BYTES + padded(len(columns)) + len(values)
    missing = -(-plain_bytes // COMPRESSION_RATIO_MAX) - stored_bytes
    if missing <= 0:
        return b""
    size = max(missing - _SKIPPABLE.size, 0)
    return _SKIPPABLE.pack(_SKIPPABLE_MAGIC, size) + bytes(size)


def _decompress(
    decompressor: zstandard.ZstdDecompressor, data: Buffer, size: int, *, is_alone: bool = True
) -> bytes:
    """The content, `size` bytes, of the frame at the start of `data`; `is_alone`: nothing may follow it."""
    try:
        _check_frame(data, size)
        plain = decompressor.decompress(data, max_output_size=size, allow_extra_data=not is_alone)
    except zstandard.ZstdError as error:
        raise BadBatch(f"zstd: {error}") from error
    if len(plain) != size:
        raise BadBatch(f"a frame that holds {len(plain)} bytes where {size} are announced")
    return plain


def _check_frame(data: Buffer, size: int) -> zstandard.FrameParameters:
    """Check the sizes in the frame's header before decompression, because zstd would allocate them."""
    frame = zstandard.get_frame_parameters(data)
    if frame.content_size != size:
        raise BadBatch(f"a frame of {frame.content_size} bytes where {size} are announced")
    if frame.window_size > _ZSTD_WINDOW_BYTES_MAX or frame.dict_id:
        raise BadBatch(f"a frame with a window of {frame.window_size} bytes, dictionary {frame.dict_id}")
    return frame


def _check_pieces(data: memoryview, size: int, keep_from: int) -> bytes:
    """As `_decompress`, in pieces; returns the content from `keep_from` on.

    Also raises `BadBatch` for frames with very small blocks.
    """
    piece, found, kept = bytearray(_PIECE_BYTES), 0, bytearray()
    try:
        end = _frame_end(_check_frame(data, size), data, size)
        with _decompressor().stream_reader(data[:end]) as reader:  # It would read bytes after the frame, too.
            while count := reader.readinto(piece):
                kept += memoryview(piece)[max(keep_from - found, 0) : count]
                found += count
    except zstandard.ZstdError as error:
        raise BadBatch(f"zstd: {error}") from error
    if found != size:
        raise BadBatch(f"a frame that holds {found} bytes where {size} are announced")
    return bytes(kept)


def _frame_end(frame: zstandard.FrameParameters, data: memoryview, size: int) -> int:
    """Where the frame ends (RFC 8878, section 3.1.1.2). Raises `BadBatch` if it is not complete in `data`."""
    at = zstandard.frame_header_size(data)
    for _ in range(size // _BLOCK_BYTES_MEAN_MIN + 16):
        head = int.from_bytes(data[at : at + 3], "little")
        at += 3 + (1 if head >> 1 & 3 == 1 else head >> 3)
        if head & 1 or at > len(data):
            break
    else:
        raise BadBatch("a frame of very small blocks")
    end = at + 4 * frame.has_checksum
    if end > len(data):
        raise BadBatch("a frame that is cut short")
    return end


def _columns(draft: BatchDraft) -> bytes:
    count = draft.message_count
    parts = [draft.offsets.tobytes(), padding(4 * (count + 1)), draft.timestamps_ns.tobytes()]
    if draft.topic_index is not None:
        parts += [draft.topic_index.tobytes(), padding(2 * count)]
    ends = accumulate(map(len, draft.topics), initial=0)
    parts += [end.to_bytes(4, "little") for end in ends]
    parts += draft.topics
    return b"".join(parts)
