"""Names and tokens of streams and queues, and the mapping of streams to queues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.errors import InvalidName, InvalidOption
from rt.streams.core.stream_id import RING_SIZE, SequenceToken, StreamId, stream_of
from rt.streams.queue.mapper import HashRingQueueMapper, PartitionedQueueMapper, RingRange


@given(st.text(max_size=20) | st.text(alphabet="/ab\n\0é", max_size=6))
def test_topic_maps_to_exactly_one_stream(topic: str) -> None:
    stream = stream_of(topic)
    assert stream.topic == topic
    assert StreamId(stream.namespace, stream.key) == stream


def test_stream_id_equal_to_topic_of_another_stream_is_rejected() -> None:
    for namespace, key in (("a/b", "c"), ("", "a/b"), ("", "a/")):
        with pytest.raises(ValueError, match="the first '/' ends a namespace"):
            StreamId(namespace, key)
    assert stream_of(StreamId("", "/x").topic) == StreamId("", "/x")


def test_stream_hash_is_fixed() -> None:
    assert StreamId("trades", "AAPL").ring_hash == 3_995_971_450


def test_queues_are_evenly_spaced_on_ring() -> None:
    mapper = HashRingQueueMapper(8)
    assert [queue.ring_position for queue in mapper.queues] == [536_870_913 * index for index in range(8)]
    assert [str(queue) for queue in mapper.queues][:2] == ["queue-0", "queue-1"]
    assert HashRingQueueMapper(1).queues[0].ring_position == 0


def test_ring_position_maps_to_first_queue_at_or_after_it_with_wraparound() -> None:
    mapper = HashRingQueueMapper(2, "q")
    first, second = mapper.queues
    for place, queue in [
        (0, first),
        (1, second),
        (0x80000001, second),
        (0x80000002, first),
        (2**32 - 1, first),
    ]:
        assert mapper.queue_at(place) == queue


@given(st.integers(1, 300), st.integers(0, RING_SIZE - 1))
def test_ring_lookup_equals_search_of_all_queues(count: int, place: int) -> None:
    mapper = HashRingQueueMapper(count)
    behind = [queue for queue in mapper.queues if queue.ring_position >= place]
    assert mapper.queue_at(place) == (behind or list(mapper.queues))[0]


@given(st.integers(1, 40), st.lists(st.integers(0, RING_SIZE - 1), min_size=2, max_size=6, unique=True))
def test_ranges_covering_ring_contain_every_queue_once(count: int, cuts: list[int]) -> None:
    mapper = HashRingQueueMapper(count)
    cuts.sort()
    parts = [RingRange(a, b) for a, b in zip(cuts, [*cuts[1:], cuts[0]], strict=True)]
    found = [queue for part in parts for queue in mapper.queues_in(part)]
    assert sorted(found) == list(mapper.queues)
    assert mapper.queues_in(RingRange(7, 7)) == mapper.queues


def test_partitions_keep_their_names() -> None:
    mapper = PartitionedQueueMapper(["east", "west"])
    assert {queue.name for queue in mapper.queues} == {"east", "west"}


def test_added_partition_moves_streams_only_to_itself_and_partition_order_is_irrelevant() -> None:
    names = ["a", "b", "c", "d"]
    before, turned = PartitionedQueueMapper(names), PartitionedQueueMapper(names[::-1])
    after, moved = PartitionedQueueMapper([*names, "e"]), 0
    for stream in (StreamId("n", str(index)) for index in range(500)):
        assert turned.queue_for(stream) == before.queue_for(stream)
        if (there := after.queue_for(stream)) != before.queue_for(stream):
            assert there.name == "e"
            moved += 1
    assert moved


def test_partition_ring_position_is_independent_of_other_partitions() -> None:
    few, many = PartitionedQueueMapper(["b", "a"]), PartitionedQueueMapper(["c", "b", "d", "a"])
    assert set(few.queues) < set(many.queues)
    assert PartitionedQueueMapper(["east", "west"]).queue_for(StreamId("trades", "AAPL")).name == "west"


@pytest.mark.parametrize("count", [0, -1, 65_537, 2**40])
def test_invalid_queue_count_is_rejected(count: int) -> None:
    with pytest.raises(InvalidOption, match="invalid number of queues"):
        HashRingQueueMapper(count)


def test_invalid_or_duplicate_partition_names_and_invalid_ring_range_are_rejected() -> None:
    with pytest.raises(InvalidOption, match="named more than once"):
        PartitionedQueueMapper(["a", "a"])
    with pytest.raises(InvalidName):
        PartitionedQueueMapper(["../a"])
    with pytest.raises(ValueError, match="ring range"):
        RingRange(0, 2**33)


def test_tokens_are_ordered_by_number_then_index() -> None:
    token = SequenceToken(7)
    assert SequenceToken(6, 9) < token < token.next < SequenceToken(8)
    assert [str(token), str(token.next)] == ["7", "7.1"]
