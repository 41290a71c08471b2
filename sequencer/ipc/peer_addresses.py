"""Where nodes are reached, as the cluster view says."""

from __future__ import annotations

import logging

from replicator.protocol.known_nodes import NO_NODES, KnownNode, KnownNodes
from rt.endpoints import parse_endpoint
from rt.errors import InvalidOption
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig

logger = logging.getLogger("sequencer")


class PeerAddresses:
    """host:port of the gRPC servers of the other members. Until a cluster view arrives: as configured."""

    def __init__(self, config: NodeConfig) -> None:
        self._node = config.name
        self._by_name = {peer: config.members[peer].data for peer in config.peers}

    def update(self, view: pb.Standing) -> None:
        """A member that never reported its address is reached as configured, or not at all."""
        known = {one.name: one.address or self._by_name.get(one.name, "") for one in view.nodes}
        self._by_name = {name: known[name] for name in sorted(known) if known[name] and name != self._node}

    def get(self, node: str) -> str | None:
        return self._by_name.get(node)

    def all(self) -> list[str]:
        return [*self._by_name.values()]


def voters_of(view: pb.Standing) -> KnownNodes | None:
    """The voters for clients. None: the address of one is not known, or cannot be one. Then all are left out,
    because clients count their majority with this list.
    """
    if not view.members_version:
        return NO_NODES
    voters = [(one.name, one.address) for one in view.nodes if not one.is_learner]
    if not all(address for _, address in voters):
        return None
    try:
        nodes = tuple(KnownNode(name, str(parse_endpoint(address))) for name, address in voters)
        return KnownNodes(nodes, view.members_version)
    except (InvalidOption, ValueError) as error:
        logger.warning("members_not_named error=%r", str(error))
        return None
