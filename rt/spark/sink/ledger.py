"""The record of the rows that a writer has published, in a directory that its driver and all executors share.

    <ledger>/<name>/<batch>/<partition>     the order of a partition's rows, made by its first attempt
         0      8  magic
         8      8  the first row's number in the dedup id of the partition
        16      8  rows
        24      4  bytes of the query's id
        28      4  CRC-32C of bytes 0-27 and of what follows
        32         16 bytes a row: `rt.spark.sink.row_order`; then the query's id
    <ledger>/<name>/<batch>.done            the batch is merged: a record (`rt.spark.sink.create_once`)

Invariants:
- A file is created once, and is whole and durable before its name exists. The first writer wins (a hard
  link); later ones read its file.
- A partition's order is in the ledger before any of its rows is published. So a later attempt, on another
  executor or after a restart of the driver, knows which rows may be under way.
- A batch is done when all its rows are merged. Only then does the next one start.
- The last completed batch and those started after it are kept.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from rt.errors import Corrupt, UnknownVersion, WriteConflict
from rt.log.disk import storage_errors
from rt.log.format.checksum import crc32c
from rt.log.format.constants import NEWER_HINT
from rt.spark.sink.create_once import decode_record, encode_record, make_once
from rt.spark.sink.row_order import DIGEST_BYTES, Digests

_MAGIC: Final = b"RTORDER1"
_HEADER: Final = struct.Struct("<8sQQI")
_DONE: Final = ".done"


class PartitionSpan(Struct, frozen=True):
    """The rows of a partition in a batch, in the order of its first attempt."""

    query: str
    first: int
    digests: Digests

    @property
    def count(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    @property
    def end(self) -> int:
        """One past the number of the last row."""
        return self.first + self.count


class CompletedBatch(Struct, frozen=True):
    """The last batch that is completely merged. `ends`: by partition, the number of its next row."""

    query: str = ""
    batch: int = -1
    ends: Mapping[int, int] = field(default_factory=dict)


class Ledger:
    """The ledger of the writer `name` in `directory`. Raises storage errors, `rt.Corrupt`,
    `rt.UnknownVersion`.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.path = os.path.join(directory, name)

    def done(self) -> CompletedBatch:
        """The last completed batch. Its number is -1 if there is none."""
        batches = [int(name.removesuffix(_DONE)) for name in self._names() if name.endswith(_DONE)]
        if not batches:
            return CompletedBatch()
        path = os.path.join(self.path, f"{max(batches)}{_DONE}")
        with storage_errors(path, "reading a finished batch"):
            try:
                content = Path(path).read_bytes()
            except FileNotFoundError:  # A later batch was completed meanwhile.
                return self.done()
        record = decode_record(content)
        if record is None:
            raise _damaged(path)
        try:
            ends = {int(partition): end for partition, end in record["ends"].items()}
            return CompletedBatch(record["query"], record["batch"], ends)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = "the record of a finished batch is not understood"
            raise UnknownVersion(what, where=path, got=record, hint=NEWER_HINT) from error

    def started(self) -> list[int]:
        """The batches that are not done and have a started partition, in order."""
        done = self.done().batch
        batches = [int(name) for name in self._names() if name.isdecimal()]
        return sorted(batch for batch in batches if batch > done and self.partitions(batch))

    def partitions(self, batch: int) -> set[int]:
        """The started partitions of a batch."""
        return {int(name) for name in self._names(str(batch)) if name.isdecimal()}

    def order(self, batch: int, partition: int) -> PartitionSpan | None:
        """The recorded order of a partition; None if it was not started."""
        path = os.path.join(self.path, str(batch), str(partition))
        with storage_errors(path, "reading an order of rows"):
            try:
                return _decode(Path(path).read_bytes(), path)
            except FileNotFoundError:
                return None

    def claim(self, batch: int, partition: int, order: PartitionSpan) -> PartitionSpan:
        """Record the order of a partition durably. Returns the order to use: the order that was recorded
        earlier, if any.
        """
        query = order.query.encode()
        content = bytes(order.digests) + query
        head = _HEADER.pack(_MAGIC, order.first, order.count, len(query))
        checksum = crc32c(content, crc32c(head)).to_bytes(4, "little")
        if self._make(os.path.join(str(batch), str(partition)), head + checksum + content):
            return order
        claimed = self.order(batch, partition)
        if claimed is None:
            raise WriteConflict(
                f"batch {batch} and a later one are done already",
                where=self.path,
                hint="No action is needed: this attempt was too late.",
            )
        return claimed

    def choose_version(self, version: int | None) -> int:
        """The number of a batch write: `version`, or the next number if it is None. `rt.WriteConflict` if the
        write may not run now.
        """
        done, started = self.done(), self.started()
        if version is None and started:
            raise WriteConflict(
                f"write {started[0]} was started and is not finished",
                where=self.path,
                hint=f"Repeat it with version={started[0]}. The rows of the partitions "
                f"{listed(self.partitions(started[0]))} must be the same. Or use another name.",
            )
        if version is None:
            return done.batch + 1
        self._check_turn(done, version)
        return version

    def next_number(self, query: str, batch: int, partition: int) -> int:
        """The number of the first row of a partition that was not started in this batch.
        `rt.WriteConflict`.
        """
        done = self.done()
        if done.query not in {"", query}:
            raise self.other_query(done.query, query)
        self._check_turn(done, batch)
        if batch == done.batch:
            raise WriteConflict(
                f"batch {batch} is done already, without partition {partition}",
                where=self.path,
                hint="Write it with the same number of partitions, or use another name.",
            )
        return done.ends.get(partition, 0)

    def _check_turn(self, done: CompletedBatch, batch: int) -> None:
        if batch < done.batch:
            raise WriteConflict(
                f"batch {batch} comes after batch {done.batch}, which is done",
                where=self.path,
                hint="Was the checkpoint restored? Use another name, or a higher version.",
            )
        started = self.started()
        if started and started != [batch]:
            raise WriteConflict(
                f"batch {started[0]} was started and is not finished",
                where=self.path,
                got=f"batch {batch}",
                hint="Repeat it with the same rows, or use another name.",
            )

    def other_query(self, known: str, query: str) -> WriteConflict:
        """The error for two queries, or a query and batch writes, under one name."""
        return WriteConflict(
            "another query writes, or has written, under that name",
            where=self.path,
            got=query,
            expected=known,
            hint="Give each its own name. A query with a new checkpoint is another one: it publishes from "
            "its beginning.",
        )

    def finish(self, done: CompletedBatch) -> None:
        """Record that a batch is completely merged, and delete the earlier ones. May be repeated."""
        ends = {str(partition): end for partition, end in sorted(done.ends.items())}
        content = encode_record({"query": done.query, "batch": done.batch, "ends": ends})
        if not self._make(f"{done.batch}{_DONE}", content) and self.done() != done:
            raise WriteConflict(
                f"batch {done.batch} is done already, with other content",
                where=self.path,
                hint="Two queries write under one name: give each its own.",
            )
        self._forget_before(done.batch)

    def _forget_before(self, batch: int) -> None:
        with storage_errors(self.path, "removing finished batches"):
            for name in self._names():
                path = os.path.join(self.path, name)
                if name.isdecimal() and int(name) < batch:
                    shutil.rmtree(path, ignore_errors=True)
                elif name.endswith(_DONE) and int(name.removesuffix(_DONE)) < batch:
                    Path(path).unlink(missing_ok=True)

    def _names(self, below: str = "") -> list[str]:
        path = os.path.join(self.path, below)
        with storage_errors(path, "listing a ledger"):
            try:
                return os.listdir(path)
            except FileNotFoundError:
                return []

    def _make(self, name: str, content: bytes) -> bool:
        path = os.path.join(self.path, name)
        with storage_errors(path, "recording a write"):
            return make_once(path, content)


def listed(partitions: set[int]) -> str:
    """At most ten of the partitions, as text for an error."""
    first = ", ".join(map(str, sorted(partitions)[:10]))
    return first if len(partitions) <= 10 else f"{first} and {len(partitions) - 10} others"


def _decode(data: bytes, path: str) -> PartitionSpan:
    start = _HEADER.size + 4
    if len(data) < start:
        raise _damaged(path)
    magic, first, count, query_bytes = _HEADER.unpack_from(data)
    checksum = int.from_bytes(data[start - 4 : start], "little")
    content, digest_bytes = data[start:], count * DIGEST_BYTES
    is_whole = magic == _MAGIC and len(content) == digest_bytes + query_bytes
    if not is_whole or checksum != crc32c(content, crc32c(data[: start - 4])):
        raise _damaged(path)
    return PartitionSpan(content[digest_bytes:].decode(), first, content[:digest_bytes])


def _damaged(path: str) -> Corrupt:
    return Corrupt(
        "a file of the ledger fails its checksum",
        path=path,
        offset=0,
        hint="Restore it, or use another name.",
    )
