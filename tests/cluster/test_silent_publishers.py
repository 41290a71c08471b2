"""Nodes raise an alarm for publishers that are silent for longer than their `max_silence`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos.wired_nodes import WiredNodes
from faults import WAIT_S, Faults
from operator_calls import told

import rt
from rt.net.tls import TLS

pytestmark = pytest.mark.slow

PUBLISHER = """
import sys, time, rt
root, session, ca, cert, key, *endpoints = sys.argv[1:]
tls = rt.TLS(ca, cert, key)
publisher = rt.Publisher(root, "s", publisher_id=session, endpoints=endpoints, tls=tls, max_silence=1)
publisher.wait(publisher.publish(b"one"), "merged", timeout=180)
print("merged", flush=True)
time.sleep(3600)
"""


def session_of(nodes: WiredNodes, name: str, session: str) -> dict[str, Any]:
    """Return the newest incarnation of a session, as a node knows it."""
    found: list[dict[str, Any]] = told(nodes, f"/sessions?name={session}", by=name)
    return found[-1] if found else {"maxSilenceSeconds": -1}


def alarm(nodes: WiredNodes, name: str, session: str) -> str:
    """The text of a node's alarm about that session; empty if there is none."""
    alarms = [one for one in told(nodes, "/status", by=name)["alarms"] if one["name"] == "publisher-silent"]
    return next((one["text"] for one in alarms if f"Session {session} " in one["text"]), "")


def kill_promising(nodes: WiredNodes, root: Path, session: str, tls: TLS) -> None:
    """Start a publisher that promises a message each second; kill it when its first message is merged."""
    paths = [str(path) for path in (root, session, tls.ca, tls.cert, tls.key)]
    arguments = [sys.executable, "-c", PUBLISHER, paths[0], session, *paths[2:], *nodes.endpoints]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "merged\n"
        finally:
            os.kill(process.pid, signal.SIGKILL)


def test_killed_publisher_raises_alarm_on_each_node_until_restarted_or_closed(
    faults: Faults, tmp_path: Path
) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "promising")

    def wait_named(*, by_all: bool) -> None:
        faults.wait(
            lambda: all(bool(alarm(nodes, name, "promising")) == by_all for name in nodes.names),
            f"the {'alarm' if by_all else 'end of the alarm'} of each node",
        )

    kill_promising(nodes, tmp_path, "promising", tls)
    wait_named(by_all=True)
    assert "at least every 1 s" in alarm(nodes, "n1", "promising")
    assert session_of(nodes, "n1", "promising")["silentSeconds"] > 1
    with rt.Publisher(tmp_path, "s", publisher_id="promising", endpoints=nodes.endpoints, tls=tls) as back:
        back.wait(back.publish(b"two"), "merged", timeout=WAIT_S)
        wait_named(by_all=False)
    kill_promising(nodes, tmp_path, "promising", tls)
    wait_named(by_all=True)
    told(nodes, "/close-session", {"session": "promising"})
    wait_named(by_all=False)


def test_node_partitioned_during_publisher_close_raises_no_alarm(faults: Faults, tmp_path: Path) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "orderly")
    others = ("n1", "n2")
    with rt.Publisher(
        tmp_path, "s", publisher_id="orderly", endpoints=nodes.endpoints, tls=tls, max_silence=30
    ) as publisher:
        publisher.wait(publisher.publish(b"one"), "merged", timeout=WAIT_S)
        faults.wait(
            lambda: all(
                session_of(nodes, name, "orderly")["maxSilenceSeconds"] == 30 for name in nodes.names
            ),
            "the promise to be known to each node",
        )
        nodes.cut("n3")
    faults.wait(
        lambda: all(session_of(nodes, name, "orderly")["maxSilenceSeconds"] == 0 for name in others),
        "the end of the promise",
    )
    assert session_of(nodes, "n3", "orderly")["maxSilenceSeconds"] == 30
    nodes.heal("n3")
    faults.wait(
        lambda: session_of(nodes, "n3", "orderly")["maxSilenceSeconds"] == 0,
        "the node that was cut off to learn of it",
    )
    assert not any(alarm(nodes, name, "orderly") for name in nodes.names)
