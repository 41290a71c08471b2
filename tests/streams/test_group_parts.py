"""Parts of a group: partitions of topics, lanes of waiting messages, handler calls, and retries."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.streams.core.stream_id import QueueId
from rt.streams.group.handlers import HandlerCalls, TopicHandler, retry_wait_s
from rt.streams.group.lanes import Lanes
from rt.streams.group.options import Decision, GroupOptions, HandlerFailure
from rt.streams.group.partitions import Partitions

TOPICS = [f"a/{number}" for number in range(6)] + ["b/1", "other"]


def test_topic_maps_to_one_partition_and_first_matching_pattern() -> None:
    partitions = Partitions("workers", ["a/*", "*/1"], 4)
    places = {topic: partitions.place(topic) for topic in TOPICS}
    assert [topic for topic, place in places.items() if place is None] == ["other"]
    assert {topic: place[1] for topic, place in places.items() if place is not None} == {
        **dict.fromkeys(TOPICS[:6], 0),
        "b/1": 1,
    }
    assert len({place[0] for place in places.values() if place is not None}) > 1
    again = Partitions("workers", ["*/1", "a/*"], 4)
    assert {topic: place and place[0] for topic, place in places.items()} == {
        topic: place and place[0] for topic in TOPICS for place in [again.place(topic)]
    }


def test_positions_of_other_patterns_or_partition_count_raise_invalid_option() -> None:
    partitions = Partitions("workers", ["a/*", "b/*"], 2)
    found = {partitions.position_name(queue): 5 for queue in partitions.queues}
    assert partitions.positions(found) == dict.fromkeys(partitions.queues, 5)
    assert Partitions("workers", ["b/*", "a/*"], 2).positions(found) != {}
    for other in (Partitions("workers", ["a/*"], 2), Partitions("workers", ["a/*", "b/*"], 3)):
        with pytest.raises(rt.InvalidOption, match="other topic patterns"):
            other.positions(found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partitions": 0},
        {"partitions": 257},
        {"partitions": 2.5},
        {"partitions": "3"},
        {"lease_s": 0.5},
        {"start": 5},
        {"concurrency": 0},
        {"concurrency": 1.5},
        {"retry_for_s": float("nan")},
        {"on_error": 5},
        {"on_event": "print"},
    ],
)
def test_options_out_of_range_raise_invalid_option(wrong: dict[str, Any]) -> None:
    with pytest.raises(rt.InvalidOption, match=next(iter(wrong))):
        GroupOptions(**wrong)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 60 messages of several topics, in small batches."""
    root = tmp_path_factory.mktemp("log")
    with rt.Publisher(root, "s", publisher_id="feed1", batch_bytes=4096) as publisher:
        for number in range(60):
            publisher.publish(b"%d" % number, topic=TOPICS[number % len(TOPICS)])
    return root / "s" / "sessions" / "feed1"


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "read", "handle"]), st.integers(0, 60))))
def test_lane_has_each_message_of_its_partition_once_and_in_order(
    log: Path, steps: list[tuple[str, int]]
) -> None:
    """After any order of opens, closes, reads and handled messages, a lane continues where it was opened."""
    partitions = Partitions("workers", ["a/*", "b/*"], 3)
    whole: dict[QueueId, list[int]] = {queue: [] for queue in partitions.queues}
    with rt.LogReader(log) as reader:
        for message in reader:
            if (place := partitions.place(message.topic)) is not None:
                whole[place[0]].append(message.position)
    lanes = Lanes(partitions)
    handled: dict[QueueId, list[int]] = {}
    opened: dict[QueueId, int] = {}
    for step, number in steps:
        queue = partitions.queues[number % 3]
        lane = next((one for one in lanes if one.queue == queue), None)
        if step == "open" and lane is None:
            lanes.open(queue, number)
            handled[queue], opened[queue] = [], number
        elif step == "close" and lane is not None:
            lanes.close(lane)
        elif step == "read" and (start := lanes.wanted()) is not None:
            with rt.LogReader(log, position=start) as reader:
                batch = reader.next_batch(0.0, number or 1)
                lanes.feed(start, batch, start if batch is None else batch.end)
        elif step == "handle" and lane is not None and lane.waiting:
            handled[queue].append(lane.waiting[0][0].position)
            lane.handled(1)
        for lane in lanes:
            expected = [at for at in whole[lane.queue] if at >= opened[lane.queue]]
            assert handled[lane.queue] == expected[: len(handled[lane.queue])]
            assert [at for at in expected if at < lane.done] == handled[lane.queue]
            waiting = [message.position for message, _ in lane.waiting]
            assert waiting == [at for at in expected if lane.done <= at < lane.end]


