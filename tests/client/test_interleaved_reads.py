"""All ways to read one log, in any order, deliver what a list would: the model is the list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from merged_logs import Feeds

import rt
from rt.log.scan.message_batch import Message, MessageBatch


@pytest.fixture(scope="module", autouse=True)
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create logs with several codecs, headers, runs, empty values, large messages and a trimmed start."""
    root = tmp_path_factory.mktemp("logs")
    feeds = Feeds(root)
    feeds.fill(5)
    feeds.roll()
    feeds.fill(30)
    headers = [(("a", b"1"),), (), (("b", b"22"), ("c", b""))]
    feeds.publish("a", [b"", b"one", b""], "trade", range(3), headers)
    feeds.publish("c", [b""], "", [4])
    feeds.publish("b", [bytes([n]) * 20_000 for n in range(5)], "quote", range(5))
    feeds.merge()
    feeds.roll()
    feeds.fill(10, messages_max=2, bytes_max=3)
    feeds.fill(10, messages_max=300)
    feeds.trim(1)
    feeds.close()
    Interleaved.path = feeds.path
    with rt.LogReader(feeds.path, on_event=lambda _: None) as reader:
        Interleaved.rows = list(reader)
    assert Interleaved.rows[0].position
    yield
    Interleaved.path, Interleaved.rows = "", []


