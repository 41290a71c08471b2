"""Soft, hard and forced resets of a real cluster under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chaos.wired_nodes import WiredNodes
from faults import WAIT_S, Faults
from whole_cluster import whole_cluster

import rt
from rt.cluster_epoch import number_of
from rt.events import Event, Reset, SkipForward
from rt.log.disk import REAL
from rt.log.scan.directory import list_segments
from rt.net.lease_client import LeaseCalls, LeaseRow
from rt.net.rest_client import RestResponse, ask
from sequencer.raft.storage.identity import decode_identity

pytestmark = pytest.mark.slow

FORCED = 1 << 16
HOLDERS = itertools.count()


@pytest.fixture(scope="module")
def nodes() -> Iterator[WiredNodes]:
    """Start nodes for these tests alone: after a hard reset, other tests would miss messages merged before
    it.
    """
    with whole_cluster() as nodes:
        yield nodes


@pytest.fixture
def faults(nodes: WiredNodes, tmp_path: Path) -> Faults:
    return Faults(nodes, tmp_path)


def asked(
    nodes: WiredNodes, name: str, target: str, body: dict[str, Any] | None = None
) -> RestResponse | None:
    """Return the answer of a node to an operator, or None if it does not answer."""
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    tls = nodes.certificate("operator", "op")
    try:
        return asyncio.run(ask([f"127.0.0.1:{nodes.data_ports[name]}"], tls, method, target, data))
    except rt.RtError:
        return None


def begin(faults: Faults, name: str, target: str, **body: Any) -> None:
    """Repeat a request until the reset has started. If it has started and only the answer was lost, do not
    repeat it.
    """
    epochs: list[int] = []

    def is_begun() -> bool:
        if not (told := status(faults, name)):
            return False
        epochs.append(told["epoch"])
        if epochs[-1] != epochs[0]:
            return True
        answer = asked(faults.nodes, name, target, body)
        return answer is not None and answer.status == 202

    faults.wait(is_begun, f"{target} to begin at {name}")


def status(faults: Faults, name: str, target: str = "/reset-status") -> dict[str, Any]:
    answer = asked(faults.nodes, name, target)
    return {} if answer is None or answer.status != 200 else json.loads(answer.body)


def epoch_on_disk(nodes: WiredNodes, name: str) -> int:
    """Return the epoch in which a node's Raft continues after a start."""
    path = nodes.directory(name) / "raft" / "identity"
    return number_of(decode_identity(path.read_bytes(), path=str(path)).epoch)


def wait_done(faults: Faults, epoch: int, *names: str) -> None:
    """Wait until these nodes report the reset as done and are in that epoch."""

    def is_done(name: str) -> bool:
        told = status(faults, name)
        return (told.get("state"), told.get("epoch")) == ("done", epoch)

    for name in names:
        faults.wait(lambda name=name: is_done(name), f"the reset to be done at {name}")  # type: ignore[misc]
        faults.wait(lambda name=name: status(faults, name, "/status").get("epoch") == epoch, "its epoch")  # type: ignore[misc]


@contextlib.contextmanager
def leases_alive(faults: Faults, *, least: int = 0) -> Iterator[None]:
    """Run a holder of leases during the block. It keeps its lease, and acquires each further lease once, with
    a greater token than before. Its last token is above `least`.
    """
    nodes, name, is_over = faults.nodes, f"holder-{next(HOLDERS)}", threading.Event()
    tls, tokens = nodes.certificate("subscriber", name, lease_groups=[name]), list[int]()

    async def hold() -> None:
        calls = LeaseCalls(nodes.endpoints, tls)
        try:
            (held,) = await calls.acquire(name, [f"{name}/held"], 3600.0, timeout_s=WAIT_S)
            tokens.append(held)
            while not is_over.is_set():
                wanted = [f"{name}/{len(tokens)}"]
                tokens.extend(await calls.acquire(name, wanted, 3600.0, timeout_s=WAIT_S))
                row = LeaseRow(f"{name}/held", name, held)
                assert await calls.renew(name, [row], timeout_s=WAIT_S) == [True]
                await asyncio.sleep(0.2)
            rows = await calls.held(f"{name}/", timeout_s=WAIT_S)
            async with asyncio.timeout(WAIT_S):
                # After a forced reset, its node may never have received a lease. Each node may receive a
                # lease late.
                while not least and {row.token for row in rows} != {*tokens}:
                    await asyncio.sleep(0.1)
                    rows = await calls.held(f"{name}/", timeout_s=WAIT_S)
            assert {row.token for row in rows} <= {*tokens}
            assert all(await calls.release(name, rows, timeout_s=WAIT_S))
        finally:
            await calls.close()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(asyncio.run, hold())
        try:
            faults.wait(lambda: holding.done() or len(tokens) > 2, "leases")
            yield
            count = len(tokens)
            faults.wait(lambda: holding.done() or len(tokens) > count + 2, "leases again")
        finally:
            is_over.set()
        holding.result()
    assert all(tokens), "nobody else wants them"
    assert tokens == sorted(set(tokens))
    assert tokens[-1] > least


def test_soft_reset_under_load_loses_and_reorders_no_messages_and_down_node_follows(faults: Faults) -> None:
    nodes = faults.nodes
    with leases_alive(faults), faults.sender("one") as one, faults.sender("two") as two:
        faults.wait_flow(one, two)
        leader = nodes.wait_ready()
        follower, down = (name for name in nodes.names if name != leader)
        nodes.kill(down)
        faults.wait_flow(one, two)
        begin(faults, follower, "/soft-reset", force=False)
        wait_done(faults, 2, *nodes.running)
        faults.wait_flow(one, two)
        nodes.start(down)
        wait_done(faults, 2, down)
        faults.wait_flow(one, two)
        one.close()
        two.close()
        faults.verdict()