MESSAGE = rt.Message(7, 0, "feed1", 0, 3, "a/1", b"{}")


def handle(handler: Any, *, serializer: Any = None, may_handle: Any = lambda: True, **options: Any) -> int:
    async def work() -> int:
        made = GroupOptions(retry_min_s=0.001, retry_max_s=0.001, **options)
        calls = HandlerCalls([TopicHandler("a/*", handler, serializer)], made)
        try:
            return await calls.handle([(MESSAGE, 0), (MESSAGE, 0)], may_handle)
        finally:
            calls.close()

    return asyncio.run(work())


def test_plain_handler_gets_all_waiting_messages_and_async_handler_one_per_call() -> None:
    seen: list[object] = []

    async def note(message: rt.Message) -> None:
        seen.append(message)

    assert (handle(seen.append), handle(note)) == (2, 1)
    assert seen == [MESSAGE] * 3


def test_handler_gets_value_decoded_by_its_serializer() -> None:
    seen: list[object] = []
    assert handle(lambda *given: seen.append(given), serializer=rt.JsonSerializer()) == 2
    assert seen == [(MESSAGE, {})] * 2


def test_failing_message_is_retried_until_handler_succeeds() -> None:
    failures = [ValueError("1"), ValueError("2"), None, None]

    def fail(_: rt.Message) -> None:
        if (error := failures.pop(0)) is not None:
            raise error

    assert handle(fail) == 2


def test_message_is_retried_if_first_attempt_exceeds_retry_time() -> None:
    calls: list[rt.Message] = []

    async def fail_late(message: rt.Message) -> None:
        calls.append(message)
        if len(calls) == 1:
            await asyncio.sleep(0.3)
            raise TimeoutError

    assert handle(fail_late, retry_for_s=0.2) == 1
    assert len(calls) == 2


def test_message_failing_past_retry_time_raises_handler_failed_with_position_and_cause() -> None:
    async def fail(_: rt.Message) -> None:
        raise ValueError("no price")

    with pytest.raises(rt.HandlerFailed, match=r"position 7, session feed1, number 3.*no price") as raised:
        handle(fail, retry_for_s=0)
    assert isinstance(raised.value.__cause__, ValueError)


def test_on_error_decides_to_retry_or_skip_failed_message() -> None:
    decisions: list[Decision] = ["retry", "skip"]
    failures: list[HandlerFailure] = []

    def decide(failure: HandlerFailure) -> Decision:
        failures.append(failure)
        return decisions.pop(0)

    def fail(_: rt.Message) -> None:
        raise ValueError("no price")

    assert handle(fail, retry_for_s=0, on_error=decide) == 1
    assert [(failure.message, failure.attempts) for failure in failures] == [(MESSAGE, 1), (MESSAGE, 2)]
    with pytest.raises(rt.InvalidOption, match="ignore"):
        handle(fail, retry_for_s=0, on_error=lambda _: "ignore")


def test_undecodable_message_raises_undecodable_value_with_position() -> None:
    with pytest.raises(rt.UndecodableValue, match="position 7"):
        handle(lambda *_: None, serializer=rt.JsonSerializer(int))


def test_plain_handler_returning_coroutine_raises_invalid_option() -> None:
    async def note(_: rt.Message) -> None:
        raise AssertionError

    with pytest.raises(rt.InvalidOption, match="async def"):
        handle(lambda message: note(message))


def test_handler_is_not_called_after_lease_ended() -> None:
    seen: list[object] = []

    async def note(message: rt.Message) -> None:
        seen.append(message)

    assert handle(seen.append, may_handle=lambda: False) == handle(note, may_handle=lambda: False) == 0
    assert seen == []
    lease = iter([True, False])
    assert handle(seen.append, may_handle=lambda: next(lease)) == 1


@given(st.integers(1, 10_000))
def test_retry_wait_doubles_up_to_its_limit(attempts: int) -> None:
    assert retry_wait_s(attempts, 0.1, 10.0) == min(10.0, 0.1 * 2 ** min(attempts - 1, 60))
