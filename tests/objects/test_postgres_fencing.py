"""Successive owners of one PostgresStore: only the owner with the latest fencing token reads and writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from postgres_server import PostgresServer

import rt
from rt.objects import CheckpointKind, PersistedObjectSpace, PostgresStore

DIFFERENTIAL = CheckpointKind.DIFFERENTIAL


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return PostgresServer.schema(tmp_path)


def put(store: PostgresStore, key: str, data: bytes) -> None:
    writer = store.begin(DIFFERENTIAL)
    writer.put("a", key, data)
    writer.commit()


def test_owner_with_older_token_raises_fenced(postgres: PostgresServer, schema: str) -> None:
    with PostgresStore(postgres.url, schema=schema, fence=7) as store:
        put(store, "1", b"one")
        with pytest.raises(rt.Fenced, match="got fencing token 6, expected 7"):
            PostgresStore(postgres.url, schema=schema, fence=6)
        put(store, "2", b"two")
        assert dict(store.reader().rows("a")) == {"1": b"one", "2": b"two"}


def test_superseded_owner_can_neither_write_nor_read(postgres: PostgresServer, schema: str) -> None:
    with (
        PostgresStore(postgres.url, schema=schema, fence=1) as old,
        PostgresStore(postgres.url, schema=schema, fence=1) as later,
    ):
        with pytest.raises(rt.Fenced):
            put(old, "0", b"of two owners with one token, the last one that opened the store owns it")
        put(later, "1", b"one")
        reader, writer = later.reader(), later.begin(DIFFERENTIAL)
        rows = reader.rows("a")
        writer.put("a", "1", b"old")
        with PostgresStore(postgres.url, schema=schema, fence=2) as new:
            put(new, "2", b"two")
            with pytest.raises(rt.Fenced, match="got fencing token 1, expected 2"):
                writer.commit()
            for use in (
                lambda: list(rows),
                lambda: reader.get("a", "1"),
                later.reader,
                lambda: later.begin(DIFFERENTIAL),
                lambda: later.claim("a"),
            ):
                with pytest.raises(rt.Fenced):
                    use()
            assert dict(new.reader().rows("a")) == {"1": b"one", "2": b"two"}
            assert new.last_commit == 2


def test_read_raises_fenced_after_newer_owner_opens(postgres: PostgresServer, schema: str) -> None:
    with PostgresStore(postgres.url, schema=schema) as old:
        put(old, "1", b"one")
        with PostgresStore(postgres.url, schema=schema) as new:
            assert (old.fence, new.fence) == (1, 2)
            for use in (
                lambda: old.reader().get("a", "1"),
                lambda: list(old.reader().categories()),
                lambda: list(old.reader().rows("nothing")),
            ):
                with pytest.raises(rt.Fenced):
                    use()


def test_empty_commit_of_superseded_owner_raises_fenced(postgres: PostgresServer, schema: str) -> None:
    with PostgresStore(postgres.url, schema=schema) as old:
        put(old, "1", b"one")
        with PostgresStore(postgres.url, schema=schema), pytest.raises(rt.Fenced):
            old.begin(DIFFERENTIAL).commit()


def test_new_owner_waits_for_open_transaction_of_previous_owner(
    postgres: PostgresServer, schema: str
) -> None:
    with PostgresStore(postgres.url, schema=schema, fence=1, idle_s=600) as old:
        old._database.begin()
        old._database.write("INSERT INTO rows VALUES ('a', '1', 0, 1, '', 0)", [])
        opened: list[PostgresStore] = []
        thread = threading.Thread(
            target=lambda: opened.append(PostgresStore(postgres.url, schema=schema, fence=2))
        )
        thread.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
        postgres.wait(waits, [f"rt store {schema}"])
        assert not opened
        old._database.commit()
        thread.join()
        assert opened[0].last_commit == 1
        assert list(opened[0].reader().categories()) == ["a"]
        opened[0].close()


def test_racing_owners_lose_no_reported_commit(postgres: PostgresServer, schema: str) -> None:
    """Each owner reads a counter and writes the next number. Only reported commits may increase the
    counter.
    """
    made: list[int] = []
    lock, start = threading.Lock(), threading.Barrier(4)

    def own() -> None:
        start.wait()
        for _ in range(15):
            try:
                with PostgresStore(postgres.url, schema=schema) as store:
                    for _ in range(3):
                        number = int(store.reader().get("a", "counter") or b"0") + 1
                        put(store, "counter", b"%d" % number)
                        with lock:
                            made.append(number)
            except rt.Fenced:
                pass

    threads = [threading.Thread(target=own) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    with PostgresStore(postgres.url, schema=schema) as store:
        assert sorted(made) == list(range(1, len(made) + 1))
        assert store.reader().get("a", "counter") == b"%d" % len(made)
        assert store.last_commit == len(made)


PAUSED = """
import sys
import rt
from rt.objects import CheckpointKind, PostgresStore
store = PostgresStore(sys.argv[1], schema=sys.argv[2], fence=1, idle_s=float(sys.argv[3]))
writer = store.begin(CheckpointKind.DIFFERENTIAL)
writer.put("a", "1", b"of the paused one")
if sys.argv[4] == "inside":
    writer._pack()
    writer._send()
print("ready", flush=True)
sys.stdin.readline()
for use in (writer.commit, lambda: store.begin(CheckpointKind.DIFFERENTIAL).commit(), store.reader):
    try:
        use()
        print("done", flush=True)
    except rt.RtError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "inside"])
def test_next_owner_commits_while_previous_owner_is_paused_and_fences_it(
    postgres: PostgresServer, schema: str, where: str
) -> None:
    paused = subprocess.Popen(
        [sys.executable, "-c", PAUSED, postgres.url, schema, "5", where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert paused.stdin is not None
    assert paused.stdout is not None
    try:
        assert paused.stdout.readline() == "ready\n"
        os.kill(paused.pid, signal.SIGSTOP)
        with PostgresStore(postgres.url, schema=schema, fence=2, timeout_s=240) as store:
            put(store, "1", b"of the next one")
            os.kill(paused.pid, signal.SIGCONT)
            said, _ = paused.communicate("\n")
            first, *later = said.split()
            assert first in ({"Fenced"} if where == "before" else {"StoreUnavailable", "CommitUnknown"})
            assert later == ["Fenced", "Fenced"]
            assert dict(store.reader().rows("a")) == {"1": b"of the next one"}
    finally:
        paused.kill()
        paused.communicate()


def test_superseded_owner_can_neither_save_nor_load_space(postgres: PostgresServer, schema: str) -> None:
    def loaded(store: PostgresStore) -> PersistedObjectSpace:
        space = PersistedObjectSpace()
        space.load(store.reader())
        return space

    with (
        PostgresStore(postgres.url, schema=schema, fence=1) as old_store,
        PostgresStore(postgres.url, schema=schema, fence=2) as new_store,
    ):
        new = loaded(new_store)
        new.create_value("of", "new")
        new.checkpoint(new_store)
        old = PersistedObjectSpace()
        old.create_value("of", "old")
        with pytest.raises(rt.Fenced):
            old.checkpoint(old_store, CheckpointKind.FULL)
        with pytest.raises(rt.Fenced):
            loaded(old_store)
        assert loaded(new_store).get_value("of").value == "new"
