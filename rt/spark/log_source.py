"""Where rows come from: a log directory, or the nodes of a cluster.

What reads from nodes needs the replicator, and rt imports no service: it is the entry point `nodes` of the
group `rt.logs`, called with what `rt.spark.options.Nodes` holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Final, Protocol

from rt.errors import RtError
from rt.log.interest import Interest
from rt.log.messages import MessageBatch
from rt.log.ranges import LossHandler
from rt.log.waypoints import Waypoint
from rt.spark.local_log import LocalLog
from rt.spark.options import Directory, Nodes

LOGS_GROUP: Final = "rt.logs"


class LogSource(Protocol):
    """A merged log as its readers need it. For one thread.

    Whatever it hands out is verified. All errors are of `rt.errors`.
    """

    def bounds(self) -> tuple[int, int]:
        """The first position that is kept, and one past the last whole message, as they are now.

        The end never goes back in one object's life. Cheap where nothing is new: it is asked all the time.
        """

    def outline(self, start: int, end: int) -> Iterator[Waypoint]:
        """How bytes lie along the positions from `start` to `end`, as `rt.log.outline` says."""

    def read(self, start: int, end: int, interest: Interest, on_loss: LossHandler) -> Iterator[MessageBatch]:
        """The messages from `start` up to `end`, each once, in order.

        `on_loss` is told of positions that cannot be had, before what follows them comes; it may raise.
        """

    def hold(self, name: str, position: int) -> None:
        """The subscriber `name` needs what comes from `position` on, and nothing before any more.

        A hold never goes back. Returns when a node has heard it; where nobody can hold anything, at once.
        """

    def close(self) -> None:
        """Release files and connections. Twice is allowed."""


def open_log(where: Directory | Nodes) -> LogSource:
    """The log there. `rt.NotALog`, storage errors, `rt.CertificateError`."""
    if isinstance(where, Directory):
        return LocalLog(where.path)
    found = entry_points(group=LOGS_GROUP, name="nodes")
    if not found:
        raise RtError(
            "reading from nodes is not installed here",
            where=f"entry point nodes of {LOGS_GROUP}",
            hint="Install the wheel of rt-transport on the driver and on every executor.",
        )
    source: LogSource = next(iter(found)).load()(
        where.endpoints, where.stream, ca=where.ca, cert=where.cert, key=where.key
    )
    return source
