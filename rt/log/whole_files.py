"""Files that are either complete or missing after a crash: they are written under a temporary name, synced
and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from rt.log.disk import Disk, File


def write_whole(disk: Disk, path: str, content: bytes) -> None:
    """Replace the file `path` by `content`; a crash leaves the old or the new one. Durable on return.

    Writes a temporary file, syncs it, renames it, and syncs the directory. The caller must be the only writer
    of `path`.
    """
    open_whole(disk, path, content).close()


def write_whole_among_others(disk: Disk, path: str, content: bytes) -> None:
    """Replace the file as `write_whole` does, while other threads and processes may do the same: the last
    rename wins.

    A crash may leave the temporary file of the call.
    """
    directory = os.path.dirname(path) or "."
    with disk.hold_directory(directory):
        _open_whole(disk, directory, path, content, f".{os.urandom(4).hex()}").close()


def open_whole(disk: Disk, path: str, content: bytes) -> File:
    """Replace the file as `write_whole` does, and return it, open for writing.

    Opening it afterwards could fail because no descriptor is free, although the file already has its name.
    """
    directory = os.path.dirname(path) or "."
    # Take the descriptor first: without it, a new name cannot be synced.
    with disk.hold_directory(directory):
        return _open_whole(disk, directory, path, content)


def write_new_files(disk: Disk, directory: str, contents: Sequence[tuple[str, bytes]]) -> None:
    """Write new files in the given order. No file with one of these names exists yet. Durable on return.

    A crash leaves the first files of the order, complete, and none of the later ones: each name is synced
    before the next file gets its name. After a failure none of the files exists, or `OSError` EIO is raised:
    then the directory must be recovered.
    """
    asides = [os.path.join(directory, f".{name}.new") for name, _ in contents]
    names = [os.path.join(directory, name) for name, _ in contents]
    made: list[str] = []
    with disk.hold_directory(directory):
        try:
            for aside, (_, content) in zip(asides, contents, strict=True):
                if disk.size(aside) is not None:
                    disk.remove(aside)
                file = disk.create(aside)
                made.append(aside)
                with contextlib.closing(file):
                    _fill(file, content)
            for at, (aside, name) in enumerate(zip(asides, names, strict=True)):
                disk.rename(aside, name)
                made[at] = name
                _sync_names(disk, directory)
        except OSError as error:
            if error.errno != errno.EIO:
                remove_last_first(disk, made, error)
            raise


def _fill(file: File, content: bytes) -> None:
    """Write and sync a new file."""
    if file.pwritev([content], 0) != len(content):
        raise OSError(errno.ENOSPC, "short write")
    file.sync()


def _sync_names(disk: Disk, directory: str) -> None:
    """Sync the directory. The new content is already in place, so a failure must not be reported as a full
    disk, which the caller may retry.
    """
    try:
        disk.sync_directory(directory)
    except OSError as error:
        raise OSError(errno.EIO, f"syncing the directory: {error.strerror}") from error


def remove_last_first(disk: Disk, paths: Sequence[str], why: OSError) -> None:
    """Remove files that are useless after the error `why`, the last file first: a crash meanwhile leaves the
    first ones.

    `OSError` EIO if that fails: the failure must not be reported as a full disk, which the caller may retry.
    """
    try:
        for path in reversed(paths):
            disk.remove(path)
    except OSError as error:
        raise OSError(errno.EIO, f"removing what did not fit: {error.strerror}") from why


def _open_whole(disk: Disk, directory: str, path: str, content: bytes, mark: str = "") -> File:
    aside = os.path.join(directory, f".{os.path.basename(path)}{mark}.new")
    if disk.size(aside) is not None:
        disk.remove(aside)
    file = disk.create(aside)
    try:
        try:
            _fill(file, content)
        except OSError:
            disk.remove(aside)  # On a full disk it would occupy the last free bytes.
            raise
        disk.rename(aside, path)
        _sync_names(disk, directory)
    except BaseException:
        file.close()
        raise
    return file
