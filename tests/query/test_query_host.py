"""Hosts of one engine, with leases in memory: ownership, the end of the engine, and errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from memory_leases import LeaseTable, MemoryLeases

import rt
from rt.objects import CommitUnknown, StoreUnavailable
from rt.query.host import QueryHost
from rt.streams.balancer.lease import LeaseAnswer, LeaseResult, LeaseTimes

WAIT_S = 60.0
TIMES = LeaseTimes(lease_s=1.0, look_s=0.02)
"""The shortest lease there is."""


class Host:
    """A host that records the events of its engine. `work` is the action of one round."""

    def __init__(self, table: LeaseTable, name: str, work: Callable[[Host], None] | None = None) -> None:
        self.notes: list[str] = []
        self.rounds = 0
        self.stop = threading.Event()
        self.leases = MemoryLeases(table, name)
        self.host = QueryHost(self.leases, "sums", self._build, times=TIMES)
        self._work = work or (lambda _: None)

    def _build(self, fence: int, stack: ExitStack) -> Any:
        self.notes.append(f"made {fence}")
        stack.callback(self.notes.append, "closed")
        return self

    def run(self, until: Callable[[], bool]) -> None:
        """Behave like `EngineRunner.run`: save only if `until` did not raise."""
        while not until():
            self.rounds += 1
            self._work(self)
            time.sleep(0.005)
        self.notes.append("saved")

    def running(self) -> Awaitable[None]:
        return self.host._run(self.stop.is_set)


def table() -> LeaseTable:
    return LeaseTable(time.monotonic)


async def met(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_standby_takes_over_after_owner_stops_cleanly() -> None:
    leases = table()
    first, second = Host(leases, "a"), Host(leases, "b")

    async def main() -> None:
        one = asyncio.ensure_future(first.running())
        await met(lambda: first.rounds)
        two = asyncio.ensure_future(second.running())
        await met(lambda: second.host.owner == "a")
        assert second.notes == []
        first.stop.set()
        await one
        await met(lambda: second.rounds)
        assert second.host.owner == "b"
        second.stop.set()
        await two

    asyncio.run(main())
    assert first.notes == ["made 1", "saved", "closed"]
    assert second.notes == ["made 2", "saved", "closed"]
    assert leases.held("") == {}


def test_engine_ends_without_checkpoint_if_another_host_acquires_its_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leases = table()
    host = Host(leases, "a")

    async def main() -> None:
        running = asyncio.ensure_future(host.running())
        await met(lambda: host.rounds)
        assert leases.release("sums", "a", 1)
        assert leases.acquire("sums", "b", 3600.0) == 2
        await met(lambda: host.host.owner == "b")
        host.stop.set()
        await running

    asyncio.run(main())
    assert host.notes == ["made 1", "closed"]
    assert "engine_fenced lease=sums token=1" in caplog.text
    assert [name for name, holder in leases.held("").items() if holder.owner == "b"] == ["sums"]


def test_engine_ends_without_checkpoint_if_its_lease_cannot_be_renewed() -> None:
    leases = table()
    host = Host(leases, "a")

    async def unknown(asked: Sequence[Any]) -> Sequence[LeaseAnswer]:
        return [LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)] * len(asked)

    async def main() -> None:
        host.leases.renew = unknown  # type: ignore[method-assign]
        running = asyncio.ensure_future(host.running())
        await met(lambda: host.notes[:2] == ["made 1", "closed"])
        host.stop.set()
        await running

    asyncio.run(main())
    assert host.notes[:2] == ["made 1", "closed"]


def test_round_does_not_start_after_lease_has_expired_by_the_clock() -> None:
    """This holds even if the event loop, which detects the expiry, has not run: both were paused."""
    now = [0.0]
    leases = LeaseTable(lambda: now[0])

    def paused(host: Host) -> None:
        now[0] += 3600.0
        host.stop.set()

    host = Host(leases, "a", paused)
    asyncio.run(asyncio.wait_for(host.running(), WAIT_S))  # type: ignore[arg-type]
    assert (host.rounds, host.notes) == (1, ["made 1", "closed"])


@pytest.mark.parametrize(
    "error",
    [rt.Fenced("an owner"), StoreUnavailable("no answer"), CommitUnknown("lost"), rt.Timeout("late")],
)
def test_host_specific_error_releases_lease_to_standby(error: rt.RtError) -> None:
    leases = table()

    def fail(_: Host) -> None:
        raise error

    first, second = Host(leases, "a", fail), Host(leases, "b")

    async def main() -> None:
        one = asyncio.ensure_future(first.running())
        await met(lambda: first.rounds)
        two = asyncio.ensure_future(second.running())
        await met(lambda: second.rounds)
        assert not one.done()
        await met(lambda: first.host.owner == "b")
        for host in (first, second):
            host.stop.set()
        await asyncio.gather(one, two)

    asyncio.run(main())
    assert "saved" not in first.notes
    assert second.notes[-2:] == ["saved", "closed"]


def test_permanent_error_is_raised_and_releases_lease() -> None:
    leases = table()

    def fail(_: Host) -> None:
        raise KeyError("price")

    host = Host(leases, "a", fail)
    with pytest.raises(KeyError):
        host.host.run(host.stop.is_set)
    assert host.notes == ["made 1", "closed"]
    assert leases.held("") == {}


def test_lease_acquired_by_unanswered_request_is_acquired_again() -> None:
    leases = table()
    host = Host(leases, "a")
    acquire = host.leases.acquire

    async def unanswered(names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        await acquire(names, 3600.0)
        host.leases.acquire = acquire  # type: ignore[method-assign]
        return [LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)]

    async def main() -> None:
        host.leases.acquire = unanswered  # type: ignore[method-assign]
        running = asyncio.ensure_future(host.running())
        await met(lambda: host.rounds)
        host.stop.set()
        await running

    asyncio.run(main())
    assert host.notes == ["made 2", "saved", "closed"]


def test_restarted_process_with_the_same_owner_takes_over_its_lease() -> None:
    leases = table()
    assert leases.acquire("sums", "a", 3600.0) == 1
    host = Host(leases, "a")

    async def main() -> None:
        running = asyncio.ensure_future(host.running())
        await met(lambda: host.rounds)
        host.stop.set()
        await running

    asyncio.run(main())
    assert host.notes == ["made 2", "saved", "closed"]


def test_cancelled_host_saves_closes_and_releases_lease() -> None:
    leases = table()
    host = Host(leases, "a")

    async def main() -> None:
        running = asyncio.ensure_future(host.running())
        await met(lambda: host.rounds)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert host.notes == ["made 1", "saved", "closed"]
    assert leases.held("") == {}


def test_invalid_lease_name_raises_invalid_name() -> None:
    with pytest.raises(rt.InvalidName):
        QueryHost(MemoryLeases(table(), "a"), "no/../", Host(table(), "a")._build)
