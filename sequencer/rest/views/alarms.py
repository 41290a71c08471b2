"""Alarms of a node, computed from one snapshot.

Pure and stateless: an alarm is active while its condition holds. Critical: the stream has stopped, will stop
soon, or would stop after one more fault. Warning: something may become critical. Each text names a next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeAlias

from archiver.policy import RetentionPolicy
from archiver.retention import plan_trim
from rt.names import session_owner
from rt.units import NS_PER_MINUTE, NS_PER_S, format_time
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.silence import HUNG_S, next_step
from sequencer.rest.base.answer import Answer, doc
from sequencer.rest.base.node_snapshot import NodeSnapshot, RetainedSize, SilentPublisher
from sequencer.rest.views.client_views import clients_of_cluster
from sequencer.rest.views.push_stalls import stall_texts, stalls_of
from sequencer.state.configuration import DISK_PERCENT
from sequencer.state.state import MergedSegment, SequencerState

_FIX: Final = {
    True: "The node fetches good bytes from a peer. If that takes long, check the node's log.",
    False: "No other node has this file. Replace it with a good one from a backup or a subscriber's copy "
    "(same name and bytes); the node uses it at once. Or discard all data: POST /hard-reset.",
}

_OPENING: Final = {
    True: "The node tries again. It repairs corrupt files, or moves the replica to `damaged` and fetches "
    "what is not merged from the others, if a majority has whole disks without this one. Any other cause "
    "needs an operator.",
    False: "No other node has these bytes: put the right files back. The node uses them at once.",
}

Severity: TypeAlias = Literal["critical", "warning"]

MERGE_LAG_BYTES: Final = 256 * 2**20
"""A few seconds at full speed; members report their progress every second."""
CLIENT_LAG_S: Final = 30.0
"""An election or a node's restart takes a few seconds."""
CERTIFICATE_WARNING_S: Final = 14 * 24 * 3600
CERTIFICATE_CRITICAL_S: Final = 3 * 24 * 3600
CLOCK_SKEW_S: Final = 1.0
RESET_S: Final = 30.0
"""A control process that is away for longer is down, not in a reset."""
DAMAGE_S: Final = 24 * 3600
"""How long corruption is reported after it was found, so that a dying disk is replaced before it corrupts
more.
"""
SOON_PERCENT: Final = 80
"""A segment is due soon when it has used this share of a retention limit."""

TOLD_MAX: Final = 5
"""Maximum number of publishers of one certificate that alarms name."""


class Alarm(Answer):
    """A condition that needs attention."""

    name: Annotated[str, doc("Name of the alarm, a constant.")]
    severity: Annotated[Severity, doc("critical: act now. warning: act soon.")]
    text: Annotated[str, doc("The problem and the next step.")]


def alarms_of(node: NodeSnapshot) -> list[Alarm]:
    """Critical alarms first."""
    found = [*_of_consensus(node), *_of_members(node), *_of_this_node(node)]
    if node.state is not None and any(node.state.cluster):
        found += [*_of_lags(node, node.state), *_of_holds(node, node.state), *_of_readers(node, node.state)]
    return sorted(found, key=lambda one: one.severity == "warning")


# The cluster


def _of_consensus(node: NodeSnapshot) -> Iterator[Alarm]:
    if is_resetting(node):
        text = f"A reset of the cluster runs; {node.node} merges nothing until it is over, mostly in seconds."
        yield Alarm("reset-running", "warning", f"{text} Wait. To follow it: `rt rest /reset-status`.")
    elif node.is_control_hung:
        text = (
            f"The control process of {node.node} has not answered for {_duration(node.control_silent_s)}: "
            "it is stopped or stuck. The reported cluster state is as old."
        )
        yield Alarm("control-hung", "critical", f"{text} {next_step('control', node.node)}")
    elif not node.is_control_up:
        text = f"The control process of {node.node} is not connected. The reported cluster state is stale."
        yield Alarm("control-down", "critical", f"{text} Check the node's log.")
    elif not node.standing.leader:
        text = (
            f"{node.node} knows no leader and merges nothing. If other nodes know one, {node.node} has just "
            "started or is cut off from them. Otherwise check that a majority of the members runs."
        )
        yield Alarm("no-leader", "critical", text)


def is_resetting(node: NodeSnapshot) -> bool:
    """Whether a reset runs, as far as this node knows. A control process that stays away is down."""
    is_away = not node.is_control_up and node.control_silent_s < RESET_S
    return node.reset.state == "running" or (is_away and node.standing.is_resetting)


