"""A snapshot that arrives from the leader in pieces, hashed as they come.

The law: what counts as received is a prefix of the content; only a content with the announced digest gets a
snapshot's name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from rt.errors import Closed, FormatError
from rt.log.format.constants import Buffer
from sequencer.raft.storage.snapshot_file import AsideFile
from sequencer.raft.storage.snapshot_format import SnapshotMeta


class SnapshotReceiver:
    """A snapshot on its way from the leader. Every method may be called on any thread.

    It ends with `finish`, `abandon`, another `receive` or an error that says so: `rt.Closed` from then on.
    """

    def __init__(
        self,
        aside: AsideFile,
        changing: Callable[[str, str], AbstractContextManager[None]],
        install: Callable[[AsideFile], SnapshotMeta],
    ) -> None:
        self.meta = aside.meta
        self._aside = aside
        self._changing = changing
        self._install = install
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()

    @property
    def received(self) -> int:
        """Bytes of the content that are here, in order; written, not synced."""
        return self._aside.size

    def write(self, offset: int, data: Buffer) -> int:
        """Take what of `data`, which stands at `offset` of the content, comes next; returns `received`.

        What is here already and what would leave a hole is ignored. `rt.FormatError` if it goes beyond the
        end: nothing of it is taken. `rt.StorageError` as in `SnapshotStore.write` ends the transfer.
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
                with self._changing(self._aside.path, "receiving a snapshot"):
                    self._aside.append(rest)
                self._hash.update(rest)
            return self.received

    def finish(self, check: Callable[[bytes], object] = lambda _: None) -> bytes:
        """Make it the newest snapshot; returns its content when it is durable and the older one is gone.

        `check` sees the content before it counts, and may raise. If the node made a newer snapshot itself
        meanwhile, that one stays. `ValueError` before all is here. `rt.FormatError` if it is not the content
        that was announced, `rt.StorageError` as in `SnapshotStore.write`, and what `check` raises: each of
        them ends the transfer, and nothing is left of it.
        """
        with self._lock:
            self._require_live()
            if self.received != self.meta.length:
                raise ValueError(f"{self.received} bytes of {self.meta.length} are here")
            self._require_announced()
            with self._changing(self._aside.path, "receiving a snapshot"):
                self._aside.sync()
                content = self._aside.content()
            with self._aside.discarded_on_error():
                check(content)
            self._install(self._aside)
            return content

    def abandon(self) -> None:
        """Remove what came of it; nothing if it ended before. Waits for a `finish` on another thread."""
        with self._lock:
            self._aside.discard()

    def _require_live(self) -> None:
        if self._aside.is_over:
            raise Closed("the transfer of this snapshot has ended", where=self._aside.path)

    def _require_announced(self) -> None:
        digest = self._hash.digest()
        if digest != self.meta.digest:
            self._aside.discard()
            raise FormatError(
                "the received snapshot does not match its announced digest",
                where=self.meta.place,
                got=digest.hex(),
                expected=self.meta.digest.hex(),
                hint="The node requests it again. If that fails too, check the leader's disk.",
            )
