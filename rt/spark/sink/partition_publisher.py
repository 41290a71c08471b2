"""Publishes the rows of a partition exactly once, from any executor.

Invariants:
- Partition p of the writer `name` publishes under the dedup id `<id>~<name>.<p>`. The nodes merge each of its
  numbers once, in order, from any session.
- All attempts publish the same rows under the same numbers (`rt.spark.sink.ledger`). So attempts may run in
  parallel, fail halfway, or leave data on a disk that is pushed much later: each number is still merged once,
  with its row.
- A task is done when the nodes have merged its last number. The nodes must then expect exactly the next
  number, and no higher number before. Otherwise the ledger does not belong to the stream, which is an error
  and never repaired.

A session belongs to one disk and one partition, and is reopened for the next batch, so sessions stay few. A
file created once identifies the disk, so that two executors never share a session. If the nodes accept
nothing from a directory any more, because it is a copy of another, it is deleted and the task is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from rt.client.publisher import Publisher
from rt.errors import CertificateError, DirectoryLocked, Fenced, RtError, Timeout, WriteConflict
from rt.log.disk import storage_errors
from rt.names import name_from_host
from rt.spark.sink.ledger import PartitionSpan
from rt.spark.sink.options import WriteOptions
from rt.spark.sink.spool import SpooledRow

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.spark")

HOST_LENGTH_MAX: Final = 32
_DISK_FILE: Final = "disk"
_SLOTS: Final = 8
"""How many attempts of a partition may run on a host at once; processes of earlier ones may still be
ending.
"""
_LOOK_SECONDS: Final = 0.05
_BEHIND_SECONDS: Final = 30.0
"""How long the queried nodes may lag behind what is known to be merged."""


@dataclass(frozen=True, slots=True)
class PartitionTarget:
    """Where a partition's rows go: the certificate's name, and the dedup id with its suffix."""

    owner: str
    dedup_id: str
    partition: str


def place_of(options: WriteOptions, tls: TLS, partition: int) -> PartitionTarget:
    """`rt.CertificateError` unless the certificate is a publisher's with the configured dedup id."""
    ids = sorted(tls.identity.dedup_ids)
    meant = options.dedup_id or (ids[0] if len(ids) == 1 else None)
    if tls.identity.role != "publisher" or meant not in ids:
        raise CertificateError(
            "the certificate cannot be used to write from Spark",
            where=options.nodes.cert,
            got=", ".join(tls.identity.uris),
            expected=f"a publisher's with the dedup id {options.dedup_id or '(any; with several: dedupId)'}",
            hint="`rt certs issue DIR --stream S --role publisher --name N --dedup-id ID` makes one.",
        )
    suffix = f"{options.name}.{partition}"
    return PartitionTarget(tls.identity.name, f"{meant}~{suffix}", suffix)


def spool_directory(options: WriteOptions) -> str:
    """On the executor's own disk."""
    return os.path.abspath(options.path or os.path.join(tempfile.gettempdir(), "rt-spark"))


def deliver(
    options: WriteOptions, tls: TLS, place: PartitionTarget, order: PartitionSpan, rows: Iterable[SpooledRow]
) -> None:
    """Publish the rows of a partition in `order`. Returns when all are merged.

    `rt.WriteConflict`; what `Publisher` raises; `rt.Timeout`: the task may be retried.
    """
    deadline = time.monotonic() + options.delivery_seconds
    next_number = _wait_for_next_number(options, tls, place, order.first, deadline)
    if order.first <= next_number < order.end:
        # An earlier attempt merged the numbers below, with the same rows.
        rows = islice(rows, next_number - order.first, None)
        publisher = _open(options, tls, place)
        try:
            last = _publish(publisher, rows, next_number)
            assert last == order.end - 1, (last, order.end)
            publisher.wait(last, "merged", max(0.0, deadline - time.monotonic()))
        except Fenced:
            logger.warning("session_abandoned path=%s", publisher.directory)
            publisher.close(linger=0)
            shutil.rmtree(publisher.directory, ignore_errors=True)
            raise
        finally:
            publisher.close(linger=0)
        next_number = _wait_for_next_number(options, tls, place, order.end, deadline)
    if next_number != order.end:
        raise WriteConflict(
            f"the nodes have merged more for the dedup id {place.dedup_id} than the ledger records",
            where=options.ledger,
            got=f"next number {next_number}",
            expected=f"{order.end}",
            hint="The ledger was lost or restored, or another writer uses this dedup id. Use another name.",
        )


