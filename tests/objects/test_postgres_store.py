"""The object store on PostgreSQL: names and values of any size, corruption, versions, access, limits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from postgres_server import PASSWORD, PostgresServer, dump

import rt
from rt.cli.main import cli
from rt.objects import (
    CheckpointKind,
    MemoryStore,
    PersistedObjectSpace,
    PostgresStore,
    StateDamaged,
    Store,
    StoreUnavailable,
    check_postgres,
)
from rt.objects.postgres import schema as schema_module
from rt.objects.postgres.address import parse_url
from rt.objects.postgres.connections import ServerConnection
from rt.objects.postgres.row_pages import PAGE_BYTES

FULL, DIFFERENTIAL = CheckpointKind.FULL, CheckpointKind.DIFFERENTIAL
MIB = 2**20


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return PostgresServer.schema(tmp_path)


@pytest.fixture
def store(postgres: PostgresServer, schema: str) -> Iterator[PostgresStore]:
    with PostgresStore(postgres.url, schema=schema) as made:
        yield made


def put(store: Store, category: str, rows: dict[str, bytes]) -> None:
    writer = store.begin(DIFFERENTIAL)
    writer.put_many(category, rows.items())
    writer.commit()


def content(store: Store) -> dict[str, dict[str, bytes]]:
    reader = store.reader()
    return {category: dict(reader.rows(category)) for category in reader.categories()}


def test_committed_rows_survive_reopening_and_uncommitted_rows_do_not(
    postgres: PostgresServer, schema: str
) -> None:
    with PostgresStore(postgres.url, schema=schema) as store:
        put(store, "a", {"1": b"one"})
        store_id = store.store_id
        store.begin(DIFFERENTIAL).put("a", "2", b"never committed")
    with PostgresStore(postgres.url, schema=schema, check=True) as store:
        assert content(store) == {"a": {"1": b"one"}}
        assert (store.store_id, store.last_commit) == (store_id, 1)


def test_importing_rt_objects_does_not_load_psycopg() -> None:
    program = "import sys, rt, rt.objects, rt.cli.commands.store; assert 'psycopg' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


# Sizes


@pytest.mark.slow
def test_large_values_are_stored_in_pages_and_empty_values_are_kept(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    large = os.urandom(64 * MIB + 5)
    put(store, "a", {"large": large, "empty": b"", "page": bytes(PAGE_BYTES), "two": bytes(PAGE_BYTES + 1)})
    reader = store.reader()
    assert reader.get("a", "large") == large
    rows = dict(reader.rows("a"))
    assert rows == {"large": large, "empty": b"", "page": bytes(PAGE_BYTES), "two": bytes(PAGE_BYTES + 1)}
    assert postgres.run(f"SELECT max(octet_length(value)) FROM {schema}.rows") == [(PAGE_BYTES,)]
    assert check_postgres(postgres.url, schema=schema).rows == 4


def test_shorter_value_leaves_no_pages_of_longer_value(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    for size in (5 * PAGE_BYTES, 2 * PAGE_BYTES, 1, 3 * PAGE_BYTES, 0):
        value = os.urandom(size)
        put(store, "a", {"1": value, "2": b"beside"})
        assert content(store) == {"a": {"1": value, "2": b"beside"}}
        pages = max(1, size // PAGE_BYTES)
        assert postgres.run(f"SELECT count(*) FROM {schema}.rows") == [(pages + 1,)]
    put(store, "a", {"1": bytes(4 * PAGE_BYTES)})
    writer = store.begin(DIFFERENTIAL)
    writer.delete_many("a", ["1"])
    writer.commit()
    assert postgres.run(f"SELECT count(*) FROM {schema}.rows") == [(1,)]


def test_long_names_with_common_prefix_stay_distinct(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    start = "é" * 700
    names = [
        start,
        f"{start}/",
        f"{start}/x",
        f"{start}0",
        f"{start}/x{'y' * 5000}",
        "short",
        "é" * 499 + "aa",
    ]
    for name in names:
        put(store, name, {each: each.encode() for each in names})
    assert content(store) == {name: {each: each.encode() for each in names} for name in names}
    assert list(store.reader().categories(f"{start}/")) == sorted([names[1], names[2], names[4]])
    assert store.reader().get(names[4], names[0]) == names[0].encode()
    assert store.reader().get(names[4], f"{names[4]}z") is None
    assert check_postgres(postgres.url, schema=schema).categories == len(names)
    writer = store.begin(DIFFERENTIAL)
    writer.delete_many("short", [names[0], names[4]])
    writer.clear(names[3])
    writer.clear_tree(start)
    writer.commit()
    assert list(store.reader().categories()) == sorted(["short", names[6]])
    assert set(content(store)["short"]) == set(names) - {names[0], names[4]}


NAMES = st.sampled_from(["", "a", "a/", "a/b", "a0", "b", "\0", "a/" + "l" * 1100, "a/" + "l" * 1200])
CHANGES = st.one_of(
    st.tuples(st.just("put"), NAMES, NAMES, st.sampled_from([b"", b"x", b"y" * 3000, bytes(PAGE_BYTES + 1)])),
    st.tuples(st.just("delete_many"), NAMES, st.lists(NAMES, max_size=3)),
    st.tuples(st.just("clear"), NAMES),
    st.tuples(st.just("clear_tree"), NAMES),
)


@given(commits=st.lists(st.lists(CHANGES, max_size=6), max_size=4))
def test_random_changes_have_same_effect_as_on_memory_store(
    commits: list[list[Any]], shared_store: PostgresStore
) -> None:
    model = MemoryStore()
    writer = shared_store.begin(FULL)
    for category in shared_store.reader().categories():
        writer.clear(category)
    writer.commit()
    for changes in commits:
        for each in (shared_store, model):
            writer = each.begin(DIFFERENTIAL)
            for method, *arguments in changes:
                getattr(writer, method)(*arguments)
            writer.commit()
        assert content(shared_store) == model.content()


@pytest.fixture(scope="module")
def shared_store(
    postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PostgresStore]:
    with postgres.store(tmp_path_factory.mktemp("shared")) as made:
        yield made


def test_large_uncommitted_write_is_invisible_and_can_be_rolled_back(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    put(store, "a", {"old": b"old"})
    writer = store.begin(FULL)
    writer.clear_tree("a")
    for number in range(40):
        writer.put("a", str(number), bytes(MIB))
    writer.put_many("a", ((f"many {number}", b"") for number in range(10_000)))
    assert set(content(store)["a"]) == {"old"}
    writer.rollback()
    assert set(content(store)["a"]) == {"old"}
    assert store.last_commit == 1


@pytest.mark.slow
def test_differential_save_of_100_000_rows_writes_only_changed_rows(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    space = PersistedObjectSpace()
    space.load(store.reader())
    items = space.create_dictionary("items", keys=str, values=int)
    items.update({str(number): number for number in range(100_000)})
    space.checkpoint(store)
    for number in range(0, 100_000, 1000):
        items[str(number)] = -number
        del items[str(number + 1)]
    space.checkpoint(store)
    latest = f"SELECT count(*) FROM {schema}.rows WHERE xmin = (SELECT xmin FROM {schema}.information)"
    assert 100 <= postgres.run(latest)[0][0] < 200
    again = PersistedObjectSpace()
    again.load(store.reader())
    assert again.get_dictionary("items", keys=str, values=int) == items


# Corruption


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE {0}.rows SET value = set_byte(value, 0, 1) WHERE page = 2",
        "UPDATE {0}.rows SET checksum = checksum # 1 WHERE page = 0",
        "UPDATE {0}.rows SET pages = pages + 1",
        "UPDATE {0}.rows SET page = page + 7 WHERE page = 1",
        "DELETE FROM {0}.rows WHERE page = 0",
        "DELETE FROM {0}.rows WHERE page = 1",
        "DELETE FROM {0}.rows WHERE page = 3",
        "UPDATE {0}.rows SET key = 'other'",
        "UPDATE {0}.rows SET key = '\\xff'",
        "UPDATE {0}.rows SET long_key = 'other'",
    ],
)
def test_corrupt_row_is_never_returned(
    store: PostgresStore, postgres: PostgresServer, schema: str, damage: str
) -> None:
    put(store, "a", {"large": bytes(4 * PAGE_BYTES)})
    postgres.run(damage.format(schema))
    with pytest.raises(StateDamaged):
        list(store.reader().rows("a"))
    with contextlib.suppress(StateDamaged):
        assert store.reader().get("a", "large") is None
    with pytest.raises(StateDamaged):
        check_postgres(postgres.url, schema=schema)
    with pytest.raises(StateDamaged):
        PostgresStore(postgres.url, schema=schema, check=True)


def test_row_moved_to_another_category_fails_its_checksum(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    put(store, "a", {"1": b"one"})
    postgres.run(f"UPDATE {schema}.rows SET category = 'b'")
    with pytest.raises(StateDamaged, match="checksum"):
        store.reader().get("b", "1")


def test_commit_fails_after_server_lost_commits(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    put(store, "a", {"1": b"one"})
    put(store, "a", {"1": b"two"})
    postgres.run(f"UPDATE {schema}.information SET number = 1")
    with pytest.raises(StateDamaged, match=r"lost commits.*got commit 1 .*expected commit 2 "):
        put(store, "a", {"1": b"three"})
    with pytest.raises(rt.StorageFailed, match="failed earlier"):
        store.begin(DIFFERENTIAL)
    assert postgres.run(f"SELECT value FROM {schema}.rows") == [(b"two",)]


def test_missing_table_raises_error_with_sqlstate_42p01(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    postgres.run(f"DROP TABLE {schema}.rows")
    with pytest.raises(StateDamaged, match="42P01"):
        store.reader().get("a", "1")


@pytest.mark.parametrize("use", [PostgresStore, check_postgres])
def test_pooled_connection_with_settings_of_another_store_is_rejected(
    store: PostgresStore, postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch, use: Any
) -> None:
    """PgBouncer shares connections like this between transactions, unless it is in session mode."""
    put(store, "a", {"1": b"one"})
    other = f"{schema}b"
    PostgresStore(postgres.url, schema=other).close()
    run = ServerConnection.run

    def pooled(self: ServerConnection, statement: Any, values: Any = None) -> Any:
        if statement.startswith("BEGIN "):
            run(self, "SELECT set_config('search_path', %s, false)", [schema])
        return run(self, statement, values)

    with monkeypatch.context() as patch:
        patch.setattr(ServerConnection, "run", pooled)
        with pytest.raises(rt.StorageError, match=rf"other settings.*got {schema}, .*session mode"):
            use(postgres.url, schema=other)
    put(store, "a", {"2": b"two"})
    assert content(store) == {"a": {"1": b"one", "2": b"two"}}


# Versions


def test_newer_schema_version_is_rejected_and_reported(postgres: PostgresServer, schema: str) -> None:
    PostgresStore(postgres.url, schema=schema).close()
    postgres.run(f"UPDATE {schema}.version SET version = 7")
    for use in (PostgresStore, check_postgres):
        with pytest.raises(rt.UnknownVersion, match="got 7, expected at most 1"):
            use(postgres.url, schema=schema)


def test_older_schema_version_is_migrated_with_its_rows(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresStore(postgres.url, schema=schema) as store:
        put(store, "a", {"1": b"one"})
    added = ("ALTER TABLE rows ADD COLUMN added int NOT NULL DEFAULT 5",)
    with monkeypatch.context() as patch:
        patch.setattr(schema_module, "MIGRATIONS", (*schema_module.MIGRATIONS, added))
        for _ in range(2):
            with PostgresStore(postgres.url, schema=schema) as store:
                assert store.reader().get("a", "1") == b"one"
        assert postgres.run(f"SELECT version FROM {schema}.version") == [(2,)]
        assert postgres.run(f"SELECT added FROM {schema}.rows") == [(5,)]
    with pytest.raises(rt.UnknownVersion, match="got 2"):
        PostgresStore(postgres.url, schema=schema)


def test_failed_migration_changes_nothing(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = ("ALTER TABLE rows ADD COLUMN added int", "SELECT 1 / 0")
    monkeypatch.setattr(schema_module, "MIGRATIONS", (*schema_module.MIGRATIONS, failing))
    with pytest.raises(rt.StorageFailed, match="22012"):
        PostgresStore(postgres.url, schema=schema)
    monkeypatch.undo()
    with PostgresStore(postgres.url, schema=schema) as store:
        assert content(store) == {}


@pytest.mark.parametrize("table", ["theirs (x int)", "version (x int)", "version (format text, version int)"])
def test_schema_with_foreign_tables_is_rejected_unchanged(
    postgres: PostgresServer, schema: str, table: str
) -> None:
    postgres.run(f"CREATE SCHEMA {schema}")
    postgres.run(f"CREATE TABLE {schema}.{table}")
    with pytest.raises(rt.FormatError, match="other tables"):
        PostgresStore(postgres.url, schema=schema)
    assert len(postgres.run("SELECT 1 FROM pg_tables WHERE schemaname = %s", [schema])) == 1


def test_concurrent_opens_of_new_store_create_one_store(postgres: PostgresServer, schema: str) -> None:
    opened: list[PostgresStore] = []

    def open_store() -> None:
        opened.append(PostgresStore(postgres.url, schema=schema))

    threads = [threading.Thread(target=open_store) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len({store.store_id for store in opened}) == 1
    assert sorted(store.fence for store in opened) == list(range(1, 7))
    for store in opened:
        store.close()


# Access


def everything_said(error: BaseException | None) -> str:
    said = ""
    while error is not None:
        said += f"{error} {error!r} {vars(error)!r} "
        error = error.__cause__ or error.__context__
    return said


def test_wrong_password_or_url_is_rejected_without_showing_password(
    postgres: PostgresServer, schema: str
) -> None:
    with pytest.raises(rt.StorageError, match="password authentication failed") as caught:
        PostgresStore(postgres.tcp_url(password="hush: a/secret"), schema=schema)
    assert "hush" not in everything_said(caught.value)
    for url in ("postgresql://rt:secret@[/x", "postgresql://rt:secret@host/x?nothing=1", "file:secret"):
        with pytest.raises(rt.InvalidOption) as refused:
            PostgresStore(url)
        assert "secret" not in everything_said(refused.value)


def test_password_is_not_in_repr_label_or_log(
    postgres: PostgresServer, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with PostgresStore(postgres.tcp_url(sslmode="require"), schema=schema) as store:
        put(store, "a", {"1": b"one"})
        assert PASSWORD not in f"{store!r} {store.label} {caplog.text}"
        assert store.label == f"postgresql://rt@127.0.0.1:{postgres.port}/postgres, schema {schema}"


def test_verify_full_checks_certificate_and_host_name(postgres: PostgresServer, schema: str) -> None:
    right, other = (str(postgres.directory / name) for name in ("ca.crt", "other.crt"))
    full = {"sslmode": "verify-full"}
    with PostgresStore(postgres.tcp_url(**full, sslrootcert=right), schema=schema) as store:
        put(store, "a", {"1": b"one"})
    with pytest.raises(rt.StorageError, match="certificate"):
        PostgresStore(postgres.tcp_url(**full, sslrootcert=other), schema=schema)
    elsewhere = postgres.tcp_url(host="elsewhere.example", hostaddr="127.0.0.1", **full, sslrootcert=right)
    with pytest.raises(rt.StorageError, match="does not match host name"):
        PostgresStore(elsewhere, schema=schema)


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        ("postgresql://db.example/x", "verify-full"),
        ("postgresql://a@10.0.0.1,10.0.0.2/x", "verify-full"),
        ("postgresql://localhost,db.example/x", "verify-full"),
        ("postgresql://db.example/x?sslmode=require", "require"),
        ("postgresql://localhost/x", None),
        ("postgresql://127.0.0.1:5432,[::1]/x", None),
        ("postgresql:///x?host=/run/postgresql", None),
        ("postgresql:///x", None),
        ("postgresql:///x?service=state", None),
    ],
)
def test_sslmode_defaults_to_verify_full_for_remote_hosts(
    url: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGSSLMODE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    assert parse_url(url, "rt", 10).parameters.get("sslmode") == mode


@pytest.mark.parametrize("schema_name", ["", "A", "a b", 'a"', "1a", "pg_a", "a" * 64, "é"])
def test_invalid_schema_name_is_rejected(schema_name: str) -> None:
    with pytest.raises(rt.InvalidOption, match="schema"):
        PostgresStore("postgresql:///x", schema=schema_name)


@pytest.mark.parametrize(
    "options",
    [
        {"fence": -1},
        {"fence": 2**63},
        {"fence": 1.5},
        {"timeout_s": 0},
        {"idle_s": 0},
        {"connections_max": 1},
    ],
)
def test_options_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(rt.InvalidOption, match=next(iter(options))):
        PostgresStore("postgresql:///x", **options)


def test_user_without_rights_is_rejected(postgres: PostgresServer, schema: str) -> None:
    PostgresStore(postgres.url, schema=schema).close()
    postgres.run(f"CREATE ROLE {schema} LOGIN")
    url = postgres.url.replace("//rt@", f"//{schema}@")
    with pytest.raises(rt.StorageError, match="no right to use the schema"):
        PostgresStore(url, schema=schema)
    for table in ("version", "information", "rows"):
        postgres.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.{table} TO {schema}")
    postgres.run(f"GRANT USAGE ON SCHEMA {schema} TO {schema}")
    postgres.run(f"REVOKE UPDATE ON {schema}.information FROM {schema}")
    with pytest.raises(rt.StorageError, match="42501"):
        PostgresStore(url, schema=schema)
    postgres.run(f"GRANT UPDATE ON {schema}.information TO {schema}")
    with PostgresStore(url, schema=schema) as store:
        put(store, "a", {"1": b"one"})


# Limits


@pytest.mark.slow
def test_statement_timeout_raises_store_unavailable_and_changes_nothing(
    postgres: PostgresServer, schema: str
) -> None:
    with (
        PostgresStore(postgres.url, schema=schema, timeout_s=6) as store,
        psycopg.connect(postgres.url) as other,
    ):
        put(store, "a", {"1": b"one"})
        other.execute(f"LOCK TABLE {schema}.rows IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreUnavailable, match=r"55P03|57014"):
            put(store, "a", {"1": b"two"})
        with pytest.raises(StoreUnavailable, match=r"55P03|57014"):
            store.reader().get("a", "1")
        other.rollback()
        assert content(store) == {"a": {"1": b"one"}}
        put(store, "a", {"1": b"three"})
        assert content(store) == {"a": {"1": b"three"}}


def test_concurrent_readers_use_at_most_connections_max(postgres: PostgresServer, schema: str) -> None:
    with PostgresStore(postgres.url, schema=schema, connections_max=3) as store:
        put(store, "a", {str(number): b"%d" % number for number in range(50)})
        found: list[bytes | None] = []

        def read() -> None:
            found.extend(store.reader().get("a", str(number)) for number in range(50))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(found, key=str) == sorted([b"%d" % number for number in range(50)] * 8, key=str)
        connected = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        assert 2 <= postgres.run(connected, [f"rt store {schema}"])[0][0] <= 3


def test_forked_child_cannot_use_store(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresStore(postgres.url, schema=schema) as store:
        writer = store.begin(DIFFERENTIAL)
        writer.put("a", "1", b"one")
        writer._pack()
        writer._send()
        parent = os.getpid()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: parent + 1)
            for use in (store.reader, writer.commit, lambda: store.begin(FULL)):
                with pytest.raises(rt.Closed):
                    use()
            store._database.roll_back()
        writer.commit()
        assert content(store) == {"a": {"1": b"one"}}


# Check and backup


def test_store_commands_check_postgres_store_and_refer_backup_to_pg_dump(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    put(store, "a", {"1": b"one", "2": b"two"})
    put(store, "b", {"1": b"one"})
    run = CliRunner().invoke
    done = run(cli, ["store", "check", postgres.url, "--schema", schema])
    assert done.exit_code == 0, done.output
    assert "intact: commit 2, 3 rows in 2 categories; in use by a program; store" in done.output
    assert "fencing token 1" in done.output
    as_json = run(cli, ["store", "check", postgres.url, "--schema", schema, "--json"])
    assert json.loads(as_json.output)["fence"] == 1
    postgres.run(f"UPDATE {schema}.rows SET value = 'x' WHERE key = '2'")
    done = run(cli, ["store", "check", postgres.url, "--schema", schema])
    assert done.exit_code == 1
    missing = run(cli, ["store", "check", postgres.url, "--schema", f"{schema}_no"])
    assert missing.exit_code != 0
    backup = run(cli, ["store", "backup", postgres.url, "x.db"])
    assert backup.exit_code != 0
    assert "pg_dump" in backup.output + str(backup.exception)


def test_dump_of_store_in_use_restores_its_rows(
    store: PostgresStore, postgres: PostgresServer, schema: str
) -> None:
    put(store, "a", {"1": b"one", "large": bytes(3 * PAGE_BYTES), "\0": b"\0"})
    before = content(store)
    copied = dump(postgres.url, schema)
    put(store, "a", {"1": b"later"})
    store.close()
    postgres.run(f"DROP SCHEMA {schema} CASCADE")
    postgres.restore(copied)
    assert check_postgres(postgres.url, schema=schema).commit == 1
    with PostgresStore(postgres.url, schema=schema) as again:
        assert content(again) == before
