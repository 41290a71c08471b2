"""The Raft transport: delivery, flushing, polling, setup of a mesh, and dialling."""

from __future__ import annotations

import fcntl
import math
import socket
import termios
import threading
from random import Random

import pytest
from raft_transport_bench import HELLO, HOST, MESSAGES, Net, Pki, attacker, connected, frame

from rt.errors import CertificateError, FormatError
from rt.net.tls import TLS
from sequencer.raft.model.messages import AppendEntries, Forward, LogIndex, RaftEntry
from sequencer.raft.transport import dialer as dialer_module
from sequencer.raft.transport import mesh as mesh_module
from sequencer.raft.transport.connection import RaftConnection
from sequencer.raft.transport.dialer import Dialer
from sequencer.raft.transport.frames import FRAME_BYTES_MAX
from sequencer.raft.transport.mesh import TlsMesh


def has_come(connection: RaftConnection) -> bool:
    """Return whether the kernel of the other side has acknowledged all bytes that were written here."""
    unacknowledged = bytearray(4)
    fcntl.ioctl(connection.fd, termios.TIOCOUTQ, unacknowledged)
    return connection.stuck_bytes == 0 and not any(unacknowledged)


# --- what arrives -----------------------------------------------------------------------------------------


def test_messages_of_all_kinds_arrive_in_order_both_ways(net: Net) -> None:
    first, second, first_inbox, second_inbox = net.pair()
    for message in MESSAGES * 50:
        assert first.send("n2", message)
        assert second.send("n1", message)
    first.flush()
    second.flush()
    wanted = MESSAGES * 50
    net.drive(lambda: len(first_inbox.messages("n2")) == len(second_inbox.messages("n1")) == len(wanted))
    assert first_inbox.messages("n2") == second_inbox.messages("n1") == wanted
    assert first_inbox.events[0] == ("up", "n2", HELLO)
    assert not first.refused


def test_three_members_have_one_connection_for_each_pair(node_tls: dict[str, TLS]) -> None:
    net = Net(node_tls)
    meshes = {name: net.mesh(name, hello=HELLO._replace(cluster=name.encode() * 8)) for name in net.members}
    net.drive(lambda: all(len(mesh.connected) == 2 for mesh in meshes.values()))
    for name, mesh in meshes.items():
        for peer in meshes.keys() - {name}:
            assert mesh.send(peer, Forward(f"{name} to {peer}".encode()))
        mesh.flush()
    net.drive(lambda: all(inbox.count("message") == 2 for inbox in net.inboxes.values()))
    for name, mesh in meshes.items():
        inbox = net.inboxes[mesh]
        for peer in meshes.keys() - {name}:
            assert inbox.count("up", peer, HELLO._replace(cluster=peer.encode() * 8)) == 1
            assert inbox.messages(peer) == [Forward(f"{peer} to {name}".encode())]
        assert inbox.count("down") == 0
        mesh.close()


def test_large_bursts_both_ways_do_not_block_each_other(net: Net) -> None:
    first, second, first_inbox, second_inbox = net.pair()
    sizes = [1 << 20, 1, 300_000, 200_000, 100, 1 << 20] * 4
    burst = [Forward(bytes([i]) * size) for i, size in enumerate(sizes)]
    for message in burst:
        assert first.send("n2", message)
        assert second.send("n1", message)
    first.flush()
    second.flush()
    net.drive(lambda: len(first_inbox.messages("n2")) == len(second_inbox.messages("n1")) == len(burst))
    assert first_inbox.messages("n2") == second_inbox.messages("n1") == burst


def test_frame_of_maximum_size_arrives(net: Net) -> None:
    first, _, _, inbox = net.pair()
    largest = AppendEntries(
        1, LogIndex(1, 1), 0, 0, 0, tuple(RaftEntry(b"0123456789abcdef", i + 2, 1) for i in range(1 << 17))
    )
    assert len(frame(largest)) == FRAME_BYTES_MAX
    first.send("n2", largest)
    first.send("n2", Forward(b"behind it"))
    first.flush()
    net.drive(lambda: inbox.count("message") == 2)
    assert inbox.messages("n1") == [largest, Forward(b"behind it")]


