"""Views of the cluster, its log, sessions and clients, made from one node snapshot.

Pure. What the cluster agreed on comes from the replicated state, so all nodes answer the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import rt
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import UNREACHABLE
from sequencer.rest.base.node_snapshot import Client, NodeSnapshot, obstacles
from sequencer.rest.base.query_params import page
from sequencer.rest.base.rfc3339 import NS_PER_S, rfc3339, rfc3339_or_empty
from sequencer.rest.views import log_history as history
from sequencer.rest.views.admin_views import configuration_of, retention_of
from sequencer.rest.views.alarms import alarms_of
from sequencer.rest.views.context import (
    RequestContext,
    Response,
    connected_sessions,
    is_own,
    joined,
    sees_all,
)
from sequencer.state.state import End, SequencerState, Session


def latest_out_position(asked: RequestContext) -> Response:
    return Response({"latestOutPosition": joined(asked.node).position - 1})


def log_history(asked: RequestContext) -> Response:
    node = asked.node
    return Response(history.log_history(joined(asked.node), node.stream, asked.query, now_ns=node.now_ns))


def status(asked: RequestContext) -> Response:
    node, standing = asked.node, asked.node.standing
    state = node.state or SequencerState(b"")
    return Response(
        {
            "stream": node.stream,
            "cluster": state.cluster.hex() if any(state.cluster) else "",
            "epoch": standing.epoch,
            "leader": standing.leader,
            "term": standing.term,
            "committed": _merged(
                state.instruction, state.position, state.merged.total_bytes, state.merged.chain
            ),
            "sequencedTime": rfc3339_or_empty(state.sequenced_ns),
            "configuration": configuration_of(node, state),
            "retention": retention_of(node, state),
            "leases": len(state.leases),
            "alarms": [
                {"name": one.name, "severity": one.severity, "text": one.text} for one in alarms_of(node)
            ],
            "members": [_member(one, standing) for one in sorted(standing.nodes, key=lambda one: one.name)],
            "node": _node(node),
        }
    )


def sessions(asked: RequestContext) -> Response:
    connected = connected_sessions(asked.node)
    found = [
        one
        for _, one in sorted(joined(asked.node).sessions.items())
        if asked.query.get("name", one.name) == one.name
    ]
    return Response([_session(one, connected) for one in page(found, asked.query)])


def clients(asked: RequestContext) -> Response:
    """Operators see all connections, other callers their own."""
    node, query, is_operator = asked.node, asked.query, sees_all(asked)
    seen = [
        one
        for one in node.clients
        if (is_operator or is_own(asked, one.identity.role, one.identity.name))
        and query.get("kind", one.identity.role) == one.identity.role
        and query.get("name", one.identity.name) == one.identity.name
        and query.get("active", not one.ended_ns) == (not one.ended_ns)
    ]
    seen.sort(key=lambda one: (one.ended_ns > 0, one.identity.uri, one.session or "", one.connected_ns))
    ids = {one.incarnation: one.id for one in node.state.sessions.values()} if node.state else {}
    return Response([_client(one, node, ids) for one in page(seen, query)])


def readiness(asked: RequestContext) -> Response:
    """200 if the node leads or follows with a majority, merges, and lags little; else 503."""
    found = obstacles(asked.node)
    return Response({"ready": not found, "obstacles": found}, 503 if found else 200)


def liveness(asked: RequestContext) -> Response:
    """200 while the data process works; a dead one does not answer at all."""
    merging = asked.node.merging
    is_alive = not asked.node.failure and not (merging and merging.failure)
    return Response({"alive": is_alive}, 200 if is_alive else 503)


def _merged(instruction: int, position: int, size: int, chain: int) -> dict[str, object]:
    return {"instruction": instruction, "position": position, "bytes": size, "checksum": f"{chain:08x}"}


def _member(one: pb.NodeStanding, standing: pb.Standing) -> dict[str, object]:
    summary, merged = one.summary, one.summary.merged
    return {
        "name": one.name,
        "address": one.address,
        "isLeader": one.name == standing.leader,
        "isConnected": one.is_connected or one.name == standing.node,
        "isCounted": one.is_counted,
        "step": summary.step or UNREACHABLE,
        "stepDone": summary.step_done,
        "stepTotal": summary.step_total,
        "merged": _merged(merged.instruction, merged.position, merged.bytes, merged.chain),
        "stopped": merged.stopped,
        "clock": rfc3339_or_empty(summary.clock_ns),
        "diskBytes": summary.disk_bytes,
        "diskFreeBytes": summary.disk_free_bytes,
    }


def _node(node: NodeSnapshot) -> dict[str, object]:
    merging = node.merging
    lag_messages, lag_bytes = node.lag
    return {
        "name": node.node,
        "role": node.standing.role,
        "isCaughtUp": node.standing.is_caught_up,
        "isControlUp": node.is_control_up,
        "appliedIndex": node.applied_index,
        "mergedPosition": 0 if merging is None else merging.position,
        "durablePosition": 0 if merging is None else merging.durable_position,
        "lagMessages": lag_messages,
        "lagBytes": lag_bytes,
        "waitsFor": "" if merging is None else merging.waits_for,
        "obstacles": obstacles(node),
        "failure": node.failure or ("" if merging is None else merging.failure),
        "startTime": rfc3339(node.started_ns),
        "version": rt.__version__,
    }


def _session(session: Session, connected: set[str | None]) -> dict[str, object]:
    return {
        "id": session.id,
        "name": session.name,
        "incarnation": session.incarnation.hex(),
        "dedupId": session.dedup_id,
        "isSuperseded": session.is_superseded,
        "waitsFor": session.waits_for or None,
        "lastX": session.last_x,
        "lives": [{"x": run.x, "isFenced": run.is_fenced, "end": _place(run.end)} for run in session.lives],
        "consumed": None if session.consumed is None else _place(session.consumed.end),
        "mergedX": -1 if session.done is None else session.done[0],
        "isConnected": session.name in connected and not session.is_superseded,
    }


def _place(end: End | None) -> dict[str, int] | None:
    return None if end is None else {"segment": end.y, "offset": end.offset, "number": end.number}


def _client(client: Client, node: NodeSnapshot, ids: Mapping[bytes, int]) -> dict[str, object]:
    if client.session is not None:
        lag = client.position - client.merged
    else:
        end = node.state.position if client.is_of_merged and node.state is not None else client.position
        lag = end - client.position
    return {
        "kind": client.identity.role,
        "name": client.identity.name,
        "certificate": client.identity.uri,
        "node": node.node,
        "address": client.address,
        "session": client.session,
        "active": not client.ended_ns,
        "connectTime": rfc3339(client.connected_ns),
        "disconnectTime": rfc3339_or_empty(client.ended_ns),
        "lastMessageTime": rfc3339_or_empty(client.last_ns),
        "position": client.position,
        "lag": max(lag, 0),
        "lagSeconds": round(client.lag_ns / NS_PER_S, 3),
        "bytes": client.total_bytes,
        "bytesPerSecond": round(client.rate, 1),
        "directory": _directory(client, node.stream, ids),
    }


def _directory(client: Client, stream: str, ids: Mapping[bytes, int]) -> str:
    """The log that is written or read; "" if not known yet."""
    if client.session is None and client.is_of_merged:
        return f"{stream}/merged"
    session_id = client.session_id if client.session is None else ids.get(client.incarnation)
    return "" if session_id is None else f"{stream}/sessions/{session_id}"
