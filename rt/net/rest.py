"""Asking nodes their REST through the gRPC port: the other end of `rt.v1.Rest`.

Laws. What a node answers is handed out as it is, whatever its status; `check` makes an error of it. What
changes something is asked of another node only if nothing was sent to the one before: it might be done twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from rt.errors import ProtocolViolation, RtError, Timeout
from rt.net.rpc import Channel, open_channel
from rt.net.rpc_errors import Unreachable, asking, decode_error
from rt.net.tls import TLS
from rt.v1 import rest_pb2 as pb

# isort: split
import grpc

REST_METHOD: Final = "/rt.v1.Rest/Call"
TARGET_BYTES_MAX: Final = 4096
"""Of path and query: as long as a line of HTTP may be there."""
ANSWER_BYTES_MAX: Final = 64 * 2**20
"""The history of a log has some 10,000 entries of a few hundred bytes."""
TIMEOUT_S: Final = 15.0
_CONNECT_S: Final = 5.0
_WHY_S: Final = 2.0
_READING: Final = ("GET", "HEAD")


class Answer(NamedTuple):
    """What a node answered; `status` is HTTP's."""

    status: int
    content_type: str
    body: bytes


async def ask(
    endpoints: Sequence[str],
    tls: TLS | None,
    method: str,
    target: str,
    body: bytes | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Ask the nodes at `endpoints` ("host:port") in turn; the first answer, whatever it says.

    `target` is path and query, `body` JSON. Without `tls` the endpoints must be of loopback (`ValueError`).
    Raises why no node answers: the error of the only one, or `Unreachable` that names each.
    """
    if not endpoints:
        raise ValueError("no endpoints: name at least one node, host:port")
    failures: list[RtError] = []
    for endpoint in endpoints:
        async with _channel(endpoint, tls) as channel:
            is_reading = method in _READING
            # What an attempt that is late would deliver all the same is not even begun.
            if not is_reading and (why := await _why_unconnected(channel)) is not None:
                failures.append(why)
                continue
            try:
                return await _call(channel, method, target, body, timeout_s)
            except RtError as error:
                if not is_reading:
                    if error.hint is None and isinstance(error, Timeout | Unreachable):
                        error.hint = "It may have been done: look before you ask again."
                    raise
                failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise Unreachable(
        "no node answers", got="; ".join(map(str, failures)), hint="Each is named with what it met."
    ) from failures[-1]


async def call(
    endpoint: str,
    tls: TLS | None,
    method: str,
    target: str,
    body: bytes | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Ask one node; see `ask`."""
    return await ask([endpoint], tls, method, target, body, timeout_s=timeout_s)


def check(answer: Answer, *, where: object = None) -> Answer:
    """Return `answer` if it is none of an error; else raise what it tells, an `rt.RtError` at least.

    `where` names the node in an error that names no place of its own.
    """
    if answer.status < 400:
        return answer
    error = error_in(answer) or RtError("the node refuses", got=f"HTTP status {answer.status}")
    if error.where is None:
        error.where = where
    raise error


def error_in(answer: Answer) -> RtError | None:
    """The error that an answer tells; None if it tells something else, whatever its status."""
    if answer.status < 400:
        return None
    try:
        told = json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    return decode_error(json.dumps({**told, "class": told.get("error")}).encode())


def _channel(endpoint: str, tls: TLS | None) -> Channel:
    return open_channel(endpoint, tls, insecure=tls is None, message_bytes_max=ANSWER_BYTES_MAX)


async def _call(channel: Channel, method: str, target: str, body: bytes | None, timeout_s: float) -> Answer:
    request = pb.RestRequest(method=method, target=target, body=body or b"")
    ask_once: Any = channel.get().unary_unary(REST_METHOD)
    with asking(channel.target):
        data = await ask_once(request.SerializeToString(), timeout=timeout_s)
    try:
        reply = pb.RestReply.FromString(data)
    except DecodeError as error:
        raise ProtocolViolation("a node answers what is no reply", where=channel.target) from error
    return Answer(reply.status, reply.content_type, reply.body)


async def _why_unconnected(channel: Channel) -> RtError | None:
    """None if there is a connection; else why there is none, as a call is told that changes nothing."""
    if await _connects(channel):
        return None
    try:
        await _call(channel, "GET", "/liveness", None, _WHY_S)
    except RtError as error:
        return error
    return None  # It was slow to come.


async def _connects(channel: Channel) -> bool:
    """Whether there is a connection; False once an attempt has failed, and after some seconds."""
    present = channel.get()
    state = present.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(_CONNECT_S):
            while state not in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
                await present.wait_for_state_change(state)
                state = present.get_state(try_to_connect=True)
    except TimeoutError:
        return False
    return state is grpc.ChannelConnectivity.READY
