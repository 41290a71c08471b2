"""What somebody should look at: the alarms of a node, worked out from how it stands at one moment.

Pure, and without memory: an alarm is there while its reason is. A critical one means that the stream stands
still, that one more fault would stop it, or that it will soon; a warning that something is on its way there.
What is said names what helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from archiver.policy import Policy
from archiver.retention import plan_trim
from rt.v1 import sequencer_pb2 as pb
from sequencer.rest.kept import Kept
from sequencer.rest.node_view import NodeView
from sequencer.rest.times import NS_PER_MINUTE, NS_PER_S, rfc3339
from sequencer.state import DISK_PERCENT, MergedSegment, State

_MEND: Final = {
    True: "Good bytes are fetched from a peer; if that takes long, see the node's log.",
    False: "No other node has that file. Put a good one in its place, of a backup or of a subscriber's copy, "
    "where it has the same name and bytes; it is taken up at once. Or POST /hard-reset, to let go of all.",
}

Severity: TypeAlias = Literal["critical", "warning"]

MERGE_LAG_BYTES: Final = 256 * 2**20
"""Some seconds of full speed: members say every second how far they are."""
CLIENT_LAG_S: Final = 30.0
"""A leader that is replaced, or a node that starts anew, takes a few."""
CERTIFICATE_WARNING_S: Final = 14 * 24 * 3600
CERTIFICATE_CRITICAL_S: Final = 3 * 24 * 3600
SOON_PERCENT: Final = 80
"""Something goes soon if a limit of the policy is used up so far."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One of them; `name` is a constant word, `text` a sentence or two."""

    name: str
    severity: Severity
    text: str


def alarms_of(node: NodeView) -> list[Alarm]:
    """Everything that is wrong, critical ones first."""
    found = [*_of_consensus(node), *_of_members(node), *_of_this_node(node)]
    if node.state is not None and any(node.state.cluster):
        found += [*_of_lags(node, node.state), *_of_holds(node, node.state), *_of_readers(node, node.state)]
    return sorted(found, key=lambda one: one.severity == "warning")


# The cluster


def _of_consensus(node: NodeView) -> Iterator[Alarm]:
    if not node.is_control_up:
        text = f"The control process of {node.node} is not connected: what is told of the cluster is old."
        yield Alarm("control-down", "critical", f"{text} See the node's log.")
    elif not node.standing.leader:
        text = f"{node.node} knows no leader: nothing is merged. Are a majority of the members there?"
        yield Alarm("no-leader", "critical", text)


