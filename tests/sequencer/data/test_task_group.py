"""Tasks of the data process: which failures end it."""

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


def test_work_that_must_go_on_for_ever_ends_the_process_with_it():
    async def play(tasks: TaskGroup) -> None:
        tasks.keep(raises(DiskFull("no room")))
        await tasks.stopping.wait()

    assert isinstance(run(play).failure, DiskFull)


def test_work_beside_the_rest_may_fail_by_itself(caplog):
    async def play(tasks: TaskGroup) -> None:
        tasks.spawn(raises(DiskFull("no room")))
        while tasks._tasks:
            await asyncio.sleep(0)
        assert not tasks.stopping.is_set()

    assert run(play).failure is None
    assert "task_failed" in caplog.text


@pytest.mark.parametrize("start", [TaskGroup.keep, TaskGroup.spawn])
def test_whatever_is_broken_ends_the_process(start):
    async def play(tasks: TaskGroup) -> None:
        start(tasks, raises(KeyError("a slip")))
        await tasks.stopping.wait()

    assert "KeyError" in str(run(play).failure)


def test_the_first_failure_is_the_one_that_is_told():
    async def play(tasks: TaskGroup) -> None:
        for what in ("first", "second"):
            tasks.fail(RtError(what))

    assert str(run(play).failure) == "first"


def test_what_is_still_at_work_is_cancelled_in_the_end():
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


def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch):
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
