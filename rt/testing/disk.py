"""Disks for tests: `MemoryDisk`, which knows what is durable, and `FaultyDisk`, which makes any disk fail.

The memory disk keeps the strictest promise that POSIX allows, less than most file systems keep: `File.sync`
makes a file's content and size durable but no name, `sync_directory` makes names durable but no content, and
a change that was not synced may survive a power cut or not, whole or torn, whatever its neighbours do. So
what passes here leans on no file system's kindness.
"""

from __future__ import annotations

import errno
import functools
import os
import posixpath
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rt.log.disk import Disk, File, Lock
from rt.log.layout import Buffer

Keep: TypeAlias = Literal["all", "none", "some"]
Operation: TypeAlias = Literal[
    "copy_from",
    "create",
    "list_directory",
    "lock",
    "make_directory",
    "open",
    "pread",
    "pwritev",
    "remove",
    "rename",
    "sync",
    "sync_directory",
    "truncate",
]

_Coin: TypeAlias = Callable[[], bool]  # heads: what it is tossed for survives

_SECTOR_BYTES = 512  # the least unit that drives promise to write whole
_BUFFERS_MAX = 1024  # IOV_MAX of Linux: pwritev(2) refuses more
_DIRECTORY_BYTES = 4096  # what lstat(2) says of a directory on ext4; only that there is a size matters


class PowerCut(BaseException):
    """The power is off. No `Exception`, so that no handler of the program under test outlives it."""


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path))


@functools.lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    """The names on the way from the root; programs ask for the same few paths again and again."""
    return tuple(filter(None, _absolute(path).split("/")))


def _error(code: int, path: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path) if path is not None else OSError(code, os.strerror(code))


# --- Faults: which call fails, and what still fits -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fault:
    """Calls `first` to `end` (counted from 1, half-open) of `operation` raise `error`."""

    operation: Operation
    first: int
    end: int
    error: int


