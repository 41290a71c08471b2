"""`/metrics`: what a node measures.

Pure. Laws: a node tells of the same metrics at all times, those of what it does not know yet without a sample
or 0. Names end in their unit where they have one that is counted or measured; counters end in `_total`. No
name of a session, a subscriber or a certificate is a label: the port has no certificates, and labels must
stay few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Final, get_args

import rt
from rt.v1 import sequencer_pb2 as pb
from sequencer.rest.alarms import Severity, alarms_of
from sequencer.rest.asking import Answer, Asked
from sequencer.rest.exposition import Metric, counter, exposition, gauge
from sequencer.rest.kept import Kept
from sequencer.rest.log_metrics import of_log, of_policy, of_publishers, of_subscribers
from sequencer.rest.node_view import NodeView, obstacles
from sequencer.rest.times import NS_PER_S
from sequencer.state import State
from sequencer.steps import AWAY, READY, STEPS

_SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
_STEPS: Final = [step for step in STEPS if step != AWAY]
"""A node that is away tells nothing."""
IS: Final = "0 or 1"


def metrics(asked: Asked) -> Answer:
    """All metrics, as text."""
    return Answer(exposition(metrics_of(asked.node)))


def metrics_of(node: NodeView) -> Iterator[Metric]:
    """What a node measures."""
    state = node.state or State(b"")
    kept = Kept(state)
    yield from _of_merging(node, state)
    yield from _of_members(node, state)
    yield from of_log(node, state, kept)
    yield from of_policy(node, state, kept)
    yield from of_publishers(node, state)
    yield from of_subscribers(node, state, kept)
    yield from _of_leases(node, state)
    yield from _of_services(node)
    yield from _of_raft(node)
    yield from _of_process(node)


def _of_merging(node: NodeView, state: State) -> Iterator[Metric]:
    merging = node.merging
    lag_messages, lag_bytes = node.lag
    position = 0 if merging is None else merging.position
    durable = 0 if merging is None else merging.durable_position
    is_catching_up = merging is not None and merging.is_behind_gap
    yield gauge(
        "rt_merged_position", "position", "One past the last position in this node's merged log.", position
    )
    yield gauge(
        "rt_merged_durable_position", "position", "One past the last position that is synced there.", durable
    )
    yield gauge(
        "rt_committed_position", "position", "One past the last position that is committed.", state.position
    )
    yield counter(
        "rt_committed_bytes_total", "bytes", "Of all merged segments, ever.", state.merged.total_bytes
    )
    yield counter("rt_instructions_total", "instructions", "Merge instructions, ever.", state.instruction)
    yield gauge("rt_merge_lag_messages", "messages", "Committed and not merged here yet.", lag_messages)
    yield gauge("rt_merge_lag_bytes", "bytes", "About what is committed and not merged here yet.", lag_bytes)
    yield gauge(
        "rt_merge_stopped",
        IS,
        "1 if this node's merger has failed: a disk, or bytes that differ from what was agreed.",
        bool(merging and merging.failure),
    )
    yield gauge("rt_merge_catching_up", IS, "1 if merged bytes come from another node.", is_catching_up)


def _of_members(node: NodeView, state: State) -> Iterator[Metric]:
    members = {(one.name,): one for one in node.standing.nodes}
    total = state.merged.total_bytes
    yield Metric(
        "rt_member_merge_lag_bytes",
        "gauge",
        "bytes",
        "Committed, and not merged durably by that member, as it told last.",
        ("member",),
        {name: max(total - one.summary.merged.bytes, 0) for name, one in members.items()},
    )
    yield Metric(
        "rt_member_stopped",
        "gauge",
        IS,
        "1 if that member told that it merges nothing any more: its bytes differ, or its disk has failed.",
        ("member",),
        {name: bool(one.summary.merged.stopped) for name, one in members.items()},
    )
    own = next((one.summary for one in members.values() if one.name == node.node), pb.Summary())
    yield Metric(
        "rt_step",
        "gauge",
        IS,
        "1 for the step of its return that this node is in, the last of which is ready.",
        ("step",),
        {(step,): own.step == step for step in _STEPS},
    )
    share = own.step_done / own.step_total if own.step_total else float(own.step == READY)
    yield gauge(
        "rt_step_ratio", "ratio", "How much of the step that this node is in is done; 0: not known.", share
    )


def _of_leases(node: NodeView, state: State) -> Iterator[Metric]:
    counts = node.counts.leases
    yield gauge("rt_leases", "leases", "That are held.", len(state.leases))
    yield Metric(
        "rt_lease_changes_total",
        "counter",
        "leases",
        "That were granted, renewed, released, or expired for want of that, as applied by this process.",
        ("change",),
        {(change,): value for change, value in asdict(counts).items()},
    )


def _of_services(node: NodeView) -> Iterator[Metric]:
    counts = node.counts
    yield Metric(
        "rt_refused_total",
        "counter",
        "refusals",
        "What was refused or broken off, by where and by the error's class.",
        ("at", "reason"),
        dict(sorted(counts.refused.items())),
    )
    yield Metric(
        "rt_http_requests_total",
        "counter",
        "answers",
        "Over HTTP.",
        ("port", "status"),
        {(port, str(status)): count for (port, status), count in sorted(counts.requests.items())},
    )


def _of_raft(node: NodeView) -> Iterator[Metric]:
    standing = node.standing
    is_leader = bool(standing.leader) and standing.leader == node.node
    own = next((one.summary for one in standing.nodes if one.name == node.node), pb.Summary())
    yield gauge("rt_raft_term", "term", "Raft's term.", standing.term)
    yield gauge("rt_raft_epoch", "epoch", "The cluster's, one higher after each reset.", standing.epoch)
    yield gauge("rt_raft_applied_index", "index", "Of the last command applied.", node.applied_index)
    yield gauge("rt_is_leader", IS, "1 if this node leads.", is_leader)
    yield gauge("rt_has_leader", IS, "1 if this node knows a leader.", bool(standing.leader))
    yield gauge("rt_is_ready", IS, "1 if /readiness says 200.", not obstacles(node))
    yield gauge("rt_control_connected", IS, "1 if the control process is connected.", node.is_control_up)
    yield Metric(
        "rt_peer_connected",
        "gauge",
        IS,
        "1 if this node is connected to that one.",
        ("peer",),
        {(one.name,): one.is_connected for one in standing.nodes if one.name != node.node},
    )
    yield gauge("rt_disk_bytes", "bytes", "Of this node's file system; 0: not told yet.", own.disk_bytes)
    yield gauge("rt_disk_free_bytes", "bytes", "Free on this node's file system.", own.disk_free_bytes)


def _of_process(node: NodeView) -> Iterator[Metric]:
    counts, alarms = node.counts, alarms_of(node)
    yield Metric(
        "rt_alarms",
        "gauge",
        "alarms",
        "What /status tells of.",
        ("severity",),
        {(severity,): sum(one.severity == severity for one in alarms) for severity in _SEVERITIES},
    )
    end_s = counts.certificate_end_s
    yield Metric(
        "rt_certificate_expiry_timestamp_seconds",
        "gauge",
        "seconds",
        "When the node's certificate expires, since the epoch.",
        (),
        {(): end_s} if end_s else {},
    )
    yield Metric(
        "rt_info",
        "gauge",
        "1",
        "What runs here.",
        ("version", "stream", "node"),
        {(rt.__version__, node.stream, node.node): 1},
    )
    yield counter("process_cpu_seconds_total", "seconds", "Processor time of the data process.", counts.cpu_s)
    yield gauge("process_resident_memory_bytes", "bytes", "Of the data process.", counts.memory_bytes)
    yield gauge(
        "process_start_time_seconds",
        "seconds",
        "When the data process started, since the epoch.",
        node.started_ns / NS_PER_S,
    )
