"""Session life cycle: limits on open sessions, closing of idle ones, and what is kept after closing."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequencer_core import (
    do_close,
    do_fence,
    do_join,
    do_merge,
    do_open,
    must,
    new_state,
    newest_of,
    opening,
    piece,
)

from sequencer.leader.idle_sessions import FORGET_AT_ONCE, MINUTE_NS, POLL_NS, IdleSessions, OldSessions
from sequencer.leader.merge_planner import Speculation
from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey
from sequencer.leader.session_close import AWAY_NS, DiskRestoration, SessionCloser
from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, Forgotten, RunClosed, RunFenced, RunOpened
from sequencer.state.commands import Configure, ResetCluster
from sequencer.state.configuration import SESSIONS_PER_NAME_MAX, Configuration
from sequencer.state.forgotten_sessions import KEY_BYTES, OWNER_BYTES, taken_from_largest
from sequencer.state.run_lifecycle import why_full
from sequencer.state.session_commands import (
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    OpenRun,
    OpenSealedRuns,
    SealedRun,
)
from sequencer.state.state import (
    CLOSED_KEPT,
    DEDUP_IDS_MAX,
    RUNS_PER_OWNER_MAX,
    RUNS_PER_SESSION,
    End,
    SequencerState,
)
from sequencer.state.state_codec import decode_state, encode_state
from sequencer.state.write_plan import SessionEnd


def incarnation(number: int) -> bytes:
    return number.to_bytes(16)


def opening_of(state: SequencerState, name: str, number: int, run: int = 0) -> OpenRun:
    return OpenRun(name, incarnation(number), None, run, run.to_bytes(8), newest_of(state, name))


def opened(state: SequencerState, name: str, number: int, run: int = 0) -> int:
    return must(RunOpened, apply(state, opening_of(state, name, number, run))).session_id


def closed(state: SequencerState, session_id: int, run: int = 0) -> None:
    """Close a run in which nothing was published."""
    do_fence(state, session_id, run)
    do_close(state, session_id, run, (0, 64, 0))


# Limits


def test_open_sessions_are_limited_per_certificate_and_in_total() -> None:
    state = new_state()
    apply(state, Configure(sessions_per_name_max=2, sessions_max=4))
    ids = [opened(state, name, number) for number, name in enumerate(["pub", "pub~a"])]
    refused = must(CommandRejected, apply(state, opening_of(state, "pub~b", 2)))
    assert refused.is_full
    assert not refused.is_fenced
    assert "sessionsPerNameMax" in refused.why
    # An open session stays open, and can start its next run.
    opened(state, "pub~a", 1)
    opened(state, "pub~a", 1, run=1)
    ids += [opened(state, name, number) for number, name in enumerate(["other", "third"], 3)]
    refused = must(CommandRejected, apply(state, opening_of(state, "fourth", 7)))
    assert refused.is_full
    assert "sessionsMax" in refused.why
    closed(state, ids[0])
    opened(state, "pub~b", 2)


def test_new_incarnation_opens_at_session_limit_but_second_one_is_rejected() -> None:
    state = new_state()
    apply(state, Configure(sessions_per_name_max=1, sessions_max=1))
    first = opened(state, "pub", 1)
    second = opened(state, "pub", 2)
    assert state.sessions[second].waits_for == first
    # But a third session is rejected until the first one is closed.
    assert must(CommandRejected, apply(state, opening_of(state, "pub", 3))).is_full
    closed(state, first)
    opened(state, "pub", 3)


def test_dedup_ids_per_owner_are_limited() -> None:
    """Each dedup id leaves its watermark in the state permanently: a publisher must not fill all nodes with
    watermarks.
    """
    state = new_state()
    state.wanted = {f"feed~{number}": 1 for number in range(DEDUP_IDS_MAX)}
    refused = must(CommandRejected, apply(state, opening("pub", dedup="feed~more")))
    assert refused.is_full
    assert why_full(state, "pub", "feed~more") == refused.why
    for number, dedup_id in enumerate([None, "feed~7", "other", "other~1"]):
        assert why_full(state, f"pub~{number}", dedup_id) is None
        must(RunOpened, apply(state, opening(f"pub~{number}", dedup=dedup_id)))


def test_runs_opened_by_hostile_publisher_are_bounded_in_state() -> None:
    state = new_state()
    for number in range(20):
        for run in range(2000):
            apply(state, opening_of(state, f"pub~{number}", number, run))
    assert state.runs_of["pub"] <= RUNS_PER_OWNER_MAX + 20 * RUNS_PER_SESSION
    assert all(len(one.active_runs) >= RUNS_PER_SESSION for one in state.sessions.values()), (
        "each has its share"
    )
    per_run = len(encode_state(state)) / state.runs_of["pub"]
    assert per_run * (RUNS_PER_OWNER_MAX + SESSIONS_PER_NAME_MAX * RUNS_PER_SESSION) < 2**20


def test_reopened_session_counts_against_session_limit() -> None:
    state = new_state()
    apply(state, Configure(sessions_max=1))
    first = opened(state, "a", 1)
    closed(state, first)
    second = opened(state, "b", 2)
    assert must(CommandRejected, apply(state, opening_of(state, "a", 1, run=1))).is_full
    closed(state, second)
    assert opened(state, "a", 1, run=1) == first


# Data derived from the sessions


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "forget"]), st.integers(0, 5)), max_size=60))
def test_counts_and_indexes_of_state_match_its_sessions(acts: list[tuple[str, int]]) -> None:
    state = new_state()
    gone: set[tuple[str, bytes]] = set()
    for at, (act, which) in enumerate(acts):
        name = ["a", "a~x", "b"][which % 3]
        session = state.session_of(name)
        if act == "open":
            before = apply(state, opening_of(state, name, which))
            if isinstance(before, CommandRejected) and session is not None:
                apply(state, opening_of(state, name, which, run=session.last_run + 1))
        elif act == "close":
            for one in list(state.sessions.values()):
                if one.name == name and one.active is not None:
                    apply(state, FenceRun(one.id, one.active.run))
                    apply(state, CloseRun(one.id, one.active.run, 0, 64, 0))
        elif state.closed:
            known = state.sessions[next(iter(state.closed))]
            gone.add((known.name, known.incarnation))
            must(Forgotten, apply(state, Forget((known.id,))))
        del at
        again = decode_state(encode_state(state))
        assert again == state
        assert [*again.closed] == [*state.closed]
        assert {*state.closed} == {one.id for one in state.sessions.values() if not one.active_runs}
        assert state.open_count == sum(bool(one.active_runs) for one in state.sessions.values())
        assert state.open_of.total() == state.open_count
        assert state.runs_of.total() == sum(len(one.active_runs) for one in state.sessions.values())
    for name, number in gone:
        outcome = apply(state, OpenRun(name, number, None, 9, bytes(8), newest_of(state, name)))
        assert isinstance(outcome, CommandRejected)
        assert outcome.is_fenced


# Closing


def ends(state: SequencerState) -> tuple[ReplicationTracker, SessionCloser]:
    do_join(state, "n1", "n2", "n3")
    tracker = ReplicationTracker(3)
    return tracker, SessionCloser(state, tracker)


def looked(idle: IdleSessions, until_ns: int, begin_ns: int = 0) -> list[int]:
    """Return the first sessions that a leader finds when it polls up to that time."""
    found = [idle.plan(now_ns) for now_ns in range(begin_ns, until_ns, POLL_NS)]
    return next(filter(None, found), idle.plan(until_ns))


def test_idle_session_is_closed_at_end_reported_by_majority() -> None:
    state = new_state()
    do_open(state)
    tracker, endings = ends(state)
    assert endings.plan() == []
    idle = IdleSessions(state, 0)
    minutes = state.configuration.session_idle_minutes
    assert looked(idle, minutes * MINUTE_NS - 1) == []
    late = minutes * MINUTE_NS + POLL_NS
    assert idle.plan(late) == [1]
    endings.give_up([1])
    assert endings.plan() == [FenceRun(1, 0)]
    do_merge(state, piece())
    endings.on_applied(apply(state, FenceRun(1, 0)))
    # The next leader closes it, too.
    for planner in (endings, SessionCloser(state, tracker)):
        for node, number in (("n1", 10), ("n2", 30)):
            tracker.on_final(node, SessionEnd(1, 0, 0, 64 + number * 8, number), None)
        planner.on_news({1})
        assert planner.plan() == [CloseRun(1, 0, 0, 64 + 30 * 8, 30)]


def test_session_stays_open_while_publisher_is_present_or_if_it_returns_in_time() -> None:
    state = new_state()
    do_open(state)
    do_open(state, "b", incarnation=1)
    _, endings = ends(state)
    idle = IdleSessions(state, 0)
    late = state.configuration.session_idle_minutes * MINUTE_NS + POLL_NS
    idle.on_heard([2], late - MINUTE_NS)
    assert looked(idle, late) == [1]
    endings.give_up([1])
    endings.on_heard([1], 0)
    assert endings.plan() == []


@pytest.mark.parametrize("minutes", [0, 1, 60])
def test_idle_time_is_configurable_and_0_closes_no_session(minutes: int) -> None:
    state = new_state()
    do_open(state)
    apply(state, Configure(session_idle_minutes=minutes))
    idle = IdleSessions(state, 0)
    assert looked(idle, minutes * MINUTE_NS - 1) == []
    assert idle.plan(minutes * MINUTE_NS + POLL_NS) == ([1] if minutes else [])


@pytest.mark.parametrize("pause_minutes", [1, 60])
def test_idle_time_excludes_pause_of_leader(pause_minutes: int) -> None:
    """A paused node received nothing from publishers that were connected all the time."""
    state = new_state()
    do_open(state)
    apply(state, Configure(session_idle_minutes=1))
    idle = IdleSessions(state, 0)
    heard_ns = 3 * MINUTE_NS
    for now_ns in range(0, heard_ns, POLL_NS):
        idle.on_heard([1], now_ns)
        assert idle.plan(now_ns) == []
    woken_ns = heard_ns + pause_minutes * MINUTE_NS
    assert idle.plan(woken_ns) == []
    assert looked(idle, woken_ns + MINUTE_NS - 2 * POLL_NS, woken_ns) == []
    assert looked(idle, woken_ns + MINUTE_NS + POLL_NS, woken_ns + MINUTE_NS - POLL_NS) == [1]


def test_session_closed_by_operator_is_closed_even_if_its_last_bytes_are_lost() -> None:
    state = new_state()
    do_open(state)
    tracker, endings = ends(state)
    assert isinstance(apply(state, CloseSession("b")), CommandRejected)
    outcome = must(RunFenced, apply(state, CloseSession("a")))
    assert outcome == must(RunFenced, apply(state, CloseSession("a"))), "again is the same"
    endings.on_applied(outcome)
    endings.give_up_closed(AWAY_NS)
    for node in ("n1", "n2"):
        tracker.on_final(node, SessionEnd(1, 0, 0, 640, 10), None)
    (close,) = endings.plan()
    endings.on_applied(must(RunClosed, apply(state, close)))
    # The only node with those bytes has lost them, so no sender is waited for.
    told = dict.fromkeys(("n1", "n2", "n3"), state.joins)
    assert endings.plan_lost(told) == [CloseRun(1, 0, 0, 64, 0)]
    must(RunClosed, apply(state, CloseRun(1, 0, 0, 64, 0)))
    assert [*state.closed] == [1]
    assert isinstance(apply(state, CloseSession("a")), CommandRejected)


@pytest.mark.parametrize(
    ("known", "end", "is_cut"),
    [
        ("sealed", (0, 128, 10), True),
        ("sealed", (0, 256, 20), False),
        ("announced", (0, 128, 10), True),
        ("announced", (0, 256, 20), False),
        ("closed before", (0, 128, 10), True),
        ("unknown", (0, 64, 0), False),
    ],
)
def test_run_closed_without_its_last_messages_is_counted_as_cut_short_once(
    known: str, end: tuple[int, int, int], is_cut: bool
) -> None:
    """No merged byte shows it: a session that lost its last messages looks like a session that had no
    more.
    """
    state, whole = new_state(), End(0, 256, 20)
    if known == "sealed":
        run = SealedRun(0, bytes(8), whole)
        must(RunOpened, apply(state, OpenSealedRuns("a", incarnation(1), None, (run,))))
    else:
        opened(state, "a", 1)
    opened(state, "a", 1, run=1)
    must(RunFenced, apply(state, CloseSession("a")))
    if known == "closed before":
        do_close(state, 1, 0, whole)
    close = CloseRun(1, 0, *end, announced=whole if known == "announced" else None)
    for one in (decode_state(encode_state(state)), state):
        assert must(RunClosed, apply(one, close)).cut_short == ((0,) if is_cut else ())
        assert (one.runs_cut_short, one.sessions[1].runs_cut_short) == (is_cut, is_cut)
    if end != (0, 64, 0):
        must(RunClosed, apply(state, CloseRun(1, 0, 0, 64, 0)))
        assert state.runs_cut_short == 1
    state = decode_state(encode_state(state))
    closed(state, 1, run=1)
    must(Forgotten, apply(state, Forget((1,))))
    assert state.runs_cut_short == (end != (0, 64, 0)), "the total is kept"


def test_waiting_runs_closed_together_are_each_counted_as_cut_short() -> None:
    state = new_state()
    runs = tuple(SealedRun(run, bytes(8), End(0, 128, 10)) for run in range(3))
    must(RunOpened, apply(state, OpenSealedRuns("a", incarnation(1), None, runs)))
    must(RunFenced, apply(state, FenceRun(1, 0, (1, 2))))
    assert must(RunClosed, apply(state, CloseRun(1, 0, 0, 64, 0, (1, 2)))).cut_short == (0, 1, 2)
    assert (state.runs_cut_short, [*state.closed]) == (3, [1])


def test_closed_session_continues_numbering_with_next_run() -> None:
    state = new_state()
    opened(state, "a", 0)
    do_merge(state, piece())
    must(RunFenced, apply(state, CloseSession("a")))
    do_close(state, 1, 0, (0, 128, 10))
    again = must(CommandRejected, apply(state, opening_of(state, "a", 0)))
    assert not again.is_full
    assert opened(state, "a", 0, run=1) == 1
    do_merge(state, piece(run=1, first=10))
    assert state.position == 20


# Forgetting


def test_oldest_closed_sessions_are_forgotten_once_merged_by_majority() -> None:
    state = new_state()
    old = OldSessions(state, 0, kept=2)
    count = 2 + FORGET_AT_ONCE
    for number in range(count):
        session_id = opened(state, f"s{number}", number)
        do_merge(state, piece(session_id))
        do_fence(state, session_id)
        old.on_applied(apply(state, CloseRun(session_id, 0, 0, 128, 10)))
        if number < count - 1:
            assert old.plan([99, 99, 99], 2, 0) is None
    assert old.plan([count], 2, 0) is None, "a minority"
    assert old.plan([count, 1, 0], 2, 0) == Forget((1,))
    assert old.plan([count, 40, 0], 2, 0) == Forget(tuple(range(1, 41)))
    forget = old.plan([count, count, 0], 2, 0)
    assert forget == Forget(tuple(range(1, FORGET_AT_ONCE + 1)))
    old.on_applied(apply(state, forget))
    assert [*state.closed] == [count - 1, count]
    assert old.plan([count] * 3, 2, 0) is None


def test_owner_cycling_sessions_evicts_only_its_own_session_records() -> None:
    """A publisher without a record is fenced when it returns."""
    state = new_state()
    old = OldSessions(state, 0, kept=2)
    for name in ["honest", *(f"hostile~{number}" for number in range(FORGET_AT_ONCE + 1))]:
        session_id = opened(state, name, len(state.sessions))
        do_fence(state, session_id)
        old.on_applied(apply(state, CloseRun(session_id, 0, 0, 64, 0)))
    forget = old.plan([0, 0, 0], 2, 0)
    assert forget == Forget(tuple(range(2, FORGET_AT_ONCE + 2)))
    must(Forgotten, apply(state, forget))
    assert {state.sessions[one].name for one in state.closed} == {"honest", f"hostile~{FORGET_AT_ONCE}"}


@pytest.mark.parametrize("minutes", [0, 60])
def test_sessions_closed_by_hard_reset_are_kept_for_idle_time(minutes: int) -> None:
    """A reset closes more sessions at once than are kept, but none of them must be fenced because of that."""
    state = new_state()
    apply(state, Configure(session_idle_minutes=minutes))
    count = 4 + FORGET_AT_ONCE
    for number in range(count):
        opened(state, f"s{number}", number)
    apply(state, ResetCluster(True, 1, 7, bytes(16), ""))
    assert len(state.closed) == count
    old = OldSessions(state, 0, kept=2)
    assert old.plan([0, 0, 0], 2, 0) is None
    assert opened(state, "s0", 0, run=1) == 1
    closed(state, 1, run=1)
    assert old.plan([0, 0, 0], 2, POLL_NS) is None
    late = old.plan([0, 0, 0], 2, max(minutes, 1) * MINUTE_NS)
    assert late == (Forget(tuple(range(2, count))) if minutes else None)


def test_forgotten_incarnation_stays_fenced_and_its_name_is_free() -> None:
    state = new_state()
    closed(state, opened(state, "a", 1))
    must(Forgotten, apply(state, Forget((1,))))
    assert state.session_of("a") is None
    state = decode_state(encode_state(state))
    for run in (0, 1, 7):
        assert must(CommandRejected, apply(state, opening_of(state, "a", 1, run))).is_fenced
    assert opened(state, "b", 1) == 2, "another name is another session"
    assert opened(state, "a", 2) == 3


def test_forgetting_newer_incarnation_first_leaves_state_equal_to_its_snapshot() -> None:
    """Otherwise nodes that started with the snapshot would reject sessions that the others accept."""
    state = new_state()
    for number in range(2):
        closed(state, opened(state, "a", number))
    must(Forgotten, apply(state, Forget((2,))))
    restored = decode_state(encode_state(state))
    assert restored == state
    third = opening_of(state, "a", 3)
    assert apply(restored, third) == must(RunOpened, apply(state, third))


def test_forget_of_open_or_unknown_session_is_rejected() -> None:
    state = new_state()
    opened(state, "a", 1)
    before = encode_state(state)
    assert isinstance(apply(state, Forget((1, 2))), CommandRejected)
    assert encode_state(state) == before


def test_incarnation_waiting_for_forgotten_one_can_be_merged() -> None:
    state = new_state()
    first = opened(state, "a", 1)
    second = opened(state, "a", 2)
    closed(state, first)
    must(Forgotten, apply(state, Forget((first,))))
    do_merge(state, piece(second))
    assert state.position == 10


def test_older_incarnation_can_be_forgotten_after_newer_one() -> None:
    state = new_state()
    for number in range(2):
        closed(state, opened(state, "a", number))
    for session_id in (2, 1):
        must(Forgotten, apply(state, Forget((session_id,))))
    assert state.sessions == {}
    assert opened(state, "a", 2) == 3


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lower the limit of forgotten keys to a number that a test can reach, and return it."""
    monkeypatch.setattr("sequencer.state.forgotten_sessions.FORGOTTEN_MAX", 8)
    return 8


