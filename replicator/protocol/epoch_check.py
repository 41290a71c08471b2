"""Whether a node that is asked is in the epoch of the cluster that its client knows of. Pure.

The law: a client never goes back, nor from one line to another of the same generation. What a node says
that was left behind in an earlier epoch is not what the cluster says; one that went on by force, apart from
the one that is known, speaks of another log.
"""

from __future__ import annotations

from rt.cluster_epoch import is_later, is_rival, line_of, name_of
from rt.errors import ClusterMismatch
from rt.net.grpc_errors import Unreachable


def check_epoch(known: int, epoch: int, node: str) -> bool:
    """Whether `epoch`, which the node is in, is later than the one that is known (0: none yet).

    `rt.Unreachable` if it is earlier: the node is asked again, it may follow; `rt.ClusterMismatch` if it was
    forced apart.
    """
    if epoch == known:
        return False
    if not known:
        return True
    if is_rival(known, epoch):
        raise ClusterMismatch(
            "the node went on by force, apart from those that were asked before",
            where=node,
            got=f"epoch {name_of(epoch)}",
            expected=f"epoch {name_of(known)}",
            hint="Two epochs of one cluster were forced: empty the nodes of one, or begin a new directory.",
        )
    if not is_later(known, epoch):
        raise Unreachable(
            "the node is left behind in an earlier epoch of the cluster",
            where=node,
            got=f"epoch {name_of(epoch)}",
            expected=f"epoch {name_of(known)}",
            hint="Ask another. If it does not follow by itself, its log says what to do.",
        )
    return True


def check_line(line: int | None, epoch: int, node: str) -> None:
    """`rt.Unreachable` unless the node is of that line: what others have is not of this log. None: of any."""
    if line is not None and line_of(epoch) != line:
        raise Unreachable("the node is in an epoch that was forced apart", where=node, got=name_of(epoch))
