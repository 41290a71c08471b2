"""The names of `MemoryDisk`: the current ones, the durable ones, and the changes in between.

Invariants:
- A change is atomic.
- A change is lost if an earlier change of the same name is lost.
"""

from __future__ import annotations

import errno
import functools
import posixpath
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final, TypeAlias

from disks.faults import os_error
from disks.inode import Coin, Inode


class DirectoryInode:
    """Only the identity of a directory. Its entries are in the disk's table of names.

    So a disk and its successor after a power cut share directory inodes.
    """

    __slots__ = ()


ROOT: Final = DirectoryInode()
Node: TypeAlias = Inode | DirectoryInode
Key: TypeAlias = tuple[DirectoryInode, str]
Names: TypeAlias = dict[Key, Node]
Edit: TypeAlias = dict[Key, Node | None]
"""One atomic change of names. None removes the name."""


def absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path))


@functools.lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    """The components of a path. Cached, as programs use the same few paths repeatedly."""
    return tuple(filter(None, absolute(path).split("/")))


def _apply(names: Names, edit: Edit) -> None:
    for key, node in edit.items():
        if node is None:
            names.pop(key, None)
        else:
            names[key] = node


class NameTable:
    """Maps every name of a disk to its inode. The caller holds the disk's lock."""

    def __init__(
        self, now: Names | None = None, durable: Names | None = None, edits: list[Edit] | None = None
    ) -> None:
        self.now: Names = {} if now is None else now
        self._durable: Names = {} if durable is None else durable
        self._edits: list[Edit] = [] if edits is None else edits
        """The changes from `_durable` to `now`, in order."""

    # Looking up

    def find(self, path: str) -> tuple[Key, Node | None]:
        """The key of a path and its current node. Raises if the parent directory does not exist."""
        if not path:
            raise os_error(errno.ENOENT, path)
        key: Key = (ROOT, "")
        node: Node | None = ROOT
        for part in _parts(path):
            if not isinstance(node, DirectoryInode):
                raise os_error(errno.ENOENT if node is None else errno.ENOTDIR, path)
            key = (node, part)
            node = self.now.get(key)
        return key, node

    def file_at(self, path: str) -> Inode:
        _, node = self.find(path)
        if isinstance(node, Inode):
            return node
        raise os_error(errno.ENOENT if node is None else errno.EISDIR, path)

    def directory_at(self, path: str) -> DirectoryInode:
        _, node = self.find(path)
        if isinstance(node, DirectoryInode):
            return node
        raise os_error(errno.ENOENT if node is None else errno.ENOTDIR, path)

    def names_in(self, directory: DirectoryInode) -> list[str]:
        return [name for parent, name in self.now if parent is directory]

    def paths_below(self, directory: DirectoryInode, prefix: str) -> Iterator[str]:
        for (parent, name), node in self.now.items():
            if parent is not directory:
                continue
            if isinstance(node, DirectoryInode):
                yield from self.paths_below(node, f"{prefix}{name}/")
            else:
                yield prefix + name

    def require_replaceable(self, target: str, node: Node, replaced: Node | None) -> None:
        """Raise unless `node` may replace `replaced` at the name `target`."""
        if isinstance(replaced, DirectoryInode):
            if isinstance(node, Inode):
                raise os_error(errno.EISDIR, target)
            if any(parent is replaced for parent, _ in self.now):
                raise os_error(errno.ENOTEMPTY, target)
        elif replaced is not None and isinstance(node, DirectoryInode):
            raise os_error(errno.ENOTDIR, target)

    # Changing

    def edit(self, edit: Edit) -> list[Inode]:
        """Apply a change. Returns the files that lost their name."""
        before = [self.now.get(key) for key in edit]
        _apply(self.now, edit)
        self._edits.append(edit)
        return [node for node in before if isinstance(node, Inode) and node not in edit.values()]

    def make_durable(self, is_wanted: Callable[[Key], bool]) -> None:
        """Make the edits of the selected names durable, with earlier edits of other names they touch."""
        touched: set[Key] = set()
        settled: list[Edit] = []
        left: list[Edit] = []
        for edit in reversed(self._edits):
            if any(key in touched or is_wanted(key) for key in edit):
                touched.update(edit)
                settled.append(edit)
            else:
                left.append(edit)
        for edit in reversed(settled):
            _apply(self._durable, edit)
        self._edits = left[::-1]

    # After a power cut or kill

    def after_kill(self, survive: Callable[[Inode], Inode]) -> NameTable:
        """Return the same names, including the durable ones, with files made by `survive`."""
        twin = _twins(survive)
        return NameTable(
            {key: twin(node) for key, node in self.now.items()},
            {key: twin(node) for key, node in self._durable.items()},
            [{key: node and twin(node) for key, node in edit.items()} for edit in self._edits],
        )

    def after_power_cut(self, coin: Coin, survive: Callable[[Inode], Inode]) -> NameTable:
        """Return the durable names with some edits.

        If an edit is lost, later edits of the same name are lost too.
        """
        names = dict(self._durable)
        lost: set[Key] = set()
        for edit in self._edits:
            if lost.isdisjoint(edit) and coin():
                _apply(names, edit)
            else:
                lost.update(edit)
        twin = _twins(survive)
        left = {key: twin(node) for key, node in names.items()}
        return NameTable(left, dict(left))

    def state(self, numbers: dict[Node, int]) -> Hashable:
        """Equal for tables that cannot be distinguished. `numbers` maps each node to a number."""

        def numbered(edit: Mapping[Key, Node | None]) -> Hashable:
            return tuple(
                (parent, name, node and numbers.setdefault(node, len(numbers)))
                for (parent, name), node in edit.items()
            )

        edits: list[Mapping[Key, Node | None]] = [self.now, self._durable, *self._edits]
        return tuple(map(numbered, edits))


def _twins(survive: Callable[[Inode], Inode]) -> Callable[[Node], Node]:
    """Return a function that calls `survive` once per file, not per name. Directories are shared."""
    twins: dict[Inode, Inode] = {}

    def twin(node: Node) -> Node:
        if isinstance(node, DirectoryInode):
            return node
        if node not in twins:
            twins[node] = survive(node)
        return twins[node]

    return twin
