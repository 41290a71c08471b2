"""The push server over loopback mTLS: who may push, in which order, and when bytes are acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_items import files_of, items_of, publish, recut
from receiving_node import CLUSTER, FakeNode, make_pki, tls_of, until

import rt
from replicator.protocol.codec import PUSH_METHOD, PushReply, decode_push_reply, encode_push_request
from replicator.protocol.handshake import OpenReply, PushHello, PushProgress, PushStart
from replicator.protocol.messages import Chunk, Item, LogOffset, Run, SegmentSealed
from replicator.push.server import PushServicer, _Stream, check_publisher
from replicator.receive import session_replica
from replicator.receive.group_commit import GroupCommit
from replicator.receive.session_replica import STALLED_SECONDS, STILL_SECONDS, UnfinishedBytes
from rt.errors import CertificateError, Closed, ClusterMismatch, FormatError, ProtocolViolation, RtError
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.scan.directory import read_identity
from rt.log.write.writer import SyncPoint
from rt.net.grpc_channel import end_call, open_channel
from rt.net.grpc_errors import asking
from rt.net.identity import Identity

# isort: split
import grpc.aio


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def session(tmp_path: Path) -> str:
    """The directory of a session with two runs."""
    publish(REAL, 2000, 2000, 2000, root=str(tmp_path / "source"))
    return publish(REAL, 100, root=str(tmp_path / "source"))


class Client:
    """A push client controlled by the test."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.answers: list[PushReply] = []

    async def say(self, *said: PushHello | Item) -> None:
        # A later read reports the error.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for each in said:
                await self.call.write(encode_push_request(each))  # type: ignore[arg-type]

    async def hear(self) -> PushReply:
        with asking("node"):
            data = await asyncio.wait_for(self.call.read(), 120)
        if not isinstance(data, bytes):
            with asking("node"):
                await self.call
                raise AssertionError("it ended well")
        self.answers.append(decode_push_reply(data))
        return self.answers[-1]

    async def hear_until(self, durable: LogOffset) -> PushProgress:
        while True:
            answer = await self.hear()
            if isinstance(answer, PushProgress) and answer.durable >= durable:
                return answer

    async def failure(self) -> RtError:
        with pytest.raises(RtError) as caught:
            while True:
                await self.hear()
        return caught.value


@asynccontextmanager
async def client_of(endpoint: str, pki: Path, name: str = "feed") -> AsyncIterator[Client]:
    async with open_channel(endpoint, tls_of(pki, name)) as channel:
        call = channel.get().stream_stream(PUSH_METHOD)()
        try:
            yield Client(call)
        finally:
            end_call(call)


async def refusal_of(
    endpoint: str,
    pki: Path,
    hello: PushHello,
    items: Callable[[LogOffset], Iterable[Item]] = lambda start: (),
    name: str = "feed",
) -> RtError:
    """Return the error that ends a stream. The stream sends `items` from the offset that the node requests.

    gRPC loses the reason if a write meets the end of the call. In that case the call is repeated.
    """
    while True:
        async with client_of(endpoint, pki, name) as client:
            await client.say(hello)
            try:
                start = await client.hear()
            except RtError as error:
                refusal = error
            else:
                assert isinstance(start, PushStart)
                await client.say(*items(start.offset))
                refusal = await client.failure()
            if "Internal error from Core" not in refusal.what:
                return refusal


def hello_of(path: str, **changes: Any) -> PushHello:
    identity = read_identity(REAL, path)
    said = {"session": identity.name, "incarnation": identity.origin, "dedup_id": identity.dedup_id} | changes
    return PushHello("s", **said)  # type: ignore[arg-type]


def end_of(items: Iterable[Item]) -> LogOffset:
    last = [item for item in items if isinstance(item, Chunk)][-1]
    return last.end


def run(coroutine: Any) -> None:
    asyncio.run(coroutine)


