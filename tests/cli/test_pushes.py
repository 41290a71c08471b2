"""`rt pushes` lists and stops the pushes of ended programs; stopped pushes keep unsent messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from push_node import NodesInThread, PushNode
from receiving_node import make_pki, tls_of

import rt
from replicator.push.lock import lock_push
from rt.cli.commands import pushes
from rt.cli.formats.push_table import Unsent, count_unsent, read_unsent
from rt.cli.main import cli
from rt.log.check.status import read_status
from rt.sidecar.progress_file import NO_LEVEL, Level
from rt.sidecar.push_control import ListRequested, PushesListed, PushSocket, PushSummary, StopRequested
from sequencer.localcluster.processes import nothing_left

DEADLINE_SECONDS = 120
PROGRAM = """
import sys, rt
root, name, endpoint, *files = sys.argv[1:]
publisher = rt.Publisher(root, "s", publisher_id=name, endpoints=[endpoint], tls=rt.TLS(*files))
publisher.publish_many([b"one", b"two"])
publisher.flush()
print(publisher.directory, flush=True)
if sys.stdin.read():
    publisher.close(linger=0)
"""
"""Publishes two messages and ends when stdin ends. If it read data from stdin, it closes the publisher
first.
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["pushes", *map(str, arguments)])


def listed() -> list[dict[str, Any]]:
    result = run("list", "--json")
    # A push process of another test run on this machine may be paused.
    assert result.exit_code == 0 or "did not answer in time" in result.stderr, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Programs:
    """Programs that publish to a node that does not run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pki = make_pki(root / "pki")
        self.node = PushNode("n1", members=1)
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str = "feed", root: str = "a") -> tuple[subprocess.Popen[bytes], Path]:
        """Start a program that publishes two messages; return it and its session directory."""
        tls = tls_of(self.pki, "feed")
        command = [sys.executable, "-c", PROGRAM, str(self.root / root), name, self.node.endpoint]
        program = subprocess.Popen(
            [*command, str(tls.ca), str(tls.cert), str(tls.key)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.running.append(program)
        assert program.stdout is not None
        return program, Path(program.stdout.readline().decode().strip())

    def leave(self, name: str = "feed", root: str = "a") -> Path:
        """Start a program and wait until it has ended; return its session directory."""
        program, directory = self.start(name, root)
        wait_for(lambda: self.of(directory))
        program.communicate(timeout=DEADLINE_SECONDS)
        wait_for(lambda: self.of(directory)[0]["ended_ns"])
        return directory

    @staticmethod
    def of(directory: Path) -> list[dict[str, Any]]:
        return [push for push in listed() if push["directory"] == str(directory)]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with nothing_left():
        made = Programs(tmp_path)
        yield made
        for program in made.running:
            program.kill()
            program.communicate()


@pytest.mark.slow
def test_push_of_ended_program_is_listed_and_named_in_ps(programs: Programs) -> None:
    before_ns = time.time_ns()
    directory = programs.leave()
    [push] = programs.of(directory)
    assert (push["session"], push["stream"], push["endpoints"]) == ("feed", "s", [programs.node.endpoint])
    assert (push["unsent_messages"], push["problem"]) == (2, None)
    assert push["unsent_bytes_max"] > 0
    assert before_ns <= push["ended_ns"] <= time.time_ns()
    command = Path(f"/proc/{push['pid']}/cmdline").read_bytes()
    assert command.rstrip(b"\0 ") == b"rt push --attached s/feed"
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == [
        "session",
        "stream",
        "pid",
        "ended",
        "unsent",
        "stuck",
        "endpoints",
        "directory",
    ]
    # Pushes of other programs may widen a column.
    assert any(str(directory) in line and re.search(r" ago +2 messages, up to ", line) for line in lines)


@pytest.mark.slow
def test_push_process_stopped_by_signal_is_listed_as_stuck_with_kill_cont_hint(programs: Programs) -> None:
    directory = programs.leave()
    [push] = programs.of(directory)
    os.kill(push["pid"], signal.SIGSTOP)
    try:
        wait_for(lambda: PushSocket(push["pid"], "").stopped())
        [stopped] = programs.of(directory)
        assert stopped["stuck"].startswith("stopped by a signal and sends nothing")
        assert f"`kill -CONT {push['pid']}` lets it go on" in stopped["stuck"]
        assert (stopped["session"], stopped["stream"], stopped["unsent_messages"]) == ("feed", "s", 2)
    finally:
        os.kill(push["pid"], signal.SIGCONT)
    wait_for(lambda: programs.node.endpoint in (programs.of(directory)[0]["stuck"] or ""))


@pytest.mark.slow
def test_stopped_push_keeps_log_bytes_and_next_publisher_sends_them(programs: Programs) -> None:
    directory = programs.leave()
    content = {path.name: path.read_bytes() for path in directory.glob("log.*")}
    [push] = programs.of(directory)
    result = run("stop", directory)
    assert result.exit_code == 0, result.output
    said = f"Stopped the push of s/feed (process {push['pid']}). 2 unsent messages stay in {directory}."
    assert result.stdout.startswith(said)
    assert programs.of(directory) == []
    assert {path.name: path.read_bytes() for path in directory.glob("log.*")} == content
    with closing(lock_push(str(directory))):
        pass  # No process serves the session.
    tls = tls_of(programs.pki, "feed")
    with NodesInThread(programs.node, tls=tls_of(programs.pki, "n1")):
        options: dict[str, Any] = {
            "endpoints": [programs.node.endpoint],
            "tls": tls,
            "local_persistence": 3600.0,
        }
        with rt.Publisher(programs.root / "a", "s", publisher_id="feed", **options) as publisher:
            publisher.wait(publisher.publish(b"three"), "merged", timeout=DEADLINE_SECONDS)
        assert programs.node.holds(directory)


@pytest.mark.slow
def test_stop_refuses_push_of_running_program(programs: Programs) -> None:
    program, directory = programs.start()
    wait_for(lambda: programs.of(directory))
    [push] = programs.of(directory)
    assert push["ended_ns"] is None
    result = run("stop", directory)
    assert result.exit_code == 1
    assert "the push was not stopped" in result.stderr
    assert "its publisher is open: close it first" in result.stderr
    assert programs.of(directory)
    assert program.poll() is None


@pytest.mark.slow
def test_stop_refuses_ambiguous_session_name_and_lists_directories(programs: Programs) -> None:
    first, second = programs.leave("feed~two", root="a"), programs.leave("feed~two", root="b")
    result = run("stop", "feed~two")
    assert result.exit_code == 1
    assert f"several pushes have that name: got feed~two, expected {first} or {second}" in result.stderr
    assert run("stop", second).exit_code == 0
    assert programs.of(first)
    assert not programs.of(second)
    assert run("stop", "feed~two", "--stream", "other").exit_code == 1
    assert run("stop", "feed~two", "--stream", "s", "--json").exit_code == 0


def test_stop_of_unknown_session_exits_with_1() -> None:
    result = run("stop", "no-such-session")
    assert result.exit_code == 1
    assert "there is no such push on this machine: got no-such-session" in result.stderr
    assert "`rt pushes list` shows all pushes of this user." in result.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_stop_with_invalid_timeout_exits_with_2(seconds: str) -> None:
    assert run("stop", "feed", "--timeout", seconds).exit_code == 2


def test_stop_timeout_exits_with_1_and_names_push_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: PushSocket, request: ListRequested | StopRequested, *, seconds: float) -> PushesListed:
        if isinstance(request, StopRequested):
            raise rt.Timeout("the push process did not answer in time", where=f"process {self.pid}")
        return PushesListed((PushSummary("/a/feed", "s", ("n1:1",), 5.0),))

    monkeypatch.setattr(pushes, "find_push_processes", lambda: [PushSocket(1, "\0stuck")])
    monkeypatch.setattr(PushSocket, "ask", ask)
    result = run("stop", "feed", "--timeout", "2")
    assert result.exit_code == 1
    assert "rt: the push has not stopped within 2 s (at /a/feed, process 1)" in result.stderr
    assert "Its messages stay on disk. `kill 1` ends the process" in result.stderr


def test_list_reports_unresponsive_push_process_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> PushesListed:
        raise rt.Timeout("the push process did not answer in time", where="process 1")

    monkeypatch.setattr(PushSocket, "ask", silent)
    monkeypatch.setattr(pushes, "find_push_processes", lambda: [PushSocket(1, "\0stuck")])
    result = run("list")
    assert result.exit_code == 1
    assert "rt: the push process did not answer in time (at process 1)" in result.stderr


def test_unsent_messages_are_counted_across_runs(tmp_path: Path) -> None:
    for count in (3, 2):
        with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
            publisher.publish_many([b"x"] * count)
    status = read_status(publisher.directory)
    counts = [
        count_unsent(status, level).messages
        for level in (NO_LEVEL, Level(0, 1), Level(0, 3), Level(1, 3), Level(1, 4), Level(1, 5))
    ]
    assert counts == [5, 4, 2, 2, 1, 0]
    assert count_unsent(status, Level(1, 5)) == Unsent(0, 0)
    assert "no log directory" in str(read_unsent(str(tmp_path / "nowhere")))
