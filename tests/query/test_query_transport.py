"""Queries that read and publish rt messages: exactly once over crashes, gaps, resets and errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import BASE_NS, Feeds
from push_node import NodesInThread, PushNode
from query_driver import RunningQueries

import rt
from rt.errors import Diverged, WriteConflict
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.objects import CheckpointKind, MemoryStore
from rt.query import Factories, QueryEngine
from rt.query.checkpoint.edge import Release
from rt.query.core.errors import Backlogged, QueryExists, SequenceGap
from rt.query.messages import MessageSource, OutgoingMessage, as_message


class Machine(RunningQueries):
    """A process that reads the log `feeds` and publishes the session "out"."""

    def __init__(self, root: Path, store: Any, release: Release = "commit", **more: Any) -> None:
        super().__init__(f"{root}/merged", store, {"path": f"{root}/out"}, release, **more)

    def crash(self) -> None:
        """A crash may lose or keep messages that were not flushed. Here they are kept."""
        self.sink.publisher.close(timeout=0)
        self.source.dispose()


def fill(feeds: Feeds, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        name = "abc"[number % 3]
        feeds.publish(name, [b"%d" % number], "t", [BASE_NS + number * 10**8])
        feeds.merge()


def published(root: Path) -> list[bytes]:
    with rt.LogReader(f"{root}/out/s/sessions/out") as reader:
        return [each.value for each in reader]


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    feeds = Feeds(tmp_path)
    yield feeds
    feeds.close()


@pytest.mark.parametrize("release", ["commit", "now"])
def test_each_result_is_published_once_across_random_crashes(
    tmp_path: Path, feeds: Feeds, release: Release
) -> None:
    fill(feeds, 90)
    plain = Machine(tmp_path / "plain", MemoryStore(), release, log=feeds.path)
    plain.finish(90)
    expected = published(tmp_path / "plain")
    assert len(expected) > 20

    draw, store = random.Random(5), MemoryStore()
    machine = Machine(tmp_path, store, release, log=feeds.path)
    crashes = 0
    while machine.watermark < 89:
        machine.source.pump(draw.randint(1, 6))
        for _ in range(draw.randint(0, 3)):
            draw.choice([machine.engine.checkpoint, machine.engine.deliver, machine.sink.pump])()
        if draw.random() < 0.3:
            machine.crash()
            crashes += 1
            store = MemoryStore(store.content())
            machine = Machine(tmp_path, store, release, log=feeds.path)
    machine.finish(90)
    assert crashes > 3
    assert published(tmp_path) == expected


def test_named_source_acknowledges_only_messages_in_checkpoints(tmp_path: Path, feeds: Feeds) -> None:
    fill(feeds, 4)
    machine = Machine(tmp_path, MemoryStore(), log=feeds.path, name="queries")
    machine.source.pump()
    machine.engine.checkpoint()
    machine.source.pump()
    machine.crash()
    with rt.Subscriber(feeds.path, "s", name="queries") as after:
        assert after.position == 4


class Interleaved(MessageSource):
    """A source with a race: another thread acknowledges id 2 just after the pumping thread read the value to
    acknowledge.
    """

    _value = -1
    is_due = False

    @property
    def _to_acknowledge(self) -> int:
        value, is_due = self._value, self.is_due
        self.is_due = False
        if is_due:
            self.acknowledge(2)
        return value

    @_to_acknowledge.setter
    def _to_acknowledge(self, value: int) -> None:
        self._value = value


def test_acknowledgement_during_pump_is_not_lost(feeds: Feeds) -> None:
    fill(feeds, 4)
    source = Interleaved(feeds.path, "s", name="queries")
    source.subscribe(observer := Picky()).start(0)
    observer.has_refused = True
    assert source.pump() == 4
    source.acknowledge(0)
    source.is_due = True
    source.pump()
    source.dispose()
    with rt.Subscriber(feeds.path, "s", name="queries") as after:
        assert after.position == 3


def test_trimmed_messages_raise_gap(tmp_path: Path, feeds: Feeds) -> None:
    fill(feeds, 3)
    feeds.roll()
    fill(feeds, 3, first=3)
    feeds.trim(1)
    machine = Machine(tmp_path, MemoryStore(), log=feeds.path)
    with pytest.raises(SequenceGap):
        machine.source.pump()
    machine.crash()
    machine = Machine(tmp_path, MemoryStore(), log=feeds.path, topics=["t"])
    with pytest.raises(rt.Gap):
        machine.source.pump()
    machine.crash()


def test_messages_replaced_by_forced_reset_raise_diverged(tmp_path: Path, feeds: Feeds) -> None:
    """The store has processed 10 messages. Then the log has other messages from position 6 on."""
    fill(feeds, 10)
    machine = Machine(tmp_path, store := MemoryStore(), log=feeds.path)
    machine.source.pump()
    machine.engine.checkpoint()
    machine.crash()

    other = Feeds(tmp_path / "other")
    fill(other, 6)
    other.log.roll(65_536)
    fill(other, 10, first=6)
    for topics in (None, ["t"]):
        store = MemoryStore(store.content())
        machine = Machine(tmp_path, store, log=other.path, topics=topics)
        with pytest.raises(Diverged, match="Start again at position 6,"):
            machine.source.pump()
        machine.engine.checkpoint()  # It must not adopt the epoch of the other log.
        machine.crash()
    other.close()

    again = Machine(tmp_path, MemoryStore(store.content()), log=feeds.path)
    fill(feeds, 2, first=10)
    again.finish(12)


class Picky:
    """Rejects the third message once."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.has_refused = False

    def on_next(self, sequence_id: int, value: rt.Message, /) -> None:
        if len(self.got) == 2 and not self.has_refused:
            self.has_refused = True
            raise Backlogged("no room")
        self.got.append(sequence_id)

    def on_error(self, error: Exception, /) -> None: ...
    def on_completed(self) -> None: ...