def test_rolling_restarts_during_soft_resets_end_in_one_epoch_and_lose_no_messages(
    faults: Faults,
) -> None:
    """Restart the nodes as an upgrade does: stop each node cleanly, and the next one as soon as it is
    back.
    """
    nodes = faults.nodes
    with leases_alive(faults), faults.sender("rolled") as sender:
        faults.wait_flow(sender)
        epoch = status(faults, nodes.wait_ready(), "/status")["epoch"]
        for asked_at, restarted in zip(nodes.names, [*nodes.names[1:], nodes.names[0]], strict=True):
            begin(faults, asked_at, "/soft-reset", force=False)
            nodes.stop(restarted)  # The reset may be in any phase.
            nodes.start(restarted)
            nodes.wait_ready()
            epoch += 1
            wait_done(faults, epoch, *nodes.names)
            faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_hard_reset_continues_at_merged_end_fences_publisher_and_notifies_readers(
    faults: Faults, tmp_path: Path
) -> None:
    nodes, events = faults.nodes, list[Event]()
    tls = nodes.certificate("publisher", "feed")
    reader = nodes.certificate("subscriber", "reader")

    def publisher() -> rt.Publisher:
        return rt.Publisher(
            tmp_path / "feed",
            "s",
            publisher_id="feed",
            endpoints=nodes.endpoints,
            tls=tls,
            local_persistence=60,
        )

    first = publisher()
    start = max(map(nodes.merged_position, nodes.names)) + 100
    first.wait(first.publish_many([b"before"] * 100)[-1], "merged", timeout=WAIT_S)
    nodes.wait_merged(start)
    leader = nodes.wait_ready()
    down, late = (name for name in nodes.names if name != leader)
    nodes.kill(down)
    epoch = int(status(faults, leader, "/status")["epoch"]) + 1
    nodes.pause(late, "data")
    with leases_alive(faults):
        begin(faults, leader, "/hard-reset", stream="s", force=False)
        faults.wait(
            lambda: epoch_on_disk(nodes, late) == epoch, "the epoch to be durable, its files untouched"
        )
        nodes.kill(late)
        assert list_segments(REAL, str(nodes.merged_directory(late)))[0].run < epoch
        nodes.start(late)
        wait_done(faults, epoch, leader, late)

    def is_fenced() -> bool:
        try:
            first.wait(first.publish(b"fenced"), "merged", timeout=0.1)
        except rt.Timeout:
            return False
        except rt.Fenced:
            return True
        raise AssertionError("an X was merged that the reset had ended")

    faults.wait(is_fenced, "the publisher to be fenced")
    with contextlib.suppress(rt.Fenced):
        first.close(timeout=0)
    with publisher() as again:
        again.wait(again.publish(b"behind"), "merged", timeout=WAIT_S)
        nodes.start(down)
        wait_done(faults, epoch, down)
        nodes.wait_merged(start + 1)
        with rt.Subscriber(
            tmp_path / "copy",
            "s",
            endpoints=nodes.endpoints,
            tls=reader,
            connect_timeout=None,
            position=start,
            on_event=events.append,
        ) as subscriber:
            (message,) = subscriber.poll(1, timeout=WAIT_S)
    assert (message.position, message.value, message.number) == (start, b"behind", again.progress.written - 1)
    for name in nodes.names:
        told: list[Event] = []
        with rt.LogReader(nodes.merged_directory(name), position=0, on_event=told.append) as log:
            assert [message.position for message in log] == [start]
        assert told == [SkipForward(0, start, "reset"), Reset(start, epoch)], name
    assert nodes.compare().differences == ()
    history = status(faults, down, "/log-history")
    assert {one["truncationReason"] for one in history[:-1]} == {"reset"}  # type: ignore[index]
    plain = asked(nodes, leader, "/hard-reset", {"force": False})
    assert plain is not None
    assert plain.status == 400, "it must name the stream"


def test_forced_reset_continues_from_one_node_after_two_of_three_are_wiped(
    faults: Faults, tmp_path: Path
) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "kept")
    with (
        rt.Publisher(
            tmp_path / "kept", "s", publisher_id="kept", endpoints=nodes.endpoints, tls=tls
        ) as publisher,
        leases_alive(faults, least=1 << 55),
    ):
        position = max(map(nodes.merged_position, nodes.names)) + 1
        publisher.wait(publisher.publish(b"before"), "merged", timeout=WAIT_S)
        nodes.wait_merged(position)
        left, *gone = nodes.names
        nodes.kill(*gone)
        faults.wait(lambda: status(faults, left, "/status").get("leader") == "", "the leader to be gone")
        refused = asked(nodes, left, "/soft-reset", {"force": True})
        assert refused is not None
        assert (refused.status, b"with empty Raft and data" in refused.body) == (503, True), refused.body
        for name in gone:
            nodes.wipe(name)
        faults.wait(lambda: status(faults, left, "/status").get("leader") == "", "the leader to be gone")
        refused = asked(nodes, left, "/soft-reset", {"force": False})
        assert refused is not None
        assert (refused.status, b"are lost" in refused.body) == (503, True)
        nodes.start(*gone)
        begin(faults, left, "/soft-reset", force=True)
        wait_done(faults, FORCED, *nodes.names)
        publisher.wait(publisher.publish(b"behind"), "merged", timeout=WAIT_S)
    nodes.wait_merged(position + 1)
    assert nodes.compare().differences == ()
    for name in nodes.names:
        told: list[Event] = []
        with rt.LogReader(nodes.merged_directory(name), position=position - 1, on_event=told.append) as log:
            assert [message.value for message in log] == [b"before", b"behind"]
        assert told == [Reset(position, FORCED)], "its readers hear where one node's word was taken"
