"""The identity of a disk: created once, run incremented at each start, never recreated beside node files."""

import errno
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep
from dump import Dump, diagram
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import rt
from rt.errors import ClusterMismatch
from rt.log.format.checksum import sealed
from sequencer.raft.model.messages import NO_ID, NOWHERE, DiskClaim, LogIndex
from sequencer.raft.storage import identity as identity_module
from sequencer.raft.storage.identity import (
    IDENTITY_BYTES,
    IDENTITY_FILE,
    DiskIdentity,
    decode_identity,
    encode_identity,
    open_identity,
    store_identity,
)

DIRECTORY = "/data/stream/raft"
PATH = f"{DIRECTORY}/{IDENTITY_FILE}"
DISK = bytes(range(16))
CLUSTER = bytes(range(16, 32))
BLANK = DiskIdentity("stream", "node1", DISK, NO_ID, 0, NOWHERE, 1)
JOINED = DiskIdentity("stream", "node1", DISK, CLUSTER, 2, LogIndex(77, 5), 9)


def open_on(disk: MemoryDisk, new_id: Callable[[], bytes] = lambda: DISK, **owner: str) -> DiskIdentity:
    owner = {"stream": "stream", "name": "node1"} | owner
    return open_identity(DIRECTORY, disk=disk, new_id=new_id, **owner)


def disk_with(identity: DiskIdentity | None) -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_directory(DIRECTORY)
    if identity is not None:
        disk.write(PATH, encode_identity(identity))
    return disk


# --- Bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "identity"), [("blank", BLANK), ("joined", JOINED)])
def test_identity_matches_golden_bytes(
    golden: Callable[..., bytes], name: str, identity: DiskIdentity
) -> None:
    disk = disk_with(None)
    store_identity(DIRECTORY, identity, disk=disk)
    dump = Dump(disk.read(PATH))
    dump.title(f"The identity of a disk that is {name}.")
    dump.fields(diagram(identity_module))
    data = golden(f"raft/identity/v1/{name}", disk.read(PATH), dump.text())
    assert decode_identity(data, path="") == identity


u64 = st.integers(0, 2**64 - 1)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
ids = st.binary(min_size=16, max_size=16).filter(any)
places = st.builds(LogIndex, u64, u64)
identities = st.one_of(
    st.builds(DiskIdentity, names, names, ids, ids, u64, places, u64),
    st.builds(DiskIdentity, names, names, ids, st.just(NO_ID), u64, st.just(NOWHERE), u64),
)


@given(identities)
def test_identity_survives_encode_and_decode(identity: DiskIdentity) -> None:
    data = encode_identity(identity)
    assert len(data) == IDENTITY_BYTES == 512
    assert decode_identity(data, path="") == identity


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream": "../x"},
        {"name": ""},
        {"name": "n" * 129},
        {"disk": NO_ID},
        {"disk": b"short"},
        {"cluster": b""},
        {"cluster": NO_ID},
        {"epoch": -1},
        {"joined": LogIndex(2**64, 0)},
        {"run": 2**64},
    ],
)
def test_invalid_identity_field_raises_value_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(JOINED, **wrong)


def test_disk_claim_contains_disk_id_and_applied_join() -> None:
    assert (BLANK.is_blank, BLANK.claim) == (True, DiskClaim(DISK, NOWHERE))
    assert (JOINED.is_blank, JOINED.claim) == (False, DiskClaim(DISK, LogIndex(77, 5)))


# --- Opening and storing ---------------------------------------------------------------------------------


def test_first_start_creates_directory_and_blank_identity() -> None:
    disk = MemoryDisk()
    assert open_on(disk) == BLANK
    assert disk.paths() == [PATH]


def test_each_start_increments_run_of_same_disk() -> None:
    disk = MemoryDisk()
    ids = iter([DISK])
    assert [open_on(disk, lambda: next(ids)).run for _ in range(4)] == [1, 2, 3, 4]
    store_identity(DIRECTORY, replace(JOINED, run=4), disk=disk)
    assert open_on(disk) == replace(JOINED, run=5)
    assert open_on(disk) == replace(JOINED, run=6)


