"""The store of a queue's subscriptions in the cluster: the table of the queue's lease.

    row of the store (category, key)  ->  row of the table: category, a zero byte, key

The next owner of the lease finds the rows, on any host. Invariants:
- A commit takes effect completely or not at all, in a majority of the nodes.
- A host that has lost the lease changes nothing, even if its commit arrives late: `rt.Fenced`.

The methods wait for the cluster, so they run in other threads than the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

from rt.errors import Closed, Fenced, InvalidOption, Overloaded, StorageError, StorageFailed, Timeout
from rt.net.lease_client import LeaseCalls, LeaseRow, OwnerRequest, TablePart, request_id
from rt.objects import CheckpointKind, CommitUnknown, OutOfTurn
from rt.objects.claims import Claims, TreeClaim
from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.cluster_leases import ClusterLeases
from rt.streams.balancer.lease import QUEUES
from rt.streams.balancer.queue_leases import QueueLeases
from rt.streams.balancer.table_changes import (
    ANSWERS,
    KEY_BYTES_MAX,
    PART_BYTES,
    REQUESTS,
    Changes,
    row_bytes,
)
from rt.streams.core.stream_id import QueueId
from rt.streams.requests.owner_calls import ask_owner

T = TypeVar("T")

COMMIT_S: Final = 30.0
"""How long a commit tries to send one part. After that time the lease has expired, unless its duration is
longer.
"""
READ_S: Final = 10.0
GRACE_S: Final = 10.0
"""If the event loop has not answered this long after the time limit of a call, it does not run any more."""


class _Uncertain(NamedTuple):
    """A commit that may have happened."""

    changes: Changes
    last: TablePart
    """The last part decides. When it is sent again, the nodes report that the commit was made, or make the
    commit.
    """


def cluster_stores(leases: QueueLeases) -> ClusterStores:
    """Keep the subscriptions of each queue in the queue's cluster: for `StreamProvider(stores=…)`.

    The balancer must use the same `leases`. Call it in their event loop.
    """
    return ClusterStores(leases, asyncio.get_running_loop())


class ClusterStores:
    """The stores of several queues. Any host can ask the owner of a queue through them."""

    def __init__(self, leases: QueueLeases, loop: asyncio.AbstractEventLoop) -> None:
        self._leases, self._loop = leases, loop

    def __call__(self, queue: QueueId, fence: Fence) -> TableStore:
        of_queue = self._of(queue)
        return TableStore(of_queue.calls, of_queue.row(f"{QUEUES}{queue.name}", fence), self._loop)

    async def ask_owner(self, queue: QueueId, content: bytes, timeout_s: float) -> bytes:
        """The answer of the queue's owner. See `rt.streams.requests.owner_calls`."""
        of_queue = self._of(queue)
        return await ask_owner(
            of_queue.calls, of_queue.row(f"{QUEUES}{queue.name}", 0).name, content, timeout_s
        )

    def _of(self, queue: QueueId) -> ClusterLeases:
        of_queue = self._leases.of(queue)
        if not isinstance(of_queue, ClusterLeases):
            raise InvalidOption("not the leases of a cluster", where=str(queue), got=type(of_queue).__name__)
        return of_queue


