"""Publishing the rows of a partition, each once, from whatever executor they come.

Laws. Partition p of the writer `name` publishes under the dedup id `<id>~<name>.<p>`, whose numbers the nodes
merge once each, in their order, whoever brings them. So attempts may run beside each other, die half done,
and leave on a disk what is pushed much later: as all of them have the same rows under the same numbers
(`rt.spark.ledger`), each number is merged once, with its row. A task is done when the nodes have merged its
last number; what they want next must be just that number then, and no more than that before: else the ledger
and the stream do not belong together, which is told and never mended.

A session is one disk's for one partition, and opened again for the next batch: sessions stay few. Which
disk it is says a file that is made on it once, so that two executors never take a session from each other. A
directory that the nodes take nothing of any more (it is a copy of another one) is removed, and the task run
again.
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

from rt.errors import CertificateError, DirectoryLocked, Fenced, RtError, Timeout, WriteConflict
from rt.log.disk import storage_errors
from rt.names import name_from_host
from rt.publisher import Publisher
from rt.spark.ledger import Order
from rt.spark.rows import Row
from rt.spark.sink_options import WriteOptions

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.spark")

HOST_LENGTH_MAX: Final = 32
_DISK_FILE: Final = "disk"
_SLOTS: Final = 8
"""Attempts of one partition on one host at once, of which the others' processes may still be ending."""
_LOOK_SECONDS: Final = 0.05
_BEHIND_SECONDS: Final = 30.0
"""How long the nodes asked may be behind what is known to be merged."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a partition's rows go: the certificate's name, and the dedup id with its suffix."""

    owner: str
    dedup_id: str
    partition: str


def place_of(options: WriteOptions, tls: TLS, partition: int) -> Place:
    """`rt.CertificateError` unless the certificate is a publisher's with the dedup id that is meant."""
    ids = sorted(tls.identity.dedup_ids)
    meant = options.dedup_id or (ids[0] if len(ids) == 1 else None)
    if tls.identity.role != "publisher" or meant not in ids:
        raise CertificateError(
            "the certificate cannot be used to write from Spark",
            where=options.nodes.cert,
            got=", ".join(tls.identity.uris),
            wanted=f"a publisher's with the dedup id {options.dedup_id or '(any; with several: dedupId)'}",
            hint="`rt certs issue DIR --stream S --role publisher --name N --dedup ID` makes one.",
        )
    suffix = f"{options.name}.{partition}"
    return Place(tls.identity.name, f"{meant}~{suffix}", suffix)


def spool_directory(options: WriteOptions) -> str:
    """On the executor's own disk."""
    return os.path.abspath(options.path or os.path.join(tempfile.gettempdir(), "rt-spark"))


def deliver(options: WriteOptions, tls: TLS, place: Place, order: Order, rows: Iterable[Row]) -> None:
    """Return when all rows, which are in `order`, are merged.

    `rt.WriteConflict`; what `Publisher` raises; `rt.Timeout`: the task may be run again.
    """
    deadline = time.monotonic() + options.delivery_seconds
    wanted = _wanted_from(options, tls, place, order.first, deadline)
    if order.first <= wanted < order.end:
        # What is below it was merged before, of the same rows.
        rows = islice(rows, wanted - order.first, None)
        publisher = _open(options, tls, place)
        try:
            last = _publish(publisher, rows, wanted)
            assert last == order.end - 1, (last, order.end)
            publisher.wait(last, "merged", max(0.0, deadline - time.monotonic()))
        except Fenced:
            logger.warning("session_given_up path=%s", publisher.directory)
            publisher.close(linger=0)
            shutil.rmtree(publisher.directory, ignore_errors=True)
            raise
        finally:
            publisher.close(linger=0)
        wanted = _wanted_from(options, tls, place, order.end, deadline)
    if wanted != order.end:
        raise WriteConflict(
            f"the nodes have merged more for the dedup id {place.dedup_id} than its writer has noted",
            where=options.ledger,
            got=f"number {wanted} wanted next",
            wanted=f"{order.end}",
            hint="The ledger was lost or set back, or others use that dedup id. Go on under another name.",
        )


def check_untouched(options: WriteOptions, tls: TLS, place: Place, first: int) -> None:
    """Before a partition is begun for the first time: `rt.WriteConflict` if the nodes have more already."""
    deadline = time.monotonic() + options.delivery_seconds
    wanted = _wanted_from(options, tls, place, first, deadline)
    if wanted > first:
        raise WriteConflict(
            f"rows would count as merged already: the dedup id {place.dedup_id} is further than the ledger",
            where=options.ledger,
            got=f"number {wanted} wanted next",
            wanted=f"{first}",
            hint="The ledger was lost or set back, or others use that dedup id. Go on under another name.",
        )


def _publish(publisher: Publisher, rows: Iterable[Row], first: int) -> int:
    """Publish all from the number `first` on; the last one's number."""
    rows = iter(rows)
    value, topic, timestamp_ns = next(rows)
    number = publisher.publish(value, topic, timestamp_ns, first)
    for value, topic, timestamp_ns in rows:
        number = publisher.publish(value, topic, timestamp_ns)
    publisher.flush()
    return number


def _open(options: WriteOptions, tls: TLS, place: Place) -> Publisher:
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
    """What the disk with that directory is called: after its host, and by chance. It is made there once."""
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


def _wanted_from(options: WriteOptions, tls: TLS, place: Place, least: int, deadline: float) -> int:
    """The number that the nodes want next, as soon as that is `least` or more.

    A node may be behind what was merged; the others are asked as well. `rt.Timeout`, `rt.WriteConflict`.
    """
    patience = min(deadline, time.monotonic() + _BEHIND_SECONDS)
    for endpoints in _turns(options.nodes.endpoints):
        try:
            wanted = _wanted(endpoints, tls, place.dedup_id)
        except RtError as error:
            if time.monotonic() > deadline:
                raise Timeout("no node says what is merged", where=options.nodes, got=str(error)) from error
            patience = max(patience, min(deadline, time.monotonic() + _BEHIND_SECONDS))
            logger.warning("nodes_do_not_answer error=%r", str(error))
            time.sleep(_LOOK_SECONDS * 10)
            continue
        if wanted >= least:
            return wanted
        if time.monotonic() > patience:
            raise WriteConflict(
                f"the nodes have merged less for the dedup id {place.dedup_id} than its writer has noted",
                where=options.ledger,
                got=f"number {wanted} wanted next",
                wanted=f"{least} at least",
                hint="The ledger is of another cluster. Go on under another name.",
            )
        time.sleep(_LOOK_SECONDS)
    raise AssertionError("unreachable")


def _turns(endpoints: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All of them, each first in its turn, for ever."""
    at = 0
    while True:
        yield endpoints[at:] + endpoints[:at]
        at = (at + 1) % len(endpoints)


def _wanted(endpoints: tuple[str, ...], tls: TLS, dedup_id: str) -> int:
    from rt.net.rest import ask, check

    answer = asyncio.run(ask(endpoints, tls, "GET", f"/dedup-rt-clients?name={quote(dedup_id)}"))
    found = json.loads(check(answer).body)
    return int(found[0]["wanted"]) if found else 0