def test_pushed_session_is_stored_and_reported_durable(tmp_path: Path, pki: Path, session: str) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint, client_of(endpoint, pki) as client:
            items = items_of(REAL, session)
            await client.say(hello_of(session))
            start = await client.hear()
            assert start == PushStart(CLUSTER, 0, 3, "n1", None)
            assert await client.hear() == PushProgress()
            await client.say(*items)
            progress = await client.hear_until(end_of(items))
            assert progress.durable_number == 4
            assert OpenReply(0) in client.answers
            assert OpenReply(1) in client.answers
            assert files_of(REAL, str(tmp_path / "node/sessions/feed")) == files_of(REAL, session)
            store = node.stores["feed"]
            store.record_merged(LogOffset(1, 0, 64), 3, is_urgent=False)
            while (heard := await client.hear()) != store.progress:
                assert isinstance(heard, PushProgress)
            assert (store.progress.merged_run, store.progress.merged_number) == (1, 3)
            await until(
                lambda: [(marked.segment, mark.number) for marked in node.marks for mark in marked.marks]
            )
            assert node.marks[-1].segment == SegmentId(1, 0)

    run(main())


def test_merged_progress_is_reported_with_next_sync_or_at_once_if_urgent(
    tmp_path: Path, pki: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_replica, "MERGED_SECONDS_MAX", 3600.0)

    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint, client_of(endpoint, pki) as client:
            run_item, chunk, *rest = items_of(REAL, session)
            assert isinstance(chunk, Chunk)
            await client.say(hello_of(session), run_item, chunk)
            synced = await client.hear_until(chunk.end)
            store = node.stores["feed"]
            store.record_merged(LogOffset(0, 0, 64), 1, is_urgent=False)
            await client.say(*rest)
            heard = await client.hear_until(synced.durable._replace(offset=synced.durable.offset + 1))
            assert (heard.merged, heard.merged_number) == (LogOffset(0, 0, 64), 1)
            if heard.durable < end_of(rest):
                await client.hear_until(end_of(rest))
            store.record_merged(LogOffset(1, 0, 64), 3, is_urgent=True)
            while (answer := await client.hear()) != store.progress:
                assert isinstance(answer, PushProgress)
            assert store.progress.merged_number == 3

    run(main())


def test_push_stream_continues_at_end_of_session_replica_after_reconnect(
    tmp_path: Path, pki: Path, session: str
) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            items = items_of(REAL, session)
            first = items[1]
            assert isinstance(first, Chunk)
            async with client_of(endpoint, pki) as client:
                await client.say(hello_of(session), items[0], Chunk(first.start, first.data[:1000]))
                await client.hear_until(LogOffset(0, 0, 64))
            await until(lambda: node.ended == 1)
            async with client_of(endpoint, pki) as client:
                await client.say(hello_of(session, cluster=CLUSTER))
                start = await client.hear()
                assert isinstance(start, PushStart)
                assert start.offset == LogOffset(0, 0, 64)
                await client.say(*items_of(REAL, session, start.offset))
                await client.hear_until(end_of(items))
            assert files_of(REAL, str(tmp_path / "node/sessions/feed")) == files_of(REAL, session)

    run(main())


