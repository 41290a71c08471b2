"""Subscribers of a local log directory: acknowledge, pause, seek, close; and the package's import."""

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rt
from rt.client.follow_reader import DeliveryCounter
from rt.client.pulled_copy import PulledCopy
from rt.log.disk import REAL


@pytest.fixture
def publisher(tmp_path: Path):
    with rt.Publisher(tmp_path, "stream", publisher_id="feed", linger_ms=0) as publisher:
        publisher.publish_many([b"%d" % number for number in range(10)])
        publisher.flush()
        yield publisher


def numbers(messages: list[rt.Message]) -> list[int]:
    return [message.number for message in messages]


def test_subscriber_follows_growing_log(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        assert numbers(subscriber.poll()) == list(range(10))
        assert subscriber.poll(timeout=0) == []
        publisher.publish(b"next")
        assert numbers(subscriber.poll(timeout=120)) == [10]
        assert subscriber.position == 11


def test_batches_and_messages_advance_the_same_position(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream", topics=[""]) as subscriber:
        assert next(iter(subscriber)).number == 0
        batch = next(subscriber.batches())
        assert batch.numbers.tolist() == list(range(1, 10))
        assert batch.to_arrow().column("value").to_pylist() == [b"%d" % number for number in range(1, 10)]


def test_named_subscriber_resumes_at_acknowledged_position(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream", name="sink") as subscriber:
        messages = subscriber.poll(4)
        subscriber.ack(messages[-1].position + 1)
        assert numbers(subscriber.poll(3)) == [4, 5, 6]
    with rt.Subscriber(publisher.directory, "stream", name="sink") as subscriber:
        assert subscriber.position == 4
    with rt.Subscriber(publisher.directory, "stream", name="other") as subscriber:
        assert subscriber.position == 0
    with rt.Subscriber(publisher.directory, "stream", name="sink", position=9) as subscriber:
        assert subscriber.position == 9


def test_ack_rejects_undelivered_position_and_unnamed_subscriber(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream", name="sink") as subscriber:
        subscriber.poll(4)
        for position in (5, -1):
            with pytest.raises(ValueError, match="not delivered"):
                subscriber.ack(position)
    with rt.Subscriber(publisher.directory, "stream") as subscriber, pytest.raises(ValueError, match="name="):
        subscriber.ack(0)


@pytest.mark.parametrize("content", [b"", b"short", bytes(20), b"RTACKNOW" + bytes(12)])
def test_corrupt_acknowledgement_file_raises_corrupt(publisher: rt.Publisher, content: bytes) -> None:
    with rt.Subscriber(publisher.directory, "stream", name="sink") as subscriber:
        subscriber.poll(4)
        subscriber.ack(4)
    path = os.path.join(publisher.directory, "acknowledged.sink")
    Path(path).write_bytes(content)
    with pytest.raises(rt.Corrupt, match="explicit position"):
        rt.Subscriber(publisher.directory, "stream", name="sink")


def test_paused_subscriber_delivers_all_messages_after_resume(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        subscriber.poll(2)
        subscriber.pause()
        assert subscriber.poll(timeout=0.01) == []
        publisher.publish(b"while paused")
        subscriber.resume()
        got: list[int] = []
        while len(got) < 9:
            got += numbers(subscriber.poll(timeout=120))
        assert got == list(range(2, 11))


def test_pause_during_iteration_stops_between_two_messages_until_resume(publisher: rt.Publisher) -> None:
    subscriber = rt.Subscriber(publisher.directory, "stream")
    got: list[int] = []
    paused, finished = threading.Event(), threading.Event()

    def follow() -> None:
        for message in subscriber:
            got.append(message.number)
            if message.number == 3:
                subscriber.pause()
                paused.set()
            if message.number == 9:
                finished.set()

    follower = threading.Thread(target=follow)
    follower.start()
    assert paused.wait(120)
    assert got == [0, 1, 2, 3]
    subscriber.resume()
    assert finished.wait(120)
    subscriber.close()
    follower.join(120)
    assert not follower.is_alive()
    assert got == list(range(10))


def test_seek_moves_position_both_ways_and_rejects_invalid_positions(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        assert numbers(subscriber.poll(6)) == [0, 1, 2, 3, 4, 5]
        subscriber.seek(2)
        assert subscriber.position == 2
        assert numbers(subscriber.poll(2)) == [2, 3]
        subscriber.seek(8)
        assert numbers(subscriber.poll()) == [8, 9]
        for wrong in (-1, "sideways", 1.5):
            with pytest.raises(rt.InvalidOption):
                subscriber.seek(wrong)
        subscriber.seek(9)
        assert numbers(subscriber.poll()) == [9]
    with pytest.raises(rt.Closed):
        subscriber.seek(0)


def test_seek_in_removed_directory_raises_log_not_found_and_keeps_position(
    publisher: rt.Publisher,
) -> None:
    path = Path(publisher.directory)
    with rt.Subscriber(path, "stream") as subscriber:
        assert numbers(subscriber.poll(4)) == [0, 1, 2, 3]
        path.rename(f"{path}.away")
        with pytest.raises(rt.LogNotFound):
            subscriber.seek(2)
        Path(f"{path}.away").rename(path)
        assert numbers(subscriber.poll(2)) == [4, 5]
        subscriber.seek(2)
        assert numbers(subscriber.poll(2)) == [2, 3]


@pytest.mark.parametrize("is_polled", [False, True])
def test_close_does_not_move_position_past_undelivered_messages(
    publisher: rt.Publisher, is_polled: bool
) -> None:
    with rt.Subscriber(publisher.directory, "stream", name="sub") as subscriber:
        messages = iter(subscriber)
        assert numbers(subscriber.poll(2) if is_polled else [next(messages), next(messages)]) == [0, 1]
    assert subscriber.position == subscriber.stats().position == 2
    with pytest.raises(rt.InvalidOption, match="not delivered"):
        subscriber.ack(3)
    subscriber.ack(2)
    with rt.Subscriber(publisher.directory, "stream", name="sub") as subscriber:
        assert numbers(subscriber.poll(1)) == [2]


def test_poll_after_close_raises_closed(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        assert subscriber.poll(1)
    with pytest.raises(rt.Closed, match=publisher.directory):
        subscriber.poll()
    assert list(subscriber) == []


def test_close_of_paused_subscriber_ends_its_iteration(publisher: rt.Publisher) -> None:
    subscriber = rt.Subscriber(publisher.directory, "stream")
    subscriber.pause()
    follower = threading.Thread(target=lambda: list(subscriber))
    follower.start()
    subscriber.close()
    follower.join(120)
    assert not follower.is_alive()


def test_root_directory_resolves_to_merged_log_of_stream(tmp_path: Path) -> None:
    with pytest.raises(rt.LogNotFound, match=str(tmp_path / "stream" / "merged")):
        rt.Subscriber(tmp_path, "stream")


def test_import_of_rt_loads_no_third_party_package() -> None:
    program = "import rt, sys; print(*(name for name in sys.modules if not name.startswith('_')))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    packages = {name.partition(".")[0] for name in loaded.split()} - set(sys.stdlib_module_names)
    assert packages <= {"rt", "sitecustomize"}


def test_package_provides_every_public_name() -> None:
    for name in rt.__all__:
        assert getattr(rt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = rt.missing


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"endpoints": ["n1:1"]}, "endpoints without tls"),
        ({"endpoints": "n1:1"}, "a sequence of"),
        ({"endpoints": ["n1:1"], "tls": "pki"}, "got 'pki', expected an rt.TLS"),
        ({"position": -1}, "invalid position: got -1"),
        ({"position": 2**62 + 1}, "invalid position: got 4611686018427387905"),
        ({"position": "first"}, "invalid position: got 'first'"),
        ({"position": True}, "invalid position: got True"),
        ({"position": 1.0}, "invalid position: got 1.0"),
        ({"retention": "never"}, "retention="),
    ],
)
def test_invalid_options_are_rejected_before_any_file_is_created(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        rt.Subscriber(tmp_path, "stream", **options)
    assert not list(tmp_path.iterdir())


def test_call_off_ends_waiting_read_without_losing_messages(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream", position="latest") as subscriber:
        for is_paused in (False, True):
            if is_paused:
                subscriber.pause()
            waiting = threading.Thread(target=subscriber.next_batch)
            waiting.start()
            subscriber.call_off()
            waiting.join(120)
            assert not waiting.is_alive()
        subscriber.resume()
        publisher.publish(b"next")
        batch = subscriber.next_batch(30)
        assert batch is not None
        assert batch.numbers.tolist() == [10]


def test_trim_without_own_retention_raises_value_error(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        with pytest.raises(ValueError, match="retention='own'"):
            subscriber.trim(0)
        assert subscriber.log_end is None


def test_pull_problem_is_reported_at_second_check_of_copy(tmp_path: Path) -> None:
    """Since the first check, the pull client may have stored messages and then reported the problem."""
    corrupt = rt.events.CorruptPositions(9, None, "no node has them")
    pulling: Any = SimpleNamespace(refused=None, corrupt=corrupt, failure=None, unreached=None)
    events: list[rt.events.Event] = []
    wakes: list[bool] = []
    wake = partial(wakes.append, True)
    copy = PulledCopy(REAL, str(tmp_path), pulling, DeliveryCounter(events.append), wake, None)
    copy.check(is_closed=False)
    assert (events, wakes) == ([], [True])
    copy.check(is_closed=False)
    assert (events, pulling.corrupt) == ([corrupt], None)
    pulling.failure = rt.Closed("the certificate is revoked")
    copy.check(is_closed=False)
    for _ in range(2):
        with pytest.raises(rt.Closed):
            copy.check(is_closed=False)


def test_pull_problem_arising_during_check_is_not_reported_at_next_check(
    tmp_path: Path,
) -> None:
    corrupt = rt.events.CorruptPositions(9, None, "no node has them")

    class Pulling:
        refused = failure = unreached = None
        looks = 0

        @property
        def corrupt(self) -> rt.events.CorruptPositions | None:
            """Return the problem from the second call on, as if the pull client reported it just after the
            first.
            """
            self.looks += 1
            return corrupt if self.looks > 1 else None

    pulling: Any = Pulling()
    events: list[rt.events.Event] = []
    copy = PulledCopy(REAL, str(tmp_path), pulling, DeliveryCounter(events.append), lambda: None, None)
    copy.check(is_closed=False)
    copy.check(is_closed=False)
    assert events == []


def test_pause_wakes_watch_while_another_thread_closes_it(
    publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[bool] = []
    watches = iter([SimpleNamespace(wake=lambda: wakes.append(True))])
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        with monkeypatch.context() as patch:
            patch.setattr(rt.Subscriber, "_watch", property(lambda _: next(watches, None)), raising=False)
            subscriber.pause()
        assert wakes == [True]
