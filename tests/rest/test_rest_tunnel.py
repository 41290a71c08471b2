"""Requests to the REST API through the gRPC port, with mutual TLS, and the command `rt rest`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result
from receiving_node import make_pki, tls_of, until
from rest_node import Served, serving

from rt.cli.commands.rest import rest
from rt.cli.main import main
from rt.errors import CertificateError, RtError, Timeout
from rt.net import rest_client as rest_module
from rt.net.grpc_channel import Channel, RpcServer, serve
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.net.rest_client import REST_METHOD, RestResponse, ask, check, error_in
from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_port
from sequencer.rest.base.request import Reply, Request
from sequencer.rest.http.dispatcher import REQUESTS_PER_IDENTITY_MAX, Dispatcher
from sequencer.rest.http.tunnel import TUNNEL_ROLES, Tunnel
from sequencer.rest.views.endpoints import ENDPOINTS

WAIT_S = 60
PATHS = [endpoint.path for endpoint in ENDPOINTS]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


class Said:
    """Replaces `Dispatcher`: the test decides what it answers, and when."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.body = body
        self.asked: list[Request] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failure: RtError | None = None
        """An error that ends the call instead of an answer."""

    async def answer(self, request: Request, identity: Identity | None) -> Reply:
        self.asked.append(request)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return Reply(200, self.body)

    def refuse(self, error: RtError) -> Reply:
        return Reply(503, type(error).__name__.encode())


@contextlib.asynccontextmanager
async def tunnelled(pki: Path, answering: Any, port: int = 0) -> AsyncIterator[tuple[str, Tunnel]]:
    """A server with only the tunnel. Yields its endpoint and the tunnel."""
    tunnel = Tunnel(lambda: answering)
    server: RpcServer = await serve(
        f"127.0.0.1:{port}", [tunnel.register], roles=TUNNEL_ROLES, tls=tls_of(pki, "n1")
    )
    try:
        yield f"localhost:{server.port}", tunnel
    finally:
        await server.stop()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(WAIT_S):
            await work()

    asyncio.run(whole())


async def on_rest_port(served: Served, name: str, method: str, path: str, body: bytes | None) -> RestResponse:
    headers = {"Content-Type": "application/json"} if body else {}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.request(
            method,
            f"https://127.0.0.1:{served.rest_port}{path}",
            ssl=served.context(name),
            data=body,
            headers=headers,
        ) as answer,
    ):
        return RestResponse(answer.status, answer.headers["Content-Type"], await answer.read())


CASES = [
    *(("GET", path, None) for path in [*PATHS, "/none", "/log-history?limit=1", "/log-history?bad=1"]),
    ("HEAD", "/latest-out-position", None),
    ("PUT", "/latest-out-position", None),
    ("POST", "/latest-out-position", b"{}"),
    ("POST", "/release-hold", b'{"name": "nobody"}'),
    ("POST", "/release-hold", b"no JSON"),
    ("POST", "/configuration", b'{"rollBytes": 5, "other": 6}'),
]
"""Requests with the same answer each time."""


@pytest.mark.parametrize("name", ["op", "sub", "feed", "n1"])
def test_tunnel_response_equals_rest_port_response_for_each_certificate(
    pki: Path, tmp_path: Path, name: str
) -> None:
    async def work() -> None:
        async with serving(pki, tmp_path) as served:
            answering = served.rest.answering["rest"]
            assert isinstance(answering, Dispatcher)
            async with tunnelled(pki, answering) as (endpoint, _):
                for method, path, body in CASES:
                    there = await on_rest_port(served, name, method, path, body)
                    here = await ask([endpoint], tls_of(pki, name), method, path, body)
                    assert here[:2] == there[:2], (method, path)
                    if path not in {"/status", "/metrics", "/"}:  # These answers depend on the time.
                        assert here.body == there.body, (method, path)

    run(work)


