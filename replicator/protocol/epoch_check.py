"""Checks that a node is in the epoch of the cluster that its client knows. Pure.

Invariant: a client never goes back to an earlier epoch, and never changes to another line of the same
generation. A node in an earlier epoch does not represent the cluster. A node of another forced line has
another log.
"""

from __future__ import annotations

from rt.cluster_epoch import is_later, is_rival, line_of, name_of
from rt.errors import ClusterMismatch
from rt.net.grpc_errors import Unreachable


def check_epoch(known: int, epoch: int, node: str) -> bool:
    """Return whether `epoch` of the node is later than the `known` epoch (0: none yet).

    `rt.Unreachable` if it is earlier: the node may follow, so ask it again. `rt.ClusterMismatch` if a forced
    reset separated the node from the known epoch.
    """
    if epoch == known:
        return False
    if not known:
        return True
    if is_rival(known, epoch):
        raise ClusterMismatch(
            "a forced reset separated this node from the nodes asked before",
            where=node,
            got=f"epoch {name_of(epoch)}",
            expected=f"epoch {name_of(known)}",
            hint="Two forced resets made two clusters: empty the nodes of one. To follow the other one, read "
            "into a new directory, or remove `.cluster` of a publisher's session.",
        )
    if not is_later(known, epoch):
        raise Unreachable(
            "the node is in an earlier epoch of the cluster",
            where=node,
            got=f"epoch {name_of(epoch)}",
            expected=f"epoch {name_of(known)}",
            hint="Ask another node. If this one does not follow by itself, its log says what to do.",
        )
    return True


def check_line(line: int | None, epoch: int, node: str) -> None:
    """Raise `rt.Unreachable` unless the node is in `line` (None: any line is right). Other lines have other
    logs.
    """
    if line is not None and line_of(epoch) != line:
        raise Unreachable(
            "the node is in another line of epochs after a forced reset", where=node, got=name_of(epoch)
        )
