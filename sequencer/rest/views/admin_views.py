"""Views of the operators' resources: configuration, holds, leases, dedup ids, resets.

Pure. Made from the replicated state, except `setByNode` (this node's settings), connections and resets.
"""

from __future__ import annotations

from rt.names import dedup_owner, session_owner
from sequencer.rest.base.admin_ports import ResetStatus
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.base.query_params import page
from sequencer.rest.base.retained_size import RetainedSize
from sequencer.rest.base.rfc3339 import NS_PER_MINUTE, rfc3339_or_empty
from sequencer.rest.views.admin_schemas import CONFIGURATION_KEYS
from sequencer.rest.views.context import (
    RequestContext,
    Response,
    connected_sessions,
    is_own,
    joined,
    sees_all,
)
from sequencer.state.state import SequencerState, Session


def configuration(asked: RequestContext) -> Response:
    return Response(configuration_of(asked.node, joined(asked.node)))


def holds(asked: RequestContext) -> Response:
    """Operators see all holds, other callers their own."""
    state, kept = joined(asked.node), RetainedSize(joined(asked.node))
    return Response(
        [
            {
                "name": name,
                "position": hold.position,
                "lag": max(state.position - hold.position, 0),
                "bytes": kept.bytes_from(hold.position),
                "updateTime": rfc3339_or_empty(hold.at_ns),
                "isOverridden": hold.position < state.log_start,
            }
            for name, hold in sorted(state.holds.items())
            if sees_all(asked) or is_own(asked, "subscriber", name)
        ]
    )


def leases(asked: RequestContext) -> Response:
    found = sorted(joined(asked.node).leases.items())
    return Response(
        [
            {
                "name": name,
                "owner": lease.owner,
                "token": lease.token,
                "durationSeconds": lease.duration_ms / 1000,
                "renewals": lease.renewals,
            }
            for name, lease in page(found, asked.query)
        ]
    )


def dedup_clients(asked: RequestContext) -> Response:
    """Operators see all dedup ids, other callers their own."""
    state, identity = joined(asked.node), asked.identity
    connected = connected_sessions(asked.node)
    found: dict[str, list[Session]] = {dedup_id: [] for dedup_id in state.wanted}
    for _, session in sorted(state.sessions.items()):
        if session.dedup_id is not None:
            found.setdefault(session.dedup_id, []).append(session)
    is_operator, name = sees_all(asked), asked.query.get("name")
    own = identity.dedup_ids if identity else frozenset()
    seen = sorted(
        dedup_id
        for dedup_id in found
        if (is_operator or dedup_owner(dedup_id) in own) and name in {None, dedup_id}
    )
    return Response(
        [
            {
                "dedupId": dedup_id,
                "wanted": state.wanted.get(dedup_id, 0),
                "sessions": [
                    _dedup_session(one, state.wanted.get(dedup_id, 0), connected)
                    for one in found[dedup_id]
                    if is_operator or is_own(asked, "publisher", session_owner(one.name))
                ],
            }
            for dedup_id in page(seen, asked.query)
        ]
    )


def reset_status(asked: RequestContext) -> Response:
    """Status 503 while a reset runs."""
    status = asked.node.reset
    return Response(reset_answer(status), 503 if status.state == "running" else 200)


def reset_answer(status: ResetStatus) -> dict[str, object]:
    return {
        "state": status.state,
        "kind": status.kind or "",
        "epoch": status.epoch,
        "startTime": rfc3339_or_empty(status.started_ns),
        "endTime": rfc3339_or_empty(status.ended_ns),
        "dropped": [
            {
                "session": one.session,
                "sessionId": one.session_id,
                "x": one.x,
                "first": one.first,
                "end": one.end,
            }
            for one in status.dropped
        ],
        "error": status.error,
        "mayLose": status.may_lose,
    }


def configuration_of(node: NodeSnapshot, state: SequencerState) -> dict[str, object]:
    replicated = state.configuration
    return {
        **{name: getattr(replicated, key) for name, key in CONFIGURATION_KEYS.items()},
        "setByNode": [name for name, key in CONFIGURATION_KEYS.items() if key in node.configured],
    }


def retention_of(node: NodeSnapshot, state: SequencerState) -> dict[str, object]:
    kept = RetainedSize(state)
    trimmed = [one for one in state.segments if one.is_trimmed]
    oldest = next((one for one in state.segments if not one.is_trimmed), None)
    age_ns = 0 if oldest is None else max(node.now_ns - oldest.sealed_ns, 0)
    least = min((one.position for one in state.holds.values()), default=state.position)
    return {
        "logStart": state.log_start,
        "segments": kept.segments,
        "segmentsTrimmed": len(trimmed),
        "bytes": kept.total_bytes,
        "oldestMinutes": -1 if oldest is None else age_ns // NS_PER_MINUTE,
        "lastTrimTime": rfc3339_or_empty(trimmed[-1].trimmed_ns) if trimmed else "",
        "lastTrimReason": trimmed[-1].reason.name.lower() if trimmed else "",
        "holds": len(state.holds),
        "holdBytes": kept.bytes_from(least),
    }


def _dedup_session(session: Session, wanted: int, connected: set[str | None]) -> dict[str, object]:
    if session.consumed is not None:
        number = session.consumed.end.number
    else:
        number = 0 if session.done is None else session.done[1].number
    return {
        "id": session.id,
        "name": session.name,
        "isSuperseded": session.is_superseded,
        "isOpen": bool(session.lives),
        "isConnected": session.name in connected and not session.is_superseded,
        "number": number,
        "lag": max(wanted - number, 0),
    }
