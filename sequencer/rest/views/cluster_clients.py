"""Who is connected to which node of the cluster, as the nodes report it to each other. Pure.

Invariant: what a node reported is shown only while it reports. A node that is silent or unreachable is named
instead: its clients may be connected to it or not.
"""

from __future__ import annotations

from typing import Annotated

from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.silence import HUNG_S
from sequencer.rest.base.answer import Amount, Answer, Count, doc
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.views.context import RequestContext, Response


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
