"""Connections of the Raft transport: setup, versions, replacement, timeouts and closing."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from raft_transport_bench import HELLO, HOST, Clock, Net, connected, frame

from replicator.protocol.version import VersionRange
from rt.errors import Closed
from sequencer.raft.model.messages import Forward
from sequencer.raft.transport import codec
from sequencer.raft.transport import mesh as mesh_module

# --- connections that end and start -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "other"), [("n1", "n2"), ("n2", "n1")])
def test_restarted_member_on_same_port_is_reconnected(net: Net, name: str, other: str) -> None:
    stays, goes = net.mesh(other), net.mesh(name)
    inbox = net.inboxes[stays]
    net.drive(lambda: stays.connected and goes.connected)
    net.close(goes)
    net.drive(lambda: not stays.connected)
    back = net.mesh(name, hello=HELLO._replace(epoch=8))
    net.drive(lambda: stays.connected and back.connected)
    back.send(other, Forward(b"back"))
    back.flush()
    net.drive(lambda: inbox.messages(name))
    ups = [("up", name, HELLO), ("down", name), ("up", name, HELLO._replace(epoch=8))]
    assert inbox.events == [*ups, ("message", name, Forward(b"back"))]


def test_members_of_different_versions_use_latest_common_version(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "VERSIONS", VersionRange(1, 3))
    newer = net.mesh("n1")
    monkeypatch.setattr(codec, "VERSIONS", VersionRange(1, 2))
    older = net.mesh("n2")
    net.drive(lambda: newer.connected and older.connected)
    for sender, to in ((newer, "n2"), (older, "n1")):
        assert [one.version for one in sender._up.values()] == [2]
        sender.send(to, Forward(b"said"))
        sender.flush()
    net.drive(lambda: net.inboxes[newer].messages("n2") and net.inboxes[older].messages("n1"))


def test_members_without_common_version_do_not_connect_and_log_reason(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(codec, "VERSIONS", VersionRange(2, 3))
    net.mesh("n1")
    monkeypatch.setattr(codec, "VERSIONS", VersionRange(1, 1))
    older = net.mesh("n2")
    net.drive(lambda: older.refused["frame"])
    assert not older.connected
    assert "got versions 2 to 3, expected version 1. Upgrade the older side" in caplog.text


def test_old_connection_delivers_no_messages_after_its_replacement(net: Net) -> None:
    first, old, inbox, _ = net.pair()
    for _ in range(16):
        old.send("n1", Forward(b"old" + bytes(1 << 20)))
    old.flush()
    new = net.mesh("n2", listen=(HOST, 0))
    net.drive(lambda: inbox.count("up", "n2") == 2, first, new)
    new.send("n1", Forward(b"new"))
    new.flush()
    net.drive(lambda: Forward(b"new") in inbox.messages("n2"), first, new)
    end = inbox.events.index(("down", "n2"))
    assert inbox.events[end + 1 :] == [("up", "n2", HELLO), ("message", "n2", Forward(b"new"))]
    assert first.connected == {"n2"}


def test_introduce_from_callback_closes_connection_and_redials(net: Net) -> None:
    first, second, first_inbox, second_inbox = net.pair()
    changed = HELLO._replace(epoch=8)

    def introduce_once(event: tuple[object, ...]) -> None:
        if event[0] == "message":
            second.introduce(changed)
            assert not second.connected
            assert not second.send("n1", Forward(b""))

    second_inbox.act = introduce_once
    first.send("n2", Forward(b"one"))
    first.send("n2", Forward(b"never delivered"))
    first.flush()
    net.drive(lambda: first_inbox.count("up") == 2 and second_inbox.count("up") == 2)
    assert first_inbox.events == [("up", "n2", HELLO), ("down", "n2"), ("up", "n2", changed)]
    assert [event[0] for event in second_inbox.events] == ["up", "message", "down", "up"]
    first.introduce(HELLO._replace(epoch=9))
    net.drive(lambda: second_inbox.count("up", "n1", HELLO._replace(epoch=9)) and first.connected)


def test_introduce_redials_without_waiting_for_backoff(net: Net) -> None:
    first, second, _, inbox = net.pair(backoff_s=(1000.0, 1000.0))
    second.introduce(HELLO)
    net.drive(lambda: inbox.count("up") == 2 and first.connected)


def test_close_from_callback_closes_mesh_and_may_be_repeated(net: Net) -> None:
    first, second, _, inbox = net.pair()
    inbox.act = lambda event: second.close()
    first.send("n2", Forward(b"one"))
    first.send("n2", Forward(b"two"))
    first.flush()
    net.drive(lambda: inbox.count("message"))
    del net.inboxes[second]
    net.drive(lambda: not first.connected)
    second.close()
    second.wake()
    second.flush()
    second.introduce(HELLO)
    assert not second.connected
    assert not second.send("n1", Forward(b""))
    assert inbox.messages("n1") == [Forward(b"one")]
    with pytest.raises(Closed):
        second.poll(0)


class Proxy:
    """Forwards bytes between its clients and a port until it is cut. The driver polls it."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.is_cut = False
        self.sockets: dict[socket.socket, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server((HOST, 0))
        self.selector.register(self.listener, selectors.EVENT_READ)

    def poll(self) -> None:
        for key, _ in [] if self.is_cut else self.selector.select(0):
            if key.fileobj is self.listener:
                near, far = self.listener.accept()[0], socket.create_connection((HOST, self.target))
                for one, other in [(near, far), (far, near)]:
                    self.sockets[one] = other
                    self.selector.register(one, selectors.EVENT_READ)
            elif data := _received(key.fileobj):
                with contextlib.suppress(OSError):
                    self.sockets[key.fileobj].sendall(data)
            else:
                self.selector.unregister(key.fileobj)
                with contextlib.suppress(OSError):
                    self.sockets[key.fileobj].shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.selector.close()
        for sock in [self.listener, *self.sockets]:
            sock.close()


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def test_half_open_connection_is_detected_by_both_sides_and_reconnected(net: Net) -> None:
    proxy = Proxy(net.port("n1"))
    net.extra.append(proxy.poll)
    members = net.members | {"n1": f"{HOST}:{proxy.listener.getsockname()[1]}"}
    with contextlib.closing(proxy):
        first = net.mesh("n1", ping_s=0.02, silence_s=0.3)
        second = net.mesh("n2", ping_s=0.02, silence_s=0.3, setup_s=0.3, members=members)
        net.drive(lambda: first.connected and second.connected)
        proxy.is_cut = True
        net.drive(lambda: net.inboxes[first].count("down") and net.inboxes[second].count("down"))
        proxy.is_cut = False
        net.drive(lambda: first.connected and second.connected)
        for mesh in (first, second):
            net.close(mesh)


def test_pings_keep_idle_connection_open(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(mesh_module, "time", clock)
    net.extra.append(clock.advance)
    _, _, first_inbox, second_inbox = net.pair(ping_s=0.02, silence_s=0.4)
    until_s = clock.now_s + 0.8  # twice the silence timeout
    net.drive(lambda: clock.now_s > until_s)
    assert first_inbox.count("down") == second_inbox.count("down") == 0


def test_bytes_received_during_process_pause_prevent_silence_timeout(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(mesh_module, "time", clock)
    net.extra.append(clock.advance)
    first, second = net.mesh("n1", silence_s=0.2), net.mesh("n2", ping_s=0.02)
    net.drive(lambda: first.connected and second.connected)
    until_s = clock.now_s + 0.4  # twice the silence timeout of `first`
    net.drive(lambda: clock.now_s > until_s, second)
    heard_s = first._up["n2"].received_s
    net.drive(lambda: first._up["n2"].received_s > heard_s)
    assert net.inboxes[first].count("down") == 0


def test_connection_is_reconnected_at_maximum_age(net: Net) -> None:
    first, second, inbox, _ = net.pair(age_s=0.05)
    net.drive(lambda: inbox.count("up") >= 3 and first.connected and second.connected)
    assert inbox.count("down") >= 2
    assert not first.refused
    assert not second.refused


def test_connection_closes_when_peer_certificate_expires(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    end_s = net.tls["n2"].load().not_after.timestamp()
    monkeypatch.setattr(
        mesh_module, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: end_s - 0.05)
    )
    first, _ = net.mesh("n1"), net.mesh("n2")
    inbox = net.inboxes[first]
    net.drive(lambda: inbox.count("up", "n2") and inbox.count("down", "n2"))
    assert not first.refused


def test_non_reading_peer_is_disconnected_when_its_outbox_is_full(net: Net) -> None:
    first = net.mesh("n1", outbox_bytes_max=8 << 20, ping_s=0.001)
    inbox = net.inboxes[first]
    context = net.tls["n2"].ssl_client_context()
    done = threading.Event()

    def greet_only() -> None:
        with connected(first.port, context) as peer:
            peer.sendall(frame(HELLO))
            done.wait(120)

    thread = threading.Thread(target=greet_only)
    thread.start()
    net.drive(lambda: first.connected)
    while first._up["n2"].stuck_bytes == 0:
        first.send("n2", Forward(bytes(1 << 20)))
        first.flush()
    assert (
        first._timing.due_of(first._up["n2"]) > first._up["n2"].sent_s + 1
    )  # no ping is due, because it could not be sent
    while first.send("n2", Forward(bytes(1 << 20))):
        first.flush()
    assert not first.connected
    assert inbox.count("down") == 0  # reported from inside poll only
    net.drive(lambda: inbox.count("down"))
    done.set()
    thread.join()
    assert first.refused == {"outbox": 1}
