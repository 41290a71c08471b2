"""`MemoryDisk`: a disk in memory that tracks durability.

The memory disk keeps only what POSIX guarantees, which is less than most file systems do. `File.sync` makes a
file's content and size durable but no name. `sync_directory` makes names durable but no content. A change
that was not synced may survive a power cut or not, whole or torn, independently of others. So code that
passes on it relies on no particular file system.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, TypeAlias

from disks.faults import Faults, Operation, PowerCut, os_error
from disks.inode import Inode, coin_of
from disks.memory_file import MemoryFile, MemoryLock
from disks.names import ROOT, DirectoryInode, Edit, Key, NameTable, Node, absolute
from rt.log.disk import File, Lock

Keep: TypeAlias = Literal["all", "none", "some"]

CHANGES: Final = frozenset(
    {"copy_from", "create", "pwritev", "remove", "rename", "sync", "sync_directory", "truncate"}
)
DIRECTORY_BYTES: Final = 4096
"""As lstat(2) reports for a directory on ext4. Only the presence of a size matters."""


class MemoryDisk(Faults):
    """A disk in memory whose power can be cut at any change. Relative paths start at `/`, which exists.

    `changes` counts the calls that may change something: create, pwritev, copy_from, truncate, sync, rename,
    remove, sync_directory, a lock whose file is new, and two (make, sync the parent) for each directory made.

    After a failed `sync` (by `fail("sync")`) a file still shows what was written, and the next sync returns.
    But as on Linux, the bytes written before the failure never become durable.

    Thread-safe: each call holds one lock.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.changes = 0
        self.is_off = False
        self._cut_at: int | None = None
        self._names = NameTable()

    # Called by the program under test.

    def open(self, path: str, *, write: bool = False) -> File:
        with self.guard:
            self.count_call("open")
            return MemoryFile(self, self._names.file_at(path), write=write)

    def create(self, path: str) -> File:
        """Create a file. Its name is durable after `sync_directory`."""
        with self.guard:
            self.count_call("create")
            key, node = self._names.find(path)
            if node is not None:
                raise os_error(errno.EEXIST, path)
            return MemoryFile(self, self._add_file(key), write=True)

    def rename(self, source: str, target: str) -> None:
        """One change of both names. If the change is lost, `target` has its old file again."""
        with self.guard:
            self.count_call("rename")
            old, node = self._names.find(source)
            new, replaced = self._names.find(target)
            if node is None:
                raise os_error(errno.ENOENT, source)
            if absolute(target).startswith(absolute(source) + "/"):
                raise os_error(errno.EINVAL, target)
            if absolute(source).startswith(absolute(target) + "/"):
                raise os_error(errno.ENOTEMPTY, target)  # Linux checks this before the kinds
            if replaced is node:
                return
            self._names.require_replaceable(target, node, replaced)
            self._edit({old: None, new: node})

    def remove(self, path: str) -> None:
        """Remove the name. Open files stay usable."""
        with self.guard:
            self.count_call("remove")
            self._names.file_at(path)
            self._edit({self._names.find(path)[0]: None})

    def make_directory(self, path: str) -> None:
        """Make each missing directory and sync its parent, as `RealDisk` does: two changes each."""
        with self.guard:
            self.count_call("make_directory")
            self._make_directory(absolute(path))

    def list_directory(self, path: str) -> list[str]:
        with self.guard:
            self.count_call("list_directory")
            return self._names.names_in(self._names.directory_at(path))

    def sync_directory(self, path: str) -> None:
        """Make its names durable. A rename between two directories is durable after the sync of either."""
        with self.guard:
            self.count_call("sync_directory")
            self._sync_directory(self._names.directory_at(path))

    def hold_directory(self, path: str) -> AbstractContextManager[None]:
        return nullcontext()

    def size(self, path: str) -> int | None:
        with self.guard:
            self.require_power()
            try:
                _, node = self._names.find(path)
            except FileNotFoundError:
                return None
            if isinstance(node, DirectoryInode):
                return DIRECTORY_BYTES
            return None if node is None else len(node.content)

    def lock(self, path: str) -> Lock:
        """Lock the file. The lock is not bound to a thread, and a power cut removes it."""
        with self.guard:
            self.count_call("lock")
            key, node = self._names.find(path)
            if node is None:
                self._count_change()
                self._add_file(key)
            inode = self._names.file_at(path)
            if inode.is_locked:
                raise os_error(errno.EWOULDBLOCK, path)
            return MemoryLock(self, inode)

    # Called by the test. These count no changes, have no faults, and work when the power is off.

    def cut_power_at(self, change: int) -> None:
        """Raise `PowerCut` in the call in which `changes` reaches `change`, and in every later call.

        That call has no effect, except that a write may be partly done.
        """
        with self.guard:
            if change <= self.changes:
                raise ValueError(f"change {change} is in the past: got {self.changes} changes already")
            self._cut_at = change

    def after_power_cut(self, keep: Keep, seed: int = 0) -> MemoryDisk:
        """The disk after a restart. This disk stays off, but the method can be called again.

        `keep` selects the changes that survive. "none": only synced changes. "some": also changes that `seed`
        selects: any writes (whole or some of their sectors), sizes without the bytes, truncates or not; of
        each name, a prefix of its changes. "all": everything, as after kill -9. In that case the kernel
        survives, and unsynced changes are *still* not synced. So a second cut may remove them if the recovery
        did not sync.
        """
        with self.guard:
            self.is_off = True
            if keep == "all":
                return self._with(self._names.after_kill(Inode.after_kill))
            # Includes the number of the change, so that the cuts of a sweep differ.
            coin = coin_of(keep, seed * 1_000_003 + self.changes)
            return self._with(self._names.after_power_cut(coin, lambda inode: inode.after_power_cut(coin)))

    def state(self) -> Hashable:
        """Equal for two disks if no program and no power cut can distinguish them. No file may be open."""
        with self.guard:
            numbers: dict[Node, int] = {}
            names = self._names.state(numbers)
            files = tuple(
                (number, bytes(node.content), bytes(node.durable), tuple(node.pending))
                for node, number in numbers.items()
                if isinstance(node, Inode)
            )
            return names, files, self.capacity_bytes

    def paths(self) -> list[str]:
        with self.guard:
            return sorted(self._names.paths_below(ROOT, "/"))

    def read(self, path: str) -> bytes:
        """Return the content as a reader of the file sees it."""
        with self.guard:
            return bytes(self._names.file_at(path).content)

    def write(self, path: str, content: bytes) -> None:
        """Write a file, creating it if missing. Content and name are durable at once."""
        with self.guard:
            key, node = self._names.find(path)
            inode = self._add_file(key) if node is None else self._names.file_at(path)
            self.used_bytes += len(content) - len(inode.content)
            inode.content[:] = inode.durable[:] = content
            inode.pending.clear()
            self._names.make_durable(lambda other: other == key)

    def flip_bit(self, path: str, offset: int, bit: int) -> None:
        """Flip one bit, also for readers that have the file open. All of the file is durable then."""
        content = bytearray(self.read(path))
        content[offset] ^= 1 << bit
        self.write(path, bytes(content))

    # Power and counting.

    def require_power(self) -> None:
        """Raise `PowerCut` if the power is off."""
        if self.is_off:
            raise PowerCut("the power is off")

    def _count_change(self) -> None:
        self.changes += 1
        if self.changes == self._cut_at:
            self.is_off = True
            raise PowerCut(f"the power was cut at change {self.changes}")

    def count_call(self, operation: Operation) -> None:
        """Count a call of the program, and raise the fault configured for it."""
        self.require_power()
        if operation in CHANGES:
            self._count_change()
        self.check(operation)

    # Files and names.

    def _add_file(self, key: Key) -> Inode:
        inode = Inode(bytearray(), bytearray())
        self._edit({key: inode})
        return inode

    def _make_directory(self, path: str) -> None:
        try:
            key, node = self._names.find(path)
        except FileNotFoundError:
            key, node = (ROOT, ""), None
        if node is None:
            self._make_directory(posixpath.dirname(path))
            key, _ = self._names.find(path)
            self._count_change()
            self._edit({key: DirectoryInode()})
        if isinstance(node, Inode):
            raise os_error(errno.EEXIST, path)
        if key[1]:
            self._count_change()
            self._sync_directory(key[0])

    def _edit(self, edit: Edit) -> None:
        for node in self._names.edit(edit):
            node.is_linked = False
            self.release(node)

    def release(self, inode: Inode) -> None:
        """Release the space when the last name and the last open file are closed."""
        if not inode.is_linked and not inode.opened:
            self.used_bytes -= len(inode.content)

    def _sync_directory(self, directory: DirectoryInode) -> None:
        self._names.make_durable(lambda key: key[0] is directory)

    def _with(self, names: NameTable) -> MemoryDisk:
        """Another disk of this size, with the given names."""
        disk = MemoryDisk(self.capacity_bytes)
        disk._names = names
        disk.used_bytes = sum(len(node.content) for node in names.now.values() if isinstance(node, Inode))
        return disk