def test_real_disks_get_different_ids(tmp_path: Path) -> None:
    paths = [str(tmp_path / name / "raft") for name in ("a", "b")]
    first, second = (open_identity(path, stream="stream", name="node1") for path in paths)
    assert first.disk != second.disk
    assert open_identity(paths[0], stream="stream", name="node1") == replace(first, run=2)


@pytest.mark.parametrize("owner", [{"stream": "stream2"}, {"name": "node2"}])
def test_directory_of_another_node_raises_cluster_mismatch_naming_both(owner: dict[str, str]) -> None:
    disk = disk_with(JOINED)
    wanted = {"stream": "stream", "name": "node1"} | owner
    with pytest.raises(ClusterMismatch) as caught:
        open_on(disk, **owner)
    assert caught.value.got == "member node1 of stream stream"
    assert caught.value.expected == f"member {wanted['name']} of stream {wanted['stream']}"
    assert decode_identity(disk.read(PATH), path="") == JOINED


@pytest.mark.parametrize("name", ["log.1", "log.durable", "snapshot.7", "snapshot.7.0.new"])
def test_missing_identity_beside_node_files_raises_corrupt(name: str) -> None:
    disk = disk_with(None)
    disk.write(f"{DIRECTORY}/{name}", b"")
    with pytest.raises(
        rt.Corrupt, match=f"identity file is missing.*{name}.*move its directory away.*A cluster of one"
    ) as caught:
        open_on(disk)
    assert caught.value.path == PATH
    assert disk.paths() == [f"{DIRECTORY}/{name}"]


def test_unrelated_files_do_not_prevent_new_identity() -> None:
    disk = disk_with(None)
    for name in ("lock", ".identity.new", "lost+found"):
        disk.write(f"{DIRECTORY}/{name}", b"torn")
    assert open_on(disk) == BLANK
    assert disk.paths() == [f"{DIRECTORY}/{name}" for name in ("identity", "lock", "lost+found")]


# --- Corruption ------------------------------------------------------------------------------------------


