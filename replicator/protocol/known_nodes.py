"""The endpoints that a client uses: its configured ones, and those of the members that nodes name. Pure.

A node names the members of its cluster when it accepts a stream. So a client that reaches one node learns of
all members, and goes on when every node that it was configured with has been replaced.

Invariants:
- The configured endpoints, the *seeds*, are always used. A learned endpoint is used in addition, if no seed
  leads to its node.
- A node is identified by its name. A seed may lead to it by an address that the cluster does not know, for
  example through a proxy.
- Only the newest list counts: the list with the highest version in the latest epoch. A list of another
  cluster is ignored.
- Before the first change of the list, nodes name no members, and only the seeds are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from rt.cluster_epoch import is_later, line_of
from rt.endpoints import check_endpoints
from rt.names import check_name

MEMBERS_MAX: Final = 7
SEED_FAILURES_MAX: Final = 3
"""After this number of failures in a row, a seed does not count as an endpoint of its node any more, and the
learned endpoint of the node is tried.
"""
_VERSION_END: Final = 2**63


class KnownNode(NamedTuple):
    """A voting member: its name, and the "host:port" of its gRPC server."""

    name: str
    endpoint: str


class KnownNodes(Struct, frozen=True):
    """The voting members of a cluster. `version` rises with each change; 0: the list has never changed, and
    names no node.
    """

    nodes: tuple[KnownNode, ...] = ()
    version: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.version < _VERSION_END:
            raise ValueError(f"version {self.version} of the list of nodes is out of range")
        if len(self.nodes) > MEMBERS_MAX or bool(self.nodes) != bool(self.version):
            raise ValueError(
                f"{len(self.nodes)} nodes in version {self.version}: 1 to {MEMBERS_MAX}, none in version 0"
            )
        for node in self.nodes:
            check_name(node.name, kind="node")
        if len(self.names) != len(self.nodes):
            raise ValueError(f"a node is named twice: {sorted(node.name for node in self.nodes)}")
        endpoints = tuple(node.endpoint for node in self.nodes)
        if check_endpoints(endpoints, where="endpoints of nodes") != endpoints:
            raise ValueError(f"an endpoint that is not in its shortest form: {', '.join(endpoints)}")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(node.name for node in self.nodes)

    def has_member(self, node: str) -> bool:
        """Whether `node` is a member. Before the first change of the list, any node counts as a member."""
        return not self.version or node in self.names


NO_NODES: Final = KnownNodes()


class EndpointState(Struct, frozen=True):
    """What a client knows of an endpoint: the `node` that answered last, and its `failures` since then."""

    node: str | None = None
    failures: int = 0

    @property
    def was_tried(self) -> bool:
        return self.node is not None or self.failures > 0

    @property
    def served_node(self) -> str | None:
        return self.node if self.failures < SEED_FAILURES_MAX else None


def choose_endpoints(
    seeds: Mapping[str, EndpointState], known: KnownNodes, wrong: Collection[str] = ()
) -> tuple[str, ...]:
    """The endpoints to use: the seeds, then the learned endpoints. Learned endpoints in `wrong` led to
    another node, and are left out.

    Until each seed has answered or failed once, only seeds are used: any seed may lead to any node.
    """
    if not all(seed.was_tried for seed in seeds.values()):
        return tuple(seeds)
    served = {seed.served_node for seed in seeds.values()}
    learned = (node.endpoint for node in known.nodes if node.name not in served)
    return (*seeds, *(one for one in learned if one not in seeds and one not in wrong))


class ClientEndpoints:
    """The endpoints of one client, as it learns of them. `seeds` are the configured ones."""

    def __init__(self, seeds: Sequence[str]) -> None:
        self.known = NO_NODES
        self._seeds = {seed: EndpointState() for seed in seeds}
        self._wrong: set[str] = set()
        """Learned endpoints that are not used before the list changes."""
        self._cluster, self._epoch = b"", 0  # Of the nodes that answered.

    @property
    def in_use(self) -> tuple[str, ...]:
        """The endpoints to use now, the seeds first."""
        return choose_endpoints(self._seeds, self.known, self._wrong)

    def node_of(self, endpoint: str) -> str | None:
        """The node to which the endpoint leads, as far as it is known. For a learned endpoint, it is the node
        in the list.
        """
        if endpoint in self._seeds:
            return self._seeds[endpoint].node
        return next((node.name for node in self.known.nodes if node.endpoint == endpoint), None)

    def stands_for(self, endpoint: str) -> str | None:
        """As `node_of`, but None for a seed that keeps failing."""
        return self._seeds[endpoint].served_node if endpoint in self._seeds else self.node_of(endpoint)

    def is_beside(self, endpoint: str, reached: Collection[str]) -> bool:
        """Whether the endpoint can be ignored.

        It can if it leads to a node that is no member, or to a node that other endpoints have `reached`. It
        also can if it never answered, and other endpoints have reached all members.
        """
        node = self.node_of(endpoint)
        if not self.known.version:
            return False
        if node is None:
            return self.known.names <= set(reached)
        return node not in self.known.names or node in reached

    def counted(self, targets: Iterable[str], reached: Mapping[str, str | None]) -> list[str]:
        """The targets that lead to a member, or may lead to one. `reached`: by target, the node to which it
        leads.
        """
        return [
            target
            for target in targets
            if not self.is_beside(target, [node for one, node in reached.items() if node and one != target])
        ]

    def record_answer(self, endpoint: str, node: str) -> bool:
        """Record that `node` answered. Return False if the endpoint is a learned endpoint of another node:
        then it is not used again before the list changes.
        """
        if endpoint in self._seeds:
            self._seeds[endpoint] = EndpointState(node)
        elif self.node_of(endpoint) != node:
            self._wrong.add(endpoint)
            return False
        return True

    def record_failure(self, endpoint: str) -> None:
        if (state := self._seeds.get(endpoint)) is not None:
            self._seeds[endpoint] = EndpointState(state.node, state.failures + 1)

    def exclude(self, endpoint: str) -> None:
        """Do not use a learned endpoint before the list changes."""
        self._wrong.add(endpoint)

    def learn(self, cluster: bytes, epoch: int, nodes: KnownNodes) -> bool:
        """Record that a node of `cluster`, in `epoch`, named `nodes`. Return whether they are the known nodes
        from now on, and are different from before.

        After a forced reset the list of the new line counts, even if it never changed. The list of the other
        line may name nodes that the new line left out.
        """
        if self._cluster not in {b"", cluster}:
            return False
        is_newer, is_forced = nodes.version > self.known.version, False
        if self._cluster and epoch != self._epoch:
            if not is_later(self._epoch, epoch):
                return False
            is_newer, is_forced = nodes.version > 0, line_of(epoch) != line_of(self._epoch)
        self._cluster, self._epoch = cluster, epoch
        if not is_newer and not is_forced:
            return False
        is_change, self.known = nodes != self.known, nodes
        self._wrong.clear()
        return is_change
