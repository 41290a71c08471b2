"""Free ports, and certificates for the loopback, for a cluster on one machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Final, NamedTuple

from rt.errors import Timeout
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity

BLOCK: Final = 250
"""Number of ports that a process has for itself."""


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now, outside the range that the system assigns to outgoing connections.

    Each process has its own block of ports and takes them in turn. So tests and benchmarks that run side by
    side do not get the same port before they listen on it.
    """
    return list(islice(_ports_of(os.getpid()), count))


def free_port() -> int:
    return free_ports(1)[0]


@cache
def _ports_of(_process: int) -> Iterator[int]:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    blocks = range(max(1024, low - 20_000), low - BLOCK, BLOCK)
    start = int.from_bytes(os.urandom(4))
    for turn in range(len(blocks)):
        first = blocks[(start + turn) % len(blocks)]
        if mark := _mark(first):
            return _free(first, mark)
    raise Timeout("other processes have all blocks of ports")


def _mark(first: int) -> socket.socket | None:
    """A socket that, while it is open, shows other processes that the block is taken."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0rt: {BLOCK} ports from {first}")
    except OSError:
        mark.close()
        return None
    return mark


def _free(first: int, mark: socket.socket) -> Iterator[int]:
    """The free ports of the block, in turn, indefinitely."""
    with mark:
        taken = 0
        for port in cycle(range(first, first + BLOCK)):
            if is_free(port):
                taken = 0
                yield port
            elif (taken := taken + 1) == BLOCK:
                _ports_of.cache_clear()
                raise Timeout(f"all of the {BLOCK} ports from {first} are listened on")


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


class NodePorts(NamedTuple):
    """The ports of a node on the loopback. 0: none."""

    data: int
    raft: int
    rest: int = 0
    health: int = 0


def choose_ports(names: Sequence[str], *, with_rest: bool) -> dict[str, NodePorts]:
    count = 4 if with_rest else 2
    ports = iter(free_ports(count * len(names)))
    return {name: NodePorts(*islice(ports, count)) for name in names}


def issued_at() -> datetime:
    """Start of validity of certificates: in the past, because a node's clock may be set back."""
    return datetime.now(UTC) - timedelta(days=2)


def make_certificates(directory: Path, stream: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Create a CA, if there is none, and a new certificate and key for each node, on loopback. Return the
    paths by node, for `TLS(*paths)`.
    """
    now = issued_at()
    if not Path(directory, "ca.crt").exists():
        init_ca(directory, now=now)
    issued = {
        name: issue(directory, Identity(stream, "node", name), loopback=True, renew=True, now=now)
        for name in names
    }
    return {name: [str(path) for path in paths] for name, paths in issued.items()}
