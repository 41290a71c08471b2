"""Detection of a silent process by the time since its last message."""

from __future__ import annotations

from sequencer.ipc.silence import HUNG_S, SilenceDetector


def silence_after(*steps_s: float) -> float:
    silence, now_s = SilenceDetector(), 100.0
    silence.update(now_s)
    for step_s in steps_s:
        now_s += step_s
        silence.update(now_s)
    return silence.silent_s


def test_silence_counts_time_since_last_message() -> None:
    assert silence_after(1, 1, 1) == 3
    assert silence_after(*[1] * 5) >= HUNG_S
    silence = SilenceDetector()
    silence.update(1.0)
    silence.update(2.0)
    silence.record_message()
    assert silence.silent_s == 0
    assert silence.update(3.0) == 1


def test_long_pause_of_listener_keeps_silence_below_hung_limit() -> None:
    assert silence_after(3600) < HUNG_S


def test_stopped_clock_adds_no_silence() -> None:
    assert silence_after(0, 0) == 0
