"""Hostile peers at the ports of real nodes are refused while other clients are served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from chaos.wired_nodes import WiredNodes
from faults import Faults

import rt
from replicator.protocol.codec import PULL_METHOD, PUSH_METHOD
from rt.net.dev_pki import init_ca, issue
from rt.net.grpc_channel import open_channel
from rt.net.identity import Identity
from rt.net.lease_client import LEASE_SERVICE, LeaseCalls, LeaseRow
from rt.v1 import leases_pb2
from rt.v1 import replication_pb2 as pb

pytestmark = pytest.mark.slow

WAIT_S = 120
GROWTH_BYTES_MAX = 256 * 2**20
"""How much more memory one process may use, whatever hostile peers send."""
IDLE = 300
GRPC = r"^([EIW]\d{4} |WARNING: All log messages before absl)"
"""Lines about a peer that gRPC's native layer writes to stderr."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


def context(tls: rt.TLS | None) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.set_alpn_protocols(["h2"])
    if tls is not None:
        made.load_cert_chain(tls.cert, tls.key)
    return made


def answer_to(port: int, tls: rt.TLS | None, said: bytes, *, until: bytes = b"") -> bytes:
    """Return the answer of a port within TLS, until it ends the connection or has sent `until`."""
    heard = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain,
        contextlib.suppress(ssl.SSLError, ConnectionError),
        context(tls).wrap_socket(plain) as secured,
    ):
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            secured.sendall(said)
        while piece := secured.recv(65536):
            heard += piece
            if until and until in heard:
                break
    return heard


LOST_STATUS = "Internal error from Core"


def status_of(target: str, tls: rt.TLS, method: str, *said: bytes) -> grpc.StatusCode:
    """Return the status at the end of a stream that sends these messages.

    If the server ends a call while the client writes, gRPC's client may lose the status. The call is then
    repeated.
    """

    async def call() -> grpc.StatusCode:
        while True:
            async with open_channel(target, tls) as channel:
                stream = channel.get().stream_stream(method)()
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    for message in said:
                        await stream.write(message)
                    while await stream.read() is not grpc.aio.EOF:
                        pass
                code = await stream.code()
                if code is not grpc.StatusCode.INTERNAL or await stream.details() != LOST_STATUS:
                    return code

    return asyncio.run(asyncio.wait_for(call(), WAIT_S))


def hello(session: str, *, stream: str = "s", dedup_id: str = "") -> bytes:
    """Return the first message of a push client, with any contents."""
    said = pb.PushHello(
        version=1, stream=stream, session=session, incarnation=os.urandom(16), dedup_id=dedup_id
    )
    return pb.PushRequest(hello=said).SerializeToString()


def pull_session(session_id: int) -> bytes:
    wanted = pb.PullSession(session_id=session_id, place=pb.Place())
    return pb.PullRequest(hello=pb.PullHello(version=1, stream="s", session=wanted)).SerializeToString()


def directories(nodes: WiredNodes) -> set[Path]:
    return {path for path in nodes.root.rglob("*") if path.is_dir()}


def resident_bytes(nodes: WiredNodes) -> dict[int, int]:
    """Return the resident memory of each process of the nodes."""
    found = {}
    for name in nodes.running:
        for pid in nodes.pids(name):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[pid] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


@contextlib.contextmanager
def bounded(faults: Faults, session: str) -> Iterator[None]:
    """Check that a publisher is served during and after an attack, and that no process has grown much."""
    with faults.sender(session) as sender:
        faults.wait_flow(sender)
        before = resident_bytes(faults.nodes)
        yield
        faults.wait_flow(sender)
        after = resident_bytes(faults.nodes)
        assert set(after) == set(before), "a process ended"
        assert {
            pid: after[pid] - before[pid] for pid in after if after[pid] - before[pid] > GROWTH_BYTES_MAX
        } == {}
        sender.close()
        faults.verdict(allowed=[GRPC])


@pytest.fixture
def foreign(tmp_path: Path) -> rt.TLS:
    """Return a publisher's certificate from another CA."""
    init_ca(tmp_path / "ca")
    return rt.TLS(*issue(tmp_path / "ca", Identity("s", "publisher", "foreign")))


def test_peer_without_certificate_of_cluster_ca_gets_no_answer(faults: Faults, foreign: rt.TLS) -> None:
    nodes = faults.nodes
    with bounded(faults, "h-certificate"):
        for port in (*nodes.data_ports.values(), *nodes.raft_ports.values()):
            assert answer_to(port, None, PREFACE) == b""
            assert answer_to(port, foreign, PREFACE) == b""
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + random.randbytes(1000))
                with contextlib.suppress(ConnectionError):
                    assert b"HTTP" not in plain.recv(65536)


