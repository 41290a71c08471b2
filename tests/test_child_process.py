"""Child processes: their lines, log records, end, restart pauses and environment."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rt.child_process import RESTART_SECONDS_MAX, ChildProcess, RestartBackoff, child_environment

WAIT_SECONDS = 120


def test_restart_pause_doubles_up_to_maximum_and_resets_after_long_run() -> None:
    now_s = 100.0
    restarts = RestartBackoff(calm_s=10.0)
    pauses = []
    for _ in range(8):
        restarts.record_start(now_s)
        now_s += 5.0
        pauses.append(restarts.record_end(now_s))
    assert pauses == [min(0.1 * 2**failures, RESTART_SECONDS_MAX) for failures in range(8)]
    restarts.record_start(now_s)
    assert restarts.record_end(now_s + 10.0) == 0.1


def test_child_environment_omits_command_options_of_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RT_PUSH_INSECURE", "1")
    monkeypatch.setenv("RT_PULL_TOPICS", "a")
    assert "RT_PUSH_INSECURE" not in child_environment("push")
    assert child_environment("push")["RT_PULL_TOPICS"] == "a"


class Children:
    """Starts children and kills them at the end."""

    def __init__(self) -> None:
        self._started: list[ChildProcess] = []

    def __call__(self, script: str) -> ChildProcess:
        child = ChildProcess([sys.executable, "-c", script], is_logged=True)
        self._started.append(child)
        return child

    def kill_all(self) -> None:
        for child in self._started:
            child.kill()


@pytest.fixture
def start() -> Iterator[Children]:
    children = Children()
    yield children
    children.kill_all()


def heard(child: ChildProcess, is_met: Callable[[list[bytes]], object]) -> list[bytes]:
    """Return the child's lines as soon as the condition holds."""
    deadline, lines = time.monotonic() + WAIT_SECONDS, []
    while not is_met(lines):
        assert time.monotonic() < deadline, lines
        poll = select.poll()
        child.register(poll)
        poll.poll(1000)
        lines += child.exchange()
    return lines


def until_ended(child: ChildProcess) -> list[bytes]:
    return heard(child, lambda _: child.status is not None and not child.is_heard)


def test_long_lines_pass_both_ways_and_last_line_is_delivered(start: Children) -> None:
    child = start("import sys\nfor line in sys.stdin: print(line, end='', flush=True)")
    long = b"x" * 3_000_000
    child.send(long + b"\n")
    assert not child.is_sent
    child.send(b"short\n")
    assert heard(child, lambda lines: len(lines) == 2) == [long, b"short"]
    assert child.is_sent
    assert child.end(WAIT_SECONDS) == 0
    again = start("print('bye')")
    assert until_ended(again) == [b"bye"]
    again.send(b"in vain\n")
    assert again.kill() == 0


def test_forwarded_log_record_keeps_logger_level_and_traceback(
    start: Children, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "some.part")
    child = start(
        "import logging, sys; from rt.child_process import ForwardedLog\n"
        "logging.getLogger().handlers[:] = [ForwardedLog()]; logging.getLogger().setLevel(1)\n"
        "part = logging.getLogger('some.part')\n"
        "part.debug('began path=%s', 'a\\nb\\udcff')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: part.exception('failed')\n"
        "logging.getLogger('quiet').info('not asked for')\n"
        "part.info('x' * 1_000_000)\n"
    )
    until_ended(child)
    assert child.kill() == 0
    began, failed, long = (record for record in caplog.records if record.process == child.pid)
    assert (began.name, began.levelname, began.process) == ("some.part", "DEBUG", child.pid)
    assert began.getMessage() == "began path=a\nb\\udcff"
    assert (failed.levelno, "ZeroDivisionError" in failed.getMessage()) == (logging.ERROR, True)
    assert 0 < time.time() - began.created < WAIT_SECONDS
    assert set(long.getMessage()) == {"x"}


