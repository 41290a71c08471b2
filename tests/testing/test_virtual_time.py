"""Tests the event loop with virtual time: sleeps end in order, and a wait without a timer raises Stuck."""

import asyncio
import time

import pytest

from rt.streams.simulate import virtual_time


def test_sleeps_up_to_one_hour_end_in_order_at_exact_virtual_times() -> None:
    seen: list[tuple[float, str]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((asyncio.get_running_loop().time(), name))

    async def main() -> None:
        await asyncio.gather(wait("late", 3600), wait("early", 0.5), asyncio.to_thread(time.monotonic))

    virtual_time.run(main())
    assert seen == [(0.5, "early"), (3600, "late")]


def test_wait_without_pending_timer_raises_stuck() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Stuck, match="no timer is set"):
        virtual_time.run(main())


def test_error_in_executor_is_raised_at_its_await() -> None:
    async def main() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        virtual_time.run(main())