def test_requests_of_wrong_role_or_name_are_refused(faults: Faults) -> None:
    nodes = faults.nodes
    target = f"127.0.0.1:{nodes.data_ports['n1']}"
    publisher, subscriber, operator = (
        nodes.certificate(role, f"h-{role}") for role in ("publisher", "subscriber", "operator")
    )
    with bounded(faults, "h-roles"):
        before = directories(nodes)
        denied = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
        for tls, method, said in (
            (subscriber, PUSH_METHOD, hello("h-subscriber")),
            (operator, PUSH_METHOD, hello("h-operator")),
            (nodes.certificate("node", "n2"), PUSH_METHOD, hello("n2")),
            (publisher, PULL_METHOD, pull_session(1)),
            (subscriber, PULL_METHOD, pull_session(1)),
            (publisher, PUSH_METHOD, hello("h-roles")),
            (publisher, PUSH_METHOD, hello("h-publisher", dedup_id="other")),
        ):
            assert status_of(target, tls, method, said) in denied, (method, said)
        assert status_of(target, publisher, PUSH_METHOD, hello("h-publisher", stream="t")) not in {
            grpc.StatusCode.OK,
            grpc.StatusCode.INTERNAL,
        }
        for name in (
            "",
            ".",
            "..",
            "../h",
            "h-publisher/../..",
            "h-publisher~../x",
            "h\0",
            "h" * 100_000,
            "/etc",
        ):
            code = status_of(target, publisher, PUSH_METHOD, hello(name))
            assert code in {grpc.StatusCode.INVALID_ARGUMENT, *denied}, (name, code)
        assert directories(nodes) == before


def test_malformed_and_oversized_requests_are_refused_while_publisher_is_served(faults: Faults) -> None:
    nodes, draw = faults.nodes, random.Random(7)
    publisher = nodes.certificate("publisher", "h-garbage")
    port = nodes.data_ports["n1"]
    target = f"127.0.0.1:{port}"
    bad = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DATA_LOSS,
    }
    with bounded(faults, "h-flow"):
        # HTTP/2: frames with a large declared length, invalid frames, and a message of 4 GiB.
        for said in (
            draw.randbytes(100_000),
            PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 100_000,
            PREFACE + draw.randbytes(100_000),
        ):
            answer_to(port, publisher, said)
        answer_to(
            port,
            publisher,
            PREFACE + headers(1, PUSH_METHOD) + frame(0, 0, 1, b"\0\xff\xff\xff\xff" + b"x" * 1000),
            until=b"\x03",
        )
        # Calls: invalid messages, messages of other kinds, and more bytes than a chunk can hold.
        for said in (b"", draw.randbytes(1000), b"\x0a\xff\xff\xff\xff\x0f", pull_session(1)):
            assert status_of(target, publisher, PUSH_METHOD, said) in bad, said[:20]
        assert status_of(target, publisher, PUSH_METHOD, b"x" * (4 * 2**20)) in bad
        first = hello("h-garbage")
        for second in (
            first,
            draw.randbytes(5000),
            chunk(0, 0, 0, draw.randbytes(5000)),
            chunk(2**32 - 1, 2**32 - 1, 2**63, b"x"),
            pb.PushRequest(run=pb.Run(run=2**32 - 1, run_id=b"short")).SerializeToString(),
        ):
            code = status_of(target, publisher, PUSH_METHOD, first, second)
            assert code not in {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN}, second[:20]
        # Raft: a client that is no member, and an attacker with a member's certificate.
        for raft_port in nodes.raft_ports.values():
            answer_to(raft_port, publisher, draw.randbytes(1000))
        member = nodes.certificate("node", "n2")
        for said in (draw.randbytes(100_000), b"\xff" * 64, struct.pack("<QQQQ", *[2**63] * 4)):
            answer_to(nodes.raft_ports["n1"], member, said)


@contextlib.asynccontextmanager
async def closing(calls: LeaseCalls) -> AsyncIterator[LeaseCalls]:
    try:
        yield calls
    finally:
        await calls.close()


def asked(*names: str, token: int = 0, **fields: Any) -> bytes:
    """Return a request for leases, with any contents."""
    said = {"request": os.urandom(16), "owner": "h-holder~a", "duration_ms": 60_000} | fields
    rows = [leases_pb2.LeaseRow(name=name, token=token) for name in names or ("h-app/q",)]
    return leases_pb2.LeaseRequest(leases=rows, **said).SerializeToString()


