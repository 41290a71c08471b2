"""The snapshots of a node: written, received, read and sent.

Invariants:
- Once a snapshot was durable, every crash leaves a complete one, and `open` uses the newest.
- A corrupt snapshot stops the node. An older one is never used instead, because the log entries between the
  two were compacted.
- After a failed sync the store writes nothing more.

`write` and receiving may run on helper threads. `newest`, `read` and `open_newest` may be used on any other
thread at the same time, and never wait for a disk write.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Iterator

from rt.errors import Closed, FormatError, StorageFailed
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.constants import Buffer
from sequencer.raft.model.messages import SNAPSHOT_BYTES_MAX, LogIndex
from sequencer.raft.storage.sealed_head import damaged
from sequencer.raft.storage.snapshot_file import PendingSnapshot, SnapshotReader, read_exactly, synced
from sequencer.raft.storage.snapshot_format import (
    SNAPSHOT_HEADER_BYTES,
    SnapshotMeta,
    decode_snapshot_header,
    is_pending_name,
    parse_snapshot_name,
    pending_name,
    snapshot_name,
)
from sequencer.raft.storage.snapshot_receiver import SnapshotReceiver

__all__ = ["SnapshotMeta", "SnapshotReader", "SnapshotReceiver", "SnapshotStore"]


class SnapshotStore:
    """The snapshots in one directory, whose lock the caller holds. Open it with `open`.

    `newest` is the newest durable snapshot, or None. Read-only for others.
    """

    def __init__(self, directory: str, disk: Disk, newest: SnapshotMeta | None) -> None:
        self.newest = newest
        self._directory = directory
        self._disk = disk
        self._numbers = itertools.count()
        self._install_lock = threading.Lock()
        self._older: list[str] = []
        self._incoming: SnapshotReceiver | None = None
        self._failure: BaseException | None = None
        self._is_closed = False

    @classmethod
    def open(cls, directory: str, *, disk: Disk = REAL) -> SnapshotStore:
        """Find the newest snapshot; remove older and incomplete ones.

        Verifies its header and size, not its content. Raises `rt.Corrupt`, `rt.UnknownVersion` or, without a
        directory, `rt.LogNotFound`; then nothing was removed.
        """
        with storage_errors(directory, "opening the snapshots"):
            names = disk.list_directory(directory)
            indexes = [index for name in names if (index := parse_snapshot_name(name)) is not None]
            newest = _read_meta(disk, directory, max(indexes)) if indexes else None
            if newest is not None:
                with synced():  # The process may have been killed between the rename and this.
                    disk.sync_directory(directory)
            older = [snapshot_name(index) for index in indexes if index != max(indexes)]
            for name in [*filter(is_pending_name, names), *older]:
                disk.remove(os.path.join(directory, name))
        return cls(directory, disk, newest)

    def write(self, cluster: bytes, epoch: int, place: LogIndex, content: Buffer) -> SnapshotMeta:
        """Write a snapshot of this node's state. On return it is durable and the older one is removed.

        Returns the newest snapshot if it is the same, or if a newer one was received in the meantime.
        `ValueError` if `place` is not above the newest one's.

        Raises `rt.DiskFull`: the older one stays, try again later. Raises `rt.StorageFailed`: stop the node;
        after a restart the older or the new one exists.
        """
        self._require_writable()
        meta = SnapshotMeta(cluster, epoch, place, len(content), hashlib.sha256(content).digest())
        if meta == self.newest:
            return meta
        self._require_above(meta)
        with self._changing(self._path(meta), "writing a snapshot"):
            pending = PendingSnapshot(self._disk, self._pending_path(meta), meta)
            pending.append(content)
            pending.sync()
        return self._install(pending)

    def read(self) -> bytes:
        """The verified content of the newest snapshot; `ValueError` if there is none.

        Raises `rt.Corrupt` if it does not match its header: stop the node.
        """
        with contextlib.closing(self.open_newest()) as reader:
            content = reader.read_at(0, reader.meta.length)
        digest = hashlib.sha256(content).digest()
        if digest != reader.meta.digest:
            raise damaged(
                "the snapshot's content does not match its digest",
                *(reader.path, digest.hex(), reader.meta.digest.hex()),
                offset=SNAPSHOT_HEADER_BYTES,
            )
        return content

    def open_newest(self) -> SnapshotReader:
        """A reader of the newest snapshot; the caller closes it. `ValueError` if there is none."""
        while True:
            self._require_open()
            meta = self.newest
            if meta is None:
                raise ValueError("there is no snapshot yet")
            path = self._path(meta)
            with storage_errors(path, "opening a snapshot"):
                try:
                    return SnapshotReader(meta, path, self._disk.open(path))
                except FileNotFoundError as error:
                    if self.newest is meta:
                        raise damaged("the snapshot file is missing", path) from error
                    # A newer snapshot replaced it in the meantime: open that one.

    def receive(self, meta: SnapshotMeta) -> SnapshotReceiver:
        """Start to receive a snapshot; an earlier transfer is dropped.

        `rt.FormatError` if it is larger than 8 GiB, `ValueError` if it is not above the newest one here.
        Raises `rt.StorageError` like `write`.
        """
        self._require_writable()
        if meta.length > SNAPSHOT_BYTES_MAX:
            raise FormatError(
                "the announced snapshot is too large",
                where=meta.place,
                got=f"{meta.length:,} bytes",
                expected=f"at most {SNAPSHOT_BYTES_MAX:,} bytes",
                hint="Check that the leader runs the same version of rt.",
            )
        self._require_above(meta)
        if self._incoming is not None:
            self._incoming.abandon()
        with self._changing(self._path(meta), "starting to receive a snapshot"):
            pending = PendingSnapshot(self._disk, self._pending_path(meta), meta)
        self._incoming = SnapshotReceiver(pending, self._changing, self._install)
        return self._incoming

    def fail(self, error: BaseException) -> None:
        """Reject further writes, and make the running ones fail. Any thread may call this."""
        self._failure = self._failure or error

    def close(self) -> None:
        """Drop the transfer in progress. Open readers stay usable. Idempotent."""
        self._is_closed = True
        if self._incoming is not None:
            self._incoming.abandon()

    def _install(self, pending: PendingSnapshot) -> SnapshotMeta:
        """Rename a synced file, unless a newer snapshot exists. Returns the newest."""
        path = self._path(pending.meta)
        with self._install_lock, pending.discarded_on_error(), self._changing(path, "naming a snapshot"):
            self._require_writable()
            older = self.newest
            if older is not None and older.place.index >= pending.meta.place.index:
                pending.discard()
                return older
            with self._disk.hold_directory(self._directory):  # Syncing it later must not need a descriptor.
                self._disk.rename(pending.path, path)
                pending.on_named()
                with synced():
                    self._disk.sync_directory(self._directory)
            self.newest = pending.meta
            if older is not None:
                self._older.append(self._path(older))
            while self._older:  # More than one if a removal failed because there was no space.
                self._disk.remove(self._older[-1])
                self._older.pop()
        return pending.meta

    @contextlib.contextmanager
    def _changing(self, path: str, doing: str) -> Iterator[None]:
        """Convert storage errors. After a final error nothing more is written."""
        try:
            with storage_errors(path, doing):
                yield
        except StorageFailed as error:
            self._failure = error
            raise

    def _path(self, meta: SnapshotMeta) -> str:
        return os.path.join(self._directory, snapshot_name(meta.place.index))

    def _pending_path(self, meta: SnapshotMeta) -> str:
        return os.path.join(self._directory, pending_name(meta.place.index, next(self._numbers)))

    def _require_above(self, meta: SnapshotMeta) -> None:
        newest = self.newest
        if newest is not None and meta.place.index <= newest.place.index:
            raise ValueError(f"a snapshot at {meta.place}, the newest is at {newest.place}")

    def _require_open(self) -> None:
        if self._is_closed:
            raise Closed("the snapshots are closed", where=self._directory)

    def _require_writable(self) -> None:
        self._require_open()
        if self._failure is not None:
            raise StorageFailed(
                "an earlier disk error stopped all writes",
                where=self._directory,
                hint="Repair the disk, then restart the node.",
            ) from self._failure


def _read_meta(disk: Disk, directory: str, index: int) -> SnapshotMeta:
    path = os.path.join(directory, snapshot_name(index))
    with contextlib.closing(disk.open(path)) as file:
        head = read_exactly(file, SNAPSHOT_HEADER_BYTES, 0)
        return decode_snapshot_header(head, path=path, index=index, size=file.size())
