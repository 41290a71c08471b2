"""`/log-history`: every merged segment that the cluster remembers, trimmed ones included.

Pure. Made only from the replicated state, so all nodes answer the same, except `logAge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.units import NS_PER_MINUTE, format_time
from sequencer.rest.base.answer import TIME, Answer, Count, CountOrNone, Digits, doc, one_of, time_or_empty
from sequencer.rest.base.fields import TimeParameter, page
from sequencer.rest.views.context import RequestContext, Response, joined
from sequencer.state.state import MergedSegment, SequencerState

MergedSegmentState: TypeAlias = Literal["active", "sealed", "trimmed"]
_REASONS: Final = ["", *(reason.name.lower() for reason in TrimReason if reason)]


class MergedSegmentReport(Answer):
    log_path: Annotated[str, doc("Path of the file, relative to the data directory of any node.")]
    log_time: Annotated[str, doc("Sequencing time of its first message, RFC 3339.")]
    log_time_ns: Annotated[Digits, doc("logTime as nanoseconds since 1970, in digits.")]
    log_pos: Annotated[Count, doc("Position of its first message.")]
    log_end: Annotated[Count, doc("One past the position of its last message.")]
    log_size: Annotated[Count, doc("Bytes of the segment, even after it was trimmed.")]
    log_age: Annotated[CountOrNone, doc("Minutes since it was sealed. -1: it is active.")]
    seal_time: Annotated[str, doc(f"When it was sealed. {TIME}")]
    truncation_time: Annotated[str, doc(f"When it was trimmed. {TIME}")]
    truncation_reason: Annotated[str, one_of(_REASONS), doc("Why it was trimmed. Empty: it is kept.")]
    state: Annotated[MergedSegmentState, doc("State of the segment.")]


class LatestOutPosition(Answer):
    latest_out_position: Annotated[CountOrNone, doc("Position of the last merged message. -1: none.")]


def latest_out_position(asked: RequestContext) -> Response:
    return Response(LatestOutPosition(joined(asked.node).position - 1))


def log_history(asked: RequestContext) -> Response:
    node = asked.node
    segments = [one for one in _segments(joined(node)) if _matches(one, asked.query)]
    return Response([_report(one, node.stream, node.now_ns) for one in page(segments, asked.query)])


def _segments(state: SequencerState) -> list[MergedSegment]:
    """All segments; the last one may be active (not sealed)."""
    merged = state.merged
    if merged.segment is None:
        return list(state.segments)
    growing = MergedSegment(
        merged.segment, merged.first, state.position, merged.offset, merged.created_ns, sealed_ns=0
    )
    return [*state.segments, growing]


def _state_of(segment: MergedSegment) -> MergedSegmentState:
    if segment.trimmed_ns:
        return "trimmed"
    return "sealed" if segment.sealed_ns else "active"


def _matches(segment: MergedSegment, query: Mapping[str, Any]) -> bool:
    """Whether the segment has the requested state and any data in [from, to)."""
    if query.get("state", _state_of(segment)) != _state_of(segment):
        return False
    is_growing = not segment.sealed_ns
    match query.get("from"):
        case TimeParameter(ns) if not is_growing and segment.sealed_ns <= ns:
            return False
        case int(position) if not is_growing and segment.end <= position:
            return False
    match query.get("to"):
        case TimeParameter(ns):
            return segment.created_ns < ns
        case int(position):
            return segment.first < position
    return True


def _report(segment: MergedSegment, stream: str, now_ns: int) -> MergedSegmentReport:
    age_ns = max(now_ns - segment.sealed_ns, 0)
    return MergedSegmentReport(
        log_path=log_path(stream, segment.id),
        log_time=format_time(segment.created_ns),
        log_time_ns=str(segment.created_ns),
        log_pos=segment.first,
        log_end=segment.end,
        log_size=segment.size_bytes,
        log_age=age_ns // NS_PER_MINUTE if segment.sealed_ns else -1,
        seal_time=time_or_empty(segment.sealed_ns),
        truncation_time=time_or_empty(segment.trimmed_ns),
        truncation_reason=segment.reason.name.lower() if segment.trimmed_ns else "",
        state=_state_of(segment),
    )


def log_path(stream: str, segment: SegmentId) -> str:
    """Path relative to the data directory of any node."""
    return f"{stream}/merged/{segment.file_name}"
