"""The target of an export: which parts it has, and how a part is published exactly once.

    <target>/date=2026-01-31/topic=trade/<start>-<end>.<n>.parquet     a part's rows of that date and topic
    <target>/_rt/part-<start>.json     the description of a part: from then on it is exported
    <target>/_rt/part-<start>.moved    all its files have their final names
    <target>/_rt/staging/<id>/         what Spark is writing
    <target>/_rt/exporter              the current exporter

Invariants:
- A part is written to staging completely. Then its description, with all files and their final names, is
  created. Then the files are renamed one by one.
- The next exporter completes these renames first. So a part is exported exactly once, even after a kill, and
  no incomplete file is visible.
- The next part starts at the end of the newest one. Parts follow each other without gap or overlap, except
  for lost messages.
- One exporter creates a description. Then the files that earlier exporters have staged are deleted, as these
  exporters can no longer describe them. A later exporter may already be staging the next part.
- A file is deleted only if its copy is complete: an earlier exporter may still be renaming.
- Parquet readers ignore names that start with `_`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Final

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict

from rt.errors import Corrupt, UnknownVersion, WriteConflict
from rt.log.format.constants import NEWER_HINT
from rt.spark.export.filesystem import Filesystem
from rt.spark.sink.create_once import decode_record, encode_record

STATE: Final = "_rt"
_PARTS_KEPT: Final = 100
"""How many finished descriptions are kept for information. The newest one says where to continue."""


class ExportedPart(Struct, frozen=True, forbid_unknown_fields=True):
    """Positions from `start` up to `end` of a stream, as exported. `moves`: the staged and the final name of
    each file.
    """

    start: int
    end: int
    rows: int
    log_end: int
    """The end of the log at that time."""
    time_ns: int
    moves: tuple[tuple[str, str], ...]
    stream: str = ""
    epoch: int = 0
    """The epoch in which its positions were right; 0 if the epoch is not known."""


class ExportTarget:
    """The target, used by one export at a time. Raises storage errors, `rt.Corrupt`, `rt.UnknownVersion`."""

    def __init__(self, storage: Filesystem) -> None:
        self.storage = storage
        self._id = uuid.uuid4().hex
        self._staged: list[str] = []
        """The staging directories at the time of `open`."""

    @property
    def staging(self) -> str:
        return f"{STATE}/staging/{self._id}"

    def last(self) -> ExportedPart | None:
        """The newest part, whose renames may be incomplete. None if nothing was exported."""
        names = _parts(self.storage)
        return self._read(names[-1]) if names else None

    def open(self) -> ExportedPart | None:
        """Take over the target and complete the renames of an earlier exporter. Returns the newest part."""
        self.storage.write(f"{STATE}/exporter", self._id.encode())
        self._staged = self.storage.names(f"{STATE}/staging")
        part = self.last()
        if part is not None:
            if not self.is_moved(part):
                self._move(part)
            for staging in {"/".join(source.split("/")[:3]) for source, _ in part.moves}:
                self.storage.remove(staging)
        return part

    def commit(
        self,
        start: int,
        end: int,
        *,
        rows: int,
        log_end: int,
        time_ns: int,
        stream: str = "",
        epoch: int = 0,
    ) -> ExportedPart:
        """Publish the staged files as the part from `start` to `end`. Raises `rt.WriteConflict`.

        On return the part is as durable as the storage allows.
        """
        staged = [path for path in self.storage.files(self.staging) if path.endswith(".parquet")]
        moves = tuple(moves_of(staged, self.staging, start, end))
        part = ExportedPart(start, end, rows, log_end, time_ns, moves, stream, epoch)
        self.storage.sync([source for source, _ in part.moves])
        owner = self.storage.read(f"{STATE}/exporter")
        content = encode_record(asdict(part))
        if owner != self._id.encode() or not self.storage.create(f"{_name(part)}.json", content):
            raise WriteConflict(
                "another exporter has taken over this target",
                where=self.storage.url(""),
                hint="Run one export per target.",
            )
        self._move(part)
        for staging in (*self._staged, self._id):
            self.storage.remove(f"{STATE}/staging/{staging}")
        self._staged.clear()
        self._remove_old()
        return part

    def is_moved(self, part: ExportedPart) -> bool:
        """Whether all its files have their final names."""
        return self.storage.exists(f"{_name(part)}.moved")

    def _move(self, part: ExportedPart) -> None:
        for source, target in part.moves:
            staged, moved = self.storage.size(source), self.storage.size(target)
            # This storage moves by copying: only the removal is left.
            if staged is not None and staged == moved:
                self.storage.remove(source)
            elif staged is not None:
                if moved is not None:
                    self.storage.remove(target)
                self.storage.move(source, target)
            elif moved is None:
                raise Corrupt(
                    "a file of an exported part is missing",
                    path=self.storage.url(target),
                    offset=0,
                    hint=f"Positions {part.start} to {part.end - 1} must be exported again, elsewhere.",
                )
        self.storage.write(f"{_name(part)}.moved", b"")

    def _remove_old(self) -> None:
        for name in _parts(self.storage)[:-_PARTS_KEPT]:
            self.storage.remove(f"{STATE}/{name}")
            self.storage.remove(f"{STATE}/{name.removesuffix('.json')}.moved")

    def _read(self, name: str) -> ExportedPart:
        path = f"{STATE}/{name}"
        record = decode_record(self.storage.read(path) or b"")
        if record is None:
            raise Corrupt(
                "the description of an exported part fails its checksum",
                path=self.storage.url(path),
                offset=0,
                hint="Restore it, or export to another target.",
            )
        try:
            return convert(record, ExportedPart)
        except ValidationError as error:
            raise UnknownVersion(
                f"the description of an exported part is not understood: {error}",
                where=self.storage.url(path),
                hint=NEWER_HINT,
            ) from error


def moves_of(staged: Sequence[str], staging: str, start: int, end: int) -> list[tuple[str, str]]:
    """The final names of staged files: in the same directories, named by the positions."""
    return [
        (path, f"{os.path.dirname(os.path.relpath(path, staging))}/{start:020d}-{end:020d}.{number}.parquet")
        for number, path in enumerate(sorted(staged))
    ]


def _name(part: ExportedPart) -> str:
    return f"{STATE}/part-{part.start:020d}"


def _parts(storage: Filesystem) -> list[str]:
    return [name for name in storage.names(STATE) if name.startswith("part-") and name.endswith(".json")]
