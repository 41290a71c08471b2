"""The log to which the positions of a reader belong: its cluster, and the line of epochs. Pure.

Invariant: all positions of one reader belong to one log. After a forced reset, the same positions may have
other messages.
"""

from __future__ import annotations

from replicator.protocol.epoch_check import check_epoch
from replicator.protocol.handshake import PullStart
from rt.cluster_epoch import line_of, name_of
from rt.errors import ClusterMismatch, Diverged


class KnownLog:
    """`epoch`: the epoch in which the reader's positions were valid; 0 before the first answer."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._cluster = b""

    def check(self, start: PullStart) -> None:
        """Follow a node to a later epoch. `rt.Diverged` if a reset was forced; errors of `check_epoch`."""
        if self._cluster not in {b"", start.cluster}:
            raise ClusterMismatch(
                "the node is of another cluster than those asked before",
                where=start.node,
                got=start.cluster.hex(),
                expected=self._cluster.hex(),
            )
        if check_epoch(self.epoch, start.epoch, start.node):
            if self.epoch and line_of(self.epoch) != line_of(start.epoch):
                raise Diverged(
                    "a forced reset gave positions of the log other messages",
                    where=start.node,
                    got=f"epoch {name_of(start.epoch)}",
                    expected=f"epoch {name_of(self.epoch)}",
                    hint="The event rt.events.Reset of a subscriber has the first position concerned. Start "
                    "again from there.",
                )
            self.epoch = start.epoch
        self._cluster = start.cluster
