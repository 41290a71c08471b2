"""Status of the cluster and of this node, readiness and liveness, made from one node snapshot. Pure."""

from __future__ import annotations

from typing import Annotated

import rt
from rt.units import NS_PER_MINUTE, format_time
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import PHASES, UNREACHABLE
from sequencer.rest.base.answer import TIME, Amount, Answer, Count, CountOrNone, doc, one_of, time_or_empty
from sequencer.rest.base.node_snapshot import NodeSnapshot, RetainedSize, defects, obstacles
from sequencer.rest.views.admin_views import ConfigurationReport, configuration_of
from sequencer.rest.views.alarms import Alarm, alarms_of
from sequencer.rest.views.context import RequestContext, Response
from sequencer.rest.views.member_actions import (
    MemberChangeReport,
    SettledMemberChange,
    bootstrap_notes,
    member_change,
    settled_member_change,
)
from sequencer.state.feature_level import raise_notes
from sequencer.state.state import SequencerState


class LogEnd(Answer):
    """The end of a merged log."""

    instruction: Annotated[Count, doc("Number of the last merge instruction.")]
    position: Annotated[Count, doc("One past the last merged position.")]
    bytes: Annotated[Count, doc("Total bytes of all merged segments, trimmed ones included.")]
    checksum: Annotated[str, doc("Running checksum of the merged log, hexadecimal.")]


class RetentionReport(Answer):
    """What is retained of the merged log."""

    log_start: Annotated[Count, doc("First position that is kept.")]
    segments: Annotated[Count, doc("Retained merged segments, including the active one.")]
    segments_trimmed: Annotated[Count, doc("Trimmed segments that the cluster still lists.")]
    bytes: Annotated[Count, doc("Bytes of the retained segments.")]
    oldest_minutes: Annotated[
        CountOrNone, doc("Minutes since the oldest retained segment was sealed. -1: none is sealed.")
    ]
    last_trim_time: Annotated[str, doc(f"Time of the last trim. {TIME}")]
    last_trim_reason: Annotated[str, doc("Reason of the last trim. Empty: nothing was trimmed.")]
    holds: Annotated[Count, doc("Number of subscriber holds.")]
    hold_bytes: Annotated[Count, doc("Approximate bytes after the lowest hold.")]


class MemberReport(Answer):
    """A node, as it last reported to this node."""

    name: Annotated[str, doc("Name of the node.")]
    address: Annotated[str, doc("host:port of its gRPC server. Empty: it never reported it.")]
    raft_address: Annotated[str, doc("host:port of its Raft.")]
    role: Annotated[str, one_of(("voter", "learner")), doc("learner: it copies everything, and has no vote.")]
    is_leader: Annotated[bool, doc("Whether it is the leader.")]
    is_connected: Annotated[bool, doc("Whether this node is connected to it, or is it.")]
    is_counted: Annotated[bool, doc("Whether its vote counts: its disk is admitted.")]
    merged: Annotated[LogEnd, doc("Its durable merged log.")]
    phase: Annotated[
        str,
        one_of(PHASES),
        doc(
            "Start-up phase. ready: it keeps up. data-hung: its data process does not answer. "
            "unreachable: it does not report."
        ),
    ]
    phase_done: Annotated[Count, doc("Progress of the phase: bytes of a snapshot, indices or positions.")]
    phase_total: Annotated[Count, doc("End of the phase, in the unit of phaseDone. 0: not known.")]
    report_age_seconds: Annotated[
        float, doc("Time since its last report arrived; older entries are stale. -1: none arrived.")
    ]
    clock_skew_seconds: Annotated[float, doc("How far its clock is ahead of the median of the members'.")]
    stopped: Annotated[str, doc("Why it has stopped merging permanently. Empty: it has not.")]
    clock: Annotated[str, doc(f"Its clock at its last report. {TIME}")]
    feature_level_latest: Annotated[Count, doc("Highest feature level that its rt knows.")]
    version: Annotated[str, doc("Its version of rt. Empty: it does not report one.")]
    disk_bytes: Annotated[Count, doc("Size of its file system.")]
    disk_free_bytes: Annotated[Count, doc("Free bytes of its file system.")]