def test_poll_delivers_every_received_tls_record(net: Net) -> None:
    first, second, _, inbox = net.pair()
    for content in (b"one", bytes(40_000), b"three"):
        first.send("n2", Forward(content))
        first.flush()
    net.drive(lambda: has_come(first._up["n2"]), first)
    second.poll(1.0)
    assert inbox.messages("n1") == [Forward(b"one"), Forward(bytes(40_000)), Forward(b"three")]


def test_messages_wait_for_flush_but_pings_do_not(net: Net) -> None:
    first, second, _, inbox = net.pair(ping_s=0.005)
    first.send("n2", Forward(b"queued"))
    heard_s = second._up["n1"].received_s
    net.drive(lambda: second._up["n1"].received_s > heard_s + 0.02)
    assert inbox.count("message") == 0
    first.flush()
    net.drive(lambda: inbox.count("message"))
    assert inbox.messages("n1") == [Forward(b"queued")]


def test_messages_queued_after_flush_wait_for_next_flush_while_poll_sends_flushed_ones(net: Net) -> None:
    first, second, _, inbox = net.pair(ping_s=0.005)
    large = [Forward(bytes(1 << 20))] * 16
    for message in large:
        first.send("n2", message)
    first.flush()
    assert first._up["n2"].stuck_bytes > 0
    first.send("n2", Forward(b"later"))
    net.drive(lambda: inbox.count("message") == len(large))
    heard_s = second._up["n1"].received_s
    net.drive(lambda: second._up["n1"].received_s > heard_s)
    assert inbox.messages("n1") == large
    first.flush()
    net.drive(lambda: inbox.count("message") > len(large))
    assert inbox.messages("n1")[-1] == Forward(b"later")


def test_unsent_rest_of_flush_is_sent_later_without_incoming_bytes(net: Net) -> None:
    first, _, _, inbox = net.pair(ping_s=3600.0, silence_s=3600.0)
    for _ in range(16):
        first.send("n2", Forward(bytes(1 << 20)))
    first.flush()
    assert first._up["n2"].stuck_bytes > 0
    net.drive(lambda: inbox.count("message") == 16)


def test_bytes_buffered_in_tls_are_delivered_after_full_read_burst(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "BURST_BYTES", 1)
    mesh = net.mesh("n1")
    record = frame(HELLO) + frame(Forward(bytes(10_000)))
    with attacker(mesh.port, net.tls["n2"].ssl_client_context(), record):
        net.drive(lambda: net.inboxes[mesh].count("message"))
        net.close(mesh)


def test_message_sent_before_close_is_delivered_before_down_event(net: Net) -> None:
    mesh = net.mesh("n1")
    context = net.tls["n2"].ssl_client_context()
    greeted, go = threading.Event(), threading.Event()

    def send_and_close() -> None:
        with connected(mesh.port, context) as peer:
            assert peer.recv(65536) == frame(HELLO)
            greeted.set()
            go.wait(120)
            peer.sendall(frame(HELLO) + frame(Forward(b"last words")))

    thread = threading.Thread(target=send_and_close)
    thread.start()
    net.drive(greeted.is_set)
    go.set()
    thread.join()
    inbox = net.inboxes[mesh]
    net.drive(lambda: inbox.count("down"))
    assert [event[0] for event in inbox.events] == ["up", "message", "down"]


def test_message_to_unconnected_peer_is_dropped(net: Net) -> None:
    mesh = net.mesh("n1")
    assert not mesh.send("n2", Forward(b""))
    assert not mesh.send("stranger", Forward(b""))
    mesh.flush()
    assert mesh.connected == frozenset()


def test_wake_ends_current_or_next_poll(net: Net) -> None:
    mesh = net.mesh("n1", members={"n1": net.members["n1"]}, reload_s=3600.0)
    mesh.poll(0)  # the first check of the certificates is due at once
    mesh.wake()
    mesh.poll(3600)
    thread = threading.Thread(target=mesh.wake)
    thread.start()
    mesh.poll(3600)
    thread.join()


def test_poll_raises_error_of_receiver(net: Net) -> None:
    first, _, _, inbox = net.pair()

    def fail(event: tuple[object, ...]) -> None:
        raise FormatError("the log is damaged")

    inbox.act = fail
    first.send("n2", Forward(b""))
    first.flush()
    with pytest.raises(FormatError, match="the log is damaged"):
        net.drive(lambda: False)


