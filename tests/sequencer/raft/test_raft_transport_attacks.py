"""The Raft transport with rotated certificates, unauthorized peers and misbehaving members."""

from __future__ import annotations

import contextlib
import errno
import pickle
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from raft_transport_bench import HELLO, HOST, MESSAGES, Clock, Net, Pki, attacker, connected, frame

from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_port
from sequencer.raft.model.messages import Forward
from sequencer.raft.transport import listener as listener_module
from sequencer.raft.transport import mesh as mesh_module
from sequencer.raft.transport.mesh import SETUPS_MAX, TlsMesh

# --- certificates -----------------------------------------------------------------------------------------


def served_certificate(net: Net, mesh: TlsMesh, context: ssl.SSLContext) -> str:
    seen: list[bytes] = []

    def look() -> None:
        with connected(mesh.port, context) as tls:
            seen.append(tls.getpeercert(binary_form=True))

    thread = threading.Thread(target=look)
    thread.start()
    net.drive(lambda: seen)
    thread.join()
    return ssl.DER_cert_to_PEM_cert(seen[0])


def test_rotated_certificate_is_used_without_restart_and_invalid_one_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path / "pki")
    net = Net({name: pki.tls(name) for name in ("n1", "n2")})
    first, second, inbox, _ = net.pair(reload_s=0.01)
    context = net.tls["n2"].ssl_client_context()
    before = served_certificate(net, first, context)
    pki.tls("n1")
    renewed = Path(net.tls["n1"].cert).read_text()
    net.drive(lambda: served_certificate(net, first, context) == renewed)
    assert renewed != before
    assert inbox.count("down") == 0
    Path(net.tls["n1"].key).write_text("broken")
    net.drive(lambda: "certificates_not_reloaded" in caplog.text)
    loading = first._contexts._loading
    net.drive(lambda: first._contexts._loading is not loading)
    assert served_certificate(net, first, context) == renewed
    assert caplog.text.count("certificates_not_reloaded") == 1
    second.introduce(HELLO)
    net.drive(lambda: inbox.count("up") == 2 and second.connected)
    for mesh in (first, second):
        mesh.close()


def tls_1_2(tls: TLS) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.cert, tls.key)
    context.load_verify_locations(tls.ca)
    return context


def without_certificate(tls: TLS) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.ca)
    return context


def of_other_ca(directory: Path) -> ssl.SSLContext:
    context = Pki(directory).tls("n2").ssl_client_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


