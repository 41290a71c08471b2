"""The limit of silence of a session's publisher: the file `.max-silence` in its directory.

A publisher can promise a longest time between messages. Such a publisher writes the file when its run starts,
and removes it when it is closed in order. So the file of a publisher that was killed stays until the next run
replaces or removes it. The push client reports the limit to the nodes: see `replicator.push.silence_promise`.
Durable when the calls return.

    offset  bytes  field
         0      8  magic "RTSILENC"
         8      2  version
        10      2  0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-31
        16      4  X, run number
        20      4  0
        24      8  the limit, ms
"""

from __future__ import annotations

import os
import struct
from typing import Final, NamedTuple

from rt.errors import Corrupt, UnknownVersion
from rt.log.disk import Disk, storage_errors
from rt.log.format.checksum import around, sealed
from rt.log.format.constants import NEWER_HINT, VERSION
from rt.log.scan.directory import read_file
from rt.log.whole_files import write_whole
from rt.units import SILENCE_MS_END

SILENCE_FILE: Final = ".max-silence"

_RECORD: Final = struct.Struct("<8sHHII4xQ")
_MAGIC: Final = b"RTSILENC"
_WRITING: Final = "recording how long the publisher may be silent"


class WrittenLimit(NamedTuple):
    run: int
    milliseconds: int
    """Never 0."""


def write_silence_limit(disk: Disk, directory: str, limit: WrittenLimit | None) -> None:
    """Replace the limit of the directory, or remove it. The caller is its publisher. Raises storage
    errors.
    """
    path = os.path.join(directory, SILENCE_FILE)
    with storage_errors(path, _WRITING):
        if limit is not None:
            write_whole(disk, path, sealed(_RECORD.pack(_MAGIC, VERSION, 0, 0, *limit)))
        elif disk.size(path) is not None:
            with disk.hold_directory(directory):
                disk.remove(path)
                disk.sync_directory(directory)


def read_silence_limit(disk: Disk, directory: str) -> WrittenLimit | None:
    """The limit; None if there is none. Raises `rt.Corrupt`, `rt.UnknownVersion`, storage errors."""
    path = os.path.join(directory, SILENCE_FILE)
    data = read_file(disk, path, _RECORD.size, doing="reading how long the publisher may be silent")
    if data is None:
        return None
    whole = data if len(data) == _RECORD.size else bytes(_RECORD.size)
    magic, version, _, checksum, run, milliseconds = _RECORD.unpack(whole)
    if magic != _MAGIC or checksum != around(whole):
        raise Corrupt("not a limit of silence", path=path, offset=0, hint="Open the publisher again.")
    if version != VERSION:
        raise UnknownVersion(
            "limit of silence of an unknown version",
            where=path,
            got=version,
            expected=VERSION,
            hint=NEWER_HINT,
        )
    if not 0 < milliseconds < SILENCE_MS_END:
        raise Corrupt("an impossible limit of silence", path=path, offset=24, got=milliseconds)
    return WrittenLimit(run, milliseconds)
