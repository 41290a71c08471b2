"""The `.progress` file: encoding, corrupt or partial records, and levels that never decrease."""

import threading
from pathlib import Path

import pytest
from disks import MemoryDisk
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import rt
from rt.log.format.checksum import sealed
from rt.log.format.constants import NUMBER_MAX
from rt.sidecar.progress_file import (
    NO_LEVEL,
    PROGRESS_BYTES,
    PROGRESS_FILE,
    RECORD_BYTES,
    Level,
    ProgressFile,
    ProgressRecord,
    PushState,
    decode_progress,
    encode_progress,
    read_progress,
)

INCARNATION = bytes(range(16))
CLUSTER = bytes(range(16, 32))
words = st.integers(0, 2**32 - 1)
levels = st.builds(Level, words, st.integers(0, NUMBER_MAX))
records = st.builds(
    ProgressRecord,
    st.binary(min_size=16, max_size=16),
    levels,
    levels,
    st.sampled_from(PushState),
    words,
    words,
    st.one_of(st.just(b""), st.binary(min_size=16, max_size=16).filter(any)),
)


@given(records)
def test_record_round_trips_through_encoding(record: ProgressRecord) -> None:
    data = encode_progress(record)
    assert len(data) == PROGRESS_BYTES
    assert decode_progress(data) == record


@given(records, st.integers(0, RECORD_BYTES - 1), st.integers(1, 255))
def test_record_with_corrupt_byte_decodes_to_none(record: ProgressRecord, at: int, flip: int) -> None:
    data = bytearray(encode_progress(record))
    data[at] ^= flip
    assert decode_progress(bytes(data)) is None


@given(records)
def test_record_of_earlier_rt_without_cluster_id_is_first_64_bytes(record: ProgressRecord) -> None:
    """After an upgrade, the push process and a running publisher may have different versions of rt."""
    data = encode_progress(record)
    assert data == encode_progress(replace(record, cluster=b""))[:RECORD_BYTES] + data[RECORD_BYTES:]
    for length in (RECORD_BYTES, PROGRESS_BYTES - 1):
        assert decode_progress(data[:length]) == replace(record, cluster=b"")


@pytest.mark.parametrize(
    ("recorded", "session", "counts"),
    [
        (CLUSTER, CLUSTER, True),
        (CLUSTER, b"another cluster!", False),
        (CLUSTER, b"", False),
        (b"", CLUSTER, True),
        (b"", b"", False),
    ],
)
def test_record_matches_only_its_incarnation_and_cluster(
    recorded: bytes, session: bytes, *, counts: bool
) -> None:
    record = ProgressRecord(INCARNATION, cluster=recorded)
    assert record.is_of(INCARNATION, session) == counts
    assert not record.is_of(bytes(16), session)


@given(st.binary(max_size=80))
def test_random_bytes_decode_to_none(data: bytes) -> None:
    assert decode_progress(data) is None


def test_encoded_record_matches_documented_byte_layout() -> None:
    data = encode_progress(
        ProgressRecord(INCARNATION, Level(3, 77), Level(2, 66), PushState.FENCED, 9, 5, CLUSTER)
    )
    assert data[:8] == b"RTPRGRSS"
    assert [int.from_bytes(data[at : at + 2], "little") for at in (8, 10)] == [1, 1]
    assert (len(data), data[16:32], data[64:80]) == (80, INCARNATION, CLUSTER)
    assert [int.from_bytes(data[at : at + 4], "little") for at in (32, 36, 56, 60)] == [9, 3, 2, 5]
    assert [int.from_bytes(data[at : at + 8], "little") for at in (40, 48)] == [77, 66]


def test_record_of_newer_version_raises_unknown_version() -> None:
    data = encode_progress(ProgressRecord(INCARNATION))
    with pytest.raises(rt.UnknownVersion, match="got 2, expected 1"):
        decode_progress(sealed(data[:8] + b"\x02\x00" + data[10:RECORD_BYTES]))


