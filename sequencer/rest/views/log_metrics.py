"""Metrics of retention, publishers and subscribers. Pure; invariants: see `node_metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, get_args

from rt.exposition import Metric, number
from rt.log.format.segment_table import TrimReason
from rt.units import NS_PER_S
from sequencer.rest.base.node_snapshot import ClientConnection, NodeSnapshot, RetainedSize
from sequencer.rest.views.alarms import due_segments
from sequencer.rest.views.push_stalls import StallReason, stalls_of
from sequencer.state.commands import TRIM_REASONS
from sequencer.state.state import SequencerState

_REASONS: Final = sorted(TRIM_REASONS)


def of_log(node: NodeSnapshot, state: SequencerState, kept: RetainedSize) -> Iterator[Metric]:
    trims = node.counts.trims
    oldest = next((one for one in state.segments if not one.is_trimmed), None)
    age_ns = 0 if oldest is None else max(node.now_ns - oldest.sealed_ns, 0)
    yield number("rt_log_start_position", "First position that is kept.", state.log_start)
    yield number(
        "rt_retained_segments",
        "Segments of the merged log that are kept, including the active one.",
        kept.segments,
    )
    yield number("rt_retained_bytes", "Bytes of the merged log that are kept.", kept.total_bytes)
    yield number(
        "rt_retained_age_seconds",
        "Time since the oldest kept segment was sealed. 0: no sealed segment.",
        age_ns / NS_PER_S,
    )
    yield Metric(
        "rt_trimmed_segments_total",
        "Segments of the merged log trimmed since this process started, by reason.",
        ("reason",),
        {(_word(one),): trims.segments.get(one, 0) for one in _REASONS},
    )
    yield Metric(
        "rt_trimmed_bytes_total",
        "Bytes of the merged log trimmed since this process started, by reason.",
        ("reason",),
        {(_word(one),): trims.size_bytes.get(one, 0) for one in _REASONS},
    )


def _word(reason: TrimReason) -> str:
    return reason.name.lower()


def of_policy(node: NodeSnapshot, state: SequencerState, kept: RetainedSize) -> Iterator[Metric]:
    policy = state.configuration
    yield number(
        "rt_retention_seconds",
        "Configured age at which sealed segments are trimmed. 0: never by age.",
        policy.retention_minutes * 60,
    )
    yield number(
        "rt_retention_bytes",
        "Configured size of the merged log above which the oldest segments are trimmed. 0: never by size.",
        policy.retention_bytes,
    )
    yield number(
        "rt_retention_disk_ratio",
        "Configured disk usage of a majority above which the oldest segments are trimmed. 0: never.",
        policy.retention_disk_percent / 100,
    )
    yield number(
        "rt_hold_max_bytes",
        "Configured maximum bytes kept only for holds. 0: holds are ignored.",
        policy.hold_bytes_max,
    )
    positions = [one.position for one in state.holds.values()]
    least = min(positions, default=state.position)
    overridden = sum(position < state.log_start for position in positions)
    yield Metric(
        "rt_holds",
        "Holds of named subscribers. whole: all held data is kept. overridden: some was trimmed anyway.",
        ("state",),
        {("whole",): len(positions) - overridden, ("overridden",): overridden},
    )
    yield number(
        "rt_holds_refused",
        "Holds that subscribers of this node requested and that were refused.",
        len(node.counts.refused_holds),
        unit="holds",
    )
    yield number(
        "rt_hold_lag_messages",
        "Messages between the lowest hold and the end of the merged log.",
        max(state.position - least, 0),
    )
    yield number(
        "rt_hold_lag_bytes",
        "Approximate bytes between the lowest hold and the end of the merged log.",
        kept.bytes_from(least),
    )
    yield number(
        "rt_held_bytes",
        "Bytes that age or size would trim and that are kept only for holds.",
        sum(one.size_bytes for one in due_segments(node, state) if one.end > least) if positions else 0,
    )


def of_publishers(node: NodeSnapshot, state: SequencerState) -> Iterator[Metric]:
    counts = node.counts
    pushes = [one for one in node.clients if one.session is not None and not one.ended_ns]
    yield Metric(
        "rt_sessions",
        "Incarnations of sessions. open: with a run that is not completely merged. idle: without.",
        ("state",),
        {("open",): state.open_count, ("idle",): len(state.closed)},
    )
    yield number(
        "rt_runs_cut_short_total",
        "Runs of publishers that were closed without their last messages, which are lost.",
        state.runs_cut_short,
    )
    yield number("rt_push_streams", "Connected push streams of publishers.", counts.push_streams)
    yield number("rt_push_bytes_total", "Bytes of batches received from publishers.", counts.push_bytes)
    yield number(
        "rt_replication_lag_messages",
        "Messages synced here and not merged yet, of the session with the most.",
        max((max(one.position - one.merged, 0) for one in pushes), default=0),
    )
    yield number(
        "rt_replication_lag_seconds",
        "Time that the oldest received and unmerged message has waited, of the session that waits longest.",
        _latest_s(pushes),
    )
    reasons = [reason for _, reason in stalls_of(node)]
    yield Metric(
        "rt_stuck_pushes",
        "Stuck pushes of this node. silent: the process reports nothing. waiting: none of its bytes arrive. "
        "unmerged: its messages are not merged while others are.",
        ("reason",),
        {(reason,): reasons.count(reason) for reason in get_args(StallReason)},
    )
    yield number(
        "rt_silent_publishers",
        "Publishers that published nothing for longer than they promised (max_silence).",
        len(node.silent),
        unit="publishers",
    )
    yield Metric("rt_fsync_seconds", "Duration of fsync of session copies.", (), {(): counts.syncs})


def of_subscribers(node: NodeSnapshot, state: SequencerState, kept: RetainedSize) -> Iterator[Metric]:
    counts = node.counts
    pulls = [
        one
        for one in node.clients
        if one.session is None and one.is_of_merged and not one.ended_ns and one.identity.role == "subscriber"
    ]
    least = min((one.position for one in pulls), default=state.position)
    yield number("rt_pull_streams", "Connected pull streams, including those of nodes.", counts.pull_streams)
    yield number("rt_pull_bytes_total", "Bytes of logs sent to pull streams.", counts.pull_bytes)
    yield number("rt_subscribers", "Subscribers of the merged log connected to this node.", len(pulls))
    yield number(
        "rt_subscriber_lag_messages",
        "Committed messages not pulled yet by the slowest connected subscriber.",
        max(state.position - least, 0),
    )
    yield number(
        "rt_subscriber_lag_bytes",
        "Approximate bytes not pulled yet by the slowest connected subscriber.",
        kept.bytes_from(least),
    )
    yield number(
        "rt_subscriber_lag_seconds",
        "Time that the oldest merged message has waited to be pulled, of the subscriber that waits longest.",
        _latest_s(pulls),
    )
    yield number(
        "rt_subscriber_gaps_total",
        "Subscribers that had to skip forward because the data they needed next was trimmed here.",
        counts.overtaken,
        unit="subscribers",
    )
    yield number(
        "rt_holds_overridden_total",
        "Holds overridden by trims since this process started; each hold counts once per trim.",
        counts.trims.overridden,
        unit="holds",
    )


def _latest_s(clients: Iterable[ClientConnection]) -> float:
    return max((one.lag_ns for one in clients), default=0) / NS_PER_S
