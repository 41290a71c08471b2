"""The supervisor of the processes of a node: its decisions, and real runs with small child processes."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.errors import (
    CertificateError,
    ClusterMismatch,
    Corrupt,
    DirectoryLocked,
    DiskFull,
    Diverged,
    InvalidName,
    LogNotFound,
    RtError,
    StorageFailed,
    UnknownVersion,
)
from sequencer.config.config import BadSetting
from sequencer.config.restart_policy import (
    FINAL,
    Action,
    ExitStatus,
    RestartPolicy,
    RestartTimes,
    SignalChild,
    StartChild,
)
from sequencer.node.child_main import exit_status
from sequencer.node.supervisor import Supervisor

WAIT_S: Final = 120.0
CHILDREN: Final = ("control", "data")


def begun(times: RestartTimes | None = None) -> RestartPolicy:
    decisions = RestartPolicy(CHILDREN, times or RestartTimes())
    assert decisions.start(0.0) == [StartChild("control"), StartChild("data")]
    return decisions


# Decisions


def test_child_ended_by_reset_restarts_immediately_unless_node_is_stopping() -> None:
    decisions = begun()
    decisions.ended("control", 70, 0.0)
    assert decisions.tick(1.0) == [StartChild("control")]
    for now_s in (1.5, 2.0):
        assert decisions.ended("control", ExitStatus.RESET, now_s) == [StartChild("control")]
        assert decisions.wake_at_s is None
    decisions.stop(3.0)
    assert decisions.ended("data", 0, 3.1) != [StartChild("data")]
    assert decisions.ended("control", ExitStatus.RESET, 3.2) == []
    assert decisions.result == ExitStatus.STOPPED


def test_restart_delay_doubles_up_to_its_maximum() -> None:
    decisions, now_s, pauses = begun(), 0.0, []
    for _ in range(8):
        assert decisions.ended("data", 70, now_s) == []
        at_s = decisions.wake_at_s
        assert at_s is not None
        assert decisions.tick(at_s - 0.001) == []
        assert decisions.tick(at_s) == [StartChild("data")]
        pauses.append(round(at_s - now_s, 3))
        now_s = at_s
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_restart_delay_is_reset_after_child_ran_for_30_seconds() -> None:
    decisions = begun()
    for now_s in (1.0, 2.0, 3.0):
        decisions.ended("data", 70, now_s)
        assert decisions.tick(now_s + 1) == [StartChild("data")]
    decisions.ended("data", 70, 4.0 + 29.9)
    assert decisions.restart_at_s("data") == pytest.approx(33.9 + 0.8)
    assert decisions.tick(40.0) == [StartChild("data")]
    decisions.ended("data", 70, 40.0 + 30.0)
    assert decisions.restart_at_s("data") == pytest.approx(70.1)


@pytest.mark.parametrize("status", [0, 70, -SIGKILL, -SIGTERM, 3])
def test_child_that_ends_by_itself_is_restarted_alone(status: int) -> None:
    decisions = begun()
    assert decisions.ended("control", status, 1.0) == []
    assert decisions.result is None
    assert decisions.tick(1.1) == [StartChild("control")]
    assert decisions.wake_at_s is None


@pytest.mark.parametrize(("status", "result"), [(1, 1), (2, 1), (71, 71)])
@pytest.mark.parametrize(("child", "other"), [CHILDREN, CHILDREN[::-1]])
def test_child_with_final_exit_status_stops_other_child_and_node(
    status: int, result: int, child: str, other: str
) -> None:
    decisions = begun()
    assert decisions.ended(child, status, 1.0) == [SignalChild(other, SIGTERM)]
    assert decisions.result is None
    assert decisions.ended(other, 0, 2.0) == []
    assert decisions.result == result


def test_stop_ends_data_first_and_then_control() -> None:
    decisions = begun()
    assert decisions.stop(1.0) == [SignalChild("data", SIGTERM)]
    assert decisions.ended("data", 0, 2.0) == [SignalChild("control", SIGTERM)]
    assert decisions.ended("control", 0, 3.0) == []
    assert decisions.result == ExitStatus.STOPPED


def test_stop_kills_each_child_after_its_own_timeout() -> None:
    decisions = begun()
    decisions.stop(1.0)
    assert decisions.wake_at_s == 11.0
    assert decisions.tick(10.9) == []
    assert decisions.tick(11.0) == [SignalChild("data", SIGKILL)]
    assert decisions.tick(12.0) == []
    assert decisions.ended("data", -SIGKILL, 12.0) == [SignalChild("control", SIGTERM)]
    assert decisions.tick(22.0) == [SignalChild("control", SIGKILL)]
    decisions.ended("control", -SIGKILL, 22.0)
    assert decisions.result == ExitStatus.STOPPED


def test_second_stop_sends_no_signal_and_keeps_deadline() -> None:
    decisions = begun()
    decisions.stop(1.0)
    assert decisions.stop(1.1) == []
    assert decisions.wake_at_s == 11.0


def test_stop_does_not_wait_for_child_that_awaits_restart() -> None:
    decisions = begun()
    decisions.ended("data", 70, 1.0)
    assert decisions.stop(1.05) == [SignalChild("control", SIGTERM)]
    assert decisions.tick(5.0) == []
    decisions.ended("control", 0, 5.0)
    assert decisions.result == ExitStatus.STOPPED


def test_divergence_during_stop_becomes_exit_status_of_node() -> None:
    decisions = begun()
    decisions.stop(1.0)
    decisions.ended("data", 71, 2.0)
    decisions.ended("control", 1, 3.0)
    assert decisions.result == ExitStatus.DIVERGED


_STATUSES = st.sampled_from((0, 1, 2, 70, 71, -9, -15))


@given(st.lists(st.tuples(st.sampled_from(("stop", "tick", *CHILDREN)), _STATUSES, st.floats(0, 40))))
def test_decisions_keep_invariants_for_any_events(events: list[tuple[str, int, float]]) -> None:
    decisions, now_s, running, asked = begun(), 0.0, set(CHILDREN), False

    def heed(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartChild(child):
                    assert not asked, "nothing starts once stopping has begun"
                    assert child not in running, "one process a child"
                    running.add(child)
                case SignalChild(child, _):
                    assert child in running, "only a process that runs gets signals"
                    assert child == "data" or "data" not in running, "data stops first"

    for event, status, later_s in events:
        now_s += later_s
        if event == "stop":
            asked = True
            heed(decisions.stop(now_s))
        elif event in running:
            running.discard(event)
            asked = asked or status in FINAL
            heed(decisions.ended(event, status, now_s))
        heed(decisions.tick(now_s))
        assert decisions.is_stopping == asked
        assert (decisions.result is not None) == (asked and not running)
        if not asked:
            assert (decisions.wake_at_s is None) == (running == set(CHILDREN)), "who does not run will"


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Diverged("x"), 71),
        (Corrupt("x", path="p", offset=0), 1),
        (UnknownVersion("x"), 1),
        (ClusterMismatch("x"), 1),
        (BadSetting("x"), 1),
        (InvalidName("x"), 1),
        (StorageFailed("x"), 70),
        (DiskFull("x"), 70),
        (DirectoryLocked("x"), 70),
        (LogNotFound("x"), 70),
        (CertificateError("x"), 70),
        (RtError("x"), 70),
        (OSError(98, "x"), 70),
        (PermissionError(errno.EACCES, "x"), 1),
        (OSError(errno.EROFS, "x"), 1),
        (_caused(StorageFailed("x"), IsADirectoryError(errno.EISDIR, "x")), 1),
        (_caused(StorageFailed("x"), OSError(errno.ELOOP, "x")), 1),
        (_caused(StorageFailed("x"), PermissionError(errno.EACCES, "x")), 1),
        (_caused(CertificateError("x"), PermissionError(errno.EACCES, "x")), 70),
        (ValueError("x"), 70),
        (KeyboardInterrupt(), 70),
    ],
)
def test_exit_status_of_error_shows_whether_restart_can_help(error: BaseException, status: int) -> None:
    assert exit_status(error) == status


# Children


def supervise(*scripts: str, handover: str = "{}", **times: float) -> int:
    """Run a supervisor of shell scripts in this process. The first script is `control`, the second `data`."""
    commands = {name: ("sh", "-c", script) for name, script in zip(CHILDREN, scripts, strict=False)}
    return Supervisor(commands, handover, times=RestartTimes(**times)).run()


@pytest.fixture(autouse=True)
def unchanged_signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def test_child_receives_settings_on_stdin_and_not_in_arguments_or_environment(tmp_path: Path) -> None:
    script = f"""
        read -r line; printf %s "$line" > {tmp_path}/line
        tr '\\0' '\\n' < /proc/$$/cmdline > {tmp_path}/arguments; env > {tmp_path}/environment
        exit 1
    """
    assert supervise(script, handover='{"a": "some secret"}') == 1
    assert (tmp_path / "line").read_text() == '{"a": "some secret"}'
    assert "some secret" not in (tmp_path / "arguments").read_text() + (tmp_path / "environment").read_text()


def test_failing_child_is_restarted_until_it_exits_with_71(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logged: Callable[[str], list[str]]
) -> None:
    script = f"""
        echo >> {tmp_path}/starts
        case $(wc -l < {tmp_path}/starts) in 1) exit 70;; 2) kill -KILL $$;; 3) exit 0;; *) exit 71;; esac
    """
    with caplog.at_level("INFO", "sequencer"):
        assert supervise(script, pause_s_min=0.001, pause_s_max=0.002) == 71
    assert (tmp_path / "starts").read_text() == "\n" * 4
    ends = [record.getMessage() for record in caplog.records if "child_ended" in record.getMessage()]
    assert [end.rpartition(" ")[2] for end in ends] == [
        "status=70",
        "signal=SIGKILL",
        "status=0",
        "status=71",
    ]
    assert "node_diverged child=control" in caplog.text
    assert logged("sequencer")[-1] == "node_stopped status=71"


def test_start_of_missing_program_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "program"
    commands = {
        "control": (str(program),),
        "data": ("sh", "-c", f"while [ ! -e {tmp_path}/ready ]; do :; done"),
    }
    tries = 0

    def clock() -> float:
        nonlocal tries
        tries += 1
        if tries == 20:
            program.write_text("#!/bin/sh\nexit 1\n")
            program.chmod(0o700)
            (tmp_path / "ready").touch()
        return tries / 1000

    assert (
        Supervisor(
            commands, "{}", times=RestartTimes(pause_s_min=0.001, pause_s_max=0.002), clock=clock
        ).run()
        == 1
    )
    assert "child_not_started child=control" in caplog.text


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_sigterm_or_sigint_stops_data_then_control_and_exits_with_0(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "ready")
    script = """
        trap 'echo {child} >> {path}/stops; exit 0' TERM
        {then}
        while :; do read -r more; done
    """
    control = script.format(child="control", path=tmp_path, then=f"echo > {tmp_path}/ready")
    data = script.format(
        child="data", path=tmp_path, then=f"read -r line < {tmp_path}/ready; kill -{name} $PPID"
    )
    assert supervise(control, data) == 0
    assert (tmp_path / "stops").read_text() == "data\ncontrol\n"


def test_child_that_ignores_sigterm_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    assert supervise("trap '' TERM; kill -TERM $PPID; exec sleep 1000", stop_s=0.01) == 0
    assert "child_signalled child=control signal=SIGKILL" in caplog.text


def test_sighup_is_ignored_by_supervisor_and_child() -> None:
    assert supervise("kill -HUP $PPID; kill -HUP $$; exit 1") == 1


def test_sigint_ignored_before_start_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert supervise("kill -INT $PPID; exit 1") == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_supervisor_that_raises_leaves_no_running_child(tmp_path: Path) -> None:
    def clock() -> float:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"):
            raise ZeroDivisionError
        return 0.0

    script = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
    commands = {
        "control": ("sh", "-c", f"while [ ! -s {tmp_path}/pid ]; do :; done"),
        "data": ("sh", "-c", script),
    }
    with pytest.raises(ZeroDivisionError):
        Supervisor(commands, "{}", clock=clock).run()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


_BY_KERNEL = "child_main.die_with_parent(); tell(); signal.pause()"
_BY_STDIN = "next(child_process.stdin_lines()); child_process.die_with_stdin(); tell(); signal.pause()"
_CHILD = """
import os, signal, sys
from rt import child_process
from sequencer.node import child_main
def tell():
    os.write(1, b"%d\\n" % os.getpid())
"""
_PARENT = """
import json, sys
from sequencer.node.supervisor import Supervisor
Supervisor(json.loads(sys.argv[1]), "{}").run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [_BY_KERNEL, _BY_STDIN])
def test_children_end_when_their_parent_is_killed(how: str) -> None:
    child = (sys.executable, "-c", _CHILD + how)
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, json.dumps({"control": child, "data": child})],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        pidfds = [os.pidfd_open(int(parent.stdout.readline())) for _ in CHILDREN]
        parent.kill()
    assert all(ends(pidfds))


@pytest.mark.parametrize("role", CHILDREN)
def test_child_without_settings_on_stdin_exits_without_output(role: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "sequencer.node.child_main", role],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (ExitStatus.FELL, b"", b"")


def ends(pidfds: Sequence[int]) -> Iterator[bool]:
    """Yield for each process whether it ends in time."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        yield bool(poll.poll(WAIT_S * 1000))
        os.close(pidfd)
