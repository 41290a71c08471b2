"""SqliteStore: reopening, locking, paths, and errors of the disk or of a corrupt file."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rt
from rt.objects import (
    CheckpointKind,
    CommitUnknown,
    PersistedObjectSpace,
    SqliteStore,
    StateDamaged,
    sqlite_database,
    sqlite_store,
)
from rt.objects.sqlite_backup import back_up_store, check_store
from rt.objects.sqlite_database import WAL_BYTES_MAX
from rt.objects.sqlite_file import APPLICATION_ID

FULL, DIFFERENTIAL = CheckpointKind.FULL, CheckpointKind.DIFFERENTIAL


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(path) as made:
        yield made


def put(store: SqliteStore, key: str, data: bytes) -> None:
    writer = store.begin(DIFFERENTIAL)
    writer.put("a", key, data)
    writer.commit()


def test_only_committed_rows_survive_reopening(path: Path) -> None:
    with SqliteStore(path) as store:
        put(store, "1", b"one")
        store_id = store.store_id
        store.begin(DIFFERENTIAL).put("a", "2", b"never committed")
    with SqliteStore(path) as store:
        assert dict(store.reader().rows("a")) == {"1": b"one"}
        assert store.store_id == store_id


def test_import_of_rt_objects_does_not_load_sqlite() -> None:
    program = "import sys, rt, rt.objects; assert 'sqlite3' not in sys.modules; rt.objects.SqliteStore"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_second_open_of_store_raises_directory_locked(store: SqliteStore) -> None:
    with pytest.raises(rt.DirectoryLocked):
        SqliteStore(store.path)
    put(store, "1", b"one")


def test_begin_on_locked_database_raises_directory_locked(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store._database._write_connection.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(rt.DirectoryLocked, match="SQLITE_BUSY"):
        store.begin(FULL)
    other.close()
    put(store, "1", b"one")


def test_commits_use_full_sync_and_wal_size_is_bounded(store: SqliteStore) -> None:
    assert store._database._write_connection.execute("PRAGMA synchronous").fetchone() == (2,)
    for number in range(12):
        put(store, str(number), os.urandom(2**20))
    assert os.stat(f"{store.path}-wal").st_size <= WAL_BYTES_MAX + 2**21
    assert len(list(store.reader().rows("a"))) == 12


# Invalid files


def test_foreign_database_is_rejected_unchanged(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(rt.FormatError, match="not an object store"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_non_database_file_is_rejected_unchanged(path: Path) -> None:
    path.write_bytes(b"some text " * 1000)
    with pytest.raises(StateDamaged):
        SqliteStore(path)
    assert path.read_bytes() == b"some text " * 1000


def test_newer_version_is_rejected_and_named(path: Path) -> None:
    SqliteStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(rt.UnknownVersion, match="got 7, expected 2"):
        SqliteStore(path)


def test_directory_or_broken_link_as_path_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(rt.StorageError, match="not a file"):
        SqliteStore(tmp_path / "directory")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(rt.StorageError, match="symbolic link to a file that does not exist"):
        SqliteStore(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_symbolic_link_opens_its_target_store(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    path, link = tmp_path / "disk" / "state.db", tmp_path / "link.db"
    with SqliteStore(path) as store:
        put(store, "1", b"one")
    link.symlink_to(path)
    with SqliteStore(link) as store:
        put(store, "2", b"two")
        assert store.path == str(path)
        with pytest.raises(rt.DirectoryLocked):
            SqliteStore(path)
    with SqliteStore(path) as store:
        assert dict(store.reader().rows("a")) == {"1": b"one", "2": b"two"}
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("link")] == ["link.db"]


def test_path_with_special_bytes_is_reopened_checked_and_backed_up(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode("\N{SNOWMAN} ?a=b#%41&\n".encode() + b"\xff.db")
    for number in range(2):
        with SqliteStore(path) as store:
            put(store, str(number), b"value")
    assert check_store(path).rows == 2
    back_up_store(path, tmp_path / os.fsdecode(b"\xfe.db"))
    assert check_store(tmp_path / os.fsdecode(b"\xfe.db")).rows == 2


def test_too_long_path_is_rejected_and_leaves_no_file(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    for path, match in (
        (tmp_path / ("a" * 241), "name .*too long.*got 241 bytes, expected at most 240"),
        (deep / ("a" * (505 - len(str(deep)) - 1)), "path .*too long.*got 505 bytes, expected at most 504"),
    ):
        with pytest.raises(rt.StorageError, match=match):
            SqliteStore(path)
        with SqliteStore(tmp_path / "state.db") as store, pytest.raises(rt.StorageError, match=match):
            back_up_store(store.path, path)
        assert not [each for each in path.parent.iterdir() if "a" * 10 in each.name]


def test_longest_allowed_path_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 240)
    with SqliteStore(path) as store:
        put(store, "1", b"one")
    path.rename(tmp_path / "state.db")
    path.with_name(f"{path.name}-commit").rename(tmp_path / "state.db-commit")
    back_up_store(tmp_path / "state.db", path)
    deep = tmp_path / ("d" * 200)
    deep.mkdir()
    deep = deep / ("e" * (504 - 100 - len(str(deep)) - 1))
    deep.mkdir()
    SqliteStore(deep / ("a" * 99)).close()
    SqliteStore(deep / ("a" * 99)).close()


def test_file_with_two_hard_links_is_rejected(tmp_path: Path, path: Path) -> None:
    SqliteStore(path).close()
    os.link(path, tmp_path / "other.db")
    for name in (path, tmp_path / "other.db"):
        with pytest.raises(rt.StorageError, match="several names"):
            SqliteStore(name)
    (tmp_path / "other.db").unlink()
    SqliteStore(path).close()


def test_empty_file_left_by_interrupted_creation_is_completed(path: Path) -> None:
    path.touch()
    with SqliteStore(path) as store:
        put(store, "1", b"one")
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    connection.close()


# Flipped bits


def test_value_with_flipped_bit_fails_checksum(path: Path) -> None:
    with SqliteStore(path) as store:
        put(store, "1", b"a value to be found" * 10)
        put(store, "2", b"another")
    data = bytearray(path.read_bytes())
    data[data.index(b"a value to be found") + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateDamaged, match="checksum"):
        SqliteStore(path)
    with SqliteStore(path, check=False) as store:
        reader = store.reader()
        assert reader.get("a", "2") == b"another"
        with pytest.raises(StateDamaged, match="checksum"):
            reader.get("a", "1")
        with pytest.raises(StateDamaged, match="checksum"):
            list(reader.rows("a"))


def test_flipped_bit_in_file_is_detected_or_leaves_rows_intact(path: Path) -> None:
    rows = {str(number): b"value %d" % number for number in range(40)}
    with SqliteStore(path) as store:
        writer = store.begin(FULL)
        writer.put_many("a", rows.items())
        writer.commit()
    whole = path.read_bytes()
    found = 0
    for offset in range(0, len(whole), 41):
        data = bytearray(whole)
        data[offset] ^= 1 << offset % 8
        path.write_bytes(data)
        try:
            with SqliteStore(path) as store:
                assert dict(store.reader().rows("a")) == rows, offset
        except rt.RtError:
            found += 1
    assert found > 10


def test_category_listing_of_file_with_flipped_bit_terminates(path: Path) -> None:
    names = [f"category {number:04}/items" for number in range(600)]
    with SqliteStore(path) as store:
        writer = store.begin(FULL)
        for name in names:
            writer.put(name, "1", b"")
        writer.commit()
    whole, refused = path.read_bytes(), 0
    for page in range(8192, len(whole), 4096):  # the pages of rows
        for offset in range(page + 9, page + 40, 4):  # the offsets of the rows in the page
            data = bytearray(whole)
            data[offset] ^= 2
            path.write_bytes(data)
            with contextlib.suppress(StateDamaged), SqliteStore(path, check=False) as store:
                try:
                    assert sum(1 for _ in itertools.islice(store.reader().categories(), 601)) <= 600
                except StateDamaged as error:
                    refused += "wrong order" in str(error)
    assert refused


def test_rows_returned_in_wrong_order_are_detected(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "_READ_AT_ONCE", 2)
    writer = store.begin(FULL)
    writer.put_many("a", [(str(number), b"") for number in range(5)])
    writer.commit()
    read = store._database.read

    def read_from_the_start(statement: str, *values: object) -> list[Any]:
        return read(statement.replace("AND key > ?", "AND key <> ?"), *values)

    monkeypatch.setattr(store._database, "read", read_from_the_start)
    with pytest.raises(StateDamaged, match="wrong order"):
        list(store.reader().rows("a"))


def test_truncated_file_is_rejected(path: Path) -> None:
    with SqliteStore(path) as store:
        writer = store.begin(FULL)
        writer.put_many("a", ((str(number), bytes(100)) for number in range(1000)))
        writer.commit()
    os.truncate(path, path.stat().st_size // 8192 * 4096)
    with pytest.raises(StateDamaged):
        SqliteStore(path)


# Disk errors


def test_checkpoint_raises_disk_full_and_succeeds_once_space_is_free(store: SqliteStore) -> None:
    space = PersistedObjectSpace()
    space.load(store.reader())
    items = space.create_list("items")
    items.append("kept")
    space.checkpoint(store)
    pages = store._database._write_connection.execute("PRAGMA page_count").fetchone()[0]
    store._database._write_connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    items.append("x" * 100_000)
    for _ in range(2):
        with pytest.raises(rt.DiskFull):
            space.checkpoint(store)
    store._database._write_connection.execute("PRAGMA max_page_count = 1000000")
    items.append("last")
    space.checkpoint(store)
    again = PersistedObjectSpace()
    again.load(store.reader())
    assert again.get_list("items") == ["kept", "x" * 100_000, "last"]


def test_store_keeps_committing_after_disk_full_in_wal_checkpoint(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> bool:
        full = sqlite3.OperationalError("database or disk is full")
        full.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise full

    monkeypatch.setattr(sqlite_database, "WAL_BYTES_MAX", 0)
    put(store, "1", b"one")
    with monkeypatch.context() as patch:
        patch.setattr(store._database, "_empty_wal", fail)
        put(store, "2", b"two")
        put(store, "3", b"three")
    put(store, "4", b"four")
    assert os.stat(f"{store.path}-wal").st_size == 0
    assert [key for key, _ in store.reader().rows("a")] == ["1", "2", "3", "4"]


def test_write_error_in_commit_raises_commit_unknown_and_disables_store(path: Path) -> None:
    store = SqliteStore(path)
    space = PersistedObjectSpace()
    space.load(store.reader())
    items = space.create_list("items")
    items.append("kept")
    space.checkpoint(store)
    items.append("x" * 100_000)
    writer = store.begin(DIFFERENTIAL)
    space.save(writer)
    size = os.stat(f"{path}-wal").st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so a write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, hard))
    try:
        with pytest.raises(CommitUnknown) as caught:
            writer.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "on_save_failed" in str(caught.value)
    space.on_save_failed(unknown_outcome=True)
    with pytest.raises(rt.StorageFailed, match="failed earlier"):
        store.begin(DIFFERENTIAL)
    store.close()
    with SqliteStore(path) as store:
        items.append("last")
        space.checkpoint(store)
        again = PersistedObjectSpace()
        again.load(store.reader())
        assert again.get_list("items") == ["kept", "x" * 100_000, "last"]


class _Interrupt:
    """A fence with one interrupted check before a commit."""

    looks = 0

    def newer(self) -> int | None:
        return None

    def require_current(self) -> None:
        self.looks += 1
        if self.looks == 2:
            raise KeyboardInterrupt


def test_checkpoint_succeeds_after_interrupt_before_previous_commit(path: Path) -> None:
    with SqliteStore(path, fence=_Interrupt()) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        space.create_value("it", 1)
        with pytest.raises(KeyboardInterrupt):
            space.checkpoint(store)
        space.get_value("it").value = 2
        space.checkpoint(store)
        again = PersistedObjectSpace()
        again.load(store.reader())
        assert again.get_value("it").value == 2


def test_store_raises_closed_in_forked_child(store: SqliteStore) -> None:
    put(store, "1", b"one")
    store._database._pid += 1  # as in a forked child
    with pytest.raises(rt.Closed):
        store.begin(FULL)
    with pytest.raises(rt.Closed):
        store.reader()
    store._database._pid -= 1
    put(store, "2", b"two")