def test_newer_push_stream_of_session_closes_older_one(tmp_path: Path, pki: Path, session: str) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            client_of(endpoint, pki) as older,
            client_of(endpoint, pki) as newer,
        ):
            await older.say(hello_of(session))
            await older.hear()
            await newer.say(hello_of(session))
            assert isinstance(await older.failure(), Closed)
            items = items_of(REAL, session)
            await newer.say(*items)
            await newer.hear_until(end_of(items))
            assert node.push.sessions == ["feed"]

    run(main())


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda items: [items[0], Chunk(items[1].start, bytes(len(items[1].data)))], FormatError),
        (lambda items: items[1:], ProtocolViolation),
        (lambda items: [items[0], Chunk(LogOffset(0, 0, 8), items[1].data)], ProtocolViolation),
        (
            lambda items: [items[0], items[1], SegmentSealed(LogOffset(0, 0, 8), 99, False, 0)],
            ProtocolViolation,
        ),
        (lambda items: [Run(0, b"01234567"), items[1]], ProtocolViolation),
    ],
    ids=["bad bytes", "no life", "wrong place", "wrong seal", "another life"],
)
def test_protocol_error_ends_push_stream_and_stores_no_invalid_bytes(
    tmp_path: Path, pki: Path, session: str, spoil: Any, error: type[RtError]
) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            refusal = await refusal_of(
                endpoint, pki, hello_of(session), lambda _: spoil(items_of(REAL, session))
            )
            assert isinstance(refusal, error)
            assert node.push.refused.total()
            async with client_of(endpoint, pki) as client:
                await client.say(hello_of(session))
                start = await client.hear()
                assert isinstance(start, PushStart)
                items = items_of(REAL, session, start.offset)
                await client.say(*items)
                await client.hear_until(end_of(items_of(REAL, session)))
        assert files_of(REAL, str(tmp_path / "node/sessions/feed")) == files_of(REAL, session)

    run(main())


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("other", {}, CertificateError),
        ("feed", {"session": "other"}, CertificateError),
        ("feed", {"dedup_id": "d1"}, CertificateError),
        ("feed", {"dedup_id": "d1~feed"}, CertificateError),
        ("feed", {"cluster": bytes(16)}, ClusterMismatch),
        ("sub", {}, CertificateError),
        ("n1", {}, CertificateError),
        ("stranger", {}, CertificateError),
    ],
)
def test_push_without_matching_certificate_or_cluster_is_refused(
    tmp_path: Path, pki: Path, session: str, name: str, changes: dict[str, Any], error: type[RtError]
) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            refusal = await refusal_of(endpoint, pki, hello_of(session, **changes), name=name)
            assert isinstance(refusal, error)
            assert node.stores == {}

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        encode_push_request(Run(0, bytes(8))),
        encode_push_request(hello := PushHello("s", "feed", bytes(16))).replace(
            b"\x1a\x04feed", b"\x1a\x04../x"
        ),
    ],
    ids=["nothing", "garbage", "no hello", "a path for a name"],
)
def test_push_stream_without_initial_hello_raises_protocol_violation(
    tmp_path: Path, pki: Path, data: bytes
) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint, client_of(endpoint, pki) as client:
            await client.call.write(data)
            assert isinstance(await client.failure(), ProtocolViolation)
            assert not (tmp_path / "node").exists()

    run(main())
    assert hello.session == "feed"


