"""`/log-history`: every merged segment that the cluster remembers, trimmed ones included.

Pure. Made only from the replicated state, so all nodes answer the same, except `logAge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rt.log.format.segment import SegmentId
from sequencer.rest.base.query_params import TimeParameter, page
from sequencer.rest.base.rfc3339 import NS_PER_MINUTE, rfc3339, rfc3339_or_empty
from sequencer.state.state import MergedSegment, SequencerState

STATES = ("active", "sealed", "trimmed")


def log_history(
    state: SequencerState, stream: str, query: Mapping[str, Any], *, now_ns: int
) -> list[dict[str, object]]:
    segments = [segment for segment in _segments(state) if _matches(segment, query)]
    return [_entry(segment, stream, now_ns) for segment in page(segments, query)]


def segment_state(segment: MergedSegment) -> str:
    """One of `STATES`."""
    if segment.trimmed_ns:
        return "trimmed"
    return "sealed" if segment.sealed_ns else "active"


def _segments(state: SequencerState) -> list[MergedSegment]:
    """All segments; the last one may be active (not sealed)."""
    merged = state.merged
    if merged.segment is None:
        return list(state.segments)
    growing = MergedSegment(
        merged.segment, merged.first, state.position, merged.offset, merged.created_ns, sealed_ns=0
    )
    return [*state.segments, growing]


def _matches(segment: MergedSegment, query: Mapping[str, Any]) -> bool:
    """Whether the segment has the requested state and any data in [from, to)."""
    if query.get("state", segment_state(segment)) != segment_state(segment):
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


def _entry(segment: MergedSegment, stream: str, now_ns: int) -> dict[str, object]:
    age_ns = max(now_ns - segment.sealed_ns, 0)
    return {
        "logPath": log_path(stream, segment.id),
        "logTime": rfc3339(segment.created_ns),
        "logTimeNs": segment.created_ns,
        "logPos": segment.first,
        "logEnd": segment.end,
        "logSize": segment.size_bytes,
        "logAge": age_ns // NS_PER_MINUTE if segment.sealed_ns else -1,
        "sealTime": rfc3339_or_empty(segment.sealed_ns),
        "truncationTime": rfc3339_or_empty(segment.trimmed_ns),
        "truncationReason": segment.reason.name.lower() if segment.trimmed_ns else "",
        "state": segment_state(segment),
    }


def log_path(stream: str, segment: SegmentId) -> str:
    """Path relative to the data directory of any node."""
    return f"{stream}/merged/{segment.file_name}"
