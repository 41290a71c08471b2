"""Nodes that serve leases and their tables over gRPC. Their consensus is a plain function call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from batches import CLUSTER
from receiving_node import tls_of

from rt.net.dev_pki import init_ca, issue
from rt.net.grpc_channel import serve
from rt.net.identity import Identity
from rt.net.lease_client import LeaseCalls
from sequencer.data.lease_manager import LeaseManager
from sequencer.data.lease_service import LEASE_METHOD_ROLES, LeaseService
from sequencer.data.table_service import TABLE_METHOD_ROLES, TableService
from sequencer.ipc.state_follower import StateFollower
from sequencer.state.apply import apply
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import Command
from sequencer.state.state import SequencerState

WAIT_S = 300


class Cluster:
    """Consensus that applies a proposal at once, or when the test commits it. Then it notifies the nodes."""

    def __init__(self) -> None:
        self.state = SequencerState(CLUSTER)
        self.nodes: list[Node] = []
        self.held_back: list[Command] | None = None

    def propose(self, command: Command) -> None:
        command = decode_command(encode_command(command))
        if self.held_back is not None:
            self.held_back.append(command)
            return
        self.commit(command)

    def commit(self, command: Command) -> None:
        outcome = apply(self.state, command)
        for node in self.nodes:
            node.leasing.on_applied(command, outcome)


class Node:
    def __init__(self, cluster: Cluster) -> None:
        self.follower = StateFollower(lambda _: None, lambda *_: None)
        self.follower.state, self.follower.is_caught_up = cluster.state, True
        self.follower.standing.leader = "n1"
        self.is_up = True
        self.leasing = LeaseManager(self.follower, cluster.propose, lambda: self.is_up)
        cluster.nodes.append(self)


def issue_certificates(directory: Path) -> Path:
    """Issue certificates for a node, a subscriber with lease groups, one without, and an operator."""
    init_ca(directory)
    issue(directory, Identity("s", "node", "n1"), loopback=True)
    issue(directory, Identity("s", "subscriber", "h1", frozenset(), frozenset({"app", "other"})))
    issue(directory, Identity("s", "subscriber", "none"))
    issue(directory, Identity("s", "operator", "op"))
    return directory


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(WAIT_S):
            await work()

    asyncio.run(whole())


@contextlib.asynccontextmanager
async def served(pki: Path, *nodes: Node) -> AsyncIterator[list[str]]:
    """Start a server for each node. Yield the endpoints."""
    async with contextlib.AsyncExitStack() as stack:
        endpoints = []
        for node in nodes:
            services = LeaseService(node.leasing), TableService(node.leasing)
            server = await serve(
                "127.0.0.1:0",
                [each.register for each in services],
                roles={**LEASE_METHOD_ROLES, **TABLE_METHOD_ROLES},
                tls=tls_of(pki, "n1"),
            )
            stack.push_async_callback(server.stop)
            endpoints.append(f"localhost:{server.port}")
        yield endpoints


@contextlib.asynccontextmanager
async def calling(endpoints: list[str], pki: Path, name: str) -> AsyncIterator[LeaseCalls]:
    calls = LeaseCalls(endpoints, tls_of(pki, name))
    try:
        yield calls
    finally:
        await calls.close()
