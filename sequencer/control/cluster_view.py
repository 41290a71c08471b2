"""How the nodes stand: what each says of itself, and what a data process is told of all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import AWAY, Phase, RaftLogView
from sequencer.control.reporter import ClusterStandings
from sequencer.raft.model.api import Leadership, Status

AWAY_NS: Final = 5 * 10**9
"""A node that has said nothing for so long is away, even if a connection with it stands."""


class ClusterView:
    """The nodes as this one, `name`, hears of them. `addresses`: of their data processes, by name."""

    def __init__(self, name: str, addresses: Mapping[str, str]) -> None:
        self._name, self._addresses = name, addresses
        self._summaries: dict[str, tuple[pb.Summary, int]] = {}
        """With the time at which it was heard."""

    def on_summary(self, node: str, summary: pb.Summary, now_ns: int) -> None:
        """A node, maybe this one, says how it stands."""
        self._summaries[node] = summary, now_ns

    def standing(self, status: Status, leadership: Leadership, now_ns: int, *, may_take: bool) -> pb.Standing:
        """What the data process is told. `may_take`: this node knows of all fences, and its disk counts."""
        standing = pb.Standing(
            node=self._name,
            leader=leadership.leader or "",
            term=status.term,
            role=status.role,
            epoch=status.epoch,
            epoch_id=status.epoch_id,
            leader_gap_s=status.leader_gap_s,
            is_caught_up=may_take and bool(status.cluster) and status.leader is not None,
        )
        for member in status.members:
            one = standing.nodes.add(
                name=member.name,
                address=self._addresses[member.name],
                is_connected=member.is_connected,
                is_counted=bool(member.is_counted),
            )
            if member.name not in self._summaries:
                continue
            summary, heard_ns = self._summaries[member.name]
            one.summary.CopyFrom(summary)
            if not member.is_connected or now_ns - heard_ns >= AWAY_NS:
                one.summary.step, one.summary.step_done, one.summary.step_total = Phase(AWAY)
        return standing


def log_of(status: Status, *, is_caught_up: bool) -> RaftLogView:
    """What the steps are told of Raft. `is_caught_up`: all that earlier terms committed is applied."""
    return RaftLogView(
        status.leader is not None,
        status.applied,
        status.leader_committed,
        is_caught_up and status.role != "joining",
        status.received,
    )


def data_step(standings: ClusterStandings) -> Phase | None:
    """What the data process said of its part; None if it has said nothing."""
    said = standings.step
    return Phase(said.step, said.done, said.total) if said.step else None


def summary_of(standings: ClusterStandings, clock_ns: int, step: Phase) -> pb.Summary:
    """What this node says of itself."""
    return pb.Summary(
        step=step.name,
        step_done=step.done,
        step_total=step.total,
        clock_ns=clock_ns,
        merged=standings.merged,
        disk_bytes=standings.disk_bytes,
        disk_free_bytes=standings.disk_free_bytes,
    )
