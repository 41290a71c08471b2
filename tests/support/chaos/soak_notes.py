"""What publishers and subscribers of a soak note, as lines of text; and reading that again.

Pure. A file of notes belongs to one life of one process; each line is written at once, so that only the last
one can be torn, where the process was killed. A torn line was never noted.

    of a publisher      first N      the number that the life began with
                        flushed N    all below N is synced here
                        replicated N, merged N    the cluster said so, by progress or by the end of a wait
                        ended CLASS  an error ended the life

    of a subscriber     run POSITION SESSION NUMBER TAG COUNT    so many messages in a row
                        skip WANTED RESUMED REASON               an event
                        event TEXT   any other event
                        ack POSITION all below is acknowledged
                        bad TEXT     a value that nobody published
                        ended CLASS TEXT
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


def value_of(tag: int, number: int) -> bytes:
    """What life `tag` of a publisher publishes as `number`."""
    return b"%d:%d:" % (tag, number) + bytes([number % 251]) * (number * 7919 % 900)


def tag_of(value: bytes, number: int) -> int | None:
    """The life that published a value under that number; None if no life did."""
    tag, separator, _ = value.partition(b":")
    if not (separator and tag.isdigit() and len(tag) < 10):
        return None
    return int(tag) if value == value_of(int(tag), number) else None


@dataclass(frozen=True, slots=True)
class Published:
    """What one life of a publisher noted: ends are one past the last number."""

    session: str
    tag: int
    first: int | None = None
    """None: it was killed before it began."""
    flushed: int = 0
    replicated: int = 0
    merged: int = 0
    ended_by: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Messages in a row, of one session and one life of its publisher, numbers ascending by one."""

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
    """By `ack`."""

    position: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """What must not happen to a subscriber at all."""

    text: str


Item: TypeAlias = Run | Skipped | Acknowledged | Wrong


@dataclass(frozen=True, slots=True)
class Received:
    """What one life of a subscriber noted, in order."""

    name: str
    life: int
    wanted: int | None
    """Where it was to begin; None: where it had acknowledged."""
    items: tuple[Item, ...]


def read_published(session: str, tag: int, text: str) -> Published:
    """The notes of a publisher's life."""
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
    """The notes of a subscriber's life."""
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
