"""Log lines of a blocked merger: new problems immediately, the same problem once a minute."""

from __future__ import annotations

import pytest

import rt
from sequencer.merged.blocked_log import LOG_AGAIN_S, BlockedLog


def test_blocked_log_repeats_problem_once_a_minute_and_logs_new_problem_immediately(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    log = BlockedLog(lambda: now)
    full = rt.DiskFull("disk full while writing a batch", where="/merged/log.0.0")
    for _ in range(300):
        log.record(full)
        now += LOG_AGAIN_S / 300
    assert len(caplog.messages) == 1
    assert "(at /merged/log.0.0)" in caplog.messages[0]
    log.record(full)
    log.record(rt.DiskFull("disk full while writing a batch", where="/merged/log.0.1"))
    assert len(caplog.messages) == 3
