"""A log writer that resumes a replica appends, copies and seals byte for byte."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path

import pytest
from batches import CLUSTER, INCARNATION, LIFE, Said, session_bytes, session_header
from disks import FaultyDisk, MemoryDisk
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.log.check.verify import verify
from rt.log.disk import Disk, RealDisk
from rt.log.format.checksum import crc32c
from rt.log.format.index import index_file_name
from rt.log.format.running_checksum import Checksums
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId, encode_segment_header
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.scan.directory import read_durable_end, read_index
from rt.log.scan.scanner import Scanner, SessionScanner
from rt.log.write.vectored_io import KERNEL_BYTES_MIN, VERIFIED_BYTES_MAX, Scratch, write_pieces
from rt.log.write.writer import BatchFrames, CopyRange, LogWriter

PATH = "/copy"
SESSION = LogIdentity(LogKind.SESSION, INCARNATION, "feed")
HEADER = session_header(run=0, roll=0)
RUNS = [[Said("t", b"%d" % n * 50, 100 - n)] for n in range(5)]
BODY = session_bytes(HEADER, RUNS)
SIZE = len(BODY) // 5
BATCHES = [BODY[start : start + SIZE] for start in range(0, len(BODY), SIZE)]


def clock() -> int:
    return 1_700_000_000_000_000_000


def open_replica(disk: Disk, path: str = PATH, identity: LogIdentity = SESSION) -> LogWriter:
    return LogWriter.open(path, identity, resume=True, disk=disk, clock=clock)


def begin(writer: LogWriter, header: SegmentHeader = HEADER) -> None:
    writer.start(
        header.id, first=header.first, run_id=header.run_id, header_bytes=encode_segment_header(header)
    )


def append(writer: LogWriter, *numbers: int) -> None:
    writer.append([BatchFrames([BATCHES[n]], n + 1, 100 - n, 100 - n) for n in numbers])


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def copy(disk: MemoryDisk) -> MemoryDisk:
    """Return a copy of three batches, all synced, whose writer is closed."""
    with contextlib.closing(open_replica(disk)) as writer:
        begin(writer)
        append(writer, 0, 1, 2)
        writer.sync()
    return disk


# Resuming


def test_resumed_replica_continues_in_active_segment(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        assert (writer.active, writer.offset, writer.end) == (HEADER, 64 + 3 * SIZE, 3)
        assert writer.table.segments == ()
        append(writer, 3, 4)
        writer.sync()
    assert copy.read(f"{PATH}/log.0.0") == encode_segment_header(HEADER) + BODY
    with rt.LogReader(PATH, disk=copy) as reader:
        assert [message.number for message in reader] == [*range(5)]


def test_open_without_resume_seals_active_segment(copy: MemoryDisk) -> None:
    with contextlib.closing(LogWriter.open(PATH, SESSION, disk=copy)) as writer:
        assert (writer.active, writer.end) == (None, 3)
        assert [segment.id for segment in writer.table.segments] == [SegmentId(0, 0)]


def test_new_directory_has_no_segment_to_resume(disk: MemoryDisk) -> None:
    with contextlib.closing(open_replica(disk)) as writer:
        assert (writer.active, writer.end, writer.last_id, writer.recovered.resumed) == (None, 0, None, None)


def test_segment_with_only_a_header_is_resumed(disk: MemoryDisk) -> None:
    with contextlib.closing(open_replica(disk)) as writer:
        begin(writer)
    with contextlib.closing(open_replica(disk)) as writer:
        assert (writer.active, writer.offset, writer.end) == (HEADER, 64, 0)


def test_given_scanner_scans_only_the_resumed_segment(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        writer.seal()
        writer.start(SegmentId(0, 1), first=3, run_id=LIFE)
    walked: list[SegmentHeader] = []
    scanners: list[SessionScanner] = []

    def scanner_for(header: SegmentHeader) -> Scanner:
        walked.append(header)
        scanners.append(SessionScanner(header, marks=True))
        return scanners[-1]

    with contextlib.closing(
        LogWriter.open(PATH, SESSION, resume=True, scanner_for=scanner_for, disk=copy)
    ) as writer:
        assert writer.active is not None
        assert walked == [writer.active]
        assert (scanners[0].offset, scanners[0].next) == (writer.offset, writer.end) == (64, 3)


def test_durable_end_includes_recovered_bytes(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        append(writer, 3)
    with contextlib.closing(open_replica(copy)):
        durable = read_durable_end(copy, PATH)
    assert durable is not None
    assert (durable.id, durable.offset, durable.end) == (HEADER.id, 64 + 4 * SIZE, 4)


@pytest.mark.parametrize("torn", range(1, SIZE, 7))
def test_torn_tail_is_cut_and_can_be_rewritten(copy: MemoryDisk, torn: int) -> None:
    content = copy.read(f"{PATH}/log.0.0")
    copy.write(f"{PATH}/log.0.0", content + BATCHES[3][:torn])
    with contextlib.closing(open_replica(copy)) as writer:
        assert (writer.offset, writer.end) == (len(content), 3)
        assert writer.recovered.torn is not None
        assert writer.recovered.torn.torn_bytes == torn
        append(writer, 3, 4)
    assert copy.read(f"{PATH}/log.0.0") == encode_segment_header(HEADER) + BODY


def test_corrupt_bytes_before_durable_end_raise_corrupt_and_are_not_cut(copy: MemoryDisk) -> None:
    copy.flip_bit(f"{PATH}/log.0.0", 64 + SIZE + 70, 1)
    before = copy.read(f"{PATH}/log.0.0")
    with pytest.raises(rt.Corrupt) as caught:
        open_replica(copy)
    assert caught.value.offset == 64 + SIZE
    assert copy.read(f"{PATH}/log.0.0") == before


@pytest.mark.parametrize(
    ("identity", "error"),
    [
        (LogIdentity(LogKind.SESSION, CLUSTER, "feed"), rt.ClusterMismatch),
        (LogIdentity(LogKind.SESSION, INCARNATION, "other"), rt.InvalidName),
        (LogIdentity(LogKind.SESSION, INCARNATION, "feed", "twins"), rt.InvalidName),
        (LogIdentity(LogKind.MERGED, INCARNATION, "feed"), rt.InvalidName),
    ],
)
@pytest.mark.parametrize("loses_table", [False, True])
def test_directory_of_another_log_is_rejected(
    copy: MemoryDisk, identity: LogIdentity, error: type[Exception], loses_table: bool
) -> None:
    if loses_table:
        copy.remove(f"{PATH}/segments")
        if error is rt.InvalidName and identity.kind is LogKind.SESSION:
            return  # Only the table contains names.
    before = copy.read(f"{PATH}/log.0.0")
    with pytest.raises(error):
        open_replica(copy, identity=identity)
    assert copy.read(f"{PATH}/log.0.0") == before


@pytest.mark.parametrize("harm", ["lost", "torn", "garbage", "longer than the segment"])
def test_index_is_rebuilt_when_lost_torn_or_invalid_after_crash(
    disk: MemoryDisk, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("write.active_segment", "scan.recovery_scan"):
        monkeypatch.setattr(f"rt.log.{module}.INDEX_STRIDE_BYTES", 1)
    for path in ("/whole", PATH):
        writer = open_replica(disk, path)
        begin(writer)
        for number in range(5):
            if path == PATH and number == 3:
                writer.close()
                index = f"{PATH}/{index_file_name(HEADER.id)}"
                content = disk.read(index)
                assert len(content) == 3 * 32
                if harm == "lost":
                    disk.remove(index)
                else:
                    torn = {"torn": content[:40], "garbage": bytes(40) + content[40:]}
                    disk.write(index, torn.get(harm, content + content))
                writer = open_replica(disk, path)
            append(writer, number)
        writer.seal()
        assert [entry.first for entry in read_index(disk, path, HEADER)] == [*range(5)]
        writer.close()
    for name in ("log.0.0", index_file_name(HEADER.id), "segments"):
        assert disk.read(f"/whole/{name}") == disk.read(f"{PATH}/{name}"), name


def test_replica_segments_may_skip_numbers_and_run_may_start_at_any_number(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        begin(writer, session_header(run=0, roll=4, first=90))
        begin(writer, session_header(run=1, roll=0, first=2))
    with contextlib.closing(open_replica(copy)) as writer:
        assert (writer.end, writer.active and writer.active.id) == (2, SegmentId(1, 0))


def test_replica_is_valid_after_skipped_source_segments_are_trimmed(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        writer.seal()
        begin(writer, session_header(run=0, roll=4, first=90))
        assert verify(PATH, disk=copy).damage != []
        writer.trim(SegmentId(0, 4), TrimReason.MERGED)
    assert verify(PATH, disk=copy).damage == []


def test_overlapping_segments_of_one_run_raise_corrupt(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        begin(writer, session_header(run=0, roll=1, first=2))
    with pytest.raises(rt.Corrupt, match="numbers do not continue"):
        open_replica(copy)


def test_missing_synced_bytes_or_segments_raise_corrupt_on_resume(copy: MemoryDisk) -> None:
    content = copy.read(f"{PATH}/log.0.0")
    copy.write(f"{PATH}/log.0.0", content[:-SIZE])
    with pytest.raises(rt.Corrupt):
        open_replica(copy)
    copy.remove(f"{PATH}/log.0.0")
    with pytest.raises(rt.Corrupt, match="synced segments are missing"):
        open_replica(copy)


# Starting from the sender's header, sealing


def test_segment_starts_with_exact_header_bytes_of_sender(disk: MemoryDisk) -> None:
    with contextlib.closing(open_replica(disk)) as writer:
        begin(writer)
        assert disk.read(f"{PATH}/log.0.0") == encode_segment_header(HEADER)
        assert writer.active == HEADER
        other = session_header(run=0, roll=2)
        with pytest.raises(AssertionError):
            writer.start(SegmentId(0, 1), first=0, header_bytes=encode_segment_header(other))


def test_segment_can_be_sealed_before_next_one_starts(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        writer.seal()
        writer.seal()
        assert (writer.active, writer.end, writer.last_id) == (None, 3, HEADER.id)
    with contextlib.closing(open_replica(copy)) as writer:
        assert (writer.active, writer.end, writer.last_id) == (None, 3, HEADER.id)
        writer.start(SegmentId(0, 1), first=3, run_id=LIFE)
        assert [segment.end for segment in writer.table.segments] == [3]
    assert verify(PATH, disk=copy).damage == []


def test_seal_succeeds_after_disk_space_is_freed(copy: MemoryDisk) -> None:
    with contextlib.closing(open_replica(copy)) as writer:
        append(writer, 3)
        copy.capacity_bytes = copy.used_bytes
        with pytest.raises(rt.DiskFull):
            writer.seal()
        copy.capacity_bytes = None
        writer.seal()
        assert [segment.end for segment in writer.table.segments] == [4]


def test_filtered_log_keeps_its_completed_position_after_restart(disk: MemoryDisk) -> None:
    identity = LogIdentity(LogKind.FILTERED, CLUSTER, "stream")
    with contextlib.closing(open_replica(disk, identity=identity)) as writer:
        writer.start(SegmentId(0, 0), first=5)
        writer.complete_to(70)
        writer.complete_to(60)
        writer.sync()
    with contextlib.closing(open_replica(disk, identity=identity)) as writer:
        assert (writer.end, writer.offset) == (70, 64)
        writer.seal()
    with contextlib.closing(open_replica(disk, identity=identity)) as writer:
        assert writer.end == 70
    assert verify(PATH, disk=disk).damage == []


# Copying ranges of other files

SOURCE = os.urandom(3 * KERNEL_BYTES_MIN)
pieces = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.tuples(
            st.integers(0, 2 * KERNEL_BYTES_MIN),
            st.sampled_from([0, 1, 1000, KERNEL_BYTES_MIN - 1, KERNEL_BYTES_MIN]),
        ),
    ),
    max_size=6,
)


def disk_of(kind: str, path: Path) -> tuple[Disk, str]:
    if kind == "memory":
        return MemoryDisk(), "/"
    return (RealDisk() if kind == "real" else FaultyDisk(RealDisk())), str(path)


@pytest.mark.parametrize("refused", [False, True], ids=["in the kernel", "where the kernel refuses"])
@pytest.mark.parametrize("kind", ["memory", "real", "faulty"])
def test_copied_ranges_and_written_bytes_keep_their_order(
    kind: str, refused: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refused:

        def refuse(*_: object) -> int:
            raise OSError(errno.EXDEV, "no")

        monkeypatch.setattr(os, "copy_file_range", refuse)

    @given(pieces)
    def check(drawn: list[bytes | tuple[int, int]]) -> None:
        disk, root = disk_of(kind, tmp_path_factory.mktemp("log"))
        source = disk.create(f"{root}/source")
        source.pwritev([SOURCE], 0)
        writer = open_replica(disk, f"{root}/copy")
        begin(writer)
        parts = [part if isinstance(part, bytes) else CopyRange(source, *part) for part in drawn]
        writer.append([BatchFrames(parts, 1, 0, 0), BatchFrames([b"end"], 2, 0, 0)])
        wanted = b"".join(
            part if isinstance(part, bytes) else SOURCE[part[0] : part[0] + part[1]] for part in drawn
        )
        writer.close()
        source.close()
        written = disk.open(f"{root}/copy/log.0.0")
        assert written.pread(2 * len(wanted) + 100, 64) == wanted + b"end"
        written.close()

    check()


@pytest.mark.parametrize("size", [1000, 2 * KERNEL_BYTES_MIN])
def test_append_from_too_short_source_raises_corrupt_and_leaves_log_unchanged(
    copy: MemoryDisk, size: int
) -> None:
    copy.write("/source", SOURCE[: size - 1])
    source = copy.open("/source")
    with contextlib.closing(open_replica(copy)) as writer:
        before = copy.read(f"{PATH}/log.0.0")
        with pytest.raises(rt.Corrupt, match="ends before") as caught:
            writer.append(
                [
                    BatchFrames([b"good"], 4, 0, 0),
                    BatchFrames([CopyRange(source, 0, size, "/source")], 5, 0, 0),
                ]
            )
        assert (caught.value.path, caught.value.offset) == ("/source", size - 1)
        assert copy.read(f"{PATH}/log.0.0") == before
        append(writer, 3, 4)  # The writer still works.
        assert writer.end == 5


@pytest.mark.parametrize("size", [1000, 2 * KERNEL_BYTES_MIN])
def test_append_keeps_only_whole_frames_if_source_is_truncated_during_copy(
    copy: MemoryDisk, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.write("/source", SOURCE[: size // 2])
    source = copy.open("/source")
    monkeypatch.setattr("rt.log.write.writer.check_sources", lambda pieces: None)
    with contextlib.closing(open_replica(copy)) as writer:
        with pytest.raises(rt.Corrupt, match="ends before"):
            writer.append(
                [BatchFrames([BATCHES[3]], 4, 0, 0), BatchFrames([CopyRange(source, 0, size)], 9, 0, 0)]
            )
        assert len(copy.read(f"{PATH}/log.0.0")) == writer.offset
        assert writer.end in {3, 4}
        assert writer.offset == 64 + writer.end * SIZE


@pytest.mark.parametrize("size", [1000, 2 * KERNEL_BYTES_MIN, 3 * 2**20 + 5, VERIFIED_BYTES_MAX + 9])
@pytest.mark.parametrize("kind", ["memory", "real"])
def test_copied_range_is_written_only_if_its_checksums_match(kind: str, size: int, tmp_path: Path) -> None:
    disk, root = disk_of(kind, tmp_path)
    bytes_ = random.Random(size).randbytes(size + 5)
    source = disk.create(f"{root}/source")
    source.pwritev([bytes_], 0)
    before = crc32c(b"what comes before")
    checked = CopyRange(source, 5, size, "/source", Checksums(before, crc32c(bytes_[5:], before)))
    with contextlib.closing(open_replica(disk, f"{root}/copy")) as writer:
        begin(writer)
        writer.append([BatchFrames([b"head", checked, checked, b"tail"], 1, 0, 0)])
        whole = b"head" + 2 * bytes_[5:] + b"tail"
        source.pwritev([bytes([bytes_[-1] ^ 1])], len(bytes_) - 1)
        with pytest.raises(rt.Corrupt, match="differ from those verified") as caught:
            writer.append([BatchFrames([b"head", checked], 2, 0, 0)])
        assert (caught.value.path, caught.value.offset) == ("/source", 5)
        assert (writer.end, writer.offset) == (1, 64 + len(whole))
        source.pwritev([bytes_[-1:]], len(bytes_) - 1)
        writer.append([BatchFrames([b"head", checked], 2, 0, 0)])
    source.close()
    file = disk.open(f"{root}/copy/log.0.0")
    assert file.pread(3 * len(whole), 64) == whole + b"head" + bytes_[5:]
    file.close()


@pytest.mark.parametrize("size", [1000, 2 * KERNEL_BYTES_MIN, VERIFIED_BYTES_MAX + 9])
def test_range_with_wrong_checksum_raises_corrupt_before_any_write(disk: MemoryDisk, size: int) -> None:
    source, target = disk.create("/source"), disk.create("/target")
    source.pwritev([bytes(size)], 0)
    disk.fail("pwritev")
    disk.fail("copy_from")
    bad = CopyRange(source, 0, size, "/source", Checksums(0, 1))
    written, error = write_pieces(target, [bad], 0, Scratch())
    assert written == 0
    assert isinstance(error, rt.Corrupt)


@pytest.mark.parametrize("room", [0, 3, 4, 1000, KERNEL_BYTES_MIN + 4, 2 * KERNEL_BYTES_MIN + 7])
@pytest.mark.parametrize("size", [1000, KERNEL_BYTES_MIN])
def test_append_on_full_disk_keeps_only_whole_frames_and_can_be_retried(
    copy: MemoryDisk, room: int, size: int
) -> None:
    copy.write("/source", SOURCE)
    source = copy.open("/source")
    run = [b"head", CopyRange(source, 5, size)]
    runs = [BatchFrames(run, 4, 0, 0), BatchFrames(run, 5, 0, 0)]
    whole = 2 * (b"head" + SOURCE[5 : 5 + size])
    with contextlib.closing(open_replica(copy)) as writer:
        at = writer.offset
        copy.capacity_bytes = copy.used_bytes + room
        fitting = min(room // (size + 4), 2)
        with contextlib.nullcontext() if fitting == 2 else pytest.raises(rt.DiskFull):
            writer.append(runs)
        assert writer.end == 3 + fitting
        assert writer.offset == at + fitting * (size + 4) == len(copy.read(f"{PATH}/log.0.0"))
        copy.capacity_bytes = None
        writer.append(runs[fitting:])
        assert copy.read(f"{PATH}/log.0.0")[at:] == whole


def test_failed_copy_makes_writer_unusable(copy: MemoryDisk) -> None:
    copy.write("/source", SOURCE)
    source = copy.open("/source")
    with contextlib.closing(open_replica(copy)) as writer:
        copy.fail("copy_from")
        with pytest.raises(rt.StorageFailed):
            writer.append([BatchFrames([CopyRange(source, 0, KERNEL_BYTES_MIN)], 4, 0, 0)])
        with pytest.raises(rt.StorageFailed):
            append(writer, 3)


# File.copy_from


@pytest.mark.parametrize("kind", ["memory", "real", "faulty"])
def test_copy_from_copies_available_bytes_and_returns_their_count(kind: str, tmp_path: Path) -> None:
    disk, root = disk_of(kind, tmp_path)
    source, target = disk.create(f"{root}/source"), disk.create(f"{root}/target")
    source.pwritev([b"0123456789"], 0)
    target.pwritev([b"abc"], 0)
    assert target.copy_from(source, 2, 4, 3) == 4
    assert target.pread(100, 0) == b"abc2345"
    assert target.copy_from(source, 8, 100, 1) == 2
    assert target.pread(100, 0) == b"a892345"
    assert target.copy_from(source, 10, 5, 0) == 0
    assert target.copy_from(source, 50, 5, 0) == 0
    assert target.pread(100, 0) == b"a892345"
    source.close()
    target.close()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_copy_from_reads_and_writes_if_kernel_cannot_copy(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    test_copy_from_copies_available_bytes_and_returns_their_count("real", tmp_path)


def test_copy_from_raises_other_kernel_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(OSError, match="bad sector"):
        test_copy_from_copies_available_bytes_and_returns_their_count("real", tmp_path)


def test_copied_bytes_are_durable_only_after_sync() -> None:
    disk = MemoryDisk()
    disk.write("/source", b"0123456789")
    disk.write("/target", b"")
    target = disk.open("/target", write=True)
    target.copy_from(disk.open("/source"), 0, 4, 0)
    target.sync()
    target.copy_from(disk.open("/source"), 4, 4, 4)
    changes = disk.changes
    assert changes == 3
    assert disk.after_power_cut("none").read("/target") == b"0123"


def test_copy_from_on_full_disk_copies_a_part_then_raises_no_space() -> None:
    for disk in (MemoryDisk(), FaultyDisk(MemoryDisk())):
        source, target = disk.create("/source"), disk.create("/target")
        source.pwritev([b"0123456789"], 0)
        disk.capacity_bytes = disk.used_bytes + 4
        assert target.copy_from(source, 0, 10, 0) == 4
        with pytest.raises(OSError, match="No space"):
            target.copy_from(source, 4, 6, 4)
        assert target.pread(10, 0) == b"0123"
