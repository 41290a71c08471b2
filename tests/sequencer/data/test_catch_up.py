"""Catch-up: a node fetches missing input from real peers over loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from batches import CLUSTER
from log_items import give, items_of, publish, session_copy
from receiving_node import FakeNode, make_pki, tls_of, until
from sequencer_core import do_merge, must, new_state

from replicator.protocol.messages import Chunk, Item, LogOffset, Run, SegmentSealed
from replicator.receive.batch_boundaries import read_marks
from rt.errors import CertificateError, Timeout
from rt.log.disk import REAL
from rt.log.format.running_checksum import chain_of_segment
from rt.log.format.segment import SegmentId, encode_segment_header
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import read_header
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import Unreachable
from rt.testing.merged import MergedLogBuilder
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import ClusterMember, NodeConfig
from sequencer.data.process import DataProcess
from sequencer.localcluster.loopback import free_port
from sequencer.merged import catch_up as catch_up_module
from sequencer.merged.catch_up import CatchUp
from sequencer.sessions import peer_pull
from sequencer.sessions.input_planner import FetchedRange, SessionRange, plan_ranges
from sequencer.sessions.peer_pull import catch_up
from sequencer.state.apply import apply
from sequencer.state.apply_result import RunOpened
from sequencer.state.commands import MergeRange
from sequencer.state.session_commands import OpenRun
from sequencer.state.state import ActiveRun as OpenLife
from sequencer.state.state import Session
from sequencer.state.state_codec import encode_state
from sequencer.state.write_plan import WritePlan, encode_write_plan


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


class Bench:
    """A node n1 that has plans but none of their input. The test decides which input its peers have."""

    def __init__(self, root: Path, pki: Path) -> None:
        self.root, self._tls = root, tls_of(pki, "n1")
        self.path = publish(REAL, *[1500] * 12, root=str(root / "publisher"))
        self.items = items_of(REAL, self.path)
        ports = {name: free_port() for name in ("n1", "n2", "n3")}
        self.ports = ports
        self.config = NodeConfig(
            stream="s",
            name="n1",
            directory=str(root / "node"),
            members={
                name: ClusterMember(f"localhost:{free_port()}", f"localhost:{port}")
                for name, port in ports.items()
            },
            ca=str(pki / "ca.crt"),
            cert=str(pki / "n1.crt"),
            key=str(pki / "n1.key"),
            listen="127.0.0.1",
            raft_port=free_port(),
            data_port=ports["n1"],
            rest_port=0,
            health_port=0,
        )
        self.state = new_state()
        self.plans = self._merged()
        assert len(self.plans) >= 3

    def _merged(self) -> list[WritePlan]:
        first = read_header(REAL, self.path, SegmentId(0, 0))
        assert first is not None
        incarnation = first.origin
        must(RunOpened, apply(self.state, OpenRun("feed", incarnation, None, 0, first.run_id)))
        plans = []
        roll = 0
        while (header := self._header(roll)) is not None:
            chain = chain_of_segment(encode_segment_header(header))
            start, number = 64, header.first
            # Use several instructions for each segment, so that consecutive ranges are joined.
            for mark in read_marks(REAL, self.path, SegmentId(0, roll)):
                one = MergeRange(
                    1, 0, roll, start, mark.offset, number, mark.number - number, chain, mark.chain
                )
                plans.append(do_merge(self.state, one))
                start, number, chain = mark.offset, mark.number, mark.chain
            roll += 1
        self.count = number
        self.segments = roll
        return plans

    def _header(self, roll: int) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return read_header(REAL, self.path, SegmentId(0, roll))
        return None

    def give(self, peer: str, segments: Sequence[int]) -> Path:
        """A peer has the copies of these segments, which follow each other."""
        path = self.root / peer / "sessions" / "feed"
        replica = session_copy(REAL, str(path), self.path)
        give(replica, [one for one in self.items if _roll(one) <= max(segments)])
        replica.trim(SegmentId(0, min(segments)), TrimReason.MERGED)
        replica.close()
        return path

    @contextlib.asynccontextmanager
    async def serving(self, *names: str) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for name in names:
                node = FakeNode(self.root / name, node=name)
                node.cluster = CLUSTER
                await stack.enter_async_context(node.serving(self._tls, self.ports[name]))
            yield

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[DataProcess]:
        """The data process of n1, after it has received the plans."""
        data = DataProcess(self.config)
        data.link.send = lambda _: None  # type: ignore[method-assign]
        try:
            plans = [encode_write_plan(plan) for plan in self.plans]
            snapshot = pb.ControlSnapshot(index=1, state=encode_state(self.state), plans=plans)
            await data._on_message(pb.ToData(snapshot=snapshot))
            data.tasks.keep(data.catch_up.run())
            yield data
            assert data.failure is None
        finally:
            await data._close()

    async def merged_whole(self, data: DataProcess) -> None:
        assert data.merger is not None
        merger = data.merger
        await until(lambda: merger.position == self.count or data.failure)
        assert data.merged_log.fetched.total_bytes == 0, "what is merged is not kept in memory"


def _roll(item: Item) -> int:
    if isinstance(item, SegmentSealed):
        return item.end_offset.roll
    return item.start.roll if isinstance(item, Chunk) else 0


@pytest.fixture
def bench(tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(catch_up_module, "POLL_S", 0.01)
    monkeypatch.setattr(catch_up_module, "RETRY_S", 0.01)
    return Bench(tmp_path, pki)


@pytest.fixture
def never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async def copies_merged_bytes(*_: object, **__: object) -> None:
        raise AssertionError("merged bytes are asked for")

    monkeypatch.setattr(catch_up_module, "catch_up", copies_merged_bytes)


@pytest.mark.usefixtures("never_held")
def test_merged_input_held_by_single_peer_is_fetched(
    bench: Bench,
) -> None:
    bench.give("n3", range(bench.segments))

    async def play() -> None:
        async with bench.serving("n2", "n3"), bench.running() as data:
            await bench.merged_whole(data)

    asyncio.run(play())


@pytest.mark.usefixtures("never_held")
def test_missing_ranges_are_fetched_from_the_peer_holding_each(bench: Bench) -> None:
    middle = bench.segments // 2
    bench.give("n2", range(middle))
    bench.give("n3", range(middle, bench.segments))

    async def play() -> None:
        async with bench.serving("n2", "n3"), bench.running() as data:
            await bench.merged_whole(data)

    asyncio.run(play())


@pytest.mark.usefixtures("never_held")
def test_ranges_corrupt_on_one_peer_are_fetched_from_another(bench: Bench) -> None:
    for peer in ("n2", "n3"):
        bench.give(peer, range(bench.segments))
    for roll in range(bench.segments):
        path = bench.root / "n2" / "sessions" / "feed" / f"log.0.{roll}"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    async def play() -> None:
        async with bench.serving("n2", "n3"), bench.running() as data:
            await bench.merged_whole(data)

    asyncio.run(play())


@pytest.mark.usefixtures("never_held")
def test_merging_resumes_once_a_peer_has_the_missing_input(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with bench.running() as data:
            await until(lambda: "missing_bytes_not_found" in caplog.text)
            bench.give("n2", range(bench.segments))
            async with bench.serving("n2"):
                await bench.merged_whole(data)

    asyncio.run(play())


@pytest.mark.usefixtures("never_held")
def test_input_arriving_while_peers_are_asked_is_not_reported_missing(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = CatchUp._merged_ends
    asked = asyncio.Event()

    async def ask_slowly(self: CatchUp) -> dict[str, int]:
        merger = self._merged_log.merger
        assert merger is not None
        asked.set()
        while merger.position < bench.count:
            await self._fetch_ranges(merger)
            merger.wake()
            await asyncio.sleep(0.01)
        return await ask(self)

    monkeypatch.setattr(CatchUp, "_merged_ends", ask_slowly)

    async def play() -> None:
        async with bench.running() as data:
            await asked.wait()
            bench.give("n2", range(bench.segments))
            async with bench.serving("n2"):
                await bench.merged_whole(data)
                await until(lambda: data.catch_up._wait is None)

    asyncio.run(play())
    assert "missing_bytes_not_found" not in caplog.text


@pytest.mark.usefixtures("never_held")
def test_silence_timeout_doubles_while_only_peer_with_input_is_too_slow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer behaves like a machine where each message takes 5 s."""
    bench.give("n2", range(bench.segments))
    waited: list[float] = []
    ask = {name: getattr(catch_up_module, name) for name in ("fetch_range", "merged_end")}

    def slow(name: str) -> Callable[..., Awaitable[Any]]:
        async def asked(*arguments: Any) -> Any:
            silence_s = arguments[-1]
            waited.append(silence_s)
            if silence_s < 5:
                raise Timeout("a peer sent nothing", expected=f"a message within {silence_s:g} s")
            return await ask[name](*arguments)

        return asked

    for name in ask:
        monkeypatch.setattr(catch_up_module, name, slow(name))

    async def play() -> None:
        async with bench.serving("n2"), bench.running() as data:
            await bench.merged_whole(data)
            await until(lambda: data.catch_up._silence_s == 2)  # Nothing is missing at this point.

    asyncio.run(play())
    assert sorted(set(waited)) == [2, 4, 8]


