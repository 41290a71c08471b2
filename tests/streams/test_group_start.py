"""Start of a group: its options, its first position, gaps in the copy, and stop during creation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from receiving_node import make_pki, tls_of

import rt
from rt.log.format.segment import SegmentId
from rt.net.lease_client import GroupProgress, LeaseRow
from rt.streams.group import group as group_module
from rt.streams.group.group import Group
from rt.streams.group.partitions import Partitions
from rt.testing.merged import MergedLogBuilder

WAIT_S = 60.0


class Nodes:
    """A substitute for `LeaseCalls`. Its nodes answer as the test specifies."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.log_end = 100
        self.is_creating = False
        """Whether another member has the lease to create the group."""
        self.is_silent = False
        self.is_unknown = False
        """Whether no node can release a lease now."""
        self.asked = asyncio.Event()
        self.released: list[float] = []

    def __call__(self, *_: object) -> Nodes:
        return self

    async def acknowledge(self, positions: Mapping[str, int]) -> GroupProgress:
        if positions or self.is_silent:
            self.asked.set()
        if self.is_silent:
            await asyncio.Event().wait()
        for name, position in positions.items():
            self.positions[name] = max(self.positions.get(name, 0), position)
        return GroupProgress(dict(self.positions), 0, self.log_end)

    async def acquire(self, _: str, names: Sequence[str], __: float) -> list[int]:
        self.asked.set()
        self.is_silent = self.is_silent or self.is_unknown
        return [0 if self.is_creating else 7 for _ in names]

    async def release(self, _: str, leases: Sequence[LeaseRow], *, timeout_s: float = 10.0) -> list[bool]:
        self.released.append(timeout_s)
        if self.is_unknown:
            raise rt.Timeout("no node answered")
        return [True for _ in leases]

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


def group_at(nodes: Nodes, pki: Path, root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Group:
    monkeypatch.setattr(group_module, "LeaseCalls", nodes)
    settings = rt.GroupOptions(partitions=2, **options)
    group = Group(root, "s", "sub", endpoints=["127.0.0.1:1"], tls=tls_of(pki, "sub"), options=settings)
    group.subscribe("a/*", lambda _: None)
    return group


def test_invalid_group_options_and_subscriptions_raise_invalid_option(pki: Path, tmp_path: Path) -> None:
    files = {"endpoints": ["127.0.0.1:1"], "tls": tls_of(pki, "sub")}
    with pytest.raises(rt.InvalidOption, match="not options of a group"):
        Group(tmp_path, "s", "sub", **files, options={"partitions": 4})
    group = Group(tmp_path, "s", "sub", **files)
    for pattern in (5, b"a/*", None):
        with pytest.raises(rt.InvalidOption, match="not a pattern of topics"):
            group.subscribe(pattern, print)
    with pytest.raises(rt.InvalidOption, match="text that UTF-8 can encode"):
        group.subscribe("\udcff", print)
    with pytest.raises(rt.InvalidOption, match="not a serializer"):
        group.subscribe("a/*", print, 5)


@pytest.mark.parametrize("case", ["another creates", "no node answers", "no node answers the creator"])
def test_stop_ends_group_during_its_creation(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    async def main() -> None:
        nodes = Nodes()
        nodes.is_creating = case == "another creates"
        nodes.is_silent = case == "no node answers"
        nodes.is_unknown = case == "no node answers the creator"
        group = group_at(nodes, pki, tmp_path, monkeypatch)
        serving = asyncio.create_task(group.serve())
        await nodes.asked.wait()
        await asyncio.to_thread(group.stop)
        async with asyncio.timeout(WAIT_S):
            await serving
        if nodes.is_unknown:
            assert nodes.released, "the lease is given back"
        assert max(nodes.released, default=0) < 2, "not for as long as nodes may take"

    asyncio.run(main())


def test_group_stopped_before_serve_sends_no_request(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        nodes = Nodes()
        group = group_at(nodes, pki, tmp_path, monkeypatch)
        group.stop()
        await group.serve()
        assert not nodes.asked.is_set()

    asyncio.run(main())


def test_group_with_some_stored_positions_starts_at_lowest(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The missing positions may be stored through another node, which does not know the stored ones yet."""

    class Forgetful(Nodes):
        async def acknowledge(self, positions: Mapping[str, int]) -> GroupProgress:
            known = await super().acknowledge(positions)
            return known._replace(positions=positions) if positions else known

    opened: list[int] = []

    def note(_: Group, start: int) -> None:
        opened.append(start)
        raise rt.Closed("that is enough")

    async def main() -> None:
        nodes = Forgetful()
        group = group_at(nodes, pki, tmp_path, monkeypatch, start="latest")
        partitions = Partitions("sub", ["a/*"], 2)
        first, second = map(partitions.position_name, partitions.queues)
        nodes.positions = {first: 30}
        monkeypatch.setattr(Group, "_open", note)
        with pytest.raises(rt.Closed, match="that is enough"):
            await group.serve()
        assert opened == [30]
        assert nodes.positions == {first: 30, second: 100}

    asyncio.run(main())


def copied(root: Path) -> Path:
    """A copy of a merged log of 10 messages, without the first 5."""
    with (
        rt.Publisher(root, "s", publisher_id="feed") as publisher,
        MergedLogBuilder(root / "s" / "merged", cluster_id=bytes(16), stream="s") as merged,
    ):
        for _ in range(2):
            publisher.publish_many([b"v"] * 5, topic="a/1")
            publisher.flush()
            merged.merge_all([publisher.directory])
            merged.roll()
        merged.trim(SegmentId(0, 1))
    return root / "s" / "merged"


@pytest.mark.parametrize(("start", "log_start"), [(0, 0), (3, 0), (0, 4), (5, 0), (0, 5), (7, 5)])
def test_group_raises_gap_if_its_copy_starts_after_group_position_and_log_start(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, log_start: int
) -> None:
    """The gap is raised even with `on_event`, because an event would come too late. Messages that the nodes
    trimmed do not count as missing.
    """

    class Kept(Nodes):
        async def acknowledge(self, positions: Mapping[str, int]) -> GroupProgress:
            return (await super().acknowledge(positions))._replace(log_start=log_start)

    def opened(_: Group, __: int) -> None:
        raise rt.Closed("that is enough")

    async def main() -> None:
        nodes = Kept()
        group = group_at(nodes, pki, tmp_path, monkeypatch, on_event=lambda _: None)
        names = map(Partitions("sub", ["a/*"], 2).position_name, Partitions("sub", ["a/*"], 2).queues)
        nodes.positions = dict.fromkeys(names, start)
        monkeypatch.setattr(Group, "_open", opened)
        if max(start, log_start) < 5:
            with pytest.raises(rt.Gap, match="begins after the group's position") as raised:
                await group.serve()
            assert raised.value.where == str(copy)
            assert raised.value.event == rt.events.SkipForward(start, 5, "not in the copy")
        else:
            with pytest.raises(rt.Closed, match="that is enough"):
                await group.serve()

    copy = copied(tmp_path)
    asyncio.run(main())


def test_stop_ignores_event_loop_closed_at_same_moment(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending:
        """An event loop that is closed between `is_closed` and the next call."""

        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, _: object) -> None:
            raise RuntimeError("Event loop is closed")

    group = group_at(Nodes(), pki, tmp_path, monkeypatch)
    monkeypatch.setattr(group, "_loop", Ending())
    group.stop()
