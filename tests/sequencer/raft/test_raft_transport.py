"""The TLS mesh on loopback: what arrives, in which order, who is let in, and what a bad peer can do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import pickle
import selectors
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from rt.endpoints import parse_endpoint
from rt.errors import CertificateError, Closed, FormatError
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_port
from sequencer.raft.model.messages import (
    NOWHERE,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    DiskClaim,
    Forward,
    Hello,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from sequencer.raft.transport import dialer as dialer_module
from sequencer.raft.transport import listener as listener_module
from sequencer.raft.transport import mesh as mesh_module
from sequencer.raft.transport.codec import encode
from sequencer.raft.transport.connection import MeshTiming, RaftConnection
from sequencer.raft.transport.dialer import Dialer
from sequencer.raft.transport.frames import FRAME_BYTES_MAX
from sequencer.raft.transport.mesh import SETUPS_MAX, TlsMesh

HOST = "127.0.0.1"
CLAIM = DiskClaim(b"D" * 16, LogIndex(3, 2))
HELLO = Hello(b"C" * 16, 7, CLAIM)
MESSAGES: list[Message] = [
    RequestVote(5, LogIndex(9, 4), CLAIM, pre=True),
    RequestVoteReply(5, granted=True, claim=CLAIM, pre=False),
    AppendEntries(5, LogIndex(9, 4), 8, 7, 1, (RaftEntry(b"ten", 10, 4), RaftEntry(b"", 11, 5))),
    AppendEntriesReply(5, matched=True, prev=9, index=11, claim=CLAIM),
    InstallSnapshot(5, LogIndex(9, 4), 100, b"S" * 32, 90, b"the end..."),
    InstallSnapshotReply(5, NOWHERE, 120, 100, installed=False, claim=CLAIM),
    Forward(b"a command"),
    Admit(b"a state"),
    TimeoutNow(5),
]


class Inbox:
    """A receiver that notes what happens, and does what it is told to when it does."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.act: Callable[[tuple[object, ...]], None] = lambda event: None

    def on_up(self, peer: str, hello: Hello) -> None:
        self._note("up", peer, hello)

    def on_message(self, peer: str, message: Message) -> None:
        self._note("message", peer, message)

    def on_down(self, peer: str) -> None:
        self._note("down", peer)

    def _note(self, *event: object) -> None:
        self.events.append(event)
        self.act(event)

    def messages(self, peer: str) -> list[Message]:
        return [event[2] for event in self.events if event[:2] == ("message", peer)]

    def count(self, *event: object) -> int:
        return sum(noted[: len(event)] == event for noted in self.events)


