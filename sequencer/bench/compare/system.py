"""The parts of a compared system: three servers on the loopback, a publisher and a consumer.

The servers belong to the benchmark's process. Publisher and consumer run in a child process each. Nothing
else uses the event loop of that process, so they may block.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import shutil
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, cast

from msgspec import Struct

from rt.errors import RtError
from sequencer.bench.compare.programs import Programs

NODES: Final = 3
STREAM: Final = "bench"
CLIENT_WAIT_S: Final = 60.0
"""Time in which the servers must accept a client."""
PEERS: Final[Mapping[str, str]] = {
    "nats": "nats_jetstream",
    "redis": "redis_streams",
    "rabbitmq": "rabbitmq_streams",
}
"""The modules of systems that rt is compared with, by the name of their option."""
_MODULES: Final = {"rt": "rt_cluster", **PEERS}

ClientSettings: TypeAlias = Mapping[str, Any]
"""What a client needs, as JSON."""


class NotInstalled(RtError):
    """A program or a library of a compared system is missing."""


class Options(Struct, frozen=True):
    """How to run a system. rt always uses mutual TLS and fsync."""

    root: Path
    """An empty directory for its data and logs, with a short path."""
    tls: bool
    fsync: bool
    """Sync each message before it is acknowledged, if the system can."""


class Facts(Struct, frozen=True):
    """The entries of the table about a system, except its figures. Short texts without a full stop."""

    version: str
    client: str
    replication: str
    """The servers that have a message when it is acknowledged."""
    fsync: str
    tls: str
    consumer: str
    """How the consumer reads, and when it sees a message."""


class RunningServers(Struct, frozen=True):
    facts: Facts
    pids: tuple[int, ...]
    """The processes of the servers. Their children belong to them."""
    publisher: ClientSettings
    consumer: ClientSettings


class PipelinedPublisher(Protocol):
    """Used by one task at a time."""

    @property
    def acknowledged(self) -> int:
        """The number of published messages that are acknowledged. Any thread may read it."""

    async def publish(self, values: Sequence[bytes]) -> None:
        """Send messages in this order. Must return before they are acknowledged, but may wait until fewer
        messages are in flight. Any error must be raised by this or a later call.
        """

    async def flush(self) -> None:
        """Must return when all messages are acknowledged."""


class BatchConsumer(Protocol):
    async def receive(self) -> Sequence[bytes]:
        """Return the next messages, in order. Wait for at least one message. The first call starts with the
        first message of the stream.
        """


class CollectedValues:
    """A `BatchConsumer` for libraries that call back with each message."""

    def __init__(self) -> None:
        self._values: list[bytes] = []
        self._came = asyncio.Event()

    def add(self, value: bytes) -> None:
        self._values.append(value)
        self._came.set()

    async def receive(self) -> Sequence[bytes]:
        await self._came.wait()
        self._came.clear()
        values, self._values = self._values, []
        return values


class System(Protocol):
    """`check` and `start` are called by the benchmark, `open_*` in a child process."""

    def check(self) -> None:
        """Raise `NotInstalled` if a program or library is missing."""

    def start(self, options: Options, programs: Programs) -> RunningServers:
        """Start the servers. May return before they accept clients."""

    async def open_publisher(self, settings: ClientSettings) -> PipelinedPublisher:
        """Create the stream and wait until it can be used: the publisher opens before the consumer."""

    async def open_consumer(self, settings: ClientSettings) -> BatchConsumer: ...


def system(name: str) -> System:
    """The system of that name. Its module is imported only here."""
    module = importlib.import_module(f"sequencer.bench.compare.{_MODULES[name]}")
    return cast(System, module.SYSTEM)


def program(name: str, package: str, first: str = "") -> str:
    """The path of a program: in the folder `first`, the search path, or where servers usually are."""
    for path in (first, None, "/usr/sbin:/usr/local/sbin"):
        if found := shutil.which(name, path=path):
            return found
    raise NotInstalled(f"the program {name} is not installed", hint=f"On Debian: apt-get install {package}")


def library(module: str, package: str) -> Any:
    """Import a client library. It is optional, so its types are not checked."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"the Python package {package} is not installed", hint="pip install 'rt-transport[bench]'"
        ) from error


def tls_context(pair: Sequence[str]) -> ssl.SSLContext:
    """For a client. `pair`: CA, certificate, key."""
    ca, cert, key = pair
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(cert, key)
    return context


def library_version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"
