"""A power cut for a process that was killed: what it had not synced is taken back from the real files.

The law: nothing that a sync returned for is ever taken back.
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
    """Take back, in the directory `files`, what a dead process had not synced; the number of lost changes.

    "none" leaves only what was synced, "some" what `seed` draws beside it: any writes, whole or some of their
    sectors or the size only, truncates or not, and of the changes of each name the first ones. The journal
    is empty afterwards: all that is left is durable.
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
    """Every file once, whatever names it has."""
    seen = set()
    for directory in (files, journal):
        if os.path.isdir(directory):
            for entry in list(os.scandir(directory)):
                if entry.is_file(follow_symlinks=False) and entry.inode() not in seen:
                    seen.add(entry.inode())
                    yield entry.inode(), entry.path


def _cut_file(path: str, changes: Sequence[Change], coin: random.Random, is_kept: _Coin) -> int:
    """Back to what is durable, newest change first; then make again what the draw keeps."""
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
    """A write that was under way: all of it, or the size and some of the sectors."""
    end = change.offset + len(data)
    if os.fstat(fd).st_size < end:
        os.ftruncate(fd, end)
    is_whole = coin.random() < 0.5
    for at in range(0, len(data), _SECTOR):
        if is_whole or is_kept():
            os.pwrite(fd, data[at : at + _SECTOR], change.offset + at)
    return not is_whole


def _lost_names(changes: Sequence[Change], is_kept: _Coin) -> list[Change]:
    """Newest first. A change is lost if an earlier one of the same name is."""
    names: set[str] = set()
    lost = []
    for change in changes:
        if not names.isdisjoint(change.names) or not is_kept():
            names |= change.names
            lost.append(change)
    return lost[::-1]


def _undo_name(change: Change, journal: str) -> None:
    """The process may have died between noting it and doing it."""
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
