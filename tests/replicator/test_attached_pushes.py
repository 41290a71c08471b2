"""The push clients of one process: independent ends, retries, reported errors, and session logs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

import rt
from replicator.cli import attached_push
from replicator.cli.attached_push import SessionLogHandler
from replicator.push.client import PushClient
from replicator.push.problem_log import ProblemLog, PushReport
from replicator.push.sidecar import SERVED, PushSidecar
from rt.sidecar.protocol import EndpointStatus, FinishRequested, PushEnded, PushReported, PushRequested

WAIT_SECONDS = 120


class FakeClient:
    """Runs until `finish` is called, or as its directory name demands."""

    def __init__(self, asked: PushRequested, log: list[str]) -> None:
        self.directory, self._log = asked.directory, log
        self._finishing = asyncio.Event()

    def finish(self) -> None:
        self._finishing.set()

    async def run(self) -> None:
        assert SERVED.get() == self.directory
        self._log.append(f"{self.directory} begins")
        match self.directory:
            case "fenced":
                raise rt.Fenced("a newer one took over")
            case "bad" if len(self._log) < 3 or self._finishing.is_set():
                raise rt.StorageFailed("a disk fails")
            case "removed":
                raise rt.LogNotFound("the directory was removed")
            case "broken":
                raise AssertionError
        await self._finishing.wait()
        self._log.append(f"{self.directory} ends")


class Pushes:
    """Pushes of fake clients. `log` records their actions, and `ended` lists the pushes that are over."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ended: list[int] = []
        self.reports: list[PushReported] = []
        self.on_report: dict[str, Callable[[PushReport], None]] = {}
        self.pushes = PushSidecar(self._make, self._hear)

    def _hear(self, report: PushEnded | PushReported) -> None:
        if isinstance(report, PushEnded):
            self.ended.append(report.number)
        else:
            self.reports.append(report)

    def _make(
        self, asked: PushRequested, on_report: Callable[[PushReport], None], problems: ProblemLog
    ) -> PushClient:
        self.on_report[asked.directory] = on_report
        return cast(PushClient, FakeClient(asked, self.log))

    def serve(self, number: int, directory: str) -> None:
        self.pushes.handle(PushRequested(number, directory, "s", (), "", "", ""))

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Callable[[Pushes], Awaitable[None]]) -> Pushes:
    pushes: list[Pushes] = []

    async def running() -> None:
        pushes.append(made := Pushes())
        task = asyncio.create_task(made.pushes.run())
        await test(made)
        made.pushes.finish()
        await task

    _in_time(running())
    return pushes[0]


def _in_time(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT_SECONDS))


def test_finish_request_ends_one_push_and_shutdown_ends_all() -> None:
    async def test(made: Pushes) -> None:
        for number, name in enumerate("abc"):
            made.serve(number, name)
        made.pushes.handle(FinishRequested(1))
        made.pushes.handle(FinishRequested(7))
        await made.until(lambda: made.ended == [1])
        assert made.pushes.directories == ["a", "c"]

    made = run(test)
    assert sorted(made.ended) == [0, 1, 2]
    assert made.log[-2:] == ["a ends", "c ends"]


def test_fenced_push_ends_at_once_without_ending_other_pushes(caplog: pytest.LogCaptureFixture) -> None:
    async def test(made: Pushes) -> None:
        made.serve(1, "fenced")
        made.serve(2, "good")
        await made.until(lambda: made.ended == [1])
        assert made.pushes.directories == ["good"]

    assert run(test).log == ["fenced begins", "good begins", "good ends"]
    assert "push_failed path=fenced" not in caplog.text


def test_push_of_removed_directory_ends_at_once_without_ending_other_pushes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(pushes: Pushes) -> None:
        pushes.serve(1, "removed")
        pushes.serve(2, "good")
        await pushes.until(lambda: pushes.ended == [1])

    pushes = run(test)
    assert pushes.log == ["removed begins", "good begins", "good ends"]
    assert "push_ended path=removed reason=the directory was removed" in caplog.text


