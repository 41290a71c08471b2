"""`/metrics`: the metrics of a node. Pure.

Invariants:
- A node always exports the same metrics. An unknown value is 0 or has no sample.
- A name ends in its unit, if it has one. Counters end in `_total`.
- No label names a session, subscriber or certificate: the port needs no certificate, and labels stay few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

from msgspec.structs import asdict

import rt
from rt.exposition import CONDITION, Metric, condition, exposition, number
from rt.units import NS_PER_S
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import DATA_HUNG, PHASES, READY, UNREACHABLE
from sequencer.rest.base.node_snapshot import NodeSnapshot, RetainedSize, obstacles
from sequencer.rest.views.alarms import Severity, alarms_of, is_resetting
from sequencer.rest.views.context import RequestContext, Response
from sequencer.rest.views.log_metrics import of_log, of_policy, of_publishers, of_subscribers
from sequencer.state.state import SequencerState

_SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
_STEPS: Final = [step for step in PHASES if step not in {DATA_HUNG, UNREACHABLE}]
"""The phases that are exported. A node in one of the other phases exports nothing."""


def metrics(asked: RequestContext) -> Response:
    return Response(exposition(metrics_of(asked.node)))


def metrics_of(node: NodeSnapshot) -> Iterator[Metric]:
    state = node.state or SequencerState(b"")
    kept = RetainedSize(state)
    yield from _of_merging(node, state)
    yield from _of_members(node, state)
    yield from of_log(node, state, kept)
    yield from of_policy(node, state, kept)
    yield from of_publishers(node, state)
    yield from of_subscribers(node, state, kept)
    yield from _of_leases(node, state)
    yield from _of_services(node)
    yield from _of_raft(node)
    yield from _of_damage(node)
    yield from _of_process(node)


def _of_merging(node: NodeSnapshot, state: SequencerState) -> Iterator[Metric]:
    merging = node.merging
    lag_messages, lag_bytes = node.lag
    position = 0 if merging is None else merging.position
    durable = 0 if merging is None else merging.durable_position
    is_catching_up = merging is not None and merging.is_behind_gap
    yield number("rt_merged_position", "One past the last position in this node's merged log.", position)
    yield number(
        "rt_merged_durable_position",
        "One past the last position that is synced in this node's merged log.",
        durable,
    )
    yield number("rt_committed_position", "One past the last committed position.", state.position)
    yield number(
        "rt_committed_bytes_total",
        "Committed bytes of the merged log, trimmed ones included.",
        state.merged.total_bytes,
    )
    yield number(
        "rt_merge_instructions_total",
        "Merge instructions committed since the cluster was created.",
        state.instruction,
    )
    yield number("rt_merge_lag_messages", "Committed messages that this node has not merged.", lag_messages)
    yield number(
        "rt_merge_lag_bytes", "Approximate committed bytes that this node has not merged.", lag_bytes
    )
    yield condition(
        "rt_merge_stopped",
        "1 if this node's merger has failed: a disk error, or bytes other than the committed checksum.",
        bool(merging and merging.failure),
    )
    yield condition(
        "rt_merge_catching_up", "1 if this node copies merged bytes from another node.", is_catching_up
    )


def _of_members(node: NodeSnapshot, state: SequencerState) -> Iterator[Metric]:
    members = {(one.name,): one for one in node.standing.nodes}
    total = state.merged.total_bytes
    yield Metric(
        "rt_member_merge_lag_bytes",
        "Committed bytes not durably merged by this member, by its last report.",
        ("member",),
        {name: max(total - one.summary.merged.bytes, 0) for name, one in members.items()},
    )
    yield Metric(
        "rt_member_stopped",
        "1 if this member has stopped merging: its bytes diverge, or its disk has failed.",
        ("member",),
        {name: bool(one.summary.merged.stopped) for name, one in members.items()},
        unit=CONDITION,
    )
    yield Metric(
        "rt_member_data_silent_seconds",
        "Time since this member's data process last reported, as its control process says. Above 5: hung.",
        ("member",),
        {name: one.summary.data_silent_s for name, one in members.items()},
    )
    yield Metric(
        "rt_member_report_age_seconds",
        "Time since the last report of this member arrived here.",
        ("member",),
        {name: node.report_age_s(one) for name, one in members.items() if one.HasField("summary")},
    )
    yield Metric(
        "rt_member_clock_skew_seconds",
        "How far this member's clock is ahead of the median of the members that report.",
        ("member",),
        {(name,): skew_s for name, skew_s in node.clock_skews.items()},
    )
    yield number("rt_feature_level", "Feature level of the cluster.", state.feature_level)
    yield Metric(
        "rt_member_feature_level_latest",
        "Highest feature level that the rt of this member knows.",
        ("member",),
        {(one.member,): one.latest for one in node.member_levels},
    )
    own = next((one.summary for one in members.values() if one.name == node.node), pb.Summary())
    yield Metric(
        "rt_node_phase",
        "1 for the current start-up phase of this node; the last phase is ready.",
        ("phase",),
        {(step,): own.step == step for step in _STEPS},
        unit=CONDITION,
    )
    share = own.step_done / own.step_total if own.step_total else float(own.step == READY)
    yield number(
        "rt_node_phase_progress_ratio", "Completed share of the current start-up phase. 0: not known.", share
    )


def _of_leases(node: NodeSnapshot, state: SequencerState) -> Iterator[Metric]:
    counts = node.counts.leases
    yield number("rt_leases", "Held leases.", len(state.leases))
    yield Metric(
        "rt_lease_table_bytes",
        "Bytes of the tables that the owners of leases keep in the cluster, by group. At most 48 MiB each.",
        ("group",),
        {(group,): size for group, size in sorted(state.tables.bytes_of.items())},
    )
    yield Metric(
        "rt_lease_changes_total",
        "Leases granted, renewed, released or expired since this process started.",
        ("change",),
        {(change,): value for change, value in asdict(counts).items()},
        unit="leases",
    )


def _of_services(node: NodeSnapshot) -> Iterator[Metric]:
    counts = node.counts
    yield Metric(
        "rt_rejections_total",
        "Requests, streams and connections rejected or aborted, by place and error class.",
        ("at", "reason"),
        dict(sorted(counts.refused.items())),
        unit="refusals",
    )
    yield Metric(
        "rt_http_requests_total",
        "HTTP responses by port and status.",
        ("port", "status"),
        {(port, str(status)): count for (port, status), count in sorted(counts.requests.items())},
        unit="answers",
    )


def _of_raft(node: NodeSnapshot) -> Iterator[Metric]:
    standing = node.standing
    is_leader = bool(standing.leader) and standing.leader == node.node
    own = next((one.summary for one in standing.nodes if one.name == node.node), pb.Summary())
    yield number("rt_raft_term", "Raft term.", standing.term)
    yield number(
        "rt_raft_leader_gap_seconds",
        "Longest silence of the leader in this term, as this follower saw it.",
        standing.leader_gap_s,
    )
    yield number("rt_raft_epoch", "Cluster epoch; each reset increments it.", standing.epoch)
    yield number("rt_raft_applied_index", "Raft index of the last applied command.", node.applied_index)
    yield condition("rt_is_leader", "1 if this node is the leader.", is_leader)
    yield condition("rt_has_leader", "1 if this node knows a leader.", bool(standing.leader))
    yield condition("rt_is_ready", "1 if /readiness answers 200.", not obstacles(node))
    yield condition("rt_control_connected", "1 if the control process is connected.", node.is_control_up)
    yield number(
        "rt_control_silent_seconds",
        "Time since the control process last reported. Above 5: it is hung or down.",
        node.control_silent_s,
    )
    yield condition(
        "rt_reset_running", "1 if this node knows that a reset of the cluster runs.", is_resetting(node)
    )
    yield Metric(
        "rt_peer_connected",
        "1 if this node is connected to this peer.",
        ("peer",),
        {(one.name,): one.is_connected for one in standing.nodes if one.name != node.node},
        unit=CONDITION,
    )
    yield number("rt_disk_bytes", "Size of this node's file system. 0: not reported yet.", own.disk_bytes)
    yield number("rt_disk_free_bytes", "Free bytes of this node's file system.", own.disk_free_bytes)


def _of_damage(node: NodeSnapshot) -> Iterator[Metric]:
    damage = node.counts.damage
    yield number(
        "rt_corrupt_segments_total",
        "Segments found corrupt on this node's disk since this process started.",
        damage.found,
        unit="segments",
    )
    yield number(
        "rt_repaired_segments_total",
        "Segments repaired with good bytes of other nodes since this process started.",
        damage.repaired,
        unit="segments",
    )
    yield number(
        "rt_last_corruption_timestamp_seconds",
        "Unix time when corrupt bytes were last found on this node's disk. 0: none are known.",
        damage.last_ns / NS_PER_S,
    )


def _of_process(node: NodeSnapshot) -> Iterator[Metric]:
    counts, alarms = node.counts, alarms_of(node)
    yield Metric(
        "rt_alarms",
        "Active alarms, as /status lists them.",
        ("severity",),
        {(severity,): sum(one.severity == severity for one in alarms) for severity in _SEVERITIES},
    )
    end_s = counts.certificate_end_s
    yield Metric(
        "rt_certificate_expiry_timestamp_seconds",
        "Unix time when the node's certificate expires.",
        (),
        {(): end_s} if end_s else {},
    )
    yield Metric(
        "rt_info",
        "Version of rt, stream and node; always 1.",
        ("version", "stream", "node"),
        {(rt.__version__, node.stream, node.node): 1},
        unit="1",
    )
    yield number("process_cpu_seconds_total", "CPU time of the data process.", counts.cpu_s)
    yield number("process_resident_memory_bytes", "Resident memory of the data process.", counts.memory_bytes)
    yield number(
        "process_start_time_seconds", "Unix time when the data process started.", node.started_ns / NS_PER_S
    )
