"""What the protocol (`hardened`) asks of the node around it."""

from __future__ import annotations

from typing import Protocol

from sequencer.raft.messages import Adopt, Chunk, Entry, Forward
from sequencer.raft.snapshots import SnapshotReader


class Host(Protocol):
    """The node around the protocol. Called by the loop only."""

    def submit(self) -> None:
        """Called once in each round, behind applying: submit what waits to be proposed.

        That is done through `SyncObj.submit`, and not while `is_handing_over`.
        """

    def on_commit(self, entry: Entry) -> None:
        """Apply the next committed entry. It is synced here, and on a majority."""

    def is_over(self) -> bool:
        """Whether this epoch has ended here: nothing more is applied in it, or taken into its log."""

    def on_chunk(self, peer: str, chunk: Chunk) -> None:
        """A piece of a snapshot that covers more than is committed here; `SyncObj.send` the reply."""

    def on_adopt(self, peer: str, adopt: Adopt) -> None:
        """The first snapshot of a new cluster."""

    def on_forward(self, peer: str, forward: Forward) -> bool:
        """Whether what the peer wants to have appended is well-formed."""

    def open_snapshot(self) -> SnapshotReader:
        """The newest snapshot, for a follower."""

    def housekeeping(self) -> None:
        """Called once in each round of the loop."""

    def due(self) -> float:
        """When `housekeeping` is to be called next, on PySyncObj's clock."""
