"""Audits the replicas of a merged log with Spark, one task per segment.

Invariants:
- Of each segment the longest copy is read and verified (`rt.spark.export.audit`). The others are compared
  with it byte by byte.
- Of a growing segment the part that was whole at the start of the audit is checked.
- Copies may differ in how far they reach and what they have trimmed.
- Executors see all directories under the same paths.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from rt.errors import FormatError, LogNotFound
from rt.log.check.report import Severity
from rt.log.check.segment_check import SegmentCheck
from rt.log.check.status import LogStatus, SegmentState, read_status
from rt.log.disk import REAL, File, storage_errors
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_header
from rt.spark.export.audit import BrokenSegment, FoundSegment, RecordingLineage, join

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECE_BYTES = 2**20


class SegmentCopy(NamedTuple):
    """A directory's copy of a segment, and its length."""

    directory: str
    size_bytes: int


class AuditResult(Struct, frozen=True):
    """The result. `read_bytes` counts every copy."""

    logs: tuple[LogStatus, ...]
    segments: int
    sessions: int
    message_count: int
    read_bytes: int
    problems: tuple[BrokenSegment, ...]
    bad_messages: tuple[BrokenSegment, ...] = ()
    """Batches that no reader can decode. They were published that way: no copy is corrupt."""


def audit(directories: Sequence[str], spark: SparkSession) -> AuditResult:
    """Audit copies of one merged log. Raises `rt.LogNotFound` and storage errors; problems are in the
    result.
    """
    logs = [read_status(directory) for directory in directories]
    problems = [*_check_identities(logs), *_check_lengths(logs)]
    found: list[FoundSegment] = []
    if work := _plan_work(logs):
        tasks = spark.sparkContext.parallelize(work, len(work))
        found = list(filter(None, tasks.map(lambda task: audit_segment(*task)).collect()))
    found.sort(key=lambda one: one.segment)
    problems += [problem for one in found for problem in one.problems]
    problems += join(found)
    return AuditResult(
        tuple(logs),
        len(found),
        len({number for one in found for number in one.declared}),
        sum(one.message_count for one in found),
        sum(one.read_bytes for one in found),
        tuple(problems),
        tuple(bad for one in found for bad in one.bad_messages),
    )


def audit_segment(segment: SegmentId, copies: list[SegmentCopy]) -> FoundSegment | None:
    """Audit one segment. Its longest copy is first in `copies`. None if it was trimmed meanwhile.

    A corrupt copy is reported, and the next copy is verified instead.
    """
    longest, *others = copies
    path = segment_path(longest.directory, segment)
    with storage_errors(path, "auditing a segment"):
        found = _verify(segment, longest)
        if others and (found is None or not found.is_whole):
            instead = audit_segment(segment, others)
            if instead is not None and found is not None:
                instead.problems[:0] = found.problems
            return instead or found
        if found is None:
            return None
        for other in others:
            _compare(found, longest, other)
    return found


def _verify(segment: SegmentId, copy: SegmentCopy) -> FoundSegment | None:
    """Read and verify a copy; None if it is trimmed."""
    path = segment_path(copy.directory, segment)
    try:
        header = read_header(REAL, copy.directory, segment)
        file = None if header is None else REAL.open(path)
    except FormatError as error:
        return _unreadable(segment, path, str(error))
    except FileNotFoundError:
        header, file = None, None
    if header is None or file is None:
        if _is_trimmed(copy.directory, segment):
            return None
        return _unreadable(segment, path, "missing, or emptied")
    try:
        found = FoundSegment(segment, path, header.first, header.first)
        _check(found, header, file, copy)
        found.is_whole = not found.problems
        return None if found.problems and _is_trimmed(copy.directory, segment) else found
    finally:
        file.close()


def _unreadable(segment: SegmentId, path: str, what: str) -> FoundSegment:
    return FoundSegment(segment, path, 0, 0, problems=[BrokenSegment(what, path, 0)], is_whole=False)


