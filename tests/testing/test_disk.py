"""The disks for tests: one conformance suite with the real disk, and the laws of faults and cuts."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk, MemoryDisk, PowerCut
from disks.crash_sweep import sweep
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.log.disk import Disk, File, RealDisk, write_whole


@dataclass
class Place:
    """A disk and a directory on it that the test may use."""

    disk: Any
    root: str

    def __call__(self, name: str) -> str:
        return f"{self.root}/{name}"

    def make(self, name: str, content: bytes = b"") -> str:
        path = self(name)
        file = self.disk.create(path)
        if content:
            assert file.pwritev([content], 0) == len(content)
        file.close()
        return path

    def read(self, name: str) -> bytes:
        file = self.disk.open(self(name))
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    def names(self) -> list[str]:
        return sorted(self.disk.list_directory(self.root))


def memory_place() -> Place:
    disk = MemoryDisk()
    disk.make_directory("/place")
    return Place(disk, "/place")


def code_of(call: Callable[[], object]) -> int | None:
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno


@pytest.fixture(params=["real", "memory", "faulty"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        return memory_place()
    return Place(RealDisk() if request.param == "real" else FaultyDisk(RealDisk()), str(tmp_path))


@pytest.fixture(params=["memory", "faulty"])
def failing(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return memory_place() if request.param == "memory" else Place(FaultyDisk(RealDisk()), str(tmp_path))


# --- Conformance: files ----------------------------------------------------------------------------------


def test_a_new_file_is_empty_and_linked(place: Place) -> None:
    file = place.disk.create(place("a"))
    assert (file.size(), file.pread(10, 0), file.is_linked()) == (0, b"", True)
    file.close()


def test_buffers_of_every_kind_are_written_one_behind_the_other(place: Place) -> None:
    file = place.disk.create(place("a"))
    assert file.pwritev([b"one", bytearray(b"two"), memoryview(b"_three_")[1:-1], b""], 0) == 11
    assert file.pread(100, 0) == b"onetwothree"
    assert place.read("a") == b"onetwothree"
    file.close()


def test_a_written_buffer_may_be_used_again(place: Place) -> None:
    buffer = bytearray(b"first")
    file = place.disk.create(place("a"))
    file.pwritev([buffer], 0)
    buffer[:] = b"other"
    assert file.pread(5, 0) == b"first"
    file.close()


def test_writing_inside_keeps_what_is_around(place: Place) -> None:
    place.make("a", b"0123456789")
    file = place.disk.open(place("a"), write=True)
    assert file.pwritev([b"xy"], 4) == 2
    assert file.pread(100, 0) == b"0123xy6789"
    file.close()


def test_a_hole_reads_as_zeros(place: Place) -> None:
    file = place.disk.create(place("a"))
    file.pwritev([b"x"], 5)
    assert file.pread(100, 0) == bytes(5) + b"x"
    file.close()


@pytest.mark.parametrize("buffers", [[], [b""]])
def test_writing_nothing_does_not_lengthen(place: Place, buffers: list[bytes]) -> None:
    file = place.disk.create(place("a"))
    assert file.pwritev(buffers, 100) == 0
    assert file.size() == 0
    file.close()


def test_one_write_takes_1024_buffers_and_no_more(place: Place) -> None:
    file = place.disk.create(place("a"))
    assert file.pwritev([b"x"] * 1024, 0) == 1024
    assert code_of(lambda: file.pwritev([b"x"] * 1025, 0)) == errno.EINVAL
    file.close()


def test_a_read_is_short_only_at_the_end(place: Place) -> None:
    place.make("a", b"0123456789")
    file = place.disk.open(place("a"))
    assert [file.pread(4, offset) for offset in (0, 8, 10, 99)] == [b"0123", b"89", b"", b""]
    file.close()


def test_pread_into_fills_the_buffer_and_counts(place: Place) -> None:
    place.make("a", b"0123456789")
    file = place.disk.open(place("a"))
    buffer = bytearray(b"......")
    assert file.pread_into(memoryview(buffer), 2) == 6
    assert buffer == b"234567"
    assert file.pread_into(memoryview(buffer), 8) == 2
    assert buffer == b"894567"
    assert file.pread_into(memoryview(buffer), 10) == 0
    assert file.pread_into(memoryview(buffer)[:0], 0) == 0
    file.close()


def test_a_negative_offset_or_size_is_refused(place: Place) -> None:
    # Not -1: to the vectored calls of the C library that is the file's own position.
    file = place.disk.create(place("a"))
    calls: list[Callable[[], object]] = [
        lambda: file.pread(1, -2),
        lambda: file.pread(-2, 0),
        lambda: file.pread_into(memoryview(bytearray(1)), -2),
        lambda: file.pwritev([b"x"], -2),
        lambda: file.truncate(-1),
    ]
    assert [code_of(call) for call in calls] == [errno.EINVAL] * 5
    file.close()


def test_truncate_cuts_and_lengthens_with_zeros(place: Place) -> None:
    place.make("a", b"0123456789")
    file = place.disk.open(place("a"), write=True)
    file.truncate(3)
    assert file.pread(100, 0) == b"012"
    file.truncate(6)
    assert file.pread(100, 0) == b"012\0\0\0"
    assert file.size() == place.disk.size(place("a")) == 6
    file.close()


def test_two_openings_of_a_file_see_the_same_bytes(place: Place) -> None:
    writer = place.disk.create(place("a"))
    reader = place.disk.open(place("a"))
    writer.pwritev([b"seen"], 0)
    assert (reader.size(), reader.pread(100, 0)) == (4, b"seen")
    writer.close()
    assert reader.pread(100, 0) == b"seen"
    reader.close()


def test_a_file_open_for_reading_refuses_changes_but_may_be_synced(place: Place) -> None:
    place.make("a", b"old")
    file = place.disk.open(place("a"))
    assert code_of(lambda: file.pwritev([b"x"], 0)) == errno.EBADF
    assert code_of(lambda: file.truncate(0)) == errno.EINVAL
    file.sync()
    file.close()
    assert place.read("a") == b"old"


def test_a_closed_file_refuses_everything_but_another_close(place: Place) -> None:
    file = place.disk.create(place("a"))
    file.close()
    file.close()
    calls: list[Callable[[], object]] = [
        lambda: file.pread(1, 0),
        lambda: file.pread_into(memoryview(bytearray(1)), 0),
        lambda: file.pwritev([b"x"], 0),
        lambda: file.truncate(0),
        file.size,
        file.is_linked,
    ]
    assert [code_of(call) for call in calls] == [errno.EBADF] * 6
    with pytest.raises((OSError, ValueError)):  # os.fdatasync refuses the number -1 before it asks the system
        file.sync()


# --- Conformance: names ----------------------------------------------------------------------------------


def test_create_refuses_a_name_that_is_taken(place: Place) -> None:
    place.make("file")
    place.disk.make_directory(place("directory"))
    for name in ("file", "directory"):
        with pytest.raises(FileExistsError):
            place.disk.create(place(name))


def test_what_does_not_exist_is_not_found(place: Place) -> None:
    disk = place.disk
    calls: list[Callable[[], object]] = [
        lambda: disk.open(place("none")),
        lambda: disk.open(place("none"), write=True),
        lambda: disk.open(place("none/file")),
        lambda: disk.create(place("none/file")),
        lambda: disk.remove(place("none")),
        lambda: disk.rename(place("none"), place("other")),
        lambda: disk.list_directory(place("none")),
        lambda: disk.sync_directory(place("none")),
        lambda: disk.lock(place("none/lock")),
        lambda: disk.open(""),
        lambda: disk.sync_directory(""),
    ]
    assert [code_of(call) for call in calls] == [errno.ENOENT] * len(calls)
    assert disk.size(place("none")) is None
    assert disk.size(place("none/file")) is None


def test_a_file_is_no_directory(place: Place) -> None:
    disk, path = place.disk, place.make("file")
    calls: list[Callable[[], object]] = [
        lambda: disk.open(path + "/x"),
        lambda: disk.create(path + "/x"),
        lambda: disk.remove(path + "/x"),
        lambda: disk.rename(path, path + "/x"),
        lambda: disk.make_directory(path + "/x"),
        lambda: disk.list_directory(path),
        lambda: disk.sync_directory(path),
        lambda: disk.size(path + "/x"),
        lambda: disk.lock(path + "/x"),
    ]
    assert [code_of(call) for call in calls] == [errno.ENOTDIR] * len(calls)


def test_a_directory_is_no_file(place: Place) -> None:
    disk, path = place.disk, place("directory")
    disk.make_directory(path)
    calls: list[Callable[[], object]] = [
        lambda: disk.open(path, write=True),
        lambda: disk.remove(path),
        lambda: disk.lock(path),
    ]
    assert [code_of(call) for call in calls] == [errno.EISDIR] * len(calls)
    assert disk.size(path) is not None


def test_rename_moves_a_file_and_open_files_follow(place: Place) -> None:
    place.make("old", b"content")
    file = place.disk.open(place("old"))
    place.disk.rename(place("old"), place("new"))
    assert place.names() == ["new"]
    assert (file.is_linked(), file.pread(100, 0), place.read("new")) == (True, b"content", b"content")
    file.close()


def test_rename_replaces_and_the_replaced_file_lives_while_open(place: Place) -> None:
    place.make("source", b"new")
    place.make("target", b"old")
    replaced = place.disk.open(place("target"), write=True)
    place.disk.rename(place("source"), place("target"))
    assert (place.names(), place.read("target")) == (["target"], b"new")
    assert replaced.pwritev([b"er"], 3) == 2
    replaced.sync()
    assert (replaced.is_linked(), replaced.pread(100, 0)) == (False, b"older")
    replaced.close()


def test_rename_to_itself_changes_nothing(place: Place) -> None:
    place.make("a", b"content")
    file = place.disk.open(place("a"))
    place.disk.rename(place("a"), place("a"))
    assert (place.read("a"), file.is_linked()) == (b"content", True)
    file.close()


def test_rename_moves_between_directories(place: Place) -> None:
    place.make("a", b"content")
    place.disk.make_directory(place("directory"))
    place.disk.rename(place("a"), place("directory/b"))
    assert (place.names(), place.read("directory/b")) == (["directory"], b"content")
    assert code_of(lambda: place.disk.rename(place("directory/b"), place("none/b"))) == errno.ENOENT


def test_rename_moves_a_directory_with_all_that_is_in_it(place: Place) -> None:
    place.disk.make_directory(place("old/inner"))
    place.make("old/inner/file", b"content")
    place.disk.make_directory(place("empty"))
    place.disk.rename(place("old"), place("empty"))
    assert (place.names(), place.read("empty/inner/file")) == (["empty"], b"content")


def test_rename_never_mixes_files_and_directories_or_buries_a_directory(place: Place) -> None:
    disk = place.disk
    place.make("file")
    disk.make_directory(place("directory"))
    disk.make_directory(place("full/inner"))
    place.make("full/file")
    calls: list[Callable[[], object]] = [
        lambda: disk.rename(place("file"), place("directory")),
        lambda: disk.rename(place("directory"), place("file")),
        lambda: disk.rename(place("directory"), place("full")),
        lambda: disk.rename(place("full/file"), place("full")),
        lambda: disk.rename(place("full"), place("full/inner/deep")),
    ]
    wanted = [errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENOTEMPTY, errno.EINVAL]
    assert [code_of(call) for call in calls] == wanted
    assert place.names() == ["directory", "file", "full"]


def test_a_removed_file_is_missing_but_lives_while_open(place: Place) -> None:
    place.make("a", b"content")
    file = place.disk.open(place("a"), write=True)
    place.disk.remove(place("a"))
    assert (place.names(), place.disk.size(place("a")), file.is_linked()) == ([], None, False)
    file.pwritev([b"s"], 7)
    assert file.pread(100, 0) == b"contents"
    file.close()


def test_a_name_may_be_made_again_after_removal(place: Place) -> None:
    place.make("a", b"first")
    place.disk.remove(place("a"))
    place.make("a", b"second")
    assert place.read("a") == b"second"


def test_make_directory_makes_parents_and_may_be_repeated(place: Place) -> None:
    place.disk.make_directory(place("x/y/z"))
    place.make("x/y/z/file")
    place.disk.make_directory(place("x/y/z"))
    place.disk.make_directory(place("x/y"))
    assert (place.names(), place.disk.list_directory(place("x/y/z"))) == (["x"], ["file"])
    place.disk.sync_directory(place("x/y"))


def test_list_directory_names_files_and_directories(place: Place) -> None:
    for name in ("b", "a", ".hidden"):
        place.make(name)
    place.disk.make_directory(place("directory"))
    place.make("directory/inner")
    assert place.names() == [".hidden", "a", "b", "directory"]


def test_a_lock_says_whether_its_file_is_still_there(place: Place) -> None:
    held = place.disk.lock(place("lock"))
    assert held.is_linked()
    place.disk.remove(place("lock"))
    assert not held.is_linked()
    held.close()


def test_a_lock_is_refused_while_it_is_held(place: Place) -> None:
    held = place.disk.lock(place("lock"))
    other = place.disk.lock(place("other"))
    with pytest.raises(BlockingIOError):
        place.disk.lock(place("lock"))
    held.close()
    again = place.disk.lock(place("lock"))
    held.close()
    with pytest.raises(BlockingIOError):
        place.disk.lock(place("lock"))
    again.close()
    other.close()
    assert place.names() == ["lock", "other"]


def test_a_lock_keeps_what_is_in_the_file(place: Place) -> None:
    place.make("lock", b"content")
    place.disk.lock(place("lock")).close()
    assert place.read("lock") == b"content"


def test_write_whole_makes_and_replaces_and_clears_what_a_crash_left(place: Place) -> None:
    write_whole(place.disk, place("a"), b"first")
    place.make(".a.new", b"left by a crash, and longer")
    write_whole(place.disk, place("a"), b"second")
    assert (place.names(), place.read("a")) == (["a"], b"second")


# --- Conformance: any sequence of calls ------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/f"])
SMALL = st.integers(0, 1500)
CALLS = st.one_of(
    st.tuples(st.just("create"), NAMES),
    st.tuples(st.just("write"), NAMES, SMALL, SMALL),
    st.tuples(st.just("truncate"), NAMES, SMALL),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("make_directory"), st.sampled_from(["d", "d/e"])),
    st.tuples(st.just("list"), NAMES),
    st.tuples(st.just("size"), NAMES),
    st.tuples(st.just("lock"), NAMES),
    st.tuples(st.just("unlock"), NAMES),
)


@dataclass
class Player:
    """Makes the calls on one disk, and says what each answered."""

    place: Place
    opened: dict[str, list[File]] = field(default_factory=dict)
    locks: dict[str, list[Any]] = field(default_factory=dict)

    def play(self, call: tuple[Any, ...]) -> object:
        try:
            answer = getattr(self, call[0])(*call[1:])
        except OSError as error:
            answer = errno.errorcode[error.errno or 0]
        return answer, [
            [(file.is_linked(), file.pread(9999, 0)) for file in files] for files in self.opened.values()
        ]

    def create(self, name: str) -> None:
        self.opened.setdefault(name, []).append(self.place.disk.create(self.place(name)))

    def write(self, name: str, offset: int, size: int) -> int:
        file = self.place.disk.open(self.place(name), write=True)
        self.opened.setdefault(name, []).append(file)
        return file.pwritev([bytes([size % 256]) * size], offset)

    def truncate(self, name: str, size: int) -> None:
        file = self.place.disk.open(self.place(name), write=True)
        file.truncate(size)
        file.close()

    def rename(self, source: str, target: str) -> None:
        self.place.disk.rename(self.place(source), self.place(target))

    def remove(self, name: str) -> None:
        self.place.disk.remove(self.place(name))

    def make_directory(self, name: str) -> None:
        if self.place.disk.size(self.place(name)) is None:
            self.place.disk.make_directory(self.place(name))

    def list(self, name: str) -> Any:
        return sorted(self.place.disk.list_directory(self.place(name)))

    def size(self, name: str) -> object:
        size = self.place.disk.size(self.place(name))
        try:
            self.list(name)
        except OSError:
            return size
        return size is not None  # how large a directory is differs between file systems

    def lock(self, name: str) -> None:
        self.locks.setdefault(name, []).append(self.place.disk.lock(self.place(name)))

    def unlock(self, name: str) -> None:
        for lock in self.locks.pop(name, []):
            lock.close()

    def close(self) -> None:
        for closable in itertools.chain(*self.opened.values(), *self.locks.values()):
            closable.close()


@settings(deadline=None)
@given(st.lists(CALLS, max_size=30))
def test_the_memory_disk_answers_any_calls_as_the_real_one(calls: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        real, memory = Player(Place(RealDisk(), root)), Player(memory_place())
        try:
            for call in calls:
                assert memory.play(call) == real.play(call), call
        finally:
            real.close()


# --- Faults and space ------------------------------------------------------------------------------------


OPERATIONS: dict[str, Callable[[Place, File], object]] = {
    "create": lambda place, file: place.disk.create(place("new")).close(),
    "list_directory": lambda place, file: place.names(),
    "lock": lambda place, file: place.disk.lock(place("lock")).close(),
    "make_directory": lambda place, file: place.disk.make_directory(place("directory")),
    "open": lambda place, file: place.disk.open(place("a")).close(),
    "pread": lambda place, file: file.pread(1, 0),
    "pwritev": lambda place, file: file.pwritev([b"x"], 0),
    "remove": lambda place, file: place.disk.remove(place("a")),
    "rename": lambda place, file: place.disk.rename(place("a"), place("b")),
    "sync": lambda place, file: file.sync(),
    "sync_directory": lambda place, file: place.disk.sync_directory(place.root),
    "truncate": lambda place, file: file.truncate(3),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_hits_one_call_of_the_operation_it_was_asked_for(failing: Place, operation: str) -> None:
    failing.make("a", b"content")
    file = failing.disk.open(failing("a"), write=True)
    failing.disk.fail(operation)
    for other in sorted(OPERATIONS.keys() - {operation, "remove", "rename"}):
        OPERATIONS[other](failing, file)
    assert code_of(lambda: OPERATIONS[operation](failing, file)) == errno.EIO
    OPERATIONS[operation](failing, file)
    file.close()


def test_a_fault_may_come_late_last_long_and_say_what_it_is(failing: Place) -> None:
    path = failing.make("a", b"x")
    file = failing.disk.open(path)
    failing.disk.fail("pread", at=2, times=2, error=errno.ENXIO)
    assert file.pread(1, 0) == b"x"
    assert code_of(lambda: file.pread(1, 0)) == errno.ENXIO
    assert code_of(lambda: file.pread_into(memoryview(bytearray(1)), 0)) == errno.ENXIO
    assert file.pread(1, 0) == b"x"
    file.close()


def test_a_fault_counts_from_when_it_was_asked_for(failing: Place) -> None:
    for name in ("a", "b"):
        failing.make(name)
    failing.disk.fail("create", at=2)
    failing.make("c")
    assert code_of(lambda: failing.make("d")) == errno.EIO
    assert failing.names() == ["a", "b", "c"]


def test_a_fault_that_could_never_happen_is_refused(failing: Place) -> None:
    for asked in ({"operation": "fsync"}, {"operation": "sync", "at": 0}, {"operation": "sync", "times": 0}):
        with pytest.raises(ValueError, match="invalid fault"):
            failing.disk.fail(**asked)


def test_a_failed_write_or_rename_changes_nothing(failing: Place) -> None:
    failing.make("a", b"old")
    file = failing.disk.open(failing("a"), write=True)
    failing.disk.fail("pwritev")
    failing.disk.fail("rename")
    assert code_of(lambda: file.pwritev([b"new"], 0)) == errno.EIO
    assert code_of(lambda: failing.disk.rename(failing("a"), failing("b"))) == errno.EIO
    file.close()
    assert (failing.names(), failing.read("a")) == (["a"], b"old")


def test_a_write_is_short_when_the_disk_gets_full_and_fails_when_it_is(failing: Place) -> None:
    failing.disk.capacity_bytes = 10
    file = failing.disk.create(failing("a"))
    assert file.pwritev([b"0123", b"4567"], 0) == 8
    assert file.pwritev([b"89", b"abcd"], 8) == 2
    assert code_of(lambda: file.pwritev([b"a"], 10)) == errno.ENOSPC
    assert code_of(lambda: file.pwritev([b"a"], 99)) == errno.ENOSPC
    assert file.pwritev([b""], 10) == 0
    assert (file.pread(100, 0), failing.disk.used_bytes) == (b"0123456789", 10)
    file.close()


def test_a_full_disk_takes_what_needs_no_room(failing: Place) -> None:
    failing.disk.capacity_bytes = 4
    failing.make("a", b"full")
    file = failing.disk.open(failing("a"), write=True)
    assert file.pwritev([b"FU"], 0) == 2
    assert code_of(lambda: file.truncate(5)) == errno.ENOSPC
    file.sync()
    file.close()
    failing.make("empty")
    failing.disk.rename(failing("a"), failing("b"))
    assert (failing.names(), failing.read("b")) == (["b", "empty"], b"FUll")


@pytest.mark.parametrize("how", ["remove", "replace", "truncate", "more"])
def test_space_comes_back(failing: Place, how: str) -> None:
    disk = failing.disk
    disk.capacity_bytes = 4
    failing.make("a", b"full")
    failing.make("empty")
    file = disk.create(failing("b"))
    assert code_of(lambda: file.pwritev([b"x"], 0)) == errno.ENOSPC
    if how == "remove":
        disk.remove(failing("a"))
    elif how == "replace":
        disk.rename(failing("empty"), failing("a"))
    elif how == "truncate":
        full = disk.open(failing("a"), write=True)
        full.truncate(0)
        full.close()
    else:
        disk.capacity_bytes = 8
    assert file.pwritev([b"xyzXYZ"], 0) == 4
    file.close()


def test_a_removed_file_takes_space_in_memory_until_it_is_closed() -> None:
    disk = MemoryDisk(capacity_bytes=4)
    file = disk.create("/a")
    file.pwritev([b"full"], 0)
    disk.remove("/a")
    other = disk.create("/b")
    assert code_of(lambda: other.pwritev([b"x"], 0)) == errno.ENOSPC
    file.close()
    assert other.pwritev([b"x"], 0) == 1


def test_write_whole_on_a_full_disk_leaves_the_old_file(failing: Place) -> None:
    write_whole(failing.disk, failing("a"), b"old")
    failing.disk.capacity_bytes = failing.disk.used_bytes + 2
    assert code_of(lambda: write_whole(failing.disk, failing("a"), b"newer")) == errno.ENOSPC
    assert failing.read("a") == b"old"
    failing.disk.capacity_bytes = None
    write_whole(failing.disk, failing("a"), b"newer")
    assert failing.read("a") == b"newer"


# --- Power cuts ------------------------------------------------------------------------------------------

SEEDS = range(200)


def put(disk: MemoryDisk, path: str, content: bytes, *, sync: bool = False) -> None:
    file = disk.create(path)
    file.pwritev([content], 0)
    if sync:
        file.sync()
    file.close()


def left_by_some(disk: MemoryDisk) -> Iterator[MemoryDisk]:
    return (disk.after_power_cut("some", seed) for seed in SEEDS)


def contents(disk: MemoryDisk) -> dict[str, bytes]:
    return {path: disk.read(path) for path in disk.paths()}


def test_what_was_synced_with_its_name_survives_every_cut() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"kept" * 500, sync=True)
    disk.sync_directory("/")
    for left in (disk.after_power_cut("all"), disk.after_power_cut("none"), *left_by_some(disk)):
        assert contents(left) == {"/a": b"kept" * 500}


def test_a_synced_file_without_a_synced_name_is_gone() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"content", sync=True)
    assert contents(disk.after_power_cut("none")) == {}
    assert contents(disk.after_power_cut("all")) == {"/a": b"content"}
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {(), ("/a",)}


def test_a_synced_name_of_an_unsynced_file_is_an_empty_file() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"content")
    disk.sync_directory("/")
    assert contents(disk.after_power_cut("none")) == {"/a": b""}


def test_a_rename_that_was_not_synced_may_be_undone_with_the_old_target_back() -> None:
    disk = MemoryDisk()
    disk.write("/source", b"new")
    disk.write("/target", b"old")
    disk.rename("/source", "/target")
    undone, done = {"/source": b"new", "/target": b"old"}, {"/target": b"new"}
    assert contents(disk.after_power_cut("none")) == undone
    assert contents(disk.after_power_cut("all")) == done
    assert {len(contents(left)) for left in left_by_some(disk)} == {1, 2}
    assert all(contents(left) in (undone, done) for left in left_by_some(disk))
    disk = disk.after_power_cut("all")
    disk.sync_directory("/")
    assert contents(disk.after_power_cut("none")) == done


def test_a_rename_before_the_sync_of_the_file_may_leave_it_empty() -> None:
    disk = MemoryDisk()
    disk.write("/target", b"old")
    put(disk, "/source", b"new")
    disk.rename("/source", "/target")
    disk.sync_directory("/")
    assert contents(disk.after_power_cut("none")) == {"/target": b""}


def test_a_removal_that_was_not_synced_may_be_undone() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"content")
    disk.remove("/a")
    assert contents(disk.after_power_cut("none")) == {"/a": b"content"}
    assert contents(disk.after_power_cut("all")) == {}
    disk = disk.after_power_cut("all")
    disk.sync_directory("/")
    assert contents(disk.after_power_cut("none")) == {}


def test_names_of_one_directory_are_lost_independently() -> None:
    disk = MemoryDisk()
    for name in ("/a", "/b"):
        put(disk, name, b"")
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {(), ("/a",), ("/b",), ("/a", "/b")}


def test_of_one_name_a_later_change_never_survives_an_earlier_one() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"first", sync=True)
    disk.remove("/a")
    put(disk, "/a", b"second", sync=True)
    disk.rename("/a", "/b")
    allowed: list[dict[str, bytes]] = [{}, {"/a": b"first"}, {"/a": b"second"}, {"/b": b"second"}]
    assert all(contents(left) in allowed for left in left_by_some(disk))
    assert len({str(contents(left)) for left in left_by_some(disk)}) == 4


def test_a_file_that_moved_twice_is_found_once() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"content")
    disk.rename("/a", "/b")
    disk.rename("/b", "/c")
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {("/a",), ("/b",), ("/c",)}


@pytest.mark.parametrize("synced", ["/from", "/to"])
def test_a_rename_between_directories_is_durable_whole_by_the_sync_of_either(synced: str) -> None:
    disk = MemoryDisk()
    disk.make_directory("/from")
    disk.make_directory("/to")
    disk.write("/from/a", b"content")
    disk.rename("/from/a", "/to/b")
    assert all(len(contents(left)) == 1 for left in left_by_some(disk))
    assert contents(disk.after_power_cut("none")) == {"/from/a": b"content"}
    disk = disk.after_power_cut("all")
    disk.sync_directory(synced)
    assert contents(disk.after_power_cut("none")) == {"/to/b": b"content"}


def test_a_durable_rename_settles_what_happened_to_its_names_before() -> None:
    disk = MemoryDisk()
    disk.make_directory("/from")
    disk.make_directory("/to")
    put(disk, "/from/a", b"")
    disk.rename("/from/a", "/to/b")
    disk.sync_directory("/to")
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {("/to/b",)}


def test_syncing_one_directory_leaves_the_names_of_another_undurable() -> None:
    disk = MemoryDisk()
    for directory in ("/a", "/b"):
        disk.make_directory(directory)
        put(disk, directory + "/file", b"")
    disk.sync_directory("/a")
    assert disk.after_power_cut("none").paths() == ["/a/file"]


def test_made_directories_are_durable_with_their_parents() -> None:
    disk = MemoryDisk()
    disk.make_directory("/a/b/c")
    assert disk.changes == 6
    left = disk.after_power_cut("none")
    assert (left.list_directory("/a/b"), left.list_directory("/")) == (["c"], ["a"])


def test_a_directory_made_just_before_the_cut_may_be_there_or_not() -> None:
    disk = MemoryDisk()
    disk.cut_power_at(2)
    with pytest.raises(PowerCut):
        disk.make_directory("/a")
    assert disk.after_power_cut("all").list_directory("/") == ["a"]
    assert disk.after_power_cut("none").list_directory("/") == []


def test_writes_that_were_not_synced_are_kept_lost_or_torn_at_sectors() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"o" * 2000)
    file = disk.open("/a", write=True)
    file.pwritev([b"n" * 1500], 300)
    states = {left.read("/a") for left in left_by_some(disk)}
    assert {disk.after_power_cut("all").read("/a"), disk.after_power_cut("none").read("/a")} <= states
    assert len(states) > 5
    edges = [300, 512, 1024, 1536, 1800]
    for state in states:
        assert (state[:300], state[1800:]) == (b"o" * 300, b"o" * 200)
        assert all(len(set(state[start:end])) == 1 for start, end in itertools.pairwise(edges))


def test_a_later_write_may_survive_an_earlier_one_and_sizes_without_bytes() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"", sync=True)
    disk.sync_directory("/")
    file = disk.open("/a", write=True)
    file.pwritev([b"1" * 10], 0)
    file.pwritev([b"2" * 10], 10)
    states = {left.read("/a") for left in left_by_some(disk)}
    ones, twos, zeros = b"1" * 10, b"2" * 10, bytes(10)
    assert states == {b"", ones, zeros, zeros + zeros, ones + zeros, zeros + twos, ones + twos}


def test_a_truncate_that_was_not_synced_may_be_undone() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"0123456789")
    file = disk.open("/a", write=True)
    file.truncate(2)
    file.pwritev([b"X"], 2)
    assert disk.after_power_cut("none").read("/a") == b"0123456789"
    states = {left.read("/a") for left in left_by_some(disk)}
    assert states == {b"0123456789", b"01", b"01X", b"01\0", b"01X3456789"}
    disk = disk.after_power_cut("all")
    disk.open("/a").sync()
    assert disk.after_power_cut("none").read("/a") == b"01X"


def test_the_write_that_the_cut_hit_leaves_a_prefix_of_itself() -> None:
    data, lengths = bytes(range(100)), set()
    for change in range(2, 40):
        disk = MemoryDisk()
        file = disk.create("/a")
        for number in range(change - 2):
            file.pwritev([data], number * 100)
        disk.cut_power_at(change)
        with pytest.raises(PowerCut):
            file.pwritev([data], (change - 2) * 100)
        whole, torn = divmod(len(disk.after_power_cut("all").read("/a")), 100)
        assert disk.after_power_cut("all").read("/a") == data * whole + data[:torn]
        assert whole == change - 2 or (whole, torn) == (change - 1, 0)
        lengths.add(torn)
    assert len(lengths) > 10


def test_a_call_at_which_the_power_is_cut_has_not_happened() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    disk.cut_power_at(disk.changes + 1)
    with pytest.raises(PowerCut):
        disk.rename("/a", "/b")
    assert disk.after_power_cut("all").paths() == ["/a"]


def test_after_the_cut_every_call_raises() -> None:
    disk = MemoryDisk()
    place = Place(disk, "/")
    file, lock = disk.create("/a"), disk.lock("/lock")
    disk.cut_power_at(disk.changes + 1)
    calls: list[Callable[[], object]] = [
        file.sync,
        lambda: file.pread(1, 0),
        lambda: file.pread_into(memoryview(bytearray(1)), 0),
        lambda: file.pwritev([b"x"], 0),
        lambda: file.truncate(0),
        file.size,
        file.is_linked,
        file.close,
        lock.close,
        lambda: disk.open("/a"),
        lambda: disk.create("/b"),
        lambda: disk.rename("/a", "/b"),
        lambda: disk.remove("/a"),
        lambda: disk.make_directory("/d"),
        lambda: disk.list_directory("/"),
        lambda: disk.sync_directory("/"),
        lambda: disk.size("/a"),
        lambda: disk.lock("/other"),
    ]
    for call in calls:
        with pytest.raises(PowerCut):
            call()
    assert (disk.is_off, contents(disk)) == (True, {"/a": b"", "/lock": b""})
    assert place.disk.changes == 3


def test_a_power_cut_is_not_swallowed_by_handlers_of_exceptions() -> None:
    assert not issubclass(PowerCut, Exception)


def test_a_cut_in_the_past_is_refused() -> None:
    disk = MemoryDisk()
    disk.create("/a")
    with pytest.raises(ValueError, match="past"):
        disk.cut_power_at(1)


def test_reading_counts_no_change_and_every_changing_call_counts_one() -> None:
    disk = MemoryDisk()
    counts = []
    file = disk.create("/a")
    calls: list[Callable[[], object]] = [
        lambda: file.pwritev([b"x", b"y"], 0),
        lambda: file.truncate(1),
        file.sync,
        lambda: disk.rename("/a", "/b"),
        lambda: disk.sync_directory("/"),
        lambda: disk.lock("/lock"),
        lambda: disk.remove("/b"),
        lambda: file.pread(1, 0),
        file.close,
        lambda: disk.open("/lock"),
        lambda: disk.list_directory("/"),
        lambda: disk.size("/lock"),
        lambda: disk.make_directory("/"),
    ]
    for call in calls:
        call()
        counts.append(disk.changes)
    assert counts == [2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8]


def test_a_cut_frees_locks_and_kills_the_old_files_but_not_the_old_memory() -> None:
    disk = MemoryDisk()
    lock, file = disk.lock("/lock"), disk.create("/a")
    left = disk.after_power_cut("all")
    left.lock("/lock")
    with pytest.raises(PowerCut):
        file.pwritev([b"x"], 0)
    with pytest.raises(PowerCut):
        lock.close()
    left.write("/a", b"changed")
    assert (disk.read("/a"), disk.after_power_cut("all").read("/a")) == (b"", b"")


def test_a_seed_leaves_the_same_disk_each_time() -> None:
    disk = MemoryDisk()
    for number in range(8):
        put(disk, f"/{number}", bytes([number]) * 3000)
    states = [[contents(disk.after_power_cut("some", seed)) for seed in range(20)] for _ in range(2)]
    assert states[0] == states[1]
    assert len({str(state) for state in states[0]}) > 10


def test_what_a_kill_left_unsynced_a_later_power_cut_may_take() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"content")
    survivor = disk.after_power_cut("all")
    assert contents(survivor) == {"/a": b"content"}
    assert contents(survivor.after_power_cut("none")) == {}
    survivor = disk.after_power_cut("all")
    survivor.open("/a").sync()
    survivor.sync_directory("/")
    assert contents(survivor.after_power_cut("none")) == {"/a": b"content"}


def test_a_power_cut_leaves_a_disk_on_which_everything_is_durable() -> None:
    disk = MemoryDisk()
    for number in range(8):
        put(disk, f"/{number}", bytes([number]) * 3000)
    for left in left_by_some(disk):
        assert contents(left.after_power_cut("none")) == contents(left)


def test_what_is_written_after_a_power_cut_is_not_durable_before_its_sync() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    left = disk.after_power_cut("none")
    left.open("/a", write=True).pwritev([b"new"], 0)
    assert (left.read("/a"), left.after_power_cut("none").read("/a")) == (b"new", b"old")


def test_a_seed_draws_again_at_each_change() -> None:
    disk = MemoryDisk()
    for number in range(8):
        put(disk, f"/{number}", b"")
    drawn = set()
    for changes in range(10):
        kernel_lives = disk.after_power_cut("all")
        for _ in range(changes):
            kernel_lives.open("/0").sync()
        drawn.add(tuple(kernel_lives.after_power_cut("some", 0).paths()))
    assert len(drawn) > 3


def test_a_survivor_counts_the_space_that_is_taken() -> None:
    disk = MemoryDisk(capacity_bytes=10)
    put(disk, "/a", b"12345678")
    left = disk.after_power_cut("all")
    assert (left.capacity_bytes, left.used_bytes) == (10, 8)
    assert disk.after_power_cut("none").used_bytes == 0


# --- A sync that failed ----------------------------------------------------------------------------------


def test_what_a_failed_sync_dropped_shows_but_is_never_durable() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    file = disk.open("/a", write=True)
    file.pwritev([b"lost"], 3)
    disk.fail("sync", error=errno.ENOSPC)
    assert code_of(file.sync) == errno.ENOSPC
    file.sync()
    assert (file.pread(100, 0), disk.after_power_cut("all").read("/a")) == (b"oldlost", b"oldlost")
    assert {left.read("/a") for left in (disk.after_power_cut("none"), *left_by_some(disk))} == {b"old"}


def test_what_is_written_after_a_failed_sync_is_durable_around_a_hole() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    file = disk.open("/a", write=True)
    file.pwritev([b"lost"], 3)
    disk.fail("sync")
    assert code_of(file.sync) == errno.EIO
    file.pwritev([b"kept"], 7)
    file.sync()
    assert disk.after_power_cut("none").read("/a") == b"old\0\0\0\0kept"


def test_what_a_failed_sync_dropped_stays_dropped_over_a_kill() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    file = disk.open("/a", write=True)
    file.pwritev([b"lost"], 3)
    disk.fail("sync")
    assert code_of(file.sync) == errno.EIO
    disk = disk.after_power_cut("all")
    disk.open("/a").sync()
    assert (disk.read("/a"), disk.after_power_cut("none").read("/a")) == (b"oldlost", b"old")


def test_a_failed_sync_of_one_file_drops_nothing_of_another() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"")
    disk.write("/b", b"")
    first, second = disk.open("/a", write=True), disk.open("/b", write=True)
    first.pwritev([b"lost"], 0)
    second.pwritev([b"kept"], 0)
    disk.fail("sync")
    assert code_of(first.sync) == errno.EIO
    second.sync()
    assert contents(disk.after_power_cut("none")) == {"/a": b"", "/b": b"kept"}


def test_a_closed_file_drops_nothing_by_a_sync_that_is_refused() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"")
    file, closed = disk.open("/a", write=True), disk.open("/a", write=True)
    closed.close()
    file.pwritev([b"kept"], 0)
    assert code_of(closed.sync) == errno.EBADF
    file.sync()
    assert disk.after_power_cut("none").read("/a") == b"kept"


# --- Damage by hand --------------------------------------------------------------------------------------


def test_damage_is_durable_at_once_and_seen_by_open_files() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"\x00\x00")
    file = disk.open("/a")
    disk.flip_bit("/a", 1, 7)
    assert (file.pread(2, 0), disk.after_power_cut("none").read("/a")) == (b"\x00\x80", b"\x00\x80")


def test_a_file_put_there_by_hand_is_durable_without_making_others_so() -> None:
    disk = MemoryDisk()
    put(disk, "/other", b"")
    put(disk, "/a", b"longer than the next")
    disk.write("/a", b"content")
    assert contents(disk.after_power_cut("none")) == {"/a": b"content"}
    assert disk.used_bytes == 7
    left = disk.after_power_cut("all")
    left.open("/a").sync()
    assert contents(left.after_power_cut("none")) == {"/a": b"content"}


def test_paths_names_every_file_in_order() -> None:
    disk = MemoryDisk()
    disk.make_directory("/d/e")
    for path in ("/z", "/d/e/f", "/d/a"):
        disk.write(path, b"")
    assert disk.paths() == ["/d/a", "/d/e/f", "/z"]


def test_relative_paths_and_detours_start_at_the_root() -> None:
    disk = MemoryDisk()
    disk.make_directory("d")
    disk.write("d/../a", b"content")
    assert (disk.paths(), disk.read("./d/.././a"), disk.list_directory(".")) == (
        ["/a"],
        b"content",
        ["d", "a"],
    )


# --- Threads ---------------------------------------------------------------------------------------------


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can, so that a missing lock shows
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_may_write_and_sync_one_file_at_once() -> None:
    disk, start = MemoryDisk(), threading.Barrier(4)
    disk.write("/a", b"")
    file = disk.open("/a", write=True)

    def work(thread: int) -> None:
        start.wait()
        for number in range(thread, 20_000, 4):
            file.pwritev([bytes([thread])], number)
            file.sync()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert (disk.changes, disk.used_bytes) == (40_000, 20_000)
    assert disk.after_power_cut("none").read("/a") == disk.read("/a") == bytes(range(4)) * 5000


# --- Any changes, then a cut, against the dumb definition ------------------------------------------------

FILES = st.sampled_from(["a", "b", "c"])
CHANGES = st.one_of(
    st.tuples(st.just("create"), FILES),
    st.tuples(st.just("write"), FILES, SMALL, st.integers(1, 1500)),
    st.tuples(st.just("truncate"), FILES, SMALL),
    st.tuples(st.just("sync"), FILES),
    st.tuples(st.just("rename"), FILES, FILES),
    st.tuples(st.just("remove"), FILES),
    st.tuples(st.just("sync_directory")),
)


@dataclass(eq=False)
class Copies:
    """A file as the definition sees it: every content it had since its last sync, that one first."""

    since_sync: list[bytes] = field(default_factory=lambda: [b""])

    def allows(self, content: bytes) -> bool:
        if not min(map(len, self.since_sync)) <= len(content) <= max(map(len, self.since_sync)):
            return False
        # Each byte is one that stood there, or a zero where the size grew without the bytes.
        return all(
            byte in {copy[at] if at < len(copy) else 0 for copy in self.since_sync}
            for at, byte in enumerate(content)
        )


class Definition:
    """What a disk of one directory may be after a cut, by remembering everything since the last syncs."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.history: list[dict[str, Copies]] = [{}]  # names since the last sync of the directory, that first
        self.fills = itertools.cycle(range(1, 256))

    def change(self, kind: str, *arguments: Any) -> None:
        names = dict(self.history[-1])
        if kind == "sync_directory":
            self.disk.sync_directory("/")
            self.history = [names]
            return
        name = arguments[0]
        if (name in names) == (kind == "create"):
            return
        if kind == "create":
            self.disk.create(name)
            names[name] = Copies()
        elif kind == "remove":
            self.disk.remove(name)
            del names[name]
        elif kind == "rename":
            self.disk.rename(name, arguments[1])
            names[arguments[1]] = names.pop(name)
        else:
            self.change_file(self.disk.open(name, write=True), names[name], kind, *arguments[1:])
        self.history.append(names)

    def change_file(self, file: File, copies: Copies, kind: str, *numbers: int) -> None:
        content = copies.since_sync[-1]
        if kind == "sync":
            file.sync()
            copies.since_sync = [content]
        elif kind == "truncate":
            file.truncate(numbers[0])
            copies.since_sync.append(content[: numbers[0]].ljust(numbers[0], b"\0"))
        else:
            offset, data = numbers[0], bytes([next(self.fills)]) * numbers[1]
            file.pwritev([data], offset)
            written = content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]
            copies.since_sync.append(written)

    def newest(self) -> dict[str, bytes]:
        return {f"/{name}": copies.since_sync[-1] for name, copies in self.history[-1].items()}

    def durable(self) -> dict[str, bytes]:
        return {f"/{name}": copies.since_sync[0] for name, copies in self.history[0].items()}

    def allows(self, name: str, content: bytes | None) -> bool:
        """Whether the name held, at some time since the sync, a file that may have this content (or none)."""
        held = [names.get(name) for names in self.history]
        if content is None:
            return None in held
        return any(copies is not None and copies.allows(content) for copies in held)


