"""The addresses of the other nodes, as the cluster view reports them."""

from __future__ import annotations

from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig


class PeerAddresses:
    """host:port of the gRPC servers of the other members. Until a cluster view arrives: as configured."""

    def __init__(self, config: NodeConfig) -> None:
        self._node = config.name
        self._by_name = {peer: config.members[peer].data for peer in config.peers}

    def update(self, view: pb.Standing) -> None:
        """Take the addresses of a cluster view. A member that never reported its address has the configured
        one, or none.
        """
        known = {one.name: one.address or self._by_name.get(one.name, "") for one in view.nodes}
        self._by_name = {name: known[name] for name in sorted(known) if known[name] and name != self._node}

    def get(self, node: str) -> str | None:
        return self._by_name.get(node)

    def all(self) -> list[str]:
        return [*self._by_name.values()]
