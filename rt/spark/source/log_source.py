"""Where rows come from: a log directory, or the nodes of a cluster.

Reading from nodes needs the replicator, and rt imports no service. So it is the entry point `nodes` of the
group `rt.logs`, called with the fields of `rt.spark.options.ClusterSource`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Final, Protocol

from rt.errors import RtError
from rt.log.read.outline import Waypoint
from rt.log.read.projection import Projection
from rt.log.read.range_reader import LossHandler
from rt.log.scan.message_batch import MessageBatch
from rt.spark.options import ClusterSource
from rt.spark.source.local_log import LocalLog
from rt.spark.source.options import DirectorySource

LOGS_GROUP: Final = "rt.logs"


class LogSource(Protocol):
    """A merged log as its readers need it. One thread uses it.

    Everything it returns must be verified. It raises only errors of `rt.errors`.
    """

    def bounds(self) -> tuple[int, int]:
        """The first retained position, and one past the last whole message, now.

        The end must never go back during an object's lifetime. Must be cheap if nothing is new: it is called
        often.
        """

    def outline(self, start: int, end: int) -> Iterator[Waypoint]:
        """How bytes are distributed over the positions from `start` to `end`. See `rt.log.read.outline`."""

    def find_time(self, start: int, end: int, timestamp_ns: int) -> int:
        """The first position from `start` to `end` with a timestamp at or after `timestamp_ns`, else `end`.

        Must read a part of the log that does not grow with it. See `rt.log.read.time_search`.
        """

    def read(
        self, start: int, end: int, interest: Projection, on_loss: LossHandler
    ) -> Iterator[MessageBatch]:
        """The messages from `start` up to `end`, each once, in order.

        Must call `on_loss` for missing positions before returning what follows them. It may raise.
        """

    def hold(self, name: str, position: int) -> None:
        """The subscriber `name` needs messages from `position` on, and none before.

        A hold never goes back. Must return after a node has confirmed it; at once if holds are not supported.
        """

    def close(self) -> None:
        """Must allow a second call."""


def open_log(where: DirectorySource | ClusterSource, *, is_planned: bool = False) -> LogSource:
    """Open the log. `rt.LogNotFound`, storage errors, `rt.CertificateError`.

    `is_planned`: the driver has reached nodes to plan this. If none answers any more, they are waited for
    longer than `connect_seconds`, as they may be restarting.
    """
    if isinstance(where, DirectorySource):
        return LocalLog(where.path)
    found = entry_points(group=LOGS_GROUP, name="nodes")
    if not found:
        raise RtError(
            "support for reading from nodes is not installed",
            where=f"entry point nodes of {LOGS_GROUP}",
            hint="Install the wheel of rt-transport on the driver and on every executor.",
        )
    source: LogSource = next(iter(found)).load()(
        where.endpoints,
        where.stream,
        ca=where.ca,
        cert=where.cert,
        key=where.key,
        connect_seconds=None if is_planned else where.connect_seconds,
    )
    return source
