"""Check a segment that others may read, and overwrite its bad bytes from a good copy.

Invariants:
- Only frames known to be synced are checked, so bytes that are being written never count as corrupt.
- The good copy was verified completely, and starts with the valid part of this segment. So a crash in the
  middle leaves bytes that are good or still fail their checksums.
- The file is overwritten in place: readers that have it open continue.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from rt.errors import Corrupt, Diverged
from rt.log.disk import Disk, File
from rt.log.format.segment import SegmentId
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import READ_BYTES, durable_offset, list_segments, read_header, read_table, scans
from rt.log.scan.scanner import scanner_for

CHECK_BYTES = 2**20
"""Bytes to check per step: some tenths of a millisecond."""


def synced_end(disk: Disk, path: str, segment: SegmentId) -> int:
    """How many bytes of a segment are known to be synced; 0 if none, or if it is trimmed."""
    table = read_table(disk, path)
    listed = table.find(segment) if table else None
    if listed is not None:
        return 0 if listed.is_trimmed else listed.size_bytes
    if any(later > segment for later in list_segments(disk, path)):
        return disk.size(segment_path(path, segment)) or 0  # It was sealed before the table was lost.
    return durable_offset(disk, path, segment, table.identity.origin) if table else 0


def check_segment(disk: Disk, path: str, segment: SegmentId, end: int) -> Iterator[int]:
    """Verify the frames of a segment up to `end`; yields the bytes read after each small step.

    Raises `rt.Corrupt` if they do not verify, `FileNotFoundError` if there is no file.
    """
    file_path = segment_path(path, segment)
    header = read_header(disk, path, segment)
    if header is None or header.id != segment:
        raise Corrupt("the segment has no valid header", path=file_path, offset=0)
    scanner, read_bytes, problem = scanner_for(header), 0, "cut short"

    def pread(size: int, offset: int) -> bytes:
        nonlocal read_bytes
        data = _pread(file, file_path, size, offset)
        read_bytes += len(data)
        return data

    with contextlib.closing(disk.open(file_path)) as file:
        for scan in scans(pread, scanner, read_bytes=CHECK_BYTES) if scanner.boundary < end else ():
            yield read_bytes
            if scanner.boundary >= end:
                return
            read_bytes, problem = 0, scan.problem or problem
    if scanner.boundary < end:
        raise Corrupt(problem, path=file_path, offset=scanner.boundary, expected=f"whole up to {end}")


def valid_end(disk: Disk, path: str, segment: SegmentId, end: int) -> int:
    """The offset up to which the frames of a segment verify, at most `end`; 0 if its header does not
    verify.
    """
    try:
        for _ in check_segment(disk, path, segment, end):
            pass
    except Corrupt as error:
        return error.offset
    except FileNotFoundError:
        return 0
    return end


def repair_segment(disk: Disk, path: str, good_path: str, segment: SegmentId, end: int) -> int:
    """Overwrite bytes below `end` that differ from the copy in `good_path`; returns their count. Durable on
    return.

    The caller has verified the copy up to `end`. Raises `rt.Diverged`, with nothing changed, if it is not a
    copy of this segment; `OSError` as the disk does. If the file is missing, the copy takes its place. A
    segment that is trimmed meanwhile stays empty.
    """
    file_path, source_path = segment_path(path, segment), segment_path(good_path, segment)
    sound = valid_end(disk, path, segment, end)
    source = disk.open(source_path)
    try:
        if not disk.size(file_path):
            if not synced_end(disk, path, segment):
                return 0  # It was trimmed meanwhile.
            source.sync()
            disk.rename(source_path, file_path)
            disk.sync_directory(path)
            changed = end
        else:
            with contextlib.closing(disk.open(file_path, write=True)) as file:
                changed = _overwrite(file, source, file_path, sound, end)
                file.sync()
    except Diverged:
        if synced_end(disk, path, segment):
            raise
        changed = 0  # It was emptied while it was compared.
    finally:
        source.close()
    if not synced_end(disk, path, segment):
        _empty(disk, file_path)  # A trim is recorded first, and may have emptied the file before this write.
        return 0
    return changed


def _empty(disk: Disk, file_path: str) -> None:
    with contextlib.closing(disk.open(file_path, write=True)) as file:
        file.truncate(0)


def _overwrite(file: File, source: File, file_path: str, sound: int, end: int) -> int:
    for start in range(0, sound, READ_BYTES):
        size = min(READ_BYTES, sound - start)
        if file.pread(size, start) != source.pread(size, start):
            raise Diverged(
                "a peer's copy differs from the valid part of this segment",
                where=f"{file_path}, below offset {sound}",
                hint="`rt log compare` shows where two copies differ.",
            )
    changed = 0
    for start in range(sound, end, READ_BYTES):
        good = source.pread(min(READ_BYTES, end - start), start)
        try:
            has = file.pread(len(good), start)
        except OSError:  # Unreadable bytes may still be writable.
            has = b""
        if has != good:
            changed += sum(a != b for a, b in zip(has, good, strict=False)) + len(good) - len(has)
            _write(file, good, start)
    return changed


def _write(file: File, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = file.pwritev([view], offset)
        if count == 0:
            raise OSError(errno.ENOSPC, "short write")
        view, offset = view[count:], offset + count


def _pread(file: File, path: str, size: int, offset: int) -> bytes:
    try:
        return file.pread(size, offset)
    except OSError as error:
        raise Corrupt(f"cannot be read: {error}", path=path, offset=offset) from error
