"""What a cluster on one machine needs: ports that are free, and certificates for the loopback."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rt.errors import Timeout
from rt.net.certs import init_ca, issue
from rt.net.identity import Identity


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on now, outside those that the system gives to who dials."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in _shuffled(range(max(1024, low - 20_000), low)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise Timeout("no free ports")


def _shuffled(ports: range) -> Iterator[int]:
    start, step = int.from_bytes(os.urandom(4)), 7919
    return (ports[(start + step * turn) % len(ports)] for turn in range(len(ports)))


def issued_at() -> datetime:
    """When certificates of a cluster begin: before now, for a node's clock may be set back."""
    return datetime.now(UTC) - timedelta(days=2)


def make_certificates(directory: Path, stream: str, names: Sequence[str]) -> dict[str, list[str]]:
    """A CA and a pair for each node, on loopback: `TLS(*paths)`."""
    now = issued_at()
    init_ca(directory, now=now)
    issued = {
        name: issue(directory, Identity(stream, "node", name), loopback=True, now=now) for name in names
    }
    return {name: [str(path) for path in paths] for name, paths in issued.items()}
