"""Finds where a pull begins: compares the data that the receiver reports with this node's log.

Invariants:
- A receiver continues only where its bytes are proved to be the same as here, by the position and the header
  checksum of its last block, or by the session's running checksum.
- If this node has less, it reports that and judges nothing. If it has trimmed the data that comes next, the
  pull begins at its log start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from replicator.protocol.handshake import PullMerged, PullSession, TimeFound
from replicator.protocol.last_block import last_block_before, reaches_beyond, walk_to
from replicator.protocol.messages import Chunk, LogOffset
from replicator.send.segment_reader import SegmentReader
from rt.errors import Corrupt, Diverged, LogNotFound
from rt.log.disk import Disk, File, storage_errors
from rt.log.format.block import BLOCK_HEADER_BYTES, DECLARATION_BYTES_MAX, decode_block_header
from rt.log.format.checksum import batch_seed
from rt.log.format.index import EntryKind
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader
from rt.log.read.log_source import NO_END
from rt.log.read.reader import LogReader
from rt.log.read.start_position import StartTime
from rt.log.read.time_search import search_time
from rt.log.scan.catalog import ReadableSegment, SegmentCatalog, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import is_log_directory, read_header, read_identity, read_index, scans
from rt.log.scan.scanner import MergedScanner, SessionScanner
from rt.log.write.segment_repair import synced_end
from rt.net.grpc_errors import NothingMergedYet, Unreachable

_COMPARE = "`rt log compare` shows where two copies begin to differ."
_COPY_AGAIN = (
    "This happens, for example, after a restore or a forced reset. Move the copy away: it is copied from the "
    "nodes again. Then start at the first position that differs, or at your acknowledged one if it is lower."
)


class PullPlan(NamedTuple):
    """Chunks go on from `offset`, which is position (or number) `first`."""

    offset: LogOffset
    first: int


class MidLogStart(NamedTuple):
    """An offset within a segment of the merged log, from which a filter reads on."""

    offset: LogOffset
    scanner: MergedScanner
    header: SegmentHeader


class RangePlan(NamedTuple):
    """The offsets of the blocks of a range, and the items that a reader needs before them.

    `first_items` are the header of the segment and the declarations before the blocks. The blocks end at
    `end_offset`; None if that offset is not here yet. A filter reads on from `middle`.
    """

    offset: LogOffset
    first: int
    first_items: list[Chunk]
    end_offset: LogOffset | None
    middle: MidLogStart


def plan_merged(disk: Disk, path: str, wanted: PullMerged) -> PullPlan:
    """Where a pull of the whole merged log begins.

    `rt.Diverged` if the receiver has other bytes than this node, `Unreachable` if this node has less.
    """
    with storage_errors(path, "reading a log to begin a pull"):
        catalog = _catalog(disk, path)
        if wanted.offset is None:
            return _plan_new_copy(catalog, wanted)
        _check_not_beyond(catalog, wanted)
        kept = _kept_at(catalog, wanted.offset)
        if kept is None:
            return _at_log_start(catalog, wanted)
        if wanted.offset.offset == 0:
            _check_position(kept.first, wanted)
        else:
            _check_last_block(disk, path, kept, wanted.offset, wanted)
        return PullPlan(wanted.offset, wanted.end)


def check_next_block(disk: Disk, path: str, place: LogOffset) -> None:
    """Verify the block at `place`, values included, if it is known to be synced. `rt.Corrupt` if it does not
    verify.

    A receiver that was sent corrupt bytes asks again for bytes from where they begin.
    """
    with storage_errors(path, "reading a log to begin a pull"):
        if place.offset >= synced_end(disk, path, place.segment):
            return
        identity = read_identity(disk, path)
        try:
            reader = SegmentReader.open(disk, path, place.segment, identity, offset=place.offset)
        except FileNotFoundError:
            return
        if reader is not None:
            with contextlib.closing(reader):
                reader.check_next()


def plan_filtered(disk: Disk, path: str, wanted: PullMerged) -> tuple[PullPlan, MidLogStart | None]:
    """Where a filtered pull begins, and where reading the merged log does, if within a segment."""
    with storage_errors(path, "reading a log to begin a pull"):
        catalog = _catalog(disk, path)
        if wanted.offset is None:
            return _plan_new_copy(catalog, wanted), None
        _check_not_beyond(catalog, wanted)
        kept = catalog.find(wanted.end)
        if kept is None or kept.id < wanted.offset.segment:
            raise _has_less(wanted)
        if kept.first > wanted.end:
            return _at_log_start(catalog, wanted), None
        if kept.id > wanted.offset.segment:
            return PullPlan(LogOffset(*kept.id, 0), kept.first), None
        with _opened(disk, path, kept) as found:
            if found is None:
                raise _has_less(wanted)
            header, file = found
            scanner = scanner_at(disk, path, header, file, wanted.end)
        assert isinstance(scanner, MergedScanner)
        middle = MidLogStart(LogOffset(*header.id, scanner.offset), scanner, header)
        return PullPlan(wanted.offset, wanted.end), middle


def plan_range(disk: Disk, path: str, start: int, end: int) -> RangePlan:
    """Find the blocks from position `start` (or the log start, if later) up to `end`.

    `Unreachable` if this node's log does not reach `end`. If the range has no end: if the log does not reach
    `start`.
    """
    needed = start if end == NO_END else end
    with storage_errors(path, "reading a log to begin a pull"):
        if log_end(disk, path) < needed:
            raise Unreachable(
                "this node has less of the log than was requested", expected=needed, hint="Ask another."
            )
        catalog = _catalog(disk, path)
        with _opened(disk, path, catalog.find(start)) as found:
            if found is None:
                raise Unreachable("the log is being trimmed", hint="Ask again.")
            header, file = found
            scanner = scanner_at(disk, path, header, file, start)
            items = _introduction(disk, path, header, file, scanner.offset)
        assert isinstance(scanner, MergedScanner)
        place = LogOffset(*header.id, scanner.offset)
        end_place = None if end == NO_END else _block_end(disk, path, catalog, end)
        return RangePlan(place, scanner.next, items, end_place, MidLogStart(place, scanner, header))


def plan_session(disk: Disk, path: str, wanted: PullSession) -> PullPlan:
    """Where a pull of a session replica begins; the errors of `plan_merged`."""
    with storage_errors(path, "reading a log to begin a pull"):
        catalog = _catalog(disk, path)
        if not catalog.kept:
            raise _has_less(wanted)
        kept = _kept_at(catalog, wanted.offset)
        if kept is None:
            later = next((later for later in catalog.kept if later.id > wanted.offset.segment), None)
            if later is None:
                raise _has_less(wanted)
            return PullPlan(LogOffset(*later.id, 0), later.first)
        if wanted.offset.offset == 0:
            return PullPlan(wanted.offset, kept.first)
        return PullPlan(wanted.offset, _check_chain(disk, path, kept, wanted))


def find_time(disk: Disk, path: str, wanted: PullMerged, timestamp_ns: int) -> TimeFound:
    """Where the first message with that timestamp or a later one is; the log end if there is none.

    If the search finds corrupt data before that message, a copy begins at the corrupt data. Its reader gets a
    report, unless another node has the bytes. For a range, `rt.Corrupt`.
    """
    with storage_errors(path, "looking for a time to begin a pull"):
        _catalog(disk, path)
        found = search_time(disk, path, read_identity(disk, path), timestamp_ns)
    if found.damage is not None and wanted.range is not None:
        raise found.damage
    return TimeFound(found.position, found.is_message)


def log_end(disk: Disk, path: str) -> int:
    """One past the last position of the merged log now, from the newest segment's last index entry."""
    with LogReader(path, position="latest", disk=disk) as reader:
        return reader.position


