"""Decides whether every subscription received what it must, from the published events and the hosts' notes.

Pure. Each broken promise is reported as a sentence. The promises:

- Each subscription gets each event of its stream at least once, and never before the event that precedes it.
- The results of a consumer that keeps its token have each event once.
- No two hosts call consumers of a queue at the same time, each with a valid lease.
- No gap is reported, because nothing is trimmed here.
- A fault delays no queue for longer than a limit. The absence of a cluster delays its own queue only.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from chaos.streams.notes import NO_FENCE, Call, Note, Started, Subscribed, Wrong

KEEPERS: Final = ("keeping", "ledger")
FROM_LATEST: Final = "tail"
BY_NAME: Final = ("ledger", FROM_LATEST)
SUBSCRIPTIONS: Final = (*KEEPERS, "plain", FROM_LATEST)


class Reader(NamedTuple):
    """A subscription of a stream."""

    subscription: str
    stream: str


class NotedCall(NamedTuple):
    life: str
    """Name of the run of the host, such as `h1.2`."""
    call: Call


class Absence(NamedTuple):
    """A time when a cluster was away. Its queue may be late with events published before `until_s`."""

    queue: str
    from_s: float
    until_s: float


@dataclass(slots=True)
class Watch:
    """The times at which queues were served after a fault: each reader has received an event published after
    it.
    """

    kind: str
    fault: str
    since_s: float
    waiting: set[Reader]
    served_s: dict[str, float] = field(default_factory=dict)
    """By queue: seconds since the fault."""

    @property
    def slowest_s(self) -> float:
        return max(self.served_s.values(), default=0.0) if not self.waiting else math.inf


class Verdict:
    """`queue_of`: the queue of each stream."""

    def __init__(self, queue_of: Mapping[str, str]) -> None:
        self._queue_of = dict(queue_of)
        self.published: dict[str, list[float]] = {stream: [] for stream in queue_of}
        """By stream: when each event was published."""
        self.calls: list[NotedCall] = []
        self.started: dict[str, float] = {}
        """By host run: when its provider had started."""
        self.watches: list[Watch] = []
        self.absences: list[Absence] = []
        self._subscribed: dict[Reader, float] = {}
        self._wrong: list[str] = []
        self._reached: dict[Reader, int] = defaultdict(int)
        """One past the greatest number that a reader has received."""
        self._callers: dict[str, tuple[float, str]] = {}
        """By queue: the start of the last call with a valid lease, and the host run that made it."""

    def readers(self, *queues: str) -> set[Reader]:
        """All readers of these queues."""
        streams = [stream for stream, queue in self._queue_of.items() if queue in queues]
        return {Reader(subscription, stream) for subscription in SUBSCRIPTIONS for stream in streams}

    def watch(self, kind: str, fault: str, since_s: float, *queues: str) -> Watch:
        watch = Watch(kind, fault, since_s, self.readers(*queues))
        self.watches.append(watch)
        return watch

    def take(self, life: str, notes: Iterable[Note]) -> None:
        """Add the next notes of a host run."""
        for note in notes:
            match note:
                case Call():
                    self.calls.append(NotedCall(life, note))
                    self._take_call(life, note)
                case Subscribed(at_s, subscription, stream):
                    reader = Reader(subscription, stream)
                    self._subscribed[reader] = min(at_s, self._subscribed.get(reader, math.inf))
                case Started(at_s):
                    self.started[life] = at_s
                case Wrong(_, text):
                    self._wrong.append(f"{life}: {text}")

    def owner(self, queue: str) -> str | None:
        """Return the host run that was the last one to call consumers with a valid lease."""
        return self._callers[queue][1] if queue in self._callers else None

    def is_subscribed(self) -> bool:
        """Whether all subscriptions by name exist."""
        readers = self.readers(*self._queue_of.values())
        return all(reader in self._subscribed for reader in readers if reader.subscription in BY_NAME)

    def has_begun(self) -> bool:
        """Whether each reader has received an event."""
        return all(self._reached[reader] for reader in self.readers(*self._queue_of.values()))

    def has_all(self) -> bool:
        """Whether each reader has received the last event of its stream."""
        return all(
            self._reached[reader] >= len(self.published[reader.stream])
            for reader in self.readers(*self._queue_of.values())
        )

    def _take_call(self, life: str, call: Call) -> None:
        queue = self._queue_of[call.stream]
        if call.fence != NO_FENCE and call.begun_s >= self._callers.get(queue, (0.0, ""))[0]:
            self._callers[queue] = call.begun_s, life
        if not call.events:
            return
        reader, newest = Reader(call.subscription, call.stream), max(end for _, end in call.events)
        self._reached[reader] = max(self._reached[reader], newest)
        published_s = self.published[call.stream][newest - 1]
        for watch in self.watches:
            if reader in watch.waiting and published_s >= watch.since_s:
                watch.waiting.discard(reader)
                delay_s = call.done_s - watch.since_s
                watch.served_s[queue] = max(delay_s, watch.served_s.get(queue, 0.0))

    # At the end

    def problems(
        self, results: Mapping[Reader, Sequence[tuple[int, str]]], limit_s: float = math.inf
    ) -> list[str]:
        """Return all problems. `results`: the results of each keeper. `limit_s`: the longest allowed delay of
        a queue.
        """
        calls = sorted(self.calls, key=lambda each: each.call.begun_s)
        found = list(self._wrong)
        found += self._owners(calls)
        found += self._missing(calls)
        for reader in sorted(self.readers(*self._queue_of.values())):
            if reader.subscription in KEEPERS:
                found += self._results(reader, results.get(reader, []))
        for watch in self.watches:
            if watch.slowest_s > limit_s:
                found.append(f"served again {watch.slowest_s:.1f} s after {watch.fault}")
        for queue, (late_s, reader) in self.delays(calls).items():
            if late_s > limit_s:
                found.append(f"{queue}: {reader} had an event {late_s:.1f} s after it was published")
        return found

    def _owners(self, calls: Sequence[NotedCall]) -> Iterator[str]:
        """Check that fencing tokens rise in the order of the calls' starts, and that each belongs to one host
        run.
        """
        last: dict[str, int] = defaultdict(int)
        lives: dict[tuple[str, int], str] = {}
        for life, call in calls:
            queue, fence = self._queue_of[call.stream], call.fence
            if fence == NO_FENCE:
                continue
            if fence < last[queue]:
                yield f"{queue}: {life} called with the valid fence {fence} after fence {last[queue]}"
            if lives.setdefault((queue, fence), life) != life:
                yield f"{queue}: {life} and {lives[queue, fence]} both had the fence {fence}"
            last[queue] = max(last[queue], fence)

    def _missing(self, calls: Sequence[NotedCall]) -> Iterator[str]:
        """Check the consumers that keep no token. Only their calls are known."""
        expected: dict[Reader, int] = {}
        for life, call in calls:
            if call.subscription in KEEPERS or not call.events:
                continue
            reader = Reader(call.subscription, call.stream)
            if reader not in expected:
                expected[reader] = self._first(reader, call.events[0][0])
            for start, end in call.events:
                if start > expected[reader]:
                    yield f"{life}: {reader} had {start} where {expected[reader]} must follow"
                expected[reader] = max(expected[reader], end)
        for reader in sorted(self.readers(*self._queue_of.values())):
            end = len(self.published[reader.stream])
            if reader.subscription not in KEEPERS and expected.get(reader, 0) < end:
                yield f"{reader} had events up to {expected.get(reader, 0)} of {end}"

    def _first(self, reader: Reader, first: int) -> int:
        """Return the first event that a reader must receive. If the reader starts at the end, this may be the
        earlier `first`.
        """
        if reader.subscription != FROM_LATEST:
            return 0
        since_s = self._subscribed.get(reader, math.inf)
        must = sum(published_s <= since_s for published_s in self.published[reader.stream])
        return min(first, must)

    def _results(self, reader: Reader, rows: Sequence[tuple[int, str]]) -> Iterator[str]:
        expected = [f"{reader.stream}.{number}" for number in range(len(self.published[reader.stream]))]
        if [event for _, event in rows] != expected:
            at = next(
                (at for at, (row, one) in enumerate(zip(rows, expected, strict=False)) if row[1] != one), -1
            )
            got = rows[at][1] if at >= 0 else "all before them"
            yield f"{reader} keeps {len(rows)} events of {len(expected)}; at {at}: {got}"
        if any(later <= earlier for (earlier, _), (later, _) in itertools.pairwise(rows)):
            yield f"{reader}: tokens do not rise"

    def delays(self, calls: Sequence[NotedCall] | None = None) -> dict[str, tuple[float, Reader]]:
        """Return, by queue, the longest time from an event's publication to a reader's first call with it.

        Events whose cluster was away in between do not count.
        """
        had: dict[Reader, int] = defaultdict(int)
        longest: dict[str, tuple[float, Reader]] = {}
        for _, call in self.calls if calls is None else calls:
            reader, queue = Reader(call.subscription, call.stream), self._queue_of[call.stream]
            for start, end in call.events:
                first = max(start, had[reader])
                if first >= end:
                    continue
                published_s = self.published[call.stream][first]
                if reader.subscription != FROM_LATEST or had[reader]:
                    is_excused = any(
                        away.queue == queue and published_s <= away.until_s and call.done_s >= away.from_s
                        for away in self.absences
                    )
                    late_s = call.done_s - published_s
                    if not is_excused and late_s > longest.get(queue, (0.0, reader))[0]:
                        longest[queue] = late_s, reader
                had[reader] = end
        return longest

    def late_calls(self) -> int:
        """Return the number of calls that started after the host had lost the lease."""
        return sum(call.fence == NO_FENCE for _, call in self.calls)

    def repeats(self) -> int:
        """Return how many times consumers without tokens received an event again."""
        had: dict[Reader, int] = defaultdict(int)
        count = 0
        for _, call in sorted(self.calls, key=lambda each: each.call.begun_s):
            if call.subscription in KEEPERS:
                continue
            reader = Reader(call.subscription, call.stream)
            for start, end in call.events:
                count += max(0, min(end, had[reader]) - start)
                had[reader] = max(had[reader], end)
        return count