def test_configuration_change_is_allowed_for_operator_and_returns_403_for_subscriber(
    pki: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        async with (
            serving(pki, tmp_path) as served,
            tunnelled(pki, served.rest.answering["rest"]) as (endpoint, _),
        ):
            body = b'{"rollBytes": 4096}'
            refused = await ask([endpoint], tls_of(pki, "sub"), "POST", "/configuration", body)
            assert refused.status == 403
            assert served.data.commands.ran == []
            done = await ask([endpoint], tls_of(pki, "op"), "POST", "/configuration", body)
            assert json.loads(check(done).body)["rollBytes"] == 4096
            assert len(served.data.commands.ran) == 1

    run(work)


def test_certificate_of_another_stream_raises_certificate_error(pki: Path) -> None:
    async def work() -> None:
        said = Said()
        async with tunnelled(pki, said) as (endpoint, _):
            with pytest.raises(CertificateError, match="another stream"):
                await ask([endpoint], tls_of(pki, "stranger"), "GET", "/status")
        assert said.asked == []

    run(work)


def test_tunnel_returns_body_of_5_mib(pki: Path) -> None:
    async def work() -> None:
        async with tunnelled(pki, Said(bytes(5 * 2**20))) as (endpoint, _):
            answer = await ask([endpoint], tls_of(pki, "op"), "GET", "/log-history")
            assert len(answer.body) == 5 * 2**20

    run(work)


def test_request_target_too_long_returns_400(pki: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            serving(pki, tmp_path) as served,
            tunnelled(pki, served.rest.answering["rest"]) as (endpoint, _),
        ):
            answer = await ask([endpoint], tls_of(pki, "op"), "GET", "/status?" + "x" * 5000)
        assert answer.status == 400
        assert "too long" in str(error_in(answer))

    run(work)


def test_concurrent_requests_per_certificate_are_limited_until_they_end(pki: Path) -> None:
    async def work() -> None:
        said = Said()
        said.may_answer.clear()
        async with tunnelled(pki, said) as (endpoint, tunnel):
            tls = tls_of(pki, "op")
            calls = [
                asyncio.ensure_future(ask([endpoint], tls, "GET", "/status"))
                for _ in range(REQUESTS_PER_IDENTITY_MAX)
            ]
            await until(lambda: len(said.asked) == len(calls))
            assert (await ask([endpoint], tls, "GET", "/status")).body == b"Overloaded"
            calls[0].cancel()
            await until(lambda: tunnel.places.counts.total() == len(calls) - 1)
            said.may_answer.set()
            assert (await ask([endpoint], tls_of(pki, "sub"), "GET", "/status")).status == 200
            assert {(await one).status for one in calls[1:]} == {200}
            await until(lambda: not tunnel.places.counts)

    run(work)


def test_starting_node_raises_error_and_next_endpoint_is_asked(pki: Path) -> None:
    async def work() -> None:
        said = Said()
        async with tunnelled(pki, None) as (starting, _), tunnelled(pki, said) as (endpoint, _):
            tls = tls_of(pki, "op")
            with pytest.raises(RtError, match="starting"):
                await ask([starting], tls, "GET", "/status")
            assert (await ask([starting, endpoint], tls, "GET", "/status")).status == 200

    run(work)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unreachable_node_is_skipped_for_next_endpoint(pki: Path, method: str) -> None:
    async def work() -> None:
        said, away = Said(), f"localhost:{free_port()}"
        async with tunnelled(pki, said) as (endpoint, _):
            answer = await ask([away, endpoint], tls_of(pki, "op"), method, "/x", b"{}")
            assert answer.status == 200
            assert [one.method for one in said.asked] == [method]
        with pytest.raises(Unreachable, match=away):
            await ask([away], tls_of(pki, "op"), method, "/x", b"{}")
        other = away.replace("localhost", "127.0.0.1")
        with pytest.raises(Unreachable, match=f"no node answers.*{away}.*{other}"):
            await ask([away, other], tls_of(pki, "op"), method, "/x", b"{}")

    run(work)


def test_post_is_not_retried_on_another_node_after_connection_breaks(pki: Path) -> None:
    async def work() -> None:
        broken, other = Said(), Said()
        broken.failure = Unreachable("the connection broke")
        async with tunnelled(pki, broken) as (first, _), tunnelled(pki, other) as (second, _):
            nodes, tls = [first, second], tls_of(pki, "op")
            with pytest.raises(Unreachable, match=r"broke.*may have been made"):
                await ask(nodes, tls, "POST", "/trim", b"{}")
            assert (len(broken.asked), len(other.asked)) == (1, 0)
            await ask(nodes, tls, "GET", "/status")
            assert (len(broken.asked), len(other.asked)) == (2, 1)

    run(work)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (("ca.crt", "op"), "the node's certificate is not of our CA"),
        (("both.crt", "op"), "the node refuses our certificate"),
    ],
    ids=["theirs", "ours"],
)
def test_rejected_certificate_raises_different_error_than_unreachable_node(
    pki: Path, tmp_path: Path, ours: tuple[str, str], why: str, method: str
) -> None:
    elsewhere = make_pki(tmp_path)
    both = (elsewhere / "ca.crt").read_bytes() + (pki / "ca.crt").read_bytes()
    (elsewhere / "both.crt").write_bytes(both)
    ca, name = ours
    tls = TLS(elsewhere / ca, elsewhere / f"{name}.crt", elsewhere / f"{name}.key")

    async def work() -> None:
        said = Said()
        async with tunnelled(pki, said) as (endpoint, _):
            with pytest.raises(RtError, match=why):
                await ask([endpoint], tls, method, "/status", b"{}")
            with pytest.raises(RtError, match=why):
                await ask(
                    [endpoint, endpoint.replace("localhost", "127.0.0.1")], tls, method, "/status", b"{}"
                )
        assert said.asked == []

    run(work)


