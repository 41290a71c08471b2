"""Read a log directory segment by segment from a position, while other processes append and trim.

Invariants:
- An incomplete frame at the end of the log is waited for. A bad frame raises `rt.Corrupt` if it is in bytes
  that were synced, or if a later segment exists.
- If the log no longer has the position, an event reports it. The position is moved before the event, so a
  reader that raised `rt.Gap` continues after the gap.
- A reset is reported before the first message after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import copy
from typing import Final, TypeAlias

from msgspec.structs import astuple

from rt.errors import Corrupt, Diverged, Gap
from rt.events import BadMessage, BadTail, Event, Reset, SkipForward
from rt.log.disk import Disk, storage_errors
from rt.log.format.durable_end import DurableEnd
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.read.gaps import read_skips, reason_of
from rt.log.read.open_segment import OpenSegment, open_segment, restore_hint
from rt.log.read.start_position import Place, check_not_replaced, find_place
from rt.log.scan.catalog import ReadableSegment, SegmentCatalog, read_catalog, segment_path
from rt.log.scan.directory import READ_BYTES, read_durable_end, read_frames
from rt.log.scan.scanner import MergedScanner, ScanResult

logger = logging.getLogger("rt.log")

LOOK_AGAIN_SECONDS: Final = 1.0
"""A follower at the end of the log lists the directory this often, even if nothing seems to have changed."""

_UNKNOWN: Final = TrimReason.LOST.name.lower()
_HELD_BACK: Final = frozenset(
    reason.name.lower() for reason in (TrimReason.TIME, TrimReason.SIZE, TrimReason.FOLLOWED)
)
"""If a subscriber holds messages, nodes do not trim them for these reasons. A full disk overrides holds."""


EventHandler: TypeAlias = Callable[[Event], None]


class EventSink:
    """Passes events to `on_event`. If it is None, missing messages raise `rt.Gap`, and the rest is logged."""

    def __init__(self, path: str, on_event: EventHandler | None) -> None:
        self._path, self._on_event = path, on_event
        self._reported_tail: BadTail | None = None
        self.record: Callable[[Event], None] | None = None
        """Counts each event, before the handler is called."""

    def emit(self, event: Event) -> None:
        if self.record is not None:
            self.record(event)
        if self._on_event is not None:
            self._on_event(event)
        elif isinstance(event, BadTail):
            logger.warning(
                "bad_tail path=%s offset=%d torn_bytes=%d", event.path, event.offset, event.torn_bytes
            )
        elif isinstance(event, Reset):
            logger.warning("stream_was_reset path=%s position=%d epoch=%d", self._path, *astuple(event))
        elif isinstance(event, BadMessage):
            raise Gap(
                f"messages {event.start} to {event.end - 1} cannot be decoded: {event.reason}",
                event=event,
                where=f"{event.path}, offset {event.offset}",
                hint="No disk is at fault: they were published so. Set on_event to receive an event.",
            )
        elif isinstance(event, SkipForward):
            raise _gap(event, self._path)
        else:
            what, hint = "messages are missing", "Set on_event to receive an event instead."
            raise Gap(what, event=event, where=self._path, got=event, hint=hint)

    def emit_bad_tail(self, tail: BadTail) -> None:
        """Report that the log ends with an incomplete batch. The same end is reported once."""
        if tail != self._reported_tail:
            self._reported_tail = tail
            self.emit(tail)


def _gap(skip: SkipForward, path: str) -> Gap:
    """The error for an event. The reader must have moved its position already, as the hint says."""
    messages = f"messages {skip.wanted} to {skip.resumed - 1}"
    what = f"{messages} were trimmed (reason: {skip.reason}) before they were read"
    if skip.reason == _UNKNOWN:
        what = f"{messages} are not in the log any more, and why is not known"
    hold = ""
    if skip.reason in _HELD_BACK:
        hold = (
            " For a subscriber with a name the nodes keep what it has not acknowledged, within their "
            "hold_bytes_max."
        )
    return Gap(
        what,
        event=skip,
        where=path,
        hint=f"Reading again continues at {skip.resumed}.{hold} With on_event, a reader receives an event "
        "instead of this error.",
    )


class SegmentCursor:
    """Reads the log of `identity` in `directory`, one open segment at a time. For one thread.

    `advance` passes batches to the caller, and the caller moves `position` past them. The cursor itself moves
    `position` only over a gap, over numbers that a dedup session leaves out, and over positions that a filter
    left out. If `waits`, the log may still grow. Otherwise an incomplete batch at its end is reported.
    """

    def __init__(
        self, disk: Disk, directory: str, identity: LogIdentity, events: EventSink, *, waits: bool
    ) -> None:
        self._disk, self._directory, self._identity = disk, directory, identity
        self._events, self._waits = events, waits
        self._segment: OpenSegment | None = None
        self._run: int | None = None
        """The run of the segment that was read last."""
        self._position_epoch: int | None = None
        """The number of an epoch in which the position is right; None if nothing was read yet."""
        self._unchecked: int | None = None
        """The position that was right in `_position_epoch`, until the log is known to reach beyond it."""
        self._list_again_at = 0.0
        self.position = 0
        """The next position to read."""
        self.names: dict[int, str] = {0: identity.name}
        """Session names by the id that batches use, from the open segment up to the bytes that were read."""

    @property
    def segment_path(self) -> str:
        """The file that is read, for errors and events."""
        return segment_path(self._directory, SegmentId(0, 0)) if self._segment is None else self._segment.path

    @property
    def epoch(self) -> int | None:
        """The number of an epoch in which the position is right; None if nothing was read yet.

        Always None in a session log, which no reset replaces.
        """
        return None if self._identity.kind is LogKind.SESSION else self._position_epoch

    def go_to(self, place: Place, *, may_be_ahead: bool, epoch: int | None = None) -> None:
        """Continue at `place`. Raises the errors of `find_place`.

        `epoch` is the number of an epoch in which the position was right. If a forced reset replaced the
        message at an earlier position since then, `advance` raises `rt.Diverged`.
        """
        self.leave()
        self.position, self._run = find_place(
            self._disk, self._directory, self._identity, place, may_be_ahead=may_be_ahead, epoch=epoch
        )
        self._position_epoch, self._unchecked = self._run, None
        if epoch is not None:
            self._check_later(epoch)

    def leave(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def sync(self) -> None:
        if self._segment is not None:
            with storage_errors(self._directory, "syncing a segment"):
                self._segment.file.sync()

    def advance(self, take: Callable[[bytes, ScanResult], None]) -> bool:
        """Read on and pass batches to `take`, or move to another segment. False: nothing more for now.

        Raises `rt.Corrupt`, `rt.Diverged`, `rt.StorageError`, and the errors of an event's handler. After any
        of them the call may be repeated: the cursor stays where it is, or after the gap.
        """
        if self._segment is None and not self._enter():
            return False
        segment = self._segment
        assert segment is not None
        with storage_errors(self._directory, "reading a segment"):
            data, scan = read_frames(segment.file.pread, segment.scanner, READ_BYTES)
        if scan.consumed:
            self._reach(segment.scanner.next, segment.id.run)
            if isinstance(segment.scanner, MergedScanner):
                sessions = segment.scanner.sessions
                self.names = {session_id: found.session for session_id, found in sessions.items()}
            take(data, scan)
            return True
        return self._at_end(segment, scan, len(data))

    def _check_later(self, epoch: int | None) -> None:
        """Request a check that this position is still right, as it was in `epoch`, before a later one is
        reached.
        """
        is_unsure = epoch is not None and self._identity.kind is not LogKind.SESSION
        self._position_epoch, self._unchecked = epoch, self.position if is_unsure else None

    def _check_not_replaced(self, catalog: SegmentCatalog) -> None:
        if self._unchecked is None or self._position_epoch is None:
            return
        try:
            check_not_replaced(self._directory, catalog, self._unchecked, self._position_epoch)
        except Diverged:
            self.leave()  # The next call reads this again, and finds the same.
            raise

    def _reach(self, position: int, run: int) -> None:
        """Called before the reader continues, at most to `position`. That position is right in the epoch
        `run`.
        """
        if self._unchecked is not None and position > self._unchecked:
            self._check_not_replaced(read_catalog(self._disk, self._directory))
            self._unchecked = None
        if self._unchecked is None:
            self._position_epoch = run

    def _enter(self, *, is_gap: bool = False) -> bool:
        """Open the segment that holds the position. False if there is none yet.

        In a dedup session numbers may jump between runs, so a jump is no gap. It is reported as one only if
        the open segment was trimmed (`is_gap`).
        """
        catalog = read_catalog(self._disk, self._directory)
        self._check_not_replaced(catalog)
        kept = catalog.find(self.position, monotone=self._identity.dedup_id is None)
        if kept is None:
            self._skip_to(catalog, catalog.known_end)
            return False
        if self._identity.dedup_id is not None and not is_gap:
            self.position = max(self.position, kept.first)
        is_at_begin = self.position <= kept.first
        self._skip_to(catalog, kept.first)
        if is_at_begin:
            self._report_reset(kept, catalog.run_before(kept.id) if self._run is None else self._run)
        return self._open(kept, self.position)

    def _open(self, kept: ReadableSegment, position: int) -> bool:
        """Open `kept` at `position`. False if it was trimmed meanwhile."""
        segment = open_segment(self._disk, self._directory, self._identity, kept, position)
        if segment is None:
            return False
        self.leave()
        self._segment, self._run = segment, kept.id.run
        self._reach(self.position, kept.id.run)
        return True

    def _at_end(self, segment: OpenSegment, scan: ScanResult, got: int) -> bool:
        """Find out why no complete frame follows in the bytes that were read, and continue. False to wait for
        more.

        A writer completes a segment before it starts the next one, and syncs bytes before it records them as
        durable. So the order of the checks matters: first the durable end, then later segments, then whether
        this segment has grown since it was read. Bytes are corrupt only if they are still bad after all these
        checks.
        """
        file, scanner = segment.file, segment.scanner
        if file.size() == 0 or not file.is_linked():
            return self._trimmed()
        durable = read_durable_end(self._disk, self._directory)
        is_newer = durable is not None and durable.id > segment.id and durable.origin == self._identity.origin
        later = self._later(segment.id, is_last_poll=is_newer or not self._waits)
        if later is None and is_newer and durable is not None:
            path = segment_path(self._directory, durable.id)
            hint = restore_hint(self._identity.kind)
            raise Corrupt("a segment is missing that was synced", path=path, offset=0, hint=hint)
        known = durable.offset if durable is not None and durable.id == segment.id else 0
        if self._grew(segment, scan, got):
            return True
        if durable is not None and durable.id == segment.id and scanner.offset >= known:
            self._complete(durable)
        if later is None and scanner.offset >= known:
            if scanner.boundary < file.size() and not self._waits:
                torn_bytes = max(file.size() - scanner.boundary, 0)
                self._events.emit_bad_tail(BadTail(segment.path, scanner.boundary, torn_bytes))
            return False
        if later is not None and scanner.boundary == file.size():
            return self._open_next(segment, later)
        if file.size() == 0:
            return self._trimmed()
        raise Corrupt(
            scan.problem or "the segment ends inside a batch",
            path=segment.path,
            offset=scanner.boundary,
            hint=restore_hint(self._identity.kind),
        )

    def _complete(self, durable: DurableEnd) -> None:
        """Everything before `durable` was read. A filtered log may be complete beyond its last block."""
        if self._identity.kind is LogKind.FILTERED:
            self._reach(durable.end, durable.id.run)
            self.position = max(self.position, durable.end)

    def _grew(self, segment: OpenSegment, scan: ScanResult, got: int) -> bool:
        """Whether there are more bytes now, or the same bytes verify now because they were being written when
        read.
        """
        if not (scan.problem or scan.needed):
            return segment.file.size() > segment.scanner.offset + got
        with storage_errors(self._directory, "reading a segment"):
            data = segment.file.pread(max(got, scan.needed), segment.scanner.offset)
        return copy(segment.scanner).scan(memoryview(data)).consumed > 0

    def _later(self, segment: SegmentId, *, is_last_poll: bool) -> ReadableSegment | None:
        """The next segment, if there is one.

        While nothing happens this costs two look-ups of file names. The directory is listed if one of them
        exists, if `is_last_poll`, and every `LOOK_AGAIN_SECONDS`: a reset starts a segment with another name.
        """
        run, roll = segment
        nearby = (SegmentId(run, roll + 1), SegmentId(run + 1, 0))
        is_due = is_last_poll or time.monotonic() >= self._list_again_at
        if not is_due and all(
            self._disk.size(segment_path(self._directory, near)) is None for near in nearby
        ):
            return None
        self._list_again_at = time.monotonic() + LOOK_AGAIN_SECONDS
        return read_catalog(self._disk, self._directory).after(segment)

    def _open_next(self, segment: OpenSegment, kept: ReadableSegment) -> bool:
        """Leave `segment`, which was read to its end, and open `kept`. False if `kept` was trimmed
        meanwhile.
        """
        end = segment.scanner.next
        may_jump = self._identity.dedup_id is not None and kept.id.run != segment.id.run
        if may_jump:
            self.position = kept.first
        elif kept.first < end and self._identity.kind is not LogKind.SESSION:
            return self._trimmed()  # The directory has another log now: this file was moved away.
        elif kept.first > end or self._unchecked is not None:
            if self._identity.kind is LogKind.MERGED and self._unchecked is None:
                self._check_later(self.epoch)  # A trimmed segment between the two may have started earlier.
            catalog = read_catalog(self._disk, self._directory)
            self._check_not_replaced(catalog)
            if self._identity.kind is LogKind.FILTERED:
                # The sender's filter left out the positions after the last block, up to the sealed end.
                self._reach(sealed := catalog.sealed_end(segment.id), segment.id.run)
                self.position = max(self.position, sealed)
            self._skip_to(catalog, kept.first)
        self._report_reset(kept, segment.id.run)
        return self._open(kept, max(self.position, kept.first))

    def _report_reset(self, kept: ReadableSegment, earlier_run: int | None) -> None:
        """Report a reset if a merged log continues in a segment of a later epoch than the one before."""
        if (
            self._identity.kind is not LogKind.SESSION
            and earlier_run is not None
            and earlier_run < kept.id.run
        ):
            self._run = kept.id.run
            self._events.emit(Reset(kept.first, kept.id.run))

    def _trimmed(self) -> bool:
        """The open segment was trimmed, or a reset replaced the log: look for the position again."""
        self.leave()
        self._check_later(self.epoch)
        return self._enter(is_gap=True)

    def _skip_to(self, catalog: SegmentCatalog, start: int) -> None:
        if start > self.position:
            self._reach(start, catalog.run_at(start))
            why = reason_of(read_skips(self._disk, self._directory), self.position, start)
            reason = catalog.trim_reason(self.position) if why is None else why
            event = SkipForward(self.position, start, reason.name.lower())
            self.position = start
            self._events.emit(event)
