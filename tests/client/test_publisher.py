"""A publisher on real files and on a faulty disk: numbers, batches, syncs, recovery and errors."""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from disks import FaultyDisk, MemoryDisk, PowerCut
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import rt
from rt.log.format.constants import MESSAGE_BYTES_MAX, TOPICS_MAX
from rt.log.format.segment_table import TrimReason

LONG_MS = 60_000
"""A linger so long that only the test decides when a batch is written."""


def session_of(root: Path, name: str = "feed") -> Path:
    return root / "stream" / "sessions" / name


def open_publisher(root: Path, **options) -> rt.Publisher:
    return rt.Publisher(root, "stream", publisher_id="feed", **options)


def read(directory: str | Path, **options) -> list[rt.Message]:
    with rt.LogReader(directory, **options) as reader:
        return list(reader)


def on_memory(disk: MemoryDisk, **options) -> rt.Publisher:
    options = {"linger_ms": LONG_MS, "fsync": "never"} | options
    return rt.Publisher("/data", "stream", publisher_id="feed", disk=disk, **options)


def pull_the_plug(publisher: rt.Publisher) -> None:
    """End a publisher whose disk has lost its power."""
    with contextlib.suppress(PowerCut):
        publisher._abandon()


def test_messages_are_read_back_as_published(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        assert publisher.publish(b"one", topic="a", timestamp_ns=5) == 0
        assert publisher.publish(b"", topic="ü") == 1
        assert publisher.publish_many([b"x", b"yy"], topic="b", timestamps_ns=[-1, 7]) == range(2, 4)
    messages = read(publisher.directory)
    assert [(m.number, m.position, m.session, m.topic, m.value) for m in messages] == [
        (0, 0, "feed", "a", b"one"),
        (1, 1, "feed", "ü", b""),
        (2, 2, "feed", "b", b"x"),
        (3, 3, "feed", "b", b"yy"),
    ]
    assert [messages[0].timestamp_ns, messages[2].timestamp_ns, messages[3].timestamp_ns] == [5, -1, 7]


def test_restart_continues_with_next_message_number_in_next_run(tmp_path: Path) -> None:
    for life in range(3):
        with open_publisher(tmp_path) as publisher:
            assert publisher.publish(b"%d" % life) == life
    assert [m.value for m in read(publisher.directory)] == [b"0", b"1", b"2"]
    assert sorted(path.name for path in session_of(tmp_path).glob("log.*")) == [
        "log.0.0",
        "log.1.0",
        "log.2.0",
    ]


def test_second_publisher_on_same_directory_raises_directory_locked(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        with pytest.raises(rt.DirectoryLocked, match=r"already in use.*Another publisher has the session"):
            open_publisher(tmp_path)
        publisher.publish(b"still works")
    assert [m.value for m in read(publisher.directory)] == [b"still works"]


def test_second_process_on_same_directory_raises_directory_locked(tmp_path: Path) -> None:
    program = "import rt, sys; rt.Publisher(sys.argv[1], 'stream', publisher_id='feed')"
    with open_publisher(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    assert "DirectoryLocked" in done.stderr


def test_directory_of_another_session_raises_invalid_name(tmp_path: Path) -> None:
    open_publisher(tmp_path).close()
    shutil.move(session_of(tmp_path), session_of(tmp_path, "other"))
    with pytest.raises(rt.InvalidName, match="belongs to another log"):
        rt.Publisher(tmp_path, "stream", publisher_id="other")


def test_threads_sharing_a_publisher_keep_their_own_order(tmp_path: Path) -> None:
    numbers: dict[int, list[int]] = {}

    def work(thread: int) -> None:
        numbers[thread] = [publisher.publish(b"%d %d" % (thread, i), topic=str(thread)) for i in range(3000)]

    with open_publisher(tmp_path, batch_bytes=4096) as publisher:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    messages = read(publisher.directory)
    assert [m.number for m in messages] == list(range(12_000))
    for thread, own in numbers.items():
        assert [messages[number].value for number in own] == [b"%d %d" % (thread, i) for i in range(3000)]


def test_message_is_written_after_linger_without_flush(tmp_path: Path) -> None:
    with (
        open_publisher(tmp_path, linger_ms=1) as publisher,
        rt.LogReader(publisher.directory, follow=True) as reader,
    ):
        publisher.publish(b"now")
        assert [m.value for m in reader.poll(timeout=120)] == [b"now"]


def test_full_batch_is_written_before_linger_ends(tmp_path: Path) -> None:
    with open_publisher(tmp_path, linger_ms=LONG_MS, batch_bytes=4096) as publisher:
        for _ in range(10):
            publisher.publish(bytes(1000))
        assert len(read(publisher.directory)) in {8, 9}


def test_messages_of_mixed_sizes_around_batch_bytes_are_all_read_back(tmp_path: Path) -> None:
    sizes = [10, 3000, 2000, 9000, 1, 4096, 4095, 0, 5000, 5000]
    with open_publisher(tmp_path, linger_ms=LONG_MS, batch_bytes=4096) as publisher:
        for size in sizes:
            publisher.publish(bytes(size))
        publisher.publish_many([bytes(size) for size in sizes])
    with rt.LogReader(publisher.directory) as reader:
        batches = list(reader.batches())
    assert sum(len(batch) for batch in batches) == 2 * len(sizes)
    assert [len(value) for batch in batches for value in batch.values] == 2 * sizes


@pytest.mark.parametrize("fsync", ["batch", "interval", "never"])
def test_flushed_message_survives_power_loss_with_each_fsync_policy(fsync: str) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, fsync=fsync)
    publisher.publish(b"kept")
    publisher.flush()
    left = disk.after_power_cut("none")
    pull_the_plug(publisher)
    with on_memory(left) as again:
        assert again.next_number == 1
    assert [m.value for m in read(again.directory, disk=left)] == [b"kept"]


def test_fsync_batch_policy_syncs_full_batches_without_flush() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, fsync="batch", batch_bytes=4096)
    publisher.publish_many([bytes(1000)] * 8)
    left = disk.after_power_cut("none")
    pull_the_plug(publisher)
    with on_memory(left) as again:
        assert again.next_number >= 6


def test_fsync_interval_policy_syncs_written_batches_without_flush() -> None:
    disk = MemoryDisk()
    synced = threading.Event()
    publisher = on_memory(disk, fsync="interval", linger_ms=0)
    sync_to = publisher._log.writer.sync_to
    publisher._log.writer.sync_to = lambda point: (sync_to(point), synced.set())
    publisher.publish(b"kept")
    assert synced.wait(120)
    left = disk.after_power_cut("none")
    pull_the_plug(publisher)
    with on_memory(left) as again:
        assert again.next_number == 1


def test_zstd_messages_are_read_back_and_take_less_space(tmp_path: Path) -> None:
    values = [b"the same words again and again %d" % i for i in range(5000)]
    with open_publisher(tmp_path, compression="zstd") as publisher:
        publisher.publish_many(values)
        publisher.publish(os.urandom(10_000))
    messages = read(publisher.directory)
    assert [m.value for m in messages[:-1]] == values
    assert (session_of(tmp_path) / "log.0.0").stat().st_size < sum(map(len, values)) / 3


def test_rolled_segments_are_read_as_one_log(tmp_path: Path) -> None:
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        for number in range(50):
            publisher.publish(b"%d" % number * 100)
    assert len(list(session_of(tmp_path).glob("log.0.*"))) > 2
    assert [m.number for m in read(publisher.directory)] == list(range(50))


@pytest.mark.parametrize("size", [0, 1, 16 * 2**20 - 1, 16 * 2**20, 16 * 2**20 + 1])
def test_messages_of_sizes_up_to_above_16_mib_are_read_back(tmp_path: Path, size: int) -> None:
    value = os.urandom(size)
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"before")
        publisher.publish(value)
        publisher.publish_many([b"small", value, b"after"])
    assert [m.value for m in read(publisher.directory)] == [b"before", value, b"small", value, b"after"]