class Pki:
    """A CA in a directory of its own, and what it issued."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        init_ca(directory)

    def tls(self, name: str, *, stream: str = "s", role: str = "node", dns: tuple[str, ...] = ()) -> TLS:
        return TLS(*issue(self.directory, Identity(stream, role, name), dns=dns, renew=True))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def node_tls(pki: Pki) -> dict[str, TLS]:
    return {name: pki.tls(name) for name in ("n1", "n2", "n3")}


class Net:
    """Members with ports of their own, the meshes that were made for them, and a driver."""

    def __init__(self, tls: dict[str, TLS]) -> None:
        self.tls = tls
        self.members = {name: f"{HOST}:{free_port()}" for name in tls}
        self.inboxes: dict[TlsMesh, Inbox] = {}
        self.extra: list[Callable[[], object]] = []

    def port(self, name: str) -> int:
        return parse_endpoint(self.members[name]).port

    def mesh(
        self, name: str, *, hello: Hello = HELLO, members: dict[str, str] | None = None, **options: object
    ) -> TlsMesh:
        times = {name: options.pop(name) for name in MeshTiming.__slots__ if name in options}
        timing = MeshTiming(**{"backoff_s": (0.01, 0.05)} | times)
        options.setdefault("listen", (HOST, self.port(name)))
        options.setdefault("tls", self.tls[name])
        mesh = TlsMesh(name=name, members=members or self.members, timing=timing, **options)
        self.inboxes[mesh] = Inbox()
        mesh.start(self.inboxes[mesh], hello)
        return mesh

    def drive(self, until: Callable[[], object], *only: TlsMesh) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline, {m: inbox.events[-3:] for m, inbox in self.inboxes.items()}
            for mesh in only or list(self.inboxes):
                mesh.poll(0.001)
            for act in self.extra:
                act()

    def pair(self, **options: object) -> tuple[TlsMesh, TlsMesh, Inbox, Inbox]:
        first, second = self.mesh("n1", **options), self.mesh("n2", **options)
        self.drive(lambda: first.connected and second.connected)
        return first, second, self.inboxes[first], self.inboxes[second]

    def close(self, mesh: TlsMesh) -> None:
        del self.inboxes[mesh]
        mesh.close()


@pytest.fixture
def net(node_tls: dict[str, TLS]) -> Iterator[Net]:
    made = Net({name: node_tls[name] for name in ("n1", "n2")})
    yield made
    for mesh in made.inboxes:
        mesh.close()


@contextlib.contextmanager
def attacker(
    port: int, context: ssl.SSLContext | None, payload: bytes = b"", host: str = "n1"
) -> Iterator[None]:
    """Somebody, on a thread, who connects, sends, and then reads until the other side has had enough."""

    def attack() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection((HOST, port), timeout=120))
            if context is not None:
                sock = stack.enter_context(context.wrap_socket(sock, server_hostname=host))
            sock.sendall(payload)
            while sock.recv(65536):
                pass

    thread = threading.Thread(target=attack)
    thread.start()
    yield
    thread.join()


def connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection whose handshake is done; somebody else must drive the other side meanwhile."""
    return context.wrap_socket(socket.create_connection((HOST, port), timeout=120), server_hostname="n1")


def has_come(connection: RaftConnection) -> bool:
    """Whether the kernel has acknowledged, on the other side, all that was written here."""
    unacknowledged = bytearray(4)
    fcntl.ioctl(connection.fd, termios.TIOCOUTQ, unacknowledged)
    return connection.stuck_bytes == 0 and not any(unacknowledged)


def frame(message: Message | Hello, epoch: int = HELLO.epoch) -> bytes:
    return b"".join(encode(message, epoch))


# --- what arrives -----------------------------------------------------------------------------------------


def test_all_kinds_of_messages_arrive_both_ways_in_order(net: Net) -> None:
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


def test_bursts_of_many_mebibytes_both_ways_do_not_block_each_other(net: Net) -> None:
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


def test_a_frame_as_large_as_they_come_arrives(net: Net) -> None:
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


def test_a_poll_takes_every_record_that_has_come(net: Net) -> None:
    first, second, _, inbox = net.pair()
    for content in (b"one", bytes(40_000), b"three"):
        first.send("n2", Forward(content))
        first.flush()
    net.drive(lambda: has_come(first._up["n2"]), first)
    second.poll(1.0)
    assert inbox.messages("n1") == [Forward(b"one"), Forward(bytes(40_000)), Forward(b"three")]


def test_nothing_leaves_before_flush_but_pings_do(net: Net) -> None:
    first, second, _, inbox = net.pair(ping_s=0.005)
    first.send("n2", Forward(b"queued"))
    heard_s = second._up["n1"].received_s
    net.drive(lambda: second._up["n1"].received_s > heard_s + 0.02)
    assert inbox.count("message") == 0
    first.flush()
    net.drive(lambda: inbox.count("message"))
    assert inbox.messages("n1") == [Forward(b"queued")]


def test_what_is_queued_after_a_flush_waits_for_the_next_one_while_poll_sends_the_rest(net: Net) -> None:
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


def test_what_the_kernel_did_not_take_leaves_later_although_nothing_arrives(net: Net) -> None:
    first, _, _, inbox = net.pair(ping_s=3600.0, silence_s=3600.0)
    for _ in range(16):
        first.send("n2", Forward(bytes(1 << 20)))
    first.flush()
    assert first._up["n2"].stuck_bytes > 0
    net.drive(lambda: inbox.count("message") == 16)


