"""`rt log stat`: identity and segments of a log directory, as a table or an object."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rt.cli.formats.tables import escape, format_age, format_size, table
from rt.log.check.status import LogStatus, SegmentState, SegmentStatus
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.units import format_time

_COLUMNS = (
    *("segment", "state", "first", "end", "messages", "size", "created", "from", "to", "sealed", "trimmed"),
)
_NUMBERS = frozenset({"first", "end", "messages", "size"})


def stat_lines(status: LogStatus) -> Iterator[str]:
    """The identity, a table of the segments, and a line of totals."""
    now_ns = time.time_ns()
    yield f"{escape(status.path)}: {identity_text(status.identity)}"
    yield f"durable end: {_durable_text(status)}"
    rows = [_row(segment, now_ns) for segment in status.segments]
    yield from table(_COLUMNS, rows, right=_NUMBERS)
    kept = status.kept
    yield (
        f"{len(kept)} segments kept, {len(status.segments) - len(kept)} trimmed; "
        f"{sum(segment.message_count for segment in kept):,} messages, {status.start} to {status.end}; "
        f"{format_size(sum(segment.size_bytes for segment in kept))}"
    )


def stat_object(status: LogStatus) -> dict[str, Any]:
    """Times are nanoseconds since the Unix epoch."""
    durable = status.durable
    return {
        "directory": status.path,
        **identity_object(status.identity),
        "start": status.start,
        "end": status.end,
        "messages": sum(segment.message_count for segment in status.kept),
        "bytes": sum(segment.size_bytes for segment in status.kept),
        "durable": durable and {"segment": str(durable.id), "offset": durable.offset, "end": durable.end},
        "segments": [_segment_object(segment) for segment in status.segments],
    }


def identity_text(identity: LogIdentity) -> str:
    origin = "incarnation" if identity.kind is LogKind.SESSION else "cluster"
    dedup = f", dedup id {identity.dedup_id}" if identity.dedup_id else ""
    return f"{identity.kind.name.lower()} {identity.name}, {origin} {identity.origin.hex()}{dedup}"


def identity_object(identity: LogIdentity) -> dict[str, Any]:
    """`name` is the session or stream, `origin` the incarnation or cluster id."""
    return {
        "kind": identity.kind.name.lower(),
        "name": identity.name,
        "origin": identity.origin.hex(),
        "dedup_id": identity.dedup_id,
    }


def _durable_text(status: LogStatus) -> str:
    durable = status.durable
    if durable is None:
        return "not known"
    return f"{durable.id} at offset {durable.offset}, before {durable.end}"


def _row(segment: SegmentStatus, now_ns: int) -> list[str]:
    is_empty = segment.message_count == 0
    sealed, trimmed = "", ""
    if segment.sealed_ns:
        sealed = f"{format_age(now_ns - segment.sealed_ns)} ago"
    if segment.state is SegmentState.TRIMMED:
        trimmed = f"{format_age(now_ns - segment.trimmed_ns)} ago ({segment.reason.name.lower()})"
    return [
        str(segment.id),
        segment.state,
        str(segment.first),
        str(segment.end),
        str(segment.message_count),
        str(segment.size_bytes),
        format_time(segment.created_ns, digits=3),
        "" if is_empty else format_time(segment.timestamp_low_ns, digits=3),
        "" if is_empty else format_time(segment.timestamp_high_ns, digits=3),
        sealed,
        trimmed,
    ]


def _segment_object(segment: SegmentStatus) -> dict[str, Any]:
    is_empty = segment.message_count == 0
    return {
        "segment": str(segment.id),
        "state": segment.state,
        "first": segment.first,
        "end": segment.end,
        "messages": segment.message_count,
        "bytes": segment.size_bytes,
        "created_ns": segment.created_ns,
        "timestamp_low_ns": None if is_empty else segment.timestamp_low_ns,
        "timestamp_high_ns": None if is_empty else segment.timestamp_high_ns,
        "sealed_ns": segment.sealed_ns or None,
        "trimmed_ns": segment.trimmed_ns or None,
        "trim_reason": segment.reason.name.lower() if segment.state is SegmentState.TRIMMED else None,
    }
