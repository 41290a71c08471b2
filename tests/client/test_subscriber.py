"""Subscribing to a local log directory: acknowledgements, pausing, and the package's promises on import."""

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


def test_a_subscriber_follows_the_log(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        assert numbers(subscriber.poll()) == list(range(10))
        assert subscriber.poll(timeout=0) == []
        publisher.publish(b"next")
        assert numbers(subscriber.poll(timeout=120)) == [10]
        assert subscriber.position == 11


def test_columns_and_messages_come_from_the_same_place(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream", topics=[""]) as subscriber:
        assert next(iter(subscriber)).number == 0
        batch = next(subscriber.batches())
        assert batch.numbers.tolist() == list(range(1, 10))
        assert batch.to_arrow().column("value").to_pylist() == [b"%d" % number for number in range(1, 10)]


def test_a_named_subscriber_resumes_where_it_acknowledged(publisher: rt.Publisher) -> None:
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


def test_what_was_not_delivered_cannot_be_acknowledged(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream", name="sink") as subscriber:
        subscriber.poll(4)
        for position in (5, -1):
            with pytest.raises(ValueError, match="not delivered"):
                subscriber.ack(position)
    with rt.Subscriber(publisher.directory, "stream") as subscriber, pytest.raises(ValueError, match="name="):
        subscriber.ack(0)


@pytest.mark.parametrize("content", [b"", b"short", bytes(20), b"RTACKNOW" + bytes(12)])
def test_a_damaged_acknowledgement_is_an_error_and_not_the_beginning(
    publisher: rt.Publisher, content: bytes
) -> None:
    with rt.Subscriber(publisher.directory, "stream", name="sink") as subscriber:
        subscriber.poll(4)
        subscriber.ack(4)
    path = os.path.join(publisher.directory, "acknowledged.sink")
    Path(path).write_bytes(content)
    with pytest.raises(rt.Corrupt, match="explicit position"):
        rt.Subscriber(publisher.directory, "stream", name="sink")


def test_a_paused_subscriber_delivers_nothing_and_loses_nothing(publisher: rt.Publisher) -> None:
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


def test_a_pause_from_another_thread_stops_an_iteration_between_two_messages(publisher: rt.Publisher) -> None:
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


def test_a_seek_goes_back_and_forth_and_waits_for_what_is_not_there_yet(publisher: rt.Publisher) -> None:
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


def test_a_seek_in_a_directory_that_was_removed_fails_and_leaves_the_subscriber_as_it_was(
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
def test_a_close_moves_the_position_past_nothing_that_was_not_delivered(
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


def test_a_poll_after_the_close_says_so(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        assert subscriber.poll(1)
    with pytest.raises(rt.Closed, match=publisher.directory):
        subscriber.poll()
    assert list(subscriber) == []


def test_closing_a_paused_subscriber_ends_its_iteration(publisher: rt.Publisher) -> None:
    subscriber = rt.Subscriber(publisher.directory, "stream")
    subscriber.pause()
    follower = threading.Thread(target=lambda: list(subscriber))
    follower.start()
    subscriber.close()
    follower.join(120)
    assert not follower.is_alive()


def test_a_root_leads_to_the_merged_log_of_the_stream(tmp_path: Path) -> None:
    with pytest.raises(rt.LogNotFound, match=str(tmp_path / "stream" / "merged")):
        rt.Subscriber(tmp_path, "stream")


def test_importing_rt_loads_no_other_package() -> None:
    program = "import rt, sys; print(*(name for name in sys.modules if not name.startswith('_')))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    packages = {name.partition(".")[0] for name in loaded.split()} - set(sys.stdlib_module_names)
    assert packages <= {"rt", "sitecustomize"}


def test_every_public_name_is_there() -> None:
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
def test_options_that_do_not_go_together_are_refused_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        rt.Subscriber(tmp_path, "stream", **options)
    assert not list(tmp_path.iterdir())


def test_a_wait_that_is_called_off_loses_nothing(publisher: rt.Publisher) -> None:
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


def test_only_a_copy_of_its_own_is_trimmed_by_a_subscriber(publisher: rt.Publisher) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        with pytest.raises(ValueError, match="retention='own'"):
            subscriber.trim(0)
        assert subscriber.log_end is None


def test_a_problem_is_reported_after_another_look_at_the_copy(tmp_path: Path) -> None:
    """The pull client may have stored messages, and reported the problem after them, since the first look."""
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


def test_a_problem_that_comes_during_a_look_at_the_copy_is_reported_after_the_next_one(
    tmp_path: Path,
) -> None:
    corrupt = rt.events.CorruptPositions(9, None, "no node has them")

    class Pulling:
        refused = failure = unreached = None
        looks = 0

        @property
        def corrupt(self) -> rt.events.CorruptPositions | None:
            """The pull client reports it just after it was first asked for."""
            self.looks += 1
            return corrupt if self.looks > 1 else None

    pulling: Any = Pulling()
    events: list[rt.events.Event] = []
    copy = PulledCopy(REAL, str(tmp_path), pulling, DeliveryCounter(events.append), lambda: None, None)
    copy.check(is_closed=False)
    copy.check(is_closed=False)
    assert events == []


def test_a_watch_that_another_thread_closes_may_be_woken(
    publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[bool] = []
    watches = iter([SimpleNamespace(wake=lambda: wakes.append(True))])
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        with monkeypatch.context() as patch:
            patch.setattr(rt.Subscriber, "_watch", property(lambda _: next(watches, None)), raising=False)
            subscriber.pause()
        assert wakes == [True]
