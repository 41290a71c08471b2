"""The alarms of publishers that are silent for longer than they promised (`max_silence`). Pure.

The text is the same on every node, so that `rt status` shows it once. How long it has been is in /sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from rt.names import session_owner
from sequencer.rest.base.node_snapshot import NodeSnapshot, SilentPublisher
from sequencer.rest.views.cluster_clients import clients_of_cluster

TOLD_MAX: Final = 5
"""Publishers of one certificate that alarms name."""


def silence_texts(node: NodeSnapshot) -> Iterator[str]:
    """The problems and the next steps. One certificate cannot hide those of others behind many of its own."""
    if not node.silent:
        return
    connected = {one.session for one in clients_of_cluster(node).clients}
    connected |= {one.session for one in node.clients if not one.ended_ns}
    told = Counter[str]()
    for publisher in node.silent:
        owner = session_owner(publisher.session)
        told[owner] += 1
        if told[owner] <= TOLD_MAX:
            yield _text(publisher, is_connected=publisher.session in connected)
    for owner, count in told.items():
        if count > TOLD_MAX:
            yield (
                f"{count - TOLD_MAX:,} more publishers of {owner} are silent for longer than they promised. "
                "GET /sessions lists them (silentSeconds), and the metric rt_silent_publishers counts them."
            )


def _text(publisher: SilentPublisher, *, is_connected: bool) -> str:
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
