"""Pulls that never read, over loopback mTLS: bounded memory, service to others, budget release."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from log_items import publish
from receiving_node import CLUSTER, FakeNode, make_pki, tls_of, until

import rt
from replicator.protocol.codec import PULL_METHOD, decode_pull_reply, encode_pull_request
from replicator.protocol.handshake import PullHello, PullMerged, PullProgress, PullRange, PullStart
from replicator.protocol.messages import Chunk
from replicator.pull import memory_budget
from replicator.pull.memory_budget import PULL_BYTES_MAX, PullBudget
from replicator.pull.node_call import pull_channel
from rt.errors import Overloaded
from rt.log.disk import REAL
from rt.net.dev_pki import issue
from rt.net.grpc_errors import Unreachable, asking
from rt.net.identity import Identity
from rt.testing.merged import MergedLogBuilder

# isort: split
import grpc.aio

IDENTITIES = 8
PULLS_EACH = 16
MESSAGES = [30 * 2**20, *[2**20] * 24, *[100] * 50]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_pki(tmp_path_factory.mktemp("pki"))
    for number in range(IDENTITIES):
        issue(directory, Identity("s", "subscriber", f"h{number}"))
    return directory


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged log of large and small messages."""
    root = tmp_path_factory.mktemp("node")
    session = publish(REAL, *MESSAGES, root=str(root / "source"), roll_bytes=2**30)
    with MergedLogBuilder(root / "merged", cluster_id=CLUSTER, stream="s") as merged:
        merged.merge_all([session], block_bytes=16 * 2**20)
    return root


def node_of(root: Path, **options: Any) -> FakeNode:
    node = FakeNode(root)
    node.pull.budget = PullBudget(**options)
    return node


async def begin(channel: Any, wanted: PullMerged) -> Any:
    """Start a pull and send its hello."""
    call = channel.get().stream_stream(PULL_METHOD)()
    with contextlib.suppress(Exception):  # A later read reports the error.
        await call.write(encode_pull_request(PullHello("s", wanted)))
    return call


@contextlib.asynccontextmanager
async def hostile(endpoint: str, pki: Path, wanted: PullMerged) -> AsyncIterator[list[Any]]:
    """Pulls of many certificates that never read."""
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for number in range(IDENTITIES):
            channel = await stack.enter_async_context(pull_channel(endpoint, tls_of(pki, f"h{number}")))
            calls += [await begin(channel, wanted) for _ in range(PULLS_EACH)]
        yield calls
        for call in calls:
            call.cancel()


async def read_all(endpoint: str, pki: Path, wanted: PullMerged, size: int) -> bytes:
    """Read everything as a subscriber. If the node rejects the pull, start again from the beginning."""
    while True:
        async with pull_channel(endpoint, tls_of(pki, "sub")) as channel:
            call = await begin(channel, wanted)
            data = bytearray()
            try:
                with asking("node"):
                    while len(data) < size:
                        said = await asyncio.wait_for(call.read(), 120)
                        if not isinstance(said, bytes):
                            await call
                        item = decode_pull_reply(said)
                        data += item.data if isinstance(item, Chunk) else b""
                return bytes(data)
            except Overloaded:
                continue
            finally:
                call.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("topics", [(), ("t1", "t2")], ids=["whole", "filtered"])
def test_pulls_that_never_read_stay_within_budget_while_others_are_served(
    root: Path, pki: Path, topics: tuple[str, ...]
) -> None:
    async def main() -> None:
        node = node_of(root)
        budget = node.pull.budget
        log = (root / "merged" / "log.0.0").read_bytes()
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            async with hostile(endpoint, pki, PullMerged(topics=topics)):
                await until(lambda: sum(budget.counts.values()) == IDENTITIES * PULLS_EACH)
                assert await read_all(endpoint, pki, PullMerged(), len(log)) == log
                assert 0 < budget.used_bytes_peak <= PULL_BYTES_MAX
                assert budget.used_bytes > PULL_BYTES_MAX // 8
            await until(lambda: not budget.counts)
            assert budget.used_bytes == 0

    asyncio.run(main())


