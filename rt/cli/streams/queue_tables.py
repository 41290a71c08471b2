"""The tables of queues on the nodes of a cluster, and requests to the queues' owners."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import click

from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.formats.console import report
from rt.cli.log_goals import Goal, bounds_of, position_of
from rt.cli.options import FiniteRange, connect_timeout_option, option
from rt.cli.streams.rows import QueueRow, read_queue
from rt.errors import RtError
from rt.streams.requests.request import QueueAnswer, QueueRequest, decode_answer

T = TypeVar("T")

_QUEUES: Final = "/queue/"
node_options = endpoint_options(
    "operator",
    "gRPC endpoints of the nodes of the queue's cluster, separated by commas. They are asked in turn until "
    "one answers.",
    is_required=True,
)
connect_option = connect_timeout_option(
    "A node that cannot be connected to in this time is left for the next one."
)
wait_option = option(
    "--timeout",
    default=60.0,
    type=FiniteRange(1, 3600),
    help="How long the host that owns the queue may take, or, if there is none, a host to become its owner. "
    "The request is not carried out later. Seconds.",
)


def filter_options(command: Callable[..., T]) -> Callable[..., T]:
    """`--group` and `--queue`."""
    group = option("--group", metavar="NAME", help="Only queues of this group of leases.")
    queue = option("--queue", metavar="NAME", help="Only this queue.")
    return group(queue(command))


class QueueTables:
    def __init__(self, nodes: NodeOptions, connect_s: float) -> None:
        self._endpoints, self._tls = nodes.parse()
        self._connect_s = connect_s

    async def queues(self, group: str | None, queue: str | None) -> list[QueueRow]:
        """The queues whose subscriptions this cluster keeps, with these subscriptions. `rt.RtError` if there
        are none.
        """
        from rt.net.lease_client import LeaseCalls

        leases = [
            lease
            for lease in await self._leases()
            if group in (None, lease.partition("/")[0]) and queue in (None, _queue_of(lease))
        ]
        if not leases:
            raise RtError(
                "the cluster keeps no subscriptions of such a queue",
                got=" ".join(filter(None, (group, queue))) or None,
                hint="Hosts keep them here with `cluster_stores`. A queue is kept by its own cluster.",
            )
        _, end = await asyncio.to_thread(bounds_of, self._endpoints, self._tls, self._connect_s)
        calls = LeaseCalls(self._endpoints, self._tls)
        try:
            found = []
            for lease in leases:
                content = await calls.inspect_table(lease)
                owner = "" if content.owner is None else content.owner.owner
                found.append(read_queue(lease, _queue_of(lease), owner, content.rows, end, time.time()))
            return found
        finally:
            await calls.close()

    async def ask(self, queue: QueueRow, request: QueueRequest, timeout_s: float) -> QueueAnswer:
        """The answer of the owner of the queue. `OwnerTimeout` if no answer comes in time."""
        from rt.net.lease_client import LeaseCalls
        from rt.streams.requests.owner_calls import ask_owner

        def warn() -> None:
            report(f"no host serves queue {queue.queue}: the request waits for one, {timeout_s:g} s at most")

        calls = LeaseCalls(self._endpoints, self._tls)
        try:
            content = await ask_owner(calls, queue.lease, request.encode(), timeout_s, on_no_owner=warn)
        finally:
            await calls.close()
        return decode_answer(content).check()

    async def position_of(self, goal: Goal) -> int:
        return await asyncio.to_thread(position_of, goal, self._endpoints, self._tls, self._connect_s)

    async def _leases(self) -> list[str]:
        from rt.net.rest_client import ask, check

        answer = await ask(
            self._endpoints, self._tls, "GET", "/lease-tables", None, connect_timeout_s=self._connect_s
        )
        names = [each["name"] for each in json.loads(check(answer).body)]
        return [name for name in names if _QUEUES in name]


def _queue_of(lease: str) -> str:
    return lease.partition(_QUEUES)[2]


def run(work: Awaitable[T]) -> T:
    """Run it in an event loop of its own."""

    async def whole() -> T:
        return await work

    return asyncio.run(whole())


def one_queue(queues: list[QueueRow]) -> QueueRow:
    """`click.UsageError` if several groups have a queue of that name."""
    if len(queues) > 1:
        raise click.UsageError(f"Several groups have that queue: {', '.join(one.lease for one in queues)}.")
    return queues[0]
