"""The status of all nodes, as this node knows it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import rt
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import UNREACHABLE, Phase, RaftLogView
from sequencer.control.reporter import DataStatus
from sequencer.ipc.silence import HUNG_S
from sequencer.raft.model.api import Leadership, Status
from sequencer.raft.model.members import Members
from sequencer.state.feature_level import LATEST, MemberLevel, member_level

UNREACHABLE_NS: Final = 5 * 10**9
"""A node that sent no summary for this long is unreachable, even if it is connected."""
OFFSETS: Final = 10
"""Number of summaries of a node whose clocks are compared; they cover 5 s. A delay on the way only makes a
clock look late.
"""


class ClusterView:
    """The summaries that the nodes sent. `addresses`: the configured gRPC address of each node, until it
    reports one.
    """

    def __init__(self, name: str, addresses: Mapping[str, str]) -> None:
        self._name, self._addresses = name, addresses
        self._summaries: dict[str, tuple[pb.Summary, int]] = {}
        """Each summary, and when it arrived."""
        self._offsets_ns: dict[str, deque[int]] = {}

    def on_summary(self, node: str, summary: pb.Summary, now_ns: int, clock_ns: int) -> None:
        """`now_ns` is of the monotonic clock, `clock_ns` of the wall clock that nodes compare."""
        self._summaries[node] = summary, now_ns
        self._offsets_ns.setdefault(node, deque(maxlen=OFFSETS)).append(summary.clock_ns - clock_ns)

    def member_levels(self, members: Members, now_ns: int) -> list[MemberLevel]:
        """What each member reported of its program. `now_ns` is of the monotonic clock."""
        nothing = pb.Summary(), now_ns - UNREACHABLE_NS
        return [
            member_level(name, summary, is_current=now_ns - heard_ns < UNREACHABLE_NS)
            for name in members
            for summary, heard_ns in [self._summaries.get(name, nothing)]
        ]

    def to_proto(
        self,
        status: Status,
        leadership: Leadership,
        now_ns: int,
        *,
        members: Members,
        accepts_sessions: bool,
        joined: Mapping[str, str] = MappingProxyType({}),
    ) -> pb.Standing:
        """The message for the data process.

        `members`: the committed list. `accepts_sessions`: whether this node knows all fences and its disk
        counts. `joined`: the gRPC address with which each member joined, for members that do not report.
        """
        standing = pb.Standing(
            node=self._name,
            leader=leadership.leader or "",
            term=status.term,
            role=status.role,
            epoch=status.epoch,
            epoch_id=status.epoch_id,
            leader_gap_s=status.leader_gap_s,
            members_version=status.members_index,
            is_caught_up=accepts_sessions and bool(status.cluster) and status.leader is not None,
        )
        statuses = {member.name: member for member in status.members}
        for name, member in sorted(members.items()):
            said = statuses.get(name)
            one = standing.nodes.add(
                name=name,
                address=self._addresses.get(name) or joined.get(name, ""),
                is_connected=said is not None and said.is_connected,
                is_counted=said is not None and bool(said.is_counted),
                is_learner=not member.votes,
                raft_address=member.address,
            )
            if name not in self._summaries:
                continue
            summary, heard_ns = self._summaries[name]
            one.summary.CopyFrom(summary)
            one.address = summary.address or one.address
            one.summary_age_s = max(now_ns - heard_ns, 0) / 1e9
            one.clock_offset_s = 0.0 if name == self._name else max(self._offsets_ns[name]) / 1e9
            if not one.is_connected or now_ns - heard_ns >= UNREACHABLE_NS:
                one.summary.step, one.summary.step_done, one.summary.step_total = Phase(UNREACHABLE)
        return standing


def raft_log_view(status: Status, *, is_caught_up: bool) -> RaftLogView:
    """`is_caught_up`: everything that earlier terms committed is applied."""
    return RaftLogView(
        status.leader is not None,
        status.applied,
        status.leader_committed,
        is_caught_up and status.role != "joining",
        status.received,
    )


def data_phase(data_status: DataStatus) -> Phase | None:
    """The phase that the data process reported, or None."""
    said = data_status.step
    return Phase(said.step, said.done, said.total) if said.step else None


def summarize(
    data_status: DataStatus, clock_ns: int, step: Phase, *, data_silent_s: float = 0.0
) -> pb.Summary:
    return pb.Summary(
        step=step.name,
        step_done=step.done,
        step_total=step.total,
        clock_ns=clock_ns,
        merged=data_status.merged,
        disk_bytes=data_status.disk_bytes,
        disk_free_bytes=data_status.disk_free_bytes,
        data_silent_s=data_silent_s,
        clients=None if data_silent_s >= HUNG_S else data_status.clients,
        feature_level_latest=LATEST,
        rt_version=rt.__version__,
    )