class TableStore:
    """A `Store` in the table of `lease`. The constructor reads the table: call it in a thread, and give it
    the event loop of `calls`.

    Raises `rt.Fenced` if the lease was lost, and the errors of `LeaseCalls.read_table`.
    """

    def __init__(self, calls: LeaseCalls, lease: LeaseRow, loop: asyncio.AbstractEventLoop) -> None:
        self._calls, self._lease, self._loop = calls, lease, loop
        self.store_id: Final = blake2b(lease.name.encode(), digest_size=16).hexdigest()
        self._rows: dict[str, dict[str, bytes]] = {}
        """The rows of the table, by category, as far as this store knows them."""
        self._writer: TableWriter | None = None
        self.claims: Final = Claims(lease.name)
        self._uncertain: _Uncertain | None = None
        self._is_closed = False
        self._is_interrupted = False
        self._call: Future[Any] | None = None
        """The call to the cluster that is under way."""
        self._require_thread()
        self._commits = self._load()

    def reader(self) -> TableReader:
        """A reader that sees every later commit."""
        self.require_open()
        return TableReader(self)

    def begin(self, kind: CheckpointKind) -> TableWriter:
        self.require_open()
        if self._writer is not None and self._writer.is_open:
            raise OutOfTurn("another writer is open", hint="Commit it or roll it back first.")
        self._writer = TableWriter(self, kind)
        return self._writer

    def claim(self, root: str) -> TreeClaim:
        self.require_open()
        return self.claims.claim(root)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.rollback()
        self._is_closed = True

    def interrupt(self) -> None:
        """See `Interruptible`. Until the lease has another owner, the cluster may still make the commit."""
        self._is_interrupted = True
        if (call := self._call) is not None:
            call.cancel()

    def rows(self, category: str) -> dict[str, bytes]:
        self.require_open()
        return self._rows.get(category, {})

    def categories(self) -> list[str]:
        self.require_open()
        return sorted(self._rows)

    def require_open(self) -> None:
        if self._is_closed:
            raise Closed("the store is closed", hint="Make another store.")

    async def requests(self) -> Sequence[OwnerRequest]:
        """The waiting requests to the owner. Raises errors of the nodes."""
        self.require_open()
        asking = self._calls.waiting_requests(self._lease, self._commits, timeout_s=READ_S)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))

    def commit(self, changes: Changes) -> None:
        """Send the changes in parts. `CommitUnknown` if the last part may have been committed."""
        self._require_thread()
        self._resolve()
        changes.limit_clears(self._rows)
        number, request, parts = self._commits + 1, request_id(), list(changes.parts())
        for at, (clears, deletes, puts) in enumerate(parts):
            is_last = at == len(parts) - 1
            part = TablePart(number, request, at, is_last, clears, deletes, puts)
            try:
                answer, commits = self._send(part)
            except Exception as error:
                if not is_last:
                    raise
                self._uncertain = _Uncertain(changes, part)
                raise CommitUnknown(
                    "the cluster did not answer a commit",
                    where=self._lease.name,
                    got=str(error),
                    hint="The next commit makes it first, unless it happened.",
                ) from error
            self._check(answer, commits, number)
        self._apply(changes)
        self._commits = number

    def _check(self, answer: str, commits: int, number: int) -> None:
        match answer:
            case "written":
                return
            case "not-owner":
                raise Fenced("another host may have the queue", where=self._lease.name, got=self._lease.token)
            case "no-room":
                hint = "End subscriptions that are not needed, or delete tables of retired groups."
                raise Overloaded("the cluster has no room for the table", where=self._lease.name, hint=hint)
        raise StorageFailed(
            "the table is not as this owner left it",
            where=self._lease.name,
            got=f"{answer}, {commits} commits",
            expected=f"{number - 1} commits",
            hint="Open the store again. An operator may have forced the cluster to an earlier state.",
        )

    def _resolve(self) -> None:
        """Find out for certain whether the last commit happened.

        The last part of that commit is sent again. The number of commits is not enough: the answering node
        may know an earlier number, or may count a late commit of another store with the same lease.
        """
        if self._uncertain is None:
            return
        changes, last = self._uncertain
        answer, commits = self._send(last)
        if answer == "written":
            self._apply(changes)
            self._commits = last.commit
        elif answer == "not-owner" or commits != self._commits:
            self._check(answer, commits, last.commit)
        self._uncertain = None

    def _load(self) -> int:
        """Read all pages. Start again from the first page if a late commit arrived in between."""
        page = first = 0
        while True:
            commits, found, next_page = self._wait(
                self._calls.read_table(self._lease, page, timeout_s=READ_S), READ_S
            )
            if page and commits != first:
                page = 0
                continue
            if not page:
                first, self._rows = commits, {}
            for key, value in found:
                self._put(key, value)
            page = next_page
            if not page:
                return commits

    def _send(self, part: TablePart) -> tuple[str, int]:
        return self._wait(self._calls.write_table(self._lease, part, timeout_s=COMMIT_S), COMMIT_S)

    def _apply(self, changes: Changes) -> None:
        for prefix in changes.clears:
            for category in [each for each in self._rows if f"{each}\0".startswith(prefix)]:
                del self._rows[category]
        for row in changes.deletes:
            category, _, key = row.partition("\0")
            rows = self._rows.get(category, {})
            rows.pop(key, None)
            if not rows:
                self._rows.pop(category, None)
        for row, value in changes.puts.items():
            self._put(row, value)

    def _put(self, row: str, value: bytes) -> None:
        category, _, key = row.partition("\0")
        if category in (REQUESTS, ANSWERS):
            return  # Others add and remove these rows too.
        self._rows.setdefault(category, {})[key] = value

    def _require_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # This thread has no event loop.
            if asyncio.get_running_loop() is self._loop:
                raise OutOfTurn("the store waits for this event loop", hint="Call it in another thread.")

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return the result of `work`, which ends after `timeout_s`. Never waits for an event loop that has
        ended.
        """
        try:
            waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise Closed("the event loop of the leases is closed", where=self._lease.name) from error
        self._call = waiting
        if self._is_interrupted:
            waiting.cancel()
        done, _ = wait([waiting], timeout_s + GRACE_S)
        if not done:
            waiting.cancel()
            raise Timeout("the event loop of the leases does not run", where=self._lease.name)
        try:
            return waiting.result()
        except CancelledError as error:
            what = (
                "the store was interrupted" if self._is_interrupted else "the event loop of the leases ended"
            )
            raise Closed(what, where=self._lease.name) from error
        finally:
            self._call = None


class TableReader:
    def __init__(self, store: TableStore) -> None:
        self._store = store

    @property
    def store_id(self) -> str:
        return self._store.store_id

    @property
    def owners(self) -> Claims:
        return self._store.claims

    def categories(self, prefix: str = "") -> Iterator[str]:
        return (each for each in self._store.categories() if each.startswith(prefix))

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """The rows of the last commit at the time of the call."""
        return iter(list(self._store.rows(category).items()))

    def get(self, category: str, key: str) -> bytes | None:
        return self._store.rows(category).get(key)


class TableWriter:
    """A commit that is not made yet."""

    def __init__(self, store: TableStore, kind: CheckpointKind) -> None:
        self._store, self._kind = store, kind
        self._changes = Changes({}, {}, {})
        self.is_open = True

    @property
    def kind(self) -> CheckpointKind:
        return self._kind

    @property
    def store_id(self) -> str:
        return self._store.store_id

    def reader(self) -> TableReader:
        return self._store.reader()

    def put(self, category: str, key: str, data: bytes) -> None:
        self.put_many(category, [(key, data)])

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        self._require_current()
        try:
            for key, data in rows:
                row = _row(category, key)
                if len(row.encode()) > KEY_BYTES_MAX:
                    raise StorageError(
                        "a key is too long for a table of the cluster",
                        where=row.replace("\0", "/")[:200],
                        got=f"{len(row.encode())} bytes",
                        expected=f"at most {KEY_BYTES_MAX} with its category",
                    )
                if row_bytes(row, data) > PART_BYTES:
                    raise StorageError(
                        "a row is too large for a table of the cluster",
                        where=f"{category}/{key}"[:200],
                        got=f"{len(data)} bytes",
                        expected=f"at most {PART_BYTES} with its key",
                    )
                self._changes.put(row, data)
        except BaseException:
            self.rollback()
            raise

    def answer(self, request: bytes, until_ns: int, content: bytes) -> None:
        """Answer a request to the owner, and remove it."""
        self._require_current()
        self._changes.answer(request, until_ns, content)

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        self._require_current()
        try:
            for key in keys:
                self._changes.delete(_row(category, key))
        except BaseException:
            self.rollback()
            raise

    def clear(self, category: str) -> None:
        self._require_current()
        self._changes.clear(_row(category, ""))

    def clear_tree(self, root: str) -> None:
        self._require_current()
        for prefix in (_row(root, ""), f"{root}/"):
            self._changes.clear(prefix)

    def commit(self) -> None:
        self._require_current()
        self.is_open = False
        self._store.commit(self._changes)

    def rollback(self) -> None:
        self.is_open = False

    def _require_current(self) -> None:
        self._store.require_open()
        if not self.is_open:
            raise OutOfTurn("the writer was committed or rolled back", hint="Begin another one.")


def _row(category: str, key: str) -> str:
    if "\0" in category:
        raise StorageError("a category with a zero byte", got=repr(category)[:200])
    return f"{category}\0{key}"
