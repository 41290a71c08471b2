"""The store in the table of a lease: over gRPC, with nodes whose consensus is simulated by a call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from lease_nodes import Cluster, Node, calling, issue_certificates, run, served

from rt.errors import (
    CertificateError,
    Closed,
    Fenced,
    Overloaded,
    ProtocolViolation,
    StorageError,
    StorageFailed,
    Timeout,
)
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.net.lease_client import LeaseCalls, LeaseRow, TablePart
from rt.objects import CheckpointKind, CommitUnknown, OutOfTurn, PersistedObjectSpace, Store
from rt.streams.balancer import table_store
from rt.streams.balancer.table_changes import PART_BYTES
from rt.streams.balancer.table_store import TableStore
from rt.v1 import leases_pb2 as pb
from sequencer.data import lease_manager, table_service
from sequencer.state.apply import apply
from sequencer.state.commands import Command
from sequencer.state.leases import tables
from sequencer.state.leases.leases import ExpireLeases, IdleLease
from sequencer.state.state_codec import decode_state, encode_state

FULL, DIFFERENTIAL = CheckpointKind.FULL, CheckpointKind.DIFFERENTIAL
LEASE = "app/queue/q1"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue_certificates(tmp_path_factory.mktemp("pki"))


class World:
    """Two nodes, and hosts h1~a, h1~b … that take the lease from each other."""

    def __init__(self, cluster: Cluster, nodes: list[Node], calls: LeaseCalls) -> None:
        self.cluster, self.nodes, self.calls = cluster, nodes, calls

    async def take(self, host: str) -> LeaseRow:
        held = self.cluster.state.leases.get(LEASE)
        if held is not None:
            apply(self.cluster.state, ExpireLeases((IdleLease(LEASE, held.token, held.renewals),)))
        (token,) = await self.calls.acquire(host, [LEASE], 60)
        return LeaseRow(LEASE, host, token)

    async def opened(self, host: str) -> TableStore:
        lease = await self.take(host)
        return await asyncio.to_thread(TableStore, self.calls, lease, asyncio.get_running_loop())

    @property
    def rows(self) -> dict[str, bytes]:
        table = self.cluster.state.tables.get(LEASE)
        return {} if table is None else dict(table.rows)

    @contextlib.contextmanager
    def unanswered(self, *, proposals: int = 1) -> Iterator[list[Command]]:
        """Propose each part of a commit at least `proposals` times, without applying it. Answers are lost.

        Yields the list of proposed commands.
        """
        proposed = self.cluster.held_back = list[Command]()
        write_table = self.calls.write_table

        async def write(lease: LeaseRow, part: TablePart, *, timeout_s: float) -> tuple[str, int]:
            before = len(proposed)
            sending = asyncio.create_task(write_table(lease, part, timeout_s=timeout_s))
            while len(proposed) < before + proposals:
                await asyncio.sleep(0.01)
            sending.cancel()
            await asyncio.wait([sending])
            raise Timeout("no node answered")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.calls, "write_table", write)
            patched.setattr(lease_manager, "PROPOSE_AGAIN_S", 0.01)
            yield proposed
        self.cluster.held_back = None


def in_world(pki: Path, work: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    @contextlib.asynccontextmanager
    async def made() -> AsyncIterator[World]:
        cluster = Cluster()
        nodes = [Node(cluster), Node(cluster)]
        async with served(pki, *nodes) as endpoints, calling(endpoints, pki, "h1") as calls:
            yield World(cluster, nodes, calls)

    async def whole() -> None:
        async with made() as world:
            await work(world)

    run(whole)


async def write(store: TableStore, *rows: tuple[str, str, bytes], clear: str = "") -> None:
    writer = store.begin(DIFFERENTIAL)
    if clear:
        writer.clear(clear)
    for category, key, value in rows:
        writer.put(category, key, value)
    await asyncio.to_thread(writer.commit)


def content(store: TableStore) -> dict[str, dict[str, bytes]]:
    reader = store.reader()
    return {category: dict(reader.rows(category)) for category in reader.categories()}


def test_next_host_reads_rows_committed_by_previous_host(pki: Path) -> None:
    async def work(world: World) -> None:
        first = await world.opened("h1~a")
        assert content(first) == {}
        await write(first, ("a", "1", b"one"), ("a", "2", b"two"), ("b", "\0é/%", b"\0\xff"))
        await write(first, ("a", "3", b""), clear="a")
        expected = {"a": {"3": b""}, "b": {"\0é/%": b"\0\xff"}}
        assert content(first) == expected
        second = await world.opened("h1~b")
        assert content(second) == expected
        assert list(second.reader().categories("b")) == ["b"]
        assert second.reader().get("b", "\0é/%") == b"\0\xff"
        assert second.reader().get("c", "1") is None

    in_world(pki, work)


def test_commit_raises_fenced_after_host_lost_lease(pki: Path) -> None:
    async def work(world: World) -> None:
        first = await world.opened("h1~a")
        await write(first, ("a", "1", b"one"))
        second = await world.opened("h1~b")
        await write(second, ("a", "1", b"mine"))
        with pytest.raises(Fenced, match="another host"):
            await write(first, ("a", "1", b"late"))
        assert content(first) == {"a": {"1": b"one"}}, "what was good stays"
        assert world.rows == {"a\x001": b"mine"}
        await write(second, ("a", "2", b"next"))
        with pytest.raises(Fenced, match="not held"):
            await asyncio.to_thread(
                TableStore, world.calls, LeaseRow(LEASE, "h1~a", 1), asyncio.get_running_loop()
            )

    in_world(pki, work)


def test_large_commit_is_applied_whole(pki: Path) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        rows = {f"key-{number:05}": bytes(100 + number % 7) for number in range(5000)}
        await write(store, *(("places", key, value) for key, value in rows.items()))
        again = await world.opened("h1~b")
        assert content(again) == {"places": rows}
        writer = again.begin(DIFFERENTIAL)
        writer.delete_many("places", [*rows][1:])
        await asyncio.to_thread(writer.commit)
        assert content(await world.opened("h1~c")) == {"places": {"key-00000": rows["key-00000"]}}

    in_world(pki, work)


def test_clear_tree_deletes_category_and_subcategories_only(pki: Path) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        await write(store, ("a", "1", b"one"), ("a/x", "1", b"x"), ("ab", "1", b"ab"), ("b", "1", b"b"))
        writer = store.begin(FULL)
        writer.put("a", "gone", b"")
        writer.clear_tree("a")
        writer.put("a", "2", b"two")
        writer.delete_many("a", ["never"])
        await asyncio.to_thread(writer.commit)
        expected = {"a": {"2": b"two"}, "ab": {"1": b"ab"}, "b": {"1": b"b"}}
        assert content(store) == content(await world.opened("h1~b")) == expected

    in_world(pki, work)


def test_rollback_or_invalid_row_changes_no_rows(pki: Path) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        await write(store, ("a", "1", b"one"))
        writer = store.begin(DIFFERENTIAL)
        with pytest.raises(OutOfTurn, match="another writer"):
            store.begin(FULL)
        writer.put("a", "1", b"two")
        writer.rollback()
        with pytest.raises(OutOfTurn, match="committed or rolled back"):
            writer.commit()
        with pytest.raises(StorageError, match="too large"):
            await write(store, ("a", "2", bytes(PART_BYTES)))
        with pytest.raises(StorageError, match="zero byte"):
            await write(store, ("a\0b", "2", b""))
        await write(store, ("a", "2", bytes(PART_BYTES - 200)))
        assert {*world.rows} == {"a\x001", "a\x002"}

    in_world(pki, work)


@pytest.mark.parametrize("happened", [True, False], ids=["happened", "did not happen"])
def test_next_commit_completes_previous_commit_of_unknown_outcome(pki: Path, *, happened: bool) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        await write(store, ("a", "1", b"one"))
        with world.unanswered(proposals=3) as waiting, pytest.raises(CommitUnknown):
            await write(store, ("a", "1", b"two"), ("a", "2", b"new"))
        if happened:
            for command in waiting:  # A node may propose the same command several times.
                world.cluster.commit(command)
        await write(store, ("a", "3", b"three"))
        expected = {"a": {"1": b"two", "2": b"new", "3": b"three"}}
        assert content(store) == expected, "it was made at the latest now"
        for command in waiting:
            world.cluster.commit(command)
        assert content(store) == content(await world.opened("h1~b")) == expected

    in_world(pki, work)


def test_late_commit_of_earlier_store_is_not_mistaken_for_unknown_commit(pki: Path) -> None:
    async def work(world: World) -> None:
        lease = await world.take("h1~a")
        loop = asyncio.get_running_loop()
        earlier = await asyncio.to_thread(TableStore, world.calls, lease, loop)
        later = await asyncio.to_thread(TableStore, world.calls, lease, loop)
        with world.unanswered() as waiting:
            for store, value in ((earlier, b"earlier"), (later, b"later")):
                with pytest.raises(CommitUnknown):
                    await write(store, ("a", "1", value))
        for command in waiting:
            world.cluster.commit(command)
        with pytest.raises(StorageFailed, match="not as this owner left it"):
            await write(later, ("a", "2", b"next"))
        assert world.rows == {"a\x001": b"earlier"}

    in_world(pki, work)


def test_interrupted_commit_raises_commit_unknown_and_changes_no_rows_of_next_owner(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster does not answer, and the host has lost the lease meanwhile."""

    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        monkeypatch.setattr(table_store, "COMMIT_S", 3600.0)
        world.cluster.held_back = []
        committing = asyncio.create_task(write(store, ("a", "1", b"late")))
        while not world.cluster.held_back:
            await asyncio.sleep(0.01)
        store.interrupt()
        with pytest.raises(CommitUnknown, match="interrupted"):
            await committing
        with pytest.raises(Closed, match="interrupted"):
            await write(store, ("a", "2", b"later"))
        waiting, world.cluster.held_back = world.cluster.held_back, None
        following = await world.opened("h1~b")
        for command in waiting:
            world.cluster.commit(command)
        assert content(following) == content(await world.opened("h1~c")) == {}

    in_world(pki, work)


