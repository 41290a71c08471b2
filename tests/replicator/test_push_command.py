"""`rt push`: one session or all sessions of a root, invalid options, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from push_node import NodesInThread, PushNode

import rt
from replicator.cli.push import push
from replicator.cli.session_discovery import SessionDiscovery
from replicator.push.client import PushClient
from replicator.push.lock import lock_push

WAIT_SECONDS = 120


def run(*arguments: object) -> Result:
    return CliRunner().invoke(push, [str(argument) for argument in arguments])


def published(root: Path, session: str, *values: bytes) -> Path:
    with rt.Publisher(root, "s", publisher_id=session) as publisher:
        publisher.publish_many(values)
    return Path(publisher.directory)


@contextlib.contextmanager
def one_node() -> Iterator[tuple[PushNode, NodesInThread]]:
    node = PushNode(members=1)
    with NodesInThread(node) as nodes:
        yield node, nodes
    assert node.faults == []


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--endpoints needs --ca, --cert and --key (or --insecure"),
        (["--insecure", "--ca", __file__], "--insecure excludes"),
    ],
)
def test_conflicting_tls_options_exit_with_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = run(tmp_path, "--stream", "s", "--endpoints", "localhost:1", *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_empty_endpoints_or_remote_endpoint_without_tls_raise_value_error(tmp_path: Path) -> None:
    directory = published(tmp_path, "feed", b"one")
    for endpoints in (" , ", "example.org:5002"):
        result = run(directory, "--stream", "s", "--endpoints", endpoints, "--insecure")
        assert isinstance(result.exception, ValueError)


def test_remote_endpoint_without_tls_raises_invalid_option_for_root(tmp_path: Path) -> None:
    published(tmp_path, "feed", b"one")
    result = run(tmp_path, "--stream", "s", "--endpoints", "n1.example:1", "--insecure")
    assert isinstance(result.exception, rt.InvalidOption)
    assert "loopback only, not to 'n1.example:1'" in str(result.exception)


def test_root_push_includes_later_sessions_and_survives_failure_of_one_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = published(tmp_path, "good", b"one")
    bad = published(tmp_path, "bad", b"two")
    (good.parent / "no-log").mkdir()
    lock = lock_push(str(bad))
    clients: list[str] = []

    def make(path: str) -> PushClient:
        clients.append(path)
        return PushClient(path, "s", [node.endpoint], insecure=True)

    async def serve() -> None:
        task = asyncio.create_task(SessionDiscovery(str(good.parent), make).run())
        async with asyncio.timeout(WAIT_SECONDS):
            while not node.holds(good):
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with one_node() as (node, _):
        asyncio.run(serve())
    lock.close()
    assert {*clients} == {str(good), str(bad)}  # The failing push may have been tried again.
    assert "push_failed" in caplog.text


def test_root_push_without_sessions_warns_once_and_pushes_session_that_comes_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = tmp_path / "s" / "sessions"

    async def serve() -> None:
        make = partial(PushClient, stream="s", endpoints=[node.endpoint], insecure=True)
        task = asyncio.create_task(SessionDiscovery(str(sessions), make).run())
        async with asyncio.timeout(WAIT_SECONDS):
            while "no_session_found" not in caplog.text:
                await asyncio.sleep(0.005)
            directory = await asyncio.to_thread(published, tmp_path, "feed", b"one")
            while not node.holds(directory):
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with one_node() as (node, _):
        asyncio.run(serve())
    assert caplog.text.count(f"no_session_found path={sessions}") == 1


def test_root_push_below_file_raises_storage_error(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"")
    result = run(tmp_path, "--stream", "s", "--endpoints", "127.0.0.1:1", "--insecure")
    assert isinstance(result.exception, rt.StorageError)
    assert "listing the sessions" in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"nonsense\n"])
def test_attached_push_without_publisher_exits_with_0_at_end_of_stdin(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "stdin").write_bytes(said)
    with (tmp_path / "stdin").open() as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "rt", "push", "--attached"],
            stdin=stdin,
            capture_output=True,
            check=False,
            timeout=WAIT_SECONDS,
        )
    assert (done.returncode, done.stdout) == (0, b"")
    assert (b"request_malformed" in done.stderr) == bool(said)


@pytest.mark.slow
def test_push_exits_with_143_on_sigterm_and_with_1_if_all_nodes_reject(tmp_path: Path) -> None:
    directory = published(tmp_path, "feed", b"one")
    with one_node() as (node, _):
        command = [
            *(sys.executable, "-m", "rt", "push", directory, "--stream", "s"),
            *("--insecure", "--endpoints", node.endpoint),
        ]
        process = subprocess.Popen(command)
        until(lambda: node.holds(directory))
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 128 + 15
        node.refusal = rt.Fenced("a newer incarnation took over")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
        assert done.returncode == 1
        assert "a newer incarnation took over" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_push_exits_with_1_and_reason_when_session_directory_is_removed(tmp_path: Path) -> None:
    directory = published(tmp_path, "feed", b"one")
    with one_node() as (node, _):
        command = [
            *(sys.executable, "-m", "rt", "push", directory, "--stream", "s"),
            *("--insecure", "--endpoints", node.endpoint),
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        until(lambda: node.holds(directory))
        # A rename removes the directory at once. `rmtree` would delete the files first, and a missing segment
        # is another error.
        Path(directory).rename(tmp_path / "away")
        _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert (
        f"the session's directory was removed while it was pushed (at {directory})" in said.splitlines()[-1]
    )
