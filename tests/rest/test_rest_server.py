"""The REST and health servers: certificates, roles, HTTP methods and bodies, limits, and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from receiving_node import make_pki
from rest_node import OPERATOR, PUBLISHER, SUBSCRIBER, Served, ask, node_view, serving

from replicator.protocol.handshake import PullMerged, PushHello
from replicator.pull.server import Pull
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from sequencer.rest.http import connection
from sequencer.rest.http.app import App
from sequencer.rest.http.dispatcher import REQUESTS_MAX, REQUESTS_PER_IDENTITY_MAX, Dispatcher
from sequencer.rest.http.listener import HANDSHAKES_MAX, HttpListener
from sequencer.rest.views.context import RequestContext, Response
from sequencer.rest.views.endpoints import ENDPOINTS, RestEndpoint
from sequencer.state.state_codec import encode_state

WAIT_S = 120


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def run(pki: Path, tmp_path: Path) -> Callable[[Callable[[Served], Awaitable[None]]], None]:
    """Return a function that runs a test against a serving node."""

    def running(check: Callable[[Served], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(WAIT_S), serving(pki, tmp_path) as served:
                await check(served)

        asyncio.run(whole())

    return running


async def get(
    served: Served, path: str, name: str = "op", *, method: str = "GET", **options: Any
) -> tuple[int, Any, Any]:
    """Return the status, the headers, and the body. A JSON body is decoded."""
    url = f"https://127.0.0.1:{served.rest_port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, ssl=served.context(name), **options) as answer,
    ):
        text = await answer.text()
        is_json = answer.content_type == "application/json" and text
        return answer.status, answer.headers, json.loads(text) if is_json else text


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. The test's deadline limits the wait."""
    while not condition():
        await asyncio.sleep(0.005)


# Permissions


