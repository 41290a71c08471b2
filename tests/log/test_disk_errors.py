"""Path and file system errors become storage errors that name the path at fault."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rt.client.publisher import Publisher
from rt.errors import LogNotFound, StorageFailed
from rt.log.disk import REAL, storage_error, storage_errors


def attempt(path: Path) -> None:
    with storage_errors(str(path), "reading a directory"):
        REAL.list_directory(str(path))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("file", "{there} is not a directory. Move it away"),
        ("fifo", "{there} is not a directory. Move it away"),
        ("link", "{there} is a link to {target}, where nothing is. Move it away"),
    ],
)
@pytest.mark.parametrize("below", ["", "merged", "trades/sessions/feed1"])
def test_file_or_broken_link_in_place_of_directory_is_named_in_error(
    tmp_path: Path, kind: str, words: str, below: str
) -> None:
    there, target = tmp_path / "data", tmp_path / "unmounted"
    match kind:
        case "file":
            there.write_text("data")
        case "fifo":
            os.mkfifo(there)
        case _:
            there.symlink_to(target)
    with pytest.raises(StorageFailed) as caught:
        attempt(there / below)
    assert words.format(there=there, target=target) in str(caught.value)


def test_publisher_with_directory_below_file_names_file_in_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("data")
    with pytest.raises(StorageFailed, match=f"{tmp_path}/data is not a directory"):
        Publisher(tmp_path / "data", "trades", publisher_id="feed1")


def test_missing_path_raises_log_not_found_without_hint(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / "none", tmp_path / "none" / "merged", tmp_path / "link" / "none", Path("none")):
        with pytest.raises(LogNotFound) as caught:
            attempt(path)
        assert caught.value.hint is None


def test_storage_error_names_unopenable_file_instead_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "log.1").mkdir()
    with pytest.raises(StorageFailed) as caught, storage_errors(str(tmp_path), "opening a log"):
        REAL.open(str(tmp_path / "log.1"))
    assert caught.value.where == str(tmp_path / "log.1")
    name = str(tmp_path / "log.2")
    refused = PermissionError(errno.EACCES, "Permission denied", name)
    assert storage_error(refused, str(tmp_path), "opening a log").where == name
    assert storage_error(refused, str(tmp_path / "log"), "opening a log").where == str(tmp_path / "log")


def test_read_only_file_system_error_hints_to_mount_for_writing() -> None:
    error = storage_error(OSError(errno.EROFS, "Read-only file system"), "/data", "syncing a batch")
    assert isinstance(error, StorageFailed)
    assert str(error).startswith("the file system is read-only, while syncing a batch (at /data): got EROFS")
    assert "Mount it for writing" in str(error.hint)
