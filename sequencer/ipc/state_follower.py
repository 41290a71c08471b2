"""The sequencer's state in the data process: a snapshot, then the committed commands; and the cluster view.

For one thread. Invariants:
- It uses the same `apply` as the control process, so everything in it was committed.
- It never goes back, so that this process does not forget a fence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from replicator.protocol.known_nodes import NO_NODES, KnownNode, KnownNodes
from rt.endpoints import parse_endpoint
from rt.errors import InvalidOption
from rt.net.grpc_errors import Unreachable
from rt.v1 import sequencer_pb2 as pb
from sequencer.state.apply import apply
from sequencer.state.apply_result import Outcome
from sequencer.state.command_codec import decode_command
from sequencer.state.commands import Command
from sequencer.state.state import SequencerState, Session
from sequencer.state.state_codec import decode_state
from sequencer.state.write_plan import WritePlan, decode_write_plan

logger = logging.getLogger("sequencer")

NO_LEADER_HINT: Final = (
    "Try again, or another node. If it lasts, see `rt status`: a majority of the nodes must run."
)


class StateFollower:
    def __init__(
        self,
        on_snapshot: Callable[[list[WritePlan] | None], None],
        on_applied: Callable[[Command, Outcome], None],
    ) -> None:
        """`on_snapshot` gets the plans; None if the restarted control process is behind this state."""
        self.index = 0
        self.epoch = 0
        """The control process's epoch at its last snapshot: see `rt.cluster_epoch`."""
        self.state: SequencerState | None = None
        """None before the first snapshot."""
        self.standing = pb.Standing()
        self.is_caught_up = False
        """Whether everything committed in earlier terms was applied since the last snapshot."""
        self._on_snapshot, self._on_applied = on_snapshot, on_applied

    @property
    def joined_state(self) -> SequencerState:
        """The state; `Unreachable` before the node has joined its cluster."""
        if self.state is None or not any(self.state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        return self.state

    @property
    def is_leading(self) -> bool:
        """Whether this node's control process leads, as it said last."""
        return bool(self.standing.leader) and self.standing.leader == self.standing.node

    def voters(self) -> KnownNodes | None:
        """The voters, for clients. None if the address of a voter is not known or not valid. Then all voters
        are left out, because clients count their majority with this list.
        """
        if not self.standing.members_version:
            return NO_NODES
        voters = [(one.name, one.address) for one in self.standing.nodes if not one.is_learner]
        if not all(address for _, address in voters):
            return None
        try:
            nodes = tuple(KnownNode(name, str(parse_endpoint(address))) for name, address in voters)
            return KnownNodes(nodes, self.standing.members_version)
        except (InvalidOption, ValueError) as error:
            logger.warning("members_not_named error=%r", str(error))
            return None

    def session(self, session_id: int) -> Session | None:
        return None if self.state is None else self.state.sessions.get(session_id)

    def on_message(self, message: pb.ToData, state: SequencerState | None = None) -> None:
        """Handle a message of the control process. `rt.FormatError`, `rt.UnknownVersion`.

        `state`: the state of the snapshot in the message, if the caller has decoded it.
        """
        match message.WhichOneof("kind"):
            case "snapshot":
                self._on_state(message.snapshot, state or decode_state(message.snapshot.state))
            case "applied":
                applied = message.applied
                if self.state is None or applied.index != self.index + 1:
                    return  # Sent before a snapshot that has not arrived yet.
                self.index = applied.index
                command = decode_command(applied.command)
                self._on_applied(command, apply(self.state, command))
            case "standing":
                self.standing = message.standing
                self.is_caught_up = message.standing.is_caught_up

    def _on_state(self, snapshot: pb.ControlSnapshot, state: SequencerState) -> None:
        self.is_caught_up = False
        self.epoch = snapshot.epoch_id
        known = self.state
        if known is not None and known.cluster == state.cluster and snapshot.index < self.index:
            self._on_snapshot(None)
            return
        self.index, self.state = snapshot.index, state
        self._on_snapshot([decode_write_plan(plan) for plan in snapshot.plans])
