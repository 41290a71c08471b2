"""Compare log directories that must have the same bytes: copies of a session or of a merged log.

Invariants:
- Bytes are compared; nothing is decoded.
- Each log must be a prefix of the longest. A segment must have the same length in every log that keeps it,
  except where it is the newest of a log.
- Of an active segment only the bytes that verify or are known to be synced are compared (`read_status`).
- Logs may end at different positions, and be trimmed to different ones: `Comparison.logs` has both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from rt.errors import FormatError, InvalidOption
from rt.log.check.status import LogStatus, SegmentState, SegmentStatus, read_status
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.catalog import scanner_before, segment_path
from rt.log.scan.directory import read_header, scans

Progress = Callable[[int, int], None]
"""Called with the bytes compared so far, and their total."""

PIECE_BYTES = 2**20
"""Bytes per read of each log: two reads fit in a processor's cache."""


class CopyDifference(Struct, frozen=True):
    """The first byte at which `path` and `other` differ, and `what` differs there.

    `segment` is None if the directories are not copies of one log. `position` is the first position of the
    batch at `offset`, None if unknown.
    """

    what: str
    path: str
    other: str
    segment: SegmentId | None = None
    offset: int = 0
    position: int | None = None

    def __str__(self) -> str:
        text = f"{self.path} and {self.other} differ"
        if self.segment is not None:
            text += f" in {self.segment} at offset {self.offset}"
        if self.position is not None:
            text += f", position {self.position}"
        return f"{text}: {self.what}"


class Comparison(Struct, frozen=True):
    """The status of each log, in the given order, and their differences.

    After its first difference a log is not compared any more, so each log is the `path` of at most one
    difference.
    """

    logs: tuple[LogStatus, ...]
    differences: tuple[CopyDifference, ...]
    compared_bytes: int


def compare(
    paths: Sequence[str | os.PathLike[str]], *, disk: Disk = REAL, on_progress: Progress | None = None
) -> Comparison:
    """Compare two or more log directories. Raises `ValueError` for fewer, or `rt.LogNotFound`."""
    if len(paths) < 2:
        raise InvalidOption(f"a comparison needs at least two log directories: got {len(paths)}")
    logs = [read_status(path, disk=disk) for path in paths]
    work = _Comparison(logs, disk, on_progress)
    with storage_errors(logs[0].path, "comparing logs"):
        work.run()
    return Comparison(tuple(logs), tuple(work.differences), work.compared_bytes)


class _Copy(NamedTuple):
    log: LogStatus
    file: File
    size_bytes: int


