"""The logs of this node, as the pull server needs them."""

from __future__ import annotations

import os

from rt.errors import LogNotFound
from sequencer.config.config import NodeConfig
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.ingest import SessionIngest
from sequencer.sessions.replicas import SessionReplicas


class NodeLogs:
    """`replicator.pull.server.LogProvider`."""

    def __init__(
        self, config: NodeConfig, replica: StateFollower, copies: SessionReplicas, intakes: SessionIngest
    ) -> None:
        self._config, self._replica, self._copies, self._intakes = config, replica, copies, intakes

    @property
    def cluster(self) -> bytes:
        """See the protocol."""
        return self._intakes.cluster

    @property
    def epoch(self) -> int:
        """See the protocol."""
        return self._replica.epoch

    @property
    def node(self) -> str:
        """See the protocol."""
        return self._config.name

    @property
    def merged(self) -> str:
        """See the protocol."""
        return self._config.merged_directory

    @property
    def is_empty(self) -> bool:
        """See the protocol."""
        state = self._replica.state
        return state is not None and self._replica.is_caught_up and state.position == 0

    def session(self, session_id: int) -> str:
        """See the protocol."""
        path = self._copies.path(session_id)
        if not os.path.isdir(path):
            raise LogNotFound("this node has no copy of that session", where=self.node, got=session_id)
        return path
