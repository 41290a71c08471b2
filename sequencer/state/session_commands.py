"""The commands about sessions and their runs: see `sequencer.state.run_lifecycle`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from msgspec import Struct

from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.names import check_dedup_id, check_session_name
from rt.units import SILENCE_MS_END
from sequencer.state.state import End

SEALED_RUNS_MAX: Final = 256
"""Maximum number of sealed runs that one command opens."""
LATER_MAX: Final = 256
"""Maximum number of runs, after the first one, that one command fences or closes."""
FORGET_MAX: Final = 1024
"""Sessions in one command."""
INCARNATION_BYTES: Final = 16
RUN_ID_BYTES: Final = 8


class OpenRun(Struct, frozen=True):
    """Open run number `run` of a session's incarnation, identified by the random `run_id`."""

    session: str
    incarnation: bytes
    dedup_id: str | None
    run: int
    run_id: bytes
    newest: int = 0
    """The id of the newest incarnation that the proposer knew of the session; 0: none."""

    def __post_init__(self) -> None:
        _check_incarnation(self.session, self.incarnation, self.dedup_id, self.newest)
        _check_run(self.run, self.run_id)


class SealedRun(Struct, frozen=True):
    """A run that ended, at `end`, on the publisher's disk before any byte of it was sent."""

    run: int
    run_id: bytes
    end: End

    def __post_init__(self) -> None:
        _check_run(self.run, self.run_id)
        _check_end(self.end)


class OpenSealedRuns(Struct, frozen=True):
    """Open runs, in order, whose ends are known: see `sequencer.state.run_lifecycle`."""

    session: str
    incarnation: bytes
    dedup_id: str | None
    runs: tuple[SealedRun, ...]
    newest: int = 0
    """As in `OpenRun`."""

    def __post_init__(self) -> None:
        _check_incarnation(self.session, self.incarnation, self.dedup_id, self.newest)
        if not 1 <= len(self.runs) <= SEALED_RUNS_MAX:
            raise ValueError(f"{len(self.runs)} sealed runs: 1 to {SEALED_RUNS_MAX}")
        if any(earlier.run >= later.run for earlier, later in pairwise(self.runs)):
            raise ValueError(f"sealed runs are not in order: {[run.run for run in self.runs]}")

    @property
    def opens(self) -> Iterator[OpenRun]:
        """The commands that open the same runs without their ends."""
        for run in self.runs:
            yield OpenRun(self.session, self.incarnation, self.dedup_id, run.run, run.run_id, self.newest)


class FenceRun(Struct, frozen=True):
    """Fence runs: no node accepts another byte of them after this is applied."""

    session_id: int
    run: int
    later: tuple[int, ...] = ()
    """More runs of the session to fence."""

    def __post_init__(self) -> None:
        _check_later(self.run, self.later)


class CloseRun(Struct, frozen=True):
    """End a session's run at `offset` of segment `roll`, before message `number`."""

    session_id: int
    run: int
    roll: int
    offset: int
    number: int
    later: tuple[int, ...] = ()
    """Later runs of the session that end before their first byte."""
    announced: End | None = None
    """The end up to which the publisher said that it has the run, if the proposer knows it."""

    def __post_init__(self) -> None:
        _check_end(self.end)
        if self.announced is not None:
            _check_end(self.announced)
        _check_later(self.run, self.later)

    @property
    def end(self) -> End:
        return End(self.roll, self.offset, self.number)


class CloseSession(Struct, frozen=True):
    """Close the newest session of that name: abandon the rest of its open run."""

    session: str

    def __post_init__(self) -> None:
        check_session_name(self.session)


class LimitSilence(Struct, frozen=True):
    """The publisher of a session's last run promises to be silent for no longer than this.

    0: it was closed in order, and promises nothing more.
    """

    session_id: int
    run: int
    milliseconds: int

    def __post_init__(self) -> None:
        if not (0 <= self.run < 2**32 and 0 <= self.milliseconds < SILENCE_MS_END):
            raise ValueError(f"run {self.run} is silent for {self.milliseconds} ms at most")


class Forget(Struct, frozen=True):
    """Delete the records of these closed sessions, which a majority has merged durably."""

    session_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.session_ids) <= FORGET_MAX:
            raise ValueError(f"{len(self.session_ids)} sessions to forget: 1 to {FORGET_MAX}")

    @property
    def brief(self) -> str:
        """Text for a log line."""
        return f"Forget({len(self.session_ids)} sessions, the first {self.session_ids[0]})"


def _check_incarnation(session: str, incarnation: bytes, dedup_id: str | None, newest: int) -> None:
    check_session_name(session)
    if dedup_id is not None:
        check_dedup_id(dedup_id)
    if len(incarnation) != INCARNATION_BYTES or not 0 <= newest < 2**32:
        raise ValueError(f"incarnation of {len(incarnation)} bytes, newest session id {newest}")


def _check_run(run: int, run_id: bytes) -> None:
    if len(run_id) != RUN_ID_BYTES or not 0 <= run < 2**32:
        raise ValueError(f"run {run} with an id of {len(run_id)} bytes")


def may_be_end(offset: int, number: int) -> bool:
    """Whether a segment can end at this offset, before this message number."""
    return SEGMENT_HEADER_BYTES <= offset < NUMBER_MAX and offset % 8 == 0 and 0 <= number < NUMBER_MAX


def _check_end(end: End) -> None:
    if not may_be_end(end.offset, end.number):
        raise ValueError(f"no end of a session: offset {end.offset}, number {end.number}")


def _check_later(run: int, later: tuple[int, ...]) -> None:
    if len(later) > LATER_MAX:
        raise ValueError(f"{len(later)} later runs: at most {LATER_MAX}")
    if any(before >= after for before, after in pairwise((run, *later))):
        raise ValueError(f"runs are not in order: {run}, {later}")
