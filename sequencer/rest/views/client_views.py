"""Sessions, dedup ids and connected clients. Pure.

Sessions come from the replicated state, so all nodes give the same answer, except `isConnected` and
`silentSeconds`. Clients are those of this node; `ClusterClients` are those of all nodes, as the nodes report
them to each other.

Invariant: the report of a node is shown only while the node reports. A node that is silent or unreachable is
named instead: its clients may or may not be connected to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from rt.names import dedup_owner, session_owner
from rt.units import NS_PER_S, format_time
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.silence import HUNG_S
from sequencer.rest.base.answer import TIME, Amount, Answer, Count, CountOrNone, doc, time_or_empty
from sequencer.rest.base.fields import page
from sequencer.rest.base.node_snapshot import ClientConnection, NodeSnapshot
from sequencer.rest.views.context import RequestContext, Response, is_own, joined, sees_all
from sequencer.state.state import End, Session

# Sessions


class RunEnd(Answer):
    """A location in a run of a session, before message `number`."""

    roll_number: Annotated[Count, doc("Roll number of the segment file.")]
    offset: Annotated[Count, doc("Byte offset in the file.")]
    number: Annotated[Count, doc("Number of the next message.")]


class RunReport(Answer):
    """A run (one start of the publisher) that is not completely merged."""

    run_number: Annotated[Count, doc("Run number.")]
    is_fenced: Annotated[bool, doc("Whether it is fenced: no node accepts more of it.")]
    end: Annotated[RunEnd | None, doc("Where the run ends. Null: it is not closed.")]


class SessionReport(Answer):
    """An incarnation of a session."""

    id: Annotated[Count, doc("Id of the incarnation in this cluster.")]
    name: Annotated[str, doc("Name of the session.")]
    incarnation: Annotated[str, doc("Id chosen by the publisher, hexadecimal.")]
    dedup_id: Annotated[str | None, doc("Dedup id. Null: none.")]
    is_superseded: Annotated[bool, doc("Whether a newer incarnation replaced it.")]
    waits_for: Annotated[Count | None, doc("Id of the incarnation that must be merged first. Null: none.")]
    last_run: Annotated[CountOrNone, doc("Greatest run number opened. -1: none.")]
    runs: Annotated[list[RunReport], doc("By run number; the first is being merged.")]
    consumed: Annotated[RunEnd | None, doc("How far the first run is merged. Null: not started.")]
    last_merged_run: Annotated[CountOrNone, doc("The last run number that is completely merged. -1: none.")]
    runs_cut_short: Annotated[
        Count, doc("Runs that were closed without their last messages, which are lost.")
    ]
    is_connected: Annotated[bool, doc("Whether its publisher is connected to this node.")]
    max_silence_seconds: Annotated[
        Amount, doc("Its publisher promised a message at least this often. 0: it promised nothing.")
    ]
    silent_seconds: Annotated[
        Amount, doc("It has given none for this long, if that is longer, as far as this node knows. Else 0.")
    ]


def sessions(asked: RequestContext) -> Response:
    connected = _connected_sessions(asked.node)
    found = [
        one
        for _, one in sorted(joined(asked.node).sessions.items())
        if asked.query.get("name", one.name) == one.name
    ]
    silent = {one.session: one.silent_s for one in asked.node.silent}
    return Response([_session(one, connected, silent) for one in page(found, asked.query)])


def _session(session: Session, connected: set[str | None], silent: Mapping[str, float]) -> SessionReport:
    is_promising = session.silence_ms_max and not session.is_superseded
    return SessionReport(
        id=session.id,
        name=session.name,
        incarnation=session.incarnation.hex(),
        dedup_id=session.dedup_id,
        is_superseded=session.is_superseded,
        waits_for=session.waits_for or None,
        last_run=session.last_run,
        runs=[RunReport(run.run, run.is_fenced, _end(run.end)) for run in session.active_runs],
        consumed=None if session.consumed is None else _end(session.consumed.end),
        last_merged_run=-1 if session.done is None else session.done[0],
        runs_cut_short=session.runs_cut_short,
        is_connected=session.name in connected and not session.is_superseded,
        max_silence_seconds=session.silence_ms_max / 1000 if is_promising else 0,
        silent_seconds=round(silent.get(session.name, 0), 1) if is_promising else 0,
    )


def _end(end: End | None) -> RunEnd | None:
    return None if end is None else RunEnd(end.roll, end.offset, end.number)


def _connected_sessions(node: NodeSnapshot) -> set[str | None]:
    return {one.session for one in node.clients if not one.ended_ns}


# Dedup ids


class DedupSession(Answer):
    """An incarnation of a session."""

    id: Annotated[Count, doc("Id of the incarnation in this cluster.")]
    name: Annotated[str, doc("Name of the session.")]
    is_superseded: Annotated[bool, doc("Whether a newer incarnation replaced it.")]
    is_open: Annotated[bool, doc("Whether it has unmerged messages or may still receive some.")]
    is_connected: Annotated[bool, doc("Whether its publisher is connected to this node.")]
    number: Annotated[Count, doc("All its messages below this id were merged or dropped as duplicates.")]
    lag: Annotated[Count, doc("Number of ids between `number` and `wanted`.")]


class DedupReport(Answer):
    """Sessions of publishers that send the same messages with the same ids."""

    dedup_id: Annotated[str, doc("The shared dedup id.")]
    wanted: Annotated[Count, doc("Id of the next message to merge.")]
    sessions: Annotated[list[DedupSession], doc("By id; ended incarnations included.")]


def dedup_clients(asked: RequestContext) -> Response:
    """Operators see all dedup ids, other callers their own."""
    state, identity = joined(asked.node), asked.identity
    connected = _connected_sessions(asked.node)
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
    reports = []
    for dedup_id in page(seen, asked.query):
        wanted = state.wanted.get(dedup_id, 0)
        listed = [
            _dedup_session(one, wanted, connected)
            for one in found[dedup_id]
            if is_operator or is_own(asked, "publisher", session_owner(one.name))
        ]
        reports.append(DedupReport(dedup_id, wanted, listed))
    return Response(reports)


def _dedup_session(session: Session, wanted: int, connected: set[str | None]) -> DedupSession:
    if session.consumed is not None:
        number = session.consumed.end.number
    else:
        number = 0 if session.done is None else session.done[1].number
    return DedupSession(
        id=session.id,
        name=session.name,
        is_superseded=session.is_superseded,
        is_open=bool(session.active_runs),
        is_connected=session.name in connected and not session.is_superseded,
        number=number,
        lag=max(wanted - number, 0),
    )


# Clients


class ClientReport(Answer):
    """A connection to this node, or the last ended connection of a client."""

    kind: Annotated[str, doc("publisher, subscriber, or operator and node (which also pull).")]
    name: Annotated[str, doc("Name in the certificate.")]
    certificate: Annotated[str, doc("Identity URI in the certificate.")]
    node: Annotated[str, doc("Node that it is connected to.")]
    address: Annotated[str, doc("host:port. Empty: not known.")]
    session: Annotated[str | None, doc("Session that is pushed. Null: the client pulls.")]
    active: Annotated[bool, doc("Whether it is connected now.")]
    connect_time: Annotated[str, doc("When it connected. RFC 3339.")]
    disconnect_time: Annotated[str, doc(f"When it disconnected. {TIME}")]
    last_message_time: Annotated[str, doc(f"When bytes were last received or sent. {TIME}")]
    position: Annotated[
        Count, doc("Pull: next position. Push: number of the next message to be durable here.")
    ]
    lag: Annotated[Count, doc("Pull: messages not pulled yet. Push: messages received and not merged yet.")]
    bytes: Annotated[Count, doc("Bytes on this connection.")]
    bytes_per_second: Annotated[Amount, doc("Recent rate.")]
    lag_seconds: Annotated[Amount, doc("It has lagged for at least this long. 0: no lag.")]
    directory: Annotated[
        str, doc("Log that it writes or reads, relative to the node's data directory. Empty: not known.")
    ]


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


def _client(client: ClientConnection, node: NodeSnapshot, ids: Mapping[bytes, int]) -> ClientReport:
    if client.session is not None:
        lag = client.position - client.merged
    else:
        end = node.state.position if client.is_of_merged and node.state is not None else client.position
        lag = end - client.position
    return ClientReport(
        kind=client.identity.role,
        name=client.identity.name,
        certificate=client.identity.uri,
        node=node.node,
        address=client.address,
        session=client.session,
        active=not client.ended_ns,
        connect_time=format_time(client.connected_ns),
        disconnect_time=time_or_empty(client.ended_ns),
        last_message_time=time_or_empty(client.last_ns),
        position=client.position,
        lag=max(lag, 0),
        bytes=client.total_bytes,
        bytes_per_second=round(client.rate, 1),
        lag_seconds=round(client.lag_ns / NS_PER_S, 3),
        directory=_directory(client, node.stream, ids),
    )


def _directory(client: ClientConnection, stream: str, ids: Mapping[bytes, int]) -> str:
    """The log that is written or read; "" if not known yet."""
    if client.session is None and client.is_of_merged:
        return f"{stream}/merged"
    session_id = client.session_id if client.session is None else ids.get(client.incarnation)
    return "" if session_id is None else f"{stream}/sessions/{session_id}"


class ClusterClient(Answer):
    """A publisher or subscriber, and a node that it is connected to."""

    node: Annotated[str, doc("The node.")]
    kind: Annotated[str, doc("publisher, subscriber or operator (which also pulls).")]
    name: Annotated[str, doc("Name in the certificate.")]
    session: Annotated[str | None, doc("Session that is pushed. Null: the client pulls.")]
    lag_seconds: Annotated[Amount, doc("It has lagged for at least this long. 0: no lag.")]


class ClusterClients(Answer):
    """The clients of all nodes, as of a few seconds ago."""

    clients: Annotated[list[ClusterClient], doc("By node; of each node the 200 that lag most.")]
    left_out: Annotated[Count, doc("Connected clients that are not in the list.")]
    unknown: Annotated[list[str], doc("Nodes whose clients are not known now, because they do not report.")]


def cluster_clients(asked: RequestContext) -> Response:
    return Response(clients_of_cluster(asked.node))


def clients_of_cluster(node: NodeSnapshot) -> ClusterClients:
    members = sorted(node.standing.nodes, key=lambda one: one.name)
    known = [one for one in members if _is_known(node, one)]
    return ClusterClients(
        [
            ClusterClient(one.name, client.role, client.name, client.session or None, round(client.lag_s, 3))
            for one in known
            for client in one.summary.clients.clients
        ],
        sum(one.summary.clients.left_out for one in known),
        [one.name for one in members if one not in known],
    )


def _is_known(node: NodeSnapshot, member: pb.NodeStanding) -> bool:
    is_there = member.is_connected or member.name == node.node
    return is_there and member.summary.HasField("clients") and node.report_age_s(member) < HUNG_S
