"""Apply: what each command does, and why it does nothing; and what an order lays down, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import pytest
from batches import CLUSTER, Heard
from hypothesis import given, settings
from hypothesis import strategies as st
from sequencing import (
    INCARNATIONS,
    DumbMerger,
    WrittenSession,
    do_close,
    do_fence,
    do_join,
    do_merge,
    do_open,
    do_roll,
    end_of,
    merging,
    must,
    new_state,
    opening,
    piece,
    random_runs,
    refusal,
    rolling,
)

from rt.log.format.block import BlockKind, decode_block_header
from rt.log.format.checksum import batch_seed, segment_seed
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from sequencer.state.apply import apply
from sequencer.state.apply_result import (
    ConfigurationChanged,
    DiskRestored,
    HoldMoved,
    Outcome,
    RangesMerged,
    RunClosed,
    RunFenced,
    RunOpened,
)
from sequencer.state.commands import (
    COUNT_MAX,
    CloseRun,
    Command,
    Configure,
    FenceRun,
    HoldPosition,
    JoinDisk,
    MergeInstruction,
    MergeRange,
    OpenRun,
    ReleaseHold,
    RestoreDisk,
    TrimSegments,
)
from sequencer.state.merge_range import resolve_range
from sequencer.state.state import (
    HOLDS_MAX,
    RUNS_MAX,
    Configuration,
    End,
    MergedSegment,
    NodeDisk,
    SequencerState,
)
from sequencer.state.state_codec import decode_state, encode_state
from sequencer.state.write_plan import SessionEnd, WritePlan, decode_write_plan, encode_write_plan

Setup: TypeAlias = Callable[[SequencerState], object]


# Scenes that the tables below begin with


def nothing(state: SequencerState) -> None: ...


def opened(state: SequencerState) -> None:
    """Session 1, "a", with X 0 open."""
    do_open(state)


def merged(state: SequencerState) -> None:
    """X 0 of session 1 is merged up to 128, number 10."""
    do_open(state)
    do_merge(state, piece())


def closing(state: SequencerState) -> None:
    """X 0 of session 1 is merged up to 128, number 10, and closed at 256, number 20; X 3 is open."""
    merged(state)
    do_open(state, run=3)
    do_fence(state)
    do_close(state, 1, 0, (0, 256, 20))


def done(state: SequencerState) -> None:
    """X 0 of session 1 is merged whole; X 3 is open."""
    closing(state)
    do_merge(state, piece(start=128, end=256, first=10))


def taken_over(state: SequencerState) -> None:
    """Session 2 is the newer incarnation of session 1, whose X 0 is merged up to 128."""
    merged(state)
    do_open(state, incarnation=1)


def dedup(state: SequencerState) -> None:
    """Sessions 1 and 2 share a dedup id, of which ids up to 10 are merged, by session 1."""
    do_open(state, "a", dedup="d")
    do_open(state, "b", dedup="d", incarnation=1)
    do_merge(state, piece())


def joined(state: SequencerState) -> None:
    """Disk 0 of n1 has joined, and a life is open."""
    do_join(state, "n1")
    do_open(state)


def replaced(state: SequencerState) -> None:
    """It was replaced by disk 1."""
    joined(state)
    do_join(state, "n1", disk=1)


def full_of_lives(state: SequencerState) -> None:
    for run in range(RUNS_MAX):
        do_open(state, run=run)


def rolled(state: SequencerState) -> None:
    """Segment 0 has positions up to 10, segment 1 grows."""
    merged(state)
    do_roll(state)
    do_merge(state, piece(start=128, end=256, first=10))


def held(state: SequencerState) -> None:
    """A reader has what is before position 5 of 10."""
    merged(state)
    apply(state, HoldPosition("reader", 5, 7))


def full_of_holds(state: SequencerState) -> None:
    for number in range(HOLDS_MAX):
        assert apply(state, HoldPosition(f"reader{number}", 0, 1)) == HoldMoved(f"reader{number}", 0)


REFUSED: dict[str, tuple[Setup, Callable[[SequencerState], Command], str]] = {
    # Openings
    "X open with another life": (opened, lambda _: opening(active=99), "open with another run id"),
    "X below the last": (done, lambda _: opening(run=2), "is over"),
    "X that is merged whole": (done, lambda _: opening(run=0), "is over"),
    "the last X, merged whole": (
        lambda state: (opened(state), do_fence(state), do_close(state, 1, 0, (0, 64, 0))),
        lambda _: opening(run=0),
        "is over",
    ),
    "another dedup id": (opened, lambda _: opening(run=1, dedup="d"), "dedup id is None, not d"),
    "no dedup id": (dedup, lambda _: opening(run=1), "dedup id is d, not None"),
    "an older incarnation": (taken_over, lambda _: opening(run=1), "newer incarnation"),
    "an older incarnation again": (taken_over, lambda _: opening(run=0), "newer incarnation"),
    "an incarnation that was late": (taken_over, lambda _: opening(incarnation=2), "another incarnation"),
    "an incarnation that knew another one": (
        taken_over,
        lambda _: opening(incarnation=2, newest=1),
        "another incarnation than session 1 is the newest",
    ),
    "an incarnation of a session that was lost": (
        nothing,
        lambda _: opening(newest=1),
        "another incarnation",
    ),
    "too many lives": (full_of_lives, lambda _: opening(run=RUNS_MAX), "runs of the session wait"),
    # Fences
    "fence of no session": (opened, lambda _: FenceRun(2, 0), "no run 0 to fence"),
    "fence of no X": (opened, lambda _: FenceRun(1, 1), "no run 1 to fence"),
    "fence of an X that is merged whole": (done, lambda _: FenceRun(1, 0), "to fence"),
    # Disks
    "a disk that has joined": (joined, lambda _: JoinDisk("n1", b"\0" * 16), "disk of n1 has joined"),
    "a disk that is whole": (joined, lambda _: RestoreDisk("n1", b"\0" * 16), "is whole"),
    "a disk that was replaced": (replaced, lambda _: RestoreDisk("n1", b"\0" * 16), "is whole"),
    "a disk of nobody": (joined, lambda _: RestoreDisk("n2", b"\0" * 16), "has not joined"),
    # Closes
    "close of no session": (opened, lambda _: CloseRun(2, 0, 0, 64, 0), "the one that is being merged"),
    "close of no X": (opened, lambda _: CloseRun(1, 1, 0, 64, 0), "the one that is being merged"),
    "close of an X before its turn": (
        closing,
        lambda _: CloseRun(1, 3, 0, 64, 0),
        "the one that is being merged",
    ),
    "close of an X merged whole": (
        done,
        lambda _: CloseRun(1, 0, 0, 256, 20),
        "the one that is being merged",
    ),
    "close without a fence": (opened, lambda _: CloseRun(1, 0, 0, 64, 0), "not fenced"),
    "close again": (closing, lambda _: CloseRun(1, 0, 0, 512, 30), "is closed"),
    "close again where it was": (closing, lambda _: CloseRun(1, 0, 0, 256, 20), "is closed"),
    "close again below what is merged": (closing, lambda _: CloseRun(1, 0, 0, 120, 9), "merged beyond"),
    "close below what is merged": (
        lambda state: (merged(state), do_fence(state)),
        lambda _: CloseRun(1, 0, 0, 120, 9),
        "merged beyond",
    ),
    "close below, of number alone": (
        lambda state: (merged(state), do_fence(state)),
        lambda _: CloseRun(1, 0, 0, 256, 9),
        "merged beyond",
    ),
    "close below, of place alone": (
        lambda state: (merged(state), do_fence(state)),
        lambda _: CloseRun(1, 0, 0, 120, 10),
        "merged beyond",
    ),
    "close with messages where there is no room": (
        lambda state: (merged(state), do_fence(state)),
        lambda _: CloseRun(1, 0, 0, 128, 11),
        "has no messages between",
    ),
    "close before an older incarnation": (
        lambda state: (taken_over(state), do_fence(state, 2)),
        lambda _: CloseRun(2, 0, 0, 64, 0),
        "older incarnation, session 1",
    ),
    # Rolls
    "roll of nothing": (opened, rolling, "not the active"),
    "roll of another segment": (merged, lambda s: rolling(s, 0, 1), "not the active"),
    "roll of an empty segment": (lambda s: (merged(s), do_roll(s)), rolling, "is empty"),
    "a roll too early": (merged, lambda s: rolling(s, number=3), "where 2 must follow"),
    "a roll that is not later": (merged, lambda s: replace(rolling(s), sequenced_ns=1), "not later"),
    # Trims and holds
    "trim of what is to come": (
        rolled,
        lambda _: TrimSegments(21, TrimReason.REQUEST, 1),
        "is beyond the merged log",
    ),
    "trim of nothing": (
        rolled,
        lambda _: TrimSegments(9, TrimReason.DISK, 1),
        "nothing up to 9 may be trimmed by DISK",
    ),
    "trim again": (
        lambda state: (rolled(state), apply(state, TrimSegments(10, TrimReason.DISK, 1))),
        lambda _: TrimSegments(10, TrimReason.DISK, 2),
        "nothing up to 10 may be trimmed",
    ),
    "trim of the growing segment alone": (
        merged,
        lambda _: TrimSegments(10, TrimReason.DISK, 1),
        "nothing up to 10",
    ),
    "hold beyond the end": (
        merged,
        lambda _: HoldPosition("reader", 11, 1),
        "position 11 of reader is beyond 10",
    ),
    "hold that goes back": (held, lambda _: HoldPosition("reader", 4, 9), "has acknowledged up to 5, not 4"),
    "a hold too many": (full_of_holds, lambda _: HoldPosition("reader", 0, 9), "is one more"),
    "release of nobody": (held, lambda _: ReleaseHold("writer"), "writer holds nothing back"),
    # Instructions
    "an instruction again": (
        merged,
        lambda s: merging(s, piece(start=128, end=256), number=1),
        "2 must foll",
    ),
    "an instruction too early": (opened, lambda s: merging(s, piece(), number=2), "where 1 must follow"),
    "at the same time": (
        merged,
        lambda s: merging(s, piece(start=128, end=256, first=10), sequenced_ns=s.sequenced_ns),
        "not later",
    ),
    "of no session": (opened, lambda s: merging(s, piece(2)), "nothing open"),
    "of a session merged whole": (
        lambda state: (opened(state), do_fence(state), do_close(state, 1, 0, (0, 64, 0))),
        lambda s: merging(s, piece()),
        "nothing open",
    ),
    "of a later X": (closing, lambda s: merging(s, piece(run=3)), "run 3 where run 0 is merged"),
    "of an earlier X": (done, lambda s: merging(s, piece(run=0)), "run 0 where run 3 is merged"),
    "not at the beginning": (opened, lambda s: merging(s, piece(start=128, end=256)), "must start"),
    "not in the first segment": (opened, lambda s: merging(s, piece(roll=1)), "must start"),
    "a hole": (merged, lambda s: merging(s, piece(start=136, end=256, first=10)), "must follow"),
    "an overlap": (merged, lambda s: merging(s, piece(start=120, end=256, first=10)), "must follow"),
    "the same again": (merged, lambda s: merging(s, piece()), "must follow"),
    "another chain": (
        merged,
        lambda s: merging(s, piece(start=128, end=256, first=10, chains=(127, 256))),
        "must follow",
    ),
    "a number too low": (merged, lambda s: merging(s, piece(start=128, end=256, first=9)), "must follow"),
    "a number too high": (merged, lambda s: merging(s, piece(start=128, end=256, first=11)), "must follow"),
    "the middle of the next segment": (
        merged,
        lambda s: merging(s, piece(start=128, end=256, first=10, roll=1)),
        "must follow",
    ),
    "the next segment but one": (merged, lambda s: merging(s, piece(first=10, roll=2)), "must follow"),
    "the next segment, a number missing": (
        merged,
        lambda s: merging(s, piece(first=11, roll=1)),
        "must follow",
    ),
    "beyond the end": (
        closing,
        lambda s: merging(s, piece(start=128, end=264, first=10)),
        "beyond the end",
    ),
    "beyond the last number": (
        closing,
        lambda s: merging(s, piece(start=128, end=256, first=10, count=11)),
        "beyond the end",
    ),
    "beyond the last segment": (closing, lambda s: merging(s, piece(first=10, roll=1)), "beyond the end"),
    "before an older incarnation": (
        taken_over,
        lambda s: merging(s, piece(2)),
        "older incarnation, session 1",
    ),
    "both incarnations at once": (
        lambda state: (taken_over(state), do_fence(state), do_close(state, 1, 0, (0, 256, 20))),
        lambda s: merging(s, piece(1, start=128, end=256, first=10), piece(2)),
        "older incarnation",
    ),
    "a dedup id that is not wanted yet": (dedup, lambda s: merging(s, piece(2, first=11)), "10 is expected"),
    "one good range and a bad one": (
        lambda state: (merged(state), do_open(state, "b", incarnation=1)),
        lambda s: merging(s, piece(start=128, end=256, first=10), piece(2, start=128, end=256)),
        "must start",
    ),
    "one good range and a bad one of its twin": (
        dedup,
        lambda s: merging(s, piece(start=128, end=256, first=10), piece(2, first=21)),
        "20 is expected",
    ),
    "dedup ids in the wrong order": (
        lambda state: (
            do_open(state, "a", dedup="d"),
            do_open(state, "b", dedup="d", incarnation=1),
            do_merge(state, piece(2)),
        ),
        lambda s: merging(s, piece(1, first=20), piece(2, start=128, end=256, first=10)),
        "20 where 10 is expected",
    ),
}
FOR_GOOD = {
    "X open with another life",
    "X below the last",
    "an older incarnation",
    "an older incarnation again",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why_and_changes_nothing(case: str) -> None:
    setup, command, why = REFUSED[case]
    state = new_state()
    setup(state)
    before, by_name = encode_state(state), dict(state.by_name)
    refused = refusal(state, command(state))
    assert why in refused.why
    assert refused.is_fenced == (case in FOR_GOOD)
    assert encode_state(state) == before
    assert state.by_name == by_name


# Lives


def test_an_opening_is_known_by_its_session_and_is_done_once() -> None:
    state = new_state()
    assert apply(state, opening("a")) == RunOpened(1, 0)
    assert apply(state, opening("b", incarnation=1)) == RunOpened(2, 0)
    before = encode_state(state)
    assert apply(state, opening("a")) == RunOpened(1, 0)
    assert encode_state(state) == before
    assert state.by_name == {"a": 1, "b": 2}
    assert apply(state, opening("a", run=7)) == RunOpened(1, 7)
    assert [active.run for active in state.sessions[1].active_runs] == [0, 7]
    assert state.sessions[1].last_run == 7


def test_an_opening_is_for_the_newest_incarnation_that_its_proposer_knew() -> None:
    """Else one that was only late would end the lives of a directory that took over meanwhile."""
    state = new_state()
    taken_over(state)
    assert apply(state, opening(incarnation=2, newest=2)) == RunOpened(3, 0)
    # Several nodes ask for the same one, whatever each knew.
    assert apply(state, opening(incarnation=2, newest=2)) == RunOpened(3, 0)
    assert apply(state, opening(incarnation=2, newest=1)) == RunOpened(3, 0)


# Disks


def test_the_first_disk_of_a_node_is_whole_and_one_that_replaces_another_is_not() -> None:
    state = new_state()
    replaced(state)
    assert state.disks == {"n1": NodeDisk(b"\1" * 16, 2, is_whole=False)}
    do_join(state, "n2")
    assert state.disks["n2"] == NodeDisk(b"\0" * 16, 3, is_whole=True)
    assert apply(state, RestoreDisk("n1", b"\1" * 16)) == DiskRestored("n1")
    assert state.disks["n1"] == NodeDisk(b"\1" * 16, 2, is_whole=True)
    # An old one that comes back is another one: it knows nothing of what came since.
    do_join(state, "n1", disk=0)
    assert not state.disks["n1"].is_whole


def test_where_nothing_is_open_nothing_was_lost_with_a_disk() -> None:
    state = new_state()
    joined(state)
    do_fence(state)
    do_close(state, 1, 0, (0, 64, 0))
    do_join(state, "n1", disk=1)
    assert state.disks["n1"].is_whole


def test_a_disk_that_is_replaced_after_something_was_merged_is_not_whole() -> None:
    state = new_state()
    joined(state)
    do_merge(state, piece(1, end=128, count=10))
    do_fence(state)
    do_close(state, 1, 0, (0, 128, 10))
    do_join(state, "n1", disk=1)
    assert not state.disks["n1"].is_whole, "its node may be the one that has what was merged"


def test_a_fence_and_a_configuration_may_be_repeated() -> None:
    state = new_state()
    merged(state)
    for command, outcome in (
        (FenceRun(1, 0), RunFenced(1, 0)),
        (Configure(roll_bytes=4096), ConfigurationChanged()),
    ):
        assert apply(state, command) == outcome
        before = encode_state(state)
        assert apply(state, command) == outcome
        assert encode_state(state) == before


def test_a_configuration_changes_what_it_names() -> None:
    state = new_state()
    apply(state, Configure(roll_minutes=5))
    apply(state, Configure(session_bytes_max=1000))
    apply(state, Configure())
    assert state.configuration == replace(Configuration(), roll_minutes=5, session_bytes_max=1000)


def test_a_run_that_is_closed_above_what_is_merged_ends_when_all_is_merged() -> None:
    state = new_state()
    closing(state)
    assert [active.run for active in state.sessions[1].active_runs] == [0, 3]
    do_merge(state, piece(start=128, end=192, first=10, count=5))
    assert state.sessions[1].done is None
    do_merge(state, piece(start=192, end=256, first=15, count=5))
    session = state.sessions[1]
    assert (session.done, session.consumed, [active.run for active in session.active_runs]) == (
        (0, End(0, 256, 20)),
        None,
        [3],
    )
    do_merge(state, piece(run=3, first=17))
    assert end_of(state.sessions[1]) == End(0, 128, 27)


@pytest.mark.parametrize("end", [(0, 128, 10), (1, 64, 10)], ids=["there", "in an empty next segment"])
def test_a_run_that_is_closed_where_it_is_merged_ends_at_once(end: tuple[int, int, int]) -> None:
    state = new_state()
    merged(state)
    do_open(state, run=3)
    do_fence(state)
    assert apply(state, CloseRun(1, 0, *end)) == RunClosed(1, 0, End(*end))
    assert state.sessions[1].done == (0, End(*end))
    do_merge(state, piece(run=3, first=10))


def test_a_run_of_which_nobody_holds_a_byte_is_closed_empty() -> None:
    state = new_state()
    opened(state)
    do_open(state, run=1)
    do_fence(state)
    do_close(state, 1, 0, (0, 64, 0))
    assert state.sessions[1].done == (0, End(0, 64, 0))
    do_merge(state, piece(run=1))


def test_a_run_closed_at_the_start_of_a_later_segment_still_has_all_before_to_merge() -> None:
    """The publisher rolled, and wrote nothing more: the end is at 64, but of segment 1."""
    state = new_state()
    opened(state)
    do_fence(state)
    do_close(state, 1, 0, (1, 64, 10))
    assert [active.run for active in state.sessions[1].active_runs] == [0]
    do_merge(state, piece())
    assert state.sessions[1].done == (0, End(1, 64, 10))


def test_a_range_goes_on_in_the_next_segment() -> None:
    state = new_state()
    merged(state)
    do_merge(state, piece(roll=1, first=10, chains=(0xABC, 128)))
    do_merge(state, piece(roll=1, start=128, end=192, first=20))
    assert end_of(state.sessions[1]) == End(1, 192, 30)


def test_a_newer_incarnation_is_merged_behind_the_older_one() -> None:
    state = new_state()
    taken_over(state)
    assert state.sessions[1].is_superseded
    assert state.by_name == {"a": 2}
    do_fence(state)
    do_close(state, 1, 0, (0, 256, 20))
    do_merge(state, piece(start=128, end=256, first=10))
    do_merge(state, piece(2))


def test_a_third_incarnation_waits_for_the_first_though_the_second_was_empty() -> None:
    state = new_state()
    taken_over(state)
    do_open(state, incarnation=2)
    do_fence(state, 2)
    for empty in (CloseRun(2, 0, 0, 64, 0), merging(state, piece(3))):
        assert "older incarnation" in refusal(state, empty).why
    do_fence(state, 1)
    do_close(state, 1, 0, (0, 256, 20))
    assert "older incarnation" in refusal(state, CloseRun(2, 0, 0, 64, 0)).why
    do_merge(state, piece(1, start=128, end=256, first=10))
    assert "older incarnation" in refusal(state, merging(state, piece(3))).why
    do_close(state, 2, 0, (0, 64, 0))
    do_merge(state, piece(3))


def test_a_third_incarnation_waits_for_the_first_when_the_second_has_messages() -> None:
    state = new_state()
    opened(state)
    do_open(state, incarnation=1)
    do_open(state, incarnation=2)
    for earlier, later in ((1, 2), (2, 3)):
        assert "older incarnation" in refusal(state, merging(state, piece(later))).why
        do_fence(state, earlier)
        do_close(state, earlier, 0, (0, 128, 10))
        do_merge(state, piece(earlier))
    do_merge(state, piece(3))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["open", "fence", "close", "merge"])), max_size=40)
)
def test_whatever_comes_incarnations_are_merged_in_their_order(
    steps: list[tuple[int, str]],
) -> None:
    """The dumb definition: an incarnation may be merged or end when all before it of its name have ended."""
    state = new_state()
    for which, what in steps:
        session_id = which + 1
        before = [one.id for one in state.sessions.values() if one.id < session_id and one.active_runs]
        if what == "open":
            apply(state, opening(incarnation=len(state.sessions)))
        elif what == "fence":
            apply(state, FenceRun(session_id, 0))
        elif what == "close":
            assert not (isinstance(apply(state, CloseRun(session_id, 0, 0, 128, 10)), RunClosed) and before)
        else:
            assert not (isinstance(apply(state, merging(state, piece(session_id))), RangesMerged) and before)
        if len(state.sessions) == 7:
            break


# Dedup


def block_counts(order: WritePlan) -> list[tuple[int, int, int]]:
    """Session id, skip and messages of the blocks with batches."""
    found = []
    at = order.offset or 64
    seed = segment_seed(CLUSTER, *order.segment)
    for block in order.blocks:
        header = decode_block_header(block.head, 0, batch_seed(seed, at))
        at += block.size_bytes
        if header.kind == BlockKind.BATCHES:
            assert header.message_count == block.message_count
            found.append((header.session_id, header.skip, header.message_count))
    return found


@pytest.mark.parametrize(
    ("first", "count", "blocks", "wanted"),
    [
        (0, 10, [], 10),
        (0, 5, [], 10),
        (5, 10, [(2, 5, 5)], 15),
        (9, 2, [(2, 1, 1)], 11),
        (10, 7, [(2, 0, 7)], 17),
    ],
    ids=["the same", "below", "straddling", "straddling by one", "above"],
)
def test_ids_that_were_merged_are_skipped(
    first: int, count: int, blocks: list[tuple[int, int, int]], wanted: int
) -> None:
    state = new_state()
    dedup(state)
    order = do_merge(state, piece(2, first=first, count=count))
    assert block_counts(order) == blocks
    assert state.wanted == {"d": wanted}
    assert state.position == order.end_position == 10 + sum(block[2] for block in blocks)
    assert order.consumed == (SessionEnd(2, 0, 0, 128, first + count),)
    assert end_of(state.sessions[2]) == End(0, 128, first + count)


def test_two_sessions_of_one_dedup_id_share_an_instruction() -> None:
    state = new_state()
    dedup(state)
    order = do_merge(state, piece(1, start=128, end=192, first=10, count=5), piece(2, first=5, count=20))
    assert block_counts(order) == [(1, 0, 5), (2, 10, 10)]
    assert state.wanted == {"d": 25}


def test_the_first_id_of_a_dedup_id_is_where_it_begins() -> None:
    state = new_state()
    do_open(state, dedup="d")
    assert block_counts(do_merge(state, piece(first=1000))) == [(1, 0, 10)]
    assert state.wanted == {"d": 1010}


def test_as_many_messages_may_be_skipped_as_a_range_holds() -> None:
    """The skip of a block header has 32 bits."""
    state = new_state()
    do_open(state, "a", dedup="d")
    do_open(state, "b", dedup="d", incarnation=1)
    do_merge(state, piece(count=COUNT_MAX - 1))
    order = do_merge(state, piece(2, count=COUNT_MAX))
    assert block_counts(order) == [(2, COUNT_MAX - 1, 1)]
    with pytest.raises(ValueError):
        piece(count=COUNT_MAX + 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=20))
def test_each_id_is_merged_once_by_whichever_of_two_sessions_brings_it_first(
    steps: list[tuple[bool, int]],
) -> None:
    state = new_state()
    dedup(state)
    ends = {1: End(0, 128, 10), 2: None}
    seen = list(range(10))
    for is_second, count in steps:
        session_id = 1 + is_second
        end = ends[session_id] or End(0, 64, 0)
        one = piece(session_id, end.offset, end.offset + 8, first=end.number, count=count)
        before = state.wanted["d"]
        outcome = apply(state, merging(state, one))
        fresh = [number for number in range(end.number, end.number + count) if number not in seen]
        assert fresh == list(range(before, before + len(fresh)))
        seen += fresh
        assert isinstance(outcome, RangesMerged)
        assert sum(block[2] for block in block_counts(outcome.plan)) == len(fresh)
        ends[session_id] = End(0, one.end, one.end_number)
    assert seen == list(range(state.wanted["d"]))
    assert state.position == len(seen)


def test_take_looks_ahead_with_the_session_it_is_given() -> None:
    state = new_state()
    merged(state)
    ahead = resolve_range(state, piece(start=128, end=256, first=10), None)
    assert not isinstance(ahead, str)
    following = piece(start=256, end=512, first=20)
    assert isinstance(resolve_range(state, following, None), str)
    assert not isinstance(resolve_range(state, following, None, session=ahead.session), str)
    assert end_of(state.sessions[1]) == End(0, 128, 10)


# Segments


def filled(roll_bytes: int) -> tuple[SequencerState, WritePlan, WritePlan]:
    state = new_state()
    do_open(state)
    apply(state, Configure(roll_bytes=roll_bytes))
    first = do_merge(state, piece())
    return state, first, do_merge(state, piece(start=128, end=192, first=10))


def test_a_segment_of_exactly_roll_bytes_is_followed_by_the_next() -> None:
    size = filled(1 << 30)[1].end_offset
    state, first, second = filled(size)
    assert (first.segment, first.offset) == (SegmentId(0, 0), 0)
    assert (second.segment, second.offset, second.first_position) == (SegmentId(0, 1), 0, 10)
    assert [block.is_declaration for block in second.blocks] == [True, False]
    assert list(state.segments) == [
        MergedSegment(SegmentId(0, 0), 0, 10, size, first.sequenced_ns, second.sequenced_ns)
    ]
    assert second.total_bytes == size + second.end_offset
    assert state.merged.created_ns == second.sequenced_ns
    state, first, second = filled(size + 1)
    assert (second.segment, second.offset) == (SegmentId(0, 0), size)
    assert [block.is_declaration for block in second.blocks] == [False]
    assert not state.segments


def test_a_roll_seals_the_segment_at_once_and_the_next_one_waits_for_messages() -> None:
    state = new_state()
    dedup(state)
    first, position, chain = state.merged, state.position, state.merged.chain
    order = do_roll(state)
    assert (order.segment, order.offset, order.blocks, order.end_offset) == (SegmentId(0, 1), 0, (), 64)
    assert (order.first_position, order.end_position, order.chain) == (position, position, chain)
    assert decode_write_plan(encode_write_plan(order)) == order
    (sealed,) = state.segments
    assert (sealed.id, sealed.end, sealed.size_bytes) == (SegmentId(0, 0), position, first.offset)
    assert sealed.sealed_ns == state.merged.created_ns == state.sequenced_ns == order.sequenced_ns
    empty = do_merge(state, piece(2))
    assert (empty.segment, empty.blocks, empty.end_offset) == (SegmentId(0, 1), (), empty.offset)
    following = do_merge(state, piece(start=128, end=192, first=10))
    assert (following.segment, following.offset, following.blocks[0].is_declaration) == ((0, 1), 64, True)


def test_a_session_is_declared_once_in_a_segment() -> None:
    state = new_state()
    do_open(state, "a")
    do_open(state, "b", incarnation=1)
    order = do_merge(state, piece(1), piece(2))
    declared = [block.is_declaration for block in order.blocks]
    assert declared == [True, False, True, False]
    order = do_merge(state, piece(1, start=128, end=256, first=10), piece(2, start=128, end=256, first=10))
    assert [block.is_declaration for block in order.blocks] == [False, False]


def test_an_instruction_of_which_nothing_is_left_begins_no_segment() -> None:
    """The first thing a stream merges may be of no message: then there is no segment yet."""
    state = new_state()
    do_open(state, dedup="d")
    state.wanted["d"] = 100
    order = do_merge(state, piece())
    assert (order.blocks, order.first_position, order.end_position, order.total_bytes) == ((), 0, 0, 0)
    assert state.merged.segment is None
    order = do_merge(state, piece(start=128, end=256, first=10, count=100))
    assert (order.segment, order.offset) == (SegmentId(0, 0), 0)
    assert block_counts(order) == [(1, 90, 10)]


# Bytes


class Sources:
    """Some sessions of real bytes, and how far each was offered."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.written: dict[int, WrittenSession] = {}
        self.names: dict[int, str] = {}
        self.opened: list[OpenRun] = []
        self.queues: dict[int, list[Command | MergeRange]] = {}
        self.said: dict[tuple[int, int], bytes] = {}
        for session_id in range(1, rng.randint(2, 4)):
            self._write(session_id)

    def _write(self, session_id: int) -> None:
        rng = self.rng
        label = "twin" if rng.random() < 0.5 else f"s{session_id}"
        dedup = "twins" if label == "twin" else None
        name, incarnation = f"name-{session_id}", INCARNATIONS[session_id]
        session = self.written[session_id] = WrittenSession(incarnation)
        self.names[session_id] = name
        first = 0
        queue: list[Command | MergeRange] = self.queues.setdefault(session_id, [])
        active_runs = sorted(rng.sample(range(5), rng.randint(1, 3)))
        for run in active_runs:
            opening = OpenRun(name, incarnation, dedup, run, (run + 1).to_bytes(8, "little"))
            if run == active_runs[0]:
                self.opened.append(opening)
            else:
                queue.append(opening)
            for roll in range(rng.randint(1, 3)):
                numbers = range(first, first + rng.randint(1, 12))
                first = session.write(run, roll, first, random_runs(rng, numbers, label))
                queue += self._cut(session_id, run, roll)
                end = session.marks[run, roll][-1]
            queue += [FenceRun(session_id, run), CloseRun(session_id, run, roll, end.offset, end.number)]

    def _cut(self, session_id: int, run: int, roll: int) -> list[MergeRange]:
        session = self.written[session_id]
        last = len(session.marks[run, roll]) - 1
        cuts = sorted({0, last, *(self.rng.randint(0, last) for _ in range(self.rng.randint(0, 3)))})
        return [session.range_of(session_id, run, roll, a, b) for a, b in pairwise(cuts)]

    def next_command(self, state: SequencerState) -> Command | None:
        """The next command of some sessions; instructions take ranges of several."""
        heads = {one: queue[0] for one, queue in self.queues.items() if queue}
        ranges = [head for head in heads.values() if isinstance(head, MergeRange)]
        others = [head for head in heads.values() if not isinstance(head, MergeRange)]
        if others and (not ranges or self.rng.random() < 0.7):
            command = self.rng.choice(others)
            self.queues[next(one for one, head in heads.items() if head is command)].pop(0)
            return command
        if not ranges:
            return None
        chosen = sorted(self.rng.sample(ranges, self.rng.randint(1, len(ranges))), key=lambda r: r.session_id)
        wanted = state.wanted.get("twins")
        kept = []
        for one in chosen:  # Twins begin at 0, so one of them always may go on.
            if state.sessions[one.session_id].dedup_id is not None:
                wanted = one.first if wanted is None else wanted
                if one.first > wanted:
                    continue
                wanted = max(wanted, one.end_number)
            kept.append(one)
            self.queues[one.session_id].pop(0)
        return merging(state, *kept) if kept else rolling(state)

    def expected(self) -> dict[str, list[tuple[int, bytes]]]:
        """What each session must come to, if none has a twin."""
        return {
            self.names[one]: [
                (int(said.value.split(b":")[1]), said.value)
                for runs in session.runs.values()
                for run in runs
                for said in run
            ]
            for one, session in self.written.items()
        }


