"""Search a log for a time: the first message with a timestamp at or after it, in log order.

Timestamps come from the publishers and need not rise, so messages after that one may be older. The segment
table has the highest timestamp of each segment, and the index has the highest timestamp up to each entry. So
a search reads the table, one index, and about `INDEX_STRIDE_BYTES` of one segment, without values.

Invariants:
- Table and index only save reading: if they are missing, late or corrupt, more is read. A message that was
  found was verified.
- No retained message before the returned position has such a timestamp.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from rt.errors import Corrupt
from rt.log.disk import Disk
from rt.log.format.index import EntryKind
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.log.read.open_segment import OpenSegment, open_segment, restore_hint
from rt.log.scan.batch_decoder import UndecodableBatch, decode_each
from rt.log.scan.catalog import ReadableSegment, SegmentCatalog, read_catalog
from rt.log.scan.directory import durable_offset, read_frames, read_header, read_index
from rt.log.scan.scanner import MergedScanner, Scanner, ScanResult

_READ_BYTES: Final = 2**18


class FoundTime(NamedTuple):
    """No message before `position` has that time or a later one. If `is_message`, the message at `position`
    has.

    Otherwise `position` is the log end, or the start of a batch that cannot be decoded, or the position of
    `damage`, which ended the search. At the log end, `run` is the run of the segment that was read to its
    end, if any.
    """

    position: int
    is_message: bool = False
    run: int | None = None
    damage: Corrupt | None = None


def search_time(disk: Disk, path: str, identity: LogIdentity, timestamp_ns: int) -> FoundTime:
    """Find the first retained message of the log in `path` with a timestamp >= `timestamp_ns`.

    For a batch that cannot be decoded, the highest timestamp in its header counts. Raises `OSError`.
    """
    catalog = read_catalog(disk, path)
    highs_ns = {segment.id: segment.timestamp_high_ns for segment in catalog.listed}
    found = FoundTime(max(catalog.known_end, catalog.start))
    for kept in catalog.kept:
        if highs_ns.get(kept.id, timestamp_ns) < timestamp_ns:
            continue
        try:
            start = _indexed_start(disk, path, kept, timestamp_ns)
            segment = open_segment(disk, path, identity, kept, start)
        except Corrupt as error:
            return FoundTime(kept.first, damage=error)
        if segment is None:
            continue  # It was trimmed meanwhile.
        try:
            # Read it before the search: the segment may grow.
            synced = durable_offset(disk, path, kept.id, identity.origin)
            at = _search_segment(segment, identity, timestamp_ns)
            if at is not None:
                return at
            if segment.file.size() == 0 or not segment.file.is_linked():
                continue
            damage = _damage(catalog, segment, identity.kind, synced)
            end = max(kept.first, _reached(segment.scanner))
            found = FoundTime(end, run=segment.id.run, damage=damage)
        finally:
            segment.close()
        if found.damage is not None:
            return found
    last = catalog.kept[-1] if catalog.kept else None
    return found if last is None or last.end is None else FoundTime(max(catalog.known_end, catalog.start))


def _indexed_start(disk: Disk, path: str, kept: ReadableSegment, timestamp_ns: int) -> int:
    """A position from the index of `kept`. No message before it in `kept` has that time or a later one."""
    header = kept.header or read_header(disk, path, kept.id)
    if header is None:
        return kept.first
    frames = [entry for entry in read_index(disk, path, header) if entry.kind is EntryKind.FRAME]
    at = bisect_left(frames, timestamp_ns, key=attrgetter("timestamp_high_ns"))
    return frames[at - 1].first if at else kept.first


def _search_segment(segment: OpenSegment, identity: LogIdentity, timestamp_ns: int) -> FoundTime | None:
    """The first message of that time from the scanner's position on; None if there is none."""
    while True:
        data, scan = read_frames(segment.file.pread, segment.scanner, _READ_BYTES, values=False)
        found = _search_batches(data, scan, _names(segment.scanner, identity), timestamp_ns)
        if found is not None or scan.problem is not None or not scan.consumed:
            return found


def _search_batches(
    data: bytes, scan: ScanResult, names: dict[int, str], timestamp_ns: int
) -> FoundTime | None:
    for placed in scan.batches:
        if placed.header.timestamp_high_ns < timestamp_ns:
            continue
        for batch in decode_each(np.frombuffer(data, np.uint8), [placed], names, values=False):
            if isinstance(batch, UndecodableBatch):
                return FoundTime(batch.start)
            at = np.flatnonzero(batch.timestamps_ns >= timestamp_ns)
            if len(at):
                return FoundTime(int(batch.positions[at[0]]), is_message=True)
    return None


def _names(scanner: Scanner, identity: LogIdentity) -> dict[int, str]:
    if isinstance(scanner, MergedScanner):
        return {session_id: found.session for session_id, found in scanner.sessions.items()}
    return {0: identity.name}


def _reached(scanner: Scanner) -> int:
    return scanner.reached if isinstance(scanner, MergedScanner) else scanner.next


def _damage(catalog: SegmentCatalog, segment: OpenSegment, kind: LogKind, synced: int) -> Corrupt | None:
    """The reason why the scan ended before the known end of the segment; None if it reached the current end.

    If later segments exist, the segment ends with its file, and not before the size in the table. Otherwise
    its first `synced` bytes were synced before the scan.
    """
    scanner, size = segment.scanner, segment.file.size()
    expected = next((known.size_bytes for known in catalog.listed if known.id == segment.id), 0)
    if catalog.after(segment.id) is not None:
        expected = max(expected, size)
    expected = max(expected, synced)
    if scanner.boundary >= expected:
        return None
    return Corrupt(
        "the segment ends inside a batch, or its next frame does not verify",
        path=segment.path,
        offset=scanner.boundary,
        hint=restore_hint(kind),
    )
