"""gRPC over loopback: authentication, limits, certificate rotation, and silent peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import rt
from rt.errors import RtError
from rt.net import cert_validity, grpc_auth
from rt.net.cert_files import certificates_in, private_key_in
from rt.net.dev_pki import IssuedCertificate, init_ca, issue
from rt.net.grpc_channel import (
    Channel,
    RpcServer,
    StreamCaps,
    caller,
    end_call,
    open_channel,
    serve,
)
from rt.net.grpc_errors import Unreachable, asking
from rt.net.grpc_options import (
    MESSAGE_BYTES_MAX,
    STREAMS_PER_CONNECTION_MAX,
    channel_options,
    server_options,
)
from rt.net.identity import Identity
from rt.net.tls import TLS

WAIT_S = 120

NODE = Identity("s", "node", "n1")
FEED = Identity("s", "publisher", "f1")
ROLES = {
    "/test.Talk/Echo": {"publisher"},
    "/test.Talk/Count": {"publisher", "subscriber"},
    "/test.Talk/Ask": {"publisher"},
    "/test.Talk/Fail": {"publisher"},
}


# --- a service, a PKI -------------------------------------------------------------------------------------


class Talk:
    """A service for messages of bytes. `inside` counts the running handlers, `entered` all handlers so
    far.
    """

    def __init__(self) -> None:
        self.inside = 0
        self.entered = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.inside += 1
        self.entered += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def echo(self, _: object, context: grpc.aio.ServicerContext) -> None:
        with self.running():
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(message)

    async def count(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        with self.running():
            for number in range(int(request)):
                yield b"%d %s" % (number, caller().uri.encode())

    async def ask(self, request: bytes, context: object) -> bytes:
        with self.running():
            return caller().uri.encode() + request

    async def fail(self, request: bytes, context: object) -> bytes:
        if request == b"ours":
            raise rt.Diverged("it differs", where="here", got=1, expected=2)
        raise KeyError("a secret")

    def register(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Ask": grpc.unary_unary_rpc_method_handler(self.ask),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Forgotten": grpc.unary_unary_rpc_method_handler(self.ask),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Talk", handlers),))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a CA with certificates for n1 (loopback), n2 (only its own name), f1 and f2, and for s1 and o1,
    which have another role or stream.
    """
    directory = tmp_path_factory.mktemp("pki")
    init_ca(directory)
    issue(directory, NODE, loopback=True)
    issue(directory, Identity("s", "node", "n2"))
    issue(directory, FEED)
    issue(directory, Identity("s", "publisher", "f2"))
    issue(directory, Identity("s", "subscriber", "s1"))
    issue(directory, Identity("other", "publisher", "o1"))
    return directory


def tls_of(pki: Path, name: str) -> TLS:
    return TLS(pki / "ca.crt", pki / f"{name}.crt", pki / f"{name}.key")


@contextlib.asynccontextmanager
async def serving(
    tls: TLS | None, talk: Talk | None = None, address: str = "127.0.0.1:0", **more: object
) -> AsyncIterator[RpcServer]:
    server = await serve(address, [(talk or Talk()).register], roles=ROLES, tls=tls, **more)
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def talking(pki: Path, name: str = "f1", **more: object) -> AsyncIterator[tuple[RpcServer, Channel]]:
    async with (
        serving(tls_of(pki, "n1"), **more) as server,
        open_channel(f"localhost:{server.port}", tls_of(pki, name)) as channel,
    ):
        yield server, channel


async def ask(channel: Channel | grpc.aio.Channel, text: bytes = b"?", method: str = "Ask") -> bytes:
    present = channel.get() if isinstance(channel, Channel) else channel
    with asking("the server"):
        return await present.unary_unary(f"/test.Talk/{method}")(text, timeout=WAIT_S)


def echo(channel: Channel) -> grpc.aio.StreamStreamCall:
    return channel.get().stream_stream("/test.Talk/Echo")()


async def echoed(call: grpc.aio.StreamStreamCall, message: bytes) -> bytes:
    with asking("the server"):
        await call.write(message)
        return await asyncio.wait_for(call.read(), WAIT_S)


async def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    """Return the log lines of this process. A push process of an earlier test logs as well."""
    own = [one for one in caplog.records if one.name == "rt.net" and one.process == os.getpid()]
    return [line for line in (one.getMessage() for one in own) if line.startswith(event)]


