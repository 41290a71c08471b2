"""The nodes that one pulling client asks in turn: those of its endpoints, and the members that nodes name.

Invariants:
- Members are asked before nodes that have left the cluster.
- A node that is no member is followed only if no member can be followed, because its log may not grow any
  more.

For one thread, except `close_unused` and `close`, which are called in the loop of the channels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from replicator.protocol.handshake import PullStart
from replicator.protocol.known_nodes import ClientEndpoints, KnownNodes
from rt.errors import RtError
from rt.net.grpc_channel import Channel
from rt.net.grpc_errors import Unreachable

logger = logging.getLogger("replicator")


class NodeChannels:
    """Channels to the nodes of a cluster. `connect` opens one; `at`: the index of the one to ask first."""

    def __init__(self, seeds: Sequence[str], connect: Callable[[str], Channel], at: int) -> None:
        self._connect = connect
        self._endpoints = ClientEndpoints(seeds)
        self._channels = {seed: connect(seed) for seed in seeds}
        self.target = seeds[at]
        """The endpoint that is asked now."""
        self._told_version = 0  # Version of the member list that the last asked node named.
        self._renewed = ("", -1)

    @property
    def known(self) -> KnownNodes:
        return self._endpoints.known

    @property
    def targets(self) -> list[str]:
        """The endpoints, in the order in which they are asked."""
        return sorted(self._endpoints.in_use, key=lambda one: not self._may_be_member(one))

    @property
    def counted(self) -> list[str]:
        """The endpoints that lead to a member, or may lead to one."""
        targets = self.targets
        return self._endpoints.counted(targets, {one: self._endpoints.stands_for(one) for one in targets})

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self.known.nodes) or len(self._channels)

    def channel(self) -> Channel:
        """The channel to the endpoint that is asked now. `Unreachable` if it cannot be used."""
        if self.target not in self._channels:
            try:
                self._channels[self.target] = self._connect(self.target)
            except RtError as error:
                self._endpoints.exclude(self.target)
                raise Unreachable(str(error), where=self.target) from error
        return self._channels[self.target]

    def advance(self) -> None:
        """Ask the next node."""
        targets = self.targets
        at = targets.index(self.target) + 1 if self.target in targets else 0
        self.target = targets[at % len(targets)]

    def record_answer(self, start: PullStart, failed: Collection[str]) -> None:
        """Record that the node that is asked has answered, and is of the right cluster and epoch.

        `Unreachable` if it is another node than expected. Also if it is no member, and another endpoint did
        not fail yet.
        """
        self._told_version = start.nodes.version
        expected = self._endpoints.node_of(self.target)
        is_right = self._endpoints.record_answer(self.target, start.node)
        if self._endpoints.learn(start.cluster, start.epoch, start.nodes):
            known = self.known
            nodes = ",".join(f"{node.name}={node.endpoint}" for node in known.nodes)
            logger.info("members_learned version=%d nodes=%s", known.version, nodes)
        if not is_right:
            raise Unreachable(
                "the endpoint of a member leads to another node",
                where=self.target,
                got=start.node,
                expected=expected,
            )
        others = [target for target in self.targets if target != self.target]
        if not self.known.has_member(start.node) and not all(one in failed for one in others):
            raise Unreachable("the node is no member of the cluster", where=self.target, got=start.node)

    def record_failure(self) -> None:
        """The node that is asked has failed."""
        self._endpoints.record_failure(self.target)

    def is_renewal(self) -> bool:
        """Whether to ask the same node again at once, because it ended a stream to name the new members."""
        told = self.target, self._told_version
        if self._renewed[0] == told[0] and self._renewed[1] >= told[1]:
            return False
        self._renewed = told
        return True

    async def close_unused(self) -> None:
        """Close the channels to endpoints that are not used any more."""
        left = self._channels.keys() - {*self._endpoints.in_use, self.target}
        await _closed([self._channels.pop(target) for target in left])

    async def close(self) -> None:
        await _closed(list(self._channels.values()))

    def _may_be_member(self, target: str) -> bool:
        node = self._endpoints.node_of(target)
        return node is None or self.known.has_member(node)


async def _closed(channels: Sequence[Channel]) -> None:
    await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)
