"""Requests of operators: each is executed once, or never, by a time that is fixed when the request is made.

Pure. A request may be late, because it waited for a leader, or was cut off with the node that received it. So
it waits in the state until the leader decides: the leader knows the nodes' clocks. Invariants:
- A request is executed at most once, however often it is in the log.
- It is executed only if the leader decided so before the request's time ended.

Consensus bounds the delay of the decision itself: if a decision was logged when all nodes stopped, it is
applied when they continue. The time is taken from the clocks of a majority, and never goes back in the state.
If the clocks jumped ahead and were corrected, requests from the time in between may be executed later, by at
most that jump.
"""

from __future__ import annotations

from collections.abc import Iterator

from sequencer.state.apply_result import CommandRejected, NotWaiting, Outcome, RequestLapsed, RequestWaits
from sequencer.state.command_codec import decode_operation, encode_command
from sequencer.state.commands import DecideRequest, Operation, SubmitRequest
from sequencer.state.state import ASKED_MAX, PendingRequest, SequencerState


def ask(state: SequencerState, command: SubmitRequest) -> Outcome:
    """Record a request as waiting, unless it waits already or was decided."""
    if command.id in state.asked:
        return RequestWaits()
    if command.until_ns < state.decided_ns:
        return RequestLapsed(may_be_done=True)
    if len(state.asked) >= ASKED_MAX:
        return CommandRejected(f"{ASKED_MAX} requests of operators wait, or were decided just now")
    state.asked[command.id] = PendingRequest(command.until_ns, encode_command(command.operation))
    return RequestWaits()


def decide(state: SequencerState, command: DecideRequest) -> Operation | RequestLapsed | CommandRejected:
    """Return the operation to execute now, or why it is not executed.

    Decided requests whose time is over are dropped from the state.
    """
    asked = state.asked.get(command.id)
    if asked is None:
        return NotWaiting("that request does not wait, or was forgotten")
    now_ns = max(state.decided_ns, command.at_ns)
    if not asked.command and asked.until_ns >= now_ns:
        return NotWaiting("that request was decided before")
    state.decided_ns = now_ns
    for request in [request for request, one in state.asked.items() if one.until_ns < now_ns]:
        if state.asked[request].command and request != command.id:
            continue  # Its caller must still get the outcome.
        del state.asked[request]
    if asked.until_ns < now_ns:
        return RequestLapsed(may_be_done=not asked.command)
    state.asked[command.id] = asked._replace(command=b"")
    if command.refused:
        return CommandRejected(command.refused)
    return decode_operation(asked.command)


def to_decide(state: SequencerState, now_ns: int) -> Iterator[bytes]:
    """The ids of requests that the leader decides now: all that wait, and one decided request that can be
    dropped.
    """
    over = None
    for request, one in state.asked.items():
        if one.command:
            yield request
        elif one.until_ns < now_ns:
            over = request
    if over is not None:
        yield over
