"""How the nodes stand: what each says of itself, and what a data process is told of all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.holdings import Standings
from sequencer.raft.consensus import Leadership, Status


class Nodes:
    """The nodes as this one, `name`, hears of them. `addresses`: of their data processes, by name."""

    def __init__(self, name: str, addresses: Mapping[str, str]) -> None:
        self._name, self._addresses = name, addresses
        self._summaries: dict[str, pb.Summary] = {}

    def on_summary(self, node: str, summary: pb.Summary) -> None:
        """A node, maybe this one, says how it stands."""
        self._summaries[node] = summary

    def standing(self, status: Status, leadership: Leadership, *, may_take: bool) -> pb.Standing:
        """What the data process is told. `may_take`: this node knows of all fences, and its disk counts."""
        standing = pb.Standing(
            node=self._name,
            leader=leadership.leader or "",
            term=status.term,
            role=status.role,
            epoch=status.epoch,
            is_caught_up=may_take and bool(status.cluster) and status.leader is not None,
        )
        for member in status.members:
            one = standing.nodes.add(
                name=member.name,
                address=self._addresses[member.name],
                is_connected=member.is_connected,
                is_counted=bool(member.is_counted),
            )
            summary = self._summaries.get(member.name)
            if summary is not None:
                one.summary.CopyFrom(summary)
        return standing


def summary_of(standings: Standings, clock_ns: int) -> pb.Summary:
    """What this node says of itself."""
    return pb.Summary(
        clock_ns=clock_ns,
        merged=standings.merged,
        disk_bytes=standings.disk_bytes,
        disk_free_bytes=standings.disk_free_bytes,
    )