class Interleaved(RuleBasedStateMachine):
    """A reader whose results are kept and compared again at the end, because they must not change."""

    path: ClassVar = ""
    rows: ClassVar[list[Message]] = []

    @initialize(
        kind=st.sampled_from(["reader", "follower", "subscriber"]),
        topics=st.sampled_from([None, ("trade",), ("quote", "")]),
    )
    def begin(self, kind: str, topics: tuple[str, ...] | None) -> None:
        self.events: list[object] = []
        options: Any = {"topics": topics, "on_event": self.told}
        self.is_subscriber = kind == "subscriber"
        self.source: Any = (
            rt.Subscriber(self.path, "s", position=0, **options)
            if self.is_subscriber
            else rt.LogReader(self.path, position=0, follow=kind == "follower", **options)
        )
        self.may_wait = kind != "reader"
        self.wanted = [row for row in self.rows if topics is None or row.topic in topics]
        self.is_filtered = topics is not None
        self.at, self.past = 0, 0
        self.is_paused = False
        self.iterators: list[Iterator[Message]] = []
        self.columns: list[Iterator[MessageBatch]] = []
        self.kept: list[tuple[list[Message], Any]] = []
        self.counted = 0

    def told(self, event: object) -> None:
        assert isinstance(event, rt.events.SkipForward)
        assert self.at == 0
        assert (event.wanted, event.resumed) == (self.past, self.rows[0].position)
        self.events.append(event)

    def expect(self, got: list[Message], most: int | None = None) -> None:
        assert got == self.wanted[self.at : self.at + len(got)]
        assert most is None or len(got) <= most
        self.at += len(got)
        self.counted += len(got)
        if got:
            self.past = got[-1].position + 1

    def expect_batch(self, batch: MessageBatch | None, most: int | None = None) -> None:
        if batch is None:
            assert self.at == len(self.wanted) or self.is_paused
            return
        before = self.at
        assert len(batch)
        self.expect(list(batch.messages()), most)
        self.kept.append((self.wanted[before : self.at], (batch, batch.to_arrow())))

    @property
    def has_more(self) -> bool:
        return self.at < len(self.wanted)

    def may_iterate(self) -> bool:
        """Return whether an iteration cannot wait indefinitely."""
        return not self.is_paused and (self.has_more or not self.may_wait)

    @rule()
    def iterate_anew(self) -> None:
        self.iterators.append(iter(self.source))

    @rule()
    def columns_anew(self) -> None:
        self.columns.append(self.source.batches())

    @precondition(lambda self: self.iterators and self.may_iterate())
    @rule(data=st.data(), count=st.integers(1, 120))
    def iterate(self, data: st.DataObject, count: int) -> None:
        messages = data.draw(st.sampled_from(self.iterators))
        for _ in range(count):
            if not self.may_iterate():
                break
            message = next(messages, None)
            if message is None:
                assert not self.has_more
                self.iterators.remove(messages)  # The iterator has ended, as a generator does.
                break
            self.expect([message])
            assert self.is_filtered or self.source.position == self.past

    @precondition(lambda self: self.may_iterate())
    @rule(count=st.integers(1, 120))
    def loop(self, count: int) -> None:
        """Iterate until an error ends the loop."""
        count = min(count, len(self.wanted) - self.at) if self.may_wait else count
        got = []
        try:
            for message in self.source:
                got.append(message)
                if len(got) == count:
                    raise KeyError
        except KeyError:
            pass
        self.expect(got, count)
        assert len(got) == count or not self.has_more

    @precondition(lambda self: self.columns and self.may_iterate())
    @rule(data=st.data())
    def next_columns(self, data: st.DataObject) -> None:
        columns = data.draw(st.sampled_from(self.columns))
        batch = next(columns, None)
        self.expect_batch(batch)
        if batch is None:
            self.columns.remove(columns)

    @rule(most=st.one_of(st.none(), st.integers(1, 150)))
    def next_batch(self, most: int | None) -> None:
        if most is None and not self.may_wait:
            batch = self.source.next_batch()
        else:
            batch = self.source.next_batch(0, most)
        assert batch is None or not self.is_paused
        self.expect_batch(batch, most)

    @rule(most=st.integers(0, 200))
    def poll(self, most: int) -> None:
        got = self.source.poll(most, 0)
        assert not (got and self.is_paused)
        self.expect(got, most)
        assert len(got) == most or self.is_paused or not self.has_more

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        begin, end = self.rows[0].position, self.rows[-1].position + 1
        places: list[st.SearchStrategy[Any]] = [st.integers(begin, end)]
        if not self.is_subscriber:  # A subscriber seeks when it reads, so it does not know these yet.
            places.append(st.sampled_from(["earliest", "latest"]))
        place = data.draw(st.one_of(places))
        self.source.seek(place)
        self.past = {"earliest": begin, "latest": end}.get(place, place)
        self.at = sum(row.position < self.past for row in self.wanted)

    @precondition(lambda self: not self.is_subscriber)
    @rule(place=st.sampled_from([-1, "sideways", 10**9]))
    def seek_wrongly(self, place: Any) -> None:
        with pytest.raises(rt.InvalidOption):
            self.source.seek(place)

    @precondition(lambda self: self.is_subscriber)
    @rule()
    def pause(self) -> None:
        self.source.pause()
        self.is_paused = True

    @precondition(lambda self: self.is_subscriber)
    @rule()
    def resume(self) -> None:
        self.source.resume()
        self.is_paused = False

    @invariant()
    def position_is_past_what_was_delivered(self) -> None:
        position = self.source.position
        following = self.wanted[self.at].position if self.has_more else self.rows[-1].position + 1
        assert min(self.past, following) <= position <= following
        if self.is_subscriber:
            stats = self.source.stats()
            assert (stats.messages, stats.position) == (self.counted, position)

    def teardown(self) -> None:
        if not hasattr(self, "source"):
            return
        self.source.close()
        position = self.source.position
        with rt.LogReader(self.path, position=position, on_event=lambda _: None) as reader:
            got = [row for row in reader if row in self.wanted[self.at :] or not self.is_filtered]
        assert got == self.wanted[self.at :]
        for rows, (batch, arrow) in self.kept:
            assert list(batch.messages()) == rows
            assert arrow["value"].to_pylist() == [row.value for row in rows]
            assert arrow["position"].to_pylist() == [row.position for row in rows]


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=25, stateful_step_count=20)
