"""PostgresStore under faults of the server, the connection and the program around a commit."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cut_connections import Cut, CuttingProxy
from postgres_server import USER, PostgresServer, missing

import rt
from rt.objects import (
    CheckpointKind,
    CommitUnknown,
    PersistedObjectSpace,
    PostgresStore,
    StoreUnavailable,
)

DIFFERENTIAL = CheckpointKind.DIFFERENTIAL
SEED = random.randrange(2**32)
"""Drawn for each run. The assertions print it, so that a failure can be repeated."""
WAIT_S = 240


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return PostgresServer.schema(tmp_path)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of its own, to be killed."""
    if (why := missing()) is not None:
        pytest.skip(why)
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[CuttingProxy]:
    made = CuttingProxy(postgres.port)
    yield made
    made.close()


def through(proxy: CuttingProxy, postgres: PostgresServer) -> str:
    return postgres.tcp_url(sslmode="disable").replace(f":{postgres.port}/", f":{proxy.port}/")


def put(store: PostgresStore, key: str, data: bytes) -> None:
    writer = store.begin(DIFFERENTIAL)
    writer.put("a", key, data)
    writer.commit()


def rows(store: PostgresStore) -> dict[str, bytes]:
    return dict(store.reader().rows("a"))


# The connection


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("next_use", ["read", "commit"])
def test_next_use_resolves_outcome_of_commit_with_lost_connection(
    postgres: PostgresServer, proxy: CuttingProxy, schema: str, when: Cut, next_use: str
) -> None:
    with PostgresStore(through(proxy, postgres), schema=schema) as store:
        put(store, "1", b"one")
        proxy.cut(b"; COMMIT", when)
        with pytest.raises(CommitUnknown):
            put(store, "2", b"two")
        happened = when == "after"
        if next_use == "commit":
            put(store, "3", b"three")
            assert store.last_commit == 2 + happened
        left = {"1": b"one"} | ({"2": b"two"} if happened else {})
        left |= {"3": b"three"} if next_use == "commit" else {}
        assert rows(store) == left
        assert store.last_commit == len(left)


@pytest.mark.parametrize("when", ["before", "after"])
def test_next_checkpoint_saves_all_changes_after_commit_unknown(
    postgres: PostgresServer, proxy: CuttingProxy, schema: str, when: Cut
) -> None:
    with PostgresStore(through(proxy, postgres), schema=schema) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        items = space.create_list("items")
        items.append(1)
        space.checkpoint(store)
        items.append(2)
        proxy.cut(b"; COMMIT", when)
        with pytest.raises(CommitUnknown):
            space.checkpoint(store)
        items.pop()
        items.append(3)
        space.checkpoint(store)
    with PostgresStore(postgres.url, schema=schema) as store:
        again = PersistedObjectSpace()
        again.load(store.reader())
        assert again.get_list("items") == [1, 3]


