"""A power cut for a killed process: its unsynced changes of the real files are undone.

Invariant: a change is never undone after the sync that covers it has returned.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

from chaos.power_journal import Change, pending

Keep: TypeAlias = Literal["none", "some"]
_Coin: TypeAlias = Callable[[], bool]

_SECTOR: Final = 512


def cut_power(files: str, journal: str, keep: Keep, seed: int = 0) -> int:
    """Undo the unsynced changes of a dead process in the directory `files`. Return how many were lost.

    "none" keeps only synced changes. "some" also keeps changes that `seed` draws: a write as a whole, some of
    its sectors or only its size; a truncate or not; and for each name, its first changes. The journal is
    empty afterwards, because all remaining changes are durable.
    """
    journal = os.path.abspath(journal)
    changes = pending(journal)
    coin = random.Random(seed)

    def is_kept() -> bool:
        return keep == "some" and coin.random() < 0.5

    lost = 0
    by_inode: dict[int, list[Change]] = {}
    for change in changes:
        if change.inode:
            by_inode.setdefault(change.inode, []).append(change)
    for inode, path in _paths(files, journal):
        lost += _cut_file(path, by_inode.pop(inode, []), coin, is_kept)
    for change in _lost_names([change for change in changes if change.names], is_kept):
        _undo_name(change, journal)
        lost += 1
    for name in os.listdir(journal):
        os.unlink(os.path.join(journal, name))
    return lost


def _paths(files: str, journal: str) -> Iterator[tuple[int, str]]:
    """Yield every file once, even if it has several names."""
    seen = set()
    for directory in (files, journal):
        if os.path.isdir(directory):
            for entry in list(os.scandir(directory)):
                if entry.is_file(follow_symlinks=False) and entry.inode() not in seen:
                    seen.add(entry.inode())
                    yield entry.inode(), entry.path


def _cut_file(path: str, changes: Sequence[Change], coin: random.Random, is_kept: _Coin) -> int:
    """Undo all unsynced changes, newest first. Then redo those that the draw keeps. Return the number of lost
    changes.
    """
    if not changes:
        return 0
    fd, done, lost = os.open(path, os.O_RDWR), [], 0
    try:
        for change in reversed(changes):
            done.append(os.pread(fd, change.length, change.offset) if change.kind == "write" else b"")
            at = change.offset if change.kind == "write" else change.length
            os.ftruncate(fd, change.size)
            if change.old:
                os.pwrite(fd, change.old, at)
        for change, data in zip(changes, reversed(done), strict=True):
            if not is_kept():
                lost += 1
            elif change.kind == "truncate":
                os.ftruncate(fd, change.length)
            else:
                lost += _write_some(fd, change, data, coin, is_kept)
    finally:
        os.close(fd)
    return lost


def _write_some(fd: int, change: Change, data: bytes, coin: random.Random, is_kept: _Coin) -> int:
    """Redo a write: all of it, or its size and some of its sectors. Return whether it counts as lost."""
    end = change.offset + len(data)
    if os.fstat(fd).st_size < end:
        os.ftruncate(fd, end)
    is_whole = coin.random() < 0.5
    for at in range(0, len(data), _SECTOR):
        if is_whole or is_kept():
            os.pwrite(fd, data[at : at + _SECTOR], change.offset + at)
    return not is_whole


def _lost_names(changes: Sequence[Change], is_kept: _Coin) -> list[Change]:
    """Return the lost changes of names, newest first. A change is also lost if an earlier one of the same
    name is.
    """
    names: set[str] = set()
    lost = []
    for change in changes:
        if not names.isdisjoint(change.names) or not is_kept():
            names |= change.names
            lost.append(change)
    return lost[::-1]


def _undo_name(change: Change, journal: str) -> None:
    """Undo a change of a name. The process may have died after it recorded the change and before it made
    it.
    """
    kept = os.path.join(journal, change.kept) if change.kept else ""
    if change.kind == "create":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(change.path)
    elif change.kind == "remove":
        if not os.path.lexists(change.path):
            os.link(kept, change.path)
    elif not os.path.lexists(change.path):
        os.rename(change.target, change.path)
        if kept:
            os.link(kept, change.target)
