"""The logs of a node, as its pull server needs them: `replicator.pull.source.LogProvider`."""

from __future__ import annotations

import os
from collections.abc import Callable

from replicator.protocol.known_nodes import KnownNodes
from rt.errors import LogNotFound
from sequencer.config.config import NodeConfig
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.ingest import SessionIngest
from sequencer.sessions.replicas import SessionReplicas


class NodeLogProvider:
    """`nodes` returns the voting members of the cluster, if they have ever changed."""

    def __init__(
        self,
        config: NodeConfig,
        follower: StateFollower,
        replicas: SessionReplicas,
        ingest: SessionIngest,
        *,
        nodes: Callable[[], KnownNodes],
    ) -> None:
        self.node, self.merged = config.name, config.merged_directory
        self._follower, self._replicas, self._ingest = follower, replicas, ingest
        self._nodes = nodes

    @property
    def cluster(self) -> bytes:
        return self._ingest.cluster

    @property
    def epoch(self) -> int:
        return self._follower.epoch

    @property
    def nodes(self) -> KnownNodes:
        return self._nodes()

    @property
    def is_empty(self) -> bool:
        state = self._follower.state
        return state is not None and self._follower.is_caught_up and state.position == 0

    def session(self, session_id: int) -> str:
        path = self._replicas.path(session_id)
        if not os.path.isdir(path):
            raise LogNotFound("this node has no replica of that session", where=self.node, got=session_id)
        return path
