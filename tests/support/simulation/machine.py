"""The commands of a simulation, and the state machine they go to.

Each command names who proposed it and as which one, so that a checker can tell what is lost, doubled or out
of order. The machine's state is a running checksum, which two different histories do not share, the force
that its history began with, and the leases that are held.
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
"""Behind the head of a command about leases; no other has it there."""
FORCES = (1 << 64) - 1
"""The run that forces are of; their sequence names the history that begins with one."""


class Command(NamedTuple):
    """The `sequence`-th command, from 1, that was proposed in a run; runs have numbers of their own."""

    run: int
    sequence: int

    def encode(self, size: int, lease: bytes = b"") -> bytes:
        """`size` bytes, or as few as it takes; one about leases has those bytes."""
        head = _COMMAND.pack(*self)
        if lease:
            return head + _IS_LEASE + lease
        return head + bytes([self.sequence % 251]) * max(0, size - len(head))


def decode_command(content: bytes) -> Command:
    """Who proposed it."""
    return Command(*_COMMAND.unpack_from(content))


def lease_command(content: bytes) -> commands.Command | None:
    """What it says of leases."""
    at = _COMMAND.size + len(_IS_LEASE)
    return command_codec.decode_command(content[at:]) if content[_COMMAND.size : at] == _IS_LEASE else None


class Watcher(Protocol):
    """Who sees what a machine does."""

    def on_apply(self, machine: Machine, index: int, command: bytes) -> None:
        """The command is about to be applied."""

    def on_applied(self, machine: Machine) -> None:
        """A command was applied, or the machine restored."""

    def on_lease(self, command: commands.Command, outcome: Outcome) -> None:
        """A command about leases was applied."""


class Machine:
    """A state machine (`sequencer.raft.model.api.StateMachine`). `padding` bytes make its snapshot large.

    Only one that `has_leases` says anything of them in its snapshots.
    """

    def __init__(self, watcher: Watcher, padding: int, *, has_leases: bool = False) -> None:
        self.index = 0
        self.chain = 0
        self.line = 0
        """The history that it is of: 0 the first, else the force that it began with."""
        self.leases = SequencerState(bytes(16))
        """Of which it keeps the leases, as the sequencer does."""
        self._has_leases = has_leases
        self._watcher = watcher
        self._padding = padding

    def apply(self, index: int, command: bytes) -> None:
        """Take the next command."""
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
        """What encodes the state as it is."""
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
        """It is of one version."""

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        """Become an earlier state."""
        self.index, self.chain, self.line = _STATE.unpack_from(state) if state else (0, 0, 0)
        assert self.index == index, (self.index, index)
        self.leases = SequencerState(bytes(16))
        if state and self._has_leases:
            start = _STATE.size + _LEASES.size
            (size,) = _LEASES.unpack_from(state, _STATE.size)
            self.leases = decode_state(state[start : start + size])
        self._watcher.on_applied(self)
