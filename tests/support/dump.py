"""Annotated hex dumps. Order and words come from the byte diagrams in the format modules.

A diagram is a table in a module's docstring: `offset  bytes  field`, one field a line. A second line may
continue the words. The rows must be contiguous, so that no byte of a header is left out.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import NamedTuple

_ROW = re.compile(r" +(\d+) +(\d+)  (\S.*)")
_WIDTH = 16


class Field(NamedTuple):
    """A row of a diagram."""

    offset: int
    size: int
    words: str


def diagram(module: ModuleType, which: int = 0) -> list[Field]:
    """Return the fixed fields of a module's `which`-th diagram, up to the first row without a size."""
    tables: list[list[Field]] = []
    for line in (module.__doc__ or "").splitlines():
        match = _ROW.fullmatch(line)
        if match is None:
            continue
        row = Field(int(match[1]), int(match[2]), match[3])
        if row.offset == 0:
            tables.append([])
        table = tables[-1]
        assert row.offset == sum(field.size for field in table), f"{module.__name__}: {line}"
        table.append(row)
    return tables[which]


class Dump:
    """A dump that grows with each added part. At the end, the parts must cover every byte."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self._lines: list[str] = []

    def title(self, text: str) -> None:
        """Add a line of prose."""
        self._lines += ["", text] if self._lines else [text]

    def fields(self, fields: list[Field]) -> dict[str, int]:
        """Add a header, and return its numbers by the first words of their fields.

        If two fields start with the same words, the first one counts.
        """
        numbers: dict[str, int] = {}
        for field in fields:
            raw = self.data[self.at : self.at + field.size]
            name = re.split(r"[,:;(]| \"", field.words)[0].strip()
            numbers.setdefault(name, int.from_bytes(raw, "little"))
            self.part(field.size, field.words)
        return numbers

    def part(self, size: int, words: str) -> None:
        """Add the next `size` bytes with their description."""
        assert self.at + size <= len(self.data), words
        raw = self.data[self.at : self.at + size]
        for start in range(0, size, _WIDTH):
            hexed = raw[start : start + _WIDTH].hex(" ")
            text = f"{words}{_value(raw, words)}" if start == 0 else ""
            self._lines.append(f"{self.at + start:6}  {hexed:<{3 * _WIDTH - 1}}  {text}".rstrip())
        self.at += size

    def numbers(self, count: int, size: int, words: str) -> None:
        """Add a column of `count` numbers, and its padding."""
        for index in range(count):
            self.part(size, words.format(index))
        self.padding()

    def padding(self) -> None:
        """Add the padding up to a multiple of 8."""
        if self.at % 8:
            self.part(-self.at % 8, "padding")

    def text(self) -> str:
        """Return the whole dump. Every byte must have been added."""
        assert self.at == len(self.data), f"{len(self.data) - self.at} bytes were not told"
        return "\n".join(self._lines) + "\n"


def _value(raw: bytes, words: str) -> str:
    if words.startswith(("magic", "padding", "incarnation", "run id")) or words == "0":
        return ""
    if len(raw) in {1, 2, 4, 8}:
        return f" = {int.from_bytes(raw, 'little', signed='ns since' in words or ', ns' in words)}"
    return ""