def test_silent_push_stream_is_ended_after_hello_timeout(
    tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicator.protocol.grpc_service.HELLO_SECONDS", 0.1)

    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint, client_of(endpoint, pki) as client:
            failure = await client.failure()
            assert isinstance(failure, ProtocolViolation)
            assert "sent no hello" in str(failure)

    run(main())


def test_certificate_allows_its_session_name_with_tilde_suffix_and_no_other() -> None:
    identity = Identity("s", "publisher", "feed", frozenset({"d1"}))
    for session, dedup in (("feed", None), ("feed~backup", None), ("feed", "d1")):
        check_publisher(identity, PushHello("s", session, bytes(16), dedup), "s")
    for session in ("feed2", "fee", "other~feed"):
        with pytest.raises(CertificateError):
            check_publisher(identity, PushHello("s", session, bytes(16)), "s")
    with pytest.raises(ClusterMismatch, match="`rt certs show` names its stream"):
        check_publisher(identity, PushHello("t", "feed", bytes(16)), "s")


def test_store_error_ends_push_stream(tmp_path: Path, pki: Path, session: str) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        async with node.serving(tls_of(pki, "n1")) as endpoint, client_of(endpoint, pki) as client:
            await client.say(hello_of(session))
            await client.hear()
            await client.hear()
            node.stores["feed"].refuse(rt.Fenced("a later one took over"))
            assert isinstance(await client.failure(), rt.Fenced)

    run(main())


def test_unfinished_large_messages_are_bounded_across_push_streams(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        node.unfinished = UnfinishedBytes(400_000)
        root = str(tmp_path / "source")
        sessions = [
            publish(REAL, 350_000, root=root, name=name, roll_bytes=1 << 30) for name in ("feed", "other")
        ]
        cuts = itertools.repeat(2**16)
        feed, other = (list(recut(items_of(REAL, path), cuts)) for path in sessions)
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            client_of(endpoint, pki) as first,
        ):
            await first.say(hello_of(sessions[0]), *feed[:4])
            await until(lambda: node.unfinished.total > 2**17)
            refusal = await refusal_of(
                endpoint,
                pki,
                hello_of(sessions[1]),
                lambda start: recut(items_of(REAL, sessions[1], start), cuts),
                name="other",
            )
            assert isinstance(refusal, rt.Overloaded)
            await first.say(*feed[4:])
            await first.hear_until(end_of(feed))
            assert node.unfinished.total == 0
            async with client_of(endpoint, pki, "other") as again:
                await again.say(hello_of(sessions[1]))
                start = await again.hear()
                assert isinstance(start, PushStart)
                await again.say(*recut(items_of(REAL, sessions[1], start.offset), cuts))
                await again.hear_until(end_of(other))

    run(main())


class Growing:
    """A receiver whose unfinished bytes the test sets."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.unfinished_bytes = 0

    def drop_unfinished(self) -> None:
        self.unfinished_bytes = 0


class Room:
    """A limit of 1000 MiB for unfinished batches, and a clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.unfinished = UnfinishedBytes(1000 * 2**20, now=lambda: self.now_s)
        self.told: list[str] = []

    def hold(self, receiver: Growing, mebibytes: int) -> None:
        receiver.unfinished_bytes = mebibytes * 2**20
        self.unfinished.record(receiver, lambda error: self.told.append(str(error.where)))  # type: ignore[arg-type]

    def total(self) -> int:
        return self.unfinished.total // 2**20


def test_slowest_unfinished_batches_are_interrupted_first() -> None:
    room, slow, slower, quick, last = Room(), *map(Growing, ["slow", "slower", "quick", "last"])
    room.hold(slow, 4)
    room.hold(slower, 2)
    room.hold(quick, 900)
    room.now_s = STALLED_SECONDS
    room.hold(last, 100)
    assert room.told == ["slower", "slow"]
    assert room.total() == 1006
    for receiver in (slower, slow):
        room.unfinished.release(receiver)  # type: ignore[arg-type]
    assert room.total() == 1000
    with pytest.raises(rt.Overloaded):
        room.hold(last, 101)
    assert last.unfinished_bytes == 0
    assert room.total() == 900


def test_fast_unfinished_batches_are_not_interrupted_and_new_batch_raises_overloaded() -> None:
    room, first, second = Room(), Growing("first"), Growing("second")
    room.hold(first, 999)
    room.now_s = 100.0
    with pytest.raises(rt.Overloaded):
        room.hold(second, 2)
    room.now_s = 998.0
    with pytest.raises(rt.Overloaded):
        room.hold(second, 2)
    room.now_s = 1000.0
    room.hold(second, 2)
    assert room.told == ["first"]


def test_make_room_interrupts_stalled_batches_first_then_newest() -> None:
    room, still, oldest, newer, newest, small = (
        Room(),
        *map(Growing, ["still", "oldest", "newer", "newest", "small"]),
    )
    for receiver in (still, oldest, newer, newest):
        room.hold(receiver, 10)
        room.now_s += 0.1
    room.hold(small, 1)
    room.now_s = STILL_SECONDS
    for receiver in (oldest, newer, newest):
        room.hold(receiver, 20)
    assert room.unfinished.make_room(1) == 10 * 2**20
    assert room.told == ["still"]
    assert room.unfinished.make_room(30 * 2**20) == 30 * 2**20
    assert room.told == ["still", "newest"]
    assert room.unfinished.make_room(1000 * 2**20) == 50 * 2**20
    assert room.told == ["still", "newest", "newer"], "the oldest is finished first"


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["hold", "forget", "wait"]), st.integers(0, 700)),
        max_size=40,
    )
)
def test_unfinished_byte_total_equals_bytes_held_by_receivers(steps: list[tuple[int, str, int]]) -> None:
    room, receivers = Room(), [Growing(str(number)) for number in range(6)]
    for number, what, size in steps:
        receiver = receivers[number]
        if what == "hold":
            with contextlib.suppress(rt.Overloaded):
                room.hold(receiver, size)
        elif what == "forget":
            receiver.drop_unfinished()
            room.unfinished.release(receiver)  # type: ignore[arg-type]
        else:
            room.now_s += size
        assert room.total() == sum(one.unfinished_bytes for one in receivers) // 2**20
        for path in room.told:
            receivers[int(path)].drop_unfinished()
            room.unfinished.release(receivers[int(path)])  # type: ignore[arg-type]
        room.told.clear()
        assert room.total() <= 1000
    for receiver in receivers:
        room.unfinished.release(receiver)  # type: ignore[arg-type]
    assert (room.unfinished.total, room.unfinished._leaving) == (0, 0)


