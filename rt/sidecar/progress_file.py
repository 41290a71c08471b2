"""Replication progress of a session: the file `.progress` in its directory.

One record of 64 bytes, and 16 bytes after it, overwritten by the session's push client with pwrite and read
by its publisher with pread. Not synced: a lost or torn record is written again from the nodes' answers.

    offset  bytes  field
         0      8  magic "RTPRGRSS"
         8      2  version
        10      2  state
        12      4  checksum: CRC-32C of bytes 0-11 and 16-63
        16     16  incarnation
        32      4  sequence, one higher at each write; starts again after 2**32 - 1
        36      4  X (run number) of `replicated`
        40      8  replicated: one past the last number that a majority of the nodes has synced
        48      8  merged: one past the last number whose merge is committed
        56      4  X (run number) of `merged`
        60      4  lacking: messages below `merged` that some node has not received yet
        64     16  cluster whose nodes reported the levels; zeros: not known. An earlier rt ends at byte 64. A
                   wrong byte makes a cluster that is not the session's, so no checksum covers it

Invariants:
- A level counts only for its cluster, incarnation and X. Levels are ordered by X, then number.
- A level in the file never goes back.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from rt.errors import UnknownVersion, naming_file
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.checksum import around, sealed
from rt.log.format.constants import NEWER_HINT, NUMBER_MAX, VERSION

PROGRESS_FILE: Final = ".progress"
RECORD_BYTES: Final = 64
PROGRESS_BYTES: Final = 80

_RECORD = struct.Struct("<8sHHI16sIIQQII")
_MAGIC = b"RTPRGRSS"
LACKING_MAX: Final = 2**32 - 1

_TRIES = 8
"""How often to read a record that fails its checksum: it may be read during a write."""


class PushState(IntEnum):
    RUNNING = 0
    FENCED = 1
    """The cluster rejects further data of this incarnation or run: a newer one took over."""
    REFUSED = 2
    """No node accepts this session: wrong stream, cluster, role or name. `push.log` says why."""


_STATES: Final = frozenset(PushState)


class Level(NamedTuple):
    """One past the last number of run X that has reached a state. Levels sort by X, then number."""

    run: int
    number: int


NO_LEVEL: Final = Level(0, 0)
_NO_CLUSTER: Final = bytes(16)


class ProgressRecord(Struct, frozen=True):
    """The contents of `.progress`."""

    incarnation: bytes
    replicated: Level = NO_LEVEL
    merged: Level = NO_LEVEL
    state: PushState = PushState.RUNNING
    sequence: int = 0
    lacking: int = 0
    cluster: bytes = b""
    """16 bytes; empty: not known yet, or not recorded by an earlier rt."""

    def __post_init__(self) -> None:
        if len(self.incarnation) != 16:
            raise ValueError(f"incarnation of {len(self.incarnation)} bytes: 16")
        if len(self.cluster) not in (0, 16):
            raise ValueError(f"cluster of {len(self.cluster)} bytes: 16, or none")
        for level in (self.replicated, self.merged):
            if not (0 <= level.run < 2**32 and 0 <= level.number <= NUMBER_MAX):
                raise ValueError(f"level out of range: {level}")
        if not 0 <= self.lacking <= LACKING_MAX:
            raise ValueError(f"lacking out of range: {self.lacking}")

    def is_of(self, incarnation: bytes, cluster: bytes) -> bool:
        """Whether the record counts for a session of `cluster`. If `cluster` is empty, no record counts."""
        return bool(cluster) and self.incarnation == incarnation and self.cluster in {b"", cluster}

    @property
    def deletable(self) -> Level:
        """The level up to which the publisher may delete.

        The messages below it are merged, and received by every node to which the session is being sent.
        """
        return Level(self.merged.run, max(0, self.merged.number - self.lacking))


class PublisherProgress(NamedTuple):
    """Next numbers of a publisher: to be written, synced by a majority, and merged."""

    written: int
    replicated: int
    merged: int


def encode_progress(record: ProgressRecord) -> bytes:
    sequence = record.sequence % 2**32
    run, replicated = record.replicated
    merged_run, merged = record.merged
    levels = (run, replicated, merged, merged_run, record.lacking)
    fields = (VERSION, record.state, 0, record.incarnation, sequence, *levels)
    return sealed(_RECORD.pack(_MAGIC, *fields)) + (record.cluster or _NO_CLUSTER)


def decode_progress(data: bytes) -> ProgressRecord | None:
    """The record; None if it is torn or empty. Raises `rt.UnknownVersion` if a newer rt wrote it."""
    if len(data) < RECORD_BYTES or data[:8] != _MAGIC:
        return None
    _, version, state, checksum, *fields = _RECORD.unpack_from(data)
    if checksum != around(data[:RECORD_BYTES]):
        return None
    if version != VERSION or state not in _STATES:
        raise UnknownVersion(
            "unknown version of a progress file",
            where=PROGRESS_FILE,
            got=version,
            expected=VERSION,
            hint=NEWER_HINT,
        )
    incarnation, sequence, run, replicated, merged, merged_run, lacking = fields
    cluster = data[RECORD_BYTES:PROGRESS_BYTES]
    try:
        return ProgressRecord(
            incarnation,
            Level(run, replicated),
            Level(merged_run, merged),
            PushState(state),
            sequence,
            lacking,
            cluster if any(cluster) and len(cluster) == 16 else b"",
        )
    except ValueError:
        return None


def read_progress(path: str, *, disk: Disk = REAL) -> ProgressRecord | None:
    """The record of session directory `path`; None if there is no readable one."""
    name = os.path.join(path, PROGRESS_FILE)
    with storage_errors(name, "reading progress"):
        try:
            file = disk.open(name)
        except FileNotFoundError:
            return None
        try:
            for _ in range(_TRIES):
                data = file.pread(PROGRESS_BYTES, 0)
                with naming_file(name):
                    record = decode_progress(data)
                if record is not None or not any(data):
                    return record
            return None
        finally:
            file.close()


class ProgressFile:
    """The only writer of a `.progress`; it must hold the push client's lock. Creates the file if missing.

    It continues the record of the same incarnation and `cluster`, or starts a new record. `cluster` is empty
    until the first cluster is known.
    """

    def __init__(self, path: str, incarnation: bytes, cluster: bytes, *, disk: Disk = REAL) -> None:
        self._name = os.path.join(path, PROGRESS_FILE)
        self.record = ProgressRecord(incarnation, cluster=cluster)
        known = read_progress(path, disk=disk)
        if known is not None and known.is_of(incarnation, cluster):
            self.record = replace(known, cluster=cluster)
        with storage_errors(self._name, "opening progress"):
            try:
                self._file: File = disk.open(self._name, write=True)
            except FileNotFoundError:
                self._file = disk.create(self._name)

    def set_cluster(self, cluster: bytes) -> None:
        """Set the cluster when the first node has accepted the session. This cluster reports all later
        progress.
        """
        self.record = replace(self.record, cluster=cluster)

    def write(
        self, *, replicated: Level, merged: Level, state: PushState = PushState.RUNNING, lacking: int = 0
    ) -> None:
        """Write the progress. Levels never go back. Does nothing if the record is unchanged."""
        last = self.record
        now = ProgressRecord(
            last.incarnation,
            max(last.replicated, replicated),
            max(last.merged, merged),
            state,
            last.sequence + 1,
            min(lacking, LACKING_MAX),
            last.cluster,
        )
        if replace(now, sequence=last.sequence) == last:
            return
        with storage_errors(self._name, "writing progress"):
            self._file.pwritev([encode_progress(now)], 0)
        self.record = now

    def close(self) -> None:
        self._file.close()
