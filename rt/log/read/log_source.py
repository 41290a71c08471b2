"""A merged log in a directory or on the nodes of a cluster, for readers that keep no copy.

Reading from nodes needs the replicator, and rt imports no service. So the implementation for nodes is the
entry point `nodes` of the group `rt.logs`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

from rt.errors import RtError
from rt.log.format.constants import NUMBER_MAX
from rt.log.read.outline import Waypoint
from rt.log.read.projection import Projection
from rt.log.read.range_reader import LossHandler
from rt.log.scan.message_batch import MessageBatch

LOGS_GROUP: Final = "rt.logs"
NO_END: Final = NUMBER_MAX
"""The end of a range that also includes later messages. It is greater than each position."""


class LogSource(Protocol):
    """The operations on a merged log that its readers need. Only one thread uses it.

    Everything it returns must be verified and be of one log. If a forced reset replaced a part, it must raise
    `rt.Diverged`. It raises only errors of `rt.errors`.
    """

    epoch: int
    """The epoch of the nodes' cluster, after a node has answered (see `rt.cluster_epoch`); 0 if there is
    none.
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

        The part of the log that it reads must not grow with the log. See `rt.log.read.time_search`.
        """

    def read(
        self, start: int, end: int, interest: Projection, on_loss: LossHandler
    ) -> Generator[MessageBatch]:
        """The messages from `start` up to `end`, each once, in order. `end` is at most the end of the log.
        With nodes it may also be `NO_END`: then this waits for later messages.

        Must call `on_loss` for missing positions before returning later messages. `on_loss` may raise.
        """

    def hold(self, name: str, position: int) -> None:
        """Record that the subscriber `name` needs messages from `position` on, and no earlier messages.

        A hold never goes back. Must return after a node has confirmed it, or at once if holds are not
        supported.
        """

    def close(self) -> None:
        """Must allow a second call."""


class RemoteLogSource(LogSource, Protocol):
    """The merged log on the nodes of a cluster."""

    def interrupt(self) -> None:
        """Called from any thread: the current call, and each later call except `close`, must raise
        `rt.Closed` soon.
        """


def open_nodes(
    endpoints: Sequence[str],
    stream: str,
    *,
    ca: str | os.PathLike[str],
    cert: str | os.PathLike[str],
    key: str | os.PathLike[str],
    connect_seconds: float | None = None,
    patience_seconds: float | None = None,
    epoch: int = 0,
) -> RemoteLogSource:
    """The log of the nodes at `endpoints`. An option that is None has the default of the implementation.

    `epoch` is the epoch of the nodes that positions come from, or 0 if they come from no node. The log must
    be the one of that epoch. `connect_seconds` is how long the first answer of any node may take.
    `patience_seconds` is how long all nodes may fail after that. Raises `rt.CertificateError`.
    """
    found = entry_points(group=LOGS_GROUP, name="nodes")
    if not found:
        raise RtError(
            "support for reading from nodes is not installed",
            where=f"entry point nodes of {LOGS_GROUP}",
            hint="Install the wheel of rt-transport on every machine that reads from nodes.",
        )
    patience: dict[str, Any] = {} if patience_seconds is None else {"patience_seconds": patience_seconds}
    source: RemoteLogSource = next(iter(found)).load()(
        endpoints,
        stream,
        ca=os.fspath(ca),
        cert=os.fspath(cert),
        key=os.fspath(key),
        connect_seconds=connect_seconds,
        epoch=epoch,
        **patience,
    )
    return source
