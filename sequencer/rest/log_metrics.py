"""The metrics of a node's merged log: what is kept and trimmed of it, who brings messages and who gets them.

Pure. Laws: see `sequencer.rest.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from rt.log.table import TrimReason
from sequencer.commands import TRIM_REASONS
from sequencer.rest.alarms import due_segments
from sequencer.rest.exposition import Metric, counter, gauge
from sequencer.rest.kept import Kept
from sequencer.rest.node_view import Client, NodeView
from sequencer.rest.times import NS_PER_S
from sequencer.state import State

_REASONS: Final = sorted(TRIM_REASONS)


def of_log(node: NodeView, state: State, kept: Kept) -> Iterator[Metric]:
    """What is kept, and what was trimmed."""
    trims = node.counts.trims
    oldest = next((one for one in state.segments if not one.is_trimmed), None)
    age_ns = 0 if oldest is None else max(node.now_ns - oldest.sealed_ns, 0)
    yield gauge("rt_log_start_position", "position", "The first position that is kept.", state.log_start)
    yield gauge(
        "rt_kept_segments", "segments", "Of the merged log that are kept, the growing one too.", kept.segments
    )
    yield gauge("rt_kept_bytes", "bytes", "Of the merged log that are kept.", kept.total_bytes)
    yield gauge(
        "rt_kept_age_seconds",
        "seconds",
        "Since the oldest segment that is kept was sealed; 0: none is sealed.",
        age_ns / NS_PER_S,
    )
    yield Metric(
        "rt_trimmed_segments_total",
        "counter",
        "segments",
        "Of the merged log that were trimmed, as applied by this process.",
        ("reason",),
        {(_word(one),): trims.segments.get(one, 0) for one in _REASONS},
    )
    yield Metric(
        "rt_trimmed_bytes_total",
        "counter",
        "bytes",
        "Of the merged log that were trimmed, as applied by this process.",
        ("reason",),
        {(_word(one),): trims.size_bytes.get(one, 0) for one in _REASONS},
    )


def _word(reason: TrimReason) -> str:
    return reason.name.lower()


def of_policy(node: NodeView, state: State, kept: Kept) -> Iterator[Metric]:
    """What the archiver is to keep, and for whom."""
    policy = state.configuration
    yield gauge(
        "rt_policy_time_seconds",
        "seconds",
        "A segment is trimmed so long after it was sealed; 0: never.",
        policy.time_minutes * 60,
    )
    yield gauge(
        "rt_policy_limit_bytes",
        "bytes",
        "The oldest are trimmed above that size; 0: never.",
        policy.limit_bytes,
    )
    yield gauge(
        "rt_policy_disk_ratio",
        "ratio",
        "The oldest are trimmed while a majority's disks are fuller than that; 0: never.",
        policy.disk_percent / 100,
    )
    yield gauge(
        "rt_policy_hold_limit_bytes",
        "bytes",
        "Most that is kept for holds alone; 0: holds hold nothing back.",
        policy.hold_limit_bytes,
    )
    positions = [one.position for one in state.holds.values()]
    least = min(positions, default=state.position)
    overridden = sum(position < state.log_start for position in positions)
    yield Metric(
        "rt_holds",
        "gauge",
        "holds",
        "Of named subscribers: of which all is there, and of which some was trimmed in spite of the hold.",
        ("state",),
        {("whole",): len(positions) - overridden, ("overridden",): overridden},
    )
    yield gauge(
        "rt_holds_refused",
        "holds",
        "Of subscribers of this node, for whom nothing is held back though they ask for it.",
        len(node.counts.refused_holds),
    )
    yield gauge(
        "rt_hold_lag_messages",
        "messages",
        "Behind the hold that is furthest behind.",
        max(state.position - least, 0),
    )
    yield gauge(
        "rt_hold_lag_bytes",
        "bytes",
        "About what the hold furthest behind has to come.",
        kept.bytes_from(least),
    )
    yield gauge(
        "rt_held_bytes",
        "bytes",
        "That age or size would have trimmed, and that are kept for holds alone.",
        sum(one.size_bytes for one in due_segments(node, state) if one.end > least) if positions else 0,
    )


def of_publishers(node: NodeView, state: State) -> Iterator[Metric]:
    """Sessions, and what of them waits."""
    counts = node.counts
    open_count = sum(bool(session.lives) for session in state.sessions.values())
    pushes = [one for one in node.clients if one.session is not None and not one.ended_ns]
    yield Metric(
        "rt_sessions",
        "gauge",
        "sessions",
        "Incarnations: with something to be merged or to come, and without.",
        ("state",),
        {("open",): open_count, ("idle",): len(state.sessions) - open_count},
    )
    yield gauge("rt_push_streams", "streams", "Publishers that are connected.", counts.push_streams)
    yield counter("rt_push_bytes_total", "bytes", "Of batches that publishers brought.", counts.push_bytes)
    yield gauge(
        "rt_replication_lag_messages",
        "messages",
        "Synced here and not merged yet, of the session with the most.",
        max((max(one.position - one.merged, 0) for one in pushes), default=0),
    )
    yield gauge(
        "rt_replication_lag_seconds",
        "seconds",
        "Since something was brought here that is not merged yet, of the session that waits longest.",
        _latest_s(pushes),
    )
    yield Metric(
        "rt_fsync_seconds", "histogram", "seconds", "Of the syncs of session copies.", (), {(): counts.syncs}
    )


def of_subscribers(node: NodeView, state: State, kept: Kept) -> Iterator[Metric]:
    """Who pulls the merged log, and how far they are behind."""
    counts = node.counts
    pulls = [
        one
        for one in node.clients
        if one.session is None and one.is_of_merged and not one.ended_ns and one.identity.role == "subscriber"
    ]
    least = min((one.position for one in pulls), default=state.position)
    yield gauge("rt_pull_streams", "streams", "Pullers that are connected, nodes too.", counts.pull_streams)
    yield counter("rt_pull_bytes_total", "bytes", "Of logs that pullers got.", counts.pull_bytes)
    yield gauge("rt_subscribers", "subscribers", "Connected to this node.", len(pulls))
    yield gauge(
        "rt_subscriber_lag_messages",
        "messages",
        "Merged and not with the subscriber that has the least.",
        max(state.position - least, 0),
    )
    yield gauge(
        "rt_subscriber_lag_bytes",
        "bytes",
        "About what the subscriber that has the least lacks.",
        kept.bytes_from(least),
    )
    yield gauge(
        "rt_subscriber_lag_seconds",
        "seconds",
        "Since something was merged that a subscriber has not got, of the one that waits longest.",
        _latest_s(pulls),
    )
    yield counter(
        "rt_subscribers_overtaken_total",
        "subscribers",
        "Had to skip forward in what they pull: what they wanted next was trimmed here.",
        counts.overtaken,
    )
    yield counter(
        "rt_holds_overridden_total",
        "holds",
        "Did not keep what they held, once for each trim, as applied by this process.",
        counts.trims.overridden,
    )


def _latest_s(clients: Iterable[Client]) -> float:
    return max((one.lag_ns for one in clients), default=0) / NS_PER_S
