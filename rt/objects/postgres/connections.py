"""The connections of a store: one for commits, and some for readers, opened when they are needed.

Invariants:
- A call waits for the server for a limited time, also if the server hangs or is cut off.
- A connection on which a call failed is not used again, unless the server answered with an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, LiteralString

import psycopg
from msgspec import Struct
from psycopg.abc import RV, PQGen
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, TransactionStatus

from rt.errors import Closed
from rt.objects.core.errors import StoreUnavailable
from rt.objects.postgres.address import ServerAddress
from rt.objects.postgres.arrays import register
from rt.objects.postgres.server_errors import translate_connecting

_ANSWER_MARGIN_S: Final = 5.0
"""A client waits longer than the server's own limit: by at most this time, and by at most that limit."""

Row = tuple[Any, ...]


class Limits(Struct, frozen=True):
    """Limits of a store: seconds for a statement, for a silent client in a transaction; connections."""

    timeout_s: float
    idle_s: float
    connections_max: int


class ServerConnection(psycopg.Connection[Row]):
    """A connection whose calls end after `answer_s`, at the latest."""

    answer_s: float | None = None

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        return super().wait(gen, interval, self.answer_s if timeout is None else timeout)

    def run(self, statement: LiteralString, values: Sequence[Any] | None = None) -> tuple[str, list[Row]]:
        """The command tag and the rows of the last statement."""
        with self.cursor(binary=values is not None) as cursor:
            cursor.execute(statement, values)
            while cursor.nextset():
                pass
            return cursor.statusmessage or "", cursor.fetchall() if cursor.description else []

    @property
    def is_whole(self) -> bool:
        """Whether the server has answered all calls."""
        states = TransactionStatus.IDLE, TransactionStatus.INTRANS, TransactionStatus.INERROR
        is_up = not self.closed and self.pgconn.status == ConnStatus.OK
        return is_up and self.info.transaction_status in states


class Connections:
    """The connections of one store to one server. Thread-safe."""

    def __init__(self, address: ServerAddress, schema: str, limits: Limits) -> None:
        self._address: Final = address
        self._schema: Final = schema
        self._limits: Final = limits
        self._idle: list[ServerConnection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._free = threading.BoundedSemaphore(limits.connections_max - 1)
        """One connection is for commits."""

    def open(self, *, read_only: bool = False) -> ServerConnection:
        """A new connection. The caller closes it."""
        made = self._connect()
        try:
            register(made)
            timeout_s = self._limits.timeout_s
            made.answer_s = timeout_s + min(timeout_s, _ANSWER_MARGIN_S)
            made.run(_SETTINGS, self._settings(read_only=read_only))
        except psycopg.Error as error:
            made.close()
            raise translate_connecting(error, self._address) from error
        except BaseException:
            made.close()
            raise
        return made

    def _connect(self) -> ServerConnection:
        """Connect. The error is not chained, because psycopg's has all parameters in it, also the
        password.
        """
        try:
            return ServerConnection.connect(make_conninfo(**self._address.parameters), autocommit=True)
        except psycopg.Error as error:
            failure = translate_connecting(error, self._address)
        raise failure

    def _settings(self, *, read_only: bool) -> list[str]:
        timeout_ms = int(self._limits.timeout_s * 1000)
        idle_ms = int(self._limits.idle_s * 1000)
        return [
            f'"{self._schema}"',
            str(timeout_ms),
            str(max(1, timeout_ms // 2)),
            str(idle_ms),
            "on" if read_only else "off",
        ]

    @contextlib.contextmanager
    def reader(self, *, fresh: bool = False) -> Iterator[tuple[ServerConnection, bool]]:
        """A connection that only reads, and whether it is new. `fresh`: it must be new, as others are
        broken.
        """
        timeout_s = self._limits.timeout_s + _ANSWER_MARGIN_S
        if not self._free.acquire(timeout=timeout_s):
            raise StoreUnavailable(
                "no connection is free for a reader",
                where=self._address.label,
                got=f"{self._limits.connections_max - 1} readers for {timeout_s:.0f} s",
                hint="Raise connections_max.",
            )
        try:
            connection = self._take(fresh=fresh)
            found = connection or self.open(read_only=True)
            try:
                yield found, connection is None
            finally:
                self._give_back(found)
        finally:
            self._free.release()

    def _take(self, *, fresh: bool) -> ServerConnection | None:
        with self._lock:
            if self._is_closed:
                raise Closed("the store is closed", where=self._address.label)
            dropped = self._idle[:] if fresh else []
            if fresh:
                self._idle.clear()
            found = self._idle.pop() if self._idle else None
        for each in dropped:
            each.close()
        return found

    def _give_back(self, connection: ServerConnection) -> None:
        with self._lock:
            is_kept = (
                not self._is_closed
                and connection.is_whole
                and connection.info.transaction_status == TransactionStatus.IDLE
            )
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            dropped, self._idle = self._idle, []
        for each in dropped:
            each.close()


_SETTINGS: Final = """
SELECT set_config('search_path', %s, false), set_config('statement_timeout', %s, false),
  set_config('lock_timeout', %s, false), set_config('idle_in_transaction_session_timeout', %s, false),
  set_config('default_transaction_read_only', %s, false), set_config('client_min_messages', 'error', false),
  set_config('enable_seqscan', 'off', false), set_config('enable_hashjoin', 'off', false),
  set_config('enable_mergejoin', 'off', false), set_config('jit', 'off', false),
  set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), false)
"""
"""Every statement has an index, so no plan may depend on the statistics of tables that change quickly. If the
server does not sync commits, it still syncs the commits of this connection.
"""
