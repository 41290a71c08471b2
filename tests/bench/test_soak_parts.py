"""Parts of a soak: the drawn faults, parsed notes, and verdicts on promises, memory and disk use."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from chaos.soak_faults import KINDS, draw_faults
from chaos.soak_judge import MemorySample, judge, judge_disk, judge_memory
from chaos.soak_notes import (
    Acknowledged,
    Item,
    Published,
    Received,
    Run,
    Skipped,
    Wrong,
    read_published,
    read_received,
    tag_of,
    value_of,
)
from chaos.soak_traffic import runs
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.log.scan.message_batch import Message

# Two sessions. p1 was killed and restarted after number 3. Its first run published 4 and 5 without a flush,
# so its next run published them again.
PUBLISHED = (
    Published("p1", 1, first=0, flushed=4, replicated=4, merged=2),
    Published("p1", 3, first=4, flushed=6, replicated=6, merged=6),
    Published("p2", 2, first=0, flushed=3, replicated=3, merged=3),
)
STREAM = (Run(0, "p1", 0, 1, 3), Run(3, "p2", 0, 2, 3), Run(6, "p1", 3, 1, 1), Run(7, "p1", 4, 3, 2))
END = 9
WHOLE = Received("own", 1, 0, STREAM)
OVERTAKEN = Received("follows", 1, 0, (Run(0, "p1", 0, 1, 2), Skipped(2, 7, "size"), STREAM[3]))
NAMED = (
    Received("named", 1, None, (*STREAM[:2], Acknowledged(4))),
    Received("named", 2, None, (Run(4, "p2", 1, 2, 2), *STREAM[2:], Acknowledged(9))),
)
RECEIVED = (WHOLE, OVERTAKEN, *NAMED)


def broken(*received: Received, published: tuple[Published, ...] = PUBLISHED, end: int = END) -> list[str]:
    return list(judge(published, received, end))


def read(*items: Item) -> Received:
    return replace(WHOLE, items=items)


# Faults


def test_faults_are_determined_by_seed() -> None:
    def drawn(seed: int) -> list[object]:
        return list(draw_faults(seed, 600, nodes=3, publishers=3, subscribers=4))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@given(st.integers(0, 2**32), st.floats(1, 600))
def test_faults_are_in_order_within_duration_and_hit_valid_victims(seed: int, seconds: float) -> None:
    faults = list(draw_faults(seed, seconds, nodes=3, publishers=2, subscribers=4))
    assert faults == sorted(faults, key=lambda fault: fault.at_s)
    for fault in faults:
        assert 0 <= fault.at_s < seconds
        assert (
            -1 <= fault.victim < (2 if "publisher" in fault.kind else 4 if "subscriber" in fault.kind else 3)
        )


def test_ten_minutes_of_faults_include_every_requested_kind_and_no_other() -> None:
    def kinds(*wanted: str) -> Counter[str]:
        faults = draw_faults(7, 600, nodes=3, publishers=3, subscribers=4, kinds=wanted or KINDS)  # type: ignore[arg-type]
        return Counter(fault.kind for fault in faults)

    assert set(kinds()) == set(KINDS)
    assert set(kinds("wipe", "cut")) == {"wipe", "cut"}


# Notes


def test_value_yields_its_run_only_if_intact_and_number_matches() -> None:
    assert tag_of(value_of(12, 345), 345) == 12
    assert tag_of(value_of(12, 345), 346) is None
    assert tag_of(value_of(12, 345)[:-1], 345) is None
    assert tag_of(b"", 0) is None


def test_notes_are_parsed_without_torn_last_line() -> None:
    text = "first 4\nflushed 9\nreplicated 5\nreplicated 8\nmerged 6\nflushed 1"
    assert read_published("p1", 7, text) == Published("p1", 7, 4, 9, 8, 6)
    assert read_published("p1", 7, "first 4\nended Fenced by p\n").ended_by == "Fenced by p"
    assert read_published("p1", 7, "") == Published("p1", 7)
    text = "run 0 p1 0 3 20\nskip 20 40 size\nack 20\nbad 7: p1\nrun 40 p1"
    items = (Run(0, "p1", 0, 3, 20), Skipped(20, 40, "size"), Acknowledged(20), Wrong("bad 7: p1"))
    assert read_received("own", 2, 0, text) == Received("own", 2, 0, items)
    assert read_received("own", 2, 0, "skip 1 4 \n").items == (Skipped(1, 4, ""),)


def test_consecutive_messages_form_one_run_and_invalid_value_is_reported() -> None:
    def message(position: int, session: str, number: int, value: bytes) -> Message:
        return rt.Message(position, 0, session, 0, number, "", value)

    rows = [(0, "a", 5), (1, "a", 6), (2, "b", 0), (3, "a", 7), (5, "a", 8)]
    messages = [message(at, session, number, value_of(3, number)) for at, session, number in rows]
    wanted = ["run 0 a 5 3 2", "run 2 b 0 3 1", "run 3 a 7 3 1", "run 5 a 8 3 1"]
    assert list(runs(messages)) == wanted
    bad, run = runs([message(0, "a", 5, b"1:6:")])
    assert (bad[:9], run) == ("bad 0: a ", "run 0 a 5 -1 1")


# The verdict


def test_verdict_is_empty_if_every_promise_is_kept() -> None:
    assert broken(*RECEIVED) == []


@pytest.mark.parametrize(
    ("received", "sentence"),
    [
        pytest.param(read(*STREAM[:3]), "were read by no subscriber", id="lost at the end"),
        pytest.param(read(*STREAM[:2], STREAM[3]), "position 7 where 6 must follow", id="silent gap"),
        pytest.param(
            read(*STREAM[:2], Skipped(6, 7, ""), STREAM[3]), "skip from 6 to 7, reason ''", id="no reason"
        ),
        pytest.param(
            read(*STREAM[:2], Skipped(5, 7, "size"), STREAM[3]), "skip from 5, where 6", id="wrong skip"
        ),
        pytest.param(read(*STREAM, Wrong("event BadTail")), "event BadTail", id="an event that must not be"),
        pytest.param(
            read(*STREAM[:2], Run(6, "p1", 2, 1, 1), STREAM[3]),
            "number 2 where 3 must follow",
            id="repeated",
        ),
        pytest.param(
            read(Run(0, "p1", 1, 1, 2), Run(2, "p1", 0, 1, 1), *STREAM[1:]),
            "number 1 where 0 must follow",
            id="out of order",
        ),
        pytest.param(
            read(*STREAM[:2], Run(6, "p1", 3, 3, 1), STREAM[3]),
            "p1: number 3 is not what life 1 published",
            id="a number that was flushed, given anew",
        ),
        pytest.param(read(*STREAM, Run(9, "p1", 6, 3, 1)), "the log ends at 9", id="more than there is"),
    ],
)
def test_planted_failure_of_reader_is_reported(received: Received, sentence: str) -> None:
    assert sentence in "\n".join(broken(received))


@pytest.mark.parametrize(
    ("at", "change", "sentence"),
    [
        pytest.param(1, {"replicated": 7}, "7 were replicated, 6 are there", id="replicated and lost"),
        pytest.param(1, {"flushed": 7}, "7 were published, 6 are there", id="published and never merged"),
        pytest.param(2, {"merged": 4}, "4 were merged, 3 are there", id="merged and lost"),
        pytest.param(2, {"ended_by": "Fenced"}, "ended by Fenced", id="a publisher that was ended"),
        pytest.param(1, {"first": 3}, "began at 3, below 4", id="a number given twice"),
    ],
)
def test_planted_failure_of_session_is_reported(at: int, change: dict[str, object], sentence: str) -> None:
    lives = list(PUBLISHED)
    lives[at] = replace(lives[at], **change)  # type: ignore[arg-type]
    assert sentence in "\n".join(broken(*RECEIVED, published=tuple(lives)))


def test_subscribers_with_different_messages_at_same_position_are_reported() -> None:
    other = replace(OVERTAKEN, items=(Run(0, "p2", 0, 2, 2), *OVERTAKEN.items[1:]))
    assert "follows, life 1: position 0 is not what others had there" in broken(WHOLE, other)


@pytest.mark.parametrize("first", [3, 7])
def test_named_subscriber_resuming_outside_acknowledged_to_received_range_is_reported(
    first: int,
) -> None:
    resumed = replace(NAMED[1], items=(Run(first, "p2", first - 3, 2, 1),))
    assert f"named, life 2: resumed at {first}, not from 4 to 6" in broken(WHOLE, NAMED[0], resumed)


def test_run_killed_before_its_first_note_breaks_no_promise() -> None:
    lives = (*PUBLISHED[:2], Published("p1", 9), PUBLISHED[2])
    assert broken(*RECEIVED, Received("own", 2, 9, ()), published=lives) == []


# Memory use


def samples(*medians: float, count: int = 20, age_s: float = 100) -> list[MemorySample]:
    """Return memory samples of 300 seconds, with one median for each third."""
    return [
        MemorySample((third * 100 + at * 100 / count, age_s, mb + at % 3))
        for third, mb in enumerate(medians)
        for at in range(count)
    ]


def test_memory_growth_is_reported_unless_small_or_process_is_young_or_samples_are_few() -> None:
    flat = {"n1 data": samples(50, 60, 70), "n1 control": samples(900, 60, 60)}
    assert list(judge_memory(flat, 300)) == []
    assert list(judge_memory({"n1 data": samples(50, 60, 130)}, 300)) == [
        "n1 data: its memory grew from 61 MB to 131 MB"
    ]
    assert list(judge_memory({"n1 data": samples(50, 60, 130, age_s=3)}, 300)) == []
    assert list(judge_memory({"n1 data": samples(50, 60, 130, count=5)}, 300)) == []


def test_merged_log_larger_than_retention_policy_is_reported() -> None:
    assert list(judge_disk({"n1": 100, "n2": 101}, 100, "the merged log")) == [
        "n2: the merged log took 101 bytes, 100 at most were to be kept"
    ]
