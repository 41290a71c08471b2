"""Client of the nodes' REST interface through the gRPC port, `rt.v1.Rest`.

A node's answer is returned with any status; `check` turns it into an error.

Invariants:
- A change is sent to another node only if nothing was sent to the previous one, so it is not done twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from google.protobuf.message import DecodeError

from rt.endpoints import check_endpoints
from rt.errors import CertificateError, ProtocolViolation, RtError, Timeout
from rt.net.connect_probe import probe_endpoint
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import Unreachable, asking, decode_error
from rt.net.tls import TLS
from rt.v1 import rest_pb2 as pb

# isort: split
import grpc

REST_METHOD: Final = "/rt.v1.Rest/Call"
TARGET_BYTES_MAX: Final = 4096
"""Limit for path and query, the same as for an HTTP request line."""
ANSWER_BYTES_MAX: Final = 64 * 2**20
"""The history of a log has some 10,000 entries of a few hundred bytes."""
TIMEOUT_S: Final = 15.0
_WHY_S: Final = 2.0
_READING: Final = ("GET", "HEAD")


class RestResponse(NamedTuple):
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
    connect_timeout_s: float = TIMEOUT_S,
) -> RestResponse:
    """Ask the nodes at `endpoints` ("host:port") in turn. Return the first answer, with any status.

    `target` is path and query, `body` JSON. If there is no connection to a node after `connect_timeout_s`,
    the next node is asked; `timeout_s` is the limit for a node's answer. Without `tls` the endpoints must be
    on loopback (`ValueError`).

    Raises `rt.InvalidOption` for a malformed endpoint. If no node answers, raises the error of the node if
    there is only one, else `Unreachable` with the errors of all nodes.
    """
    endpoints = check_endpoints(endpoints, is_required=True)
    failures: list[RtError] = []
    for endpoint in endpoints:
        async with open_channel(
            endpoint, tls, insecure=tls is None, message_bytes_max=ANSWER_BYTES_MAX
        ) as channel:
            is_reading = method in _READING
            if (why := await _why_unconnected(channel, connect_timeout_s)) is not None:
                if tls is not None and type(why) in {Unreachable, CertificateError}:
                    # gRPC's error names only one of several addresses.
                    why = await probe_endpoint(endpoint, tls) or why
                failures.append(why)
                continue
            try:
                return await _call(channel, method, target, body, timeout_s)
            except RtError as error:
                if not is_reading:
                    if error.hint is None and isinstance(error, Timeout | Unreachable):
                        error.hint = "The change may have been made: check before you retry."
                    raise
                failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise Unreachable(
        "no node answers", got="; ".join(map(str, failures)), hint="Check the nodes and the endpoints."
    ) from failures[-1]


def check(answer: RestResponse, *, where: object = None) -> RestResponse:
    """Return `answer`, or raise its error, an `rt.RtError` or a subclass.

    `where` names the node, for an error that has no `where` of its own.
    """
    if answer.status < 400:
        return answer
    error = error_in(answer) or RtError("the node rejects the request", got=f"HTTP status {answer.status}")
    if error.where is None:
        error.where = where
    raise error


async def ask_next_number(endpoints: Sequence[str], tls: TLS | None, dedup_id: str) -> int:
    """The number of the next message to merge under a dedup id; 0 if it is unknown."""
    answer = await ask(endpoints, tls, "GET", f"/dedup-rt-clients?name={quote(dedup_id)}")
    found = json.loads(check(answer).body)
    return int(found[0]["wanted"]) if found else 0


def error_in(answer: RestResponse) -> RtError | None:
    """The error in an answer of any status; None if it has none."""
    if answer.status < 400:
        return None
    try:
        content = json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return decode_error(json.dumps({**content, "class": content.get("error")}).encode())


async def _call(
    channel: Channel, method: str, target: str, body: bytes | None, timeout_s: float
) -> RestResponse:
    request = pb.RestRequest(method=method, target=target, body=body or b"")
    ask_once: Any = channel.get().unary_unary(REST_METHOD)
    with asking(channel.target):
        data = await ask_once(request.SerializeToString(), timeout=timeout_s)
    try:
        reply = pb.RestReply.FromString(data)
    except DecodeError as error:
        raise ProtocolViolation("a node answers what is no reply", where=channel.target) from error
    return RestResponse(reply.status, reply.content_type, reply.body)


async def _why_unconnected(channel: Channel, seconds: float) -> RtError | None:
    """Return None if there is a connection within `seconds`, else the reason as an error."""
    try:
        async with asyncio.timeout(seconds):
            if await _connects(channel):
                return None
    except TimeoutError:
        return Timeout("no connection in time", where=channel.target, expected=f"within {seconds:g} s")
    try:  # Only a call reports the reason. This call changes nothing.
        await _call(channel, "GET", "/liveness", None, _WHY_S)
    except RtError as error:
        return error
    return None  # The connection was slow.


async def _connects(channel: Channel) -> bool:
    """Return True when there is a connection, False after an attempt has failed."""
    present = channel.get()
    state = present.get_state(try_to_connect=True)
    while state not in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
        await present.wait_for_state_change(state)
        state = present.get_state(try_to_connect=True)
    return state is grpc.ChannelConnectivity.READY
