"""A cluster whose log is a queue, and how a host reaches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from rt.client.publisher import Publisher
from rt.log.disk import REAL
from rt.log.scan.directory import is_log_directory
from rt.net.tls import TLS
from rt.sidecar.pull_settings import copy_directory

Level: TypeAlias = Literal["replicated", "merged"]


class Cluster(Struct, frozen=True):
    """A cluster, and how this host reaches it.

    To read: `path`, `endpoints` and `tls` have the same meaning as in `rt.Subscriber`. `name` is the name of
    the certificate (role subscriber). If it is given, the nodes retain everything that the subscription store
    of the queue has not acknowledged: the hold is called `<name>~store-<id of the store>`.

    To write: `writer` opens a publisher of that stream. `level` is the durability that `publish` waits for,
    at most `level_s` seconds. If `level` is None, `publish` waits until the events are synced on this host.
    """

    stream: str
    path: str
    endpoints: Sequence[str] = ()
    tls: TLS | None = None
    name: str | None = None
    writer: Callable[[], Publisher] | None = None
    level: Level | None = None
    level_s: float = 30.0

    def directory(self, topics: Sequence[str] = ()) -> str:
        """The directory of the log that this host reads. With nodes, it is this host's copy of these topics
        (empty: all).
        """
        if not self.endpoints and is_log_directory(REAL, self.path):
            return self.path
        return copy_directory(self.path, self.stream, topics if self.endpoints else ())
