"""When a node tends its connections."""

from __future__ import annotations

from dataclasses import dataclass

from sequencer.raft.transport.connection import ConnectionPhase, RaftConnection
from sequencer.raft.transport.peer_auth import PeerLost, PeerRejected


@dataclass(frozen=True, slots=True)
class MeshTiming:
    """Intervals in seconds."""

    ping_s: float = 1.0
    """Each side sends at least this often."""
    silence_s: float = 4.0
    """A peer is down if it is silent for this time."""
    setup_s: float = 5.0
    """A connection must be up within this time."""
    age_s: float = 3600.0
    """A connection is replaced after about this time, so that both sides are checked again."""
    backoff_s: tuple[float, float] = (0.05, 1.0)
    """The shortest and the longest pause after a failed attempt to connect."""
    reload_s: float = 5.0
    """How often the certificate files are checked for changes."""

    def due_of(self, connection: RaftConnection) -> float:
        """When to call `check`, or to send a ping."""
        if connection.phase is not ConnectionPhase.UP:
            return connection.born_s + self.setup_s
        silent_s = min(connection.received_s + self.silence_s, connection.until_s)
        return silent_s if connection.stuck_bytes else min(silent_s, connection.sent_s + self.ping_s)

    def check(self, connection: RaftConnection, now_s: float, *, is_read: bool) -> None:
        """Raise `PeerLost` if the connection, which is due, must end.

        `is_read`: everything that has arrived was read.
        """
        if connection.phase is not ConnectionPhase.UP:
            raise PeerRejected("slow", f"not up within {self.setup_s} s")
        if now_s >= connection.until_s:
            raise PeerLost("aged", "its certificates must be checked again")
        if now_s >= connection.received_s + self.silence_s and is_read:
            raise PeerLost("silent", f"for {self.silence_s} s")