def test_push_stream_stalled_within_large_message_is_interrupted_when_another_needs_memory(
    tmp_path: Path, pki: Path
) -> None:
    async def main() -> None:
        room = Room()
        node = FakeNode(tmp_path / "node")
        node.unfinished = UnfinishedBytes(4 * 2**20, now=lambda: room.now_s)
        root = str(tmp_path / "source")
        sessions = [
            publish(REAL, 3_500_000, root=root, name=name, roll_bytes=1 << 30) for name in ("feed", "other")
        ]
        feed, other = (items_of(REAL, path) for path in sessions)
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            client_of(endpoint, pki) as first,
            client_of(endpoint, pki, "other") as second,
        ):
            await first.say(hello_of(sessions[0]), *feed[:4])
            await until(lambda: node.unfinished.total > 2 * 2**20)
            room.now_s = 1000.0
            await second.say(hello_of(sessions[1]), *other)
            await second.hear_until(end_of(other))
            assert isinstance(await first.failure(), rt.Overloaded)
            await until(lambda: node.unfinished.total == 0)
            async with client_of(endpoint, pki) as again:
                await again.say(hello_of(sessions[0]))
                start = await again.hear()
                assert isinstance(start, PushStart)
                await again.say(*items_of(REAL, sessions[0], start.offset))
                await again.hear_until(end_of(feed))

    run(main())


# --- group sync -------------------------------------------------------------------------------------------


class Waiting:
    """A receiver whose syncs wait until the test releases them."""

    def __init__(self, *, error: RtError | None = None) -> None:
        self.path = "/waiting"
        self.stored = 0
        self.synced: list[int] = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.error = error

    def sync_point(self) -> SyncPoint | None:
        return SyncPoint(None, SegmentId(0, 0), self.stored, 0)  # type: ignore[arg-type]

    def sync_to(self, point: SyncPoint) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=120)
        if self.error is not None:
            raise self.error
        self.synced.append(point.offset)


def test_bytes_stored_during_sync_share_next_sync_and_are_reported_after_it() -> None:
    async def main() -> None:
        sync = GroupCommit(threads=2)
        receiver, told = Waiting(), list[int]()
        sync.add(receiver, lambda point: told.append(point.offset if point else -1), lambda _: None)
        for stored in (1, 2, 3, 4):
            receiver.stored = stored
            sync.request_sync(receiver)
        await until(lambda: receiver.begun.acquire(blocking=False))
        assert told == []
        receiver.go.release()
        await until(lambda: told == [1])
        receiver.go.release()
        await sync.wait_idle()
        assert told == receiver.synced == [1, 4]
        await sync.close()

    run(main())


def test_failed_sync_is_reported_once_and_never_retried() -> None:
    async def main() -> None:
        sync = GroupCommit(threads=1)
        bad, good = Waiting(error=rt.StorageFailed("no")), Waiting()
        failed, told = list[RtError](), list[int]()
        sync.add(bad, lambda _: told.append(-1), failed.append)
        sync.add(good, lambda _: told.append(1), failed.append)
        for receiver in (bad, good):
            receiver.go.release()
            sync.request_sync(receiver)
        await sync.wait_idle()
        assert told == [1]
        assert [str(error) for error in failed] == ["no"]
        sync.request_sync(bad)
        await sync.wait_idle()
        assert bad.begun.acquire(blocking=False)
        assert not bad.begun.acquire(blocking=False)
        await sync.close()

    run(main())


