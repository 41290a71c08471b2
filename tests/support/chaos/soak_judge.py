"""Decides whether a soak kept every promise, from the notes of its publishers and subscribers.

Pure. Each broken promise is reported as a sentence. All subscribers that received a position must have
received the same message. Together they must have received every position, because a message that no
subscriber received cannot be distinguished from a lost one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from chaos.soak_notes import Acknowledged, Published, Received, Run, Skipped, Wrong

Ints = npt.NDArray[np.int64]


def judge(published: Sequence[Published], received: Sequence[Received], end: int) -> Iterator[str]:
    """Yield every broken promise. The merged log ends at `end`, and all publishers and subscribers have
    ended.
    """
    for life in received:
        yield from judge_life(life)
    yield from _judge_resumed(received)
    stream = Stream(end)
    for life in received:
        for item in life.items:
            if isinstance(item, Run):
                yield from stream.take(item, f"{life.name}, life {life.life}")
    yield from stream.holes()
    for session in sorted({one.session for one in published} | set(stream.sessions)):
        lives = [one for one in published if one.session == session]
        yield from judge_session(session, lives, *stream.of(session))


def judge_life(life: Received) -> Iterator[str]:
    """Check that positions are dense. Each gap needs a skip forward that gives both ends and the reason."""
    who = f"{life.name}, life {life.life}"
    expected = life.wanted
    for item in life.items:
        match item:
            case Run():
                if expected is not None and item.position != expected:
                    yield f"{who}: position {item.position} where {expected} must follow"
                expected = item.end
            case Skipped(wanted, resumed, reason):
                if expected is not None and wanted != expected:
                    yield f"{who}: told of a skip from {wanted}, where {expected} must follow"
                if resumed <= wanted or not reason:
                    yield f"{who}: told of a skip from {wanted} to {resumed}, reason {reason!r}"
                expected = resumed
            case Wrong(text):
                yield f"{who}: {text}"


def _judge_resumed(received: Sequence[Received]) -> Iterator[str]:
    """Check that a named subscriber resumes at its last noted ack, or later if an ack was not noted, but not
    after its end.
    """
    acknowledged: dict[str, int] = {}
    reached: dict[str, int] = {}
    for life in received:
        starts = [item for item in life.items if isinstance(item, Run | Skipped)]
        if life.wanted is None and starts and life.name in reached:
            first = starts[0].position if isinstance(starts[0], Run) else starts[0].wanted
            least, most = acknowledged.get(life.name, 0), reached[life.name]
            if not least <= first <= most:
                yield f"{life.name}, life {life.life}: resumed at {first}, not from {least} to {most}"
        for item in life.items:
            match item:
                case Run():
                    reached[life.name] = max(reached.get(life.name, 0), item.end)
                case Acknowledged(position):
                    acknowledged[life.name] = position


class Stream:
    """The merged stream below `end`, combined from what the subscribers received."""

    def __init__(self, end: int) -> None:
        self.sessions: list[str] = []
        self._which = np.full(end, -1, np.int64)
        self._numbers = np.zeros(end, np.int64)
        self._tags = np.zeros(end, np.int64)

    def take(self, run: Run, who: str) -> Iterator[str]:
        """Add a run. Report a position at which another subscriber received something else."""
        if run.end > len(self._which):
            yield f"{who}: had positions up to {run.end}, but the log ends at {len(self._which)}"
            return
        if run.session not in self.sessions:
            self.sessions.append(run.session)
        at = slice(run.position, run.end)
        rows = (
            (self._which[at], np.full(run.count, self.sessions.index(run.session))),
            (self._numbers[at], np.arange(run.number, run.number + run.count)),
            (self._tags[at], np.full(run.count, run.tag)),
        )
        is_known = self._which[at] >= 0
        differs = np.logical_or.reduce([had != has for had, has in rows]) & is_known
        if differs.any():
            yield f"{who}: position {run.position + int(differs.argmax())} is not what others had there"
        for had, has in rows:
            had[:] = np.where(is_known, had, has)

    def holes(self) -> Iterator[str]:
        """Report positions that no subscriber received."""
        missing = np.flatnonzero(self._which < 0)
        if len(missing):
            yield f"{len(missing)} positions were read by no subscriber, the first is {missing[0]}"

    def of(self, session: str) -> tuple[Ints, Ints]:
        """Return the numbers and the tags of a session's messages, in the order of the stream."""
        if session not in self.sessions:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows = self._which == self.sessions.index(session)
        return self._numbers[rows], self._tags[rows]