def test_open_connection_gets_403_after_client_certificate_expires(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(served: Served) -> None:
        url, context = f"https://127.0.0.1:{served.rest_port}/status", served.context("op")
        async with aiohttp.ClientSession() as session:
            for statuses in ([200, 200], [403, 403]):
                for status in statuses:
                    async with session.get(url, ssl=context) as answer:
                        told = await answer.json()
                        assert answer.status == status
                monkeypatch.setattr(connection, "clock_s", lambda: time.time() + 400 * 24 * 3600)
        assert "has expired" in told["what"]

    run(check)


@pytest.mark.parametrize(
    ("name", "role"), [("op", "operator"), ("sub", "subscriber"), ("feed", "publisher"), ("n1", "node")]
)
def test_role_reads_only_endpoints_listed_for_it(name: str, role: str, run: Any) -> None:
    async def check(served: Served) -> None:
        for endpoint in ENDPOINTS:
            status, _, body = await get(served, endpoint.path, name)
            if role in endpoint.roles:
                assert status == 200, endpoint.path
            else:
                assert status == 403, endpoint.path
                assert body["error"] == "CertificateError"
                assert body["what"] == "this role may not read this path"
                assert body["expected"] == "role operator"

    run(check)


def test_clients_endpoint_returns_only_own_clients_to_non_operators(run: Any) -> None:
    async def check(served: Served) -> None:
        served.clients.start_push(PUBLISHER, PushHello("s", "feed", b"\1" * 16))
        served.pull.pulls[1] = Pull(SUBSCRIBER, "ipv4:1.2.3.4:5", PullMerged(), 1)

        seen = {name: (await get(served, "/rt-clients", name))[2] for name in ("op", "sub", "feed", "other")}

        names = {name: [one["name"] for one in found] for name, found in seen.items()}
        assert names == {"op": ["feed", "sub"], "sub": ["sub"], "feed": ["feed"], "other": []}

    run(check)


def test_certificate_of_another_stream_gets_403_on_every_path(run: Any) -> None:
    async def check(served: Served) -> None:
        for path in (*(endpoint.path for endpoint in ENDPOINTS), "/nothing"):
            status, _, body = await get(served, path, "stranger")
            assert (status, body["what"]) == (403, "the client certificate is of another stream")

    run(check)


def test_connection_without_certificate_of_own_ca_gets_no_answer(run: Any, pki: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    init_ca(other)
    issue(other, OPERATOR)

    async def check(served: Served) -> None:
        foreign = served.context(None)
        foreign.load_cert_chain(other / "op.crt", other / "op.key")
        for context in (served.context(None), foreign):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                answer = await ask(served.rest_port, b"GET /readiness HTTP/1.0\r\n\r\n", context)
                assert answer == b""
        with contextlib.suppress(ConnectionError):
            assert b"ready" not in await ask(served.rest_port, b"GET /readiness HTTP/1.0\r\n\r\n")
        listener = served.rest.listeners["rest"]
        await until(lambda: listener.refused.total() == 3)
        assert (await get(served, "/readiness"))[0] == 200
        _, _, text = await get(served, "/metrics")
        assert 'rt_rejections_total{at="rest",reason="PEER_DID_NOT_RETURN_A_CERTIFICATE"} 1' in text

    run(check)


def test_port_without_certificates_serves_only_health_and_metrics(run: Any) -> None:
    async def check(served: Served) -> None:
        for path in ("/readiness", "/liveness", "/metrics"):
            answer = await ask(served.health_port, f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.0 200 OK")
        for path in ("/status", "/", "/openapi.json", "/log-history"):
            answer = await ask(served.health_port, f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.0 404 ")
            assert b'"error":"NoSuchPath"' in answer

    run(check)


# Requests


def test_unknown_path_or_invalid_parameter_returns_typed_error(run: Any) -> None:
    async def check(served: Served) -> None:
        status, headers, body = await get(served, "/nothing/here?x=1")
        assert (status, headers["Content-Type"]) == (404, "application/json")
        assert (body["error"], body["where"]) == ("NoSuchPath", "'/nothing/here'")
        assert set(body) == {"error", "what", "where", "got", "expected", "hint"}
        named = body["expected"].split(", ")
        assert {"/status", "/holds", "/configuration"} <= {*named}
        assert not [path for path in named if path == "/" or path.startswith("/page/")], "the page's files"
        status, _, body = await get(served, "/log-history?limit=0")
        assert (status, body["where"], body["got"]) == (400, "parameter limit", "'0'")
        status, _, body = await get(served, "/status?verbose=1")
        assert (status, body["what"]) == (400, "unknown parameter")
        status, _, body = await get(served, "/log-history/")
        assert status == 404

    run(check)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_unsupported_method_returns_405_with_allowed_methods(method: str, run: Any) -> None:
    async def check(served: Served) -> None:
        status, headers, body = await get(served, "/status", method=method)
        assert (status, body["error"], headers["Allow"]) == (405, "MethodNotAllowed", "GET, HEAD")
        assert (await get(served, "/nothing", method=method))[0] == 404

    run(check)


def test_head_returns_headers_of_get_without_body(run: Any) -> None:
    async def check(served: Served) -> None:
        for path in ("/log-history", "/docs", "/latest-out-position"):
            _, got, body = await get(served, path)
            status, headers, text = await get(served, path, method="HEAD")
            assert (status, text) == (200, "")
            assert headers["Content-Type"] == got["Content-Type"]
            assert headers["Content-Length"] == got["Content-Length"]
            assert body

    run(check)


def test_get_requests_do_not_change_replicated_state(run: Any) -> None:
    async def check(served: Served) -> None:
        before = encode_state(served.data.follower.state)
        for endpoint in ENDPOINTS:
            await get(served, endpoint.path)
        assert encode_state(served.data.follower.state) == before

    run(check)


def test_response_headers_hide_server_software_and_restrict_content(run: Any) -> None:
    async def check(served: Served) -> None:
        _, headers, _ = await get(served, "/docs")
        assert headers["Server"] == "rt"
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")

    run(check)


def test_readiness_returns_503_while_no_leader_is_known(run: Any) -> None:
    async def check(served: Served) -> None:
        assert (await get(served, "/readiness"))[0] == 200
        served.data.follower.standing.leader = ""
        status, _, body = await get(served, "/readiness")
        assert (status, body["obstacles"]) == (503, ["no leader is known"])
        assert (await get(served, "/liveness"))[0] == 200

    run(check)


# Bounds


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % index for index in range(1000)) + b"\r\n",
        b"\x16\x03\x01\x00\xff" * 50 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["header", "line", "headers", "garbage", "length", "method", "smuggling"],
)
def test_malformed_or_oversized_request_gets_400_and_is_counted(
    content: bytes, run: Any, logged: Callable[[str], list[str]]
) -> None:
    async def check(served: Served) -> None:
        answer = b"HTTP/1.1 400 "
        with contextlib.suppress(ConnectionError):
            answer = await ask(served.health_port, content)
        assert answer.split(b" ")[1] == b"400"
        assert b"Traceback" not in answer
        if b"\r\n\r\n" in answer:
            told = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert (told["error"], told["what"]) == (
                "BadRequest",
                "malformed HTTP request, or above a limit",
            )
        assert served.rest.answering["health"].refused.total() == 1
        assert not logged("sequencer")
        assert (await get(served, "/liveness"))[0] == 200

    run(check)


def test_get_with_body_of_any_size_is_rejected_with_400(run: Any) -> None:
    async def check(served: Served) -> None:
        status, headers, body = await get(served, "/status", data=b"{}")
        assert (status, body["what"]) == (400, "this path accepts no request body")
        assert headers["Connection"] == "close"

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 65536

        with contextlib.suppress(aiohttp.ClientError):
            status, _, body = await get(served, "/status", data=endless())
            assert status == 400
        await until(lambda: served.rest.listeners["rest"].connections == 0)

    run(check)


def post(body: bytes, *headers: bytes) -> bytes:
    """The bytes of a request that changes something."""
    lines = [b"POST /release-hold HTTP/1.1", b"Host: x", b"Connection: close", *headers]
    return b"\r\n".join([*lines, b"Content-Type: application/json", b"", body])


GOOD = b'{"name": "late"}'


@pytest.mark.parametrize(
    "content",
    [
        post(GOOD, b"Content-Length: 16"),
        post(b"8\r\n" + GOOD[:8] + b"\r\n8\r\n" + GOOD[8:] + b"\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    ],
    ids=["whole", "chunked"],
)
def test_operator_post_with_json_body_is_applied(content: bytes, run: Any) -> None:
    async def check(served: Served) -> None:
        answer = await ask(served.rest_port, content, served.context("op"))

        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert [*served.data.follower.state.holds] == ["sub"]

    run(check)


def test_expect_100_continue_is_answered_before_body_is_sent(run: Any) -> None:
    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", served.rest_port, ssl=served.context("op")
        )
        writer.write(post(b"", b"Content-Length: 16", b"Expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(GOOD)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.transport.abort()
        assert [*served.data.follower.state.holds] == ["sub"]

    run(check)


def test_disconnect_within_body_runs_no_command_and_logs_no_internal_error(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.rest_port, ssl=served.context("op"))
        writer.write(post(GOOD[:5], b"Content-Length: 16"))
        answering = served.rest.answering["rest"]
        await until(lambda: served.rest.listeners["rest"].connections == 1)
        writer.close()
        await until(lambda: answering.refused["BadRequest"] == 1)
        assert not served.data.commands.ran

    run(check)
    assert "rest_failed" not in caplog.text


@pytest.mark.parametrize("name", ["sub", "op"])
def test_endless_body_is_rejected_and_connection_closed(name: str, run: Any) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65536
            yield b" " * 65536

    async def check(served: Served) -> None:
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(aiohttp.ClientError):
            status, _, _ = await get(
                served, "/release-hold", name, method="POST", data=endless(), headers=headers
            )
            assert status == (413 if name == "op" else 403)
        await until(lambda: served.rest.listeners["rest"].connections == 0)
        assert sent < 64 * 2**20
        assert not served.data.commands.ran

    run(check)


@contextlib.asynccontextmanager
async def listening(
    endpoints: tuple[RestEndpoint, ...] = ENDPOINTS, **bounds: Any
) -> AsyncIterator[tuple[HttpListener, Dispatcher]]:
    """A plain port with other limits. Its `endpoints` are public."""
    public = [replace(one, is_public=True) for one in endpoints]
    with ThreadPoolExecutor(1) as pool:
        answering = Dispatcher(public, node_view, pool, stream=None)
        runner = App(answering).runner()
        await runner.setup()
        make = runner.server
        assert make is not None
        listener = HttpListener("test", make, ("127.0.0.1", 0), lambda: None, **bounds)
        listener.start()
        try:
            async with asyncio.timeout(WAIT_S):
                yield listener, answering
        finally:
            await runner.cleanup()
            await listener.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"GET /liveness HTTP/1.1\r\nHos", b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["silent", "half a header", "idle after a request"],
)
def test_idle_peer_is_disconnected_after_header_timeout(content: bytes) -> None:
    async def check() -> None:
        async with listening(headers_s=0.5) as (listener, _):
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await ask(listener.port, content)
            assert answer.count(b"HTTP/1.1 200 OK") == content.count(b"\r\n\r\n")
            await until(lambda: listener.connections == 0)

    asyncio.run(check())


def test_slowly_sent_headers_do_not_keep_connection_open() -> None:
    async def check() -> None:
        async with listening(headers_s=0.2) as (listener, _):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET /liveness HTTP/1.1\r\n")
                while True:
                    writer.write(b"X: y\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            writer.transport.abort()
            await until(lambda: listener.connections == 0)

    asyncio.run(check())


def test_peer_not_reading_its_response_is_disconnected() -> None:
    def much(_: RequestContext) -> Response:
        return Response("x" * 50_000_000)

    async def check() -> None:
        endpoint = replace(ENDPOINTS[0], path="/much", view=much)
        async with listening((endpoint,), headers_s=0.5, request_s=1.0) as (listener, app):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port, limit=1)
            writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: app.statuses[200] == 1)
            await until(lambda: listener.connections == 0)
            writer.transport.abort()

    asyncio.run(check())


def test_large_response_reaches_peer_slower_than_header_timeout() -> None:
    def much(_: RequestContext) -> Response:
        return Response("x" * 20_000_000)

    async def check() -> None:
        endpoint = replace(ENDPOINTS[0], path="/much", view=much)
        async with listening((endpoint,), headers_s=0.5, request_s=100.0) as (listener, app):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(b"GET /much HTTP/1.0\r\n\r\n")
            await until(lambda: app.statuses[200] == 1)
            for _ in range(2):
                with contextlib.suppress(ConnectionError):
                    assert await ask(listener.port, b"") == b""

            assert (await reader.read()).endswith(b"\r\n\r\n" + b"x" * 20_000_000)
            writer.transport.abort()

    asyncio.run(check())


def test_oldest_idle_connection_is_closed_at_connection_limit() -> None:
    async def check() -> None:
        async with listening(connections_max=3) as (listener, _):
            idle = []
            for count in range(1, 4):
                idle.append(await asyncio.open_connection("127.0.0.1", listener.port))
                await until(lambda count=count: listener.connections == count)  # type: ignore[misc]

            answer = await ask(listener.port, b"GET /liveness HTTP/1.0\r\n\r\n")

            assert b" 200 OK" in answer
            with contextlib.suppress(ConnectionError):
                assert await idle[0][0].read() == b""
            assert not idle[1][0].at_eof()
            assert listener.refused["Overloaded"] == 1
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(check())


def test_silent_peers_in_tls_handshake_do_not_block_other_clients(run: Any) -> None:
    async def check(served: Served) -> None:
        silent = []
        for _ in range(3 * HANDSHAKES_MAX):
            silent.append(await asyncio.open_connection("127.0.0.1", served.rest_port))

        assert (await get(served, "/readiness"))[0] == 200

        with contextlib.suppress(ConnectionError):
            assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.transport.abort()

    run(check)


class Held:
    """An answer that waits until the test releases it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = 0

    def __call__(self, _: RequestContext) -> Response:
        self.entered += 1
        assert self.go.wait(WAIT_S)
        return Response({})


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go.set()


def test_request_above_concurrency_limit_gets_503_with_retry_after(held: Held) -> None:
    async def check() -> None:
        endpoint = replace(ENDPOINTS[0], path="/held", view=held, may_be_large=True)
        async with listening((endpoint, *ENDPOINTS)) as (listener, app):
            request = b"GET /held HTTP/1.0\r\n\r\n"
            waiting = [asyncio.create_task(ask(listener.port, request)) for _ in range(REQUESTS_MAX)]
            await until(lambda: app.busy.total() == REQUESTS_MAX)

            refused = await ask(listener.port, request)

            assert refused.startswith(b"HTTP/1.0 503 ")
            assert b"Retry-After: 1\r\n" in refused
            assert b'"error":"Overloaded"' in refused
            held.go.set()
            assert all(b" 200 OK" in answer for answer in await asyncio.gather(*waiting))
            assert held.entered == REQUESTS_MAX
            assert b" 200 OK" in await ask(listener.port, request)

    asyncio.run(check())


def test_slow_requests_of_one_identity_do_not_block_other_identities(held: Held, run: Any) -> None:
    async def check(served: Served) -> None:
        served.rest._pool.submit(held.go.wait)  # Requests with possibly large answers wait for this job.
        app = served.rest.answering["rest"]
        waiting = [
            asyncio.create_task(get(served, "/log-history", "sub")) for _ in range(REQUESTS_PER_IDENTITY_MAX)
        ]
        await until(lambda: app.busy[SUBSCRIBER.uri] == REQUESTS_PER_IDENTITY_MAX)

        assert (await get(served, "/latest-out-position", "sub"))[0] == 503
        assert (await get(served, "/latest-out-position", "op"))[0] == 200
        assert (await get(served, "/readiness", "feed"))[0] == 200

        held.go.set()
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * len(waiting)

    run(check)


def test_pipelined_requests_on_many_connections_are_all_answered(run: Any) -> None:
    async def check(served: Served) -> None:
        content = b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n" * 50
        content += b"GET /liveness HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answers = await asyncio.gather(*(ask(served.health_port, content) for _ in range(20)))
        assert [answer.count(b"HTTP/1.1 200 OK") for answer in answers] == [51] * 20

    run(check)


# Internal errors


def test_internal_error_is_logged_and_not_disclosed_to_caller(
    caplog: pytest.LogCaptureFixture, logged: Callable[[str], list[str]]
) -> None:
    def broken(_: RequestContext) -> Response:
        raise KeyError("secret")

    async def check() -> None:
        endpoint = replace(ENDPOINTS[0], path="/broken", view=broken)
        async with listening((endpoint, *ENDPOINTS)) as (listener, _):
            answer = await ask(listener.port, b"GET /broken HTTP/1.0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.0 500 ")
            assert b"secret" not in answer
            assert b"Traceback" not in answer
            assert b"200 OK" in await ask(listener.port, b"GET /liveness HTTP/1.0\r\n\r\n")

    with caplog.at_level(logging.CRITICAL, "sequencer"):
        asyncio.run(check())
    assert logged("sequencer") == ["rest_failed path='/broken'"]


def test_disconnect_of_peer_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = App(Dispatcher((), node_view, ThreadPoolExecutor(1), stream=None))
    logger = app._http_logger()
    for error in (ConnectionResetError("the peer is gone"), RuntimeError("ours")):
        try:
            raise error
        except (ConnectionError, RuntimeError):
            logger.exception("Error handling request")
    ours = [record.exc_info for record in caplog.records if record.message == "Error handling request"]
    assert [found[0] for found in ours if found] == [RuntimeError]


def test_occupied_port_is_served_once_it_is_free(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sequencer.rest.http.listener.AGAIN_S", 0.01)

    async def check() -> None:
        served = Served(pki, tmp_path)
        with socket.create_server(("127.0.0.1", served.rest_port)):
            await served.rest.start()
            assert served.rest.listeners["rest"].port == 0
            assert b" 200 OK" in await ask(served.health_port, b"GET /liveness HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            await until(lambda: served.rest.listeners["rest"].port == served.rest_port)
            assert (await get(served, "/liveness"))[0] == 200
        await served.rest.close()

    asyncio.run(check())


def test_certificates_are_reloaded_without_restart(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sequencer.data.http_servers.POLL_S", 0.02)
    own = tmp_path / "own"
    shutil.copytree(pki, own)

    def shown(served: Served) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", served.rest_port)) as plain,
            served.context("op").wrap_socket(plain, server_hostname="127.0.0.1") as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""

    async def check() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S), serving(own, tmp_path / "data") as served:
            before = await loop.run_in_executor(None, shown, served)
            issue(own, Identity("s", "node", "n1"), loopback=True, renew=True)
            while await loop.run_in_executor(None, shown, served) == before:
                await asyncio.sleep(0.01)
            good = (own / "n1.crt").read_bytes()
            (own / "n1.crt").write_bytes(b"broken")
            await until(lambda: "certificates_not_reloaded" in caplog.text)
            assert (await get(served, "/liveness"))[0] == 200
            (own / "n1.crt").write_bytes(good)

    asyncio.run(check())


def test_close_ends_connections_and_frees_ports(pki: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with asyncio.timeout(WAIT_S):
            async with serving(pki, tmp_path) as served:
                reader, writer = await asyncio.open_connection("127.0.0.1", served.health_port)
                await until(lambda: served.rest.listeners["health"].connections == 1)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.transport.abort()
            for port in (served.rest_port, served.health_port):
                socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(check())
