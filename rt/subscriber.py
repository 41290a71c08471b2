"""Subscribing: read the local copy of a stream at one's own pace, and remember how far.

Law: a named subscriber that is opened again without a position goes on where it acknowledged, so that it
sees every message at least once, and exactly once if it acknowledges with its own work.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Self

from rt.errors import Damaged
from rt.log.checksum import crc32c
from rt.log.columns import Message, MessageBatch
from rt.log.directory import is_log_directory, merged_directory
from rt.log.disk import REAL, Disk, storage_errors, write_whole
from rt.log.reader import EventHandler, LogReader, Place
from rt.names import check_name

_ACKNOWLEDGED = struct.Struct("<8sQI")
_MAGIC = b"RTACKNOW"


class Subscriber:
    """The messages of a stream from a local log directory, followed as it grows.

    `path` is a log directory, or the root below which the merged log of `stream` lies
    (`<path>/<stream>/merged`). `position` is as in `rt.LogReader`; None means: where this `name`
    acknowledged, else "earliest". `topics` and `on_event` are as there.

    For one thread; `pause`, `resume` and `close` may come from any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        position: Place | None = None,
        topics: Collection[str] | None = None,
        on_event: EventHandler | None = None,
        name: str | None = None,
        disk: Disk = REAL,
    ) -> None:
        self.stream = check_name(stream, kind="stream")
        self.name = None if name is None else check_name(name, kind="subscriber")
        root = os.path.abspath(os.fspath(path))
        self.directory = root if is_log_directory(disk, root) else merged_directory(root, self.stream)
        self._disk = disk
        if position is None:
            position = self._acknowledged()
        self._reader = LogReader(
            self.directory, position=position, follow=True, topics=topics, on_event=on_event, disk=disk
        )
        self._is_paused = False
        self._running = threading.Event()
        self._running.set()

    @property
    def position(self) -> int:
        """The next position to be handed out."""
        return self._reader.position

    def __iter__(self) -> Iterator[Message]:
        """Messages for ever, until `close`; waits while paused."""
        while (batch := self._next()) is not None:
            for message in self._reader.one_by_one(batch):
                yield message
                if self._is_paused:
                    self._running.wait()

    def batches(self) -> Iterator[MessageBatch]:
        """The same messages in columns."""
        while (batch := self._next()) is not None:
            yield batch

    def poll(self, max_messages: int = 1000, timeout: float | None = 1.0) -> list[Message]:
        """Up to `max_messages`, waiting at most `timeout` seconds for the first; none while paused."""
        if not self._running.wait(timeout):
            return []
        return self._reader.poll(max_messages, timeout)

    def pause(self) -> None:
        """Hand out nothing until `resume`. The log goes on growing; nothing is lost."""
        self._is_paused = True
        self._running.clear()

    def resume(self) -> None:
        """Go on where it was paused."""
        self._is_paused = False
        self._running.set()

    def ack(self, position: int) -> None:
        """Remember, durably, that everything below `position` is done; a named subscriber resumes there."""
        if self.name is None:
            raise ValueError("only a named subscriber can acknowledge: give name=")
        if not 0 <= position <= self._reader.position:
            raise ValueError(
                f"position {position} was not handed out yet: the next is {self._reader.position}"
            )
        self._reader.make_durable()
        record = _ACKNOWLEDGED.pack(_MAGIC, position, 0)[:16]
        with storage_errors(self._acknowledged_path(), "acknowledging"):
            write_whole(self._disk, self._acknowledged_path(), record + crc32c(record).to_bytes(4, "little"))

    def close(self) -> None:
        """Stop; another thread's iteration ends. What was not acknowledged is handed out again later."""
        self._reader.close()
        self.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> MessageBatch | None:
        self._running.wait()
        batch = self._reader.next_batch()
        self._running.wait()  # It may have been paused while there was nothing to hand out.
        return None if self._reader.is_closed else batch

    def _acknowledged_path(self) -> str:
        return os.path.join(self.directory, f"acknowledged.{self.name}")

    def _acknowledged(self) -> Place:
        if self.name is None or self._disk.size(self._acknowledged_path()) is None:
            return "earliest"
        path = self._acknowledged_path()
        with storage_errors(path, "reading an acknowledgement"):
            file = self._disk.open(path)
            try:
                data = file.pread(_ACKNOWLEDGED.size, 0)
            finally:
                file.close()
        if (
            len(data) != _ACKNOWLEDGED.size
            or data[:8] != _MAGIC
            or crc32c(data[:16]) != int.from_bytes(data[16:], "little")
        ):
            raise Damaged(
                "acknowledgement fails its checksum", path=path, offset=0, hint="Give a position instead."
            )
        return int.from_bytes(data[8:16], "little")
