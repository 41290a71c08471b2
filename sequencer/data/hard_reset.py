"""Hard resets of a node's files: session replicas are deleted, and the whole merged log is trimmed.

This happens when the data process starts, before it opens anything. A running data process that learns of a
hard reset ends and is started again. The merged log is trimmed first, which makes room on a full disk. Then
the messages that are deleted although they were not merged are recorded durably. The completion of the reset
is recorded last. So after a crash the next start finishes the reset and deletes nothing newer.

    the file `cleared` beside the session replicas, JSON:
    {"epoch", "is_done", "dropped": [[session, id, X, first, end], ...]}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import Struct

from rt.errors import Corrupt, DiskFull, RtError, TooManyFiles
from rt.log.disk import REAL, storage_errors
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.read.reader import LogReader
from rt.log.scan.directory import is_log_directory, list_segments, read_durable_end
from rt.log.whole_files import write_whole
from rt.log.write.writer import LogWriter
from sequencer.sessions.merge_progress import consumed_number
from sequencer.state.state import ClearedRange, SequencerState

FILE: Final = "cleared"

logger = logging.getLogger("sequencer")


class DroppedRange(NamedTuple):
    """Numbers `first` to `end` of a session's run that were durable on this node and not merged."""

    session: str
    session_id: int
    run: int
    first: int
    end: int


class HardResetRecord(Struct, frozen=True):
    """The last hard reset of the directory."""

    epoch: int = 0
    is_done: bool = True
    dropped: tuple[DroppedRange, ...] = ()


class HardResetter:
    """Executes hard resets on a node's directories. Nothing else may have them open."""

    def __init__(self, sessions: str, merged: str, stream: str) -> None:
        """Storage errors; `rt.Corrupt` if the file cannot be read."""
        self._sessions, self._merged, self._stream = sessions, merged, stream
        self._path = os.path.join(sessions, FILE)
        self.done = self._read()

    def merged_end(self) -> int:
        """The position up to which this node has merged, as far as its directory shows it. Storage errors."""
        durable = read_durable_end(REAL, self._merged)
        return 0 if durable is None else durable.end

    def is_due(self, state: SequencerState) -> bool:
        """Whether the cluster had a hard reset that was not executed on these directories."""
        done = self.done
        return state.cleared is not None and (done.epoch, done.is_done) < (state.cleared.epoch, True)

    def clear(self, state: SequencerState) -> None:
        """Execute the state's last hard reset; durable on return. Storage errors."""
        cleared = state.cleared
        assert cleared is not None
        self._trim(state.cluster, cleared)
        if self.done.epoch < cleared.epoch:
            found = {(one.session_id, one.run): one for one in self._unmerged(state, cleared)}
            # Include the messages that an earlier, unfinished reset has deleted here.
            before = () if self.done.is_done else self.done.dropped
            both = {(one.session_id, one.run): one for one in before} | found
            self._record(HardResetRecord(cleared.epoch, False, tuple(both.values())))
        for dropped in self.done.dropped:
            logger.warning(
                "reset_dropped session=%s id=%d run=%d first=%d end=%d",
                *(dropped.session, dropped.session_id, dropped.run, dropped.first, dropped.end),
            )
        with storage_errors(self._sessions, "deleting session replicas"):
            for session_id in self._older(cleared):
                shutil.rmtree(os.path.join(self._sessions, str(session_id)))
            REAL.sync_directory(self._sessions)
        self._record(HardResetRecord(cleared.epoch, True, self.done.dropped))

    def _older(self, cleared: ClearedRange) -> list[int]:
        names = os.listdir(self._sessions)
        return sorted(int(name) for name in names if name.isdecimal() and int(name) < cleared.session_id)

    def _unmerged(self, state: SequencerState, cleared: ClearedRange) -> Iterator[DroppedRange]:
        """The durable messages after the merged end of each session."""
        for session_id in self._older(cleared):
            session = state.sessions.get(session_id)
            if session is None:
                continue
            first = consumed_number(session) or 0
            end = self._end_of(os.path.join(self._sessions, str(session_id)))
            if end > first:
                yield DroppedRange(session.name, session_id, session.fenced_end - 1, first, end)

    def _end_of(self, path: str) -> int:
        try:
            with LogReader(path, position="latest", on_event=lambda _: None) as reader:
                return reader.position
        except RtError as error:
            logger.error("dropped_copy_unreadable path=%s error=%r", path, str(error))
            return 0

    def _trim(self, cluster: bytes, cleared: ClearedRange) -> None:
        """Trim the merged log. Delete it if it is corrupt, or if the disk is too full to record the trim."""
        if not is_log_directory(REAL, self._merged):
            return
        begin = SegmentId(cleared.epoch, 0)
        try:
            writer = LogWriter.open(
                self._merged, LogIdentity(LogKind.MERGED, cluster, self._stream), resume=True
            )
            with contextlib.closing(writer):
                if writer.active is not None and writer.active.id < begin:
                    writer.seal()
                writer.trim(begin, TrimReason.RESET)
        except (Corrupt, DiskFull) as error:
            if isinstance(error, TooManyFiles) or any(
                segment >= begin for segment in list_segments(REAL, self._merged)
            ):
                raise
            logger.error("merged_log_dropped path=%s error=%r", self._merged, str(error))
            with storage_errors(self._merged, "deleting the merged log"):
                shutil.rmtree(self._merged)

    def _record(self, done: HardResetRecord) -> None:
        content = {"epoch": done.epoch, "is_done": done.is_done, "dropped": done.dropped}
        with storage_errors(self._path, "recording what a reset deleted"):
            write_whole(REAL, self._path, json.dumps(content).encode())
        self.done = done

    def _read(self) -> HardResetRecord:
        with storage_errors(self._path, "reading what a reset deleted"):
            if REAL.size(self._path) is None:
                return HardResetRecord()
            with open(self._path, "rb") as file:
                content = file.read()
        try:
            found = json.loads(content)
            dropped = tuple(DroppedRange(*one) for one in found["dropped"])
            return HardResetRecord(int(found["epoch"]), bool(found["is_done"]), dropped)
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt(
                f"the record of the last hard reset is invalid: {error}", path=self._path, offset=0
            ) from error