# --- accepted calls ---------------------------------------------------------------------------------------


def test_handlers_of_each_kind_reply_and_see_caller_identity(pki: Path) -> None:
    async def run() -> None:
        async with talking(pki) as (server, channel):
            assert await ask(channel, b"!") == b"rt://s/publisher/f1!"
            counted = [m async for m in channel.get().unary_stream("/test.Talk/Count")(b"3")]
            assert counted == [b"%d rt://s/publisher/f1" % number for number in range(3)]
            call = echo(channel)
            for message in (b"", b"one", b"x" * 2**20):
                assert await echoed(call, message) == message
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            await until(lambda: not server.caps.counts)
            assert not server.refused

    asyncio.run(run())


def test_handler_error_reaches_client_and_crash_details_stay_in_server_log(
    pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with talking(pki) as (_, channel):
            with pytest.raises(rt.Diverged, match=r"it differs \(at here\): got 1, expected 2"):
                await ask(channel, b"ours", "Fail")
            with pytest.raises(RtError) as caught:
                await ask(channel, b"crash", "Fail")
            assert "secret" not in str(caught.value) + repr(caught.value.__cause__)
            assert await ask(channel, b"!")

    asyncio.run(run())
    assert "a secret" in caplog.text


class Refusing(Talk):
    """A service that writes more than the client reads, and then refuses the rest of the client's
    messages.
    """

    async def echo(self, _: object, context: grpc.aio.ServicerContext) -> None:
        await context.read()
        for _more in range(3):
            await context.write(b"a reply")
        await context.read()
        raise rt.Overloaded("no more")


def test_calls_ended_during_write_free_their_stream_slots() -> None:
    async def run() -> None:
        async with (
            serving(None, Refusing(), insecure_as=lambda: FEED) as server,
            open_channel(f"localhost:{server.port}", None, insecure=True) as channel,
        ):
            for _call in range(STREAMS_PER_CONNECTION_MAX + 10):
                call = echo(channel)
                assert await asyncio.wait_for(echoed(call, b"hello"), WAIT_S) == b"a reply"
                with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                    while True:
                        await call.write(bytes(2**20))
                end_call(call)

    asyncio.run(run())


def test_cancelled_call_ends_its_handler_and_frees_its_stream_slot(pki: Path) -> None:
    async def run() -> None:
        talk = Talk()
        async with talking(pki, talk=talk) as (server, channel):
            call = echo(channel)
            await echoed(call, b"x")
            assert (talk.inside, dict(server.caps.counts)) == (1, {FEED.uri: 1})
            call.cancel()
            await until(lambda: talk.inside == 0 and not server.caps.counts)

    asyncio.run(run())


# --- rejected callers -------------------------------------------------------------------------------------


def stranger(pki: Path, tmp_path: Path, kind: str) -> grpc.ChannelCredentials | None:
    """Return the credentials of a peer that TLS itself must reject. None means plaintext."""
    ca = (pki / "ca.crt").read_bytes()
    if kind == "plaintext":
        return None
    if kind == "no certificate":
        return grpc.ssl_channel_credentials(ca)
    if kind == "another CA":
        init_ca(tmp_path)
        pair = issue(tmp_path, FEED)
        return grpc.ssl_channel_credentials(ca, pair.key.read_bytes(), pair.cert.read_bytes())
    start, end = (-9, -1) if kind == "expired" else (1, 9)
    cert, key = certificate(pki, [FEED.uri], start, end)
    return grpc.ssl_channel_credentials(ca, key, cert)


def certificate(pki: Path, uris: list[str], start_days: int = -1, end_days: int = 1) -> tuple[bytes, bytes]:
    """Return a certificate of our CA that `issue` would not create, and its key."""
    ca = certificates_in((pki / "ca.crt").read_bytes(), where="ca")[0]
    ca_key = private_key_in((pki / "ca.key").read_bytes(), where="ca")
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=start_days))
        .not_valid_after(now + timedelta(days=end_days))
        .add_extension(names, critical=True)
        .sign(ca_key, SHA256())
    )
    return made.public_bytes(Encoding.PEM), key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