# --- creation and dialling --------------------------------------------------------------------------------


def test_mesh_requires_own_node_certificate_and_valid_members(pki: Pki, net: Net) -> None:
    members = {"n1": "localhost:1", "n2": "localhost:2"}
    with pytest.raises(CertificateError):
        TlsMesh(name="n2", listen=(HOST, 0), members=members, tls=net.tls["n1"])
    with pytest.raises(CertificateError):
        publisher = pki.tls("p", role="publisher")
        TlsMesh(name="p", listen=(HOST, 0), members=members | {"p": "localhost:3"}, tls=publisher)
    with pytest.raises(ValueError, match="not in members"):
        TlsMesh(name="n1", listen=(HOST, 0), members={"n2": "localhost:2"}, tls=net.tls["n1"])
    with pytest.raises(ValueError, match="the port is missing"):
        TlsMesh(name="n1", listen=(HOST, 0), members=members | {"n3": "localhost"}, tls=net.tls["n1"])


def test_mesh_listening_on_all_interfaces_is_reachable(net: Net) -> None:
    first, second = net.mesh("n1", listen=("", net.port("n1"))), net.mesh("n2")
    net.drive(lambda: first.connected and second.connected)


def test_error_for_port_in_use_names_host_and_port(net: Net) -> None:
    mesh = net.mesh("n1")
    with pytest.raises(OSError, match=f"cannot listen on {HOST}:{mesh.port}"):
        TlsMesh(name="n1", listen=(HOST, mesh.port), members=net.members, tls=net.tls["n1"])


def test_slow_name_resolution_does_not_block_poll_and_member_is_connected(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, lookup = threading.Event(), dialer_module._lookup

    def slow(host: str, port: int, flags: int = 0) -> list[dialer_module.DialTarget]:
        if flags:
            return lookup(host, port, flags)
        answer.wait(120)
        return lookup(HOST, port)

    monkeypatch.setattr(dialer_module, "_lookup", slow)
    members = net.members | {"n1": f"n1.invalid:{net.port('n1')}"}
    first, second = net.mesh("n1"), net.mesh("n2", members=members)
    for _ in range(20):
        second.poll(0)  # does not wait for the resolver
    answer.set()
    net.drive(lambda: first.connected and second.connected)


def test_dialer_rotates_addresses_with_growing_backoff_that_resets_after_stable_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [dialer_module.DialTarget(socket.AF_INET, (f"10.0.0.{i}", 1)) for i in range(3)]
    monkeypatch.setattr(dialer_module, "_lookup", lambda host, port, flags=0: [] if flags else found)
    woken = threading.Event()
    dialer = Dialer("n1:1", backoff_s=(1.0, 4.0), random=Random(1), wake=woken.set)
    targets, pauses, now_s = [], [], 0.0
    for _ in range(5):
        assert dialer.is_due(now_s)
        woken.clear()
        assert dialer.target() is None
        assert woken.wait(120)
        assert dialer.is_due(now_s)
        targets.append(dialer.target())
        assert dialer.due_s == math.inf
        dialer.on_ended(now_s, None)
        pauses.append(dialer.due_s - now_s)
        now_s = dialer.due_s
    assert targets == [*found, *found[:2]]
    bounds = [(0.5, 1), (1, 2), (2, 4), (2, 4), (2, 4)]
    assert all(low <= pause <= high for pause, (low, high) in zip(pauses, bounds, strict=True))
    dialer.on_ended(now_s, 0.1)
    assert dialer.due_s - now_s >= 2  # the connection was too short to reset the backoff
    dialer.on_ended(now_s, 5.0)
    assert dialer.due_s - now_s <= 1
    dialer.retry_now(now_s)
    assert dialer.is_due(now_s)


def test_dialer_raises_os_error_if_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str, port: int, flags: int = 0) -> list[dialer_module.DialTarget]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(dialer_module, "_lookup", fail)
    woken = threading.Event()
    dialer = Dialer("n1:1", backoff_s=(1.0, 4.0), random=Random(1), wake=woken.set)
    assert dialer.target() is None
    assert woken.wait(120)
    with pytest.raises(OSError, match="not known"):
        dialer.target()
