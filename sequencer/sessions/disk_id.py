"""The file `disk` in the directory of session replicas: the id of the disk.

Invariant: the id is durable before the first replica is, and is lost together with the replicas. So a node
with a new id has lost bytes that it reported, and does not count for the ends of runs that were open then.
    0  id        16 bytes, random
   16  checksum  u32, CRC-32C of the id
   20  zeros
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from typing import Final

from rt.errors import Corrupt
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.checksum import crc32c
from rt.log.whole_files import write_whole
from sequencer.state.commands import DISK_BYTES

DISK_FILE: Final = "disk"

_LAYOUT: Final = struct.Struct(f"<{DISK_BYTES}sI4x")


def _random_id() -> bytes:
    return os.urandom(DISK_BYTES)


def open_disk_id(directory: str, *, disk: Disk = REAL, new_id: Callable[[], bytes] = _random_id) -> bytes:
    """Return the id of the disk that `directory` is on, durable; create it if it is missing.

    `rt.Corrupt` if it cannot be read; storage errors.
    """
    path = os.path.join(directory, DISK_FILE)
    with storage_errors(path, "reading the disk id"):
        disk.make_directory(directory)
        if DISK_FILE in disk.list_directory(directory):
            known = _read(disk, path)
            disk.sync_directory(directory)  # The process that created it may have crashed before this.
        else:
            known = new_id()
            write_whole(disk, path, _LAYOUT.pack(known, crc32c(known)))
        disk.sync_directory(os.path.dirname(directory))
    return known


def forget_disk_id(directory: str, *, disk: Disk = REAL) -> None:
    """Delete the id because data on the disk was lost; the next start creates another. Durable on return."""
    with storage_errors(directory, "deleting the disk id"):
        if DISK_FILE in disk.list_directory(directory):
            disk.remove(os.path.join(directory, DISK_FILE))
        disk.sync_directory(directory)


def _read(disk: Disk, path: str) -> bytes:
    known = read_checksummed(disk, path, _LAYOUT)
    if known is not None:
        return known
    raise Corrupt(
        "the disk id cannot be read",
        path=path,
        offset=0,
        got=f"{disk.size(path)} bytes",
        hint="If the disk is sound, remove the file. The node's session replicas count again once complete.",
    )


def read_checksummed(disk: Disk, path: str, layout: struct.Struct) -> bytes | None:
    """The id in a file that holds an id and its CRC-32C; None if the file holds anything else. `OSError`."""
    with contextlib.closing(disk.open(path)) as file:
        data = file.pread(layout.size + 1, 0)
    if len(data) != layout.size:
        return None
    known, checksum = layout.unpack(data)
    return bytes(known) if crc32c(known) == checksum else None
