"""A publisher's silence promise (`max_silence`): when it is kept or ended, and how nodes receive it."""

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
    """Wait for a condition; raise `TimeoutError` if it does not become true."""
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


def test_publisher_without_max_silence_writes_no_promise(tmp_path: Path) -> None:
    with publisher_in(tmp_path) as publisher:
        assert promise(publisher.directory) is None


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(None, False), (KeyboardInterrupt, False), (SystemExit, False), (ValueError, True)],
    ids=["close", "Ctrl-C", "sys.exit", "an error"],
)
def test_promise_ends_with_block_unless_an_error_is_raised(
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
def test_promise_of_killed_or_unclosed_publisher_survives_until_next_run(tmp_path: Path, end: str) -> None:
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


def test_run_without_max_silence_removes_promise_of_previous_run(tmp_path: Path) -> None:
    directory = tmp_path / "s" / "sessions" / "feed"
    with pytest.raises(ValueError), publisher_in(tmp_path, max_silence=60):
        raise ValueError
    assert promise(directory) is not None
    with publisher_in(tmp_path):
        assert promise(directory) is None


def test_run_starting_at_another_number_writes_promise_again(tmp_path: Path) -> None:
    """The cluster ends a promise when a later run is opened."""
    with publisher_in(tmp_path, dedup_id="quotes", max_silence=60) as publisher:
        publisher.publish(b"one", number=100)
        assert promise(publisher.directory) == (1, 60_000)
    assert promise(publisher.directory) is None


def test_promise_is_written_before_first_batch_after_disk_was_full_at_run_start(
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


def test_repeated_close_does_not_end_promise_of_next_publisher(tmp_path: Path) -> None:
    first = publisher_in(tmp_path, max_silence=60)
    first.close()
    with publisher_in(tmp_path, max_silence=60) as second:
        first.close()
        assert promise(second.directory) == (1, 60_000)


@pytest.mark.parametrize("value", [0, 0.5, -1, float("nan"), float("inf"), 1e12, "60", True])
def test_invalid_max_silence_raises_invalid_option(tmp_path: Path, value: object) -> None:
    with pytest.raises(rt.InvalidOption, match="max_silence"):
        publisher_in(tmp_path, max_silence=value)


def test_asyncio_publisher_writes_promise_and_ends_it_at_close(tmp_path: Path) -> None:
    async def play() -> None:
        async with rt.aio.Publisher(tmp_path, "s", publisher_id="feed", max_silence=60) as publisher:
            assert promise(publisher.directory) == (0, 60_000)
        assert promise(publisher.directory) is None

    asyncio.run(play())


def test_rt_pub_ends_promise_at_exit_and_exits_with_2_for_invalid_max_silence(tmp_path: Path) -> None:
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
def test_malformed_promise_file_raises_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SILENCE_FILE).write_bytes(content)
    with pytest.raises(rt.Corrupt):
        read_silence_limit(REAL, str(tmp_path))


# Limits that the push reports to the nodes


def limits(node: PushNode) -> list[SilenceLimit]:
    """Return the distinct limits that the node received."""
    said = [one.silence_limit for one in node.statuses if one.silence_limit is not None]
    return list(dict.fromkeys(said))


def pushing(publisher: rt.Publisher, node: PushNode) -> PushClient:
    return PushClient(publisher.directory, "s", [node.endpoint], insecure=True)


def test_node_receives_promise_and_its_end_when_publisher_closes(tmp_path: Path) -> None:
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


def test_push_started_after_close_ends_promise_known_to_cluster(tmp_path: Path) -> None:
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
def test_promise_of_last_run_is_used_though_lagging_node_reports_earlier_run(
    tmp_path: Path, runs: tuple[int, int]
) -> None:
    """The lagging node knows only the earlier run. The end of that run's promise settles nothing."""
    silence = SilencePromise(REAL, str(tmp_path))
    for run in runs:
        start = PushStart(bytes(16), 0, 3, f"n{run}", silence_limit=SilenceLimit(run, 60_000))
        silence.on_start(start)
    assert silence.state() == SilenceLimit(6, 0)
    silence.settle(SilenceLimit(6, 0))
    assert silence.is_settled


def test_push_does_not_finish_before_end_of_promise_is_committed(tmp_path: Path) -> None:
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


def test_push_sends_promise_of_killed_publisher_before_it_finishes(tmp_path: Path) -> None:
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
def test_push_sends_no_silence_limit_without_promise_or_to_older_node(
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
