"""Requests and replies, independent of the transport. Pure."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct, field

from rt.errors import RtError
from sequencer.rest.base.errors import BadRequest, TooLarge, error_body, http_status
from sequencer.rest.base.fields import BODY_BYTES_MAX

JSON: Final = "application/json"
PARAMETERS_MAX: Final = 64


class Request(Struct, frozen=True):
    """`body` reads the body (raises `TooLarge` above `BODY_BYTES_MAX`); None: there is no body."""

    method: str
    target: str
    """Path and query, percent-encoded: "/log-history?limit=2"."""
    content_type: str = ""
    body: Callable[[], Awaitable[bytes]] | None = None

    @classmethod
    def of(cls, method: str, target: str, body: bytes | None) -> Request:
        """A request that was received completely; its body, if any, counts as JSON."""

        async def read() -> bytes:
            if body is None or len(body) > BODY_BYTES_MAX:
                raise too_large()
            return body

        return cls(method, target) if body is None else cls(method, target, JSON, read)


class Reply(Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    """In addition to those of every response."""


def error_reply(error: RtError) -> Reply:
    """The reply for an error. Does not count it."""
    status = http_status(error)
    headers = {}
    if status == 405:
        headers["Allow"] = str(error.expected)
    if status == 503:
        headers["Retry-After"] = "1"
    return Reply(status, json_bytes(error_body(error)), JSON, headers)


def split_target(target: str) -> tuple[str, list[tuple[str, str]]]:
    """The path and the parameters. Raises `BadRequest` above `PARAMETERS_MAX`."""
    path, _, query = target.partition("#")[0].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMETERS_MAX)
    except ValueError:
        raise BadRequest("too many parameters", where="query", expected=f"at most {PARAMETERS_MAX}") from None
    return unquote(path), pairs


def too_large() -> TooLarge:
    return TooLarge("the body is too long", where="body", expected=f"at most {BODY_BYTES_MAX} bytes")


def json_bytes(body: object) -> bytes:
    """One line of JSON, in ASCII."""
    return json.dumps(body, separators=(",", ":"), default=msgspec.to_builtins).encode() + b"\n"
