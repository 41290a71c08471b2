"""A SQLite store with successive owners, each with a higher fence: takeover, fencing and crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rt
from rt.objects import CheckpointKind, CommitUnknown, SqliteStore, fenced_files
from rt.objects.fenced_files import FencedFiles, open_fenced

DIFFERENTIAL = CheckpointKind.DIFFERENTIAL


def put(store: SqliteStore, key: str, value: bytes = b"x") -> None:
    writer = store.begin(DIFFERENTIAL)
    writer.put("rows", key, value)
    writer.commit()


def keys(store: SqliteStore) -> list[str]:
    return sorted(key for key, _ in store.reader().rows("rows"))


def test_next_owner_keeps_rows_and_store_id_and_fences_previous_owner(tmp_path: Path) -> None:
    first = open_fenced(tmp_path, "q", 7)
    put(first, "a")
    second = open_fenced(tmp_path, "q", 9)
    assert (keys(second), second.store_id) == (["a"], first.store_id)
    for _ in range(2):
        with pytest.raises(rt.Fenced, match="9"):
            put(first, "late")
    put(second, "b")
    first.close()
    assert keys(second) == ["a", "b"]
    second.close()
    again = open_fenced(tmp_path, "q", 9)
    assert keys(again) == ["a", "b"]
    again.close()
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {f"q~{9:020d}"}, "nothing is left over"
    with pytest.raises(rt.Fenced):
        open_fenced(tmp_path, "q", 8)
    with pytest.raises(rt.Fenced, match="balancer without leases"):
        open_fenced(tmp_path, "q", 0)


def test_failed_open_releases_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FencedFiles, "remove_earlier", lambda _: os.listdir(tmp_path / "missing"))
        with pytest.raises(FileNotFoundError):
            open_fenced(tmp_path, "q", 7)
    open_fenced(tmp_path, "q", 7).close()


def test_pending_commit_raises_fenced_after_next_owner_opens(tmp_path: Path) -> None:
    first = open_fenced(tmp_path, "q", 1)
    put(first, "a")
    writer = first.begin(DIFFERENTIAL)
    writer.put("rows", "late", b"x")
    second = open_fenced(tmp_path, "q", 2)
    with pytest.raises(rt.Fenced):
        writer.commit()
    assert keys(second) == ["a"]
    first.close()
    second.close()


def test_commit_during_takeover_raises_commit_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_fenced(tmp_path, "q", 1)
    put(first, "a")
    writer = first.begin(DIFFERENTIAL)
    writer.put("rows", "b", b"x")
    monkeypatch.setattr(first._database, "_bound_wal", lambda: second.append(open_fenced(tmp_path, "q", 2)))
    second: list[SqliteStore] = []
    with pytest.raises(CommitUnknown):
        writer.commit()
    assert keys(second[0]) == ["a", "b"]
    first.close()
    second[0].close()


def test_second_owner_with_same_fence_raises_directory_locked(tmp_path: Path) -> None:
    for fence in (0, 5):
        store = open_fenced(tmp_path, f"q{fence}", fence)
        with pytest.raises(rt.DirectoryLocked):
            open_fenced(tmp_path, f"q{fence}", fence)
        store.close()


def test_fenced_owner_takes_over_file_of_unfenced_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "q.db")
    put(store, "a")
    store.close()
    others = [open_fenced(tmp_path, name, fence) for name in ("q.db", "q.db-wal", "q.x") for fence in (0, 3)]
    for other in others[1::2]:
        put(other, "other")
    later = open_fenced(tmp_path, "q", 1)
    assert keys(later) == ["a"]
    assert [keys(other) for other in others[1::2]] == [["other"]] * 3, "names that look alike"
    for store in (later, *others):
        store.close()


def test_next_owner_recovers_rows_after_owners_died_during_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store := open_fenced(tmp_path, "q", 1), "a")
    store.close()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for fence, step in ((2, "take_over_store"), (3, "SqliteStore")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fenced_files, step, lambda *_, **__: killed())
            open_fenced(tmp_path, "q", fence)
    (tmp_path / f"q~{4:020d}.db").touch()
    (tmp_path / f".q~{4:020d}.db.new").touch()
    store = open_fenced(tmp_path, "q", 5)
    assert keys(store) == ["a"], "an owner that died while it created its file is passed over"
    store.close()
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {f"q~{5:020d}"}


CHILD = """
import sys
from rt.objects import CheckpointKind
from rt.objects.fenced_files import FencedFiles, open_fenced

store = open_fenced(sys.argv[1], "q", 1)
writer = store.begin(CheckpointKind.DIFFERENTIAL)
writer.put("rows", "a", b"x")
writer.commit()
writer = store.begin(CheckpointKind.DIFFERENTIAL)
writer.put("rows", "late", b"x")
writer.clear("nothing")
print("in a transaction", flush=True)
sys.stdin.readline()
try:
    writer.commit()
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_next_owner_commits_while_previous_process_is_stopped_in_transaction(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == "in a transaction\n"
            os.kill(child.pid, signal.SIGSTOP)
            store = open_fenced(tmp_path, "q", 2)
            put(store, "b")
            assert keys(store) == ["a", "b"]
            os.kill(child.pid, signal.SIGCONT)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "Fenced\n"
            assert keys(store) == ["a", "b"]
            store.close()
        finally:
            child.kill()


def test_reported_commits_survive_concurrent_takeovers(tmp_path: Path) -> None:
    """New owners take over at any time while the previous owner commits."""
    reported: set[str] = set()
    store = open_fenced(tmp_path, "q", 1)
    for fence in range(2, 12):
        begun = threading.Event()

        def write(owner: SqliteStore, fence: int, begun: threading.Event) -> None:
            for number in range(1000):
                try:
                    put(owner, key := f"{fence}-{number}")
                except rt.RtError:
                    return
                reported.add(key)
                begun.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write, store, fence, begun)
            begun.wait(60)
            later = open_fenced(tmp_path, "q", fence)
            writing.result()
        store.close()
        store = later
        assert reported <= set(keys(store))
    store.close()
