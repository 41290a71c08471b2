"""`rt store` checks and backs up a store while a program uses it, and backups can be restored."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rt
from rt.cli.main import cli
from rt.objects import CheckpointKind, OutOfTurn, PersistedObjectSpace, SqliteStore, StateDamaged
from rt.objects.sqlite_backup import back_up_store, check_store

WRITER = """
import sys
from rt.objects import PersistedObjectSpace, SqliteStore

with SqliteStore(sys.argv[1]) as store:
    space = PersistedObjectSpace()
    space.load(store.reader())
    numbers = space.get_or_create_list("numbers", of=int)
    count = space.get_or_create_value("count", 0)
    while True:
        numbers.extend(range(len(numbers), len(numbers) + 300))
        count.value = len(numbers)
        space.checkpoint(store)
        print(len(numbers), flush=True)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["store", *map(str, arguments)])


def held(path: Path) -> int:
    """How many numbers a store holds. Fails unless list and value are of one commit."""
    with SqliteStore(path) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        numbers = space.get_list("numbers")
        assert list(numbers) == list(range(len(numbers)))
        assert space.get_value("count").value == len(numbers)
        return len(numbers)


def fill(path: Path, commits: int = 3) -> None:
    with SqliteStore(path) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        numbers = space.get_or_create_list("numbers", of=int)
        count = space.get_or_create_value("count", 0)
        for _ in range(commits):
            numbers.append(len(numbers))
            count.value = len(numbers)
            space.checkpoint(store)


def names(directory: Path) -> set[str]:
    """Without the empty log and its index, which SQLite leaves after a reader."""
    return {each.name for each in directory.iterdir() if not each.name.startswith("state.db-")}


