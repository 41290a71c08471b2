"""Tests which states a power cut of MemoryDisk may leave, and that sweeps detect missing durability."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from disks import MemoryDisk, PowerCut
from disks.crash_sweep import sweep
from disks.errors import code_of
from hypothesis import given
from hypothesis import strategies as st

from rt.log.disk import Disk, File
from rt.log.whole_files import write_whole

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


def test_synced_file_may_be_lost_if_its_directory_is_not_synced() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"content", sync=True)
    assert contents(disk.after_power_cut("none")) == {}
    assert contents(disk.after_power_cut("all")) == {"/a": b"content"}
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {(), ("/a",)}


def test_unsynced_rename_may_be_undone_and_restores_old_target() -> None:
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


def test_unsynced_names_of_one_directory_are_lost_independently() -> None:
    disk = MemoryDisk()
    for name in ("/a", "/b"):
        put(disk, name, b"")
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {(), ("/a",), ("/b",), ("/a", "/b")}


def test_changes_of_one_name_survive_only_in_order() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"first", sync=True)
    disk.remove("/a")
    put(disk, "/a", b"second", sync=True)
    disk.rename("/a", "/b")
    allowed: list[dict[str, bytes]] = [{}, {"/a": b"first"}, {"/a": b"second"}, {"/b": b"second"}]
    assert all(contents(left) in allowed for left in left_by_some(disk))
    assert len({str(contents(left)) for left in left_by_some(disk)}) == 4


def test_file_renamed_twice_is_found_under_one_name_only() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"content")
    disk.rename("/a", "/b")
    disk.rename("/b", "/c")
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {("/a",), ("/b",), ("/c",)}


@pytest.mark.parametrize("synced", ["/from", "/to"])
def test_rename_between_directories_is_atomic_and_durable_after_sync_of_either(synced: str) -> None:
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


def test_durable_rename_makes_earlier_changes_of_its_names_durable() -> None:
    disk = MemoryDisk()
    disk.make_directory("/from")
    disk.make_directory("/to")
    put(disk, "/from/a", b"")
    disk.rename("/from/a", "/to/b")
    disk.sync_directory("/to")
    assert {tuple(left.paths()) for left in left_by_some(disk)} == {("/to/b",)}


def test_directory_sync_does_not_make_names_of_another_directory_durable() -> None:
    disk = MemoryDisk()
    for directory in ("/a", "/b"):
        disk.make_directory(directory)
        put(disk, directory + "/file", b"")
    disk.sync_directory("/a")
    assert disk.after_power_cut("none").paths() == ["/a/file"]


def test_make_directory_is_durable_with_its_parents() -> None:
    disk = MemoryDisk()
    disk.make_directory("/a/b/c")
    assert disk.changes == 6
    left = disk.after_power_cut("none")
    assert (left.list_directory("/a/b"), left.list_directory("/")) == (["c"], ["a"])


def test_directory_made_just_before_power_cut_may_be_kept_or_lost() -> None:
    disk = MemoryDisk()
    disk.cut_power_at(2)
    with pytest.raises(PowerCut):
        disk.make_directory("/a")
    assert disk.after_power_cut("all").list_directory("/") == ["a"]
    assert disk.after_power_cut("none").list_directory("/") == []


def test_unsynced_writes_are_kept_lost_or_torn_at_sectors() -> None:
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


def test_unsynced_writes_survive_independently_and_size_may_survive_without_bytes() -> None:
    disk = MemoryDisk()
    put(disk, "/a", b"", sync=True)
    disk.sync_directory("/")
    file = disk.open("/a", write=True)
    file.pwritev([b"1" * 10], 0)
    file.pwritev([b"2" * 10], 10)
    states = {left.read("/a") for left in left_by_some(disk)}
    ones, twos, zeros = b"1" * 10, b"2" * 10, bytes(10)
    assert states == {b"", ones, zeros, zeros + zeros, ones + zeros, zeros + twos, ones + twos}


def test_unsynced_truncate_may_be_undone() -> None:
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


def test_write_hit_by_power_cut_leaves_prefix_of_its_bytes() -> None:
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


def test_rename_hit_by_power_cut_has_no_effect() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    disk.cut_power_at(disk.changes + 1)
    with pytest.raises(PowerCut):
        disk.rename("/a", "/b")
    assert disk.after_power_cut("all").paths() == ["/a"]


def test_every_call_after_power_cut_raises_power_cut() -> None:
    disk = MemoryDisk()
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
    assert disk.changes == 3


def test_power_cut_is_not_a_subclass_of_exception() -> None:
    assert not issubclass(PowerCut, Exception)


def test_power_cut_at_past_change_raises_value_error() -> None:
    disk = MemoryDisk()
    disk.create("/a")
    with pytest.raises(ValueError, match="past"):
        disk.cut_power_at(1)


def test_change_count_grows_by_one_per_changing_call_and_not_for_reads() -> None:
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


def test_power_cut_frees_locks_fails_old_handles_and_keeps_old_disk_unchanged() -> None:
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


def test_same_seed_leaves_same_disk_after_power_cut() -> None:
    disk = MemoryDisk()
    for number in range(8):
        put(disk, f"/{number}", bytes([number]) * 3000)
    states = [[contents(disk.after_power_cut("some", seed)) for seed in range(20)] for _ in range(2)]
    assert states[0] == states[1]
    assert len({str(state) for state in states[0]}) > 10


def test_disk_left_by_power_cut_is_fully_durable() -> None:
    disk = MemoryDisk()
    for number in range(8):
        put(disk, f"/{number}", bytes([number]) * 3000)
    for left in left_by_some(disk):
        assert contents(left.after_power_cut("none")) == contents(left)


def test_write_after_power_cut_is_not_durable_before_sync() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    left = disk.after_power_cut("none")
    left.open("/a", write=True).pwritev([b"new"], 0)
    assert (left.read("/a"), left.after_power_cut("none").read("/a")) == (b"new", b"old")


def test_same_seed_draws_different_outcomes_as_change_count_grows() -> None:
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


def test_disk_left_by_power_cut_keeps_capacity_and_counts_used_bytes() -> None:
    disk = MemoryDisk(capacity_bytes=10)
    put(disk, "/a", b"12345678")
    left = disk.after_power_cut("all")
    assert (left.capacity_bytes, left.used_bytes) == (10, 8)
    assert disk.after_power_cut("none").used_bytes == 0


# --- A sync that failed ----------------------------------------------------------------------------------


def test_bytes_dropped_by_failed_sync_are_readable_but_never_durable() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    file = disk.open("/a", write=True)
    file.pwritev([b"lost"], 3)
    disk.fail("sync", error=errno.ENOSPC)
    assert code_of(file.sync) == errno.ENOSPC
    file.sync()
    assert (file.pread(100, 0), disk.after_power_cut("all").read("/a")) == (b"oldlost", b"oldlost")
    assert {left.read("/a") for left in (disk.after_power_cut("none"), *left_by_some(disk))} == {b"old"}


def test_write_after_failed_sync_is_durable_and_dropped_bytes_read_as_zeros() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    file = disk.open("/a", write=True)
    file.pwritev([b"lost"], 3)
    disk.fail("sync")
    assert code_of(file.sync) == errno.EIO
    file.pwritev([b"kept"], 7)
    file.sync()
    assert disk.after_power_cut("none").read("/a") == b"old\0\0\0\0kept"


def test_bytes_dropped_by_failed_sync_stay_non_durable_after_kill() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"old")
    file = disk.open("/a", write=True)
    file.pwritev([b"lost"], 3)
    disk.fail("sync")
    assert code_of(file.sync) == errno.EIO
    disk = disk.after_power_cut("all")
    disk.open("/a").sync()
    assert (disk.read("/a"), disk.after_power_cut("none").read("/a")) == (b"oldlost", b"old")


def test_failed_sync_of_one_file_drops_no_bytes_of_another() -> None:
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


def test_rejected_sync_of_closed_file_drops_no_bytes() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"")
    file, closed = disk.open("/a", write=True), disk.open("/a", write=True)
    closed.close()
    file.pwritev([b"kept"], 0)
    assert code_of(closed.sync) == errno.EBADF
    file.sync()
    assert disk.after_power_cut("none").read("/a") == b"kept"


# --- Corruption by hand ----------------------------------------------------------------------------------


def test_flipped_bit_is_durable_immediately_and_visible_to_open_files() -> None:
    disk = MemoryDisk()
    disk.write("/a", b"\x00\x00")
    file = disk.open("/a")
    disk.flip_bit("/a", 1, 7)
    assert (file.pread(2, 0), disk.after_power_cut("none").read("/a")) == (b"\x00\x80", b"\x00\x80")


def test_direct_disk_write_is_durable_without_making_other_files_durable() -> None:
    disk = MemoryDisk()
    put(disk, "/other", b"")
    put(disk, "/a", b"longer than the next")
    disk.write("/a", b"content")
    assert contents(disk.after_power_cut("none")) == {"/a": b"content"}
    assert disk.used_bytes == 7
    left = disk.after_power_cut("all")
    left.open("/a").sync()
    assert contents(left.after_power_cut("none")) == {"/a": b"content"}


def test_paths_returns_every_file_in_order() -> None:
    disk = MemoryDisk()
    disk.make_directory("/d/e")
    for path in ("/z", "/d/e/f", "/d/a"):
        disk.write(path, b"")
    assert disk.paths() == ["/d/a", "/d/e/f", "/z"]


def test_relative_paths_resolve_from_root() -> None:
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
    sys.setswitchinterval(1e-6)  # switch threads as often as possible, so that a missing lock shows
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_may_write_and_sync_one_file_concurrently() -> None:
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


# --- Any changes, then a cut, compared with the simple definition ----------------------------------------

SMALL = st.integers(0, 1500)
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
    """A file in the definition: its content at the last sync, then every later content."""

    since_sync: list[bytes] = field(default_factory=lambda: [b""])

    def allows(self, content: bytes) -> bool:
        if not min(map(len, self.since_sync)) <= len(content) <= max(map(len, self.since_sync)):
            return False
        # Each byte is one that was at this offset, or a zero where the file grew and the data were lost.
        return all(
            byte in {copy[at] if at < len(copy) else 0 for copy in self.since_sync}
            for at, byte in enumerate(content)
        )


class Definition:
    """The possible states of a one-directory disk after a cut, from all changes since the last syncs."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        # names at the last directory sync, then after each change
        self.history: list[dict[str, Copies]] = [{}]
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
        """Return whether a cut may leave this content (None: no file) under the name."""
        held = [names.get(name) for names in self.history]
        if content is None:
            return None in held
        return any(copies is not None and copies.allows(content) for copies in held)


@given(st.lists(CHANGES, max_size=40), st.integers(0, 2**32))
def test_power_cut_after_any_changes_leaves_state_allowed_by_definition(
    changes: list[Any], seed: int
) -> None:
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
def test_write_whole_is_atomic_and_durable_at_every_power_cut(left_aside: bool) -> None:
    assert sweep_replacing(write_whole, left_aside=left_aside) > 400


@pytest.mark.parametrize(
    "replace",
    [replace_without_sync, replace_without_directory_sync, replace_by_removing_first, replace_in_place],
)
def test_sweep_detects_non_atomic_or_non_durable_file_replacement(replace: Replace) -> None:
    with pytest.raises(AssertionError, match="a power cut broke it"):
        sweep_replacing(replace)


def test_sweep_detects_new_file_without_directory_sync() -> None:
    def run(disk: MemoryDisk, log: list[Any]) -> None:
        put(disk, "/a", b"content", sync=True)
        log.append("durable")

    def check(disk: MemoryDisk, log: list[Any]) -> None:
        assert not log or disk.read("/a") == b"content"

    with pytest.raises(AssertionError, match=r"Cut\(change=4, keep='none', seed=0\)"):
        sweep(run, check)
