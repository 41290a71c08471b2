"""The files of a store with one owner after another: each owner has a file, named by its fence.

    NAME.db             the rows of the owner with fence 0
    NAME~FENCE.db       the rows of a later owner, first copied from the owner before
    NAME~FENCE.claim    an owner with this fence has come

No owner waits for another owner, even if the other owner is paused during a commit. Invariants:
- An owner first claims its fence, and then copies the rows of the previous owner. The previous owner first
  commits, and then checks for claims. So either the copy has the commit, or the commit is not reported as
  made.
- An owner that was replaced is refused at its next write: `rt.Fenced`.
- The files of earlier owners are deleted after the copy is durable.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

from rt.errors import Fenced, InvalidOption
from rt.log.disk import REAL, storage_errors
from rt.objects.sqlite_backup import UnfinishedStore, take_over_store
from rt.objects.sqlite_store import SqliteStore

_DIGITS: Final = 20
"""Digits of the greatest fence, so that names sort in the order of the fences."""


def open_fenced(directory: str | os.PathLike[str], name: str, fence: int) -> SqliteStore:
    """Open the store `name` in `directory` for the owner with this fence, with the previous owner's rows.

    `rt.Fenced` if there is a later owner. Two owners with the same fence get `rt.DirectoryLocked`. Raises the
    errors of `SqliteStore`.
    """
    files = FencedFiles(os.path.realpath(directory), name, fence)
    files.claim()
    if not os.path.exists(files.path):
        files.take_over()
    store = SqliteStore(files.path, fence=files)
    try:
        files.remove_earlier()
    except BaseException:
        store.close()  # The next try needs its lock.
        raise
    return store


class FencedFiles:
    """The files in `directory`, for the owner with this fence."""

    def __init__(self, directory: str, name: str, fence: int) -> None:
        if fence < 0:
            raise InvalidOption("a fence must not be negative", where=name, got=fence)
        self._directory, self._name, self._fence = directory, name, fence
        own = rf"{re.escape(name)}(?:~(\d{{{_DIGITS}}}))?"
        self._pattern = re.compile(
            rf"{own}\.(?:claim|db(?:-wal|-shm|-commit|-journal|\.lock)?)|\.{own}\.db\.new"
        )
        self.path: Final = self._path_of(fence)

    def claim(self) -> None:
        """Claim the fence. From now on, earlier owners are refused."""
        self.require_current()
        if not self._fence:
            return
        claim = f"{self.path.removesuffix('.db')}.claim"
        with storage_errors(claim, "claiming an object store"):
            if not os.path.exists(claim):
                os.close(os.open(claim, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            REAL.sync_directory(self._directory)
        self.require_current()

    def newer(self) -> int | None:
        """The fence of the latest owner; None if no owner is later than this one."""
        latest = max((fence for fence, _ in self._found()), default=0)
        return latest if latest > self._fence else None

    def require_current(self) -> None:
        """Raise `rt.Fenced` if there is a later owner."""
        if (newer := self.newer()) is not None:
            raise Fenced(
                "a later owner has taken over the store",
                where=self.path,
                got=self._fence,
                expected=newer,
                hint="A balancer without leases cannot use the stores of one with leases: give it its own.",
            )

    def take_over(self) -> None:
        """Copy the rows of the previous owner, if there was one."""
        earlier = {fence for fence, _ in self._found() if fence < self._fence}
        for fence in sorted(earlier, reverse=True):
            path = self._path_of(fence)
            if os.path.exists(path):
                with contextlib.suppress(UnfinishedStore):  # It never had a commit.
                    take_over_store(path, self.path)
                    return

    def remove_earlier(self) -> None:
        """Remove the files of earlier owners. Call when this owner's file is durable."""
        with storage_errors(self._directory, "removing the files of earlier owners"):
            for fence, entry in list(self._found()):
                if fence < self._fence:
                    with contextlib.suppress(FileNotFoundError):  # A later owner removes the same files.
                        os.unlink(os.path.join(self._directory, entry))

    def _found(self) -> Iterator[tuple[int, str]]:
        """The files of all owners, with their fences."""
        with storage_errors(self._directory, "looking for owners of an object store"):
            entries = os.listdir(self._directory)
        for entry in entries:
            if (match := self._pattern.fullmatch(entry)) is not None:
                yield int(match[1] or match[2] or 0), entry

    def _path_of(self, fence: int) -> str:
        suffix = f"~{fence:0{_DIGITS}d}" if fence else ""
        return os.path.join(self._directory, f"{self._name}{suffix}.db")
