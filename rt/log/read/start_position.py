"""Where a reader starts: a position, an end of the log, or a time."""

from __future__ import annotations

import contextlib
import operator
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from rt.cluster_epoch import EPOCH_NUMBER_END
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
    """The first message with a timestamp (ns) at or after this one; what precedes it is passed over.

    `position`: no message before it has such a timestamp; None if the log was not searched.
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
        """`rt.InvalidOption` if `time` has no timezone."""
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
    """0 while it is unknown."""
    position = place.position if isinstance(place, StartTime) else place
    return position if isinstance(position, int) else 0


def check_epoch(epoch: int | None, place: Place | None) -> int | None:
    """The number of the epoch in which a position was right; None if it is not known. `rt.InvalidOption`."""
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
    """`rt.Diverged` if a forced reset gave a position before `position` another message since.

    `position` was right in the epoch with the number `epoch`.
    """
    later = catalog.forced_after(epoch)
    if later is None or later.first > position or (later.first == position and not later.id.roll):
        return
    raise Diverged(
        "a forced reset gave positions of the log other messages",
        where=directory,
        got=f"epoch {later.id.run} from position {later.first} on",
        expected=f"epoch {epoch} up to position {position}",
        hint=f"Start again at position {later.first}, without the results of what was read after it.",
    )


class FoundStart(NamedTuple):
    """A position. Also the run of the segment that was scanned to its end to find it, if any."""

    position: int
    run: int | None


def check_place(place: Place) -> CheckedPlace:
    """A position that a message may have, "earliest", "latest", or a time. Raises `rt.InvalidOption`."""
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
    disk: Disk, directory: str, identity: LogIdentity, place: Place, *, may_be_ahead: bool = False
) -> FoundStart:
    """Raises `rt.InvalidOption` for an invalid place, or a position after the log end.

    A reader after the end would wait indefinitely; it is allowed if the log is being filled (`may_be_ahead`).
    In a dedup session any number may be the next one.
    """
    place = check_place(place)
    if isinstance(place, StartTime):
        if place.position is not None:
            return FoundStart(place.position, None)
        from rt.log.read.time_search import search_time  # With numpy, which no push or pull needs otherwise.

        found = search_time(disk, directory, identity, place.timestamp_ns)
        return FoundStart(found.position, found.run)  # What is damaged there is reported when it is read.
    if isinstance(place, int):
        return FoundStart(place, None) if may_be_ahead else _checked(disk, directory, identity, place)
    catalog = read_catalog(disk, directory)
    if place == "earliest":
        return FoundStart(catalog.start, None)
    return _end(disk, directory, identity, catalog)


def _checked(disk: Disk, directory: str, identity: LogIdentity, position: int) -> FoundStart:
    catalog = read_catalog(disk, directory)
    if position <= catalog.known_end or identity.dedup_id is not None:
        return FoundStart(position, None)
    end = _end(disk, directory, identity, catalog)
    if position > end.position:
        raise InvalidOption(f"position {position} is beyond the end, {end.position}, of {directory}")
    return FoundStart(position, end.run)


def _end(disk: Disk, directory: str, identity: LogIdentity, catalog: SegmentCatalog) -> FoundStart:
    """One past the last complete message, found from the newest segment's last index entry."""
    if not catalog.kept or catalog.kept[-1].end is not None:
        return FoundStart(max(catalog.known_end, catalog.start), None)
    segment = open_segment(disk, directory, identity, catalog.kept[-1], 2**62)
    if segment is None:
        return FoundStart(catalog.known_end, None)
    try:
        for _ in scans(segment.file.pread, segment.scanner):
            pass
        end, durable = segment.scanner.next, read_durable_end(disk, directory)
        if identity.kind is LogKind.FILTERED and durable is not None and durable.id == segment.id:
            end = max(end, durable.end)  # It is complete beyond its last block.
        return FoundStart(end, segment.id.run)
    finally:
        segment.close()