def test_seventeenth_pull_of_one_certificate_raises_overloaded(
    root: Path, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No pull reads, and none may end because of that.
    monkeypatch.setattr(memory_budget, "STALLED_S", 3600.0)

    async def main() -> None:
        node = node_of(root)
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            pull_channel(endpoint, tls_of(pki, "h0")) as channel,
            pull_channel(endpoint, tls_of(pki, "sub")) as other,
        ):
            calls = [await begin(channel, PullMerged()) for _ in range(16)]
            for call in calls:
                assert isinstance(decode_pull_reply(await call.read()), PullStart)
            with pytest.raises(Overloaded, match="too many pulls of one certificate"), asking("node"):
                await (await begin(channel, PullMerged())).read()
            assert node.pull.refused["Overloaded"] == 1
            assert isinstance(decode_pull_reply(await (await begin(other, PullMerged())).read()), PullStart)
            calls[0].cancel()
            await until(lambda: node.pull.budget.counts["rt://s/subscriber/h0"] == 15)
            assert isinstance(decode_pull_reply(await (await begin(channel, PullMerged())).read()), PullStart)

    asyncio.run(main())


async def cancel(call: Any, _channel: Any) -> None:
    call.cancel()


async def close_channel(_call: Any, channel: Any) -> None:
    await channel.close()


async def break_a_rule(call: Any, _channel: Any) -> None:
    # A range may have ended before.
    with contextlib.suppress(rt.ProtocolViolation, Unreachable), asking("node"):
        await call.write(encode_pull_request(PullHello("s", PullMerged())))
        while isinstance(await call.read(), bytes):
            pass
        await call.code()


async def say_no_more(call: Any, _channel: Any) -> None:
    await call.done_writing()
    while isinstance(await call.read(), bytes):
        pass


async def say_much(call: Any, _channel: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):  # A range may have ended.
        for position in range(1000):
            await call.write(encode_pull_request(PullProgress(position)))
    call.cancel()


@pytest.mark.parametrize("end", [cancel, close_channel, break_a_rule, say_no_more, say_much])
@pytest.mark.parametrize(
    "wanted",
    [
        PullMerged(),
        PullMerged(topics=("t1",)),
        PullMerged(range=PullRange(20)),
        PullMerged(range=PullRange(0)),
    ],
    ids=["whole", "filtered", "range", "bounds"],
)
def test_budget_is_released_however_a_pull_ends(
    root: Path, pki: Path, wanted: PullMerged, end: Callable[[Any, Any], Any]
) -> None:
    async def main() -> None:
        node = node_of(root)
        budget = node.pull.budget
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            pull_channel(endpoint, tls_of(pki, "sub")) as channel,
        ):
            call = await begin(channel, wanted)
            assert isinstance(decode_pull_reply(await call.read()), PullStart)
            with contextlib.suppress(asyncio.InvalidStateError, asyncio.CancelledError):
                await end(call, channel)
            await until(lambda: not budget.counts)
            assert budget.used_bytes == 0
            assert not node.pull.pulls

    asyncio.run(main())


def test_pulls_waiting_for_budget_leave_nothing_allocated_when_cancelled(root: Path, pki: Path) -> None:
    async def main() -> None:
        node = node_of(root, bytes_max=2**20)
        budget = node.pull.budget
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            pull_channel(endpoint, tls_of(pki, "h0")) as first,
            pull_channel(endpoint, tls_of(pki, "h1")) as second,
        ):
            calls = [await begin(first, PullMerged()) for _ in range(4)]
            await until(lambda: budget.used_bytes > 0)
            others = [await begin(second, PullMerged()) for _ in range(12)]
            await until(lambda: sum(budget.counts.values()) == 16)
            for call in (*others, *calls):
                call.cancel()
            await until(lambda: not budget.counts)
            assert budget.used_bytes == 0
            assert not budget._waiting

    asyncio.run(main())
