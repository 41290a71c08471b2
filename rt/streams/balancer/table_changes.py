"""The changes of one commit to a lease's table, and their division into parts that the nodes accept.

Pure. A key of the table is `CATEGORY<NUL>KEY`. The nodes keep the parts until the last part has arrived. Then
they apply all parts in order. Invariant: the result is the result of the changes as a whole, however the
changes are divided.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Final, NamedTuple

PART_BYTES: Final = 56 << 10
"""Maximum size of one part, and so of one row, as `row_bytes` counts it. The nodes accept 64 KiB
(`sequencer.state.leases.tables`)."""
_ROW_BYTES: Final = 128
"""Bytes that the nodes add for each row (`table_rows.ROW_BYTES`)."""
KEY_BYTES_MAX: Final = 1024
"""Maximum size of a key of the table, with its category. The nodes reject longer keys."""
CLEARS_MAX: Final = 16
"""Maximum number of prefixes in one commit. The nodes reject more prefixes, and accept prefixes only in the
first part.
"""

REQUESTS: Final = "requests"
ANSWERS: Final = "answers"
"""Categories of the requests to the owner, and of its answers: see `sequencer.state.leases.requests`."""


class Changes(NamedTuple):
    """The operations of a commit: first the clears, then the deletes, then the puts. A key is either in the
    deletes or in the puts.

    The dictionaries with None are ordered sets.
    """

    clears: dict[str, None]
    """Prefixes of keys: `CATEGORY<NUL>`, or `ROOT/` for all categories below it."""
    deletes: dict[str, None]
    puts: dict[str, bytes]

    def clear(self, prefix: str) -> None:
        """Delete all rows with this prefix, also those that this commit has put so far."""
        for rows in (self.deletes, self.puts):
            for key in [key for key in rows if key.startswith(prefix)]:
                del rows[key]
        self.clears[prefix] = None

    def delete(self, key: str) -> None:
        self.puts.pop(key, None)
        self.deletes[key] = None

    def put(self, key: str, value: bytes) -> None:
        self.deletes.pop(key, None)
        self.puts[key] = value

    def answer(self, request: bytes, until_ns: int, content: bytes) -> None:
        """Delete a request and write its answer. `until_ns` is the `until_ns` of the request."""
        self.delete(f"{REQUESTS}\0{request.hex()}")
        self.put(f"{ANSWERS}\0{request.hex()}", bytes(8) + until_ns.to_bytes(8, "big") + content)

    def limit_clears(self, known: Mapping[str, Mapping[str, bytes]]) -> None:
        """If there are more than `CLEARS_MAX` prefixes, delete the rows one by one instead.

        `known`: all rows of the table before this commit, by category.
        """
        if len(self.clears) <= CLEARS_MAX:
            return
        for category, rows in known.items():
            if any(f"{category}\0".startswith(prefix) for prefix in self.clears):
                found = (f"{category}\0{key}" for key in rows)
                self.deletes.update((row, None) for row in found if row not in self.puts)
        self.clears.clear()

    def parts(self) -> Iterator[Part]:
        """Split into parts that each fit into one command. A commit without changes is one empty part."""
        part, size = Part([], [], []), 0
        for key in self.clears:
            part, size = yield from _fitting(part, size, key)
            part.clears.append(key)
        for key in self.deletes:
            part, size = yield from _fitting(part, size, key)
            part.deletes.append(key)
        for key, value in self.puts.items():
            part, size = yield from _fitting(part, size, key, value)
            part.puts.append((key, value))
        yield part


class Part(NamedTuple):
    """The part of a commit that one command carries."""

    clears: list[str]
    deletes: list[str]
    puts: list[tuple[str, bytes]]


def _fitting(part: Part, size: int, key: str, value: bytes = b"") -> Generator[Part, None, tuple[Part, int]]:
    """Return the part that the row goes into, and its size with the row. Yields `part` if it is full."""
    more = row_bytes(key, value)
    if size and size + more > PART_BYTES:
        yield part
        part, size = Part([], [], []), 0
    return part, size + more


def row_bytes(key: str, value: bytes) -> int:
    """The size of a row as the nodes count it."""
    return len(key.encode()) + len(value) + _ROW_BYTES