def test_flipped_bit_in_identity_raises_corrupt() -> None:
    disk = disk_with(JOINED)
    for bit in range(8 * IDENTITY_BYTES):
        disk.flip_bit(PATH, bit // 8, bit % 8)
        with pytest.raises(rt.Corrupt) as caught:
            open_on(disk)
        assert (caught.value.path, caught.value.offset) == (PATH, 0), bit
        disk.flip_bit(PATH, bit // 8, bit % 8)
    assert open_on(disk) == replace(JOINED, run=10)


@pytest.mark.parametrize("size", [0, 1, 511, 513, 1024])
def test_identity_of_wrong_size_raises_corrupt(size: int) -> None:
    disk = disk_with(None)
    disk.write(PATH, (encode_identity(JOINED) + bytes(512))[:size])
    with pytest.raises(rt.Corrupt, match=f"got {min(size, 513)}, expected 512"):
        open_on(disk)


@pytest.mark.parametrize(("offset", "value"), [(8, 0), (8, 2), (8, 65_535), (10, 1)])
def test_unknown_version_or_flags_raise_unknown_version(offset: int, value: int) -> None:
    disk = disk_with(None)
    data = bytearray(encode_identity(JOINED))
    struct.pack_into("<H", data, offset, value)
    disk.write(PATH, sealed(bytes(data)))
    with pytest.raises(rt.UnknownVersion, match=f"unknown .*(version|flags).*got {value}, expected"):
        open_on(disk)


@pytest.mark.parametrize(
    ("offset", "planted"),
    [
        (16, bytes(16)),  # no disk id
        (32, bytes(16)),  # blank, but joined
        (80, b"\x00\x00"),  # no name
        (80, b"\xff\xff"),
        (84, b"x"),
        (96, b"\xff"),
        (96, b"/"),
        (223, b"x"),  # after the name
        (511, b"x"),
    ],
)
def test_invalid_stored_field_with_valid_checksum_raises_corrupt(offset: int, planted: bytes) -> None:
    disk = disk_with(None)
    data = bytearray(encode_identity(JOINED))
    data[offset : offset + len(planted)] = planted
    disk.write(PATH, sealed(bytes(data)))
    with pytest.raises(rt.Corrupt, match=r"invalid value|nonzero reserved"):
        open_on(disk)


# --- Faults and power cuts -------------------------------------------------------------------------------


def test_full_disk_keeps_old_identity_and_leaves_no_other_file() -> None:
    disk = disk_with(replace(JOINED, run=8))
    for room in (0, 1, 511):
        disk.capacity_bytes = IDENTITY_BYTES + room
        for change in (lambda: open_on(disk), lambda: store_identity(DIRECTORY, BLANK, disk=disk)):
            with pytest.raises(rt.DiskFull):
                change()
            assert (disk.paths(), disk.used_bytes) == ([PATH], IDENTITY_BYTES)
    disk.capacity_bytes = None
    assert open_on(disk) == JOINED


@pytest.mark.parametrize("operation", ["create", "pwritev", "sync", "rename", "sync_directory"])
def test_failed_write_raises_storage_failed_and_keeps_old_or_new_identity(operation: str) -> None:
    disk = disk_with(replace(JOINED, run=8))
    disk.fail(operation)
    with pytest.raises(rt.StorageFailed):
        open_on(disk)
    assert open_on(disk) in (JOINED, replace(JOINED, run=10))


@pytest.mark.parametrize("operation", ["make_directory", "list_directory", "open", "pread"])
def test_failed_read_raises_storage_failed_and_keeps_identity(operation: str) -> None:
    disk = disk_with(JOINED)
    disk.fail(operation, error=errno.EIO)
    with pytest.raises(rt.StorageFailed):
        open_on(disk)
    assert decode_identity(disk.read(PATH), path="") == JOINED


def check(disk: MemoryDisk, log: Log) -> None:
    """Check that the disk has the newest promised identity or the identity that was being written, and that
    the next run is new.
    """
    found = open_on(disk, lambda: b"another disk id.")
    assert disk.paths() == [PATH]
    if log:
        assert found.disk == log[-1].disk
        assert found.run > max(identity.run for identity in log)
        assert found.epoch in (log[-1].epoch, log[-1].epoch + 1)
    assert found.joined == LogIndex(10 * found.epoch, found.epoch)
    assert open_on(disk) == replace(found, run=found.run + 1)


def recover(disk: MemoryDisk, log: Log) -> None:
    log.append(open_on(disk, lambda: b"recovered disk!!"))


def start_twice(disk: MemoryDisk, log: Log) -> None:
    log.append(open_on(disk))
    log.append(open_on(disk))


def join_and_go_on(disk: MemoryDisk, log: Log) -> None:
    identity = open_on(disk)
    log.append(identity)
    for epoch in (1, 2, 3):
        identity = replace(identity, cluster=CLUSTER, epoch=epoch, joined=LogIndex(10 * epoch, epoch))
        store_identity(DIRECTORY, identity, disk=disk)
        log.append(identity)


def with_an_identity(disk: MemoryDisk) -> None:
    disk.make_directory(DIRECTORY)
    disk.write(PATH, encode_identity(replace(BLANK, run=40)))


@pytest.mark.parametrize("run", [start_twice, join_and_go_on])
@pytest.mark.parametrize("prepare", [None, with_an_identity])
def test_power_cut_at_any_change_keeps_identity_and_repeats_no_run(
    run: Callable[[MemoryDisk, Log], None], prepare: Callable[[MemoryDisk], None] | None
) -> None:
    assert sweep(run, check, prepare=prepare, recover=recover) > 200