class NodeStatus(Answer):
    """This node, which answered the request."""

    name: Annotated[str, doc("Name of the node.")]
    role: Annotated[str, doc("Its Raft role.")]
    is_caught_up: Annotated[bool, doc("Whether it applied an entry of the current term since it started.")]
    is_control_up: Annotated[bool, doc("Whether its control process is connected to its data process.")]
    control_silent_seconds: Annotated[
        Amount, doc("Time since its control process last reported. Above 5: it is hung.")
    ]
    applied_index: Annotated[Count, doc("Raft index of the last applied command.")]
    merged_position: Annotated[Count, doc("One past the last position in its merged log.")]
    durable_position: Annotated[Count, doc("One past the last position that is synced to its disk.")]
    lag_messages: Annotated[Count, doc("Committed messages that this node has not merged.")]
    lag_bytes: Annotated[Count, doc("Approximate bytes of these messages.")]
    waits_for: Annotated[str, doc("The input that its merger waits for. Empty: none.")]
    obstacles: Annotated[list[str], doc("Why it is not ready. Empty: it is ready.")]
    failure: Annotated[str, doc("Why its data process failed. Empty: it has not failed.")]
    start_time: Annotated[str, doc("When its data process started.")]
    version: Annotated[str, doc("Version of rt.")]


class StatusReport(Answer):
    """The cluster as this node knows it, and this node."""

    stream: Annotated[str, doc("Name of the stream.")]
    cluster: Annotated[str, doc("Cluster id, hexadecimal. Empty: not known yet.")]
    epoch: Annotated[Count, doc("Cluster epoch; each reset increments it.")]
    leader: Annotated[str, doc("Name of the leader. Empty: none is known.")]
    term: Annotated[Count, doc("Raft term.")]
    committed: Annotated[LogEnd, doc("The committed merged log, as far as this node applied it.")]
    sequenced_time: Annotated[str, doc(f"Sequencing time of the last merge instruction. {TIME}")]
    configuration: Annotated[ConfigurationReport, doc("The replicated configuration.")]
    retention: Annotated[RetentionReport, doc("What is retained of the merged log.")]
    leases: Annotated[Count, doc("Number of held leases.")]
    feature_level: Annotated[Count, doc("Feature level of the cluster.")]
    notes: Annotated[list[str], doc("What an operator may do at any time. Empty: nothing.")]
    alarms: Annotated[list[Alarm], doc("Critical alarms first. Empty: no problem is known.")]
    members: Annotated[list[MemberReport], doc("By name.")]
    member_change: Annotated[
        MemberChangeReport | None, doc("The change of the members that is being carried out. Null: none.")
    ]
    member_change_waits_for: Annotated[str, doc("What it waits for, as the leader says. Empty: nothing.")]
    settled_member_change: Annotated[
        SettledMemberChange | None, doc("The last change of the members that ended. Null: none did.")
    ]
    node: Annotated[NodeStatus, doc("This node, which answered the request.")]


def status(asked: RequestContext) -> Response:
    node, standing = asked.node, asked.node.standing
    state = node.state or SequencerState(b"")
    merged = state.merged
    return Response(
        StatusReport(
            stream=node.stream,
            cluster=state.cluster.hex() if any(state.cluster) else "",
            epoch=standing.epoch,
            leader=standing.leader,
            term=standing.term,
            committed=LogEnd(state.instruction, state.position, merged.total_bytes, f"{merged.chain:08x}"),
            sequenced_time=time_or_empty(state.sequenced_ns),
            configuration=configuration_of(node, state),
            retention=_retention(node, state),
            leases=len(state.leases),
            feature_level=state.feature_level,
            notes=[*raise_notes(state.feature_level, node.member_levels), *bootstrap_notes(node)],
            alarms=alarms_of(node),
            members=[_member(one, node) for one in sorted(standing.nodes, key=lambda one: one.name)],
            member_change=member_change(state),
            member_change_waits_for=next(
                (one.summary.members_wait for one in standing.nodes if one.name == standing.leader), ""
            ),
            settled_member_change=settled_member_change(state),
            node=_node(node),
        )
    )