def run_all(seed: int) -> tuple[SequencerState, DumbMerger, Sources]:
    rng = random.Random(seed)
    sources, merger = Sources(rng), DumbMerger()
    replicas = [new_state(), new_state()]
    configure = Configure(roll_bytes=rng.choice([1, 1000, 3000, 1 << 30]))
    commands: list[Command] = [*sources.opened, configure]
    while True:
        command = commands.pop(0) if commands else sources.next_command(replicas[0])
        if command is None:
            break
        outcomes = [apply(state, command) for state in replicas]
        assert outcomes[0] == outcomes[1]
        encoded = [encode_state(state) for state in replicas]
        assert encoded[0] == encoded[1]
        if rng.random() < 0.3:
            replicas[1] = decode_state(encoded[1])
            assert replicas[1] == replicas[0]
        if isinstance(command, MergeInstruction) or isinstance(outcomes[0], RangesMerged):
            order = must(RangesMerged, outcomes[0]).plan
            assert decode_write_plan(encode_write_plan(order)) == order
            merger.carry_out(order, sources.written)
        if merger.files and rng.random() < 0.1:
            outcome = apply_both(replicas, rolling(replicas[0]))
            if isinstance(outcome, RangesMerged):
                merger.carry_out(outcome.plan, sources.written)
    return replicas[0], merger, sources


