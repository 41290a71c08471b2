"""The book of subscriptions that are kept in memory: its id and position, next to the copy of the log.

    book.NAME           the id: 16 hexadecimal digits
    book-position.NAME  what was acknowledged, as in `rt.client.cursor`

So a host that starts again without its subscriptions continues where it acknowledged, under the same hold.
"""

from __future__ import annotations

import os
from typing import Final

from rt.client.cursor import read_position, write_position
from rt.errors import Corrupt
from rt.log.disk import REAL, storage_errors, write_whole
from rt.log.scan.directory import read_file

_MAGIC: Final = b"RTBOOKED"
_ID_BYTES: Final = 8


class CopyBook:
    """The book of `name` in `directory`, which is made. Raises storage errors, `rt.Corrupt`."""

    def __init__(self, directory: str, name: str) -> None:
        self._path = os.path.join(directory, f"book-position.{name}")
        with storage_errors(directory, "making a directory for a copy"):
            REAL.make_directory(directory)
        self.id: Final = _id(os.path.join(directory, f"book.{name}"))
        self.position = read_position(REAL, self._path, _MAGIC)
        """None: nothing was acknowledged."""

    def acknowledge(self, position: int) -> None:
        """Durable on return."""
        if self.position is None or position > self.position:
            write_position(REAL, self._path, _MAGIC, position)
            self.position = position


def _id(path: str) -> str:
    data = read_file(REAL, path, 64, doing="reading the id of a book")
    if data is None:
        data = os.urandom(_ID_BYTES).hex().encode()
        with storage_errors(path, "keeping the id of a book"):
            write_whole(REAL, path, data)
    try:
        return bytes.fromhex(data.decode()).hex()
    except ValueError as error:
        raise Corrupt(
            "the id of a book is not valid",
            path=path,
            offset=0,
            hint="Remove the file: the subscriptions in memory get another hold.",
        ) from error
