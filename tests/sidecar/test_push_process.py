"""Push processes: assignment of sessions, messages to a process, its dismissal, and restart if it dies."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rt.sidecar.protocol import PushRequested
from rt.sidecar.push_process import IDLE_SECONDS, PushProcess, choose

WAIT_SECONDS = 120

ECHO = """
import json, os, sys
heard = open(sys.argv[1], "ab", buffering=0)
while line := sys.stdin.buffer.readline():
    heard.write(line)
    said = json.loads(line)
    if said["type"] == "finish" and len(sys.argv) == 2:
        os.write(1, json.dumps({"type": "ended", "number": said["number"]}).encode() + b"\\n")
heard.write(b"end\\n")
"""
"""A process that writes each command to a file, and reports a session as ended when it must finish that
session.
"""


@pytest.mark.parametrize(
    ("loads", "processes_max", "chosen"),
    [
        ([], 2, 0),
        ([], 1, 0),
        ([0], 2, 0),
        ([1], 2, 1),
        ([1], 1, 0),
        ([3, 0], 2, 1),
        ([3, 0], 4, 1),
        ([3, 1], 4, 2),
        ([3, 1, 2], 3, 1),
        ([2, 2], 2, 0),
        ([5, 4, 9], 1, 1),
    ],
)
def test_session_is_assigned_to_least_loaded_process_or_new_one_if_all_are_busy(
    loads: list[int], processes_max: int, chosen: int
) -> None:
    assert choose(loads, processes_max=processes_max) == chosen


def test_200_sessions_are_spread_evenly_over_two_processes() -> None:
    loads: list[int] = []
    for _ in range(200):
        at = choose(loads, processes_max=2)
        loads[at : at + 1] = [loads[at] + 1 if at < len(loads) else 1]
    assert loads == [100, 100]


def a_session(number: int) -> PushRequested:
    return PushRequested(number, f"/{number}", "s", ("a:1",), "ca", "cert", "key")


def stepped(process: PushProcess, condition: Callable[[], object], *, later: float = 0.0) -> float:
    """Step until the condition holds, and return the time argument of the last step."""
    deadline, now = time.monotonic() + WAIT_SECONDS, 0.0
    while not condition():
        assert time.monotonic() < deadline
        process.step(now := time.monotonic() + later)
        poll = select.poll()
        process.register(poll)
        poll.poll(5)
    return now


@pytest.fixture
def heard(tmp_path: Path) -> Path:
    return tmp_path / "heard"


def told(heard: Path) -> list[str]:
    lines = heard.read_text().splitlines() if heard.exists() else []
    messages = [json.loads(line) if line != "end" else {"type": "end"} for line in lines]
    return [" ".join(map(str, [*message.values()][:2])) for message in messages]


@pytest.fixture
def running(heard: Path, request: pytest.FixtureRequest) -> Iterator[PushProcess]:
    process = PushProcess(
        lambda _: None, [sys.executable, "-S", "-c", ECHO, str(heard), *getattr(request, "param", ())]
    )
    yield process
    if (child := process._process) is not None:
        child.disown()
        os.waitpid(child.pid, 0)


def test_push_process_is_not_started_before_its_first_session(running: PushProcess) -> None:
    running.step(1.0)
    assert (running.pid, running.is_over, running.is_settled, running.due_in(1.0)) == (None, True, True, None)
    running.finish(1)
    assert running.is_over


@pytest.mark.slow
def test_push_process_serves_sessions_until_they_finish_and_is_dismissed_when_idle(
    running: PushProcess, heard: Path
) -> None:
    for number in (1, 2):
        running.serve(a_session(number))
    assert not running.is_settled
    stepped(running, lambda: told(heard) == ["push 1", "push 2"])
    assert (running.load, running.is_settled) == (2, True)
    running.finish(1)
    stepped(running, lambda: running.load == 1)
    running.finish(2)
    now = stepped(running, lambda: running.load == 0)
    assert told(heard) == ["push 1", "push 2", "finish 1", "finish 2"]
    assert running.due_in(now) == pytest.approx(IDLE_SECONDS)
    running.serve(a_session(3))  # In time, so the process is not dismissed.
    running.step(time.monotonic() + IDLE_SECONDS + 1)
    assert not running.is_dismissed
    running.finish(3)
    stepped(running, lambda: running.load == 0)
    running.step(time.monotonic())
    stepped(running, lambda: running.is_over, later=IDLE_SECONDS + 1)
    assert running.is_dismissed
    assert told(heard)[-2:] == ["finish 3", "end"]


@pytest.mark.slow
@pytest.mark.parametrize("running", [("deaf",)], indirect=True)
def test_killed_push_process_restarts_after_pause_and_receives_remaining_sessions(
    running: PushProcess, heard: Path
) -> None:
    for number in (1, 2):
        running.serve(a_session(number))
    running.finish(1)
    stepped(running, lambda: len(told(heard)) == 3)
    pid = running.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    now = stepped(running, lambda: running.pid is None)
    assert 0 < (running.due_in(now) or 0) < 1
    assert not running.is_settled
    running.serve(a_session(3))
    heard.unlink()
    stepped(running, lambda: told(heard) == ["push 1", "finish 1", "push 2", "push 3"])
    assert running.pid != pid


@pytest.mark.slow
def test_push_process_start_is_retried_after_failure(heard: Path) -> None:
    process = PushProcess(lambda _: None, ["/no/such/program"])
    process.serve(a_session(1))
    process.step(now := time.monotonic())
    assert process.pid is None
    assert 0 < (process.due_in(now) or 0) < 1
    assert not process.is_settled