def _catalog(disk: Disk, path: str) -> SegmentCatalog:
    if not is_log_directory(disk, path):
        raise _nothing_merged(path)
    try:
        return read_catalog(disk, path)
    except LogNotFound as error:
        raise _nothing_merged(path) from error


def _plan_new_copy(catalog: SegmentCatalog, wanted: PullMerged) -> PullPlan:
    """The start of the segment that holds the position: a copy has whole segments."""
    assert not isinstance(wanted.position, StartTime)
    if not catalog.kept:
        raise _nothing_merged("the merged log")
    kept: ReadableSegment | None = catalog.kept[0]
    if wanted.position == "latest":
        kept = catalog.kept[-1]
    elif wanted.position != "earliest":
        kept = catalog.find(wanted.position)
    assert kept is not None
    return PullPlan(LogOffset(*kept.id, 0), kept.first)


def _introduction(disk: Disk, path: str, header: SegmentHeader, file: File, offset: int) -> list[Chunk]:
    """The header of a segment, and the declarations before `offset`, each at its offset."""
    items = [Chunk(LogOffset(*header.id, 0), file.pread(SEGMENT_HEADER_BYTES, 0))]
    for entry in read_index(disk, path, header) if offset > SEGMENT_HEADER_BYTES else []:
        if entry.kind is EntryKind.DECLARATION and entry.offset < offset:
            head = file.pread(BLOCK_HEADER_BYTES + DECLARATION_BYTES_MAX, entry.offset)
            block = decode_block_header(head, 0, batch_seed(header.seed, entry.offset))
            items.append(
                Chunk(LogOffset(*header.id, entry.offset), head[: BLOCK_HEADER_BYTES + block.length_bytes])
            )
    return items


def _block_end(disk: Disk, path: str, catalog: SegmentCatalog, end: int) -> LogOffset | None:
    """The end of the block that holds the position before `end`; None if it is not whole yet."""
    with _opened(disk, path, catalog.find(end - 1)) as found:
        if found is None:
            return None
        header, file = found
        scanner = scanner_at(disk, path, header, file, end - 1)
        for scan in scans(file.pread, scanner, values=False):
            for block in scan.blocks:
                if block.header.end >= end:
                    after = block.offset + BLOCK_HEADER_BYTES + block.header.length_bytes
                    return LogOffset(*header.id, after)
    return None


def _kept_at(catalog: SegmentCatalog, place: LogOffset) -> ReadableSegment | None:
    return next((kept for kept in catalog.kept if kept.id == place.segment), None)