def check_untouched(options: WriteOptions, tls: TLS, place: PartitionTarget, first: int) -> None:
    """Check before a partition is first started: `rt.WriteConflict` if the nodes have merged more already."""
    deadline = time.monotonic() + options.delivery_seconds
    next_number = _wait_for_next_number(options, tls, place, first, deadline)
    if next_number > first:
        raise WriteConflict(
            f"rows would be dropped as duplicates: the dedup id {place.dedup_id} is ahead of the ledger",
            where=options.ledger,
            got=f"next number {next_number}",
            expected=f"{first}",
            hint="The ledger was lost or restored, or another writer uses this dedup id. Use another name.",
        )


def _publish(publisher: Publisher, rows: Iterable[SpooledRow], first: int) -> int:
    """Publish all rows, numbered from `first`. Returns the last number."""
    rows = iter(rows)
    value, topic, timestamp_ns = next(rows)
    number = publisher.publish(value, topic, timestamp_ns, first)
    for value, topic, timestamp_ns in rows:
        number = publisher.publish(value, topic, timestamp_ns)
    publisher.flush()
    return number


def _open(options: WriteOptions, tls: TLS, place: PartitionTarget) -> Publisher:
    """A session of this executor that no other attempt has open."""
    directory = spool_directory(options)
    disk = disk_name(directory)
    for slot in range(_SLOTS):
        try:
            return Publisher(
                directory,
                options.nodes.stream,
                publisher_id=f"{place.owner}~{place.partition}.{disk}.{slot}",
                dedup_id=place.dedup_id,
                endpoints=options.nodes.endpoints,
                tls=tls,
                fsync="never",
                linger_ms=5.0,
            )
        except DirectoryLocked:
            if slot == _SLOTS - 1:
                raise
    raise AssertionError("unreachable")


def disk_name(directory: str) -> str:
    """The disk's name: its host and a random part. It is created once per directory."""
    path = os.path.join(directory, _DISK_FILE)
    with storage_errors(path, "naming a disk"):
        os.makedirs(directory, exist_ok=True)
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
                return file.read()
            host = name_from_host(socket.gethostname())[:HOST_LENGTH_MAX]
            aside = f"{path}.{secrets.token_hex(8)}"
            with open(aside, "x", encoding="ascii") as file:
                file.write(f"{host}-{secrets.token_hex(6)}")
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
            os.remove(aside)
    raise AssertionError("unreachable")


def _wait_for_next_number(
    options: WriteOptions, tls: TLS, place: PartitionTarget, least: int, deadline: float
) -> int:
    """The next number that the nodes expect, as soon as it is `least` or more.

    Nodes may lag, so all are asked in turn. `rt.Timeout`, `rt.WriteConflict`.
    """
    patience = min(deadline, time.monotonic() + _BEHIND_SECONDS)
    for endpoints in _turns(options.nodes.endpoints):
        try:
            next_number = _next_number(endpoints, tls, place.dedup_id)
        except RtError as error:
            if time.monotonic() > deadline:
                raise Timeout(
                    "no node reported what is merged", where=options.nodes, got=str(error)
                ) from error
            patience = max(patience, min(deadline, time.monotonic() + _BEHIND_SECONDS))
            logger.warning("nodes_unreachable error=%r", str(error))
            time.sleep(_LOOK_SECONDS * 10)
            continue
        if next_number >= least:
            return next_number
        if time.monotonic() > patience:
            raise WriteConflict(
                f"the nodes have merged less for the dedup id {place.dedup_id} than the ledger records",
                where=options.ledger,
                got=f"next number {next_number}",
                expected=f"{least} at least",
                hint="The ledger belongs to another cluster. Use another name.",
            )
        time.sleep(_LOOK_SECONDS)
    raise AssertionError("unreachable")


def _turns(endpoints: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Rotations of the endpoints, indefinitely, so that each is first in turn."""
    at = 0
    while True:
        yield endpoints[at:] + endpoints[:at]
        at = (at + 1) % len(endpoints)


def _next_number(endpoints: tuple[str, ...], tls: TLS, dedup_id: str) -> int:
    from rt.net.rest_client import ask, check

    answer = asyncio.run(ask(endpoints, tls, "GET", f"/dedup-rt-clients?name={quote(dedup_id)}"))
    found = json.loads(check(answer).body)
    return int(found[0]["wanted"]) if found else 0