def test_leases_of_another_owner_cannot_be_acquired_listed_or_released(faults: Faults) -> None:
    nodes = faults.nodes
    target = f"127.0.0.1:{nodes.data_ports['n1']}"
    holder = nodes.certificate("subscriber", "h-holder", lease_groups=["h-app"])
    other = nodes.certificate("publisher", "h-other", lease_groups=["h-other"])
    twin = nodes.certificate("subscriber", "h-twin", lease_groups=["h-app"])
    none, operator = nodes.certificate("subscriber", "h-none"), nodes.certificate("operator", "h-operator")
    denied = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
    bad = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, *denied}

    async def acquired() -> list[int]:
        async with closing(LeaseCalls([target], holder)) as calls:
            return await calls.acquire("h-holder~a", ["h-app/q"], 3600, timeout_s=WAIT_S)

    async def released(token: int) -> list[bool]:
        """Check that only this lease is held, as it was acquired, and release it."""
        async with closing(LeaseCalls([target], holder)) as calls:
            rows = await calls.held("h-app/", timeout_s=WAIT_S)
            assert rows == [LeaseRow("h-app/q", "h-holder~a", token)]
            return await calls.release("h-holder~a", rows, timeout_s=WAIT_S)

    with bounded(faults, "h-leases"):
        (token,) = asyncio.run(acquired())
        listing = leases_pb2.LeaseListRequest(prefix="h-app/").SerializeToString()
        taken = asked(token=token)
        for tls, method, said in (
            (other, "Acquire", asked("h-app/x", owner="h-other")),
            (other, "List", listing),
            (none, "Acquire", asked("h-app/x", owner="h-none")),
            (none, "List", listing),
            (operator, "List", listing),
            (nodes.certificate("node", "n2"), "Release", taken),
            (twin, "Acquire", asked("h-app/x", owner="h-holder")),
            (twin, "Renew", taken),
            (twin, "Release", taken),
        ):
            assert status_of(target, tls, f"/{LEASE_SERVICE}/{method}", said) in denied, (method, said)
        garbage = [
            b"\xff" * 1000,
            b"x" * (8 * 2**20),
            asked(token=2**64 - 1),
            asked(request=b"short", token=1),
        ]
        for method, said in (
            *((method, said) for method in ("Renew", "Release") for said in (*garbage, asked(token=0))),
            ("Acquire", garbage[0]),
            ("Acquire", asked(*(f"h-app/{number}" for number in range(100_000)))),
            ("Acquire", asked("h-app/" + "q" * 100_000)),
            ("Acquire", asked("h-app/../q", "h-app/q\0", "h-app/\u202eq")),
            ("Acquire", asked("h-app")),
            ("Acquire", asked("h-app/x", owner="h" * 100_000)),
            ("Acquire", asked("h-app/x", owner="h-holder~../a")),
            ("Acquire", asked("h-app/x", duration_ms=2**32 - 1)),
        ):
            code = status_of(target, holder, f"/{LEASE_SERVICE}/{method}", said)
            assert code in bad, (method, code, said[:60])
        assert asyncio.run(released(token)) == [True], "nobody got or took away anything"


def test_idle_connections_do_not_block_new_clients(faults: Faults) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "h-idle")
    with bounded(faults, "h-busy"), contextlib.ExitStack() as opened:
        for port in (nodes.data_ports["n1"], nodes.raft_ports["n1"]):
            for _ in range(IDLE):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
        secure = context(tls)
        for _ in range(IDLE // 10):
            plain = opened.enter_context(
                socket.create_connection(("127.0.0.1", nodes.data_ports["n1"]), timeout=WAIT_S)
            )
            opened.enter_context(secure.wrap_socket(plain))
        with faults.sender("h-newcomer") as newcomer:
            faults.wait_flow(newcomer)
            newcomer.close()
        asyncio.run(open_streams(nodes, tls, faults))


async def open_streams(nodes: WiredNodes, tls: rt.TLS, faults: Faults) -> None:
    """Open more silent streams than one identity may have, until one is refused."""
    target = f"127.0.0.1:{nodes.data_ports['n1']}"
    async with contextlib.AsyncExitStack() as opened:
        codes: Sequence[asyncio.Future[grpc.StatusCode]] = []
        for _ in range(3):
            channel = await opened.enter_async_context(open_channel(target, tls))
            calls = [channel.get().stream_stream(PUSH_METHOD)() for _ in range(100)]
            codes = [*codes, *(asyncio.ensure_future(call.code()) for call in calls)]
        for ended in asyncio.as_completed(codes, timeout=WAIT_S):
            code = await ended
            # If no handler has started to serve a call, gRPC itself refuses it as cancelled.
            assert code in {
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.CANCELLED,
            }
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return
    raise AssertionError("none was refused as one too many")


def chunk(run: int, roll: int, offset: int, data: bytes) -> bytes:
    place = pb.Place(run=run, roll=roll, offset=offset)
    return pb.PushRequest(chunk=pb.Chunk(place=place, data=data)).SerializeToString()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2, RFC 9113 section 4.1."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def headers(stream: int, path: str) -> bytes:
    """A gRPC request's headers, literal and not indexed: RFC 7541 section 6.2.2."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "n1",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(1, 4, stream, block)