def _of_members(node: NodeView) -> Iterator[Alarm]:
    members = sorted(node.standing.nodes, key=lambda one: one.name)
    away = [one for one in members if not (one.is_connected or one.name == node.node)]
    spare = len(members) - len(away) - (len(members) // 2 + 1)
    for one in away:
        text = f"{node.node} is not connected to {one.name}"
        if spare > 0:
            yield Alarm("member-away", "warning", f"{text}. The stream goes on without it.")
        else:
            less = "a majority is not there" if spare < 0 else "one more that fails would stop the stream"
            yield Alarm("member-away", "critical", f"{text}: {less}. Start it, or look at its network.")
    for one in members:
        if one.summary.merged.stopped:
            yield Alarm(
                "member-stopped",
                "critical",
                f"{one.name} merges nothing any more: {one.summary.merged.stopped}. Keep its directory for a "
                "look, then start it with an empty one.",
            )
        yield from _of_disk(node, one)


def _of_disk(node: NodeView, member: pb.NodeStanding) -> Iterator[Alarm]:
    """Fuller than the policy lets it be; halfway from there to full it is critical."""
    total, free = member.summary.disk_bytes, member.summary.disk_free_bytes
    state = node.state or State(b"")
    policy = state.configuration.disk_percent or DISK_PERCENT
    used = 100 * (total - free) / total if total else 0.0
    if used <= policy:
        return
    severity: Severity = "critical" if used > (policy + 100) / 2 else "warning"
    text = (
        f"The disk of {member.name} is {used:.1f} % full, {policy} % are meant: {free / 1e9:.1f} GB are free."
    )
    yield Alarm("disk", severity, f"{text} Does anything else fill it? Lower the limit, or add space.")


def _of_this_node(node: NodeView) -> Iterator[Alarm]:
    failure = node.failure or (node.merging.failure if node.merging is not None else "")
    stands = [one.summary.merged.stopped for one in node.standing.nodes if one.name == node.node]
    if failure and not any(stands):
        yield Alarm("node-failed", "critical", f"{node.node} has failed: {failure}.")
    if node.merging is not None and node.merging.damage:
        has_peers = len(node.standing.nodes) > 1
        yield Alarm(
            "log-damaged",
            "critical",
            f"{node.node} merges nothing: {node.merging.damage}. {_MEND[has_peers]}",
        )
    end_s = node.counts.certificate_end_s
    left_s = end_s - node.now_ns / NS_PER_S
    if end_s and left_s < CERTIFICATE_WARNING_S:
        severity: Severity = "critical" if left_s < CERTIFICATE_CRITICAL_S else "warning"
        day = rfc3339(int(end_s) * NS_PER_S)[:10]
        text = (
            f"The certificate of {node.node} expired on {day}."
            if left_s <= 0
            else f"The certificate of {node.node} expires on {day}, in {_duration(left_s)}."
        )
        yield Alarm("certificate", severity, f"{text} Put a new one in its place: no restart is needed.")


# What is behind


def _of_lags(node: NodeView, state: State) -> Iterator[Alarm]:
    for member in node.standing.nodes:
        behind = state.merged.total_bytes - member.summary.merged.bytes
        is_there = member.is_connected or member.name == node.node
        if is_there and behind > MERGE_LAG_BYTES:
            text = f"{member.name} has {behind / 1e6:,.0f} MB to merge that are committed."
            yield Alarm(
                "merge-lag", "warning", f"{text} Is its disk slow, or does it wait for session bytes?"
            )
    for client in node.clients:
        late_s = client.lag_ns / NS_PER_S
        if client.session is not None and not client.ended_ns and late_s > CLIENT_LAG_S:
            text = f"Messages of session {client.session} wait to be merged for {_duration(late_s)}"
            yield Alarm("replication-lag", "warning", f"{text}. See /sessions for what it waits for.")


def _of_holds(node: NodeView, state: State) -> Iterator[Alarm]:
    """What was trimmed in spite of a hold, and when nearly so much is held back that more will be."""
    start, limit = state.log_start, state.configuration.hold_limit_bytes
    for name, hold in sorted(state.holds.items()):
        if hold.position < start:
            text = f"Subscriber {name} has up to {hold.position}, and what it wants up to {start} is trimmed."
            yield Alarm("hold-overridden", "warning", f"{text} Is it running? If not: POST /release-hold.")
    for name, why in sorted(node.counts.refused_holds.items()):
        text = f"Nothing is held back for subscriber {name}: {why}."
        yield Alarm("hold-refused", "warning", f"{text} POST /release-hold of one that is gone.")
    if not limit or not state.holds:
        return
    least, name = min((hold.position, name) for name, hold in state.holds.items())
    held = sum(one.size_bytes for one in due_segments(node, state) if one.end > least)
    if held >= limit * SOON_PERCENT / 100:
        sizes = f"{held / 1e9:.2f} GB that would be trimmed are held back, {limit / 1e9:.2f} GB at most"
        text = f"{sizes}, for {name} above all. What is more is trimmed all the same."
        yield Alarm("hold-limit", "warning", text)


def due_segments(node: NodeView, state: State) -> list[MergedSegment]:
    """The segments that age or size would have trimmed, were it not for holds; by this node's clock."""
    said = state.configuration
    kept = [one for one in state.segments if not one.is_trimmed]
    size = state.merged.offset if state.merged.segment is not None else 0
    policies = (
        Policy(time_minutes=said.time_minutes, disk_percent=0),
        Policy(time_minutes=0, limit_bytes=said.limit_bytes, disk_percent=0),
    )
    plans = [plan_trim(kept, size, policy, [node.now_ns], [], {}, members=1) for policy in policies]
    return kept[: max(0 if plan is None else plan.segments for plan in plans)]


def _of_readers(node: NodeView, state: State) -> Iterator[Alarm]:
    """Subscribers in the oldest segment, when that goes soon: they would be told to skip forward."""
    oldest = next((one for one in state.segments if not one.is_trimmed), None)
    if oldest is None or not _goes_soon(node, state, oldest):
        return
    holding = state.holds if state.configuration.hold_limit_bytes else {}
    readers = {
        one.identity.name: one.position
        for one in node.clients
        if one.session is None and one.is_of_merged and not one.ended_ns and one.identity.role == "subscriber"
    }
    for name, position in sorted(readers.items()):
        if position < oldest.end and name not in holding:
            text = f"Subscriber {name} is at {position}, and all before {oldest.end} is trimmed soon."
            yield Alarm("subscriber-lag", "warning", f"{text} Is it running, and fast enough?")


def _goes_soon(node: NodeView, state: State, oldest: MergedSegment) -> bool:
    policy = state.configuration
    age = (node.now_ns - oldest.sealed_ns) / NS_PER_MINUTE
    by_time = policy.time_minutes and age >= policy.time_minutes * SOON_PERCENT / 100
    by_size = policy.limit_bytes and Kept(state).total_bytes >= policy.limit_bytes * SOON_PERCENT / 100
    return bool(by_time or by_size)


def _duration(seconds: float) -> str:
    """In its largest unit, of which there are two or more."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
