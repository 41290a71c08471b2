"""Logs to verify, and helpers to read the reports."""

from __future__ import annotations

from typing import Any

import rt
from rt.log.check.report import Severity
from rt.log.check.verify import Report
from rt.log.disk import Disk, File, Lock
from rt.log.format.block import BLOCK_HEADER_BYTES
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentId
from rt.log.scan.directory import read_header, scans
from rt.log.scan.scanner import scanner_for

DIRECTORY = "/root/stream/sessions/feed"
MERGED = "/merged"
CLUSTER = b"cluster of test."


def open_publisher(disk: Disk, session: str = "feed", **options: Any) -> rt.Publisher:
    return rt.Publisher(
        "/root", "stream", publisher_id=session, **{"linger_ms": 60_000, "disk": disk} | options
    )


def publish(disk: Disk, batches: int, session: str = "feed", size: int = 20, **options: Any) -> str:
    """Publish `batches` batches of three messages in a new run of a session. Return its directory."""
    with open_publisher(disk, session, **options) as publisher:
        for batch in range(batches):
            publisher.publish_many([b"%d" % batch + bytes(size)] * 3, topic=f"t{batch % 2}")
            publisher.flush()
    return publisher.directory


def segment_path(directory: str, run: int, roll: int) -> str:
    return f"{directory}/log.{run}.{roll}"


def damage(report: Report) -> list[tuple[str, int]]:
    return [(problem.path, problem.offset) for problem in report.damage]


def notes(report: Report) -> list[tuple[str, int]]:
    return [(one.path, one.offset) for one in report.all_problems if one.severity is Severity.NOTE]


def frame_starts(disk: Disk, directory: str, segment: SegmentId) -> list[int]:
    """The offsets of the segment header and of each batch and block header of a segment."""
    header = read_header(disk, directory, segment)
    assert header is not None
    file = disk.open(f"{directory}/{segment}")
    starts = [0]
    scanner = scanner_for(header)
    for scan in scans(file.pread, scanner):
        starts += [batch.offset for batch in scan.batches]
    if header.kind is LogKind.MERGED:
        at = SEGMENT_HEADER_BYTES
        while at < file.size():
            starts.append(at)
            at += BLOCK_HEADER_BYTES + int.from_bytes(file.pread(8, at + 48), "little")
    file.close()
    return sorted(starts)


class ReadOnlyDisk:
    """A read-only disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def open(self, path: str, *, write: bool = False) -> File:
        assert not write, path
        return self._disk.open(path)

    def list_directory(self, path: str) -> list[str]:
        return self._disk.list_directory(path)

    def size(self, path: str) -> int | None:
        return self._disk.size(path)

    def _refuse(self, *arguments: object) -> Any:
        raise AssertionError(arguments)

    create = rename = remove = make_directory = sync_directory = _refuse

    def lock(self, path: str) -> Lock:
        raise AssertionError(path)
