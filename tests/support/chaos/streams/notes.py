"""The notes of a host while it runs: a line of JSON for each fact, written at once.

Pure. Times are those of the machine's monotonic clock, which all processes share. A line that a kill has torn
does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import msgspec

NO_FENCE: Final = 0
"""Fencing tokens start at 1."""


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """A consumer call that accepted `events`: half-open ranges of numbers of its stream."""

    begun_s: float
    done_s: float
    fence: int
    """Fencing token of the lease that this host held when the call started. `NO_FENCE`: it had lost the
    lease.
    """
    subscription: str
    stream: str
    events: list[tuple[int, int]]


class Subscribed(msgspec.Struct, frozen=True, tag="subscribed", array_like=True):
    """`subscribe` has returned. All events published later must be delivered."""

    at_s: float
    subscription: str
    stream: str


class Started(msgspec.Struct, frozen=True, tag="started", array_like=True):
    """The provider has started."""

    at_s: float


class Wrong(msgspec.Struct, frozen=True, tag="wrong", array_like=True):
    """Something that must not happen, such as a gap."""

    at_s: float
    text: str


Note: TypeAlias = Call | Subscribed | Started | Wrong

_DECODER: Final = msgspec.json.Decoder(Note)


def encode_note(note: Note) -> bytes:
    return msgspec.json.encode(note) + b"\n"


def decode_notes(lines: bytes) -> Iterator[Note]:
    """Decode complete lines."""
    return map(_DECODER.decode, lines.splitlines())


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers in their order, as ranges."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return ranges