def test_paged_read_restarts_if_commit_occurs_between_pages(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        lease = await world.take("h1~a")
        loop = asyncio.get_running_loop()
        earlier = await asyncio.to_thread(TableStore, world.calls, lease, loop)
        await write(earlier, *(("a", str(number), b"old") for number in range(50)))
        monkeypatch.setattr(table_service, "ANSWER_BYTES", 1)
        read_table, pages = world.calls.read_table, list[int]()

        async def read(lease: LeaseRow, page: int = 0, *, timeout_s: float = 10.0) -> Any:
            pages.append(page)
            if len(pages) == 10:
                late = [("a\0" + str(number), b"new") for number in range(50)]
                part = TablePart(2, b"r" * 16, 0, True, (), (), late)
                assert await world.calls.write_table(lease, part) == ("written", 2)
            return await read_table(lease, page, timeout_s=timeout_s)

        monkeypatch.setattr(world.calls, "read_table", read)
        store = await asyncio.to_thread(TableStore, world.calls, lease, loop)
        assert pages.count(0) == 2
        assert content(store) == {"a": {str(number): b"new" for number in range(50)}}

    in_world(pki, work)


def test_clearing_many_categories_keeps_other_and_later_rows(pki: Path) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        await write(store, *((f"c{number}", "1", b"x") for number in range(20)))
        writer = store.begin(DIFFERENTIAL)
        for number in range(19):
            writer.clear(f"c{number}")
        writer.put("c3", "2", b"y")
        await asyncio.to_thread(writer.commit)
        expected = {"c19": {"1": b"x"}, "c3": {"2": b"y"}}
        assert content(store) == content(await world.opened("h1~b")) == expected

    in_world(pki, work)


def test_key_too_long_raises_storage_error(pki: Path) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        with pytest.raises(StorageError, match="key is too long"):
            await write(store, ("a", "k" * 1023, b""))
        await write(store, ("a", "k" * 1022, b""))

    in_world(pki, work)


def test_commit_fails_on_event_loop_thread_or_with_cancelled_call_or_closed_loop(pki: Path) -> None:
    kept = list[TableStore]()

    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        kept.append(store)
        writer = store.begin(DIFFERENTIAL)
        writer.put("a", "1", b"one")
        with pytest.raises(OutOfTurn, match="another thread"):
            writer.commit()
        world.cluster.held_back = []
        writing = asyncio.create_task(write(store, ("a", "1", b"one")))
        while not world.cluster.held_back:
            await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {writing, asyncio.current_task()}:
            if "write_table" in repr(task):
                task.cancel()
        with pytest.raises(CommitUnknown, match="ended"):
            await writing

    in_world(pki, work)
    writer = kept[0].begin(DIFFERENTIAL)
    with pytest.raises(Closed, match="closed"):
        writer.commit()


def test_parts_of_failed_commit_are_discarded(pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        write_table, sent = world.calls.write_table, 0

        async def failing(lease: LeaseRow, part: TablePart, *, timeout_s: float) -> tuple[str, int]:
            nonlocal sent
            sent += 1
            if sent == 2:
                raise Timeout("no node answered")
            return await write_table(lease, part, timeout_s=timeout_s)

        large = [("a", str(number), bytes(30_000)) for number in range(4)]
        monkeypatch.setattr(world.calls, "write_table", failing)
        with pytest.raises(Timeout):
            await write(store, *large)
        assert world.rows == {}
        await write(store, *large[2:])
        assert {*world.rows} == {"a\x002", "a\x003"}

    in_world(pki, work)


def test_commit_raises_overloaded_if_group_is_full_and_storage_failed_on_older_state(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        await write(store, ("a", "1", b"one"))
        with monkeypatch.context() as patched:
            patched.setattr(tables, "GROUP_BYTES_MAX", 10)
            with pytest.raises(Overloaded, match="no room"):
                await write(store, ("a", "2", b"two"))
        world.cluster.state.tables.by_lease[LEASE].commits = 0
        with pytest.raises(StorageFailed, match="not as this owner left it"):
            await write(store, ("a", "2", b"two"))

    in_world(pki, work)


def test_table_calls_with_foreign_lease_or_invalid_part_are_rejected(pki: Path) -> None:
    async def work(world: World) -> None:
        part = TablePart(1, b"r" * 16, 0, True, (), (), [("a", b"1")])
        for lease in (LeaseRow("strange/x", "h1", 1), LeaseRow(LEASE, "h2", 1)):
            with pytest.raises(CertificateError):
                await world.calls.write_table(lease, part)
            with pytest.raises(CertificateError):
                await world.calls.read_table(lease)
        mine = await world.take("h1")
        for bad in (
            part._replace(request=b""),
            part._replace(commit=0),
            part._replace(part=5000),
            part._replace(puts=[("", b"")]),
            part._replace(puts=[("a", bytes(70_000))]),
            part._replace(puts=[("a", bytes(300_000))]),
        ):
            with pytest.raises(ProtocolViolation):
                await world.calls.write_table(mine, bad)
        assert world.rows == {}

    in_world(pki, work)


def test_node_without_applied_lease_grant_rejects_read(pki: Path) -> None:
    async def work(world: World) -> None:
        mine = await world.take("h1")
        ahead = pb.LeaseRow(name=LEASE, owner="h1", token=mine.token + 1)
        identity = Identity("s", "subscriber", "h1", frozenset(), frozenset({"app"}))
        node = table_service.TableService(world.nodes[0].leasing, identify=lambda: identity)
        with pytest.raises(Unreachable, match="does not know that lease yet"):
            await node.read(pb.TableRead(lease=ahead).SerializeToString())
        assert await world.calls.read_table(mine) == (0, [], 0)

    in_world(pki, work)


def test_object_space_is_saved_and_loaded_across_hosts(pki: Path) -> None:
    async def work(world: World) -> None:
        for turn, host in enumerate(("h1~a", "h1~b", "h1~c")):
            store = await world.opened(host)
            typed: Store = store
            typed.claim("state").release()
            space = PersistedObjectSpace()
            space.load(store.reader())
            places = space.get_or_create_dictionary("places", keys=str)
            assert dict(places.items()) == {f"turn-{each}": each for each in range(turn)}
            places[f"turn-{turn}"] = turn
            writer = store.begin(DIFFERENTIAL)
            space.save(writer)
            await asyncio.to_thread(writer.commit)
            space.on_saved()

    in_world(pki, work)


def test_answered_requests_are_not_returned_by_node_missing_the_commit(pki: Path) -> None:
    """Otherwise an agent that starts again with the same lease would execute them again."""

    async def work(world: World) -> None:
        store = await world.opened("h1~a")
        await write(store, ("a", "x", b"1"))
        await world.calls.post_request(LEASE, b"1" * 16, b"one", 60)
        (asked,) = await store.requests()
        behind, fresh = world.nodes
        behind.follower.state = decode_state(encode_state(world.cluster.state))
        writer = store.begin(DIFFERENTIAL)
        writer.answer(asked.id, asked.until_ns, b"done")
        await asyncio.to_thread(writer.commit)
        for first in (0, 1):
            world.calls._at = first
            assert await store.requests() == []
        fresh.is_up = False
        with pytest.raises(Unreachable):
            await world.calls.waiting_requests(store._lease, 2, timeout_s=0.1)
        assert await world.calls.waiting_requests(store._lease, 1) == [asked], "as far as that node knows"
        store.close()

    in_world(pki, work)
