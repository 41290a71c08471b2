"""What operators ask for: carried out once, or never, by a time that is known beforehand.

Pure. A request may be late: it waited for a leader, or was cut off with the node that took it. So it only
waits in the state until the leader, which knows the nodes' clocks, decides. Laws. It is carried out once at
most, however often it is in the log; and only by a decision that the leader made before the request's time
was over. How late that decision itself may be is up to consensus: one that was logged when all nodes stopped
is applied when they go on. Time is that of a majority's clocks, and never goes back here: where these jumped
ahead and were set right, requests of the time until they are there again may come later by that jump.
"""

from __future__ import annotations

from collections.abc import Iterator

from sequencer.state.apply_result import CommandRejected, NotWaiting, Outcome, RequestLapsed, RequestWaits
from sequencer.state.command_codec import decode_operation, encode_command
from sequencer.state.commands import DecideRequest, Operation, SubmitRequest
from sequencer.state.state import ASKED_MAX, PendingRequest, SequencerState


def ask(state: SequencerState, command: SubmitRequest) -> Outcome:
    """Have a request wait; one that was heard of before does, or was decided."""
    if command.id in state.asked:
        return RequestWaits()
    if command.until_ns < state.decided_ns:
        return RequestLapsed(may_be_done=True)
    if len(state.asked) >= ASKED_MAX:
        return CommandRejected(f"{ASKED_MAX} requests of operators wait, or were decided just now")
    state.asked[command.id] = PendingRequest(command.until_ns, encode_command(command.operation))
    return RequestWaits()


def decide(state: SequencerState, command: DecideRequest) -> Operation | RequestLapsed | CommandRejected:
    """What is to be carried out now. Requests whose time is over are forgotten, whatever they were."""
    asked = state.asked.get(command.id)
    if asked is None:
        return NotWaiting("that request does not wait, or was forgotten")
    now_ns = max(state.decided_ns, command.at_ns)
    if not asked.command and asked.until_ns >= now_ns:
        return NotWaiting("that request was decided before")
    state.decided_ns = now_ns
    for request in [request for request, one in state.asked.items() if one.until_ns < now_ns]:
        if state.asked[request].command and request != command.id:
            continue  # Whoever asked is to hear of it.
        del state.asked[request]
    if asked.until_ns < now_ns:
        return RequestLapsed(may_be_done=not asked.command)
    state.asked[command.id] = asked._replace(command=b"")
    return decode_operation(asked.command)


def to_decide(state: SequencerState, now_ns: int) -> Iterator[bytes]:
    """The ids of what the leader decides now, at that time: what waits, and one of what can be forgotten."""
    over = None
    for request, one in state.asked.items():
        if one.command:
            yield request
        elif one.until_ns < now_ns:
            over = request
    if over is not None:
        yield over