@settings(deadline=None)
@given(st.lists(CHANGES, max_size=40), st.integers(0, 2**32))
def test_after_any_changes_a_cut_leaves_what_the_definition_allows(changes: list[Any], seed: int) -> None:
    definition = Definition()
    for change in changes:
        definition.change(*change)
    disk = definition.disk
    assert contents(disk) == contents(disk.after_power_cut("all")) == definition.newest()
    assert contents(disk.after_power_cut("none")) == definition.durable()
    assert contents(disk.after_power_cut("all").after_power_cut("none")) == definition.durable()
    left = contents(disk.after_power_cut("some", seed))
    for name in ("a", "b", "c"):
        assert definition.allows(name, left.get(f"/{name}")), (name, left.get(f"/{name}"))


# --- write_whole, and checkers that must fail ------------------------------------------------------------

OLD, NEW = b"old" * 500, b"newer" * 400
Replace = Callable[[Disk, str, bytes], None]


def replace_without_sync(disk: Disk, path: str, content: bytes) -> None:
    file = disk.create(path + ".new")
    file.pwritev([content], 0)
    file.close()
    disk.rename(path + ".new", path)
    disk.sync_directory(os.path.dirname(path))


def replace_without_directory_sync(disk: Disk, path: str, content: bytes) -> None:
    file = disk.create(path + ".new")
    file.pwritev([content], 0)
    file.sync()
    file.close()
    disk.rename(path + ".new", path)


