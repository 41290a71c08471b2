"""`/metrics`: what Prometheus scrapes, in its text format 0.0.4.

Pure. Names end in their unit. Counters end in `_total`; those of bytes moved and of refusals begin with the
process. No name of a session or a certificate is a label: the port has no certificates, and labels must stay
few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import rt
from sequencer.rest.node_view import Histogram, NodeView, obstacles
from sequencer.rest.times import NS_PER_S
from sequencer.rest.views import Answer, Asked
from sequencer.state import State

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; a sample is (labels, value), of a histogram (labels, `Histogram`)."""

    name: str
    kind: Kind
    help: str
    samples: Iterable[tuple[Mapping[str, str], float | Histogram]] = field(default_factory=tuple)


def metrics(asked: Asked) -> Answer:
    """All metrics, as text."""
    return Answer(exposition(metrics_of(asked.node)))


def exposition(found: Iterable[Metric]) -> str:
    """The text format."""
    lines: list[str] = []
    for metric in found:
        lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for labels, value in metric.samples:
            if isinstance(value, Histogram):
                lines += _histogram(metric.name, labels, value)
            else:
                lines.append(_sample(metric.name, labels, value))
    return "\n".join(lines) + "\n"


def metrics_of(node: NodeView) -> Iterator[Metric]:
    """What a node measures."""
    yield from _of_merging(node)
    yield from _of_streams(node)
    yield from _of_raft(node)
    yield from _of_process(node)


def _of_merging(node: NodeView) -> Iterator[Metric]:
    state, merging = node.state or State(b""), node.merging
    lag_messages, lag_bytes = node.lag
    position = 0 if merging is None else merging.position
    durable = 0 if merging is None else merging.durable_position
    yield _gauge("rt_merged_position", "One past the last position in this node's merged log.", position)
    yield _gauge("rt_merged_durable_position", "The same, of what is synced.", durable)
    yield _gauge("rt_committed_position", "One past the last position that is committed.", state.position)
    yield _counter(
        "rt_committed_bytes_total", "Bytes of all merged segments, ever.", state.merged.total_bytes
    )
    yield _counter("rt_instructions_total", "Merge instructions, ever.", state.instruction)
    yield _gauge("rt_merge_lag_messages", "Messages committed and not merged here yet.", lag_messages)
    yield _gauge("rt_merge_lag_bytes", "About how many bytes those are.", lag_bytes)
    yield _gauge("rt_merge_stopped", "1 if the merger has failed.", bool(merging and merging.failure))
    yield _gauge("rt_merge_catching_up", "1 if merged bytes come from another node.", _is_behind(node))
    yield _gauge("rt_segments", "Merged segments that are kept.", _kept(state))


def _of_streams(node: NodeView) -> Iterator[Metric]:
    state, counts = node.state or State(b""), node.counts
    open_count = sum(bool(session.lives) for session in state.sessions.values())
    by_state = {"open": open_count, "idle": len(state.sessions) - open_count}
    yield Metric(
        "rt_sessions",
        "gauge",
        "Incarnations of sessions: with something to be merged or to come, and without.",
        [({"state": name}, count) for name, count in by_state.items()],
    )
    yield _gauge("rt_push_streams", "Publishers' streams on this node.", counts.push_streams)
    yield _gauge("rt_pull_streams", "Pullers' streams on this node.", counts.pull_streams)
    yield _counter("rt_push_bytes_total", "Bytes of batches that publishers brought.", counts.push_bytes)
    yield _counter("rt_pull_bytes_total", "Bytes of logs that pullers got.", counts.pull_bytes)
    yield Metric(
        "rt_refused_total",
        "counter",
        "What was refused or broken off, by where and by the error's class.",
        [({"at": at, "reason": why}, count) for (at, why), count in sorted(counts.refused.items())],
    )
    yield Metric(
        "rt_http_requests_total",
        "counter",
        "Answers over HTTP.",
        [({"port": port, "status": str(code)}, n) for (port, code), n in sorted(counts.requests.items())],
    )
    yield Metric("rt_fsync_seconds", "histogram", "Syncs of session copies.", [({}, counts.syncs)])


def _of_raft(node: NodeView) -> Iterator[Metric]:
    standing = node.standing
    is_leader = bool(standing.leader) and standing.leader == node.node
    yield _gauge("rt_raft_term", "Raft's term.", standing.term)
    yield _gauge("rt_raft_applied_index", "Raft index of the last command applied.", node.applied_index)
    yield _gauge("rt_is_leader", "1 if this node leads.", is_leader)
    yield _gauge("rt_has_leader", "1 if this node knows a leader.", bool(standing.leader))
    yield _gauge("rt_is_ready", "1 if /readiness says 200.", not obstacles(node))
    yield _gauge("rt_control_connected", "1 if the control process is connected.", node.is_control_up)
    yield Metric(
        "rt_peer_connected",
        "gauge",
        "1 if this node is connected to that one.",
        [({"peer": one.name}, one.is_connected) for one in standing.nodes if one.name != node.node],
    )
    for one in standing.nodes:
        if one.name == node.node:
            disk = one.summary
            yield _gauge("rt_disk_bytes", "Size of this node's file system.", disk.disk_bytes)
            yield _gauge("rt_disk_free_bytes", "Free on it.", disk.disk_free_bytes)


def _of_process(node: NodeView) -> Iterator[Metric]:
    counts = node.counts
    labels = {"version": rt.__version__, "stream": node.stream, "node": node.node}
    yield Metric("rt_info", "gauge", "What runs here.", [(labels, 1)])
    yield _counter("process_cpu_seconds_total", "Processor time of the data process.", counts.cpu_s)
    yield _gauge("process_resident_memory_bytes", "Memory of the data process.", counts.memory_bytes)
    yield _gauge(
        "process_start_time_seconds",
        "When the data process started, since the epoch.",
        node.started_ns / NS_PER_S,
    )
    if counts.certificate_end_s:
        yield _gauge(
            "rt_certificate_end_seconds",
            "When the node's certificate expires, since the epoch.",
            counts.certificate_end_s,
        )


def _is_behind(node: NodeView) -> bool:
    return node.merging is not None and node.merging.is_behind_gap


def _kept(state: State) -> int:
    sealed = sum(not segment.trimmed_ns for segment in state.segments)
    return sealed + (state.merged.segment is not None)


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, "gauge", text, [({}, value)])


def _counter(name: str, text: str, value: float) -> Metric:
    return Metric(name, "counter", text, [({}, value)])


def _histogram(name: str, labels: Mapping[str, str], value: Histogram) -> Iterator[str]:
    below = 0
    for bound, count in zip((*map(_number, value.bounds), "+Inf"), value.counts, strict=True):
        below += count
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, below)
    yield _sample(f"{name}_sum", labels, value.total)
    yield _sample(f"{name}_count", labels, below)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{key}="{_escaped(text, quote=True)}"' for key, text in labels.items())
    braces = f"{{{told}}}" if told else ""
    return f"{name}{braces} {_number(value)}"


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(value)


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