def test_message_rejected_by_backlogged_observer_is_sent_again_in_order(feeds: Feeds) -> None:
    observer = Picky()
    feeds.publish("a", [b"%d" % number for number in range(6)], "t", [BASE_NS] * 6)
    feeds.merge()
    source = MessageSource(feeds.path, "s")
    source.subscribe(observer).start(0)
    with pytest.raises(Backlogged):
        source.pump()
    while len(observer.got) < 6:
        assert source.pump()
    source.dispose()
    assert observer.got == list(range(6))


@pytest.mark.parametrize(("first", "expected"), [("earliest", b"pair 3 4"), ("latest", b"pair 6 7")])
def test_source_starts_at_earliest_or_latest_message_of_trimmed_log(
    tmp_path: Path, feeds: Feeds, first: str, expected: bytes
) -> None:
    fill(feeds, 3)
    feeds.roll()
    fill(feeds, 3, first=3)
    feeds.trim(1)
    machine = Machine(tmp_path, MemoryStore(), log=feeds.path, begin=None, first=first)
    fill(feeds, 2, first=6)
    machine.finish(8)
    assert published(tmp_path)[0] == expected
    with pytest.raises(ValueError, match="earliest"):
        MessageSource(feeds.path, "s", first="newest")  # type: ignore[arg-type]


def test_unpublishable_result_fails_only_its_query(tmp_path: Path, feeds: Feeds) -> None:
    fill(feeds, 3)
    machine = Machine(tmp_path, MemoryStore(), log=feeds.path)
    machine.engine.start("bad", "numbers", sink="out", on_error="stop")
    machine.finish(3)
    assert "TypeError" in (machine.engine.queries["bad"] or "")
    assert machine.engine.queries["pairs"] is None


