"""The one history of all machines: the applied commands, and the commands acknowledged to proposers.

The law: every machine applies the same commands in the same order, each once and without a gap. The commands
of each proposer stay in the order in which they were proposed. A completed future names its own command.
"""

from __future__ import annotations

from simulation.machine import FORCES, Machine, decode_command

RESETS = 0
"""The run number of resets. They are proposed until one is applied."""


class Violation(AssertionError):
    """A promise is broken."""


def require(holds: bool, what: str, *details: object) -> None:
    """Raise `Violation` unless it holds."""
    if not holds:
        raise Violation(what + ": " + ", ".join(map(repr, details)))


class History:
    """The commands applied anywhere, in all runs (`simulation.machine.Watcher`)."""

    def __init__(self) -> None:
        self.commands: list[bytes] = []
        """The first command has number 1."""
        self.acknowledged = 0
        self._chains = [0]
        self._sequences: dict[int, int] = {}

    def forked(self, index: int) -> History:
        """Return the history of a forced node that has applied this history up to `index`."""
        fork = History()
        fork.commands, fork._chains = self.commands[:index], self._chains[: index + 1]
        fork.acknowledged = self.acknowledged
        for command in fork.commands:
            run, sequence = decode_command(command)
            if run not in {RESETS, FORCES}:
                fork._sequences[run] = sequence
        return fork

    def on_apply(self, machine: Machine, index: int, command: bytes) -> None:
        """Before a machine applies a command: check that it is the next one, and the same on all machines."""
        require(index == machine.index + 1, "commands come out of order", index, machine.index)
        history = self.commands
        if index <= len(history):
            same = history[index - 1] == command
            require(
                same, "machines differ", index, decode_command(command), decode_command(history[index - 1])
            )
            return
        require(index == len(history) + 1, "a gap in the history", index, len(history))
        run, sequence = decode_command(command)
        if run in {RESETS, FORCES}:
            history.append(command)
            return
        wanted = self._sequences.get(run, 0) + 1
        require(
            sequence == wanted, "a command lost, doubled or out of its order", index, (run, sequence), wanted
        )
        self._sequences[run] = sequence
        history.append(command)

    def on_applied(self, machine: Machine) -> None:
        """After a machine applied a command or was restored: check its state against the history."""
        chains = self._chains
        if machine.index == len(chains):
            chains.append(machine.chain)
        require(machine.index < len(chains), "a state from nowhere", machine.index, len(chains))
        require(chains[machine.index] == machine.chain, "machines differ", machine.index)

    def on_acknowledged(self, index: int, command: bytes) -> None:
        """Check that a completed future names its own command."""
        found = self.commands[index - 1] if 0 < index <= len(self.commands) else None
        require(found == command, "a future names another command", index, decode_command(command))
        self.acknowledged += 1
