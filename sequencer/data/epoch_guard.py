"""Checks that a node's data directories belong to the node's line of epochs, before anything is opened.

After a forced reset the cluster continues with one node's data. Other directories may hold more bytes, or
other bytes at the same offsets. A comparison of sizes does not find this. So a directory records its last
forced reset, and a directory that records another forced reset is not used.

    the file `force` beside the session replicas: request id of the forced reset, 16 bytes, and its CRC-32C
"""

from __future__ import annotations

import logging
import os
import struct
from typing import Final

from crc32c import crc32c

from rt.errors import ClusterMismatch, Corrupt
from rt.log.disk import REAL, storage_errors
from rt.log.scan.directory import is_log_directory
from rt.log.whole_files import write_whole
from sequencer.sessions.disk_id import read_checksummed
from sequencer.state.state import SequencerState

FILE: Final = "force"
_LAYOUT: Final = struct.Struct("<16sI")

logger = logging.getLogger("sequencer")


class EpochGuard:
    """The directories of one node; `disk` is the id of its disk of session replicas."""

    def __init__(self, node: str, disk: bytes, sessions: str, merged: str) -> None:
        """Storage errors; `rt.Corrupt` if the file cannot be read."""
        self._node, self._disk, self._sessions, self._merged = node, disk, sessions, merged
        self._path = os.path.join(sessions, FILE)
        self._known = self._read()

    def check(self, state: SequencerState) -> None:
        """Check that the directories may be used with this state. Storage errors.

        `rt.ClusterMismatch` if the cluster continued without this data after a forced reset. If the disk had
        not joined before that reset, it promised nothing, so its data is moved aside.
        """
        force = state.force
        wanted = b"" if force is None else force.request
        if wanted == self._known:
            return
        is_own = force is not None and force.node == self._node
        if not is_own and not self._is_empty():
            joined = state.disks.get(self._node)
            if force is None or self._known or (joined is not None and joined.id == self._disk):
                raise ClusterMismatch(
                    "a forced reset made the cluster continue without the data in this node's directory",
                    where=os.path.dirname(self._path),
                    got=f"force {self._known.hex() or 'none'}",
                    expected=f"force {wanted.hex() or 'none'}" + (f", of {force.node}" if force else ""),
                    hint="Empty the node's Raft and data directories and start it. It joins again.",
                )
            self._set_aside(wanted)
        with storage_errors(self._path, "recording the forced reset that the data belongs to"):
            write_whole(REAL, self._path, _LAYOUT.pack(wanted, crc32c(wanted)))
        self._known = wanted

    def _is_empty(self) -> bool:
        with storage_errors(self._sessions, "listing the data directories"):
            return not self._replicas() and not is_log_directory(REAL, self._merged)

    def _replicas(self) -> list[str]:
        return sorted(name for name in os.listdir(self._sessions) if name.isdecimal())

    def _set_aside(self, request: bytes) -> None:
        """Move the data aside, with one rename for each directory. After a crash the next start moves the
        rest.
        """
        aside = os.path.join(os.path.dirname(self._merged), f"before-{request.hex()}")
        with storage_errors(aside, "moving aside data from before a forced reset"):
            REAL.make_directory(aside)
            for path in [self._merged, *(os.path.join(self._sessions, name) for name in self._replicas())]:
                if os.path.isdir(path):
                    logger.warning("quarantined_after_force path=%s aside=%s", path, aside)
                    REAL.rename(path, os.path.join(aside, os.path.basename(path)))
            for directory in (aside, self._sessions, os.path.dirname(self._merged)):
                REAL.sync_directory(directory)

    def _read(self) -> bytes:
        with storage_errors(self._path, "reading the forced reset that the data belongs to"):
            if REAL.size(self._path) is None:
                return b""
            known = read_checksummed(REAL, self._path, _LAYOUT)
        if known is not None:
            return known
        hint = "Empty the node's Raft and data directories and start it. It joins again."
        raise Corrupt("the record of the last forced reset is corrupt", path=self._path, offset=0, hint=hint)