class Faults:
    """The part that both disks share: faults that were asked for, and a limit on space.

    `capacity_bytes` may be changed at any time (None: no limit). `used_bytes` is the sum of the sizes of
    the files that this disk holds or, for a `FaultyDisk`, what it added since it was made.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._lock = threading.RLock()
        self._calls: Counter[Operation] = Counter()
        self._faults: list[_Fault] = []

    def fail(self, operation: Operation, *, at: int = 1, error: int = errno.EIO, times: int = 1) -> None:
        """Let `times` calls of `operation`, from the `at`-th from now on, raise `OSError(error)`.

        A call that fails changes nothing, but see `MemoryDisk` for what a failed `sync` does. "pread"
        stands for `pread_into` too.
        """
        if operation not in get_args(Operation) or at < 1 or times < 1:
            raise ValueError(f"no such fault: {operation=} {at=} {times=}")
        with self._lock:
            first = self._calls[operation] + at
            self._faults.append(_Fault(operation, first, first + times, error))

    def _check(self, operation: Operation) -> None:
        """Count a call of `operation`, and raise if it is one that must fail."""
        with self._lock:
            self._calls[operation] += 1
            call = self._calls[operation]
            for fault in self._faults:
                if fault.operation == operation and fault.first <= call < fault.end:
                    raise _error(fault.error)

    def _fitting(self, size: int, offset: int, wanted: int) -> int:
        """How many of `wanted` bytes may be written at `offset` into a file of `size`; ENOSPC if none."""
        growth = offset + wanted - size
        if self.capacity_bytes is None or wanted == 0 or growth <= 0:
            return wanted
        fitting = wanted - max(0, growth - max(0, self.capacity_bytes - self.used_bytes))
        if fitting <= 0:
            raise _error(errno.ENOSPC)
        return fitting

    def _require_room(self, growth: int) -> None:
        """Raise ENOSPC unless a file may grow by `growth`: holes are charged like data."""
        if self._fitting(0, 0, max(0, growth)) < growth:
            raise _error(errno.ENOSPC)


# --- MemoryDisk: files -----------------------------------------------------------------------------------


def _lengthen(content: bytearray, size: int) -> None:
    content.extend(bytes(max(0, size - len(content))))


@dataclass(frozen=True, slots=True)
class _Write:
    """Bytes written at an offset."""

    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        _lengthen(content, self.offset)
        content[self.offset : self.offset + len(self.data)] = self.data

    def apply_some(self, content: bytearray, coin: _Coin) -> None:
        """Whole, or some sectors of it, or nothing; the size may change without the bytes."""
        if coin():
            self.apply(content)
            return
        if coin():
            for piece in self._sectors():
                if coin():
                    piece.apply(content)
        if coin():
            _lengthen(content, self.offset + len(self.data))

    def _sectors(self) -> Iterator[_Write]:
        start, end = self.offset, self.offset + len(self.data)
        while start < end:
            stop = min(end, (start // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
            yield _Write(start, self.data[start - self.offset : stop - self.offset])
            start = stop


@dataclass(frozen=True, slots=True)
class _Truncate:
    """A new size: cut, or lengthened with zeros."""

    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]
        _lengthen(content, self.size)

    def apply_some(self, content: bytearray, coin: _Coin) -> None:
        if coin():
            self.apply(content)


class _Inode:
    """A file without its name: what readers see, what is on the medium, what was done since the last sync.

    `content` is `durable` with `pending` applied, except after a failed sync: that empties `pending`.
    """

    __slots__ = ("content", "durable", "is_linked", "is_locked", "opened", "pending")

    def __init__(
        self, content: bytearray, durable: bytearray, pending: Sequence[_Write | _Truncate] = ()
    ) -> None:
        self.content = content
        self.durable = durable
        self.pending = list(pending)
        self.is_linked = True
        self.is_locked = False
        self.opened = 0

    def change(self, change: _Write | _Truncate) -> None:
        change.apply(self.content)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()

    def after_kill(self) -> _Inode:
        return _Inode(self.content.copy(), self.durable.copy(), self.pending)

    def after_power_cut(self, coin: _Coin) -> _Inode:
        content = self.durable.copy()
        for change in self.pending:
            change.apply_some(content, coin)
        return _Inode(content, content.copy())


class _MemoryFile:
    """An open file of a `MemoryDisk`."""

    __slots__ = ("_disk", "_inode", "_is_closed", "_is_writable")

    def __init__(self, disk: MemoryDisk, inode: _Inode, *, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._is_writable = write
        self._is_closed = False
        inode.opened += 1

    def pread(self, size: int, offset: int) -> bytes:
        with self._disk._lock:
            inode = self._usable(size, offset)
            self._disk._begin("pread")
            with memoryview(inode.content) as content:
                return bytes(content[offset : offset + size])

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        with self._disk._lock:
            inode = self._usable(offset)
            self._disk._begin("pread")
            with memoryview(inode.content) as content:
                found = content[offset : offset + len(buffer)]
                buffer[: len(found)] = found
                return len(found)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        with self._disk._lock:
            self._usable(offset, _BUFFERS_MAX - len(buffers))
            return self._write_fitting("pwritev", b"".join(buffers), offset)

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        with self._disk._lock:
            self._usable(offset, source_offset, size)
            data = source.pread(size, source_offset)
            return self._write_fitting("copy_from", data, offset) if data else 0

    def _write_fitting(self, operation: Operation, data: bytes, offset: int) -> int:
        """One change, of as much of `data` as there is room for; the count."""
        if not self._is_writable:
            raise _error(errno.EBADF)
        try:
            self._disk._begin(operation)
        except PowerCut:
            # A part of the write has happened: a prefix, drawn by the number of the change.
            self._write(data[: random.Random(self._disk.changes).randint(0, len(data))], offset)
            raise
        fitting = self._disk._fitting(len(self._inode.content), offset, len(data))
        self._write(data[:fitting], offset)
        return fitting

    def truncate(self, size: int) -> None:
        with self._disk._lock:
            inode = self._usable(size)
            if not self._is_writable:
                raise _error(errno.EINVAL)  # so ftruncate(2), where pwritev(2) says EBADF
            self._disk._begin("truncate")
            self._disk._require_room(size - len(inode.content))
            self._change(_Truncate(size))

    def sync(self) -> None:
        with self._disk._lock:
            inode = self._usable()
            try:
                self._disk._begin("sync")
            except OSError:
                # As Linux does: the pages count as clean from now on, so no later sync writes them.
                inode.pending.clear()
                raise
            inode.sync()

    def uncache(self, offset: int, size: int) -> None:
        with self._disk._lock:
            self._usable(offset, size)

    def size(self) -> int:
        with self._disk._lock:
            return len(self._usable().content)

    def is_linked(self) -> bool:
        with self._disk._lock:
            return self._usable().is_linked

    def close(self) -> None:
        with self._disk._lock:
            self._disk._require_power()
            if not self._is_closed:
                self._is_closed = True
                self._inode.opened -= 1
                self._disk._release(self._inode)

    def _usable(self, *not_negative: int) -> _Inode:
        self._disk._require_power()
        if self._is_closed:
            raise _error(errno.EBADF)
        if any(number < 0 for number in not_negative):
            raise _error(errno.EINVAL)
        return self._inode

    def _write(self, data: bytes, offset: int) -> None:
        if data:  # else not even the size changes
            self._change(_Write(offset, data))

    def _change(self, change: _Write | _Truncate) -> None:
        before = len(self._inode.content)
        self._inode.change(change)
        self._disk.used_bytes += len(self._inode.content) - before


class _MemoryLock:
    """A held lock: an open file that frees its inode's lock when it closes."""

    __slots__ = ("_file", "_inode")

    def __init__(self, disk: MemoryDisk, inode: _Inode) -> None:
        inode.is_locked = True
        self._inode: _Inode | None = inode
        self._file = _MemoryFile(disk, inode, write=True)

    def is_linked(self) -> bool:
        return self._file.is_linked()

    def close(self) -> None:
        self._file.close()
        if self._inode is not None:
            self._inode.is_locked = False
            self._inode = None


