"""The commands of a simulation, and the state machine they go to.

Each command names who proposed it and as which one, so that a checker can tell what is lost, doubled or out
of order. The machine's state is a running checksum, which two different histories do not share, and the force
that its history began with.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

_COMMAND = struct.Struct("<QQ")
_STATE = struct.Struct("<QIQ")
FORCES = (1 << 64) - 1
"""The life that forces are of; their sequence names the history that begins with one."""


class Command(NamedTuple):
    """The `sequence`-th command, from 1, that was proposed in a life; lives have numbers of their own."""

    life: int
    sequence: int

    def encode(self, size: int) -> bytes:
        """`size` bytes, or as few as it takes."""
        head = _COMMAND.pack(*self)
        return head + bytes([self.sequence % 251]) * max(0, size - len(head))


def decode_command(content: bytes) -> Command:
    """Who proposed it."""
    return Command(*_COMMAND.unpack_from(content))


class Watcher(Protocol):
    """Who sees what a machine does."""

    def on_apply(self, machine: Machine, index: int, command: bytes) -> None:
        """The command is about to be applied."""

    def on_applied(self, machine: Machine) -> None:
        """A command was applied, or the machine restored."""


class Machine:
    """A state machine (`sequencer.raft.consensus.StateMachine`). `padding` bytes make its snapshot large."""

    def __init__(self, watcher: Watcher, padding: int) -> None:
        self.index = 0
        self.chain = 0
        self.line = 0
        """The history that it is of: 0 the first, else the force that it began with."""
        self._watcher = watcher
        self._padding = padding

    def apply(self, index: int, command: bytes) -> None:
        """Take the next command."""
        self._watcher.on_apply(self, index, command)
        self.index = index
        if decode_command(command).life == FORCES:
            self.line = decode_command(command).sequence
        self.chain = zlib.crc32(command, self.chain)
        self._watcher.on_applied(self)

    def snapshot(self) -> Callable[[], bytes]:
        """What encodes the state as it is."""
        content = _STATE.pack(self.index, self.chain, self.line) + bytes(self._padding)
        return lambda: content

    def digest(self) -> bytes:
        """See `StateMachine.digest`."""
        return _STATE.pack(self.index, self.chain, self.line)

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        """Become an earlier state."""
        self.index, self.chain, self.line = _STATE.unpack_from(state) if state else (0, 0, 0)
        assert self.index == index, (self.index, index)
        self._watcher.on_applied(self)
