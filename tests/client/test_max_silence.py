"""A publisher's promise (`max_silence`) in its directory: which ends keep it, and what nodes are told."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from push_node import PushNode

import rt
import rt.aio
from replicator.protocol.handshake import PushStart, PushStatus, SilenceLimit
from replicator.push.client import PushClient
from replicator.push.silence_promise import SilencePromise
from rt.cli.main import cli
from rt.client import session_log
from rt.log.disk import REAL
from rt.sidecar.silence_file import SILENCE_FILE, WrittenLimit, read_silence_limit

WAIT_SECONDS = 120


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; `TimeoutError` if it does not come."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT_SECONDS):
            await test

    asyncio.run(bounded())


def publisher_in(root: Path, **options: Any) -> rt.Publisher:
    return rt.Publisher(root, "s", publisher_id="feed", **options)


def promise(directory: str | Path) -> WrittenLimit | None:
    return read_silence_limit(REAL, str(directory))


def test_without_the_option_there_is_no_promise(tmp_path: Path) -> None:
    with publisher_in(tmp_path) as publisher:
        assert promise(publisher.directory) is None


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(None, False), (KeyboardInterrupt, False), (SystemExit, False), (ValueError, True)],
    ids=["close", "Ctrl-C", "sys.exit", "an error"],
)
def test_a_promise_ends_with_the_block_unless_an_error_ends_it(
    tmp_path: Path, error: type[BaseException] | None, is_kept: bool
) -> None:
    publisher = publisher_in(tmp_path, max_silence=2.5)
    assert promise(publisher.directory) == (0, 2500)
    with contextlib.nullcontext() if error is None else pytest.raises(error), publisher:
        publisher.publish(b"one")
        if error is not None:
            raise error
    assert (promise(publisher.directory) is not None) == is_kept
    publisher.close()
    assert (promise(publisher.directory) is not None) == is_kept, "closed again"


@pytest.mark.parametrize("end", ["killed", "not closed"])
def test_a_program_that_dies_keeps_its_promise_until_the_next_run(tmp_path: Path, end: str) -> None:
    script = (
        "import os, rt, signal, sys\n"
        "publisher = rt.Publisher(sys.argv[1], 's', publisher_id='feed', max_silence=60)\n"
        "publisher.publish(b'one')\n"
        "publisher.flush()\n"
        "if sys.argv[2] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status = subprocess.run([sys.executable, "-c", script, str(tmp_path), end], check=False).returncode
    assert status == (-signal.SIGKILL if end == "killed" else 0)
    directory = tmp_path / "s" / "sessions" / "feed"
    assert promise(directory) == (0, 60_000)
    with publisher_in(tmp_path, max_silence=5):
        assert promise(directory) == (1, 5000)
    assert promise(directory) is None


def test_a_run_without_a_promise_takes_back_that_of_the_run_before(tmp_path: Path) -> None:
    directory = tmp_path / "s" / "sessions" / "feed"
    with pytest.raises(ValueError), publisher_in(tmp_path, max_silence=60):
        raise ValueError
    assert promise(directory) is not None
    with publisher_in(tmp_path):
        assert promise(directory) is None


def test_a_run_that_begins_at_another_number_makes_the_promise_again(tmp_path: Path) -> None:
    """The cluster ends a promise when a later run is opened."""
    with publisher_in(tmp_path, dedup_id="quotes", max_silence=60) as publisher:
        publisher.publish(b"one", number=100)
        assert promise(publisher.directory) == (1, 60_000)
    assert promise(publisher.directory) is None


def test_a_promise_that_could_not_be_written_at_the_start_of_a_run_is_made_before_its_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise rt.DiskFull("no space")

    with publisher_in(tmp_path, dedup_id="quotes", max_silence=60) as publisher:
        with monkeypatch.context() as full:
            full.setattr(session_log, "write_silence_limit", fail)
            with pytest.raises(rt.DiskFull):
                publisher.publish(b"one", number=100)
            assert promise(publisher.directory) == (0, 60_000)
        assert publisher.publish(b"one", number=100) == 100
        publisher.flush()
        assert promise(publisher.directory) == (1, 60_000)
    assert promise(publisher.directory) is None


def test_a_late_close_does_not_end_the_promise_of_the_next_publisher(tmp_path: Path) -> None:
    first = publisher_in(tmp_path, max_silence=60)
    first.close()
    with publisher_in(tmp_path, max_silence=60) as second:
        first.close()
        assert promise(second.directory) == (1, 60_000)


@pytest.mark.parametrize("value", [0, 0.5, -1, float("nan"), float("inf"), 1e12, "60", True])
def test_a_limit_that_cannot_be_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(rt.InvalidOption, match="max_silence"):
        publisher_in(tmp_path, max_silence=value)


def test_the_asyncio_publisher_promises_too(tmp_path: Path) -> None:
    async def play() -> None:
        async with rt.aio.Publisher(tmp_path, "s", publisher_id="feed", max_silence=60) as publisher:
            assert promise(publisher.directory) == (0, 60_000)
        assert promise(publisher.directory) is None

    asyncio.run(play())


def test_rt_pub_promises_and_ends_in_order(tmp_path: Path) -> None:
    arguments = ["pub", "--path", str(tmp_path), "--stream", "s", "--name", "feed"]
    result = CliRunner().invoke(cli, [*arguments, "--max-silence", "60"], input="one\n")
    assert result.exit_code == 0, result.output
    assert promise(tmp_path / "s" / "sessions" / "feed") is None
    for wrong, why in (("0", "is not in the range"), ("soon", "'soon' is not a valid number")):
        result = CliRunner().invoke(cli, [*arguments, "--max-silence", wrong], input="one\n")
        assert result.exit_code == 2
        assert "--max-silence" in result.output
        assert why in result.output


@pytest.mark.parametrize("content", [b"", b"RTSILENC", bytes(32), b"RTSILENC" + bytes(24)])
def test_a_file_that_is_no_promise_is_no_end_of_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SILENCE_FILE).write_bytes(content)
    with pytest.raises(rt.Corrupt):
        read_silence_limit(REAL, str(tmp_path))


# What the push tells the nodes


def limits(node: PushNode) -> list[SilenceLimit]:
    """What the node was told, each once."""
    said = [one.silence_limit for one in node.statuses if one.silence_limit is not None]
    return list(dict.fromkeys(said))


def pushing(publisher: rt.Publisher, node: PushNode) -> PushClient:
    return PushClient(publisher.directory, "s", [node.endpoint], insecure=True)


def test_the_nodes_are_told_the_promise_and_that_the_publisher_was_closed_in_order(tmp_path: Path) -> None:
    async def play() -> None:
        node = await PushNode(members=1).start()
        publisher = publisher_in(tmp_path, max_silence=60)
        publisher.publish(b"one")
        publisher.flush()
        client = pushing(publisher, node)
        task = asyncio.create_task(client.run())
        await until(lambda: limits(node) == [SilenceLimit(0, 60_000)])
        publisher.close()
        client.finish()
        await task
        assert limits(node) == [SilenceLimit(0, 60_000), SilenceLimit(0, 0)]
        assert node.committed == SilenceLimit(0, 0)
        await node.stop()

    run(play())


def test_a_push_that_starts_after_the_close_ends_the_promise_that_the_cluster_knows(tmp_path: Path) -> None:
    async def play() -> None:
        node = await PushNode(members=1).start()
        with publisher_in(tmp_path) as publisher:
            publisher.publish(b"one")
        node.committed = SilenceLimit(0, 60_000)
        client = pushing(publisher, node)
        client.finish()
        await client.run()
        assert node.committed == SilenceLimit(0, 0)
        await node.stop()

    run(play())


@pytest.mark.parametrize("runs", [(5, 6), (6, 5)], ids=["behind first", "behind last"])
def test_a_node_that_is_behind_does_not_hide_the_promise_of_the_last_run(
    tmp_path: Path, runs: tuple[int, int]
) -> None:
    """It knows of an earlier run only, whose end settles nothing."""
    silence = SilencePromise(REAL, str(tmp_path))
    for run in runs:
        start = PushStart(bytes(16), 0, 3, f"n{run}", silence_limit=SilenceLimit(run, 60_000))
        silence.on_start(start)
    assert silence.state() == SilenceLimit(6, 0)
    silence.settle(SilenceLimit(6, 0))
    assert silence.is_settled


def test_a_push_does_not_end_before_the_end_of_the_promise_is_committed(tmp_path: Path) -> None:
    async def play() -> None:
        node = await PushNode(members=1).start()
        node.committed, node.settles = SilenceLimit(0, 60_000), False
        with publisher_in(tmp_path) as publisher:
            publisher.publish(b"one")
        client = pushing(publisher, node)
        client.finish()
        task = asyncio.create_task(client.run())
        repeated = PushStatus(0, 0, SilenceLimit(0, 0))
        await until(lambda: client.is_drained and node.statuses.count(repeated) > 2)
        assert not task.done()
        node.settles = True
        await task
        await node.stop()

    run(play())


def test_the_promise_of_a_killed_publisher_is_told_before_the_push_ends(tmp_path: Path) -> None:
    async def play() -> None:
        node = await PushNode(members=1).start()
        publisher = publisher_in(tmp_path, max_silence=60)
        publisher.publish(b"one")
        publisher._close_at_exit()
        client = pushing(publisher, node)
        client.finish()
        await client.run()
        assert limits(node) == [SilenceLimit(0, 60_000)]
        await node.stop()

    run(play())


@pytest.mark.parametrize("option", [{}, {"max_silence": 60}], ids=["no promise", "an older node"])
def test_nothing_is_told_without_a_promise_or_to_an_older_node(
    tmp_path: Path, option: dict[str, float]
) -> None:
    async def play() -> None:
        node = PushNode(members=1)
        node.knows_silence = not option
        await node.start()
        publisher = publisher_in(tmp_path, **option)
        publisher.publish(b"one")
        publisher._close_at_exit()
        client = pushing(publisher, node)
        task = asyncio.create_task(client.run())
        await until(lambda: len(node.statuses) > 1)
        client.finish()
        await task
        assert limits(node) == []
        await node.stop()

    run(play())
