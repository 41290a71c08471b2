"""The target of an export holds each part exactly once, whenever exports are killed or run concurrently."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rt
from rt.spark.export.filesystem import LocalFilesystem, is_local, open_storage
from rt.spark.export.target import STATE, ExportedPart, ExportTarget
from rt.spark.sink.create_once import encode_record

PART = {"start": 0, "end": 1, "rows": 1, "log_end": 9, "time_ns": 5, "moves": []}
PLACES = ("date=2026-01-31/topic=a", "date=2026-01-31/topic=b", "date=2026-02-01/topic=a")


class Killed(Exception):
    """Stands for a kill -9 before some write, move or removal."""


class Killing(LocalFilesystem):
    """A file system that raises `Killed` in place of a change of the target, after the first `after`
    changes.
    """

    def __init__(self, root: str, after: int) -> None:
        super().__init__(root)
        self.left = after

    def _act(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def write(self, path: str, content: bytes) -> None:
        self._act()
        super().write(path, content)

    def create(self, path: str, content: bytes) -> bool:
        self._act()
        return super().create(path, content)

    def move(self, source: str, target: str) -> None:
        self._act()
        super().move(source, target)

    def remove(self, path: str) -> None:
        self._act()
        super().remove(path)


class Copying(Killing):
    """Moves files as object stores do, and may be killed between the copy and the removal."""

    def move(self, source: str, target: str) -> None:
        self._act()
        assert not self.exists(target), "they rename over no file"
        content = self.read(source)
        assert content is not None
        LocalFilesystem.write(self, target, content)
        self.remove(source)


def stage(target: ExportTarget, text: str) -> None:
    """Stage files as Spark does."""
    root = Path(open_root(target), target.staging)
    for place in PLACES:
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / f"part-{text}.parquet").write_text(f"{text} {place}")
    (root / "_SUCCESS").write_text("")


def open_root(target: ExportTarget) -> str:
    storage: Any = target.storage
    return str(storage.root)


def seen(root: Path) -> dict[str, list[str]]:
    """Return what Parquet readers see in each directory, in the order of the file names."""
    return {
        place: [path.read_text().removesuffix(f" {place}") for path in sorted((root / place).glob("*"))]
        for place in PLACES
    }


def export(storage: LocalFilesystem, texts: list[str]) -> list[str]:
    """Export the texts that are not exported yet, part by part."""
    target = ExportTarget(storage)
    part = target.open()
    for number in range(0 if part is None else part.end, len(texts)):
        stage(target, texts[number])
        target.commit(number, number + 1, rows=1, log_end=9, time_ns=5)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Killing, Copying])
def test_part_is_exported_exactly_once_after_kill_at_any_step(tmp_path: Path, kind: type[Killing]) -> None:
    texts = ["one", "two", "three"]
    kills = 0
    for after in range(60):
        root = tmp_path / str(after)
        storage = kind(str(root), after)
        try:
            export(storage, texts)
        except Killed:
            kills += 1
            for found in seen(root).values():
                assert found == texts[: len(found)], "a file out of turn, or half of one"
        export(kind(str(root), 1000), texts)
        assert seen(root) == dict.fromkeys(PLACES, texts), after
        assert not (root / STATE / "staging").exists() or not os.listdir(root / STATE / "staging")
    assert kills > 15


def test_older_export_raises_write_conflict_after_newer_one_opens_target(tmp_path: Path) -> None:
    first, second = ExportTarget(LocalFilesystem(str(tmp_path))), ExportTarget(LocalFilesystem(str(tmp_path)))
    first.open()
    second.open()
    stage(first, "one")
    with pytest.raises(rt.WriteConflict, match="another exporter has taken over this target"):
        first.commit(0, 1, rows=1, log_end=1, time_ns=0)
    stage(second, "one")
    part = second.commit(0, 1, rows=1, log_end=1, time_ns=0)
    assert (second.last(), second.is_moved(part)) == (part, True)
    assert seen(tmp_path) == {place: ["one"] for place in PLACES}


class Overtaken(LocalFilesystem):
    """Calls `happens` between the last check for another exporter and the description of a part."""

    happens: Callable[[], None] | None = None

    def create(self, path: str, content: bytes) -> bool:
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return super().create(path, content)


@pytest.mark.parametrize("is_faster", [True, False])
def test_overtaken_export_leaves_target_consistent_in_commit_race(tmp_path: Path, is_faster: bool) -> None:
    """The other export has started. It has exported the same positions, or it has not reached them yet."""
    storage = Overtaken(str(tmp_path))
    first, second = ExportTarget(storage), ExportTarget(LocalFilesystem(str(tmp_path)))

    def overtake() -> None:
        second.open()
        stage(second, "two")
        if is_faster:
            second.commit(0, 2, rows=2, log_end=2, time_ns=0)

    first.open()
    stage(first, "one")
    storage.happens = overtake
    if is_faster:
        with pytest.raises(rt.WriteConflict, match="another exporter has taken over this target"):
            first.commit(0, 1, rows=1, log_end=1, time_ns=0)
    else:
        first.commit(0, 1, rows=1, log_end=1, time_ns=0)
        with pytest.raises(rt.WriteConflict, match="another exporter has taken over this target"):
            second.commit(0, 2, rows=2, log_end=2, time_ns=0)
    assert seen(tmp_path) == {place: ["two" if is_faster else "one"] for place in PLACES}
    third = ExportTarget(LocalFilesystem(str(tmp_path)))
    part = third.open()
    assert part is not None
    assert part.end == (2 if is_faster else 1)
    stage(third, "three")
    third.commit(part.end, 3, rows=1, log_end=3, time_ns=0)
    assert list((tmp_path / STATE / "staging").iterdir()) == []


class Slow(LocalFilesystem):
    """Calls `happens` after a path that ends with `at` is checked, or before it is written."""

    at = ""
    happens: Callable[[], None] | None = None

    def _passed(self, path: str) -> None:
        happens = self.happens
        if happens is not None and path.endswith(self.at):
            self.happens = None
            happens()

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        self._passed(path)
        return found

    def size(self, path: str) -> int | None:
        found = super().size(path)
        self._passed(path)
        return found

    def write(self, path: str, content: bytes) -> None:
        super().write(path, content)
        self._passed(path)


def test_concurrent_exports_renaming_same_files_lose_none(tmp_path: Path) -> None:
    """The second export starts when the first one has checked a file and has not renamed it yet."""
    storage = Slow(str(tmp_path))
    first, second = ExportTarget(storage), ExportTarget(LocalFilesystem(str(tmp_path)))
    first.open()
    stage(first, "one")
    storage.at, storage.happens = "topic=b/part-one.parquet", second.open
    first.commit(0, 1, rows=1, log_end=1, time_ns=0)
    assert seen(tmp_path) == {place: ["one"] for place in PLACES}


def test_files_staged_by_later_export_are_kept(tmp_path: Path) -> None:
    """The first export pauses when its part is complete."""
    storage = Slow(str(tmp_path))
    first, second = ExportTarget(storage), ExportTarget(LocalFilesystem(str(tmp_path)))

    def overtake() -> None:
        second.open()
        stage(second, "two")

    first.open()
    stage(first, "one")
    storage.at, storage.happens = ".moved", overtake
    first.commit(0, 1, rows=1, log_end=1, time_ns=0)
    part = second.commit(1, 2, rows=1, log_end=2, time_ns=0)
    assert len(part.moves) == len(PLACES)
    assert seen(tmp_path) == {place: ["one", "two"] for place in PLACES}


def test_storage_create_keeps_first_file_even_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", source, target)

    storage = LocalFilesystem(str(tmp_path))
    assert storage.create("a/one", b"1")
    assert not storage.create("a/one", b"2")
    monkeypatch.setattr(os, "link", no_links)
    assert storage.create("a/two", b"1")
    assert not storage.create("a/two", b"2")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == {"one": b"1", "two": b"1"}


def test_part_descriptions_are_limited_to_newest_100(tmp_path: Path) -> None:
    target = ExportTarget(LocalFilesystem(str(tmp_path)))
    target.open()
    for number in range(103):
        target.commit(number, number + 1, rows=0, log_end=200, time_ns=7)
    assert target.last() == ExportedPart(102, 103, 0, 200, 7, ())
    assert len(list((tmp_path / STATE).glob("part-*.json"))) == 100
    assert len(list((tmp_path / STATE).glob("part-*.moved"))) == 100


def test_part_description_with_bad_checksum_raises_corrupt(tmp_path: Path) -> None:
    export(LocalFilesystem(str(tmp_path)), ["one"])
    (path,) = (tmp_path / STATE).glob("part-*.json")
    path.write_bytes(path.read_bytes().replace(b'"end": 1', b'"end": 7'))
    with pytest.raises(rt.Corrupt, match="fails its checksum"):
        ExportTarget(LocalFilesystem(str(tmp_path))).open()


@pytest.mark.parametrize("record", [{"start": 0, "end": 1}, {**PART, "new": 1}, {**PART, "moves": 7}, []])
def test_part_description_of_another_version_raises_unknown_version_with_file_name(
    tmp_path: Path, record: Any
) -> None:
    path = tmp_path / STATE / f"part-{0:020d}.json"
    path.parent.mkdir()
    path.write_bytes(encode_record(record))
    with pytest.raises(rt.UnknownVersion, match=path.name):
        ExportTarget(LocalFilesystem(str(tmp_path))).open()
    path.write_bytes(encode_record(PART))
    assert ExportTarget(LocalFilesystem(str(tmp_path))).last() == ExportedPart(0, 1, 1, 9, 5, ())


@pytest.mark.parametrize("path", ["target", "target/below"])
def test_target_path_at_or_below_a_file_raises_storage_failed(tmp_path: Path, path: str) -> None:
    (tmp_path / "target").touch()
    target = ExportTarget(LocalFilesystem(str(tmp_path / path)))
    for call in (target.last, target.open):
        with pytest.raises(rt.StorageFailed, match=r"target is not a directory\. Move it away"):
            call()


def test_missing_staged_file_of_part_raises_corrupt(tmp_path: Path) -> None:
    storage = Killing(str(tmp_path), 3)  # The second change is the description, the third the first move.
    with pytest.raises(Killed):
        export(storage, ["one"])
    staged = sorted((tmp_path / STATE / "staging").rglob("*.parquet"))
    staged[-1].unlink()
    with pytest.raises(rt.Corrupt, match="a file of an exported part is missing"):
        ExportTarget(LocalFilesystem(str(tmp_path))).open()


@pytest.mark.parametrize(
    ("target", "local"),
    [("/data/x", True), ("file:/data/x", True), ("file:///data/x", True), ("hdfs://n/x", False), ("x", True)],
)
def test_target_is_local_directory_or_hadoop_url(target: str, local: bool) -> None:
    assert is_local(target) == local
    if target.endswith("/data/x"):
        storage: Any = open_storage(target, None)
        assert (storage.root, storage.url("a=%")) == ("/data/x", "file:///data/x/a=%")
