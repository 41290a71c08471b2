"""PostgreSQL's errors as errors of rt, by the five characters of SQLSTATE. The first two are the class."""

from __future__ import annotations

import re
from typing import Final

import psycopg

from rt.errors import DiskFull, RtError, StorageError, StorageFailed
from rt.objects.core.errors import StateDamaged, StoreUnavailable
from rt.objects.postgres.address import ServerAddress

RESTORE: Final = "rt has changed nothing. Restore the schema from a backup (pg_dump)."
_MISSING: Final = (
    "rt has changed nothing. If a pooler such as PgBouncer is used, set it to session mode. Otherwise: "
    "restore the schema from a backup (pg_dump)."
)

_REFUSED: Final = re.compile(
    r"password|(?<!canceling )authentication|pg_hba|does not exist|certificate|root\.crt"
    r"|role .* not permitted|does not support SSL|SSL error: (?!unexpected eof)"
)
"""Matches the reason of a failed connection, which has no SQLSTATE, if another attempt would not help."""
_NAMES: Final = re.compile(r"""connection to server .*? failed: |"[^"]*"|host(?: name)?:? '[^']*'""")
"""Names in that text, such as the name of the host. They are not part of the reason."""

_UNAVAILABLE: Final = {
    "08P01": "Try again. A pooler such as PgBouncer must be in session mode.",
    "25006": "The server is a standby: add target_session_attrs=read-write and all hosts to the URL.",
    "25P03": "The program was paused, or the network was slow, inside a commit. Try again.",
    "53200": "The server has no memory left. Try again later.",
    "53300": "The server has no connection left: raise its max_connections, or lower connections_max.",
    "55P03": "Another owner is inside a commit, or a commit waits for a standby. Try again.",
    "57014": "The statement took longer than timeout_s: raise it, or find out why the server is slow.",
}
_TRY_AGAIN: Final = "Try again when the server answers. Committed data is safe."
_CONFLICT: Final = "Another transaction came in between. Try again."


def translate(error: psycopg.Error, address: ServerAddress, doing: str) -> RtError:
    """Translate the error of a statement. No commit happened."""
    where, got, code = address.label, text_of(error, address), error.sqlstate or ""
    if code == "53100":
        hint = "Free space on the server. Committed data is safe."
        return DiskFull(f"the server's disk is full while {doing}", where=where, got=got, hint=hint)
    if code in _UNAVAILABLE or code[:2] in {"08", "40", "53", "57"}:
        hint = _UNAVAILABLE.get(code) or (_CONFLICT if code[:2] == "40" else _TRY_AGAIN)
        what = f"the server did not complete the request while {doing}"
        return StoreUnavailable(what, where=where, got=got, hint=hint)
    if code in {"XX001", "XX002"}:
        return StateDamaged(f"damage found while {doing}", where=where, got=got, hint=RESTORE)
    if code in {"42P01", "42703"}:
        what = f"a table or a column is missing while {doing}"
        return StateDamaged(what, where=where, got=got, hint=_MISSING)
    if code.startswith("28") or code in {"3D000", "42501"}:
        hint = "Correct the user, the password or the user's rights on the schema."
        return StorageError(f"the server refuses access while {doing}", where=where, got=got, hint=hint)
    if not code and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return StoreUnavailable(f"no answer while {doing}", where=where, got=got, hint=_TRY_AGAIN)
    hint = "Repair the server, then open the store again. Committed data is safe."
    return StorageFailed(f"the server failed while {doing}", where=where, got=got, hint=hint)


def translate_connecting(error: psycopg.Error, address: ServerAddress) -> RtError:
    if error.sqlstate:
        return translate(error, address, "connecting")
    where, got = address.label, text_of(error, address)
    if _REFUSED.search(_NAMES.sub("", got)):
        hint = "Correct the URL: user, password, database, sslmode and sslrootcert. Nothing was changed."
        return StorageError("cannot connect to the server of the store", where=where, got=got, hint=hint)
    return StoreUnavailable(
        "cannot connect to the server of the store", where=where, got=got, hint=_TRY_AGAIN
    )


def text_of(error: psycopg.Error, address: ServerAddress) -> str:
    """One line, without secrets."""
    code = f"{error.sqlstate}: " if error.sqlstate else ""
    text = address.redact(" ".join(str(error).split()))
    return f"{code}{text or type(error).__name__}"[:500]
