"""What a hard reset does to the files of a node: session copies go, and all that is merged is trimmed.

It is done when the data process begins, before anything is open; one that hears of a hard reset later ends,
to be started again. Laws. Before a byte goes it is noted durably which messages it holds that are not merged;
that all is done is noted last. So a crash on the way leaves nothing undone, and takes nothing that is newer.

    the file `cleared` beside the session copies, JSON:
    {"epoch", "is_done", "dropped": [[session, id, X, first, end], ...]}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from rt.errors import Damaged, RtError
from rt.log.directory import is_log_directory, list_segments
from rt.log.disk import REAL, storage_errors, write_whole
from rt.log.reader import LogReader
from rt.log.segment import Kind, SegmentId
from rt.log.table import Identity, TrimReason
from rt.log.writer import LogWriter
from sequencer.data.consumed import consumed_number
from sequencer.state import Cleared, State

FILE: Final = "cleared"

logger = logging.getLogger("sequencer")


class Dropped(NamedTuple):
    """Numbers `first` to `end` of a session's X that this node held durably, and that were not merged."""

    session: str
    session_id: int
    x: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last hard reset that this directory knows of."""

    epoch: int = 0
    is_done: bool = True
    dropped: tuple[Dropped, ...] = ()


class Clearing:
    """Carries out hard resets on a node's directories. Nothing else has them open meanwhile."""

    def __init__(self, sessions: str, merged: str, stream: str) -> None:
        """Storage errors; `rt.Damaged` if the file cannot be read."""
        self._sessions, self._merged, self._stream = sessions, merged, stream
        self._path = os.path.join(sessions, FILE)
        self.done = self._read()

    def is_due(self, state: State) -> bool:
        """Whether the cluster was cleared, and this node's directories were not."""
        done = self.done
        return state.cleared is not None and (done.epoch, done.is_done) < (state.cleared.epoch, True)

    def clear(self, state: State) -> None:
        """Do as `state` says; durable on return. Storage errors."""
        cleared = state.cleared
        assert cleared is not None
        if self.done.epoch < cleared.epoch:
            self._note(Done(cleared.epoch, False, tuple(self._held(state, cleared))))
        for dropped in self.done.dropped:
            logger.warning(
                "reset_drops session=%s id=%d x=%d first=%d end=%d",
                *(dropped.session, dropped.session_id, dropped.x, dropped.first, dropped.end),
            )
        with storage_errors(self._sessions, "dropping session copies"):
            for session_id in self._older(cleared):
                shutil.rmtree(os.path.join(self._sessions, str(session_id)))
            REAL.sync_directory(self._sessions)
        self._trim(state.cluster, cleared)
        self._note(Done(cleared.epoch, True, self.done.dropped))

    def _older(self, cleared: Cleared) -> list[int]:
        names = os.listdir(self._sessions)
        return sorted(int(name) for name in names if name.isdecimal() and int(name) < cleared.session_id)

    def _held(self, state: State, cleared: Cleared) -> Iterator[Dropped]:
        """What copies hold beyond what is merged of their session."""
        for session_id in self._older(cleared):
            session = state.sessions.get(session_id)
            if session is None:
                continue
            first = consumed_number(session) or 0
            end = self._end_of(os.path.join(self._sessions, str(session_id)))
            if end > first:
                yield Dropped(session.name, session_id, session.fenced_end - 1, first, end)

    def _end_of(self, path: str) -> int:
        try:
            with LogReader(path, position="latest", on_event=lambda _: None) as reader:
                return reader.position
        except RtError as error:
            logger.error("dropped_copy_is_unreadable path=%s error=%r", path, str(error))
            return 0

    def _trim(self, cluster: bytes, cleared: Cleared) -> None:
        if not is_log_directory(REAL, self._merged):
            return
        begin = SegmentId(cleared.epoch, 0)
        try:
            writer = LogWriter.open(self._merged, Identity(Kind.MERGED, cluster, self._stream), resume=True)
        except Damaged as error:
            if any(segment >= begin for segment in list_segments(REAL, self._merged)):
                raise
            logger.error("damaged_log_is_dropped path=%s error=%r", self._merged, str(error))
            shutil.rmtree(self._merged)
            return
        with contextlib.closing(writer):
            if writer.active is not None and writer.active.id < begin:
                writer.seal()
            writer.trim(begin, TrimReason.RESET)

    def _note(self, done: Done) -> None:
        content = {"epoch": done.epoch, "is_done": done.is_done, "dropped": done.dropped}
        with storage_errors(self._path, "noting what a reset dropped"):
            write_whole(REAL, self._path, json.dumps(content).encode())
        self.done = done

    def _read(self) -> Done:
        try:
            with storage_errors(self._path, "reading what a reset dropped"), open(self._path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return Done()
        except RtError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return Done()
            raise
        try:
            found = json.loads(content)
            dropped = tuple(Dropped(*one) for one in found["dropped"])
            return Done(int(found["epoch"]), bool(found["is_done"]), dropped)
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged(f"it says what it cannot: {error}", path=self._path, offset=0) from error
