"""Delivery from a reader: each message once across interruptions, and columns without copied values."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from merged_logs import Feeds

import rt
from rt.log.disk import File, RealDisk
from rt.log.read.row_delivery import RowDelivery
from rt.log.scan.message_batch import MessageBatch

MANY = 20_000


class KeptFile:
    def __init__(self, file: File, reads: list[bytes]) -> None:
        self._file, self._reads = file, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pread(self, size: int, offset: int) -> bytes:
        self._reads.append(self._file.pread(size, offset))
        return self._reads[-1]


class KeptReads(RealDisk):
    """A disk that keeps all bytes that were read, so that addresses in them stay valid."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []

    def open(self, path: str, *, write: bool = False) -> File:
        return cast("File", KeptFile(super().open(path, write=write), self.reads))

    def hold(self, start: int, size: int) -> bool:
        """Return whether `size` bytes from the address `start` on lie within one of the reads."""
        return any(
            0 <= start - np.frombuffer(read, np.uint8).ctypes.data <= len(read) - size
            for read in self.reads
            if read
        )


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches of 256 KiB of messages with different sizes."""
    root = tmp_path_factory.mktemp("session")
    with rt.Publisher(root, "stream", publisher_id="feed", batch_bytes=256 * 1024) as publisher:
        publisher.publish_many([b"%d" % number * (number % 40) for number in range(MANY)], "t")
        return Path(publisher.directory)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    feeds = Feeds(tmp_path_factory.mktemp("merged"))
    for name in ("a", "c", "a"):  # Session "b" is compressed and not used here.
        feeds.publish(name, [b"%d" % number * 30 for number in range(5000)], "t", range(5000))
        feeds.merge(block_bytes=2**20)
    feeds.close()
    return Path(feeds.path)


def read_log(path: Path, disk: KeptReads) -> Iterator[MessageBatch]:
    with rt.LogReader(path, disk=disk) as reader:
        yield from reader.batches()


def read_subscribed(path: Path, disk: KeptReads) -> Iterator[MessageBatch]:
    with rt.Subscriber(path, "stream", disk=disk) as subscriber:
        while (batch := subscriber.next_batch(timeout=0)) is not None:
            yield batch


@pytest.mark.parametrize("read", [read_log, read_subscribed])
@pytest.mark.parametrize("log", ["session", "merged"])
def test_arrow_values_offsets_and_timestamps_share_bytes_read_from_disk(
    log: str, read: Callable[[Path, KeptReads], Iterator[MessageBatch]], request: pytest.FixtureRequest
) -> None:
    disk, count = KeptReads(), 0
    for batch in read(request.getfixturevalue(log), disk):
        arrow = batch.to_arrow()
        _, offsets, values = arrow["value"].buffers()
        _, timestamps = arrow["timestamp"].buffers()
        for buffer in (offsets, values, timestamps):
            assert disk.hold(buffer.address, buffer.size)
        assert arrow["position"].buffers()[1].address == batch.positions.ctypes.data
        assert arrow["value"].to_pylist() == batch.values
        count += len(batch)
    assert count == (MANY if log == "session" else 15_000)


def test_arrow_slice_shares_bytes_read_from_disk(session: Path) -> None:
    disk = KeptReads()
    batch = next(read_log(session, disk)).slice(100, 200)
    _, offsets, values = batch.to_arrow()["value"].buffers()
    assert disk.hold(offsets.address, offsets.size)
    assert disk.hold(values.address, values.size)


# One by one


@pytest.fixture(scope="module")
def whole(session: Path) -> MessageBatch:
    with rt.LogReader(session) as reader:
        batch = reader.next_batch()
    assert batch is not None
    return batch.slice(0, 20)


@given(steps=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["hold", "take", "keep"])), max_size=6))
def test_each_message_is_delivered_once_across_interruptions_of_iteration(
    whole: MessageBatch, steps: list[tuple[int, str]]
) -> None:
    delivery = RowDelivery()
    messages = delivery.start(whole)
    got: list[int] = []
    for taken, step in steps:
        got += [message.position for message in (next(messages, None) for _ in range(taken)) if message]
        assert delivery.position == (None if len(got) == len(whole) else whole.positions[len(got)])
        if step == "hold":
            delivery.hold()
            assert next(messages, None) is None
        if (rest := delivery.take_rest()) is None:
            assert len(got) == len(whole)
            break
        assert next(messages, None) is None
        if step == "keep":
            delivery.keep(rest)
            assert delivery.rest == (rest, len(rest))
            assert delivery.take_rest() is not None
        messages = delivery.start(rest)
    got += [message.position for message in messages]
    assert got == whole.positions.tolist()
    assert delivery.rest is None


def test_pause_from_another_thread_allows_at_most_one_more_message(session: Path) -> None:
    subscriber = rt.Subscriber(session, "stream")
    got: list[int] = []
    finished = threading.Event()

    def follow() -> None:
        for message in subscriber:
            got.append(message.number)
        finished.set()

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        while len(got) < MANY and follower.is_alive():
            subscriber.pause()
            before = len(got)
            subscriber.stats()
            assert len(got) <= before + 1
            subscriber.resume()
    finally:
        subscriber.close()
        follower.join(120)
    assert finished.is_set()
    assert got == list(range(MANY))
    assert subscriber.stats().messages == MANY
