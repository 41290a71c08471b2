"""Messages between nodes: who receives them, and when a report to the leader is repeated in full."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rt.errors import Diverged
from rt.v1 import sequencer_pb2 as pb
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.control.reporter import IDLE_REPORT_NS, REPORT_NS, Reporter
from sequencer.leader.divergence_check import Divergence
from sequencer.leader.peer_fetch_planner import FetchRequest
from sequencer.leader.replication_tracker import BatchBoundary, pack_boundaries


class Mesh:
    """Nodes that exchange messages. Records the received messages and the messages in flight."""

    def __init__(self, *names: str, leader: str | None = None) -> None:
        self.heard: dict[str, list[object]] = {name: [] for name in names}
        self.soon: list[Callable[[], None]] = []
        self.cut_off: set[str] = set()
        self.nodes = {name: self._node(name, names) for name in names}
        for node in self.nodes.values():
            node.leader = leader

    def _node(self, name: str, names: tuple[str, ...]) -> PeerMessenger:
        heard = self.heard[name]

        def send(peer: str, content: bytes) -> bool:
            if peer not in self.cut_off:
                self.nodes[peer].on_message(name, content)
            return peer not in self.cut_off

        return PeerMessenger(
            name,
            [peer for peer in names if peer != name],
            send,
            self.soon.append,
            on_report=lambda node, report: heard.append((node, report)),
            on_full_report_requested=lambda: heard.append("again"),
            on_fetch=heard.append,
            on_summary=lambda node, summary: heard.append((node, summary)),
            on_diverged=heard.append,
        )


@pytest.fixture
def mesh() -> Mesh:
    return Mesh("n1", "n2", "n3", leader="n1")


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_report_reaches_leader_on_local_or_remote_node(mesh, node):
    report = pb.Report(sequence=3)
    assert mesh.nodes[node].send_report(report)
    assert mesh.heard == {"n1": [(node, report)], "n2": [], "n3": []}


def test_send_report_returns_false_when_leader_is_unreachable(mesh):
    mesh.cut_off.add("n1")
    assert not mesh.nodes["n2"].send_report(pb.Report())


def test_summary_reaches_every_node_including_sender(mesh):
    summary = pb.Summary(clock_ns=7)
    mesh.nodes["n2"].send_summary(summary)
    assert mesh.heard == {name: [("n2", summary)] for name in mesh.nodes}


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_leader_requests_reach_only_the_addressed_node(mesh, node):
    leader = mesh.nodes["n1"]
    leader.request_full_report(node)
    for call in mesh.soon:
        call()
    leader.request_fetch(FetchRequest(node, "n3", 1, 2, 3, 640))
    leader.report_divergence(Divergence(node, 5, 6, 7))
    again, fetch, diverged = mesh.heard.pop(node)
    assert again == "again"
    assert fetch == pb.Fetch(session_id=1, run=2, roll=3, offset=640, holder="n3")
    assert isinstance(diverged, Diverged)
    assert "instruction 5" in str(diverged)
    assert not any(mesh.heard.values())


def test_leader_receives_its_own_divergence_report(mesh):
    mesh.nodes["n1"].report_divergence(Divergence(None, 5, 6, 7))
    assert [type(one) for one in mesh.heard["n1"]] == [Diverged]


def test_leader_defers_full_report_request_to_its_own_node(mesh):
    mesh.nodes["n1"].request_full_report("n1")
    assert mesh.heard["n1"] == []
    assert len(mesh.soon) == 1


def test_requests_are_ignored_unless_from_known_leader(mesh):
    for known in (None, "n3"):
        mesh.nodes["n2"].leader = known
        mesh.nodes["n1"].request_full_report("n2")
        mesh.nodes["n1"].request_fetch(FetchRequest("n2", "n3", 1, 2, 3, 640))
        mesh.nodes["n1"].report_divergence(Divergence("n2", 5, 6, 7))
    assert mesh.heard["n2"] == []


def test_undecodable_message_is_rejected_and_logged(mesh, caplog):
    mesh.nodes["n2"].on_message("n1", b"\xff\xff\xff")
    mesh.nodes["n2"].on_message("n1", b"")
    assert mesh.heard["n2"] == []
    assert caplog.text.count("message_rejected") == 1


# Reporting


class Reports:
    """The reporter of one node, and the times at which it is due."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.due: list[int] = []
        self.reporting = Reporter(mesh.nodes["n2"], self.due.append)

    def hold(self, *marks: BatchBoundary) -> None:
        self.reporting.handle_report(
            pb.DataReport(segments=[pb.SegmentReport(session_id=1, boundaries=pack_boundaries(list(marks)))])
        )

    @property
    def heard(self) -> list[pb.Report]:
        said = [report for _, report in self.mesh.heard["n1"]]
        self.mesh.heard["n1"].clear()
        return said


@pytest.fixture
def reports(mesh) -> Reports:
    reports = Reports(mesh)
    reports.reporting.attach(b"boot")
    reports.hold(BatchBoundary(64, 0, 7))
    return reports


def test_news_is_reported_once_and_report_without_news_is_not_sent_early(reports):
    reports.reporting.report_news()
    (first,) = reports.heard
    assert first.is_full
    assert [one.session_id for one in first.segments] == [1]
    reports.reporting.report_news()
    assert reports.heard == []
    reports.reporting.report()
    (second,) = reports.heard
    assert (second.sequence, second.is_full, [*second.segments]) == (first.sequence + 1, False, [])


def test_report_without_news_is_scheduled_later_than_report_with_news(reports):
    reports.reporting.report()
    reports.reporting.report()
    with_news, without = reports.due
    assert reports.reporting.due_ns == without
    assert without - with_news >= IDLE_REPORT_NS - REPORT_NS


def test_full_report_follows_lost_report(reports):
    reports.reporting.report()
    reports.mesh.cut_off.add("n1")
    reports.hold(BatchBoundary(128, 1, 8))
    reports.reporting.report()
    reports.mesh.cut_off.clear()
    assert [report.is_full for report in reports.heard] == [True]
    reports.reporting.report()
    (report,) = reports.heard
    assert report.is_full
    assert report.segments[0].boundaries == pack_boundaries(
        [BatchBoundary(64, 0, 7), BatchBoundary(128, 1, 8)]
    )


def test_reports_are_not_sent_without_leader_or_data_process(reports):
    reports.mesh.nodes["n2"].leader = None
    reports.reporting.report()
    reports.mesh.nodes["n2"].leader = "n1"
    reports.reporting.attach(b"")
    reports.reporting.report()
    assert reports.heard == []
    assert len(reports.due) == 2
