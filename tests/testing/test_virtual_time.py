"""The loop whose time is its own."""

import asyncio
import time

import pytest

from rt.streams.simulate import virtual_time


def test_an_hour_passes_in_no_time_and_in_order() -> None:
    seen: list[tuple[float, str]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((asyncio.get_running_loop().time(), name))

    async def main() -> None:
        await asyncio.gather(wait("late", 3600), wait("early", 0.5), asyncio.to_thread(time.monotonic))

    virtual_time.run(main())
    assert seen == [(0.5, "early"), (3600, "late")]


def test_a_wait_for_what_cannot_come_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Stuck, match="no timer is set"):
        virtual_time.run(main())


def test_what_runs_in_an_executor_raises_where_it_is_awaited() -> None:
    async def main() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        virtual_time.run(main())
