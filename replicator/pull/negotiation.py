"""Where a pull begins: what the receiver says it has is held against this node's own log.

Law: a receiver goes on only where its bytes are shown to be the same as here, by the position and the header
checksum of its last block, or by the session's chain. Where this node has less, it says so and nothing is
judged; where it has trimmed what comes next, it begins at its log start.
"""

from __future__ import annotations

from typing import NamedTuple

from replicator.protocol.handshake import PullMerged, PullSession
from replicator.protocol.last_block import last_block_before, reaches_beyond, walk_to
from replicator.protocol.messages import Chunk, LogOffset
from replicator.send.segment_reader import SegmentReader
from rt.errors import Diverged, LogNotFound
from rt.log.disk import Disk, File, storage_errors
from rt.log.format.block import BLOCK_HEADER_BYTES, DECLARATION_BYTES_MAX, decode_block_header
from rt.log.format.checksum import batch_seed
from rt.log.format.index import EntryKind
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader
from rt.log.read.reader import LogReader
from rt.log.scan.catalog import ReadableSegment, SegmentCatalog, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import is_log_directory, read_header, read_identity, read_index, scans
from rt.log.scan.scanner import MergedScanner, SessionScanner
from rt.log.write.segment_repair import synced_end
from rt.net.grpc_errors import NothingMergedYet, Unreachable

_COMPARE = (
    "`rt log compare` shows where two copies part; a copy that is wrong is moved away and pulled again."
)


class PullPlan(NamedTuple):
    """Chunks go on from `place`, which is position (or number) `first`."""

    place: LogOffset
    first: int


class RangePlan(NamedTuple):
    """Where the blocks of a range lie, and what a reader must know of their segment first.

    `first_items` are its header and the declarations before them. They end at `end_place`; None if that is
    not here yet.
    """

    place: LogOffset
    first: int
    first_items: list[Chunk]
    end_place: LogOffset | None


class MidLogStart(NamedTuple):
    """A place within a segment of the merged log, from which a filter reads on."""

    place: LogOffset
    scanner: MergedScanner
    header: SegmentHeader


def begin_merged(disk: Disk, path: str, wanted: PullMerged) -> PullPlan:
    """Where a pull of the whole merged log begins.

    `rt.Diverged` if what the receiver has is not what is here, `Unreachable` if this node has less.
    """
    with storage_errors(path, "reading a log to begin a pull"):
        catalog = _catalog(disk, path)
        if wanted.place is None:
            return _fresh(catalog, wanted)
        _check_not_beyond(catalog, wanted)
        kept = _kept_at(catalog, wanted.place)
        if kept is None:
            return _at_log_start(catalog, wanted)
        if wanted.place.offset == 0:
            _check_position(kept.first, wanted)
        else:
            _check_last_block(disk, path, kept, wanted.place, wanted)
        return PullPlan(wanted.place, wanted.end)


