"""Clients of the whole cluster: what nodes report to each other, and nodes without a current report."""

from __future__ import annotations

from typing import Any

import pytest
from rest_node import OPERATOR, PUBLISHER, SECOND, SUBSCRIBER, node_view, standing

from replicator.protocol.handshake import PullMerged, PullProgress, PullSession
from replicator.pull.server import Pull
from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import READY, Phase
from sequencer.control.cluster_view import summarize
from sequencer.control.reporter import DurableEnds
from sequencer.ipc.silence import HUNG_S
from sequencer.rest.views.client_views import ClusterClients, clients_of_cluster
from sequencer.rest.views.endpoints import ENDPOINTS
from sequencer.sessions.client_tracker import REPORTED_MAX, ClientTracker


def connected(*names: str, left_out: int = 0) -> pb.ConnectedClients:
    clients = [pb.ConnectedClient(role="subscriber", name=name, lag_s=1.5) for name in names]
    return pb.ConnectedClients(clients=clients, left_out=left_out)


def three(**changes: Any) -> pb.Standing:
    """The standing as n1 reports it. Each node has a subscriber, and n2 also has a publisher."""
    made = standing(**changes)
    for one in made.nodes:
        one.is_connected = one.name != "n1"
        one.summary.clients.CopyFrom(connected(f"of-{one.name}"))
        if one.name == "n2":
            one.summary.clients.clients.add(role="publisher", name="feed", session="feed~2")
    return made


def seen(told: pb.Standing) -> ClusterClients:
    return clients_of_cluster(node_view(standing=told))


def test_cluster_clients_lists_clients_of_all_nodes() -> None:
    found = seen(three())
    assert [(one.node, one.kind, one.name, one.session) for one in found.clients] == [
        ("n1", "subscriber", "of-n1", None),
        ("n2", "subscriber", "of-n2", None),
        ("n2", "publisher", "feed", "feed~2"),
        ("n3", "subscriber", "of-n3", None),
    ]
    assert (found.clients[0].lag_seconds, found.left_out, found.unknown) == (1.5, 0, [])


@pytest.mark.parametrize("change", ["away", "old report", "data process silent"])
def test_cluster_clients_lists_node_without_current_report_as_unknown(change: str) -> None:
    told = three()
    (n3,) = (one for one in told.nodes if one.name == "n3")
    if change == "away":
        n3.is_connected = False
    elif change == "old report":
        n3.summary_age_s = HUNG_S
    else:
        n3.summary.ClearField("clients")
    found = seen(told)
    assert {one.node for one in found.clients} == {"n1", "n2"}
    assert found.unknown == ["n3"]


def test_summary_keeps_last_reported_clients_until_data_process_is_silent() -> None:
    ends = DurableEnds(b"boot")
    ends.handle_report(pb.DataReport(clients=connected("a", left_out=3)))
    ends.handle_report(pb.DataReport(disk_bytes=7))
    made = summarize(ends.data_status, 1, Phase(READY))
    assert made.clients == connected("a", left_out=3)
    ends.handle_report(pb.DataReport(clients=connected()))
    empty = summarize(ends.data_status, 1, Phase(READY))
    assert empty.HasField("clients")
    assert not empty.clients.clients
    assert not summarize(ends.data_status, 1, Phase(READY), data_silent_s=HUNG_S).HasField("clients")


def test_node_reports_clients_up_to_limit_and_counts_the_rest() -> None:
    clients = ClientTracker(lambda: 1000 * SECOND)
    pulls = {
        number: Pull(
            Identity("s", "subscriber", f"sub{number:04}"),
            "ipv4:10.0.0.1:77",
            PullMerged(),
            1000 * SECOND,
            progress=PullProgress(7),
        )
        for number in range(REPORTED_MAX + 2)
    }
    pulls[9999] = Pull(Identity("s", "node", "n2"), "ipv4:10.0.0.1:78", PullSession(1), 1000 * SECOND)
    clients.record_pulls(pulls)
    found = clients.connected()
    assert [one.name for one in found.clients] == [f"sub{number:04}" for number in range(REPORTED_MAX)]
    assert found.left_out == 2
    clients.record_pulls({})
    assert clients.connected() == pb.ConnectedClients()
    assert found.ByteSize() < 10_000


def test_cluster_clients_is_readable_by_operators_not_publishers_or_subscribers() -> None:
    (endpoint,) = (one for one in ENDPOINTS if one.path == "/cluster-clients")
    assert OPERATOR.role in endpoint.roles
    assert not {PUBLISHER.role, SUBSCRIBER.role} & endpoint.roles
