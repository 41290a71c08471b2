"""Files of a newer rt are rejected with their name and a hint, and are not overwritten."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from batches import Said, batch

import rt
from replicator.push.session_source import SessionSource
from rt.log.disk import REAL
from rt.log.format.checksum import batch_seed, crc32c, sealed
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.write.writer import BatchFrames, LogWriter
from rt.objects import SqliteStore
from rt.sidecar.cluster_file import PushedCluster, write_cluster
from rt.sidecar.progress_file import RECORD_BYTES, Level, ProgressFile, read_progress
from rt.sidecar.silence_file import WrittenLimit, read_silence_limit, write_silence_limit
from sequencer.raft.model.cluster_state import encode_state, initial_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.storage.identity import IDENTITY_BYTES
from sequencer.raft.storage.log_format import SEGMENT_HEADER_BYTES as RAFT_HEADER_BYTES
from sequencer.raft.storage.open_directory import open_directory
from sequencer.raft.storage.snapshot_format import SNAPSHOT_HEADER_BYTES

IDENTITY = LogIdentity(LogKind.SESSION, bytes(16), "feed")
DISK = b"D" * 16


class Case(NamedTuple):
    """`make` fills a directory, and `read` opens it. `newer` gives the bytes of `file` another version."""

    file: str
    make: Callable[[str], None]
    newer: Callable[[bytes], bytes]
    read: Callable[[str], object]


def make_session(path: str) -> None:
    """Write two segments with a message each, and the other files of a session."""
    with closing(LogWriter.open(path, IDENTITY)) as writer:
        for roll in range(2):
            writer.start(SegmentId(0, roll), first=roll)
            assert writer.active is not None
            frame = batch([Said("t", b"v")], first=roll, seed=batch_seed(writer.active.seed, writer.offset))
            writer.append([BatchFrames([frame], roll + 1, 0, 1)])
            writer.sync()
            if not roll:
                writer.seal()
    with closing(ProgressFile(path, IDENTITY.origin, b"")) as progress:
        progress.write(replicated=Level(0, 1), merged=Level(0, 1))
    write_silence_limit(REAL, path, WrittenLimit(0, 1000))


def read_session(path: str) -> None:
    with rt.LogReader(path) as reader:
        assert len(list(reader)) == 2


def write_session(path: str) -> None:
    LogWriter.open(path, IDENTITY).close()


def push(path: str) -> None:
    async def open_source() -> None:
        SessionSource(path, "s")

    asyncio.run(open_source())


def pushed(path: str) -> None:
    make_session(path)
    write_cluster(path, PushedCluster(b"C" * 16, 1))


def open_raft(path: str) -> None:
    config = RaftConfig("n1", {"n1": "h:1"}, path, "s", bootstrap=True)
    open_directory(config, REAL, lambda: DISK).close()


def make_raft(path: str) -> None:
    """Make the directory of a member, with a snapshot."""
    config = RaftConfig("n1", {"n1": "h:1"}, path, "s", bootstrap=True)
    with closing(open_directory(config, REAL, lambda: DISK)) as found:
        state = initial_state(b"C" * 16, 1, {"n1": DISK})
        found.snapshots.write(state.cluster, state.epoch, state.applied, encode_state(state))
    open_raft(path)


def make_store(path: str) -> None:
    with closing(SqliteStore(os.path.join(path, "store"))):
        pass


def open_store(path: str) -> None:
    SqliteStore(os.path.join(path, "store")).close()


def version_at_8(size: int = 0, *, records: int = 1) -> Callable[[bytes], bytes]:
    """Set version 2 at offset 8 in the first `records` records of `size` bytes (0: the whole file), with the
    checksum at 12.
    """

    def newer(data: bytes) -> bytes:
        each = size or len(data)
        heads = (data[at : at + each] for at in range(0, records * each, each))
        return b"".join(sealed(one[:8] + b"\2\0" + one[10:]) for one in heads) + data[records * each :]

    return newer


def newer_commit_record(data: bytes) -> bytes:
    head = struct.pack("<4sI", data[:4], 2) + data[8:32]
    return (head + struct.pack("<I", crc32c(head))).ljust(512, b"\0") * 2


def newer_database(data: bytes) -> bytes:
    return data[:60] + (7).to_bytes(4, "big") + data[64:]  # PRAGMA user_version


CASES = {
    "a segment that is read": Case("log.0.0", make_session, version_at_8(64), read_session),
    "a segment that is continued": Case("log.0.1", make_session, version_at_8(64), write_session),
    "a segments table": Case("segments", make_session, version_at_8(), write_session),
    "a durable end": Case("durable", make_session, version_at_8(64, records=2), write_session),
    "the progress of a push": Case(".progress", make_session, version_at_8(RECORD_BYTES), read_progress),
    "the progress of a push, to continue it": Case(
        ".progress", make_session, version_at_8(RECORD_BYTES), push
    ),
    "a limit of silence": Case(
        ".max-silence", make_session, version_at_8(), lambda path: read_silence_limit(REAL, path)
    ),
    "the cluster of a session": Case(".cluster", pushed, version_at_8(32), push),
    "the identity of a node's disk": Case("identity", make_raft, version_at_8(IDENTITY_BYTES), open_raft),
    "a segment of the Raft log": Case("log.1", make_raft, version_at_8(RAFT_HEADER_BYTES), open_raft),
    "the synced end of the Raft log": Case("log.durable", make_raft, version_at_8(64, records=2), open_raft),
    "a Raft snapshot": Case("snapshot.1", make_raft, version_at_8(SNAPSHOT_HEADER_BYTES), open_raft),
    "an object store": Case("store", make_store, newer_database, open_store),
    "the record of a store's last commit": Case("store-commit", make_store, newer_commit_record, open_store),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_newer_file_raises_unknown_version_with_its_name_and_is_unchanged(case: Case, tmp_path: Path) -> None:
    made, copied = tmp_path / "made", tmp_path / "copied"
    made.mkdir()
    case.make(str(made))
    shutil.copytree(made, copied)
    case.read(str(copied))
    file = made / case.file
    newer = case.newer(file.read_bytes())
    file.write_bytes(newer)
    with pytest.raises(rt.UnknownVersion) as refused:
        case.read(str(made))
    assert str(refused.value.where).startswith(str(file)), refused.value
    assert refused.value.got in {2, 7}
    assert "newer rt" in (refused.value.hint or "")
    assert file.read_bytes() == newer
