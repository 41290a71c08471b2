"""The cache of a queue: what it keeps, what it evicts, and its bounds."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rt.errors import InvalidOption
from rt.streams.core.event_batch import EventBatch, join
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.queue.queue_cache import CacheCursor, QueueCache

A, B, C = StreamId("s", "a"), StreamId("s", "b"), StreamId("s", "c")


def batch(stream: StreamId, numbers: Sequence[int], size: int = 0) -> EventBatch:
    return EventBatch(stream, list(numbers), [f"{stream.key}{number}" for number in numbers], None, size)


def at(number: int, index: int = 0) -> SequenceToken:
    return SequenceToken(number, index)


def fill(cache: QueueCache, stream: StreamId, count: int) -> None:
    """Fill the cache, with one event for each read."""
    for _ in range(count):
        number = cache.end.sequence_number
        cache.add([batch(stream, [number])], at(number + 1))


def test_cursor_in_oldest_bucket_leaves_full_cache_without_room_until_it_advances() -> None:
    cache = QueueCache(at(0), events_max=100)
    cursor = cache.cursor(A, None)
    cursor.place(at(0))
    fill(cache, A, 90)
    assert cache.room == 10
    fill(cache, A, 1)
    assert cache.room == 0
    assert cache.purge() == 0
    assert cache.slow() == [cursor]
    cursor.advance(at(10))
    assert cache.purge() == 10
    assert cache.room == 10
    assert cache.low() == at(10)


def test_purge_evicts_events_without_readers_when_cache_is_nearly_full() -> None:
    cache = QueueCache(at(0), events_max=100)
    fill(cache, A, 95)
    assert cache.low() == at(95)
    assert cache.pressure == 0
    assert cache.purge() == 50
    assert cache.oldest(A) == at(49, 1)
    assert cache.covers(A, at(50))
    assert not cache.covers(A, at(49))


def test_cursor_returns_only_events_of_its_stream_from_its_position() -> None:
    cache = QueueCache(at(0))
    cache.add([batch(A, [0, 2, 4]), batch(B, [1, 3])], at(5))
    cursor = cache.cursor(A, None)
    cursor.place(at(1))
    waiting = cache.cursor(A, None)
    waiting.place(at(7))
    assert cache.add([batch(A, [5, 6])], at(7)) == []
    assert not waiting.has_more
    assert cache.add([batch(A, [7, 8])], at(9)) == [waiting]
    first = cursor.take(3)
    assert first is not None
    assert list(first.sequence_numbers) == [2, 4]
    everything = cursor.take(100)
    assert everything is not None
    assert list(everything.events) == ["a2", "a4", "a5", "a6", "a7", "a8"]
    cursor.advance(at(4).next)
    assert cursor.wanted == at(4, 1)
    rest = cursor.take(1)
    assert rest is not None
    assert rest.first == at(5)


def test_events_read_again_from_queue_are_ignored() -> None:
    cache = QueueCache(at(5))
    cursor = cache.cursor(A, None)
    cursor.place(at(5))
    cache.add([batch(A, [3, 4, 5, 6])], at(7))
    cache.add([batch(A, [5, 6])], at(7))
    taken = cursor.take(10)
    assert taken is not None
    assert list(taken.sequence_numbers) == [5, 6]
    assert cache.events == 2


def test_closed_cursor_pins_no_events_and_can_be_closed_twice() -> None:
    cache = QueueCache(at(0), events_max=10)
    cursor = cache.cursor(A, None)
    cursor.place(at(0))
    fill(cache, A, 10)
    assert cache.room == 0
    cursor.close()
    cursor.close()
    cache.purge()
    assert cache.room == 1
    assert cache._line(A).cursors == 0
    assert cache.low() == cache.end


def test_cache_exceeds_bytes_max_by_at_most_one_read() -> None:
    cache = QueueCache(at(0), bytes_max=1000)
    cursor = cache.cursor(A, None)
    cursor.place(at(0))
    number = 0
    while cache.room:
        cache.add([batch(A, [number], size=300)], at(number + 1))
        number += 1
    assert cache.bytes == 1200
    cursor.advance(at(3))
    cache.purge()
    assert cache.room


def test_batch_is_sliced_and_joined_by_tokens_with_indexes() -> None:
    many = EventBatch(A, [4, 4, 4, 6], list("wxyz"), [0, 1, 2, 0], 40)
    part = many.from_token(at(4, 1))
    assert part is not None
    assert list(part) == [(at(4, 1), "x"), (at(4, 2), "y"), (at(6), "z")]
    assert part.size_bytes == 30
    assert many.from_token(at(6).next) is None
    both = join([batch(A, [1, 2]), many])
    assert [both.first, both.last, len(both)] == [at(1), at(6), 6]
    assert both.token(3) == at(4, 1)
    assert batch(A, [4, 6]).place_of(at(4, 1)) == 1


def test_cache_with_too_few_events_raises_invalid_option() -> None:
    with pytest.raises(InvalidOption, match="too small"):
        QueueCache(at(0), events_max=9)


class CacheAgainstLists(RuleBasedStateMachine):
    """Compare the cache with lists of everything that was read."""

    EVENTS_MAX = 30

    def __init__(self) -> None:
        super().__init__()
        self.cache = QueueCache(at(0), events_max=self.EVENTS_MAX)
        self.read: dict[StreamId, list[int]] = {A: [], B: [], C: []}
        self.cursors: dict[CacheCursor, StreamId] = {}

    @precondition(lambda self: self.cache.room > 0)
    @rule(owners=st.lists(st.sampled_from([A, B, C, None]), max_size=3), data=st.data())
    def read_some(self, owners: list[StreamId | None], data: st.DataObject) -> None:
        owners = owners[: self.cache.room]
        start = self.cache.end.sequence_number
        batches = []
        for stream in data.draw(st.permutations([A, B, C])):
            if numbers := [start + at for at, owner in enumerate(owners) if owner == stream]:
                batches.append(batch(stream, numbers))
                self.read[stream] += numbers
        woken = self.cache.add(batches, at(start + len(owners)))
        assert all(cursor.has_more for cursor in woken)

    @rule(stream=st.sampled_from([A, B, C]), back=st.integers(0, 12))
    def subscribe(self, stream: StreamId, back: int) -> None:
        cursor = self.cache.cursor(stream, None)
        wanted = max(self.cache.oldest(stream), at(max(0, self.cache.end.sequence_number - back)))
        cursor.place(wanted)
        self.cursors[cursor] = stream

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), count=st.integers(1, 9))
    def consume(self, data: st.DataObject, count: int) -> None:
        cursor = data.draw(st.sampled_from(list(self.cursors)))
        left = [n for n in self.read[self.cursors[cursor]] if at(n) >= cursor.wanted]
        if cursor.is_parked:
            return
        taken = cursor.take(count)
        assert (taken is None) == (not left)
        if taken is not None:
            assert list(taken.sequence_numbers) == left[: len(taken)]
            cursor.advance(taken.end)

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def park_and_return(self, data: st.DataObject) -> None:
        cursor = data.draw(st.sampled_from(list(self.cursors)))
        if not cursor.is_parked:
            cursor.park()
        elif self.cache.covers(self.cursors[cursor], cursor.wanted):
            cursor.place(cursor.wanted)

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        cursor = data.draw(st.sampled_from(list(self.cursors)))
        del self.cursors[cursor]
        cursor.close()

    @rule()
    def purge(self) -> None:
        self.cache.purge()

    @invariant()
    def it_is_bounded_and_low_is_what_the_last_one_lacks(self) -> None:
        assert self.cache.events <= self.EVENTS_MAX
        lacking = [
            cursor.wanted
            for cursor, stream in self.cursors.items()
            if not cursor.is_parked and any(at(n) >= cursor.wanted for n in self.read[stream])
        ]
        assert self.cache.low() == min(lacking, default=self.cache.end)
        assert sum(line.cursors for line in self.cache._lines.values()) == len(self.cursors)


TestCacheAgainstLists = CacheAgainstLists.TestCase
TestCacheAgainstLists.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