@pytest.mark.usefixtures("never_held")
def test_silent_peer_is_asked_after_other_peers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each session would first wait for that peer's silence timeout."""
    bench.give("n3", range(bench.segments))
    wanted = plan_ranges(bench.plans, lambda _: False)[0]
    silent, asked = bench.config.members["n2"].data, list[str]()

    async def ask(channel: Channel, *_: object) -> FetchedRange:
        asked.append(channel.target)
        if channel.target == silent:
            raise Timeout("a peer sent nothing")
        raise Unreachable("the node cannot be reached")

    async def play() -> None:
        nonlocal silent
        async with bench.serving("n3"), bench.running() as data:
            await bench.merged_whole(data)
            monkeypatch.setattr(catch_up_module, "fetch_range", ask)
            data.catch_up._holders.clear()
            for _ in range(2):
                assert await data.catch_up._fetch_range(wanted) == 0
            silent = ""
            for _ in range(2):
                assert await data.catch_up._fetch_range(wanted) == 0

    asyncio.run(play())
    n2, n3 = (bench.config.members[name].data for name in ("n2", "n3"))
    assert asked == [n2, n3, n3, n2, n3, n2, n2, n3]


@pytest.mark.usefixtures("never_held")
def test_unreadable_certificate_delays_fetch_and_node_continues(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if the process has no file descriptor left."""
    bench.give("n2", range(bench.segments))
    told = "cannot read the file"

    def unreadable(*_: object) -> Channel:
        raise CertificateError(told, where="ca.crt", got="Too many open files")

    async def play() -> None:
        async with bench.serving("n2"), bench.running() as data:
            await until(lambda: "range_not_fetched" in caplog.text and told in caplog.text)
            monkeypatch.setattr(catch_up_module, "open_channel", open_channel)
            await bench.merged_whole(data)

    monkeypatch.setattr(catch_up_module, "open_channel", unreadable)
    caplog.set_level("INFO")
    asyncio.run(play())


@pytest.mark.usefixtures("never_held")
def test_truncated_replica_is_completed_from_peer(bench: Bench) -> None:
    bench.give("n2", range(bench.segments))
    mine = Path(bench.config.sessions_directory) / "1"
    replica = session_copy(REAL, str(mine), bench.path)
    give(replica, bench.items)
    replica.close()

    async def play() -> None:
        async with bench.serving("n2"), bench.running() as data:
            (mine / "log.0.1").write_bytes((mine / "log.0.1").read_bytes()[:200])
            await bench.merged_whole(data)

    asyncio.run(play())


def test_ranges_fetched_ahead_are_bounded_in_memory_while_next_input_is_missing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers have trimmed the input of the first plan, and still have the input of later plans."""
    blocks = [block for plan in bench.plans for block in plan.blocks if not block.is_declaration]
    bytes_max = 1 + sum(block.end - block.start for block in blocks if block.roll == 0)
    largest = max(block.end - block.start for block in blocks)
    monkeypatch.setattr(catch_up_module, "RANGES_BYTES_MAX", bytes_max)
    bench.give("n2", range(1, bench.segments))
    most: list[int] = []
    asked: list[None] = []

    async def play() -> None:
        async with bench.serving("n2"), bench.running() as data:
            fetched, ends = data.merged_log.fetched, data.catch_up._merged_ends
            add = fetched.add

            def counted(one: FetchedRange) -> None:
                add(one)
                most.append(fetched.total_bytes)

            async def merged_ends() -> dict[str, int]:
                asked.append(None)
                return await ends()

            monkeypatch.setattr(fetched, "add", counted)
            monkeypatch.setattr(data.catch_up, "_merged_ends", merged_ends)
            await until(lambda: len(asked) >= 2 or data.failure)

    asyncio.run(play())
    assert most, "what later plans need is fetched ahead"
    assert max(most) <= bytes_max + largest


def test_merged_bytes_are_copied_when_no_peer_has_next_input_but_peers_have_later_input(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a busy stream there is always more later input, so the node does not wait until all of it has
    arrived.
    """
    bench.give("n3", range(1, bench.segments))
    merged = MergedLogBuilder(str(bench.root / "n2" / "merged"), cluster_id=CLUSTER, stream="s")
    merged.merge_all([bench.path])
    merged.sync()
    asked: list[SegmentId] = []
    asked_before_copying: list[list[SegmentId]] = []
    fetch_range = catch_up_module.fetch_range

    async def fetch(channel: Channel, stream: str, wanted: SessionRange, *rest: Any) -> FetchedRange:
        asked.append(wanted.segment)
        return await fetch_range(channel, stream, wanted, *rest)

    async def replica(*_: object, **__: object) -> None:
        asked_before_copying.append(list(asked))
        raise Unreachable("the log of this peer is no merge of the plans")

    monkeypatch.setattr(catch_up_module, "fetch_range", fetch)
    monkeypatch.setattr(catch_up_module, "catch_up", replica)

    async def play() -> None:
        async with bench.serving("n2", "n3"), bench.running() as data:
            await until(lambda: asked_before_copying or data.failure)

    asyncio.run(play())
    merged.close()
    first = asked_before_copying[0]
    assert first.count(SegmentId(0, 0)) == 2, "each peer is asked once"
    assert len(first) > 2


def test_copying_of_merged_bytes_ends_when_no_more_may_arrive(
    bench: Bench, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_pull, "IDLE_S", 0.05)
    merged = MergedLogBuilder(str(bench.root / "n2" / "merged"), cluster_id=CLUSTER, stream="s")
    merged.merge_all([bench.path])
    merged.sync()
    asked: list[int] = []

    async def may_arrive(position: int) -> bool:
        asked.append(position)
        return position < bench.count

    async def play() -> None:
        async with bench.serving("n2"):
            target, tls = str(bench.root / "mine"), tls_of(pki, "n1")
            endpoint = f"localhost:{bench.ports['n2']}"
            async with asyncio.timeout(60):
                await catch_up(target, "s", [endpoint], tls, lambda *_: False, may_arrive=may_arrive)

    asyncio.run(play())
    merged.close()
    assert asked[-1] == bench.count
    assert asked.count(bench.count) == 1


def test_a_copy_goes_on_without_waiting_for_a_silent_peer_if_another_one_has_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = bench.config.members["n3"].data
    cancelled: list[str] = []

    async def merged_end(channel: Channel, *_: object) -> int:
        if channel.target == silent:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(channel.target)
        return 7

    async def play() -> None:
        bench.give("n2", range(bench.segments))
        async with bench.serving("n2"), bench.running() as data:
            await bench.merged_whole(data)
            monkeypatch.setattr(catch_up_module, "merged_end", merged_end)
            assert await data.catch_up._may_arrive(6)

    asyncio.run(play())
    assert cancelled == [silent]


def test_following_session_fetch_receives_new_bytes_until_peer_is_idle(
    bench: Bench, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_pull, "SILENCE_S", 0.5)
    active = next(one for one in bench.items if isinstance(one, Run))
    header = bench._header(0)
    path = bench.root / "n2" / "sessions" / "feed"
    theirs = session_copy(REAL, str(path), bench.path)
    give(theirs, [one for one in bench.items if _roll(one) <= 0])
    told = theirs.next_offset
    assert told is not None
    later = [one for one in bench.items if isinstance(one, Run) or _roll(one) > 0]
    session = Session(1, "feed", header.origin, None, active_runs=(OpenLife(0, header.run_id),))
    stored: list[LogOffset] = []

    async def play() -> None:
        async with bench.serving("n2"), bench.running() as data:
            replica = await data.replicas.open_replica(session)
            channel = open_channel(f"localhost:{bench.ports['n2']}", tls_of(pki, "n1"))
            following = asyncio.ensure_future(
                peer_pull.fetch_session(data.replicas, replica, active, told, "s", channel, follows=True)
            )
            await until(
                lambda: replica.receiver.next_offset is not None and replica.receiver.next_offset >= told
            )
            assert not following.done()
            give(theirs, later)
            async with asyncio.timeout(60):
                await following
            stored.append(replica.receiver.next_offset or told)
            await channel.close()

    asyncio.run(play())
    assert stored == [theirs.next_offset]
    theirs.close()
