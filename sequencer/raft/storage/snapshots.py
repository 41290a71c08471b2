"""The snapshots of a node: written, received from the leader, read and sent.

The laws. Once a snapshot was durable, every crash leaves a whole one, and `open` takes the newest. One that
is not what its header says stops the node: an older one is never taken instead, as the log between the two
is gone. What failed to sync is never synced again: the store writes nothing more.

`write` and what belongs to receiving are for one helper thread or several; `newest`, `read` and `open_newest`
may be used on any other at the same time, and never wait for a disk write.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Iterator

from rt.errors import Closed, Corrupt, FormatError, StorageFailed
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.constants import Buffer
from sequencer.raft.model.messages import SNAPSHOT_BYTES_MAX, LogIndex
from sequencer.raft.storage.snapshot_file import AsideFile, SnapshotReader, read_exactly, synced
from sequencer.raft.storage.snapshot_format import (
    SNAPSHOT_HEADER_BYTES,
    WIPE_HINT,
    SnapshotMeta,
    aside_name,
    decode_snapshot_header,
    is_aside_name,
    parse_snapshot_name,
    snapshot_name,
)
from sequencer.raft.storage.snapshot_receiver import SnapshotReceiver

__all__ = ["SnapshotMeta", "SnapshotReader", "SnapshotReceiver", "SnapshotStore"]


class SnapshotStore:
    """The snapshots in one directory, whose lock the caller holds. Make it with `open`.

    `newest` is the newest durable snapshot, None if there never was one; read it, never set it.
    """

    def __init__(self, directory: str, disk: Disk, newest: SnapshotMeta | None) -> None:
        self.newest = newest
        self._directory = directory
        self._disk = disk
        self._numbers = itertools.count()
        self._switch = threading.Lock()
        self._older: list[str] = []
        self._incoming: SnapshotReceiver | None = None
        self._failure: BaseException | None = None
        self._is_closed = False

    @classmethod
    def open(cls, directory: str, *, disk: Disk = REAL) -> SnapshotStore:
        """Find the newest snapshot, and remove what is older or was never finished.

        Its header and size are verified, its content is not read. `rt.Corrupt` or `rt.UnknownVersion` if it
        cannot be used, `rt.LogNotFound` if there is no such directory; nothing was removed then.
        """
        with storage_errors(directory, "opening the snapshots"):
            names = disk.list_directory(directory)
            indexes = [index for name in names if (index := parse_snapshot_name(name)) is not None]
            newest = _read_meta(disk, directory, max(indexes)) if indexes else None
            if newest is not None:
                with synced():  # A kill may have come between its rename and this.
                    disk.sync_directory(directory)
            older = [snapshot_name(index) for index in indexes if index != max(indexes)]
            for name in [*filter(is_aside_name, names), *older]:
                disk.remove(os.path.join(directory, name))
        return cls(directory, disk, newest)

    def write(self, cluster: bytes, epoch: int, place: LogIndex, content: Buffer) -> SnapshotMeta:
        """Make a snapshot of this node's own; returns when it is durable and the older one is gone.

        The very snapshot that is the newest already is not written again. If a newer one was received
        meanwhile, that one stays and is returned. `ValueError` if `place` is not above the newest one's.

        Raises `rt.DiskFull`: nothing is left of it, the older one stays, try again later. Raises
        `rt.StorageFailed`: stop the node; the older one or the new one is there at the next start.
        """
        self._require_writable()
        meta = SnapshotMeta(cluster, epoch, place, len(content), hashlib.sha256(content).digest())
        if meta == self.newest:
            return meta
        self._require_above(meta)
        with self._changing(self._path(meta), "writing a snapshot"):
            aside = AsideFile(self._disk, self._aside_path(meta), meta)
            aside.append(content)
            aside.sync()
        return self._install(aside)

    def read(self) -> bytes:
        """The content of the newest snapshot, verified; `ValueError` if there is none.

        `rt.Corrupt` if it is not what its header says: stop the node.
        """
        reader = self.open_newest()
        try:
            content = reader.read_at(0, reader.meta.length)
        finally:
            reader.close()
        digest = hashlib.sha256(content).digest()
        if digest != reader.meta.digest:
            raise Corrupt(
                "the snapshot's content does not match its digest",
                path=reader.path,
                offset=SNAPSHOT_HEADER_BYTES,
                got=digest.hex(),
                expected=reader.meta.digest.hex(),
                hint=WIPE_HINT,
            )
        return content

    def open_newest(self) -> SnapshotReader:
        """A reader of the newest snapshot; the caller closes it. Raises `ValueError` if there is none."""
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
                        raise Corrupt(
                            "the snapshot file is missing", path=path, offset=0, hint=WIPE_HINT
                        ) from error
                    # A newer snapshot replaced it in the meantime: open that one.

    def receive(self, meta: SnapshotMeta) -> SnapshotReceiver:
        """Begin to take a snapshot from the leader; what came of another one before is dropped.

        `rt.FormatError` if it is larger than 8 GiB, `ValueError` if it is not above the newest one here: a
        node takes only what is ahead of all it has applied. Raises `rt.StorageError` as `write` does.
        """
        self._require_writable()
        if meta.length > SNAPSHOT_BYTES_MAX:
            raise FormatError("the snapshot is too large", got=meta.length, expected=SNAPSHOT_BYTES_MAX)
        self._require_above(meta)
        if self._incoming is not None:
            self._incoming.abandon()
        with self._changing(self._path(meta), "beginning to receive a snapshot"):
            aside = AsideFile(self._disk, self._aside_path(meta), meta)
        self._incoming = SnapshotReceiver(aside, self._changing, self._install)
        return self._incoming

    def close(self) -> None:
        """Drop what is being received; open readers go on. Closing twice is allowed."""
        self._is_closed = True
        if self._incoming is not None:
            self._incoming.abandon()

    def _install(self, aside: AsideFile) -> SnapshotMeta:
        """Give a synced file its name, unless a newer snapshot came first; the newest one now."""
        path = self._path(aside.meta)
        with self._switch, aside.discarded_on_error(), self._changing(path, "naming a snapshot"):
            self._require_writable()
            older = self.newest
            if older is not None and older.place.index >= aside.meta.place.index:
                aside.discard()
                return older
            with self._disk.hold_directory(self._directory):  # No descriptor may be wanting behind the name.
                self._disk.rename(aside.path, path)
                aside.placed()
                with synced():
                    self._disk.sync_directory(self._directory)
            self.newest = aside.meta
            if older is not None:
                self._older.append(self._path(older))
            while self._older:  # More than one if removing failed for want of space.
                self._disk.remove(self._older[-1])
                self._older.pop()
        return aside.meta

    @contextlib.contextmanager
    def _changing(self, path: str, doing: str) -> Iterator[None]:
        """Storage errors as ours; one that is final is kept, and nothing is written after it."""
        try:
            with storage_errors(path, doing):
                yield
        except StorageFailed as error:
            self._failure = error
            raise

    def _path(self, meta: SnapshotMeta) -> str:
        return os.path.join(self._directory, snapshot_name(meta.place.index))

    def _aside_path(self, meta: SnapshotMeta) -> str:
        return os.path.join(self._directory, aside_name(meta.place.index, next(self._numbers)))

    def _require_above(self, meta: SnapshotMeta) -> None:
        newest = self.newest
        if newest is not None and meta.place.index <= newest.place.index:
            raise ValueError(f"a snapshot at {meta.place}, the newest is at {newest.place}")

    def _require_open(self) -> None:
        if self._is_closed:
            raise Closed("the snapshots are closed", where=self._directory)

    def fail(self, error: BaseException) -> None:
        """Reject further writes, and make the running ones fail. Any thread may call this."""
        self._failure = self._failure or error

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
    file = disk.open(path)
    try:
        head = read_exactly(file, SNAPSHOT_HEADER_BYTES, 0)
        return decode_snapshot_header(head, path=path, index=index, size=file.size())
    finally:
        file.close()
