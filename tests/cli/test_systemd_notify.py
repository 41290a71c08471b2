"""The service notifier reports readiness, watchdog pings and stopping to systemd."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from service_manager import ServiceManager

from rt.sidecar.systemd_notify import READY, STOPPING, WATCHDOG, ServiceNotifier, run_as_service


def test_fields_are_sent_to_notify_socket_of_environment() -> None:
    with ServiceManager() as systemd:
        notifier = ServiceNotifier({"NOTIFY_SOCKET": systemd.name})
        assert notifier.send(READY, "STATUS=up")
        assert systemd.read() == ["READY=1", "STATUS=up"]


@pytest.mark.parametrize("name", ["", "vsock:2:1234", "relative"])
def test_send_returns_true_without_supported_notify_socket(name: str) -> None:
    assert ServiceNotifier({"NOTIFY_SOCKET": name} if name else {}).send(READY)


def test_send_returns_false_while_notify_socket_is_missing_or_full(tmp_path: Path) -> None:
    assert not ServiceNotifier({"NOTIFY_SOCKET": str(tmp_path / "nothing")}).send(READY)
    with ServiceManager() as systemd:
        notifier = ServiceNotifier({"NOTIFY_SOCKET": systemd.name})
        sent = 0
        while notifier.send(WATCHDOG):  # It must not block if no process reads.
            sent += 1
        assert systemd.read() == [WATCHDOG] * sent
        assert notifier.send(WATCHDOG)


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"WATCHDOG_USEC": "8000000"}, 2.0),
        ({"WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "8000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_watchdog_interval_is_quarter_of_watchdog_timeout(variables: dict[str, str], seconds: float) -> None:
    assert ServiceNotifier(variables).watchdog_s == seconds


def test_service_reports_ready_watchdog_and_stopping_when_its_work_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ServiceManager() as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.name)
        monkeypatch.setenv("WATCHDOG_USEC", "4000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)

        async def work() -> None:
            while systemd.read().count(WATCHDOG) < 3:
                await asyncio.sleep(0)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            asyncio.run(run_as_service(work()))
        received = systemd.read()
        assert received == [READY, *[WATCHDOG] * (len(received) - 2), STOPPING]
