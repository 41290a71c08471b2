"""`rt log verify` and `rt log compare`: their reports, as lines or as an object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from rt.cli.formats.log_stat import identity_object, identity_text
from rt.cli.formats.tables import escape, format_size, table
from rt.log.check.compare import Comparison, CopyDifference
from rt.log.check.report import Report
from rt.log.check.status import LogStatus, SegmentState

if TYPE_CHECKING:
    from rt.spark.export.audit_job import AuditResult

_COLUMNS = ("directory", "start", "end", "kept", "trimmed", "newest", "size")
_NUMBERS = frozenset({"start", "end", "kept", "trimmed", "size"})


def verify_lines(report: Report) -> Iterator[str]:
    """A line for each problem, and one for the directory."""
    for problem in report.all_problems:
        yield escape(str(problem))
    kept = [segment for segment in report.segments if segment.state is not SegmentState.TRIMMED]
    trimmed = len(report.segments) - len(kept)
    identity = "log" if report.identity is None else identity_text(report.identity)
    yield (
        f"{escape(report.path)}: {'CORRUPT' if report.is_damaged else 'intact'}: {identity}: "
        f"{sum(segment.message_count for segment in kept):,} messages{_bad(report.bad_messages)} "
        f"in {sum(segment.batch_count for segment in kept):,} batches, {len(kept)} segments, "
        f"{format_size(sum(segment.size_bytes for segment in kept))}; {trimmed} segments trimmed"
    )


def _bad(found: Sequence[object]) -> str:
    """The number of batches that no reader can decode, as text; empty if there are none."""
    return f" ({len(found):,} batches cannot be decoded)" if found else ""


def verify_object(report: Report) -> dict[str, Any]:
    return {
        "directory": report.path,
        **({} if report.identity is None else identity_object(report.identity)),
        "is_damaged": report.is_damaged,
        "bad_messages": len(report.bad_messages),
        "problems": [asdict(problem) for problem in report.problems],
        "segments": [
            {
                "segment": str(segment.id),
                "state": segment.state,
                "first": segment.first,
                "end": segment.end,
                "messages": segment.message_count,
                "batches": segment.batch_count,
                "bytes": segment.size_bytes,
                "problems": [asdict(problem) for problem in segment.problems],
            }
            for segment in report.segments
        ],
    }


def compare_lines(comparison: Comparison) -> Iterator[str]:
    """The end of each log, its segments, and the differences."""
    yield from table(_COLUMNS, [_row(log) for log in comparison.logs], right=_NUMBERS)
    for difference in comparison.differences:
        yield escape(str(difference))
    if not comparison.differences:
        yield f"no difference in {format_size(comparison.compared_bytes)} that two or more copies have"


def audit_lines(audit: AuditResult) -> Iterator[str]:
    """The end of each log, its segments, and the problems."""
    yield from table(_COLUMNS, [_row(log) for log in audit.logs], right=_NUMBERS)
    for problem in (*audit.problems, *audit.bad_messages):
        yield escape(str(problem))
    if not audit.problems:
        yield (
            f"all copies are the same, positions dense, sessions in order: {audit.message_count:,} messages"
            f"{_bad(audit.bad_messages)} of {audit.sessions:,} sessions in {audit.segments:,} segments, "
            f"{format_size(audit.read_bytes)} read"
        )


def audit_object(audit: AuditResult) -> dict[str, Any]:
    return {
        "is_good": not audit.problems,
        "segments": audit.segments,
        "sessions": audit.sessions,
        "messages": audit.message_count,
        "read_bytes": audit.read_bytes,
        "logs": [_log_object(log) for log in audit.logs],
        "problems": [asdict(problem) for problem in audit.problems],
        "bad_messages": [asdict(problem) for problem in audit.bad_messages],
    }


def _row(log: LogStatus) -> list[str]:
    newest = log.segments[-1] if log.segments else None
    return [
        escape(log.path),
        str(log.start),
        str(log.end),
        str(len(log.kept)),
        str(len(log.segments) - len(log.kept)),
        "" if newest is None else str(newest.id),
        "" if newest is None else str(newest.size_bytes),
    ]


def compare_object(comparison: Comparison) -> dict[str, Any]:
    return {
        "is_same": not comparison.differences,
        "compared_bytes": comparison.compared_bytes,
        "logs": [_log_object(log) for log in comparison.logs],
        "differences": [_difference_object(difference) for difference in comparison.differences],
    }


def _log_object(log: LogStatus) -> dict[str, Any]:
    newest = log.segments[-1] if log.segments else None
    return {
        "directory": log.path,
        **identity_object(log.identity),
        "start": log.start,
        "end": log.end,
        "kept": [str(segment.id) for segment in log.kept],
        "trimmed": [str(segment.id) for segment in log.segments if segment.state is SegmentState.TRIMMED],
        "newest": newest and {"segment": str(newest.id), "bytes": newest.size_bytes},
    }


def _difference_object(difference: CopyDifference) -> dict[str, Any]:
    fields = asdict(difference)
    segment = None if difference.segment is None else str(difference.segment)
    return {"what": difference.what, "directory": fields.pop("path"), **fields, "segment": segment}
