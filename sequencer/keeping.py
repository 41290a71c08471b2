"""What is kept of the merged log, and for whom: trims and holds.

Pure. The law: what is trimmed is a prefix of the sealed segments, never the growing one; a hold only moves
forward. A hold asks for segments to be kept: that they are is up to who proposes trims (`archiver`).
"""

from __future__ import annotations

from itertools import takewhile

from rt.log.segment import SegmentId
from rt.log.table import TRIMMED_ENTRIES_MAX
from sequencer import commands
from sequencer.outcomes import Held, Outcome, Refused, Released, Trimmed
from sequencer.state import HOLDS_MAX, Hold, State


def trim(state: State, command: commands.Trim) -> Outcome:
    """Trim the sealed segments before a place; of those trimmed long ago even the entries are forgotten."""
    before, growing = SegmentId(command.x, command.y), state.merged.segment
    if growing is None or before > growing:
        return Refused(f"{before.file_name} is beyond the growing merged segment")
    known = sum(1 for _ in takewhile(lambda one: one.is_trimmed, state.segments))
    gone = [one for one in state.segments if not one.is_trimmed and one.id < before]
    if not gone:
        return Refused(f"nothing before {before.file_name} is kept")
    for at, one in enumerate(gone, start=known):
        state.segments[at] = one.trimmed(command.reason, command.trimmed_ns)
    for _ in range(known + len(gone) - TRIMMED_ENTRIES_MAX):
        state.segments.popleft()
    return Trimmed(
        before,
        command.reason,
        command.trimmed_ns,
        state.log_start,
        len(gone),
        sum(one.size_bytes for one in gone),
        tuple(name for name, one in sorted(state.holds.items()) if one.position < gone[-1].end),
    )


def hold(state: State, command: commands.Hold) -> Outcome:
    """Note how far a subscriber is."""
    known = state.holds.get(command.name)
    if known is None and len(state.holds) >= HOLDS_MAX:
        return Refused(f"{HOLDS_MAX} subscribers hold data back, and {command.name} is one more")
    if known is not None and command.position < known.position:
        return Refused(f"{command.name} has acknowledged up to {known.position}, not {command.position}")
    if command.position > state.position:
        return Refused(f"position {command.position} of {command.name} is beyond {state.position}")
    at_ns = command.at_ns if known is None else max(known.at_ns, command.at_ns)
    state.holds[command.name] = Hold(command.position, at_ns)
    return Held(command.name, command.position)


def release(state: State, command: commands.Release) -> Outcome:
    """Forget a subscriber's hold."""
    if state.holds.pop(command.name, None) is None:
        return Refused(f"{command.name} holds nothing back")
    return Released(command.name)
