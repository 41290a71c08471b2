"""A task that is cancelled just as its awaited reply arrives still ends as cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from replicator.protocol.grpc_service import read_first
from replicator.pull.client import PullClient
from replicator.pull.local_copy import LocalCopy
from rt.net import grpc_auth
from sequencer.sessions import peer_pull


class Call:
    """A call whose reply the test sends."""

    def __init__(self) -> None:
        self.reply = asyncio.get_running_loop().create_future()

    async def read(self, *_: object) -> object:
        return await self.reply


def _client() -> PullClient:
    return PullClient(LocalCopy("copy", "s"), "s", ["127.0.0.1:1"], None, insecure=True)


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda call: peer_pull._next(call, 60.0), id="an item of a peer"),
        pytest.param(read_first, id="a hello"),
        pytest.param(lambda call: grpc_auth._only_request(call, call), id="a request"),
        pytest.param(lambda call: _client()._read_start(call, "n1"), id="a start"),
    ],
)
def test_cancellation_just_after_reply_arrives_raises_cancelled_error(
    wait: Callable[[Any], Awaitable[object]],
) -> None:
    async def play() -> None:
        call = Call()
        waiting = asyncio.ensure_future(wait(call))
        while not call.reply._callbacks:
            await asyncio.sleep(0)
        call.reply.set_result(b"a reply")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(play())
