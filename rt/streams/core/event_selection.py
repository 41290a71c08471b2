"""Selects the events of a batch that a consumer gets, and their values.

Pure, except for the functions of the caller. An event that could not be decoded or examined is never skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rt.errors import UndecodableValue
from rt.serializers import Serializer
from rt.streams.core.errors import DeliveryFailed
from rt.streams.core.event_batch import EventBatch, join
from rt.streams.core.stream_id import SequenceToken


class Selected(Struct, frozen=True):
    """The selection from the events from `first` up to, not including, `end`."""

    first: SequenceToken
    end: SequenceToken
    examined: int
    batch: EventBatch | None
    """None: no event was selected."""
    originals: Sequence[Any]
    """The events of `batch` as they are in the queue."""
    error: Exception | None = None
    """The error that was raised for the event at `end`."""

    def __len__(self) -> int:
        return len(self.originals)

    @property
    def original(self) -> EventBatch:
        """The batch with the events as they are in the queue."""
        assert self.batch is not None
        return replace(self.batch, events=self.originals)

    def and_then(self, later: Selected) -> Selected:
        """Return this selection joined with `later`, the selection from the following events."""
        batches = [each.batch for each in (self, later) if each.batch is not None]
        return Selected(
            self.first,
            later.end,
            self.examined + later.examined,
            join(batches) if batches else None,
            [*self.originals, *later.originals],
            later.error,
        )


class EventSelection:
    """The filter and the serializer of one consumer. None: events are not filtered, or not decoded."""

    __slots__ = ("_serializer", "_where")

    def __init__(self, where: Callable[[Any], object] | None, serializer: Serializer[Any] | None) -> None:
        self._where = where
        self._serializer = serializer

    def select(self, batch: EventBatch, events_max: int) -> Selected:
        """Select events. Stops after `events_max` selected events, and before an event that cannot be decoded
        or examined.
        """
        values: list[Any] = []
        places: list[int] = []
        error: Exception | None = None
        where, serializer = self._where, self._serializer
        examined = len(batch.events)
        for place, event in enumerate(batch.events):
            if len(values) == events_max:
                examined = place
                break
            try:
                value = event if serializer is None else _decoded(event, serializer)
                if where is None or where(value):
                    values.append(value)
                    places.append(place)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as failure:  # noqa: BLE001 - whatever it raises, also a panic of an extension
                examined, error = place, _as_exception(failure)
                break
        end = batch.end if examined == len(batch.events) else batch.token(examined)
        first = batch.first
        if not places:
            return Selected(first, end, examined, None, (), error)
        if len(places) == len(batch.events):
            whole = batch if serializer is None else replace(batch, events=values)
            return Selected(first, end, examined, whole, batch.events)
        indexes = batch.event_indexes
        taken = EventBatch(
            batch.stream,
            [batch.sequence_numbers[place] for place in places],
            values,
            None if indexes is None else [indexes[place] for place in places],
            batch.size_bytes * len(places) // len(batch.events),
            None if batch.headers is None else [batch.headers[place] for place in places],
        )
        return Selected(first, end, examined, taken, [batch.events[place] for place in places], error)


def _decoded(event: Any, serializer: Serializer[Any]) -> Any:
    if not isinstance(event, bytes | bytearray | memoryview):
        raise UndecodableValue(
            "an event is no bytes", got=repr(event)[:500], expected=serializer.content_type
        )
    try:
        return serializer.loads(bytes(event))
    except Exception as error:
        raise UndecodableValue(
            "an event cannot be decoded",
            got=f"{type(error).__name__}: {error}"[:500],
            expected=serializer.content_type,
        ) from error


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    failed = DeliveryFailed(f"the filter raised {type(error).__name__}", got=str(error))
    failed.__cause__ = error
    return failed
