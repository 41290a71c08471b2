"""A snapshot that arrives in chunks, hashed as they arrive.

Invariant: the received bytes are a prefix of the content. A content gets a snapshot's name only if it has the
announced digest.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from rt.errors import Closed, FormatError
from rt.log.format.constants import Buffer
from sequencer.raft.storage.snapshot_file import PendingSnapshot
from sequencer.raft.storage.snapshot_format import SnapshotMeta

T = TypeVar("T")


class SnapshotReceiver:
    """A transfer in progress. Every method may be called on any thread.

    It ends with `finish`, `abandon`, another `receive` or an error. After that its methods raise `rt.Closed`.
    """

    def __init__(
        self,
        pending: PendingSnapshot,
        changing: Callable[[str, str], AbstractContextManager[None]],
        install: Callable[[PendingSnapshot], SnapshotMeta],
    ) -> None:
        self.meta = pending.meta
        self._pending = pending
        self._changing = changing
        self._install = install
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()

    @property
    def received(self) -> int:
        """Bytes of the content received in order; written, not synced."""
        return self._pending.size

    def write(self, offset: int, data: Buffer) -> int:
        """Write the part of `data` that comes next; `data` is at `offset` of the content. Return `received`.

        Ignores bytes that were already received, or that would leave a hole. `rt.FormatError` if `data`
        exceeds the end of the content: then nothing is written. `rt.StorageError` as in `SnapshotStore.write`
        ends the transfer.
        """
        with self._lock:
            self._require_live()
            if offset < 0 or offset + len(data) > self.meta.length:
                raise FormatError(
                    "a chunk exceeds the end of the snapshot",
                    where=self.meta.place,
                    got=f"bytes {offset} to {offset + len(data)}",
                    expected=f"up to {self.meta.length}",
                )
            done = self.received - offset
            if 0 <= done < len(data):
                rest = memoryview(data)[done:]
                with self._changing(self._pending.path, "receiving a snapshot"):
                    self._pending.append(rest)
                self._hash.update(rest)
            return self.received

    def finish(self, decode: Callable[[bytes], T]) -> T:
        """Make it the newest snapshot. Returns when it is durable and the older one is removed.

        `decode` gets the content before the snapshot is used, and may raise; its result is returned. If the
        node made a newer snapshot in the meantime, that newer snapshot stays. `ValueError` if the content is
        incomplete. `rt.FormatError` for a wrong digest, `rt.StorageError` as in `SnapshotStore.write`, and
        errors of `decode` end the transfer and remove the file.
        """
        with self._lock:
            self._require_live()
            if self.received != self.meta.length:
                raise ValueError(f"{self.received} bytes of {self.meta.length} are here")
            self._require_announced()
            with self._changing(self._pending.path, "receiving a snapshot"):
                self._pending.sync()
                content = self._pending.content()
            with self._pending.discarded_on_error():
                decoded = decode(content)
            self._install(self._pending)
            return decoded

    def abandon(self) -> None:
        """Remove the received bytes, if the transfer has not ended. Waits for a `finish` on another
        thread.
        """
        with self._lock:
            self._pending.discard()

    def _require_live(self) -> None:
        if self._pending.is_over:
            raise Closed("the transfer of this snapshot has ended", where=self._pending.path)

    def _require_announced(self) -> None:
        digest = self._hash.digest()
        if digest != self.meta.digest:
            self._pending.discard()
            raise FormatError(
                "the received snapshot does not match its announced digest",
                where=self.meta.place,
                got=digest.hex(),
                expected=self.meta.digest.hex(),
                hint="The node requests it again. If that fails too, check the leader's disk.",
            )