def test_group_commit_syncs_50_receivers_with_2_threads() -> None:
    async def main() -> None:
        sync = GroupCommit(threads=2)
        receivers = [Waiting() for _ in range(50)]
        told: list[Waiting] = []
        for receiver in receivers:
            receiver.go.release()
            sync.add(receiver, lambda _, receiver=receiver: told.append(receiver), lambda _: None)  # type: ignore[misc]
            sync.request_sync(receiver)
        await sync.wait_idle()
        assert set(map(id, told)) == set(map(id, receivers))
        await sync.close()

    run(main())


@pytest.mark.parametrize("is_cancelled_first", [True, False])
def test_push_stream_waits_for_closing_stream_if_stream_between_was_cancelled(
    *, is_cancelled_first: bool
) -> None:
    """Otherwise two streams would write to one copy."""
    hello = encode_push_request(PushHello("s", "feed", bytes(16), None))
    accepted: list[str] = []
    is_closing, may_close = asyncio.Event(), asyncio.Event()

    class Context:
        def __init__(self) -> None:
            self._says = [hello]

        async def read(self) -> bytes:
            if not self._says:
                await asyncio.Event().wait()
            return self._says.pop()

        async def write(self, answer: bytes) -> None: ...

        def peer(self) -> str:
            return "feed"

    class Intake:
        start = PushStart(CLUSTER, 1, 1, "n1")

        async def next_progress(self, told: PushProgress | None) -> PushProgress:
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            is_closing.set()
            await may_close.wait()

    class Store:
        cluster = CLUSTER

        async def accept(self, hello: PushHello, identity: Identity) -> Intake:
            accepted.append(hello.session)
            return Intake()

    async def main() -> None:
        store: Any = Store()
        servicer = PushServicer(store, "s", identify=lambda: Identity("s", "publisher", "feed"))

        def begin() -> asyncio.Task[None]:
            context: Any = Context()
            return asyncio.ensure_future(servicer.push(None, context))

        first = begin()
        await until(lambda: len(accepted) == 1)
        second = begin()
        await is_closing.wait()
        if is_cancelled_first:
            second.cancel()
            await asyncio.wait([second])
            assert servicer.sessions == ["feed"]
        third = begin()
        second.cancel()
        await asyncio.wait([second])
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(accepted) == 1
        may_close.set()
        await until(lambda: len(accepted) == 2)
        third.cancel()
        await asyncio.wait([first, third])
        assert servicer.sessions == []
        assert not servicer._owned

    run(main())


@pytest.mark.parametrize("dedup_id", ["spark", "spark~copy.3"])
def test_certificate_dedup_id_allows_any_tilde_suffix(dedup_id: str) -> None:
    identity = Identity("s", "publisher", "feed", frozenset({"spark"}))
    check_publisher(identity, PushHello("s", "feed~1", bytes(16), dedup_id), "s")
    with pytest.raises(CertificateError, match="does not name that dedup id"):
        check_publisher(identity, PushHello("s", "feed~1", bytes(16), f"x{dedup_id}"), "s")


def test_push_stream_keeps_no_message_while_waiting_for_next(session: str) -> None:
    kept: list[bytes] = []
    held: list[int] = []
    """The number of messages in the stream's memory at each read."""

    class Message(bytes):
        def __del__(self) -> None:
            kept.remove(bytes(self))

    class Context:
        def __init__(self) -> None:
            items = items_of(REAL, session)
            self._left = [encode_push_request(one) for one in items if not isinstance(one, Run)]

        async def read(self) -> bytes | None:
            held.append(len(kept))
            if not self._left:
                return None
            kept.append(self._left.pop(0))
            return Message(kept[-1])

    class Intake:
        async def append(self, item: Item) -> None:
            assert len(kept) == isinstance(item, Chunk), "a chunk is not copied"

    stream: Any = _Stream(Context())  # type: ignore[arg-type]
    intake: Any = Intake()
    asyncio.run(stream._receive(intake))
    assert len(held) > 3
    assert set(held) == {0}
