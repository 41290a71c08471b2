"""The files of a log directory, and how a process that only reads finds and scans them.

    log.X.Y    segments                          index.X.Y  a sparse index of each
    segments   the table of sealed ones          durable    how far the active one is synced
    lock       held by the writer                .*.new     a temporary file; ignore leftovers

Readers take no lock. Files may be missing, or older or newer than each other, so only bytes that verify
count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import lru_cache

from rt.errors import Corrupt, InvalidName, LogNotFound, naming_file
from rt.log.disk import Disk, storage_error, storage_errors
from rt.log.format.durable_end import DURABLE_FILE, RECORD_BYTES, DurableEnd, newest_durable_end
from rt.log.format.index import IndexEntry, decode_entries, index_file_name
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
    parse_segment_name,
)
from rt.log.format.segment_table import TABLE_FILE, LogIdentity, SegmentTable, decode_table
from rt.log.scan.scanner import MergedScanner, Scanner, ScanResult

LOCK_FILE = "lock"
READ_BYTES = 2 * 2**20
"""Bytes per read: large enough to hide the system call, small enough for the processor's cache."""


def session_directory(root: str | os.PathLike[str], stream: str, session: str) -> str:
    """Where a publisher stores a session of `stream` below `root`."""
    return os.path.join(os.fspath(root), stream, "sessions", session)


def merged_directory(root: str | os.PathLike[str], stream: str) -> str:
    """Where the merged log of `stream` is stored below `root`."""
    return os.path.join(os.fspath(root), stream, "merged")


