"""Retention trims the right segments: each limit alone, and invariants for any clocks, disks and holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import Case

from archiver.policy import (
    DiskUse,
    RetentionPolicy,
    disk_excess,
    expired_ns,
    majority_of,
    reached_ns,
    size_excess,
)
from archiver.retention import TrimPlan, plan_trim
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.units import NS_PER_MINUTE


@dataclass(frozen=True, slots=True)
class Sealed:
    id: SegmentId
    first: int
    end: int
    size_bytes: int
    sealed_ns: int


@dataclass(frozen=True, slots=True)
class Log:
    """The input of a plan."""

    segments: tuple[Sealed, ...]
    active_bytes: int
    policy: RetentionPolicy
    clocks: tuple[int, ...]
    disks: tuple[DiskUse, ...]
    holds: Mapping[str, int]
    members: int
    freed_bytes: int

    def plan(self, gone: int = 0, freed_bytes: int | None = None) -> TrimPlan | None:
        """The next trim after `gone` segments were trimmed."""
        return plan_trim(
            self.segments[gone:],
            self.active_bytes,
            self.policy,
            self.clocks,
            self.disks,
            self.holds,
            members=self.members,
            freed_bytes=self.freed_bytes if freed_bytes is None else freed_bytes,
        )

    def plans(self) -> list[TrimPlan]:
        """All trims, in order."""
        plans: list[TrimPlan] = []
        gone, freed_bytes = 0, self.freed_bytes
        while (plan := self.plan(gone, freed_bytes)) is not None:
            plans.append(plan)
            gone, freed_bytes = gone + plan.segments, freed_bytes + plan.size_bytes
        return plans


# Cases


def log_of(case: Case) -> Log:
    def values(name: str) -> list[str]:
        return [value for value in case.arguments.get(name, "").split(",") if value]

    segments: list[Sealed] = []
    for roll, line in enumerate(case.lines):
        positions, size, sealed = line.split()
        first, end = map(int, positions.split("-"))
        sealed_ns = int(sealed.removeprefix("sealed=")) * NS_PER_MINUTE
        segments.append(Sealed(SegmentId(0, roll), first, end, int(size), sealed_ns))
    policy = RetentionPolicy(
        case.number("minutes", 0),
        case.number("limit", 0),
        case.number("disk", 0),
        case.number("hold_limit", 999),
    )
    return Log(
        tuple(segments),
        case.number("active", 0),
        policy,
        tuple(int(minute) * NS_PER_MINUTE for minute in values("clocks")),
        tuple(DiskUse(*map(int, disk.split(":"))) for disk in values("disks")),
        {name: int(position) for name, position in (hold.split(":") for hold in values("holds"))},
        case.number("members", 3),
        case.number("freed", 0),
    )


def answer(case: Case) -> str:
    log = log_of(case)
    lines = []
    gone = 0
    for plan in log.plans():
        went = log.segments[gone : gone + plan.segments]
        gone += plan.segments
        against = f", against {' and '.join(plan.overridden)}" if plan.overridden else ""
        lines.append(f"{went[0].first}-{went[-1].end} {plan.reason.name}: {plan.size_bytes} bytes{against}")
    return "\n".join(lines) or "nothing"


def test_retention_limits_trim_segments_as_listed_in_script(run_script: Callable[..., None]) -> None:
    run_script("archiver/trims.txt", answer)


# Invariants

CLOCKS = st.integers(0, 400).map(lambda minutes: minutes * NS_PER_MINUTE)
DISKS = st.builds(DiskUse, st.just(1000) | st.integers(0, 2000), st.integers(0, 1000))


@st.composite
def logs(draw: st.DrawFn) -> Log:
    members = draw(st.sampled_from((1, 3, 5)))
    segments: list[Sealed] = []
    run, roll, end, sealed_ns = 0, 0, draw(st.integers(0, 3)), 0
    for _ in range(draw(st.integers(0, 6))):
        first, end = end, end + draw(st.integers(1, 10))
        sealed_ns += draw(st.integers(1, 60)) * NS_PER_MINUTE
        segments.append(Sealed(SegmentId(run, roll), first, end, draw(st.integers(64, 400)), sealed_ns))
        run, roll = draw(st.sampled_from(((run, roll + 1), (run + 1, 0))))
    policy = RetentionPolicy(
        draw(st.sampled_from((0, 1, 30, 60, 300))),
        draw(st.sampled_from((0, 1, 500, 1500))),
        draw(st.sampled_from((0, 1, 50, 90, 100))),
        draw(st.sampled_from((0, 300, 10_000))),
    )
    return Log(
        tuple(segments),
        draw(st.integers(0, 500)),
        policy,
        tuple(draw(st.lists(CLOCKS, max_size=members))),
        tuple(draw(st.lists(DISKS, max_size=members))),
        draw(st.dictionaries(st.sampled_from("abc"), st.integers(0, 70), max_size=3)),
        members,
        draw(st.sampled_from((0, 0, 100))),
    )


@given(logs())
def test_trim_plans_remove_only_prefix_of_sealed_segments(log: Log) -> None:
    gone = 0
    for plan in log.plans():
        went = log.segments[gone : gone + plan.segments]
        gone += plan.segments
        assert len(went) == plan.segments > 0
        assert plan.size_bytes == sum(one.size_bytes for one in went)
        assert plan.up_to == went[-1].end
        assert all(plan.up_to < one.end for one in log.segments[gone:])
        wanting = {name for name, position in log.holds.items() if position < went[-1].end}
        assert set(plan.overridden) == wanting


@given(logs())
def test_trimmed_segments_exceed_limit_named_as_trim_reason(log: Log) -> None:
    gone = 0
    freed_bytes = log.freed_bytes
    for plan in log.plans():
        went = log.segments[gone : gone + plan.segments]
        before = log.segments[gone:]
        match plan.reason:
            case TrimReason.TIME:
                for one in went:
                    limit_ns = one.sealed_ns + log.policy.retention_minutes * NS_PER_MINUTE
                    assert 2 * sum(clock >= limit_ns for clock in log.clocks) > log.members
            case TrimReason.SIZE:
                kept = sum(one.size_bytes for one in before) + log.active_bytes
                assert kept - plan.size_bytes + went[-1].size_bytes > log.policy.retention_bytes > 0
            case TrimReason.DISK:
                freed = freed_bytes + plan.size_bytes - went[-1].size_bytes
                full = [too_full(log.policy, disk, freed) for disk in log.disks]
                assert 2 * sum(full) > log.members
            case _:
                raise AssertionError(plan)
        if plan.reason is not TrimReason.DISK and plan.overridden:
            # Holds are overridden only if the held segments exceed `hold_bytes_max`.
            floor = min(log.holds.values())
            held = sum(one.size_bytes for one in before if one.end > floor)
            assert held > log.policy.hold_bytes_max
        gone += plan.segments
        freed_bytes += plan.size_bytes


def too_full(policy: RetentionPolicy, disk: DiskUse, freed_bytes: int) -> bool:
    used = disk.size_bytes - disk.free_bytes - freed_bytes
    return used > disk.size_bytes * policy.retention_disk_percent // 100


@given(logs())
def test_kept_segments_exceed_age_or_size_limit_only_because_of_hold(log: Log) -> None:
    plans = log.plans()
    kept = log.segments[sum(plan.segments for plan in plans) :]
    if not kept:
        return
    expired = expired_ns(log.policy, log.clocks, log.members)
    is_old = expired is not None and kept[0].sealed_ns <= expired
    is_much = size_excess(log.policy, sum(one.size_bytes for one in kept) + log.active_bytes) > 0
    if is_old or is_much:
        assert kept[0].end > min(log.holds.values())
    freed_bytes = log.freed_bytes + sum(plan.size_bytes for plan in plans)
    assert disk_excess(log.policy, log.disks, log.members) <= freed_bytes


@given(logs())
def test_hold_within_its_limit_is_overridden_only_by_full_disk(log: Log) -> None:
    if sum(one.size_bytes for one in log.segments) <= log.policy.hold_bytes_max:
        for plan in log.plans():
            assert plan.reason is TrimReason.DISK or not plan.overridden


@given(logs(), st.sampled_from((-60, 60)))
def test_minority_of_jumped_clocks_keeps_reached_time_within_range_of_others(log: Log, minutes: int) -> None:
    """The reached time is at most the highest other clock. With a majority of others it is at least the
    lowest.
    """
    jumping = (log.members - 1) // 2
    others = log.clocks[jumping:]
    jumped = tuple(clock + minutes * NS_PER_MINUTE for clock in log.clocks[:jumping]) + others
    reached = reached_ns(jumped, log.members)
    if reached is not None:
        assert reached <= max(others)
    if len(others) >= majority_of(log.members):
        assert reached is not None
        assert reached >= min(others)


@given(logs())
def test_reports_of_minority_trim_no_segment_by_age_or_disk(log: Log) -> None:
    few = majority_of(log.members) - 1
    lonely = replace(log, clocks=log.clocks[:few], disks=log.disks[:few])
    assert {plan.reason for plan in lonely.plans()} <= {TrimReason.SIZE}


@pytest.mark.parametrize(
    "fields",
    [
        {"retention_minutes": -1},
        {"retention_bytes": -1},
        {"retention_disk_percent": -1},
        {"retention_disk_percent": 101},
        {"hold_bytes_max": -1},
    ],
    ids=str,
)
def test_retention_policy_raises_value_error_for_limit_out_of_range(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        RetentionPolicy(**fields)


def test_plan_trim_raises_assertion_error_for_segments_out_of_order() -> None:
    disordered: Sequence[Sealed] = [Sealed(SegmentId(0, roll), roll, roll + 1, 64, 0) for roll in (1, 0)]
    with pytest.raises(AssertionError):
        plan_trim(disordered, 0, RetentionPolicy(), (), (), {}, members=1)