@contextlib.asynccontextmanager
async def slow_to_begin(endpoint: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An endpoint that forwards everything to the other endpoint once the event is set."""
    may_begin, port = asyncio.Event(), int(endpoint.rpartition(":")[2])

    held: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await may_begin.wait()
        if not server.is_serving():
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        finally:
            writer.close()
            far_writer.close()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        try:
            yield f"localhost:{server.sockets[0].getsockname()[1]}", may_begin
        finally:
            server.close()
            for writer in held:
                writer.transport.abort()
            if not may_begin.is_set():
                may_begin.set()
                await asyncio.sleep(0)


def wait_only_for_others(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """Let connections to `slow` time out at once, while connections to other nodes have enough time."""
    why_unconnected = rest_module._why_unconnected

    async def judge(channel: Channel, _: float) -> RtError | None:
        return await why_unconnected(channel, 0.05 if channel.target == slow else WAIT_S)

    monkeypatch.setattr(rest_module, "_why_unconnected", judge)


@pytest.mark.parametrize("when", ["at once", "later"])
def test_post_reaches_at_most_one_node_when_connections_are_slow(
    pki: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async def work() -> None:
        first, second = Said(), Said()
        async with (
            tunnelled(pki, first) as (near, _),
            slow_to_begin(near) as (slow, may_begin),
            tunnelled(pki, second) as (other, _),
        ):
            if when == "later":
                wait_only_for_others(monkeypatch, slow)
            patience = {"connect_timeout_s": float(WAIT_S)}
            posting = ask([slow, other], tls_of(pki, "op"), "POST", "/trim", b"{}", **patience)
            asking = asyncio.ensure_future(posting)
            if when == "later":
                await until(lambda: second.asked)
            may_begin.set()
            assert (await asking).status == 200
            await ask([near], tls_of(pki, "op"), "GET", "/status")
            posted = [[one.method for one in said.asked].count("POST") for said in (first, second)]
            assert posted == ([0, 1] if when == "later" else [1, 0])

    run(work)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_node_not_connected_within_timeout_is_skipped_for_next_endpoint(
    pki: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def work() -> None:
        first, second = Said(), Said()
        async with (
            tunnelled(pki, first) as (near, _),
            slow_to_begin(near) as (silent, _),
            tunnelled(pki, second) as (other, _),
        ):
            tls = tls_of(pki, "op")
            with pytest.raises(Timeout, match="no connection in time") as raised:
                await ask([silent], tls, method, "/status", b"{}", connect_timeout_s=0.05)
            assert (raised.value.where, raised.value.expected) == (silent, "within 0.05 s")
            wait_only_for_others(monkeypatch, silent)
            assert (await ask([silent, other], tls, method, "/status", b"{}")).status == 200
            assert (first.asked, len(second.asked)) == ([], 1)

    run(work)


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 10**5, b'"x"', b'{"error": 1}', b"\xff", b"{}"])
def test_response_body_without_error_object_is_judged_by_status_alone(body: bytes) -> None:
    assert check(RestResponse(200, "application/json", body)).body == body
    assert error_in(RestResponse(200, "application/json", b'{"error": "Timeout", "what": "x"}')) is None
    with pytest.raises(RtError, match="503"):
        check(RestResponse(503, "application/json", body), where="n1:5002")


def test_error_response_keeps_class_and_message() -> None:
    told = {"error": "Timeout", "what": "it took long", "where": None, "got": None, "expected": "1 s"}
    with pytest.raises(Timeout, match="expected 1 s") as caught:
        check(RestResponse(504, "application/json", json.dumps(told).encode()), where="n1")
    assert caught.value.hint is None


# rt rest


class Node:
    """A node that serves from a thread."""

    def __init__(self, pki: Path, directory: Path) -> None:
        self._pki, self._directory = pki, directory
        self._is_up, self.endpoint = threading.Event(), ""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with (
            serving(self._pki, self._directory) as self.served,
            tunnelled(self._pki, self.served.rest.answering["rest"]) as (self.endpoint, _),
        ):
            self._is_up.set()
            await self._stopping.wait()

    def __enter__(self) -> Node:
        self._thread.start()
        assert self._is_up.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()


@pytest.fixture(scope="module")
def node(pki: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(pki, tmp_path_factory.mktemp("node")) as node:
        yield node


def options(node: Node, pki: Path, name: str = "op") -> list[str]:
    away = f"localhost:{free_port()}"
    return [
        *("--endpoints", f"{away}, {node.endpoint}", "--ca", str(pki / "ca.crt")),
        *("--cert", str(pki / f"{name}.crt"), "--key", str(pki / f"{name}.key")),
    ]


def invoke(*arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(rest, arguments, **more)


@pytest.mark.parametrize("target", ["/log-history?limit=2", "log-history?limit=2"])
def test_rest_command_prints_response_of_first_reachable_node(node: Node, pki: Path, target: str) -> None:
    result = invoke(target, *options(node, pki))
    assert result.exit_code == 0
    assert [one["logPos"] for one in json.loads(result.stdout)] == [0, 100]


def test_rest_command_posts_given_data(node: Node, pki: Path) -> None:
    result = invoke("/configuration", "--data", '{"rollMinutes": 7}', *options(node, pki))
    assert json.loads(result.stdout)["rollMinutes"] == 7
    assert json.loads(invoke("/configuration", *options(node, pki)).stdout)["rollMinutes"] == 7


def test_rest_command_error_is_printed_to_stderr_and_exits_with_1(
    node: Node, pki: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["rest", "/status", *options(node, pki, "sub")]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("rt: this role may not read this path (at /status)")
    assert main(["rest", "/readiness", *options(node, pki)]) == 0
    node.served.data.link.is_up = False
    try:
        assert main(["rest", "/readiness", *options(node, pki)]) == 1
    finally:
        node.served.data.link.is_up = True
    out, err = capfd.readouterr()
    assert [json.loads(line)["ready"] for line in out.splitlines()] == [True, False]
    assert "503" in err


def test_rest_command_reads_options_from_environment(node: Node, pki: Path) -> None:
    words = options(node, pki)
    environment = {
        f"RT_REST_{name[2:].upper()}": value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    result = CliRunner().invoke(rest, ["/liveness"], env=environment, auto_envvar_prefix="RT_REST")
    assert json.loads(result.stdout) == {"alive": True, "obstacles": []}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["/status"],
        ["/status", "--endpoints", "n1:5002"],
        ["/status", "--endpoints", "n1:5002", "--insecure", "--ca", __file__],
        ["/status", "--endpoints", "localhost:1", "--insecure", "--data", "{"],
    ],
)
def test_rest_command_with_invalid_options_exits_with_2(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_rest_method_constant_matches_protobuf_service() -> None:
    from rt.v1 import rest_pb2

    service = rest_pb2.DESCRIPTOR.services_by_name["Rest"]
    assert f"/{service.full_name}/{service.methods[0].name}" == REST_METHOD
    assert list(TUNNEL_ROLES) == [REST_METHOD]