def come_and_go(state: SequencerState, name: str, numbers: Iterable[int]) -> None:
    ids = list[int]()
    for number in numbers:
        ids.append(opened(state, name, number))
        closed(state, ids[-1])
    must(Forgotten, apply(state, Forget(tuple(ids))))


def test_owner_cycling_sessions_evicts_only_its_own_forgotten_keys(few_kept: int) -> None:
    state = new_state()
    come_and_go(state, "honest", range(2))
    come_and_go(state, "honest~b", [2])
    for number in range(5):
        come_and_go(state, f"hostile~{number}", range(10 * number, 10 * number + 7))
    assert len(state.forgotten) == few_kept
    for name, number in (("honest", 0), ("honest", 1), ("honest~b", 2)):
        assert must(CommandRejected, apply(state, opening_of(state, name, number))).is_fenced
    assert [("hostile~4", incarnation(one)) in state.forgotten for one in range(40, 47)] == [False] * 2 + [
        True
    ] * 5


def test_owners_share_forgotten_key_limit_and_oldest_keys_of_each_are_evicted_first(few_kept: int) -> None:
    state = new_state()
    for owner in ("a", "b", "c"):
        come_and_go(state, owner, range(few_kept))
    left = {
        owner: [number for number in range(few_kept) if (owner, incarnation(number)) in state.forgotten]
        for owner in ("a", "b", "c")
    }
    assert sorted(map(len, left.values())) == [2, 3, 3]
    assert all(numbers == list(range(few_kept))[-len(numbers) :] for numbers in left.values()), left


