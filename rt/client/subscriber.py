"""Subscribe: read the local copy of a stream, and remember the acknowledged position.

Invariants:
- A named subscriber that is opened without a position resumes where it acknowledged. So it receives every
  message at least once, and exactly once if it stores its position together with its own work.
- Missing messages are reported as an event. An error that ends the pull permanently is raised.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Self

from rt.client.cursor import TRIMMABLE, TRIMMABLE_FILE, SubscriberCursor, write_position
from rt.client.follow_reader import (
    Cancelled,
    DeliveryCounter,
    DeliveryGate,
    FollowReader,
    SubscriberStats,
    deadline_after,
    found_place,
    known_end,
    seconds_left,
)
from rt.client.pulled_copy import PulledCopy
from rt.client.settings import check_endpoints_tls
from rt.errors import Corrupt, InvalidOption
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.read.reader import EventHandler, Place
from rt.log.read.start_position import CheckedPlace, check_epoch, check_place, known_position
from rt.log.read.topic_patterns import check_topics
from rt.log.read.watch import DirectoryWatch
from rt.log.scan.directory import is_log_directory, merged_directory
from rt.log.scan.message_batch import Message, MessageBatch
from rt.names import check_name
from rt.option_checks import check_count, check_path, check_position, check_timeout
from rt.sidecar.pull_process import PullSidecar
from rt.sidecar.pull_settings import PullSettings, Retention, check_retention, copy_directory

if TYPE_CHECKING:
    from rt.net.tls import TLS

_LOOK_AGAIN_SECONDS = 1.0
"""How often to check for a log that does not exist yet, even without a wake-up."""


class Subscriber:
    """The messages of a stream from a local log directory, followed as it grows.

    Without `endpoints`, `path` is a log directory, or the root that holds the merged log of `stream`
    (`<path>/<stream>/merged`). With `endpoints` ("host:port" of each node) and `tls`, it is the root, and a
    separate process, the pull client, fills the copy from the nodes: `<path>/<stream>/merged`, or with
    `topics` (names, or patterns such as `trades/*`) a directory that holds only these: the nodes filter.
    Subscribers of one directory share the pull client of the first; when that one closes, another takes over.
    The copy starts at the first subscriber's start position; one with an earlier position gets a skip
    forward, one with an earlier time starts there.

    `position` is as in `rt.LogReader`, also a datetime. None means where this `name` acknowledged, else
    "earliest". With endpoints it may be after the end of the copy, "latest" is the end of the log when a node
    was first reached, and the nodes search for a time that is not after the start of the copy. Then `name`
    must be the certificate's name. If the certificate has the role subscriber, the nodes hold the log back
    for it, within their limits: first from its start, then from its acknowledged position, which is reported
    within seconds. If one name has several copies, the highest position counts. A hold never moves back, and
    stays until an operator releases it. The pull client reports only its own certificate's name: share a copy
    only among subscribers with the same name.

    `epoch`: what `epoch` was when `position` was stored; `ack` stores both. If a forced reset replaced
    messages before the position since, reading raises `rt.Diverged`, with the position to start again at.

    `retention`: "follow" trims the copy as the nodes trim; "own" keeps all that `trim` was not called for.
    Reading raises permanent failures (all nodes reject the certificate, the copy is not of this log, the disk
    failed) after the messages that are already in the copy. If no node was reached `connect_timeout` seconds
    after the opening, a read that would wait raises `rt.Timeout`, once, with the reason for each endpoint.
    Later reads wait, and the pull client goes on trying. None waits indefinitely. The reader waits while
    corrupt parts of the copy are repaired from the nodes. What no node can repair is raised as `rt.Corrupt`,
    with the file, the range and the next step. If no node has valid bytes itself, it reports
    `rt.events.CorruptPositions`, and the subscriber waits there.

    For one thread; `pause`, `resume` and `close` may be called from any. In a forked child open a new one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        endpoints: Sequence[str] = (),
        tls: TLS | None = None,
        position: Place | None = None,
        epoch: int | None = None,
        topics: Collection[str] | None = None,
        on_event: EventHandler | None = None,
        retention: Retention = "follow",
        name: str | None = None,
        connect_timeout: float | None = 5.0,
        disk: Disk = REAL,
    ) -> None:
        self.stream = check_name(stream, kind="stream")
        self.name = None if name is None else check_name(name, kind="subscriber")
        endpoints = check_endpoints_tls(endpoints, tls)
        start = None if position is None else check_place(position)
        self._epoch = check_epoch(epoch, start)
        self._topics = None if topics is None else check_topics(topics).patterns
        if on_event is not None and not callable(on_event):
            raise InvalidOption("not callable", where="on_event", got=repr(on_event)[:200])
        self._on_event = on_event
        self._retention = check_retention(retention)
        self._connect_timeout, self._disk = check_timeout(connect_timeout, name="connect_timeout"), disk
        self._gate = DeliveryGate(self._wake)
        self._counter = DeliveryCounter(on_event)
        self._reader: FollowReader | None = None
        # Whether `seek` moved it. Its recorded start then stays as it is: nodes hold the log from there.
        self._has_begun = False
        self._is_sought = False  # Whether `seek` set the start that is requested.
        self._watch: DirectoryWatch | None = None  # Of the directory in which the log will appear.
        self._is_opening = False  # Whether a thread uses `_watch`; then that thread closes it.
        self._copy: PulledCopy | None = None  # Set if there are endpoints.
        root = os.path.abspath(check_path(path))
        if endpoints:
            self.directory = copy_directory(root, self.stream, self._topics or ())
        else:
            self.directory = root if is_log_directory(disk, root) else merged_directory(root, self.stream)
        self._cursor = None if name is None else SubscriberCursor(disk, self.directory, name)
        if start is None and self._cursor is not None and (found := self._cursor.resume()) is not None:
            start, self._epoch = found
        self._requested_start: CheckedPlace = "earliest" if start is None else start
        if endpoints and tls is not None:
            self._start_pull(endpoints, tls)
        else:
            self._open_reader()

    @property
    def position(self) -> int:
        """The position of the next message; 0 while it is unknown because no node was reached."""
        return known_position(self._requested_start) if self._reader is None else self._reader.position

    @property
    def epoch(self) -> int | None:
        """The number of an epoch in which `position` is right; None before the first message. Store both."""
        return self._epoch if self._reader is None else self._reader.epoch

    @property
    def passed(self) -> int:
        """Everything before it was returned, or is of other topics. 0: unknown. From any thread."""
        return 0 if self._reader is None else self._reader.passed

    @property
    def log_end(self) -> int | None:
        """With endpoints: the log end when a node was first reached; None before that.

        If another subscriber's pull client fills the copy: the current end of the copy.
        """
        return None if self._copy is None else self._copy.log_end

    def stats(self) -> SubscriberStats:
        """What was delivered since the opening, and the lag. From any thread; never raises. It takes 1 ms."""
        reported = None if self._copy is None else self._copy.reported_end
        log_end = known_end(self._disk, self.directory, reported)
        return self._counter.stats(self._reader, known_position(self._requested_start), log_end)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over messages until `close`. Waits while paused."""
        return chain.from_iterable(map(self._one_by_one, self.batches()))

    def batches(self) -> Iterator[MessageBatch]:
        """Iterate over the same messages in columns."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def poll(self, max_messages: int = 1000, timeout: float | None = 1.0) -> list[Message]:
        """Up to `max_messages`, waiting at most `timeout` seconds (None: no limit) for the first.

        Empty while paused, or before there is a log. `rt.Closed` after `close`.
        """
        deadline = deadline_after(timeout)
        check_count(max_messages, name="max_messages")
        self._gate.raise_if_closed(self.directory)
        try:
            if not self._gate.wait_while_paused(deadline) or (reader := self._ready(deadline)) is None:
                return []
            return reader.poll(max_messages, seconds_left(deadline))
        except Cancelled:
            return []

    def next_batch(
        self, timeout: float | None = None, max_messages: int | None = None
    ) -> MessageBatch | None:
        """The next messages in columns; None after `timeout` seconds (None: no limit), or `close`."""
        deadline = deadline_after(timeout)
        if max_messages is not None:
            check_count(max_messages, name="max_messages", least=1)
        with contextlib.suppress(Cancelled):
            while self._gate.wait_while_paused(deadline) and (reader := self._ready(deadline)) is not None:
                if (batch := reader.next_batch(seconds_left(deadline))) is None:
                    return None
                if self._gate.is_delivering:
                    return batch if max_messages is None else reader.limit(batch, max_messages)
                reader.keep(batch)  # Paused meanwhile: deliver it after `resume`. Closed: `position` stays.
                if self._gate.is_closed:
                    return None
        return None

    def seek(self, position: Place) -> None:
        """Continue at `position`, before or after what was delivered. For the thread that reads.

        What the copy does not have before a position is reported as missing. Times are searched in the copy:
        one before its start is its start. "latest" is the end of the copy, or the log end when a node was
        first reached, if that is later. Acknowledged positions stay.
        """
        place = check_place(position)
        self._gate.raise_if_closed(self.directory)
        start = found_place(self._disk, self.directory, place, lambda: self.log_end)
        if self._reader is not None:
            self._watch = DirectoryWatch(self.directory)  # If it fails, all stays as it is.
            reader, self._reader = self._reader, None
            reader.close()
            self._has_begun = True
        self._requested_start, self._epoch, self._is_sought = start, None, True

    def call_off(self) -> None:
        """End the wait of a `next_batch` in another thread, or the next one: it returns None."""
        self._gate.change(is_called_off=True)

    def pause(self) -> None:
        """Deliver nothing until `resume`; nothing is lost.

        The pull continues, and the copy grows until the disk is full.
        """
        self._gate.change(is_paused=True)
        if (reader := self._reader) is not None:
            reader.hold()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._gate.change(is_paused=False)

    def ack(self, position: int) -> None:
        """Record durably that everything below `position` is done. A named subscriber resumes there.

        Raises `rt.InvalidOption` for a position that was not delivered yet, or is below the one acknowledged
        last: to read messages again, open a subscriber with `position`. After a forced reset a lower one is
        allowed.
        """
        if self._cursor is None:
            raise InvalidOption("only a named subscriber can acknowledge. Open it with name=")
        self._check_handed_out(position)
        if self._reader is not None:
            self._reader.make_durable()
        self._cursor.acknowledge(position, self.epoch)

    def trim(self, position: int) -> None:
        """Let the pull client delete the sealed segments of the copy that end at or below `position`.

        With retention "own" only. Durable on return; the pull client deletes at its next sync. Other
        subscribers of the same copy that need more will skip forward.
        """
        if self._retention != "own":
            raise InvalidOption("only a copy with retention='own' can be trimmed", got=self._retention)
        self._check_handed_out(position)
        write_position(self._disk, os.path.join(self.directory, TRIMMABLE_FILE), TRIMMABLE, position)

    def close(self) -> None:
        """Stop; another thread's iteration ends. Messages not acknowledged are delivered again later.

        With endpoints it returns when the pull client has ended, unless other subscribers need it.
        """
        if self._gate.is_disowned:
            return  # Only the parent may close it.
        self._gate.change(is_closed=True)
        if self._reader is not None:
            self._reader.close()
        self._leave_watch()
        if self._copy is not None:
            self._copy.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one_by_one(self, batch: MessageBatch) -> Iterator[Message]:
        """The messages of the batch that was just returned. A pause ends them; the rest comes next."""
        reader = self._reader
        assert reader is not None
        messages = reader.one_by_one(batch)
        if not self._gate.is_delivering:
            reader.hold()
        return messages

    def _wake(self) -> None:
        """From any thread: another one may close the watch, which may be woken nevertheless."""
        if (watch := self._watch) is not None:
            watch.wake()
        if self._reader is not None:
            self._reader.wake()

    def _check(self) -> None:
        """Called before a wait for more; raises to end it."""
        self._gate.raise_if_called_off()
        if self._copy is not None:
            self._copy.check(is_closed=self._gate.is_closed)

    def _is_repaired(self, error: Corrupt) -> bool:
        return self._copy is not None and self._copy.has_requested_repair(error)

    def _start_pull(self, endpoints: Sequence[str], tls: TLS) -> None:
        start, topics = self._requested_start, self._topics or ()
        settings = PullSettings(self.stream, tuple(endpoints), tls, start, topics, self._retention, self.name)
        with storage_errors(self.directory, "making a directory for a copy"):
            self._disk.make_directory(self.directory)
        if self._cursor is not None:
            self._cursor.record_requested(start)
        self._watch = DirectoryWatch(self.directory)
        try:
            pulling = PullSidecar(self.directory, settings, on_change=self._gate.change)
        except BaseException:
            self.close()
            raise
        self._copy = PulledCopy(
            self._disk, self.directory, pulling, self._counter, self._wake, self._connect_timeout
        )

    def _ready(self, deadline: float) -> FollowReader | None:
        """The reader, when there is a log; None at the deadline, or when closed."""
        if self._copy is not None:
            self._copy.emit_hold_refused()  # A reader that never waits is lagging and needs the warning.
        if self._reader is None:
            self._is_opening = True
            try:
                self._open_until(deadline)
            finally:
                self._is_opening = False
                self._leave_watch()
        return self._reader

    def _open_until(self, deadline: float) -> None:
        """Open the reader as soon as possible. Leaves it unset at the deadline, or when closed."""
        while not self._gate.is_closed:
            assert self._watch is not None
            self._check()
            if (start := self._start()) is not None:
                self._requested_start = start
                try:
                    self._open_reader()
                    return
                except Corrupt as error:
                    if not self._is_repaired(error):
                        raise
            left = seconds_left(deadline)
            if left is not None and left <= 0:
                return
            self._watch.wait(_LOOK_AGAIN_SECONDS if left is None else min(left, _LOOK_AGAIN_SECONDS))

    def _start(self) -> CheckedPlace | None:
        """Where reading starts; None while that is unknown."""
        if not is_log_directory(self._disk, self.directory):
            return None
        wanted = self._requested_start
        return wanted if self._copy is None else self._copy.start(wanted, is_seek=self._is_sought)

    def _open_reader(self) -> None:
        reader = FollowReader(
            self.directory,
            position=self._requested_start,
            topics=self._topics,
            on_event=self._on_event,
            epoch=self._epoch,
            check=self._check,
            counter=self._counter,
            on_damaged=self._is_repaired,
            may_be_ahead=self._copy is not None,
            disk=self._disk,
        )
        if self._copy is not None and self._cursor is not None and not self._has_begun:
            try:
                self._cursor.record_start(reader.position)
            except BaseException:
                reader.close()
                raise
        self._reader = reader
        if self._gate.is_closed:
            reader.close()

    def _leave_watch(self) -> None:
        """Close the watch when no thread uses it."""
        if self._is_opening or not (self._gate.is_closed or self._reader is not None):
            return
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _check_handed_out(self, position: int) -> None:
        self._gate.raise_if_disowned()
        if not 0 <= check_position(position) <= self.position:
            raise InvalidOption(f"position {position} was not delivered yet: the next is {self.position}")
