"""The answers about the cluster, its log, sessions and clients, made of a node at one moment.

Pure. What the cluster agreed on comes from the replicated state, so that every node tells the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import rt
from rt.v1 import sequencer_pb2 as pb
from sequencer.rest import log_history as history
from sequencer.rest.alarms import alarms_of
from sequencer.rest.asking import Answer, Asked, connected_sessions, is_own, joined, sees_all
from sequencer.rest.node_view import Client, NodeView, obstacles
from sequencer.rest.operating_views import archive_of, configuration_of
from sequencer.rest.query import page
from sequencer.rest.times import NS_PER_S, rfc3339, rfc3339_or_empty
from sequencer.state import End, Session, State
from sequencer.steps import AWAY


def latest_out_position(asked: Asked) -> Answer:
    """The newest position."""
    return Answer({"latestOutPosition": joined(asked.node).position - 1})


def log_history(asked: Asked) -> Answer:
    """The merged segments."""
    node = asked.node
    return Answer(history.log_history(joined(asked.node), node.stream, asked.query, now_ns=node.now_ns))


def status(asked: Asked) -> Answer:
    """The cluster, and the node that answers."""
    node, standing = asked.node, asked.node.standing
    state = node.state or State(b"")
    return Answer(
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
            "archive": archive_of(node, state),
            "leases": len(state.leases),
            "alarms": [
                {"name": one.name, "severity": one.severity, "text": one.text} for one in alarms_of(node)
            ],
            "members": [_member(one, standing) for one in sorted(standing.nodes, key=lambda one: one.name)],
            "node": _node(node),
        }
    )


def sessions(asked: Asked) -> Answer:
    """The incarnations of sessions that the cluster remembers."""
    connected = connected_sessions(asked.node)
    found = [
        one
        for _, one in sorted(joined(asked.node).sessions.items())
        if asked.query.get("name", one.name) == one.name
    ]
    return Answer([_session(one, connected) for one in page(found, asked.query)])


def clients(asked: Asked) -> Answer:
    """Who is, and was, connected: to operators all, to others what is their own."""
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
    return Answer([_client(one, node, ids) for one in page(seen, query)])


def readiness(asked: Asked) -> Answer:
    """200 if the node follows or leads with a majority, merges, and is not far behind; else 503."""
    found = obstacles(asked.node)
    return Answer({"ready": not found, "obstacles": found}, 503 if found else 200)


def liveness(asked: Asked) -> Answer:
    """200 as long as the data process works: that it answers says most of it."""
    merging = asked.node.merging
    is_alive = not asked.node.failure and not (merging and merging.failure)
    return Answer({"alive": is_alive}, 200 if is_alive else 503)


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
        "step": summary.step or AWAY,
        "stepDone": summary.step_done,
        "stepTotal": summary.step_total,
        "merged": _merged(merged.instruction, merged.position, merged.bytes, merged.chain),
        "stopped": merged.stopped,
        "clock": rfc3339_or_empty(summary.clock_ns),
        "diskBytes": summary.disk_bytes,
        "diskFreeBytes": summary.disk_free_bytes,
    }


def _node(node: NodeView) -> dict[str, object]:
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
        "lives": [
            {"x": life.x, "isFenced": life.is_fenced, "end": _place(life.end)} for life in session.lives
        ],
        "consumed": None if session.consumed is None else _place(session.consumed.end),
        "mergedX": -1 if session.done is None else session.done[0],
        "isConnected": session.name in connected and not session.is_superseded,
    }


def _place(end: End | None) -> dict[str, int] | None:
    return None if end is None else {"segment": end.y, "offset": end.offset, "number": end.number}


def _client(client: Client, node: NodeView, ids: Mapping[bytes, int]) -> dict[str, object]:
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
    """The log that is written or read; "" before it is known which one."""
    if client.session is None and client.is_of_merged:
        return f"{stream}/merged"
    session_id = client.session_id if client.session is None else ids.get(client.incarnation)
    return "" if session_id is None else f"{stream}/sessions/{session_id}"
