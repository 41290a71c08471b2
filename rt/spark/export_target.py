"""What an export has written to its target, and how a part of a log gets there once.

    <target>/date=2026-01-31/topic=trade/<start>-<end>.<n>.parquet     what a part has of that date and topic
    <target>/_rt/part-<start>.json     what a part consists of: from then on it is exported
    <target>/_rt/part-<start>.moved    all its files have their names
    <target>/_rt/staging/<id>/         what Spark is writing
    <target>/_rt/exporter              who exports to this target now

Laws. A part is written aside, whole; then its description is made, which lists every file and the name that
it will have; then the files get these names, one by one. Whoever comes next finishes that before it goes on,
so that a part is there once, whenever the export was killed, and no file is visible before it is whole. What
is next is the end of the newest part; parts follow each other without gap or overlap, but for messages that
were lost before. A description is made by one exporter only; what others have staged is removed behind it,
for none of them can describe it any more. Readers of Parquet pass over names that begin with `_`.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rt.errors import Damaged, WriteConflict
from rt.log.checksum import crc32c
from rt.spark.storage import Storage

STATE: Final = "_rt"
_PARTS_KEPT: Final = 100
"""Of finished ones, for who wants to know; the newest says where to go on."""


@dataclass(frozen=True, slots=True)
class Part:
    """Positions from `start` up to `end`, as exported. `moves`: where each file was written, and its name."""

    start: int
    end: int
    rows: int
    log_end: int
    """Where the log ended then."""
    time_ns: int
    moves: tuple[tuple[str, str], ...]


class ExportTarget:
    """The target of one export at a time. Storage errors, `rt.Damaged`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._id = uuid.uuid4().hex

    @property
    def staging(self) -> str:
        """Where this exporter writes."""
        return f"{STATE}/staging/{self._id}"

    def last(self) -> Part | None:
        """The newest part; it need not be moved whole. None if nothing was exported."""
        names = _parts(self.storage)
        return self._read(names[-1]) if names else None

    def begin(self) -> Part | None:
        """Take the target over, finish what another one has begun; the newest part."""
        self.storage.write(f"{STATE}/exporter", self._id.encode())
        part = self.last()
        if part is not None:
            if not self.is_moved(part):
                self._move(part)
            for staging in {"/".join(source.split("/")[:3]) for source, _ in part.moves}:
                self.storage.remove(staging)
        return part

    def commit(self, start: int, end: int, *, rows: int, log_end: int, time_ns: int) -> Part:
        """What is staged is the part from `start` to `end`: let it be seen. `rt.WriteConflict`.

        Durable on return, as far as the storage is.
        """
        staged = [path for path in self.storage.files(self.staging) if path.endswith(".parquet")]
        part = Part(start, end, rows, log_end, time_ns, tuple(moves_of(staged, self.staging, start, end)))
        self.storage.sync([source for source, _ in part.moves])
        owner = self.storage.read(f"{STATE}/exporter")
        line = json.dumps(asdict(part)).encode()
        if owner != self._id.encode() or not self.storage.create(
            f"{_name(part)}.json", line + b"\n%08x\n" % crc32c(line)
        ):
            raise WriteConflict(
                "another export writes to this target now",
                where=self.storage.url(""),
                hint="One at a time: give each its own target.",
            )
        self._move(part)
        self.storage.remove(f"{STATE}/staging")
        self._forget()
        return part

    def is_moved(self, part: Part) -> bool:
        """Whether all its files have their names."""
        return self.storage.exists(f"{_name(part)}.moved")

    def _move(self, part: Part) -> None:
        for source, target in part.moves:
            if self.storage.exists(source):
                if self.storage.exists(target):  # Moving is copying there, and was cut off behind the copy.
                    self.storage.remove(target)
                self.storage.move(source, target)
            elif not self.storage.exists(target):
                raise Damaged(
                    "a file of an exported part is missing",
                    path=self.storage.url(target),
                    offset=0,
                    hint=f"Positions {part.start} to {part.end - 1} have to be exported again, elsewhere.",
                )
        self.storage.write(f"{_name(part)}.moved", b"")

    def _forget(self) -> None:
        for name in _parts(self.storage)[:-_PARTS_KEPT]:
            self.storage.remove(f"{STATE}/{name}")
            self.storage.remove(f"{STATE}/{name.removesuffix('.json')}.moved")

    def _read(self, name: str) -> Part:
        path = f"{STATE}/{name}"
        line, _, checksum = (self.storage.read(path) or b"").partition(b"\n")
        if checksum != b"%08x\n" % crc32c(line):
            raise Damaged(
                "what is known of an export fails its checksum",
                path=self.storage.url(path),
                offset=0,
                hint="Restore it, or export to another target.",
            )
        said = json.loads(line)
        return Part(**{**said, "moves": tuple((source, target) for source, target in said["moves"])})


def moves_of(staged: Sequence[str], staging: str, start: int, end: int) -> list[tuple[str, str]]:
    """The names that staged files get: in the same directories, after the positions."""
    return [
        (path, f"{os.path.dirname(os.path.relpath(path, staging))}/{start:020d}-{end:020d}.{number}.parquet")
        for number, path in enumerate(sorted(staged))
    ]


def _name(part: Part) -> str:
    return f"{STATE}/part-{part.start:020d}"


def _parts(storage: Storage) -> list[str]:
    return [name for name in storage.names(STATE) if name.startswith("part-") and name.endswith(".json")]
