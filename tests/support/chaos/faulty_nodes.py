"""`WiredNodes` on machines that fail: power cuts, full disks, failing syncs, clocks that jump, flipped bytes.

Preloaded C libraries cause the faults in the processes of a node, so root is not needed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from power_loss import POWER, cut_power, kept_copy
from preloaded import CLOCK, FSYNC, FULL, built, set_clock

from chaos.wired_nodes import WiredNodes
from rt.errors import RtError
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.scan.directory import list_segments, read_durable_end
from sequencer.raft.storage.log_format import parse_segment_name
from sequencer.raft.storage.snapshot_format import parse_snapshot_name

FLIPPED_BYTES_MIN: Final = 1024
"""A log file can get a flipped byte if it has at least this many synced bytes."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A changed byte of a file. `sound` is the original value."""

    node: str
    path: Path
    offset: int
    sound: int
    logged: int
    """Size of the node's log file at that time, in bytes."""

    def is_there(self) -> bool:
        """Whether the file still exists with the wrong byte. A trimmed file is empty."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(1) not in (b"", bytes([self.sound]))
        return False


class FaultyNodes(WiredNodes):
    """Each node has a file that triggers each fault, and a directory with a copy of its synced data."""

    def __init__(
        self, root: Path, count: int = 3, *, stream: str, flags: Sequence[str], clients: Sequence[str]
    ) -> None:
        super().__init__(root, count, stream=stream, flags=flags, clients=clients)
        sources = {"fsync": FSYNC, "full": FULL, "power": POWER, "clock": CLOCK}
        self._preloaded = ":".join(str(built(self.root, *each)) for each in sources.items())
        for name in self.names:
            self.set_clock(name, 0)

    def start(self, *names: str) -> None:
        """Start these nodes, or all if none is given, on disks that track what was synced."""
        for name in names or self.names:
            self._aside("kept", name).mkdir(exist_ok=True)
        super().start(*names)

    def wipe(self, name: str) -> None:
        """Lose the disk of a node that does not run."""
        super().wipe(name)
        shutil.rmtree(self._aside("kept", name))

    def cut_power(self, *names: str, draw: random.Random | None = None) -> int:
        """Kill these nodes at once and undo what they had not synced. Returns how many files changed.

        If `draw` is given, some of the unsynced sectors are kept.
        """
        self.kill(*names)
        return sum(
            cut_power(self.directory(name), self._aside("kept", name), draw)
            for name in names
            if self.directory(name).exists()
        )

    def fill_disk(self, name: str) -> None:
        """Refuse all new blocks to the node until `free_disk`."""
        self._aside("full", name).touch()

    def free_disk(self, name: str) -> bool:
        """Let the node write again. Returns whether a write was refused."""
        path = self._aside("full", name)
        was_hit = path.stat().st_size > 0
        path.unlink()
        return was_hit

    def fail_sync(self, name: str) -> None:
        """Have the node's next sync fail."""
        self._aside("fsync", name).touch()

    def stop_failing(self, name: str) -> bool:
        """Cancel `fail_sync`. Returns whether a sync has failed."""
        try:
            self._aside("fsync", name).unlink()
        except FileNotFoundError:
            return True
        return False

    def set_clock(self, name: str, seconds: int) -> None:
        """Set a node's wall clock off by this many seconds."""
        set_clock(self._aside("clock", name), seconds)

    def flip_log(self, name: str, where: str, draw: random.Random) -> Flip | None:
        """Flip a synced byte of the "merged" log or of a copy in "sessions". None if too few are synced.

        The node may run.
        """
        found: list[tuple[Path, int]] = []
        with contextlib.suppress(OSError, RtError):  # Merged segments may be deleted meanwhile.
            for directory in self._logs_of(name, where):
                ends = ((directory / one.file_name, _synced(directory, one)) for one in _segments(directory))
                found += [(path, end) for path, end in ends if end >= FLIPPED_BYTES_MIN]
            if not found:
                return None
            path, end = draw.choice(found)
            # The start of a copy is already merged, so no node reads it again.
            return self._flip(name, path, draw.randrange(0 if where == "merged" else end // 2, end))
        return None

    def flip_raft(self, name: str, what: str, draw: random.Random) -> Flip | None:
        """Flip a byte of the newest Raft "snapshot" or "log" segment. Return None if there is none.

        The node must not run. In a log the byte is in the first half, because corruption at the end counts as
        a torn write.
        """
        parse = {"snapshot": parse_snapshot_name, "log": parse_segment_name}[what]
        found = {number: path for path in self._raft_files(name) if (number := parse(path.name)) is not None}
        if not found:
            return None
        path = found[max(found)]
        size = len(path.read_bytes().rstrip(b"\0"))  # Preallocated zeros do not count.
        return self._flip(name, path, draw.randrange(size if what == "snapshot" else size // 2))

    def said(self, name: str, start: int = 0) -> str:
        """Return the node's log from byte `start` on."""
        with Path(self.root, f"{name}.log").open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def log_size(self, name: str) -> int:
        """Size of a node's log file, in bytes."""
        return Path(self.root, f"{name}.log").stat().st_size

    def _check_started(self) -> None:
        """Check nothing, because a node restarts a part that a fault ended."""

    def _environment(self, name: str) -> dict[str, str]:
        return super()._environment(name) | {
            "LD_PRELOAD": self._preloaded,
            "KEPT_OF_SYNCS": str(self._aside("kept", name)),
            "FSYNC_FAILS_ONCE_IF": str(self._aside("fsync", name)),
            "DISK_FULL_IF": str(self._aside("full", name)),
            "DISK_FULL_BELOW": str(self.directory(name)),
            "CLOCK_OFFSET_FILE": str(self._aside("clock", name)),
        }

    def _aside(self, what: str, name: str) -> Path:
        return self.root / f"{what}.{name}"

    def _raft_files(self, name: str) -> list[Path]:
        return sorted((self.directory(name) / "raft").iterdir())

    def _logs_of(self, name: str, where: str) -> list[Path]:
        if where == "merged":
            return [self.merged_directory(name)]
        return sorted((self.directory(name) / self.stream / where).glob("*/"))

    def _flip(self, name: str, path: Path, offset: int) -> Flip:
        """Flip the byte in the file, and in the copy that a power cut would restore."""
        logged, sound = self.log_size(name), 0
        for file_path in (kept_copy(path, self._aside("kept", name)), path):
            if not file_path.exists() or file_path.stat().st_size <= offset:
                continue
            with file_path.open("r+b", buffering=0) as file:
                (sound,) = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([sound ^ 4]), offset)
        return Flip(name, path, offset, sound, logged)


def _segments(directory: Path) -> list[SegmentId]:
    return list_segments(REAL, str(directory))


def _synced(directory: Path, segment: SegmentId) -> int:
    """Return the number of synced bytes of a segment. A sealed segment is synced completely."""
    durable = read_durable_end(REAL, str(directory))
    if durable is None or segment > durable.id:
        return 0
    return durable.offset if segment == durable.id else (directory / segment.file_name).stat().st_size
