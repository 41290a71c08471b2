"""How far a session has been replicated: the file `.progress` in its directory.

One 64-byte record, overwritten by the session's push client with pwrite and read by its publisher with pread.
It is not synced: a lost or torn one is written again from what the nodes say.

    offset  bytes  field
         0      8  magic "RTPRGRSS"
         8      2  version
        10      2  state
        12      4  checksum: CRC-32C of bytes 0-11 and 16-63
        16     16  incarnation
        32      4  sequence, one higher at each write; starts again after 2**32 - 1
        36      4  X of the next field
        40      8  replicated: one past the last number that a majority of the nodes has synced
        48      8  merged: one past the last number whose merge is committed
        56      4  X of that
        60      4  lacking: numbers below `merged` that a node lacks which is being sent them

Laws. A level counts only for the incarnation and the X that it names; of two, the one of the higher X is the
further one. A level that was written never goes back.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple

from rt.errors import UnknownVersion
from rt.log.checksum import around, sealed
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.layout import NEWER_HINT, NUMBER_MAX, VERSION

PROGRESS_FILE: Final = ".progress"
PROGRESS_BYTES: Final = 64

_RECORD = struct.Struct("<8sHHI16sIIQQII")
_MAGIC = b"RTPRGRSS"
LACKING_MAX: Final = 2**32 - 1

_TRIES = 8
"""How often a record that fails is read: its writer may be in the middle of it."""


class PushState(IntEnum):
    """What the push client of a session is doing."""

    RUNNING = 0
    FENCED = 1
    """The cluster takes no more bytes of this incarnation, or of its X: a newer one took over."""
    REFUSED = 2
    """No node takes this session: another stream, cluster, role or name. The push client's log says why."""


_STATES: Final = frozenset(PushState)


class Level(NamedTuple):
    """One past the last number of X that has come so far. Levels sort by X, then number."""

    x: int
    number: int


NO_LEVEL: Final = Level(0, 0)


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """What `.progress` says."""

    incarnation: bytes
    replicated: Level = NO_LEVEL
    merged: Level = NO_LEVEL
    state: PushState = PushState.RUNNING
    sequence: int = 0
    lacking: int = 0

    def __post_init__(self) -> None:
        if len(self.incarnation) != 16:
            raise ValueError(f"incarnation of {len(self.incarnation)} bytes: 16")
        for level in (self.replicated, self.merged):
            if not (0 <= level.x < 2**32 and 0 <= level.number <= NUMBER_MAX):
                raise ValueError(f"level out of range: {level}")
        if not 0 <= self.lacking <= LACKING_MAX:
            raise ValueError(f"lacking out of range: {self.lacking}")

    @property
    def deletable(self) -> Level:
        """Up to where the publisher may delete: it is merged, and no node that is being sent it lacks it."""
        return Level(self.merged.x, max(0, self.merged.number - self.lacking))


class Progress(NamedTuple):
    """Next numbers of a publisher: what it has taken, what a majority has synced, what is merged."""

    written: int
    replicated: int
    merged: int


def encode_progress(record: ProgressRecord) -> bytes:
    """The 64 bytes of a record."""
    sequence = record.sequence % 2**32
    x, replicated = record.replicated
    merged_x, merged = record.merged
    levels = (x, replicated, merged, merged_x, record.lacking)
    fields = (VERSION, record.state, 0, record.incarnation, sequence, *levels)
    return sealed(_RECORD.pack(_MAGIC, *fields))


def decode_progress(data: bytes) -> ProgressRecord | None:
    """The record; None if it is torn, or none at all. `rt.UnknownVersion` if a newer rt wrote it."""
    if len(data) < PROGRESS_BYTES or data[:8] != _MAGIC:
        return None
    _, version, state, checksum, *fields = _RECORD.unpack_from(data)
    if checksum != around(data[:PROGRESS_BYTES]):
        return None
    if version != VERSION or state not in _STATES:
        raise UnknownVersion(
            "progress of an unknown version",
            where=PROGRESS_FILE,
            got=version,
            wanted=VERSION,
            hint=NEWER_HINT,
        )
    incarnation, sequence, x, replicated, merged, merged_x, lacking = fields
    try:
        return ProgressRecord(
            incarnation, Level(x, replicated), Level(merged_x, merged), PushState(state), sequence, lacking
        )
    except ValueError:
        return None


def read_progress(path: str, *, disk: Disk = REAL) -> ProgressRecord | None:
    """What the `.progress` of the session directory `path` says; None if there is nothing (readable)."""
    name = os.path.join(path, PROGRESS_FILE)
    with storage_errors(name, "reading progress"):
        try:
            file = disk.open(name)
        except FileNotFoundError:
            return None
        try:
            for _ in range(_TRIES):
                data = file.pread(PROGRESS_BYTES, 0)
                record = decode_progress(data)
                if record is not None or not any(data):
                    return record
            return None
        finally:
            file.close()


class ProgressFile:
    """The one writer of a `.progress`, which must hold the push client's lock. Made if it is missing."""

    def __init__(self, path: str, incarnation: bytes, *, disk: Disk = REAL) -> None:
        self._name = os.path.join(path, PROGRESS_FILE)
        self.record = ProgressRecord(incarnation)
        known = read_progress(path, disk=disk)
        if known is not None and known.incarnation == incarnation:
            self.record = known
        with storage_errors(self._name, "opening progress"):
            try:
                self._file: File = disk.open(self._name, write=True)
            except FileNotFoundError:
                self._file = disk.create(self._name)

    def write(
        self, *, replicated: Level, merged: Level, state: PushState = PushState.RUNNING, lacking: int = 0
    ) -> None:
        """Say how far it is; a level that would go back stays. Nothing is written where nothing changed."""
        last = self.record
        now = ProgressRecord(
            last.incarnation,
            max(last.replicated, replicated),
            max(last.merged, merged),
            state,
            last.sequence + 1,
            min(lacking, LACKING_MAX),
        )
        if replace(now, sequence=last.sequence) == last:
            return
        with storage_errors(self._name, "writing progress"):
            self._file.pwritev([encode_progress(now)], 0)
        self.record = now

    def close(self) -> None:
        """Release the file."""
        self._file.close()
