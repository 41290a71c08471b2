"""The files of session replicas that the merger reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from rt.log.disk import File, storage_errors
from rt.log.format.segment import SegmentId

FILES_MAX: Final = 256
"""Maximum number of files that stay open between two plans. One plan opens up to `commands.RANGES_MAX`."""


class ReplicaFiles:
    """Open files: one for each session, and earlier ones that the present plan reads. For one thread."""

    def __init__(self, open_segment: Callable[[int, SegmentId], File]) -> None:
        self._open_segment = open_segment
        self._files: OrderedDict[int, tuple[SegmentId, File]] = OrderedDict()
        """By session id; the most recently used comes last."""
        self._passed: list[File] = []
        """Files of earlier segments. A plan that merges several segments of a session still reads them."""

    def __len__(self) -> int:
        return len(self._files)

    def open(self, session_id: int, segment: SegmentId) -> File:
        """The segment's file. After another segment of the session is opened, `close_passed` closes it."""
        known = self._files.get(session_id)
        if known is not None and known[0] != segment:
            self._passed.append(self._files.pop(session_id)[1])
            known = None
        if known is None:
            with storage_errors(f"session {session_id}, {segment.file_name}", "opening a segment to merge"):
                known = segment, self._open_segment(session_id, segment)
            self._files[session_id] = known
        self._files.move_to_end(session_id)
        return known[1]

    def close_sessions(self, session_ids: Iterable[int]) -> None:
        """Close the files of these sessions, if they are open."""
        for session_id in session_ids:
            if (known := self._files.pop(session_id, None)) is not None:
                known[1].close()

    def close_passed(self) -> None:
        """Close the files of earlier segments: the plan that reads them was written, or was given up."""
        for file in self._passed:
            file.close()
        self._passed.clear()

    def close_idle(self) -> None:
        """Close the least recently used files above `FILES_MAX`."""
        while len(self._files) > FILES_MAX:
            _, (_, file) = self._files.popitem(last=False)
            file.close()

    def close(self) -> None:
        """Close all files."""
        self.close_passed()
        self.close_sessions(list(self._files))
