"""The changes of one commit to a lease's table, and their division into parts that the nodes accept. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Final, NamedTuple

PART_BYTES: Final = 56 << 10
"""Of keys and values in one part, and the greatest size of a row. The nodes accept 64 KiB with their own
count of each row."""
_ROW_BYTES: Final = 128
KEY_BYTES_MAX: Final = 1024
"""Of a key in the table, which has the category too."""
CLEARS_MAX: Final = 16
"""Prefixes in one commit. The nodes accept no more, and all in the first part."""


REQUESTS: Final = "requests"
ANSWERS: Final = "answers"
"""Rows of these categories are between the owner and others: see `sequencer.state.leases.requests`."""


class Changes(NamedTuple):
    """What a commit does, in this order. Keys are those of the table."""

    clears: dict[str, None]
    deletes: dict[str, None]
    puts: dict[str, bytes]

    def clear(self, prefix: str) -> None:
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
        """Delete a request, and write its answer."""
        self.delete(f"{REQUESTS}\0{request.hex()}")
        self.put(f"{ANSWERS}\0{request.hex()}", bytes(8) + until_ns.to_bytes(8, "big") + content)

    def limit_clears(self, known: Mapping[str, Mapping[str, bytes]]) -> None:
        """If there are too many prefixes, delete their rows instead. `known`: all rows, by category."""
        if len(self.clears) <= CLEARS_MAX:
            return
        for category, rows in known.items():
            if any(f"{category}\0".startswith(prefix) for prefix in self.clears):
                found = (f"{category}\0{key}" for key in rows)
                self.deletes.update((row, None) for row in found if row not in self.puts)
        self.clears.clear()

    def parts(self) -> Iterator[Part]:
        """Split into parts that fit a command each; at least one."""
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
    clears: list[str]
    deletes: list[str]
    puts: list[tuple[str, bytes]]


def _fitting(part: Part, size: int, key: str, value: bytes = b"") -> Generator[Part, None, tuple[Part, int]]:
    """The part that the row goes into, with its size then. Yields `part` if the row does not fit."""
    more = row_bytes(key, value)
    if size and size + more > PART_BYTES:
        yield part
        part, size = Part([], [], []), 0
    return part, size + more


def row_bytes(key: str, value: bytes) -> int:
    """As the nodes count it."""
    return len(key.encode()) + len(value) + _ROW_BYTES
