"""Translation of PostgreSQL errors, by SQLSTATE or the text of libpq, without a server."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from rt.errors import DiskFull, RtError, StorageError, StorageFailed
from rt.objects import StateDamaged, StoreUnavailable
from rt.objects.postgres.address import ServerAddress
from rt.objects.postgres.server_errors import translate, translate_connecting

ADDRESS = ServerAddress("postgresql://db/a, schema s", {"password": "secret"})
SERVER = 'connection failed: connection to server at "db" (10.0.0.1), port 5432 failed: '


def connecting(text: str) -> RtError:
    return translate_connecting(psycopg.OperationalError(text), ADDRESS)


@pytest.mark.parametrize(
    "text",
    [
        'FATAL:  password authentication failed for user "a"',
        "fe_sendauth: no password supplied",
        'FATAL:  no pg_hba.conf entry for host "10.0.0.2", user "a", database "b", no encryption',
        'FATAL:  database "b" does not exist',
        'FATAL:  role "a" does not exist',
        'FATAL:  role "a" is not permitted to log in',
        "server does not support SSL, but SSL was required",
        "SSL error: certificate verify failed",
        "SSL error: tlsv1 alert unknown ca",
        'server certificate for "other" does not match host name "db"',
        'root certificate file "/root/.postgresql/root.crt" does not exist',
    ],
)
def test_permanent_connection_failure_raises_storage_error_with_url_hint(text: str) -> None:
    found = connecting(SERVER + text)
    assert isinstance(found, StorageError)
    assert not isinstance(found, StoreUnavailable)
    assert "Correct the URL" in str(found)


@pytest.mark.parametrize(
    "text",
    [
        f"{SERVER}Connection refused\n\tIs the server running on that host and accepting TCP/IP connections?",
        f"{SERVER}timeout expired",
        f"{SERVER}SSL SYSCALL error: Connection reset by peer",
        f"{SERVER}SSL SYSCALL error: EOF detected",
        f"{SERVER}SSL error: unexpected eof while reading",
        f"{SERVER}FATAL:  the database system is starting up",
        f"{SERVER}FATAL:  canceling authentication due to timeout",
        f'{SERVER}FATAL:  too many connections for role "password_service"',
        "SSL connection has been closed unexpectedly",
        "connection timeout expired",
        SERVER.replace("db", "password-db") + "timeout expired",
        SERVER.replace("db", "authentication.example") + "Connection refused",
        'connection to server on socket "/run/certificate/.s.PGSQL.5432" failed: No such file or directory',
        'could not translate host name "password-db" to address: Temporary failure in name resolution',
        "failed to resolve host 'password-db': [Errno -3] Temporary failure in name resolution",
        f"{SERVER}timeout expired\n- host: 'password-db', port: '5432', hostaddr: '': timeout expired",
    ],
)
def test_temporary_connection_failure_maps_to_store_unavailable(text: str) -> None:
    assert isinstance(connecting(text), StoreUnavailable)


def test_connection_failure_with_sqlstate_is_classified_by_sqlstate() -> None:
    refused = translate_connecting(errors.InvalidPassword("no"), ADDRESS)
    assert refused.what == "the server refuses access while connecting"
    late = translate_connecting(errors.QueryCanceled("waiting for certificate"), ADDRESS)
    assert isinstance(late, StoreUnavailable)


@pytest.mark.parametrize(
    ("error", "kind", "what", "hint"),
    [
        (errors.ReadOnlySqlTransaction, StoreUnavailable, "did not complete", "standby"),
        (errors.OutOfMemory, StoreUnavailable, "did not complete", "no memory left"),
        (errors.TooManyConnections, StoreUnavailable, "did not complete", "max_connections"),
        (errors.LockNotAvailable, StoreUnavailable, "did not complete", "Another owner"),
        (errors.QueryCanceled, StoreUnavailable, "did not complete", "timeout_s"),
        (errors.ProtocolViolation, StoreUnavailable, "did not complete", "session mode"),
        (errors.AdminShutdown, StoreUnavailable, "did not complete", "when the server answers"),
        (errors.SerializationFailure, StoreUnavailable, "did not complete", "Another transaction came"),
        (errors.DeadlockDetected, StoreUnavailable, "did not complete", "Another transaction came"),
        (psycopg.OperationalError, StoreUnavailable, "no answer while", "when the server answers"),
        (psycopg.InterfaceError, StoreUnavailable, "no answer while", "when the server answers"),
        (errors.DiskFull, DiskFull, "disk is full", "Free space"),
        (errors.DataCorrupted, StateDamaged, "damage found", "rt has changed nothing. Restore the schema"),
        (errors.UndefinedTable, StateDamaged, "a table or a column is missing", "set it to session mode"),
        (errors.UndefinedColumn, StateDamaged, "a table or a column is missing", "set it to session mode"),
        (errors.InsufficientPrivilege, StorageError, "refuses access", "rights on the schema"),
        (errors.InternalError_, StorageFailed, "the server failed", "Repair the server"),
    ],
)
def test_statement_error_maps_to_error_kind_and_hint_without_server_text(
    error: type[psycopg.Error], kind: type[RtError], what: str, hint: str
) -> None:
    found = translate(error("secret reason"), ADDRESS, "committing")
    assert isinstance(found, kind)
    assert what in found.what
    assert hint in str(found.hint)
    assert "secret" not in str(found)
