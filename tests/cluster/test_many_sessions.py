"""Many short sessions on real nodes: descriptors and directories are released, and limits hold."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import pytest
from chaos.wired_nodes import WiredNodes
from faults import WAIT_S, Faults
from operator_calls import is_closed, told, wait_run

import rt
from replicator.push.client import PushClient

pytestmark = pytest.mark.slow

COUNT = 100
AT_ONCE = 6


def session_descriptors(nodes: WiredNodes, name: str) -> int:
    """Return how many descriptors of a node's data process refer to files of session copies."""
    (pid,) = nodes.pids(name, "data")
    count = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += "/sessions/" in os.readlink(f"/proc/{pid}/fd/{fd}")
    return count


def copies(nodes: WiredNodes, name: str) -> int:
    """How many directories of session copies a node has."""
    sessions = nodes.directory(name) / "s" / "sessions"  # Its entries may be removed at this moment.
    return sum(path.name.isdecimal() for path in sessions.iterdir())


def publish(nodes: WiredNodes, root: Path, tls: rt.TLS, session: str, count: int = 2) -> None:
    with rt.Publisher(root, "s", publisher_id=session, endpoints=nodes.endpoints, tls=tls) as publisher:
        numbers = publisher.publish_many([b"x"] * count)
        publisher.wait(numbers[-1], "merged", timeout=WAIT_S)


def is_refused(nodes: WiredNodes, name: str, session: str) -> bool:
    words = nodes.last_words(name, 1000)
    return any("too many sessions are open" in line and session in line for line in words.splitlines())


def test_closed_sessions_leave_no_descriptors_or_directories(faults: Faults, tmp_path: Path) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "pods")
    before = {name: (copies(nodes, name), session_descriptors(nodes, name)) for name in nodes.names}
    sessions = [f"pods~{number}" for number in range(COUNT)]

    def come_and_go(session: str) -> None:
        publish(nodes, tmp_path / "out", tls, session)
        told(nodes, "/close-session", {"session": session})

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(come_and_go, sessions))
    nodes.wait(lambda: is_closed(nodes, sessions[-1]), "the last session to be closed")
    for name, (had, opened) in before.items():
        nodes.wait(lambda name=name, had=had: copies(nodes, name) <= had, "closed copies to be removed")
        # If each session left one descriptor open, there would be twice as many.
        most = opened + COUNT // 2
        nodes.wait(
            lambda name=name, most=most: session_descriptors(nodes, name) <= most, "files to be closed"
        )
    # A returning publisher continues after its last message.
    publish(nodes, tmp_path / "out", tls, sessions[0])
    wait_run(nodes, sessions[0], 1, number=4)
    assert nodes.compare().differences == ()


def test_session_over_limit_is_refused_until_another_is_closed(faults: Faults, tmp_path: Path) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "flock")
    told(nodes, "/configuration", {"sessionsPerNameMax": 2})
    try:
        for number in range(2):
            publish(nodes, tmp_path / "out", tls, f"flock~{number}")
        with rt.Publisher(
            tmp_path / "out", "s", publisher_id="flock~2", endpoints=nodes.endpoints, tls=tls
        ) as third:
            number = third.publish(b"x")
            faults.wait(lambda: all(is_refused(nodes, name, "flock~2") for name in nodes.names), "refusals")
            assert third.progress.merged == 0
            told(nodes, "/close-session", {"session": "flock~0"})
            third.wait(number, "merged", timeout=WAIT_S)
    finally:
        told(nodes, "/configuration", {"sessionsPerNameMax": 1000})


def test_new_sessions_wait_without_free_descriptors_and_no_node_restarts(
    faults: Faults, tmp_path: Path
) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "crowd")
    pids = {name: nodes.pids(name, "data")[0] for name in nodes.names}
    (usual,) = {resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids.values()}
    with contextlib.ExitStack() as opened:

        def publisher(session: str) -> rt.Publisher:
            return opened.enter_context(
                rt.Publisher(tmp_path / "out", "s", publisher_id=session, endpoints=nodes.endpoints, tls=tls)
            )

        steady = publisher("crowd~steady")
        steady.wait(steady.publish(b"x"), "merged", timeout=WAIT_S)
        try:
            for pid in pids.values():
                used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
                free = (fd for fd in count() if fd not in used)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(islice(free, 12, None)), usual[1]))
            late = [publisher(f"crowd~{number}") for number in range(12)]
            numbers = [one.publish(b"y") for one in late]
            for _ in range(20):
                steady.wait(steady.publish(b"x"), "merged", timeout=WAIT_S)
            faults.wait(
                lambda: any("EMFILE" in nodes.last_words(name, 2000) for name in nodes.names), "a refusal"
            )
            assert any(one.progress.merged <= number for one, number in zip(late, numbers, strict=True))
        finally:
            for pid in pids.values():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
        for one, number in zip(late, numbers, strict=True):
            one.wait(number, "merged", timeout=WAIT_S)
    failed = [line for name in nodes.names for line in faults.said(name) if "event=process_failed" in line]
    assert pids == {name: nodes.pids(name, "data")[0] for name in nodes.names}, failed


def is_unlocked(directory: str) -> bool:
    with open(os.path.join(directory, "push.lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_publisher_continues_with_next_run_after_close_of_run_with_unsent_messages(
    faults: Faults, tmp_path: Path
) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "late")

    async def push(directory: str) -> None:
        client = PushClient(directory, "s", nodes.endpoints, tls)
        client.finish()
        await client.run()

    for x in range(0, 6, 2):
        with rt.Publisher(tmp_path / "out", "s", publisher_id="late") as offline:
            offline.publish(b"sent")
            offline.flush()
            directory = str(offline.directory)
            nodes.wait(lambda at=directory: is_unlocked(at), "the push process of the last start to end")
            asyncio.run(push(directory))
            offline.publish(b"not sent")
            offline.flush()
        told(nodes, "/close-session", {"session": "late"})
        nodes.wait(lambda: is_closed(nodes, "late"), "the session to be closed")
        publish(nodes, tmp_path / "out", tls, "late")
        wait_run(nodes, "late", x + 1)
    assert nodes.compare().differences == ()
