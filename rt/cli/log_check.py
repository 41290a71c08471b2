"""`rt log verify` and `rt log compare`: what they found, in lines or as an object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rt.cli.log_stat import identity_object, identity_text
from rt.cli.text import escape, format_size, table
from rt.log.compare import Comparison, Difference
from rt.log.report import Problem, Report
from rt.log.status import LogStatus, State

if TYPE_CHECKING:
    from rt.spark.auditing import Audit

_COLUMNS = ("directory", "start", "end", "kept", "trimmed", "newest", "size")
_NUMBERS = frozenset({"start", "end", "kept", "trimmed", "size"})


def verify_lines(report: Report) -> Iterator[str]:
    """A line for each problem, and one for the directory."""
    for problem in report.all_problems:
        yield escape(str(problem))
    kept = [segment for segment in report.segments if segment.state is not State.TRIMMED]
    trimmed = len(report.segments) - len(kept)
    identity = "log" if report.identity is None else identity_text(report.identity)
    yield (
        f"{escape(report.path)}: {'DAMAGED' if report.is_damaged else 'whole'}: {identity}: "
        f"{sum(segment.message_count for segment in kept):,} messages "
        f"in {sum(segment.batch_count for segment in kept):,} batches, {len(kept)} segments, "
        f"{format_size(sum(segment.size_bytes for segment in kept))}; {trimmed} segments trimmed"
    )


def verify_object(report: Report) -> dict[str, Any]:
    """The same for machines."""
    return {
        "directory": report.path,
        **({} if report.identity is None else identity_object(report.identity)),
        "is_damaged": report.is_damaged,
        "problems": [_problem_object(problem) for problem in report.problems],
        "segments": [
            {
                "segment": str(segment.id),
                "state": segment.state,
                "first": segment.first,
                "end": segment.end,
                "messages": segment.message_count,
                "batches": segment.batch_count,
                "bytes": segment.size_bytes,
                "problems": [_problem_object(problem) for problem in segment.problems],
            }
            for segment in report.segments
        ],
    }


def _problem_object(problem: Problem) -> dict[str, Any]:
    return {
        "severity": problem.severity,
        "what": problem.what,
        "path": problem.path,
        "offset": problem.offset,
    }


def compare_lines(comparison: Comparison) -> Iterator[str]:
    """How far each log has got, what it keeps, and where logs differ."""
    yield from table(_COLUMNS, [_row(log) for log in comparison.logs], right=_NUMBERS)
    for difference in comparison.differences:
        yield escape(str(difference))
    if not comparison.differences:
        yield f"no difference in {format_size(comparison.compared_bytes)} that more than one of them keeps"


def audit_lines(audit: Audit) -> Iterator[str]:
    """How far each log has got, what it keeps, and what is wrong with any of them."""
    yield from table(_COLUMNS, [_row(log) for log in audit.logs], right=_NUMBERS)
    for problem in audit.problems:
        yield escape(str(problem))
    if not audit.problems:
        yield (
            f"all copies are the same, positions dense, sessions in order: {audit.message_count:,} messages "
            f"of {audit.sessions:,} sessions in {audit.segments:,} segments, "
            f"{format_size(audit.read_bytes)} read"
        )


def audit_object(audit: Audit) -> dict[str, Any]:
    """The same for machines."""
    return {
        "is_good": not audit.problems,
        "segments": audit.segments,
        "sessions": audit.sessions,
        "messages": audit.message_count,
        "read_bytes": audit.read_bytes,
        "logs": [_log_object(log) for log in audit.logs],
        "problems": [asdict(problem) for problem in audit.problems],
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
    """The same for machines."""
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
        "trimmed": [str(segment.id) for segment in log.segments if segment.state is State.TRIMMED],
        "newest": newest and {"segment": str(newest.id), "bytes": newest.size_bytes},
    }


def _difference_object(difference: Difference) -> dict[str, Any]:
    return {
        "what": difference.what,
        "directory": difference.path,
        "other": difference.other,
        "segment": None if difference.segment is None else str(difference.segment),
        "offset": difference.offset,
        "position": difference.position,
    }