def apply_both(replicas: list[SequencerState], command: Command) -> Outcome:
    outcomes = [apply(state, command) for state in replicas]
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_orders_make_a_dense_log_of_all_messages_the_same_on_every_replica(seed: int) -> None:
    state, merger, sources = run_all(seed)
    heard = merger.read()
    assert [message.position for message in heard] == list(range(state.position))
    twins = [message for message in heard if message.said.value.startswith(b"twin:")]
    numbers = [message.number for message in twins]
    assert numbers == list(range(state.wanted.get("twins", 0)))
    for name, said in sources.expected().items():
        mine = [message for message in heard if message.session == name]
        own = [(message.number, message.said.value) for message in mine]
        if said[0][1].startswith(b"twin:"):
            assert own == [one for one in said if one in set(own)]
            assert {number for number, _ in said} <= set(numbers)
        else:
            assert own == said
    assert all(message.said.value.endswith(f":{message.number}".encode()) for message in heard)
    assert merger.chain == state.merged.chain
    assert_table(state, merger, heard)


def assert_table(state: SequencerState, merger: DumbMerger, heard: list[Heard]) -> None:
    """The segment table says what the files are."""
    sizes = {segment: len(data) for segment, data in merger.files.items() if any(data)}
    if state.merged.segment is None:
        assert not sizes
        return
    said = {one.id: one.size_bytes for one in state.segments} | {state.merged.segment: state.merged.offset}
    assert said == sizes
    assert state.merged.total_bytes == sum(sizes.values())
    places = [*((one.first, one.end) for one in state.segments), (state.merged.first, len(heard))]
    assert [end for _, end in places[:-1]] == [first for first, _ in places[1:]]
    assert places[0][0] == 0