@pytest.mark.parametrize("kind", ["plaintext", "no certificate", "another CA", "expired", "not yet valid"])
def test_peer_without_valid_certificate_reaches_no_handler(pki: Path, tmp_path: Path, kind: str) -> None:
    async def run() -> None:
        talk = Talk()
        async with talking(pki, talk=talk) as (server, channel):
            shown, target = stranger(pki, tmp_path, kind), f"localhost:{server.port}"
            made = (
                grpc.aio.secure_channel(target, shown, options=channel_options())
                if shown
                else grpc.aio.insecure_channel(target, options=channel_options())
            )
            async with made:
                with pytest.raises(Unreachable):
                    await ask(made)
            assert talk.entered == 0
            assert await ask(channel)  # other callers are served

    asyncio.run(run())


@pytest.mark.parametrize(
    ("uris", "method", "words"),
    [
        (["rt://s/subscriber/s1"], "Ask", "this role may not call this method"),
        (["rt://s/operator/o"], "Ask", "this role may not call this method"),
        (["rt://s/publisher/f1"], "Forgotten", "role of none"),
        (["rt://other/publisher/f1"], "Ask", "a certificate of another stream.*`rt certs show` names"),
        (["rt://s/publisher/f1", "rt://s/publisher/f2"], "Ask", "must name one identity .*got 2 URI SANs"),
        (["https://s/publisher/f1"], "Ask", "must name one identity .*got 0 URI SANs"),
        (["rt://s/publisher/..%2f"], "Ask", "identity is not valid"),
    ],
)
def test_unauthorized_call_is_refused_logged_and_counted(
    pki: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    uris: list[str],
    method: str,
    words: str,
) -> None:
    monkeypatch.setattr(grpc_auth, "_LOG_PAUSE_S", 3600.0)

    async def run() -> None:
        talk = Talk()
        cert, key = certificate(pki, uris)
        shown = grpc.ssl_channel_credentials((pki / "ca.crt").read_bytes(), key, cert)
        async with (
            serving(tls_of(pki, "n1"), talk) as server,
            grpc.aio.secure_channel(f"localhost:{server.port}", shown) as channel,
        ):
            for _ in range(3):
                with pytest.raises(rt.CertificateError, match=words):
                    await ask(channel, method=method)
            assert talk.entered == 0
            assert server.refused == {"CertificateError": 3}
            assert not server.caps.counts

    asyncio.run(run())
    (line,) = lines(caplog, "call_refused")  # Only one line is logged within the pause.
    assert f"method=/test.Talk/{method}" in line


def test_unknown_method_is_refused_as_unimplemented(pki: Path) -> None:
    async def run() -> None:
        async with talking(pki) as (_, channel):
            with pytest.raises(RtError, match="UNIMPLEMENTED"):
                await ask(channel, method="Nothing")

    asyncio.run(run())


