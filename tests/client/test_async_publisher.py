"""The asyncio publisher completes deliveries when they are merged, despite waits and cancellations."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from push_node import NodesInThread, PushNode

import rt
from rt.aio.publisher import _ABANDONED_MAX, _Waits
from rt.client.wait_handle import WaitHandle
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from rt.sidecar.progress_file import NO_LEVEL, Level, ProgressRecord

WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    init_ca(directory)
    issue(directory, Identity("s", "node", "n1"), loopback=True)
    issue(directory, Identity("s", "publisher", "feed"))
    return directory


@contextmanager
def one_node(pki: Path) -> Iterator[tuple[PushNode, NodesInThread]]:
    node = PushNode(members=1)
    tls = TLS(pki / "ca.crt", pki / "n1.crt", pki / "n1.key")
    with NodesInThread(node, tls=tls) as nodes:
        yield node, nodes
    assert node.faults == []


def publisher_of(root: Path, pki: Path, node: PushNode, **options: Any) -> rt.aio.Publisher:
    tls = TLS(pki / "ca.crt", pki / "feed.crt", pki / "feed.key")
    settings = {"publisher_id": "feed", "linger_ms": 0, "endpoints": [node.endpoint], "tls": tls}
    return rt.aio.Publisher(root, "s", **(settings | options))


def run(main: Any) -> None:
    async def within() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await main

    asyncio.run(within())


@pytest.mark.slow
def test_delivery_completes_when_its_messages_are_merged(tmp_path: Path, pki: Path) -> None:
    merged: list[int] = []
    threads: set[threading.Thread] = set()

    def on_merged(end: int) -> None:
        merged.append(end)
        threads.add(threading.current_thread())
        if len(merged) == 1:
            raise ValueError("a fault of the handler, which must stop nothing")

    async def main(node: PushNode) -> None:
        async with publisher_of(tmp_path, pki, node, on_merged=on_merged) as publisher:
            first = publisher.publish(b"one", topic="t")
            assert (first.number, publisher.next_number) == (0, 1)
            assert await first == range(1)
            deliveries = [publisher.publish(b"%d" % number) for number in range(1, 2001)]
            many = publisher.publish_many([b"x"] * 500)
            assert many.numbers == range(2001, 2501)
            assert await asyncio.gather(*deliveries) == [range(n, n + 1) for n in range(1, 2001)]
            assert await many == range(2001, 2501)
            assert publisher.progress == (2501, 2501, 2501)
            assert await first == range(1)  # A delivery can be awaited again.
            assert await publisher.publish_many([]) == range(2501, 2501)
            await publisher.flush()
            while merged[-1] != 2501:
                await asyncio.sleep(0.01)
        assert node.holds(publisher.directory)

    with one_node(pki) as (node, _):
        run(main(node))
    assert merged == sorted(set(merged))
    assert threads == {threading.main_thread()}


@pytest.mark.slow
def test_cancelled_or_timed_out_waits_lose_no_messages_and_are_cleaned_up(tmp_path: Path, pki: Path) -> None:
    async def main(node: PushNode, nodes: NodesInThread) -> None:
        await asyncio.to_thread(nodes.do, node.stop)
        async with publisher_of(tmp_path, pki, node) as publisher:
            cancelled, patient = publisher.publish(b"one"), publisher.publish(b"two")
            waiting = asyncio.ensure_future(publisher.wait(cancelled.number))
            others = [asyncio.ensure_future(publisher.wait(patient.number, level="replicated"))]
            others.append(asyncio.ensure_future(publisher.wait(patient.number)))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for _ in range(_ABANDONED_MAX + 5):
                with pytest.raises(rt.Timeout, match="number 0 is not merged yet"):
                    await publisher.wait(0, timeout=0)
            assert publisher._waits is not None
            assert sum(map(len, publisher._waits._heaps.values())) < 10
            tls = TLS(pki / "ca.crt", pki / "n1.crt", pki / "n1.key")
            await asyncio.to_thread(nodes.do, lambda: node.start(tls))
            await asyncio.gather(*others)
            await cancelled
        assert node.holds(publisher.directory)

    with one_node(pki) as (node, nodes):
        run(main(node, nodes))


@pytest.mark.slow
def test_replication_error_ends_all_waits_and_is_passed_to_error_handler(tmp_path: Path, pki: Path) -> None:
    told: list[tuple[rt.RtError, threading.Thread]] = []

    async def main(node: PushNode, nodes: NodesInThread) -> None:
        nodes.do(node.stop)
        async with publisher_of(
            tmp_path, pki, node, on_error=lambda error: told.append((error, threading.current_thread()))
        ) as publisher:
            deliveries = [publisher.publish(b"one"), publisher.publish(b"two")]
            nodes.do(lambda: node.start(TLS(pki / "ca.crt", pki / "n1.crt", pki / "n1.key")))
            results = await asyncio.gather(*deliveries, return_exceptions=True)
            assert [type(result) for result in results] == [rt.Fenced, rt.Fenced]
            while not told:
                await asyncio.sleep(0.01)
            with pytest.raises(rt.Fenced):
                publisher.publish(b"three")

    with one_node(pki) as (node, nodes):
        node.refusal = rt.Fenced("another publisher took over")
        with pytest.raises(rt.Fenced):  # The end of the block raises it as well.
            run(main(node, nodes))
    ((error, thread),) = told
    assert (type(error), thread) == (rt.Fenced, threading.main_thread())


@pytest.mark.slow
def test_replication_error_is_raised_once_by_publish_without_waits(tmp_path: Path, pki: Path) -> None:
    async def main(node: PushNode) -> None:
        async with publisher_of(tmp_path, pki, node) as publisher:
            while publisher.status().state != "blocked":  # The push connects before there are messages.
                await asyncio.sleep(0.01)
            with pytest.raises(rt.CertificateError):
                publisher.publish(b"one")
            two = publisher.publish(b"two")  # The error is raised only once.
            node.refusal = None
            while publisher.status().state == "blocked":
                await asyncio.sleep(0.01)
            assert await two == range(1)

    with one_node(pki) as (node, _):
        node.refusal = rt.CertificateError("the nodes refuse the certificate")
        run(main(node))


@pytest.mark.slow
def test_close_ends_waits_and_does_not_replace_exception_of_with_block(tmp_path: Path, pki: Path) -> None:
    async def main(node: PushNode, nodes: NodesInThread) -> None:
        await asyncio.to_thread(nodes.do, node.stop)
        publisher = publisher_of(tmp_path, pki, node)
        await publisher.open()
        waiting = asyncio.ensure_future(publisher.wait(publisher.publish(b"one").number))
        await asyncio.sleep(0)
        await publisher.close(timeout=0)
        with pytest.raises(rt.Closed):
            await waiting
        with pytest.raises(rt.Closed):
            publisher.publish(b"late")
        await publisher.close()
        with pytest.raises(ZeroDivisionError):
            async with publisher_of(tmp_path, pki, node) as publisher:
                publisher.publish(b"two")
                _ = 1 // 0

    with one_node(pki) as (node, nodes):
        run(main(node, nodes))
    with rt.LogReader(tmp_path / "s" / "sessions" / "feed") as reader:
        assert [message.value for message in reader] == [b"one", b"two"]


def test_publisher_without_endpoints_writes_files_and_rejects_await_of_delivery(tmp_path: Path) -> None:
    async def main() -> None:
        publisher = rt.aio.Publisher(tmp_path, "s", publisher_id="feed")
        for use in (lambda: publisher.publish(b""), lambda: publisher.session, publisher.status):
            with pytest.raises(rt.Closed, match="not open"):
                use()
        await publisher.close()
        async with publisher:
            delivery = publisher.publish(b"one", timestamp_ns=5)
            assert (publisher.session, publisher.status().state) == ("feed", "local")
            with pytest.raises(rt.InvalidOption, match="without endpoints"):
                await delivery
            with pytest.raises(TypeError, match="must be bytes"):
                publisher.publish("text")  # type: ignore[arg-type]
            await publisher.flush()
        with rt.LogReader(publisher.directory) as reader:
            assert [(message.value, message.timestamp_ns) for message in reader] == [(b"one", 5)]

    run(main())


def test_open_raises_directory_locked_if_directory_is_in_use(tmp_path: Path) -> None:
    async def main() -> None:
        with rt.Publisher(tmp_path, "s", publisher_id="feed"), pytest.raises(rt.DirectoryLocked):
            async with rt.aio.Publisher(tmp_path, "s", publisher_id="feed"):
                pass

    run(main())


def test_cancelled_open_releases_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_opening, may_open, is_closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(rt.Publisher):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            is_opening.set()
            may_open.wait(WAIT_SECONDS)
            super().__init__(*arguments, **options)

        def close(self, timeout: float | None = 0) -> None:
            super().close(timeout)
            is_closed.set()

    async def main() -> None:
        opening = asyncio.ensure_future(publisher.open())
        await asyncio.to_thread(is_opening.wait, WAIT_SECONDS)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        may_open.set()
        assert await asyncio.to_thread(is_closed.wait, WAIT_SECONDS)
        async with rt.aio.Publisher(tmp_path, "s", publisher_id="feed"):
            pass

    with monkeypatch.context() as patch:
        patch.setattr("rt.client.publisher.Publisher", Slow)
        publisher = rt.aio.Publisher(tmp_path, "s", publisher_id="feed")
    run(main())
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as again:
        again.publish(b"one")


class Replication(WaitHandle):
    """Progress that a test sets."""

    def __init__(self) -> None:
        self.error: rt.RtError | None = None
        self.reach(NO_LEVEL)

    def reach(self, level: Level) -> None:
        self._record = ProgressRecord(bytes(16), level, level)

    def raise_if_vain(self) -> None:
        if self.error is not None:
            raise self.error

    def start_waiting(self) -> None:
        """Do nothing: no thread polls."""

    def stop_waiting(self) -> None:
        """Do nothing: no thread polls."""


def test_wait_of_earlier_run_completes_when_later_run_is_merged() -> None:
    """The first message of a dedup session may set its own number, which starts another run."""

    async def main() -> None:
        replication = Replication()
        waits = _Waits(replication)
        earlier, later = waits.add(3, 50, "merged"), waits.add(4, 200, "merged")
        assert earlier is not None
        assert later is not None
        replication.reach(Level(4, 150))
        waits.advance()
        assert (earlier.future.done(), later.future.done()) == (True, False), "an earlier run comes first"
        replication.reach(Level(4, 201))
        waits.advance()
        assert later.future.done()

    asyncio.run(main())


def test_error_of_discarded_wait_is_not_reported_to_event_loop() -> None:
    async def main() -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        replication = Replication()
        waits = _Waits(replication)
        wait = waits.add(0, 5, "merged")
        assert wait is not None
        replication.error = rt.Closed("the publisher is closed")
        waits.advance()
        waits.discard(wait)
        del wait, waits
        gc.collect()
        return [report for report in reports if "never retrieved" in report["message"]]

    assert asyncio.run(main()) == []