def test_deletable_level_excludes_messages_a_node_is_still_missing() -> None:
    assert ProgressRecord(INCARNATION, merged=Level(2, 66), lacking=6).deletable == Level(2, 60)
    assert ProgressRecord(INCARNATION, merged=Level(2, 66), lacking=70).deletable == Level(2, 0)


def test_sequence_wraps_to_zero_after_32_bits() -> None:
    record = decode_progress(encode_progress(ProgressRecord(INCARNATION, sequence=2**32)))
    assert record is not None
    assert record.sequence == 0


def test_missing_empty_or_malformed_progress_file_reads_as_none(tmp_path: Path) -> None:
    assert read_progress(str(tmp_path)) is None
    (tmp_path / PROGRESS_FILE).write_bytes(b"")
    assert read_progress(str(tmp_path)) is None
    (tmp_path / PROGRESS_FILE).write_bytes(b"x" * 64)
    assert read_progress(str(tmp_path)) is None


def test_levels_never_decrease_even_after_writer_restart() -> None:
    disk = MemoryDisk()
    disk.make_directory("/s")
    file = ProgressFile("/s", INCARNATION, CLUSTER, disk=disk)
    file.write(replicated=Level(1, 50), merged=Level(1, 20))
    file.write(replicated=Level(1, 40), merged=Level(0, 90))
    file.close()
    file = ProgressFile("/s", INCARNATION, CLUSTER, disk=disk)
    file.write(replicated=Level(2, 51), merged=NO_LEVEL, state=PushState.FENCED)
    assert read_progress("/s", disk=disk) == ProgressRecord(
        INCARNATION, Level(2, 51), Level(1, 20), PushState.FENCED, 2, 0, CLUSTER
    )


def test_new_incarnation_resets_levels() -> None:
    disk = MemoryDisk()
    disk.make_directory("/s")
    ProgressFile("/s", INCARNATION, CLUSTER, disk=disk).write(replicated=Level(1, 50), merged=Level(1, 20))
    ProgressFile("/s", bytes(16), CLUSTER, disk=disk).write(replicated=Level(0, 1), merged=NO_LEVEL)
    assert read_progress("/s", disk=disk) == ProgressRecord(
        bytes(16), Level(0, 1), NO_LEVEL, sequence=1, cluster=CLUSTER
    )


@pytest.mark.parametrize("cluster", [b"", b"another cluster!"])
def test_change_of_cluster_resets_levels(cluster: bytes) -> None:
    disk = MemoryDisk()
    disk.make_directory("/s")
    ProgressFile("/s", INCARNATION, CLUSTER, disk=disk).write(replicated=Level(1, 50), merged=Level(1, 20))
    file = ProgressFile("/s", INCARNATION, cluster, disk=disk)
    if not cluster:
        file.set_cluster(b"another cluster!")
    file.write(replicated=Level(0, 1), merged=NO_LEVEL)
    assert read_progress("/s", disk=disk) == ProgressRecord(
        INCARNATION, Level(0, 1), NO_LEVEL, sequence=1, cluster=b"another cluster!"
    )


def test_unchanged_record_is_not_written_again() -> None:
    disk = MemoryDisk()
    disk.make_directory("/s")
    file = ProgressFile("/s", INCARNATION, CLUSTER, disk=disk)
    for _ in range(3):
        file.write(replicated=Level(0, 5), merged=NO_LEVEL)
    assert file.record.sequence == 1


def test_concurrent_reader_never_reads_partial_record(tmp_path: Path) -> None:
    file = ProgressFile(str(tmp_path), INCARNATION, CLUSTER)
    file.write(replicated=Level(0, 1), merged=Level(0, 1))

    def write() -> None:
        for number in range(2, 3000):
            file.write(replicated=Level(0, number), merged=Level(0, number))

    thread = threading.Thread(target=write)
    thread.start()
    last = 0
    while last < 2999:
        record = read_progress(str(tmp_path))
        assert record is not None
        assert record.replicated == record.merged
        assert record.replicated.number >= last
        last = record.replicated.number
    thread.join()
    file.close()