def test_message_above_size_limit_raises_message_too_large_and_uses_no_number(tmp_path: Path) -> None:
    over = bytes(MESSAGE_BYTES_MAX + 1)
    with open_publisher(tmp_path) as publisher:
        with pytest.raises(rt.MessageTooLarge, match=f"got {MESSAGE_BYTES_MAX + 1} bytes.*Split"):
            publisher.publish(over)
        with pytest.raises(rt.MessageTooLarge):
            publisher.publish_many([b"not taken either", over])
        assert publisher.publish(b"first") == 0


def test_topic_above_batch_topic_limit_starts_next_batch(tmp_path: Path) -> None:
    count = TOPICS_MAX + 1
    with open_publisher(tmp_path, linger_ms=LONG_MS, batch_bytes=16 * 2**20) as publisher:
        for topic in range(count):
            publisher.publish(b"", topic=str(topic))
    with rt.LogReader(publisher.directory) as reader:
        sizes = [len(batch) for batch in reader.batches()]
    assert sizes == [TOPICS_MAX, 1]
    assert [m.topic for m in read(publisher.directory)] == [str(topic) for topic in range(count)]


NO_MESSAGES = {
    "str value": (lambda p: p.publish("text"), TypeError),
    "no value": (lambda p: p.publish(None), TypeError),
    "bytes topic": (lambda p: p.publish(b"", topic=b"bytes"), TypeError),
    "long topic": (lambda p: p.publish(b"", topic="x" * 1025), rt.TopicTooLong),
    "topic that is no text": (lambda p: p.publish(b"", topic="\ud800"), ValueError),
    "float timestamp": (lambda p: p.publish(b"", timestamp_ns=1.5), TypeError),
    "large timestamp": (lambda p: p.publish(b"", timestamp_ns=2**63), ValueError),
    "number that does not follow": (lambda p: p.publish(b"", number=7), ValueError),
    "str among many": (lambda p: p.publish_many([b"", "text"]), TypeError),
    "too few timestamps": (lambda p: p.publish_many([b"", b""], timestamps_ns=[1]), ValueError),
    "float among timestamps": (lambda p: p.publish_many([b""], timestamps_ns=[1.5]), TypeError),
    "large among timestamps": (lambda p: p.publish_many([b""], timestamps_ns=[2**63]), ValueError),
    "huge among timestamps": (
        lambda p: p.publish_many([b""], timestamps_ns=[2**70]),
        (TypeError, ValueError),
    ),
    "long topic of many": (lambda p: p.publish_many([b""], topic="x" * 1025), rt.TopicTooLong),
    "one value as many": (lambda p: p.publish_many(b"one"), rt.InvalidOption),
    "a str as many": (lambda p: p.publish_many("one"), rt.InvalidOption),
    "a mapping as many": (lambda p: p.publish_many({b"key": b"value"}), rt.InvalidOption),
    "an empty mapping as many": (lambda p: p.publish_many({}), rt.InvalidOption),
    "bytes topic of many": (lambda p: p.publish_many([b""], topic=b"x"), TypeError),
}


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_invalid_message_is_rejected_and_uses_no_number(tmp_path: Path, name: str) -> None:
    call, error = NO_MESSAGES[name]
    with open_publisher(tmp_path) as publisher:
        with pytest.raises(error):
            call(publisher)
        assert publisher.publish(b"good") == 0
    assert [m.value for m in read(publisher.directory)] == [b"good"]


