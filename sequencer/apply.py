"""What a committed command does to the state.

Pure, total and the same on every node: a command that is stale or cannot be changes nothing and says why;
of what an operator asked for it is noted that it was decided.
The law: positions are dense, a message is merged once and in its session's order, and whatever a merged file
holds follows from the command and the state alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from sequencer import leases
from sequencer.commands import (
    Ask,
    Close,
    Command,
    Configure,
    Decide,
    Fence,
    Hold,
    Join,
    Merge,
    Open,
    Release,
    Reset,
    Restore,
    Roll,
    Trim,
)
from sequencer.keeping import hold, release, trim
from sequencer.lease_commands import AcquireLeases, ExpireLeases, ReleaseLeases, RenewLeases
from sequencer.lives import close_life, fence_life, open_life
from sequencer.merges import merge, roll
from sequencer.outcomes import Changed, Joined, Lapsed, Outcome, Refused, Restored
from sequencer.requests import ask, decide
from sequencer.resets import reset
from sequencer.state import NodeDisk, State


def apply(state: State, command: Command) -> Outcome:
    """Do what the command says, or say why not."""
    match command:
        case Merge():
            return merge(state, command)
        case Open():
            return open_life(state, command)
        case Fence():
            return fence_life(state, command)
        case Close():
            return close_life(state, command)
        case Roll():
            return roll(state, command)
        case Configure():
            return _configure(state, command)
        case Join():
            return _join(state, command)
        case Restore():
            return _restore(state, command)
        case Trim():
            return trim(state, command)
        case Hold():
            return hold(state, command)
        case Release():
            return release(state, command)
        case AcquireLeases():
            return leases.acquire(state, command)
        case RenewLeases():
            return leases.renew(state, command)
        case ReleaseLeases():
            return leases.release(state, command)
        case ExpireLeases():
            return leases.expire(state, command)
        case Ask():
            return ask(state, command)
        case Decide():
            decided = decide(state, command)
            return decided if isinstance(decided, Refused | Lapsed) else apply(state, decided)
        case Reset():
            return reset(state, command)
    assert_never(command)


# Configuration


def _configure(state: State, command: Configure) -> Outcome:
    state.configuration = replace(state.configuration, **command.changes)
    return Changed()


# Disks


def _join(state: State, command: Join) -> Outcome:
    known = state.disks.get(command.node)
    if known is not None and known.id == command.disk:
        return Refused(f"the disk of {command.node} has joined")
    state.joins += 1
    # The first one of a node forgot nothing; what is closed is fetched up to its end, whoever lost it.
    is_whole = known is None or not any(session.lives for session in state.sessions.values())
    state.disks[command.node] = NodeDisk(command.disk, state.joins, is_whole)
    return Joined(command.node)


def _restore(state: State, command: Restore) -> Outcome:
    known = state.disks.get(command.node)
    if known is None or known.id != command.disk or known.is_whole:
        return Refused(f"that disk of {command.node} {'is whole' if known else 'has not joined'}")
    state.disks[command.node] = known._replace(is_whole=True)
    return Restored(command.node)
