"""Read a log that another process fills; another thread can end the wait for more, and read the counters."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from rt.errors import Closed, Corrupt, LogNotFound, RtError, closed_in_child
from rt.events import BadMessage, CorruptPositions, Event, SkipForward
from rt.log.disk import REAL, Disk
from rt.log.read.reader import EventHandler, LogReader, Place
from rt.log.read.row_delivery import RowDelivery
from rt.log.read.start_position import CheckedPlace, StartTime
from rt.log.scan.directory import is_log_directory
from rt.log.scan.message_batch import MessageBatch
from rt.option_checks import check_timeout


class SubscriberStats(Struct, frozen=True):
    """What a subscriber has counted since it was opened: the result of `Subscriber.stats`.

    `messages` were delivered, with `bytes` bytes of values. These two never go back.

    `position` is that of the next message. `log_end` is the end of the log as far as this machine knows it:
    of the directory that is read, or the end that the nodes reported when one was first reached, if that is
    higher. None while neither is known. `lag` is the number of positions between the two, or None; with
    `topics` it counts also the messages of other topics.

    `gaps` counts the reports of messages that were not delivered: `rt.events.SkipForward`, `BadMessage` and
    `CorruptPositions`. `missing` counts their positions, as far as known. `last_event` is the latest of all
    events, or None.
    """

    messages: int
    bytes: int
    position: int
    log_end: int | None
    lag: int | None
    gaps: int
    missing: int
    last_event: Event | None


class DeliveryCounter:
    """Counts the deliveries and reports of a subscriber. Its reading thread counts; any thread may call
    `stats`.
    """

    def __init__(self, on_event: EventHandler | None = None) -> None:
        self.on_event = on_event
        self.messages = 0
        """Messages that were read for the program; `bytes` counts the bytes of their values."""
        self.bytes = 0
        self.gaps = 0
        self.missing = 0
        self.last_event: Event | None = None
        self._highest = 0, 0
        self._lock = threading.Lock()

    def add(self, batch: MessageBatch) -> None:
        self.messages += len(batch)
        self.bytes += value_bytes(batch, 0)

    def subtract(self, batch: MessageBatch) -> None:
        """Subtract a batch that will not be delivered."""
        self.messages -= len(batch)
        self.bytes -= value_bytes(batch, 0)

    def record(self, event: Event) -> None:
        self.last_event = event
        if isinstance(event, SkipForward):
            self.missing += event.resumed - event.wanted
        elif isinstance(event, BadMessage | CorruptPositions):
            self.missing += 0 if event.end is None else event.end - event.start
        else:
            return
        self.gaps += 1

    def stats(self, reader: FollowReader | None, start: int, log_end: int | None) -> SubscriberStats:
        """The counts and positions now. If there is no `reader` yet, `start` is the position where it will
        start.
        """
        rest, position = None, start
        if reader is not None:
            rest, position = reader.undelivered()
        messages, size = self.delivered([] if rest is None else [rest])
        lag = None if log_end is None else max(log_end - position, 0)
        return SubscriberStats(
            messages, size, position, log_end, lag, self.gaps, self.missing, self.last_event
        )

    def delivered(self, held: Iterable[tuple[MessageBatch, int]]) -> tuple[int, int]:
        """Delivered messages and bytes. `held` has batches, each with the number of its last messages that
        are left.

        The results never decrease, although the reading thread may be between two steps.
        """
        messages, size = self.messages, self.bytes
        for batch, left in held:
            messages -= left
            size -= value_bytes(batch, len(batch) - left)
        with self._lock:
            highest, bytes_highest = self._highest
            self._highest = max(messages, highest), max(size, bytes_highest)
            return self._highest


def value_bytes(batch: MessageBatch, start: int) -> int:
    """The bytes of the values from message `start` on."""
    return int(batch.value_offsets[-1]) - int(batch.value_offsets[start])


def known_end(disk: Disk, directory: str, reported: int | None) -> int | None:
    """The end of the log in `directory`, or `reported` if it is higher. Never raises."""
    with contextlib.suppress(RtError, OSError):  # When the log is read, the error is raised, with what to do.
        if is_log_directory(disk, directory):
            with LogReader(directory, position="latest", disk=disk) as reader:
                return max(reader.position, reported or 0)
    return reported


def found_place(
    disk: Disk, directory: str, place: CheckedPlace, log_end: Callable[[], int | None]
) -> CheckedPlace:
    """`place` with its current position, if that can be found. If not, reading finds it or reports why not.

    "latest" is `log_end` if that is later than the end of the log in `directory`.
    """
    if place == "latest" and is_log_directory(disk, directory):
        with LogReader(directory, position="latest", disk=disk) as latest:
            return max(latest.position, log_end() or 0)
    if isinstance(place, StartTime):
        with (
            contextlib.suppress(Corrupt, LogNotFound),
            LogReader(directory, position=place, disk=disk) as reader,
        ):
            return replace(place, position=reader.position)
    return place


class FollowReader(LogReader):
    """A `LogReader` that follows its log.

    `check` is called before each wait for more, and again after `wake`. If it raises, the wait ends and no
    message is lost. With `may_be_ahead`, a position after the log end is allowed and waited for, because the
    log is a copy that is still being filled. `on_damaged` gets each `rt.Corrupt`: if it returns True, the
    reader waits for the repair; else the error is raised. `counter` counts what is delivered.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        position: Place,
        topics: Collection[str] | None,
        on_event: EventHandler | None,
        epoch: int | None = None,
        check: Callable[[], None],
        counter: DeliveryCounter | None = None,
        on_damaged: Callable[[Corrupt], bool] = lambda _: False,
        may_be_ahead: bool = False,
        disk: Disk = REAL,
    ) -> None:
        self._check, self._on_damaged = check, on_damaged
        self._may_be_ahead = may_be_ahead
        self._counter = counter = DeliveryCounter() if counter is None else counter
        super().__init__(
            path,
            position=position,
            follow=True,
            topics=topics,
            on_event=on_event,
            epoch=epoch,
            disk=disk,
        )
        self._events.record = counter.record
        own_deliveries.add(self._delivery)

    def wake(self) -> None:
        """End the current or the next wait. From any thread."""
        watch = self._watch
        if watch is not None:
            watch.wake()

    def undelivered(self) -> tuple[tuple[MessageBatch, int] | None, int]:
        """Return the batch that is delivered message by message, with the number of its messages that are
        left, or None if there is no such batch; and the position. From any thread.
        """
        rest = self._delivery.rest
        if rest is None:
            return None, self._walk.position
        batch, left = rest
        return rest, int(batch.positions[len(batch) - left])

    def limit(self, batch: MessageBatch, max_messages: int) -> MessageBatch:
        """The first messages of the batch that `next_batch` just returned; its next call returns the rest."""
        return self._limit(batch, max_messages)

    def keep(self, batch: MessageBatch) -> None:
        """Make the next call of `next_batch` return the batch that the last call returned."""
        self._delivery.keep(batch)

    def hold(self) -> None:
        """End an iteration over messages after the current message; `next_batch` returns the rest. From any
        thread.
        """
        self._delivery.hold()

    def _drop(self, rest: MessageBatch) -> None:
        self._counter.subtract(rest)
        super()._drop(rest)

    def _read(self, timeout: float | None) -> MessageBatch | None:
        batch = super()._read(timeout)
        if batch is not None:
            self._counter.add(batch)
        return batch

    def _advance(self) -> bool:
        try:
            if super()._advance():
                return True
        except Corrupt as error:
            if not self._on_damaged(error):
                raise
        self._check()
        return False


