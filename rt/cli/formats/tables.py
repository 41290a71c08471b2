"""Text for a terminal: escaped bytes, times, sizes, aligned tables.

Invariant: what `escape` returns is printable, and different inputs give different outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_SHORT = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def escape(value: str | bytes) -> str:
    """Return printable text unchanged; escape the backslash and all other characters as in a Python
    string.
    """
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(map(_escape_one, text))


def _escape_one(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable():
        return character
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def count_of(count: int, noun: str) -> str:
    """A number with its noun: "1 message", "3,000 messages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_size(size: float) -> str:
    """Bytes with a decimal unit, three digits or more."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def format_age(age_ns: int) -> str:
    """A duration in its largest whole unit."""
    seconds = max(age_ns, 0) // 1_000_000_000
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str]) -> Iterator[str]:
    """The lines of a table; the columns named in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        )
        yield "  ".join(cells).rstrip()
