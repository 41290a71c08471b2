"""The commands of a simulation, and the state machine that applies them.

Each command names its proposer and its number there, so that a checker detects lost, duplicate and reordered
commands. The machine's state has a running checksum, which differs between different histories, the force
that started its history, and the held leases.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from sequencer.state import command_codec, commands
from sequencer.state.apply import apply
from sequencer.state.apply_result import Outcome
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state, encode_state

_COMMAND = struct.Struct("<QQ")
_STATE = struct.Struct("<QIQ")
_LEASES = struct.Struct("<I")
_IS_LEASE = b"\xff"
"""Follows the head of a command about leases. No other command has this byte there."""
FORCES = (1 << 64) - 1
"""The run number of forces. Their sequence names the history that starts with the force."""


class Command(NamedTuple):
    """The `sequence`-th command, from 1, that was proposed in a run. Runs have their own numbers."""

    run: int
    sequence: int

    def encode(self, size: int, lease: bytes = b"") -> bytes:
        """Encode the command in `size` bytes, or more if needed. With `lease`, append these bytes instead."""
        head = _COMMAND.pack(*self)
        if lease:
            return head + _IS_LEASE + lease
        return head + bytes([self.sequence % 251]) * max(0, size - len(head))


def decode_command(content: bytes) -> Command:
    """Return the run and the sequence of a command."""
    return Command(*_COMMAND.unpack_from(content))


def lease_command(content: bytes) -> commands.Command | None:
    """Return the command about leases; None for other commands."""
    at = _COMMAND.size + len(_IS_LEASE)
    return command_codec.decode_command(content[at:]) if content[_COMMAND.size : at] == _IS_LEASE else None


class Watcher(Protocol):
    """Observes the actions of a machine."""

    def on_apply(self, machine: Machine, index: int, command: bytes) -> None:
        """The command is about to be applied."""

    def on_applied(self, machine: Machine) -> None:
        """A command was applied, or the machine restored."""

    def on_lease(self, command: commands.Command, outcome: Outcome) -> None:
        """A command about leases was applied."""


class Machine:
    """A state machine (`sequencer.raft.model.api.StateMachine`). `padding` bytes make its snapshot large.

    Its snapshots contain leases only if it `has_leases`.
    """

    def __init__(self, watcher: Watcher, padding: int, *, has_leases: bool = False) -> None:
        self.index = 0
        self.chain = 0
        self.line = 0
        """Its history: 0 is the first one, otherwise the force with which it started."""
        self.leases = SequencerState(bytes(16))
        """A sequencer's state, of which only the leases are used."""
        self._has_leases = has_leases
        self._watcher = watcher
        self._padding = padding

    def apply(self, index: int, command: bytes) -> None:
        """Apply the next command."""
        self._watcher.on_apply(self, index, command)
        self.index = index
        if decode_command(command).run == FORCES:
            self.line = decode_command(command).sequence
            apply(self.leases, commands.ResetCluster(False, self.line, 0, bytes(16), "n1"))
        self.chain = zlib.crc32(command, self.chain)
        self._watcher.on_applied(self)
        if (lease := lease_command(command)) is not None:
            self._watcher.on_lease(lease, apply(self.leases, lease))

    def snapshot(self) -> Callable[[], bytes]:
        """Return a function that encodes the current state."""
        content = self.digest() + bytes(self._padding)
        return lambda: content

    def digest(self) -> bytes:
        """See `StateMachine.digest`."""
        return _STATE.pack(self.index, self.chain, self.line) + self._lease_bytes()

    def _lease_bytes(self) -> bytes:
        if not self._has_leases:
            return b""
        leases = encode_state(self.leases)
        return _LEASES.pack(len(leases)) + leases

    def check(self, state: bytes) -> None:
        """Accept every state: there is only one version."""

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        """Restore the state of a snapshot."""
        self.index, self.chain, self.line = _STATE.unpack_from(state) if state else (0, 0, 0)
        assert self.index == index, (self.index, index)
        self.leases = SequencerState(bytes(16))
        if state and self._has_leases:
            start = _STATE.size + _LEASES.size
            (size,) = _LEASES.unpack_from(state, _STATE.size)
            self.leases = decode_state(state[start : start + size])
        self._watcher.on_applied(self)
