"""NATS JetStream: three `nats-server` processes, a file stream of three replicas, the client nats-py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from rt.errors import RtError, Timeout
from sequencer.bench.compare.programs import Programs, version_of
from sequencer.bench.compare.system import (
    CLIENT_WAIT_S,
    NODES,
    STREAM,
    ClientSettings,
    CollectedValues,
    Facts,
    Options,
    RunningServers,
    library,
    library_version,
    program,
    tls_context,
)
from sequencer.localcluster.loopback import free_ports, make_certificates

_SYNC_ALWAYS: Final = (2, 10)
_PENDING: Final = 4000
"""Messages in flight: the default of nats-py."""
_PAUSE_S: Final = 0.2


class NatsSystem:
    def check(self) -> None:
        program("nats-server", "nats-server")
        library("nats", "nats-py")

    def start(self, options: Options, programs: Programs) -> RunningServers:
        server = program("nats-server", "nats-server")
        version = version_of([server, "--version"])
        is_synced = options.fsync and can_sync(version)
        tls = make_certificates(options.root / "pki", STREAM, ["n1"])["n1"] if options.tls else None
        ports = free_ports(2 * NODES)
        clients, routes = ports[:NODES], ports[NODES:]
        pids = []
        for at in range(NODES):
            config = options.root / f"n{at + 1}.conf"
            store = str(options.root / f"n{at + 1}")
            config.write_text(
                render_config(f"n{at + 1}", store, clients[at], routes[at], routes, tls, is_synced)
            )
            pids.append(programs.start(f"n{at + 1}", [server, "-c", str(config)]))
        programs.wait_listening(clients)
        settings = {"ports": clients, "tls": tls}
        facts = Facts(
            version=f"nats-server {version}",
            client=library_version("nats-py"),
            replication="Raft; acknowledged when a majority has it",
            fsync="each message, before it is acknowledged"
            if is_synced
            else "in the background, after up to 2 minutes",
            tls="mutual, on all links" if tls else "none",
            consumer="ordered consumer, of any server",
        )
        return RunningServers(facts, tuple(pids), settings, settings)

    async def open_publisher(self, settings: ClientSettings) -> NatsPublisher:
        nats = library("nats", "nats-py")
        context = (await _connect(nats, settings)).jetstream(publish_async_max_pending=_PENDING)
        await _create_stream(nats, context)
        return NatsPublisher(context)

    async def open_consumer(self, settings: ClientSettings) -> CollectedValues:
        nats = library("nats", "nats-py")
        collected = CollectedValues()

        async def on_message(message: Any) -> None:
            collected.add(message.data)

        connection = await _connect(nats, settings)
        await connection.jetstream().subscribe(
            STREAM,
            stream=STREAM,
            cb=on_message,
            ordered_consumer=True,
            pending_msgs_limit=-1,
            pending_bytes_limit=-1,
        )
        return collected


class NatsPublisher:
    """Publishes with `publish_async`, which nats-py recommends for throughput."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._acknowledged = 0
        self._error: BaseException | None = None

    @property
    def acknowledged(self) -> int:
        return self._acknowledged

    async def publish(self, values: Sequence[bytes]) -> None:
        for value in values:
            answer = await self._context.publish_async(STREAM, value)
            answer.add_done_callback(self._on_answer)
        self._check()

    async def flush(self) -> None:
        await self._context.publish_async_completed()
        await asyncio.sleep(0)  # Let the callbacks of the last answers run.
        self._check()

    def _on_answer(self, answer: asyncio.Future[Any]) -> None:
        if (error := answer.exception()) is None:
            self._acknowledged += 1
        else:
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise RtError("NATS did not accept a message", got=str(self._error)) from self._error


def render_config(
    name: str,
    store: str,
    port: int,
    route: int,
    routes: Sequence[int],
    tls: Sequence[str] | None,
    is_synced: bool,
) -> str:
    """The configuration file of a server. `tls`: CA, certificate, key."""
    urls = ", ".join(f'"nats-route://127.0.0.1:{each}"' for each in routes)
    secured = ""
    if tls is not None:
        ca, cert, key = tls
        secured = f'tls {{ ca_file: "{ca}", cert_file: "{cert}", key_file: "{key}", verify: true }}\n'
    sync = ", sync_interval: always" if is_synced else ""
    return f"""\
server_name: {name}
listen: "127.0.0.1:{port}"
{secured}jetstream {{ store_dir: "{store}"{sync} }}
cluster {{
name: {STREAM}
listen: "127.0.0.1:{route}"
routes: [{urls}]
{secured}}}
"""


def can_sync(version: str) -> bool:
    """Whether that version can sync each message."""
    return tuple(int(part) for part in version.split(".") if part.isdigit()) >= _SYNC_ALWAYS


async def _connect(nats: Any, settings: ClientSettings) -> Any:
    options = {"tls": tls_context(settings["tls"])} if settings["tls"] else {}
    scheme = "tls" if settings["tls"] else "nats"
    servers = [f"{scheme}://127.0.0.1:{port}" for port in settings["ports"]]
    return await nats.connect(servers, allow_reconnect=False, **options)


async def _create_stream(nats: Any, context: Any) -> None:
    """Create the stream. Wait until the servers have a leader."""
    deadline = asyncio.get_running_loop().time() + CLIENT_WAIT_S
    while True:
        try:
            await context.add_stream(name=STREAM, subjects=[STREAM], num_replicas=NODES, storage="file")
            await context.publish(STREAM, b"")  # Succeeds only if the stream's own group has a leader too.
            await context.purge_stream(STREAM)
            return
        except (nats.errors.Error, TimeoutError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise Timeout("NATS created no stream", got=str(error)) from error
            await asyncio.sleep(_PAUSE_S)


SYSTEM: Final = NatsSystem()
