"""A log directory as it stands on disk: what its files are called, and how a process that only reads sees it.

    log.X.Y    segments                          index.X.Y  a sparse index of each
    segments   the table of sealed ones          durable    how far the active one is synced
    lock       held by the writer                .*.new     being written aside; a leftover means nothing

Readers take no lock. They may find any of the files missing, older or newer than another; only what verifies
counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache

from rt.errors import Damaged, InvalidName, NotALog
from rt.log.disk import Disk, storage_error, storage_errors
from rt.log.durable import DURABLE_FILE, RECORD_BYTES, DurableEnd, newest_durable_end
from rt.log.frames import Scan, Scanner
from rt.log.index import IndexEntry, decode_entries, index_file_name
from rt.log.segment import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
    parse_segment_name,
)
from rt.log.table import TABLE_FILE, Identity, Table, decode_table

LOCK_FILE = "lock"
READ_BYTES = 2 * 2**20
"""One read: large enough to hide the system call, small enough to stay in the processor's cache."""


def session_directory(root: str | os.PathLike[str], stream: str, session: str) -> str:
    """Where a publisher keeps a session of `stream` below `root`."""
    return os.path.join(os.fspath(root), stream, "sessions", session)


def merged_directory(root: str | os.PathLike[str], stream: str) -> str:
    """Where the merged log of `stream` lies below `root`."""
    return os.path.join(os.fspath(root), stream, "merged")


def is_log_directory(disk: Disk, path: str) -> bool:
    """Whether there is a log at `path`: a segments table, or a segment."""
    try:
        names = disk.list_directory(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise storage_error(error, path, "listing a directory") from error
    return TABLE_FILE in names or any(parse_segment_name(name) for name in names)


def _read_file(disk: Disk, path: str, size: int | None = None) -> bytes | None:
    with storage_errors(path, "reading"):
        try:
            file = disk.open(path)
        except FileNotFoundError:
            return None
        try:
            return file.pread(file.size() if size is None else size, 0)
        finally:
            file.close()


def list_segments(disk: Disk, path: str) -> list[SegmentId]:
    """The segments that have a file, trimmed ones included, in log order."""
    with storage_errors(path, "listing a log directory"):
        return sorted(found for name in disk.list_directory(path) if (found := parse_segment_name(name)))


def read_header(disk: Disk, path: str, segment: SegmentId) -> SegmentHeader | None:
    """The header of a segment; None if its file is empty (trimmed) or gone. `rt.Damaged` if it is bad."""
    file_path = os.path.join(path, segment.file_name)
    try:
        file = disk.open(file_path)
    except FileNotFoundError:
        return None
    try:
        head = file.pread(SEGMENT_HEADER_BYTES, 0)
    finally:
        file.close()
    if not head:
        return None
    header = decode_segment_header(head, path=file_path)
    if header.id != segment:
        raise Damaged("segment under another name", path=file_path, offset=0, got=header.id, wanted=segment)
    return header


def read_table(disk: Disk, path: str) -> Table | None:
    """The segments table; None if there is none. `rt.Damaged` or `rt.UnknownVersion` if it cannot be used."""
    content = _read_file(disk, os.path.join(path, TABLE_FILE))
    return None if content is None else _decode_table(content, os.path.join(path, TABLE_FILE))


@lru_cache(maxsize=8)
def _decode_table(content: bytes, path: str) -> Table:
    """The same bytes are decoded once: a reader looks at the table at every segment, and it may be long."""
    return decode_table(content, path=path)


def read_durable_end(disk: Disk, path: str) -> DurableEnd | None:
    """What the writer last recorded as synced; None if nothing (readable)."""
    content = _read_file(disk, os.path.join(path, DURABLE_FILE), 2 * RECORD_BYTES)
    return None if content is None else newest_durable_end(content)


def read_index(disk: Disk, path: str, header: SegmentHeader) -> list[IndexEntry]:
    """The valid entries of a segment's index; none if it has none."""
    content = _read_file(disk, os.path.join(path, index_file_name(header.id)))
    return [] if content is None else list(decode_entries(content, header.seed))


def read_identity(disk: Disk, path: str) -> Identity:
    """What the directory is: from its table; where that is lost, from a segment and the directory's name."""
    try:
        table = read_table(disk, path)
    except Damaged:
        table = None
    if table is not None:
        return table.identity
    for segment in list_segments(disk, path):
        header = read_header(disk, path, segment)
        if header is not None:
            return identity_from(header, path)
    raise NotALog("no log directory", where=path, hint="Name a directory that holds log.X.Y files.")


def identity_from(header: SegmentHeader, path: str) -> Identity:
    """What a directory whose table is lost is, as far as one of its segments tells."""
    name = os.path.basename(os.path.abspath(path))
    try:
        return Identity(header.kind, header.origin, name)
    except InvalidName:
        return Identity(header.kind, header.origin, "unknown")


def scans(pread: Callable[[int, int], bytes], scanner: Scanner, *, values: bool = True) -> Iterator[Scan]:
    """Scan a file from `scanner.offset` to the end of its good frames, a read at a time.

    The last scan says why it stopped. A frame larger than a read is read whole.
    """
    size = READ_BYTES
    while True:
        data = pread(size, scanner.offset)
        scan = scanner.scan(memoryview(data), values=values)
        if scan.problem is None and not scan.consumed and scan.needed > size and len(data) == size:
            size = scan.needed
            continue
        yield scan
        if scan.problem is not None or not scan.consumed or len(data) < size:
            return
        size = READ_BYTES