def test_stderr_lines_of_child_are_logged_escaped(
    start: Children, logged: Callable[[str], list[str]]
) -> None:
    child = start("import os; os.write(2, b'one\\ntw'); os.write(2, b'o\\xff'); os._exit(3)")
    until_ended(child)
    assert child.kill() == 3
    assert logged("rt.child_process") == [
        f"child_stderr pid={child.pid} line='one'",
        f"child_stderr pid={child.pid} line='two\\\\xff'",
    ]
    assert child.last_line == "two\\xff"


def test_unread_child_does_not_block_and_logs_count_of_dropped_records(
    start: Children, caplog: pytest.LogCaptureFixture
) -> None:
    child = start(
        "import logging; from rt.child_process import ForwardedLog\n"
        "logging.getLogger().handlers[:] = [ForwardedLog()]\n"
        "for number in range(10_000): logging.warning('noise %d', number)\n"
        "print('done', flush=True); input(); logging.warning('again')\n"
    )
    poll = select.poll()
    poll.register(child._socket, select.POLLIN)  # type: ignore[arg-type]
    assert poll.poll(WAIT_SECONDS * 1000)  # The child has finished, although no log record was read.
    assert heard(child, bool) == [b"done"]
    child.send(b"\n")
    until_ended(child)
    assert child.kill() == 0
    messages = [record.getMessage() for record in caplog.records if record.process == child.pid]
    kept = [message for message in messages if message.startswith("noise")]
    assert kept == [f"noise {number}" for number in range(len(kept))]
    assert messages[len(kept) :] == [f"log_records_dropped count={10_000 - len(kept)}", "again"]


def test_child_that_does_not_end_is_killed_with_its_process_group(start: Children) -> None:
    child = start(
        "import os, signal, subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(other.pid, flush=True); signal.pause()"
    )
    ((pid,),) = (heard(child, bool),)
    pid_fd = os.pidfd_open(int(pid))
    assert child.end(0.01) == -signal.SIGKILL
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    assert poll.poll(WAIT_SECONDS * 1000)
    os.close(pid_fd)


@pytest.mark.usefixtures("no_pushes")
def test_failed_start_of_child_leaks_no_file_descriptors(start: Children) -> None:
    before = len(os.listdir("/proc/self/fd"))  # Descriptors of earlier tests may be closed in the meantime.
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/no/such/program"], is_logged=True)
    child = start("")
    until_ended(child)
    child.kill()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("when", ["in its start", "later"])
def test_child_ends_after_hang_up_while_fork_of_parent_is_running(
    start: Children, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    forked: list[int] = []
    wait_for_end, end = os.pipe()

    def fork() -> None:
        if (pid := os.fork()) == 0:  # pragma: no cover
            os.close(end)
            os.read(wait_for_end, 1)
            os._exit(0)
        forked.append(pid)

    forking = threading.Thread(target=fork)

    def start_and_fork(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started = popen(*arguments, **options)
        forking.start()
        forking.join(0.5)  # A fork that does not wait until the child has started is done by then.
        return started

    popen = subprocess.Popen
    if when == "in its start":
        monkeypatch.setattr(subprocess, "Popen", start_and_fork)
    child = start("import sys; sys.stdin.read()")
    if when == "later":
        forking.start()
    forking.join()
    try:
        child.hang_up()
        assert child.wait(WAIT_SECONDS) == 0
    finally:
        os.close(end)
        os.close(wait_for_end)
        os.waitpid(forked[0], 0)


def test_lines_of_child_all_arrive_while_parent_is_slow(start: Children) -> None:
    child = start(
        "import uvloop\n"
        "from rt.child_process import write_line; from rt.cli.signals import listen_in_loop\n"
        "async def main():\n"
        "    listen_in_loop(lambda _: None, lambda: None)\n"
        "    for number in range(2000): write_line(b'%d ' % number + b'x' * 1000 + b'\\n')\n"
        "uvloop.run(main())\n"
    )
    lines = until_ended(child)
    assert [int(line.split()[0]) for line in lines] == [*range(2000)]
    assert child.kill() == 0
