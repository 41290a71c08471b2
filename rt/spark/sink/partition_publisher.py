"""Publishes the rows of a partition exactly once, from any executor.

Invariants:
- Partition p of the writer `name` publishes under the dedup id `<id>~<name>.<p>`. The nodes merge each of its
  numbers once, in order, from any session.
- All attempts publish the same rows under the same numbers (`rt.spark.sink.ledger`). So attempts may run in
  parallel, fail halfway, or leave data on a disk that is pushed much later: each number is still merged once,
  with its row.
- A task is done when the nodes have merged its last number. Then they must expect exactly the next number.
  Before, they must not expect a higher number. Otherwise the ledger does not belong to the stream, which is
  an error and never repaired.

A session belongs to one disk and one partition, and is reopened for the next batch, so sessions stay few. A
file that is created once identifies the disk, so that two executors never share a session. If the nodes
accept nothing from a directory any more, because it is a copy of another, the directory is deleted and the
task is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rt.client.publisher import Publisher
from rt.errors import CertificateError, DirectoryLocked, Fenced, RtError, Timeout, WriteConflict
from rt.log.disk import storage_errors
from rt.names import name_from_host
from rt.spark.options import ClusterSource
from rt.spark.sink.create_once import make_once
from rt.spark.sink.ledger import PartitionSpan
from rt.spark.sink.options import WriteOptions
from rt.spark.sink.spool import SpooledRow

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.spark")

HOST_LENGTH_MAX: Final = 32
_DISK_FILE: Final = "disk"
_SLOTS: Final = 8
"""How many attempts of a partition may run on a host at once. Earlier ones may still be ending."""
_POLL_SECONDS: Final = 0.05
_PROBE_SHARE: Final = 0.2
"""The share of the time to connect that is used to find out why no node answers."""
_LAG_SECONDS: Final = 30.0
"""How long the queried nodes may lag behind the numbers that are known to be merged."""
_LOST_LEDGER: Final = (
    "The ledger was lost or restored, or another writer uses this dedup id. Use another name."
)


class PartitionPublisher:
    """Publishes partition `partition` of the writer that `options` name.

    `rt.CertificateError` unless the certificate is a publisher's with the configured dedup id.
    """

    def __init__(self, options: WriteOptions, tls: TLS, partition: int) -> None:
        ids = sorted(tls.identity.dedup_ids)
        dedup_id = options.dedup_id or (ids[0] if len(ids) == 1 else None)
        if tls.identity.role != "publisher" or dedup_id not in ids:
            expected = options.dedup_id or "(any; with several: dedupId)"
            raise CertificateError(
                "the certificate cannot be used to write from Spark",
                where=options.nodes.cert,
                got=", ".join(tls.identity.uris),
                expected=f"a publisher's with the dedup id {expected}",
                hint="`rt certs issue DIR --stream S --role publisher --name N --dedup-id ID` makes one.",
            )
        self._options, self._tls = options, tls
        self._partition = f"{options.name}.{partition}"
        self._dedup_id = f"{dedup_id}~{self._partition}"
        self._deadline = 0.0

    def check_reachable(self) -> None:
        """`rt.RtError` that names each node, if none answers within `connectTimeoutMs`."""
        nodes = self._options.nodes
        asyncio.run(_check_reachable(nodes, self._tls, self._dedup_id))

    def check_untouched(self, first: int) -> None:
        """Check a partition that was never started: `rt.WriteConflict` if the nodes have merged `first` or a
        higher number.
        """
        self._start_clock()
        next_number = self._wait_for_next_number(first)
        if next_number > first:
            raise self._conflict(
                "rows would be dropped as duplicates: the nodes are ahead of the ledger", next_number, first
            )

    def deliver(self, order: PartitionSpan, rows: Iterable[SpooledRow]) -> None:
        """Publish the rows of the partition in `order`. Returns when all are merged.

        Raises `rt.WriteConflict`, the errors of `Publisher`, and `rt.Timeout`. After `rt.Timeout` the task
        may be retried.
        """
        self._start_clock()
        next_number = self._wait_for_next_number(order.first)
        if order.first <= next_number < order.end:
            # The numbers below `next_number` were merged by an earlier attempt, with the same rows.
            self._publish(itertools.islice(rows, next_number - order.first, None), next_number, order.end)
            next_number = self._wait_for_next_number(order.end)
        if next_number != order.end:
            raise self._conflict("the nodes have merged more than the ledger records", next_number, order.end)

    def _start_clock(self) -> None:
        self._deadline = time.monotonic() + self._options.delivery_seconds

    def _publish(self, rows: Iterable[SpooledRow], first: int, end: int) -> None:
        publisher = self._open()
        try:
            last = _publish(publisher, rows, first)
            assert last == end - 1, (last, end)
            publisher.wait(last, "merged", max(0.0, self._deadline - time.monotonic()))
        except Fenced:
            logger.warning("session_abandoned path=%s", publisher.directory)
            with contextlib.suppress(Fenced):
                publisher.close(timeout=0)
            shutil.rmtree(publisher.directory, ignore_errors=True)
            raise
        finally:
            publisher.close(timeout=0)

    def _open(self) -> Publisher:
        """Open a session of this executor that no other attempt has open."""
        directory, options = spool_directory(self._options), self._options
        disk = disk_name(directory)
        for slot in range(_SLOTS):
            try:
                return Publisher(
                    directory,
                    options.nodes.stream,
                    publisher_id=f"{self._tls.identity.name}~{self._partition}.{disk}.{slot}",
                    dedup_id=self._dedup_id,
                    endpoints=options.nodes.endpoints,
                    tls=self._tls,
                    fsync="never",
                    linger_ms=5.0,
                )
            except DirectoryLocked:
                if slot == _SLOTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _wait_for_next_number(self, least: int) -> int:
        """Wait until the next number that the nodes expect is `least` or more, and return it.

        Nodes may lag, so all are asked in turn. `rt.Timeout`, `rt.WriteConflict`.
        """
        from rt.net.rest_client import ask_next_number

        endpoints, deadline = self._options.nodes.endpoints, self._deadline
        is_reported = False
        lag_deadline = min(deadline, time.monotonic() + _LAG_SECONDS)
        for at in itertools.cycle(range(len(endpoints))):
            try:
                turn = endpoints[at:] + endpoints[:at]
                next_number = asyncio.run(ask_next_number(turn, self._tls, self._dedup_id))
            except RtError as error:
                if time.monotonic() > deadline:
                    where = self._options.nodes
                    raise Timeout("no node reported what is merged", where=where, got=str(error)) from error
                lag_deadline = max(lag_deadline, min(deadline, time.monotonic() + _LAG_SECONDS))
                level = logging.DEBUG if is_reported else logging.WARNING
                logger.log(level, "nodes_unreachable error=%r", str(error))
                is_reported = True
                time.sleep(_POLL_SECONDS * 10)
                continue
            is_reported = False
            if next_number >= least:
                return next_number
            if time.monotonic() > lag_deadline:
                hint = "The ledger belongs to another cluster. Use another name."
                what = "the nodes have merged less than the ledger records"
                raise self._conflict(what, next_number, f"{least} at least", hint)
            time.sleep(_POLL_SECONDS)
        raise AssertionError("unreachable")

    def _conflict(self, what: str, got: int, expected: object, hint: str = _LOST_LEDGER) -> WriteConflict:
        return WriteConflict(
            f"{what} for the dedup id {self._dedup_id}",
            where=self._options.ledger,
            got=f"next number {got}",
            expected=str(expected),
            hint=hint,
        )


async def _check_reachable(nodes: ClusterSource, tls: TLS, dedup_id: str) -> None:
    from rt.net.connect_probe import explain_silence
    from rt.net.rest_client import ask_next_number

    failures: dict[str, RtError] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout((1 - _PROBE_SHARE) * nodes.connect_seconds):
            while True:
                for endpoint in nodes.endpoints:
                    try:
                        await ask_next_number([endpoint], tls, dedup_id)
                    except CertificateError:
                        raise
                    except RtError as error:
                        failures[endpoint] = error
                    else:
                        return
                await asyncio.sleep(_POLL_SECONDS * 10)
    raise await explain_silence(
        nodes.endpoints,
        nodes.stream,
        tls,
        failures,
        within_seconds=nodes.connect_seconds,
        probe_seconds=_PROBE_SHARE * nodes.connect_seconds,
    )


def spool_directory(options: WriteOptions) -> str:
    """The spool directory, on the executor's own disk."""
    return os.path.abspath(options.path or os.path.join(tempfile.gettempdir(), "rt-spark"))


def disk_name(directory: str) -> str:
    """The disk's name: its host and a random part. It is created once per directory."""
    path = Path(directory, _DISK_FILE)
    with storage_errors(str(path), "naming a disk"):
        with contextlib.suppress(FileNotFoundError):
            return path.read_text("ascii")
        host = name_from_host(socket.gethostname())[:HOST_LENGTH_MAX]
        make_once(str(path), f"{host}-{secrets.token_hex(6)}".encode("ascii"))
        return path.read_text("ascii")


def _publish(publisher: Publisher, rows: Iterable[SpooledRow], first: int) -> int:
    """Publish all rows, numbered from `first`. Returns the last number."""
    rows = iter(rows)
    value, topic, timestamp_ns, headers = next(rows)
    number = publisher.publish(value, topic, timestamp_ns, first, headers)
    for value, topic, timestamp_ns, headers in rows:
        number = publisher.publish(value, topic, timestamp_ns, None, headers)
    publisher.flush()
    return number
