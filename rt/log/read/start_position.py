"""Where a reader starts: at a position, at an end of the log, or at a time."""

from __future__ import annotations

import contextlib
import operator
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from rt.cluster_epoch import EPOCH_NUMBER_END, forced_number
from rt.errors import Diverged, InvalidOption
from rt.log.disk import Disk
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.log.read.open_segment import open_segment
from rt.log.scan.catalog import SegmentCatalog, read_catalog
from rt.log.scan.directory import read_durable_end, scans

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMESTAMP_END: Final = 2**63


class StartTime(Struct, frozen=True):
    """Start at the first message whose timestamp is `timestamp_ns` or later, and skip those before it.

    `position`: a position found by a search, before which no message has such a timestamp; None if the log
    was not searched yet.
    """

    timestamp_ns: int
    position: int | None = None

    def __post_init__(self) -> None:
        if not -_TIMESTAMP_END <= self.timestamp_ns < _TIMESTAMP_END:
            raise InvalidOption(
                "a time is out of range", got=f"{self.timestamp_ns} ns since 1970", expected="1678 to 2262"
            )

    @classmethod
    def of(cls, time: datetime) -> StartTime:
        """The start at `time`. Raises `rt.InvalidOption` if it has no timezone."""
        given: object = time
        if not isinstance(given, datetime) or given.utcoffset() is None:
            raise InvalidOption(
                "a time without a timezone" if isinstance(given, datetime) else "not a time",
                got=repr(time)[:200],
                expected="a datetime with a timezone",
                hint="Give it one: `datetime.now(UTC)`, or `time.astimezone()` if it is local time.",
            )
        return cls((time - _EPOCH) // timedelta(microseconds=1) * 1000)


Place: TypeAlias = int | Literal["earliest", "latest"] | datetime | StartTime
CheckedPlace: TypeAlias = int | Literal["earliest", "latest"] | StartTime


def known_position(place: CheckedPlace) -> int:
    """The position of `place`; 0 if it must be searched for."""
    position = place.position if isinstance(place, StartTime) else place
    return position if isinstance(position, int) else 0


def check_epoch(epoch: int | None, place: Place | None) -> int | None:
    """Check a reader's `epoch=`: the number of the epoch in which its `position=` was right, or None.

    Raises `rt.InvalidOption`.
    """
    given: object = epoch
    if given is None:
        return None
    if not isinstance(place, int):
        raise InvalidOption("epoch= belongs to a number as position=", got=f"position={place!r}")
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < EPOCH_NUMBER_END:
        expected = f"the number of an epoch, below {EPOCH_NUMBER_END}"
        raise InvalidOption("invalid epoch", got=repr(given)[:200], expected=expected)
    return given


def check_not_replaced(directory: str, catalog: SegmentCatalog, position: int, epoch: int) -> None:
    """Raise `rt.Diverged` if a reset that was forced after `epoch` replaced the message at a position before
    `position`.

    `position` was right in the epoch with the number `epoch`. After a forced reset the log continues in a
    segment whose X is the number of the new epoch. If that segment starts before `position`, messages were
    replaced. If that segment is not known, because it was trimmed and forgotten, messages may have been
    replaced: this raises, too.
    """
    reset = catalog.forced_after(epoch)
    if reset is None or position <= reset.start:
        return
    hint = f"Start again at position {reset.end}"
    if reset.start < reset.end:
        hint = (
            "The reset was before that, and the directory does not show where. `rt rest /log-history` does: "
            f"at the first segment log.X.Y with X from {forced_number(epoch)} on. Start again at its logPos"
        )
    raise Diverged(
        "a forced reset gave positions of the log other messages",
        where=directory,
        got=f"epoch {reset.segment.run} from position {reset.end} on",
        expected=f"epoch {epoch} up to position {position}",
        hint=f"{hint}, without the results of what was read after it.",
    )


class FoundStart(NamedTuple):
    """A position, and the run (X) of the segment that ends there; None if the position is elsewhere.

    The reader counts that segment as read, so it reports a reset if the next segment has another run.
    """

    position: int
    run: int | None


def check_place(place: Place) -> CheckedPlace:
    """Check a reader's `position=`. Raises `rt.InvalidOption`. A datetime becomes a `StartTime`."""
    if isinstance(place, datetime):
        return StartTime.of(place)
    if isinstance(place, StartTime) or place in ("earliest", "latest"):
        return place
    position = -1
    with contextlib.suppress(TypeError):
        position = operator.index(place)  # type: ignore[arg-type]
    if isinstance(place, bool) or not 0 <= position <= NUMBER_MAX:
        expected = f"a number from 0 to {NUMBER_MAX}, 'earliest', 'latest', or a datetime"
        raise InvalidOption("invalid position", got=repr(place)[:200], expected=expected)
    return position


def find_place(
    disk: Disk,
    directory: str,
    identity: LogIdentity,
    place: Place,
    *,
    may_be_ahead: bool = False,
    epoch: int | None = None,
) -> FoundStart:
    """The position at which a reader of `place` starts.

    Raises `rt.InvalidOption` for an invalid place, or a position after the log end, where a reader would wait
    indefinitely. A position after the end is allowed in three cases. The log is being filled
    (`may_be_ahead`). Or the log is a dedup session, where any number may be the next one. Or the position was
    right in `epoch` and a forced reset removed it: this is reported to its reader.
    """
    place = check_place(place)
    if isinstance(place, StartTime):
        if place.position is not None:
            return FoundStart(place.position, None)
        # Imports numpy, which a push or a pull does not need otherwise.
        from rt.log.read.time_search import search_time

        found = search_time(disk, directory, identity, place.timestamp_ns)
        return FoundStart(found.position, found.run)  # Corrupt bytes there are reported when they are read.
    if isinstance(place, int):
        return (
            FoundStart(place, None)
            if may_be_ahead
            else _not_after_end(disk, directory, identity, place, epoch)
        )
    catalog = read_catalog(disk, directory)
    if place == "earliest":
        return FoundStart(catalog.start, None)
    return _end(disk, directory, identity, catalog)


def _not_after_end(
    disk: Disk, directory: str, identity: LogIdentity, position: int, epoch: int | None
) -> FoundStart:
    catalog = read_catalog(disk, directory)
    if position <= catalog.known_end or identity.dedup_id is not None:
        return FoundStart(position, None)
    end = _end(disk, directory, identity, catalog)
    reset = None if epoch is None else catalog.forced_after(epoch)
    if position > end.position and (reset is None or position <= reset.start):
        raise InvalidOption(
            f"position {position} is beyond the end, {end.position}, of {directory}",
            hint="It is of another log, or a forced reset took the end of this one.",
        )
    return FoundStart(position, end.run)


def _end(disk: Disk, directory: str, identity: LogIdentity, catalog: SegmentCatalog) -> FoundStart:
    """One past the last complete message. The newest segment is scanned from its last index entry."""
    if not catalog.kept:
        return FoundStart(catalog.known_end, None)
    if catalog.kept[-1].end is not None:
        return FoundStart(max(catalog.known_end, catalog.start), catalog.kept[-1].id.run)
    segment = open_segment(disk, directory, identity, catalog.kept[-1], NUMBER_MAX)
    if segment is None:
        return FoundStart(catalog.known_end, None)
    try:
        for _ in scans(segment.file.pread, segment.scanner):
            pass
        end, durable = segment.scanner.next, read_durable_end(disk, directory)
        if identity.kind is LogKind.FILTERED and durable is not None and durable.id == segment.id:
            end = max(end, durable.end)  # The segment is complete beyond its last block.
        return FoundStart(end, segment.id.run)
    finally:
        segment.close()
