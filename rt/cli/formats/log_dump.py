"""`rt log dump`: messages and batches as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rt.cli.formats.console import report
from rt.cli.formats.tables import escape
from rt.cli.formats.writers import MessageRows
from rt.cli.signals import Interrupts
from rt.errors import Corrupt
from rt.log.disk import REAL
from rt.log.format.batch import CODECS
from rt.log.format.segment import SegmentId
from rt.log.read.reader import LogReader
from rt.log.scan.catalog import ReadableSegment, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import read_durable_end, read_header, read_identity, scans
from rt.log.scan.message_batch import MessageBatch
from rt.log.scan.placed_batches import PlacedBatch
from rt.log.scan.scanner import MergedScanner, Scanner, ScanResult
from rt.units import format_time

_CODEC_NAMES = {codec: name or "none" for name, codec in CODECS.items()}


def pages(
    reader: LogReader, end: int | None, limit: int | None, interrupts: Interrupts
) -> Iterator[MessageBatch]:
    """The batches of `reader`, up to position `end` and `limit` messages."""
    while limit is None or limit > 0:
        with interrupts.waiting():
            batch = reader.next_batch(None, limit)
        if batch is None:
            return
        size = len(batch)
        if end is not None and batch.end > end:
            batch = batch.slice(0, int(np.searchsorted(batch.positions, end)))
        if len(batch):
            yield batch
        if len(batch) < size:
            return
        limit = None if limit is None else limit - size


def message_lines(rows: MessageRows) -> Iterator[bytes]:
    for position, timestamp_ns, session, run, number, topic, value, headers in rows.messages():
        line = (
            f"{position}  {format_time(timestamp_ns)}  {escape(session)}/{run}#{number}  "
            f"{escape(topic) or '-'}  {escape(value)}"
        )
        line += "".join(f"  {escape(key)}={escape(value)}" for key, value in headers)
        yield f"{line}\n".encode()


class _Found(NamedTuple):
    """A batch, its segment and its session."""

    segment: SegmentId
    placed: PlacedBatch
    session: str


def batch_lines(directory: str, start: int, end: int | None, limit: int | None) -> Iterator[str]:
    """A line for each batch that holds positions from `start` to `end`."""
    for segment, placed, session in _batches(directory, start, end, limit):
        header = placed.header
        first, last = placed.first_position + placed.skip, placed.first_position + header.message_count - 1
        skipped = f" ({placed.skip} skipped)" if placed.skip else ""
        times = f"{format_time(header.timestamp_low_ns)} to {format_time(header.timestamp_high_ns)}"
        yield (
            f"{segment} {placed.offset}  {first} to {last}{skipped}  "
            f"{session}/{placed.run}#{header.first}  {header.topic_count} topics  "
            f"{header.total_bytes} bytes  {_codec(placed)}  {times}"
        )


def batch_objects(directory: str, start: int, end: int | None, limit: int | None) -> Iterator[str]:
    for segment, placed, session in _batches(directory, start, end, limit):
        header = placed.header
        found: dict[str, Any] = {
            "segment": str(segment),
            "offset": placed.offset,
            "first_position": placed.first_position + placed.skip,
            "messages": header.message_count - placed.skip,
            "skipped": placed.skip,
            "session": session,
            "run": placed.run,
            "first_number": header.first,
            "topics": header.topic_count,
            "bytes": header.total_bytes,
            "uncompressed_bytes": header.columns_bytes + header.values_bytes,
            "codec": _codec(placed),
            "timestamp_low_ns": header.timestamp_low_ns,
            "timestamp_high_ns": header.timestamp_high_ns,
        }
        yield json.dumps(found)


def _codec(placed: PlacedBatch) -> str:
    return _CODEC_NAMES.get(placed.header.codec, str(placed.header.codec))


def _batches(directory: str, start: int, end: int | None, limit: int | None) -> Iterator[_Found]:
    left = 2**62 if limit is None else limit
    for kept in read_catalog(REAL, directory).kept:
        if kept.end is not None and kept.end <= start:
            continue
        for found in _segment_batches(directory, kept, start):
            first, count = found.placed.first_position, found.placed.header.message_count
            if first + count <= start:
                continue
            if left == 0 or (end is not None and first + found.placed.skip >= end):
                return
            left -= 1
            yield found


def _segment_batches(directory: str, kept: ReadableSegment, start: int) -> Iterator[_Found]:
    """The batches of a segment, from about `start`; values are not read."""
    name = read_identity(REAL, directory).name
    durable = read_durable_end(REAL, directory)
    header = kept.header or read_header(REAL, directory, kept.id)
    if header is None:
        return
    file = REAL.open(segment_path(directory, kept.id))
    try:
        scanner, scan = scanner_at(REAL, directory, header, file, start), ScanResult()
        for scan in scans(file.pread, scanner, values=False):
            for placed in scan.batches:
                sessions = scanner.sessions if isinstance(scanner, MergedScanner) else None
                session = name if sessions is None else sessions[placed.session_id].session
                yield _Found(kept.id, placed, session)
        synced = durable.offset if durable is not None and durable.id == kept.id else 0
        if file.size():
            _judge(segment_path(directory, kept.id), kept, scanner, scan, synced)
    finally:
        file.close()


def _judge(path: str, kept: ReadableSegment, scanner: Scanner, scan: ScanResult, synced: int) -> None:
    """Report why the batches end here, if they should continue."""
    if scanner.boundary < synced or (kept.end is not None and scanner.next < kept.end):
        raise Corrupt(
            scan.problem or "the file is too short",
            path=path,
            offset=scanner.offset,
            hint="`rt log verify` lists all damage.",
        )
    if scan.problem or scan.needed:
        report(f"{path} ends with an incomplete batch at offset {scanner.boundary}")
