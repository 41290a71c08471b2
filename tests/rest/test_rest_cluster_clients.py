"""Who is connected to which node: what nodes report to each other, and nothing of a node that is silent."""

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
    """n1 answers; a subscriber of each node, and a publisher of n2."""
    made = standing(**changes)
    for one in made.nodes:
        one.is_connected = one.name != "n1"
        one.summary.clients.CopyFrom(connected(f"of-{one.name}"))
        if one.name == "n2":
            one.summary.clients.clients.add(role="publisher", name="feed", session="feed~2")
    return made


def seen(told: pb.Standing) -> ClusterClients:
    return clients_of_cluster(node_view(standing=told))


def test_each_node_shows_the_clients_of_all() -> None:
    found = seen(three())
    assert [(one.node, one.kind, one.name, one.session) for one in found.clients] == [
        ("n1", "subscriber", "of-n1", None),
        ("n2", "subscriber", "of-n2", None),
        ("n2", "publisher", "feed", "feed~2"),
        ("n3", "subscriber", "of-n3", None),
    ]
    assert (found.clients[0].lag_seconds, found.left_out, found.unknown) == (1.5, 0, [])


@pytest.mark.parametrize("change", ["away", "old report", "data process silent"])
def test_of_a_node_that_does_not_report_nothing_is_shown_and_that_is_told(change: str) -> None:
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


def test_a_summary_has_the_clients_until_the_data_process_is_silent_or_another_one_starts() -> None:
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


def test_a_node_reports_its_publishers_and_subscribers_and_counts_those_beyond_the_limit() -> None:
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


def test_only_operators_see_all_clients() -> None:
    (endpoint,) = (one for one in ENDPOINTS if one.path == "/cluster-clients")
    assert OPERATOR.role in endpoint.roles
    assert not {PUBLISHER.role, SUBSCRIBER.role} & endpoint.roles