def _of_members(node: NodeSnapshot) -> Iterator[Alarm]:
    members = sorted(node.standing.nodes, key=lambda one: one.name)
    away = [one for one in members if not (one.is_connected or one.name == node.node)]
    voters = [one for one in members if not one.is_learner]
    spare = len(voters) - sum(not one.is_learner for one in away) - (len(voters) // 2 + 1)
    for one in away:
        text = f"{node.node} is not connected to {one.name}"
        ask = f"Ask it: `rt status --endpoints {one.address}`; if only its control process hangs, it says so."
        if spare > 0 or one.is_learner:
            yield Alarm("member-unreachable", "warning", f"{text}. The stream continues without it. {ask}")
        else:
            less = "the cluster has no majority" if spare < 0 else "one more failure would stop the stream"
            yield Alarm(
                "member-unreachable",
                "critical",
                f"{text}: {less}. {ask} Otherwise start it, or check its network.",
            )
    for one in members:
        silent_s = one.summary.data_silent_s
        if silent_s >= HUNG_S and node.report_age_s(one) < HUNG_S:
            text = (
                f"The data process of {one.name} has not answered for {_duration(silent_s)}: it is stopped, "
                f"stuck or cannot start. Its clients wait; its health port answers 503 and says why."
            )
            yield Alarm("data-hung", "critical", f"{text} {next_step('data', one.name)}")
    for name, skew_s in node.clock_skews.items():
        if abs(skew_s) > CLOCK_SKEW_S:
            way = "ahead of" if skew_s > 0 else "behind"
            text = f"The clock of {name} is {_duration(abs(skew_s))} {way} those of the other nodes."
            yield Alarm(
                "clock-skew",
                "warning",
                f"{text} Order and durability do not depend on clocks; times and retention by age do. On "
                f"{name}: `chronyc tracking` or `timedatectl`, then correct its clock.",
            )
    for one in members:
        if one.summary.merged.stopped:
            yield Alarm(
                "member-halted",
                "critical",
                f"{one.name} has stopped merging: {one.summary.merged.stopped}. Keep its directory for "
                "analysis. If only one node has stopped, start it with an empty directory. If more than one "
                "node has stopped, empty none.",
            )
        yield from _of_disk(node, one)


def _of_disk(node: NodeSnapshot, member: pb.NodeStanding) -> Iterator[Alarm]:
    """Warning above the retention limit; critical above the middle between the limit and 100 %."""
    total, free = member.summary.disk_bytes, member.summary.disk_free_bytes
    state = node.state or SequencerState(b"")
    policy = state.configuration.retention_disk_percent or DISK_PERCENT
    used = 100 * (total - free) / total if total else 0.0
    if used <= policy:
        return
    severity: Severity = "critical" if used > (policy + 100) / 2 else "warning"
    text = f"The disk of {member.name} is {used:.1f} % full (limit {policy} %): {free / 1e9:.1f} GB are free."
    yield Alarm(
        "disk", severity, f"{text} Check what else uses it. Lower the retention limits, or add space."
    )


def _of_this_node(node: NodeSnapshot) -> Iterator[Alarm]:
    failure = node.failure or (node.merging.failure if node.merging is not None else "")
    stands = [one.summary.merged.stopped for one in node.standing.nodes if one.name == node.node]
    if failure and not any(stands):
        yield Alarm("node-failed", "critical", f"{node.node} has failed: {failure}.")
    if node.merging is not None and node.merging.damage:
        has_peers = len(node.standing.nodes) > 1
        yield Alarm(
            "log-corrupt", "critical", f"{node.node} cannot merge: {node.merging.damage}. {_FIX[has_peers]}"
        )
    yield from _of_replicas(node)
    yield from _of_damage(node)
    end_s = node.counts.certificate_end_s
    left_s = end_s - node.now_ns / NS_PER_S
    if end_s and left_s < CERTIFICATE_WARNING_S:
        severity: Severity = "critical" if left_s < CERTIFICATE_CRITICAL_S else "warning"
        day = format_time(int(end_s) * NS_PER_S)[:10]
        text = (
            f"The certificate of {node.node} expired on {day}."
            if left_s <= 0
            else f"The certificate of {node.node} expires on {day}, in {_duration(left_s)}."
        )
        yield Alarm("certificate", severity, f"{text} Replace it. No restart is needed.")


def _of_replicas(node: NodeSnapshot) -> Iterator[Alarm]:
    """One alarm for all session replicas that cannot be opened; critical if no other node has them."""
    if node.unopened:
        first, *others = node.unopened
        more = f" and {len(others)} more" if others else ""
        has_peers = len(node.standing.nodes) > 1
        yield Alarm(
            "replica-unopened",
            "warning" if has_peers else "critical",
            f"{node.node} cannot open its replica of session {first.session}{more}: {first.error} "
            f"{_OPENING[has_peers]}",
        )


def _of_damage(node: NodeSnapshot) -> Iterator[Alarm]:
    """Corruption found in the last day; corrupt merged segments, critical if no other node has good bytes."""
    damage = node.counts.damage
    if damage.last_ns and node.now_ns - damage.last_ns < DAMAGE_S * NS_PER_S:
        text = (
            f"{node.node} found corrupt bytes on its disk, the last at "
            f"{format_time(damage.last_ns)[:19]}Z: {damage.last}. Since its start it found "
            f"{damage.found} corrupt segments and repaired {damage.repaired}."
        )
        yield Alarm(
            "damage-found",
            "warning",
            f"{text} The disk may be dying: `dmesg -T | grep -i error` and `smartctl -a DEVICE` on "
            f"{node.node}. If it is, start the node with an empty directory on a new disk.",
        )
    for one in node.damaged:
        text = (
            f"{one.name} of {node.node} is corrupt from offset {one.offset} on. "
            f"It holds positions {one.first} to {one.end - 1}."
        )
        if len(node.standing.nodes) > 1 and not one.tries:
            yield Alarm(
                "segment-corrupt", "warning", f"{text} The node fetches good bytes from the other nodes."
            )
            continue
        sealing = 'Seal it first: POST /configuration {"rollMinutes": 1}. ' if one.is_growing else ""
        yield Alarm(
            "segment-corrupt",
            "critical",
            f"{text} No other node has good bytes. Readers wait at the corrupt block. Replace the file with "
            "a good one from a backup or from a subscriber's copy (same name and bytes). Or give up all "
            f'positions below {one.end}: {sealing}POST /trim {{"position": {one.end}}}.',
        )


# Lags


def _of_lags(node: NodeSnapshot, state: SequencerState) -> Iterator[Alarm]:
    for member in node.standing.nodes:
        behind = state.merged.total_bytes - member.summary.merged.bytes
        is_there = member.is_connected or member.name == node.node
        if is_there and behind > MERGE_LAG_BYTES:
            text = f"{member.name} has {behind / 1e6:,.0f} MB of committed data to merge."
            yield Alarm("merge-lag", "warning", f"{text} Check for a slow disk, and waitsFor in its /status.")
    stalls = stalls_of(node)
    for text in stall_texts(stalls, node):
        yield Alarm("push-stuck", "warning", text)
    for text in silence_texts(node):
        yield Alarm("publisher-silent", "warning", text)
    stuck = {client.session for client, _ in stalls}
    for client in node.clients:
        late_s = client.lag_ns / NS_PER_S
        is_pushed = client.session is not None and not client.ended_ns
        if is_pushed and client.session not in stuck and late_s > CLIENT_LAG_S:
            text = f"Messages of session {client.session} have waited {_duration(late_s)} to be merged"
            yield Alarm("replication-lag", "warning", f"{text}. See waitsFor in /sessions.")


def _of_holds(node: NodeSnapshot, state: SequencerState) -> Iterator[Alarm]:
    """Holds that were overridden or refused, and a total near the limit for holds."""
    start, limit = state.log_start, state.configuration.hold_bytes_max
    for name, hold in sorted(state.holds.items()):
        if hold.position < start:
            text = (
                f'Subscriber "{name}" has read up to {hold.position}; positions {hold.position} to '
                f"{start - 1} were trimmed before it read them."
            )
            hint = "Check that it runs. If it is retired: POST /release-hold."
            yield Alarm("hold-overridden", "warning", f"{text} {hint}")
    for name, why in sorted(node.counts.refused_holds.items()):
        text = f'The hold of subscriber "{name}" was refused: {why}.'
        yield Alarm(
            "hold-refused", "warning", f"{text} Release holds of retired subscribers: POST /release-hold."
        )
    if not limit or not state.holds:
        return
    least, name = min((hold.position, name) for name, hold in state.holds.items())
    held = sum(one.size_bytes for one in due_segments(node, state) if one.end > least)
    if held >= limit * SOON_PERCENT / 100:
        text = (
            f"Holds keep {held / 1e9:.2f} GB that would be trimmed otherwise (limit {limit / 1e9:.2f} GB). "
            f'Subscriber "{name}" is furthest behind. Data above the limit is trimmed despite holds.'
        )
        hint = (
            f'Start it. If it is retired: `rt rest /release-hold --data \'{{"name": "{name}"}}\'`. '
            "To keep more: `rt rest /configuration --data '{\"holdBytesMax\": N}'`."
        )
        # Above the limit the subscriber loses data with the next trim.
        severity: Severity = "critical" if held > limit else "warning"
        yield Alarm("hold-limit", severity, f"{text} {hint}")


def due_segments(node: NodeSnapshot, state: SequencerState) -> list[MergedSegment]:
    """The segments that the age limit or the size limit would trim if there were no holds; by this node's
    clock.
    """
    configuration = state.configuration
    kept = [one for one in state.segments if not one.is_trimmed]
    size = state.merged.offset if state.merged.segment is not None else 0
    policies = (
        RetentionPolicy(retention_minutes=configuration.retention_minutes, retention_disk_percent=0),
        RetentionPolicy(
            retention_minutes=0, retention_bytes=configuration.retention_bytes, retention_disk_percent=0
        ),
    )
    plans = [plan_trim(kept, size, policy, [node.now_ns], [], {}, members=1) for policy in policies]
    return kept[: max(0 if plan is None else plan.segments for plan in plans)]


def _of_readers(node: NodeSnapshot, state: SequencerState) -> Iterator[Alarm]:
    """Subscribers that still read the oldest segment while it is due to be trimmed soon."""
    oldest = next((one for one in state.segments if not one.is_trimmed), None)
    if oldest is None or not _is_due_soon(node, state, oldest):
        return
    holding = state.holds if state.configuration.hold_bytes_max else {}
    readers = {
        one.identity.name: one.position
        for one in node.clients
        if one.session is None and one.is_of_merged and not one.ended_ns and one.identity.role == "subscriber"
    }
    for name, position in sorted(readers.items()):
        if position < oldest.end and name not in holding:
            text = f'Subscriber "{name}" is at {position}; positions below {oldest.end} will be trimmed soon.'
            yield Alarm("subscriber-lag", "warning", f"{text} Check that it runs and keeps up.")


def _is_due_soon(node: NodeSnapshot, state: SequencerState, oldest: MergedSegment) -> bool:
    policy = state.configuration
    age = (node.now_ns - oldest.sealed_ns) / NS_PER_MINUTE
    by_time = policy.retention_minutes and age >= policy.retention_minutes * SOON_PERCENT / 100
    by_size = (
        policy.retention_bytes
        and RetainedSize(state).total_bytes >= policy.retention_bytes * SOON_PERCENT / 100
    )
    return bool(by_time or by_size)


def _duration(seconds: float) -> str:
    """The duration in the largest unit of which it has two or more."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def silence_texts(node: NodeSnapshot) -> Iterator[str]:
    """Publishers that are silent for longer than they promised (`max_silence`), and the next steps.

    The text is the same on every node, so that `rt status` shows it once. The duration of the silence is in
    /sessions. A certificate with many silent publishers cannot hide the publishers of other certificates.
    """
    if not node.silent:
        return
    connected = {one.session for one in clients_of_cluster(node).clients}
    connected |= {one.session for one in node.clients if not one.ended_ns}
    told = Counter[str]()
    for publisher in node.silent:
        owner = session_owner(publisher.session)
        told[owner] += 1
        if told[owner] <= TOLD_MAX:
            yield _silence_text(publisher, is_connected=publisher.session in connected)
    for owner, count in told.items():
        if count > TOLD_MAX:
            yield (
                f"{count - TOLD_MAX:,} more publishers of {owner} are silent for longer than they promised. "
                "GET /sessions lists them (silentSeconds), and the metric rt_silent_publishers counts them."
            )


def _silence_text(publisher: SilentPublisher, *, is_connected: bool) -> str:
    session = publisher.session
    where = (
        "Its push is connected, so the program publishes nothing: it waits for input, hangs or was killed."
        if is_connected
        else "Its push is connected to no node that reports: the program was killed, its machine or push is "
        "stopped, or the network to it is cut."
    )
    return (
        f"Session {session} gives no message, and its publisher promised one at least every "
        f"{publisher.limit_s:,.15g} s. {where} On the publisher's machine: `rt pushes list`, and look at the "
        "log of the program. Start it again if it is gone. "
        f'If it is retired: `rt rest /close-session --data \'{{"session": "{session}"}}\'`.'
    )
