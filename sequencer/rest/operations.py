"""What REST may have done: the commands of operators, and resets. Protocols and values; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from sequencer.commands import Operation
from sequencer.outcomes import Outcome

ResetKind: TypeAlias = Literal["soft", "hard"]
ResetState: TypeAlias = Literal["idle", "running", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Messages `first` to `end` of a session's X that were replicated, and that a hard reset dropped."""

    session: str
    session_id: int
    x: int
    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end:
            raise ValueError(f"no range of numbers: {self.first} to {self.end}")


@dataclass(frozen=True, slots=True)
class ResetStatus:
    """The last reset that a node knows of. Times are ns since the epoch, 0: not yet."""

    state: ResetState = "idle"
    """"idle": there was none."""
    kind: ResetKind | None = None
    epoch: int = 0
    """Of the cluster: the one that a reset makes, while it runs and behind it."""
    started_ns: int = 0
    ended_ns: int = 0
    dropped: tuple[Dropped, ...] = ()
    """By session; of a hard reset that is done."""
    error: str = ""
    """Why it failed; a sentence."""
    may_lose: str = ""
    """What one without a majority may have lost; a sentence."""


NO_RESET: Final = ResetStatus()


class Commanding(Protocol):
    """Has the cluster carry out a command, from any node."""

    async def run(self, operation: Operation) -> Outcome:
        """Ask for `operation` until this node has applied it; what that came to, `Refused` if nothing.

        Raises `rt.Timeout` if that takes more than some seconds, and says whether it may have happened; it
        does not happen later. `Unreachable` before the node has joined its cluster.
        """


class Resets(Protocol):
    """Resets of the cluster, from any node; one at a time."""

    def status(self) -> ResetStatus:
        """How the last one stands, also one that restarted this process. At once; raises nothing."""

    async def begin(self, kind: ResetKind, *, force: bool) -> ResetStatus:
        """Begin one; returns when it is under way, within seconds. `force`: also without a majority.

        Raises `NotReady` with the reason if one runs, or if there is no majority and no `force`: then it says
        what may be lost with it.
        """


@dataclass(frozen=True, slots=True)
class Operations:
    """What a node has for operators."""

    commanding: Commanding
    resets: Resets