def test_what_tls_holds_after_a_full_burst_is_not_left_there(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "BURST_BYTES", 1)
    mesh = net.mesh("n1")
    record = frame(HELLO) + frame(Forward(bytes(10_000)))
    with attacker(mesh.port, net.tls["n2"].ssl_client_context(), record):
        net.drive(lambda: net.inboxes[mesh].count("message"))
        net.close(mesh)


def test_what_was_sent_before_the_end_is_delivered_before_it(net: Net) -> None:
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


def test_a_message_to_somebody_who_is_not_connected_is_dropped(net: Net) -> None:
    mesh = net.mesh("n1")
    assert not mesh.send("n2", Forward(b""))
    assert not mesh.send("stranger", Forward(b""))
    mesh.flush()
    assert mesh.connected == frozenset()


def test_wake_ends_the_present_poll_or_the_next_one(net: Net) -> None:
    mesh = net.mesh("n1", members={"n1": net.members["n1"]}, reload_s=3600.0)
    mesh.poll(0)  # the first look at the certificates is due at once
    mesh.wake()
    mesh.poll(3600)
    thread = threading.Thread(target=mesh.wake)
    thread.start()
    mesh.poll(3600)
    thread.join()


def test_what_the_receiver_raises_comes_out_of_poll_whatever_its_kind(net: Net) -> None:
    first, _, _, inbox = net.pair()

    def fail(event: tuple[object, ...]) -> None:
        raise FormatError("the log is damaged")

    inbox.act = fail
    first.send("n2", Forward(b""))
    first.flush()
    with pytest.raises(FormatError, match="the log is damaged"):
        net.drive(lambda: False)


# --- ends and beginnings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "other"), [("n1", "n2"), ("n2", "n1")])
def test_a_member_that_comes_back_on_its_port_is_connected_again(net: Net, name: str, other: str) -> None:
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


def test_a_new_connection_replaces_the_old_one_and_nothing_of_the_old_comes_after_it(net: Net) -> None:
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


def test_an_introduction_from_inside_a_callback_closes_and_redials(net: Net) -> None:
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


def test_an_introduction_does_not_wait_for_the_pause_between_attempts(net: Net) -> None:
    first, second, _, inbox = net.pair(backoff_s=(1000.0, 1000.0))
    second.introduce(HELLO)
    net.drive(lambda: inbox.count("up") == 2 and first.connected)


def test_close_from_inside_a_callback_ends_everything_and_may_be_repeated(net: Net) -> None:
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
    """Carries bytes between those who connect to it and a port, until it is cut; polled by the driver."""

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


def test_a_half_open_connection_is_found_by_both_sides_and_made_again(net: Net) -> None:
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


