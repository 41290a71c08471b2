"""The sequencer's state as the data process follows it: a snapshot, then the committed commands.

Pure: one thread uses it. The law: it is the same `apply` as everywhere, so what it says was committed; and it
never goes back, for a fence that was heard of is not forgotten while this process lives.
"""

from __future__ import annotations

from collections.abc import Callable

from rt.v1 import sequencer_pb2 as pb
from sequencer.state.apply import apply
from sequencer.state.apply_result import Outcome
from sequencer.state.command_codec import decode_command
from sequencer.state.commands import Command
from sequencer.state.state import SequencerState, Session
from sequencer.state.state_codec import decode_state
from sequencer.state.write_plan import WritePlan, decode_order


class StateFollower:
    """What the node's consensus has applied, as far as this process has heard of it."""

    def __init__(
        self,
        on_snapshot: Callable[[list[WritePlan] | None], None],
        on_applied: Callable[[Command, Outcome], None],
    ) -> None:
        """`on_snapshot` gets the orders; None if control, begun anew, is behind what is known here."""
        self.index = 0
        self.epoch = 0
        """In which control is, by its last snapshot: see `rt.cluster_epoch`."""
        self.state: SequencerState | None = None
        """None before the first snapshot."""
        self.standing = pb.Standing()
        self.is_caught_up = False
        """Whether all that earlier terms committed was heard behind the last snapshot."""
        self._on_snapshot, self._on_applied = on_snapshot, on_applied

    def session(self, session_id: int) -> Session | None:
        """A session of the state, if there is one."""
        return None if self.state is None else self.state.sessions.get(session_id)

    def on_message(self, message: pb.ToData) -> None:
        """What the control process says. `rt.FormatError`, `rt.UnknownVersion`."""
        match message.WhichOneof("kind"):
            case "snapshot":
                self._on_state(message.snapshot)
            case "applied":
                applied = message.applied
                if self.state is None or applied.index != self.index + 1:
                    return  # Of before a snapshot that is on its way.
                self.index = applied.index
                command = decode_command(applied.command)
                self._on_applied(command, apply(self.state, command))
            case "standing":
                self.standing = message.standing
                self.is_caught_up = message.standing.is_caught_up

    def _on_state(self, snapshot: pb.ControlSnapshot) -> None:
        state = decode_state(snapshot.state)
        self.is_caught_up = False
        self.epoch = snapshot.epoch_id
        known = self.state
        if known is not None and known.cluster == state.cluster and snapshot.index < self.index:
            self._on_snapshot(None)
            return
        self.index, self.state = snapshot.index, state
        self._on_snapshot([decode_order(order) for order in snapshot.orders])