def replace_by_removing_first(disk: Disk, path: str, content: bytes) -> None:
    disk.remove(path)
    file = disk.create(path)
    file.pwritev([content], 0)
    file.sync()
    file.close()
    disk.sync_directory(os.path.dirname(path))


def replace_in_place(disk: Disk, path: str, content: bytes) -> None:
    file = disk.open(path, write=True)
    file.truncate(0)
    file.pwritev([content], 0)
    file.sync()
    file.close()


def sweep_replacing(replace: Replace, *, left_aside: bool = False) -> int:
    def prepare(disk: MemoryDisk) -> None:
        disk.make_directory("/d")
        disk.write("/d/a", OLD)
        if left_aside:
            disk.write("/d/.a.new", b"left by a crash")

    def run(disk: MemoryDisk, log: list[Any]) -> None:
        replace(disk, "/d/a", NEW)
        log.append("replaced")

    def check(disk: MemoryDisk, log: list[Any]) -> None:
        assert disk.read("/d/a") in ([NEW] if log else [OLD, NEW])

    return sweep(run, check, prepare=prepare, recover=run, seeds=range(10))


@pytest.mark.parametrize("left_aside", [False, True])
def test_write_whole_is_atomic_and_durable_whenever_the_power_goes(left_aside: bool) -> None:
    assert sweep_replacing(write_whole, left_aside=left_aside) > 400


@pytest.mark.parametrize(
    "replace",
    [replace_without_sync, replace_without_directory_sync, replace_by_removing_first, replace_in_place],
)
def test_a_replacement_that_is_not_atomic_and_durable_is_caught(replace: Replace) -> None:
    with pytest.raises(AssertionError, match="a power cut broke it"):
        sweep_replacing(replace)


def test_the_sync_of_nothing_but_the_file_is_caught_for_a_new_name() -> None:
    def run(disk: MemoryDisk, log: list[Any]) -> None:
        put(disk, "/a", b"content", sync=True)
        log.append("durable")

    def check(disk: MemoryDisk, log: list[Any]) -> None:
        assert not log or disk.read("/a") == b"content"

    with pytest.raises(AssertionError, match=r"Cut\(change=4, keep='none', seed=0\)"):
        sweep(run, check)
