"""The content of a store: the result of a check, and the size of each object. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from msgspec import Struct

_OBJECT: Final = re.compile(r"(?P<owner>.*?)/?state/item/(?P<id>[^/]+)/.*", re.DOTALL)
"""The category of an object's rows: see `rt.objects.space`."""
_INDEX: Final = re.compile(r"(?P<owner>.*?)/?state(/index)?", re.DOTALL)
_ENGINE: Final = "query"
"""The owner of the rows of an engine of queries, which has objects too."""


class StoreStatus(Struct, frozen=True):
    """What a store holds."""

    path: str
    """The path of its file, or the address of its server without the password."""
    store_id: str
    commit: int
    """The number of the last commit."""
    rows: int
    categories: int
    is_in_use: bool
    """Whether a program has the store open."""
    is_complete: bool
    """Whether the file is complete without other files, like a backup that was not opened yet."""
    fence: int | None = None
    """The fencing token of the last owner. None: the store has none."""


class ObjectSize(Struct, frozen=True):
    """The rows of one object, or the other rows of an owner."""

    owner: str
    """The prefix of its space without the last slash; "query": an engine of queries."""
    object: str
    """The id of the object. Empty for rows of the owner that belong to no object, such as its index."""
    rows: int
    bytes: int
    """Bytes of the values, without the keys and the overhead of the store."""


class StoreContents(Struct, frozen=True):
    """A store, and the objects in it, the largest first."""

    status: StoreStatus
    objects: tuple[ObjectSize, ...]


def object_sizes(categories: Iterable[tuple[str, int, int]]) -> tuple[ObjectSize, ...]:
    """The objects in these categories, the largest first. A category has its number of rows and of bytes."""
    found = dict[tuple[str, str], tuple[int, int]]()
    for category, rows, size in categories:
        place = _place(category)
        before = found.get(place, (0, 0))
        found[place] = before[0] + rows, before[1] + size
    made = (ObjectSize(*place, *sizes) for place, sizes in found.items())
    return tuple(sorted(made, key=lambda each: (-each.bytes, each.owner, each.object)))


def _place(category: str) -> tuple[str, str]:
    """The owner and the object of a category."""
    match = _OBJECT.fullmatch(category) or _INDEX.fullmatch(category)
    owner = category.partition("/")[0] if match is None else match["owner"]
    if owner.partition("/")[0] == _ENGINE:
        owner = _ENGINE
    return owner, unquote(match["id"]) if match is not None and "id" in match.groupdict() else ""
