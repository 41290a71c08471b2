"""The probe reports why a node cannot be reached."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import rt
from rt.net.connect_probe import probe_endpoint
from rt.net.dev_pki import init_ca, issue
from rt.net.grpc_channel import serve
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_port


def tls_of(directory: Path, name: str) -> TLS:
    return TLS(directory / "ca.crt", directory / f"{name}.crt", directory / f"{name}.key")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    init_ca(directory)
    issue(directory, Identity("s", "node", "n1"), loopback=True)
    issue(directory, Identity("s", "publisher", "feed"))
    return directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another CA with a publisher's certificate."""
    directory = tmp_path_factory.mktemp("foreign")
    init_ca(directory)
    issue(directory, Identity("s", "publisher", "feed"))
    return directory


@asynccontextmanager
async def node(pki: Path) -> AsyncIterator[str]:
    server = await serve("127.0.0.1:0", [], roles={}, tls=tls_of(pki, "n1"))
    try:
        yield f"localhost:{server.port}"
    finally:
        await server.stop()


@asynccontextmanager
async def plain_server(context: ssl.SSLContext | None, greeting: bytes) -> AsyncIterator[str]:
    writers: list[asyncio.StreamWriter] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(greeting)

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.transport.abort()


def test_probe_of_reachable_node_returns_none(pki: Path) -> None:
    async def run() -> None:
        async with node(pki) as endpoint:
            assert await probe_endpoint(endpoint, tls_of(pki, "feed")) is None

    asyncio.run(run())


def test_probe_reports_client_certificate_refused_by_node(pki: Path, foreign: Path) -> None:
    """The client trusts the node's CA; the node does not trust the client's."""
    mixed = foreign / "mixed"
    mixed.mkdir()
    both = (pki / "ca.crt").read_bytes() + (foreign / "ca.crt").read_bytes()
    (mixed / "ca.crt").write_bytes(both)
    tls = TLS(mixed / "ca.crt", foreign / "feed.crt", foreign / "feed.key")

    async def run() -> None:
        async with node(pki) as endpoint:
            why = await probe_endpoint(endpoint, tls)
            assert isinstance(why, rt.CertificateError)
            assert (why.what, why.where) == ("the node refuses our certificate", endpoint)

    asyncio.run(run())


def test_probe_reports_node_certificate_of_another_ca(pki: Path, foreign: Path) -> None:
    async def run() -> None:
        async with node(pki) as endpoint:
            why = await probe_endpoint(endpoint, tls_of(foreign, "feed"))
            assert isinstance(why, rt.CertificateError)
            assert "not of our CA" in str(why)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("offset", "what", "hint"),
    [
        (timedelta(days=-9), "the node's certificate has expired", "`rt certs renew DIR NAME`"),
        (timedelta(days=9), "the node's certificate is not valid yet", "Check the clocks"),
    ],
)
def test_probe_reports_node_certificate_expired_or_not_yet_valid(
    tmp_path: Path, offset: timedelta, what: str, hint: str
) -> None:
    now = datetime.now(UTC)
    init_ca(tmp_path, now=now - timedelta(days=30))
    issue(tmp_path, Identity("s", "publisher", "feed"))
    node = issue(tmp_path, Identity("s", "node", "n1"), loopback=True, days=1, now=now + offset)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(node.cert, node.key)

    async def run() -> None:
        async with plain_server(context, b"") as endpoint:
            why = await probe_endpoint(endpoint, tls_of(tmp_path, "feed"))
            assert isinstance(why, rt.CertificateError)
            assert (why.what, why.where) == (what, endpoint)
            assert hint in str(why.hint)
            assert "our CA" not in str(why)

    asyncio.run(run())


def test_probe_reports_raft_port(pki: Path) -> None:
    async def run() -> None:
        async with plain_server(tls_of(pki, "n1").ssl_server_context(), b"hello") as endpoint:
            why = await probe_endpoint(endpoint, tls_of(pki, "feed"))
            assert isinstance(why, Unreachable)
            assert "that is the Raft port" in str(why)
            assert "TLS without HTTP/2" in str(why)

    asyncio.run(run())


def test_probe_reports_server_without_tls(pki: Path) -> None:
    async def run() -> None:
        async with plain_server(None, b"SSH-2.0-other" * 10) as endpoint:
            assert "got no TLS" in str(await probe_endpoint(endpoint, tls_of(pki, "feed")))

    asyncio.run(run())


def test_probe_reports_connection_refused_on_closed_port(pki: Path) -> None:
    why = asyncio.run(probe_endpoint(f"127.0.0.1:{free_port()}", tls_of(pki, "feed")))
    assert isinstance(why, Unreachable)
    assert why.what == "connection refused"


def test_probe_reports_unknown_host(pki: Path) -> None:
    why = asyncio.run(probe_endpoint("no-such-host.invalid:5002", tls_of(pki, "feed")))
    assert isinstance(why, Unreachable)
    assert why.what == "no such host"


def test_probe_of_silent_server_times_out(pki: Path) -> None:
    async def run() -> None:
        async with plain_server(None, b"") as endpoint:
            why = await probe_endpoint(endpoint, tls_of(pki, "feed"), timeout_s=0.05)
            assert isinstance(why, rt.Timeout)

    asyncio.run(run())


def test_probe_reports_missing_certificate_file(pki: Path, tmp_path: Path) -> None:
    for name in ("ca.crt", "feed.crt", "feed.key"):
        (tmp_path / name).write_bytes((pki / name).read_bytes())
    (tmp_path / "feed.key").chmod(0o600)
    tls = tls_of(tmp_path, "feed")
    (tmp_path / "feed.crt").unlink()
    why = asyncio.run(probe_endpoint("localhost:1", tls))
    assert isinstance(why, rt.CertificateError)
    assert "feed.crt" in str(why)