def test_failed_push_is_retried_and_only_once_more_after_finish_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(made: Pushes) -> None:
        made.serve(1, "bad")
        await made.until(lambda: made.log == ["bad begins"] * 3)  # The third attempt works.
        made.serve(2, "broken")
        await made.until(lambda: made.log.count("broken begins") == 2)
        made.pushes.handle(FinishRequested(2))
        await made.until(lambda: made.ended == [2])
        assert made.log.count("broken begins") == 3
        made.pushes.handle(FinishRequested(1))

    assert run(test).ended == [2, 1]
    assert caplog.text.count("push_failed path=bad") == 1
    assert caplog.text.count("push_given_up path=broken") == 1


def test_session_error_is_reported_until_a_node_accepts_session() -> None:
    """A client's retry does not clear the error. Only a node that accepts the session does."""
    refused = rt.CertificateError("the node refuses our certificate")
    waiting = EndpointStatus("n1:5002", is_connected=False, error=refused)
    serving = EndpointStatus("n1:5002", is_connected=True)

    async def test(made: Pushes) -> None:
        made.serve(1, "a")
        await made.until(lambda: "a" in made.on_report)
        for report in (
            PushReport(refused, (waiting,)),
            PushReport(None, (waiting,)),
            PushReport(None, (serving,), 5),
        ):
            made.on_report["a"](report)

    reports = run(test).reports
    assert [report.members for report in reports] == [0, 0, 5]
    assert [repr(report.error) for report in reports] == [repr(refused), repr(refused), "None"]
    assert [report.endpoints[0].is_connected for report in reports] == [False, False, True]


def test_push_start_error_is_reported_until_next_start_succeeds() -> None:
    async def test(made: Pushes) -> None:
        made.serve(1, "bad")
        await made.until(lambda: made.log == ["bad begins"] * 3)
        made.on_report["bad"](PushReport(None, ()))

    reports = run(test).reports
    assert [str(report.error) for report in reports] == ["a disk fails", "a disk fails", "None"]


def test_push_runs_even_if_finish_request_arrives_before_its_start() -> None:
    async def test(made: Pushes) -> None:
        made.serve(1, "a")
        made.pushes.handle(FinishRequested(1))
        await made.until(lambda: made.ended == [1])

    assert run(test).log == ["a begins", "a ends"]


def test_cancellation_stops_all_pushes() -> None:
    async def running() -> None:
        before, made = asyncio.all_tasks(), Pushes()
        made.serve(1, "a")
        task = asyncio.create_task(made.pushes.run())
        await made.until(lambda: made.log)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert made.log == ["a begins"]
        assert not made.ended
        assert asyncio.all_tasks() == before

    _in_time(running())


def test_session_log_is_separate_and_bounded_and_skips_removed_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_push, "LOG_BYTES_MAX", 20)
    log = SessionLogHandler()

    def said(directory: Path, text: str) -> None:
        SERVED.set(str(directory))
        log.handle(logging.makeLogRecord({"msg": text}))

    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    try:
        for number in range(8):
            said(a, f"problem {number}")
        said(b, "another")
        said(tmp_path / "removed", "in vain")
    finally:
        SERVED.set("")
    log.handle(logging.makeLogRecord({"msg": "of no session"}))
    assert (a / "push.log").read_text() == "problem 6\nproblem 7\n"
    assert (a / "push.log.1").read_text() == "problem 4\nproblem 5\n"
    assert [path.name for path in b.iterdir()] == ["push.log"]


def test_redirected_stderr_follows_rotation_of_session_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_push, "LOG_BYTES_MAX", 20)
    stderr = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(attached_push, "_STDERR", stderr)
    log = SessionLogHandler()
    try:
        log.redirect_stderr([str(tmp_path)])
        for number in range(4):
            os.write(stderr, b"raw %d, " % number)
            log.handle(logging.makeLogRecord({"msg": f"record {number}"}))
        os.write(stderr, b"raw 4")
    finally:
        os.close(stderr)
    assert (tmp_path / "push.log.1").read_text() == "record 1\nraw 2, record 2\nraw 3, "
    assert (tmp_path / "push.log").read_text() == "record 3\nraw 4"