def test_message_source_reports_its_lag(tmp_path: Path, feeds: Feeds) -> None:
    fill(feeds, 5)
    machine = Machine(tmp_path, MemoryStore(), log=feeds.path)
    machine.source.pump(2)
    (status,) = machine.engine.status().sources
    assert (status.watermark, status.end, status.lag) == (1, 5, 3)
    machine.finish(5)
    machine.engine.unload()
    (status,) = machine.engine.status().sources
    assert (status.watermark, status.lag) == (4, 0)


def test_lost_store_raises_write_conflict_before_numbers_are_reused(tmp_path: Path, feeds: Feeds) -> None:
    fill(feeds, 9)
    Machine(tmp_path, MemoryStore(), log=feeds.path).finish(9)
    assert published(tmp_path)
    with pytest.raises(WriteConflict, match="does not match the output"):
        Machine(tmp_path, MemoryStore(), log=feeds.path)


def test_full_checkpoint_keeps_output_values(tmp_path: Path, feeds: Feeds) -> None:
    fill(feeds, 9)
    machine = Machine(tmp_path, store := MemoryStore(), log=feeds.path)
    machine.source.pump()
    machine.engine.checkpoint(CheckpointKind.FULL)
    machine.crash()
    Machine(tmp_path, MemoryStore(store.content()), log=feeds.path).finish(9)
    assert published(tmp_path)[:3] == [b"pair 0 1", b"pair 2 3", b"pair 4 5"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"x", (b"x", "", None)),
        ("ä", ("ä".encode(), "", None)),
        (OutgoingMessage(b"x", "topic", 5), (b"x", "topic", 5)),
    ],
)
def test_message_is_encoded_from_bytes_text_or_outgoing_message(value: Any, expected: Any) -> None:
    assert as_message(value) == expected


@pytest.mark.parametrize(
    "value", [7, OutgoingMessage(b"", "t" * 2000), OutgoingMessage(b"", "", 2**70), None]
)
def test_message_from_invalid_value_is_rejected(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        as_message(value)


def test_message_source_accepts_only_one_observer(tmp_path: Path) -> None:
    source = MessageSource(tmp_path, "s")
    source.subscribe(object())  # type: ignore[arg-type]
    with pytest.raises(QueryExists):
        source.subscribe(object())  # type: ignore[arg-type]


@pytest.mark.slow
def test_sink_raises_fenced_if_another_publisher_took_over_its_session(tmp_path: Path, feeds: Feeds) -> None:
    init_ca(pki := tmp_path / "pki")
    issue(pki, Identity("s", "node", "n1"), loopback=True)
    issue(pki, Identity("s", "publisher", "out"))
    node = PushNode(members=1)
    node.refusal = rt.Fenced("a newer directory of this session was opened")
    fill(feeds, 9)
    options = {
        "path": str(tmp_path),
        "endpoints": [node.endpoint],
        "tls": rt.TLS.from_directory(pki, "out"),
        "dedup_id": "results",
        "check_timeout": None,
    }
    queries = RunningQueries(feeds.path, MemoryStore(), options, "commit")
    queries.runner.run(lambda: queries.sink.publisher.next_number > 0)
    with NodesInThread(node, tls=rt.TLS.from_directory(pki, "n1")):
        with pytest.raises(rt.Fenced):
            queries.finish(9)
        queries.engine.unload()
        with pytest.raises(rt.Fenced):
            queries.sink.close(timeout=0)


def test_failed_close_of_source_is_retried_by_next_unload(feeds: Feeds) -> None:
    fill(feeds, 3)
    source = MessageSource(feeds.path, "s")
    engine = QueryEngine(MemoryStore(), Factories())
    engine.add_source("in", source)
    engine.recover()
    subscriber = source._subscriber
    assert subscriber is not None
    close, errors = subscriber.close, [OSError("disk")]

    def close_once() -> None:
        if errors:
            raise errors.pop()
        close()

    subscriber.close = close_once  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk"):
        engine.unload()
    engine.unload()
    assert source._is_disposed
