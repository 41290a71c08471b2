"""Edges: watermarks, gaps, replay, acknowledgements, and the release of sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rt.objects import VolatileObjectSpace
from rt.query.checkpoint.edge import OutputEdge, Release
from rt.query.checkpoint.input_edge import InputEdge
from rt.query.checkpoint.replay_buffer import ReplayBuffer
from rt.query.core.errors import NotInBuffer, QueryExists, SequenceGap
from rt.query.core.reliable import NOTHING, RESUME, ReliableObserver
from rt.query.core.source import ValueFeed


class Scripted:
    """A source that records the calls."""

    def __init__(self, *, is_dense: bool = True) -> None:
        self.is_dense = is_dense
        self.calls: list[Any] = []

    def subscribe(self, observer: ReliableObserver[Any], /) -> Scripted:
        return self

    def start(self, sequence_id: int, /) -> None:
        self.calls.append(("start", sequence_id))

    def acknowledge(self, sequence_id: int, /) -> None:
        self.calls.append(("acknowledge", sequence_id))

    def dispose(self) -> None:
        self.calls.append("dispose")


class Consumer:
    def __init__(self) -> None:
        self.got: list[Any] = []
        self.refuses = False

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        if self.refuses:
            raise OSError("no")
        self.got.append((sequence_id, value))

    def on_error(self, error: Exception, /) -> None:
        self.got.append(str(error))

    def on_completed(self) -> None:
        self.got.append("completed")


def edge(source: Scripted, **more: Any) -> InputEdge:
    made = InputEdge(source, ValueFeed("in"), **more)
    made.subscribe()
    made.start()
    return made


def test_input_edge_starts_after_its_watermark_and_drops_duplicates() -> None:
    source = Scripted()
    feed = ValueFeed("in")
    feed.watermark = 4
    accepted: list[str] = []
    made = InputEdge(source, feed, before=lambda _, value: accepted.append(value))
    made.subscribe()
    made.start()
    for sequence_id, value in ((3, "a"), (4, "b"), (5, "c"), (5, "d"), (6, "e")):
        made.on_next(sequence_id, value)
    assert (source.calls, feed.watermark, accepted) == ([("start", 5)], 6, ["c", "e"])


def test_input_edge_without_values_acknowledges_nothing() -> None:
    source = Scripted()
    made = edge(source)
    made.saved(NOTHING, has_ended=False)
    made.acknowledge()
    assert source.calls == [("start", 0), ("acknowledge", NOTHING)]


def test_gap_in_dense_source_is_raised_or_reported() -> None:
    made = edge(Scripted())
    made.on_next(0, "x")
    with pytest.raises(SequenceGap) as raised:
        made.on_next(3, "x")
    assert (raised.value.start, raised.value.end, made.feed.watermark) == (1, 3, 0)
    gaps: list[SequenceGap] = []
    made = edge(Scripted(), on_gap=gaps.append)
    made.on_next(2, "x")
    assert ([(gap.start, gap.end) for gap in gaps], made.feed.watermark) == ([(0, 2)], 2)
    made = edge(Scripted(is_dense=False))
    made.on_next(7, "x")
    assert made.feed.watermark == 7


def test_rejected_value_does_not_move_watermark() -> None:
    def refuse(sequence_id: int, value: object) -> None:
        raise OSError("full")

    made = edge(Scripted(), before=refuse)
    with pytest.raises(OSError, match="full"):
        made.on_next(0, "x")
    assert made.feed.watermark == NOTHING


def test_source_is_disposed_by_first_checkpoint_that_contains_its_end() -> None:
    source = Scripted()
    made = edge(source)
    made.on_next(0, "x")
    made.on_completed()
    made.on_next(1, "x")
    made.saved(0, has_ended=False)
    made.acknowledge()
    assert source.calls == [("start", 0), ("acknowledge", 0)]
    for _ in range(2):
        made.saved(0, has_ended=True)
        made.acknowledge()
    assert source.calls[2:] == [("acknowledge", 0), "dispose"]


def test_ended_source_is_not_started_again() -> None:
    source = Scripted()
    feed = ValueFeed("in")
    feed.on_completed()
    made = InputEdge(source, feed)
    made.subscribe()
    made.start()
    assert source.calls == []


def output(release: Release = "now", limit: int = 100, **saved: Any) -> OutputEdge:
    queue: Any = VolatileObjectSpace().create_queue("values")
    queue.extend(saved.pop("values", []))
    return OutputEdge(queue, release=release, limit=limit, saved=saved or None)


def test_consumer_receives_values_in_order_only_after_it_starts() -> None:
    made, consumer = output(), Consumer()
    made.on_next("a")
    subscription = made.subscribe(consumer)
    made.deliver()
    assert consumer.got == []
    subscription.start(0)
    made.on_next("b")
    made.deliver()
    made.on_completed()
    made.deliver()
    made.deliver()
    assert consumer.got == [(0, "a"), (1, "b"), "completed"]


def test_value_is_delivered_after_a_checkpoint_contains_it() -> None:
    made, consumer = output("commit"), Consumer()
    made.subscribe(consumer).start(RESUME)
    made.on_next("a")
    made.on_next("b")
    made.on_completed()
    assert not made.deliver()
    made.saved(1)
    made.deliver()
    assert consumer.got == [(0, "a")]
    made.saved(2)
    made.deliver()
    assert consumer.got == [(0, "a"), (1, "b")]  # The completion is not durable yet.
    made.saved(2, made.ended_with)
    made.deliver()
    assert consumer.got == [(0, "a"), (1, "b"), "completed"]


def test_recovered_output_continues_ids_and_resumes_consumer_after_its_acknowledgement() -> None:
    made = output(low=5, consumers={"": 5}, end=None, values=["f", "g", "h"])
    consumer = Consumer()
    made.subscribe(consumer).start(RESUME)
    made.on_next("i")
    made.deliver()
    assert consumer.got == [(6, "g"), (7, "h"), (8, "i")]


def test_error_is_delivered_as_text_after_recovery() -> None:
    made, consumer = output(), Consumer()
    made.on_error(ValueError("no good"))
    again = output(**made.save())
    again.subscribe(consumer).start(RESUME)
    again.deliver()
    assert consumer.got == ["ValueError: no good"]


def test_value_rejected_by_consumer_is_delivered_again() -> None:
    made, consumer = output(), Consumer()
    made.subscribe(consumer).start(0)
    made.on_next("a")
    consumer.refuses = True
    with pytest.raises(OSError, match="no"):
        made.deliver()
    consumer.refuses = False
    made.deliver()
    assert consumer.got == [(0, "a")]


def test_output_buffer_keeps_values_for_slowest_consumer_until_it_is_disposed() -> None:
    made = output(limit=2)
    fast, slow = (made.subscribe(Consumer(), name) for name in ("fast", "slow"))
    for value in "abc":
        made.on_next(value)
    fast.acknowledge(1)
    assert (made.buffer.low, made.is_full) == (0, True)
    slow.acknowledge(0)
    assert made.buffer.low == 1
    slow.dispose()
    slow.dispose()
    assert (made.buffer.low, made.is_full) == (2, False)
    fast.acknowledge(0)
    assert made.buffer.low == 2


@pytest.mark.parametrize(
    "misuse",
    [
        lambda made, subscription: subscription.start(1),
        lambda made, subscription: subscription.start(5),
        lambda made, subscription: subscription.acknowledge(4),
        lambda made, subscription: made.buffer.acknowledge("unknown", 3),
    ],
    ids=["below low", "beyond the end", "acknowledging the end", "unknown consumer"],
)
def test_start_or_acknowledgement_outside_the_buffer_raises_not_in_buffer(
    misuse: Callable[[OutputEdge, Any], None],
) -> None:
    made = output(low=2, consumers={"": 1}, end=None, values=["c", "d"])
    subscription = made.subscribe(Consumer())
    with pytest.raises(NotInBuffer):
        misuse(made, subscription)


def test_second_consumer_with_the_same_name_raises_query_exists() -> None:
    made = output()
    made.subscribe(Consumer(), "a")
    with pytest.raises(QueryExists):
        made.subscribe(Consumer(), "a")


class Buffers(RuleBasedStateMachine):
    """Compares a replay buffer with a list of all values and acknowledgements."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = ReplayBuffer[int](VolatileObjectSpace().create_queue("values"))
        self.model: list[int] = []
        self.acknowledged: dict[str, int] = {}
        self.low = 0

    @rule()
    def append(self) -> None:
        assert self.buffer.append(len(self.model)) == len(self.model)
        self.model.append(len(self.model))

    @rule(consumer=st.sampled_from("abc"))
    def join(self, consumer: str) -> None:
        self.buffer.join(consumer)
        self.acknowledged.setdefault(consumer, self.low - 1)

    @rule(consumer=st.sampled_from("abc"))
    def leave(self, consumer: str) -> None:
        self.buffer.leave(consumer)
        self.acknowledged.pop(consumer, None)
        self._prune()

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(sorted(self.acknowledged)))
        sequence_id = data.draw(st.integers(-1, len(self.model) - 1))
        self.buffer.acknowledge(consumer, sequence_id)
        self.acknowledged[consumer] = max(self.acknowledged[consumer], sequence_id)
        self._prune()

    @invariant()
    def keeps_what_is_not_acknowledged(self) -> None:
        assert (self.buffer.low, self.buffer.end) == (self.low, len(self.model))
        for start in range(self.low, len(self.model) + 1):
            for end in range(start, len(self.model) + 1):
                assert self.buffer.read(start, end) == self.model[start:end]
        for consumer in self.acknowledged:
            self.buffer.check_start(self.buffer.resume(consumer))

    def _prune(self) -> None:
        if self.acknowledged:
            self.low = max(self.low, min(self.acknowledged.values()) + 1)


TestBuffers = Buffers.TestCase
TestBuffers.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