@pytest.mark.slow
def test_backup_is_made_while_another_process_commits(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    program = [sys.executable, "-c", WRITER, path]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for number in range(4):
                reported = int(process.stdout.readline())
                assert "in use by a program" in run("check", path).stdout
                copied = run("backup", path, tmp_path / f"{number}.db")
                assert copied.exit_code == 0, copied.output
                assert held(tmp_path / f"{number}.db") >= reported
        finally:
            process.kill()
    assert run("check", path).exit_code == 0
    assert "in use" not in run("check", path).stdout


def test_commits_continue_and_wal_stays_short_while_backup_reads(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "state.db") as store:
        reader = store._database._connect()
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM information").fetchall()
        ran: list[str] = []
        store._database._write_connection.set_trace_callback(ran.append)
        for number in range(12):
            writer = store.begin(CheckpointKind.DIFFERENTIAL)
            writer.put("a", str(number), os.urandom(2**20))
            writer.commit()
        reader.close()
        attempts = [before for before, after in itertools.pairwise(ran) if "wal_checkpoint" in after]
        assert attempts
        assert set(attempts) == {"PRAGMA busy_timeout = 0"}, "a commit waited for the reader"
        assert len(dict(store.reader().rows("a"))) == 12
        writer = store.begin(CheckpointKind.DIFFERENTIAL)
        writer.put("a", "last", b"")
        writer.commit()
        assert os.path.getsize(f"{store.path}-wal") == 0


def test_backup_is_single_file_usable_as_store(tmp_path: Path) -> None:
    path, backup, place = tmp_path / "state.db", tmp_path / "backup.db", tmp_path / "restored" / "state.db"
    fill(path)
    made = back_up_store(path, backup)
    assert {name for name in names(tmp_path) if "backup" in name} == {"backup.db"}
    assert made == check_store(backup)
    assert (made.commit, made.is_complete, made.is_in_use) == (3, True, False)
    assert made.store_id != check_store(path).store_id
    place.parent.mkdir()
    place.write_bytes(backup.read_bytes())
    fill(place, 2)
    assert held(place) == 5
    assert check_store(place).commit == 5
    assert not check_store(place).is_complete
    (place.parent / "state.db-commit").unlink()
    with pytest.raises(StateDamaged, match="record of the last commit is missing"):
        SqliteStore(place)


def test_backup_beside_files_of_old_store_is_rejected(tmp_path: Path) -> None:
    path, backup = tmp_path / "state.db", tmp_path / "backup.db"
    fill(path)
    back_up_store(path, backup)
    backup.replace(path)
    with pytest.raises(StateDamaged, match="two stores"):
        SqliteStore(path)
    (tmp_path / "state.db-commit").unlink()
    assert held(path) == 3


def test_space_save_to_backup_raises_out_of_turn_if_not_loaded_from_it(tmp_path: Path) -> None:
    path, backup = tmp_path / "state.db", tmp_path / "backup.db"
    with SqliteStore(path) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        space.create_value("value", 1)
        space.checkpoint(store)
        back_up_store(path, backup)
        space.get_value("value").value = 2
    with SqliteStore(backup) as store, pytest.raises(OutOfTurn, match="not loaded from"):
        space.checkpoint(store)


@pytest.mark.parametrize("name", ["backup.db", "backup.db-wal", "backup.db-commit"])
def test_backup_overwrites_no_existing_file(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "state.db")
    (tmp_path / name).write_bytes(b"mine")
    before = names(tmp_path)
    with pytest.raises(rt.StorageError, match="in the place of the backup"):
        back_up_store(tmp_path / "state.db", tmp_path / "backup.db")
    assert (tmp_path / name).read_bytes() == b"mine"
    assert names(tmp_path) == before


def test_concurrent_backups_to_one_file_leave_one_complete_backup(tmp_path: Path) -> None:
    fill(tmp_path / "state.db")
    errors: list[rt.RtError] = []

    def back_up() -> None:
        try:
            back_up_store(tmp_path / "state.db", tmp_path / "backup.db")
        except rt.RtError as error:
            errors.append(error)

    threads = [threading.Thread(target=back_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert held(tmp_path / "backup.db") == 3


def test_leftover_of_killed_backup_is_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "state.db")
    (tmp_path / ".backup.db.new").write_bytes(b"half" * 5000)
    back_up_store(tmp_path / "state.db", tmp_path / "backup.db")
    assert held(tmp_path / "backup.db") == 3
    assert ".backup.db.new" not in names(tmp_path)


def test_check_and_backup_reject_store_with_corrupt_row(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with SqliteStore(path) as store:
        writer = store.begin(CheckpointKind.DIFFERENTIAL)
        writer.put("a", "1", b"a value to be found")
        writer.commit()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"a value to be found", b"a value to be Found"))
    before = names(tmp_path)
    for command in (("check", path), ("backup", path, tmp_path / "backup.db")):
        result = run(*command)
        assert result.exit_code == 1
        assert "wrong checksum of a row" in result.output
    assert names(tmp_path) == before


def test_backup_of_store_with_lost_commits_requires_accept_loss(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    fill(path)
    old = path.read_bytes()
    fill(path)
    path.write_bytes(old)
    refused = run("backup", path, tmp_path / "backup.db")
    assert refused.exit_code == 1
    assert "got commit 3" in refused.output
    assert "expected commit 6" in refused.output
    copied = run("backup", "--accept-loss", path, tmp_path / "backup.db")
    assert copied.exit_code == 0
    assert "commit 3," in copied.stdout
    assert held(tmp_path / "backup.db") == 3
    assert run("check", path).exit_code == 1


def test_check_and_backup_print_lines_or_json(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    fill(path)
    status = check_store(path)
    line = f"{path}: intact: commit 3, 8 rows in 5 categories; store {status.store_id}\n"
    assert run("check", path).stdout == line
    assert json.loads(run("check", "--json", path).stdout) == {
        "path": str(path),
        "store_id": status.store_id,
        "commit": 3,
        "rows": 8,
        "categories": 5,
        "is_in_use": False,
        "is_complete": False,
    }
    assert "; a backup; store" in run("backup", path, tmp_path / "backup.db").stdout


@pytest.mark.parametrize("name", ["missing.db", "directory", "empty.db", "foreign.db"])
def test_check_and_backup_reject_missing_empty_or_foreign_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "empty.db").touch()
    (tmp_path / "foreign.db").write_bytes(b"text " * 4096)
    before = names(tmp_path)
    for command in (("check", tmp_path / name), ("backup", tmp_path / name, tmp_path / "backup.db")):
        result = run(*command)
        assert result.exit_code == 1
        assert result.output.startswith("rt: ")
    assert names(tmp_path) == before


def test_check_and_backup_report_unfinished_store_creation(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    for command in (("check", path), ("backup", path, tmp_path / "backup.db")):
        result = run(*command)
        assert result.exit_code == 1
        assert "has not finished creating it" in result.output
    (tmp_path / "state.db-journal").write_bytes(bytes(512))
    assert "has not finished creating it" in run("check", path).output
    fill(path)
    assert run("check", path).exit_code == 0


def test_check_and_backup_report_unfinished_first_open_of_restored_backup(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    fill(path)
    numbers = held(path)
    restored = tmp_path / "restored.db"
    back_up_store(path, restored)
    # left by a kill before the write-ahead log existed
    (tmp_path / "restored.db-journal").write_bytes(bytes(512))
    for command in (("check", restored), ("backup", restored, tmp_path / "backup.db")):
        result = run(*command)
        assert result.exit_code == 1
        assert "has not finished opening the store for the first time" in result.output
        assert "Nothing is lost" in result.output
        assert "empty" not in result.output
    assert held(restored) == numbers
    assert run("check", restored).exit_code == 0


def test_check_works_without_write_permission(tmp_path: Path) -> None:
    fill(tmp_path / "state.db")
    tmp_path.chmod(0o500)
    try:
        assert run("check", tmp_path / "state.db").exit_code == 0
    finally:
        tmp_path.chmod(0o700)