def check_next_block(disk: Disk, path: str, place: LogOffset) -> None:
    """Verify the block at `place`, values included, if it is known to be synced.

    A receiver that was sent bytes which do not verify comes back to where they begin. `rt.Corrupt` then.
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
            try:
                reader.check_next()
            finally:
                reader.close()


def begin_filtered(disk: Disk, path: str, wanted: PullMerged) -> tuple[PullPlan, MidLogStart | None]:
    """Where a filtered pull begins, and where in the merged log reading for it does, if within a segment."""
    with storage_errors(path, "reading a log to begin a pull"):
        catalog = _catalog(disk, path)
        if wanted.place is None:
            return _fresh(catalog, wanted), None
        _check_not_beyond(catalog, wanted)
        kept = catalog.find(wanted.end)
        if kept is None or kept.id < wanted.place.segment:
            raise _behind(wanted)
        if kept.first > wanted.end:
            return _at_log_start(catalog, wanted), None
        if kept.id > wanted.place.segment:
            return PullPlan(LogOffset(*kept.id, 0), kept.first), None
        found = _open(disk, path, kept)
        if found is None:
            raise _behind(wanted)
        header, file = found
        try:
            scanner = scanner_at(disk, path, header, file, wanted.end)
        finally:
            file.close()
        assert isinstance(scanner, MergedScanner)
        return PullPlan(wanted.place, wanted.end), MidLogStart(
            LogOffset(*header.id, scanner.offset), scanner, header
        )


def begin_range(disk: Disk, path: str, start: int, end: int) -> RangePlan:
    """Where the blocks from position `start` up to `end` lie; from the log start on, if that is behind
    `start`.

    `Unreachable` if this node has less than that.
    """
    with storage_errors(path, "reading a log to begin a pull"):
        if log_end(disk, path) < end:
            raise Unreachable(
                "this node has less of the log than is wanted", expected=end, hint="Ask another."
            )
        catalog = _catalog(disk, path)
        kept = catalog.find(start)
        found = None if kept is None else _open(disk, path, kept)
        if kept is None or found is None:
            raise Unreachable("the log is being trimmed", hint="Ask again.")
        header, file = found
        try:
            scanner = scanner_at(disk, path, header, file, start)
            items = _introduction(disk, path, header, file, scanner.offset)
        finally:
            file.close()
        return RangePlan(
            LogOffset(*kept.id, scanner.offset), scanner.next, items, _place_behind(disk, path, catalog, end)
        )


def begin_session(disk: Disk, path: str, wanted: PullSession) -> PullPlan:
    """Where a pull of a session's copy begins; the errors of `begin_merged`."""
    with storage_errors(path, "reading a log to begin a pull"):
        catalog = _catalog(disk, path)
        if not catalog.kept:
            raise _behind(wanted)
        kept = _kept_at(catalog, wanted.place)
        if kept is None:
            later = next((later for later in catalog.kept if later.id > wanted.place.segment), None)
            if later is None:
                raise _behind(wanted)
            return PullPlan(LogOffset(*later.id, 0), later.first)
        if wanted.place.offset == 0:
            return PullPlan(wanted.place, kept.first)
        return PullPlan(wanted.place, _check_chain(disk, path, kept, wanted))


def log_end(disk: Disk, path: str) -> int:
    """One past the last position of the merged log as it is now; looks at the newest segment's last hop."""
    with LogReader(path, position="latest", disk=disk) as reader:
        return reader.position


def _catalog(disk: Disk, path: str) -> SegmentCatalog:
    if not is_log_directory(disk, path):
        raise _nothing(path)
    try:
        return read_catalog(disk, path)
    except LogNotFound as error:
        raise _nothing(path) from error


def _fresh(catalog: SegmentCatalog, wanted: PullMerged) -> PullPlan:
    """The start of the segment that holds the position: a copy has whole segments."""
    if not catalog.kept:
        raise _nothing("the merged log")
    kept: ReadableSegment | None = catalog.kept[0]
    if wanted.position == "latest":
        kept = catalog.kept[-1]
    elif wanted.position != "earliest":
        kept = catalog.find(wanted.position)
    assert kept is not None
    return PullPlan(LogOffset(*kept.id, 0), kept.first)


def _introduction(disk: Disk, path: str, header: SegmentHeader, file: File, offset: int) -> list[Chunk]:
    """The header of a segment, and the declarations before `offset`, each at its place."""
    items = [Chunk(LogOffset(*header.id, 0), file.pread(SEGMENT_HEADER_BYTES, 0))]
    for entry in read_index(disk, path, header) if offset > SEGMENT_HEADER_BYTES else []:
        if entry.kind is EntryKind.DECLARATION and entry.offset < offset:
            head = file.pread(BLOCK_HEADER_BYTES + DECLARATION_BYTES_MAX, entry.offset)
            block = decode_block_header(head, 0, batch_seed(header.seed, entry.offset))
            items.append(
                Chunk(LogOffset(*header.id, entry.offset), head[: BLOCK_HEADER_BYTES + block.length_bytes])
            )
    return items


def _place_behind(disk: Disk, path: str, catalog: SegmentCatalog, end: int) -> LogOffset | None:
    """The end of the block that holds the position before `end`; None if it is not whole yet."""
    kept = catalog.find(end - 1)
    found = None if kept is None else _open(disk, path, kept)
    if kept is None or found is None:
        return None
    header, file = found
    try:
        scanner = scanner_at(disk, path, header, file, end - 1)
        for scan in scans(file.pread, scanner, values=False):
            for block in scan.blocks:
                if block.header.end >= end:
                    behind = block.offset + BLOCK_HEADER_BYTES + block.header.length_bytes
                    return LogOffset(*header.id, behind)
    finally:
        file.close()
    return None


