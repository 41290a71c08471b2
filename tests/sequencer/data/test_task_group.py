"""Tasks of the data process: failures that end the process, and cancellation at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rt.errors import DiskFull, RtError
from sequencer.data import task_group
from sequencer.data.task_group import TaskGroup


async def raises(error: BaseException) -> None:
    raise error


def run(play: Callable[[TaskGroup], Awaitable[None]]) -> TaskGroup:
    async def within() -> TaskGroup:
        async with asyncio.timeout(60):
            tasks = TaskGroup()
            await play(tasks)
            await tasks.cancel()
            return tasks

    return asyncio.run(within())


def test_failure_of_kept_task_ends_process():
    async def play(tasks: TaskGroup) -> None:
        tasks.keep(raises(DiskFull("no room")))
        await tasks.stopping.wait()

    assert isinstance(run(play).failure, DiskFull)


def test_failure_of_spawned_task_is_logged_and_does_not_end_process(caplog):
    async def play(tasks: TaskGroup) -> None:
        tasks.spawn(raises(DiskFull("no room")))
        while tasks._tasks:
            await asyncio.sleep(0)
        assert not tasks.stopping.is_set()

    assert run(play).failure is None
    assert "task_failed" in caplog.text


@pytest.mark.parametrize("start", [TaskGroup.keep, TaskGroup.spawn])
def test_unexpected_exception_in_any_task_ends_process(start):
    async def play(tasks: TaskGroup) -> None:
        start(tasks, raises(KeyError("a slip")))
        await tasks.stopping.wait()

    assert "KeyError" in str(run(play).failure)


def test_first_failure_is_reported():
    async def play(tasks: TaskGroup) -> None:
        for what in ("first", "second"):
            tasks.fail(RtError(what))

    assert str(run(play).failure) == "first"


def test_running_task_is_cancelled_at_end():
    ended: list[bool] = []

    async def play(tasks: TaskGroup) -> None:
        async def works() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        tasks.keep(works())
        await asyncio.sleep(0)

    assert run(play).failure is None
    assert ended == [True]


def test_task_is_cancelled_again_after_lost_cancellation(monkeypatch):
    monkeypatch.setattr(task_group, "CANCEL_AGAIN_S", 0.001)
    lost: list[int] = []

    async def play(tasks: TaskGroup) -> None:
        async def works() -> None:
            while len(lost) < 3:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    lost.append(1)
            await asyncio.Event().wait()

        tasks.keep(works())
        await asyncio.sleep(0)

    assert run(play).failure is None
    assert len(lost) == 3
