"""When a helper process is started again, and what it sees of our environment."""

from __future__ import annotations

import pytest
from shadowing import shadow

from rt.sidecar import restart_backoff
from rt.sidecar.restart_backoff import (
    RESTART_SECONDS_MAX,
    RESTART_SECONDS_MIN,
    SETTLED_SECONDS,
    RestartBackoff,
    environment,
)


def test_pauses_double_up_to_a_bound_and_begin_anew_behind_one_that_had_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    shadow(monkeypatch, restart_backoff, "time", monotonic=lambda: now)
    restarts = RestartBackoff()
    pauses = []
    for _ in range(8):
        restarts.record_start()
        now += SETTLED_SECONDS / 2
        pauses.append(restarts.record_end())
    assert pauses == [min(RESTART_SECONDS_MIN * 2**failures, RESTART_SECONDS_MAX) for failures in range(8)]
    restarts.record_start()
    now += SETTLED_SECONDS + 0.1
    assert restarts.record_end() == RESTART_SECONDS_MIN


def test_options_for_a_command_of_the_users_are_not_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RT_PUSH_INSECURE", "1")
    monkeypatch.setenv("RT_PULL_TOPICS", "a")
    assert "RT_PUSH_INSECURE" not in environment("push")
    assert environment("push")["RT_PULL_TOPICS"] == "a"
