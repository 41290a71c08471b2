"""The subscriptions in the table of a queue, as rows for operators. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, to_builtins

from rt.cli.formats.tables import escape, format_age, table
from rt.errors import RtError
from rt.objects import MemoryStore, ObjectError
from rt.streams.balancer.balancer import Fence
from rt.streams.core.stream_id import QueueId, SequenceToken
from rt.streams.subscriptions.subscription_store import SubscriptionStore

_ID_DIGITS: Final = 8
_LAST_FENCE: Final = Fence(2**63 - 1)


class SubscriptionRow(Struct, frozen=True):
    """`subscription` is its name, the name of its pattern or of its consumer, or its id. `age_s` is None if
    the age is not known.
    """

    queue: str
    id: str
    subscription: str
    stream: str
    kind: str
    position: int
    lag: int
    state: str
    age_s: int | None
    fault: str | None
    consumer: str | None


class QueueRow(Struct, frozen=True):
    """A queue. All subscriptions that are not listed have everything before `position`. It is None if nothing
    was read yet.
    """

    lease: str
    queue: str
    owner: str
    position: int | None
    lag: int
    paused_s: int | None
    """Seconds since the queue was paused; None if it is not paused."""
    subscriptions: Sequence[SubscriptionRow]


def read_queue(
    lease: str, queue: str, owner: str, content: Mapping[str, bytes], end: int, now_s: float
) -> QueueRow:
    """Read a queue from `content`, the rows of its table. `end` is the end of the log."""
    categories: dict[str, dict[str, bytes]] = {}
    for key, value in content.items():
        category, _, name = key.partition("\0")
        categories.setdefault(category, {})[name] = value
    try:
        store = SubscriptionStore(MemoryStore(categories), QueueId(0, queue), _LAST_FENCE)
        low, paused_s = store.low, store.paused_s
        records = [(each, store.place(each.id) or low) for each in store.records()]
    except (ObjectError, ValueError, TypeError, KeyError) as error:
        raise RtError(
            "the table has no subscriptions that this version can read",
            where=lease,
            got=f"{type(error).__name__}: {error}"[:300],
            hint="It changed while it was read, or a newer version wrote it: try again.",
        ) from error
    found = [
        SubscriptionRow(
            queue,
            each.id,
            each.label,
            each.stream.topic,
            "implicit" if each.is_implicit else "explicit",
            position := _position(place),
            max(0, end - position),
            "faulted" if each.fault else "paused" if paused_s else "active" if owner else "waiting",
            None if each.created_s is None else max(0, int(now_s) - each.created_s),
            each.fault,
            each.consumer,
        )
        for each, place in records
    ]
    found.sort(key=lambda one: (one.stream, one.subscription, one.id))
    position_of_all = None if low is None else _position(low)
    lag = 0 if position_of_all is None else max(0, end - position_of_all)
    since = None if paused_s is None else max(0, int(now_s) - paused_s)
    return QueueRow(lease, queue, owner, position_of_all, lag, since, found)


def _position(place: SequenceToken | None) -> int:
    return 0 if place is None else place.sequence_number + (place.event_index > 0)


def list_lines(queues: Sequence[QueueRow]) -> Iterator[str]:
    """A line for each subscription, then one for each queue."""
    numbers = ("position", "lag", "age")
    rows = [
        [
            escape(one.queue),
            one.id[:_ID_DIGITS],
            *map(escape, (one.subscription, one.stream)),
            f"{one.position:,}",
            f"{one.lag:,}",
            one.state,
            "" if one.age_s is None else format_age(one.age_s * 10**9),
        ]
        for queue in queues
        for one in queue.subscriptions
    ]
    header = ("queue", "id", "subscription", "stream", "position", "lag", "state", "age")
    yield from table(header, rows, right=frozenset(numbers))
    yield ""
    of_queues = [
        [
            escape(one.queue),
            escape(one.owner) or "none",
            "" if one.position is None else f"{one.position:,}",
            f"{one.lag:,}",
            "" if one.paused_s is None else f"{format_age(one.paused_s * 10**9)}",
        ]
        for one in queues
    ]
    right = frozenset({"position", "lag", "paused for"})
    yield from table(("queue", "owner", "position", "lag", "paused for"), of_queues, right=right)
    for queue in queues:
        for each in queue.subscriptions:
            if each.fault:
                yield f"{each.id[:_ID_DIGITS]} {escape(each.subscription)}: {escape(each.fault)}"


def queue_object(queue: QueueRow) -> dict[str, Any]:
    """The queue and its subscriptions as a JSON object."""
    found: dict[str, Any] = to_builtins(queue)
    return found


def chosen(queues: Sequence[QueueRow], text: str, stream: str | None) -> tuple[QueueRow, SubscriptionRow]:
    """The queue and the subscription with this id, beginning of an id, or name. `rt.RtError` unless exactly
    one subscription matches.
    """
    found = [
        (queue, one)
        for queue in queues
        for one in queue.subscriptions
        if (one.subscription == text or (len(text) >= _ID_DIGITS and one.id.startswith(text)))
        and stream in (None, one.stream)
    ]
    if len(found) == 1:
        return found[0]
    several = ", ".join(f"{one.id[:_ID_DIGITS]} ({one.stream})" for _, one in found)
    raise RtError(
        "several subscriptions have that name" if found else "there is no such subscription",
        got=text,
        expected=several[:500] or None,
        hint="Name it by its id, or with --stream." if found else "See `rt streams subscriptions list`.",
    )
