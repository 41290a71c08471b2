"""A copy of a log that a pull client fills, as a subscriber sees it: its end, failures, and repairs."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from rt.client.follow_reader import DeliveryCounter
from rt.errors import Corrupt, Gap, RtError, Timeout
from rt.events import CorruptPositions
from rt.log.disk import Disk, storage_errors
from rt.log.format.segment import LogKind, SegmentId, parse_segment_name
from rt.log.read.reader import LogReader
from rt.log.read.start_position import CheckedPlace, StartTime
from rt.log.read.time_search import search_time
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import is_log_directory, read_identity
from rt.log.write.repair_requests import is_requested, request_repair
from rt.sidecar.pull_process import PullSidecar

logger = logging.getLogger("rt.client.subscriber")


class PulledCopy:
    """The copy in `directory`, filled by the pull client `pulling`.

    `wake` ends the current or the next wait of the reader, so that it reads on and calls `check` again.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        pulling: PullSidecar,
        counter: DeliveryCounter,
        wake: Callable[[], None],
        connect_timeout: float | None,
    ) -> None:
        self._disk, self._directory, self._pulling = disk, directory, pulling
        self._counter, self._on_event, self._wake = counter, counter.on_event, wake
        self._connect_timeout = connect_timeout
        """None after the timeout was raised: then the reader waits."""
        self._opened_at = time.monotonic()
        self._noticed: tuple[CorruptPositions | None, RtError | None] = None, None
        """What the pull client had reported at the last check."""
        self._repair: tuple[tuple[SegmentId, int], bool] | None = None
        """The corrupt segment and offset for which a repair was last requested, and whether the pull client
        has checked it.
        """

    @property
    def log_end(self) -> int | None:
        """The log end when a node was first reached; None before that.

        If another subscriber's pull client fills the copy: the current end of the copy.
        """
        is_shared = self._pulling.log_end is None and self._pulling.is_shared
        if is_shared and is_log_directory(self._disk, self._directory):
            with LogReader(self._directory, position="latest", disk=self._disk) as reader:
                return reader.position
        return self._pulling.log_end

    @property
    def reported_end(self) -> int | None:
        """The log end when this pull client first reached a node; None before that."""
        return self._pulling.log_end

    def start(self, wanted: CheckedPlace, *, is_seek: bool) -> CheckedPlace | None:
        """The place where a reader of the copy starts; None while that is unknown.

        The pull client asks the nodes where a time begins. The copy is searched instead if it has all topics
        and a message before that time, if another subscriber's pull client fills it, or if a reader seeks
        (`is_seek`). A message of another topic may be the first of that time. So in a copy without that
        message, the time may begin later than the nodes say.
        """
        if isinstance(wanted, int):
            return wanted
        with storage_errors(self._directory, "looking for a copy"):
            return self._start(wanted, is_seek=is_seek)

    def _start(
        self, wanted: Literal["earliest", "latest"] | StartTime, *, is_seek: bool
    ) -> CheckedPlace | None:
        pulling = self._pulling
        if isinstance(wanted, StartTime) and not is_seek and pulling.found is not None:
            found = pulling.found
            return found.position if found.is_message else replace(wanted, position=found.position)
        catalog = read_catalog(self._disk, self._directory)
        if not catalog.kept or wanted == "earliest":
            return "earliest" if catalog.kept else None
        if wanted == "latest":
            return "latest" if pulling.is_shared else pulling.log_end
        identity = read_identity(self._disk, self._directory)
        at = search_time(self._disk, self._directory, identity, wanted.timestamp_ns).position
        is_in_copy = identity.kind is not LogKind.FILTERED and (at > catalog.start or catalog.start == 0)
        return replace(wanted, position=at) if is_in_copy or is_seek or pulling.is_shared else None

    def check(self, *, is_closed: bool) -> None:
        """Report the problems that the pull client reported. Raise its failure, unless the subscriber
        `is_closed`.

        The reader calls it when it has read everything. Since then the pull client may have stored more
        messages, and then reported a problem that comes after them. So a problem is reported only at the
        second check.
        """
        self.emit_hold_refused()
        found = self._pulling.corrupt, self._pulling.failure
        if found != self._noticed:
            self._noticed = found
            self._wake()
            return
        corrupt, failure = found
        if corrupt is not None:
            self._emit_corrupt(corrupt)
        if failure is not None and not is_closed:
            raise copy.copy(failure)
        if (why := self._pulling.unreached) is not None and not is_closed:
            self._check_connected(why)

    def _check_connected(self, why: str) -> None:
        """Raise `rt.Timeout`, once, if no node was reached in time."""
        seconds = self._connect_timeout
        if seconds is None or time.monotonic() < self._opened_at + seconds:
            return
        self._connect_timeout = None
        raise Timeout(
            "no node was reached",
            where=self._directory,
            got=why,
            expected=f"one within {seconds:g} s",
            hint="Reading again waits for them. connect_timeout sets the time; None waits indefinitely.",
        )

    def emit_hold_refused(self) -> None:
        refused, self._pulling.refused = self._pulling.refused, None
        if refused is not None:
            self._counter.record(refused)
        if refused is not None and self._on_event is not None:
            self._on_event(refused)
        elif refused is not None:
            logger.warning("hold_refused name=%s why=%r", refused.name, refused.why)

    def _emit_corrupt(self, corrupt: CorruptPositions) -> None:
        """Report positions without valid bytes on any node, after all messages before them were read."""
        if self._pulling.corrupt is corrupt:
            self._pulling.corrupt = None
        self._counter.record(corrupt)
        if self._on_event is not None:
            self._on_event(corrupt)
            return
        raise Gap(
            "no node has valid bytes for the next positions",
            event=corrupt,
            where=self._directory,
            got=corrupt,
            hint="Reading again waits for them. Restore the file on a node, or have an operator trim "
            "the log past them. Set on_event to receive an event instead.",
        )

    def has_requested_repair(self, error: Corrupt) -> bool:
        """Request a repair of a corrupt segment of the copy. False if that did not help."""
        directory, name = os.path.split(error.path)
        segment = parse_segment_name(name)
        if segment is None or directory != self._directory:
            return False
        place = segment, error.offset
        if self._repair is None or self._repair[0] != place:
            try:
                request_repair(self._disk, self._directory, segment)
            except OSError as failed:
                logger.warning("repair_not_requested path=%s reason=%s", error.path, failed)
                return False
            self._repair = place, False
            logger.warning("copy_damaged path=%s offset=%d", error.path, error.offset)
        elif not is_requested(self._disk, self._directory, segment):
            is_answered = self._repair[1]
            # It may have been repaired just after these bytes were read: read them once more.
            self._repair = None if is_answered else (place, True)
            return not is_answered
        return True

    def stop(self) -> None:
        """Return when the pull client has ended, unless other subscribers need it."""
        self._pulling.stop()