def _retention(node: NodeSnapshot, state: SequencerState) -> RetentionReport:
    kept = RetainedSize(state)
    trimmed = [one for one in state.segments if one.is_trimmed]
    oldest = next((one for one in state.segments if not one.is_trimmed), None)
    age_ns = 0 if oldest is None else max(node.now_ns - oldest.sealed_ns, 0)
    least = min((one.position for one in state.holds.values()), default=state.position)
    return RetentionReport(
        log_start=state.log_start,
        segments=kept.segments,
        segments_trimmed=len(trimmed),
        bytes=kept.total_bytes,
        oldest_minutes=-1 if oldest is None else age_ns // NS_PER_MINUTE,
        last_trim_time=time_or_empty(trimmed[-1].trimmed_ns) if trimmed else "",
        last_trim_reason=trimmed[-1].reason.name.lower() if trimmed else "",
        holds=len(state.holds),
        hold_bytes=kept.bytes_from(least),
    )


def _member(one: pb.NodeStanding, node: NodeSnapshot) -> MemberReport:
    standing, summary, merged = node.standing, one.summary, one.summary.merged
    return MemberReport(
        name=one.name,
        address=one.address,
        raft_address=one.raft_address,
        role="learner" if one.is_learner else "voter",
        is_leader=one.name == standing.leader,
        is_connected=one.is_connected or one.name == standing.node,
        is_counted=one.is_counted,
        merged=LogEnd(merged.instruction, merged.position, merged.bytes, f"{merged.chain:08x}"),
        phase=summary.step or UNREACHABLE,
        phase_done=summary.step_done,
        phase_total=summary.step_total,
        report_age_seconds=round(node.report_age_s(one), 1),
        clock_skew_seconds=round(node.clock_skews.get(one.name, 0.0), 3),
        stopped=merged.stopped,
        clock=time_or_empty(summary.clock_ns),
        feature_level_latest=max(summary.feature_level_latest, 1),
        version=summary.rt_version,
        disk_bytes=summary.disk_bytes,
        disk_free_bytes=summary.disk_free_bytes,
    )


def _node(node: NodeSnapshot) -> NodeStatus:
    merging = node.merging
    lag_messages, lag_bytes = node.lag
    return NodeStatus(
        name=node.node,
        role=node.standing.role,
        is_caught_up=node.standing.is_caught_up,
        is_control_up=node.is_control_up,
        control_silent_seconds=round(node.control_silent_s, 1),
        applied_index=node.applied_index,
        merged_position=0 if merging is None else merging.position,
        durable_position=0 if merging is None else merging.durable_position,
        lag_messages=lag_messages,
        lag_bytes=lag_bytes,
        waits_for="" if merging is None else merging.waits_for,
        obstacles=obstacles(node),
        failure=node.failure or ("" if merging is None else merging.failure),
        start_time=format_time(node.started_ns),
        version=rt.__version__,
    )


# Probes


class Readiness(Answer):
    """Whether this node should receive traffic."""

    ready: Annotated[bool, doc("True if and only if the HTTP status is 200.")]
    obstacles: Annotated[list[str], doc("Why it is not ready. Empty: it is ready.")]


class Liveness(Answer):
    """Whether the processes of this node work."""

    alive: Annotated[bool, doc("True if and only if the HTTP status is 200.")]
    obstacles: Annotated[list[str], doc("Why it is not alive. Empty: it is alive.")]


def readiness(asked: RequestContext) -> Response:
    """200 if the node leads or follows with a majority, merges, and lags little; else 503."""
    found = obstacles(asked.node)
    return Response(Readiness(not found, found), 503 if found else 200)


def liveness(asked: RequestContext) -> Response:
    """200 while the processes of this node work, whatever the other nodes do; else 503.

    While the data process hangs, the supervisor answers 503 on the health port.
    """
    found = defects(asked.node)
    return Response(Liveness(not found, found), 503 if found else 200)
