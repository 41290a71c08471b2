"""Publishers and subscribers of a local cluster, as child processes that use the public API."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import rt
from sequencer.localcluster.nodes import LocalCluster


def client_settings(
    nodes: LocalCluster, role: Literal["publisher", "subscriber"], name: str, root: Path, **more: object
) -> dict[str, Any]:
    """Settings of a child process, as JSON: nodes, certificate, and `root`, below which the child keeps its
    log.
    """
    tls = nodes.certificate(role, name)
    return {
        "name": name,
        "root": str(root),
        "stream": nodes.stream,
        "endpoints": nodes.endpoints,
        "tls": [str(tls.ca), str(tls.cert), str(tls.key)],
        **more,
    }


def open_publisher(settings: dict[str, Any], **options: Any) -> rt.Publisher:
    """In the child: the publisher with these settings. Its name is the name of its session too."""
    return rt.Publisher(
        settings["root"],
        settings["stream"],
        publisher_id=settings["name"],
        endpoints=settings["endpoints"],
        tls=rt.TLS(*settings["tls"]),
        **options,
    )


def open_subscriber(settings: dict[str, Any], **options: Any) -> rt.Subscriber:
    """In the child: the subscriber with these settings."""
    return rt.Subscriber(
        settings["root"],
        settings["stream"],
        endpoints=settings["endpoints"],
        tls=rt.TLS(*settings["tls"]),
        **{"connect_timeout": None, **options},
    )
