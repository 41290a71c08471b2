"""The table of a comparison: a column for each system, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct, structs

from rt.bench.measure import Figure
from sequencer.bench.compare.system import Facts

_HEADINGS: Final = {
    "client": "Python client",
    "replication": "replication",
    "fsync": "fsync",
    "tls": "TLS",
    "consumer": "consumer",
}


class Compared(Struct, frozen=True):
    """One system: its facts, and the results of all its rounds."""

    name: str
    facts: Facts
    received: int
    """Messages that the consumer received in all rounds: all that were published."""
    lost: int
    wrong: int
    """Messages that came again, or after a later one."""
    figures: tuple[Figure, ...]
    """The figures of all systems have the same names, in the same order."""

    def as_dict(self) -> dict[str, object]:
        """For one JSON object per line."""
        return {
            "system": self.name,
            **structs.asdict(self.facts),
            "received": self.received,
            "lost": self.lost,
            "wrong": self.wrong,
            "figures": [figure.as_dict() for figure in self.figures],
        }


def table(systems: Sequence[Compared]) -> list[str]:
    """The lines of the table."""
    rows = [["", *(each.facts.version for each in systems)]]
    for field, heading in _HEADINGS.items():
        rows.append([heading, *(str(getattr(each.facts, field)) for each in systems)])
    rows.append(["verified by the consumer", *map(_verified, systems)])
    for figures in zip(*(each.figures for each in systems), strict=True):
        rows.append([figures[0].name, *(figure.as_cell() for figure in figures)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def _verified(each: Compared) -> str:
    return f"{each.received:,} messages: {each.lost:,} lost, {each.wrong:,} repeated or out of order"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"