class _Comparison:
    """`logs` are the logs without a difference so far, `_given` are all logs."""

    def __init__(self, logs: Sequence[LogStatus], disk: Disk, on_progress: Progress | None) -> None:
        self.logs = list(logs)
        self._given = tuple(logs)
        self.differences: list[CopyDifference] = []
        self.compared_bytes = 0
        self._disk = disk
        self._found = {log.path: {segment.id: segment for segment in log.segments} for log in logs}
        self._on_progress = on_progress
        self._total_bytes = sum(map(self._common_bytes, self._segments()))

    def run(self) -> None:
        self._compare_identities()
        for segment in self._segments():
            if len(self.logs) < 2:
                return
            with contextlib.ExitStack() as opened:
                self._compare_bytes(segment, self._open(segment, opened))
            self._compare_lengths(segment)

    def _segments(self) -> list[SegmentId]:
        return sorted({segment.id for log in self.logs for segment in log.kept})

    def _common_bytes(self, segment: SegmentId) -> int:
        """The size of the second longest copy of a segment: bytes that can be compared."""
        copies = [found for log in self.logs if (found := self._find(log, segment))]
        sizes = [copy.size_bytes for copy in copies if copy.state is not SegmentState.TRIMMED]
        return sorted(sizes)[-2] if len(sizes) > 1 else 0

    # Comparing tables

    def _compare_identities(self) -> None:
        first = self.logs[0]
        expected = (first.identity.kind, first.identity.origin)
        for log in self.logs[1:]:
            if (log.identity.kind, log.identity.origin) != expected:
                self._differ(
                    CopyDifference(f"{_name(log)} and {_name(first)} are two logs", log.path, first.path)
                )

    def _compare_lengths(self, segment: SegmentId) -> None:
        """Sealed copies must be as long as the longest, and a segment between kept ones must not be missing.

        If the sender trimmed the following messages, a copy has a gap, and its segment before the gap is
        shorter.
        """
        known = [(log, found) for log in self.logs if (found := self._find(log, segment))]
        if not known:
            return
        longest_log, longest = max(known, key=lambda pair: pair[1].size_bytes)
        for log, found in known:
            may_differ = (
                found.state is SegmentState.ACTIVE
                or found.reason is TrimReason.LOST  # Its size is unknown.
                or (found.state is SegmentState.TRIMMED and _is_before_gap(log, found))
            )
            if not may_differ and found.size_bytes != longest.size_bytes:
                what = f"{found.state} at {found.size_bytes} bytes, the other has {longest.size_bytes}"
                self._differ_at(what, log, longest_log, segment, found.size_bytes)
        for log in list(self.logs):
            is_between = bool(log.kept) and log.kept[0].id < segment < log.kept[-1].id
            if is_between and self._find(log, segment) is None:
                self._differ_at("missing, though later segments exist", log, longest_log, segment, 0)

    # Bytes

    def _open(self, segment: SegmentId, opened: contextlib.ExitStack) -> list[_Copy]:
        """The existing copies of a segment, the longest first."""
        copies = []
        for log in list(self.logs):
            found = self._find(log, segment)
            if found is None or found.state is SegmentState.TRIMMED:
                continue
            try:
                file = self._disk.open(segment_path(log.path, segment))
            except FileNotFoundError:
                self._on_missing(segment, log, "missing", 0)
                continue
            opened.callback(file.close)
            copies.append(_Copy(log, file, found.size_bytes))
        return sorted(copies, key=lambda copy: copy.size_bytes, reverse=True)

    def _compare_bytes(self, segment: SegmentId, copies: list[_Copy]) -> None:
        """Compare each copy with the longest, piece by piece, until all others have ended.

        If the longest could not be read, the same piece is compared again without it.
        """
        at = 0
        while len(copies) > 1 and copies[1].size_bytes > at:
            size = min(PIECE_BYTES, copies[1].size_bytes - at)
            longest = copies[0]
            copies = self._keep_equal(segment, [copy for copy in copies if copy.size_bytes > at], at, size)
            if copies and copies[0] is longest:
                at += size
                self._advance(size)

    def _keep_equal(self, segment: SegmentId, copies: Sequence[_Copy], at: int, size: int) -> list[_Copy]:
        """Return the copies whose bytes at `at` equal those of the longest copy: `size` bytes, or fewer at
        the end of a copy.
        """
        whole = []
        for copy in copies:
            left = min(size, copy.size_bytes - at)
            piece = copy.file.pread(left, at)
            if len(piece) == left:
                whole.append((copy, piece))
            else:
                self._on_missing(segment, copy.log, "cut off", at + len(piece))
        longest, expected = copies[0], whole[0][1] if whole else b""
        if not whole or whole[0][0] is not longest:
            return [copy for copy, _ in whole]
        same = []
        for copy, piece in whole:
            if piece == expected[: len(piece)]:
                same.append(copy)
            else:
                offset = at + _first_difference(piece, expected)
                self._differ_at("other bytes", copy.log, longest.log, segment, offset)
        return same

    def _on_missing(self, segment: SegmentId, log: LogStatus, what: str, offset: int) -> None:
        """Report missing bytes that existed at the start as a difference, unless they were trimmed
        meanwhile.
        """
        segments = read_status(log.path, disk=self._disk).segments
        now = next((found for found in segments if found.id == segment), None)
        if now is not None and now.state is not SegmentState.TRIMMED:
            other = next(other for other in self._given if other is not log)
            self._differ_at(what, log, other, segment, offset)

    def _find(self, log: LogStatus, segment: SegmentId) -> SegmentStatus | None:
        return self._found[log.path].get(segment)

    def _advance(self, size: int) -> None:
        self.compared_bytes += size
        if self._on_progress is not None:
            self._on_progress(self.compared_bytes, max(self._total_bytes, self.compared_bytes))

    # Differences

    def _differ_at(
        self, what: str, log: LogStatus, other: LogStatus, segment: SegmentId, offset: int
    ) -> None:
        position = self._position(log, segment, offset)
        if position is None:
            position = self._position(other, segment, offset)
        self._differ(CopyDifference(what, log.path, other.path, segment, offset, position))

    def _differ(self, difference: CopyDifference) -> None:
        self.differences.append(difference)
        self.logs = [log for log in self.logs if log.path != difference.path]

    def _position(self, log: LogStatus, segment: SegmentId, offset: int) -> int | None:
        """The first position of the batch at `offset`, as far as the segment verifies."""
        try:
            header = read_header(self._disk, log.path, segment)
            if header is None:
                return None
            file = self._disk.open(segment_path(log.path, segment))
        except (FormatError, FileNotFoundError):
            return None
        try:
            scanner = scanner_before(self._disk, log.path, header, file, offset)
            position = scanner.next
            for scan in scans(file.pread, scanner):
                for batch in scan.batches:
                    if batch.offset <= offset:
                        is_in = offset < batch.offset + batch.header.total_bytes
                        position = batch.first_position + (
                            batch.skip if is_in else batch.header.message_count
                        )
                if scanner.offset > offset:
                    break
            return position
        finally:
            file.close()


def _name(log: LogStatus) -> str:
    identity = log.identity
    return f"{identity.kind.name.lower()} {identity.name} ({identity.origin.hex()})"


def _is_before_gap(log: LogStatus, segment: SegmentStatus) -> bool:
    following = next((other for other in log.segments if other.id > segment.id), None)
    return following is not None and following.first > segment.end


def _first_difference(piece: bytes, expected: bytes) -> int:
    """Where `piece` first differs from `expected`, which is at least as long."""
    differs = np.frombuffer(piece, np.uint8) != np.frombuffer(expected, np.uint8, len(piece))
    return int(np.flatnonzero(differs)[0])
