"""The notes of a soak's publishers and subscribers as lines of text, and functions that read them.

Pure. Each file of notes belongs to one process. Each line is written in one call, so only the last line can
be torn, if the process was killed. A torn line does not count.

    of a publisher      first N      the first number of this process
                        flushed N    all numbers below N are synced here
                        replicated N, merged N    the cluster reported this, as progress or after a wait
                        ended CLASS  an error ended the publishing

    of a subscriber     run POSITION SESSION NUMBER TAG COUNT    COUNT consecutive messages
                        skip WANTED RESUMED REASON               an event
                        event TEXT   any other event
                        ack POSITION all positions below are acknowledged
                        bad TEXT     a value that no publisher published
                        ended CLASS TEXT
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


def value_of(tag: int, number: int) -> bytes:
    """Return the value that process `tag` of a publisher publishes as `number`."""
    return b"%d:%d:" % (tag, number) + bytes([number % 251]) * (number * 7919 % 900)


def tag_of(value: bytes, number: int) -> int | None:
    """Return the tag of the process that published this value under this number; None if there is none."""
    tag, separator, _ = value.partition(b":")
    if not (separator and tag.isdigit() and len(tag) < 10):
        return None
    return int(tag) if value == value_of(int(tag), number) else None


@dataclass(frozen=True, slots=True)
class Published:
    """The notes of one publisher process. Each end is one past the last number."""

    session: str
    tag: int
    first: int | None = None
    """None: the process was killed before it started to publish."""
    flushed: int = 0
    replicated: int = 0
    merged: int = 0
    ended_by: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive messages of one session and one publisher process. Their numbers rise by one."""

    position: int
    session: str
    number: int
    tag: int
    count: int

    @property
    def end(self) -> int:
        """One past its last position."""
        return self.position + self.count


@dataclass(frozen=True, slots=True)
class Skipped:
    """A `rt.events.SkipForward`."""

    wanted: int
    resumed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The position of an `ack`."""

    position: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something that must never happen to a subscriber."""

    text: str


Item: TypeAlias = Run | Skipped | Acknowledged | Wrong


@dataclass(frozen=True, slots=True)
class Received:
    """The notes of one subscriber process, in order."""

    name: str
    life: int
    wanted: int | None
    """The start position of the process. None: its acknowledged position."""
    items: tuple[Item, ...]


def read_published(session: str, tag: int, text: str) -> Published:
    """Return the notes of a publisher process."""
    reached: dict[str, int] = {}
    ended_by = ""
    for line in _lines(text):
        word, _, what = line.partition(" ")
        if word == "ended":
            ended_by = what
        else:
            reached[word] = int(what)
    levels = {word: reached.get(word, 0) for word in ("flushed", "replicated", "merged")}
    return Published(session, tag, reached.get("first"), **levels, ended_by=ended_by)


def read_received(name: str, life: int, wanted: int | None, text: str) -> Received:
    """Return the notes of a subscriber process."""
    return Received(name, life, wanted, tuple(map(_item, _lines(text))))


def _item(line: str) -> Item:
    word, _, rest = line.partition(" ")
    match word:
        case "run":
            position, session, number, tag, count = rest.split()
            return Run(int(position), session, int(number), int(tag), int(count))
        case "skip":
            wanted, resumed, reason = (*rest.split(" ", 2), "")[:3]
            return Skipped(int(wanted), int(resumed), reason)
        case "ack":
            return Acknowledged(int(rest))
    return Wrong(line)


def _lines(text: str) -> Iterator[str]:
    yield from text[: text.rfind("\n") + 1].splitlines()