def judge_session(session: str, lives: Sequence[Published], numbers: Ints, tags: Ints) -> Iterator[str]:
    """Check that each number of a session occurs once and in order, and that acknowledged messages are as
    their process sent them.
    """
    wrong = np.flatnonzero(numbers != np.arange(len(numbers)))
    if len(wrong):
        at = int(wrong[0])
        yield f"{session}: number {numbers[at]} where {at} must follow: lost, repeated or out of order"
        return
    begun = [life for life in lives if life.first is not None]
    for life in begun:
        for level in ("replicated", "merged"):
            if (told := getattr(life, level)) > len(numbers):
                yield f"{session}, life {life.tag}: {told} were {level}, {len(numbers)} are there"
    for life in lives:
        if life.ended_by:
            yield f"{session}, life {life.tag}: ended by {life.ended_by}"
    if begun and begun[-1].flushed != len(numbers):
        yield f"{session}: {begun[-1].flushed} were published, {len(numbers)} are there"
    for life in begun:
        end = max(life.flushed, life.replicated)
        others = np.flatnonzero(tags[life.first : end] != life.tag)
        if len(others):
            number = (life.first or 0) + int(others[0])
            yield f"{session}: number {number} is not what life {life.tag} published"
    for life, successor in pairwise(begun):
        end = max(life.flushed, life.replicated)
        if (first := successor.first or 0) < end:
            yield f"{session}, life {successor.tag}: began at {first}, below {end} of the one before"


# Use of memory and disk


GROWTH_MB_MAX = 24.0
GROWTH_SHARE_MAX = 0.25
"""Share of the memory that it may grow by from the second third to the last. The greater limit applies.
Python's heap varies by some MB.
"""
WARM_S = 20.0
"""A younger process is still growing to its normal size."""
SAMPLES_MIN = 10


class MemorySample(tuple[float, float, float]):
    """(seconds since the start, age of the process in seconds, its own memory in MB)."""

    __slots__ = ()


def growth(samples: Sequence[MemorySample], seconds: float) -> tuple[float, float] | None:
    """Return the medians of the second and the last third, for warm processes; None if there are too few
    samples.
    """
    thirds: list[list[float]] = [[], [], []]
    for at_s, age_s, mb in samples:
        if age_s >= WARM_S:
            thirds[min(2, int(at_s * 3 / seconds))].append(mb)
    if min(len(thirds[1]), len(thirds[2])) < SAMPLES_MIN:
        return None
    return float(np.median(thirds[1])), float(np.median(thirds[2]))


def judge_memory(samples: Mapping[str, Sequence[MemorySample]], seconds: float) -> Iterator[str]:
    """Check that memory does not grow. `samples`: by name ("n1 data"), for all processes with that name."""
    for process, found in sorted(samples.items()):
        if (medians := growth(found, seconds)) is not None:
            second, last = medians
            if last - second > max(GROWTH_MB_MAX, GROWTH_SHARE_MAX * second):
                yield f"{process}: its memory grew from {second:.0f} MB to {last:.0f} MB"


def judge_disk(most_bytes: Mapping[str, int], bound_bytes: int, what: str) -> Iterator[str]:
    """Check that no merged log takes more than `bound_bytes`."""
    for name, size in sorted(most_bytes.items()):
        if size > bound_bytes:
            yield f"{name}: {what} took {size:,} bytes, {bound_bytes:,} at most were to be kept"