def is_log_directory(disk: Disk, path: str) -> bool:
    """Whether there is a log at `path`: a segments table, or a segment."""
    try:
        return _holds_log(disk, path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise storage_error(error, path, "listing a directory") from error


def check_log_directory(disk: Disk, path: str) -> None:
    """`rt.LogNotFound` if there is no log at `path`; `rt.StorageFailed` if a file is in its place."""
    with contextlib.suppress(LogNotFound), storage_errors(path, "opening a log"):
        if _holds_log(disk, path):
            return
    raise _no_log(path)


def _holds_log(disk: Disk, path: str) -> bool:
    names = disk.list_directory(path)
    return TABLE_FILE in names or any(parse_segment_name(name) for name in names)


def _no_log(path: str) -> LogNotFound:
    return LogNotFound("no log directory", where=path, hint="Name a directory that holds log.X.Y files.")


def read_file(disk: Disk, path: str, size: int | None = None, *, doing: str = "reading") -> bytes | None:
    """Up to `size` bytes of a file (None: all); None if there is no file. Raises storage errors."""
    with storage_errors(path, doing):
        try:
            file = disk.open(path)
        except FileNotFoundError:
            return None
        with contextlib.closing(file):
            return file.pread(file.size() if size is None else size, 0)


def list_segments(disk: Disk, path: str) -> list[SegmentId]:
    """The segments that have a file, trimmed ones included, in log order."""
    with storage_errors(path, "listing a log directory"):
        return sorted(found for name in disk.list_directory(path) if (found := parse_segment_name(name)))


def read_header(disk: Disk, path: str, segment: SegmentId) -> SegmentHeader | None:
    """The header of a segment; None if its file is empty (trimmed) or missing. Raises `rt.Corrupt`."""
    file_path = os.path.join(path, segment.file_name)
    try:
        file = disk.open(file_path)
    except FileNotFoundError:
        return None
    with contextlib.closing(file):
        head = file.pread(SEGMENT_HEADER_BYTES, 0)
    if not head:
        return None
    header = decode_segment_header(head, path=file_path)
    if header.id != segment:
        raise Corrupt("segment under another name", path=file_path, offset=0, got=header.id, expected=segment)
    return header


def read_table(disk: Disk, path: str) -> SegmentTable | None:
    """The segments table; None if there is none. Raises `rt.Corrupt` or `rt.UnknownVersion`."""
    content = read_file(disk, os.path.join(path, TABLE_FILE))
    return None if content is None else _decode_table(content, os.path.join(path, TABLE_FILE))


@lru_cache(maxsize=8)
def _decode_table(content: bytes, path: str) -> SegmentTable:
    """Cached, because a reader reads the table at every segment, and it may be long."""
    return decode_table(content, path=path)


def read_durable_end(disk: Disk, path: str) -> DurableEnd | None:
    """The end that the writer last recorded as synced; None if there is no readable record."""
    file_path = os.path.join(path, DURABLE_FILE)
    content = read_file(disk, file_path, 2 * RECORD_BYTES)
    with naming_file(file_path):
        return None if content is None else newest_durable_end(content)


def durable_offset(disk: Disk, path: str, segment: SegmentId, origin: bytes) -> int:
    """How many bytes of a segment the writer last recorded as synced; 0 if its record is of another one."""
    durable = read_durable_end(disk, path)
    is_same = durable is not None and (durable.id, durable.origin) == (segment, origin)
    return durable.offset if durable is not None and is_same else 0


def read_index(disk: Disk, path: str, header: SegmentHeader) -> list[IndexEntry]:
    """The valid entries of a segment's index, in a merged log up to the first corrupt one; empty if it has
    none.
    """
    content = read_file(disk, os.path.join(path, index_file_name(header.id)))
    if content is None:
        return []
    return list(decode_entries(content, header.seed, ends_at_corrupt=header.kind is not LogKind.SESSION))


def read_identity(disk: Disk, path: str, *, name: str = "") -> LogIdentity:
    """The directory's identity from its table. If that is lost: from a segment, with `name`, if given, or the
    directory's name.
    """
    try:
        table = read_table(disk, path)
    except Corrupt:
        table = None
    if table is not None:
        return table.identity
    for segment in list_segments(disk, path):
        header = read_header(disk, path, segment)
        if header is not None:
            found = identity_from(header, path)
            return LogIdentity(found.kind, found.origin, name or found.name)
    raise _no_log(path)


def identity_from(header: SegmentHeader, path: str) -> LogIdentity:
    """The identity of a directory whose table is lost, as far as a segment's header has it."""
    name = os.path.basename(os.path.abspath(path))
    try:
        return LogIdentity(header.kind, header.origin, name)
    except InvalidName:
        return LogIdentity(header.kind, header.origin, "unknown")


def scans(
    pread: Callable[[int, int], bytes],
    scanner: Scanner,
    *,
    values: bool = True,
    read_bytes: int | None = None,
) -> Iterator[ScanResult]:
    """Scan a file from `scanner.offset` to the end of its valid frames, one read (of `read_bytes`) at a time.

    The last scan says why it stopped. Each read is done by `read_frames`.
    """
    size = READ_BYTES if read_bytes is None else read_bytes
    while True:
        data, scan = read_frames(pread, scanner, size, values=values)
        is_last = scan.problem is not None or not scan.consumed or len(data) < size
        del data  # The caller may wait long: a frame may have 256 MiB.
        yield scan
        if is_last:
            return


def read_frames(
    pread: Callable[[int, int], bytes],
    scanner: Scanner,
    size: int,
    *,
    values: bool = True,
    reaches: Callable[[int], bool] | None = None,
) -> tuple[bytes, ScanResult]:
    """Read `size` bytes at `scanner.offset`, or as many as the next frame needs, and scan them.

    Without values, in a merged log, only the columns of a larger frame are read. A frame that is not complete
    is not read again: `reaches(offset)` returns whether the file is that long, by default with a read.
    """
    reaches = reaches or (lambda offset: len(pread(1, offset - 1)) == 1)
    while True:
        data = pread(size, scanner.offset)
        if values or not isinstance(scanner, MergedScanner):
            scan = scanner.scan(memoryview(data), values=values)
        else:
            scan = scanner.scan_columns(memoryview(data), reaches)
        is_larger = scan.problem is None and not scan.consumed and scan.needed > size == len(data)
        if not is_larger or not reaches(scanner.offset + scan.needed):
            return data, scan
        size = scan.needed
