"""Where rows come from: a log directory, or the nodes of a cluster."""

from __future__ import annotations

from rt.log.read.log_source import LogSource, open_nodes
from rt.spark.options import ClusterSource
from rt.spark.source.local_log import LocalLog
from rt.spark.source.options import DirectorySource


def open_log(where: DirectorySource | ClusterSource, *, is_planned: bool = False) -> LogSource:
    """Open the log. `rt.LogNotFound`, storage errors, `rt.CertificateError`.

    `is_planned`: the driver has reached nodes to plan this. If none answers any more, they are waited for
    longer than `connect_seconds`, as they may be restarting.
    """
    if isinstance(where, DirectorySource):
        return LocalLog(where.path)
    return open_nodes(
        where.endpoints,
        where.stream,
        ca=where.ca,
        cert=where.cert,
        key=where.key,
        connect_seconds=None if is_planned else where.connect_seconds,
    )