@given(st.dictionaries(st.integers(0, 20), st.integers(1, 5), max_size=12), st.integers(0, 40))
def test_taken_from_largest_equals_repeatedly_taking_one_from_largest(
    sizes: dict[int, int], count: int
) -> None:
    left = dict(sizes)
    for _ in range(min(count, sum(sizes.values()))):
        left[max(left, key=lambda one: left[one])] -= 1
    taken = taken_from_largest(sizes, count)
    assert {one: size - taken.get(one, 0) for one, size in sizes.items()} == left


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=8), st.integers(0, 8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_forgotten_key_eviction_is_identical_after_snapshot_and_in_replay(
    few_kept: int, steps: list[tuple[str, int]], snapshot_at: int
) -> None:
    state, restored, number = new_state(), new_state(), 0
    for at, (owner, count) in enumerate(steps):
        if at == snapshot_at:
            restored = decode_state(encode_state(state))
        for one in (state, restored):
            come_and_go(one, owner, range(number, number + count))
        number += count
        assert len(state.forgotten) <= few_kept
        assert restored == state
        assert encode_state(restored) == encode_state(state)


@pytest.mark.slow
def test_state_snapshot_and_leader_memory_stay_bounded_over_thousands_of_sessions() -> None:
    """From 2,000 to 4,000 sessions, state, snapshot and the leader's memory grow only by the keys of
    forgotten sessions.
    """
    state = new_state()
    do_join(state, "n1", "n2", "n3")
    tracker = ReplicationTracker(3)
    endings, idle, old = SessionCloser(state, tracker), IdleSessions(state, 0), OldSessions(state, 0)
    sizes: list[tuple[int, int, int]] = []
    tracemalloc.start()
    try:
        for number in range(4_000):
            session_id = opened(state, f"pod-{number}", number)
            outcome = RunOpened(session_id, 0)
            endings.on_applied(outcome)
            idle.on_applied(outcome, number)
            mark = BatchBoundary(128, 10, 128)
            for node in ("n1", "n2"):
                tracker.on_boundaries(node, SegmentKey(session_id, 0, 0), [BatchBoundary(64, 0, 64), mark])
            do_merge(state, piece(session_id))
            tracker.prune_before(session_id, 0, 0, 128)
            endings.give_up([session_id])
            for command in endings.plan():
                endings.on_applied(apply(state, command))
            for node in ("n1", "n2"):
                tracker.on_final(node, SessionEnd(session_id, 0, 0, 128, 10), 128)
            endings.on_news(tracker.take_news())
            for command in endings.plan():
                done = apply(state, command)
                endings.on_applied(done)
                old.on_applied(done)
            assert session_id in state.closed
            forget = old.plan([state.instruction] * 3, 2, 0)
            if forget is not None:
                done = must(Forgotten, apply(state, forget))
                endings.on_applied(done)
                idle.on_applied(done, number)
                old.on_applied(done)
                for gone in done.session_ids:
                    tracker.forget_session(gone)
            if number % 500 == 0:
                state.merged.declared.clear()  # The next merged segment does the same.
            if number in {1_999, 3_999}:
                state.merged.declared.clear()
                snapshot = encode_state(state)
                gc.collect()
                # Count only allocations of these modules, because threads that earlier tests left may
                # allocate, too.
                ours = tracemalloc.Filter(True, "*/sequencer/*")
                traces = tracemalloc.take_snapshot().filter_traces([ours])
                size = sum(each.size for each in traces.statistics("filename"))
                sizes.append((len(snapshot), size, len(state.sessions)))
    finally:
        tracemalloc.stop()
    early, late = sizes
    assert late[2] <= CLOSED_KEPT + FORGET_AT_ONCE
    assert late[0] - early[0] <= 2_000 * (KEY_BYTES + 1), sizes
    # Each owner costs keys and a dictionary. A whole session would take several KB.
    each = sys.getsizeof({0: 0}) + sys.getsizeof(bytes(KEY_BYTES)) + sys.getsizeof(bytes(OWNER_BYTES)) + 150
    assert late[1] - early[1] <= 2_000 * each, sizes
    assert len(endings.due) <= 1, "the last one"
    assert len(idle._heard_ns) == len(old._merged) == len(tracker._segments) == late[2]


def test_configuration_has_default_session_limits_and_idle_time() -> None:
    usual = Configuration()
    assert (usual.sessions_max, usual.sessions_per_name_max) == (10_000, 1_000)
    assert usual.session_idle_minutes == 7 * 24 * 60


def test_disk_restoration_does_not_wait_for_forgotten_session() -> None:
    state = new_state()
    do_join(state, "n1", "n2", "n3")
    session_id = opened(state, "a", 1)
    do_join(state, "n3", disk=1)
    tracker = ReplicationTracker(3)
    for node in ("n1", "n2"):
        tracker.on_boundaries(
            node, SegmentKey(session_id, 0, 0), [BatchBoundary(64, 0, 64), BatchBoundary(128, 10, 128)]
        )
    restoring = DiskRestoration(state, tracker)
    told = dict.fromkeys(("n1", "n2", "n3"), state.joins)
    assert restoring.plan(told, {}) == []
    do_merge(state, piece(session_id))
    do_fence(state, session_id)
    do_close(state, session_id, 0, (0, 128, 10))
    must(Forgotten, apply(state, Forget((session_id,))))
    assert [restore.node for restore in restoring.plan(told, {"n3": state.instruction})] == ["n3"]


def test_forgotten_session_is_not_pending_in_speculation() -> None:
    state = new_state()
    session_id = opened(state, "a", 1)
    speculation = Speculation(state)
    taken = speculation.resolve(piece(session_id))
    assert taken is not None
    assert speculation.add(taken)
    do_merge(state, piece(session_id))
    do_fence(state, session_id)
    do_close(state, session_id, 0, (0, 128, 10))
    speculation.on_applied(must(Forgotten, apply(state, Forget((session_id,)))))
    speculation.reset()
    assert speculation.pending == set()
