"""Auditing replicas of a merged log with Spark: each segment is a task of its own.

Laws. Of each segment the longest copy is read, verified and followed through (`rt.spark.audit`), and the
others are compared with it byte by byte. Of a segment that grows, what was whole when the audit began is
looked at. How far copies have got, and what each has trimmed, is no difference. Executors see all directories
under the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rt.errors import FormatError, NotALog
from rt.log.catalog import segment_path
from rt.log.directory import read_header
from rt.log.disk import REAL, storage_errors
from rt.log.scrub import Scrub
from rt.log.segment import Kind, SegmentHeader, SegmentId
from rt.log.status import LogStatus, State, read_status
from rt.spark.audit import Broken, Found, NotingSources, join

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECE_BYTES = 2**20


class Copy(NamedTuple):
    """A directory's copy of a segment: how much of it there is."""

    directory: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found. `read_bytes` counts every copy."""

    logs: tuple[LogStatus, ...]
    segments: int
    sessions: int
    message_count: int
    read_bytes: int
    problems: tuple[Broken, ...]


def audit(directories: Sequence[str], spark: SparkSession) -> Audit:
    """Audit copies of one merged log. `rt.NotALog`, storage errors; what is wrong is in the result."""
    logs = [read_status(directory) for directory in directories]
    problems = list(_identities(logs))
    work = _work(logs)
    problems += _lengths(logs)
    looked_at: list[Found | None] = []
    if work:
        tasks = spark.sparkContext.parallelize(work, len(work))
        looked_at = tasks.map(lambda task: audit_segment(*task)).collect()
    found = [one for one in looked_at if one is not None]
    found.sort(key=lambda one: one.segment)
    problems += [problem for one in found for problem in one.problems]
    problems += join(found)
    return Audit(
        tuple(logs),
        len(found),
        len({number for one in found for number in one.declared}),
        sum(one.message_count for one in found),
        sum(one.read_bytes for one in found),
        tuple(problems),
    )


def audit_segment(segment: SegmentId, copies: list[Copy]) -> Found | None:
    """One segment, with its longest copy first; None if it was trimmed meanwhile.

    A copy that is damaged is told, and the next one is followed through in its stead.
    """
    longest, *others = copies
    path = segment_path(longest.directory, segment)
    with storage_errors(path, "auditing a segment"):
        found = _followed(segment, longest)
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


def _followed(segment: SegmentId, copy: Copy) -> Found | None:
    """Read and verify it; None if it is trimmed."""
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
        found = Found(segment, path, header.first, header.first)
        _scrub(found, header, file, copy)
        found.is_whole = not found.problems
        return None if found.problems and _is_trimmed(copy.directory, segment) else found
    finally:
        file.close()


def _unreadable(segment: SegmentId, path: str, what: str) -> Found:
    return Found(segment, path, 0, 0, problems=[Broken(what, path, 0)], is_whole=False)


def _scrub(found: Found, header: SegmentHeader, file: object, copy: Copy) -> None:
    def tell(offset: int, what: str) -> None:
        found.problems.append(Broken(what, found.path, offset))

    scrub = Scrub(file, header, name="", sources=NotingSources(found), index={}, tell=tell)  # type: ignore[arg-type]
    problem = "cut off"
    for scan in scrub.walk(copy.size_bytes):
        problem = scan.problem or problem
    if scrub.scanner.boundary < copy.size_bytes:
        tell(scrub.scanner.offset, f"{problem}; whole up to {copy.size_bytes} once")
    found.end, found.message_count = scrub.scanner.next, scrub.tally.message_count
    found.read_bytes = copy.size_bytes


def _compare(found: Found, longest: Copy, other: Copy) -> None:
    """Compare as much of `other` as there is."""
    paths = [segment_path(copy.directory, found.segment) for copy in (longest, other)]
    at, piece, same = 0, b"", b""
    try:
        with open(paths[0], "rb") as wanted, open(paths[1], "rb") as got:
            while at < other.size_bytes:
                size = min(PIECE_BYTES, other.size_bytes - at)
                piece, same = got.read(size), wanted.read(size)
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
        found.problems.append(Broken(what, paths[1], offset))


def _work(logs: Sequence[LogStatus]) -> list[tuple[SegmentId, list[Copy]]]:
    """Each segment that somebody keeps, with its copies, the longest first."""
    work = []
    for segment in sorted({one.id for log in logs for one in log.kept}):
        copies = [Copy(log.path, one.size_bytes) for log in logs for one in log.kept if one.id == segment]
        work.append((segment, sorted(copies, key=lambda copy: copy.size_bytes, reverse=True)))
    return work


def _identities(logs: Sequence[LogStatus]) -> list[Broken]:
    for log in logs:
        if log.identity.kind is not Kind.MERGED:
            kind = log.identity.kind.name.lower()
            raise NotALog(
                "only merged logs are audited", where=log.path, got=f"a {kind} log", hint="rt log verify DIR"
            )
    first = logs[0]
    return [
        Broken(f"another log than {first.path}: {log.identity.origin.hex()}", log.path, 0)
        for log in logs
        if log.identity.origin != first.identity.origin
    ]


def _lengths(logs: Sequence[LogStatus]) -> list[Broken]:
    """Copies of a segment that are sealed, or trimmed whole, must be as long as the longest."""
    problems = []
    known = {segment.id: segment.size_bytes for log in logs for segment in log.segments}
    for log in logs:
        for segment in log.segments:
            known[segment.id] = max(known[segment.id], segment.size_bytes)
    for log in logs:
        for segment in log.kept:
            if segment.state is State.SEALED and segment.size_bytes != known[segment.id]:
                what = f"sealed at {segment.size_bytes} bytes, another copy has {known[segment.id]}"
                path = os.path.join(log.path, segment.id.file_name)
                problems.append(Broken(what, path, segment.size_bytes))
    return problems


def _is_trimmed(directory: str, segment: SegmentId) -> bool:
    found = (one for one in read_status(directory).segments if one.id == segment)
    state = next(found, None)
    return state is None or state.state is State.TRIMMED
