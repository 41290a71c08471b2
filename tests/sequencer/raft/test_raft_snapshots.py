"""The snapshot store: it keeps one whole, durable snapshot, the newest, whatever fails."""

import errno
import hashlib
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disks import FaultyDisk, MemoryDisk, Operation
from disks.crash_sweep import Log, sweep
from dump import Dump, diagram
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.log.disk import REAL, File
from rt.log.format.checksum import sealed
from sequencer.raft.model.messages import SNAPSHOT_BYTES_MAX, LogIndex
from sequencer.raft.storage import snapshot_format
from sequencer.raft.storage.snapshot_format import (
    SNAPSHOT_HEADER_BYTES,
    decode_snapshot_header,
    encode_snapshot_header,
    is_pending_name,
    parse_snapshot_name,
)
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotStore

DIRECTORY = "/data/stream/raft"
CLUSTER = bytes(range(16))
OTHER_CLUSTER = bytes(range(16, 32))


def path_of(index: int) -> str:
    return f"{DIRECTORY}/snapshot.{index}"


def content_of(index: int, size: int = 1500) -> bytes:
    return (b"state %d;" % index * (size // 8 + 1))[:size]


def meta_of(index: int, content: bytes | None = None) -> SnapshotMeta:
    content = content_of(index) if content is None else content
    return SnapshotMeta(
        CLUSTER, 3, LogIndex(index, index // 10), len(content), hashlib.sha256(content).digest()
    )


def file_of(index: int) -> bytes:
    return encode_snapshot_header(meta_of(index)) + content_of(index)


def write(store: SnapshotStore, index: int) -> SnapshotMeta:
    return store.write(CLUSTER, 3, LogIndex(index, index // 10), content_of(index))


def receive(store: SnapshotStore, index: int, piece_bytes: int = 700) -> bytes:
    incoming = store.receive(meta_of(index))
    content = content_of(index)
    for offset in range(0, len(content), piece_bytes):
        incoming.write(offset, content[offset : offset + piece_bytes])
    return incoming.finish(bytes)


def store_on(disk: MemoryDisk) -> SnapshotStore:
    return SnapshotStore.open(DIRECTORY, disk=disk)


def disk_with(*indexes: int) -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_directory(DIRECTORY)
    for index in indexes:
        disk.write(path_of(index), file_of(index))
    return disk


# --- Bytes -----------------------------------------------------------------------------------------------


def test_snapshot_matches_golden_bytes(golden: Callable[..., bytes]) -> None:
    disk = disk_with()
    meta = store_on(disk).write(CLUSTER, 3, LogIndex(1000, 7), b"the state of a node")
    content = disk.read(path_of(1000))
    dump = Dump(content)
    dump.title("A snapshot that covers the log up to entry 1000 of term 7.")
    dump.fields(diagram(snapshot_format))
    dump.part(19, "content")
    data = golden("raft/snapshots/v1/snapshot", content, dump.text())
    assert decode_snapshot_header(data, path="", index=1000, size=len(data)) == meta
    assert meta == SnapshotMeta(CLUSTER, 3, LogIndex(1000, 7), 19, hashlib.sha256(data[96:]).digest())


u64 = st.integers(0, 2**64 - 1)
metas = st.builds(
    SnapshotMeta,
    st.binary(min_size=16, max_size=16),
    u64,
    st.builds(LogIndex, u64, u64),
    u64,
    st.binary(min_size=32, max_size=32),
)


@given(metas)
def test_snapshot_header_round_trips(meta: SnapshotMeta) -> None:
    head = encode_snapshot_header(meta)
    assert len(head) == SNAPSHOT_HEADER_BYTES
    assert decode_snapshot_header(head, path="", index=meta.place.index, size=96 + meta.length) == meta


@pytest.mark.parametrize(
    "wrong",
    [
        (b"short", 0, LogIndex(1, 1), 0, bytes(32)),
        (CLUSTER, -1, LogIndex(1, 1), 0, bytes(32)),
        (CLUSTER, 0, LogIndex(2**64, 1), 0, bytes(32)),
        (CLUSTER, 0, LogIndex(1, -1), 0, bytes(32)),
        (CLUSTER, 0, LogIndex(1, 1), -1, bytes(32)),
        (CLUSTER, 0, LogIndex(1, 1), 0, bytes(31)),
    ],
)
def test_snapshot_meta_with_invalid_field_raises_value_error(
    wrong: tuple[bytes, int, LogIndex, int, bytes],
) -> None:
    with pytest.raises(ValueError):
        SnapshotMeta(*wrong)


def test_snapshot_name_parses_only_with_plain_decimal_index() -> None:
    names = ["snapshot.0", "snapshot.12", f"snapshot.{2**64 - 1}"]
    assert [parse_snapshot_name(name) for name in names] == [0, 12, 2**64 - 1]
    others = [
        "snapshot.",
        "snapshot.01",
        "snapshot.-1",
        f"snapshot.{2**64}",
        "snapshot.1.0.new",
        "xsnapshot.1",
    ]
    others += ["snapshot.1\n", "snapshot.\u0661", ".snapshot.1.new"]
    assert [parse_snapshot_name(name) for name in others] == [None] * len(others)
    assert [name for name in names + others if is_pending_name(name)] == ["snapshot.1.0.new"]


# --- Writing and reading ---------------------------------------------------------------------------------


def test_store_on_empty_directory_has_no_snapshot() -> None:
    store = store_on(disk_with())
    assert store.newest is None
    for method in (store.read, store.open_newest):
        with pytest.raises(ValueError, match="no snapshot"):
            method()


def test_store_on_missing_directory_raises_log_not_found() -> None:
    with pytest.raises(rt.LogNotFound, match="not found"):
        store_on(MemoryDisk())


@pytest.mark.parametrize("take", [write, receive])
def test_newer_snapshot_replaces_older_file(take: Callable[[SnapshotStore, int], object]) -> None:
    disk = disk_with()
    store = store_on(disk)
    for index in (0, 10, 20):
        take(store, index)
        assert store.newest == meta_of(index)
        assert store.read() == content_of(index)
        assert disk.paths() == [path_of(index)]
        assert disk.read(path_of(index)) == file_of(index)
    again = store_on(disk)
    assert (again.newest, again.read()) == (meta_of(20), content_of(20))


def test_write_returns_meta_and_receive_returns_content() -> None:
    store = store_on(disk_with())
    assert write(store, 10) == meta_of(10)
    assert receive(store, 20) == content_of(20)


def test_snapshot_of_empty_state_is_written_and_received() -> None:
    store = store_on(disk_with())
    assert store.write(CLUSTER, 3, LogIndex(1, 1), b"").length == 0
    assert store.read() == b""
    assert (
        store.receive(SnapshotMeta(CLUSTER, 3, LogIndex(2, 1), 0, hashlib.sha256().digest())).finish(bytes)
        == b""
    )
    assert store.read() == b""


def test_snapshot_not_above_newest_index_raises_value_error() -> None:
    disk = disk_with(20)
    store = store_on(disk)
    for index in (19, 20):
        with pytest.raises(ValueError, match="newest"):
            store.write(CLUSTER, 3, LogIndex(index, 9), b"another state")
        with pytest.raises(ValueError, match="newest"):
            store.receive(meta_of(index))
    assert disk.paths() == [path_of(20)]


def test_newest_snapshot_written_again_changes_nothing() -> None:
    disk = disk_with(20)
    store = store_on(disk)
    before = disk.changes
    assert write(store, 20) == meta_of(20)
    assert disk.changes == before
    with pytest.raises(ValueError):
        store.write(OTHER_CLUSTER, 3, LogIndex(20, 2), content_of(20))


def test_closed_store_raises_closed_and_removes_unfinished_transfer() -> None:
    disk = disk_with(10)
    store = store_on(disk)
    incoming = store.receive(meta_of(20))
    reader = store.open_newest()
    store.close()
    store.close()
    assert disk.paths() == [path_of(10)]
    for method in (
        store.read,
        store.open_newest,
        lambda: write(store, 20),
        lambda: store.receive(meta_of(20)),
    ):
        with pytest.raises(rt.Closed):
            method()
    with pytest.raises(rt.Closed):
        incoming.write(0, b"x")
    assert reader.read_at(0, 9) == content_of(10)[:9]


# --- Reading for a follower ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "real"])
def test_reader_continues_after_newer_snapshot_replaces_its_file(kind: str, tmp_path: Path) -> None:
    disk, directory = (disk_with(), DIRECTORY) if kind == "memory" else (REAL, str(tmp_path))
    store = SnapshotStore.open(directory, disk=disk)
    write(store, 10)
    reader = store.open_newest()
    assert reader.read_at(0, 500) == content_of(10)[:500]
    receive(store, 20)
    assert disk.list_directory(directory) == ["snapshot.20"]
    assert reader.meta == meta_of(10)
    assert reader.read_at(500, 5000) == content_of(10)[500:]
    assert store.open_newest().read_at(0, 5000) == content_of(20)
    reader.close()
    reader.close()


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_reader_returns_requested_slice_of_content(offset: int, size: int) -> None:
    reader = store_on(disk_with(10)).open_newest()
    assert reader.read_at(offset, size) == content_of(10)[offset : offset + size]


def test_reader_raises_value_error_for_negative_offset_or_size() -> None:
    reader = store_on(disk_with(10)).open_newest()
    for offset, size in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError):
            reader.read_at(offset, size)


def test_readers_find_whole_snapshot_during_concurrent_writes(tmp_path: Path) -> None:
    store = SnapshotStore.open(str(tmp_path))
    write(store, 1)

    def take() -> None:
        for index in range(2, 80):
            (write, receive)[index % 2](store, index)

    seen = 0
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take)
        while not taking.done():
            reader = store.open_newest()
            assert reader.meta.place.index >= seen
            seen = reader.meta.place.index
            assert reader.read_at(0, 5000) == content_of(seen)
            reader.close()
            assert len(store.read()) == 1500
        taking.result()
    assert store.newest == meta_of(79)
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.79"]


# --- Receiving -------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 6)), max_size=20))
def test_transfer_receives_contiguous_prefix_for_any_order_of_chunks(pieces: list[tuple[int, int]]) -> None:
    content = b"whole state!"
    store = store_on(disk_with(10))
    incoming = store.receive(meta_of(20, content))
    here = 0
    for offset, size in pieces:
        piece = content[offset : offset + size]
        if offset + len(piece) <= len(content):
            if offset <= here:
                here = max(here, offset + len(piece))
            assert incoming.write(offset, memoryview(piece)) == here
        assert incoming.received == here
    if here < len(content):
        with pytest.raises(ValueError, match=f"{here} bytes of 12"):
            incoming.finish(bytes)
        incoming.write(here, content[here:])
    assert incoming.finish(bytes) == content
    assert store.read() == content


def test_overlapping_chunk_adds_only_new_bytes() -> None:
    incoming = store_on(disk_with()).receive(meta_of(20))
    content = content_of(20)
    pieces = ((0, 9), (5, 20), (5, 20), (30, 40), (19, 1500))
    received = [incoming.write(start, content[start:end]) for start, end in pieces]
    assert received == [9, 20, 20, 20, 1500]
    assert incoming.finish(bytes) == content


def test_chunk_beyond_end_raises_format_error_and_adds_nothing() -> None:
    incoming = store_on(disk_with(10)).receive(meta_of(20))
    for offset, size in ((0, 1501), (1500, 1), (5000, 1), (-1, 1)):
        with pytest.raises(rt.FormatError, match="expected up to 1500"):
            incoming.write(offset, bytes(size))
    assert incoming.received == 0


def test_content_with_wrong_digest_is_removed_and_both_digests_are_reported() -> None:
    disk = disk_with(10)
    store = store_on(disk)
    incoming = store.receive(meta_of(20))
    wrong = b"?" + content_of(20)[1:]
    incoming.write(0, wrong)
    with pytest.raises(rt.FormatError) as caught:
        incoming.finish(bytes)
    assert caught.value.got == hashlib.sha256(wrong).hexdigest()
    assert caught.value.expected == hashlib.sha256(content_of(20)).hexdigest()
    assert disk.paths() == [path_of(10)]
    assert store.read() == content_of(10)
    assert receive(store, 20) == content_of(20)


def test_new_transfer_closes_previous_transfer() -> None:
    disk = disk_with(10)
    store = store_on(disk)
    old = store.receive(meta_of(20))
    old.write(0, content_of(20)[:100])
    new = store.receive(meta_of(20))
    assert len(disk.paths()) == 2
    for method in (lambda: old.write(100, b"x"), lambda: old.finish(bytes)):
        with pytest.raises(rt.Closed):
            method()
    old.abandon()
    new.write(0, content_of(20))
    assert new.finish(bytes) == content_of(20)
    assert disk.paths() == [path_of(20)]


def test_finished_transfer_is_closed_and_keeps_snapshot_when_abandoned() -> None:
    disk = disk_with()
    store = store_on(disk)
    incoming = store.receive(meta_of(20))
    incoming.write(0, content_of(20))
    incoming.finish(bytes)
    incoming.abandon()
    assert store.receive(meta_of(30)).received == 0
    with pytest.raises(rt.Closed):
        incoming.finish(bytes)
    assert store.read() == content_of(20)


def test_abandoned_transfer_leaves_no_file() -> None:
    disk = disk_with(10)
    incoming = store_on(disk).receive(meta_of(20))
    incoming.write(0, content_of(20)[:100])
    incoming.abandon()
    incoming.abandon()
    assert disk.paths() == [path_of(10)]


def test_transfer_overtaken_by_newer_write_keeps_newer_snapshot() -> None:
    disk = disk_with(10)
    store = store_on(disk)
    incoming = store.receive(meta_of(20))
    incoming.write(0, content_of(20))
    write(store, 30)
    assert incoming.finish(bytes) == content_of(20)
    assert (store.newest, store.read()) == (meta_of(30), content_of(30))
    assert disk.paths() == [path_of(30)]


class Meanwhile(FaultyDisk):
    """A disk on which something else happens just before the next call of one kind."""

    happens: tuple[str, Callable[[], object]] | None = None

    def check(self, operation: Operation) -> None:
        if self.happens is not None and self.happens[0] == operation:
            happen, self.happens = self.happens[1], None
            happen()
        super().check(operation)


def test_write_overtaken_by_newer_transfer_keeps_newer_snapshot() -> None:
    memory = disk_with(10)
    disk = Meanwhile(memory)
    store = SnapshotStore.open(DIRECTORY, disk=disk)
    disk.happens = ("sync", lambda: receive(store, 30))
    assert write(store, 20) == meta_of(30)
    assert store.read() == content_of(30)
    assert memory.paths() == [path_of(30)]


def test_open_returns_newer_snapshot_if_replaced_meanwhile() -> None:
    disk = Meanwhile(disk_with(10))
    store = SnapshotStore.open(DIRECTORY, disk=disk)
    disk.happens = ("open", lambda: write(store, 20))
    assert store.open_newest().meta == meta_of(20)
    disk.happens = ("open", lambda: receive(store, 30))
    assert store.read() == content_of(30)


def test_write_raises_storage_failed_after_concurrent_transfer_failed() -> None:
    memory = disk_with(10)
    disk = Meanwhile(memory)
    store = SnapshotStore.open(DIRECTORY, disk=disk)

    def fail() -> None:
        disk.fail("sync_directory")
        with pytest.raises(rt.StorageFailed):
            receive(store, 15)

    disk.happens = ("sync", fail)
    with pytest.raises(rt.StorageFailed, match="an earlier disk error"):
        write(store, 20)
    assert memory.paths() == [path_of(10), path_of(15)]
    assert store.read() == content_of(10)


def test_transfer_above_size_limit_raises_format_error() -> None:
    disk = disk_with(10)
    meta = SnapshotMeta(CLUSTER, 3, LogIndex(20, 2), SNAPSHOT_BYTES_MAX + 1, bytes(32))
    words = r"too large .*index=20.*: got 8,589,934,593 bytes, expected at most 8,589,934,592 bytes\. Check"
    with pytest.raises(rt.FormatError, match=words):
        store_on(disk).receive(meta)
    assert disk.paths() == [path_of(10)]


# --- Corruption ------------------------------------------------------------------------------------------


def test_flipped_bit_in_header_raises_corrupt_and_removes_nothing() -> None:
    disk = disk_with(10, 20)
    disk.write(path_of(20) + ".3.new", b"unfinished")
    before = disk.paths()
    for bit in range(8 * SNAPSHOT_HEADER_BYTES):
        disk.flip_bit(path_of(20), bit // 8, bit % 8)
        with pytest.raises(rt.Corrupt) as caught:
            store_on(disk)
        assert (caught.value.path, caught.value.offset) == (path_of(20), 0), bit
        disk.flip_bit(path_of(20), bit // 8, bit % 8)
    assert disk.paths() == before
    assert store_on(disk).newest == meta_of(20)


@pytest.mark.parametrize("bit", [0, 8 * 700 + 3, 8 * 1500 - 1])
def test_flipped_bit_in_content_raises_corrupt_on_read(bit: int) -> None:
    disk = disk_with(20)
    store = store_on(disk)
    disk.flip_bit(path_of(20), SNAPSHOT_HEADER_BYTES + bit // 8, bit % 8)
    for opened in (store, store_on(disk)):
        with pytest.raises(rt.Corrupt, match="does not match its digest") as caught:
            opened.read()
        assert (caught.value.path, caught.value.offset) == (path_of(20), SNAPSHOT_HEADER_BYTES)


@pytest.mark.parametrize("size", [0, 1, 95, 96, 97, 96 + 1499, 96 + 1501])
def test_file_of_wrong_size_raises_corrupt(size: int) -> None:
    disk = disk_with(10)
    disk.write(path_of(20), (file_of(20) + b"more")[:size])
    with pytest.raises(rt.Corrupt):
        store_on(disk)
    assert disk.paths() == [path_of(10), path_of(20)]


def test_file_truncated_while_open_raises_corrupt_at_its_end() -> None:
    disk = disk_with(20)
    store = store_on(disk)
    reader = store.open_newest()
    disk.write(path_of(20), file_of(20)[:-100])
    assert reader.read_at(0, 1400) == content_of(20)[:1400]
    for method in (lambda: reader.read_at(1000, 5000), store.read):
        with pytest.raises(rt.Corrupt, match="truncated snapshot") as caught:
            method()
        assert caught.value.offset == 96 + 1400


def test_missing_file_raises_corrupt() -> None:
    disk = disk_with(20)
    store = store_on(disk)
    disk.remove(path_of(20))
    for method in (store.read, store.open_newest):
        with pytest.raises(rt.Corrupt, match="file is missing"):
            method()


def test_file_under_another_name_raises_corrupt() -> None:
    disk = disk_with()
    disk.write(path_of(21), file_of(20))
    with pytest.raises(rt.Corrupt, match=r"differs from its file name.*got 20, expected 21"):
        store_on(disk)


@pytest.mark.parametrize(("offset", "value"), [(8, 0), (8, 2), (8, 65_535), (10, 1)])
def test_unknown_version_or_flags_raise_unknown_version(offset: int, value: int) -> None:
    disk = disk_with(10)
    head = bytearray(file_of(20)[:96])
    struct.pack_into("<H", head, offset, value)
    disk.write(path_of(20), sealed(bytes(head)) + b"laid out otherwise")
    with pytest.raises(rt.UnknownVersion, match=f"unknown .*(version|flags).*got {value}, expected"):
        store_on(disk)
    assert disk.paths() == [path_of(10), path_of(20)]


class _ShortFile:
    def __init__(self, file: File) -> None:
        self._file = file

    def pread(self, size: int, offset: int) -> bytes:
        return self._file.pread(min(size, 7), offset)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class ShortReads(MemoryDisk):
    """A disk that returns 7 bytes at a time."""

    def open(self, path: str, *, write: bool = False) -> File:
        return _ShortFile(super().open(path, write=write))  # type: ignore[return-value]

    def create(self, path: str) -> File:
        return _ShortFile(super().create(path))  # type: ignore[return-value]


def test_short_reads_are_continued() -> None:
    disk = ShortReads()
    disk.make_directory(DIRECTORY)
    store = store_on(disk)
    assert receive(store, 10) == content_of(10)
    assert store_on(disk).newest == meta_of(10)
    assert store.read() == content_of(10)
    assert store.open_newest().read_at(3, 100) == content_of(10)[3:103]


# --- Faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [write, receive])
def test_full_disk_keeps_old_snapshot_and_leaves_no_partial_file(
    take: Callable[[SnapshotStore, int], object],
) -> None:
    disk = disk_with(10)
    store = store_on(disk)
    used = disk.used_bytes
    for room in (0, 1, 95, 96, 97, 700, 96 + 700, 96 + 701, 96 + 1499):
        disk.capacity_bytes = used + room
        with pytest.raises(rt.DiskFull):
            take(store, 20)
        assert (disk.paths(), disk.used_bytes) == ([path_of(10)], used)
        assert (store.newest, store.read()) == (meta_of(10), content_of(10))
    disk.capacity_bytes = used + 96 + 1500
    take(store, 20)
    assert store.read() == content_of(20)


@pytest.mark.parametrize("take", [write, receive])
@pytest.mark.parametrize("operation", ["create", "rename"])
def test_full_directory_raises_disk_full_and_later_snapshot_succeeds(
    take: Callable[[SnapshotStore, int], object], operation: str
) -> None:
    disk = disk_with(10)
    store = store_on(disk)
    disk.fail(operation, error=errno.ENOSPC)
    with pytest.raises(rt.DiskFull):
        take(store, 20)
    assert disk.paths() == [path_of(10)]
    take(store, 20)
    assert disk.paths() == [path_of(20)]


def test_older_snapshot_left_by_failed_removal_is_removed_with_next_write() -> None:
    disk = disk_with(10)
    store = store_on(disk)
    disk.fail("remove", error=errno.ENOSPC)
    with pytest.raises(rt.DiskFull):
        write(store, 20)
    assert (store.newest, store.read()) == (meta_of(20), content_of(20))
    write(store, 30)
    assert disk.paths() == [path_of(30)]


@pytest.mark.parametrize("take", [write, receive])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failed_file_sync_keeps_old_snapshot_and_fails_store(
    take: Callable[[SnapshotStore, int], object], error: int
) -> None:
    disk = disk_with(10)
    store = store_on(disk)
    disk.fail("sync", error=error)
    with pytest.raises(rt.StorageFailed, match="sync"):
        take(store, 20)
    assert disk.paths() == [path_of(10)]
    before = disk.changes
    for again in (write, receive):
        with pytest.raises(rt.StorageFailed, match="an earlier disk error"):
            again(store, 30)
    assert disk.changes == before
    assert store.read() == content_of(10)


@pytest.mark.parametrize("take", [write, receive])
def test_failed_directory_sync_fails_store_with_old_or_new_snapshot_on_disk(
    take: Callable[[SnapshotStore, int], object],
) -> None:
    disk = disk_with(10)
    store = store_on(disk)
    disk.fail("sync_directory", error=errno.ENOSPC)
    with pytest.raises(rt.StorageFailed):
        take(store, 20)
    assert (store.newest, store.read()) == (meta_of(10), content_of(10))
    with pytest.raises(rt.StorageFailed, match="an earlier disk error"):
        take(store, 30)
    left = {store_on(disk.after_power_cut("some", seed)).read() for seed in range(20)}
    assert left == {content_of(10), content_of(20)}


@pytest.mark.parametrize("take", [write, receive])
@pytest.mark.parametrize("operation", ["create", "pwritev", "rename", "remove"])
def test_disk_error_fails_store_with_whole_snapshot_on_disk(
    take: Callable[[SnapshotStore, int], object], operation: str
) -> None:
    disk = disk_with(10)
    store = store_on(disk)
    disk.fail(operation, error=errno.EIO)
    with pytest.raises(rt.StorageFailed):
        take(store, 20)
    with pytest.raises(rt.StorageFailed, match="an earlier disk error"):
        take(store, 30)
    assert store.read() in (content_of(10), content_of(20))
    assert store_on(disk).read() == store.read()


def test_read_error_raises_storage_failed_and_does_not_fail_store() -> None:
    disk = disk_with(10)
    store = store_on(disk)
    disk.fail("pread")
    with pytest.raises(rt.StorageFailed, match="reading"):
        store.read()
    assert store.read() == content_of(10)
    for operation in ("list_directory", "open", "pread", "sync_directory"):
        disk.fail(operation)
        with pytest.raises(rt.StorageFailed):
            store_on(disk)


# --- Power cuts ------------------------------------------------------------------------------------------


def check(disk: MemoryDisk, log: Log) -> None:
    """Check that the newest promised snapshot or a newer one is complete, that it is the only one, and that
    another can follow.
    """
    store = store_on(disk)
    newest = store.newest
    if newest is None:
        assert log == []
    else:
        index = newest.place.index
        assert index >= max(log, default=0)
        assert newest == meta_of(index)
        assert store.read() == content_of(index)
    assert disk.paths() == ([path_of(newest.place.index)] if newest else [])
    write(store, 90)
    assert store_on(disk).read() == content_of(90)
    assert disk.paths() == [path_of(90)]


def recover(disk: MemoryDisk, log: Log) -> None:
    """Promise the snapshot that a start finds, because the node relies on it."""
    store = store_on(disk)
    if store.newest is not None:
        log.append(store.newest.place.index)
        assert store.read() == content_of(store.newest.place.index)


def takes(take: Callable[[SnapshotStore, int], object], *indexes: int) -> Callable[[MemoryDisk, Log], None]:
    def run(disk: MemoryDisk, log: Log) -> None:
        store = store_on(disk)
        for index in indexes:
            take(store, index)
            log.append(index)

    return run


def drop_a_transfer(disk: MemoryDisk, log: Log) -> None:
    store = store_on(disk)
    store.receive(meta_of(40)).write(0, content_of(40)[:700])
    receive(store, 20)
    log.append(20)
    store.receive(meta_of(40)).write(0, content_of(40))
    write(store, 30)
    log.append(30)
    store.close()


def prepare_nothing(disk: MemoryDisk) -> None:
    disk.make_directory(DIRECTORY)


def prepare_leftovers(disk: MemoryDisk) -> None:
    """Leave what crashes may leave: older snapshots that came back, and unfinished files."""
    prepare_nothing(disk)
    for index in (2, 4, 10):
        disk.write(path_of(index), file_of(index))
    disk.write(path_of(4) + ".0.new", file_of(4))
    disk.write(path_of(12) + ".1.new", file_of(12)[:1000])
    disk.write(path_of(30) + ".7.new", b"")


def test_leftover_snapshot_files_are_removed_and_other_files_kept() -> None:
    disk = MemoryDisk()
    prepare_leftovers(disk)
    others = [f"{DIRECTORY}/{name}" for name in ("identity", "log.1", "snapshot.old", "snapshot.010")]
    for path in others:
        disk.write(path, b"not a snapshot")
    assert store_on(disk).newest == meta_of(10)
    assert disk.paths() == sorted([*others, path_of(10)])


def with_ten(disk: MemoryDisk) -> None:
    prepare_nothing(disk)
    disk.write(path_of(10), file_of(10))


def open_only(disk: MemoryDisk, log: Log) -> None:
    log.append(10)  # The snapshot was durable before.
    recover(disk, log)


@pytest.mark.parametrize(
    ("run", "prepare"),
    [
        pytest.param(takes(write, 10, 20), prepare_nothing, id="write the first two"),
        pytest.param(takes(write, 20, 30), with_ten, id="write"),
        pytest.param(takes(receive, 10, 20), prepare_nothing, id="receive the first two"),
        pytest.param(takes(receive, 20, 30), with_ten, id="receive"),
        pytest.param(drop_a_transfer, with_ten, id="drop a transfer"),
        pytest.param(open_only, prepare_leftovers, id="open with leftovers"),
        pytest.param(takes(write, 20), prepare_leftovers, id="write with leftovers"),
    ],
)
def test_power_cut_at_any_file_change_keeps_acknowledged_snapshot(
    run: Callable[[MemoryDisk, Log], None], prepare: Callable[[MemoryDisk], None]
) -> None:
    assert sweep(run, check, prepare=prepare, recover=recover) > 200