def test_published_buffers_are_copied(tmp_path: Path) -> None:
    buffer = bytearray(b"as it was")
    with open_publisher(tmp_path) as publisher:
        publisher.publish(buffer)
        publisher.publish_many([buffer, memoryview(buffer), np.frombuffer(buffer, np.uint8).data])
        buffer[:] = b"otherwise"
    assert [m.value for m in read(publisher.directory)] == [b"as it was"] * 4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_bytes", 0),
        ("batch_bytes", 16 * 2**20 + 1),
        ("linger_ms", -1),
        ("roll_bytes", 1),
        ("fsync", "sometimes"),
        ("compression", "gzip"),
    ],
)
def test_invalid_option_is_named_in_error_and_creates_no_directory(
    tmp_path: Path, option: str, value
) -> None:
    with pytest.raises(ValueError, match=option):
        open_publisher(tmp_path, **{option: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", ".hidden", "-x", "a" * 129, "a\0b", "ü", "a~", "~b", "a~b~c"]
)
def test_invalid_name_raises_invalid_name_and_creates_no_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(rt.InvalidName):
        rt.Publisher(tmp_path, "stream", publisher_id=name)
    if name != "a~b":
        with pytest.raises(rt.InvalidName):
            rt.Publisher(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_timestamps_never_decrease_when_clock_moves_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.chain([100, 50, 120], itertools.repeat(60))
    with open_publisher(tmp_path) as publisher:
        monkeypatch.setattr("rt.client.publisher.time_ns", lambda: next(clock))
        for _ in range(4):
            publisher.publish(b"")
        publisher.publish_many([b""])
    assert [m.timestamp_ns for m in read(publisher.directory)] == [100, 100, 120, 120, 120]


def test_closed_publisher_raises_closed(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    publisher.close()
    publisher.close()
    for call in (lambda: publisher.publish(b""), lambda: publisher.publish_many([b""]), publisher.flush):
        with pytest.raises(rt.Closed):
            call()


def test_unclosed_publisher_is_flushed_at_process_exit(tmp_path: Path) -> None:
    program = (
        "import rt, sys\n"
        "p = rt.Publisher(sys.argv[1], 'stream', publisher_id='feed', linger_ms=60_000)\n"
        "p.publish(b'last words')"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    assert [m.value for m in read(session_of(tmp_path))] == [b"last words"]


def test_publish_in_forked_child_raises_closed(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"parent's")
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                publisher.publish(b"child's")
                os._exit(0)
            except rt.Closed:
                os._exit(42)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert [m.value for m in read(publisher.directory)] == [b"parent's"]


def test_forked_child_releases_all_publishers_though_closing_each_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as opened:
        publishers = [opened.enter_context(open_publisher(tmp_path / name)) for name in "abc"]

        def fail() -> None:
            raise BrokenPipeError

        for publisher in publishers:
            monkeypatch.setattr(publisher._log.writer, "close", fail)
        child = os.fork()
        if child == 0:  # pragma: no cover
            refused = 0
            for publisher in publishers:
                try:
                    publisher.publish(b"child's")
                except rt.Closed:
                    refused += 1
            os._exit(40 + refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 43
        monkeypatch.undo()


def test_dedup_session_starts_each_run_at_given_number(tmp_path: Path) -> None:
    with open_publisher(tmp_path, dedup_id="group") as publisher:
        assert publisher.publish(b"a", number=100) == 100
        assert publisher.publish(b"b") == 101
        with pytest.raises(ValueError, match="numbers are dense"):
            publisher.publish(b"", number=103)
        publisher.publish(b"c", number=102)
    with open_publisher(tmp_path, dedup_id="group") as publisher:
        assert publisher.publish(b"b again", number=101) == 101
    assert [(m.number, m.value) for m in read(publisher.directory)] == [
        (100, b"a"),
        (101, b"b"),
        (102, b"c"),
        (101, b"b again"),
    ]


# The disk


def test_publish_on_full_disk_uses_no_number_and_continues_once_space_is_free() -> None:
    disk = MemoryDisk(capacity_bytes=20_000)
    with on_memory(disk, batch_bytes=4096) as publisher:
        taken = []
        with pytest.raises(rt.DiskFull, match="disk full"):
            while True:
                taken.append(publisher.publish(bytes(1000)))
        with pytest.raises(rt.DiskFull):
            publisher.publish(b"")
        with pytest.raises(rt.DiskFull):
            publisher.flush()
        with pytest.raises(rt.DiskFull):
            publisher.close()
        disk.capacity_bytes = None
        taken.append(publisher.publish(b"again"))
    assert [m.number for m in read(publisher.directory, disk=disk)] == taken == list(range(len(taken)))


@pytest.mark.parametrize("is_bulk", [False, True])
def test_topics_left_by_interrupted_calls_do_not_block_publisher(tmp_path: Path, is_bulk: bool) -> None:
    with open_publisher(tmp_path, batch_bytes=4096, linger_ms=LONG_MS) as publisher:
        for topic in ("lost", "lost too", "and this one"):
            publisher._writer.make_room(topic, 16, (("lost", b""),))  # The interrupted call ended here.
        publisher.publish(b"v", "t", headers={"k": b"v"})
        if is_bulk:
            publisher.publish_many([bytes(4000)] * 2, "t")
        publisher.flush()
    found = read(publisher.directory)
    assert [m.topic for m in found] == ["t"] * (3 if is_bulk else 1)
    assert found[0].headers == (("k", b"v"),)


def test_publish_many_on_full_disk_reports_accepted_numbers(tmp_path: Path) -> None:
    disk = FaultyDisk(rt.log.disk.REAL, capacity_bytes=30_000)
    values = [b"%05d" % number * 100 for number in range(200)]
    options = {"batch_bytes": 4096, "roll_bytes": 8192, "linger_ms": LONG_MS}
    with open_publisher(tmp_path, disk=disk, **options) as publisher:
        with pytest.raises(rt.DiskFull) as caught:
            publisher.publish_many(values)
        accepted = caught.value.accepted
        assert 0 < len(accepted) < 200
        disk.capacity_bytes = None
        assert publisher.publish_many(values[len(accepted) :]) == range(len(accepted), 200)
    assert [m.value for m in read(publisher.directory)] == values


def test_disk_full_during_roll_loses_no_message() -> None:
    for change in range(12):
        disk = MemoryDisk()
        with on_memory(disk, batch_bytes=4096, roll_bytes=4096) as publisher:
            publisher.publish_many([bytes(500)] * 8)
            publisher.flush()
            disk.fail("pwritev", at=1 + change, error=errno.ENOSPC)
            disk.fail("create", at=1 + change, error=errno.ENOSPC)
            number = 8
            while number < 40:
                try:
                    assert publisher.publish(bytes(500)) == number
                    number += 1
                except rt.DiskFull:
                    continue
        assert [m.number for m in read(publisher.directory, disk=disk)] == list(range(40)), change


class FullNowAndThen(RuleBasedStateMachine):
    """A publisher whose disk is sometimes full, compared with a plain list of the messages that it
    accepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.publisher = on_memory(self.disk, batch_bytes=4096, roll_bytes=8192)
        self.taken: list[bytes] = []
        self.flushed = 0

    @rule(size=st.integers(0, 3000))
    def publish(self, size: int) -> None:
        value = b"%d" % len(self.taken) + bytes(size)
        try:
            number = self.publisher.publish(value, topic=str(size % 3))
        except rt.DiskFull:
            return
        assert number == len(self.taken)
        self.taken.append(value)

    @rule(sizes=st.lists(st.integers(0, 2000), max_size=20))
    def publish_many(self, sizes: list[int]) -> None:
        values = [b"%d" % (len(self.taken) + i) + bytes(size) for i, size in enumerate(sizes)]
        try:
            numbers = self.publisher.publish_many(values)
        except rt.DiskFull as error:
            numbers = error.accepted
        assert len(numbers) == 0 or numbers.start == len(self.taken)
        self.taken += values[: len(numbers)]

    @rule()
    def flush(self) -> None:
        try:
            self.publisher.flush()
        except rt.DiskFull:
            return
        self.flushed = len(self.taken)

    @rule(free=st.integers(0, 6000))
    def fill(self, free: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes + free

    @rule()
    def make_room(self) -> None:
        self.disk.capacity_bytes = None

    @invariant()
    def what_is_read_is_what_was_taken(self) -> None:
        values = [m.value for m in read(self.publisher.directory, disk=self.disk)]
        assert self.flushed <= len(values)
        assert values == self.taken[: len(values)]

    def teardown(self) -> None:
        self.disk.capacity_bytes = None
        self.publisher.close()
        assert [m.value for m in read(self.publisher.directory, disk=self.disk)] == self.taken


FullNowAndThen.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestADiskThatIsFullNowAndThenLosesNothing = FullNowAndThen.TestCase


def test_fsync_failure_is_permanent_until_publisher_is_reopened() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"safe")
    publisher.flush()
    publisher.publish(b"not promised")
    disk.fail("sync", error=errno.EIO)
    with pytest.raises(rt.StorageFailed, match="EIO"):
        publisher.flush()
    for call in (publisher.flush, lambda: publisher.publish(b""), lambda: publisher.publish_many([b""])):
        with pytest.raises(rt.StorageFailed):
            call()
    with pytest.raises(rt.StorageFailed):
        publisher.close()
    with on_memory(disk) as again:
        end = again.next_number
        assert again.publish(b"after") == end
    left = disk.after_power_cut("none")
    values = [m.value for m in read(again.directory, disk=left)]
    assert values in ([b"safe", b"not promised", b"after"], [b"safe", b"after"])


@pytest.mark.parametrize("operation", ["pwritev", "sync", "rename", "create", "sync_directory"])
def test_new_publisher_keeps_flushed_messages_after_error_in_any_disk_operation(operation: str) -> None:
    for at in range(1, 6):
        disk = MemoryDisk()
        with on_memory(disk, batch_bytes=4096, roll_bytes=4096) as publisher:
            publisher.publish(b"0")
            publisher.flush()
        promised = 1
        disk.fail(operation, at=at, error=errno.EIO)
        try:
            with on_memory(disk, batch_bytes=4096, roll_bytes=4096) as publisher:
                for number in range(1, 20):
                    publisher.publish(b"%d" % number * 600)
                    publisher.flush()
                    promised = number + 1
        except rt.StorageFailed:
            pass
        with on_memory(disk) as again:
            assert again.next_number >= promised
            again.publish(b"after")
        numbers = [m.number for m in read(again.directory, disk=disk)]
        assert numbers == list(range(again.next_number)), (operation, at)


def test_flush_raises_storage_failed_if_directory_was_removed(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path, linger_ms=LONG_MS)
    publisher.publish(b"lost")
    shutil.rmtree(tmp_path / "stream")
    with pytest.raises(rt.StorageFailed, match="removed under its writer"):
        publisher.flush()
    with pytest.raises(rt.StorageFailed):
        publisher.close()


def test_symlink_in_place_of_segment_is_not_followed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_bytes(b"untouched")
    open_publisher(tmp_path / "root").close()
    directory = session_of(tmp_path / "root")
    (directory / "log.1.0").symlink_to(canary)
    with pytest.raises(rt.RtError):
        open_publisher(tmp_path / "root").close()
    assert canary.read_bytes() == b"untouched"


def test_session_files_are_accessible_only_to_owner(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"")
    assert {path.stat().st_mode & 0o777 for path in session_of(tmp_path).iterdir()} == {0o600}
    assert session_of(tmp_path).stat().st_mode & 0o777 == 0o700


# Recovery


def damage(path: Path, offset: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= mask
    path.write_bytes(content)


def test_torn_tail_at_any_byte_of_last_batch_loses_only_that_batch(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with open_publisher(whole) as publisher:
        publisher.publish(b"kept")
        publisher.flush()
        end = (session_of(whole) / "log.0.0").stat().st_size
        publisher.publish(b"torn", topic="t")
        publisher._lock.acquire()
        publisher._writer.write_batch()
        publisher._lock.release()
        publisher._abandon()
    size = (session_of(whole) / "log.0.0").stat().st_size
    assert size > end + 64
    for cut in range(end, size):
        root = tmp_path / f"cut{cut}"
        shutil.copytree(whole, root)
        os.truncate(session_of(root) / "log.0.0", cut)
        with open_publisher(root) as again:
            assert again.publish(b"next") == 1
        assert [m.value for m in read(session_of(root))] == [b"kept", b"next"]


def test_corrupt_byte_below_durable_end_raises_corrupt_and_is_never_truncated(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        for value in (b"one", b"two", b"three"):
            publisher.publish(value)
            publisher.flush()
        publisher._abandon()
    path = session_of(tmp_path) / "log.0.0"
    good = path.read_bytes()
    for offset in range(0, len(good), 7):
        damage(path, offset)
        with pytest.raises(rt.Corrupt) as caught:
            open_publisher(tmp_path)
        assert caught.value.path == str(path)
        assert caught.value.offset <= offset
        assert path.stat().st_size == len(good)
        path.write_bytes(good)
    with open_publisher(tmp_path) as again:
        assert again.next_number == 3


@pytest.mark.parametrize("size", [1, 8, 63])
def test_truncated_segment_header_raises_corrupt(tmp_path: Path, size: int) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"gone")
        publisher.flush()
        publisher._abandon()
    os.truncate(session_of(tmp_path) / "log.0.0", size)
    with pytest.raises(rt.Corrupt, match="cut short"):
        open_publisher(tmp_path)


def test_empty_untrimmed_newest_segment_raises_corrupt(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"gone")
        publisher.flush()
        publisher._abandon()
    os.truncate(session_of(tmp_path) / "log.0.0", 0)
    with pytest.raises(rt.Corrupt, match="was not trimmed"):
        open_publisher(tmp_path)


def test_missing_synced_segment_raises_corrupt(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"gone")
        publisher.flush()
        publisher._abandon()
    (session_of(tmp_path) / "log.0.0").unlink()
    with pytest.raises(rt.Corrupt, match="synced segments are missing"):
        open_publisher(tmp_path)


def test_truncated_sealed_segment_raises_corrupt(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"sealed")
    open_publisher(tmp_path).close()
    path = session_of(tmp_path) / "log.0.0"
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(rt.Corrupt, match="sealed segment is incomplete"):
        open_publisher(tmp_path)


def test_segment_of_newer_version_raises_unknown_version(tmp_path: Path) -> None:
    from rt.log.format.checksum import crc32c

    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"from the future")
        publisher.flush()
        publisher._abandon()
    path = session_of(tmp_path) / "log.0.0"
    content = bytearray(path.read_bytes())
    content[8] = 2
    content[12:16] = crc32c(bytes(content[16:64]), crc32c(bytes(content[:12]))).to_bytes(4, "little")
    path.write_bytes(content)
    for call in (lambda: open_publisher(tmp_path), lambda: read(path.parent)):
        with pytest.raises(rt.UnknownVersion, match=r"got 2, expected 1.*newer rt"):
            call()


@pytest.mark.parametrize("name", ["segments", "durable", "index.0.0"])
@pytest.mark.parametrize("how", ["deleted", "damaged", "emptied"])
def test_deleted_corrupt_or_empty_side_file_is_rebuilt_from_log(tmp_path: Path, name: str, how: str) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish_many([b"%d" % number for number in range(100)])
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"100")
        incarnation = publisher._log.writer.identity.origin
    path = session_of(tmp_path) / name
    if how == "deleted":
        path.unlink()
    elif how == "emptied":
        os.truncate(path, 0)
    else:
        path.write_bytes(os.urandom(path.stat().st_size))
    assert len(read(session_of(tmp_path))) == 101
    with open_publisher(tmp_path) as again:
        assert again._log.writer.identity.origin == incarnation
        assert again.publish(b"101") == 101
    assert [m.value for m in read(session_of(tmp_path))] == [b"%d" % number for number in range(102)]


def test_deleted_segment_table_is_rebuilt_after_trim(tmp_path: Path) -> None:
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(500)] * 40)
        publisher.flush()
        newest = publisher._log.writer.last_id
        assert newest is not None
        publisher._log.writer.trim(newest, TrimReason.MERGED)
        first = publisher._log.writer.active.first
    (session_of(tmp_path) / "segments").unlink()
    with open_publisher(tmp_path) as again:
        assert again.publish(b"next") == 40
    assert [m.number for m in read(session_of(tmp_path))] == list(range(first, 41))


def test_temporary_files_left_by_crash_are_deleted_at_open(tmp_path: Path) -> None:
    open_publisher(tmp_path).close()
    for name in (".log.1.0.new", ".segments.new"):
        (session_of(tmp_path) / name).write_bytes(b"half")
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"")
    assert not list(session_of(tmp_path).glob(".*"))
