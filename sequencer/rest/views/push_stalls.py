"""Pushes that are stuck: connected, or lost while they were silent, and nothing of them arrives. Pure.

- silent: the push process reports nothing. It is stopped, its machine hangs, or the network is cut or slow.
- waiting: its disk holds bytes that this node does not get.
- unmerged: this node has messages that are not merged, while those of others are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

from rt.units import format_time
from sequencer.ipc.silence import HUNG_S
from sequencer.rest.base.node_snapshot import ClientConnection, NodeSnapshot
from sequencer.rest.views.client_views import clients_of_cluster
from sequencer.state.state import SequencerState

StallReason: TypeAlias = Literal["silent", "waiting", "unmerged"]

STALLED_S: Final = 10.0
"""An election or a node's restart takes a few seconds, and ends the stream."""
TOLD_MAX: Final = 5
"""Maximum number of pushes of one certificate that an alarm names."""


def stalls_of(node: NodeSnapshot) -> list[tuple[ClientConnection, StallReason]]:
    """The stuck pushes and the reasons. Empty while no leader is known: then every session waits, and another
    alarm reports it.

    If only this node has lost a push, the push continues: another node is connected to it, and reports if it
    is stuck.
    """
    if not node.standing.leader or node.state is None:
        return []
    running = {
        one.incarnation
        for one in node.state.sessions.values()
        if one.active is not None and not one.is_superseded and one.active_runs[-1].end is None
    }
    elsewhere = {one.session for one in clients_of_cluster(node).clients if one.node != node.node}
    lasting = (one for one in node.clients if not one.ended_ns or one.session not in elsewhere)
    found = ((client, _reason(client, client.incarnation in running)) for client in lasting)
    return [(client, reason) for client, reason in found if reason is not None]


def _reason(client: ClientConnection, is_running: bool) -> StallReason | None:
    """`is_running`: the last run of the publisher has no end yet, as far as the cluster knows."""
    if client.session is None:
        return None
    if client.silent_s >= HUNG_S:
        return "silent" if is_running or not client.ended_ns else None
    if client.ended_ns:
        return None
    if client.waiting_bytes and client.stalled_s >= STALLED_S:
        return "waiting"
    return "unmerged" if client.unmerged_s >= STALLED_S else None


def stall_texts(stalls: Sequence[tuple[ClientConnection, StallReason]], node: NodeSnapshot) -> Iterator[str]:
    """The problems and the next steps. A certificate with many stuck pushes cannot hide the pushes of other
    certificates.
    """
    told = Counter[str]()
    for client, reason in stalls:
        name = client.identity.name
        told[name] += 1
        if told[name] <= TOLD_MAX:
            yield _text(client, reason, node)
    for name, count in told.items():
        if count > TOLD_MAX:
            yield (
                f"{count - TOLD_MAX:,} more pushes of {name} to {node.node} are stuck. "
                "GET /rt-clients lists them, and the metric rt_stuck_pushes counts them by reason."
            )


def _text(client: ClientConnection, reason: StallReason, snapshot: NodeSnapshot) -> str:
    """The problem and the next step."""
    session, node = client.session, snapshot.node
    there = "On the publisher's machine: `rt pushes list`."
    if reason == "unmerged":
        count = max(client.position - client.merged, 0)
        return (
            f"{count:,} messages of session {session} at {node} have not been merged for "
            f"{client.unmerged_s:.0f} s, while others were. What it waits for: "
            f"`rt rest '/sessions?name={session}'`, waitsFor and runs.{_missing_ids(client, snapshot.state)}"
        )
    if reason == "waiting":
        return (
            f"The push of session {session} is connected to {node}, which has stored nothing of it for "
            f"{client.stalled_s:.0f} s although {client.waiting_bytes:,} bytes wait. {there} It says why."
        )
    since = f"for {client.silent_s:.0f} s"
    if client.ended_ns:
        since = f"until its connection ended at {format_time(client.ended_ns)[:19]}Z"
    text = (
        f"The push of session {session} has reported nothing to {node} {since}: the process is stopped, "
        "its machine hangs, or the network to it is cut or slow. What is published stays there. "
        f"{there} If it says stopped: `kill -CONT PID`."
    )
    if client.ended_ns:
        text += f' If it is retired: `rt rest /close-session --data \'{{"session": "{session}"}}\'`.'
    return text


def _missing_ids(client: ClientConnection, state: SequencerState | None) -> str:
    """A hint for a session that may start after the next number of its dedup id; empty for other sessions."""
    session = None if state is None or client.session is None else state.session_of(client.session)
    if state is None or session is None or session.dedup_id is None or session.consumed is not None:
        return ""
    wanted = state.wanted.get(session.dedup_id)
    if wanted is None or wanted >= client.position:
        return ""
    return (
        f" If its run begins after number {wanted}, the next one of dedup id {session.dedup_id}, it waits "
        "until the numbers from there on come in another session, with another name."
    )
