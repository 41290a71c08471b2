"""A store with lost, cut, corrupt or replaced files opens at its last commit, or is rejected."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rt
from rt.objects import CheckpointKind, CommitUnknown, SqliteStore, StateDamaged, sqlite_database
from rt.objects import commit_record as records
from rt.objects.commit_record import LastCommit
from rt.objects.sqlite_backup import back_up_store, check_store
from rt.objects.sqlite_file import SqliteInformation
from rt.objects.sqlite_recovery import StoreFiles, require_agreement

COMMITS = 12
PROGRAM = """
import os, signal, sys
from rt.objects import CheckpointKind, SqliteStore

store = SqliteStore(sys.argv[1])
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    writer = store.begin(CheckpointKind.DIFFERENTIAL)
    writer.put("numbers", str(number), b"%d" % number)
    writer.put("last", "number", b"%d" % number)
    writer.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_and_kill(path: Path, start: int = 0, end: int = COMMITS) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, path, str(start), str(end)], check=False)
    assert done.returncode == -signal.SIGKILL


def put(store: SqliteStore, number: int) -> None:
    writer = store.begin(CheckpointKind.DIFFERENTIAL)
    writer.put("numbers", str(number), b"%d" % number)
    writer.put("last", "number", b"%d" % number)
    writer.commit()


def numbers(path: Path) -> int:
    """How many numbers a store holds. Fails unless they are one commit."""
    with SqliteStore(path) as store:
        held = {int(value) for _, value in store.reader().rows("numbers")}
        assert held == set(range(len(held)))
        last = store.reader().get("last", "number")
        assert last == (b"%d" % (len(held) - 1) if held else None)
        return len(held)


def files_in(directory: Path) -> dict[str, bytes]:
    """Without the index of the write-ahead log, which any reader makes again."""
    return {
        each.name: each.read_bytes()
        for each in directory.iterdir()
        if not each.name.endswith(("-shm", ".lock"))
    }


def restored(directory: Path, files: dict[str, bytes]) -> Path:
    """Make the directory hold exactly these files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory / "state.db"


def flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1 << offset % 8]) + data[offset + 1 :]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a process that was killed after its last commit."""
    directory = tmp_path_factory.mktemp("killed")
    run_and_kill(directory / "state.db")
    found = files_in(directory)
    assert set(found) == {"state.db", "state.db-wal", "state.db-commit"}
    return found


def refuse(path: Path, match: str) -> None:
    """Check that every reader rejects the store, and that the store stays unchanged."""
    before = files_in(path.parent)
    for use in (SqliteStore, check_store, lambda path: back_up_store(path, path.with_name("backup.db"))):
        with pytest.raises(StateDamaged, match=match):
            use(path)
        after = files_in(path.parent)
        assert {name: after[name] for name in before} == before
        assert not path.with_name("backup.db").exists()


def test_store_of_killed_process_has_all_commits(tmp_path: Path, killed: dict[str, bytes]) -> None:
    assert numbers(restored(tmp_path / "data", killed)) == COMMITS


@pytest.mark.parametrize("lost", ["state.db", "state.db-wal", "state.db-commit"])
def test_lost_or_empty_file_is_reported_missing(tmp_path: Path, killed: dict[str, bytes], lost: str) -> None:
    left = {name: data for name, data in killed.items() if name != lost}
    refuse(restored(tmp_path / "data", left), "missing")
    with pytest.raises(StateDamaged, match="missing"):
        SqliteStore(restored(tmp_path / "data", {**left, lost: b""}))


def test_lost_wal_is_reported_with_found_and_expected_commit(
    tmp_path: Path, killed: dict[str, bytes]
) -> None:
    path = restored(tmp_path / "data", {name: killed[name] for name in ("state.db", "state.db-commit")})
    refuse(path, f"got commit 0 of store .*, expected commit {COMMITS} of store")


def test_wal_cut_at_any_offset_is_rejected(tmp_path: Path, killed: dict[str, bytes]) -> None:
    log = killed["state.db-wal"]
    for end in range(0, len(log), 1373):
        path = restored(tmp_path / "data", {**killed, "state.db-wal": log[:end]})
        with pytest.raises(StateDamaged, match=f"got commit .*, expected commit {COMMITS}"):
            SqliteStore(path)


