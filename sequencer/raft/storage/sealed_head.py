"""The first bytes of a file that is written as a whole: magic (8), version (2), flags (2), checksum (4)."""

from __future__ import annotations

import struct
from typing import Final

from rt.errors import Corrupt, UnknownVersion
from rt.log.format.checksum import around
from rt.log.format.constants import NEWER_HINT, VERSION

WIPE_HINT: Final = (
    "If a majority of the cluster works without this node: stop it, move its directory away, start it. It "
    "rejoins. A cluster of one has no other copy: keep the directory."
)

_HEAD = struct.Struct("<8sHHI")


def check_head(head: bytes, size: int, magic: bytes, *, path: str, what: str) -> None:
    """Raises `rt.UnknownVersion` for a version or flags of a newer rt, else `rt.Corrupt`.

    The checksum covers `head`, which must have `size` bytes.
    """
    if len(head) < size:
        raise damaged(f"{what} is truncated", path, len(head), size)
    found, version, flags, checksum = _HEAD.unpack_from(head)
    if found != magic:
        raise damaged(f"wrong magic of {what}", path, found, magic)
    if checksum != around(head):
        raise damaged(f"wrong checksum of {what}", path, checksum, around(head))
    if version != VERSION:
        unknown = f"unknown version of {what}"
        raise UnknownVersion(unknown, where=path, got=version, expected=VERSION, hint=NEWER_HINT)
    if flags:
        raise UnknownVersion(f"unknown flags of {what}", where=path, got=flags, expected=0, hint=NEWER_HINT)


def damaged(what: str, path: str, got: object = None, expected: object = None, *, offset: int = 0) -> Corrupt:
    return Corrupt(what, path=path, offset=offset, got=got, expected=expected, hint=WIPE_HINT)
