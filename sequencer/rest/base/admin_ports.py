"""Ports through which REST runs operators' commands and resets. Protocols and values; pure."""

from __future__ import annotations

from typing import Final, Literal, Protocol, TypeAlias

from msgspec import Struct

from sequencer.state.apply_result import Outcome
from sequencer.state.commands import Operation

ResetKind: TypeAlias = Literal["soft", "hard"]
ResetState: TypeAlias = Literal["idle", "running", "done", "failed"]


class DroppedMessages(Struct, frozen=True):
    """Messages [first, end) of run `run` of a session: replicated, then dropped by a hard reset."""

    session: str
    session_id: int
    run: int
    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end:
            raise ValueError(f"invalid range of message numbers: got {self.first} to {self.end}")


class ResetStatus(Struct, frozen=True):
    """The last reset that a node knows of. Times are ns since 1970; 0: not yet."""

    state: ResetState = "idle"
    """"idle": there was no reset."""
    kind: ResetKind | None = None
    epoch: int = 0
    """The cluster epoch that the reset creates."""
    started_ns: int = 0
    ended_ns: int = 0
    dropped: tuple[DroppedMessages, ...] = ()
    """By session; set when a hard reset is done."""
    error: str = ""
    """Why it failed; a sentence."""
    may_lose: str = ""
    """What a reset without a majority may have lost; a sentence."""


NO_RESET: Final = ResetStatus()


class CommandPort(Protocol):
    """Runs commands on the cluster, from any node."""

    async def run(self, operation: Operation) -> Outcome:
        """Request `operation` until this node has applied it; returns its outcome.

        `CommandRejected` if the command was rejected.

        Raises `rt.Timeout` after a few seconds; the error says whether the command may have taken effect. It
        never takes effect later. Raises `Unreachable` before the node has joined its cluster.
        """


class ResetPort(Protocol):
    """Resets of the cluster, from any node; one at a time."""

    def status(self) -> ResetStatus:
        """The last reset, even if it restarted this process. Must not block or raise."""

    async def begin(self, kind: ResetKind, *, force: bool) -> ResetStatus:
        """Start a reset; returns within seconds, when it is running. `force`: even without a majority.

        Raises `ResetRefused` if a reset is running, or if there is no majority and `force` is not set. In the
        second case the error says what `force` may lose.
        """


class AdminPorts(Struct, frozen=True):
    commands: CommandPort
    resets: ResetPort
