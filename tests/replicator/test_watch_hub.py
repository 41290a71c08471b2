"""One watch for many log directories, in an event loop."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from inotify_simple import Event, INotify

import rt
from replicator.send import directory_watch
from replicator.send.directory_watch import WatchedDirectory, WatchHub

WAIT_SECONDS = 120


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_SECONDS))


def directories(root: Path, count: int) -> list[Path]:
    paths = [root / f"d{number}" for number in range(count)]
    for path in paths:
        path.mkdir(parents=True)
    return paths


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[INotify]:
    """The watches that hubs create, oldest first. Other threads of this process have their own list."""
    made: list[INotify] = []
    real = directory_watch.INotify
    monkeypatch.setattr(
        directory_watch, "INotify", lambda **options: made.append(real(**options)) or made[-1]
    )
    return made


async def quiet(*watched: WatchedDirectory) -> list[int]:
    """Wait until all earlier writes have been noticed. Return the versions of the directories."""
    versions: list[int] = []
    while versions != (now := [one.version for one in watched]):
        versions = now
        await asyncio.sleep(0.05)
    return versions


def test_directories_share_one_watch_and_get_only_their_own_changes(
    tmp_path: Path, watches: list[INotify]
) -> None:
    async def test() -> None:
        hub = WatchHub()
        one, two = directories(tmp_path, 2)
        with hub.watching(str(one)) as first, hub.watching(str(two)) as second:
            with hub.watching(str(one)) as again:
                assert again is first
            assert [one.closed for one in watches] == [False]
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
        assert [one.closed for one in watches] == [True]

    run(test())


def test_two_paths_of_same_directory_are_both_notified_and_one_survives_release_of_other(
    tmp_path: Path,
) -> None:
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


def test_recreated_directory_gets_new_watch(tmp_path: Path) -> None:
    async def test() -> None:
        (one,) = directories(tmp_path, 1)
        hub = WatchHub()
        with hub.watching(str(one)) as before:
            one.rmdir()
            await before.changed(0)
            with pytest.raises(rt.LogNotFound), hub.watching(str(one)):
                pass
            directories(tmp_path, 1)
            with hub.watching(str(one)) as after:
                assert after is not before
                (one / "log.0.0").write_bytes(b"x")
                await after.changed(0)

    run(test())


def test_queue_overflow_affects_all_watched_directories(tmp_path: Path) -> None:
    async def test() -> None:
        hub = WatchHub()
        paths = directories(tmp_path, 3)
        with hub.watching(str(paths[0])) as one, hub.watching(str(paths[1])) as two:
            overflow = Event(-1, int(directory_watch.flags.Q_OVERFLOW), 0, "")
            assert hub._affected_by(overflow) == [one, two]

    run(test())


def test_directory_is_polled_if_inotify_is_exhausted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    async def test() -> None:
        hub = WatchHub()
        one, two = directories(tmp_path, 2)
        with monkeypatch.context() as patch:
            patch.setattr(directory_watch, "INotify", exhausted)
            polled = hub.watching(str(one))
            first = polled.__enter__()
        with hub.watching(str(two)) as second:
            (one / "log.0.0").write_bytes(b"x")
            await first.changed(0)
            (two / "log.0.0").write_bytes(b"x")
            await second.changed(0)
        polled.__exit__(None, None, None)

    run(test())


def test_created_removed_and_renamed_files_are_changes_while_writes_are_ignored(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        hub = WatchHub()
        (one,) = directories(tmp_path, 1)
        (one / "log.0.0").touch()
        with hub.watching(str(one)) as watched:
            hub.listen(watched, to_writes=False)
            for changing in (
                lambda: (one / "log.0.1").touch(),
                lambda: (one / "log.0.1").rename(one / "log.0.2"),
                lambda: (one / "log.0.2").unlink(),
            ):
                (one / "log.0.0").write_bytes(b"unheard")
                (before,) = await quiet(watched)
                changing()
                await watched.changed(before)
            (unheard,) = await quiet(watched)
            (one / "log.0.0").write_bytes(b"more")
            assert await quiet(watched) == [unheard]
            hub.listen(watched, to_writes=True)
            (one / "log.0.0").write_bytes(b"heard")
            await watched.changed(unheard)

    run(test())


def test_directory_with_second_user_keeps_listening_to_writes(tmp_path: Path) -> None:
    async def test() -> None:
        hub = WatchHub()
        (one,) = directories(tmp_path, 1)
        (tmp_path / "link").symlink_to(one)
        for other in (str(one), str(tmp_path / "link")):
            with hub.watching(str(one)) as watched:
                hub.listen(watched, to_writes=False)  # Holds until a second user exists.
                with hub.watching(other) as again:
                    hub.listen(watched, to_writes=False)
                    before = again.version
                    (one / "log.0.0").write_bytes(b"x")
                    await again.changed(before)

    run(test())


@pytest.mark.parametrize("is_made_again", [False, True])
def test_directory_removal_is_reported_when_listening_to_writes_stops(
    tmp_path: Path, *, is_made_again: bool
) -> None:
    async def test() -> None:
        hub = WatchHub()
        (one,) = directories(tmp_path, 1)
        with hub.watching(str(one)) as watched:
            one.rename(tmp_path / "moved")
            if is_made_again:
                one.mkdir()
            (before,) = await quiet(watched)
            hub.listen(watched, to_writes=False)
            assert watched.version == before + 1
            with hub.watching(str(tmp_path / "moved")) as moved:
                (before,) = await quiet(watched)
                (one.with_name("moved") / "log.0.0").write_bytes(b"x")
                await moved.changed(0)

    run(test())


def test_directory_moved_away_when_listening_resumes_reports_writes_after_its_return(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        hub = WatchHub()
        (one,) = directories(tmp_path, 1)
        (one / "log.0.0").touch()
        with hub.watching(str(one)) as watched:
            hub.listen(watched, to_writes=False)
            one.rename(tmp_path / "moved")
            hub.listen(watched, to_writes=True)
            (tmp_path / "moved").rename(one)
            (before,) = await quiet(watched)
            (one / "log.0.0").write_bytes(b"x")
            await watched.changed(before)

    run(test())


def test_recreated_directory_is_not_silenced_by_user_of_old_one(tmp_path: Path) -> None:
    async def test() -> None:
        hub = WatchHub()
        (one,) = directories(tmp_path, 1)
        with hub.watching(str(one)) as old:
            one.rename(tmp_path / "moved")
            one.mkdir()
            await old.changed(0)
            with hub.watching(str(one)) as new:
                assert new is not old
                hub.listen(old, to_writes=False)
                (one / "log.0.0").touch()
                (before,) = await quiet(new)
                (one / "log.0.0").write_bytes(b"x")
                await new.changed(before)

    run(test())


def test_polled_directory_is_still_polled_without_listening_to_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(**_: object) -> INotify:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(directory_watch, "INotify", exhausted)

    async def test() -> None:
        (one,) = directories(tmp_path, 1)
        hub = WatchHub()
        with hub.watching(str(one)) as watched:
            hub.listen(watched, to_writes=False)
            (one / "log.0.0").write_bytes(b"x")
            await watched.changed(0)

    run(test())
