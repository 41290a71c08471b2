"""Invalid options fail in their call, with an error that names the option and the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rt
from rt import option_checks
from rt.objects import SqliteStore
from rt.query import operators as ops
from rt.streams import directory_stores

ANY: Any = object()


@pytest.fixture
def session(tmp_path: Path) -> str:
    """A session of ten messages."""
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish_many([b"x"] * 10)
    return publisher.directory


@pytest.mark.parametrize("timeout", [math.nan, "1", ANY, [1], True])
def test_timeout_that_is_not_a_number_is_rejected(timeout: Any) -> None:
    with pytest.raises(rt.InvalidOption, match="not a duration"):
        option_checks.check_timeout(timeout)


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, None), (math.inf, None), (1e300, None), (-1, 0.0), (0, 0.0), (2, 2.0)]
)
def test_timeout_is_converted_to_seconds_or_none_for_unlimited(
    timeout: float | None, seconds: float | None
) -> None:
    assert option_checks.check_timeout(timeout) == seconds


@pytest.mark.parametrize(
    "options",
    [
        {"batch_bytes": 0},
        {"batch_bytes": "big"},
        {"batch_bytes": 5000.5},
        {"linger_ms": math.nan},
        {"linger_ms": -1},
        {"roll_bytes": None},
        {"fsync": "x"},
        {"compression": "gz"},
        {"local_persistence": math.inf},
        {"dedup_id": 5},
        {"endpoints": [5], "tls": ANY},
        {"publisher_id": 5},
    ],
)
def test_publisher_rejects_invalid_options_and_creates_no_files(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises((rt.InvalidOption, rt.InvalidName)):
        rt.Publisher(tmp_path, "s", **({"publisher_id": "feed"} | options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", "a\0b", 5, None])
@pytest.mark.parametrize(
    "opened",
    [
        lambda path: rt.Publisher(path, "s"),
        lambda path: rt.Subscriber(path, "s"),
        rt.LogReader,
        SqliteStore,
        directory_stores,
        lambda path: rt.TLS(path, "feed1.crt", "feed1.key"),
    ],
    ids=["Publisher", "Subscriber", "LogReader", "SqliteStore", "directory_stores", "TLS"],
)
def test_invalid_path_raises_invalid_option(opened: Callable[[Any], object], path: Any) -> None:
    with pytest.raises(rt.InvalidOption, match="not a path"):
        opened(path)


@pytest.mark.parametrize("opened", [lambda path: SqliteStore(path / "x.db"), directory_stores])
def test_store_in_missing_directory_raises_storage_error_and_does_not_create_it(
    tmp_path: Path, opened: Callable[[Path], object]
) -> None:
    with pytest.raises(rt.StorageError, match=r"does not exist \(at .*/nope\)"):
        opened(tmp_path / "nope")
    assert not (tmp_path / "nope").exists()


def test_publish_with_invalid_topic_timestamp_or_number_uses_no_number(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        for publish in (
            lambda: publisher.publish(b"x", topic="a\udcff"),
            lambda: publisher.publish_many([b"x"], topic="a\udcff"),
        ):
            with pytest.raises(
                rt.InvalidMessage, match=r"not valid Unicode \(at character 1\): got 'a.udcff'"
            ):
                publish()
        for stamp in (2**63, -(2**63) - 1):
            with pytest.raises(rt.InvalidMessage, match="outside int64"):
                publisher.publish(b"x", timestamp_ns=stamp)
        with pytest.raises(rt.InvalidMessage, match="shape"):
            publisher.publish_many([b"x"], timestamps_ns=[1, 2])
        wrong: Any = "7"
        with pytest.raises(rt.InvalidOption, match="got '7'"):
            publisher.publish(b"x", number=wrong)
        assert publisher.publish(b"x") == 0


def test_acknowledgement_below_previous_one_is_rejected(session: str) -> None:
    with rt.Subscriber(session, "s", name="sink") as subscriber:
        subscriber.poll(6)
        for position in (4, 4, 5):
            subscriber.ack(position)
        with pytest.raises(rt.InvalidOption, match="got 3, expected 5 or more"):
            subscriber.ack(3)
    with rt.Subscriber(session, "s", name="sink") as subscriber:
        assert subscriber.position == 5
        with pytest.raises(rt.InvalidOption, match="got 3, expected 5 or more"):
            subscriber.ack(3)
    with rt.Subscriber(session, "s", name="sink", position=0) as subscriber:
        subscriber.poll(2)
        subscriber.ack(2)  # With an explicit position a lower ack is valid.
    with rt.Subscriber(session, "s", name="sink") as subscriber:
        assert subscriber.position == 2


@pytest.mark.parametrize("position", ["x", 1.5, None, -1, 99])
def test_acknowledgement_of_undelivered_or_invalid_position_is_rejected(session: str, position: Any) -> None:
    with rt.Subscriber(session, "s", name="sink") as subscriber:
        subscriber.poll(3)
        with pytest.raises(rt.InvalidOption):
            subscriber.ack(position)


@pytest.mark.parametrize(
    "options",
    [
        {"topics": 5},
        {"topics": [5]},
        {"on_event": 5},
        {"retention": "x"},
        {"position": "x"},
        {"position": -1},
        {"connect_timeout": math.nan},
        {"connect_timeout": "5"},
    ],
)
def test_subscriber_rejects_invalid_options(session: str, options: dict[str, Any]) -> None:
    with pytest.raises(rt.InvalidOption):
        rt.Subscriber(session, "s", **options)


@pytest.mark.parametrize(
    "options", [{"max_messages": -1}, {"max_messages": "x"}, {"max_messages": 1.5}, {"timeout": math.nan}]
)
def test_poll_rejects_invalid_options(session: str, options: dict[str, Any]) -> None:
    with rt.Subscriber(session, "s") as subscriber, rt.LogReader(session) as reader:
        for poll in (subscriber.poll, reader.poll):
            with pytest.raises(rt.InvalidOption):
                poll(**options)


@pytest.mark.parametrize(
    "options", [*({"max_messages": wrong} for wrong in (-1, 0, "x", 1.5)), {"timeout": math.nan}]
)
def test_next_batch_rejects_invalid_options_and_skips_no_message(
    session: str, options: dict[str, Any]
) -> None:
    with rt.Subscriber(session, "s") as subscriber, rt.LogReader(session) as reader:
        for source in (subscriber, reader):
            with pytest.raises(rt.InvalidOption):
                source.next_batch(**options)
            assert [message.number for message in source.poll()] == list(range(10))


@pytest.mark.parametrize("count", [-1, "x", 1.5, None])
def test_operators_reject_invalid_count_at_construction(count: Any) -> None:
    for make in (ops.take, ops.skip, ops.element_at):
        with pytest.raises(rt.InvalidOption, match="must be 0 or more"):
            make(count)
