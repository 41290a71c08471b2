"""Tests that test disks behave like the real disk, and that injected faults and full disks work."""

from __future__ import annotations

import errno
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk, MemoryDisk
from disks.errors import code_of
from hypothesis import example, given
from hypothesis import strategies as st

from rt.log.disk import File, RealDisk
from rt.log.whole_files import write_whole


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


@pytest.fixture(params=["real", "memory", "faulty"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        return memory_place()
    return Place(RealDisk() if request.param == "real" else FaultyDisk(RealDisk()), str(tmp_path))


@pytest.fixture(params=["memory", "faulty"])
def failing(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return memory_place() if request.param == "memory" else Place(FaultyDisk(RealDisk()), str(tmp_path))


# --- Conformance: files ----------------------------------------------------------------------------------


def test_new_file_is_empty_and_linked(place: Place) -> None:
    file = place.disk.create(place("a"))
    assert (file.size(), file.pread(10, 0), file.is_linked()) == (0, b"", True)
    file.close()


def test_buffers_of_every_type_are_written_consecutively(place: Place) -> None:
    file = place.disk.create(place("a"))
    assert file.pwritev([b"one", bytearray(b"two"), memoryview(b"_three_")[1:-1], b""], 0) == 11
    assert file.pread(100, 0) == b"onetwothree"
    assert place.read("a") == b"onetwothree"
    file.close()


def test_caller_may_reuse_buffer_after_write(place: Place) -> None:
    buffer = bytearray(b"first")
    file = place.disk.create(place("a"))
    file.pwritev([buffer], 0)
    buffer[:] = b"other"
    assert file.pread(5, 0) == b"first"
    file.close()


@pytest.mark.parametrize("buffers", [[], [b""]])
def test_empty_write_does_not_extend_file(place: Place, buffers: list[bytes]) -> None:
    file = place.disk.create(place("a"))
    assert file.pwritev(buffers, 100) == 0
    assert file.size() == 0
    file.close()


def test_write_accepts_1024_buffers_and_rejects_1025(place: Place) -> None:
    file = place.disk.create(place("a"))
    assert file.pwritev([b"x"] * 1024, 0) == 1024
    assert code_of(lambda: file.pwritev([b"x"] * 1025, 0)) == errno.EINVAL
    file.close()


def test_read_is_short_only_at_end_of_file(place: Place) -> None:
    place.make("a", b"0123456789")
    file = place.disk.open(place("a"))
    assert [file.pread(4, offset) for offset in (0, 8, 10, 99)] == [b"0123", b"89", b"", b""]
    file.close()


def test_pread_into_fills_buffer_and_returns_byte_count(place: Place) -> None:
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


def test_negative_offset_or_size_raises_einval(place: Place) -> None:
    # Not -1: the vectored calls of the C library read it as the file's current position.
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


def test_read_only_file_rejects_changes_but_allows_sync(place: Place) -> None:
    place.make("a", b"old")
    file = place.disk.open(place("a"))
    assert code_of(lambda: file.pwritev([b"x"], 0)) == errno.EBADF
    assert code_of(lambda: file.truncate(0)) == errno.EINVAL
    file.sync()
    file.close()
    assert place.read("a") == b"old"


def test_closed_file_rejects_all_calls_except_close(place: Place) -> None:
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


def test_missing_path_raises_enoent_and_has_size_none(place: Place) -> None:
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


def test_file_used_as_directory_raises_enotdir(place: Place) -> None:
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


def test_directory_used_as_file_raises_eisdir(place: Place) -> None:
    disk, path = place.disk, place("directory")
    disk.make_directory(path)
    calls: list[Callable[[], object]] = [
        lambda: disk.open(path, write=True),
        lambda: disk.remove(path),
        lambda: disk.lock(path),
    ]
    assert [code_of(call) for call in calls] == [errno.EISDIR] * len(calls)
    assert disk.size(path) is not None


def test_make_directory_creates_parents_and_is_idempotent(place: Place) -> None:
    place.disk.make_directory(place("x/y/z"))
    place.make("x/y/z/file")
    place.disk.make_directory(place("x/y/z"))
    place.disk.make_directory(place("x/y"))
    assert (place.names(), place.disk.list_directory(place("x/y/z"))) == (["x"], ["file"])
    place.disk.sync_directory(place("x/y"))


def test_list_directory_returns_files_and_directories(place: Place) -> None:
    for name in ("b", "a", ".hidden"):
        place.make(name)
    place.disk.make_directory(place("directory"))
    place.make("directory/inner")
    assert place.names() == [".hidden", "a", "b", "directory"]


def test_lock_is_linked_until_its_file_is_removed(place: Place) -> None:
    held = place.disk.lock(place("lock"))
    assert held.is_linked()
    place.disk.remove(place("lock"))
    assert not held.is_linked()
    held.close()


def test_lock_raises_blocking_io_error_while_held(place: Place) -> None:
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


def test_lock_keeps_content_of_its_file(place: Place) -> None:
    place.make("lock", b"content")
    place.disk.lock(place("lock")).close()
    assert place.read("lock") == b"content"


def test_write_whole_creates_and_replaces_file_and_clears_temporary_of_crash(place: Place) -> None:
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
    """Makes the calls on one disk, and returns the answer of each."""

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
        return size is not None  # the size of a directory differs between file systems

    def lock(self, name: str) -> None:
        self.locks.setdefault(name, []).append(self.place.disk.lock(self.place(name)))

    def unlock(self, name: str) -> None:
        for lock in self.locks.pop(name, []):
            lock.close()

    def close(self) -> None:
        for closable in itertools.chain(*self.opened.values(), *self.locks.values()):
            closable.close()


MOVES_A_DIRECTORY = [
    ("make_directory", "d/e"),
    ("create", "d/e/f"),
    ("write", "d/e/f", 2, 7),
    ("make_directory", "b"),
    ("rename", "d", "b"),
    ("list", "b"),
    ("list", "b/e"),
    ("size", "b/e/f"),
    ("rename", "b/e/f", "a"),
    ("rename", "a", "none/a"),
    ("create", "none/a"),
    ("remove", "none"),
]
MIXES_KINDS = [
    ("create", "a"),
    ("make_directory", "d"),
    ("make_directory", "b/e"),
    ("create", "b/f"),
    *(("rename", *pair) for pair in (("a", "d"), ("d", "a"), ("d", "b"), ("b/f", "b"), ("b", "b/e/x"))),
    *((call, "a/x") for call in ("create", "remove", "make_directory", "list", "size", "lock")),
    *((call, "d") for call in ("create", "remove", "lock")),
    ("create", "a"),
    ("list", "b"),
]
REPLACES_AND_REMOVES = [
    ("create", "a"),
    ("write", "a", 0, 9),
    ("create", "b"),
    ("write", "b", 0, 5),
    ("rename", "a", "b"),
    ("rename", "b", "b"),
    ("truncate", "b", 3),
    ("truncate", "b", 6),
    ("write", "b", 2, 2),
    ("remove", "b"),
    ("create", "b"),
]


@example(MOVES_A_DIRECTORY)
@example(MIXES_KINDS)
@example(REPLACES_AND_REMOVES)
@given(st.lists(CALLS, max_size=30))
def test_memory_and_faulty_disks_match_real_disk_for_any_calls(calls: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as other:
        real = Player(Place(RealDisk(), root))
        faulty, memory = Player(Place(FaultyDisk(RealDisk()), other)), Player(memory_place())
        try:
            for call in calls:
                assert memory.play(call) == faulty.play(call) == real.play(call), call
        finally:
            real.close()
            faulty.close()


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
def test_fault_fails_one_call_of_requested_operation_only(failing: Place, operation: str) -> None:
    failing.make("a", b"content")
    file = failing.disk.open(failing("a"), write=True)
    failing.disk.fail(operation)
    for other in sorted(OPERATIONS.keys() - {operation, "remove", "rename"}):
        OPERATIONS[other](failing, file)
    assert code_of(lambda: OPERATIONS[operation](failing, file)) == errno.EIO
    OPERATIONS[operation](failing, file)
    file.close()


def test_fault_honors_first_call_repeat_count_and_errno(failing: Place) -> None:
    path = failing.make("a", b"x")
    file = failing.disk.open(path)
    failing.disk.fail("pread", at=2, times=2, error=errno.ENXIO)
    assert file.pread(1, 0) == b"x"
    assert code_of(lambda: file.pread(1, 0)) == errno.ENXIO
    assert code_of(lambda: file.pread_into(memoryview(bytearray(1)), 0)) == errno.ENXIO
    assert file.pread(1, 0) == b"x"
    file.close()


def test_fault_counts_calls_from_its_injection(failing: Place) -> None:
    for name in ("a", "b"):
        failing.make(name)
    failing.disk.fail("create", at=2)
    failing.make("c")
    assert code_of(lambda: failing.make("d")) == errno.EIO
    assert failing.names() == ["a", "b", "c"]


def test_invalid_fault_raises_value_error(failing: Place) -> None:
    for asked in ({"operation": "fsync"}, {"operation": "sync", "at": 0}, {"operation": "sync", "times": 0}):
        with pytest.raises(ValueError, match="invalid fault"):
            failing.disk.fail(**asked)


def test_failed_write_or_rename_changes_nothing(failing: Place) -> None:
    failing.make("a", b"old")
    file = failing.disk.open(failing("a"), write=True)
    failing.disk.fail("pwritev")
    failing.disk.fail("rename")
    assert code_of(lambda: file.pwritev([b"new"], 0)) == errno.EIO
    assert code_of(lambda: failing.disk.rename(failing("a"), failing("b"))) == errno.EIO
    file.close()
    assert (failing.names(), failing.read("a")) == (["a"], b"old")


def test_write_is_short_when_disk_fills_and_raises_enospc_when_full(failing: Place) -> None:
    failing.disk.capacity_bytes = 10
    file = failing.disk.create(failing("a"))
    assert file.pwritev([b"0123", b"4567"], 0) == 8
    assert file.pwritev([b"89", b"abcd"], 8) == 2
    assert code_of(lambda: file.pwritev([b"a"], 10)) == errno.ENOSPC
    assert code_of(lambda: file.pwritev([b"a"], 99)) == errno.ENOSPC
    assert file.pwritev([b""], 10) == 0
    assert (file.pread(100, 0), failing.disk.used_bytes) == (b"0123456789", 10)
    file.close()


def test_full_disk_allows_overwrite_sync_create_and_rename(failing: Place) -> None:
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
def test_full_disk_accepts_writes_after_remove_replace_truncate_or_capacity_increase(
    failing: Place, how: str
) -> None:
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


def test_removed_file_uses_memory_disk_space_until_closed() -> None:
    disk = MemoryDisk(capacity_bytes=4)
    file = disk.create("/a")
    file.pwritev([b"full"], 0)
    disk.remove("/a")
    other = disk.create("/b")
    assert code_of(lambda: other.pwritev([b"x"], 0)) == errno.ENOSPC
    file.close()
    assert other.pwritev([b"x"], 0) == 1


def test_write_whole_on_full_disk_keeps_old_file(failing: Place) -> None:
    write_whole(failing.disk, failing("a"), b"old")
    failing.disk.capacity_bytes = failing.disk.used_bytes + 2
    assert code_of(lambda: write_whole(failing.disk, failing("a"), b"newer")) == errno.ENOSPC
    assert failing.read("a") == b"old"
    failing.disk.capacity_bytes = None
    write_whole(failing.disk, failing("a"), b"newer")
    assert failing.read("a") == b"newer"