STRANGERS: dict[str, tuple[str, Callable[[Pki, Path], ssl.SSLContext | None]]] = {
    "no certificate": ("tls", lambda pki, _: without_certificate(pki.tls("n2"))),
    "the same name by another CA": ("tls", lambda _, other: of_other_ca(other)),
    "another stream": ("stream", lambda pki, _: pki.tls("n2", stream="t").ssl_client_context()),
    "a publisher": ("role", lambda pki, _: pki.tls("n2", role="publisher").ssl_client_context()),
    "no member": ("member", lambda pki, _: pki.tls("n9").ssl_client_context()),
    "our own name": ("member", lambda pki, _: pki.tls("n1").ssl_client_context()),
    "a smaller name": ("direction", lambda pki, _: pki.tls("n0").ssl_client_context()),
    "TLS 1.2": ("tls", lambda pki, _: tls_1_2(pki.tls("n2"))),
    "plain text": ("tls", lambda _, __: None),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_unauthorized_peer_is_refused_and_counted_by_reason(stranger: str, tmp_path: Path) -> None:
    reason, context = STRANGERS[stranger]
    pki = Pki(tmp_path / "pki")
    net = Net({name: pki.tls(name) for name in ("n0", "n1", "n2")})
    net.members["n0"] = f"{HOST}:{free_port()}"
    mesh = net.mesh("n1")
    payload = frame(HELLO) + b"".join(map(frame, MESSAGES))
    with attacker(mesh.port, context(pki, tmp_path / "other"), payload):
        net.drive(lambda: mesh.refused[reason])
    assert net.inboxes[mesh].events == []
    assert mesh.refused[reason] == mesh.refused.total() == 1
    mesh.close()


@pytest.mark.parametrize("payload", [b"GET / HTTP/1.1\r\n\r\n", pickle.dumps({"type": "x"}), bytes(64)])
def test_connection_without_tls_is_refused_and_counted(net: Net, payload: bytes) -> None:
    mesh = net.mesh("n1")
    with attacker(mesh.port, None, payload):
        net.drive(lambda: mesh.refused["tls"])


@pytest.mark.parametrize(("dns", "reason"), [((), "tls"), (("n1",), "name")], ids=["host", "identity"])
def test_dialing_member_refuses_another_member_at_dialed_address(
    pki: Pki, net: Net, dns: tuple[str, ...], reason: str
) -> None:
    other = pki.tls("n3", dns=dns)
    net.tls |= {"n3": other}
    net.members |= {"n3": net.members["n1"]}
    impostor = net.mesh("n3", members={"n3": net.members["n3"]})
    mesh = net.mesh("n2")
    net.drive(lambda: mesh.refused[reason])
    assert net.inboxes[mesh].events == net.inboxes[impostor].events == []
    assert mesh.refused.keys() == {reason}


# --- members that misbehave -------------------------------------------------------------------------------

HEADER = struct.Struct("<IBBHQ")
FRAMES = {
    "a frame before the hello": ("hello", frame(Forward(b""))),
    "a ping before the hello": ("hello", HEADER.pack(0, 1, 1, 0, 7)),
    "a pickle before the hello": ("frame", pickle.dumps({"type": "append_entries", "term": 10**6})),
    "a hello of two epochs": ("epoch", frame(HELLO, epoch=8)),
    "a second hello": ("hello", frame(HELLO) * 2),
    "a frame of another epoch": ("epoch", frame(HELLO) + frame(Forward(b""), epoch=8)),
    "a ping of another epoch": ("epoch", frame(HELLO) + HEADER.pack(0, 1, 1, 0, 8)),
    "a huge length": ("frame", frame(HELLO) + HEADER.pack(2**32 - 1, 5, 1, 0, 7)),
    "a huge length before the hello": ("frame", HEADER.pack(2**32 - 1, 2, 1, 0, 7)),
    "an unknown kind": ("frame", frame(HELLO) + HEADER.pack(0, 77, 1, 0, 7)),
    "an unknown version": ("frame", frame(HELLO) + HEADER.pack(0, 1, 2, 0, 7)),
    "a malformed body": ("frame", frame(HELLO) + HEADER.pack(52, 5, 1, 0, 7) + b"\xff" * 52),
}


@pytest.mark.parametrize("what", FRAMES)
def test_member_is_disconnected_and_counted_after_invalid_frame(net: Net, what: str) -> None:
    reason, payload = FRAMES[what]
    mesh = net.mesh("n1")
    with attacker(mesh.port, net.tls["n2"].ssl_client_context(), payload):
        net.drive(lambda: mesh.refused[reason])
    mesh.poll(0)
    inbox = net.inboxes[mesh]
    assert inbox.count("message") == 0
    assert inbox.count("up") == inbox.count("down")
    assert not mesh.connected
    assert mesh.refused.total() == 1


def test_frame_received_byte_by_byte_is_delivered_whole(net: Net) -> None:
    mesh = net.mesh("n1")
    context = net.tls["n2"].ssl_client_context()
    done = threading.Event()

    def trickle() -> None:
        with connected(mesh.port, context) as tls:
            for byte in frame(HELLO) + frame(MESSAGES[2]):
                tls.sendall(bytes([byte]))
            done.wait(120)

    thread = threading.Thread(target=trickle)
    thread.start()
    net.drive(lambda: net.inboxes[mesh].count("message"))
    done.set()
    thread.join()
    assert net.inboxes[mesh].messages("n2") == [MESSAGES[2]]


def test_silent_connections_are_limited_and_time_out_while_members_are_served(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(mesh_module, "time", clock)
    net.extra.append(clock.advance)
    first, second, first_inbox, _ = net.pair(setup_s=0.5)
    silent = [socket.create_connection((HOST, first.port)) for _ in range(SETUPS_MAX + 8)]
    with contextlib.ExitStack() as stack:
        for sock in silent:
            stack.enter_context(sock)
        net.drive(lambda: first.refused["busy"] == 8)
        second.send("n1", Forward(b"served"))
        second.flush()
        net.drive(lambda: first_inbox.messages("n2"))
        net.drive(lambda: first.refused["slow"] == SETUPS_MAX)
        second.introduce(HELLO)
        net.drive(lambda: first_inbox.count("up") == 2 and second.connected)
    assert len(first._connections) == 1


class OutOfFiles:
    """A listener in a process that may not open more files."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.failures = 0
        self.fileno, self.close = listener.fileno, listener.close

    def accept(self) -> tuple[socket.socket, object]:
        self.failures += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_listener_pauses_when_out_of_file_descriptors_and_accepts_later(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = net.mesh("n1")
    stuck = OutOfFiles(first._listener._sock)
    first._listener._sock = stuck
    monkeypatch.setattr(listener_module, "_PAUSE_S", 1000.0)
    second = net.mesh("n2")
    net.drive(lambda: stuck.failures)
    for _ in range(20):
        first.poll(0)
    assert stuck.failures == 1
    first._listener._sock = stuck.listener
    first._listener.due_s = first._due_s = 0.0
    net.drive(lambda: first.connected and second.connected)