def test_server_with_certificate_of_another_node_is_rejected(pki: Path) -> None:
    async def run() -> None:
        talk = Talk()
        async with (
            serving(tls_of(pki, "n2"), talk) as server,
            open_channel(f"localhost:{server.port}", tls_of(pki, "f1")) as channel,
        ):
            with pytest.raises((Unreachable, rt.CertificateError)):
                await ask(channel)
        assert talk.entered == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("version", "ciphers", "good"),
    [
        (ssl.TLSVersion.TLSv1_3, None, True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-GCM-SHA256", True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES256-SHA384:ECDHE-ECDSA-AES128-SHA:AES128-SHA", False),
        (ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", False),
    ],
)
def test_server_accepts_only_strong_tls_versions_and_ciphers(
    pki: Path, version: ssl.TLSVersion, ciphers: str | None, good: bool
) -> None:
    async def run() -> None:
        async with serving(tls_of(pki, "n1")) as server:
            context = tls_of(pki, "f1").ssl_client_context()
            context.set_alpn_protocols(["h2"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = version
                context.maximum_version = version
            if ciphers:
                context.set_ciphers(ciphers)
            open_it = asyncio.open_connection("localhost", server.port, ssl=context)
            with contextlib.nullcontext() if good else pytest.raises((ssl.SSLError, OSError)):
                _, writer = await asyncio.wait_for(open_it, WAIT_S)
                writer.transport.abort()

    asyncio.run(run())


def test_environment_cannot_weaken_cipher_suites() -> None:
    code = "import os, rt.net.grpc_channel, rt.v1; print(os.environ['GRPC_SSL_CIPHER_SUITES'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"GRPC_SSL_CIPHER_SUITES": "AES128-SHA"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(
        name.startswith("ECDHE-") and ("GCM" in name or "POLY1305" in name)
        for name in done.stdout.strip().split(":")
    )


def test_grpc_accepts_default_poller_experiments_and_environment_overrides_them() -> None:
    opened = "import os, rt.v1, grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    code = f"{opened}; print(os.environ['GRPC_EXPERIMENTS'])"
    unset = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    for environment in (unset, {**unset, "GRPC_EXPERIMENTS": ""}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stderr == "", "gRPC reports experiments that it does not know"
        assert ("event_engine" in done.stdout) == (environment is unset)


# --- bounds -----------------------------------------------------------------------------------------------


def test_identity_at_its_stream_cap_is_refused_while_others_are_served(pki: Path) -> None:
    async def run() -> None:
        async with (
            talking(pki, caps=StreamCaps(2)) as (server, channel),
            open_channel(channel.target, tls_of(pki, "f1")) as second,
            open_channel(channel.target, tls_of(pki, "f2")) as other,
        ):
            calls = [echo(channel), echo(second)]
            for call in calls:
                await echoed(call, b"x")
            with pytest.raises(rt.Overloaded, match="too many calls at once"):
                await ask(second)
            assert server.refused == {"Overloaded": 1}
            assert await ask(other) == b"rt://s/publisher/f2?"
            assert await echoed(calls[0], b"on") == b"on"
            calls[0].cancel()
            await until(lambda: server.caps.counts[FEED.uri] == 1)
            assert await ask(second)

    asyncio.run(run())


def test_call_ended_to_free_memory_gets_overloaded_and_others_continue(pki: Path) -> None:
    async def run() -> None:
        async with talking(pki) as (server, channel):
            calls = [echo(channel) for _ in range(2)]
            for call in calls:
                await echoed(call, b"x")
            await until(lambda: server.calls.reading.total == 0)
            server.calls.end_some(1, kept=1)
            server.calls.end_some(5, kept=1)
            await until(lambda: len(server.calls) == 1)
            reads = {asyncio.create_task(call.read()): call for call in calls}
            ended, (running,) = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(rt.Overloaded, match="short of memory"), asking("n1"):
                await ended.pop()
            await reads[running].write(b"y")
            assert await running == b"y"
            assert server.refused == {"Overloaded": 1}
            assert await ask(channel)

    asyncio.run(run())


def test_stream_caps_count_each_identity_and_remove_it_at_zero() -> None:
    caps = StreamCaps(1)
    with caps.counted(FEED):
        with pytest.raises(rt.Overloaded), caps.counted(FEED):
            pass
        with caps.counted(NODE):
            assert caps.counts == {FEED.uri: 1, NODE.uri: 1}
    assert not caps.counts


@pytest.mark.parametrize(("more", "good"), [(-1, True), (0, True), (1, False), (2**20, False)])
def test_message_above_size_limit_raises_message_too_large(pki: Path, more: int, good: bool) -> None:
    async def run() -> None:
        async with talking(pki) as (_, channel):
            call, message = echo(channel), bytes(MESSAGE_BYTES_MAX + more)
            if good:
                assert await echoed(call, message) == message
            else:
                with pytest.raises(rt.MessageTooLarge, match="larger than max"):
                    await echoed(call, message)
            assert await ask(channel)

    asyncio.run(run())


def test_streams_above_connection_limit_wait_without_blocking_another_connection(pki: Path) -> None:
    async def run() -> None:
        talk = Talk()
        async with (
            talking(pki, talk=talk) as (_, channel),
            open_channel(channel.target, tls_of(pki, "f1")) as other,
        ):
            calls = [echo(channel) for _ in range(STREAMS_PER_CONNECTION_MAX + 1)]
            await until(lambda: talk.inside == STREAMS_PER_CONNECTION_MAX)
            assert await ask(other)
            assert talk.inside == STREAMS_PER_CONNECTION_MAX
            for call in calls:
                call.cancel()

    asyncio.run(run())


def test_port_in_use_raises_error_for_second_server_too(pki: Path) -> None:
    async def run() -> None:
        async with serving(tls_of(pki, "n1")) as server:
            for _ in range(2):
                with pytest.raises(RtError, match="cannot listen") as caught:
                    await serve(f"127.0.0.1:{server.port}", [], roles={}, tls=tls_of(pki, "n1"))
                assert caught.value.where == f"127.0.0.1:{server.port}"
                assert "another process" in str(caught.value)

    asyncio.run(run())


HOLDER = """
import asyncio, sys
from rt.net.grpc_channel import serve
from rt.net.grpc_options import server_options
from rt.net.tls import TLS

async def main():
    options = server_options(handshake_timeout_ms=1000)
    server = await serve("127.0.0.1:0", [], roles={}, tls=TLS(*sys.argv[1:]), options=options)
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
def test_silent_connections_beyond_descriptor_limit_do_not_block_new_clients(pki: Path) -> None:
    files = [pki / name for name in ("ca.crt", "n1.crt", "n1.key")]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *files], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, 256))
        for _ in range(300):
            silent = stack.enter_context(socket.socket())
            silent.settimeout(WAIT_S)
            silent.connect(("127.0.0.1", port))

        async def run() -> None:
            async with open_channel(f"localhost:{port}", tls_of(pki, "f1")) as channel:
                deadline = time.monotonic() + WAIT_S
                while time.monotonic() < deadline:
                    with pytest.raises(RtError) as caught:
                        await ask(channel)
                    if "UNIMPLEMENTED" in str(caught.value):  # the server answered
                        return
                raise AssertionError("kept out")

        asyncio.run(run())


# --- plaintext --------------------------------------------------------------------------------------------


def test_server_without_tls_answers_on_loopback_as_configured_identity() -> None:
    async def run() -> None:
        async with (
            serving(None, insecure_as=lambda: FEED) as server,
            open_channel(f"127.0.0.1:{server.port}", None, insecure=True) as channel,
        ):
            assert await ask(channel) == b"rt://s/publisher/f1?"

    asyncio.run(run())


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "[::]:1", "example.org:1", "10.0.0.1:1", ":1", "", "unix:/x", "localhost.x:1"]
)
def test_plaintext_is_refused_beyond_loopback(address: str) -> None:
    with pytest.raises(ValueError, match="loopback only"):
        open_channel(address, None, insecure=True)
    with pytest.raises(ValueError, match="loopback only"):
        asyncio.run(serve(address, [], roles={}, insecure_as=lambda: FEED))


def test_tls_and_plaintext_options_are_mutually_exclusive(pki: Path) -> None:
    tls = tls_of(pki, "n1")
    with pytest.raises(ValueError, match="either"):
        open_channel("localhost:1", tls, insecure=True)
    with pytest.raises(ValueError, match="either"):
        open_channel("localhost:1", None)
    with pytest.raises(ValueError, match="either"):
        asyncio.run(serve("localhost:0", [], roles={}))
    with pytest.raises(ValueError, match="either"):
        asyncio.run(serve("localhost:0", [], roles={}, tls=tls, insecure_as=lambda: FEED))


# --- rotation ---------------------------------------------------------------------------------------------


async def serial_shown(port: int, tls: TLS) -> int:
    """Return the serial number of the certificate that the server shows to a new connection."""
    context = tls.ssl_client_context()
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(shown).serial_number


def serial_in(pair: IssuedCertificate) -> int:
    return certificates_in(pair.cert.read_bytes(), where="")[0].serial_number


def test_rotated_certificates_are_loaded_while_streams_continue(tmp_path: Path) -> None:
    init_ca(tmp_path)
    node = issue(tmp_path, NODE, loopback=True)
    feed = issue(tmp_path, FEED)

    async def run() -> None:
        async with (
            serving(TLS(*node)) as server,
            open_channel(f"localhost:{server.port}", TLS(*feed)) as channel,
        ):
            call, before = echo(channel), channel.get()
            assert await echoed(call, b"1") == b"1"
            assert await serial_shown(server.port, TLS(*feed)) == serial_in(node)
            assert channel.get() is before

            issue(tmp_path, NODE, loopback=True, renew=True)
            issue(tmp_path, FEED, renew=True)
            assert await serial_shown(server.port, TLS(*feed)) == serial_in(node)
            assert channel.get() is not before
            assert channel.get() is channel.get()
            assert await ask(channel) == b"rt://s/publisher/f1?"
            assert await echoed(call, b"2") == b"2"
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF

    asyncio.run(run())


@pytest.mark.parametrize("is_set_back", [False, True])
def test_calls_end_at_certificate_expiry_and_resume_after_renewal_or_clock_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set_back: bool
) -> None:
    init_ca(tmp_path)
    node = issue(tmp_path, NODE, loopback=True)
    feed = issue(tmp_path, FEED, days=1)
    clock_s = time.time()
    monkeypatch.setattr(cert_validity, "LOOK_S", 0.01)
    monkeypatch.setattr(cert_validity, "clock_s", lambda: clock_s)

    async def run() -> None:
        nonlocal clock_s
        talk = Talk()
        async with (
            serving(TLS(*node), talk) as server,
            open_channel(f"localhost:{server.port}", TLS(*feed)) as channel,
        ):
            call, other = echo(channel), echo(channel)
            assert [await echoed(one, b"1") for one in (call, other)] == [b"1", b"1"]
            clock_s += 23 * 3600
            assert await echoed(call, b"2") == b"2"

            clock_s += 2 * 3600
            for ended in (call, other):
                with (
                    pytest.raises(Unreachable, match=r"has expired.*Put a new certificate and key"),
                    asking("the server"),
                ):
                    await asyncio.wait_for(ended.read(), WAIT_S)
            await until(lambda: talk.inside == 0)
            with pytest.raises(Unreachable, match="has expired"):
                await ask(channel)
            assert talk.entered == 2
            if is_set_back:
                clock_s -= 2 * 3600
            else:
                issue(tmp_path, FEED, renew=True)
            assert await ask(channel) == b"rt://s/publisher/f1?"

    asyncio.run(run())


def test_invalid_certificate_files_keep_previous_certificate_and_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rt.net")
    init_ca(tmp_path)
    node = issue(tmp_path, NODE, loopback=True)
    feed = issue(tmp_path, FEED)
    client = TLS(*feed)
    good, serial = node.cert.read_bytes(), serial_in(node)

    async def run() -> None:
        async with (
            serving(TLS(*node)) as server,
            open_channel(f"localhost:{server.port}", client) as channel,
        ):
            node.cert.write_bytes(b"broken")
            for _ in range(3):
                assert await serial_shown(server.port, client) == serial
            assert len(lines(caplog, "certificate_reload_failed")) == 1
            before = channel.get()
            feed.key.unlink()
            for _ in range(3):
                assert channel.get() is before
            assert await ask(channel)
            assert len(lines(caplog, "certificate_reload_failed")) == 2

            node.cert.write_bytes(good)
            issue(tmp_path, NODE, loopback=True, renew=True)
            shown = serial
            deadline = time.monotonic() + WAIT_S
            while shown == serial:
                assert time.monotonic() < deadline
                feed_again = issue(tmp_path, FEED, renew=True)
                shown = await serial_shown(server.port, TLS(*feed_again))
            assert shown == serial_in(node)

    asyncio.run(run())
    assert any(NODE.uri in line for line in lines(caplog, "certificate_reloaded"))
    assert not any("PRIVATE" in record.getMessage() for record in caplog.records)


def test_closed_channel_raises_closed(pki: Path) -> None:
    async def run() -> None:
        channel = open_channel("localhost:1", tls_of(pki, "f1"))
        channel.get()
        await channel.close()
        await channel.close()
        with pytest.raises(rt.Closed):
            channel.get()

    asyncio.run(run())


# --- silence ----------------------------------------------------------------------------------------------


class Proxy:
    """Forwards TCP to `port` and back until `is_silent` is set. Then it accepts bytes and forwards none.

    `bytes_per_s` limits the speed towards the server. The kernels of both sides buffer bytes in between.
    """

    def __init__(self, port: int, bytes_per_s: float = 0) -> None:
        self.port = port
        self.bytes_per_s = bytes_per_s
        self.is_silent = False
        self.passed_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink, is_slow=source is reader))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_slow: bool) -> None:
        with contextlib.suppress(OSError), contextlib.closing(sink):
            while piece := await source.read(2**13):
                if is_slow and self.bytes_per_s:
                    await asyncio.sleep(len(piece) / self.bytes_per_s)
                if not self.is_silent:
                    sink.write(piece)
                    self.passed_bytes += len(piece)
            if self.is_silent:
                await asyncio.Event().wait()  # it does not even forward the end of the connection

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def through_a_proxy(
    pki: Path, talk: Talk, bytes_per_s: float = 0
) -> AsyncIterator[tuple[Proxy, Channel]]:
    async with serving(tls_of(pki, "n1"), talk) as server:
        proxy = Proxy(server.port, bytes_per_s)
        listening = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        try:
            async with open_channel(f"localhost:{port}", tls_of(pki, "f1")) as channel:
                yield proxy, channel
        finally:
            listening.close()
            await proxy.close()


async def is_echoed(channel: Channel, message: bytes) -> bool:
    """Return whether a call succeeds. A call may fail at the end of the silent connection."""
    call = channel.get().stream_stream("/test.Talk/Echo")(wait_for_ready=True)
    try:
        return await echoed(call, message) == message
    except Unreachable:
        return False


@pytest.mark.slow
def test_both_ends_detect_silent_peer_and_reconnect(pki: Path) -> None:
    async def run() -> None:
        talk = Talk()
        async with through_a_proxy(pki, talk) as (proxy, channel):
            call = echo(channel)
            assert await echoed(call, b"x") == b"x"
            proxy.is_silent = True
            with pytest.raises(Unreachable), asking("n1"):
                await asyncio.wait_for(call.read(), WAIT_S)  # gRPC's defaults are minutes, far more than this
            await until(lambda: talk.inside == 0)
            proxy.is_silent = False
            async with asyncio.timeout(WAIT_S):
                while not await is_echoed(channel, b"y"):
                    pass

    asyncio.run(run())


@pytest.mark.slow
def test_idle_stream_survives_keepalive_pings(pki: Path) -> None:
    async def run() -> None:
        talk = Talk()
        async with through_a_proxy(pki, talk) as (proxy, channel):
            call = echo(channel)
            assert await echoed(call, b"x") == b"x"
            for _ in range(8):  # a server with default options ends it at the third ping
                passed_bytes = proxy.passed_bytes
                await until(lambda seen=passed_bytes: proxy.passed_bytes > seen)
            assert await echoed(call, b"y") == b"y"
            assert talk.entered == 1

    asyncio.run(run())


@pytest.mark.slow
def test_slow_saturated_link_is_not_treated_as_silent_peer(pki: Path) -> None:
    async def run() -> None:
        async with through_a_proxy(pki, Talk(), bytes_per_s=1e6) as (_, channel):
            call = echo(channel)

            async def send() -> None:
                for _ in range(6):  # more than a window: at first all data waits in transit
                    await call.write(bytes(2**20))

            sending = asyncio.create_task(send())
            with asking("n1"):
                for _ in range(6):
                    assert len(await asyncio.wait_for(call.read(), WAIT_S)) == 2**20
            await sending

    asyncio.run(run())


def test_write_to_ended_call_raises_unreachable(pki: Path) -> None:
    async def run() -> None:
        async with talking(pki, "s1") as (_, channel):
            call = echo(channel)
            with pytest.raises(rt.CertificateError), asking("n1"):
                await call.read()
            with pytest.raises(Unreachable, match="the call had ended"), asking("n1"):
                await call.write(b"x")
            with pytest.raises(asyncio.InvalidStateError), asking("n1"):
                asyncio.get_running_loop().create_future().result()

    asyncio.run(run())


# --- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [server_options(), channel_options()])
def test_grpc_options_are_unique_and_not_unlimited(options: tuple[tuple[str, int], ...]) -> None:
    names = [name for name, _ in options]
    assert len(names) == len(set(names))
    assert all(value >= 0 for _, value in options)


@pytest.mark.parametrize("options", [server_options(), channel_options()])
def test_grpc_options_are_known_to_installed_grpc(options: tuple[tuple[str, int], ...]) -> None:
    from grpc._cython import cygrpc

    native = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in options if name.encode() not in native] == []


def test_channel_options_do_not_override_peer_name() -> None:
    assert not any("target_name" in name or "authority" in name for name, _ in channel_options())