def _check(found: FoundSegment, header: SegmentHeader, file: File, copy: SegmentCopy) -> None:
    def report(offset: int, what: str) -> None:
        found.problems.append(BrokenSegment(what, found.path, offset))

    def bad(offset: int, what: str) -> None:
        found.bad_messages.append(BrokenSegment(what, found.path, offset, Severity.BAD_MESSAGE))

    sources = RecordingLineage(found)
    check = SegmentCheck(
        file, header, name="", sources=sources, index={}, report_damage=report, report_undecodable=bad
    )
    problem = "cut off"
    for scan in check.walk(copy.size_bytes):
        problem = scan.problem or problem
    if check.scanner.boundary < copy.size_bytes:
        report(check.scanner.offset, f"{problem}; whole up to {copy.size_bytes} once")
    found.end, found.message_count = check.scanner.next, check.totals.message_count
    found.read_bytes = copy.size_bytes


def _compare(found: FoundSegment, longest: SegmentCopy, other: SegmentCopy) -> None:
    paths = [segment_path(copy.directory, found.segment) for copy in (longest, other)]
    at, piece, same = 0, b"", b""
    try:
        with open(paths[0], "rb") as expected, open(paths[1], "rb") as got:
            while at < other.size_bytes:
                size = min(PIECE_BYTES, other.size_bytes - at)
                piece, same = got.read(size), expected.read(size)
                if len(piece) < size or len(same) < size or piece != same:
                    break
                at += size
    except FileNotFoundError:
        pass
    found.read_bytes += at
    if at < other.size_bytes and not any(
        _is_trimmed(one.directory, found.segment) for one in (longest, other)
    ):
        differs = (place for place, (a, b) in enumerate(zip(piece, same, strict=False)) if a != b)
        offset = at + next(differs, min(len(piece), len(same)))
        what = f"differs from {paths[0]}" if len(piece) == len(same) else "cut off"
        found.problems.append(BrokenSegment(what, paths[1], offset))


def _plan_work(logs: Sequence[LogStatus]) -> list[tuple[SegmentId, list[SegmentCopy]]]:
    """Every retained segment with its copies, the longest first."""
    work = []
    for segment in sorted({one.id for log in logs for one in log.kept}):
        copies = [
            SegmentCopy(log.path, one.size_bytes) for log in logs for one in log.kept if one.id == segment
        ]
        work.append((segment, sorted(copies, key=lambda copy: copy.size_bytes, reverse=True)))
    return work


def _check_identities(logs: Sequence[LogStatus]) -> list[BrokenSegment]:
    for log in logs:
        if log.identity.kind is not LogKind.MERGED:
            kind = log.identity.kind.name.lower()
            raise LogNotFound(
                "not a merged log", where=log.path, got=f"a {kind} log", hint="rt log verify DIR"
            )
    first = logs[0]
    return [
        BrokenSegment(f"another log than {first.path}: {log.identity.origin.hex()}", log.path, 0)
        for log in logs
        if log.identity.origin != first.identity.origin
    ]


def _check_lengths(logs: Sequence[LogStatus]) -> list[BrokenSegment]:
    """Sealed or completely trimmed copies must be as long as the longest."""
    problems = []
    longest: dict[SegmentId, int] = defaultdict(int)
    for log in logs:
        for segment in log.segments:
            longest[segment.id] = max(longest[segment.id], segment.size_bytes)
    for log in logs:
        for segment in log.kept:
            if segment.state is SegmentState.SEALED and segment.size_bytes != longest[segment.id]:
                what = f"sealed at {segment.size_bytes} bytes, another copy has {longest[segment.id]}"
                path = os.path.join(log.path, segment.id.file_name)
                problems.append(BrokenSegment(what, path, segment.size_bytes))
    return problems


def _is_trimmed(directory: str, segment: SegmentId) -> bool:
    found = [one.state for one in read_status(directory).segments if one.id == segment]
    return found in ([], [SegmentState.TRIMMED])
