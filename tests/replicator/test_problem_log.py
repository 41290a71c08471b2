"""What a push logs about its problems: one line at first, then one a minute."""

from __future__ import annotations

import pytest

import rt
from replicator.push.problem_log import LOG_AGAIN_SECONDS, ProblemLog, PushReport
from rt.sidecar.protocol import EndpointStatus

AWAY = rt.RtError("connection refused")
REFUSED = rt.CertificateError("the node refuses our certificate")


def report(*errors: rt.RtError | None, connected: int = 0, blocked: rt.RtError | None = None) -> PushReport:
    endpoints = [EndpointStatus(f"c{index}:1", is_connected=True) for index in range(connected)]
    endpoints += [
        EndpointStatus(f"n{index}:1", is_connected=False, error=error) for index, error in enumerate(errors)
    ]
    return PushReport(blocked, tuple(endpoints))


def test_push_problem_is_logged_at_once_then_each_minute_and_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="replicator")

    def logged() -> list[str]:
        return [message for message in caplog.messages if "path=/session" in message.split()]

    now = 0.0
    log = ProblemLog("/session", clock=lambda: now)
    log.record_report(report(AWAY, None))
    assert not logged()  # The other one may be reached.
    log.record_report(report(AWAY, AWAY))
    for _ in range(100):
        now += LOG_AGAIN_SECONDS / 100
        log.record_report(report(AWAY, AWAY))
    log.record_report(report(REFUSED, REFUSED, blocked=REFUSED))
    log.record_report(report(connected=2))
    log.record_report(report(connected=2))
    log.record_report(report(AWAY, connected=2))
    away = "reason=n0:1: connection refused; n1:1: connection refused"
    refused = "reason=n0:1: the node refuses our certificate; n1:1: the node refuses our certificate"
    assert logged() == [
        f"push_waits path=/session attempts=1 {away}",
        f"push_waits path=/session attempts=100 {away}",
        f"push_blocked path=/session attempts=1 {refused}",
        "push_recovered path=/session",
        "push_waits path=/session attempts=1 reason=n0:1: connection refused",
    ]