@pytest.mark.parametrize("name", ["state.db", "state.db-wal", "state.db-commit"])
def test_flipped_bit_after_kill_is_detected_or_harmless(
    tmp_path: Path, killed: dict[str, bytes], name: str
) -> None:
    data, found = killed[name], 0
    for offset in range(0, len(data), max(1, len(data) // 150)):
        path = restored(tmp_path / "data", {**killed, name: flipped(data, offset)})
        try:
            assert numbers(path) == COMMITS, offset
        except rt.RtError:
            found += 1
    assert found > 3


def test_older_copy_of_database_or_wal_is_rejected(tmp_path: Path, killed: dict[str, bytes]) -> None:
    path = restored(tmp_path / "data", killed)
    with SqliteStore(path) as store:  # empties the write-ahead log
        put(store, COMMITS)
    closed = files_in(path.parent)
    run_and_kill(path, COMMITS + 1, COMMITS + 4)
    newer = files_in(path.parent)
    for name in ("state.db", "state.db-wal"):
        old = killed[name]
        with pytest.raises(StateDamaged, match=r"older copy"):
            SqliteStore(restored(path.parent, {**newer, name: old}))
    # An older record promises less than the file has.
    assert (
        numbers(restored(path.parent, {**newer, "state.db-commit": killed["state.db-commit"]})) == COMMITS + 4
    )
    # The log of another time beside a newer file.
    with pytest.raises(StateDamaged, match=r"older copy"):
        SqliteStore(restored(path.parent, {**closed, "state.db-wal": killed["state.db-wal"]}))


def test_mixed_files_of_two_stores_are_rejected(tmp_path: Path, killed: dict[str, bytes]) -> None:
    (tmp_path / "other").mkdir()
    run_and_kill(tmp_path / "other" / "state.db", 0, COMMITS + 1)
    other = files_in(tmp_path / "other")
    for name in other:
        refuse(restored(tmp_path / "data", {**killed, name: other[name]}), "store")


# Every moment of a crash


reported = [0]
"""How many commits returned."""


def moments(directory: Path, action: Callable[[], object]) -> Iterator[tuple[dict[str, bytes], int]]:
    """The files at every line that the store runs during the action, and what `reported` holds then."""
    taken: list[tuple[dict[str, bytes], int]] = []

    def look() -> None:
        found = files_in(directory)
        if not taken or taken[-1] != (found, reported[0]):
            taken.append((found, reported[0]))

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        if f"{os.sep}rt{os.sep}" not in frame.f_code.co_filename:
            return None
        look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    look()
    yield from taken


def test_crash_at_any_line_loses_no_reported_commit_and_raises_no_false_alarm(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    path = directory / "state.db"
    reported[0] = 0

    def live() -> None:
        for _ in range(2):
            with SqliteStore(path) as store:
                for _ in range(3):
                    put(store, reported[0])
                    reported[0] += 1

    crashes = list(moments(directory, live))
    assert len(crashes) > 20
    for found, promised in crashes:
        after = numbers(restored(tmp_path / "after", found))
        assert promised <= after <= promised + 1, sorted(found)
        for lost in found:
            left = {name: data for name, data in found.items() if name != lost}
            try:
                count = numbers(restored(tmp_path / "after", left))
            except StateDamaged:
                continue
            assert promised <= count <= promised + 1, (lost, sorted(found))


def test_failed_record_write_raises_commit_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    with SqliteStore(path) as store:
        put(store, 0)

        def fail(_: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(store._database._record, "write", fail)
        with pytest.raises(CommitUnknown, match="on_save_failed"):
            put(store, 1)
        with pytest.raises(rt.StorageFailed, match="failed earlier"):
            store.begin(CheckpointKind.FULL)
    assert numbers(path) == 2


@pytest.mark.parametrize("where", ["before", "after"])
def test_interrupted_commit_is_counted_if_it_took_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "state.db"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with SqliteStore(path) as store:
        put(store, 0)
        with monkeypatch.context() as patch:
            if where == "before":
                patch.setattr(sqlite_database, "write_information", interrupt)
            else:
                patch.setattr(store._database._record, "write", interrupt)
            with pytest.raises(KeyboardInterrupt):
                put(store, 1)
        assert store._database.last_commit == 1 + (where == "after")
        put(store, 1)
        put(store, 2)
        assert check_store(path).commit == 3 + (where == "after")
    assert numbers(path) == 3


# Files that were replaced while the store is open


@pytest.mark.parametrize("name", ["state.db", "state.db-wal", "state.db-commit", "state.db.lock"])
@pytest.mark.parametrize("is_replaced", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_commit_fails_after_store_file_is_removed_or_replaced(
    tmp_path: Path, name: str, *, is_replaced: bool, is_open: bool
) -> None:
    with SqliteStore(tmp_path / "state.db") as store:
        put(store, 0)
        writer = store.begin(CheckpointKind.DIFFERENTIAL) if is_open else None
        if is_replaced and name != "state.db.lock":
            shutil.copy(tmp_path / name, tmp_path / "new")
            (tmp_path / "new").replace(tmp_path / name)
        else:
            (tmp_path / name).unlink()
        if writer is not None:
            writer.put("numbers", "1", b"1")
            with pytest.raises(CommitUnknown, match="removed, renamed or replaced"):
                writer.commit()
        for _ in range(2):
            with pytest.raises(rt.StorageFailed, match="removed, renamed or replaced"):
                store.begin(CheckpointKind.DIFFERENTIAL)


# Comparison of the store's files


STORE, OTHER = "0" * 32, "1" * 32


def information(
    number: int, base: int = 0, *, store_id: str = STORE, is_complete: bool = False
) -> SqliteInformation:
    return SqliteInformation(store_id, number, base, is_complete)


def record(number: int, store_id: str = STORE) -> bytes:
    slots = [records.encode(LastCommit(store_id, each)).ljust(512, b"\0") for each in (number - 1, number)]
    return b"".join(slots if number % 2 else reversed(slots))


@pytest.mark.parametrize(
    "files",
    [
        StoreFiles(None, None, None),
        StoreFiles(information(5), None, record(5)),
        StoreFiles(information(6, 3), information(3, 1), record(5)),
        StoreFiles(information(6, 3), information(6, 1), record(5)),
        StoreFiles(information(9), None, record(5)),
        StoreFiles(information(0, is_complete=True), information(0, is_complete=True), None),
        StoreFiles(information(7, is_complete=True), None, None),
        StoreFiles(information(7, is_complete=True), None, record(7)),
        # torn record, and commit 6 is durable
        StoreFiles(information(6), None, flipped(record(5), 512 * (6 % 2))),
    ],
)
def test_matching_store_files_are_accepted(files: StoreFiles) -> None:
    require_agreement("state.db", files)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        (StoreFiles(None, None, record(1)), "missing or empty"),
        (StoreFiles(information(4), None, record(5)), "got commit 4 .*expected commit 5"),
        (StoreFiles(information(0), None, None), "the record of the last commit is missing"),
        (StoreFiles(information(5), None, record(5, OTHER)), "two stores"),
        (StoreFiles(information(7, store_id=OTHER, is_complete=True), None, record(5)), "two stores"),
        (StoreFiles(information(5), None, b""), "record of the last commit is damaged"),
        (StoreFiles(information(5), None, bytes(1024)), "record of the last commit is damaged"),
        (StoreFiles(information(4), None, flipped(record(5), 512)), "record of the last commit is damaged"),
        (
            StoreFiles(information(6, 3), information(2), record(5)),
            "got commit 2 .*expected a file with commit 3 to 6",
        ),
        (StoreFiles(information(6, 3), information(7), record(5)), "does not belong"),
        (StoreFiles(information(6, 3), information(4, store_id=OTHER), record(5)), "does not belong"),
    ],
)
def test_mismatched_store_files_are_rejected(files: StoreFiles, match: str) -> None:
    with pytest.raises(StateDamaged, match=match):
        require_agreement("state.db", files)


def test_every_flipped_bit_of_record_is_reported_as_torn() -> None:
    whole = record(5)
    assert records.decode(whole) == LastCommit(STORE, 5)
    for offset in (*range(36), *range(512, 548)):
        for bit in range(8):
            data = bytearray(whole)
            data[offset] ^= 1 << bit
            found = records.decode(bytes(data))
            # One of the two slots stays readable. The record must be reported as torn, although it names a
            # commit.
            assert found is not None
            assert found.is_torn
    assert records.decode(whole[:512]) == LastCommit(STORE, 4, is_torn=True)
