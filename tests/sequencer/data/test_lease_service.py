"""Leases over gRPC: access rights, repeated requests, limits, and the client's choice of node."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lease_nodes import WAIT_S, Cluster, Node, calling, issue_certificates, run, served

from rt.errors import CertificateError, InvalidName, Overloaded, ProtocolViolation, RtError, Timeout
from rt.names import LEASE_NAME_BYTES_MAX
from rt.net import lease_client as lease_calls
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.net.lease_client import LeaseCalls, LeaseRow
from rt.v1 import leases_pb2 as pb
from sequencer.data import lease_manager as leasing_module
from sequencer.data.lease_manager import WAITING_MAX
from sequencer.data.lease_service import (
    CALLS_PER_IDENTITY_MAX,
    REQUEST_BYTES_MAX,
    LeaseService,
)
from sequencer.localcluster.loopback import free_port
from sequencer.state.leases.leases import AcquireLeases
from sequencer.state.leases.tables import TablePartId, WriteTable
from sequencer.state.state import LEASES_PER_GROUP_MAX, LeaseState, SequencerState

REQUEST = b"Q" * 16


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue_certificates(tmp_path_factory.mktemp("pki"))


def test_lease_is_acquired_renewed_listed_and_released_over_any_node(pki: Path) -> None:
    async def work() -> None:
        cluster = Cluster()
        async with (
            served(pki, Node(cluster), Node(cluster)) as endpoints,
            calling(endpoints[:1], pki, "h1") as one,
            calling(endpoints[1:], pki, "h1") as other,
        ):
            names = [f"app/queue/q{number:03}" for number in range(300)]
            tokens = await one.acquire("h1~a", names, 60)
            assert tokens == [*range(1, 301)]
            assert await other.acquire("h1~b", ["app/queue/q000", "other/x"], 60) == [0, 301]
            rows = await other.held("app/queue/")
            assert rows == [LeaseRow(name, "h1~a", token) for name, token in zip(names, tokens, strict=True)]
            assert await other.renew("h1~a", rows) == [True] * 300
            assert await one.renew("h1~b", rows[:2]) == [False, False]
            assert await one.release("h1~a", rows[1:]) == [True] * 299
            assert await one.release("h1~a", rows[:2]) == [True, False]
            assert [row.name for row in await one.held("other/")] == ["other/x"]

    run(work)


def test_lease_calls_for_foreign_owner_or_group_are_rejected(pki: Path) -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.state.leases["third/x"] = LeaseState("h2", 1, 1000, REQUEST, 0)
        async with served(pki, Node(cluster)) as endpoints:
            async with calling(endpoints, pki, "h1") as calls:
                for owner in ("h2", "h2~h1", "h1x"):
                    with pytest.raises(CertificateError, match="owner is the name"):
                        await calls.acquire(owner, ["app/x"], 60)
                for names in (["third/x"], ["app/x", "third/y"], ["app"]):
                    with pytest.raises((CertificateError, InvalidName)):
                        await calls.acquire("h1", names, 60)
                for prefix in ("third/", "third/x", "ap/"):
                    with pytest.raises(CertificateError, match="not for leases of that group"):
                        await calls.held(prefix)
                with pytest.raises(ProtocolViolation, match="by a prefix"):
                    await calls.held("app")
                for change in (calls.renew, calls.release):
                    with pytest.raises(CertificateError):
                        await change("h2", [LeaseRow("third/x", "h2", 1)])
            for name in ("none", "op"):
                async with calling(endpoints, pki, name) as calls:
                    with pytest.raises(CertificateError):
                        await calls.acquire(name, ["app/x"], 60)
                    with pytest.raises(CertificateError):
                        await calls.held("app/")
        assert [*cluster.state.leases] == ["third/x"]
        assert not cluster.state.lease_token

    run(work)


def asked(**fields: Any) -> bytes:
    good = {"request": REQUEST, "owner": "h1", "duration_ms": 1000, "leases": [pb.LeaseRow(name="app/x")]}
    return pb.LeaseRequest(**(good | fields)).SerializeToString()


def service(cluster: Cluster) -> LeaseService:
    identity = Identity("s", "subscriber", "h1", frozenset(), frozenset({"app"}))
    return LeaseService(Node(cluster).leasing, identify=lambda: identity)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        asked(request=b"Q"),
        asked(duration_ms=0),
        asked(duration_ms=2**32 - 1),
        asked(leases=[]),
        asked(leases=[pb.LeaseRow(name="app/x")] * 2),
        asked(leases=[pb.LeaseRow(name=f"app/x{n}") for n in range(257)]),
        asked(leases=[pb.LeaseRow(name="app/../x")]),
        asked(leases=[pb.LeaseRow(name="app/x\n")]),
        asked(owner=""),
        asked(owner="h1~a~b"),
        asked(owner="h1~" + "a" * 300),
    ],
    ids=range(12),
)
def test_invalid_lease_request_is_rejected_without_proposal(data: bytes) -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        with pytest.raises((ProtocolViolation, InvalidName)):
            await service(cluster).acquire(data)
        assert not cluster.held_back

    run(work)


def test_lease_request_repeated_over_another_node_gets_same_tokens(pki: Path) -> None:
    async def work() -> None:
        cluster = Cluster()
        one, other = service(cluster), service(cluster)
        first = pb.LeaseReply.FromString(await one.acquire(asked()))
        again = pb.LeaseReply.FromString(await other.acquire(asked()))
        assert list(first.tokens) == list(again.tokens) == [1]
        assert list(pb.LeaseReply.FromString(await other.acquire(asked(request=b"R" * 16))).tokens) == [0]

    run(work)


def test_lease_request_is_proposed_again_until_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leasing_module, "PROPOSE_AGAIN_S", 0.01)

    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        waiting = asyncio.ensure_future(service(cluster).acquire(asked()))
        while len(cluster.held_back) < 3:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="in progress"):
            await LeaseService(cluster.nodes[0].leasing, identify=lambda: IDENTITY).acquire(asked())
        for command in cluster.held_back:
            cluster.commit(command)
        assert list(pb.LeaseReply.FromString(await waiting).tokens) == [1]
        assert cluster.state.lease_token == 1

    run(work)


IDENTITY = Identity("s", "subscriber", "h1", frozenset(), frozenset({"app"}))


def test_undecided_lease_request_raises_timeout_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leasing_module, "TIMEOUT_S", 0.02)

    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        with pytest.raises(Timeout, match="no decision about the request"):
            await service(cluster).acquire(asked())
        cluster.commit(cluster.held_back[0])
        cluster.held_back = None
        again = await LeaseService(cluster.nodes[0].leasing, identify=lambda: IDENTITY).acquire(asked())
        assert list(pb.LeaseReply.FromString(again).tokens) == [1]

    run(work)


@pytest.mark.parametrize("lack", ["joined", "leader", "caught up", "control"])
def test_lease_calls_raise_unreachable_on_node_cut_off_from_consensus(lack: str) -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        asks = service(cluster)
        node = cluster.nodes[0]
        match lack:
            case "joined":
                node.follower.state = SequencerState(bytes(16))
            case "leader":
                node.follower.standing.leader = ""
            case "caught up":
                node.follower.is_caught_up = False
            case "control":
                node.is_up = False
        for call, data in ((asks.acquire, asked()), (asks.list, b"\x0a\x04app/")):
            with pytest.raises(Unreachable):
                await call(data)
        assert not cluster.held_back

    run(work)


def test_lease_request_over_group_limit_raises_overloaded_without_proposal() -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        for number in range(LEASES_PER_GROUP_MAX):
            cluster.state.leases[f"app/{number}"] = LeaseState("h1", number + 1, 1000, REQUEST, 0)
        with pytest.raises(Overloaded, match="leases of group app"):
            await service(cluster).acquire(asked())
        assert not cluster.held_back, "who asks again and again fills no log"

    run(work)


def test_lease_request_raises_overloaded_if_group_limit_is_reached_before_commit() -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        waiting = asyncio.ensure_future(service(cluster).acquire(asked()))
        while not cluster.held_back:
            await asyncio.sleep(0)
        for number in range(LEASES_PER_GROUP_MAX):
            cluster.state.leases[f"app/{number}"] = LeaseState("h1", number + 1, 1000, REQUEST, 0)
        cluster.commit(cluster.held_back[0])
        with pytest.raises(Overloaded, match="leases of group app"):
            await waiting

    run(work)


def test_concurrent_lease_calls_per_certificate_are_limited() -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        asks = service(cluster)
        calls = [
            asyncio.ensure_future(asks.acquire(asked(request=bytes([number]) * 16)))
            for number in range(CALLS_PER_IDENTITY_MAX)
        ]
        while len(cluster.held_back) < CALLS_PER_IDENTITY_MAX:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="too many calls"):
            await asks.acquire(asked(request=b"R" * 16))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        cluster.held_back = None
        assert list(pb.LeaseReply.FromString(await asks.acquire(asked())).tokens) == [1]

    run(work)


def test_concurrent_lease_requests_per_node_are_limited() -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        leasing = Node(cluster).leasing

        def ask(number: int) -> AcquireLeases:
            return AcquireLeases(bytes([number]) * 16, "h1", 1000, ("app/x",))

        calls = [asyncio.ensure_future(leasing.run(ask(number))) for number in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="too many lease requests"):
            await leasing.run(ask(WAITING_MAX))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(work)


def test_lease_request_is_granted_while_table_writes_are_at_limit() -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        leasing = Node(cluster).leasing

        def write(number: int) -> WriteTable:
            return WriteTable(TablePartId("app/x", "h1", 1, 1, bytes([number]) * 16, 0, True))

        calls = [asyncio.ensure_future(leasing.write(write(number))) for number in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="too many writes"):
            await leasing.write(write(WAITING_MAX))
        cluster.held_back = None
        granted = await leasing.run(AcquireLeases(REQUEST, "h1", 1000, ("app/x",)))
        assert granted.tokens == (1,)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(work)


def test_table_write_is_proposed_again_with_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        cluster = Cluster()
        cluster.held_back = []
        leasing = Node(cluster).leasing
        by = TablePartId("app/x", "h1", 1, 1, REQUEST, 0, True)
        with pytest.raises(Timeout):
            await leasing.write(WriteTable(by))
        assert 1 <= len(cluster.held_back) <= 5

    monkeypatch.setattr(leasing_module, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(leasing_module, "PROPOSE_AGAIN_S", 0.01)
    run(work)


class Refusing(LeaseCalls):
    """Nodes that reject the first `refusing` calls."""

    def __init__(self, refusing: int) -> None:
        super().__init__(["a:1", "b:1", "c:1"], None)
        self.refusing, self.asked = refusing, list[str]()

    async def _call(self, endpoint: str, method: str, data: bytes, timeout_s: float) -> bytes:
        self.asked.append(endpoint)
        if len(self.asked) <= self.refusing:
            raise CertificateError("its own has expired")
        return pb.LeaseList().SerializeToString()


def test_lease_call_tries_other_nodes_after_rejection_and_raises_if_all_reject() -> None:
    async def work() -> None:
        calls = Refusing(2)
        assert await calls.held("app/") == []
        assert len(set(calls.asked)) == 3
        assert await calls.held("app/") == []
        assert calls.asked[-1] == calls.asked[-2], "who answered is asked first"
        with pytest.raises(CertificateError):
            await Refusing(3).held("app/")

    run(work)


class Answering(LeaseCalls):
    """Nodes of which only `good` answers. The others reject the call, or are unreachable."""

    def __init__(self, good: str, refusing: frozenset[str] = frozenset()) -> None:
        super().__init__(["a:1", "b:1", "c:1"], None)
        self._at = 0
        self.good, self.refusing, self.asked = good, refusing, list[str]()

    async def _call(self, endpoint: str, method: str, data: bytes, timeout_s: float) -> bytes:
        self.asked.append(endpoint)
        await asyncio.sleep(0)
        if endpoint in self.refusing:
            raise CertificateError("its own has expired")
        if endpoint != self.good:
            raise Unreachable("not now")
        return pb.LeaseList().SerializeToString()


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_concurrent_lease_calls_all_reach_answering_node_in_first_round(count: int) -> None:
    async def work() -> None:
        calls = Answering("b:1")
        assert (
            await asyncio.gather(*(calls.held("app/", timeout_s=WAIT_S) for _ in range(count)))
            == [[]] * count
        )
        assert len(calls.asked) <= 2 * count, "in the first round"

    run(work)


def test_lease_call_keeps_trying_while_only_one_node_rejects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_calls, "PAUSE_S", 0.001)

    async def work() -> None:
        calls = Answering("", frozenset({"a:1"}))
        asking = asyncio.ensure_future(calls.held("app/", timeout_s=WAIT_S))
        while len(calls.asked) < 15:
            await asyncio.sleep(0.001)
        calls.good = "c:1"
        assert await asking == []

    run(work)


class Failing(LeaseCalls):
    """Nodes that each fail with their own error."""

    def __init__(self, errors: dict[str, RtError]) -> None:
        super().__init__([*errors], None)
        self._at, self.errors, self.asked = 0, errors, set[str]()

    async def _call(self, endpoint: str, method: str, data: bytes, timeout_s: float) -> bytes:
        self.asked.add(endpoint)
        await asyncio.sleep(0)
        raise self.errors[endpoint]


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")))
def test_lease_call_raises_overloaded_before_other_errors_with_rejection_as_cause(
    order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {
        "a": Overloaded("too many"),
        "b": Unreachable("not now"),
        "c": Timeout("too late"),
        "d": CertificateError("its own has expired"),
    }
    calls = Failing({f"{name}:1": errors[name] for name in order})
    clock = SimpleNamespace(monotonic=lambda: 100.0 if len(calls.asked) == len(errors) else 0.0)
    monkeypatch.setattr(lease_calls, "time", clock)

    async def work() -> None:
        with pytest.raises(Overloaded) as raised:
            await calls.held("app/", timeout_s=1)
        assert raised.value.__cause__ is errors["d"], "and it names the refusal"

    run(work)


def test_lease_call_error_lists_reason_of_each_node_if_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"a:1": Unreachable("connection refused", where="a:1"), "b:1": Timeout("too late", where="b:1")}

    async def work(calls: Failing, kind: type[RtError], told: str) -> None:
        clock = SimpleNamespace(monotonic=lambda: 100.0 if len(calls.asked) == len(calls.errors) else 0.0)
        monkeypatch.setattr(lease_calls, "time", clock)
        with pytest.raises(kind, match=told):
            await calls.held("app/", timeout_s=1)

    run(lambda: work(Failing(dict(errors)), Unreachable, "a:1: connection refused; b:1: too late, expected"))
    del errors["a:1"]
    run(lambda: work(Failing(errors), Timeout, "no node answered: got b:1: too late"))


def test_lease_call_skips_unreachable_nodes_and_raises_retriable_error_if_none_answers(pki: Path) -> None:
    async def work() -> None:
        cluster = Cluster()
        async with served(pki, Node(cluster)) as endpoints:
            nobody, other = f"localhost:{free_port()}", f"127.0.0.1:{free_port()}"
            async with calling([nobody, endpoints[0], other], pki, "h1") as calls:
                assert await calls.acquire("h1", ["app/x"], 60, timeout_s=WAIT_S) == [1]
            async with calling([nobody], pki, "h1") as calls:
                with pytest.raises(RtError) as raised:
                    await calls.held("app/", timeout_s=0.3)
                assert raised.value.retriable

    run(work)


def test_largest_lease_request_is_accepted_and_larger_one_is_rejected() -> None:
    async def work() -> None:
        identity = Identity("s", "subscriber", "h1", frozenset(), frozenset({"g" * 128}))
        service = LeaseService(Node(Cluster()).leasing, identify=lambda: identity)
        longest = ["g" * 128 + "/host/" + "h" * 128 + "~" + f"{number:0126}" for number in range(256)]
        rows = [pb.LeaseRow(name=name, token=2**64 - 1) for name in longest]
        owner = f"h1~{'s' * 128}"
        asked = pb.LeaseRequest(request=REQUEST, owner=owner, duration_ms=60_000, leases=rows)
        data = asked.SerializeToString()
        assert LEASE_NAME_BYTES_MAX * 256 < len(data) <= REQUEST_BYTES_MAX
        await service.acquire(data)
        empty = pb.LeaseRequest(leases=[pb.LeaseRow()] * 100_000).SerializeToString()
        with pytest.raises(ProtocolViolation, match="too large"):
            await service.acquire(empty)

    run(work)