class Cancelled(Exception):
    """Ends a wait of the reader. The subscriber does not pass it on."""


def deadline_after(timeout: float | None) -> float:
    """The deadline for `timeout`. `rt.InvalidOption` if it is not a duration."""
    timeout = check_timeout(timeout)
    return math.inf if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float) -> float | None:
    """The seconds until a deadline; None for no limit."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


class DeliveryGate:
    """Whether a subscriber delivers: not while it is paused. Another thread may also end its wait.

    `wake` is called after each change, to end the waits of the reader. Thread-safe. In a forked child each
    use raises `rt.Closed`: a thread that the child does not have may hold the locks of the gate and of the
    reader. Also, an acknowledgement in the child would cover work that the parent has not done.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.is_paused = False
        self.is_closed = False
        self.is_disowned = False
        self._is_called_off = False
        self._changed = threading.Condition()
        self._wake = wake
        _gates.add(self)

    def change(
        self,
        *,
        is_paused: bool | None = None,
        is_closed: bool | None = None,
        is_called_off: bool | None = None,
    ) -> None:
        """Set a flag and wake all waits."""
        self.raise_if_disowned()
        with self._changed:
            self.is_paused = self.is_paused if is_paused is None else is_paused
            self.is_closed = self.is_closed if is_closed is None else is_closed
            self._is_called_off = self._is_called_off if is_called_off is None else is_called_off
            self._changed.notify_all()
            self._wake()

    @property
    def is_delivering(self) -> bool:
        """Whether it is not paused, not closed, and does not belong to the parent of a forked child."""
        return not (self.is_paused or self.is_closed or self.is_disowned)

    def raise_if_disowned(self) -> None:
        if self.is_disowned:
            raise closed_in_child("the subscriber")

    def raise_if_closed(self, where: str) -> None:
        self.raise_if_disowned()
        if self.is_closed:
            raise Closed("the subscriber is closed", where=where)

    def take_call_off(self) -> bool:
        """Whether the wait was called off. Only the first call after it returns True."""
        if not self._is_called_off:
            return False
        self._is_called_off = False
        return True

    def raise_if_called_off(self) -> None:
        """Raise `Cancelled` if the wait was called off; only the first call after it does."""
        if self.take_call_off():
            raise Cancelled

    def wait_while_paused(self, deadline: float) -> bool:
        """Wait until it is not paused. False if the deadline came first. A closed gate counts as not paused.

        Raises `Cancelled` if it is called off.
        """
        self.raise_if_disowned()
        if not self.is_paused:
            return True
        with self._changed:
            may_go_on = self._changed.wait_for(self._may_go_on, seconds_left(deadline))
        self.raise_if_called_off()
        return may_go_on

    def _may_go_on(self) -> bool:
        return not self.is_paused or self.is_closed or self._is_called_off


_gates: weakref.WeakSet[DeliveryGate] = weakref.WeakSet()
own_deliveries: weakref.WeakSet[RowDelivery] = weakref.WeakSet()
"""A fork ends the iterations of these deliveries in the child. The iterations then ask the subscriber for
more, and the subscriber raises. So an iteration need not check for a fork before each message.
"""


def _disown_all() -> None:
    for gate in list(_gates):
        gate.is_disowned = True
    for delivery in list(own_deliveries):
        delivery.disown()
    _gates.clear()
    own_deliveries.clear()


os.register_at_fork(after_in_child=_disown_all)
