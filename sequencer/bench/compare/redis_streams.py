"""Redis streams: a primary and two replicas of `redis-server`, the client redis-py.

The publisher sends `WAIT 1` after each call, so that a message is acknowledged when the primary and a replica
have it. The consumer reads from the other replica. So two of the three servers have a message before it is
seen, as with the majorities of other systems. Redis does not guarantee this when the primary fails.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from rt.errors import Timeout
from sequencer.bench.compare.programs import Programs, version_of
from sequencer.bench.compare.system import (
    CLIENT_WAIT_S,
    NODES,
    STREAM,
    ClientSettings,
    Facts,
    Options,
    RunningServers,
    library,
    library_version,
    program,
)
from sequencer.localcluster.loopback import free_ports, make_certificates

_IN_FLIGHT: Final = 4
"""Calls in flight."""
_READ_COUNT: Final = 1000
_PAUSE_S: Final = 0.05


class RedisSystem:
    def check(self) -> None:
        program("redis-server", "redis-server")
        library("redis.asyncio", "redis")

    def start(self, options: Options, programs: Programs) -> RunningServers:
        server = program("redis-server", "redis-server")
        tls = make_certificates(options.root / "pki", STREAM, ["n1"])["n1"] if options.tls else None
        ports = free_ports(NODES)
        pids = []
        for at, port in enumerate(ports):
            directory = options.root / f"n{at + 1}"
            directory.mkdir()
            config = options.root / f"n{at + 1}.conf"
            primary = ports[0] if at else None
            config.write_text(render_config(str(directory), port, primary, tls, options.fsync))
            pids.append(programs.start(f"n{at + 1}", [server, str(config)]))
        programs.wait_listening(ports)
        facts = Facts(
            version=f"redis-server {version_of([server, '--version'])}",
            client=library_version("redis"),
            replication="asynchronous; acknowledged when a replica has it too (WAIT 1)",
            fsync="before each answer, on all three (appendfsync always)"
            if options.fsync
            else "once a second (appendfsync everysec)",
            tls="mutual, on all links" if tls else "none",
            consumer="XREAD at a replica",
        )
        return RunningServers(
            facts, tuple(pids), {"ports": ports, "tls": tls}, {"ports": ports[-1:], "tls": tls}
        )

    async def open_publisher(self, settings: ClientSettings) -> RedisPublisher:
        for port in settings["ports"][1:]:
            await _wait_until_it_replicates(_client(port, settings["tls"]))
        client = _client(settings["ports"][0], settings["tls"])
        connection = await client.connection_pool.get_connection()
        return RedisPublisher(connection)

    async def open_consumer(self, settings: ClientSettings) -> RedisConsumer:
        return RedisConsumer(_client(settings["ports"][0], settings["tls"]))


class RedisPublisher:
    """A pipeline on one connection. A task reads the answers, so that calls overlap."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._acknowledged = 0
        self._answered = 0
        self._calls: deque[tuple[int, bool]] = deque()
        """The number of messages of each call in flight, and whether the call waits for a replica."""
        self._sent, self._done = asyncio.Event(), asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def acknowledged(self) -> int:
        return self._acknowledged

    async def publish(self, values: Sequence[bytes]) -> None:
        """Publish messages. A single message is not followed by `WAIT`, because `WAIT` would delay the next
        message.
        """
        await self._call(values, is_waiting=len(values) > 1)

    async def flush(self) -> None:
        await self._call([], is_waiting=True)
        await self._until(0)

    async def _call(self, values: Sequence[bytes], *, is_waiting: bool) -> None:
        await self._until(_IN_FLIGHT - 1)
        commands: list[tuple[Any, ...]] = [("XADD", STREAM, "*", "v", value) for value in values]
        if is_waiting:
            commands.append(("WAIT", 1, 0))
        self._calls.append((len(values), is_waiting))
        self._sent.set()
        await self._connection.send_packed_command(
            self._connection.pack_commands(commands), check_health=False
        )

    async def _until(self, calls: int) -> None:
        """Wait until no more calls than these are in flight."""
        while len(self._calls) > calls:
            if self._reading.done():
                self._reading.result()
            self._done.clear()
            await self._done.wait()

    async def _read(self) -> None:
        try:
            while True:
                while not self._calls:
                    self._sent.clear()
                    await self._sent.wait()
                count, is_waiting = self._calls[0]
                for _ in range(count + is_waiting):
                    await self._connection.read_response(timeout=math.inf)
                self._answered += count
                if is_waiting:
                    self._acknowledged = self._answered
                self._calls.popleft()
                self._done.set()
        finally:
            self._done.set()


class RedisConsumer:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._last: bytes | str = "0"

    async def receive(self) -> Sequence[bytes]:
        while True:
            found = await self._client.xread({STREAM: self._last}, count=_READ_COUNT, block=1000)
            if found:
                entries = _entries(found)
                self._last = entries[-1][0]
                return [fields[b"v"] for _, fields in entries]


def _entries(found: Any) -> Any:
    """The entries of the only stream. The shape of `found` depends on the version of redis-py."""
    if isinstance(found, dict):
        ((entries,),) = found.values()
        return entries
    ((_, entries),) = found
    return entries


def render_config(
    directory: str, port: int, primary: int | None, tls: Sequence[str] | None, is_synced: bool
) -> str:
    """The configuration file of a server. `primary`: port of the server that it replicates, if any."""
    lines = [
        "bind 127.0.0.1",
        f"dir {directory}",
        "daemonize no",
        'save ""',
        "appendonly yes",
        f"appendfsync {'always' if is_synced else 'everysec'}",
        "repl-diskless-sync-delay 0",
    ]
    if tls is None:
        lines.append(f"port {port}")
    else:
        ca, cert, key = tls
        lines += ["port 0", f"tls-port {port}", "tls-replication yes", "tls-auth-clients yes"]
        lines += [f"tls-ca-cert-file {ca}", f"tls-cert-file {cert}", f"tls-key-file {key}"]
    if primary is not None:
        lines.append(f"replicaof 127.0.0.1 {primary}")
    return "\n".join(lines) + "\n"


def _client(port: int, tls: Sequence[str] | None) -> Any:
    options: dict[str, Any] = {}
    if tls:
        ca, cert, key = tls
        options = {"ssl": True, "ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
    return library("redis.asyncio", "redis").Redis(host="127.0.0.1", port=port, **options)


async def _wait_until_it_replicates(client: Any) -> None:
    redis = library("redis", "redis")
    deadline = asyncio.get_running_loop().time() + CLIENT_WAIT_S
    while True:
        try:
            if (await client.info("replication")).get("master_link_status") == "up":
                await client.aclose()
                return
        except redis.exceptions.BusyLoadingError:
            pass
        if asyncio.get_running_loop().time() > deadline:
            raise Timeout("a replica of Redis does not follow its primary", expected=f"{CLIENT_WAIT_S:g} s")
        await asyncio.sleep(_PAUSE_S)


SYSTEM: Final = RedisSystem()