class Clock:
    """For the transport, in the place of the module `time`: only its test makes seconds pass."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def advance(self) -> None:
        self.now_s += 0.005


def test_an_idle_connection_is_kept_up_by_pings(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(mesh_module, "time", clock)
    net.extra.append(clock.advance)
    _, _, first_inbox, second_inbox = net.pair(ping_s=0.02, silence_s=0.4)
    until_s = clock.now_s + 0.8  # twice the silence that would end it
    net.drive(lambda: clock.now_s > until_s)
    assert first_inbox.count("down") == second_inbox.count("down") == 0


def test_what_came_while_the_process_was_paused_counts_as_heard(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(mesh_module, "time", clock)
    net.extra.append(clock.advance)
    first, second = net.mesh("n1", silence_s=0.2), net.mesh("n2", ping_s=0.02)
    net.drive(lambda: first.connected and second.connected)
    until_s = clock.now_s + 0.4  # twice the silence that first allows
    net.drive(lambda: clock.now_s > until_s, second)
    heard_s = first._up["n2"].received_s
    net.drive(lambda: first._up["n2"].received_s > heard_s)
    assert net.inboxes[first].count("down") == 0


def test_a_connection_is_made_again_when_it_is_old(net: Net) -> None:
    first, second, inbox, _ = net.pair(age_s=0.05)
    net.drive(lambda: inbox.count("up") >= 3 and first.connected and second.connected)
    assert inbox.count("down") >= 2
    assert not first.refused
    assert not second.refused


def test_a_connection_ends_with_the_certificate_of_its_peer(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_s = net.tls["n2"].load().not_after.timestamp()
    monkeypatch.setattr(
        mesh_module, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: end_s - 0.05)
    )
    first, _ = net.mesh("n1"), net.mesh("n2")
    inbox = net.inboxes[first]
    net.drive(lambda: inbox.count("up", "n2") and inbox.count("down", "n2"))
    assert not first.refused


def test_a_peer_that_never_reads_is_dropped_when_its_outbox_is_full(net: Net) -> None:
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
    )  # no ping is due that could not leave
    while first.send("n2", Forward(bytes(1 << 20))):
        first.flush()
    assert not first.connected
    assert inbox.count("down") == 0  # reported from inside poll only
    net.drive(lambda: inbox.count("down"))
    done.set()
    thread.join()
    assert first.refused == {"outbox": 1}


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


def test_rotated_certificates_are_taken_without_a_restart_and_bad_ones_left_alone(
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
def test_a_stranger_is_refused_and_counted(stranger: str, tmp_path: Path) -> None:
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
def test_other_protocols_are_refused_before_anything_is_parsed(net: Net, payload: bytes) -> None:
    mesh = net.mesh("n1")
    with attacker(mesh.port, None, payload):
        net.drive(lambda: mesh.refused["tls"])


@pytest.mark.parametrize(("dns", "reason"), [((), "tls"), (("n1",), "name")], ids=["host", "identity"])
def test_a_dialler_refuses_another_member_at_that_address(
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
def test_a_member_that_sends_what_no_member_sends_is_cut_off(net: Net, what: str) -> None:
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


def test_a_frame_that_arrives_byte_by_byte_is_put_together(net: Net) -> None:
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


def test_silent_connections_are_bounded_and_end_while_members_are_served(
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
    """A listener in a process that may not open another file."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.failures = 0
        self.fileno, self.close = listener.fileno, listener.close

    def accept(self) -> tuple[socket.socket, object]:
        self.failures += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_process_out_of_files_pauses_to_accept_and_continues(
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


# --- how it is made, and dialling -------------------------------------------------------------------------


def test_a_mesh_is_only_made_for_its_own_member(pki: Pki, net: Net) -> None:
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


def test_a_mesh_that_listens_on_all_interfaces_is_reached(net: Net) -> None:
    first, second = net.mesh("n1", listen=("", net.port("n1"))), net.mesh("n2")
    net.drive(lambda: first.connected and second.connected)


def test_a_port_that_is_taken_is_named(net: Net) -> None:
    mesh = net.mesh("n1")
    with pytest.raises(OSError, match=f"cannot listen on {HOST}:{mesh.port}"):
        TlsMesh(name="n1", listen=(HOST, mesh.port), members=net.members, tls=net.tls["n1"])


def test_a_member_is_reached_by_name_although_the_resolver_takes_its_time(
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


def test_attempts_take_the_addresses_in_turn_with_pauses_that_grow_and_begin_again(
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
    assert dialer.due_s - now_s >= 2  # it stood for no time to speak of
    dialer.on_ended(now_s, 5.0)
    assert dialer.due_s - now_s <= 1
    dialer.retry_now(now_s)
    assert dialer.is_due(now_s)


def test_a_name_without_address_is_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str, port: int, flags: int = 0) -> list[dialer_module.DialTarget]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(dialer_module, "_lookup", fail)
    woken = threading.Event()
    dialer = Dialer("n1:1", backoff_s=(1.0, 4.0), random=Random(1), wake=woken.set)
    assert dialer.target() is None
    assert woken.wait(120)
    with pytest.raises(OSError, match="not known"):
        dialer.target()
