"""The file `identity` in a node's directory: who this disk is.

The law: a disk that lost its identity gets no second one while a node's files are on it. A node that votes,
or counts entries as synced, on what an unknown disk holds could undo what it promised in an earlier life.
The caller holds the directory's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from rt.errors import ClusterMismatch, Damaged
from rt.log.disk import REAL, Disk, storage_errors, write_whole
from sequencer.raft.identity_format import (
    IDENTITY_BYTES,
    WIPE_HINT,
    DiskIdentity,
    decode_identity,
    encode_identity,
)
from sequencer.raft.messages import ID_BYTES, NO_ID, NOWHERE

__all__ = ["IDENTITY_FILE", "DiskIdentity", "open_identity", "store_identity"]

IDENTITY_FILE: Final = "identity"

_NODE_FILES: Final = ("log.", "snapshot.")


def _random_id() -> bytes:
    return os.urandom(ID_BYTES)


def open_identity(
    directory: str, *, stream: str, name: str, disk: Disk = REAL, new_id: Callable[[], bytes] = _random_id
) -> DiskIdentity:
    """Begin a life of the member `name` of `stream` in `directory`, both made if missing.

    Returns when the new life is durable; no two calls that returned have the same disk id and life.

    Raises `rt.Damaged` if the identity cannot be read, or is missing where there are a node's files,
    `rt.UnknownVersion`, and `rt.ClusterMismatch` if another member or stream writes here: no file is changed
    then. Raises `rt.StorageError` as `store_identity` does.
    """
    path = os.path.join(directory, IDENTITY_FILE)
    with storage_errors(directory, "opening a node's directory"):
        disk.make_directory(directory)
        names = disk.list_directory(directory)
    if IDENTITY_FILE in names:
        identity = _read(disk, path)
        _check_owner(identity, stream, name, path)
    else:
        _check_unused(names, path)
        identity = DiskIdentity(stream, name, new_id(), NO_ID, 0, NOWHERE, 0)
    identity = replace(identity, life=identity.life + 1)
    store_identity(directory, identity, disk=disk)
    return identity


def store_identity(directory: str, identity: DiskIdentity, *, disk: Disk = REAL) -> None:
    """Replace the identity; returns when the new one is durable. A crash leaves the old or the new one.

    Raises `rt.DiskFull` with the old one in place, and `rt.StorageFailed`: which of both is there is open.
    """
    path = os.path.join(directory, IDENTITY_FILE)
    with storage_errors(path, "writing the identity"):
        write_whole(disk, path, encode_identity(identity))


def _read(disk: Disk, path: str) -> DiskIdentity:
    with storage_errors(path, "reading the identity"):
        file = disk.open(path)
        try:
            data = file.pread(IDENTITY_BYTES + 1, 0)  # One more, to see a file that is too long.
        finally:
            file.close()
    return decode_identity(data, path=path)


def _check_owner(identity: DiskIdentity, stream: str, name: str, path: str) -> None:
    if (identity.stream, identity.name) != (stream, name):
        raise ClusterMismatch(
            "the directory belongs to another node",
            where=path,
            got=f"member {identity.name} of stream {identity.stream}",
            wanted=f"member {name} of stream {stream}",
            hint="Give each node a directory of its own.",
        )


def _check_unused(names: Iterable[str], path: str) -> None:
    """An identity is durable before anything else is written: where there is more, it was lost."""
    others = sorted(name for name in names if name.startswith(_NODE_FILES))
    if others:
        raise Damaged(
            "a node's directory without its identity",
            path=path,
            offset=0,
            got=", ".join(others[:4]),
            hint=WIPE_HINT,
        )