def _at_log_start(catalog: SegmentCatalog, wanted: PullMerged) -> PullPlan:
    """Plan a pull when the receiver's current segment is not here: it was trimmed, or is not merged yet."""
    assert wanted.offset is not None
    later = next((kept for kept in catalog.kept if kept.id > wanted.offset.segment), None)
    if later is None:
        raise _has_less(wanted)
    if later.first < wanted.end:
        raise _diverged(wanted, f"log.{later.id.run}.{later.id.roll} begins with position {later.first}")
    return PullPlan(LogOffset(*later.id, 0), later.first)


def _check_not_beyond(catalog: SegmentCatalog, wanted: PullMerged) -> None:
    """After a reset the log continues as `log.X` of a later X. Check that the receiver does not have more of
    the earlier X.

    It has more if it followed a node that a forced reset left out. The topics of a filtered copy would not
    show that.
    """
    assert wanted.offset is not None
    run = wanted.offset.run
    kept = [one.first for one in catalog.kept if one.id.run > run]
    first = min(kept + [one.first for one in catalog.trimmed() if one.id.run > run], default=wanted.end)
    if first < wanted.end:
        raise _diverged(wanted, f"log.{run} ends at position {first}")


def _check_last_block(
    disk: Disk, path: str, kept: ReadableSegment, place: LogOffset, wanted: PullMerged
) -> None:
    """Check that the block that ends at `place` is here, and is the same as the receiver's.

    A receiver that has trimmed its last block cannot prove it (checksum 0). Then its position decides.
    """
    with _opened(disk, path, kept) as found:
        if found is None:
            raise _has_less(wanted)
        last = last_block_before(disk, path, *found, place.offset)
    if last.boundary < place.offset and not last.goes_beyond:
        _check_whole(path, kept, wanted, last.boundary, last.next)
    if last.boundary != place.offset or wanted.chain not in {0, last.checksum}:
        raise _diverged(wanted, f"block checksum {last.checksum:#010x}")
    _check_position(last.next, wanted)


def _check_whole(
    path: str, kept: ReadableSegment, wanted: PullMerged | PullSession, offset: int, position: int
) -> None:
    """Handle that this node's bytes end, or do not verify any more, at `offset` and `position`, before the
    receiver's end.

    `Unreachable` if more bytes may come. `rt.Corrupt` if the segment table has a later end. Then the file is
    corrupt here, and proves nothing about the receiver's copy.
    """
    if kept.end is None:
        raise _has_less(wanted)
    if position < kept.end:
        raise Corrupt(
            "the segment ends too early",
            path=segment_path(path, kept.id),
            offset=offset,
            got=f"position {position}",
            expected=f"position {kept.end}",
        )


def _check_position(position: int, wanted: PullMerged) -> None:
    if position != wanted.end:
        raise _diverged(wanted, f"position {position}")


def _check_chain(disk: Disk, path: str, kept: ReadableSegment, wanted: PullSession) -> int:
    """The number after `wanted.offset`, if the segment's running checksum there is the receiver's."""
    with _opened(disk, path, kept) as found:
        if found is None:
            raise _has_less(wanted)
        header, file = found
        scanner = SessionScanner(header, marks=True)
        walk_to(file, scanner, wanted.offset.offset)
        goes_beyond = reaches_beyond(file, scanner, wanted.offset.offset)
    if scanner.offset < wanted.offset.offset and not goes_beyond:
        _check_whole(path, kept, wanted, scanner.offset, scanner.next)
    if scanner.offset != wanted.offset.offset or scanner.chain != wanted.chain:
        raise _diverged(wanted, f"chain {scanner.chain or 0:#010x} at offset {scanner.offset}")
    return scanner.next


@contextlib.contextmanager
def _opened(
    disk: Disk, path: str, kept: ReadableSegment | None
) -> Iterator[tuple[SegmentHeader, File] | None]:
    """The header and the file of a segment; None if there is none, or it was trimmed meanwhile."""
    try:
        header = None if kept is None else kept.header or read_header(disk, path, kept.id)
        file = None if kept is None else disk.open(segment_path(path, kept.id))
    except FileNotFoundError:
        header = file = None
    with contextlib.nullcontext() if file is None else contextlib.closing(file):
        yield None if header is None or file is None else (header, file)


def _has_less(wanted: PullMerged | PullSession) -> Unreachable:
    return Unreachable(
        "this node has less of the log than the receiver", got=wanted.offset, hint="Ask another."
    )


def _nothing_merged(where: str) -> NothingMergedYet:
    return NothingMergedYet("there is nothing to pull yet", where=where)


def _diverged(wanted: PullMerged | PullSession, here: str) -> Diverged:
    end, hint = "", _COMPARE
    if isinstance(wanted, PullMerged):
        end, hint = f", position {wanted.end}", f"{_COPY_AGAIN} {_COMPARE}"
    got = f"{wanted.offset}{end}, checksum {wanted.chain:#010x}"
    return Diverged("the receiver's copy differs from the nodes' log", got=got, expected=here, hint=hint)
