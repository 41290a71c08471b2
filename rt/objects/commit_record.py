"""The number of the last commit, in a separate file beside the store's file: `<path>-commit`.

SQLite ends its recovery at the first corrupt frame of the write-ahead log, and treats a missing log as an
empty log. So it may return an earlier commit without an error. This record states which commit to expect.

    offset 0, 512   a slot     magic "rtCR", version u32, store id (16 bytes), number u64, CRC-32C u32;
                               little-endian, the checksum over what is before it

Commit n goes into slot n % 2. The slot is written after the commit is durable, and synced before the commit
is reported. So:
- A reported commit is never newer than the record.
- While a slot is torn, the file has at least the commit that follows the commit in the other slot.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Final

from msgspec import Struct

from rt.errors import UnknownVersion
from rt.log.disk import REAL
from rt.log.format.checksum import crc32c
from rt.log.whole_files import write_whole

_SLOT: Final = struct.Struct("<4sI16sQ")
_CHECKSUM: Final = struct.Struct("<I")
_MAGIC: Final = b"rtCR"
_VERSION: Final = 1
_SLOT_BYTES: Final = 512  # a sector: disks write it completely or not at all


class LastCommit(Struct, frozen=True):
    """The content of a record. `is_torn`: one slot is invalid, so the file must have a later commit."""

    store_id: str
    number: int
    is_torn: bool = False


def record_path(path: str) -> str:
    return f"{path}-commit"


def encode(last: LastCommit) -> bytes:
    """The bytes of a slot."""
    head = _SLOT.pack(_MAGIC, _VERSION, bytes.fromhex(last.store_id), last.number)
    return head + _CHECKSUM.pack(crc32c(head))


def decode(data: bytes) -> LastCommit | None:
    """Decode the bytes of a record; None if they are not valid. `rt.UnknownVersion` for a newer version."""
    slots = [_decode_slot(data[at : at + _SLOT_BYTES]) for at in (0, _SLOT_BYTES)]
    found = [each for each in slots if each is not None]
    if not found or len({each.store_id for each in found}) > 1:
        return None
    last = max(found, key=lambda each: each.number)
    return LastCommit(last.store_id, last.number, is_torn=len(found) == 1)


def _decode_slot(data: bytes) -> LastCommit | None:
    size = _SLOT.size + _CHECKSUM.size
    if len(data) < size or _CHECKSUM.unpack_from(data, _SLOT.size)[0] != crc32c(data[: _SLOT.size]):
        return None
    magic, version, store_id, number = _SLOT.unpack_from(data)
    if magic != _MAGIC:
        return None
    if version != _VERSION:
        what = "unknown version of the record of the last commit"
        raise UnknownVersion(what, got=version, expected=_VERSION, hint="Use a newer rt.")
    return LastCommit(store_id.hex(), number)


def read_record(path: str) -> bytes | None:
    """The bytes of the record of the store in `path`; None if there is no record."""
    try:
        with contextlib.closing(REAL.open(record_path(path))) as file:
            return file.pread(2 * _SLOT_BYTES, 0)
    except FileNotFoundError:
        return None


class CommitRecord:
    """Writes the record of an open store. Methods raise `OSError`. One thread at a time."""

    def __init__(self, path: str, store_id: str, number: int) -> None:
        """Replace the record, durably. `number` must not be less than the number in the old record."""
        self._store_id: Final = store_id
        slot = encode(LastCommit(store_id, number)).ljust(_SLOT_BYTES, b"\0")
        write_whole(REAL, record_path(path), slot * 2)
        self._file = REAL.open(record_path(path), write=True)

    def write(self, number: int) -> None:
        """Return when the record of this commit is on the medium."""
        slot = encode(LastCommit(self._store_id, number))
        if self._file.pwritev([slot], number % 2 * _SLOT_BYTES) != len(slot):
            raise OSError(28, os.strerror(28))
        self._file.sync()

    def is_linked(self) -> bool:
        """Whether the record still has its name."""
        return self._file.is_linked()

    def close(self) -> None:
        self._file.close()