def _kept_at(catalog: SegmentCatalog, place: LogOffset) -> ReadableSegment | None:
    return next((kept for kept in catalog.kept if kept.id == place.segment), None)


def _at_log_start(catalog: SegmentCatalog, wanted: PullMerged) -> PullPlan:
    """The segment that the receiver is in is not here: trimmed, or not merged yet."""
    assert wanted.place is not None
    later = next((kept for kept in catalog.kept if kept.id > wanted.place.segment), None)
    if later is None:
        raise _behind(wanted)
    if later.first < wanted.end:
        raise _diverged(wanted, f"log.{later.id.run}.{later.id.roll} begins with position {later.first}")
    return PullPlan(LogOffset(*later.id, 0), later.first)


def _check_not_beyond(catalog: SegmentCatalog, wanted: PullMerged) -> None:
    """The log goes on in another X, behind a reset: a receiver must not have gone further in the one before.

    One that has followed a node without which the cluster was forced to go on. By its topics alone a filtered
    copy would not show it.
    """
    assert wanted.place is not None
    run = wanted.place.run
    known = [(one.id.run, one.first) for one in catalog.kept] + [
        (one.id.run, one.first) for one in catalog.trimmed()
    ]
    first = min((first for later, first in known if later > run), default=wanted.end)
    if first < wanted.end:
        raise _diverged(wanted, f"X {run} ends at position {first}")


def _check_last_block(
    disk: Disk, path: str, kept: ReadableSegment, place: LogOffset, wanted: PullMerged
) -> None:
    """The block that ends at `place` is here, and is the receiver's.

    A receiver that has trimmed its last block cannot show it (0): then its position must do.
    """
    found = _open(disk, path, kept)
    if found is None:
        raise _behind(wanted)
    header, file = found
    try:
        last = last_block_before(disk, path, header, file, place.offset)
    finally:
        file.close()
    if last.boundary < place.offset and kept.end is None and not last.goes_beyond:
        raise _behind(wanted)
    if last.boundary != place.offset or wanted.chain not in {0, last.checksum}:
        raise _diverged(wanted, f"block checksum {last.checksum:#010x}")
    _check_position(last.next, wanted)


def _check_position(position: int, wanted: PullMerged) -> None:
    if position != wanted.end:
        raise _diverged(wanted, f"position {position}")


def _check_chain(disk: Disk, path: str, kept: ReadableSegment, wanted: PullSession) -> int:
    """The number that follows `wanted.place`, up to which the segment's chain is the receiver's."""
    found = _open(disk, path, kept)
    if found is None:
        raise _behind(wanted)
    header, file = found
    try:
        scanner = SessionScanner(header, marks=True)
        walk_to(file, scanner, wanted.place.offset)
        has_less = kept.end is None and not reaches_beyond(file, scanner, wanted.place.offset)
    finally:
        file.close()
    if scanner.offset < wanted.place.offset and has_less:
        raise _behind(wanted)
    if scanner.offset != wanted.place.offset or scanner.chain != wanted.chain:
        raise _diverged(wanted, f"chain {scanner.chain or 0:#010x} at offset {scanner.offset}")
    return scanner.next


def _open(disk: Disk, path: str, kept: ReadableSegment) -> tuple[SegmentHeader, File] | None:
    """A segment and its header; None if it was trimmed meanwhile."""
    try:
        header = kept.header or read_header(disk, path, kept.id)
        return None if header is None else (header, disk.open(segment_path(path, kept.id)))
    except FileNotFoundError:
        return None


def _behind(wanted: PullMerged | PullSession) -> Unreachable:
    return Unreachable(
        "this node has less of the log than the receiver", got=wanted.place, hint="Ask another."
    )


def _nothing(where: str) -> NothingMergedYet:
    return NothingMergedYet("there is nothing to pull yet", where=where)


def _diverged(wanted: PullMerged | PullSession, here: str) -> Diverged:
    end = f", position {wanted.end}" if isinstance(wanted, PullMerged) else ""
    got = f"{wanted.place}{end}, checksum {wanted.chain:#010x}"
    return Diverged("the receiver's copy is not this log", got=got, expected=here, hint=_COMPARE)
