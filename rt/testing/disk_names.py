"""The names of `MemoryDisk`: what they are now, what of them is durable, and the changes between the two.

A change is lost if an earlier one of the same name is; it is done whole or not at all.
"""

from __future__ import annotations

import errno
import functools
import posixpath
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final, TypeAlias

from rt.testing.faults import os_error
from rt.testing.inode import Coin, Inode


class Directory:
    """A directory is only an identity; who is in it stands in the disk's table of names.

    So directories are shared, unchanged, by a disk and what is left of it after a power cut.
    """

    __slots__ = ()


ROOT: Final = Directory()
Node: TypeAlias = Inode | Directory
Key: TypeAlias = tuple[Directory, str]
Names: TypeAlias = dict[Key, Node]
Edit: TypeAlias = dict[Key, Node | None]
"""One change of names, done whole or not at all; None takes the name away."""


def absolute(path: str) -> str:
    """The path from the root, where relative ones start."""
    return posixpath.normpath(posixpath.join("/", path))


@functools.lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    """The names on the way from the root; programs ask for the same few paths again and again."""
    return tuple(filter(None, absolute(path).split("/")))


def _apply(names: Names, edit: Edit) -> None:
    for key, node in edit.items():
        if node is None:
            names.pop(key, None)
        else:
            names[key] = node


class NameTable:
    """What every name of a disk stands for. Its caller holds the disk's lock."""

    def __init__(
        self, now: Names | None = None, durable: Names | None = None, edits: list[Edit] | None = None
    ) -> None:
        self.now: Names = {} if now is None else now
        self._durable: Names = {} if durable is None else durable
        self._edits: list[Edit] = [] if edits is None else edits
        """What leads from `_durable` to `now`, in order."""

    # Looking

    def find(self, path: str) -> tuple[Key, Node | None]:
        """Where the name stands and what it names now; raises if its directory does not exist."""
        if not path:
            raise os_error(errno.ENOENT, path)
        key: Key = (ROOT, "")
        node: Node | None = ROOT
        for part in _parts(path):
            if not isinstance(node, Directory):
                raise os_error(errno.ENOENT if node is None else errno.ENOTDIR, path)
            key = (node, part)
            node = self.now.get(key)
        return key, node

    def file_at(self, path: str) -> Inode:
        """The file of that name; raises if there is none."""
        _, node = self.find(path)
        if isinstance(node, Inode):
            return node
        raise os_error(errno.ENOENT if node is None else errno.EISDIR, path)

    def directory_at(self, path: str) -> Directory:
        """The directory of that name; raises if there is none."""
        _, node = self.find(path)
        if isinstance(node, Directory):
            return node
        raise os_error(errno.ENOENT if node is None else errno.ENOTDIR, path)

    def names_in(self, directory: Directory) -> list[str]:
        """What stands in it, oldest first."""
        return [name for parent, name in self.now if parent is directory]

    def paths_below(self, directory: Directory, prefix: str) -> Iterator[str]:
        """Every file there."""
        for (parent, name), node in self.now.items():
            if parent is not directory:
                continue
            if isinstance(node, Directory):
                yield from self.paths_below(node, f"{prefix}{name}/")
            else:
                yield prefix + name

    def require_replaceable(self, target: str, node: Node, replaced: Node | None) -> None:
        """Raise unless `node` may get the name that `replaced` has now."""
        if isinstance(replaced, Directory):
            if isinstance(node, Inode):
                raise os_error(errno.EISDIR, target)
            if any(parent is replaced for parent, _ in self.now):
                raise os_error(errno.ENOTEMPTY, target)
        elif replaced is not None and isinstance(node, Directory):
            raise os_error(errno.ENOTDIR, target)

    # Changing

    def edit(self, edit: Edit) -> list[Inode]:
        """Make a change; the files that lost their name by it."""
        before = [self.now.get(key) for key in edit]
        _apply(self.now, edit)
        self._edits.append(edit)
        return [node for node in before if isinstance(node, Inode) and node not in edit.values()]

    def settle(self, is_wanted: Callable[[Key], bool]) -> None:
        """Make the edits of the wanted names durable, with the earlier ones of any other name they touch."""
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

    # What is left

    def after_kill(self, survive: Callable[[Inode], Inode]) -> NameTable:
        """The same names of other files, each made of one here; and the same is durable of them."""
        twin = _twins(survive)
        return NameTable(
            {key: twin(node) for key, node in self.now.items()},
            {key: twin(node) for key, node in self._durable.items()},
            [{key: node and twin(node) for key, node in edit.items()} for edit in self._edits],
        )

    def after_power_cut(self, coin: Coin, survive: Callable[[Inode], Inode]) -> NameTable:
        """The durable names with some edits: an edit is lost if an earlier one of the same name is."""
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
        """Equal for tables that nothing can tell apart; `numbers` gets one for each node."""

        def numbered(edit: Mapping[Key, Node | None]) -> Hashable:
            return tuple(
                (parent, name, node and numbers.setdefault(node, len(numbers)))
                for (parent, name), node in edit.items()
            )

        edits: list[Mapping[Key, Node | None]] = [self.now, self._durable, *self._edits]
        return tuple(map(numbered, edits))


def _twins(survive: Callable[[Inode], Inode]) -> Callable[[Node], Node]:
    """One file for each, however many names it has; directories are shared."""
    twins: dict[Inode, Inode] = {}

    def twin(node: Node) -> Node:
        if isinstance(node, Directory):
            return node
        if node not in twins:
            twins[node] = survive(node)
        return twins[node]

    return twin
