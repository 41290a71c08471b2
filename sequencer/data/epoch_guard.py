"""Whether what is in a node's data directories is of the line of epochs that the node is in.

It is looked at before anything is opened. Laws. Behind a force the cluster goes on with what one node had,
its data as well; what other directories hold may be more, or other bytes at the same places, and no checksum
tells where only sizes are compared. So a directory says of which force it is; one of another is not used.

    the file `force` beside the session copies: request of the force, 16 bytes, CRC-32C of it
"""

from __future__ import annotations

import logging
import os
import struct
from typing import Final

from crc32c import crc32c

from rt.errors import ClusterMismatch, Corrupt
from rt.log.disk import REAL, storage_errors, write_whole
from rt.log.scan.directory import is_log_directory
from sequencer.state.state import SequencerState

FILE: Final = "force"
_LAYOUT: Final = struct.Struct("<16sI")

logger = logging.getLogger("sequencer")


class EpochGuard:
    """Of one node, whose data disk of session copies is `disk`."""

    def __init__(self, node: str, disk: bytes, sessions: str, merged: str) -> None:
        """Storage errors; `rt.Corrupt` if the file cannot be read."""
        self._node, self._disk, self._sessions, self._merged = node, disk, sessions, merged
        self._path = os.path.join(sessions, FILE)
        self._known = self._read()

    def check(self, state: SequencerState) -> None:
        """See that the directories may go on with this state. Storage errors.

        `rt.ClusterMismatch` if the cluster went on without what is here. A disk that has not joined yet when
        it did has said to hold nothing: what came to it from others is set aside.
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
                    "an operator had the cluster go on without what this node's data directory holds",
                    where=os.path.dirname(self._path),
                    got=f"force {self._known.hex() or 'none'}",
                    expected=f"force {wanted.hex() or 'none'}" + (f", of {force.node}" if force else ""),
                    hint="Empty the node's Raft and data directories, and start it: it joins again.",
                )
            self._set_aside(wanted)
        with storage_errors(self._path, "noting which force the data is of"):
            write_whole(REAL, self._path, _LAYOUT.pack(wanted, crc32c(wanted)))
        self._known = wanted

    def _is_empty(self) -> bool:
        with storage_errors(self._sessions, "looking for what is here"):
            return not self._copies() and not is_log_directory(REAL, self._merged)

    def _copies(self) -> list[str]:
        return sorted(name for name in os.listdir(self._sessions) if name.isdecimal())

    def _set_aside(self, request: bytes) -> None:
        """Each is one rename: a crash between them leaves the rest for the next start."""
        aside = os.path.join(os.path.dirname(self._merged), f"before-{request.hex()}")
        with storage_errors(aside, "setting aside what is of before a force"):
            REAL.make_directory(aside)
            for path in [self._merged, *(os.path.join(self._sessions, name) for name in self._copies())]:
                if os.path.isdir(path):
                    logger.warning("quarantined_after_force path=%s aside=%s", path, aside)
                    REAL.rename(path, os.path.join(aside, os.path.basename(path)))
            for directory in (aside, self._sessions, os.path.dirname(self._merged)):
                REAL.sync_directory(directory)

    def _read(self) -> bytes:
        with storage_errors(self._path, "reading which force the data is of"):
            if REAL.size(self._path) is None:
                return b""
            file = REAL.open(self._path)
            try:
                data = file.pread(_LAYOUT.size + 1, 0)
            finally:
                file.close()
        if len(data) == _LAYOUT.size:
            known, checksum = _LAYOUT.unpack(data)
            if crc32c(known) == checksum:
                return bytes(known)
        hint = "Empty the node's Raft and data directories, and start it: it joins again."
        raise Corrupt("which force the data is of cannot be read", path=self._path, offset=0, hint=hint)
