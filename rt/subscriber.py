"""Subscribing: read the local copy of a stream at one's own pace, and remember how far.

Laws. A named subscriber that is opened again without a position goes on where it acknowledged, so that it
sees every message at least once, and exactly once if it acknowledges with its own work. It is never left
silently behind: what is missing is an event, what ends the pull for good is raised.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rt.cursor import Cursor
from rt.following import FollowingReader
from rt.log.catalog import read_catalog
from rt.log.columns import Message, MessageBatch
from rt.log.directory import is_log_directory, merged_directory
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.reader import EventHandler, LogReader, Place
from rt.log.watch import DirectoryWatch
from rt.names import check_name
from rt.positions import TRIMMABLE, TRIMMABLE_FILE, write_position
from rt.pull_settings import PullSettings, Retention, copy_directory
from rt.pulling import Pulling

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.subscriber")

_LOOK_AGAIN_SECONDS = 1.0
"""How often to look for a log that is not there yet, even if nothing woke us."""


class _CalledOff(Exception):
    """Ends a wait of the reader; never leaves this module."""


class Subscriber:
    """The messages of a stream from a local log directory, followed as it grows.

    Without `endpoints`, `path` is a log directory, or the root below which the merged log of `stream` lies
    (`<path>/<stream>/merged`). With `endpoints` ("host:port" of each node) and `tls`, `path` is the root, and
    a process beside this one fills the copy from the nodes: `<path>/<stream>/merged`, or with `topics` a
    directory of its own for these, which the nodes filter. Subscribers that read the same directory share
    one such process, that of the first; it ends with its subscriber, and another one takes over. The copy
    begins where the first subscriber wanted; to one that wants something earlier, that is a skip forward.

    `position` is as in `rt.LogReader`; None means: where this `name` acknowledged, else "earliest". With
    endpoints it may lie beyond the end of the copy, and "latest" is the end of the log when a node was
    reached, so that messages merged before are not handed out. `name` must be the certificate's then. If that
    is of role subscriber the nodes hold the log back for it, within their limits: from where it began, then
    from what it has acknowledged, of which they hear within seconds. Of several copies of one name the
    farthest counts; a hold never goes back, and stays until an operator releases it. The process that fills
    the copy tells of its own certificate's name alone: share a copy only with subscribers that have the same.
    `retention`: "follow" trims the copy as the nodes trim; "own" keeps all that `trim` was not called for.

    What no other node and no new start can mend (a certificate that all nodes refuse, a copy that is not the
    nodes' log, a disk that failed) is raised to whoever reads, behind the messages that are here.

    For one thread; `pause`, `resume` and `close` may come from any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        endpoints: Sequence[str] = (),
        tls: TLS | None = None,
        position: Place | None = None,
        topics: Collection[str] | None = None,
        on_event: EventHandler | None = None,
        retention: Retention = "follow",
        name: str | None = None,
        disk: Disk = REAL,
    ) -> None:
        self.stream = check_name(stream, kind="stream")
        self.name = None if name is None else check_name(name, kind="subscriber")
        if isinstance(endpoints, str):
            raise ValueError(f"endpoints={endpoints!r}: a sequence of 'host:port' is wanted")  # noqa: TRY004
        self._topics = None if topics is None else frozenset([topics] if isinstance(topics, str) else topics)
        self._on_event = on_event
        self._retention = retention
        self._disk = disk
        self._changed = threading.Condition()
        """Guards the four below, and tells of their changes."""
        self._is_paused = False
        self._is_closed = False
        self._is_called_off = False
        self._reader: FollowingReader | None = None
        self._watch: DirectoryWatch | None = None
        """Of the directory in which a log is still to appear."""
        self._is_opening = False
        """Whether a thread uses it; that one closes it then."""
        self._pulling: Pulling | None = None
        self._cursor: Cursor | None
        """What one with a name remembers."""
        root = os.path.abspath(os.fspath(path))
        if endpoints:
            self.directory = copy_directory(root, self.stream, self._topics or ())
            self._cursor = self._own_cursor()
            self._begin_pull(endpoints, tls, position)
        else:
            self.directory = root if is_log_directory(disk, root) else merged_directory(root, self.stream)
            self._cursor = self._own_cursor()
            self._wanted = self._resumed() if position is None else position
            self._open_reader()

    @property
    def position(self) -> int:
        """The next position to be handed out; 0 while it is not known, for no node was reached yet."""
        if self._reader is not None:
            return self._reader.position
        return self._wanted if isinstance(self._wanted, int) else 0

    @property
    def log_end(self) -> int | None:
        """With endpoints: where the log ended when a node was first reached; None before that.

        Where another subscriber's pull client fills the copy, where the copy ends now.
        """
        pulling = self._pulling
        if pulling is None:
            return None
        if pulling.log_end is None and pulling.is_shared and is_log_directory(self._disk, self.directory):
            with LogReader(self.directory, position="latest", disk=self._disk) as reader:
                return reader.position
        return pulling.log_end

    def __iter__(self) -> Iterator[Message]:
        """Messages for ever, until `close`; waits while paused."""
        while (batch := self.next_batch()) is not None:
            assert self._reader is not None
            for message in self._reader.one_by_one(batch):
                yield message
                if self._is_paused:
                    self._wait_while_paused(math.inf)

    def batches(self) -> Iterator[MessageBatch]:
        """The same messages in columns."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def poll(self, max_messages: int = 1000, timeout: float | None = 1.0) -> list[Message]:
        """Up to `max_messages`, waiting at most `timeout` seconds (None: for ever) for the first.

        None while paused, or before there is a log.
        """
        deadline = _deadline(timeout)
        try:
            if not self._wait_while_paused(deadline) or (reader := self._ready(deadline)) is None:
                return []
            return reader.poll(max_messages, _left(deadline))
        except _CalledOff:
            return []

    def next_batch(
        self, timeout: float | None = None, max_messages: int | None = None
    ) -> MessageBatch | None:
        """The next messages in columns; None after `timeout` seconds (None: no limit), or `close`."""
        deadline = _deadline(timeout)
        try:
            while True:
                if not self._wait_while_paused(deadline) or (reader := self._ready(deadline)) is None:
                    return None
                batch = reader.next_batch(_left(deadline), max_messages)
                if batch is None or not self._is_paused:
                    return None if self._is_closed else batch
                reader.one_by_one(batch)  # Paused meanwhile: it is handed out after that.
        except _CalledOff:
            return None

    def call_off(self) -> None:
        """End the wait of a `next_batch` in another thread, or the next one: it returns None."""
        self._change(is_called_off=True)

    def pause(self) -> None:
        """Hand out nothing until `resume`; nothing is lost.

        The copy goes on growing: a pull is not paused, and only the disk bounds it.
        """
        self._change(is_paused=True)

    def resume(self) -> None:
        """Go on where it was paused."""
        self._change(is_paused=False)

    def ack(self, position: int) -> None:
        """Remember, durably, that everything below `position` is done; a named subscriber resumes there."""
        if self._cursor is None:
            raise ValueError("only a named subscriber can acknowledge: give name=")
        self._check_handed_out(position)
        if self._reader is not None:
            self._reader.make_durable()
        self._cursor.acknowledge(position)

    def trim(self, position: int) -> None:
        """Let the pull client delete the sealed segments of the copy that end at or below `position`.

        With retention "own" only. It does so when it syncs next. Durable on return; other subscribers that
        read the same copy and need more will skip forward.
        """
        if self._retention != "own":
            raise ValueError(f"retention={self._retention!r}: only a copy with retention='own' is trimmed")
        self._check_handed_out(position)
        write_position(self._disk, os.path.join(self.directory, TRIMMABLE_FILE), TRIMMABLE, position)

    def close(self) -> None:
        """Stop; another thread's iteration ends. What was not acknowledged is handed out again later.

        With endpoints it returns when the pull client has ended, unless other subscribers need it.
        """
        self._change(is_closed=True)
        if self._reader is not None:
            self._reader.close()
        self._leave_watch()
        if self._pulling is not None:
            self._pulling.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What changes while somebody waits

    def _change(
        self,
        *,
        is_paused: bool | None = None,
        is_closed: bool | None = None,
        is_called_off: bool | None = None,
    ) -> None:
        """Note it, from any thread, and wake whoever waits, wherever that is."""
        with self._changed:
            self._is_paused = self._is_paused if is_paused is None else is_paused
            self._is_closed = self._is_closed if is_closed is None else is_closed
            self._is_called_off = self._is_called_off if is_called_off is None else is_called_off
            self._changed.notify_all()
            if self._watch is not None:
                self._watch.wake()
            if self._reader is not None:
                self._reader.wake()

    def _check(self) -> None:
        """Before a wait for more: raise what ends it."""
        if self._is_called_off:
            self._is_called_off = False
            raise _CalledOff
        pulling = self._pulling
        if pulling is None:
            return
        self._tell_refused(pulling)
        if pulling.failure is not None and not self._is_closed:
            raise copy.copy(pulling.failure)

    def _tell_refused(self, pulling: Pulling) -> None:
        refused, pulling.refused = pulling.refused, None
        if refused is not None and self._on_event is not None:
            self._on_event(refused)
        elif refused is not None:
            logger.warning("hold_refused name=%s why=%r", refused.name, refused.why)

    def _wait_while_paused(self, deadline: float) -> bool:
        """Wait until it is not paused; False if the deadline came first. Closed is not paused."""
        if not self._is_paused:
            return True
        with self._changed:
            self._changed.wait_for(self._may_go_on, _left(deadline))
        if self._is_called_off:
            self._check()
        return self._may_go_on()

    def _may_go_on(self) -> bool:
        return not self._is_paused or self._is_closed or self._is_called_off

    # The log, when it is there

    def _begin_pull(self, endpoints: Sequence[str], tls: TLS | None, position: Place | None) -> None:
        if tls is None:
            raise ValueError("endpoints without tls: nodes want to see a certificate")
        self._wanted = self._resumed() if position is None else position
        if not isinstance(self._wanted, int) and self._wanted not in {"earliest", "latest"}:
            raise ValueError(f"position {position!r} is neither a number nor 'earliest' nor 'latest'")
        if isinstance(self._wanted, int) and self._wanted < 0:
            raise ValueError(f"position {position} is negative")
        settings = PullSettings(
            self.stream,
            tuple(endpoints),
            tls,
            self._wanted,
            tuple(sorted(self._topics or ())),
            self._retention,
            self.name,
        )
        with storage_errors(self.directory, "making a directory for a copy"):
            self._disk.make_directory(self.directory)
        if self._wanted != "latest":  # That is known when a node was reached.
            self._note_beginning(0 if self._wanted == "earliest" else self._wanted)
        self._watch = DirectoryWatch(self.directory)
        try:
            self._pulling = Pulling(self.directory, settings, on_change=self._change)
        except BaseException:
            self.close()
            raise

    def _ready(self, deadline: float) -> FollowingReader | None:
        """The reader, when there is a log to read; None at the deadline, or when closed."""
        if self._pulling is not None:
            self._tell_refused(self._pulling)  # Who never waits is behind, and needs to know.
        if self._reader is None:
            self._is_opening = True
            try:
                self._open_until(deadline)
            finally:
                self._is_opening = False
                self._leave_watch()
        return self._reader

    def _open_until(self, deadline: float) -> None:
        """Open the reader as soon as that can be; without one at the deadline, or when closed."""
        while not self._is_closed:
            assert self._watch is not None
            self._check()
            if (start := self._start()) is not None:
                self._wanted = start
                self._open_reader()
                return
            left = _left(deadline)
            if left is not None and left <= 0:
                return
            self._watch.wait(_LOOK_AGAIN_SECONDS if left is None else min(left, _LOOK_AGAIN_SECONDS))

    def _start(self) -> Place | None:
        """Where the copy is to be read from; None as long as that is not known."""
        if not is_log_directory(self._disk, self.directory):
            return None
        if isinstance(self._wanted, int):
            return self._wanted
        with storage_errors(self.directory, "looking for a copy"):
            if not read_catalog(self._disk, self.directory).kept:
                return None
        if self._wanted == "earliest":
            return "earliest"
        assert self._pulling is not None
        return "latest" if self._pulling.is_shared else self._pulling.log_end

    def _open_reader(self) -> None:
        reader = FollowingReader(
            self.directory,
            position=self._wanted,
            topics=self._topics,
            on_event=self._on_event,
            check=self._check,
            may_be_ahead=self._pulling is not None,
            disk=self._disk,
        )
        if self._pulling is not None:
            try:
                self._note_beginning(reader.position)
            except BaseException:
                reader.close()
                raise
        self._reader = reader
        if self._is_closed:
            reader.close()

    def _leave_watch(self) -> None:
        """Close the watch where nobody needs it any more."""
        if self._is_opening or not (self._is_closed or self._reader is not None):
            return
        with self._changed:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _check_handed_out(self, position: int) -> None:
        if not 0 <= position <= self.position:
            raise ValueError(f"position {position} was not handed out yet: the next is {self.position}")

    def _own_cursor(self) -> Cursor | None:
        return None if self.name is None else Cursor(self._disk, self.directory, self.name)

    def _note_beginning(self, position: int) -> None:
        if self._cursor is not None:
            self._cursor.note_beginning(position)

    def _resumed(self) -> Place:
        acknowledged = None if self._cursor is None else self._cursor.acknowledged
        return "earliest" if acknowledged is None else acknowledged


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _left(deadline: float) -> float | None:
    """The seconds until a deadline, as waits want it: None for ever."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