@pytest.mark.parametrize("text", [b"BEGIN ISOLATION", b"INSERT INTO rows"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_connection_lost_before_commit_leaves_no_partial_changes(
    postgres: PostgresServer, proxy: CuttingProxy, schema: str, text: bytes, when: Cut
) -> None:
    with PostgresStore(through(proxy, postgres), schema=schema) as store:
        put(store, "1", b"one")
        proxy.cut(text, when)
        if text.startswith(b"BEGIN"):  # nothing was sent before, so the store retries the transaction
            put(store, "1", b"two")
            assert rows(store) == {"1": b"two"}
        else:
            with pytest.raises(StoreUnavailable):
                put(store, "1", b"two")
            assert rows(store) == {"1": b"one"}
            put(store, "1", b"three")
            assert rows(store) == {"1": b"three"}


def test_connections_terminated_by_server_are_replaced(postgres: PostgresServer, schema: str) -> None:
    with PostgresStore(postgres.url, schema=schema) as store:
        put(store, "1", b"one")
        assert rows(store) == {"1": b"one"}
        postgres.terminate(schema)
        assert rows(store) == {"1": b"one"}
        postgres.terminate(schema)
        put(store, "2", b"two")
        assert rows(store) == {"1": b"one", "2": b"two"}


def test_connection_terminated_in_transaction_changes_no_rows(postgres: PostgresServer, schema: str) -> None:
    with PostgresStore(postgres.url, schema=schema) as store:
        put(store, "1", b"one")
        writer = store.begin(DIFFERENTIAL)
        writer.put("a", "1", b"two")
        writer._pack()
        writer._send()
        postgres.terminate(schema)
        with pytest.raises((StoreUnavailable, CommitUnknown)):
            writer.commit()
        assert rows(store) == {"1": b"one"}


@pytest.mark.slow
def test_commit_raises_commit_unknown_if_server_does_not_answer(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rt.objects.postgres.connections._ANSWER_MARGIN_S", 0.5)
    with PostgresStore(postgres.url, schema=schema, timeout_s=10) as store:
        put(store, "1", b"one")
        assert rows(store) == {"1": b"one"}
        postgres.run(SLOW_COMMIT.format(schema=schema, seconds=600))
        with pytest.raises(CommitUnknown):
            put(store, "1", b"two")
        with pytest.raises(StoreUnavailable, match="55P03"):  # the old commit may still be applied
            store.reader().get("a", "1")
        postgres.terminate(schema)
        postgres.run(f"DROP TRIGGER slow ON {schema}.information")
        assert rows(store) == {"1": b"one"}
        put(store, "1", b"three")
        assert rows(store) == {"1": b"three"}


SLOW_COMMIT = """
CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON {schema}.information
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.slow()
"""
"""Makes COMMIT itself slow."""


# The server


def test_commit_raises_commit_unknown_if_server_is_killed(server: PostgresServer, schema: str) -> None:
    with PostgresStore(server.url, schema=schema) as store:
        put(store, "1", b"one")
        server.run(SLOW_COMMIT.format(schema=schema, seconds=600))
        failed: list[BaseException] = []

        def commit() -> None:
            try:
                put(store, "1", b"two")
            except BaseException as error:  # noqa: BLE001
                failed.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        server.wait("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
        server.kill()
        thread.join()
        assert [type(error) for error in failed] == [CommitUnknown]
        with pytest.raises(StoreUnavailable):
            store.reader().get("a", "1")
        server.start()
        assert rows(store) == {"1": b"one"}
        server.run(f"DROP TRIGGER slow ON {schema}.information")
        put(store, "1", b"three")
        assert rows(store) == {"1": b"three"}
        assert store.last_commit == 2


def test_store_raises_unavailable_while_server_is_down_and_recovers(
    server: PostgresServer, schema: str
) -> None:
    with PostgresStore(server.url, schema=schema) as store:
        put(store, "1", b"one")
        server.stop()
        for use in (lambda: put(store, "1", b"two"), lambda: rows(store)):
            with pytest.raises(StoreUnavailable):
                use()
        with pytest.raises(StoreUnavailable):
            PostgresStore(server.url, schema=schema)
        server.start()
        assert rows(store) == {"1": b"one"}
        put(store, "1", b"three")
        assert rows(store) == {"1": b"three"}


@pytest.mark.slow
def test_store_continues_on_promoted_standby(server: PostgresServer, schema: str) -> None:
    with contextlib.closing(PostgresServer(primary=server)) as standby:
        hosts = f"host={server.directory},{standby.directory}&port={server.port},{standby.port}"
        url = f"postgresql://{USER}@/postgres?{hosts}&target_session_attrs=read-write"
        with PostgresStore(url, schema=schema, fence=3) as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            value = space.get_or_create_value("number", 1)
            space.checkpoint(store)
            server.kill()
            value.value = 2
            with pytest.raises(StoreUnavailable, match="read-only"):
                space.checkpoint(store)
            standby.run("SELECT pg_promote()")
            space.checkpoint(store)
            assert store.last_commit == 2
        with PostgresStore(url, schema=schema, fence=4) as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            assert space.get_value("number").value == 2


def test_store_raises_unavailable_if_server_has_no_free_connections(
    server: PostgresServer, schema: str
) -> None:
    server.run("CREATE ROLE other LOGIN CONNECTION LIMIT 1")
    server.run(f"CREATE SCHEMA {schema} AUTHORIZATION other")
    url = server.url.replace("//rt@", "//other@")
    with PostgresStore(url, schema=schema) as store:
        put(store, "1", b"one")
        with pytest.raises(StoreUnavailable, match="too many connections"):
            rows(store)
        server.run("ALTER ROLE other CONNECTION LIMIT 5")
        assert rows(store) == {"1": b"one"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [("53100", rt.DiskFull), ("58030", rt.StorageFailed), ("40P01", StoreUnavailable)],
)
@pytest.mark.parametrize("timing", ["in the transaction", "in the commit"])
def test_server_error_changes_no_rows_and_next_commit_succeeds(
    postgres: PostgresServer, schema: str, code: str, kind: type[rt.RtError], timing: str
) -> None:
    with PostgresStore(postgres.url, schema=schema) as store:
        put(store, "1", b"one")
        is_late = timing == "in the commit"
        postgres.run(
            f"CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}', MESSAGE = 'as asked'; END $$"
        )
        deferred = "DEFERRABLE INITIALLY DEFERRED" if is_late else ""
        postgres.run(
            f"CREATE CONSTRAINT TRIGGER failing AFTER UPDATE ON {schema}.rows {deferred}"
            f" FOR EACH ROW EXECUTE FUNCTION {schema}.fail()"
        )
        for _ in range(2):
            with pytest.raises(kind, match=f"{code}: as asked"):
                put(store, "1", b"two")
        postgres.run(f"DROP TRIGGER failing ON {schema}.rows")
        assert rows(store) == {"1": b"one"}
        put(store, "1", b"three")
        assert (rows(store), store.last_commit) == ({"1": b"three"}, 2)


# The program


PROGRAM = """
import json, os, sys
from rt.objects import CheckpointKind, PersistedObjectSpace, PostgresStore

store = PostgresStore(sys.argv[1], schema=sys.argv[2])
space = PersistedObjectSpace()
space.load(store.reader())
step = space.get_or_create_value("step", 0)
items = space.get_or_create_list("items")
counts = space.get_or_create_dictionary("counts", keys=str, values=int)
while True:
    number = step.value = step.value + 1
    items.append(number)
    if number % 7 == 0:
        del items[number % 5 :]
    counts[str(number % 11)] = number
    space.checkpoint(store, CheckpointKind.FULL if number % 13 == 0 else CheckpointKind.DIFFERENTIAL)
    os.write(1, b"%d\\n" % number)
"""


def expected(steps: int) -> dict[str, Any]:
    items: list[int] = []
    counts: dict[str, int] = {}
    for number in range(1, steps + 1):
        items.append(number)
        if number % 7 == 0:
            del items[number % 5 :]
        counts[str(number % 11)] = number
    return {"items": items, "counts": counts}


def found(url: str, schema: str) -> tuple[int, dict[str, Any]]:
    """The stored step, and the collections stored with it."""
    with PostgresStore(url, schema=schema, check=True) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        if "step" not in space:
            return 0, expected(0)
        items, counts = space.get_list("items"), space.get_dictionary("counts", keys=str, values=int)
        return space.get_value("step").value, {"items": list(items), "counts": dict(counts)}


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["program", "server"])
def test_last_reported_checkpoint_survives_kill_of_program_or_server(
    server: PostgresServer, schema: str, killed: str
) -> None:
    draw = random.Random(SEED)
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, server.url, schema],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        said = b""
        try:
            for _ in range(draw.randrange(1, 25)):
                ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
                assert ready, f"nothing was committed in {WAIT_S} s"
                chunk = os.read(process.stdout.fileno(), 65536)
                assert chunk, process.stderr.read()
                said += chunk
            spin = draw.randrange(20_000)
            while spin:  # The kill can then hit any moment of the next checkpoint.
                spin -= 1
            if killed == "program":
                process.send_signal(signal.SIGKILL)
            else:
                server.kill()
            said += process.stdout.read()
            errors = process.stderr.read()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
        if killed == "server":
            assert b"StoreUnavailable" in errors or b"CommitUnknown" in errors, errors
            server.start()
        promised = int(said[: said.rindex(b"\n")].rsplit(b"\n", 1)[-1])
        step, held = found(server.url, schema)
        assert promised <= step <= promised + 1, SEED
        assert held == expected(step), SEED
