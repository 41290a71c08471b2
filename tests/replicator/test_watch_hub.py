"""One watch for many log directories, in an event loop."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

import rt
from replicator import watch_hub
from replicator.watch_hub import Watched, WatchHub

WAIT_SECONDS = 30


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_SECONDS))


def directories(root: Path, count: int) -> list[Path]:
    paths = [root / f"d{number}" for number in range(count)]
    for path in paths:
        path.mkdir(parents=True)
    return paths


def inotify_fds() -> int:
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and "inotify" in os.readlink(link) for link in links)


async def quiet(*watched: Watched) -> list[int]:
    """Their versions, when all that was written before has been noticed."""
    versions: list[int] = []
    while versions != (now := [one.version for one in watched]):
        versions = now
        await asyncio.sleep(0.05)
    return versions


def test_many_directories_share_one_descriptor_and_a_change_is_its_own_directorys(tmp_path: Path) -> None:
    async def test() -> None:
        hub, before = WatchHub(), inotify_fds()
        one, two = directories(tmp_path, 2)
        with hub.watching(str(one)) as first, hub.watching(str(two)) as second:
            with hub.watching(str(one)) as again:
                assert again is first
            assert inotify_fds() == before + 1
            (one / "log.0.0").write_bytes(b"x")
            await first.changed(0)
            assert second.version == 0
            (two / "log.0.0").write_bytes(b"x")
            await second.changed(0)
            (one / ".progress").write_bytes(b"x")
            (one / "index.0.0").write_bytes(b"x")
            versions = await quiet(first, second)
            (two / "segments").write_bytes(b"x")
            await second.changed(versions[1])
            assert first.version == versions[0]
        assert inotify_fds() == before

    run(test())


def test_two_paths_to_one_directory_are_both_told_and_one_stays_when_the_other_goes(tmp_path: Path) -> None:
    async def test() -> None:
        (one,) = directories(tmp_path, 1)
        (tmp_path / "link").symlink_to(one)
        hub = WatchHub()
        with hub.watching(str(one)) as first:
            with hub.watching(str(tmp_path / "link")) as second:
                (one / "log.0.0").write_bytes(b"x")
                await first.changed(0)
                await second.changed(0)
            version = (await quiet(first))[0]
            (one / "log.0.0").write_bytes(b"y")
            await first.changed(version)

    run(test())


def test_a_directory_that_is_made_anew_is_watched_anew(tmp_path: Path) -> None:
    async def test() -> None:
        (one,) = directories(tmp_path, 1)
        hub = WatchHub()
        with hub.watching(str(one)) as before:
            one.rmdir()
            await before.changed(0)
            with pytest.raises(rt.NotALog), hub.watching(str(one)):
                pass
            directories(tmp_path, 1)
            with hub.watching(str(one)) as after:
                assert after is not before
                (one / "log.0.0").write_bytes(b"x")
                await after.changed(0)

    run(test())


def test_when_too_much_changed_at_once_all_are_told(tmp_path: Path) -> None:
    async def test() -> None:
        hub = WatchHub()
        paths = directories(tmp_path, 3)
        with hub.watching(str(paths[0])) as one, hub.watching(str(paths[1])) as two:
            overflow = watch_hub.Event(-1, int(watch_hub.flags.Q_OVERFLOW), b"")
            assert hub._told_by(overflow) == [one, two]

    run(test())


def test_without_inotify_directories_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    async def test() -> None:
        hub = WatchHub()
        one, two = directories(tmp_path, 2)
        with monkeypatch.context() as patch:
            patch.setattr(watch_hub, "INotify", exhausted)
            polled = hub.watching(str(one))
            first = polled.__enter__()
        with hub.watching(str(two)) as second:
            (one / "log.0.0").write_bytes(b"x")
            await first.changed(0)
            (two / "log.0.0").write_bytes(b"x")
            await second.changed(0)
        polled.__exit__(None, None, None)

    run(test())