# --- MemoryDisk: names -----------------------------------------------------------------------------------


class _Directory:
    """A directory is only an identity; who is in it stands in the disk's table of names.

    So directories are shared, unchanged, by a disk and what is left of it after a power cut.
    """

    __slots__ = ()


_ROOT = _Directory()
_Node: TypeAlias = _Inode | _Directory
_Key: TypeAlias = tuple[_Directory, str]
_Names: TypeAlias = dict[_Key, _Node]
# One change of names, done whole or not at all; None takes the name away.
_Edit: TypeAlias = dict[_Key, _Node | None]
_CHANGES = frozenset(
    {"copy_from", "create", "pwritev", "remove", "rename", "sync", "sync_directory", "truncate"}
)


def _apply(names: _Names, edit: _Edit) -> None:
    for key, node in edit.items():
        if node is None:
            names.pop(key, None)
        else:
            names[key] = node


def _coin(keep: Literal["none", "some"], seed: int) -> _Coin:
    """The odds are drawn first, so that nearly everything and nearly nothing come up too."""
    if keep == "none":
        return lambda: False
    source = random.Random(seed)
    odds = source.choice((0.2, 0.5, 0.8, 0.95))
    return lambda: source.random() < odds


class MemoryDisk(Faults):
    """A disk in memory whose power can be cut at any change. Relative paths start at `/`, which exists.

    `changes` counts the calls that may change something: create, pwritev, copy_from, truncate, sync, rename,
    remove, sync_directory, a lock whose file is new, and two (make, sync the parent) for each directory made.

    A file whose `sync` failed, by `fail("sync")`, still shows what was written, and the next sync returns;
    but the bytes written before the failure are never durable, as with Linux.

    Thread-safe: each call holds one lock.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.changes = 0
        self.is_off = False
        self._cut_at: int | None = None
        self._names: _Names = {}
        self._durable: _Names = {}
        self._edits: list[_Edit] = []  # what leads from _durable to _names, in order

    # What the program under test calls.

    def open(self, path: str, *, write: bool = False) -> File:
        """Open a file."""
        with self._lock:
            self._begin("open")
            return _MemoryFile(self, self._file_at(path), write=write)

    def create(self, path: str) -> File:
        """Make a file; its name is durable after `sync_directory`."""
        with self._lock:
            self._begin("create")
            key, node = self._find(path)
            if node is not None:
                raise _error(errno.EEXIST, path)
            return _MemoryFile(self, self._add_file(key), write=True)

    def rename(self, source: str, target: str) -> None:
        """One change of both names; what was called `target` is back if the change is lost."""
        with self._lock:
            self._begin("rename")
            old, node = self._find(source)
            new, replaced = self._find(target)
            if node is None:
                raise _error(errno.ENOENT, source)
            if _absolute(target).startswith(_absolute(source) + "/"):
                raise _error(errno.EINVAL, target)
            if _absolute(source).startswith(_absolute(target) + "/"):
                raise _error(errno.ENOTEMPTY, target)  # Linux asks this before it looks at the kinds
            if replaced is node:
                return
            self._require_replaceable(target, node, replaced)
            self._edit({old: None, new: node})

    def remove(self, path: str) -> None:
        """Take the name away; open files go on."""
        with self._lock:
            self._begin("remove")
            self._file_at(path)
            self._edit({self._find(path)[0]: None})

    def make_directory(self, path: str) -> None:
        """Make each missing one and then sync its parent, as `RealDisk` does: two changes each."""
        with self._lock:
            self._begin("make_directory")
            self._make_directory(_absolute(path))

    def list_directory(self, path: str) -> list[str]:
        """Names in a directory, oldest first."""
        with self._lock:
            self._begin("list_directory")
            directory = self._directory_at(path)
            return [name for parent, name in self._names if parent is directory]

    def sync_directory(self, path: str) -> None:
        """Make its names durable; a rename between two directories is durable by the sync of either."""
        with self._lock:
            self._begin("sync_directory")
            self._sync_directory(self._directory_at(path))

    def size(self, path: str) -> int | None:
        """Bytes in the file."""
        with self._lock:
            self._require_power()
            try:
                _, node = self._find(path)
            except FileNotFoundError:
                return None
            if isinstance(node, _Directory):
                return _DIRECTORY_BYTES
            return None if node is None else len(node.content)

    def lock(self, path: str) -> Lock:
        """Take the lock of the file; not thread-bound, and gone after a power cut."""
        with self._lock:
            self._begin("lock")
            key, node = self._find(path)
            if node is None:
                self._count_change()
                self._add_file(key)
            inode = self._file_at(path)
            if inode.is_locked:
                raise _error(errno.EWOULDBLOCK, path)
            return _MemoryLock(self, inode)

    # What the test calls. These count no changes, meet no faults, and work when the power is off.

    def cut_power_at(self, change: int) -> None:
        """Let the call that makes `changes` reach `change` raise `PowerCut`, and every call behind it.

        That call has not happened; but of a write a part may have.
        """
        with self._lock:
            if change <= self.changes:
                raise ValueError(f"change {change} is past: {self.changes} were made")
            self._cut_at = change

    def after_power_cut(self, keep: Keep, seed: int = 0) -> MemoryDisk:
        """The disk that the next start finds; this one is off from now on, but may be asked again.

        "none": only what was synced. "some": of the rest what `seed` draws: any writes, whole or some of
        their sectors, sizes without the bytes, truncates or not; of each name a prefix of its changes.
        "all": everything, as after kill -9. That is the one case where the kernel lives on: what was not
        synced is *still* not synced, so a second cut may take it from a recovery that did not sync.
        """
        with self._lock:
            self.is_off = True
            if keep == "all":
                return self._survivor(self._names, self._durable, self._edits, _Inode.after_kill)
            # Mixed with the number of the change, so that a sweep does not draw the same at each of its cuts.
            coin = _coin(keep, seed * 1_000_003 + self.changes)
            names = self._surviving_names(coin)
            return self._survivor(names, names, [], lambda inode: inode.after_power_cut(coin))

    def state(self) -> Hashable:
        """Equal for disks that neither a program nor a power cut can tell apart; nothing may be open."""
        with self._lock:
            numbers: dict[_Node, int] = {}

            def numbered(edit: Mapping[_Key, _Node | None]) -> Hashable:
                return tuple(
                    (parent, name, node and numbers.setdefault(node, len(numbers)))
                    for (parent, name), node in edit.items()
                )

            edits: list[Mapping[_Key, _Node | None]] = [self._names, self._durable, *self._edits]
            names = tuple(map(numbered, edits))
            files = tuple(
                (number, bytes(node.content), bytes(node.durable), tuple(node.pending))
                for node, number in numbers.items()
                if isinstance(node, _Inode)
            )
            return names, files, self.capacity_bytes

    def paths(self) -> list[str]:
        """Every file, sorted."""
        with self._lock:
            return sorted(self._paths_below(_ROOT, "/"))

    def read(self, path: str) -> bytes:
        """What a reader of the file sees."""
        with self._lock:
            return bytes(self._file_at(path).content)

    def write(self, path: str, content: bytes) -> None:
        """Give a file, made if missing, this content, durable at once with its name."""
        with self._lock:
            key, node = self._find(path)
            inode = self._add_file(key) if node is None else self._file_at(path)
            self.used_bytes += len(content) - len(inode.content)
            inode.content[:] = inode.durable[:] = content
            inode.pending.clear()
            self._settle(lambda other: other == key)

    def flip_bit(self, path: str, offset: int, bit: int) -> None:
        """Turn one bit over, for readers that have the file open too; all of the file is durable then."""
        content = bytearray(self.read(path))
        content[offset] ^= 1 << bit
        self.write(path, bytes(content))

    # Power and counting.

    def _require_power(self) -> None:
        if self.is_off:
            raise PowerCut("the power is off")

    def _count_change(self) -> None:
        self.changes += 1
        if self.changes == self._cut_at:
            self.is_off = True
            raise PowerCut(f"the power was cut at change {self.changes}")

    def _begin(self, operation: Operation) -> None:
        self._require_power()
        if operation in _CHANGES:
            self._count_change()
        self._check(operation)

    # The table of names.

    def _find(self, path: str) -> tuple[_Key, _Node | None]:
        """Where the name stands and what it names now; raises if its directory does not exist."""
        if not path:
            raise _error(errno.ENOENT, path)
        key: _Key = (_ROOT, "")
        node: _Node | None = _ROOT
        for part in _parts(path):
            if not isinstance(node, _Directory):
                raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)
            key = (node, part)
            node = self._names.get(key)
        return key, node

    def _file_at(self, path: str) -> _Inode:
        _, node = self._find(path)
        if isinstance(node, _Inode):
            return node
        raise _error(errno.ENOENT if node is None else errno.EISDIR, path)

    def _directory_at(self, path: str) -> _Directory:
        _, node = self._find(path)
        if isinstance(node, _Directory):
            return node
        raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)

    def _require_replaceable(self, target: str, node: _Node, replaced: _Node | None) -> None:
        if isinstance(replaced, _Directory):
            if isinstance(node, _Inode):
                raise _error(errno.EISDIR, target)
            if any(parent is replaced for parent, _ in self._names):
                raise _error(errno.ENOTEMPTY, target)
        elif replaced is not None and isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, target)

    def _add_file(self, key: _Key) -> _Inode:
        inode = _Inode(bytearray(), bytearray())
        self._edit({key: inode})
        return inode

    def _make_directory(self, path: str) -> None:
        try:
            key, node = self._find(path)
        except FileNotFoundError:
            key, node = (_ROOT, ""), None
        if node is None:
            self._make_directory(posixpath.dirname(path))
            key, _ = self._find(path)
            self._count_change()
            self._edit({key: _Directory()})
        if isinstance(node, _Inode):
            raise _error(errno.EEXIST, path)
        if key[1]:
            self._count_change()
            self._sync_directory(key[0])

    def _edit(self, edit: _Edit) -> None:
        before = [self._names.get(key) for key in edit]
        _apply(self._names, edit)
        self._edits.append(edit)
        for node in before:
            if isinstance(node, _Inode) and node not in edit.values():
                node.is_linked = False
                self._release(node)

    def _release(self, inode: _Inode) -> None:
        """Give the space back when the last name and the last open file are gone."""
        if not inode.is_linked and not inode.opened:
            self.used_bytes -= len(inode.content)

    def _sync_directory(self, directory: _Directory) -> None:
        self._settle(lambda key: key[0] is directory)

    def _settle(self, is_wanted: Callable[[_Key], bool]) -> None:
        """Make the edits of the wanted names durable, with the earlier ones of any other name they touch."""
        touched: set[_Key] = set()
        settled: list[_Edit] = []
        left: list[_Edit] = []
        for edit in reversed(self._edits):
            if any(key in touched or is_wanted(key) for key in edit):
                touched.update(edit)
                settled.append(edit)
            else:
                left.append(edit)
        for edit in reversed(settled):
            _apply(self._durable, edit)
        self._edits = left[::-1]

    def _surviving_names(self, coin: _Coin) -> _Names:
        """The durable names with some edits: an edit is lost if an earlier one of the same name is."""
        names = dict(self._durable)
        lost: set[_Key] = set()
        for edit in self._edits:
            if lost.isdisjoint(edit) and coin():
                _apply(names, edit)
            else:
                lost.update(edit)
        return names

    def _survivor(
        self, names: _Names, durable: _Names, edits: list[_Edit], survive: Callable[[_Inode], _Inode]
    ) -> MemoryDisk:
        twins: dict[_Inode, _Inode] = {}

        def twin(node: _Node) -> _Node:
            if isinstance(node, _Directory):
                return node
            if node not in twins:
                twins[node] = survive(node)
            return twins[node]

        disk = MemoryDisk(self.capacity_bytes)
        disk._names = {key: twin(node) for key, node in names.items()}
        disk._durable = {key: twin(node) for key, node in durable.items()}
        disk._edits = [{key: node and twin(node) for key, node in edit.items()} for edit in edits]
        disk.used_bytes = sum(len(node.content) for node in disk._names.values() if isinstance(node, _Inode))
        return disk

    def _paths_below(self, directory: _Directory, prefix: str) -> Iterator[str]:
        for (parent, name), node in self._names.items():
            if parent is not directory:
                continue
            if isinstance(node, _Directory):
                yield from self._paths_below(node, f"{prefix}{name}/")
            else:
                yield prefix + name


# --- FaultyDisk ------------------------------------------------------------------------------------------


class _FaultyFile:
    """A file of the disk below, behind the faults of a `FaultyDisk`."""

    __slots__ = ("_disk", "_file")

    def __init__(self, disk: FaultyDisk, file: File) -> None:
        self._disk = disk
        self._file = file

    def pread(self, size: int, offset: int) -> bytes:
        self._disk._check("pread")
        return self._file.pread(size, offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        self._disk._check("pread")
        return self._file.pread_into(buffer, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._disk._check("pwritev")
        wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._disk._lock:
            before = self._file.size()
            fitting = self._disk._fitting(before, offset, wanted)
            written = self._file.pwritev(
                buffers if fitting == wanted else [b"".join(buffers)[:fitting]], offset
            )
            self._disk.used_bytes += self._file.size() - before
        return written

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        self._disk._check("copy_from")
        below = source._file if isinstance(source, _FaultyFile) else source
        with self._disk._lock:
            before = self._file.size()
            fitting = self._disk._fitting(before, offset, size)
            written = self._file.copy_from(below, source_offset, fitting, offset)
            self._disk.used_bytes += self._file.size() - before
        return written

    def truncate(self, size: int) -> None:
        self._disk._check("truncate")
        with self._disk._lock:
            before = self._file.size()
            self._disk._require_room(size - before)
            self._file.truncate(size)
            self._disk.used_bytes += size - before

    def sync(self) -> None:
        self._disk._check("sync")
        self._file.sync()

    def uncache(self, offset: int, size: int) -> None:
        self._file.uncache(offset, size)

    def size(self) -> int:
        return self._file.size()

    def is_linked(self) -> bool:
        return self._file.is_linked()

    def close(self) -> None:
        self._file.close()


class FaultyDisk(Faults):
    """Any disk, with faults and a limit on what may be added to it: `FaultyDisk(RealDisk())` for real files.

    Space is given back when a name goes, even while the file is open. Thread-safe if the disk below is.
    """

    def __init__(self, disk: Disk, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._disk = disk

    def open(self, path: str, *, write: bool = False) -> File:
        """Open a file of the disk below."""
        self._check("open")
        return _FaultyFile(self, self._disk.open(path, write=write))

    def create(self, path: str) -> File:
        """Make a file on the disk below."""
        self._check("create")
        return _FaultyFile(self, self._disk.create(path))

    def rename(self, source: str, target: str) -> None:
        """Rename on the disk below."""
        self._check("rename")
        replaced_bytes = self._disk.size(target) or 0 if source != target else 0
        self._disk.rename(source, target)
        self._give_back(replaced_bytes)

    def remove(self, path: str) -> None:
        """Remove from the disk below."""
        self._check("remove")
        removed_bytes = self._disk.size(path) or 0
        self._disk.remove(path)
        self._give_back(removed_bytes)

    def make_directory(self, path: str) -> None:
        """Make it on the disk below."""
        self._check("make_directory")
        self._disk.make_directory(path)

    def list_directory(self, path: str) -> list[str]:
        """List it on the disk below."""
        self._check("list_directory")
        return self._disk.list_directory(path)

    def sync_directory(self, path: str) -> None:
        """Sync it on the disk below."""
        self._check("sync_directory")
        self._disk.sync_directory(path)

    def size(self, path: str) -> int | None:
        """Size on the disk below."""
        return self._disk.size(path)

    def lock(self, path: str) -> Lock:
        """Lock on the disk below."""
        self._check("lock")
        return self._disk.lock(path)

    def _give_back(self, count: int) -> None:
        with self._lock:
            self.used_bytes -= count
