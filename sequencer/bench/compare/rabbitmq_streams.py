"""RabbitMQ streams: three `rabbitmq-server` processes with the stream plugin, the client rstream.

The servers use no TLS between each other. TLS would include the replication of streams. There, replicas of
3.10 crash under load, because they do not know the message `ssl_passive`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from rt.errors import RtError
from sequencer.bench.compare.programs import Programs
from sequencer.bench.compare.system import (
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

_UNCONFIRMED: Final = 10_000
"""Messages in flight: the default of RabbitMQ's own Java client."""
_REPLICATION_PORTS: Final = 16
_PAUSE_S: Final = 0.001
_SCRIPTS: Final = "/usr/lib/rabbitmq/bin"
"""Not the scripts in /usr/sbin: they run the server as another user."""
_DEBIAN_PACKAGE: Final = "rabbitmq-server"


class RabbitSystem:
    def check(self) -> None:
        program("rabbitmq-server", _DEBIAN_PACKAGE, _SCRIPTS)
        library("rstream", "rstream")

    def start(self, options: Options, programs: Programs) -> RunningServers:
        """Start the servers. The first server listens before the other servers start, because they join
        it.
        """
        server = program("rabbitmq-server", _DEBIAN_PACKAGE, _SCRIPTS)
        pair = make_certificates(options.root / "pki", STREAM, ["n1"])["n1"] if options.tls else None
        epmd, *ports = free_ports(1 + 2 * NODES + _REPLICATION_PORTS)
        files = ServerFiles(options.root, epmd, pair)
        files.write()
        pids = [programs.start("epmd", [program("epmd", "erlang-base")], files.environment())]
        programs.wait_listening([epmd])
        streams, links, replication = ports[:NODES], ports[NODES : 2 * NODES], ports[2 * NODES :]
        for at in range(NODES):
            name = f"n{at + 1}"
            environment = files.write_server(name, streams[at], links[at], replication)
            pids.append(programs.start(name, [server], environment))
            programs.wait_listening([streams[at]])
        settings = {"port": streams[0], "tls": pair}
        facts = Facts(
            version=f"rabbitmq-server {_version((options.root / 'n1.log').read_text())}",
            client=library_version("rstream"),
            replication="acknowledged when a majority has it",
            fsync="left to the kernel: streams have no setting",
            tls="mutual for clients, none between servers" if pair else "none",
            consumer="the stream protocol, at the server that the client chooses",
        )
        return RunningServers(facts, tuple(pids), settings, settings)

    async def open_publisher(self, settings: ClientSettings) -> RabbitPublisher:
        producer = library("rstream", "rstream").Producer(**_connection(settings))
        await producer.start()
        await producer.create_stream(STREAM)
        return RabbitPublisher(producer)

    async def open_consumer(self, settings: ClientSettings) -> CollectedValues:
        consumer, collected = (
            library("rstream", "rstream").Consumer(**_connection(settings)),
            CollectedValues(),
        )
        await consumer.start()
        await consumer.subscribe(STREAM, lambda value, _context: collected.add(value))
        return collected


class RabbitPublisher:
    """Publishes with `send_batch`. Confirmations arrive later."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._sent = self._acknowledged = 0
        self._refused: Any = None

    @property
    def acknowledged(self) -> int:
        return self._acknowledged

    async def publish(self, values: Sequence[bytes]) -> None:
        await self._until(max(0, _UNCONFIRMED - len(values)))
        self._sent += len(values)
        await self._producer.send_batch(STREAM, values, on_publish_confirm=self._on_confirm)

    async def flush(self) -> None:
        await self._until(0)

    async def _until(self, unconfirmed: int) -> None:
        while self._sent - self._acknowledged > unconfirmed:
            if self._refused is not None:
                raise RtError("RabbitMQ did not accept a message", got=str(self._refused))
            await asyncio.sleep(_PAUSE_S)

    def _on_confirm(self, status: Any) -> None:
        if status.is_confirmed:
            self._acknowledged += 1
        else:
            self._refused = status


class ServerFiles(Struct, frozen=True):
    """The configuration of servers below `root`, which share a port mapper of their own at `epmd_port`."""

    root: Path
    epmd_port: int
    tls: Sequence[str] | None
    """CA, certificate, key."""

    def write(self) -> None:
        """Write the files that the servers share."""
        (self.root / "home").mkdir()
        cookie = self.root / "home" / ".erlang.cookie"
        cookie.touch(mode=0o600)
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        (self.root / "plugins").write_text("[rabbitmq_stream].\n")

    def environment(self) -> dict[str, str]:
        return {
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "HOME": str(self.root / "home"),
        }

    def write_server(self, name: str, port: int, link: int, replication: Sequence[int]) -> dict[str, str]:
        """Write the files of a server with the ports of its stream protocol, links and replication.

        Returns its environment.
        """
        config = self.root / f"{name}.conf"
        config.write_text(render_config(port, self.tls))
        advanced = self.root / f"{name}.config"
        advanced.write_text(render_advanced_config(replication))
        environment = {
            "RABBITMQ_NODENAME": f"{name}@localhost",
            "RABBITMQ_DIST_PORT": str(link),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(advanced),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.root / name / "config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.root / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.root / name),
            "RABBITMQ_PID_FILE": str(self.root / f"{name}.pid"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        return {**self.environment(), **environment}


def render_config(port: int, tls: Sequence[str] | None) -> str:
    """The configuration file of a server. It speaks the stream protocol only."""
    lines = ["listeners.tcp = none", "cluster_formation.peer_discovery_backend = classic_config"]
    lines += [f"cluster_formation.classic_config.nodes.{at} = n{at}@localhost" for at in range(1, NODES + 1)]
    if tls is None:
        lines += [f"stream.listeners.tcp.1 = 127.0.0.1:{port}", f"stream.advertised_port = {port}"]
    else:
        ca, cert, key = tls
        lines += ["stream.listeners.tcp = none", f"stream.listeners.ssl.1 = 127.0.0.1:{port}"]
        lines += [f"stream.advertised_tls_port = {port}", "ssl_options.verify = verify_peer"]
        lines += ["ssl_options.fail_if_no_peer_cert = true", f"ssl_options.cacertfile = {ca}"]
        lines += [f"ssl_options.certfile = {cert}", f"ssl_options.keyfile = {key}"]
    return "\n".join([*lines, "stream.advertised_host = localhost"]) + "\n"


def render_advanced_config(replication: Sequence[int]) -> str:
    """The settings of replication, which the other file does not support. A server chooses a free port."""
    return f"[{{osiris, [{{port_range, {{{min(replication)}, {max(replication)}}}}}]}}].\n"


def _version(log: str) -> str:
    found = re.search(r"RabbitMQ (\d+(?:\.\d+)+)", log)
    return found[1] if found else "unknown"


def _connection(settings: ClientSettings) -> Mapping[str, Any]:
    options: dict[str, Any] = {}
    if settings["tls"]:
        options["ssl_context"] = tls_context(settings["tls"])
    # A new server has this user, from the loopback only.
    return {
        "host": "localhost",
        "port": settings["port"],
        "username": "guest",
        "password": "guest",
        **options,
    }


SYSTEM: Final = RabbitSystem()
